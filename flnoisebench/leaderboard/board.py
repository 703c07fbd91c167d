"""A leaderboard's folder: built from runs, read, and held against everything that it must agree with.

<folder>/<dataset>.csv     the rows, derived only; whoever edits one by hand is found
<folder>/results/...json   the entries that they follow from
"""

from __future__ import annotations

import csv
import io
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

import pydantic

from flnoisebench import records, registry
from flnoisebench.leaderboard import entries as entries_
from flnoisebench.leaderboard.entries import RESULTS, Entry
from flnoisebench.leaderboard.rows import COLUMNS, Row, cell_of, cells, csv_text, row_from, rows_of
from flnoisebench.settings import stated

# ---------------------------------------------------------------------------------------------------- build


@dataclass
class Built:
    """What ``build`` did: paths below the leaderboard's folder, and runs' folders with the reason."""

    added: list[Path] = field(default_factory=list)
    replaced: list[Path] = field(default_factory=list)
    known: list[Path] = field(default_factory=list)
    left_out: dict[Path, str] = field(default_factory=dict)
    tables: list[Path] = field(default_factory=list)
    removed: list[Path] = field(default_factory=list)
    rows: int = 0


def build(runs: Iterable[Path], leaderboards: Path, *, replace: bool = False) -> Built:
    """Take the runs in or below these folders, or none, into the leaderboard, and derive its tables anew from all
    entries; one that no entry gives goes.

    An unfinished run is left out and said.  A run that the leaderboard has already stays as it is; with another digest
    it is refused, unless the one that is there failed.  replace: the new one is taken instead, whatever its digest
    (costs measured again on a quiet machine have the same); of two new ones neither.  Nothing is written before all is
    read.

    Raises ValueError where a run lacks provenance, is damaged, or contradicts the entry that is there, where an entry
    contradicts itself, where a run stands for two draws or seeds, and where there is neither a run nor an entry.
    """
    built = Built()
    there = {entry.path(leaderboards): entry for entry in entries_.load_all(leaderboards)}
    fresh: dict[Path, Entry] = {}
    for folder in entries_.runs_below(runs):
        try:
            entry = Entry.of(folder)
        except FileNotFoundError:
            built.left_out[folder] = "unfinished"
            continue
        path = entry.path(leaderboards)
        beside = fresh.get(path)  # of another of these folders, whose place no other takes
        known = beside or there.get(path)
        taken = replace and beside is None
        if known is None:
            built.added.append(path)
        elif known == entry or ((known.status, known.digest) == (entry.status, entry.digest) and not taken):
            built.known.append(path)
            continue
        elif taken or (known.status == "failed" and (entry.status == "complete" or beside is None)):
            if beside is None:
                built.replaced.append(path)
        elif (known.status, entry.status) == ("complete", "failed"):
            built.left_out[folder] = f"failed, and {path} is of a run that did not"
            continue
        else:
            raise ValueError(
                f"{folder} is the run of {path}, with another digest ({entry.digest[:16]}, there {known.digest[:16]}; "
                f"made by commit {entry.code[0][:12]}, there by {known.code[0][:12]}). One run has one result: "
                + ("leave it out, or --replace takes the new one" if beside is None else "leave one of the two out")
            )
        fresh[path] = entry
    if not (whole := {**there, **fresh}) and not built.left_out:
        raise ValueError(
            f"{leaderboards / entries_.RESULTS} holds no entry to derive tables from; name runs to take in"
        )
    if conflicts := _of_entries(whole.items()):
        raise ValueError("\n".join(f"{path}: {what}" for path, what in conflicts))
    tables = _by_dataset(rows_of(whole.values()))  # before anything is written, since a data set may be unknown
    for entry in fresh.values():
        entries_.save(entry, leaderboards)
    for dataset, rows in tables.items():
        path = leaderboards / f"{dataset}.csv"
        records.replace(path, csv_text(rows).encode())
        built.tables.append(path)
        built.rows += len(rows)
    for path in sorted(leaderboards.glob("*.csv")):  # of a data set whose last entry has gone
        if path.stem not in tables and path.read_bytes().startswith(",".join(COLUMNS[:2]).encode()):
            path.unlink()
            built.removed.append(path)
    return built


