"""Train an image classifier on several GPUs of this box; starts its own processes.

    python train_multi_gpu_using_spawn.py --world-size 2 --data-path flower_photos
"""

import os

import torch.multiprocessing as mp

from multi_train_utils.distributed_utils import cleanup, init_distributed_mode
from multi_train_utils.options import Options, parse_args
from multi_train_utils.safety.ending import run
from multi_train_utils.safety.processes import run_rank, watched
from multi_train_utils.safety.rendezvous import host_store, meet
from multi_train_utils.trainer import train


def main_fun(rank: int, world_size: int, args: Options) -> None:
    """What each process runs: takes the launcher's part, then the same as the launch script."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank),
                      LOCAL_WORLD_SIZE=str(world_size))
    init_distributed_mode(args, join=meet)
    train(args)
    cleanup()


def main(args: Options) -> None:
    """Start one process per rank; the first that fails ends the others."""
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")  # where the ranks meet; MASTER_PORT follows:
    store = host_store(args.master_port)  # in this process, so that it outlives any of them
    context = mp.get_context("spawn")  # CUDA does not survive a fork
    processes = [context.Process(target=run_rank, args=(main_fun, rank, args.world_size, args))
                 for rank in range(args.world_size)]
    with watched(processes):
        for process in processes:
            process.start()
    del store


if __name__ == "__main__":
    run(main, parse_args("spawn"))
