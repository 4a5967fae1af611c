"""Image files of every kind: the picture that a person would see, or an error with the path."""

import os
import pickle
import struct
import subprocess
import sys
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from PIL import ExifTags, Image, ImageChops, ImageFile, ImageStat, PngImagePlugin
from torch.utils.data import DataLoader
from torchvision.transforms.functional import to_tensor

import my_dataset
from my_dataset import ImageError, MyDataSet, image_size, open_image

ROOT = Path(__file__).parents[1]
ODD_IMAGES = ROOT / ".." / "shared" / "data" / "odd_images"
RED, BLUE, WHITE = (200, 30, 30), (30, 30, 200), (255, 255, 255)
# pytest shows every warning, those too that my_dataset keeps out of a log.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
needs_odd_images = pytest.mark.skipif(not ODD_IMAGES.is_dir(), reason="no odd images here")


def manifest():
    if not ODD_IMAGES.is_dir():
        return []
    lines = (ODD_IMAGES / "manifest.tsv").read_text(encoding="utf-8").splitlines()[1:]
    return [(line.split("\t")[0], line.split("\t")[4] == "yes") for line in lines]


def difference(first, second):
    """Mean absolute difference per channel value, 0 to 255."""
    return sum(ImageStat.Stat(ImageChops.difference(first, second)).mean) / 3


