"""From files to batches: the order of an epoch, and the streaming way of the pixels.

Each epoch's order follows from (seed, epoch); with it the images of a global step are the same at
any number of processes.
"""

import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, Sampler

from my_dataset import ImageError, image_size, open_image

from .augmentation import Normalizer, crop_image, draw_crop, to_tensor, validation_image
from .distributed_utils import say
from .failures import signals_held_back
from .train_eval_utils import progress

HEADER_CHECK_LIMIT = 200_000  # files; above, reading every header would delay the start by minutes


class ImageList:
    """Paths and labels of one part of the set, with the sizes (width, height) where known."""

    def __init__(self, paths, labels):
        self.paths, self.labels = list(paths), list(labels)
        self.sizes = None

    def __len__(self):
        return len(self.paths)

    def size(self, index):
        """(width, height) of an image as a person sees it; raises ImageError."""
        return self.sizes[index] if self.sizes else image_size(self.paths[index])

    def without(self, bad):
        """A list that leaves out the paths in ``bad``."""
        kept = [i for i, path in enumerate(self.paths) if path not in bad]
        result = ImageList([self.paths[i] for i in kept], [self.labels[i] for i in kept])
        if self.sizes:
            result.sizes = [self.sizes[i] for i in kept]
        return result


class EpochSampler(DistributedSampler):
    """DistributedSampler (drop_last=True) that can begin anywhere in an epoch.

    Yields (epoch, index): persistent loader workers never see what is set here later, so the
    epoch travels with the index. ``start`` counts images over all processes, so that an epoch
    can go on with another number of them.
    """

    def __init__(self, dataset, num_replicas, rank, seed):
        super().__init__(dataset, num_replicas, rank, shuffle=True, seed=seed, drop_last=True)
        self.start = 0

    def set_epoch(self, epoch, start=0):
        super().set_epoch(epoch)
        self.start = start

    def __iter__(self):
        generator = torch.Generator()
        # One number from two, so that epoch 1 of seed 0 is not epoch 0 of seed 1.
        generator.manual_seed(self.seed * 1_000_003 + self.epoch)
        order = torch.randperm(len(self.dataset), generator=generator).tolist()[self.start:]
        usable = len(order) // self.num_replicas * self.num_replicas
        return iter([(self.epoch, i) for i in order[self.rank:usable:self.num_replicas]])

    def __len__(self):
        return (len(self.dataset) - self.start) // self.num_replicas


class ShareSampler(Sampler):
    """This process's share of a set, every image once over all processes, nobody padded."""

    def __init__(self, dataset, num_replicas, rank):
        self.indices = range(rank, len(dataset), num_replicas)

    def __iter__(self):
        return iter(self.indices)

    def __len__(self):
        return len(self.indices)


