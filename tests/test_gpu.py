"""What only a GPU can show: captured steps, crops on the device, the single script on CUDA.

Where the same code also runs on the CPU it is tried there too: whole runs under the mark `slow`.
"""

import os
import random
import re
import subprocess
import sys
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torchvision
from PIL import Image, ImageDraw
from torch import nn

from model import resnet18
from multi_train_utils.augmentation import Crop, Normalizer, crop_image, draw_crop, to_tensor
from multi_train_utils.data_pipeline import EpochSampler, ImageList, readable_images
from multi_train_utils.distributed_utils import set_single_process
from multi_train_utils.options import parse_args
from multi_train_utils.records.weights import read_weights
from multi_train_utils.safety.guard import Guard
from multi_train_utils.speed.captured_step import CapturedStep, warm_up
from multi_train_utils.speed.device_crop import crop_batch
from multi_train_utils.speed.device_data import DeviceData, StoredImages
from multi_train_utils.train_eval_utils import TrainStep, set_learning_rate
from multi_train_utils.trainer import make_optimizer
from prepare_data import draw_picture, draw_sample_set

# cuBLAS reads it once, when the first product is computed.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

ROOT = Path(__file__).resolve().parents[1]
FLOWERS = Path(os.environ.get("FLOWERS", ROOT.parent / "shared" / "data" / "flower_photos_256"))
GPU = [pytest.mark.gpu,
       pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a GPU")]
DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]
SIZE = 64  # side of the images in whole runs, pixels
LIMIT = 120  # seconds that a command may take


# ---- helpers, used by test_multigpu.py too ---------------------------------------------------

def draw_set(folder):
    """100 drawn images in 5 classes under ``folder``: 80 for training, 20 for validation."""
    draw_sample_set(folder / "set", images=100, size=SIZE)
    return folder / "set"


def run_command(words, folder):
    """Run ``python words...`` in ``folder``, a new one; returns (exit status, all output).

    The status is 124 where it took longer than LIMIT, so that other runs can still be judged.
    """
    folder.mkdir()
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    # Several runs share the CPUs: a thread that waits must not keep one busy.
    more = {"PYTHONPATH": os.pathsep.join(paths), "OMP_WAIT_POLICY": "PASSIVE"}
    try:
        done = subprocess.run([sys.executable, *map(str, words)], cwd=folder, timeout=LIMIT,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              env=os.environ | more)
    except subprocess.TimeoutExpired as late:
        return 124, (late.output or b"").decode(errors="replace") + f"\nnot done in {LIMIT} s"
    return done.returncode, done.stdout.decode(errors="replace")


def run_options(data, device, *more):
    """The options that all whole runs share, then ``more``."""
    return ["--data-path", data, "--device", device, "--weights", "", "--image-size", SIZE,
            "--batch-size", 8, "--epochs", 2, "--lr", 0.005, "--workers", 1, *more]


def printed_counts(output):
    """[(correct, total), ...] as the epochs' lines say it."""
    lines = re.findall(r"^\[epoch (\d+)\] accuracy: \S+ \((\d+)/(\d+)\)", output, re.MULTILINE)
    assert [int(epoch) for epoch, _, _ in lines] == list(range(len(lines)))
    return [(int(correct), int(total)) for _, correct, total in lines]


@torch.no_grad()
def independent_count(weights, root, device):
    """(correct, total) of a weight file, by code that shares nothing with the trainer's."""
    names = sorted(folder.name for folder in Path(root).iterdir())
    model = torchvision.models.resnet34(num_classes=len(names)).to(device).eval()
    model.load_state_dict(torch.load(weights, map_location=device, weights_only=True))
    look = torchvision.transforms.Compose([
        torchvision.transforms.Resize(round(SIZE * 256 / 224)),
        torchvision.transforms.CenterCrop(SIZE), torchvision.transforms.ToTensor(),
        torchvision.transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))])
    generator, correct, total = random.Random(0), 0, 0
    for label, name in enumerate(names):
        files = sorted((Path(root) / name).iterdir())
        chosen = generator.sample(files, int(0.2 * len(files)))
        images = torch.stack([look(Image.open(file).convert("RGB")) for file in chosen])
        correct += int((model(images.to(device)).argmax(1) == label).sum())
        total += len(chosen)
    return correct, total


def assert_counts_are_true(output, folder, data, device, epochs=2):
    """What each epoch printed is what its file gives: on a GPU rounding may turn one image."""
    counts = printed_counts(output)
    assert len(counts) == epochs, output
    for epoch, (correct, total) in enumerate(counts):
        found = independent_count(folder / "weights" / f"model-{epoch}.pth", data, device)
        assert found[1] == total == 20
        assert abs(found[0] - correct) <= (device == "cuda"), f"epoch {epoch}: {output}"


