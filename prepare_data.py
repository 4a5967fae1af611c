"""Get something to train on: the flower photos, ImageNet weights, or a drawn set with no network.

    python prepare_data.py download     # flower_photos/: 3,670 photos, 218 MiB to download
    python prepare_data.py weights      # resNet34.pth: ResNet-34 trained on ImageNet, 83 MiB
    python prepare_data.py sample       # sample_photos/: 500 drawn pictures, a few seconds

Each writes its result whole or not at all and leaves alone what is already there. Behind a proxy
set HTTPS_PROXY; without a network fetch the file elsewhere and pass --url file:///path/to/it.
"""

import argparse
import contextlib
import errno
import gzip
import hashlib
import http.client
import io
import math
import os
import random
import re
import signal
import sys
import tarfile
import tempfile
import urllib.error
import urllib.parse
import urllib.request
import zlib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from utils import written_whole

FLOWERS_URL = ("https://storage.googleapis.com/download.tensorflow.org/example_images/"
               "flower_photos.tgz")
FLOWER_COUNTS = {"daisy": 633, "dandelion": 898, "roses": 641, "sunflowers": 699, "tulips": 799}
WEIGHTS_URL = "https://download.pytorch.org/models/resnet34-b627a593.pth"

TIMEOUT = 30.0  # seconds without a byte after which a connection counts as dead
BLOCK = 2**18  # bytes read at once: small enough for a moving bar, large enough to cost nothing
SIZE_LIMIT = 2**31  # bytes, nine times the flower photos: a wrong address must not fill the disk
TEMPORARY_PREFIX = ".prepare_data_"


# ---- download: the flower photos -------------------------------------------------------------

def download_flowers(output, url=FLOWERS_URL, expected=None):
    """Download the flower photos, unpack them and check that each class is complete.

    The set: 3,670 JPEGs in five folders, published by the TensorFlow team. The photos are under
    CC-BY 2.0; the LICENSE.txt among them names the photographers.

    Args:
        output: the folder to make; what exists already is never changed.
        url: address of a .tgz with everything in a folder `flower_photos`.
        expected: {class: number of images}; FLOWER_COUNTS if None.

    Raises:
        ValueError: the archive is not the right one, or `output` is something else.
        OSError: the network, the server or the disk failed.
    """
    output, expected = Path(output), FLOWER_COUNTS if expected is None else expected
    if os.path.lexists(output):
        refuse_unless(output, wrong_counts(output, expected))
        print(f"{output}: already complete, {sum(expected.values())} images")
        return
    with staging_folder(output) as staging:
        archive = staging / "archive.tgz"
        save_url(url, archive)
        print("unpacking")
        unpack(archive, staging / "unpacked", url)
        photos = staging / "unpacked" / "flower_photos"
        problem = wrong_counts(photos, expected)
        if problem:
            raise ValueError(f"{url}: not the whole set: {problem}. Run the command again, or "
                             "give another address with --url")
        os.rename(photos, output)
    print(f"{output}: {sum(expected.values())} images in {len(expected)} classes")


def wrong_counts(folder, expected):
    """What differs between the folder's classes and {class: number of images}; "" if nothing."""
    if not folder.is_dir():
        return f"no folder {folder.name}"
    found = {}
    for name in {*expected, *(entry.name for entry in folder.iterdir() if entry.is_dir())}:
        if not name.startswith("."):
            found[name] = sum(1 for path in (folder / name).glob("[!.]*")
                              if path.suffix.lower() in (".jpg", ".jpeg"))
    return ", ".join(f"{name} has {found[name]} images in place of {expected.get(name, 0)}"
                     for name in sorted(found) if found[name] != expected.get(name, 0))


def refuse_unless(output, problem):
    """Raise ValueError where `output`, which exists, has a problem."""
    if problem:
        raise ValueError(f"{output} exists and is something else ({problem}). Move it away or "
                         "choose another place with --output")


