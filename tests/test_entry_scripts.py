"""The three doors differ in the process group alone, and the core can be lifted out."""

import ast
import difflib
import io
import itertools
import shutil
import sys
import tokenize
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CORE = ("distributed_utils.py", "train_eval_utils.py")
SCRIPTS = {name: (ROOT / f"train_{name}.py").read_text(encoding="utf-8")
           for name in ("single_gpu", "multi_gpu_using_launch", "multi_gpu_using_spawn")}

# Every name, text and number that may stand in a line by which two scripts differ. All of them
# make, watch or leave processes. A word that is missing here makes the test fail: think before
# adding one, for the difference between the scripts is what they teach.
GROUP_WORDS = set("""
    from import as def return in for if not and while with any all True False None lambda
    multi_train_utils distributed_utils safety processes rendezvous meet join
    set_single_process init_distributed_mode cleanup
    os environ update setdefault RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE
    MASTER_ADDR master_port 127.0.0.1 str host_store store del
    Options options parse_args
    torch multiprocessing mp get_context spawn context Process target
    processes process start watched
    main_fun run_rank rank range world_size args int
""".split())


def code_lines(text):
    """The lines of a script without docstrings, comments and the name of the script."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        # parse_args("single"), parse_args("launch") ...: the one word that has to differ.
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "parse_args":
            node.args[:1] = [ast.Name("SCRIPT")]
    return ast.unparse(tree).splitlines()


def words(line):
    """Names, texts and numbers in a line of code."""
    kinds = (tokenize.NAME, tokenize.NUMBER, tokenize.STRING)
    readline = io.StringIO(line.strip() + "\n").readline
    tokens = []
    try:
        for token in tokenize.generate_tokens(readline):
            tokens.append(token)
    except (tokenize.TokenError, IndentationError):
        pass  # a line alone may end inside a bracket
    return {token.string.strip("'\"") for token in tokens if token.type in kinds}


def foreign_words(first, second):
    """What stands in the difference of two scripts and has nothing to do with the group."""
    lines = list(difflib.ndiff(code_lines(first), code_lines(second)))
    gone = Counter(line[2:] for line in lines if line[0] == "-")
    come = Counter(line[2:] for line in lines if line[0] == "+")
    # A line that is in both has only moved into another function.
    different = [*(gone - come), *(come - gone)]
    return {word for line in different for word in words(line)} - GROUP_WORDS


@pytest.mark.parametrize("name", SCRIPTS)
def test_an_entry_script_fits_on_one_screen(name):
    assert len(SCRIPTS[name].splitlines()) <= 60


@pytest.mark.parametrize("pair", list(itertools.combinations(SCRIPTS, 2)), ids="-".join)
def test_two_entry_scripts_differ_in_the_process_group_alone(pair):
    assert foreign_words(*(SCRIPTS[name] for name in pair)) == set()


@pytest.mark.parametrize(("old", "new", "found"), [
    ("    train(args)\n", "    args.lr *= 2\n    train(args)\n", {"lr", "2"}),
    ("    train(args)\n", "    print('hello')\n    train(args)\n", {"print", "hello"}),
    ("    train(args)\n", "", {"train"}),
    ("    train(args)\n", "    train(args, fast=True)\n", {"train", "fast"}),
    ("import run\n", "import run\nimport random\n", {"random"}),
    ('parse_args("launch")', 'parse_args("launch", ["--amp"])', {"--amp"}),
])
def test_anything_else_in_one_script_is_found(old, new, found):
    launch = SCRIPTS["multi_gpu_using_launch"]
    changed = launch.replace(old, new)
    assert changed != launch
    assert found <= foreign_words(launch, changed)
    assert found <= foreign_words(SCRIPTS["single_gpu"], changed)


def test_each_process_does_the_same_in_all_three():
    def body(name, function):
        tree = ast.parse(SCRIPTS[name])
        node = next(node for node in tree.body if getattr(node, "name", "") == function)
        return [ast.unparse(statement) for statement in node.body
                if not isinstance(getattr(statement, "value", None), ast.Constant)]

    single, launch = body("single_gpu", "main"), body("multi_gpu_using_launch", "main")
    assert single == ["set_single_process(args)", "train(args)"]
    assert launch == ["init_distributed_mode(args, join=meet)", "train(args)", "cleanup()"]
    # A process of the spawn script takes the launcher's part first, then goes the same way.
    environment, *rest = body("multi_gpu_using_spawn", "main_fun")
    assert environment.startswith("os.environ.update(RANK=")
    assert rest == launch


@pytest.mark.parametrize("name", CORE)
def test_the_core_imports_only_torch_and_tqdm(name):
    allowed = {"torch", "tqdm", "distributed_utils", *sys.stdlib_module_names}
    for node in ast.walk(ast.parse((ROOT / "multi_train_utils" / name).read_text("utf-8"))):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module]
        else:
            continue
        assert {module.split(".")[0] for module in modules} <= allowed


OWN_PROJECT = """
import argparse
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from {package}distributed_utils import cleanup, init_distributed_mode, reduce_value
from {package}train_eval_utils import evaluate, train_one_epoch

args = argparse.Namespace(device="cpu", dist_url="env://")
init_distributed_mode(args)
torch.manual_seed(0)
points = torch.randn(64, 2)
data = TensorDataset(points, (points[:, 0] > points[:, 1]).long())
sampler = DistributedSampler(data, args.world_size, args.rank)
loader = DataLoader(data, batch_size=8 // args.world_size, sampler=sampler)
model = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 2))
if args.distributed:
    model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
loss = train_one_epoch(model, optimizer, loader, torch.device("cpu"), 0)
correct = evaluate(model, loader, torch.device("cpu"))
ranks = int(reduce_value(torch.tensor(args.rank + 1), average=False))
if args.rank == 0:
    print(f"result {{args.world_size}} {{ranks}} {{loss:.6f}} {{correct}}")
cleanup()
"""


@pytest.fixture(params=["side by side", "as a package"])
def own_project(request, tmp_path):
    """A foreign folder with the two files of the core and a script that trains with them."""
    flat = request.param == "side by side"
    folder = tmp_path if flat else tmp_path / "core"
    folder.mkdir(exist_ok=True)
    for name in CORE:
        shutil.copy(ROOT / "multi_train_utils" / name, folder)
    script = OWN_PROJECT.format(package="" if flat else "core.")
    (tmp_path / "own.py").write_text(script, encoding="utf-8")
    return tmp_path


def test_the_core_works_alone_in_another_project(own_project, run_script):
    alone = result(run_script("python", "own.py"))
    both = result(run_script("torchrun", "--standalone", "--nproc_per_node=2", "own.py"))
    assert alone[:2] == [1, 1]
    assert both[:2] == [2, 3]
    # The same images in each global step, so the same training but for rounding.
    assert both[2] == pytest.approx(alone[2], rel=1e-4)
    assert alone[2] < 0.69  # of two classes, ln 2 is what a network knows that has learnt nothing
    assert alone[3] == both[3] > 50


def result(done):
    """[world size, sum of ranks + 1, loss, correct] of a run of OWN_PROJECT."""
    line = next(line for line in done.stdout.splitlines() if line.startswith("result "))
    return [float(word) for word in line.split()[1:]]
