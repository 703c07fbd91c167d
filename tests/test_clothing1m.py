"""Clothing1M: read in its published layout and its copies, refused line by line where it is damaged, prepared into
memory maps that give the same bits, and trained on through the command line."""

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from command_line import call, done, refused
from flnoisebench_datasets import clothing1m
from flnoisebench_datasets.clothing1m import Clothing1M

from flnoisebench import imagefiles, models
from flnoisebench.api import MissingData, digest_images, map_images, open_map
from flnoisebench.inputs import data_digest

quiet = lambda done, total: None  # noqa: E731
SMALL = ("--set", "protocol.model=small-cnn", "--clients", "4", "--rounds", "2")
COUNTS = {"train": 168, "clean-train": 28, "val": 28, "test": 70}  # 12, 2, 2 and 5 a class


@pytest.fixture(scope="session")
def published(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("published") / "clothing1m"
    Clothing1M().make_fixture(root)
    return root


@pytest.fixture
def archive(published, tmp_path) -> Path:
    return Path(shutil.copytree(published, tmp_path / "archive"))


def change(path: Path, line: int, text: str | None) -> str:
    """Replace a line, counted from 1 (None: drop it); the old one."""
    lines = path.read_text(encoding="utf-8").splitlines()
    old = lines[line - 1]
    lines[line - 1 : line] = [] if text is None else [text]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return old


def problems(root: Path) -> list[str]:
    return [finding.text for finding in Clothing1M().check(root, quiet) if finding.kind == "problem"]


def prepared(root: Path, **asked) -> Path:
    plan = Clothing1M().preparation(root, **{"where": None, "size": None, "images": None, **asked})
    plan.run(quiet)
    return plan.where


# ----------------------------------------------------------------------------------------------- the layout


def test_the_imitation_has_the_published_layout_and_counts(published):
    names = {path.name for path in published.iterdir()}
    lists = {
        "noisy_train_key_list.txt",
        "clean_train_key_list.txt",
        "clean_val_key_list.txt",
        "clean_test_key_list.txt",
    }
    assert lists | {"noisy_label_kv.txt", "clean_label_kv.txt", "category_names_eng.txt", "images"} <= names
    keys = (published / "noisy_train_key_list.txt").read_text().splitlines()
    assert len(keys) == 168
    assert keys[0] == "images/0/00/1278541879,867148000.jpg"  # two levels, and a comma in the name
    assert all((published / key).is_file() for key in keys)
    noisy = dict(line.split(" ") for line in (published / "noisy_label_kv.txt").read_text().splitlines())
    labels = [int(noisy[key]) for key in keys]
    assert sum(label != place % 14 for place, label in enumerate(labels)) == 56  # a third is wrong


def test_labels_are_the_noisy_ones_in_training_and_the_clean_ones_in_the_test(published):
    arrays = Clothing1M().load(published)
    assert arrays.classes[0] == "T-Shirt"
    assert arrays.train_labels[:3].tolist() == [1, 3, 5]  # keys 0, 1, 2: class 0, 1, 2 and one, two, three further
    assert arrays.train_labels[14:17].tolist() == [0, 1, 2]  # the second round of classes is right
    assert torch.bincount(arrays.test_labels).tolist() == [5] * 14
    assert arrays.test_labels[:3].tolist() == [0, 1, 2]
    assert tuple(arrays.train_images.shape) == (168, 3, 32, 32)
    assert arrays.public is None
    assert len(Clothing1M().load(published, public=True).public) == 28  # the clean validation images
    assert not Clothing1M.labels_are_true
    assert arrays.true_labels is None


def test_without_settings_images_are_256_and_224_of_them_are_cropped(archive):
    (archive / "flnoisebench.json").unlink()
    arrays = Clothing1M().load(archive)
    assert tuple(arrays.test_images.shape[1:]) == (3, 256, 256)
    assert arrays.crop == 224


def in_a_subfolder(root):
    (root / "annotations").mkdir()
    for path in root.glob("*.txt"):
        path.rename(root / "annotations" / path.name)


def without_the_folder_images(root):
    for path in (root / "images").iterdir():
        path.rename(root / path.name)
    (root / "images").rmdir()


def with_windows_line_ends(root):
    for path in root.glob("*.txt"):
        path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))


