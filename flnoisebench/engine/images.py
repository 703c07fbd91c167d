"""Images as uint8, on the device or read onto it, and two looks at them: plain, or augmented by index arithmetic."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
import torch.nn.functional as F  # noqa: N812

from flnoisebench import api
from flnoisebench.imagefiles import stored

READERS = 8  # threads that read one part: a disk answers many requests for pages at once faster than one by one
_PIECE = 16  # images a reader takes at a time: 3 MB at 256 x 256
_AT_ONCE = 2**17  # values of a batch on a CPU: what layers make of more is allocated anew each time, at half the speed


@dataclass(frozen=True)
class Look:
    """How pixels become inputs: normalisation (per channel, of pixels in [0, 1]) and training augmentation.

    crop: side of the square that training cuts out at random and the plain view out of the middle; 0: the whole image.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    crop_padding: int = 0
    flip: bool = False
    crop: int = 0

    @property
    def augments(self) -> bool:
        return self.crop_padding > 0 or self.flip or self.crop > 0


class DeviceImages(api.Images):
    """Some of the images in a pixel store: a client's own, the public set, the test set.

    pixels: uint8 [N, C, H, W], shared by all handles; on the device, or else in memory or in a map on disk, from where
    each part is read onto the device when it is wanted.  rows: int64 [n] on the device, this handle's images in the
    store.  resident: whether the pixels are where they are needed (default: when they are on the device).
    """

    def __init__(self, pixels: torch.Tensor, rows: torch.Tensor, look: Look, resident: bool | None = None) -> None:
        self.pixels = pixels
        self.rows = rows
        self.look = look
        self.size = rows.numel()
        self.device = rows.device
        self.resident = pixels.device == rows.device if resident is None else resident
        channels, height, width = pixels.shape[1:]
        if look.crop and (height != width or look.crop > height):
            raise ValueError(
                f"a crop of {look.crop} x {look.crop} needs square images of that side, not {height}x{width}"
            )
        # (C, H, W) of an input, and how far a training crop can move
        self.shape = torch.Size((channels, look.crop or height, look.crop or width))
        self.margin = 2 * look.crop_padding + (height - look.crop if look.crop else 0)
        self._scale, self._shift = _normalisation(look, self.device)
        self._on_cpu: torch.Tensor | None = None  # where the rows lie in the pixels, once that was asked for

    def __reduce__(self) -> str:
        raise TypeError("images stay where they are; send positions instead")

    @cached_property
    def everything(self) -> torch.Tensor:
        """int64 [n] on the CPU: all positions of the handle, to be read and never handed out."""
        return torch.arange(self.size)

    def at_once(self, most: int) -> int:
        """Images that pass through a network together where no gradient is wanted: ``most``, on a CPU fewer if they are
        large, a power of two from 32 up (128 of MNIST's, 32 of CIFAR's)."""
        if self.device.type != "cpu":
            return most
        return min(most, max(32, 2 ** (_AT_ONCE // math.prod(self.shape)).bit_length() // 2))

    def plain(self, index: torch.Tensor) -> torch.Tensor:
        """Normalised float32 [B, C, H, W] of the images at these positions of the handle."""
        return self.plain_of(self._picked(index))

    def augmented(self, index: torch.Tensor, offset: torch.Tensor | None, flip: torch.Tensor | None) -> torch.Tensor:
        """As ``plain``, each image shifted by its crop offset (int64 [B, 2], 0..margin; zeros outside, as
        torchvision's RandomCrop pads before normalising) and mirrored where flip (bool [B]) says so."""
        return self.augmented_of(self._picked(index), offset, flip)

    def plain_of(self, picked: torch.Tensor) -> torch.Tensor:
        """``plain`` of stored pixels, uint8 [B, C, H, W] on the device."""
        if self.look.crop:
            edge = (picked.shape[2] - self.look.crop) // 2
            picked = picked[:, :, edge : edge + self.look.crop, edge : edge + self.look.crop]
        return self._normalised(picked)

    def augmented_of(
        self, picked: torch.Tensor, offset: torch.Tensor | None, flip: torch.Tensor | None
    ) -> torch.Tensor:
        """``augmented`` of stored pixels, uint8 [B, C, H, W] on the device."""
        count, (channels, height, width) = picked.shape[0], self.shape
        if offset is not None and self.look.crop_padding:
            padding = self.look.crop_padding
            picked = F.pad(picked, (padding, padding, padding, padding))
        if offset is not None or flip is not None:
            down = torch.arange(height, device=picked.device).expand(count, height)
            along = torch.arange(width, device=picked.device).expand(count, width)
            if flip is not None:
                along = torch.where(flip[:, None], width - 1 - along, along)
            if offset is not None:
                down, along = down + offset[:, :1], along + offset[:, 1:]
            place = (down[:, :, None] * picked.shape[3] + along[:, None, :]).reshape(count, 1, height * width)
            picked = picked.flatten(2).gather(2, place.expand(count, channels, height * width))
            picked = picked.reshape(count, channels, height, width)
        return self._normalised(picked)

    def parts(self, order: torch.Tensor, cuts: Sequence[slice]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(positions, stored pixels uint8 [B, C, H, W]) on the device of each cut of ``order``, int64 [n] on the CPU.

        Pixels that are elsewhere are read one part ahead, by threads of their own, and on a GPU sent on a stream of its
        own from pinned memory, so that reading and training overlap.  Two parts are held at a time.
        """
        index = order.to(self.device, non_blocking=True)
        if self.resident:
            for cut in cuts:
                yield index[cut], self._picked(index[cut])
            return
        # the rows are looked up on the CPU: asking the device for them would wait for the steps in its queue
        rows = self._rows_here().index_select(0, order)
        coming = _pool().submit(self._read, rows[cuts[0]]) if cuts else None
        for number, cut in enumerate(cuts):
            assert coming is not None
            arrived, coming = coming.result(), None
            if number + 1 < len(cuts):
                coming = _pool().submit(self._read, rows[cuts[number + 1]])
            yield index[cut], self._arrived(arrived)

    def _rows_here(self) -> torch.Tensor:
        if self._on_cpu is None:
            self._on_cpu = stored(self.pixels, self.rows.cpu())
        return self._on_cpu

    def _picked(self, index: torch.Tensor) -> torch.Tensor:
        if self.resident:
            return self.pixels.index_select(0, stored(self.pixels, self.rows.index_select(0, index)))
        return self._arrived(self._read(self._rows_here().index_select(0, index.cpu())))

    def _read(self, rows: torch.Tensor) -> _Read:
        """The pixels of these rows of the store on their way to the device."""
        on_gpu = self.device.type == "cuda"
        held = torch.empty((rows.numel(), *self.pixels.shape[1:]), dtype=torch.uint8, pin_memory=on_gpu)
        pieces = [slice(start, start + _PIECE) for start in range(0, rows.numel(), _PIECE)]

        def read(piece: slice) -> None:
            torch.index_select(self.pixels, 0, rows[piece], out=held[piece])

        list(_pool(pieces=True).map(read, pieces))
        if not on_gpu:
            return _Read(held, None)
        stream = _copying(self.device)
        with torch.cuda.stream(stream):
            # the pinned memory is used again only after the copy: torch's allocator sees to it
            sent = held.to(self.device, non_blocking=True)
            return _Read(sent, stream.record_event())

    def _arrived(self, read: _Read) -> torch.Tensor:
        if read.event is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(read.event)
            read.pixels.record_stream(current)  # made on another stream: not to be used again before this one is done
        return read.pixels

    def _normalised(self, pixels: torch.Tensor) -> torch.Tensor:
        return pixels.float() * self._scale + self._shift


@dataclass(frozen=True)
class _Read:
    pixels: torch.Tensor
    event: torch.cuda.Event | None  # when the copy is over


_POOLS: dict[bool, ThreadPoolExecutor] = {}
_MAKING = threading.Lock()


def _pool(pieces: bool = False) -> ThreadPoolExecutor:
    """The threads that prepare parts, or those that read a part's pieces (a part waits for its pieces)."""
    with _MAKING:
        if pieces not in _POOLS:
            _POOLS[pieces] = ThreadPoolExecutor(READERS, "pieces" if pieces else "parts", torch.set_num_threads, (1,))
        return _POOLS[pieces]


@lru_cache
def _copying(device: torch.device) -> torch.cuda.Stream:
    """The stream of all copies onto a device."""
    return torch.cuda.Stream(device)


@lru_cache
def _normalisation(look: Look, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(p / 255 - mean) / std as one multiply and one add: float32 [1, C, 1, 1] each."""
    mean, std = (torch.tensor(values, dtype=torch.float64).reshape(1, -1, 1, 1) for values in (look.mean, look.std))
    return (1 / (255 * std)).float().to(device), (-mean / std).float().to(device)
