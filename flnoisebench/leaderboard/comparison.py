"""What may be said of two methods: differences paired by draw, ranks over cells, and accuracies at equal budgets.

Everything is computed from entries, so that a number is always that of runs which can be run again.  Oracles are bounds
and no methods: they are in none of it.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Literal, get_args

import numpy as np
import scipy  # scipy.stats comes with its first use: .9 s of every command's start otherwise

from flnoisebench import registry
from flnoisebench.leaderboard import naming
from flnoisebench.leaderboard.entries import Entry
from flnoisebench.leaderboard.rows import FLAGS, REFERENCE, Row, by_cell, by_draw
from flnoisebench.records import LAST_ROUNDS

CELLS = 6  # fewest for mean ranks: below, Friedman's chi-squared and Nemenyi's distance are no approximations
Arena = tuple[Any, ...]


def arenas(rows: Iterable[Row]) -> dict[Arena, list[Row]]:
    """The rows that may be compared with each other, oracles left out, in the order of the rows."""
    found: dict[Arena, list[Row]] = defaultdict(list)
    for row in rows:
        if not row.oracle:
            found[row.arena].append(row)
    return dict(found)


def _where(found: Mapping[Arena, list[Row]]) -> list[str]:
    """The arenas in words."""
    return naming.titles(found.values(), lambda row: f"{row.dataset}/{row.scenario}, {row.track}")


# ---------------------------------------------------------------------------------------- paired differences


@dataclass(frozen=True)
class Difference:
    """A method minus another in one arena, paired by draw, in points of accuracy (mean of the last five rounds).

    where: the arena in words, with what tells it from the others.  draws: those that both have.  low, high: Student's t
    interval of the mean over draws; p: of the t test against 0; p_holm: corrected for all differences that were asked
    for together.  None where ``paired`` has none.  doubts: FLAGS of either row.
    """

    where: str
    dataset: str
    scenario: str
    track: str
    method: str
    against: str
    draws: tuple[int, ...]
    mean: float | None
    low: float | None
    high: float | None
    p: float | None
    doubts: tuple[str, ...]
    p_holm: float | None = None


def paired(a: Mapping[int, float], b: Mapping[int, float], level: float = 0.95) -> dict[str, Any]:
    """draws, mean, low, high and p of a - b over the draws that both have.

    low, high and p are None below two draws, and where the difference is the same in all of them: accuracies are counts
    of images, so that two draws agree to the last digit once in fifty times by chance, and a spread of 0 says nothing
    of the next draw.  Two that are equal in every draw have p 1.
    """
    draws = tuple(sorted(set(a) & set(b)))
    values = [a[draw] - b[draw] for draw in draws]
    nothing = {"draws": draws, "mean": statistics.fmean(values) if values else None, "low": None, "high": None}
    if len(values) < 2:
        return {**nothing, "p": None}
    mean, deviation, n = statistics.fmean(values), statistics.stdev(values), len(values)
    rounding = 1e-9 * max(abs(value) for draw in draws for value in (a[draw], b[draw]))
    if deviation <= rounding:
        return {**nothing, "p": 1.0 if abs(mean) <= rounding else None}
    error = deviation / math.sqrt(n)
    half = float(scipy.stats.t.ppf((1 + level) / 2, n - 1)) * error
    p = float(2 * scipy.stats.t.sf(abs(mean) / error, n - 1))
    return {"draws": draws, "mean": mean, "low": mean - half, "high": mean + half, "p": p}


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down correction (Scandinavian J. Statistics 1979), in the given order: the chance of one or more
    false findings among all stays below the level at which these are read."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    corrected = [0.0] * len(p_values)
    highest = 0.0
    for rank, i in enumerate(order):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[i]))
        corrected[i] = highest
    return corrected


def differences(
    rows: Iterable[Row], entries: Sequence[Entry], against: str = REFERENCE, level: float = 0.95
) -> list[Difference]:
    """Every row minus the plain row of ``against`` in its arena, corrected together.

    Raises UnknownName when no row is of that method.
    """
    rows = list(rows)
    if not any(row.method == against for row in rows):
        advice = " --against says with which of them the others are compared."  # nobody may have said this one
        raise registry.unknown("method of these rows", against, sorted({row.method for row in rows}), advice)
    found: list[Difference] = []
    names, groups, runs = naming.names(rows), arenas(rows), by_cell(entries)
    for where, group in zip(_where(groups), groups.values(), strict=True):
        base = plain(group, against)
        if base is None:
            continue
        theirs = by_draw(runs.get(base.cell, ()))
        for row in group:
            if row is base:
                continue
            numbers = paired(by_draw(runs.get(row.cell, ())), theirs, level)
            doubts = tuple(flag for flag in FLAGS if flag in row.doubts or flag in base.doubts)
            found.append(
                Difference(
                    where, row.dataset, row.scenario, row.track, names[row], names[base], **numbers, doubts=doubts
                )
            )
    tested = [i for i, one in enumerate(found) if one.p is not None]
    for i, p in zip(tested, holm([found[i].p or 0.0 for i in tested]), strict=True):
        found[i] = replace(found[i], p_holm=p)
    return found


def plain(group: Sequence[Row], method: str) -> Row | None:
    """A method's row with the fewest values set by hand; the first preset wins a tie."""
    own = [row for row in group if row.method == method]
    return min(own, key=lambda row: (len(json.loads(row.changed or "{}")), row.name), default=None)


