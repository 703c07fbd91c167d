"""Runs in an experiment tracker: TensorBoard, Weights & Biases or MLflow, each an extra, each on this disk alone.

A tracker only shows what records.jsonl holds.  It is opened at a run's first round (or at its end, where there is none
left), is given all rounds that are over already, and then each as it comes: so an interrupted run is whole in it, and a
finished one can be handed over later.  Nothing is sent anywhere, and nothing asks for an account:

    tensorboard   <run>/tracking/tensorboard      tensorboard --logdir runs
    wandb         <run>/tracking/wandb, offline   wandb sync <run>/tracking/wandb/offline-run-* (that does send)
    mlflow        <out>/mlflow.db                 mlflow ui --backend-store-uri sqlite:///runs/mlflow.db

A tracker's failure costs its view and not the run.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import math
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from flnoisebench import records, registry
from flnoisebench.records import RoundRecord, RunResult
from flnoisebench.settings import Settings, flat

LEFT_OUT = ("round", "notes", "digest")  # of a record: not numbers, or not a curve


class Tracker(Protocol):
    """What a tracker has to do for one run.

    Constructed with (the run's folder, the folder of all runs, settings); what an earlier attempt at the same run left
    there is replaced.
    """

    def log(self, round: int, values: Mapping[str, float]) -> None:
        """The numbers of one round (from 0)."""

    def close(self, summary: Mapping[str, float], status: str) -> None:
        """No further round comes.  status: complete, failed or unfinished."""


def numbers(record: RoundRecord) -> dict[str, float]:
    """A round's numbers by name: ``accuracy``, ``diagnostics/phi``, ``seconds/fit``, ``recall/3``."""
    found: dict[str, float] = {}
    for name, value in record.model_dump(mode="json").items():
        if name in LEFT_OUT:
            continue
        if isinstance(value, dict):
            found |= {f"{name}/{key}": float(number) for key, number in value.items()}
        elif isinstance(value, list):
            found |= {f"{name}/{i}": float(number) for i, number in enumerate(value) if number is not None}
        elif value is not None:
            found[name] = float(value)
    return {name: number for name, number in found.items() if math.isfinite(number)}


def title(settings: Settings) -> str:
    """A run as a tracker's list shows it."""
    scene = settings.scenario
    return f"{settings.subject}, {scene.slug}, draw {scene.draw}, seed {settings.seed}"


# ------------------------------------------------------------------------------------------------- trackers


class TensorBoard:
    """One event file a run, below its folder."""

    def __init__(self, folder: Path, out: Path, settings: Settings) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(_fresh(folder / "tracking" / "tensorboard")))
        self._writer.add_text("settings", f"```\n{settings.model_dump_json(indent=1)}\n```")

    def log(self, round: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, round)
        self._writer.flush()

    def close(self, summary: Mapping[str, float], status: str) -> None:
        self._writer.add_text("status", status)
        self._writer.close()


class WeightsAndBiases:
    """An offline run, whose id follows from the run's folder, so that syncing it again finds it again."""

    def __init__(self, folder: Path, out: Path, settings: Settings) -> None:
        import wandb

        self._run = wandb.init(
            mode="offline",  # also where WANDB_MODE says otherwise: a benchmark sends nothing by itself
            dir=_fresh(folder / "tracking" / "wandb").parent,
            project="flnoisebench",
            id=identity(folder, out)[:16],
            name=title(settings),
            group=settings.scenario.slug,
            job_type=settings.method,
            config=settings.model_dump(mode="json"),
            settings=wandb.Settings(silent=True, console="off", disable_git=True, save_code=False),
        )

    def log(self, round: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=round)

    def close(self, summary: Mapping[str, float], status: str) -> None:
        self._run.summary.update({**summary, "status": status})
        self._run.finish(exit_code=int(status == "failed"))


