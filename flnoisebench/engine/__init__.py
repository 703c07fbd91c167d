"""The engine: data on the device, lanes that train clients there, and the sides that methods are handed.

One ``Engine`` holds what all lanes of a device share (pixels, given labels, positions); a ``Lane`` holds what
one client at a time uses (its network copies and its counts).  Methods see neither: they get a ``Client`` or a
``Server`` (api.py), whose every call ends here.
"""

from __future__ import annotations

import json
import math
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch

from flnoisebench import api, streams, trees
from flnoisebench.api import Batch, Fit, Method, Optimiser, Protocol
from flnoisebench.engine import losses, training
from flnoisebench.engine import steps as engine_steps
from flnoisebench.engine.batches import Feed, cut
from flnoisebench.engine.flat import FlatNetwork, modules_of, storages_of
from flnoisebench.engine.images import DeviceImages, Look
from flnoisebench.imagefiles import copied_to
from flnoisebench.models import Encoder, build_encoder
from flnoisebench.profiling import Meter
from flnoisebench.trees import Tree

__all__ = [
    "DeviceImages", "Engine", "Lane", "Look", "images_of", "initialised", "make_deterministic", "set_precision",
]  # fmt: skip

_GLOBAL_GENERATOR = threading.Lock()
MOST_SESSIONS = 32  # kinds of fit calls that a lane remembers; each keeps its static tensors and recordings


def initialised(build: Callable[[], torch.nn.Module], seed: int) -> torch.nn.Module:
    """Run ``build`` with torch's global generator seeded, and put the generator back as it was.

    torch's modules initialise themselves from the global generator only; the lock keeps two lanes apart.
    """
    with _GLOBAL_GENERATOR, torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return build()


def set_precision(precision: str) -> None:
    """Process-wide: that numbers are fp32 unless somebody says otherwise, and whether its arithmetic on a GPU may round
    to TF32.  By torch's defaults convolutions do and matrix products do not, and a run before in this process may have
    left something else."""
    torch.set_default_dtype(torch.float32)
    tf32 = precision == "tf32"
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32


def make_deterministic() -> None:
    """Process-wide switches for repeatable arithmetic.  Must run before the first CUDA call."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    # One thread inside an operation: the sums of a CPU kernel depend on how many threads share them, so the
    # result would depend on the machine.  Clients in parallel (--lanes) use the cores instead.
    torch.set_num_threads(1)


class Engine:
    """Everything the lanes of one device share.

    pixels: uint8 [n, C, H, W] of all training images; on a GPU they are put onto it, or where they would take more than
    half of its free memory stay where they are, in memory or on disk, and are read in parts (DeviceImages).  resident:
    says which, instead.  given: int64 [n] given labels.  positions: one int64 array
    of store rows a client.  public: uint8 images or None.  told: facts that the method's card declares.  capture:
    record training steps and replay them, where the device can.
    """

    def __init__(
        self,
        method: Method,
        protocol: Protocol,
        *,
        pixels: torch.Tensor,
        given: torch.Tensor,
        positions: Sequence[np.ndarray],
        classes: int,
        look: Look,
        public: torch.Tensor | None = None,
        told: Mapping[str, float] | None = None,
        seed: int = 0,
        device: torch.device | str = "cpu",
        capture: bool = True,
        resident: bool | None = None,
    ) -> None:
        self.method = method
        self.protocol = protocol
        self.device = torch.device(device)
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", 0)  # "cuda" alone means the current one, which differs between lanes
        self.classes = classes
        self.look = look
        self.seed = seed
        self.told = dict(told or {})
        self.resident = _fits(pixels, self.device) if resident is None else resident
        self.pixels = copied_to(pixels, self.device) if self.resident else pixels
        self.given = given.to(self.device)
        self.positions = [torch.as_tensor(np.array(rows), dtype=torch.int64).to(self.device) for rows in positions]
        self.clients = len(self.positions)
        self.own = [self.images(rows) for rows in self.positions]  # each client's
        self.largest = max(rows.numel() for rows in self.positions)
        self.capture = capture and self.device.type == "cuda"
        # the tensors of a step stay where they are on a GPU, recorded or not; a test may ask for it on a CPU
        self.static = self.device.type == "cuda"
        self.shape: tuple[int, int, int] = tuple(self.own[0].shape)  # type: ignore[assignment]
        self.public = None
        if public is not None:
            store = public.to(self.device)
            self.public = DeviceImages(store, torch.arange(len(store), device=self.device), look)
        if self.device.type == "cuda":
            # torch loads its CUDA linear algebra at the first call, which two lanes must not make at once ("lazy
            # wrapper should be called at most once")
            torch.linalg.cholesky_ex(torch.eye(2, device=self.device))
            torch.linalg.eigh(torch.eye(2, device=self.device))
        self.batchnorm = losses.has_batchnorm(self.network(("structure",)))

    def network(self, stream: tuple[streams.Name, ...]) -> torch.nn.Module:
        """The method's network, initialised from the stream, on the device."""

        def build() -> torch.nn.Module:
            encoder = build_encoder(self.protocol.model, self.shape, self.classes)
            network = self.method.network(encoder)
            if not isinstance(network, torch.nn.Module):
                raise TypeError(
                    f"{type(self.method).__name__}.network must return a Module, not {type(network).__name__}"
                )
            return network

        network = initialised(build, streams.seed_of(self.seed, *stream, "init"))
        # how fast convolutions want filters and images, on a GPU and on a CPU: there small-cnn trains 1.7 times as fast
        # and predicts 3 times as fast
        return network.to(device=self.device, memory_format=torch.channels_last)  # type: ignore[call-overload]

    def images(self, rows: torch.Tensor) -> DeviceImages:
        return DeviceImages(self.pixels, rows.to(self.device), self.look, self.resident)