def leaves(value, name=""):
    """Every tensor and number in nested dicts and lists as (name, value)."""
    if isinstance(value, dict):
        value = list(value.items())
    elif isinstance(value, (list, tuple)):
        value = list(enumerate(value))
    else:
        return [(name, value)] if isinstance(value, (torch.Tensor, int, float)) else []
    return [leaf for key, item in value for leaf in leaves(item, f"{name}/{key}")]


def different(one, other):
    """Names of the leaves that are not equal bit for bit."""
    one, other = leaves(one), leaves(other)
    assert [name for name, _ in one] == [name for name, _ in other]
    return [name for (name, a), (_, b) in zip(one, other, strict=True)
            if not (torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b)]


def assert_same_training(one, other, epoch):
    """Weights of ``epoch`` and the last checkpoint's model, momentum and scaler: equal."""
    for name in (f"model-{epoch}.pth", "checkpoint.pth"):
        a, b = (torch.load(folder / "weights" / name, map_location="cpu", weights_only=True)
                for folder in (one, other))
        if name == "checkpoint.pth":
            a, b = ({key: c[key] for key in ("model", "optimizer", "scaler", "epoch")}
                    for c in (a, b))
        assert not different(a, b), name


# ---- the captured step -----------------------------------------------------------------------

@pytest.fixture
def deterministic():
    """Deterministic algorithms while a test runs."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def make_step(device, amp="off"):
    """A TrainStep on a ResNet-18 (on the CPU a small net), the same weights in each call."""
    torch.manual_seed(0)
    if device.type == "cuda":
        model = resnet18(num_classes=5).to(device, memory_format=torch.channels_last)
    else:
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(),
                              nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))
    model.train()
    optimizer = make_optimizer(model, Namespace(lr=0.01, weight_decay=0.005, nesterov=False),
                               device)
    return TrainStep(model, optimizer, device, prepare=Normalizer(device), amp=amp)


def state_of(step):
    """All that a step changes."""
    return {"model": step.model.state_dict(), "optimizer": step.optimizer.state_dict(),
            "scaler": step.scaler.state_dict()}


def make_batches(device, count):
    """Random (images uint8, labels) of 8 x 64 x 64 pixels."""
    generator = torch.Generator().manual_seed(1)
    return [(torch.randint(256, (8, SIZE, SIZE, 3), dtype=torch.uint8, generator=generator)
             .to(device), torch.randint(5, (8,), generator=generator).to(device))
            for _ in range(count)]


def prepared(step, batch):
    """The call that trains: captured on a GPU; on the CPU the step itself, warmed up alike."""
    if step.device.type == "cuda":
        return CapturedStep(step, batch, torch.cuda.Stream(step.device))
    warm_up(step, batch, 2)
    return step


def train_steps(step, call, batches):
    """The losses of ``call`` on each batch, the learning rate falling from step to step."""
    losses = []
    for number, batch in enumerate(batches):
        set_learning_rate(step.optimizer, 0.01 / (number + 1))
        losses.append(call(*batch).clone())
    return losses


# On the CPU nothing is captured: it would be the step compared with itself. What a step computes is
# compared with the textbook's formulas in test_recipe.py.
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=GPU)])
@pytest.mark.parametrize("amp", ["off", "bf16", "fp16"])
def test_captured_and_eager_steps_are_the_same_bit_for_bit(device, amp, deterministic):
    device = torch.device(device)
    batches = make_batches(device, 20)
    eager, captured = make_step(device, amp), make_step(device, amp)
    losses = train_steps(eager, eager, batches)
    assert torch.stack(losses).isfinite().all()
    assert len({float(loss) for loss in losses}) > 10  # else batches might change nothing
    assert not different(losses, train_steps(captured, prepared(captured, batches[0]), batches))
    assert not different(state_of(eager), state_of(captured))


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=GPU)])
def test_captured_step_is_near_the_eager_one_without_deterministic_algorithms(device):
    device = torch.device(device)
    batches = make_batches(device, 1)
    eager, captured = make_step(device), make_step(device)
    train_steps(eager, eager, batches)
    train_steps(captured, prepared(captured, batches[0]), batches)
    for name, value in eager.model.state_dict().items():
        torch.testing.assert_close(captured.model.state_dict()[name], value, rtol=0, atol=1e-5)


@pytest.mark.parametrize("device, amp", [
    ("cpu", "off"), pytest.param("cuda", "off", marks=GPU),
    pytest.param("cuda", "fp16", marks=GPU)])
def test_warm_up_leaves_no_trace(device, amp):
    device = torch.device(device)
    step, (batch,) = make_step(device, amp), make_batches(device, 1)
    before = [(name, value.clone()) for name, value in step.model.state_dict().items()]
    scaler, random_state = step.scaler.state_dict(), torch.get_rng_state()
    prepared(step, batch)
    assert not different(dict(before), step.model.state_dict())
    momentum = [state["momentum_buffer"] for state in step.optimizer.state.values()]
    assert len(momentum) == len(list(step.model.parameters()))
    assert not any(buffer.any() for buffer in momentum)
    assert step.scaler.state_dict() == scaler
    assert torch.equal(torch.get_rng_state(), random_state)


@pytest.mark.parametrize("device", DEVICES)
def test_another_optimiser_is_warmed_up_without_a_trace_and_captured(device, deterministic):
    """Its state is made by the first step, which is one of the warm-up."""
    device, batches = torch.device(device), make_batches(torch.device(device), 5)
    eager, captured = make_step(device), make_step(device)
    for step in (eager, captured):
        rate = torch.tensor(0.001, device=device)
        step.optimizer = torch.optim.AdamW(step.model.parameters(), lr=rate,
                                           capturable=device.type == "cuda")
    call = prepared(captured, batches[0])
    losses = [train_steps(step, run, batches) for step, run in ((eager, eager), (captured, call))]
    assert not different(*losses) and not different(state_of(eager), state_of(captured))


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=GPU)])
def test_captured_step_refuses_a_batch_of_another_shape(device):
    device = torch.device(device)
    step, ((images, labels),) = make_step(device), make_batches(device, 1)
    call = prepared(step, (images, labels))
    with pytest.raises(ValueError, match="takes"):
        call(images[:4], labels[:4])


# ---- crops on the device ---------------------------------------------------------------------

def as_image(pixels, size):
    """A PIL image from stored pixels (P x 3, uint8) and its (width, height)."""
    return Image.frombytes("RGB", size, bytes(pixels.flatten().tolist()))


def mean_difference(images, expected):
    """Mean absolute difference, of 255, for each image of a batch."""
    difference = images.float().cpu() - expected.float()
    return difference.abs().mean(dim=(1, 2, 3))


@pytest.mark.skipif(not FLOWERS.is_dir(), reason="needs the photos (FLOWERS=folder)")
@pytest.mark.parametrize("image_size", [224, 96])  # at 96 the photos are stored reduced
@pytest.mark.parametrize("device", DEVICES)
def test_crops_of_photos_are_those_of_pillow(device, image_size):
    photos = sorted(FLOWERS.glob("*/*.jpg"))[::120]
    args = parse_args("single", ["--device", device, "--batch-size", str(len(photos)),
                                 "--image-size", str(image_size), "--workers", "2"])
    set_single_process(args)
    lists = (ImageList(map(str, part), [0] * len(part)) for part in (photos, photos[:2]))
    train, val = readable_images(*lists, args, Guard(args))
    sampler = EpochSampler(train, 1, 0, args.seed)
    data = DeviceData(args, train, val, sampler, torch.device(device), Guard(args))
    data.load()
    sampler.set_epoch(3)
    images, _ = next(iter(data.train_batches()))

    stored, expected = StoredImages(train, data.stored), []
    for epoch, index in data.sampler:
        (width, height), kept = train.sizes[index], data.stored[index]
        crop = draw_crop(args.seed, epoch, index, width, height)
        crop = crop.scaled(kept[0] / width, kept[1] / height)
        image = as_image(stored[index][0], kept)
        expected.append(to_tensor(crop_image(image, crop, image_size)))
    assert images.shape == (len(photos), image_size, image_size, 3)
    assert mean_difference(images, torch.stack(expected)).max() <= 2


@pytest.mark.parametrize("device", DEVICES)
def test_crops_of_large_drawn_images_are_those_of_pillow(device):
    size = 64
    pictures = [draw_picture(name, 0, 700, seed=0) for name in ("roses", "daisy")]
    for picture in pictures:  # fine stripes: what is not averaged turns into a false pattern
        draw = ImageDraw.Draw(picture)
        for x in range(0, picture.width, 3):
            draw.line((x, 0, x // 2, picture.height), fill="white")
    pixels = [to_tensor(picture).view(-1, 3) for picture in pictures]
    starts, rows, expected = (0, len(pixels[0])), [], []
    for start, picture in zip(starts, pictures, strict=True):
        width, height = picture.size
        for crop in (Crop(0, 0, width, height, False), Crop(31, 7, 600, 500, True),
                     Crop(10.25, 20.5, 333.3, 444.4, False), Crop(5, 90, 640, 80, True),
                     Crop(width - 20, height - 30, 20, 30, True)):
            rows.append((start, width, *crop))
            expected.append(to_tensor(crop_image(picture, crop, size)))
    window = tuple(max(side) + 2 for side in zip(*(p.size[::-1] for p in pictures), strict=True))
    images = crop_batch(torch.cat(pixels).to(device),
                        torch.tensor(rows, dtype=torch.float64, device=device), window, size)
    assert mean_difference(images, torch.stack(expected)).max() <= 2


# ---- whole runs of the single script ---------------------------------------------------------

SINGLE = ROOT / "train_single_gpu.py"
VARIANTS = {"fp32": [], "bf16": ["--amp", "bf16"], "fp16": ["--amp", "fp16"],
            "eager": ["--no-cuda-graph"], "streamed": ["--data-cache", "off"]}
RESUMED = {"fp32": [], "fp16": ["--amp", "fp16"], "eager": ["--no-cuda-graph"]}

# Runs a script that is killed (kill -9) as its third epoch begins: once there is a checkpoint,
# while later files may be being written.
KILLED = """
import os, runpy, signal, sys, time
from multi_train_utils.records.records import Records
epoch = Records.epoch
def killed(self, meter, *args):
    place = epoch(self, meter, *args)
    if place.epoch == 2:
        while not (self.saver.folder / "checkpoint.pth").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    return place
