"""The charts: what they show, where they go, and what is said about damaged records."""

import json
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

import plot_results
from plot_results import PUBLISHED_ACCURACY, PUBLISHED_SECONDS, main, read_run

SCRIPT = Path(__file__).parents[1] / "plot_results.py"


def record(folder, world_size=1, seconds=(9.0, 3.0, 4.0), device="NVIDIA H200", first=0.5):
    """A run's folder as the trainer leaves it, one epoch for each entry of `seconds`."""
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({
        "arguments": {"lr": 0.001}, "world_size": world_size,
        "device_names": [device] * world_size, "versions": {"torch": "2"}}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps({
        "epoch": epoch, "loss": 1.0, "accuracy": first + 0.01 * epoch, "correct": 1, "total": 2,
        "learning_rate": 0.1, "seconds": value, "images_per_second": 1.0, "data_wait": 0.0}) + "\n"
        for epoch, value in enumerate(seconds)))
    return folder


@pytest.fixture
def charts(monkeypatch):
    """The figures that main would write, by file name; drawing them into files takes seconds."""
    figures = {}
    monkeypatch.setattr(plot_results, "write_figure",
                        lambda figure, path: figures.update({path.name: figure}))
    return figures


def heights(axes):
    return [bar.get_height() for bar in axes.containers[0]]


def curves(axes):
    return {line.get_label(): list(line.get_ydata()) for line in axes.lines}


def texts(axes):
    return [text.get_text() for text in axes.texts]


def test_the_published_figures_are_the_published_ones():
    assert PUBLISHED_SECONDS == {1: 9, 2: 5.5, 4: 3, 8: 2}
    one, without, with_sync = PUBLISHED_ACCURACY.values()
    assert [len(curve) for curve in (one, without, with_sync)] == [30, 30, 30]
    # First, last, sum in thousandths: a slip of one digit shows.
    assert [(c[0], c[-1], round(1000 * sum(c))) for c in (one, without, with_sync)] == [
        (0.569, 0.806, 21956), (0.348, 0.811, 21170), (0.283, 0.81, 21329)]


def test_published_charts(tmp_path, charts):
    assert main(["--output-dir", str(tmp_path)]) == 0
    assert sorted(charts) == ["accuracy.png", "syncbn.png", "training_time.png"]
    time, sync, accuracy = (charts[name].axes[0]
                            for name in ("training_time.png", "syncbn.png", "accuracy.png"))
    assert heights(time) == [9, 5.5, 3, 2]
    assert [tick.get_text() for tick in time.get_xticklabels()] == [
        "1 GPU", "2 GPUs", "4 GPUs", "8 GPUs"]
    assert "2 s\n4.5 x as fast" in texts(time)
    assert curves(accuracy) == PUBLISHED_ACCURACY
    assert curves(sync) == dict(list(PUBLISHED_ACCURACY.items())[1:])
    assert texts(sync)[:2] == ["0.81", "0.81"] and "both end at 0.81" in sync.get_title("left")
    for figure in charts.values():
        axes = figure.axes[0]
        assert axes.get_title("left") and axes.get_xlabel() and axes.get_ylabel()
        assert axes.get_legend() is not None
        assert any("original collection" in text for text in texts(axes))


def test_it_says_where_the_files_are_and_leaves_nothing_else(tmp_path, capsys):
    from PIL import Image

    folder, run = tmp_path / "new" / "charts", record(tmp_path / "run")
    assert main([str(run), "--output-dir", str(folder)]) == 0
    named = re.findall(r"^wrote (.+)$", capsys.readouterr().out, re.MULTILINE)
    assert sorted(named) == sorted(map(str, folder.iterdir())) and len(named) == 2
    for path in named:
        with Image.open(path) as image:
            image.load()
            assert image.format == "PNG" and min(image.size) >= 600
            assert len(image.convert("RGB").getcolors(2**20)) > 50


def test_charts_of_recorded_runs(tmp_path, charts):
    runs = [record(tmp_path / "runs" / "four", 4, (5.0, 1.0, 1.5), first=0.3),
            record(tmp_path / "runs" / "one", 1, (9.0, 3.0, 4.0), first=0.6)]
    assert main([*map(str, runs), "--output-dir", str(tmp_path)]) == 0
    assert sorted(charts) == ["accuracy.png", "training_time.png"]
    time, accuracy = charts["training_time.png"].axes[0], charts["accuracy.png"].axes[0]
    assert heights(time) == [4.0, 1.5]  # medians: a slow first epoch does not count
    assert [tick.get_text() for tick in time.get_xticklabels()] == ["1 GPU", "4 GPUs"]
    assert "1.5 s\n2.7 x as fast" in texts(time)
    assert [line.get_ydata()[0] for line in time.lines] == [1.0]  # what 4 times as fast would be
    assert curves(accuracy) == {"1 GPU, one": [0.6, 0.61, 0.62], "4 GPUs, four": [0.3, 0.31, 0.32]}
    assert list(accuracy.lines[0].get_xdata()) == [1, 2, 3]


