"""Tables as papers print them: methods by noise level, the best in bold, published numbers beside ours on request."""

from __future__ import annotations

import csv
import io
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from flnoisebench import published
from flnoisebench.leaderboard import naming
from flnoisebench.leaderboard.rows import REFERENCE, Row, default_preset
from flnoisebench.published import Published

FORMATS = ("markdown", "latex", "csv")
DOUBT = "†"


@dataclass(frozen=True)
class Cell:
    """A method in a scenario.  row: None where there is none.  best: the highest mean of the column's rows on the draws
    that most of them share (``_compared``), oracles apart.  compared: that mean and the draws, of a row on more."""

    row: Row | None
    best: bool = False
    compared: str = ""
    printed: tuple[Published, ...] = ()


@dataclass(frozen=True)
class Table:
    """One noise preset on one federation under one budget.  lines: a name and a cell a level."""

    title: str
    levels: tuple[str, ...]
    lines: tuple[tuple[str, tuple[Cell, ...]], ...]
    notes: tuple[str, ...] = ()

    @property
    def with_published(self) -> bool:
        return any(cell.printed for _, cells in self.lines for cell in cells)


def tables(rows: Iterable[Row], *, with_published: bool = False) -> list[Table]:
    """A table for all rows that differ in noise level and method alone, in the order of the rows."""
    groups = naming.by_table(rows)
    return [
        _table(group, title, with_published) for group, title in zip(groups, naming.titles(groups, _title), strict=True)
    ]


def _title(row: Row) -> str:
    title = (
        f"{row.dataset}, {row.noise}, {row.partition}, {row.clients} clients, track {row.track}, {row.rounds} rounds, "
        f"{row.model}, {row.precision}"
    )
    return title if row.evaluate_on == "test" else f"{title}, measured on {row.evaluate_on}"


def _level(row: Row) -> tuple[float, float, str]:
    """What orders and names a column: rho, tau, and the noise as the slug says it."""
    return row.rho or 0.0, row.tau or 0.0, row.scenario.split("_")[0]


def _table(rows: Sequence[Row], title: str, with_published: bool) -> Table:
    levels = sorted({_level(row) for row in rows})
    names = naming.names(rows)
    found: dict[str, dict[tuple[float, float, str], Row]] = defaultdict(dict)
    for row in rows:
        found[names[row]][_level(row)] = row
    labels = _labels(rows, levels)
    best: set[Row] = set()
    compared: dict[Row, str] = {}
    uneven: list[str] = []
    for label, level in zip(labels, levels, strict=True):
        column = [row for row in rows if _level(row) == level and _counts(row)]
        draws, means = _compared(column)
        best |= {row for row, mean in means.items() if mean == max(means.values())}
        some = f"on draws {' '.join(map(str, sorted(draws)))}"
        compared |= {row: f"{mean:.2f} {some}" for row, mean in means.items() if {*row.by_draw} != draws}
        if more := [f"{names[row]} {mean:.2f}" for row, mean in means.items() if row in compared]:
            uneven.append(f"{label} compared {some}, where: {'; '.join(more)}")
        if apart := [f"{names[row]} ({row.draws})" for row in column if row not in means and len(column) > 1]:
            uneven.append(f"{label} not compared for the best, since on other draws (draws): {'; '.join(apart)}")

    def cell(row: Row | None, level: tuple[float, float, str]) -> Cell:
        if row is None:
            return Cell(None)
        printed: list[Published] = []
        # on the paper's images, and the method as it is: an ablation's preset is not what the paper's line says
        plain = row.preset == default_preset(row.method) and not row.changed and not row.oracle
        if with_published and plain and row.evaluate_on == "test":
            printed = published.beside(row.dataset, row.noise, row.rho, row.tau, row.clients, row.partition, row.method)
        return Cell(row, row in best, compared.get(row, ""), tuple(printed))

    def order(name: str) -> tuple[bool, bool, str]:
        one = next(iter(found[name].values()))
        return bool(one.oracle), one.method != REFERENCE, name.lower()

    lines = tuple(
        (name, tuple(cell(found[name].get(level), level) for level in levels)) for name in sorted(found, key=order)
    )
    return Table(title, labels, lines, tuple(_notes(rows, names, lines, uneven)))


def _labels(rows: Sequence[Row], levels: Sequence[tuple[float, float, str]]) -> tuple[str, ...]:
    reads_rho = {_level(row) for row in rows if row.rho is not None}
    return tuple(
        f"({_short(rho)}, {_short(tau)})" if (rho, tau, slug) in reads_rho and tau else slug
        for rho, tau, slug in levels
    )


def _counts(row: Row) -> bool:
    """Whether a row can be the best of its column: an oracle is a bound, and no method's result."""
    return row.accuracy_mean is not None and not row.oracle


def _compared(rows: Sequence[Row]) -> tuple[frozenset[int], dict[Row, float]]:
    """The draws that rows are compared on, and the means over these, as printed, of those that are on all of them.

    One draw can be fifteen points harder than the next.  Of the sets of draws that rows are on it is the one on which
    the most runs of two rows or more can be compared; where no two rows share one, nothing is: a row alone is the best
    of nothing.
    """
    found = {}
    for draws in {frozenset(row.by_draw) for row in rows}:
        on = {
            row: round(statistics.fmean(row.by_draw[draw] for draw in draws), 2)
            for row in rows
            if draws <= {*row.by_draw}
        }
        if len(on) > 1:
            found[draws] = on
    if not found:
        return frozenset(), {}
    draws = max(found, key=lambda draws: (len(draws) * len(found[draws]), len(draws), sorted(draws)))
    return draws, found[draws]


