"""Which labels are wrong: who is noisy, how much, which samples, and to what.

The four are independent choices, flat fields of one small specification, and presets name the laws that papers use.
``corruption`` draws them.

rho = noisy-client ratio, tau = sample-noise ratio; C classes, M clients, n samples.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pydantic

from flnoisebench.api import Field, near
from flnoisebench.scenario.class_maps import CLASS_MAPS
from flnoisebench.scenario.partition import Law, Partition

Floats = npt.NDArray[np.float64]


class Noise(Law):
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
    rate: Literal["constant", "uniform", "bilevel", "above", "beta", "beta-sorted", "ramp"] = Field(
        "bilevel",
        why="FedCova's. constant: tau; uniform: U[lo, hi]; bilevel: U[0, 2 tau] up to tau = .5, U[2 tau - 1, 1] from "
        "there; above: FedCorr's U[tau, 1]; beta: Beta(beta_a, beta_b); beta-sorted: the same, rising with the client; "
        "ramp: lo + (hi - lo) m / M for client m",
    )
    tau: float = Field(
        0.7, ge=0, le=1, allow_inf_nan=False, unit="share of samples", why="FedCova; constant, bilevel, above"
    )
    lo: float = Field(0.5, ge=0, le=1, allow_inf_nan=False, unit="share of samples", why="FedNoRo; uniform, ramp")
    hi: float = Field(0.7, ge=0, le=1, allow_inf_nan=False, unit="share of samples", why="FedNoRo; uniform, ramp")
    beta_a: float = Field(0.1, ge=1e-3, le=1e6, why="FedNed: most clients nearly clean or nearly all wrong; beta")
    beta_b: float = Field(0.1, ge=1e-3, le=1e6, why="FedNed; beta")
    mass: Literal["drawn", "stratified"] | float = Field(
        "drawn",
        unit="share of all labels",
        why="wrong labels over all clients. drawn: as it falls; stratified: int(rho M) noisy clients, and rates are "
        "drawn anew until it is within a point of its expectation; a number: until within a point of that",
        later=True,
    )
    # which
    count: Literal["bernoulli", "exact", "first"] = Field(
        "bernoulli",
        why="FedCorr's: each sample with that probability; exact: int(rate n) of a client's n samples; first: the "
        "first int(rate n) of them in the order of their classes",
    )
    # to what
    target: Literal["symmetric", "pair", "map", "matrix", "instance", "human", "twin", "open-set", "mixed"] = Field(
        "symmetric",
        why="FedCova's main tables. matrix: a transition matrix; instance: by the image (Xia et al. 2020); human: what "
        "people wrote; twin: drawn from the transition matrix of what people wrote; open-set: the label stays, the "
        "image is another data set's; mixed: a law a client",
    )
    include_true: bool = Field(
        True, why="FedCorr's: the random label may be the true one, so .5 is .45 real noise at C = 10; symmetric only"
    )
    pair_step: int = Field(1, why="Co-teaching's y + 1; FNBench has y - 1 (set -1); pair only")
    class_map: str = Field("", why="a name in CLASS_MAPS; map only")
    label_space: Literal["global", "client", "first-ten"] = Field(
        "global",
        why="all C classes; client: the classes that the client holds, as in FedNed and FedNoisy's local; first-ten: "
        "0 to 9 whatever C is, as in FedCorr's code",
    )
    matrix: tuple[tuple[float, ...], ...] = Field(
        (),
        why="row: true class, column: given label, rows of sum 1; a CSV or npy file on the command line; matrix",
        later=True,
    )
    flip_spread: float = Field(
        0.1,
        ge=0,
        le=1,
        unit="share of samples",
        why="Xia et al. 2020: spread of a sample's own flip rate; instance",
        later=True,
    )
    labelled_by: str = Field(
        "", why="a set of human labels of the data set, such as worse_label; human, twin", later=True
    )
    foreign: str = Field("", why="the data set whose training images intrude; open-set", later=True)
    mixture: tuple[Noise, ...] = Field(
        (),
        why="laws with clients='all', dealt evenly to the clients at random; preset names with commas; mixed",
        later=True,
    )

    @pydantic.field_validator("ids", mode="before")
    @classmethod
    def _ids_from_text(cls, value: Any) -> Any:  # "0,3,5", as a command line gives it, and of one client its number
        if isinstance(value, int) and not isinstance(value, bool):
            return [value]
        return [part for part in value.split(",") if part.strip()] if isinstance(value, str) else value

    @pydantic.field_validator("matrix", mode="before")
    @classmethod
    def _matrix_from_file(cls, value: Any) -> Any:  # the numbers are kept, not the name: a file may change
        return read_matrix(value).tolist() if isinstance(value, str) and value else value or ()

    @pydantic.field_validator("mixture", mode="before")
    @classmethod
    def _mixture_from_text(cls, value: Any) -> Any:
        """``fedcova-sym,coteaching-pair``, ``[{"preset": ..., "tau": ...}, ...]`` as JSON or in TOML, or laws."""
        if isinstance(value, str):
            value = json.loads(value) if value.lstrip().startswith("[") else value.split(",")
        if not isinstance(value, list | tuple):
            return value  # which pydantic refuses
        laws = []
        for part in value:
            if isinstance(part, str):
                part = {"preset": part.strip()}
            if isinstance(part, Mapping) and "preset" in part:
                changes = {name: v for name, v in part.items() if name != "preset"}
                part = noise_from(part["preset"], **changes)
                if part.clients != "none":
                    part = part.model_copy(update={"clients": "all"})
            laws.append(part)
        return laws

    @pydantic.model_validator(mode="after")
    def _fits_together(self) -> Noise:
        if self.lo > self.hi:
            raise ValueError(f"lo={self.lo} is above hi={self.hi}: swap them")
        if self.pair_step not in (1, -1):
            raise ValueError(f"pair_step is 1 (y -> y + 1) or -1 (y -> y - 1), not {self.pair_step}")
        if self.class_map and self.class_map not in CLASS_MAPS:
            raise ValueError(_unknown("class_map", self.class_map, CLASS_MAPS))
        if self.target == "map" and not self.class_map:
            raise ValueError(f"target='map' needs class_map, one of {', '.join(CLASS_MAPS)}")
        if self.target == "map" and self.label_space == "client":
            raise ValueError("a class map may lead outside a client's own classes: take label_space='global'")
        if self.label_space != "global" and self.target in ("matrix", "human", "twin", "open-set", "mixed"):
            raise ValueError(f"target={self.target!r} knows no label space: take label_space='global'")
        if self.label_space == "first-ten" and (self.target, self.include_true) != ("symmetric", True):
            raise ValueError("label_space='first-ten' is of symmetric noise that includes the true class")
        if (self.clients == "ids") != bool(self.ids):
            raise ValueError(f"clients={self.clients!r} with ids={self.ids}: clients='ids' and ids go together")
        if any(i < 0 for i in self.ids) or len(set(self.ids)) != len(self.ids):
            raise ValueError(f"ids are different client numbers from 0, not {self.ids}")
        if not isinstance(self.mass, str) and not 0 < self.mass < 1:
            raise ValueError(f"mass is drawn, stratified or a share between 0 and 1, not {self.mass}")
        if self.target == "instance" and self.count != "bernoulli":
            raise ValueError("instance-dependent noise gives each sample its own rate: take count='bernoulli'")
        checked_matrix(self.matrix)
        if (self.target == "mixed") != bool(self.mixture):
            raise ValueError("target='mixed' and mixture go together: mixture=fedcova-sym,coteaching-pair")
        for part in self.mixture:
            if part.clients not in ("all", "none") or part.target == "mixed" or part.mass != "drawn":
                raise ValueError("a mixture holds plain laws with clients='all': the whole says who is noisy")
            if part.rate == "beta-sorted":
                raise ValueError(
                    "a mixture's laws draw each client by itself: take rate='beta' in place of beta-sorted"
                )
        if len({part.foreign for part in self.mixture if part.target == "open-set"}) > 1:
            raise ValueError("a mixture may take foreign images from one data set only")
        return self


def checked_matrix(rows: Iterable[Iterable[float]]) -> Floats:
    """float64 [C, C].  Raises ValueError, with the row, for one that is not square, holds something else than
    probabilities, or has a row of another sum than 1 (by more than 1e-6)."""
    matrix = [list(row) for row in rows]
    for i, row in enumerate(matrix):
        if len(row) != len(matrix):
            raise ValueError(
                f"a transition matrix is square: row {i} has {len(row)} numbers, and there are {len(matrix)} rows"
            )
        if not all(0 <= value <= 1 for value in row):  # NaN too
            raise ValueError(f"a transition matrix holds probabilities: row {i} is {row}")
        if abs(math.fsum(row) - 1) > 1e-6:
            raise ValueError(f"the rows of a transition matrix sum to 1: row {i} sums to {math.fsum(row):.6g}")
    return np.array(matrix, dtype=np.float64).reshape(len(matrix), len(matrix))


def read_matrix(name: str) -> Floats:
    """float64 [C, C], from a CSV file without a heading or an npy file; row: true class, column: given label.

    Raises ValueError, naming the file, where it cannot be read, and as ``checked_matrix`` does.
    """
    path = Path(name)
    try:
        if path.suffix.lower() == ".npy":
            with path.open("rb") as file:
                loaded = np.lib.format.read_array(file, allow_pickle=False)
        else:
            # spreadsheets write a byte order mark, and may quote what they write
            loaded = np.loadtxt(path, delimiter=",", ndmin=2, encoding="utf-8-sig", quotechar='"')
        if loaded.ndim != 2:
            raise ValueError(f"its shape is {list(loaded.shape)}, not [C, C]")
        return checked_matrix(loaded.astype(np.float64).tolist())
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"matrix {path.absolute()}: {error}") from None


_READS: dict[tuple[str, str], tuple[str, ...]] = {  # the fields that a choice reads
    ("clients", "exact"): ("rho",),
    ("clients", "bernoulli"): ("rho",),
    ("clients", "ids"): ("ids",),
    ("rate", "constant"): ("tau",),
    ("rate", "uniform"): ("lo", "hi"),
    ("rate", "bilevel"): ("tau",),
    ("rate", "above"): ("tau",),
    ("rate", "beta"): ("beta_a", "beta_b"),
    ("rate", "beta-sorted"): ("beta_a", "beta_b"),
    ("rate", "ramp"): ("lo", "hi"),
    ("target", "symmetric"): ("include_true", "label_space"),
    ("target", "pair"): ("pair_step", "label_space"),
    ("target", "map"): ("class_map", "label_space"),
    ("target", "matrix"): ("matrix",),
    ("target", "instance"): ("flip_spread", "label_space"),
    ("target", "human"): ("labelled_by",),
    ("target", "twin"): ("labelled_by",),
    ("target", "open-set"): ("foreign",),
    ("target", "mixed"): ("mixture",),
}


def reads(noise: Noise) -> frozenset[str]:
    """The names of the fields that this law depends on (a clean one: ``clients`` alone)."""
    if noise.clients == "none":
        return frozenset({"clients"})
    names = {"clients", "mass", "target"}
    if noise.target != "mixed":  # else the mixture's laws say it
        names |= {"rate", "count"}
    for choice in names & {"clients", "rate", "target"}:
        names.update(_READS.get((choice, getattr(noise, choice)), ()))
    return frozenset(names)


def parts(noise: Noise) -> tuple[Noise, ...]:
    """The laws that a client may have: the mixture's, or this one."""
    return noise.mixture or (noise,)


