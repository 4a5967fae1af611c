"""Flowers that are drawn, not photographed: a data set for trying things out with no network."""

from __future__ import annotations

import io
import math
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from utils import refuse_unless, staging_folder, wrong_counts

if TYPE_CHECKING:
    from PIL import Image
    from PIL.ImageDraw import ImageDraw as Draw

Point = tuple[float, float]
Colour = tuple[int, ...]

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


def draw_sample_set(output: str | os.PathLike, images: int = 500, size: int = 96,
                    seed: int = 0) -> None:
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


def other_sample(folder: Path, size: int, seed: int) -> str:
    """How a sample set differs from the one wanted, judged by one picture; "" if not at all."""
    wanted = as_jpeg(draw_picture("roses", 0, size, seed))
    path = folder / "roses" / picture_name(0)
    if path.is_file() and path.read_bytes() == wanted:
        return ""
    return f"not drawn with seed {seed} and size {size}, or with another version of Pillow"


def picture_name(number: int) -> str:
    """File name of a class's picture; the numbers begin with 0."""
    return f"{number:05}.jpg"


def as_jpeg(picture: Image.Image) -> bytes:
    """The bytes of the picture's JPEG file."""
    content = io.BytesIO()
    picture.save(content, format="JPEG", quality=90)
    return content.getvalue()


def draw_picture(name: str, number: int, size: int, seed: int) -> Image.Image:
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


def draw_background(rng: random.Random, width: int, height: int) -> Image.Image:
    """A blurred ramp of two colours with leaves and blobs on it, some in petal colours."""
    from PIL import Image, ImageColor, ImageDraw, ImageFilter

    def colour(names: Sequence[str]) -> Colour:
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

    def on_canvas(self, points: Sequence[Point]) -> list[Point]:
        """Points of a head of radius 1 around (0, 0), as pixels."""
        cos, sin = self.radius * math.cos(self.angle), self.radius * math.sin(self.angle)
        return [(self.x + u * cos - v * self.squash * sin,
                 self.y + u * sin + v * self.squash * cos) for u, v in points]


def draw_daisy(draw: Draw, rng: random.Random, head: Head, colour: Colour) -> None:
    """Blunt separate petals around a small yellow eye."""
    count = rng.randint(12, 18)
    for place in range(count):
        angle = 2 * math.pi * (place + rng.uniform(-0.15, 0.15)) / count
        outline = blunt_petal(angle, 0.15, rng.uniform(0.88, 1.0), 1.9 / count)
        draw.polygon(head.on_canvas(outline), fill=shade(colour, rng.uniform(0.8, 1.05)))
    eye = rng.choice([(240, 190, 30), (220, 150, 20), (200, 190, 60)])
    draw.polygon(head.on_canvas(disc(0.28)), fill=shade(eye, 0.8))
    draw.polygon(head.on_canvas(disc(0.2, -0.03, -0.03)), fill=eye)


def draw_dandelion(draw: Draw, rng: random.Random, head: Head, colour: Colour) -> None:
    """Two hundred fine rays and no eye."""
    width = max(1, round(head.radius / 28))
    for reach, light in ((1.0, 0.75), (0.8, 0.9), (0.55, 1.05)):
        for _ in range(70):
            angle, end = rng.uniform(0, 2 * math.pi), reach * rng.uniform(0.75, 1.0)
            ray = [polar(angle, 0.1), polar(angle, end)]
            draw.line(head.on_canvas(ray), fill=shade(colour, light * rng.uniform(0.85, 1.1)),
                      width=width)


def draw_rose(draw: Draw, rng: random.Random, head: Head, colour: Colour) -> None:
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


def draw_sunflower(draw: Draw, rng: random.Random, head: Head, colour: Colour) -> None:
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


def draw_tulip(draw: Draw, rng: random.Random, head: Head, colour: Colour) -> None:
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


def polar(angle: float, radius: float) -> Point:
    """The point at `radius` in the direction `angle`."""
    return radius * math.cos(angle), radius * math.sin(angle)


def disc(radius: float, u: float = 0.0, v: float = 0.0) -> list[Point]:
    """A circle around (u, v) as a polygon of 24 points."""
    circle = [polar(math.pi * step / 12, radius) for step in range(24)]
    return [(u + x, v + y) for x, y in circle]


def shifted(points: Sequence[Point], down: float) -> list[Point]:
    """The points moved down."""
    return [(u, v + down) for u, v in points]


def blunt_petal(angle: float, start: float, end: float, width: float) -> list[Point]:
    """Outline of a petal that is widest near its round tip; `width` is half its width."""
    return petal(angle, start, end,
                 lambda t: width * min(1, 1.6 * math.sqrt(math.sin(math.pi * t))) * (1 + t) / 2)


def pointed_petal(angle: float, start: float, end: float, width: float) -> list[Point]:
    """Outline of a petal that is widest near its base; `width` is half its width."""
    return petal(angle, start, end, lambda t: width * math.sin(math.pi * t**0.7))


def petal(angle: float, start: float, end: float,
          half_width: Callable[[float], float]) -> list[Point]:
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


def shade(colour: Colour, factor: float) -> Colour:
    """The colour, lighter or darker."""
    return tuple(min(255, round(channel * factor)) for channel in colour)


def vary(rng: random.Random, colour: Colour) -> Colour:
    """The colour, each channel changed a little at random."""
    return tuple(max(0, min(255, channel + rng.randint(-25, 25))) for channel in colour)
