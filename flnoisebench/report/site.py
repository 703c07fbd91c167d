"""The page: a static web site of a leaderboard, that works from a web server and from a file, without a network.

index.html        the table, which can be read without JavaScript, and the methods' cards
data/<dataset>.js what the figures and a row's details need: all columns and the mean curves, loaded when asked for
assets/           assets/ of this package, as it is: style, behaviour, and the two bundled libraries with their licences

The same leaderboard gives the same bytes: nothing of the moment or of the machine is in them.
"""

from __future__ import annotations

import hashlib
import json
import re
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import resources
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any, NamedTuple

import jinja2

from flnoisebench import records, registry
from flnoisebench.leaderboard import COLUMNS, FLAGS, Entry, Row, board, naming, tables
from flnoisebench.leaderboard.rows import by_cell

GENERATOR = "flnoisebench site"  # in the page's head, by which a later build knows its own folder
OURS = ("index.html", "assets", "data")
RECEIVE = "flnoisebench.receive("  # how a file of data begins, by which a later build knows its own
POINTS = 200  # of a curve; more do not show on a screen, and 500 rounds of 300 rows would be megabytes

TOLD = {
    "noise_rate": "the mean noise rate over all clients",
    "noisy_clients": "how many clients are noisy",
}


class Number(NamedTuple):
    """A cell that is sorted by value.  text: as shown; beside: small, behind it; value: None sorts last."""

    text: str
    value: float | None
    beside: str = ""


# ----------------------------------------------------------------------------------------------- the table


@dataclass(frozen=True)
class Line:
    """A row with its place in the figures: its group (rows that differ in noise level and method alone), the index of
    its level there, the series that it belongs to across groups, whether it is the best of its level and on which draws
    it was compared where it has more (as ``tables.Cell``), and its budget in words."""

    id: str
    row: Row
    group: int
    level: int
    series: str
    best: bool
    compared: str
    budget: str

    @property
    def level_text(self) -> str:
        parts = [
            f"{sign}\u00a0{value:g}" for sign, value in (("ρ", self.row.rho), ("τ", self.row.tau)) if value is not None
        ]
        return ", ".join(parts) or "-"

    @property
    def level_order(self) -> float:
        return 1000 * (self.row.rho or 0.0) + (self.row.tau or 0.0)

    @property
    def doubts(self) -> list[tuple[str, str]]:
        return [(flag, FLAGS[flag]) for flag in self.row.doubts]

    @property
    def told(self) -> list[str]:
        return [TOLD.get(name, name) for name in self.row.told.split()]

    @property
    def conditions(self) -> list[str]:
        return self.row.conditions.split("; ") if self.row.conditions else []

    @property
    def noise(self) -> Number:
        value = self.row.label_noise_before
        return Number("-" if value is None else f"{value:.1f}", value)

    @property
    def accuracy(self) -> Number:
        value, spread = self.row.accuracy_mean, self.row.accuracy_std_seeds
        if value is None:
            return Number("failed" if self.row.failed else "-", None)
        return Number(f"{value:.2f}", value, "" if spread is None else f"± {spread:.2f}")

    @property
    def costs(self) -> tuple[Number, ...]:
        """Seconds a round, bytes up, bytes down, images trained; beside them their ratios to the reference's."""
        row = self.row
        pairs = (
            (row.seconds_per_round, row.seconds_ratio, seconds),
            (row.bytes_up, row.bytes_up_ratio, size),
            (row.bytes_down, row.bytes_down_ratio, size),
            (row.images_trained, row.images_ratio, count),
        )
        return tuple(
            Number("-", None)
            if value is None
            else Number(text(value), value, "" if ratio is None else f"× {ratio:.3g}")
            for value, ratio, text in pairs
        )


def seconds(value: float) -> str:
    """1.23 s; 1234 s."""
    return f"{value:.3g} s" if value < 999.5 else f"{value:.0f} s"


def size(value: float) -> str:
    """Bytes for people: 1.5 MB."""
    return f"{_prefixed(value)}B"


def count(value: float) -> str:
    """A number of things for people: 1.5 M."""
    return _prefixed(value).strip()


def _prefixed(value: float) -> str:
    for prefix in ("", "k", "M", "G"):
        if abs(value) < 999.5:  # from there on its three digits are 1e+03
            return f"{value:.3g} {prefix}"
        value /= 1000
    return f"{value:.3g} T"


@dataclass(frozen=True)
class Group:
    """What the figures show at once.  levels: as the tables print them, lowest noise first."""

    title: str
    dataset: str
    levels: tuple[str, ...]


FIRM = 3  # draws of a row that says something, as CONTRIBUTING asks for


def as_shown(rows: Iterable[Row]) -> list[Row]:
    """Scenario by scenario and budget by budget the highest accuracy first, bounds and what was measured for choosing
    behind: a reader looks for the best, and not for a name.  Scenarios without a row of three draws come last."""
    rows = list(rows)
    firm = {row.arena for row in rows if len(row.draws.split()) >= FIRM}
    return sorted(
        rows,
        key=lambda row: (
            row.arena not in firm, row.dataset, row.evaluate_on != "test", row.noise, row.rho or 0.0, row.tau or 0.0,
            row.scenario, row.track, row.protocol, row.rounds, row.evaluate_on, str(row.arena), bool(row.oracle),
            -(row.accuracy_mean or 0.0),
        ),
    )  # fmt: skip


