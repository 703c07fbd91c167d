"""Scenarios and the file that pins one.

A scenario is a data set, a partition, a noise law and a draw.  ``build`` makes it in two halves: the ``Scenario``,
which training may see, and the ``Truth``, which only evaluation may.  The manifest holds both, so that somebody
else trains on exactly the same labels; ``check`` proves that it does what its settings say.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as safetensors_save

from flnoisebench.api import Config, Field
from flnoisebench.scenario.corruption import (
    Bools,
    Corruption,
    Floats,
    Ints,
    Sources,
    class_counts,
    corrupt,
    label_space,
    mean_rate,
    members,
    settled,
    settled_facts,
    target_law,
    whole,
)
from flnoisebench.scenario.noise import NOISE_PRESETS, Noise, parts, reads
from flnoisebench.scenario.partition import PLACE, Partition, parameters, pinned, read_csv, split
from flnoisebench.streams import numpy_stream

SCHEMA = 1
HEADER = "flnoisebench-scenario"  # the one key of the file's metadata: with two, safetensors' order would vary
FALSE_ALARM = 1e-3  # the chance that ``check`` finds fault with the rates of a sound draw

Array = TypeVar("Array", bound=npt.NDArray[Any])


class ScenarioSpec(Config):
    """The settings that make a scenario; with the data they determine every label."""

    dataset: str = Field(min_length=1, why="its name in the registry; part of the streams' names")
    noise: Noise = Field(why="noise_from(preset, rho=..., tau=...) makes one")
    noise_name: str = Field(pattern=r"^[a-z0-9][a-z0-9.-]*$", why="the preset that the noise comes from, or a new name")
    partition: Partition = Field(Partition(), why="FedCova's experiments")
    clients: int = Field(20, ge=1, why="FedCova's experiments")
    draw: int = Field(0, ge=0, why="who is noisy, how much, who holds what; apart from the run's seed")
    holdout: float = Field(
        0.0, ge=0, lt=1, unit="share of each client's samples", why="kept out of training to choose hyperparameters on"
    )

    @property
    def whole(self) -> ScenarioSpec:
        """The same without a hold-out."""
        return self.model_copy(update={"holdout": 0.0})

    @property
    def is_fixed(self) -> bool:
        """Whether nothing is drawn, so that all its draws are one: clients and labels are there already."""
        return self.partition.law in ("natural", "manifest") and self.noise.clients == "none" and not self.holdout

    @property
    def published(self) -> ScenarioSpec:
        """As others may read it: of the file of a split its name, and not where on somebody's machine it lies."""
        cut = self.partition.model_copy(update={"file": Path(self.partition.file).name})
        return self.model_copy(update={"partition": cut})

    @property
    def decisive(self) -> dict[str, Any]:
        """All fields but where the file of a split lies, as JSON can hold them: what two scenarios are compared by."""
        return self.model_dump(mode="json", exclude={"partition": PLACE})

    @property
    def slug(self) -> str:
        """A folder's name, such as ``fedcova-sym-rho0.6-tau0.7_bernoulli-dirichlet-p0.5-alpha5_m20``.

        Specifications that differ share no slug, data set and draw apart (a run's path has those on levels of their
        own) and the name of a split's file, whose content is printed: what the name does not print and the preset does
        not imply goes into a suffix of six hex digits.
        """
        printed = [name for name in _SHORT if name in reads(self.noise)]
        shown = {name: getattr(self.noise, name) for name in printed}
        cut = parameters(self.partition)
        words = [
            "-".join([self.noise_name, *(f"{_SHORT[name]}{_number(value)}" for name, value in shown.items())]),
            "-".join([self.partition.law, *(_CUT[name](cut[name]) for name in cut if name not in PLACE)]),
            f"m{self.clients}",
        ]
        if self.holdout:
            words.append(f"holdout{_number(self.holdout)}")
        known = NOISE_PRESETS.get(self.noise_name)
        implied = known and known[0].model_copy(update=shown)
        if self.noise != implied or self.partition != Partition(law=self.partition.law, **cut):
            rest = self.model_dump_json(exclude={"dataset": True, "draw": True, "partition": PLACE})
            words.append(hashlib.sha256(rest.encode()).hexdigest()[:6])
        return "_".join(words)


