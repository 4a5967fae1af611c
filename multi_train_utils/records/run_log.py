"""The run's records: TensorBoard, one JSON line per epoch, and what the run was started with."""

import contextlib
import functools
import json
import os
import socket
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from utils import readable

from ..distributed_utils import say


def may_fail(method: Callable[..., None]) -> Callable[..., None]:
    """A method whose failed write is said once and then left alone: training is worth more."""
    @functools.wraps(method)
    def attempt(self: "RunLog", *args: Any, **kwargs: Any) -> None:
        if self.broken:
            return
        try:
            method(self, *args, **kwargs)
        except (OSError, ValueError) as error:
            self.broken = True
            say(f"warning: the records in {self.folder or 'runs'} are incomplete, training goes "
                f"on: {error}")
    return attempt


class RunLog:
    """Records in ``runs/<date>_<host>``, a folder that no other run shares. For rank 0.

    A failed write does not end training.
    """

    def __init__(self, output_dir: str | os.PathLike, resumed_name: str | None = None,
                 first_epoch: int = 0) -> None:
        self.folder: Any = None  # until it could be made
        self.writer: Any = None
        self.broken = False
        self._open(Path(output_dir) / "runs", resumed_name, first_epoch)

    @may_fail
    def _open(self, runs: Path, resumed_name: str | None, first_epoch: int) -> None:
        if resumed_name and (runs / resumed_name).is_dir():
            self.folder = runs / resumed_name
            self._drop_epochs_from(first_epoch)
        else:
            self.folder = new_folder(runs)
        # Slow to import, so only where it is used.
        from torch.utils.tensorboard import SummaryWriter
        self.writer = SummaryWriter(str(self.folder), purge_step=first_epoch or None)

    @property
    def name(self) -> str | None:
        """Name of the run's folder under ``runs/``; None where it could not be made."""
        return self.folder.name if self.folder else None

    @may_fail
    def describe(self, **content: Any) -> None:
        """Write run.json: what the run was started with, and the library versions."""
        import torchvision
        content["versions"] = {"python": sys.version.split()[0], "torch": torch.__version__,
                               "torchvision": torchvision.__version__, "cuda": torch.version.cuda}
        self._write_json("run.json", content)

    @may_fail
    def add_epoch(self, record: dict[str, Any]) -> None:
        """Add one epoch: a dict with epoch, loss, accuracy, learning_rate and more numbers.

        All of it is a line of metrics.jsonl, and each number a scalar in TensorBoard.
        """
        with open(self.folder / "metrics.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        for tag in record.keys() - {"epoch", "total"}:
            self.writer.add_scalar(tag, record[tag], record["epoch"])
        self.writer.flush()

    @may_fail
    def add_confusion(self, confusion: list[list[int]], names: list[str], epoch: int) -> None:
        """Record the confusion matrix (nested list, row = true class) as JSON and as a figure."""
        self._write_json("confusion.json", {"epoch": epoch, "classes": names,
                                            "matrix": confusion})
        with warnings.catch_warnings():
            # Signs that matplotlib's font lacks become boxes; confusion.json has the names.
            warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)
            self.writer.add_figure("confusion_matrix", confusion_figure(confusion, names), epoch)
        self.writer.flush()

    @may_fail
    def close(self) -> None:
        """Finish the event file."""
        self.writer.close()

    def _write_json(self, name: str, content: dict[str, Any]) -> None:
        text = json.dumps(content, indent=2, default=str)
        (self.folder / name).write_text(text + "\n", encoding="utf-8")

    def _drop_epochs_from(self, epoch: int) -> None:
        """Forget lines of epochs that the resumed run does again."""
        path = self.folder / "metrics.jsonl"
        if path.is_file():
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
            kept = [line for line in lines if line.endswith("\n")
                    and json.loads(line)["epoch"] < epoch]
            path.write_text("".join(kept), encoding="utf-8")


def new_folder(runs: Path) -> Path:
    """Create and return ``runs/<date>_<host>``, with a number behind it if that is taken."""
    name = f"{time.strftime('%Y-%m-%d_%H-%M-%S')}_{socket.gethostname()}"
    runs.mkdir(parents=True, exist_ok=True)
    for number in range(1, 1000):
        folder = runs / (name if number == 1 else f"{name}_{number}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            return folder
    raise OSError(f"{runs}: a thousand runs in one second")


def confusion_figure(confusion: list[list[int]], names: list[str]) -> Any:
    """The confusion matrix as a matplotlib figure, coloured by the share of each true class."""
    from matplotlib.figure import Figure
    # A name that is not UTF-8 holds lone surrogates, which cannot be drawn.
    names = [readable(name) for name in names]
    shares = [[count / max(1, sum(row)) for count in row] for row in confusion]
    side = min(20.0, max(4.0, 1.2 + 0.6 * len(names)))  # inches: a canvas of gigabytes otherwise
    figure = Figure(figsize=(side + 1, side), layout="constrained")
    axes = figure.add_subplot()
    picture = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    figure.colorbar(picture, label="share of the true class")
    axes.set(xticks=range(len(names)), yticks=range(len(names)), xlabel="predicted class",
             ylabel="true class", title="Validation images")
    axes.set_xticklabels(names, rotation=45, ha="right", parse_math=False)
    axes.set_yticklabels(names, parse_math=False)
    if len(names) <= 30:
        for row, counts in enumerate(confusion):
            for column, count in enumerate(counts):
                dark = shares[row][column] > 0.5
                axes.text(column, row, str(count), ha="center", va="center",
                          color="white" if dark else "black")
    return figure
