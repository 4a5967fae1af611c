"""predict.py: the run's own accuracy again, and clear words for whatever does not fit."""

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

import predict
from model import resnet18, resnet34
from my_dataset import open_image
from utils import read_split_data

ROOT = Path(__file__).parents[1]
ODD_IMAGES = ROOT / ".." / "shared" / "data" / "odd_images"
FOREIGN = ROOT / ".." / "shared" / "data" / "foreign_ckpt" / "resnet20-12fca82f.th"
CLASSES = ["blue", "green", "red"]


def draw_set(root, per_class, side=40):
    """Noise with a hue per class: easy enough to learn a little, too hard to get all right."""
    rng = random.Random(5)
    for number, name in enumerate(CLASSES):
        (root / name).mkdir(parents=True)
        for index in range(per_class):
            noise = bytes(rng.randrange(256) for _ in range(3 * 64))
            tint = [0, 0, 0]
            tint[2 - number] = 255
            image = Image.frombytes("RGB", (8, 8), noise).resize((side + index % 7, side))
            image = Image.blend(image, Image.new("RGB", image.size, tuple(tint)), 0.15)
            image.save(root / name / f"{index:03}.png")
    return root


def save_weights(path, make=resnet18, num_classes=3, **options):
    torch.manual_seed(3)
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(make(num_classes=num_classes, **options).state_dict(), path)
    return path


def write_names(path, names=CLASSES):
    path.write_text(json.dumps({str(number): name for number, name in enumerate(names)}))
    return path


def write_run(folder, name="2030-01-01_host", model="resnet18", image_size=32, classes=CLASSES):
    path = folder / "runs" / name / "run.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"arguments": {"model": model, "image_size": image_size},
                                "classes": classes}))
    return path


@pytest.fixture
def output(tmp_path):
    """An output folder as a run leaves it, without the training."""
    folder = tmp_path / "output"
    save_weights(folder / "weights" / "best.pth")
    write_names(folder / "class_indices.json")
    write_run(folder)
    return folder


@pytest.fixture
def photos(tmp_path):
    return draw_set(tmp_path / "photos", 2)


def call(*words, capsys):
    """(exit status, standard output, error output) of the command, run in this process."""
    status = predict.main([*map(str, words), "--device", "cpu"])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def call_json(*words, capsys):
    status, out, _ = call(*words, "--json", capsys=capsys)
    return status, json.loads(out)


def best(folder):
    return folder / "weights" / "best.pth"


# ------------------------------------------------------------------- against a run of its own


def train(folder, device, *words):
    """A short real run; returns its records (last epoch's line, confusion matrix)."""
    data = draw_set(folder / "data", 20)
    subprocess.run(
        [sys.executable, ROOT / "train_single_gpu.py", "--device", device, "--data-path", data,
         "--model", "resnet18", "--image-size", "32", "--batch-size", "8", "--epochs", "2",
         "--lr", "0.01", "--workers", "0", "--weights", "", "--output-dir", folder / "out", *words],
        check=True, timeout=250, cwd=folder, capture_output=True)
    (run,) = (folder / "out" / "runs").iterdir()
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    return data, last, json.loads((run / "confusion.json").read_text())["matrix"]


def validation_folder(data, folder):
    """The validation files alone, as a folder per class."""
    _, (paths, labels), _ = read_split_data(data, class_indices=None, quiet=True)
    for path, label in zip(paths, labels, strict=True):
        (folder / CLASSES[label]).mkdir(parents=True, exist_ok=True)
        shutil.copy(path, folder / CLASSES[label])
    return folder, dict(zip(paths, labels, strict=True))


@pytest.mark.slow
def test_validation_files_give_the_runs_own_accuracy(tmp_path, capsys):
    data, last, matrix = train(tmp_path, "cpu")
    assert last["total"] == 12 and 0 < last["correct"]
    folder, labels = validation_folder(data, tmp_path / "val")
    weights = tmp_path / "out" / "weights" / "model-1.pth"
    for batch_size in (1, 5, 64):
        status, result = call_json(folder, "--weights", weights, "--batch-size", batch_size,
                                   capsys=capsys)
        found = result["evaluation"]
        assert status == 0 and result["image_size"] == 32 and result["classes"] == CLASSES
        assert (found["correct"], found["total"]) == (last["correct"], last["total"])
        assert found["accuracy"] == last["accuracy"] and found["confusion"] == matrix
    _, result = call_json(*labels, "--weights", weights, capsys=capsys)
    correct = sum(entry["class"] == CLASSES[labels[entry["file"]]] for entry in result["files"])
    assert correct == last["correct"] and "evaluation" not in result
    # The checkpoint holds the same weights, and is found to be the run's record.
    _, again = call_json(*labels, "--weights", weights.with_name("checkpoint.pth"), capsys=capsys)
    assert again["files"] == result["files"]


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("amp", ["off", "bf16"])
def test_gpu_accuracy_equals_the_runs_within_one_image(tmp_path, capsys, amp):
    data, last, _ = train(tmp_path, "cuda", "--amp", amp)
    folder, _ = validation_folder(data, tmp_path / "val")
    for device in ("cuda", "cpu"):
        assert predict.main([str(folder), "--weights", str(tmp_path / "out/weights/model-1.pth"),
                             "--json", "--device", device]) == 0
        found = json.loads(capsys.readouterr().out)["evaluation"]
        assert found["total"] == last["total"]
        assert abs(found["correct"] - last["correct"]) <= 1


