"""The console script: command groups put together."""

from __future__ import annotations

import importlib.metadata
import io
import sys
from typing import Annotated

import typer

from flnoisebench.cli import console, data, leaderboard, listing, scenario
from flnoisebench.cli.check import check
from flnoisebench.cli.choose import choose
from flnoisebench.cli.compare import compare
from flnoisebench.cli.plot import plot
from flnoisebench.cli.reproduce import command as reproduce
from flnoisebench.cli.run import run
from flnoisebench.cli.show import show
from flnoisebench.cli.site import site
from flnoisebench.cli.sweep import sweep

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
    help="Which federated-learning methods withstand noisy labels: run, compare, publish.",
)
app.command()(run)
app.command()(sweep)
app.command()(choose)
app.command()(show)
app.command()(compare)
app.command()(plot)
app.command()(site)
app.command(name="reproduce")(reproduce)
app.command()(check)
app.add_typer(listing.app, name="list")
app.add_typer(scenario.app, name="scenario")
app.add_typer(data.app, name="data")
app.add_typer(leaderboard.app, name="leaderboard")


def _version(wanted: bool) -> None:
    if wanted:
        print(importlib.metadata.version("flnoisebench"))
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Print the version and leave.", show_default="no"
        ),
    ] = False,
) -> None: ...


def main() -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a finished run must not fail at printing its result
            stream.reconfigure(errors="replace")
    console.heed_sigterm()
    app()
