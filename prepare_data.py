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
import os
import re
import signal
import sys
import tarfile
import urllib.error
import urllib.parse
import urllib.request
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn

from sample_photos import FEWEST_IMAGES, draw_sample_set
from sample_photos import draw_picture as draw_picture  # to be had here, too
from utils import check_parent, refuse_unless, staging_folder, written_whole, wrong_counts

FLOWERS_URL = ("https://storage.googleapis.com/download.tensorflow.org/example_images/"
               "flower_photos.tgz")
FLOWER_COUNTS = {"daisy": 633, "dandelion": 898, "roses": 641, "sunflowers": 699, "tulips": 799}
WEIGHTS_URL = "https://download.pytorch.org/models/resnet34-b627a593.pth"

TIMEOUT = 30.0  # seconds without a byte after which a connection counts as dead
BLOCK = 2**18  # bytes read at once: small enough for a moving bar, large enough to cost nothing
SIZE_LIMIT = 2**31  # bytes, nine times the flower photos: a wrong address must not fill the disk


# ---- download: the flower photos -------------------------------------------------------------

def download_flowers(output: str | os.PathLike, url: str = FLOWERS_URL,
                     expected: Mapping[str, int] | None = None) -> None:
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


def unpack(archive: Path, folder: Path, url: str) -> None:
    """Unpack a .tgz into `folder`. Trusts nothing in it: only plain files and folders inside.

    Raises ValueError, naming `url`, for a damaged archive or an entry that could reach outside.
    """
    # Either way none of the archive's owners and rights; the first releases of Python 3.10 and 3.11
    # know no filters.
    care: dict[str, Any] = ({"filter": "data"} if hasattr(tarfile, "data_filter") else
                            {"set_attrs": False})
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
                tar.extract(member, folder, **care)
            # The checksum stands at the very end, where tarfile does not look.
            while stream.read(BLOCK):
                pass
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{url}: what arrived is no whole .tgz archive ({error}). Open the "
                         "address in a browser: a login or proxy page may stand there; or give "
                         "another with --url") from error


# ---- weights: ResNet-34 trained on ImageNet --------------------------------------------------

def download_weights(output: str | os.PathLike, url: str = WEIGHTS_URL) -> None:
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


def check_weights(path: Path, url: str) -> str:
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


def sha256(path: Path) -> str:
    """The file's sha256 as 64 hexadecimal digits."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


# ---- shared by both downloads ----------------------------------------------------------------

def save_url(url: str, path: Path) -> None:
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
def network_errors(url: str) -> Iterator[None]:
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


# ---- the command line ------------------------------------------------------------------------

def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command's options as a namespace with `action`, a function of it."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="{download,weights,sample}")

    def add(name: str, text: str, output: str,
            action: Callable[[argparse.Namespace], None]) -> argparse.ArgumentParser:
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


def at_least(low: int) -> Callable[[str], int]:
    """An argparse type: an integer that is not below `low`."""
    def integer(text: str) -> int:
        value = int(text)
        if value < low:
            raise argparse.ArgumentTypeError(f"{value} is below {low}")
        return value
    return integer


def address(text: str) -> str:
    """An argparse type: an address that can be downloaded from."""
    if not re.match("(https?|file)://", text):
        raise argparse.ArgumentTypeError(f"{text!r} does not begin with http://, https:// or "
                                         "file://")
    return text


@contextlib.contextmanager
def unwinding_signals() -> Iterator[None]:
    """SIGINT and SIGTERM end the program by an exception, so that temporary folders go.

    Exit status 130 or 143. A second signal is ignored: removing a folder takes moments.
    """
    def stop(signum: int, _frame: object) -> NoReturn:
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


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv`; returns the exit status, 0 done or 1 failed."""
    args = parse_args(argv)
    try:
        with unwinding_signals():
            args.action(args)
    except (ValueError, OSError) as error:
        text = str(error)
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
            text = (f"{args.output}: no space left on the disk. Free some, or choose another "
                    "place with --output")
        print(f"error: {text}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