@pytest.mark.parametrize("moved", [in_a_subfolder, without_the_folder_images, with_windows_line_ends])
def test_other_places_of_lists_and_images_give_the_same_data(published, archive, moved):
    moved(archive)
    assert Clothing1M().load(archive).digest == Clothing1M().load(published).digest


@pytest.mark.parametrize("named", ["q{:04}", "{}"])
def test_a_copy_in_class_folders_gives_the_same_images_under_the_same_labels(published, tmp_path, named):
    whole = Clothing1M().load(published)
    for part, folder in (("train", "noisy_train"), ("val", "val"), ("test", "test")):
        found = Clothing1M()._read(published, clothing1m.ArchiveSettings())
        for file, label in zip(found.files(part), found.parts[part].labels, strict=True):
            target = tmp_path / folder / named.format(label) / file.name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, target)
    (tmp_path / "flnoisebench.json").write_text('{"size": 32}')
    arrays = Clothing1M().load(tmp_path)

    def content(images, labels):
        return sorted(zip((image.numpy().tobytes() for image in images), labels.tolist(), strict=True))

    assert content(arrays.train_images, arrays.train_labels) == content(whole.train_images, whole.train_labels)
    assert content(arrays.test_images, arrays.test_labels) == content(whole.test_images, whole.test_labels)


def test_an_image_of_a_kind_that_is_not_read_is_no_silent_loss(tmp_path):
    for part in ("train", "test"):
        for label in range(14):
            (tmp_path / part / str(label)).mkdir(parents=True)
            (tmp_path / part / str(label) / f"{part}.jpg").touch()
    (tmp_path / "train" / "3" / "2.TIFF").touch()
    (tmp_path / "train" / "3" / "notes.txt").touch()
    with pytest.raises(ValueError, match=r"train/3 has images that are not read, convert them: 2\.TIFF\.") as caught:
        Clothing1M().load(tmp_path)
    assert "notes.txt" not in str(caught.value)


def test_without_names_of_classes_they_are_numbers(archive):
    (archive / "category_names_eng.txt").unlink()
    assert Clothing1M().load(archive).classes == tuple(map(str, range(14)))


def test_a_missing_archive_says_where_it_looked_and_that_a_form_stands_before_it(tmp_path):
    with pytest.raises(MissingData, match=r"noisy_label_kv.txt") as caught:
        Clothing1M().load(tmp_path)
    assert str(tmp_path) in str(caught.value)
    with pytest.raises(MissingData, match=r"cannot be downloaded by a program.*on request"):
        Clothing1M().fetch(tmp_path)


def test_a_missing_list_is_named(archive):
    (archive / "clean_val_key_list.txt").unlink()
    with pytest.raises(MissingData, match=r"lacks clean_val_key_list.txt"):
        Clothing1M().load(archive)


# ------------------------------------------------------------------------------------ what is wrong, line by line


@pytest.mark.parametrize(
    ("file", "line", "text", "said"),
    [
        ("clean_label_kv.txt", 57, "images/2/26/3761328114,905362226.jpg", "line 57 has no label"),
        ("clean_label_kv.txt", 58, "", "line 58 is empty"),
        ("noisy_label_kv.txt", 3, "images/0/00/a,b.jpg shirt", "line 3 is not '<key> <class>'"),
        ("noisy_label_kv.txt", 4, "images/0/00/a,b.jpg 14", "line 4: 14 is no class of 0..13"),
        ("noisy_label_kv.txt", 5, "images/../../etc/passwd 3", "line 5 is not '<key> <class>'"),
        (
            "noisy_train_key_list.txt",
            6,
            "images/0/00/nobody,knows.jpg",
            "line 6: images/0/00/nobody,knows.jpg has no label",
        ),
        ("noisy_train_key_list.txt", 7, "images/0/00/1278541879,867148000.jpg", "line 7: .* is in this list twice"),
        ("clean_test_key_list.txt", 8, "two words", "line 8 is no key of an image"),
    ],
)
def test_a_bad_line_is_refused_with_its_file_and_number(archive, file, line, text, said):
    change(archive / file, line, text)
    with pytest.raises(ValueError, match=said) as caught:
        Clothing1M().load(archive)
    assert str(archive / file) in str(caught.value)
    assert any(said.split(":")[0].split(" has")[0].split(" is")[0] in problem for problem in problems(archive))


