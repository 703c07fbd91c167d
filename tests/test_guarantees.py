"""The seven guarantees of the runtime (docs: architecture), each kept by tests of its number."""

import ast
import dataclasses
import errno
import fcntl
import gc
import inspect
import itertools
import json
import math
import multiprocessing
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
import types
from concurrent.futures import Future
from pathlib import Path

import fixture_methods as fixtures
import numpy as np
import pytest
import torch
import wicked_methods as wicked
from flnoisebench_methods.fedavg import FedAvg
from stopping import Stop

import flnoisebench
from flnoisebench import checkpoint, evaluation, executors, records, registry, runtime, trees
from flnoisebench.api import average, weights
from flnoisebench.checkpoint import Busy, Checkpoint, Damaged
from flnoisebench.engine import Lane, initialised
from flnoisebench.executors import ClientError, Debug, Job, Serial, Threads, perform
from flnoisebench.inputs import data_digest
from flnoisebench.models import build_encoder
from flnoisebench.provenance import commit_of
from flnoisebench.runtime import AlreadyDone, MethodError
from flnoisebench.scenario import Truth
from flnoisebench.settings import resolve
from flnoisebench.testing import tiny_arrays, tiny_engine, tiny_run

TIMES = {"seconds", "peak_memory"}  # what a record may differ in between two runs of the same settings
MLP = 4 * (64 * 128 + 128 + 128 * 3 + 3)  # bytes of the fixtures' network: 8x8 grey pixels, 128 hidden units, 3 classes


def lasting(folder):
    """What a run leaves behind that must not depend on how it went: records and result."""
    result = records.load_result(folder).model_dump(exclude=TIMES | {"environment"})
    return result, [record.model_dump(exclude=TIMES) for record in records.load_records(folder)]


def interrupted(method, out, *, after=0, **options):
    """A run that was stopped when its round ``after`` was committed; returns its folder."""
    run = tiny_run(method, out, **options)

    def stop(record):
        if record.round == after:
            raise Stop

    with pytest.raises(Stop):
        run.execute(stop)
    return run.folder


def snapshot(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# ---------------------------------------------------------------- 1: an exchange happens wholly or not at all

# One process imports torch; each session of a run is a fork of it, which is killed without warning.
DRIVER = """
    import errno, json, os, random, resource, signal, sys, time, traceback
    from pathlib import Path

    import fixture_methods as fixtures
    from flnoisebench import executors, records
    from flnoisebench.testing import tiny_run

    OPTIONS = dict(rounds=12, clients=4, participation=0.75)
    out = Path(sys.argv[1])

    def session(name, before=lambda: None, pause=0.0, on_round=lambda record: None):
        pid = os.fork()
        if pid:
            return pid
        status = 1
        try:
            real = executors.perform

            def perform(lane, job):
                time.sleep(pause)
                return real(lane, job)

            executors.perform = perform
            run = tiny_run(fixtures.Whole, out / name, **OPTIONS)
            before()
            run.execute(on_round)
            status = 0
        except OSError as error:
            (out / (name + ".error")).write_text(f"{error.errno} {error}")
            status = 3
        except Exception:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)

    def ended(pid):
        return os.waitpid(pid, 0)[1]

    report = {"undisturbed": ended(session("undisturbed"))}

    # at random moments; on a fast machine one run ends before it was killed 20 times, then another follows
    moments, kills, runs = random.Random(7), 0, ["random 0"]
    while True:
        pid = session(runs[-1], pause=0.012)
        if kills < 20:
            time.sleep(moments.uniform(0.02, 0.35))
            os.kill(pid, signal.SIGKILL)
        status = ended(pid)
        if os.WIFSIGNALED(status):
            kills += 1
        elif kills < 20 and status == 0:
            runs.append(f"random {len(runs)}")
        else:
            break
    report["random"] = [kills, status, runs]

    # at the k-th step of writing in each session, k = 1, 2, 3, ...: around every flush, rename and removal
    def dies_at(k):
        count = 0

        def step():
            nonlocal count
            count += 1
            if count == k:
                os.kill(os.getpid(), signal.SIGKILL)

        def around(function):
            def watched(*arguments, **named):
                step()
                result = function(*arguments, **named)
                step()
                return result
            return watched

        def before():
            os.fsync, os.replace, os.unlink = around(os.fsync), around(os.replace), around(os.unlink)

        return before

    k = kills = 0
    while True:
        k += 1
        status = ended(session("writing", dies_at(k)))
        if not os.WIFSIGNALED(status):
            break
        kills += 1
    report["writing"] = [kills, status]

    # no file may grow beyond 20 kB from round 4 on: the server's state does not fit
    def fill(record):
        if record.round == 4:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))

    report["full"] = os.WEXITSTATUS(ended(session("full", on_round=fill)))
    report["full, again"] = ended(session("full"))
    print(json.dumps(report))
"""


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """(what the driver reports, name -> lasting things of that run, the drivers' folder)"""
    out = tmp_path_factory.mktemp("killed")
    script = out / "driver.py"
    script.write_text(textwrap.dedent(DRIVER))
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, script, out], env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    sys.stderr.write(done.stderr)  # what ended a session, beside a test that fails of it
    report = json.loads(done.stdout.splitlines()[-1])

    def found(name):
        (settings,) = (out / name).rglob("settings.json")
        return lasting(settings.parent)

    return report, found, out


def test_guarantee_1_killed_at_20_random_moments_a_run_ends_as_if_undisturbed(killed):
    report, found, _ = killed
    assert report["undisturbed"] == 0
    kills, status, runs = report["random"]
    assert (kills, status) == (20, 0)  # 20 sessions died by the signal, the last one ended well
    for run in runs:
        assert found(run) == found("undisturbed")


def test_guarantee_1_killed_around_every_flush_rename_and_removal_a_run_ends_as_if_undisturbed(killed):
    report, found, _ = killed
    kills, status = report["writing"]
    assert kills > 25
    assert status == 0
    assert found("writing") == found("undisturbed")


KILLED_WITH_WORKERS = """
    import multiprocessing, os, signal, sys
    from pathlib import Path

    import fixture_methods as fixtures
    from flnoisebench.testing import tiny_run

    out = Path(sys.argv[1])

    def die(record):
        (out / "workers").write_text(" ".join(str(child.pid) for child in multiprocessing.active_children()))
        os.kill(os.getpid(), signal.SIGKILL)

    if __name__ == "__main__":
        tiny_run(fixtures.Averaging, out, executor="processes", lanes=2).execute(die)
"""


def test_guarantee_1_a_run_that_is_killed_takes_its_workers_along(tmp_path):
    script = tmp_path / "killed.py"
    script.write_text(textwrap.dedent(KILLED_WITH_WORKERS))
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run([sys.executable, script, tmp_path], env=env, timeout=300)
    assert done.returncode == -signal.SIGKILL
    workers = [int(pid) for pid in (tmp_path / "workers").read_text().split()]
    assert len(workers) == 2

    def lives(worker):
        try:
            return "(zombie)" not in Path(f"/proc/{worker}/status").read_text()
        except OSError:
            return False

    until = time.monotonic() + 20
    while any(map(lives, workers)) and time.monotonic() < until:
        time.sleep(0.1)
    left = [worker for worker in workers if lives(worker)]
    for worker in left:
        os.kill(worker, signal.SIGKILL)
    assert not left


def test_guarantee_1_a_worker_that_is_killed_stops_the_run_with_advice_and_it_resumes(tmp_path, finish):
    def kill(record):
        for child in multiprocessing.active_children():
            child.kill()

    run = tiny_run(fixtures.Averaging, tmp_path, executor="processes", lanes=1)
    with pytest.raises(ChildProcessError, match=r"a worker process .* was killed.*The same command resumes"):
        run.execute(kill)
    assert not (run.folder / "result.json").exists()
    tiny_run(fixtures.Averaging, tmp_path).execute()
    assert lasting(run.folder) == lasting(finish(fixtures.Averaging)[2].folder)


def test_guarantee_1_a_full_disk_stops_the_run_with_advice_and_it_resumes_when_there_is_room(killed):
    report, found, out = killed
    assert report["full"] == 3
    error = (out / "full.error").read_text()
    assert error.startswith(str(errno.EFBIG))
    assert "the disk is full" in error
    assert "run the same command to resume" in error
    assert report["full, again"] == 0
    assert found("full") == found("undisturbed")


