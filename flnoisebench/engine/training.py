"""``fit`` and ``apply``: the two loops in which all the images of a run pass through a network."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from flnoisebench import api
from flnoisebench.api import Batch, Fit, Optimiser
from flnoisebench.engine.batches import Feed
from flnoisebench.engine.images import DeviceImages
from flnoisebench.trees import Tree

APPLY_BATCH = 512  # images without gradient: large enough to fill a GPU, small enough for a laptop's memory


def refuse_closure(loss: Callable[..., Any]) -> None:
    """Raise ValueError unless ``loss`` is a plain module-level function or static method.

    What a closure captures is frozen into a recorded step, silently; so what varies must enter through Batch.
    """
    if isinstance(loss, types.MethodType):
        raise ValueError(
            f"the loss {loss.__qualname__} is bound to {type(loss.__self__).__name__}; make it a static method or a "
            "module-level function and pass what it needs as given=, sample= or frozen="
        )
    if not isinstance(loss, types.FunctionType):
        raise ValueError(
            f"the loss must be a plain function, not {type(loss).__name__} (no partial, no callable object); pass what "
            "it needs as given=, sample= or frozen="
        )
    if loss.__closure__:
        captured = ", ".join(loss.__code__.co_freevars)
        raise ValueError(
            f"the loss {loss.__qualname__} is a closure over {captured}; its value would be frozen into the recorded "
            f"step. Pass it to fit as given={{...}} (or sample=, draw=, frozen=) and read it from the batch"
        )


def has_batchnorm(network: torch.nn.Module) -> bool:
    return any(isinstance(module, torch.nn.modules.batchnorm._BatchNorm) for module in network.modules())


def autocast(device: torch.device, precision: str) -> AbstractContextManager[Any]:
    """bf16 where the protocol says so.  The cast cache is off: a recorded step must not depend on it."""
    if precision != "bf16":
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16, cache_enabled=False)


def as_tensors(tree: Tree, device: torch.device, what: str) -> Tree:
    """The tree on the device, its numbers as fp64 / int64 / bool scalars, so that none is frozen into a step."""
    if isinstance(tree, dict):
        return {key: as_tensors(value, device, f"{what}/{key}") for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(as_tensors(value, device, f"{what}/{i}") for i, value in enumerate(tree))
    if isinstance(tree, torch.Tensor):
        return tree.to(device)
    if isinstance(tree, bool):
        return torch.tensor(tree, device=device)
    if isinstance(tree, int):
        return torch.tensor(tree, dtype=torch.int64, device=device)
    if isinstance(tree, float):
        return torch.tensor(tree, dtype=torch.float64, device=device)
    if tree is None:
        return None
    raise ValueError(f"{what}: a step takes tensors and numbers, not {type(tree).__name__}")


def check_frozen(frozen: Mapping[str, torch.nn.Module]) -> None:
    for name, network in frozen.items():
        if network.training or any(parameter.requires_grad for parameter in network.parameters()):
            raise ValueError(f"frozen network {name!r} is trainable: make it with model(weights, name, frozen=True)")


def make_optimiser(network: torch.nn.Module, settings: Optimiser) -> torch.optim.Optimizer:
    parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
    if settings.name == "adam":
        return torch.optim.Adam(
            parameters, lr=settings.lr, betas=(settings.momentum, 0.999), weight_decay=settings.weight_decay
        )
    return torch.optim.SGD(parameters, lr=settings.lr, momentum=settings.momentum, weight_decay=settings.weight_decay)


def unpack(result: Any, loss: Callable[..., Any]) -> tuple[torch.Tensor, Tree, dict[str, torch.Tensor]]:
    """(scalar, carry, rows) of what a loss returned; raises ValueError when it is something else."""
    value, carry, rows = (*result, None, {})[:3] if isinstance(result, tuple) else (result, None, {})
    if not isinstance(value, torch.Tensor) or value.dim() != 0:
        shape = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise ValueError(f"the loss {loss.__qualname__} must return a scalar tensor first, not {shape}")
    return value, carry, rows or {}


def fit(
    network: torch.nn.Module,
    loss: api.Loss,
    *,
    feed: Feed,
    others: Mapping[str, Feed],
    labels: torch.Tensor,
    sample: Mapping[str, torch.Tensor],
    draw: Mapping[str, torch.Tensor],
    given: Tree,
    frozen: Mapping[str, torch.nn.Module],
    carry: Tree,
    steps: int,
    optimiser: Optimiser,
    precision: str,
) -> Fit:
    """The training loop behind ``Side.fit``; everything is checked and on the device by now."""
    device = feed.images.pixels.device
    sample = {name: value.clone() for name, value in sample.items()}
    network.train()
    stepper = make_optimiser(network, optimiser)
    per_epoch = len(feed.sizes)
    steps_tensor = torch.tensor(per_epoch, device=device)
    total = torch.zeros((), dtype=torch.float64, device=device)
    seen = 0
    batches = iter(feed)
    other_batches = {name: iter(other) for name, other in others.items()}
    for step in range(steps):
        index, views = next(batches)
        batch = Batch(
            views=views,
            y=labels.index_select(0, index),
            index=index,
            step=torch.tensor(step % per_epoch, device=device),
            steps=steps_tensor,
            sample={name: value.index_select(0, index) for name, value in sample.items()},
            draw={name: value[step] for name, value in draw.items()},
            given=given,
            frozen=frozen,
            carry=carry,
            other={
                name: _other_batch(*next(stream), labels=labels, sample=sample)
                for name, stream in other_batches.items()
            },
        )
        with autocast(device, precision):
            value, new_carry, rows = unpack(loss(network, batch), loss)
        if value.requires_grad:  # a loss that is constant in this batch moves nothing, not even by weight decay
            value.backward()
            stepper.step()
            stepper.zero_grad(set_to_none=True)
        if new_carry is not None:
            carry = api.map_tensors(torch.Tensor.detach, new_carry)
        for name, new_rows in rows.items():
            sample[name].index_copy_(0, index, new_rows.detach().to(sample[name].dtype))
        total += value.detach().double() * index.numel()
        seen += index.numel()
    mean = (total / max(seen, 1)).item()
    return Fit(mean, carry, dict(sample), steps)


def _other_batch(
    index: torch.Tensor,
    views: tuple[torch.Tensor, ...],
    *,
    labels: torch.Tensor,
    sample: Mapping[str, torch.Tensor],
) -> Batch:
    zero = torch.zeros((), dtype=torch.int64, device=index.device)
    return Batch(
        views=views,
        y=labels.index_select(0, index),
        index=index,
        step=zero,
        steps=zero,
        sample={name: value.index_select(0, index) for name, value in sample.items()},
    )


def apply(
    function: Callable[[Batch], Tree],
    *,
    images: DeviceImages,
    labels: torch.Tensor,
    subset: torch.Tensor,
    rng: Callable[[int, str], torch.Generator] | None,
    frozen: Mapping[str, torch.nn.Module],
    given: Tree,
    precision: str,
) -> Tree:
    """The pass behind ``Side.apply``: rng is None for the plain view."""
    device = images.pixels.device
    parts: list[Tree] = []
    with torch.no_grad():
        for index, views in _in_order(images, subset, rng):
            count = torch.tensor(len(parts), device=device)
            batch = Batch(
                views=views, y=labels.index_select(0, index), index=index, step=count, steps=count, given=given,
                frozen=frozen,
            )  # fmt: skip
            with autocast(device, precision):
                parts.append(function(batch))
    return _joined(parts)


def _in_order(
    images: DeviceImages, subset: torch.Tensor, rng: Callable[[int, str], torch.Generator] | None
) -> Iterator[tuple[torch.Tensor, tuple[torch.Tensor]]]:
    device, look = images.pixels.device, images.look
    offset = flip = None
    if rng is not None and look.augments:
        generator = rng(0, "augment")
        if look.crop_padding:
            offset = torch.randint(2 * look.crop_padding + 1, (subset.numel(), 2), generator=generator).to(device)
        if look.flip:
            flip = (torch.rand(subset.numel(), generator=generator) < 0.5).to(device)
    subset = subset.to(device)
    for start in range(0, max(subset.numel(), 1), APPLY_BATCH):
        part = slice(start, start + APPLY_BATCH)
        rows = subset[part]
        yield (
            rows,
            (images.augmented(rows, None if offset is None else offset[part], None if flip is None else flip[part]),),
        )


def _joined(parts: Sequence[Tree]) -> Tree:
    """Trees of rows, put together in order."""
    first = parts[0]
    if isinstance(first, dict):
        return {key: _joined([part[key] for part in parts]) for key in first}
    if isinstance(first, list | tuple):
        return type(first)(_joined(list(items)) for items in zip(*parts, strict=True))
    if not isinstance(first, torch.Tensor) or first.dim() == 0:
        raise ValueError("apply: the function must return tensors with one row an image (or dicts, tuples of them)")
    return torch.cat(list(parts))
