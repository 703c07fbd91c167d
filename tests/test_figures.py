"""Figures: what is drawn is what the runs hold, in a form that can be printed, and that everybody can read."""

import math
import shutil
import sys
import xml.etree.ElementTree as ElementTree
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from command_line import call, done, refused, rows

from flnoisebench import records, registry
from flnoisebench.report import figures, tolerance
from flnoisebench.settings import resolve

DIGITS = ("--rounds", 4, "--clients", 5)


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """FedAvg on two draws, FedCova on one with two values of alpha, which corrects in rounds 1 and 2."""
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("figures")
    for draw in (0, 1):
        done("run", "--method", "fedavg", "--draw", draw, "--out", out, *DIGITS)
    for alpha in (2.0, 7.0):
        schedule = ("--set", "correct_start=1", "--set", "correct_period=1", "--set", "correct_stop=3")
        done("run", "--set", f"alpha={alpha}", *schedule, "--out", out, *DIGITS)
    return out


@pytest.fixture(scope="module")
def runs(out):
    return figures.load([out])


def of(runs, method):
    return [run for run in runs if run.settings.method == method]


def drawable(runs):
    """Kind -> its figure, of the runs that it is for."""
    own = of(runs, "fedcova")
    chosen = {"orthogonality": own, "correction": own, "heterogeneity": own, "clients": own, "sensitivity": own}
    return {
        kind: figures.draw(kind, chosen.get(kind, runs) if what.of_runs else (), "alpha" if what.over else None)
        for kind, what in figures.KINDS.items()
    }


def test_a_long_legend_leaves_the_panels_their_room(runs, tmp_path):
    many = [
        run._replace(label=f"a method with many settings, {i}", panel=f"panel {i % 3}, " + "with a long name " * 4)
        for run in runs
        for i in range(12)
    ]
    figure = figures.draw("curves", many)
    figures.save(figure, tmp_path / "long.png")
    (legend,) = figure.legends
    for axes in figure.axes:
        box = axes.get_window_extent()
        assert box.height / figure.dpi > 2  # inches
        assert not box.overlaps(legend.get_window_extent())


def test_lines_are_in_the_order_of_their_values_however_the_settings_folders_are_named(runs, out, tmp_path):
    for digest, alpha in (("0a", 7.0), ("1b", 2.0)):
        (run,) = [run for run in of(runs, "fedcova") if run.settings.changed["alpha"] == alpha]
        shutil.copytree(run.settings.folder(out), tmp_path / "digits" / "fedcova" / digest / "draw0-seed0")
    assert [run.label for run in figures.load([tmp_path])] == ["fedcova, alpha=2.0", "fedcova, alpha=7.0"]
    asked = [tmp_path / "digits" / "fedcova" / digest for digest in ("0a", "1b")]
    assert [run.label for run in figures.load(asked)] == ["fedcova, alpha=7.0", "fedcova, alpha=2.0"]


def test_what_a_leaderboard_keeps_draws_the_same_figures_where_it_keeps_enough(out, runs, tmp_path):
    """A clone has the rows, and not the folders of their runs."""
    done("leaderboard", "build", out, "--out", tmp_path, FLNOISEBENCH_COMMIT="c" * 40)
    kept = figures.load([tmp_path])
    assert figures.load([tmp_path / "results" / "digits"]) == kept
    same = {run.settings.folder(out): run for run in kept}
    assert len(same) == len(runs)
    for kind, over, method in (("curves", None, None), ("costs", None, None), ("correction", None, "fedcova"),
                               ("sensitivity", "alpha", "fedcova")):  # fmt: skip
        own = of(runs, method) if method else runs
        figures.save(figures.draw(kind, own, over), tmp_path / "own.svg")
        figures.save(figures.draw(kind, [same[run.settings.folder(out)] for run in own], over), tmp_path / "kept.svg")
        assert (tmp_path / "kept.svg").read_bytes() == (tmp_path / "own.svg").read_bytes(), kind
    for kind, what in (("orthogonality", "no leaderboard keeps it"), ("clients", "a leaderboard does not keep it"),
                       ("noise", "needs the run's folder")):  # fmt: skip
        with pytest.raises(ValueError, match=what):
            figures.draw(kind, kept)
    assert rows(done("plot", "curves", tmp_path, "-o", tmp_path / "a.svg"))["figure"] == str(tmp_path / "a.svg")


