"""The encoders: image -> feature vector.  A method puts its own head behind one (``Method.network``)."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import torch
from torch import nn

from flnoisebench.api import MissingData, near


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


def _resnet(name: str, *, cifar_stem: bool) -> Callable[[tuple[int, int, int], int], Encoder]:
    """name: of torchvision's function."""

    def make(shape: tuple[int, int, int], classes: int) -> Encoder:
        import torchvision  # here: it brings torch's compiler, 1.5 s of every command's start

        net: nn.Module = getattr(torchvision.models, name)(weights=None)
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


WEIGHTS = {  # model: (torchvision's file, the enum that brings it); the file's name holds the start of its SHA-256
    "resnet50-imagenet": ("resnet50-0676ba61.pth", "ResNet50_Weights.IMAGENET1K_V1"),
}


def _pretrained(name: str, scratch: str) -> Callable[[tuple[int, int, int], int], Encoder]:
    """The encoder of the model ``scratch``, with weights from a file."""

    def make(shape: tuple[int, int, int], classes: int) -> Encoder:
        if shape[0] != 3:
            raise ValueError(f"{name} was trained on colour images; these have {shape[0]} channels: use {scratch}")
        encoder = MODELS[scratch](shape, classes)
        weights = {key: value for key, value in _weights(weights_file(name)).items() if not key.startswith("fc.")}
        encoder.body.load_state_dict(weights)
        return encoder

    return make


def weights_file(name: str) -> Path:
    """Where the weights of a pretrained model lie: in $FLNOISEBENCH_WEIGHTS, or torchvision's cache.

    Raises MissingData with what brings them: nothing is downloaded here.
    """
    file, enum = WEIGHTS[name]
    folder = os.environ.get("FLNOISEBENCH_WEIGHTS")
    places = [*([Path(folder)] if folder else []), Path(torch.hub.get_dir()) / "checkpoints"]
    for place in places:
        if (place / file).is_file():
            return place / file
    looked = " and ".join(str(place / file) for place in places)
    fetch = f"from torchvision.models import *; {enum}.get_state_dict(check_hash=True)"
    raise MissingData(
        f"the weights of {name} were looked for in {looked}.  Download them (98 MB) with `python -c '{fetch}'`, or put "
        f"{file} into a folder and set FLNOISEBENCH_WEIGHTS to it, or train from scratch with --set protocol.model="
        f"{name.partition('-')[0]}"
    )


@lru_cache(maxsize=1)
def _weights(path: Path) -> dict[str, torch.Tensor]:
    """The checked file's tensors.  Raises ValueError, naming it, where its SHA-256 does not begin as its name says."""
    expected = path.stem.rpartition("-")[2]
    content = path.read_bytes()
    found = hashlib.sha256(content).hexdigest()
    if not found.startswith(expected):
        raise ValueError(f"{path} is damaged or another file: its SHA-256 is {found}, and should begin with {expected}")
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


MODELS: dict[str, Callable[[tuple[int, int, int], int], Encoder]] = {
    "mlp": _mlp,
    "small-cnn": _small_cnn,
    "resnet18": _resnet("resnet18", cifar_stem=True),
    "resnet34": _resnet("resnet34", cifar_stem=True),
    "resnet50": _resnet("resnet50", cifar_stem=False),
    "resnet50-imagenet": _pretrained("resnet50-imagenet", "resnet50"),
}
ABOUT = {
    "mlp": "one hidden layer of 128 on the pixels",
    "small-cnn": "two convolutions and a dense layer of 128, for 28x28 or 32x32 images on a CPU",
    "resnet18": "ResNet-18 with the CIFAR stem, 512 features",
    "resnet34": "ResNet-34 with the CIFAR stem, 512 features",
    "resnet50": "ResNet-50 with the ImageNet stem, 2048 features, for 224x224 images",
    "resnet50-imagenet": "the same, pretrained on ImageNet (torchvision's first weights, from a file of yours)",
}


def build_encoder(name: str, shape: tuple[int, int, int], classes: int) -> Encoder:
    """The named encoder for images of ``shape`` (C, H, W).  Raises ValueError with near misses.

    Draws from torch's global generator, like every torch module: the engine wraps it (``engine.initialised``).
    """
    if name not in MODELS:
        raise ValueError(f"unknown model {name!r}.{near(name, MODELS)} Known: {', '.join(MODELS)}.")
    return MODELS[name](shape, classes)
