"""The leaderboard's rows: what the columns mean, and how they follow from entries.

A row is a cell: one method, with one choice of settings, in one scenario under one budget; its numbers are over the
draws of the scenario and the seeds of the runs.  ``rows_of`` is the only place where a row is made.
"""

from __future__ import annotations

import csv
import io
import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flnoisebench import protocols, registry
from flnoisebench.api import Config, Field, Preset
from flnoisebench.leaderboard.entries import Entry, hardware, sessions
from flnoisebench.records import LAST_ROUNDS
from flnoisebench.scenario.noise import reads
from flnoisebench.settings import Settings

REFERENCE = "fedavg"  # costs are given relative to it, as the papers do

FLAGS = {  # what a reader has to know about a row, in this order
    "single-draw": "one draw of the scenario: nothing is known of another, and a spread, if any, is over seeds alone",
    "wrong-protocol": "the budget is not the data set's own",
    "failed-runs": "some runs failed and are in no mean",
    "ended-early": "some runs ended before the last round of their budget",
    "unsteady": "had its runs ended a round earlier, its mean would be another by more than a point",
    "choosing-set": "measured on images that values were, or may have been, chosen on",
    "unstated-choices": "values were set by hand, and nobody said on what they were chosen",
    "mixed-commits": "its runs were made by different code",
    "uncommitted": "the code differed from its commit",
    "mixed-hardware": "its costs are means over different machines, or over runs alone there and beside others",
    "not-installable": "the method is a file without an entry point, so that nobody else can run it",
}