def test_guarantee_1_a_commit_holds_what_had_happened_when_it_was_made(tmp_path, monkeypatch):
    """Writing happens in the background: what the next exchange counts meanwhile must not slip in."""
    heads, real = [], checkpoint.replace

    def slowly(path, data):
        if path.name == "head.json":
            heads.append(json.loads(data)["counters"])
        else:
            time.sleep(0.03)
        real(path, data)

    monkeypatch.setattr(checkpoint, "replace", slowly)
    tiny_run(fixtures.Sweep, tmp_path, rounds=2).execute()
    assert [(head["round"], head["exchange"]) for head in heads] == [
        (0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1), (1, 2), (1, 3), (2, 0),
    ]  # fmt: skip
    for head in heads:
        assert head["open"]["exchanges"] == head["exchange"]
        assert head["open"]["bytes_up"] == head["exchange"] * (MLP + 8)
        assert len(head["accuracies"]) == head["round"]


def test_guarantee_1_whatever_a_hook_is_handed_was_put_on_the_runs_device_in_a_fresh_run_as_in_a_resumed_one(
    tmp_path, loaded, monkeypatch
):
    """Without a second device: what was moved is known by being another tensor than the one that was returned."""
    moved, handed = [], []

    def away(tree, device):
        assert torch.device(device) == torch.device("cpu")
        return trees.map_tensors(lambda tensor: (moved.append(tensor.clone()), moved[-1])[1], tree)

    monkeypatch.setattr(trees, "to", away)
    monkeypatch.setattr(trees, "on", away)
    for name, trees_of in {
        "plan": lambda state, server: state,
        "client": lambda task, message, client: [message, client.state],
        "aggregate": lambda state, uploads, server: [state, [upload.content for upload in uploads]],
        "predictors": lambda state, server: state,
        "diagnostics": lambda state: state,
    }.items():
        real = getattr(loaded.Whole, name)

        def watched(self, *arguments, name=name, real=real, trees_of=trees_of):
            leaves = trees.leaves(trees_of(*arguments))
            handed.extend((name, path, leaf) for path, leaf in leaves if isinstance(leaf, torch.Tensor))
            return real(self, *arguments)

        monkeypatch.setattr(loaded.Whole, name, watched)
    interrupted(fixtures.Whole, tmp_path)
    fresh = len(handed)
    tiny_run(fixtures.Whole, tmp_path).execute()
    known = {id(tensor) for tensor in moved}
    assert {(name, path) for name, path, tensor in handed if id(tensor) not in known} == set()
    assert 0 < fresh < len(handed)
    assert {path for name, path, _ in handed if name == "client"} > {"1/times", "0/w/1.bias"}  # join's, plan's


def test_guarantee_1_a_stop_between_two_exchanges_of_a_round_costs_one_exchange(finish, tmp_path, monkeypatch):
    save = Checkpoint.save

    def stop_after_first_exchange(self, commit):
        save(self, commit)
        if commit.counters["round"] == 1 and commit.counters["exchange"] == 1:
            self.wait()
            raise Stop

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "save", stop_after_first_exchange)
        with pytest.raises(Stop):
            tiny_run(fixtures.TwoExchanges, tmp_path).execute()
    run = tiny_run(fixtures.TwoExchanges, tmp_path)
    done, real = [], Serial.run
    monkeypatch.setattr(Serial, "run", lambda self, jobs, sizes: done.append(jobs[0]) or real(self, jobs, sizes))
    run.execute()
    assert [(job.round, job.exchange, job.task) for job in done] == [(1, 1, "train"), (2, 0, "score"), (2, 1, "train")]
    assert lasting(run.folder) == lasting(finish(fixtures.TwoExchanges)[2].folder)


# ------------------------------------------------------------------------- 2: named streams, apart from others


def test_guarantee_2_a_stream_is_found_by_name_whatever_was_drawn_before():
    side = Lane(tiny_engine(fixtures.Averaging())).client(1, None, 4, 2)
    a, b = (torch.rand(3, generator=side.rng(name)) for name in ("a", "b"))
    other = Lane(tiny_engine(fixtures.Averaging())).client(1, None, 4, 2)
    b2, a2 = (torch.rand(3, generator=other.rng(name)) for name in ("b", "a"))
    assert torch.equal(a, a2)
    assert torch.equal(b, b2)
    assert not torch.equal(a, b)


def test_guarantee_2_seed_role_client_round_exchange_and_name_all_matter():
    def first(seed, role, client, round, exchange, name):
        lane = Lane(tiny_engine(fixtures.Averaging(), seed=seed))
        side = lane.client(client, None, round, exchange, role)
        return torch.rand(1, generator=side.rng(name)).item()

    base = (0, "client", 0, 0, 0, "x")
    others = [(1, *base[1:]), (0, "join", *base[2:]), (0, "client", 1, 0, 0, "x"), (0, "client", 0, 1, 0, "x")]
    others += [(0, "client", 0, 0, 1, "x"), (0, "client", 0, 0, 0, "y")]
    assert len({first(*names) for names in [base, *others]}) == 7


def test_guarantee_2_what_else_a_method_draws_shifts_nobodys_numbers(finish):
    plain = finish(fixtures.Drawing)[0]
    greedy = finish(fixtures.Drawing, settings={"extra": 2})[0]
    assert greedy.digest == plain.digest


def test_guarantee_2_building_a_module_leaves_torchs_generator_alone_and_does_not_depend_on_it():
    def build():
        return torch.nn.Sequential(build_encoder("mlp", (1, 8, 8), 3), torch.nn.Linear(128, 3))

    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = trees.digest(weights(initialised(build, 5)))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert trees.digest(weights(initialised(build, 5))) == first
    assert trees.digest(weights(initialised(build, 6))) != first


def test_guarantee_2_a_run_neither_reads_nor_moves_the_global_generators(finish):
    digests, numbers = set(), set()
    for seed in (1, 2):
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        digests.add(finish(fixtures.Whole)[0].digest)
        numbers.add((seed, random.random(), np.random.rand(), torch.rand(1).item()))
    assert len(digests) == 1
    for seed, *drawn in numbers:  # as if there had been no run in between
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        assert drawn == [random.random(), np.random.rand(), torch.rand(1).item()]


def test_guarantee_2_one_name_twice_in_a_call_raises_since_it_would_repeat_numbers():
    lane = Lane(tiny_engine(fixtures.Averaging(), arrays=tiny_arrays(public=8)))
    client, server = lane.client(0, None, 0, 0), lane.server(0, 0, "plan")
    network = client.model()
    client.fit(network, fixtures.cross_entropy)
    client.rng("x"), client.seed("x")  # another kind of thing, so another stream
    client.apply(lambda batch: batch.x, view="train")
    server.cohort()
    for again in (
        lambda: client.rng("x"),
        lambda: client.seed("x"),
        lambda: client.model(),
        lambda: client.fit(network, fixtures.cross_entropy),
        lambda: client.apply(lambda batch: batch.x, view="train"),
        lambda: server.cohort(),
    ):
        with pytest.raises(ValueError, match=r"was taken before in this call.*another name"):
            again()
    client.rng("y"), client.fit(network, fixtures.cross_entropy, stream="second"), server.cohort(name="second")
    client.apply(lambda batch: batch.x)  # draws nothing, so may be asked for as often as one likes


def test_guarantee_2_draw_and_seed_are_apart(finish):
    _, _, base = finish(FedAvg, seed=0, draw=0)
    _, _, seeded = finish(FedAvg, seed=1, draw=0)
    _, _, drawn = finish(FedAvg, seed=0, draw=1)
    init = {run: trees.digest(run.method.init(Lane(run.engine).server(0, 0, "init"))) for run in (base, seeded, drawn)}
    assert base.scene.digests == seeded.scene.digests
    assert base.scene.digests["labels"] != drawn.scene.digests["labels"]
    assert base.scene.digests["partition"] != drawn.scene.digests["partition"]
    assert init[base] == init[drawn] != init[seeded]


# ----------------------------------------------------------------------- 3: anywhere, in any order, truly at once


def test_guarantee_3_two_clients_are_inside_their_losses_at_once_and_the_digest_is_the_serial_one(
    finish, loaded, monkeypatch
):
    apart = finish(fixtures.Averaging, clients=4, rounds=2)[0]
    loaded.MEETING.reset()
    together = finish(fixtures.Meeting, clients=4, rounds=2, executor="threads", lanes=4)[0]
    assert together.status == "complete"  # 4 clients meet two by two; one alone would wait in vain and fail
    assert together.digest == apart.digest


