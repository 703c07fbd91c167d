"""Digits: 1,797 handwritten digits of 8 x 8 pixels that scikit-learn brings along, so nothing is downloaded.

Small enough that a federation runs in seconds on a laptop: the default for a first try and for tests.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits, load_sample_images

from flnoisebench.api import Arrays, Dataset


class Digits(Dataset):
    """scikit-learn's digits: 1,438 training and 359 test images, uint8 [n, 1, 8, 8].

    Nobody publishes a split, so it is fixed here by a rule without randomness: of each class, in scikit-learn's
    order, the images at positions 2, 7, 12, ... are the test part.  That is a fifth of each class, rounded to
    nearest (35 to 37 images a class), and no release of NumPy or scikit-learn can move it.  Writers are on both
    sides of the split, as in a random one: the file does not say who wrote what.
    """

    name = "digits"
    title = "Digits (8 x 8)"
    classes = tuple("0123456789")
    mean = (0.3053,)  # of the training part; tests/test_datasets.py holds both
    std = (0.3757,)
    crop_padding = 0  # a shift by one pixel of eight cuts strokes off
    flip = False  # a mirrored digit is not a digit
    published_order = True
    protocol = "digits"
    source = (
        "Bundled with scikit-learn: the test part of UCI's Optical Recognition of Handwritten Digits (E. Alpaydin, "
        "C. Kaynak, 1998; CC BY 4.0)."
    )

    def load(self, root: Path, *, public: bool = False) -> Arrays:
        """The digits; ``root`` is not looked at.  Raises nothing of its own.

        public: uint8 [2080, 1, 8, 8], patches of scikit-learn's two sample photographs.
        """
        digits = load_digits()
        # 17 grey levels, 0..16, onto 0..255: without this the usual division by 255 would leave a black image
        images = torch.from_numpy(np.rint(digits.images * (255 / 16)).astype(np.uint8)).unsqueeze(1)
        labels = torch.from_numpy(digits.target.astype(np.int64))
        position = torch.empty_like(labels)
        for label in range(len(self.classes)):
            mine = labels == label
            position[mine] = torch.arange(int(mine.sum()))
        test = position % 5 == 2
        return Arrays(
            train_images=images[~test],
            train_labels=labels[~test],
            test_images=images[test],
            test_labels=labels[test],
            public=_patches() if public else None,
        )

    def fetch(self, root: Path) -> None:
        """Nothing to do: the images come with scikit-learn."""


def _patches() -> torch.Tensor:
    """uint8 [2080, 1, 8, 8]: the two photographs (427 x 640) in grey at half size, cut into 26 x 40 patches each.

    Half size, because at full size most patches are flat sky.  Integer arithmetic only, so the patches differ
    between machines no more than the JPEG decoder of Pillow does.
    """
    patches = []
    for photograph in load_sample_images().images:
        rgb = photograph.astype(np.int64)
        grey = (299 * rgb[..., 0] + 587 * rgb[..., 1] + 114 * rgb[..., 2] + 500) // 1000  # ITU-R 601 luma
        rows, columns = grey.shape[0] // 16, grey.shape[1] // 16
        halved = grey[: 16 * rows, : 16 * columns].reshape(8 * rows, 2, 8 * columns, 2).sum((1, 3)) // 4
        patches.append(halved.reshape(rows, 8, columns, 8).transpose(0, 2, 1, 3).reshape(-1, 1, 8, 8))
    return torch.from_numpy(np.concatenate(patches).astype(np.uint8))
