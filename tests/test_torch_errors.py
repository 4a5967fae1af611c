"""torch's wording of what went wrong, provoked with the torch that is installed."""

import os
import signal
import socket
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils.data import DataLoader, Dataset

from multi_train_utils.safety import torch_errors


class Deadly(Dataset):
    """A set whose worker is killed, or raises, at its third image."""

    def __init__(self, how):
        self.how = how

    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index == 2 and self.how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if index == 2:
            raise ConnectionResetError("the reader's own")
        return index


@pytest.mark.parametrize("how", ["killed", "raised"])
def test_a_dead_worker_is_told_from_a_failing_set(how):
    with pytest.raises((RuntimeError, ConnectionResetError)) as caught:
        list(DataLoader(Deadly(how), num_workers=1, multiprocessing_context="fork"))
    assert torch_errors.is_lost_worker(caught.value) == (how == "killed")


def peer(rank, port, results):
    """Two gloo processes; rank 1 leaves without a word in the middle."""
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2,
                            timeout=timedelta(seconds=20))
    dist.all_reduce(torch.ones(1))
    if rank == 1:
        os._exit(0)
    try:
        while True:
            dist.all_reduce(torch.ones(1))
    except Exception as error:
        results.put(torch_errors.is_lost_peer(error) or repr(error))
        results.close()
        results.join_thread()
    os._exit(0)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.slow
def test_a_peer_that_left_is_a_lost_peer():
    context, port = mp.get_context("spawn"), free_port()
    results = context.Queue()
    ranks = [context.Process(target=peer, args=(rank, port, results)) for rank in range(2)]
    try:
        for rank in ranks:
            rank.start()
        assert results.get(timeout=60) is True
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()


@pytest.mark.parametrize("error", [RuntimeError("shape mismatch"), ValueError("Socket"), None])
def test_other_errors_are_no_lost_peer(error):
    assert not torch_errors.is_lost_peer(error)


def test_a_rendezvous_that_ran_out_of_time_says_how_many_came(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    url = f"tcp://127.0.0.1:{free_port()}"
    with pytest.raises((dist.DistError, RuntimeError)) as caught:
        next(dist.rendezvous(url, 0, 3, timeout=timedelta(seconds=1)))
    assert torch_errors.ranks_that_joined(caught.value) == 1
    assert torch_errors.ranks_that_joined(RuntimeError("anything else")) is None


def test_a_taken_port_is_told():
    with socket.create_server(("127.0.0.1", 0)) as server:
        with pytest.raises((dist.DistError, RuntimeError)) as caught:
            dist.TCPStore("127.0.0.1", server.getsockname()[1], 1, is_master=True)
    assert torch_errors.is_port_taken(caught.value)


class Malice:
    def __reduce__(self):
        return time.sleep, (0,)


def test_a_file_with_objects_in_it_is_told(tmp_path):
    torch.save({"a": Malice()}, tmp_path / "objects.pth")
    (tmp_path / "damaged.pth").write_bytes(b"no file of torch.save")
    for name, objects in (("objects.pth", True), ("damaged.pth", False)):
        with pytest.raises(Exception) as caught:
            torch.load(tmp_path / name, weights_only=True)
        assert torch_errors.holds_objects(caught.value) == objects
