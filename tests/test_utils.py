"""What all scripts share: CPUs to use, files that are written whole, commands with a time limit."""

import errno
import io
import os
import sys
import time
from pathlib import Path

import pytest
from leftovers import LINUX, no_processes_with

import utils
from utils import TIMED_OUT, allowed_cpus, readable, run_limited, written_whole

# ---- CPUs ------------------------------------------------------------------------------------

# {what /proc/self/cgroup says: {file: its content}}, and the CPUs of eight that may be used.
GROUPS = {
    "no limit": ("0::/", {"cpu.max": "max 100000"}, 8),
    "three and a half": ("0::/", {"cpu.max": "350000 100000"}, 3),
    "half a CPU": ("0::/", {"cpu.max": "50000 100000"}, 1),
    "more than there are": ("0::/", {"cpu.max": "1600000 100000"}, 8),
    "a group around it": ("0::/jobs/7", {"jobs/7/cpu.max": "max 100000",
                                         "jobs/cpu.max": "200000 100000"}, 2),
    "a name on the host": ("0::/docker/abc", {"cpu.max": "400000 100000"}, 4),
    "outside of what is seen": ("0::/../../x", {"cpu.max": "400000 100000"}, 4),
    "version 1": ("4:cpu,cpuacct:/", {"cpu/cpu.cfs_quota_us": "250000",
                                      "cpu/cpu.cfs_period_us": "100000"}, 2),
    "version 1, no limit": ("4:cpu:/", {"cpu/cpu.cfs_quota_us": "-1",
                                        "cpu/cpu.cfs_period_us": "100000"}, 8),
    "another controller": ("4:memory:/a", {"a/cpu.max": "100000 100000"}, 8),
    "damaged": ("0::/", {"cpu.max": "three"}, 8),
    "no files": ("0::/", {}, 8),
}


@pytest.mark.parametrize("kind", GROUPS)
def test_a_containers_quota_bounds_the_cpus(monkeypatch, tmp_path, kind):
    place, files, expected = GROUPS[kind]
    for name, content in files.items():
        (tmp_path / "groups" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "groups" / name).write_text(content + "\n")
    (tmp_path / "own").write_text(f"7:pids:/\n{place}\n")
    asked = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: asked.append(pid) or set(range(8)),
                        raising=False)
    monkeypatch.setattr(utils, "_CGROUPS", tmp_path / "groups")
    monkeypatch.setattr(utils, "_OWN_CGROUPS", tmp_path / "own")
    assert allowed_cpus() == expected
    assert asked == [0]


def test_without_affinity_and_groups_all_cpus_count(monkeypatch, tmp_path):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(utils, "_OWN_CGROUPS", tmp_path / "nowhere")
    for there, expected in ((5, 5), (None, 1)):
        monkeypatch.setattr(os, "cpu_count", lambda there=there: there)
        assert allowed_cpus() == expected


# ---- names -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name, encoding, shown", [
    ("plain name.jpg", "ascii", "plain name.jpg"),
    ("line\nbreak\x1b[31m", "utf-8", r"line\nbreak\x1b[31m"),
    ("\u90c1 \xe9", "utf-8", "\u90c1 \xe9"),
    ("\u90c1 \xe9", "ascii", r"\u90c1 \xe9"),
    ("\u90c1 \xe9", "latin-1", "\\u90c1 \xe9"),
    ("caf\udce9.jpg", "utf-8", r"caf\udce9.jpg")])
def test_names_can_be_shown_whatever_is_in_them(name, encoding, shown):
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    assert readable(name, stream) == shown
    assert readable(readable(name, stream), stream) == shown  # of a line with names in it
    stream.write(readable(name, stream))


def test_without_a_stream_only_what_no_stream_can_say_is_escaped():
    assert readable("\u90c1\n\udce9") == "\u90c1\\n\\udce9"
    assert readable("\u90c1", io.StringIO()) == "\u90c1"  # a stream that has no encoding


# ---- files -----------------------------------------------------------------------------------


def test_a_file_appears_whole_at_the_end(tmp_path):
    path = tmp_path / "file"
    path.write_text("older")
    with written_whole(path) as temporary:
        temporary.write_text("newer")
        assert path.read_text() == "older"
        assert temporary.parent == tmp_path and temporary in utils.unfinished_files
    assert path.read_text() == "newer"
    assert os.listdir(tmp_path) == ["file"] and not utils.unfinished_files


