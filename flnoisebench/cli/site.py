"""``flnoisebench site``: a leaderboard as a static web page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flnoisebench.cli import console
from flnoisebench.cli.console import line
from flnoisebench.report import site as report


@console.guarded
def site(
    out: Annotated[Path, typer.Option(help="The page's folder.")] = Path("site"),
    leaderboards: Annotated[Path, typer.Option(help="The leaderboard's folder.")] = Path("leaderboards"),
) -> None:
    """Build a leaderboard's page: open its index.html, or put the folder on any web server."""
    done = report.write(leaderboards, out)
    line("page", str(done.index))
    line("files", f"{len(done.written)} written, {len(done.unchanged)} unchanged, {len(done.removed)} removed")
