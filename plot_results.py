"""Draw the comparison charts: seconds per epoch, and accuracy over the epochs.

    python plot_results.py                           # the published example figures
    python plot_results.py runs/*                    # your own runs
    python plot_results.py runs/A runs/B --show      # ... and open windows

Writes training_time.png and accuracy.png, and for the published figures syncbn.png, into the
current folder. It needs no display unless --show is given.
"""

from __future__ import annotations  # matplotlib takes a second to import, and may have to wait

import argparse
import json
import math
import os
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from utils import readable, written_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    Curves = Mapping[str, tuple[Sequence[float], Sequence[float]]]  # {label: (epochs, accuracies)}

# The example figures published with the original teaching collection, which this one rebuilds:
# ResNet-34 from scratch on flower_photos, 30 epochs. Not measured with this code.
PUBLISHED_SECONDS = {1: 9, 2: 5.5, 4: 3, 8: 2}  # GPUs: seconds per epoch
PUBLISHED_ACCURACY = {
    "1 GPU": [
        0.569, 0.576, 0.654, 0.648, 0.609, 0.637, 0.699, 0.709, 0.715, 0.715,
        0.717, 0.724, 0.722, 0.731, 0.721, 0.774, 0.751, 0.787, 0.780, 0.770,
        0.763, 0.803, 0.754, 0.796, 0.799, 0.815, 0.793, 0.808, 0.811, 0.806],
    "several GPUs, no SyncBatchNorm": [
        0.348, 0.495, 0.587, 0.554, 0.637, 0.622, 0.689, 0.673, 0.702, 0.717,
        0.717, 0.690, 0.716, 0.696, 0.738, 0.750, 0.750, 0.660, 0.713, 0.758,
        0.777, 0.777, 0.769, 0.792, 0.802, 0.807, 0.807, 0.804, 0.812, 0.811],
    "several GPUs, SyncBatchNorm": [
        0.283, 0.514, 0.531, 0.654, 0.671, 0.591, 0.621, 0.685, 0.701, 0.732,
        0.701, 0.740, 0.667, 0.723, 0.745, 0.679, 0.738, 0.772, 0.764, 0.765,
        0.764, 0.791, 0.818, 0.791, 0.807, 0.806, 0.811, 0.821, 0.833, 0.810],
}
PUBLISHED_NOTE = "Example figures of the original collection, not measured with this code"

# Colours from Okabe and Ito's set, which people with any colour vision tell apart; the line
# styles and markers do the same on a black-and-white print.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
LINE_STYLES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
STYLE: dict[Any, Any] = {
    "figure.figsize": (8, 5), "figure.dpi": 100, "savefig.dpi": 160,
    "font.size": 12, "axes.titlesize": 14, "axes.titleweight": "bold", "axes.titlelocation": "left",
    "axes.titlepad": 26, "axes.spines.top": False, "axes.spines.right": False,
    "axes.axisbelow": True, "grid.color": "#dddddd",
    "legend.edgecolor": "white", "legend.framealpha": 0.9,
    "text.parse_math": False,  # a $ in the name of a folder is no formula
}
WINDOWLESS = ("agg", "cairo", "pdf", "pgf", "ps", "svg", "template")  # matplotlib's backends


@dataclass
class Run:
    """What one training run recorded: one entry per epoch, `accuracy` as a share from 0 to 1."""

    name: str
    world_size: int
    unit: str  # what there were `world_size` of: "GPU" or "process"
    epochs: list[float]
    seconds: list[float]
    accuracy: list[float]

    @property
    def size(self) -> str:
        """Such as "1 GPU" or "2 processes"."""
        plural = "" if self.world_size == 1 else "es" if self.unit == "process" else "s"
        return f"{self.world_size} {self.unit}{plural}"


