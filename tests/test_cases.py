"""Whole runs on what people meet: odd files and names, foreign weights, one rank that goes astray.

Small networks on the CPU; what can be seen without a whole run is tested beside its module.
"""

import json
import os
import pickle
import re
import struct
import time
import zlib

import pytest
import torch
import torchvision
from conftest import ROOT
from jobs import Job, command, load, records
from PIL import Image

from multi_train_utils import data_pipeline
from multi_train_utils.data_pipeline import (
    ImageList,
    TrainingImages,
    choose_workers,
    collate,
    readable_images,
)
from multi_train_utils.distributed_utils import set_single_process
from multi_train_utils.options import parse_args
from multi_train_utils.safety.guard import Guard
from multi_train_utils.trainer import read_images
from utils import allowed_cpus

CHINESE = "\u90c1\u91d1\u9999"  # "tulip"
RED, BLUE = (200, 30, 30), (30, 30, 200)
ONE_EPOCH = ("--epochs", "1", "--batch-size", "4")


def run(folder, words, status=0, env=None):
    """The output of a command that must end with ``status``."""
    with Job(folder, *words, env=env) as job:
        assert job.wait(240) == status, job.text()
        return job.text()


def ours(text):
    """The output without torchrun's report, which repeats our message."""
    return text.split("torch.distributed.elastic")[0]


