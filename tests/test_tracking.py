"""Trackers show what records.jsonl holds: whole after an interruption, on this disk alone, at no risk to the run."""

import os
import sys

import pytest
from command_line import call, done, only_run, refused, rows

from flnoisebench import records, registry, runtime, tracking

RUN = ("run", "--method", "fedcova", "--rounds", 4, "--clients", 5)


pytestmark = pytest.mark.usefixtures("one_thread")


class Memory:
    """A tracker that remembers; which calls fail is said by the class."""

    made: list = []  # noqa: RUF012 (emptied by the fixture)
    failing: set = set()  # noqa: RUF012

    def __init__(self, folder, out, settings):
        self.rounds, self.ended = {}, None
        self.say("open")
        Memory.made.append(self)

    def say(self, what):
        if what in Memory.failing:
            raise RuntimeError(f"{what} went wrong")

    def log(self, round, values):
        assert round not in self.rounds
        self.rounds[round] = values
        self.say(f"log {round}")

    def close(self, summary, status):
        self.ended = (status, summary)
        self.say("close")


@pytest.fixture
def memory(monkeypatch):
    monkeypatch.setitem(tracking.TRACKERS, "memory", (Memory, "json"))
    monkeypatch.setattr(Memory, "made", [])
    monkeypatch.setattr(Memory, "failing", set())
    return Memory


def test_every_number_of_a_round_is_logged_and_nothing_else(memory, tmp_path):
    done(*RUN, "--out", tmp_path, "--log-to", "memory")
    (tracker,) = memory.made
    rounds = records.load_records(only_run(tmp_path))
    assert sorted(tracker.rounds) == [0, 1, 2, 3]
    for record in rounds:
        logged = tracker.rounds[record.round]
        assert logged["accuracy"] == record.accuracy
        assert logged["diagnostics/phi"] == record.diagnostics["phi"]
        assert logged["recall/3"] == record.recall[3]
        assert logged["seconds/round"] == record.seconds["round"]
        assert logged["images/trained"] == record.images["trained"]
        assert not {"round", "notes", "digest"} & set(logged)
        assert all(type(value) is float for value in logged.values())
    result = records.load_result(only_run(tmp_path))
    assert tracker.ended[0] == "complete"
    assert tracker.ended[1] == {
        "accuracy_last5_mean": result.accuracy.last5_mean,
        "accuracy_final": result.accuracy.final,
        "label_noise_before": result.label_noise_before,
        "label_noise_after": result.label_noise_after,
        "seconds": result.seconds["round"],
        "bytes_up": result.bytes_up,
        "bytes_down": result.bytes_down,
    }


def test_a_run_has_one_identity_wherever_its_folder_links_to(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "digits").symlink_to(tmp_path / "disk")
    run = tracking.identity(tmp_path / "runs" / "digits" / "run", tmp_path / "runs")
    assert run == tracking.identity(tmp_path / "others" / "digits" / "run", tmp_path / "others")
    assert run != tracking.identity(tmp_path / "runs" / "digits" / "another", tmp_path / "runs")


def test_tracking_changes_no_bit_of_a_run(memory, tmp_path):
    done(*RUN, "--out", tmp_path / "with", "--log-to", "memory")
    done(*RUN, "--out", tmp_path / "without")
    digests = {records.load_result(only_run(tmp_path / name)).digest for name in ("with", "without")}
    assert len(digests) == 1


def test_an_interrupted_run_is_whole_in_the_tracker(memory, tmp_path, monkeypatch):
    whole = runtime.Run._close_round

    def stopped(self, position, meter, started):
        if position.round == 2:
            raise KeyboardInterrupt
        return whole(self, position, meter, started)

    with monkeypatch.context() as patch:
        patch.setattr(runtime.Run, "_close_round", stopped)
        refused(*RUN, "--out", tmp_path, "--log-to", "memory", code=130)
    done(*RUN, "--out", tmp_path, "--log-to", "memory")
    first, second = memory.made
    assert (sorted(first.rounds), first.ended[0]) == ([0, 1], "unfinished")
    assert (sorted(second.rounds), second.ended[0]) == ([0, 1, 2, 3], "complete")


