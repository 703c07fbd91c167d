"""``flnoisebench reproduce NAME``: a paper's tables, figures and claims from runs of our own."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from flnoisebench import claims, provenance, reproduce, runtime
from flnoisebench.api import MissingData
from flnoisebench.cli import console
from flnoisebench.cli import options as opt
from flnoisebench.cli.console import line
from flnoisebench.leaderboard import board
from flnoisebench.report import figures
from flnoisebench.reproduce import Done, Entry, Kept, Line, Wanted


@console.guarded
def command(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="A table or figure, all, claims, or list, which names them.")
    ],
    scale: Annotated[
        str, typer.Option(help="paper: its rounds; short: a quarter of them; smoke: minutes on a CPU, on digits.")
    ] = "paper",
    draws: Annotated[
        int | None, typer.Option(min=1, help="Draws of each scenario.", show_default="the scale's")
    ] = None,
    out: Annotated[Path, typer.Option(help="Where runs' folders are, and go.")] = Path("runs"),
    leaderboard: Annotated[
        Path | None,
        typer.Option(
            help="Take what this folder of leaderboards has of the runs, instead of running that too.",
            show_default="none",
        ),
    ] = None,
    figure: Annotated[
        Path | None,
        typer.Option(help="FILE.svg, .pdf or .png of a figure.", show_default="<out>/figures/<scale>/NAME.svg"),
    ] = None,
    workers: Annotated[
        int, typer.Option(min=1, help="Runs at once, in processes of their own (needs the extra sweep).")
    ] = 1,
    device: Annotated[
        str,
        typer.Option(
            help="auto, cpu, cuda:1, all (GPUs), or cuda:0,cuda:1. Where nothing is run (a dry run, claims) none need "
            "be here: cuda shows what was run on one."
        ),
    ] = "auto",
    data_root: opt.DataRoot = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Run nothing: say what would be, and show what is over.", show_default="no"),
    ] = False,
    retry: Annotated[bool, typer.Option("--retry", help="Go on with runs that failed.", show_default="no")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.", show_default="no")] = False,
) -> None:
    """Run what is missing of a paper's table or figure, and print ours beside the published."""
    known = reproduce.entries(scale)
    if name == "list":
        _list(known, draws, as_json)
        return
    place = runtime.kind_of(device) if dry_run or name == "claims" else runtime.pick_devices(device)[0].type
    chosen = known if name in ("all", "claims") else {name: reproduce.entry(name, scale)}
    if figure is not None:
        figures.check_format(figure)
        if name == "all":
            raise ValueError("--figure is one file, and all are many: leave it out, or name one of them")
        if name == "claims" or reproduce.kind_of_figure(chosen[name]) is None:
            raise ValueError(f"--figure: {name} is drawn as none; leave it out")
    kept = {} if leaderboard is None else board.kept(leaderboard)
    if name == "claims":
        _claims(claims.verdicts(scale, out, device=place, draws=draws, kept=kept), as_json)
        return
    root = data_root or opt.default_data_root()
    plans = {one.name: reproduce.wanted(one, device=place, draws=draws) for one in chosen.values()}
    if dry_run:
        planned = _dry_run(chosen, plans, out, kept, figure, root, as_json)
        if as_json:
            print(json.dumps({"scale": scale, "entries": planned}))
        return
    for remark in provenance.remarks():
        console.warn(remark)
    content, without = [], 0
    failed: dict[str, str] = {}
    for one in chosen.values():
        runs = plans[one.name]
        try:
            stopped = reproduce.carry_out(
                runs, data_root=root, out=out, device=device, kept=kept, workers=workers, retry=retry, on_start=_say
            )
            failed |= {str(folder): failure for folder, failure in stopped.items()}  # not all leave a result
            over = reproduce.present(runs, out, kept)
            failed |= _failed(over, leaderboard)
            lines = reproduce.compared(one, runs, over, data_root=root)
            drawn = _drawn(one, over, out, figure, root)
        except MissingData as error:
            if name != "all":
                raise
            without += 1  # the others may have their data
            console.warn(f"not run: {one.name}: {error}")
            failed |= _failed(reproduce.present(runs, out, kept), leaderboard)  # of an earlier session
            continue
        if as_json:
            content.append(_plain(one, lines, drawn, _kept(over)))
        else:
            _print(one, lines, drawn, _kept(over))
    if as_json:
        print(json.dumps({"scale": scale, "entries": content}))
    for folder, failure in failed.items():
        console.err.print(f"failed: {folder}: {failure}", markup=False, soft_wrap=True)
    if failed or without:
        raise typer.Exit(console.FAILED)


def _say(done: int, of: int, run: Wanted) -> None:
    if console.err.is_terminal:
        console.err.print(
            f"run {done + 1} of {of}: {run.settings.subject}, {run.line or '-'}, {run.level or '-'}, draw {run.draw}",
            markup=False,
        )


def _list(known: dict[str, Entry], draws: int | None, as_json: bool) -> None:
    counts = {name: len(one.lines) * len(one.levels) * (draws or one.scaling["draws"]) for name, one in known.items()}
    if as_json:
        content = [{"name": name, "title": known[name].title, "runs": runs} for name, runs in counts.items()]
        print(json.dumps({"entries": content}))
        return
    for name, runs in counts.items():
        line(name, f"{known[name].title}; {f'{runs} runs' if runs else 'no runs'}")
    line("claims", "each claim of the paper: holds, fails or undetermined, from the results that are there")


