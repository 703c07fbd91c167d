"""``flnoisebench run``: one run, with a live view of it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from flnoisebench import provenance, records, registry, runtime, tracking
from flnoisebench.cli import console
from flnoisebench.cli import options as opt
from flnoisebench.cli.console import duration, percent, size
from flnoisebench.executors import ClientError
from flnoisebench.records import Point, RoundRecord, RunResult
from flnoisebench.settings import CHOICES, EVALUATE_ON, OPTIONS, TRACKS, assignments, from_options, overlaid, read_toml

if TYPE_CHECKING:
    from flnoisebench.leaderboard import Entry


def read_config(context: typer.Context, path: Path | None) -> Path | None:
    """Take the options' defaults from a TOML file; what is said on the command line wins."""
    if path is None:
        return None
    try:
        content = read_toml(path)
    except ValueError as error:
        console.fail(f"--config: {error}")
    known = {
        flag.removeprefix("--"): parameter
        for parameter in context.command.params
        for flag in parameter.opts
        if flag.startswith("--") and flag != "--config"
    }
    defaults: dict[str, Any] = {}
    for name, value in content.items():
        key = name.replace("_", "-")
        if key not in known:
            console.fail(f"--config {path}: {registry.unknown('option', name, known)}")
        if isinstance(value, dict):  # [set] alpha = 2
            if not known[key].multiple:
                console.fail(f"--config {path}: {name} is one value, not a table")
            value = assignments(value)
        elif isinstance(value, list) and not known[key].multiple:
            console.fail(f"--config {path}: {name} is one value, not a list; `flnoisebench sweep` runs a grid")
        elif isinstance(value, bool) and not getattr(known[key], "is_flag", False):  # click takes true for 1
            console.fail(f"--config {path}: {name} = {str(value).lower()}, and it is no flag")
        elif isinstance(value, str) and known[key].multiple:
            value = [value]
        elif isinstance(value, str) and value.startswith("~/"):
            value = os.path.expanduser(value)  # as a shell does with what is typed
        defaults[known[key].name or key] = value
    context.default_map = {**(context.default_map or {}), **defaults}
    return path