def grouped(rows: Sequence[Row]) -> tuple[list[Line], list[Group]]:
    """All rows in their order, with the groups that they fall into."""
    ids, budgets = {row: f"r{i}" for i, row in enumerate(rows)}, naming.budgets(rows)
    groups: list[Group] = []
    lines: dict[str, Line] = {}
    for table in tables.tables(rows):
        dataset = ""
        for series, cells in table.lines:
            for level, cell in enumerate(cells):
                if cell.row is not None:
                    dataset, key = cell.row.dataset, ids[cell.row]
                    lines[key] = Line(
                        key, cell.row, len(groups), level, series, cell.best, cell.compared, budgets[cell.row]
                    )
        groups.append(Group(table.title, dataset, table.levels))
    return [lines[key] for key in ids.values()], groups


# ----------------------------------------------------------------------------------------------- the cards


@dataclass(frozen=True)
class MethodCard:
    """A method as its runs recorded it.  departures: from its paper, as the installed method states them."""

    method: str
    title: str
    paper: str
    year: str
    conditions: tuple[str, ...]
    told: tuple[str, ...]
    departures: tuple[str, ...]

    @property
    def paper_parts(self) -> tuple[str, str, str]:
        """The paper around its number on arXiv: before it, the number, behind it; all of it first where none is."""
        before, number, after = [*re.split(r"\b(\d{4}\.\d{4,5})\b", self.paper, maxsplit=1), "", ""][:3]
        return before, number, after


def anchor(method: str) -> str:
    """The id of a method's cards in the page."""
    return "method-" + re.sub(r"[^a-z0-9]+", "-", method.lower()).strip("-")


def cards(entries: Iterable[Entry]) -> list[MethodCard]:
    """A card for everything that runs recorded about a method: two where they recorded two things."""
    found = {
        MethodCard(
            entry.settings.method,
            str(entry.card.get("title", entry.settings.method)),
            str(entry.card.get("paper", "")),
            str(entry.card.get("year", "")),
            tuple(entry.card.get("conditions", ())),
            tuple(TOLD.get(name, name) for name in entry.card.get("told", ())),
            _departures(entry.settings.method),
        )
        for entry in entries
    }
    return sorted(found, key=lambda card: (card.method, card.title, card.paper, card.year, card.conditions, card.told))


def _departures(method: str) -> tuple[str, ...]:
    if method not in registry.names(registry.METHODS):
        return ()
    try:
        return tuple(registry.load_method(method).card.departures)
    except ValueError:  # it cannot be imported here
        return ()


# ---------------------------------------------------------------------------------------------- the curves


def curves(entries: Iterable[Entry]) -> dict[str, list[Any]] | None:
    """Means over the complete runs of a row, round by round as far as all of them got; at most POINTS rounds.

    round: from 1, completed by then.  accuracy, accuracy_std (sample standard deviation over runs), label_noise: in
    percent, null where a run has none.  seconds, images: spent by then.  None where no run is complete.
    """
    runs = [entry.curves for entry in entries if entry.status == "complete"]
    length = min((len(run.accuracy) for run in runs), default=0)
    if not length:
        return None
    kept = min(length, POINTS)
    picked = [round(i * (length - 1) / max(kept - 1, 1)) for i in range(kept)]

    def mean(series: Sequence[Sequence[float | None]], digits: int) -> list[float | None]:
        return [None if (at := _known(series, i)) is None else round(statistics.fmean(at), digits) for i in picked]

    accuracies = [run.accuracy for run in runs]
    spreads = [_known(accuracies, i) for i in picked]
    return {
        "round": [i + 1 for i in picked],
        "accuracy": mean(accuracies, 2),
        "accuracy_std": [None if at is None or len(at) < 2 else round(statistics.stdev(at), 2) for at in spreads],
        "label_noise": mean([run.label_noise for run in runs], 2),
        "seconds": mean([list(accumulate(run.seconds)) for run in runs], 3),
        "images": mean([list(accumulate(run.images)) for run in runs], 0),
    }


def _known(series: Sequence[Sequence[float | None]], i: int) -> list[float] | None:
    values = [one[i] for one in series if one[i] is not None]
    return values if len(values) == len(series) else None  # type: ignore[return-value]


# ------------------------------------------------------------------------------------------------ the files


