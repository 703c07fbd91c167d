"""``flnoisebench check``: does a method keep what the runtime and its readers rely on?"""

from __future__ import annotations

import json
from contextlib import nullcontext
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from flnoisebench import conformance
from flnoisebench.cli import console
from flnoisebench.conformance import Report
from flnoisebench.settings import parse_assignment, parted, require_agreement


@console.guarded
def check(
    method: Annotated[
        str, typer.Option("--method", "-m", help="A name from `list methods`, or path/to/file.py:Class.")
    ],
    preset: Annotated[str | None, typer.Option(help="The method's preset.", show_default="its first")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="A setting of the method, or protocol.NAME=VALUE of the small budget it is tried under. Repeatable.",
            show_default="none",
        ),
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Length of the runs: long enough to come to the method's last stage.",
            show_default=str(conformance.ROUNDS),
        ),
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="RULE", help="Try this rule. Repeatable.", show_default="all")
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="Kill real processes, and run in several; slower.", show_default="no")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the findings as one JSON object.", show_default="no")
    ] = False,
) -> None:
    """Try a method on every rule that it must keep, in seconds and without a data set."""
    require_agreement({"set": set_, "rounds": rounds})
    settings, protocol = parted(dict(map(parse_assignment, set_ or [])))
    live = console.out.is_terminal and not as_json
    with console.out.status("starting") if live else nullcontext() as status:
        report = conformance.check(
            method,
            settings=settings,
            preset=preset,
            protocol=protocol,
            rounds=rounds or conformance.ROUNDS,
            only=only,
            full=full,
            before=lambda rule: status.update(rule.promise) if status else None,
        )
    if as_json:
        print(json.dumps(as_object(report)))
    else:
        print_report(report)
    if not report.ok:
        raise typer.Exit(console.FAILED)


def as_object(report: Report) -> dict:
    return {
        "method": report.method,
        "rounds": report.rounds,
        "ok": report.ok,
        "unreached": dict(report.unreached),
        "rules": [
            {
                "rule": finding.rule.name,
                "status": finding.status,
                "seconds": round(finding.seconds, 3),
                "promise": finding.rule.promise,
                "what": finding.what,
                "where": finding.where,
                "what_to_do": "" if finding.status == "ok" else finding.rule.remedy,
            }
            for finding in report.findings
        ],
    }


def print_report(report: Report) -> None:
    """A line a rule, then what is wrong, where, and what to do."""
    rows = [
        (finding.rule.name, finding.status, console.duration(finding.seconds), finding.rule.promise)
        for finding in report.findings
    ]
    if console.out.is_terminal:
        table = Table(title=escape(f"{report.method}, {report.rounds} rounds"), title_justify="left")
        for heading in ("rule", "", "time", "promise"):
            table.add_column(heading, justify="right" if heading == "time" else "left", no_wrap=heading != "promise")
        colours = {"ok": "green", "failed": "bold red", "not tried": "yellow"}
        for name, status, seconds, promise in rows:
            table.add_row(name, f"[{colours[status]}]{status}[/]", seconds, promise)
        console.out.print(table)
    else:
        for row in rows:
            print("\t".join(row))
    for name, moment in report.unreached.items():
        console.out.print(
            f"note: {name} = {moment} lies beyond these {report.rounds} rounds, so its stage was not tried: --rounds "
            f"{moment + 2}, or a smaller {name}",
            markup=False,
            soft_wrap=True,
        )
    for finding in report.failed:
        console.out.print(f"\n{finding}", markup=False, soft_wrap=True)
    for what, names in report.idle.items():
        console.out.print(f"\nnot tried: {', '.join(names)}\n  what: {what}", markup=False, soft_wrap=True)
