"""Fashion-MNIST (Xiao, Rasul, Vollgraf, 2017): 70,000 grey images of clothes, 28 x 28, in MNIST's file format."""

from __future__ import annotations

import gzip
import hashlib
import zlib
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 (torch's own abbreviation)
import torchvision
from sklearn.datasets import load_digits

from flnoisebench.api import Arrays, Dataset, MissingData

# File, SHA-256 and length of its *content*.  The published MD5 sums are those of the .gz files, which Debian's
# package cannot match: its build strips name and time from the gzip header.  With both put back (each file's
# 2017 time stamp was found by search), all four of Debian's files have the MD5 sums that torchvision lists, so
# these digests are of the published content, and hold for packed and unpacked files alike.
_FILES = {
    "train-images-idx3-ubyte": ("c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888", 47_040_016),
    "train-labels-idx1-ubyte": ("bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9", 60_008),
    "t10k-images-idx3-ubyte": ("5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b", 7_840_016),
    "t10k-labels-idx1-ubyte": ("0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34", 10_008),
}


class FashionMNIST(Dataset):
    """Fashion-MNIST: 60,000 training and 10,000 test images, uint8 [n, 1, 28, 28], the official split and order.

    Looked for, the first complete place wins: ``root/FashionMNIST/raw`` (torchvision's layout),
    ``root/fashion-mnist``, ``root`` itself, and where Debian's package puts it.  Files may be packed (.gz) or not.
    """

    name = "fashion-mnist"
    title = "Fashion-MNIST"
    classes = tuple(torchvision.datasets.FashionMNIST.classes)
    mean = (0.2860,)  # of the training part; tests/test_datasets.py holds both
    std = (0.3530,)
    # "Random crops / horizontal flips" is the standard augmentation of the authors' own table of results; its
    # reference (Zhong et al., Random Erasing, WRN-28-10) pads 28 x 28 by 4, the same as CIFAR's 32 x 32.
    crop_padding = 4
    flip = True
    protocol = "fashion-mnist"
    source = "https://github.com/zalandoresearch/fashion-mnist (MIT licence)."
    system = Path("/usr/share/datasets/fashion-mnist")  # `apt install dataset-fashion-mnist`

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
        images = [
            torch.from_numpy(np.frombuffer(_content(files[f"{part}-images-idx3-ubyte"]), np.uint8, offset=16).copy())
            for part in ("train", "t10k")
        ]
        labels = [
            torch.from_numpy(np.frombuffer(_content(files[f"{part}-labels-idx1-ubyte"]), np.uint8, offset=8).copy())
            for part in ("train", "t10k")
        ]
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
        official = torchvision.datasets.FashionMNIST
        try:
            official(str(root), train=True, download=True)
        except (OSError, RuntimeError) as error:
            raise MissingData(
                f"{self.title} could not be downloaded from {official.mirrors[0]}: {error}.  Try again later, put the "
                f"four *-ubyte.gz files from elsewhere into {Path(root).absolute() / 'fashion-mnist'}, or on Debian "
                f"and Ubuntu run `apt install dataset-fashion-mnist`."
            ) from error

    def _find(self, root: Path) -> dict[str, Path]:
        """The four files of the first complete place, by name without ".gz"."""
        looked = []
        for place in (root / "FashionMNIST" / "raw", root / "fashion-mnist", root, self.system):
            found, absent = {}, []
            for name in _FILES:
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
            f"{self.title} was looked for in {'; '.join(looked)}.  Get it with `flnoisebench data fetch {self.name} "
            f"--data-root {root}`, or on Debian and Ubuntu with `apt install dataset-fashion-mnist`."
        )


def _content(path: Path) -> bytes:
    """The unpacked content of one file.  ValueError, naming it, unless the content is the published one."""
    again = "Delete it and fetch the data again."
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is damaged or truncated: {error}.  {again}") from error
    digest, length = _FILES[path.name.removesuffix(".gz")]
    if (found := hashlib.sha256(content).hexdigest()) != digest:
        raise ValueError(
            f"{path} is not Fashion-MNIST's: its content has {len(content)} bytes and SHA-256 {found}, expected "
            f"{length} bytes and {digest}.  Damaged, truncated, or MNIST's file of the same name.  {again}"
        )
    return content


def _digits() -> torch.Tensor:
    """uint8 [1797, 1, 28, 28]: scikit-learn's digits (grey levels 0..16), enlarged from 8 x 8."""
    digits = torch.from_numpy(load_digits().images).float().mul(255 / 16).unsqueeze(1)
    return F.interpolate(digits, size=28, mode="bilinear", align_corners=False).round().to(torch.uint8)
