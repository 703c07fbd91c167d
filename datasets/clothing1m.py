"""Clothing1M (Xiao et al., CVPR 2015): a million images of clothes under the labels that shops gave them.

The published archive, ``root``:

    category_names_eng.txt    a name a line; the line is the class, 0..13 (and category_names_chn.txt)
    noisy_label_kv.txt        "<key> <class>" a line: the shops' labels, about 39 % of them wrong
    clean_label_kv.txt        the same, checked by people
    noisy_train_key_list.txt  "<key>" a line: 1,000,000 images to train on
    clean_train_key_list.txt  47,570, which nothing here trains on
    clean_val_key_list.txt    14,313, the public images of methods that want some
    clean_test_key_list.txt   10,526, on which accuracies are measured
    images/0/00/1278541879,867148000.jpg and so on, named by their keys; commas belong to the names

Also read: lists in a sub-folder (annotations/), images without the folder images/ (0/00/... in ``root``), and copies
that were sorted into class folders: {noisy_train,train}, {val,clean_val}, {test,clean_test}/<class>/*.

A million decoded images are 197 GB at 256 x 256.  So ``flnoisebench data prepare clothing1m`` decodes them once into
memory maps, from which training reads; a few thousand are decoded into memory without it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from PIL import Image

from flnoisebench.api import (
    IMAGE_SUFFIXES,
    READ_SUFFIXES,
    Arrays,
    Config,
    Dataset,
    Field,
    Finding,
    MissingData,
    Preparation,
    Progress,
    data_command,
    decode_images,
    digest_images,
    map_bytes,
    map_images,
    open_map,
    pixels_of,
    read_settings,
    some,
)

CLASSES = 14
LISTS = {  # part: (its keys, their labels)
    "train": ("noisy_train_key_list.txt", "noisy_label_kv.txt"),
    "clean-train": ("clean_train_key_list.txt", "clean_label_kv.txt"),
    "val": ("clean_val_key_list.txt", "clean_label_kv.txt"),
    "test": ("clean_test_key_list.txt", "clean_label_kv.txt"),
}
FOLDERS = {"train": ("noisy_train", "train"), "val": ("val", "clean_val"), "test": ("test", "clean_test")}
IN_MEMORY = 2**31  # bytes of pixels that are decoded without preparation; 10,900 images at 256 x 256
READ = ("train", "val", "test")  # the parts that are decoded


class ArchiveSettings(Config):
    """What ``root/flnoisebench.json`` may say."""

    size: int = Field(256, ge=16, le=1024, unit="pixels", why="side of the stored images, as in the published loaders")
    images: int = Field(
        0, ge=0, unit="images", why="to train on, balanced over the noisy labels; 0: all. The usual economy is 64000"
    )
    drop_shared_keys: bool = Field(
        False, why="leave out of training what is also in val or test; without it such an archive is refused"
    )


class Prepared(Config):
    """``prepared.json``: what the memory maps beside it hold.  Written last, so that without it nothing is read."""

    class Part(Config):
        count: int = Field(..., ge=0, why="images")
        digest: str = Field(..., why="of the pixels")
        labels: str = Field(..., why="SHA-256 of the labels")

    schema_version: Literal[1] = Field(1, why="of this file")
    dataset: Literal["clothing1m"] = Field("clothing1m", why="whose images they are")
    settings: ArchiveSettings = Field(..., why="that they were made with")
    classes: tuple[str, ...] = Field(..., why="names, by number")
    parts: dict[str, Part] = Field(..., why="train, val, test")


class Clothing1M(Dataset):
    """Clothing1M: noisy training images, clean test images, uint8 [n, 3, 256, 256], of which training crops 224 x 224
    at random and evaluation the middle (7/8 of another size)."""

    name = "clothing1m"
    title = "Clothing1M"
    classes: ClassVar[tuple[str, ...]] = ()  # as category_names_eng.txt says
    mean: ClassVar[tuple[float, ...]] = (0.485, 0.456, 0.406)  # ImageNet's, on which the encoder was trained
    std: ClassVar[tuple[float, ...]] = (0.229, 0.224, 0.225)
    flip = True
    labels_are_true = False
    protocol = "clothing1m"
    source = (
        "The archive that its authors give out on request (github.com/Cysu/noisy_label says how; for research only): "
        "put its *.txt files and images/ under DIR, then `flnoisebench data prepare clothing1m --data-root DIR`."
    )
    counts: ClassVar[Mapping[str, int]] = {"train": 1_000_000, "clean-train": 47_570, "val": 14_313, "test": 10_526}

    def load(self, root: Path, *, public: bool = False) -> Arrays:
        """Open the memory maps of ``root/prepared`` or ``root``; else decode the archive into memory, if it is small.

        Raises MissingData where neither is there, or the archive is large and was not prepared, and ValueError, naming
        file and line: labels that are missing or no class, keys twice or in two parts, parts that were swapped, maps
        that are damaged or were made with other settings than ``root/flnoisebench.json`` says.

        public: uint8 [n, 3, S, S], the clean validation images, whose labels nobody is told.
        """
        root = Path(root).absolute()
        asked = read_settings(root / "flnoisebench.json", ArchiveSettings)
        where = _prepared_in(root)
        if where is not None:
            return _opened(where, root, asked, public)
        archive = self._sound(root, asked)
        needed = sum(map_bytes(len(archive.parts[part].keys), asked.size) for part in READ)
        if needed > IN_MEMORY:
            raise MissingData(
                f"{self.title} lies in {root}, but its {needed / 1e9:.0f} GB of pixels were not prepared.  Decode them "
                f"once with {data_command('prepare', self.name, root)} (with --images 64000: 13 GB)."
            )
        pixels = {part: decode_images(archive.files(part), asked.size) for part in READ}
        labels = {part: np.array(archive.parts[part].labels, dtype=np.int64) for part in READ}
        kept = {
            part: Prepared.Part(count=len(labels[part]), digest=digest_images(pixels[part]), labels=_sha(labels[part]))
            for part in READ
        }
        about = Prepared(settings=asked, classes=archive.classes, parts=kept)
        return _arrays(pixels, labels, about, public)

    def preparation(self, root: Path, *, where: Path | None, size: int | None, images: int | None) -> Preparation:
        """Decoding into ``where`` (default ``root/prepared``)."""
        root = Path(root).absolute()
        settings = read_settings(root / "flnoisebench.json", ArchiveSettings)
        said = {name: value for name, value in (("size", size), ("images", images)) if value is not None}
        settings = ArchiveSettings.model_validate({**settings.model_dump(), **said})
        archive = self._sound(root, settings)
        folder = root / "prepared" if where is None else Path(where).absolute()
        counts = {part: len(archive.parts[part].keys) for part in READ}
        needed = sum(map_bytes(count, settings.size) for count in counts.values())

        def run(progress: Progress) -> None:
            _prepare(archive, settings, folder, progress)

        about = ", ".join(f"{count:,} {part}" for part, count in counts.items())
        return Preparation(f"{about} images at {settings.size} x {settings.size}", needed, folder, run)

    def check(self, root: Path, progress: Progress) -> Iterator[Finding]:
        """Every bad line of every list, swapped and unusual counts; then the maps' digests, or where nothing was
        prepared each file: there, decodable, in training and test at once."""
        root = Path(root).absolute()
        where, settings = _prepared_in(root), read_settings(root / "flnoisebench.json", ArchiveSettings)
        archive = None
        if where is None or _annotations(root) is not None or _class_folders(root):
            archive = self._read(root, settings)
            yield from (Finding("problem", problem) for problem in archive.problems)
            yield from (Finding("note", note) for note in archive.notes)
        if where is not None:
            about = _about(where)
            for part, said in about.parts.items():
                found = digest_images(open_map(where / f"{part}.npy"), progress)
                if found != said.digest:
                    path = where / f"{part}.npy"
                    yield Finding("problem", f"{path} is damaged: its digest is {found}, expected {said.digest}")
            yield Finding("note", f"{where} holds memory maps at {about.settings.size} x {about.settings.size}")
        elif archive is not None:
            yield from _check_files(archive, progress)

    def make_fixture(self, folder: Path) -> str:
        """14 classes of striped JPEGs in the published layout, a third of the noisy labels wrong; 32 x 32 when read."""
        return _write_fixture(Path(folder))

    def _sound(self, root: Path, settings: ArchiveSettings) -> _Archive:
        """The archive, refused where a list has a problem; the balanced part of it that the settings ask for."""
        archive = self._read(root, settings)
        self.require_none(archive.problems, root)
        if settings.images:
            archive.parts["train"] = _balanced(archive.parts["train"], settings.images, root)
        return archive

    def _read(self, root: Path, settings: ArchiveSettings) -> _Archive:
        """Lists or class folders, with everything that is wrong with them."""
        annotations = _annotations(root)
        if annotations is not None:
            archive = _read_lists(root, annotations)
        elif _class_folders(root):
            archive = _read_folders(root, _class_folders(root))
        else:
            raise MissingData(
                f"{self.title} was looked for in {root}: there is no prepared.json, no noisy_label_kv.txt (there or in "
                f"a folder of it), and no noisy_train/<class>/ with test/<class>/.  {self.source}"
            )
        _check_parts(archive, self.counts, settings)
        return archive


# ------------------------------------------------------------------------------------------- the archive


@dataclass
class _Part:
    """Keys of images, relative to the images' folder, and their classes, in the order of the list."""

    keys: list[str] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)


