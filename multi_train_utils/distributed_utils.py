"""Make, use and leave a process group.

Needs torch alone: copy this file into a project of your own and it works there.
"""

import contextlib
import os
import re
import socket
import struct
import threading
import time
from argparse import Namespace
from collections.abc import Callable
from datetime import timedelta
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

# Peers may take minutes to come up (a queue, a slow disk), but none is silent for long in training.
STARTUP_TIMEOUT = 600.0
TIMEOUT = 180.0


def is_dist_avail_and_initialized() -> bool:
    """True where this process belongs to a process group."""
    return dist.is_available() and dist.is_initialized()


def get_world_size() -> int:
    """Number of processes in the group; 1 without a group."""
    return dist.get_world_size() if is_dist_avail_and_initialized() else 1


def get_rank() -> int:
    """This process's number in the group, 0 to world size - 1; 0 without a group."""
    return dist.get_rank() if is_dist_avail_and_initialized() else 0


def is_main_process() -> bool:
    """True in the one process that prints, logs and writes files."""
    return get_rank() == 0


def is_first_on_machine() -> bool:
    """True in the process that speaks for its machine before there is a group."""
    return os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")) == "0"


def say(text: str) -> None:
    """Print on rank 0 alone, at once also where the output is a file.

    A terminal that was closed, or a reader that has gone, does not end training.
    """
    if is_main_process():
        with contextlib.suppress(OSError):
            print(text, flush=True)


def reduce_value(value: torch.Tensor, average: bool = True) -> torch.Tensor:
    """Sum, or with ``average`` mean, of a tensor over all processes.

    Returns ``value`` itself where there is one process, else a new tensor of the same shape and
    dtype, the same in every process; ``value`` keeps what it holds. The mean of integers would be
    cut to an integer, so it is refused with ``ValueError``.
    """
    world_size = get_world_size()
    if world_size < 2:
        return value
    if average and not (value.is_floating_point() or value.is_complex()):
        raise ValueError(f"the mean of {value.dtype} values is no {value.dtype}: "
                         "convert the tensor to a floating type, or use average=False")
    with torch.no_grad():
        total = value.detach().clone()
        dist.all_reduce(total)
        return total / world_size if average else total


def init_distributed_mode(
    args: Namespace, join: Callable[[Namespace], dist.Store] | None = None
) -> None:
    """Join the process group that the launcher's environment describes.

    Reads ``args.device`` ("cuda", "cpu" or "auto") and ``args.dist_url``; ``args.local_rank``,
    ``args.timeout`` and ``args.startup_timeout`` (seconds) where they exist. Sets ``rank``,
    ``world_size``, ``local_world_size``, ``gpu`` (index, None on the CPU), ``distributed``,
    ``dist_backend``, ``device`` ("cuda" or "cpu") and ``store`` (the group's key-value store).
    Without a launcher it says so and leaves one process with no group.

    ``join(args)`` meets the other ranks and returns the group's store; by default torch's own
    rendezvous does. The training scripts hand in a more careful one (safety/rendezvous.py), which
    knows who is missing; with it a collective's time limit is that of the start, since from then
    on a thread of the trainer's keeps patience.

    Raises ``ValueError`` for an environment that is incomplete or wrong, ``OSError`` (which is
    ``EnvironmentError``) where "cuda" was asked for and there is none; torch's own errors where a
    peer never came, or those of ``join``.
    """
    place = read_environment(getattr(args, "local_rank", None))
    if place is None:
        print("Not using distributed mode. To train on several GPUs of this machine:\n"
              "    torchrun --standalone --nproc_per_node=2 train_multi_gpu_using_launch.py",
              flush=True)
        set_single_process(args)
        return
    args.rank, args.world_size, local_rank, args.local_world_size = place
    args.gpu = select_gpu(args.device, local_rank, args.local_world_size)
    args.device = "cpu" if args.gpu is None else "cuda"
    args.dist_backend = "nccl" if args.gpu is not None and dist.is_nccl_available() else "gloo"
    if args.gpu is not None:
        # Before anything touches CUDA: else every rank opens a context on GPU 0 as well.
        torch.cuda.set_device(args.gpu)
    print(f"rank {args.rank} of {args.world_size} on {socket.gethostname()} joins "
          f"{meeting_place(args)} ({args.dist_backend}, {startup_limit(args):g} s at most)",
          flush=True)
    args.store = (join or torch_rendezvous)(args)
    if args.world_size > args.local_world_size:
        set_gloo_interface(urlsplit(args.dist_url).hostname or os.environ["MASTER_ADDR"])
    patience = getattr(args, "timeout", TIMEOUT) if join is None else startup_limit(args)
    dist.init_process_group(
        backend=args.dist_backend, store=args.store, rank=args.rank, world_size=args.world_size,
        timeout=timedelta(seconds=patience),
        device_id=torch.device("cuda", args.gpu) if args.dist_backend == "nccl" else None)
    args.distributed = True
    dist.barrier()


