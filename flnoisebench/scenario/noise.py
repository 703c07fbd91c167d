"""Which labels are wrong: who is noisy, how much, which samples, and to what.

The four are independent choices, each with its own random streams, so that changing one leaves the draws of the
others alone: raising rho adds noisy clients to those that were noisy already, raising tau adds wrong labels to
those that were wrong already, and what another client holds shifts nothing.

rho = noisy-client ratio, tau = sample-noise ratio; C classes, M clients, n samples.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import pydantic

from flnoisebench.api import Config, Field
from flnoisebench.streams import Name, numpy_stream

# The official coarse label of each fine label of CIFAR-100 (Krizhevsky 2009), fine labels in alphabetical order.
# Blocks of five fine ids are no superclasses: only 6 of 100 such pairs share one.
CIFAR100_COARSE = (
    4, 1, 14, 8, 0, 6, 7, 7, 18, 3, 3, 14, 9, 18, 7, 11, 3, 9, 7, 11, 6, 11, 5, 10, 7, 6, 13, 15, 3, 15, 0, 11, 1,
    10, 12, 14, 16, 9, 11, 5, 5, 19, 8, 8, 15, 13, 14, 17, 18, 10, 16, 4, 17, 4, 2, 0, 17, 4, 18, 17, 10, 3, 2, 12,
    12, 16, 12, 1, 9, 19, 2, 10, 0, 1, 16, 12, 9, 13, 15, 13, 16, 19, 2, 4, 6, 19, 5, 5, 8, 19, 18, 1, 2, 15, 6, 0,
    17, 8, 14, 13,
)  # fmt: skip


def _next_in_group(groups: tuple[int, ...]) -> tuple[int, ...]:
    """For each class the next class of its group, the last one going back to the first."""
    members = {g: [c for c, other in enumerate(groups) if other == g] for g in groups}
    return tuple(members[g][(members[g].index(c) + 1) % len(members[g])] for c, g in enumerate(groups))


CLASS_MAPS: dict[str, tuple[int, ...]] = {  # entry c: what class c is mistaken for; c itself: it stays right
    # truck -> automobile, bird -> airplane, deer -> horse, cat <-> dog (Patrini et al., CVPR 2017)
    "cifar10-semantic": (0, 1, 0, 5, 7, 3, 6, 7, 8, 1),
    "cifar100-superclass-next": _next_in_group(CIFAR100_COARSE),
}


class Noise(Config):
    """A noise law in flat fields.  The defaults are FedCova's symmetric noise at (rho, tau) = (.6, .7)."""

    # who
    clients: Literal["none", "all", "exact", "bernoulli", "ids"] = Field(
        "exact", why="exact: int(rho M) clients, so that draws differ less; bernoulli: each with probability rho"
    )
    rho: float = Field(
        0.6, ge=0, le=1, allow_inf_nan=False, unit="share of clients", why="FedCova's hardest cells; exact, bernoulli"
    )
    ids: tuple[int, ...] = Field((), why="the noisy clients when clients='ids'")
    # how much: the probability that a sample of a noisy client is touched
    rate: Literal["constant", "uniform", "bilevel", "above", "beta", "ramp"] = Field(
        "bilevel",
        why="FedCova's. constant: tau; uniform: U[lo, hi]; bilevel: U[0, 2 tau] up to tau = .5, U[2 tau - 1, 1] from "
        "there; above: FedCorr's U[tau, 1]; beta: Beta(beta_a, beta_b); ramp: lo + (hi - lo) m / M for client m",
    )
    tau: float = Field(
        0.7, ge=0, le=1, allow_inf_nan=False, unit="share of samples", why="FedCova; constant, bilevel, above"
    )
    lo: float = Field(0.5, ge=0, le=1, allow_inf_nan=False, unit="share of samples", why="FedNoRo; uniform, ramp")
    hi: float = Field(0.7, ge=0, le=1, allow_inf_nan=False, unit="share of samples", why="FedNoRo; uniform, ramp")
    beta_a: float = Field(0.1, ge=1e-3, le=1e6, why="FedNed: most clients nearly clean or nearly all wrong; beta")
    beta_b: float = Field(0.1, ge=1e-3, le=1e6, why="FedNed; beta")
    # which
    count: Literal["bernoulli", "exact"] = Field(
        "bernoulli", why="FedCorr's: each sample with that probability; exact: int(rate n) of a client's n samples"
    )
    # to what
    target: Literal["symmetric", "pair", "map"] = Field("symmetric", why="FedCova's main tables")
    include_true: bool = Field(
        True, why="FedCorr's: the random label may be the true one, so .5 is .45 real noise at C = 10; symmetric only"
    )
    pair_step: int = Field(1, why="Co-teaching's y + 1; FNBench has y - 1 (set -1); pair only")
    class_map: str = Field("", why="a name in CLASS_MAPS; map only")
    label_space: Literal["global", "client"] = Field(
        "global", why="all C classes; client: the classes that the client holds, as in FedNed and FedNoisy's local"
    )

    @pydantic.field_validator("ids", mode="before")
    @classmethod
    def _ids_from_text(cls, value: Any) -> Any:  # "0,3,5", as a command line gives it
        return [part for part in value.split(",") if part.strip()] if isinstance(value, str) else value

    @pydantic.model_validator(mode="after")
    def _fits_together(self) -> Noise:
        if self.lo > self.hi:
            raise ValueError(f"lo={self.lo} is above hi={self.hi}: swap them")
        if self.pair_step not in (1, -1):
            raise ValueError(f"pair_step is 1 (y -> y + 1) or -1 (y -> y - 1), not {self.pair_step}")
        if self.class_map and self.class_map not in CLASS_MAPS:
            raise ValueError(f"unknown class_map {self.class_map!r}{near(self.class_map, CLASS_MAPS)}")
        if self.target == "map" and not self.class_map:
            raise ValueError(f"target='map' needs class_map, one of {', '.join(CLASS_MAPS)}")
        if self.target == "map" and self.label_space == "client":
            raise ValueError("a class map may lead outside a client's own classes: take label_space='global'")
        if (self.clients == "ids") != bool(self.ids):
            raise ValueError(f"clients={self.clients!r} with ids={self.ids}: clients='ids' and ids go together")
        if any(i < 0 for i in self.ids) or len(set(self.ids)) != len(self.ids):
            raise ValueError(f"ids are different client numbers from 0, not {self.ids}")
        return self


