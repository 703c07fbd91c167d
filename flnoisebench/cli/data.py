"""``flnoisebench data``: which data sets are there; fetching, checking and preparing them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from flnoisebench import protocols, registry
from flnoisebench.api import Arrays, Dataset, MissingData, Progress, shared_images
from flnoisebench.cli import console
from flnoisebench.cli import options as opt
from flnoisebench.cli.console import line
from flnoisebench.inputs import require_sound

app = typer.Typer(no_args_is_help=True, help="Look for data sets, fetch, check and prepare them.")
Name = Annotated[str, typer.Argument(metavar="NAME", help="A name from `list datasets`.")]


@app.command("list")
@console.guarded
def list_(data_root: opt.DataRoot = None) -> None:
    """Load every data set that is there and say which is not."""
    root = data_root or opt.default_data_root()
    for name in registry.names(registry.DATASETS):
        try:
            data = registry.load_dataset(name)
            arrays = data.load(root)
        except MissingData as error:
            line(name, "missing", " ".join(str(error).split()))
        except ValueError as error:
            line(name, "damaged", str(error))
        except OSError as error:
            line(name, "unreadable", console.explained(error))
        else:
            line(name, "there", _size(data, arrays))


def _size(data: Dataset, arrays: Arrays) -> str:
    classes = len(arrays.classes or data.classes)
    shape = "x".join(map(str, arrays.train_images.shape[1:]))
    return f"{len(arrays.train_labels)} + {len(arrays.test_labels)} images {shape}, {classes} classes"


@app.command()
@console.guarded
def fetch(
    name: Name,
    data_root: opt.DataRoot = None,
    human_labels: Annotated[
        bool,
        typer.Option(
            "--human-labels",
            help="Download the labels that people gave its training images instead.",
            show_default="no",
        ),
    ] = False,
) -> None:
    """Download a data set from its official source, and check it."""
    root = data_root or opt.default_data_root()
    data = registry.load_dataset(name)
    root.mkdir(parents=True, exist_ok=True)
    if human_labels:
        data.fetch_human_labels(root)
        try:
            line(name, "there", f"human labels {', '.join(data.human_labels(root))} in {root}")
        except MissingData as error:  # they are held against the images, which may come later
            line(name, "there", f"human labels in {root}, not checked yet: {error}")
        return
    data.fetch(root)
    arrays = data.load(root)
    line(name, "there", f"{len(arrays.train_labels)} + {len(arrays.test_labels)} images in {root}")


@app.command()
@console.guarded
def check(name: Name, data_root: opt.DataRoot = None) -> None:
    """Look at every list and image: bad lines, undecodable files, test images among the training images; and say what a
    run costs.  Exit code 1 where something is wrong."""
    root = data_root or opt.default_data_root()
    data = registry.load_dataset(name)
    problems = 0
    with _bar(f"checking {name}") as progress:
        for finding in data.check(root, progress):
            line(name, finding.kind, finding.text)
            problems += finding.kind == "problem"
    if not problems:
        try:
            arrays = data.load(root)
            require_sound(data, arrays)
        except ValueError as error:
            line(name, "problem", str(error))
            problems += 1
        else:
            problems += _describe(name, data, arrays, root)
    if problems:
        console.fail(f"{name}: {problems} {'problem' if problems == 1 else 'problems'} in {root}", console.FAILED)


def _describe(name: str, data: Dataset, arrays: Arrays, root: Path) -> int:
    """Counts, order, overlap and costs of a data set that loads; the number of problems."""
    line(name, "there", _size(data, arrays))
    classes = len(arrays.classes or data.classes)
    for part, labels in (("train", arrays.train_labels), ("test", arrays.test_labels)):
        line(name, f"{part} images by class", " ".join(map(str, torch.bincount(labels, minlength=classes).tolist())))
    sorted_by_class = _describe_order(name, data, arrays)
    try:
        human = data.human_labels(root)
    except MissingData as error:
        line(name, "note", " ".join(str(error).split()))
    except ValueError as error:
        line(name, "problem", str(error))
        return 1 + sorted_by_class
    else:
        for key, given in human.items():
            wrong = float((given != arrays.train_labels).double().mean()) * 100
            line(name, f"human labels {key}", f"{wrong:.2f} % are not the true ones")
    for what, text in _costs(data, arrays):
        line(name, what, text)
    shared = shared_images(arrays.train_images, arrays.test_images)
    if shared:
        pairs = ", ".join(f"train {a} = test {b}" for a, b in shared[:3])
        line(name, "problem", f"{len(shared)} test images have the pixels of a training image: {pairs}")
    return bool(shared) + sorted_by_class


def _describe_order(name: str, data: Dataset, arrays: Arrays) -> bool:
    """How often neighbours are of one class, and what runs do about it; whether it is a problem: in an order that is
    kept they are that more than halfway between chance and always."""
    labels = arrays.train_labels if arrays.true_labels is None else arrays.true_labels
    chance = float((torch.bincount(labels).double() / len(labels)).square().sum())
    found = float((labels[1:] == labels[:-1]).double().mean())
    what = "kept by runs" if data.published_order else "shuffled by runs, so that it tells no method a class"
    shares = f"{found:.1%} of neighbours are of one class, by chance {chance:.1%} would be"
    line(name, "order", f"{what}; {shares}")
    if not data.published_order or found <= (1 + chance) / 2:
        return False
    line(name, "problem", "the images are sorted by class, so their order tells it: published_order must be False")
    return True


def _costs(data: Dataset, arrays: Arrays) -> Iterator[tuple[str, str]]:
    """What a run under the data set's protocol needs."""
    budget = protocols.load(data.protocol)
    train, test = arrays.train_images, arrays.test_images
    stored = train.numel() + test.numel()
    mapped = hasattr(train, "path")
    yield (
        ("disk" if mapped else "memory"),
        f"{console.size(stored)} of pixels"
        + (", read from memory maps as far as they do not fit on the device" if mapped else ""),
    )
    trained = round(len(train) * budget.local_epochs * budget.participation)
    yield (
        "a round",
        f"{trained} images trained and {len(test)} tested ({budget.model}, protocol {data.protocol}), "
        f"{console.size(trained * train[0].numel())} read",
    )
    yield "a run", f"{budget.rounds} rounds, {trained * budget.rounds} images trained"


