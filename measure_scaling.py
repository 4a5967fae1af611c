"""What do more GPUs bring here? Trains on 1, 2, 4 ... GPUs of this machine and prints a table.

    python measure_scaling.py --data-path flower_photos
    python measure_scaling.py --data-path flower_photos --batch-size 256 --amp bf16 --no-syncBN
    python measure_scaling.py --data-path flower_photos --device cpu --devices 1,2 --image-size 64

One process is the single script, several are torchrun with the launch script. Each run trains a
few epochs in a temporary folder, which goes afterwards. Options that are not listed below go to
the training scripts. Exit status: 0 done, 1 a run failed, 2 wrong usage.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from utils import TIMED_OUT, run_limited, written_whole

ROOT = Path(__file__).resolve().parent


def launcher(count: int, single: str | Path, launch: str | Path) -> list[Any]:
    """The words that start ``count`` processes: python, or torchrun where there are several."""
    if count == 1:
        return [sys.executable, single]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone",
            f"--nproc_per_node={count}", launch]


def training_command(count: int, options: Iterable[Any], syncBN: bool = True) -> list[Any]:
    """The command that trains on ``count`` processes; the single script knows no --no-syncBN."""
    words = launcher(count, ROOT / "train_single_gpu.py", ROOT / "train_multi_gpu_using_launch.py")
    return [*words, *options, *(["--no-syncBN"] if count > 1 and not syncBN else [])]


def read_epochs(folder: str | Path) -> list[dict[str, Any]]:
    """The records of a run, one dict per epoch (metrics.jsonl), from its output folder."""
    files = list(Path(folder).glob("runs/*/metrics.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def summary(count: int, epochs: list[dict[str, Any]]) -> dict[str, Any]:
    """Figures of one run: the first epoch is left out, since it warms up caches."""
    seconds = statistics.median(epoch["seconds"] for epoch in epochs[1:])
    images = statistics.median(epoch["images_per_second"] for epoch in epochs[1:])
    return {"processes": count, "seconds_per_epoch": seconds, "images_per_second": images}


def compare(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add speed_up and efficiency, by seconds per epoch against the smallest count."""
    base = results[0]
    for result in results:
        result["speed_up"] = base["seconds_per_epoch"] / result["seconds_per_epoch"]
        result["efficiency"] = result["speed_up"] * base["processes"] / result["processes"]
    return results


def table(results: list[dict[str, Any]]) -> str:
    """The results as a markdown table."""
    lines = ["| processes | seconds/epoch | images/s | speed-up | efficiency |",
             "| ---: | ---: | ---: | ---: | ---: |"]
    lines += [f"| {r['processes']} | {r['seconds_per_epoch']:.2f} | {r['images_per_second']:.0f} "
              f"| {r['speed_up']:.2f} | {r['efficiency']:.0%} |" for r in results]
    return "\n".join(lines)


def counts_up_to(gpus: int) -> list[int]:
    """1, 2, 4 ... and ``gpus`` itself."""
    powers = [2 ** n for n in range(gpus.bit_length()) if 2 ** n < gpus]
    return [*powers, gpus]


def parse_counts(text: str) -> list[int]:
    """Numbers of processes from "1,2,4", in rising order."""
    try:
        counts = sorted({int(word) for word in text.split(",")})
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers like 1,2,4") from None
    if counts[0] < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: at least one process")
    return counts


def read_options(argv: Sequence[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """(our options, the words that go to the training scripts)."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-path", default="flower_photos", metavar="DIR",
                        help="folder with one sub-folder of images per class")
    parser.add_argument("--epochs", type=int, default=4, metavar="N",
                        help="epochs of each run, at least 2: the first does not count (4)")
    parser.add_argument("--batch-size", type=int, default=16, metavar="N",
                        help="images per process and step (16)")
    parser.add_argument("--amp", choices=["off", "bf16", "fp16"], default="off")
    parser.add_argument("--no-syncBN", dest="syncBN", action="store_false",
                        help="ordinary BatchNorm in each process")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--devices", type=parse_counts, metavar="1,2",
                        help="numbers of processes to try (default: 1, 2, 4 ... visible GPUs)")
    parser.add_argument("--limit", type=float, default=600, metavar="S",
                        help="seconds that one run may take (600)")
    parser.add_argument("--json", metavar="FILE", help="write the figures there too")
    options, others = parser.parse_known_args(argv)
    if options.epochs < 2:
        parser.error("--epochs must be at least 2: the first epoch does not count")
    options.devices = options.devices or default_counts(parser, options.device)
    return options, others


def default_counts(parser: argparse.ArgumentParser, device: str) -> list[int]:
    if device == "cpu":
        parser.error("--device cpu needs --devices, for example --devices 1,2")
    import torch  # slow to import, and only needed here

    gpus = torch.cuda.device_count()
    if not gpus:
        parser.error("no GPU is visible: try --device cpu --devices 1,2")
    return counts_up_to(gpus)


def measure(count: int, options: argparse.Namespace, others: list[str]) -> dict[str, Any]:
    """Train on ``count`` processes; returns its summary. Exits with its last lines if it fails."""
    with tempfile.TemporaryDirectory(prefix="measure_scaling_") as folder:
        words = training_command(count, [
            "--data-path", options.data_path, "--epochs", options.epochs, "--batch-size",
            options.batch_size, "--amp", options.amp, "--device", options.device, *others,
            "--output-dir", folder], options.syncBN)
        status, output, wall = run_limited(words, options.limit)
        epochs = read_epochs(folder)
    if status or len(epochs) < 2:
        why = f"not done in {options.limit:g} s" if status == TIMED_OUT else f"exit status {status}"
        last = "\n".join(f"    {line}" for line in output.splitlines()[-12:])
        sys.exit(f"error: the run on {processes(count)} failed ({why}). Its last lines:\n{last}")
    return summary(count, epochs) | {"wall_seconds": wall}


def processes(count: int) -> str:
    return f"{count} process{'es' if count > 1 else ''}"


def main() -> None:
    options, others = read_options()
    results = []
    for count in options.devices:
        print(f"training on {processes(count)} ...", flush=True)
        results.append(measure(count, options, others))
    print(f"\n{table(compare(results))}")
    if options.json:
        settings = {name: getattr(options, name) for name in
                    ("epochs", "batch_size", "amp", "syncBN", "device")}
        text = json.dumps({"settings": settings | {"others": others}, "runs": results}, indent=2)
        try:
            write_json(Path(options.json), text + "\n")
        except OSError as error:
            sys.exit(f"error: {error}")


def write_json(path: Path, text: str) -> None:
    """Write the figures; a pipe or device, such as /dev/stdout, is written to, not replaced."""
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    with written_whole(path, "--json") as temporary:
        temporary.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
