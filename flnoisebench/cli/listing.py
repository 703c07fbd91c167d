"""``flnoisebench list``: what there is, by name; ``--details`` imports it and says more."""

from __future__ import annotations

import types
import typing
from pathlib import Path
from typing import Annotated, Any

import typer

from flnoisebench import models, protocols, registry, runs
from flnoisebench.api import Config, Preset
from flnoisebench.cli import console
from flnoisebench.cli.console import line, percent
from flnoisebench.scenario import NOISE_PRESETS, PARTITION_LAWS, PARTITION_READS, Noise, Partition
from flnoisebench.settings import flat

app = typer.Typer(no_args_is_help=True, help="List what can be named on the command line.")
Details = Annotated[bool, typer.Option("--details", help="Import each and say more.", show_default="no")]


def type_name(annotation: Any) -> str:
    """As people read it: ``paper|code``, ``float|None``, ``tuple[Rounds, ...]``."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return "|".join(map(str, inner))
    if origin in (typing.Union, types.UnionType):
        return "|".join(map(type_name, inner))
    if inner:
        return f"{origin.__name__}[{', '.join('...' if one is ... else type_name(one) for one in inner)}]"
    return "None" if annotation is types.NoneType else getattr(annotation, "__name__", str(annotation))


def settings_of(kind: type[Config]) -> None:
    """Every field: default, type, unit and why."""
    for name, info in kind.model_fields.items():
        extra = info.json_schema_extra if isinstance(info.json_schema_extra, dict) else {}
        unit = f" {extra['unit']}" if extra.get("unit") else ""
        default = getattr(info.default, "value", info.default)
        line(f"    {name} = {default}{unit}", type_name(info.annotation), info.description or "")


def values_of(preset: Preset) -> dict[str, str]:
    """What a preset sets otherwise than the defaults, as --set takes it: everywhere, and what differs on data sets."""
    result = {}
    for where, part in {"everywhere": preset, **{f"on {name}": one for name, one in preset.datasets.items()}}.items():
        for track, table, general in (
            ("", part.settings, preset.settings),
            (", track own", {"protocol": dict(part.protocol)}, {"protocol": dict(preset.protocol)}),
        ):
            known = {} if part is preset else dict(flat(general))
            values = [(name, value) for name, value in flat(table) if name not in known or known[name] != value]
            if values:
                result[where + track] = " ".join(f"{name}={getattr(value, 'value', value)}" for name, value in values)
    return result


@app.command()
@console.guarded
def methods(details: Details = False) -> None:
    """Methods: what `--method` takes; --details says what each is, needs, is told and can be set to."""
    for name in registry.names(registry.METHODS):
        if not details:
            line(name)
            continue
        try:
            method = registry.load_method(name)
        except ValueError as error:  # one that cannot be imported hides no other
            line(name, f"damaged: {error}")
            continue
        card = method.card
        line(name, f"{card.title}: {card.paper}")
        line("  needs", ", ".join(card.conditions) or "nothing beyond FedAvg")
        line("  told of the noise", ", ".join(card.told) or "nothing")
        first: dict[str, str] = {}  # the first preset's budgets in track own; later ones are mostly the same
        for preset, content in method.presets.items():
            line(f"  preset {preset}", content.about)
            values = values_of(content)
            own = {where: text for where, text in values.items() if where.endswith("track own")}
            for where, text in values.items():
                if where not in own or own != first:
                    line(f"    {where}", text)
            first = first or own
        for departure in card.departures:
            line("  departs", departure)
        settings_of(method.Config)


@app.command()
@console.guarded
def datasets(details: Details = False) -> None:
    """Data sets: what `--dataset` takes."""
    for name in registry.names(registry.DATASETS):
        if not details:
            line(name)
            continue
        try:
            data = registry.load_dataset(name)
        except ValueError as error:
            line(name, f"damaged: {error}")
            continue
        classes = f"{len(data.classes)} classes" if data.classes else "classes as its files or settings say"
        line(name, f"{data.title}, {classes}, protocol {data.protocol}")
        line("  source", data.source)


@app.command("protocols")
@console.guarded
def protocols_(details: Details = False) -> None:
    """Protocols: what `--protocol` takes."""
    for name in protocols.names():
        if not details:
            line(name)
            continue
        budget = protocols.load(name)
        optimiser = budget.optimiser
        line(name, protocols.read(name).get("about", ""))
        line(
            "  budget",
            f"{budget.rounds} rounds, {budget.local_epochs} local epochs, batch {budget.batch}, {budget.model}, "
            f"{optimiser.name} lr {optimiser.lr} momentum {optimiser.momentum} weight decay {optimiser.weight_decay}, "
            f"participation {budget.participation}, {budget.precision}, last batch: {budget.last_batch}",
        )


@app.command()
@console.guarded
def noise(details: Details = False) -> None:
    """Noise presets: what `--noise` takes; --details adds the fields that `--noise-set` takes."""
    for name, (_, source) in NOISE_PRESETS.items():
        line(name, source)
    if details:
        line("fields", "of the noise spec")
        settings_of(Noise)


@app.command()
@console.guarded
def partitions(details: Details = False) -> None:
    """Partition laws: what `--partition` takes; --details adds their parameters."""
    for name in typing.get_args(Partition.model_fields["law"].annotation):
        reads = ", ".join(PARTITION_READS[name])
        line(name, PARTITION_LAWS[name] + (f"; reads {reads}" if reads else ""))
    if details:
        line("fields", "of the partition spec")
        settings_of(Partition)


@app.command("runs")
@console.guarded
def runs_(
    out: Annotated[Path, typer.Option(help="The folder of the runs, or one of its folders.")] = Path("runs"),
) -> None:
    """Runs below a folder: status, rounds, accuracy (mean of the last five rounds), folder, settings that differ."""
    if not out.is_dir():
        raise ValueError(f"there is no folder {out}; --out names the one that `run` and `sweep` wrote to")
    known = runs.below(out)
    for found, apart in zip(known, runs.differences(known), strict=True):
        about = [f"{found.rounds} rounds", f"{percent(found.accuracy)} %", str(found.folder)]
        line(found.status, *about, *filter(None, [found.problem or ", ".join(apart)]))


@app.command("models")
@console.guarded
def models_(details: Details = False) -> None:
    """Models: what `--set protocol.model=` takes."""
    for name in models.MODELS:
        line(name, models.ABOUT[name]) if details else line(name)
