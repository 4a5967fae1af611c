"""What an epoch sees of an image: its crop, and the one place for augmentations of your own.

All of it follows from (seed, epoch, index of the image in the training list) alone. Neither the
worker, the rank, the number of processes, a resume nor the way of the pixels changes it.
"""

import math
from random import Random
from typing import NamedTuple

import torch
from PIL import Image, ImageOps
from torch import Tensor

# ImageNet's statistics, per channel of an image in 0..1: what the public weights were trained on.
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)


class Crop(NamedTuple):
    """A box in pixels of the image as a person sees it, mirrored afterwards where ``flip``."""

    left: float
    top: float
    width: float
    height: float
    flip: bool

    def scaled(self, x: float, y: float) -> "Crop":
        """The same part of the image after its sides were multiplied by ``x`` and ``y``."""
        return Crop(self.left * x, self.top * y, self.width * x, self.height * y, self.flip)


def draw_crop(seed: int, epoch: int, index: int, width: int, height: int) -> Crop:
    """Random box and flip for one image in one epoch.

    The box covers 8 % to 100 % of the area at an aspect ratio of 3/4 to 4/3 (the Inception crop,
    Szegedy et al. 2014, arXiv:1409.4842, with torchvision's fallback: after ten boxes that do not
    fit, the largest central one). Mirrored in half of the cases.
    """
    random = Random(f"{seed}/{epoch}/{index}")
    flip = random.random() < 0.5
    for _ in range(10):
        area = width * height * random.uniform(*SCALE)
        ratio = math.exp(random.uniform(math.log(RATIO[0]), math.log(RATIO[1])))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            return Crop(random.randint(0, width - w), random.randint(0, height - h), w, h, flip)
    w = min(width, max(1, round(height * RATIO[1])))
    h = min(height, max(1, round(width / RATIO[0])))
    return Crop((width - w) // 2, (height - h) // 2, w, h, flip)


def augment(images: Tensor, seeds: Tensor) -> Tensor:
    """The place for an augmentation of your own: training batches pass here, validation's do not.

    ``images``: B x size x size x 3, 0..255, on the device, cropped and mirrored, not yet
    normalised; uint8 where images are streamed, floating point where they are kept on the GPU.
    ``seeds`` (B, int64, on the device) follow from (seed, epoch, index), one for each image:
    what is drawn from them with uniform() is the same at any number of processes and after a
    resume. Returns a batch of the same shape. It runs beside the captured step, not inside.
    For example brightness, up to 20 % up or down:

        factor = 0.8 + 0.4 * uniform(seeds, 1).view(-1, 1, 1, 1)
        return (images * factor).clamp(0, 255)
    """
    return images


def image_seed(seed: int, epoch: int, index: int) -> int:
    """A number of 63 bits for one image in one epoch."""
    return ((seed * 1_000_003 + epoch) * 0x9E3779B97F4A7C15 + index) % 2**63


def uniform(seeds: Tensor, count: int) -> Tensor:
    """``count`` random numbers in 0..1 for each of the B seeds (int64): float32, B x count.

    Drawn where the seeds are, with no work on the host: SplitMix64 (Steele, Lea and Flood 2014,
    "Fast splittable pseudorandom number generators"), its 64 bits in wrapping int64.
    """
    steps = torch.arange(1, count + 1, device=seeds.device, dtype=torch.int64)
    x = seeds.unsqueeze(1) + steps * signed(0x9E3779B97F4A7C15)
    x = (x ^ shifted(x, 30)) * signed(0xBF58476D1CE4E5B9)
    x = (x ^ shifted(x, 27)) * signed(0x94D049BB133111EB)
    x = x ^ shifted(x, 31)
    return shifted(x, 40).float() / 2**24


def signed(number: int) -> int:
    """The int64 of the same 64 bits."""
    return number - 2**64 if number >= 2**63 else number


def shifted(x: Tensor, bits: int) -> Tensor:
    """int64 moved right as if it had no sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def crop_image(image: Image.Image, crop: Crop, size: int) -> Image.Image:
    """Cut ``crop`` out of a PIL image, resized to ``size`` x ``size``, mirrored if it says so."""
    box = (crop.left, crop.top, crop.left + crop.width, crop.top + crop.height)
    if all(float(edge).is_integer() for edge in box):
        left, top, right, bottom = map(int, box)
        image = image.crop((left, top, right, bottom))
        image = image.resize((size, size), Image.Resampling.BILINEAR)
    else:
        image = image.resize((size, size), Image.Resampling.BILINEAR, box=box)
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if crop.flip else image


def short_side(image_size: int) -> int:
    """Length of the short side before validation's centre crop: 256 for 224, the same ratio."""
    return round(image_size * 256 / 224)


def validation_image(image: Image.Image, image_size: int) -> Image.Image:
    """Resize the short side, cut the centre: what validation and prediction see (PIL image)."""
    short, (width, height) = short_side(image_size), image.size
    if max(width, height) > 8 * min(width, height):
        # Of a long strip only the middle is seen: resized whole, a strip of 1 x 60000 pixels
        # would take gigabytes.
        image = ImageOps.fit(image, (min(width, 8 * height), min(height, 8 * width)))
        width, height = image.size
    if width <= height:
        size = short, int(short * height / width)
    else:
        size = int(short * width / height), short
    image = image.resize(size, Image.Resampling.BILINEAR)
    left, top = (round((side - image_size) / 2) for side in size)
    return image.crop((left, top, left + image_size, top + image_size))


def to_tensor(image: Image.Image) -> Tensor:
    """The pixels of an RGB PIL image as uint8, height x width x 3."""
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return pixels.view(image.height, image.width, 3)


class Normalizer:
    """Pixels in 0..255 (B x H x W x 3, uint8 or float) as the network's input.

    Returns float32, B x 3 x H x W, on the same device (on a GPU in channels_last layout); the
    same values bit for bit as torchvision's ToTensor and Normalize.
    """

    def __init__(self, device: torch.device) -> None:
        # Made once: inside a captured step nothing may be copied from the host.
        self.mean = torch.tensor(MEAN, device=device)
        self.std = torch.tensor(STD, device=device)

    def __call__(self, images: Tensor) -> Tensor:
        images = ((images.float() / 255 - self.mean) / self.std).permute(0, 3, 1, 2)
        return images if images.is_cuda else images.contiguous()
