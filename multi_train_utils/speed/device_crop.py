"""A whole batch cropped on the device, out of images that lie in its memory."""

import torch
from torch import Tensor


def crop_batch(pixels: Tensor, table: Tensor, window: tuple[int, int], size: int) -> Tensor:
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


def steps(count: int, like: Tensor) -> Tensor:
    """0, 1, ... count - 1 in the dtype and on the device of ``like``."""
    return torch.arange(count, dtype=like.dtype, device=like.device)


def resize_matrix(begin: Tensor, length: Tensor, flip: Tensor, window: int,
                  size: int) -> tuple[Tensor, Tensor, Tensor]:
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