class Row(Config):
    """A line of ``leaderboards/<dataset>.csv``; the columns are these fields in this order.

    An empty cell is a number that there is none of.  Lists are separated by blanks; digests are cut to 16 hex digits
    and stand as ``draw:digest`` (of runs ``draw-seed:digest``); the entries hold them whole.
    """

    # what it is
    dataset: str = Field(..., why="the registry's name")
    scenario: str = Field(..., why="the scenario's slug: noise, partition, clients, hold-out; draw apart")
    noise: str = Field(..., why="the noise preset")
    rho: float | None = Field(..., unit="share of clients", why="noisy clients; empty where the law does not read it")
    tau: float | None = Field(..., unit="share of samples", why="noise level; empty where the law does not read it")
    partition: str = Field(..., why="law and parameters, as in the slug")
    clients: int = Field(..., ge=1, unit="clients", why="in the federation, as drawn")
    protocol: str = Field(..., why="the shipped budget that it came from")
    rounds: int = Field(..., ge=1, unit="rounds", why="of the budget")
    local_epochs: int = Field(..., ge=1, unit="epochs", why="of the budget")
    batch: int = Field(..., ge=1, unit="samples", why="of the budget")
    optimiser: str = Field(..., why="name, momentum and weight decay")
    lr: float = Field(..., gt=0, why="in the first round")
    lr_schedule: str = Field(..., why="over the server's rounds")
    model: str = Field(..., why="the encoder")
    precision: str = Field(..., why="of the arithmetic")
    participation: float = Field(..., gt=0, le=1, unit="share of clients a round", why="of the budget")
    track: str = Field(..., why="whose budget: common, own or tuned")
    evaluate_on: str = Field(..., why="the images that accuracies are on")
    oracle: str = Field(
        "", why="who removed the noise by the truth; with one the row is a bound and no method's result"
    )
    method: str = Field(..., why="the registry's name")
    title: str = Field(..., why="the method's, as people read it")
    preset: str = Field(..., why="the settings that it started from")
    changed: str = Field("", why="what was set by hand on top: a JSON object, or empty")
    choices: str = Field(..., why="on which images that was chosen")
    conditions: str = Field("", why="what the method needs beyond the reference; separated by '; '")
    told: str = Field("", why="what it is told about the noise")
    settings: str = Field(..., why="10 hex digits over all settings that change results, seed and scenario apart")

    # results, over the complete runs; accuracies are means over a run's last five rounds unless said otherwise
    n: int = Field(..., ge=0, unit="runs", why="complete ones: means are over those of them that have the number")
    failed: int = Field(..., ge=0, unit="runs", why="that a client, a loss or an upload stopped")
    draws: str = Field(..., why="of the complete runs; their seeds where nothing in the scenario is drawn")
    seeds: str = Field(..., why="of the runs, of the complete ones")
    accuracy_mean: float | None = Field(..., unit="%", why="the number that tables show")
    accuracy_by_draw: str = Field(
        ..., unit="%", why="draw:value, over its seeds; by seed where nothing is drawn: what pairs rows on other draws"
    )
    accuracy_std_seeds: float | None = Field(
        ..., unit="%", why="sample standard deviation over draws and seeds; empty for one run"
    )
    accuracy_std_rounds: float | None = Field(
        ..., unit="%", why="mean over runs of the standard deviation over the last five rounds: what the papers print"
    )
    accuracy_last10: float | None = Field(..., unit="%", why="mean over the last ten rounds, or over all of fewer")
    accuracy_final: float | None = Field(..., unit="%", why="last round")
    oracle_best: float | None = Field(..., unit="%", why="best round, chosen on the reported images: never a result")
    balanced_accuracy: float | None = Field(..., unit="%", why="mean of the per-class recalls")
    macro_f1: float | None = Field(..., unit="%", why="mean of the per-class F1")
    calibration_error: float | None = Field(..., unit="%", why="15 equal bins of max softmax(scores)")
    label_noise_before: float | None = Field(..., unit="%", why="wrong given labels; empty without truth")
    label_noise_after: float | None = Field(..., unit="%", why="wrong labels among those trained on at the end")
    clients_precision: float | None = Field(
        ..., unit="%", why="noisy clients among those claimed to be, in runs that claim any"
    )
    clients_recall: float | None = Field(..., unit="%", why="claimed ones among the noisy clients")
    samples_precision: float | None = Field(
        ..., unit="%", why="wrong labels among those claimed to be, in runs that claim any"
    )
    samples_recall: float | None = Field(
        ..., unit="%", why="claimed ones among the wrong labels of clients that judge theirs"
    )
    relabel_precision: float | None = Field(
        ..., unit="%", why="right labels among the changed ones, in runs that change any"
    )
    relabel_recall: float | None = Field(
        ..., unit="%", why="wrong given labels that were mended, of clients that relabel"
    )
    relabel_harm: float | None = Field(
        ..., unit="%", why="right given labels that were spoilt, of clients that relabel"
    )

    # costs, means over the complete runs; a ratio is the mean of the ratios to the reference method's runs of the same
    # draw, in the same scenario, under the same budget, on the same hardware, and no ratio of the means
    bytes_up: int | None = Field(..., unit="bytes", why="payload of all uploads of a run")
    bytes_down: int | None = Field(..., unit="bytes", why="payload of all messages of a run")
    images_trained: int | None = Field(..., unit="images", why="passed an encoder with gradient, in a run")
    images_passed: int | None = Field(..., unit="images", why="passed an encoder without gradient, in a run")
    seconds_per_round: float | None = Field(
        ..., unit="s", why="wall time, with evaluation and digests, beside whatever else ran there"
    )
    peak_memory: int | None = Field(..., unit="bytes", why="of the run's processes together, on its fullest device")
    bytes_up_ratio: float | None = Field(
        ..., unit="times the reference", why="mean over pairs of runs of a draw on the same hardware; so all ratios"
    )
    bytes_down_ratio: float | None = Field(..., unit="times the reference", why="as above")
    images_ratio: float | None = Field(..., unit="times the reference", why="of the images trained")
    seconds_ratio: float | None = Field(..., unit="times the reference", why="as above")
    peak_memory_ratio: float | None = Field(..., unit="times the reference", why="as above")

    flags: str = Field("", why="what to doubt about the row, separated by blanks: see FLAGS")

    # where it comes from; several values are separated by '; '
    device: str = Field(..., why="GPU, or cpu, with the processor where it is recorded")
    devices: str = Field(..., unit="devices", why="that shared a run")
    executor: str = Field(..., why="how clients ran")
    lanes: str = Field(..., unit="clients", why="trained at once")
    torch: str = Field(..., why="version")
    version: str = Field(..., why="of flnoisebench")
    commit: str = Field(..., why="of flnoisebench; '+changes' when the tree differed from it")
    method_sha256: str = Field(..., why="of the method's file and what it imports of its package, 16 digits")
    data_digest: str = Field(..., why="of images and labels, 16 hex digits")
    partition_digests: str = Field(..., why="who holds what, by draw")
    labels_digests: str = Field(..., why="the given labels, by draw")
    run_digests: str = Field(..., why="states, uploads and predictions, by draw and seed")

    @property
    def by_draw(self) -> dict[int, float]:
        """``accuracy_by_draw`` as numbers."""
        return {int(draw): float(value) for draw, value in (one.split(":") for one in self.accuracy_by_draw.split())}

    @property
    def doubts(self) -> tuple[str, ...]:
        return tuple(self.flags.split())

    @property
    def cell(self) -> tuple[str, ...]:
        """What distinguishes rows, as ``cell_of`` says it of an entry."""
        return self.dataset, self.scenario, self.settings, self.track, self.preset, self.changed

    @property
    def name(self) -> str:
        """The method with all that distinguishes it from its default, as people read it."""
        parts = [self.title]
        if self.preset != default_preset(self.method):
            parts.append(f"preset {self.preset}")
        for name, value in (json.loads(self.changed) if self.changed else {}).items():
            parts.append(f"{name}={'none' if value is None else _text(value)}")
        if self.oracle:
            parts.append(f"oracle {self.oracle}")
        return ", ".join(parts)

    @property
    def arena_columns(self) -> tuple[str, ...]:
        """The columns that two rows must share to be compared: data set, scenario, track, evaluation images, rounds and
        model; in the track common also how a client trains, which elsewhere is the method's own."""
        return (*PLACE, *BUDGET, *(TRAINING if self.track == "common" else ()))

    @property
    def arena(self) -> tuple[Any, ...]:
        """The values of ``arena_columns``."""
        return tuple(getattr(self, name) for name in self.arena_columns)


