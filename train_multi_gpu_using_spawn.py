"""Train an image classifier on several GPUs of this box; starts its own processes.

    python train_multi_gpu_using_spawn.py --world-size 2 --data-path flower_photos
"""

import os
from multiprocessing.connection import wait

import torch.multiprocessing as mp

from multi_train_utils.distributed_utils import cleanup, init_distributed_mode
from multi_train_utils.failures import SignalWatch, end_processes, host_store, run
from multi_train_utils.options import parse_args
from multi_train_utils.trainer import train


def main_fun(rank, world_size, args):
    """What each process runs: takes the launcher's part, then the same as the launch script."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank),
                      LOCAL_WORLD_SIZE=str(world_size))
    init_distributed_mode(args)
    train(args)
    cleanup()


def main(args):
    """Start the processes and watch them together: the first that fails ends the others."""
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    store = host_store(args.master_port)  # the ranks meet here, and it outlives any of them
    context = mp.get_context("spawn")
    processes = [context.Process(target=run_rank, args=(rank, args.world_size, args))
                 for rank in range(args.world_size)]
    with SignalWatch(deferred=True) as signals:
        for process in processes:
            process.start()
        alive = list(processes)
        while alive and not any(process.exitcode for process in processes):
            wait([process.sentinel for process in alive], timeout=0.2)
            signals.pass_on(processes)
            alive = [process for process in alive if process.is_alive()]
        end_processes(processes)
    del store


def run_rank(rank, world_size, args):
    """Entry of a new process: a session of its own, so that Ctrl-C reaches it once, from main."""
    if hasattr(os, "setsid"):
        os.setsid()
    run(lambda args: main_fun(rank, world_size, args), args)


if __name__ == "__main__":
    run(main, parse_args("spawn"))