Records.epoch = killed
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module", params=[
    pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=GPU)])
def device(request):
    return request.param


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return draw_set(tmp_path_factory.mktemp("drawn"))


@pytest.fixture(scope="module")
def runs(device, data, tmp_path_factory):
    """{name: (exit status, output, folder)} of all runs, several at a time: they start slowly."""
    root = tmp_path_factory.mktemp("runs")
    again = ["--deterministic", "--epochs", 4]
    first = {name: [SINGLE, *run_options(data, device, *more)]
             for name, more in VARIANTS.items() if device == "cuda" or name == "fp32"}
    later = {}
    for name, more in RESUMED.items():
        if device == "cpu" and name != "fp32":
            continue
        words = [SINGLE, *run_options(data, device, *again, *more)]
        first[f"whole {name}"] = words
        first[f"killed {name}"] = ["-c", KILLED, *words]
        later[f"resumed {name}"] = [*words, "--resume", "auto",
                                    "--output-dir", root / f"killed {name}"]
    done = {}
    with ThreadPoolExecutor(8 if device == "cuda" else 2) as pool:
        for commands in (first, later):
            results = pool.map(run_command, commands.values(), [root / name for name in commands])
            done |= {name: (*result, root / name)
                     for name, result in zip(commands, results, strict=True)}
    return done