def test_every_kind_is_written_as_vectors_and_the_same_runs_give_the_same_bytes(runs, tmp_path):
    endings = {kind: (".svg", ".pdf") if kind in ("curves", "toy-densities") else (".svg",) for kind in figures.KINDS}
    for kind, figure in drawable(runs).items():
        for ending in endings[kind]:
            figures.save(figure, tmp_path / f"{kind}{ending}")
        tags = {element.tag.rpartition("}")[2] for element in ElementTree.parse(tmp_path / f"{kind}.svg").iter()}
        assert "path" in tags
        assert "image" not in tags, kind
    assert (tmp_path / "curves.pdf").read_bytes().startswith(b"%PDF")
    for kind, figure in drawable(runs).items():
        for ending in endings[kind]:
            figures.save(figure, tmp_path / f"again{ending}")
            assert (tmp_path / f"again{ending}").read_bytes() == (tmp_path / f"{kind}{ending}").read_bytes(), kind


def test_a_run_that_is_there_twice_counts_once(out, runs, tmp_path, monkeypatch):
    """In its folder and a leaderboard, in a copy, under another path: a band over it would be narrower than it is."""
    done("leaderboard", "build", out, "--out", tmp_path / "board", FLNOISEBENCH_COMMIT="c" * 40)
    shutil.copytree(out, tmp_path / "copy")
    monkeypatch.chdir(out)
    for places in ((tmp_path / "board", out), (out, tmp_path / "copy"), (out, Path("."))):
        found = figures.load(places)
        assert sorted(str(run.settings.folder(Path())) for run in found) == sorted(
            str(run.settings.folder(Path())) for run in runs
        )
        assert all(run.federation for run in found)  # which the folders say


def test_a_line_is_the_mean_over_draws_and_its_band_a_standard_deviation(runs):
    first, second = of(runs, "fedavg")

    def with_accuracies(run, *values):
        pairs = zip(run.rounds, values, strict=True)
        return run._replace(rounds=[one.model_copy(update={"accuracy": value}) for one, value in pairs])

    by_hand = [with_accuracies(first, 10.0, 80.0, 81.0, None), with_accuracies(second, 30.0, 90.0, 81.0, 85.0)]
    x, mean, deviation = figures._series(by_hand, lambda record: record.accuracy)
    assert x.tolist() == [1, 2, 3]  # round 4 has a number in one run only
    assert mean.tolist() == [20.0, 85.0, 81.0]
    assert deviation == pytest.approx([200**0.5, 50**0.5, 0.0])
    place = figures.draw("curves", by_hand).axes[0]
    assert place.lines[0].get_ydata().tolist() == [20.0, 85.0, 81.0]
    band = place.collections[0].get_paths()[0].vertices[:, 1]
    assert (band.min(), band.max()) == pytest.approx((20 - 200**0.5, 85 + 50**0.5))


def test_curves_have_a_panel_a_scenario_and_a_line_a_method(runs):
    figure = figures.draw("curves", runs)
    (place,) = figure.axes
    assert {line.get_label() for line in place.lines} == {run.label for run in runs}
    moved = [run._replace(panel="another") if run.settings.method == "fedavg" else run for run in runs]
    assert [len(axes.lines) for axes in figures.draw("curves", moved).axes] == [1, 2]


