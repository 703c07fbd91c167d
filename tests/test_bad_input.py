"""What cannot be done is answered by one clear message and a non-zero exit, and leaves earlier results as they were."""

import ctypes
import errno
import fcntl
import json
import os
import resource
import shutil
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from command_line import PLUGIN, RUN, call, done, only_run, refused, snapshot
from PIL import Image

from flnoisebench import registry
from flnoisebench.cli import console

CIFAR_FILES = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch", "batches.meta"]


@pytest.fixture(scope="module")
def earlier(tmp_path_factory):
    """A folder with a finished run in it, and its snapshot."""
    out = tmp_path_factory.mktemp("earlier") / "runs"
    done(*RUN, "--out", out)
    return out, snapshot(out)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLNOISEBENCH_DATA", str(tmp_path / "data"))


def refused_beside(earlier, *words, code=2, **environment):
    """``refused`` for a run into the folder of earlier results, which must be byte for byte what they were."""
    out, before = earlier
    message = refused(*words, "--out", out, code=code, **environment)
    assert snapshot(out) == before
    return message


# ---------------------------------------------------------------------------------------------- the options


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        # the noise
        (("--rho", "1.5"), ("rho = 1.5", "less than or equal to 1")),
        (("--rho", "-0.1"), ("rho = -0.1", "greater than or equal to 0")),
        (("--rho", "nan"), ("rho = nan", "finite")),
        (("--tau", "2"), ("tau = 2.0", "less than or equal to 1")),
        # what is wrong with a value that has no such type is said in typer's words
        (("--tau", "some"), ("Invalid value for '--tau':",)),
        (("--noise", "loud"), ("unknown noise 'loud'", "Known: clean, fedcova-sym")),
        (("--noise", "clean", "--rho", "0.5"), ("rho=0.5 would change nothing in 'clean'",)),
        (("--noise-set", "include_true=maybe"), ("include_true = 'maybe'", "valid boolean")),
        (("--noise-set", "target=pear"), ("target = 'pear'", "Did you mean pair?")),
        (("--noise-set", "include_true"), ("'include_true'", "write name=value")),
        (("--noise", "fednoro-random", "--noise-set", "lo=0.9"), ("lo=0.9 is above hi=0.7: swap them",)),
        # the partition
        (("--p", "0.0001"), ("p=0.0001 leaves class", "without a client", "raise p")),
        (("--p", "0"), ("p = 0.0", "greater than 0")),
        (("--p", "1.1"), ("p = 1.1", "less than or equal to 1")),
        (("--alpha", "0"), ("alpha = 0.0", "greater than or equal to 0.001")),
        (("--clients", "2000"), ("2000 clients of at least 2 samples need 4000 samples", "has 1438", "lower clients")),
        (("--clients", "0"), ("Invalid value for '--clients':",)),
        (("--min-size", "1000"), ("5 clients of at least 1000 samples need 5000", "lower clients or min_size")),
        (
            ("--partition", "round-robin"),
            ("law = 'round-robin'", "'iid', 'dirichlet', 'bernoulli-dirichlet', 'shards'"),
        ),
        # names
        (("--dataset", "imagenet"), ("unknown data set 'imagenet'", "digits")),
        (("--protocol", "quick"), ("unknown protocol 'quick'", "Known: cifar10")),
        (("--track", "mine"), ("unknown track 'mine'", "common, own, tuned")),
        (("--preset", "best"), ("unknown preset of fedavg 'best'", "Known: default")),
        (("--evaluate-on", "train"), ("unknown evaluation set 'train'",)),
        (("--executor", "magic"), ("unknown executor 'magic'", "serial")),
        (("--device", "tpu9"), ("--device tpu9 cannot be used here",)),
        (("--device", "cuda:63"), ("--device cuda:63 cannot be used here",)),
        (("--device", "cpu,cpu"), ("--device cpu,cpu: several devices must be different GPUs",)),
        (("--lanes", "0"), ("--lanes 0: write auto or a number from 1",)),
        # settings
        (("--set", "protocol.model=resnet19"), ("unknown model 'resnet19'", "resnet18")),
        (("--set", "protocol.batch"), ("'protocol.batch' sets nothing", "write name=value")),
        (("--set", "=3"), ("'=3' sets nothing", "write name=value")),
        (("--set", "protocol.batch=many"), ("batch = 'many'", "valid integer")),
        (("--set", "protocol.batch=0"), ("batch = 0", "greater than or equal to 1")),
        (("--set", "protocol.optimiser.lr=-1"), ("optimiser.lr = -1", "greater than 0")),
        (("--set", "protocol.optimiser=fast"), ("optimiser = 'fast'",)),
        (("--set", "protocol.batch.size=3"), ("batch = {'size': 3}",)),
        (("--set", "alpha=2"), ("settings of fedavg: unknown setting 'alpha'",)),
        (("--set", "a.b.c=2"), ("settings of fedavg: unknown setting 'a",)),
        (("--precision", "fp8"), ("precision = 'fp8'", "'fp32', 'tf32' or 'bf16'")),
        (("--rounds", "0"), ("Invalid value for '--rounds':",)),
        (("--seed", "-1"), ("Invalid value for '--seed':",)),
        (("--draw", "-1"), ("Invalid value for '--draw':",)),
        (("--seed", "one"), ("Invalid value for '--seed':",)),
        (("--holdout", "1"), ("holdout = 1.0", "less than 1")),
        (("--evaluate-on", "validation"), ("needs a hold-out: add --holdout",)),
        (("--no-such-option",), ("No such option: --no-such-option",)),
        (("extra",), ("extra",)),
    ],
)
def test_a_request_that_cannot_be_is_refused_before_anything_is_written(words, parts, earlier):
    message = refused_beside(earlier, *RUN, "--seed", "77", *words)
    for part in parts:
        assert part in message


