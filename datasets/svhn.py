"""SVHN (Netzer et al., 2011): digits of house numbers, 99,289 colour images of 32 x 32, in the published .mat files."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import ClassVar

import torch
from torchvision.datasets import SVHN as OFFICIAL

from flnoisebench.api import Arrays, Dataset, MissingData, data_command

_PARTS = ("train", "test")


class SVHN(Dataset):
    """SVHN's cropped digits: 73,257 training and 26,032 test images, uint8 [n, 3, 32, 32], the official split and
    order, without the 531,131 extra ones.  Read from ``root/svhn`` or ``root``: train_32x32.mat and test_32x32.mat."""

    name = "svhn"
    title = "SVHN"
    classes: ClassVar[tuple[str, ...]] = tuple("0123456789")
    mean: ClassVar[tuple[float, ...]] = (0.4377, 0.4438, 0.4728)  # of the training part, as commonly given
    std: ClassVar[tuple[float, ...]] = (0.1980, 0.2010, 0.1970)
    crop_padding = 4  # CIFAR's
    flip = False  # a mirrored digit is not a digit
    published_order = True
    protocol = "svhn"
    source = "http://ufldl.stanford.edu/housenumbers (Y. Netzer et al., 2011; for non-commercial use)."

    def load(self, root: Path, *, public: bool = False) -> Arrays:
        """Read and check both files.

        Raises MissingData, which lists the missing files with their MD5 sums, and ValueError, which names the damaged
        file.  public: nothing is lent; None.
        """
        root = Path(root).absolute()
        listed = {part: OFFICIAL.split_list[part][1:] for part in _PARTS}  # (file, MD5)
        place = next((at for at in (root / self.name, root) if (at / listed["train"][0]).is_file()), root)
        absent = [f"{name} (MD5 {md5})" for name, md5 in listed.values() if not (place / name).is_file()]
        if absent:
            raise MissingData(
                f"{self.title} was looked for in {root} and {root / self.name}, which lack {', '.join(absent)}.  Get "
                f"it with {data_command('fetch', self.name, root)}."
            )
        images, labels = [], []
        for part in _PARTS:
            name, md5 = listed[part]
            with (place / name).open("rb") as file:
                found = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
            if found != md5:
                raise ValueError(
                    f"{place / name} is damaged or truncated: MD5 {found}, expected {md5}.  Delete it and run "
                    f"{data_command('fetch', self.name, root)}."
                )
            read = OFFICIAL(str(place), split=part)  # the file says 10 where it means 0, and torchvision puts it right
            images.append(torch.from_numpy(read.data).contiguous())
            labels.append(torch.from_numpy(read.labels).to(torch.int64))
        return Arrays(images[0], labels[0], images[1], labels[1])

    def fetch(self, root: Path) -> None:
        """Download both files into ``root/svhn`` (torchvision: 246 MB), MD5-checked.

        Raises MissingData with another way when the server does not answer.
        """
        place = Path(root).absolute() / self.name
        try:
            for part in _PARTS:
                OFFICIAL(str(place), split=part, download=True)
        except (OSError, RuntimeError) as error:
            raise MissingData(
                f"{self.title} could not be downloaded from {OFFICIAL.split_list['train'][0]}: {error}.  Try again "
                f"later, or put train_32x32.mat and test_32x32.mat from elsewhere into {place}."
            ) from error