def unpack(archive, folder, url):
    """Unpack a .tgz into `folder`. Trusts nothing in it: only plain files and folders inside.

    Raises ValueError, naming `url`, for a damaged archive or an entry that could reach outside.
    """
    size = 0
    try:
        with gzip.open(archive) as stream, tarfile.open(fileobj=stream, mode="r:") as tar:
            for member in tar:
                path = PurePosixPath(member.name)
                # A link may lead out of the folder, even where its own name stays inside.
                if (path.is_absolute() or ".." in path.parts
                        or not (member.isfile() or member.isdir())):
                    raise ValueError(f"{url}: refused, because the archive holds "
                                     f"{member.name!r}, a link or a path that leads outside")
                size += member.size
                if size > SIZE_LIMIT:
                    raise ValueError(f"{url}: refused, because it unpacks to more than "
                                     f"{SIZE_LIMIT / 2**30:g} GiB")
                tar.extract(member, folder, filter="data")
            # The checksum stands at the very end, where tarfile does not look.
            while stream.read(BLOCK):
                pass
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{url}: what arrived is no whole .tgz archive ({error}). Open the "
                         "address in a browser: a login or proxy page may stand there; or give "
                         "another with --url") from error


# ---- weights: ResNet-34 trained on ImageNet --------------------------------------------------

def download_weights(output, url=WEIGHTS_URL):
    """Download torchvision's ImageNet weights of ResNet-34 (ResNet34_Weights.IMAGENET1K_V1).

    The file is kept as it was downloaded, after check_weights has found it good.

    Raises:
        ValueError: the file is not such weights, or `output` is something else.
        OSError: the network, the server or the disk failed.
    """
    output = Path(output)
    if os.path.lexists(output):
        refuse_unless(output, check_weights(output, url))
        print(f"{output}: already there, and whole")
        return
    check_parent(output)
    with written_whole(output, "--output") as temporary:
        save_url(url, temporary)
        problem = check_weights(temporary, url)
        if problem:
            raise ValueError(f"{url}: not the weights of a ResNet-34: {problem}. Run the command "
                             "again, or give another address with --url")
    print(f"{output}: weights of ResNet-34, 1000 classes")


def check_weights(path, url):
    """What is wrong with a file of ResNet-34 weights; "" if nothing.

    Where the address carries the start of the file's sha256 (`name-b627a593.pth`), that has to
    agree, and the names and shapes of the tensors always.
    """
    import torch
    from torchvision.models import resnet34

    if not path.is_file():
        return "not a file"
    prefix = re.search(r"-([0-9a-f]{8,64})\.\w+$", urllib.parse.urlsplit(url).path)
    if prefix and not sha256(path).startswith(prefix[1]):
        return f"its sha256 is {sha256(path)[:16]}... and should begin with {prefix[1]}"
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        shapes = {name: tuple(value.shape) for name, value in state.items()}
    except Exception as error:  # damaged files raise a dozen different types
        reason = (str(error).strip().splitlines() or [""])[0]
        return f"no state dict can be read from it ({type(error).__name__}: {reason[:200]})"
    with torch.device("meta"):  # shapes only: no memory, no random numbers
        expected = {name: tuple(value.shape)
                    for name, value in resnet34(weights=None).state_dict().items()}
    # Files saved by early versions lack these counters, which only training with another
    # momentum rule reads.
    different = sorted(name for name in expected.keys() | shapes.keys()
                       if shapes.get(name) != expected.get(name)
                       and not (name.endswith("num_batches_tracked") and name not in shapes))
    if different:
        name = different[0]
        return (f"{len(different)} tensors differ, the first is {name} with shape "
                f"{shapes.get(name)} in place of {expected.get(name)}")
    return ""


