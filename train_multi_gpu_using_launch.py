"""Train an image classifier on all GPUs of one box or of several, started by a launcher.

    torchrun --standalone --nproc_per_node=2 train_multi_gpu_using_launch.py
    srun --ntasks=2 python train_multi_gpu_using_launch.py
"""

from multi_train_utils.distributed_utils import cleanup, init_distributed_mode
from multi_train_utils.options import Options, parse_args
from multi_train_utils.safety.ending import run
from multi_train_utils.safety.rendezvous import meet
from multi_train_utils.trainer import train


def main(args: Options) -> None:
    """Train with ``args`` as parse_args gives them; each process of the launcher calls this.

    ``meet`` joins as torch's own rendezvous would, and knows who is missing. After a failure
    ``run`` ends the process at once: leaving the group in good order would wait for peers that
    never come.
    """
    init_distributed_mode(args, join=meet)
    train(args)
    cleanup()


if __name__ == "__main__":
    run(main, parse_args("launch"))
