"""The records of a run: a folder for each, and figures whatever the classes are called."""

import json
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest

from multi_train_utils.records import run_log
from multi_train_utils.records.run_log import RunLog, new_folder
from utils import write_class_indices


def test_runs_of_the_same_second_do_not_share_a_folder(tmp_path, monkeypatch):
    asked = []

    def one_second(form):
        asked.append(form)
        return "2030-01-01_00-00-00"

    monkeypatch.setattr(run_log.time, "strftime", one_second)
    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(lambda _: new_folder(tmp_path / "runs"), range(40)))
    assert len(asked) == 40
    assert all(folder.name.startswith("2030-01-01_00-00-00") for folder in folders)
    assert len({*folders}) == 40 == len(list((tmp_path / "runs").iterdir()))


def test_one_event_file_in_a_run(tmp_path):
    log = RunLog(tmp_path)
    for epoch in range(2):
        log.add_epoch({"loss": 1.0, "accuracy": 0.5, "learning_rate": 0.1, "epoch": epoch})
    log.add_confusion([[1, 0], [1, 2]], ["blue", "red"], 1)
    log.close()
    assert len(list(tmp_path.glob("runs/*/events.out.tfevents*"))) == 1 and not log.broken
    assert json.loads((log.folder / "confusion.json").read_text())["matrix"] == [[1, 0], [1, 2]]


@pytest.mark.parametrize("name", ["\u90c1\u91d1\u9999", "zz_\udce9", "a $1 $2", "\u0001"])
def test_class_names_of_any_kind_are_drawn_without_a_word(tmp_path, name):
    log = RunLog(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        log.add_confusion([[1, 0], [0, 1]], [name, "red"], 0)
    log.close()
    assert not log.broken
    assert json.loads((log.folder / "confusion.json").read_text())["classes"] == [name, "red"]


def test_the_class_file_is_never_seen_half_written(tmp_path):
    names = [f"class number {i}" for i in range(2000)]
    path, done, seen = tmp_path / "class_indices.json", threading.Event(), []

    def read():
        while not done.is_set():
            if path.exists():
                seen.append(len(json.loads(path.read_text(encoding="utf-8"))))

    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read)
        try:
            for _ in range(100):
                write_class_indices(names, path)
        finally:
            done.set()
        reading.result()
    assert {*seen} == {2000}