def test_a_run_that_is_over_can_be_handed_over_later(memory, tmp_path):
    done(*RUN, "--out", tmp_path)
    assert rows(done(*RUN, "--out", tmp_path, "--log-to", "memory"))["status"] == "complete"
    (tracker,) = memory.made
    assert sorted(tracker.rounds) == [0, 1, 2, 3]
    assert tracker.ended[0] == "complete"


@pytest.mark.parametrize("failing", ["open", "log 1", "close"])
def test_a_failing_tracker_costs_its_view_and_not_the_run(memory, tmp_path, failing):
    memory.failing.add(failing)
    result = call(*RUN, "--out", tmp_path, "--log-to", "memory")
    assert result.exit_code == 0
    assert (
        result.stderr.count(f"memory is given up for this run, which goes on: RuntimeError: {failing} went wrong") == 1
    )
    assert records.load_result(only_run(tmp_path)).rounds == 4
    given = {"open": [], "log 1": [[0, 1]], "close": [[0, 1, 2, 3]]}[failing]  # and nothing more once it failed
    assert [sorted(tracker.rounds) for tracker in memory.made] == given


def test_an_unknown_or_missing_tracker_is_said_before_anything_is_run(tmp_path, monkeypatch):
    assert "Did you mean tensorboard" in refused(*RUN, "--out", tmp_path, "--log-to", "tensorbord")
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert "pip install 'flnoisebench[wandb]'" in refused(*RUN, "--out", tmp_path, "--log-to", "wandb")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(registry.UnknownName):
        tracking.check(["nothing-like-it"])


def test_tensorboard_holds_each_round_once_after_a_second_start(tmp_path):
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    done(*RUN, "--out", tmp_path, "--log-to", "tensorboard")
    done(*RUN, "--out", tmp_path, "--log-to", "tensorboard")  # over: handed over again
    folder = only_run(tmp_path)
    events = EventAccumulator(str(folder / "tracking" / "tensorboard")).Reload()
    rounds = records.load_records(folder)
    shown = [(event.step, event.value) for event in events.Scalars("accuracy")]
    assert shown == [(one.round, pytest.approx(one.accuracy, rel=1e-6)) for one in rounds]
    assert "diagnostics/phi" in events.Tags()["scalars"]


def test_mlflow_holds_each_round_once_after_a_second_start(tmp_path):
    pytest.importorskip("mlflow", reason="the extra mlflow is not installed")
    pytest.importorskip("sqlalchemy", reason="the extra mlflow is not installed")
    from mlflow import MlflowClient

    for _ in range(2):
        done(*RUN, "--out", tmp_path, "--log-to", "mlflow")
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    (experiment,) = [one for one in client.search_experiments() if one.name == "digits"]
    (run,) = client.search_runs([experiment.experiment_id])
    shown = {one.step: one.value for one in client.get_metric_history(run.info.run_id, "accuracy")}
    assert shown == {one.round: one.accuracy for one in records.load_records(only_run(tmp_path))}
    assert run.info.status == "FINISHED"
    assert run.data.params["scenario.noise.rho"] == "0.6"


def test_wandb_writes_an_offline_run_and_opens_no_connection(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="the extra wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "online")  # even so
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))  # no account of whoever runs this
    os.makedirs(tmp_path / "home")
    done(*RUN, "--out", tmp_path / "runs", "--log-to", "wandb")
    folder = only_run(tmp_path / "runs")
    (file,) = (folder / "tracking" / "wandb").glob("offline-run-*/run-*.wandb")
    content = file.read_bytes()
    for record in records.load_records(folder):
        assert repr(record.accuracy).encode() in content
    assert b"diagnostics/phi" in content