def test_bars_of_clients_are_the_wrong_labels_that_the_result_counts(runs):
    run = of(runs, "fedcova")[0]
    before, after = run.result.wrong_labels_before, run.result.wrong_labels_after
    samples = sum(client["size"] for client in run.federation["clients"])
    assert 100 * sum(before) / samples == pytest.approx(run.result.label_noise_before, abs=1e-3)
    assert 100 * sum(after) / samples == pytest.approx(run.result.label_noise_after, abs=1e-3)
    assert before != after
    assert before == [round(client["size"] * client["realised"]) for client in run.federation["clients"]]
    (place,) = figures.draw("clients", [run]).axes
    assert [patch.get_height() for patch in place.patches] == [*before, *after]
    (place,) = figures.draw("noise", [run]).axes
    right = [client["size"] - wrong for client, wrong in zip(run.federation["clients"], before, strict=True)]
    assert [patch.get_height() for patch in place.patches] == pytest.approx([*right, *before], abs=1e-2)
    more = {"wrong_labels_before": [count + 2 for count in before]}
    another = run._replace(result=run.result.model_copy(update=more))
    (place,) = figures.draw("clients", [run, another]).axes  # of one line: their mean
    assert [patch.get_height() for patch in place.patches] == [*(count + 1 for count in before), *after]


def test_sensitivity_shows_the_mean_of_the_last_five_rounds_over_the_setting(runs):
    own = of(runs, "fedcova")
    points = figures.draw("sensitivity", own, "alpha").axes[1].containers[0].lines[0]
    assert points.get_xdata().tolist() == [2.0, 7.0]
    reached = {run.settings.method_settings["alpha"]: run.result.accuracy.last5_mean for run in own}
    assert points.get_ydata().tolist() == [reached[2.0], reached[7.0]]
    accuracy = own[0].result.accuracy
    luckier = accuracy.model_copy(update={"last5_mean": accuracy.last5_mean + 10})
    again = own[0]._replace(result=own[0].result.model_copy(update={"accuracy": luckier}))
    bars = figures.draw("sensitivity", [*own, again], "alpha").axes[1].containers[0].lines[2][0].get_segments()
    middle, half = accuracy.last5_mean + 5, 50**0.5  # the sample's deviation of two that lie ten points apart
    assert bars[0][:, 1] == pytest.approx([middle - half, middle + half])


def test_sensitivity_is_drawn_over_settings_that_may_be_none_or_lists(runs):
    own = of(runs, "fedcova")
    for over, values in (
        (("method_settings", "k1"), {"3": 3, "none": None}),
        (("scenario", "noise", "ids"), {"[0, 2]": (0, 2), "[1]": (1,)}),
        (("method_settings", "correct"), {"false": False, "true": True}),
        (("method_settings", "eps2"), {"1234567": 1234567.0, "1234567.5": 1234567.5}),  # two that differ
    ):
        varied = [
            run._replace(settings=figures._with(run.settings, over, value))
            for run, value in zip(own, values.values(), strict=True)
        ]
        name = ".".join(over).removeprefix("method_settings.").removeprefix("scenario.")
        *panels, axes = figures.draw("sensitivity", varied, name).axes
        assert [tick.get_text() for tick in axes.get_xticklabels()] == list(values)
        legends = [text.get_text() for panel in panels for text in panel.get_legend().get_texts()]
        assert sorted(legends) == sorted(f"{name} = {value}" for value in values)


def test_costs_are_those_of_a_round(runs):
    figure = figures.draw("costs", of(runs, "fedavg")[:1])
    result = of(runs, "fedavg")[0].result
    up, down, seconds, images, memory = (axes.patches[0].get_width() for axes in figure.axes)
    assert (up, down) == pytest.approx((result.bytes_up / 4 / 1e6, result.bytes_down / 4 / 1e6))
    assert (seconds, images) == pytest.approx((result.seconds["round"] / 4, result.images["trained"] / 4))
    assert memory == pytest.approx(result.peak_memory / 1e6)  # the highest of all rounds


def test_no_axis_calls_accuracies_on_other_images_those_of_the_test(runs):
    moved = [run._replace(settings=run.settings.model_copy(update={"evaluate_on": "validation"})) for run in runs]
    for kind, over in (("curves", None), ("correction", None), ("sensitivity", "alpha")):
        shown = moved if kind == "curves" else of(moved, "fedcova")
        assert not any("test" in axes.get_ylabel() for axes in figures.draw(kind, shown, over).axes)


