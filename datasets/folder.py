"""Any image folder: ``root/train/<class>/*.png`` and ``root/test/<class>/*.png`` (jpg, jpeg, webp and bmp too)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch

from flnoisebench.api import (
    IMAGE_SUFFIXES,
    Arrays,
    Dataset,
    Finding,
    ImageSettings,
    MissingData,
    Progress,
    decode_images,
    image_files,
    read_settings,
    refuse_shared,
    some,
    undecodable,
)


class Folder(Dataset):
    """A folder of images, read into memory as uint8 [n, 3, S, S]; the classes are the names of its sub-folders.

    Each image's short side is scaled to S (bilinear) and the centre is kept.  S is 64, or what the optional file
    ``root/flnoisebench.json`` says: ``{"size": 96}``.  Grey images become RGB, 16-bit grey keeps its upper 8 bits,
    transparency is dropped, a camera's orientation mark is applied, and of an animation the first frame is read.
    Hidden files and files of other kinds are passed over.  Images are sorted by class and file name, which numbers them
    for whoever writes a split; runs shuffle them.

    A million images of 64 x 64 take 12 GB of memory, and twice that while a run starts.
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
        size = read_settings(root / "flnoisebench.json", ImageSettings).size
        train, test = _classes(root / "train"), _classes(root / "test")
        for here, there, missing in (("train", "test", train.keys() - test), ("test", "train", test.keys() - train)):
            if missing:
                raise ValueError(
                    f"{root}: {some(sorted(missing))} in {here}/ but not in {there}/; every class needs both"
                )
        if len(train) < 2:
            raise ValueError(f"{root / 'train'} has {len(train)} class folders; a classification needs two at least")
        train_files = [file for files in train.values() for file in files]
        test_files = [file for files in test.values() for file in files]
        train_images, test_images = decode_images(train_files, size), decode_images(test_files, size)
        refuse_shared(train_files, train_images, test_files, test_images)
        return Arrays(
            train_images=train_images,
            train_labels=_labels(train),
            test_images=test_images,
            test_labels=_labels(test),
            public=decode_images(image_files(root / "public"), size) if public else None,
            classes=tuple(train),
        )

    def check(self, root: Path, progress: Progress) -> Iterator[Finding]:
        """All images that cannot be decoded; ``load`` names the first."""
        parts = [Path(root).absolute() / part for part in ("train", "test", "public")]
        found = ((part, file) for part in parts for file in _below(part) if file.suffix.lower() in IMAGE_SUFFIXES)
        files = sorted(file for part, file in found if not _hidden(file.relative_to(part)))
        yield from (Finding("problem", problem) for problem in undecodable(files))


def _below(part: Path) -> Iterator[Path]:
    """All files, those of linked class folders too, which ``load`` reads."""
    for folder, _, names in os.walk(part, followlinks=True):
        yield from (Path(folder, name) for name in names)


def _hidden(path: Path) -> bool:
    return any(name.startswith(".") for name in path.parts)


def _classes(part: Path) -> dict[str, list[Path]]:
    """{class: its image files}, both sorted by name: the order of a directory is up to the file system."""
    entries = sorted(entry for entry in part.iterdir() if not entry.name.startswith("."))
    if gone := [str(entry) for entry in entries if not entry.exists()]:
        raise ValueError(f"{some(gone)}: a link that leads nowhere, whose images would be left out; mend or remove it")
    stray = [str(entry) for entry in entries if entry.is_file() and entry.suffix.lower() in IMAGE_SUFFIXES]
    if stray:
        raise ValueError(f"{some(stray)} outside of a class folder: images belong into {part}/<class>/")
    return {entry.name: image_files(entry) for entry in entries if entry.is_dir()}


def _labels(classes: dict[str, list[Path]]) -> torch.Tensor:
    counts = torch.tensor([len(files) for files in classes.values()])
    return torch.repeat_interleave(torch.arange(len(classes)), counts)