def read_run(folder: str | os.PathLike) -> Run:
    """Read metrics.jsonl and run.json of a run's folder.

    Raises ValueError or OSError, naming the file, and the line where one is damaged.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder. Give folders of runs, such as runs/*")
    if not (folder / "metrics.jsonl").exists() and any(folder.glob("*/metrics.jsonl")):
        raise FileNotFoundError(f"{folder}: holds several runs. Give the folders in it: {folder}/*")
    about, path = read_json_object(folder / "run.json"), folder / "metrics.jsonl"
    size, devices = about.get("world_size"), str(about.get("device_names", "")).lower()
    if type(size) is not int or size < 1:
        raise ValueError(f"{folder / 'run.json'}: world_size is {size!r}, not a positive integer")
    unit = "process" if "cpu" in devices else "GPU"
    run = Run(readable(folder.resolve().name), size, unit, [], [], [])
    for number, line in enumerate(read_text(path).splitlines(), 1):
        epoch, seconds, accuracy = read_epoch(line, f"{path}, line {number}")
        if run.epochs and epoch <= run.epochs[-1]:
            raise ValueError(f"{path}, line {number}: epoch {epoch:g} after {run.epochs[-1]:g}")
        run.epochs.append(epoch)
        run.seconds.append(seconds)
        run.accuracy.append(accuracy)
    if not run.epochs:
        raise ValueError(f"{path}: no epoch has been recorded yet")
    return run


def read_text(path: Path) -> str:
    """The file's text; errors are ValueError or OSError and name the file."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: no such file. Is {path.parent} the folder of a run "
                                "(runs/<date>_<host>)?") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: damaged, not UTF-8 text ({error.reason})") from error


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; errors are ValueError or OSError and name the file."""
    return parse_object(read_text(path), path)


def parse_object(text: str, where: str | Path) -> dict[str, Any]:
    """The JSON object in `text`; a ValueError begins with `where` it was read."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: damaged, not JSON ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"{where}: damaged, not a JSON object")
    return value


def read_epoch(line: str, where: str) -> list[float]:
    """(epoch, seconds, accuracy) of one line of metrics.jsonl, checked."""
    record = parse_object(line, where)
    values: list[Any] = [record.get(key) for key in ("epoch", "seconds", "accuracy")]
    for key, value in zip(("epoch", "seconds", "accuracy"), values, strict=True):
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or value < 0 or (key == "accuracy" and value > 1):
            raise ValueError(f"{where}: damaged, {key} is {value!r}")
    return values


def published_charts(new_figure: Callable[[], Figure]) -> dict[str, Figure]:
    """The three charts of the published figures as {file name: figure}."""
    names = [f"{gpus} GPU" + "s" * (gpus > 1) for gpus in PUBLISHED_SECONDS]
    curves = {name: (list(range(len(values))), values)
              for name, values in PUBLISHED_ACCURACY.items()}
    one_gpu = next(iter(curves))
    pair = {name: curve for name, curve in curves.items() if name != one_gpu}
    return {
        "training_time.png": bar_chart(
            new_figure(), "Training time per epoch", names, list(PUBLISHED_SECONDS.values()),
            list(PUBLISHED_SECONDS), "number of GPUs", PUBLISHED_NOTE),
        "syncbn.png": curve_chart(
            new_figure(), "With and without SyncBatchNorm: both end at 0.81", pair,
            PUBLISHED_NOTE, first_colour=1),
        "accuracy.png": curve_chart(
            new_figure(), "Accuracy on one and on several GPUs", curves, PUBLISHED_NOTE),
    }


