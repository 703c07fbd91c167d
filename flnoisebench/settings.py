"""What a run is: from names and changes, as a command line or a grid gives them, to complete settings."""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import pydantic

from flnoisebench import protocols, registry
from flnoisebench.api import Config, Field, Protocol, near, unstated
from flnoisebench.scenario import (
    PARTITION_READS,
    PRESET_PARTITIONS,
    Noise,
    Partition,
    ScenarioSpec,
    noise_from,
    noise_from_file,
    noise_name,
    parts,
    pinned,
    split_clients,
)
from flnoisebench.scenario.oracle import ORACLES, Oracle

# fields for how settings were said, not what they are
SAID = {"changed", "preset", "track", "choices", "protocol_overrides"}


class Settings(Config):
    """Everything that decides a run's numbers: what the same command must find again to resume."""

    schema_version: Literal[1] = Field(1, why="of this file")
    method: str = Field(..., why="an entry point's name, or path/to/file.py:ClassName")
    preset: str = Field(..., why="the method's preset that the settings started from")
    track: Literal["common", "own", "tuned"] = Field(..., why="whose training budget: the benchmark's or the method's")
    method_settings: dict[str, Any] = Field(..., why="all of them, resolved")
    changed: dict[str, Any] = Field(..., why="what was set by hand on top of preset and protocol")
    protocol: Protocol = Field(..., why="the training budget and model, resolved")
    protocol_overrides: dict[str, Any] = Field(..., why="what the track own, or --set, changed in the protocol")
    scenario: ScenarioSpec = Field(..., why="data set, partition, noise and draw")
    evaluate_on: Literal["test", "test-a", "test-b", "validation", "noisy-validation"] = Field(
        "test", why="the images that accuracies are measured on; anything but test is for choosing"
    )
    oracle: Oracle | None = Field(
        None, why="who removes the noise before the run, knowing the truth; null: nobody, as in every fair comparison"
    )
    choices: Literal["preset", "unstated", "validation", "noisy-validation", "test-a", "test-b", "test"] = Field(
        "unstated",
        why="on which images the values set by hand were chosen; preset: none was set; unstated: nobody said",
    )
    seed: int = Field(0, ge=0, why="of everything but the scenario, whose draw has its own seed")
    deterministic: bool = Field(True, why="repeatable kernels; off costs repeatability and may be faster")

    @property
    def key(self) -> str:
        """10 hex digits over what changes results within a scenario, draw and seed apart."""
        apart = {"seed", "scenario", *SAID}
        if self.oracle is None:  # runs without one keep the key that they had before there were oracles
            apart.add("oracle")
        content = self.model_dump(mode="json", exclude=apart)
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:10]

    def same_run(self, other: Settings) -> bool:
        """Whether they are one run's, however they were said and wherever the file of a split lies."""
        mine, theirs = (one.model_dump(mode="json", exclude={*SAID, "scenario"}) for one in (self, other))
        return mine == theirs and self.scenario.decisive == other.scenario.decisive

    @property
    def published(self) -> Settings:
        """As others may read them: of the file of a split its name, and not where on somebody's machine it lies."""
        return self.model_copy(update={"scenario": self.scenario.published})

    @property
    def repetition(self) -> int:
        """What tells a cell's runs apart: the draw, and the seed where nothing in the scenario is drawn."""
        return self.seed if self.scenario.is_fixed else self.scenario.draw

    @property
    def subject(self) -> str:
        """The method as people read it, with its oracle: "fedavg, oracle clean-clients"."""
        return self.method + (f", oracle {self.oracle}" if self.oracle else "")

    def folder(self, out: Path) -> Path:
        """``<out>/<dataset>/<scenario>/<method>/<key>/draw<d>-seed<k>``; ``<method>_oracle-<oracle>`` under one."""
        method = Path(self.method.replace(":", "-")).name.replace(".py", "")
        if self.oracle:
            method += f"_oracle-{self.oracle}"
        scenario = self.scenario
        leaf = f"draw{scenario.draw}-seed{self.seed}"
        return out / scenario.dataset / scenario.slug / method / self.key / leaf