def test_a_key_with_two_labels_is_refused(archive):
    lines = (archive / "noisy_label_kv.txt").read_text().splitlines()
    key, label = lines[0].split(" ")
    with (archive / "noisy_label_kv.txt").open("a") as file:
        file.write(f"{key} {(int(label) + 1) % 14}\n")
    with pytest.raises(ValueError, match=rf"line {len(lines) + 1}: .* had the label {label} before"):
        Clothing1M().load(archive)


def test_all_problems_are_listed_by_check_and_three_by_load(archive):
    for line in (1, 2, 3, 4, 5):
        change(archive / "clean_test_key_list.txt", line, "two words")
    assert len([problem for problem in problems(archive) if "no key" in problem]) == 5
    with pytest.raises(ValueError, match=r"and 2 more problems.*data check clothing1m"):
        Clothing1M().load(archive)


def test_swapped_val_and_test_lists_are_refused(archive, monkeypatch):
    monkeypatch.setattr(Clothing1M, "counts", COUNTS)
    assert not problems(archive)
    a, b = archive / "clean_val_key_list.txt", archive / "clean_test_key_list.txt"
    swapped = a.read_text()
    a.write_text(b.read_text())
    b.write_text(swapped)
    with pytest.raises(ValueError, match=r"val and test are swapped.*28 val and 70 test images, these lists 70 and 28"):
        Clothing1M().load(archive)


def test_counts_that_are_not_the_published_ones_are_noted(archive):
    notes = [finding.text for finding in Clothing1M().check(archive, quiet) if finding.kind == "note"]
    assert "70 test images, where the published archive has 10,526" in notes


def test_training_keys_that_are_also_tested_are_refused_or_left_out_on_demand(archive):
    key = (archive / "clean_test_key_list.txt").read_text().splitlines()[0]
    change(archive / "noisy_train_key_list.txt", 20, key)  # images with a clean label have a noisy one too
    with pytest.raises(ValueError, match=r"1 training images are also in val or test.*drop_shared_keys"):
        Clothing1M().load(archive)
    (archive / "flnoisebench.json").write_text('{"size": 32, "drop_shared_keys": true}')
    assert len(Clothing1M().load(archive).train_labels) == 167


def test_missing_undecodable_and_copied_files_are_found(archive):
    keys = (archive / "noisy_train_key_list.txt").read_text().splitlines()
    tested = (archive / "clean_test_key_list.txt").read_text().splitlines()
    (archive / keys[0]).unlink()
    (archive / keys[1]).write_bytes((archive / keys[1]).read_bytes()[:300])
    shutil.copy(archive / tested[2], archive / keys[2])
    found = problems(archive)
    assert len(found) == 3
    assert f"{archive / keys[0]}: No such file or directory" in found
    assert any(f"{archive / keys[1]} cannot be decoded" in problem for problem in found)
    assert f"{archive / tested[2]} is a test image and also the training image {archive / keys[2]}" in found


# ------------------------------------------------------------------------------------------------- memory maps


def test_maps_hold_the_bits_that_are_decoded_without_them(archive):
    plain = Clothing1M().load(archive)
    where = prepared(archive)
    mapped = Clothing1M().load(archive, public=True)
    assert isinstance(mapped.train_images, imagefiles.MappedImages)
    for name in ("train_images", "train_labels", "test_images", "test_labels"):
        assert torch.equal(getattr(plain, name), getattr(mapped, name)), name
    assert data_digest(plain) == data_digest(mapped) == plain.digest
    assert Clothing1M().load(where).digest == plain.digest  # the folder is a data root of its own
    assert len(mapped.public) == 28
    shutil.rmtree(archive / "images")
    assert Clothing1M().load(archive).digest == plain.digest  # images are no longer needed