# ----------------------------------------------------------------------------------------------------- ranks


@dataclass(frozen=True)
class Ranking:
    """Mean ranks over cells, 1 the best, ties shared (Demsar, JMLR 2006).

    ranks: name -> mean rank, best first.  chi2, p: Friedman's test that all are equal.  distance: Nemenyi's critical
    difference at ``alpha``.  groups: names whose mean ranks differ by less, each as large as can be.  Both tests take
    the cells for independent, which those of one data set are not: they share images, and often draws and owners, so
    that p is too small.
    """

    cells: int
    ranks: dict[str, float]
    chi2: float
    p: float
    alpha: float
    distance: float
    groups: tuple[tuple[str, ...], ...]


def ranking(rows: Iterable[Row], entries: Sequence[Entry], methods: Sequence[str] = (), alpha: float = 0.05) -> Ranking:
    """Rank the methods in every arena that has all of them, by their means over the draws that all of them have there.
    methods: some of them (default: all).

    Raises ValueError, with what is missing, for fewer than three methods or six such cells.
    """
    rows = [row for row in rows if row.accuracy_mean is not None]
    names, found = naming.names(rows), arenas(rows)
    known = sorted({row.method for group in found.values() for row in group})
    for method in methods:
        if method not in known:
            raise registry.unknown("method of these rows", method, known)
    if methods:  # each as its plain row is called in most arenas: an arena of variants adds no contender
        called = {
            method: Counter(names[row] for group in found.values() if (row := plain(group, method)))
            for method in methods
        }
        wanted = {(method, name): name for method, count in called.items() for name, _ in count.most_common(1)}
    else:
        wanted = {(row.method, names[row]): names[row] for group in found.values() for row in group}
    if len(wanted) < 3:
        raise ValueError(f"ranks need three methods or more, and here are {len(wanted)}: {', '.join(wanted.values())}")
    values, runs = [], by_cell(entries)
    for group in found.values():
        own = {(row.method, names[row]): row for row in group}
        if set(wanted) <= set(own):
            accuracy = [by_draw(runs.get(own[contender].cell, ())) for contender in wanted]
            if shared := set.intersection(*map(set, accuracy)):
                values.append([statistics.fmean(one[draw] for draw in shared) for one in accuracy])
    if len(values) < CELLS:
        raise ValueError(
            f"mean ranks need {CELLS} cells or more that hold all {len(wanted)} methods on one draw or more, and there "
            f"are {len(values)}: "
            f"run what is missing, or name fewer methods ({', '.join(wanted.values())})"
        )
    table = np.array(values, dtype=np.float64)
    ranks = scipy.stats.rankdata(-table, axis=1).mean(axis=0)
    labels = list(wanted.values())
    order = sorted(range(len(labels)), key=lambda i: (ranks[i], labels[i]))
    if np.ptp(table, axis=1).any():
        chi2, p = map(float, scipy.stats.friedmanchisquare(*table.T))
    else:  # all equal everywhere: scipy would divide by zero
        chi2, p = 0.0, 1.0
    distance = critical_difference(len(labels), len(values), alpha)
    sorted_ranks = {labels[i]: float(ranks[i]) for i in order}
    return Ranking(len(values), sorted_ranks, chi2, p, alpha, distance, _groups(sorted_ranks, distance))


def critical_difference(methods: int, cells: int, alpha: float = 0.05) -> float:
    """Nemenyi's: q sqrt(k (k + 1) / (6 N)), q of the studentised range over sqrt 2 (Demsar, JMLR 2006, section 3.2)."""
    q = float(scipy.stats.studentized_range.ppf(1 - alpha, methods, np.inf)) / math.sqrt(2)
    return q * math.sqrt(methods * (methods + 1) / (6 * cells))


def _groups(ranks: Mapping[str, float], distance: float) -> tuple[tuple[str, ...], ...]:
    names = list(ranks)
    found: list[tuple[str, ...]] = []
    for i, first in enumerate(names):
        group = tuple(name for name in names[i:] if ranks[name] - ranks[first] < distance)
        if len(group) > 1 and not any(set(group) <= set(other) for other in found):
            found.append(group)
    return tuple(found)


