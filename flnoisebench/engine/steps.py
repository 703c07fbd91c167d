"""The training step, over tensors that stay where they are: run eagerly, or recorded once and replayed.

A ``Session`` belongs to a lane and to one kind of ``fit`` call: the same loss, networks, shapes and optimiser.  It
owns the static tensors that a step reads (a chunk of an epoch's images and labels, per-sample values, pre-drawn
tensors, given, carry) and writes (weights, momentum, carry, per-sample values, the summed loss).  ``fit`` fills them,
then calls the step; the step finds its batch through a position that it advances itself.  So on a GPU the whole step
is a CUDA graph, one for each batch size, and a replay costs the CPU microseconds where launching the step's kernels
one by one costs 12 ms (ResNet-18, H100).  On a CPU the same code runs directly.
"""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from flnoisebench.api import Batch, Optimiser, map_tensors, near
from flnoisebench.engine.batches import Chunk, Feed
from flnoisebench.engine.flat import FlatNetwork
from flnoisebench.engine.images import DeviceImages
from flnoisebench.engine.losses import autocast, unpack
from flnoisebench.profiling import Meter
from flnoisebench.trees import Tree, values

WARM_UP = 3  # steps run before recording: cuDNN picks its algorithms, autograd makes its buffers
MOST_RECORDINGS = 64  # a session; each keeps its activations' memory
CHUNK_BYTES = 2**28  # of normalised images a stream of batches; a CIFAR client's whole epoch is 30 MB
_RECORDING = threading.Lock()  # one recording at a time in the process
_SAID: set[str] = set()


def copy_into(target: Tree, source: Tree) -> None:
    """Copy every tensor of ``source`` into its place in ``target``, a tree of the same shape."""
    if isinstance(target, dict):
        for key in target:
            copy_into(target[key], source[key])
    elif isinstance(target, list | tuple):
        for a, b in zip(target, source, strict=True):
            copy_into(a, b)
    elif isinstance(target, torch.Tensor):
        target.copy_(source)


def describe(tree: Tree) -> Any:
    """What a recorded step depends on of a tree: its structure, shapes and dtypes, and nothing of its values."""
    if isinstance(tree, dict):
        return tuple((key, describe(tree[key])) for key in tree)
    if isinstance(tree, list | tuple):
        return (type(tree).__name__, *map(describe, tree))
    if isinstance(tree, torch.Tensor):
        return tuple(tree.shape), str(tree.dtype)
    return tree


