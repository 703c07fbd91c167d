"""Who holds what: the laws by which a data set is divided among clients.

A partition is one owner per sample, so that whatever the law, it is disjoint and complete by construction.
The laws look at the true labels where they are known (who photographs what does not depend on who mislabels
it); for a data set that has given labels only, those are used.
"""

from __future__ import annotations

import hashlib
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pydantic

from flnoisebench.api import Config, Field, unstated
from flnoisebench.streams import Name, numpy_stream

TRIES = 100  # of a whole partition, and of the empty rows and columns of one Psi
SECONDS = 5.0  # after which no further try starts: a slow machine may raise where a fast one returns, never differ

Ints = npt.NDArray[np.int64]


class Law(Config):
    """The settings of a law.  Those that came later and are at their default are not written, so that scenarios of old
    keep their names and files."""

    @pydantic.model_serializer(mode="wrap")
    def _as_before(self, dump: pydantic.SerializerFunctionWrapHandler) -> dict[str, Any]:
        left_out = unstated(self)
        return {name: value for name, value in dump(self).items() if name not in left_out}


class Partition(Law):
    """A partition law and its parameters.

    iid: a random permutation dealt out in turn; sizes differ by one at most.
    dirichlet: class j is shared among all M clients by shares ~ Dir(alpha).
    bernoulli-dirichlet: Psi[m, j] ~ Bernoulli(p) says whether client m may hold class j; class j is shared among
    its holders by shares ~ Dir(alpha).  (FedCorr, Xu et al., CVPR 2022; FedCova's experiments.)
    In both, each sample of class j goes to a client drawn from those shares.
    shards: the samples sorted by class are cut into M * shards even pieces, of which each client gets ``shards`` at
    random (McMahan et al., AISTATS 2017).
    classes: client m holds ``per_client`` classes, the first one m mod J, the others at random; each class is shared
    evenly among its holders (Li et al., ICDE 2022, "#label").
    quantity: client sizes ~ Dir(alpha), the samples within at random (Li et al., ICDE 2022, "quantity skew").
    manifest: the split of a file, exactly: a manifest of ours, or CSV lines ``index,client``.
    natural: the clients that the data set itself names.
    """

    law: Literal["iid", "dirichlet", "bernoulli-dirichlet", "shards", "classes", "quantity", "manifest", "natural"] = (
        Field("bernoulli-dirichlet", why="FedCova's and FedCorr's experiments")
    )
    p: float = Field(0.5, gt=0, le=1, unit="probability", why="FedCova's experiments; bernoulli-dirichlet")
    alpha: float = Field(
        5.0,
        ge=1e-3,
        le=1e6,
        why="FedCova's experiments; a small alpha gives uneven shares; dirichlet, bernoulli-dirichlet, quantity",
    )
    min_size: int = Field(2, ge=1, unit="samples", why="a BatchNorm cannot train on one sample")
    shards: int = Field(
        2, ge=1, unit="pieces a client", why="McMahan et al.: most clients hold two classes; shards", later=True
    )
    per_client: int = Field(2, ge=1, unit="classes a client", why="the hardest usual case; classes", later=True)
    file: str = Field("", why="whose split; manifest", later=True)
    file_sha256: str = Field(
        "",
        pattern=r"^([0-9a-f]{64})?$",
        why="pins the file's content; filled in when settings are made; manifest",
        later=True,
    )

    @pydantic.model_validator(mode="after")
    def _fits_together(self) -> Partition:
        if (self.law == "manifest") != bool(self.file):
            raise ValueError(f"law={self.law!r} with file={self.file!r}: law='manifest' and file go together")
        return self


PARTITION_READS: dict[str, tuple[str, ...]] = {
    "iid": (), "dirichlet": ("alpha",), "bernoulli-dirichlet": ("p", "alpha"), "shards": ("shards",),
    "classes": ("per_client",), "quantity": ("alpha",), "manifest": ("file", "file_sha256"), "natural": (),
}  # fmt: skip

