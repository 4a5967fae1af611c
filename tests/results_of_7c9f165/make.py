"""Makes what lies beside this file with a checkout of version 7c9f165, not with a later one:

    git worktree add /tmp/7c9f165 7c9f165
    python tests/results_of_7c9f165/make.py /tmp/7c9f165

under a host name that says nothing (`unshare -u`, then `hostname box`), since it goes into the name
of the run's folder.

    done/              what a run of two epochs left
    middle/            the same gone on with to four epochs, and stopped by SIGTERM in the third one
    reached.pth.xz     fc after four epochs, gone on with from done/ by one and by two processes
    predictions.json   what predict.py said in done/ about the validation images
    arithmetic.json    what arithmetic() below gave there

Random weights do not compress. So the run trains fc alone, from zeros, behind a network whose
weights are one sequence of signs over and over: channels differ, and 45 MB become 20 KiB.
"""

import hashlib
import json
import lzma
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torchvision
from PIL import Image
from torchvision import transforms

HERE = Path(__file__).resolve().parent
OPTIONS = ("--data-path", "flowers", "--device", "cpu", "--model", "resnet18", "--image-size", "32",
           "--batch-size", "6", "--workers", "1", "--freeze-layers", "--lr", "0.003")
THREADS = {"OMP_NUM_THREADS": "2"}
SINGLE = ("train_single_gpu.py",)
LAUNCH = ("-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1",
          "--nproc_per_node=2", "train_multi_gpu_using_launch.py")
PERIOD = 1021  # a prime: no two channels begin at the same place of the sequence


def start_weights():
    """The state dict that training starts from."""
    squares = {n * n % PERIOD for n in range(1, PERIOD)}
    signs = torch.tensor([0.0 if n == 0 else 1.0 if n in squares else -1.0 for n in range(PERIOD)])
    state = torchvision.models.resnet18(weights=None, num_classes=5).state_dict()
    for name, value in state.items():
        if value.dim() == 4:
            repeated = signs.repeat(-(-value.numel() // PERIOD))[:value.numel()]
            value.copy_(repeated.view_as(value) * math.sqrt(2 / value[0].numel()))
        elif name.startswith("fc."):
            value.zero_()
        elif name.endswith("bn2.weight"):
            value.fill_(0.5)  # else the features grow with each block
    return state


def arithmetic(flowers, weights):
    """A sha256 each of the drawn images' files, and of what training fc on them gives here.

    By torchvision's network and transforms, which no change of this project touches. Other versions
    of torch and other CPUs round differently; where the print is the same, so are all results.
    """
    files, features, threads = hashlib.sha256(), [], torch.get_num_threads()
    view = transforms.Compose([
        transforms.Resize(37), transforms.CenterCrop(32), transforms.ToTensor(),
        transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))])
    images, labels = [], []
    for label, folder in enumerate(sorted(Path(flowers).iterdir())):
        for path in sorted(folder.iterdir()):
            files.update(path.read_bytes())
            with Image.open(path) as image:
                images.append(view(image.convert("RGB")))
            labels.append(label)
    net = torchvision.models.resnet18(weights=None, num_classes=5).eval()
    net.load_state_dict(torch.load(weights, map_location="cpu", weights_only=True))
    optimizer = torch.optim.SGD(net.fc.parameters(), lr=0.003, momentum=0.9, weight_decay=0.005)
    net.fc.register_forward_pre_hook(lambda _, given: features.append(given[0].detach().clone()))
    torch.set_num_threads(int(THREADS["OMP_NUM_THREADS"]))
    try:
        for batch in torch.arange(len(images)).split(6):
            loss = torch.nn.functional.cross_entropy(net(torch.stack([images[i] for i in batch])),
                                                     torch.tensor([labels[i] for i in batch]))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    finally:
        torch.set_num_threads(threads)
    sums = hashlib.sha256()
    for value in (*features, net.fc.weight, net.fc.bias):
        sums.update(value.detach().numpy().tobytes())
    return {"images": files.hexdigest(), "results": sums.hexdigest()}