def test_guarantee_3_the_meeting_fails_where_clients_take_turns(tmp_path, loaded, monkeypatch):
    """The control of the test above."""
    monkeypatch.setattr(loaded, "MEETING", threading.Barrier(2, timeout=0.2))
    monkeypatch.setattr(loaded.MEETING, "wait", lambda timeout, real=loaded.MEETING.wait: real(0.2))
    with pytest.raises(ClientError, match="BrokenBarrierError"):
        tiny_run(fixtures.Meeting, tmp_path, clients=4, rounds=1).execute()


def test_guarantee_3_replies_come_sorted_by_client_whatever_the_plans_order(tmp_path, loaded, monkeypatch):
    seen = []

    def aggregate(self, state, uploads, server):
        seen.append([upload.client for upload in uploads])
        return state

    monkeypatch.setattr(loaded.Averaging, "aggregate", aggregate)
    monkeypatch.setattr(loaded.Averaging, "plan", lambda self, state, server: loaded.Plan("train", [3, 0, 2], state))
    for executor in ("serial", "threads"):
        tiny_run(fixtures.Averaging, tmp_path / executor, clients=4, rounds=1, executor=executor, lanes=3).execute()
    assert seen == [[0, 2, 3], [0, 2, 3]]


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize(("precision", "rounds_to_tf32"), [("fp32", False), ("tf32", True), ("bf16", False)])
def test_guarantee_3_the_precision_is_the_protocols_with_and_without_repeatable_kernels(
    precision, rounds_to_tf32, deterministic, one_thread, tmp_path
):
    """Whatever torch's defaults are, and whatever another run in this process has left."""
    switches = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [one.allow_tf32 for one in switches]
    try:
        for one in switches:
            one.allow_tf32 = not rounds_to_tf32
        torch.set_num_threads(2)
        wanted = resolve(method="fedavg", clients=5, precision=precision, deterministic=deterministic)
        runtime.prepare(wanted, data_root=tmp_path, out=tmp_path, device="cpu")
        assert [one.allow_tf32 for one in switches] == [rounds_to_tf32] * 2
        # how many threads share a sum decides its last bits, so that repeatable ones have one thread on any machine
        assert torch.get_num_threads() == (1 if deterministic else 2)
    finally:
        for one, value in zip(switches, before, strict=True):
            one.allow_tf32 = value


@pytest.mark.parametrize("executor", ["serial", "processes"])
def test_guarantee_3_what_a_methods_file_switches_when_it_is_imported_changes_no_run(executor, one_thread, tmp_path):
    """Its own neither: a worker imports it later than this process, and has other runs after it."""
    path = tmp_path / "switching.py"
    path.write_text(
        "import torch\n\nfrom flnoisebench_methods.fedavg import FedAvg\n\n"
        "torch.set_default_dtype(torch.float64)\ntorch.set_num_threads(2)\n\n\nclass Mine(FedAvg): ...\n"
    )
    try:
        digests = set()
        for place, method in enumerate(("fedavg", f"{path}:Mine", "fedavg")):
            wanted = resolve(method=method, clients=5, precision="fp32", rounds=1)
            run = runtime.prepare(
                wanted, data_root=tmp_path, out=tmp_path / str(place), device="cpu", executor=executor, lanes=2
            )
            digests.add(run.execute().digest)
        assert len(digests) == 1
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_guarantee_3_the_precision_is_that_of_evaluation_too(precision, tmp_path, monkeypatch):
    seen, scores_of = [], evaluation.scores_of
    monkeypatch.setattr(
        evaluation, "scores_of", lambda *a: seen.append(torch.is_autocast_enabled("cpu")) or scores_of(*a)
    )
    tiny_run(fixtures.Averaging, tmp_path, rounds=1, precision=precision).execute()
    assert seen == [precision == "bf16"]


@pytest.mark.parametrize("kind", [Serial, Debug, lambda engine: Threads(engine, 2)], ids=["serial", "debug", "threads"])
def test_guarantee_3_an_executor_sorts_outcomes_whatever_the_order_of_jobs_and_sizes(kind):
    sizes = {0: 4, 1: 30, 2: 10, 3: 28}
    edges = np.cumsum([0, *sizes.values()])
    engine = tiny_engine(fixtures.Averaging(), positions=[range(a, b) for a, b in itertools.pairwise(edges)])
    start = engine.method.init(Lane(engine).server(0, 0, "init"))
    executor = kind(engine)
    outcomes = executor.run([Job(client, "train", start, None, False, 0, 0) for client in (3, 0, 2)], sizes)
    executor.close()
    assert [(outcome.client, outcome.size) for outcome in outcomes] == [(0, 4), (2, 10), (3, 28)]
    alone = [perform(Lane(engine), Job(client, "train", start, None, False, 0, 0)) for client in (0, 2, 3)]
    assert [trees.digest(o.reply.upload) for o in outcomes] == [trees.digest(o.reply.upload) for o in alone]


def test_guarantee_3_the_average_is_taken_in_float64_by_hand():
    big, tiny = 1.0, 2.0**-24  # in float32 the small ones would vanish one by one: 1 + 2^-24 == 1
    parts = [{"w": torch.tensor([big])}] + [{"w": torch.tensor([tiny])}] * 4
    exact = (big + 4 * tiny) / 5
    assert average(parts, [1] * 5)["w"].dtype == torch.float32
    assert average(parts, [1] * 5)["w"].item() == np.float32(exact)
    by_hand = average([torch.tensor([1.0, 2.0]), torch.tensor([4.0, 8.0])], [1, 3])
    assert torch.equal(by_hand, torch.tensor([3.25, 6.5]))


@pytest.mark.parametrize(
    ("parts", "shares", "message"),
    [
        ([], [], "at least one: 0 and 0"),
        ([torch.ones(1)], [1, 1], "as many shares as parts.*: 1 and 2"),
        ([torch.ones(1)] * 2, [0, 0], "sum to 0"),
        ([torch.ones(1)] * 2, [1, -2], "sum to -1"),
        ([torch.ones(1)] * 2, [1, math.nan], "sum to nan"),
        ([{"w": 1.0}], [1], "not float"),
        ([{}, {"b": torch.ones(1)}], [1, 1], "not all parts have b; average each over those that have it"),
        ([{"b": torch.ones(1)}, {}], [1, 1], "not all parts have b"),
    ],
)
def test_guarantee_3_what_has_no_average_is_refused(parts, shares, message):
    with pytest.raises(ValueError, match=message):
        average(parts, shares)


def test_guarantee_3_integer_buffers_keep_their_dtype_and_take_the_maximum():
    parts = [{"n": torch.tensor(7)}, {"n": torch.tensor(9)}, {"n": torch.tensor(8)}]
    found = average(parts, [5, 1, 1])["n"]
    assert (found.dtype, found.item()) == (torch.int64, 9)
    flags = average([torch.tensor([True, False]), torch.tensor([False, False])], [1, 1])
    assert (flags.dtype, flags.tolist()) == (torch.bool, [True, False])
    assert average([torch.tensor([3], dtype=torch.uint8), torch.tensor([200], dtype=torch.uint8)], [1, 1]).item() == 200


def test_guarantee_3_batchnorm_statistics_are_averaged_with_unequal_sizes_by_hand():
    engine = tiny_engine(fixtures.Norm(), positions=[range(0, 10), range(10, 16), range(16, 72)])
    lane = Lane(engine)
    start = engine.method.init(lane.server(0, 0, "init"))
    jobs = [Job(client, "train", start, None, False, 0, 0) for client in range(3)]
    outcomes = Serial(engine).run(jobs, {0: 10, 1: 6, 2: 56})
    assert [outcome.size for outcome in outcomes] == [10, 6, 56]
    uploads = [types.SimpleNamespace(content=o.reply.upload, size=o.size) for o in outcomes]
    found = engine.method.aggregate(start, uploads, lane.server(0, 0, "aggregate"))
    names = [name for name in found if "running" in name or "num_batches" in name]
    assert len(names) == 3
    for name, value in found.items():
        rows = torch.stack([upload.content[name] for upload in uploads])
        if name.endswith("num_batches_tracked"):
            assert value.item() == rows.max().item() == 7  # 56 samples in batches of 8
            assert value.dtype == torch.int64
        else:
            by_hand = sum(n / 72 * row.double() for n, row in zip((10, 6, 56), rows, strict=True))
            torch.testing.assert_close(value.double(), by_hand, rtol=1e-6, atol=1e-8)
    assert not torch.equal(found["1.running_mean"], start["1.running_mean"])