_READS: dict[tuple[str, str], tuple[str, ...]] = {  # the fields that a choice reads
    ("clients", "exact"): ("rho",),
    ("clients", "bernoulli"): ("rho",),
    ("clients", "ids"): ("ids",),
    ("rate", "constant"): ("tau",),
    ("rate", "uniform"): ("lo", "hi"),
    ("rate", "bilevel"): ("tau",),
    ("rate", "above"): ("tau",),
    ("rate", "beta"): ("beta_a", "beta_b"),
    ("rate", "ramp"): ("lo", "hi"),
    ("target", "symmetric"): ("include_true", "label_space"),
    ("target", "pair"): ("pair_step", "label_space"),
    ("target", "map"): ("class_map", "label_space"),
}


def reads(noise: Noise) -> frozenset[str]:
    """The names of the fields that this law depends on (a clean one: ``clients`` alone)."""
    if noise.clients == "none":
        return frozenset({"clients"})
    names = {"clients", "rate", "count", "target"}
    for choice in ("clients", "rate", "target"):
        names.update(_READS.get((choice, getattr(noise, choice)), ()))
    return frozenset(names)


NOISE_PRESETS: dict[str, tuple[Noise, str]] = {  # name: (law, where it comes from)
    "clean": (Noise(clients="none"), "no label is changed"),
    "fedcova-sym": (
        Noise(),
        "FedCova (arXiv 2603.04062), symmetric, read as exactly int(rho M) noisy clients; it prints U[1 - 2 tau, 1] "
        "for tau >= .5, a slip for U[2 tau - 1, 1]",
    ),
    "fedcova-sym-bernoulli": (
        Noise(clients="bernoulli"),
        "FedCova, symmetric, the other reading: each client is noisy with probability rho, as in FedCorr",
    ),
    "fedcova-asym": (
        Noise(target="pair"),
        "FedCova, asymmetric: 'each class mainly to another specific class', read as y -> y + 1 (the map is unstated)",
    ),
    "fedcova-asym-semantic": (
        Noise(target="map", class_map="cifar10-semantic"),
        "FedCova, asymmetric, read as CIFAR-10's usual semantic map, which touches five classes",
    ),
    "fedcorr": (
        Noise(clients="bernoulli", rate="above", rho=0.6, tau=0.5),
        "FedCorr (Xu et al., CVPR 2022): client ~ Bernoulli(rho), rate ~ U[tau, 1], uniform over all C classes "
        "(its code over classes 0 to 9 whatever C is)",
    ),
    "fednoro-random": (
        Noise(rho=0.4, rate="uniform", lo=0.5, hi=0.7),
        "FedNoRo (Wu et al., IJCAI 2023), noise 'random': int(rho M) clients, rate ~ U[.5, .7]",
    ),
    "fednoisy-global": (
        Noise(clients="all", rate="constant", tau=0.4, count="exact", include_true=False),
        "FedNoisy (Liang et al. 2023), globalized: one rate, true class excluded; exact on each client, there over "
        "the whole set",
    ),
    "fednoisy-local": (
        Noise(clients="all", rate="uniform", lo=0.3, hi=0.5, count="exact", include_true=False, label_space="client"),
        "FedNoisy (Liang et al. 2023), localized: rate ~ U[.3, .5], wrong labels among the client's own classes",
    ),
    "fnbench-ramp": (
        Noise(clients="all", rate="ramp", lo=0.0, hi=0.4, count="exact", include_true=False),
        "FNBench and FedRN: rate .4 m / M on client m, so .4 is never reached; true class excluded",
    ),
    "fedned-beta": (
        Noise(clients="all", rate="beta", count="exact", include_true=False, label_space="client"),
        "FedNed's code: rate ~ Beta(.1, .1), own classes; there sorted by client and always the first samples of a "
        "class-ordered list, here neither",
    ),
    "dividemix-sym": (
        Noise(clients="all", rate="constant", tau=0.5, count="exact"),
        "DivideMix (Li et al., ICLR 2020), symmetric, true class included: .5 is .45 real noise at C = 10",
    ),
    "dividemix-asym": (
        Noise(clients="all", rate="constant", tau=0.4, count="exact", target="map", class_map="cifar10-semantic"),
        "DivideMix (Li et al., ICLR 2020), asymmetric: the semantic map at .4, about .2 real noise",
    ),
    "coteaching-pair": (
        Noise(clients="all", rate="constant", tau=0.45, target="pair"),
        "Co-teaching (Han et al., NeurIPS 2018), pair flip y -> y + 1 at .45",
    ),
}