def sha256(path):
    """The file's sha256 as 64 hexadecimal digits."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


# ---- shared by both downloads ----------------------------------------------------------------

def check_parent(output):
    """Raise FileNotFoundError where there is no folder for `output` to lie in."""
    if not output.parent.is_dir():
        raise FileNotFoundError(f"{output.parent}: no such folder, so {output} cannot be made")


@contextlib.contextmanager
def staging_folder(output):
    """A private folder beside `output`, to be filled and renamed from; gone at the end.

    Beside it, because a rename is atomic only within one file system.
    """
    check_parent(output)
    with tempfile.TemporaryDirectory(prefix=TEMPORARY_PREFIX, dir=output.parent) as folder:
        yield Path(folder)


def save_url(url, path):
    """Download `url` to the new file `path`, with a progress bar where a person watches.

    Raises OSError, naming the address, for a failed, silent, truncated or endless download.
    """
    from tqdm import tqdm

    request = urllib.request.Request(url, headers={"User-Agent": "prepare_data"})
    with network_errors(url):
        response = urllib.request.urlopen(request, timeout=TIMEOUT)
    length = response.headers.get("Content-Length", "")
    total = int(length) if length.isdecimal() else None
    print(f"downloading {url}" + (f" ({total / 2**20:.0f} MiB)" if total else ""), flush=True)
    received = 0
    with response, open(path, "xb") as file, tqdm(
            total=total, unit="B", unit_scale=True, unit_divisor=1024, disable=None) as bar:
        while True:
            with network_errors(url):
                block = response.read(BLOCK)
            if not block:
                break
            file.write(block)
            received += len(block)
            bar.update(len(block))
            if received > SIZE_LIMIT:
                raise OSError(f"{url}: more than {SIZE_LIMIT / 2**30:g} GiB, which cannot be the "
                              "right file. Check the address")
    if total is not None and received != total:
        raise OSError(f"{url}: the connection ended after {received} of {total} bytes. Run the "
                      "command again")


@contextlib.contextmanager
def network_errors(url):
    """Turns whatever a connection can raise into an OSError with the address and a remedy."""
    try:
        yield
    except urllib.error.HTTPError as error:
        with error:  # it holds the connection
            raise OSError(f"{url}: the server answered {error.code} {error.reason}. Check the "
                          "address or give another with --url") from error
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or str(error) or type(error).__name__
        raise OSError(f"{url}: cannot be downloaded ({reason}). Check the network and, behind a "
                      "proxy, HTTPS_PROXY; or fetch the file elsewhere and pass "
                      "--url file:///path/to/it") from error


# ---- sample: a drawn set, for trying things out with no network ------------------------------

# Most petal colours are shared between classes, and backgrounds hold blobs of them: a network has
# to look at the shape of petals and heads, not only at the mean colour.
PETAL_COLOURS = {
    "daisy": ["white", "white", "plum", "lightpink", "khaki"],
    "dandelion": ["gold", "gold", "orange", "khaki", "white"],
    "roses": ["crimson", "crimson", "hotpink", "white", "gold"],
    "sunflowers": ["gold", "gold", "orange", "crimson", "white"],
    "tulips": ["plum", "crimson", "hotpink", "white", "gold"],
}
GROUND_COLOURS = ["darkgreen", "olivedrab", "seagreen", "saddlebrown", "dimgray", "darkslategray",
                  "darkolivegreen", "steelblue"]
FEWEST_IMAGES = 25  # so that each of the five classes sends one image of five to validation


def draw_sample_set(output, images=500, size=96, seed=0):
    """Draw a data set of flowers: five classes with the names of the photo set.

    The same arguments give the same bytes, with the same version of Pillow.

    Args:
        output: the folder to make; what exists already is never changed.
        images: number of JPEGs over all classes, at least FEWEST_IMAGES.
        size: short side of a picture in pixels, from 32.
        seed: any integer.

    Raises:
        ValueError: `output` is something else, or an argument is out of range.
        OSError: the disk failed.
    """
    from tqdm import tqdm

    if images < FEWEST_IMAGES or size < 32:
        raise ValueError(f"images is {images} and size {size}, but must be at least "
                         f"{FEWEST_IMAGES} and 32")
    output = Path(output)
    names = sorted(PETAL_COLOURS)
    counts = {name: images // len(names) + (place < images % len(names))
              for place, name in enumerate(names)}
    if os.path.lexists(output):
        refuse_unless(output, wrong_counts(output, counts) or other_sample(output, size, seed))
        print(f"{output}: already complete, {images} images")
        return
    with staging_folder(output) as staging:
        for name in names:
            (staging / "set" / name).mkdir(parents=True)
        numbers = [(name, number) for name in names for number in range(counts[name])]
        for name, number in tqdm(numbers, unit=" images", disable=None):
            picture = as_jpeg(draw_picture(name, number, size, seed))
            (staging / "set" / name / picture_name(number)).write_bytes(picture)
        os.rename(staging / "set", output)
    print(f"{output}: {images} images in {len(names)} classes, drawn with seed {seed}")


def other_sample(folder, size, seed):
    """How a sample set differs from the one wanted, judged by one picture; "" if not at all."""
    wanted = as_jpeg(draw_picture("roses", 0, size, seed))
    path = folder / "roses" / picture_name(0)
    if path.is_file() and path.read_bytes() == wanted:
        return ""
    return f"not drawn with seed {seed} and size {size}, or with another version of Pillow"


def picture_name(number):
    """File name of a class's picture; the numbers begin with 0."""
    return f"{number:05}.jpg"


