"""The command line: what words mean, and that wrong ones are usage errors naming the flag."""

import pytest

from multi_train_utils.options import parse_args


@pytest.mark.parametrize("words", [["--syncBN", "0"], ["--syncBN", "False"], ["--syncBN", "NO"],
                                   ["--no-syncBN"], ["--syncBN", "1", "--no-syncBN"]])
def test_sync_bn_off(words):
    assert parse_args("launch", words).syncBN is False


@pytest.mark.parametrize("words", [[], ["--syncBN"], ["--syncBN", "true"], ["--syncBN", "YES"],
                                   ["--syncBN", "1"]])
def test_sync_bn_on(words):
    assert parse_args("spawn", words).syncBN is True


@pytest.mark.parametrize("flag", ["--freeze-layers", "--nesterov", "--deterministic"])
def test_flags_that_are_off_by_default(flag):
    name = flag[2:].replace("-", "_")
    for words, value in (([], False), (["False"], False), (["1"], True), (["YES"], True)):
        assert getattr(parse_args("single", [flag, *words] if words else []), name) is value
    assert getattr(parse_args("single", [flag]), name) is True


@pytest.mark.parametrize("words", [
    ["--freeze-layers", "maybe"], ["--syncBN", "2"], ["--epochs", "0"], ["--epochs", "-1"],
    ["--batch-size", "0"], ["--lr", "-1"], ["--lr", "nan"], ["--lr", "inf"], ["--lrf", "-0.1"],
    ["--image-size", "16"], ["--image-size", "100000"], ["--weight-decay", "1e300"],
    ["--label-smoothing", "1.5"], ["--workers", "x"], ["--device", "gpu"], ["--device", "cuda:0"],
    ["--amp", "half"], ["--model", "vgg"], ["--seed", "-1"], ["--seed", "4294967296"],
    ["--timeout", "0"], ["--timeout", "1e300"], ["--epoch", "3"]])
def test_wrong_usage_names_the_flag(words, capsys, monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(SystemExit) as stop:
        parse_args("launch", words)
    assert stop.value.code == 2
    assert words[0] in capsys.readouterr().err


def test_device_of_the_single_script():
    for text in ("cuda", "cpu", "auto", "cuda:1", "0"):
        assert parse_args("single", ["--device", text]).device == text
    for text in ("0,1", "gpu", "cuda:x", "cuda:"):
        with pytest.raises(SystemExit):
            parse_args("single", ["--device", text])


def test_both_spellings_and_the_launchers_argument():
    assert parse_args("launch", ["--num-classes", "3"]).num_classes == 3
    assert parse_args("launch", ["--num_classes", "3"]).num_classes == 3
    for words in (["--local-rank", "1"], ["--local_rank=1"], ["--local-rank=1"]):
        assert parse_args("launch", words).local_rank == 1
    with pytest.raises(SystemExit):
        parse_args("single", ["--local-rank", "1"])


def test_scripts_share_their_defaults():
    single, launch, spawn = (vars(parse_args(name, [])) for name in ("single", "launch", "spawn"))
    for name in single.keys() & launch.keys() & spawn.keys() - {"script", "syncBN"}:
        assert single[name] == launch[name] == spawn[name], name
    assert spawn["world_size"] == 4 and single["syncBN"] is False
