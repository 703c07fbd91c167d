"""Any image folder: ``root/train/<class>/*.png`` and ``root/test/<class>/*.png`` (jpg, jpeg, webp and bmp too)."""

from __future__ import annotations

import difflib
import hashlib
import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps

from flnoisebench.api import Arrays, Dataset, MissingData

_READ = {".png", ".jpg", ".jpeg", ".webp", ".bmp"}
_OTHER = {".avif", ".gif", ".heic", ".jfif", ".jp2", ".tif", ".tiff"}  # refused, not passed over: no silent loss
_STRETCH = 64  # files a thread reads at a time; one task a file would cost a gigabyte of bookkeeping at 1M files


class Folder(Dataset):
    """A folder of images, read into memory as uint8 [n, 3, S, S]; the classes are the names of its sub-folders.

    Each image's short side is scaled to S (bilinear) and the centre is kept.  S is 64, or what the optional file
    ``root/flnoisebench.json`` says: ``{"size": 96}``.  Grey images become RGB, 16-bit grey keeps its upper 8 bits,
    transparency is dropped, a camera's orientation mark is applied, and of an animation the first frame is read.
    Hidden files and files of other kinds are passed over.  Images are sorted by class and file name.

    A million images of 64 x 64 take 12 GB of memory.
    """

    name = "folder"
    title = "Image folder"
    classes = ()  # learned by ``load``
    mean = (0.485, 0.456, 0.406)  # ImageNet's: a folder's own would change with each image that is added
    std = (0.229, 0.224, 0.225)
    crop_padding = 4  # CIFAR's; an eighth of the side, as there, would be 8 at S = 64, but S is the folder's to choose
    flip = True
    protocol = "folder"
    source = (
        "Your own images: DIR/train/<class>/* and DIR/test/<class>/* (png, jpg, jpeg, webp, bmp), optionally "
        'DIR/public/* and DIR/flnoisebench.json ({"size": 64}), used with --data-root DIR.'
    )

    def load(self, root: Path, *, public: bool = False) -> Arrays:
        """Read all images.

        Raises MissingData where train/ or test/ (or public/, when asked for) is not there, and ValueError, naming
        the file or folder: an image that cannot be decoded or is of a kind not read, a class without images, one
        that is not in both parts, fewer than two classes, the same pixels in train and test, bad settings.

        public: uint8 [n, 3, S, S], the images of ``root/public``, which has no sub-folders.
        """
        root = Path(root).absolute()
        for part in ("train", "test", "public") if public else ("train", "test"):
            if not (root / part).is_dir():
                raise MissingData(f"An image folder was looked for in {root}, which has no {part}/.  {self.source}")
        size = _size(root / "flnoisebench.json")
        train, test = _classes(root / "train"), _classes(root / "test")
        for here, there, missing in (("train", "test", train.keys() - test), ("test", "train", test.keys() - train)):
            if missing:
                raise ValueError(
                    f"{root}: {_some(sorted(missing))} in {here}/ but not in {there}/; every class needs both"
                )
        if len(train) < 2:
            raise ValueError(f"{root / 'train'} has {len(train)} class folders; a classification needs two at least")
        train_files = [file for files in train.values() for file in files]
        test_files = [file for files in test.values() for file in files]
        train_images, test_images = _decode(train_files, size), _decode(test_files, size)
        _refuse_overlap(train_files, train_images, test_files, test_images)
        return Arrays(
            train_images=train_images,
            train_labels=_labels(train),
            test_images=test_images,
            test_labels=_labels(test),
            public=_decode(_images(root / "public"), size) if public else None,
            classes=tuple(train),
        )


def _size(path: Path) -> int:
    """The side in pixels from the settings file, 64 without one."""
    if not path.is_file():
        return 64
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # not JSON, or not UTF-8
        raise ValueError(f'{path} is not JSON: {error}.  It may say {{"size": 64}}') from error
    if not isinstance(settings, dict):
        raise ValueError(f'{path} must hold an object such as {{"size": 64}}, not {settings!r}')
    for key in settings.keys() - {"size"}:
        near = ".  Did you mean size?" if difflib.get_close_matches(key, ["size"]) else ""
        raise ValueError(f"{path}: unknown setting {key!r} (the only one is size){near}")
    size = settings.get("size", 64)
    if type(size) is not int or not 8 <= size <= 1024:  # type(): JSON's true is no size
        raise ValueError(f"{path}: size must be a whole number of pixels from 8 to 1024, not {size!r}")
    return size


