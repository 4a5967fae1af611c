"""Classify image files, or folders of them, with weights that a training run saved.

    python predict.py tulip.jpg holiday/                      # weights/best.pth of this folder
    python predict.py tulip.jpg --weights run1/weights/model-29.pth --top-k 3
    python predict.py flower_photos --json > predictions.json # a folder per class: accuracy too

The network, its image size and the class names are those that the run recorded. Exit status: 0
done, 1 a file could not be read (the others are classified all the same) or nothing was done, 2
wrong usage.
"""

import argparse
import json
import os
import sys
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from model import MODELS
from multi_train_utils.augmentation import Normalizer, to_tensor, validation_image
from multi_train_utils.distributed_utils import select_gpu
from multi_train_utils.options import image_size, positive_int, single_device
from multi_train_utils.records.weights import read_torch_file, read_weights
from my_dataset import ImageError, open_image
from utils import IMAGE_ENDINGS, allowed_cpus, as_utf8, readable

DEFAULT_MODEL, DEFAULT_IMAGE_SIZE = "resnet34", 224
WIDEST_MATRIX = 30  # classes up to which a confusion matrix can be read on a screen


@dataclass
class Prediction:
    """What the network says about one file, or why it could not be asked.

    `probabilities` is float64, one value in 0..1 per class, summing to 1; None where `error` says
    what is wrong with the file.
    """

    path: str
    probabilities: Tensor | None = None
    error: ImageError | None = None

    def top(self, count: int) -> list[tuple[int, float]]:
        """The `count` most probable (class number, probability), best first."""
        # Stable, so that of equals the first class wins, as argmax has it in training.
        assert self.probabilities is not None
        values, numbers = self.probabilities.sort(descending=True, stable=True)
        return list(zip(numbers.tolist(), values.tolist(), strict=True))[:count]


# ---- the network and what is known of it -----------------------------------------------------

def find_record(weights: str | os.PathLike) -> dict | None:
    """What the run that saved a weight file recorded of itself.

    It stands in the file itself or in the `checkpoint.pth` beside it, else in the newest
    `runs/*/run.json` of the output folder, which is the one above the file's.

    Returns:
        `{"model": str, "image_size": int, "classes": list of str, "source": path}`, or None.
    """
    weights = Path(weights)
    runs = sorted(weights.absolute().parent.parent.glob("runs/*/run.json"),
                  key=lambda path: path.stat().st_mtime, reverse=True)
    for path in (weights, weights.with_name("checkpoint.pth"), *runs[:1]):
        try:
            is_json = path.suffix == ".json"
            content = json.loads(path.read_text("utf-8")) if is_json else read_torch_file(path)
            arguments, classes = content["arguments"], content["classes"]
            record = {"model": arguments["model"], "image_size": arguments["image_size"],
                      "classes": list(classes), "source": str(path)}
        except (OSError, ValueError, TypeError, KeyError, IndexError):
            continue  # a record is a convenience: flags say the same
        # Nothing is converted: the text of lists in lists can be longer than all memory.
        name, size = record["model"], record["image_size"]
        if (isinstance(name, str) and name in MODELS and isinstance(size, int) and size > 0
                and all(isinstance(label, str) for label in record["classes"])):
            return record
    return None


def read_class_names(path: str | os.PathLike) -> list[str]:
    """The class names in a `class_indices.json`, in the order of their numbers.

    Raises OSError, and ValueError naming the file where it does not hold `{"0": name, ...}`.
    """
    try:
        content = json.loads(Path(path).read_text("utf-8"))
        return [str(content[str(number)]) for number in range(len(content))]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f'{path}: does not hold {{"0": "name", "1": "name", ...}} '
                         f"({type(error).__name__}: {error})") from error


