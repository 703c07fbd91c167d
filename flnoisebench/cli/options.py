"""The options that several commands share, as annotated types: one help line with its default each.

Defaults that are no plain value are said through ``show_default``: in ``help``, rich would take "[2]" for markup
and print nothing.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from flnoisebench.scenario.oracle import ORACLES

MethodName = Annotated[
    str | None,
    typer.Option(
        "--method",
        "-m",
        help="A name from `list methods`, or path/to/file.py:Class.",
        show_default="fedcova; fedavg under an oracle",
    ),
]
OracleName = Annotated[
    str | None,
    typer.Option(
        "--oracle",
        help=f"Remove the noise beforehand, by the truth, as no method can: {', '.join(ORACLES)}.",
        show_default="none",
    ),
]
DatasetName = Annotated[str, typer.Option("--dataset", "-d", help="A name from `list datasets`.")]
Draw = Annotated[int, typer.Option(min=0, help="Seed of the scenario: who holds what, who is noisy, how much.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of the run: initial weights, shuffling, augmentation.")]
Clients = Annotated[
    int | None,
    typer.Option(
        min=1, help="Number of clients.", show_default="20; all that a split's file, or for natural the data set, names"
    ),
]
Holdout = Annotated[float, typer.Option(help="Share of each client's samples kept out of training, for choosing.")]

NOISE, PARTITION = "Noise", "Partition"
NoiseName = Annotated[
    str | None,
    typer.Option(
        "--noise",
        help="A preset from `list noise`, or a file.toml of its fields.",
        rich_help_panel=NOISE,
        show_default="fedcova-sym; given where labels are wrong already",
    ),
]
Rho = Annotated[
    float | None,
    typer.Option(
        help="Share of noisy clients, 0 to 1.", rich_help_panel=NOISE, show_default="the preset's; .6 for fedcova-*"
    ),
]
Tau = Annotated[
    float | None,
    typer.Option(
        help="Noise level of a noisy client, 0 to 1.",
        rich_help_panel=NOISE,
        show_default="the preset's; .7 for fedcova-*",
    ),
]
NoiseField = Annotated[
    list[str] | None,
    typer.Option(
        "--noise-set",
        metavar="FIELD=VALUE",
        help="Any field of the noise spec (`list noise --details` names them), such as include_true=false. Repeatable.",
        rich_help_panel=NOISE,
        show_default="none",
    ),
]
Law = Annotated[
    str | None,
    typer.Option(
        "--partition",
        help="A law from `list partitions`.",
        rich_help_panel=PARTITION,
        show_default="bernoulli-dirichlet",
    ),
]
PartitionField = Annotated[
    list[str] | None,
    typer.Option(
        "--partition-set",
        metavar="FIELD=VALUE",
        help="Any field of the partition spec (`list partitions --details`), such as shards=2 or file=split.csv "
        "(or a manifest, of which the split alone is taken: noise is drawn anew). Repeatable.",
        rich_help_panel=PARTITION,
        show_default="none",
    ),
]
P = Annotated[
    float | None,
    typer.Option(
        "--p",
        help="Chance that a client holds a class (bernoulli-dirichlet).",
        rich_help_panel=PARTITION,
        show_default="0.5",
    ),
]
Alpha = Annotated[
    float | None,
    typer.Option("--alpha", help="Dirichlet concentration.", rich_help_panel=PARTITION, show_default="5.0"),
]
MinSize = Annotated[
    int | None,
    typer.Option("--min-size", help="Fewest samples a client may hold.", rich_help_panel=PARTITION, show_default="2"),
]


def default_data_root() -> Path:
    """$FLNOISEBENCH_DATA, else ~/.cache/flnoisebench."""
    return Path(os.environ.get("FLNOISEBENCH_DATA") or Path.home() / ".cache" / "flnoisebench")


DataRoot = Annotated[
    Path | None,
    typer.Option(
        "--data-root",
        help="Folder of the data sets' files.",
        show_default="$FLNOISEBENCH_DATA, else ~/.cache/flnoisebench",
    ),
]


def lane_count(text: str) -> int | None:
    """What ``--lanes`` says: a number from 1, or None for auto.  Raises ValueError for anything else."""
    if text == "auto":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"--lanes {text}: write auto or a number from 1")
    return int(text)
