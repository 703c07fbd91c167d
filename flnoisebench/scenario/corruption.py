"""Drawing a noise law: who is noisy, how much, which samples are touched, and what they become.

Each of the four has its own random streams, so that changing one leaves the draws of the others alone: raising rho
adds noisy clients to those that were noisy already, raising tau adds wrong labels to those that were wrong already,
and what another client holds shifts nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from flnoisebench.scenario.class_maps import CLASS_MAPS
from flnoisebench.scenario.noise import Floats, Noise, interval, parts
from flnoisebench.scenario.partition import Ints
from flnoisebench.streams import Name, numpy_stream

TRIES = 2000  # of who is noisy and how much, where the share of wrong labels is prescribed
DEALS = 50  # of labels, where that share is a number
POINT = 0.01  # how near the share of wrong labels comes to the prescribed one
SIDE = 32  # pixels: larger images are pooled before they decide on their own noise
CHUNK = 4096  # samples whose images are looked at together

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Sources:
    """What some laws read beside the true labels.

    images: uint8 [n, C, H, W], the training images (instance).  human: {name: int64 [n]}, labels that people gave them
    (human, twin).  foreign: how many images the other data set has, and foreign_digest what identifies them
    (open-set).  owners: int64 [n], the clients that a file or the data set names (partitions manifest and natural).
    """

    images: npt.NDArray[np.uint8] | None = None
    human: Mapping[str, Ints] = field(default_factory=dict)
    foreign: int = 0
    foreign_digest: str = ""
    owners: Ints | None = None


class Corruption(NamedTuple):
    """Drawn noise.

    given: int64 [n], the labels that clients see.  noisy: bool [M].  nominal: float64 [M], the probability (or
    share) with which a client's samples are touched; 0 on clean clients.  expected: float64 [M], the share of really
    wrong labels that the law gives each client.  transition: float64 [C, C], the nominal law of the given label
    (column) by true label (row) over all samples; zero rows for classes without samples.  foreign: int64 [n], which
    image of the other data set stands in the sample's place, -1 its own; None without open-set noise.  part: int64
    [M], the number of the client's law in a mixture; None without one.
    """

    given: Ints
    noisy: Bools
    nominal: Floats
    expected: Floats
    transition: Floats
    foreign: Ints | None
    part: Ints | None


def corrupt(
    noise: Noise,
    true_labels: Ints,
    owner: Ints,
    classes: int,
    clients: int,
    stream_names: tuple[Name, ...],
    sources: Sources | None = None,
) -> Corruption:
    """Draw who is noisy, how much, which samples are touched, and what they become.

    true_labels: int64 [n] in [0, classes).  owner: int64 [n] in [0, clients).  stream_names: the names of the draw;
    the streams are (*names, "who"), (*names, "rate", m), (*names, "which", m), (*names, "what", m), for single laws
    also "law", "flip", "projection" and "foreign", and (*names, "mass", k, ...) for the k-th further try of who and
    how much.  New labels are computed from the true ones only, so none is flipped twice.

    Raises ValueError for ids that are no clients, for a class map or matrix of another number of classes, where a
    noisy client has no wrong label to give, where a source is missing, and where no draw has the prescribed mass.
    """
    sources = sources or Sources()
    if noise.clients != "none":
        for law in parts(noise):
            _require_sources(law, classes, sources)
    federation = _Federation(noise, true_labels, owner, classes, clients, stream_names, sources)
    misses = []
    for noisy, nominal in _levels(federation):
        drawn = _drawn(federation, noisy, nominal)
        if isinstance(noise.mass, str):
            return drawn
        wrong = drawn.given != true_labels
        if drawn.foreign is not None:
            wrong |= drawn.foreign >= 0
        misses.append(float(wrong.mean()))
        if abs(misses[-1] - noise.mass) <= POINT:
            return drawn
        if len(misses) == DEALS:
            break
    nearest = ""
    if misses:
        nearest = f"; the nearest of {len(misses)} has {min(misses, key=lambda x: abs(x - float(noise.mass))):.4f}"
    raise ValueError(
        f"mass={noise.mass}: no draw has a share of wrong labels within a point of it{nearest}. "
        f"{federation.reach()}; change rho, tau or mass"
    )


def whole(share: float, n: int) -> int:
    """int(share n) as it is meant: 0.29 * 100 is 28.999999999999996 in binary, and that is 29."""
    return math.floor(share * n + 1e-9)


def members(owner: Ints, clients: int) -> list[Ints]:
    """Each client's positions, ascending."""
    return np.split(np.argsort(owner, kind="stable"), np.cumsum(np.bincount(owner, minlength=clients))[:-1])


