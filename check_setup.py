"""Why does multi-GPU training not work here? Checks this machine, one line per question.

    python check_setup.py              # about a minute; also without a GPU
    python check_setup.py --json       # the same for a bug report or a script

Each line begins with ok, warn (works, but worse than it could) or FAIL, and says what to do about
it. Exit status: 0 nothing FAILs, 1 something does, 2 wrong usage.
"""

from __future__ import annotations  # so that a Python too old for the rest can say so

import argparse
import itertools
import json
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta

from utils import TIMED_OUT, allowed_cpus, readable, run_limited

try:
    import torch
    import torch.distributed as dist
    TORCH_ERROR: Exception | None = None
except Exception as error:  # a broken installation is what this script is there to explain
    torch, TORCH_ERROR = None, error  # type: ignore[assignment]

OK, WARN, FAIL = "ok", "warn", "FAIL"
OLDEST_PYTHON = (3, 10)
TRY_SECONDS = 60.0  # what a launcher may take to start two processes and let them talk
PORTS = {29500: "torchrun and torch.distributed.launch", 12355: "the spawn script"}
# Bytes that the all-reduce is timed with: large enough for the link, not the start-up, to count.
MESSAGE = {"gloo": 2**24, "nccl": 2**28}
ROUNDS = 5  # all-reduces that are timed, after one to warm up
SLOW_LINK = 5.0  # GB/s; below, GPUs are slower together than the oldest PCIe slot would allow

# Environment variables that surprise: a pattern, and what such a variable does.
CONFUSING = (
    ("RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_RANK",
     "makes a script believe that a launcher started it: unset it, the launcher sets its own"),
    ("MASTER_ADDR|MASTER_PORT",
     "says where the spawn script's processes meet: unset it unless that is meant"),
    ("CUDA_VISIBLE_DEVICES", "hides GPUs: unset it to see all"),
    ("CUDA_LAUNCH_BLOCKING", "makes each kernel wait and forbids CUDA graphs: unset it"),
    ("(TORCH_)?NCCL_.*", "changes how GPUs talk: unset it unless that is meant"),
    ("GLOO_.*", "changes how CPU processes talk: unset it unless that is meant"),
    ("TORCHELASTIC_.*", "comes from a launcher: start this check without one"),
)

# What in the output of a failed try points to a remedy.
REMEDIES = (
    ("address already in use|EADDRINUSE", "another job holds the port: give it another one "
     "(MASTER_PORT, --master-port, torchrun --standalone)"),
    ("client socket has|TCPStore", "rank 0 is not reached where it should listen: unset "
     "MASTER_ADDR and MASTER_PORT, or give an address of this machine (127.0.0.1)"),
    ("unable to find address for", "there is no network interface of that name: unset "
     "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, or name one that `ip address` lists"),
    ("gaierror|name or service not known|resolve|gloo.*connect|connectFullMesh",
     "the machine does not reach itself by its name: put the name into /etc/hosts, or set "
     "GLOO_SOCKET_IFNAME=lo and NCCL_SOCKET_IFNAME=lo on a single machine"),
    ("/dev/shm|shm_open|no space left|bus error|SIGBUS", "shared memory is too small: docker run "
     "--shm-size=1g or --ipc=host"),
    ("out of memory", "another program uses the GPU's memory: see nvidia-smi"),
    ("invalid device ordinal|busy or unavailable", "the GPU is hidden or taken: see "
     "CUDA_VISIBLE_DEVICES and the compute mode in nvidia-smi"),
    ("driver version is insufficient|no kernel image", "driver, GPU and this build of torch do "
     "not fit each other: update the driver or install another build"),
    ("NCCL|nccl", "run once more with NCCL_DEBUG=INFO for NCCL's own words; if NCCL_P2P_DISABLE=1 "
     "helps, direct access between the GPUs is broken (IOMMU, ACS, a virtual machine)"),
)


