"""The whole set as uint8 in GPU memory: each image is decoded once, cropped where it lies.

Each rank decodes its share of the training images and sends it to the others; validation images
are prepared by Pillow exactly as on the streaming way, each rank its own share.
"""

import math
from collections.abc import Callable, Iterator
from itertools import accumulate, chain
from typing import Any

import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset

from my_dataset import ImageError, ImageKey, MyDataSet

from ..augmentation import augment, draw_crop, image_seed, to_tensor
from ..data_pipeline import (
    Batches,
    EpochSampler,
    ImageList,
    ShareSampler,
    ValidationImages,
    checked,
    choose_workers,
    collate,
    send,
    worker_context,
)
from ..distributed_utils import say
from ..options import Options
from ..safety.guard import Guard
from ..safety.signals import signals_held_back
from ..train_eval_utils import progress
from .ahead import kind_of_batches
from .device_crop import crop_batch

MEMORY_SHARE = 0.5  # of the free GPU memory that the decoded set may take; the rest is the model's
DECODE_BATCH = 8  # images that a worker hands over at once
EVAL_BATCH = 256  # validation needs no gradients: large batches keep the GPU busy


def stored_size(size: tuple[int, int], image_size: int) -> tuple[int, int]:
    """(width, height) at which an image of ``size`` is kept: the short side at most 1.5 crops.

    At 224 px that is 336. A crop of less than 2/3 of a larger image's side then sees less detail
    than the file holds; a crop of more is no coarser than the network's input.
    """
    width, height = size
    factor = min(1.0, math.ceil(1.5 * image_size) / min(width, height))
    return max(1, round(width * factor)), max(1, round(height * factor))


