"""CIFAR-10 and CIFAR-100 (Krizhevsky, 2009): 60,000 colour images each, 32 x 32, in the published Python files.

The published files are pickles, which can run code when they are read.  Each file is therefore read once, its
bytes are compared with the published MD5, and only those bytes are unpickled.  torchvision's own reader is not
used for that: it opens every file again after its check, and hashes all six files in each of the two calls that
train and test need.  Names, MD5 sums and the download are torchvision's.
"""

from __future__ import annotations

import codecs
import hashlib
import io
import pickle
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torchvision import datasets as official
from torchvision.datasets.utils import download_url

from flnoisebench.api import Arrays, Dataset, MissingData, data_command, decode_images, image_files

_HUMAN = "https://github.com/UCSC-REAL/cifar-10-100n"
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
    published_order = True
    protocol = "cifar10"
    source = _TERMS
    files: ClassVar[type[official.CIFAR10]] = official.CIFAR10  # names and MD5 sums
    public_files: ClassVar[type[official.CIFAR10]] = official.CIFAR100  # the set that lends public images
    human_file: ClassVar[tuple[str, str]] = ("CIFAR-10_human.pt", "96644db5574813cae939af5f7f2a0aec")
    # of the label sets in it, by ``_content``
    human_sha256 = "09fa057ef46ad628d0e3c2df5b3837b22e77b8a2ce365ef9772f297ef7ecff9c"

    def load(self, root: Path, *, public: bool = False) -> Arrays:
        """Read and check the files.

        Raises MissingData, which lists the missing files with their MD5 sums, and ValueError, which names the
        damaged file.

        public: uint8 [n, 3, 32, 32], the images of the folder ``root/cifar10-public`` (-100-) where there is one, by
        file name; otherwise the 50,000 training images of the other CIFAR, from the same ``root``.
        """
        root = Path(root).absolute()
        _require(root, self.files, [*self.files.train_list, *self.files.test_list], self.title)
        own = root / f"{self.name}-public"
        if public and not own.is_dir():  # before anything is read: the answer must not take a second to come
            _require(root, self.public_files, self.public_files.train_list, f"The public set of {self.title}")
        train_images, train_labels = _read(root, self.files, self.files.train_list)
        test_images, test_labels = _read(root, self.files, self.files.test_list)
        return Arrays(
            train_images=train_images,
            train_labels=train_labels,
            test_images=test_images,
            test_labels=test_labels,
            public=self._public(root, own) if public else None,
        )

    def _public(self, root: Path, own: Path) -> torch.Tensor:
        if not own.is_dir():
            return _read(root, self.public_files, self.public_files.train_list)[0]
        return decode_images(image_files(own), 32)

    def human_labels(self, root: Path) -> dict[str, torch.Tensor]:
        """CIFAR-10N's label sets (Wei et al., ICLR 2022): aggre_label, random_label1, random_label2, random_label3 and
        worse_label, int64 [50000] each; CIFAR-100N's: noisy_label.  Read from ``root/CIFAR-10_human.pt`` (or -100_), or
        where only that is there from ``root/CIFAR-10_human.npz``, the same label sets as arrays of whole numbers.

        Raises MissingData, and ValueError, naming the file, where it is not what was published or its labels belong
        to images in another order.
        """
        root = Path(root).absolute()
        _require(root, self.files, self.files.train_list, self.title)
        return _human(root, self, _read(root, self.files, self.files.train_list)[1])

    def fetch_human_labels(self, root: Path) -> None:
        """Download CIFAR-N's file into ``root`` (2.4 MB, CC BY-NC 4.0), MD5-checked.

        Raises MissingData with another way when the server does not answer.
        """
        name, md5 = self.human_file
        try:
            download_url(f"{_HUMAN}/raw/main/data/{name}", str(root), name, md5)
        except (OSError, RuntimeError) as error:
            raise MissingData(
                f"human labels of {self.title} could not be downloaded from {_HUMAN}: {error}.  Try again later, or "
                f"put data/{name} (MD5 {md5}) of a copy of that repository into {Path(root).absolute()}."
            ) from error

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
    human_file: ClassVar[tuple[str, str]] = ("CIFAR-100_human.pt", "a67b45c1d7992051865b5c755bd68bb1")
    human_sha256 = "4cd919b4d65bbc50f9e5c0625820af71942df01af3436c7d79b99c42f4e16ecd"


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
        + f".  Get it with {data_command('fetch', name.lower(), root)}; where "
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
                f"it and run {data_command('fetch', files.__name__.lower(), root)}."
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


# The published files hold numpy arrays, which torch reads without running anything once these names are allowed.
_NUMPY = [
    # its home is numpy.core before numpy 2, numpy._core from there on
    *[(np.zeros(0).__reduce__()[0], f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")],
    (np.ndarray, "numpy.ndarray"),
    (np.dtype, "numpy.dtype"),
    (codecs.encode, "_codecs.encode"),
    type(np.dtype(np.int64)),
]


def _human(root: Path, dataset: CIFAR10, clean: torch.Tensor) -> dict[str, torch.Tensor]:
    """The label sets of a CIFAR-N file, coarse ones apart.  clean: int64 [n], the true labels in the images' order."""
    name, md5 = dataset.human_file
    path = root / name
    arrays = path.with_suffix(".npz")
    if path.is_file() or not arrays.is_file():
        sets = _published(path, md5, dataset.name)
    else:
        path = arrays
        try:
            with np.load(path, allow_pickle=False) as content:
                sets = {key: content[key] for key in content.files}
        except (ValueError, EOFError, AttributeError, zipfile.BadZipFile, zlib.error) as error:
            raise ValueError(f"{path} is no npz file or damaged ({error}): bring it anew") from error
        if _content(sets) != dataset.human_sha256:
            raise ValueError(
                f"{path} does not hold the label sets of data/{name} of {_HUMAN}: {', '.join(sorted(sets))}"
            )
    labels = {key: torch.as_tensor(np.asarray(values), dtype=torch.int64) for key, values in sets.items()}
    if not torch.equal(labels.pop("clean_label"), clean):
        raise ValueError(f"{path}: its clean labels are not those of the images in {root}: they are in another order")
    return {key: values for key, values in labels.items() if "coarse" not in key}


def _published(path: Path, md5: str, dataset: str) -> dict[str, Any]:
    """The label sets of the published file, of the published bytes."""
    if not path.is_file():
        raise MissingData(
            f"Human labels are read from {path} (MD5 {md5}), which is not there.  It is data/{path.name} of {_HUMAN} "
            f"(Wei et al., ICLR 2022; CC BY-NC 4.0): get it with "
            f"{data_command('fetch', dataset, path.parent, '--human-labels')}."
        )
    content = path.read_bytes()
    found = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if found != md5:
        raise ValueError(
            f"{path} is another file or damaged: {len(content)} bytes with MD5 {found}, expected MD5 {md5}"
        )
    with torch.serialization.safe_globals(_NUMPY):
        return torch.load(io.BytesIO(content), weights_only=True)


def _content(sets: Mapping[str, Any]) -> str:
    """SHA-256 of label sets whatever file they lie in: names in order, each followed by its labels, a byte each."""
    whole = hashlib.sha256()
    for key in sorted(sets):
        whole.update(key.encode())
        whole.update(np.asarray(sets[key]).astype(np.uint8).tobytes())
    return whole.hexdigest()