@dataclass
class Result:
    """The answer to one question: `status` is OK, WARN or FAIL, `remedy` what to do about it."""

    status: str
    name: str
    text: str
    remedy: str = ""
    figures: dict = field(default_factory=dict)


# ---- versions and devices --------------------------------------------------------------------

def check_python() -> Result:
    text = f"{platform.python_version()} on {platform.platform()}"
    if sys.version_info < OLDEST_PYTHON:
        return Result(FAIL, "python", text, "these scripts need Python 3.10 or newer")
    return Result(OK, "python", text)


def check_torch() -> Result:
    """torch can be imported, and which CUDA and NCCL it was built with."""
    if torch is None:
        return Result(FAIL, "torch", f"cannot be imported ({brief(TORCH_ERROR)})",
                      "install the requirements: pip install -r requirements.txt")
    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    text = f"{torch.__version__}, {cuda}"
    if torch.version.cuda and dist.is_available() and dist.is_nccl_available():
        text += f", NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
    if not dist.is_available():
        return Result(FAIL, "torch", f"{text}, built without torch.distributed",
                      "install an official build: https://pytorch.org/get-started/locally")
    return Result(OK, "torch", text)


def check_torchvision() -> Result:
    try:
        import torchvision
    except Exception as error:  # a version that does not fit torch raises RuntimeError
        return Result(FAIL, "torchvision", f"cannot be imported ({brief(error)})",
                      "install the version that belongs to this torch: pip install --upgrade "
                      "torch torchvision")
    return Result(OK, "torchvision", torchvision.__version__)


def check_gpus() -> Result:
    """The GPUs that torch sees, against those that the driver knows."""
    count = gpu_count()
    known = nvidia_smi("--query-gpu=name", "--format=csv,noheader") or []
    if count == 0 and not known:
        return Result(WARN, "GPUs", "none", "training works on the CPU with --device cpu")
    if count == 0:
        why = ("this torch is built without CUDA" if not torch.version.cuda else
               f"CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'is not set')}, "
               f"torch wants CUDA {torch.version.cuda}")
        return Result(FAIL, "GPUs", f"the driver knows {len(known)}, torch sees none ({why})",
                      "install a CUDA build of torch that fits the driver (see nvidia-smi), and "
                      "unset CUDA_VISIBLE_DEVICES")
    names = [f"{i}: {gpu.name}, {gpu.total_memory / 2**30:.0f} GiB"
             for i, gpu in enumerate(map(torch.cuda.get_device_properties, range(count)))]
    figures = {"count": count, "names": names}
    if count < len(known):
        return Result(WARN, "GPUs", f"{count} of {len(known)} visible; {'; '.join(names)}",
                      "CUDA_VISIBLE_DEVICES hides the others: unset it to use them", figures)
    alone = "one GPU: train_single_gpu.py is the script for it" if count == 1 else ""
    return Result(OK, "GPUs", "; ".join(names), alone, figures)


def check_gpu_use() -> Result | None:
    """GPUs that are reserved, or that another program fills."""
    lines = nvidia_smi("--query-gpu=index,memory.used,memory.total,compute_mode",
                       "--format=csv,noheader,nounits")
    if not lines:
        return None
    problems = []
    for line in lines:
        index, used, total, mode = (cell.strip() for cell in line.split(","))
        if mode == "Prohibited":
            problems.append(f"GPU {index} has compute mode {mode}")
        if used.isdecimal() and total.isdecimal() and int(used) > 0.2 * int(total):
            problems.append(f"GPU {index} has {used} of {total} MiB in use")
    if problems:
        return Result(WARN, "GPU use", "; ".join(problems), "nvidia-smi shows by whom; choose "
                      "other GPUs with CUDA_VISIBLE_DEVICES, or end what is left over")
    return Result(OK, "GPU use", f"{len(lines)} GPUs, nothing large runs there")


