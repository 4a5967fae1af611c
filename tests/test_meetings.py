"""What ranks tell each other: sums, weights, buffers, and that all see the same files.

Run as a script, this file is one of two ranks that try each of CASES and print what came out. Both
answer for themselves, so that an error in one does not hide behind the other's.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from argparse import Namespace

import pytest
import torch
import torchvision
from conftest import clean_environment, end_group
from jobs import Job, all_gone, command, descendants
from torch import nn

from multi_train_utils.distributed_utils import init_distributed_mode, reduce_value
from multi_train_utils.options import parse_args
from multi_train_utils.safety.agreement import check_same_weights, share_initial_weights
from multi_train_utils.safety.guard import Guard
from multi_train_utils.safety.rendezvous import meet
from multi_train_utils.train_eval_utils import EpochMeter, evaluate, train_one_epoch
from multi_train_utils.trainer import ddp_options

CPU = torch.device("cpu")


# ---- two ranks -------------------------------------------------------------------------------

def different_model(rank):
    """Its weights, and a buffer, are other ones in each rank."""
    torch.manual_seed(100 + rank)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    model[1].running_mean.fill_(7.0 * rank)
    return model


def values(model):
    return [value.tolist() for value in model.state_dict().values()]


def mean_of_floats(args, guard):
    value = torch.tensor([1.0 + 2 * args.rank, 10.0])
    return [reduce_value(value).tolist(), value.tolist()]


def sum_of_integers(args, guard):
    return reduce_value(torch.tensor(1 + args.rank), average=False).tolist()


def mean_of_integers(args, guard):
    return reduce_value(torch.tensor(1)).tolist()


def shared_weights(args, guard):
    model = different_model(args.rank)
    share_initial_weights(model, guard)
    return values(model)


def equal_weights(args, guard):
    return check_same_weights(different_model(0), guard)


def other_weights(args, guard):
    return check_same_weights(different_model(args.rank), guard)


def steps_with_buffers_apart(args, guard):
    """The running means after a training step that began with 7 on rank 1, 0 on rank 0."""
    model = nn.parallel.DistributedDataParallel(different_model(0), **ddp_options())
    model.module[1].running_mean.fill_(7.0 * args.rank)  # wrapping has made them all equal
    model.train()
    model(torch.zeros(4, 3))
    return model.module[1].running_mean.tolist()


def evaluated_with_rank_0s_statistics(args, guard):
    model = nn.BatchNorm1d(2)
    if args.rank == 1:
        model.running_mean.copy_(torch.tensor([10.0, 0.0]))
    return evaluate(model, [(torch.tensor([[5.0, 1.0]]), torch.tensor([0]))], CPU)


def mean_loss_over_both(args, guard):
    meter = EpochMeter(CPU)
    for loss, images in ([(1.0, 3)] if args.rank == 0 else [(5.0, 1), (2.0, 4)]):
        meter.add(torch.tensor(loss), images)
    return meter.mean()


def weights_after_other_batches(args, guard):
    model = nn.parallel.DistributedDataParallel(nn.Linear(1, 2), **ddp_options())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.full((2, 1), 1.0 + args.rank), torch.tensor([args.rank, 0])
    train_one_epoch(model, optimizer, [batch], CPU, 0)
    return values(model.module)


def questions_and_answers(args, guard):
    return guard.gather(args.rank * 10), guard.largest(args.rank, -args.rank), \
        guard.first(f"from {args.rank}")


CASES = {case.__name__: case for case in (
    mean_of_floats, sum_of_integers, mean_of_integers, shared_weights, equal_weights,
    other_weights, steps_with_buffers_apart, evaluated_with_rank_0s_statistics,
    mean_loss_over_both, weights_after_other_batches, questions_and_answers)}


def be_a_rank(meeting_place):
    args = parse_args("launch", ["--device", "cpu", "--dist-url", meeting_place, "--timeout", "60"])
    init_distributed_mode(args, join=meet)
    guard = Guard(args).__enter__()
    for name, case in CASES.items():
        try:
            found = {"value": case(args, guard)}
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {error}"}
        print("CASE", json.dumps({name: found}), flush=True)
    os._exit(0)  # all is said: nothing is worth waiting for


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """{case: [what rank 0 found, what rank 1 found]}."""
    folder = tmp_path_factory.mktemp("meetings")
    ranks = []
    for rank in ("0", "1"):
        env = clean_environment() | {
            "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "localhost", "MASTER_PORT": "1", "OMP_NUM_THREADS": "1"}
        ranks.append(subprocess.Popen(
            [sys.executable, __file__, f"file://{folder}/meeting_place"], env=env, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True))
    try:
        outputs = [process.communicate(timeout=120)[0] for process in ranks]
    finally:
        for process in ranks:
            end_group(process)
    results = {name: [] for name in CASES}
    for process, output in zip(ranks, outputs, strict=True):
        assert process.returncode == 0, output
        for line in output.splitlines():
            if line.startswith("CASE "):
                for name, result in json.loads(line[5:]).items():
                    results[name].append(result)
    assert all(len(both) == 2 for both in results.values()), outputs
    return results


def both(found, case):
    """What the two ranks found; the test fails where one of them met an error."""
    assert all("value" in result for result in found[case]), found[case]
    return [result["value"] for result in found[case]]


pair = pytest.mark.slow  # two processes that start Python and torch


@pair
def test_the_mean_is_that_of_all_ranks_and_the_value_stays(found):
    assert both(found, "mean_of_floats") == [[[2.0, 10.0], [1.0, 10.0]],
                                             [[2.0, 10.0], [3.0, 10.0]]]


@pair
def test_the_sum_of_integers_is_an_integer(found):
    assert both(found, "sum_of_integers") == [3, 3]


@pair
def test_the_mean_of_integers_is_refused(found):
    for result in found["mean_of_integers"]:
        assert result["error"].startswith("ValueError: ") and "average=False" in result["error"]


@pair
def test_ranks_with_other_weights_are_equal_after_sharing(found):
    first, second = both(found, "shared_weights")
    assert first == second == values(different_model(0))
    assert values(different_model(0)) != values(different_model(1))


@pair
def test_weights_that_differ_are_noticed_by_all_ranks(found):
    assert both(found, "equal_weights") == [None, None]
    for result in found["other_weights"]:
        assert result["error"].startswith("RuntimeError: rank 1 would start from other weights")


def test_weights_that_differ_name_the_ranks():
    prints = [[1], [2], [1], [3]]
    with pytest.raises(RuntimeError, match="^rank 1, 3 would start from other weights"):
        check_same_weights(nn.Linear(1, 1), Namespace(gather=lambda value: prints))


@pair
def test_a_training_step_leaves_each_ranks_buffers_its_own(found):
    first, second = both(found, "steps_with_buffers_apart")
    bias = different_model(0)[0].bias.tolist()  # the mean that the layer has seen: zeros + bias
    assert first == pytest.approx([0.1 * value for value in bias], abs=1e-6)
    assert second == pytest.approx([0.9 * 7 + 0.1 * value for value in bias], abs=1e-6)


@pair
def test_every_rank_evaluates_with_the_statistics_of_rank_0(found):
    """By its own statistics rank 1 would take its image for class 1."""
    assert both(found, "evaluated_with_rank_0s_statistics") == [2, 2]


@pair
def test_the_mean_loss_is_over_the_images_of_all_ranks(found):
    assert both(found, "mean_loss_over_both") == [pytest.approx(2.0), pytest.approx(2.0)]


@pair
def test_ranks_that_trained_on_other_batches_have_the_same_weights(found):
    first, second = both(found, "weights_after_other_batches")
    assert first == second


@pair
def test_meetings_give_all_ranks_the_same_answer(found):
    answer = [[0, 10], [1, 0], "from 0"]
    assert both(found, "questions_and_answers") == [answer, answer]


# ---- whole runs ------------------------------------------------------------------------------

@pytest.mark.slow
def test_a_rank_that_sees_one_more_file_is_named(flowers, tmp_path):
    """On another machine the folder of the same name may hold another set."""
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        shutil.copytree(flowers, folder)
    shutil.copy(next((there / "tulips").iterdir()), there / "tulips" / "one_more.jpg")
    jobs = []
    with contextlib.ExitStack() as stack:
        for rank, data in (("0", here), ("1", there)):
            env = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
                   "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
            words = command("launch", 2, "--data-path", str(data), "--epochs", "1",
                            "--dist-url", f"file://{tmp_path}/meeting_place",
                            "--output-dir", str(tmp_path / "out"))[3:]
            jobs.append(stack.enter_context(Job(tmp_path / f"rank{rank}", *words, env=env)))
        assert [job.wait(120) for job in jobs] == [1, 1], jobs[0].text() + jobs[1].text()
        text = jobs[0].text() + jobs[1].text()
    assert text.count("rank 1 sees other images than rank 0: 61 for training") == 1
    assert "Traceback" not in text and not (tmp_path / "out" / "weights").exists()


@pytest.mark.slow
def test_a_head_that_no_file_gives_is_the_same_on_all_ranks(flowers, tmp_path):
    """What a weight file leaves out is drawn by each rank for itself, from one seed."""
    torch.manual_seed(0)
    torch.save(torchvision.models.resnet18(num_classes=1000).state_dict(), tmp_path / "given.pth")
    words = command("spawn", 2, "--data-path", str(flowers), "--epochs", "1", "--batch-size", "6",
                    "--weights", str(tmp_path / "given.pth"))
    with Job(tmp_path, *words) as job:
        assert job.wait(120) == 0, job.text()
        assert "120 of 122 tensors loaded" in job.text()


@pytest.mark.slow
def test_a_frozen_peer_holds_up_a_stop_no_longer_than_the_deadline(flowers, tmp_path):
    """Long before --timeout, ranks that cannot agree on a stop leave without one."""
    words = command("spawn", 2, "--data-path", str(flowers), "--epochs", "500", "--batch-size",
                    "6", "--timeout", "3000")
    with Job(tmp_path, *words) as job:
        job.wait_for("[epoch 0]")
        pids = descendants(job.process.pid)
        os.kill(job.ranks()[1], signal.SIGSTOP)
        os.kill(job.process.pid, signal.SIGTERM)
        assert job.wait(60) == 128 + signal.SIGTERM, job.text()
        assert all_gone(pids)
    assert "not stopped within" in job.text() and "Stopped by" not in job.text()


if __name__ == "__main__":
    be_a_rank(sys.argv[1])
