"""The options that several commands share, as annotated types: one help line with its default each."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

MethodName = Annotated[
    str, typer.Option("--method", "-m", help="A name from `list methods`, or path/to/file.py:Class.")
]
DatasetName = Annotated[str, typer.Option("--dataset", "-d", help="A name from `list datasets`.")]
Draw = Annotated[int, typer.Option(min=0, help="Seed of the scenario: who holds what, who is noisy, how much.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of the run: initial weights, shuffling, augmentation.")]
Clients = Annotated[int, typer.Option(min=1, help="Number of clients.")]
Holdout = Annotated[float, typer.Option(help="Share of each client's samples kept out of training, for choosing.")]

NOISE, PARTITION = "Noise", "Partition"
NoiseName = Annotated[str, typer.Option("--noise", help="A preset from `list noise`.", rich_help_panel=NOISE)]
Rho = Annotated[
    float | None,
    typer.Option(
        help="Share of noisy clients, 0 to 1. [preset's; .6 for fedcova-*]", rich_help_panel=NOISE, show_default=False
    ),
]
Tau = Annotated[
    float | None,
    typer.Option(
        help="Noise level of a noisy client, 0 to 1. [preset's; .7 for fedcova-*]",
        rich_help_panel=NOISE,
        show_default=False,
    ),
]
NoiseField = Annotated[
    list[str] | None,
    typer.Option(
        "--noise-set",
        metavar="FIELD=VALUE",
        help="Any field of the noise spec (`list noise --details` names them), such as include_true=false. [none]",
        rich_help_panel=NOISE,
        show_default=False,
    ),
]
Law = Annotated[
    str | None,
    typer.Option(
        "--partition",
        help="A law from `list partitions`. [bernoulli-dirichlet]",
        rich_help_panel=PARTITION,
        show_default=False,
    ),
]
P = Annotated[
    float | None,
    typer.Option(
        "--p",
        help="Chance that a client holds a class (bernoulli-dirichlet). [0.5]",
        rich_help_panel=PARTITION,
        show_default=False,
    ),
]
Alpha = Annotated[
    float | None,
    typer.Option("--alpha", help="Dirichlet concentration. [5.0]", rich_help_panel=PARTITION, show_default=False),
]
MinSize = Annotated[
    int | None,
    typer.Option(
        "--min-size", help="Fewest samples a client may hold. [2]", rich_help_panel=PARTITION, show_default=False
    ),
]


def default_data_root() -> Path:
    """$FLNOISEBENCH_DATA, else ~/.cache/flnoisebench."""
    return Path(os.environ.get("FLNOISEBENCH_DATA") or Path.home() / ".cache" / "flnoisebench")


DataRoot = Annotated[
    Path | None,
    typer.Option(
        "--data-root",
        help="Folder of the data sets' files. [$FLNOISEBENCH_DATA, else ~/.cache/flnoisebench]",
        show_default=False,
    ),
]


def given(**values: Any) -> dict[str, Any]:
    """Those that were said."""
    return {name: value for name, value in values.items() if value is not None}
