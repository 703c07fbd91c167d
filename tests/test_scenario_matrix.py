"""Every legal data set x partition x noise law: the labels and images that reach training are the manifest's."""

import itertools
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from flnoisebench import inputs, registry, runtime, scenario
from flnoisebench.api import Arrays
from flnoisebench.engine import Lane
from flnoisebench.scenario import NOISE_PRESETS, Noise
from flnoisebench.settings import resolve

CLIENTS, SIDE = 4, 4
HUMAN = ("aggre_label", "random_label1", "random_label2", "random_label3", "worse_label", "noisy_label")
LOAD = registry.load_dataset


@cache
def stand_in(name: str) -> type:
    """The registered data set with a few small images of its own number of classes and channels in place of its files;
    the truth, where its own labels may be wrong, and clients of its own it has too."""
    original = type(LOAD(name))
    classes = len(original.classes) or 5
    channels = len(original.mean)
    rng = np.random.default_rng(classes)

    class StandIn(original):
        def load(self, root: Path, *, public: bool = False) -> Arrays:
            # Class j is at most twice as frequent as another, and images are all different.
            labels = np.concatenate([np.arange(classes)] * 4 + [rng.integers(0, classes, 60)])
            n = len(labels)
            rng.shuffle(labels)
            images = rng.integers(0, 256, (n, channels, SIDE, SIDE), dtype=np.uint8)
            true = None if self.labels_are_true else torch.from_numpy((labels + (np.arange(n) % 3 == 0)) % classes)
            return Arrays(
                train_images=torch.from_numpy(images),
                train_labels=torch.from_numpy(labels),
                test_images=torch.from_numpy(images[:8]),
                test_labels=torch.from_numpy(labels[:8]),
                classes=None if original.classes else tuple(f"c{j}" for j in range(classes)),
                true_labels=true,
                owners=torch.arange(n) % CLIENTS,
            )

        def human_labels(self, root: Path) -> dict[str, torch.Tensor]:
            labels = arrays_of(name).train_labels
            return {key: (labels + (torch.arange(len(labels)) % (3 + i) == 0)) % classes for i, key in enumerate(HUMAN)}

    return StandIn


@cache
def arrays_of(name: str) -> Arrays:
    return stand_in(name)().load(Path())


@pytest.fixture(autouse=True)
def _stand_ins(monkeypatch, tmp_path):
    torch.set_num_threads(1)
    monkeypatch.setattr(registry, "load_dataset", lambda name: Fixed(name))


def Fixed(name: str):  # noqa: N802 (a data set that loads the same arrays each time)
    found = stand_in(name)()
    found.load = lambda root, public=False: arrays_of(name)
    return found


PARTITIONS = {
    "iid": {},
    "dirichlet": {"alpha": 5.0},
    "bernoulli-dirichlet": {"p": 0.8, "alpha": 5.0},
    "shards": {"shards": 3},
    "classes": {"per_client": 2},
    "quantity": {"alpha": 5.0},
    "manifest": {"file": "split.csv"},
    "natural": {},
}
CHANGES = {  # what a preset leaves to be said
    "open-set": {"foreign": "digits"},
}
# One preset or law for each target, label space and count; the slow test has every preset.
ONE_OF_EACH = [
    "clean", "fedcova-sym", "fedcova-asym", "fednoisy-local", "dividemix-asym", "fnbench-pair", "fedcorr-legacy",
    "fedned-beta-legacy", "cifar100-superclass", "instance", "cifar10n-worse", "cifar10n-worse-twin", "open-set",
    "mixed", "matrix",
]  # fmt: skip


def legal(data, partition: str, noise: str, law: Noise) -> bool:
    classes = len(data.classes) or 5
    if not data.labels_are_true:
        return law.clients == "none"
    if not isinstance(law.mass, str):  # look-alikes of draws of 20 clients, which 4 cannot resemble
        return False
    if law.target == "map":
        return len(scenario.CLASS_MAPS[law.class_map]) == classes
    if partition == "classes" and classes > 2 * CLIENTS:
        return False
    return noise != "open-set" or data.name != "digits"


def law_of(noise: str) -> Noise:
    return Noise(target="pair") if noise == "matrix" else NOISE_PRESETS[noise][0]


def combinations(noises):
    for name, partition, noise in itertools.product(registry.names(registry.DATASETS), PARTITIONS, noises):
        if legal(LOAD(name), partition, noise, law_of(noise)):
            yield name, partition, noise