def only_where_run(runs, name):
    if name not in runs:
        pytest.skip("on the CPU one variant is enough")


@pytest.mark.parametrize("variant", VARIANTS)
def test_printed_accuracy_is_that_of_the_saved_file(runs, variant, device, data):
    only_where_run(runs, variant)
    status, output, folder = runs[variant]
    assert status == 0, output
    assert_counts_are_true(output, folder, data, device)


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_kind_of_step_trained_is_said(runs, variant, device):
    only_where_run(runs, variant)
    captured = device == "cuda" and variant != "eager"
    assert ("captured as one CUDA graph" in runs[variant][1]) == captured


@pytest.mark.parametrize("variant", RESUMED)
def test_killed_and_resumed_equals_never_stopped(runs, variant):
    only_where_run(runs, f"whole {variant}")
    status, output, whole = runs[f"whole {variant}"]
    assert status == 0, output
    status, output, killed = runs[f"killed {variant}"]
    assert status == -9 and len(printed_counts(output)) == 2, output
    status, output, _ = runs[f"resumed {variant}"]
    assert status == 0 and "Going on from" in output, output
    assert_same_training(whole, killed, epoch=3)


def test_saved_files_open_on_a_machine_without_a_gpu(runs):
    folder = runs["fp32"][2] / "weights"
    for name in ("model-1.pth", "best.pth", "checkpoint.pth"):
        # No map_location: a tensor that was saved from a GPU would go back there.
        content = leaves(torch.load(folder / name, weights_only=True))
        places = {value.device.type for _, value in content if isinstance(value, torch.Tensor)}
        assert places == {"cpu"}, name


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=GPU)])
def test_weights_saved_from_a_gpu_are_read_to_the_cpu(device, tmp_path):
    state = resnet18(num_classes=5).to(device).state_dict()
    torch.save(state, tmp_path / "gpu.pth")
    read = read_weights(tmp_path / "gpu.pth")
    assert {value.device.type for value in read.values()} == {"cpu"}
    assert not different({name: value.cpu() for name, value in state.items()}, read)
