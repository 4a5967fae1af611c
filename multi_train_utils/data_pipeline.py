"""From files to batches: the order of an epoch, and the streaming way of the pixels.

Each epoch's order follows from (seed, epoch); with it the images of a global step are the same at
any number of processes. Every picture comes out of ``MyDataSet``.
"""

import hashlib
import math
import os
import shutil
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, Sampler

from my_dataset import ImageError, ImageKey, MyDataSet, image_size, open_image
from utils import allowed_cpus

from .augmentation import augment, crop_image, draw_crop, image_seed, to_tensor, validation_image
from .distributed_utils import say
from .options import Options
from .safety.guard import Guard
from .safety.signals import signals_held_back
from .train_eval_utils import progress

HEADER_CHECK_LIMIT = 200_000  # files; above, reading every header would delay the start by minutes


class ImageList:
    """Paths and labels of one part of the set, with the sizes (width, height) where known."""

    def __init__(self, paths: Iterable[str], labels: Iterable[int]) -> None:
        self.paths, self.labels = list(paths), list(labels)
        self.sizes: list[Any] | None = None

    def __len__(self) -> int:
        return len(self.paths)

    def size(self, index: int) -> tuple[int, int]:
        """(width, height) of an image as a person sees it; raises ImageError."""
        return self.sizes[index] if self.sizes else image_size(self.paths[index])

    def without(self, bad: Collection[str]) -> "ImageList":
        """A list that leaves out the paths in ``bad``."""
        kept = [i for i, path in enumerate(self.paths) if path not in bad]
        result = ImageList([self.paths[i] for i in kept], [self.labels[i] for i in kept])
        if self.sizes:
            result.sizes = [self.sizes[i] for i in kept]
        return result

    def fingerprint(self) -> dict[str, Any]:
        """Tells two lists apart, by class, name and order of the files."""
        digest = hashlib.sha256()
        for path, label in zip(self.paths, self.labels, strict=True):
            name = f"{label}/{os.path.basename(path)}\n"
            digest.update(name.encode("utf-8", "surrogateescape"))
        return {"count": len(self), "sha256": digest.hexdigest()}


# ---- which images, in which order ----

class EpochSampler(DistributedSampler):
    """DistributedSampler (drop_last=True) that can begin anywhere in an epoch.

    Yields (epoch, index): persistent loader workers never see what is set here later, so the
    epoch travels with the index. ``start`` counts images over all processes, so that an epoch
    can go on with another number of them.
    """

    def __init__(self, dataset: Any, num_replicas: int, rank: int, seed: int) -> None:
        super().__init__(dataset, num_replicas, rank, shuffle=True, seed=seed, drop_last=True)
        self.images = dataset
        self.start = 0

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        super().set_epoch(epoch)
        self.start = start

    def __iter__(self) -> Iterator:
        generator = torch.Generator()
        # One number from two, so that epoch 1 of seed 0 is not epoch 0 of seed 1.
        generator.manual_seed(self.seed * 1_000_003 + self.epoch)
        order = torch.randperm(len(self.images), generator=generator).tolist()[self.start:]
        usable = len(order) // self.num_replicas * self.num_replicas
        return iter([(self.epoch, i) for i in order[self.rank:usable:self.num_replicas]])

    def __len__(self) -> int:
        return (len(self.images) - self.start) // self.num_replicas


class ShareSampler(Sampler):
    """This process's share of a set, every image once over all processes, nobody padded."""

    def __init__(self, dataset: Any, num_replicas: int, rank: int) -> None:
        self.indices = range(rank, len(dataset), num_replicas)

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def __len__(self) -> int:
        return len(self.indices)


# ---- what a loader worker does ----

class TrainingImages(Dataset):
    """(epoch, index) to (uint8 crop of size x size x 3, label, seed for augment()).

    An ImageError is returned, not raised: torch would wrap it into the worker's traceback, while
    the trainer wants the file, whatever it is called, and the reason.
    """

    def __init__(self, images: ImageList, size: int, seed: int) -> None:
        self.images, self.image_size, self.seed = images, size, seed
        self.pictures = MyDataSet(images.paths, images.labels)

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, key: tuple[int, int]) -> tuple[Tensor, int, int] | ImageError:
        epoch, index = key
        try:
            width, height = self.images.size(index)
            crop = draw_crop(self.seed, epoch, index, width, height)
            # A JPEG far larger than needed is decoded at a fraction of its size, twice the
            # crop's need at least, so that antialiasing still has pixels to average.
            need = 2 * self.image_size
            enough = (min(width, math.ceil(width * need / crop.width)),
                      min(height, math.ceil(height * need / crop.height)))
            picture, label = self.pictures[ImageKey(index, epoch, at_least=enough)]
        except ImageError as error:
            return error
        if picture.size != (width, height):
            crop = crop.scaled(picture.width / width, picture.height / height)
        pixels = to_tensor(crop_image(picture, crop, self.image_size))
        return pixels, label, image_seed(self.seed, epoch, index)


