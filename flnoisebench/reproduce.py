"""A paper's tables and figures as commands: run what is missing, and set ours beside what is printed.

What a paper has is data (papers/<name>.toml); this file turns an entry and a scale into runs, measures finished ones,
and finds the published number of each.  Claims, which are judged from the same runs, are in claims.py.  A finished run
is one in its own folder, or what a leaderboard keeps of it.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import scipy  # scipy.stats comes with its first use

from flnoisebench import inputs, papers, protocols, published, records, registry, runtime, scenario
from flnoisebench.executors import ClientError
from flnoisebench.leaderboard import REFERENCE
from flnoisebench.leaderboard import Entry as Kept
from flnoisebench.leaderboard.comparison import paired
from flnoisebench.leaderboard.entries import hardware
from flnoisebench.records import Point, RoundRecord, RunResult
from flnoisebench.report import figures, tolerance
from flnoisebench.scenario import pictures
from flnoisebench.settings import Settings, assignments, from_options

SCALES = ("paper", "short", "smoke")
Options = dict[str, Any]


# -------------------------------------------------------------------------------------------------- entries


@dataclass(frozen=True)
class Entry:
    """A table or figure at a scale.  lines, levels: options of ``run`` by label; runs are lines x levels x draws."""

    name: str
    title: str
    show: str
    options: Options
    lines: Mapping[str, Options]
    levels: Mapping[str, Options]
    scale: str
    scaling: Mapping[str, Any]
    source: str
    numbers: str  # prefix of the published files
    table: str | None = None
    over: str | None = None
    statements: Sequence[str] = ()
    stated: Sequence[Mapping[str, Any]] = ()

    def settings(self, line: str, level: str, draw: int, *, device: str) -> Settings:
        """Of one run.  device: ``cpu`` or ``cuda``, as in settings.from_options."""
        said = {**self.options, **self.levels[level], **self.lines[line]}
        said |= {name: value for name, value in self.scaling.items() if name not in ("about", "share", "draws")}
        said |= {"draw": draw, "set": assignments(said.get("set", {}))}
        if "share" in self.scaling:
            whole = protocols.load(registry.load_dataset(said["dataset"]).protocol).rounds
            said["rounds"] = max(1, math.floor(self.scaling["share"] * whole + 0.5))
        return from_options(said, device=device)

    @property
    def other_data(self) -> str | None:
        """The data set that this scale runs on, where it is not the paper's."""
        ours = self.scaling.get("dataset")
        return ours if ours != self.options.get("dataset") else None


def entries(scale: str = "paper") -> dict[str, Entry]:
    """All tables and figures of the paper by name, in its order.  Raises UnknownName for another scale."""
    if scale not in SCALES:
        raise registry.unknown("scale", scale, SCALES)
    content = papers.read(papers.names()[0])
    found = {}
    for said in content["entries"]:
        special = said.get(scale, {})
        options = {**said.get("options", {}), **special.get("options", {})}
        said = {**said, **special, "options": options}
        lines = said.get("lines", {})
        lines = content["groups"][lines] if isinstance(lines, str) else lines
        found[said["name"]] = Entry(
            name=said["name"],
            title=said["title"],
            show=said["show"],
            options=said["options"],
            lines=lines,
            levels={level_name(level): level for level in said["levels"]},
            scale=scale,
            scaling=content["scales"][scale],
            source=content["source"],
            numbers=content["published"],
            table=said.get("table"),
            over=said.get("over"),
            statements=said.get("statements", ()),
            stated=said.get("stated", ()),
        )
    return found


def entry(name: str, scale: str = "paper") -> Entry:
    """Raises UnknownName with near misses."""
    found = entries(scale)
    if name not in found:
        raise registry.unknown("table or figure", name, [*found, "claims"])
    return found[name]


def level_name(level: Options) -> str:
    """``rho=0.6 tau=0.7``; nothing for a level that says nothing."""
    return " ".join(f"{name}={value}" for name, value in level.items())


