"""What a run costs: seconds by part, images, peak memory."""

from __future__ import annotations

import resource
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def synchronise(device: torch.device) -> None:
    """Wait for the current stream, so that a clock read next measures work done and not work queued.

    The stream and not the device: another lane may be recording, which a wait for the device would break.
    """
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


class Meter:
    """Counts of one lane or of one exchange.

    seconds: by part (fit, apply, aggregate, evaluate, commit, ...).  images: "trained" went through an encoder
    with gradient, "passed" without, "skipped" were left out of a batch by the last-batch rule.
    """

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.images: Counter[str] = Counter()

    @contextmanager
    def time(self, part: str, device: torch.device | None = None) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            if device is not None:
                synchronise(device)
            self.seconds[part] += time.perf_counter() - start  # type: ignore[assignment]

    def add(self, other: Meter) -> None:
        self.seconds.update(other.seconds)
        self.images.update(other.images)

    def take(self) -> Meter:
        """What was counted since the last take; counting starts again at zero."""
        taken = Meter()
        taken.seconds, self.seconds = self.seconds, Counter()
        taken.images, self.images = self.images, Counter()
        return taken


def peak_memory(device: torch.device) -> int:
    """Bytes: the device allocator's peak on a GPU, the process's peak resident size on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
