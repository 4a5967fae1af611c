"""check_setup.py: what each check says of a machine that is fine, and of one that is not."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from leftovers import LINUX, no_processes_with

import check_setup
from check_setup import FAIL, OK, WARN, Result

ROOT = Path(__file__).parents[1]
SCRIPT = str(ROOT / "check_setup.py")
PATIENCE = 120.0  # seconds a launcher may take here: test machines are slow and shared

TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tSYS\tPIX\t0-47\t0\t\tN/A
GPU1\tNV18\t X \tPHB\tNODE\t0-47\t0\t\tN/A
GPU2\tSYS\tPHB\t X \tSYS\t48-95\t1\t\tN/A
NIC0\tPIX\tNODE\tSYS\t X

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes
"""


@pytest.fixture
def clean_environment(monkeypatch):
    for name in list(os.environ):
        if any(check_setup.re.fullmatch(pattern, name) for pattern, _ in check_setup.CONFUSING):
            monkeypatch.delenv(name)


# ------------------------------------------------------------------------------- real tries


@pytest.mark.slow
def test_whole_check_on_this_machine(clean_environment):
    done = subprocess.run([sys.executable, SCRIPT, "--timeout", str(PATIENCE)],
                          capture_output=True, text=True, timeout=280,
                          env=os.environ | {"CUDA_VISIBLE_DEVICES": ""})
    lines = done.stdout.splitlines()
    heads = [line.split(":")[0].split(None, 1) for line in lines[:-1] if not line.startswith(" ")]
    answers = {name: status for status, name in heads}
    for launcher in ("torchrun", "torch.distributed.launch", "spawn"):
        assert answers[f"{launcher}, gloo"] == OK, done.stdout
    assert answers["all-reduce, gloo"] == answers["torch"] == answers["python"] == OK
    assert answers["environment"] == WARN  # CUDA_VISIBLE_DEVICES, set above
    assert set(answers.values()) <= {OK, WARN, FAIL}
    assert done.returncode == int(FAIL in answers.values())
    assert lines[-1].startswith(f"{len(answers)} checks: ")


@pytest.mark.slow
def test_spawn_try_reports_what_it_measured(clean_environment):
    command = check_setup.launchers("gloo", 2, PATIENCE)["spawn"]
    result = check_setup.try_launcher("spawn, gloo", command, 2, PATIENCE)
    assert result.status == OK, result
    assert result.figures["processes"] == 2
    assert result.figures["bytes"] == check_setup.MESSAGE["gloo"]
    rate = result.figures["bytes"] / result.figures["seconds"] / 1e9
    assert result.figures["algorithm_GBps"] == pytest.approx(rate)
    assert result.figures["bus_GBps"] == pytest.approx(rate)  # 2 (n - 1) / n is 1 for two


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "torch.distributed.launch", "spawn"])
def test_a_try_that_fails_says_why(clean_environment, monkeypatch, launcher):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nothere0")
    command = check_setup.launchers("gloo", 2, PATIENCE)[launcher]
    result = check_setup.try_launcher(launcher, command, 2, PATIENCE)
    assert result.status == FAIL and "nothere0" in result.text
    assert "GLOO_SOCKET_IFNAME" in result.remedy


@LINUX
@pytest.mark.slow
def test_at_the_time_limit_nobody_is_left_under_torchrun(clean_environment, tmp_path):
    (tmp_path / "sleeper_46.py").write_text(
        "import time; print('started', flush=True); time.sleep(500)")
    command = check_setup.launchers("gloo", 2, PATIENCE)["torchrun"]
    command = command[:command.index(SCRIPT)] + [str(tmp_path / "sleeper_46.py")]
    status, output, _ = check_setup.run_limited(command, 30)
    assert status == check_setup.TIMED_OUT and output.count("started") == 2
    assert no_processes_with("sleeper_46.py")