def test_the_digest_tells_labels_sizes_and_pixels_apart(archive):
    digests = {Clothing1M().load(archive).digest}
    change(archive / "noisy_label_kv.txt", 15, (archive / "noisy_label_kv.txt").read_text().splitlines()[14][:-1] + "9")
    digests.add(Clothing1M().load(archive).digest)
    (archive / "flnoisebench.json").write_text('{"size": 40}')
    digests.add(Clothing1M().load(archive).digest)
    assert len(digests) == 3


def test_a_balanced_part_has_as_many_of_each_class_and_grows_by_adding(published, tmp_path):
    parts = {}
    for images in (28, 60):
        where = prepared(published, where=tmp_path / str(images), images=images)
        arrays = Clothing1M().load(where)
        parts[images] = {image.numpy().tobytes() for image in arrays.train_images}
        counts = torch.bincount(arrays.train_labels, minlength=14).tolist()
        assert counts == ([2] * 14 if images == 28 else [5] * 4 + [4] * 10)  # 60 = 14 * 4 + 4
        assert len(arrays.test_labels) == 70
    assert parts[28] < parts[60]
    with pytest.raises(ValueError, match=r"1,000 balanced images need 72 of class 0, which has 12.*at most 168"):
        prepared(published, where=tmp_path / "none", images=1000)


def test_maps_made_with_other_settings_than_the_file_says_are_refused(archive):
    prepared(archive, size=48)
    with pytest.raises(ValueError, match=r"was prepared with .*'size': 48.*flnoisebench.json says"):
        Clothing1M().load(archive)


def test_a_damaged_map_is_found_by_check_and_a_truncated_one_when_it_is_opened(archive):
    where = prepared(archive)
    with (where / "train.npy").open("r+b") as file:
        file.seek(5000)
        byte = file.read(1)
        file.seek(5000)
        file.write(bytes([byte[0] ^ 1]))
    assert any(f"{where / 'train.npy'} is damaged" in problem for problem in problems(archive))
    whole = (where / "train.npy").read_bytes()
    (where / "train.npy").write_bytes(whole[:4000])
    with pytest.raises(ValueError, match=r"train.npy is damaged or truncated"):
        Clothing1M().load(archive)
    (where / "train.npy").write_bytes(whole)
    (where / "test_labels.npy").write_bytes(b"")
    with pytest.raises(ValueError, match=r"test_labels.npy is empty: prepare the data again"):
        Clothing1M().load(archive)
    (where / "test_labels.npy").unlink()
    (where / "prepared.json").write_text("{")
    with pytest.raises(ValueError, match=r"prepared.json is damaged"):
        Clothing1M().load(archive)


def test_preparing_again_leaves_a_finished_map_alone(archive):
    where = prepared(archive)
    before = (where / "train.npy").stat().st_mtime_ns
    prepared(archive)
    assert (where / "train.npy").stat().st_mtime_ns == before


def test_a_large_archive_is_not_decoded_without_preparation(archive, monkeypatch):
    monkeypatch.setattr(clothing1m, "IN_MEMORY", 100_000)
    with pytest.raises(MissingData, match="data prepare clothing1m --data-root"):
        Clothing1M().load(archive)


@pytest.fixture
def files(published) -> list[Path]:
    return sorted((published / "images").rglob("*.jpg"))


