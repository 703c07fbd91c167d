"""Your own noisy data as lists: ``root/train.csv`` and ``root/test.csv``, a line an image.

    path,label,true_label,client
    photos/0001.jpg,cat,dog,hospital-a

``true_label`` and ``client`` may be left out.  What is right of a wrong label, where somebody knows, is the truth that
detections and corrections are measured against; who holds what, where the data come divided, is the partition
"natural" (--partition natural).
"""

from __future__ import annotations

import csv
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from flnoisebench.api import (
    Arrays,
    Dataset,
    Finding,
    ImageSettings,
    MissingData,
    Progress,
    decode_images,
    near,
    read_settings,
    refuse_shared,
    some,
    undecodable,
)

COLUMNS = {"train": ("path", "label", "true_label", "client"), "test": ("path", "label")}


class FileList(Dataset):
    """Images named in two CSV files, uint8 [n, 3, S, S]: short side scaled to S (bilinear), the centre kept.

    S is 64, or what ``root/flnoisebench.json`` says.  Paths are relative to ``root``, or absolute.  Labels are any
    text; classes are in the order of their numbers where all are numbers, else alphabetical; so are clients.

    A list with commas in its paths quotes them, as CSV does.
    """

    name = "file-list"
    title = "List of image files"
    classes = ()  # learned by ``load``
    mean = (0.485, 0.456, 0.406)  # ImageNet's: a list's own would change with each image that is added
    std = (0.229, 0.224, 0.225)
    crop_padding = 4  # CIFAR's
    flip = True
    labels_are_true = False
    protocol = "file-list"
    source = (
        "Your own images: DIR/train.csv (path,label; if known true_label, client) and DIR/test.csv (path,label), "
        'optionally DIR/flnoisebench.json ({"size": 64}), used with --data-root DIR.  The labels stay: --noise given.'
    )

    def load(self, root: Path, *, public: bool = False) -> Arrays:
        """Read both lists and all images.

        Raises MissingData where a list is not there, and ValueError, naming file and line: unknown or missing columns,
        an empty field, a path twice or in both lists, a file that is not there or cannot be decoded, a class in one
        list only, the same pixels in train and test, bad settings.  public: none; None.
        """
        root = Path(root).absolute()
        size = read_settings(root / "flnoisebench.json", ImageSettings).size
        train, test = _lists(root, self.source)
        self.require_none(_problems(root, train, test), root)
        classes = _ordered({*train.labels, *train.true_labels})
        number = {name: place for place, name in enumerate(classes)}
        files = [[root / path for path in part.paths] for part in (train, test)]
        images = [decode_images(part, size) for part in files]
        refuse_shared(files[0], images[0], files[1], images[1])

        def numbers(names: Sequence[str], of: dict[str, int] = number) -> torch.Tensor:
            return torch.tensor([of[name] for name in names], dtype=torch.int64)

        clients = {name: place for place, name in enumerate(_ordered(set(train.clients)))}
        return Arrays(
            train_images=images[0],
            train_labels=numbers(train.labels),
            test_images=images[1],
            test_labels=numbers(test.labels),
            classes=tuple(classes),
            true_labels=numbers(train.true_labels) if train.true_labels else None,
            owners=numbers(train.clients, clients) if clients else None,
            clients=tuple(clients) or None,
        )

    def natural_clients(self, root: Path) -> int | None:
        train, _ = _lists(Path(root).absolute(), self.source)
        return len(set(train.clients)) or None

    def check(self, root: Path, progress: Progress) -> Iterator[Finding]:
        """Everything that is wrong with the lists, line by line, all images that cannot be decoded, and how many
        clients and wrong labels the lists name."""
        root = Path(root).absolute()
        train, test = _lists(root, self.source)
        yield from (Finding("problem", problem) for problem in _problems(root, train, test))
        files = (root / path for path in dict.fromkeys([*train.paths, *test.paths]))
        yield from (Finding("problem", problem) for problem in undecodable(file for file in files if file.is_file()))
        if train.clients:
            yield Finding("note", f"the list names {len(set(train.clients))} clients: --partition natural takes them")
            if lone := sorted(name for name, samples in Counter(train.clients).items() if samples == 1):
                yield Finding("note", f"clients of a single sample, which --min-size 1 takes too: {some(lone)}")
        if train.true_labels:
            wrong = sum(a != b for a, b in zip(train.labels, train.true_labels, strict=False))
            yield Finding("note", f"{wrong} of {len(train.labels)} labels are not the true ones")


