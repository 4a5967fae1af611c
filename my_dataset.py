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
from enum import IntEnum
from typing import IO, Any, BinaryIO

import torch
from PIL import (
    ExifTags,
    Image,
    ImageChops,
    ImageCms,
    ImageFile,
    ImagePalette,
    UnidentifiedImageError,
)
from PIL.BmpImagePlugin import BmpImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import ImageFileDirectory_v2, TiffImageFile
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

_REMEDY = "convert it to a PNG of 8 bits or a JPEG"

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
    file of several pages it is the first. ICC profiles are not applied. What a file's format
    allows, but Pillow shows in wrong colours, is put right or refused by name.

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
        _correct_reading(image, path)
        image.load()
        orientation = _orientation(image)
        rgb = _to_rgb(image, path)
        image.close()  # frees the pixels: at the limit, three copies would take more than 2 GiB
        if orientation in _TRANSPOSE:
            rgb = rgb.transpose(_TRANSPOSE[orientation])
        # Else a later reader of the EXIF block would turn the picture a second time.
        rgb.info = {}
        return rgb


def image_size(path: str | os.PathLike) -> tuple[int, int]:
    """`(width, height)` in pixels that `open_image(path)` would have, without decoding.

    Raises:
        ImageError: the header cannot be read, announces more pixels than the limit, or a form
            of picture that `open_image` refuses. Damage behind the header shows there only.
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
def _opened(path: str | os.PathLike) -> Iterator[ImageFile.ImageFile]:
    """The opened image file. Any exception on the way becomes an ImageError."""
    try:
        kind = os.stat(path).st_mode
        if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):
            raise ValueError("it is a pipe, a socket or a device")  # where reading may never end
        with Image.open(path, formats=_FORMATS) as image:
            if 0 in image.size:
                raise ValueError("it has no pixels")
            form = _form_not_read(image, path)
            if form:
                raise ValueError(f"{form} is not read here; {_REMEDY}")
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
        form = _form_not_opened(path)
        if form:
            return f"{form} is not read here, or it is damaged; {_REMEDY}"
        return "the content is damaged, or in none of the formats " + ", ".join(_FORMATS)
    if isinstance(error, OSError) and error.strerror:
        return error.strerror  # no such file, permission denied ...
    # One line, because a log shows one line per file.
    reason = " ".join(str(error).split()) or type(error).__name__
    # So Pillow begins where it knows the form of a BMP and cannot read it.
    return f"{reason}; {_REMEDY}" if reason.startswith("Unsupported") else reason


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


def _form_not_opened(path: str | os.PathLike) -> str:
    """What form a file has that Pillow took for none of its formats; "" where unknown."""
    try:
        with open(path, "rb") as file:
            head = file.read(16)
            if head.startswith(b"\xff\xd8\xff"):
                return _jpeg_not_read(file)
            # A header of 16 bytes belongs to the variant for files above 4 GiB.
            tags = ImageFileDirectory_v2(head if head[2:3] == b"\x2b" else head[:8])
            file.seek(tags.next)
            tags.load(file)
        return _tiff_form(tags) if tags.get(_Tiff.WIDTH) and tags.get(_Tiff.HEIGHT) else ""
    except Exception:  # not a TIFF, or damaged
        return ""


def _form_not_read(image: ImageFile.ImageFile, path: str | os.PathLike) -> str:
    """The name of an opened file's form where Pillow would fail later, in the middle of an
    epoch, or give wrong colours that `_correct_reading` and `_to_rgb` do not put right; or ""."""
    if image.fp is not None and isinstance(image, JpegImageFile):
        return _jpeg_not_read(image.fp)  # decoding will start at 0, wherever this ends
    if isinstance(image, TiffImageFile):
        return _tiff_not_read(image)
    if isinstance(image, BmpImageFile):
        bits, alpha_mask = _bmp_header(path)
        if bits == 16 and alpha_mask:
            return "a BMP of 16 bits with transparency"
    if isinstance(image, PngImageFile) and b"CgBI" in (kind for kind, *_ in image.private_chunks):
        return "a PNG in Apple's variant for iPhones (CgBI)"
    return ""


def _jpeg_not_read(file: IO[bytes]) -> str:
    file.seek(0)
    frame = _jpeg_frame(file)
    if frame is None:
        return ""
    process, bits, height, _width, components = frame
    if bits != 8:
        return f"a JPEG of {bits} bits"
    if height == 0:
        return "a JPEG that gives its height behind the pixels"
    if components not in (1, 3, 4):
        return f"a JPEG of {components} components"
    # Baseline, extended, progressive, lossless; the first three but baseline arithmetic, too.
    return "" if process in (0, 1, 2, 3, 9, 10) else f"a JPEG of the coding process SOF{process}"


def _jpeg_frame(file: IO[bytes]) -> tuple[int, int, int, int, int] | None:
    """Coding process, bits, height, width and components, from a JPEG's frame header."""
    while start := file.read(1):
        if start != b"\xff":
            continue  # junk between the segments
        marker = start
        while marker == b"\xff":  # any number of them may stand before a marker
            marker = file.read(1)
        if not marker or marker in b"\xd9\xda":
            return None  # the pixels or the end come first
        if marker in b"\x00\x01" or b"\xd0" <= marker <= b"\xd8":
            continue  # nothing belongs to them
        length = int.from_bytes(file.read(2), "big")
        if b"\xc0" <= marker <= b"\xcf" and marker not in b"\xc4\xc8\xcc":
            bits, height, width, components = struct.unpack(">BHHB", file.read(6))
            return marker[0] - 0xC0, bits, height, width, components
        file.seek(max(0, length - 2), io.SEEK_CUR)
    return None


