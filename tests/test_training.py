"""The three scripts from the command to the files, small and on the CPU."""

import io
import json
import os
import shutil
import socket
import sys
import time
import urllib.request

import pytest
import torch
import torchvision
from conftest import LAUNCHER_VARIABLES
from jobs import Job, command, load, records
from PIL import Image

from multi_train_utils import train_eval_utils
from multi_train_utils.distributed_utils import read_environment, select_gpu, set_single_process
from multi_train_utils.options import parse_args
from multi_train_utils.train_eval_utils import progress

LAUNCHERS = [("single", 1), ("launch", 2), ("spawn", 2)]


def run(folder, launcher, processes, *options, status=0, env=None, seconds=240):
    with Job(folder, *command(launcher, processes, *options), env=env) as job:
        assert job.wait(seconds) == status, job.text()
        return job.text()


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "processes"), LAUNCHERS)
def test_a_run_prints_logs_and_saves(flowers, tmp_path, launcher, processes):
    text = run(tmp_path, launcher, processes, "--data-path", str(flowers), "--epochs", "2",
               "--batch-size", "6", "--lr", "0.001")
    lines = text.splitlines()
    for epoch in (0, 1):
        (line,) = [entry for entry in lines if entry.startswith(f"[epoch {epoch}] accuracy: ")]
        assert "/15), loss " in line and " images/s, " in line
    assert lines.count("75 images were found in the dataset.") == 1
    assert f"Learning rate: 0.001 x {processes} processes = {0.001 * processes:g}" in text
    assert lines.count("Using 1 loader workers per process") == 1
    for words in ("backend gloo", "SyncBatchNorm exists on GPUs only: ordinary BatchNorm is used"):
        assert text.count(words) == (processes > 1)
    assert text.count("tensorboard --logdir=runs") == 1
    for rank in range(processes if processes > 1 else 0):
        assert f"rank {rank} of {processes} on " in text
    assert "destroy_process_group" not in text and "Traceback" not in text
    names = sorted(path.name for path in (tmp_path / "weights").iterdir())
    assert names == ["best.pth", "checkpoint.pth", "model-0.pth", "model-1.pth"]
    model = torchvision.models.resnet18(weights=None, num_classes=5)
    model.load_state_dict(load(tmp_path / "weights" / "model-1.pth"), strict=True)
    assert len(list(tmp_path.glob("runs/*/events.out.tfevents*"))) == 1
    indices = json.loads((tmp_path / "class_indices.json").read_text(encoding="utf-8"))
    assert indices["0"] == "daisy" and len(indices) == 5
    for record in records(tmp_path):
        # Both count the images of all processes. Training is the part of an epoch that its rate
        # is over, so no machine can be too slow for this.
        assert record["images_per_second"] * record["seconds"] > 59.9
        assert f" {record['images_per_second']:.0f} images/s, " in text
    rates = [record["learning_rate"] for record in records(tmp_path)]
    assert rates == pytest.approx([0.001 * processes, 0.00055 * processes], abs=1e-9)


def scalars(port, tag):
    """Values of a tag as TensorBoard's own HTTP interface gives them."""
    base = f"http://127.0.0.1:{port}/data/plugin/scalars"
    with urllib.request.urlopen(f"{base}/tags", timeout=10) as answer:
        (run_name,) = json.load(answer)
    with urllib.request.urlopen(f"{base}/scalars?run={run_name}&tag={tag}", timeout=10) as answer:
        return json.load(answer)