PLACE = {"file"}  # the fields that say where a split's file lies: its content is pinned, and decides alone

PARTITION_LAWS: dict[str, str] = {  # in a line each; the whole law is in Partition's docstring
    "iid": "at random, all clients of one size",
    "dirichlet": "each class is shared among all clients by shares ~ Dir(alpha)",
    "bernoulli-dirichlet": "a client may hold a class with probability p; its holders share it by shares ~ Dir(alpha)",
    "shards": "pieces of the samples sorted by class (McMahan et al., AISTATS 2017)",
    "classes": "so many classes a client, shared evenly among their holders (Li et al., ICDE 2022)",
    "quantity": "sizes ~ Dir(alpha), samples at random (Li et al., ICDE 2022)",
    "manifest": "a file's split, exactly: a manifest of ours, or CSV lines index,client",
    "natural": "the clients that the data set names itself",
}


def parameters(spec: Partition) -> dict[str, Any]:
    """The parameters that the law reads, ``min_size`` apart, which every law heeds: {name: value}."""
    return {name: getattr(spec, name) for name in PARTITION_READS[spec.law]}


def pinned(spec: Partition) -> Partition:
    """The specification with the SHA-256 of the file that it names.

    Raises FileNotFoundError where there is none, and ValueError where the file is not the one that was pinned.
    """
    if spec.law != "manifest":
        return spec
    path = Path(spec.file)
    if not path.is_file():
        wanted = f"; wanted is the split whose SHA-256 is {spec.file_sha256}" if spec.file_sha256 else ""
        raise FileNotFoundError(f"partition 'manifest': there is no file {path.absolute()}{wanted}")
    with path.open("rb") as opened:
        found = hashlib.file_digest(opened, "sha256").hexdigest()
    if spec.file_sha256 not in ("", found):
        raise ValueError(
            f"{path.absolute()} is another file now: its SHA-256 is {found[:12]}..., and {spec.file_sha256[:12]}... "
            "was pinned; bring the old file back, or build the scenario anew"
        )
    return spec.model_copy(update={"file_sha256": found})


def found(spec: Partition, beside: Path) -> Partition | None:
    """The specification with the file where it lies now: where it says, or under that name in the folder ``beside``;
    None where neither place has a file of that name.  Raises ValueError where the one that is there is another."""
    places = [path for path in (Path(spec.file), beside / Path(spec.file).name) if path.is_file()]
    said = [spec.model_copy(update={"file": str(path)}) for path in places]
    for one in said:
        with suppress(ValueError):  # the other place may have the right one
            return pinned(one)
    return pinned(said[0]) if said else None


def read_csv(path: Path, samples: int | None = None) -> Ints:
    """The owners of a CSV split: a line ``index,client``, then a line for each of the ``samples`` positions (None: as
    many as there are lines), in any order and in quotes or not.  Raises ValueError, naming file and line, for a line
    that is no pair of whole numbers, an index or client out of range, an index given twice, and with the first missing
    index."""
    try:
        lines = path.read_text(encoding="utf-8-sig").replace('"', "").splitlines()  # R writes names so
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is neither a manifest nor CSV text: {error}") from None
    if not lines or [cell.strip() for cell in lines[0].split(",")] != ["index", "client"]:
        raise ValueError(f"{path}:1: the first line must be 'index,client', not {(lines or [''])[0][:60]!r}")
    if samples is None:
        samples = sum(bool(line.strip()) for line in lines[1:])
    owner = np.full(samples, -1, dtype=np.int64)
    for number, line in enumerate(lines[1:], start=2):
        if not line.strip():
            continue
        try:
            index, client = map(int, line.split(","))
        except ValueError:
            raise ValueError(f"{path}:{number}: {line[:60]!r} is not 'index,client', two whole numbers") from None
        if not 0 <= index < samples:
            raise ValueError(f"{path}:{number}: there is no sample {index}: the data set has 0..{samples - 1}")
        if not 0 <= client < samples:  # there would be a client without samples
            raise ValueError(
                f"{path}:{number}: there is no client {client}: they are numbered from 0 without gaps, and there are "
                f"{samples} samples"
            )
        if owner[index] >= 0:
            raise ValueError(f"{path}:{number}: sample {index} is given twice: client {owner[index]}, then {client}")
        owner[index] = client
    absent = np.flatnonzero(owner < 0)
    if len(absent):
        raise ValueError(f"{path} gives no client to {len(absent)} of {samples} samples, first {absent[0]}")
    return owner


