"""Thousands of damaged images, weight files and checkpoints: each is used, or refused by name.

Every part runs in a process of its own, so that a crash, a hang or too much memory is a failed
test and not the end of all of them. The files are seeded; one that failed stays in the test's
folder. A crafted file says in its name what must become of it: "used" or "refused".
"""

import argparse
import contextlib
import faulthandler
import io
import json
import multiprocessing
import os
import pickle
import random
import shutil
import struct
import sys
import tarfile
import traceback
import warnings
import zipfile
import zlib
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from PIL import ExifTags, Image, PngImagePlugin
from torch import nn

import model
from multi_train_utils.data_pipeline import ImageList
from multi_train_utils.distributed_utils import set_single_process
from multi_train_utils.options import parse_args
from multi_train_utils.records import checkpoint
from multi_train_utils.records.saver import snapshot
from multi_train_utils.records.weights import load_weights
from multi_train_utils.safety.guard import Guard
from multi_train_utils.train_eval_utils import Place, TrainStep
from multi_train_utils.trainer import make_optimizer
from my_dataset import ImageError, MyDataSet, image_size, open_image
from predict import find_record

ODD_IMAGES = Path(__file__).resolve().parents[2] / "shared" / "data" / "odd_images"
HANG = 60  # seconds for one file
MIB = 2**20
CPU = torch.device("cpu")
CLASSES = ["blue", "red"]
TRAIN_IMAGES = ImageList([f"{number}.jpg" for number in range(20)], [0, 1] * 10)


# ------------------------------------------------------------------------- a process of its own


def peak_memory():
    """The most that this process has had in memory, in bytes.

    Not from getrusage: its figure includes what the process that started this one had.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmHWM in /proc/self/status")


def try_all(part, count, folder):
    """Use the part's files one after the other and write what became of them to report.json."""
    cases, use, refusals, limit = PARTS[part]
    report = {"used": [], "refused": [], "faults": []}
    use(write(folder / "whole", whole(part)))  # what the first use alone needs is no growth
    allowed = peak_memory() + limit
    for name, content in cases(random.Random(0), count):
        path = write(folder / name, content)
        faulthandler.dump_traceback_later(HANG, exit=True)
        fate, fault = fate_of(path, use, refusals)
        faulthandler.cancel_dump_traceback_later()
        if name.startswith(("used", "refused")) and not name.startswith(fate):
            fault = fault or f"was {fate}"
        if peak_memory() > allowed:
            fault, allowed = f"took more than {limit // MIB} MiB", peak_memory() + limit
        if fault:
            report["faults"].append(f"{name}: {fault}")
        else:
            report[fate].append(name)
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    (folder / "report.json").write_text(json.dumps(report))


def write(path, content):
    """Make the file; ``content`` is bytes, or a function that makes it."""
    if callable(content):
        content(path)
    else:
        path.write_bytes(content)
    return path


def fate_of(path, use, refusals):
    """("used" or "refused", what was wrong with that or None)."""
    try:
        use(path)
    except Exception as error:
        # A subclass, UnicodeDecodeError say, is no refusal that anybody wrote.
        if type(error) not in refusals:
            return "refused", traceback.format_exc()
        if str(path) not in str(error) or "\n" in str(error) or len(str(error)) > 2000:
            return "refused", f"with the message {error}"
        return "refused", None
    return "used", None


def fates(part, count, folder, seconds=280):
    """How many of ``count`` damaged files of a part were used, and how many refused.

    Fails where one of them, or of the crafted files, is neither.
    """
    if not Path("/proc/self/status").exists():
        pytest.skip("no /proc/self/status to read the memory from")
    process = multiprocessing.get_context("spawn").Process(
        target=try_all, args=(part, count, folder))
    process.start()
    process.join(seconds)
    if process.is_alive():
        process.kill()
        process.join()
    left = sorted(path.name for path in folder.iterdir())
    assert process.exitcode == 0, f"ended with {process.exitcode}; the last file is among {left}"
    report = json.loads((folder / "report.json").read_text())
    assert not report["faults"], "\n".join(report["faults"])
    return [sum(name[0].isdigit() for name in report[fate]) for fate in ("used", "refused")]


