"""Images on the device as uint8, and the two looks at them: plain, and augmented by index arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F  # noqa: N812

from flnoisebench import api


@dataclass(frozen=True)
class Look:
    """How pixels become inputs: normalisation (per channel, of pixels in [0, 1]) and training augmentation."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    crop_padding: int = 0
    flip: bool = False

    @property
    def augments(self) -> bool:
        return self.crop_padding > 0 or self.flip


class DeviceImages(api.Images):
    """Some of the images in a pixel store: a client's own, the public set, the test set.

    pixels: uint8 [N, C, H, W] on the device, shared by all handles.  rows: int64 [n] on the device, this handle's
    images in the store.
    """

    def __init__(self, pixels: torch.Tensor, rows: torch.Tensor, look: Look) -> None:
        self.pixels = pixels
        self.rows = rows
        self.look = look
        self.size = rows.numel()
        self._scale, self._shift = _normalisation(look, pixels.device)

    def __reduce__(self) -> str:
        raise TypeError("images stay where they are; send positions instead")

    def plain(self, index: torch.Tensor) -> torch.Tensor:
        """Normalised float32 [B, C, H, W] of the images at these positions of the handle."""
        return self._normalised(self.pixels.index_select(0, self.rows.index_select(0, index)))

    def augmented(self, index: torch.Tensor, offset: torch.Tensor | None, flip: torch.Tensor | None) -> torch.Tensor:
        """As ``plain``, each image shifted by its crop offset (int64 [B, 2], 0..2*padding; zeros outside, as
        torchvision's RandomCrop pads before normalising) and mirrored where flip (bool [B]) says so."""
        picked = self.pixels.index_select(0, self.rows.index_select(0, index))
        count, channels, height, width = picked.shape
        if offset is not None:
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

    def _normalised(self, pixels: torch.Tensor) -> torch.Tensor:
        return pixels.float() * self._scale + self._shift


@lru_cache
def _normalisation(look: Look, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(p / 255 - mean) / std as one multiply and one add: float32 [1, C, 1, 1] each."""
    mean, std = (torch.tensor(values, dtype=torch.float64).reshape(1, -1, 1, 1) for values in (look.mean, look.std))
    return (1 / (255 * std)).float().to(device), (-mean / std).float().to(device)
