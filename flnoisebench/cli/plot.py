"""``flnoisebench plot KIND RUN...``: figures of runs for papers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flnoisebench.cli import console
from flnoisebench.cli.console import line
from flnoisebench.report import figures


@console.guarded
def plot(
    kind: Annotated[str, typer.Argument(metavar="KIND", help=f"One of {', '.join(figures.KINDS)}; list says more.")],
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[RUN...]", help="Runs' folders, folders of runs, or (of) a leaderboard's.", show_default="none"
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="FILE.svg, FILE.pdf or FILE.png.", show_default="KIND.svg")
    ] = None,
    over: Annotated[
        str | None,
        typer.Option(
            help="Of sensitivity: the setting, such as alpha, protocol.optimiser.lr or noise.rho.", show_default="none"
        ),
    ] = None,
) -> None:
    """Draw a figure of runs; those that differ by draw and seed alone are one line with its spread."""
    if kind == "list":
        for name, what in figures.KINDS.items():
            line(name, what.about)
        return
    path = out or Path(f"{kind}.svg")
    figures.check_format(path)
    found = figures.load(runs or ())
    figure = figures.draw(kind, found, over)
    figures.save(figure, path)
    if figures.KINDS[kind].averages:
        for panel in figures.on_other_draws(found):
            console.warn(panel)
    line("figure", str(path))
