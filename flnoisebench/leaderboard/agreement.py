"""A row that was run again: does it agree with what it states?

It does when the mean accuracy lies within the row's stated spread of the stated mean, and when every run that the same
code made on the same hardware with the same libraries has the same bits.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from flnoisebench import records
from flnoisebench.leaderboard.entries import Entry
from flnoisebench.leaderboard.rows import Row


@dataclass(frozen=True)
class Repeat:
    """One run beside itself.  stated, again: accuracy in percent, mean of the last five rounds.  bits: the digests."""

    draw: int
    seed: int
    stated: float | None
    again: float | None
    bits: Literal["equal", "differ"]
    but: str  # why equal bits were not to be expected; empty: they were

    @property
    def broken(self) -> bool:
        return self.bits == "differ" and not self.but


@dataclass(frozen=True)
class Agreement:
    """stated, again: mean accuracies of the repeated runs, in percent.  spread: what the row states; its kind."""

    stated: float | None
    again: float | None
    spread: float
    kind: str
    repeats: tuple[Repeat, ...]

    @property
    def within(self) -> bool:
        if self.stated is None or self.again is None:
            return self.stated is self.again
        return abs(self.again - self.stated) <= self.spread + 1e-9

    @property
    def agrees(self) -> bool:
        return self.within and not any(one.broken for one in self.repeats)


def agreement(stated: Sequence[Entry], again: Sequence[Entry], row: Row | None = None) -> Agreement:
    """stated: entries of one row; again: the same runs, made again, in the same order.  row: whose spread counts.

    The spread is the row's over draws and seeds; for a single run, whose row has none, that over its last five rounds.
    """
    repeats = tuple(_repeat(a, b) for a, b in zip(stated, again, strict=True))
    if row is not None and row.accuracy_std_seeds is not None:
        spread, kind = row.accuracy_std_seeds, f"standard deviation over {row.n} draws and seeds"
    else:
        over_rounds = [e.accuracy.last5_std for e in stated if e.accuracy.last5_std is not None]
        spread = statistics.fmean(over_rounds) if over_rounds else 0.0
        kind = "standard deviation over the last five rounds, the only spread that a single run states"
    return Agreement(_mean(stated), _mean(again), spread, kind, repeats)


def _mean(entries: Sequence[Entry]) -> float | None:
    known = [e.accuracy.last5_mean for e in entries if e.accuracy.last5_mean is not None and e.status == "complete"]
    return statistics.fmean(known) if known else None


def _repeat(stated: Entry, again: Entry) -> Repeat:
    if not stated.settings.same_run(again.settings):
        raise ValueError("the settings of the two runs differ, so that nothing was repeated")
    reasons = []
    if records.other_digests(stated.digests, again.digests):
        reasons.append("data, partition or labels differ")
    if stated.arithmetic != again.arithmetic:
        apart = [
            f"{name} {value or 'unknown'}, here {again.arithmetic[name] or 'unknown'}"
            for name, value in stated.arithmetic.items()
            if value != again.arithmetic[name]
        ]
        reasons.append(f"other hardware or libraries ({'; '.join(apart)})")
    if stated.code != again.code:
        reasons.append(f"other code ({stated.code[0][:12]}; here {again.code[0][:12]})")
    elif "+changes" in stated.code[0]:
        reasons.append(f"code that differed from its commit {stated.code[0][:12]}")
    if not stated.settings.deterministic:
        reasons.append("kernels that are not repeatable")
    return Repeat(
        stated.settings.scenario.draw,
        stated.settings.seed,
        stated.accuracy.last5_mean,
        again.accuracy.last5_mean,
        "equal" if stated.digest == again.digest else "differ",
        ", ".join(reasons),
    )
