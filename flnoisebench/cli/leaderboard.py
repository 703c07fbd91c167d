"""``flnoisebench leaderboard``: build tables from runs, verify them, run rows again, print them, compare methods."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from flnoisebench import provenance, records, registry, runtime
from flnoisebench.cli import console
from flnoisebench.cli import options as opt
from flnoisebench.cli.console import duration, line, percent
from flnoisebench.cli.show import only_run
from flnoisebench.executors import ClientError
from flnoisebench.leaderboard import REFERENCE, Entry, Row, agreement, board, comparison, entries, rows_of, tables
from flnoisebench.leaderboard.rows import by_cell, cell_of

app = typer.Typer(no_args_is_help=True, help="Tables that follow from runs, and can be checked and run again.")

Place = Annotated[Path, typer.Argument(metavar="[LEADERBOARDS]", help="The leaderboard's folder.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.", show_default="no")]
DatasetFilter = Annotated[
    str | None, typer.Option("--dataset", "-d", help="This data set's table.", show_default="all")
]
NoiseFilter = Annotated[str | None, typer.Option("--noise", help="This noise preset.", show_default="all")]
TrackFilter = Annotated[str | None, typer.Option("--track", help="This track.", show_default="all")]


@app.command()
@console.guarded
def build(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[RUNS...]",
            help="Runs' folders, or folders of runs; without any only the tables are derived anew.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="The leaderboard's folder.")] = Path("leaderboards"),
    replace: Annotated[
        bool, typer.Option("--replace", help="Take a run that is there already anew.", show_default="no")
    ] = False,
) -> None:
    """Take runs into a leaderboard, and derive its tables anew."""
    built = board.build(runs or (), out, replace=replace)
    for folder, why in built.left_out.items():
        console.warn(f"left out: {folder}: {why}")
    for path in built.tables:
        line("table", str(path))
    for path in built.removed:
        line("removed", f"{path}, which no entry gives")
    line("rows", str(built.rows))
    line("runs", f"{len(built.added)} added, {len(built.replaced)} replaced, {len(built.known)} known")


@app.command()
@console.guarded
def verify(
    leaderboards: Place = Path("leaderboards"),
    runs: Annotated[
        list[Path] | None,
        typer.Option("--runs", help="Hold entries against these runs too. Repeatable.", show_default="none"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Hold tables and entries against each other; exit code 1 when something is wrong."""
    problems = board.verify(leaderboards, runs or ())
    errors = [one for one in problems if one.level == "error"]
    if as_json:
        found = [{**one._asdict(), "file": str(one.file)} for one in problems]
        print(json.dumps({"ok": not errors, "problems": found}))
    else:
        for one in problems:
            line(one.level, str(one))
        doubts = len(problems) - len(errors)
        line("verdict", f"{len(errors)} errors, {doubts} doubts" if problems else "every row follows from its entries")
    if errors:
        raise typer.Exit(console.FAILED)


# --------------------------------------------------------------------------------------------------- rerun