@app.command()
@console.guarded
def prepare(
    name: Name,
    data_root: opt.DataRoot = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Folder to write into, a data root of its own.", show_default="DATA_ROOT/prepared"),
    ] = None,
    size: Annotated[
        int | None, typer.Option("--size", min=16, help="Side of the stored images.", show_default="the data set's")
    ] = None,
    images: Annotated[
        int | None,
        typer.Option(
            "--images",
            min=0,
            help="Train on that many, the same number of each class; 0: on all.",
            show_default="flnoisebench.json's, else all",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what it would take, and write nothing.", show_default="no")
    ] = False,
) -> None:
    """Decode a large data set once, into memory maps that training reads.  Interrupted, the same command goes on."""
    root = data_root or opt.default_data_root()
    data = registry.load_dataset(name)
    plan = data.preparation(root, where=out, size=size, images=images)
    there = next(place for place in (plan.where, *plan.where.parents) if place.exists())
    free = shutil.disk_usage(there).free
    line(name, "plan", f"{plan.about}: {console.size(plan.bytes)} in {plan.where} ({console.size(free)} free)")
    if dry_run:
        return
    with _bar(f"preparing {name}") as progress:
        plan.run(progress)
    line(name, "there", _size(data, data.load(plan.where)))


@app.command("make-fixture")
@console.guarded
def make_fixture(
    name: Name, folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new or empty folder.")]
) -> None:
    """Write a small imitation of a data set that cannot be downloaded, in its published layout, for tests."""
    about = registry.load_dataset(name).make_fixture(folder)
    line(name, "there", f"an imitation in {folder}: {about}")


@contextmanager
def _bar(title: str) -> Iterator[Progress]:
    """A progress bar on stderr, where that is a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Bar(*columns, console=console.err, transient=True, disable=not console.err.is_terminal) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