@pytest.mark.parametrize("error, kind, words", [
    (OSError(errno.EACCES, "Permission denied"), PermissionError, "Permission denied"),
    (OSError(errno.ENOSPC, "No space left"), OSError, "No space left"),
    (RuntimeError("write failed\nstack of C++ names"), OSError, "write failed"),
    (RuntimeError(), OSError, "cannot write")])
def test_a_failed_write_says_which_file_and_what_to_do(tmp_path, error, kind, words):
    with pytest.raises(OSError) as caught:
        with written_whole(tmp_path / "file", "--output") as temporary:
            temporary.write_text("half")
            raise error
    assert type(caught.value) is kind and caught.value.errno == getattr(error, "errno", None)
    text = str(caught.value)
    assert text.startswith(f"cannot write {tmp_path / 'file'}: ") and words in text
    assert text.endswith("choose another --output") and "C++" not in text
    assert not any(tmp_path.iterdir()) and not utils.unfinished_files


@pytest.mark.parametrize("error", [ValueError("not the weights"), OSError("no network"),
                                   KeyboardInterrupt()])
def test_what_is_no_failed_write_passes_as_it_is(tmp_path, error):
    with pytest.raises(type(error)) as caught:
        with written_whole(tmp_path / "file") as temporary:
            temporary.write_text("half")
            raise error
    assert caught.value is error
    assert not any(tmp_path.iterdir()) and not utils.unfinished_files


def test_a_folder_of_that_name_stays(tmp_path):
    (tmp_path / "file" / "below").mkdir(parents=True)
    with pytest.raises(IsADirectoryError, match="cannot write .*file: "):
        with written_whole(tmp_path / "file") as temporary:
            temporary.write_text("text")
    assert os.listdir(tmp_path) == ["file"] and (tmp_path / "file" / "below").is_dir()


# ---- commands --------------------------------------------------------------------------------


def test_a_command_gives_its_status_output_and_time(tmp_path):
    code = ("import os, sys; print(os.getcwd(), os.environ.get('A'), len(sys.stdin.read())); "
            "sys.stdout.flush(); sys.stderr.buffer.write(b'\\xff'); sys.exit(int(sys.argv[1]))")
    before = time.perf_counter()
    status, output, wall = run_limited([Path(sys.executable), "-c", code, 3], 60, tmp_path,
                                       {**os.environ, "A": "b"})
    assert 0 < wall < time.perf_counter() - before
    assert (status, output) == (3, f"{tmp_path.resolve()} b 0\n\ufffd")
    assert run_limited([sys.executable, "-c", code, 0], 60)[:2] == (
        0, f"{Path.cwd()} None 0\n\ufffd")


@LINUX
def test_a_command_past_its_limit_is_ended_with_its_children(monkeypatch):
    monkeypatch.setattr(utils, "PATIENCE", 0.5)
    stubborn = ("import signal, subprocess, sys; "
                "signal.signal(signal.SIGTERM, signal.SIG_IGN); "
                "print('started', flush=True); "
                "subprocess.run([sys.executable, '-c', 'import time; time.sleep(98.765)'])")
    status, output, _ = run_limited([sys.executable, "-c", stubborn], 4)
    assert status == TIMED_OUT and output == "started\n"
    assert no_processes_with("time.sleep(98.765)")


@LINUX
def test_what_a_command_leaves_running_is_ended(tmp_path):
    leaving = ("import subprocess, sys; "
               "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(97.654)'])")
    assert run_limited([sys.executable, "-c", leaving], 60)[:2] == (0, "")
    assert no_processes_with("time.sleep(97.654)")


@LINUX
def test_a_command_is_asked_before_it_is_killed():
    polite = ("import signal, sys, time; "
              "signal.signal(signal.SIGTERM, lambda *_: sys.exit(print('good bye'))); "
              "print('started', flush=True); time.sleep(96.543)")
    status, output, _ = run_limited([sys.executable, "-c", polite], 4)
    assert status == TIMED_OUT and output == "started\ngood bye\n"
