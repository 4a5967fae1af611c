"""What a run leaves behind: the best weights, checkpoints, records, figures and the next command.

Whole runs here end or fail by torch's own functions, planted in the run's process, so that the
tests need to know nothing of the trainer's inside; what is planted says that it was met.
"""

import json
import os
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from jobs import Job, command, load, planted, records, same_tensors

from multi_train_utils.records.checkpoint import command as resume_command
from multi_train_utils.records.run_log import RunLog, confusion_figure
from multi_train_utils.records.saver import snapshot
from utils import written_whole


def run(folder, *options, status=0, env=None):
    """The output of a run of one process that must end with ``status``."""
    with Job(folder, *command("single", 1, *options), env=env) as job:
        assert job.wait(240) == status, job.text()
        return job.text()


# ---- weights and checkpoints -----------------------------------------------------------------

@pytest.mark.slow
def test_best_is_the_first_of_equals_also_after_resuming(flowers, tmp_path):
    """At so low a rate every epoch has the same accuracy, and yet weights of its own."""
    weights = tmp_path / "weights"
    options = ("--data-path", str(flowers), "--batch-size", "6", "--lr", "1e-7", "--freeze-layers",
               "--resume", "auto", "--epochs")
    run(tmp_path, *options, "2")
    run(tmp_path, *options, "3")
    assert len({record["correct"] for record in records(tmp_path)}) == 1, records(tmp_path)
    first, second, third = (load(weights / f"model-{epoch}.pth") for epoch in range(3))
    assert not same_tensors(first, second) and not same_tensors(first, third)
    assert same_tensors(load(weights / "best.pth"), first)
    checkpoint = load(weights / "checkpoint.pth")
    assert checkpoint["best_accuracy"] == records(tmp_path)[0]["accuracy"]

    # What is better than the best so far takes its place.
    torch.save(checkpoint | {"best_accuracy": -1.0}, weights / "checkpoint.pth")
    text = run(tmp_path, *options, "4")
    assert f"Best accuracy: {records(tmp_path)[3]['accuracy']:.3f}, " in text
    assert same_tensors(load(weights / "best.pth"), load(weights / "model-3.pth"))


@pytest.mark.slow
def test_best_is_that_of_the_best_epoch(flowers, tmp_path):
    run(tmp_path, "--data-path", str(flowers), "--batch-size", "6", "--lr", "0.02", "--epochs", "5")
    accuracies = [record["accuracy"] for record in records(tmp_path)]
    best = accuracies.index(max(accuracies))
    assert same_tensors(load(tmp_path / "weights" / "best.pth"),
                        load(tmp_path / "weights" / f"model-{best}.pth"))
    assert load(tmp_path / "weights" / "checkpoint.pth")["best_accuracy"] == max(accuracies)


@pytest.mark.slow
def test_random_numbers_go_on_where_the_checkpoint_left_them(flowers, tmp_path):
    options = ("--data-path", str(flowers), "--batch-size", "6", "--resume", "auto", "--epochs")
    run(tmp_path, *options, "1")
    path = tmp_path / "weights" / "checkpoint.pth"
    checkpoint, generator = load(path), torch.Generator().manual_seed(987654321)
    (state,) = checkpoint["random_states"]
    state["cpu"] = generator.get_state()  # a state that no seed of the run's own leads to
    torch.save(checkpoint, path)
    run(tmp_path, *options, "2")
    (after,) = load(path)["random_states"]
    # The loaders draw a few seeds for their workers, which moves the generator on.
    states = [generator.get_state()]
    for _ in range(20):
        torch.empty((), dtype=torch.int64).random_(generator=generator)
        states.append(generator.get_state())
    assert any(torch.equal(after["cpu"], one) for one in states)


def test_a_file_is_on_the_disk_before_it_takes_the_old_ones_place(tmp_path, monkeypatch):
    path, calls = tmp_path / "file.bin", []
    path.write_bytes(b"old")
    fsync, replace, rename = os.fsync, os.replace, os.rename

    def synced(descriptor):
        calls.append(("fsync", os.fstat(descriptor).st_ino, os.fstat(descriptor).st_size))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", synced)
    for name, plain in (("replace", replace), ("rename", rename)):
        def renamed(source, target, plain=plain):
            calls.append(("rename", os.stat(source).st_ino, path.read_bytes()))
            plain(source, target)
        monkeypatch.setattr(os, name, renamed)
    with written_whole(path) as temporary:
        Path(temporary).write_bytes(b"new content")
    inode = path.stat().st_ino
    assert calls == [("fsync", inode, len(b"new content")), ("rename", inode, b"old")]
    assert path.read_bytes() == b"new content"


def test_a_snapshot_keeps_what_later_steps_change():
    weight, momentum = torch.ones(2), torch.ones(2)
    copy = snapshot({"model": {"w": weight}, "optimizer": {"state": [{"buffer": momentum}]}})
    weight += 1
    momentum += 1
    assert copy["model"]["w"].tolist() == [1, 1]
    assert copy["optimizer"]["state"][0]["buffer"].tolist() == [1, 1]