@pytest.mark.parametrize(("part", "count"), [
    ("images", 200), ("weights", 40), ("checkpoints", 40),
    pytest.param("images", 2000, marks=pytest.mark.slow),
    pytest.param("weights", 300, marks=pytest.mark.slow),
    pytest.param("checkpoints", 300, marks=pytest.mark.slow)])
def test_damaged_files_are_used_or_refused(tmp_path, monkeypatch, part, count):
    monkeypatch.chdir(tmp_path)
    used, refused = fates(part, count, tmp_path)
    assert used > count // 5 and refused > count // 5
    assert not (tmp_path / "code_ran").exists()


@pytest.mark.slow
def test_the_largest_images_that_are_allowed(tmp_path):
    fates("large images", 0, tmp_path)


# --------------------------------------------------------------------------------- kinds of harm


def damaged(data, rng):
    """The bytes with one of the things done to them that disks, networks and people do."""
    data, size = bytearray(data), len(data)
    start, length = rng.randrange(size), rng.randint(1, 64)
    near = rng.randrange(min(size, 256))
    kind = rng.choice(("cut", "flips", "flips", "header", "field", "zeros", "doubled"))
    if kind == "cut":
        del data[start:]
    elif kind == "flips":
        for _ in range(rng.choice((1, 4, 64))):
            data[rng.randrange(size)] ^= 1 << rng.randrange(8)
    elif kind == "header":
        data[near:near + 8] = rng.randbytes(rng.randint(0, 8))
    elif kind == "field":
        # Sizes and counts that are as large, as negative or as small as can be.
        value = rng.choice((b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\x80\0\0\0", bytes(4)))
        value = value[:rng.choice((2, 4))]
        data[near:near + len(value)] = value if rng.random() < 0.5 else value[::-1]
    elif kind == "zeros":
        data[start:start + length] = bytes(length)
    else:
        data[start:start] = data[near:near + length]
    return bytes(data)


def one_bit(data, rng):
    """The bytes with one bit flipped: what the checks of a file are least likely to notice."""
    place = rng.randrange(len(data))
    return data[:place] + bytes([data[place] ^ 1 << rng.randrange(8)]) + data[place + 1:]


def png_chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def with_checksums(png):
    """A PNG whose checksums are right again: else most damage is found before it does harm."""
    chunks, place = [png[:8]], 8
    while place + 12 <= len(png):
        length = int.from_bytes(png[place:place + 4], "big")
        chunks.append(png_chunk(png[place + 4:place + 8], png[place + 8:place + 8 + length]))
        place += 12 + length
    return b"".join(chunks) + png[place:]


# ---------------------------------------------------------------------------------------- images


def encoded(image, form, **options):
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def drawn_images():
    """{name: bytes} of small whole images of many formats and modes."""
    rgb = Image.merge("RGB", [Image.effect_mandelbrot((40, 30), (-2, -1.5, 1, right), 40)
                              for right in (0.5, 1, 1.5)])
    rgba, deep = rgb.convert("RGBA"), Image.new("I;16", (40, 30), 40000)
    rgba.putalpha(rgb.getchannel(0))
    exif, text = Image.Exif(), PngImagePlugin.PngInfo()
    exif[ExifTags.Base.Orientation] = 6
    text.add_text("Comment", "flower " * 50, zip=True)
    palette, pages = rgb.convert("P"), {"save_all": True, "append_images": [rgb.rotate(90)]}
    return {
        "rgb.jpg": encoded(rgb, "JPEG", exif=exif), "grey.jpg": encoded(rgb.convert("L"), "JPEG"),
        "progressive.jpg": encoded(rgb, "JPEG", progressive=True),
        "cmyk.jpg": encoded(rgb.convert("CMYK"), "JPEG"),
        "rgb.png": encoded(rgb, "PNG", exif=exif, pnginfo=text), "rgba.png": encoded(rgba, "PNG"),
        "16.png": encoded(deep, "PNG", transparency=7), "1.png": encoded(rgb.convert("1"), "PNG"),
        "palette.png": encoded(palette, "PNG", transparency=bytes(range(256))),
        "animated.png": encoded(rgb, "PNG", **pages),
        "rgb.bmp": encoded(rgb, "BMP"), "palette.bmp": encoded(palette, "BMP"),
        "1.bmp": encoded(rgb.convert("1"), "BMP"),
        "rgb.webp": encoded(rgb, "WEBP", exif=exif),
        "rgba.webp": encoded(rgba, "WEBP", lossless=True),
        "animated.webp": encoded(rgb, "WEBP", **pages),
        "raw.tif": encoded(rgb, "TIFF", exif=exif), "16.tif": encoded(deep, "TIFF"),
        "cmyk.tif": encoded(rgb.convert("CMYK"), "TIFF"),
        "pages.tif": encoded(rgb, "TIFF", **pages),
        "float.tif": encoded(rgb.convert("F"), "TIFF"), "rgba.tif": encoded(rgba, "TIFF"),
        "big.tif": encoded(rgb, "TIFF", big_tiff=True),
        **{f"{name}.tif": encoded(rgb, "TIFF", compression=name)
           for name in ("tiff_lzw", "tiff_adobe_deflate", "jpeg", "packbits")},
        "group4.tif": encoded(rgb.convert("1"), "TIFF", compression="group4"),
        "palette.gif": encoded(palette, "GIF", transparency=3),
        "animated.gif": encoded(rgb, "GIF", **pages), "rgb.ppm": encoded(rgb, "PPM"),
        **{f"rgb.{form.lower()}": encoded(rgb, form) for form in ("JPEG2000", "AVIF")
           if form in Image.SAVE}}


def image_cases(rng, count):
    """(name, content) of the crafted images and of ``count`` damaged ones."""
    yield from crafted_images()
    drawn = list(drawn_images().items())
    real = sorted(ODD_IMAGES.glob("*.*")) if ODD_IMAGES.is_dir() else []
    for number in range(count):
        name, data = rng.choice(drawn)
        if real and number % 2:
            path = rng.choice(real)
            name, data = path.name, path.read_bytes()
        for _ in range(rng.choice((1, 1, 3))):
            data = damaged(data or b"\0", rng)
        if data.startswith(b"\x89PNG") and rng.random() < 0.7:
            data = with_checksums(data)
        yield f"{number}-{name}", data


def png(width, height, *chunks, depth=8, color=2):
    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(chunks) + png_chunk(b"IEND", b"")


def resized_jpeg(jpeg, width, height):
    """The JPEG with another size in its frame header."""
    place = next(jpeg.index(mark) for mark in (b"\xff\xc0", b"\xff\xc2") if mark in jpeg) + 5
    return jpeg[:place] + struct.pack(">HH", height, width) + jpeg[place + 4:]


def tiff(*entries, following=0):
    """A TIFF of 2 x 2 grey pixels with further (tag, type, count, value or offset)."""
    tags = {256: (4, 1, 2), 257: (4, 1, 2), 258: (3, 1, 8), 259: (3, 1, 1), 262: (3, 1, 1),
            273: (4, 1, 4096), 277: (3, 1, 1), 278: (4, 1, 2), 279: (4, 1, 4)}
    tags |= {tag: rest for tag, *rest in entries}
    listed = b"".join(struct.pack("<HHII", tag, *rest) for tag, rest in sorted(tags.items()))
    start = b"II*\0\x08\0\0\0" + struct.pack("<H", len(tags)) + listed
    return (start + struct.pack("<I", following)).ljust(4096, b"\0") + bytes(4)


def crafted_images():
    """(name, content) of images that somebody made in order to do harm."""
    drawn, dot = drawn_images(), png_chunk(b"IDAT", zlib.compress(bytes(7) * 2))
    for name, data in {"empty.jpg": b"", "one-byte.jpg": b"\xff", "text.jpg": b"<html>"}.items():
        yield f"refused-{name}", data
    yield "refused-folder.jpg", Path.mkdir
    yield "refused-missing.jpg", lambda path: path.symlink_to("nowhere")
    for side in (13_000, 60_000, 2**31 - 1):  # the first is below the limit of pixels
        for color in (0, 2, 6):
            yield f"refused-{side}-{color}.png", png(side, side, dot, color=color)
        yield f"refused-{side}.ppm", b"P6 %d %d 255\n" % (side, side)
        yield f"raw-{side}.tif", tiff((256, 4, 1, side), (257, 4, 1, side), (278, 4, 1, side))
        bmp = bytearray(drawn["palette.bmp"])
        bmp[18:26] = struct.pack("<ii", side, -side)
        yield f"refused-{side}.bmp", bytes(bmp)
    for name in ("rgb.jpg", "progressive.jpg", "cmyk.jpg"):
        yield f"refused-65535-{name}", resized_jpeg(drawn[name], 65535, 65535)
    gif = drawn["palette.gif"]
    yield "refused-65535.gif", gif[:6] + b"\xff\xff\xff\xff" + gif[10:]
    webp = bytearray(drawn["rgba.webp"])
    webp[webp.index(b"VP8L") + 9:][:4] = b"\xff\xff\xff\x0f"
    yield "webp-largest.webp", bytes(webp)
    yield from text_bombs(dot)
    yield from crafted_tiffs()


def text_bombs(dot):
    """PNGs of two by two pixels whose metadata unpacks to much more than the file."""
    packer = zlib.compressobj()
    start = packer.compress(b"a") + packer.flush(zlib.Z_FULL_FLUSH)
    # After a full flush the same bytes mean the same again: 3 GiB without packing 3 GiB.
    bomb = start + 192 * (packer.compress(bytes(16 * MIB)) + packer.flush(zlib.Z_FULL_FLUSH))
    yield "text.png", png(2, 2, png_chunk(b"zTXt", b"a\0\0" + bomb), dot)
    yield "international.png", png(2, 2, png_chunk(b"iTXt", b"a\0\1\0\0\0" + bomb), dot)
    yield "profile.png", png(2, 2, png_chunk(b"iCCP", b"a\0\0" + bomb), dot)
    many = png_chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(MIB - 1))) * 3000
    yield "many-texts.png", png(2, 2, many, dot)
    yield "many-texts-behind.png", png(2, 2, dot, many)
    yield "pixels.png", png(2, 2, png_chunk(b"IDAT", bomb))
    yield "length.png", png(2, 2, struct.pack(">I", 2**31 - 1) + b"eXIf", dot)


