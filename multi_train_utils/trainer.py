"""The recipe: a whole run, from options to saved weights, behind each of the three entry scripts.

Read ``train`` from top to bottom; what it calls of its own stands below it in the same order. The
loop over an epoch's batches and the training step are in train_eval_utils.py. How a run ends is in
safety/, what makes it fast in speed/, what it leaves behind in records/: for another day.
"""

import inspect
import math
import os
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from model import MODELS
from utils import allowed_cpus, check_class_count, class_names, read_split_data

from .augmentation import Normalizer
from .data_pipeline import (
    EpochSampler,
    ImageList,
    StreamingData,
    check_counts,
    check_same_lists,
    readable_images,
)
from .distributed_utils import say
from .options import DEFAULT_WEIGHTS, Options
from .records.records import Records
from .records.weights import load_weights
from .safety.agreement import check_same_weights, share_initial_weights
from .safety.guard import Guard
from .speed.ahead import kind_of_batches
from .speed.captured_step import (
    WARM_UP_STEPS,
    CapturedStep,
    capture_stream,
    warm_up,
    why_not_captured,
)
from .speed.device_data import DeviceData, fits
from .speed.slow_imports import start_slow_imports
from .train_eval_utils import EpochMeter, TrainStep, evaluate, train_one_epoch


def train(args: Options,
          measured: Callable[[TrainStep, DeviceData | StreamingData], TrainStep] | None = None
          ) -> None:
    """Train as ``args`` say (parse_args, then init_distributed_mode or set_single_process).

    Writes weights/, runs/ and class_indices.json under ``args.output_dir``. ``measured(step,
    data)`` is for benchmarks: it gives the step to train with. Raises ``ValueError`` and
    ``OSError`` with a message for the user, ``Interrupted`` after a signal.
    """
    device = settle(args)
    with Guard(args) as guard, Records(args, guard) as records:
        train_images, val_images, classes = read_images(args, guard)
        saved = records.read(classes, train_images)  # a wrong checkpoint is refused at once
        data = choose_data(args, train_images, val_images, device, guard)
        imports = start_slow_imports()  # beside the decoding
        data.load()

        model: nn.Module = MODELS[args.model](num_classes=len(classes))
        if saved is None:
            give_initial_weights(model, args, guard)
        if args.freeze_layers:
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(name.startswith("fc."))
        model.to(device)
        if device.type == "cuda":
            model.to(memory_format=torch.channels_last)  # in which convolutions are fastest
        check_same_weights(model, guard)
        # From here on the ranks' random numbers differ, as dropout and loader workers want them.
        torch.manual_seed(args.seed + 1 + args.rank)
        with capture_stream(device) as stream:  # where DDP is made, there it is captured
            if use_sync_batch_norm(args, device):
                model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
            if args.distributed:
                model = DistributedDataParallel(
                    model, device_ids=None if args.gpu is None else [args.gpu], **ddp_options())
        say(f"Learning rate: {args.lr:g} x {args.world_size} processes = "
            f"{args.lr * args.world_size:g}")
        optimizer = make_optimizer(model, args, device)
        normalize = Normalizer(device)
        step = TrainStep(model, optimizer, device, prepare=normalize, amp=args.amp,
                         label_smoothing=args.label_smoothing)
        step = choose_step(step, args, data, stream, resumed=saved is not None)
        step = measured(step, data) if measured else step
        place = records.resume(step, saved)

        imports.join()  # loader workers are forked next: not in the middle of an import
        with guard.training(data.close, step.close):  # a signal now stops all at the same step
            for epoch in range(place.epoch, args.epochs):
                data.sampler.set_epoch(epoch, place.images)
                meter = EpochMeter(device, place)
                loss = train_one_epoch(
                    model, optimizer, data.train_batches(), device, epoch, step=step,
                    rate=rate_of(args, epoch, len(train_images)), guard=guard, meter=meter)
                confusion = torch.zeros(len(classes), len(classes), dtype=torch.int64,
                                        device=device)
                correct = evaluate(model, guard.stoppable(data.val_batches(), meter), device,
                                   prepare=normalize, confusion=confusion)
                place = records.epoch(meter, loss, correct, confusion)
            records.finish()


def settle(args: Options) -> torch.device:
    """This process's device; its seed, threads and precision."""
    device = torch.device("cpu") if args.gpu is None else torch.device("cuda", args.gpu)
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
    return device


