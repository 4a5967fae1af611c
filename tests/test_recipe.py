"""The recipe: optimiser, schedule, loss, step, evaluation and the epoch's sums, as numbers.

What can be worked out by hand is compared with the hand's result, not with the code's own.
"""

import json
import math

import pytest
import torch
from jobs import Job, command, planted, records
from torch import nn
from torch.nn import functional

from multi_train_utils.data_pipeline import EpochSampler
from multi_train_utils.distributed_utils import set_single_process
from multi_train_utils.options import parse_args
from multi_train_utils.train_eval_utils import (
    EpochMeter,
    Place,
    TrainStep,
    evaluate,
    train_one_epoch,
)
from multi_train_utils.trainer import make_optimizer, rate_of

CPU = torch.device("cpu")


def options(*words):
    """The training script's options for one process on the CPU."""
    args = parse_args("single", ["--device", "cpu", *words])
    set_single_process(args)
    return args


# ---- the optimiser ---------------------------------------------------------------------------

def weight_after(gradients, *words):
    """A weight that begins at 1, after one step of rate 0.1 with each of the gradients."""
    model = nn.ParameterList([nn.Parameter(torch.ones(1))])
    optimizer = make_optimizer(model, options("--lr", "0.1", *words), CPU)
    for gradient in gradients:
        model[0].grad = torch.tensor([gradient])
        optimizer.step()
    return float(model[0].detach())


def test_momentum_carries_the_first_gradient_into_the_second_step():
    assert weight_after([1.0, 1.0], "--weight-decay", "0") == pytest.approx(0.71)


def test_weight_decay_shrinks_a_weight_without_gradient():
    assert weight_after([0.0], "--weight-decay", "0.005") == pytest.approx(0.9995, abs=1e-7)


def test_nesterov_looks_ahead_in_the_first_step():
    assert weight_after([1.0], "--weight-decay", "0", "--nesterov") == pytest.approx(0.81)
    assert weight_after([1.0], "--weight-decay", "0") == pytest.approx(0.9)


# ---- the schedule ----------------------------------------------------------------------------

def test_the_rate_rises_in_equal_steps_while_it_warms_up():
    args = options("--lr", "0.1", "--lrf", "1", "--warmup-epochs", "2", "--epochs", "4")
    args.world_size, args.batch_size = 2, 4
    images = 7 * 8 + 5  # seven steps an epoch, five images left over
    assert rate_of(args, 0, images)(8) == pytest.approx(0.0142857, abs=1e-7)
    assert rate_of(args, 1, images)(0) == pytest.approx(0.1)
    assert rate_of(args, 1, images)(56) == pytest.approx(0.2)
    assert rate_of(args, 2, images)(24) == pytest.approx(0.2)


def test_the_rate_falls_as_half_a_cosine():
    args = options("--lr", "0.1", "--lrf", "0.2", "--epochs", "4")
    expected = [0.1, 0.1 * (0.2 + 0.8 * (1 + math.sqrt(0.5)) / 2), 0.06,
                0.1 * (0.2 + 0.8 * (1 - math.sqrt(0.5)) / 2)]
    assert [rate_of(args, epoch, 60)(16) for epoch in range(4)] == pytest.approx(expected)


def test_an_epochs_order_is_its_own_for_each_seed():
    """A sum of both numbers would give one order to (seed 0, epoch 1) and (seed 1, epoch 0)."""
    orders = set()
    for seed in range(3):
        for epoch in range(3):
            sampler = EpochSampler(range(40), 1, 0, seed)
            sampler.set_epoch(epoch)
            orders.add(tuple(index for _, index in sampler))
    assert len(orders) == 9


# ---- the step --------------------------------------------------------------------------------

class Logits(nn.Module):
    """Gives its input back as logits; the parameter is there to be trained."""

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(2))

    def forward(self, images):
        return images + self.shift


def small_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(),
                         nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))


def small_batches(count):
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(6, 3, 8, 8, generator=generator),
             torch.randint(3, (6,), generator=generator)) for _ in range(count)]