def test_a_method_setting_of_a_wrong_type_or_out_of_range_is_refused(earlier, tmp_path):
    (tmp_path / "plugin.py").write_text(PLUGIN)
    command = ("run", "--method", "plugin.py:Mine", "--clients", "5", "--rounds", "1")
    assert "alpha = 'big': Input should be a valid number" in refused_beside(earlier, *command, "--set", "alpha=big")
    assert "alpha = 0: Input should be greater than 0" in refused_beside(earlier, *command, "--set", "alpha=0")
    assert "kind = 3: Input should be a valid string" in refused_beside(earlier, *command, "--set", "kind=3")


# ------------------------------------------------------------------------------------------------- plugins


@pytest.mark.parametrize(
    ("name", "source", "parts"),
    [
        ("absent.py:Mine", None, ("there is no file", "absent.py")),
        ("syntax.py:Mine", "class Mine(:\n", ("syntax.py cannot be imported: SyntaxError", "line 1")),
        (
            "missing.py:Mine",
            "\n\nimport torch.nonexistent\n",
            ("missing.py, line 3 cannot be imported", "No module named 'torch.nonexistent'"),
        ),
        ("broken.py:Mine", "x = 1 / 0\n", ("broken.py, line 1 cannot be imported: ZeroDivisionError",)),
        ("other.py:Their", PLUGIN, ("has no method class 'Their'", "it has ['Mine']", "--method other.py:ClassName")),
        ("bare.py", PLUGIN, ("has no method class ''", "--method bare.py:ClassName")),
        ("none.py:Mine", "class Mine: ...\n", ("has no method class 'Mine'", "it has none")),
        ("folder.py:Mine", ..., ("there is no file",)),
    ],
)
def test_a_plugin_file_that_cannot_be_used_is_named_with_the_reason(name, source, parts, earlier):
    path = Path(name.split(":")[0])
    if source is ...:
        path.mkdir()
    elif source is not None:
        path.write_text(source)
    message = refused_beside(earlier, "run", "--method", name, "--clients", "5", "--rounds", "1")
    for part in parts:
        assert part in message


