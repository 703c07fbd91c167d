"""``flnoisebench scenario``: build, show, check and compare manifests."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from flnoisebench import registry, scenario
from flnoisebench.api import MissingData
from flnoisebench.cli import console
from flnoisebench.cli import options as opt
from flnoisebench.cli.console import line, percent
from flnoisebench.inputs import build_scenario, check_scenario, data_digest, with_foreign
from flnoisebench.scenario import pictures
from flnoisebench.settings import resolve_scenario, scenario_changes

app = typer.Typer(no_args_is_help=True, help="Pin, look at and check scenarios: partition and noise.")
ManifestFile = Annotated[Path, typer.Argument(metavar="MANIFEST", help="A file that `scenario build` wrote.")]


@app.command()
@console.guarded
def build(
    dataset: opt.DatasetName = "digits",
    noise: opt.NoiseName = None,
    rho: opt.Rho = None,
    tau: opt.Tau = None,
    noise_set: opt.NoiseField = None,
    partition: opt.Law = None,
    partition_set: opt.PartitionField = None,
    p: opt.P = None,
    alpha: opt.Alpha = None,
    min_size: opt.MinSize = None,
    clients: opt.Clients = None,
    draw: opt.Draw = 0,
    holdout: opt.Holdout = 0.0,
    data_root: opt.DataRoot = None,
    out: Annotated[
        Path | None,
        typer.Option(help="The manifest to write.", show_default="<dataset>-<scenario>-draw<d>.safetensors"),
    ] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Write over another file that is there.", show_default="no")
    ] = False,
) -> None:
    """Draw a scenario and write its manifest."""
    said = {
        "rho": rho, "tau": tau, "noise_set": noise_set, "partition": partition, "partition_set": partition_set, "p": p,
        "alpha": alpha, "min_size": min_size,
    }  # fmt: skip
    noise_changes, partition_changes = scenario_changes(said)
    data, root = registry.load_dataset(dataset), data_root or opt.default_data_root()
    spec = resolve_scenario(
        dataset=dataset,
        noise=noise,
        noise_changes=noise_changes,
        partition_changes=partition_changes,
        clients=clients,
        draw=draw,
        holdout=holdout,
        data_root=root,
    )
    built = build_scenario(spec, data, data.load(root), root)
    path = out or Path(f"{dataset}-{spec.slug}-draw{draw}.safetensors")
    if path.is_file() and not replace and path.read_bytes() != scenario.encoded(*built):
        raise ValueError(f"{path} is there, and another file than this manifest: take another --out, or say --replace")
    for remark in scenario.remarks(*built):
        console.warn(remark)
    scenario.save(path, *built)
    print_scenario(*built)
    line("manifest", str(path))


@app.command()
@console.guarded
def show(
    manifest: ManifestFile,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", help="Print the whole summary as JSON, all transitions and settings too.", show_default="no"
        ),
    ] = False,
    client: Annotated[
        int | None, typer.Option(help="One client alone, with its own transitions.", show_default="all")
    ] = None,
    png: Annotated[Path | None, typer.Option(help="Draw a PNG picture into this file.", show_default="none")] = None,
    svg: Annotated[Path | None, typer.Option(help="Draw an SVG picture into this file.", show_default="none")] = None,
    sheet: Annotated[bool, typer.Option(help="A sheet of samples in the picture, which needs the data.")] = True,
    data_root: opt.DataRoot = None,
) -> None:
    """Show who holds what and whose labels are wrong, here or in a picture."""
    scene, truth = scenario.load(manifest)
    if client is not None and not 0 <= client < scene.spec.clients:
        raise ValueError(f"there is no client {client}: they are 0..{scene.spec.clients - 1}")
    drawn = [path for path in (png, svg) if path is not None]
    if drawn:
        draw_scenario(scene, truth, drawn, data_root or opt.default_data_root() if sheet else None)
    if as_json:
        facts = {
            **scenario.summary(scene, truth),
            "settings": scene.spec.model_dump(mode="json"),
            "digests": dict(scene.digests),
        }
        if client is not None:
            facts = {**facts["clients"][client], "transition": _pairs(scene, truth, client)}
        print(json.dumps(facts))
        return
    if client is not None:
        print_client(scene, truth, client)
    else:
        print_scenario(scene, truth)
    for path in drawn:
        line("picture", str(path))


@app.command()
@console.guarded
def check(manifest: ManifestFile, data_root: opt.DataRoot = None) -> None:
    """Prove a manifest against its data: complete, rebuildable, and as noisy as its law says.  The file of a split is
    looked for here and beside the manifest."""
    scene, truth = scenario.load(manifest)
    cut = scene.spec.partition
    there = cut if cut.law != "manifest" else scenario.found(cut, manifest.parent)
    if there is None:
        console.warn(
            f"{cut.file} (SHA-256 {cut.file_sha256}) is neither here nor beside {manifest}, so whether the split is "
            "that file's is not checked: lay it there"
        )
    else:
        scene = dataclasses.replace(scene, spec=scene.spec.model_copy(update={"partition": there}))
    data, root = registry.load_dataset(scene.spec.dataset), data_root or opt.default_data_root()
    problems = check_scenario(scene, truth, data, data.load(root), root, own_split=there is None)
    for problem in problems:
        console.out.print(f"problem: {problem}", markup=False, soft_wrap=True)
    if problems:
        raise typer.Exit(console.FAILED)
    rates = "realised rates agree with the law" if truth.true is not None else "rates unknown, as the truth is"
    console.out.print(f"{manifest}: complete, rebuildable from its settings, {rates}", markup=False, soft_wrap=True)


@app.command()
@console.guarded
def diff(a: ManifestFile, b: ManifestFile) -> None:
    """Say what differs between two manifests, and why numbers on them cannot be compared."""
    first, second = scenario.load(a), scenario.load(b)
    differences = scenario.diff(first, second)
    for difference in differences:
        console.out.print(difference, markup=False, soft_wrap=True)
    reasons = scenario.incomparable(first, second)
    for reason in reasons:
        console.out.print(f"not comparable: {reason}", markup=False, soft_wrap=True)
    if not differences:
        console.out.print("the same scenario")
    elif not reasons:
        console.out.print("comparable: clients, samples and labels are the same")


def draw_scenario(
    scene: scenario.Scenario, truth: scenario.Truth, paths: Sequence[Path], data_root: Path | None
) -> None:
    """Write the pictures; with samples where a data root is given.  Raises ValueError where its data are others."""
    for path in paths:
        pictures.require(path)
    data = registry.load_dataset(scene.spec.dataset)
    names, samples = data.classes, []
    if data_root is not None:
        advice = "Or draw without samples: --no-sheet"
        try:
            arrays = data.load(data_root)
            if data_digest(arrays) != scene.digests["data"]:
                raise ValueError(f"{data_root} has other data than the manifest was built on (their SHA-256 differs).")
            arrays = with_foreign(arrays, scene, truth, data_root)
        except MissingData as error:
            raise MissingData(f"{error}  {advice}") from error
        except ValueError as error:
            raise ValueError(f"{error}  {advice}") from error
        names = arrays.classes or names
        samples = pictures.samples_of(scene, truth, arrays.train_images.numpy(), pictures.chosen(scene, truth))
    for path in paths:
        pictures.draw(path, scene, truth, names=names, samples=samples)


def print_scenario(scene: scenario.Scenario, truth: scenario.Truth) -> None:
    """The client x class counts with the noise of each client, then the overall rates, the most frequent wrong labels,
    and the digests that a run's result and a leaderboard's row name."""
    summary = scenario.summary(scene, truth)
    title = f"{scene.spec.dataset}: {scene.spec.slug}, draw {scene.spec.draw}"
    by = "given" if truth.true is None else "true"
    headings = ["client", "samples", "nominal %", "realised %", f"samples by {by} class"]
    largest = max(max(row["counts"]) for row in summary["clients"])
    small = console.out.is_terminal and 20 < scene.classes <= max(console.out.width - 45, 0)
    rows = [
        [
            f"{'noisy ' if row['noisy'] else ''}{row['client']}",
            str(row["size"]),
            _percent(row["nominal"]),
            _percent(row["realised"]),
            " ".join(f"{count:>4}" for count in row["counts"])
            if scene.classes <= 20
            else (pictures.glyphs(row["counts"], largest) if small else f"{row['classes']} classes"),
        ]
        for row in summary["clients"]
    ]
    noise = f"{_percent(summary['realised_rate'])} %"
    names = _names(scene)
    confusions = [
        [f"{names[y]} -> {names[j]}", f"{_percent(nominal)} % by the law", f"{_percent(realised)} % realised"]
        for y, j, nominal, realised in pictures.confusions(scene, truth)
    ]
    law = summary["transition"]["nominal"] or []
    wrong = sum(share > 0 for y, shares in enumerate(law) for j, share in enumerate(shares) if j != y)
    if not console.out.is_terminal:
        line("scenario", title)
    console.table(headings, rows, title=title, left=0)
    if wrong > len(confusions) > 0:
        confusions.append([f"{wrong - len(confusions)} more", "in the JSON object of `scenario show --json`"])
    if not console.out.is_terminal:
        for row in (["label noise over all samples", noise], *confusions):
            line(*row)
    else:
        console.out.print(f"label noise over all samples: {noise}")
        for pair, *shares in confusions:
            console.out.print(f"  {pair}: {', '.join(shares)}", markup=False)
    for what, sha256 in sorted(scene.digests.items()):
        line(f"SHA-256 of {what}", sha256)


def print_client(scene: scenario.Scenario, truth: scenario.Truth, client: int) -> None:
    """One client's facts, then its wrong labels by pair of classes, the most frequent first."""
    row, names = scenario.summary(scene, truth)["clients"][client], _names(scene)
    for fact in ("client", "size", "held_out", "classes", "noisy"):
        line(fact, str(row[fact]))
    for fact in ("nominal", "expected", "realised"):
        line(fact, f"{_percent(row[fact])} %")
    pairs = _pairs(scene, truth, client) or []
    wrong = [(n, y, j) for y, counts in enumerate(pairs) for j, n in enumerate(counts) if y != j and n]
    for n, y, j in sorted(wrong, key=lambda entry: (-entry[0], *entry[1:])):
        line(f"{names[y]} -> {names[j]}", str(n))


def _pairs(scene: scenario.Scenario, truth: scenario.Truth, client: int) -> list[list[int]] | None:
    """[C, C]: the client's samples by true label (row) and given label (column)."""
    return None if truth.true is None else scenario.realised_pairs(scene, truth.true, client).tolist()


def _names(scene: scenario.Scenario) -> list[str]:
    try:
        names = registry.load_dataset(scene.spec.dataset).classes
    except ValueError:  # somebody else's, which is not installed here: all but the names is in the file
        names = ()
    return list(names) if len(names) == scene.classes else [str(c) for c in range(scene.classes)]


def _percent(rate: float | None) -> str:
    return percent(None if rate is None else 100 * rate)