def _by_dataset(rows: Iterable[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        found[row.dataset].append(row)
    return dict(found)


def _of_entries(found: Iterable[tuple[Path, Entry]]) -> list[tuple[Path, str]]:
    """What is wrong with entries, each by itself and beside the others: (file, what)."""
    found = list(found)
    problems = [(path, what) for path, entry in found for what in entries_.contradictions(entry)]
    return problems + _draws_that_differ(found) + _told_twice(found)


def _told_twice(found: Iterable[tuple[Path, Entry]]) -> list[tuple[Path, str]]:
    """Where two entries of a row are one run: another draw has other data, or another seed another network."""
    first: dict[tuple[str, ...], Path] = {}
    problems = []
    for path, entry in sorted(found, key=lambda pair: pair[0]):
        if entry.status == "complete" and entry.rounds:  # before its first round a run knows of its seed alone
            where = first.setdefault((*cell_of(entry), entry.digest), path)
            if where != path:
                what = (
                    f"its digest is that of {where}, so that one run stands for two draws or seeds, and its row would "
                    "show a spread that nothing has. Leave one of them out (where no draw differs another --seed does)"
                )
                problems.append((path, what))
    return problems


def _draws_that_differ(found: Iterable[tuple[Path, Entry]]) -> list[tuple[Path, str]]:
    """Where two entries of one draw of one scenario had other data, other owners or other labels: (file, what)."""
    first: dict[tuple[str, ...], tuple[str, Path]] = {}
    problems = []
    for path, entry in sorted(found, key=lambda pair: pair[0]):
        scene = entry.settings.scenario
        for name, found_here in entry.digests.items():
            # who holds what does not depend on the noise, but on clients, partition and draw, as all of the slug does
            draw = () if name in ("data", "public") else (scene.slug, str(scene.draw))
            key = (name, scene.dataset, *draw)
            digest, where = first.setdefault(key, (found_here, path))
            if digest != found_here:
                what = (
                    f"its {name} digest is {found_here[:16]}, and that of the same draw in {where} is {digest[:16]}: "
                    f"they did not train on the same {name}"
                )
                problems.append((path, what))
    return problems


# ----------------------------------------------------------------------------------------------------- read


def read(leaderboards: Path, dataset: str | None = None) -> tuple[list[Row], list[Entry]]:
    """All rows and the entries behind them, of one data set or of all.

    Raises ValueError where there are none, where a table cannot be read or is not what the entries give, or where an
    entry contradicts itself or another: no number is shown, compared, repeated or published that its runs do not give
    (``verify`` says what is wrong).
    """
    paths = sorted(leaderboards.glob("*.csv"))
    if not paths:
        raise ValueError(f"{leaderboards} holds no leaderboard (no <dataset>.csv); `leaderboard build RUNS` makes one")
    if dataset is not None and leaderboards / f"{dataset}.csv" not in paths:
        raise registry.unknown("leaderboard", dataset, [path.stem for path in paths])
    rows: list[Row] = []
    for path in paths:
        if dataset in (None, path.stem):
            lines, problems = _parse(path)
            if problems:
                raise ValueError(f"{problems[0]} (`leaderboard verify {leaderboards}` says all)")
            rows += [row for _, row in lines]
    found = entries_.load_all(leaderboards, dataset)
    if conflicts := _of_entries((entry.path(leaderboards), entry) for entry in found):
        path, what = conflicts[0]
        raise ValueError(f"{path}: {what} (`leaderboard verify {leaderboards}` says all)")
    wanted = rows_of(found)
    if _by_dataset(rows) != _by_dataset(wanted):
        differing = [row for row in rows if row not in wanted] or [row for row in wanted if row not in rows]
        which = f" (first: {differing[0].dataset}, {differing[0].scenario}, {differing[0].name})" if differing else ""
        raise ValueError(
            f"the tables in {leaderboards} are not what the results beside them give{which}. `leaderboard verify "
            f"{leaderboards}` says where; `leaderboard build --out {leaderboards}` derives them anew"
        )
    return rows, found


def kept(leaderboards: Path) -> dict[Path, Entry]:
    """What need not be run again: the entries by the folder that such a run has below any ``out``.  Raises ValueError
    as ``read`` does."""
    return {entry.settings.folder(Path()): entry for entry in read(leaderboards)[1]}


# --------------------------------------------------------------------------------------------------- verify


class Problem(NamedTuple):
    """A finding.  level: an error is wrong; a doubt is for readers to see.  line (from 1), column: of a table; 0 and ""
    where the whole file is meant."""

    level: Literal["error", "doubt"]
    file: Path
    line: int
    column: str
    what: str

    def __str__(self) -> str:
        place = str(self.file) + (f", line {self.line}" if self.line else "")
        return f"{place}{f', column {self.column}' if self.column else ''}: {self.what}"


Line = tuple[int, Row]


def verify(leaderboards: Path, runs: Sequence[Path] = ()) -> list[Problem]:
    """Everything that is wrong with a leaderboard, then everything to be doubted.

    Every table must have Row's columns and values, sorted and written as ``build`` writes, whatever ends its lines;
    every cell must follow from the entries; entries must lie where their settings say and not contradict themselves;
    data, owners and labels must be equal in all entries of a draw, and no run may stand for two of them; methods must
    be installable, and give card and settings of an entry that their code as it is here made.  runs: further, every
    entry that one of these runs made must be what ``build`` makes of that run.  Raises ValueError where there is
    nothing to verify.
    """
    tables = sorted(leaderboards.glob("*.csv"))
    files = entries_.files_below(leaderboards / RESULTS, "*.json")
    if not tables and not files:
        raise ValueError(f"{leaderboards} holds no leaderboard: neither <dataset>.csv nor {RESULTS}/")
    problems: list[Problem] = []
    entries: dict[Path, Entry] = {}
    for path in files:
        try:
            entry = entries_.load(path)
        except ValueError as error:
            problems.append(Problem("error", path, 0, "", str(error).removeprefix(f"{path} ")))
            continue
        entries[path] = entry
        problems += _about_entry(path, entry, leaderboards)
    problems += [Problem("error", path, 0, "", what) for path, what in _of_entries(entries.items())]
    try:
        wanted = _by_dataset(rows_of(entries.values()))
    except registry.UnknownName as error:
        return [*problems, Problem("error", leaderboards, 0, "", f"{error} Without it no row can be computed again.")]
    for dataset in sorted({*wanted, *(path.stem for path in tables)}):
        path = leaderboards / f"{dataset}.csv"
        if path not in tables:
            problems.append(
                Problem("error", path, 0, "", f"is missing, and {RESULTS}/{dataset} gives it rows: build it")
            )
            continue
        lines, unreadable = _parse(path)
        problems += unreadable or _recomputed(path, lines, wanted.get(dataset, []))
        problems += [
            Problem("doubt", path, line, "flags", f"{row.flags} ({row.name})") for line, row in lines if row.flags
        ]
    if runs:
        problems += _against_runs(entries, runs, leaderboards)
    return sorted(problems, key=lambda one: one.level != "error")


def _about_entry(path: Path, entry: Entry, leaderboards: Path) -> list[Problem]:
    found = []
    if entry.path(leaderboards) != path:
        found.append(Problem("error", path, 0, "", f"by its settings it belongs to {entry.path(leaderboards)}"))
    method = entry.settings.method
    if ".py" in method:
        what = f"method {method} is a file: give it an entry point, so that others can run it (CONTRIBUTING.md)"
        found.append(Problem("error", path, 0, "", what))
    elif method not in registry.names(registry.METHODS):
        what = f"method {method} is not installed, so nobody can run this again"
        found.append(Problem("error", path, 0, "", what))
    else:
        found += [Problem("error", path, 0, "", what) for what in _not_the_methods(entry)]
    if entry.status == "complete" and entry.rounds < entry.settings.protocol.rounds:
        short = f"ended after {entry.rounds} of {entry.settings.protocol.rounds} rounds"
        found.append(Problem("doubt", path, 0, "", short))
    return found


def _not_the_methods(entry: Entry) -> list[str]:
    """What an installed method says otherwise of a run that its very code made (``method_sha256``), in words.  What
    another version of it said of presets and card nobody knows here."""
    settings = entry.settings
    try:
        method = registry.load_method(settings.method)
    except ValueError:  # it cannot be imported here
        return []
    if registry.source_digest(method) != entry.environment["method_sha256"]:
        return []
    card = records.card_facts(method.card)
    found = [
        f"card.{name} is {entry.card.get(name)!r}, and the card of {settings.method} says {value!r}"
        for name, value in card.items()
        if entry.card.get(name) != value
    ]
    if settings.preset not in method.presets:
        return [*found, f"settings.preset is {settings.preset!r}, and {settings.method} has no such preset"]
    preset, _ = method.presets[settings.preset].on(settings.scenario.dataset)
    try:
        wanted = stated(method.Config(**{**preset, **settings.changed}))
    except ValueError:
        wanted = {}
    here = settings.method_settings
    absent = object()  # None is a value
    differing = [name for name in {**wanted, **here} if wanted.get(name, absent) != here.get(name, absent)]
    if differing:
        what = f"settings.changed on top of preset {settings.preset} does not give settings.method_settings"
        found.append(f"{what} ({', '.join(differing)})")
    return found


def _parse(path: Path) -> tuple[list[Line], list[Problem]]:
    """A table's rows by line, and what keeps others from being read."""
    try:
        # read_text takes a line's end however it is written: a checkout on Windows (core.autocrlf) has CRLF
        reader = csv.reader(io.StringIO(path.read_text(encoding="utf-8")))
        numbered = [(record, reader.line_num) for record in reader]  # no cell holds a line break
    except (UnicodeDecodeError, csv.Error) as error:
        return [], [Problem("error", path, 0, "", f"is damaged ({error}): build it again")]
    header = numbered[0][0] if numbered else []
    if tuple(header) != COLUMNS:
        missing = [name for name in COLUMNS if name not in header]
        strange = [name for name in header if name not in COLUMNS]
        what = f"columns missing: {missing or 'none'}; unknown: {strange or 'none'}"
        if not missing and not strange:
            what = "the columns are in another order, or some stand twice"
        return [], [Problem("error", path, 1, "", f"{what}. Its columns are those of leaderboard.Row: build it again")]
    lines: list[Line] = []
    problems: list[Problem] = []
    for record, number in numbered[1:]:
        if len(record) != len(COLUMNS):
            what = f"has {len(record)} cells, and there are {len(COLUMNS)} columns"
            problems.append(Problem("error", path, number, "", what))
            continue
        texts = dict(zip(COLUMNS, record, strict=True))
        try:
            row = row_from(texts)
        except pydantic.ValidationError as error:
            for one in error.errors():
                column = str(one["loc"][0]) if one["loc"] else ""
                problems.append(Problem("error", path, number, column, f"{one['input']!r}: {one['msg']}"))
            continue
        lines.append((number, row))
        for column, found, canonical in zip(COLUMNS, record, cells(row), strict=True):
            if found != canonical:
                what = f"{found!r} would be written {canonical!r}: build it again"
                problems.append(Problem("error", path, number, column, what))
    return lines, problems


def _runs(row: Row) -> set[str]:
    return {run.partition(":")[0] for run in row.run_digests.split()}


def _recomputed(path: Path, lines: Sequence[Line], wanted: Sequence[Row]) -> list[Problem]:
    """Each cell held against what the entries give."""
    problems: list[Problem] = []
    known = {row.cell: row for row in wanted}
    seen: dict[tuple[str, ...], int] = {}
    for number, row in lines:  # first what is the reason for wrong cells, here and in the ratios of other rows
        same = known.get(row.cell)
        if same is not None and (lost := _runs(row) - _runs(same)):
            what = (
                f"{RESULTS}/{row.dataset}/{row.scenario} has no sound entry of {row.method} ({row.settings}) for "
                f"draw-seed {' '.join(sorted(lost))}, which this row names"
            )
            problems.append(Problem("error", path, number, "", what))
    for number, row in lines:
        same = known.get(row.cell)
        if same is None:
            what = _nearest(row, wanted)
            problems.append(Problem("error", path, number, "", f"no entry in {RESULTS}/ gives this row{what}"))
            continue
        if row.cell in seen:
            problems.append(Problem("error", path, number, "", f"the row of line {seen[row.cell]} again"))
        seen[row.cell] = number
        for column, found, right in zip(COLUMNS, cells(row), cells(same), strict=True):
            if found != right:
                what = f"{found or 'nothing'} stands there, and the entries give {right or 'nothing'}"
                problems.append(Problem("error", path, number, column, what))
    for row in wanted:
        if row.cell not in seen:
            what = f"the row of {row.name} in {row.scenario} is missing (settings {row.settings}): build it again"
            problems.append(Problem("error", path, 0, "", what))
    order = [row.cell for row in wanted if row.cell in seen]
    if not problems and order != [row.cell for _, row in lines]:
        problems.append(Problem("error", path, 0, "", "the rows are not sorted: build it again"))
    return problems


def _nearest(row: Row, wanted: Sequence[Row]) -> str:
    """The one identifying column that a hand may have changed."""
    for other in wanted:
        differing = [column for column, a, b in zip(COLUMNS, cells(row), cells(other), strict=True) if a != b]
        if len(differing) == 1:
            right = cells(other)[COLUMNS.index(differing[0])]
            return f"; with {differing[0]} = {right or 'nothing'} one would"
    return ""


def _against_runs(entries: Mapping[Path, Entry], runs: Sequence[Path], leaderboards: Path) -> list[Problem]:
    problems: list[Problem] = []
    for folder in entries_.runs_below(runs):
        try:
            made = Entry.of(folder)
        except FileNotFoundError:
            continue  # unfinished: it has made no entry
        except ValueError as error:
            problems.append(Problem("error", folder, 0, "", str(error)))
            continue
        path = made.path(leaderboards)
        entry = entries.get(path)
        if entry is None:
            problems.append(Problem("doubt", folder, 0, "", "is finished and not in the leaderboard"))
            continue
        if (entry.status, made.status) == ("complete", "failed"):  # which ``build`` leaves out
            problems.append(Problem("doubt", folder, 0, "", f"failed, and {path} is of a run that did not"))
            continue
        for name in Entry.model_fields:
            if getattr(entry, name) != getattr(made, name):
                problems.append(Problem("error", path, 0, "", f"{name} differs from that of the run in {folder}"))
    return problems