def as_jpeg(picture):
    """The bytes of the picture's JPEG file."""
    content = io.BytesIO()
    picture.save(content, format="JPEG", quality=90)
    return content.getvalue()


def draw_picture(name, number, size, seed):
    """One picture of the class `name` as a Pillow image; short side `size` pixels."""
    from PIL import Image, ImageColor, ImageDraw

    # A generator of its own for each picture: more images do not change the first ones.
    rng = random.Random(f"{seed}/{name}/{number}")
    longer = size * 4 // 3
    width, height = rng.choice([(size, size), (longer, size), (size, longer)])
    # Drawn at twice the size: shrinking it smooths the edges.
    image = draw_background(rng, 2 * width, 2 * height)
    draw = ImageDraw.Draw(image)
    for _ in range(rng.randint(9, 14)):
        # Tulips are seen from the side and stand upright; the others face the camera.
        angle = rng.gauss(0, 0.35) if name == "tulips" else rng.uniform(0, 2 * math.pi)
        head = Head(rng.uniform(0, 2 * width), rng.uniform(0, 2 * height),
                    2 * size * rng.uniform(0.16, 0.28), angle, rng.uniform(0.7, 1.0))
        colour = vary(rng, ImageColor.getrgb(rng.choice(PETAL_COLOURS[name])))
        DRAW[name](draw, rng, head, colour)
    image = image.resize((width, height), Image.Resampling.LANCZOS)
    noise = Image.frombytes("L", image.size, rng.randbytes(width * height)).convert("RGB")
    image = Image.blend(image, noise, rng.uniform(0.0, 0.03))
    light = rng.uniform(0.85, 1.1)
    return image.point(lambda value: min(255, round(value * light)))


def draw_background(rng, width, height):
    """A blurred ramp of two colours with leaves and blobs on it, some in petal colours."""
    from PIL import Image, ImageColor, ImageDraw, ImageFilter

    def colour(names):
        return vary(rng, ImageColor.getrgb(rng.choice(names)))

    image = Image.composite(Image.new("RGB", (width, height), colour(GROUND_COLOURS)),
                            Image.new("RGB", (width, height), colour(GROUND_COLOURS)),
                            Image.linear_gradient("L").resize((width, height)))
    draw = ImageDraw.Draw(image)
    petal_colours = sorted({name for names in PETAL_COLOURS.values() for name in names})
    short = min(width, height)
    for count in range(40):
        place = Head(rng.uniform(0, width), rng.uniform(0, height),
                     short * rng.uniform(0.05, 0.35), rng.uniform(0, 2 * math.pi), 1.0)
        outline = disc(0.6) if count % 3 == 0 else pointed_petal(0, -1, 1, rng.uniform(0.05, 0.3))
        names = petal_colours if count % 8 == 0 else GROUND_COLOURS
        draw.polygon(place.on_canvas(outline), fill=colour(names))
    return image.filter(ImageFilter.GaussianBlur(short * rng.uniform(0.02, 0.05)))


@dataclass
class Head:
    """Where a flower head stands: centre and radius in pixels, turn in radians, and squash.

    `squash` is height over width: a head that is not seen straight from the front looks flat.
    """

    x: float
    y: float
    radius: float
    angle: float
    squash: float

    def on_canvas(self, points):
        """Points of a head of radius 1 around (0, 0), as pixels."""
        cos, sin = self.radius * math.cos(self.angle), self.radius * math.sin(self.angle)
        return [(self.x + u * cos - v * self.squash * sin,
                 self.y + u * sin + v * self.squash * cos) for u, v in points]


def draw_daisy(draw, rng, head, colour):
    """Blunt separate petals around a small yellow eye."""
    count = rng.randint(12, 18)
    for place in range(count):
        angle = 2 * math.pi * (place + rng.uniform(-0.15, 0.15)) / count
        outline = blunt_petal(angle, 0.15, rng.uniform(0.88, 1.0), 1.9 / count)
        draw.polygon(head.on_canvas(outline), fill=shade(colour, rng.uniform(0.8, 1.05)))
    eye = rng.choice([(240, 190, 30), (220, 150, 20), (200, 190, 60)])
    draw.polygon(head.on_canvas(disc(0.28)), fill=shade(eye, 0.8))
    draw.polygon(head.on_canvas(disc(0.2, -0.03, -0.03)), fill=eye)