# ----------------------------------------------------------------------------------------------------- runs


class Wanted(NamedTuple):
    """A run of an entry."""

    line: str
    level: str
    draw: int
    settings: Settings


def wanted(entry: Entry, *, device: str, draws: int | None = None) -> list[Wanted]:
    """All runs of an entry, the draws slowest, so that a part of them is a whole table of fewer draws."""
    first = {
        (line, level): entry.settings(line, level, 0, device=device) for level in entry.levels for line in entry.lines
    }
    found = []
    for draw in range(draws or entry.scaling["draws"]):
        for (line, level), settings in first.items():
            drawn = settings.scenario.model_copy(update={"draw": draw})  # resolving anew would take ten times as long
            found.append(Wanted(line, level, draw, settings.model_copy(update={"scenario": drawn})))
    return found


@dataclass(frozen=True)
class Done:
    """A finished run of an entry.  folder: its own; None where a leaderboard's entry, the result then, is all of it."""

    line: str
    level: str
    draw: int
    folder: Path | None
    result: RunResult | Kept

    @cached_property
    def rounds(self) -> Sequence[RoundRecord | Point]:
        if isinstance(self.result, Kept):
            return self.result.points
        assert self.folder is not None
        return records.load_records(self.folder)


def present(runs: Iterable[Wanted], out: Path, kept: Mapping[Path, Kept] | None = None) -> list[Done]:
    """Those of them that are over, failed ones among them: below ``out``, else in ``kept`` (``board.kept``).  Raises
    ValueError where a result is damaged, or another run's."""
    found = []
    for run in runs:
        folder = run.settings.folder(out)
        if result := records.result_for(folder, run.settings):
            found.append(Done(run.line, run.level, run.draw, folder, result))
        elif entry := (kept or {}).get(run.settings.folder(Path())):
            found.append(Done(run.line, run.level, run.draw, None, entry))
    return found


def carry_out(
    runs: Sequence[Wanted],
    *,
    data_root: Path,
    out: Path,
    device: str = "auto",
    kept: Mapping[Path, Kept] | None = None,
    workers: int = 1,
    retry: bool = False,
    on_start: Callable[[int, int, Wanted], None] = lambda done, of, run: None,
) -> dict[Path, str]:
    """Run what is not over yet; a stopped run is resumed.  Gives {folder: failure} of runs that a method's failure
    stopped, which stops no other.

    kept: runs that a leaderboard has (``board.kept``), and that are therefore over.
    workers: 1: one after the other, in this process; more: as a sweep, in as many others (on a GPU, so many a card).
    on_start is called by the first only.  Raises MissingData or ValueError where a data set's files are not there.
    """
    failures: dict[Path, str] = {}
    missing: dict[Path, Wanted] = {}
    for run in runs:
        over = present([run], out, kept)
        if not over or (retry and over[0].result.status == "failed"):
            missing.setdefault(run.settings.folder(out), run)
    if workers > 1 and missing:
        outcomes = _swept([run.settings for run in missing.values()], data_root, out, device, workers, retry)
        ended = zip(missing, outcomes, strict=True)  # a sweep's own folders are absolute
        return {folder: outcome.failure or "" for folder, outcome in ended if outcome.status == "failed"}
    for i, (folder, run) in enumerate(missing.items()):
        on_start(i, len(missing), run)
        try:
            runtime.prepare(run.settings, data_root=data_root, out=out, device=device).execute(retry=retry)
        except runtime.AlreadyDone:  # by another process, meanwhile
            continue
        except (ClientError, runtime.MethodError) as error:
            failures[folder] = str(error).splitlines()[0]
    return failures