def test_an_interrupted_map_goes_on_and_ends_with_the_same_bits(files, tmp_path, monkeypatch):
    monkeypatch.setattr(imagefiles, "BLOCK", 16)
    monkeypatch.setattr(imagefiles, "_SYNCED", 2)
    whole = map_images(tmp_path / "whole.npy", files, 16)
    seen, real = [], imagefiles.pixels_of

    def stops(path, size):
        seen.append(path)
        if len(seen) == 150:
            raise KeyboardInterrupt
        return real(path, size)

    monkeypatch.setattr(imagefiles, "pixels_of", stops)
    monkeypatch.setattr(imagefiles, "_threads", lambda: 1)
    with pytest.raises(KeyboardInterrupt):
        map_images(tmp_path / "again.npy", files, 16)
    assert not (tmp_path / "again.npy").exists()
    assert (tmp_path / "again.npy.partial").exists()
    with (tmp_path / "again.npy.journal").open("a") as journal:
        journal.write("[160, ")  # a line torn by a power cut
    seen.clear()
    seen += [Path()] * 1000  # no further stop
    assert map_images(tmp_path / "again.npy", files, 16) == whole
    assert len(seen) - 1000 <= len(files) - 8 * 16  # at least eight finished blocks were not decoded again
    assert (tmp_path / "again.npy").read_bytes() == (tmp_path / "whole.npy").read_bytes()
    assert sorted(path.name for path in tmp_path.glob("again*")) == ["again.npy", "again.npy.digest"]


def test_what_is_decoded_after_a_torn_line_of_the_journal_is_known_after_the_next_stop(files, tmp_path, monkeypatch):
    monkeypatch.setattr(imagefiles, "BLOCK", 16)
    monkeypatch.setattr(imagefiles, "_SYNCED", 1)
    monkeypatch.setattr(imagefiles, "_threads", lambda: 1)

    def stop_at(images):
        def progress(done, total):
            if done >= images:
                raise KeyboardInterrupt

        return progress

    for images in (48, 112):
        with pytest.raises(KeyboardInterrupt):
            map_images(tmp_path / "a.npy", files, 16, stop_at(images))
        with (tmp_path / "a.npy.journal").open("a") as journal:
            journal.write("[160, ")  # a line torn by a power cut
    decoded, real = [], imagefiles.pixels_of
    monkeypatch.setattr(imagefiles, "pixels_of", lambda path, size: decoded.append(path) or real(path, size))
    digest = map_images(tmp_path / "a.npy", files, 16)
    assert len(decoded) <= len(files) - 112
    assert digest == imagefiles.digest_images(open_map(tmp_path / "a.npy"))


def test_a_map_begun_for_other_files_or_another_size_begins_anew(files, tmp_path, monkeypatch):
    monkeypatch.setattr(imagefiles, "BLOCK", 16)
    map_images(tmp_path / "a.npy", files[:40], 16)
    first = open_map(tmp_path / "a.npy")
    map_images(tmp_path / "a.npy", files[8:48], 16)
    assert torch.equal(open_map(tmp_path / "a.npy")[:32], first[8:])
    map_images(tmp_path / "a.npy", files[8:48], 24)
    assert tuple(open_map(tmp_path / "a.npy").shape) == (40, 3, 24, 24)


class Killed(BaseException):
    pass


def killed_at(monkeypatch, place, name, path, files):
    """A kill while the map is made, at the first call of something."""

    def kill(*_):
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(place, name, kill)
        with pytest.raises(Killed):
            map_images(path, files, 16)


def test_a_kill_before_the_new_map_has_its_name_does_not_leave_the_old_one_under_the_new_digest(
    files, tmp_path, monkeypatch
):
    path = tmp_path / "a.npy"
    map_images(path, files[:8], 16)
    killed_at(monkeypatch, imagefiles.os, "replace", path, files[8:16])
    monkeypatch.setattr(imagefiles, "pixels_of", None)  # nothing is decoded again
    digest = map_images(path, files[8:16], 16)
    assert digest == digest_images(open_map(path))
    assert sorted(found.name for found in tmp_path.iterdir()) == ["a.npy", "a.npy.digest"]


def test_a_whole_map_is_left_alone_beside_one_that_was_begun_for_other_files(files, tmp_path, monkeypatch):
    path = tmp_path / "a.npy"
    digest = map_images(path, files[:8], 16)
    killed_at(monkeypatch, imagefiles, "_write_at", path, files[8:16])
    monkeypatch.setattr(imagefiles, "pixels_of", None)
    assert map_images(path, files[:8], 16) == digest == digest_images(open_map(path))