def read_images(args: Options, guard: Guard) -> tuple[ImageList, ImageList, list[str]]:
    """(training images, validation images, class names), the same on all ranks."""
    classes = class_names(args.data_path)
    check_class_count(args.num_classes, classes)
    train_part, val_part, _ = read_split_data(args.data_path, class_indices=None,
                                              quiet=args.rank > 0)
    train_images, val_images = ImageList(*train_part), ImageList(*val_part)
    check_same_lists(train_images, val_images, guard)
    train_images, val_images = readable_images(train_images, val_images, args, guard)
    check_counts(train_images, val_images, args)
    return train_images, val_images, classes


def choose_data(args: Options, train_images: ImageList, val_images: ImageList,
                device: torch.device, guard: Guard) -> DeviceData | StreamingData:
    """The batches of each epoch: cut from images in GPU memory where they fit, else streamed."""
    sampler = EpochSampler(train_images, num_replicas=args.world_size, rank=args.rank,
                           seed=args.seed)
    if fits(train_images, val_images, args, device, guard):
        return DeviceData(args, train_images, val_images, sampler, device, guard)
    return StreamingData(args, train_images, val_images, sampler, device, guard,
                         kind_of_batches(device))


def give_initial_weights(model: nn.Module, args: Options, guard: Guard) -> None:
    """From ``--weights``, or from scratch with rank 0's random values on all ranks."""
    path = args.weights
    if path is None:
        exists = args.model == "resnet34" and guard.first(os.path.isfile(DEFAULT_WEIGHTS))
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
        share_initial_weights(model, guard)


def use_sync_batch_norm(args: Options, device: torch.device) -> bool:
    """Whether BatchNorm takes its statistics over all processes; says why not."""
    if not (args.distributed and args.syncBN):
        return False
    if device.type == "cpu":
        say("SyncBatchNorm exists on GPUs only: ordinary BatchNorm is used, each process "
            "with the statistics of its own batch")
    elif args.freeze_layers:
        say("--freeze-layers: BatchNorm is frozen too, SyncBatchNorm is not needed")
    return device.type == "cuda" and not args.freeze_layers


def ddp_options() -> dict[str, Any]:
    """Buffers are not exchanged in each step: evaluate() brings rank 0's, which are saved, to all.

    torch 2.14 has a new name for that option.
    """
    names = inspect.signature(DistributedDataParallel).parameters
    buffers = "forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers"
    return {buffers: False, "gradient_as_bucket_view": True}


def make_optimizer(model: nn.Module, args: Options,
                   device: torch.device) -> torch.optim.Optimizer:
    """SGD with momentum 0.9 over the parameters that require gradients.

    On a GPU it is fused and its learning rate a tensor, so that a captured step sees each change.
    Another optimiser that counts its steps needs ``capturable=on_gpu`` too, as AdamW does.
    """
    on_gpu = device.type == "cuda"
    rate = torch.tensor(args.lr, device=device) if on_gpu else args.lr
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=rate,
                                momentum=0.9, weight_decay=args.weight_decay,
                                nesterov=args.nesterov, fused=on_gpu or None)
    for parameter in optimizer.param_groups[0]["params"]:
        # Made by the first step otherwise, uninitialised where fp16 leaves that step out.
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def choose_step(step: TrainStep, args: Options, data: DeviceData | StreamingData,
                stream: torch.cuda.Stream | None, resumed: bool) -> TrainStep:
    """The training step recorded as a CUDA graph, or as it is."""
    reason = why_not_captured(args, step.device)
    if reason is None and stream is not None:
        began = time.perf_counter()
        step = CapturedStep(step, data.example(), stream)
        say(f"Training step: captured as one CUDA graph after {WARM_UP_STEPS} warm-up steps "
            f"({time.perf_counter() - began:.1f} s)")
        return step
    say(f"Training step: launched kernel by kernel ({reason})")
    if resumed and args.distributed:
        # DistributedDataParallel reorders its buckets after the first step, and with them the
        # order of sums: be where the interrupted run was.
        warm_up(step, data.example(), 1)
    return step


def rate_of(args: Options, epoch: int, images: int) -> Callable[[int], float]:
    """The learning rate of an epoch of ``images``, as a function of how many of them are done.

    Cosine decay by Loshchilov and Hutter 2016 (arXiv:1608.03983), times the world size and warmed
    up per step as by Goyal et al. 2017 (arXiv:1706.02677).
    """
    factor = (1 + math.cos(math.pi * epoch / args.epochs)) / 2 * (1 - args.lrf) + args.lrf
    rate = args.lr * args.world_size * factor
    global_batch = args.batch_size * args.world_size
    whole = images // global_batch * global_batch  # an incomplete batch is left out

    def rate_after(done: int) -> float:
        reached = epoch + min(1.0, done / whole)
        return rate * reached / args.warmup_epochs if reached < args.warmup_epochs else rate

    return rate_after