def draw(folder, *names, color=RED, side=40):
    """A picture under each of the names in a new folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(names):
        image = Image.new("RGB", (side, side), color)
        image.paste((250, 250, 250), (number % 5 * 8, 0, number % 5 * 8 + 8, side))
        image.save(folder / name)
    return folder


def one_bit_png(path, width, height):
    """A PNG whose header announces that many pixels; a few kB whatever their number."""
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(
            ">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    rows = zlib.compress(b"\0" * (1 + (width + 7) // 8) * 10)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows)
                     + chunk(b"IEND", b""))
    return path


# ---- files -----------------------------------------------------------------------------------

def odd_set(root):
    """Two classes of odd but good files, 31 in all; returns how many of them validate."""
    blue, tulips = draw(root / "far" / "blue", *(f"{i}.jpeg" for i in range(11)), color=BLUE), \
        draw(root / "data" / CHINESE, "a.jpg", "b.JPG", "c.jpeg", "d.JPEG", "e.Jpg", "f.png",
             "g.Png", "h.bmp", "i.webp", "j.tif", "\u56fe \u7247 #1 100%.jpg")
    for mode, color, name in (("L", 128, "grey.png"), ("1", 1, "bit.png"),
                              ("LA", (128, 0), "grey_alpha.png"), ("P", 1, "palette.png"),
                              ("RGBA", (0, 255, 0, 0), "clear.png"), ("I;16", 999, "deep.png"),
                              ("CMYK", (0, 255, 255, 0), "print.jpg")):
        image = Image.new(mode, (40, 40), color)
        options = {"transparency": bytes([0, 255])} if mode == "P" else {}
        image.save(tulips / name, **options)
    for size in ((1, 1), (1, 3000)):
        Image.new("RGB", size, RED).save(tulips / f"thin_{size[1]}.png")
    (root / "data" / "blue").symlink_to(blue)
    (blue / "loop").symlink_to("..")
    (tulips / "gone.jpg").symlink_to(root / "nowhere.jpg")
    draw(root / "data" / ".ipynb_checkpoints", "a.jpg")
    (tulips / ".DS_Store").touch()
    (tulips / "notes.txt").touch()
    return 11 // 5 + 20 // 5


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "env"), [
    ("launch", {"PYTHONIOENCODING": "ascii"}), ("spawn", {"LC_ALL": "C", "PYTHONUTF8": "0"})])
def test_odd_files_and_names_train_like_any_others(tmp_path, launcher, env):
    validating = odd_set(tmp_path)
    words = command(launcher, 2, "--data-path", str(tmp_path / "data"), *ONE_EPOCH)
    text = run(tmp_path / "out", words, env=env | {"MPLBACKEND": "TkAgg", "DISPLAY": ""})
    lines = text.splitlines()
    for line in ("31 images were found in the dataset.",
                 f"{31 - validating} images for training.", f"{validating} images for validation."):
        assert lines.count(line) == 1
    tulips = re.escape(CHINESE.encode("ascii", "backslashreplace").decode())
    assert len(re.findall(f"^Warning: class {tulips}: left out 1 .txt file.$", text, re.M)) == 1
    assert text.count("1 dangling link left out") == 1
    assert text.lower().count("warning: ") == 3  # these two, and that the loop is not searched
    names = json.loads((tmp_path / "out" / "class_indices.json").read_text(encoding="utf-8"))
    assert names == {"0": "blue", "1": CHINESE}
    (record,) = records(tmp_path / "out")
    assert record["total"] == validating
    assert len(list((tmp_path / "out").glob("runs/*/events.out.tfevents*"))) == 1


@pytest.fixture(scope="module")
def cut_set(tmp_path_factory):
    """A set with a JPEG and a PNG that end half-way behind a whole header."""
    root = tmp_path_factory.mktemp("cut") / "data"
    for name, color in (("blue", BLUE), ("red", RED)):
        draw(root / name, *(f"{i}.jpg" for i in range(10)), color=color)
    for path in (root / "red" / "zz_cut.jpg", root / "blue" / "zz_cut.png"):
        Image.effect_noise((200, 200), 90).convert("RGB").save(path)
        content = path.read_bytes()
        path.write_bytes(content[:len(content) // 2])
    return root


@pytest.mark.slow
def test_a_cut_file_ends_all_ranks_and_is_named_once(cut_set, tmp_path):
    text = run(tmp_path, command("launch", 2, "--data-path", str(cut_set), *ONE_EPOCH), status=1)
    named = [line for line in ours(text).splitlines() if "is not a usable image" in line]
    assert len(named) == 1 and named[0].startswith("error (rank ")
    assert any(str(cut_set / name) in named[0] for name in ("red/zz_cut.jpg", "blue/zz_cut.png"))
    assert "[epoch 1]" not in text


@pytest.mark.slow
def test_bad_files_are_left_out_counted_and_named(cut_set, tmp_path):
    bomb = one_bit_png(cut_set / "red" / "zz_bomb.png", 20000, 10000)
    text = run(tmp_path, command("spawn", 2, "--data-path", str(cut_set), *ONE_EPOCH,
                                 "--skip-bad-images"))
    bomb.unlink()
    assert text.count("3 bad images are left out") == 1
    for name in ("red/zz_cut.jpg", "blue/zz_cut.png", "red/zz_bomb.png"):
        assert text.count(str(cut_set / name)) == 1


def single(*words):
    """Options of the single script, made ready, and what the ranks would talk through."""
    args = parse_args("single", ["--device", "cpu", "--weights", "", *words])
    set_single_process(args)
    return args, Guard(args)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_huge_pictures_are_refused_above_the_limit_and_not_below(tmp_path):
    large = str(one_bit_png(tmp_path / "96.png", 12000, 8000))
    bomb = str(one_bit_png(tmp_path / "200.png", 20000, 10000))
    args, control = single()
    train, _ = readable_images(ImageList([large], [0]), ImageList([large], [0]), args, control)
    assert train.sizes == [(12000, 8000)]
    with pytest.raises(ValueError) as caught:
        readable_images(ImageList([large, bomb], [0, 0]), ImageList([], []), args, control)
    for words in ("1 of 2 images", bomb, "200000000 pixels", "MAX_IMAGE_PIXELS"):
        assert words in str(caught.value)
    assert large not in str(caught.value)


def test_a_batch_of_one_is_refused_where_batch_norm_would_see_one_value(flowers):
    for size, refused in (("32", True), ("64", False)):
        args, control = single("--data-path", str(flowers), "--batch-size", "1", "--image-size",
                               size)
        if refused:
            with pytest.raises(ValueError, match="--batch-size 1"):
                read_images(args, control)
        else:
            assert len(read_images(args, control)[0]) == 60


# ---- launching -------------------------------------------------------------------------------

@pytest.mark.slow
def test_two_torchrun_jobs_at_once(flowers, tmp_path):
    words = command("launch", 2, "--data-path", str(flowers), *ONE_EPOCH)
    with Job(tmp_path / "one", *words) as one, Job(tmp_path / "two", *words) as two:
        assert one.wait(240) == two.wait(240) == 0, one.text() + two.text()
    assert [len(records(tmp_path / name)) for name in ("one", "two")] == [1, 1]


# As on macOS and Windows: loader workers are started, not forked.
SPAWNED_WORKERS = """
import multiprocessing, sys
from multi_train_utils import data_pipeline
from multi_train_utils.options import parse_args
from multi_train_utils.safety.ending import run
from train_single_gpu import main
if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    data_pipeline.worker_context = lambda workers: None
    run(main, parse_args("single"))