class _Federation:
    """What a draw is about, and what of it does not depend on who is noisy."""

    def __init__(
        self,
        noise: Noise,
        true_labels: Ints,
        owner: Ints,
        classes: int,
        clients: int,
        names: tuple[Name, ...],
        sources: Sources,
    ) -> None:
        self.noise, self.true, self.owner = noise, true_labels, owner
        self.classes, self.clients, self.names, self.sources = classes, clients, names, sources
        self.members = members(owner, clients)
        self.counts = class_counts(true_labels, owner, classes, clients)
        self.part: Ints | None = None
        if noise.mixture:
            dealt = numpy_stream(*names, "law").permutation(clients)
            self.part = np.empty(clients, dtype=np.int64)
            self.part[dealt] = np.arange(clients) % len(noise.mixture)

    def law(self, client: int) -> Noise:
        return self.noise if self.part is None else self.noise.mixture[self.part[client]]

    def candidates(self) -> list[int]:
        """The clients that the law may make noisy at all."""
        return [m for m in range(self.clients) if self.noise.clients != "none" and self.law(m).clients != "none"]

    def human(self, law: Noise) -> Ints:
        return self.sources.human[law.labelled_by]

    def wrong_if_touched(self) -> Floats:
        """float64 [M]: the share of a client's labels that would be wrong, were all its samples touched."""
        shares = np.zeros(self.clients)
        for m in self.candidates():
            counts, law = self.counts[m], self.law(m)
            if law.target in ("instance", "open-set"):
                shares[m] = 1
            elif law.target == "human":
                mine = self.members[m]
                shares[m] = (self.human(law)[mine] != self.true[mine]).mean()
            else:
                own = label_space(law, counts)
                shares[m] = counts @ (1 - np.diag(self.target_law(law, own))) / max(counts.sum(), 1)
        return shares

    def target_law(self, law: Noise, own: Ints) -> Floats:
        if law.target != "twin":
            return target_law(law, own, self.classes)
        pairs = class_counts(self.human(law), self.true, self.classes, self.classes).astype(np.float64)
        absent = pairs.sum(axis=1) == 0
        pairs[absent, absent] = 1
        return pairs / pairs.sum(axis=1, keepdims=True)

    def flip_rates(self, nominal: Floats) -> Floats:
        """float64 [M]: the mean share of touched samples of each client."""
        return np.array([flip_rate(self.law(m), r) for m, r in enumerate(nominal)])

    def mass(self, nominal: Floats) -> float:
        """The expected share of wrong labels over all clients."""
        sizes = self.counts.sum(axis=1)
        return float(sizes @ (self.flip_rates(nominal) * self.wrong_if_touched()) / sizes.sum())

    def expected_mass(self) -> float:
        """The mean of ``mass`` over draws of who is noisy and how much."""
        sizes, m = self.counts.sum(axis=1), self.clients
        chance = np.zeros(m)
        if self.noise.clients in ("exact", "bernoulli"):
            chance[:] = whole(self.noise.rho, m) / m
        else:
            chance[:] = _who(self.noise, m, self.names, "ids")
        rates = np.array([mean_flip_rate(self.law(c), c, m) for c in range(m)])
        return float(sizes @ (chance * rates * self.wrong_if_touched()) / sizes.sum())

    def reach(self) -> str:
        tried = [self.mass(nominal) for _, nominal in _draws(self, 20)]
        return f"Of 20 draws the share expected is between {min(tried):.4f} and {max(tried):.4f}"


