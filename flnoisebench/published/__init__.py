"""Numbers that papers print, as CSV files with their source in the first column.

    fedcova_tables.csv      accuracies, in percent: source, table, dataset, noise, rho, tau, method, accuracy, std
    fedcova_runtime.csv     minutes of a run: source, method, minutes_on_one_rtx_a6000, ratio_to_fedavg
    fedcova_statements.csv  what the text says: source, what, setting, stated
    scenarios.csv           which of our noise presets draw a paper's noise, and on what federation (empty: not stated)

They are copied as printed and never computed; a further paper is a further ``<paper>_tables.csv`` and its lines in
scenarios.csv.
"""

from __future__ import annotations

import csv
from functools import cache
from importlib import resources
from typing import NamedTuple

from flnoisebench.registry import unknown


class Published(NamedTuple):
    """One accuracy of a paper's table, in percent.  std is the paper's own spread: FedCova's is over the last rounds of
    one run, so it is no spread over draws.  rounds: of the paper's runs; None where it does not say."""

    source: str
    table: str
    accuracy: float
    std: float | None
    rounds: int | None


def names() -> list[str]:
    """The shipped files, without ``.csv``."""
    return sorted(file.name[:-4] for file in resources.files(__name__).iterdir() if file.name.endswith(".csv"))


def read(name: str) -> list[dict[str, str]]:
    """A file's lines by column.  Raises UnknownName with near misses."""
    if name not in names():
        raise unknown("published file", name, names())
    text = resources.files(__name__).joinpath(f"{name}.csv").read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))


@cache
def _tables() -> list[dict[str, str]]:
    return [line for name in names() if name.endswith("_tables") for line in read(name)]


def beside(
    dataset: str, noise: str, rho: float | None, tau: float | None, clients: int, partition: str, method: str
) -> list[Published]:
    """What papers print for this method in this scenario: same data set, noise law and levels, clients, partition.

    noise: our preset's name.  partition: as a leaderboard's row says it.  How long a paper trained is given back and
    not asked for: whoever sets numbers of shorter runs beside it must say so.
    """
    found = []
    for scene in read("scenarios"):
        if scene["preset"] != noise:
            continue
        if scene["clients"] not in ("", str(clients)) or scene["partition"] not in ("", partition):
            continue
        for line in _tables():
            if (line["source"], line["noise"]) != (scene["source"], scene["noise"]):
                continue
            if (line["dataset"], line["method"]) != (dataset, method):
                continue
            if any(
                text and (ours is None or float(text) != ours)
                for text, ours in ((line["rho"], rho), (line["tau"], tau))
            ):
                continue
            found.append(
                Published(
                    line["source"],
                    line["table"],
                    float(line["accuracy"]),
                    float(line["std"]) if line["std"] else None,
                    int(scene["rounds"]) if scene["rounds"] else None,
                )
            )
    return found
