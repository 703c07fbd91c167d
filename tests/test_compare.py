"""``compare``: runs side by side, and why two of them cannot be compared."""

import io
import json
import shutil

import pytest
from command_line import RUN, done, only_run, refused
from rich.console import Console

from flnoisebench.cli import console
from flnoisebench.cli.compare import compare, facts, load, obstacles


def ran(out, *words, method="fedavg"):
    done("run", "--method", method, *RUN[3:], *words, "--out", out)
    return only_run(out)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs")
    said = out / "law.toml"  # the default law under a name of its own
    said.write_text('preset = "fedcova-sym"')
    return {
        "base": ran(out / "base"),
        "relabel": ran(out / "relabel", method="fedavg-relabel"),
        "seed": ran(out / "seed", "--seed", "1"),
        "draw": ran(out / "draw", "--draw", "1"),
        "rho": ran(out / "rho", "--rho", "0.2"),
        "lr": ran(out / "lr", "--set", "protocol.optimiser.lr=0.03"),
        "own": ran(out / "own", "--track", "own"),
        "half": ran(out / "half", "--evaluate-on", "test-a"),
        "oracle": ran(out / "oracle", "--oracle", "clean-samples"),
        "said": ran(out / "said", "--noise", said),
    }


def test_runs_stand_side_by_side_with_their_curves(runs):
    text = done("compare", runs["base"], runs["relabel"])
    lines = dict(line.split("\t", 1) for line in text.splitlines()[1:])
    assert text.splitlines()[0] == "run\tA: fedavg\tB: fedavg-relabel"
    one, other = load(runs["base"]), load(runs["relabel"])
    assert lines["accuracy, last round"] == f"{one.result.accuracy.final:.2f} %\t{other.result.accuracy.final:.2f} %"
    assert lines["relabel precision"].startswith("-\t")  # FedAvg changes no label
    assert lines["accuracy by round, B"] == " ".join(f"{record.accuracy:.2f}" for record in other.rounds)
    assert "not comparable" not in text
    assert len({len(texts) for texts in facts([one, other]).values()}) == 1


def test_a_terminal_shows_a_table_and_the_curves_on_one_scale(runs, monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(console, "out", Console(file=screen, force_terminal=True, width=100, color_system=None))
    compare([runs["base"], runs["rho"]])
    lines = screen.getvalue().splitlines()
    one, other = load(runs["base"]), load(runs["rho"])
    assert any("A: fedavg" in line and "B: fedavg" in line for line in lines)
    assert str(runs["rho"]) in "".join(part for line in lines for part in line.split("│")[3:4]).replace(" ", "")
    known = [record.label_noise for run in (one, other) for record in run.rounds]
    (more,) = [line for line in lines if line.startswith("label noise A")]
    (less,) = [line for line in lines if line.startswith("label noise B")]
    assert "██" in more  # constant, and the highest of both
    assert "▁▁" in less
    assert f"{max(known):.2f} -> {max(known):.2f} %" in more
    assert lines[-1].startswith("not comparable: A and B: another scenario: noise.rho 0.6 and 0.2")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("relabel", []),
        ("seed", []),
        ("said", []),
        ("draw", ["another scenario: draw 0 and 1"]),
        ("rho", ["another scenario: noise.rho 0.6 and 0.2"]),
        ("lr", ["another protocol: optimiser.lr 0.1 and 0.03"]),
        ("own", ["another track: common and own"]),
        ("half", ["another evaluation set: test and test-a"]),
        ("oracle", ["another oracle: none and clean-samples"]),
    ],
)
def test_it_says_why_two_runs_cannot_be_compared(name, why, runs):
    assert obstacles(load(runs["base"]), load(runs[name])) == why
    said = json.loads(done("compare", runs["base"], runs[name], "--json"))
    assert said["comparable"] == (not why)
    assert said["obstacles"] == [f"A and B: {reason}" for reason in why]
    text = done("compare", runs["base"], runs[name])
    assert all(f"not comparable: A and B: {reason}" in text for reason in why)


