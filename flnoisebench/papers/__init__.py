"""Papers as data: a TOML file each, which says what its tables and figures were run with and what it claims.

``reproduce`` reads them; the numbers that a paper prints lie in ``published``.  The form, by the shipped file:

    source, published, subject    the paper's name in the published files, their prefix, and the method it proposes
    [scales.NAME]                 how much of the paper's length: share of the protocol's rounds, or rounds; draws; and
                                  any of ``run``'s options, which win over an entry's
    [groups.NAME]                 lines that several entries share: label = {options of ``run``}
    [[entries]]                   a table or figure: name, title, show, options, levels and lines, all runs being
                                  lines x levels x draws; [entries.smoke] (any scale's name) replaces parts of it
    [[entries.stated]]            a number that the text states: of which level (from 0), line and measure
    [[claims]]                    what the paper says of them, and how it is judged (flnoisebench/claims.py)
"""

from __future__ import annotations

import tomllib
from importlib import resources
from typing import Any

from flnoisebench.registry import unknown


def names() -> list[str]:
    return sorted(file.name[:-5] for file in resources.files(__name__).iterdir() if file.name.endswith(".toml"))


def read(name: str) -> dict[str, Any]:
    """The file's content.  Raises UnknownName with near misses."""
    if name not in names():
        raise unknown("paper", name, names())
    return tomllib.loads(resources.files(__name__).joinpath(f"{name}.toml").read_text(encoding="utf-8"))