def test_a_failed_or_unfinished_run_is_in_no_bar_and_no_point(runs):
    def failed(run):
        return run._replace(result=run.result.model_copy(update={"status": "failed", "failure": "NaN", "bytes_up": 1}))

    first, second = of(runs, "fedcova")
    with_draws = [first, failed(first), first._replace(result=None), second]
    cut = [run._replace(rounds=run.rounds[:1]) if i in (1, 2) else run for i, run in enumerate(with_draws)]
    points = figures.draw("sensitivity", cut, "alpha").axes[1].containers[0].lines[0]
    assert points.get_ydata().tolist() == [run.result.accuracy.last5_mean for run in (first, second)]
    assert figures.draw("costs", [first, failed(first)]).axes[0].patches[0].get_width() == pytest.approx(
        first.result.bytes_up / 4 / 1e6
    )
    with pytest.raises(ValueError, match="none of these runs is complete"):
        figures.draw("costs", [failed(first)])
    with pytest.raises(ValueError, match="no complete run says"):
        figures.draw("clients", [failed(first)])


def test_a_setting_is_found_wherever_it_is(runs):
    settings = of(runs, "fedcova")[0].settings
    assert figures.setting(settings, "alpha") == settings.method_settings["alpha"]
    assert figures.setting(settings, "partition.alpha") == 5.0
    assert figures.setting(settings, "noise.rho") == 0.6
    assert figures.setting(settings, "protocol.optimiser.lr") == 0.1
    assert figures.setting(settings, "clients") == 5
    with pytest.raises(registry.UnknownName, match=r"Did you mean protocol\.rounds"):
        figures.setting(settings, "protocol.round")


def seen(colour: str, lacking: str) -> np.ndarray:
    """CIELAB of a colour as somebody without one kind of cone sees it (Machado et al. 2009, severity 1)."""
    matrix = {
        "": np.eye(3),
        "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
        "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    }[lacking]
    value = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)
    linear = np.clip(np.array(matrix) @ linear, 0, 1)
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    xyz = np.array(to_xyz) @ linear / [0.9505, 1.0, 1.089]
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("lacking", ["", "protan", "deutan"])
def test_the_colour_blind_can_tell_the_colours_apart(lacking):
    gaps = {(a, b): np.linalg.norm(seen(a, lacking) - seen(b, lacking)) for a, b in combinations(figures.COLOURS, 2)}
    assert min(gaps.values()) > 10, min(gaps, key=gaps.get)  # 2.3 is just noticeable
    assert np.linalg.norm(seen("#00A000", "deutan") - seen("#D06000", "deutan")) < 25  # red and green come close


def test_no_two_of_many_methods_look_alike():
    looks = figures._looks(str(i) for i in range(28)).values()
    assert len({(look["color"], look["marker"], look["linestyle"]) for look in looks}) == 28


def test_a_label_says_what_distinguishes_a_run_and_no_more(runs):
    assert [run.label for run in runs] == ["fedavg", "fedavg", "fedcova, alpha=2.0", "fedcova, alpha=7.0"]


BASE = {"method": "fedavg", "rounds": 4}


def labelled(*options):
    """(label, panel) of runs with these options on top of BASE."""
    made = [figures.Run("", "", resolve(**{**BASE, **one}), [], None) for one in options]
    return [(run.label, run.panel) for run in figures.named(made)]


@pytest.mark.parametrize(
    ("other", "names"),
    [
        ({"changes": ["protocol.optimiser.lr=0.03"]}, ("lr=0.1", "lr=0.03")),
        ({"changes": ["protocol.batch=64"]}, ("batch=32", "batch=64")),
        ({"changes": ["protocol.last_batch=drop"]}, ("last_batch=keep", "last_batch=drop")),
        ({"changes": ["protocol.model=small-cnn"]}, ("model=mlp", "model=small-cnn")),
        ({"rounds": 5}, ("rounds=4", "rounds=5")),
        ({"track": "own"}, ("track=common", "track=own")),
        ({"precision": "bf16"}, ("precision=fp32", "precision=bf16")),
        ({"deterministic": False}, ("deterministic=True", "deterministic=False")),
        ({"oracle": "clean-samples"}, ("", "oracle clean-samples")),
    ],
)
def test_what_differs_in_the_training_parts_lines_and_names_them(other, names):
    labels = [", ".join(["fedavg", name]) if name else "fedavg" for name in names]
    again = {"draw": 1, "seed": 1}  # averaged over, and nothing else
    found = labelled({}, other, again, {**other, **again})
    assert [label for label, _ in found] == labels * 2
    assert len({panel for _, panel in found}) == 1
    # the same two in two scenarios
    found = labelled({"clients": 5}, {"clients": 10, **other})
    assert found == [(labels[0], "5 clients"), (labels[1], "10 clients")]