"""


@pytest.mark.slow
def test_workers_that_are_spawned_and_a_layer_that_is_not_frozen(flowers, tmp_path):
    """One run for all that one process can show, as runs take seconds.

    Its batches leave a last one of a single image, which is dropped.
    """
    (tmp_path / "spawned.py").write_text(SPAWNED_WORKERS, encoding="utf-8")
    torch.manual_seed(0)
    given = torchvision.models.resnet18(num_classes=5).state_dict()
    torch.save(given, tmp_path / "given.pth")
    _, *options = command("single", 1, "--data-path", str(flowers), "--epochs", "1",
                          "--batch-size", "59", "--weights", str(tmp_path / "given.pth"),
                          "--freeze-layers", "False", "--lr", "0.01", "--device", "auto")
    text = run(tmp_path, ["python", "-W", "default::DeprecationWarning",
                          str(tmp_path / "spawned.py"), *options],
               env={"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""})
    assert "Training on cpu (CPU)" in text and "122 of 122 tensors loaded" in text
    assert not re.search(rf"^{re.escape(str(ROOT))}/\S+\.py:\d+: DeprecationWarning", text, re.M)
    saved = load(tmp_path / "weights" / "model-0.pth")
    assert (saved["conv1.weight"] - given["conv1.weight"]).abs().max() > 1e-6
    assert saved["bn1.num_batches_tracked"] == 1


def test_what_a_worker_is_given_can_be_pickled(flowers):
    """Else workers could not be started where there is no fork."""
    paths = sorted(map(str, (flowers / "daisy").iterdir()))
    dataset = TrainingImages(ImageList(paths, [0] * len(paths)), 32, seed=0)
    again, join = pickle.loads(pickle.dumps((dataset, collate)))
    assert torch.equal(join([again[0, 1]])[0][0], dataset[0, 1][0])


@pytest.mark.parametrize(("cpus", "processes", "workers"), [
    (1, 1, 1), (1, 2, 0), (3, 2, 1), (16, 2, 8), (64, 2, 8), (64, 16, 4)])
def test_workers_share_the_allowed_cpus(monkeypatch, capsys, cpus, processes, workers):
    asked = []

    def allowed():
        asked.append(cpus)
        return cpus

    monkeypatch.setattr(data_pipeline, "allowed_cpus", allowed)
    monkeypatch.setattr(data_pipeline.os.path, "isdir", lambda path: False)  # of any /dev/shm
    args, _ = single()
    args.local_world_size = processes
    assert choose_workers(args) == workers and asked
    assert capsys.readouterr().out == f"Using {workers} loader workers per process\n"
    args.workers = 5
    assert choose_workers(args) == 5


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs CPU affinity")
def test_allowed_cpus_are_those_of_this_process(monkeypatch, tmp_path):
    monkeypatch.setattr("utils._CGROUPS", tmp_path)  # these tests may run in a small container
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert allowed_cpus() == 1
    finally:
        os.sched_setaffinity(0, before)
    assert allowed_cpus() == len(before)


# ---- ranks -----------------------------------------------------------------------------------

# Runs the launch script. Each rank notes which of the job's files it opens for writing and which
# seeds its loader workers have; RUINED is the rank whose second loss is not a number.
WATCHED = """
import os, runpy, sys
import torch
from multi_train_utils.data_pipeline import TrainingImages
from multi_train_utils.train_eval_utils import EpochMeter
rank = os.environ["RANK"]
def note(*words):
    log = os.open(os.environ["NOTES"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(log, (" ".join(map(str, (rank, *words))) + "\\n").encode())
    os.close(log)
def opened(event, args):
    if event == "open" and isinstance(args[0], (str, bytes)) and set(args[1] or "") & set("wxa"):
        name = os.path.basename(os.fsdecode(args[0]))
        if "class_indices" in name or "events.out" in name:
            note("wrote", name)
sys.addaudithook(opened)
get = TrainingImages.__getitem__
def seeded(self, key):
    note("seed", torch.initial_seed())
    return get(self, key)
TrainingImages.__getitem__ = seeded
add = EpochMeter.add
def ruined(self, loss, images):
    if rank == os.environ.get("RUINED") and len(self.batch_sizes) == 1:
        print("planted: a loss that is no number", flush=True)
        loss = loss * float("nan")
    add(self, loss, images)
EpochMeter.add = ruined
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def watched(folder, processes, data, **env):
    """(words, environment, file of notes) of a run under WATCHED."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "watched.py").write_text(WATCHED, encoding="utf-8")
    words = command("launch", processes, "--data-path", str(data), *ONE_EPOCH)
    words.insert(3, str(folder / "watched.py"))
    words[4] = str(ROOT / words[4])
    notes = folder / "notes.txt"
    return words, {"NOTES": str(notes), "PYTHONPATH": str(ROOT)} | env, notes


@pytest.mark.slow
def test_a_loss_that_one_rank_alone_finds_bad_ends_all(flowers, tmp_path):
    words, env, _ = watched(tmp_path, 2, flowers, RUINED="1")
    text = ours(run(tmp_path, words, status=1, env=env))
    assert text.count("planted: a loss that is no number") == 1
    assert text.count("the loss is nan") == 1
    assert re.search(r"^error \(rank 1 of 2 .*epoch 0, step 1: the loss is nan", text, re.M)
    assert "accuracy:" not in text and "destroy_process_group" not in text
    assert not list((tmp_path / "weights").glob("*.pth"))


@pytest.mark.slow
def test_one_rank_writes_and_each_has_random_numbers_of_its_own(flowers, tmp_path):
    words, env, notes = watched(tmp_path, 4, flowers)
    with Job(tmp_path, *words, env=env) as job:
        seen = set()
        while job.process.poll() is None:
            path = tmp_path / "class_indices.json"
            seen.update([path.read_bytes()] if path.exists() else [])
            time.sleep(0.01)
        assert job.wait() == 0, job.text()
        text = job.text()
    assert [len(json.loads(content)) for content in seen] == [5]
    entries = [line.split() for line in notes.read_text().splitlines()]
    wrote = {(rank, name.strip(".").split(".")[0]) for rank, what, name in entries
             if what == "wrote"}
    assert wrote == {("0", "class_indices"), ("0", "events")}
    seeds = {rank: {value for by, what, value in entries if (by, what) == (rank, "seed")}
             for rank in "0123"}
    assert all(seeds.values())
    assert len(set.union(*seeds.values())) == sum(map(len, seeds.values()))
    for line in ("75 images were found in the dataset.", "60 images for training."):
        assert text.count(line) == 1


@pytest.mark.slow
def test_a_wrong_class_count_without_asserts(flowers, tmp_path):
    _, *options = command("single", 1, "--data-path", str(flowers), "--num_classes", "7")
    text = run(tmp_path, ["python", "-O", str(ROOT / "train_single_gpu.py"), *options], status=1)
    assert text.count("--num_classes is 7, but the data has 5") == 1 and "tulips" in text
    assert "Traceback" not in text


# ---- weight files ----------------------------------------------------------------------------

@pytest.mark.slow
def test_a_wrapped_file_with_another_head_trains_on(flowers, tmp_path):
    torch.manual_seed(0)
    given = torchvision.models.resnet18(num_classes=1000).state_dict()
    torch.save({"model": {"module." + name: value for name, value in given.items()}, "epoch": 3},
               tmp_path / "wrapped.pth")
    text = run(tmp_path, command(
        "launch", 2, "--data-path", str(flowers), *ONE_EPOCH, "--lr", "1e-12", "--syncBN", "no",
        "--weights", str(tmp_path / "wrapped.pth")))
    assert text.count("120 of 122 tensors loaded") == 1 and "SyncBatchNorm" not in text
    for line in ("fc.weight is (1000, 512) in the file, (5, 512) in the model",
                 "fc.bias is (1000,) in the file, (5,) in the model"):
        assert text.count(line) == 1
    saved = load(tmp_path / "weights" / "model-0.pth")
    for name, value in given.items():
        if not name.startswith("fc.") and "running" not in name and "tracked" not in name:
            assert (saved[name] - value).abs().max() <= 1e-6, name


class Malice:
    """Pickles into a call that leaves a folder behind."""

    def __reduce__(self):
        return os.mkdir, ("code_ran",)


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "option"), [
    ("single", "--weights"), ("launch", "--weights"), ("spawn", "--resume")])
def test_no_script_runs_the_code_in_a_file(flowers, tmp_path, launcher, option):
    path = tmp_path / "bad.pth"
    torch.save({"conv1.weight": Malice()}, path)
    text = run(tmp_path, command(launcher, 2, "--data-path", str(flowers), *ONE_EPOCH, option,
                                 str(path)), status=1)
    assert len([line for line in ours(text).splitlines()
                if line.startswith("error") and str(path) in line]) == 1
    assert not list(tmp_path.rglob("code_ran")) and not (tmp_path / "class_indices.json").exists()


@pytest.mark.slow
def test_weights_that_are_no_numbers_are_found_at_the_first_step(flowers, tmp_path):
    given = torchvision.models.resnet18(num_classes=5).state_dict()
    given["conv1.weight"].fill_(float("nan"))
    torch.save(given, tmp_path / "nan.pth")
    text = run(tmp_path, command("single", 1, "--data-path", str(flowers), *ONE_EPOCH,
                                 "--weights", str(tmp_path / "nan.pth")), status=1)
    assert text.count("epoch 0, step 0: the loss is nan") == 1 and "Traceback" not in text
    assert "accuracy:" not in text and not list((tmp_path / "weights").glob("*.pth"))
