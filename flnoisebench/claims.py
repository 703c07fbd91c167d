"""What a paper claims of its results, judged by ours: holds, fails or undetermined, with the interval that decides.

Every judgement is of differences or numbers paired by draw, with Student's interval over draws, so that one draw
decides nothing.  A claim of several parts (every cell, every ablation) holds where each part's 95 % interval is on the
claimed side: that needs no correction, since all must be right at once.  It fails where one part's interval is on the
other side at a level corrected for the number of parts (Bonferroni), since one of many goes astray by chance.  A
missing run leaves a claim undetermined, unless what is there refutes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Any, Literal

from flnoisebench import papers, registry, reproduce
from flnoisebench.leaderboard.comparison import paired
from flnoisebench.report import tolerance

LEVEL = 0.95
State = Literal["holds", "fails", "undetermined"]
Values = Mapping[int, float]  # by draw


@dataclass(frozen=True)
class Part:
    """One of the things that must be so.

    mean, low, high: of a number that is above 0 where the claim is right (a lead, or what is left to a limit), with its
    95 % interval.  refuted: at the level corrected for the number of parts.
    """

    what: str
    draws: int
    mean: float | None
    low: float | None
    high: float | None
    refuted: bool

    @property
    def shown(self) -> bool:
        return self.low is not None and self.low > 0


@dataclass(frozen=True)
class Verdict:
    """closest: the part that decides, which is the one furthest from being right; None where there is no run."""

    name: str
    text: str
    state: State
    why: str
    unit: str
    parts: tuple[Part, ...]
    missing: int

    @property
    def closest(self) -> Part | None:
        known = [part for part in self.parts if part.mean is not None]
        return min(known, key=lambda part: part.mean or 0.0, default=None)


def verdicts(
    scale: str,
    out: Path,
    *,
    device: str,
    draws: int | None = None,
    kept: Mapping[Path, reproduce.Kept] | None = None,
) -> list[Verdict]:
    """All claims of the paper, from the results below ``out`` and in ``kept`` (board.kept); nothing is run."""
    content = papers.read(papers.names()[0])
    known = reproduce.entries(scale)
    return [_judged(claim, known, out, device, draws, kept) for claim in content["claims"]]


def _judged(
    claim: Mapping[str, Any],
    known: Mapping[str, reproduce.Entry],
    out: Path,
    device: str,
    draws: int | None,
    kept: Mapping[Path, reproduce.Kept] | None = None,
) -> Verdict:
    if claim["judge"] not in JUDGES:
        raise registry.unknown("judge of a claim", claim["judge"], sorted(JUDGES))
    if claim["judge"] == "circle":
        return _circle(claim)
    wanted: list[tuple[str, Values | None]] = []
    for name in claim["entries"]:
        entry = known[name]
        runs = reproduce.wanted(entry, device=device, draws=draws)
        values = reproduce.measured(reproduce.present(runs, out, kept), claim["measure"])
        wanted += JUDGES[claim["judge"]](claim, entry, values)
    parts = tuple(_part(what, values or {}, len(wanted)) for what, values in wanted)
    missing = sum(part.mean is None for part in parts)
    state, why = _state(parts, missing)
    return Verdict(claim["name"], claim["text"], state, why, reproduce.MEASURES[claim["measure"]].unit, parts, missing)


def _part(what: str, values: Values, parts: int) -> Part:
    """values: by draw, above 0 where the claim is right."""
    nothing = dict.fromkeys(values, 0.0)
    plain = paired(values, nothing, LEVEL)
    strict = paired(values, nothing, 1 - (1 - LEVEL) / parts)
    refuted = strict["high"] is not None and strict["high"] < 0
    return Part(what, len(values), plain["mean"], plain["low"], plain["high"], refuted)


def _state(parts: tuple[Part, ...], missing: int) -> tuple[State, str]:
    refuted = [part for part in parts if part.refuted]
    if refuted:
        more = f" and {len(refuted) - 1} more" if len(refuted) > 1 else ""
        return "fails", f"{refuted[0].what}{more}"
    if missing:
        return "undetermined", f"{missing} of {len(parts)} parts have no run"
    if single := sum(part.low is None for part in parts):
        return "undetermined", f"{single} of {len(parts)} parts have one draw or no spread, and so no interval"
    if all(part.shown for part in parts):
        return "holds", ""
    unclear = [part for part in parts if not part.shown]
    return "undetermined", f"{len(unclear)} of {len(parts)} parts have an interval that holds 0: {unclear[0].what}"


# --------------------------------------------------------------------------------------------------- judges

Found = list[tuple[str, Values | None]]
Cells = Mapping[tuple[str, str], Values]


def _leads(claim: Mapping[str, Any], entry: reproduce.Entry, values: Cells) -> Found:
    """A line's lead over every other line of the entry, at every level, by draws that both have."""
    sign = reproduce.MEASURES[claim["measure"]].better
    line = claim["line"]
    found: Found = []
    for level in entry.levels:
        mine = values.get((line, level), {})
        for rival in entry.lines:
            if rival == line:
                continue
            theirs = values.get((rival, level), {})
            leads = {draw: sign * (mine[draw] - theirs[draw]) for draw in sorted(set(mine) & set(theirs))}
            found.append((f"{entry.name}, {level or 'its noise'}: over {rival}", leads))
    return found


def _flat(claim: Mapping[str, Any], entry: reproduce.Entry, values: Cells) -> Found:
    """What is left of ``within`` by a line's lead at one level over another, for each two levels in either order, by
    draws that have both.

    Not by the gap between best and worst level of a draw: chance alone opens that one (six equal levels whose runs
    spread by .5 points are 1.3 points apart on average).
    """
    return [
        (
            f"{entry.name}: {claim['within']:g} points minus the lead of {high} over {low}",
            {draw: claim["within"] - (better[draw] - worse[draw]) for draw in sorted(set(better) & set(worse))},
        )
        for high, low in permutations(entry.levels, 2)
        for better, worse in [(values.get((claim["line"], high), {}), values.get((claim["line"], low), {}))]
    ]


def _below(claim: Mapping[str, Any], entry: reproduce.Entry, values: Cells) -> Found:
    """How far a line's number stays below ``limit``, at every level."""
    line = claim["line"]
    return [
        (
            f"{entry.name}, {level or 'its noise'}: {claim['limit']:g} minus {claim['measure']}",
            {draw: claim["limit"] - value for draw, value in values.get((line, level), {}).items()},
        )
        for level in entry.levels
    ]


def _circle(claim: Mapping[str, Any]) -> Verdict:
    """Whether the toy example's boundary becomes a circle, which asks c_x / c_y to be above 0 (an ellipse), and then to
    be near 1.  Exact, of no run."""
    parts = []
    for eps2 in tolerance.EPS2:
        limit = tolerance.boundary(eps2)
        ratio = limit.c_x / limit.c_y
        parts.append(Part(f"eps2={eps2:g}: a {limit.kind}, c_x/c_y", 0, ratio, ratio, ratio, ratio <= 0))
    last = parts[-1]
    state: State = "fails" if last.refuted else "holds"
    why = f"at eps2={tolerance.EPS2[-1]:g} it is a {tolerance.boundary(tolerance.EPS2[-1]).kind}"
    return Verdict(claim["name"], claim["text"], state, why, "c_x/c_y", tuple(parts), 0)


JUDGES: dict[str, Any] = {"leads": _leads, "flat": _flat, "below": _below, "circle": _circle}