def _require_sources(law: Noise, classes: int, sources: Sources) -> None:
    """What a law needs and lacks is said before anything is drawn."""
    if law.target == "matrix" and len(law.matrix) != classes:
        raise ValueError(
            f"target='matrix' needs a matrix of {classes} rows, and has {len(law.matrix)}: set matrix to a CSV or npy "
            "file"
        )
    if law.target in ("human", "twin") and law.labelled_by not in sources.human:
        if not sources.human:
            raise ValueError(
                f"target={law.target!r} needs human labels, and this data set has none: take another noise"
            )
        raise ValueError(
            f"target={law.target!r} needs labelled_by, a set of human labels of this data set; there are: "
            f"{', '.join(sources.human)}"
        )
    if law.target == "instance" and sources.images is None:
        raise ValueError("instance-dependent noise looks at the training images, and none were handed over")
    if law.target == "open-set" and not (law.foreign and sources.foreign):
        raise ValueError("open-set noise takes images of another data set: say which, foreign=NAME")


# --------------------------------------------------------------------------------------- who, and how much


def _levels(federation: _Federation) -> Iterator[tuple[Bools, Floats]]:
    """(noisy [M], nominal [M]) as the law draws them; where the mass is prescribed, those that have it."""
    mass = federation.noise.mass
    if mass == "drawn":
        yield from _draws(federation, 1)
        return
    wanted = federation.expected_mass() if mass == "stratified" else float(mass)
    # A number is about the realised share, which scatters round the expected one: aim at half the width.
    width = POINT if mass == "stratified" else POINT / 2
    sizes = federation.counts.sum(axis=1)
    weights = sizes * federation.wrong_if_touched() / sizes.sum()
    found = 0
    for noisy, nominal in _draws(federation, TRIES):
        if abs(weights @ federation.flip_rates(nominal) - wanted) <= width:
            found += 1
            yield noisy, nominal
    if mass == "stratified" and not found:
        raise ValueError(
            f"mass='stratified': in {TRIES} tries no draw has a share of wrong labels within a point of its "
            f"expectation, {wanted:.4f}: with so few noisy clients it scatters too much; take mass='drawn'"
        )


def _draws(federation: _Federation, tries: int) -> Iterator[tuple[Bools, Floats]]:
    noise, names, m = federation.noise, federation.names, federation.clients
    may = np.isin(np.arange(m), federation.candidates())
    stratified = noise.mass == "stratified" and noise.clients == "bernoulli"
    for attempt in range(tries):
        # Further tries draw who and how much anew; partition, which and what stay.
        these = names if attempt == 0 else (*names, "mass", attempt)
        noisy = _who(noise, m, these, "exact" if stratified else noise.clients) & may
        yield noisy, np.where(noisy, _rates(federation, these, one_stream=attempt > 0), 0.0)


def _who(noise: Noise, clients: int, names: tuple[Name, ...], law: str) -> Bools:
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
    if law == "bernoulli":
        return rng.random(clients) < noise.rho
    noisy[rng.permutation(clients)[: whole(noise.rho, clients)]] = True
    return noisy


def _rates(federation: _Federation, names: tuple[Name, ...], *, one_stream: bool) -> Floats:
    """float64 [M]: every client's rate, were it noisy.  one_stream: for all clients, since making a stream a client
    would be most of the cost of a further try."""
    clients = federation.clients
    rates = np.empty(clients)
    shared = numpy_stream(*names, "rate")
    for m in range(clients):
        law = federation.law(m)
        rng = shared if one_stream else numpy_stream(*names, "rate", m)
        low, high = interval(law)
        if law.rate == "ramp":
            rates[m] = low + (high - low) * m / clients
        elif law.rate.startswith("beta"):
            rates[m] = rng.beta(law.beta_a, law.beta_b)
        else:
            rates[m] = low + (high - low) * rng.random()
    return np.sort(rates) if federation.noise.rate == "beta-sorted" and not federation.noise.mixture else rates