EVALUATE_ON = get_args(Settings.model_fields["evaluate_on"].annotation)
TRACKS = get_args(Settings.model_fields["track"].annotation)
CHOICES = get_args(Settings.model_fields["choices"].annotation)


def read_toml(path: Path) -> dict[str, Any]:
    """The content of a file that a person wrote.  Raises ValueError that says why it cannot be read."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:  # not UTF-8, or not TOML
        raise ValueError(f"{path} is not TOML: {error}") from None


def parse_assignment(text: str) -> tuple[str, Any]:
    """``name=value`` -> (name, value): numbers, true/false, lists as in TOML; none; anything else is a string."""
    name, equals, value = text.partition("=")
    name, value = name.strip(), value.strip()
    if not equals or not name:
        raise ValueError(f"{text!r} sets nothing: write name=value, such as alpha=2")
    if value.lower() in ("none", "null"):  # null is how JSON, and so `assignments`, writes it
        return name, None
    try:
        return name, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return name, value


def flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The entries of a table of tables: of ``{"protocol": {"batch": 64}}`` it is ("protocol.batch", 64)."""
    for name, value in table.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def assignments(table: Mapping[str, Any]) -> list[str]:
    """A TOML table as --set takes it: ``{"protocol": {"batch": 64}}`` is ``["protocol.batch=64"]``."""
    return [f"{name}={_as_text(value)}" for name, value in flat(table)]


def _as_text(value: Any) -> str:
    """As ``parse_assignment`` reads it back: a string in quotes only where it would be taken for another value, as "3"
    for a number."""
    if isinstance(value, str) and parse_assignment(f"_={value}")[1] in (None, value):
        return value
    return json.dumps(value, default=str, ensure_ascii=False)


def _fields(kind: type[Config], tables: Sequence[int | str]) -> list[str]:
    """The names of the settings in a table of tables, such as ("optimiser",) of Protocol."""
    for name in tables:
        inner = kind.model_fields[str(name)].annotation
        if not (isinstance(inner, type) and issubclass(inner, Config)):
            return []
        kind = inner
    return list(kind.model_fields)


def explain(error: pydantic.ValidationError, kind: type[Config], what: str) -> ValueError:
    """pydantic's findings as one readable message, with near misses for an unknown name."""
    lines = []
    for found in error.errors():
        name = ".".join(map(str, found["loc"]))
        if found["type"] == "extra_forbidden":
            known = sorted(_fields(kind, found["loc"][:-1]))
            hint = near(str(found["loc"][-1]), known)
            lines.append(f"unknown setting {name!r}.{hint} Known: {', '.join(known) or 'none'}.")
        elif found["type"] == "literal_error":
            hint = near(str(found["input"]), re.findall(r"'([^']*)'", found["ctx"]["expected"]))
            lines.append(f"{name} = {found['input']!r}: {found['msg']}.{hint}")
        elif name:
            lines.append(f"{name} = {found['input']!r}: {found['msg']}")
        else:  # of the whole, such as two values that do not go together
            lines.append(found["msg"].removeprefix("Value error, "))
    return ValueError(f"{what}: " + " ".join(lines))


def validated(kind: type[Config], values: Mapping[str, Any], what: str) -> Any:
    """The settings of these values.  Raises ValueError as ``explain`` words it, led by ``what``."""
    try:
        return kind(**_with_words(kind, values))
    except pydantic.ValidationError as error:
        raise explain(error, kind, what) from None


def _with_words(kind: type[Config], values: Mapping[str, Any]) -> dict[str, Any]:
    """The values, "none" again where it was read as nothing and is one of a setting's choices."""
    choices = {name: get_args(entry.annotation) for name, entry in kind.model_fields.items()}
    return {
        name: "none" if value is None and "none" in choices.get(name, ()) else value for name, value in values.items()
    }


def stated(config: Config) -> dict[str, Any]:
    """All settings of a method, but for those that came later and are at their default (``api.Field``)."""
    return config.model_dump(mode="json", exclude=unstated(config))


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """``changes`` laid over ``base``, tables (the optimiser) entry by entry; "a.b" names an entry of table a."""
    result = dict(base)
    for name, value in changes.items():
        table, dot, entry = name.partition(".")
        if dot:
            value = {entry: value}
        if isinstance(value, Mapping) and isinstance(result.get(table), Mapping):
            value = merged(result[table], value)
        result[table] = value
    return result


