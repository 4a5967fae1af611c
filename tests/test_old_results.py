"""What version 7c9f165 wrote still resumes, charts and predicts.

How the inputs were made: tests/results_of_7c9f165/make.py.
"""

import io
import json
import lzma
import shutil
from pathlib import Path

import pytest
import torch
from jobs import load, records

INPUTS = Path(__file__).resolve().parent / "results_of_7c9f165"
OPTIONS = ("--data-path", "flowers", "--device", "cpu", "--model", "resnet18", "--image-size", "32",
           "--batch-size", "6", "--workers", "1", "--freeze-layers", "--lr", "0.003", "--epochs",
           "4", "--resume", "auto")
THREADS = {"OMP_NUM_THREADS": "2"}  # as they were there


@pytest.fixture
def unpacked(flowers, tmp_path):
    """``unpacked("done")``: the folder as the old run left it, with the photos beside."""
    def get(name):
        shutil.copytree(INPUTS / name, tmp_path, dirs_exist_ok=True)
        for path in tmp_path.glob("weights/*.xz"):
            path.with_suffix("").write_bytes(lzma.decompress(path.read_bytes()))
            path.unlink()
        (tmp_path / "flowers").symlink_to(flowers)
        return tmp_path

    return get


@pytest.mark.slow
@pytest.mark.parametrize(("start", "launcher"), [
    ("done", "single"), ("middle", "single"), ("done", "launch")])
def test_a_checkpoint_goes_on_as_it_would_have_there(unpacked, run_script, start, launcher):
    folder = unpacked(start)
    script = {"single": ["train_single_gpu.py"], "launch": [
        "torchrun", "--standalone", "--nproc_per_node=2", "train_multi_gpu_using_launch.py"]}
    done = run_script(*script[launcher], *OPTIONS, env=THREADS, cwd=folder)
    assert "Going on from weights/checkpoint.pth: epoch 2" in done.stdout
    # More epochs; where they are two, more processes, and the option that two have: no more.
    told = [line for line in done.stdout.splitlines() if line.startswith("notice: ")]
    assert len(told) == (start == "done") + 2 * (launcher == "launch"), told
    assert [record["epoch"] for record in records(folder)] == [0, 1, 2, 3]
    reached = torch.load(io.BytesIO(lzma.decompress((INPUTS / "reached.pth.xz").read_bytes())),
                         weights_only=True)[launcher]
    state = load(folder / "weights" / "model-3.pth")
    # Bit for bit on the machine where they were written; others round differently.
    for name, value in reached.items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=1e-4)


@pytest.mark.slow
def test_weights_predict_what_they_did(unpacked, run_script):
    folder = unpacked("done")
    expected = json.loads((INPUTS / "predictions.json").read_text(encoding="utf-8"))
    files = [entry["file"] for entry in expected["files"]]
    done = run_script("predict.py", "--device", "cpu", "--json", "--top-k", "5", *files,
                      env=THREADS, cwd=folder)
    found = json.loads(done.stdout)
    assert (found["classes"], found["image_size"]) == (expected["classes"], 32)
    assert [entry["file"] for entry in found["files"]] == files and len(files) == 15
    for mine, other in zip(found["files"], expected["files"], strict=True):
        assert mine["class"] == other["class"]
        assert mine["probability"] == pytest.approx(other["probability"], abs=1e-4)


@pytest.mark.slow
def test_a_run_folder_is_charted(unpacked, run_script):
    folder = unpacked("done")
    (run_folder,) = (folder / "runs").iterdir()
    run_script("plot_results.py", str(run_folder), "--output-dir", "charts", cwd=folder)
    assert list((folder / "charts").glob("*.png"))