@pytest.mark.slow
def test_tensorboard_shows_one_value_per_epoch(flowers, tmp_path):
    run(tmp_path, "single", 1, "--data-path", str(flowers), "--epochs", "2", "--batch-size", "6")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = ("python", "-m", "tensorboard.main", "--logdir", str(tmp_path / "runs"), "--port",
             str(port))
    with Job(tmp_path / "tensorboard", *words):
        end = time.monotonic() + 60
        while True:
            try:
                values = {tag: scalars(port, tag) for tag in ("loss", "accuracy", "learning_rate")}
                if all(len(points) == 2 for points in values.values()):
                    break
            except (OSError, ValueError):
                values = None
            assert time.monotonic() < end, values
            time.sleep(0.5)
    logged = records(tmp_path)
    for tag, points in values.items():
        assert [step for _, step, _ in points] == [0, 1]
        assert [value for *_, value in points] == pytest.approx([r[tag] for r in logged], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("words", "options"), [
    (["python", "-m", "torch.distributed.launch", "--nproc_per_node=2"], []),
    (["python", "-m", "torch.distributed.launch", "--use_env", "--nproc_per_node=2"], []),
    (["torchrun", "--nproc_per_node=2"], ["--local_rank", "0"])])
def test_launchers_that_may_give_the_local_rank_as_an_argument(flowers, tmp_path, words, options):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    small = command("launch", 2, "--data-path", str(flowers), "--epochs", "1", "--batch-size", "6")
    with Job(tmp_path, *words, f"--master_port={port}", *small[3:], *options) as job:
        assert job.wait(240) == 0, job.text()
        assert job.text().count("[epoch 0] accuracy") == 1


@pytest.mark.slow
def test_launch_script_with_plain_python(flowers, tmp_path):
    words = command("launch", 1, "--data-path", str(flowers), "--epochs", "1")[3:]
    with Job(tmp_path, *words) as job:
        assert job.wait(240) == 0, job.text()
        text = job.text()
    assert "Not using distributed mode" in text
    assert "torchrun --standalone --nproc_per_node=" in text
    assert "0.001 x 1 processes = 0.001" in text