def test_a_plugin_that_was_mended_can_be_used_in_the_same_process():
    Path("mended.py").write_text("import torch.nonexistent\n")
    refused("run", "--method", "mended.py:Mine")
    Path("mended.py").write_text(PLUGIN)
    assert registry.load_method("mended.py:Mine").__name__ == "Mine"


def test_a_client_that_fails_leaves_the_runs_beside_it_as_they_were(earlier, tmp_path):
    out, before = earlier
    mine = tmp_path / "runs"
    shutil.copytree(out, mine)
    (tmp_path / "plugin.py").write_text(PLUGIN)
    command = ("run", "--method", "plugin.py:Mine", "--clients", "5", "--rounds", "2", "--out", mine)
    message = refused(*command, code=1, TROUBLE="raise")
    assert "Mine, round 1, exchange 0, client 2, task 'train': RuntimeError: no luck" in message
    after = snapshot(mine)
    assert {name: after[name] for name in before} == before


# ------------------------------------------------------------------------------------- data that is not there


def test_a_data_folder_with_a_missing_file_is_named_with_the_file(earlier, tmp_path):
    root = tmp_path / "root"
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    for name in CIFAR_FILES:
        if name != "data_batch_4":
            (folder / name).write_bytes(b"x")
    message = refused_beside(earlier, *RUN, "--dataset", "cifar10", "--data-root", root)
    assert f"{folder}, which lacks data_batch_4 (MD5 " in message
    assert "data_batch_3" not in message
    assert f"flnoisebench data fetch cifar10 --data-root {root}" in message


def test_a_damaged_data_file_is_named(earlier, tmp_path):
    folder = tmp_path / "root" / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    for name in CIFAR_FILES:
        (folder / name).write_bytes(b"x")
    message = refused_beside(earlier, *RUN, "--dataset", "cifar10", "--data-root", tmp_path / "root")
    assert f"{folder / 'data_batch_1'} is damaged or truncated" in message


def images(root, layout):
    """{"train/a": 2} -> that many random 8 x 8 images in root/train/a."""
    rng = np.random.default_rng(0)
    for place, count in layout.items():
        (root / place).mkdir(parents=True)
        for i in range(count):
            Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(root / place / f"{i}.png")


WHOLE = {"train/a": 3, "train/b": 3, "test/a": 1, "test/b": 1}


@pytest.mark.parametrize(
    ("layout", "then", "parts"),
    [
        ({}, None, ("which has no train/",)),
        ({"train/a": 1, "train/b": 1}, None, ("which has no test/",)),
        ({**WHOLE, "test/c": 1}, None, ("c in test/ but not in train/",)),
        ({"train/a": 1, "test/a": 1}, None, ("1 class folders", "two at least")),
        ({**WHOLE, "train/b": 0}, None, ("train/b has no image",)),
        (WHOLE, lambda root: (root / "train/a/1.png").write_bytes(b"\x89PNG"), ("train/a/1.png cannot be decoded",)),
        (WHOLE, lambda root: shutil.copy(root / "train/a/1.png", root / "test/b"), ("are also training images",)),
        (WHOLE, lambda root: (root / "train/a/sub").mkdir(), ("train/a/sub is a folder within a folder",)),
        (WHOLE, lambda root: (root / "flnoisebench.json").write_text("{"), ("flnoisebench.json is not JSON",)),
        (WHOLE, lambda root: (root / "flnoisebench.json").write_text('{"sise": 8}'), ("Did you mean size?",)),
    ],
)
def test_an_image_folder_that_cannot_be_used_is_refused_with_the_place(layout, then, parts, earlier, tmp_path):
    root = tmp_path / "pictures"
    root.mkdir()
    images(root, layout)
    if then is not None:
        then(root)
    message = refused_beside(earlier, *RUN, "--dataset", "folder", "--data-root", root)
    assert str(root) in message
    for part in parts:
        assert part in message