def _as_read(said: Mapping[str, Any], resolved: Mapping[str, Any]) -> dict[str, Any]:
    """What was said by hand with the values that it came to, where these are others: ".5" is 0.5, and "True" true."""
    found = {}
    for name, value in said.items():
        read = resolved.get(name, value)
        tables = isinstance(value, Mapping) and isinstance(read, Mapping)
        found[name] = _as_read(value, read) if tables else value if value == read else read
    return found


def parted(changed: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(settings of the method, settings of the protocol) among those that --set takes, whose names begin with
    ``protocol.``."""
    of_protocol = {name: value for name, value in changed.items() if name.startswith("protocol.")}
    of_method = {name: value for name, value in changed.items() if name not in of_protocol}
    return of_method, {name.removeprefix("protocol."): value for name, value in of_protocol.items()}


def resolve(
    *,
    method: str | None = None,
    dataset: str = "digits",
    protocol: str | None = None,
    track: str = "common",
    preset: str | None = None,
    noise: str | None = None,
    noise_changes: Mapping[str, Any] | None = None,
    partition_changes: Mapping[str, Any] | None = None,
    clients: int | None = None,
    draw: int = 0,
    holdout: float = 0.0,
    seed: int = 0,
    rounds: int | None = None,
    precision: str | None = None,
    changes: Sequence[str] = (),
    evaluate_on: str = "test",
    oracle: str | None = None,
    choices: str | None = None,
    deterministic: bool = True,
    data_root: Path | None = None,
) -> Settings:
    """Complete settings.  ``changes``: ``name=value`` of the method, or ``protocol.name=value``.  ``method``:
    FedCova by default; under an oracle FedAvg, the reference row.  ``choices``: see Settings; by default "preset"
    without ``changes`` (of rounds and precision apart) and "unstated" with some.

    Order: protocol file, then (track own) the preset's protocol, then ``rounds``, ``precision`` and ``changes``, which
    must not contradict each other.
    Raises ValueError (UnknownName with near misses among them) for whatever cannot be; nothing is written, and no data
    are read but as ``resolve_scenario`` does.
    """
    method = method or ("fedavg" if oracle else "fedcova")
    method_class = registry.load_method(method)
    method = registry.spelt(method)
    data = registry.load_dataset(dataset)
    # rounds and precision are a budget and a machine's, however they are said
    budget = {ALSO[option][1] for option in ("rounds", "precision")}
    chosen = [text for text in changes if parse_assignment(text)[0] not in budget]
    choices = choices or ("unstated" if chosen else "preset")
    presets = method_class.presets
    preset = next(iter(presets)) if preset is None else preset
    for kind, name, known in (
        ("track", track, TRACKS),
        ("evaluation set", evaluate_on, EVALUATE_ON),
        ("oracle", oracle, ORACLES),
        ("source of choices", choices, CHOICES),
        (f"preset of {method}", preset, presets),
    ):
        if name is not None and name not in known:
            raise registry.unknown(kind, name, known)
    if choices == "preset" and chosen:
        raise ValueError(f"--choices preset: {', '.join(chosen)} was set by hand, so say what it was chosen on")
    preset_settings, preset_protocol = presets[preset].on(dataset)
    require_agreement({"rounds": rounds, "precision": precision, "set": changes})
    of_method, of_protocol = parted(dict(map(parse_assignment, changes)))
    said = {"rounds": rounds, "precision": precision}
    of_protocol = {name: value for name, value in said.items() if value is not None} | of_protocol

    base = protocols.load(protocol or data.protocol)
    overrides = merged(dict(preset_protocol) if track == "own" else {}, of_protocol)
    budget = validated(Protocol, merged(base.model_dump(), overrides), f"protocol {base.name}")
    config = validated(method_class.Config, {**preset_settings, **of_method}, f"settings of {method}")
    method_settings = stated(config)
    # one that came later, said at its default, is not stated: it changes nothing, unless the preset has another
    changed = {name: value for name, value in of_method.items() if name in method_settings or name in preset_settings}
    scene = resolve_scenario(
        dataset=dataset,
        noise=noise,
        noise_changes=noise_changes,
        partition_changes=partition_changes,
        clients=clients,
        draw=draw,
        holdout=holdout,
        data_root=data_root,
    )
    return validated(
        Settings,
        {
            "method": method,
            "preset": preset,
            "track": track,
            "method_settings": method_settings,
            "changed": _as_read(changed, method_settings),
            "protocol": budget,
            "protocol_overrides": _as_read(overrides, budget.model_dump(mode="json")),
            "scenario": scene,
            "evaluate_on": evaluate_on,
            "oracle": oracle,
            "choices": choices,
            "seed": seed,
            "deterministic": deterministic,
        },
        "settings",
    )


# What a run's numbers depend on, by the names of `run`'s options with "_" for "-"; all else there says where and how.
OPTIONS: dict[str, type] = {
    "method": str, "dataset": str, "protocol": str, "track": str, "preset": str, "noise": str, "rho": float,
    "tau": float, "noise_set": list, "partition": str, "partition_set": list, "p": float, "alpha": float,
    "min_size": int, "clients": int, "draw": int, "seed": int, "rounds": int, "precision": str, "set": list,
    "evaluate_on": str, "holdout": float, "oracle": str, "choices": str, "deterministic": bool,
}  # fmt: skip
# Options for what an entry of a list says too: --rho 0.4 is --noise-set rho=0.4.
ALSO = {
    "rho": ("noise_set", "rho"), "tau": ("noise_set", "tau"), "partition": ("partition_set", "law"),
    "p": ("partition_set", "p"), "alpha": ("partition_set", "alpha"), "min_size": ("partition_set", "min_size"),
    "rounds": ("set", "protocol.rounds"), "precision": ("set", "protocol.precision"),
}  # fmt: skip
_WANTED = {str: "a string", float: "a number", int: "a whole number", bool: "true or false", list: "a list of strings"}


def from_options(options: Mapping[str, Any], *, device: str, data_root: Path | None = None) -> Settings:
    """Complete settings from the options that ``run`` takes (OPTIONS names them); those that are None were not said.

    device: ``cpu`` or ``cuda``, which the precision depends on where none is said: bf16 is a GPU's; emulated on most
    CPUs it is slow and no more exact than fp32.  data_root: see ``resolve_scenario``.  Raises ValueError as
    ``resolve``, and for a value of another type.
    """
    said = {name: value for name, value in options.items() if value is not None}
    for name, value in said.items():
        if name not in OPTIONS:
            raise registry.unknown("option", name, OPTIONS)
        kind: Any = {float: int | float, list: list | tuple}.get(OPTIONS[name], OPTIONS[name])
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ValueError(f"{name} = {value!r}: {_WANTED[OPTIONS[name]]} is wanted")
    noise_changes, law = scenario_changes(said)
    apart = {"noise_set", "partition_set", *(name for name, (table, _) in ALSO.items() if table != "set")}
    rest = {name: value for name, value in said.items() if name not in apart}
    changes = rest.pop("set", ())
    if (
        device == "cpu"
        and not rest.get("precision")
        and "protocol.precision" not in dict(map(parse_assignment, changes))
    ):
        rest["precision"] = "fp32"
    return resolve(noise_changes=noise_changes, partition_changes=law, changes=changes, data_root=data_root, **rest)


def scenario_changes(said: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(changes of the noise, changes of the partition), of ``run``'s options.  Raises ValueError where two of them
    contradict each other."""
    require_agreement(said)

    def changes(table: str) -> dict[str, Any]:
        flags = {entry: said[name] for name, (of, entry) in ALSO.items() if of == table and said.get(name) is not None}
        return {**flags, **dict(map(parse_assignment, said.get(table) or ()))}

    return changes("noise_set"), changes("partition_set")


def _entries(options: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], str, Any]]:
    """(what is said, how, the value) of ``run``'s options: the same first part however it was said."""
    for option, value in options.items():
        if value is None:
            continue
        flag = f"--{option.replace('_', '-')}"
        if OPTIONS[option] is not list:
            yield ALSO.get(option, (option,)), f"{flag} {value}", value
            continue
        for text in value:
            name, found = parse_assignment(text)
            for entry in assignments({name: found} if isinstance(found, dict) else {}) or [text]:
                leaf, inner = parse_assignment(entry)
                yield (option, leaf), f"{flag} {text}", inner