_SHORT = {"rho": "rho", "tau": "tau", "lo": "lo", "hi": "hi", "beta_a": "a", "beta_b": "b"}
_CUT: dict[str, Callable[[Any], str]] = {
    "p": lambda value: f"p{_number(value)}",
    "alpha": lambda value: f"alpha{_number(value)}",
    "shards": lambda value: f"s{value}",
    "per_client": lambda value: f"k{value}",
    "file_sha256": lambda value: value[:8] or "unpinned",
}


def _number(value: float) -> str:
    return repr(value).removesuffix(".0")


@dataclass(frozen=True, eq=False)
class Scenario:
    """What training may see.  It holds no true label and nothing that leads to one.

    classes: C.  owner, given: int64 [n], read-only, in the data set's order.  held_out: bool [n], the samples that are
    kept out of training.  told: what a method's card may ask to be told, "noise_rate" (the mean nominal rate over
    clients, weighted by size) and "noisy_clients" (their nominal number); empty where the truth is unknown.  digests:
    SHA-256 of "data" (as given to ``build``), "partition" (owner) and "labels" (given), little-endian int64; with
    open-set noise also of "foreign", the intruding images and whose place each takes.
    """

    spec: ScenarioSpec
    classes: int
    owner: Ints
    given: Ints
    held_out: Bools
    told: Mapping[str, float]
    digests: Mapping[str, str]

    def positions(self, client: int) -> Ints:
        """The client's training samples: int64 positions in the data set, ascending."""
        if not 0 <= client < self.spec.clients:
            raise ValueError(f"there is no client {client}: they are 0..{self.spec.clients - 1}")
        return np.flatnonzero((self.owner == client) & ~self.held_out)

    def held_out_positions(self) -> Ints:
        """All clients' held-out samples: int64 positions in the data set, ascending."""
        return np.flatnonzero(self.held_out)


@dataclass(frozen=True, eq=False)
class Truth:
    """What only evaluation may see.

    true: int64 [n], or None when the data set has given labels only; -1 where an image of another data set stands,
    which no class is right for.  noisy: bool [M]; nominal: float64 [M]: which clients had noise added, and the
    probability with which their samples were touched.

    None where the law has no such thing, or where the settings decide it: expected: float64 [M], the share of really
    wrong labels by the law; transition: float64 [C, C], the nominal one; foreign: int64 [n], which image of the other
    data set stands in the sample's place, -1: its own; part: int64 [M], the client's law in a mixture.
    """

    true: Ints | None
    noisy: Bools
    nominal: Floats
    expected: Floats | None = None
    transition: Floats | None = None
    foreign: Ints | None = None
    part: Ints | None = None


Manifest = tuple[Scenario, Truth]


def build(
    spec: ScenarioSpec,
    labels: Ints,
    classes: int,
    data_digest: str,
    *,
    labels_are_true: bool = True,
    true_labels: Ints | None = None,
    sources: Sources | None = None,
) -> Manifest:
    """Draw the scenario.

    labels: int64 [n] in [0, classes), the data set's.  data_digest: identifies images and labels.  labels_are_true:
    False for a data set whose labels may be wrong (Clothing1M): they are partitioned and given as they are, and the
    truth is unknown, unless the data set brings it: true_labels, int64 [n].  sources: what some laws read besides.
    Raises ValueError where the partition or the noise cannot be drawn, or where noise would be added to labels that
    may be wrong already.
    """
    if not labels_are_true and spec.noise.clients != "none":
        raise ValueError(
            f"noise {spec.noise_name!r} on {spec.dataset}, whose labels may be wrong already, would have an unknown "
            "rate: leave --noise out, which adds none"
        )
    sources = sources or Sources()
    stream = ("scenario", spec.dataset, spec.draw)
    labels = np.array(labels, dtype=np.int64)  # a copy: nobody's later change reaches the truth
    true = labels if labels_are_true else true_labels
    if true is not None and true is not labels:
        true = np.array(true, dtype=np.int64)
        if true.shape != labels.shape or not 0 <= true.min() <= true.max() < classes:
            raise ValueError(f"true labels must be int64 [{len(labels)}] in 0..{classes - 1}")
    owner = split(
        spec.partition, labels if true is None else true, classes, spec.clients, stream, owners=sources.owners
    )
    if true is None or labels_are_true:
        drawn = corrupt(spec.noise, labels, owner, classes, spec.clients, stream, sources)
    else:
        drawn = _as_found(labels, true, owner, classes, spec.clients)
    held_out = np.zeros(len(labels), dtype=bool)
    for m, mine in enumerate(members(owner, spec.clients)):
        order = numpy_stream(*stream, "held-out", m).permutation(mine)
        held_out[order[: whole(spec.holdout, len(mine))]] = True
    told = {"noise_rate": mean_rate(drawn.nominal, owner), "noisy_clients": float(drawn.noisy.sum())}
    digests = {"data": data_digest, "partition": digest(owner), "labels": digest(drawn.given)}
    if drawn.foreign is not None:
        digests["foreign"] = foreign_digest(sources.foreign_digest, drawn.foreign)
        assert true is not None
        true = np.where(drawn.foreign < 0, true, -1)
    scenario = Scenario(
        spec=spec,
        classes=classes,
        owner=sealed(owner),
        given=sealed(drawn.given),
        held_out=sealed(held_out),
        told=told if true is not None else {},
        digests=digests,
    )
    decided = settled(spec.noise) and labels_are_true
    truth = Truth(
        None if true is None else sealed(true),
        sealed(drawn.noisy),
        sealed(drawn.nominal),
        None if true is None or decided else sealed(drawn.expected),
        None if true is None or decided else sealed(drawn.transition),
        None if drawn.foreign is None else sealed(drawn.foreign),
        None if drawn.part is None else sealed(drawn.part),
    )
    return scenario, truth


