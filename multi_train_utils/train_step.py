"""One step of training: forward, loss, backward, mean gradient over the processes, update.

The same function runs eagerly or, on a GPU, is captured once and replayed (captured_step.py).
"""

import copy

import torch
from torch import nn

from .train_eval_utils import keep_frozen_statistics

AMP_TYPES = {"off": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def make_optimizer(model, args, device):
    """SGD with momentum 0.9 over the parameters that require gradients.

    On a GPU it is fused and its learning rate a tensor, so that a captured step sees each change.
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


def set_learning_rate(optimizer, rate):
    """Give all parameter groups the learning rate ``rate``, a float."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


class TrainStep:
    """``step(*batch)`` trains on one batch and returns its mean loss, a scalar on the device.

    ``prepare(*batch)`` gives (images, labels) as the network wants them. fp16 scales the loss so
    that small gradients survive (Micikevicius et al. 2017, arXiv:1710.03740); a step whose
    gradients overflow is left out and the scale halved, without the host hearing of it.
    """

    def __init__(self, model, optimizer, prepare, device, amp="off", label_smoothing=0.0):
        self.model, self.optimizer, self.prepare, self.device = model, optimizer, prepare, device
        self.amp_type = AMP_TYPES[amp]
        self.criterion = nn.CrossEntropyLoss(label_smoothing=label_smoothing)
        self.scaler = torch.amp.GradScaler(device.type, enabled=amp == "fp16")

    def __call__(self, *batch):
        images, labels = self.prepare(*batch)
        # Cached casts would outlive the step in a captured graph.
        with torch.autocast(self.device.type, self.amp_type, enabled=self.amp_type is not None,
                            cache_enabled=False):
            loss = self.criterion(self.model(images), labels)
        self.optimizer.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.detach()

    def state(self):
        """Everything that a step changes, as live tensors in nested dicts."""
        model = getattr(self.model, "module", self.model)
        return {"model": model.state_dict(), "optimizer": self.optimizer.state_dict(),
                "scaler": self.scaler.state_dict()}

    def load_state(self, state):
        """Set what ``state()`` gives, in place: a captured step keeps its addresses."""
        model = getattr(self.model, "module", self.model)
        model.load_state_dict(state["model"])
        with torch.no_grad():
            load_momentum(self.optimizer, state["optimizer"])
        if state["scaler"]:  # empty where the checkpoint's run needed none
            self.scaler.load_state_dict(state["scaler"])


def load_momentum(optimizer, state):
    """Set SGD's momentum in place from a state dict of the same optimiser.

    ``optimizer.load_state_dict`` would put new tensors in place of those that a captured step
    writes to. The learning rate is not taken over: it follows from the schedule.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, parameter in enumerate(parameters):
        saved = state["state"][number]["momentum_buffer"]
        optimizer.state[parameter]["momentum_buffer"].copy_(saved)


def warm_up(step, batch, steps):
    """Take ``steps`` steps that leave no trace.

    DistributedDataParallel orders its buckets by the first backward pass, cuDNN chooses its
    kernels, the optimiser allocates its momentum: after this every step is like the next.
    """
    before = copy.deepcopy(step.state())
    random_state = torch.get_rng_state()
    step.model.train()
    keep_frozen_statistics(step.model)
    for _ in range(steps):
        step(*batch)
    step.optimizer.zero_grad(set_to_none=True)
    step.load_state(before)
    torch.set_rng_state(random_state)
