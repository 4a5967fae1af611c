"""What a run needs to go on where another stopped."""

import hashlib
import math
import os
import shlex
import sys
from pathlib import Path

import torch

from model import MODELS

from .checkpoints import is_dense, read_torch_file
from .distributed_utils import say

# Other values would not fit the saved tensors, or train another network without a word.
MUST_AGREE = ("model", "image_size", "freeze_layers")
# Other values are a choice: the run goes on with the new ones and says so.
MAY_DIFFER = ("epochs", "lr", "lrf", "batch_size", "weight_decay", "nesterov", "warmup_epochs",
              "label_smoothing", "seed", "amp", "syncBN", "deterministic")
KEYS = ("model", "optimizer", "scaler", "epoch", "position", "loss_sum", "loss_images",
        "best_accuracy", "random_states", "classes", "arguments", "run", "world_size",
        "train_list")
SCALER_KEYS = {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"}


def read(args, control, classes, train_images):
    """The checkpoint that ``--resume`` asks for, checked against this run; None for a fresh run.

    Raises ``FileNotFoundError``, and ``ValueError`` with what differs.
    """
    if args.resume is None:
        return None
    path = args.resume
    if path == "auto":
        path = str(Path(args.output_dir) / "weights" / "checkpoint.pth")
        if not control.first(os.path.isfile(path)):
            say(f"--resume auto: {path} is not there, starting afresh")
            return None
    # Rank 0 reads for all: without a shared folder another node may hold an older file.
    checkpoint = None
    if args.rank == 0:
        checkpoint = read_torch_file(path)
        check(checkpoint, path, args, classes, train_images)
        # What has not been looked at might not survive the way to the others.
        checkpoint = {key: checkpoint[key] for key in KEYS}
        checkpoint["optimizer"] = {"state": checkpoint["optimizer"]["state"]}
    checkpoint = control.first(checkpoint)
    if args.rank > 0:
        check(checkpoint, path, args, classes, train_images)
    for line in notices(checkpoint, args):
        say(line)
    say(f"Going on from {path}: epoch {checkpoint['epoch']}, {checkpoint['position']} images done")
    return checkpoint


def check(checkpoint, path, args, classes, train_images):
    """Raise ``ValueError`` where the checkpoint is none, is damaged or is of another training."""
    missing = [key for key in KEYS if not isinstance(checkpoint, dict) or key not in checkpoint]
    if missing:
        raise ValueError(f"{path}: is no checkpoint of a run ({', '.join(missing[:4])} missing). "
                         "--resume takes weights/checkpoint.pth; a weight file goes to --weights.")
    refuse(wrong_kinds(checkpoint), path)
    saved = checkpoint["arguments"]
    differences = [f"--{name.replace('_', '-')} was {saved.get(name)}, is {getattr(args, name)}"
                   for name in MUST_AGREE if saved.get(name) != getattr(args, name)]
    if checkpoint["classes"] != classes:
        differences.append(f"classes were {checkpoint['classes']}, are {classes}")
    elif checkpoint["train_list"] != list_print(train_images):
        differences.append(f"training images were {checkpoint['train_list']['count']} files, now "
                           f"{len(train_images)}, or have other names")
    if differences:
        raise ValueError(f"{path} does not fit this run: {'; '.join(differences)}. Resume with "
                         "what it was started with, or start afresh without --resume.")
    refuse(misfits(checkpoint, args, classes, train_images), path)


def refuse(entries, path):
    """Raise ``ValueError`` naming the file and the entries, if there are any."""
    entries = list(entries)
    if entries:
        raise ValueError(f"{path}: is damaged, no run writes such values ({', '.join(entries)}). "
                         "Resume from another checkpoint, or start afresh without --resume.")


def wrong_kinds(checkpoint):
    """Names of the entries that are not of the kind that a run writes.

    Only what has passed here may be compared or printed: comparing tensors raises, and printing
    lists of one and the same list, a few bytes each in the file, takes all memory.
    """
    saved, listed, run = checkpoint["arguments"], checkpoint["train_list"], checkpoint["run"]
    states = checkpoint["random_states"]
    right = {
        "epoch": is_count(checkpoint["epoch"]),
        "position": is_count(checkpoint["position"]),
        "loss_sum": is_number(checkpoint["loss_sum"]),
        "loss_images": is_count(checkpoint["loss_images"]),
        "best_accuracy": is_number(checkpoint["best_accuracy"]),
        "world_size": is_count(checkpoint["world_size"]),
        "classes": isinstance(checkpoint["classes"], list)
                   and all(isinstance(name, str) for name in checkpoint["classes"]),
        "arguments": isinstance(saved, dict)
                     and all(isinstance(name, str) and is_plain(saved[name]) for name in saved),
        "train_list": isinstance(listed, dict) and set(listed) == {"count", "sha256"}
                      and is_count(listed["count"]) and isinstance(listed["sha256"], str),
        # The records are written there: under runs/ and nowhere else.
        "run": run is None or isinstance(run, str) and run not in ("", ".", "..")
               and not set(run) & set("/\\\0"),
        "random_states": isinstance(states, list) and all(map(is_random_state, states)),
        "scaler": is_scaler(checkpoint["scaler"])}
    return [name for name in KEYS if not right.get(name, True)]


def misfits(checkpoint, args, classes, train_images):
    """Names of the entries that this run, of which all else agrees, could not have written."""
    with torch.device("meta"):
        model = MODELS[args.model](num_classes=len(classes))
    # The optimizer knows the trained parameters by number.
    trained = dict(enumerate(value for name, value in model.named_parameters()
                             if not args.freeze_layers or name.startswith("fc.")))
    if not are_alike(checkpoint["model"], model.state_dict()):
        yield "model"
    if not are_alike(momentum(checkpoint["optimizer"]), trained):
        yield "optimizer"
    if checkpoint["position"] > len(train_images):
        yield "position"
    # Else an epoch that has nothing left to do would divide by zero.
    if checkpoint["loss_images"] != checkpoint["position"]:
        yield "loss_images"


def momentum(optimizer):
    """{parameter's number: its momentum} in an optimizer's state; None where that is damaged."""
    state = optimizer.get("state") if isinstance(optimizer, dict) else None
    if not isinstance(state, dict) or not all(
            isinstance(entry, dict) and set(entry) == {"momentum_buffer"}
            for entry in state.values()):
        return None
    return {number: entry["momentum_buffer"] for number, entry in state.items()}


def are_alike(given, own):
    """True where ``given`` holds tensors of the names, shapes and types in ``own``."""
    return isinstance(given, dict) and given.keys() == own.keys() and all(
        is_dense(given[name]) and (given[name].shape, given[name].dtype) == (value.shape,
                                                                             value.dtype)
        for name, value in own.items())


def is_plain(value):
    """True for what ``plain()`` keeps; a longer integer could not even be printed."""
    return isinstance(value, (str, float, bool, type(None))) or (
        isinstance(value, int) and abs(value) < 2**63)


def is_count(value):
    return type(value) is int and 0 <= value < 2**63


def is_number(value):
    return type(value) in (int, float) and is_plain(value) and math.isfinite(value)


def is_scaler(state):
    """True for a GradScaler's state, empty without fp16; its numbers go into float32 and int32."""
    return isinstance(state, dict) and set(state) in (set(), SCALER_KEYS) and all(
        is_number(value) and 0 <= value < (3e38 if isinstance(value, float) else 2**31)
        for value in state.values())


def is_random_state(states):
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


def notices(checkpoint, args):
    """Lines about choices that changed since the checkpoint was written."""
    saved = checkpoint["arguments"]
    for name in MAY_DIFFER:
        if saved.get(name) != getattr(args, name):
            yield (f"notice: --{name.replace('_', '-')} was {saved.get(name)}, going on with "
                   f"{getattr(args, name)}")
    if checkpoint["world_size"] != args.world_size:
        yield (f"notice: {checkpoint['world_size']} processes then, {args.world_size} now: the "
               "learning rate and the global batch follow")


def list_print(images):
    """Tells two lists of training images apart, by class, name and order."""
    digest = hashlib.sha256()
    for path, label in zip(images.paths, images.labels, strict=True):
        digest.update(f"{label}/{os.path.basename(path)}\n".encode("utf-8", "surrogateescape"))
    return {"count": len(images), "sha256": digest.hexdigest()}


def plain(args):
    """The options as JSON can hold them, without what only this process uses."""
    return {name: value for name, value in sorted(vars(args).items())
            if isinstance(value, (str, int, float, bool, type(None)))
            and name not in ("rank", "gpu", "local_rank", "store", "script")}


def random_state(device):
    """This process's generators, as tensors on the CPU."""
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return {"cpu": torch.get_rng_state(), "cuda": cuda}


def set_random_state(states, rank):
    """Set the generators as they were; a rank that is new keeps its own."""
    if rank < len(states):
        torch.set_rng_state(states[rank]["cpu"])
        if states[rank]["cuda"] is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(states[rank]["cuda"])


def command(args):
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