def recorded_charts(runs: Sequence[Run], new_figure: Callable[[], Figure]) -> dict[str, Figure]:
    """The two charts of recorded runs as {file name: figure}."""
    runs = sorted(runs, key=lambda run: (run.unit, run.world_size, run.name))
    sizes = [run.size for run in runs]
    # The name of a run is long, so bars carry it only where the size does not say which run it is.
    by_size = len(set(sizes)) == len(sizes)
    names = sizes if by_size else [f"{run.size}, {shortened(run.name)}" for run in runs]
    labels = [f"{run.size}, {shortened(run.name)}" for run in runs]
    if len(set(labels)) < len(labels):  # runs of one name, from different folders
        labels = [f"{number}: {label}" for number, label in enumerate(labels, 1)]
    curves = {label: (run.epochs, run.accuracy) for label, run in zip(labels, runs, strict=True)}
    # GPUs and CPU processes are not compared with one another.
    compared = [run.world_size if run.unit == runs[0].unit else None for run in runs]
    return {
        "training_time.png": bar_chart(
            new_figure(), "Training time per epoch", names,
            [statistics.median(run.seconds) for run in runs], compared,
            "world size", "Median over the recorded epochs"),
        "accuracy.png": curve_chart(
            new_figure(), "Accuracy of the recorded runs", curves,
            "Share of the validation images that the model got right", legend_below=True),
    }


def shortened(text: str) -> str:
    """The text, with a gap near the end where it is longer than 32 characters."""
    return text if len(text) <= 32 else f"{text[:25]}...{text[-4:]}"


def bar_chart(figure: Figure, title: str, names: Sequence[str], seconds: Sequence[float],
              sizes: Sequence[int | None], axis: str, note: str) -> Figure:
    """Bars of seconds per epoch with their values, and what N times as fast would have been.

    `sizes` are the bars' world sizes, or None for a bar not to be compared with the first one.
    Long names make the bars lie, so that they can be read.
    """
    axes = figure.add_subplot()
    upright = max(map(len, names)) < 14 and len(names) <= 8
    bars = (axes.bar if upright else axes.barh)(
        range(len(names)), seconds, 0.62, color=COLOURS[0], label="seconds per epoch")
    handles: list[Any] = [bars]
    texts: list[str] = []
    top, first = max(seconds), sizes[0]
    for place, (value, size) in enumerate(zip(seconds, sizes, strict=True)):
        texts.append(f"{value:.3g} s")
        if size is None or place == 0:
            continue
        texts[-1] += "\n" if upright else "  "
        texts[-1] += f"{seconds[0] / value:.2g} x as fast" if value else ""
        if first is not None and size != first:
            ideal = seconds[0] * first / size
            ends = ([place - 0.38, place + 0.38], [ideal, ideal])
            handles[1:] = axes.plot(*(ends if upright else ends[::-1]), color=COLOURS[1],
                                    linewidth=2.5, label="if N times as many were N times as fast")
            top = max(top, ideal)
    axes.bar_label(bars, texts, padding=4)
    if upright:
        axes.set(xlabel=axis, ylabel="seconds per epoch", ylim=(0, 1.18 * top or 1))
        axes.set_xticks(range(len(names)), names)
    else:
        axes.set(xlabel="seconds per epoch", xlim=(0, 1.8 * top or 1))
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        figure.set_figheight(2.6 + 0.5 * len(names))
    axes.grid(axis="y" if upright else "x")
    finish(figure, axes, title, note, None if not upright else "upper right", handles)
    return figure


