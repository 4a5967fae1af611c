"""Weight files are read with suspicion and written whole or not at all."""

import argparse
import ast
import os
import random
import resource
import time
from pathlib import Path

import pytest
import torch
import torchvision

from model import resnet18
from multi_train_utils.records import saver as saver_module
from multi_train_utils.records.saver import Saver, save
from multi_train_utils.records.weights import load_weights, read_torch_file, read_weights
from multi_train_utils.safety.agreement import fingerprint
from utils import written_whole

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def state():
    torch.manual_seed(0)
    return torchvision.models.resnet18(weights=None, num_classes=2).state_dict()


def put(path, content):
    torch.save(content, path)
    return str(path)


@pytest.mark.parametrize("wrap", [
    lambda s: s,
    lambda s: {"module." + name: value for name, value in s.items()},
    lambda s: {"model": s, "epoch": 3, "lr": 0.1},
    lambda s: {"state_dict": {"module." + name: value for name, value in s.items()}, "epoch": 3},
    lambda s: {"model": s, "args": argparse.Namespace(lr=0.1)}])
def test_prefixes_and_wrappers(state, tmp_path, wrap):
    path = put(tmp_path / "weights.pth", wrap(state))
    model = resnet18(num_classes=2)
    lines = load_weights(model, path)
    assert lines[0].endswith("122 of 122 tensors loaded") and len(lines) == 1
    assert torch.equal(model.state_dict()["conv1.weight"], state["conv1.weight"])


def test_a_head_of_another_size_is_left_out_with_both_shapes(state, tmp_path):
    wide = state | {"fc.weight": torch.zeros(1000, 512), "fc.bias": torch.zeros(1000)}
    turned = state | {"fc.weight": torch.zeros(512, 2)}  # as many numbers, another shape
    for content, left_out in ((wide, 2), (turned, 1)):
        model = resnet18(num_classes=2)
        before = model.fc.weight.clone()
        lines = load_weights(model, put(tmp_path / "weights.pth", content))
        assert f"{122 - left_out} of 122" in lines[0] and len(lines) == 1 + left_out
        assert "fc.weight" in lines[1] and "(2, 512)" in lines[1]
        assert str(tuple(content["fc.weight"].shape)) in lines[1]
        assert torch.equal(model.fc.weight, before)


def test_weights_of_another_network_are_refused(tmp_path):
    path = put(tmp_path / "other.pth", {"conv1.weight": torch.zeros(16, 3, 3, 3)})
    with pytest.raises(ValueError, match="other.pth.*another network"):
        load_weights(resnet18(num_classes=2), path)


def test_foreign_checkpoint(shared_data):
    path = next((shared_data / "foreign_ckpt").glob("*.th"))
    assert not any(name.startswith("module.") for name in read_weights(path))
    with pytest.raises(ValueError, match="another network"):
        load_weights(resnet18(num_classes=2), path)


@pytest.mark.parametrize("place", ["cuda:1", "cuda:0"])
def test_a_file_saved_from_a_gpu_opens_where_there_is_none(state, tmp_path, monkeypatch, place):
    with monkeypatch.context() as patch:  # as torch notes it for a tensor that lies there
        patch.setattr(torch.serialization, "location_tag", lambda storage: place)
        path = put(tmp_path / "gpu.pth", state)
    assert place.encode() in (tmp_path / "gpu.pth").read_bytes()
    read = read_weights(path)
    assert {value.device.type for value in read.values()} == {"cpu"}
    assert torch.equal(read["conv1.weight"], state["conv1.weight"])