def find_class_names(weights: str | os.PathLike, given: str | None,
                     record: dict | None) -> tuple[list[str], str]:
    """The class names of a weight file, and where they were found.

    From `given`; else from `class_indices.json` beside the file or in the folder above, from the
    run's record, or from `class_indices.json` in the working folder, in this order.

    Raises ValueError where there are none, or where file and record contradict each other.
    """
    if given is not None:
        return read_class_names(given), given
    folder, name = Path(weights).absolute().parent, "class_indices.json"
    for path in (folder / name, folder.parent / name):
        if not path.is_file():
            continue
        names = read_class_names(path)
        # A later run with other classes may have renewed the one file and not yet the other.
        if record is not None and record["classes"] != names:
            raise ValueError(f"{path} names the classes {', '.join(names)}, but the run recorded "
                             f"{', '.join(record['classes'])} ({record['source']}): say which "
                             "with --class-indices FILE")
        return names, str(path)
    if record is not None:
        return record["classes"], record["source"]
    if os.path.isfile(name):
        return read_class_names(name), name
    raise ValueError(f"no class names for {weights}: there is no {name} in {folder.parent} or "
                     "here. Give one with --class-indices FILE")


def load_model(weights: str | os.PathLike, name: str, num_classes: int) -> nn.Module:
    """The network `name` with all of its weights from a file: fp32, evaluation mode, on the CPU.

    Raises OSError or ValueError, naming the file, where it is missing, damaged, or holds another
    network, another number of classes, or values that are not finite.
    """
    given = read_weights(weights)
    model = MODELS[name](num_classes=num_classes)
    check_fit(weights, given, name, model.state_dict())
    try:
        # Not strict: files of old PyTorch versions lack num_batches_tracked, which is not used.
        model.load_state_dict(given, strict=False)
    except RuntimeError as error:
        raise ValueError(f"{weights}: {error}") from error
    bad = [key for key, value in model.state_dict().items() if not torch.isfinite(value).all()]
    if bad:
        raise ValueError(f"{weights}: {bad[0]} holds values that are not finite: the training "
                         "went wrong. Take the file of an earlier epoch")
    return model.eval()


def check_fit(weights: str | os.PathLike, given: dict[str, Tensor], name: str,
              own: dict[str, Tensor]) -> None:
    """Raise ValueError unless the file's tensors are those of the network `name`."""
    needed = [key for key in own if not key.endswith("num_batches_tracked")]
    wrong = [key for key in needed if key not in given or given[key].shape != own[key].shape]
    if not wrong and set(given) <= set(own):
        return
    if wrong == ["fc.weight", "fc.bias"] and fitting_model(given) == name:
        raise ValueError(f"{weights}: has {given['fc.bias'].numel()} classes, but "
                         f"{len(own['fc.weight'])} class names were found. Give the names that "
                         "belong to it with --class-indices FILE")
    fitting = fitting_model(given)
    remedy = (f"these are the weights of {fitting}: use --model {fitting}" if fitting else
              f"it is none of {', '.join(MODELS)}")
    missing = f"{len(wrong)} of {len(needed)} tensors are missing or have another shape"
    raise ValueError(f"{weights}: does not fit {name}: "
                     f"{missing if wrong else 'it holds more tensors'}; {remedy}")


def fitting_model(given: dict[str, Tensor]) -> str | None:
    """Name of the network in MODELS to which a state dict belongs, whatever its classes."""
    for name, make in MODELS.items():
        with torch.device("meta"):
            own = make().state_dict()
        if set(given) <= set(own) and {"fc.weight", "fc.bias"} <= set(given) and all(
                key in given and given[key].shape == value.shape for key, value in own.items()
                if not key.startswith("fc.") and not key.endswith("num_batches_tracked")):
            return name
    return None


# ---- the files -------------------------------------------------------------------------------

def list_images(inputs: Sequence[str]) -> list[str]:
    """The files in `inputs` as they are, and of each folder all images below it, sorted.

    Images are the files that end in `utils.IMAGE_ENDINGS`; hidden ones do not count; nothing is
    listed twice. Raises ValueError for a folder without images, OSError where one cannot be read.
    """
    found = []
    for path in inputs:
        images = images_below(path) if os.path.isdir(path) else [path]
        if not images:
            raise ValueError(f"{path}: no images in this folder (endings: "
                             f"{' '.join(IMAGE_ENDINGS)})")
        found += images
    return list(dict.fromkeys(found))