COLUMNS = tuple(Row.model_fields)
PLACE = ("dataset", "scenario", "track", "evaluate_on")  # the columns of what is tried where
BUDGET = ("protocol", "rounds", "model", "participation", "precision")  # those of the budget, how clients train apart
TRAINING = ("local_epochs", "batch", "optimiser", "lr", "lr_schedule")  # those of how a client trains


def default_preset(method: str) -> str | None:
    """The first preset of an installed method; None of one that is not installed here."""
    try:
        return next(iter(registry.load_method(method).presets))
    except ValueError:
        return None


def budget_of(settings: Settings) -> dict[str, Any]:
    """The values of the columns BUDGET and TRAINING."""
    said, optimiser = settings.protocol, settings.protocol.optimiser
    alike = {name: getattr(said, name) for name in (*BUDGET, *TRAINING) if name in type(said).model_fields}
    return {
        **alike,
        "protocol": said.name,
        "lr": optimiser.lr,
        "optimiser": f"{optimiser.name} momentum={_text(optimiser.momentum)} "
        f"weight_decay={_text(optimiser.weight_decay)}",
    }


# ------------------------------------------------------------------------------------------------- the cells


def cell_of(entry: Entry) -> tuple[str, ...]:
    """What distinguishes rows: data set, scenario, settings with budget, and how these were said."""
    settings = entry.settings
    scene = settings.scenario
    return scene.dataset, scene.slug, settings.key, settings.track, settings.preset, _changed(settings)


def _changed(settings: Settings) -> str:
    """As the column of that name says it."""
    return json.dumps(settings.changed, sort_keys=True) if settings.changed else ""


def by_cell(entries: Iterable[Entry]) -> dict[tuple[str, ...], list[Entry]]:
    """The entries that each row follows from (``Row.cell``), by draw and seed."""
    found: dict[tuple[str, ...], list[Entry]] = defaultdict(list)
    for entry in sorted(entries, key=lambda entry: (entry.settings.scenario.draw, entry.settings.seed)):
        found[cell_of(entry)].append(entry)
    return dict(found)


def by_draw(entries: Iterable[Entry]) -> dict[int, float]:
    """The headline accuracy by draw, averaged over the seeds of a draw, since these are no further draws; by seed where
    nothing in the scenario is drawn."""
    found: dict[int, list[float]] = defaultdict(list)
    for entry in entries:
        mean = entry.accuracy.last5_mean
        if entry.status == "complete" and mean is not None:
            found[entry.settings.repetition].append(mean)
    return {draw: statistics.fmean(values) for draw, values in sorted(found.items())}


