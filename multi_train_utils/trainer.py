"""A run from options to saved weights: the hall behind the three entry scripts.

``train`` reads as the list of what a run does; each side room does one thing of it.
"""

import contextlib
import inspect
import os
import time
from pathlib import Path

import torch
from torch import nn

from model import MODELS
from utils import check_class_count, class_names, read_split_data

from . import device_data, resume
from .captured_step import WARM_UP_STEPS, CapturedStep
from .checkpoints import (
    check_same_weights,
    load_weights,
    share_initial_weights,
    write_error,
)
from .control import Control
from .data_pipeline import ImageList, StreamingData, allowed_cpus, readable_images
from .distributed_utils import say
from .epoch_loop import Run
from .failures import SignalWatch, start_slow_imports
from .options import DEFAULT_WEIGHTS
from .train_step import TrainStep, make_optimizer, warm_up


def train(args):
    """Train as ``args`` say (parse_args, then init_distributed_mode or set_single_process).

    Writes weights/, runs/ and class_indices.json under ``args.output_dir``. Raises ``ValueError``
    and ``OSError`` with a message for the user, ``Interrupted`` after a signal.
    """
    device = torch.device("cpu") if args.gpu is None else torch.device("cuda", args.gpu)
    control = Control(args)
    with SignalWatch() as signals, claimed_folder(args, control):
        settle(args, device)
        train_images, val_images, classes = read_images(args, control)
        checkpoint = resume.read(args, control, classes, train_images)
        data = choose_data(args, train_images, val_images, device, control)
        imports = start_slow_imports()
        data.load(control)
        stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        model = make_model(args, len(classes), device, control, checkpoint, stream)
        step, replay = make_step(args, model, data, device, control, checkpoint, stream)
        run = Run(args, device, control, signals, data, model, step, replay, classes,
                  resume.list_print(train_images))
        if checkpoint is not None:
            run.go_on_from(checkpoint)
        imports.join()  # loader workers are forked next: not in the middle of an import
        run.all_epochs()
        data.close()
        if isinstance(replay, CapturedStep):
            replay.release()


def settle(args, device):
    """Seeds, precision and threads of this process."""
    torch.manual_seed(args.seed)
    # A user's choice stands, but a 1 under torchrun is torchrun's own: there, as without a choice,
    # each process takes its share of the CPUs.
    chosen = os.environ.get("OMP_NUM_THREADS")
    if device.type == "cpu" and (chosen is None or
                                 chosen == "1" and "TORCHELASTIC_RUN_ID" in os.environ):
        torch.set_num_threads(max(1, allowed_cpus() // args.local_world_size))
    # cudnn.benchmark stays off: cuDNN's own choice of kernels is as fast for this network, and
    # trying them all takes 1 to 9 s of every start.
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    if args.dist_backend is not None:
        say(f"Process group: {args.world_size} processes, backend {args.dist_backend}, "
            f"device {args.device}")
    else:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        say(f"Training on {device} ({name})")


@contextlib.contextmanager
def claimed_folder(args, control):
    """Hold the output folder: a second job there would overwrite the first one's weights.

    Waits up to 20 s for a dying predecessor; then raises ``ValueError`` naming --output-dir. The
    lock goes with the process, however it ends.
    """
    lock = None
    if args.rank == 0:
        folder = Path(args.output_dir)
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"--output-dir {folder} is a file: give a folder, or a name that is "
                             "still free")
        path = folder / ".output.lock"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = open(path, "a")
        except OSError as error:
            raise write_error(path, error) from error
        wait_for_lock(lock, folder)
    control.gather(None)
    try:
        yield
    finally:
        if lock is not None:
            lock.close()


def wait_for_lock(lock, folder, limit=20.0):
    """Lock the open file, waiting up to ``limit`` seconds for another process to leave it."""
    try:
        import fcntl
    except ImportError:  # no such locks on Windows
        return
    end = time.monotonic() + limit
    while True:
        try:
            # lockf: not inherited by loader workers, which may outlive a killed trainer a little.
            return fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if time.monotonic() > end:
                raise ValueError(f"another run is writing to {folder.resolve()}: wait for it, or "
                                 "give this one its own --output-dir") from error
            time.sleep(0.2)


def read_images(args, control):
    """(training ImageList, validation ImageList, class names), the same on all ranks."""
    names = class_names(args.data_path)
    check_class_count(args.num_classes, names)
    # class_indices.json is written once all else is checked: beside older weights it would lie.
    train_part, val_part, _ = read_split_data(args.data_path, class_indices=None,
                                              quiet=args.rank > 0)
    check_same_lists(train_part, val_part, control)
    train_images, val_images = readable_images(ImageList(*train_part), ImageList(*val_part), args,
                                               control)
    needed = args.batch_size * args.world_size
    if len(train_images) < needed:
        raise ValueError(f"{len(train_images)} training images are fewer than one global batch, "
                         f"{needed} = --batch-size {args.batch_size} x {args.world_size} "
                         "processes. Use a smaller --batch-size or fewer processes.")
    if not len(val_images):
        raise ValueError(f"{args.data_path}: no readable image is left for validation")
    if args.image_size < 64 and args.batch_size == 1:
        raise ValueError("--batch-size 1 at --image-size below 64 leaves BatchNorm one value per "
                         "channel, of which there are no statistics: use --batch-size 2 or more")
    return train_images, val_images, names


def check_same_lists(train_part, val_part, control):
    """Raise ``ValueError`` where a rank, on another machine, sees other files than rank 0."""
    prints = control.gather([resume.list_print(ImageList(*part))
                             for part in (train_part, val_part)])
    others = [rank for rank, value in enumerate(prints) if value != prints[0]]
    if others:
        counts = prints[others[0]]
        raise ValueError(f"rank {others[0]} sees other images than rank 0: "
                         f"{counts[0]['count']} for training and {counts[1]['count']} for "
                         f"validation there, {prints[0][0]['count']} and {prints[0][1]['count']} "
                         "here, or other names. --data-path must hold the same set everywhere.")


def choose_data(args, train_images, val_images, device, control):
    """Images in GPU memory where they fit there, else streamed from disk."""
    if device_data.fits(train_images, val_images, args, device, control):
        return device_data.DeviceData(args, train_images, val_images, device, control)
    return StreamingData(args, train_images, val_images, device)


def make_model(args, num_classes, device, control, checkpoint, stream):
    """The network with its initial weights, wrapped for several processes; checked to be equal."""
    model = MODELS[args.model](num_classes=num_classes)
    if checkpoint is None:
        give_initial_weights(args, model, control)
    if args.freeze_layers:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.startswith("fc."))
    layout = torch.channels_last if device.type == "cuda" else torch.contiguous_format
    model.to(device, memory_format=layout)
    check_same_weights(model, control)
    # From here on the ranks' random numbers differ, as dropout and loader workers want them.
    torch.manual_seed(args.seed + 1 + args.rank)
    if not args.distributed:
        return model
    if args.syncBN and device.type == "cpu":
        say("SyncBatchNorm exists on GPUs only: ordinary BatchNorm is used, each process "
            "with the statistics of its own batch")
    elif args.syncBN and args.freeze_layers:
        say("--freeze-layers: BatchNorm is frozen too, SyncBatchNorm is not needed")
    elif args.syncBN:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return wrap_model(model, args, stream)


