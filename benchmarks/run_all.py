"""All the figures of docs/benchmarks.md, side by side in one go on one machine.

    python benchmarks/run_all.py --data-path flower_photos --budget 3000 --json figures.jsonl
    python benchmarks/run_all.py --data-path flower_photos --gpus 2 --only steps,walls
    python benchmarks/run_all.py --data-path flower_photos --only accuracy --parallel 4

Four parts, each a markdown table whose rows name their command (--data-path and --output-dir left
out): `steps` (time of a training step), `walls` (epochs and whole commands), `accuracy` (mean of
the last five epochs, per seed) and `streaming` (with --data-cache off, beside what decoding and
what the step allow). Every run has a time limit; one that fails is a row that says so. Options
that are not listed below go to every command, for example --image-size 64 or --no-syncBN.
"""

import argparse
import json
import shlex
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from repository import ROOT  # first: the way to its modules

from measure_scaling import launcher, read_epochs, run_limited, training_command

PARTS = ("steps", "walls", "accuracy", "streaming")
STEP_TIME, PLAIN = (ROOT / "benchmarks" / name for name in ("step_time.py", "plain_loop.py"))
NAMES = {"off": "fp32", "bf16": "bf16", "fp16": "fp16"}
LAST = 5  # epochs whose mean is a run's accuracy
Options = argparse.Namespace
Result = dict[str, Any]  # part, what, command, details, and figures or "failed"


@dataclass
class Job:
    """One command: ``kind`` ("step", "train" or "plain") says what its output looks like."""

    part: str
    what: str
    kind: str
    words: list[str]
    limit: float = 300.0  # seconds
    details: dict[str, Any] = field(default_factory=dict)


# ---- what is run -----------------------------------------------------------------------------

def command(options: Options, script: Path, *more: Any) -> list[str]:
    """The words that run one of the two benchmark scripts on ``--gpus`` processes."""
    return [str(word) for word in (*launcher(options.gpus, script, script), *more)]


def training(options: Options, *more: Any) -> list[str]:
    return [str(word) for word in training_command(options.gpus, more)]


def step_jobs(options: Options) -> Iterator[Job]:
    """Captured, eager, ceiling and plain, for each type and batch size."""
    for batch in options.batch_sizes:
        # Large batches make few steps of an epoch: take more epochs.
        epochs = options.step_epochs * (4 if batch > 64 else 1)
        for amp in options.amp:
            shared = "--batch-size", batch, "--amp", amp
            ours: dict[str, list[str]] = {
                "captured": [], "eager": ["--no-cuda-graph"], "ceiling": ["--no-input"]}
            for name, more in ours.items():
                yield Job("steps", name, "step", command(
                    options, STEP_TIME, *shared, "--epochs", epochs, *more),
                    details={"batch": batch, "amp": amp})
            yield Job("steps", "plain loop", "plain", command(
                options, PLAIN, *shared, "--epochs", options.step_epochs),
                details={"batch": batch, "amp": amp})


def wall_jobs(options: Options) -> Iterator[Job]:
    """Whole commands: ours, then the plain loop, which takes longest, last."""
    types = [amp for amp in ("off", "bf16") if amp in options.amp]
    for amp in types:
        yield Job("walls", "ours", "train",
                  training(options, "--weights=", "--amp", amp, "--epochs", options.epochs),
                  600, {"amp": amp})
    for amp in types:
        yield Job("walls", "plain loop", "plain",
                  command(options, PLAIN, "--amp", amp, "--epochs", options.epochs),
                  600, {"amp": amp})


def accuracy_jobs(options: Options) -> Iterator[Job]:
    """Each type and seed of ours, and the plain loop in fp32 with the same seeds."""
    for seed in options.seeds:
        shared = "--seed", seed, "--epochs", options.epochs
        for amp in options.amp:
            yield Job("accuracy", f"ours, {NAMES[amp]}", "train",
                      training(options, "--weights=", "--amp", amp, *shared), 900,
                      {"seed": seed})
        yield Job("accuracy", "plain loop, fp32", "plain", command(options, PLAIN, *shared), 900,
                  {"seed": seed})


def streaming_jobs(options: Options) -> Iterator[Job]:
    """The streaming loop between its two ceilings."""
    for amp in options.amp:
        shared = "--data-cache", "off", "--amp", amp, "--epochs", options.step_epochs + 1
        for name, more in (("streaming loop", []), ("decoding alone", ["--no-step"]),
                           ("step alone", ["--no-input"])):
            yield Job("streaming", name, "step", command(options, STEP_TIME, *shared, *more),
                      details={"amp": amp})


# ---- running ---------------------------------------------------------------------------------