def _notes(
    rows: Sequence[Row],
    names: dict[Row, str],
    lines: Sequence[tuple[str, tuple[Cell, ...]]],
    uneven: Sequence[str],
) -> list[str]:
    notes = [
        "accuracy in %, mean of the last five rounds ± standard deviation over n draws and seeds (n); "
        "bold: the highest mean on the same draws, which chance may have put there",
        *uneven,
    ]
    printed = {one for _, cells in lines for cell in cells for one in cell.printed}
    for source in sorted({one.source for one in printed}):
        rounds = sorted({one.rounds for one in printed if one.source == source and one.rounds})
        length = f", after {' or '.join(map(str, rounds))} rounds (here {rows[0].rounds})" if rounds else ""
        notes.append(f"published: {source}{length}; its ± is the source's own, and not over draws and seeds")
    doubted: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        for flag in row.doubts:
            if names[row] not in doubted[flag]:
                doubted[flag].append(names[row])
    for flag, who in doubted.items():  # names have commas of their own
        notes.append(f"{DOUBT} {flag}: {'all' if 1 < len(who) == len(lines) else '; '.join(who)}")
    return notes


def _short(value: float) -> str:
    """.6, as papers print it."""
    return repr(value).removeprefix("0") if 0 < value < 1 else repr(value).removesuffix(".0")


def _ours(row: Row | None) -> str:
    if row is None:
        return ""
    if row.accuracy_mean is None:
        return "failed" if row.failed else "-"
    spread = "" if row.accuracy_std_seeds is None else f" ± {row.accuracy_std_seeds:.2f}"
    return f"{row.accuracy_mean:.2f}{spread} ({row.n})"


def _theirs(printed: Sequence[Published]) -> str:
    return " / ".join(f"{one.accuracy:.2f}" + ("" if one.std is None else f" ± {one.std:.2f}") for one in printed)


def _headings(table: Table) -> list[str]:
    found = []
    for level in table.levels:
        found += [level, "published"] if table.with_published else [level]
    return found


def markdown(table: Table) -> str:
    """GitHub's table, with the notes below."""

    def row(cells: Iterable[str]) -> str:
        return "| " + " | ".join(text.replace("|", r"\|") for text in cells) + " |"

    lines = [f"**{table.title}**", "", row(["method", *_headings(table)])]
    lines.append("|---" * (1 + len(_headings(table))) + "|")
    for name, cells in table.lines:
        texts = [name]
        for cell in cells:
            text = _ours(cell.row)
            doubt = DOUBT if cell.row and cell.row.flags else ""
            texts.append((f"**{text}**" if cell.best else text) + doubt)
            if table.with_published:
                texts.append(_theirs(cell.printed))
        lines.append(row(texts))
    return "\n".join([*lines, "", *(f"- {note}" for note in table.notes)]) + "\n"


_ESCAPES = str.maketrans({
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", DOUBT: r"$^\dagger$",
})  # fmt: skip


def _escaped(text: str) -> str:
    return text.translate(_ESCAPES)


def latex(table: Table) -> str:
    r"""A ``table`` environment with booktabs' rules (``\usepackage{booktabs}``)."""
    headings = _headings(table)
    lines = [
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{_escaped(table.title)}. {_escaped('. '.join(table.notes))}.}}",
    ]
    lines += [rf"\begin{{tabular}}{{l{'c' * len(headings)}}}", r"\toprule"]
    lines += [" & ".join(["method", *map(_escaped, headings)]) + r" \\", r"\midrule"]
    for name, cells in table.lines:
        texts = [_escaped(name)]
        for cell in cells:
            text = _escaped(_ours(cell.row))
            doubt = _escaped(DOUBT) if cell.row and cell.row.flags else ""
            texts.append((rf"\textbf{{{text}}}" if cell.best else text) + doubt)
            if table.with_published:
                texts.append(_escaped(_theirs(cell.printed)))
        lines.append(" & ".join(texts) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", r"\end{table}"]) + "\n"


TIDY = (
    "dataset", "scenario", "noise", "rho", "tau", "track", "evaluate_on", "oracle", "method", "name", "preset",
    "changed", "settings", "n", "accuracy_mean", "accuracy_std_seeds", "best", "flags", "published", "published_std",
    "source", "difference",
)  # fmt: skip


def tidy(found: Iterable[Table]) -> str:
    """All tables as one CSV, a line a cell (and a published number, where there are several)."""
    whole = io.StringIO()
    writer = csv.DictWriter(whole, TIDY, lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    for table in found:
        for name, cells in table.lines:
            for cell in cells:
                if cell.row is None:
                    continue
                line = {**cell.row.model_dump(), "name": name, "best": cell.best}
                if not cell.printed:
                    writer.writerow(line)
                for one in cell.printed:
                    ours = cell.row.accuracy_mean
                    gap = "" if ours is None else round(ours - one.accuracy, 4)
                    writer.writerow(
                        {
                            **line,
                            "published": one.accuracy,
                            "published_std": one.std,
                            "source": one.source,
                            "difference": gap,
                        }
                    )
    return whole.getvalue()


def render(found: Sequence[Table], format: str) -> str:
    """In one of FORMATS."""
    if format == "csv":
        return tidy(found)
    return "\n".join((markdown if format == "markdown" else latex)(table) for table in found)
