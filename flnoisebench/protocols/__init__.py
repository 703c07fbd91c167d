"""The shipped protocols: one TOML file each, named as on the command line."""

from __future__ import annotations

import tomllib
from importlib import resources
from typing import Any

from flnoisebench.api import Protocol
from flnoisebench.registry import unknown


def names() -> list[str]:
    return sorted(file.name[:-5] for file in resources.files(__name__).iterdir() if file.name.endswith(".toml"))


def read(name: str) -> dict[str, Any]:
    """The file's content: the fields of Protocol, and ``about``.  Raises UnknownName with near misses."""
    if name not in names():
        raise unknown("protocol", name, names())
    return tomllib.loads(resources.files(__name__).joinpath(f"{name}.toml").read_text(encoding="utf-8"))


def load(name: str) -> Protocol:
    """The budget of this name.  Raises UnknownName with near misses."""
    fields = read(name)
    fields.pop("about", None)
    return Protocol(**{**fields, "name": name})