class Runner:
    """Runs jobs within the budget and notes every result at once in the JSON file."""

    def __init__(self, options: Options, shared: list[str]) -> None:
        self.options, self.shared = options, ["--data-path", options.data_path, *shared]
        self.end = time.monotonic() + options.budget
        self.lock = threading.Lock()

    def run(self, job: Job) -> Result:
        """The job's result, noted at once."""
        result = {"part": job.part, "what": job.what, "gpus": self.options.gpus, **job.details,
                  "command": shown([*job.words, *self.shared[2:]])}
        limit = min(job.limit, self.options.limit, self.end - time.monotonic())
        if limit < 5:
            result["failed"] = "not run: the budget is spent"
        else:
            result |= self.measured(job, limit)
        with self.lock:
            print(f"{job.part}: {job.what} {job.details}: "
                  f"{result.get('failed') or result['figures']}", file=sys.stderr, flush=True)
            if self.options.json:
                with open(self.options.json, "a", encoding="utf-8") as file:
                    file.write(json.dumps(result) + "\n")
        return result

    def measured(self, job: Job, limit: float) -> Result:
        with tempfile.TemporaryDirectory(prefix="run_all_") as folder:
            place = ["--output-dir", folder] if job.kind == "train" else []
            status, output, wall = run_limited([*job.words, *self.shared, *place], limit, folder)
            if status == 124:
                return {"failed": f"not done in {limit:.0f} s", "output": output[-2000:]}
            if status:
                return {"failed": f"exit status {status}", "output": output[-2000:]}
            try:
                return {"figures": figures(job, output, folder) | {"wall_seconds": round(wall, 1)}}
            except (ValueError, KeyError, IndexError) as error:
                return {"failed": f"no figures in the output ({error!r})",
                        "output": output[-2000:]}

    def run_part(self, jobs: list[Job], parallel: int) -> list[Result]:
        with ThreadPoolExecutor(parallel) as pool:
            return list(pool.map(self.run, jobs))


def figures(job: Job, output: str, folder: str) -> dict[str, Any]:
    """The figures that a command left in its output or its output folder."""
    if job.kind == "train":
        epochs = read_epochs(folder)
    else:
        lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
        if job.kind == "step":
            return lines[-1]
        epochs = [line for line in lines if "epoch" in line]
    later = epochs[1:] or epochs  # the first warms up caches
    return {"seconds_per_epoch": statistics.median(e["seconds"] for e in later),
            "images_per_second": statistics.median(e["images_per_second"] for e in later),
            "accuracy": statistics.fmean(e["accuracy"] for e in epochs[-LAST:])}


def shown(words: Iterable[str]) -> str:
    """A command as a reader would type it, in the repository."""
    text = shlex.join(words)
    text = text.replace(f"{sys.executable} -m torch.distributed.run", "torchrun")
    return text.replace(sys.executable, "python").replace(f"{ROOT}/", "")


# ---- tables ----------------------------------------------------------------------------------

def print_table(title: str, heads: list[str], rows: list[list[Any]]) -> None:
    """A markdown table; ``rows`` are lists of cells."""
    print(f"\n### {title}\n\n| {' | '.join(heads)} |\n|{' --- |' * len(heads)}")
    for row in rows:
        print(f"| {' | '.join(map(str, row))} |")
    sys.stdout.flush()


def row(result: Result, labels: list[Any], *cells: Callable[[dict[str, Any]], str]) -> list[Any]:
    """Labels, then the cells made from the figures, or why there are none, then the command."""
    found = result.get("figures")
    values = [cell(found) for cell in cells] if found else [result["failed"]] + [""] * (
        len(cells) - 1)
    return [*labels, *values, f"`{result['command']}`"]


def step_ms(found: dict[str, Any], batch: int, gpus: int) -> float:
    """Median step time in ms; the plain loop tells images per second only."""
    return found["p50"] if "p50" in found else 1000 * batch * gpus / found["images_per_second"]


def print_steps(results: list[Result], options: Options) -> None:
    def line(r: Result) -> list[Any]:
        return row(r, [r["batch"], NAMES[r["amp"]], r["what"]],
                   lambda f: f"{step_ms(f, r['batch'], options.gpus):.2f}",
                   lambda f: f"{f['p10']:.2f} to {f['p90']:.2f}" if "p10" in f else "",
                   lambda f: f"{f['images_per_second']:.0f}",
                   lambda f: "{median:.1f}, {max:.1f}".format(**f["save_gap_ms"])
                   if "save_gap_ms" in f else "")

    print_table(
        f"Training step, {options.gpus} GPU(s)",
        ["batch", "type", "step", "ms (median)", "ms (10 % to 90 %)", "images/s",
         "ms from validation to training (median, max)", "command"],
        [line(r) for r in results])


