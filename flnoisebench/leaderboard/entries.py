"""What a leaderboard keeps of a run: the part of its result that rows need, and its curves.

An entry is a small JSON file, ``results/<dataset>/<scenario>/<method>/<settings>/draw<d>-seed<k>.json`` below the
leaderboard's folder: enough for every row to be computed again, and for the run to be run again, without the run's own
folder.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import model_validator

from flnoisebench import records
from flnoisebench.api import Config, Field
from flnoisebench.checkpoint import read_head
from flnoisebench.provenance import COMMIT
from flnoisebench.records import Accuracy, CardFacts, Environment, LastRounds, Point, RoundRecord, RunResult
from flnoisebench.settings import Settings, merged

RESULTS = "results"  # the folder of entries below a leaderboard's
DIGESTS = ("data", "partition", "labels")
PACKAGES = ("torch", "numpy", "flnoisebench")
_FOLDERS = re.compile(r"\([^()]*[/\\](?=[^()/\\]+\.py(:\d+)?\))")  # of "(folders/file.py:25)", one machine's own
PROVENANCE = ("commit", "method_sha256", "device", "executor", "lanes", "system")


class Curves(Config):
    """A value a round, in order.  The costs are of the round, not summed."""

    accuracy: list[float | None] = Field(..., unit="%", why="on evaluate_on; null before there is a predictor")
    label_noise: list[float | None] = Field(
        ..., unit="%", why="wrong labels among those trained on; null without truth"
    )
    images: list[int] = Field(..., unit="images", why="passed an encoder with gradient")
    seconds: list[float] = Field(..., unit="s", why="wall time, with evaluation and digests")

    @model_validator(mode="after")
    def _equally_long(self) -> Curves:
        lengths = {name: len(getattr(self, name)) for name in Curves.model_fields}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"a curve has a value a round, and these have {lengths}")
        return self

    @classmethod
    def of(cls, rounds: Iterable[RoundRecord]) -> Curves:
        rounds = list(rounds)
        return cls(
            accuracy=[record.accuracy for record in rounds],
            label_noise=[record.label_noise for record in rounds],
            images=[record.images.get("trained", 0) for record in rounds],
            seconds=[record.seconds.get("round", 0.0) for record in rounds],
        )


def sessions(environment: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The environments that a run was carried out in: several where it was stopped and went on elsewhere, or under
    another commit."""
    now = {name: value for name, value in environment.items() if name != "earlier"}
    return [*environment.get("earlier", ()), now]


def hardware(environment: Mapping[str, Any]) -> dict[str, str]:
    """What has to be equal for seconds to be comparable, by name, as text."""
    names = ("device", "devices", "processor", "executor", "lanes", "sharing")
    return {name: _all(sessions(environment), name) for name in names}


def _all(environments: Iterable[Mapping[str, Any]], name: str) -> str:
    return "; ".join(dict.fromkeys(str(said.get(name) or "") for said in environments))