def _as_found(given: Ints, true: Ints, owner: Ints, classes: int, clients: int) -> Corruption:
    """Labels that came with their truth: nobody drew their noise, so what is nominal is what is."""
    rates = _shares(owner, given != true, clients)
    pairs = class_counts(given, true, classes, classes)
    transition = pairs / np.maximum(pairs.sum(axis=1, keepdims=True), 1)
    return Corruption(given.copy(), rates > 0, rates, rates.copy(), transition, None, None)


def reordered(scenario: Scenario, truth: Truth, order: Ints) -> Manifest:
    """The same about images in another order, int64 [n] positions in this one.  The digests stay those of the scenario
    as drawn, which is the same one."""
    arrays = {name: sealed(getattr(scenario, name)[order]) for name in ("owner", "given", "held_out")}
    true, foreign = (None if values is None else sealed(values[order]) for values in (truth.true, truth.foreign))
    return replace(scenario, **arrays), replace(truth, true=true, foreign=foreign)


def digest(values: npt.NDArray[Any]) -> str:
    """SHA-256, hex, of the elements in little-endian order."""
    return hashlib.sha256(values.astype(values.dtype.newbyteorder("<")).tobytes()).hexdigest()


def foreign_digest(images: str, places: Ints) -> str:
    """SHA-256, hex, of what open-set noise puts where.  images: of the other data set's.  places: ``Truth.foreign``."""
    return hashlib.sha256(f"{images} {digest(places)}".encode()).hexdigest()


def sealed(values: Array) -> Array:
    """The array itself, read-only from now on."""
    values.setflags(write=False)
    return values


# ---------------------------------------------------------------------------------------------- what it is


def summary(scenario: Scenario, truth: Truth) -> dict[str, Any]:
    """The facts of a scenario, as JSON can hold them.

    clients: a row each, with size, held_out, counts [C] (by true label where known, else by given label), classes
    (held), noisy, nominal, expected and realised rate, and in a mixture law, the number of its law.  nominal_rate,
    expected_rate, realised_rate: over all samples; nominal counts touched samples, expected and realised really wrong
    labels.  transition: nominal and realised [C, C], given label (column) by true label (row).  Without truth
    everything about noise is None.  Images of other data sets count by their given label, and in the transitions not
    at all.
    """
    owner, m = scenario.owner, scenario.spec.clients
    counts = class_counts(own_labels(scenario, truth), owner, scenario.classes, m)
    sizes = counts.sum(axis=1)
    rows: list[dict[str, Any]] = [
        {
            "client": i,
            "size": int(sizes[i]),
            "held_out": int(scenario.held_out[owner == i].sum()),
            "classes": int(np.count_nonzero(counts[i])),
            "counts": counts[i].tolist(),
            "noisy": None,
            "nominal": None,
            "expected": None,
            "realised": None,
        }
        for i in range(m)
    ]
    facts: dict[str, Any] = {
        "slug": scenario.spec.slug,
        "samples": len(owner),
        "classes": scenario.classes,
        "clients": rows,
        "noisy_clients": None,
        "nominal_rate": None,
        "expected_rate": None,
        "realised_rate": None,
        "transition": {"nominal": None, "realised": None},
    }
    if truth.true is None:
        return facts
    expected, transition = _law_facts(scenario, truth)
    realised = _shares(owner, scenario.given != truth.true, m)
    for i, row in enumerate(rows):
        row["noisy"], row["nominal"] = bool(truth.noisy[i]), float(truth.nominal[i])
        row["expected"], row["realised"] = float(expected[i]), float(realised[i])
        if truth.part is not None:
            row["law"] = int(truth.part[i])
    facts["noisy_clients"] = int(truth.noisy.sum())
    facts["nominal_rate"] = mean_rate(truth.nominal, owner)
    facts["expected_rate"] = mean_rate(expected, owner)
    facts["realised_rate"] = float((scenario.given != truth.true).mean())
    pairs = realised_pairs(scenario, truth.true)
    facts["transition"] = {
        "nominal": transition.tolist(),
        "realised": (pairs / np.maximum(pairs.sum(axis=1, keepdims=True), 1)).tolist(),
    }
    return facts


