"""What a run needs to go on where another stopped."""

import hashlib
import os
import shlex
import sys
from pathlib import Path

import torch

from .checkpoints import read_torch_file
from .distributed_utils import say

# Other values would not fit the saved tensors, or train another network without a word.
MUST_AGREE = ("model", "image_size", "freeze_layers")
# Other values are a choice: the run goes on with the new ones and says so.
MAY_DIFFER = ("epochs", "lr", "lrf", "batch_size", "weight_decay", "nesterov", "warmup_epochs",
              "label_smoothing", "seed", "amp", "syncBN", "deterministic")
KEYS = ("model", "optimizer", "scaler", "epoch", "position", "loss_sum", "loss_images",
        "best_accuracy", "random_states", "classes", "arguments", "run", "world_size",
        "train_list")


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
    checkpoint = control.first(read_torch_file(path) if args.rank == 0 else None)
    check(checkpoint, path, args, classes, train_images)
    for line in notices(checkpoint, args):
        say(line)
    say(f"Going on from {path}: epoch {checkpoint['epoch']}, {checkpoint['position']} images done")
    return checkpoint


def check(checkpoint, path, args, classes, train_images):
    """Raise ``ValueError`` where the checkpoint is none, or is one of another training."""
    missing = [key for key in KEYS if not isinstance(checkpoint, dict) or key not in checkpoint]
    if missing:
        raise ValueError(f"{path}: is no checkpoint of a run ({', '.join(missing[:4])} missing). "
                         "--resume takes weights/checkpoint.pth; a weight file goes to --weights.")
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
