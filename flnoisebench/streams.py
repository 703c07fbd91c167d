"""Named random streams: the only source of randomness.

A stream is found by the names of what it depends on, never by the order in which it is asked for:
``SHA-256(JSON([seed, role, client, round, exchange, name]))``.  So a method that draws one number more,
a client that runs on another lane, or a run that resumes, shifts nobody else's numbers.

JSON, not concatenation: ``["a", "bc"]`` and ``["ab", "c"]`` must not be the same stream.
"""

from __future__ import annotations

import hashlib
import json

import numpy as np
import torch

Name = str | int | None
_COMPACT = json.JSONEncoder(separators=(",", ":"))  # json.dumps makes one anew for each seed: 5 % of a run on digits


def seed_of(*names: Name) -> int:
    """The 63-bit seed of the stream with these names (fits torch's and numpy's signed 64 bits)."""
    for name in names:
        if name is not None and not isinstance(name, str | int):
            raise TypeError(f"a stream is named by str, int or None, not {type(name).__name__}: {name!r}")
    text = _COMPACT.encode(list(names))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def torch_stream(*names: Name) -> torch.Generator:
    """A fresh CPU generator at the start of its stream.

    Always on the CPU, whatever the device of the run: a GPU run then shuffles, crops and flips exactly
    like a CPU run.
    """
    return torch.Generator().manual_seed(seed_of(*names))


def numpy_stream(*names: Name) -> np.random.Generator:
    """A fresh numpy generator (PCG64) at the start of its stream."""
    return np.random.default_rng(seed_of(*names))