@pytest.mark.parametrize(
    ("other", "names"),
    [
        ({"dataset": "synthetic"}, ("digits", "synthetic")),
        ({"noise_changes": {"rho": 0.4}}, ("fedcova-sym-rho0.6-tau0.7", "fedcova-sym-rho0.4-tau0.7")),
        ({"noise_changes": {"mass": "stratified"}}, ("noise.mass=none", "noise.mass=stratified")),
        ({"partition_changes": {"law": "iid"}}, ("bernoulli-dirichlet-p0.5-alpha5", "iid")),
        ({"clients": 5}, ("20 clients", "5 clients")),
        ({"holdout": 0.2}, ("holdout=0.0", "holdout=0.2")),
        ({"evaluate_on": "test-a"}, ("on test", "on test-a")),
    ],
)
def test_what_differs_in_the_scenario_parts_panels_and_names_them(other, names):
    assert labelled({}, other, {"draw": 1}) == [("fedavg", names[0]), ("fedavg", names[1]), ("fedavg", names[0])]


def test_one_split_is_one_panel_wherever_its_file_lay(tmp_path):
    for name in ("a.csv", "b.csv"):
        (tmp_path / name).write_text("index,client\n" + "".join(f"{i},{i % 5}\n" for i in range(1438)))
    cuts = [{"law": "manifest", "file": str(tmp_path / name)} for name in ("a.csv", "b.csv")]
    (first, second) = labelled(*({"partition_changes": cut, "clients": 5} for cut in cuts))
    assert first == second


def test_what_is_equal_everywhere_is_in_no_name_but_that_of_the_only_panel():
    changes = ["protocol.optimiser.lr=0.03"]
    whole = "digits, fedcova-sym-rho0.6-tau0.7, bernoulli-dirichlet-p0.5-alpha5, 20 clients"
    assert labelled({"changes": changes}, {"changes": changes, "method": "fedcova"}) == [
        ("fedavg", whole),
        ("fedcova", whole),
    ]


def test_sensitivity_averages_over_neither_methods_nor_scenarios(runs):
    own = of(runs, "fedcova")
    lr = figures._with(own[0].settings, ("protocol", "optimiser", "lr"), 0.03)
    rho = [figures._with(run.settings, ("scenario", "noise", "rho"), 0.2) for run in own]
    several = [*own, own[0]._replace(settings=lr), *(run._replace(settings=s) for run, s in zip(own, rho, strict=True))]
    figure = figures.draw("sensitivity", several, "alpha")
    rho2, rho6 = (f"fedcova-sym-rho{value}-tau0.7" for value in (0.2, 0.6))
    titles = [f"fedcova, lr=0.1, {rho6}", f"fedcova, lr=0.03, {rho6}", f"fedcova, lr=0.1, {rho2}"]
    assert [axes.get_title().replace("\n", " ") for axes in figure.axes[:3]] == titles
    assert [len(axes.lines) for axes in figure.axes[:3]] == [2, 1, 2]
    assert [line.get_label() for line in figure.axes[3].containers] == titles
    # over a field of the scenario, the values of alpha are lines
    figure = figures.draw("sensitivity", several[:2] + several[3:], "noise.rho")
    assert [line.get_label() for line in figure.axes[2].containers] == ["fedcova, alpha=2.0", "fedcova, alpha=7.0"]


