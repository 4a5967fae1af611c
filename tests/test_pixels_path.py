"""The pixels' way: reduced decoding, the padding of validation batches, what a replay is fed."""

from argparse import Namespace

import pytest
import torch
from PIL import Image, ImageDraw, JpegImagePlugin
from torch import nn

from multi_train_utils.augmentation import Normalizer, draw_crop
from multi_train_utils.data_pipeline import (
    EpochSampler,
    ImageList,
    TrainingImages,
    readable_images,
)
from multi_train_utils.distributed_utils import set_single_process
from multi_train_utils.options import parse_args
from multi_train_utils.safety.guard import Guard
from multi_train_utils.speed import device_data
from multi_train_utils.speed.captured_step import CapturedStep
from multi_train_utils.speed.device_data import DeviceData, StoredImages, stored_size
from multi_train_utils.train_eval_utils import TrainStep
from multi_train_utils.trainer import make_optimizer

CPU = torch.device("cpu")


def pixels(image):
    return torch.tensor(list(image.tobytes()), dtype=torch.uint8).view(image.height, image.width, 3)


def mean_difference(one, other):
    """Mean absolute difference, of 255."""
    return float((one.float() - other.float()).abs().mean())


@pytest.fixture(scope="module")
def large_photo(tmp_path_factory):
    """A JPEG of 1600 x 1200 with shapes of every size, down to lines as fine as its pixels."""
    image = Image.new("RGB", (1600, 1200), (90, 140, 60))
    draw = ImageDraw.Draw(image)
    for step in range(40):
        x, y = step * 397 % 1600, step * 211 % 1200
        color = (step * 67 % 256, step * 131 % 256, step * 29 % 256)
        draw.ellipse((x - 90, y - 60, x + 90, y + 60), fill=color)
        draw.rectangle((1600 - x, y, 1640 - x, y + 25), fill=color[::-1])
    for x in range(0, 1600, 7):
        draw.line((x, 0, x + 300, 1200), fill=(250, 240, 200), width=1 + x % 3)
    path = tmp_path_factory.mktemp("large") / "photo.jpg"
    image.save(path, quality=95)
    return path


@pytest.fixture
def decoded_sizes(monkeypatch):
    """(width, height) of every JPEG that was asked for at a reduced size, as it will be decoded."""
    sizes, draft = [], JpegImagePlugin.JpegImageFile.draft

    def noted(self, mode, size):
        result = draft(self, mode, size)
        sizes.append(self.size)
        return result

    monkeypatch.setattr(JpegImagePlugin.JpegImageFile, "draft", noted)
    return sizes


def test_crops_of_a_large_photo_are_those_of_the_full_decode(large_photo, decoded_sizes):
    """A JPEG decoded at a fraction of its size still gives the crop, its place and its detail."""
    data = TrainingImages(ImageList([str(large_photo)] * 12, [0] * 12), 64, seed=0)
    with Image.open(large_photo) as image:
        whole = image.convert("RGB")
    decoded_sizes.clear()
    for index in range(12):
        crop = draw_crop(0, 0, index, *whole.size)
        cut = whole.crop((crop.left, crop.top, crop.left + crop.width, crop.top + crop.height))
        expected = pixels(cut.resize((64, 64), Image.Resampling.BILINEAR))
        expected = expected.flip(1) if crop.flip else expected
        assert mean_difference(data[0, index][0], expected) <= 3, (index, crop)
    # Else nothing was tried: 1/4 and 1/8 of the size have both been met.
    assert {(400, 300), (200, 150)} <= set(decoded_sizes), decoded_sizes


def test_photos_stored_reduced_are_those_of_the_full_decode(large_photo, decoded_sizes):
    images = ImageList([str(large_photo)], [0])
    images.sizes = [(1600, 1200)]
    kept = stored_size((1600, 1200), 64)
    assert kept == (128, 96)
    decoded_sizes.clear()
    stored, _ = StoredImages(images, [kept])[0]
    assert decoded_sizes and decoded_sizes[-1] < (1600, 1200)
    with Image.open(large_photo) as image:
        expected = image.convert("RGB").resize(kept, Image.Resampling.BILINEAR)
    assert mean_difference(stored.view(96, 128, 3), pixels(expected)) <= 3


def kept_in_memory(flowers, training, validating, batch):
    """The photos as they are kept on a device, here the CPU."""
    paths = sorted(map(str, flowers.glob("*/*.jpg")))
    args = parse_args("single", ["--device", "cpu", "--image-size", "32", "--workers", "1",
                                 "--batch-size", str(batch)])
    set_single_process(args)
    guard = Guard(args)
    lists = (ImageList(part, [number % 5 for number in range(len(part))])
             for part in (paths[:training], paths[-validating:]))
    train, val = readable_images(*lists, args, guard)
    data = DeviceData(args, train, val, EpochSampler(train, 1, 0, args.seed), CPU, guard)
    data.load()
    return data


def test_validation_batches_are_padded_with_no_label(flowers, monkeypatch):
    monkeypatch.setattr(device_data, "EVAL_BATCH", 4)
    data = kept_in_memory(flowers, 4, 5, batch=2)
    batches = list(data.val_batches())
    assert [len(images) for images, _ in batches] == [4, 4]
    assert [labels.tolist() for _, labels in batches] == [[0, 1, 2, 3], [4, -1, -1, -1]]


def test_validation_batches_that_come_out_even_are_not_padded(flowers, monkeypatch):
    monkeypatch.setattr(device_data, "EVAL_BATCH", 4)
    data = kept_in_memory(flowers, 4, 4, batch=2)
    assert [labels.tolist() for _, labels in data.val_batches()] == [[0, 1, 2, 3]]


@pytest.mark.gpu
def test_a_replay_computes_on_the_batch_that_it_is_given():
    device = torch.device("cuda")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 5)).to(device)
    normalize = Normalizer(device)
    # A rate of zero: only the batch can make a difference.
    optimizer = make_optimizer(model, Namespace(lr=0.0, weight_decay=0.0, nesterov=False), device)
    step = TrainStep(model, optimizer, device, prepare=normalize)
    generator = torch.Generator().manual_seed(1)
    first, second = [
        (torch.randint(256, (4, 8, 8, 3), dtype=torch.uint8, generator=generator).to(device),
         torch.randint(5, (4,), generator=generator).to(device)) for _ in range(2)]
    captured = CapturedStep(step, first, torch.cuda.Stream(device))
    losses = [float(captured(*batch)) for batch in (first, second, first)]
    for loss, (images, labels) in zip(losses, (first, second, first), strict=True):
        expected = nn.functional.cross_entropy(model(normalize(images)), labels)
        assert loss == pytest.approx(float(expected.detach()), abs=1e-4)
    assert losses[0] == losses[2] != losses[1]
