"""Figures of runs, for papers: vector output, colours that the colour-blind can tell apart, and marks beside colours.

Every function takes runs (``load``) and gives a matplotlib Figure; ``save`` writes it, as the same bytes for the same
runs.  matplotlib is an extra (``plots``) and is imported when something is drawn.

Runs that differ by draw and seed alone are one line: their mean, with a band of a standard deviation around it.
Whatever else differs parts them: what is of the scenario into panels, all else into lines (``named``).
"""

from __future__ import annotations

import json
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, cast

import numpy as np

from flnoisebench import registry
from flnoisebench.leaderboard import Entry, entries
from flnoisebench.leaderboard.entries import hardware
from flnoisebench.leaderboard.naming import told_apart
from flnoisebench.leaderboard.rows import budget_of, default_preset
from flnoisebench.records import Point, RoundRecord, RunResult
from flnoisebench.report import tolerance
from flnoisebench.settings import Settings, flat

FORMATS = (".svg", ".pdf", ".png")
# Okabe and Ito's palette ("Color Universal Design", 2008), the yellow left out: it vanishes on white
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
MARKERS = "osD^vPX*<>"
STYLES = ("-", "--", ":", "-.")
WIDTH = 3.4  # inches of a panel: two fit a page's width
LETTER = 0.06  # inches of a letter, on average
LINE = 0.15  # inches of a line of a legend
BELOW = 0.3  # inches below the panels


class Run(NamedTuple):
    """A run as figures need it.  label: of its line; panel: what it shares a panel with; result: None if unfinished,
    an Entry where a leaderboard's is all that there is."""

    label: str
    panel: str
    settings: Settings
    rounds: Sequence[RoundRecord | Point]
    result: RunResult | Entry | None

    @property
    def outcome(self) -> RunResult | Entry | None:
        """The result of a complete run; None of another, whose accuracy and costs are no method's."""
        return self.result if self.result is not None and self.result.status == "complete" else None

    @property
    def federation(self) -> dict[str, Any]:
        if self.result is None:
            raise ValueError(f"the run of {self.label} in {self.panel} is unfinished, and this needs its result")
        if isinstance(self.result, Entry):
            raise ValueError(
                f"of {self.label} in {self.panel} there is what a leaderboard keeps, which says nothing of single "
                "clients: this needs the run's folder (`scenario show` draws the scenario)"
            )
        return self.result.federation


def load(folders: Iterable[Path]) -> list[Run]:
    """The runs in or below these folders; of a leaderboard's folder, or one in it, its entries, or of an entry's file
    that one.  Those of a folder are in the order of their scenarios, methods and values.  A run that is there twice (in
    its folder and in a leaderboard, or in a copy) counts once, as its folder has it.  Raises ValueError where there is
    none, or one is damaged."""
    every: dict[tuple[Path, str], Run] = {}
    for top in folders:
        found = {path: Run("", "", *one) for path, one in entries.seen_below(top).items()}
        for path in sorted(found, key=lambda path: _order(path, found[path].settings)):
            run = found[path]
            which = (run.settings.folder(Path()), run.result.digest) if run.result else (path.resolve(), "")
            if which not in every or isinstance(every[which].result, Entry):
                every[which] = run
    return named(every.values())


def _order(path: Path, settings: Settings) -> tuple[Any, ...]:
    """By values, and numbers by their size, where folders are named after a digest: no legend should follow that."""
    values = [
        (name, 0, value, "") if isinstance(value, int | float) else (name, 1, 0, str(value))
        for name, value in {**settings.changed, **settings.protocol_overrides}.items()
    ]
    return (path.parts[:-2], values, path)  # <dataset>/<scenario>/<method>/<digest of the settings>/<draw and seed>


def named(runs: Iterable[Run]) -> list[Run]:
    """The runs with labels and panels that say what differs among them, draw and seed apart: labels what is of the
    training, panels what is of the scenario and the images of the evaluation; with one panel, all of it."""
    runs = list(runs)
    labels, panels = _labels([run.settings for run in runs]), _panel_names([run.settings for run in runs])
    return [runs[i]._replace(label=labels[i], panel=panels[i]) for i in range(len(runs))]