def _human_presets() -> dict[str, tuple[Noise, str]]:
    """Wei et al., ICLR 2022: the labels themselves and, as a control that has their rate and pattern by class but not
    by image, labels drawn from their transition matrix."""
    found = {}
    for name, key, about in (
        ("cifar10n-aggre", "aggre_label", "the majority of three, 9.0 % wrong"),
        ("cifar10n-random1", "random_label1", "the first of three, 17.2 % wrong"),
        ("cifar10n-random2", "random_label2", "the second of three, 18.1 % wrong"),
        ("cifar10n-random3", "random_label3", "the third of three, 17.6 % wrong"),
        ("cifar10n-worse", "worse_label", "a wrong one where any of three is wrong, 40.2 % wrong"),
        ("cifar100n", "noisy_label", "one of CIFAR-100's fine classes, 40.2 % wrong"),
    ):
        law = Noise(clients="all", rate="constant", tau=1, target="human", labelled_by=key)
        found[name] = (law, f"human labels (Wei et al., ICLR 2022): {about}")
        twin = law.model_copy(update={"target": "twin"})
        found[f"{name}-twin"] = (twin, f"drawn from the transition matrix of the human labels {key}")
    return found


NOISE_PRESETS: dict[str, tuple[Noise, str]] = {  # name: (law, where it comes from)
    "clean": (Noise(clients="none"), "none: no label is changed"),
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
        "(its code over classes 0 to 9 whatever C is: fedcorr-legacy)",
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
    "given": (Noise(clients="none"), "the data set's own labels, as they are: Clothing1M, or a list of your own"),
    "fedcova-sym-stratified": (
        Noise(mass="stratified"),
        "fedcova-sym in draws of equal difficulty: wrong labels over all clients within a point of their expectation",
    ),
    "fedcova-paper-27.5": (
        Noise(rho=0.4, mass=0.2751),
        "a look-alike of FedCova's draw at (.4, .7): 27.51 % of all labels wrong, within a point",
    ),
    "fedcova-paper-34.4": (
        Noise(mass=0.3442),
        "a look-alike of FedCova's draw at (.6, .7): 34.42 % of all labels wrong, within a point",
    ),
    "fedcova-paper-40.3": (
        Noise(mass=0.4033),
        "a look-alike of FedCova's draw at (.6, .7) with the partition p = .8, alpha = 2, which it brings: 40.33 %",
    ),
    "fedcorr-legacy": (
        Noise(clients="bernoulli", rate="above", rho=0.6, tau=0.5, label_space="first-ten"),
        "FedCorr's code as it is: wrong labels among classes 0 to 9 whatever C is, which differs for CIFAR-100",
    ),
    "fednoisy-asym": (
        Noise(clients="all", rate="constant", tau=0.4, count="exact", target="pair"),
        "FedNoisy (Liang et al. 2023), globalized, asymmetric: y -> y + 1; exact on each client",
    ),
    "fednoisy-asym-legacy": (
        Noise(clients="all", rate="constant", tau=0.4, count="exact", target="map", class_map="cifar100-block5-legacy"),
        "FedNoisy's code on CIFAR-100: next within five neighbouring class numbers; 6 of 100 pairs share a superclass",
    ),
    "fednoisy-local-asym": (
        Noise(clients="all", rate="uniform", lo=0.3, hi=0.5, count="exact", target="pair", label_space="client"),
        "FedNoisy (Liang et al. 2023), localized, asymmetric: the next of the client's own classes",
    ),
    "fnbench-pair": (
        Noise(clients="all", rate="ramp", lo=0.0, hi=0.4, count="exact", target="pair", pair_step=-1),
        "FNBench and FedRN, pair flip y -> y - 1 at .4 m / M on client m",
    ),
    "fedned-beta-legacy": (
        Noise(clients="all", rate="beta-sorted", count="first", include_true=False, label_space="client"),
        "FedNed's code as it is: rates rise with the client, and a client's first samples by class are the wrong ones",
    ),
    "mnist-asym": (
        Noise(clients="all", rate="constant", tau=0.4, target="map", class_map="mnist-semantic"),
        "Patrini et al., CVPR 2017: 7 -> 1, 2 -> 7, 5 <-> 6, 3 -> 8 at .4",
    ),
    "cifar100-asym": (
        Noise(clients="all", rate="constant", tau=0.4, target="map", class_map="cifar100-superclass-next"),
        "the next class of CIFAR-100's superclass (Patrini et al., CVPR 2017) at .4",
    ),
    "cifar100-superclass": (
        Noise(clients="all", rate="constant", tau=0.4, target="map", class_map="cifar100-superclass-uniform"),
        "any other class of CIFAR-100's superclass at .4",
    ),
    "instance": (
        Noise(clients="all", rate="constant", tau=0.4, target="instance"),
        "Xia et al., NeurIPS 2020, algorithm 2: each image's own flip rate, and its label by a random projection",
    ),
    "open-set": (
        Noise(clients="all", rate="constant", tau=0.4, target="open-set"),
        "Wang et al., CVPR 2018: images of another data set (say --noise-set foreign=NAME) under a known label",
    ),
    "mixed": (
        Noise(
            target="mixed",
            mixture=(
                Noise(clients="all"),
                Noise(clients="all", target="pair"),
            ),
        ),
        "fedcova-sym and fedcova-asym in one federation, each on half of the clients",
    ),
    **_human_presets(),
}