# ------------------------------------------------------------------------------------------------ 4: sight


def test_guarantee_4_other_true_labels_under_the_same_given_ones_change_no_bit_of_the_run(finish):
    def permuted(scene, truth):
        order = np.random.default_rng(3).permutation(len(truth.true))
        return scene, dataclasses.replace(truth, true=truth.true[order])

    honest, blind = finish(fixtures.Whole), finish(fixtures.Whole, change=permuted)
    assert blind[0].digest == honest[0].digest
    assert [r.accuracy for r in blind[1]] == [r.accuracy for r in honest[1]]
    assert blind[0].label_noise_before != honest[0].label_noise_before  # the evaluator did see another truth


def test_guarantee_4_other_clients_data_do_not_change_an_upload():
    arrays = tiny_arrays()
    others = np.arange(72) % 3 != 1
    changed = dataclasses.replace(arrays, train_images=arrays.train_images.clone())
    changed.train_images[others] = 255 - changed.train_images[others]
    labels = arrays.train_labels.clone()
    labels[others] = (labels[others] + 1) % 3
    uploads = []
    for data, given in ((arrays, arrays.train_labels), (changed, labels)):
        engine = tiny_engine(fixtures.Whole(), arrays=data, given=given)
        lane = Lane(engine)
        start = engine.method.init(lane.server(0, 0, "init"))
        lane.client(0, None, 0, 0).fit(lane.client(0, None, 0, 1).model(), fixtures.cross_entropy)  # somebody before
        turn = perform(lane, Job(1, "train", {"w": start["w"]}, None, False, 3, 1))
        uploads.append(trees.digest([turn.reply.upload, turn.state]))
        control = perform(lane, Job(0, "train", {"w": start["w"]}, None, False, 3, 1))
        uploads.append(trees.digest(control.reply.upload))
    assert uploads[0] == uploads[2]
    assert uploads[1] != uploads[3]


def test_guarantee_4_the_digest_covers_states_uploads_and_predictions(tmp_path, monkeypatch):
    def chained(before="a", server=0, client=1, upload=2, state=3):
        outcome = types.SimpleNamespace(client=client, reply=types.SimpleNamespace(upload=upload), state=state)
        return runtime._chained(before, {"x": server}, [outcome])

    others = [chained(**{name: 9}) for name in ("server", "client", "upload", "state")]
    assert len({chained(), chained("b"), *others}) == 6
    plain = tiny_run(fixtures.Averaging, tmp_path / "plain").execute()
    monkeypatch.setattr(evaluation, "prediction_digest", lambda scores: "others")
    assert tiny_run(fixtures.Averaging, tmp_path / "others").execute().digest != plain.digest


def leads_to_truth(roots, true, parts=()):
    """Paths to a Truth, or to an array or tensor that holds true labels (all, or one client's part)."""
    own = [true, *parts]

    def holds(thing):
        if isinstance(thing, Truth):
            return True
        if isinstance(thing, torch.Tensor):
            thing = thing.detach().numpy()
        if not isinstance(thing, np.ndarray) or thing.dtype.kind not in "iuf":
            return False
        return np.shares_memory(thing, true) or any(np.array_equal(thing.reshape(-1), part) for part in own)

    return reachable(roots, holds)


def reachable(roots, holds, limit=200_000):
    """Paths (as type names) from what a method is handed to what ``holds`` says of.

    Modules and types are not followed, and of a function only what it captured.
    """
    seen, found, queue = set(), [], [(root, type(root).__name__) for root in roots]
    while queue:
        thing, path = queue.pop()
        if id(thing) in seen or isinstance(thing, type | types.ModuleType | str | bytes | int | float):
            continue
        seen.add(id(thing))
        assert len(seen) < limit, "the walk left the method's world"
        if holds(thing):
            found.append(path)
        if isinstance(thing, types.FunctionType | types.BuiltinFunctionType):
            nexts = [cell.cell_contents for cell in getattr(thing, "__closure__", None) or ()]
        else:
            nexts = gc.get_referents(thing)
        queue += [(item, f"{path} > {type(item).__name__}") for item in nexts]
    return found


def test_guarantee_4_nothing_that_a_method_is_handed_leads_to_a_true_label(tmp_path, monkeypatch):
    handed = []
    for name in ("client", "server"):
        real = getattr(Lane, name)
        monkeypatch.setattr(
            Lane, name, lambda *a, real=real, **k: (handed.append(side := real(*a, **k)), handed.append(a), side)[-1]
        )
    run = tiny_run(fixtures.Whole, tmp_path)
    truth = run.judge._truth
    run.execute()
    assert {type(thing).__name__ for thing in handed} >= {"ClientSide", "ServerSide"}
    true = truth.true
    parts = [true[run.scene.positions(client)] for client in range(3)]
    assert not np.array_equal(true, run.scene.given)
    assert leads_to_truth([*handed, run.engine, run.method], true, parts) == []
    # the control: whatever way a truth is planted, the walk finds it
    side = next(thing for thing in handed if type(thing).__name__ == "ClientSide")
    plants = [truth, true, true[:5], torch.as_tensor(true.copy()), lambda: true, {"deep": [{"er": parts[1].copy()}]}]
    for plant in plants:
        side.planted = plant
        assert leads_to_truth([side], true, parts), plant
    del side.planted
    assert leads_to_truth([run], true)


def test_guarantee_4_nothing_that_a_method_is_handed_leads_to_the_data_of_other_clients():
    engine = tiny_engine(fixtures.Norm(), arrays=tiny_arrays(public=8))
    lane, roots = Lane(engine), []
    for id in (1, 0):  # client 0 comes after another one
        client = lane.client(id, None, 0, 0)
        network = client.model()
        fit = client.fit(network, fixtures.cross_entropy)
        passed = client.apply(
            lambda batch: batch.y, frozen={"net": client.model(weights(network), "twin", frozen=True)}
        )
        roots = [client, network, fit, passed]
    server = lane.server(0, 0, "plan")
    server.fit(server.model(), fixtures.cross_entropy, data=server.public, labels=torch.zeros(8, dtype=torch.int64))
    stores = {whole.untyped_storage().data_ptr() for whole in (engine.pixels, engine.given, *engine.positions)}

    def of_all(thing):
        return isinstance(thing, torch.Tensor) and thing.untyped_storage().data_ptr() in stores

    assert reachable([*roots, server], of_all) == []
    assert reachable([lane], of_all)  # the control
    for attribute in ("pixels", "rows"):
        assert not hasattr(client.data, attribute)
        assert not hasattr(server.public, attribute)


def test_guarantee_4_what_another_client_left_of_its_images_cannot_be_trained_on():
    lane = Lane(tiny_engine(fixtures.Averaging()))
    other, client = lane.client(1, None, 0, 0), lane.client(0, None, 0, 0)
    with pytest.raises(ValueError, match=r"data must be client\.data .* of this call"):
        client.fit(client.model(), fixtures.cross_entropy, data=other.data)


# ------------------------------------------------------------------------------------------------- 5: accounts


def test_guarantee_5_fedavgs_bytes_and_images_are_those_worked_out_by_hand(finish):
    result, rounds, _ = finish(FedAvg, clients=4, participation=0.5, rounds=2)
    for record in rounds:
        assert record.bytes_down == record.bytes_up == 2 * MLP  # 2 of 4 clients, the weights each way
        assert record.images == {"trained": 2 * 18, "passed": 30, "skipped": 0}  # 72 / 4 samples; 30 test images
    assert (result.bytes_up, result.bytes_down) == (4 * MLP, 4 * MLP)
    assert result.images == {"trained": 72, "passed": 60, "skipped": 0}  # what there is none of is said too


def test_guarantee_5_private_additions_and_every_exchange_count(finish):
    _, rounds, _ = finish(fixtures.TwoExchanges)
    for record in rounds:
        down = 3 * 4 * 4 + 3 * MLP + 2 * (8 + 5 * 4)  # int32[4] to all; weights to all; a flag and float32[5] to two
        up = 3 * 8 + 3 * MLP  # one number each; weights
        assert (record.bytes_down, record.bytes_up) == (down, up)


