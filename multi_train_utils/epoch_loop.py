"""The epochs of a run: train, validate, print, record and save, and stop in good order."""

import math
import os
import signal
import time
from pathlib import Path

import torch

from utils import write_class_indices

from . import resume
from .checkpoints import Saver, snapshot
from .distributed_utils import say
from .failures import Interrupted, PeerFailed
from .run_log import RunLog
from .train_eval_utils import EpochMeter, evaluate, train_one_epoch
from .train_step import set_learning_rate


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
            with self.control.watched():
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
            say("TensorBoard: tensorboard --logdir="
                f"{os.path.join('' if args.output_dir == '.' else args.output_dir, 'runs')}, "
                "then open http://localhost:6006/")

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
            say(f"Stopped by {signal.Signals(signum).name} in epoch {self.epoch} after "
                f"{self.position} images; all is saved. Go on with:\n"
                f"    {resume.command(self.args)}")
        self.control.gather(None)  # the others wait for the file: leaving would end rank 0 too
        raise Interrupted(signum)

    def validate(self):
        """(correct, total) over all validation images, on what will be saved."""
        size = len(self.classes)
        self.confusion = torch.zeros(size, size, dtype=torch.int64, device=self.device)
        correct = evaluate(self.model, self.until_stopped(self.data.val_batches()), self.device,
                           prepare=self.data.prepare_validation, confusion=self.confusion)
        return correct, int(self.confusion.sum())

    def until_stopped(self, batches):
        """The batches; between them the ranks agree whether a signal came."""
        if self.data.in_memory:
            for batch in batches:  # a matter of milliseconds: the next step will see the signal
                self.control.moving()
                yield batch
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
        say(f"[epoch {self.epoch}] accuracy: {correct / total:.3f} ({correct}/{total}), "
            f"loss {loss:.3f}, {images_per_second:.0f} images/s, {seconds:.1f} s")
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
        """A copy of all that a resumed run needs; random states come from all ranks."""
        states = self.control.gather(resume.random_state(self.device))
        if self.args.rank > 0:
            return None
        return snapshot(self.step.state()) | {
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
                say(f"    {name}: {row[number] / sum(row):.3f} ({row[number]}/{sum(row)})")
        self.log.add_confusion(matrix, self.classes, self.epoch - 1)
        self.log.close()
        say(f"Best accuracy: {self.best:.3f}, weights in "
            f"{Path(self.args.output_dir) / 'weights' / 'best.pth'}")
