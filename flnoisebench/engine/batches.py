"""How a set of positions is cut into batches, and the streams of batches that ``fit`` reads."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, get_args

import torch

from flnoisebench import api
from flnoisebench.engine.images import DeviceImages

LAST_BATCH = get_args(api.Protocol.model_fields["last_batch"].annotation)


def cut(size: int, batch: int, last_batch: str, lone_is_bad: bool) -> tuple[int, ...]:
    """The batch sizes of one epoch over ``size`` samples.

    The last batch is kept, merged into the one before when it is under half a batch, or dropped; a set smaller
    than one batch is one batch under any rule.  lone_is_bad: a sample alone cannot pass a BatchNorm in training,
    so it joins the batch before it, or is left out when there is none.

    Raises ValueError for a batch of no image, and for a rule that is none.
    """
    if batch < 1:
        raise ValueError(f"a batch has one image or more, not {batch}")
    if last_batch not in LAST_BATCH:
        hint = api.near(last_batch, LAST_BATCH)
        raise ValueError(f"unknown last_batch {last_batch!r}.{hint} Known: {', '.join(LAST_BATCH)}.")
    if size < 1:
        return ()
    full, rest = divmod(size, batch)
    sizes = [batch] * full
    if rest and not full:
        sizes = [rest]
    elif rest and last_batch == "merge" and 2 * rest < batch:
        sizes[-1] += rest
    elif rest and last_batch != "drop":
        sizes.append(rest)
    if lone_is_bad and sizes[-1] == 1:
        if len(sizes) == 1:
            return ()
        sizes.pop()
        sizes[-1] += 1
    return tuple(sizes)


class Feed:
    """An endless stream of batches over a subset of a handle's images, reshuffled each time round.

    Shuffling and augmentation of the whole epoch are drawn before it starts, on the CPU, from the stream
    ``rng(epoch, what)``, and sent to the device in one go.
    """

    def __init__(
        self,
        images: DeviceImages,
        subset: torch.Tensor,
        sizes: tuple[int, ...],
        views: int,
        rng: Callable[[int, str], torch.Generator],
    ) -> None:
        self.images, self.subset, self.sizes, self.views, self.rng = images, subset.cpu(), sizes, views, rng
        self.used = sum(sizes)

    def chunks(self, capacity: int) -> Iterator[Chunk]:
        """Chunk after chunk of whole batches, at most ``capacity`` images each (or one batch, if that is more)."""
        augment = self.views > 0 and self.images.look.augments
        for epoch in itertools.count():
            order = torch.randperm(self.subset.numel(), generator=self.rng(epoch, "order"))[: self.used]
            looks = draw_looks(self.images, self.used, self.views, self.rng(epoch, "augment")) if augment else []
            bundles = list(_bundled(self.sizes, capacity))
            ends = list(itertools.accumulate(sum(sizes) for sizes in bundles))
            cuts = [slice(end - sum(sizes), end) for sizes, end in zip(bundles, ends, strict=True)]
            parts = self.images.parts(self.subset[order], cuts)
            for sizes, cut, (index, picked) in zip(bundles, cuts, parts, strict=True):
                views = [self.images.augmented_of(picked, *one.of(cut)) for one in looks]
                if not augment:
                    views = [self.images.plain_of(picked)] * max(self.views, 1)
                yield Chunk(cut.start == 0, sizes, index, views)


def _bundled(sizes: Sequence[int], capacity: int) -> Iterator[list[int]]:
    """Batches put together up to ``capacity`` images."""
    bundle: list[int] = []
    for size in sizes:
        if bundle and sum(bundle) + size > capacity:
            yield bundle
            bundle = []
        bundle.append(size)
    if bundle:
        yield bundle


@dataclass(frozen=True)
class Chunk:
    """Some batches of an epoch in its order."""

    first: bool  # of its epoch
    sizes: list[int]  # of the batches
    index: torch.Tensor  # int64 [k], positions in the handle
    views: list[torch.Tensor]  # each float [k, C, H, W]


class Looks(NamedTuple):
    """One view's augmentation of an epoch: crop offsets int64 [n, 2] and flips bool [n], or None for either."""

    offset: torch.Tensor | None
    flip: torch.Tensor | None

    def of(self, part: slice) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        return (None if self.offset is None else self.offset[part], None if self.flip is None else self.flip[part])


def draw_looks(images: DeviceImages, count: int, views: int, generator: torch.Generator) -> list[Looks]:
    """The augmentation of ``count`` of the images, view by view."""
    drawn, device = [], images.device
    for _ in range(views):
        offset = flip = None
        if images.look.crop_padding or images.look.crop:
            offset = torch.randint(images.margin + 1, (count, 2), generator=generator).to(device)
        if images.look.flip:
            flip = (torch.rand(count, generator=generator) < 0.5).to(device)
        drawn.append(Looks(offset, flip))
    return drawn
