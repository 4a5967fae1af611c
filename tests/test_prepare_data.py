"""Downloads from a local server that misbehaves, and the drawn sample set."""

import errno
import hashlib
import io
import os
import signal
import subprocess
import sys
import tarfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import prepare_data
import sample_photos
from prepare_data import download_flowers, download_weights, draw_sample_set, main
from utils import read_split_data

SCRIPT = Path(__file__).parents[1] / "prepare_data.py"
COUNTS = {"daisy": 3, "roses": 2}
GOOD = [f"flower_photos/{name}/{number}.jpg" for name, count in COUNTS.items()
        for number in range(count)] + ["flower_photos/LICENSE.txt"]


def archive(names, extra=()):
    """A .tgz of small files; `extra` are TarInfo objects put in front."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as tar:
        for entry in extra:
            tar.addfile(entry)
        for name in names:
            entry = tarfile.TarInfo(name)
            entry.size = 2000
            # Bytes that do not compress: a cut through the file is a cut through the photos.
            tar.addfile(entry, io.BytesIO(hashlib.shake_128(name.encode()).digest(2000)))
    return content.getvalue()


class Server(ThreadingHTTPServer):
    """Answers with what `files` holds: path to bytes, or to (bytes sent, length announced)."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files, self.asked, self.go_on = {}, [], threading.Event()

    def offer(self, content, name="flowers.tgz"):
        self.files[f"/{name}"] = content
        return f"http://127.0.0.1:{self.server_port}/{name}"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.asked.append(self.path)
        content = self.server.files.get(self.path)
        if content is None:
            self.send_error(404)
            return
        content, length = content if isinstance(content, tuple) else (content, len(content))
        self.send_response(200)
        if length is not None:
            self.send_header("Content-Length", str(length))
        self.end_headers()
        self.wfile.write(content)
        self.wfile.flush()
        if self.path == "/silent.tgz":  # neither goes on nor hangs up
            self.server.go_on.wait(20)

    def log_message(self, *_):
        pass