def test_runs_of_one_size_or_of_the_cpu_stay_apart(tmp_path, charts):
    names = ["2026-01-01_10-00-00_$host_$", "_hidden", "2026-01-03_10-00-00_" + "x" * 60, "cpu"]
    runs = [record(tmp_path / name, 2, (seconds,), "cpu" if name == "cpu" else "NVIDIA H200")
            for name, seconds in zip(names, (1.0, 2.0, 3.0, 50.0), strict=True)]
    assert main([*map(str, runs), str(record(tmp_path / "again" / "cpu", 2, device="cpu")),
                 "--output-dir", str(tmp_path / "charts")]) == 0
    time, accuracy = charts["training_time.png"].axes[0], charts["accuracy.png"].axes[0]
    labels = [tick.get_text() for tick in time.get_yticklabels()]
    assert len(labels) == 5 and labels[0] == "2 GPUs, 2026-01-01_10-00-00_$host_$"
    assert labels[3:] == ["2 processes, cpu"] * 2
    assert "50 s" in texts(time)  # not compared with the GPUs
    assert len(curves(accuracy)) == 5
    legend = charts["accuracy.png"].legends[0]
    assert [text.get_text() for text in legend.get_texts()] == list(curves(accuracy))


def test_a_run_is_read_as_it_was_recorded(tmp_path):
    run = read_run(record(tmp_path / "run", 2, (9.0, 3.0), "cpu"))
    assert (run.name, run.world_size, run.size) == ("run", 2, "2 processes")
    assert (run.epochs, run.seconds, run.accuracy) == ([0, 1], [9.0, 3.0], [0.5, 0.51])
    assert statistics.median(run.seconds) == 6.0


LINE = '{"epoch": 3, "seconds": 1.0, "accuracy": 0.5}\n'
DAMAGE = {
    "no run.json": ("run.json", None, "run.json: no such file"),
    "no metrics": ("metrics.jsonl", None, "metrics.jsonl: no such file"),
    "run.json cut": ("run.json", '{"world_size": ', "run.json: damaged, not JSON"),
    "run.json a list": ("run.json", "[]", "run.json: damaged, not a JSON object"),
    "no world size": ("run.json", "{}", "run.json: world_size is None"),
    "world size text": ("run.json", '{"world_size": "2"}', "run.json: world_size is '2'"),
    "no epoch": ("metrics.jsonl", "", "metrics.jsonl: no epoch has been recorded"),
    "line cut": ("metrics.jsonl", LINE + LINE[:20], "metrics.jsonl, line 2: damaged, not JSON"),
    "no accuracy": ("metrics.jsonl", '{"epoch": 0, "seconds": 1}', "line 1: damaged, accuracy is"),
    "not a number": ("metrics.jsonl", LINE.replace("0.5", "NaN"), "line 1: damaged, accuracy is"),
    "percent": ("metrics.jsonl", LINE.replace("0.5", "50"), "line 1: damaged, accuracy is 50"),
    "epoch twice": ("metrics.jsonl", LINE + LINE, "line 2: epoch 3 after 3"),
    "not text": ("metrics.jsonl", b"\xff\xfe\x00", "metrics.jsonl: damaged, not UTF-8"),
    "deep": ("metrics.jsonl", "[" * 100_000, "line 1: damaged, not JSON"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_records_are_named_and_nothing_is_written(tmp_path, capsys, kind):
    name, content, message = DAMAGE[kind]
    run = record(tmp_path / "run")
    if content is None:
        (run / name).unlink()
    else:
        (run / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    good = record(tmp_path / "good")
    assert main([str(good), str(run), "--output-dir", str(tmp_path / "charts")]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"error: {run}") and message in error and error.count("\n") == 1
    assert not (tmp_path / "charts").exists()


def test_a_wrong_folder_is_named(tmp_path, capsys):
    record(tmp_path / "runs" / "one")
    assert main([str(tmp_path / "nowhere")]) == 1
    assert "nowhere: no such folder" in capsys.readouterr().err
    assert main([str(tmp_path / "runs")]) == 1
    assert "holds several runs. Give the folders in it" in capsys.readouterr().err


def test_a_failed_write_keeps_the_older_file(tmp_path, capsys, monkeypatch):
    (tmp_path / "training_time.png").write_text("older")

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    assert main(["--output-dir", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert f"cannot write {tmp_path / 'training_time.png'}: No space left on device" in error
    assert [path.name for path in tmp_path.iterdir()] == ["training_time.png"]
    assert (tmp_path / "training_time.png").read_text() == "older"


def test_an_output_folder_that_is_a_file_is_named(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main(["--output-dir", str(tmp_path / "file")]) == 1
    assert str(tmp_path / "file") in capsys.readouterr().err


def without_display(*words, cwd):
    """The finished process of the script, where matplotlib is told to open windows and cannot."""
    environment = {name: value for name, value in os.environ.items()
                   if name not in ("DISPLAY", "WAYLAND_DISPLAY")}
    return subprocess.run([sys.executable, SCRIPT, *words], cwd=cwd, text=True,
                          env={**environment, "MPLBACKEND": "TkAgg"}, capture_output=True)


def test_no_display_is_needed(tmp_path):
    done = without_display(cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "accuracy.png", "syncbn.png", "training_time.png"]
    assert all(path.stat().st_size > 10_000 for path in tmp_path.iterdir())


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere there is a display without DISPLAY")
def test_show_without_a_display_is_a_clear_error(tmp_path):
    done = without_display("--show", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("error: --show needs a display")
    assert done.stderr.count("\n") == 1 and not any(tmp_path.iterdir())


def test_wrong_usage_is_status_2():
    with pytest.raises(SystemExit) as caught:
        main(["--unknown"])
    assert caught.value.code == 2