def check_links() -> Result | None:
    """How the GPUs are wired, as nvidia-smi tells it."""
    if gpu_count() < 2:
        return None
    links = parse_topology("\n".join(nvidia_smi("topo", "-m") or ()))
    if not links:
        return Result(WARN, "links", "unknown: nvidia-smi topo -m says nothing",
                      "the bandwidth below tells")
    text = ", ".join(f"{a}-{b} {link}" for (a, b), link in links.items())
    slow = [link for link in links.values() if link in ("SYS", "NODE", "PHB")]
    if slow:
        return Result(WARN, "links", text, "PHB, NODE and SYS lead through the CPU: use GPUs that "
                      "share a switch or NVLink where there is a choice (CUDA_VISIBLE_DEVICES)",
                      {"links": text})
    return Result(OK, "links", f"{text} (NV: NVLink, PIX and PXB: PCIe switch)", "",
                  {"links": text})


def parse_topology(text: str) -> dict[tuple[str, str], str]:
    """{("GPU0", "GPU1"): "NV18", ...} from the table of `nvidia-smi topo -m`, each pair once."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)  # the head line is underlined
    rows = [line.split() for line in text.splitlines()]
    heads = next((row for row in rows if row[:1] == ["GPU0"] and row[1:2] != ["X"]), [])
    columns = [name for name in heads if re.fullmatch(r"GPU\d+", name)]
    links = {}
    for row in rows:
        if row and row[0] in columns and row is not heads:
            for other, link in zip(columns, row[1:], strict=False):
                if columns.index(row[0]) < columns.index(other):
                    links[row[0], other] = link
    return links


def check_peer_access() -> Result | None:
    """Whether each GPU can read the memory of each other one."""
    count = gpu_count()
    if count < 2:
        return None
    without = [f"{a}-{b}" for a, b in itertools.combinations(range(count), 2)
               if not torch.cuda.can_device_access_peer(a, b)]
    if without:
        return Result(WARN, "peer access", f"none between GPUs {', '.join(without)}",
                      "gradients go through host memory, which is slower; in a virtual machine "
                      "or with IOMMU / ACS switched on that is to be expected")
    return Result(OK, "peer access", f"between all {count} GPUs")


# ---- the machine -----------------------------------------------------------------------------

def check_cpus() -> Result:
    cpus, gpus = allowed_cpus(), gpu_count()
    text = f"{cpus} of {os.cpu_count()} allowed" + (f", {cpus / gpus:g} per GPU" if gpus else "")
    if cpus < 2 * gpus:
        return Result(WARN, "CPUs", text, "decoding images may keep the GPUs waiting: allow more "
                      "(taskset, docker --cpus, SLURM's --cpus-per-task)")
    return Result(OK, "CPUs", text, "", {"allowed": cpus})


def check_ports() -> Result:
    """The ports at which processes meet by default."""
    taken = [port for port in PORTS if not is_free(port)]
    if taken:
        text = ", ".join(f"{port} (of {PORTS[port]})" for port in taken)
        return Result(WARN, "ports", f"taken: {text}", "another job runs here: torchrun "
                      "--standalone finds a free port, so does the spawn script; else give "
                      "--master-port")
    return Result(OK, "ports", f"{' and '.join(map(str, PORTS))} are free")


def check_host_name() -> Result:
    """Processes find each other by this machine's name: it must resolve."""
    name = socket.gethostname()
    try:
        address = socket.getaddrinfo(name, None)[0][4][0]
    except OSError as error:
        return Result(WARN, "host name", f"{name} does not resolve ({brief(error)})",
                      f"add it to /etc/hosts (127.0.0.1 {name}); on one machine "
                      "GLOO_SOCKET_IFNAME=lo helps too")
    return Result(OK, "host name", f"{name} is {address}")


def check_shared_memory() -> Result | None:
    """Loader workers and NCCL exchange data there; containers start with 64 MiB."""
    if not os.path.isdir("/dev/shm"):
        return None
    usage = shutil.disk_usage("/dev/shm")
    text = f"{usage.free / 2**20:,.0f} of {usage.total / 2**20:,.0f} MiB free"
    figures = {"free": usage.free, "total": usage.total}
    remedy = "docker run --shm-size=1g or --ipc=host; else train with --workers 0"
    if usage.free < 2**26 and gpu_count() > 1:
        return Result(FAIL, "shared memory", text, remedy, figures)
    if usage.free < 2**29:
        return Result(WARN, "shared memory", text, remedy, figures)
    return Result(OK, "shared memory", text, "", figures)