@dataclass
class _List:
    """The fields of a list, column by column; those that it leaves out are empty.  lines: where each image stands."""

    path: Path
    lines: list[int] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    true_labels: list[str] = field(default_factory=list)
    clients: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def _lists(root: Path, source: str) -> tuple[_List, _List]:
    absent = [f"{part}.csv" for part in COLUMNS if not (root / f"{part}.csv").is_file()]
    if absent:
        raise MissingData(f"Lists of images were looked for in {root}, which lacks {' and '.join(absent)}.  {source}")
    train, test = (_read(root / f"{part}.csv", known) for part, known in COLUMNS.items())
    return train, test


def _read(path: Path, known: Sequence[str]) -> _List:
    found = _List(path)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = csv.DictReader(file, strict=True, skipinitialspace=True)
            columns = list(rows.fieldnames or ())
            _check_columns(path, columns, known)
            for row in rows:
                # a space beside a comma would make another class, or another client, of one name
                row |= {name: row[name].strip() for name in columns if name != "path" and row[name]}
                line, fields = rows.line_num, [row[name] for name in columns]
                if None in row or None in fields:
                    found.problems.append(
                        f"{path}, line {line} has not {len(columns)} fields (a path with commas stands in quotes)"
                    )
                elif not all(fields):
                    empty = ", ".join(name for name, value in zip(columns, fields, strict=True) if not value)
                    found.problems.append(f"{path}, line {line}: {empty} is empty")
                else:
                    found.lines.append(line)
                    found.paths.append(row["path"])
                    found.labels.append(row["label"])
                    for name, column in (("true_label", found.true_labels), ("client", found.clients)):
                        if name in row:
                            column.append(row[name])
    except (csv.Error, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no CSV file in UTF-8: {error}") from error
    return found


def _check_columns(path: Path, columns: Sequence[str], known: Sequence[str]) -> None:
    if len(columns) == 1 and (other := next((mark for mark in ";\t" if mark in columns[0]), "")):
        raise ValueError(f"{path}, line 1: the columns are divided by {other!r}; write commas")
    for column in columns:
        if column not in known:
            hint = f"{near(column, known)} Known: {', '.join(known)}."
            raise ValueError(f"{path}, line 1: unknown column {column!r}.{hint}")
    missing = [column for column in ("path", "label") if column not in columns]
    if missing or len(set(columns)) < len(columns):
        found = ",".join(columns) or "nothing"
        raise ValueError(f"{path}, line 1 must name the columns path,label, each once; it says {found}")


def _problems(root: Path, train: _List, test: _List) -> list[str]:
    """In words, with file and line."""
    found = [*train.problems, *test.problems]
    seen: dict[str, str] = {}
    for part in (train, test):
        for line, path in zip(part.lines, part.paths, strict=True):
            here = f"{part.path}, line {line}"
            file = os.path.normpath(root / path)  # ./a.png is a.png
            if file in seen:
                found.append(f"{here}: {path} is also in {seen[file]}")
            elif not (root / path).is_file():
                hint = " (folders are divided by / in a list)" if "\\" in path else ""
                found.append(f"{here}: there is no file {root / path}{hint}")
            seen.setdefault(file, f"{part.path.name}, line {line}")
    if not train.lines:
        return found or [f"{train.path} names no image"]
    trained = {*train.labels, *train.true_labels}
    for line, label in zip(test.lines, test.labels, strict=True):
        if label not in trained:
            found.append(f"{test.path}, line {line}: class {label!r} has no training image")
    if len(trained) < 2:
        found.append(f"{train.path} has {len(trained)} classes; a classification needs two at least")
    elif untested := sorted(trained - set(test.labels)):
        found.append(f"{test.path} has no image of class {', '.join(untested[:5])}")
    return found


def _ordered(names: set[str]) -> list[str]:
    """By number where all are numbers, else alphabetical."""
    return sorted(names, key=(lambda name: (int(name), name)) if all(name.isdecimal() for name in names) else None)