def files(leaderboards: Path) -> dict[str, bytes]:
    """{path below the site's folder: content}.

    Raises ValueError where there is no leaderboard, where it cannot be read, or where its tables are not what its
    entries give.
    """
    rows, entries = board.read(leaderboards)
    lines, groups = grouped(as_shown(rows))
    series = sorted({line.series for line in lines}, key=str.lower)
    assets = dict(_assets())
    fingerprints = {name: hashlib.sha256(content).hexdigest()[:12] for name, content in assets.items()}
    found = {f"assets/{name}": content for name, content in assets.items() if name != TEMPLATE}
    runs = by_cell(entries)
    data = {}
    for dataset in sorted({row.dataset for row in rows}):
        content = _data(dataset, [line for line in lines if line.row.dataset == dataset], runs)
        path = f"data/{_file_name(dataset)}.js"
        found[path] = content
        data[dataset] = f"{path}?{hashlib.sha256(content).hexdigest()[:12]}"
    found["index.html"] = _page(lines, groups, series, cards(entries), data, fingerprints)
    return dict(sorted(found.items()))


TEMPLATE = "index.html.jinja"


def _assets() -> Iterator[tuple[str, bytes]]:
    """The package's assets by path, sorted."""
    root = resources.files(__package__).joinpath("assets")
    for place in (root, root.joinpath("vendor")):
        for file in sorted(place.iterdir(), key=lambda file: file.name):
            if file.is_file():
                yield ("" if place is root else "vendor/") + file.name, file.read_bytes()


def _file_name(dataset: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "-", dataset)


def _data(dataset: str, lines: Sequence[Line], runs: dict[tuple[str, ...], list[Entry]]) -> bytes:
    """A script, since a page that was opened as a file may load no JSON."""
    content = []
    for line in lines:
        row = line.row
        content.append(
            {
                "id": line.id,
                "group": line.group,
                "level": line.level,
                "series": line.series,
                "doubts": [flag for flag, _ in line.doubts],
                "values": [getattr(row, name) for name in COLUMNS],
                "curves": curves(runs[row.cell]),
            }
        )
    lines_of_text = ",\n".join(json.dumps(one, ensure_ascii=True, separators=(",", ":")) for one in content)
    return f"{RECEIVE}{json.dumps(dataset)}, [\n{lines_of_text}\n]);\n".encode()


def _page(
    lines: Sequence[Line],
    groups: Sequence[Group],
    series: Sequence[str],
    found: Sequence[MethodCard],
    data: dict[str, str],
    fingerprints: dict[str, str],
) -> bytes:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("flnoisebench.report", "assets"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    columns = [
        {
            "name": name,
            "unit": (info.json_schema_extra or {}).get("unit", "") if isinstance(info.json_schema_extra, dict) else "",
            "why": info.description or "",
        }
        for name, info in Row.model_fields.items()
    ]
    filters = {
        "dataset": ("Data set", [line.row.dataset for line in lines]),
        "noise": ("Noise", [line.row.noise for line in lines]),
        "level": ("Level", [line.level_text for line in lines]),
        "track": ("Track", [line.row.track for line in lines]),
        "evaluate_on": ("Measured on", [line.row.evaluate_on for line in lines]),
    }
    used = {flag for line in lines for flag in line.row.doubts}
    text = environment.get_template(TEMPLATE).render(
        generator=GENERATOR,
        lines=lines,
        cards={method: list(same) for method, same in groupby(found, lambda card: card.method)},
        anchor=anchor,
        filters={name: (label, sorted(set(values))) for name, (label, values) in filters.items()},
        doubts=[(flag, why) for flag, why in FLAGS.items() if flag in used],
        datasets=sorted(data),
        commits=sorted({commit for line in lines for commit in line.row.commit.split("; ")}),
        versions=sorted({version for line in lines for version in line.row.version.split("; ")}),
        fingerprints=fingerprints,
        index={
            "columns": columns,
            "groups": [vars(group) for group in groups],
            "series": series,
            "data": data,
        },
    )
    return text.encode()


# ------------------------------------------------------------------------------------------------- on disk


@dataclass
class Written:
    """What ``write`` did; paths below the site's folder."""

    index: Path
    written: list[str] = field(default_factory=list)
    unchanged: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)


def write(leaderboards: Path, out: Path) -> Written:
    """Build the site in ``out``.  Files there that it did not make stay as they are; data
    of data sets without a table go.  index.html comes last, so that no page asks for what is not there yet.

    Raises ValueError, and writes nothing, where ``out`` holds files of these names that are no such site.
    """
    index = out / "index.html"
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out} is a file; name a folder")
    ours = index.is_file() and f'content="{GENERATOR}"'.encode() in index.read_bytes()[:2000]
    if not ours and (there := [name for name in OURS if (out / name).exists()]):
        raise ValueError(
            f"{out} holds {' and '.join(there)} of something else, which would be overwritten; choose another --out"
        )
    wanted = files(leaderboards)
    done = Written(index)
    for name in sorted(wanted, key=lambda name: (name == "index.html", name)):
        path = out / name
        if path.is_file() and path.read_bytes() == wanted[name]:
            done.unchanged.append(name)
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        records.replace(path, wanted[name])
        done.written.append(name)
    for path in sorted((out / "data").glob("*.js")):  # of a data set that has no table any more
        name = path.relative_to(out).as_posix()
        if name not in wanted and path.read_bytes().startswith(RECEIVE.encode()):
            path.unlink()
            done.removed.append(name)
    return done