@pytest.fixture
def server(monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield server
        server.go_on.set()
        server.shutdown()
        thread.join()


def tree(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_download_unpacks_the_set_and_only_that(server, tmp_path, capsys):
    download_flowers(tmp_path / "photos", server.offer(archive(GOOD)), COUNTS)
    assert tree(tmp_path) == sorted(name.replace("flower_photos", "photos") for name in GOOD)
    assert "5 images in 2 classes" in capsys.readouterr().out


def test_a_complete_folder_is_not_downloaded_again(server, tmp_path, capsys):
    url = server.offer(archive(GOOD))
    for _ in range(2):
        download_flowers(tmp_path / "photos", url, COUNTS)
    assert server.asked == ["/flowers.tgz"]
    assert "already complete" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["file", "empty folder", "photo missing", "dangling link"])
def test_something_else_in_its_place_is_left_alone(server, tmp_path, kind):
    output = tmp_path / "photos"
    if kind == "file":
        output.write_text("mine")
    elif kind == "dangling link":
        output.symlink_to(tmp_path / "nowhere")
    else:
        output.mkdir()
    if kind == "photo missing":
        download_flowers(tmp_path / "whole", server.offer(archive(GOOD)), COUNTS)
        output.rmdir()
        (tmp_path / "whole").rename(output)
        (output / "roses" / "1.jpg").unlink()
    before, asked = tree(tmp_path), len(server.asked)
    with pytest.raises(ValueError, match="photos exists and is something else"):
        download_flowers(output, server.offer(archive(GOOD)), COUNTS)
    assert tree(tmp_path) == before and os.path.lexists(output)
    assert len(server.asked) == asked


def link(name, target, kind):
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname = kind, target
    return entry


WHOLE = archive(GOOD)
BROKEN = {
    "truncated, length known": ((WHOLE[:4000], len(WHOLE)), "ended after 4000 of"),
    "truncated, length unknown": ((WHOLE[:4000], None), "no whole .tgz archive"),
    "a web page": (b"<html>please log in</html>", "no whole .tgz archive"),
    "nothing": (b"", "no whole .tgz archive"),
    "damaged inside": (WHOLE[:5000] + bytes(1000) + WHOLE[6000:], "no whole .tgz archive"),
    "one photo damaged": (WHOLE[:2500] + b"?" + WHOLE[2501:], "CRC"),
    "image missing": (archive(GOOD[1:]), "daisy has 2 images in place of 3"),
    "class missing": (archive(GOOD[:3]), "roses has 0 images in place of 2"),
    "class too many": (archive([*GOOD, "flower_photos/x/0.jpg"]), "x has 1 images in place of 0"),
    "another folder": (archive(["photos/daisy/0.jpg"]), "no folder flower_photos"),
    "path upwards": (archive([*GOOD, "flower_photos/../../evil.jpg"]), "leads outside"),
    "absolute path": (archive([*GOOD, "/tmp/prepare_data_evil.jpg"]), "leads outside"),
    "symbolic link": (archive(GOOD, [link("flower_photos", "..", tarfile.SYMTYPE)]), "a link"),
    "hard link": (archive(GOOD, [link("x", "../secret", tarfile.LNKTYPE)]), "a link"),
    "device": (archive(GOOD, [link("flower_photos/fifo", "", tarfile.FIFOTYPE)]), "refused"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_bad_archive_leaves_nothing_behind(server, tmp_path, kind):
    content, message = BROKEN[kind]
    place = tmp_path / "place"
    place.mkdir()
    with pytest.raises((ValueError, OSError), match=message) as caught:
        download_flowers(place / "photos", server.offer(content), COUNTS)
    assert "/flowers.tgz" in str(caught.value)
    assert list(tmp_path.rglob("*")) == [place]
    assert not Path("/tmp/prepare_data_evil.jpg").exists()


def test_an_archive_that_unpacks_to_too_much_is_refused(server, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare_data, "SIZE_LIMIT", 12_000)
    names = [f"flower_photos/daisy/{number}" for number in range(100)]
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as tar:
        for name in names:
            entry = tarfile.TarInfo(name)
            entry.size = 5000
            tar.addfile(entry, io.BytesIO(bytes(5000)))
    with pytest.raises(ValueError, match="unpacks to more than"):
        download_flowers(tmp_path / "photos", server.offer(content.getvalue()), COUNTS)
    with pytest.raises(OSError, match="cannot be the right file"):
        download_flowers(tmp_path / "photos", server.offer((bytes(20_000), None)), COUNTS)
    assert not any(tmp_path.iterdir())


def test_a_python_without_filters_unpacks_all_the_same(server, tmp_path, monkeypatch):
    given, extract = [], tarfile.TarFile.extract

    def older(self, member, path="", set_attrs=True):
        given.append(set_attrs)
        extract(self, member, path, filter="data")

    monkeypatch.setattr(tarfile.TarFile, "extract", older)
    monkeypatch.delattr(tarfile, "data_filter")
    download_flowers(tmp_path / "photos", server.offer(WHOLE), COUNTS)
    assert len(tree(tmp_path / "photos")) == len(GOOD) == len(given) and not any(given)


def test_errors_of_server_and_network_name_the_address(server, tmp_path, capsys, monkeypatch):
    missing = f"http://127.0.0.1:{server.server_port}/missing.tgz"
    assert main(["download", "--output", str(tmp_path / "photos"), "--url", missing]) == 1
    assert f"error: {missing}: the server answered 404" in capsys.readouterr().err
    # Port 9, "discard", has no listener, and no proxy stands in between.
    closed = "http://127.0.0.1:9/flowers.tgz"
    assert main(["weights", "--output", str(tmp_path / "w.pth"), "--url", closed]) == 1
    error = capsys.readouterr().err
    assert closed in error and "--url file:///" in error and error.count("\n") == 1
    monkeypatch.setattr(prepare_data, "TIMEOUT", 0.2)
    silent = server.offer((WHOLE[:2000], len(WHOLE)), "silent.tgz")
    assert main(["download", "--output", str(tmp_path / "photos"), "--url", silent]) == 1
    assert "silent.tgz: cannot be downloaded (timed out)" in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


def test_a_full_disk_is_said_with_the_folder(server, tmp_path, capsys, monkeypatch):
    def full(*_args, **_kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tarfile.TarFile, "extract", full)
    output = tmp_path / "photos"
    assert main(["download", "--output", str(output), "--url", server.offer(WHOLE)]) == 1
    assert f"error: {output}: no space left on the disk" in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


def test_a_local_archive_serves_where_there_is_no_network(tmp_path):
    (tmp_path / "local.tgz").write_bytes(WHOLE)
    download_flowers(tmp_path / "photos", (tmp_path / "local.tgz").as_uri(), COUNTS)
    assert len(tree(tmp_path / "photos")) == len(GOOD)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_the_middle_leaves_nothing_behind(server, tmp_path, signum):
    url = server.offer((WHOLE[:2000], len(WHOLE)), "silent.tgz")
    process = subprocess.Popen(
        [sys.executable, SCRIPT, "download", "--output", "photos", "--url", url], cwd=tmp_path,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"})
    assert "downloading" in process.stdout.readline()
    assert any(tmp_path.iterdir())  # it is in the middle of it
    process.send_signal(signum)
    _, error = process.communicate(timeout=20)
    assert process.returncode == 128 + signum
    assert error == ""
    assert not any(tmp_path.iterdir())


@pytest.fixture(scope="module")
def weights():
    """The bytes of a ResNet-34's weight file, small because all its tensors share one number."""
    import torch
    from torchvision.models import resnet34

    with torch.device("meta"):
        shapes = {name: value.shape for name, value in resnet34().state_dict().items()}
    return {name: torch.zeros(()).expand(shape) for name, shape in shapes.items()}


def saved(content):
    import torch

    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


def test_weights_are_checked_and_kept_as_downloaded(server, tmp_path, weights, capsys):
    content = saved(weights)
    url = server.offer(content, f"resnet34-{hashlib.sha256(content).hexdigest()[:8]}.pth")
    for _ in range(2):
        download_weights(tmp_path / "resNet34.pth", url)
    assert (tmp_path / "resNet34.pth").read_bytes() == content
    assert len(server.asked) == 1 and "already there" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["resNet34.pth"]


def test_weights_without_batch_counters_are_good(server, tmp_path, weights):
    older = {name: value for name, value in weights.items()
             if not name.endswith("num_batches_tracked")}
    download_weights(tmp_path / "resNet34.pth", server.offer(saved(older), "w.pth"))
    assert (tmp_path / "resNet34.pth").is_file()


def test_other_files_are_no_weights(server, tmp_path, weights):
    smaller = {**weights, "fc.weight": weights["fc.weight"][:5]}
    fewer = {name: value for name, value in weights.items() if name != "conv1.weight"}
    good = saved(weights)
    for content, name, message in [
            (saved(smaller), "w.pth", r"fc.weight with shape \(5, 512\) in place of \(1000, 512\)"),
            (saved(fewer), "w.pth", "conv1.weight with shape None"),
            (good, "w-00000000.pth", "sha256 is .* should begin with 00000000"),
            (good[:-500], "w.pth", "no state dict can be read"),
            (b"<html>", "w.pth", "no state dict can be read"),
            (saved([1, 2]), "w.pth", "no state dict can be read")]:
        with pytest.raises(ValueError, match=message) as caught:
            download_weights(tmp_path / "resNet34.pth", server.offer(content, name))
        assert name in str(caught.value)
        assert not any(tmp_path.iterdir())
    (tmp_path / "resNet34.pth").write_bytes(b"mine")
    with pytest.raises(ValueError, match="exists and is something else"):
        download_weights(tmp_path / "resNet34.pth", server.offer(good, "w.pth"))
    assert (tmp_path / "resNet34.pth").read_bytes() == b"mine"


def test_a_weight_file_cannot_run_code(server, tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    with pytest.raises(ValueError, match="no state dict can be read"):
        download_weights(tmp_path / "resNet34.pth", server.offer(saved(Evil()), "w.pth"))
    assert not any(tmp_path.iterdir())


def test_the_same_seed_draws_the_same_bytes(tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        draw_sample_set(tmp_path / name, images=27, size=32, seed=seed)
    files = tree(tmp_path / "a")
    assert len(files) == 27 and tree(tmp_path / "b") == files
    read = {name: [(tmp_path / name / file).read_bytes() for file in files] for name in "ab"}
    assert read["a"] == read["b"]
    assert len(set(read["a"])) == 27
    assert not set(read["a"]) & {path.read_bytes() for path in (tmp_path / "c").rglob("*.jpg")}


def test_a_larger_set_begins_with_the_smaller_one(tmp_path):
    draw_sample_set(tmp_path / "few", images=25, size=32)
    draw_sample_set(tmp_path / "more", images=30, size=32)
    for file in tree(tmp_path / "few"):
        assert (tmp_path / "few" / file).read_bytes() == (tmp_path / "more" / file).read_bytes()


def test_the_sample_set_can_be_trained_on(tmp_path):
    from PIL import Image

    assert main(["sample", "--output", str(tmp_path / "set"), "--images", "25"]) == 0
    train, val, classes = read_split_data(tmp_path / "set", class_indices=None, quiet=True)
    assert classes == 5 and (len(train[0]), val[1]) == (20, [0, 1, 2, 3, 4])
    assert sorted(path.name for path in (tmp_path / "set").iterdir()) == sorted(
        prepare_data.FLOWER_COUNTS)
    for path in train[0]:
        with Image.open(path) as image:
            image.load()
            assert (image.format, image.mode, min(image.size)) == ("JPEG", "RGB", 96)


def test_an_existing_sample_set_is_kept(tmp_path, capsys):
    command = ["sample", "--output", str(tmp_path / "set"), "--images", "25", "--size", "32"]
    assert main(command) == 0
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.jpg")}
    assert main(command) == 0
    assert "already complete, 25 images" in capsys.readouterr().out
    assert main([*command, "--seed", "1"]) == 1
    assert "set exists and is something else (not drawn with seed 1" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.jpg")} == before


def test_a_failure_while_drawing_leaves_nothing_behind(tmp_path, capsys, monkeypatch):
    def fail(*_):
        assert any(tmp_path.iterdir())  # it is in the middle of it
        raise OSError(errno.EIO, "Input/output error", "picture")

    monkeypatch.setattr(sample_photos, "as_jpeg", fail)
    assert main(["sample", "--output", str(tmp_path / "set")]) == 1
    assert "Input/output error" in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


def test_a_missing_parent_folder_is_named(tmp_path, capsys):
    assert main(["sample", "--output", str(tmp_path / "no" / "set")]) == 1
    assert f"{tmp_path / 'no'}: no such folder" in capsys.readouterr().err


@pytest.mark.parametrize("words", [
    [], ["everything"], ["sample", "--images", "24"], ["sample", "--size", "31"],
    ["sample", "--seed", "x"], ["download", "--url", "flowers.tgz"], ["weights", "--images", "9"]])
def test_wrong_usage_is_status_2(words, capsys):
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_help_shows_the_commands_and_imports_nothing_heavy():
    code = ("import sys, prepare_data\n"
            "try: prepare_data.main(['--help'])\nexcept SystemExit: pass\n"
            "print(sorted({'torch', 'PIL', 'tqdm', 'torchvision'} & set(sys.modules)))")
    output = subprocess.run([sys.executable, "-c", code], cwd=SCRIPT.parent, text=True,
                            capture_output=True, check=True).stdout
    assert "python prepare_data.py sample" in output
    assert output.endswith("[]\n")
