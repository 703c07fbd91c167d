"""What a run is made of: a data set, the scenario drawn on it, what an oracle leaves of both, the images that it is
measured on, and the digests that tell one from another.

``runtime.prepare`` puts them together for one run; a sweep loads and draws them once for many.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flnoisebench import registry, scenario
from flnoisebench.api import Arrays, Dataset
from flnoisebench.scenario import oracle as oracles
from flnoisebench.streams import numpy_stream


def wants_public(method: str) -> bool:
    """Whether the method's card asks for public images."""
    return "public images" in registry.load_method(method).card.conditions


def data_digest(arrays: Arrays) -> str:
    """SHA-256 over all images and labels of a data set, training and test, the true ones of noisy labels too; or what
    the data set says identifies them, where they are too many to be read for it."""
    if arrays.digest:
        return arrays.digest
    true = () if arrays.true_labels is None else (arrays.true_labels,)
    return _sha256_of(arrays.train_images, arrays.train_labels, arrays.test_images, arrays.test_labels, *true)


def public_digest(arrays: Arrays) -> dict[str, str]:
    """{"public": SHA-256 of the public images}, where there are any; where the data set says what identifies it, that
    stands for its public images too."""
    if arrays.public is None:
        return {}
    if arrays.digest:
        return {"public": hashlib.sha256(f"public images of {arrays.digest}".encode()).hexdigest()}
    return {"public": _sha256_of(arrays.public)}


def order_digest(dataset: Dataset) -> dict[str, str]:
    """{"order": SHA-256 of the shuffle that runs put the images into, however many there are}, where they do."""
    return {} if dataset.published_order else {"order": scenario.digest(image_order(1000))}


def image_order(images: int) -> np.ndarray:
    """int64 [n]: the order in which a run holds images whose own order may follow their classes.  It depends on their
    number alone: two runs on the same data have the same one, and who holds what and under which label, drawn in the
    data set's own order, does not change."""
    return numpy_stream("order of images").permutation(images)


def _sha256_of(*parts: torch.Tensor) -> str:
    whole = hashlib.sha256()
    for part in parts:
        whole.update(f"{part.dtype}{list(part.shape)}".encode())
        whole.update(part.contiguous().numpy().data)
    return whole.hexdigest()


def require_sound(dataset: Dataset, arrays: Arrays) -> None:
    """Raises ValueError where a data set's images or labels are not as ``Arrays`` says: floats would be scaled once
    more, labels that are too few matched to the first images, and -1 counted as the last class."""
    classes = len(arrays.classes or dataset.classes)
    for part, images, labels in (
        ("training", arrays.train_images, arrays.train_labels),
        ("test", arrays.test_images, arrays.test_labels),
    ):
        found = ""
        if images.dtype != torch.uint8 or images.dim() != 4:
            found = f"images are {images.dtype} {list(images.shape)}, not uint8 [n, C, H, W]"
        elif not len(images):
            found = "images are none at all"
        elif labels.dtype != torch.int64 or labels.shape != images.shape[:1]:
            found = f"labels are {labels.dtype} {list(labels.shape)}, not int64 [{len(images)}]"
        elif not 0 <= int(labels.min()) <= int(labels.max()) < classes:
            found = f"labels reach from {labels.min()} to {labels.max()}; {classes} classes are 0..{classes - 1}"
        if found:
            raise ValueError(f"{dataset.title}: its {part} {found}")


def build_scenario(
    spec: scenario.ScenarioSpec, dataset: Dataset, arrays: Arrays, data_root: Path | None = None
) -> scenario.Manifest:
    """Draw the scenario on a loaded data set.  data_root: for laws that read further files.  Raises ValueError as
    ``require_sound`` and ``scenario.build`` do."""
    require_sound(dataset, arrays)
    classes, identity = len(arrays.classes or dataset.classes), data_digest(arrays)
    sources = scenario_sources(spec, dataset, arrays, data_root, identity)
    labels, truths = arrays.train_labels.numpy(), _truths(dataset, arrays)
    return scenario.build(spec, labels, classes, identity, sources=sources, **truths)


def check_scenario(
    scene: scenario.Scenario,
    truth: scenario.Truth,
    dataset: Dataset,
    arrays: Arrays,
    data_root: Path | None = None,
    *,
    own_split: bool = False,
) -> list[str]:
    """What is wrong with a scenario on a loaded data set, in words.  own_split: who holds what is taken from the
    scenario, where the file that says it is not there."""
    identity = data_digest(arrays)
    found = []
    if identity != scene.digests["data"]:
        found.append("the data are not those that the manifest was built on (their digests differ)")
    owners = np.array(scene.owner) if own_split else None
    sources = scenario_sources(scene.spec, dataset, arrays, data_root, identity, owners=owners)
    labels = arrays.train_labels.numpy()
    return found + scenario.check(scene, truth, labels, sources=sources, **_truths(dataset, arrays))


def _truths(dataset: Dataset, arrays: Arrays) -> dict[str, Any]:
    true = None if arrays.true_labels is None else arrays.true_labels.numpy()
    return {"labels_are_true": dataset.labels_are_true, "true_labels": true}


