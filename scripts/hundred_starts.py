"""Start and end the two-process run again and again: none may hang or leave anything behind.

    python scripts/hundred_starts.py                  # on the CPU; takes a quarter of an hour
    python scripts/hundred_starts.py --device cuda    # on two GPUs

Every other start is by torchrun, the rest by the spawn script. After each: exit status 0 within the
limit, no process, no file in the temporary folder, no listening port that was not there before.
Ends with status 1 where anything of that failed.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from prepare_data import draw_sample_set  # noqa: E402

MARK = "HUNDRED_STARTS"  # in the environment of every process of a start
# Empty folders of torch's and torchrun's own, which they make anew or share between runs.
NOT_OURS = ("torchinductor_", "torchelastic_")


def words(launcher: str, options: argparse.Namespace, data: str, output: str) -> list[str]:
    """The command of one start."""
    shared = ["--device", options.device, "--data-path", data, "--output-dir", output,
              "--model", "resnet18", "--image-size", "32", "--batch-size", "4", "--epochs", "1",
              "--workers", "1", "--weights", ""]
    if launcher == "spawn":
        return [sys.executable, str(ROOT / "train_multi_gpu_using_spawn.py"), "--world-size", "2",
                *shared]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
            str(ROOT / "train_multi_gpu_using_launch.py"), *shared]


def marked(number: int) -> list[int]:
    """Process ids that carry the mark of start ``number``."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={number}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:
            pass  # gone, or somebody else's
    return found


def listening() -> set[str]:
    """Local addresses, as the kernel writes them, on which somebody listens for TCP."""
    lines = [line.split() for name in ("tcp", "tcp6") if Path(f"/proc/net/{name}").exists()
             for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return {line[1] for line in lines if line[3] == "0A"}


def start(number: int, launcher: str, options: argparse.Namespace, data: str) -> list[str]:
    """What was wrong with one start, a list of texts."""
    before = listening()
    with tempfile.TemporaryDirectory(prefix="hundred_starts_") as folder:
        temporary, log = Path(folder, "tmp"), Path(folder, "log")
        temporary.mkdir()
        environment = os.environ | {MARK: str(number), "TMPDIR": str(temporary)}
        with open(log, "w") as file:
            process = subprocess.Popen(words(launcher, options, data, folder), cwd=folder,
                                       env=environment, stdin=subprocess.DEVNULL, stdout=file,
                                       stderr=file, start_new_session=True)
            try:
                status: int | None = process.wait(options.limit)
            except subprocess.TimeoutExpired:
                status = None
        time.sleep(0.2)
        left = marked(number)
        wrong = [] if status == 0 else [
            f"{'hangs' if status is None else f'exit status {status}'}:\n{log.read_text()}"]
        wrong += [f"processes left: {left}"] if left else []
        for pid in left:
            os.kill(pid, 9)
        process.wait()
        files = [str(path.relative_to(temporary)) for path in temporary.rglob("*")
                 if not path.relative_to(temporary).parts[0].startswith(NOT_OURS)]
        wrong += [f"files left: {files}"] if files else []
        ports = listening() - before
        wrong += [f"ports left: {ports}"] if ports else []
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100, metavar="N")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--limit", type=float, default=120, metavar="S",
                        help="seconds after which a start counts as hanging (120)")
    options = parser.parse_args()
    failed, seconds = 0, list[float]()
    with tempfile.TemporaryDirectory(prefix="hundred_starts_data_") as data:
        draw_sample_set(os.path.join(data, "set"), images=50, size=48)
        for number in range(options.count):
            launcher = ("torchrun", "spawn")[number % 2]
            began = time.monotonic()
            wrong = start(number, launcher, options, os.path.join(data, "set"))
            seconds.append(time.monotonic() - began)
            failed += bool(wrong)
            print(f"{number + 1}: {launcher}, {seconds[-1]:.1f} s: {'; '.join(wrong) or 'ok'}",
                  flush=True)
    print(f"{options.count - failed} of {options.count} starts ended well and left nothing; "
          f"the longest took {max(seconds):.1f} s")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