def torch_rendezvous(args: Namespace) -> dist.Store:
    """The group's store by torch's own rendezvous, once rank 0 has been reached."""
    store, _, _ = next(dist.rendezvous(args.dist_url, args.rank, args.world_size,
                                       timeout=timedelta(seconds=startup_limit(args))))
    return dist.PrefixStore("multi_train", store)


def meeting_place(args: Namespace) -> str:
    """Where the ranks meet, as a person would say it; ``ValueError`` for an unknown kind of URL."""
    if not args.dist_url.startswith(("env://", "tcp://", "file://")):
        raise ValueError(f"--dist-url {args.dist_url}: must be env://, tcp://HOST:PORT of rank 0, "
                         "or file:///PATH in a folder that all processes share")
    if args.dist_url == "env://":
        return f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    return args.dist_url


def startup_limit(args: Namespace) -> float:
    """Seconds that all ranks together may take to come."""
    return getattr(args, "startup_timeout", STARTUP_TIMEOUT)


def set_gloo_interface(master: str) -> None:
    """Have gloo listen where the other machines can reach it, unless GLOO_SOCKET_IFNAME is set.

    gloo listens at the address of the machine's own name. Many systems map that name to 127.0.1.1
    in /etc/hosts, where no other machine comes. ``master`` is rank 0's name or address.
    """
    if "GLOO_SOCKET_IFNAME" in os.environ or not is_loopback(socket.gethostname()):
        return
    try:
        import fcntl
    except ImportError:  # Windows
        return
    # On its own machine rank 0's name may be such a one too: there, what leads to the outside.
    for target in (master, "192.0.2.1"):
        with contextlib.suppress(OSError), socket.socket(type=socket.SOCK_DGRAM) as probe:
            probe.connect((target, 9))  # sends nothing, but chooses the way
            own = probe.getsockname()[0]
            for _, name in socket.if_nameindex() if not is_loopback(own) else ():
                request = struct.pack("40s", name.encode())
                with contextlib.suppress(OSError):  # an interface without an address
                    answer = fcntl.ioctl(probe, 0x8915, request)  # SIOCGIFADDR
                    if socket.inet_ntoa(answer[20:24]) == own:
                        os.environ["GLOO_SOCKET_IFNAME"] = name
                        return
        if master == "localhost" or master.startswith("127."):
            return  # all processes are on this machine


def is_loopback(name: str) -> bool:
    """True where a host's name leads to the machine itself, or nowhere."""
    try:
        return socket.gethostbyname(name).startswith("127.")
    except OSError:
        return True


def cleanup(limit: float = 10.0) -> None:
    """Leave the process group; does nothing where there is none.

    Waits ``limit`` seconds at most for NCCL, which waits for peers and for captured graphs while
    the work is done by then; gloo leaves at once.
    """
    if not is_dist_avail_and_initialized():
        return
    if dist.get_backend() != "nccl":
        dist.destroy_process_group()
        # gloo's threads may have to let go of a tensor yet, for which they need the interpreter:
        # should it end now, they would abort the process ("terminate called without an active
        # exception"). Sleeping, this thread lets them have it.
        time.sleep(0.1)
    else:
        thread = threading.Thread(target=dist.destroy_process_group, daemon=True)
        thread.start()
        thread.join(limit)


def set_single_process(args: Namespace) -> None:
    """Fill in ``args`` for one process without a group: same fields as init_distributed_mode."""
    args.rank, args.world_size, args.local_world_size = 0, 1, 1
    args.distributed, args.dist_backend, args.store = False, None, None
    args.gpu = select_gpu(args.device, 0, 1)
    args.device = "cpu" if args.gpu is None else "cuda"
    if args.gpu is not None:
        torch.cuda.set_device(args.gpu)