def own_labels(scenario: Scenario, truth: Truth) -> Ints:
    """int64 [n]: the labels that the partition and the noise were drawn from: the true ones, where another data set's
    image stands those that its predecessor had, and without a truth the given ones."""
    return scenario.given if truth.true is None else np.where(truth.true < 0, scenario.given, truth.true)


def realised_pairs(scenario: Scenario, true: Ints, client: int | None = None) -> Ints:
    """int64 [C, C]: samples by true label (row) and given label (column), of one client or of all."""
    chosen = true >= 0 if client is None else (true >= 0) & (scenario.owner == client)
    return class_counts(scenario.given[chosen], true[chosen], scenario.classes, scenario.classes)


def _law_facts(scenario: Scenario, truth: Truth) -> tuple[Floats, Floats]:
    """What the law gives on average: the share of wrong labels of each client [M], and the transitions [C, C]."""
    if truth.expected is not None and truth.transition is not None:
        return truth.expected, truth.transition
    own = own_labels(scenario, truth)
    return settled_facts(scenario.spec.noise, own, scenario.owner, truth.nominal, scenario.classes)


def _shares(owner: Ints, wrong: Bools, clients: int) -> Floats:
    """float64 [M]: the share of each client's samples that are wrong."""
    return np.bincount(owner, weights=wrong, minlength=clients) / np.maximum(np.bincount(owner, minlength=clients), 1)


def check(
    scenario: Scenario,
    truth: Truth,
    labels: Ints,
    *,
    labels_are_true: bool | None = None,
    true_labels: Ints | None = None,
    sources: Sources | None = None,
) -> list[str]:
    """What is wrong with a scenario, in words; empty when nothing is.

    labels: int64 [n], the data set's own; labels_are_true (without a word: where the manifest knows the truth),
    true_labels and sources as for ``build``.  The partition must be disjoint and complete, the labels those that the
    settings draw on this machine, and the realised rates agree with the law: within 1/n where an exact count of a
    client's n samples surely changes, else within z sqrt(r (1 - r) / n) + 1/n (a count is whole), z such that a sound
    draw is blamed once in a thousand (4.1 for 20 clients).  Each entry of the realised transition matrix must be
    within Bernstein's bound, which holds however few samples a class has, of the nominal one, with the same chance.
    """
    labels_are_true = truth.true is not None if labels_are_true is None else labels_are_true
    if problems := _misfits(scenario, truth, len(labels), labels if labels_are_true else true_labels):
        return problems
    for name, values in (("partition", scenario.owner), ("labels", scenario.given)):
        if scenario.digests[name] != digest(values):
            problems.append(f"the {name} digest belongs to other {name}")
    try:
        again = build(
            scenario.spec,
            labels,
            scenario.classes,
            scenario.digests["data"],
            labels_are_true=labels_are_true,
            true_labels=true_labels,
            sources=sources,
        )
    except ValueError as error:
        return [*problems, f"the settings draw no scenario here: {error}"]
    problems += _unlike(scenario, truth, *again)
    return problems if truth.true is None else problems + _check_rates(scenario, truth, truth.true)


