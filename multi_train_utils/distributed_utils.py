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
import uuid
from datetime import timedelta
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

# Peers may take minutes to come up (a queue, a slow disk), but none is silent for long in training.
STARTUP_TIMEOUT = 600.0
TIMEOUT = 180.0
NCCL_GRACE = 30.0


def is_dist_avail_and_initialized():
    """True where this process belongs to a process group."""
    return dist.is_available() and dist.is_initialized()


def get_world_size():
    """Number of processes in the group; 1 without a group."""
    return dist.get_world_size() if is_dist_avail_and_initialized() else 1


def get_rank():
    """This process's number in the group, 0 to world size - 1; 0 without a group."""
    return dist.get_rank() if is_dist_avail_and_initialized() else 0


def is_main_process():
    """True in the one process that prints, logs and writes files."""
    return get_rank() == 0


def is_first_on_machine():
    """True in the process that speaks for its machine before there is a group."""
    return os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")) == "0"


def say(text):
    """Print on rank 0 alone, at once also where the output is a file.

    A terminal that was closed, or a reader that has gone, does not end training.
    """
    if is_main_process():
        with contextlib.suppress(OSError):
            print(text, flush=True)


def reduce_value(value, average=True):
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


def init_distributed_mode(args):
    """Join the process group that the launcher's environment describes.

    Reads ``args.device`` ("cuda", "cpu" or "auto") and ``args.dist_url``; ``args.local_rank``,
    ``args.timeout`` and ``args.startup_timeout`` (seconds) where they exist. Sets ``rank``,
    ``world_size``, ``local_world_size``, ``gpu`` (index, None on the CPU), ``distributed``,
    ``dist_backend``, ``device`` ("cuda" or "cpu") and ``store`` (the group's key-value store).
    Without a launcher it says so and leaves one process with no group.

    Raises ``ValueError`` for an environment that is incomplete or wrong, ``OSError`` (which is
    ``EnvironmentError``) where "cuda" was asked for and there is none, ``TimeoutError`` where a
    peer never came.
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
    args.store = join_store(args)
    if args.world_size > args.local_world_size:
        set_gloo_interface(urlsplit(args.dist_url).hostname or os.environ["MASTER_ADDR"])
    # NCCL's watchdog aborts the process without a word that a person understands: it comes last.
    grace = NCCL_GRACE if args.dist_backend == "nccl" else 0.0
    dist.init_process_group(
        backend=args.dist_backend, store=args.store, rank=args.rank, world_size=args.world_size,
        timeout=timedelta(seconds=getattr(args, "timeout", TIMEOUT) + grace),
        device_id=torch.device("cuda", args.gpu) if args.dist_backend == "nccl" else None)
    args.distributed = True
    dist.barrier()


def set_gloo_interface(master):
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


def is_loopback(name):
    """True where a host's name leads to the machine itself, or nowhere."""
    try:
        return socket.gethostbyname(name).startswith("127.")
    except OSError:
        return True


def cleanup(limit=10.0):
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


def set_single_process(args):
    """Fill in ``args`` for one process without a group: same fields as init_distributed_mode."""
    args.rank, args.world_size, args.local_world_size = 0, 1, 1
    args.distributed, args.dist_backend, args.store = False, None, None
    args.gpu = select_gpu(args.device, 0, 1)
    args.device = "cpu" if args.gpu is None else "cuda"
    if args.gpu is not None:
        torch.cuda.set_device(args.gpu)


def select_gpu(device, local_rank, local_world_size):
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


def read_environment(local_rank_argument=None):
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


def read_integer(name):
    """The environment variable ``name`` as a number; ``ValueError`` if missing or bad."""
    text = os.environ.get(name)
    if text is None:
        raise ValueError(f"the launcher's environment is incomplete: {name} is not set. "
                         "Start with torchrun, which sets RANK, WORLD_SIZE and LOCAL_RANK.")
    if not text.isdecimal():
        raise ValueError(f"{name}={text!r} in the environment is not a whole number from 0 up")
    return int(text)


def local_size(local_rank):
    """How many processes of the job run on this machine, at least ``local_rank`` + 1."""
    for name in ("LOCAL_WORLD_SIZE", "SLURM_STEP_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE"):
        counts = re.findall(r"\d+", re.sub(r"\(x\d+\)", "", os.environ.get(name, "")))
        if counts:
            return max(local_rank + 1, *map(int, counts))
    return local_rank + 1


def set_slurm_address():
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


def first_host(nodes):
    """First name of a SLURM node list: "gpu[003-005,9],login" gives "gpu003"."""
    match = re.match(r"([^,\[]+)(?:\[([^,\]-]+)[^\]]*\])?([^,]*)", nodes)
    return match[1] + (match[2] or "") + (match[3] if match[2] else "")


