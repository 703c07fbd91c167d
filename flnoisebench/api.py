"""The whole public plugin API: what a method or a data set is, and what the runtime hands to it.

A **method** is a frozen object with pure functions over immutable trees.  The runtime calls them; a method
never calls the runtime.  One exchange goes

    plan(state, server)  ->  Plan(task, cohort, message, private)      the server speaks
    client(task, message, client)  ->  Reply(upload, state, ...)       each client of the cohort answers
    aggregate(state, uploads, server)  ->  the server's next state     the server listens

and one or more exchanges make a round, at whose end the runtime evaluates ``predictors(state, server)``.
FedAvg, whole:

    class FedAvg(Method):
        card = Card(title="FedAvg", paper="McMahan et al., AISTATS 2017", year=2017)

        def init(self, server):
            return weights(server.model())

        def plan(self, state, server):
            return Plan("train", server.cohort(), state)

        def client(self, task, message, client):
            network = client.model(message)
            fit = client.fit(network, cross_entropy)
            return Reply(weights(network), metrics={"loss": fit.loss})

        def aggregate(self, state, uploads, server):
            return average([u.content for u in uploads], [u.size for u in uploads])

        def predictors(self, state, server):
            return {"main": server.model(state, frozen=True)}

A **tree** is a dense tensor without gradient, a bool, int, float, str or None, or a dict (with str keys), list or
tuple of trees; numpy's scalars and named tuples are none.

What makes such a file a benchmark entry is what it cannot do: keep state between calls (assignment raises),
see a true label (nothing it is handed leads to one), read another client's data, draw a number outside the
named streams, or write into a message.

Tensors live on the run's device: images, labels, networks, and whatever a function returned (state, message, upload)
by the time that it is handed on, whether the run was resumed in between or not.  What ``rng`` draws is on the CPU, and
so is what a method makes there: ``value.to(other.device)`` before the two meet, ``.cpu()`` before ``.numpy()``.  The
server's state, messages and uploads must be finite: a NaN or an infinity in them stops the run.  What has no value yet
is None, or masked.

A **loss** says how one step is scored: ``loss(network, batch) -> scalar tensor``.  Whatever varies from step
to step or call to call reaches it through ``Batch``, as tensors, so that an engine may record the step once
and replay it; closures are refused.

A step follows the **gradient** of that scalar, and a method that wants another one says so in its loss.  Hooks are
refused: networks are kept from turn to turn.  A correction c of the gradient (SCAFFOLD's c - c_i, in ``given``) is a
term that is linear in the parameters, and so is a gradient g of the method's own (clipped, or with a momentum that
lives in the carry), here from ``torch.autograd.grad(value, parameters)``:

    value + sum((p * batch.given["c"][name]).sum() for name, p in network.named_parameters())

    linear = sum((p * g.detach()).sum() for p, g in zip(parameters, gradients, strict=True))
    return value.detach() + linear - linear.detach()

With momentum and weight decay of the call's ``Optimiser`` at 0, a step is then p - lr g.  A detached scalar moves
nothing: such a ``fit`` only gathers, as a carry does the gradient over all samples.  Where the gradient is taken at
other weights (SAM), ``torch.func.functional_call(network, moved, (batch.x,))`` goes there.
"""

from __future__ import annotations

import difflib
import json
import math
import shlex
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

import pydantic
import torch
import torch.nn.functional as F  # noqa: N812 (torch's own abbreviation)
from pydantic_core import core_schema

from flnoisebench.imagefiles import (
    IMAGE_SUFFIXES,
    READ_SUFFIXES,
    Progress,
    decode_images,
    digest_images,
    image_files,
    map_bytes,
    map_images,
    open_map,
    pixels_of,
    refuse_shared,
    shared_images,
    some,
    undecodable,
)
from flnoisebench.trees import Tree, lying_in, map_tensors, to, vectors

__all__ = [
    "IMAGE_SUFFIXES", "KEEP", "READ_SUFFIXES", "Arrays", "Batch", "Card", "Claims", "Client", "Config", "Dataset",
    "Field", "Finding", "Fit", "ImageSettings", "Images", "Method", "MissingData", "OnceABatch", "Optimiser", "Plan",
    "Preparation", "Preset", "Progress", "Protocol", "Reply", "Rounds", "Server", "Tree", "Upload", "average",
    "cross_entropy", "data_command", "decode_images", "digest_images", "image_files", "map_bytes", "map_images",
    "map_tensors", "moments", "near", "open_map", "pixels_of", "read_settings", "refuse_shared", "shared_images",
    "some", "to", "undecodable", "weights",
]  # fmt: skip