def images_below(root: str) -> list[str]:
    def stop(error: OSError) -> NoReturn:
        raise error

    found: list[str] = []
    seen: set[str] = set()
    for folder, folders, files in os.walk(root, followlinks=True, onerror=stop):
        real = os.path.realpath(folder)
        # A link to a folder above would go round in a circle.
        folders[:] = [] if real in seen else sorted(
            name for name in folders if not name.startswith("."))
        if real not in seen:
            found += [os.path.join(folder, name) for name in files
                      if name.lower().endswith(IMAGE_ENDINGS) and not name.startswith(".")]
        seen.add(real)
    return sorted(found)


def labels_by_folder(inputs: Sequence[str], classes: Sequence[str]) -> dict[str, int]:
    """{path: class number} of the images in folders that have one sub-folder per class.

    A folder whose sub-folders are no trained classes, or that has images of its own, is one to
    classify: it gives no labels. Raises ValueError where only some are trained classes, since an
    accuracy over the rest would say nothing of the folder.
    """
    labels: dict[str, int] = {}
    numbers = {as_utf8(name): number for number, name in enumerate(classes)}
    for root in filter(os.path.isdir, inputs):
        parts = {path: [*map(as_utf8, Path(path).relative_to(root).parts)]
                 for path in images_below(root)}
        if any(len(part) == 1 for part in parts.values()):
            continue
        folders = {part[0] for part in parts.values()}
        unknown = sorted(name for name in folders if name not in numbers)
        if len(unknown) == len(folders):
            complain(f"notice: no accuracy for {root}: its sub-folders are no trained classes")
            continue
        if unknown:
            raise ValueError(f"{root}: {', '.join(unknown)} {'is' if len(unknown) == 1 else 'are'} "
                             f"not among the trained classes ({', '.join(classes)}). Rename or "
                             "move, or give the folders one by one for no accuracy")
        labels |= {path: numbers[part[0]] for path, part in parts.items()}
    return labels


# ---- prediction ------------------------------------------------------------------------------

def predict(model: nn.Module, paths: Sequence[str], size: int, *,
            batch_size: int = 16) -> Iterator[Prediction]:
    """Classify image files as validation does: same transform, same precision (fp32).

    Args:
        model: in evaluation mode, on the device that is to be used; maps float32
            `B x 3 x size x size` to logits `B x classes`.
        paths: the files.
        size: side in pixels of the square that the network sees.
        batch_size: images per call of the network.

    Yields one `Prediction` per path, in the order of `paths`, as they come.
    """
    normalize = Normalizer(next(model.parameters()).device)

    def read(path: str) -> Tensor | ImageError:
        try:
            return to_tensor(validation_image(open_image(path), size))
        except ImageError as error:
            return error

    batches = [paths[start:start + batch_size] for start in range(0, len(paths), batch_size)]
    with ThreadPoolExecutor(allowed_cpus()) as pool:
        coming = pool.map(read, batches[0]) if batches else ()
        for number, batch in enumerate(batches):
            samples = list(coming)
            # Decoded beside the network's work; one batch ahead, so that memory stays bounded.
            coming = pool.map(read, batches[number + 1]) if number + 1 < len(batches) else ()
            rows = iter(probabilities(model, normalize, samples))
            for path, sample in zip(batch, samples, strict=True):
                if isinstance(sample, ImageError):
                    yield Prediction(path, error=sample)
                else:
                    yield Prediction(path, next(rows))


@torch.inference_mode()
def probabilities(model: nn.Module, normalize: Normalizer,
                  samples: Sequence[Tensor | ImageError]) -> Iterable[Tensor]:
    """float64 `n x classes` on the CPU for the n tensors among `samples`."""
    images = [sample for sample in samples if isinstance(sample, Tensor)]
    if not images:
        return ()
    logits = model(normalize(torch.stack(images).to(normalize.mean.device)))
    # In float64 the order of the logits is kept: no two of them become equal by rounding.
    return logits.double().softmax(dim=1).cpu()


def confusion_matrix(predictions: Sequence[Prediction], labels: dict[str, int],
                     num_classes: int) -> list[list[int]]:
    """Counts of the labelled, readable files: row = true class, column = predicted class."""
    matrix = [[0] * num_classes for _ in range(num_classes)]
    for prediction in predictions:
        if prediction.error is None and prediction.path in labels:
            matrix[labels[prediction.path]][prediction.top(1)[0][0]] += 1
    return matrix


