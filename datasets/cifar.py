"""CIFAR-10 and CIFAR-100 (Krizhevsky, 2009): 60,000 colour images each, 32 x 32, in the published Python files.

The published files are pickles, which can run code when they are read.  Each file is therefore read once, its
bytes are compared with the published MD5, and only those bytes are unpickled.  torchvision's own reader is not
used for that: it opens every file again after its check, and hashes all six files in each of the two calls that
train and test need.  Names, MD5 sums and the download are torchvision's.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torchvision import datasets as official

from flnoisebench.api import Arrays, Dataset, MissingData

_TERMS = (
    "https://www.cs.toronto.edu/~kriz/cifar.html (A. Krizhevsky, Learning Multiple Layers of Features from Tiny "
    "Images, 2009; no licence is stated, the author asks for this citation)."
)


class CIFAR10(Dataset):
    """CIFAR-10: 50,000 training and 10,000 test images, uint8 [n, 3, 32, 32], the official split and order, so
    CIFAR-10N's human labels apply by index.  Read from ``root/cifar-10-batches-py``."""

    name = "cifar10"
    title = "CIFAR-10"
    classes: ClassVar[tuple[str, ...]] = (
        "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
    )  # fmt: skip
    # Of the training part; tests/test_datasets.py holds them.  The (.2023, .1994, .2010) seen elsewhere is the
    # mean of each image's own spread, not the spread of the pixels.
    mean: ClassVar[tuple[float, ...]] = (0.4914, 0.4822, 0.4465)
    std: ClassVar[tuple[float, ...]] = (0.2470, 0.2435, 0.2616)
    crop_padding = 4  # the usual augmentation since He et al., 2016
    flip = True
    protocol = "cifar10"
    source = _TERMS
    files: ClassVar[type[official.CIFAR10]] = official.CIFAR10  # names and MD5 sums
    public_files: ClassVar[type[official.CIFAR10]] = official.CIFAR100  # the set that lends public images

    def load(self, root: Path, *, public: bool = False) -> Arrays:
        """Read and check the files.

        Raises MissingData, which lists the missing files with their MD5 sums, and ValueError, which names the
        damaged file.

        public: uint8 [50000, 3, 32, 32], the training images of the other CIFAR, from the same ``root``.
        """
        root = Path(root).absolute()
        _require(root, self.files, [*self.files.train_list, *self.files.test_list], self.title)
        if public:  # before anything is read: the answer must not take a second to come
            _require(root, self.public_files, self.public_files.train_list, f"The public set of {self.title}")
        train_images, train_labels = _read(root, self.files, self.files.train_list)
        test_images, test_labels = _read(root, self.files, self.files.test_list)
        return Arrays(
            train_images=train_images,
            train_labels=train_labels,
            test_images=test_images,
            test_labels=test_labels,
            public=_read(root, self.public_files, self.public_files.train_list)[0] if public else None,
        )

    def fetch(self, root: Path) -> None:
        """Download and unpack into ``root`` (torchvision, 170 MB), MD5-checked.

        An archive that already lies in ``root`` is unpacked and nothing is downloaded.  Raises MissingData with
        another way when the server does not answer.
        """
        try:
            self.files(str(root), download=True)
        except (OSError, RuntimeError) as error:
            raise MissingData(
                f"{self.title} could not be downloaded from {self.files.url}: {error}.  Try again later, or put "
                f"{self.files.filename} (MD5 {self.files.tgz_md5}) from a mirror into {Path(root).absolute()} and run "
                f"the same command again: it will be checked and unpacked."
            ) from error