def print_walls(results: list[Result], options: Options) -> None:
    print_table(
        f"{options.epochs} epochs, {options.gpus} GPU(s)",
        ["loop", "type", "seconds/epoch (median)", "images/s", "command to exit, s", "command"],
        [row(r, [r["what"], NAMES[r["amp"]]],
             lambda f: f"{f['seconds_per_epoch']:.2f}", lambda f: f"{f['images_per_second']:.0f}",
             lambda f: f"{f['wall_seconds']:.1f}") for r in results])


def print_accuracy(results: list[Result], options: Options) -> None:
    """One row per loop and type: the mean over its seeds, and each seed."""
    rows = []
    for what in dict.fromkeys(r["what"] for r in results):
        own = [r for r in results if r["what"] == what]
        values = [r["figures"]["accuracy"] for r in own if "figures" in r]
        cells = [f"{r['figures']['accuracy']:.4f}" if "figures" in r else r["failed"] for r in own]
        mean = f"{statistics.fmean(values):.4f}" if values else "failed"
        rows.append([what, mean, *cells, f"`{own[0]['command']}`"])
    print_table(f"Accuracy, mean of the last {LAST} of {options.epochs} epochs, "
                f"{options.gpus} GPU(s)",
                ["loop", "mean", *(f"seed {seed}" for seed in options.seeds),
                 f"command (seed {options.seeds[0]})"], rows)


def print_streaming(results: list[Result], options: Options) -> None:
    """Images per second, and the streaming loop as a share of the lower ceiling."""
    rates = {(r["amp"], r["what"]): r["figures"]["images_per_second"]
             for r in results if "figures" in r}

    def share(result: Result) -> str:
        amp = result["amp"]
        ceilings = [rates[amp, name] for name in ("decoding alone", "step alone")
                    if (amp, name) in rates]
        if result["what"] != "streaming loop" or len(ceilings) < 2:
            return ""
        return f"{rates[amp, 'streaming loop'] / min(ceilings):.0%}"

    def line(r: Result) -> list[Any]:
        return row(r, [NAMES[r["amp"]], r["what"]], lambda f: f"{f['images_per_second']:.0f}",
                   lambda f: share(r))

    print_table(f"Streaming (--data-cache off), {options.gpus} GPU(s)",
                ["type", "what", "images/s", "of the lower ceiling", "command"],
                [line(r) for r in results])


# ---- command line ----------------------------------------------------------------------------

def words_of(allowed: Iterable[str]) -> Callable[[str], list[str]]:
    """A parser of comma-separated words out of ``allowed``."""
    def parse(text: str) -> list[str]:
        words = text.split(",")
        if not set(words) <= set(allowed):
            raise argparse.ArgumentTypeError(f"{text!r}: choose from {','.join(allowed)}")
        return words
    return parse


def integers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def read_options() -> tuple[Options, list[str]]:
    """(our options, the words that go to every command)."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-path", required=True, metavar="DIR")
    parser.add_argument("--budget", type=float, default=3600, metavar="S",
                        help="seconds for everything; what does not fit is not run (3600)")
    parser.add_argument("--limit", type=float, default=900, metavar="S",
                        help="seconds for one command, at most (900)")
    parser.add_argument("--gpus", type=int, default=1, metavar="N", help="processes (1)")
    parser.add_argument("--only", type=words_of(PARTS), default=PARTS, metavar="PARTS",
                        help="of steps,walls,accuracy,streaming")
    parser.add_argument("--amp", type=words_of(NAMES), default=list(NAMES), metavar="TYPES",
                        help="of off,bf16,fp16")
    parser.add_argument("--batch-sizes", type=integers, default=[16, 256], metavar="16,256",
                        help="for the part steps")
    parser.add_argument("--seeds", type=integers, default=[0, 1, 2], metavar="0,1,2",
                        help="for the part accuracy")
    parser.add_argument("--epochs", type=int, default=30, metavar="N",
                        help="for the parts walls and accuracy (30)")
    parser.add_argument("--step-epochs", type=int, default=2, metavar="N",
                        help="for the parts steps and streaming (2; more for large batches)")
    parser.add_argument("--parallel", type=int, default=1, metavar="N",
                        help="accuracy runs at the same time (1); they are not timed")
    parser.add_argument("--json", metavar="FILE", help="add each result there, one JSON a line")
    options, shared = parser.parse_known_args()
    options.data_path = str(Path(options.data_path).resolve())
    return options, shared


def main() -> None:
    options, shared = read_options()
    runner = Runner(options, shared)
    parts = {"steps": (step_jobs, print_steps), "walls": (wall_jobs, print_walls),
             "accuracy": (accuracy_jobs, print_accuracy),
             "streaming": (streaming_jobs, print_streaming)}
    for name in options.only:
        jobs, show = parts[name]
        show(runner.run_part(list(jobs(options)), options.parallel if name == "accuracy" else 1),
             options)


if __name__ == "__main__":
    main()
