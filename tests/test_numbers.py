"""What a run prints is true, and the same at any number of processes and after any stop."""

import json
import os
import signal
import time

import pytest
import torch
import torchvision
from jobs import (
    Job,
    assert_saved_in_mid_epoch,
    command,
    independent_matrix,
    load,
    records,
    same_tensors,
)
from PIL import Image, ImageOps
from torch.utils.data import DataLoader
from torchvision import transforms

from multi_train_utils.augmentation import draw_crop
from multi_train_utils.data_pipeline import (
    EpochSampler,
    ImageList,
    ShareSampler,
    TrainingImages,
    collate,
)
from prepare_data import draw_sample_set
from utils import read_split_data

EPOCHS_4 = ("--epochs", "4", "--batch-size", "4")


def run(folder, launcher, processes, *options, status=0, env=None):
    with Job(folder, *command(launcher, processes, *options), env=env) as job:
        assert job.wait(240) == status, job.text()
        return job.text()


def count(matrix):
    """(correct, total) of a confusion matrix."""
    return sum(row[number] for number, row in enumerate(matrix)), sum(map(sum, matrix))


@pytest.fixture(scope="module")
def many_flowers(tmp_path_factory):
    """200 images, 40 of them for validation: of 15, other weights often get as many right."""
    folder = tmp_path_factory.mktemp("many") / "flowers"
    draw_sample_set(str(folder), images=200, size=48)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "processes", "batch"), [
    ("single", 1, 7), ("spawn", 2, 5), ("launch", 3, 3), ("launch", 4, 2)])
def test_printed_accuracy_is_that_of_the_saved_file(many_flowers, tmp_path, launcher, processes,
                                                    batch):
    text = run(tmp_path, launcher, processes, "--data-path", str(many_flowers), "--epochs", "2",
               "--batch-size", str(batch), "--lr", "0.01")
    for record in records(tmp_path):
        counted = independent_matrix(tmp_path / "weights" / f"model-{record['epoch']}.pth",
                                     many_flowers)
        assert count(counted) == (record["correct"], record["total"])
        assert f"({record['correct']}/{record['total']})" in text
    # The last epoch's, which tells far more weights apart than a count does.
    (run_folder,) = (tmp_path / "runs").iterdir()
    recorded = json.loads((run_folder / "confusion.json").read_text())
    assert recorded["matrix"] == counted
    for number, name in enumerate(recorded["classes"]):
        right, of = counted[number][number], sum(counted[number])
        assert f"\n    {name}: {right / of:.3f} ({right}/{of})\n" in text


@pytest.mark.slow
def test_fewer_validation_images_than_processes(tmp_path):
    data = tmp_path / "few"
    draw_sample_set(str(data), images=30, size=48)
    for extra in sorted(data.iterdir())[2:]:
        if extra.is_dir():
            for file in extra.iterdir():
                file.unlink()
            extra.rmdir()
    run(tmp_path / "out", "launch", 3, "--data-path", str(data), "--epochs", "1",
        "--batch-size", "3")
    (record,) = records(tmp_path / "out")
    assert record["total"] == 2  # two classes of six: one of each, on three processes
    counted = independent_matrix(tmp_path / "out" / "weights" / "model-0.pth", data)
    assert count(counted) == (record["correct"], record["total"])


def global_steps(processes, batch, images=23, epoch=2, start=0):
    """The set of images of each global step."""
    shares = []
    for rank in range(processes):
        sampler = EpochSampler(range(images), processes, rank, seed=5)
        sampler.set_epoch(epoch, start)
        shares.append([index for _, index in sampler])
        assert len(shares[-1]) == len(sampler)
    steps = len(shares[0]) // batch
    return [sorted(i for share in shares for i in share[s * batch:(s + 1) * batch])
            for s in range(steps)]


def test_same_images_in_each_global_step():
    one = global_steps(1, 8)
    assert one == global_steps(2, 4) == global_steps(4, 2)
    assert one != global_steps(1, 8, epoch=3)
    assert len({i for step in one for i in step}) == 16  # nobody twice


def test_an_epoch_goes_on_where_it_was_left_with_another_world_size():
    whole = global_steps(1, 8)
    assert global_steps(2, 4, start=8) == whole[1:]


def test_validation_shares_cover_every_image_once():
    for count, processes in ((8, 3), (4, 4), (2, 3), (731, 2)):
        shares = [list(ShareSampler(range(count), processes, rank)) for rank in range(processes)]
        assert sorted(i for share in shares for i in share) == list(range(count))


def test_crop_follows_from_seed_epoch_and_index_alone():
    box = draw_crop(0, 3, 17, 320, 240)
    torch.manual_seed(99)
    assert draw_crop(0, 3, 17, 320, 240) == box
    others = {draw_crop(*key, 320, 240) for key in ((1, 3, 17), (0, 4, 17), (0, 3, 18))}
    assert len(others) == 3 and box not in others