def _dry_run(
    chosen: dict[str, Entry],
    plans: dict[str, list[Wanted]],
    out: Path,
    kept: Mapping[Path, Kept],
    figure: Path | None,
    root: Path,
    as_json: bool,
) -> list[dict[str, Any]]:
    """What there is to run, and the numbers of what is over; a figure only where one is asked for by name.  Printed,
    or given back for JSON."""
    seen: set[Path] = set()
    content = []
    for name, runs in plans.items():
        folders = {run.settings.folder(out) for run in runs}
        over = reproduce.present(runs, out, kept)
        there = {(run.line, run.level, run.draw) for run in over}
        ended = {run.settings.folder(out) for run in runs if (run.line, run.level, run.draw) in there}
        to_run = len(folders - ended - seen)
        seen |= folders
        lines, drawn = [], None
        if over:
            lines = reproduce.compared(chosen[name], runs, over)
            drawn = None if figure is None else _drawn(chosen[name], over, out, figure, root)
        if as_json:
            plain = _plain(chosen[name], lines, drawn, _kept(over))
            content.append({**plain, "runs": len(folders), "over": len(ended), "to_run": to_run})
            continue
        line(name, f"{len(folders)} runs, {len(ended)} of them over, {to_run} to run")
        if over:
            _print(chosen[name], lines, drawn, _kept(over))
    return content


def _kept(over: Iterable[Done]) -> int:
    """How many of the runs that are over are a leaderboard's."""
    return sum(run.folder is None for run in over)


def _failed(over: Iterable[Done], leaderboard: Path | None) -> dict[str, str]:
    """{where it is, a folder or an entry's file: why} of the runs that failed."""
    failed = [run for run in over if run.result.status == "failed"]
    return {
        str(run.result.path(leaderboard or Path()) if isinstance(run.result, Kept) else run.folder): (
            run.result.failure or ""
        ).splitlines()[0]
        for run in failed
    }


def _drawn(entry: Entry, over: Sequence[Done], out: Path, figure: Path | None, root: Path) -> Path | None:
    """The figure's file; None where there is none to draw.  A missing matplotlib costs the figure, not the numbers."""
    path = figure or out / "figures" / entry.scale / f"{entry.name}.svg"
    try:
        return path if reproduce.draw(entry, over, path, data_root=root) else None
    except ValueError as error:
        if figure is not None:
            raise
        console.warn(f"no figure of {entry.name}: {error}")
        return None


# --------------------------------------------------------------------------------------------------- output

HEADINGS = ("level", "line", "measure", "ours", "± over draws", "n", "published", "difference", "95 % interval")


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.2f}" if abs(value) >= 1 or value == 0 else f"{value:.3g}"


def _cells(one: Line) -> tuple[str, ...]:
    beside = one.beside()
    ours = _number(one.mean)
    if not one.by_draw:
        ours = "failed" if one.failed else "not run" if one.missing else "-"
    interval = "" if beside["low"] is None else f"{beside['low']:+.2f} to {beside['high']:+.2f}"
    difference = "" if beside["difference"] is None else f"{beside['difference']:+.2f}"
    measure = f"{one.measure} ({one.unit})" if one.unit else one.measure
    return (
        one.level, one.line, measure, ours, _number(one.std), str(len(one.by_draw)), _number(one.published),
        difference, interval,
    )  # fmt: skip


def _print(entry: Entry, lines: Sequence[Line], drawn: Path | None, from_leaderboard: int) -> None:
    title = f"{entry.title}, scale {entry.scale}"
    if not console.out.is_terminal:
        line(entry.name, title)
    console.table(HEADINGS, map(_cells, lines), title=f"{entry.name}: {title}", left=3)
    if any(one.published is not None for one in lines):
        line("published", entry.source)
    for what, setting, stated in reproduce.statements(entry):
        line("stated", f"{what}, {setting}: {stated}")
    for note in reproduce.notes(entry, lines, from_leaderboard):
        line("note", note)
    if drawn is not None:
        line("figure", str(drawn))


def _plain(entry: Entry, lines: Sequence[Line], drawn: Path | None, from_leaderboard: int) -> dict[str, Any]:
    return {
        "name": entry.name,
        "title": entry.title,
        "source": entry.source,
        "lines": [{**asdict(one), "mean": one.mean, "std": one.std, **one.beside()} for one in lines],
        "stated": [list(said) for said in reproduce.statements(entry)],
        "notes": reproduce.notes(entry, lines, from_leaderboard),
        "figure": drawn and str(drawn),
    }


def _claims(found: Sequence[claims.Verdict], as_json: bool) -> None:
    if as_json:
        print(json.dumps({"claims": [asdict(one) for one in found]}))
        return
    headings = ("claim", "verdict", "closest part", "draws", "margin", "95 % interval", "why")
    rows = [(f"{one.name}: {one.text}", one.state, *_closest(one), one.why) for one in found]
    console.table(headings, rows, title="claims of the paper, judged by the results that are there")


def _closest(one: claims.Verdict) -> tuple[str, str, str, str]:
    part = one.closest
    if part is None or part.mean is None:
        return "", "0", "", ""
    interval = "" if part.low is None else f"{part.low:+.3g} to {part.high:+.3g}"
    return part.what, str(part.draws), f"{part.mean:+.3g} {one.unit}", interval