@dataclass
class _Archive:
    images: Path  # the folder that keys are relative to
    classes: tuple[str, ...]
    parts: dict[str, _Part]
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def files(self, part: str) -> list[Path]:
        return [self.images / key for key in self.parts[part].keys]


def _annotations(root: Path) -> Path | None:
    """The folder with the lists: ``root``, or a folder in it."""
    found = [root, *sorted(root.glob("*/"))] if root.is_dir() else []
    return next((place for place in found if (place / "noisy_label_kv.txt").is_file()), None)


def _read_lists(root: Path, where: Path) -> _Archive:
    images = root / "images" if (root / "images").is_dir() else root
    archive = _Archive(images, _names(where), {})
    absent = sorted({name for names in LISTS.values() for name in names if not (where / name).is_file()})
    if absent:
        raise MissingData(f"{where} lacks {', '.join(absent)}; all six lists of the archive belong there")
    labels = {name: _read_labels(where / name, archive.problems) for _, name in LISTS.values()}
    for part, (keys, of) in LISTS.items():
        archive.parts[part] = _read_keys(where / keys, labels[of], where / of, archive.problems)
    return archive


def _names(where: Path) -> tuple[str, ...]:
    """The 14 class names; numbers where the file is not there."""
    path = where / "category_names_eng.txt"
    if not path.is_file():
        return tuple(map(str, range(CLASSES)))
    names = tuple(path.read_text(encoding="utf-8").split("\n"))
    names = tuple(name.strip() for name in names if name.strip())
    if len(names) != CLASSES or len(set(names)) != CLASSES:
        raise ValueError(f"{path} has {len(names)} names ({len(set(names))} different ones), not {CLASSES}")
    return names


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """(number from 1, line) without line ends; empty lines at the end are none."""
    text = path.read_bytes().decode("utf-8", "surrogateescape").rstrip("\r\n")
    return enumerate((line.rstrip("\r") for line in text.split("\n")) if text else (), 1)