def test_crops_stay_inside_and_cover_the_stated_area():
    areas, flips = [], 0
    for index in range(2000):
        crop = draw_crop(0, 0, index, 300, 200)
        assert 0 <= crop.left <= 300 - crop.width and 0 <= crop.top <= 200 - crop.height
        assert 0.74 < crop.width / crop.height < 1.36
        areas.append(crop.width * crop.height / 60000)
        flips += crop.flip
    assert 0.07 < min(areas) < 0.12 and max(areas) > 0.85
    assert 900 < flips < 1100


def test_crops_are_those_of_pillow_bit_for_bit_whoever_reads_them(flowers):
    """By Pillow alone; by the dataset, which may know the sizes; by any number of workers."""
    (paths, labels), _, _ = read_split_data(flowers, class_indices=None, quiet=True)
    images = TrainingImages(ImageList(paths, labels), 32, seed=0)
    known_sizes = ImageList(paths, labels)
    known_sizes.sizes = [known_sizes.size(i) for i in range(len(paths))]
    again = TrainingImages(known_sizes, 32, seed=0)
    keys = [(epoch, index) for index in range(0, len(paths), 7) for epoch in (1, 2)]
    expected = []
    for epoch, index in keys:
        with Image.open(paths[index]) as file:
            image = file.convert("RGB")
        crop = draw_crop(0, epoch, index, *image.size)
        box = crop.left, crop.top, crop.left + crop.width, crop.top + crop.height
        image = image.crop(box).resize((32, 32), Image.Resampling.BILINEAR)
        image = ImageOps.mirror(image) if crop.flip else image
        expected.append(transforms.functional.pil_to_tensor(image).permute(1, 2, 0))
    for dataset in (images, again):
        for key, pixels in zip(keys, expected, strict=True):
            assert torch.equal(dataset[key][0], pixels)
            assert dataset[key][1] == labels[key[1]]
    for workers in (1, 2):
        loader = DataLoader(again, batch_size=3, sampler=keys, num_workers=workers,
                            collate_fn=collate)
        assert torch.equal(torch.cat([batch for batch, *_ in loader]), torch.stack(expected))
    assert not torch.equal(expected[0], expected[1])  # another crop in another epoch


@pytest.mark.slow
def test_one_process_of_8_trains_as_two_of_4_with_frozen_layers(flowers, tmp_path):
    weights = tmp_path / "start.pth"
    torch.manual_seed(1)
    given = torchvision.models.resnet18(weights=None, num_classes=5).state_dict()
    torch.save(given, weights)
    common = ("--data-path", str(flowers), "--epochs", "2", "--freeze-layers", "--weights",
              str(weights))
    run(tmp_path / "one", "single", 1, *common, "--batch-size", "8", "--lr", "0.01")
    run(tmp_path / "two", "launch", 2, *common, "--batch-size", "4", "--lr", "0.005")
    one, two = (load(tmp_path / name / "weights" / "model-1.pth") for name in ("one", "two"))
    for name in given:
        if name.startswith("fc."):
            assert (one[name] - two[name]).abs().max() < 1e-5
            assert (one[name] - given[name]).abs().max() > 1e-4  # it did train
        else:  # frozen: bit for bit as given, BatchNorm's statistics included
            assert torch.equal(one[name], given[name]) and torch.equal(two[name], given[name])


@pytest.fixture(scope="module")
def never_stopped(flowers, tmp_path_factory):
    """Folder of a four-epoch run that nobody disturbed, by number of processes."""
    folders = {}

    def get(processes):
        if processes not in folders:
            folder = tmp_path_factory.mktemp(f"never_stopped_{processes}")
            run(folder, "launch" if processes > 1 else "single", processes, "--data-path",
                str(flowers), *EPOCHS_4)
            folders[processes] = folder
        return folders[processes]

    return get


def assert_same_run(folder, reference):
    """The same final weights bit for bit, the same records epoch by epoch."""
    assert same_tensors(load(folder / "weights" / "model-3.pth"),
                        load(reference / "weights" / "model-3.pth"))
    ours, theirs = records(folder), records(reference)
    assert [r["epoch"] for r in ours] == [0, 1, 2, 3]
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["correct"] == other["correct"]
        assert mine["learning_rate"] == pytest.approx(other["learning_rate"], abs=1e-9)
        assert mine["loss"] == pytest.approx(other["loss"], abs=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2, 3])
def test_killed_and_resumed_equals_never_stopped(flowers, tmp_path, never_stopped, processes):
    words = command("launch" if processes > 1 else "single", processes, "--data-path",
                    str(flowers), *EPOCHS_4, "--resume", "auto")
    with Job(tmp_path, *words) as job:
        job.wait_for("[epoch 1]")
        for pid in job.ranks() or [job.process.pid]:
            os.kill(pid, signal.SIGKILL)
        assert job.wait(60) != 0
    with Job(tmp_path, *words) as job:
        assert job.wait(240) == 0, job.text()
        assert "Going on from" in job.text()
    assert_same_run(tmp_path, never_stopped(processes))


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "processes", "signum", "status"), [
    ("single", 1, signal.SIGTERM, 143), ("spawn", 2, signal.SIGINT, 130)])