def crafted_tiffs():
    """TIFFs whose tags claim or repeat what is not there."""
    for kind in (1, 2, 3, 4, 5, 7, 12, 16):
        for tag in (270, 273, 279, 320, 34665, 34675, 65000):
            yield f"count-{tag}-{kind}.tif", tiff((tag, kind, 2**32 - 1, 8))
            yield f"offset-{tag}-{kind}.tif", tiff((tag, kind, 500, 2**32 - 1))
    yield "used-plain.tif", tiff()
    yield "circle.tif", tiff(following=8)
    yield "exif-circle.tif", tiff((34665, 4, 1, 8))
    yield "bits-0.tif", tiff((258, 3, 1, 0))
    yield "samples.tif", tiff((277, 3, 1, 65535))
    yield "rows-0.tif", tiff((278, 4, 1, 0))
    yield "tile-0.tif", tiff((322, 4, 1, 0), (323, 4, 1, 0), (324, 4, 1, 4096))
    yield "compression.tif", tiff((259, 3, 1, 50000))


def large_images(_rng, _count):
    """(name, content) of small files of whole images just below the limit of pixels, all used."""
    side = 13_300
    for form, color, width, more in (("grey", 0, 1, b""), ("rgb", 2, 3, b""), ("rgba", 6, 4, b""),
                                     ("key", 2, 3, png_chunk(b"tRNS", bytes(6))),
                                     ("grey-alpha", 4, 2, b"")):
        yield f"used-{form}.png", large_png(side, width, more, color=color)
    yield "used-16-key.png", large_png(side, 2, png_chunk(b"tRNS", b"\7\7"), depth=16)
    palette = png_chunk(b"PLTE", bytes(768)) + png_chunk(b"tRNS", bytes(256))
    yield "used-palette.png", large_png(side, 1, palette, color=3)
    for name, kind, pixel in (("deep", 1, bytes(4)), ("negative", 2, b"\xff\xff\xff\xff"),
                              ("float", 3, struct.pack("<f", 0.5)),
                              ("large-float", 3, struct.pack("<f", 1e9))):
        yield f"used-{name}.tif", large_tiff(side, kind, pixel)
    drawn = drawn_images()  # a JPEG that ends early, but with an end, counts as whole
    for name in ("rgb.jpg", "progressive.jpg", "cmyk.jpg"):
        yield f"used-{name}", resized_jpeg(drawn[name], side, side)
    gif = drawn["palette.gif"]  # small pixels on a large screen
    yield "used-screen.gif", gif[:6] + struct.pack("<HH", side, side) + gif[10:]


