"""Trials of a grid, and the best of them for each method: how the values of the track ``tuned`` are found.

A trial is one method with one preset and one choice of values; a grid file (``flnoisebench.grid``) names the trials,
each on the same draws, and measured on images that are for choosing.  All methods get as many.
"""

from __future__ import annotations

import csv
import io
import json
import statistics
import tomllib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple

from flnoisebench import grid, records
from flnoisebench.leaderboard.entries import sessions
from flnoisebench.records import RunResult
from flnoisebench.settings import Settings, assignments, read_toml

REPORTED = {"validation": "test", "noisy-validation": "test", "test-a": "test-b"}  # chosen on: measured on afterwards
# Keys of a grid that a trial varies, or that its images are chosen by; all others say what is tried.
VARIED = ("method", "preset", "set", "draw", "seed", "track", "evaluate_on", "holdout", "choices")
BUDGET = ("rounds", "precision")  # keys of their own as well as values of the protocol
# What rows must share to be compared in the track tuned, by what it is called in a grid.
SHARED: dict[str, Callable[[Settings], Any]] = {
    "evaluate-on": lambda settings: settings.evaluate_on,
    "oracle": lambda settings: settings.oracle,
    "protocol": lambda settings: settings.protocol.name,
    "rounds": lambda settings: settings.protocol.rounds,
    "precision": lambda settings: settings.protocol.precision,
    "protocol.model": lambda settings: settings.protocol.model,
    "protocol.participation": lambda settings: settings.protocol.participation,
}
COLUMNS = (
    "method", "preset", "set", "scenario", "draw", "seed", "status", "accuracy", "digest", "commit", "method_sha256",
)  # fmt: skip


class Trial(NamedTuple):
    """One method with one choice of values, and its runs in the order of the grid."""

    settings: Settings  # of its first run
    results: tuple[RunResult, ...]

    @property
    def values(self) -> list[str]:
        """What it sets, as --set takes it; the budget apart, which all trials share."""
        settings = self.settings
        budget = {name: value for name, value in settings.protocol_overrides.items() if name not in BUDGET}
        return assignments({**settings.changed, "protocol": budget})

    @property
    def accuracies(self) -> list[float] | None:
        """A run's mean of its last five rounds, in percent; None where a run failed."""
        found = [result.accuracy.last5_mean for result in self.results if result.status == "complete"]
        known = [value for value in found if value is not None]
        return known if len(known) == len(self.results) else None

    @property
    def mean(self) -> float:
        """Over its runs, in percent; a trial of which a run failed is below all others."""
        return statistics.fmean(self.accuracies) if self.accuracies else -1.0

    @property
    def commits(self) -> set[str]:
        """Of the code that made its runs, all of one that was stopped and went on under another."""
        return {str(said["commit"]) for result in self.results for said in sessions(result.environment)}

    @property
    def where(self) -> list[tuple[str, int, int]]:
        """(scenario, draw, seed) of its runs."""
        return [_where(result.settings) for result in self.results]


def _where(settings: Settings) -> tuple[str, int, int]:
    scene = settings.scenario
    return f"{scene.dataset}/{scene.slug}", scene.draw, settings.seed


def load(path: Path, *, out: Path, device: str, data_root: Path | None = None) -> dict[str, list[Trial]]:
    """The trials of a grid file, whose runs are below ``out``: {method: its trials, in the file's order}.

    device, data_root: as in ``grid.load``.  Raises ValueError where the grid measures on what is reported, tries
    several budgets, gives a method more trials or other draws than another, or has runs that are not over, other runs'
    results, or results that do not follow from the records beside them.
    """
    wanted = grid.load(path, device=device, data_root=data_root)
    try:
        _require_fairness(wanted)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    runs: dict[tuple[str, str], list[tuple[Settings, RunResult]]] = defaultdict(list)
    missing = []
    for settings in wanted:
        folder = settings.folder(out)
        if result := records.result_for(folder, settings):
            runs[settings.method, settings.key].append((settings, result))
        else:
            missing.append(folder)
    if missing:
        raise ValueError(
            f"{len(missing)} of {len(wanted)} runs are not over, such as {missing[0]}. "
            f"Next: flnoisebench sweep {quote(str(path))} --out {quote(str(out))}"
        )
    trials: dict[str, list[Trial]] = defaultdict(list)
    for (method, _), ran in runs.items():
        trials[method].append(Trial(ran[0][0], tuple(result for _, result in ran)))
    return dict(trials)


