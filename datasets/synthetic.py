"""Images that are made, not read: any number, of any size, in any number of classes, for tests of scale."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from flnoisebench.api import Arrays, Config, Dataset, Field, read_settings

_BLOCK = 4096  # images made at a time: what is made of one image does not depend on it


class SyntheticSettings(Config):
    """What ``root/synthetic.json`` may say."""

    images: int = Field(2000, ge=2, unit="images", why="to train on; small enough for a first try")
    test: int = Field(500, ge=2, unit="images", why="a fifth of the whole, as in the other sets")
    classes: int = Field(10, ge=2, le=10_000, why="as in most tables")
    size: int = Field(16, ge=4, le=1024, unit="pixels", why="side; an MLP learns it in seconds")
    channels: int = Field(3, ge=1, le=4, why="colours")
    contrast: float = Field(
        0.25, gt=0, le=1, unit="share of the range", why="of a class's pattern in grey noise; less is harder"
    )


class Synthetic(Dataset):
    """uint8 [n, C, S, S]: in class j a pattern of 4 x 4 random tiles of its own, in noise.  Labels go round, so classes
    are of equal size to one image.  The bits come from NumPy's PCG64, whose stream no release may move.

    Sizes are those of ``root/synthetic.json``, such as ``{"images": 1000000, "size": 32}``; 3 GB, made in seconds.
    """

    name = "synthetic"
    title = "Synthetic"
    classes = ()  # numbers, as many as the settings say
    mean = (0.5,)
    std = (0.25,)
    protocol = "synthetic"
    source = (
        "Made when it is loaded, as large as DIR/synthetic.json says "
        '({"images": 1000000, "size": 32}, used with --data-root DIR).'
    )

    def load(self, root: Path, *, public: bool = False) -> Arrays:
        """Make the images.  Raises ValueError for bad settings.

        public: uint8 [500, C, S, S], the same noise around no class's pattern.
        """
        settings = read_settings(Path(root).absolute() / "synthetic.json", SyntheticSettings)
        tiles = _bytes(settings.classes * settings.channels * 16, stream=0).reshape(-1, settings.channels, 4, 4)
        place = np.arange(settings.size) * 4 // settings.size
        patterns = (tiles >= 128)[:, :, place][..., place]
        parts = []
        for stream, count in ((1, settings.images), (2, settings.test)):
            labels = np.arange(count) % settings.classes
            parts += [_images(patterns, labels, settings, stream), torch.from_numpy(labels)]
        flat = np.zeros((1, *patterns.shape[1:]), dtype=bool)
        return Arrays(
            *parts,
            public=_images(flat, np.zeros(500, dtype=np.int64), settings, 3) if public else None,
            classes=tuple(map(str, range(settings.classes))),
        )

    def fetch(self, root: Path) -> None:
        """Nothing to do: the images are made."""


def _bytes(count: int, stream: int, start: int = 0) -> np.ndarray:
    """uint8 [count] of a named stream, from its byte ``start`` (a multiple of 8) on."""
    bits = np.random.PCG64(stream)
    bits.advance(start // 8)
    return bits.random_raw(-(-count // 8)).astype("<u8").view(np.uint8)[:count]


def _images(patterns: np.ndarray, labels: np.ndarray, settings: SyntheticSettings, stream: int) -> torch.Tensor:
    """Noise in [0, 256 (1 - contrast)), and 256 contrast more where the class's pattern has a tile."""
    shape = patterns.shape[1:]
    each, added = int(np.prod(shape)), round(256 * settings.contrast)
    room = -(-each // 8) * 8
    images = np.empty((len(labels), *shape), dtype=np.uint8)
    for start in range(0, len(labels), _BLOCK):
        mine = labels[start : start + _BLOCK]
        noise = _bytes(len(mine) * room, stream, start * room).reshape(len(mine), room)[:, :each]
        scaled = (noise.astype(np.uint16) * (256 - added) >> 8).astype(np.uint8).reshape(-1, *shape)
        images[start : start + _BLOCK] = scaled + patterns[mine].astype(np.uint8) * np.uint8(min(added, 255))
    return torch.from_numpy(images)
