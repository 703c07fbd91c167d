"""How a set of positions is cut into batches, and the streams of batches that ``fit`` reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from flnoisebench.engine.images import DeviceImages


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

    def __iter__(self) -> Iterator[tuple[torch.Tensor, tuple[torch.Tensor, ...]]]:
        """(positions [B], views) of one batch after the other."""
        look, device = self.images.look, self.images.pixels.device
        epoch = 0
        while True:
            order = torch.randperm(self.subset.numel(), generator=self.rng(epoch, "order"))[: self.used]
            index = self.subset[order].to(device)
            augment = self.views > 0 and look.augments
            offsets: list[torch.Tensor | None] = [None] * max(self.views, 1)
            flips: list[torch.Tensor | None] = [None] * max(self.views, 1)
            if augment:
                generator = self.rng(epoch, "augment")
                for view in range(self.views):
                    if look.crop_padding:
                        high = 2 * look.crop_padding + 1
                        offsets[view] = torch.randint(high, (self.used, 2), generator=generator).to(device)
                    if look.flip:
                        flips[view] = (torch.rand(self.used, generator=generator) < 0.5).to(device)
            start = 0
            for size in self.sizes:
                part = slice(start, start + size)
                start += size
                rows = index[part]
                yield (
                    rows,
                    tuple(
                        self.images.augmented(
                            rows, None if offset is None else offset[part], None if flip is None else flip[part]
                        )
                        if augment
                        else self.images.plain(rows)
                        for offset, flip in zip(offsets, flips, strict=True)
                    ),
                )
            epoch += 1