def test_probabilities_are_those_of_torchvisions_transform(output, tmp_path):
    from torchvision import models, transforms
    paths = []
    for number, size in enumerate([(90, 41), (33, 70), (37, 37), (20, 21)]):
        paths.append(str(tmp_path / f"{number}.png"))
        Image.effect_noise(size, 90).convert("RGB").save(paths[-1])
    theirs = models.resnet18(num_classes=3).eval()
    theirs.load_state_dict(torch.load(best(output), weights_only=True))
    transform = transforms.Compose([
        transforms.Resize(37), transforms.CenterCrop(32), transforms.ToTensor(),
        transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))])
    images = torch.stack([transform(open_image(path)) for path in paths])
    with torch.no_grad():
        expected = theirs(images).double().softmax(dim=1)
    model = predict.load_model(best(output), "resnet18", 3)
    found = list(predict.predict(model, paths, 32, batch_size=3))
    assert [one.path for one in found] == paths
    torch.testing.assert_close(torch.stack([one.probabilities for one in found]), expected,
                               rtol=0, atol=1e-5)


def test_top_takes_the_first_of_equals():
    one = predict.Prediction("x", torch.tensor([0.2, 0.4, 0.4], dtype=torch.float64))
    assert one.top(2) == [(1, 0.4), (2, 0.4)] and len(one.top(9)) == 3


# ------------------------------------------------------------------------------------ output


def test_table_has_a_line_per_file_and_columns_per_class(output, photos, capsys):
    files = sorted(photos.glob("blue/*"))
    status, out, err = call(*files, "--weights", best(output), "--top-k", 9, capsys=capsys)
    head, *lines = out.splitlines()
    assert status == 0 and head.split() == ["file"] + ["class", "prob."] * 3
    for line, file in zip(lines, files, strict=True):
        path, *cells = line.split()
        assert path == str(file) and sorted(cells[::2]) == CLASSES
        values = [float(cell) for cell in cells[1::2]]
        assert values == sorted(values, reverse=True) and abs(sum(values) - 1) < 2e-4
    assert "resnet18 at 32 px (as recorded), 3 classes" in err
    assert len({len(line) for line in (head, *lines)}) == 1


def test_json_has_class_probability_and_top(output, photos, capsys):
    status, result = call_json(photos / "red", "--weights", best(output), "--top-k", 2,
                               capsys=capsys)
    assert status == 0 and "evaluation" not in result
    assert [entry["file"] for entry in result["files"]] == sorted(map(str, photos.glob("red/*")))
    for entry in result["files"]:
        assert entry["top"][0] == {"class": entry["class"], "probability": entry["probability"]}
        assert len(entry["top"]) == 2
        assert 1 >= entry["top"][0]["probability"] >= entry["top"][1]["probability"] > 0


def test_folder_per_class_gives_accuracy_and_confusion(output, photos, capsys):
    status, result = call_json(photos, "--weights", best(output), capsys=capsys)
    found = result["evaluation"]
    assert status == 0 and found["total"] == 6
    by_hand = [[0] * 3 for _ in CLASSES]
    for entry in result["files"]:
        true = CLASSES.index(Path(entry["file"]).parent.name)
        by_hand[true][CLASSES.index(entry["class"])] += 1
    assert found["confusion"] == by_hand
    assert found["correct"] == by_hand[0][0] + by_hand[1][1] + by_hand[2][2]
    assert found["per_class"]["red"] == {"correct": by_hand[2][2], "total": 2}
    _, out, _ = call(photos, "--weights", best(output), capsys=capsys)
    assert f"accuracy: {found['accuracy']:.3f} ({found['correct']}/6)" in out
    last = out.splitlines()[-1].split()
    assert last == ["2", "red", *map(str, by_hand[2])]


