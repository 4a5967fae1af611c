"""A careful way to meet the other ranks: it knows who is missing, and gives up in good time."""

import contextlib
import os
import time
import uuid
from argparse import Namespace
from datetime import timedelta

import torch.distributed as dist

from ..distributed_utils import meeting_place, startup_limit
from .patience import Patience
from .torch_errors import is_port_taken, ranks_that_joined


def meet(args: Namespace) -> dist.Store:
    """Meet the other ranks, for init_distributed_mode(); returns the group's store.

    Raises ``TimeoutError`` saying how many ranks joined, within ``args.startup_timeout`` seconds,
    ``OSError`` where rank 0 cannot listen.
    """
    limit = startup_limit(args)
    try:
        store, _, _ = next(dist.rendezvous(args.dist_url, args.rank, args.world_size,
                                           timeout=timedelta(seconds=limit)))
    except (dist.DistError, RuntimeError, OSError) as error:
        raise join_error(args, limit, error) from error
    return agree_on_attempt(dist.PrefixStore("multi_train", store), args.rank, args.world_size,
                            limit)


def join_error(args: Namespace, limit: float, error: Exception) -> OSError:
    """What went wrong while meeting, as an exception for the user."""
    where, joined = meeting_place(args), ranks_that_joined(error)
    if joined is not None:
        return TimeoutError(f"only {joined} of {args.world_size} ranks joined {where} within "
                            f"{limit:g} s: start the missing ones with the same address and port")
    if is_port_taken(error):
        return OSError(f"rank {args.rank} cannot listen on {where}: the port is taken. Give "
                       "another MASTER_PORT (torchrun: --standalone, or --master_port)")
    reason = str(error).splitlines()[0][:200]
    return TimeoutError(f"rank {args.rank} of {args.world_size} could not join {where} within "
                        f"{limit:g} s: is rank 0 running there? ({reason})")


def agree_on_attempt(store: dist.Store, rank: int, world_size: int, limit: float) -> dist.Store:
    """The part of the store that belongs to this attempt alone, once all ranks have come.

    torchrun keeps its store over restarts, and what ranks of an earlier attempt left must not
    count. TORCHELASTIC_RESTART_COUNT does not tell attempts apart: of several agents only the one
    whose rank failed counts. So rank 0 draws a name, and answers each rank by the word that the
    rank has drawn for itself: what an earlier attempt asked or answered misleads nobody.
    """
    word = uuid.uuid4().hex
    if rank == 0:
        own = dist.PrefixStore(word, store)
        answer_questions(store, own, word, world_size, limit)
    else:
        store.set(f"question/{rank}", word)
        patience = Patience(limit)
        while not store.check([f"answer/{word}"]):
            if patience.over():
                raise TimeoutError(f"rank 0 of {world_size} did not come within {limit:g} s: "
                                   "start it with the same address and port")
            time.sleep(0.05)
        own = dist.PrefixStore(store.get(f"answer/{word}").decode(), store)
    wait_for_all(own, "joined", rank, world_size, limit)
    return own


def answer_questions(store: dist.Store, own: dist.Store, word: str, world_size: int,
                     limit: float) -> None:
    """Tell every other rank the attempt's name, ``word``, until each has joined under it."""
    patience = Patience(limit)
    missing = list(range(1, world_size))
    while missing:
        for peer in missing:
            # The question may be an earlier attempt's: look again until the peer has joined.
            if store.check([f"question/{peer}"]):
                store.set("answer/" + store.get(f"question/{peer}").decode(), word)
        missing = [peer for peer in missing if not own.check([f"joined/{peer}"])]
        if missing and patience.over():
            raise TimeoutError(f"{world_size - len(missing)} of {world_size} ranks joined within "
                               f"{limit:g} s; missing: rank {', '.join(map(str, missing))}")
        time.sleep(0.05)


def wait_for_all(store: dist.Store, name: str, rank: int, world_size: int, limit: float) -> None:
    """Wait on the host until every rank has come to the point ``name``.

    Unlike a barrier it has its own time limit (``limit`` seconds), keeps the GPU free, and knows
    who is missing: ``TimeoutError`` says which ranks. ``ConnectionAbortedError`` where a rank has
    noted its failure in the store under "failure".
    """
    keys = [f"{name}/{peer}" for peer in range(world_size)]
    store.set(keys[rank], "here")
    patience = Patience(limit)
    while not store.check(keys):
        if store.check(["failure"]):
            raise ConnectionAbortedError("another rank has failed")
        if patience.over():
            missing = [str(peer) for peer, key in enumerate(keys) if not store.check([key])]
            raise TimeoutError(f"{world_size - len(missing)} of {world_size} ranks came to "
                               f"'{name}' within {limit:g} s; missing: rank {', '.join(missing)}")
        time.sleep(0.05)


def host_store(wanted: int | None = None) -> dist.Store:
    """A key-value store in this process for the ranks to meet at; sets MASTER_PORT to its port.

    Listens on ``wanted``, else on MASTER_PORT, else on 12355 or, where that is taken, on a free
    port: only a port that nobody chose gives way. ``OSError`` where the port chosen is taken.
    """
    chosen = wanted if wanted is not None else os.environ.get("MASTER_PORT")
    for port in (12355, 0) if chosen is None else (int(chosen),):
        with contextlib.suppress(dist.DistNetworkError):
            store = dist.TCPStore("localhost", port, is_master=True, wait_for_workers=False)
            os.environ.update(MASTER_PORT=str(store.port), TORCHELASTIC_USE_AGENT_STORE="True")
            return store
    raise OSError(f"port {chosen} is taken: give another with --master-port, or none")
