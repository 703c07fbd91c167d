"""Sweeps on real Dask: separate worker processes, killed without warning, and results equal to a serial sweep's."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from command_line import SCRIPT, call, done

distributed = pytest.importorskip("distributed")

from flnoisebench import grid, inputs, registry, runtime, sweep  # noqa: E402
from flnoisebench.api import MissingData  # noqa: E402
from flnoisebench.checkpoint import Checkpoint  # noqa: E402
from flnoisebench.settings import from_options  # noqa: E402

DASK = Path(sys.executable).with_name("dask")
PATIENCE = 120  # seconds for what takes one or two

# FedAvg that ends in its second or third round as it is told to, in the same file, so that all runs have one code.
PLUGIN = """
import os
import signal

from flnoisebench.api import Card, Config, Field, Method, Plan, Reply, average, cross_entropy, weights


class Frail(Method):
    card = Card(title="Frail", paper="tests/test_sweep.py", year=2025)

    class Config(Config):
        trouble: str = Field("never", why="how it ends")

    def init(self, server):
        return weights(server.model())

    def plan(self, state, server):
        return Plan("train", server.cohort(), state)

    def client(self, task, message, client):
        if client.round == 1 and self.config.trouble == "raise":
            raise RuntimeError("no luck today")
        if client.round == 2 and self.config.trouble == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        network = client.model(message)
        client.fit(network, cross_entropy)
        return Reply(weights(network))

    def aggregate(self, state, uploads, server):
        return average([upload.content for upload in uploads], [upload.size for upload in uploads])

    def predictors(self, state, server):
        return {"main": server.model(state, frozen=True)}
"""


def settings(rounds: int, seed: int, method: str = "fedavg", **more):
    return from_options({"method": method, "rounds": rounds, "clients": 5, "seed": seed, **more}, device="cpu")


def until(condition, what: str):
    """Wait for a condition's first true value, which is returned."""
    deadline = time.monotonic() + PATIENCE
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited {PATIENCE} s for {what}"
        time.sleep(0.02)
    return found


def rounds_in(folder: Path) -> int:
    path = folder / "records.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def holder(folder: Path) -> int | None:
    """The process that has the run's folder locked."""
    inode = (folder / "lock").stat().st_ino if (folder / "lock").exists() else None
    for line in Path("/proc/locks").read_text().splitlines():
        words = line.split()  # 1: FLOCK ADVISORY WRITE <pid> <major>:<minor>:<inode> 0 EOF
        if "FLOCK" in words and words[5].split(":")[2] == str(inode):
            return int(words[4])
    return None


def serially(runs, out: Path) -> None:
    for run in runs:
        runtime.prepare(run, data_root=out, out=out, device="cpu").execute()


def contents(out: Path) -> dict[str, object]:
    """All files of all runs, without what the clock says; checkpoints' objects are named by their content."""

    def timeless(value):
        if isinstance(value, dict):
            # the last three follow from the first; a sweep's runs are beside each other, at times not from the start;
            # the checkout may change while a test runs
            apart = ("seconds", "peak_memory", "sharing", "earlier", "commit")
            apart += ("sha256", "records_length", "records_sha256")
            found = {name: timeless(entry) for name, entry in value.items() if name not in apart}
            if environments := found.get("environments"):
                found["environments"] = [one for i, one in enumerate(environments) if one not in environments[:i]]
            return found
        return [timeless(entry) for entry in value] if isinstance(value, list) else value

    found: dict[str, object] = {}
    for path in sorted(out.rglob("*")):
        name = str(path.relative_to(out))
        if not path.is_file() or name == sweep.PROBE or path.name == "failure.txt":
            continue
        if path.suffix in (".json", ".jsonl"):
            found[name] = [timeless(json.loads(line)) for line in path.read_text().splitlines()] if (
                path.suffix == ".jsonl"
            ) else timeless(json.loads(path.read_text()))  # fmt: skip
        else:
            found[name] = path.read_bytes()
    return found