def test_guarantee_5_what_only_the_record_gets_costs_nothing(finish):
    _, rounds, _ = finish(fixtures.Claiming)  # with metrics, claims about every sample, a state and notes
    assert {(record.bytes_down, record.bytes_up) for record in rounds} == {(3 * MLP, 3 * MLP)}


def test_guarantee_5_buffers_travel_too(finish):
    _, rounds, _ = finish(fixtures.Norm, rounds=1)
    assert rounds[0].bytes_up == 3 * (MLP + 4 * 128 * 4 + 8)  # weight, bias, mean, variance; an int64 counter


def test_guarantee_5_skipped_samples_are_counted_by_hand(finish):
    _, rounds, _ = finish(FedAvg, clients=3, rounds=1, batch=7, last_batch="drop")
    assert rounds[0].images == {"trained": 3 * 21, "passed": 30, "skipped": 3 * 3}  # 24 = 7 + 7 + 7 + 3
    _, twice, _ = finish(fixtures.Averaging, batch=7, last_batch="drop", local_epochs=2)
    assert twice[0].images == {"trained": 2 * 3 * 21, "passed": 30, "skipped": 2 * 3 * 3}  # in each epoch


def test_guarantee_5_a_pair_of_networks_counts_each_image_twice(finish):
    _, rounds, _ = finish(fixtures.Pair, rounds=1)
    assert rounds[0].images == {"trained": 2 * 72, "passed": 2 * 30, "skipped": 0}


def test_guarantee_5_seconds_have_their_parts_and_these_do_not_exceed_the_whole(finish):
    result, rounds, _ = finish(fixtures.Sweep)
    named = []
    for record in rounds:
        seconds = record.seconds
        assert set(seconds) >= {"round", "plan", "clients", "fit", "apply", "aggregate", "digest", "evaluate", "commit"}
        assert all(value >= 0 for value in seconds.values())
        assert seconds["fit"] + seconds["apply"] <= seconds["clients"]
        parts = ("plan", "clients", "aggregate", "digest", "evaluate")
        named.append(sum(seconds[part] for part in parts) / seconds["round"])
        assert named[-1] <= 1
    assert max(named) > 0.5  # in one round at least: a loaded machine may pause anywhere
    assert result.seconds["fit"] == pytest.approx(sum(record.seconds["fit"] for record in rounds), abs=1e-4)
    assert result.peak_memory > 0


def test_guarantee_5_the_memory_of_a_device_is_that_of_all_its_worker_processes():
    pool = executors.Processes(None, ["cuda:0", "cuda:1", "cuda:0"], torch.device("cpu"))
    pool._peaks = [1, 2, 4]
    assert pool.peaks == {"cuda:0": 5, "cuda:1": 2}


def test_guarantee_5_the_peak_is_the_runs_though_a_process_that_resumes_needs_less(tmp_path, monkeypatch):
    monkeypatch.setattr("flnoisebench.runtime.peak_memory", lambda device: 9)
    interrupted(fixtures.Averaging, tmp_path)
    monkeypatch.setattr("flnoisebench.runtime.peak_memory", lambda device: 5)
    run = tiny_run(fixtures.Averaging, tmp_path)
    assert run.execute().peak_memory == 9
    assert [record.peak_memory for record in records.load_records(run.folder)] == [9, 5, 5]


def test_guarantee_5_memory_is_that_of_worker_processes_too(tmp_path):
    run = tiny_run(fixtures.Averaging, tmp_path, executor="processes", lanes=2)
    result = run.execute()
    workers = run._peaks["cpu"]
    assert workers > 2 * 50e6  # of two, each with torch
    assert result.peak_memory >= workers + 50e6


# ------------------------------------------------------------------------------ 6: safe files, honest failures

CLIENT_FAULTS = {
    "exception": "KeyError: 'no such thing'",
    "nan loss": "FloatingPointError: the loss nan_loss became nan",
    "nan upload": "the upload is not finite at 0.body.1.bias",
    "inf upload": "the upload is not finite at 0.body.1.bias",
    "no tree": "upload/set: set is no tree",
    "gradient": "still carries a gradient",
    "message written": "written in place",
    "no reply": "client\\(\\) must return a Reply, not dict",
    "aliased upload": "the upload shares the memory of the lane's network at 0.body.1.bias",
    "aliased state": "the state shares the memory of the lane's network",
    "nan claim": "claims.clean",
    "large claim": r"claims.clean must be a tensor \[24\] of floats in \[0, 1\]",
    "negative claim": r"claims.clean must be a tensor \[24\] of floats in \[0, 1\]",
    "gradient claim": "claims.clean still carries a gradient; detach it",
    "bool claim": "claims.clean",
    "short claim": r"claims.labels must be a tensor \[24\]",
    "noisy claim": "claims.noisy",
    "no metric": "metric 'share' must be a number, not None",
    "network metric": "metric 'share' must be a number, not a Sequential; leave out",
    "many metrics": r"metric 'share' must be a number, not a tensor of shape \[3\]",
}
SERVER_FAULTS = {
    "plan": "plan: RuntimeError: the plan went wrong",
    "cohort": "the cohort must be distinct clients",
    "cohort outside": r"the cohort must be distinct clients of 0..2, at least one: \[0, 3\]",
    "strange cohort": "the cohort must be a sequence of client ids: .*'somebody'",
    "private for no client": "private additions are a dict by client, not list",
    "strange private": "private additions are merged into the message, so both must be dicts, without a key in common",
    "private outside": r"private additions for clients outside the cohort: \[1\]",
    "private twice": "private additions are merged into the message, so both must be dicts, without a key in common",
    "no plan": "plan must return a Plan or None, not str",
    "state written": "wrote into the server's state in place",
    "state written late": "predictors or diagnostics wrote into the server's state in place",
    "upload written": "aggregate wrote into an upload in place",
    "aggregate": "aggregate: RuntimeError: the sum went wrong",
    "no state": "aggregate returned None where the server had a state",
    "nan state": "aggregate's state is not finite",
    "aliased sum": "aggregate's state shares the memory of the server's network",
    "note": "aggregate: ValueError: note: .*Tensor",
    "nan scores": "predictors: FloatingPointError: predictor 'main' returned NaN",
    "trains": r"predictor 'main' is a network that trains.*frozen=True",
    "no main": r"predictors: ValueError: no predictor is named 'main', .*\['global'\]",
}


# found by the runtime in what was returned, so that no line of the method's is in the traceback
RETURNED = {
    "client": {
        "nan upload", "inf upload", "no tree", "gradient", "no reply", "aliased upload", "aliased state", "nan claim",
        "large claim", "negative claim", "gradient claim", "bool claim", "short claim", "noisy claim", "no metric",
        "many metrics", "network metric",
    },
    "plan": {
        "cohort", "cohort outside", "strange cohort", "private for no client", "strange private", "private outside",
        "private twice", "no plan", "never closed", "ended within",
    },
    "aggregate": {"upload written", "no state", "nan state", "aliased sum"},
    "predictors": {"nan scores", "trains", "no main"},
}  # fmt: skip


def failing(how, tmp_path, error, message, **options):
    """Run into the fault; check what is left behind; mend it and go on to the end."""
    mended = tmp_path / "mended"
    settings = {"how": how, "mended": str(mended)}
    run = tiny_run(fixtures.Faulty, tmp_path, settings=settings, **options)
    with pytest.raises(error, match=message) as caught:
        run.execute()
    result = records.load_result(run.folder)
    assert result.status == "failed"
    if "written" in how and result.rounds == 0:  # the write came before the commit was on the disk, so it was not made
        return result, None
    assert result.rounds == 1
    assert str(caught.value) == result.failure
    assert "Faulty, round 1, exchange 0" in result.failure
    for hook in [hook for hook, hows in RETURNED.items() if how in hows]:
        line = inspect.getsourcelines(getattr(fixtures.Faulty, hook))[1]
        assert f"see Faulty.{hook} ({fixtures.__file__}:{line})" in result.failure
        assert str(Path(flnoisebench.__file__).parent) + os.sep not in result.failure
    assert len(records.load_records(run.folder)) == 1
    # no partial average: what is kept is the commit after round 0
    good = interrupted(fixtures.Faulty, tmp_path / "good", settings={"how": "none", "mended": ""}, after=0)
    heads = [json.loads((folder / "checkpoint" / "head.json").read_text()) for folder in (run.folder, good)]
    assert heads[0]["server"] == heads[1]["server"]
    assert heads[0]["clients"] == heads[1]["clients"]
    with pytest.raises(AlreadyDone, match="already failed"):
        tiny_run(fixtures.Faulty, tmp_path, settings=settings, **options).execute()
    mended.touch()
    again = tiny_run(fixtures.Faulty, tmp_path, settings=settings, **options).execute(retry=True)
    assert again.status == "complete"
    assert again.failure is None
    return result, again