PRESET_PARTITIONS: dict[str, Partition] = {  # what a preset brings where no partition is said
    "fedcova-paper-40.3": Partition(p=0.8, alpha=2.0),
}


def noise_from(preset: str, **changes: Any) -> Noise:
    """A preset with other values: ``noise_from("fedcova-sym", rho=0.4, tau=0.3)``.

    Raises ValueError (pydantic's is one) for an unknown preset or field, with near misses, for a value out of
    range, and for a field that the resulting law would not read: it would change nothing.
    """
    if not isinstance(preset, str):  # a file's may be anything
        raise ValueError(f"preset = {preset!r}: the name of a noise is wanted, such as fedcorr")
    if preset not in NOISE_PRESETS:
        hint = _told_of(preset) or near(preset, NOISE_PRESETS)
        raise ValueError(f"unknown noise {preset!r}.{hint} Known: {', '.join(NOISE_PRESETS)}.")
    return _changed(NOISE_PRESETS[preset][0], preset, changes)


def noise_from_file(path: Path, changes: Mapping[str, Any]) -> Noise:
    """The law of a TOML file: fields of ``Noise``, on top of ``preset`` where it names one; then ``changes``.

        preset = "fedcova-sym"
        rho = 0.4
        target = "mixed"
        [[mixture]]
        preset = "fedcorr"
        [[mixture]]
        preset = "coteaching-pair"
        tau = 0.3

    Raises ValueError, naming the file, where it cannot be read, and as ``noise_from`` does.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ValueError(f"noise {path}: cannot be read: {error.strerror}") from None
    except ValueError as error:  # not UTF-8, or not TOML
        raise ValueError(f"noise {path} is not TOML: {error}") from None
    preset = content.pop("preset", None)
    base = Noise() if preset is None else noise_from(preset)
    return _changed(base, str(path), {**content, **changes})


def _changed(base: Noise, name: str, changes: Mapping[str, Any]) -> Noise:
    for field in changes:
        if field not in Noise.model_fields:
            raise ValueError(_unknown("field of noise", field, Noise.model_fields))
    noise = Noise.model_validate({**base.model_dump(), **changes})
    for field in changes:
        if field not in reads(noise):
            raise ValueError(
                f"{field}={changes[field]!r} would change nothing in {name!r} (clients={noise.clients!r}, "
                f"rate={noise.rate!r}, target={noise.target!r}): it reads {', '.join(sorted(reads(noise)))}"
            )
    return noise


def noise_name(path: Path) -> str:
    """The name of a law in a file: the file's, in the letters that a folder's name may have."""
    return re.sub(r"[^a-z0-9.-]+", "-", path.stem.lower()).strip("-.") or "noise"


def _told_of(word: str) -> str:
    """The hint at presets of which name or description have the word, since another paper's may not resemble a name:
    symmetric, human; pairflip is written pair flip here."""
    wanted = re.sub("[^a-z0-9]", "", word.lower())
    words = {name: re.findall("[a-z0-9]+", f"{name} {about}".lower()) for name, (_, about) in NOISE_PRESETS.items()}
    told = [name for name, found in words.items() if wanted in {*found, *map("".join, itertools.pairwise(found))}]
    return f" Did you mean {' or '.join(told[:3])}?" if told else ""


def _unknown(kind: str, name: str, known: Iterable[str]) -> str:
    return f"unknown {kind} {name!r}.{near(name, known)} Known: {', '.join(known)}."


def interval(noise: Noise) -> tuple[float, float]:
    """The interval [a, b] on which a noisy client's rate is uniform (constant: a = b).

    bilevel has mean tau in both branches.  FedCova prints U[1 - 2 tau, 1] for the upper one, a slip: at tau = .7
    that is [-.4, 1], of mean .3, and the paper's own initial noise (34.4 % at (.6, .7)) fits rho tau = .42.
    """
    tau = noise.tau
    if noise.rate == "bilevel":
        return (0.0, 2 * tau) if tau <= 0.5 else (2 * tau - 1, 1.0)
    return {"constant": (tau, tau), "above": (tau, 1.0)}.get(noise.rate, (noise.lo, noise.hi))