def select_gpu(device: str, local_rank: int, local_world_size: int) -> int | None:
    """The index of this process's GPU, or None for the CPU.

    ``device`` is "cuda", "cpu", "auto", or for a single process "cuda:N" or "N". Raises
    ``OSError`` where there is no GPU and ``ValueError`` where there are too few.
    """
    if device == "cpu":
        return None
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        if device == "auto":
            return None
        raise OSError(f"--device {device}: CUDA is not available here, torch "
                               f"{torch.__version__} sees no GPU. Train with --device cpu, or see "
                               "check_setup.py for what is missing.")
    if device not in ("cuda", "auto"):
        index = int(device.removeprefix("cuda:"))
        if index >= count:
            raise ValueError(f"--device {device}: {count} visible GPU(s), numbered from 0. Choose "
                             "another, set CUDA_VISIBLE_DEVICES, or train with --device cpu.")
        return index
    if count == 1 and "SLURM_PROCID" in os.environ and "RANK" not in os.environ:
        return 0  # --gpus-per-task: each task sees its own GPU, and calls it 0
    if local_world_size > count:
        raise ValueError(f"{local_world_size} processes on this machine, {count} visible GPU(s): "
                         "each process needs a GPU of its own. Start fewer processes, make more "
                         "GPUs visible with CUDA_VISIBLE_DEVICES, or train with --device cpu.")
    return local_rank


def read_environment(local_rank_argument: int | None = None) -> tuple[int, int, int, int] | None:
    """(rank, world size, local rank, local world size) from the launcher, None without one.

    torchrun and torch.distributed.launch set RANK, WORLD_SIZE, LOCAL_RANK; SLURM's srun sets
    SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID. Raises ``ValueError`` naming what is missing or bad.
    """
    env = os.environ
    if "RANK" in env or "LOCAL_RANK" in env:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        if "LOCAL_RANK" not in env and local_rank_argument is not None:
            env["LOCAL_RANK"] = str(local_rank_argument)
    elif "SLURM_PROCID" in env:
        names = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
    elif "WORLD_SIZE" in env and env["WORLD_SIZE"] != "1":
        raise ValueError(f"WORLD_SIZE={env['WORLD_SIZE']} is set but RANK and LOCAL_RANK are not: "
                         "start with torchrun, or unset it to train as one process")
    else:
        return None
    rank, world_size, local_rank = (read_integer(name) for name in names)
    if rank >= world_size or world_size < 1:
        raise ValueError(f"{names[0]}={rank} does not fit {names[1]}={world_size}: "
                         "ranks are numbered from 0 to the world size - 1")
    if names[0] == "SLURM_PROCID":
        set_slurm_address()
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if name not in env:
            raise ValueError(f"{names[0]} is set but {name} is not: start with torchrun, which "
                             "sets all of them, or give the address where rank 0 listens")
    if read_integer("MASTER_PORT") > 65535:
        raise ValueError(f"MASTER_PORT={env['MASTER_PORT']}: ports are numbered 0 to 65535")
    return rank, world_size, local_rank, local_size(local_rank)


def read_integer(name: str) -> int:
    """The environment variable ``name`` as a number; ``ValueError`` if missing or bad."""
    text = os.environ.get(name)
    if text is None:
        raise ValueError(f"the launcher's environment is incomplete: {name} is not set. "
                         "Start with torchrun, which sets RANK, WORLD_SIZE and LOCAL_RANK.")
    if not text.isdecimal():
        raise ValueError(f"{name}={text!r} in the environment is not a whole number from 0 up")
    return int(text)


def local_size(local_rank: int) -> int:
    """How many processes of the job run on this machine, at least ``local_rank`` + 1."""
    for name in ("LOCAL_WORLD_SIZE", "SLURM_STEP_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE"):
        counts = re.findall(r"\d+", re.sub(r"\(x\d+\)", "", os.environ.get(name, "")))
        if counts:
            return max(local_rank + 1, *map(int, counts))
    return local_rank + 1


def set_slurm_address() -> None:
    """Set MASTER_ADDR and MASTER_PORT from the step's node list and job id, unless given."""
    nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST")
    if "MASTER_ADDR" not in os.environ and nodes:
        os.environ["MASTER_ADDR"] = first_host(nodes)
    job = os.environ.get("SLURM_JOB_ID", "")
    if "MASTER_PORT" not in os.environ and job.isdecimal():
        step = os.environ.get("SLURM_STEP_ID", "0")
        # Every task derives the same port, and two jobs or steps on one node rarely share it.
        number = int(job) * 13 + (int(step) if step.isdecimal() else 0)
        os.environ["MASTER_PORT"] = str(15000 + number % 15000)


def first_host(nodes: str) -> str:
    """First name of a SLURM node list: "gpu[003-005,9],login" gives "gpu003"."""
    match = re.match(r"([^,\[]+)(?:\[([^,\]-]+)[^\]]*\])?([^,]*)", nodes)
    assert match is not None, nodes
    return match[1] + (match[2] or "") + (match[3] if match[2] else "")
