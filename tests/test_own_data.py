"""A user's own noisy data as lists, and made data of any size."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from command_line import call, done, refused
from flnoisebench_datasets.file_list import FileList
from flnoisebench_datasets.synthetic import Synthetic
from PIL import Image

from flnoisebench.api import Dataset, MissingData
from flnoisebench.scenario import load
from flnoisebench.settings import from_options

CLIENTS = ("10", "9", "9", "10", "9", "9")


@pytest.fixture
def lists(tmp_path) -> Path:
    """Six training images (two wrongly labelled, two clients) and two test images."""
    rng = np.random.default_rng(0)
    train, test = ["path,label,true_label,client"], ["path,label"]
    for place, (given, true) in enumerate(
        ["cat cat", "dog cat", "cat cat", "dog dog", "dog dog", "cat dog"][i].split() for i in range(6)
    ):
        _image(tmp_path / "photos" / f"{place},x.png", rng)
        train.append(f'"photos/{place},x.png",{given},{true},{CLIENTS[place]}')
    for place, label in enumerate(("cat", "dog")):
        _image(tmp_path / "held" / f"{place}.png", rng)
        test.append(f"held/{place}.png,{label}")
    (tmp_path / "train.csv").write_text("\n".join(train) + "\n")
    (tmp_path / "test.csv").write_text("\n".join(test) + "\n")
    (tmp_path / "flnoisebench.json").write_text('{"size": 16}')
    return tmp_path


def _image(path: Path, rng) -> None:
    path.parent.mkdir(exist_ok=True)
    Image.fromarray(rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(path)


def test_labels_truth_and_clients_are_read_from_the_list(lists):
    arrays = FileList().load(lists)
    assert arrays.classes == ("cat", "dog")
    assert arrays.train_labels.tolist() == [0, 1, 0, 1, 1, 0]
    assert arrays.true_labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert arrays.clients == ("9", "10")
    assert arrays.owners.tolist() == [1, 0, 0, 1, 0, 0]  # by number: client 9 comes before client 10
    assert arrays.test_labels.tolist() == [0, 1]
    assert tuple(arrays.train_images.shape) == (6, 3, 16, 16)


def test_true_label_and_client_may_be_left_out(lists):
    lines = (lists / "train.csv").read_text().splitlines()
    (lists / "train.csv").write_text("\n".join(",".join(line.rsplit(",", 2)[:1]) for line in lines) + "\n")
    arrays = FileList().load(lists)
    assert arrays.true_labels is None
    assert arrays.owners is arrays.clients is None
    assert arrays.train_labels.tolist() == [0, 1, 0, 1, 1, 0]


def test_classes_that_are_numbers_are_in_their_order(lists):
    for name in ("train.csv", "test.csv"):
        path = lists / name
        path.write_text(path.read_text().replace("cat", "9").replace("dog", "10"))
    assert FileList().load(lists).classes == ("9", "10")


def test_a_space_beside_a_comma_makes_no_other_class_and_no_other_client(lists):
    plain = FileList().load(lists)
    lines = (lists / "train.csv").read_text().splitlines()
    spaced = [line if i % 2 else line.replace(",dog", ', "dog"').replace(",9", ", 9 ") for i, line in enumerate(lines)]
    (lists / "train.csv").write_text("\n".join(["path, label, true_label, client", *spaced[1:]]) + "\n")
    arrays = FileList().load(lists)
    assert (arrays.classes, arrays.clients) == (plain.classes, plain.clients)
    assert arrays.train_labels.tolist() == plain.train_labels.tolist()
    assert arrays.owners.tolist() == plain.owners.tolist()


@pytest.mark.parametrize(
    ("file", "line", "text", "said"),
    [
        ("train.csv", 1, "path,lable,true_label,client", "line 1: unknown column 'lable'.*Did you mean label"),
        ("train.csv", 1, "path;label;client", "line 1: the columns are divided by ';'; write commas"),
        ("train.csv", 1, "path,true_label,client", "line 1 must name the columns path,label"),
        ("train.csv", 3, "photos/1,x.png,dog,cat,9", "line 3 has not 4 fields .*quotes"),
        ("train.csv", 3, "photos/1.png,dog", "line 3 has not 4 fields"),
        ("train.csv", 3, '"photos/1,x.png",,cat,9', "line 3: label is empty"),
        ("train.csv", 3, '"photos/0,x.png",dog,cat,9', "line 3: photos/0,x.png is also in train.csv, line 2"),
        ("train.csv", 3, '"photos/../photos/0,x.png",dog,cat,9', "x.png is also in train.csv, line 2"),
        ("test.csv", 2, '"./photos/0,x.png",cat', "x.png is also in train.csv, line 2"),
        ("train.csv", 3, '"photos/1,x.png", ,cat,9', "line 3: label is empty"),
        ("train.csv", 3, '"photos/7,x.png",dog,cat,9', "line 3: there is no file .*photos/7,x.png"),
        (
            "train.csv",
            3,
            '"photos\\1,x.png",dog,cat,9',
            r"no file .*1,x.png \(folders are divided by /",
        ),
        ("test.csv", 2, '"photos/0,x.png",cat', "line 2: photos/0,x.png is also in train.csv, line 2"),
        ("test.csv", 2, "held/0.png,bird", "line 2: class 'bird' has no training image"),
        ("test.csv", 3, "held/1.png,cat", "has no image of class dog"),
    ],
)
def test_a_bad_line_is_refused_with_its_file_and_number(lists, file, line, text, said):
    lines = (lists / file).read_text().splitlines()
    lines[line - 1] = text
    (lists / file).write_text("\n".join(lines) + "\n")
    with pytest.raises(ValueError, match=said) as caught:
        FileList().load(lists)
    assert str(lists / file) in str(caught.value)
    assert call("data", "check", "file-list", "--data-root", lists).exit_code in (1, 2)


def test_a_list_that_names_no_image_is_what_is_said_first_and_the_command_for_more_can_be_pasted(lists, tmp_path):
    (lists / "train.csv").write_text("path,label\n")
    moved = tmp_path / "my images"
    moved.mkdir()
    for name in ("train.csv", "test.csv", "held"):
        (lists / name).rename(moved / name)
    with pytest.raises(
        ValueError, match=r"/train\.csv names no image\.  `.* --data-root '.*/my images'` lists all"
    ) as caught:
        FileList().load(moved)
    assert "has no training image" not in str(caught.value)


def test_the_same_pixels_in_train_and_test_are_refused(lists):
    (lists / "held" / "0.png").write_bytes((lists / "photos" / "0,x.png").read_bytes())
    with pytest.raises(ValueError, match="1 test images are also training images"):
        FileList().load(lists)


def test_missing_lists_show_what_to_write(tmp_path):
    with pytest.raises(MissingData, match=r"lacks train.csv and test.csv.*path,label"):
        FileList().load(tmp_path)


def test_the_lists_clients_and_truth_reach_the_run(lists, tmp_path):
    options = ("--dataset", "file-list", "--data-root", lists, "--partition", "natural")
    out = done("run", "--method", "fedavg", *options, "--rounds", "1", "--set", "protocol.model=mlp", "--json", "--out",
               tmp_path / "runs")  # fmt: skip
    result = json.loads(out.splitlines()[-1])
    assert result["label_noise_before"] == pytest.approx(100 * 2 / 6, abs=1e-3)
    assert (result["class_names"], result["client_names"]) == (["cat", "dog"], ["9", "10"])
    assert "unknown rate: leave --noise out" in refused("run", *options, "--noise", "fedcova-sym")


def test_an_oracle_takes_a_lists_own_truth_and_is_refused_without_one(lists, tmp_path):
    options = ("--dataset", "file-list", "--data-root", lists, "--clients", "2", "--partition", "natural")
    words = ("run", *options, "--rounds", "1", "--set", "protocol.model=mlp", "--json", "--out", tmp_path / "runs")
    result = json.loads(done(*words, "--oracle", "clean-samples").splitlines()[-1])
    assert [row["size"] for row in result["federation"]["clients"]] == [2, 2]  # without lines 2 and 6
    assert result["label_noise_before"] == 0
    central = json.loads(done(*words, "--oracle", "centralised-clean").splitlines()[-1])
    assert central["federation"]["clients"][0]["counts"] == [3, 3]
    assert central["client_names"] is None  # one client has what both had
    lines = (lists / "train.csv").read_text().splitlines()
    without = [",".join([*line.split(",")[:-2], line.split(",")[-1]]) for line in lines]  # the column true_label
    (lists / "train.csv").write_text("\n".join(without) + "\n")
    assert "--oracle clean-samples needs true labels" in refused(*words, "--oracle", "clean-samples")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda a: {"train_images": a.train_images / 255}, "its training images are torch.float32 [2000, 3, 16, 16]"),
        (
            lambda a: {"test_images": a.test_images[:, 0]},
            "its test images are torch.uint8 [500, 16, 16], not uint8 [n, C",
        ),
        (
            lambda a: {"train_labels": a.train_labels[:100]},
            "its training labels are torch.int64 [100], not int64 [2000]",
        ),
        (lambda a: {"test_labels": a.test_labels[:100]}, "its test labels are torch.int64 [100], not int64 [500]"),
        (lambda a: {"test_labels": a.test_labels.int()}, "its test labels are torch.int32 [500], not int64 [500]"),
        (lambda a: {"test_labels": a.test_labels - 1}, "its test labels reach from -1 to 8; 10 classes are 0..9"),
        (lambda a: {"test_labels": a.test_labels + 1}, "its test labels reach from 1 to 10; 10 classes are 0..9"),
        (lambda a: {"test_images": a.test_images[:0]}, "its test images are none at all"),
    ],
)
def test_data_that_are_not_as_the_interface_says_are_refused(change, said, tmp_path, monkeypatch):
    load = Synthetic.load

    def changed(self, root, *, public=False):
        arrays = load(self, root)
        return replace(arrays, **change(arrays))

    monkeypatch.setattr(Synthetic, "load", changed)
    assert f"Synthetic: {said}" in refused("run", "--dataset", "synthetic", "--out", tmp_path / "runs")
    assert not (tmp_path / "runs").exists()
    assert f"problem\tSynthetic: {said}" in call("data", "check", "synthetic").stdout


@pytest.mark.parametrize("oracle", ["clean-samples", "centralised-clean"])
def test_an_oracle_heeds_no_names_of_other_clients_than_the_partitions(oracle, lists):
    words = ("run", "--method", "fedavg", "--dataset", "file-list", "--data-root", lists, "--rounds", "1")
    out = ("--set", "protocol.model=mlp", "--out", lists / "runs", "--oracle", oracle)
    split = ("--partition", "iid", "--clients", "3", "--min-size", "1")  # the list names two
    done(*words, *split, *out)
    (folder,) = (lists / "runs").rglob("result.json")
    assert json.loads(folder.read_text())["client_names"] is None


def test_scenario_check_vouches_for_no_rate_that_nobody_knows(lists, tmp_path):
    made = ("scenario", "build", "--dataset", "file-list", "--data-root", lists, "--clients", "2", "--partition", "iid")
    checked = ("scenario", "check", "--data-root", lists)
    done(*made, "--out", tmp_path / "a.safetensors")
    assert "realised rates agree with the law" in done(*checked, tmp_path / "a.safetensors")
    lines = [line.rsplit(",", 2)[0] for line in (lists / "train.csv").read_text().splitlines()]
    (lists / "train.csv").write_text("\n".join(lines) + "\n")  # without true_label and client
    done(*made, "--out", tmp_path / "b.safetensors")
    assert "rebuildable from its settings, rates unknown" in done(*checked, tmp_path / "b.safetensors")


def test_check_says_how_many_clients_and_wrong_labels_a_list_names(lists):
    text = done("data", "check", "file-list", "--data-root", lists)
    assert "the list names 2 clients: --partition natural takes them" in text
    assert "2 of 6 labels are not the true ones" in text
    assert "single sample" not in text


def test_a_client_of_a_single_sample_is_named_with_what_takes_it(lists):
    lines = (lists / "train.csv").read_text().splitlines()
    lines[1] = lines[1].removesuffix("10") + "alone"
    (lists / "train.csv").write_text("\n".join(lines) + "\n")
    text = done("data", "check", "file-list", "--data-root", lists)
    assert "clients of a single sample, which --min-size 1 takes too: 10, alone" in text
    words = ("run", "--method", "fedavg", "--dataset", "file-list", "--data-root", lists, "--partition", "natural",
             "--rounds", "1", "--set", "protocol.model=mlp", "--out", lists / "runs")  # fmt: skip
    assert "2 of 3 clients have fewer than min_size=2 samples" in (said := refused(*words))
    assert "--min-size 1" in said
    done(*words, "--min-size", "1")


def test_check_names_every_image_that_cannot_be_decoded(lists):
    broken = sorted(lists.rglob("*.png"))[:2]
    for path in broken:
        path.write_bytes(b"no image")
    found = call("data", "check", "file-list", "--data-root", lists)
    assert found.exit_code == 1
    assert all(f"{path} cannot be decoded" in found.stdout for path in broken)


def test_the_clients_that_a_list_names_need_not_be_counted_and_who_counts_them_has_the_same_run(lists, tmp_path):
    named = {"method": "fedavg", "dataset": "file-list", "partition": "natural"}
    settings = from_options(named, device="cpu", data_root=lists)
    assert settings == from_options({**named, "clients": 2}, device="cpu")
    assert settings.scenario.clients == Dataset.natural_clients(FileList(), lists) == 2
    with pytest.raises(ValueError, match="say how many clients"):
        from_options(named, device="cpu")
    (tmp_path / "grid.toml").write_text('dataset = "file-list"\npartition = "natural"\nmethod = "fedavg"\nrounds = 1')
    plan = done("sweep", tmp_path / "grid.toml", "--data-root", lists, "--dry-run", "--out", tmp_path / "runs")
    assert "natural_m2" in plan
    manifest = tmp_path / "natural.safetensors"
    words = ("scenario", "build", "--dataset", "file-list", "--data-root", lists, "--out", manifest)
    done(*words, "--partition", "natural")
    assert load(manifest)[0].spec.clients == 2


def test_a_list_without_clients_has_no_natural_ones(lists):
    lines = (lists / "train.csv").read_text().splitlines()
    (lists / "train.csv").write_text("\n".join(line.rsplit(",", 1)[0] for line in lines) + "\n")
    assert FileList().natural_clients(lists) is Dataset.natural_clients(FileList(), lists) is None
    said = refused("run", "--dataset", "file-list", "--data-root", lists, "--partition", "natural")
    assert "the data set names no clients; take another partition" in said


def test_too_many_clients_for_a_list_are_told_how_many_it_names(lists):
    said = refused("run", "--dataset", "file-list", "--data-root", lists, "--partition", "natural", "--clients", "5")
    assert "the data set names 2 clients, and clients=5: set clients to 2" in said


# ---------------------------------------------------------------------------------------------- made data


def test_made_data_have_the_size_that_the_settings_say(tmp_path):
    (tmp_path / "synthetic.json").write_text('{"images": 70, "test": 21, "classes": 7, "size": 9, "channels": 1}')
    arrays = Synthetic().load(tmp_path, public=True)
    assert tuple(arrays.train_images.shape) == (70, 1, 9, 9)
    assert torch.bincount(arrays.train_labels).tolist() == [10] * 7
    assert torch.bincount(arrays.test_labels).tolist() == [3] * 7
    assert len(arrays.classes) == 7
    assert tuple(arrays.public.shape) == (500, 1, 9, 9)


def test_an_image_does_not_depend_on_how_many_are_made(tmp_path, monkeypatch):
    def made(images, block=4096):
        monkeypatch.setattr("flnoisebench_datasets.synthetic._BLOCK", block)
        (tmp_path / "synthetic.json").write_text(json.dumps({"images": images}))
        return Synthetic().load(tmp_path).train_images

    assert torch.equal(made(50), made(200)[:50])
    assert torch.equal(made(200), made(200, block=64))


def test_a_class_is_told_from_another_by_its_mean_image(tmp_path):
    arrays = Synthetic().load(tmp_path)
    train, test = arrays.train_images.float().flatten(1), arrays.test_images.float().flatten(1)
    means = torch.stack([train[arrays.train_labels == label].mean(0) for label in range(10)])
    assert (torch.cdist(test, means).argmin(1) == arrays.test_labels).float().mean() > 0.95
    assert not {image.numpy().tobytes() for image in arrays.train_images} & {
        image.numpy().tobytes() for image in arrays.test_images
    }


def test_unknown_settings_of_made_data_are_refused(tmp_path):
    (tmp_path / "synthetic.json").write_text('{"image": 10}')
    with pytest.raises(ValueError, match=r"unknown setting 'image'.*Did you mean images"):
        Synthetic().load(tmp_path)