class Entry(Config):
    """One run in a leaderboard."""

    schema_version: Literal[1] = Field(1, why="of this file")
    status: Literal["complete", "failed"] = Field(..., why="a failed run is counted and gives no number")
    failure: str | None = Field(..., why="its first line: what, in which method, round, client and task")
    settings: Settings = Field(..., why="all that it takes to run it again")
    card: CardFacts = Field(..., why="the method's title, paper and conditions")
    told: dict[str, float] = Field(..., why="the values that it was told about the noise")
    digests: dict[str, str] = Field(
        ..., why="SHA-256 of data, partition, given labels; of public images where the method has them"
    )
    last5: LastRounds = Field(..., why="means over the last five rounds")
    label_noise_before: float | None = Field(..., unit="%", why="of the given labels; null without truth")
    label_noise_after: float | None = Field(..., unit="%", why="of the labels at the end")
    rounds: int = Field(..., ge=0, why="completed")
    bytes_up: int = Field(..., ge=0, unit="bytes", why="in all")
    bytes_down: int = Field(..., ge=0, unit="bytes", why="in all")
    images: dict[str, int] = Field(..., why="trained, passed, skipped, in all")
    seconds: dict[str, float] = Field(..., unit="s", why="by part, in all")
    peak_memory: int = Field(..., ge=0, unit="bytes", why="the highest of all rounds")
    digest: str = Field(..., why="of the whole run; equal for equal settings on equal hardware")
    environment: Environment = Field(..., why="versions, commit, machine, device, lanes")
    curves: Curves = Field(..., why="from which the accuracies are computed")

    @model_validator(mode="after")
    def _provenance_is_complete(self) -> Entry:
        missing = [f"digests.{name}" for name in DIGESTS if not self.digests.get(name)]
        missing += [] if self.digest else ["digest"]
        for said in sessions(self.environment):
            missing += [f"environment.{name}" for name in PROVENANCE if not said.get(name)]
            packages = said.get("packages") or {}
            missing += [f"environment.packages.{name}" for name in PACKAGES if not packages.get(name)]
        if missing:
            advice = ""
            if "environment.commit" in missing:
                advice = "; where flnoisebench does not know its commit, say it in FLNOISEBENCH_COMMIT when running"
            raise ValueError(f"no row without provenance, and this lacks {', '.join(missing)}{advice}")
        for said in sessions(self.environment):
            if not COMMIT.fullmatch(said["commit"]):
                what = "7 or more hex digits, with +changes where the tree differed"
                raise ValueError(f"environment.commit is {said['commit']!r}, and a commit of git is {what}")
        if len(self.curves.accuracy) != self.rounds:
            raise ValueError(f"{self.rounds} rounds, and curves of {len(self.curves.accuracy)}")
        return self

    @property
    def accuracy(self) -> Accuracy:
        return Accuracy.of(self.curves.accuracy)

    @property
    def points(self) -> list[Point]:
        """What is known of each round."""
        both = zip(self.curves.accuracy, self.curves.label_noise, strict=True)
        return [Point(i, accuracy, noise) for i, (accuracy, noise) in enumerate(both)]

    @property
    def hardware(self) -> tuple[str, ...]:
        """What has to be equal for seconds to be comparable, as text."""
        return tuple(hardware(self.environment).values())

    @property
    def arithmetic(self) -> dict[str, str]:
        """What has to be equal for bits to be equal, apart from the code: machine and libraries, by name, as text."""
        said = sessions(self.environment)
        libraries = [one["packages"] for one in said]
        machine = {name: _all(said, name) for name in ("device", "processor", "system", "cuda", "cudnn")}
        return machine | {name: _all(libraries, name) for name in PACKAGES[:2]}

    @property
    def code(self) -> tuple[str, str]:
        """Commit, several of a run that went on under another, and SHA-256 of the method (``source_digest``)."""
        return _all(sessions(self.environment), "commit"), self.environment["method_sha256"]

    def path(self, leaderboards: Path) -> Path:
        """Where it lies in a leaderboard's folder."""
        folder = self.settings.folder(leaderboards / RESULTS)
        return folder.with_name(folder.name + ".json")

    @classmethod
    def of(cls, folder: Path) -> Entry:
        """Of a run's folder.  Raises FileNotFoundError while it is unfinished; ValueError when a file is damaged, when
        result, records and checkpoint contradict each other, or when it does not say where it comes from.

        That finds damage and an edit of some files, and not one who makes all of them up: ``rerun`` is for that."""
        result = records.load_result(folder)
        if not (folder / "settings.json").exists():
            raise ValueError(f"{folder}: settings.json is missing; leave this run out, or move it away")
        rounds = records.rounds_of(folder, result)
        if strange := _not_the_checkpoints(result, folder):
            raise ValueError(f"{folder}: what result.json says of {', '.join(strange)} is not what the checkpoint says")
        content = {
            name: getattr(result, name)
            for name in cls.model_fields
            if name not in ("schema_version", "curves", "last5")
        }
        content["failure"] = result.failure and _FOLDERS.sub("(", result.failure.splitlines()[0])
        content["settings"] = result.settings.published
        try:
            # the records know these means too, so that runs of before the result kept them have rows
            entry = cls(**content, last5=LastRounds.of(rounds), curves=Curves.of(rounds))
        except ValueError as error:
            raise ValueError(f"{folder}: {'; '.join(_messages(error))}") from error
        if strange := contradictions(entry):
            raise ValueError(f"{folder}: {'; '.join(strange)}")
        return entry


def _not_the_checkpoints(result: RunResult, folder: Path) -> list[str]:
    """The names of what the checkpoint, where it was kept, has otherwise.  Raises ValueError where the records are not
    those that it counts."""
    try:
        head, _ = read_head(folder)
    except FileNotFoundError:
        return []
    counters = head["counters"]
    began = {
        path.name: path.read_text(encoding="utf-8") for path in (folder / "checkpoint").iterdir() if path.is_file()
    }
    source, run = result.environment["method_sha256"], began.get("run.json")
    same = {
        "settings": run is None or Settings.model_validate_json(run).same_run(result.settings),
        "digest": counters["digest"] == result.digest,
        "digests": json.loads(began.get("data.json", json.dumps(result.digests))) == result.digests,
        "method_sha256": began.get("method.sha256", source) == source,
        # a process that only wrote the result made no commit
        "environment": all(one in sessions(result.environment) for one in counters.get("environments", ())),
    }
    return [name for name, holds in same.items() if not holds]