def differences(one, other, at=""):
    """Where two contents are not the same, a line for each place."""
    if isinstance(one, dict) and isinstance(other, dict):
        for name in sorted(one.keys() | other.keys()):
            yield from differences(one.get(name), other.get(name), f"{at} {name}")
    elif one != other:
        yield f"{at}: {one!r}, {other!r}"


@contextmanager
def process(*words, log: Path, **options):
    """A process of its own, its output in a file; killed at the end."""
    with open(log, "ab") as file:
        started = subprocess.Popen([str(word) for word in words], stdout=file, stderr=subprocess.STDOUT, **options)
    try:
        yield started
    finally:
        started.kill()
        started.wait()


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def scheduler(port: int, log: Path):
    return process(DASK, "scheduler", "--host", "127.0.0.1", "--port", port, "--no-dashboard", log=log)


def workers(port: int, count: int, log: Path, threads: int = 1):
    return process(DASK, "worker", f"tcp://127.0.0.1:{port}", "--nthreads", threads, "--nworkers", count,
                   "--no-dashboard", log=log, cwd=log.parent)  # fmt: skip


@contextmanager
def in_background(work: sweep.Sweep):
    """The sweep in a thread: what it returned, or raised, is in the list once it is over."""
    ended: list = []

    def go():
        try:
            ended.append(work.carry_out())
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=go)
    thread.start()
    yield ended
    thread.join(PATIENCE)
    assert not thread.is_alive()


# ------------------------------------------------------------------------------------- what survives what


def test_killed_workers_and_a_killed_scheduler_lose_nothing(tmp_path, monkeypatch):
    """Started by hand, as on a cluster: a worker dies in the middle of a run, then the scheduler with all workers.  The
    sweep is there before them all, in a folder of its own, by which its method's path is said."""
    out, port, messages = tmp_path / "out", free_port(), []
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    Path("frail.py").write_text(PLUGIN)
    runs = [settings(40, 0), settings(40, 1, "frail.py:Frail")]
    connect = distributed.Client  # which would try for 5 s
    monkeypatch.setattr(distributed, "Client", lambda *said, **more: connect(*said, **{**more, "timeout": 1}))
    work = sweep.Sweep(runs, out=out, data_root=tmp_path, place=sweep.Running(f"127.0.0.1:{port}"),
                       on_message=messages.append)  # fmt: skip
    first = work.standings[0]
    with in_background(work) as ended:
        until(lambda: any("no scheduler at" in text for text in messages), "the sweep to wait for a scheduler")
        with scheduler(port, tmp_path / "scheduler.log") as head, workers(port, 2, tmp_path / "workers.log"):
            until(lambda: rounds_in(first.folder) >= 3, "three rounds")
            victim = holder(first.folder)
            os.kill(victim, signal.SIGKILL)
            at = rounds_in(first.folder)
            assert at < 40
            until(lambda: rounds_in(first.folder) >= at + 3, "the run to go on elsewhere")
            assert holder(first.folder) not in (victim, None)
            head.kill()
            until(lambda: any("lost the scheduler" in text for text in messages), "the loss to be noticed")
            assert not (first.folder / "result.json").exists()
            until(lambda: holder(first.folder) is None, "the worker of a lost scheduler to stop")
            assert not (first.folder / "result.json").exists()
        assert not ended
        with scheduler(port, tmp_path / "scheduler.log"), workers(port, 1, tmp_path / "workers.log"):
            until(lambda: ended, "the sweep to end")
    assert any("is back" in text for text in messages)
    assert [outcome.status for outcome in ended[0]] == ["complete", "complete"]
    assert [outcome.rounds for outcome in ended[0]] == [40, 40]
    serially(runs, tmp_path / "serial")
    assert list(differences(contents(out), contents(tmp_path / "serial"))) == []


