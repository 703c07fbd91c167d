"""Where a data set's order follows its classes, neither a sample's place nor its row tells a method its true class; and
what people write in the data set's own numbering still means the same images."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from command_line import call, done, refused
from flnoisebench_datasets.folder import Folder
from PIL import Image
from sklearn.linear_model import LogisticRegression

from flnoisebench import imagefiles, inputs, registry, runtime, scenario, settings
from flnoisebench.api import map_images, open_map
from flnoisebench.engine import DeviceImages, Look, images_of

CLASSES, EACH = 4, 60
PUBLISHED = {"cifar10", "cifar100", "digits", "fashion-mnist", "mnist", "svhn"}


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    """A folder and lists in one, sorted by true class; image i of training is all of grey level i."""
    root = tmp_path_factory.mktemp("sorted")
    lines = {"train": ["path,label,true_label"], "test": ["path,label"]}
    for label in range(CLASSES):
        for part, count in (("train", EACH), ("test", 3)):
            for i in range(count):
                path = Path(part) / str(label) / f"{i:02}.png"
                (root / path).parent.mkdir(parents=True, exist_ok=True)
                level = label * EACH + i
                pixels = np.full((8, 8, 3), level, dtype=np.uint8)
                pixels[0, 0] = 0 if part == "train" else 255
                Image.fromarray(pixels).save(root / path)
                given = (label + (i % 3 == 0)) % CLASSES
                lines[part].append(f"{path},{given},{label}" if part == "train" else f"{path},{label}")
    for part, text in lines.items():
        (root / f"{part}.csv").write_text("\n".join(text) + "\n")
    (root / "flnoisebench.json").write_text('{"size": 8}')
    (root / "synthetic.json").write_text(json.dumps({"images": CLASSES * EACH, "classes": CLASSES, "test": 12}))
    return root


def prepared(root: Path, dataset: str, **said) -> runtime.Run:
    wanted = {"clients": 2, "partition_changes": {"law": "iid"}, "changes": ["protocol.model=mlp"], **said}
    resolved = settings.resolve(method="fedavg", dataset=dataset, **wanted)
    return runtime.prepare(resolved, data_root=root, out=root / "runs", device="cpu")


def sides(run: runtime.Run) -> list:
    return [runtime.Lane(run.engine).client(m, None, 0, 0) for m in range(run.engine.clients)]


def told_by_order(run: runtime.Run) -> float:
    """The accuracy, on every other sample, of a logistic regression from a sample's place within its client and its row
    in the store, each as it is and modulo the number of classes, to its true class."""
    hits = []
    for side, true in zip(sides(run), true_labels(run), strict=True):
        places, rows = np.arange(side.size), images_of(side).rows.numpy()
        features = np.column_stack(
            [*(np.eye(12)[number * 12 // (number.max() + 1)] for number in (places, rows)),
             *(np.eye(CLASSES)[number % CLASSES] for number in (places, rows))]
        )  # fmt: skip
        fitted = LogisticRegression(max_iter=1000).fit(features[::2], true[::2])
        hits.append(fitted.score(features[1::2], true[1::2]))
    return float(np.mean(hits))


def true_labels(run: runtime.Run) -> list[np.ndarray]:
    return [run.judge._truth.true[run.scene.positions(m)] for m in range(run.engine.clients)]


@pytest.mark.parametrize("dataset", ["folder", "file-list", "synthetic"])
def test_a_regression_on_place_and_row_cannot_tell_the_class(images, dataset, monkeypatch):
    # of 120 test samples chance is right on 30, and on more than 48 once in ten thousand
    assert told_by_order(prepared(images, dataset)) < 0.4
    monkeypatch.setattr(type(registry.load_dataset(dataset)), "published_order", True)
    assert told_by_order(prepared(images, dataset)) > 0.9


def test_test_images_of_one_class_are_not_shown_together(images):
    run = prepared(images, "folder")
    assert sorted(run.tested_labels.tolist()) == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3
    assert (np.diff(run.tested_labels) < 0).any()
    levels = run.tested.pixels[run.tested.rows][:, 0, 4, 4].numpy()
    assert (levels // EACH == run.tested_labels).all()  # pixels and labels moved together


def test_pixels_labels_and_truth_stay_together(images):
    """The noise of the folder is drawn in its own numbering; each client then sees the same images and labels as
    there."""
    run = prepared(images, "folder", noise_changes={"rho": 1.0, "tau": 0.5}, holdout=0.1)
    drawn, truth = inputs.build_scenario(run.settings.scenario, Folder(), Folder().load(images))
    for m, (side, true) in enumerate(zip(sides(run), true_labels(run), strict=True)):
        seen = images_of(side)
        levels = seen.pixels[seen.rows][:, 0, 4, 4].numpy().astype(int)
        assert sorted(levels) == drawn.positions(m).tolist()
        assert (levels != np.sort(levels)).any()
        assert side.labels.tolist() == drawn.given[levels].tolist()
        assert (true == levels // EACH).all()
    assert run.judge.wrong({}) == [
        int((drawn.given != truth.true)[drawn.positions(m)].sum()) for m in range(drawn.spec.clients)
    ]
    assert {name: run._digests[name] for name in drawn.digests} == dict(drawn.digests)


@pytest.mark.parametrize("manifest", [False, True])
def test_a_split_in_the_folders_numbering_means_the_same_images(images, tmp_path, manifest):
    owner = np.arange(CLASSES * EACH) * 7 % 5 % 2
    split = tmp_path / "split.csv"
    split.write_text("index,client\n" + "".join(f"{i},{m}\n" for i, m in enumerate(owner)))
    if manifest:
        spec = settings.resolve_scenario(dataset="folder", clients=2, partition_changes={"file": str(split)})
        made = inputs.build_scenario(spec, Folder(), Folder().load(images))
        split = tmp_path / "split.safetensors"
        scenario.save(split, *made)
    run = prepared(images, "folder", partition_changes={"file": str(split)})
    for m, side in enumerate(sides(run)):
        seen = images_of(side)
        levels = seen.pixels[seen.rows][:, 0, 4, 4]
        assert sorted(levels.tolist()) == np.flatnonzero(owner == m).tolist()


def test_published_orders_are_kept_and_no_others():
    kept = {name for name in registry.names(registry.DATASETS) if registry.load_dataset(name).published_order}
    assert kept == PUBLISHED
    run = prepared(Path(), "digits")
    assert torch.equal(run.engine.pixels, registry.load_dataset("digits").load(Path()).train_images)
    assert "order" not in run._digests


def test_a_run_that_began_in_another_order_is_not_resumed(images, tmp_path, monkeypatch):
    words = ("run", "--method", "fedavg", "--dataset", "folder", "--data-root", images, "--clients", "2",
             "--rounds", "1", "--partition", "iid", "--set", "protocol.model=mlp", "--out", tmp_path)  # fmt: skip
    with monkeypatch.context() as before:
        before.setattr(Folder, "published_order", True)
        done(*words)
    assert "already complete" in call(*words).stderr  # a finished run stays one
    next(tmp_path.rglob("result.json")).unlink()
    assert "began with other data (order: another SHA-256)" in refused(*words)


# ------------------------------------------------------------------------------------------- maps on disk


@pytest.fixture
def mapped(images, tmp_path) -> torch.Tensor:
    map_images(tmp_path / "train.npy", sorted((images / "train").rglob("*.png")), 8)
    return open_map(tmp_path / "train.npy")


@pytest.mark.parametrize("resident", [True, False])
def test_a_map_on_disk_is_read_in_its_new_order_and_stays_on_disk(mapped, resident):
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(mapped)))
    moved = imagefiles.reordered(mapped, order)
    assert moved.path == mapped.path
    assert pickle.loads(pickle.dumps(moved)).order.tolist() == order.tolist()  # as it goes to another process
    for found, places in ((moved, order), (imagefiles.reordered(moved, order), order[order])):
        rows = torch.tensor([3, 200, 0])
        handle = DeviceImages(found, rows, Look((0.0,) * 3, (1 / 255,) * 3), resident)
        wanted = places[rows].tolist()
        assert handle.plain(torch.arange(3))[:, 0, 4, 4].round().tolist() == wanted
        ((_, pixels),) = handle.parts(torch.tensor([2, 1]), [slice(0, 2)])
        assert pixels[:, 0, 4, 4].tolist() == wanted[:0:-1]


def test_a_map_is_copied_to_a_device_in_its_new_order(mapped, monkeypatch):
    order = torch.arange(len(mapped)).flip(0)
    monkeypatch.setattr(imagefiles, "BLOCK", 100)
    moved = imagefiles.reordered(mapped, order)
    assert imagefiles.copied_to(moved, torch.device("cpu")) is moved  # where it is: nothing is copied
    monkeypatch.setattr(type(moved), "device", torch.device("meta"))  # as if it had to move
    copy = imagefiles.copied_to(moved, torch.device("cpu"))
    assert copy[:, 0, 4, 4].tolist() == order.tolist()


# ------------------------------------------------------------------------------------------ data check


def test_check_says_what_the_order_tells_and_what_becomes_of_it(images, monkeypatch):
    words = ("data", "check", "folder", "--data-root", images)
    assert "order\tshuffled by runs, so that it tells no method a class; 98.7% of neighbours" in done(*words)
    assert "order\tkept by runs; " in done("data", "check", "digits")
    monkeypatch.setattr(Folder, "published_order", True)
    found = call(*words)
    assert found.exit_code == 1
    assert "problem\tthe images are sorted by class" in found.stdout
