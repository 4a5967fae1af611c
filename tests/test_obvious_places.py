"""A change in the obvious place takes effect: made by editing the file in a copy of the project."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import clean_environment
from jobs import SMALL, Job, command, load, records, same_tensors

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def project(tmp_path):
    """A copy of the project: ``project(file, old, new)`` edits it, ``project.folder`` is where."""
    folder = tmp_path / "project"
    folder.mkdir()
    for path in ROOT.glob("*.py"):
        shutil.copy(path, folder)
    shutil.copytree(ROOT / "multi_train_utils", folder / "multi_train_utils",
                    ignore=shutil.ignore_patterns("__pycache__"))

    def edit(file, old, new):
        text = (folder / file).read_text(encoding="utf-8")
        assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in {file}"
        (folder / file).write_text(text.replace(old, new), encoding="utf-8")

    edit.folder = folder
    return edit


def train(project, folder, launcher, processes, *options, wait=True):
    """A run of the copy; its Job, ended well unless it is not to be waited for."""
    words = [str(project.folder / word) if word.endswith(".py") else word
             for word in command(launcher, processes, *options)]
    if words[0].endswith(".py"):
        words.insert(0, "python")
    job = Job(folder, *words)
    if wait:
        with job:
            assert job.wait(240) == 0, job.text()
    return job


# Prints, as JSON, a few numbers of each batch that the copy's data gives: of training in two
# epochs and of validation, streamed and kept in memory, for each of ``replicas`` ranks.
BATCHES = """
import json, sys
import torch
from multi_train_utils.data_pipeline import EpochSampler, ImageList, StreamingData, readable_images
from multi_train_utils.distributed_utils import set_single_process
from multi_train_utils.options import parse_args
from multi_train_utils.safety.guard import Guard
from multi_train_utils.speed.device_data import DeviceData
from utils import read_split_data
data_path, replicas = sys.argv[1], int(sys.argv[2])
args = parse_args("single", ["--device", "cpu", "--image-size", "32", "--workers", "1",
                             "--batch-size", str(12 // replicas), "--data-path", data_path])
set_single_process(args)
guard, cpu = Guard(args), torch.device("cpu")
train_part, val_part, _ = read_split_data(data_path, class_indices=None, quiet=True)
train, val = readable_images(ImageList(*train_part), ImageList(*val_part), args, guard)
found = {}
for kind in (StreamingData, DeviceData):
    for rank in range(replicas):
        sampler = EpochSampler(train, replicas, rank, seed=0)
        data = kind(args, train, val, sampler, cpu, guard)
        data.load()
        for epoch in (0, 1):
            sampler.set_epoch(epoch)
            found[f"{kind.__name__} {epoch} {rank}"] = [
                images.float().mean(dim=(1, 2, 3)).tolist() for images, _ in data.train_batches()]
        found[f"{kind.__name__} validation"] = [
            image.float().mean().item() for images, labels in data.val_batches()
            for image, label in zip(images, labels) if label >= 0]
        data.close()
print("FOUND", json.dumps(found))
"""


def batches(project, flowers, replicas=1):
    """{what: means of the images} of the copy's data, each batch of an epoch a list."""
    done = subprocess.run(
        [sys.executable, "-c", BATCHES, str(flowers), str(replicas)], cwd=project.folder,
        env=clean_environment() | {"PYTHONPATH": str(project.folder)}, text=True, timeout=120,
        capture_output=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert lines, done.stdout + done.stderr
    return json.loads(lines[0][6:])


def flat(values):
    return torch.tensor([value for part in values
                         for value in (part if isinstance(part, list) else [part])])


# ---- the pictures ----------------------------------------------------------------------------

OPENED = ("        image = open_image(self.images_path[item], "
          "at_least=getattr(item, \"at_least\", None))\n")


@pytest.mark.slow
def test_every_picture_comes_out_of_my_dataset(project, flowers):
    before = batches(project, flowers)
    project("my_dataset.py", OPENED, OPENED + "        image = image.point(lambda v: 255 - v)\n")
    after = batches(project, flowers)
    assert len(before) == 6
    for what, values in before.items():
        # Cropped and averaged, an inverted picture stays one: 255 less the mean, but for rounding.
        difference = 255 - flat(values) - flat(after[what])
        assert difference.abs().max() < 1, what
        assert (flat(values) - flat(after[what])).abs().max() > 10, what


@pytest.mark.slow
def test_a_replaced_getitem_that_returns_a_picture_is_used_as_it_is(project, flowers, tmp_path):
    start = "    def __getitem__(self, item"
    project("my_dataset.py", start, """    def __getitem__(self, index):
        shade = 40 * self.images_class[index]
        return Image.new("RGB", (90, 70), (shade, shade, shade)), self.images_class[index]

    def _as_it_was(self, item""")
    found = batches(project, flowers)
    for what, values in found.items():
        assert set(flat(values).tolist()) <= {0.0, 40.0, 80.0, 120.0, 160.0}, what
    assert found["DeviceData validation"] == [40.0 * label for label in range(5) for _ in range(3)]
    train(project, tmp_path / "out", "single", 1, "--data-path", str(flowers), "--epochs", "1",
          "--batch-size", "6")
    assert [record["total"] for record in records(tmp_path / "out")] == [15]


# ---- sums over the processes -----------------------------------------------------------------

@pytest.mark.slow
def test_the_printed_figures_go_through_reduce_value(project, flowers, tmp_path):
    options = ("--data-path", str(flowers), "--epochs", "1", "--batch-size", "6")
    train(project, tmp_path / "before", "launch", 2, *options)
    project("multi_train_utils/distributed_utils.py", "        dist.all_reduce(total)\n",
            "        dist.all_reduce(total)\n        total += 1\n")
    job = train(project, tmp_path / "after", "launch", 2, *options)
    (before,), (after,) = records(tmp_path / "before"), records(tmp_path / "after")
    assert after["correct"] == before["correct"] + 1
    assert after["total"] == before["total"] + 25  # one more in each of the matrix's 5 x 5 cells
    assert after["loss"] == pytest.approx((60 * before["loss"] + 1) / 61, rel=1e-6)
    assert f"({after['correct']}/{after['total']}), loss {after['loss']:.3f}" in job.text()


# ---- one more augmentation -------------------------------------------------------------------

def add_brightness(project):
    """The example of augment()'s own docstring."""
    project("multi_train_utils/augmentation.py", "    return images\n",
            "    factor = 0.8 + 0.4 * uniform(seeds, 1).view(-1, 1, 1, 1)\n"
            "    return (images * factor).clamp(0, 255)\n")


@pytest.mark.slow
def test_an_augmentation_is_the_same_on_every_way_and_not_seen_by_validation(project, flowers):
    before = batches(project, flowers)
    add_brightness(project)
    one, two = batches(project, flowers), batches(project, flowers, replicas=2)
    for kind in ("StreamingData", "DeviceData"):
        assert one[f"{kind} validation"] == before[f"{kind} validation"]
        factors = [flat(one[f"{kind} {epoch} 0"]) / flat(before[f"{kind} {epoch} 0"])
                   for epoch in (0, 1)]
        for values in factors:
            # Near white the limit at 255 makes it a little less bright.
            assert 0.79 < values.min() < 0.85 and 1.1 < values.max() < 1.21
            assert len({round(value, 3) for value in values.tolist()}) > 40  # one for each image
        assert (factors[0] - factors[1]).abs().max() > 0.1
        # Rank r has every second image of a global step.
        for epoch in (0, 1):
            ranks = [flat(two[f"{kind} {epoch} {rank}"]) for rank in (0, 1)]
            whole = flat(one[f"{kind} {epoch} 0"])
            assert torch.equal(torch.stack(ranks, dim=1).flatten(), whole)
    for epoch in (0, 1):
        streamed, kept = flat(one[f"StreamingData {epoch} 0"]), flat(one[f"DeviceData {epoch} 0"])
        assert (streamed - kept).abs().max() < 2


def assert_resumed_equals_never_stopped(project, flowers, tmp_path, *options):
    options = ("--data-path", str(flowers), "--epochs", "3", "--batch-size", "4", *options)
    train(project, tmp_path / "never", "single", 1, *options)
    with train(project, tmp_path / "stopped", "single", 1, *options, wait=False) as job:
        job.wait_for("[epoch 0]")
        os.kill(job.process.pid, signal.SIGTERM)
        assert job.wait(60) == 143, job.text()
    saved = load(tmp_path / "stopped" / "weights" / "checkpoint.pth")
    assert (saved["epoch"], saved["position"]) > (0, 0)
    train(project, tmp_path / "stopped", "single", 1, *options, "--resume", "auto")
    never, stopped = (load(tmp_path / name / "weights" / "model-2.pth")
                      for name in ("never", "stopped"))
    assert same_tensors(never, stopped)
    return never


@pytest.mark.slow
def test_an_augmentation_goes_on_after_a_stop(project, flowers, tmp_path):
    plain = tmp_path / "plain"
    train(project, plain, "single", 1, "--data-path", str(flowers), "--epochs", "3",
          "--batch-size", "4")
    add_brightness(project)
    bright = assert_resumed_equals_never_stopped(project, flowers, tmp_path)
    assert not same_tensors(bright, load(plain / "weights" / "model-2.pth"))


@pytest.mark.gpu
def test_an_augmentation_differs_from_batch_to_batch_under_capture(project, flowers, tmp_path):
    """What a captured step calls runs once: an augmentation inside would be frozen."""
    add_brightness(project)
    project("multi_train_utils/speed/captured_step.py", "        self.graph.replay()\n",
            "        self.graph.replay()\n"
            "        print('MEANS', self.inputs[0].float().mean(dim=(1, 2, 3)).tolist())\n")
    project("multi_train_utils/augmentation.py", "\n    return (images * factor)",
            "\n    images = images * 0 + 100\n    return (images * factor)")
    words = [str(project.folder / "train_single_gpu.py"), *SMALL, "--device", "cuda",
             "--data-path", str(flowers), "--epochs", "2", "--batch-size", "6"]
    with Job(tmp_path / "out", "python", *words) as job:
        assert job.wait(240) == 0, job.text()
    means = [json.loads(line[6:]) for line in job.text().splitlines() if line.startswith("MEANS ")]
    assert len(means) == 20 and len({tuple(batch) for batch in means}) == 20
    assert all(79 < value < 121 for batch in means for value in batch)


# ---- loss, optimiser, figures ----------------------------------------------------------------

@pytest.mark.slow
def test_another_loss(project, flowers, tmp_path):
    project("multi_train_utils/train_eval_utils.py",
            "self.criterion = nn.CrossEntropyLoss(label_smoothing=label_smoothing)",
            "self.criterion = nn.MultiMarginLoss()")
    train(project, tmp_path / "out", "single", 1, "--data-path", str(flowers), "--epochs", "1",
          "--batch-size", "6", "--lr", "1e-9")
    (record,) = records(tmp_path / "out")
    # A margin of 1 that four of five classes miss by about all of it, over five classes.
    assert 0.4 < record["loss"] < 1.5


@pytest.mark.slow
def test_another_optimiser_trains_and_resumes(project, flowers, tmp_path):
    text = (project.folder / "multi_train_utils" / "trainer.py").read_text(encoding="utf-8")
    start = text.index("    on_gpu = device.type", text.index("def make_optimizer("))
    end = text.index("    return optimizer\n", start)
    project("multi_train_utils/trainer.py", text[start:end],
            "    optimizer = torch.optim.AdamW(\n"
            "        [p for p in model.parameters() if p.requires_grad], lr=args.lr)\n")
    assert_resumed_equals_never_stopped(project, flowers, tmp_path, "--lr", "0.0003")
    state = load(tmp_path / "stopped" / "weights" / "checkpoint.pth")["optimizer"]["state"]
    assert {"exp_avg", "exp_avg_sq", "step"} == set(state[0]) and float(state[0]["step"]) == 45


@pytest.mark.slow
def test_one_more_figure_per_epoch(project, flowers, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    project("multi_train_utils/records/records.py", '"epoch": epoch, "loss": loss,',
            '"epoch": epoch, "doubled": 2 * loss, "loss": loss,')
    train(project, tmp_path / "out", "single", 1, "--data-path", str(flowers), "--epochs", "2",
          "--batch-size", "6")
    found = records(tmp_path / "out")
    assert [record["doubled"] for record in found] == [2 * record["loss"] for record in found]
    (folder,) = (tmp_path / "out" / "runs").iterdir()
    events = EventAccumulator(str(folder)).Reload()
    assert [event.value for event in events.Scalars("doubled")] == pytest.approx(
        [record["doubled"] for record in found])