def _require_fairness(wanted: Sequence[Settings]) -> None:
    """Raises ValueError unless every method has as many trials under one budget, each in the same scenarios, draws and
    seeds, and on images that are for choosing."""
    for name, of in SHARED.items():
        if len({of(settings) for settings in wanted}) > 1:
            raise ValueError(f"trials share one {name}, and here are several")
    if wanted[0].evaluate_on not in REPORTED:
        raise ValueError(
            f"its runs are measured on {wanted[0].evaluate_on!r}, which is for reporting. Choose on a hold-out: "
            'evaluate-on = "noisy-validation" and holdout = 0.2'
        )
    runs: dict[str, dict[str, list[tuple[str, int, int]]]] = defaultdict(lambda: defaultdict(list))
    for settings in wanted:
        runs[settings.method][settings.key].append(_where(settings))
    counts = {method: len(trials) for method, trials in runs.items()}
    if len(set(counts.values())) > 1:
        said = ", ".join(f"{method} {count}" for method, count in counts.items())
        raise ValueError(f"as many trials for every method, and these have: {said}")
    places = {tuple(sorted(where)) for trials in runs.values() for where in trials.values()}
    if len(places) > 1:
        few, many = sorted(places, key=len)[:: len(places) - 1]
        (scenario, draw, seed), *_ = set(many) - set(few)
        raise ValueError(f"all trials run on the same draws, and not all do on {scenario}, draw {draw}, seed {seed}")


def best(trials: Sequence[Trial]) -> Trial:
    """The one with the highest mean; of equal ones the first.  Raises ValueError where each has a run that failed."""
    chosen = max(trials, key=lambda trial: trial.mean)
    if chosen.accuracies is None:
        raise ValueError(f"each trial of {chosen.settings.method} has a run that failed: nothing to choose from")
    return chosen


def final_grid(
    path: Path, chosen: Mapping[str, Trial], draws: Sequence[int], *, device: str, data_root: Path | None = None
) -> str:
    """A grid file's text: the chosen values of each method on ``draws``, track tuned, on the images for reporting.

    path: the trials' grid, whose keys but VARIED it repeats; device, data_root: as in ``load``.  Where nothing but the
    hold-out was drawn, ``draws`` are seeds.  Raises ValueError for a draw that values were chosen on, and where those
    keys alone do not say the trials' scenarios and budget.
    """
    first = next(iter(chosen.values()))
    tried = [result.settings.scenario.whole for result in first.results]
    fixed = all(scene.is_fixed for scene in tried)
    seen = sorted({draw for _, draw, _ in first.where}.intersection(draws))
    if seen and not fixed:
        raise ValueError(f"draws {seen} are those that values were chosen on; report on others (--draw)")
    content = {name.replace("-", "_"): value for name, value in read_toml(path).items()}
    shared = {name: value for name, value in content.items() if name not in (*VARIED, "exclude", "include")}
    for name in shared.keys() & grid.SEVERAL:  # tables, and lists of them, become the lists of what they set
        shared[name] = [options[name] for options in grid.expand({name: shared[name]})]
    shared |= {"seed" if fixed else "draw": list(draws), "track": "tuned", "choices": first.settings.evaluate_on}
    shared["evaluate_on"] = REPORTED[first.settings.evaluate_on]
    lines = [f"# By flnoisebench choose {path.name}: the values of each method that did best in its trials."]
    for method, trial in chosen.items():
        table = {"method": method, "preset": trial.settings.preset, **shared}
        if trial.values:
            table["set"] = [trial.values]
        lines += ["", "[[include]]", *(f"{name} = {json.dumps(value)}" for name, value in table.items())]
    text = "\n".join(lines) + "\n"
    written = grid.runs_of(grid.expand(tomllib.loads(text)), device=device, data_root=data_root)
    apart = {settings.scenario.whole.slug for settings in written} ^ {scene.slug for scene in tried}
    if apart:
        raise ValueError(
            f"{path}: {min(apart)} would be in the trials or in the grid that is written, and not in both: say the "
            "scenarios above all [[include]], and leave none out by [[exclude]]"
        )
    for name, of in SHARED.items():
        here, there = of(first.settings), of(written[0])
        if here != there and name != "evaluate-on":
            raise ValueError(
                f"{path}: {name} is {here} in the trials, and would be {there} in the grid that is written: say it by "
                f"the key {name} above all [[include]], and not in [set]; the runs stay the same"
            )
    return text


def log(trials: Mapping[str, Sequence[Trial]]) -> str:
    """A CSV of all runs, COLUMNS first: what was tried, what came of it, and by which code."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for method, tried in trials.items():
        for trial in tried:
            for result, where in zip(trial.results, trial.where, strict=True):
                environment = result.environment
                writer.writerow([
                    method, trial.settings.preset, " ".join(trial.values), *where, result.status,
                    result.accuracy.last5_mean, result.digest[:16],
                    "; ".join(dict.fromkeys(said["commit"] or "" for said in sessions(environment))),
                    environment["method_sha256"][:16],
                ])  # fmt: skip
    return text.getvalue()