def test_a_whole_image_folder_is_not_refused(tmp_path):
    """Else the test above would also pass on a data set that never loads."""
    images(tmp_path / "pictures", WHOLE)
    message = refused(*RUN, "--dataset", "folder", "--data-root", tmp_path / "pictures", "--clients", "4")
    assert "4 clients of at least 2 samples need 8 samples, and the data set has 6" in message


# ------------------------------------------------------------------------------------------ damaged results


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run that was stopped in round 1 of 3, and the digest that it has when it is not: (command, folder, digest)."""
    place = tmp_path_factory.mktemp("stopped")
    (place / "plugin.py").write_text(PLUGIN)
    command = ("run", "--method", place / "plugin.py:Mine", "--clients", "5", "--rounds", "3")
    assert call(*command, "--out", place / "runs", TROUBLE="stop").exit_code == console.INTERRUPTED
    digest = json.loads(done(*command, "--out", place / "whole", "--json"))["digest"]
    return command, place / "runs", digest


def the_object(folder):
    """The largest stored tree: the server's state."""
    return max((folder / "checkpoint" / "objects").iterdir(), key=lambda path: path.stat().st_size)


def overwrite(name, change):
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


DAMAGE = {
    "an object cut short": (
        lambda f: the_object(f).write_bytes(the_object(f).read_bytes()[:-5]),
        "cut short or altered",
    ),
    "an object emptied": (lambda f: the_object(f).write_bytes(b""), "cut short or altered"),
    "one bit of an object flipped": (
        lambda f: the_object(f).write_bytes(the_object(f).read_bytes()[:-1] + b"\x55"),
        "cut short or altered",
    ),
    "an object missing": (lambda f: the_object(f).unlink(), "cannot be read: No such file"),
    "the head cut short": (overwrite("checkpoint/head.json", lambda data: data[:60]), "head.json is damaged"),
    "the head emptied": (overwrite("checkpoint/head.json", lambda data: b""), "head.json is damaged"),
    "the head not text": (overwrite("checkpoint/head.json", lambda data: b"\xff\xfe\x00"), "head.json is damaged"),
    "the head of another kind": (overwrite("checkpoint/head.json", lambda data: b"[1]"), "head.json is damaged"),
    "the head of another version": (overwrite("checkpoint/head.json", lambda data: b'{"format": 99}'), "head.json"),
    "one number of the head": (
        overwrite("checkpoint/head.json", lambda data: data.replace(b'"round": 1', b'"round": 2')),
        "head.json was altered",
    ),
    "the head missing": (lambda f: (f / "checkpoint/head.json").unlink(), "head.json is missing"),
    "the records cut short": (overwrite("records.jsonl", lambda data: data[:50]), "records.jsonl has 50 bytes"),
    "the records missing": (lambda f: (f / "records.jsonl").unlink(), "records.jsonl has 0 bytes"),
    "the settings cut short": (overwrite("settings.json", lambda data: data[:50]), "settings.json is damaged"),
    "the settings of another run": (
        overwrite("settings.json", lambda data: data.replace(b'"batch": 32', b'"batch": 33')),
        "describes another run",
    ),
    "the settings missing": (lambda f: (f / "settings.json").unlink(), "settings.json is missing"),
    "what the checkpoint is of": (
        overwrite("checkpoint/run.json", lambda data: data.replace(b'"seed":0', b'"seed":1')),
        "run.json was altered",
    ),
    "one digit of the records": (
        overwrite("records.jsonl", lambda data: data.replace(b'"exchanges":1', b'"exchanges":2', 1)),
        "records.jsonl was altered",
    ),
    "the data's digests cut short": (
        overwrite("checkpoint/data.json", lambda data: data[:50]),
        "data.json was altered",
    ),
    "the data's digests missing": (lambda f: (f / "checkpoint/data.json").unlink(), "data.json is missing"),
    "the code of another method": (
        overwrite("checkpoint/method.sha256", lambda data: b"0" * 64),
        "method.sha256 was altered",
    ),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_run_is_refused_as_it_is_and_the_same_command_starts_anew_once_it_is_moved(what, stopped, tmp_path):
    command, runs, digest = stopped
    shutil.copytree(runs, tmp_path / "runs")
    folder = only_run(tmp_path / "runs")
    damage, words = DAMAGE[what]
    whole = snapshot(tmp_path / "runs")
    damage(folder)
    before = snapshot(tmp_path / "runs")
    assert before != whole
    message = refused(*command, "--out", tmp_path / "runs")
    assert words in message
    assert str(folder) in message
    assert snapshot(tmp_path / "runs") == before
    folder.rename(tmp_path / "moved")
    assert json.loads(done(*command, "--out", tmp_path / "runs", "--json"))["digest"] == digest


@pytest.mark.parametrize("settings", ["edited", "removed"])
def test_a_stopped_run_does_not_go_on_as_another(settings, stopped, tmp_path):
    """A folder that was copied for another seed, with settings.json mended so that it is taken."""
    command, runs, _ = stopped
    shutil.copytree(runs, tmp_path / "runs")
    folder = only_run(tmp_path / "runs").rename(only_run(tmp_path / "runs").with_name("draw0-seed1"))
    path = folder / "settings.json"
    path.write_text(path.read_text().replace('"seed": 0', '"seed": 1'))
    if settings == "removed":
        path.unlink()
    message = refused(*command, "--seed", "1", "--out", tmp_path / "runs")
    assert {"edited": "than the one that its checkpoint began", "removed": "settings.json is missing"}[
        settings
    ] in message
    assert str(folder) in message


def test_the_stopped_run_itself_is_not_refused(stopped, tmp_path):
    """Else the test above would also pass on a run that never resumes."""
    command, runs, digest = stopped
    shutil.copytree(runs, tmp_path / "runs")
    assert json.loads(done(*command, "--out", tmp_path / "runs", "--json"))["digest"] == digest


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[]", b'{"schema_version": 99}'])
def test_a_damaged_result_is_named_by_run_and_by_show_and_left_as_it_is(content, earlier, tmp_path):
    shutil.copytree(earlier[0], tmp_path / "runs")
    folder = only_run(tmp_path / "runs")
    (folder / "result.json").write_bytes(content)
    before = snapshot(tmp_path / "runs")
    for words in ((*RUN, "--out", tmp_path / "runs"), ("show", tmp_path / "runs")):
        assert f"{folder / 'result.json'} is damaged or of another version" in refused(*words)
    assert f"{folder / 'result.json'} is damaged or of another version" in done("list", "runs", "--out", tmp_path)
    assert snapshot(tmp_path / "runs") == before


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("settings.json", lambda data: data[:50], "settings.json is damaged or of another version"),
        ("settings.json", lambda data: data.replace(b'"changed": {}', b'"changed": {"a": 1}'), "describe two runs"),
        ("records.jsonl", lambda data: data[:-50] + b"\n", "records.jsonl, line 2 is damaged"),
        ("records.jsonl", lambda data: data[: data.index(b"\n") + 1], "records.jsonl of 1"),
        ("records.jsonl", None, "records.jsonl of 0"),
        ("settings.json", None, "settings.json is missing"),
    ],
)
def test_a_finished_run_with_a_damaged_file_is_not_already_complete(name, change, words, earlier, tmp_path):
    shutil.copytree(earlier[0], tmp_path / "runs")
    folder = only_run(tmp_path / "runs")
    path = folder / name
    if change:
        assert change(path.read_bytes()) != path.read_bytes()
        path.write_bytes(change(path.read_bytes()))
    else:
        path.unlink()
    before = snapshot(tmp_path / "runs")
    said = refused(*RUN, "--out", tmp_path / "runs")
    assert words in said
    assert f"move {folder} away, or give this run another --out" in said
    assert "already complete" not in said
    assert snapshot(tmp_path / "runs") == before


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff", b"[1]", b"7", b"[" * 100_000], ids=lambda content: str(content[:4])
)
def test_damaged_settings_of_an_unfinished_run_are_named_and_hide_no_other_run(content, stopped, tmp_path):
    shutil.copytree(stopped[1], tmp_path / "runs" / "a")
    shutil.copytree(stopped[1], tmp_path / "runs" / "b")
    folder = only_run(tmp_path / "runs" / "a")
    (folder / "settings.json").write_bytes(content)
    damaged, whole = done("list", "runs", "--out", tmp_path / "runs").splitlines()
    assert damaged.split("\t")[4].startswith(f"{folder / 'settings.json'} is damaged or of another version")
    assert f"move {folder} away" in damaged
    assert whole.startswith("unfinished\t1 rounds\t")