class MLflow:
    """A run in <out>/mlflow.db, one database for all runs; its experiment is the data set."""

    def __init__(self, folder: Path, out: Path, settings: Settings) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        for name in ("mlflow", "alembic"):  # they tell of every table that they create
            logging.getLogger(name).setLevel(logging.WARNING)
        from mlflow import MlflowClient

        out.mkdir(parents=True, exist_ok=True)
        self._client = MlflowClient(tracking_uri=f"sqlite:///{(out / 'mlflow.db').resolve()}")
        name = settings.scenario.dataset
        known = self._client.get_experiment_by_name(name)
        place = (out / "mlflow-artifacts").resolve().as_uri()
        experiment = known.experiment_id if known else self._client.create_experiment(name, artifact_location=place)
        tag = identity(folder, out)
        for old in self._client.search_runs([experiment], f"tags.flnoisebench = '{tag}'"):
            self._client.delete_run(old.info.run_id)
        run = self._client.create_run(experiment, run_name=title(settings), tags={"flnoisebench": tag})
        self._id = run.info.run_id
        for key, value in flat(settings.model_dump(mode="json")):
            self._client.log_param(self._id, key, str(value))

    def log(self, round: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._client.log_batch(self._id, metrics=[Metric(name, value, now, round) for name, value in values.items()])

    def close(self, summary: Mapping[str, float], status: str) -> None:
        for name, value in summary.items():
            self._client.log_metric(self._id, f"summary/{name}", value)
        ended = {"complete": "FINISHED", "failed": "FAILED"}.get(status, "KILLED")
        self._client.set_terminated(self._id, ended)


def identity(folder: Path, out: Path) -> str:
    """32 hex digits of a run's place below the folder of all runs."""
    # not resolved: a folder below may be a link to another disk
    place = folder.relative_to(out) if folder.is_relative_to(out) else folder.resolve()
    return hashlib.sha256(str(place).encode()).hexdigest()[:32]


def _fresh(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


# name -> (what makes a tracker of a run, the module that it needs)
TRACKERS: dict[str, tuple[Callable[[Path, Path, Settings], Tracker], str]] = {
    "tensorboard": (TensorBoard, "tensorboard"),
    "wandb": (WeightsAndBiases, "wandb"),
    "mlflow": (MLflow, "mlflow"),
}


def check(names: Sequence[str]) -> None:
    """Raises UnknownName with near misses, ValueError where a tracker is not installed: before a run, not after it."""
    for name in names:
        if name not in TRACKERS:
            raise registry.unknown("tracker", name, TRACKERS)
        module = TRACKERS[name][1]
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            raise ValueError(f"--log-to {name} needs {module}: pip install 'flnoisebench[{name}]'") from error


class Log:
    """The trackers of one run: a callback for Run.execute.  on_trouble: told once of a tracker that failed."""

    def __init__(
        self,
        names: Sequence[str],
        folder: Path,
        out: Path,
        settings: Settings,
        on_trouble: Callable[[str], None] = lambda text: None,
    ) -> None:
        check(names)
        self._names = list(dict.fromkeys(names))
        self._folder, self._out, self._settings, self._on_trouble = folder, out, settings, on_trouble
        self._open: dict[str, Tracker] | None = None

    def __call__(self, record: RoundRecord) -> None:
        if self._open is None:
            self._begin(record.round)
        self._each(lambda tracker: tracker.log(record.round, numbers(record)))

    def finish(self) -> None:
        """Close them; where no round came, all rounds of a run that is over are handed over first."""
        try:
            result = records.result_of(self._folder)
            if self._open is None:
                if result is None:  # nothing came of it, or another process is at it and has its own
                    return
                self._begin(None)
        except ValueError:  # a damaged run: whoever wants it refuses it with advice, and this must not hide that
            return
        self._each(lambda tracker: tracker.close(summary(result), result.status if result else "unfinished"))
        self._open = {}

    def _begin(self, before: int | None) -> None:
        """Open the trackers and hand over the rounds before this one (all of them: None)."""
        # only now: execute holds the run's lock, so that nobody else is writing there
        self._open = {}
        rounds = records.load_records(self._folder)[:before]
        for name in self._names:
            try:
                self._open[name] = TRACKERS[name][0](self._folder, self._out, self._settings)
            except Exception as error:  # a third party's code, on whose account no run is lost
                self._lost(name, error)
        for record in rounds:
            self._each(lambda tracker, record=record: tracker.log(record.round, numbers(record)))  # type: ignore[misc]

    def _each(self, call: Callable[[Tracker], None]) -> None:
        assert self._open is not None
        for name, tracker in list(self._open.items()):
            try:
                call(tracker)
            except Exception as error:  # as above
                del self._open[name]
                self._lost(name, error)

    def _lost(self, name: str, error: Exception) -> None:
        text = str(error).splitlines()[0] if str(error) else ""
        self._on_trouble(f"{name} is given up for this run, which goes on: {type(error).__name__}: {text}")


def summary(result: RunResult | None) -> dict[str, float]:
    """The numbers that a tracker's table of runs shows."""
    if result is None:
        return {}
    found = {
        "accuracy_last5_mean": result.accuracy.last5_mean,
        "accuracy_final": result.accuracy.final,
        "label_noise_before": result.label_noise_before,
        "label_noise_after": result.label_noise_after,
        "seconds": result.seconds.get("round"),
        "bytes_up": result.bytes_up,
        "bytes_down": result.bytes_down,
    }
    return {name: float(value) for name, value in found.items() if value is not None}