def contradictions(entry: Entry) -> list[str]:
    """What an entry says twice and not alike, in words: the marks of a file that was edited by hand.

    That finds who changes a number or a setting, and not who changes all that follows from it: ``rerun`` is for that.
    """
    curves, settings, after = entry.curves, entry.settings, entry.curves.label_noise[-1:]
    mean, main = entry.accuracy.last5_mean, entry.last5.predictors.get("main")
    rounds, most = entry.rounds, settings.protocol.rounds
    budget = settings.protocol.model_dump(mode="json")
    holds = {
        "curves.accuracy has values outside 0 to 100": all(0 <= value <= 100 for value in curves.accuracy if value),
        f"the last five of curves.accuracy have the mean {mean}, and last5.predictors.main is {main}": main is None
        or (mean is not None and abs(mean - main) < 1e-6),
        f"status is {entry.status!r}, and failure {entry.failure!r}": (entry.status == "failed") == bool(entry.failure),
        f"{rounds} rounds completed, of {most}": rounds <= most,
        "settings.changed is not what settings.method_settings has": _has(settings.method_settings, settings.changed),
        "settings.protocol_overrides is not what settings.protocol has": _has(budget, settings.protocol_overrides),
        "settings.choices is 'preset', and settings.changed names values": settings.choices != "preset"
        or not settings.changed,
    }
    if entry.status == "complete":  # of a failed one they may have more than its rounds
        trained, seconds = entry.images.get("trained", 0), entry.seconds.get("round", 0.0)
        holds |= {
            f"curves.images are {sum(curves.images)} in all, and images.trained is {trained}": sum(curves.images)
            == trained,
            f"curves.seconds are {sum(curves.seconds):g} in all, and seconds.round is {seconds:g}": abs(
                sum(curves.seconds) - seconds
            )
            < 1e-3,  # each is rounded
            f"curves.label_noise ends with {after[0] if after else None}, and label_noise_after is "
            f"{entry.label_noise_after}": not after or after[0] == entry.label_noise_after,
        }
    return [what for what, true in holds.items() if not true]


def _has(table: Mapping[str, Any], values: Mapping[str, Any]) -> bool:
    return merged(table, values) == table


def _messages(error: ValueError) -> list[str]:
    found = getattr(error, "errors", None)
    return [str(one["msg"]).removeprefix("Value error, ") for one in found()] if found else [str(error)]


def dump(entry: Entry) -> str:
    """The file's text: a line an item, so that a change of one is a change of one line."""
    items = entry.model_dump(mode="json").items()
    lines = [f"{json.dumps(name)}: {json.dumps(value, allow_nan=False)}" for name, value in items]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def save(entry: Entry, leaderboards: Path) -> Path:
    path = entry.path(leaderboards)
    path.parent.mkdir(parents=True, exist_ok=True)
    records.replace(path, dump(entry).encode())
    return path


def load(path: Path) -> Entry:
    """Raises ValueError that names the file and what is wrong in it."""
    return records.parse(Entry, path.read_bytes(), str(path))


def load_all(leaderboards: Path, dataset: str | None = None) -> list[Entry]:
    """All entries of a leaderboard's folder, or those of one data set, sorted by path."""
    return [load(path) for path in files_below(leaderboards / RESULTS / (dataset or ""), "*.json")]


def files_below(top: Path, *patterns: str) -> list[Path]:
    """The files of these names in or below a folder, those of linked folders too (``records.walk``), sorted."""
    found = ((folder, name) for folder, _, names in records.walk(top) for name in names)
    return sorted(Path(folder, name) for folder, name in found if any(fnmatch(name, pattern) for pattern in patterns))


class Seen(NamedTuple):
    """A run as far as it has come, or what a leaderboard keeps of it.  result: None while it is unfinished."""

    settings: Settings
    rounds: Sequence[RoundRecord | Point]
    result: RunResult | Entry | None

    @classmethod
    def of(cls, entry: Entry) -> Seen:
        return cls(entry.settings, entry.points, entry)


def seen(folder: Path) -> Seen:
    """The run of a folder.  Raises ValueError, or FileNotFoundError, where it is damaged."""
    return Seen(records.load_settings(folder), records.load_records(folder), records.result_of(folder))


def seen_below(place: Path) -> dict[Path, Seen]:
    """Those of ``kept_below`` by file, or else of ``runs_below`` by folder.  Raises ValueError where there is none."""
    kept = {path: Seen.of(entry) for path, entry in kept_below(place).items()}
    return kept or {folder: seen(folder) for folder in runs_below([place])}


def kept_below(place: Path) -> dict[Path, Entry]:
    """{file: entry} of a leaderboard's folder or one in it, sorted, or of one entry's file; empty of runs' own folders,
    which hold no such file.  Raises ValueError where an entry is damaged or contradicts itself."""
    pattern = "draw*-seed*.json"
    paths = [place] if place.match(pattern) and place.is_file() else files_below(place, pattern)
    found = {path: load(path) for path in paths}
    for path, entry in found.items():
        if strange := contradictions(entry):
            raise ValueError(f"{path}: {strange[0]} (`leaderboard verify` says all)")
    return found


def runs_below(folders: Iterable[Path]) -> list[Path]:
    """The folders of all runs in or below these, each once, sorted.  Raises ValueError where there is none."""
    found: dict[Path, None] = {}
    for folder in folders:
        names = ("settings.json", "result.json")  # a result alone is a damaged run, and none to be passed over
        here = sorted({path.parent for path in files_below(folder, *names)})
        if not here:
            raise ValueError(f"{folder} holds no run (no settings.json in it or below it)")
        found.update(dict.fromkeys(here))
    return list(found)