def draw_dandelion(draw, rng, head, colour):
    """Two hundred fine rays and no eye."""
    width = max(1, round(head.radius / 28))
    for reach, light in ((1.0, 0.75), (0.8, 0.9), (0.55, 1.05)):
        for _ in range(70):
            angle, end = rng.uniform(0, 2 * math.pi), reach * rng.uniform(0.75, 1.0)
            ray = [polar(angle, 0.1), polar(angle, end)]
            draw.line(head.on_canvas(ray), fill=shade(colour, light * rng.uniform(0.85, 1.1)),
                      width=width)


def draw_rose(draw, rng, head, colour):
    """Rings of round overlapping petals with dark rims, wound up in the middle."""
    turn = rng.uniform(0, 2 * math.pi)
    for ring, reach in enumerate((0.62, 0.5, 0.38, 0.26, 0.14)):
        count, size = 6 - ring // 2, 0.42 * (1 - 0.14 * ring)
        for place in range(count):
            u, v = polar(turn + 0.7 * ring + 2 * math.pi * place / count, reach)
            draw.polygon(head.on_canvas(disc(size, u, v)), fill=shade(colour, 0.55))
            draw.polygon(head.on_canvas(disc(0.88 * size, 0.93 * u, 0.93 * v)),
                         fill=shade(colour, rng.uniform(0.8, 1.0)))
    spiral = [polar(turn + 0.8 * step, 0.024 * step) for step in range(18)]
    draw.line(head.on_canvas(spiral), fill=shade(colour, 0.45),
              width=max(1, round(head.radius / 20)))


def draw_sunflower(draw, rng, head, colour):
    """Two layers of pointed petals around a large dark disc of seeds."""
    count = rng.randint(14, 20)
    for layer, light in ((0.5, 0.75), (0.0, 1.0)):
        for place in range(count):
            angle = 2 * math.pi * (place + layer + rng.uniform(-0.1, 0.1)) / count
            outline = pointed_petal(angle, 0.4, rng.uniform(0.88, 1.0), 2.2 / count)
            draw.polygon(head.on_canvas(outline),
                         fill=shade(colour, light * rng.uniform(0.85, 1.05)))
    seeds = rng.choice([(70, 40, 20), (100, 60, 20), (50, 45, 30)])
    draw.polygon(head.on_canvas(disc(0.55)), fill=seeds)
    golden_angle = math.pi * (3 - math.sqrt(5))  # real heads grow their seeds at this angle
    for number in range(60):
        dot = disc(0.035, *polar(golden_angle * number, 0.52 * math.sqrt(number / 60)))
        draw.polygon(head.on_canvas(dot), fill=shade(seeds, 1.9 if number > 20 else 1.3))


def draw_tulip(draw, rng, head, colour):
    """A cup of five petals on a stem between two leaves."""
    stem = [(0, 0.6), (rng.uniform(-0.2, 0.2), 2.5)]
    draw.line(head.on_canvas(stem), fill=(70, 120, 50), width=max(2, round(head.radius / 7)))
    for side in (-1, 1):
        leaf = pointed_petal(math.pi / 2 - side * rng.uniform(0.25, 0.5), 0.0, 1.7, 0.14)
        draw.polygon(head.on_canvas(shifted(leaf, 0.9)), fill=(80, 140, 60))
    for lean, light in ((-0.2, 0.7), (0.2, 0.7), (-0.42, 0.9), (0.42, 0.95), (0.0, 1.05)):
        reach = rng.uniform(1.55, 1.75) if lean else rng.uniform(1.4, 1.6)
        outline = shifted(pointed_petal(lean - math.pi / 2, 0.0, reach, 0.38), 0.8)
        draw.polygon(head.on_canvas(outline), fill=shade(colour, light),
                     outline=shade(colour, 0.5))


DRAW = {"daisy": draw_daisy, "dandelion": draw_dandelion, "roses": draw_rose,
        "sunflowers": draw_sunflower, "tulips": draw_tulip}


def polar(angle, radius):
    """The point at `radius` in the direction `angle`."""
    return radius * math.cos(angle), radius * math.sin(angle)