def _spreads(law: Noise, nominal: float) -> bool:
    """Whether samples have rates of their own round their client's; at 0 it is clean, and they have not."""
    return law.target == "instance" and bool(law.flip_spread and nominal)


def flip_rate(law: Noise, nominal: float) -> float:
    """The mean share of touched samples at a nominal rate: itself, but for instance-dependent noise the mean of a
    normal law round it, truncated to [0, 1]."""
    if not _spreads(law, nominal):
        return nominal
    normal, spread = NormalDist(), law.flip_spread
    a, b = -nominal / spread, (1 - nominal) / spread
    return nominal + spread * (normal.pdf(a) - normal.pdf(b)) / (normal.cdf(b) - normal.cdf(a))


def mean_flip_rate(law: Noise, client: int, clients: int) -> float:
    """The mean of ``flip_rate`` over draws of a noisy client's nominal rate; of a ramp the client's own."""
    low, high = interval(law)
    if law.rate == "ramp":
        return flip_rate(law, low + (high - low) * client / clients)
    beta = law.rate.startswith("beta")
    mean = law.beta_a / (law.beta_a + law.beta_b) if beta else (low + high) / 2
    if not _spreads(law, mean):
        return mean  # the flip rate is the nominal one
    nominal, weights = (
        _beta(law.beta_a, law.beta_b) if beta else (np.linspace(low, high, 1001), np.full(1001, 1 / 1001))
    )
    return float(weights @ [flip_rate(law, rate) for rate in nominal])


def _beta(a: float, b: float) -> tuple[Floats, Floats]:
    """Values and weights, float64 [2001], whose sums are means over Beta(a, b): trapezoids over the logit, in which the
    density has no pole, stretched so that tails as wide as those of a = .001 are in it."""
    steps = np.linspace(-10, 10, 2001)
    logit = math.log(a / b) + math.sqrt(1 / a + 1 / b) * np.sinh(steps)
    log_x, log_rest = -np.logaddexp(0, -logit), -np.logaddexp(0, logit)
    log_weights = a * log_x + b * log_rest + np.log(np.cosh(steps))
    weights = np.exp(log_weights - log_weights.max())
    return np.exp(log_x), weights / weights.sum()


# --------------------------------------------------------------------------------------- which, and to what


def _drawn(federation: _Federation, noisy: Bools, nominal: Floats) -> Corruption:
    true, names = federation.true, federation.names
    given = true.copy()
    foreign = (
        np.full(len(true), -1, dtype=np.int64) if "open-set" in {p.target for p in parts(federation.noise)} else None
    )
    looked_at: list[tuple[int, Bools, Floats]] = []  # instance-dependent: client, touched, chances
    for m, mine in enumerate(federation.members):
        if not noisy[m]:
            continue
        law, clean = federation.law(m), true[mine]
        # All is drawn for all samples, touched or not, so that touched samples keep their new label at another rate.
        touched = _touched(law, clean, nominal[m], names, m)
        if law.target == "open-set":
            assert foreign is not None
            dealt = numpy_stream(*names, "foreign").permutation(federation.sources.foreign)
            foreign[mine] = np.where(touched, dealt[mine % len(dealt)], -1)
        elif law.target == "instance":
            looked_at.append((m, touched, numpy_stream(*names, "what", m).random(len(mine))))
        else:
            new = _new_labels(federation, law, m, numpy_stream(*names, "what", m))
            given[mine] = np.where(touched, new, clean)
    by_image = _by_image(federation, nominal, looked_at, given) if looked_at else 0.0
    expected, transition = _facts(federation, nominal, by_image)
    return Corruption(given, noisy, nominal, expected, transition, foreign, federation.part)