def _labels(every: Sequence[Settings]) -> dict[int, str]:
    names = told_apart({i: _method(one, every) for i, one in enumerate(every)}, lambda i: {"track": every[i].track})
    found: dict[int, str] = {}
    for dataset in {one.scenario.dataset for one in every}:  # which has a budget of its own
        own = {i: name for i, name in names.items() if every[i].scenario.dataset == dataset}
        found |= told_apart(own, lambda i: _training(every[i]))
    return found


def _method(settings: Settings, among: Sequence[Settings]) -> str:
    """The method with what distinguishes it from its default, less what all runs of it among these share."""
    parts = [settings.subject]
    alike = [other for other in among if other.subject == settings.subject]
    if settings.preset != default_preset(settings.method) and len({other.preset for other in alike}) > 1:
        parts.append(settings.preset)
    absent = object()
    parts += [
        f"{name}={value}"
        for name, value in settings.changed.items()
        if any(other.changed.get(name, absent) != value for other in alike)
    ]
    return ", ".join(parts)


def _training(settings: Settings) -> dict[str, Any]:
    """All of the settings that changes how a method trains, under the names of the tables' columns."""
    return {
        **budget_of(settings),
        "last_batch": settings.protocol.last_batch,
        "deterministic": settings.deterministic,
        **dict(flat(settings.method_settings, "settings.")),
    }


def _panel_names(every: Sequence[Settings]) -> dict[int, str]:
    parts = [_place(one) for one in every]
    differing = [len(set(same)) > 1 for same in zip(*parts, strict=True)]
    names = {i: ", ".join(part for part, it in zip(own, differing, strict=True) if it) for i, own in enumerate(parts)}
    # what no slug prints is said field by field
    names = told_apart(names, lambda i: dict(flat({**every[i].scenario.decisive, "draw": None})))
    return {i: name or ", ".join(parts[i]).removesuffix(", on test") for i, name in names.items()}


def _place(settings: Settings) -> tuple[str, ...]:
    """Data set, noise, partition, clients and images of the evaluation, in words."""
    scene = settings.scenario
    return scene.dataset, *scene.slug.split("_")[:2], f"{scene.clients} clients", f"on {settings.evaluate_on}"


def setting(settings: Settings, name: str) -> Any:
    """The value of a setting: of the method (``alpha``), or protocol.NAME, partition.NAME, noise.NAME, clients.

    Raises UnknownName with near misses.
    """
    scene = settings.scenario
    places = {
        **settings.method_settings,
        "clients": scene.clients,
        "protocol": settings.protocol.model_dump(mode="json"),
        "partition": scene.partition.model_dump(mode="json"),
        "noise": scene.noise.model_dump(),
    }
    known = dict(flat(places))
    if name not in known:
        raise registry.unknown("setting of these runs", name, known)
    return known[name]


def _with(config: Any, path: Sequence[str], value: Any) -> Any:
    """The settings, or a table in them, with another value at a path."""
    head, *rest = path
    if isinstance(config, dict):
        return {**config, head: _with(config[head], rest, value) if rest else value}
    return config.model_copy(update={head: _with(getattr(config, head), rest, value) if rest else value})


def _without(settings: Settings, name: str, value: Any) -> Settings:
    """As if ``setting(settings, name)`` were ``value``, and nobody had set it by hand."""
    first, *rest = name.split(".")
    if first in ("noise", "partition") or name == "clients":
        return cast(Settings, _with(settings, ("scenario", first, *rest), value))
    if first == "protocol":
        return cast(Settings, _with(settings, (first, *rest), value))
    changed = {other: said for other, said in settings.changed.items() if other != name}
    return cast(Settings, _with(settings, ("method_settings", first, *rest), value)).model_copy(
        update={"changed": changed}
    )


# -------------------------------------------------------------------------------------------------- drawing


def _matplotlib() -> Any:
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise ValueError("figures need matplotlib: pip install 'flnoisebench[plots]'") from error
    return matplotlib


STYLE = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.5,
    "legend.frameon": False,
    "legend.fontsize": 7,
    "lines.linewidth": 1.2,
    "pdf.fonttype": 42,  # TrueType: publishers refuse type 3
    "svg.hashsalt": "flnoisebench",  # else ids change with every drawing
}