def diagram(ranking: Ranking) -> str:
    """The critical-difference diagram as text: an axis of ranks, and bars beside methods that cannot be told apart."""
    k, width = len(ranking.ranks), 60

    def at(rank: float) -> int:
        return round((rank - 1) / (k - 1) * (width - 1))

    numbers, axis = [" "] * (width + 2), ["-"] * width
    for whole in range(1, k + 1):
        axis[at(whole)] = "+"
        numbers[at(whole) : at(whole) + len(str(whole))] = list(str(whole))
    distance = "".join(["|", "=" * max(at(1 + ranking.distance) - 1, 0), "|"])[:width]
    lines = ["".join(numbers).rstrip(), "".join(axis), f"{distance} critical difference {ranking.distance:.2f}"]
    longest = max(map(len, ranking.ranks))
    for name, rank in ranking.ranks.items():
        bars = "".join(" |" if name in group else "  " for group in ranking.groups)
        lines.append(f"{' ' * at(rank)}*".ljust(width) + f"  {rank:5.2f}  {name:<{longest}}{bars}".rstrip())
    return "\n".join(lines)


# -------------------------------------------------------------------------------------------- equal budgets

Measure = Literal["rounds", "images", "seconds"]
MEASURES: tuple[Measure, ...] = get_args(Measure)


@dataclass(frozen=True)
class Reached:
    """What a method had reached when the budget was spent.

    draws: of its runs, which other methods' need not be.  accuracy: the mean of the last five rounds that were over by
    then, then over runs (None: no round was); std: over runs; rounds: how many were over, mean over runs.
    """

    name: str
    n: int
    draws: tuple[int, ...]
    accuracy: float | None
    std: float | None
    rounds: float


@dataclass(frozen=True)
class EqualBudget:
    """One arena at an equal budget: the least that any complete run in it spent.  where: the arena in words, with what
    tells it from the others.  hardware: seconds are compared on one machine; left_out: rows that have no run on it.
    It says whether a run was alone there, where the run recorded it, and not beside how many: on one card two take
    nearly twice as long as one."""

    where: str
    dataset: str
    scenario: str
    track: str
    measure: Measure
    budget: float
    hardware: str
    reached: tuple[Reached, ...]
    left_out: tuple[str, ...]


def spent(entry: Entry, measure: Measure) -> list[float]:
    """What was spent by the end of each round: rounds, images with gradient, seconds of wall time."""
    curves: dict[Measure, Sequence[float]] = {
        "rounds": [1.0] * entry.rounds,
        "images": entry.curves.images,
        "seconds": entry.curves.seconds,
    }
    return list(accumulate(curves[measure]))


def at_budget(entry: Entry, measure: Measure, budget: float) -> tuple[float | None, int]:
    """(the mean accuracy of the last five rounds that were over within the budget, how many were over)."""
    over = sum(total <= budget * (1 + 1e-9) for total in spent(entry, measure))
    known = [value for value in entry.curves.accuracy[:over] if value is not None]
    return (statistics.fmean(known[-LAST_ROUNDS:]) if known else None), over


def _on_one_machine(runs: Mapping[Row, Sequence[Entry]]) -> tuple[dict[Row, list[Entry]], str]:
    """The runs on the hardware on which most rows have some, and that in words."""
    machines: dict[tuple[str, ...], set[Row]] = defaultdict(set)
    for row, own in runs.items():
        for entry in own:
            machines[entry.hardware].add(row)
    if not machines:
        return {}, ""
    machine = max(sorted(machines), key=lambda one: len(machines[one]))
    device, devices, processor, executor, lanes, sharing = machine
    several = f"{devices} devices" if devices not in ("", "1") else ""
    parts = (device, several, processor, executor, lanes and f"lanes {lanes}", sharing)
    there = {row: [entry for entry in own if entry.hardware == machine] for row, own in runs.items()}
    return there, ", ".join(filter(None, parts))


def equal_budget(rows: Iterable[Row], entries: Sequence[Entry], measure: Measure) -> list[EqualBudget]:
    """A table for each arena with two rows or more that have runs."""
    rows = list(rows)
    found = []
    names, groups, every = naming.names(rows), arenas(rows), by_cell(entries)
    for where, group in zip(_where(groups), groups.values(), strict=True):
        runs = {
            row: [entry for entry in every.get(row.cell, ()) if entry.status == "complete" and entry.rounds]
            for row in group
        }
        hardware = ""
        if measure == "seconds":
            runs, hardware = _on_one_machine(runs)
        left_out = tuple(names[row] for row, own in runs.items() if not own)
        runs = {row: own for row, own in runs.items() if own}
        if len(runs) < 2:
            continue
        budget = min(spent(entry, measure)[-1] for own in runs.values() for entry in own)
        reached = []
        for row, own in runs.items():
            pairs = [at_budget(entry, measure, budget) for entry in own]
            values = [value for value, _ in pairs if value is not None]
            reached.append(
                Reached(
                    names[row],
                    len(own),
                    tuple(dict.fromkeys(entry.settings.repetition for entry in own)),
                    statistics.fmean(values) if values else None,
                    statistics.stdev(values) if len(values) > 1 else None,
                    statistics.fmean(over for _, over in pairs),
                )
            )
        first = group[0]
        found.append(
            EqualBudget(
                where, first.dataset, first.scenario, first.track, measure, budget, hardware, tuple(reached), left_out
            )
        )
    return found