# ---- output ----------------------------------------------------------------------------------

def padded(text: str, width: int) -> str:
    return text + " " * (width - screen_width(text))


def screen_width(text: str) -> int:
    """Columns that a text takes on a terminal, where Chinese characters are two wide."""
    return sum(0 if unicodedata.combining(char) else
               2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text)


def complain(text: str) -> None:
    """A line on the error stream: what is wrong never mixes with the results."""
    print(readable(text, sys.stderr), file=sys.stderr, flush=True)


def print_table(predictions: Iterable[Prediction], paths: Sequence[str],
                classes: Sequence[str], top_k: int) -> list[Prediction]:
    """Print a line per file as its prediction comes; returns the predictions."""
    shown = [readable(name, sys.stdout) for name in classes]
    wide = max(map(screen_width, [*(readable(path, sys.stdout) for path in paths), "file"]))
    name_wide = max(map(screen_width, [*shown, "class"]))
    heads = [f"  {padded('class', name_wide)}  {'prob.':>6}"] * min(top_k, len(classes))
    print(padded("file", wide) + "".join(heads))
    done = []
    for prediction in predictions:
        done.append(prediction)
        if prediction.error is not None:
            complain(f"error: {prediction.error}")
            continue
        cells = [f"  {padded(shown[number], name_wide)}  {value:6.4f}"
                 for number, value in prediction.top(top_k)]
        print(padded(readable(prediction.path, sys.stdout), wide) + "".join(cells), flush=True)
    return done


def print_evaluation(matrix: list[list[int]], classes: Sequence[str]) -> None:
    """Print accuracy, per class too, and the confusion matrix."""
    result = evaluation(matrix, classes)
    print(f"\naccuracy: {result['accuracy']:.3f} ({result['correct']}/{result['total']})")
    names = [f"{number} {readable(name, sys.stdout)}" for number, name in enumerate(classes)]
    wide = max(map(screen_width, names))
    for number, (name, row) in enumerate(zip(names, matrix, strict=True)):
        if sum(row):
            print(f"    {padded(name, wide)}  {row[number] / sum(row):.3f} "
                  f"({row[number]}/{sum(row)})")
    if len(classes) > WIDEST_MATRIX:
        return print(f"confusion matrix: too wide for a screen with {len(classes)} classes, see "
                     "--json")
    cell = max(len(str(max(map(max, matrix)))), len(str(len(classes) - 1))) + 2
    print("confusion matrix (row: true class, column: predicted class)")
    print(" " * (wide + 4) + "".join(f"{number:{cell}}" for number in range(len(classes))))
    for name, row in zip(names, matrix, strict=True):
        print(f"    {padded(name, wide)}" + "".join(f"{count:{cell}}" for count in row))


def evaluation(matrix: list[list[int]], classes: Sequence[str]) -> dict[str, Any]:
    """Accuracy and the like as JSON can hold them; `accuracy` is None where nothing is labelled."""
    total, correct = sum(map(sum, matrix)), sum(row[i] for i, row in enumerate(matrix))
    per_class = {name: {"correct": row[number], "total": sum(row)}
                 for number, (name, row) in enumerate(zip(classes, matrix, strict=True))}
    return {"correct": correct, "total": total, "accuracy": correct / total if total else None,
            "per_class": per_class, "confusion": matrix}


def as_json(predictions: Iterable[Prediction], classes: Sequence[str],
            top_k: int) -> list[dict[str, Any]]:
    """The predictions as plain data: per file its class and top list, or its error."""
    entries: list[dict[str, Any]] = []
    for prediction in predictions:
        if prediction.error is not None:
            complain(f"error: {prediction.error}")
            entries.append({"file": prediction.path, "error": prediction.error.reason})
            continue
        top: list[dict[str, Any]] = [{"class": classes[number], "probability": value}
               for number, value in prediction.top(top_k)]
        entries.append({"file": prediction.path, **top[0], "top": top})
    return entries


# ---- the command -----------------------------------------------------------------------------

