"""``flnoisebench data``: which data sets are there, and fetching them."""

from __future__ import annotations

from typing import Annotated

import typer

from flnoisebench import registry
from flnoisebench.api import MissingData
from flnoisebench.cli import console
from flnoisebench.cli import options as opt
from flnoisebench.cli.listing import line

app = typer.Typer(no_args_is_help=True, help="Look for data sets and fetch them.")


@app.command("list")
@console.guarded
def list_(data_root: opt.DataRoot = None) -> None:
    """Load every data set that is there and say which is not."""
    root = data_root or opt.default_data_root()
    for name in registry.names(registry.DATASETS):
        data = registry.load_dataset(name)
        try:
            arrays = data.load(root)
        except MissingData as error:
            line(name, "missing", " ".join(str(error).split()))
        except ValueError as error:
            line(name, "damaged", str(error))
        else:
            classes = len(arrays.classes or data.classes)
            shape = "x".join(map(str, arrays.train_images.shape[1:]))
            line(
                name,
                "there",
                f"{len(arrays.train_labels)} + {len(arrays.test_labels)} images {shape}, {classes} classes",
            )


@app.command()
@console.guarded
def fetch(
    name: Annotated[str, typer.Argument(help="A name from `list datasets`.")],
    data_root: opt.DataRoot = None,
) -> None:
    """Download a data set from its official source, and check it."""
    root = data_root or opt.default_data_root()
    data = registry.load_dataset(name)
    root.mkdir(parents=True, exist_ok=True)
    data.fetch(root)
    arrays = data.load(root)
    line(name, "there", f"{len(arrays.train_labels)} + {len(arrays.test_labels)} images in {root}")