# ---------------------------------------------------------------------------------------------- settings


def near(name: str, known: Iterable[str]) -> str:
    """For the message about an unknown name: " Did you mean a or b?", or nothing when nothing known resembles it."""
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return f" Did you mean {' or '.join(close)}?" if close else ""


class Config(pydantic.BaseModel):
    """Frozen, validated settings.  An unknown name or a value out of range is an error, never ignored."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", validate_default=True)


def Field(  # noqa: N802 (pydantic's name)
    default: Any = ..., *, unit: str = "", why: str, later: bool = False, **bounds: Any
) -> Any:
    """One setting: its default, its unit, and why it has that default (a source or a reason).

    later: it was added when there were results already, and at its default all is as it was before.  Left
    at that it is no part of what a run is named after, so that earlier runs and rows stay what they are.
    ``bounds`` are pydantic's: ge, gt, le, lt, min_length, ...
    """
    return pydantic.Field(default, description=why, json_schema_extra={"unit": unit, "later": later}, **bounds)


def unstated(config: Config) -> set[str]:
    """The names of the settings that came later (see ``Field``) and are at their default."""
    return {
        name
        for name, field in type(config).model_fields.items()
        if isinstance(extra := field.json_schema_extra, dict)
        and extra.get("later")
        and getattr(config, name) == field.get_default()
    }


class Rounds:
    """A duration or a moment in rounds: an int is absolute, a float a share of the run's length.

    Shares keep a schedule's shape when a run is shortened: ``Rounds(0.4).of(500)`` is 200, ``.of(50)`` is 20.
    Raises ValueError for anything else, below 0 or not finite.
    """

    def __init__(self, value: int | float | Rounds) -> None:
        if isinstance(value, Rounds):
            value = value.value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"rounds are an int (absolute) or a float (share of the run), not {value!r}")
        if value < 0 or not math.isfinite(value):
            raise ValueError(f"rounds cannot be {value!r}: an int >= 0 or a finite share >= 0 is wanted")
        self.value: int | float = value

    def of(self, total: int) -> int:
        """The number of rounds in a run of ``total``; a share is rounded half up."""
        return self.value if isinstance(self.value, int) else math.floor(self.value * total + 0.5)

    def __repr__(self) -> str:
        return f"Rounds({self.value!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rounds) and (type(self.value), self.value) == (type(other.value), other.value)

    def __hash__(self) -> int:
        return hash((type(self.value), self.value))

    @classmethod
    def _parse(cls, value: Any) -> Rounds:
        if isinstance(value, str):  # from the command line: "10" is absolute, "0.4" and "1.0" are shares
            try:
                value = float(value) if any(mark in value for mark in ".e") else int(value)
            except ValueError:
                raise ValueError(f"{value!r} is neither a number of rounds nor a share of the run") from None
        return cls(value)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(
            cls._parse, serialization=core_schema.plain_serializer_function_ser_schema(lambda r: r.value)
        )


def moments(rounds: int, start: Rounds, period: Rounds, stop: Rounds) -> range:
    """The rounds of a run of ``rounds`` in which something happens that begins at ``start``, comes every ``period`` (at
    least 1) and is over before ``stop``."""
    return range(start.of(rounds), min(stop.of(rounds), rounds), max(1, period.of(rounds)))


class Optimiser(Config):
    """A local optimiser, made anew for every ``fit`` (momentum never outlives a client's turn)."""

    name: Literal["sgd", "adam"] = Field("sgd", why="the paper's; its momentum buffer starts at zero each round")
    lr: float = Field(0.1, unit="step", gt=0, why="FedCova's experiments")
    momentum: float = Field(0.9, ge=0, lt=1, why="FedCova's experiments; Adam's first beta when name is adam")
    weight_decay: float = Field(5e-4, ge=0, why="FedCova's experiments")


class Protocol(Config):
    """The training budget and model, which belong to the benchmark and not to a method.

    Equal for all methods in the track ``common``; in the track ``own`` a method's preset may override it, and
    every override is recorded.
    """

    name: str = Field("custom", why="the shipped file that it came from")
    rounds: int = Field(500, ge=1, unit="rounds", why="FedCova's CIFAR runs")
    local_epochs: int = Field(1, ge=1, unit="epochs", why="FedCova's experiments")
    batch: int = Field(128, ge=1, unit="samples", why="unstated in the paper; FedCova's specification, A1")
    optimiser: Optimiser = Field(Optimiser(), why="FedCova's experiments")
    lr_schedule: Literal["constant", "cosine"] = Field("constant", why="no decay is stated in the paper")
    participation: float = Field(1.0, gt=0, le=1, unit="share of clients a round", why="FedCova's experiments")
    model: str = Field("resnet18", why="FedCova's CIFAR-10 model; names as `flnoisebench list models` prints")
    last_batch: Literal["keep", "merge", "drop"] = Field(
        "keep", why="no sample is dropped silently; merge joins a last batch under half size to the one before"
    )
    precision: Literal["fp32", "tf32", "bf16"] = Field("fp32", why="exact first; bf16 is the fast choice on GPUs")

    def optimiser_at(self, round: int) -> Optimiser:
        """The optimiser of one round: the learning rate depends on the server's round alone, so a client that
        was not sampled for a while does not lag behind."""
        if self.lr_schedule == "constant":
            return self.optimiser
        factor = 0.5 * (1 + math.cos(math.pi * round / self.rounds))
        return self.optimiser.model_copy(update={"lr": max(self.optimiser.lr * factor, 1e-12)})


# --------------------------------------------------------------------------------- what passes to and fro


class _Keep:
    def __repr__(self) -> str:
        return "KEEP"

    def __reduce__(self) -> str:  # stays the one object when a reply comes back from another process
        return "KEEP"


KEEP: Any = _Keep()  # Reply.state: the client's state stays as it is


@dataclass(frozen=True)
class Plan:
    """The next exchange: what the server asks of whom.

    task: its name, for ``client``.  cohort: the client ids, in any order, none twice.  message: what everybody
    in the cohort gets, finite.  private: further entries for single clients; they are merged into that client's
    message, which must then be a dict with other keys.  closes_round: the round ends after this exchange.
    """

    task: str
    cohort: Sequence[int]
    message: Tree = None
    private: Mapping[int, dict[str, Tree]] = field(default_factory=dict)
    closes_round: bool = True


@dataclass(frozen=True)
class Claims:
    """What a client believes about its own data, for the evaluator's record only.  None: it does not say.

    labels: int64 [n], the labels it now trains on.  clean: float [n] in [0, 1], the probability that the given label
    of each sample is right.  noisy: whether it counts itself, or was told to be, a noisy client.
    """

    labels: torch.Tensor | None = None
    clean: torch.Tensor | None = None
    noisy: bool | None = None


@dataclass(frozen=True)
class Reply:
    """A client's answer: what it uploads (finite), its own next state (KEEP: unchanged), metrics (numbers for the
    record, averaged over the cohort by size) and claims.  The upload alone travels and counts as bytes: no server sees
    metrics or claims."""

    upload: Tree = None
    state: Tree = KEEP
    metrics: Mapping[str, float] = field(default_factory=dict)
    claims: Claims = Claims()


@dataclass(frozen=True)
class Upload:
    """What the server sees of a reply: who, how many samples it holds, and what it sent."""

    client: int
    size: int
    content: Tree


@dataclass(frozen=True)
class Batch:
    """Everything a loss may look at.  All tensors are on the run's device.

    views    tuple of float [B, C, H, W]: independent augmentations of the same images, normalised
    y        labels of the call, [B] int64 (or [B, J] float when the call's labels are soft)
    index    int64 [B], positions in the owner's data
    sample   {name: [B, ...]} rows of the call's per-sample tensors (clean probability, pseudo-label, weight)
    step     int64 scalar tensor, the step within the epoch; steps: the number of steps in an epoch
    draw     {name: [...]} this step's row of the call's pre-drawn tensors (mixup weights, dropout masks)
    given    the call's tree (anchor weights, centroids, priors); its numbers arrive as fp64, int64 or bool scalars
    frozen   {name: Module} networks in eval mode without gradient (teacher, peer)
    carry    the tree that the previous step returned (the call's carry before the first)
    other    {name: Batch} one batch of each further stream (DivideMix's unlabelled half)
    """

    views: tuple[torch.Tensor, ...]
    y: torch.Tensor
    index: torch.Tensor
    step: torch.Tensor
    steps: torch.Tensor
    sample: Mapping[str, torch.Tensor] = field(default_factory=dict)
    draw: Mapping[str, torch.Tensor] = field(default_factory=dict)
    given: Tree = None
    frozen: Mapping[str, torch.nn.Module] = field(default_factory=dict)
    carry: Tree = None
    other: Mapping[str, Batch] = field(default_factory=dict)

    @property
    def x(self) -> torch.Tensor:
        """The first view."""
        return self.views[0]


class Fit(NamedTuple):
    """What ``fit`` returns: the mean loss a sample (0.0 after no step), the last carry, the per-sample tensors with
    what the loss wrote into them, and the number of optimiser steps."""

    loss: float
    carry: Tree
    sample: dict[str, torch.Tensor]
    steps: int


# A loss returns its scalar; or (scalar, new carry); or (scalar, new carry, {name: new rows of batch.sample}), in which
# the carry is None where there is none.
Loss = Callable[[torch.nn.Module, Batch], Any]


class Images(ABC):
    """A handle to images that stay where the engine put them: a client's own, or the public set."""

    size: int


class Side(ABC):
    """What both sides offer: facts, streams, networks and training."""

    round: int  # from 0
    exchange: int  # from 0 within the round
    clients: int  # in the federation
    classes: int  # J
    protocol: Protocol
    told: Mapping[str, float]  # what the card says the method is told about the noise, by name

    @abstractmethod
    def rng(self, name: str) -> torch.Generator:
        """A CPU generator on the stream (seed, role, client, round, exchange, name).

        The same name twice in one call would give the same numbers twice, so it raises ValueError.
        """

    @abstractmethod
    def seed(self, name: str) -> int:
        """A 32-bit seed from the named stream, for scikit-learn's ``random_state``; a name once a call, as ``rng``."""

    @abstractmethod
    def model(self, weights: Tree = None, name: str = "main", *, frozen: bool = False) -> torch.nn.Module:
        """The method's network with these weights (None: initialised from the named stream).

        Networks of different names are independent.  frozen: eval mode, no gradients; to look through a network that
        this call trained, ``model(weights(network), another name, frozen=True)``.  Raises ValueError for one name twice
        in a call, and for weights of another network.
        """

    @abstractmethod
    def batch_sizes(
        self, *, size: int | None = None, batch: int | None = None, last_batch: str | None = None
    ) -> tuple[int, ...]:
        """The batch sizes of one epoch over ``size`` samples (default: all own), as ``fit`` will cut them: what
        to pre-draw for (``len`` is the steps an epoch, ``max`` the widest batch).  Empty where a lone sample is
        skipped (see ``fit``)."""

    @abstractmethod
    def fit(
        self,
        network: torch.nn.Module,
        loss: Loss,
        *,
        data: Images | None = None,
        labels: torch.Tensor | None = None,
        subset: torch.Tensor | None = None,
        views: int = 1,
        batch: int | None = None,
        streams: Mapping[str, Mapping[str, Any]] | None = None,
        sample: Mapping[str, torch.Tensor] | None = None,
        draw: Mapping[str, torch.Tensor] | None = None,
        given: Tree = None,
        frozen: Mapping[str, torch.nn.Module] | None = None,
        carry: Tree = None,
        epochs: int | None = None,
        steps: int | None = None,
        optimiser: Optimiser | None = None,
        last_batch: str | None = None,
        stream: str = "fit",
    ) -> Fit:
        """Train ``network`` in place.

        data: whose images (default: own; a server has only ``public``).  labels: [n] int64 or [n, J] float in the
        owner's order (default: the given labels; -1 for public images).  subset: int64 positions to train on (default:
        all).  views: augmentations a batch (0: one, not augmented).  batch, epochs, optimiser, last_batch: default the
        protocol's; steps: that many steps instead of epochs, reshuffling as often as needed.  streams: {name:
        {"subset", "views", "batch"}} (defaults as above) for ``Batch.other``, each cycling through its subset
        independently of the main one, in whole batches.  draw: {name: [all steps, ...]}.  sample: {name: [n, ...]} in
        the owner's order.  given, frozen, carry: see ``Batch``; a loss that returns a carry needs one to begin with, of
        the same structure and shapes.  stream: the name of the random stream for shuffling and augmentation, once a
        call.

        Raises ValueError for a closure as loss (it names the captured variable), for tensors of a wrong length, for
        numbers below 0 and a batch of 0, and for frozen networks that are trainable, FloatingPointError when the loss
        becomes NaN or infinite.  A sample alone in its batch cannot pass a BatchNorm in training: it joins the batch
        before, or is skipped and counted when there is none, so that ``Fit.steps`` can be 0.  Parameters that had
        ``requires_grad_(False)`` before the call stay as they are, weight decay included; ``model`` hands them out
        with gradients again.
        """

    @abstractmethod
    def apply(
        self,
        function: Callable[[Batch], Tree],
        *,
        data: Images | None = None,
        subset: torch.Tensor | None = None,
        view: Literal["plain", "train"] = "plain",
        frozen: Mapping[str, torch.nn.Module] | None = None,
        given: Tree = None,
        stream: str = "apply",
    ) -> Tree:
        """``function`` over images in large batches without gradient; the rows of the trees that it returns are
        put together in the order of ``subset`` (default: all, in the owner's order).  view: the test transform, or
        the training augmentation once.  ``batch.y`` holds the given labels, -1 for public images.  Raises ValueError
        for what has no row an image, and as ``fit``."""


class Client(Side):
    """A client in its turn: its own data and state, and nobody else's."""

    id: int
    size: int  # n, the number of own samples
    labels: torch.Tensor  # int64 [n], the given (possibly wrong) labels; a fresh copy each turn
    state: Tree  # its own, from the last reply (in ``join``: None)
    data: Images


class Server(Side):
    """The server: public facts only."""

    shape: tuple[int, int, int]  # (C, H, W) of an image
    # public images without labels, if the data set brings some and the card's conditions say "public images"
    public: Images | None

    @abstractmethod
    def cohort(self, name: str = "cohort") -> tuple[int, ...]:
        """``max(1, int(participation * clients))`` client ids without replacement, sorted, of the protocol's
        participation, which is part of the budget.  Each exchange draws others: who wants one cohort a round keeps it
        in the state.  Raises ValueError for one name twice in a call."""

    @abstractmethod
    def note(self, **values: float | int | str | bool | list[Any]) -> None:
        """Write facts into the round's record (votes, flagged clients, «could not decide»).  Raises ValueError for
        what JSON cannot say."""

    @abstractmethod
    def claim(self, noisy_clients: Sequence[int]) -> None:
        """Tell the evaluator which clients the server now holds for noisy; all others count as held clean.  Raises
        ValueError for an id that no client has."""


# ------------------------------------------------------------------------------------------------- method


@dataclass(frozen=True)
class Card:
    """What a reader must know before comparing.

    conditions: what the method needs beyond FedAvg (a second model, public images, a warm-up stage, ...).  told:
    what it is told about the noise, each one of "noise_rate" (the mean nominal rate over all clients) and
    "noisy_clients" (their nominal number).  departures: from the authors' code or text, and why.

    Raises ValueError for an entry without text, and for a text where a tuple of them is wanted.
    """

    title: str
    paper: str
    year: int
    conditions: tuple[str, ...] = ()
    told: tuple[str, ...] = ()
    departures: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("title", "paper"):
            if not _is_text(getattr(self, name)):
                raise ValueError(f"Card({name}={getattr(self, name)!r}): a text is wanted")
        for name in ("conditions", "told", "departures"):
            entries = getattr(self, name)
            if not isinstance(entries, tuple | list) or not all(map(_is_text, entries)):
                raise ValueError(
                    f"the card of {self.title}: {name} must be a tuple of texts, of one too: ('why and what',), not "
                    f"{entries!r}"
                )


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


@dataclass(frozen=True)
class Preset:
    """Named settings, and for the track ``own`` the protocol values that belong to them.

    datasets: the same again for single data sets, laid over the general ones.
    tuned_on: draws that values were chosen on by looking at test images; leaderboards mark rows of those.
    """

    about: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    protocol: Mapping[str, Any] = field(default_factory=dict)
    datasets: Mapping[str, Preset] = field(default_factory=dict)
    tuned_on: Sequence[int] = ()

    def __post_init__(self) -> None:
        for name in ("settings", "protocol", "datasets"):
            if not isinstance(getattr(self, name), Mapping):
                raise ValueError(f"Preset({name}={getattr(self, name)!r}): a dict by name is wanted")
        for dataset, special in self.datasets.items():
            if not isinstance(special, Preset):
                raise ValueError(f"Preset(datasets={{{dataset!r}: {special!r}}}): a Preset is wanted for each data set")

    def on(self, dataset: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """(settings, protocol overrides) for one data set."""
        special = self.datasets.get(dataset, Preset())
        return {**self.settings, **special.settings}, {**self.protocol, **special.protocol}


class Method:
    """A federated-learning method.  Subclasses define a card, a Config, presets and the functions below.

    The trees that ``init``, ``join``, ``plan``, ``client`` and ``aggregate`` return are moved to the run's device
    before anybody is handed them.  Those of the server's side and uploads must be finite.
    """

    card: ClassVar[Card]
    Config: ClassVar[type[Config]] = Config
    presets: ClassVar[Mapping[str, Preset]] = {"default": Preset()}  # the first one is the default

    config: Any

    def __init__(self, config: Any = None) -> None:
        object.__setattr__(self, "config", self.Config() if config is None else config)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(
            f"{type(self).__name__} is frozen: {name!r} cannot be set. Keep it in the server's or the client's state"
        )

    __delattr__ = None  # type: ignore[assignment]

    def network(self, encoder: torch.nn.Module) -> torch.nn.Module:
        """The network that is trained.  ``encoder`` maps images to features [B, encoder.width]; the default puts
        a linear head with ``encoder.classes`` outputs behind it."""
        return torch.nn.Sequential(encoder, torch.nn.Linear(encoder.width, encoder.classes))  # type: ignore[arg-type]

    def init(self, server: Server) -> Tree:
        """The server's first state, finite."""
        raise TypeError(f"{type(self).__name__} must define init(server)")

    def join(self, client: Client) -> Tree:
        """A client's first state, at its first participation."""
        return None

    def plan(self, state: Tree, server: Server) -> Plan | None:
        """The next exchange; None ends the run before the protocol's rounds are over."""
        raise TypeError(f"{type(self).__name__} must define plan(state, server)")

    def client(self, task: str, message: Tree, client: Client) -> Reply:
        """A client's work."""
        raise TypeError(f"{type(self).__name__} must define client(task, message, client)")

    def aggregate(self, state: Tree, uploads: Sequence[Upload], server: Server) -> Tree:
        """The server's next state, finite; not None where there was one.  ``uploads`` are sorted by client."""
        raise TypeError(f"{type(self).__name__} must define aggregate(state, uploads, server)")

    def predictors(self, state: Tree, server: Server) -> Mapping[str, Callable[[torch.Tensor], torch.Tensor]]:
        """{name: images [B, C, H, W] -> scores [B, J], higher is likelier}; "main" is the one that counts, further
        ones are evaluated beside it: several global models, an ensemble, any function of images and of the server's
        state.  Empty while there is none."""
        raise TypeError(f"{type(self).__name__} must define predictors(state, server)")

    def diagnostics(self, state: Tree) -> Mapping[str, float]:
        """Numbers about the server's state for the round's record."""
        return {}


# ------------------------------------------------------------------------------------- shared by methods


def weights(network: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A copy of the network's parameters and buffers, without gradient: what can be uploaded.

    Buffers (BatchNorm's statistics, and an int64 count of its steps) are no parameters: a server that does more than
    ``average`` does it to the names in ``network.named_parameters()``, and averages the rest.
    """
    flat = getattr(network, "_flat", None)  # the engine's networks lie in a few vectors and are copied at once
    if flat is not None:
        return flat.copy()
    return {name: value.detach().clone() for name, value in network.state_dict().items()}


def average(parts: Sequence[Tree], shares: Sequence[float]) -> Tree:
    """The mean of equal-shaped trees, weighted by ``shares`` over their sum.

    Summed in float64 in the given order, then cast back, so lanes do not matter.  Integer tensors (BatchNorm's
    step counters) keep their dtype and take the maximum: a mean of counters is no count.  Raises ValueError when
    there is nothing to average, for shares of another number or whose sum is not above 0, for dicts of other keys, and
    for leaves that are no tensors.
    """
    if not parts or len(parts) != len(shares):
        raise ValueError(f"average needs as many shares as parts, and at least one: {len(parts)} and {len(shares)}")
    total = math.fsum(float(share) for share in shares)
    if not total > 0 or not math.isfinite(total):
        raise ValueError(f"average: the shares sum to {total}, so there is nothing to average")
    wholes = [whole for part in parts if (whole := vectors(part)) is not None]
    if len(wholes) == len(parts) and all(whole[0] == wholes[0][0] for whole in wholes):
        several = zip(*(bases for _, bases in wholes), strict=True)
        means = {id(bases[0]): _mean(bases, shares, total) for bases in several}
        return map_tensors(lambda leaf: lying_in(means[id(leaf._base)], leaf), parts[0])
    first = parts[0]
    if isinstance(first, dict):
        keys = [set(part) if isinstance(part, dict) else set() for part in parts]
        if odd := sorted(set.union(*keys) - set.intersection(*keys)):  # what the first part lacks would be lost
            raise ValueError(f"average: not all parts have {', '.join(odd[:3])}; average each over those that have it")
        return {key: average([part[key] for part in parts], shares) for key in first}
    if isinstance(first, list | tuple):
        return type(first)(average(list(items), shares) for items in zip(*parts, strict=True))
    if not isinstance(first, torch.Tensor):
        raise ValueError(f"average takes trees of tensors, not {type(first).__name__}")
    return _mean(parts, shares, total)


def _mean(parts: Sequence[torch.Tensor], shares: Sequence[float], total: float) -> torch.Tensor:
    first = parts[0]
    if not first.is_floating_point():
        return torch.stack([part.to(torch.int64) for part in parts]).amax(0).to(first.dtype)
    mean = torch.zeros_like(first, dtype=torch.float64)
    for part, share in zip(parts, shares, strict=True):
        mean.add_(part, alpha=float(share) / total)
    return mean.to(first.dtype)


class OnceABatch:
    """What a network says of the images asked for last, so that several readouts of one batch cost one forward pass."""

    def __init__(self, network: torch.nn.Module) -> None:
        self.network = network
        self.last: tuple[torch.Tensor, int, torch.Tensor] | None = None

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        if images.is_inference() or (images.is_cuda and torch.cuda.is_current_stream_capturing()):
            return self.network(images)  # whether these images changed since cannot be told
        last = self.last
        if last is None or last[0] is not images or last[1] != images._version:
            last = self.last = (images, images._version, self.network(images))
        return last[2]


def cross_entropy(network: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """The mean cross-entropy of the first view, for hard or soft labels."""
    return F.cross_entropy(network(batch.x).float(), batch.y)


# ------------------------------------------------------------------------------------------------ data sets


SettingsOf = TypeVar("SettingsOf", bound=Config)


def read_settings(path: Path, kind: type[SettingsOf]) -> SettingsOf:
    """A data folder's own settings, from a JSON file; the defaults where there is none.  Raises ValueError, naming the
    file, for what is no JSON, unknown (with near misses) or of another type: 64 is a number, "64" and true are none."""
    if not path.is_file():
        return kind()
    known = ", ".join(kind.model_fields)
    try:
        values = json.loads(path.read_text(encoding="utf-8-sig"))
    except ValueError as error:  # not JSON, or not UTF-8
        raise ValueError(f"{path} is not JSON: {error}.  It may set {known}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold an object that sets {known}, not {values!r}")
    try:
        return kind.model_validate(values, strict=True)
    except pydantic.ValidationError as error:
        found = error.errors()[0]
        name = ".".join(map(str, found["loc"]))
        if found["type"] == "extra_forbidden":
            hint = near(name, kind.model_fields)
            raise ValueError(f"{path}: unknown setting {name!r}.{hint} Known: {known}.") from None
        said = f"{name} = {found['input']!r}: " if name else ""
        raise ValueError(f"{path}: {said}{found['msg'].removeprefix('Value error, ')}") from None


class ImageSettings(Config):
    """What ``root/flnoisebench.json`` may say of image files of any size."""

    size: int = Field(64, ge=8, le=1024, unit="pixels", why="twice CIFAR's; a million images take 12 GB")


@dataclass(frozen=True)
class Arrays:
    """A data set in memory.  Images are uint8 [n, C, H, W], labels int64 [n] in [0, J).

    public: uint8 [n, C, H, W] unlabelled images from elsewhere that a server may own, or None.  classes: class
    names, for a data set that learns them from its files (a folder of images).  true_labels: int64 [n], where the
    training labels may be wrong and the right ones are known all the same, else None.  owners: int64 [n], the client
    of each training image, 0.. without gaps, where the data set names them, else None, and clients their names, by
    number, where they have some.  crop: side in pixels of the square that training cuts out of each image at random,
    and evaluation out of its middle; 0: images are used whole.  digest: what identifies images and labels, where the
    data set knows it without reading all of them; "" elsewhere.
    """

    train_images: torch.Tensor
    train_labels: torch.Tensor
    test_images: torch.Tensor
    test_labels: torch.Tensor
    public: torch.Tensor | None = None
    classes: tuple[str, ...] | None = None
    true_labels: torch.Tensor | None = None
    owners: torch.Tensor | None = None
    crop: int = 0
    digest: str = ""
    clients: tuple[str, ...] | None = None


class Finding(NamedTuple):
    """What a look at a data set's files showed.  problem: a run could not be trusted, or not be had."""

    kind: Literal["problem", "note"]
    text: str


@dataclass(frozen=True)
class Preparation:
    """Work that a data set can do once, to read its files fast ever after.

    about: what will be done.  bytes: what it takes on disk.  where: the folder, which is a data root of its own.
    run: does it, or goes on with it, calling back with (done, of how many); raises ValueError and OSError.
    """

    about: str
    bytes: int
    where: Path
    run: Callable[[Progress], None]


def data_command(verb: str, dataset: str, root: Path, *options: str) -> str:
    """A ``flnoisebench data`` command for a message, in backticks: it can be pasted into a shell, whatever the root."""
    return f"`{shlex.join(['flnoisebench', 'data', verb, dataset, *options, '--data-root', str(root)])}`"


class MissingData(FileNotFoundError):
    """A data set's files are not there; the message says where they were looked for and how to get them."""


class Dataset(ABC):
    """A data set: facts as class attributes, and ``load``."""

    name: ClassVar[str]
    title: ClassVar[str]
    classes: ClassVar[tuple[str, ...]]  # class names; empty where ``load`` learns them from the files
    mean: ClassVar[tuple[float, ...]]  # per channel, of pixels scaled to [0, 1]
    std: ClassVar[tuple[float, ...]]
    crop_padding: ClassVar[int] = 0  # pixels of zero padding before a random crop in training; 0: no crop
    flip: ClassVar[bool] = False  # random horizontal flips in training
    labels_are_true: ClassVar[bool] = True  # False: training labels are wrong to an unknown degree (Clothing1M)
    # True: the images' order is the published one, in which results exist, and runs keep it.  False: it follows from
    # how files are named or listed, often class by class, and runs shuffle it; nothing else does, so that splits,
    # manifests and human labels number the training images as ``load`` gives them.
    published_order: ClassVar[bool] = False
    protocol: ClassVar[str]  # the shipped protocol used by default
    source: ClassVar[str]  # where it comes from, and its terms

    @abstractmethod
    def load(self, root: Path, *, public: bool = False) -> Arrays:
        """Read the files under ``root``.  Never downloads.  Raises MissingData, or ValueError naming the damaged
        file.  public: bring the public images too (they may lie in another data set's files)."""

    def human_labels(self, root: Path) -> dict[str, torch.Tensor]:
        """{name: int64 [n]}: labels that people gave the training images, in their order, for the noise laws "human"
        and "twin".  Raises MissingData, or ValueError naming a file that is damaged or about other images.  Empty
        where nobody gave any."""
        return {}

    def natural_clients(self, root: Path) -> int | None:
        """How many clients ``Arrays.owners`` tells apart, for the partition "natural"; None where the data set names
        none.  To be overridden where that is known without the images.  Raises as ``load`` does."""
        owners = self.load(root).owners
        return None if owners is None else int(owners.max()) + 1

    def check(self, root: Path, progress: Progress) -> Iterator[Finding]:
        """Findings about the files that ``load`` alone would not show, or only the first of; images by the million may
        be read for it.  Raises MissingData."""
        return iter(())

    def require_none(self, problems: Sequence[str], root: Path) -> None:
        """Raises ValueError with the first three problems that ``load`` came upon, and how to see all of them."""
        if problems:
            more = f"; and {len(problems) - 3} more problems" if len(problems) > 3 else ""
            command = data_command("check", self.name, root)
            raise ValueError(f"{'; '.join(problems[:3])}{more}.  {command} lists all.")

    def preparation(self, root: Path, *, where: Path | None, size: int | None, images: int | None) -> Preparation:
        """What ``flnoisebench data prepare`` is to do.  where: default a folder in ``root``; size: side of the stored
        images, in pixels; images: how many, balanced over the classes (0: all); both by default what ``root`` says.
        Raises ValueError where there is nothing to prepare, and as ``load`` does."""
        raise ValueError(f"{self.title} needs no preparation: it is read as it is")

    def make_fixture(self, folder: Path) -> str:
        """Write a small imitation in the published layout, for tests; what it holds, in words.  Raises ValueError where
        the data set has none, or the folder is not empty."""
        raise ValueError(f"{self.title} has no imitation: take the data set itself")

    def fetch_human_labels(self, root: Path) -> None:
        """Download what ``human_labels`` reads.  Raises MissingData as ``fetch`` does."""
        raise MissingData(f"nobody published human labels of {self.title}")

    def fetch(self, root: Path) -> None:
        """Download into ``root``.  Raises MissingData with directions where a form or a licence stands before it."""
        raise MissingData(f"{self.title} cannot be downloaded by a program. {self.source}")