# The first epoch's weights are held back until a step of the second has changed them and another
# one has failed; then each save takes its time.
SLOW_SAVE = """
import threading, time
import torch
from torch.nn import functional
from torch.optim.optimizer import register_optimizer_step_post_hook

cross_entropy, save, losses = functional.cross_entropy, torch.save, []
held, failed = threading.Event(), threading.Event()

def ruined(*args, **kwargs):
    loss = cross_entropy(*args, **kwargs)
    losses.append(1)
    if len(losses) == 12:  # ten steps an epoch
        assert held.wait(60)
        loss = loss * float("nan")
    return loss

def stepped(*_):
    if len(losses) == 12:
        print("planted: a step of the second epoch has failed", flush=True)
        failed.set()

def slow(content, file, *args, **kwargs):
    if losses:  # what is saved before the first step is not the epochs'
        print(f"planted: {file} is held back", flush=True)
        held.set()
        assert failed.wait(60)
        time.sleep(1)
    save(content, file, *args, **kwargs)

functional.cross_entropy, torch.save = ruined, slow
register_optimizer_step_post_hook(stepped)
"""


@pytest.mark.slow
def test_a_failure_lets_the_save_of_the_epoch_before_come_to_its_end(flowers, tmp_path):
    options = ("--data-path", str(flowers), "--batch-size", "6", "--epochs", "2")
    run(tmp_path / "undisturbed", *options)
    out = tmp_path / "failed"
    text = run(out, *options, status=1, env=planted(tmp_path, SLOW_SAVE))
    assert "the loss is nan" in text and "[epoch 0]" in text and "[epoch 1]" not in text
    held, failed = text.index("is held back"), text.index("planted: a step of the second")
    assert held < failed
    names = sorted(path.name for path in (out / "weights").iterdir())
    assert names == ["best.pth", "checkpoint.pth", "model-0.pth"]
    # Written while later steps trained, and a loss that is no number: yet the epoch's own weights.
    expected = load(tmp_path / "undisturbed" / "weights" / "model-0.pth")
    assert same_tensors(load(out / "weights" / "model-0.pth"), expected)
    checkpoint = load(out / "weights" / "checkpoint.pth")
    assert (checkpoint["epoch"], checkpoint["position"]) == (1, 0)
    assert same_tensors(checkpoint["model"], expected)


# ---- records ---------------------------------------------------------------------------------

def line(epoch, loss):
    return {"epoch": epoch, "loss": loss, "accuracy": 0.5, "learning_rate": 0.1}


def test_a_resumed_run_has_each_epoch_once_in_its_records(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = RunLog(tmp_path)
    for epoch in range(3):
        log.add_epoch(line(epoch, 1.0))
    log.close()
    again = RunLog(tmp_path, log.name, 2)  # the last epoch's checkpoint was lost
    for epoch in (2, 3):
        again.add_epoch(line(epoch, 2.0))
    again.close()
    assert again.folder == log.folder and not log.broken and not again.broken
    expected = [(0, 1.0), (1, 1.0), (2, 2.0), (3, 2.0)]
    text = (log.folder / "metrics.jsonl").read_text()
    lines = map(json.loads, text.splitlines())
    assert [(entry["epoch"], entry["loss"]) for entry in lines] == expected
    events = EventAccumulator(str(log.folder)).Reload()
    for tag in ("loss", "accuracy", "learning_rate"):
        assert [event.step for event in events.Scalars(tag)] == [0, 1, 2, 3]
    assert [(event.step, event.value) for event in events.Scalars("loss")] == expected


def test_the_confusion_figure_has_the_predicted_class_along_x():
    matrix = [[1, 3], [0, 2]]
    axes = confusion_figure(matrix, ["blue", "red"]).axes[0]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("predicted class", "true class")
    texts = {text.get_position(): text.get_text() for text in axes.texts}
    assert texts == {(column, row): str(matrix[row][column]) for row in (0, 1) for column in (0, 1)}
    assert texts[1, 0] == "3"
    assert axes.images[0].get_array().tolist() == [[0.25, 0.75], [0.0, 1.0]]
    for labels in (axes.get_xticklabels(), axes.get_yticklabels()):
        assert [label.get_text() for label in labels] == ["blue", "red"]


# ---- how to go on ----------------------------------------------------------------------------

@pytest.mark.parametrize("given", [
    ["--resume", "x", "--epochs", "3"], ["--epochs", "3", "--resume=x"],
    ["--epochs", "3", "--resume", "auto"], ["--epochs", "3"]])
def test_the_command_to_go_on_names_the_newest_checkpoint_alone(given, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["t.py", *given])
    args = Namespace(script="single", world_size=1, local_world_size=1)
    assert resume_command(args) == "python t.py --epochs 3 --resume auto"
