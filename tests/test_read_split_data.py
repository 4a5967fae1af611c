"""Listing and splitting a folder of classes, and what is said about folders that are none."""

import hashlib
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import utils
from utils import check_class_count, class_names, plot_data_loader_image, read_split_data

ROOT = Path(__file__).parents[1]
FLOWERS = ROOT / ".." / "shared" / "data" / "flower_photos_256"
CHINESE = "\u90c1\u91d1\u9999"  # "tulip"


def make(root, **classes):
    """Empty files: `blue=3` makes 3 images, `blue=["a.jpg", "x/"]` those entries."""
    for name, content in classes.items():
        (root / name).mkdir(parents=True, exist_ok=True)
        names = [f"{i:03}.jpg" for i in range(content)] if isinstance(content, int) else content
        for entry in names:
            path = root / name / entry
            path.mkdir(parents=True) if entry.endswith("/") else path.touch()
    return root


def counts(result):
    train, val, num_classes = result
    return len(train[0]), len(val[0]), num_classes


# -------------------------------------------------------------------------------- the split


@pytest.mark.skipif(not FLOWERS.is_dir(), reason="no flower photos here")
def test_the_published_split_of_the_flowers(tmp_path):
    train, val, num_classes = read_split_data(str(FLOWERS), class_indices=tmp_path / "names.json")
    assert (len(train[0]), len(val[0]), num_classes) == (2939, 731, 5)
    assert [val[1].count(label) for label in range(5)] == [126, 179, 128, 139, 159]
    for (paths, _), digest in [
        (val, "3b2f89194b41595d7dc78f4b8bb305a9171d9d5ba179042173e5a90b8a58120a"),
        (train, "887696ba5fd853b50192695533554be197c78a669c08fb42c427c85a5f55b8e4"),
    ]:
        relative = "\n".join(path[len(str(FLOWERS)) + 1 :] for path in paths)
        assert hashlib.sha256(relative.encode()).hexdigest() == digest


def test_paths_labels_and_order(tmp_path):
    root = str(make(tmp_path, red=10, blue=20))
    train, val, num_classes = read_split_data(root, class_indices=None, quiet=True)
    assert (len(train[0]), len(val[0]), num_classes) == (24, 6, 2)
    for paths, labels in (train, val):
        assert paths == sorted(paths)
        assert labels == [0 if "blue" in path else 1 for path in paths]
    everything = [os.path.join(root, "blue", f"{i:03}.jpg") for i in range(20)]
    everything += [os.path.join(root, "red", f"{i:03}.jpg") for i in range(10)]
    assert sorted(train[0] + val[0]) == everything
    assert [sum(f"{os.sep}{name}{os.sep}" in path for path in val[0]) for name in ("blue", "red")] \
        == [4, 2]