def curve_chart(figure: Figure, title: str, curves: Curves, note: str, first_colour: int = 0,
                legend_below: bool = False) -> Figure:
    """Accuracy over epochs, with the last value written at the end of each curve.

    `first_colour` keeps a curve's colour the same in two charts.
    """
    axes = figure.add_subplot()
    ends = []
    for number, (label, (epochs, accuracy)) in enumerate(curves.items(), first_colour):
        colour = COLOURS[number % len(COLOURS)]
        # Epochs count from 0 in the records; after the first one, one epoch has been trained.
        trained = [epoch + 1 for epoch in epochs]
        axes.plot(trained, accuracy, color=colour, label=label, linewidth=2, markersize=4.5,
                  linestyle=LINE_STYLES[number // len(COLOURS) % len(LINE_STYLES)],
                  marker=MARKERS[number % len(MARKERS)])
        ends.append((trained[-1], accuracy[-1], colour))
    axes.set(xlabel="epochs trained", ylabel="validation accuracy")
    axes.locator_params(axis="x", integer=True)
    axes.grid()
    axes.margins(x=0.03)
    label_ends(axes, ends)
    if legend_below:
        figure.set_figheight(5 + 0.25 * len(curves))
    finish(figure, axes, title, note, None if legend_below else "lower right")
    return figure


def label_ends(axes: Axes, ends: Iterable[tuple[float, float, str]]) -> None:
    """Write the last value of each curve right of the axes, in its colour, none over another.

    `ends` is [(x, y, colour)].
    """
    low, high = axes.get_ylim()
    gap = 0.055 * (high - low)
    place = -math.inf
    places = []
    for _, y, colour in sorted(ends):
        place = max(y, place + gap)
        places.append((place, y, colour))
    # Labels were only ever pushed up; half of the push back down centres them on their curves.
    push = sum(place - y for place, y, _ in places) / len(places)
    for place, y, colour in places:
        axes.annotate(f"{y:.2f}", (1.015, place - push), xycoords=("axes fraction", "data"),
                      color=colour, va="center", fontweight="bold", annotation_clip=False)
    axes.set_ylim(low, high)


def finish(figure: Figure, axes: Axes, title: str, note: str,
           place: Literal["upper right", "lower right"] | None,
           handles: list[Any] | None = None) -> None:
    """Title with a small note below it, and the legend: at `place`, None is below the axes."""
    axes.set_title(title)
    axes.annotate(note, (0, 1), (0, 9), xycoords="axes fraction", textcoords="offset points",
                  fontsize=10.5, color="#555555")
    handles = axes.get_legend_handles_labels()[0] if handles is None else handles
    if place:
        axes.legend(handles=handles, loc=place)
    else:
        figure.legend(handles=handles, loc="outside lower left")


def figure_maker(show: bool) -> Callable[[], Figure]:
    """A function that makes empty figures; with `show`, such that have a window.

    Raises ValueError where windows are asked for and there is no display.
    """
    # A plain Figure writes files with no window system, whatever MPLBACKEND says.
    if not show:
        from matplotlib.figure import Figure
        return lambda: Figure(layout="constrained")
    from matplotlib import pyplot

    problem = ""
    try:
        pyplot.close(pyplot.figure())  # the first figure settles which backend it is
    except Exception as error:  # each window system has its own
        problem = str(error).strip().split("\n")[0]
    if problem or pyplot.get_backend().lower() in WINDOWLESS:
        problem = problem or f"it has only {pyplot.get_backend()}, which draws into files"
        raise ValueError(f"--show needs a display and a window system for matplotlib ({problem}). "
                         "Leave --show away and open the files that are written")
    return lambda: pyplot.figure(layout="constrained")


def write_figure(figure: Figure, path: Path) -> None:
    """Write the figure as PNG, whole or not at all. Raises OSError naming the path."""
    with written_whole(path) as temporary:
        figure.savefig(temporary, format="png")


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command's options as a namespace."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", metavar="RUN", type=Path,
                        help="folder of a run, runs/<date>_<host>; none: the published figures")
    parser.add_argument("--output-dir", type=Path, default=Path("."),
                        help="where to write the charts (default: the current folder)")
    parser.add_argument("--show", action="store_true", help="open windows as well")
    return parser.parse_args(argv)


def plot(args: argparse.Namespace) -> None:
    """Write the charts that the options ask for. Raises ValueError or OSError."""
    runs = [read_run(folder) for folder in args.runs]
    import matplotlib

    with matplotlib.rc_context(STYLE):
        new_figure = figure_maker(args.show)
        charts = recorded_charts(runs, new_figure) if runs else published_charts(new_figure)
        args.output_dir.mkdir(parents=True, exist_ok=True)
        for name, figure in charts.items():
            write_figure(figure, args.output_dir / name)
            print(readable(f"wrote {args.output_dir / name}", sys.stdout))
        if args.show:
            from matplotlib import pyplot
            pyplot.show()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv`; returns the exit status, 0 done or 1 failed."""
    try:
        plot(parse_args(argv))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