def split(
    spec: Partition,
    labels: Ints,
    classes: int,
    clients: int,
    stream_names: tuple[Name, ...],
    *,
    owners: Ints | None = None,
) -> Ints:
    """The owner of each sample: int64 [n] in [0, clients).

    labels: int64 [n] in [0, classes).  stream_names: the names of the draw; the stream is (*names, "partition").
    owners: int64 [n], what a file (manifest) or the data set (natural) says; read by these two laws alone.
    A partition in which some client has fewer than ``min_size`` samples is drawn anew, up to 100 times or 5 s.
    Raises ValueError, with the numbers and with advice, when no such partition is found, when p leaves a class
    without a client or a client without a class, when a given split is about other samples or clients, and when there
    are more clients than samples for them.
    """
    labels = _checked(labels, classes)
    if clients < 1:
        raise ValueError(f"a partition needs at least one client, not {clients}")
    if spec.law in ("manifest", "natural"):
        return _taken(spec, owners, len(labels), clients)
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
    if spec.law == "shards":
        return _shards(spec, rng, labels, clients)

    # Only the counts are drawn in each try; the samples are dealt out once they are large enough.  That is the
    # same law as drawing an owner for each sample (multinomial counts in exchangeable order) and 100 tries at
    # 500 clients then cost less than one deal of a million samples.
    present, sizes = np.unique(labels, return_counts=True)
    occurring = len(present)
    if spec.law == "quantity":  # as one class: sizes alone are skewed
        labels, present, sizes = np.zeros_like(labels), np.zeros(1, dtype=np.int64), np.array([len(labels)])
    start = time.monotonic()
    tries, smallest = 0, 0
    while tries < TRIES and time.monotonic() - start < SECONDS:
        tries += 1
        counts = np.zeros((clients, len(present)), dtype=np.int64)  # [M, classes that occur]
        for j, holders in enumerate(_holders(spec, rng, clients, present)):
            if spec.law == "classes":
                counts[holders, j] = np.bincount(np.arange(sizes[j]) % len(holders), minlength=len(holders))
            else:
                shares = rng.dirichlet(np.full(len(holders), spec.alpha))
                counts[holders, j] = rng.multinomial(sizes[j], shares)
        smallest = max(smallest, int(counts.sum(axis=1).min()))
        if counts.sum(axis=1).min() >= spec.min_size:
            return _deal(rng, labels, counts)
    advice = {"bernoulli-dirichlet": "raise alpha or p, or ", "classes": "raise per_client, or "}.get(
        spec.law, "raise alpha, or "
    )
    said = ", ".join(f"{name}={value}" for name, value in {**parameters(spec), "clients": clients}.items())
    raise ValueError(
        f"in {tries} tries of the {spec.law} partition the smallest client had at most {smallest} samples, and "
        f"min_size={spec.min_size} are wanted ({said}, classes={occurring}, samples={len(labels)}): {advice}"
        f"lower clients{' or min_size' if spec.min_size > 1 else ''}"
    )


