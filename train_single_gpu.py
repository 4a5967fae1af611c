"""Train an image classifier in one process, on one GPU or on the CPU.

    python train_single_gpu.py --data-path flower_photos
    python train_single_gpu.py --data-path flower_photos --device cpu
"""

from multi_train_utils.distributed_utils import set_single_process
from multi_train_utils.options import Options, parse_args
from multi_train_utils.safety.ending import run
from multi_train_utils.trainer import train


def main(args: Options) -> None:
    """Train with ``args`` as parse_args gives them."""
    set_single_process(args)
    train(args)


if __name__ == "__main__":
    run(main, parse_args("single"))
