"""``flnoisebench show RUN``: a run's summary and curve in the terminal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from flnoisebench import records
from flnoisebench.cli import console
from flnoisebench.cli.console import curve, duration, percent
from flnoisebench.cli.listing import line
from flnoisebench.cli.run import fewer, print_result
from flnoisebench.leaderboard.entries import runs_below
from flnoisebench.records import LastRounds


@console.guarded
def show(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder, or one that holds a single run.")],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print result and records as one JSON object.", show_default="no")
    ] = False,
) -> None:
    """Show a finished or unfinished run."""
    folder = only_run(folder)
    settings = records.load_settings(folder)
    rounds = records.load_records(folder)
    result = records.result_of(folder)
    if as_json:
        content = {
            "folder": str(folder),
            "settings": settings.model_dump(mode="json"),
            "result": result and result.model_dump(mode="json"),
            "records": [record.model_dump(mode="json") for record in rounds],
        }
        print(json.dumps(content))
        return
    if result is not None:
        print_result(result, folder, as_json=False)
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
    means = LastRounds.of(rounds)
    for name, mean in (
        ("balanced accuracy", means.balanced_accuracy),
        ("macro F1", means.macro_f1),
        ("calibration error", means.calibration_error),
    ):
        if mean is not None:
            line(f"last 5 rounds, {name}", f"{mean:.2f}{fewer(rounds, 5)}")
    if rounds:
        last = rounds[-1]
        details = {**last.judged, **last.diagnostics, **last.metrics}
        for name, value in sorted(details.items()):
            line(f"last round, {name}", f"{value:.4g}")


def only_run(folder: Path) -> Path:
    """The folder itself, or the one run below it.  Raises ValueError when there is none, or are several."""
    if (folder / "settings.json").exists():
        return folder
    found = runs_below([folder])
    if len(found) == 1:
        return found[0]
    listed = "\n  ".join(map(str, found[:20]))
    raise ValueError(f"{folder} holds {len(found)} runs; name one of them:\n  {listed}")