def test_show_names_the_damaged_line_of_the_records(earlier, tmp_path):
    shutil.copytree(earlier[0], tmp_path / "runs")
    records = only_run(tmp_path / "runs") / "records.jsonl"
    first, second = records.read_text().splitlines()
    records.write_text(f"{first}\n{second[:40]}\n")
    assert f"{records}, line 2 is damaged" in refused("show", tmp_path / "runs")


def test_two_processes_do_not_share_a_runs_folder(stopped, tmp_path):
    command, runs, _ = stopped
    shutil.copytree(runs, tmp_path / "runs")
    folder = only_run(tmp_path / "runs")
    before = snapshot(tmp_path / "runs")
    with open(folder / "lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        message = refused(*command, "--out", tmp_path / "runs")
    assert f"another process is running in {folder}" in message
    assert snapshot(tmp_path / "runs") == before


@pytest.mark.parametrize("command", ["show", "check"])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: data[:-100], "is truncated or no manifest"),
        (lambda data: data[:10], "is truncated or no manifest"),
        (lambda data: b"", "is truncated or no manifest"),
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "was altered"),
        (lambda data: data.replace(b'rho\\":0.6', b'rho\\":0.4'), "the header was altered"),
    ],
)
def test_a_truncated_or_hand_edited_manifest_is_refused(command, change, words, tmp_path):
    path = tmp_path / "m.safetensors"
    done("scenario", "build", "--clients", "5", "--out", path)
    content = path.read_bytes()
    path.write_bytes(change(content))
    assert path.read_bytes() != content
    message = refused("scenario", command, path)
    assert str(path) in message
    assert words in message