def _misfits(scenario: Scenario, truth: Truth, n: int, own_truth: Ints | None) -> list[str]:
    """Where the arrays are not of the data set's n samples, the settings' clients and classes, and the known truth."""
    clients, problems = scenario.spec.clients, []
    for name, values in (("owner", scenario.owner), ("given", scenario.given), ("held_out", scenario.held_out)):
        if len(values) != n:
            problems.append(f"{name} has {len(values)} entries, and the data set {n} samples")
    if not len(truth.noisy) == len(truth.nominal) == clients:
        problems.append(f"the truth is about {len(truth.noisy)} clients, and the settings about {clients}")
    if problems:
        return problems
    for name, values, end in (
        ("owner", scenario.owner, clients),
        ("given label", scenario.given, scenario.classes),
    ):
        outside = np.flatnonzero((values < 0) | (values >= end))
        if len(outside):
            problems.append(f"{name} {values[outside[0]]} of sample {outside[0]} is not in 0..{end - 1}")
    if (truth.true is None) != (own_truth is None):
        problems.append(f"the truth is known in the {'data set' if truth.true is None else 'manifest'} only")
    elif truth.true is not None:
        wanted = np.asarray(own_truth)
        if truth.foreign is not None:
            wanted = np.where(truth.foreign < 0, wanted, -1)
        if not np.array_equal(truth.true, wanted):
            problems.append(_difference("true labels differ from the data set's", truth.true, wanted))
    return problems


def _unlike(scenario: Scenario, truth: Truth, again: Scenario, truth_again: Truth) -> list[str]:
    """Where a scenario is not what its settings draw."""
    problems = []
    for what, found, wanted in (
        ("owners", scenario.owner, again.owner),
        ("given labels", scenario.given, again.given),
        ("held-out samples", scenario.held_out, again.held_out),
        ("noisy clients", truth.noisy, truth_again.noisy),
        ("nominal rates", truth.nominal, truth_again.nominal),
    ):
        if not np.array_equal(found, wanted):
            problems.append(_difference(f"{what} differ from those that the settings draw", found, wanted))
    for name, what in _FACTS.items():
        old, new = getattr(truth, name), getattr(truth_again, name)
        if (old is None) != (new is None) or (old is not None and not _alike(old, new)):
            problems.append(f"{what} differ from those that the settings draw")
    if scenario.digests.get("foreign") != again.digests.get("foreign"):
        problems.append("the foreign images are others than those that the settings draw")
    if dict(scenario.told) != dict(again.told):
        problems.append(f"told {dict(scenario.told)} differs from {dict(again.told)}, which the settings give")
    return problems


_FACTS = {
    "expected": "the law's rates",
    "transition": "the law's transitions",
    "foreign": "foreign images",
    "part": "clients' laws in the mixture",
}