def noise_from(preset: str, **changes: Any) -> Noise:
    """A preset with other values: ``noise_from("fedcova-sym", rho=0.4, tau=0.3)``.

    Raises ValueError (pydantic's is one) for an unknown preset or field, with near misses, for a value out of
    range, and for a field that the resulting law would not read: it would change nothing.
    """
    if preset not in NOISE_PRESETS:
        raise ValueError(f"unknown noise {preset!r}{near(preset, NOISE_PRESETS)}")
    for name in changes:
        if name not in Noise.model_fields:
            raise ValueError(f"noise has no field {name!r}{near(name, Noise.model_fields)}")
    noise = Noise.model_validate({**NOISE_PRESETS[preset][0].model_dump(), **changes})
    for name in changes:
        if name not in reads(noise):
            raise ValueError(
                f"{name}={changes[name]!r} would change nothing in {preset!r} (clients={noise.clients!r}, "
                f"rate={noise.rate!r}, target={noise.target!r}): it reads {', '.join(sorted(reads(noise)))}"
            )
    return noise


def near(name: str, known: Iterable[str]) -> str:
    """The end of an error message: what may have been meant, or all there is."""
    close = difflib.get_close_matches(name, known, n=3)
    return f"; did you mean {' or '.join(close)}?" if close else f"; there are {', '.join(known)}"


# ------------------------------------------------------------------------------------------------ the draw


class Corruption(NamedTuple):
    """Drawn noise.

    given: int64 [n], the labels that clients see.  noisy: bool [M].  nominal: float64 [M], the probability (or
    share) with which a client's samples are touched; 0 on clean clients.  transition: float64 [C, C], the nominal
    law of the given label (column) by true label (row) over all samples; zero rows for classes without samples.
    """

    given: npt.NDArray[np.int64]
    noisy: npt.NDArray[np.bool_]
    nominal: npt.NDArray[np.float64]
    transition: npt.NDArray[np.float64]