def wrap_model(model, args, stream):
    """The model as DistributedDataParallel, made on the stream on which it will be captured.

    Buffers are not exchanged in each step: evaluate() brings rank 0's, which are saved, to all.
    """
    wrapper = nn.parallel.DistributedDataParallel
    options = {"device_ids": None if args.gpu is None else [args.gpu],
               "gradient_as_bucket_view": True}
    names = inspect.signature(wrapper).parameters  # torch 2.14 has a new name for it
    options["forward_sync_buffers" if "forward_sync_buffers" in names else
            "broadcast_buffers"] = False
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        return wrapper(model, **options)


def give_initial_weights(args, model, control):
    """From ``--weights``, or from scratch with rank 0's random values on all ranks."""
    path = args.weights
    if path is None:
        exists = args.model == "resnet34" and control.first(os.path.isfile(DEFAULT_WEIGHTS))
        path = DEFAULT_WEIGHTS if exists else ""
        if not exists:
            say(f"{DEFAULT_WEIGHTS}, for the model resnet34, is not here: training from scratch "
                "(python prepare_data.py weights fetches ImageNet's, --weights names a file)")
    if path:
        for line in load_weights(model, path):
            say(line)
    else:
        if args.freeze_layers:
            say("warning: --freeze-layers without weights trains a head on random features")
        share_initial_weights(model, "cpu", control)


def make_step(args, model, data, device, control, checkpoint, stream):
    """(TrainStep, what to call for each batch): the step captured as a CUDA graph, or itself."""
    optimizer = make_optimizer(model, args, device)
    step = TrainStep(model, optimizer, data.prepare, device, args.amp, args.label_smoothing)
    reason = why_not_captured(args, device)
    if reason is not None:
        say(f"Training step: launched kernel by kernel ({reason})")
        if checkpoint is not None and args.distributed:
            # DistributedDataParallel reorders its buckets after the first step, and with them the
            # order of sums: be where the interrupted run was.
            warm_up(step, data.example(), 1)
        return step, step
    began = time.perf_counter()
    replay = CapturedStep(step, data.example(), stream)
    say(f"Training step: captured as one CUDA graph after {WARM_UP_STEPS} warm-up steps "
        f"({time.perf_counter() - began:.1f} s)")
    return step, replay


def why_not_captured(args, device):
    """Why the step cannot be a CUDA graph, None where it can."""
    if device.type != "cuda":
        return "CUDA graphs exist on GPUs only"
    if not args.cuda_graph:
        return "--no-cuda-graph"
    if args.dist_backend == "gloo":
        return "gloo's collectives cannot be captured"
    return None