def _touched(law: Noise, clean: Ints, nominal: float, names: tuple[Name, ...], m: int) -> Bools:
    """bool [n of the client]: whose label is drawn anew."""
    n = len(clean)
    touched = np.zeros(n, dtype=bool)
    if law.count == "first":
        touched[np.argsort(clean, kind="stable")[: whole(nominal, n)]] = True
        return touched
    chance = numpy_stream(*names, "which", m).random(n)
    if law.count == "exact":
        return np.argsort(np.argsort(chance, kind="stable")) < whole(nominal, n)
    if not _spreads(law, nominal):
        return chance < nominal
    normal = NormalDist(nominal, law.flip_spread)
    low, high = normal.cdf(0), normal.cdf(1)
    levels = low + (high - low) * numpy_stream(*names, "flip", m).random(n)
    own = np.array([normal.inv_cdf(min(max(level, 1e-16), 1 - 1e-16)) for level in levels])
    return chance < own


def label_space(law: Noise, counts: Ints) -> Ints:
    """The classes, ascending, that a client's labels may become.  counts: int64 [C], what it holds."""
    if law.label_space == "client":
        return np.flatnonzero(counts)
    return np.arange(len(counts) if law.label_space == "global" else min(10, len(counts)))


def _new_labels(federation: _Federation, law: Noise, m: int, rng: np.random.Generator) -> Ints:
    """What each sample of client m would become if it were touched.

    In the sorted label space ``own`` symmetric noise is a random cyclic shift (from 1 where the true class is
    excluded) and pair noise a shift by one.
    """
    mine = federation.members[m]
    clean = federation.true[mine]
    if law.target == "human":
        return federation.human(law)[mine]
    if law.target == "map" and all(len(targets) == 1 for targets in _class_map(law, federation.classes)):
        return np.array(_class_map(law, federation.classes))[:, 0][clean]
    own = label_space(law, federation.counts[m])
    if law.target in ("map", "matrix", "twin"):
        return _by_law(federation.target_law(law, own)[clean], rng.random(len(clean)))
    _require_two(law, own, f"client {m}")
    if law.target == "pair":
        shift: Any = law.pair_step
    else:
        shift = rng.integers(0 if law.include_true else 1, len(own), size=len(clean))
    return own[(np.searchsorted(own, clean) + shift) % len(own)]


def _by_law(rows: Floats, chance: Floats) -> Ints:
    """int64 [n]: for each sample the class at which its law, float64 [n, C], has gathered its chance, in [0, 1)."""
    gathered = np.cumsum(rows, axis=1)
    return (gathered <= chance[:, None] * gathered[:, -1:]).sum(axis=1)


def _by_image(
    federation: _Federation, nominal: Floats, looked_at: Sequence[tuple[int, Bools, Floats]], given: Ints
) -> Floats:
    """Write the labels of instance-dependent noise into ``given``; the expected moves, float64 [C, C].

    Xia et al., NeurIPS 2020, algorithm 2: an image x of class y becomes class j with probability proportional to
    exp(x . w[y, j]), j not y, w[y, j] a standard normal vector.  Here x is the image, standardised by the mean and
    spread of all training pixels; sides over 32 are pooled, since the vectors of ImageNet's size would take gigabytes.
    """
    true, classes, images = federation.true, federation.classes, federation.sources.images
    assert images is not None
    chance, hit = np.zeros(len(true)), np.zeros(len(true), dtype=bool)
    for m, touched, chances in looked_at:
        chance[federation.members[m]], hit[federation.members[m]] = chances, touched
    rows = np.sort(np.concatenate([federation.members[m] for m, *_ in looked_at]))
    weight = np.array([flip_rate(federation.law(m), rate) for m, rate in enumerate(nominal)])[federation.owner]
    allowed = np.zeros((federation.clients, classes), dtype=bool)
    for m, *_ in looked_at:
        own = label_space(federation.law(m), federation.counts[m])
        _require_two(federation.law(m), own, f"client {m}")
        allowed[m, own] = True
    levels = np.zeros(256, dtype=np.int64)  # of grey: exact, whatever the order of summation
    for start in range(0, len(images), CHUNK):  # bincount takes eight bytes a pixel
        levels += np.bincount(images[start : start + CHUNK].reshape(-1), minlength=256)
    mean = levels @ np.arange(256) / levels.sum()
    spread = math.sqrt(levels @ (np.arange(256) - mean) ** 2 / levels.sum()) or 1.0
    moved = np.zeros((classes, classes))
    for y in np.unique(true[rows]):
        of_class = rows[true[rows] == y]
        projection = None
        for start in range(0, len(of_class), CHUNK):
            these = of_class[start : start + CHUNK]
            pixels = (_pooled(images[these]) - mean) / spread
            if projection is None:
                rng = numpy_stream(*federation.names, "projection", int(y))
                projection = rng.standard_normal((pixels.shape[1], classes))
            scores = pixels @ projection
            scores[~allowed[federation.owner[these]]] = -np.inf
            scores[:, y] = -np.inf
            law = np.exp(scores - scores.max(axis=1, keepdims=True))
            law /= law.sum(axis=1, keepdims=True)
            given[these] = np.where(hit[these], _by_law(law, chance[these]), y)
            moved[y] += weight[these] @ law
    return moved