def test_bad_files_are_named_and_do_not_stop_the_others(output, photos, capsys):
    broken = photos / "green" / "001.png"
    broken.write_bytes(broken.read_bytes()[:60])
    missing = photos / "nowhere.jpg"
    status, out, err = call(photos, missing, "--weights", best(output), capsys=capsys)
    assert status == 1
    assert f"error: {broken} is not a usable image: " in err
    assert f"error: {missing} is not a usable image: No such file or directory" in err
    assert err.endswith("2 of 7 files could not be read\n")
    assert str(photos / "red" / "001.png") in out and str(broken) not in out
    assert "/5)" in out  # the accuracy counts the readable ones
    status, result = call_json(photos, missing, "--weights", best(output), capsys=capsys)
    assert status == 1 and result["evaluation"]["total"] == 5
    assert [entry["file"] for entry in result["files"] if "error" in entry] == [
        str(broken), str(missing)]


def test_only_bad_files_give_no_accuracy(output, tmp_path, capsys):
    (tmp_path / "p" / "red").mkdir(parents=True)
    (tmp_path / "p" / "red" / "a.png").touch()
    status, result = call_json(tmp_path / "p", "--weights", best(output), capsys=capsys)
    assert status == 1 and result["evaluation"]["accuracy"] is None
    status, out, _ = call(tmp_path / "p", "--weights", best(output), capsys=capsys)
    assert status == 1 and "accuracy" not in out


@pytest.mark.skipif(not ODD_IMAGES.is_dir(), reason="no odd images here")
def test_odd_images_are_classified_or_named(output, capsys):
    status, result = call_json(ODD_IMAGES, "--weights", best(output), capsys=capsys)
    bad = {Path(entry["file"]).name for entry in result["files"] if "error" in entry}
    assert status == 1 and {"zero_byte.jpg", "broken.png"} <= bad
    assert not bad & {"hopper.jpg", "pil_sample_cmyk.jpg", "tiny.png", "hopper_orientation_5.jpg"}


def test_classes_that_python_once_took_for_ascii_are_found_again(tmp_path):
    """As a run under LC_ALL=C, or predict.py itself there, sees a folder's name."""
    name = "\u90c1\u91d1"
    seen_as_ascii = name.encode("utf-8").decode("ascii", "surrogateescape")
    for folder in (name, "red"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "1.jpg").touch()
    for first in (name, seen_as_ascii):
        labels = predict.labels_by_folder([str(tmp_path)], [first, "red"])
        assert sorted(labels.values()) == [0, 1]


def test_names_that_the_terminal_cannot_say_survive(output, tmp_path):
    names = ["\u90c1\u91d1\u9999", "green", "red"]
    shutil.rmtree(output / "runs")
    (output / "class_indices.json").write_text(
        json.dumps({str(i): name for i, name in enumerate(names)}), encoding="utf-8")
    odd = os.path.join(os.fsencode(tmp_path), "line\nbreak \u90c1 \udce9.png".encode(
        "utf-8", "surrogateescape"))
    shutil.copy(draw_set(tmp_path / "photos", 1) / "red" / "000.png", odd)
    done = subprocess.run(
        [sys.executable, ROOT / "predict.py", odd, "--weights", best(output), "--model",
         "resnet18", "--image-size", "32", "--device", "cpu", "--top-k", "3"],
        env=os.environ | {"PYTHONIOENCODING": "ascii"}, capture_output=True, timeout=100)
    head, line = done.stdout.decode("ascii").splitlines()
    assert done.returncode == 0 and len(head) == len(line)
    assert r"line\nbreak \u90c1 \udce9.png" in line and r"\u90c1\u91d1\u9999" in line


def test_a_reader_that_has_seen_enough_is_no_error_of_ours(output, photos):
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, ROOT / "predict.py", photos, "--weights", best(output), "--device",
         "cpu"], stdout=writing, stderr=subprocess.PIPE, text=True, timeout=100)
    os.close(writing)
    assert done.returncode == 1 and "Traceback" not in done.stderr and "Broken" not in done.stderr


def test_screen_width_counts_wide_characters_twice():
    assert predict.padded("\u90c1\u91d1", 6) == "\u90c1\u91d1  "
    assert predict.padded("ab", 3) == "ab "


# ------------------------------------------------------------------------- files and folders