def large_png(side, width, more, depth=8, color=0):
    packer = zlib.compressobj(1)
    data = b"".join(packer.compress(b"\0" + b"\x07" * (side * width)) for _ in range(side))
    pixels = png_chunk(b"IDAT", data + packer.flush())
    return png(side, side, more, pixels, depth=depth, color=color)


def large_tiff(side, kind, pixel):
    """One pixel of 32 bits over and over: all strips of the file are one and the same."""
    rows = 100
    strip, strips = zlib.compress(pixel * (side * rows), 1), side // rows
    start = 4096 + 8 * strips
    head = tiff((256, 4, 1, side), (257, 4, 1, side), (258, 3, 1, 32), (259, 3, 1, 8),
                (273, 4, strips, 4096), (278, 4, 1, rows), (279, 4, strips, 4096 + 4 * strips),
                (339, 3, 1, kind))[:4096]
    offsets, sizes = (struct.pack("<I", value) * strips for value in (start, len(strip)))
    return head + offsets + sizes + strip


def use_large_image(path):
    image, _ = MyDataSet([str(path)], [3])[0]
    assert image.mode == "RGB"


def use_image(path):
    """As the set, the training pipeline and the check of all headers use a file."""
    size = None
    with contextlib.suppress(ImageError):
        size = image_size(path)
    with contextlib.suppress(ImageError):
        assert open_image(path, at_least=(16, 16)).mode == "RGB"
    image, label = MyDataSet([str(path)], [3])[0]
    assert (image.mode, label) == ("RGB", 3)
    assert size == image.size, f"the header said {size}, the picture is {image.size}"


