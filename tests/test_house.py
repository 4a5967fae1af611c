"""The shape of the package: who imports whom, how long its pieces are, where the recipe stands."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "multi_train_utils"
FILES = sorted(PACKAGE.rglob("*.py"))
DOORS = ("train_single_gpu.py", "train_multi_gpu_using_launch.py", "train_multi_gpu_using_spawn.py")

# A module may import those of its own level and of the levels before it.
LEVELS = (("distributed_utils",), ("options",), ("train_eval_utils", "safety"), ("augmentation",),
          ("data_pipeline",), ("speed", "records"), ("trainer",))
# Of the modules beside the package these may be imported; they import nothing of it.
BELOW = {"model", "my_dataset", "utils"}


def module_name(path):
    """("speed", "ahead") for multi_train_utils/speed/ahead.py."""
    return path.relative_to(PACKAGE).with_suffix("").parts


def imports(path):
    """[(module's parts within the package, or the name of one outside)] that a file imports."""
    package = ("multi_train_utils", *module_name(path)[:-1])
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (tuple(alias.name.split(".")) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = package[:len(package) - node.level + 1] if node.level else ()
            base = (*start, *(node.module.split(".") if node.module else ()))
            # "from . import checkpoint" names a module, "from .checkpoint import read" does not.
            yield from ((*base, alias.name) if (ROOT.joinpath(*base, f"{alias.name}.py")).exists()
                        else base for alias in node.names)


def level(parts):
    return next(number for number, names in enumerate(LEVELS) if parts[0] in names)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_run_downwards(path):
    if path.name == "__init__.py":
        assert not list(imports(path))
        return
    own = module_name(path)
    for found in imports(path):
        if found[0] == "multi_train_utils":
            assert level(found[1:]) <= level(own), f"{'.'.join(own)} imports {'.'.join(found)}"
        elif (ROOT / f"{found[0]}.py").exists():
            assert found[0] in BELOW or (path.name, found[0]) == ("train_eval_utils.py",
                                                                  "distributed_utils"), found


def test_no_imports_in_a_circle():
    graph = {module_name(path): {found[1:] for found in imports(path)
                                 if found[0] == "multi_train_utils"} for path in FILES}
    done = set()
    while graph:
        free = [name for name, needs in graph.items() if needs <= done | {name[:1]}]
        assert free, f"in a circle: {sorted(graph)}"
        done.update(free)
        for name in free:
            del graph[name]


def test_only_doors_and_benchmarks_import_the_trainer():
    importers = {path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py")
                 if ".venv" not in path.parts and "tests" not in path.parts
                 and re.search(r"^from multi_train_utils(\.trainer import| import .*trainer)",
                               path.read_text(encoding="utf-8"), re.M)}
    assert importers == {*DOORS, "benchmarks/step_time.py"}


@pytest.mark.parametrize("name", ["model.py", "my_dataset.py", "utils.py"])
def test_what_stands_below_the_package_knows_nothing_of_it(name):
    assert "multi_train_utils" not in (ROOT / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_pieces_are_short(path):
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 400
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            lines = node.end_lineno - node.lineno + 1
            # The recipe itself is one function, to be read from top to bottom.
            limit = 190 if isinstance(node, ast.ClassDef) else 60 if node.name == "train" else 50
            assert lines <= limit, f"{node.name} has {lines} lines"


def test_the_recipe_stands_in_two_rooms():
    rooms = [(PACKAGE / name).read_text(encoding="utf-8")
             for name in ("trainer.py", "train_eval_utils.py")]
    assert sum(len(room.splitlines()) for room in rooms) <= 560
    # In the order in which every tutorial tells it.
    steps = ("read_images(", "choose_data(", "MODELS[args.model](", "give_initial_weights(",
             "nn.SyncBatchNorm.convert_sync_batchnorm(model)", "DistributedDataParallel(",
             "make_optimizer(", "TrainStep(", "choose_step(", "records.resume(",
             "guard.training(", "for epoch in range(", ".set_epoch(epoch", "train_one_epoch(",
             "evaluate(", "records.epoch(")
    recipe = rooms[0][rooms[0].index("def train("):]
    places = [recipe.index(step) for step in steps]
    assert places == sorted(places)
    for line in ("loss = self.criterion(self.model(images), labels)",
                 "self.optimizer.zero_grad(", ".backward()", "self.scaler.step(self.optimizer)"):
        assert line in rooms[1]


def test_the_five_details_are_in_four_files_at_most():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    details = readme.split("## Five details")[1].split("\n## ")[0]
    assert len(set(re.findall(r"\]\(([^)#]+)#L\d+\)", details))) <= 4