def needed_bytes(train: ImageList, val: ImageList, args: Options) -> int | None:
    """Bytes of GPU memory that the decoded set takes, from the headers alone; None if unknown."""
    if not train.sizes:
        return None
    pixels = sum(math.prod(stored_size(size, args.image_size)) for size in train.sizes)
    return 3 * (pixels + -(-len(val) // args.world_size) * args.image_size ** 2)


def fits(train: ImageList, val: ImageList, args: Options, device: torch.device,
         guard: Guard) -> bool:
    """Whether the decoded set goes into GPU memory on every rank; rank 0 says what was chosen.

    Raises ``ValueError`` where ``--data-cache device`` insists and it does not.
    """
    if args.data_cache == "off" or device.type == "cpu" and args.data_cache == "auto":
        return False
    if device.type == "cpu":
        raise ValueError("--data-cache device keeps the images in GPU memory, and --device cpu "
                         "has none: use --data-cache auto or off")
    need, free = needed_bytes(train, val, args), torch.cuda.mem_get_info(device)[0]
    too_large = need is None or need > MEMORY_SHARE * free
    too_large = bool(guard.largest(int(too_large))[0])
    size = "too many files to know the size" if need is None else f"{need / 2**30:.2f} GiB"
    text = (f"decoded images: {size}; free GPU memory: {free / 2**30:.1f} GiB, of which "
            f"{MEMORY_SHARE:.0%} may be used")
    if too_large and args.data_cache == "device":
        raise ValueError(f"--data-cache device: the set does not fit ({text}). Use --data-cache "
                         "auto, which streams the images instead.")
    say(f"Data: {'streamed from disk' if too_large else 'kept on the GPU'} ({text})")
    return not too_large


class StoredImages(Dataset):
    """index to (pixels (P x 3 uint8) of a training image at the size at which it is kept, label).

    An ImageError is returned, as in TrainingImages.
    """

    def __init__(self, images: ImageList, sizes: list[tuple[int, int]]) -> None:
        self.images, self.sizes = images, sizes
        self.pictures = MyDataSet(images.paths, images.labels)

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> tuple[Tensor, int] | ImageError:
        (width, height), size = self.images.size(index), self.sizes[index]
        # Twice the size, so that what a JPEG's own reduction leaves is averaged once more.
        enough = min(width, 2 * size[0]), min(height, 2 * size[1])
        try:
            picture, label = self.pictures[ImageKey(index, at_least=enough)]
        except ImageError as error:
            return error
        if picture.size != size:
            # Antialiased: every source pixel counts, so no detail turns into a false pattern.
            picture = picture.resize(size, Image.Resampling.BILINEAR)
        return to_tensor(picture).view(-1, 3), int(label)


def joined(samples: list[Any]) -> tuple[Tensor, list[int]] | ImageError:
    """The pixels of several images one after the other and their labels, or the first ImageError.
    """
    for sample in samples:
        if isinstance(sample, ImageError):
            return sample
    pixels, labels = zip(*samples, strict=True)
    return torch.cat(pixels), list(labels)


def decoding(dataset: Any, args: Options, workers: int, collate_fn: Callable) -> tuple[int, Any]:
    """Start to decode this rank's share of ``dataset``, in order; the workers end with it.

    Returns (number of batches, their iterator). Processes, not threads: between the parts that
    Pillow does without the interpreter's lock, four threads already wait for each other.
    """
    sampler = ShareSampler(dataset, args.world_size, args.rank)
    loader: DataLoader = DataLoader(
        dataset, batch_size=DECODE_BATCH, sampler=sampler, num_workers=workers,
        collate_fn=collate_fn, multiprocessing_context=worker_context(workers))
    with signals_held_back():
        return len(loader), iter(loader)


class DeviceData:
    """Training images in one flat buffer on the device, validation images ready to use there.

    Of a training batch only a few numbers cross the bus: where each image lies and which part of
    it to cut. The crops of the next batch are computed beside the current step.
    """

    def __init__(self, args: Options, train: ImageList, val: ImageList, sampler: EpochSampler,
                 device: torch.device, guard: Guard) -> None:
        self.args, self.device, self.guard = args, device, guard
        self.train, self.sampler = train, sampler
        self.stored = [stored_size(train.size(i), args.image_size) for i in range(len(train))]
        # A box reaches at most 4/3 of the other side, so a panorama costs no more than a square.
        bounds = [(min(h, w * 4 / 3), min(w, h * 4 / 3)) for w, h in self.stored]
        rows, columns = (math.ceil(max(side)) + 2 for side in zip(*bounds, strict=True))
        self.window = rows, columns
        self.batches = kind_of_batches(device)(
            BatchSampler(sampler, args.batch_size, drop_last=True), self._batch, device, guard)
        workers = self.workers = choose_workers(args)
        stored, views = StoredImages(train, self.stored), ValidationImages(val, args.image_size)
        self._decoding: Any = [decoding(stored, args, workers, joined),
                               decoding(views, args, workers, collate)]

    def load(self) -> None:
        """Bring the decoded images to the device, on all ranks; raises ImageError."""
        training, validation = self._decoding
        self._load_training_images(self._decoded(training, "decoding images"))
        self._load_validation_images(self._decoded(validation, "decoding validation images"))
        self._decoding = None  # ends the workers

    def _decoded(self, decoding: tuple[int, Iterator], text: str) -> Iterator:
        count, batches = decoding
        if self.workers:
            batches = self.guard.fetched(batches)
        return map(checked, progress(batches, text, count))

    def _load_training_images(self, decoded: Iterator) -> None:
        """Fill the flat buffer: rank after rank, each rank's share in a row."""
        ranks = range(self.args.world_size)
        shares = [range(rank, len(self.train), len(ranks)) for rank in ranks]
        order = [index for share in shares for index in share]
        ends = list(accumulate((math.prod(self.stored[i]) for i in order), initial=0))
        self.first_pixel = dict(zip(order, ends[:-1], strict=True))
        self.pixels = torch.empty(ends[-1], 3, dtype=torch.uint8, device=self.device)
        begin, own_labels = self.first_pixel[self.args.rank], []
        for images, labels in decoded:
            self.pixels[begin:begin + len(images)].copy_(images)
            begin += len(images)
            own_labels += labels
        # A meeting: one node's disk may be minutes slower than NCCL is patient.
        all_labels = self.guard.gather(own_labels)
        self.labels = dict(zip(order, chain(*all_labels), strict=True))
        for rank, share in enumerate(shares if len(ranks) > 1 else ()):
            end = self.first_pixel[share[-1]] + math.prod(self.stored[share[-1]])
            dist.broadcast(self.pixels[self.first_pixel[share[0]]:end], src=rank)

    def _load_validation_images(self, decoded: Iterator) -> None:
        size = self.args.image_size
        empty = torch.empty(0, size, size, 3, dtype=torch.uint8), torch.empty(0, dtype=torch.int64)
        images, labels = zip(empty, *decoded, strict=True)
        self.val_images = torch.cat(images).to(self.device)
        self.val_labels = torch.cat(labels).to(self.device)

    def train_batches(self) -> Batches:
        """Batches (images, labels) of this process for the epoch that the sampler was told."""
        return self.batches

    def _batch(self, keys: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        rows, seeds = [], []
        for epoch, index in keys:
            width, height = self.train.size(index)
            stored = self.stored[index]
            crop = draw_crop(self.args.seed, epoch, index, width, height)
            crop = crop.scaled(stored[0] / width, stored[1] / height)
            rows.append((self.first_pixel[index], stored[0], *crop))
            seeds.append((image_seed(self.args.seed, epoch, index), self.labels[index]))
        table = send(torch.tensor(rows, dtype=torch.float64), self.device)
        seeds_of, labels = send(torch.tensor(seeds), self.device).t().contiguous()
        images = crop_batch(self.pixels, table, self.window, self.args.image_size)
        return augment(images, seeds_of), labels

    def example(self) -> tuple[Tensor, Tensor]:
        """A batch to warm up with: real images, the first of the list."""
        return self._batch([(0, i % len(self.train)) for i in range(self.args.batch_size)])

    def val_batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches (images, labels) of this process's share, all of one size.

        The last is padded with images of label -1: one shape, so one choice of kernels.
        """
        size = min(EVAL_BATCH, max(1, len(self.val_labels)))
        for begin in range(0, len(self.val_labels), size):
            images = self.val_images[begin:begin + size]
            labels = self.val_labels[begin:begin + size]
            missing = size - len(labels)
            if missing:
                images = torch.cat([images, self.val_images[:missing]])
                labels = torch.cat([labels, labels.new_full((missing,), -1)])
            yield images, labels

    def close(self) -> None:
        """Nothing to end: the workers ended with the decoding."""
