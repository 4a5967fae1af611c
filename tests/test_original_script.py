"""A script written for the original collection's modules trains with ours in their place."""

import re

import pytest
from conftest import ROOT
from jobs import Job, independent_matrix

# What a user of the original collection would have: its names, keywords and return values.
SCRIPT = '''
import argparse, math, os, tempfile
import torch
import torch.optim as optim
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler
from torchvision import transforms
from model import resnet18
from my_dataset import MyDataSet
from utils import read_split_data, plot_data_loader_image
from multi_train_utils.distributed_utils import (
    cleanup, dist, init_distributed_mode, is_main_process, reduce_value)
from multi_train_utils.train_eval_utils import evaluate, train_one_epoch

parser = argparse.ArgumentParser()
parser.add_argument("--data-path")
parser.add_argument("--device", default="cpu")
parser.add_argument("--dist-url", default="env://")
args = parser.parse_args()
init_distributed_mode(args=args)
torch.manual_seed(args.rank)
device = torch.device(args.device)
size, rate = 32, 0.01 * args.world_size

(train_paths, train_labels), (val_paths, val_labels), classes = read_split_data(args.data_path)
norm = transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
look = {"train": transforms.Compose([transforms.RandomResizedCrop(size, (0.6, 1.0)),
                                     transforms.RandomHorizontalFlip(), transforms.ToTensor(),
                                     norm]),
        "val": transforms.Compose([transforms.Resize(round(size * 256 / 224)),
                                   transforms.CenterCrop(size), transforms.ToTensor(), norm])}
train_set = MyDataSet(images_path=train_paths, images_class=train_labels, transform=look["train"])
val_set = MyDataSet(images_path=val_paths, images_class=val_labels, transform=look["val"])
place = {"num_replicas": args.world_size, "rank": args.rank}
train_sampler = DistributedSampler(train_set, **place)
val_sampler = DistributedSampler(val_set, shuffle=False, **place)
train_loader = DataLoader(train_set, collate_fn=train_set.collate_fn, batch_sampler=BatchSampler(
    train_sampler, 12 // args.world_size, drop_last=True))
val_loader = DataLoader(val_set, batch_size=8, sampler=val_sampler, collate_fn=val_set.collate_fn)

model = resnet18(num_classes=classes).to(device)
if args.distributed:
    path = os.path.join(tempfile.gettempdir(), "initial_weights.pt")
    if args.rank == 0:
        torch.save(model.state_dict(), path)
    dist.barrier()
    model.load_state_dict(torch.load(path, map_location=device, weights_only=True))
    model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = optim.SGD([p for p in model.parameters() if p.requires_grad], lr=rate, momentum=0.9)
scheduler = optim.lr_scheduler.LambdaLR(
    optimizer, lr_lambda=lambda e: (1 + math.cos(e * math.pi / 4)) / 2 * 0.9 + 0.1)
for epoch in range(4):
    train_sampler.set_epoch(epoch)
    mean_loss = train_one_epoch(model=model, optimizer=optimizer, data_loader=train_loader,
                                device=device, epoch=epoch)
    scheduler.step()
    sum_num = evaluate(model=model, data_loader=val_loader, device=device)
    acc = sum_num / val_sampler.total_size
    ranks = reduce_value(torch.tensor(float(args.rank)), average=True)
    if is_main_process():
        print(f"[epoch {epoch}] loss {mean_loss:.4f} correct {sum_num} accuracy {acc:.3f} "
              f"rate {optimizer.param_groups[0]['lr']:.5f} ranks {float(ranks)}")
        torch.save(getattr(model, "module", model).state_dict(), f"model-{epoch}.pth")
if args.rank == 0:
    plot_data_loader_image(val_loader, "class_indices.json", "images.png")
cleanup()
'''


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_it_trains_and_counts(flowers, tmp_path, processes):
    (tmp_path / "theirs.py").write_text(SCRIPT, encoding="utf-8")
    words = ["python"] if processes == 1 else ["torchrun", "--standalone", "--nproc_per_node=2"]
    env = {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "TMPDIR": str(tmp_path)}
    with Job(tmp_path, *words, "theirs.py", "--data-path", str(flowers), env=env) as job:
        assert job.wait(200) == 0, job.text()
        text = job.text()
    lines = re.findall(r"^\[epoch (\d)\] loss (\S+) correct (\d+) accuracy \S+ rate (\S+) "
                       r"ranks (\S+)$", text, re.M)
    assert [int(line[0]) for line in lines] == [0, 1, 2, 3], text
    assert float(lines[3][1]) < float(lines[0][1])
    assert [float(line[4]) for line in lines] == [(processes - 1) / 2] * 4
    assert float(lines[3][3]) == pytest.approx(0.001 * processes)
    matrix = independent_matrix(tmp_path / "model-3.pth", flowers)
    correct, total = sum(row[i] for i, row in enumerate(matrix)), sum(map(sum, matrix))
    # DistributedSampler counts the first image twice to make 16 of 15.
    assert total == 15 and correct <= int(lines[3][2]) <= correct + processes - 1
    assert (tmp_path / "images.png").stat().st_size > 1000
    assert "Traceback" not in text
