"""The encoders: image -> feature vector.  A method puts its own head behind one (``Method.network``)."""

from __future__ import annotations

import difflib
from collections.abc import Callable

import torch
import torchvision
from torch import nn


class Encoder(nn.Module):
    """Images [B, C, H, W] -> features [B, width].  ``classes`` is J, for the head that a method adds."""

    def __init__(self, body: nn.Module, width: int, classes: int) -> None:
        super().__init__()
        self.body = body
        self.width = width
        self.classes = classes

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.body(images)


def _mlp(shape: tuple[int, int, int], classes: int) -> Encoder:
    channels, height, width = shape
    body = nn.Sequential(nn.Flatten(), nn.Linear(channels * height * width, 128), nn.ReLU())
    return Encoder(body, 128, classes)


def _small_cnn(shape: tuple[int, int, int], classes: int) -> Encoder:
    """Two convolutions and one dense layer: the usual small net for 28x28 and 32x32 images on a CPU."""
    channels, height, width = shape
    if min(height, width) < 8:
        raise ValueError(f"small-cnn halves an image twice and needs at least 8x8 pixels, not {height}x{width}")
    body = nn.Sequential(
        nn.Conv2d(channels, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * (height // 4) * (width // 4), 128),
        nn.ReLU(),
    )
    return Encoder(body, 128, classes)


def _resnet(build: Callable[..., nn.Module], *, cifar_stem: bool) -> Callable[[tuple[int, int, int], int], Encoder]:
    def make(shape: tuple[int, int, int], classes: int) -> Encoder:
        net = build(weights=None)
        if cifar_stem or shape[0] != 3:
            # The 3x3 stem without max-pool that every CIFAR ResNet in the literature has: the ImageNet stem
            # would leave 8x8 of a 32x32 image before the first block.
            kernel, stride, padding = (3, 1, 1) if cifar_stem else (7, 2, 3)
            net.conv1 = nn.Conv2d(shape[0], 64, kernel, stride, padding, bias=False)
            nn.init.kaiming_normal_(net.conv1.weight, mode="fan_out", nonlinearity="relu")  # as torchvision
        if cifar_stem:
            net.maxpool = nn.Identity()
        width: int = net.fc.in_features  # type: ignore[assignment, union-attr]
        net.fc = nn.Identity()
        return Encoder(net, width, classes)

    return make


MODELS: dict[str, Callable[[tuple[int, int, int], int], Encoder]] = {
    "mlp": _mlp,
    "small-cnn": _small_cnn,
    "resnet18": _resnet(torchvision.models.resnet18, cifar_stem=True),
    "resnet34": _resnet(torchvision.models.resnet34, cifar_stem=True),
    "resnet50": _resnet(torchvision.models.resnet50, cifar_stem=False),
}
ABOUT = {
    "mlp": "one hidden layer of 128 on the pixels",
    "small-cnn": "two convolutions and a dense layer of 128, for 28x28 or 32x32 images on a CPU",
    "resnet18": "ResNet-18 with the CIFAR stem, 512 features",
    "resnet34": "ResNet-34 with the CIFAR stem, 512 features",
    "resnet50": "ResNet-50 with the ImageNet stem, 2048 features, for 224x224 images",
}


def build_encoder(name: str, shape: tuple[int, int, int], classes: int) -> Encoder:
    """The named encoder for images of ``shape`` (C, H, W).  Raises ValueError with near misses.

    Draws from torch's global generator, like every torch module: the engine wraps it (``engine.initialised``).
    """
    if name not in MODELS:
        near = difflib.get_close_matches(name, MODELS, n=3)
        hint = f"Did you mean {' or '.join(near)}? " if near else ""
        raise ValueError(f"unknown model {name!r}. {hint}Known: {', '.join(MODELS)}.")
    return MODELS[name](shape, classes)
