"""The checkpoint: what a run needs to go on where another stopped; its format stands here alone."""

import math
import os
import shlex
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from model import MODELS

from ..data_pipeline import ImageList
from ..distributed_utils import say
from ..options import Options
from ..safety.guard import Guard
from ..train_eval_utils import Place, TrainStep
from .weights import is_dense, read_torch_file

# Other values would not fit the saved tensors, or train another network without a word.
MUST_AGREE = ("model", "image_size", "freeze_layers")
# Other values are a choice: the run goes on with the new ones and says so.
MAY_DIFFER = ("epochs", "lr", "lrf", "batch_size", "weight_decay", "nesterov", "warmup_epochs",
              "label_smoothing", "seed", "amp", "syncBN", "deterministic")


def contents(step: TrainStep, place: Place, best: float, random_states: list[dict[str, Any]],
             args: Options, classes: list[str], run: str | None,
             train_list: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint; its tensors are the live ones. ``random_states`` are those of all ranks."""
    model = getattr(step.model, "module", step.model)
    return {"model": model.state_dict(), "optimizer": step.optimizer.state_dict(),
            "scaler": step.scaler.state_dict(), "epoch": place.epoch, "position": place.images,
            "loss_sum": place.loss_sum, "loss_images": place.loss_images, "best_accuracy": best,
            "random_states": random_states, "classes": classes, "arguments": plain(args),
            "run": run, "world_size": args.world_size, "train_list": train_list}


def restore(step: TrainStep, saved: dict[str, Any], rank: int) -> Place:
    """Set ``step`` and this process's generators as they were; returns the place.

    In place, for a captured step writes to the tensors that it knows: ``load_state_dict`` of the
    optimizer would put new ones. The learning rate is not taken over: it follows from the schedule.
    """
    getattr(step.model, "module", step.model).load_state_dict(saved["model"])
    parameters = [p for group in step.optimizer.param_groups for p in group["params"]]
    for number, parameter in enumerate(parameters):
        own = step.optimizer.state[parameter]
        for name, value in saved["optimizer"]["state"][number].items():
            if name in own:
                own[name].copy_(value)
            else:  # an optimizer that makes its state in the first step
                own[name] = value.to(parameter.device) if value.ndim else value.clone()
    if saved["scaler"]:  # empty where the checkpoint's run needed none
        step.scaler.load_state_dict(saved["scaler"])
    states = saved["random_states"]
    if rank < len(states):  # a rank that is new keeps its own
        torch.set_rng_state(states[rank]["cpu"])
        if states[rank]["cuda"] is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(states[rank]["cuda"])
    return Place(saved["epoch"], saved["position"], saved["loss_sum"], saved["loss_images"])


def random_state(device: torch.device) -> dict[str, Any]:
    """This process's generators, as tensors on the CPU."""
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return {"cpu": torch.get_rng_state(), "cuda": cuda}


def plain(args: Options) -> dict[str, Any]:
    """The options as JSON can hold them, without what only this process uses."""
    return {name: value for name, value in sorted(vars(args).items())
            if isinstance(value, (str, int, float, bool, type(None)))
            and name not in ("rank", "gpu", "local_rank", "store", "script")}


# ---- reading one ----

def read(args: Options, guard: Guard, classes: list[str],
         train_images: ImageList) -> dict[str, Any] | None:
    """The checkpoint that ``--resume`` asks for, checked against this run; None for a fresh run.

    Raises ``FileNotFoundError``, and ``ValueError`` with what differs.
    """
    if args.resume is None:
        return None
    path = args.resume
    if path == "auto":
        path = str(Path(args.output_dir) / "weights" / "checkpoint.pth")
        if not guard.first(os.path.isfile(path)):
            say(f"--resume auto: {path} is not there, starting afresh")
            return None
    # Rank 0 reads for all: without a shared folder another node may hold an older file.
    own, saved = fresh(args, classes, train_images), None
    if args.rank == 0:
        saved = read_torch_file(path)
        check(saved, path, own)
        # What has not been looked at might not survive the way to the others.
        saved = {key: saved[key] for key in own}
        saved["optimizer"] = {"state": saved["optimizer"]["state"]}
    saved = guard.first(saved)
    if args.rank > 0:
        check(saved, path, own)
    for line in notices(saved, args):
        say(line)
    say(f"Going on from {path}: epoch {saved['epoch']}, {saved['position']} images done")
    return saved


def fresh(args: Options, classes: list[str], train_images: ImageList) -> dict[str, Any]:
    """What this run itself would write before its first step; the network's tensors lack values."""
    with torch.device("meta"):
        model = MODELS[args.model](num_classes=len(classes))
    # The optimizer knows the trained parameters by number.
    trained = [value for name, value in model.named_parameters()
               if not args.freeze_layers or name.startswith("fc.")]
    return {"model": dict(model.state_dict()), "scaler": {},
            "optimizer": {"state": dict(enumerate(trained))},
            "epoch": 0, "position": 0, "loss_sum": 0.0, "loss_images": 0, "best_accuracy": 0.0,
            "random_states": [random_state(torch.device("cpu"))], "classes": classes,
            "arguments": plain(args), "run": "", "world_size": 1,
            "train_list": train_images.fingerprint()}


def check(saved: Any, path: str, own: dict[str, Any]) -> None:
    """Raise ``ValueError`` where the checkpoint is none, is damaged or is of another training.

    ``own`` is what this run would write.
    """
    missing = [key for key in own if not isinstance(saved, dict) or key not in saved]
    if missing:
        raise ValueError(f"{path}: is no checkpoint of a run ({', '.join(missing[:4])} missing). "
                         "--resume takes weights/checkpoint.pth; a weight file goes to --weights.")
    # Only what has passed here may be compared or printed: comparing tensors raises, and printing
    # lists of one and the same list, a few bytes each in the file, takes all memory.
    refuse((name for name in own if not has_right_kind(name, saved[name], own[name])), path)
    then, now = saved["arguments"], own["arguments"]
    differences = [f"--{name.replace('_', '-')} was {then.get(name)}, is {now[name]}"
                   for name in MUST_AGREE if then.get(name) != now[name]]
    if saved["classes"] != own["classes"]:
        differences.append(f"classes were {saved['classes']}, are {own['classes']}")
    elif saved["train_list"] != own["train_list"]:
        differences.append(f"training images were {saved['train_list']['count']} files, now "
                           f"{own['train_list']['count']}, or have other names")
    if differences:
        raise ValueError(f"{path} does not fit this run: {'; '.join(differences)}. Resume with "
                         "what it was started with, or start afresh without --resume.")
    refuse(misfits(saved, own), path)


def refuse(entries: Iterable[str], path: str) -> None:
    """Raise ``ValueError`` naming the file and the entries, if there are any."""
    names = list(entries)
    if names:
        raise ValueError(f"{path}: is damaged, no run writes such values ({', '.join(names)}). "
                         "Resume from another checkpoint, or start afresh without --resume.")


def has_right_kind(name: str, value: Any, own: Any) -> bool:
    """True where an entry is of the kind that a run writes, apart from the network's tensors."""
    if name in ("model", "optimizer"):
        return True  # compared once it is known that the networks are the same
    if name == "arguments":  # those of another version may be others
        return isinstance(value, dict) and all(
            isinstance(key, str) and (item is None or isinstance(item, (str, int, float))
                                      and is_alike(item, item))
            for key, item in value.items())
    if name == "run":  # the records are written there: under runs/ and nowhere else
        return value is None or isinstance(value, str) and value not in ("", ".", "..") \
            and not set(value) & set("/\\\0")
    if name == "scaler":
        return value == {} or is_alike(value, torch.amp.GradScaler("cpu").state_dict()) and all(
            0 <= item < (3e38 if isinstance(item, float) else 2**31) for item in value.values())
    if name == "random_states":
        return isinstance(value, list) and all(map(is_random_state, value))
    return is_alike(value, own)


def is_alike(value: Any, own: Any) -> bool:
    """True where a value read from a file has the kind, names, shapes and types of our own."""
    if isinstance(own, dict):
        return isinstance(value, dict) and value.keys() == own.keys() and all(
            is_alike(value[key], own[key]) for key in own)
    if isinstance(own, list):
        return isinstance(value, list) and all(is_alike(item, own[0]) for item in value)
    if isinstance(own, Tensor):
        return is_dense(value) and (value.shape, value.dtype) == (own.shape, own.dtype)
    if isinstance(own, bool) or isinstance(own, str):
        return type(value) is type(own)
    if isinstance(own, int):
        return type(value) is int and abs(value) < 2**63  # longer ones could not even be printed
    return isinstance(own, float) and type(value) in (int, float) and abs(value) < 2**63 \
        and math.isfinite(value)


def is_random_state(states: Any) -> bool:
    """True for what ``random_state`` gives, tried on generators that nobody uses."""
    if not isinstance(states, dict) or set(states) != {"cpu", "cuda"}:
        return False
    try:
        torch.Generator().set_state(states["cpu"])
        if states["cuda"] is not None and torch.cuda.is_available():
            torch.Generator("cuda").set_state(states["cuda"])
    except (RuntimeError, TypeError):
        return False
    return states["cuda"] is None or is_dense(states["cuda"])


def misfits(saved: dict[str, Any], own: dict[str, Any]) -> Iterator[str]:
    """Names of the entries that this run, of which all else agrees, could not have written."""
    if not is_alike(saved["model"], own["model"]):
        yield "model"
    if not is_optimizer(saved["optimizer"], own["optimizer"]["state"]):
        yield "optimizer"
    counts = ("epoch", "position", "loss_images", "world_size")
    yield from (name for name in counts if saved[name] < 0)
    if saved["position"] > own["train_list"]["count"]:
        yield "position"
    # Else an epoch that has nothing left to do would divide by zero.
    if saved["loss_images"] != saved["position"]:
        yield "loss_images"


def is_optimizer(optimizer: Any, trained: dict[int, Tensor]) -> bool:
    """True for an optimizer's state: tensors as large as each trained parameter, or single numbers.

    Their names are the optimizer's own: SGD has "momentum_buffer".
    """
    states = optimizer.get("state") if isinstance(optimizer, dict) else None
    return isinstance(states, dict) and states.keys() == trained.keys() and all(
        isinstance(state, dict) and len(state) > 0 and all(
            isinstance(name, str) and (is_alike(value, trained[number])
                                       or is_dense(value) and value.ndim == 0)
            for name, value in state.items())
        for number, state in states.items())


def notices(saved: dict[str, Any], args: Options) -> Iterator[str]:
    """Lines about choices that changed since the checkpoint was written."""
    for name in MAY_DIFFER:
        before = saved["arguments"].get(name)
        if before != getattr(args, name):
            yield (f"notice: --{name.replace('_', '-')} was {before}, going on with "
                   f"{getattr(args, name)}")
    if saved["world_size"] != args.world_size:
        yield (f"notice: {saved['world_size']} processes then, {args.world_size} now: the "
               "learning rate and the global batch follow")


def command(args: Options) -> str:
    """The command that goes on with this run, as a line for the shell."""
    words, value_follows = [], False
    for word in sys.argv[1:]:
        if not value_follows and not word.startswith("--resume"):
            words.append(word)
        value_follows = word == "--resume"
    line = shlex.join([sys.argv[0], *words, "--resume", "auto"])
    if args.script == "launch" and "TORCHELASTIC_RUN_ID" in os.environ:
        if args.world_size == args.local_world_size:
            return f"torchrun --standalone --nproc_per_node={args.world_size} {line}"
        return f"torchrun ... {line}    (on each node, with torchrun's options as before)"
    if args.script == "launch" and "SLURM_PROCID" in os.environ:
        return (f"srun --ntasks={args.world_size} python {line}    "
                "(or submit the batch file again, with --resume auto)")
    return f"python {line}"