def _classes(part: Path) -> dict[str, list[Path]]:
    """{class: its image files}, both sorted by name: the order of a directory is up to the file system."""
    entries = sorted(entry for entry in part.iterdir() if not entry.name.startswith("."))
    stray = [str(entry) for entry in entries if entry.is_file() and entry.suffix.lower() in _READ | _OTHER]
    if stray:
        raise ValueError(f"{_some(stray)} outside of a class folder: images belong into {part}/<class>/")
    return {entry.name: _images(entry) for entry in entries if entry.is_dir()}


def _images(folder: Path) -> list[Path]:
    """The image files of a folder, sorted by name.  ValueError where it has none or something would be left out."""
    entries = sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
    for entry in entries:
        if entry.is_dir():
            raise ValueError(f"{entry} is a folder within a folder of images, whose images would be left out")
        if entry.suffix.lower() in _OTHER:
            raise ValueError(f"{entry}: {entry.suffix} is not read; convert it to one of {', '.join(sorted(_READ))}")
    images = [entry for entry in entries if entry.suffix.lower() in _READ]
    if not images:
        raise ValueError(f"{folder} has no image; remove it or fill it ({', '.join(sorted(_READ))})")
    return images


def _labels(classes: dict[str, list[Path]]) -> torch.Tensor:
    counts = torch.tensor([len(files) for files in classes.values()])
    return torch.repeat_interleave(torch.arange(len(classes)), counts)


def _decode(files: Sequence[Path], size: int) -> torch.Tensor:
    """uint8 [n, 3, size, size], in the order of the files.  Threads: Pillow decodes and scales outside the GIL."""
    images = np.empty((len(files), 3, size, size), dtype=np.uint8)

    def fill(start: int) -> None:
        for index in range(start, min(start + _STRETCH, len(files))):
            images[index] = _pixels(files[index], size).transpose(2, 0, 1)

    with ThreadPoolExecutor(max_workers=min(32, os.cpu_count() or 1)) as pool:
        for _ in pool.map(fill, range(0, len(files), _STRETCH)):
            pass  # the first failure in the order of the files is raised here, and what has not begun is cancelled
    return torch.from_numpy(images)


def _pixels(path: Path, size: int) -> np.ndarray:
    """One image, uint8 [size, size, 3].  ValueError, naming the file, where it cannot be decoded."""
    try:
        with Image.open(path) as opened:
            image = ImageOps.exif_transpose(opened)
            if image.mode.startswith("I"):  # 16-bit grey, which Pillow would clip to white instead of scaling
                image = Image.fromarray((np.asarray(image) >> 8).clip(0, 255).astype(np.uint8))
            if "transparency" in image.info:  # palette images lose theirs only by way of RGBA
                image = image.convert("RGBA")
            return np.asarray(ImageOps.fit(image.convert("RGB"), (size, size), Image.Resampling.BILINEAR))
    except Exception as error:  # Pillow's decoders raise OSError, SyntaxError, ValueError, struct.error, ...
        raise ValueError(f"{path} cannot be decoded as an image: {error}") from error


def _refuse_overlap(
    train_files: Sequence[Path], train_images: torch.Tensor, test_files: Sequence[Path], test_images: torch.Tensor
) -> None:
    """ValueError where train and test share an image.  Compared are the scaled pixels, as training sees them: so a
    copy that was saved again without loss, or under another name, is found too."""

    def digests(images: torch.Tensor) -> list[bytes]:
        return [hashlib.sha256(image).digest() for image in images.numpy()]

    known = dict(zip(digests(train_images), train_files, strict=True))
    shared = [
        f"{known[digest]} = {file}"
        for digest, file in zip(digests(test_images), test_files, strict=True)
        if digest in known
    ]
    if shared:
        raise ValueError(
            f"{len(shared)} test images are also training images, so accuracy would be that of memory: {_some(shared)}"
        )


def _some(items: Sequence[str]) -> str:
    """Up to three of the items, and how many more there are."""
    return ", ".join(items[:3]) + (f" and {len(items) - 3} more" if len(items) > 3 else "")