def test_runs_that_can_be_compared_stand_together_on_one_side_of_a_reason(runs):
    folders = [runs[name] for name in ("base", "draw", "relabel", "seed", "rho")]
    said = [line for line in done("compare", *folders).splitlines() if line.startswith("not comparable")]
    assert [line.removeprefix("not comparable: ") for line in said] == [
        "A, C, D and B: another scenario: draw 0 and 1",
        "A, C, D and E: another scenario: noise.rho 0.6 and 0.2",
        "B and E: another scenario: noise.rho 0.6 and 0.2, draw 1 and 0",
    ]


def test_an_unfinished_or_failed_run_and_other_labels_under_one_name_are_obstacles(runs, tmp_path):
    base = load(runs["base"])
    shutil.copytree(runs["relabel"], tmp_path / "unfinished")
    (tmp_path / "unfinished" / "result.json").unlink()
    unfinished = load(tmp_path / "unfinished")
    assert obstacles(base, unfinished) == [f"{tmp_path / 'unfinished'} is unfinished"]
    assert facts([base, unfinished])["status"] == ["complete", "unfinished: 2 of 2 rounds"]
    shutil.copytree(runs["relabel"], tmp_path / "other")
    path = tmp_path / "other" / "result.json"
    content = json.loads(path.read_text())
    content["digests"]["labels"] = "0" * 64
    path.write_text(json.dumps(content))
    assert obstacles(base, load(tmp_path / "other")) == ["the same scenario by name, but other labels (digests differ)"]
    content |= {"digests": base.result.digests, "status": "failed", "failure": "no luck"}
    path.write_text(json.dumps(content))
    assert obstacles(base, load(tmp_path / "other")) == [f"{tmp_path / 'other'} failed"]


def test_equal_labels_are_no_equal_scenario_where_images_or_what_is_held_out_may_differ(runs):
    base, said = load(runs["base"]), load(runs["said"])

    def other(digests=None, **scenario):
        settings = said.settings.model_copy(update={"scenario": said.settings.scenario.model_copy(update=scenario)})
        digests = {**said.result.digests, **(digests or {})}
        result = said.result.model_copy(update={"settings": settings, "digests": digests})
        return said._replace(settings=settings, result=result)

    assert obstacles(base, other()) == obstacles(base, other({"public": "0" * 64})) == []
    assert obstacles(base, other(draw=1)) == []  # nothing is held out, so all that a draw decides has a digest
    for another in (other({"foreign": "0" * 64}), other(holdout=0.2)):  # open-set noise leaves the labels
        (found,) = obstacles(base, another)
        assert "noise_name fedcova-sym and law" in found


def test_a_folder_stands_for_all_runs_below_it(runs):
    above = runs["base"].parents[5]  # out/base/<dataset>/<scenario>/<method>/<settings>/<run>
    few = json.loads(done("compare", above / "base", above / "draw", "--json"))
    assert [one["run"] for one in few["runs"]] == [str(runs["base"]), str(runs["draw"])]
    whole = json.loads(done("compare", above, runs["base"], "--json"))
    assert [one["run"] for one in whole["runs"]] == sorted(map(str, runs.values()))  # each once


def test_what_a_leaderboard_keeps_stands_side_by_side_as_its_runs_do(runs, tmp_path):
    """A clone has the entries, and not the folders of their runs."""
    both = runs["base"], runs["relabel"]
    done("leaderboard", "build", *both, "--out", tmp_path)
    base, relabel = sorted((tmp_path / "results").rglob("*.json"))  # fedavg/, fedavg-relabel/
    own = done("compare", *both).splitlines()
    kept = done("compare", base, relabel).splitlines()
    assert kept == done("compare", tmp_path / "results" / "digits").splitlines()
    assert [text for text in kept if not text.startswith("run\t/")] == [
        text for text in own if not text.startswith("run\t/")
    ]
    mixed = json.loads(done("compare", base, runs["relabel"], "--json"))
    assert [one["run"] for one in mixed["runs"]] == [str(base), str(runs["relabel"])]
    assert mixed["comparable"]
    assert mixed["runs"][0]["result"]["accuracy"] == json.loads((runs["base"] / "result.json").read_text())["accuracy"]
    base.write_text(base.read_text().replace('"status": "complete"', '"status": "failed"'))
    assert f"{base}: status is 'failed'" in refused("compare", base, relabel)


def test_one_run_is_nothing_to_compare(runs, tmp_path):
    assert "two runs or more" in refused("compare", runs["base"])
    assert "holds no run" in refused("compare", runs["base"], tmp_path)