def rows_of(entries: Iterable[Entry]) -> list[Row]:
    """The rows of these entries, sorted.  Raises UnknownName for a data set that is not installed: its rows could not
    be held against its protocol."""
    cells = by_cell(entries)
    ordered = [cells[cell] for cell in sorted(cells)]
    reference = _references(entry for cell in ordered for entry in cell)
    return sorted((_row(cell, reference) for cell in ordered), key=_order)


def _order(row: Row) -> tuple[Any, ...]:
    """Scenario by scenario, within it budget by budget, the oracles last, then by method."""
    return (
        row.dataset, row.noise, row.rho or 0.0, row.tau or 0.0, row.scenario, row.protocol, row.rounds, row.track,
        row.evaluate_on, row.oracle, row.method, row.preset, row.changed, row.settings,
    )  # fmt: skip


def _row(cell: Sequence[Entry], reference: Mapping[tuple[Any, ...], list[Entry]]) -> Row:
    first = cell[0]
    settings, scene = first.settings, first.settings.scenario
    done = [entry for entry in cell if entry.status == "complete"]
    accuracies = [entry.accuracy for entry in done]
    means = [accuracy.last5_mean for accuracy in accuracies if accuracy.last5_mean is not None]

    def mean(values: Iterable[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return round(statistics.fmean(known), 4) if known else None

    def whole(values: Iterable[int]) -> int | None:
        known = list(values)
        return round(statistics.fmean(known)) if known else None

    pairs = [(entry, other) for entry in done for other in reference.get(_pairing(entry), ())]

    def ratio(cost: Any) -> float | None:
        found = [cost(entry) / cost(other) for entry, other in pairs if cost(other)]
        return _figures(statistics.fmean(found)) if found else None

    def judged(name: str) -> float | None:
        return mean(entry.last5.judged.get(name) for entry in done)

    environments = [said for entry in cell for said in sessions(entry.environment)]
    return Row(
        dataset=scene.dataset,
        scenario=scene.slug,
        noise=scene.noise_name,
        rho=scene.noise.rho if "rho" in reads(scene.noise) else None,
        tau=scene.noise.tau if "tau" in reads(scene.noise) else None,
        partition=scene.slug.split("_")[1],
        clients=scene.clients,
        **budget_of(settings),
        track=settings.track,
        evaluate_on=settings.evaluate_on,
        oracle=settings.oracle or "",
        method=settings.method,
        title=str(first.card["title"]),
        preset=settings.preset,
        changed=_changed(settings),
        choices=_joined((entry.settings.choices for entry in cell), " "),
        conditions="; ".join(first.card.get("conditions", ())),
        told=" ".join(first.card.get("told", ())),
        settings=settings.key,
        n=len(done),
        failed=len(cell) - len(done),
        draws=_joined((entry.settings.repetition for entry in done), " "),
        seeds=_joined((entry.settings.seed for entry in done), " "),
        accuracy_mean=mean(means),
        accuracy_by_draw=" ".join(f"{draw}:{round(value, 4)}" for draw, value in by_draw(done).items()),
        accuracy_std_seeds=round(statistics.stdev(means), 4) if len(means) > 1 else None,
        accuracy_std_rounds=mean(accuracy.last5_std for accuracy in accuracies),
        accuracy_last10=mean(accuracy.last10_mean for accuracy in accuracies),
        accuracy_final=mean(accuracy.final for accuracy in accuracies),
        oracle_best=mean(accuracy.oracle for accuracy in accuracies),
        balanced_accuracy=mean(entry.last5.balanced_accuracy for entry in done),
        macro_f1=mean(entry.last5.macro_f1 for entry in done),
        calibration_error=mean(entry.last5.calibration_error for entry in done),
        label_noise_before=mean(entry.label_noise_before for entry in done),
        label_noise_after=mean(entry.label_noise_after for entry in done),
        clients_precision=judged("clients_precision"),
        clients_recall=judged("clients_recall"),
        samples_precision=judged("samples_precision"),
        samples_recall=judged("samples_recall"),
        relabel_precision=judged("relabel_precision"),
        relabel_recall=judged("relabel_recall"),
        relabel_harm=judged("relabel_harm"),
        bytes_up=whole(entry.bytes_up for entry in done),
        bytes_down=whole(entry.bytes_down for entry in done),
        images_trained=whole(_images(entry) for entry in done),
        images_passed=whole(entry.images.get("passed", 0) for entry in done),
        seconds_per_round=_figures(statistics.fmean(map(_seconds, done))) if done else None,
        peak_memory=whole(entry.peak_memory for entry in done),
        bytes_up_ratio=ratio(lambda entry: entry.bytes_up),
        bytes_down_ratio=ratio(lambda entry: entry.bytes_down),
        images_ratio=ratio(_images),
        seconds_ratio=ratio(_seconds),
        peak_memory_ratio=ratio(lambda entry: entry.peak_memory),
        flags=" ".join(flags_of(cell)),
        device=_joined(_device(said) for said in environments),
        devices=_joined(said.get("devices", 1) for said in environments),
        executor=_joined(said["executor"] for said in environments),
        lanes=_joined(said["lanes"] for said in environments),
        torch=_joined(said["packages"]["torch"] for said in environments),
        version=_joined(said["packages"]["flnoisebench"] for said in environments),
        commit=_joined(said["commit"] for said in environments),
        method_sha256=_joined(said["method_sha256"][:16] for said in environments),
        data_digest=_joined(entry.digests["data"][:16] for entry in cell),
        partition_digests=_by_draw(cell, "partition"),
        labels_digests=_by_draw(cell, "labels"),
        run_digests=" ".join(
            f"{entry.settings.scenario.draw}-{entry.settings.seed}:{entry.digest[:16]}" for entry in done
        ),
    )


def _images(entry: Entry) -> int:
    return entry.images.get("trained", 0)


def _seconds(entry: Entry) -> float:
    return entry.seconds.get("round", 0.0) / max(entry.rounds, 1)


def _costs_depend_on(settings: Settings) -> tuple[Any, ...]:
    """What of the budget decides what a round costs: the learning rate is not among it."""
    said = settings.protocol
    return said.rounds, said.local_epochs, said.batch, said.last_batch, said.participation, said.model, said.precision


def _pairing(entry: Entry) -> tuple[Any, ...]:
    settings = entry.settings
    scene = settings.scenario
    return scene.dataset, scene.slug, scene.draw, _costs_depend_on(settings), settings.evaluate_on, entry.hardware


def _references(entries: Iterable[Entry]) -> dict[tuple[Any, ...], list[Entry]]:
    found: dict[tuple[Any, ...], list[Entry]] = defaultdict(list)
    for entry in entries:
        if (entry.settings.method, entry.settings.oracle, entry.status) == (REFERENCE, None, "complete"):
            found[_pairing(entry)].append(entry)
    return found


def _device(said: Mapping[str, Any]) -> str:
    processor = said.get("processor")
    return f"{said['device']} ({processor})" if said["device"] == "cpu" and processor else str(said["device"])


def _by_draw(cell: Sequence[Entry], name: str) -> str:
    return _joined((f"{entry.settings.scenario.draw}:{entry.digests[name][:16]}" for entry in cell), " ")


def _joined(values: Iterable[Any], by: str = "; ") -> str:
    """Each once, in order of appearance (the entries are sorted by draw and seed)."""
    return by.join(dict.fromkeys(map(str, values)))


def _figures(value: float) -> float:
    """Four significant figures: nobody's clock is better."""
    return float(f"{value:.4g}")


# ------------------------------------------------------------------------------------------------- doubts


def flags_of(cell: Sequence[Entry]) -> list[str]:
    """What to doubt about a row of these entries, in the order of FLAGS."""
    done = [entry for entry in cell if entry.status == "complete"]
    settings = cell[0].settings
    environments = [said for entry in cell for said in sessions(entry.environment)]
    found = {
        "single-draw": len({entry.settings.repetition for entry in done}) == 1,
        "wrong-protocol": not follows_protocol(settings),
        "failed-runs": len(done) < len(cell),
        "ended-early": any(entry.rounds < entry.settings.protocol.rounds for entry in done),
        "unsteady": abs(_by_the_last_round(done)) > 1,
        "choosing-set": any(chosen_on_reported(entry.settings) for entry in cell),
        "unstated-choices": any(entry.settings.choices == "unstated" and set_by_hand(entry.settings) for entry in cell),
        "mixed-commits": len({(said["commit"], said["method_sha256"]) for said in environments}) > 1,
        "uncommitted": any(said["commit"].endswith("+changes") for said in environments),
        "mixed-hardware": len({tuple(hardware(said).values()) for said in environments}) > 1,
        "not-installable": ".py" in settings.method,
    }
    return [flag for flag in FLAGS if found[flag]]


def _by_the_last_round(done: Sequence[Entry]) -> float:
    """By how much their last round changed the mean of ``last5_mean``, in points; 0 where there were no five before.
    Under noise the average of models may swing between what clean and what noisy clients teach, round by round, and
    five rounds hold three of one kind."""
    curves = [[value for value in entry.curves.accuracy if value is not None] for entry in done]
    changes = [(known[-1] - known[-1 - LAST_ROUNDS]) / LAST_ROUNDS for known in curves if len(known) > LAST_ROUNDS]
    return statistics.fmean(changes) if changes else 0.0


def chosen_on_reported(settings: Settings) -> bool:
    """Whether accuracies are on images that are for choosing, or that values, the preset's too, were chosen on."""
    chosen, reported = settings.choices, settings.evaluate_on
    if reported not in ("test", "test-b"):
        return True
    if reported == "test" and settings.scenario.draw in _tuned_on(settings):
        return True
    return chosen == reported or (chosen.startswith("test") and "test" in (chosen, reported))


def _tuned_on(settings: Settings) -> Sequence[int]:
    preset = _preset(settings)
    return preset.datasets.get(settings.scenario.dataset, preset).tuned_on


def _preset(settings: Settings) -> Preset:
    """The preset of a run; one that says nothing where it is not installed here."""
    try:
        return registry.load_method(settings.method).presets[settings.preset]
    except (ValueError, KeyError):
        return Preset()


def set_by_hand(settings: Settings) -> bool:
    """Whether values are not the preset's: the method's, or outside the track common the training's.  In the track
    common another training is another protocol; rounds and precision are a budget and a machine's everywhere."""
    if settings.changed or settings.track == "common":
        return bool(settings.changed)
    said = {name: value for name, value in settings.protocol_overrides.items() if name not in ("rounds", "precision")}
    _, own = _preset(settings).on(settings.scenario.dataset)
    return not said.items() <= own.items()


def follows_protocol(settings: Settings) -> bool:
    """Whether the budget is the data set's own.  In the track common all of it counts, but for the precision, which is
    the hardware's; elsewhere the file, the model and the participation, since the recipe is the method's."""
    wanted = protocols.load(registry.load_dataset(settings.scenario.dataset).protocol)
    said = settings.protocol
    if settings.track == "common":
        return said.model_copy(update={"precision": wanted.precision}) == wanted
    return (said.name, said.model, said.participation) == (wanted.name, wanted.model, wanted.participation)


# -------------------------------------------------------------------------------------------------- as text


def _text(value: Any) -> str:
    """A value as a cell: whole floats without their ``.0``, nothing as nothing."""
    if value is None:
        return ""
    return repr(value).removesuffix(".0") if isinstance(value, float) else str(value)


def cells(row: Row) -> list[str]:
    """The row's cells in the order of COLUMNS."""
    return [_text(getattr(row, name)) for name in COLUMNS]


def row_from(texts: Mapping[str, str]) -> Row:
    """A row from cells by column.  Raises pydantic.ValidationError that names the columns."""
    empty = {name for name, info in Row.model_fields.items() if info.annotation is not str}
    return Row.model_validate({name: None if text == "" and name in empty else text for name, text in texts.items()})


def csv_text(rows: Iterable[Row]) -> str:
    """A leaderboard's file: the columns' names, then a line a row."""
    whole = io.StringIO()
    writer = csv.writer(whole, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(map(cells, rows))
    return whole.getvalue()
