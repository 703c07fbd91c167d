"""The runs below a folder: which there are, how far each is, and what a round of it costs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from flnoisebench import records
from flnoisebench.settings import SAID, Settings, assignments

FAILURE = "failure.txt"  # what a sweep writes of a run that failed: where, when and the traceback


@dataclass(frozen=True)
class Found:
    """A run's folder.  accuracy: mean of the last five rounds, in percent, once it is over; else of the last round.
    seconds: wall time of its finished rounds.  problem: what is damaged and what to do, or why one could not begin."""

    folder: Path
    status: Literal["complete", "failed", "unfinished", "damaged"]
    settings: dict[str, Any]
    rounds: int = 0
    accuracy: float | None = None
    seconds: float = 0.0
    problem: str = ""


def below(out: Path) -> list[Found]:
    """All runs below a folder, in the order of their paths.

    Reads the few entries that it needs and leaves validation to ``records.load_result``: a tenth of the time, which
    counts where there are ten thousand.  A file that cannot be read makes a run damaged and hides no other.
    """
    folders = []
    for folder, inner, names in records.walk(out):
        if not {"settings.json", FAILURE}.isdisjoint(names):  # the latter of a run that could not begin
            inner.clear()  # no runs are looked for inside of runs
            folders.append(folder)
    return [found(Path(folder)) for folder in sorted(folders)]


def found(folder: Path) -> Found:
    """What a run's folder says; without a settings.json an unfinished run of no rounds."""
    try:
        if (content := _json(folder / "result.json")) is not None:
            _size(content["settings"])  # what a plan takes for granted
            return Found(
                folder,
                content["status"],
                content["settings"],
                content["rounds"],
                content["accuracy"]["last5_mean"],
                content["seconds"].get("round", 0.0),
            )
        settings = dict(_json(folder / "settings.json") or {})
        if not settings and (said := _lines(folder / FAILURE)):
            return Found(folder, "failed", {}, problem=said[-1].decode(errors="replace"))
        if settings:
            _size(settings)
        lines = _lines(folder / "records.jsonl")
        last = json.loads(lines[-1]) if lines else {"accuracy": None}
        seconds = sum(json.loads(line)["seconds"]["round"] for line in lines)
        return Found(folder, "unfinished", settings, len(lines), last["accuracy"], seconds)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return Found(folder, "damaged", {}, problem=_damage(folder, error))


def _damage(folder: Path, error: Exception) -> str:
    """What is wrong in a run's folder, as ``show`` says it, and what to do.  error: of reading the few entries."""
    said = f"{folder} is damaged: {type(error).__name__}: {error}"
    try:
        records.result_of(folder)
        records.load_records(folder)
        records.load_settings(folder)
    except ValueError as problem:
        said = str(problem)
    except FileNotFoundError:
        pass
    return f"{said}; move {folder} away, and the command that began it starts it anew"


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return None


def _lines(path: Path) -> list[bytes]:
    """The whole lines; a last one without its end, as a kill leaves it, does not count."""
    try:
        return path.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return []


# Settings of one method, noise, partition or protocol that another need not have: {where they stand: what names it}.
_OF = {
    "method_settings.": "method=",
    "noise.": "noise_name=",
    "partition.": "partition.law=",
    "protocol.": "protocol.name=",
}


def differences(known: Sequence[Found]) -> list[list[str]]:
    """What tells each run from the others, such as ``["method=fedavg", "noise.rho=0.4", "draw=1"]``: the settings that
    not all of them have alike; those of a method, a noise, a partition or a protocol where not all runs of the same
    one do.  A method's own are named as --set names them."""
    told: list[list[tuple[str, str]]] = []  # (whose setting it is, the setting) of each run
    for run in known:
        plain = {name: value for name, value in run.settings.items() if name not in SAID}
        texts = [text.removeprefix("scenario.") for text in assignments(plain)]
        names = {start: next((t for t in texts if t.startswith(named)), "") for start, named in _OF.items()}
        told.append([(next((names[s] for s in _OF if t.startswith(s) and t != names[s]), ""), t) for t in texts])
    alike = Counter(pair for pairs in told for pair in pairs)
    runs_of = Counter(whose for pairs in told for whose in {whose for whose, _ in pairs})
    return [
        [
            text.removeprefix("method_settings.")
            for whose, text in pairs
            if alike[whose, text] < runs_of[whose] and not text.endswith("=null")
        ]
        for pairs in told
    ]


def seconds_a_round(settings: Settings, known: list[Found]) -> float | None:
    """What a round of such a run took in earlier runs: the mean over those of the same method on the same data set, of
    these over those with as many clients and the same budget a round where there are any; None where there are none."""
    mine = settings.model_dump(mode="json")
    alike = [
        run
        for run in known
        if run.rounds
        and run.seconds
        and run.settings.get("method") == settings.method
        and run.settings["scenario"]["dataset"] == settings.scenario.dataset
    ]
    closest = [run for run in alike if _size(run.settings) == _size(mine)]
    return fmean(run.seconds / run.rounds for run in closest or alike) if alike else None


def _size(settings: dict[str, Any]) -> tuple[Any, ...]:
    protocol = settings["protocol"]
    budget = ("model", "local_epochs", "batch", "participation", "precision")
    scene = settings["scenario"]
    return (scene["dataset"], scene["clients"], *(protocol[name] for name in budget))
