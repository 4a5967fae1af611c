"""The same training as one would write it by hand, to compare with: no part of this project's core.

    python benchmarks/plain_loop.py --data-path flower_photos
    torchrun --standalone --nproc_per_node=2 benchmarks/plain_loop.py --data-path flower_photos

torchvision's ResNet-34 and transforms, a DataLoader that decodes every image in every epoch,
DistributedDataParallel with SyncBatchNorm, `loss.item()` in each step. Prints one JSON line per
epoch and a last one with the total of seconds.
"""

import argparse
import contextlib
import json
import math
import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

import repository  # noqa: F401  first: the way to its modules
import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torchvision import transforms
from torchvision.models import resnet34

from utils import read_split_data  # the same split, so that accuracies compare

Part = list[Any]  # [paths, labels]
Precision = tuple[Callable[[], Any], torch.amp.GradScaler]


class Photos(Dataset):
    """Image files with their labels, decoded when asked for."""

    def __init__(self, part: Part, transform: Callable[[Image.Image], Tensor]) -> None:
        (self.paths, self.labels), self.transform = part, transform

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform(Image.open(self.paths[index]).convert("RGB")), self.labels[index]


def make_loaders(args: argparse.Namespace, train: Part, val: Part, rank: int, world_size: int
                 ) -> tuple[DataLoader, DistributedSampler | None, DataLoader]:
    """(training loader, its sampler or None, validation loader)."""
    normalize = transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    train_set = Photos(train, transforms.Compose([
        transforms.RandomResizedCrop(args.image_size), transforms.RandomHorizontalFlip(),
        transforms.ToTensor(), normalize]))
    # Each process validates its share, every image once.
    val_set = Photos([entries[rank::world_size] for entries in val], transforms.Compose([
        transforms.Resize(round(args.image_size * 256 / 224)),
        transforms.CenterCrop(args.image_size), transforms.ToTensor(), normalize]))
    sampler: DistributedSampler | None = None
    if world_size > 1:
        sampler = DistributedSampler(train_set, seed=args.seed)
    workers = min(8, (os.cpu_count() or 1) // world_size)
    common: dict[str, Any] = {
        "batch_size": args.batch_size, "num_workers": workers, "pin_memory": args.device == "cuda"}
    return (DataLoader(train_set, shuffle=sampler is None, sampler=sampler, drop_last=True,
                       **common), sampler, DataLoader(val_set, **common))


def make_model(args: argparse.Namespace, classes: int, device: torch.device,
               world_size: int) -> nn.Module:
    """torchvision's network from scratch; the wrapper gives all processes rank 0's weights."""
    model: nn.Module = resnet34(num_classes=classes).to(device)
    if world_size == 1:
        return model
    if args.syncBN and args.device == "cuda":
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return nn.parallel.DistributedDataParallel(
        model, device_ids=[device.index] if args.device == "cuda" else None)


def mixed_precision(args: argparse.Namespace) -> Precision:
    """(function that gives an autocast context, gradient scaler)."""
    kind = {"off": None, "bf16": torch.bfloat16, "fp16": torch.float16}[args.amp]
    scaler = torch.amp.GradScaler(args.device, enabled=args.amp == "fp16")
    if kind is None:
        return contextlib.nullcontext, scaler
    return lambda: torch.autocast(args.device, kind), scaler


def train_epoch(model: nn.Module, loader: DataLoader, optimizer: torch.optim.Optimizer,
                precision: Precision, device: torch.device) -> float:
    """Mean loss of an epoch over this process's images."""
    model.train()
    autocast, scaler = precision
    loss_sum = 0.0
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        with autocast():
            loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        loss_sum += loss.item()
    return loss_sum / len(loader)


@torch.no_grad()
def accuracy(model: nn.Module, loader: DataLoader, device: torch.device) -> float:
    """Share of correct predictions over all processes' images."""
    model = getattr(model, "module", model)  # the wrapper would wait for shares of equal length
    model.eval()
    counts = torch.zeros(2, dtype=torch.int64, device=device)
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        counts[0] += (model(images).argmax(1) == labels).sum()
        counts[1] += len(labels)
    if dist.is_initialized():
        dist.all_reduce(counts)
    return int(counts[0]) / int(counts[1])


def train(args: argparse.Namespace, rank: int, world_size: int, device: torch.device,
          folder: str) -> None:
    """All epochs; rank 0 prints one JSON line for each and saves its weights in ``folder``."""
    train_part, val_part, classes = read_split_data(args.data_path, class_indices=None, quiet=True)
    loader, sampler, val_loader = make_loaders(args, train_part, val_part, rank, world_size)
    model = make_model(args, classes, device, world_size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001 * world_size, momentum=0.9,
                                weight_decay=0.005)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda e: (1 + math.cos(math.pi * e / args.epochs)) / 2 * 0.9 + 0.1)
    precision = mixed_precision(args)
    for epoch in range(args.epochs):
        start = time.perf_counter()
        if sampler is not None:
            sampler.set_epoch(epoch)
        loss = train_epoch(model, loader, optimizer, precision, device)
        trained = time.perf_counter() - start
        schedule.step()
        correct = accuracy(model, val_loader, device)
        if rank == 0:
            torch.save(getattr(model, "module", model).state_dict(),
                       os.path.join(folder, f"model-{epoch}.pth"))
            images = len(loader) * args.batch_size * world_size
            print(json.dumps({"epoch": epoch, "seconds": time.perf_counter() - start,
                              "images_per_second": images / trained, "accuracy": correct,
                              "loss": loss}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-path", default="flower_photos")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=16, help="per process")
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--amp", choices=["off", "bf16", "fp16"], default="off")
    parser.add_argument("--no-syncBN", dest="syncBN", action="store_false")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    args = parser.parse_args()
    start = time.perf_counter()
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device(args.device, int(os.environ.get("LOCAL_RANK", 0)))
    if args.device == "cuda":
        torch.cuda.set_device(device)
    if world_size > 1:
        dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    torch.manual_seed(args.seed + rank)
    with tempfile.TemporaryDirectory(prefix="plain_loop_") as folder:
        train(args, rank, world_size, device, folder)
    if world_size > 1:
        dist.destroy_process_group()
    if rank == 0:
        print(json.dumps({"total_seconds": time.perf_counter() - start}))


if __name__ == "__main__":
    main()