def _swept(runs: list[Settings], data_root: Path, out: Path, device: str, workers: int, retry: bool) -> list[Any]:
    try:
        from flnoisebench import sweep
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("dask", "distributed"):
            raise
        raise ValueError("several runs at once need Dask: pip install 'flnoisebench[sweep]'") from error
    devices = runtime.pick_devices(device)
    kind = devices[0].type
    if kind == "cuda":
        cards = [one.index for one in devices] if ":" in device else None
        place = sweep.Local(device=kind, runs_per_gpu=workers, cards=cards)
    else:
        place = sweep.Local(device=kind, workers=workers)
    return sweep.Sweep(runs, out=out, data_root=data_root, place=place, device=kind, retry=retry).carry_out()


# ------------------------------------------------------------------------------------------------- measures
#
# A number of a finished run; ``reference`` is the reference method's run at the same level and draw of the same entry,
# or None.


class Measure(NamedTuple):
    unit: str
    of: Callable[[Done, Done | None], float | None]
    better: int = 1  # +1: more is better, -1: less is


def _phi(run: Done, which: slice) -> float | None:
    values = [record.diagnostics["phi"] for record in run.rounds if "phi" in record.diagnostics]
    return statistics.fmean(values[which]) if values else None


def worst_correction(run: Done) -> float | None:
    """The largest change of the label noise over all rounds that changed it, in points: below 0 where it fell each
    time; None where no round changed it."""
    values = [run.result.label_noise_before, *(record.label_noise for record in run.rounds)]
    steps = [b - a for a, b in pairwise(values) if a is not None and b is not None and a != b]
    return max(steps, default=None)


def phi_against_accuracy(run: Done) -> float | None:
    """The larger of Spearman's correlation of phi with the round and of minus that of accuracy with the round: below 0
    where phi falls and accuracy rises.  None where either is missing or never changes."""
    both = [
        (record.round, record.diagnostics["phi"], record.accuracy)
        for record in run.rounds
        if "phi" in record.diagnostics and record.accuracy is not None
    ]
    if len(both) < 3:
        return None
    rounds, phi, accuracy = zip(*both, strict=True)
    if len(set(phi)) == 1 or len(set(accuracy)) == 1:
        return None
    return max(float(scipy.stats.spearmanr(rounds, phi)[0]), -float(scipy.stats.spearmanr(rounds, accuracy)[0]))


