"""Lets the tests for two GPUs run on one: every rank takes GPU 0. For function, not for figures.

    PYTHONPATH=$PWD/tests/two_ranks_on_one_gpu python -m pytest -m multigpu \\
        --deselect tests/test_multigpu.py::test_each_process_stands_on_one_gpu

NCCL refuses two ranks on one GPU of one machine: it is told that they are on two machines, and
goes by sockets. Every Python process of such a test reads this file first.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch  # noqa: E402

from multi_train_utils import distributed_utils  # noqa: E402

if torch.cuda.is_available():
    select_gpu = distributed_utils.select_gpu

    def first_gpu(device, local_rank, local_world_size):
        if local_world_size > 1:
            os.environ["NCCL_HOSTID"] = f"machine-{local_rank}"
            local_world_size = 1
        return select_gpu(device, 0, local_world_size)

    distributed_utils.select_gpu = first_gpu
    os.environ["GPUS_FOR_TESTS"] = "2"
