"""Which part of an image an epoch sees, and how it is cut out: on the host and on the device.

The crop follows from (seed, epoch, index of the image in the training list) alone. Neither the
worker, the rank, the number of processes nor the way of the pixels changes it.
"""

import math
from random import Random
from typing import NamedTuple

import torch
from PIL import Image, ImageOps

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

    def scaled(self, x, y):
        """The same part of the image after its sides were multiplied by ``x`` and ``y``."""
        return Crop(self.left * x, self.top * y, self.width * x, self.height * y, self.flip)


def draw_crop(seed, epoch, index, width, height):
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


def crop_image(image, crop, size):
    """Cut ``crop`` out of a PIL image, resized to ``size`` x ``size``, mirrored if it says so."""
    box = (crop.left, crop.top, crop.left + crop.width, crop.top + crop.height)
    if all(float(edge).is_integer() for edge in box):
        image = image.crop(tuple(int(edge) for edge in box))
        image = image.resize((size, size), Image.Resampling.BILINEAR)
    else:
        image = image.resize((size, size), Image.Resampling.BILINEAR, box=box)
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if crop.flip else image


def short_side(image_size):
    """Length of the short side before validation's centre crop: 256 for 224, the same ratio."""
    return round(image_size * 256 / 224)


def validation_image(image, image_size):
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


def to_tensor(image):
    """The pixels of an RGB PIL image as uint8, height x width x 3."""
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return pixels.view(image.height, image.width, 3)


class Normalizer:
    """Pixels in 0..255 (B x H x W x 3, uint8 or float) as the network's input.

    Returns float32, B x 3 x H x W, on the same device (on a GPU in channels_last layout); the
    same values bit for bit as torchvision's ToTensor and Normalize.
    """

    def __init__(self, device):
        # Made once: inside a captured step nothing may be copied from the host.
        self.mean = torch.tensor(MEAN, device=device)
        self.std = torch.tensor(STD, device=device)

    def __call__(self, images):
        images = ((images.float() / 255 - self.mean) / self.std).permute(0, 3, 1, 2)
        return images if images.is_cuda else images.contiguous()


def crop_batch(pixels, table, window, size):
    """Crop, resize and mirror a batch on the device, as crop_image does image by image.

    ``pixels`` (P x 3, uint8) holds images one after the other, row by row. ``table`` (B x 7,
    float64) has for each image of the batch: number of its first pixel, its width in pixels, and
    left, top, width, height, flip of the crop. ``window`` = (height, width) bounds the boxes.
    Returns B x size x size x 3 values in 0..255, float16 on a GPU and float32 on the CPU.

    Bilinear with antialiasing is linear in each direction: one matrix per image and direction,
    and the whole batch is two batched matrix products, with no work per image on the host.
    """
    dtype = torch.float16 if pixels.is_cuda else torch.float32
    start, stride, left, top, width, height, flip = table.unsqueeze(-1).unbind(1)
    rows, first_row, last_row = resize_matrix(top, height, torch.zeros_like(flip), window[0], size)
    columns, first_column, last_column = resize_matrix(left, width, flip, window[1], size)
    y = torch.minimum(first_row + steps(window[0], table), last_row)
    x = torch.minimum(first_column + steps(window[1], table), last_column)
    line = start + y * stride
    index = (line.unsqueeze(2) + x.unsqueeze(1)).long()
    cut = pixels[index].to(dtype)  # B x rows x columns x 3
    batch = len(table)
    cut = torch.bmm(rows.to(dtype), cut.view(batch, window[0], -1))
    cut = cut.view(batch, size, window[1], 3).transpose(1, 2).reshape(batch, window[1], -1)
    cut = torch.bmm(columns.to(dtype), cut)
    return cut.view(batch, size, size, 3).transpose(1, 2).contiguous()


def steps(count, like):
    """0, 1, ... count - 1 in the dtype and on the device of ``like``."""
    return torch.arange(count, dtype=like.dtype, device=like.device)


def resize_matrix(begin, length, flip, window, size):
    """Weights of Pillow's bilinear resize with antialiasing, in one direction, per image.

    All arguments but the last two are B x 1. Returns the weights (B x size x window, float32) of
    the pixels from the box's first one on, and the numbers of its first and last pixel.
    """
    first, last = begin.floor(), (begin + length).ceil() - 1
    out = steps(size, begin)
    out = torch.where(flip > 0, size - 1 - out, out)
    scale = length / size
    # Relative to the first pixel: small numbers, so float32 is exact enough for the weights.
    center = (begin - first + (out + 0.5) * scale).float().unsqueeze(2)
    pixel = steps(window, center)
    reach = scale.clamp(min=1).float().unsqueeze(2)
    weight = (1 - (pixel + 0.5 - center).abs() / reach).clamp(min=0)
    weight = weight * (pixel <= (last - first).float().unsqueeze(2))
    return weight / weight.sum(dim=2, keepdim=True), first, last
