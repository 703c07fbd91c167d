"""``flnoisebench sweep GRID``: many runs, on this machine or a cluster, with a live view of them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from flnoisebench import grid, registry, runs, runtime
from flnoisebench.cli import console
from flnoisebench.cli import options as opt
from flnoisebench.cli.console import duration, line, percent
from flnoisebench.leaderboard import board
from flnoisebench.settings import Settings, read_toml

if TYPE_CHECKING:  # Dask is an extra: what needs it imports it when it is called
    from flnoisebench.leaderboard import Entry
    from flnoisebench.sweep import Outcome, Place, Standing, Sweep

DEVICES = ("auto", "cpu", "cuda")
CLUSTER = "Cluster"


@console.guarded
def sweep(
    grid_file: Annotated[
        Path, typer.Argument(metavar="GRID", help="A TOML file: `run`'s options as keys; a list spans the grid.")
    ],
    device: Annotated[str, typer.Option(help="auto, cpu or cuda (a GPU a run).")] = "auto",
    workers: Annotated[
        int | None, typer.Option(min=1, help="Runs at once on CPUs.", show_default="one a core, at least 2")
    ] = None,
    runs_per_gpu: Annotated[int, typer.Option("--runs-per-gpu", min=1, help="Runs at once on each GPU.")] = 1,
    lanes: Annotated[
        str,
        typer.Option(help="Clients trained at once in a run; auto: 4 on a GPU, 1 on a CPU, whose cores runs share."),
    ] = "auto",
    scheduler: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="A running `dask scheduler`, host:port; its `dask worker`s need --nthreads 1 (and --resources GPU=1).",
            show_default="none: workers on this host",
            rich_help_panel=CLUSTER,
        ),
    ] = None,
    slurm: Annotated[
        Path | None,
        typer.Option(
            metavar="PROFILE",
            help="A TOML file that says what SLURM jobs to submit (examples/slurm.toml).",
            show_default="none",
            rich_help_panel=CLUSTER,
        ),
    ] = None,
    data_root: opt.DataRoot = None,
    out: Annotated[Path, typer.Option(help="Where runs' folders go; all workers must see it.")] = Path("runs"),
    leaderboard: Annotated[
        Path | None,
        typer.Option(help="Leave out the runs that this folder of leaderboards has.", show_default="none"),
    ] = None,
    retry: Annotated[
        bool,
        typer.Option("--retry", help="Go on with runs that failed, from their last commit.", show_default="no"),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print the runs, what is done and what the rest costs.", show_default="no"),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the outcomes as one JSON object, last line.", show_default="no")
    ] = False,
) -> None:
    """Carry out a grid of runs; what is done stays done, and the same command continues after any interruption."""
    if device not in DEVICES:
        raise registry.unknown("device", device, DEVICES)
    if scheduler and slurm:
        raise ValueError("--scheduler and --slurm are two places to run at; say one")
    if (scheduler or slurm) and workers is not None:
        raise ValueError("--workers is for workers on this host; a cluster brings its own")
    if (scheduler or slurm) and runs_per_gpu != 1:
        raise ValueError(
            "--runs-per-gpu is for GPUs of this host; on a cluster several workers see one card: start more of them, "
            "or say processes = K in the SLURM profile"
        )
    lane_count = opt.lane_count(lanes)
    place: Place | None = None
    if scheduler or slurm or not dry_run:
        place, device = place_of(device, workers, runs_per_gpu, scheduler, slurm)
    elif device == "auto":
        device = runtime.pick_devices("auto")[0].type
    root = data_root or opt.default_data_root()
    wanted = whole = grid.load(grid_file, device=device, data_root=root)
    kept: list[Entry] = []
    if leaderboard is not None:
        wanted, kept = missing_in(leaderboard, whole, retry=retry)
    left_out = len(whole) - len(wanted)
    if dry_run:
        rows = planned(wanted, out, kept, retry=retry)
        print_plan(rows, out, place, left_out=left_out, beside=bool(kept), as_json=as_json)
        return
    assert place is not None
    work = engine().Sweep(
        wanted,
        out=out,
        data_root=root,
        place=place,
        device=device,
        lanes=lane_count,
        retry=retry,
        on_message=console.warn,
    )
    try:
        outcomes = watched(work, quiet=as_json)
    except KeyboardInterrupt as stop:
        done = sum(standing.outcome is not None for standing in work.standings)
        console.stopped(
            stop,
            f"{done} of {len(wanted)} runs are over, and the same command continues with the others from their last "
            "commits",
        )
    print_outcomes(outcomes, work.out, left_out=left_out, as_json=as_json)
    if any(outcome.status == "failed" for outcome in outcomes):
        raise typer.Exit(console.FAILED)


def missing_in(leaderboard: Path, wanted: Sequence[Settings], *, retry: bool) -> tuple[list[Settings], list[Entry]]:
    """(the runs that a leaderboard has not, all that it has).  retry: those that failed there are none that it has."""
    kept = board.kept(leaderboard)
    there = {folder for folder, entry in kept.items() if entry.status == "complete" or not retry}
    missing = [one for one in wanted if one.folder(Path()) not in there]
    console.warn(f"{len(wanted) - len(missing)} of {len(wanted)} runs are in {leaderboard} and are left out")
    return missing, list(kept.values())


def engine() -> Any:
    """The module that needs Dask."""
    try:
        from flnoisebench import sweep as module
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("dask", "distributed"):
            console.fail("sweeps run on Dask, which is not installed here: pip install 'flnoisebench[sweep]'")
        raise
    return module


def place_of(
    device: str, workers: int | None, runs_per_gpu: int, scheduler: str | None, slurm: Path | None
) -> tuple[Place, str]:
    """Where the workers are, and what they compute on: ``cpu`` or ``cuda``."""
    dask = engine()
    if scheduler:
        running = dask.Running(scheduler)
        return running, running.device() if device == "auto" else device
    if slurm:
        try:
            profile = read_toml(slurm)
        except ValueError as error:
            raise ValueError(f"--slurm: {error}") from None
        try:
            jobs = dask.Slurm(profile)
        except ModuleNotFoundError:
            console.fail(
                "--slurm goes through dask-jobqueue, which is not installed: pip install 'flnoisebench[sweep]'"
            )
        except ValueError as error:
            raise ValueError(f"--slurm {slurm}: {error}") from None
        if device == "cuda" and not jobs.gpu:
            raise ValueError(f"--slurm {slurm}: --device cuda needs gpu = true there")
        return jobs, "cuda" if jobs.gpu and device != "cpu" else "cpu"
    if device == "auto":
        device = runtime.pick_devices("auto")[0].type
    return dask.Local(device=device, workers=workers, runs_per_gpu=runs_per_gpu), device


# --------------------------------------------------------------------------------------------------- the plan


def planned(wanted: Sequence[Settings], out: Path, kept: Sequence[Entry], *, retry: bool) -> list[dict[str, Any]]:
    """What is known of each run, and how many seconds the rest of it takes by what earlier runs took, below ``out`` or
    else those that a leaderboard kept; None where there are none."""
    known = runs.below(out)
    elsewhere = [
        runs.Found(Path(), one.status, one.settings.model_dump(mode="json"), one.rounds, None, one.seconds["round"])
        for one in kept
        if one.rounds
    ]
    by_folder = {run.folder: run for run in known}
    rows: list[dict[str, Any]] = []
    for settings in wanted:
        found = by_folder.get(settings.folder(out)) or runs.Found(settings.folder(out), "unfinished", {})
        pace = runs.seconds_a_round(settings, known) or runs.seconds_a_round(settings, elsewhere)
        # one that could not begin has no settings, and no result that would keep the sweep from it
        over = found.status == "complete" or (found.status == "failed" and not retry and bool(found.settings))
        over |= found.status == "damaged"  # the sweep refuses it, and counts it as failed
        rest = 0 if over else settings.protocol.rounds - found.rounds
        rows.append(
            {
                "folder": str(found.folder),
                "status": "new" if found.status == "unfinished" and not found.rounds else found.status,
                "rounds": found.rounds,
                "of": settings.protocol.rounds,
                "seconds": 0.0 if not rest else None if pace is None else pace * rest,
                "problem": found.problem if found.status == "damaged" else None,
            }
        )
    return rows


def print_plan(
    rows: Sequence[dict[str, Any]], out: Path, place: Place | None, *, left_out: int, beside: bool, as_json: bool
) -> None:
    """A line a run, then the sums.  left_out: how many runs of the grid a leaderboard has.  beside: costs may be those
    of a leaderboard's runs."""
    for row in rows:
        if row["problem"]:
            console.warn(f"not run as it is: {row['problem']}")
    estimated = [row["seconds"] for row in rows if row["seconds"]]
    unknown = sum(row["seconds"] is None for row in rows)
    script = place.job_script() if place is not None and hasattr(place, "job_script") else None
    if as_json:
        total = {"runs": len(rows), "seconds": sum(estimated), "unknown": unknown}
        print(json.dumps({"runs": rows, "left_out": left_out, "total": total, "job_script": script}))
        return
    for row in rows:
        state = f"{row['status']}, round {row['rounds']} of {row['of']}" if row["rounds"] else row["status"]
        cost = "unknown" if row["seconds"] is None else duration(row["seconds"]) if row["seconds"] else "-"
        line(state, cost, str(Path(row["folder"]).relative_to(out)))
    counts = Counter(row["status"] for row in rows)
    line("runs", f"{len(rows)}: " + ", ".join(f"{count} {status}" for status, count in counts.items()))
    cost = f"{duration(sum(estimated))} of one run at a time" if estimated else "nothing" if not unknown else "unknown"
    if estimated and unknown:
        cost += f", and {unknown} runs of unknown cost (no earlier run of that method on that data set in {out})"
    if estimated and beside:
        cost += "; where no run is there, by the leaderboard's, on their machines and beside what ran there"
    line("cost", cost)
    if script is not None:
        print(script, end="")