def _key(text: str) -> str | None:
    """The key without "images/"; None where it is no path within the archive."""
    key = text.removeprefix("images/")
    parts = key.split("/")
    return key if key and text.strip() == text and ".." not in parts and "" not in parts else None


def _read_labels(path: Path, problems: list[str]) -> dict[str, int]:
    """{key: class} of a file of "<key> <class>" lines."""
    labels: dict[str, int] = {}
    for number, line in _lines(path):
        text, _, label = line.rpartition(" ")
        key = _key(text)
        if key is None or not label.isascii() or not label.isdecimal():
            why = "is empty" if not line.strip() else "has no label" if _key(line) and " " not in line else "is not"
            said = "" if why != "is not" else " '<key> <class>'"
            problems.append(f"{path}, line {number} {why}{said}: {line!r}")
        elif int(label) >= CLASSES:
            problems.append(f"{path}, line {number}: {label} is no class of 0..{CLASSES - 1}: {line!r}")
        elif labels.setdefault(key, int(label)) != int(label):
            problems.append(f"{path}, line {number}: {text} had the label {labels[key]} before, and has {label} here")
    return labels


def _read_keys(path: Path, labels: Mapping[str, int], of: Path, problems: list[str]) -> _Part:
    """The keys of a list with their labels; those without one are problems, and left out."""
    part, seen = _Part(), set()
    for number, line in _lines(path):
        key = _key(line)
        if key is None or " " in line:
            problems.append(f"{path}, line {number} is no key of an image: {line!r}")
        elif key in seen:
            problems.append(f"{path}, line {number}: {line} is in this list twice")
        elif key not in labels:
            problems.append(f"{path}, line {number}: {line} has no label in {of.name}")
        else:
            part.keys.append(key)
            part.labels.append(labels[key])
            seen.add(key)
    return part