def _pooled(images: npt.NDArray[np.uint8]) -> Floats:
    """float64 [n, S]: flat images, each side pooled to 32 pixels at most by the mean of equal blocks (a rest at the
    right and lower edge is left out)."""
    n, channels, height, width = images.shape
    block = math.ceil(max(height, width) / SIDE)
    if block <= 1:
        return images.reshape(n, -1).astype(np.float64)
    height, width = height // block, width // block
    if not height or not width:
        raise ValueError(f"images of {list(images.shape[2:])} pixels are too narrow for instance-dependent noise")
    blocks = images[:, :, : height * block, : width * block].reshape(n, channels, height, block, width, block)
    return blocks.mean(axis=(3, 5), dtype=np.float64).reshape(n, -1)


def _class_map(noise: Noise, classes: int) -> tuple[tuple[int, ...], ...]:
    targets = CLASS_MAPS[noise.class_map]
    if len(targets) != classes:
        raise ValueError(f"class_map {noise.class_map!r} is for {len(targets)} classes, and the data set has {classes}")
    return tuple(entry if isinstance(entry, tuple) else (entry,) for entry in targets)


def _require_two(noise: Noise, own: Ints, where: str) -> None:
    if len(own) < 2 and not (noise.target == "symmetric" and noise.include_true):
        raise ValueError(
            f"{where} has one class ({', '.join(map(str, own))}), so label_space={noise.label_space!r} has no wrong "
            "label for it: take label_space='global', another draw, or a partition with a higher p or alpha"
        )


# ------------------------------------------------------------------------------------------- nominal facts


def target_law(noise: Noise, own: Ints, classes: int) -> Floats:
    """float64 [C, C]: the law of a touched sample's label (column) by its true class (row) in the label space
    ``own``, ascending.  Classes outside it stay as they are, but for first-ten.  Not for laws that look further than
    at the class."""
    law = np.eye(classes)
    if noise.target == "map":
        for row, targets in zip(law, _class_map(noise, classes), strict=True):
            row[:] = 0
            row[list(targets)] = 1 / len(targets)
        return law
    if noise.target == "matrix":
        return np.array(noise.matrix)
    _require_two(noise, own, "a client")
    if noise.target == "pair":
        law[own] = np.eye(classes)[np.roll(own, -noise.pair_step)]
    elif noise.label_space == "first-ten":
        law[:] = 0
        law[:, own] = 1 / len(own)
    elif noise.include_true:
        law[np.ix_(own, own)] = 1 / len(own)
    else:
        law[np.ix_(own, own)] = (1 - np.eye(len(own))) / (len(own) - 1)
    return law