def test_a_journal_that_outlived_its_map_vouches_for_no_new_file(files, tmp_path, monkeypatch):
    path, real, journals = tmp_path / "a.npy", Path.open, []
    digest = map_images(path, files[:8], 16)
    path.unlink()
    killed_at(monkeypatch, imagefiles.os, "replace", path, files[:8])
    (tmp_path / "a.npy.partial").unlink()  # the map of that name, deleted, whose journal a kill had left

    def opened(self, mode="r", *rest, **more):
        if mode == "w" and self.suffix == ".journal":
            journals.append((tmp_path / "a.npy.partial").exists())
        return real(self, mode, *rest, **more)

    monkeypatch.setattr(Path, "open", opened)
    assert map_images(path, files[:8], 16) == digest
    assert journals == [False]


def test_undecodable_files_are_all_listed_and_repaired_ones_are_all_that_is_decoded(archive, tmp_path, monkeypatch):
    monkeypatch.setattr(imagefiles, "BLOCK", 16)
    files = sorted((archive / "images").rglob("*.jpg"))
    good = {place: files[place].read_bytes() for place in (3, 5, 100, 101)}
    for place in good:
        files[place].write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"4 images cannot be decoded, all listed in .*a.npy.problems"):
        map_images(tmp_path / "a.npy", files, 16)
    listed = (tmp_path / "a.npy.problems").read_text().splitlines()
    assert [str(files[place]) in line for place, line in zip(good, listed, strict=True)] == [True] * 4
    for place, content in good.items():
        files[place].write_bytes(content)
    decoded, real = [], imagefiles.pixels_of
    monkeypatch.setattr(imagefiles, "pixels_of", lambda path, size: decoded.append(path) or real(path, size))
    digest = map_images(tmp_path / "a.npy", files, 16)
    assert len(decoded) < 150  # the two blocks, and what met a failure beside it
    assert digest == digest_images(open_map(tmp_path / "a.npy"))
    assert not (tmp_path / "a.npy.problems").exists()


