"""What a plugin's tests need: a federation without files, and proof that a loss may be recorded and replayed.

    from flnoisebench.testing import tiny_run, watch_losses

    def test_my_method_runs_and_its_losses_can_be_captured(tmp_path):
        with watch_losses() as seen:
            result = tiny_run(MyMethod, tmp_path, rounds=3).execute()
        assert seen  # each loss was recorded on its first batch, replayed on the later ones, and gave the same bits
        assert result.accuracy.final > 90

An engine records a training step once, as a graph of operations on tensors, and replays it.  Whatever the loss took
from Python at recording (a number in a module's global, ``tensor.item()``, a branch, a shape that depends on the data)
would then stay as it was, silently.  ``capture_safe`` does the same without a GPU and compares.
"""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from flnoisebench import inputs, registry, runtime, scenario
from flnoisebench.api import Arrays, Batch, Dataset, Loss, Method, Optimiser, Protocol
from flnoisebench.engine import Engine, Lane, Look, losses, training
from flnoisebench.settings import Settings, stated, validated

__all__ = [
    "Recorded", "Tiny", "capture_safe", "tiny_arrays", "tiny_engine", "tiny_protocol", "tiny_run", "watch_losses",
]  # fmt: skip


# ------------------------------------------------------------------------------------------------ a small world


class Tiny(Dataset):
    """Synthetic images that a linear classifier separates; ``tiny_arrays`` makes them."""

    name = "tiny"
    title = "Tiny (synthetic)"
    mean: ClassVar[tuple[float, ...]] = (0.5,)
    std: ClassVar[tuple[float, ...]] = (0.25,)
    published_order = True  # what is drawn here stays where a test put it
    protocol = "custom"
    source = "flnoisebench.testing"

    def __init__(self, classes: int) -> None:
        self.classes = tuple(f"class {j}" for j in range(classes))  # type: ignore[misc]

    def load(self, root: Path, *, public: bool = False) -> Arrays:
        return tiny_arrays(len(self.classes), public=20 if public else 0)