@app.command()
@console.guarded
def rerun(
    target: Annotated[
        str,
        typer.Argument(
            metavar="ROW|RESULT",
            help="leaderboards/<dataset>.csv:LINE, an entry's .json, a run, or a folder that holds one.",
        ),
    ],
    out: Annotated[Path, typer.Option(help="Where the repeated runs' folders go.")] = Path("runs-again"),
    draw: Annotated[
        list[int] | None, typer.Option("--draw", help="Of the row, repeat this draw. Repeatable.", show_default="all")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda:1, all (GPUs), or cuda:0,cuda:1")] = "auto",
    data_root: opt.DataRoot = None,
    as_json: Json = False,
) -> None:
    """Run a row again, and say whether it agrees with what it states; exit code 1 when not."""
    stated, row = stated_by(target)
    stated = [entry for entry in stated if draw is None or entry.settings.scenario.draw in draw]
    if not stated:
        raise ValueError(f"{target} has no complete run" + (f" of draw {draw}" if draw else ""))
    for remark in about_the_code(stated):
        console.warn(remark)
    root = data_root or opt.default_data_root()
    again = []
    for i, entry in enumerate(stated, 1):
        where = f"draw {entry.settings.scenario.draw}, seed {entry.settings.seed}"
        if console.out.is_terminal and not as_json:
            console.out.print(f"run {i} of {len(stated)}: {entry.settings.subject}, {where}", markup=False)
        folder = entry.settings.folder(out)
        if Path(target).resolve() in (folder.resolve(), (folder / "result.json").resolve()):
            raise ValueError(f"{target} would be held against itself; name another --out")
        failure: object = None
        try:
            runtime.prepare(entry.settings, data_root=root, out=out, device=device).execute()
        except runtime.AlreadyDone as done:  # by an earlier call, which may have told of its failure then
            failure = done.result.failure
        except (ClientError, runtime.MethodError) as error:
            failure = error
        if failure:
            console.fail(f"{where}: the run of {target} completed, and fails here: {failure}", console.FAILED)
        again.append(Entry.of(folder))
    verdict = agreement.agreement(stated, again, row)
    if as_json:
        print(json.dumps({**asdict(verdict), "within": verdict.within, "agrees": verdict.agrees}))
    else:
        _print_agreement(verdict)
    if not verdict.agrees:
        raise typer.Exit(console.FAILED)


def stated_by(target: str) -> tuple[list[Entry], Row | None]:
    """The complete entries that a target names, and the row that they belong to where it is known.

    Raises ValueError where the target is none of the three.
    """
    text, colon, number = target.rpartition(":")
    if colon and text.endswith(".csv"):
        path = Path(text)
        rows, found = board.read(path.parent, path.stem)
        if not number.isdecimal() or not 2 <= int(number) <= len(rows) + 1:
            raise ValueError(f"{target}: {path} has rows in lines 2 to {len(rows) + 1}")
        row = rows[int(number) - 2]
        return [entry for entry in by_cell(found)[row.cell] if entry.status == "complete"], row
    path = Path(target)
    if path.suffix == ".json" and path.name != "result.json" and path.is_file():
        entry = entries.load(path)
        # a leaderboard's, where it lies as in one: any folder may be called so
        places = (parent.parent for parent in path.parents if parent.name == entries.RESULTS)
        root = next((place for place in places if entry.path(place) == path), None)
        near = entries.load_all(root) if root else [entry]
        row = next(row for row in rows_of(near) if row.cell == cell_of(entry))
        return [entry] if entry.status == "complete" else [], row
    folder = path.parent if path.name == "result.json" else path
    if folder.is_dir():
        folder = only_run(folder)
    if (folder / "result.json").is_file():
        # an entry keeps of a split's file the name alone, and the run itself knows where it lies
        entry = Entry.of(folder).model_copy(update={"settings": records.load_settings(folder)})
        return [entry] if entry.status == "complete" else [], None
    raise ValueError(f"{target} is neither TABLE.csv:LINE, nor an entry's .json, nor a finished run's folder")


def about_the_code(stated: Sequence[Entry]) -> list[str]:
    """What to know of these entries' code before hours are spent on repeating them: that it is not the one here.

    Raises ValueError where nobody knows of which commit this copy is: what it makes could not be held against them.
    """
    here = provenance.commit()
    if here is None or not provenance.COMMIT.fullmatch(here):
        raise ValueError("; ".join(provenance.remarks()))
    made: dict[str, list[str]] = {}  # {commit, several of a run that went on under another: draws and seeds}
    for entry in stated:
        run = f"draw {entry.settings.scenario.draw}, seed {entry.settings.seed}"
        made.setdefault(entry.code[0], []).append(run)
    found = provenance.remarks()
    for code, runs in made.items():
        if code == here and "+changes" not in code:
            continue
        commits = code.split("; ")
        lost = [commit for commit in commits if not provenance.reachable(commit)]
        advice = (
            f"this copy has no {', '.join(lost)} to go back to" if lost else f"git checkout {commits[-1]} goes back"
        )
        if any(commit.endswith("+changes") for commit in commits):
            advice = "what was changed there nobody knows"
        elif here == f"{code}+changes":
            advice = "git stash puts the changes here aside"
        what = f"made by commit {code}, and this copy is of {here}: bits may differ, and numbers with them; {advice}"
        found.append(f"{'; '.join(runs)}: {what}")
    return found


def _print_agreement(verdict: agreement.Agreement) -> None:
    for one in verdict.repeats:
        bits = f"bits {one.bits}"
        if one.bits == "differ":
            bits += f", as they may: {one.but}" if one.but else ", on the same hardware by the same code"
        line(f"draw {one.draw}, seed {one.seed}", f"{percent(one.stated)} stated, {percent(one.again)} again, {bits}")
    line("accuracy", f"{percent(verdict.stated)} % stated, {percent(verdict.again)} % again")
    line("stated spread", f"{percent(verdict.spread)} ({verdict.kind})")
    where = "within" if verdict.within else "outside"
    line("verdict", ("agrees" if verdict.agrees else "does not agree") + f": {where} the stated spread")


# ------------------------------------------------------------------------------------------ tables and statistics


def chosen(rows: Sequence[Row], **wanted: str | None) -> list[Row]:
    """The rows with these values.  Raises UnknownName where no row has one of them."""
    left = list(rows)
    for column, value in wanted.items():
        if value is None:
            continue
        if not any(getattr(row, column) == value for row in left):
            raise registry.unknown(f"{column} of these rows", value, sorted({str(getattr(r, column)) for r in left}))
        left = [row for row in left if getattr(row, column) == value]
    return left


@app.command("table")
@console.guarded
def table_(
    leaderboards: Place = Path("leaderboards"),
    format: Annotated[str, typer.Option(help=f"{', '.join(tables.FORMATS)}.")] = "markdown",
    published: Annotated[
        bool, typer.Option("--published", help="Papers' numbers beside ours.", show_default="no")
    ] = False,
    dataset: DatasetFilter = None,
    noise: NoiseFilter = None,
    track: TrackFilter = None,
) -> None:
    """Print methods by noise level, the best in bold."""
    if format not in tables.FORMATS:
        raise registry.unknown("format", format, tables.FORMATS)
    rows, _ = board.read(leaderboards, dataset)
    found = tables.tables(chosen(rows, noise=noise, track=track), with_published=published)
    print(tables.render(found, format), end="")


@app.command()
@console.guarded
def stats(
    leaderboards: Place = Path("leaderboards"),
    against: Annotated[str, typer.Option(help="The method that the others are compared with.")] = REFERENCE,
    method: Annotated[
        list[str] | None,
        typer.Option("--method", "-m", help="Rank this method. Repeatable.", show_default="all"),
    ] = None,
    level: Annotated[float, typer.Option(min=0.5, max=0.999, help="Of intervals and tests.")] = 0.95,
    dataset: DatasetFilter = None,
    noise: NoiseFilter = None,
    track: TrackFilter = None,
    as_json: Json = False,
) -> None:
    """Differences paired by draw, mean ranks, and accuracies at equal rounds, images and seconds."""
    rows, found = board.read(leaderboards, dataset)
    rows = chosen(rows, noise=noise, track=track)
    gaps = comparison.differences(rows, found, against, level)
    ranking: comparison.Ranking | None = None
    try:
        ranking = comparison.ranking(rows, found, method or (), 1 - level)
        why = ""
    except registry.UnknownName:
        raise
    except ValueError as error:
        why = str(error)
    budgets = {measure: comparison.equal_budget(rows, found, measure) for measure in comparison.MEASURES}
    if as_json:
        content = {
            "level": level,
            "differences": list(map(asdict, gaps)),
            "ranking": asdict(ranking) if ranking else None,
            "no_ranking": why,
            "equal": {measure: list(map(asdict, tables)) for measure, tables in budgets.items()},
        }
        print(json.dumps(content))
        return
    _print_differences(gaps, level)
    if ranking is None:
        line("no mean ranks", why)
    else:
        line(
            "mean ranks",
            f"over {ranking.cells} cells; Friedman chi2 {ranking.chi2:.2f}, p {ranking.p:.3g}; methods beside one bar "
            f"cannot be told apart (Nemenyi, alpha {ranking.alpha:.3g}); cells of one data set are not independent, as "
            "both tests take them to be",
        )
        console.out.print(comparison.diagram(ranking), markup=False, soft_wrap=True)
    for measure, results in budgets.items():
        if measure == "seconds" and results:
            line(
                "note",
                "seconds are wall time: of runs that shared a card or cores they are more, the more runs the more",
            )
        for one in results:
            _print_budget(measure, one)


def _show(title: str, headings: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    """A table with its title, on a terminal and elsewhere."""
    if not console.out.is_terminal:
        print(title)
    console.table(headings, lines, title=title, left=2)


def _print_differences(gaps: Sequence[comparison.Difference], level: float) -> None:
    def signed(value: float | None) -> str:
        return "-" if value is None else f"{value:+.2f}"

    lines = []
    for one in gaps:
        interval = "-" if one.low is None else f"{signed(one.low)} to {signed(one.high)}"
        p = "-" if one.p is None else f"{one.p:.3g}"
        corrected = "-" if one.p_holm is None else f"{one.p_holm:.3g}"
        lines.append(
            (
                one.where, f"{one.method} - {one.against}", str(len(one.draws)), signed(one.mean), interval, p,
                corrected, " ".join(one.doubts),
            )
        )  # fmt: skip
    tested = sum(one.p is not None for one in gaps)
    title = f"points of accuracy, paired by draw; {100 * level:g} % t intervals; p corrected over {tested} tests (Holm)"
    _show(title, ("scenario", "method", "draws", "mean", "interval", "p", "p Holm", "doubts"), lines)


def _print_budget(measure: str, one: comparison.EqualBudget) -> None:
    amount = duration(one.budget) if measure == "seconds" else f"{one.budget:,.0f} {measure}"
    title = f"{one.where}, at equal {measure}: {amount}"
    if one.hardware:
        title += f" on {one.hardware}"
    if one.left_out:
        title += f"; {'not on it' if one.hardware else 'without a complete run'}: {', '.join(one.left_out)}"
    lines = [
        (
            reached.name,
            str(reached.n),
            " ".join(map(str, reached.draws)),
            percent(reached.accuracy) + ("" if reached.std is None else f" ± {reached.std:.2f}"),
            f"{reached.rounds:.1f}",
        )
        for reached in one.reached
    ]
    _show(title, ("method", "runs", "draws", "accuracy, %", "rounds"), lines)