@pytest.mark.parametrize("how", CLIENT_FAULTS)
def test_guarantee_6_a_clients_fault_stops_the_run_and_is_named_and_a_retry_goes_on(how, tmp_path, finish):
    result, again = failing(how, tmp_path, ClientError, CLIENT_FAULTS[how])
    assert "client 1, task 'train'" in result.failure
    assert again is None or again.digest == finish(fixtures.Averaging)[0].digest


@pytest.mark.parametrize("how", SERVER_FAULTS)
def test_guarantee_6_a_fault_on_the_servers_side_stops_the_run_and_is_named_and_a_retry_goes_on(how, tmp_path, finish):
    _, again = failing(how, tmp_path, MethodError, SERVER_FAULTS[how])
    assert again is None or again.digest == finish(fixtures.Averaging)[0].digest


def test_guarantee_6_a_retry_that_is_stopped_leaves_an_unfinished_run_and_no_failed_one(tmp_path):
    settings = {"how": "exception", "mended": str(tmp_path / "mended")}
    with pytest.raises(ClientError):
        tiny_run(fixtures.Faulty, tmp_path, settings=settings).execute()
    (tmp_path / "mended").touch()
    run = tiny_run(fixtures.Faulty, tmp_path, settings=settings)

    def stop(record):
        raise Stop

    with pytest.raises(Stop):
        run.execute(stop, retry=True)
    assert not (run.folder / "result.json").exists()
    assert tiny_run(fixtures.Faulty, tmp_path, settings=settings).execute().status == "complete"  # without a word


@pytest.mark.parametrize("executor", ["threads", "debug"])
def test_guarantee_6_other_executors_name_the_fault_alike(executor, tmp_path):
    result, _ = failing("nan upload", tmp_path, ClientError, CLIENT_FAULTS["nan upload"], executor=executor, lanes=2)
    assert "client 1, task 'train'" in result.failure


def test_guarantee_6_of_several_clients_that_fail_the_lowest_is_named_wherever_they_run():
    """A failure has one message, whoever was the first to fail."""
    several = [Future() for _ in range(3)]
    several[0].set_result(None)
    for i in (2, 1):
        several[i].set_exception(ClientError(f"client {i}"))
    with pytest.raises(ClientError, match="client 1"):
        executors._settle(several)

    def submit(work, packed, sizes):
        ended = Future()
        first = min(job.client for job in packed[1])
        ended.set_result(([], executors._shared(trees.to_bytes([])), {first: f"client {first}"}, 0))
        return ended

    pool = executors.Processes(None, ["cpu"] * 3, torch.device("cpu"))
    pool._workers = [types.SimpleNamespace(submit=submit)] * 3
    jobs = [executors.Job(client, "train", {}, None, False, 0, 0) for client in (4, 5, 6)]
    with pytest.raises(ClientError, match="client 4"):
        pool.run(jobs, {4: 1, 5: 2, 6: 3})  # the largest is the first worker's


@pytest.mark.parametrize(
    ("method", "what"),
    [(wicked.DrawsTorch, "two turns"), (wicked.WritesMessage, "the message or the state was changed in place")],
)
def test_guarantee_6_what_debug_alone_finds_is_named_like_any_other_fault(method, what, tmp_path):
    run = tiny_run(method, tmp_path, executor="debug")
    where = f"^{method.__name__}, round 0, exchange 0, client 0, task 'train': {what}"
    with pytest.raises(ClientError, match=where):
        run.execute()


def test_guarantee_6_a_metric_or_diagnostic_without_a_value_is_left_out_and_the_record_still_loads(finish):
    _, rounds, _ = finish(fixtures.Undefined)
    for record in rounds:
        assert record.diagnostics == {"one": 1.0}
        assert record.metrics == {"id": 1.5}  # of clients 1 and 2; client 0 reports NaN, nobody the other


def test_guarantee_6_a_tree_that_changes_while_it_is_being_saved_is_not_committed(tmp_path, monkeypatch):
    """However slow the disk, a method that writes into the server's state leaves the last good commit."""
    real = trees.to_bytes

    def slowly(tree):
        time.sleep(0.05)
        return real(tree)

    monkeypatch.setattr(trees, "to_bytes", slowly)
    settings = {"how": "state written", "mended": str(tmp_path / "mended")}
    run = tiny_run(fixtures.Faulty, tmp_path, settings=settings)
    with pytest.raises(MethodError, match="wrote into the server's state in place"):
        run.execute()
    result = records.load_result(run.folder)
    assert (result.status, result.rounds, records.load_records(run.folder)) == ("failed", 0, [])
    held = Checkpoint(run.folder)
    start = run.method.init(Lane(run.engine).server(0, 0, "init"))
    assert trees.digest(held.load().server) == trees.digest(start)
    held.close()


def test_guarantee_6_nothing_is_unpickled_when_a_run_is_resumed_or_read(tmp_path, monkeypatch):
    folder = interrupted(fixtures.Whole, tmp_path)

    def never(*arguments, **named):
        raise AssertionError("something was unpickled")

    for module, name in ((pickle, "loads"), (pickle, "load"), (pickle, "Unpickler"), (torch, "load"), (np, "load")):
        monkeypatch.setattr(module, name, never)
    tiny_run(fixtures.Whole, tmp_path).execute()
    records.load_result(folder), records.load_records(folder), records.load_settings(folder)