def disc(radius, u=0.0, v=0.0):
    """A circle around (u, v) as a polygon of 24 points."""
    circle = [polar(math.pi * step / 12, radius) for step in range(24)]
    return [(u + x, v + y) for x, y in circle]


def shifted(points, down):
    """The points moved down."""
    return [(u, v + down) for u, v in points]


def blunt_petal(angle, start, end, width):
    """Outline of a petal that is widest near its round tip; `width` is half its width."""
    return petal(angle, start, end,
                 lambda t: width * min(1, 1.6 * math.sqrt(math.sin(math.pi * t))) * (1 + t) / 2)


def pointed_petal(angle, start, end, width):
    """Outline of a petal that is widest near its base; `width` is half its width."""
    return petal(angle, start, end, lambda t: width * math.sin(math.pi * t**0.7))


def petal(angle, start, end, half_width):
    """Outline of a petal along `angle`; `half_width(t)` for t from 0 (base) to 1 (tip)."""
    left, right = [], []
    for step in range(9):
        t = step / 8
        # At the tip sin(pi) is a rounding error away from 0, and may be below it.
        along, aside = start + (end - start) * t, half_width(t) if 0 < t < 1 else 0.0
        u, v = polar(angle, along)
        du, dv = polar(angle + math.pi / 2, aside)
        left.append((u + du, v + dv))
        right.append((u - du, v - dv))
    return left + right[::-1]


def shade(colour, factor):
    """The colour, lighter or darker."""
    return tuple(min(255, round(channel * factor)) for channel in colour)


def vary(rng, colour):
    """The colour, each channel changed a little at random."""
    return tuple(max(0, min(255, channel + rng.randint(-25, 25))) for channel in colour)


# ---- the command line ------------------------------------------------------------------------

def parse_args(argv=None):
    """The command's options as a namespace with `action`, a function of it."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="{download,weights,sample}")

    def add(name, text, output, action):
        command = commands.add_parser(name, help=text, description=text, allow_abbrev=False,
                                      formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        command.add_argument("--output", type=Path, default=Path(output),
                             help="where to write; nothing there is overwritten")
        command.set_defaults(action=action)
        return command

    flowers = add("download", "download the flower photos", "flower_photos",
                  lambda args: download_flowers(args.output, args.url))
    flowers.add_argument("--url", type=address, default=FLOWERS_URL, help="http, https or file")
    weights = add("weights", "download ImageNet weights of ResNet-34", "resNet34.pth",
                  lambda args: download_weights(args.output, args.url))
    weights.add_argument("--url", type=address, default=WEIGHTS_URL, help="http, https or file")
    sample = add("sample", "draw a small set of flowers, with no network", "sample_photos",
                 lambda args: draw_sample_set(args.output, args.images, args.size, args.seed))
    sample.add_argument("--images", type=at_least(FEWEST_IMAGES), default=500,
                        help="number of pictures over all five classes")
    sample.add_argument("--size", type=at_least(32), default=96, help="short side in pixels")
    sample.add_argument("--seed", type=int, default=0, help="another seed, other pictures")
    return parser.parse_args(argv)


def at_least(low):
    """An argparse type: an integer that is not below `low`."""
    def integer(text):
        value = int(text)
        if value < low:
            raise argparse.ArgumentTypeError(f"{value} is below {low}")
        return value
    return integer


def address(text):
    """An argparse type: an address that can be downloaded from."""
    if not re.match("(https?|file)://", text):
        raise argparse.ArgumentTypeError(f"{text!r} does not begin with http://, https:// or "
                                         "file://")
    return text


@contextlib.contextmanager
def unwinding_signals():
    """SIGINT and SIGTERM end the program by an exception, so that temporary folders go.

    Exit status 130 or 143. A second signal is ignored: removing a folder takes moments.
    """
    def stop(signum, _frame):
        for other in old:
            signal.signal(other, signal.SIG_IGN)
        raise SystemExit(128 + signum)

    old = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
    for signum in old:
        signal.signal(signum, stop)
    try:
        yield
    finally:
        for signum, handler in old.items():
            signal.signal(signum, handler)


def main(argv=None):
    """Run the command line `argv`; returns the exit status, 0 done or 1 failed."""
    args = parse_args(argv)
    try:
        with unwinding_signals():
            args.action(args)
    except (ValueError, OSError) as error:
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
            error = (f"{args.output}: no space left on the disk. Free some, or choose another "
                     "place with --output")
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
