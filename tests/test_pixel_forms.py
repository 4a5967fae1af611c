"""One small file for each form that the specifications of the picture formats allow.

Written by hand, and with the colours that a person would work out from the specification's text,
so that a form that Pillow reads wrong does not pass for right because Pillow wrote it, too. Each
is read with the right colours, or refused by name and with a remedy by `open_image` and already
by `image_size`, which runs over all files before the training starts.
"""

import io
import re
import struct
import zlib
from typing import NamedTuple

import pytest
from PIL import Image

from my_dataset import ImageError, image_size, open_image

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

WIDTH, HEIGHT = 9, 5  # odd, so that lines end within a byte, and every interlacing pass has pixels
WHITE = (255, 255, 255)


class Form(NamedTuple):
    name: str
    file: bytes
    colours: list  # repeated as by `spread`, or all of them; none where they have no meaning here
    tolerance: int = 0


def spread(values):
    """Rows of a picture that shows all values next to each other, in either direction."""
    return [[values[(x + 2 * y) % len(values)] for x in range(WIDTH)] for y in range(HEIGHT)]


def scaled(value, depth):
    return round(value * 255 / (2**depth - 1))


def over_white(colour, alpha):
    """A straight colour and its opacity, 0 to 1."""
    return tuple(round(part * alpha + 255 * (1 - alpha)) for part in colour)