def corrupt(
    noise: Noise,
    true_labels: npt.NDArray[np.int64],
    owner: npt.NDArray[np.int64],
    classes: int,
    clients: int,
    stream_names: tuple[Name, ...],
) -> Corruption:
    """Draw who is noisy, how much, which samples are touched, and what they become.

    true_labels: int64 [n] in [0, classes).  owner: int64 [n] in [0, clients).  stream_names: the names of the draw;
    the streams are (*names, "who"), (*names, "rate", m), (*names, "which", m) and (*names, "what", m).
    New labels are computed from the true ones only, so none is flipped twice.  Raises ValueError for ids that are
    no clients, for a class map of another number of classes, and where a noisy client has no wrong label to give.
    """
    noisy = _who(noise, clients, stream_names)
    nominal = np.where(noisy, _rates(noise, clients, stream_names), 0.0)
    given = true_labels.copy()
    space = np.arange(classes)
    for m, mine in enumerate(members(owner, clients)):
        if not noisy[m]:
            continue
        clean = true_labels[mine]
        # Both are drawn for all samples, touched or not, so that touched samples keep their new label at another rate.
        chance = numpy_stream(*stream_names, "which", m).random(len(mine))
        if noise.count == "bernoulli":
            touched = chance < nominal[m]
        else:
            touched = np.argsort(np.argsort(chance, kind="stable")) < whole(nominal[m], len(mine))
        own = space if noise.label_space == "global" else np.unique(clean)
        new = _new_labels(noise, clean, own, classes, numpy_stream(*stream_names, "what", m), f"client {m}")
        given[mine] = np.where(touched, new, clean)
    return Corruption(given, noisy, nominal, nominal_transition(noise, true_labels, owner, nominal, classes))


def whole(share: float, n: int) -> int:
    """int(share n) as it is meant: 0.29 * 100 is 28.999999999999996 in binary, and that is 29."""
    return math.floor(share * n + 1e-9)


def members(owner: npt.NDArray[np.int64], clients: int) -> list[npt.NDArray[np.int64]]:
    """Each client's positions, ascending."""
    return np.split(np.argsort(owner, kind="stable"), np.cumsum(np.bincount(owner, minlength=clients))[:-1])


def _who(noise: Noise, clients: int, names: tuple[Name, ...]) -> npt.NDArray[np.bool_]:
    """bool [M].  Clients that are noisy at some rho are noisy at every higher one."""
    if noise.clients in ("none", "all"):
        return np.full(clients, noise.clients == "all")
    noisy = np.zeros(clients, dtype=bool)
    if noise.clients == "ids":
        if max(noise.ids) >= clients:
            raise ValueError(f"ids={noise.ids}: there is no client {max(noise.ids)}, they are 0..{clients - 1}")
        noisy[list(noise.ids)] = True
        return noisy
    rng = numpy_stream(*names, "who")
    if noise.clients == "bernoulli":
        return rng.random(clients) < noise.rho
    noisy[rng.permutation(clients)[: whole(noise.rho, clients)]] = True
    return noisy


def interval(noise: Noise) -> tuple[float, float]:
    """The interval [a, b] on which a noisy client's rate is uniform (constant: a = b).

    bilevel has mean tau in both branches.  FedCova prints U[1 - 2 tau, 1] for the upper one, a slip: at tau = .7
    that is [-.4, 1], of mean .3, and the paper's own initial noise (34.4 % at (.6, .7)) fits rho tau = .42.
    """
    tau = noise.tau
    if noise.rate == "bilevel":
        return (0.0, 2 * tau) if tau <= 0.5 else (2 * tau - 1, 1.0)
    return {"constant": (tau, tau), "above": (tau, 1.0)}.get(noise.rate, (noise.lo, noise.hi))


def _rates(noise: Noise, clients: int, names: tuple[Name, ...]) -> npt.NDArray[np.float64]:
    """float64 [M]: every client's rate, were it noisy."""
    low, high = interval(noise)
    if noise.rate == "ramp":
        return low + (high - low) * np.arange(clients) / clients
    streams = [numpy_stream(*names, "rate", m) for m in range(clients)]
    if noise.rate == "beta":
        return np.array([rng.beta(noise.beta_a, noise.beta_b) for rng in streams])
    return np.array([low + (high - low) * rng.random() for rng in streams])


def _new_labels(
    noise: Noise,
    clean: npt.NDArray[np.int64],
    own: npt.NDArray[np.int64],
    classes: int,
    rng: np.random.Generator,
    where: str,
) -> npt.NDArray[np.int64]:
    """What each sample would become if it were touched.

    In the sorted label space ``own`` symmetric noise is a random cyclic shift (from 1 where the true class is
    excluded) and pair noise a shift by one.
    """
    if noise.target == "map":
        return np.asarray(_class_map(noise, classes))[clean]
    _require_two(noise, own, where)
    if noise.target == "pair":
        shift: Any = noise.pair_step
    else:
        shift = rng.integers(0 if noise.include_true else 1, len(own), size=len(clean))
    return own[(np.searchsorted(own, clean) + shift) % len(own)]