class CIFAR100(CIFAR10):
    """CIFAR-100 with its fine labels: 50,000 training and 10,000 test images, uint8 [n, 3, 32, 32], the official
    split and order, so CIFAR-100N's human labels apply by index.  Read from ``root/cifar-100-python``."""

    name = "cifar100"
    title = "CIFAR-100"
    classes: ClassVar[tuple[str, ...]] = (
        "apple", "aquarium_fish", "baby", "bear", "beaver", "bed", "bee", "beetle", "bicycle", "bottle", "bowl",
        "boy", "bridge", "bus", "butterfly", "camel", "can", "castle", "caterpillar", "cattle", "chair", "chimpanzee",
        "clock", "cloud", "cockroach", "couch", "crab", "crocodile", "cup", "dinosaur", "dolphin", "elephant",
        "flatfish", "forest", "fox", "girl", "hamster", "house", "kangaroo", "keyboard", "lamp", "lawn_mower",
        "leopard", "lion", "lizard", "lobster", "man", "maple_tree", "motorcycle", "mountain", "mouse", "mushroom",
        "oak_tree", "orange", "orchid", "otter", "palm_tree", "pear", "pickup_truck", "pine_tree", "plain", "plate",
        "poppy", "porcupine", "possum", "rabbit", "raccoon", "ray", "road", "rocket", "rose", "sea", "seal", "shark",
        "shrew", "skunk", "skyscraper", "snail", "snake", "spider", "squirrel", "streetcar", "sunflower",
        "sweet_pepper", "table", "tank", "telephone", "television", "tiger", "tractor", "train", "trout", "tulip",
        "turtle", "wardrobe", "whale", "willow_tree", "wolf", "woman", "worm",
    )  # fmt: skip
    mean: ClassVar[tuple[float, ...]] = (0.5071, 0.4865, 0.4409)  # as commonly given for the training part
    std: ClassVar[tuple[float, ...]] = (0.2673, 0.2564, 0.2762)
    protocol = "cifar100"
    files: ClassVar[type[official.CIFAR10]] = official.CIFAR100
    public_files: ClassVar[type[official.CIFAR10]] = official.CIFAR10

    def superclasses(self, root: Path) -> torch.Tensor:
        """int64 [100]: the superclass, 0..19, of each fine class, as the training file states it.

        Raises as ``load`` does.
        """
        root = Path(root).absolute()
        _require(root, self.files, self.files.train_list, self.title)
        (batch,) = _batches(root, self.files, self.files.train_list)
        coarse = torch.empty(len(self.classes), dtype=torch.int64)
        coarse[torch.tensor(batch["fine_labels"])] = torch.tensor(batch["coarse_labels"])
        return coarse


def _require(root: Path, files: type[official.CIFAR10], listed: Sequence[Sequence[str]], what: str) -> None:
    """Raise MissingData unless all listed (name, MD5) files are there."""
    folder = root / files.base_folder
    absent = [f"{name} (MD5 {md5})" for name, md5 in listed if not (folder / name).is_file()]
    if not absent:
        return
    name = files.__name__
    raise MissingData(
        f"{what} is read from {folder}, which "
        + (f"lacks {', '.join(absent)}" if folder.is_dir() else "is not there")
        + f".  Get it with `flnoisebench data fetch {name.lower()} --data-root {root}`; where "
        f"{files.filename} already lies in {root}, that unpacks it without a download."
    )


def _batches(root: Path, files: type[official.CIFAR10], listed: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """The listed (name, MD5) files, unpickled.  ValueError, naming the file, where the MD5 differs."""
    batches = []
    for name, md5 in listed:
        path = root / files.base_folder / name
        content = path.read_bytes()
        found = hashlib.md5(content, usedforsecurity=False).hexdigest()
        if found != md5:
            raise ValueError(
                f"{path} is damaged or truncated: {len(content)} bytes with MD5 {found}, expected MD5 {md5}.  Delete "
                f"it and run `flnoisebench data fetch {files.__name__.lower()} --data-root {root}`."
            )
        batches.append(pickle.loads(content, encoding="latin1"))  # written by Python 2
    return batches


def _read(
    root: Path, files: type[official.CIFAR10], listed: Sequence[Sequence[str]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Images uint8 [n, 3, 32, 32] and (fine) labels int64 [n] of the listed files, in their order."""
    batches = _batches(root, files, listed)
    key = "fine_labels" if "fine_labels" in batches[0] else "labels"
    images = torch.from_numpy(np.concatenate([batch["data"] for batch in batches])).view(-1, 3, 32, 32)
    return images, torch.tensor([label for batch in batches for label in batch[key]], dtype=torch.int64)