def class_counts(labels: Ints, owner: Ints, classes: int, clients: int) -> Ints:
    """int64 [M, C]: samples by client and class."""
    return np.bincount(owner * classes + labels, minlength=clients * classes).reshape(clients, classes)


def settled(noise: Noise) -> bool:
    """Whether clients' rates and true labels decide the expected rates and transitions: not where images or people's
    labels do, and not in a mixture, whose dealing has to be known."""
    return noise.target not in ("instance", "human", "twin", "mixed")


def settled_facts(noise: Noise, true: Ints, owner: Ints, nominal: Floats, classes: int) -> tuple[Floats, Floats]:
    """(expected, transition) of a settled law, for clients of these nominal rates, float64 [M].

    expected: float64 [M], the share of really wrong labels of each client: the nominal rate less what falls on the true
    class (1/C of it where it is included) or on classes that a map leaves alone.  transition: float64 [C, C], the law
    of the given label (column) by true label (row) over all samples; zero rows for classes without samples.  true,
    owner: int64 [n].  Raises ValueError for a law that is not settled.
    """
    if nominal.any() and not settled(noise):
        raise ValueError(f"target={noise.target!r}: true labels and rates alone do not give its expected rates")
    federation = _Federation(noise, true, owner, classes, len(nominal), (), Sources())
    return _facts(federation, nominal, 0.0)


def _facts(federation: _Federation, nominal: Floats, by_image: Floats | float) -> tuple[Floats, Floats]:
    """(expected rates [M], nominal transition [C, C]).  by_image: the moves of instance-dependent noise."""
    classes, counts = federation.classes, federation.counts
    sizes = counts.sum(axis=1)
    left = counts.astype(np.float64)
    moved, wrong = np.zeros((classes, classes)), np.zeros(federation.clients)
    alike: dict[tuple[int, bytes], list[int]] = {}  # clients of one law and one label space
    for m in np.flatnonzero(nominal).tolist():
        law, mine = federation.law(m), federation.members[m]
        touched = _expected_touched(law, counts[m], nominal[m])
        if law.target == "open-set":
            wrong[m] = touched.sum()
            continue
        left[m] -= touched
        if law.target == "instance":
            wrong[m] = touched.sum()
        elif law.target == "human":
            human, true = federation.human(law)[mine], federation.true[mine]
            pairs = class_counts(human, true, classes, classes)
            rate = (touched / np.maximum(counts[m], 1))[:, None]
            moved += rate * pairs
            wrong[m] = (rate * (pairs - np.diag(np.diag(pairs)))).sum()
        else:
            number = 0 if federation.part is None else int(federation.part[m])
            alike.setdefault((number, label_space(law, counts[m]).tobytes()), []).append(m)
    for (number, space), rows in alike.items():
        law = parts(federation.noise)[number]
        rule = federation.target_law(law, np.frombuffer(space, dtype=np.int64))
        touched_rows = np.array([_expected_touched(law, counts[m], nominal[m]) for m in rows])
        moved += touched_rows.sum(axis=0)[:, None] * rule
        wrong[rows] = touched_rows @ (1 - np.diag(rule))
    total = counts.sum(axis=0)
    transition = (np.diag(left.sum(axis=0)) + moved + by_image) / np.maximum(total, 1)[:, None]
    transition = transition.clip(0, 1)  # a sum may end in 1.0000000000000002
    return wrong / np.maximum(sizes, 1), transition


def _expected_touched(law: Noise, counts: Ints, nominal: float) -> npt.NDArray[Any]:
    """float64 [C]: how many samples of each class of a client are touched, on average."""
    n = int(counts.sum())
    if law.count == "first":
        before = np.cumsum(counts) - counts
        return np.clip(whole(nominal, n) - before, 0, counts).astype(np.float64)
    if law.count == "exact":
        return counts * (whole(nominal, n) / max(n, 1))
    return counts * flip_rate(law, nominal)


def mean_rate(rates: Floats, owner: Ints) -> float:
    """The mean of the clients' rates, float64 [M], weighted by their sizes."""
    return float(rates[owner].mean())