def join_store(args):
    """Meet the other ranks at the group's store; returns it once all have come.

    Raises ``TimeoutError`` saying how many ranks joined, within ``args.startup_timeout`` seconds,
    ``ValueError`` for an address of no known kind.
    """
    limit = getattr(args, "startup_timeout", STARTUP_TIMEOUT)
    where = args.dist_url
    if not where.startswith(("env://", "tcp://", "file://")):
        raise ValueError(f"--dist-url {where}: must be env://, tcp://HOST:PORT of rank 0, or "
                         "file:///PATH in a folder that all processes share")
    if where == "env://":
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    print(f"rank {args.rank} of {args.world_size} on {socket.gethostname()} joins {where} "
          f"({args.dist_backend}, {limit:g} s at most)", flush=True)
    try:
        store, _, _ = next(dist.rendezvous(args.dist_url, args.rank, args.world_size,
                                           timeout=timedelta(seconds=limit)))
    except (dist.DistError, RuntimeError, OSError) as error:
        raise join_error(args, where, limit, error) from error
    return agree_on_attempt(dist.PrefixStore("multi_train", store), args.rank, args.world_size,
                            limit)


def agree_on_attempt(store, rank, world_size, limit):
    """The part of the store that belongs to this attempt alone, once all ranks have come.

    torchrun keeps its store over restarts, and what ranks of an earlier attempt left must not
    count. TORCHELASTIC_RESTART_COUNT does not tell attempts apart: of several agents only the one
    whose rank failed counts. So rank 0 draws a name, and answers each rank by the word that the
    rank has drawn for itself: what an earlier attempt asked or answered misleads nobody.
    """
    word = uuid.uuid4().hex
    end = time.monotonic() + limit
    if rank == 0:
        own = dist.PrefixStore(word, store)
        answer_questions(store, own, word, world_size, limit)
    else:
        store.set(f"question/{rank}", word)
        while not store.check([f"answer/{word}"]):
            if time.monotonic() > end:
                raise TimeoutError(f"rank 0 of {world_size} did not come within {limit:g} s: "
                                   "start it with the same address and port")
            time.sleep(0.05)
        own = dist.PrefixStore(store.get(f"answer/{word}").decode(), store)
    wait_for_all(own, "joined", rank, world_size, limit)
    return own


def answer_questions(store, own, word, world_size, limit):
    """Tell every other rank the attempt's name, ``word``, until each has joined under it."""
    end = time.monotonic() + limit
    missing = list(range(1, world_size))
    while missing:
        for peer in missing:
            # The question may be an earlier attempt's: look again until the peer has joined.
            if store.check([f"question/{peer}"]):
                store.set("answer/" + store.get(f"question/{peer}").decode(), word)
        missing = [peer for peer in missing if not own.check([f"joined/{peer}"])]
        if missing and time.monotonic() > end:
            raise TimeoutError(f"{world_size - len(missing)} of {world_size} ranks joined within "
                               f"{limit:g} s; missing: rank {', '.join(map(str, missing))}")
        time.sleep(0.05)


def join_error(args, where, limit, error):
    """What went wrong while meeting at ``where``, as an exception for the user."""
    text = str(error)
    joined = re.search(r"(\d+)/\d+ clients joined", text)
    if joined:
        return TimeoutError(f"only {joined[1]} of {args.world_size} ranks joined {where} within "
                            f"{limit:g} s: start the missing ones with the same address and port")
    if "in use" in text:
        return OSError(f"rank {args.rank} cannot listen on {where}: the port is taken. Give "
                       "another MASTER_PORT (torchrun: --standalone, or --master_port)")
    return TimeoutError(f"rank {args.rank} of {args.world_size} could not join {where} within "
                        f"{limit:g} s: is rank 0 running there? ({text.splitlines()[0][:200]})")


def wait_for_all(store, name, rank, world_size, limit):
    """Wait on the host until every rank has come to the point ``name``.

    Unlike a barrier it has its own time limit (``limit`` seconds), keeps the GPU free, and knows
    who is missing: ``TimeoutError`` says which ranks. ``ConnectionAbortedError`` where a rank has
    noted its failure in the store under "failure".
    """
    keys = [f"{name}/{peer}" for peer in range(world_size)]
    store.set(keys[rank], "here")
    end = time.monotonic() + limit
    while not store.check(keys):
        if store.check(["failure"]):
            raise ConnectionAbortedError("another rank has failed")
        if time.monotonic() > end:
            missing = [str(peer) for peer, key in enumerate(keys) if not store.check([key])]
            raise TimeoutError(f"{world_size - len(missing)} of {world_size} ranks came to "
                               f"'{name}' within {limit:g} s; missing: rank {', '.join(missing)}")
        time.sleep(0.05)
