"""One image file to one `(image, label)` pair.

`open_image` turns whatever Pillow can read into the RGB picture that a person would see, or
raises an `ImageError` that names the file. `image_size` tells its size from the header alone.
Both may be called from many threads at once: Pillow releases the interpreter lock while it
decodes.
"""

import io
import math
import os
import stat
import struct
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, BinaryIO

import torch
from PIL import ExifTags, Image, ImageCms, UnidentifiedImageError
from torch import Tensor
from torch.utils.data import Dataset

from utils import readable

# Load all of Pillow's format plugins now: later, the first threads would race to do it.
Image.init()

# Raster formats only. Pillow knows more (EPS among them, for which it starts another program),
# and it looks at the content, not at the ending: any of those could lie behind a ".jpg".
# A Pillow built without one of these formats does not know its name.
_FORMATS = tuple(
    name
    for name in ("JPEG", "PNG", "BMP", "WEBP", "TIFF", "GIF", "JPEG2000", "PPM", "AVIF")
    if name in Image.OPEN
)

# Pillow's remarks on odd metadata and on large pictures below its limit would come once per
# file and process. Appended, so that filters a user has set go first, and set once, because
# `warnings.catch_warnings` swaps a global list and is no help among threads.
warnings.filterwarnings("ignore", category=UserWarning, module=r"PIL\.", append=True)
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning, append=True)

