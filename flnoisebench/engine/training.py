"""``fit`` and ``apply``: the two loops in which all the images of a run pass through a network."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from flnoisebench import api
from flnoisebench.api import Batch, Fit
from flnoisebench.engine.batches import draw_looks
from flnoisebench.engine.images import DeviceImages
from flnoisebench.engine.losses import autocast
from flnoisebench.engine.steps import Call, require_rows
from flnoisebench.trees import Tree

if TYPE_CHECKING:
    from flnoisebench.engine import Lane

APPLY_BATCH = 512  # images without gradient, on a CPU, at most
RECORDED_BATCH = 256  # the same on a GPU, where a last batch is filled up: half of it is wasted on average


def fit(network: torch.nn.Module, loss: api.Loss, *, lane: Lane, call: Call, steps: int) -> Fit:
    """The training loop behind ``Side.fit``."""
    if not steps:
        return Fit(0.0, call.carry, {name: value.clone() for name, value in call.sample.items()}, 0)
    with lane.at_work():
        session = lane.session(network, loss, call)
        seen = 0
        for _ in range(steps):
            size = session.next_batch()
            session.advance(*size)
            seen += size[0]
        mean = session.loss_sum() / max(seen, 1)
        count = call.feed.images.size
        return Fit(
            mean,
            api.map_tensors(lambda tensor: tensor.detach().clone(), session.carry),
            {name: value[:count].clone() for name, value in session.sample.items()},
            steps,
        )


def apply(
    function: Callable[[Batch], Tree],
    *,
    lane: Lane,
    images: DeviceImages,
    labels: torch.Tensor,
    subset: torch.Tensor,
    rng: Callable[[int, str], torch.Generator] | None,
    frozen: Mapping[str, torch.nn.Module],
    given: Tree,
    precision: str,
) -> Tree:
    """The pass behind ``Side.apply``: rng is None for the plain view."""
    device = images.device
    parts: list[Tree] = []
    if lane.engine.static and subset.numel():  # of no image there is none to fill a batch up with
        with lane.at_work():
            one_pass = lane.passing(function, images, frozen, given, size=RECORDED_BATCH, precision=precision)
            for index, view in _in_order(images, subset, rng, RECORDED_BATCH):
                parts.append(one_pass(view, labels.index_select(0, index), index))
            return _joined(parts)
    zero = torch.zeros((), dtype=torch.int64, device=device)
    with torch.no_grad(), autocast(device, precision):
        for index, view in _in_order(images, subset, rng, images.at_once(APPLY_BATCH)):
            y = labels.index_select(0, index)
            part = function(Batch((view,), y, index, zero, zero, given=given, frozen=frozen))
            require_rows(part, index.numel())
            parts.append(part)
    return _joined(parts)


def _in_order(
    images: DeviceImages, subset: torch.Tensor, rng: Callable[[int, str], torch.Generator] | None, size: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(positions, view) of one batch after the other; one empty batch where there is no image."""
    augment = rng is not None and images.look.augments
    looks = draw_looks(images, subset.numel(), 1, rng(0, "augment")) if augment and rng is not None else []
    cuts = [slice(start, start + size) for start in range(0, max(subset.numel(), 1), size)]
    for cut, (index, picked) in zip(cuts, images.parts(subset.cpu(), cuts), strict=True):
        yield index, images.augmented_of(picked, *looks[0].of(cut)) if looks else images.plain_of(picked)


def _joined(parts: Sequence[Tree]) -> Tree:
    """Trees of rows, put together in order."""
    first = parts[0]
    if isinstance(first, dict):
        return {key: _joined([part[key] for part in parts]) for key in first}
    if isinstance(first, list | tuple):
        return type(first)(_joined(list(items)) for items in zip(*parts, strict=True))
    return torch.cat(list(parts))