def require_agreement(options: Mapping[str, Any]) -> None:
    """Raises ValueError where two of ``run``'s options say one thing and not the same."""
    seen: dict[tuple[str, ...], tuple[str, Any]] = {}
    for what, how, value in _entries(options):
        before, other = seen.setdefault(what, (how, value))
        if other is not value and other != value:  # is: nan, which validation refuses
            raise ValueError(f"{before} and {how} contradict each other: leave one of them out")


def overlaid(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Options of ``run`` with others, all of them said, laid over them, which win however the same is said: of
    ``rho`` = 0.4 under ``noise_set`` = ["rho=0.2"] nothing is left."""
    taken = {what for what, _, _ in _entries(over)}
    result: dict[str, Any] = {}
    for option, value in under.items():
        if value is None:
            continue
        if OPTIONS[option] is list:
            value = [text for text in value if not {what for what, _, _ in _entries({option: [text]})} & taken]
        elif ALSO.get(option, (option,)) in taken:
            continue
        result[option] = value
    for option, value in over.items():
        result[option] = [*result.get(option, ()), *value] if OPTIONS[option] is list else value
    return result


def resolve_scenario(
    *,
    dataset: str,
    noise: str | None = None,
    noise_changes: Mapping[str, Any] | None = None,
    partition_changes: Mapping[str, Any] | None = None,
    clients: int | None = None,
    draw: int = 0,
    holdout: float = 0.0,
    data_root: Path | None = None,
) -> ScenarioSpec:
    """The scenario alone; raises ValueError for what cannot be, and for a change that the law does not read: it would
    give the same federation another name.  noise: a preset, or a TOML file that ends in .toml; by default fedcova-sym,
    and where the labels of the data set are wrong already "given", those labels.  clients: by default 20, but
    as many as a split's file names, or for the partition "natural" the data set, whose files in ``data_root`` are read
    for it."""
    data = registry.load_dataset(dataset)
    noise = noise or ("fedcova-sym" if data.labels_are_true else "given")
    from_file = noise.endswith(".toml")
    try:
        changes = _with_words(Noise, noise_changes or {})
        law = noise_from_file(Path(noise), changes) if from_file else noise_from(noise, **changes)
    except pydantic.ValidationError as error:
        raise explain(error, Noise, f"noise {noise}") from None
    for part in parts(law):
        if part.target == "open-set":
            if part.foreign in ("", dataset):
                raise ValueError("open-set noise takes images of another data set: --noise-set foreign=NAME")
            registry.load_dataset(part.foreign)
    partition = partition_changes or {}
    if "file" in partition:
        partition = {"law": "manifest", **partition}
    if noise in PRESET_PARTITIONS and partition.get("law") in (None, PRESET_PARTITIONS[noise].law):
        partition = {**PRESET_PARTITIONS[noise].model_dump(), **partition}
    split = validated(Partition, partition, "partition")
    read = ("law", "min_size", *PARTITION_READS[split.law])
    for name, value in (partition_changes or {}).items():
        if name not in read:  # it would name a second scenario of the same federation
            raise ValueError(
                f"{name}={value!r} would change nothing in partition {split.law!r}: it reads {', '.join(sorted(read))}"
            )
    split = pinned(split)
    if clients is None and split.law == "natural":
        if data_root is None:
            raise ValueError("partition 'natural': say how many clients the data set names, or where its files are")
        clients = data.natural_clients(data_root)
    if clients is None and split.law == "manifest":
        clients = split_clients(split)
    return validated(
        ScenarioSpec,
        {
            **({} if clients is None else {"clients": clients}),
            "dataset": dataset,
            "partition": split,
            "noise": law,
            "noise_name": noise_name(Path(noise)) if from_file else noise,
            "draw": draw,
            "holdout": holdout,
        },
        "scenario",
    )