# --------------------------------------------------------------------------- weights, checkpoints


class Tiny(nn.Module):
    """A network so small that hundreds of files of it are quickly written."""

    def __init__(self, num_classes=2):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4)
        self.fc = nn.Linear(4, num_classes)


def arguments():
    """The options of a run on one CPU, resumed or not."""
    args = parse_args("single", ["--device", "cpu", "--epochs", "5", "--batch-size", "4"])
    args.model = "tiny"
    set_single_process(args)
    return args


def new_step(args):
    network = Tiny()
    return TrainStep(network, make_optimizer(network, args, CPU), CPU)


def a_checkpoint(**changes):
    """What a run writes that stopped in its third epoch, with other values for some entries."""
    args = arguments()
    return snapshot(checkpoint.contents(
        new_step(args), Place(2, 8, 12.5, 8), 0.5, [checkpoint.random_state(CPU)], args, CLASSES,
        "run", TRAIN_IMAGES.fingerprint())) | changes


def saved(content, zipped=True):
    file = io.BytesIO()
    torch.save(content, file, _use_new_zipfile_serialization=zipped)
    return file.getvalue()


def zip_with(data, changed, **options):
    """The zip file with each member's bytes as ``changed(name, bytes)`` gives them."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(file, "w", **options) as new:
        for name in old.namelist():
            new.writestr(name, changed(name, old.read(name)))
    return file.getvalue()


def whole(part):
    """An undamaged file of a part."""
    model.MODELS["tiny"] = Tiny  # in this process alone
    if part.endswith("images"):
        return drawn_images()["rgb.png"]
    return saved(a_checkpoint() if part == "checkpoints" else Tiny().state_dict())


def damaged_files(rng, count, content):
    """(name, bytes): the container damaged, a member of it, or a file in old torch's format."""
    zipped, old = saved(content), saved(content, zipped=False)
    for number in range(count):
        kind = rng.choice(("zip", "data.pkl", "data.pkl", "data/1", "old"))
        harm = rng.choice((damaged, one_bit))
        if kind.startswith("data"):
            def inside(name, data, kind=kind, harm=harm):
                return harm(data, rng) if name.endswith(kind) else data

            data = zip_with(zipped, inside)
        else:
            data = harm(zipped if kind == "zip" else old, rng)
        kind = kind.replace("/", "-")
        yield f"{number}-{kind}.pth", data


class Malice:
    """Pickles into a call."""

    def __init__(self, function, *values):
        self.call = function, values

    def __reduce__(self):
        return self.call