@console.guarded
def run(
    context: typer.Context,
    method: opt.MethodName = None,
    dataset: opt.DatasetName = "digits",
    protocol: Annotated[
        str | None, typer.Option(help="Training budget, from `list protocols`.", show_default="the data set's")
    ] = None,
    track: Annotated[
        str,
        typer.Option(
            help=f"Whose budget: {', '.join(TRACKS)} (common: the protocol's; own: with the preset's protocol values "
            "over it; tuned: with values set by hand, chosen in as many trials for every method)."
        ),
    ] = "common",
    preset: Annotated[str | None, typer.Option(help="The method's preset.", show_default="its first")] = None,
    noise: opt.NoiseName = None,
    rho: opt.Rho = None,
    tau: opt.Tau = None,
    noise_set: opt.NoiseField = None,
    partition: opt.Law = None,
    partition_set: opt.PartitionField = None,
    p: opt.P = None,
    alpha: opt.Alpha = None,
    min_size: opt.MinSize = None,
    clients: opt.Clients = None,
    draw: opt.Draw = 0,
    seed: opt.Seed = 0,
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds.", show_default="the protocol's")] = None,
    precision: Annotated[
        str | None, typer.Option(help="fp32, tf32 or bf16.", show_default="the protocol's; fp32 on a CPU")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="A setting of the method, or protocol.NAME=VALUE (protocol.optimiser.lr=0.03). Repeatable.",
            show_default="none",
        ),
    ] = None,
    evaluate_on: Annotated[
        str,
        typer.Option(
            help=f"What accuracies are measured on: {', '.join(EVALUATE_ON)} (a and b: halves of the test set; both "
            "validations: what a hold-out keeps out of training, by its true or its given labels)."
        ),
    ] = "test",
    holdout: opt.Holdout = 0.0,
    oracle: opt.OracleName = None,
    choices: Annotated[
        str | None,
        typer.Option(
            help=f"What the values of --set were chosen on: {', '.join(CHOICES)}.",
            show_default="preset; unstated with --set",
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda:1, all (GPUs), or cuda:0,cuda:1")] = "auto",
    lanes: Annotated[
        str, typer.Option(help="Clients trained at once; auto: 4 on a GPU, one a core on a CPU (1 for an MLP).")
    ] = "auto",
    executor: Annotated[str, typer.Option(help=f"{', '.join(runtime.EXECUTORS)}.")] = "auto",
    deterministic: Annotated[bool, typer.Option(help="Repeatable kernels.")] = True,
    data_root: opt.DataRoot = None,
    out: Annotated[Path, typer.Option(help="Where runs' folders go.")] = Path("runs"),
    retry: Annotated[
        bool,
        typer.Option("--retry", help="Go on with a run that failed, from its last commit.", show_default="no"),
    ] = False,
    log_to: Annotated[
        list[str] | None,
        typer.Option(
            # not --track: that is whose budget a run has, and every result and row calls it so
            "--log-to",
            metavar="TRACKER",
            help=f"Show the run in a tracker too: {', '.join(tracking.TRACKERS)}; on this disk alone. Repeatable.",
            show_default="none",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as one JSON object, last line.", show_default="no")
    ] = False,
    config: Annotated[
        Path | None,
        typer.Option(
            help="A TOML file whose keys are these options' names; the command line wins.",
            callback=read_config,
            is_eager=True,
            show_default="none",
        ),
    ] = None,
) -> None:
    """Train a method on a data set under label noise; resumes where it was stopped."""
    place = runtime.pick_devices(device)[0]
    lane_count = opt.lane_count(lanes)
    said = {
        "method": method, "dataset": dataset, "protocol": protocol, "track": track, "preset": preset, "noise": noise,
        "rho": rho, "tau": tau, "noise_set": noise_set, "partition": partition, "partition_set": partition_set, "p": p,
        "alpha": alpha, "min_size": min_size, "clients": clients, "draw": draw, "seed": seed, "rounds": rounds,
        "precision": precision, "set": set_, "evaluate_on": evaluate_on, "holdout": holdout, "oracle": oracle,
        "choices": choices, "deterministic": deterministic,
    }  # fmt: skip
    typed = {name: value for name, value in said.items() if _typed(context, name) and value is not None}
    # of a list that is on the command line too the file's entries stay, but for those that are said there
    listed = {name: (context.default_map or {}).get(_parameter(name)) for name in typed if OPTIONS[name] is list}
    rest = {name: value for name, value in said.items() if name not in typed} | listed
    root = data_root or opt.default_data_root()
    settings = from_options(overlaid(rest, typed), device=place.type, data_root=root)
    log = tracking.Log(log_to or (), settings.folder(out), out, settings, on_trouble=console.warn)
    prepared = None
    try:
        prepared = runtime.prepare(
            settings,
            data_root=root,
            out=out,
            device=device,
            lanes=lane_count,
            executor=executor,
        )
        for remark in (*provenance.remarks(), *prepared.remarks):
            console.warn(remark)
        result = watched(prepared, retry=retry, quiet=as_json, log=log)
        folder = prepared.folder
    except runtime.AlreadyDone as done:
        result, folder = done.result, done.folder
        again = "" if result.status == "complete" else "; --retry goes on from its last commit"
        console.warn(f"already {result.status}: nothing to run{again}")
    except (ClientError, runtime.MethodError):
        # whoever reads the last line learns of the failure there too; the message follows on stderr
        if as_json and prepared is not None and (failed := records.result_of(prepared.folder)):
            print_result(failed, prepared.folder, as_json=True)
        raise
    finally:
        log.finish()
    print_result(result, folder, as_json=as_json)
    if result.status == "failed":
        raise typer.Exit(console.FAILED)


def _parameter(option: str) -> str:
    return "set_" if option == "set" else option  # set is Python's


def _typed(context: typer.Context, option: str) -> bool:
    """Whether it was said on the command line, and not in the file of --config."""
    source = context.get_parameter_source(_parameter(option))
    return source is not None and source.name == "COMMANDLINE"


def watched(prepared: runtime.Run, *, retry: bool, quiet: bool, log: Callable[[RoundRecord], None]) -> RunResult:
    """Execute with a progress line on a terminal, and with few plain ones on stderr elsewhere.  log: told of every
    round."""
    settings = prepared.settings
    if not console.out.is_terminal or quiet:
        lines = Lines(prepared, log)
        result = prepared.execute(lines.round, retry=retry, on_start=lines.start)
        lines.say(f"{result.rounds} rounds done, accuracy {percent(result.accuracy.final)} %")
        return result
    console.out.print(headline(prepared), markup=False)
    rounds = TextColumn("round {task.completed:.0f}/{task.total:.0f}")
    accuracy = TextColumn("accuracy [bold]{task.fields[accuracy]}[/] %")
    pace = TextColumn("{task.fields[seconds]:.2f} s/round")
    columns: tuple[ProgressColumn, ...] = (
        TextColumn("[bold]{task.fields[method]}"),
        BarColumn(bar_width=20),
        rounds,
        accuracy,
        TextColumn("label noise {task.fields[noise]} %"),
        pace,
        TextColumn("{task.fields[up]} up, {task.fields[down]} down"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    if console.out.width < 130:  # rich would cut digits off; 80 columns hold these
        noise, traffic = TextColumn("noise {task.fields[noise]} %"), TextColumn("{task.fields[both]}")
        columns = (rounds, accuracy, noise, pace, traffic, TimeRemainingColumn())
    with Progress(*columns, console=console.out) as progress:
        task = progress.add_task(
            "run",
            total=settings.protocol.rounds,
            method=escape(settings.subject),
            accuracy="-",
            noise=percent(prepared.judge.noise_before()),
            seconds=0.0,
            up=size(0),
            down=size(0),
            both=size(0),
        )
        sums = {"up": 0, "down": 0}

        def show(record: RoundRecord) -> None:
            sums["up"] += record.bytes_up
            sums["down"] += record.bytes_down
            progress.update(
                task,
                completed=record.round + 1,
                accuracy=percent(record.accuracy),
                noise=percent(record.label_noise),
                seconds=record.seconds["round"],
                up=size(sums["up"]),
                down=size(sums["down"]),
                both=size(sums["up"] + sums["down"]),
            )
            log(record)

        return prepared.execute(show, retry=retry)


EVERY = 60.0  # seconds between two lines away from a terminal, at least


class Lines:
    """A run in few lines on stderr: what begins, then one a minute or a tenth of the rounds, whichever is rarer."""

    def __init__(self, prepared: runtime.Run, log: Callable[[RoundRecord], None]) -> None:
        self._prepared, self._log = prepared, log
        self._total = prepared.settings.protocol.rounds
        self._first = self._told = 0  # rounds
        self._began = self._when = 0.0

    def say(self, text: str) -> None:
        console.err.print(f"run: {text}", markup=False, soft_wrap=True)

    def start(self, round: int) -> None:
        self._first = self._told = round
        self._began = self._when = time.monotonic()
        begins = f"goes on at round {round + 1} of {self._total}" if round else f"{self._total} rounds"
        self.say(f"{headline(self._prepared)}; {begins}")

    def round(self, record: RoundRecord) -> None:
        self._log(record)
        done, now = record.round + 1, time.monotonic()
        if now - self._when < EVERY or done - self._told < self._total / 10 or done == self._total:
            return
        self._told, self._when = done, now
        left = (now - self._began) / (done - self._first) * (self._total - done)
        self.say(f"round {done} of {self._total}, accuracy {percent(record.accuracy)} %, {duration(left)} left")


def headline(prepared: runtime.Run) -> str:
    """One line that says what is about to run."""
    settings, scene = prepared.settings, prepared.settings.scenario
    noise = prepared.judge.noise_before()
    known = "" if noise is None else f" ({noise:.1f} % of the labels are wrong)"
    return (
        f"{settings.subject} (preset {settings.preset}, track {settings.track}) on {scene.dataset}: "
        f"{scene.clients} clients, {scene.noise_name}{known}, draw {scene.draw}, seed {settings.seed}, "
        f"{settings.protocol.model}, {settings.protocol.precision} on {prepared.device}"
    )


def fewer(rounds: Sequence[RoundRecord | Point], than: int) -> str:
    """What to add to a mean over the last rounds where fewer have an accuracy; nothing where enough have."""
    measured = sum(record.accuracy is not None for record in rounds)
    return "" if measured >= than else f" (only {measured} measured)"


def result_rows(result: RunResult | Entry, rounds: Sequence[RoundRecord | Point]) -> list[tuple[str, str]]:
    """(name, value) of what a reader looks for first.  rounds: the run's records, or what a leaderboard has of them."""
    accuracy = result.accuracy
    skipped = result.images.get("skipped", 0)
    spread = "" if accuracy.last5_std is None else f" ± {accuracy.last5_std:.2f} over these rounds"
    rows = [
        ("status", result.status if result.failure is None else f"failed: {result.failure.splitlines()[0]}"),
        ("accuracy, mean of last 5 rounds", f"{percent(accuracy.last5_mean)} %{spread}{fewer(rounds, 5)}"),
        ("accuracy, last round", f"{percent(accuracy.final)} %"),
        ("accuracy, mean of last 10 rounds", f"{percent(accuracy.last10_mean)} %{fewer(rounds, 10)}"),
        ("accuracy, best round (oracle)", f"{percent(accuracy.oracle)} %"),
        (
            "label noise, before and after",
            f"{percent(result.label_noise_before)} % -> {percent(result.label_noise_after)} %",
        ),
        ("rounds", str(result.rounds)),
        ("time", duration(result.seconds.get("round", 0.0))),
        ("bytes up, down", f"{size(result.bytes_up)}, {size(result.bytes_down)}"),
        ("images trained", f"{result.images.get('trained', 0):,}" + (f"; {skipped:,} left out" if skipped else "")),
        ("digest", result.digest[:16]),
    ]
    if result.settings.evaluate_on != "test":
        rows.insert(1, ("measured on", result.settings.evaluate_on))
    if result.settings.oracle is not None:
        rows.insert(1, ("oracle", f"{result.settings.oracle}: the noise was removed by the truth; no method's result"))
    return rows


def print_result(result: RunResult, folder: Path, *, as_json: bool) -> None:
    """A table on a terminal, ``name<TAB>value`` lines elsewhere; with --json one JSON object on the last line."""
    if as_json:
        print(json.dumps({**result.model_dump(mode="json"), "folder": str(folder)}))
        return
    print_rows(result, records.load_records(folder), folder)


def print_rows(result: RunResult | Entry, rounds: Sequence[RoundRecord | Point], place: Path) -> None:
    """``result_rows`` under a title.  place: the run's folder, or the entry's file."""
    oracle = f", oracle {result.settings.oracle}," if result.settings.oracle else ""
    title = f"{result.card['title']}{oracle} on {result.settings.scenario.dataset}"
    found, where = result_rows(result, rounds), "folder" if place.is_dir() else "entry"
    if console.out.is_terminal:
        table = Table(title=escape(title), show_header=False, title_justify="left")
        for row in found:
            table.add_row(*map(escape, row))
        console.out.print(table)
        console.out.print(f"{where}: {place}", markup=False, soft_wrap=True)
        return
    print(f"run\t{title}")
    for name, value in found:
        print(f"{name}\t{value}")
    print(f"{where}\t{place}")
