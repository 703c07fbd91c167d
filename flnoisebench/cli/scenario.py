"""``flnoisebench scenario``: build, show, check and compare manifests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from flnoisebench import registry, scenario
from flnoisebench.cli import console
from flnoisebench.cli import options as opt
from flnoisebench.cli.console import percent
from flnoisebench.cli.listing import line
from flnoisebench.runtime import build_scenario, data_digest
from flnoisebench.settings import parse_assignment, resolve_scenario

app = typer.Typer(no_args_is_help=True, help="Pin, look at and check scenarios: partition and noise.")
ManifestFile = Annotated[Path, typer.Argument(metavar="MANIFEST", help="A file that `scenario build` wrote.")]


@app.command()
@console.guarded
def build(
    dataset: opt.DatasetName = "digits",
    noise: opt.NoiseName = "fedcova-sym",
    rho: opt.Rho = None,
    tau: opt.Tau = None,
    noise_set: opt.NoiseField = None,
    partition: opt.Law = None,
    p: opt.P = None,
    alpha: opt.Alpha = None,
    min_size: opt.MinSize = None,
    clients: opt.Clients = 20,
    draw: opt.Draw = 0,
    holdout: opt.Holdout = 0.0,
    data_root: opt.DataRoot = None,
    out: Annotated[
        Path | None,
        typer.Option(help="The manifest to write.", show_default="<dataset>-<scenario>-draw<d>.safetensors"),
    ] = None,
) -> None:
    """Draw a scenario and write its manifest."""
    spec = resolve_scenario(
        dataset=dataset,
        noise=noise,
        noise_changes={**opt.given(rho=rho, tau=tau), **dict(map(parse_assignment, noise_set or []))},
        partition_changes=opt.given(law=partition, p=p, alpha=alpha, min_size=min_size),
        clients=clients,
        draw=draw,
        holdout=holdout,
    )
    data = registry.load_dataset(dataset)
    arrays = data.load(data_root or opt.default_data_root())
    built = build_scenario(spec, data, arrays)
    path = out or Path(f"{dataset}-{spec.slug}-draw{draw}.safetensors")
    scenario.save(path, *built)
    print_scenario(*built)
    line("manifest", str(path))


@app.command()
@console.guarded
def show(
    manifest: ManifestFile,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the whole summary as JSON.", show_default="no")
    ] = False,
) -> None:
    """Show who holds what and whose labels are wrong."""
    scene, truth = scenario.load(manifest)
    if as_json:
        print(json.dumps(scenario.summary(scene, truth)))
        return
    print_scenario(scene, truth)


@app.command()
@console.guarded
def check(manifest: ManifestFile, data_root: opt.DataRoot = None) -> None:
    """Prove a manifest against its data: complete, rebuildable, and as noisy as its law says."""
    scene, truth = scenario.load(manifest)
    data = registry.load_dataset(scene.spec.dataset)
    arrays = data.load(data_root or opt.default_data_root())
    problems = scenario.check(scene, truth, arrays.train_labels.numpy())
    if data_digest(arrays) != scene.digests["data"]:
        problems.insert(0, "the data are not those that the manifest was built on (their digests differ)")
    for problem in problems:
        console.out.print(f"problem: {problem}", markup=False, soft_wrap=True)
    if problems:
        raise typer.Exit(console.FAILED)
    console.out.print(
        f"{manifest}: complete, rebuildable from its settings, realised rates agree with the law", soft_wrap=True
    )


@app.command()
@console.guarded
def diff(a: ManifestFile, b: ManifestFile) -> None:
    """Say what differs between two manifests."""
    differences = scenario.diff(scenario.load(a), scenario.load(b))
    for difference in differences:
        console.out.print(difference, markup=False, soft_wrap=True)
    if not differences:
        console.out.print("the same scenario")


def print_scenario(scene: scenario.Scenario, truth: scenario.Truth) -> None:
    """The client x class counts with the noise of each client, then the overall rates."""
    summary = scenario.summary(scene, truth)
    title = f"{scene.spec.dataset}: {scene.spec.slug}, draw {scene.spec.draw}"
    by = "given" if truth.true is None else "true"
    headings = ["client", "samples", "nominal %", "realised %", f"samples by {by} class"]
    rows = [
        [
            f"{'noisy ' if row['noisy'] else ''}{row['client']}",
            str(row["size"]),
            _percent(row["nominal"]),
            _percent(row["realised"]),
            " ".join(f"{count:>4}" for count in row["counts"]) if scene.classes <= 20 else f"{row['classes']} classes",
        ]
        for row in summary["clients"]
    ]
    noise = f"{_percent(summary['realised_rate'])} %"
    if not console.out.is_terminal:
        for row in (["scenario", title], headings, *rows, ["label noise over all samples", noise]):
            print("\t".join(row))
        return
    table = Table(title=title, title_justify="left")
    for heading in headings:
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(*row)
    console.out.print(table)
    console.out.print(f"label noise over all samples: {noise}")


def _percent(rate: float | None) -> str:
    return percent(None if rate is None else 100 * rate)