def tiny_arrays(classes: int = 3, samples: int = 72, *, test: int = 30, public: int = 0, seed: int = 0) -> Arrays:
    """uint8 [n, 1, 8, 8] images: grey noise, and in class j a bright bar in rows of its own.  Labels go round.  Raises
    ValueError for more classes than there are rows."""
    if not 1 <= classes <= 8:
        raise ValueError(f"classes = {classes}: each has rows of its own, and there are 8")
    rng = np.random.default_rng(seed)

    def draw(n: int) -> tuple[torch.Tensor, torch.Tensor]:
        labels = np.arange(n) % classes
        images = rng.integers(40, 160, (n, 1, 8, 8))
        for j in range(classes):
            images[labels == j, :, j * 8 // classes : (j + 1) * 8 // classes] += 90
        return torch.from_numpy(images.astype(np.uint8)), torch.from_numpy(labels)

    train, train_labels = draw(samples)
    tested, test_labels = draw(test)
    return Arrays(train, train_labels, tested, test_labels, draw(public)[0] if public else None)


def tiny_protocol(**changes: Any) -> Protocol:
    """3 rounds of one epoch in batches of 8 with an MLP; ``changes`` are fields of Protocol."""
    optimiser = Optimiser(lr=0.05, momentum=0.9, weight_decay=0.0)
    return Protocol(**{"rounds": 3, "batch": 8, "model": "mlp", "optimiser": optimiser, **changes})


def tiny_engine(
    method: Method,
    *,
    clients: int = 3,
    arrays: Arrays | None = None,
    given: torch.Tensor | None = None,
    positions: Sequence[Sequence[int] | np.ndarray] | None = None,
    look: Look | None = None,
    told: Mapping[str, float] | None = None,
    seed: int = 0,
    device: str = "cpu",
    **protocol: Any,
) -> Engine:
    """An engine over ``tiny_arrays``, for tests of parts: ``Lane(engine).client(0, state, round, exchange)`` is a side.

    given: int64 [n] labels (default: the true ones).  positions: each client's samples (default: dealt out in turn).
    protocol: fields of Protocol over ``tiny_protocol``.
    """
    arrays = tiny_arrays() if arrays is None else arrays
    given = arrays.train_labels if given is None else given
    n, classes = len(given), int(arrays.train_labels.max()) + 1
    if positions is None:
        positions = [np.arange(client, n, clients) for client in range(clients)]
    return Engine(
        method,
        tiny_protocol(**protocol),
        pixels=arrays.train_images,
        given=given.clone(),
        positions=[np.asarray(rows, dtype=np.int64) for rows in positions],
        classes=classes,
        look=look or Look(Tiny.mean, Tiny.std),
        public=arrays.public,
        told=told,
        seed=seed,
        device=device,
    )


def tiny_run(
    method: type[Method] | str,
    out: Path,
    *,
    settings: Mapping[str, Any] | None = None,
    clients: int = 3,
    arrays: Arrays | None = None,
    noise: float | scenario.Noise = 0.3,
    partition: Mapping[str, Any] | None = None,
    seed: int = 0,
    draw: int = 0,
    executor: str = "serial",
    lanes: int | None = None,
    device: str = "cpu",
    beside: Sequence[torch.device] = (),
    capture: bool = True,
    change: Callable[[scenario.Scenario, scenario.Truth], scenario.Manifest] | None = None,
    **protocol: Any,
) -> runtime.Run:
    """A whole run in a folder under ``out``: checkpoint, records, result, as the command line would make it.

    method: a class at the top level of a file (workers import it from there), or a name as --method takes it.  noise:
    the share of wrong labels, the same on all clients, or a law.  partition: fields of Partition (default: iid).
    change: gets scenario and truth and returns what to use instead.  protocol: fields of Protocol over
    ``tiny_protocol``.  Raises ValueError for settings that the method does not take, and as ``path_of``.
    """
    name = method if isinstance(method, str) else path_of(method)
    arrays = tiny_arrays(public=20) if arrays is None else arrays
    classes = int(arrays.train_labels.max()) + 1
    law = noise if isinstance(noise, scenario.Noise) else scenario.noise_from("clean")
    if not isinstance(noise, scenario.Noise) and noise:
        law = scenario.Noise(clients="all", rate="constant", tau=noise, count="exact", include_true=False)
    spec = scenario.ScenarioSpec(
        dataset=Tiny.name,
        noise=law,
        noise_name="tiny" if noise else "clean",
        partition=scenario.Partition(**{"law": "iid", **(partition or {})}),
        clients=clients,
        draw=draw,
    )
    loaded = registry.load_method(name)
    config = validated(loaded.Config, settings or {}, f"settings of {loaded.__name__}")
    whole = Settings(
        method=name,
        preset="default",
        track="common",
        method_settings=stated(config),
        changed=dict(settings or {}),
        protocol=tiny_protocol(**protocol),
        protocol_overrides={},
        scenario=spec,
        seed=seed,
    )
    made = scenario.build(spec, arrays.train_labels.numpy(), classes, inputs.data_digest(arrays))
    made = made if change is None else change(*made)
    return runtime.Run(
        whole, loaded, Tiny(classes), arrays, *made, folder=whole.folder(out), device=torch.device(device),
        beside=beside, executor=executor, lanes=lanes, capture=capture,
    )  # fmt: skip


def path_of(method: type[Method]) -> str:
    """path/to/file.py:Class, as --method takes it.  Raises ValueError for a class that workers could not import."""
    try:
        source = inspect.getsourcefile(method)
    except (TypeError, OSError):  # of a prompt or a string
        source = None
    if source is None or method.__qualname__ != method.__name__:
        raise ValueError(f"a class at the top level of a file is wanted, not {method.__qualname__}")
    return f"{Path(source).resolve()}:{method.__name__}"


# ------------------------------------------------------------------------------------------- recording a step


def _parts(batch: Batch) -> dict[str, Any]:
    """The batch as a tree of tensors; frozen networks apart."""
    parts = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch) if field.name != "frozen"}
    return {**parts, "other": {name: _parts(inner) for name, inner in batch.other.items()}}


def _assembled(parts: Mapping[str, Any], frozen: Mapping[str, torch.nn.Module]) -> Batch:
    others = {name: _assembled(inner, {}) for name, inner in parts["other"].items()}
    return Batch(**{**parts, "views": tuple(parts["views"]), "other": others}, frozen=frozen)