def _class_folders(root: Path) -> dict[str, Path]:
    """{part: folder} of a copy in class folders; empty unless train and test are there."""
    found = {
        part: next((root / name for name in names if (root / name).is_dir()), None) for part, names in FOLDERS.items()
    }
    there = {part: folder for part, folder in found.items() if folder is not None}
    return there if {"train", "test"} <= there.keys() else {}


def _read_folders(root: Path, folders: Mapping[str, Path]) -> _Archive:
    """A copy in class folders: their number (q0003 is 3) or, where they have names, their order says the class."""
    archive = _Archive(root, (), {"val": _Part()})
    names = sorted({entry.name for folder in folders.values() for entry in folder.iterdir() if entry.is_dir()})
    numbers = [re.search(r"(\d+)$", name) for name in names]
    if len(names) != CLASSES:
        archive.problems.append(f"{root} has {len(names)} class folders, not {CLASSES}: {', '.join(names[:20])}")
    numbered = {name: int(number.group(1)) for name, number in zip(names, numbers, strict=True) if number}
    if sorted(numbered.values()) != list(range(len(names))):
        numbered = {name: place for place, name in enumerate(names)}
    archive.classes = tuple(sorted(names, key=lambda name: numbered[name]))
    for part, folder in folders.items():
        archive.parts[part] = _Part()
        for name in archive.classes:
            if not (folder / name).is_dir():
                archive.problems.append(f"{folder} has no class folder {name}")
                continue
            with os.scandir(folder / name) as entries:
                images = sorted(entry.name for entry in entries if _suffix(entry.name) in IMAGE_SUFFIXES)
            if others := [file for file in images if _suffix(file) not in READ_SUFFIXES]:
                archive.problems.append(f"{folder / name} has images that are not read, convert them: {some(others)}")
            files = [file for file in images if _suffix(file) in READ_SUFFIXES]
            archive.parts[part].keys += [f"{folder.name}/{name}/{file}" for file in files]
            archive.parts[part].labels += [numbered[name]] * len(files)
    return archive


def _suffix(name: str) -> str:
    return os.path.splitext(name)[1].lower()


def _check_parts(archive: _Archive, counts: Mapping[str, int], settings: ArchiveSettings) -> None:
    """Counts against the published ones, classes without an image, keys in two parts."""
    found = {part: len(content.keys) for part, content in archive.parts.items()}
    if (found["val"], found["test"]) == (counts["test"], counts["val"]):
        archive.problems.append(
            f"val and test are swapped: the published archive has {counts['val']:,} val and {counts['test']:,} test "
            f"images, these lists {found['val']:,} and {found['test']:,}"
        )
    for part, count in found.items():
        if count != counts[part]:
            archive.notes.append(f"{count:,} {part} images, where the published archive has {counts[part]:,}")
    for part in ("train", "test"):
        missing = sorted(set(range(len(archive.classes))) - set(archive.parts[part].labels))
        if missing:
            archive.problems.append(
                f"no {part} image of class {', '.join(archive.classes[label] for label in missing)}"
            )
    # sorted class folders name a part in their keys: there the file's own name says which image it is
    folders = tuple(f"{name}/" for names in FOLDERS.values() for name in names)
    own = {part: [key.rsplit("/", 1)[-1] if key.startswith(folders) else key for key in content.keys]
           for part, content in archive.parts.items()}  # fmt: skip
    kept_out = set(own["val"]) | set(own["test"])
    if both := sorted(set(own["val"]) & set(own["test"])):
        archive.problems.append(f"{len(both)} images are in val and in test, such as {', '.join(both[:3])}")
    if both := sorted(kept_out & set(own["train"])):
        text = f"{len(both)} training images are also in val or test, such as {', '.join(both[:3])}"
        if settings.drop_shared_keys:
            train, shared = archive.parts["train"], set(both)
            kept = [number for number, key in enumerate(own["train"]) if key not in shared]
            train.keys, train.labels = [train.keys[n] for n in kept], [train.labels[n] for n in kept]
            archive.notes.append(f"{text}: left out of training")
        else:
            archive.problems.append(f'{text}; {{"drop_shared_keys": true}} in flnoisebench.json leaves them out')
    if both := set(own.get("clean-train", ())) & kept_out:
        archive.notes.append(f"{len(both)} clean-train images, which nothing trains on, are also in val or test")