def check_temporary_folder() -> Result:
    """The initial weights pass through it from rank 0 to the others."""
    try:
        with tempfile.NamedTemporaryFile() as file:
            file.write(bytes(2**20))
            file.flush()
        free = shutil.disk_usage(tempfile.gettempdir()).free
    except OSError as error:
        return Result(FAIL, "temporary folder", f"cannot be written ({brief(error)})",
                      "free space there, or name another folder: TMPDIR=/path")
    text = f"{tempfile.gettempdir()} is writable, {free / 2**30:.1f} GiB free"
    if free < 2**28:
        return Result(WARN, "temporary folder", text, "free space there, or name another folder: "
                      "TMPDIR=/path")
    return Result(OK, "temporary folder", text)


def check_environment() -> Result:
    """Variables that change how processes find each other, often left over from another job."""
    found, remedies = [], []
    for pattern, effect in CONFUSING:
        names = sorted(name for name in os.environ if re.fullmatch(pattern, name))
        found += [f"{name}={os.environ[name]}" for name in names]
        remedies += [f"{', '.join(names)} {effect}"] if names else []
    if found:
        return Result(WARN, "environment", " ".join(found), "; ".join(remedies))
    return Result(OK, "environment", "nothing set that changes how processes find each other")


# ---- the launchers ---------------------------------------------------------------------------

def launchers(backend: str, count: int, seconds: float) -> dict[str, list[str]]:
    """{name: command} of the ways to start `count` workers, as training is started with them."""
    # The workers give up first: they know more of what went wrong than that it took too long.
    worker = [os.path.abspath(__file__), "--worker", backend, "--timeout", f"{0.7 * seconds:g}"]
    python = sys.executable
    return {
        "torchrun": [python, "-m", "torch.distributed.run", "--standalone",
                     f"--nproc_per_node={count}", *worker],
        "torch.distributed.launch": [python, "-m", "torch.distributed.launch",
                                     f"--nproc_per_node={count}", f"--master_port={any_port()}",
                                     *worker],
        "spawn": [python, *worker, "--spawn", str(count)],
    }


def check_launchers(seconds: float) -> Iterator[Result]:
    """Each launcher with two processes on the CPU, and with all GPUs where there are several.

    Yields a Result per launcher and backend, and after them one for the all-reduce's bandwidth.
    """
    tries = [("gloo", 2)] + ([("nccl", gpu_count())] if gpu_count() > 1 else [])
    for backend, count in tries:
        reports = []
        for name, command in launchers(backend, count, seconds).items():
            result = try_launcher(f"{name}, {backend}", command, count, seconds)
            reports += [result.figures] if result.status == OK else []
            yield result
        if reports:
            yield bandwidth_result(backend, reports)


def try_launcher(name: str, command: Sequence[str], count: int, seconds: float) -> Result:
    """Start `count` workers by a launcher's command; they must find each other and add up."""
    status, output, took = run_limited(command, seconds)
    report = find_report(output)
    if status == 0 and report is not None:
        return Result(OK, name, f"{count} processes found each other, {took:.0f} s", "", report)
    words = last_words(output)
    if status == TIMED_OUT:
        text = f"not done after {seconds:g} s"
        remedy = ("the processes do not reach each other, or the machine is overloaded (--timeout "
                  "gives more time)")
        if "MASTER_ADDR" in os.environ:  # torchrun sets its own, the spawn script respects it
            remedy += "; MASTER_ADDR is set: unset it, or is rank 0 to be found there?"
    else:
        text, remedy = f"exit status {status}", "run it alone to see more: " + " ".join(command)
    for pattern, advice in REMEDIES:
        if re.search(pattern, output, re.IGNORECASE):
            remedy = advice
            break
    return Result(FAIL, name, f"{text}{': ' + words if words else ''}", remedy)