def test_guarantee_6_no_source_of_the_package_or_of_a_method_can_unpickle():
    package = Path(flnoisebench.__file__).parent
    forbidden = {"pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "_pickle"}
    files = [*package.rglob("*.py"), *(package.parent / "methods").glob("*.py")]
    assert len(files) > 20
    for path in files:
        tree = ast.parse(path.read_text())
        # torch's reader of plain tensors, which runs nothing: the pretrained weights, as torchvision publishes them
        plain = [
            node.func
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and path == package / "models.py"
            if any(ast.unparse(keyword) == "weights_only=True" for keyword in node.keywords)
        ]
        for node in ast.walk(tree):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name.split(".")[0] for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [(node.module or "").split(".")[0]]
            assert not forbidden & set(names), path
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node not in plain:
                assert (node.value.id, node.attr) not in {("torch", "load"), ("np", "load"), ("numpy", "load")}, path
            if isinstance(node, ast.Name):
                assert node.id not in {"eval", "exec"}, path
            if isinstance(node, ast.keyword):
                assert ast.unparse(node) not in {"allow_pickle=True", "weights_only=False"}, path


# -------------------------------------------------------------------------------------------- 7: a run's folder


def test_guarantee_7_a_runs_folder_holds_what_it_says_and_nothing_else(finish):
    result, _, run = finish(fixtures.Whole)
    assert {path.name for path in run.folder.iterdir()} == {
        "settings.json", "records.jsonl", "result.json", "checkpoint", "lock",
    }  # fmt: skip
    found = {path.name for path in (run.folder / "checkpoint").iterdir()}
    assert found == {"head.json", "objects", "method.sha256", "data.json", "run.json"}
    head = json.loads((run.folder / "checkpoint" / "head.json").read_text())
    named = {name for name, _ in [head["server"], *head["clients"].values(), *head["claims"].values()]}
    assert {path.name for path in (run.folder / "checkpoint" / "objects").iterdir()} == named
    *above, key, leaf = run.folder.parts
    assert (above[-3], above[-1], key, leaf) == ("tiny", "fixture_methods-Whole", run.settings.key, "draw0-seed0")
    assert result.digest == records.load_records(run.folder)[-1].digest


def test_guarantee_7_the_network_that_a_run_leaves_scores_what_its_record_says(tmp_path):
    run = tiny_run(FedAvg, tmp_path, arrays=tiny_arrays(test=200), model="small-cnn", batch=32)
    run.execute()
    written = Checkpoint(run.folder)
    network = run.method.network(build_encoder("small-cnn", (1, 8, 8), 3))
    network.load_state_dict(written.load().server)
    written.close()
    arrays = tiny_arrays(test=200)
    with torch.no_grad():
        scores = network.eval()((arrays.test_images / 255 - 0.5) / 0.25)  # the facts of the tiny data set
    found = 100 * (scores.argmax(1) == arrays.test_labels).double().mean().item()
    assert found == pytest.approx(records.load_result(run.folder).accuracy.final)
    assert 40 < found < 100  # more than chance, and not what any network has


def test_guarantee_7_a_result_is_written_last(tmp_path):
    folder = interrupted(fixtures.Averaging, tmp_path)
    assert not (folder / "result.json").exists()
    assert (folder / "settings.json").exists()


def test_guarantee_7_the_same_command_again_says_that_it_is_done_and_touches_nothing(finish):
    result, _, run = finish(fixtures.Averaging)
    before = snapshot(run.folder)
    again = tiny_run(fixtures.Averaging, run.folder.parents[4])
    assert again.folder == run.folder
    with pytest.raises(AlreadyDone, match="already complete") as done:
        again.execute()
    assert done.value.result == result
    with pytest.raises(AlreadyDone):
        again.execute(retry=True)
    assert snapshot(run.folder) == before


def test_guarantee_7_settings_that_change_results_get_a_folder_of_their_own(tmp_path):
    base = tiny_run(fixtures.Drawing, tmp_path).folder
    others = [
        tiny_run(fixtures.Drawing, tmp_path, settings={"extra": 1}).folder,
        tiny_run(fixtures.Drawing, tmp_path, rounds=4).folder,
        tiny_run(fixtures.Drawing, tmp_path, batch=4).folder,
        tiny_run(fixtures.Drawing, tmp_path, seed=1).folder,
        tiny_run(fixtures.Drawing, tmp_path, draw=1).folder,
        tiny_run(fixtures.Drawing, tmp_path, noise=0.2).folder,
        tiny_run(fixtures.Drawing, tmp_path, clients=4).folder,
        tiny_run(fixtures.Averaging, tmp_path).folder,
    ]
    assert len({base, *others}) == 9
    assert tiny_run(fixtures.Drawing, tmp_path, executor="threads", lanes=2).folder == base


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("never closed", r"round 1, exchange 5: the round is still open after 5 exchanges.*'train'"),
        ("ended within", r"round 1, exchange 1: plan ended the run in the middle of a round"),
    ],
    ids=["never closed", "ended within"],
)
def test_guarantee_6_a_round_that_no_plan_closes_comes_to_an_end(how, message, tmp_path, monkeypatch):
    monkeypatch.setattr("flnoisebench.runtime.MOST_EXCHANGES", 5)
    monkeypatch.setattr("flnoisebench.runtime.MOST_EXCHANGES_A_CLIENT", 1)
    run = tiny_run(fixtures.Faulty, tmp_path, settings={"how": how, "mended": str(tmp_path / "mended")})
    with pytest.raises(MethodError, match=message):
        run.execute()
    assert records.load_result(run.folder).rounds == 1


def test_guarantee_6_a_round_that_goes_from_client_to_client_is_as_long_as_there_are_clients(tmp_path, monkeypatch):
    monkeypatch.setattr("flnoisebench.runtime.MOST_EXCHANGES", 3)
    run = tiny_run(fixtures.Sweep, tmp_path, rounds=1)
    run.execute()
    assert records.load_records(run.folder)[0].exchanges == 4


def test_guarantee_7_a_result_says_under_which_commits_and_on_what_its_run_was_carried_out(tmp_path, monkeypatch):
    """Those of the code that ran, and not of the code that is there when it ends."""
    monkeypatch.setenv("FLNOISEBENCH_COMMIT", "a" * 40)
    interrupted(fixtures.Averaging, tmp_path)
    monkeypatch.setenv("FLNOISEBENCH_COMMIT", "b" * 40)
    run = tiny_run(fixtures.Averaging, tmp_path, executor="threads", lanes=2)
    result = run.execute(lambda record: monkeypatch.setenv("FLNOISEBENCH_COMMIT", "c" * 40))
    (earlier,) = result.environment["earlier"]
    assert (earlier["commit"], earlier["lanes"]) == ("a" * 40, 1)
    assert (result.environment["commit"], result.environment["lanes"]) == ("b" * 40, 2)


def test_guarantee_7_a_run_that_went_on_where_it_began_has_no_earlier_environment(tmp_path):
    interrupted(fixtures.Averaging, tmp_path)
    assert "earlier" not in tiny_run(fixtures.Averaging, tmp_path).execute().environment


def test_guarantee_7_a_run_that_another_process_has_just_ended_keeps_its_result(tmp_path, monkeypatch):
    """It ends between the look at the folder and the lock."""
    real, before = Checkpoint.__init__, {}

    def late(checkpoint, folder):
        if not before:
            before["..."] = b""
            tiny_run(fixtures.Averaging, tmp_path).execute()
            before.update(snapshot(folder))
        real(checkpoint, folder)

    monkeypatch.setattr(Checkpoint, "__init__", late)
    run = tiny_run(fixtures.Averaging, tmp_path, executor="threads", lanes=2)
    with pytest.raises(AlreadyDone):
        run.execute()
    assert {"...": b"", **snapshot(run.folder)} == before


def test_guarantee_7_the_result_of_another_run_is_not_taken_for_this_one(tmp_path):
    done = tiny_run(fixtures.Averaging, tmp_path)
    done.execute()
    other = tiny_run(fixtures.Averaging, tmp_path, seed=1)
    shutil.copytree(done.folder, other.folder)
    with pytest.raises(ValueError, match=r"result.json is of another run.*--out"):
        other.execute()


def test_guarantee_7_how_settings_were_said_last_is_what_both_files_say(tmp_path):
    folder = interrupted(fixtures.Averaging, tmp_path)
    run = tiny_run(fixtures.Averaging, tmp_path)
    run.settings = run.settings.model_copy(update={"choices": "validation"})
    assert run.execute().settings == records.load_settings(folder) == run.settings


def test_guarantee_7_an_installed_package_within_another_checkout_has_not_that_ones_commit(tmp_path):
    def git(*words):
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        return subprocess.run(["git", "-C", tmp_path, *who, *words], check=True, capture_output=True, text=True).stdout

    git("init")
    (tmp_path / "own.py").write_text("")
    git("add", "own.py")
    git("commit", "-m", "one")
    installed = tmp_path / "venv" / "flnoisebench"
    installed.mkdir(parents=True)
    (installed / "runtime.py").write_text("")
    assert commit_of(installed) is None
    assert commit_of(tmp_path) == git("rev-parse", "HEAD").strip()


def test_guarantee_7_a_finished_runs_numbers_are_not_those_of_other_data_or_of_other_code(tmp_path, monkeypatch):
    run = tiny_run(fixtures.Averaging, tmp_path)
    run.execute()
    before = snapshot(run.folder)
    with pytest.raises(ValueError, match=r"had other data \(data: another SHA-256\).*--out"):
        tiny_run(fixtures.Averaging, tmp_path, arrays=tiny_arrays(seed=1)).execute()
    changed = tiny_run(fixtures.Averaging, tmp_path)
    monkeypatch.setattr(changed, "_source", "0" * 64)
    with pytest.raises(ValueError, match=r"the code of .*Averaging has changed since the run in .* ended.*--out"):
        changed.execute()
    assert snapshot(run.folder) == before


def test_guarantee_7_other_true_labels_are_other_data():
    arrays = tiny_arrays()
    true = arrays.train_labels.clone()
    known = [data_digest(dataclasses.replace(arrays, true_labels=labels)) for labels in (None, true, true.roll(1))]
    assert len(set(known)) == 3


def test_guarantee_7_a_run_is_not_resumed_on_other_data(tmp_path):
    began, other = tiny_arrays(public=6), tiny_arrays(public=6)
    other.public[0, 0, 0, 0] += 1
    folder = interrupted(fixtures.Averaging, tmp_path, arrays=began)
    before = snapshot(folder)
    with pytest.raises(ValueError, match=r"began with other data \(public: another SHA-256\).*--out"):
        tiny_run(fixtures.Averaging, tmp_path, arrays=other).execute()
    with pytest.raises(ValueError, match=r"other data \(data, public: "):
        tiny_run(fixtures.Averaging, tmp_path, arrays=tiny_arrays(seed=1)).execute()
    assert snapshot(folder) == before
    result = tiny_run(fixtures.Averaging, tmp_path, arrays=began).execute()
    assert result.status == "complete"
    assert set(result.digests) == {"data", "partition", "labels", "public"}