class ValidationImages(Dataset):
    """index to (uint8 image of size x size x 3, label); an ImageError is returned."""

    def __init__(self, images: ImageList, size: int) -> None:
        self.image_size, self.pictures = size, MyDataSet(images.paths, images.labels)

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> tuple[Tensor, int] | ImageError:
        try:
            picture, label = self.pictures[index]
        except ImageError as error:
            return error
        return to_tensor(validation_image(picture, self.image_size)), label


def collate(samples: Sequence[Any]) -> list[Tensor] | ImageError:
    """[images B x H x W x 3 uint8, labels B int64, (seeds B int64)], or the first ImageError."""
    for sample in samples:
        if isinstance(sample, ImageError):
            return sample
    seeds = [sample[2] for sample in samples if len(sample) > 2]
    batch = [*MyDataSet.collate_fn([sample[:2] for sample in samples])]
    return [*batch, torch.tensor(seeds)] if seeds else batch


def checked(batch: Any) -> Any:
    """The batch itself; an ImageError that a worker returned in its place is raised."""
    if isinstance(batch, ImageError):
        raise ImageError(batch.path, batch.reason)
    return batch


# ---- batches on the device ----

def send(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on ``device``, without waiting for a GPU (for that the host's copy is pinned)."""
    if device.type == "cuda" and not tensor.is_pinned():
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


class Batches:
    """``make(item)`` for each item of a sampler or DataLoader: (images, labels) on the device."""

    def __init__(self, source: Any, make: Callable[[Any], tuple[Tensor, Tensor]],
                 device: torch.device, guard: Guard) -> None:
        self.source, self.make, self.device, self.guard = source, make, device, guard

    def __len__(self) -> int:
        return len(self.source)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return map(self.make, self.items())

    def items(self) -> Iterator:
        """The source's items, with an eye on the workers that send them."""
        with signals_held_back():
            items = iter(self.source)
        return self.guard.fetched(items) if getattr(self.source, "num_workers", 0) else items


class StreamingData:
    """Images decoded by loader workers in every epoch; uint8 travels to the device.

    ``batches`` is a kind of Batches.
    """

    def __init__(self, args: Options, train: ImageList, val: ImageList, sampler: EpochSampler,
                 device: torch.device, guard: Guard, batches: type[Batches] = Batches) -> None:
        self.batch_size, self.device, self.sampler = args.batch_size, device, sampler
        self.train_set = TrainingImages(train, args.image_size, args.seed)
        val_set = ValidationImages(val, args.image_size)
        workers = choose_workers(args)
        common: dict[str, Any] = {
            "num_workers": workers, "multiprocessing_context": worker_context(workers),
            "persistent_workers": workers > 0, "collate_fn": collate,
            "pin_memory": device.type == "cuda"}
        train_loader: DataLoader = DataLoader(self.train_set, batch_sampler=BatchSampler(
            sampler, args.batch_size, drop_last=True), **common)
        val_loader: DataLoader = DataLoader(
            val_set, batch_size=args.batch_size,
            sampler=ShareSampler(val_set, args.world_size, args.rank), **common)
        self._train: Batches | None = batches(train_loader, self._augmented, device, guard)
        self._val: Batches | None = batches(val_loader, self._on_device, device, guard)

    def load(self) -> None:
        """Nothing to load: images are decoded when their turn comes."""

    def train_batches(self) -> Any:
        """Batches (images, labels) of this process for the epoch that the sampler was told."""
        return self._train

    def val_batches(self) -> Any:
        """Batches (images, labels) of this process's share of the validation images."""
        return self._val

    def example(self) -> tuple[Tensor, Tensor]:
        """A batch to warm up with: real images, the first of the list."""
        keys = [(0, i % len(self.train_set)) for i in range(self.batch_size)]
        return self._augmented(collate([self.train_set[key] for key in keys]))

    def close(self) -> None:
        """End the loader workers; left to the interpreter's exit, they would hold it up."""
        self._train = self._val = None

    def _on_device(self, batch: Any) -> tuple[Tensor, Tensor]:
        """The batch on the device; raises the ImageError that a worker met."""
        images, labels = (send(tensor, self.device) for tensor in checked(batch))
        return images, labels

    def _augmented(self, batch: Any) -> tuple[Tensor, Tensor]:
        images, labels, seeds = (send(tensor, self.device) for tensor in checked(batch))
        return augment(images, seeds), labels


def worker_context(workers: int) -> str | None:
    """How loader workers start: forked where that is safe, so at once, also in spawned ranks.

    They never touch CUDA, which would not survive a fork.
    """
    return "fork" if workers and sys.platform == "linux" else None


# ---- looking at the files before training ----

def check_same_lists(train: ImageList, val: ImageList, guard: Guard) -> None:
    """Raise ``ValueError`` where a rank, on another machine, sees other files than rank 0."""
    prints = guard.gather([train.fingerprint(), val.fingerprint()])
    others = [rank for rank, value in enumerate(prints) if value != prints[0]]
    if others:
        counts = prints[others[0]]
        raise ValueError(f"rank {others[0]} sees other images than rank 0: "
                         f"{counts[0]['count']} for training and {counts[1]['count']} for "
                         f"validation there, {prints[0][0]['count']} and {prints[0][1]['count']} "
                         "here, or other names. --data-path must hold the same set everywhere.")


def choose_workers(args: Options) -> int:
    """Loader workers of this process: ``--workers``, or its share of the allowed CPUs."""
    share = allowed_cpus() // args.local_world_size
    workers = args.workers if args.workers is not None else min(8, share)
    # Two pools (training, validation), two batches ahead and one in hand for each worker.
    need = 6 * workers * args.local_world_size * args.batch_size * args.image_size ** 2 * 3
    free = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else need
    if need > free:
        text = (f"/dev/shm has {free / 2**20:.1f} MiB free, {workers} loader workers per process "
                f"may need {need / 2**20:.1f} MiB")
        if args.workers is not None:
            raise ValueError(f"{text}: use --workers 0 or fewer workers, a smaller --batch-size, "
                             "or give the container more (docker run --shm-size)")
        workers = 0
        say(f"{text}: decoding in the training process instead (--workers 0)")
    say(f"Using {workers} loader workers per process")
    return workers


def check_images(images: ImageList, args: Options, guard: Guard,
                 decode: bool = False) -> dict[str, str]:
    """Read every file's header (or all of it); returns {path: reason} of the unreadable ones.

    Ranks share the work and all return the same. Fills in ``images.sizes``.
    """
    share = range(args.rank, len(images), args.world_size)

    def look(index: int) -> Any:
        path = images.paths[index]
        try:
            return open_image(path).size if decode else image_size(path)
        except ImageError as error:
            return error.reason

    with ThreadPoolExecutor(max(1, allowed_cpus() // args.local_world_size)) as pool:
        found = list(progress(pool.map(look, share), "checking images", len(share)))
    sizes: list[Any] = [None] * len(images)
    for rank, part in enumerate(guard.gather(found)):
        sizes[rank::args.world_size] = part
    images.sizes = sizes
    return {path: size for path, size in zip(images.paths, sizes, strict=True)
            if isinstance(size, str)}


def readable_images(train: ImageList, val: ImageList, args: Options,
                    guard: Guard) -> tuple[ImageList, ImageList]:
    """The two lists with their sizes, after a look at every file.

    Unreadable files end the run with a list of them all, or are left out with
    ``--skip-bad-images``. Raises ``ValueError``.
    """
    if not args.skip_bad_images and len(train) + len(val) > HEADER_CHECK_LIMIT:
        return train, val
    bad: dict[str, str] = {}
    for images in (train, val):
        bad |= check_images(images, args, guard, decode=args.skip_bad_images)
    listing = "\n".join(f"    {path}: {reason}" for path, reason in bad.items())
    if bad and not args.skip_bad_images:
        total = len(train) + len(val)
        raise ValueError(f"{len(bad)} of {total} images cannot be read:\n{listing}\n"
                         "Repair or remove them, or leave them out with --skip-bad-images.")
    if bad:
        say(f"{len(bad)} bad images are left out (--skip-bad-images):\n{listing}")
    return (train.without(bad), val.without(bad)) if bad else (train, val)


def check_counts(train: ImageList, val: ImageList, args: Options) -> None:
    """Raise ``ValueError`` where there are too few images for a step, or for BatchNorm."""
    needed = args.batch_size * args.world_size
    if len(train) < needed:
        raise ValueError(f"{len(train)} training images are fewer than one global batch, "
                         f"{needed} = --batch-size {args.batch_size} x {args.world_size} "
                         "processes. Use a smaller --batch-size or fewer processes.")
    if not len(val):
        raise ValueError(f"{args.data_path}: no readable image is left for validation")
    if args.image_size < 64 and args.batch_size == 1:
        raise ValueError("--batch-size 1 at --image-size below 64 leaves BatchNorm one value per "
                         "channel, of which there are no statistics: use --batch-size 2 or more")