def _taken(spec: Partition, owners: Ints | None, samples: int, clients: int) -> Ints:
    """A split that somebody else made, if it is about this federation."""
    source = f"the file {spec.file}" if spec.law == "manifest" else "the data set"
    if owners is None:
        raise ValueError(f"partition {spec.law!r}: {source} names no clients; take another partition")
    if len(owners) != samples:
        raise ValueError(f"{source} divides {len(owners)} samples, and the data set has {samples}")
    named = int(owners.max()) + 1 if len(owners) else 0
    if named != clients:
        raise ValueError(f"{source} names {named} clients, and clients={clients}: set clients to {named}")
    counts = np.bincount(owners, minlength=clients)
    if counts.min() < spec.min_size:
        smallest, few = int(counts.min()), int((counts < spec.min_size).sum())
        raise ValueError(
            f"{source}: {few} of {clients} clients have fewer than min_size={spec.min_size} samples (client "
            f"{int(counts.argmin())}, counted from 0: {smallest}): join small clients"
            + (f", or take them as they are with --min-size {smallest}" if smallest else "")
        )
    return owners.astype(np.int64)  # a copy


def _shards(spec: Partition, rng: np.random.Generator, labels: Ints, clients: int) -> Ints:
    """Owners by shards; the samples of one class are in random order, so a shard is no stretch of the data set."""
    pieces = clients * spec.shards
    if pieces > len(labels):
        raise ValueError(
            f"{clients} clients of {spec.shards} shards need {pieces} samples, and the data set has {len(labels)}: "
            "lower clients or shards"
        )
    order = rng.permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    owner = np.empty(len(labels), dtype=np.int64)
    whose = rng.permutation(np.repeat(np.arange(clients), spec.shards))
    for piece, client in zip(np.array_split(order, pieces), whose, strict=True):
        owner[piece] = client
    if (smallest := np.bincount(owner, minlength=clients).min()) < spec.min_size:
        raise ValueError(
            f"shards={spec.shards} gives a client {smallest} samples, and min_size={spec.min_size} are wanted: "
            "lower clients or min_size"
        )
    return owner


def _checked(labels: Ints, classes: int) -> Ints:
    labels = np.asarray(labels)
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        raise ValueError(f"labels must be int64 [n], not {labels.dtype} {list(labels.shape)}")
    if len(labels) and not 0 <= labels.min() <= labels.max() < classes:
        raise ValueError(f"labels reach from {labels.min()} to {labels.max()}; {classes} classes are 0..{classes - 1}")
    return labels.astype(np.int64, copy=False)


def _holders(spec: Partition, rng: np.random.Generator, clients: int, present: Ints) -> list[Ints]:
    """For each class that occurs, the clients that may hold it."""
    if spec.law in ("dirichlet", "quantity"):
        return [np.arange(clients)] * len(present)
    if spec.law == "classes":
        return _class_holders(spec.per_client, rng, clients, present)
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


def _class_holders(per_client: int, rng: np.random.Generator, clients: int, present: Ints) -> list[Ints]:
    """For each class that occurs, in random order, its holders when every client holds ``per_client`` classes."""
    j = len(present)
    if per_client > j or clients * per_client < j:
        raise ValueError(
            f"{clients} clients of per_client={per_client} classes cannot share {j} classes: "
            + (f"per_client is {j} at most" if per_client > j else "raise per_client or clients")
        )
    held = np.zeros((clients, j), dtype=bool)
    held[np.arange(clients), np.arange(clients) % j] = True
    orphans = rng.permutation(np.flatnonzero(~held.any(axis=0))).tolist()  # with fewer clients than classes
    for m in rng.permutation(clients):
        while orphans and held[m].sum() < per_client:
            held[m, orphans.pop()] = True
        held[m, rng.permutation(np.flatnonzero(~held[m]))[: per_client - held[m].sum()]] = True
    return [rng.permutation(np.flatnonzero(column)) for column in held.T]


def _deal(rng: np.random.Generator, labels: Ints, counts: Ints) -> Ints:
    """Owners such that client m has counts[m, j] samples of the j-th class that occurs, in random order."""
    owner = np.empty(len(labels), dtype=np.int64)
    by_class = np.argsort(labels, kind="stable")
    stop = np.cumsum(counts.sum(axis=0))
    for j, column in enumerate(counts.T):
        members = by_class[stop[j] - column.sum() : stop[j]]
        owner[members] = rng.permutation(np.repeat(np.arange(len(column)), column))
    return owner