def test_guarantee_7_a_method_whose_code_changed_is_not_resumed(tmp_path):
    plugin = tmp_path / "plugin.py"
    shutil.copy(fixtures.__file__, plugin)
    method = registry.load_method(f"{plugin}:Averaging")
    folder = interrupted(method, tmp_path)
    before = snapshot(folder)
    plugin.write_text(plugin.read_text() + "\n# another version\n")
    with pytest.raises(ValueError, match=r"the code of .*plugin.py:Averaging has changed.*--out"):
        tiny_run(method, tmp_path).execute()
    assert snapshot(folder) == before
    shutil.copy(fixtures.__file__, plugin)
    assert tiny_run(method, tmp_path).execute().status == "complete"


@pytest.mark.parametrize(
    "fault",
    [
        "def init(self, server): 1 / 0",
        "def aggregate(self, state, uploads, server): 1 / 0",
        "def aggregate(self, state, *rest): return 1 / 0 if state['chosen'] else super().aggregate(state, *rest)",
    ],
    ids=["init", "the first exchange", "the second exchange"],
)
def test_guarantee_7_before_the_first_round_is_over_a_mended_method_starts_anew_there(fault, tmp_path):
    """Nothing could be mixed; afterwards changed code needs a folder of its own, as the test above says."""
    plugin = tmp_path / "plugin.py"

    def mine(body, out):
        plugin.write_text(f"{Path(fixtures.__file__).read_text()}\n\nclass Mine(TwoExchanges):\n    {body}\n")
        return tiny_run(f"{plugin}:Mine", out)

    failed = mine(fault, tmp_path)
    with pytest.raises(MethodError, match="ZeroDivisionError"):
        failed.execute()
    mended = mine("pass", tmp_path)
    assert mended.folder == failed.folder
    result = mended.execute()
    assert result.environment["method_sha256"] == mended._source != failed._source
    assert (mended.folder / "checkpoint" / "method.sha256").read_text() == mended._source
    mine("pass", tmp_path / "elsewhere").execute()
    assert lasting(mended.folder) == lasting(tmp_path / "elsewhere" / mended.folder.relative_to(tmp_path))


def test_guarantee_7_a_folder_in_use_by_another_process_is_left_alone(tmp_path):
    folder = interrupted(fixtures.Averaging, tmp_path)
    before = snapshot(folder)
    code = "import fcntl, sys; f = open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_EX); print('held', flush=True); input()"
    holder = subprocess.Popen(
        [sys.executable, "-c", code, folder / "lock"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(Busy, match="another process is running in"):
            tiny_run(fixtures.Averaging, tmp_path).execute()
        assert snapshot(folder) == before
    finally:
        holder.communicate("\n")
    assert tiny_run(fixtures.Averaging, tmp_path).execute().status == "complete"


def test_guarantee_7_the_lock_is_free_again_after_success_and_failure(finish, tmp_path):
    _, _, run = finish(fixtures.Averaging)
    faulty = tiny_run(fixtures.Faulty, tmp_path, settings={"how": "exception", "mended": "never"})
    with pytest.raises(ClientError):
        faulty.execute()
    for folder in (run.folder, faulty.folder):
        with open(folder / "lock") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _head(folder):
    return folder / "checkpoint" / "head.json"


def _object(folder):
    return folder / "checkpoint" / "objects" / json.loads(_head(folder).read_text())["server"][0]


DAMAGE = {
    "head cut short": ("head.json", lambda f: _head(f).write_bytes(_head(f).read_bytes()[:-40])),
    "head empty": ("head.json", lambda f: _head(f).write_bytes(b"")),
    "head of other bytes": ("head.json", lambda f: _head(f).write_bytes(b"\xff\xfe\x00garbage")),
    "head a list": ("head.json", lambda f: _head(f).write_text("[1, 2]")),
    "head with another number": (
        "head.json",
        lambda f: _head(f).write_text(_head(f).read_text().replace('"exchange": 0', '"exchange": 1')),
    ),
    "head missing": ("head.json", lambda f: _head(f).unlink()),
    "object missing": ("objects", lambda f: _object(f).unlink()),
    "object cut short": ("objects", lambda f: _object(f).write_bytes(_object(f).read_bytes()[:100])),
    "object with a flipped bit": (
        "objects",
        lambda f: _object(f).write_bytes(_object(f).read_bytes()[:-1] + bytes([_object(f).read_bytes()[-1] ^ 1])),
    ),
    "records short": ("records.jsonl", lambda f: os.truncate(f / "records.jsonl", 10)),
    "records missing": ("records.jsonl", lambda f: (f / "records.jsonl").unlink()),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_guarantee_7_damage_is_named_and_nothing_is_changed_by_the_attempt(damage, tmp_path):
    file, spoil = DAMAGE[damage]
    folder = interrupted(fixtures.Whole, tmp_path)
    spoil(folder)
    before = snapshot(folder)
    with pytest.raises(Damaged, match=rf"{file}.*move .* away"):
        tiny_run(fixtures.Whole, tmp_path).execute()
    assert snapshot(folder) == before


@pytest.mark.parametrize("name", ["settings.json", "result.json"])
def test_guarantee_7_a_damaged_settings_or_result_file_is_named(name, finish):
    _, _, run = finish(fixtures.Averaging)
    if name == "settings.json":
        (run.folder / "result.json").unlink()
    path = run.folder / name
    path.write_text(path.read_text()[:50])
    before = snapshot(run.folder)
    with pytest.raises(ValueError, match=rf"{name} is damaged.*; move {re.escape(str(run.folder))} away"):
        tiny_run(fixtures.Averaging, run.folder.parents[4]).execute()
    assert snapshot(run.folder) == before


def test_guarantee_7_what_a_kill_left_half_written_is_swept_away(tmp_path, finish):
    folder = interrupted(fixtures.Averaging, tmp_path)
    (folder / "checkpoint" / "objects" / "0123.tmp").write_bytes(b"half")
    (folder / "checkpoint" / "head.json.tmp").write_bytes(b"half")
    with open(folder / "records.jsonl", "ab") as file:
        file.write(b'{"round": 1, "exch')
    assert len(records.load_records(folder)) == 1
    tiny_run(fixtures.Averaging, tmp_path).execute()
    assert not list(folder.rglob("*.tmp"))
    assert lasting(folder) == lasting(finish(fixtures.Averaging)[2].folder)


def test_guarantee_7_no_space_left_keeps_the_previous_commit(tmp_path, monkeypatch, finish):
    folder = interrupted(fixtures.Averaging, tmp_path)
    head = _head(folder).read_bytes()

    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(
            OSError, match=r"cannot write the checkpoint.*the disk is full.*last commit is untouched"
        ) as e:
            tiny_run(fixtures.Averaging, tmp_path).execute()
    assert e.value.errno == errno.ENOSPC
    assert _head(folder).read_bytes() == head
    assert len(records.load_records(folder)) == 1
    assert not (folder / "result.json").exists()
    tiny_run(fixtures.Averaging, tmp_path).execute()
    assert lasting(folder) == lasting(finish(fixtures.Averaging)[2].folder)


def test_guarantee_7_a_folder_that_cannot_be_written_is_named(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    with pytest.raises(OSError, match=r"cannot write in .*file.*choose another --out"):
        tiny_run(fixtures.Averaging, blocked).execute()
    with pytest.raises(OSError, match=r"cannot write in .*: File name too long; choose another --out"):
        tiny_run(fixtures.Averaging, tmp_path / ("d" * 300)).execute()


def test_guarantee_7_the_command_line_resumes_says_done_and_names_failures(tmp_path, monkeypatch):
    from typer.testing import CliRunner

    from flnoisebench.cli.main import app

    command = "run --method fedavg --dataset digits --clients 3 --rounds 2 --noise clean --partition iid --device cpu"
    arguments = [*command.split(), "--json", "--out", str(tmp_path)]
    first = CliRunner().invoke(app, arguments)
    assert first.exit_code == 0, first.output
    before = snapshot(tmp_path)
    second = CliRunner().invoke(app, arguments)
    assert second.exit_code == 0
    assert "already complete" in second.stderr
    one, two = (json.loads(done.stdout.splitlines()[-1]) for done in (first, second))
    assert one["digest"] == two["digest"]
    assert snapshot(tmp_path) == before