def _bmp_header(path: str | os.PathLike) -> tuple[int, int]:
    """Bits of a pixel, and those among them that give its opacity."""
    with open(path, "rb") as file:
        head = file.read(70).ljust(70, b"\0")
    (size,) = struct.unpack_from("<I", head, 14)
    if size == 12:
        return head[24], 0
    bits, compression = struct.unpack_from("<HI", head, 28)
    (alpha_mask,) = struct.unpack_from("<I", head, 66)
    return bits, alpha_mask if size >= 56 and compression == 3 else 0


class _Tiff(IntEnum):
    """The tags that tell how a TIFF's pixels are to be understood."""

    WIDTH = 256
    HEIGHT = 257
    BITS = 258
    COMPRESSION = 259
    PHOTOMETRIC = 262
    FILL_ORDER = 266
    PLANAR = 284
    INK_SET = 332
    EXTRA_SAMPLES = 338  # what comes behind the colours: opacity, or of no known meaning
    SAMPLE_FORMAT = 339
    SUBSAMPLING = 530


def _tiff_form(tags: ImageFileDirectory_v2) -> str:
    names = {
        _Tiff.PHOTOMETRIC: "photometric interpretation",
        _Tiff.BITS: "bits per sample",
        _Tiff.SAMPLE_FORMAT: "sample format",
        _Tiff.EXTRA_SAMPLES: "extra samples",
        _Tiff.PLANAR: "planar configuration",
        _Tiff.COMPRESSION: "compression",
    }
    values = []
    for tag, name in names.items():
        value = tags.get(tag, ())
        several = value if isinstance(value, tuple) else (value,)
        values += [f"{name} {' '.join(map(str, several[:8]))}"] if several else []
    order = "big" if tags.prefix == b"MM" else "little"
    return f"a {order}-endian TIFF of {', '.join(values)}"


def _tiff_not_read(image: TiffImageFile) -> str:
    tags, mode = image.tag_v2, image.mode
    if tags.get(_Tiff.BITS) == (8,) and tags.get(_Tiff.SAMPLE_FORMAT) == (2,):
        return "a TIFF of signed bytes"
    if mode == "CMYK" and tags.get(_Tiff.INK_SET, 1) != 1:
        return "a TIFF of inks other than cyan, magenta, yellow and black"
    if tags.get(_Tiff.COMPRESSION) in (34676, 34677, 50001):  # libtiff lacks these decoders
        return f"a TIFF of compression {tags[_Tiff.COMPRESSION]}"
    if tags.get(_Tiff.PLANAR) == 2:
        ycbcr = tags.get(_Tiff.PHOTOMETRIC) == 6
        subsampled = ycbcr and tags.get(_Tiff.SUBSAMPLING) != (1, 1)
        # X is Pillow's name for samples to pass over, which it cannot where they lie by themselves.
        ignored_planes = not ycbcr and any("X" in str(tile.args) for tile in image.tile)
        if mode in ("LA", "La", "PA", "LAB") or subsampled or ignored_planes:
            return _tiff_form(tags)
    return ""