class _Step(torch.nn.Module):
    """Loss, network and frozen networks in one module, so that all their tensors can be exchanged for others."""

    def __init__(self, loss: Loss, network: torch.nn.Module, frozen: Mapping[str, torch.nn.Module]) -> None:
        super().__init__()
        self.loss, self.network, self.names = loss, network, list(frozen)
        self.frozen = torch.nn.ModuleList(frozen.values())

    def forward(self, parts: Mapping[str, Any]) -> Any:
        batch = _assembled(parts, dict(zip(self.names, self.frozen, strict=True)))
        return losses.unpack(self.loss(self.network, batch), self.loss)

    def tensors(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Copies of (trained parameters, everything else by name)."""
        trained: dict[str, torch.Tensor] = {}
        fixed: dict[str, torch.Tensor] = {}
        for name, tensor in self.named_parameters():
            (trained if tensor.requires_grad else fixed)[name] = tensor.detach().clone()
        fixed |= {name: tensor.detach().clone() for name, tensor in self.named_buffers()}
        return trained, fixed

    def run(self, trained: dict[str, torch.Tensor], fixed: dict[str, torch.Tensor], parts: Any) -> dict[str, Any]:
        """One step without its update: everything that it computes or writes."""
        trained = {name: tensor.detach().requires_grad_() for name, tensor in trained.items()}
        value, carry, rows = torch.func.functional_call(self, {**trained, **fixed}, (parts,))
        gradients: dict[str, Any] = dict.fromkeys(trained)
        if value.requires_grad:
            found = torch.autograd.grad(value, list(trained.values()), allow_unused=True)
            gradients = dict(zip(trained, found, strict=True))
        detached = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, {"carry": carry, "rows": rows})
        return {"loss": value.detach(), "gradient": gradients, "buffer": fixed, **detached}


@contextmanager
def _uncounted(*networks: torch.nn.Module) -> Iterator[None]:
    """Without the hooks by which a lane counts images: a test's extra passes are not the run's."""
    kept = {}
    for module in {module for network in networks for module in network.modules()}:
        hooks = module._forward_pre_hooks
        for key in [key for key, hook in hooks.items() if hook.__module__ == Lane.__module__]:
            kept[module, key] = hooks.pop(key)
    try:
        yield
    finally:
        for (module, key), hook in kept.items():
            module._forward_pre_hooks[key] = hook


class Recorded:
    """Forward and backward of ``loss(network, batch)``, traced on one batch as a graph that takes every tensor of the
    batch, the network and the frozen networks as its input.

    Raises ValueError when the loss cannot be recorded: it reads a tensor's value into Python, branches on one, has a
    shape that depends on the data, or draws randomness.
    """

    def __init__(self, loss: Loss, network: torch.nn.Module, batch: Batch) -> None:
        self.loss, self.compared = loss, 0
        self.where = getattr(loss, "__qualname__", repr(loss))
        step = _Step(loss, network, batch.frozen)
        inputs = pytree.tree_map_only(torch.Tensor, torch.Tensor.clone, (*step.tensors(), _parts(batch)))
        flat, self._structure = pytree.tree_flatten(inputs)
        self._shapes = self._seen(flat)

        def flat_step(*leaves: torch.Tensor) -> list[torch.Tensor]:
            result = step.run(*pytree.tree_unflatten(list(leaves), self._structure))
            leaves_out, self._result = pytree.tree_flatten(result)
            return leaves_out

        try:
            with _uncounted(network, *batch.frozen.values()), warnings.catch_warnings(action="ignore"):
                self._graph = make_fx(flat_step, tracing_mode="fake", _allow_non_fake_inputs=True)(*flat)
        except Exception as error:
            raise ValueError(
                f"{self.where} cannot be recorded: it branches on a tensor's value, or takes it into Python, as by an "
                "argument that torch wants as a number (label_smoothing, k of topk: write those out in tensors) "
                f"({type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''})"
            ) from error
        for node in self._graph.graph.nodes:
            tags = getattr(node.target, "tags", ())
            shown = pytree.tree_leaves(node.meta.get("val"))
            number = any(isinstance(v, torch.SymInt | torch.SymFloat) for v in shown)
            if number or torch.Tag.data_dependent_output in tags:
                raise ValueError(
                    f"{self.where} cannot be recorded: it takes a tensor's value into Python ({node.target}), as "
                    ".item(), .tolist(), int(), or indexing with a tensor without dimensions do"
                )
            if any(isinstance(n, torch.SymInt) for v in shown if isinstance(v, torch.Tensor) for n in v.shape):
                raise ValueError(
                    f"{self.where} cannot be recorded: a shape depends on the data ({node.target}); weight by a mask "
                    "instead of selecting by one"
                )
            if torch.Tag.nondeterministic_seeded in tags:
                raise ValueError(
                    f"{self.where} draws randomness inside a step ({node.target}); draw beforehand and pass draw="
                )

    @staticmethod
    def _seen(flat: Sequence[Any]) -> list[Any]:
        return [(tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf for leaf in flat]

    def fits(self, network: torch.nn.Module, batch: Batch) -> bool:
        """Whether ``compare`` can be asked: same names, shapes and dtypes."""
        flat, structure = pytree.tree_flatten((*_Step(self.loss, network, batch.frozen).tensors(), _parts(batch)))
        return structure == self._structure and self._seen(flat) == self._shapes

    def compare(self, network: torch.nn.Module, batch: Batch, *, rtol: float = 0.0) -> None:
        """Replay on another batch of the same shapes, run the loss itself on it too, and compare.

        Raises AssertionError naming what differs: something that the loss read from Python was frozen.  ValueError
        when the batch has other shapes.
        """
        if not self.fits(network, batch):
            raise ValueError(f"{self.where} was recorded for other shapes, names or dtypes; a replay needs the same")
        step = _Step(self.loss, network, batch.frozen)

        def inputs() -> Any:  # fresh copies: BatchNorm writes its statistics in place
            return pytree.tree_map_only(torch.Tensor, torch.Tensor.clone, (*step.tensors(), _parts(batch)))

        with _uncounted(network, *batch.frozen.values()), torch.enable_grad():
            wanted = step.run(*inputs())
        with torch.no_grad(), torch.autocast(batch.y.device.type, enabled=False):  # the graph has its casts already
            found = pytree.tree_unflatten(self._graph(*pytree.tree_flatten(inputs())[0]), self._result)
        self.compared += 1
        wanted_leaves, structure = pytree.tree_flatten_with_path(wanted)
        found_leaves, found_structure = pytree.tree_flatten(found)
        if structure != found_structure:
            raise AssertionError(f"{self.where}: a replay returns another carry or other rows than the loss itself")
        for (path, want), have in zip(wanted_leaves, found_leaves, strict=True):
            if want is None and have is None:
                continue
            if want is None or have is None or not torch.allclose(have, want, rtol=rtol, atol=0.0, equal_nan=True):
                name = "/".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path)
                raise AssertionError(
                    f"{self.where}: the replayed {name} is {_short(have)}, the loss itself gives {_short(want)}. A "
                    "number was frozen when the step was recorded: pass it to fit as given=, sample= or draw="
                )


def _short(value: torch.Tensor | None) -> str:
    if value is None:
        return "absent"
    shown = ", ".join(f"{number:.6g}" for number in value.double().flatten()[:3].tolist())
    return shown if value.numel() <= 3 else f"[{shown}, ...]"


def capture_safe(loss: Loss, network: torch.nn.Module, first: Batch, second: Batch, *, rtol: float = 0.0) -> None:
    """Record one training step of ``loss`` on ``first``, replay it on ``second``, and compare with the loss itself.

    ``second`` has the shapes of ``first`` and should differ in everything else: images, y, step, given, sample, draw,
    carry, other, and the frozen networks' weights.  Compared are the loss, all gradients, the new carry, the rows and
    what BatchNorm wrote; rtol 0 asks for the same bits.  Raises AssertionError naming what differs (a number was
    frozen), ValueError naming why the step cannot be recorded.
    """
    Recorded(loss, network, first).compare(network, second, rtol=rtol)


@contextmanager
def watch_losses(*, rtol: float = 0.0, most: int = 4) -> Iterator[Counter[str]]:
    """Within this block every step of every ``fit`` is put to the test of ``capture_safe``, in this process.

    The first step of each loss and shape is recorded; at ``most`` further steps of each later ``fit``, spread over its
    length, the record is replayed and compared.  Yields a Counter: comparisons made, by the loss's name.  A difference
    raises at the step where it shows (in a Run: a ClientError or MethodError that names the client).
    """
    seen: Counter[str] = Counter()
    records: list[Recorded] = []
    real_fit = training.fit

    def watched_fit(network: torch.nn.Module, loss: Loss, *, steps: int, **rest: Any) -> Any:
        turn, often = 0, max(1, steps // most)

        def watched(network: torch.nn.Module, batch: Batch) -> Any:
            nonlocal turn
            turn += 1
            if turn % often == 0 or turn == 1:
                known = [r for r in records if r.loss is loss and r.fits(network, batch)]
                if known:
                    known[0].compare(network, batch, rtol=rtol)
                    seen[known[0].where] += 1
                else:
                    records.append(Recorded(loss, network, batch))
            return loss(network, batch)

        return real_fit(network, watched, steps=steps, **rest)

    training.fit = watched_fit
    try:
        yield seen
    finally:
        training.fit = real_fit
