"""How a set of positions is cut into batches, and the streams of batches that ``fit`` reads."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from flnoisebench.engine.images import DeviceImages, Look


def cut(size: int, batch: int, last_batch: str, lone_is_bad: bool) -> tuple[int, ...]:
    """The batch sizes of one epoch over ``size`` samples.

    The last batch is kept, merged into the one before when it is under half a batch, or dropped; a set smaller
    than one batch is one batch under any rule.  lone_is_bad: a sample alone cannot pass a BatchNorm in training,
    so it joins the batch before it, or is left out when there is none.
    """
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
        look, device = self.images.look, self.images.pixels.device
        augment = self.views > 0 and look.augments
        for epoch in itertools.count():
            order = torch.randperm(self.subset.numel(), generator=self.rng(epoch, "order"))[: self.used]
            index = self.subset[order].to(device, non_blocking=True)
            looks = draw_looks(look, self.used, self.views, self.rng(epoch, "augment"), device) if augment else []
            start, first, waiting = 0, True, list(self.sizes)
            while waiting:
                sizes = [waiting.pop(0)]
                while waiting and sum(sizes) + waiting[0] <= capacity:
                    sizes.append(waiting.pop(0))
                part = slice(start, start + sum(sizes))
                start = part.stop
                rows = index[part]
                views = [self.images.augmented(rows, *one.of(part)) for one in looks]
                if not augment:
                    views = [self.images.plain(rows)] * max(self.views, 1)
                yield Chunk(first, sizes, rows, views)
                first = False


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


def draw_looks(look: Look, count: int, views: int, generator: torch.Generator, device: torch.device) -> list[Looks]:
    """The augmentation of ``count`` images, view by view."""
    drawn = []
    for _ in range(views):
        offset = flip = None
        if look.crop_padding:
            offset = torch.randint(2 * look.crop_padding + 1, (count, 2), generator=generator).to(device)
        if look.flip:
            flip = (torch.rand(count, generator=generator) < 0.5).to(device)
        drawn.append(Looks(offset, flip))
    return drawn