def _fits(pixels: torch.Tensor, device: torch.device) -> bool:
    """Whether the pixels may lie on the device: the other half of its free memory is for networks and activations."""
    if device.type != "cuda":
        return True
    return pixels.numel() <= torch.cuda.mem_get_info(device)[0] // 2


class Lane:
    """One client at a time: its networks, kept from turn to turn under their names, and its counts."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.meter = Meter()
        # a stream of its own: lanes run at once, and recordings need one that is not the default
        self.stream = torch.cuda.Stream(engine.device) if engine.device.type == "cuda" else None
        self._networks: dict[str, torch.nn.Module] = {}
        self._sessions: OrderedDict[Any, engine_steps.Session] = OrderedDict()
        self._passes: OrderedDict[Any, engine_steps.Pass] = OrderedDict()
        self._steppers: OrderedDict[Any, engine_steps.Stepper] = OrderedDict()
        # memory that all recordings of the lane share: they never replay at once, and leave nothing in it that a later
        # replay reads.  With a pool for each kind of call, DivideMix's filled 80 GB in nine rounds of ResNet-18
        self._pool = torch.cuda.graph_pool_handle() if engine.capture else None

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Everything inside goes to the lane's stream, after what was asked of the current one and before what
        will be."""
        if self.stream is None:
            yield
            return
        outside = torch.cuda.current_stream(self.engine.device)
        self.stream.wait_stream(outside)
        with torch.cuda.stream(self.stream):
            yield
        outside.wait_stream(self.stream)

    def network(self, weights: Tree, name: str, stream: tuple[streams.Name, ...], frozen: bool) -> torch.nn.Module:
        """The network of this name; always the same object, so that recordings find its tensors where they were."""
        if name not in self._networks or weights is None:
            fresh = self.engine.network((*stream, name))
            if name in self._networks:
                weights = fresh.state_dict()
            else:
                for module in fresh.modules():
                    if isinstance(module, Encoder):
                        module.register_forward_pre_hook(self._counting(list(module.parameters())))
                FlatNetwork(fresh)
                self._networks[name] = fresh
        network = self._networks[name]
        if weights is not None:
            try:
                network._flat.load(weights)  # type: ignore[union-attr, operator]
            except (ValueError, RuntimeError, AttributeError, TypeError) as error:
                raise ValueError(f"model(name={name!r}): these are not the network's weights: {error}") from error
        network._flat.hand_out(frozen=frozen)  # type: ignore[union-attr, operator]
        return network

    def session(self, network: torch.nn.Module, loss: api.Loss, call: engine_steps.Call) -> engine_steps.Session:
        """The session for this call of ``fit``, begun: a remembered one where such a call was made before."""
        optimiser, images = call.optimiser, call.feed.images
        build = optimiser.name, optimiser.momentum, optimiser.weight_decay
        trained = engine_steps.structure(network)
        stepper = self._steppers.get((trained, build))
        if stepper is None:
            leaves = engine_steps.Leaves(network)
            if self.engine.capture and not leaves.made_here:
                engine_steps.say_once("foreign network", "a network that model() did not make is trained step by step")
            stepper = engine_steps.Stepper(leaves, optimiser)
            if leaves.made_here:
                _remember(self._steppers, (trained, build), stepper)
        static = self.engine.static and stepper.leaves.made_here
        rows = self.engine.largest if images.pixels is self.engine.pixels else images.size
        room = engine_steps.capacity(call.feed, rows)
        key = (losses.identity(loss), trained, build, rows, room, call.kind()) if static else None
        session = self._sessions.get(key) if static else None
        if session is None:
            session = engine_steps.make_session(
                network,
                loss,
                call,
                stepper=stepper,
                rows=rows,
                static=static,
                stream=self.stream if static and self.engine.capture else None,
                pool=self._pool,
                meter=self.meter,
            )
            if static:
                _remember(self._sessions, key, session)
        session.begin(call)
        return session

    def passing(
        self,
        function: Callable[[Batch], Tree],
        images: DeviceImages,
        frozen: Mapping[str, torch.nn.Module],
        given: Tree,
        *,
        size: int,
        precision: str,
    ) -> engine_steps.Pass:
        """The pass for this call of ``apply``: a remembered one where such a call was made before."""
        key = (
            losses.identity(function), images.pixels.data_ptr(), size, precision, engine_steps.describe(given),
            *((name, engine_steps.structure(net)) for name, net in frozen.items()),
        )  # fmt: skip
        # a closure is another function in each call, and what it captures may differ: it runs directly, and is not kept
        plain = losses.is_plain(function)
        known = self._passes.get(key)
        if known is None:
            stream = self.stream if self.engine.capture and plain else None
            known = engine_steps.Pass(
                function, images, frozen, given, size=size, precision=precision, stream=stream, pool=self._pool,
                meter=self.meter,
            )  # fmt: skip
            if plain:
                _remember(self._passes, key, known)
        engine_steps.copy_into(known.given, given)
        return known

    def shared(self, tree: Tree) -> str | None:
        """The path of the first tensor that lies in the memory of one of the lane's networks, or None."""
        own: set[int] = set()
        for network in self._networks.values():
            own |= storages_of(network)

        def lies_there(leaf: Any) -> bool:
            return isinstance(leaf, torch.Tensor) and leaf.untyped_storage().data_ptr() in own and leaf.numel() > 0

        if not any(map(lies_there, trees.values(tree))):  # as after nearly every turn
            return None
        return next(path for path, leaf in trees.leaves(tree) if lies_there(leaf))

    def _counting(self, parameters: list[torch.nn.Parameter]) -> Callable[[torch.nn.Module, Any], None]:
        """A hook that counts the images that pass an encoder with these parameters."""
        meter = self.meter  # and not the lane: a method holds the network

        def count(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            trained = torch.is_grad_enabled() and any(parameter.requires_grad for parameter in parameters)
            meter.images["trained" if trained else "passed"] += inputs[0].shape[0]

        return count

    def client(self, id: int, state: Tree, round: int, exchange: int, role: str = "client") -> ClientSide:
        """role: "client", or "join" for the call that makes its first state (streams of its own)."""
        return ClientSide(self, id, state, round, exchange, role)

    def server(self, round: int, exchange: int, role: str) -> ServerSide:
        """role: init, plan, aggregate or predict: each call has streams of its own."""
        return ServerSide(self, round, exchange, role)


def _remember(cache: OrderedDict[Any, Any], key: Any, value: Any) -> None:
    """Keep the latest MOST_SESSIONS."""
    cache[key] = value
    while len(cache) > MOST_SESSIONS:
        cache.popitem(last=False)


class _Desk(NamedTuple):
    """What a side works with: its lane, and the images behind its handle."""

    lane: Lane
    images: DeviceImages | None


# Not in the sides themselves, whose attributes would lead from one client to the data of all.
_DESKS: WeakKeyDictionary[_Side, _Desk] = WeakKeyDictionary()


def images_of(side: api.Side) -> DeviceImages:
    """The images behind ``client.data`` or ``server.public``."""
    images = _DESKS[side].images  # type: ignore[index]
    assert images is not None
    return images


class _Handle(api.Images):
    def __init__(self, images: DeviceImages) -> None:
        self.size = images.size

    def __bool__(self) -> bool:
        return True

    def _refuse(self, *_: Any) -> Any:
        raise TypeError(
            "images stay with the engine and cannot be iterated over: train with fit(network, loss), compute over them "
            "with apply(function); labels are in client.labels"
        )

    __iter__ = __len__ = __getitem__ = _refuse


class _Side(api.Side):
    """What both sides share.

    No reference in it, however far it is followed, leads to a true label or to another client's data: it holds copies
    of its own labels, and handles.  That stops mistakes and not intent: Python's stack frames, its garbage collector
    and the globals of this module lead everywhere, and the conformance rules on sight look for what comes of it.
    """

    data: Any  # a handle; None for a server
    public: api.Images | None = None

    def __init__(
        self, lane: Lane, images: DeviceImages | None, stream: tuple[streams.Name, ...], round: int, exchange: int
    ) -> None:
        _DESKS[self] = _Desk(lane, images)
        engine = lane.engine
        self.round, self.exchange = round, exchange
        self.clients, self.classes = engine.clients, engine.classes
        self.protocol, self.told = engine.protocol, dict(engine.told)  # nobody writes what the next one is told
        self._stream = stream  # (role, client, round, exchange)
        self._used: set[str] = set()

    def _names(self, name: str) -> tuple[streams.Name, ...]:
        """The full name of a stream, once a call."""
        if name in self._used:
            raise ValueError(
                f"the stream {name!r} was taken before in this call and would give the same numbers again; "
                "keep what it gave, or use another name for others"
            )
        self._used.add(name)
        return (_DESKS[self].lane.engine.seed, *self._stream, name)

    def rng(self, name: str) -> torch.Generator:
        return streams.torch_stream(*self._names(f"rng/{name}"))

    def seed(self, name: str) -> int:
        return streams.seed_of(*self._names(f"seed/{name}")) & 0xFFFFFFFF

    def model(self, weights: Tree = None, name: str = "main", *, frozen: bool = False) -> torch.nn.Module:
        if f"model/{name}" in self._used:
            raise ValueError(
                f"model(name={name!r}) was taken before in this call, and would be the same network with other "
                "weights; give this one another name"
            )
        self._names(f"model/{name}")
        return _DESKS[self].lane.network(weights, name, self._stream, frozen)

    def batch_sizes(
        self, *, size: int | None = None, batch: int | None = None, last_batch: str | None = None
    ) -> tuple[int, ...]:
        if size is None:
            size = self._images(None).size
        protocol = self.protocol
        lone_is_bad = _DESKS[self].lane.engine.batchnorm
        batch = protocol.batch if batch is None else batch
        return cut(size, batch, protocol.last_batch if last_batch is None else last_batch, lone_is_bad)

    def _images(self, data: api.Images | None) -> DeviceImages:
        data = self.data if data is None else data
        if data is None:
            raise ValueError("the server has no images of its own: pass data=server.public")
        if data is not self.data and data is not self.public:
            raise ValueError(f"data must be client.data or server.public of this call, not {type(data).__name__}")
        return images_of(self)

    def _own_labels(self, images: DeviceImages) -> torch.Tensor:
        """Given labels in the owner's order; -1 where there are none (public images)."""
        return torch.full((images.size,), -1, dtype=torch.int64, device=images.device)

    def _subset(self, images: DeviceImages, subset: torch.Tensor | None, what: str) -> torch.Tensor:
        if subset is None:
            return images.everything
        if not isinstance(subset, torch.Tensor) or subset.dtype != torch.int64 or subset.dim() != 1:
            found = type(subset).__name__
            if isinstance(subset, torch.Tensor):
                found = f"{subset.dtype} {list(subset.shape)}"
            raise ValueError(f"{what}: subset must be int64 positions [k], as mask.nonzero().flatten(), not {found}")
        if subset.numel() and not (int(subset.min()) >= 0 and int(subset.max()) < images.size):
            raise ValueError(f"{what}: subset holds positions outside 0..{images.size - 1}")
        return subset

    def _rows(
        self, named: Mapping[str, torch.Tensor] | None, length: int, what: str, *, more: bool = False
    ) -> dict[str, torch.Tensor]:
        """The tensors on the device.  more: there may be rows beyond ``length``, which nobody looks at."""
        device = _DESKS[self].lane.engine.device
        for name, value in (named or {}).items():
            rows = value.shape[0] if isinstance(value, torch.Tensor) and value.dim() else -1
            if rows != length and not (more and rows > length):
                found = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
                least = "at least " if more else ""
                raise ValueError(f"fit: {what}[{name!r}] needs {least}{length} rows, not {found}")
        return {name: value.to(device) for name, value in (named or {}).items()}

    def fit(
        self,
        network: torch.nn.Module,
        loss: api.Loss,
        *,
        data: api.Images | None = None,
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
        losses.refuse_closure(loss)
        losses.refuse_hooks(network)
        if not any(parameter.requires_grad for parameter in network.parameters()):
            raise ValueError("fit: no parameter of this network takes gradients, as of one made with frozen=True")
        losses.check_frozen(frozen or {})
        if not isinstance(optimiser, Optimiser | None):
            raise ValueError(
                f"fit: optimiser takes a flnoisebench.api.Optimiser (protocol.optimiser_at(round) with a .model_copy("
                f"update={{'lr': ...}})), not {type(optimiser).__name__}; other rules for a step are said in the loss: "
                "see «gradient» in flnoisebench/api.py"
            )
        if optimiser is not None:
            optimiser = Optimiser(**vars(optimiser))  # model_copy(update=...) takes any name and any value
        for name, number in (("views", views), ("epochs", epochs), ("steps", steps)):
            if number is not None and number < 0:
                raise ValueError(f"fit: {name} must be 0 or more, not {number}")
        images = self._images(data)
        device = images.device
        labels = self._own_labels(images) if labels is None else labels.to(device)
        if labels.dim() not in (1, 2) or labels.shape[0] != images.size:
            raise ValueError(f"fit: labels must have {images.size} rows, one an image, not {list(labels.shape)}")
        positions = self._subset(images, subset, "fit")
        sizes = self.batch_sizes(size=positions.numel(), batch=batch, last_batch=last_batch)
        if steps is None:
            steps = (self.protocol.local_epochs if epochs is None else epochs) * len(sizes)
        if not sizes:  # nothing that could be trained on; the skipped samples are counted
            steps = 0
        names = self._names(f"fit/{stream}")
        others = {
            name: self._other(images, name, spec, (*names, "other", name)) for name, spec in (streams or {}).items()
        }
        feed = Feed(images, positions, sizes, views, _epoch_streams(names))
        lane = _DESKS[self].lane
        meter = lane.meter
        passes = -(-steps // len(sizes)) if sizes else self.protocol.local_epochs if epochs is None else epochs
        meter.images["skipped"] += passes * (positions.numel() - feed.used)
        in_eval = [module for module in modules_of(network) if not module.training]
        for module in in_eval:  # fit trains in training mode, whatever it was handed
            module.training = True
        with meter.time("fit", device):
            call = engine_steps.Call(
                feed=feed,
                others=others,
                labels=labels,
                sample=self._rows(sample, images.size, "sample"),
                draw=self._rows(draw, steps, "draw", more=True),
                given=losses.as_tensors(given, device, "given", storages_of(network)),
                frozen=frozen or {},
                carry=losses.as_tensors(carry, device, "carry"),
                optimiser=optimiser or self.protocol.optimiser_at(self.round),
                precision=self.protocol.precision,
            )
            result = training.fit(network, loss, lane=lane, call=call, steps=steps)
        for module in in_eval:
            module.training = False
        if not math.isfinite(result.loss):
            raise FloatingPointError(
                f"the loss {loss.__qualname__} became {result.loss} within {steps} steps; a smaller learning rate or "
                "another precision may help"
            )
        return result

    def _other(self, images: DeviceImages, name: str, spec: Mapping[str, Any], names: tuple[streams.Name, ...]) -> Feed:
        unknown = set(spec) - {"subset", "views", "batch"}
        if unknown:
            raise ValueError(f"fit: stream {name!r} has unknown entries {sorted(unknown)}; known: subset, views, batch")
        positions = self._subset(images, spec.get("subset"), f"fit, stream {name!r}")
        # cut with "drop": a cycling stream gives batches of one shape; what an epoch leaves out comes in another
        batch = spec.get("batch")
        sizes = cut(positions.numel(), self.protocol.batch if batch is None else batch, "drop", False)
        if not sizes:
            raise ValueError(f"fit: stream {name!r} is empty")
        return Feed(images, positions, sizes, spec.get("views", 1), _epoch_streams(names))

    def apply(
        self,
        function: Callable[[Batch], Tree],
        *,
        data: api.Images | None = None,
        subset: torch.Tensor | None = None,
        view: Literal["plain", "train"] = "plain",
        frozen: Mapping[str, torch.nn.Module] | None = None,
        given: Tree = None,
        stream: str = "apply",
    ) -> Tree:
        losses.check_frozen(frozen or {})
        losses.refuse_training(function)
        if view not in ("plain", "train"):
            raise ValueError(f"apply: view must be 'plain' or 'train', not {view!r}")
        images = self._images(data)
        device = images.device
        rng = _epoch_streams(self._names(f"apply/{stream}")) if view == "train" else None
        lane = _DESKS[self].lane
        with lane.meter.time("apply", device):
            return training.apply(
                function,
                lane=lane,
                images=images,
                labels=self._own_labels(images),
                subset=self._subset(images, subset, "apply"),
                rng=rng,
                frozen=frozen or {},
                given=losses.as_tensors(given, device, "given"),
                precision=self.protocol.precision,
            )


def _epoch_streams(names: tuple[streams.Name, ...]) -> Callable[[int, str], torch.Generator]:
    return lambda epoch, what: streams.torch_stream(*names, epoch, what)


class ClientSide(_Side, api.Client):
    def __init__(self, lane: Lane, id: int, state: Tree, round: int, exchange: int, role: str) -> None:
        rows = lane.engine.positions[id]
        images = lane.engine.own[id]
        super().__init__(lane, images, (role, id, round, exchange), round, exchange)
        self.id = id
        self.state = state
        self.data = _Handle(images)
        self.size = images.size
        self.labels = lane.engine.given.index_select(0, rows)
        self._given = self.labels.clone()

    def _own_labels(self, images: DeviceImages) -> torch.Tensor:
        return self._given


class ServerSide(_Side, api.Server):
    def __init__(self, lane: Lane, round: int, exchange: int, role: str) -> None:
        images = lane.engine.public
        super().__init__(lane, images, (role, None, round, exchange), round, exchange)
        self.shape = lane.engine.shape
        self.public = None if images is None else _Handle(images)
        self.data = None
        self.notes: dict[str, Any] = {}
        self.noisy_clients: list[int] | None = None

    def cohort(self, name: str = "cohort") -> tuple[int, ...]:
        # 0.29 * 100 is 28.999999999999996 in binary: nudge before the floor
        count = max(1, int(self.protocol.participation * self.clients + 1e-9))
        order = torch.randperm(self.clients, generator=streams.torch_stream(*self._names(f"cohort/{name}")))
        return tuple(sorted(order[:count].tolist()))

    def note(self, **values: Any) -> None:
        try:
            self.notes.update(json.loads(json.dumps(values)))
        except (TypeError, ValueError) as error:
            raise ValueError(f"note: the record takes numbers, strings, flags and lists of those: {error}") from None

    def claim(self, noisy_clients: Sequence[int]) -> None:
        outside = [client for client in noisy_clients if not 0 <= client < self.clients]
        if outside:
            raise ValueError(f"claim: clients {outside} are outside 0..{self.clients - 1}")
        self.noisy_clients = sorted(int(client) for client in noisy_clients)
