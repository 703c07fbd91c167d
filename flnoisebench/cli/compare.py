"""``flnoisebench compare RUN...``: runs side by side in the terminal, and why two of them cannot be compared."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from flnoisebench import records
from flnoisebench.cli import console
from flnoisebench.cli.console import curve, percent
from flnoisebench.cli.run import result_rows
from flnoisebench.cli.show import last_rounds, plain
from flnoisebench.leaderboard import Entry
from flnoisebench.leaderboard.entries import seen, seen_below
from flnoisebench.records import Point, RoundRecord, RunResult
from flnoisebench.settings import Settings, flat


class Compared(NamedTuple):
    """A run as far as it has come, or what a leaderboard keeps of it.  folder: an entry's file then.  result: None
    while it is unfinished."""

    folder: Path
    settings: Settings
    rounds: Sequence[RoundRecord | Point]
    result: RunResult | Entry | None

    @property
    def name(self) -> str:
        parts = [self.settings.subject]
        parts += [f"{name}={value}" for name, value in self.settings.changed.items()]
        return ", ".join(parts)


@console.guarded
def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...", help="Runs' folders, a leaderboard's entries (.json), or folders of either: two or more."
        ),
    ],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print results and differences as one JSON object.", show_default="no")
    ] = False,
) -> None:
    """Show runs side by side, and say why two of them cannot be compared."""
    found = load_all(runs)
    if len(found) < 2:
        raise ValueError(f"compare needs two runs or more, and there is {found[0].folder} alone")
    reasons = apart(found)
    if as_json:
        content = {
            "comparable": not reasons,
            "obstacles": reasons,
            "runs": [
                {
                    "run": str(one.folder),
                    "method": one.name,
                    "result": plain(one.result),
                    "accuracy": [record.accuracy for record in one.rounds],
                    "label_noise": [record.label_noise for record in one.rounds],
                }
                for one in found
            ],
        }
        print(json.dumps(content))
        return
    terminal = console.out.is_terminal
    headings = ["" if terminal else "run", *(f"{_letter(i)}: {one.name}" for i, one in enumerate(found))]
    lines = [(name, *texts) for name, texts in facts(found).items()]
    console.table(headings, lines, title=headline(found))
    if terminal:
        _print_curves(found)
    else:
        for name in ("accuracy", "label_noise"):
            for i, one in enumerate(found):
                values = " ".join(percent(getattr(record, name)) for record in one.rounds)
                print(f"{name.replace('_', ' ')} by round, {_letter(i)}\t{values}")
    style = "yellow" if terminal else None
    for reason in reasons:
        console.out.print(f"not comparable: {reason}", style=style, markup=False, soft_wrap=True)


def load_all(places: Iterable[Path]) -> list[Compared]:
    """Each once.  Raises ValueError where a place holds neither a run nor an entry, or one is damaged."""
    found: dict[Path, Compared] = {}
    for place in places:
        found |= {path: Compared(path, *one) for path, one in seen_below(place).items()}
    return list(found.values())


def load(folder: Path) -> Compared:
    return Compared(folder, *seen(folder))


def headline(found: list[Compared]) -> str:
    scene = found[0].settings.scenario
    return f"{scene.dataset}, {scene.slug}, draw {scene.draw}"


def facts(found: list[Compared]) -> dict[str, list[str]]:
    """Name -> a text a run; a name that some run has nothing for is "-" there."""
    columns: list[dict[str, str]] = []
    for one in found:
        column = {"run": str(one.folder)}
        if one.result is None:
            column["status"] = f"unfinished: {len(one.rounds)} of {one.settings.protocol.rounds} rounds"
        else:
            column |= dict(result_rows(one.result, one.rounds))
        last = last_rounds(one.result, one.rounds)
        column["balanced accuracy"] = percent(last.balanced_accuracy)
        column["macro F1"] = percent(last.macro_f1)
        column["calibration error"] = percent(last.calibration_error)
        column |= {name.replace("_", " "): percent(value) for name, value in last.judged.items()}
        columns.append(column)
    names = dict.fromkeys(name for column in columns for name in column)
    return {name: [column.get(name, "-") for column in columns] for name in names}


def apart(found: list[Compared]) -> list[str]:
    """``A, C and B, D: another scenario: draw 0 and 1``: why groups of runs cannot be compared with each other.

    The runs of a group all can, so a sweep over draws is a line for two draws, not one for any two of its runs.  The
    reasons are those that kept a group's first run out of the groups before.
    """
    groups: list[list[int]] = []
    reasons: list[tuple[int, int, str]] = []
    for place, run in enumerate(found):
        kept_out = [next((why for i in group if (why := obstacles(found[i], run))), []) for group in groups]
        if [] in kept_out:
            groups[kept_out.index([])].append(place)
        else:
            reasons += [(i, len(groups), why) for i, whys in enumerate(kept_out) for why in whys]
            groups.append([place])
    names = [", ".join(map(_letter, group)) for group in groups]
    return [f"{names[i]} and {names[j]}: {why}" for i, j, why in reasons]


def obstacles(a: Compared, b: Compared) -> list[str]:
    """Why the numbers of two runs do not answer which method is better; empty when they do.

    Method, its settings and the run's seed may differ; what they are tried on and under may not.
    """
    one, other = a.settings, b.settings
    found = _differing("scenario", one.scenario.decisive, other.scenario.decisive)
    if a.result and b.result:
        names = records.other_digests(a.result.digests, b.result.digests)
        if names and not found:
            found.append(f"the same scenario by name, but other {' and '.join(names)} (digests differ)")
        elif _one_scenario(a.result, b.result):
            found = []  # one split in two files, one law under two names
    found += _differing("protocol", one.protocol.model_dump(mode="json"), other.protocol.model_dump(mode="json"))
    for name, text in (("track", "track"), ("evaluate_on", "evaluation set"), ("oracle", "oracle")):
        mine, theirs = getattr(one, name), getattr(other, name)
        if mine != theirs:
            found.append(f"another {text}: {mine or 'none'} and {theirs or 'none'}")
    for run in (a, b):
        if run.result is None:
            found.append(f"{run.folder} is unfinished")
        elif run.result.status == "failed":
            found.append(f"{run.folder} failed")
    return found


def _one_scenario(a: RunResult | Entry, b: RunResult | Entry) -> bool:
    """Whether both trained on the same images, clients, samples and labels, whatever that was called.  No digest says
    what is held out, which is drawn."""
    said = [{name: digest for name, digest in run.digests.items() if name != "public"} for run in (a, b)]
    one, other = a.settings.scenario, b.settings.scenario
    held_out_alike = one.holdout == other.holdout and (not one.holdout or one.draw == other.draw)
    return held_out_alike and said[0] == said[1] and "labels" in said[0]


def _differing(what: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """``another scenario: draw 0 and 1``: the fields that differ, those of inner tables as ``noise.rho``."""
    mine, theirs = dict(flat(a)), dict(flat(b))
    fields = [f"{name} {mine.get(name)} and {theirs.get(name)}" for name in mine if mine[name] != theirs.get(name)]
    return [f"another {what}: {', '.join(fields)}"] if fields else []


def _letter(i: int) -> str:
    return chr(ord("A") + i) if i < 26 else f"run {i + 1}"


def _print_curves(found: list[Compared]) -> None:
    """The curves below each other on one scale, so that the eye compares heights."""
    width = max(20, console.out.width - 40)
    for name in ("accuracy", "label_noise"):
        curves = [[getattr(record, name) for record in one.rounds] for one in found]
        known = [value for values in curves for value in values if value is not None]
        if not known:
            continue
        bounds = min(known), max(known)
        for i, values in enumerate(curves):
            ends = [value for value in values if value is not None]
            tail = f"{percent(ends[0])} -> {percent(ends[-1])} %" if ends else "-"
            console.out.print(f"{name.replace('_', ' ')} {_letter(i)}  {curve(values, width, bounds)}  {tail}",
                              markup=False, soft_wrap=True)  # fmt: skip