def check_format(path: Path) -> None:
    """Raises ValueError for an ending that is not of FORMATS."""
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"{path}: a figure's name ends in {', '.join(FORMATS)}")


def save(figure: Any, path: Path) -> None:
    """Write it; the ending says how.  Raises ValueError for another ending."""
    check_format(path)
    dates = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}, ".png": {"Software": None}}
    path.parent.mkdir(parents=True, exist_ok=True)
    with _matplotlib().rc_context(STYLE):
        figure.savefig(path, metadata=dates[path.suffix.lower()], dpi=200)


def _panels(rows: int, columns: int, height: float = 2.4, **options: Any) -> tuple[Any, Any]:
    """(figure, axes [rows, columns])."""
    _matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH * max(columns, 1.2), height * rows + BELOW), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def _looks(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Colour, marker and dash of each name: two that share a colour differ in the others."""
    return {
        name: {
            "color": COLOURS[i % len(COLOURS)],
            "marker": MARKERS[i % len(MARKERS)],
            "linestyle": STYLES[(i // len(COLOURS)) % len(STYLES)],
            "markersize": 3.5,
        }
        for i, name in enumerate(dict.fromkeys(names))
    }


def _wrapped(text: str, letters: int = 48) -> str:
    """In lines of so many letters; by default as wide as a panel."""
    return textwrap.fill(_literal(text), letters, break_long_words=False, break_on_hyphens=False)


def _literal(text: str) -> str:
    """As matplotlib prints it as it is: between two dollars it would read a formula."""
    return text.replace("$", r"\$")


def _series(runs: Iterable[Run], value: Callable[[RoundRecord | Point], float | None]) -> tuple[Any, Any, Any]:
    """(rounds from 1, mean, standard deviation) over runs; a round without a number in some run is left out, a
    deviation is 0 where there is one run."""
    columns: dict[int, list[float]] = defaultdict(list)
    count = 0
    for run in runs:
        count += 1
        for record in run.rounds:
            if (number := value(record)) is not None:
                columns[record.round + 1].append(number)
    whole = {x: values for x, values in sorted(columns.items()) if len(values) == count}
    x = np.array(list(whole))
    mean = np.array([fmean(values) for values in whole.values()])
    deviation = np.array([np.std(values, ddof=1) if count > 1 else 0.0 for values in whole.values()])
    return x, mean, deviation


def on_other_draws(runs: Iterable[Run]) -> list[str]:
    """Of each panel whose lines are means over different draws, what its caption must say: one draw can be fifteen
    points harder than the next."""
    found = []
    for panel, inside in _grouped(runs, lambda run: run.panel).items():
        draws = {
            label: " ".join(map(str, sorted({run.settings.repetition for run in line})))
            for label, line in _grouped(inside, lambda run: run.label).items()
        }
        if len(set(draws.values())) > 1:
            said = "; ".join(f"{label} ({which})" for label, which in draws.items())
            found.append(f"{panel}: not all on the same draws, so compare with care: {said}")
    return found


def _curve(
    axes: Any, runs: Sequence[Run], value: Callable[[RoundRecord | Point], float | None], label: str, look: Any
) -> bool:
    """Draw it; False, and nothing drawn, where no run has a number."""
    x, mean, deviation = _series(runs, value)
    if not len(x):
        return False
    axes.plot(x, mean, label=label, markevery=max(1, len(x) // 8), **look)
    axes.xaxis.get_major_locator().set_params(integer=True)  # there is no round 2.5
    if deviation.any():
        axes.fill_between(x, mean - deviation, mean + deviation, color=look["color"], alpha=0.18, lw=0)
    return True


def _grouped(runs: Iterable[Run], key: Callable[[Run], Any]) -> dict[Any, list[Run]]:
    found: dict[Any, list[Run]] = defaultdict(list)
    for run in runs:
        found[key(run)].append(run)
    return dict(found)


def _accuracy(record: RoundRecord | Point) -> float | None:
    return record.accuracy


def _noise(record: RoundRecord | Point) -> float | None:
    return record.label_noise


def curves(runs: Sequence[Run]) -> Any:
    """Accuracy by round, a panel a scenario, a line a method with its settings."""
    panels = _grouped(runs, lambda run: run.panel)
    looks = _looks(run.label for run in runs)
    figure, axes = _panels(1, len(panels), height=3.0, sharey=True)
    drawn = False
    for place, (panel, inside) in zip(axes[0], panels.items(), strict=True):
        for label, line in _grouped(inside, lambda run: run.label).items():
            drawn |= _curve(place, line, _accuracy, label, looks[label])
        place.set(xlabel="round", title=_wrapped(panel))
    if not drawn:
        raise ValueError("none of these runs has a round with an accuracy")
    axes[0, 0].set_ylabel("accuracy (%)")
    _legend(figure, axes)
    return figure


def _legend(figure: Any, axes: Any) -> None:
    """One for all panels, below them, for which the figure grows where it is long."""
    marks: dict[str, Any] = {}
    for place in axes.flat:
        handles, labels = place.get_legend_handles_labels()
        marks |= dict(zip(labels, handles, strict=True))
    letters = int(figure.get_figwidth() / LETTER)
    beside = letters // (max(map(len, marks), default=0) + 8)  # with a mark and gaps
    columns = max(1, min(len(marks), 3, beside))
    names = [_wrapped(name, letters - 8) for name in marks]
    lines = sum(name.count("\n") + 1 for name in names) / columns
    figure.set_figheight(figure.get_figheight() + max(0.0, LINE * lines - BELOW))
    figure.legend(list(marks.values()), names, loc="outside lower center", ncols=columns)


def _stacked(
    runs: Sequence[Run],
    upper: Callable[[RoundRecord | Point], float | None],
    title: str,
    missing: str,
    *,
    steps: bool = False,
) -> Any:
    """Two panels over one axis of rounds (no second y axis, whose scale could say anything)."""
    lines = _lines(runs)
    looks = _looks(lines)
    figure, axes = _panels(2, 1, sharex=True)
    drawn = False
    for name, line in lines.items():
        look = looks[name]
        _curve(axes[1, 0], line, _accuracy, name, look)
        drawn |= _curve(axes[0, 0], line, upper, name, {**look, "drawstyle": "steps-post"} if steps else look)
    if not drawn:
        raise ValueError(missing)
    axes[0, 0].set_ylabel(title)
    axes[1, 0].set(xlabel="round", ylabel="accuracy (%)")
    _legend(figure, axes)
    return figure


def _names(runs: Sequence[Run]) -> list[str]:
    """The name of each run's line: label or panel where that is enough, else both."""
    if len({run.panel for run in runs}) == 1:
        return [run.label for run in runs]
    if len({run.label for run in runs}) == 1:
        return [run.panel for run in runs]
    return [f"{run.label}, {run.panel}" for run in runs]


def _lines(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """The runs of each line, by its name."""
    lines: dict[str, list[Run]] = defaultdict(list)
    for name, run in zip(_names(runs), runs, strict=True):
        lines[name].append(run)
    return dict(lines)


def orthogonality(runs: Sequence[Run]) -> Any:
    """The orthogonality index phi and accuracy, by round."""
    return _stacked(
        runs, lambda record: record.diagnostics.get("phi"), "orthogonality index φ",
        "none of these runs has the diagnostic phi: methods with class covariances report it; no leaderboard keeps it",
    )  # fmt: skip


def correction(runs: Sequence[Run]) -> Any:
    """Label noise and accuracy, by round: through correction, under one or several partitions."""
    return _stacked(runs, _noise, "label noise (%)", "of none of these runs the true labels are known", steps=True)


def clients(runs: Sequence[Run]) -> Any:
    """Wrong labels of each client before and after, a panel a line (mean over its complete runs)."""
    lines = _lines(runs)
    figure, axes = _panels(1, len(lines), height=2.6, sharey=True)
    for place, (name, line) in zip(axes[0], lines.items(), strict=True):
        pairs = [
            (one.wrong_labels_before, one.wrong_labels_after)
            for one in (run.outcome for run in line)
            if isinstance(one, RunResult) and one.wrong_labels_before is not None and one.wrong_labels_after is not None
        ]
        if not pairs:
            raise ValueError(
                f"{name}: no complete run says how many labels of each client are wrong: its data set has no truth, or "
                "it was run by a version that did not write it down; a leaderboard does not keep it"
            )
        before, after = (np.mean([pair[i] for pair in pairs], axis=0) for i in (0, 1))
        where = np.arange(len(before))
        place.bar(where - 0.2, before, 0.4, color=COLOURS[0], label="before correction")
        place.bar(where + 0.2, after, 0.4, color=COLOURS[1], hatch="////", edgecolor="white", lw=0, label="after")
        place.set(xlabel="client", title=_wrapped(name))
        place.grid(axis="x", visible=False)
    axes[0, 0].set_ylabel("wrongly labelled samples")
    _legend(figure, axes)
    return figure


def sensitivity(runs: Sequence[Run], over: str) -> Any:
    """Accuracy by round for each value of a setting, a panel for all runs that differ in it alone, draw and seed apart;
    and, a line for each such panel, the accuracy that complete runs reached over the setting, with a standard deviation
    where there are several.

    over: a setting's name, as ``setting`` takes it.  Raises ValueError where it has one value only.
    """
    said = [setting(run.settings, over) for run in runs]
    values = [_point(value) for value in said]
    ordered = sorted(set(values), key=lambda value: (isinstance(value, str), value))
    if len(ordered) < 2:
        raise ValueError(f"{over} is {ordered[0]} in all of these runs; its effect needs two values or more")
    first = said[values.index(ordered[0])]
    alike = named(run._replace(settings=_without(run.settings, over, first)) for run in runs)
    lines: dict[str, dict[Any, list[Run]]] = defaultdict(lambda: defaultdict(list))
    for name, run, value in zip(_names(alike), alike, values, strict=True):
        lines[name][value].append(run)
    figure, axes = _panels(1, len(lines) + 1, height=3.0)
    colours = _looks(str(value) for value in ordered)
    for at, (name, by_value) in zip(axes[0], lines.items(), strict=False):
        for value in ordered:
            if value in by_value:
                _curve(at, by_value[value], _accuracy, f"{over} = {_tick(value)}", colours[str(value)])
        at.set(xlabel="round", ylabel="accuracy (%)", title=_wrapped(name) if len(lines) > 1 else "")
        at.legend(ncols=2 if len(over) < 12 else 1)
    last = axes[0, -1]
    numeric = all(isinstance(value, int | float) for value in ordered)
    place = {value: value if numeric else i for i, value in enumerate(ordered)}
    looks = _looks(lines)
    for name, by_value in lines.items():
        points = []
        for value, line in by_value.items():
            reached = [run.outcome.accuracy.last5_mean for run in line if run.outcome is not None]
            known = [number for number in reached if number is not None]
            if known:
                points.append((place[value], fmean(known), float(np.std(known, ddof=1)) if len(known) > 1 else 0.0))
        if points:
            x, mean, deviation = zip(*sorted(points), strict=True)
            last.errorbar(x, mean, yerr=deviation if any(deviation) else None, label=name, capsize=2, **looks[name])
    if numeric and min(ordered) > 0 and max(ordered) / min(ordered) >= 10:
        last.set_xscale("log")
        last.xaxis.set_minor_formatter("")
    if numeric:
        last.set_xticks(ordered, list(map(_tick, ordered)))
    else:
        last.set_xticks(list(place.values()), list(map(_tick, place)))
    last.set(xlabel=over, ylabel="accuracy, mean of last five rounds (%)")
    if len(lines) > 1:
        last.legend()
    return figure


def _point(value: Any) -> Any:
    """A setting's value as one of an axis: a number, or a text, which lists and nothing at all become."""
    if isinstance(value, int | float | str):
        return value
    return "none" if value is None else json.dumps(value)


def _tick(value: Any) -> str:
    """A value of ``_point`` with all of its digits: two that differ have two names.  Flags as --set takes them."""
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value).removesuffix(".0") if isinstance(value, float) else _literal(str(value))


COSTS: tuple[tuple[str, Callable[[RunResult | Entry], float]], ...] = (
    ("upload (MB a round)", lambda result: result.bytes_up / max(result.rounds, 1) / 1e6),
    ("download (MB a round)", lambda result: result.bytes_down / max(result.rounds, 1) / 1e6),
    ("time (s a round)", lambda result: result.seconds.get("round", 0.0) / max(result.rounds, 1)),
    ("images with gradient (a round)", lambda result: result.images.get("trained", 0) / max(result.rounds, 1)),
    ("peak memory (MB)", lambda result: result.peak_memory / 1e6),
)


def costs(runs: Sequence[Run]) -> Any:
    """Communication and computation of complete runs: a panel a cost, a bar a method with its settings in a scenario on
    one machine (mean over its runs)."""
    named_runs = zip(_names(runs), runs, strict=True)
    results = [(name, run.outcome) for name, run in named_runs if run.outcome is not None]
    if not results:
        raise ValueError("none of these runs is complete, and costs are read from results")
    bars = told_apart({i: name for i, (name, _) in enumerate(results)}, lambda i: hardware(results[i][1].environment))
    lines: dict[str, list[RunResult | Entry]] = defaultdict(list)
    for i, name in bars.items():
        lines[name].append(results[i][1])
    figure, axes = _panels(len(COSTS), 1, height=0.35 + 0.2 * len(lines))
    figure.set_figwidth(figure.get_figwidth() + LETTER * max(map(len, lines)))
    for place, (title, cost) in zip(axes[:, 0], COSTS, strict=True):
        means = [fmean(cost(result) for result in line) for line in lines.values()]
        drawn = place.barh(list(map(_literal, lines)), means, color=COLOURS[0], height=0.6)
        place.bar_label(drawn, fmt="%.4g", padding=2, fontsize=7)
        place.invert_yaxis()
        place.set_xlim(0, max(means) * 1.18 or 1)
        place.grid(axis="y", visible=False)
        place.set_title(title, loc="left")
    return figure


def noise(facts: Sequence[tuple[str, dict[str, Any]]]) -> Any:
    """Right and wrong labels of each client, a panel a scenario.  facts: (title, scenario summary) pairs.

    Raises ValueError where the true labels are not known.
    """
    columns = min(2, len(facts))
    rows = -(-len(facts) // columns)
    figure, axes = _panels(rows, columns, height=2.0, sharey=True)
    for place, (title, said) in zip(axes.flat, facts, strict=False):
        if said["realised_rate"] is None:
            raise ValueError(f"{title}: the true labels are not known, so neither is the noise")
        sizes = np.array([row["size"] for row in said["clients"]])
        wrong = sizes * np.array([row["realised"] for row in said["clients"]])
        where = np.arange(len(sizes))
        place.bar(where, sizes - wrong, color=COLOURS[0], label="right labels")
        place.bar(where, wrong, bottom=sizes - wrong, color=COLOURS[1], hatch="////", edgecolor="white", lw=0,
                  label="wrong labels")  # fmt: skip
        place.set(xlabel="client", title=_wrapped(f"{title}: {100 * said['realised_rate']:.1f} % wrong"))
        place.grid(axis="x", visible=False)
    for place in list(axes.flat)[len(facts) :]:
        place.set_axis_off()
    for row in axes:
        row[0].set_ylabel("samples")
    _legend(figure, axes)
    return figure


def noise_of_runs(runs: Sequence[Run]) -> Any:
    """``noise`` of the scenarios of these runs, each once; as an oracle left it, where there was one."""
    found = {}
    for run in runs:
        oracle = f", oracle {run.settings.oracle}" if run.settings.oracle else ""
        found[f"{run.panel}, draw {run.settings.scenario.draw}{oracle}"] = run.federation
    return noise(list(found.items()))


# -------------------------------------------------------------------------------- the toy example, of no run


def toy_densities() -> Any:
    """Densities of the toy example's two classes and their decision boundary, a panel an eps^2."""
    figure, axes = _panels(1, len(tolerance.EPS2), height=2.8, sharex=True, sharey=True)
    line = np.linspace(-6, 6, 241)
    x, y = np.meshgrid(line, line)
    for place, eps2 in zip(axes[0], tolerance.EPS2, strict=True):
        both = [tolerance.density(x, y, tolerance.tolerant(one, eps2)) for one in (tolerance.A, tolerance.B)]
        for values, colour in zip(both, COLOURS, strict=False):
            place.contour(x, y, values, levels=values.max() * np.array([0.05, 0.2, 0.4, 0.6, 0.8]), colors=colour,
                          linewidths=0.8)  # fmt: skip
        limit = tolerance.boundary(eps2)
        place.contour(x, y, limit.c_x * x**2 + limit.c_y * y**2 - limit.c, levels=[0], colors="black", linewidths=1.4,
                      linestyles="--")  # fmt: skip
        place.set(xlabel="x", aspect="equal", title=f"ε² = {eps2:g}: peaks {both[0].max():.3f} and {both[1].max():.3f}")
    axes[0, 0].set_ylabel("y")
    for label, style in (("class A", {"color": COLOURS[0]}), ("class B", {"color": COLOURS[1]}),
                         ("equal density", {"color": "black", "linestyle": "--"})):  # fmt: skip
        axes[0, 0].plot([], [], label=label, **style)
    _legend(figure, axes)
    return figure


def toy_projections() -> Any:
    """Samples of the toy example and their projections on both axes, a column an eps^2."""
    figure, axes = _panels(3, len(tolerance.EPS2), height=2.0, sharey="row")
    bins = np.linspace(-8, 8, 49)
    for column, eps2 in enumerate(tolerance.EPS2):
        for name, colour, marker, points in zip("AB", COLOURS, "ox", tolerance.samples(eps2, 400), strict=False):
            axes[0, column].scatter(
                *points.T, s=6, marker=marker, color=colour, alpha=0.6, lw=0.6, label=f"class {name}"
            )
            for axis in (0, 1):
                axes[1 + axis, column].hist(points[:, axis], bins=bins, density=True, histtype="step", color=colour,
                                            linestyle="-" if name == "A" else "--")  # fmt: skip
        axes[0, column].set(xlim=(-8, 8), ylim=(-8, 8), title=f"ε² = {eps2:g}")
        axes[1, column].set(xlabel="projection on x", xlim=(-8, 8))
        axes[2, column].set(xlabel="projection on y", xlim=(-8, 8))
    for row, title in enumerate(("y", "density", "density")):
        axes[row, 0].set_ylabel(title)
    _legend(figure, axes)
    return figure


# ---------------------------------------------------------------------------------------------------- kinds


class Kind(NamedTuple):
    """A figure by name.  of_runs: whether it is drawn of runs; over: whether it needs a setting's name; averages:
    whether it shows means over draws."""

    draw: Callable[..., Any]
    about: str
    of_runs: bool = True
    over: bool = False
    averages: bool = True


KINDS: dict[str, Kind] = {
    "curves": Kind(curves, "accuracy by round, a panel a scenario"),
    "orthogonality": Kind(orthogonality, "orthogonality index phi and accuracy by round"),
    "correction": Kind(correction, "label noise and accuracy by round"),
    "heterogeneity": Kind(correction, "the same, for runs under several partitions"),
    "clients": Kind(clients, "wrong labels of each client before and after"),
    "sensitivity": Kind(sensitivity, "accuracy over a setting (--over alpha)", over=True),
    "costs": Kind(costs, "bytes, time, images and memory by method"),
    "noise": Kind(noise_of_runs, "right and wrong labels of each client, a panel a scenario", averages=False),
    "toy-densities": Kind(toy_densities, "the toy example of the error tolerance: densities", of_runs=False),
    "toy-projections": Kind(toy_projections, "the toy example: samples and projections", of_runs=False),
}


def draw(kind: str, runs: Sequence[Run] = (), over: str | None = None) -> Any:
    """The figure.  Raises UnknownName for another kind, ValueError where runs or ``over`` do not fit it."""
    if kind not in KINDS:
        raise registry.unknown("kind of figure", kind, KINDS)
    what = KINDS[kind]
    if what.of_runs != bool(runs):
        raise ValueError(f"{kind} is drawn of runs: name some" if what.of_runs else f"{kind} is not drawn of runs")
    if what.over != (over is not None):
        raise ValueError(f"{kind} needs --over NAME, a setting" if what.over else f"{kind} takes no --over")
    with _matplotlib().rc_context(STYLE):
        if not what.of_runs:
            return what.draw()
        return what.draw(runs, over) if what.over else what.draw(runs)