def require_rows(tree: Tree, count: int) -> None:
    """Raise ValueError unless all of what a function of ``apply`` returned for ``count`` images are tensors of so many
    rows."""
    for found in values(tree):
        if not isinstance(found, torch.Tensor) or found.dim() == 0 or found.shape[0] != count:
            what = list(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
            raise ValueError(
                "apply: the function must return tensors with one row an image (or dicts, tuples of them), and of "
                f"{count} images it returned {what}"
            )


def structure(network: torch.nn.Module) -> tuple[Any, ...]:
    """A network's identity for a recorded step: its modules' types and where its tensors lie."""
    flat = getattr(network, "_flat", None)
    if isinstance(flat, FlatNetwork):
        return flat.identity()
    tensors = (*network.parameters(), *network.buffers())
    return (
        tuple(type(module).__qualname__ for module in network.modules()),
        tuple((tensor.data_ptr(), tensor.requires_grad) for tensor in tensors),
    )


@dataclass(frozen=True)
class Call:
    """What one call of ``fit`` brings, checked and on the device: see ``api.Side.fit``."""

    feed: Feed
    others: Mapping[str, Feed]
    labels: torch.Tensor
    sample: Mapping[str, torch.Tensor]
    draw: Mapping[str, torch.Tensor]
    given: Tree
    frozen: Mapping[str, torch.nn.Module]
    carry: Tree
    optimiser: Optimiser
    precision: str

    def kind(self) -> Any:
        """What a recorded step depends on: names, structures, shapes and dtypes, and nothing of the values."""
        return (
            self.precision, self.feed.views, self.labels.dtype, self.labels.shape[1:],
            tuple(self.sample), tuple(self.draw), room(self.draw),
            describe([value[:0] for value in (*self.sample.values(), *self.draw.values())]),
            tuple((name, other.sizes[0], other.views) for name, other in self.others.items()),
            describe(self.given), describe(self.carry),
            tuple((name, structure(network)) for name, network in self.frozen.items()),
        )  # fmt: skip


def capacity(feed: Feed, rows: int) -> int:
    """How many images a source of these batches holds at once: an epoch of the largest owner, of ``rows`` images, or as
    many as fit into CHUNK_BYTES, but always a whole batch."""
    return max(*feed.sizes, min(rows, CHUNK_BYTES // (4 * max(feed.views, 1) * feed.images.shape.numel())))


class Source:
    """One stream of batches: a chunk of an epoch in its shuffled order, and the position up to which it was read.

    A chunk holds whole batches, as many as fit into CHUNK_BYTES.  static: its tensors stay where they are and the
    position lies on the device; otherwise each chunk is what its gather made, read by slices.
    """

    def __init__(self, feed: Feed, labels: torch.Tensor, *, rows: int, static: bool) -> None:
        """rows: images of the largest owner whose calls share this source."""
        device, shape = feed.images.device, feed.images.shape
        self.capacity = capacity(feed, rows)
        self.static = static
        self.position = torch.zeros(1, dtype=torch.int64, device=device)
        self._cursor = 0
        self._labels = labels
        self._chunks: Iterator[Chunk] = iter(())
        self._sizes: list[int] = []
        if static:
            self.views = [
                torch.zeros((self.capacity, *shape), device=device).contiguous(memory_format=torch.channels_last)
                for _ in range(max(feed.views, 1))
            ]
            self.y = torch.zeros((self.capacity, *labels.shape[1:]), dtype=labels.dtype, device=device)
            self.index = torch.zeros(self.capacity, dtype=torch.int64, device=device)

    def begin(self, feed: Feed, labels: torch.Tensor) -> None:
        """Start on a call's stream of batches."""
        self._labels, self._chunks, self._sizes = labels, feed.chunks(self.capacity), []

    def next(self) -> tuple[int, bool]:
        """(size of the batch that ``window`` will read, whether it is the first of an epoch)."""
        first = False
        if not self._sizes:
            chunk = next(self._chunks)
            first, self._sizes = chunk.first, chunk.sizes[::-1]
            y = self._labels.index_select(0, chunk.index)
            if self.static:
                count = chunk.index.numel()
                for held, view in zip(self.views, chunk.views, strict=True):
                    held[:count].copy_(view)
                self.y[:count].copy_(y)
                self.index[:count].copy_(chunk.index)
                self.position.zero_()
            else:
                self.views, self.y, self.index, self._cursor = chunk.views, y, chunk.index, 0
        return self._sizes.pop(), first

    def window(self, size: int) -> tuple[tuple[torch.Tensor, ...], torch.Tensor, torch.Tensor]:
        """(views, y, index) of the next ``size`` rows; moves on."""
        if not self.static:
            part = slice(self._cursor, self._cursor + size)
            self._cursor += size
            return tuple(view[part] for view in self.views), self.y[part], self.index[part]
        rows = self.position + torch.arange(size, device=self.position.device)
        found = tuple(view.index_select(0, rows) for view in self.views)
        y, index = self.y.index_select(0, rows), self.index.index_select(0, rows)
        self.position += size
        return found, y, index


class Leaves:
    """What the optimiser steps: a network's flat vectors, or its tensors one by one where they are not flat.

    made_here: whether the engine made the network, so that it is the same object in the next call.
    """

    def __init__(self, network: torch.nn.Module) -> None:
        found: list[Any] = [getattr(module, "_flat", None) for module in network.modules()]
        flats: list[FlatNetwork] = [flat for flat in found if isinstance(flat, FlatNetwork)]
        parameters = list(network.parameters())
        covered = {id(parameter) for flat in flats for parameter in flat.network.parameters()}
        self.made_here = all(id(parameter) in covered for parameter in parameters)
        if self.made_here and all(parameter.requires_grad for parameter in parameters):
            self.parameters: list[torch.nn.Parameter] = [leaf for flat in flats for leaf in flat.leaves]
        else:
            self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self.gradients: list[torch.Tensor] = []
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            self.gradients.append(parameter.grad)
        self.tensors = [vector for flat in flats for vector in flat.vectors.values()]
        if not self.made_here:
            self.tensors += [tensor.detach() for tensor in (*parameters, *network.buffers())]


@dataclass
class Session:
    """Everything static of one kind of fit call."""

    loss: Callable[..., Any]
    network: torch.nn.Module
    stepper: Stepper
    precision: str
    main: Source
    others: Mapping[str, Source]
    sample: dict[str, torch.Tensor]
    draw: dict[str, torch.Tensor]
    given: Tree
    frozen: Mapping[str, torch.nn.Module]
    carry: Tree
    step: torch.Tensor  # int64 [1], within the epoch
    steps: torch.Tensor  # int64 scalar
    row: torch.Tensor  # int64 [1], of ``draw``
    total: torch.Tensor  # float64 scalar: loss times samples
    numbers: torch.Tensor  # int64: 0, 1, 2, ... for the step of a batch where nothing is static
    static: bool  # whether its tensors stay where they are from call to call, as a recording needs
    stream: Any  # torch.cuda.Stream to record on, or None: run directly
    pool: Any  # the memory of its recordings, shared within a lane
    meter: Meter
    graphs: dict[tuple[int, ...], Recording | None] = field(default_factory=dict)  # by batch sizes; None: cannot be
    at: tuple[int, int] = (0, 0)  # step and row, where nothing is static
    losses: list[tuple[torch.Tensor, int]] = field(default_factory=list)  # likewise total

    def begin(self, call: Call) -> None:
        """Start on a call of ``fit``."""
        self.main.begin(call.feed, call.labels)
        for name, source in self.others.items():
            source.begin(call.others[name], call.labels)
        if not self.static:
            self.sample = {name: value.clone() for name, value in call.sample.items()}
            self.draw, self.given, self.carry = dict(call.draw), call.given, map_tensors(torch.clone, call.carry)
        else:
            for held, new in ((self.sample, call.sample), (self.draw, call.draw)):
                for name, value in new.items():
                    held[name][: value.shape[0]].copy_(value)
            copy_into(self.given, call.given)
            copy_into(self.carry, call.carry)
        self.stepper.restart(call.optimiser.lr)
        self.steps.fill_(len(call.feed.sizes))
        if self.static:
            for counter in (self.row, self.step, self.total):
                counter.zero_()
        else:
            self.at, self.losses = (0, 0), []

    def next_batch(self) -> tuple[int, tuple[int, ...]]:
        """The sizes of the batches that the next step will read, the main stream's first."""
        size, first = self.main.next()
        if first and self.static:
            self.step.zero_()
        elif first:
            self.at = (0, self.at[1])
        return size, tuple(source.next()[0] for source in self.others.values())

    def once(self, size: int, other_sizes: Sequence[int]) -> None:
        """One training step on the next ``size`` samples."""
        views, y, index = self.main.window(size)
        if self.static:
            step = self.step[0].clone()  # what a loss keeps of a batch must not move on with the counter
            draw = {name: value.index_select(0, self.row)[0] for name, value in self.draw.items()}
        else:
            step = self.numbers[self.at[0]]
            draw = {name: value[self.at[1]] for name, value in self.draw.items()}
        batch = Batch(
            views=views,
            y=y,
            index=index,
            step=step,
            steps=self.steps,
            sample={name: value.index_select(0, index) for name, value in self.sample.items()},
            draw=draw,
            given=self.given,
            frozen=self.frozen,
            carry=self.carry,
            other={
                name: self._other(source, count)
                for (name, source), count in zip(self.others.items(), other_sizes, strict=True)
            },
        )
        with autocast(self.total.device, self.precision):
            value, carry, rows = unpack(self.loss(self.network, batch), self.loss)
        if value.requires_grad:  # a loss that is constant moves nothing, not even by weight decay
            for gradient in self.stepper.leaves.gradients:
                gradient.zero_()
            value.backward()
            self.stepper.step()
        with torch.no_grad():
            if carry is not None:
                if self.carry is None:
                    raise ValueError(
                        f"the loss {self.loss.__qualname__} returned a carry, but fit was given none to begin with: "
                        "pass carry= of the same structure and shapes.  Rows of sample alone are returned as "
                        "(loss, None, rows)"
                    )
                copy_into(self.carry, map_tensors(torch.clone, carry))  # a clone: the new may be made of the old
            for name, new in rows.items():
                self._row_of(name, new, len(index)).index_copy_(0, index, new.to(self.sample[name].dtype))
            if self.static:
                self.total += value.double() * size
                self.step += 1
                self.row += 1
            else:
                self.losses.append((value.detach(), size))
                self.at = (self.at[0] + 1, self.at[1] + 1)

    def _row_of(self, name: str, new: Any, size: int) -> torch.Tensor:
        """The per-sample tensor that a loss returned rows of.  Raises ValueError where it cannot take them."""
        said = f"the loss {self.loss.__qualname__} returned rows of {name!r}"
        if name not in self.sample:
            known = ", ".join(self.sample) or "nothing"
            raise ValueError(f"{said}, but fit was given sample= of {known}.{near(name, self.sample)}")
        wanted = [size, *self.sample[name].shape[1:]]
        if not isinstance(new, torch.Tensor) or list(new.shape) != wanted:
            found = list(new.shape) if isinstance(new, torch.Tensor) else type(new).__name__
            raise ValueError(f"{said} that are {found}, not {wanted}: one row an image of the batch")
        return self.sample[name]

    def loss_sum(self) -> float:
        """The sum over samples since ``begin``; in either way of keeping it the same float64 sum in the same order."""
        if self.static:
            return self.total.item()
        return sum((value.item() * size for value, size in self.losses), 0.0)

    def _other(self, source: Source, size: int) -> Batch:
        views, y, index = source.window(size)
        zero = torch.zeros((), dtype=torch.int64, device=index.device)
        rows = {name: value.index_select(0, index) for name, value in self.sample.items()}
        return Batch(views=views, y=y, index=index, step=zero, steps=zero, sample=rows)

    def advance(self, size: int, other_sizes: Sequence[int]) -> None:
        """``once``, replayed from its recording where there can be one."""
        if self.stream is None:
            self.once(size, other_sizes)
            return
        key = (size, *other_sizes)
        if key not in self.graphs:
            if len(self.graphs) < MOST_RECORDINGS:
                self.graphs[key] = self._record(size, other_sizes)
            else:
                say_once("many shapes", f"more than {MOST_RECORDINGS} batch sizes on a lane: further ones run eagerly")
        recording = self.graphs.get(key)
        if recording is None:
            self.once(size, other_sizes)
        else:
            recording.graph.replay()
            self.meter.images.update(recording.images)

    def _changing(self) -> list[torch.Tensor]:
        """Every tensor that a step writes; the sources' positions come first."""
        found = [source.position for source in (self.main, *self.others.values())]
        found += [self.step, self.row, self.total, *self.sample.values(), *self.stepper.leaves.tensors]
        map_tensors(found.append, self.carry)
        return found + self.stepper.state

    def _record(self, size: int, other_sizes: Sequence[int]) -> Recording | None:
        """Record one step of these batch sizes and leave the session as it was; None when the loss cannot be."""
        kept = [(tensor, tensor.detach().clone()) for tensor in self._changing()]

        def restore() -> None:
            with torch.no_grad():
                for tensor, value in kept:
                    tensor.copy_(value)

        name = f"the loss {self.loss.__qualname__}"
        return record(name, lambda: self.once(size, other_sizes), restore, self.stream, self.pool, self.meter)


class Recording(NamedTuple):
    graph: Any  # torch.cuda.CUDAGraph
    images: Counter[str]  # what one replay passes through encoders


def record(
    name: str, work: Callable[[], Any], restore: Callable[[], None], stream: Any, pool: Any, meter: Meter
) -> Recording | None:
    """Record what ``work`` launches; ``restore`` undoes what it wrote.  None, with one warning, when it cannot be."""
    counted = Counter(meter.images)  # neither warming up nor recording passes an image
    images: Counter[str] = Counter()
    graph: Any = torch.cuda.CUDAGraph()
    with _RECORDING:
        try:
            for _ in range(WARM_UP):
                work()
                restore()
            meter.images.clear()
            # thread_local: other lanes may allocate and launch meanwhile
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                work()
            images = Counter(meter.images)
        except RuntimeError as error:
            # what the recording found, not what the recording's end makes of it
            reason = str(error.__context__ or error).strip().splitlines()[0]
            say_once(name, f"{name} cannot be recorded and runs eagerly: {reason}")
            graph = None
        meter.images = counted
        restore()
        stream.synchronize()
    return None if graph is None else Recording(graph, images)


class Pass:
    """One function over batches of one size without gradient: the step's simpler sister, for ``apply``.

    A last batch is filled up with its first image, and the rows of the filling are cut off: so there is one recording
    for all owners, and the same bits with or without it.
    """

    def __init__(
        self,
        function: Callable[[Batch], Tree],
        images: DeviceImages,
        frozen: Mapping[str, torch.nn.Module],
        given: Tree,
        *,
        size: int,
        precision: str,
        stream: Any,
        pool: Any,
        meter: Meter,
    ) -> None:
        device, shape = images.device, images.shape
        self.function, self.frozen, self.size, self.precision = function, frozen, size, precision
        self.stream, self.pool, self.meter = stream, pool, meter
        layout = torch.channels_last
        self.view = torch.zeros((size, *shape), device=device).contiguous(memory_format=layout)
        self.y, self.index = (torch.zeros(size, dtype=torch.int64, device=device) for _ in range(2))
        self.given = map_tensors(torch.clone, given)
        self.recording: Recording | None = None
        self.tried = stream is None
        self.result: Tree = None

    def _once(self) -> None:
        zero = torch.zeros((), dtype=torch.int64, device=self.index.device)
        batch = Batch((self.view,), self.y, self.index, zero, zero, given=self.given, frozen=self.frozen)
        with torch.no_grad(), autocast(self.index.device, self.precision):
            self.result = self.function(batch)
        require_rows(self.result, self.size)

    def __call__(self, view: torch.Tensor, y: torch.Tensor, index: torch.Tensor) -> Tree:
        """The rows of the function's trees for up to ``size`` images."""
        count = index.numel()
        for held, new in ((self.view, view), (self.y, y), (self.index, index)):
            held[:count].copy_(new)
            if count < self.size:
                held[count:].copy_(new[:1].expand(self.size - count, *new.shape[1:]))
        if not self.tried:
            self.tried = True
            name = f"the function {self.function.__qualname__}"
            self.recording = record(name, self._once, lambda: None, self.stream, self.pool, self.meter)
        before = Counter(self.meter.images)
        if self.recording is None:
            self._once()
        else:
            self.recording.graph.replay()
            self.meter.images.update(self.recording.images)
        for kind, number in (self.meter.images - before).items():  # the filling is not counted
            self.meter.images[kind] -= number * (self.size - count) // self.size
        return map_tensors(lambda tensor: tensor[:count].clone(), self.result)


def say_once(key: str, message: str) -> None:
    """One warning a process and key."""
    if key not in _SAID:
        _SAID.add(key)
        warnings.warn(message, stacklevel=3)


class Stepper:
    """SGD or Adam over the leaves, by torch's functional forms, with its state in place from the start.

    So a recorded step is the same from the first on (a momentum buffer of zeros makes the first step SGD's first), and
    a new turn resets a few vectors.  Not torch.optim's classes: their step() costs 70 microseconds of Python, a fifth
    of a step on digits.
    """

    def __init__(self, leaves: Leaves, settings: Optimiser) -> None:
        self.leaves, self.settings = leaves, settings
        self.parameters: list[torch.Tensor] = [parameter.detach() for parameter in leaves.parameters]
        on_gpu = bool(self.parameters) and self.parameters[0].is_cuda
        # a number would be frozen into a recording; on a CPU a tensor would only cost time
        self.lr: Any = torch.tensor(settings.lr, device=self.parameters[0].device) if on_gpu else settings.lr
        self._first = [torch.zeros_like(parameter) for parameter in self.parameters]
        self._second: list[torch.Tensor] = []
        self._counts: list[torch.Tensor] = []
        if settings.name == "adam":
            self._second = [torch.zeros_like(parameter) for parameter in self.parameters]
            self._counts = [torch.zeros((), device=parameter.device) for parameter in self.parameters]

    @property
    def state(self) -> list[torch.Tensor]:
        return [*self._first, *self._second, *self._counts]

    def restart(self, lr: float) -> None:
        """As a new optimiser with this learning rate."""
        for tensor in self.state:
            tensor.zero_()
        if isinstance(self.lr, torch.Tensor):
            self.lr.fill_(lr)
        else:
            self.lr = lr

    @torch.no_grad()
    def step(self) -> None:
        settings, gradients = self.settings, self.leaves.gradients
        if settings.name == "adam":
            adam(
                self.parameters, gradients, self._first, self._second, [], self._counts, fused=True,
                capturable=isinstance(self.lr, torch.Tensor), amsgrad=False, beta1=settings.momentum, beta2=0.999,
                lr=self.lr, weight_decay=settings.weight_decay, eps=1e-8, maximize=False,
            )  # fmt: skip
            return
        sgd(
            self.parameters, gradients, list(self._first), fused=True, weight_decay=settings.weight_decay,
            momentum=settings.momentum, lr=self.lr, dampening=0.0, nesterov=False, maximize=False,
        )  # fmt: skip


def make_session(
    network: torch.nn.Module,
    loss: Callable[..., Any],
    call: Call,
    *,
    stepper: Stepper,
    rows: int,
    static: bool,
    stream: Any,
    pool: Any,
    meter: Meter,
) -> Session:
    """A session for calls like this one.  rows: images of the largest owner whose calls share it."""
    feed, device = call.feed, call.feed.images.device

    def held(named: Mapping[str, torch.Tensor], least: int) -> dict[str, torch.Tensor]:
        shapes = {name: (max(least, value.shape[0]), *value.shape[1:]) for name, value in named.items()}
        return {name: torch.zeros(shapes[name], dtype=value.dtype, device=device) for name, value in named.items()}

    def counter() -> torch.Tensor:
        return torch.zeros(1, dtype=torch.int64, device=device)

    return Session(
        loss=loss,
        network=network,
        stepper=stepper,
        precision=call.precision,
        main=Source(feed, call.labels, rows=rows, static=static),
        others={name: Source(other, call.labels, rows=rows, static=static) for name, other in call.others.items()},
        sample=held(call.sample, rows) if static else {},
        draw=held(call.draw, room(call.draw)) if static else {},
        given=map_tensors(torch.clone, call.given) if static else None,
        frozen=call.frozen,
        carry=map_tensors(torch.clone, call.carry) if static else None,
        step=counter(),
        steps=torch.zeros((), dtype=torch.int64, device=device),
        row=counter(),
        total=torch.zeros((), dtype=torch.float64, device=device),
        numbers=torch.arange(0 if static else max(len(feed.sizes), 1), device=device),
        static=static,
        stream=stream,
        pool=pool,
        meter=meter,
    )


def room(draw: Mapping[str, torch.Tensor]) -> int:
    """Rows to keep for pre-drawn tensors: a power of two, so that clients of other sizes find room too."""
    longest = max((value.shape[0] for value in draw.values()), default=1)
    return 1 << max(0, (longest - 1).bit_length())
