"""A run from options to saved weights: the hall behind the three entry scripts.

``train`` reads as the list of what a run does; each side room does one thing of it.
"""

import contextlib
import inspect
import math
import os
import signal
import time
from pathlib import Path

import torch
from torch import nn

from model import MODELS
from utils import check_class_count, class_names, read_split_data, write_class_indices

from . import device_data, resume
from .captured_step import WARM_UP_STEPS, CapturedStep
from .checkpoints import (
    Saver,
    check_same_weights,
    load_weights,
    share_initial_weights,
    snapshot,
    write_error,
)
from .data_pipeline import ImageList, StreamingData, allowed_cpus, readable_images
from .distributed_utils import say
from .failures import Control, Interrupted, PeerFailed, SignalWatch, finish_slow_imports
from .options import DEFAULT_WEIGHTS
from .run_log import RunLog
from .train_eval_utils import EpochMeter, evaluate, train_one_epoch
from .train_step import TrainStep, make_optimizer, set_learning_rate, warm_up


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
        stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        model = make_model(args, len(classes), device, control, checkpoint, stream)
        step, replay = make_step(args, model, data, device, control, checkpoint, stream)
        run = Run(args, device, control, signals, data, model, step, replay, classes,
                  resume.list_print(train_images))
        if checkpoint is not None:
            run.go_on_from(checkpoint)
        finish_slow_imports()  # loader workers are forked next: not in the middle of an import
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
    torch.backends.cudnn.benchmark = not args.deterministic
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


def learning_rate(args, epoch, progress=0.0):
    """The rate of an epoch: cosine from lr to lr x lrf, times the world size.

    Cosine decay by Loshchilov and Hutter 2016 (arXiv:1608.03983), linear scaling and warm-up by
    Goyal et al. 2017 (arXiv:1706.02677). ``progress`` is the part of the epoch done, 0 to 1.
    """
    factor = (1 + math.cos(math.pi * epoch / args.epochs)) / 2 * (1 - args.lrf) + args.lrf
    if epoch + progress < args.warmup_epochs:
        factor *= (epoch + progress) / args.warmup_epochs
    return args.lr * args.world_size * factor