class TrainingImages(Dataset):
    """(epoch, index) to (uint8 crop of size x size x 3, label); an ImageError is returned.

    Returned, not raised: torch would wrap it into the worker's traceback, while the trainer wants
    the file and the reason.
    """

    def __init__(self, images, size, seed):
        self.images, self.image_size, self.seed = images, size, seed

    def __len__(self):
        return len(self.images)

    def __getitem__(self, key):
        epoch, index = key
        try:
            width, height = self.images.size(index)
            crop = draw_crop(self.seed, epoch, index, width, height)
            # A JPEG far larger than needed is decoded at a fraction of its size, twice the
            # crop's need at least, so that antialiasing still has pixels to average.
            need = 2 * self.image_size
            image = open_image(self.images.paths[index], at_least=(
                min(width, -(-width * need // crop.width)),
                min(height, -(-height * need // crop.height))))
            if image.size != (width, height):
                crop = crop.scaled(image.width / width, image.height / height)
            return to_tensor(crop_image(image, crop, self.image_size)), self.images.labels[index]
        except ImageError as error:
            return error


class ValidationImages(Dataset):
    """index to (uint8 image of size x size x 3, label); an ImageError is returned."""

    def __init__(self, images, size):
        self.images, self.image_size = images, size

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        try:
            image = open_image(self.images.paths[index])
        except ImageError as error:
            return error
        return to_tensor(validation_image(image, self.image_size)), self.images.labels[index]


def collate(samples):
    """(images B x H x W x 3 uint8, labels B int64), or the first ImageError among the samples."""
    for sample in samples:
        if isinstance(sample, ImageError):
            return sample
    images, labels = zip(*samples, strict=True)
    return torch.stack(images), torch.tensor(labels)


def checked(batch):
    """The batch itself; an ImageError that a worker returned in its place is raised."""
    if isinstance(batch, ImageError):
        raise ImageError(batch.path, batch.reason)
    return batch


def send(tensor, device):
    """The tensor on ``device``, without waiting for a GPU (for that the host's copy is pinned)."""
    if device.type == "cuda" and not tensor.is_pinned():
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


class Batches:
    """``make(item)`` for each item of ``source``: batches on the device.

    On a GPU the next batch is made on a stream of its own while this one is computed on.
    """

    def __init__(self, source, make, device):
        self.source, self.make = source, make
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __len__(self):
        return len(self.source)

    def __iter__(self):
        with signals_held_back():
            items = iter(self.source)
        return map(self.make, items) if self.stream is None else self.ahead(items)

    def ahead(self, items):
        """Yield a batch; once its step has been launched, start on the next one beside it."""
        self.stream.wait_stream(torch.cuda.current_stream())  # what the batches are made from
        ready = self.started(next(items, None))
        while ready is not None:
            torch.cuda.current_stream().wait_stream(self.stream)
            for tensor in ready:
                tensor.record_stream(torch.cuda.current_stream())
            yield ready
            ready = self.started(next(items, None))

    def started(self, item):
        if item is None:
            return None
        with torch.cuda.stream(self.stream):
            return self.make(item)


class StreamingData:
    """Images decoded by loader workers in every epoch; uint8 travels, the device normalises."""

    in_memory = False

    def __init__(self, args, train, val, device):
        self.args, self.device, self.normalize = args, device, Normalizer(device)
        self.train_set = TrainingImages(train, args.image_size, args.seed)
        val_set = ValidationImages(val, args.image_size)
        self.sampler = EpochSampler(self.train_set, args.world_size, args.rank, args.seed)
        workers = choose_workers(args)
        common = {"num_workers": workers, "multiprocessing_context": worker_context(workers),
                  "persistent_workers": workers > 0, "collate_fn": collate,
                  "pin_memory": device.type == "cuda", "timeout": patience(args, workers)}
        self.train_loader = Batches(DataLoader(self.train_set, batch_sampler=BatchSampler(
            self.sampler, args.batch_size, drop_last=True), **common), self.on_device, device)
        self.val_loader = Batches(DataLoader(
            val_set, batch_size=args.batch_size,
            sampler=ShareSampler(val_set, args.world_size, args.rank), **common),
            self.on_device, device)

    def load(self, control):
        """Nothing to load: images are decoded when their turn comes."""

    def train_batches(self, epoch, start=0):
        """Batches (images, labels) of this process from the ``start``-th image of an epoch on."""
        self.sampler.set_epoch(epoch, start)
        return self.train_loader

    def val_batches(self):
        """Batches (images, labels) of this process's share of the validation images."""
        return self.val_loader

    def close(self):
        """End the loader workers; left to the interpreter's exit, they would hold it up."""
        self.train_loader = self.val_loader = None

    def example(self):
        """A batch to warm up with: real images, the first of the list."""
        keys = [(0, i % len(self.train_set)) for i in range(self.args.batch_size)]
        batch = collate([self.train_set[key] for key in keys])
        return self.on_device(batch)

    def on_device(self, batch):
        """The batch on the device; raises the ImageError that a worker met."""
        return [send(t, self.device) for t in checked(batch)]

    def prepare(self, images, labels):
        """The network's input for a batch, computed on the device."""
        return self.normalize(images), labels

    prepare_validation = prepare


def allowed_cpus():
    """Number of CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def worker_context(workers):
    """How loader workers start: forked where that is safe, so at once, also in spawned ranks.

    They never touch CUDA, which would not survive a fork.
    """
    return "fork" if workers and sys.platform == "linux" else None


def patience(args, workers):
    """Seconds to wait for a batch: a worker that cannot send it only says so, and waits itself.

    Less than a peer's patience, so that the process with the cause is the first to give up.
    """
    return 0.9 * args.timeout if workers else 0


def choose_workers(args):
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


def check_images(images, args, control, decode=False):
    """Read every file's header (or all of it); returns {path: reason} of the unreadable ones.

    Ranks share the work and all return the same. Fills in ``images.sizes``.
    """
    share = range(args.rank, len(images), args.world_size)

    def look(index):
        path = images.paths[index]
        try:
            return open_image(path).size if decode else image_size(path)
        except ImageError as error:
            return error.reason

    with ThreadPoolExecutor(max(1, allowed_cpus() // args.local_world_size)) as pool:
        found = list(progress(pool.map(look, share), "checking images", len(share)))
    sizes = [None] * len(images)
    for rank, part in enumerate(control.gather(found)):
        sizes[rank::args.world_size] = part
    images.sizes = sizes
    return {path: size for path, size in zip(images.paths, sizes, strict=True)
            if isinstance(size, str)}


def readable_images(train, val, args, control):
    """The two lists with their sizes, after a look at every file.

    Unreadable files end the run with a list of them all, or are left out with
    ``--skip-bad-images``. Raises ``ValueError``.
    """
    if not args.skip_bad_images and len(train) + len(val) > HEADER_CHECK_LIMIT:
        return train, val
    bad = {}
    for images in (train, val):
        bad |= check_images(images, args, control, decode=args.skip_bad_images)
    listing = "\n".join(f"    {path}: {reason}" for path, reason in bad.items())
    if bad and not args.skip_bad_images:
        total = len(train) + len(val)
        raise ValueError(f"{len(bad)} of {total} images cannot be read:\n{listing}\n"
                         "Repair or remove them, or leave them out with --skip-bad-images.")
    if bad:
        say(f"{len(bad)} bad images are left out (--skip-bad-images):\n{listing}")
    return (train.without(bad), val.without(bad)) if bad else (train, val)