@pytest.mark.slow
def test_slurms_environment(flowers, tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    words = command("launch", 2, "--data-path", str(flowers), "--epochs", "1")[3:]
    env = {"SLURM_NTASKS": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    with Job(tmp_path, *words, env=env | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}) as first:
        with Job(tmp_path / "second", *words, "--output-dir", str(tmp_path), env=env | {
                "SLURM_PROCID": "1", "SLURM_LOCALID": "1"}) as second:
            assert first.wait(240) == 0 and second.wait(60) == 0, first.text() + second.text()
            assert "0.001 x 2 processes = 0.002" in first.text()


BAD_ENVIRONMENTS = [
    ({"RANK": "0", "WORLD_SIZE": "1"}, "LOCAL_RANK"),
    ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}, "MASTER_ADDR"),
    ({"RANK": "0", "WORLD_SIZE": "two", "LOCAL_RANK": "0"}, "WORLD_SIZE='two'"),
    ({"RANK": "3", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "RANK=3 does not fit WORLD_SIZE=2"),
    ({"WORLD_SIZE": "4"}, "RANK and LOCAL_RANK"),
    ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost",
      "MASTER_PORT": "99999"}, "MASTER_PORT=99999: ports are numbered"),
    ({"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, "SLURM_NTASKS")]


def environment(monkeypatch, variables):
    """This process's environment with these variables of a launcher and no others."""
    for name in LAUNCHER_VARIABLES:
        # Set before it is deleted, so that what the test itself sets there goes again.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(("variables", "words"), BAD_ENVIRONMENTS)
def test_incomplete_environments_are_named(variables, words, monkeypatch):
    environment(monkeypatch, variables)
    with pytest.raises(ValueError, match=words):
        read_environment()


@pytest.mark.slow
def test_a_bad_environment_ends_the_script_with_one_line(run_script):
    done = run_script("train_multi_gpu_using_launch.py", "--device", "cpu", status=1,
                      env={"RANK": "0", "WORLD_SIZE": "two", "LOCAL_RANK": "0"})
    assert done.stdout == "" and done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: WORLD_SIZE='two'")


def test_the_launchers_variable_wins_over_its_argument(monkeypatch):
    group = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    environment(monkeypatch, group | {"LOCAL_RANK": "1"})
    assert read_environment(local_rank_argument=0)[:3] == (1, 2, 1)
    environment(monkeypatch, group)
    assert read_environment(local_rank_argument=1)[:3] == (1, 2, 1)


def test_an_address_that_the_user_gave_is_kept_under_slurm(monkeypatch):
    environment(monkeypatch, {
        "SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "7",
        "SLURM_STEP_NODELIST": "n[1-2]", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29777"})
    assert read_environment()[:3] == (1, 2, 1)
    assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == ("10.0.0.1", "29777")


def test_slurm_node_lists(monkeypatch):
    from multi_train_utils import distributed_utils as du
    for nodes, name in (("gpu[003-010]", "gpu003"), ("gpu[3,5-7],login", "gpu3"), ("a,b", "a"),
                        ("one", "one"), ("rack1-n[07-09]-ib", "rack1-n07-ib")):
        assert du.first_host(nodes) == name
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (("PROCID", "5"), ("NTASKS", "8"), ("LOCALID", "1"), ("JOB_ID", "4711"),
                        ("STEP_NODELIST", "n[1-2]"), ("STEP_TASKS_PER_NODE", "4(x2)")):
        monkeypatch.setenv("SLURM_" + name, value)
    try:
        assert du.read_environment() == (5, 8, 1, 4)
        assert os.environ["MASTER_ADDR"] == "n1" and os.environ["MASTER_PORT"].isdecimal()
    finally:
        os.environ.pop("MASTER_ADDR", None)
        os.environ.pop("MASTER_PORT", None)


def test_cuda_without_a_gpu_offers_the_cpu(tmp_path, run_script):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    for words in (["train_single_gpu.py"], ["train_multi_gpu_using_spawn.py", "--world-size", "2"]):
        result = run_script(*words, status=1)
        assert "CUDA is not available" in result.stderr
        assert result.stderr.count("--device cpu") == 1 and "Traceback" not in result.stderr


@pytest.mark.slow
def test_cuda_without_a_gpu_under_torchrun(run_script):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    result = run_script("torchrun", "--standalone", "--nproc_per_node=2",
                        "train_multi_gpu_using_launch.py", "--device", "cuda", status=1)
    ours = [line for line in result.stderr.splitlines() if line.startswith("error")]
    assert len(ours) == 1 and "CUDA is not available" in ours[0] and "--device cpu" in ours[0]
    assert "accuracy" not in result.stdout


def pretend_gpus(monkeypatch, visible):
    """So many GPUs for the code under test; returns a list of each time that it looked."""
    looked = []

    def count():
        looked.append(visible)
        return visible

    monkeypatch.setattr(torch.cuda, "is_available", lambda: count() > 0)
    monkeypatch.setattr(torch.cuda, "device_count", count)
    return looked


@pytest.mark.parametrize(("text", "visible"), [
    ("cuda", 0), ("0", 0), ("cuda:9", 0), ("cuda:9", 1), ("1", 1)])
def test_a_gpu_that_is_not_there_is_named_as_it_was_asked_for(text, visible, monkeypatch):
    looked = pretend_gpus(monkeypatch, visible)
    with pytest.raises((OSError, ValueError), match=f"--device {text}: .*--device cpu"):
        select_gpu(text, 0, 1)
    assert looked
    if visible:  # and the one that is there is taken
        assert select_gpu("0", 0, 1) == select_gpu("cuda", 0, 1) == 0


def test_auto_takes_the_cpu_where_there_is_nothing_else(monkeypatch):
    looked = pretend_gpus(monkeypatch, 0)
    args = parse_args("single", ["--device", "auto"])
    set_single_process(args)
    assert (args.device, args.gpu, args.world_size) == ("cpu", None, 1)
    assert looked


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "processes"), LAUNCHERS)
def test_bad_input_is_said_once(flowers, tmp_path, launcher, processes):
    text = run(tmp_path / "count", launcher, processes, "--data-path", str(flowers),
               "--num_classes", "7", status=1)
    ours = text.split("torch.distributed.elastic")[0] if launcher == "launch" else text
    assert ours.count("--num_classes is 7, but the data has 5") == 1 and "tulips" in text
    assert not (tmp_path / "count" / "weights").exists()


@pytest.mark.slow
def test_unreadable_images_are_all_listed_or_left_out(flowers, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(flowers, data)
    files = sorted((data / "daisy").glob("*.jpg"))
    files[0].write_bytes(b"no image at all")
    files[1].write_bytes(files[1].read_bytes()[:300])
    text = run(tmp_path / "stop", "single", 1, "--data-path", str(data), status=1)
    assert str(files[0]) in text and "--skip-bad-images" in text and "Traceback" not in text
    text = run(tmp_path / "skip", "launch", 2, "--data-path", str(data), "--epochs", "1",
               "--batch-size", "6", "--skip-bad-images")
    assert "2 bad images are left out" in text
    assert str(files[0]) in text and str(files[1]) in text
    cut = run(tmp_path / "cut", "single", 1, "--data-path", str(cut_only(data, files)), "--epochs",
              "1", "--batch-size", "6", status=1)
    assert files[1].name in cut and "Traceback" not in cut


def cut_only(data, files):
    """The set with one file whose header is whole: met in training, or in validation."""
    files[0].unlink()
    Image.effect_noise((200, 200), 90).convert("RGB").save(files[1])
    content = files[1].read_bytes()
    files[1].write_bytes(content[:len(content) // 2])
    return data


@pytest.mark.slow
def test_too_few_images_for_a_global_batch(flowers, tmp_path):
    text = run(tmp_path, "launch", 2, "--data-path", str(flowers), "--batch-size", "40", status=1)
    assert "60 training images are fewer than one global batch, 80" in text


@pytest.mark.slow
def test_no_bar_in_a_log_file_even_at_a_batch_of_one(flowers, tmp_path):
    text = run(tmp_path, "launch", 2, "--data-path", str(flowers), "--epochs", "2",
               "--batch-size", "1", "--image-size", "64")
    lines = text.replace("\r", "\n").splitlines()
    assert len([line for line in lines if "it/s" in line or "%|" in line]) == 0
    assert len([line for line in lines if line.startswith("[epoch ")]) == 2
    assert len(lines) < 40  # 60 steps were taken


def test_only_rank_0_draws_a_bar_and_only_for_a_person(monkeypatch):
    items, terminal = [1, 2], io.StringIO()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert progress(items, "text", 2) is items
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    assert progress(items, "text", 2) is not items
    monkeypatch.setattr(train_eval_utils, "is_main_process", lambda: False)
    assert progress(items, "text", 2) is items


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["launch", "spawn"])
def test_temporary_folder_is_left_empty_and_its_names_do_not_matter(flowers, tmp_path, launcher):
    temporary = tmp_path / "tmp"
    (temporary / "initial_weights.pt").mkdir(parents=True)
    run(tmp_path / "out", launcher, 2, "--data-path", str(flowers), "--epochs", "1",
        env={"TMPDIR": str(temporary)})
    # torch leaves a cache folder for its compiler, torchrun one for its logs.
    assert [path.name for path in temporary.iterdir()
            if not path.name.startswith(("torchinductor_", "torchelastic_"))] == [
                "initial_weights.pt"]


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "processes"), LAUNCHERS)
def test_an_epoch_of_real_photos(shared_data, tmp_path, launcher, processes):
    """The card's network on the real set, at a small size for the CPU's sake."""
    words = command(launcher, processes, "--data-path", str(shared_data / "flower_photos_256"),
                    "--epochs", "1", "--batch-size", "32", "--model", "resnet34")
    with Job(tmp_path, *words) as job:
        assert job.wait(290) == 0, job.text()
        text = job.text()
    assert "3670 images were found" in text and "2939 images for training." in text
    (record,) = records(tmp_path)
    assert record["total"] == 731
    state = load(tmp_path / "weights" / "model-0.pth")
    assert len(state) == 218
    torchvision.models.resnet34(weights=None, num_classes=5).load_state_dict(state, strict=True)