def _balanced(part: _Part, images: int, root: Path) -> _Part:
    """That many images, the same number of each class (the first classes have one more where it does not divide).

    Which ones is up to the SHA-256 of their keys: no generator's release can move it, and of two sizes the smaller one
    is part of the larger.  The order stays the list's.
    """
    each, rest = divmod(images, CLASSES)
    by_class: list[list[int]] = [[] for _ in range(CLASSES)]
    for place, label in enumerate(part.labels):
        by_class[label].append(place)
    chosen: list[int] = []
    for label, places in enumerate(by_class):
        wanted = each + (label < rest)
        if len(places) < wanted:
            raise ValueError(
                f"{root}: {images:,} balanced images need {wanted:,} of class {label}, which has {len(places):,}; "
                f"at most {min(map(len, by_class)) * CLASSES:,} images can be balanced"
            )
        ranked = sorted(
            places, key=lambda place: hashlib.sha256(part.keys[place].encode(errors="surrogateescape")).digest()
        )
        chosen += ranked[:wanted]
    chosen.sort()
    return _Part([part.keys[place] for place in chosen], [part.labels[place] for place in chosen])


def _check_files(archive: _Archive, progress: Progress) -> Iterator[Finding]:
    """Missing and undecodable files, and test images that are also training images, byte by byte."""
    named = [(part, file) for part in READ for file in archive.files(part)]

    def look(file: Path) -> tuple[bytes, str]:
        try:
            content = file.read_bytes()
        except OSError as error:
            return b"", f"{file}: {error.strerror or error}"
        try:
            pixels_of(file, 16)
        except ValueError as error:
            return b"", str(error)
        return hashlib.sha256(content).digest(), ""

    seen: dict[bytes, Path] = {}
    with ThreadPoolExecutor(min(32, os.cpu_count() or 1)) as pool:
        for start in range(0, len(named), 4096):  # so that no million of tasks waits
            group = named[start : start + 4096]
            for (part, file), (digest, problem) in zip(group, pool.map(look, (file for _, file in group)), strict=True):
                if problem:
                    yield Finding("problem", problem)
                elif part == "train":
                    seen[digest] = file
                elif part == "test" and digest in seen:
                    yield Finding("problem", f"{file} is a test image and also the training image {seen[digest]}")
            progress(min(start + 4096, len(named)), len(named))


# ------------------------------------------------------------------------------------------- memory maps


def _prepared_in(root: Path) -> Path | None:
    return next((place for place in (root / "prepared", root) if (place / "prepared.json").is_file()), None)


def _about(where: Path) -> Prepared:
    path = where / "prepared.json"
    try:
        return Prepared.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:  # pydantic's is one
        found = str(error).replace("\n", " ")
        raise ValueError(f"{path} is damaged: {found}.  Delete it and prepare the data again") from error


def _opened(where: Path, root: Path, asked: ArchiveSettings, public: bool) -> Arrays:
    about = _about(where)
    if (root / "flnoisebench.json").is_file() and asked != about.settings:
        raise ValueError(
            f"{where} was prepared with {about.settings.model_dump()}, and {root / 'flnoisebench.json'} says "
            f"{asked.model_dump()}: prepare again, or put one right"
        )
    pixels, labels = {}, {}
    for part, said in about.parts.items():
        paths = where / f"{part}.npy", where / f"{part}_labels.npy"
        for path in paths:
            if not path.is_file():
                raise ValueError(f"{path} is not there, though {where / 'prepared.json'} is: prepare the data again")
        try:
            pixels[part], labels[part] = open_map(paths[0]), np.load(paths[1])
        except EOFError as error:
            raise ValueError(f"{paths[1]} is empty: prepare the data again") from error
        shape = (said.count, 3, about.settings.size, about.settings.size)
        if tuple(pixels[part].shape) != shape or _sha(labels[part]) != said.labels:
            raise ValueError(f"{paths[0]} or {paths[1].name} is not what prepared.json says: prepare the data again")
    return _arrays(pixels, labels, about, public)


def _arrays(
    pixels: Mapping[str, torch.Tensor], labels: Mapping[str, np.ndarray], about: Prepared, public: bool
) -> Arrays:
    told = {part: about.parts[part].model_dump() for part in ("train", "test")}
    identity = json.dumps({"size": about.settings.size, "classes": about.classes, "parts": told}, sort_keys=True)
    if public and not about.parts["val"].count:
        raise MissingData("the public images are the validation images, of which this copy of Clothing1M has none")
    return Arrays(
        train_images=pixels["train"],
        train_labels=torch.from_numpy(labels["train"]),
        test_images=pixels["test"],
        test_labels=torch.from_numpy(labels["test"]),
        public=pixels["val"] if public else None,
        classes=about.classes,
        crop=about.settings.size * 7 // 8,
        digest=hashlib.sha256(identity.encode()).hexdigest(),
    )