def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command's options as a namespace; exit status 2 for wrong usage."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inputs", nargs="+", metavar="FILE_OR_FOLDER",
                        help="images; folders are searched with all their sub-folders, and with "
                             "one sub-folder per trained class also give the accuracy")
    parser.add_argument("--weights", default=os.path.join("weights", "best.pth"), metavar="FILE",
                        help="what a run saved (default: %(default)s)")
    parser.add_argument("--class-indices", metavar="FILE",
                        help="class names (default: class_indices.json of the run's output folder)")
    parser.add_argument("--model", choices=sorted(MODELS),
                        help=f"default: as the run recorded, else {DEFAULT_MODEL}")
    parser.add_argument("--image-size", type=image_size, metavar="PX",
                        help=f"default: as the run recorded, else {DEFAULT_IMAGE_SIZE}")
    parser.add_argument("--top-k", type=positive_int, default=1, metavar="K",
                        help="show the K most probable classes (default: 1)")
    parser.add_argument("--json", action="store_true", help="JSON in place of a table")
    parser.add_argument("--batch-size", type=positive_int, default=16, metavar="N",
                        help="images per step (default: 16)")
    parser.add_argument("--device", type=single_device, default="auto", metavar="DEV",
                        help="cuda, cuda:N, cpu or auto (a GPU if there is one; the default)")
    return parser.parse_args(argv)


def choose(flag: str, given: Any, record: dict | None, key: str, default: Any) -> Any:
    """The flag's value where given, else the recorded one, else the default; says what differs."""
    recorded = record[key] if record is not None else default
    if given is None or given == recorded:
        return recorded
    if record is not None:
        complain(f"notice: {flag} {given}, but the run recorded {recorded}")
    return given


def prepare(args: argparse.Namespace) -> tuple[nn.Module, int, list[str]]:
    """(model on its device, image size, class names) for the command's options."""
    gpu = select_gpu(args.device, 0, 1)
    device = torch.device("cpu") if gpu is None else torch.device("cuda", gpu)
    if not os.path.isfile(args.weights):
        raise ValueError(f"{args.weights}: no such weight file. Train first, or name one with "
                         "--weights FILE")
    record = find_record(args.weights)
    classes, source = find_class_names(args.weights, args.class_indices, record)
    name = choose("--model", args.model, record, "model", DEFAULT_MODEL)
    size = choose("--image-size", args.image_size, record, "image_size", DEFAULT_IMAGE_SIZE)
    model = load_model(args.weights, name, len(classes))
    # The layout that training validates in: the same kernels, the same rounding.
    layout = torch.channels_last if device.type == "cuda" else torch.contiguous_format
    told = "as recorded" if record else "no record found: --model and --image-size change this"
    complain(f"{args.weights}: {name} at {size} px ({told}), {len(classes)} classes from {source}, "
             f"on {device}")
    return model.to(device).to(memory_format=layout), size, classes


def run(args: argparse.Namespace) -> int:
    """Classify what `args` name, print it, and return the exit status."""
    model, size, classes = prepare(args)
    paths = list_images(args.inputs)
    labels = labels_by_folder(args.inputs, classes)
    coming = predict(model, paths, size, batch_size=args.batch_size)
    if args.json:
        predictions = list(coming)
        result = {"weights": args.weights, "image_size": size, "classes": classes,
                  "files": as_json(predictions, classes, args.top_k)}
    else:
        predictions = print_table(coming, paths, classes, args.top_k)
    matrix = confusion_matrix(predictions, labels, len(classes))
    if args.json:
        if labels:
            result["evaluation"] = evaluation(matrix, classes)
        print(json.dumps(result, indent=2))
    elif any(map(any, matrix)):
        print_evaluation(matrix, classes)
    bad = sum(prediction.error is not None for prediction in predictions)
    if bad:
        complain(f"{bad} of {len(paths)} files could not be read")
    return int(bad > 0)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv`; returns the exit status, 0 done or 1 failed."""
    args = parse_args(argv)
    try:
        return run(args)
    except BrokenPipeError:
        # The reader (head, less) has seen enough; what is still buffered must not complain again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except torch.OutOfMemoryError as error:
        complain(f"error: {error}. Use a smaller --batch-size, or --device cpu")
    except (ValueError, OSError) as error:
        complain(f"error: {error}")
    except KeyboardInterrupt:
        return 130
    return 1


if __name__ == "__main__":
    sys.exit(main())
