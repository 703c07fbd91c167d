"""Grids: a TOML file that names many runs, expanded and validated whole before anything starts.

    rounds = 3                                  # one value: the same in every run
    method = ["fedavg", "fedcova"]              # a list spans the grid
    seed = [0, 1]

    [set]                                       # settings, as --set takes them, span it too
    protocol.optimiser.lr = [0.03, 0.1]

    [[exclude]]                                 # leaves out every combination that agrees with all of this
    method = "fedcova"
    seed = [1, 2]                               # any of these

    [[include]]                                 # a further small grid: the single values above, and what it says, which
                                                # wins over them
    method = "fedavg-relabel"

Where only single values stand above the includes, and no method, they are what the includes share, and no run of
their own.

Keys are the names of ``run``'s options that decide a run's numbers; "-" and "_" are one.  A list always spans: a value
that is a list itself is written as a list of that list.  The first key varies slowest.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from flnoisebench import registry
from flnoisebench.settings import OPTIONS, Settings, assignments, flat, from_options, overlaid, read_toml

SEVERAL = tuple(name for name, kind in OPTIONS.items() if kind is list)  # set, noise_set, partition_set
SHOWN = 10  # mistakes in one message

# Said once for the whole sweep, on the command line.
ELSEWHERE = ("device", "lanes", "executor", "data_root", "out", "retry", "log_to", "json", "config")

Point = dict[str, Any]  # {"method": "fedavg", "set.alpha": 2, ...}: one combination


def load(path: Path, *, device: str, data_root: Path | None = None) -> list[Settings]:
    """The runs of a grid file.  device: ``cpu`` or ``cuda``, and data_root, as in ``settings.from_options``.

    Raises ValueError that names the file and every mistake (the first SHOWN of them) with a combination.
    """
    content = read_toml(path)
    try:
        return runs_of(expand(content), device=device, data_root=data_root)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def expand(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The combinations that a grid spans, each as options of ``run``, in the file's order; includes come last.

    Raises ValueError for an unknown key, an empty list, and an exclusion that leaves out nothing.
    """
    body = {name: value for name, value in content.items() if name not in ("exclude", "include")}
    axes, single = _axes(body)
    # single values without a method in front of includes are what these share, and no run of the default method
    shared_only = bool(content.get("include")) and single == set(axes) and "method" not in axes
    points = _product(axes) if body and not shared_only else []
    for number, table in enumerate(_tables(content, "exclude"), 1):
        wanted, _ = _axes(table, f"[[exclude]] {number}: ")
        for name in wanted:
            if name not in axes:
                raise ValueError(f"[[exclude]] {number}: {registry.unknown('key of this grid', name, axes)}")
        left = [point for point in points if not all(point[name] in values for name, values in wanted.items())]
        if len(left) == len(points):
            agreed = " ".join(f"{name}={value}" for name, values in wanted.items() for value in values)
            raise ValueError(f"[[exclude]] {number} leaves out nothing: no combination agrees with {agreed}")
        points = left
    found = [_options(point) for point in points]
    for number, table in enumerate(_tables(content, "include"), 1):
        further, _ = _axes(table, f"[[include]] {number}: ")
        shared = _options({name: axes[name][0] for name in axes if name in single and name not in further})
        found += [overlaid(shared, _options(point)) for point in _product(further)]
    if not found:
        raise ValueError('this grid names no run; write at least one option, such as method = ["fedavg", "fedcova"]')
    return found


def runs_of(combinations: Iterable[Mapping[str, Any]], *, device: str, data_root: Path | None = None) -> list[Settings]:
    """Settings of every combination; what comes to the same run comes once.  Raises ValueError as ``load`` does."""
    found: dict[Path, Settings] = {}
    wrong: dict[str, list[str]] = {}  # {what is wrong: the combinations}: often all have the same mistake
    for options in combinations:
        try:
            settings = from_options(options, device=device, data_root=data_root)
        except ValueError as error:
            wrong.setdefault(str(error), []).append(said(options))
        else:
            found.setdefault(settings.folder(Path()), settings)
    if wrong:
        lines = [
            places[0] + (f" and {len(places) - 1} more" if len(places) > 1 else "") + f": {error}"
            for error, places in wrong.items()
        ]
        more = f"\n  and {len(lines) - SHOWN} more" if len(lines) > SHOWN else ""
        total = sum(map(len, wrong.values()))
        count = "1 combination cannot" if total == 1 else f"{total} combinations cannot"
        raise ValueError(f"{count} be run:\n  " + "\n  ".join(lines[:SHOWN]) + more)
    return list(found.values())


def said(options: Mapping[str, Any]) -> str:
    """A combination on one line: ``method=fedavg seed=1 set: alpha=2``."""
    plain = [f"{name}={value}" for name, value in options.items() if name not in SEVERAL]
    several = [f"{name}: {', '.join(options[name])}" for name in SEVERAL if name in options]
    return " ".join(plain + several)


def _tables(content: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    tables = content.get(name, [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ValueError(f"{name} is written as a table in two pairs of brackets: [[{name}]]")
    if not all(tables):
        raise ValueError(f"a table [[{name}]] is empty")
    return tables


def _axes(table: Mapping[str, Any], where: str = "") -> tuple[dict[str, list[Any]], set[str]]:
    """({key: its values}, the keys that have one value).  Entries of a table have keys such as ``set.alpha``."""
    axes: dict[str, list[Any]] = {}
    single: set[str] = set()

    def add(key: str, value: Any) -> None:
        if value == []:
            raise ValueError(f"{where}{key} = [] spans nothing; leave the line out")
        if not isinstance(value, list):
            single.add(key)
        axes[key] = value if isinstance(value, list) else [value]

    for written, value in table.items():
        name = written.replace("-", "_")
        if name in ELSEWHERE:
            raise ValueError(f"{where}{written} is not of the grid: it is said on the command line of the sweep")
        if name not in OPTIONS:
            raise ValueError(f"{where}{registry.unknown('option', written, OPTIONS)}")
        if name not in SEVERAL:
            if isinstance(value, dict):
                raise ValueError(f"{where}{written} is one value or a list of values, not a table")
            add(name, value)
        elif isinstance(value, dict):
            for key, entry in flat(value, f"{name}."):
                add(key, entry)
        else:
            choices = value if isinstance(value, list) else [value]
            add(name, [_together(choice, f"{where}{written}") for choice in choices])
            if not isinstance(value, list):
                single.add(name)
    return axes, single


def _together(choice: Any, where: str) -> tuple[str, ...]:
    """What is set at once: ``"alpha=2"``, ``["alpha=2", "beta=1"]`` or ``{alpha = 2, beta = 1}``."""
    if isinstance(choice, dict):
        return tuple(assignments(choice))
    parts = choice if isinstance(choice, list) else [choice]
    if not all(isinstance(part, str) for part in parts):
        raise ValueError(f'{where} = {choice!r}: write "name=value", or a table [{where.split(": ")[-1]}]')
    return tuple(parts)


def _product(axes: Mapping[str, list[Any]]) -> list[Point]:
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def _options(point: Point) -> dict[str, Any]:
    """A combination as ``from_options`` takes it: the entries of a table become assignments."""
    options: dict[str, Any] = {}
    for key, value in point.items():
        name, dot, entry = key.partition(".")
        if dot:
            value = assignments({entry: value})
        options[name] = [*options.get(name, ()), *value] if name in SEVERAL else value
    return options