def test_a_name_between_dollars_is_printed_and_no_formula(runs, tmp_path):
    name = r"fedcova, kind=$\nofunction{x}$ $y_z$"
    named = [run._replace(label=name, panel=name) for run in runs]
    for kind in ("curves", "costs"):
        figures.save(figures.draw(kind, named), tmp_path / "a.svg")  # which refused the formula
        assert f"<!-- {name} -->" in (tmp_path / "a.svg").read_text()


def test_long_names_are_not_cut_off(runs):
    long = [run._replace(label=f"{run.label}, {'a setting with a long name=0.1, ' * 2}") for run in runs]
    figure = figures.draw("correction", long)
    figure.draw_without_rendering()
    legend, whole = figure.legends[0].get_window_extent(), figure.bbox
    assert whole.x0 <= legend.x0 < legend.x1 <= whole.x1
    figure = figures.draw("costs", long)
    figure.draw_without_rendering()
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles == [title for title, _ in figures.COSTS]
    for axes in figure.axes:
        extent = axes.get_tightbbox()
        assert figure.bbox.x0 <= extent.x0 < extent.x1 <= figure.bbox.x1


def test_costs_are_averaged_over_neither_scenarios_nor_machines(runs):
    first, second = of(runs, "fedavg")
    other = figures._with(first.settings, ("scenario", "clients"), 9)
    place = figures.draw("costs", figures.named([first, second, first._replace(settings=other)])).axes[0]
    assert [text.get_text() for text in place.get_yticklabels()] == ["5 clients", "9 clients"]
    environment = {**second.result.environment, "lanes": 7}
    elsewhere = second._replace(result=second.result.model_copy(update={"environment": environment}))
    place = figures.draw("costs", [first, elsewhere]).axes[0]
    lanes = first.result.environment["lanes"]
    assert [text.get_text() for text in place.get_yticklabels()] == [f"fedavg, lanes={lanes}", "fedavg, lanes=7"]


def test_what_cannot_be_drawn_is_said(out, runs, tmp_path):
    averaging = of(runs, "fedavg")
    with pytest.raises(ValueError, match="none of these runs has the diagnostic phi"):
        figures.draw("orthogonality", averaging)
    with pytest.raises(ValueError, match="none of these runs has a round with an accuracy"):
        figures.draw("curves", [run._replace(rounds=()) for run in averaging])
    with pytest.raises(ValueError, match="clients is 5 in all of these runs"):
        figures.draw("sensitivity", averaging, "clients")
    old = averaging[0]._replace(result=averaging[0].result.model_copy(update={"wrong_labels_after": None}))
    with pytest.raises(ValueError, match="no complete run says how many labels"):
        figures.draw("clients", [old])
    with pytest.raises(ValueError, match="is unfinished"):
        figures.draw("noise", [averaging[0]._replace(result=None)])
    assert "Did you mean curves" in refused("plot", "curvse", out)
    assert "curves is drawn of runs: name some" in refused("plot", "curves")
    assert "toy-densities is not drawn of runs" in refused("plot", "toy-densities", out)
    assert "sensitivity needs --over NAME" in refused("plot", "sensitivity", out)
    assert "curves takes no --over" in refused("plot", "curves", out, "--over", "alpha")
    assert "a figure's name ends in .svg, .pdf, .png" in refused("plot", "curves", out, "--out", tmp_path / "a.gif")
    assert "holds no run" in refused("plot", "curves", tmp_path)


def test_plot_writes_the_file_and_names_it(out, tmp_path):
    path = tmp_path / "new" / "curves.png"
    run = call("plot", "curves", out, "--out", path)
    assert rows(run.stdout) == {"figure": str(path)}
    assert "not all on the same draws, so compare with care: fedavg (0 1); fedcova, alpha=2.0 (0);" in run.stderr
    assert "same draws" not in call("plot", "noise", out, "--out", path).stderr  # which averages over none
    assert "same draws" not in call("plot", "curves", *out.rglob("draw0-seed0"), "--out", path).stderr
    assert path.read_bytes().startswith(b"\x89PNG")
    assert set(rows(done("plot", "list"))) == set(figures.KINDS)


