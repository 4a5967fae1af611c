"""How torch words what went wrong, in one place: it has no types of its own for these.

Each of them is provoked by tests/test_torch_errors.py with the torch that is installed.
"""

import re
import traceback

import torch.distributed as dist
from torch.utils.data import dataloader

DEAD_WORKER = re.compile(r"DataLoader worker \(pid")  # raised wherever the main thread stands
IN_WORKER = re.compile(r"in DataLoader worker process")  # raised by the dataset, over there
LOST_PEER = re.compile(r"gloo|NCCL|Connection closed|Connection reset|Broken pipe|Socket")
JOINED = re.compile(r"(\d+)/\d+ clients joined")  # of a rendezvous that ran out of time
PORT_TAKEN = re.compile(r"in use")
NOT_PLAIN = re.compile(r"Unsupported (global|class)|GLOBAL ")  # more than plain data in a file


def is_lost_worker(error: BaseException) -> bool:
    """True for the errors by which a DataLoader tells that one of its workers is gone."""
    if isinstance(error, RuntimeError):
        return DEAD_WORKER.search(str(error)) is not None
    if IN_WORKER.search(str(error)):
        return False
    # A batch is fetched from its worker, which died in the middle of it.
    return isinstance(error, (ConnectionError, EOFError)) and any(
        frame.f_code.co_filename == dataloader.__file__
        for frame, _ in traceback.walk_tb(error.__traceback__))


def is_lost_peer(error: BaseException | None) -> bool:
    """True for the errors by which a collective tells that a peer is gone or silent."""
    if isinstance(error, (dist.DistError, ConnectionAbortedError)):
        return True
    return isinstance(error, RuntimeError) and LOST_PEER.search(str(error)) is not None


def ranks_that_joined(error: BaseException) -> int | None:
    """How many ranks had come when a rendezvous ran out of time, if the error says so."""
    found = JOINED.search(str(error))
    return int(found[1]) if found else None


def is_port_taken(error: BaseException) -> bool:
    """True where a store could not listen because another process does on that port."""
    return PORT_TAKEN.search(str(error)) is not None


def holds_objects(error: BaseException) -> bool:
    """True where torch.load refused a file for the Python objects in it."""
    return NOT_PLAIN.search(str(error)) is not None
