"""What the pictures of a scenario promise: they are drawn, of the right things, and are the same each time."""

import builtins
import json
import re
from pathlib import Path

import numpy as np
import pytest
from command_line import call, done, refused
from PIL import Image

from flnoisebench import scenario
from flnoisebench.scenario import Partition, ScenarioSpec, build, noise_from, pictures

pytest.importorskip("matplotlib", reason="the extra 'plots' is not installed")


def made(noise="fedcova-asym", clients=5, classes=10, known=True, n=600):
    labels = np.arange(n) % classes
    spec = ScenarioSpec(
        dataset="digits", noise=noise_from(noise), noise_name=noise, clients=clients, partition=Partition(p=0.9)
    )
    return build(spec, labels, classes, "sha", labels_are_true=known)


@pytest.fixture
def manifest(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done("scenario", "build", "--noise", "fedcova-asym", "--clients", "5", "--out", "a.safetensors")
    return "a.safetensors"


def test_show_draws_a_png_and_an_svg_with_every_panel(manifest):
    shown = done("scenario", "show", manifest, "--png", "deep/a.png", "--svg", "a.svg")
    assert shown.endswith("picture\tdeep/a.png\npicture\ta.svg\n")
    with Image.open("deep/a.png") as image:
        image.load()
        assert image.size[0] == 1440
        assert np.asarray(image.convert("L")).std() > 20
    text = Path("a.svg").read_text()
    for words in ("samples \\(largest", "nominal transitions", "realised transitions", "expected by the law"):
        assert re.search(f"<!-- {words}", text), words
    facts = json.loads(done("scenario", "show", manifest, "--json"))
    assert f"{facts['realised_rate']:.1%} of 1438 labels wrong" in text
    # The sheet: half of it wrong, with given and true label.
    assert len(re.findall(r"<!-- is \d -->", text)) == 20
    assert len(re.findall(r"<image ", text)) >= 40


def test_the_same_scenario_gives_the_same_svg(manifest):
    for name in ("a.svg", "b.svg"):
        done("scenario", "show", manifest, "--svg", name)
    assert Path("a.svg").read_bytes() == Path("b.svg").read_bytes()


def test_a_manifest_is_shown_where_its_data_set_is_not_installed(manifest, monkeypatch):
    spec = scenario.load(manifest)[0].spec
    scenario.save("theirs", *build(spec.model_copy(update={"dataset": "theirs"}), np.arange(600) % 10, 10, "sha"))
    assert "\n0 -> 1\t" in done("scenario", "show", "theirs")
    assert "\n0 -> 1\t" in done("scenario", "show", "theirs", "--client", "0")
    assert "unknown data set 'theirs'" in refused("scenario", "check", "theirs")


def test_a_manifest_may_lie_where_rich_would_see_markup(manifest):
    Path("a[").mkdir()
    Path(manifest).rename("a[/b]")
    assert done("scenario", "check", "a[/b]").startswith("a[/b]: complete, rebuildable")


def test_a_picture_without_samples_needs_no_data(manifest, monkeypatch):
    from flnoisebench_datasets.digits import Digits

    from flnoisebench.api import MissingData

    def missing(self, root, *, public=False):
        raise MissingData("not here.")

    monkeypatch.setattr(Digits, "load", missing)
    done("scenario", "show", manifest, "--svg", "a.svg", "--no-sheet")
    assert "<!-- is " not in Path("a.svg").read_text()
    result = call("scenario", "show", manifest, "--svg", "b.svg")
    assert result.exit_code != 0
    assert "not here. Or draw without samples: --no-sheet" in " ".join(result.stderr.split())
    assert not Path("b.svg").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--dataset", "synthetic"), "has other data than the manifest was built on"),
        (("--noise", "open-set", "--noise-set", "foreign=synthetic"), "are not those that the scenario was drawn with"),
    ],
)
def test_samples_of_other_data_are_not_drawn(words, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = ("scenario", "show", "a", "--svg", "a.svg", "--data-root", ".")
    settings = Path("synthetic.json")
    settings.write_text('{"images": 300, "test": 20}')
    done("scenario", "build", *words, "--clients", "5", "--out", "a", "--data-root", ".")
    done(*command)
    Path("a.svg").unlink()
    for other in ('{"images": 300, "test": 20, "contrast": 0.9}', '{"images": 100, "test": 20}'):
        settings.write_text(other)
        told = refused(*command)
        assert said in told
        assert told.endswith("Or draw without samples: --no-sheet")
        assert not Path("a.svg").exists()
    done(*command, "--no-sheet")


def test_another_ending_or_a_missing_matplotlib_is_said(manifest, monkeypatch):
    assert "a picture's name ends in .png or .svg" in refused("scenario", "show", manifest, "--png", "a.jpg")
    real = builtins.__import__

    def without(name, *rest, **more):
        if name.split(".")[0] == "matplotlib":
            raise ModuleNotFoundError("No module named 'matplotlib'")
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    assert "pip install 'flnoisebench[plots]'" in refused("scenario", "show", manifest, "--png", "a.png")
    assert not Path("a.png").exists()


@pytest.mark.parametrize(("clients", "classes", "known"), [(1, 2, True), (150, 100, True), (5, 10, False)])
def test_federations_of_every_size_and_without_a_truth_are_drawn(tmp_path, clients, classes, known):
    built = made("fedcova-sym" if known else "clean", clients, classes, known, n=max(600, clients * 60))
    path = tmp_path / "a.png"
    pictures.draw(path, *built)
    with Image.open(path) as image:
        assert image.size[1] < 3000
    if not known:
        assert pictures.confusions(*built) == []


def test_the_sheet_shows_wrong_labels_first_then_right_ones_and_intruders_as_none_of_these():
    scene, truth = made()
    chosen = pictures.chosen(scene, truth)
    wrong = scene.given[chosen] != truth.true[chosen]
    assert len(set(chosen)) == len(chosen) == 40
    assert wrong[:20].all()
    assert not wrong[20:].any()
    clean, its_truth = made("clean")
    assert len(pictures.chosen(clean, its_truth)) == 40
    given_only, _ = unknown = made("clean", known=False)
    assert len(pictures.chosen(*unknown)) == 40
    images = np.zeros((600, 1, 8, 8), dtype=np.uint8)
    samples = pictures.samples_of(scene, truth, images, chosen[:2])
    assert [s.given for s in samples] == scene.given[chosen[:2]].tolist()
    assert [s.true for s in samples] == truth.true[chosen[:2]].tolist()
    assert pictures.samples_of(*unknown, images, chosen[:1])[0].true is None
    assert given_only.given is not None


def test_a_class_may_be_called_what_would_be_no_formula(tmp_path):
    scene, truth = made(classes=3)
    shown = pictures.samples_of(scene, truth, np.zeros((600, 1, 8, 8), dtype=np.uint8), pictures.chosen(scene, truth))
    pictures.draw(tmp_path / "a.svg", scene, truth, names=("$\\x$", "5$", "10$"), samples=shown)
    assert "<!-- $\\x$ -->" in (tmp_path / "a.svg").read_text()


def test_the_terminals_bubbles_tell_none_from_few_from_many():
    assert pictures.glyphs([0, 1, 25, 26, 50, 75, 76, 100], 100) == " ··∘∘○●●"
    assert pictures.glyphs([0], 0) == " "


def test_the_most_frequent_confusions_are_named_with_law_and_what_came_of_it(manifest):
    lines = done("scenario", "show", manifest).splitlines()
    found = [line.split("\t") for line in lines if " -> " in line]
    assert len(found) == 5
    facts = json.loads(done("scenario", "show", manifest, "--json"))["transition"]
    rest = sum(share > 0 for y, shares in enumerate(facts["nominal"]) for j, share in enumerate(shares) if j != y) - 5
    assert rest > 0
    assert f"{rest} more\tin the JSON object of `scenario show --json`" in lines
    for pair, nominal, realised in found:
        y, j = map(int, pair.split(" -> "))
        assert j == (y + 1) % 10
        assert nominal == f"{100 * facts['nominal'][y][j]:.2f} % by the law"
        assert realised == f"{100 * facts['realised'][y][j]:.2f} % realised"
    shares = [float(nominal.split()[0]) for _, nominal, _ in found]
    assert shares == sorted(shares, reverse=True)


def test_one_client_is_shown_with_its_own_transitions(manifest):
    scene, truth = scenario.load(manifest)
    client = int(np.flatnonzero(truth.noisy)[0])
    lines = dict(line.split("\t") for line in done("scenario", "show", manifest, "--client", str(client)).splitlines())
    mine = scene.owner == client
    assert lines["size"] == str(mine.sum())
    moved = {pair: int(count) for pair, count in lines.items() if " -> " in pair}
    assert sum(moved.values()) == (scene.given != truth.true)[mine].sum()
    facts = json.loads(done("scenario", "show", manifest, "--client", str(client), "--json"))
    assert np.array(facts["transition"]).sum() == mine.sum()
    assert "there is no client 5: they are 0..4" in refused("scenario", "show", manifest, "--client", "5")