class Run:
    """The epochs of a run: where it stands, and what is printed, logged and saved of it."""

    def __init__(self, args, device, control, signals, data, model, step, replay, classes,
                 list_print):
        self.args, self.device, self.control, self.signals = args, device, control, signals
        self.data, self.model, self.step, self.replay = data, model, step, replay
        self.classes = classes
        self.list_print = list_print
        self.epoch, self.position = 0, 0  # position: images of the epoch done, over all ranks
        self.past_loss = (0.0, 0)
        self.best = -1.0
        self.run_name = None
        self.confusion = None
        self.log = self.saver = None  # rank 0's

    def go_on_from(self, checkpoint):
        """Stand where the checkpoint was written."""
        self.step.load_state(checkpoint)
        self.epoch, self.position = checkpoint["epoch"], checkpoint["position"]
        self.past_loss = checkpoint["loss_sum"], checkpoint["loss_images"]
        self.run_name = checkpoint["run"]
        if os.path.exists(Path(self.args.output_dir) / "weights" / "best.pth"):
            self.best = checkpoint["best_accuracy"]
        resume.set_random_state(checkpoint["random_states"], self.args.rank)

    def all_epochs(self):
        """Train, validate, record and save, epoch after epoch."""
        args = self.args
        if self.epoch >= args.epochs:
            say(f"Nothing left to do: {self.epoch} of {args.epochs} epochs are done")
            return
        self.announce()
        if args.rank == 0:
            self.saver = Saver(Path(args.output_dir) / "weights", args.keep)
        self.signals.deferred = True
        self.control.gather(None)
        self.control.starting = False
        try:
            while self.epoch < args.epochs:
                self.one_epoch()
        except Exception:
            if self.saver is not None:
                self.saver.finish()  # the last whole epoch is not lost with this one
            raise
        while self.control.largest(int(self.saver is not None and self.saver.busy()))[0]:
            time.sleep(0.1)  # nobody leaves, and nobody loses patience, while rank 0 still saves
        if self.saver is not None:
            self.saver.wait()
        self.control.gather(None)
        self.finish()

    def announce(self):
        """What a reader of the log wants to know before the first epoch; opens the records."""
        args = self.args
        say(f"Learning rate: {args.lr:g} x {args.world_size} processes = "
            f"{args.lr * args.world_size:g}")
        names = self.control.gather(torch.cuda.get_device_name(self.device)
                                    if self.device.type == "cuda" else "cpu")
        if args.rank == 0:
            write_class_indices(self.classes, Path(args.output_dir) / "class_indices.json")
            self.log = RunLog(args.output_dir, self.run_name, self.epoch)
            self.run_name = self.log.name
            self.log.describe(arguments=resume.plain(args), world_size=args.world_size,
                              device_names=names, classes=self.classes)
            print("TensorBoard: tensorboard --logdir="
                  f"{os.path.join('' if args.output_dir == '.' else args.output_dir, 'runs')}, "
                  "then open http://localhost:6006/", flush=True)

    def one_epoch(self):
        """One epoch from its first image, or from where a resumed run stands, to its files."""
        start = time.perf_counter()
        batches = self.data.train_batches(self.epoch, self.position)
        self.start = self.position
        loss_sum, images = self.past_loss if self.args.rank == 0 else (0.0, 0)
        self.meter = EpochMeter(self.device, loss_sum, images)
        set_learning_rate(self.step.optimizer, self.rate_after(self.position))
        loss = train_one_epoch(self.model, self.step.optimizer, batches, self.device, self.epoch,
                               step=self.replay, meter=self.meter,
                               before_step=self.before_step, after_step=self.after_step)
        self.check_losses(self.meter.last_bad())
        trained = time.perf_counter() - start
        correct, total = self.validate()
        seconds = time.perf_counter() - start
        done = len(self.meter.batch_sizes) * self.args.batch_size * self.args.world_size
        self.record(loss, correct, total, seconds, done / trained, self.meter.waited / trained)
        self.epoch, self.position, self.past_loss = self.epoch + 1, 0, (0.0, 0)
        self.save(correct / total)

    def before_step(self):
        """The learning rate changes per step while it warms up."""
        if self.epoch < self.args.warmup_epochs:
            done = self.start + (len(self.meter.batch_sizes) + 1) * self.global_batch()
            set_learning_rate(self.step.optimizer, self.rate_after(done))

    def rate_after(self, images):
        """The learning rate once ``images`` of the epoch are done."""
        per_epoch = len(self.data.sampler.dataset) // self.global_batch() * self.global_batch()
        return learning_rate(self.args, self.epoch, min(1.0, images / per_epoch))

    def after_step(self):
        """Agree with all ranks: a loss that is not finite, or a signal, ends the run here."""
        self.position = self.start + len(self.meter.batch_sizes) * self.global_batch()
        bad = self.meter.first_bad()
        signum, any_bad = self.control.largest(self.signals.received, int(bad is not None))
        if any_bad:
            self.fail_on_loss(bad)
        if signum:
            self.stop(signum)

    def global_batch(self):
        return self.args.batch_size * self.args.world_size

    def check_losses(self, bad):
        """Fail on all ranks where one of them met a loss that is not finite."""
        if self.control.largest(int(bad is not None))[0]:
            self.fail_on_loss(bad)

    def fail_on_loss(self, bad):
        """Raise on all ranks; the one that met it first (the lowest, of several) says so."""
        found = [(one[0], rank, one[1]) for rank, one in enumerate(self.control.gather(bad))
                 if one is not None]
        step, rank, value = min(found, key=lambda entry: entry[:2])
        if rank != self.args.rank:
            raise PeerFailed
        step += self.start // self.global_batch()
        raise FloatingPointError(
            f"epoch {self.epoch}, step {step}: the loss is {value}. Nothing of this epoch is "
            "saved. Is the learning rate too high (--lr), or a weight file damaged (--weights)?")

    def stop(self, signum):
        """Save where the run stands in the epoch and raise Interrupted, on all ranks."""
        self.check_losses(self.meter.last_bad())
        sums = self.control.gather(self.meter.totals())
        self.past_loss = sum(loss for loss, _ in sums), sum(images for _, images in sums)
        state = self.checkpoint()
        if self.saver is not None:
            self.saver.save_now(state)
            self.log.close()
            print(f"Stopped by {signal.Signals(signum).name} in epoch {self.epoch} after "
                  f"{self.position} images; all is saved. Go on with:\n"
                  f"    {resume.command(self.args)}", flush=True)
        self.control.gather(None)  # the others wait for the file: leaving would end rank 0 too
        raise Interrupted(signum)

    def validate(self):
        """(correct, total) over all validation images, on what will be saved."""
        size = len(self.classes)
        self.confusion = torch.zeros(size, size, dtype=torch.int64, device=self.device)
        # Trying cuDNN's kernels takes longer than a faster choice would save in a few batches.
        torch.backends.cudnn.benchmark = False
        correct = evaluate(self.model, self.until_stopped(self.data.val_batches()), self.device,
                           prepare=self.data.prepare_validation, confusion=self.confusion)
        torch.backends.cudnn.benchmark = not self.args.deterministic
        return correct, int(self.confusion.sum())

    def until_stopped(self, batches):
        """The batches; between them the ranks agree whether a signal came."""
        if self.data.in_memory:
            yield from batches  # a matter of milliseconds: the next step will see the signal
            return
        batches = iter(batches)
        while True:
            batch = next(batches, None)
            signum, any_left = self.control.largest(self.signals.received, int(batch is not None))
            if signum:
                self.stop(signum)
            if not any_left:
                return
            if batch is not None:
                yield batch

    def record(self, loss, correct, total, seconds, images_per_second, data_wait):
        """Print the epoch's line and add it to the records."""
        if self.log is None:
            return
        print(f"[epoch {self.epoch}] accuracy: {correct / total:.3f} ({correct}/{total}), "
              f"loss {loss:.3f}, {images_per_second:.0f} images/s, {seconds:.1f} s", flush=True)
        self.log.add_epoch({
            "epoch": self.epoch, "loss": loss, "accuracy": correct / total, "correct": correct,
            "total": total, "learning_rate": float(self.step.optimizer.param_groups[0]["lr"]),
            "seconds": seconds, "images_per_second": images_per_second, "data_wait": data_wait})

    def save(self, accuracy):
        """Hand a copy of the epoch's state to the saver, which writes beside the next epoch."""
        best, self.best = accuracy > self.best, max(accuracy, self.best)
        state = self.checkpoint()
        if self.saver is not None:
            self.saver.save_epoch(self.epoch - 1, state, best)

    def checkpoint(self):
        """All that a resumed run needs, copied to the CPU; random states come from all ranks."""
        states = self.control.gather(resume.random_state(self.device))
        if self.args.rank > 0:
            return None
        state = snapshot(self.step.state())
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return state | {
            "epoch": self.epoch, "position": self.position, "loss_sum": self.past_loss[0],
            "loss_images": self.past_loss[1], "best_accuracy": self.best, "random_states": states,
            "classes": self.classes, "arguments": resume.plain(self.args), "run": self.run_name,
            "world_size": self.args.world_size, "train_list": self.list_print}

    def finish(self):
        """Per-class accuracy and the confusion matrix, and where everything lies."""
        if self.log is None:
            return
        matrix = self.confusion.tolist()
        for name, row, number in zip(self.classes, matrix, range(len(matrix)), strict=True):
            if sum(row):
                print(f"    {name}: {row[number] / sum(row):.3f} ({row[number]}/{sum(row)})")
        self.log.add_confusion(matrix, self.classes, self.epoch - 1)
        self.log.close()
        print(f"Best accuracy: {self.best:.3f}, weights in "
              f"{Path(self.args.output_dir) / 'weights' / 'best.pth'}", flush=True)