def scenario_sources(
    spec: scenario.ScenarioSpec,
    dataset: Dataset,
    arrays: Arrays,
    data_root: Path | None,
    identity: str,
    *,
    owners: np.ndarray | None = None,
) -> scenario.Sources:
    """What the scenario's laws read beside the labels.  identity: the data's digest.  owners: int64 [n], the split
    where no file is to be read for it."""
    root = Path() if data_root is None else data_root
    targets = {law.target for law in scenario.parts(spec.noise)} if spec.noise.clients != "none" else set()
    human = dataset.human_labels(root) if targets & {"human", "twin"} else {}
    other = foreign_images(spec, root) if "open-set" in targets else None
    if spec.partition.law == "natural" and arrays.owners is not None:
        owners = arrays.owners.numpy()
    elif spec.partition.law == "manifest" and owners is None:
        owners = scenario.read_split(spec.partition, len(arrays.train_labels), identity)
    return scenario.Sources(
        images=arrays.train_images.numpy() if "instance" in targets else None,
        human={name: labels.numpy() for name, labels in human.items()},
        foreign=0 if other is None else len(other),
        foreign_digest="" if other is None else _pixels_sha256(other),
        owners=owners,
    )


def foreign_images(spec: scenario.ScenarioSpec, data_root: Path) -> torch.Tensor:
    """uint8 [n, C, H, W]: the training images that open-set noise draws from, of their own size."""
    names = {law.foreign for law in scenario.parts(spec.noise) if law.target == "open-set"}
    name = names.pop()
    if not name or name == spec.dataset:
        raise ValueError(f"open-set noise needs another data set than {spec.dataset}: --noise-set foreign=NAME")
    return registry.load_dataset(name).load(data_root).train_images


def with_foreign(arrays: Arrays, scene: scenario.Scenario, truth: scenario.Truth, data_root: Path) -> Arrays:
    """The data set with the other data set's images where open-set noise put them: in another's size and colours they
    would be told apart by their shape, so they are scaled (bilinear, antialiased), greyed or tripled to fit.

    Raises ValueError where the other data set is not the one that the scenario was drawn with.
    """
    if truth.foreign is None:
        return arrays
    places = torch.as_tensor(np.flatnonzero(truth.foreign >= 0))
    images = foreign_images(scene.spec, data_root)
    if scenario.foreign_digest(_pixels_sha256(images), truth.foreign) != scene.digests["foreign"]:
        raise ValueError(
            f"the foreign images in {data_root} are not those that the scenario was drawn with (another SHA-256). "
            " Bring those back, or build the scenario anew."
        )
    images = images[torch.as_tensor(truth.foreign[truth.foreign >= 0])]
    return replace(arrays, train_images=arrays.train_images.index_copy(0, places, fitted(images, arrays.train_images)))


def _pixels_sha256(images: torch.Tensor) -> str:
    return hashlib.sha256(images.contiguous().numpy().data).hexdigest()


def fitted(images: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
    """uint8 images with the channels and the size of those of another data set.  Raises ValueError where
    one has neither one channel nor three, and the other does not have as many."""
    channels, size = to.shape[1], to.shape[2:]
    if images.shape[1] == 3 and channels == 1:
        luma = torch.tensor([299, 587, 114]).view(1, 3, 1, 1)  # ITU-R 601, in whole numbers: the same everywhere
        images = ((images.to(torch.int64) * luma).sum(1, keepdim=True) + 500).div(1000, rounding_mode="floor")
        images = images.to(torch.uint8)
    elif images.shape[1] == 1 and channels > 1:
        images = images.expand(-1, channels, -1, -1)
    if images.shape[1] != channels:
        raise ValueError(f"images of {images.shape[1]} channels cannot stand among those of {channels}: 1 and 3 can")
    if images.shape[2:] != size and len(images):
        parts = [
            torch.nn.functional.interpolate(part.float(), tuple(size), mode="bilinear", antialias=True)
            for part in images.split(1024)
        ]
        images = torch.cat(parts).round().clamp(0, 255).to(torch.uint8)
    return images.contiguous()


def under_oracle(
    oracle: oracles.Oracle | None, arrays: Arrays, scene: scenario.Manifest
) -> tuple[Arrays, scenario.Manifest]:
    """What the oracle leaves of data and scenario; all of it without one.  Raises ValueError as ``oracles.apply``."""
    if oracle is None:
        return arrays, scene
    cleaned = oracles.apply(oracle, *scene)
    rows = torch.as_tensor(np.array(cleaned.kept))
    # of another partition's clients the names are not, and there may be more of them
    natural = arrays.clients is not None and scene[0].spec.partition.law == "natural"
    names = tuple(arrays.clients[client] for client in cleaned.clients) if arrays.clients and natural else None
    arrays = replace(
        arrays, train_images=arrays.train_images[rows], train_labels=arrays.train_labels[rows], clients=names
    )
    return arrays, (cleaned.scenario, cleaned.truth)


def evaluation_set(
    on: str, arrays: Arrays, scene: scenario.Scenario, truth: scenario.Truth
) -> tuple[torch.Tensor, np.ndarray]:
    """(uint8 images, int64 labels) that accuracies are measured on.

    test-a and test-b are the even and odd test images; validation and noisy-validation are the scenario's hold-out
    under its true or its given labels.  Raises ValueError when the hold-out is empty or its truth unknown.
    """
    if on.startswith("test"):
        part = {"test": slice(None), "test-a": slice(0, None, 2), "test-b": slice(1, None, 2)}[on]
        return arrays.test_images[part], arrays.test_labels[part].numpy()
    rows = scene.held_out_positions()
    if on == "validation" and truth.true is not None:
        rows = rows[truth.true[rows] >= 0]  # another data set's images have no label to be right about
    if not len(rows):
        raise ValueError(f"--evaluate-on {on} needs a hold-out: add --holdout 0.2 (a share of each client's samples)")
    labels = scene.given if on == "noisy-validation" else truth.true
    if labels is None:
        raise ValueError(
            "--evaluate-on validation needs true labels, which this data set has not; use noisy-validation"
        )
    return arrays.train_images[torch.as_tensor(rows)], np.asarray(labels)[rows]