# ------------------------------------------------------------------------------------------- while it goes on


def watched(work: Sweep, *, quiet: bool) -> list[Outcome]:
    """Carry out with a live table on a terminal, a line for each change of a run's status elsewhere."""
    if quiet:
        return work.carry_out()
    if not console.out.is_terminal:
        work.on_change = Log()
        return work.carry_out()
    with Live(
        get_renderable=lambda: live_view(work, console.out.width, console.out.height),
        console=console.out,
        refresh_per_second=4,
    ):
        return work.carry_out()


class Log:
    """``status<TAB>run<TAB>what there is to say``, once for each change."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[str, int]] = {}

    def __call__(self, standing: Standing) -> None:
        now = (standing.status, standing.attempt)
        outcome = standing.outcome
        silent = standing.status in ("queued", "submitted") or (outcome is not None and outcome.already)
        if self._last.get(standing.label) == now or silent:
            return
        self._last[standing.label] = now
        print("\t".join([standing.status, standing.label, told(standing)]), flush=True)


def told(standing: Standing) -> str:
    outcome = standing.outcome
    if outcome is not None:
        if outcome.status == "failed":
            return outcome.failure or ""
        return f"{percent(outcome.accuracy)} % in {duration(outcome.seconds)}"
    if standing.status == "waiting":
        return "another process is at it"
    return f"on {standing.host}"


def live_view(work: Sweep, width: int, height: int) -> Group:
    """Counts, the runs that are under way, and the last that ended, as many as the terminal has lines for."""
    standings = work.standings
    counts = Counter(standing.status for standing in standings)
    head = (
        f"{counts['complete']} done, {counts['failed']} failed, {counts['running']} running, "
        f"{counts['queued'] + counts['submitted']} queued"
        + (f", {counts['waiting']} with another process" if counts["waiting"] else "")
        + f" of {len(standings)} on {work.slots or '-'} workers ({work.place.name})"
    )
    table = Table(box=None, pad_edge=False)
    table.add_column("", width=8, no_wrap=True)
    table.add_column("round", justify="right", width=7, no_wrap=True)
    table.add_column("accuracy", justify="right", width=8, no_wrap=True)
    table.add_column("run", max_width=width - 30, no_wrap=True, overflow="ellipsis")
    colours = {"complete": "green", "failed": "bold red", "running": "cyan", "waiting": "yellow"}
    room = max(3, height - 6)
    active = [standing for standing in standings if standing.status in ("running", "waiting")]
    failed = [standing for standing in standings if standing.status == "failed"][-room // 3 :]
    done = [standing for standing in standings if standing.status == "complete"]
    shown = (active + failed)[:room]
    shown = done[-(room - len(shown)) :] + shown if len(shown) < room else shown
    for standing in shown:
        if standing.status == "failed":
            what = f"{short(standing.label, (width - 30) // 2)}: {told(standing)}"
        else:
            what = short(standing.label, width - 30)
        rounds = f"{standing.round}/{standing.settings.protocol.rounds}"
        status = Text(standing.status, style=colours[standing.status])
        table.add_row(status, rounds, percent(standing.accuracy), Text(what))
    parts: list[Any] = [Text(head, style="bold"), table]
    if work.dashboard:
        parts.append(Text(f"Dask: {work.dashboard}", style="dim"))
    return Group(*parts)


def short(label: str, width: int) -> str:
    """The end of a run's path, which tells it from others."""
    return label if len(label) <= width else "…" + label[1 - width :]


def print_outcomes(outcomes: Sequence[Outcome], out: Path, *, left_out: int, as_json: bool) -> None:
    """left_out: how many runs of the grid a leaderboard has."""
    counts = Counter(outcome.status for outcome in outcomes)
    if as_json:
        rows = [
            {
                "folder": str(outcome.folder),
                "status": outcome.status,
                "already": outcome.already,
                "failure": outcome.failure,
                "rounds": outcome.rounds,
                "accuracy": outcome.accuracy,
                "seconds": outcome.seconds,
            }
            for outcome in outcomes
        ]
        ended = {"complete": counts["complete"], "failed": counts["failed"]}
        print(json.dumps({"runs": rows, "left_out": left_out, **ended}))
        return
    already = sum(outcome.already for outcome in outcomes)
    line("runs", f"{counts['complete']} complete, {counts['failed']} failed; {already} of them were before")
    for outcome in outcomes:
        if outcome.status == "failed":
            line("failed", str(outcome.folder.relative_to(out)), outcome.failure or "")
    if counts["failed"]:
        line("next", f"tracebacks are in the folders' failure.txt below {out}; --retry goes on with what failed")
    else:
        line("next", f"flnoisebench list runs --out {quote(str(out))}")