def test_a_manifest_that_is_not_there_is_named_with_the_command_that_writes_one():
    for words in (("show", "m"), ("check", "m"), ("diff", "m", "m")):
        assert "no manifest at m: `flnoisebench scenario build`" in refused("scenario", *words, code=1)


# ----------------------------------------------------------------------------- disks and folders that refuse


@contextmanager
def a_disk_of(size):
    """No file may grow beyond ``size`` bytes: what a full disk or a quota does (EFBIG where that says ENOSPC)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("size", [10, 500, 2_000, 20_000])  # the digest, the settings, small and large trees
def test_a_full_disk_is_said_leaves_earlier_results_and_the_same_command_goes_on_later(size, earlier, tmp_path):
    out, before = earlier
    mine = tmp_path / "runs"
    shutil.copytree(out, mine)
    command = (*RUN, "--seed", "1", "--out", mine)
    with a_disk_of(size):
        message = refused(*command, code=1)
    assert "the disk is full" in message
    assert "make room" in message
    after = snapshot(mine)
    assert {name: after[name] for name in before} == before
    assert not [name for name in after if name.endswith("result.json") and name not in before]
    later = json.loads(done(*command, "--json"))
    undisturbed = json.loads(done(*RUN, "--seed", "1", "--out", tmp_path / "undisturbed", "--json"))
    assert later["digest"] == undisturbed["digest"]


def test_a_disk_that_fills_up_in_the_middle_of_a_run_costs_only_what_was_not_committed(stopped, tmp_path):
    command, runs, digest = stopped
    shutil.copytree(runs, tmp_path / "runs")
    folder = only_run(tmp_path / "runs")
    records = (folder / "records.jsonl").read_bytes()
    with a_disk_of(20_000):
        message = refused(*command, "--out", tmp_path / "runs", code=1)
    assert f"cannot write the checkpoint in {folder}: the disk is full. The last commit is untouched" in message
    assert (folder / "records.jsonl").read_bytes() == records
    assert json.loads(done(*command, "--out", tmp_path / "runs", "--json"))["digest"] == digest


def test_a_full_disk_leaves_an_earlier_manifest_as_it_was(tmp_path):
    words = ("scenario", "build", "--clients", "5", "--out", tmp_path / "kept" / "m.safetensors")
    done(*words)
    before = snapshot(tmp_path / "kept")
    assert list(before) == ["m.safetensors"]  # nor does success leave anything beside it
    with a_disk_of(5_000):
        assert "the disk is full" in refused(*words, "--draw", "1", "--replace", code=1)
    assert snapshot(tmp_path / "kept") == before


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_every_way_in_which_a_disk_is_full_has_the_same_clear_words(code):
    assert console.explained(OSError(code, os.strerror(code))).startswith("the disk is full (")
    assert console.explained(OSError(code, "our own text")) == "our own text"


def effective_capabilities(change):
    """This thread's effective Linux capabilities, the low 32, put through ``change`` (capset(2))."""
    libc = ctypes.CDLL(None, use_errno=True)
    header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert libc.capget(header, data) == 0, os.strerror(ctypes.get_errno())
    data[0] = change(data[0])
    assert libc.capset(header, data) == 0, os.strerror(ctypes.get_errno())