def started(pid):
    """When a process began, in the kernel's ticks, since its number may soon be another's; None once it has ended."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if state in "ZX" else int(rest[18])


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """A sweep of worker processes on this host: its client is killed, and a second one, in this process, finds a run
    locked by somebody else, a run that fails, and one that is done."""
    folder = tmp_path_factory.mktemp("local")
    (folder / "frail.py").write_text(PLUGIN)
    (folder / "grid.toml").write_text(
        'rounds = 40\nclients = 5\nmethod = "fedavg"\nseed = [0, 1]\n'
        f'[[include]]\nrounds = 4\nmethod = "{folder}/frail.py:Frail"\nset = ["trouble=never", "trouble=raise"]\n'
    )
    out = folder / "out"
    runs = grid.load(folder / "grid.toml", device="cpu")
    folders = [run.folder(out) for run in runs]
    command = (SCRIPT, "sweep", folder / "grid.toml", "--out", out, "--device", "cpu", "--workers", "2")
    with process(*command, log=folder / "log") as client:
        until(lambda: rounds_in(folders[0]) >= 3, "three rounds")
        workers = {pid: started(pid) for pid in {holder(folders[0]), holder(folders[1])} - {None}}
        client.kill()
        client.wait()
    cut_short = not (folders[0] / "result.json").exists()
    until(lambda: holder(folders[0]) is None and holder(folders[1]) is None, "the workers to end")

    serially([runs[2]], out)
    done = (folders[2] / "result.json").stat().st_mtime_ns
    lock, seen, attempts = Checkpoint(folders[1]), [], {}

    def watch(standing):
        seen.append((runs.index(standing.settings), standing.status))
        attempts[seen[-1][0]] = standing.attempt
        if standing.status == "waiting":
            threading.Timer(1.5, lock.close).start()

    outcomes = sweep.Sweep(
        runs, out=out, data_root=folder, place=sweep.Local(workers=2), on_change=watch, on_message=pytest.fail
    ).carry_out()
    serially([runs[0], runs[1]], folder / "serial")
    return SimpleNamespace(**locals())


def test_a_killed_client_takes_its_workers_along_and_the_same_grid_continues(local):
    assert local.cut_short
    assert local.workers
    assert not any(when and started(pid) == when for pid, when in local.workers.items())
    assert local.outcomes[0].status == "complete"
    assert not local.outcomes[0].already


def test_the_results_equal_a_serial_sweeps_file_by_file(local):
    serial = contents(local.folder / "serial")
    assert len(serial) > 10
    here = {name: content for name, content in contents(local.out).items() if name in serial}
    assert list(differences(here, serial)) == []
    for number in (0, 1):
        beside = {path.name for path in local.folders[number].iterdir()}
        assert beside == {"settings.json", "records.jsonl", "result.json", "checkpoint", "lock"}


def test_a_run_that_somebody_else_has_is_waited_for(local):
    assert (1, "waiting") in local.seen
    assert local.outcomes[1].status == "complete"
    assert 2 <= local.attempts[1] <= 4  # after 1, 2, 4 s, and not all the time


def test_a_complete_run_is_not_run_again(local):
    assert local.outcomes[2].already
    assert (local.folders[2] / "result.json").stat().st_mtime_ns == local.done
    assert [status for number, status in local.seen if number == 2] == ["complete"]


def test_a_run_that_fails_is_recorded_with_its_traceback_and_stops_no_other(local):
    failed = local.outcomes[3]
    assert (failed.status, failed.already) == ("failed", False)
    assert "no luck today" in failed.failure
    text = (failed.folder / "failure.txt").read_text()
    assert "Traceback (most recent call last)" in text
    assert "RuntimeError: no luck today" in text
    assert [outcome.status for outcome in local.outcomes] == ["complete", "complete", "complete", "failed"]


def test_a_sweep_of_runs_that_are_over_starts_no_worker(local):
    stale = local.outcomes[2].folder / "failure.txt"
    stale.write_text("of a session before the run was completed\n")
    again = sweep.Sweep(local.runs, out=local.out, data_root=local.folder, place=NOWHERE).carry_out()
    assert [outcome.status for outcome in again] == ["complete", "complete", "complete", "failed"]
    assert all(outcome.already for outcome in again)
    assert not stale.exists()


def test_a_sweep_with_a_failed_run_ends_with_exit_code_1_and_says_which(local):
    result = call("sweep", local.folder / "grid.toml", "--out", local.out, "--device", "cpu", "--json")
    assert result.exit_code == 1
    said = json.loads(result.stdout)
    assert (said["complete"], said["failed"]) == (3, 1)
    assert [run["status"] for run in said["runs"]] == ["complete"] * 3 + ["failed"]
    assert "no luck today" in said["runs"][3]["failure"]


def test_retry_takes_up_what_failed_and_each_change_is_a_line(local):
    words = ("sweep", local.folder / "grid.toml", "--out", local.out, "--device", "cpu", "--workers", "1")
    result = call(*words, "--retry")
    assert result.exit_code == 1
    label = str(local.folders[3].relative_to(local.out))
    began, failed, runs, again, following = (line.split("\t") for line in result.stdout.splitlines())
    assert began == ["running", label, f"on {socket.gethostname()}"]
    assert failed == again
    assert failed[:2] == ["failed", label]  # it has been tried, and fails as before
    assert "no luck today" in failed[2]
    assert runs == ["runs", "3 complete, 1 failed; 3 of them were before"]
    assert "--retry goes on with what failed" in following[1]


def test_the_live_view_fits_a_terminal_of_80_columns(local):
    from rich.console import Console

    from flnoisebench.cli.sweep import live_view

    work = sweep.Sweep(local.runs, out=local.out, data_root=local.folder, place=SimpleNamespace(name="two workers"))
    work.carry_out()
    work.standings[0].status, work.standings[0].round, work.standings[0].accuracy = "running", 12, 87.654
    console = Console(width=80, height=24, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(live_view(work, 80, 24))
    lines = console.export_text().splitlines()
    assert lines[0].startswith("2 done, 1 failed, 1 running, 0 queued of 4")
    (running,) = (line for line in lines if line.startswith("running"))
    assert running.split()[1:3] == ["12/40", "87.65"]
    assert running.rstrip().endswith("draw0-seed0")
    assert any(line.startswith("failed") and "draw0-seed0: " in line for line in lines), lines
    assert max(map(len, lines)) <= 80, lines


# ------------------------------------------------------------------------------------ before anything runs

NOWHERE = SimpleNamespace(name="nowhere", lasting=False)  # has no open


def test_every_data_set_is_loaded_and_every_scenario_drawn_once_before_anything_runs(tmp_path, monkeypatch):
    counts = {"load": 0, "draw": 0}
    load, draw = registry.load_dataset("digits").load, inputs.build_scenario

    def counting(what, function):
        def counted(*arguments, **options):
            counts[what] += 1
            return function(*arguments, **options)

        return counted

    monkeypatch.setattr(type(registry.load_dataset("digits")), "load", staticmethod(counting("load", load)))
    monkeypatch.setattr(inputs, "build_scenario", counting("draw", draw))
    runs = [settings(2, seed, draw=draw) for seed in (0, 1) for draw in (0, 1)]
    found = sweep.identities(runs, tmp_path)
    assert counts == {"load": 1, "draw": 2}
    prepared = runtime.prepare(runs[1], data_root=tmp_path, out=tmp_path, device="cpu")
    assert found[1] == (prepared._source, prepared._digests)
    assert found[0].digests != found[1].digests
    assert found[0] == found[2]


def test_a_run_of_public_images_is_held_against_them_too_and_another_is_not(tmp_path):
    options = {"protocol": "digits", "dataset": "digits"}
    runs = [settings(2, 0, **options), settings(2, 0, "fedned-minus", **options)]
    plain, public = sweep.identities(runs, tmp_path)
    for run, found in zip(runs, (plain, public), strict=True):
        assert found.digests == runtime.prepare(run, data_root=tmp_path, out=tmp_path, device="cpu")._digests
    assert set(public.digests) - set(plain.digests) == {"public"}


def test_a_run_of_images_that_are_shuffled_is_held_against_their_order_too(tmp_path):
    run = settings(2, 0, dataset="synthetic")
    (found,) = sweep.identities([run], tmp_path)
    assert found.digests == runtime.prepare(run, data_root=tmp_path, out=tmp_path, device="cpu")._digests
    assert "order" in found.digests


def test_missing_data_and_scenarios_that_cannot_be_are_all_named_and_nothing_starts(tmp_path, monkeypatch):
    out = tmp_path / "out"
    impossible = [settings(2, seed, min_size=500, draw=draw) for seed in (0, 1) for draw in (0, 1)]
    away = settings(2, 0, dataset="cifar10")
    unheld = settings(2, 0, evaluate_on="validation")
    with pytest.raises(ValueError, match="runs that cannot begin") as caught:
        sweep.Sweep(
            [settings(2, 0, rho=0.3), *impossible, away, unheld], out=out, data_root=tmp_path, place=NOWHERE
        ).carry_out()
    lines = str(caught.value).splitlines()
    assert sum("5 clients of at least 500 samples need 2500 samples" in line for line in lines) == 2  # one a draw
    assert sum(line.startswith("  cifar10: ") and str(tmp_path) in line for line in lines) == 1
    assert sum("validation needs a hold-out" in line for line in lines) == 1
    assert not out.exists()
    with pytest.raises(MissingData, match="data fetch cifar10"):
        sweep.Sweep([away], out=out, data_root=tmp_path, place=NOWHERE).carry_out()
    monkeypatch.setattr(sweep, "SHOWN", 1)
    with pytest.raises(ValueError, match=r"cannot begin:\n.*\n  and 1 more\Z"):
        sweep.identities([away, unheld], tmp_path)


def test_a_grid_of_scenarios_without_a_noisy_client_is_told_once(tmp_path):
    said = []
    sweep.identities(
        [settings(2, seed, rho=0.1, draw=draw) for seed in (0, 1) for draw in (0, 1)], tmp_path, said.append
    )
    assert len(said) == 1
    assert said[0].startswith("the scenario has no noisy client")


def test_a_finished_run_of_other_data_or_another_code_is_not_taken_for_this_one(tmp_path):
    (tmp_path / "frail.py").write_text(PLUGIN)
    runs = [settings(2, 0, f"{tmp_path}/frail.py:Frail"), settings(2, 0), settings(2, 1)]
    serially(runs, tmp_path)
    (tmp_path / "frail.py").write_text(PLUGIN + "\n")
    path = runs[1].folder(tmp_path) / "result.json"
    other = json.loads(path.read_text())
    path.write_text(json.dumps({**other, "digests": {**other["digests"], "labels": "0" * 64}}))
    outcomes = sweep.Sweep(runs, out=tmp_path, data_root=tmp_path, place=NOWHERE).carry_out()
    assert [outcome.status for outcome in outcomes] == ["failed", "failed", "complete"]
    assert "Frail has changed since the run in" in outcomes[0].failure
    assert "had other data (labels: another SHA-256)" in outcomes[1].failure
    assert all(outcome.already for outcome in outcomes)


def test_a_run_that_a_worker_cannot_begin_is_among_the_failures_and_listed(tmp_path, monkeypatch):
    """Files may go between the look at them and the run."""
    images = tmp_path / "data"
    (images / "train.csv").parent.mkdir()
    run = settings(2, 0, dataset="folder", protocol="digits")
    monkeypatch.setattr(sweep, "identities", lambda runs, root, on_message: [sweep.Identity("", {})])
    (outcome,) = sweep.Sweep([run], out=tmp_path / "out", data_root=images, place=sweep.Local(workers=1)).carry_out()
    assert outcome.status == "failed"
    assert str(images) in outcome.failure
    status, rounds, _, folder, said = done("list", "runs", "--out", tmp_path / "out").splitlines()[0].split("\t")
    assert (status, rounds, folder) == ("failed", "0 rounds", str(outcome.folder))
    assert str(images) in said


# ------------------------------------------------------------------------------------ what a worker must have


@pytest.fixture
def probe(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "cifar-10-batches-bin").mkdir()
    (tmp_path / "mine.py").write_text("x = 1\n")
    run = settings(2, 0)
    run = run.model_copy(update={"method": f"{tmp_path}/mine.py:Mine"})
    return sweep.probe_of([run], tmp_path / "out", tmp_path / "data", "cpu")


def lacks(probe, threads=1, **changes):
    return sweep.missing_here({**probe, **changes}, SimpleNamespace(state=SimpleNamespace(nthreads=threads)))


def test_a_worker_that_sees_all_is_fit_and_leaves_nothing_behind(probe):
    assert lacks(probe) == []
    assert [path.name for path in Path(probe["out"]).iterdir()] == [sweep.PROBE]
    assert sweep.probe_of([], Path(probe["out"]), Path(probe["data_root"]), "cpu")["mark"] == probe["mark"]


def test_what_a_worker_lacks_is_said(probe, tmp_path, monkeypatch):
    assert "start it with --nthreads 1" in lacks(probe, threads=2)[0]
    monkeypatch.setattr(sweep.torch.cuda, "is_available", lambda: False)
    assert lacks(probe, device="cuda") == ["torch finds no GPU"]
    assert "and 99.0 on" in lacks(probe, version="99.0")[0]
    assert "mount it at the same path" in lacks(probe, out=str(tmp_path / "elsewhere"))[0]
    assert "is another folder than on" in lacks(probe, mark="another")[0]
    assert "where the sweep was started, is not there" in lacks(probe, cwd=str(tmp_path / "gone"))[0]
    shutil.rmtree(tmp_path / "data")
    assert "lacks cifar-10-batches-bin" in lacks(probe)[0]
    (tmp_path / "mine.py").write_text("x = 2\n")
    assert "mine.py is missing or another file" in lacks(probe)[1]


def test_a_run_that_is_named_twice_and_no_worker_at_all_are_refused(tmp_path):
    with pytest.raises(ValueError, match="a run is named twice"):
        sweep.Sweep([settings(2, 0)] * 2, out=tmp_path, data_root=tmp_path, place=sweep.Local())
    with pytest.raises(ValueError, match="at least 1"):
        sweep.Local(workers=0)


@pytest.mark.parametrize(("cores", "workers"), [(1, 2), (2, 2), (3, 3)])
def test_without_a_number_there_is_a_worker_a_core_and_at_least_two(monkeypatch, cores, workers):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    assert len(sweep.Local().cards) == workers
    assert len(sweep.Local(workers=1).cards) == 1


@pytest.mark.parametrize(("words", "lanes"), [((), 1), (("--lanes", "3"), 3)])
def test_runs_have_the_lanes_that_are_said_and_on_a_cpu_one(tmp_path, monkeypatch, words, lanes):
    (tmp_path / "grid.toml").write_text('rounds = 2\nmethod = "fedavg"\n')
    found = []
    monkeypatch.setattr(sweep.Sweep, "carry_out", lambda work: found.append(work.lanes) or [])
    done("sweep", tmp_path / "grid.toml", "--device", "cpu", "--out", tmp_path / "out", *words)
    assert found == [lanes]


def test_where_no_worker_is_fit_any_more_one_is_waited_for(tmp_path):
    """Runs went to the unfit ones, which sent them back, as fast as they could."""
    work = sweep.Sweep([settings(2, 0)], out=tmp_path, data_root=tmp_path, place=NOWHERE)
    work.standings[0].identity, work._workers, asked = sweep.Identity("", {}), ["tcp://a:1"], []

    def submit(*arguments, workers, **options):
        asked.append(workers)
        return SimpleNamespace(add_done_callback=lambda callback: None)

    client = SimpleNamespace(status="running", submit=submit)
    work._exclude("tcp://a:1", "a", "it has another folder")
    work._submit(client)
    assert asked == []
    work._workers.append("tcp://b:1")
    work._submit(client)
    assert asked == [["tcp://b:1"]]


@pytest.mark.parametrize(("resources", "device"), [([{}, {"GPU": 1.0}], "cuda"), ([{}], "cpu"), ([], "cpu")])
def test_a_cluster_with_a_gpu_somewhere_is_one_of_gpus(monkeypatch, resources, device):
    workers = {f"tcp://a:{i}": {"resources": one} for i, one in enumerate(resources)}
    client = SimpleNamespace(scheduler_info=lambda n_workers: {"workers": workers})
    monkeypatch.setattr(sweep.distributed, "Client", lambda *_, **__: nullcontext(client))
    assert sweep.Running("a:8786").device() == device


def test_a_worker_of_a_card_sees_that_card_alone(monkeypatch):
    asked = {}

    def cluster(*, workers, **rest):
        asked.update(workers)
        return SimpleNamespace(scheduler_address="tcp://nowhere", workers={}, close=lambda: None)

    monkeypatch.setattr(sweep.distributed, "SpecCluster", cluster)
    monkeypatch.setattr(sweep, "visible_cards", lambda: ["5", "7"])
    with sweep.Local(device="cuda", runs_per_gpu=2).open():
        pass
    options = [one["options"] for one in asked.values()]
    assert [one["env"] for one in options] == [{"CUDA_VISIBLE_DEVICES": card} for card in ("5", "5", "7", "7")]
    assert {(one["nthreads"], one["resources"]["GPU"]) for one in options} == {(1, 1)}
    with pytest.raises(ValueError, match="say --runs-per-gpu"):
        sweep.Local(device="cuda", workers=2)
    monkeypatch.setattr(sweep, "visible_cards", list)
    with pytest.raises(ValueError, match="torch finds no GPU here"):
        sweep.Local(device="cuda")


def test_a_worker_that_dies_as_the_sweep_ends_keeps_no_scheduler_open(monkeypatch):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    closed = []
    cluster = SimpleNamespace(
        scheduler_address="tcp://nowhere",
        workers={0: SimpleNamespace(pid=gone.pid, auto_restart=True)},
        close=lambda: closed.append(True),
    )
    monkeypatch.setattr(sweep.distributed, "SpecCluster", lambda **options: cluster)
    with sweep.Local(workers=1).open() as address:
        assert address == "tcp://nowhere"
    assert closed == [True]


def test_a_scheduler_that_is_not_there_is_named():
    with pytest.raises(ValueError, match="start one with `dask scheduler`"):
        sweep.Running(f"127.0.0.1:{free_port()}").device()


# --------------------------------------------------------------------------------------------------- slower


@pytest.mark.slow
def test_a_run_that_kills_every_worker_is_given_up_and_the_others_are_not(tmp_path):
    (tmp_path / "frail.py").write_text(PLUGIN)
    frail = f"{tmp_path}/frail.py:Frail"
    runs = [settings(4, 0, frail, set=["trouble=die"]), settings(4, 0, frail), settings(4, 1, frail)]
    outcomes = sweep.Sweep(runs, out=tmp_path / "out", data_root=tmp_path, place=sweep.Local(workers=2)).carry_out()
    assert [outcome.status for outcome in outcomes] == ["failed", "complete", "complete"]
    assert "every worker that took this run has died" in outcomes[0].failure
    assert re.search("the last ones at round [12]:", (outcomes[0].folder / "failure.txt").read_text())


@pytest.mark.slow
def test_a_client_that_is_killed_on_a_lasting_cluster_leaves_no_run_going_on(tmp_path):
    (tmp_path / "grid.toml").write_text('rounds = 300\nclients = 5\nmethod = "fedavg"\n')
    out, port = tmp_path / "out", free_port()
    (run,) = grid.load(tmp_path / "grid.toml", device="cpu")
    folder = run.folder(out)
    command = (SCRIPT, "sweep", tmp_path / "grid.toml", "--out", out, "--scheduler", f"127.0.0.1:{port}")
    with scheduler(port, tmp_path / "scheduler.log"), workers(port, 1, tmp_path / "workers.log") as worker:
        with process(*command, log=tmp_path / "log"):
            until(lambda: rounds_in(folder) >= 3, "three rounds")
        until(lambda: holder(folder) is None, "the worker to stop at the end of its round")
        assert not (folder / "result.json").exists()
        assert worker.poll() is None
        with process(*command, log=tmp_path / "log") as again:
            assert again.wait(PATIENCE) == 0
    serially([run], tmp_path / "serial")
    assert list(differences(contents(out), contents(tmp_path / "serial"))) == []


@pytest.mark.slow
def test_two_sweeps_in_one_folder_finish_together(tmp_path):
    (tmp_path / "grid.toml").write_text('rounds = 10\nclients = 5\nmethod = "fedavg"\nseed = [0, 1, 2, 3]\n')
    runs = grid.load(tmp_path / "grid.toml", device="cpu")
    command = (SCRIPT, "sweep", tmp_path / "grid.toml", "--out", tmp_path / "out", "--device", "cpu")
    with process(*command, log=tmp_path / "a") as a, process(*command, log=tmp_path / "b") as b:
        assert (a.wait(PATIENCE), b.wait(PATIENCE)) == (0, 0)
    serially(runs, tmp_path / "serial")
    assert contents(tmp_path / "out") == contents(tmp_path / "serial")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sent", "code", "word"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "stopped by SIGTERM")]
)
def test_ctrl_c_and_sigterm_stop_cleanly_and_say_how_to_continue(tmp_path, sent, code, word):
    """A terminal or a batch system sends it to all processes of the command, the workers among them."""
    (tmp_path / "grid.toml").write_text('rounds = 300\nclients = 5\nmethod = "fedavg"\nseed = [0, 1, 2]\n')
    out, log = tmp_path / "out", tmp_path / "log"
    (run, *_) = grid.load(tmp_path / "grid.toml", device="cpu")
    command = (SCRIPT, "sweep", tmp_path / "grid.toml", "--out", out, "--device", "cpu")
    with process(*command, log=log, start_new_session=True) as client:
        until(lambda: rounds_in(run.folder(out)) >= 3, "three rounds")
        started = time.monotonic()
        os.killpg(client.pid, sent)
        assert client.wait(PATIENCE) == code
        assert time.monotonic() - started < 30  # when Slurm kills (KillWait)
    text = log.read_text()
    assert f"{word}; 0 of 3 runs are over, and the same command continues" in text
    assert "Traceback" not in text
    assert holder(run.folder(out)) is None


@pytest.mark.slow
def test_workers_with_several_threads_get_no_run(tmp_path):
    port, messages = free_port(), []
    with (
        scheduler(port, tmp_path / "scheduler.log"),
        workers(port, 1, tmp_path / "workers.log", threads=2),
        pytest.raises(ValueError, match="no worker can take a run"),
    ):
        sweep.Sweep([settings(2, 0)], out=tmp_path / "out", data_root=tmp_path,
                    place=sweep.Running(f"127.0.0.1:{port}"), on_message=messages.append).carry_out()  # fmt: skip
    assert "--nthreads 1" in "".join(messages)


def slurm_is_up() -> bool:
    if shutil.which("sbatch") is None:
        return False
    return subprocess.run(["sinfo", "--noheader"], capture_output=True, timeout=30).returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(not slurm_is_up(), reason="no SLURM answers here (sbatch, sinfo)")
def test_slurm_jobs_carry_out_a_grid_and_one_that_is_cancelled_is_replaced(tmp_path):
    profile = {"jobs": 1, "cores": 1, "memory": "2GB", "walltime": "00:20:00", "log_directory": str(tmp_path)}
    runs = [settings(60, seed) for seed in (0, 1)]
    work = sweep.Sweep(runs, out=tmp_path / "out", data_root=tmp_path, place=sweep.Slurm(profile))
    with in_background(work) as ended:
        until(lambda: rounds_in(work.standings[0].folder) >= 3, "three rounds")
        subprocess.run(["scancel", "--name", "flnoisebench", "--user", str(os.getuid())], check=True)
        until(lambda: ended, "the sweep to end")
    assert [outcome.status for outcome in ended[0]] == ["complete", "complete"]
    serially(runs, tmp_path / "serial")
    assert contents(tmp_path / "out") == contents(tmp_path / "serial")