def _alike(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> bool:
    """Equal; sums of floats may come out in the last digits otherwise on another machine."""
    if a.shape != b.shape:
        return False
    return np.allclose(a, b, rtol=0, atol=1e-9) if a.dtype.kind == "f" else np.array_equal(a, b)


def _check_rates(scenario: Scenario, truth: Truth, true: Ints) -> list[str]:
    clients, classes = scenario.spec.clients, scenario.classes
    before = own_labels(scenario, truth)
    counts = class_counts(before, scenario.owner, classes, clients)
    realised = _shares(scenario.owner, scenario.given != true, clients)
    expected, transition = _law_facts(scenario, truth)
    z = NormalDist().inv_cdf(1 - FALSE_ALARM / (2 * clients))
    problems = []
    for m, n in enumerate(counts.sum(axis=1)):
        if not truth.nominal[m]:
            if realised[m]:
                problems.append(f"client {m} is clean, and {realised[m]:.2%} of its labels are wrong")
            continue
        law = scenario.spec.noise if truth.part is None else scenario.spec.noise.mixture[truth.part[m]]
        r = min(expected[m], 1.0)
        allowed = 1 / n + (0 if _sure(law, counts[m]) else z * math.sqrt(r * (1 - r) / n))
        if abs(realised[m] - r) > allowed + 1e-9:
            problems.append(
                f"client {m}: {realised[m]:.2%} of {n} labels are wrong, and the law gives {r:.2%} +- {allowed:.2%}"
            )
    if "open-set" in {law.target for law in parts(scenario.spec.noise)}:
        return problems  # which images are the data set's own is drawn too, so rows have no fixed size
    pairs, sizes = realised_pairs(scenario, true), counts.sum(axis=0)[:, None]
    surprise = math.log(2 * classes**2 / FALSE_ALARM)
    spread = sizes * transition * (1 - transition)
    allowance = surprise / 3 + np.sqrt(surprise**2 / 9 + 2 * surprise * spread)
    allowance[(transition <= 0) | (transition >= 1)] = 0
    far = np.abs(pairs - sizes * transition) > allowance + 1e-6 * np.maximum(sizes, 1)
    for y, j in np.argwhere(far)[:5]:
        problems.append(
            f"class {y} was labelled {j} {pairs[y, j]} times of {sizes[y, 0]}, and the law gives "
            f"{sizes[y, 0] * transition[y, j]:.1f} +- {allowance[y, j]:.1f}"
        )
    return problems


def _sure(law: Noise, counts: Ints) -> bool:
    """Whether an exact count of the client's samples surely gets a wrong label."""
    if law.count == "bernoulli" or law.target in ("human", "instance", "twin", "matrix"):
        return False
    if law.target == "open-set":
        return True
    never = np.diag(target_law(law, label_space(law, counts), len(counts)))
    return not never[counts > 0].any()


def _difference(what: str, a: npt.NDArray[Any], b: npt.NDArray[Any]) -> str:
    unlike = np.flatnonzero(a != b)
    return f"{what}: {len(unlike)} of {len(a)}, first at {unlike[0]} ({a[unlike[0]]}, not {b[unlike[0]]})"


def diff(a: Manifest, b: Manifest) -> list[str]:
    """What differs between two manifests, in words, the first one's value first; empty when nothing does."""
    (first, truth_a), (second, truth_b) = a, b
    found = [
        f"{name}: {x!r} and {y!r}"
        for (name, x), (_, y) in zip(_flat(first.spec), _flat(second.spec), strict=True)
        if x != y and name not in {f"partition.{place}" for place in PLACE}
    ]
    if first.classes != second.classes:
        found.append(f"classes: {first.classes} and {second.classes}")
    for name, what in (("data", "data"), ("foreign", "foreign images")):  # without the latter the law says it
        old, new = first.digests.get(name), second.digests.get(name)
        if old and new and old != new:
            found.append(f"{what}: SHA-256 {old[:12]}... and {new[:12]}...")
    if len(first.owner) != len(second.owner):
        return [*found, f"samples: {len(first.owner)} and {len(second.owner)}"]
    n = len(first.owner)
    for what, x, y in (
        ("samples have another owner", first.owner, second.owner),
        ("samples have another given label", first.given, second.given),
        ("samples are held out in one only", first.held_out, second.held_out),
    ):
        if unlike := int((x != y).sum()):
            found.append(f"{unlike} of {n} {what}")
    if (truth_a.true is None) != (truth_b.true is None):
        found.append(f"true labels are known in the {'second' if truth_a.true is None else 'first'} only")
    elif truth_a.true is not None and truth_b.true is not None:
        if unlike := int((truth_a.true != truth_b.true).sum()):
            found.append(f"{unlike} of {n} samples have another true label")
        rates = [float((s.given != t.true).mean()) for s, t in (a, b)]
        if rates[0] != rates[1]:
            found.append(f"realised noise: {rates[0]:.2%} and {rates[1]:.2%}")
    noisy_a, noisy_b = (np.flatnonzero(t.noisy).tolist() for t in (truth_a, truth_b))
    if noisy_a != noisy_b:
        found.append(f"noisy clients: {noisy_a} and {noisy_b}")
    elif first.spec.clients == second.spec.clients and not np.array_equal(truth_a.nominal, truth_b.nominal):
        found.append(f"{int((truth_a.nominal != truth_b.nominal).sum())} clients have another nominal rate")
    return found


def incomparable(a: Manifest, b: Manifest) -> list[str]:
    """Why a number reached on one scenario cannot be set against one reached on the other; empty when it can."""
    first, second = a[0], b[0]
    if first.spec.dataset != second.spec.dataset or first.digests["data"] != second.digests["data"]:
        return ["the images are others, so the accuracies are of two different tests"]
    reasons = []
    one_law = {**first.spec.decisive, "draw": 0} == {**second.spec.decisive, "draw": 0}
    if one_law and first.spec.draw != second.spec.draw:
        reasons.append(
            "they are two draws of one law: differences between draws are chance, so compare methods on the same draw, "
            "or means over the same draws"
        )
    elif first.digests["partition"] != second.digests["partition"]:
        reasons.append("the clients hold other samples, so training differs whatever the method and the noise")
    if first.digests["labels"] != second.digests["labels"] and not one_law:
        said = [s.spec.noise.tau if "tau" in reads(s.spec.noise) else None for s in (first, second)]
        rates = [float((s.given != t.true).mean()) for s, t in (a, b) if t.true is not None]
        if said[0] is not None and said[0] == said[1] and len(rates) == 2 and abs(rates[0] - rates[1]) > 0.005:
            reasons.append(
                f"both say tau={said[0]}, and {rates[0]:.1%} and {rates[1]:.1%} of the labels are really wrong: noise "
                "of the same level differs in whether the true class counts, in who is noisy and in the rate's law"
            )
        else:
            reasons.append("the labels that are trained on are others")
    if first.digests.get("foreign") != second.digests.get("foreign"):
        reasons.append("other images of another data set stand among those that are trained on")
    if first.spec.holdout != second.spec.holdout:
        trained = [int((~s.held_out).sum()) for s in (first, second)]
        reasons.append(f"one trains on {trained[0]} samples and the other on {trained[1]}")
    if not reasons and first.digests != second.digests:
        reasons.append("the samples are others")
    return reasons


def _flat(config: Config, prefix: str = "") -> list[tuple[str, Any]]:
    fields: list[tuple[str, Any]] = []
    for name in type(config).model_fields:
        value = getattr(config, name)
        fields += _flat(value, f"{prefix}{name}.") if isinstance(value, Config) else [(prefix + name, value)]
    return fields


def remarks(scenario: Scenario, truth: Truth) -> list[str]:
    """What somebody who asked for this scenario may not expect of it, a line each."""
    spec, found = scenario.spec, []
    if spec.noise.clients != "none" and not truth.nominal.any():
        levels = [f"{name}={getattr(spec.noise, name)}" for name in ("rho", "tau") if name in reads(spec.noise)]
        said = ", ".join([*levels, f"clients={spec.clients}"])
        found.append(
            f"the scenario has no noisy client, and all labels are as they were: noise {spec.noise_name} ({said}); "
            "take more of it, or say --noise clean"
        )
    if spec.partition.law == "manifest" and not _is_text(Path(spec.partition.file)):
        found.append(
            f"of {spec.partition.file} the split alone is taken, and not its labels: the noise is drawn anew "
            f"({spec.noise_name}, draw {spec.draw})"
        )
    if spec.is_fixed and spec.draw:
        found.append(
            f"nothing in this scenario is drawn (partition {spec.partition.law}, noise {spec.noise_name}, no "
            "hold-out): another --draw is the same run again, another --seed is another run"
        )
    return found


# ------------------------------------------------------------------------------------------------ the file


def save(path: Path | str, scenario: Scenario, truth: Truth) -> None:
    """Write the manifest.  Atomic: a kill leaves the old file or the new one."""
    path, data = Path(path), encoded(scenario, truth)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")  # not mkstemp's, which nobody else may read
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def encoded(scenario: Scenario, truth: Truth) -> bytes:
    """The manifest's file: one of safetensors with the arrays, and in its header JSON with schema version, settings,
    ``summary`` and digests.  Equal scenarios give equal bytes, wherever the file of a split lies: its name alone is
    written."""
    arrays = _arrays(scenario, truth)
    header = {
        "schema": SCHEMA,
        "spec": scenario.spec.published.model_dump(mode="json"),
        "classes": scenario.classes,
        "told": dict(scenario.told),
        "digests": dict(scenario.digests),
        "arrays": {name: digest(values) for name, values in arrays.items()},
        "summary": summary(scenario, truth),
    }
    text = _canonical({**header, "sha256": hashlib.sha256(_canonical(header).encode()).hexdigest()})
    return bytes(safetensors_save(arrays, metadata={HEADER: text}))


def load(path: Path | str) -> Manifest:
    """Read a manifest and verify its digests.

    Raises FileNotFoundError, or ValueError naming the file and what is damaged.  Nothing is unpickled.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no manifest at {path}: `flnoisebench scenario build` writes one")
    try:
        with safe_open(path, framework="numpy") as file:
            text = (file.metadata() or {}).get(HEADER)
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    except (SafetensorError, OSError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} is truncated or no manifest ({error}): fetch or build it anew") from error
    if text is None:
        raise ValueError(f"{path} is a safetensors file, but no manifest: its header has no {HEADER!r}")
    try:
        header = json.loads(text)
        schema, stated = header["schema"], header.pop("sha256")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _altered(path, "header") from error
    if schema != SCHEMA:
        raise ValueError(f"{path} has manifest schema {schema}, and this version reads {SCHEMA}: update flnoisebench")
    # The text too must be what ``save`` writes: a float's seventeenth digit may change and the number stay the same.
    body = _canonical(header)
    if stated != hashlib.sha256(body.encode()).hexdigest() or text != _canonical({**header, "sha256": stated}):
        raise _altered(path, "header")
    if arrays.keys() != header["arrays"].keys():
        raise _altered(path, "set of arrays")
    for name, values in arrays.items():
        if digest(values) != header["arrays"][name]:
            raise _altered(path, f"array {name!r}")
    try:
        spec = ScenarioSpec.model_validate(header["spec"])
    except ValueError as error:
        raise ValueError(f"{path} has settings that this version does not take: {error}") from error
    scenario = Scenario(
        spec=spec,
        classes=header["classes"],
        owner=sealed(arrays["owner"]),
        given=sealed(arrays["given"]),
        held_out=sealed(arrays["held_out"]),
        told=header["told"],
        digests=header["digests"],
    )
    truth = Truth(
        true=sealed(arrays["true"]) if "true" in arrays else None,
        noisy=sealed(arrays["noisy"]),
        nominal=sealed(arrays["nominal"]),
        **{name: sealed(arrays[name]) for name in _FACTS if name in arrays},
    )
    types = {name: (values.dtype, values.ndim) for name, values in _arrays(scenario, truth).items()}
    if types != {name: (np.dtype(_DTYPES[name]), 2 if name == "transition" else 1) for name in types}:
        raise _altered(path, "type of the arrays")
    for name, values in (("partition", scenario.owner), ("labels", scenario.given)):
        if scenario.digests[name] != digest(values):
            raise ValueError(f"{path}: the {name} digest belongs to other {name}")
    return scenario, truth


def read_split(spec: Partition, samples: int, data_digest: str) -> Ints:
    """int64 [n]: the owners that the file of a partition 'manifest' states, a manifest's or a CSV's.

    Raises FileNotFoundError, or ValueError, naming the file, where it is not the pinned one, is damaged, or divides
    other data.
    """
    pinned(spec)
    path = Path(spec.file)
    if _is_text(path):
        return read_csv(path, samples)
    scenario, _ = load(path)
    if scenario.digests["data"] != data_digest:
        raise ValueError(f"{path} divides other data (their SHA-256 differs): {scenario.spec.dataset}")
    return scenario.owner


def split_clients(spec: Partition) -> int | None:
    """How many clients the file of a partition 'manifest' names; None where it is damaged, as ``read_split`` says."""
    path = Path(spec.file)
    try:
        return 1 + int(read_csv(path).max()) if _is_text(path) else load(path)[0].spec.clients
    except ValueError:
        return None


def _is_text(path: Path) -> bool:
    """Whether a split's file is CSV: a manifest begins with its header's length in eight bytes."""
    with path.open("rb") as opened:
        return b"\0" not in opened.read(1024)


_DTYPES = {
    "owner": "int64",
    "given": "int64",
    "held_out": "bool",
    "true": "int64",
    "noisy": "bool",
    "nominal": "float64",
    "expected": "float64",
    "transition": "float64",
    "foreign": "int64",
    "part": "int64",
}


def _arrays(scenario: Scenario, truth: Truth) -> dict[str, npt.NDArray[Any]]:
    known = {name: getattr(truth, name) for name in ("true", *_FACTS) if getattr(truth, name) is not None}
    return {
        "owner": scenario.owner,
        "given": scenario.given,
        "held_out": scenario.held_out,
        "noisy": truth.noisy,
        "nominal": truth.nominal,
        **known,
    }


def _altered(path: Path, what: str) -> ValueError:
    return ValueError(f"{path}: the {what} was altered (its SHA-256 is another): fetch or build the manifest anew")


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