def test_without_matplotlib_the_error_says_what_to_install(out, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "pip install 'flnoisebench[plots]'" in refused("plot", "curves", out)


def test_an_unfinished_run_has_a_curve(out, tmp_path):
    folder = tmp_path / "half"
    folder.mkdir()
    source = next(run for run in out.rglob("settings.json")).parent
    for name in ("settings.json", "records.jsonl"):
        text = (source / name).read_text()
        (folder / name).write_text("".join(text.splitlines(True)[:2]) if name == "records.jsonl" else text)
    (run,) = figures.load([folder])
    assert run.result is None
    assert len(figures.draw("curves", [run]).axes[0].lines[0].get_xdata()) == 2


# ------------------------------------------------------------------------------------------ the toy example


def test_the_toy_densities_are_those_of_the_papers_gaussians():
    # det(diag(4, .2)) = .8 and det(diag(5, 1.2)) = 6; at (2, 0) the exponent is -4/(2*4)
    assert tolerance.density(np.zeros(1), np.zeros(1), (4.0, 0.2))[0] == pytest.approx(1 / (2 * math.pi * 0.8**0.5))
    assert tolerance.tolerant((4.0, 0.2), 2.0) == (5.0, 1.2)
    at = tolerance.density(np.array([2.0]), np.array([0.0]), (4.0, 0.2))[0]
    assert at == pytest.approx(math.exp(-0.5) / (2 * math.pi * 0.8**0.5))
    with pytest.raises(ValueError, match="cannot be -1"):
        tolerance.tolerant((4.0, 0.2), -1)


@pytest.mark.parametrize("eps2", tolerance.EPS2)
def test_the_toy_boundary_is_where_the_methods_own_classifier_is_undecided(eps2):
    limit = tolerance.boundary(eps2)
    x = np.array([-5.0, -3.0, -2.0, 2.0, 3.0, 4.0])
    y = np.sqrt((limit.c - limit.c_x * x**2) / limit.c_y)
    assert np.isfinite(y).all()
    method = sys.modules[registry.load_method("fedcova").__module__]
    both = [torch.diag(torch.tensor(one, dtype=torch.float64)) for one in (tolerance.A, tolerance.B)]
    statistics = {"sigma": torch.stack(both), "mean": None, "n": torch.tensor([7, 7])}
    classifier = method.readout(statistics, 1.0, posterior=True, shift=eps2 / 2)
    score = method.scores(torch.tensor(np.stack([x, y], axis=1)), classifier)
    assert (score[:, 0] - score[:, 1]).abs().max() < 1e-12
    assert limit.kind == "hyperbola"  # which the paper calls almost circular for the largest eps2
    slopes = {0.0: (4.75 / (5 - 1 / 3)) ** 0.5, 8.0: ((1 / 4.2 - 1 / 8) / (1 / 4.2 - 1 / 7)) ** 0.5}
    assert eps2 == 2.0 or limit.slope == pytest.approx(slopes[eps2])


def test_toy_samples_spread_as_their_variances_say_and_differ_by_eps2_alone():
    for eps2 in tolerance.EPS2:
        a, b = tolerance.samples(eps2, 20_000)
        assert a.var(axis=0) == pytest.approx(tolerance.tolerant(tolerance.A, eps2), rel=0.05)
        assert b.var(axis=0) == pytest.approx(tolerance.tolerant(tolerance.B, eps2), rel=0.05)
    plain, more = tolerance.samples(0.0, 5)[0], tolerance.samples(8.0, 5)[0]
    assert (more / plain) == pytest.approx(np.tile([2**0.5, 21**0.5], (5, 1)))


def test_a_result_of_before_the_counts_still_loads_and_says_so(out, runs):
    text = (next(out.rglob("result.json"))).read_text()
    content = records.RunResult.model_validate_json(text).model_dump(mode="json")
    del content["wrong_labels_before"], content["wrong_labels_after"]
    assert records.RunResult.model_validate(content).wrong_labels_after is None