def test_no_file_is_loaded_without_weights_only():
    """Said in every call: before torch 2.6 the default was to run what a file contains."""
    calls = 0
    for path in [*ROOT.glob("*.py"), *(ROOT / "multi_train_utils").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                given = {word.arg: ast.unparse(word.value) for word in node.keywords}
                assert given.get("weights_only") == "True", f"{path}, line {node.lineno}"
                calls += 1
    assert calls > 1


class Malice:
    """Pickles into a call: what weights_only=True must not execute."""

    def __reduce__(self):
        return os.mkdir, ("code_ran",)


def test_code_in_a_file_does_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = put(tmp_path / "bad.pth", {"conv1.weight": Malice()})
    with pytest.raises(ValueError, match="bad.pth.*Save its state dict alone"):
        read_torch_file(path)
    assert not (tmp_path / "code_ran").exists()


@pytest.mark.parametrize("content", [b"", b"not a weight file", b"PK\x03\x04 cut", [1, 2, 3]])
def test_files_that_hold_no_weights(content, tmp_path):
    path = tmp_path / "bad.pth"
    path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
    with pytest.raises(ValueError, match="bad.pth"):
        read_weights(path)
    with pytest.raises(FileNotFoundError, match="missing.pth"):
        read_weights(tmp_path / "missing.pth")


def test_damaged_files_are_refused_or_used_and_nothing_else(tmp_path):
    """Bits flipped, parts cut, headers changed: 300 files, seeded."""
    small = {f"layer{i}.weight": torch.randn(8, 8) for i in range(4)}
    whole = (tmp_path / "whole.pth")
    torch.save({"model": small, "epoch": 1}, whole)
    data, rng = whole.read_bytes(), random.Random(0)
    path, refused = tmp_path / "damaged.pth", 0
    for _ in range(300):
        broken = bytearray(data)
        for _ in range(rng.choice((1, 4, 64))):
            broken[rng.randrange(len(broken))] ^= 1 << rng.randrange(8)
        if rng.random() < 0.3:
            del broken[rng.randrange(len(broken)):]
        path.write_bytes(broken)
        try:
            read_weights(path)
        except ValueError as error:
            assert "damaged.pth" in str(error)
            refused += 1
    assert refused > 50
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 2 * 2**20  # KiB


def test_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "file.pth"
    save({"a": torch.ones(2)}, path)
    with pytest.raises(OSError, match="file.pth"):
        with written_whole(path) as temporary:
            temporary.write_bytes(b"half")
            raise OSError(28, "No space left on device")
    assert torch.equal(read_torch_file(path)["a"], torch.ones(2))
    assert [p.name for p in tmp_path.iterdir()] == ["file.pth"]


def test_saver_keeps_the_last_n_and_links_the_best(tmp_path):
    saver = Saver(tmp_path / "weights", keep=2)
    for epoch, best in enumerate((True, False, True, False)):
        saver.save_epoch(epoch, {"model": {"w": torch.tensor([epoch])}, "epoch": epoch + 1}, best)
    saver.wait()
    names = sorted(p.name for p in (tmp_path / "weights").iterdir())
    assert names == ["best.pth", "checkpoint.pth", "model-2.pth", "model-3.pth"]
    assert os.path.samefile(tmp_path / "weights/best.pth", tmp_path / "weights/model-2.pth")
    assert read_torch_file(tmp_path / "weights/checkpoint.pth")["epoch"] == 4


def test_a_slow_disk_skips_no_two_checkpoints_in_a_row(tmp_path, monkeypatch):
    written = []

    def slow(content, path):
        time.sleep(0.02)  # the next epochs are always there before this one is written
        written.append((path.name, content.get("epoch")))

    monkeypatch.setattr(saver_module, "save", slow)
    saver = Saver(tmp_path / "weights")
    for epoch in range(9):
        saver.save_epoch(epoch, {"model": {}, "epoch": epoch}, False)
    saver.wait()
    found = [-1, *(epoch for name, epoch in written if name == "checkpoint.pth")]
    assert max(b - a for a, b in zip(found, found[1:], strict=False)) == 2
    assert found[-1] == 8
    assert len(written) - len(found) + 1 == 9


def test_a_failed_write_reaches_the_training_thread(tmp_path):
    saver = Saver(tmp_path / "weights")
    (tmp_path / "weights" / "model-0.pth").mkdir()  # the name is taken by a folder
    saver.save_epoch(0, {"model": {}}, False)
    with pytest.raises(OSError, match="model-0.pth.*--output-dir"):
        saver.wait()


def test_fingerprint_tells_single_bits_apart(state):
    other = {name: value.clone() for name, value in state.items()}
    assert fingerprint(state) == fingerprint(other)
    bits = other["layer1.0.conv1.weight"].view(-1).view(torch.int32)
    bits[7] ^= 1
    assert fingerprint(state) != fingerprint(other)
    swapped = dict(state)
    swapped["fc.weight"] = state["fc.weight"].flip(0)
    assert fingerprint(state) != fingerprint(swapped)