def bandwidth_result(backend: str, reports: Sequence[dict]) -> Result:
    """The best of the launchers' all-reduces; the bus figure compares with a link's data sheet."""
    best = max(reports, key=lambda report: report["bus_GBps"])
    text = (f"{best['bytes'] / 2**20:.0f} MiB over {best['processes']} processes in "
            f"{best['seconds'] * 1000:.2f} ms: {best['algorithm_GBps']:.2f} GB/s, "
            f"{best['bus_GBps']:.2f} GB/s on the bus")
    if backend == "nccl" and best["bus_GBps"] < SLOW_LINK:
        return Result(WARN, f"all-reduce, {backend}", text, "slow for GPUs: see links and peer "
                      "access above, and NCCL_DEBUG=INFO for the way that NCCL takes", best)
    return Result(OK, f"all-reduce, {backend}", text, "", best)


def find_report(output: str) -> dict | None:
    """What rank 0 of the workers reported, from all that a launcher printed."""
    for line in output.splitlines():
        _, mark, text = line.partition("check_setup report: ")
        if mark:
            return json.loads(text)
    return None


def last_words(output: str) -> str:
    """The line of a failed run that most likely says why: the last that names an error."""
    # Not torchrun's report, which only says that a worker failed, nor a stack of C++ names.
    noise = r"elastic|ChildFailed|error_file|traceback|frame #"
    lines = [line.strip() for line in output.splitlines()
             if line.strip() and not re.search(noise, line)]
    errors = [line for line in lines if re.search(r"(Error|error)\b", line)]
    return (errors or lines or [""])[-1][:300]


# ---- the worker, one of several processes ----------------------------------------------------