def seen(network, batch):
    """A loss that writes down what it was given: the label and the image's first pixels of each sample."""
    loss = torch.nn.functional.cross_entropy(network(batch.x), batch.y)
    rows = torch.cat([batch.y[:, None].float(), batch.x.flatten(1)[:, :8]], 1)
    return loss, batch.carry, {"rows": rows}


def tried(name: str, partition: str, noise: str, tmp_path: Path) -> None:
    data, arrays = registry.load_dataset(name), arrays_of(name)
    n, classes = len(arrays.train_labels), len(arrays.classes or data.classes)
    changes = dict(CHANGES.get(noise, {}))
    preset = noise
    if noise == "matrix":
        preset = "fednoisy-global"
        matrix = 0.7 * np.eye(classes) + 0.3 * np.roll(np.eye(classes), 1, axis=1)
        changes = {"target": "matrix", "matrix": matrix.tolist(), "tau": 1.0, "count": "bernoulli"}
    cut = {"law": partition, "min_size": 1, **PARTITIONS[partition]}
    per_client = cut.get("per_client", 0)
    if partition == "classes":
        cut["per_client"] = max(per_client, -(-classes // CLIENTS))
    if partition == "manifest":
        path = tmp_path / "split.csv"
        path.write_text("index,client\n" + "".join(f"{i},{(i * 7) % CLIENTS}\n" for i in range(n)))
        cut["file"] = str(path)
    settings = resolve(
        method="fedavg", dataset=name, noise=preset, noise_changes=changes, partition_changes=cut, clients=CLIENTS,
        changes=["protocol.model=mlp"], protocol="digits",
    )  # fmt: skip
    run = runtime.prepare(settings, data_root=tmp_path, out=tmp_path, device="cpu", executor="serial")
    scene, truth = inputs.build_scenario(settings.scenario, data, arrays, tmp_path)
    assert inputs.check_scenario(scene, truth, data, arrays, tmp_path) == []
    assert scene.digests == run.scene.digests

    shown = inputs.with_foreign(arrays, scene, truth, tmp_path).train_images
    own = arrays.train_images if truth.foreign is None else None
    assert own is None or shown is own
    lane = Lane(run.engine)
    order = np.arange(n) if data.published_order else inputs.image_order(n)
    reached = np.full(n, -1)
    for m in range(CLIENTS):
        client = lane.client(m, None, 0, 0)
        rows = order[run.scene.positions(m)]
        assert sorted(rows) == scene.positions(m).tolist()
        assert client.labels.numpy().tolist() == scene.given[rows].tolist()
        width = min(8, shown[0].numel())
        fit = client.fit(
            client.model(), seen, sample={"rows": torch.zeros(len(rows), 1 + width)}, views=0, epochs=1,
            carry=torch.zeros(()),
        )  # fmt: skip
        found = fit.sample["rows"].numpy()
        reached[rows] = found[:, 0].astype(int)
        channel = np.arange(width) // (SIDE * SIDE)
        mean, std = (np.array(values)[channel] for values in (data.mean, data.std))
        pixels = shown[torch.as_tensor(rows)].flatten(1)[:, :width].numpy() / 255
        assert found[:, 1:] == pytest.approx((pixels - mean) / std, abs=1e-4)
    assert np.array_equal(reached, scene.given)
    if truth.foreign is not None:
        others = torch.equal(shown, arrays.train_images)
        assert others != bool((truth.foreign >= 0).any())
        assert ((truth.true < 0) == (truth.foreign >= 0)).all()


@pytest.mark.parametrize("dataset", registry.names(registry.DATASETS))
def test_the_labels_that_reach_training_are_the_manifests_for_one_law_of_each_kind(dataset, tmp_path):
    # On each data set each law meets one partition, another on the next data set; the slow test has all combinations.
    offset = registry.names(registry.DATASETS).index(dataset)
    places = {name: i for i, name in enumerate([*PARTITIONS, *ONE_OF_EACH])}
    mine = [
        which
        for which in combinations(ONE_OF_EACH)
        if which[0] == dataset and (places[which[1]] + places[which[2]] + offset) % 8 == 0
    ]
    assert mine
    for which in mine:
        try:
            tried(*which, tmp_path)
        except Exception as error:
            raise AssertionError(f"{which}: {error}") from error


@pytest.mark.slow
@pytest.mark.parametrize("dataset", registry.names(registry.DATASETS))
def test_the_labels_that_reach_training_are_the_manifests_for_every_preset(dataset, tmp_path):
    for which in combinations([*NOISE_PRESETS, "matrix"]):
        if which[0] == dataset:
            tried(*which, tmp_path)