def _correct_reading(image: ImageFile.ImageFile, path: str | os.PathLike) -> None:
    """Put right how Pillow is going to take the pixels of some forms; before it decodes them."""
    if isinstance(image, TiffImageFile):
        _correct_tiff(image)
    elif isinstance(image, BmpImageFile):
        _correct_bmp(image, path)


def _correct_tiff(image: TiffImageFile) -> None:
    tags = image.tag_v2
    planes, ycbcr = tags.get(_Tiff.PLANAR) == 2, tags.get(_Tiff.PHOTOMETRIC) == 6
    from_the_right = tags.get(_Tiff.FILL_ORDER) == 2
    if not image.use_load_libtiff and (planes or ycbcr or from_the_right):
        # Uncompressed, Pillow decodes itself, and does not know deep planes, subsampling and
        # some bytes from the right. What it takes for compressed it leaves to libtiff, which
        # looks into the file again.
        tags[_Tiff.COMPRESSION] = 32773
        image._setup()
    # What libtiff hands out has the machine's byte order, not that of the file.
    native = {"F;32BF": "F;32NF", "I;16BS": "I;16NS", "I;32BS": "I;32NS"}
    for i, tile in enumerate(image.tile):
        if tile.codec_name == "libtiff" and isinstance(tile.args, tuple):
            first, *rest = tile.args
            image.tile[i] = tile._replace(args=(native.get(first, first), *rest))


def _correct_bmp(image: BmpImageFile, path: str | os.PathLike) -> None:
    bits, tile = _bmp_header(path)[0], image.tile[0]
    # Pillow takes a palette of greys for no palette, but then also takes the pixels for those
    # of such a picture: of 1 bit if there are two colours, else of 8.
    if (image.mode, bits) in (("1", 4), ("1", 8), ("L", 4)):
        greys = [0, 255] if image.mode == "1" else range(256)
        image._mode = "P"
        image.palette = ImagePalette.raw("RGB", bytes(grey for grey in greys for _ in "RGB"))
        assert isinstance(tile.args, tuple)
        image.tile = [tile._replace(args=("P;4" if bits == 4 else "P", *tile.args[1:]))]
    if tile.codec_name == "bmp_rle" and bits in (4, 8):
        image.tile = [tile._replace(codec_name=_RunLengths.NAME, args=(bits,))]