def packed(samples, depth, order=">"):
    """A line of samples: below 8 bits from the high bits of each byte on, filled up with zeros."""
    if depth == "float":
        return struct.pack(f"{order}{len(samples)}f", *samples)
    if depth in (16, 32):
        kind = {16: "H", 32: "I"}[depth]
        return struct.pack(f"{order}{len(samples)}{kind}", *(v % 2**depth for v in samples))
    bits = "".join(format(value, f"0{depth}b") for value in samples)
    bits += "0" * (-len(bits) % 8)
    return int(bits, 2).to_bytes(len(bits) // 8, "big")


def flat(row):
    return [sample for pixel in row for sample in pixel]


# ------------------------------------------------------------------------------------------ PNG
# PNG Specification, third edition: 11.2.1 (IHDR), 11.3.1.1 (tRNS), 8.1 and table 8.1 (Adam7).

ADAM7 = [(0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2)]
ADAM7 += [(0, 1, 1, 2)]


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(depth, colour_type, values, *chunks, interlaced=False):
    rows, lines = spread(values), []
    for left, top, right, down in ADAM7 if interlaced else [(0, 0, 1, 1)]:
        for row in rows[top::down]:
            if row[left::right]:
                lines.append(b"\0" + packed(flat(row[left::right]), depth))
    header = struct.pack(">IIBBBBB", WIDTH, HEIGHT, depth, colour_type, 0, 0, interlaced)
    parts = [chunk(b"IHDR", header), *(chunk(*each) for each in chunks)]
    parts += [chunk(b"IDAT", zlib.compress(b"".join(lines))), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def png_grey_forms(interlaced, suffix):
    some = {1: [0, 1], 2: [0, 1, 2, 3], 4: [0, 1, 7, 12, 15], 8: [0, 1, 17, 127, 255]}
    some[16] = [0, 1, 0x1234, 0x1235, 0x1334, 32767, 65535]
    for depth, values in some.items():
        grey = {value: (scaled(value, depth),) * 3 for value in values}
        samples = [(value,) for value in values]
        yield Form(
            f"png grey {depth}{suffix}",
            png(depth, 0, samples, interlaced=interlaced),
            list(grey.values()),
        )
        for key in values:
            yield Form(
                f"png grey {depth} key {key}{suffix}",
                png(depth, 0, samples, (b"tRNS", struct.pack(">H", key)), interlaced=interlaced),
                list({**grey, key: WHITE}.values()),
            )


def png_colour_forms(interlaced, suffix):
    """The 16-bit ones may be off by one: dropping the low byte is allowed, too (13.12)."""
    some = {8: [(200, 1, 2), (200, 1, 3), (0, 0, 255), (10, 20, 30)]}
    some[16] = [(0xC822, 123, 77), (0xC823, 123, 77), (0xC822, 124, 77), (0xC822, 123, 78)]
    some[16] += [(0xC922, 123, 77), (0, 0, 65535), (0x00C8, 0, 0), (0xC812, 0, 0)]
    for depth, values in some.items():
        colours = {value: tuple(scaled(v, depth) for v in value) for value in values}
        for key in [None, *values, (7, 7, 7)]:
            chunks = [] if key is None else [(b"tRNS", struct.pack(">HHH", *key))]
            right = {**colours, key: WHITE} if key in colours else colours
            yield Form(
                f"png RGB {depth} key {key}{suffix}",
                png(depth, 2, values, *chunks, interlaced=interlaced),
                list(right.values()),
                tolerance=depth // 16,
            )


def png_palette_forms(interlaced, suffix):
    palette = [(200, 30, 30), (30, 30, 200), (0, 0, 0), (10, 20, 30)]
    for depth in (1, 2, 4, 8):
        used = palette[: 2**depth]
        for alphas in [(), (0,), (255, 0), (0, 51), (51, 255, 0)]:
            alphas = alphas[: len(used)]
            full = [*alphas, 255, 255, 255, 255]  # what tRNS does not reach is opaque
            chunks = [(b"PLTE", bytes(flat(used)))] + [(b"tRNS", bytes(alphas))] * bool(alphas)
            yield Form(
                f"png palette {depth} alphas {alphas}{suffix}",
                png(depth, 3, [(i,) for i in range(len(used))], *chunks, interlaced=interlaced),
                [over_white(colour, full[i] / 255) for i, colour in enumerate(used)],
            )


def png_alpha_forms(interlaced, suffix):
    for depth in (8, 16):
        top = 2**depth - 1
        alphas = (0, top // 5, top)
        grey = [(value, alpha) for value in (0, top // 3, top) for alpha in alphas]
        colour = [(top, value, 0, alpha) for value in (0, top // 3) for alpha in alphas]
        for kind, name, values in ((4, "grey", grey), (6, "RGB", colour)):
            right = []
            for *parts, alpha in values:
                parts = parts * 3 if kind == 4 else parts
                right.append(over_white([scaled(part, depth) for part in parts], alpha / top))
            yield Form(
                f"png {name} with alpha {depth}{suffix}",
                png(depth, kind, values, interlaced=interlaced),
                right,
                tolerance=1,
            )


def png_forms():
    for interlaced in (False, True):
        suffix = " interlaced" * interlaced
        for forms in (png_grey_forms, png_colour_forms, png_palette_forms, png_alpha_forms):
            yield from forms(interlaced, suffix)
    # "decoders must mask the other bits to 0 before the value is used"
    yield Form("png grey 8 key beyond 8 bits", png(8, 0, [(5,), (9,)], (b"tRNS", b"\x01\x05")),
               [WHITE, (9, 9, 9)])  # fmt: skip
    yield Form("png grey 2 key beyond 2 bits", png(2, 0, [(1,), (2,)], (b"tRNS", b"\x00\x05")),
               [WHITE, (170, 170, 170)])  # fmt: skip
    yield Form("png RGB 8 key beyond 8 bits",
               png(8, 2, [(5, 6, 7), (9, 9, 9)], (b"tRNS", b"\x01\x05\x01\x06\x01\x07")),
               [WHITE, (9, 9, 9)])  # fmt: skip
    # Suggestions for displays, and a background for viewers that have none of their own.
    for kind, data in ((b"gAMA", struct.pack(">I", 10000)), (b"sRGB", b"\0"), (b"sBIT", b"\5" * 4),
                       (b"bKGD", struct.pack(">HHH", 1, 2, 3)), (b"PLTE", b"\1\2\3"),
                       (b"iCCP", b"name\0\0" + zlib.compress(b"no profile"))):  # fmt: skip
        yield Form(f"png RGBA with {kind.decode()}",
                   png(8, 6, [(200, 30, 30, 255), (0, 0, 0, 0)], (kind, data)),
                   [(200, 30, 30), WHITE])  # fmt: skip


# ----------------------------------------------------------------------------------------- TIFF
# TIFF 6.0: section 8 (fields), 9 (PackBits), 18 (ExtraSamples), 19 (SampleFormat), 16 (CMYK),
# 21 (YCbCr), 23 (CIELab). The data of a subsampled YCbCr picture see page 93.

PACKBITS, DEFLATE = 32773, 8
REVERSED = [int(format(value, "08b")[::-1], 2) for value in range(256)]


def compressed(lines, compression):
    if compression == DEFLATE:
        return zlib.compress(b"".join(lines))
    if compression == PACKBITS:  # each line for itself, here as literal runs of up to 128 bytes
        runs = [line[i : i + 128] for line in lines for i in range(0, len(line), 128)]
        return b"".join(bytes([len(run) - 1]) + run for run in runs)
    return b"".join(lines)


def tiff_file(order, strips, fields):
    """One page; `fields` are {tag: value or values}: whole numbers, rational where a float."""
    start = 8
    offsets = []
    for strip in strips:
        offsets.append(start)
        start += len(strip) + len(strip) % 2
    body = b"".join(strip + b"\0" * (len(strip) % 2) for strip in strips)
    fields = {256: WIDTH, 257: HEIGHT, 278: HEIGHT, 273: offsets, **fields}
    fields[279] = [len(strip) for strip in strips]
    entries, late = [], b""
    late_start = start + 2 + 12 * len(fields) + 4
    for tag, values in sorted(fields.items()):
        values = values if isinstance(values, list) else [values]
        if isinstance(values[0], float):
            kind = 5
            data = b"".join(struct.pack(order + "II", round(v * 10000), 10000) for v in values)
        else:
            kind = 4 if tag in (273, 279) else 3
            data = struct.pack(f"{order}{len(values)}{'I' if kind == 4 else 'H'}", *values)
        if len(data) > 4:
            place = struct.pack(order + "I", late_start + len(late))
            late += data
        else:
            place = data.ljust(4, b"\0")
        entries.append(struct.pack(order + "HHI", tag, kind, len(values)) + place)
    directory = struct.pack(order + "H", len(entries)) + b"".join(entries) + b"\0\0\0\0"
    head = (b"II" if order == "<" else b"MM") + struct.pack(order + "HI", 42, start)
    return head + body + directory + late


def tiff(order, photometric, depth, values, *, planar=1, compression=1, extra=(), more=None,
         rows=None):  # fmt: skip
    """`values` are tuples of samples, or `rows` of them. `depth` "float" is 32 bits."""
    rows, bands = rows or spread(values), len(values[0])
    if planar == 1:
        planes = [[packed(flat(row), depth, order) for row in rows]]
    else:
        planes = [
            [packed([pixel[band] for pixel in row], depth, order) for row in rows]
            for band in range(bands)
        ]
    fields = {258: [32 if depth == "float" else depth] * bands, 259: compression}
    fields |= {262: photometric, 277: bands, 284: planar, 256: len(rows[0]), 257: len(rows)}
    if depth == "float":
        fields[339] = [3] * bands
    if extra:
        fields[338] = list(extra)
    strips = [compressed(lines, compression) for lines in planes]
    return tiff_file(order, strips, fields | (more or {}))


def tiff_layouts(depth):
    """Byte order, planar configuration and compression, with a name."""
    orders = {"<": "II", ">": "MM"}
    for order, order_name in orders.items():
        for planar in (1, 2):
            for compression, packing in ((1, ""), (PACKBITS, " packbits"), (DEFLATE, " deflate")):
                yield order, planar, compression, f"{order_name} planar {planar}{packing}"


def tiff_grey_values(depth):
    if depth == "float":
        return {0.0: 0, 0.2: 51, 0.6: 153, 1.0: 255}
    top = 2**depth - 1
    return {v: scaled(v, depth) for v in (0, 1, top // 3, top // 2, top - 1, top)}


def tiff_grey_forms():
    for depth in (1, 2, 4, 8, 12, 16, 32, "float"):
        if depth == 32:  # as 16-bit; full range is below
            values = {0: 0, 257: 1, 32896: 128, 65535: 255}
        else:
            values = tiff_grey_values(depth)
        for photometric in (0, 1):
            right = [((255 - v if photometric == 0 else v),) * 3 for v in values.values()]
            for order, planar, compression, layout in tiff_layouts(depth):
                yield Form(
                    f"tiff photometric {photometric} depth {depth} {layout}",
                    tiff(order, photometric, depth, [(v,) for v in values],
                         planar=planar, compression=compression),
                    right,
                    tolerance=1,
                )  # fmt: skip


def tiff_sample_format_forms():
    for order, name in (("<", "II"), (">", "MM")):
        for depth, values in ((8, (-128, 0, 127)), (16, (-32768, 0, 32767)),
                              (32, (-(2**31), 0, 2**31 - 1))):  # fmt: skip
            samples = [(v % 2**depth,) for v in values]
            for compression in (1, PACKBITS, DEFLATE):
                yield Form(f"tiff signed {depth} {name} {compression}",
                           tiff(order, 1, depth, samples, more={339: 2}, compression=compression),
                           [(0,) * 3, (128,) * 3, WHITE], tolerance=1)  # fmt: skip
        # Beyond 16 bits it is stretched from the smallest to the largest value.
        yield Form(f"tiff unsigned 32 full range {name}",
                   tiff(order, 1, 32, [(0,), (2**31,), (2**32 - 1,)]),
                   [(0,) * 3, (128,) * 3, WHITE], tolerance=1)  # fmt: skip
        # "Pixels with lower column values are stored in the lower-order bits of the byte."
        lines = [bytes(REVERSED[v] for v in packed(row, 1)) for row in spread((0, 1))]
        for photometric, right in ((0, [WHITE, (0,) * 3]), (1, [(0,) * 3, WHITE]),
                                   (3, [(9, 8, 7), (200, 30, 31)])):  # fmt: skip
            fields = {258: 1, 259: 1, 262: photometric, 277: 1, 266: 2}
            if photometric == 3:
                fields[320] = [257 * v for v in (9, 200, 8, 30, 7, 31)]
            yield Form(f"tiff fill order 2 photometric {photometric} {name}",
                       tiff_file(order, [b"".join(lines)], fields), right)  # fmt: skip
        yield Form(f"tiff fill order 2 photometric 0 of 8 bits {name}",
                   tiff(order, 0, 8, [(0,), (255,)], more={266: 2}), [WHITE, (0,) * 3])  # fmt: skip
        # MinSampleValue and MaxSampleValue "should not be used to affect the visual appearance".
        yield Form(f"tiff max sample value {name}",
                   tiff(order, 1, 16, [(0,), (32768,), (65535,)], more={280: 1, 281: 4095}),
                   [(0,) * 3, (128,) * 3, WHITE])  # fmt: skip


def tiff_colour_forms():
    colours = [(200, 30, 31), (0, 255, 51), (30, 31, 200), (254, 255, 0)]
    for depth in (8, 16):
        unit = (2**depth - 1) // 255
        top = 2**depth - 1
        samples = [tuple(part * unit for part in colour) for colour in colours]
        straight = [(*colour, alpha) for colour in samples for alpha in (0, top // 5, top)]
        clear = [over_white(c, a) for c in colours for a in (0, 0.2, 1)]
        premultiplied = [(*(p * pixel[3] // top for p in pixel[:3]), pixel[3])
                         for pixel in straight]  # fmt: skip
        grey_right = [over_white((c[0],) * 3, a) for c in colours for a in (0, 0.2, 1)]
        solid = [c for c in colours for _ in range(3)]
        for order, planar, compression, layout in tiff_layouts(depth):
            for name, photometric, extra, values, right in (
                ("RGB", 2, (), samples, colours),
                ("RGB + unspecified", 2, (0,), straight, solid),
                ("RGB + premultiplied", 2, (1,), premultiplied, clear),
                ("RGB + straight", 2, (2,), straight, clear),
                ("RGB + straight + unspecified", 2, (2, 0), [(*v, 9) for v in straight], clear),
                ("grey + unspecified", 1, (0,), [(v[0], v[3]) for v in straight],
                 [(c[0],) * 3 for c in solid]),
                ("grey + premultiplied", 1, (1,), [(v[0], v[3]) for v in premultiplied],
                 grey_right),
                ("grey + straight", 1, (2,), [(v[0], v[3]) for v in straight], grey_right),
                ("white is zero + straight", 0, (2,), [(top - v[0], v[3]) for v in straight],
                 grey_right),
            ):  # fmt: skip
                yield Form(
                    f"tiff {name} {depth} {layout}",
                    tiff(order, photometric, depth, values, planar=planar, extra=extra,
                         compression=compression),
                    right,
                    tolerance=2,
                )  # fmt: skip
    for depth in (4, 32, "float"):
        for order, name in (("<", "II"), (">", "MM")):
            top = 1.0 if depth == "float" else 2**depth - 1
            yield Form(f"tiff RGB depth {depth} {name}",
                       tiff(order, 2, depth, [(0, top, 0), (top, 0, 0)]),
                       [(0, 255, 0), (255, 0, 0)])  # fmt: skip


def tiff_palette_forms():
    colours = [(200, 30, 31), (0, 255, 51), (30, 31, 200), (254, 255, 0)]
    for depth in (1, 2, 4, 8, 16):
        used = colours[: 2 ** min(depth, 2)]
        # "all red values come first": 0 is the darkest, 65535 the brightest.
        column = [[part * 257 for part in band] + [0] * (2**depth - len(used))
                  for band in zip(*used, strict=True)]  # fmt: skip
        for order, planar, compression, layout in tiff_layouts(depth):
            if depth == 16 and (planar, compression) != (1, 1):
                continue
            options = {"planar": planar, "compression": compression}
            options["more"] = {320: sum(column, [])} if depth < 16 else {}
            yield Form(
                f"tiff palette {depth} {layout}",
                tiff(order, 3, depth, [(i,) for i in range(len(used))], **options),
                used,
            )
            if depth == 8:
                values = [(i, alpha) for i in range(4) for alpha in (0, 51, 255)]
                yield Form(
                    f"tiff palette + straight {layout}",
                    tiff(order, 3, depth, values, extra=(2,), **options),
                    [over_white(c, alpha) for c in used for alpha in (0, 0.2, 1)],
                    tolerance=1,
                )


def from_lab(lightness, a, b):
    """CIELAB to sRGB, with the white of one the white of the other. The ways to get from one
    white to the other differ by some steps in strong blues."""
    y = (lightness + 16) / 116
    cubes = [v**3 if v > 6 / 29 else 3 * (6 / 29) ** 2 * (v - 4 / 29)
             for v in (y + a / 500, y, y - b / 200)]  # fmt: skip
    x, y, z = (v * white for v, white in zip(cubes, (0.95047, 1, 1.08883), strict=True))
    linear = (3.2406 * x - 1.5372 * y - 0.4986 * z, -0.9689 * x + 1.8758 * y + 0.0415 * z,
              0.0557 * x - 0.2040 * y + 1.0570 * z)  # fmt: skip
    curve = [12.92 * v if v <= 0.0031308 else 1.055 * v ** (1 / 2.4) - 0.055 for v in linear]
    return tuple(round(255 * min(1, max(0, v))) for v in curve)


def from_ycc(y, cb, cr):
    blue, red = cb - 128, cr - 128
    parts = (y + 1.402 * red, y - 0.344136 * blue - 0.714136 * red, y + 1.772 * blue)
    return tuple(min(255, max(0, round(part))) for part in parts)


def tiff_ink_forms():
    inks = [(0, 255, 255, 0), (255, 0, 0, 0), (0, 0, 0, 255), (0, 0, 0, 0), (51, 102, 0, 51)]
    seen = [tuple(round((255 - ink) * (255 - k) / 255) for ink in cmy) for *cmy, k in inks]
    # L* 0 to 100 as 0 to 255; a* and b* are signed bytes.
    labs = [(255, 0, 0), (0, 0, 0), (128, 0, 0), (128, 40, 30), (180, -30, 20), (120, 5, -30)]
    lab_seen = [from_lab(light * 100 / 255, a, b) for light, a, b in labs]
    lab_bytes = [(light, a % 256, b % 256) for light, a, b in labs]
    ycc = [(128, 128, 128), (76, 85, 255), (150, 44, 21), (200, 150, 100)]
    for order, planar, compression, layout in tiff_layouts(8):
        options = {"planar": planar, "compression": compression}
        yield Form(f"tiff CMYK 8 {layout}", tiff(order, 5, 8, inks, **options), seen, tolerance=1)
        yield Form(f"tiff CMYK 16 {layout}",
                   tiff(order, 5, 16, [tuple(257 * v for v in ink) for ink in inks], **options),
                   seen, tolerance=1)  # fmt: skip
        yield Form(f"tiff CMYK + unspecified {layout}",
                   tiff(order, 5, 8, [(*ink, 77) for ink in inks], extra=(0,), **options),
                   seen, tolerance=1)  # fmt: skip
        yield Form(f"tiff CMYK + straight {layout}",
                   tiff(order, 5, 8, [(*ink, 51) for ink in inks], extra=(2,), **options),
                   [over_white(c, 0.2) for c in seen], tolerance=1)  # fmt: skip
        yield Form(f"tiff inks that are not CMYK {layout}",
                   tiff(order, 5, 8, inks, more={332: 2}, **options), [])  # fmt: skip
        yield Form(f"tiff CIELab 8 {layout}", tiff(order, 8, 8, lab_bytes, **options),
                   lab_seen, tolerance=10)  # fmt: skip
        yield Form(f"tiff YCbCr {layout}",
                   tiff(order, 6, 8, ycc, more={530: [1, 1]}, **options),
                   [from_ycc(*v) for v in ycc], tolerance=2)  # fmt: skip
    for order, name in (("<", "II"), (">", "MM")):
        # Video range: black at 16, white at 235, chrominance 16 to 240.
        studio = {530: [1, 1], 532: [16.0, 235.0, 128.0, 240.0, 128.0, 240.0]}
        for compression in (1, DEFLATE):
            yield Form(f"tiff YCbCr of video range {name} {compression}",
                       tiff(order, 6, 8, [(16, 128, 128), (235, 128, 128), (126, 128, 128)],
                            more=studio, compression=compression),
                       [(0,) * 3, WHITE, (128,) * 3], tolerance=2)  # fmt: skip
            for y, cb, cr in ycc:
                # A unit is the brightness of 2 x 2 pixels, then their common Cb and Cr.
                lines = [bytes([y, y, y, y, cb, cr]) * 5] * 3
                fields = {258: [8, 8, 8], 259: compression, 262: 6, 277: 3, 530: [2, 2]}
                strip = compressed(lines, compression)
                yield Form(f"tiff YCbCr {y} of 2 x 2 {name} {compression}",
                           tiff_file(order, [strip], fields),
                           [from_ycc(y, cb, cr)], tolerance=2)  # fmt: skip
        yield Form(f"tiff CIELab 16 {name}", tiff(order, 8, 16, [(65535, 0, 0)]), [])
        for photometric in (4, 9, 10, 32803, 32844, 32845, 34892):
            bands = 3 if photometric in (9, 10, 32845) else 1
            yield Form(f"tiff photometric {photometric} {name}",
                       tiff(order, photometric, 1 if photometric == 4 else 8, [(1,) * bands]),
                       [])  # fmt: skip


def stored(upright, orientation):
    """Rows as stored. Of orientation 6, say, is "the 0th row the visual right-hand side of the
    image, and the 0th column the visual top"."""
    height, width = len(upright), len(upright[0])
    right, bottom = width - 1, height - 1
    place = {
        1: lambda row, column: (row, column),
        2: lambda row, column: (row, right - column),
        3: lambda row, column: (bottom - row, right - column),
        4: lambda row, column: (bottom - row, column),
        5: lambda row, column: (column, row),
        6: lambda row, column: (column, right - row),
        7: lambda row, column: (bottom - column, right - row),
        8: lambda row, column: (bottom - column, row),
    }[orientation]
    if orientation > 4:
        height, width = width, height
    places = [[place(row, column) for column in range(width)] for row in range(height)]
    return [[upright[y][x] for y, x in line] for line in places]


def tiff_orientation_forms():
    colours = [(200, 30, 31), (0, 255, 51), (30, 31, 200), (9, 9, 9), (99, 99, 9)]
    for orientation in range(1, 9):
        rows = stored(spread(colours), orientation)
        for compression in (1, DEFLATE):
            for planar in (1, 2):
                yield Form(f"tiff orientation {orientation} {compression} planar {planar}",
                           tiff("<", 2, 8, colours, rows=rows, compression=compression,
                                planar=planar, more={274: orientation, 278: len(rows)}),
                           colours)  # fmt: skip


def tiff_refused_forms():
    for compression in (34676, 34677, 50001):
        yield Form(f"tiff compression {compression}",
                   tiff("<", 1, 8, [(1,), (2,)]).replace(
                       struct.pack("<HHII", 259, 3, 1, 1),
                       struct.pack("<HHII", 259, 3, 1, compression)), [])  # fmt: skip
    yield Form("tiff planes of subsampled YCbCr",
               tiff("<", 6, 8, [(9, 128, 128)], planar=2, more={530: [2, 2]}), [])  # fmt: skip


def tiff_forms():
    yield from tiff_grey_forms()
    yield from tiff_sample_format_forms()
    yield from tiff_colour_forms()
    yield from tiff_palette_forms()
    yield from tiff_ink_forms()
    yield from tiff_orientation_forms()
    yield from tiff_refused_forms()


# ------------------------------------------------------------------------------------------ BMP
# Microsoft, Windows GDI: BITMAPINFOHEADER, BITMAPV4HEADER, Bitmap Compression.

RLE8, RLE4, BITFIELDS = 1, 2, 3


def bmp(bits, data, *, palette=b"", compression=0, masks=(), size=40, top_down=False, used=0):
    """`data` is the lines as stored, or None of it compressed."""
    height = -HEIGHT if top_down else HEIGHT
    if size == 12:
        header = struct.pack("<IHHHH", 12, WIDTH, HEIGHT, 1, bits)
    else:
        header = struct.pack("<IiiHHIIiiII", size, WIDTH, height, 1, bits, compression,
                             len(data), 0, 0, used, 0)  # fmt: skip
    header += struct.pack(f"<{len(masks)}I", *masks)  # behind a header of 40, part of a larger
    header = header.ljust(size, b"\0")
    start = 14 + len(header) + len(palette)
    return struct.pack("<2sIHHI", b"BM", start + len(data), 0, 0, start) + header + palette + data


def bmp_lines(values, bits, top_down=False):
    rows = spread(values)
    lines = []
    for row in rows if top_down else rows[::-1]:
        line = packed(row, bits) if bits <= 8 else b"".join(v.to_bytes(bits // 8, "little")
                                                            for v in row)  # fmt: skip
        lines.append(line + b"\0" * (-len(line) % 4))
    return b"".join(lines)


def quads(colours, size=4):
    return b"".join(bytes([blue, green, red, 0][:size]) for red, green, blue in colours)


def bmp_palette_forms():
    black, white = (0, 0, 0), WHITE
    greys = [(i, i, i) for i in range(256)]
    for bits in (1, 2, 4, 8):
        palettes = {
            "colours": [(200, 30, 31), (30, 31, 200), (0, 255, 51), (254, 255, 0)],
            "black and white": [black, white],
            "white and black": [white, black],
            "black": [black],
            "almost black": [black, (0, 1, 0), (0, 0, 0)],  # 1, where larger headers say "RLE8"
            "greys": greys[:16],
            "all greys": greys,
        }
        for name, palette in palettes.items():
            palette = palette[: 2**bits]
            for top_down in (False, True):
                data = bmp_lines(range(len(palette)), bits, top_down)
                yield Form(
                    f"bmp {bits} {name}{' top-down' * top_down}",
                    bmp(bits, data, palette=quads(palette), used=len(palette), top_down=top_down),
                    palette,
                )
            # Without a count the palette is a full one.
            full = palette + [black] * (2**bits - len(palette))
            for size, count in ((12, 3), (40, 4), (108, 4)):
                yield Form(
                    f"bmp {bits} {name} full palette header {size}",
                    bmp(bits, bmp_lines(range(len(palette)), bits), size=size,
                        palette=quads(full, count)),
                    palette,
                )  # fmt: skip


def bmp_rle_forms():
    """Encoded, absolute with padding, end of line, delta and end of bitmap in one picture."""
    for name, palette in (("colours", [(200, 30, 31), (30, 31, 200), (0, 255, 51)]),
                          ("black and white", [(0, 0, 0), WHITE]),
                          ("greys", [(i, i, i) for i in range(3)])):  # fmt: skip
        top = len(palette) - 1
        rows = [[top] * 9, [0, 1, top, 1, 0, 1, top, 1, 0], [0, 0, 0, 1, 1, 1, 1, 1, 1],
                [1] * 9, [0, 0, 0, 0, 0, 0, 0, 0, top]]  # fmt: skip
        eight = bytes([8, 0, 1, top, 0, 0, 9, 1, 0, 0, 0, 2, 3, 0, 6, 1, 0, 0])
        eight += bytes([0, 9, *rows[1], 0, 0, 0, 9, top, 0, 1])
        four = bytes([8, 0, 1, top * 16, 0, 0, 9, 17, 0, 0, 0, 2, 3, 0, 6, 17, 0, 0])
        four += bytes([0, 9, *packed(rows[1], 4), 0, 0, 0, 9, top * 17, 0, 1])
        for bits, kind, data in ((8, RLE8, eight), (4, RLE4, four)):
            colours = [palette[index] for row in rows for index in row]
            form = bmp(bits, data, palette=quads(palette), compression=kind, used=len(palette))
            yield Form(f"bmp rle {bits} {name}", form, colours)
        # An empty line, a jump downwards, and nothing more: what is left out has colour 0.
        row = [0] * 9
        rows = [row, [0, 0, 0, 1, 1, 0, 0, 0, 0], row, row, [1] * 4 + [0] * 5]
        for bits, kind, one in ((8, RLE8, 1), (4, RLE4, 17)):
            data = bytes([4, one, 0, 0, 0, 0, 0, 2, 3, 1, 2, one, 0, 1])
            form = bmp(bits, data, palette=quads(palette), compression=kind, used=len(palette))
            yield Form(f"bmp rle {bits} gaps {name}", form,
                       [palette[index] for row in rows for index in row])  # fmt: skip


def bmp_true_colour_forms():
    fives = [(31, 0, 0), (0, 31, 0), (0, 0, 31), (10, 20, 30)]
    five_seen = [tuple(scaled(part, 5) for part in colour) for colour in fives]
    words = [r << 10 | g << 5 | b for r, g, b in fives]
    six_words = [r << 11 | (g * 2 + 1 if g else 0) << 5 | b for r, g, b in fives]
    six_seen = [(scaled(r, 5), scaled(g * 2 + 1 if g else 0, 6), scaled(b, 5)) for r, g, b in fives]
    colours = [(200, 30, 31), (0, 255, 51), (30, 31, 200), (9, 9, 9)]
    numbers = [r << 16 | g << 8 | b for r, g, b in colours]
    alphas = (0, 51, 255)
    straight = [alpha << 24 | number for number in numbers for alpha in alphas]
    clear = [over_white(c, alpha / 255) for c in colours for alpha in alphas]
    solid = [c for c in colours for _ in alphas]
    rgb555, rgb565, rgb888 = (0x7C00, 0x3E0, 31), (0xF800, 0x7E0, 31), (0xFF0000, 0xFF00, 0xFF)
    for top_down in (False, True):
        for name, bits, values, masks, size, right in (
            ("16", 16, words, (), 40, five_seen),
            ("16, highest bit set", 16, [w | 0x8000 for w in words], (), 40, five_seen),
            ("555", 16, words, rgb555, 40, five_seen),
            ("565", 16, six_words, rgb565, 40, six_seen),
            ("565 V4", 16, six_words, rgb565, 108, six_seen),
            ("1555 V4", 16, words + [w | 0x8000 for w in words], (*rgb555, 0x8000), 108,
             [WHITE] * 4 + five_seen),
            ("4444 V4", 16, [0xFF00, 0xF0F0], (0xF00, 0xF0, 0xF, 0xF000), 108,
             [(255, 0, 0), (0, 255, 0)]),
            ("24", 24, numbers, (), 40, colours),
            ("32, fourth byte unused", 32, straight, (), 40, solid),
            ("32 V4, fourth byte unused", 32, straight, (), 108, solid),
            ("32 bit fields", 32, straight, rgb888, 40, solid),
            ("32 V4 without alpha", 32, straight, (*rgb888, 0), 108, solid),
            ("32 V4 with alpha", 32, straight, (*rgb888, 0xFF000000), 108, clear),
            ("32 V5 with alpha", 32, straight, (*rgb888, 0xFF000000), 124, clear),
            ("32 V4 of 10 bits", 32, [1023 << 20, 1023 << 10, 1023],
             (1023 << 20, 1023 << 10, 1023), 108, [(255, 0, 0), (0, 255, 0), (0, 0, 255)]),
        ):  # fmt: skip
            yield Form(
                f"bmp {name}{' top-down' * top_down}",
                bmp(bits, bmp_lines(values, bits, top_down), masks=masks, size=size,
                    compression=BITFIELDS if masks else 0, top_down=top_down),
                right,
                tolerance=1,
            )  # fmt: skip
    yield Form("bmp 24 header 12", bmp(24, bmp_lines(numbers, 24), size=12), colours)
    for compression in (4, 5, 6):
        yield Form(f"bmp compression {compression}",
                   bmp(24, bmp_lines(numbers, 24), compression=compression), [])  # fmt: skip


def bmp_forms():
    yield from bmp_palette_forms()
    yield from bmp_rle_forms()
    yield from bmp_true_colour_forms()


# --------------------------------------------------------------------------------- JPEG and WebP
# ITU-T T.81 annex B (markers), T.871 (JFIF), Adobe Technical Note 5116 (the Adobe marker).


def jpeg_samples(samples):
    """A JPEG file of one colour, with these very samples in 1, 3 or 4 components."""
    mode = {1: "L", 3: "YCbCr", 4: "CMYK"}[len(samples)]
    # Pillow converts from RGB, unless it is told not to, and turns CMYK over.
    stored = tuple(255 - s for s in samples) if mode == "CMYK" else tuple(samples)
    image = Image.new("RGB" if mode == "YCbCr" else mode, (WIDTH, HEIGHT))
    image.paste(stored if len(stored) > 1 else stored[0], (0, 0, WIDTH, HEIGHT))
    file = io.BytesIO()
    options = {"keep_rgb": True} if mode == "YCbCr" else {}
    image.save(file, "JPEG", quality=100, subsampling=0, **options)
    return without_markers(file.getvalue(), 0xE0, 0xEE)


def segments(file):
    """Marker, start and end of each up to the first scan."""
    at = 2
    while True:
        marker, length = file[at + 1], int.from_bytes(file[at + 2 : at + 4], "big")
        yield marker, at, at + 2 + length
        if marker == 0xDA:
            return
        at += 2 + length


def without_markers(file, *markers):
    drop = [(start, end) for marker, start, end in segments(file) if marker in markers]
    for start, end in reversed(drop):
        file = file[:start] + file[end:]
    return file


def component_numbers(file, numbers):
    """Replace the components' names, from which some programs tell RGB."""
    file = bytearray(file)
    for marker, start, _ in list(segments(file)):
        if marker == 0xC0:
            for i, number in enumerate(numbers):
                file[start + 10 + 3 * i] = number
        if marker == 0xDA:
            for i, number in enumerate(numbers):
                file[start + 5 + 2 * i] = number
    return bytes(file)


def frame(file, *, marker=0xC0, precision=8, height=HEIGHT):
    file = bytearray(file)
    start = next(start for kind, start, _ in segments(file) if kind == 0xC0)
    file[start + 1], file[start + 4] = marker, precision
    file[start + 5 : start + 7] = height.to_bytes(2, "big")
    return bytes(file)


def with_segment(file, marker, data):
    return file[:2] + bytes([0xFF, marker]) + struct.pack(">H", len(data) + 2) + data + file[2:]


JFIF = b"JFIF\0\1\1\0\0\1\0\1\0\0"


def adobe(transform):
    return b"Adobe" + struct.pack(">HHHB", 100, 0, 0, transform)


def jpeg_forms():
    grey, ycc, inks = jpeg_samples([77]), (150, 100, 180), (200, 100, 50, 220)
    three, four = component_numbers(jpeg_samples(ycc), (1, 2, 3)), jpeg_samples(inks)
    letters = component_numbers(three, b"RGB")
    ink_seen = tuple(round(ink * inks[3] / 255) for ink in inks[:3])  # Adobe: 255 is no ink
    turned = tuple(round((255 - part) * inks[3] / 255) for part in from_ycc(*inks[:3]))
    for name, file, right in (
        ("grey", grey, (77,) * 3),
        ("grey JFIF", with_segment(grey, 0xE0, JFIF), (77,) * 3),
        ("YCbCr", three, from_ycc(*ycc)),
        ("YCbCr JFIF", with_segment(three, 0xE0, JFIF), from_ycc(*ycc)),
        ("YCbCr Adobe 1", with_segment(three, 0xEE, adobe(1)), from_ycc(*ycc)),
        ("RGB Adobe 0", with_segment(three, 0xEE, adobe(0)), ycc),
        ("RGB by letters", letters, ycc),
        ("CMYK Adobe 0", with_segment(four, 0xEE, adobe(0)), ink_seen),
        # T.81 leaves it open; most programs and browsers take it as with the marker.
        ("CMYK without Adobe", four, ink_seen),
        ("YCCK Adobe 2", with_segment(four, 0xEE, adobe(2)), turned),
    ):
        yield Form(f"jpeg {name}", file, [right], tolerance=3)
    yield Form("jpeg lossless", lossless_jpeg(77), [(77,) * 3])
    for marker in (0xC5, 0xC6, 0xC7, 0xCB, 0xCD, 0xCE, 0xCF):
        yield Form(f"jpeg process {marker:x}", frame(three, marker=marker), [])
    yield Form("jpeg of 12 bits", frame(three, precision=12), [])
    yield Form("jpeg with its height behind it", frame(three, height=0), [])


def lossless_jpeg(grey):
    """Process 14 of T.81, annex H: the difference of each pixel from the one to its left."""
    difference = grey - 128  # what the first one counts from
    size = abs(difference).bit_length()
    bits = difference if difference > 0 else difference + 2**size - 1
    # Two codes: 0 for no difference, 10 for one of that size, its bits behind.
    code = "10" + format(bits, f"0{size}b") + "0" * (WIDTH * HEIGHT - 1)
    code += "1" * (-len(code) % 8)
    data = int(code, 2).to_bytes(len(code) // 8, "big").replace(b"\xff", b"\xff\0")
    file = b"\xff\xd8"
    for marker, content in (
        (0xC3, struct.pack(">BHHB", 8, HEIGHT, WIDTH, 1) + bytes([1, 0x11, 0])),
        (0xC4, bytes([0, 1, 1] + [0] * 14 + [0, size])),
        (0xDA, bytes([1, 1, 0, 1, 0, 0])),
    ):
        file += bytes([0xFF, marker]) + struct.pack(">H", len(content) + 2) + content
    return file + data + b"\xff\xd9"


def exif(orientation, order):
    """A block with nothing but the orientation, without the "Exif" in front."""
    head = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(order + "IH", 8, 1)
    return head + struct.pack(order + "HHIHHI", 274, 3, 1, orientation, 0, 0)


def orientation_forms():
    """The same as for TIFF. Blocks of one colour, because JPEG blurs single pixels."""
    colours = [(200, 30, 31), (0, 255, 51), (30, 31, 200), (9, 9, 9)]
    upright = [[colour for colour in row for _ in range(16)] for row in (colours, colours[::-1])
               for _ in range(16)]  # fmt: skip
    for orientation in range(1, 9):
        rows = stored(upright, orientation)
        image = Image.new("RGB", (len(rows[0]), len(rows)))
        image.putdata([pixel for row in rows for pixel in row])
        for order, name in (("<", "II"), (">", "MM")):
            block = exif(orientation, order)
            jpeg, webp, png_file = io.BytesIO(), io.BytesIO(), io.BytesIO()
            image.save(jpeg, "JPEG", quality=100, subsampling=0)
            image.save(webp, "WEBP", lossless=True, exif=block)
            image.save(png_file, "PNG")
            end = chunk(b"IEND", b"")
            for kind, file in (
                ("jpeg", with_segment(jpeg.getvalue(), 0xE1, b"Exif\0\0" + block)),
                ("webp", webp.getvalue()),
                ("png", png_file.getvalue().replace(end, chunk(b"eXIf", block) + end)),
            ):
                yield f"{kind} orientation {orientation} {name}", file, upright


def webp_forms():
    colours = [(200, 30, 31), (0, 255, 51), (30, 31, 200), (9, 9, 9)]
    values = [(*colour, alpha) for colour in colours for alpha in (0, 51, 255)]
    right = [over_white(colour, a / 255) for *colour, a in values]
    image = Image.new("RGBA", (WIDTH, HEIGHT))
    image.putdata(flat(spread(values)))
    for exact in (False, True):  # whether the colours of transparent pixels are kept
        file = io.BytesIO()
        image.save(file, "WEBP", lossless=True, exact=exact)
        yield Form(f"webp with alpha, exact {exact}", file.getvalue(), right, tolerance=1)
    file = io.BytesIO()
    image.convert("RGB").save(file, "WEBP", lossless=True)
    yield Form("webp", file.getvalue(), [c for c in colours for _ in range(3)])


# ---------------------------------------------------------------------------------------- tests

FORMS = [*png_forms(), *tiff_forms(), *bmp_forms(), *jpeg_forms(), *webp_forms()]

# What is refused, though it has a meaning: rare, and more work than a conversion. Some releases
# of Pillow read some of it; then the colours have to be right.
MAY_BE_REFUSED = re.compile(
    "|".join(
        (
            "bmp 2 .*|bmp (4444|1555) V4.*|bmp 32 V4 of 10 bits.*",
            "tiff photometric 0 depth (12|32) .*|tiff photometric 0 depth 16 MM .*",
            "tiff photometric 1 depth (12|32) MM .*|tiff unsigned 32 full range MM",
            "tiff signed 8 .*|tiff RGB depth .*",
            "tiff palette 16 .*|tiff palette \\+ straight .* planar 2.*",
            "tiff white is zero \\+ .*|tiff grey \\+ .* (16 .*|planar 2.*)",
            "tiff CIELab .* planar 2.*",
            "tiff grey \\+ (unspecified|premultiplied) 8 .*",
            "tiff RGB \\+ straight \\+ unspecified (16 .*|.* planar 2.*)",
            "tiff (RGB|CMYK) \\+ unspecified .* planar 2.*|tiff CMYK \\+ straight .*",
        )
    )
)


def written(tmp_path, form):
    """`form` in a file whose ending says nothing."""
    path = tmp_path / "picture.jpg"
    path.write_bytes(form.file)
    return path


@pytest.mark.parametrize("form", FORMS, ids=[form.name for form in FORMS])
def test_a_form_has_its_colours_or_is_refused_by_name(tmp_path, form):
    path = written(tmp_path, form)
    try:
        size = image_size(path)
    except ImageError as refusal:
        assert not form.colours or MAY_BE_REFUSED.fullmatch(form.name), refusal
        for word in (form.name.split()[0].upper(), "convert it to a PNG of 8 bits or a JPEG"):
            assert word in refusal.reason
        with pytest.raises(ImageError, match=re.escape(refusal.reason)):
            open_image(path)
        return
    assert form.colours, "what has no meaning here must be refused"
    image = open_image(path)
    assert size == image.size == (WIDTH, HEIGHT)
    whole = len(form.colours) == WIDTH * HEIGHT
    wanted = form.colours if whole else flat(spread(form.colours))
    for i, colour in enumerate(wanted):
        found = image.getpixel((i % WIDTH, i // WIDTH))
        assert found == pytest.approx(colour, abs=form.tolerance), f"pixel {i}"


@pytest.mark.parametrize("name, file, upright", [
    pytest.param(*each, id=each[0]) for each in orientation_forms()])  # fmt: skip
def test_orientation_by_the_words_of_the_specification(tmp_path, name, file, upright):
    path = tmp_path / "picture"
    path.write_bytes(file)
    image = open_image(path)
    assert image_size(path) == image.size == (len(upright[0]), len(upright))
    for y in range(8, len(upright), 16):
        for x in range(8, len(upright[0]), 16):
            assert image.getpixel((x, y)) == pytest.approx(upright[y][x], abs=3)


def test_at_least_refuses_the_same(tmp_path):
    form = next(form for form in FORMS if form.name == "jpeg process cf")
    with pytest.raises(ImageError, match="a JPEG of the coding process SOF15"):
        open_image(written(tmp_path, form), at_least=(1, 1))


def test_a_damaged_header_is_not_taken_for_a_form(tmp_path):
    for start in (b"\xff\xd8\xff", b"\xff\xd8\xff\xe0\0", b"II*\0\xff\xff\xff\xff", b"MM\0*"):
        form = Form("damaged", start + b"\0" * 20, [])
        for read in (image_size, open_image):
            with pytest.raises(ImageError, match="damaged, or in none of the formats"):
                read(written(tmp_path, form))


def test_a_picture_without_pixels_is_refused(tmp_path):
    file = bmp(24, b"")
    no_lines = file[:22] + b"\0\0\0\0" + file[26:]
    no_columns = file[:18] + b"\0\0\0\0" + file[22:]
    for file in (no_lines, no_columns, tiff("<", 1, 8, [(1,)], rows=[[(1,)]], more={257: 0})):
        for read in (image_size, open_image):
            with pytest.raises(ImageError, match="it has no pixels|damaged"):
                read(written(tmp_path, Form("empty", file, [])))


def test_run_lengths_that_are_cut_off_are_an_error(tmp_path):
    form = next(form for form in FORMS if form.name == "bmp rle 8 colours")
    for missing in range(2, 30, 2):
        path = written(tmp_path, form._replace(file=form.file[:-missing]))
        if missing > 2:  # the mark of the end may be missing where all pixels are there
            with pytest.raises(ImageError):
                open_image(path)
        else:
            open_image(path)


def test_the_iphone_variant_of_png_is_refused(tmp_path):
    file = png(8, 6, [(9, 9, 9, 255)])
    file = file[:8] + chunk(b"CgBI", b"\x50\0\x20\2") + file[8:]
    for read in (image_size, open_image):
        with pytest.raises(ImageError, match=r"CgBI\) is not read here; convert"):
            read(written(tmp_path, Form("iphone", file, [])))