@LINUX
@pytest.mark.slow
def test_at_the_time_limit_nobody_is_left_of_spawned_workers(clean_environment, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.1")  # set aside for documentation: never answers
    command = check_setup.launchers("gloo", 2, 173.0)["spawn"]
    result = check_setup.try_launcher("spawn", command, 2, 30)
    assert result.status == FAIL and "not done after 30 s" in result.text
    assert "MASTER_ADDR" in result.remedy
    assert no_processes_with(f"{0.7 * 173.0:g}")


@LINUX
@pytest.mark.slow
@pytest.mark.parametrize("signum, status", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_stopped_check_takes_its_launcher_along(clean_environment, signum, status):
    process = subprocess.Popen([sys.executable, "-u", SCRIPT, "--timeout", "101.25"],
                               stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if "environment: " in line:
            break
    time.sleep(1)  # the first launcher is starting
    process.send_signal(signum)
    process.stdout.read()
    assert process.wait(60) == status
    assert no_processes_with(f"{0.7 * 101.25:g}")


@pytest.mark.multigpu
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_every_launcher_on_the_gpus(clean_environment):
    done = subprocess.run([sys.executable, SCRIPT, "--json", "--timeout", str(PATIENCE)],
                          capture_output=True, text=True, timeout=290)
    results = {one["name"]: one for one in json.loads(done.stdout)["results"]}
    for launcher in ("torchrun", "torch.distributed.launch", "spawn"):
        assert results[f"{launcher}, nccl"]["status"] == OK, done.stdout
    figures = results["all-reduce, nccl"]["figures"]
    assert figures["processes"] == torch.cuda.device_count() and figures["bus_GBps"] > 0
    assert results["GPUs"]["figures"]["count"] == torch.cuda.device_count()


# ----------------------------------------------------------------- the command and its status


def stub(monkeypatch, *results):
    def tries(seconds):
        yield from results

    monkeypatch.setattr(check_setup, "CHECKS", ())
    monkeypatch.setattr(check_setup, "check_launchers", tries)


def test_exit_status_follows_failures_not_warnings(monkeypatch, capsys):
    fine, poor = Result(OK, "a", "good"), Result(WARN, "b", "slow", "do this")
    bad = Result(FAIL, "c", "broken", "do that")
    stub(monkeypatch, fine, poor)
    assert check_setup.main([]) == 0
    assert capsys.readouterr().out == ("ok    a: good\nwarn  b: slow\n      -> do this\n"
                                       "2 checks: 0 FAIL, 1 warn\n")
    stub(monkeypatch, fine, poor, bad)
    assert check_setup.main([]) == 1
    assert capsys.readouterr().out.endswith("FAIL  c: broken\n      -> do that\n"
                                            "3 checks: 1 FAIL (c), 1 warn\n")


def test_json_holds_the_same(monkeypatch, capsys):
    stub(monkeypatch, Result(FAIL, "c", "broken \u90c1", "do that", {"x": 1.5}))
    assert check_setup.main(["--json"]) == 1
    assert json.loads(capsys.readouterr().out) == {
        "failed": ["c"], "warned": [],
        "results": [{"status": FAIL, "name": "c", "text": "broken \u90c1", "remedy": "do that",
                     "figures": {"x": 1.5}}]}


@pytest.mark.parametrize("words", [["--timeout", "0"], ["--timeout", "nan"], ["x"], ["--tim", "5"],
                                   ["--worker", "mpi"]])
def test_wrong_usage_is_exit_status_2(words, capsys):
    with pytest.raises(SystemExit) as stop:
        check_setup.main(words)
    assert stop.value.code == 2 and "usage:" in capsys.readouterr().err


def test_a_check_that_stumbles_does_not_hide_the_others(monkeypatch):
    def check_odd():
        raise RuntimeError("nobody expected this\nin two lines")

    stub(monkeypatch, Result(OK, "last", ""))
    monkeypatch.setattr(check_setup, "CHECKS", (check_odd, lambda: None))
    odd, last = check_setup.all_results(1)
    assert (odd.status, odd.name, last.name) == (WARN, "odd", "last")
    assert odd.text == "could not be checked (RuntimeError: nobody expected this)"


def test_without_torch_it_says_so_and_stops(monkeypatch, capsys):
    monkeypatch.setattr(check_setup, "torch", None)
    monkeypatch.setattr(check_setup, "TORCH_ERROR", OSError("libcudart.so: cannot open"))
    assert check_setup.main([]) == 1
    out = capsys.readouterr().out
    assert "FAIL  torch: cannot be imported (OSError: libcudart.so: cannot open)" in out
    assert "requirements.txt" in out and "torchrun" not in out


# -------------------------------------------------------------------------------- the checks


def test_machine_without_gpu_offers_the_cpu(monkeypatch):
    monkeypatch.setattr(check_setup, "gpu_count", lambda: 0)
    monkeypatch.setattr(check_setup, "nvidia_smi", lambda *_: None)
    result = check_setup.check_gpus()
    assert result.status == WARN and "--device cpu" in result.remedy
    assert check_setup.check_links() is check_setup.check_peer_access() is None
    assert check_setup.check_gpu_use() is None


def test_gpus_that_torch_does_not_see_fail(monkeypatch):
    monkeypatch.setattr(check_setup, "gpu_count", lambda: 0)
    monkeypatch.setattr(check_setup, "nvidia_smi", lambda *_: ["H200", "H200"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    result = check_setup.check_gpus()
    assert result.status == FAIL and "knows 2" in result.text
    assert "CUDA_VISIBLE_DEVICES=7" in result.text
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "built without CUDA" in check_setup.check_gpus().text


@pytest.mark.parametrize("visible, known, status", [(2, 2, OK), (2, 4, WARN), (1, 1, OK)])
def test_visible_and_hidden_gpus(monkeypatch, visible, known, status):
    Properties = namedtuple("Properties", "name total_memory")
    monkeypatch.setattr(check_setup, "gpu_count", lambda: visible)
    monkeypatch.setattr(check_setup, "nvidia_smi", lambda *_: ["H200"] * known)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: Properties("H200", 2**37))
    result = check_setup.check_gpus()
    assert result.status == status and f"{visible - 1}: H200, 128 GiB" in result.text
    assert ("train_single_gpu.py" in result.remedy) == (visible == 1)


@pytest.mark.parametrize("lines, status, words", [
    (["0, 3, 143771, Default", "1, 0, 143771, Default"], OK, "2 GPUs"),
    (["0, 3, 143771, Default", "1, 90000, 143771, Default"], WARN, "GPU 1 has 90000 of 143771"),
    (["0, [N/A], [N/A], Prohibited"], WARN, "compute mode Prohibited")])
def test_gpus_in_use_are_told(monkeypatch, lines, status, words):
    monkeypatch.setattr(check_setup, "nvidia_smi", lambda *_: lines)
    result = check_setup.check_gpu_use()
    assert result.status == status and words in result.text


def test_topology_table_is_read_pair_by_pair():
    assert check_setup.parse_topology(TOPOLOGY) == {
        ("GPU0", "GPU1"): "NV18", ("GPU0", "GPU2"): "SYS", ("GPU1", "GPU2"): "PHB"}
    assert check_setup.parse_topology("") == {}


@pytest.mark.parametrize("table, status", [
    (TOPOLOGY, WARN), (TOPOLOGY.replace("SYS", "NV6").replace("PHB", "PIX"), OK), ("", WARN)])
def test_links_through_the_cpu_are_a_warning(monkeypatch, table, status):
    monkeypatch.setattr(check_setup, "gpu_count", lambda: 3)
    monkeypatch.setattr(check_setup, "nvidia_smi", lambda *_: table.splitlines())
    result = check_setup.check_links()
    assert result.status == status and ("GPU0-GPU1 NV18" in result.text) == bool(table)


def test_missing_peer_access_names_the_pairs(monkeypatch):
    monkeypatch.setattr(check_setup, "gpu_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: b != 2)
    result = check_setup.check_peer_access()
    assert result.status == WARN and "0-2, 1-2" in result.text
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: True)
    assert check_setup.check_peer_access().status == OK


def test_few_cpus_for_many_gpus_are_a_warning(monkeypatch):
    monkeypatch.setattr(check_setup, "allowed_cpus", lambda: 4)
    for gpus, status in ((0, OK), (2, OK), (3, WARN)):
        monkeypatch.setattr(check_setup, "gpu_count", lambda gpus=gpus: gpus)
        assert check_setup.check_cpus().status == status


def test_a_taken_port_is_named(monkeypatch):
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        port = listener.getsockname()[1]
        monkeypatch.setattr(check_setup, "PORTS", {port: "some launcher"})
        result = check_setup.check_ports()
    assert result.status == WARN and f"{port} (of some launcher)" in result.text
    assert "--master-port" in result.remedy
    assert check_setup.check_ports().status == OK


def test_a_host_name_that_does_not_resolve(monkeypatch):
    def fail(*_):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    result = check_setup.check_host_name()
    assert result.status == WARN and "/etc/hosts" in result.remedy


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no /dev/shm")
@pytest.mark.parametrize("mebibytes, gpus, status", [
    (4096, 2, OK), (64, 0, WARN), (63, 1, WARN), (63, 2, FAIL)])
def test_little_shared_memory(monkeypatch, mebibytes, gpus, status):
    usage = namedtuple("Usage", "total used free")(2**32, 0, mebibytes * 2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    monkeypatch.setattr(check_setup, "gpu_count", lambda: gpus)
    result = check_setup.check_shared_memory()
    assert result.status == status and f"{mebibytes:,} of 4,096 MiB free" in result.text
    assert ("--shm-size" in result.remedy) == (status != OK)


def test_a_temporary_folder_that_cannot_be_written(monkeypatch, tmp_path):
    assert check_setup.check_temporary_folder().status in (OK, WARN)
    monkeypatch.setattr(check_setup.tempfile, "tempdir", str(tmp_path / "gone"))
    result = check_setup.check_temporary_folder()
    assert result.status == FAIL and "TMPDIR" in result.remedy


def test_confusing_variables_are_listed_with_their_effect(clean_environment, monkeypatch):
    assert check_setup.check_environment().status == OK
    for name, value in {"RANK": "3", "CUDA_VISIBLE_DEVICES": "", "NCCL_P2P_DISABLE": "1",
                        "TORCH_NCCL_TRACE": "x", "RANKING": "unrelated"}.items():
        monkeypatch.setenv(name, value)
    result = check_setup.check_environment()
    assert result.status == WARN
    assert result.text == "RANK=3 CUDA_VISIBLE_DEVICES= NCCL_P2P_DISABLE=1 TORCH_NCCL_TRACE=x"
    assert "CUDA_VISIBLE_DEVICES hides GPUs" in result.remedy


def test_launchers_are_tried_per_backend_and_the_best_rate_is_told(monkeypatch):
    rates = {"gloo": [1.0, 3.0, 2.0], "nccl": [1.0, 4.0, 2.0]}

    def pretend(name, command, count, seconds):
        backend = name.split(", ")[1]
        rate = rates[backend].pop(0)
        return Result(OK, name, "", "", {"processes": count, "bytes": 2**20, "seconds": 1.0,
                                         "algorithm_GBps": rate, "bus_GBps": rate})

    monkeypatch.setattr(check_setup, "try_launcher", pretend)
    monkeypatch.setattr(check_setup, "gpu_count", lambda: 8)
    results = list(check_setup.check_launchers(9))
    assert [one.name for one in results] == [
        f"{launcher}, {backend}" for backend in ("gloo", "nccl")
        for launcher in ("torchrun", "torch.distributed.launch", "spawn", "all-reduce")]
    assert results[3].figures["bus_GBps"] == 3.0 and results[3].status == OK
    assert results[7].figures["processes"] == 8 and results[7].status == WARN  # slow for GPUs


@pytest.mark.parametrize("output, words", [
    ("DistNetworkError: port: 29500, EADDRINUSE, address already in use", "another job holds"),
    ("torch.AcceleratorError: CUDA error: invalid device ordinal", "CUDA_VISIBLE_DEVICES"),
    ("Error while creating shared memory segment /dev/shm/nccl-x (size 9) NCCL", "--shm-size"),
    ("torch.OutOfMemoryError: CUDA out of memory. NCCL", "nvidia-smi"),
    ("DistBackendError: NCCL error in: x.cpp:9, unhandled system error", "NCCL_DEBUG=INFO"),
    ("ValueError: no pattern knows this", "run it alone")])
def test_a_failed_trys_words_lead_to_a_remedy(monkeypatch, output, words):
    report = ("torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
              "  error_file: <N/A>\n  traceback : To enable traceback see: https://x\n")
    found = (1, f"start\n{output}\n{report}", 2.0)
    monkeypatch.setattr(check_setup, "run_limited", lambda *_: found)
    result = check_setup.try_launcher("x", ["python", "-c", ""], 2, 5)
    assert result.status == FAIL and words in result.remedy
    assert result.text == f"exit status 1: {output}"


def test_a_report_is_found_behind_a_launchers_prefix():
    output = 'W1130 note\n[rank0]: check_setup report: {"bytes": 3}\nbye\n'
    assert check_setup.find_report(output) == {"bytes": 3}
    assert check_setup.find_report("nothing") is None