def _class_map(noise: Noise, classes: int) -> tuple[int, ...]:
    targets = CLASS_MAPS[noise.class_map]
    if len(targets) != classes:
        raise ValueError(f"class_map {noise.class_map!r} is for {len(targets)} classes, and the data set has {classes}")
    return targets


def _require_two(noise: Noise, own: npt.NDArray[np.int64], where: str) -> None:
    if len(own) < 2 and not (noise.target == "symmetric" and noise.include_true):
        raise ValueError(
            f"{where} has one class ({', '.join(map(str, own))}), so label_space={noise.label_space!r} has no wrong "
            "label for it: take label_space='global', another draw, or a partition with a higher p or alpha"
        )


# ------------------------------------------------------------------------------------------- nominal facts


def target_law(noise: Noise, own: npt.NDArray[np.int64], classes: int) -> npt.NDArray[np.float64]:
    """float64 [C, C]: the law of a touched sample's label (column) by its true class (row) in the label space
    ``own``, ascending.  Classes outside it stay as they are."""
    law = np.eye(classes)
    if noise.target == "map":
        return law[list(_class_map(noise, classes))]
    _require_two(noise, own, "a client")
    if noise.target == "pair":
        law[own] = np.eye(classes)[np.roll(own, -noise.pair_step)]
    elif noise.include_true:
        law[np.ix_(own, own)] = 1 / len(own)
    else:
        law[np.ix_(own, own)] = (1 - np.eye(len(own))) / (len(own) - 1)
    return law


def class_counts(
    labels: npt.NDArray[np.int64], owner: npt.NDArray[np.int64], classes: int, clients: int
) -> npt.NDArray[np.int64]:
    """int64 [M, C]: samples by client and class."""
    return np.bincount(owner * classes + labels, minlength=clients * classes).reshape(clients, classes)


def nominal_transition(
    noise: Noise,
    true_labels: npt.NDArray[np.int64],
    owner: npt.NDArray[np.int64],
    nominal: npt.NDArray[np.float64],
    classes: int,
) -> npt.NDArray[np.float64]:
    """float64 [C, C]: the law of the given label (column) by true label (row) over all samples, for clients of these
    rates; zero rows for classes without samples."""
    counts = class_counts(true_labels, owner, classes, len(nominal))
    touched = counts * nominal[:, None]
    moved = np.zeros((classes, classes))
    for own, rows in _by_label_space(noise, counts, nominal):
        moved += touched[rows].sum(axis=0)[:, None] * target_law(noise, own, classes)
    total = counts.sum(axis=0)
    return (np.diag(total - touched.sum(axis=0)) + moved) / np.maximum(total, 1)[:, None]


def expected_rates(
    noise: Noise,
    true_labels: npt.NDArray[np.int64],
    owner: npt.NDArray[np.int64],
    nominal: npt.NDArray[np.float64],
    classes: int,
) -> npt.NDArray[np.float64]:
    """float64 [M]: the expected share of really wrong labels of each client: the nominal rate less what falls on the
    true class (1/C of it where it is included) or on classes that a map leaves alone."""
    counts = class_counts(true_labels, owner, classes, len(nominal))
    wrong = np.zeros(len(nominal))
    for own, rows in _by_label_space(noise, counts, nominal):
        wrong[rows] = nominal[rows] * (counts[rows] @ (1 - np.diag(target_law(noise, own, classes))))
    return wrong / np.maximum(counts.sum(axis=1), 1)


def _by_label_space(
    noise: Noise, counts: npt.NDArray[np.int64], nominal: npt.NDArray[np.float64]
) -> list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
    """(label space, noisy clients that have it): one entry, or one a client."""
    rows = np.flatnonzero(nominal)
    if noise.label_space == "client":
        return [(np.flatnonzero(counts[m]), np.array([m])) for m in rows]
    return [(np.arange(counts.shape[1]), rows)] if len(rows) else []


def mean_rate(nominal: npt.NDArray[np.float64], owner: npt.NDArray[np.int64]) -> float:
    """The mean nominal rate over clients, weighted by their sizes."""
    return float(nominal[owner].mean())