def test_folders_are_walked_sorted_without_hidden_and_without_circles(tmp_path):
    for name in ["b/2.JPG", "b/10.png", "a/x/deep.tiff", "a.txt", ".hidden/1.jpg", "b/._1.jpg"]:
        path = tmp_path / "f" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (tmp_path / "f" / "b" / "circle").symlink_to(tmp_path / "f")
    root = str(tmp_path / "f")
    found = predict.list_images([root, "given.xyz", os.path.join(root, "b", "2.JPG")])
    assert [os.path.relpath(path, root) for path in found[:-1]] == [
        "a/x/deep.tiff", "b/10.png", "b/2.JPG"]
    assert found[-1] == "given.xyz"


def test_a_folder_without_images_is_an_error(output, tmp_path, capsys):
    (tmp_path / "none").mkdir()
    status, _, err = call(tmp_path / "none", "--weights", best(output), capsys=capsys)
    assert status == 1 and f"error: {tmp_path / 'none'}: no images" in err


def test_folders_that_are_partly_trained_classes_are_refused(output, photos, capsys):
    (photos / "green").rename(photos / "grass")
    status, out, err = call(photos, "--weights", best(output), capsys=capsys)
    assert status == 1 and not out
    assert "grass is not among the trained classes (blue, green, red)" in err


def test_folders_with_other_meaning_give_no_accuracy(output, photos, capsys):
    for name in CLASSES:
        (photos / name).rename(photos / f"holiday {name}")
    status, result = call_json(photos, "--weights", best(output), capsys=capsys)
    assert status == 0 and len(result["files"]) == 6 and "evaluation" not in result


def test_images_beside_the_class_folders_give_no_accuracy(output, photos, capsys):
    shutil.copy(photos / "red" / "000.png", photos / "loose.png")
    status, result = call_json(photos, "--weights", best(output), capsys=capsys)
    assert status == 0 and len(result["files"]) == 7 and "evaluation" not in result


# ------------------------------------------------------- weights, classes, what was recorded


def test_the_checkpoint_beside_the_file_is_asked_before_run_json(output):
    assert predict.find_record(best(output))["image_size"] == 32
    torch.save({"arguments": {"model": "resnet34", "image_size": 96}, "classes": ["a", "b"]},
               output / "weights" / "checkpoint.pth")
    record = predict.find_record(best(output))
    assert (record["model"], record["image_size"], record["classes"]) == (
        "resnet34", 96, ["a", "b"])


def test_the_newest_run_counts(output):
    old, new = output / "runs" / "2030-01-01_host" / "run.json", write_run(output, "x", "resnet50")
    os.utime(old, (1000, 1000))
    assert predict.find_record(best(output))["model"] == "resnet50"
    os.utime(new, (10, 10))
    assert predict.find_record(best(output))["model"] == "resnet18"


@pytest.mark.parametrize("content", [
    b"", b"[]", b"{}", b'{"arguments": 3, "classes": []}', b"\xff",
    b'{"arguments": {"model": ["x"], "image_size": 32}, "classes": []}',
    b'{"arguments": {"model": "resnet18", "image_size": "big"}, "classes": []}'])
def test_a_broken_record_is_none(output, content):
    (output / "weights" / "checkpoint.pth").write_bytes(b"cut off")
    (output / "runs" / "2030-01-01_host" / "run.json").write_bytes(content)
    assert predict.find_record(best(output)) is None


def test_without_a_record_flags_and_defaults_count(output, photos, capsys):
    shutil.rmtree(output / "runs")
    file = photos / "red" / "000.png"
    status, _, err = call(file, "--weights", best(output), capsys=capsys)
    assert status == 1 and "does not fit resnet34" in err and "use --model resnet18" in err
    words = [file, "--weights", best(output), "--model", "resnet18"]
    assert "resnet18 at 224 px (no record found" in call(*words, capsys=capsys)[2]
    assert "at 64 px" in call(*words, "--image-size", 64, capsys=capsys)[2]


def test_a_flag_against_the_record_counts_and_is_noticed(output, photos, capsys):
    status, _, err = call(photos / "red", "--weights", best(output), "--image-size", 64,
                          capsys=capsys)
    assert status == 0 and "at 64 px" in err
    assert "notice: --image-size 64, but the run recorded 32" in err


def test_where_class_names_come_from(output, tmp_path, monkeypatch):
    weights, record = best(output), predict.find_record(best(output))
    assert predict.find_class_names(weights, None, record)[1] == str(output / "class_indices.json")
    given = write_names(tmp_path / "given.json", ["x", "y", "z"])
    assert predict.find_class_names(weights, str(given), record) == (["x", "y", "z"], str(given))
    (output / "class_indices.json").unlink()
    assert predict.find_class_names(weights, None, record)[0] == CLASSES
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="--class-indices"):
        predict.find_class_names(weights, None, None)
    write_names(tmp_path / "class_indices.json", ["k", "l"])
    assert predict.find_class_names(weights, None, None) == (["k", "l"], "class_indices.json")