_TRANSPOSE = {  # EXIF orientation -> what brings the picture upright
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_SIDEWAYS = (5, 6, 7, 8)  # orientations that swap width and height

# 16-bit grey to 8 bits, rounded: 65535 is white, as 255 is.
_FROM_16_BIT = [(value * 255 + 32767) // 65535 for value in range(65536)]


class ImageError(ValueError):
    """An image file that cannot be used. `.path` is the file, `.reason` says what is wrong.

    Keeps its attributes through pickling, and also through `torch.utils.data.DataLoader`,
    which hands on a worker's exception as `type(error)(text of the traceback)`.
    """

    _JOINT = " is not a usable image: "

    def __init__(self, path: str | os.PathLike, reason: str | None = None) -> None:
        if reason is None:
            last_line = (str(path).strip().splitlines() or [""])[-1]
            message = last_line.removeprefix(f"{__name__}.{type(self).__name__}: ")
            path, _, reason = message.partition(self._JOINT)
        super().__init__(path, reason)
        self.path = os.fspath(path)
        self.reason = reason

    def __str__(self) -> str:
        return readable(f"{self.path}{self._JOINT}{self.reason}")


def open_image(
    path: str | os.PathLike, *, at_least: tuple[int, int] | None = None
) -> Image.Image:
    """Decode an image file to what a person would see.

    Grey, palette, CMYK, YCbCr and CIELAB become RGB; transparent areas lie over white; deep
    grey is scaled to 8 bits, not clipped; EXIF orientation is applied; of an animation or a
    file of several pages it is the first. ICC profiles are not applied.

    Args:
        path: the file. Its content decides the format, not its ending.
        at_least: `(width, height)` that suffices, in pixels after orientation. A JPEG may then
            be decoded at 1/2, 1/4 or 1/8 of its size, which saves most of the time, as long as
            neither side falls below. None decodes at full size.

    Returns:
        A Pillow image of mode RGB, without metadata (what it asked for has been done).

    Raises:
        ImageError: for whatever reason the file does not give a whole picture. A file with
            more than twice `PIL.Image.MAX_IMAGE_PIXELS` pixels is refused before decoding.
    """
    with _opened(path) as image:
        if at_least is not None and image.format in ("JPEG", "MPO"):
            width, height = (max(1, side) for side in at_least)
            if _orientation(image) in _SIDEWAYS:
                width, height = height, width
            image.draft(None, (width, height))
        image.load()
        orientation = _orientation(image)
        rgb = _to_rgb(image)
        image.close()  # frees the pixels: at the limit, three copies would take more than 2 GiB
        if orientation in _TRANSPOSE:
            rgb = rgb.transpose(_TRANSPOSE[orientation])
        # Else a later reader of the EXIF block would turn the picture a second time.
        rgb.info = {}
        return rgb


def image_size(path: str | os.PathLike) -> tuple[int, int]:
    """`(width, height)` in pixels that `open_image(path)` would have, without decoding.

    Raises:
        ImageError: the header cannot be read, or announces more pixels than the limit. Damage
            behind the header shows in `open_image` only.
    """
    with _opened(path) as image:
        width, height = image.size
        if image.format == "PNG":
            with open(path, "rb") as file, Image.open(_png_without_pixels(file)) as header:
                sideways = _orientation(header) in _SIDEWAYS
        elif ExifTags.Base.Orientation in getattr(image, "tag_v2", ()):
            sideways = False  # Pillow gives the size of a TIFF with its own tag applied
        else:
            sideways = _orientation(image) in _SIDEWAYS
        return (height, width) if sideways else (width, height)


class ImageKey(int):
    """An index into MyDataSet that says more: for which epoch, and what size will suffice.

    Anything that takes an index takes it: it is an int. `at_least` is as for `open_image`.
    """

    epoch: int
    at_least: tuple[int, int] | None

    def __new__(
        cls, index: int, epoch: int = 0, at_least: tuple[int, int] | None = None
    ) -> "ImageKey":
        key = super().__new__(cls, index)
        key.epoch, key.at_least = epoch, at_least
        return key


class MyDataSet(Dataset):
    """Image files with their class numbers. Every picture of a training run comes out of it.

    Args:
        images_path: the files.
        images_class: the class number of each.
        transform: called with the RGB Pillow image; None hands out the image itself.

    `dataset[i]` is `(transform(image), label)`; `i` may be an `ImageKey`. Raises ValueError for
    lists of different length, and ImageError, which names the file, when an image is asked for
    that cannot be read.
    """

    def __init__(
        self,
        images_path: Sequence[str],
        images_class: Sequence[int],
        transform: Callable[[Image.Image], Any] | None = None,
    ) -> None:
        if len(images_path) != len(images_class):
            raise ValueError(
                f"every image needs one class number, but there are {len(images_path)} paths "
                f"and {len(images_class)} class numbers"
            )
        self.images_path = images_path
        self.images_class = images_class
        self.transform = transform

    def __len__(self) -> int:
        return len(self.images_path)

    def __getitem__(self, item: int) -> tuple[Any, int]:
        image = open_image(self.images_path[item], at_least=getattr(item, "at_least", None))
        if self.transform is not None:
            image = self.transform(image)
        return image, self.images_class[item]

    @staticmethod
    def collate_fn(batch: Sequence[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
        """Stack B pairs of a `C x H x W` tensor and a class number into `B x C x H x W`
        (dtype of the images) and `B` (int64)."""
        images, labels = zip(*batch, strict=True)
        return torch.stack(images), torch.as_tensor(labels, dtype=torch.int64)


@contextmanager
def _opened(path: str | os.PathLike) -> Iterator[Image.Image]:
    """The opened image file. Any exception on the way becomes an ImageError."""
    try:
        kind = os.stat(path).st_mode
        if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):
            raise ValueError("it is a pipe, a socket or a device")  # where reading may never end
        with Image.open(path, formats=_FORMATS) as image:
            yield image
    # Damaged files make Pillow raise almost anything: OSError, SyntaxError, ValueError,
    # struct.error, zlib.error, KeyError, OverflowError, MemoryError ...
    except Exception as error:
        raise ImageError(path, _reason(path, error)) from error


def _reason(path: str | os.PathLike, error: Exception) -> str:
    if isinstance(error, Image.DecompressionBombError):
        return (
            f"{error} If you trust the file, set PIL.Image.MAX_IMAGE_PIXELS in my_dataset.py to "
            f"half its pixel count or more (now {Image.MAX_IMAGE_PIXELS}; twice that is allowed)"
        )
    if isinstance(error, UnidentifiedImageError):
        if os.path.getsize(path) == 0:
            return "the file is empty"
        return "the content is damaged, or in none of the formats " + ", ".join(_FORMATS)
    if isinstance(error, OSError) and error.strerror:
        return error.strerror  # no such file, permission denied ...
    # One line, because a log shows one line per file.
    return " ".join(str(error).split()) or type(error).__name__


def _orientation(image: Image.Image) -> int:
    """EXIF orientation, 1 to 8; 1 (upright) where there is none or it cannot be read."""
    try:
        # The method of the base class, because that of PNG decodes the picture first.
        orientation = Image.Image.getexif(image).get(ExifTags.Base.Orientation, 1)
        return orientation if orientation in _TRANSPOSE else 1
    except Exception:  # broken metadata must not cost a picture that is whole
        return 1


def _png_without_pixels(file: BinaryIO) -> io.BytesIO:
    """A PNG of nothing but the header and metadata of another one.

    PNG metadata may stand behind the pixels, where Pillow finds it only by decoding them.
    """
    chunks = [file.read(8)]
    while len(head := file.read(8)) == 8:
        length, kind = struct.unpack(">I4s", head)
        if kind in (b"IHDR", b"eXIf", b"tEXt", b"zTXt", b"iTXt"):
            chunks.append(head + file.read(length + 4))
        else:
            file.seek(length + 4, io.SEEK_CUR)  # 4 bytes of checksum follow the data
    chunks.append(b"\0\0\0\0IEND\xaeB`\x82")  # a file that was cut off lacks this end
    return io.BytesIO(b"".join(chunks))


def _to_rgb(image: Image.Image) -> Image.Image:
    """A new RGB image from a loaded image of any mode, by way of as few copies as possible."""
    if image.mode == "LAB":
        lab, srgb = ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB")
        converted = ImageCms.profileToProfile(image, lab, srgb, outputMode="RGB")
        assert converted is not None  # that is so where the image itself is changed
        return converted
    if image.mode == "F" or image.mode.startswith("I"):
        return _deep_grey_to_rgb(image)
    if not image.has_transparency_data:
        return image.convert("RGB")
    # By way of RGBA, because only that conversion heeds a palette's or a colour key's alpha.
    rgba = image if image.mode == "RGBA" else image.convert("RGBA")
    white = Image.new("RGB", image.size, "white")
    white.paste(rgba, mask=rgba)  # takes RGBA as it is: colours, and by itself as mask the alpha
    return white


def _deep_grey_to_rgb(image: Image.Image) -> Image.Image:
    """Scale grey of 16 or 32 bits or float; Pillow's own conversion would clip it at 255.

    Integers in 0..65535 count as 16-bit. Floats in 0..1, 0..255 or 0..65535 (the first that
    holds all) run from black to white over that range. Anything else is stretched from the
    picture's smallest value to its largest.
    """
    if image.mode == "F":
        return _stretched(image, ranges=(1, 255, 65535))
    # From 16 bits in either byte order.
    deep = image if image.mode == "I" else image.convert("I")
    low, high = _extrema(deep)
    if low < 0 or high > 65535:
        return _stretched(deep, ranges=())
    grey = deep.point(_FROM_16_BIT, "L")
    transparent = image.info.get("transparency")
    if isinstance(transparent, int):
        clear = [255 if value == transparent else 0 for value in range(65536)]
        grey.paste(255, mask=deep.point(clear, "L"))
    del deep
    return grey.convert("RGB")


def _extrema(image: Image.Image) -> tuple[float, float]:
    """Smallest and largest value of an image that has one band."""
    low, high = image.getextrema()
    assert not isinstance(low, tuple) and not isinstance(high, tuple)
    return low, high


def _stretched(image: Image.Image, ranges: Sequence[int]) -> Image.Image:
    low, high = _extrema(image)
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ValueError("its grey values are not finite")
    for top in ranges:
        if 0 <= low and high <= top:
            low, high = 0, top
            break
    scale = 255 / (high - low) if high > low else 0
    offset = 0.5 - low * scale  # 0.5 because the conversion to 8 bits cuts off
    return image.point(lambda value: value * scale + offset).convert("L").convert("RGB")
