"""Human labels: read from the published file's format, MD5-checked, in the order of the images; on a miniature."""

import hashlib
import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from command_line import call, done
from flnoisebench_datasets import cifar
from flnoisebench_datasets.cifar import CIFAR10

from flnoisebench import registry

N = 500
SHARED = Path(__file__).resolve().parents[2] / "shared"


def write(path: Path, content: dict) -> str:
    """Write a file as torch does, numpy arrays among it; its MD5."""
    torch.save(content, path)
    return hashlib.md5(path.read_bytes()).hexdigest()


@pytest.fixture
def miniature(tmp_path, monkeypatch):
    """A data root with CIFAR-10 of 500 training images and its human labels, MD5 sums replaced by theirs."""
    rng = np.random.default_rng(0)
    files = CIFAR10.files
    folder = tmp_path / files.base_folder
    folder.mkdir()
    for attribute, per_file in (("train_list", N // 5), ("test_list", 50)):
        entries = []
        for name, _ in getattr(files, attribute):
            labels = rng.permutation(np.arange(per_file) % 10).tolist()
            data = rng.integers(0, 256, (per_file, 3072), dtype=np.uint8)
            content = pickle.dumps({"data": data, "labels": labels}, protocol=2)
            (folder / name).write_bytes(content)
            entries.append([name, hashlib.md5(content).hexdigest()])
        monkeypatch.setattr(files, attribute, entries)
    clean = CIFAR10().load(tmp_path).train_labels.numpy()
    worse = np.where(rng.random(N) < 0.4, (clean + rng.integers(1, 10, N)) % 10, clean)
    sets = {"clean_label": clean, "worse_label": worse, "aggre_label": np.where(rng.random(N) < 0.8, clean, worse)}
    sets["clean_coarse_label"] = [0] * N  # CIFAR-100's file has lists, and coarse labels too
    md5 = write(tmp_path / "CIFAR-10_human.pt", sets)
    monkeypatch.setattr(CIFAR10, "human_file", ("CIFAR-10_human.pt", md5))
    monkeypatch.chdir(tmp_path)
    return tmp_path, sets


def test_the_label_sets_are_read_in_the_order_of_the_images(miniature):
    root, sets = miniature
    found = CIFAR10().human_labels(root)
    assert set(found) == {"worse_label", "aggre_label"}
    assert found["worse_label"].dtype == torch.int64
    assert found["worse_label"].tolist() == sets["worse_label"].tolist()


def test_the_same_label_sets_are_read_from_an_npz_and_others_are_refused(miniature, monkeypatch):
    root, sets = miniature
    from_pt = CIFAR10().human_labels(root)
    (root / "CIFAR-10_human.pt").unlink()
    arrays = {key: np.asarray(values, dtype=np.uint8) for key, values in sets.items()}
    np.savez(root / "CIFAR-10_human.npz", **arrays)
    with pytest.raises(ValueError, match=r"human\.npz does not hold the label sets of data/CIFAR-10_human\.pt"):
        CIFAR10().human_labels(root)
    monkeypatch.setattr(CIFAR10, "human_sha256", cifar._content(sets))
    from_npz = CIFAR10().human_labels(root)
    assert from_npz.keys() == from_pt.keys()
    assert all(torch.equal(from_npz[key], from_pt[key]) for key in from_pt)
    arrays["worse_label"][0] += 1
    np.savez(root / "CIFAR-10_human.npz", **arrays)
    with pytest.raises(ValueError, match="does not hold"):
        CIFAR10().human_labels(root)


@pytest.mark.parametrize("kept", [slice(0), slice(60), slice(40, None)], ids=["empty", "cut", "no beginning"])
def test_a_damaged_npz_of_label_sets_is_named(kept, miniature):
    root, sets = miniature
    (root / "CIFAR-10_human.pt").unlink()
    path = root / "CIFAR-10_human.npz"
    np.savez(path, **{key: np.asarray(values, dtype=np.uint8) for key, values in sets.items()})
    path.write_bytes(path.read_bytes()[kept])
    with pytest.raises(ValueError, match=r"CIFAR-10_human\.npz is no npz file or damaged .*: bring it anew"):
        CIFAR10().human_labels(root)


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_the_digest_of_the_published_label_sets(name):
    path = SHARED / "data" / "cifarn" / f"{name}n.npz"
    if not path.is_file():
        pytest.skip("no CIFAR-N labels in ../shared/data/cifarn")
    with np.load(path) as content:
        assert cifar._content(content) == registry.load_dataset(name).human_sha256
        rates = {key: 100 * float((content[key] != content["clean_label"]).mean()) for key in content.files}
    worst = rates["worse_label"] if name == "cifar10" else rates["noisy_label"]
    assert worst == pytest.approx(40.2, abs=0.01)


def test_human_noise_and_its_twin_are_built_and_checked_on_the_command_line(miniature):
    root, sets = miniature
    common = ("--dataset", "cifar10", "--data-root", str(root), "--clients", "4")
    done("scenario", "build", *common, "--noise", "cifar10n-worse", "--out", "human")
    done("scenario", "build", *common, "--noise", "cifar10n-worse-twin", "--out", "twin")
    rate = float((sets["worse_label"] != sets["clean_label"]).mean())
    facts = {name: json.loads(done("scenario", "show", name, "--json")) for name in ("human", "twin")}
    assert facts["human"]["realised_rate"] == pytest.approx(rate)
    assert facts["twin"]["expected_rate"] == pytest.approx(rate)
    assert np.array(facts["twin"]["transition"]["nominal"]) == pytest.approx(
        np.array(facts["human"]["transition"]["realised"])
    )
    for name in facts:
        assert "rebuildable" in done("scenario", "check", name, "--data-root", str(root))


def test_a_missing_a_changed_and_a_disordered_file_are_named(miniature, monkeypatch):
    root, sets = miniature
    path = root / "CIFAR-10_human.pt"
    words = ("scenario", "build", "--dataset", "cifar10", "--data-root", str(root), "--noise", "cifar10n-aggre")
    turned = {**sets, "clean_label": np.roll(sets["clean_label"], 1)}
    md5 = write(root / "turned.pt", turned)
    monkeypatch.setattr(CIFAR10, "human_file", ("turned.pt", md5))
    with pytest.raises(ValueError, match=r"turned\.pt: its clean labels are not those of the images"):
        CIFAR10().human_labels(root)
    monkeypatch.setattr(CIFAR10, "human_file", (path.name, "0" * 32))
    with pytest.raises(ValueError, match=r"human\.pt .*MD5 [0-9a-f]{32}, expected MD5 0{32}"):
        CIFAR10().human_labels(root)
    path.unlink()
    result = call(*words)
    assert result.exit_code != 0
    assert "CIFAR-10_human.pt" in result.stderr
    assert "MD5" in result.stderr


def test_a_file_that_would_run_code_is_refused_even_under_the_right_md5(miniature, monkeypatch):
    root, _ = miniature

    class Trap:
        def __reduce__(self):
            return (Path.touch, (root / "trapped",))

    md5 = write(root / "trap.pt", {"clean_label": Trap()})
    monkeypatch.setattr(CIFAR10, "human_file", ("trap.pt", md5))
    with pytest.raises(pickle.UnpicklingError):
        CIFAR10().human_labels(root)
    assert not (root / "trapped").exists()


def test_a_data_set_that_nobody_labelled_says_so():
    result = call("scenario", "build", "--dataset", "digits", "--noise", "cifar10n-worse")
    assert result.exit_code != 0
    assert "this data set has none" in result.stderr