@pytest.mark.parametrize(("smoothing", "expected"), [(0.0, 0.1269), (0.2, 0.3269)])
def test_label_smoothing_moves_the_loss(smoothing, expected):
    model = Logits()
    step = TrainStep(model, make_optimizer(model, options(), CPU), CPU,
                     label_smoothing=smoothing)
    loss = step(torch.tensor([[2.0, 0.0]]), torch.tensor([0]))
    assert float(loss) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(("amp", "expected"), [
    ("off", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_mixed_precision_reaches_the_convolution(amp, expected):
    model, seen = small_net(), []
    model[0].register_forward_hook(lambda layer, given, result: seen.append(result.dtype))
    step = TrainStep(model, make_optimizer(model, options(), CPU), CPU, amp=amp)
    loss = step(*small_batches(1)[0])
    assert seen == [expected] and loss.dtype == torch.float32
    assert {value.dtype for value in model.parameters()} == {torch.float32}


def test_steps_are_those_of_the_textbook():
    """Each step's gradient is its own batch's alone, the update SGD's with momentum and decay."""
    rate, decay, momentum = 0.1, 0.01, 0.9
    args = options("--lr", str(rate), "--weight-decay", str(decay))
    model, reference = small_net(), small_net()
    step = TrainStep(model, make_optimizer(model, args, CPU), CPU)
    velocity = [torch.zeros_like(value) for value in reference.parameters()]
    for images, labels in small_batches(4):
        loss = functional.cross_entropy(reference(images), labels)
        gradients = torch.autograd.grad(loss, list(reference.parameters()))
        with torch.no_grad():
            for value, moved, gradient in zip(reference.parameters(), velocity, gradients,
                                              strict=True):
                moved.mul_(momentum).add_(gradient + decay * value)
                value.sub_(rate * moved)
        assert float(step(images, labels)) == pytest.approx(float(loss.detach()), abs=1e-5)
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=0, atol=1e-5)


# ---- the epoch's sums ------------------------------------------------------------------------

def test_the_mean_loss_counts_images_not_steps():
    meter = EpochMeter(CPU)
    meter.add(torch.tensor(1.0), 3)
    meter.add(torch.tensor(5.0), 1)
    assert meter.mean() == pytest.approx(2.0)


def test_a_resumed_epoch_counts_what_was_done_before():
    meter = EpochMeter(CPU, Place(epoch=0, images=2, loss_sum=12.0, loss_images=2))
    meter.add(torch.tensor(1.0), 4)
    assert meter.mean() == pytest.approx(16 / 6)


def test_an_epoch_returns_the_mean_over_its_images():
    model = Logits()
    # A last batch of another size: its mean loss must count for its one image only.
    batches = [(torch.tensor([[2.0, 0.0]] * 3), torch.tensor([0, 0, 0])),
               (torch.tensor([[2.0, 0.0]]), torch.tensor([1]))]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    loss = train_one_epoch(model, optimizer, batches, CPU, 0)
    near, far = math.log(1 + math.exp(-2)), math.log(1 + math.exp(2))
    assert loss == pytest.approx((3 * near + far) / 4, abs=1e-6)


# ---- evaluation ------------------------------------------------------------------------------

def test_padding_counts_as_nothing():
    logits = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    confusion = torch.zeros(2, 2, dtype=torch.int64)
    correct = evaluate(nn.Identity(), [(logits, torch.tensor([0, 1, -1]))], CPU,
                       confusion=confusion)
    assert correct == 2 and confusion.tolist() == [[1, 0], [0, 1]]


def test_the_confusion_matrix_has_a_row_for_each_true_class():
    logits = torch.tensor([[0.0, 1.0], [0.0, 1.0], [1.0, 0.0]])
    confusion = torch.zeros(2, 2, dtype=torch.int64)
    correct = evaluate(nn.Identity(), [(logits, torch.tensor([0, 0, 0]))], CPU,
                       confusion=confusion)
    assert correct == 1 and confusion.tolist() == [[1, 2], [0, 0]]


def test_evaluation_uses_the_running_statistics_and_leaves_them_be():
    """By the batch's own statistics each of these rows would be of the other class."""
    model = nn.BatchNorm1d(2)
    model.train()
    logits = torch.tensor([[5.0, 1.0], [9.0, 2.0]])
    assert model(logits)[0].argmax() == 1  # in training mode the first row is taken for class 1
    model.reset_running_stats()
    assert evaluate(model, [(logits, torch.tensor([0, 0]))], CPU) == 2
    assert model.running_mean.tolist() == [0, 0] and model.num_batches_tracked == 0


# ---- from the command line to the step -------------------------------------------------------

# Notes, in each rank, what every step was taken with; torch's own functions, wherever they are
# called from.
NOTED = """
import json, os
import torch
from torch.nn import functional
from torch.optim.optimizer import register_optimizer_step_post_hook

step, cross_entropy, conv2d = {}, functional.cross_entropy, functional.conv2d

def noted_loss(*args, **kwargs):
    step["smoothing"] = kwargs.get("label_smoothing", 0.0)
    return cross_entropy(*args, **kwargs)

def noted_convolution(*args, **kwargs):
    result = conv2d(*args, **kwargs)
    step["type"] = str(result.dtype)
    return result

def noted_step(optimizer, args, kwargs):
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    (group,) = optimizer.param_groups
    line = step | {name: group[name] for name in ("momentum", "nesterov", "weight_decay")}
    with open(f"{os.environ['NOTES']}{rank}", "a") as file:
        file.write(json.dumps(line | {"rate": float(group["lr"])}) + "\\n")
    step.clear()

functional.cross_entropy, functional.conv2d = noted_loss, noted_convolution
register_optimizer_step_post_hook(noted_step)
"""


@pytest.mark.slow
def test_the_recipes_options_reach_every_step(flowers, tmp_path):
    notes = tmp_path / "notes"
    words = command("launch", 2, "--data-path", str(flowers), "--batch-size", "4", "--epochs", "3",
                    "--lr", "0.1", "--lrf", "1", "--warmup-epochs", "2", "--weight-decay", "0.002",
                    "--nesterov", "--label-smoothing", "0.2", "--amp", "bf16", "--freeze-layers")
    with Job(tmp_path / "out", *words,
             env=planted(tmp_path, NOTED) | {"NOTES": str(notes)}) as job:
        assert job.wait(240) == 0, job.text()
    rates = [0.2 * min(1.0, (number + 1) / 14) for number in range(21)]  # 7 steps an epoch
    for rank in (0, 1):
        lines = [json.loads(line) for line in open(f"{notes}{rank}").read().splitlines()]
        assert [line.pop("rate") for line in lines] == pytest.approx(rates)
        for line in lines:
            assert line == {"smoothing": 0.2, "type": "torch.bfloat16", "momentum": 0.9,
                            "nesterov": True, "weight_decay": 0.002}
    assert [record["learning_rate"] for record in records(tmp_path / "out")] == pytest.approx(
        [0.1, 0.2, 0.2])