def corners(size=(32, 16)):
    """Four colours, so that each of the eight orientations looks different."""
    image = Image.new("RGB", size, WHITE)
    half = (size[0] // 2, size[1] // 2)
    image.paste(RED, (0, 0, *half))
    image.paste(BLUE, (half[0], 0, size[0], half[1]))
    image.paste((30, 200, 30), (0, half[1], half[0], size[1]))
    return image


def stored_as(upright, orientation):
    """The pixels and EXIF block of a camera that was held so."""
    undo = {6: Image.Transpose.ROTATE_90, 8: Image.Transpose.ROTATE_270}
    method = undo.get(orientation, my_dataset._TRANSPOSE.get(orientation))
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    return (upright.transpose(method) if method is not None else upright), exif


def png_chunk(kind, data):
    checksum = struct.pack(">I", zlib.crc32(kind + data))
    return struct.pack(">I", len(data)) + kind + data + checksum


def one_bit_png(path, width, height, data=None):
    """A white PNG of any size without its pixels in memory."""
    if data is None:
        line = b"\0" + b"\xff" * ((width + 7) // 8)
        packer = zlib.compressobj()
        data = b"".join(packer.compress(line) for _ in range(height)) + packer.flush()
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    chunks = png_chunk(b"IHDR", header) + png_chunk(b"IDAT", data) + png_chunk(b"IEND", b"")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunks)
    return path


# ------------------------------------------------------------------ what a person would see


@pytest.mark.parametrize(
    ("mode", "color", "ending", "expected"),
    [
        ("L", 128, "png", (128, 128, 128)),
        ("L", 128, "jpg", (128, 128, 128)),
        ("1", 1, "png", WHITE),
        ("1", 0, "bmp", (0, 0, 0)),
        ("LA", (128, 255), "png", (128, 128, 128)),
        ("LA", (128, 0), "png", WHITE),
        ("RGBA", (200, 30, 30, 255), "png", RED),
        ("RGBA", (0, 255, 0, 0), "png", WHITE),
        ("RGBA", (0, 0, 0, 51), "png", (204, 204, 204)),
        ("RGBA", (0, 255, 0, 0), "tif", WHITE),
        ("RGBA", (0, 255, 0, 0), "webp", WHITE),
        ("CMYK", (0, 255, 255, 0), "jpg", (255, 0, 0)),
        ("CMYK", (0, 255, 255, 0), "tif", (255, 0, 0)),
        ("LAB", (255, 128, 128), "tif", WHITE),
        ("LAB", (0, 128, 128), "tif", (0, 0, 0)),
        ("I;16", 65535, "png", WHITE),
        ("I;16", 32896, "png", (128, 128, 128)),
        ("I;16", 32896, "tif", (128, 128, 128)),
        ("I;16B", 32896, "tif", (128, 128, 128)),
        ("I", 32896, "tif", (128, 128, 128)),
        ("F", 0.5, "tif", (128, 128, 128)),
        ("F", 200.0, "tif", (200, 200, 200)),
        ("F", 32896.0, "tif", (128, 128, 128)),
    ],
)
def test_every_mode_becomes_what_a_person_would_see(tmp_path, mode, color, ending, expected):
    path = tmp_path / f"image.{ending}"
    Image.new(mode, (8, 8), color).save(path)
    image, label = MyDataSet([str(path)], [3])[0]
    assert (image.mode, image.size, label) == ("RGB", (8, 8), 3)
    assert image.getpixel((4, 4)) == pytest.approx(expected, abs=3)


@pytest.mark.parametrize("values", [(-70000, 0, 70000), (0, 10**6, 2 * 10**6)])
@pytest.mark.parametrize("mode", ["I", "F"])
def test_deep_grey_beyond_16_bits_is_stretched_not_clipped(tmp_path, mode, values):
    image = Image.new(mode, (3, 1))
    for x, value in enumerate(values):
        image.putpixel((x, 0), value)
    image.save(tmp_path / "deep.tif")
    read = open_image(tmp_path / "deep.tif")
    assert [read.getpixel((x, 0))[0] for x in range(3)] == pytest.approx([0, 128, 255], abs=1)


def test_grey_that_is_not_finite_is_an_error(tmp_path):
    Image.new("F", (2, 2), float("nan")).save(tmp_path / "nan.tif")
    with pytest.raises(ImageError, match="not finite"):
        open_image(tmp_path / "nan.tif")


@pytest.mark.parametrize("transparency", [None, bytes([0, 255, 255]), 0])
def test_palette_without_a_warning(tmp_path, transparency):
    image = Image.new("P", (64, 64), 1)
    image.putpalette([0, 0, 0, *RED, *BLUE])
    image.paste(2, (32, 0, 64, 64))
    image.paste(0, (0, 0, 64, 8))
    options = {} if transparency is None else {"transparency": transparency}
    image.save(tmp_path / "palette.png", **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read = open_image(tmp_path / "palette.png")
    assert (read.getpixel((10, 30)), read.getpixel((50, 30))) == (RED, BLUE)
    assert read.getpixel((30, 4)) == ((0, 0, 0) if transparency is None else WHITE)


@pytest.mark.parametrize(
    ("mode", "clear", "solid"), [("L", 9, 10), ("RGB", RED, BLUE), ("I;16", 9, 40000)]
)
def test_a_png_colour_key_is_transparent(tmp_path, mode, clear, solid):
    image = Image.new(mode, (8, 8), clear)
    image.paste(Image.new(mode, (4, 8), solid), (4, 0))
    image.save(tmp_path / "key.png", transparency=clear)
    read = open_image(tmp_path / "key.png")
    assert read.getpixel((1, 1)) == WHITE
    assert read.getpixel((6, 1)) != WHITE


@pytest.mark.parametrize("ending", ["gif", "webp", "tif", "png"])
def test_the_first_frame_counts(tmp_path, ending):
    first, second = Image.new("RGB", (16, 16), RED), Image.new("RGB", (16, 16), BLUE)
    options = {"lossless": True} if ending == "webp" else {}
    first.save(tmp_path / f"two.{ending}", save_all=True, append_images=[second], **options)
    assert open_image(tmp_path / f"two.{ending}").getpixel((8, 8)) == pytest.approx(RED, abs=2)


# -------------------------------------------------------------------------------- orientation


@pytest.mark.parametrize("ending", ["jpg", "png", "tif", "webp"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_is_applied_once(tmp_path, orientation, ending):
    upright = corners()
    stored, exif = stored_as(upright, orientation)
    path = tmp_path / f"image.{ending}"
    options = {"lossless": True} if ending == "webp" else {"quality": 95, "subsampling": 0}
    stored.save(path, exif=exif, **(options if ending in ("jpg", "webp") else {}))
    image = open_image(path)
    assert image_size(path) == image.size == upright.size
    assert difference(image, upright) < 3
    assert image.getexif().get(ExifTags.Base.Orientation, 1) == 1


def test_png_orientation_behind_the_pixels(tmp_path):
    stored, exif = stored_as(corners(), 6)
    path = tmp_path / "late.png"
    stored.save(path)
    end = png_chunk(b"IEND", b"")
    block = exif.tobytes().removeprefix(b"Exif\0\0")
    path.write_bytes(path.read_bytes().replace(end, png_chunk(b"eXIf", block) + end))
    assert image_size(path) == open_image(path).size == (32, 16)
    assert difference(open_image(path), corners()) == 0


def test_png_orientation_in_an_imagemagick_profile(tmp_path):
    stored, exif = stored_as(corners(), 8)
    block = exif.tobytes()
    text = PngImagePlugin.PngInfo()
    text.add_text("Raw profile type exif", f"\nexif\n{len(block):8}\n{block.hex()}\n", zip=True)
    stored.save(tmp_path / "magick.png", pnginfo=text)
    assert image_size(tmp_path / "magick.png") == (32, 16)
    assert difference(open_image(tmp_path / "magick.png"), corners()) == 0


@pytest.mark.parametrize("ending", ["jpg", "png", "webp"])
@pytest.mark.parametrize(
    "block",
    [
        b"Exif\0\0MM\0*\0\0\xff\xff",
        b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x02\0\xff\xff\xff\xff\xff\xff\xff\xff",
        b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x63\0\0\0\0\0\0\0",
        b"nothing of the kind",
    ],
    ids=["points outside", "wrong type", "orientation 99", "no EXIF"],
)
def test_bad_exif_does_not_cost_the_picture(tmp_path, ending, block):
    path = tmp_path / f"image.{ending}"
    corners().save(path, exif=block)
    assert open_image(path).size == image_size(path) == (32, 16)


@needs_odd_images
@pytest.mark.parametrize("orientation", [2, 3, 5, 8])
def test_real_photos_are_upright(orientation):
    plain = open_image(ODD_IMAGES / "hopper.jpg")
    turned = open_image(ODD_IMAGES / f"hopper_orientation_{orientation}.jpg")
    # Stored with another quality: about 5 apart when upright, more than 50 in any other way.
    assert difference(turned, plain) < 10


# ------------------------------------------------------------------- broken and hostile files


@needs_odd_images
@pytest.mark.parametrize(("name", "loads"), manifest())
def test_real_odd_files_load_or_name_the_file(name, loads):
    path = ODD_IMAGES / name
    if loads:
        image = open_image(path)
        assert image.mode == "RGB" and image.size == image_size(path)
        low, high = image.convert("L").getextrema()
        assert low < high or name in ("broken_exif_dpi.jpg", "multipage.tiff") or "apng" in name
    else:
        with pytest.raises(ImageError, match=name):
            open_image(path)


@pytest.mark.parametrize("ending", ["jpg", "png", "bmp", "webp", "tif", "gif"])
def test_a_file_that_was_cut_off_is_an_error(tmp_path, ending):
    path = tmp_path / f"cut.{ending}"
    Image.effect_mandelbrot((128, 128), (-2, -1.5, 1, 1.5), 60).convert("RGB").save(path)
    whole = path.read_bytes()
    for share in (0.1, 0.5, 0.9):
        path.write_bytes(whole[: int(len(whole) * share)])
        with pytest.raises(ImageError) as caught:
            open_image(path)
        assert str(path) in str(caught.value)
        assert caught.value.path == str(path)
        assert caught.value.reason and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "error",
    [SyntaxError, struct.error, zlib.error, OSError, MemoryError, KeyError, IndexError, TypeError]
    + [EOFError, AttributeError, OverflowError, ValueError, RecursionError, ZeroDivisionError],
)
def test_whatever_pillow_raises_names_the_file(tmp_path, monkeypatch, error):
    def fail(*args, **kwargs):
        raise error("broken")

    Image.new("RGB", (8, 8)).save(tmp_path / "image.bmp")
    monkeypatch.setattr(Image.Image, "convert", fail)
    with pytest.raises(ImageError, match=r"image\.bmp is not a usable image: .*broken"):
        open_image(tmp_path / "image.bmp")


@pytest.mark.parametrize("read", [open_image, image_size])
def test_missing_empty_and_foreign_files(tmp_path, read):
    (tmp_path / "empty.jpg").touch()
    (tmp_path / "page.jpg").write_text("<html>not found</html>")
    (tmp_path / "folder.jpg").mkdir()
    for name, reason in [
        ("missing.jpg", "No such file"),
        ("empty.jpg", "empty"),
        ("page.jpg", "none of the formats"),
        ("folder.jpg", "directory"),
    ]:
        with pytest.raises(ImageError, match=f"{name} .*{reason}"):
            read(tmp_path / name)


@pytest.mark.parametrize("read", [open_image, image_size])
def test_a_named_pipe_is_not_waited_for(tmp_path, read):
    os.mkfifo(tmp_path / "pipe.jpg")
    with pytest.raises(ImageError, match=r"pipe\.jpg is not .* a pipe"):
        read(tmp_path / "pipe.jpg")


def test_a_program_for_another_interpreter_is_not_an_image(tmp_path):
    path = tmp_path / "script.jpg"
    Image.new("RGB", (8, 8)).save(path, format="EPS")  # Pillow would start Ghostscript for it
    with pytest.raises(ImageError, match="none of the formats"):
        open_image(path)


@pytest.fixture
def decoded(monkeypatch):
    """The formats of the files that were decoded so far."""
    formats, load = [], ImageFile.ImageFile.load

    def noted(self):
        formats.append(self.format)
        return load(self)

    monkeypatch.setattr(ImageFile.ImageFile, "load", noted)
    return formats


def test_above_the_pixel_limit_nothing_is_decoded(tmp_path, decoded):
    path = one_bit_png(tmp_path / "bomb.png", 20000, 10000, data=b"")
    for read in (open_image, image_size, lambda path: open_image(path, at_least=(64, 64))):
        with pytest.raises(ImageError) as caught:
            read(path)
        for needed in (str(path), "200000000 pixels", "set PIL.Image.MAX_IMAGE_PIXELS"):
            assert needed in str(caught.value)
    assert decoded == []
    open_image(one_bit_png(tmp_path / "small.png", 200, 100))
    assert decoded  # else it would not have been seen


def test_a_large_picture_below_the_limit_loads_with_one_line_at_most(tmp_path):
    path = one_bit_png(tmp_path / "large.png", 300, 200)
    script = (
        "import sys; from PIL import Image; Image.MAX_IMAGE_PIXELS = 40000\n"
        "from my_dataset import open_image\n"
        "for _ in range(3): print(open_image(sys.argv[1]).size)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.stdout.split("\n")[:3] == ["(300, 200)"] * 3, done.stderr
    assert done.stderr.count("\n") <= 1


def test_a_name_that_is_not_utf8_can_be_printed(tmp_path):
    path = str(tmp_path / "bad_\udce9.jpg")
    try:
        Path(path).write_bytes(b"")
    except OSError:
        pytest.skip("this file system refuses such a name")
    with pytest.raises(ImageError) as caught:
        open_image(path)
    str(caught.value).encode("utf-8")
    assert "bad_\\udce9.jpg" in str(caught.value)
    assert caught.value.path == path


def test_the_error_survives_pickling():
    error = pickle.loads(pickle.dumps(ImageError("/data/red/x.jpg", "it is cut off")))
    assert (error.path, error.reason) == ("/data/red/x.jpg", "it is cut off")
    assert str(error) == "/data/red/x.jpg is not a usable image: it is cut off"
    assert isinstance(error, ValueError)


def test_the_error_arrives_from_a_loader_worker(tmp_path):
    path = tmp_path / "cut.jpg"
    path.write_bytes(b"\xff\xd8\xff")
    with pytest.raises(ImageError) as caught:
        list(DataLoader(MyDataSet([str(path)], [0]), num_workers=1))
    assert caught.value.path == str(path)
    assert str(caught.value).startswith(str(path)) and "\n" not in str(caught.value)


# ------------------------------------------------------------------------- sizes and threads


@pytest.mark.parametrize("size", [(1, 1), (1, 3000), (3000, 1)])
def test_thin_pictures(tmp_path, size):
    Image.new("RGB", size, RED).save(tmp_path / "thin.png")
    assert open_image(tmp_path / "thin.png").size == image_size(tmp_path / "thin.png") == size


@pytest.mark.parametrize("ending", ["jpg", "png", "bmp", "webp", "tif", "gif"])
def test_image_size_does_not_decode(tmp_path, decoded, ending):
    path = tmp_path / f"image.{ending}"
    corners((40, 30)).save(path)
    decoded.clear()
    assert image_size(path) == (40, 30) and decoded == []
    open_image(path)
    assert decoded  # else it would not have been seen


@pytest.mark.parametrize(
    ("at_least", "expected"),
    [
        (None, (800, 400)),
        ((801, 401), (800, 400)),
        ((401, 10), (800, 400)),
        ((400, 200), (400, 200)),
        ((10, 101), (400, 200)),
        ((200, 100), (200, 100)),
        ((100, 50), (100, 50)),
        ((0, 0), (100, 50)),
    ],
)
@pytest.mark.parametrize("orientation", [1, 6])
def test_at_least_bounds_the_reduced_jpeg(tmp_path, at_least, expected, orientation):
    stored, exif = stored_as(corners((800, 400)), orientation)
    stored.save(tmp_path / "image.jpg", exif=exif, quality=95, subsampling=0)
    image = open_image(tmp_path / "image.jpg", at_least=at_least)
    assert image.size == expected
    assert difference(image, corners((800, 400)).resize(expected)) < 4


def test_at_least_leaves_other_formats_at_full_size(tmp_path):
    corners((800, 400)).save(tmp_path / "image.png")
    assert open_image(tmp_path / "image.png", at_least=(10, 10)).size == (800, 400)


def test_many_threads_read_the_same_pictures(tmp_path):
    paths = []
    for i, ending in enumerate(("jpg", "png", "webp", "tif", "gif", "bmp") * 4):
        paths.append(tmp_path / f"{i}.{ending}")
        corners((64 + i, 32)).save(paths[-1])
    alone = [open_image(path).tobytes() for path in paths]
    with ThreadPoolExecutor(8) as pool:
        assert [image.tobytes() for image in pool.map(open_image, paths)] == alone


# -------------------------------------------------------------------------------- the dataset


def test_dataset_and_collate(tmp_path):
    for i in range(3):
        Image.new("RGB", (6, 4), (i, 0, 0)).save(tmp_path / f"{i}.png")
    paths = [str(tmp_path / f"{i}.png") for i in range(3)]
    dataset = MyDataSet(paths, [2, 0, 1], transform=to_tensor)
    assert len(dataset) == 3
    batch = DataLoader(dataset, batch_size=3, collate_fn=MyDataSet.collate_fn)
    images, labels = next(iter(batch))
    assert images.shape == (3, 3, 4, 6) and images.dtype == torch.float32
    assert labels.dtype == torch.int64 and labels.tolist() == [2, 0, 1]
    assert images[:, 0, 0, 0].mul(255).round().tolist() == [0, 1, 2]


def test_lists_of_different_length_are_refused():
    with pytest.raises(ValueError, match="2 paths and 3 class numbers"):
        MyDataSet(["a.jpg", "b.jpg"], [0, 1, 2])
