"""Who holds what: the laws by which a data set is divided among clients.

A partition is one owner per sample, so that whatever the law, it is disjoint and complete by construction.
The laws look at the true labels where they are known (who photographs what does not depend on who mislabels
it); for a data set that has given labels only, those are used.
"""

from __future__ import annotations

import time
from typing import Literal

import numpy as np
import numpy.typing as npt

from flnoisebench.api import Config, Field
from flnoisebench.streams import Name, numpy_stream

TRIES = 100  # of a whole partition, and of the empty rows and columns of one Psi
SECONDS = 5.0  # after which no further try starts: a slow machine may raise where a fast one returns, never differ


class Partition(Config):
    """A partition law and its parameters.

    iid: a random permutation dealt out in turn; sizes differ by one at most.
    dirichlet: class j is shared among all M clients by shares ~ Dir(alpha).
    bernoulli-dirichlet: Psi[m, j] ~ Bernoulli(p) says whether client m may hold class j; class j is shared among
    its holders by shares ~ Dir(alpha).  (FedCorr, Xu et al., CVPR 2022; FedCova's experiments.)
    In both, each sample of class j goes to a client drawn from those shares.
    """

    law: Literal["iid", "dirichlet", "bernoulli-dirichlet"] = Field(
        "bernoulli-dirichlet", why="FedCova's and FedCorr's experiments"
    )
    p: float = Field(0.5, gt=0, le=1, unit="probability", why="FedCova's experiments; read by bernoulli-dirichlet")
    alpha: float = Field(
        5.0, ge=1e-3, le=1e6, why="FedCova's experiments; a small alpha gives uneven shares; not read by iid"
    )
    min_size: int = Field(2, ge=1, unit="samples", why="a BatchNorm cannot train on one sample")


def split(
    spec: Partition, labels: npt.NDArray[np.int64], classes: int, clients: int, stream_names: tuple[Name, ...]
) -> npt.NDArray[np.int64]:
    """The owner of each sample: int64 [n] in [0, clients).

    labels: int64 [n] in [0, classes).  stream_names: the names of the draw; the stream is (*names, "partition").
    A partition in which some client has fewer than ``min_size`` samples is drawn anew, up to 100 times or 5 s.
    Raises ValueError, with the numbers and with advice, when no such partition is found, when p leaves a class
    without a client or a client without a class, and when there are more clients than samples for them.
    """
    labels = _checked(labels, classes)
    if clients < 1:
        raise ValueError(f"a partition needs at least one client, not {clients}")
    if clients * spec.min_size > len(labels):
        raise ValueError(
            f"{clients} clients of at least {spec.min_size} samples need {clients * spec.min_size} samples, and the "
            f"data set has {len(labels)}: lower clients or min_size"
        )
    rng = numpy_stream(*stream_names, "partition")
    if spec.law == "iid":
        owner = np.empty(len(labels), dtype=np.int64)
        owner[rng.permutation(len(labels))] = np.arange(len(labels)) % clients
        return owner

    # Only the counts are drawn in each try; the samples are dealt out once they are large enough.  That is the
    # same law as drawing an owner for each sample (multinomial counts in exchangeable order) and 100 tries at
    # 500 clients then cost less than one deal of a million samples.
    present, sizes = np.unique(labels, return_counts=True)
    start = time.monotonic()
    tries, smallest = 0, 0
    while tries < TRIES and time.monotonic() - start < SECONDS:
        tries += 1
        counts = np.zeros((clients, len(present)), dtype=np.int64)  # [M, classes that occur]
        for j, holders in enumerate(_holders(spec, rng, clients, present)):
            shares = rng.dirichlet(np.full(len(holders), spec.alpha))
            counts[holders, j] = rng.multinomial(sizes[j], shares)
        smallest = max(smallest, int(counts.sum(axis=1).min()))
        if counts.sum(axis=1).min() >= spec.min_size:
            return _deal(rng, labels, counts)
    raise ValueError(
        f"in {tries} tries of the {spec.law} partition the smallest client had at most {smallest} samples, and "
        f"min_size={spec.min_size} are wanted (alpha={spec.alpha}, p={spec.p}, clients={clients}, classes="
        f"{len(present)}, samples={len(labels)}): raise alpha{' or p' if spec.law != 'dirichlet' else ''}, or "
        "lower clients or min_size"
    )


def _checked(labels: npt.NDArray[np.int64], classes: int) -> npt.NDArray[np.int64]:
    labels = np.asarray(labels)
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        raise ValueError(f"labels must be int64 [n], not {labels.dtype} {list(labels.shape)}")
    if len(labels) and not 0 <= labels.min() <= labels.max() < classes:
        raise ValueError(f"labels reach from {labels.min()} to {labels.max()}; {classes} classes are 0..{classes - 1}")
    return labels.astype(np.int64, copy=False)


def _holders(
    spec: Partition, rng: np.random.Generator, clients: int, present: npt.NDArray[np.int64]
) -> list[npt.NDArray[np.int64]]:
    """For each class that occurs, the clients that may hold it."""
    if spec.law == "dirichlet":
        return [np.arange(clients)] * len(present)
    psi = rng.random((clients, len(present))) < spec.p
    # Rows and columns are redrawn alone: with 500 clients and ten classes at p = .2 every whole Psi has an empty
    # row (56 are expected), so redrawing all of it would never end.
    for _ in range(TRIES):
        empty_clients, empty_classes = ~psi.any(axis=1), ~psi.any(axis=0)
        if not empty_clients.any() and not empty_classes.any():
            return [np.flatnonzero(column) for column in psi.T]
        psi[empty_clients] = rng.random((int(empty_clients.sum()), len(present))) < spec.p
        empty_classes = ~psi.any(axis=0)
        psi[:, empty_classes] = rng.random((clients, int(empty_classes.sum()))) < spec.p
    if (empty_classes := ~psi.any(axis=0)).any():
        what = f"class {present[empty_classes][0]} without a client"
    else:
        what = f"client {np.flatnonzero(~psi.any(axis=1))[0]} without a class"
    raise ValueError(
        f"p={spec.p} leaves {what} after {TRIES} redraws (clients={clients}, classes={len(present)}): raise p"
        ", or take law='dirichlet', in which every client may hold every class"
    )


def _deal(
    rng: np.random.Generator, labels: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Owners such that client m has counts[m, j] samples of the j-th class that occurs, in random order."""
    owner = np.empty(len(labels), dtype=np.int64)
    by_class = np.argsort(labels, kind="stable")
    stop = np.cumsum(counts.sum(axis=0))
    for j, column in enumerate(counts.T):
        members = by_class[stop[j] - column.sum() : stop[j]]
        owner[members] = rng.permutation(np.repeat(np.arange(len(column)), column))
    return owner
