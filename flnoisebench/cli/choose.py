"""``flnoisebench choose GRID``: the best of a sweep's trials for each method, in as many trials for every method."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from flnoisebench import records, registry, runtime, trials
from flnoisebench.cli import console
from flnoisebench.cli import options as opt
from flnoisebench.cli.sweep import DEVICES


@console.guarded
def choose(
    grid_file: Annotated[
        Path, typer.Argument(metavar="GRID", help="The trials: a sweep's TOML file, measured on a validation set.")
    ],
    out: Annotated[Path, typer.Option(help="Where the sweep's runs are.")] = Path("runs"),
    grid: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write the grid that reports: each method's best, track tuned.", show_default="none"
        ),
    ] = None,
    draw: Annotated[
        list[int] | None,
        typer.Option(
            min=0,
            help="A draw of that grid, none that was chosen on; a seed where nothing in it is drawn. Repeatable.",
            show_default="0 to 4",
        ),
    ] = None,
    log: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write all trials, a line a run, as CSV.", show_default="none"),
    ] = None,
    device: Annotated[str, typer.Option(help="What the sweep ran on: auto, cpu or cuda.")] = "auto",
    data_root: opt.DataRoot = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the choices as one JSON object, last line.", show_default="no")
    ] = False,
) -> None:
    """Choose each method's best trial of a sweep, after as many trials for every method."""
    if device not in DEVICES:
        raise registry.unknown("device", device, DEVICES)
    if device == "auto":
        device = runtime.pick_devices("auto")[0].type
    places = [path.resolve() for path in (grid_file, grid, log) if path]
    if len(set(places)) < len(places):
        raise ValueError("GRID, --grid and --log are files of their own, and here two of them are one")
    root = data_root or opt.default_data_root()
    found = trials.load(grid_file, out=out, device=device, data_root=root)
    codes = {code for tried in found.values() for trial in tried for code in trial.commits}
    if len(codes) > 1:
        console.warn(f"these trials were made by several commits: {', '.join(sorted(codes))}")
    chosen = {method: trials.best(tried) for method, tried in found.items()}
    text = trials.final_grid(grid_file, chosen, draw or range(5), device=device, data_root=root) if grid else ""
    for path in (log, grid):
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
    if log:
        records.replace(log, trials.log(found).encode())
    if grid:
        records.replace(grid, text.encode())
    if as_json:
        print(json.dumps({method: _facts(trial, found[method]) for method, trial in chosen.items()}))
        return
    _print(found, chosen)
    if grid and console.out.is_terminal:
        where = f" --data-root {quote(str(data_root))}" if data_root else ""
        console.out.print(f"next: flnoisebench sweep {quote(str(grid))}{where}", markup=False, soft_wrap=True)


def _facts(trial: trials.Trial, tried: list[trials.Trial]) -> dict[str, object]:
    others = [other.mean for other in tried if other is not trial and other.accuracies is not None]
    return {
        "preset": trial.settings.preset,
        "set": trial.values,
        "accuracy": trial.mean,
        "std": statistics.stdev(trial.accuracies) if trial.accuracies and len(trial.accuracies) > 1 else None,
        "next": max(others, default=None),
        "trials": len(tried),
        "failed": sum(other.accuracies is None for other in tried),
    }


def _print(found: dict[str, list[trials.Trial]], chosen: dict[str, trials.Trial]) -> None:
    """A line a method: what was chosen, its accuracy on the images for choosing, that of the second, the trials."""
    first = next(iter(chosen.values())).settings
    names = ("method", "chosen", f"{first.evaluate_on}, %", "next best", "trials")
    lines = []
    for method, trial in chosen.items():
        facts = _facts(trial, found[method])
        spread = "" if facts["std"] is None else f" ± {facts['std']:.2f}"
        count = f"{facts['trials']}" + (f", {facts['failed']} failed" if facts["failed"] else "")
        values = " ".join([f"preset {trial.settings.preset}", *trial.values])
        second = "-" if facts["next"] is None else f"{facts['next']:.2f}"
        lines.append((method, values, f"{trial.mean:.2f}{spread}", second, count))
    console.table(names, lines)