def test_class_names_are_in_order_of_their_numbers(tmp_path):
    names = [f"c{number}" for number in range(12)]
    assert predict.read_class_names(write_names(tmp_path / "n.json", names)) == names


def test_names_that_contradict_the_record_are_refused(output, photos, capsys):
    write_names(output / "class_indices.json", ["cat", "dog", "owl"])
    status, _, err = call(photos, "--weights", best(output), capsys=capsys)
    assert status == 1 and "cat, dog, owl" in err and "blue, green, red" in err
    assert "--class-indices" in err


@pytest.mark.parametrize("text", ["", "[]x", '["a"]', '{"1": "a"}', "3", '{"0": "a", "2": "b"}'])
def test_a_bad_class_file_is_named(output, photos, tmp_path, capsys, text):
    bad = tmp_path / "names.json"
    bad.write_text(text)
    status, _, err = call(photos, "--weights", best(output), "--class-indices", bad, capsys=capsys)
    assert status == 1 and err.startswith(f"error: {bad}: does not hold")


def test_another_number_of_classes_names_both(output, photos, tmp_path, capsys):
    five = write_names(tmp_path / "five.json", list("abcde"))
    status, _, err = call(photos, "--weights", best(output), "--class-indices", five, capsys=capsys)
    assert status == 1 and "has 3 classes, but 5 class names" in err and "--class-indices" in err


def test_missing_weights(photos, tmp_path, capsys):
    status, _, err = call(photos, "--weights", tmp_path / "no.pth", capsys=capsys)
    assert status == 1
    assert err == (f"error: {tmp_path / 'no.pth'}: no such weight file. Train first, or name one "
                   "with --weights FILE\n")


def test_damaged_weights_are_named(output, photos, capsys):
    content = best(output).read_bytes()
    for cut in (0, 10, len(content) // 2):
        best(output).write_bytes(content[:cut])
        status, _, err = call(photos, "--weights", best(output), capsys=capsys)
        assert status == 1 and f"error: {best(output)}: is damaged" in err


def test_weights_that_are_not_finite_are_refused(output):
    state = torch.load(best(output), weights_only=True)
    state["layer1.0.bn1.running_var"][3] = float("nan")
    torch.save(state, best(output))
    with pytest.raises(ValueError, match="layer1.0.bn1.running_var .* not finite"):
        predict.load_model(best(output), "resnet18", 3)


def test_wrapped_prefixed_and_half_precision_weights_load(tmp_path):
    state = resnet18(num_classes=3).state_dict()
    plain = {name: value for name, value in state.items() if "num_batches" not in name}
    torch.save({"state_dict": {f"module.{name}": value.half() for name, value in plain.items()}},
               tmp_path / "w.pth")
    model = predict.load_model(tmp_path / "w.pth", "resnet18", 3)
    assert not model.training and {value.dtype for value in model.parameters()} == {torch.float32}
    assert torch.equal(model.conv1.weight, state["conv1.weight"].half().float())


def test_another_network_is_refused_also_where_all_of_its_tensors_are_there(tmp_path):
    # ResNet-34 holds every tensor of ResNet-18, and more.
    path = save_weights(tmp_path / "34.pth", resnet34)
    with pytest.raises(ValueError, match="does not fit resnet18: it holds more.*--model resnet34"):
        predict.load_model(path, "resnet18", 3)


@pytest.mark.skipif(not FOREIGN.is_file(), reason="no foreign checkpoint here")
def test_a_foreign_checkpoint_is_refused():
    with pytest.raises(ValueError, match="does not fit resnet34.*none of"):
        predict.load_model(FOREIGN, "resnet34", 10)


@pytest.mark.parametrize("words", [[], ["x", "--top-k", "0"], ["x", "--device", "tpu"],
                                   ["x", "--model", "vgg"], ["x", "--nonsense"],
                                   ["x", "--batch-size", "0"], ["x", "--image-size", "8"]])
def test_wrong_usage_is_exit_status_2(words, capsys):
    with pytest.raises(SystemExit) as stop:
        predict.main(words)
    assert stop.value.code == 2 and "usage:" in capsys.readouterr().err


def test_cuda_without_a_gpu_offers_the_cpu(output, photos, capsys, monkeypatch):
    looked = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(looked.append(1)))
    status = predict.main([str(photos), "--weights", str(best(output)), "--device", "cuda"])
    assert looked  # else it was this machine that has none
    assert status == 1 and "--device cpu" in capsys.readouterr().err
