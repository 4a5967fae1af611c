"""What the benchmarks compute from what they measure."""

import sys

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

from profile_step import breakdown, covered  # noqa: E402


def test_overlapping_spans_count_once():
    assert covered([(0, 4), (1, 2), (3, 6), (8, 9)]) == 7
    assert covered([]) == 0


def test_a_step_is_split_into_computing_collectives_and_nothing():
    """Two steps of 10 microseconds each, times in microseconds."""
    step = [("cudnn_conv_kernel", 0, 4), ("ncclDevKernel_AllGather_RING", 2, 5),
            ("batch_norm_kernel", 5, 6), ("ncclDevKernel_AllReduce_Sum", 6, 7),
            ("ncclDevKernel_AllReduce_Sum", 7, 9.5), ("multi_tensor_apply_kernel", 8, 10)]
    kernels = [(name, start + shift, end + shift) for shift in (0, 11) for name, start, end in step]
    found = {what.strip(): time * 1000 for what, time in breakdown(kernels, steps=2)}
    assert found == pytest.approx({
        "step": 10.5, "computing": 7, "BatchNorm": 1, "convolutions, matrix products": 4,
        "max-pool": 0, "SGD": 2, "everything else": 0,
        "collectives, beside computation or not": 6.5,
        "SyncBatchNorm: gathering statistics": 3,
        "SyncBatchNorm: reducing their gradients": 1, "gradients (1 all-reduces)": 2.5,
        "nothing but collectives": 3, "idle": 0.5})