def test_a_full_disk_is_said_before_anything_is_decoded(files, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(OSError, match=r"bytes are needed for the memory map and 1,000 are free"):
        map_images(tmp_path / "a.npy", files, 16)
    assert not (tmp_path / "a.npy.partial").exists()


def test_two_processes_do_not_write_one_map(files, tmp_path):
    path, said = tmp_path / "a.npy", []

    def another(done, total):
        if not said:
            with pytest.raises(OSError, match="another process is preparing images there; wait for it") as caught:
                map_images(path, files[:8], 16)
            said.append(caught.value.filename)

    digest = map_images(path, files[:8], 16, another)
    assert said == [str(tmp_path)]
    assert digest == digest_images(open_map(path)) == map_images(path, files[:8], 16)


def test_room_that_a_map_begun_for_other_files_takes_counts_as_free(files, tmp_path, monkeypatch):
    (tmp_path / "a.npy.partial").write_bytes(bytes(1 << 16))  # begun at another size
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    map_images(tmp_path / "a.npy", files[:4], 16)
    assert len(open_map(tmp_path / "a.npy")) == 4


def test_a_map_is_read_by_numpy_and_never_written_through(files, tmp_path):
    map_images(tmp_path / "a.npy", files[:4], 16)
    stored = np.load(tmp_path / "a.npy")
    images = open_map(tmp_path / "a.npy")
    assert np.array_equal(stored, images.numpy())
    images[0] = 0
    assert np.array_equal(np.load(tmp_path / "a.npy"), stored)
    assert type(images.index_select(0, torch.tensor([1]))) is torch.Tensor


# -------------------------------------------------------------------------------------------- command line


def test_fedcova_runs_on_it_and_a_prepared_copy_gives_the_same_digest(archive, tmp_path):
    where = tmp_path / "maps"
    assert done("data", "prepare", "clothing1m", "--data-root", archive, "--out", where).splitlines()[-1] == (
        "clothing1m\tthere\t168 + 70 images 3x32x32, 14 classes"
    )
    digests = []
    for root, more in ((archive, ()), (where, ("--executor", "processes", "--lanes", "2"))):
        out = done(
            "run", "--method", "fedcova", "--dataset", "clothing1m", "--data-root", root, *SMALL, *more, "--json",
            "--out", tmp_path / f"runs-{root.name}",
        )  # fmt: skip
        result = json.loads(out.splitlines()[-1])
        assert result["status"] == "complete"
        digests.append(result["digest"])
    assert digests[0] == digests[1]


def test_check_says_what_is_there_and_what_a_run_costs(archive):
    lines = [line.split("\t")[1:] for line in done("data", "check", "clothing1m", "--data-root", archive).splitlines()]
    assert ["there", "168 + 70 images 3x32x32, 14 classes"] in lines
    assert ["test images by class", " ".join(["5"] * 14)] in lines
    assert ["memory", "731.1 kB of pixels"] in lines  # (168 + 70) * 3 * 32 * 32 bytes
    assert any(kind == "a round" and text.startswith("168 images trained and 70 tested") for kind, text in lines)


def test_check_ends_with_an_error_where_something_is_wrong(archive):
    change(archive / "clean_test_key_list.txt", 1, "two words")
    result = call("data", "check", "clothing1m", "--data-root", archive)
    assert result.exit_code == 1
    assert result.stderr == f"error: clothing1m: 1 problem in {archive}\n"
    assert f"clothing1m\tproblem\t{archive / 'clean_test_key_list.txt'}, line 1 is no key of an image" in result.stdout


def test_a_dry_run_says_what_preparing_takes_and_writes_nothing(archive):
    text = done("data", "prepare", "clothing1m", "--data-root", archive, "--images", "70", "--dry-run")
    assert "70 train, 28 val, 70 test images at 32 x 32: 516.5 kB in " in text  # 168 * 3072 + 3 * 128 bytes
    assert not (archive / "prepared").exists()


def test_an_imitation_is_not_written_beside_other_files(tmp_path):
    (tmp_path / "mine.txt").write_text("x")
    assert "is not empty" in refused("data", "make-fixture", "clothing1m", tmp_path)
    assert "has no imitation" in refused("data", "make-fixture", "digits", tmp_path / "new")
    assert "needs no preparation" in refused("data", "prepare", "digits")


def test_pretrained_weights_that_are_not_there_are_never_downloaded(archive, tmp_path, monkeypatch):
    monkeypatch.setenv("FLNOISEBENCH_WEIGHTS", str(tmp_path / "weights"))
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    message = refused("run", "--dataset", "clothing1m", "--data-root", archive, "--clients", "4", "--rounds", "1")
    assert str(tmp_path / "weights" / "resnet50-0676ba61.pth") in message
    assert "ResNet50_Weights.IMAGENET1K_V1.get_state_dict" in message
    assert "protocol.model=resnet50" in message


def test_pretrained_weights_reach_the_encoder_and_another_file_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("FLNOISEBENCH_WEIGHTS", str(tmp_path))
    own = torchvision.models.resnet50(weights=None).state_dict()
    file = tmp_path / "resnet50-0676ba61.pth"
    torch.save(own, file)
    with pytest.raises(ValueError, match="is damaged or another file: its SHA-256 is"):
        models.build_encoder("resnet50-imagenet", (3, 224, 224), 14)
    named = file.rename(tmp_path / f"resnet50-{hashlib.sha256(file.read_bytes()).hexdigest()[:8]}.pth")
    monkeypatch.setitem(models.WEIGHTS, "resnet50-imagenet", (named.name, "any"))
    encoder = models.build_encoder("resnet50-imagenet", (3, 224, 224), 14)
    found = encoder.body.state_dict()
    assert all(torch.equal(found[name], own[name]) for name in found)
    assert len(found) == len(own) - 2  # all but fc.weight and fc.bias
    with pytest.raises(ValueError, match="these have 1 channels: use resnet50"):
        models.build_encoder("resnet50-imagenet", (1, 28, 28), 10)