def worker(backend: str, seconds: float) -> None:
    """Join the group that the environment describes, all-reduce, check the sum, report the time.

    A peer that stays silent for `seconds` is an error.

    Rank 0 prints `check_setup report: {json}`. Raises RuntimeError where the sum is wrong.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group(backend, timeout=timedelta(seconds=seconds),
                            device_id=device if backend == "nccl" else None)
    values = torch.full((MESSAGE[backend] // 4,), float(rank + 1), device=device)
    dist.all_reduce(values)
    expected = world_size * (world_size + 1) / 2
    if not bool((values == expected).all()):
        raise RuntimeError(f"the all-reduce of rank {rank} gave {values.unique().tolist()[:5]} "
                           f"in place of {expected}: the link between the GPUs loses data")
    seconds = time_all_reduce(values.zero_())
    dist.destroy_process_group()
    if rank == 0:
        size = values.numel() * 4
        rate = size / seconds / 1e9
        # A ring sends each byte 2 (n - 1) / n times over each link: that is what a link carries.
        print("check_setup report: " + json.dumps({
            "processes": world_size, "bytes": size, "seconds": seconds, "algorithm_GBps": rate,
            "bus_GBps": rate * 2 * (world_size - 1) / world_size}), flush=True)


def time_all_reduce(values: torch.Tensor) -> float:
    """Seconds of one all-reduce of a tensor, the mean over ROUNDS."""
    for number in range(ROUNDS + 1):
        if number == 1:
            synchronize(values)
            began = time.perf_counter()
        dist.all_reduce(values)
    synchronize(values)
    return (time.perf_counter() - began) / ROUNDS


def synchronize(values: torch.Tensor) -> None:
    """Wait until the device has done its work; CPU collectives return when they are done."""
    if values.is_cuda:
        torch.cuda.synchronize(values.device)


def spawned_worker(rank: int, world_size: int, backend: str, seconds: float) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    guarded_worker(backend, seconds)


def guarded_worker(backend: str, seconds: float) -> None:
    """The worker, ending when its launcher ends: a killed check leaves nobody behind."""
    from multi_train_utils.safety.ending import watch_parent
    watch_parent()
    worker(backend, seconds)


def spawn_workers(world_size: int, backend: str, seconds: float) -> int:
    """Start the workers as the spawn script starts its processes; returns the exit status."""
    from multiprocessing.connection import wait

    import torch.multiprocessing as mp

    from multi_train_utils.safety.rendezvous import host_store
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    store = host_store()  # the workers meet here
    context = mp.get_context("spawn")
    processes = [context.Process(target=spawned_worker, args=(rank, world_size, backend, seconds))
                 for rank in range(world_size)]
    for process in processes:
        process.start()
    # The first that fails ends the others, which would wait for it.
    while any(process.is_alive() for process in processes):
        wait([process.sentinel for process in processes if process.is_alive()])
        if any(process.exitcode for process in processes):
            for process in processes:
                process.terminate()
    del store
    return int(any(process.exitcode for process in processes))


# ---- small helpers ---------------------------------------------------------------------------

def gpu_count() -> int:
    """Number of GPUs that torch sees; makes no context on them, so that workers find them free."""
    return torch.cuda.device_count() if torch is not None else 0


def nvidia_smi(*arguments: str) -> list[str] | None:
    """Lines that nvidia-smi prints, None where it is not there or fails."""
    try:
        done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True,
                              timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.splitlines() if done.returncode == 0 else None


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        # As torch's own store does: a connection that has just ended does not block the port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True


def any_port() -> int:
    """A port that nobody uses at the moment."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def brief(error: BaseException) -> str:
    """An exception in one line."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


# ---- the command -----------------------------------------------------------------------------

CHECKS: tuple[Callable[[], Result | None], ...] = (
    check_python, check_torch, check_torchvision, check_gpus, check_gpu_use, check_links,
          check_peer_access, check_cpus, check_ports, check_host_name, check_shared_memory,
          check_temporary_folder, check_environment)


def all_results(seconds: float) -> Iterator[Result]:
    """The result of every check that applies here, as they come."""
    for check in CHECKS:
        try:
            result = check()
        except Exception as error:  # one check that stumbles must not hide what the others find
            result = Result(WARN, check.__name__.removeprefix("check_"),
                            f"could not be checked ({brief(error)})")
        if result is None:
            continue
        yield result
        if check is check_torch and result.status == FAIL:
            return  # without torch the rest has no meaning
    yield from check_launchers(seconds)


def show(result: Result) -> None:
    """A line for the answer, and one for what to do about it."""
    lines = [f"{result.status:<4}  {result.name}: {result.text}"]
    lines += [f"      -> {result.remedy}"] if result.remedy else []
    print("\n".join(readable(line, sys.stdout) for line in lines), flush=True)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command's options as a namespace; exit status 2 for wrong usage."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object in place of lines")
    parser.add_argument("--timeout", type=float, default=TRY_SECONDS, metavar="S",
                        help="seconds that each launcher may take (default: %(default)g)")
    # What the launchers under test start.
    parser.add_argument("--worker", choices=["gloo", "nccl"], help=argparse.SUPPRESS)
    parser.add_argument("--spawn", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--local-rank", "--local_rank", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if not args.timeout > 0:
        parser.error(f"--timeout is {args.timeout:g}, but must be greater than 0")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv`; returns the exit status."""
    args = parse_args(argv)
    if args.worker and args.spawn:
        return spawn_workers(args.spawn, args.worker, args.timeout)
    if args.worker:
        guarded_worker(args.worker, args.timeout)
        return 0
    # As an exception, so that a launcher under test is ended on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    results = []
    for result in all_results(args.timeout):
        results.append(result)
        if not args.json:
            show(result)
    failed = [result.name for result in results if result.status == FAIL]
    warned = [result.name for result in results if result.status == WARN]
    if args.json:
        print(json.dumps({"failed": failed, "warned": warned,
                          "results": [asdict(result) for result in results]}, indent=2))
    else:
        print(f"{len(results)} checks: {len(failed)} FAIL"
              f"{' (' + '; '.join(failed) + ')' if failed else ''}, {len(warned)} warn")
    return int(bool(failed))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