CAP_DAC_OVERRIDE = 1 << 1  # what lets root write where nobody may


@pytest.fixture
def readable_only(tmp_path):
    """A folder that this process may read but not write, also where the tests run as root."""
    folder = tmp_path / "closed"
    folder.mkdir()

    @contextmanager
    def closed():
        for path in [folder, *folder.rglob("*")]:
            path.chmod(0o555 if path.is_dir() else 0o444)
        if os.geteuid() == 0:
            effective_capabilities(lambda held: held & ~CAP_DAC_OVERRIDE)
        try:
            with pytest.raises(PermissionError):
                (folder / "x").touch()
            yield
        finally:
            if os.geteuid() == 0:
                effective_capabilities(lambda held: held | CAP_DAC_OVERRIDE)

    yield folder, closed
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o755)


def test_a_folder_that_cannot_be_written_is_named_and_another_out_is_advised(readable_only, earlier):
    folder, closed = readable_only
    shutil.copytree(earlier[0], folder / "runs")
    before = snapshot(folder)
    with closed():
        message = refused(*RUN, "--seed", "1", "--out", folder / "runs", code=1)
        assert f"cannot write in {folder / 'runs'}" in message
        assert "Permission denied" in message
        assert "--out" in message
        assert "Permission denied" in refused("scenario", "build", "--out", folder / "m.safetensors", code=1)
        # reading what is there needs no right to write
        assert "complete" in done("show", folder / "runs")
        assert call(*RUN, "--out", folder / "runs").exit_code == 0
    assert snapshot(folder) == before


@pytest.mark.parametrize("inside", ["", "/deeper"])
def test_an_out_that_is_a_file_is_refused(inside, tmp_path):
    (tmp_path / "file").write_text("precious")
    message = refused(*RUN, "--out", f"{tmp_path}/file{inside}", code=1)
    assert f"cannot write in {tmp_path}/file" in message
    assert (tmp_path / "file").read_text() == "precious"


def test_a_manifest_is_not_written_over_a_folder_or_through_a_file(tmp_path):
    (tmp_path / "file").write_text("precious")
    (tmp_path / "folder").mkdir()
    assert f"{tmp_path}/folder: Is a directory" in refused(
        "scenario", "build", "--clients", "5", "--out", tmp_path / "folder", code=1
    )
    assert "file: " in refused("scenario", "build", "--clients", "5", "--out", tmp_path / "file" / "m", code=1)
    assert (tmp_path / "file").read_text() == "precious"
    assert not list((tmp_path / "folder").iterdir())
    assert {path.name for path in tmp_path.iterdir()} == {"file", "folder"}  # no half-written file left behind