def pack(folder, target):
    """Copy of a folder that a run left, its weights compressed; without model-{epoch}.pth."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(folder / "runs", target / "runs")
    shutil.copy(folder / "class_indices.json", target)
    (target / "weights").mkdir()
    for name in ("best.pth", "checkpoint.pth"):
        compress((folder / "weights" / name).read_bytes(), target / "weights" / f"{name}.xz")


def compress(content, path):
    path.write_bytes(lzma.compress(content, preset=9 | lzma.PRESET_EXTREME))


def unpack(name, target):
    """A packed folder as the run left it."""
    shutil.copytree(HERE / name, target)
    for path in target.glob("weights/*.xz"):
        path.with_suffix("").write_bytes(lzma.decompress(path.read_bytes()))
        path.unlink()


def words(checkout, *given):
    return [sys.executable, *(str(checkout / word) if word.endswith(".py") else word
                              for word in given)]


def run(checkout, folder, *given):
    """A command of the checkout in a folder that holds the images; returns what it printed."""
    return subprocess.run(words(checkout, *given), cwd=folder, env=os.environ | THREADS, check=True,
                          text=True, stdout=subprocess.PIPE).stdout


def stop_in_the_middle(checkout, folder):
    """Go on in a copy of the folder until a SIGTERM comes within an epoch; returns the copy."""
    for delay in range(100):
        copy = folder.with_name(f"middle{delay}")
        shutil.copytree(folder, copy, symlinks=True)
        process = subprocess.Popen(
            words(checkout, *SINGLE, *OPTIONS, "--epochs", "4", "--resume", "auto"), cwd=copy,
            env=os.environ | THREADS, text=True, stdout=subprocess.PIPE)
        while not process.stdout.readline().startswith("TensorBoard: "):
            pass
        time.sleep(0.02 * delay)
        process.send_signal(signal.SIGTERM)
        process.communicate()
        state = torch.load(copy / "weights" / "checkpoint.pth", weights_only=True)
        if state["epoch"] == 2 and 12 <= state["position"] <= 48:
            return copy
        shutil.rmtree(copy)
    raise RuntimeError("no signal came in the middle of an epoch")


def make(checkout, folder):
    sys.path.insert(0, str(checkout))
    from prepare_data import draw_sample_set
    from utils import read_split_data

    draw_sample_set(folder / "flowers", images=75, size=48)
    done = folder / "done"
    done.mkdir()
    (done / "flowers").symlink_to("../flowers")
    torch.save(start_weights(), done / "start.pth")
    run(checkout, done, *SINGLE, *OPTIONS, "--weights", "start.pth", "--epochs", "2")
    (done / "start.pth").unlink()
    pack(done, HERE / "done")
    _, (images, _), _ = read_split_data("flowers", class_indices=None, quiet=True)
    said = run(checkout, done, "predict.py", "--device", "cpu", "--json", "--top-k", "5", *images)
    (HERE / "predictions.json").write_text(said)
    prints = arithmetic(folder / "flowers", done / "weights" / "best.pth")
    (HERE / "arithmetic.json").write_text(json.dumps(prints, indent=2) + "\n")

    middle = stop_in_the_middle(checkout, done)
    pack(middle, HERE / "middle")
    reached = {}
    for name, script, start in (("single", SINGLE, done), ("single", SINGLE, done),
                                ("single", SINGLE, middle), ("launch", LAUNCH, done),
                                ("launch", LAUNCH, done)):
        copy = folder / "copy"
        shutil.copytree(start, copy, symlinks=True)
        run(checkout, copy, *script, *OPTIONS, "--epochs", "4", "--resume", "auto")
        state = torch.load(copy / "weights" / "model-3.pth", weights_only=True)
        found = {key: state[key] for key in ("fc.weight", "fc.bias")}
        assert all(torch.equal(value, reached.setdefault(name, found)[key])
                   for key, value in found.items()), f"{name}: not the same twice"
        shutil.rmtree(copy)
    torch.save(reached, folder / "reached.pth")
    compress((folder / "reached.pth").read_bytes(), HERE / "reached.pth.xz")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)
        make(Path(sys.argv[1]).resolve(), Path(scratch))
