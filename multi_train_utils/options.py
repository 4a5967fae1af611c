"""The command line of the three training scripts: same names, same defaults."""

import argparse
import math
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch.distributed as dist

from model import MODELS

from .distributed_utils import STARTUP_TIMEOUT, TIMEOUT, is_first_on_machine

DEFAULT_WEIGHTS = "resNet34.pth"
LARGEST = 1e18  # of two such numbers the product still is a number in fp32
TRUE, FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")


class Options(argparse.Namespace):
    """What a training script was asked for; the last part is where this process stands.

    ``--help`` explains each option; None stands for "not given".
    """

    script: str  # single, launch or spawn
    data_path: str
    num_classes: int | None
    image_size: int
    batch_size: int
    workers: int | None
    skip_bad_images: bool
    model: str
    weights: str | None
    freeze_layers: bool
    epochs: int
    lr: float
    lrf: float
    warmup_epochs: float
    weight_decay: float
    nesterov: bool
    label_smoothing: float
    seed: int
    deterministic: bool
    amp: str
    data_cache: str
    cuda_graph: bool
    output_dir: str
    resume: str | None
    keep: int | None
    device: str  # once the process stands: "cuda" or "cpu"
    timeout: float
    startup_timeout: float
    syncBN: bool
    dist_url: str
    master_port: int | None
    local_rank: int | None

    # Set by init_distributed_mode or set_single_process.
    rank: int
    world_size: int  # spawn: asked for
    local_world_size: int
    gpu: int | None  # None on the CPU
    distributed: bool
    dist_backend: str | None
    store: dist.Store | None


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that reports wrong usage once, not once per rank."""

    def error(self, message: str) -> NoReturn:
        if not is_first_on_machine():
            time.sleep(2)  # the first to leave has the others ended: let rank 0 speak first
            sys.exit(2)
        super().error(message)


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Adds the default to each option's help where there is one to tell."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None else super()._get_help_string(action)


def parse_args(script: str, argv: Sequence[str] | None = None) -> Options:
    """The options of a training script; exit status 2 for wrong usage.

    ``script`` is "single", "launch" or "spawn"; ``argv`` the words (default: the command's own).
    """
    parser = Parser(allow_abbrev=False, formatter_class=HelpFormatter)
    add_data_options(parser)
    add_training_options(parser)
    add_speed_options(parser)
    add_run_options(parser)
    add_process_options(parser, script)
    args = parser.parse_args(argv, Options())
    args.script = script
    return args


def add_data_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("data")
    group.add_argument("--data-path", default="flower_photos", metavar="DIR",
                       help="folder with one sub-folder of images per class")
    group.add_argument("--num_classes", "--num-classes", type=positive_int, metavar="N",
                       help="number of classes (default: the class folders found)")
    group.add_argument("--image-size", type=image_size, default=224, metavar="PX",
                       help="side of the square that the network sees")
    group.add_argument("--batch-size", type=positive_int, default=16, metavar="N",
                       help="images per process and step")
    group.add_argument("--workers", type=natural_int, metavar="N",
                       help="loader workers per process (default: the allowed CPUs shared among "
                            "the processes of this machine, at most 8)")
    group.add_argument("--skip-bad-images", type=boolean, nargs="?", const=True, default=False,
                       metavar="BOOL", help="decode every file first, leave the unreadable out")


def add_training_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training")
    group.add_argument("--model", choices=sorted(MODELS), default="resnet34")
    group.add_argument("--weights", metavar="FILE",
                       help=f'initial weights; "" trains from scratch (default: {DEFAULT_WEIGHTS} '
                            "if it is there, else from scratch)")
    group.add_argument("--freeze-layers", type=boolean, nargs="?", const=True, default=False,
                       metavar="BOOL", help="train fc alone, keep all else as it was loaded")
    group.add_argument("--epochs", type=positive_int, default=30, metavar="N")
    group.add_argument("--lr", type=positive_float, default=0.001,
                       help="learning rate of one process; multiplied by the world size")
    group.add_argument("--lrf", type=natural_float, default=0.1,
                       help="last learning rate as a fraction of the first (cosine, per epoch)")
    group.add_argument("--warmup-epochs", type=natural_float, default=0.0, metavar="E",
                       help="epochs in which the learning rate rises linearly, per step")
    group.add_argument("--weight-decay", type=natural_float, default=0.005)
    group.add_argument("--nesterov", type=boolean, nargs="?", const=True, default=False,
                       metavar="BOOL", help="Nesterov momentum")
    group.add_argument("--label-smoothing", type=fraction, default=0.0)
    group.add_argument("--seed", type=seed, default=0)
    group.add_argument("--deterministic", type=boolean, nargs="?", const=True, default=False,
                       metavar="BOOL", help="the same bits in each run on the same GPUs; slower")


def add_speed_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("speed")
    group.add_argument("--amp", choices=["off", "bf16", "fp16"], default="off",
                       help="mixed precision")
    group.add_argument("--data-cache", choices=["auto", "device", "off"], default="auto",
                       help="keep the decoded images in GPU memory")
    group.add_argument("--cuda-graph", action=argparse.BooleanOptionalAction, default=True,
                       help="replay the whole training step as one CUDA graph")


def add_run_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("run")
    group.add_argument("--output-dir", default=".", metavar="DIR",
                       help="where weights/, runs/ and class_indices.json are written")
    group.add_argument("--resume", metavar="PATH|auto",
                       help="go on from a checkpoint.pth; auto: from weights/checkpoint.pth of the "
                            "output folder if it is there, else start afresh")
    group.add_argument("--keep", type=positive_int, metavar="N",
                       help="how many model-{epoch}.pth stay (default: all)")


def add_process_options(parser: argparse.ArgumentParser, script: str) -> None:
    group = parser.add_argument_group("processes and devices")
    group.add_argument("--device", default="cuda", metavar="DEV",
                       type=single_device if script == "single" else group_device,
                       help="cuda, cpu or auto (a GPU if there is one)"
                            + ("; cuda:N or N chooses one" if script == "single" else ""))
    group.add_argument("--timeout", type=seconds, default=TIMEOUT, metavar="S",
                       help="seconds that a peer may stay silent in training")
    group.add_argument("--startup-timeout", type=seconds, default=STARTUP_TIMEOUT,
                       metavar="S", help="seconds that all processes together may take to start")
    if script == "single":
        parser.set_defaults(syncBN=False)
        return
    group.add_argument("--syncBN", type=boolean, nargs="?", const=True, default=True,
                       metavar="BOOL", help="BatchNorm statistics over all processes (GPUs only)")
    group.add_argument("--no-syncBN", dest="syncBN", action="store_false",
                       default=argparse.SUPPRESS, help="the same as --syncBN False")
    group.add_argument("--dist-url", default="env://", metavar="URL",
                       help="where the processes meet")
    if script == "launch":
        group.add_argument("--local-rank", "--local_rank", type=natural_int, default=None,
                           metavar="N", help="given by old launchers; LOCAL_RANK wins over it")
    else:
        group.add_argument("--world-size", type=positive_int, default=4, metavar="N",
                           help="number of processes, one a GPU")
        group.add_argument("--master-port", type=port, default=None, metavar="PORT",
                           help="port of rank 0 (default: MASTER_PORT, else 12355, else a free "
                                "one)")


def boolean(text: str) -> bool:
    """True for true, 1, yes, on; False for false, 0, no, off; in any case."""
    word = text.strip().lower()
    if word not in TRUE + FALSE:
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false: "
                                         "use true, false, 1, 0, yes or no")
    return word in TRUE


def number(kind: Callable[[str], Any], text: str, low: float, high: float = math.inf,
           exclusive: bool = False) -> Any:
    """``text`` as a number of ``kind`` from ``low`` (or above it) to ``high``."""
    try:
        value = kind(text)
    except ValueError:
        what = "a whole number" if kind is int else "a number"
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}") from None
    large_enough = value > low if exclusive else value >= low
    if not (large_enough and value <= high and math.isfinite(value)):
        bound = f"greater than {low}" if exclusive else f"at least {low}"
        limit = "" if high == math.inf else f" and at most {high}"
        raise argparse.ArgumentTypeError(f"{text} must be {bound}{limit}")
    return value


def positive_int(text: str) -> int:
    return number(int, text, 1)


def natural_int(text: str) -> int:
    return number(int, text, 0)


def positive_float(text: str) -> float:
    return number(float, text, 0, LARGEST, exclusive=True)


def natural_float(text: str) -> float:
    return number(float, text, 0, LARGEST)


def fraction(text: str) -> float:
    return number(float, text, 0, 1)


def image_size(text: str) -> int:
    # Five halvings leave one value a side at 32 px; below, the last stage has nothing to see.
    return number(int, text, 32, 16384)


def seed(text: str) -> int:
    # Generators are seeded with products of it, which 64 bits must hold.
    return number(int, text, 0, 2**32 - 1)


def seconds(text: str) -> float:
    return number(float, text, 0, 10_000_000, exclusive=True)


def port(text: str) -> int:
    return number(int, text, 1, 65535)


def group_device(text: str) -> str:
    """cuda, cpu or auto: with several processes each one's GPU follows from its local rank."""
    if text not in ("cuda", "cpu", "auto"):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not cuda, cpu or auto (each process takes the GPU of its local rank; "
            "choose GPUs with CUDA_VISIBLE_DEVICES, or train with --device cpu)")
    return text


def single_device(text: str) -> str:
    """cuda, cpu, auto, cuda:N or N."""
    if text in ("cuda", "cpu", "auto") or text.removeprefix("cuda:").isdecimal():
        return text
    raise argparse.ArgumentTypeError(f"{text!r} is not cuda, cuda:N, N, cpu or auto "
                                     "(without a GPU: --device cpu)")
