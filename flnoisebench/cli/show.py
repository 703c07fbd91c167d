"""``flnoisebench show RUN``: the summary and curve of a run, or of what a leaderboard keeps of it, in the terminal."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from flnoisebench.cli import console
from flnoisebench.cli.console import curve, duration, line, percent
from flnoisebench.cli.run import fewer, print_rows
from flnoisebench.leaderboard import Entry
from flnoisebench.leaderboard.entries import Seen, kept_below, runs_below, seen
from flnoisebench.records import LastRounds, Point, RoundRecord, RunResult


@console.guarded
def show(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="RUN", help="A run's folder, a leaderboard's entry (.json), or a folder that holds a single one."
        ),
    ],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print result and records as one JSON object.", show_default="no")
    ] = False,
) -> None:
    """Show a finished or unfinished run, or what a leaderboard keeps of one."""
    if kept := kept_below(folder):
        folder = the_one(kept, folder)
        settings, rounds, result = Seen.of(kept[folder])
    else:
        folder = only_run(folder)
        settings, rounds, result = seen(folder)
    if as_json:
        content = {
            "folder": str(folder),
            "settings": settings.model_dump(mode="json"),
            "result": plain(result),
            "records": [_plain_round(record) for record in rounds],
        }
        print(json.dumps(content))
        return
    if result is not None:
        print_rows(result, rounds, folder)
        parts = {name: seconds for name, seconds in result.seconds.items() if name != "round"}
        slowest_first = sorted(parts.items(), key=lambda part: -part[1])
        line("time by part", ", ".join(f"{name} {duration(seconds)}" for name, seconds in slowest_first))
    else:
        line(
            "unfinished",
            f"{len(rounds)} of {settings.protocol.rounds} rounds of {settings.subject} on "
            f"{settings.scenario.dataset}; the command that began it resumes it",
        )
    for name, values in (
        ("accuracy", [record.accuracy for record in rounds]),
        ("label noise", [record.label_noise for record in rounds]),
    ):
        known = [value for value in values if value is not None]
        if not known:
            continue
        if not console.out.is_terminal:
            line(f"{name} by round", " ".join(map(percent, values)))
            continue
        console.out.print(
            f"{name:<12}{curve(values)}  {percent(known[0])} -> {percent(known[-1])} %, "
            f"from {percent(min(known))} to {percent(max(known))}",
            markup=False,
            soft_wrap=True,
        )
    means = last_rounds(result, rounds)
    for name, mean in (
        ("balanced accuracy", means.balanced_accuracy),
        ("macro F1", means.macro_f1),
        ("calibration error", means.calibration_error),
    ):
        if mean is not None:
            line(f"last 5 rounds, {name}", f"{mean:.2f}{fewer(rounds, 5)}")
    if rounds:
        last = rounds[-1]
        # a leaderboard keeps no round's, but their means
        details, which = (last, "last round") if isinstance(last, RoundRecord) else (means, "last 5 rounds")
        for name, value in said(details):
            line(f"{which}, {name}", f"{value:.4g}" if isinstance(value, float) else str(value))


def said(record: RoundRecord | LastRounds) -> list[tuple[str, float | str]]:
    """What is known of a round, or of several in the mean, beside accuracies and costs, by name: what was judged by the
    truth, and what the method said itself, of notes the numbers and texts.  A name that two of these have says of which
    each is, so that none hides the other: a method may call a metric ``samples_recall`` as well."""
    kinds: dict[str, Mapping[str, Any]] = {"judged": record.judged, "diagnostics": record.diagnostics}
    if isinstance(record, RoundRecord):
        kinds["metrics"] = record.metrics
        kinds["notes"] = {name: note for name, note in record.notes.items() if isinstance(note, int | float | str)}
    count = Counter(name for values in kinds.values() for name in values)
    return sorted(
        (f"{name} ({kind})" if count[name] > 1 else name, value)
        for kind, values in kinds.items()
        for name, value in values.items()
    )


def last_rounds(result: RunResult | Entry | None, rounds: Sequence[RoundRecord | Point]) -> LastRounds:
    """The means over the last rounds, which an entry states."""
    if isinstance(result, Entry):
        return result.last5
    return LastRounds.of([record for record in rounds if isinstance(record, RoundRecord)])


def plain(result: RunResult | Entry | None) -> dict[str, Any] | None:
    """For JSON.  Of an entry also the accuracies that follow from its curves, in the place where a result has them."""
    if result is None:
        return None
    return {**result.model_dump(mode="json"), "accuracy": result.accuracy.model_dump(mode="json")}


def _plain_round(record: RoundRecord | Point) -> dict[str, Any]:
    if isinstance(record, RoundRecord):
        return record.model_dump(mode="json")
    return {"round": record.round, "accuracy": record.accuracy, "label_noise": record.label_noise}


def only_run(folder: Path) -> Path:
    """The folder itself, or the one run below it.  Raises ValueError when there is none, or are several."""
    if (folder / "settings.json").exists():
        return folder
    return the_one(runs_below([folder]), folder)


def the_one(found: Iterable[Path], place: Path) -> Path:
    """The single run that was found in a place.  Raises ValueError that names them where they are several."""
    first, *others = found = list(found)
    if not others:
        return first
    listed = "\n  ".join(map(str, found[:20]))
    raise ValueError(f"{place} holds {len(found)} runs; name one of them:\n  {listed}")