def test_one_generator_draws_class_after_class(tmp_path):
    make(tmp_path, a=15, b=10)
    _, val, _ = read_split_data(tmp_path, class_indices=None, quiet=True)
    generator = random.Random(0)
    drawn = [
        sorted(generator.sample([f"{i:03}.jpg" for i in range(n)], n // 5)) for n in (15, 10)
    ]
    assert [os.path.basename(path) for path in val[0]] == drawn[0] + drawn[1]


def test_classes_in_code_point_order(tmp_path):
    make(tmp_path, **{name: 5 for name in ("a", "9", "B", "10", "2")})
    assert class_names(tmp_path) == ["10", "2", "9", "B", "a"]
    train, _, _ = read_split_data(tmp_path, class_indices=tmp_path / "c.json", quiet=True)
    assert train[1] == sorted(train[1])
    names = json.loads((tmp_path / "c.json").read_text(encoding="utf-8"))
    assert names == {"0": "10", "1": "2", "2": "9", "3": "B", "4": "a"}


def test_the_listing_order_of_the_file_system_does_not_matter(tmp_path, monkeypatch):
    make(tmp_path, **{name: 12 for name in "edcba"})
    before = read_split_data(tmp_path, class_indices=None, quiet=True)
    listed, listdir, scandir, walk = [], os.listdir, os.scandir, os.walk

    def backwards(found, key=None):
        listed.append(sorted(found, key=key, reverse=True))
        return listed[-1]

    monkeypatch.setattr(os, "listdir", lambda *a: backwards(listdir(*a)))
    monkeypatch.setattr(os, "walk", lambda *a, **k: iter(
        [(top, backwards(folders), backwards(files)) for top, folders, files in walk(*a, **k)]))
    monkeypatch.setattr(os, "scandir", lambda *a: iter(
        backwards(scandir(*a), key=lambda entry: entry.name)))
    assert read_split_data(tmp_path, class_indices=None, quiet=True) == before
    assert [len(names) for names in listed].count(12) == 5  # each class came backwards


def test_no_global_random_state_is_read_or_touched(tmp_path):
    make(tmp_path, red=50, blue=50)
    results, states = [], []
    for seed in (1, 2):
        random.seed(seed)
        torch.manual_seed(seed)
        states.append((random.getstate(), torch.get_rng_state()))
        results.append(read_split_data(tmp_path, class_indices=None, quiet=True))
        assert random.getstate() == states[-1][0]
        assert torch.equal(torch.get_rng_state(), states[-1][1])
    assert results[0] == results[1]


@pytest.mark.parametrize(("val_rate", "expected"), [(0.5, (12, 12, 2)), (0.34, (16, 8, 2))])
def test_the_share_is_rounded_down_per_class(tmp_path, val_rate, expected):
    make(tmp_path, red=12, blue=12)
    assert counts(read_split_data(tmp_path, val_rate, None, quiet=True)) == expected


@pytest.mark.parametrize("val_rate", [-0.1, 1, 1.5, float("nan")])
def test_a_share_that_is_none_is_refused(tmp_path, val_rate):
    make(tmp_path, red=12, blue=12)
    with pytest.raises(ValueError, match="val_rate"):
        read_split_data(tmp_path, val_rate, None)


# ----------------------------------------------------------------------------- what is listed


def test_endings_in_any_case_and_a_line_about_the_others(tmp_path, capsys):
    make(
        tmp_path,
        blue=10,
        red=["a.jpg", "b.JPG", "c.jpeg", "d.JPEG", "e.Jpg", "f.png", "g.Png", "h.bmp", "i.webp"]
        + ["j.tif", "k.TIFF", "notes.txt", "more.TXT", "Thumbs.db", "README"],
    )
    assert counts(read_split_data(tmp_path, class_indices=None)) == (17, 4, 2)
    assert capsys.readouterr().out.splitlines() == [
        "21 images were found in the dataset.",
        "17 images for training.",
        "4 images for validation.",
        "Warning: class red: left out 1 file without an ending, 1 .db file, 2 .txt files.",
    ]


def test_a_set_of_one_unusual_ending(tmp_path, capsys):
    for name in ("blue", "red"):
        make(tmp_path, **{name: [f"{i}.jpeg" for i in range(10)]})
    assert counts(read_split_data(tmp_path, class_indices=None)) == (16, 4, 2)
    assert "Warning" not in capsys.readouterr().out


def test_hidden_files_and_folders_do_not_count(tmp_path):
    root = tmp_path / "data"
    make(root, blue=10, red=10, **{".ipynb_checkpoints": 5})
    make(root, red=[".DS_Store", "._000.jpg", ".ipynb_checkpoints/", "Thumbs.db"])
    (root / "LICENSE.txt").touch()
    (root / ".cover.jpg").touch()
    result = read_split_data(root, class_indices=tmp_path / "c.json", quiet=True)
    assert counts(result) == (16, 4, 2)
    names = json.loads((tmp_path / "c.json").read_text(encoding="utf-8"))
    assert names == {"0": "blue", "1": "red"}


def test_links_are_followed_and_dangling_ones_counted(tmp_path, capsys):
    root = make(tmp_path / "data", blue=10)
    make(tmp_path / "far", red=10)
    try:
        (root / "red").symlink_to(tmp_path / "far" / "red")
        (root / "gone_class").symlink_to(tmp_path / "nowhere")
        (root / "blue" / "gone.jpg").symlink_to(tmp_path / "nowhere.jpg")
        (root / "blue" / "round.jpg").symlink_to("round.jpg")
        (root / "blue" / "loop").symlink_to("..")
    except OSError:
        pytest.skip("no symbolic links here")
    train, val, num_classes = read_split_data(root, class_indices=None)
    assert (len(train[0]), len(val[0]), num_classes) == (16, 4, 2)
    assert not any("gone" in path or "round" in path for path in train[0] + val[0])
    output = capsys.readouterr().out
    assert "Warning: 3 dangling links left out" in output
    assert "gone_class" in output and os.path.join("blue", "gone.jpg") in output
    assert "class blue: sub-folders are not searched (loop)" in output


def test_a_class_without_a_validation_image_is_a_warning(tmp_path, capsys):
    make(tmp_path, big=20, small=3)
    assert counts(read_split_data(tmp_path, class_indices=None)) == (19, 4, 2)
    warnings = [line for line in capsys.readouterr().out.splitlines() if "Warning" in line]
    assert len(warnings) == 1
    assert "small has 3 images" in warnings[0] and "5 are needed" in warnings[0]


def test_quiet_prints_nothing(tmp_path, capsys):
    make(tmp_path, big=20, small=["0.jpg", "x.txt"])
    read_split_data(tmp_path, class_indices=None, quiet=True)
    assert capsys.readouterr() == ("", "")


# -------------------------------------------------------------------------------------- errors


def refused(root, error=ValueError):
    with pytest.raises(error) as caught:
        read_split_data(root, class_indices=None)
    message = str(caught.value)
    assert str(root) in message and "\n" not in message
    return message


def test_root_missing_or_a_file(tmp_path):
    (tmp_path / "file").touch()
    assert "does not exist" in refused(tmp_path / "missing", FileNotFoundError)
    assert "not a folder" in refused(tmp_path / "file", NotADirectoryError)


def test_root_empty(tmp_path):
    make(tmp_path, **{".hidden": 5})
    (tmp_path / "readme.txt").touch()
    assert "empty" in refused(tmp_path)


def test_images_right_in_the_root(tmp_path):
    for i in range(12):
        (tmp_path / f"{i:02}.jpg").touch()
    message = refused(tmp_path)
    assert "12 images" in message and "00.jpg" in message and "sub-folder per class" in message


@pytest.mark.parametrize(
    "parts", [("train", "val"), ("Train", "Test"), ("training", "validation", "extra"), ("train",)]
)
def test_train_and_val_in_place_of_classes(tmp_path, parts):
    for part in parts:
        make(tmp_path / part, red=10, blue=10)
    message = refused(tmp_path)
    assert all(part in message for part in parts) and "in place of classes" in message


def test_class_folders_without_images(tmp_path):
    make(tmp_path, blue=10, red=10, green_empty=["movie.mp4"])
    message = refused(tmp_path)
    assert "class green_empty has 0 images" in message and "1 .mp4 file" in message
    assert "sub-folders (" not in message
    make(tmp_path, deep=["day/", "night/"])
    assert "class deep has 0 images but sub-folders (day, night)" in refused(tmp_path)


def test_many_empty_classes_make_a_short_message(tmp_path):
    make(tmp_path, **{f"class_{i}": 0 for i in range(100)})
    message = refused(tmp_path)
    assert "95 more" in message and len(message) < 1000


def test_a_single_class(tmp_path):
    make(tmp_path, only=10)
    message = refused(tmp_path)
    assert "only one class (only)" in message


def test_no_validation_image_at_all(tmp_path):
    make(tmp_path, c0=4, c1=4, c2=4)
    message = refused(tmp_path)
    assert "12 images" in message and "0 for validation" in message and "5 images" in message


def test_no_file_is_written_for_a_folder_that_is_refused(tmp_path):
    make(tmp_path / "data", only=10)
    with pytest.raises(ValueError):
        read_split_data(tmp_path / "data", class_indices=tmp_path / "names.json")
    assert not (tmp_path / "names.json").exists()


def test_class_count():
    assert check_class_count(None, ["blue", "red"]) == 2
    assert check_class_count(2, ["blue", "red"]) == 2
    with pytest.raises(ValueError) as caught:
        check_class_count(5, ["blue", "red"])
    message = str(caught.value)
    assert "--num_classes is 5" in message and "2 class folders: blue, red" in message


# --------------------------------------------------------------------- names and the json file


def test_the_class_file_is_indented_utf8_and_lies_in_the_working_folder(tmp_path, monkeypatch):
    make(tmp_path / "data", **{CHINESE: 10, "two words (1)": 10})
    monkeypatch.chdir(tmp_path)
    read_split_data("data", quiet=True)
    text = (tmp_path / "class_indices.json").read_bytes().decode("utf-8")
    assert text == f'{{\n    "0": "two words (1)",\n    "1": "{CHINESE}"\n}}'
    assert sorted(os.listdir(tmp_path)) == ["class_indices.json", "data"]


def test_no_class_file_when_none_is_asked_for(tmp_path, monkeypatch):
    make(tmp_path / "data", red=10, blue=10)
    monkeypatch.chdir(tmp_path)
    read_split_data("data", class_indices=None, quiet=True)
    assert os.listdir(tmp_path) == ["data"]


def test_a_name_that_is_not_utf8_loads_back(tmp_path):
    name = "zz_\udce9"
    try:
        make(tmp_path / "data", red=10, **{name: 10})
    except OSError:
        pytest.skip("this file system refuses such a name")
    read_split_data(tmp_path / "data", class_indices=tmp_path / "c.json", quiet=True)
    names = json.loads((tmp_path / "c.json").read_bytes().decode("utf-8"))
    assert names == {"0": "red", "1": name}
    with pytest.raises(ValueError) as caught:
        check_class_count(3, [name, "red"])
    str(caught.value).encode("utf-8")


def test_names_are_printed_whatever_the_terminals_encoding(tmp_path):
    make(tmp_path, big=10, **{CHINESE: ["1.jpg", "x.txt"]})
    try:
        make(tmp_path, **{"zz_\udce9": 1})
    except OSError:
        pass  # this file system refuses such a name
    script = "import sys, utils; utils.read_split_data(sys.argv[1], class_indices=None)"
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "\\u90c1\\u91d1\\u9999 has 1 image, none" in done.stdout


def test_names_are_utf8_also_where_python_takes_them_for_ascii(tmp_path):
    make(tmp_path / "data", red=10, **{CHINESE: 10, "zz\u00e9": ["1.jpg"]})
    script = ("import sys, utils; names = utils.class_names(sys.argv[1]); print(ascii(names))\n"
              "utils.read_split_data(sys.argv[1], class_indices=sys.argv[2])")
    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path / "data", tmp_path / "c.json"], cwd=ROOT,
        env={**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    expected = ["red", "zz\u00e9", CHINESE]
    assert done.stdout.splitlines()[0] == ascii(expected)
    assert "class zz\\xe9 has 1 image" in done.stdout
    names = json.loads((tmp_path / "c.json").read_text(encoding="utf-8"))
    assert [*names.values()] == expected


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    make(tmp_path / "data", red=10, blue=10)
    target = tmp_path / "out" / "names.json"
    target.parent.mkdir()
    target.write_text("old")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(utils.os, "fsync", full)
    with pytest.raises(OSError, match=r"cannot write .*names\.json: No space left"):
        read_split_data(tmp_path / "data", class_indices=target, quiet=True)
    assert os.listdir(target.parent) == ["names.json"]
    assert target.read_text() == "old"


def test_a_missing_output_folder_is_named(tmp_path):
    make(tmp_path / "data", red=10, blue=10)
    with pytest.raises(FileNotFoundError, match=r"cannot write .*missing.names\.json"):
        read_split_data(tmp_path / "data", class_indices=tmp_path / "missing" / "names.json")


# --------------------------------------------------------------------------- a look at a batch


@pytest.mark.parametrize("count", [1, 3, 20])
def test_a_batch_is_drawn_without_a_display(tmp_path, monkeypatch, count):
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.setenv("MPLBACKEND", "TkAgg")
    (tmp_path / "c.json").write_text('{"0": "a $1 $2", "1": "blue"}', encoding="utf-8")
    batch = (torch.randn(count, 3, 16, 16), torch.arange(count) % 2)
    plot_data_loader_image([batch], tmp_path / "c.json", tmp_path / "batch.png")
    assert (tmp_path / "batch.png").read_bytes().startswith(b"\x89PNG")


def test_a_batch_is_drawn_in_its_own_colours():
    red = torch.tensor([1.0, 0.0, 0.0]).view(3, 1, 1).expand(3, 2, 4)
    mean = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
    std = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)
    drawn = utils._denormalised((red - mean) / std)
    torch.testing.assert_close(drawn, red.permute(1, 2, 0), atol=1e-6, rtol=0)