def test_stopped_in_mid_epoch_and_resumed(flowers, tmp_path, never_stopped, launcher, processes,
                                          signum, status):
    words = command(launcher, processes, "--data-path", str(flowers), *EPOCHS_4)
    with Job(tmp_path, *words) as job:
        job.wait_for("[epoch 0]")
        time.sleep(0.3)
        signalled = time.time_ns()
        os.killpg(job.process.pid, signum)
        assert job.wait(30) == status, job.text()
        assert "--resume auto" in job.text() and "all is saved" in job.text()
    position = assert_saved_in_mid_epoch(tmp_path, signalled)
    assert position <= 60 and position % (4 * processes) == 0
    with Job(tmp_path, *words, "--resume", "auto") as job:
        assert job.wait(240) == 0, job.text()
    assert_same_run(tmp_path, never_stopped(processes))


@pytest.mark.slow
def test_restarted_by_torchrun_after_a_killed_rank(flowers, tmp_path, never_stopped):
    words = command("launch", 2, "--data-path", str(flowers), *EPOCHS_4, "--resume", "auto")
    words.insert(1, "--max-restarts=1")
    with Job(tmp_path, *words) as job:
        job.wait_for("[epoch 1]")
        os.kill(job.ranks()[1], signal.SIGKILL)
        assert job.wait(240) == 0, job.text()
    assert_same_run(tmp_path, never_stopped(2))


@pytest.mark.slow
def test_resume_refuses_another_training_and_accepts_other_choices(flowers, tmp_path):
    base = ("--data-path", str(flowers), "--batch-size", "6", "--epochs", "1")
    run(tmp_path, "single", 1, *base)
    checkpoint = ("--resume", "weights/checkpoint.pth")
    text = run(tmp_path, "single", 1, *base, *checkpoint)
    assert "Nothing left to do" in text
    for option, value, words in (("--model", "resnet34", "--model was resnet18, is resnet34"),
                                 ("--image-size", "64", "--image-size was 32, is 64")):
        text = run(tmp_path, "single", 1, *base, *checkpoint, option, value, status=1)
        assert words in text and "checkpoint.pth" in text and "Traceback" not in text
    text = run(tmp_path, "single", 1, *base, "--resume", "weights/model-0.pth", status=1)
    assert "is no checkpoint" in text and "--weights" in text
    text = run(tmp_path, "spawn", 2, *base, *checkpoint, "--epochs", "2")
    assert "--epochs was 1, going on with 2" in text and "1 processes then, 2 now" in text
    assert [r["epoch"] for r in records(tmp_path)] == [0, 1]


@pytest.mark.slow
def test_equal_runs_are_equal_and_seeds_differ(flowers, tmp_path):
    losses = {}
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        run(tmp_path / name, "launch", 2, "--data-path", str(flowers), "--epochs", "1",
            "--batch-size", "4", "--seed", seed)
        losses[name] = records(tmp_path / name)[0]["loss"]
    assert losses["a"] == losses["b"] != losses["c"]


@pytest.mark.slow
def test_each_rank_reads_other_images_in_each_epoch(flowers, tmp_path):
    """A shuffle that stands still would show each rank the same half of the images for ever."""
    probe = tmp_path / "probe"
    probe.mkdir()
    (probe / "sitecustomize.py").write_text(
        "import builtins, os\n"
        "plain = builtins.open\n"
        "def watched(file, *args, **kwargs):\n"
        "    if str(file).endswith('.jpg'):\n"
        "        with plain(os.environ['PROBE_LOG'], 'a') as log:\n"
        "            log.write(f\"{os.environ.get('RANK')} {file}\\n\")\n"
        "    return plain(file, *args, **kwargs)\n"
        "builtins.open = watched\n"
        "from PIL import Image\n"
        "image_open = Image.open\n"
        "def opened(file, *args, **kwargs):\n"
        "    name = file if isinstance(file, (str, os.PathLike)) else getattr(file, 'name', '')\n"
        "    if str(name).endswith('.jpg'):\n"
        "        with plain(os.environ['PROBE_LOG'], 'a') as log:\n"
        "            log.write(f\"{os.environ.get('RANK')} {name}\\n\")\n"
        "    return image_open(file, *args, **kwargs)\n"
        "Image.open = opened\n")
    log = tmp_path / "opened.txt"
    run(tmp_path / "out", "launch", 2, "--data-path", str(flowers), "--epochs", "4",
        "--batch-size", "5", env={"PYTHONPATH": str(probe), "PROBE_LOG": str(log)})
    seen = {"0": set(), "1": set()}
    for line in log.read_text().splitlines():
        rank, _, path = line.partition(" ")
        seen[rank].add(path)
    # The header check reads half of the images. With a shuffle that stands still training reads 30
    # of 60, so about 53 of 75 in all; in four other orders nearly all of its own 60.
    for files in seen.values():
        assert len(files) > 62