def roughness(run: Done) -> float | None:
    """Mean absolute change of the accuracy from round to round over the second half of the run, in points."""
    values = [record.accuracy for record in run.rounds if record.accuracy is not None]
    steps = [abs(b - a) for a, b in pairwise(values[len(values) // 2 :])]
    return statistics.fmean(steps) if steps else None


def time_ratio(run: Done, reference: Done | None) -> float | None:
    """Wall time relative to the reference; None where they ran on different hardware."""
    if reference is None or hardware(run.result.environment) != hardware(reference.result.environment):
        return None
    return run.result.seconds["round"] / reference.result.seconds["round"]


def time_ratio_alone(run: Done, reference: Done | None) -> float | None:
    """The same of two runs that say that nothing else was on their devices: what a claim may rest on."""
    alone = hardware(run.result.environment)["sharing"] == "alone"
    return time_ratio(run, reference) if alone else None


def _upload(run: Done) -> float:
    """Bytes that a client uploads in a round."""
    cohort = run.result.settings.protocol.participation * run.result.settings.scenario.clients
    return run.result.bytes_up / max(run.result.rounds, 1) / cohort


def _second_moments(run: Done) -> float | None:
    """Bytes of a client's fp32 class second moments [J, d, d], of a method that has a dimension d."""
    d = run.result.settings.method_settings.get("d")
    # a leaderboard names no classes; it has a recall of each, where there was a predictor
    classes = len(run.result.last5.recall or ()) if isinstance(run.result, Kept) else run.result.federation["classes"]
    return classes * d * d * 4.0 if d is not None and classes else None


def _share(part: float | None, reference: Done | None) -> float | None:
    return None if part is None or reference is None else 100 * part / _upload(reference)


MEASURES: dict[str, Measure] = {
    "accuracy": Measure("%", lambda run, _: run.result.accuracy.last5_mean),
    "noise before": Measure("%", lambda run, _: run.result.label_noise_before, -1),
    "noise after": Measure("%", lambda run, _: run.result.label_noise_after, -1),
    "worst correction": Measure("points", lambda run, _: worst_correction(run), -1),
    "phi, first round": Measure("", lambda run, _: _phi(run, slice(0, 1)), -1),
    "phi, last five": Measure("", lambda run, _: _phi(run, slice(-5, None)), -1),
    "phi against accuracy": Measure("rank correlation", lambda run, _: phi_against_accuracy(run), -1),
    "roughness": Measure("points a round", lambda run, _: roughness(run), -1),
    "minutes": Measure("min", lambda run, _: run.result.seconds["round"] / 60, -1),
    "time ratio": Measure("times FedAvg", time_ratio, -1),
    "time ratio, both alone": Measure("times FedAvg", time_ratio_alone, -1),
    "upload of a client": Measure("MB a round", lambda run, _: _upload(run) / 1e6, -1),
    "upload over FedAvg's": Measure(
        "%",
        lambda run, reference: None if reference is None else _share(_upload(run) - _upload(reference), reference),
        -1,
    ),
    "covariances of a client": Measure(
        "MB", lambda run, _: None if (own := _second_moments(run)) is None else own / 1e6, -1
    ),
    "covariances, share of FedAvg's upload": Measure(
        "%", lambda run, reference: _share(_second_moments(run), reference), -1
    ),
}

SHOWN: dict[str, tuple[str, ...]] = {
    "accuracy": ("accuracy",),
    "runtime": ("minutes", "time ratio"),
    "curves": ("accuracy", "roughness"),
    "orthogonality": ("phi, first round", "phi, last five", "accuracy"),
    "correction": ("noise before", "noise after", "accuracy"),
    "clients": ("noise before", "noise after"),
    "sensitivity": ("accuracy",),
    "costs": (
        "upload of a client", "upload over FedAvg's", "covariances of a client",
        "covariances, share of FedAvg's upload",
    ),
    "partition": (),
    "noise": ("noise before",),
    "toy-densities": (),
    "toy-projections": (),
}  # fmt: skip


def measured(runs: Sequence[Done], measure: str) -> dict[tuple[str, str], dict[int, float]]:
    """{(line, level): {draw: number}} of the complete runs that have one."""
    complete = [run for run in runs if run.result.status == "complete"]
    reference = {(run.level, run.draw): run for run in complete if run.result.settings.method == REFERENCE}
    found: dict[tuple[str, str], dict[int, float]] = {}
    for run in complete:
        value = MEASURES[measure].of(run, reference.get((run.level, run.draw)))
        if value is not None:
            found.setdefault((run.line, run.level), {})[run.draw] = value
    return found


# -------------------------------------------------------------------------------------- ours beside theirs


@dataclass(frozen=True)
class Line:
    """One number of ours, and of the paper.  by_draw: ours.  difference, low, high: of ours minus the published one,
    with Student's 95 % interval of our mean over draws (None below two).  failed, missing: runs that give no number."""

    level: str
    line: str
    measure: str
    unit: str
    by_draw: Mapping[int, float] = field(default_factory=dict)
    published: float | None = None
    failed: int = 0
    missing: int = 0

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.by_draw.values()) if self.by_draw else None

    @property
    def std(self) -> float | None:
        """Over draws."""
        return statistics.stdev(self.by_draw.values()) if len(self.by_draw) > 1 else None

    def beside(self) -> dict[str, float | None]:
        if self.published is None or not self.by_draw:
            return {"difference": None, "low": None, "high": None}
        numbers = paired(self.by_draw, dict.fromkeys(self.by_draw, self.published))
        return {"difference": numbers["mean"], "low": numbers["low"], "high": numbers["high"]}


def compared(
    entry: Entry, runs: Sequence[Wanted], done: Sequence[Done], *, data_root: Path | None = None
) -> list[Line]:
    """The entry's numbers, ours beside the published.  done: those of the runs that are over (``present``).

    data_root: of entries without runs, whose scenarios are drawn here.
    """
    if not entry.lines:
        return _drawn(entry, data_root or Path())
    found = []
    for measure in SHOWN[entry.show]:
        values = measured(done, measure)
        for level in entry.levels:
            for line in entry.lines:
                own = [run for run in done if (run.line, run.level) == (line, level)]
                asked = sum((run.line, run.level) == (line, level) for run in runs)
                by_draw = values.get((line, level), {})
                number = printed(entry, line, level, measure)
                if not by_draw and number is None and len(own) == asked:
                    continue  # a number that this method has not, such as an orthogonality index
                failed = sum(run.result.status == "failed" for run in own)
                unit = MEASURES[measure].unit
                found.append(Line(level, line, measure, unit, by_draw, number, failed, asked - len(own)))
    return found


def printed(entry: Entry, line: str, level: str, measure: str) -> float | None:
    """What the paper prints for this cell; None where it does not."""
    said = entry.levels[level]
    if measure == "accuracy" and entry.table is not None:
        for cell in published.read(f"{entry.numbers}_tables"):
            if (cell["table"], cell["method"]) == (entry.table, line) and all(
                not cell[name] or float(cell[name]) == said.get(name) for name in ("rho", "tau")
            ):
                return float(cell["accuracy"])
    if entry.show == "runtime":
        column = {"minutes": "minutes_on_one_rtx_a6000", "time ratio": "ratio_to_fedavg"}[measure]
        for row in published.read(f"{entry.numbers}_runtime"):
            if row["method"] == line:
                return float(row[column])
    place = list(entry.levels).index(level)
    for one in entry.stated:
        if one["measure"] == measure and one.get("level", place) == place and one.get("line", line) == line:
            return number_in(_statement(entry, one["what"], one["setting"]), one["unit"])
    return None


def _statement(entry: Entry, what: str, setting: str) -> str:
    for row in published.read(f"{entry.numbers}_statements"):
        if (row["what"], row["setting"]) == (what, setting):
            return row["stated"]
    raise ValueError(f"{entry.numbers}_statements.csv has no {what!r} at {setting!r}")


def number_in(text: str, unit: str) -> float:
    """The first number before a unit: ``number_in("163,840 = 1.4 % of 11.2 million", "%")`` is 1.4."""
    match = re.search(rf"(\d*\.?\d+)\s*{re.escape(unit)}", text)
    if match is None:
        raise ValueError(f"{text!r} has no number in {unit}")
    return float(match[1])


def statements(entry: Entry) -> list[tuple[str, str, str]]:
    """(what, setting, stated) of the paper's text that concerns this entry and is no single number."""
    return [
        (row["what"], row["setting"], row["stated"])
        for row in published.read(f"{entry.numbers}_statements")
        if any(row["what"].startswith(start) for start in entry.statements)
    ]


def notes(entry: Entry, lines: Sequence[Line], from_leaderboard: int = 0) -> list[str]:
    """What a reader must know before reading the differences.  from_leaderboard: how many runs are."""
    found = []
    if from_leaderboard:
        found.append(
            f"{from_leaderboard} of the runs are what the leaderboard keeps of them, without a method's own numbers of "
            "each round"
        )
    if entry.other_data and any(line.published is not None for line in lines):
        found.append(
            f"scale {entry.scale} runs on {entry.other_data}, and the paper on {entry.options['dataset']}: the "
            "differences say nothing about the method"
        )
    elif entry.scaling.get("share", 1.0) != 1.0 and entry.lines:
        found.append(
            f"scale {entry.scale}: {entry.scaling['share']:g} of the paper's rounds, so differences are no deviations"
        )
    if entry.show == "runtime":
        found.append(
            "minutes are of this machine, the paper's of an RTX A6000; the ratios are what can be compared, of "
            "runs that shared card and cores with no other"
        )
    if any(line.beside()["low"] is not None for line in lines):
        found.append(
            "each interval is of our mean over draws alone: the published number counts as exact in it, though its own "
            "draw might have been another, and one line in twenty misses by chance"
        )
    if entry.show.startswith("toy"):
        found.append(
            "the paper calls the boundary of a large eps2 almost circular, and it is a hyperbola for every eps2"
        )
    return found


# ----------------------------------------------------------------------------------- entries without runs


def scenes(entry: Entry, data_root: Path) -> list[tuple[str, scenario.Manifest, Any]]:
    """(level, manifest, data set's class names) of an entry that shows scenarios, of draw 0."""
    found = []
    for level in entry.levels:
        # of a scenario the method is no part: any serves to complete the settings
        bare = replace(entry, lines={"": {"method": REFERENCE}})
        spec = bare.settings("", level, 0, device="cpu").scenario
        dataset = registry.load_dataset(spec.dataset)
        arrays = dataset.load(data_root)
        found.append(
            (level, inputs.build_scenario(spec, dataset, arrays, data_root), arrays.classes or dataset.classes)
        )
    return found


def _drawn(entry: Entry, data_root: Path) -> list[Line]:
    if entry.show.startswith("toy"):
        return [
            Line(f"eps2={eps2:g}", name, measure, "", {0: value})
            for eps2 in tolerance.EPS2
            for name, measure, value in _toy_numbers(eps2)
        ]
    found = []
    for level, (scene, truth), _ in scenes(entry, data_root):
        facts = scenario.summary(scene, truth)
        sizes = [row["size"] for row in facts["clients"]]
        classes = statistics.fmean(row["classes"] for row in facts["clients"])
        found += [
            Line(level, "", "smallest client", "samples", {0: float(min(sizes))}),
            Line(level, "", "largest client", "samples", {0: float(max(sizes))}),
            Line(level, "", "classes of a client", "mean", {0: classes}),
        ]
        if facts["realised_rate"] is not None:
            number = printed(entry, "", level, "noise before")
            found.append(Line(level, "", "noise before", "%", {0: 100 * facts["realised_rate"]}, number))
    return found


def _toy_numbers(eps2: float) -> list[tuple[str, str, float]]:
    found = []
    for name, variances in (("class A", tolerance.A), ("class B", tolerance.B)):
        a = tolerance.tolerant(variances, eps2)
        found.append((name, "ratio of its variances", max(a) / min(a)))
        found.append((name, "density at the centre", 1 / (2 * math.pi * math.sqrt(a[0] * a[1]))))
    limit = tolerance.boundary(eps2)
    found.append((f"boundary: {limit.kind}", "slope of its asymptotes", limit.slope))
    return found


# -------------------------------------------------------------------------------------------------- figures

FIGURES = {"accuracy": None, "runtime": "costs"}  # kinds of figures by what an entry shows; else of the same name


def kind_of_figure(entry: Entry) -> str | None:
    """None of a table, which has none."""
    return FIGURES.get(entry.show, entry.show)


def draw(entry: Entry, done: Sequence[Done], path: Path, *, data_root: Path) -> bool:
    """Write the entry's figure from the runs that are over (``present``); False where it is a table, or nothing is
    over."""
    kind = kind_of_figure(entry)
    if kind is None:
        return False
    if kind == "partition":
        for _, (scene, truth), names in scenes(entry, data_root):
            pictures.draw(path, scene, truth, names=names)
        return True
    if kind == "noise":
        facts = [(level, scenario.summary(*scene)) for level, scene, _ in scenes(entry, data_root)]
        figures.save(figures.noise(facts), path)
        return True
    if not entry.lines:
        figures.save(figures.draw(kind), path)
        return True
    shown = [
        figures.Run(run.line, run.level, run.result.settings, run.rounds, run.result)
        for run in done
        if run.result.status == "complete"
    ]
    if not shown:
        return False
    if kind == "sensitivity" and len({figures.setting(run.settings, entry.over or "") for run in shown}) < 2:
        return False
    figures.save(figures.draw(kind, shown, entry.over), path)
    return True
