"""MNIST (LeCun, Cortes, Burges, 1998) and Fashion-MNIST (Xiao, Rasul, Vollgraf, 2017): 70,000 grey images of digits or
clothes each, 28 x 28, in the same file format."""

from __future__ import annotations

import gzip
import hashlib
import zlib
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 (torch's own abbreviation)
import torchvision
from sklearn.datasets import load_digits

from flnoisebench.api import Arrays, Dataset, MissingData, data_command

# SHA-256 and length of each file's *content*, images and labels of the training and of the test part.
#
# Fashion-MNIST: the published MD5 sums are those of the .gz files, which Debian's package cannot match: its build
# strips name and time from the gzip header.  With both put back (each file's 2017 time stamp was found by search), all
# four of Debian's files have the MD5 sums that torchvision lists, so these digests are of the published content, and
# hold for packed and unpacked files alike.
_NAMES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
_LENGTHS = (47_040_016, 60_008, 7_840_016, 10_008)
_FASHION = (
    "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
)
# MNIST: as several projects state them independently for the unpacked files of LeCun's page and its mirrors.
_MNIST = (
    "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
)


class FashionMNIST(Dataset):
    """Fashion-MNIST: 60,000 training and 10,000 test images, uint8 [n, 1, 28, 28], the official split and order.

    Looked for, the first complete place wins: ``root/FashionMNIST/raw`` (torchvision's layout),
    ``root/fashion-mnist``, ``root`` itself, and where Debian's package puts it.  Files may be packed (.gz) or not.
    """

    name = "fashion-mnist"
    title = "Fashion-MNIST"
    classes: ClassVar[tuple[str, ...]] = tuple(torchvision.datasets.FashionMNIST.classes)
    mean: ClassVar[tuple[float, ...]] = (0.2860,)  # of the training part; tests/test_datasets.py holds both
    std: ClassVar[tuple[float, ...]] = (0.3530,)
    # "Random crops / horizontal flips" is the standard augmentation of the authors' own table of results; its
    # reference (Zhong et al., Random Erasing, WRN-28-10) pads 28 x 28 by 4, the same as CIFAR's 32 x 32.
    crop_padding = 4
    flip = True
    published_order = True
    protocol = "fashion-mnist"
    source = "https://github.com/zalandoresearch/fashion-mnist (MIT licence)."
    official: ClassVar[type[torchvision.datasets.MNIST]] = torchvision.datasets.FashionMNIST
    digests: ClassVar[tuple[str, ...]] = _FASHION
    system: ClassVar[Path | None] = Path("/usr/share/datasets/fashion-mnist")  # `apt install dataset-fashion-mnist`

    def load(self, root: Path, *, public: bool = False) -> Arrays:
        """Read and check the four files.

        Every file's content must have the published SHA-256.  Raises MissingData, which lists each place and what
        it lacks, and ValueError, which names the damaged file.

        public: uint8 [1797, 1, 28, 28], scikit-learn's digits enlarged (bilinear).
        """
        root = Path(root).absolute()
        files = self._find(root)
        # torchvision's reader takes a path and no .gz; a content of known digest needs no parsing: 16 bytes of
        # header before images, 8 before labels.
        images = [self._array(files[f"{part}-images-idx3-ubyte"], 16) for part in ("train", "t10k")]
        labels = [self._array(files[f"{part}-labels-idx1-ubyte"], 8) for part in ("train", "t10k")]
        return Arrays(
            train_images=images[0].view(-1, 1, 28, 28),
            train_labels=labels[0].long(),
            test_images=images[1].view(-1, 1, 28, 28),
            test_labels=labels[1].long(),
            public=_digits() if public else None,
        )

    def fetch(self, root: Path) -> None:
        """Download into ``root/FashionMNIST/raw`` (torchvision: 30 MB, and 55 MB unpacked), MD5-checked.

        Raises MissingData with another way when the server does not answer.
        """
        try:
            self.official(str(root), train=True, download=True)
        except (OSError, RuntimeError) as error:
            raise MissingData(
                f"{self.title} could not be downloaded from {self.official.mirrors[0]}: {error}.  Try again later, "
                f"or put the four *-ubyte.gz files from elsewhere into {Path(root).absolute() / self.name}"
                + self._packaged()
            ) from error

    def _packaged(self) -> str:
        package = f", or on Debian and Ubuntu run `apt install dataset-{self.name}`."
        return package if self.system is not None else "."

    def _array(self, path: Path, header: int) -> torch.Tensor:
        """uint8, flat: what comes behind the file's header."""
        name = path.name.removesuffix(".gz")
        place = _NAMES.index(name)
        content = _content(path, self.title, self.digests[place], _LENGTHS[place])
        return torch.from_numpy(np.frombuffer(content, np.uint8, offset=header).copy())

    def _find(self, root: Path) -> dict[str, Path]:
        """The four files of the first complete place, by name without ".gz"."""
        looked = []
        for place in (root / self.official.__name__ / "raw", root / self.name, root, self.system):
            if place is None:
                continue
            found, absent = {}, []
            for name in _NAMES:
                # unpacked first: torchvision leaves both, and all four load in 0.06 s so, in 0.3 s packed (one core)
                paths = [path for path in (place / name, place / f"{name}.gz") if path.is_file()]
                if paths:
                    found[name] = paths[0]
                else:
                    absent.append(f"{name}.gz")
            if not absent:
                return found
            looked.append(f"{place}" + (f" (lacks {', '.join(absent)})" if found else ""))
        raise MissingData(
            f"{self.title} was looked for in {'; '.join(looked)}.  Get it with "
            + data_command("fetch", self.name, root)
            + self._packaged()
        )


class MNIST(FashionMNIST):
    """MNIST: 60,000 training and 10,000 test images, uint8 [n, 1, 28, 28], the official split and order.

    Looked for, the first complete place wins: ``root/MNIST/raw`` (torchvision's layout), ``root/mnist`` and ``root``.
    """

    name = "mnist"
    title = "MNIST"
    classes: ClassVar[tuple[str, ...]] = tuple("0123456789")
    mean: ClassVar[tuple[float, ...]] = (0.1307,)  # of the training part, as commonly given
    std: ClassVar[tuple[float, ...]] = (0.3081,)
    crop_padding = 0  # nothing is augmented in the papers' runs on it
    flip = False  # a mirrored digit is not a digit
    protocol = "mnist"
    source = "http://yann.lecun.com/exdb/mnist (Y. LeCun, C. Cortes, C. Burges, 1998; CC BY-SA 3.0)."
    official: ClassVar[type[torchvision.datasets.MNIST]] = torchvision.datasets.MNIST
    digests: ClassVar[tuple[str, ...]] = _MNIST
    system: ClassVar[Path | None] = None


def _content(path: Path, title: str, digest: str, length: int) -> bytes:
    """The unpacked content of one file.  ValueError, naming it, unless the content is the published one."""
    again = "Delete it and fetch the data again."
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is damaged or truncated: {error}.  {again}") from error
    if (found := hashlib.sha256(content).hexdigest()) != digest:
        raise ValueError(
            f"{path} is not {title}'s: its content has {len(content)} bytes and SHA-256 {found}, expected "
            f"{length} bytes and {digest}.  Damaged, truncated, or another data set's file of the same name.  {again}"
        )
    return content


def _digits() -> torch.Tensor:
    """uint8 [1797, 1, 28, 28]: scikit-learn's digits (grey levels 0..16), enlarged from 8 x 8."""
    digits = torch.from_numpy(load_digits().images).float().mul(255 / 16).unsqueeze(1)
    return F.interpolate(digits, size=28, mode="bilinear", align_corners=False).round().to(torch.uint8)