def _prepare(archive: _Archive, settings: ArchiveSettings, where: Path, progress: Progress) -> None:
    where.mkdir(parents=True, exist_ok=True)
    total, before, parts = sum(len(archive.parts[part].keys) for part in READ), 0, {}
    described = where / "prepared.json"
    described.unlink(missing_ok=True)  # what it says stops being so
    for part in READ:
        files, labels = archive.files(part), np.array(archive.parts[part].labels, dtype=np.int64)

        def advance(done: int, of: int, before: int = before) -> None:
            progress(before + done, total)

        digest = map_images(where / f"{part}.npy", files, settings.size, advance)
        np.save(where / f"{part}_labels.npy", labels, allow_pickle=False)
        parts[part] = Prepared.Part(count=len(files), digest=digest, labels=_sha(labels))
        before += len(files)
    about = Prepared(settings=settings, classes=archive.classes, parts=parts)
    fresh = described.with_name("prepared.json.new")
    fresh.write_text(about.model_dump_json(indent=2) + "\n", encoding="utf-8")
    os.replace(fresh, described)


def _sha(labels: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(labels, dtype=np.int64).data).hexdigest()


# ----------------------------------------------------------------------------------------------- imitation

_ENGLISH = (
    "T-Shirt", "Shirt", "Knitwear", "Chiffon", "Sweater", "Hoodie", "Windbreaker", "Jacket", "Downcoat", "Suit",
    "Shawl", "Dress", "Vest", "Underwear",
)  # fmt: skip
_CHINESE = (
    "T恤", "衬衫", "针织衫", "雪纺衫", "毛衣", "卫衣", "风衣", "夹克", "羽绒服", "西装", "披肩",
    "连衣裙", "背心", "内衣",
)  # fmt: skip
_EACH = {"train": 12, "clean-train": 2, "val": 2, "test": 5}  # images a class of the imitation


def _write_fixture(root: Path) -> str:
    if root.exists() and any(root.iterdir()):
        raise ValueError(f"{root} is not empty: an imitation beside other files could be taken for data")
    root.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(1)
    keys: dict[str, list[str]] = {part: [] for part in LISTS}
    noisy, clean = [], []
    number = 0
    for part, each in _EACH.items():
        for round in range(each):
            for label in range(CLASSES):
                name = f"{1278541879 + 7919 * number},{867148000 + number}.jpg"
                key = f"images/{number % 10}/{number // 10 % 100:02}/{name}"
                _draw(root / key, label, rng)
                keys[part].append(key)
                given = (label + 1 + number % 5) % CLASSES if round % 3 == 0 else label  # a third is wrong
                noisy.append(f"{key} {given}")  # as published, images with a clean label have the shop's too
                if part != "train":
                    clean.append(f"{key} {label}")
                number += 1
    texts: dict[str, Iterable[str]] = {LISTS[part][0]: listed for part, listed in keys.items()}
    texts |= {"noisy_label_kv.txt": noisy, "clean_label_kv.txt": clean}
    texts |= {"category_names_eng.txt": _ENGLISH, "category_names_chn.txt": _CHINESE}
    texts["README.md"] = [
        "An imitation of Clothing1M for tests, made by `flnoisebench data make-fixture`: stripes, no clothes."
    ]
    for name, lines in texts.items():
        (root / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    (root / "flnoisebench.json").write_text('{"size": 32}\n')
    return ", ".join(f"{len(listed)} {part}" for part, listed in keys.items()) + " images"


def _draw(path: Path, label: int, rng: Any) -> None:
    """A portrait JPEG with stripes, whose direction and colour say the class."""
    path.parent.mkdir(parents=True, exist_ok=True)
    height, width = 48 + int(rng.integers(16)), 40
    down, along = np.mgrid[:height, :width]
    angle = np.pi * (label % 7) / 7
    wave = np.sin((down * np.cos(angle) + along * np.sin(angle)) * 0.7 + rng.uniform(0, 6.3))
    colour = np.array([200, 90, 60] if label < 7 else [60, 90, 200])
    pixels = colour * (0.6 + 0.4 * wave[..., None]) + rng.normal(0, 12, (height, width, 3))
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(path, quality=90)