class _RunLengths(ImageFile.PyDecoder):
    """Run lengths of a BMP. Up to 12.2, Pillow's own decoder misread jumps and odd lengths at
    4 bits, and up to 13.0 it passed over empty lines."""

    NAME = "bmp_run_lengths"
    _pulls_fd = True

    def decode(self, buffer: Any) -> tuple[int, int]:
        assert self.fd is not None
        wide, high, (bits,) = self.state.xsize, self.state.ysize, self.args
        pixels, data, at, x, y = bytearray(wide * high), self.fd.read(), 0, 0, 0
        while y < high and (y < high - 1 or x < wide):
            if at + 2 > len(data):
                raise ValueError("the file is cut off")
            count, value = data[at], data[at + 1]
            at += 2
            if count == 0 and value == 0:  # end of the line
                x, y = 0, y + 1
            elif count == 0 and value == 1:  # end of the picture; what is left has colour 0
                break
            elif count == 0 and value == 2:  # a jump
                x, y, at = x + data[at], y + data[at + 1], at + 2
            else:
                if count:  # the same pixels (at 4 bits: the same two) over and over
                    source, length = bytes([value]) * count, count
                else:  # that many single ones, filled up to an even number of bytes
                    size, length = (value if bits == 8 else (value + 1) // 2), value
                    source = data[at : at + size]
                    at += size + size % 2
                    if len(source) < size:
                        raise ValueError("the file is cut off")
                if bits == 4:
                    source = bytes(half for byte in source for half in (byte >> 4, byte & 15))
                source = source[: max(0, min(length, wide - x))]
                pixels[y * wide + x : y * wide + x + len(source)] = source
                x += length
        self.set_as_raw(bytes(pixels), self.mode, (0, -1))
        return -1, 0


Image.register_decoder(_RunLengths.NAME, _RunLengths)


def _to_rgb(image: Image.Image, path: str | os.PathLike) -> Image.Image:
    """A new RGB image from a loaded image of any mode, by way of as few copies as possible."""
    if image.mode == "LAB":
        lab, srgb = ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB")
        converted = ImageCms.profileToProfile(image, lab, srgb, outputMode="RGB")
        assert converted is not None  # that is so where the image itself is changed
        return converted
    if image.format == "PNG" and image.mode != "P" and "transparency" in image.info:
        with open(path, "rb") as file:
            depth = file.read(25)[24]
        if image.mode == "RGB" and depth == 16:
            return _without_16_bit_key(image, path)
        image.info["transparency"] = _png_key(image.info["transparency"], depth)
    if image.mode == "F" or image.mode.startswith("I"):
        return _deep_grey_to_rgb(image)
    if not image.has_transparency_data:
        return image.convert("RGB")
    if image.mode == "La":  # premultiplied grey: there is no other way out of it
        image = image.convert("LA")
    # By way of RGBA, because only that conversion heeds a palette's or a colour key's alpha.
    rgba = image if image.mode == "RGBA" else image.convert("RGBA")
    white = Image.new("RGB", image.size, "white")
    white.paste(rgba, mask=rgba)  # takes RGBA as it is: colours, and by itself as mask the alpha
    return white


def _png_key(key: int | tuple[int, ...], depth: int) -> int | tuple[int, ...]:
    """A PNG's transparent colour as the pixels show it: those below 8 bits have been scaled.

    Bits of the key beyond the depth do not count, says the specification.
    """
    top = 2**depth - 1
    scale = max(1, 255 // top)
    if isinstance(key, tuple):
        return tuple((part & top) * scale for part in key)
    return (key & top) * scale


def _without_16_bit_key(image: Image.Image, path: str | os.PathLike) -> Image.Image:
    """White in place of a 16-bit PNG's transparent colour, of which `image` has the high bytes
    only: other colours that begin like it are opaque."""
    with Image.open(path, formats=["PNG"]) as low_bytes:
        # Read in the other byte order, what is left of each sample is its low byte.
        low_bytes.tile = [tile._replace(args="RGB;16L") for tile in low_bytes.tile]
        low_bytes.load()
    key: tuple[int, int, int] = image.info["transparency"]
    clear = Image.new("L", image.size, 255)
    for shift, picture in ((8, image), (0, low_bytes)):
        for part, band in zip(key, picture.split(), strict=True):
            wanted = part >> shift & 255
            same = band.point([255 if value == wanted else 0 for value in range(256)])
            clear = ImageChops.darker(clear, same)
    rgb = image.copy()
    rgb.paste((255, 255, 255), mask=clear)
    return rgb


def _deep_grey_to_rgb(image: Image.Image) -> Image.Image:
    """Scale grey of more than 8 bits or float; Pillow's own conversion would clip it at 255.

    Integers in 0..65535 count as 16-bit. Floats in 0..1, 0..255 or 0..65535 (the first that
    holds all) run from black to white over that range. Anything else is stretched from the
    picture's smallest value to its largest.
    """
    tags = image.tag_v2 if isinstance(image, TiffImageFile) else {}
    if image.mode == "F":
        grey = _stretched(image, ranges=(1, 255, 65535))
    else:
        # From 16 bits in either byte order.
        deep = image if image.mode == "I" else image.convert("I")
        if tags.get(_Tiff.BITS) == (12,):
            deep = deep.point(lambda value: value * 16 + 0)
        low, high = _extrema(deep)
        if low < 0 and tags.get(_Tiff.SAMPLE_FORMAT, (1,)) == (1,):
            grey = _stretched(_unsigned(deep), ranges=())
        elif low < 0 or high > 65535:
            grey = _stretched(deep, ranges=())
        else:
            grey = deep.point(_FROM_16_BIT, "L")
            transparent = image.info.get("transparency")
            if isinstance(transparent, int):
                clear = [255 if value == transparent else 0 for value in range(65536)]
                grey.paste(255, mask=deep.point(clear, "L"))
        del deep
    if tags.get(_Tiff.PHOTOMETRIC) == 0:  # white is zero; Pillow heeds that up to 8 bits only
        grey = ImageChops.invert(grey)
    return grey.convert("RGB")


def _unsigned(image: Image.Image) -> Image.Image:
    """Mode I has signed numbers: those of unsigned 32-bit grey that came out negative are
    brought back, as floats."""
    numbers = image.convert("F")
    negative = numbers.point(lambda value: value * -255 + 0).convert("L")
    numbers.paste(numbers.point(lambda value: value * 1 + 2.0**32), mask=negative)
    return numbers


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
    return image.point(lambda value: value * scale + offset).convert("L")
