"""What a run costs: seconds by part, images, peak memory, and beside whom it ran."""

from __future__ import annotations

import resource
import socket
import sys
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

SOCKETS = Path("/proc/net/unix")  # of this network namespace, all users'


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

    def take(self) -> Meter:
        """What was counted since the last take; counting starts again at zero."""
        taken = Meter()
        taken.seconds, self.seconds = self.seconds, Counter()
        taken.images, self.images = self.images, Counter()
        return taken


class Presence:
    """Shows the host's other runs that this one is there, until ``close``, and sees them.

    Two runs on one card take nearly twice as long each, so that seconds mean little where this is not known.  A run
    shows by a socket whose name begins with its device's and belongs to no file: it goes with the process, however
    that ends.  Only Linux has those, and another container's are not seen.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._places = sorted({f"flnoisebench/{_identity(device)}/" for device in devices})
        self._sockets: list[socket.socket] = []
        for place in self._places if SOCKETS.exists() else ():
            try:
                shown = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
                self._sockets.append(shown)
                shown.bind(f"\0{place}{uuid.uuid4().hex}".encode())
            except OSError:  # a sandbox may forbid it
                self.close()
                break

    def sharing(self) -> str | None:
        """``alone``, or ``beside others`` where another run is on one of the devices now; None where none is seen."""
        if not self._sockets:
            return None
        try:
            shown = SOCKETS.read_text(errors="replace")
        except OSError:
            return None
        there = [shown.count(f"@{place}") for place in self._places]
        if not min(there):  # not even this run: a sandbox shows none
            return None
        return "beside others" if max(there) > 1 else "alone"

    def close(self) -> None:
        for shown in self._sockets:
            shown.close()
        self._sockets = []


def _identity(device: torch.device) -> str:
    """The same in every process; a GPU's number is not, under CUDA_VISIBLE_DEVICES."""
    if device.type != "cuda":
        return device.type
    return str(getattr(torch.cuda.get_device_properties(device), "uuid", device))


def peak_memory(device: torch.device) -> int:
    """Bytes: the device allocator's peak on a GPU, the process's peak resident size on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