def nested(depth, key="a"):
    """A dict in a dict in a dict ..."""
    content = {}
    for _ in range(depth):
        content = {key: content}
    return content


def doubling(levels=40):
    """Two references to a list of two references ...: small in the file, 2**levels when printed."""
    content = ["a"]
    for _ in range(levels):
        content = [content, content]
    return content


def containers(good):
    """(name, content) of files around the content ``good`` that are wrong as files."""
    data = saved(good)
    for name, content in {"empty": b"", "text": b"no weights", "cut-zip": b"PK\3\4 cut",
                          "empty-zip": b"PK\5\6" + bytes(18), "tensor": saved(torch.ones(3)),
                          "list": saved([1, 2]), "none": saved(None),
                          "pickle": pickle.dumps({"a": 1}), "doubling": saved(doubling()),
                          "namespace": saved(argparse.Namespace(model=good))}.items():
        yield f"refused-{name}.pth", content
    yield "refused-folder.pth", Path.mkdir
    yield "refused-link.pth", lambda path: path.symlink_to("nowhere")
    for function in (os.mkdir, os.system, eval, exec):
        word = {os.mkdir: "code_ran", os.system: "touch code_ran"}.get(
            function, "__import__('os').mkdir('code_ran')")
        malice = {"model": Malice(function, word)}
        yield f"refused-{function.__name__}.pth", saved(good | malice)
        yield f"refused-{function.__name__}-old.pth", saved(good | malice, zipped=False)
        yield f"refused-{function.__name__}-pickle.pth", pickle.dumps(malice)
    yield "refused-old.tar.pth", old_tar
    yield "refused-bomb.pth", zip_with(
        data, lambda name, old: bytes(200 * MIB) if name.endswith("data/0") else old,
        compression=zipfile.ZIP_DEFLATED, compresslevel=1)
    for width in (4, 8):  # the sizes of the last member in the zip's directory
        place = data.rindex(b"PK\1\2") + 20
        lie = b"\xf0\xff\xff\x7f" * (width // 4)
        yield f"refused-size-{width}.pth", data[:place] + lie + data[place + width:]


def old_tar(path):
    """A tar file with the members that torch wrote long ago."""
    with tarfile.open(path, "w") as file:
        for name in ("storages", "tensors", "pickle"):
            member = tarfile.TarInfo(name)
            member.size = 4
            file.addfile(member, io.BytesIO(b"\x80\2N."))


def weight_cases(rng, count):
    """(name, content) of the crafted weight files and of ``count`` damaged ones."""
    good = Tiny().state_dict()
    yield from containers(good)
    yield from odd_tensors(good)
    yield from wrong_sizes(good)
    deep = (1,)
    for _ in range(400):
        deep = (deep,)
    for name, more in {"numbers": {1: good["fc.bias"], None: 2, (1, "a"): 3}, "deep-key": {deep: 1},
                       "deep-name": {deep: good["fc.bias"]}, "deep": {"a": nested(400)},
                       "lines": {"a\nb" * 1000: good["fc.bias"]}, "surrogate": {"\udce9": 1},
                       "doubling": {"a": doubling()}}.items():
        yield f"used-{name}.pth", saved(good | more)
    yield "refused-depth-1000.pth", saved_deep(nested(1000))
    yield "refused-models.pth", saved_deep(nested(1000, "model"))
    for number, content in enumerate((good, {"model": good, "epoch": 1})):
        for name, data in damaged_files(rng, count // 2, content):
            yield f"{number}-{name}", data


def saved_deep(content):
    """As saved(); the pickler in Python needs some frames a level, more than it gets otherwise."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)
    try:
        return saved(content)
    finally:
        sys.setrecursionlimit(limit)


def odd_tensors(good):
    """(name, content) of weight files with one tensor of another kind, of the right shape."""
    zeros = torch.zeros(2, 4)
    odd = {"used-nan": zeros + float("nan"), "used-inf": zeros - float("inf"),
           "used-stride-0": torch.zeros(1).expand(2, 4), "used-turned": torch.zeros(4, 2).t(),
           "used-parameter": nn.Parameter(zeros), "used-string": "weights",
           "used-other-shape": torch.zeros(1).expand(10**6, 10**6), "used-none": torch.zeros(0),
           "used-int": zeros.long(), "used-half": zeros.half(), "used-bfloat16": zeros.bfloat16(),
           "refused-complex": zeros.cfloat(), "refused-meta": zeros.to("meta"),
           "refused-sparse": zeros.to_sparse()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on their way out of torch, but not out of people's files
        odd["refused-csr"] = zeros.to_sparse_csr()
        odd["refused-nested"] = torch.nested.nested_tensor([torch.zeros(4), torch.zeros(3)])
        with contextlib.suppress(AttributeError):
            odd["refused-quantized"] = torch.quantize_per_tensor(zeros, 1, 0, torch.qint8)
    for name in dir(torch):
        if isinstance(getattr(torch, name), torch.dtype):
            with contextlib.suppress(RuntimeError):
                odd[f"dtype-{name}"] = torch.empty(2, 4, dtype=getattr(torch, name))
    for name, value in odd.items():
        for zipped in (True, False):
            with contextlib.suppress(RuntimeError, TypeError, AttributeError, KeyError):
                yield (f"{name}-{'zip' if zipped else 'old'}.pth",
                       saved(good | {"fc.weight": value}, zipped))


def wrong_sizes(good):
    """(name, content) of files in which a tensor claims more than its storage has."""
    def claim(storage, *values):
        rebuild = Malice(torch._utils._rebuild_tensor_v2, storage, *values, False, OrderedDict())
        return good | {"fc.weight": rebuild}

    def longer(name, data):
        return data.replace(b"Kl", b"J\xff\xff\xff\x7f", 1) if name.endswith(".pkl") else data

    storage = torch.zeros(8).storage()
    for name, values in {"size": (0, (2, 10**9), (10**9, 1)), "one-more": (1, (2, 4), (4, 1)),
                         "stride": (0, (2, 4), (10**12, 1)), "negative": (0, (2, 4), (-4, 1)),
                         "offset": (2**62, (2, 4), (4, 1)), "before": (-8, (2, 4), (4, 1)),
                         "minus": (0, (-2, -4), (4, 1)), "ranks": (0, (2, 4), (4,)),
                         "text": ("0", (2, 4), (4, 1)), "wide": (0, (2**62, 8), (8, 1))}.items():
        for zipped in (True, False):
            kind = "zip" if zipped else "old"
            yield f"refused-storage-{name}-{kind}.pth", saved(claim(storage, *values), zipped)
    for zipped in (True, False):
        # What the file says of the length of a storage: 108 numbers in that of conv1.
        data = saved(good, zipped)
        data = zip_with(data, longer) if zipped else longer("data.pkl", data)
        yield f"refused-length-{'zip' if zipped else 'old'}.pth", data


def use_weights(path):
    """As training and prediction load a weight file."""
    find_record(path)
    load_weights(Tiny(), path)


def checkpoint_cases(rng, count):
    """(name, content) of the crafted checkpoints and of ``count`` damaged ones."""
    good = a_checkpoint()
    yield from containers(good)
    yield from ((f"{name}.pth", saved(content)) for name, content in crafted_checkpoints(good))
    yield "refused-depth-1000.pth", saved_deep(nested(1000))
    for key in list(good):
        yield f"refused-without-{key}.pth", saved({k: good[k] for k in good if k != key})
        yield f"refused-deep-{key}.pth", saved_deep(good | {key: nested(1000)})
    yield "used-deep-other.pth", saved(good | {"other": nested(400), 1: doubling()})
    yield from damaged_files(rng, count, good)


def crafted_checkpoints(good):
    """(name, content) of checkpoints one entry of which no run would write."""
    for key in list(good):
        for name, value in strange_values().items():
            fine = name in {"run": ("text", "none"), "loss_sum": ("fraction", "minus"),
                            "best_accuracy": ("fraction", "minus")}.get(key, ())
            yield f"{'used' if fine else 'refused'}-{key}-{name}", good | {key: value}
    yield "used-as-it-is", good
    yield "used-epoch-beyond", good | {"epoch": 10**6}
    yield "used-other-rate", good | {"arguments": good["arguments"] | {"lr": 5.0}}
    yield "refused-position-beyond", good | {"position": 21, "loss_images": 21}
    yield "refused-no-images", good | {"loss_images": 0}
    for name in ("../elsewhere", "/", "..", "a\0b", ""):
        yield f"refused-run-{len(name)}", good | {"run": name}
    for name, value in strange_values().items():
        for option in ("model", "lr", "image_size"):
            changed = {"arguments": good["arguments"] | {option: value}}
            fine = option == "lr" and name in ("text", "minus", "fraction", "true", "none")
            yield f"{'used' if fine else 'refused'}-{option}-{name}", good | changed
        for key in ("count", "sha256"):
            changed = good["train_list"] | {key: value}
            yield f"refused-{key}-{name}", good | {"train_list": changed}
        yield f"refused-class-{name}", good | {"classes": ["blue", value]}
    yield from crafted_states(good)


def strange_values():
    """{name: value} of what a file can hold in place of a number, a text or a dict."""
    return {"text": "three", "minus": -1, "fraction": 2.5, "true": True, "none": None,
            "list": [1], "tensor": torch.ones(2, 2), "dict": {"a": 1}, "huge": 10**5000,
            "nan": float("nan"), "minus-inf": -float("inf"), "doubling": doubling(),
            "complex": 1j}


def crafted_states(good):
    """(name, content) of checkpoints whose tensors are not those of this network or generator."""
    weights, momentum = good["model"], good["optimizer"]["state"]
    some = torch.zeros(2, 4)
    for name, value in {"shape": torch.zeros(4, 2), "double": some.double(), "text": "a",
                        "meta": some.to("meta"), "complex": some.cfloat(), "half": some.half(),
                        "sparse": some.to_sparse()}.items():
        yield f"refused-weight-{name}", good | {"model": weights | {"fc.weight": value}}
        changed = {"state": momentum | {3: {"momentum_buffer": value}}}
        yield f"refused-momentum-{name}", good | {"optimizer": changed}
    yield "used-nan-weight", good | {"model": weights | {"fc.weight": some + float("nan")}}
    yield "refused-more-weights", good | {"model": weights | {"more": some}}
    wrapped = {f"module.{name}": value for name, value in weights.items()}
    yield "refused-wrapped", good | {"model": wrapped}
    for name, state in {"empty": {}, "fewer": {0: momentum[0]}, "more": momentum | {9: {}},
                        "bare": dict.fromkeys(momentum, some),
                        "text": {str(number): momentum[number] for number in momentum},
                        "no-buffer": dict.fromkeys(momentum, {"momentum_buffer": None})}.items():
        yield f"refused-optimizer-{name}", good | {"optimizer": {"state": state}}
    state = good["random_states"][0]["cpu"]
    for name, value in {"short": state[:-1], "long": torch.cat([state, state]), "ones": state | 255,
                        "float": state.float(), "strided": torch.cat([state, state])[::2],
                        "text": "a", "none": None, "list": [1], "meta": state.to("meta")}.items():
        yield f"refused-random-{name}", good | {"random_states": [{"cpu": value, "cuda": None}]}
    yield "refused-random-cuda", good | {"random_states": [{"cpu": state, "cuda": "a"}]}
    yield "refused-random-keys", good | {"random_states": [{"cpu": state}]}
    yield "used-random-fewer", good | {"random_states": []}
    scaler = torch.amp.GradScaler("cpu").state_dict()
    yield "used-scaler", good | {"scaler": scaler}
    for name, value in {"text": "a", "nan": float("nan"), "huge": 1e300, "count": 2**40}.items():
        yield f"refused-scaler-number-{name}", good | {"scaler": scaler | {"scale": value}}
    yield "refused-scaler-keys", good | {"scaler": {"scale": 1.0}}


def use_checkpoint(path):
    """As a resumed run takes up its state."""
    args = arguments()
    args.resume = str(path)
    find_record(path)
    with contextlib.redirect_stdout(io.StringIO()):
        state = checkpoint.read(args, Guard(args), CLASSES, TRAIN_IMAGES)
    checkpoint.restore(new_step(args), state, rank=0)


PARTS = {"images": (image_cases, use_image, (ImageError,), 2048 * MIB),
         "large images": (large_images, use_large_image, (ImageError,), 2048 * MIB),
         # These files are of some KiB: much less than what an image may take is too much.
         "weights": (weight_cases, use_weights, (ValueError, FileNotFoundError), 128 * MIB),
         "checkpoints": (checkpoint_cases, use_checkpoint, (ValueError, FileNotFoundError),
                         128 * MIB)}
