"""What is said of methods: paired differences, Holm's correction, mean ranks, equal budgets, and the printed tables."""

import csv
import io
import json
import math

import pytest
import scipy
from command_line import call, done, refused
from leaderboard_entries import entry, only, saved

from flnoisebench import published
from flnoisebench.leaderboard import comparison, rows, rows_of, tables
from flnoisebench.leaderboard.comparison import at_budget, critical_difference, holm, paired
from flnoisebench.leaderboard.rows import cell_of

# --------------------------------------------------------------------------------------------------- differences


def test_a_paired_interval_by_hand():
    found = paired({0: 10.0, 1: 12.0, 2: 17.0, 9: 99.0}, {0: 9.0, 1: 10.0, 2: 14.0, 7: 1.0})
    assert found["draws"] == (0, 1, 2)  # differences 1, 2, 3: mean 2, standard error 1 / sqrt 3, t(.975, 2) = 4.3027
    assert found["mean"] == 2
    assert found["low"] == pytest.approx(2 - 4.302653 / math.sqrt(3), abs=1e-6)
    assert found["high"] == pytest.approx(2 + 4.302653 / math.sqrt(3), abs=1e-6)
    assert found["p"] == pytest.approx(0.074180, abs=1e-6)  # 2 (1 - F(2 sqrt 3)), F(t) = 1/2 + t / (2 sqrt(2 + t^2))


def test_fewer_than_two_shared_draws_have_no_interval():
    assert paired({0: 3.0}, {0: 1.0}) == {"draws": (0,), "mean": 2.0, "low": None, "high": None, "p": None}
    assert paired({0: 3.0}, {1: 1.0})["mean"] is None


def test_the_same_difference_in_every_draw_proves_nothing():
    none = {"low": None, "high": None}
    equal, ahead = {0: 91.3, 1: 92.1}, {0: 91.4, 1: 92.2}
    assert paired(equal, equal) == {"draws": (0, 1), "mean": 0, **none, "p": 1.0}
    # 91.4 - 91.3 and 92.2 - 92.1 are not the same to the last bit, which is no spread either
    assert paired(ahead, equal) == {"draws": (0, 1), "mean": pytest.approx(0.1), **none, "p": None}
    assert paired({0: 3.0, 1: 4.0}, {0: 1.0, 1: 2.0}) == {"draws": (0, 1), "mean": 2, **none, "p": None}


def test_a_paired_test_is_scipys():
    a, b = {0: 91.2, 3: 90.1, 4: 95.0, 7: 92.2}, {0: 90.0, 3: 91.0, 4: 92.5, 7: 92.1, 9: 1.0}
    theirs = scipy.stats.ttest_rel([*a.values()], [*b.values()][:4])
    interval = theirs.confidence_interval(0.9)
    found = paired(a, b, 0.9)
    assert (found["low"], found["high"], found["p"]) == pytest.approx((interval.low, interval.high, theirs.pvalue))


def test_holms_correction_by_hand():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])  # Holm 1979
    assert holm([0.5, 0.9]) == [1, 1]
    assert holm([]) == []


def cell(values, *, rho=0.6, draws=(0, 1), **settings):
    """Entries of several methods: {method: accuracy by draw} in one scenario."""
    return [
        entry((value,), method=method, draw=draw, noise_changes={"rho": rho}, **settings)
        for method, by_draw in values.items()
        for draw, value in zip(draws, by_draw, strict=True)
    ]


def test_differences_pair_draws_average_seeds_and_are_corrected_together():
    runs = cell({"fedavg": (50, 60), "fedcova": (52, 63), "fedavg-relabel": (51, 62)})
    runs += [entry((56.0,), method="fedcova", draw=0, seed=1, noise_changes={"rho": 0.6})]
    runs += [entry((99.0,), oracle="clean-samples", draw=draw, noise_changes={"rho": 0.6}) for draw in (0, 1)]
    relabel, cova = comparison.differences(rows_of(runs), runs)
    assert (cova.method, cova.against) == ("Fedcova", "Fedavg")
    assert cova.mean == 3.5  # draw 0: (52 + 56) / 2 - 50; draw 1: 3
    assert relabel.mean == 1.5
    assert cova.p < relabel.p == relabel.p_holm  # 1 x the larger
    assert cova.p_holm == 2 * cova.p
    with pytest.raises(ValueError, match="Did you mean fedcova"):
        comparison.differences(rows_of(runs), runs, against="fedcov")


def test_a_failed_run_is_in_no_difference():
    runs = [entry((50.0,)), entry((99.0,), seed=1, status="failed"), entry((99.0,), draw=1, status="failed")]
    assert comparison.by_draw(runs) == {0: 50}


def test_where_nothing_is_drawn_runs_are_told_apart_and_paired_by_seed():
    """As of a list of images that names its clients and has its labels already."""
    found = {"noise": "clean", "partition_changes": {"law": "natural"}, "clients": 3}
    values = {"fedavg": (50.0, 60.0), "fedcova": (51.0, 63.0)}
    for holdout, apart in ((0.0, {0: 50, 1: 60}), (0.2, {0: 55})):  # a hold-out is drawn
        runs = [
            entry((value,), method=method, seed=seed, holdout=holdout, **found)
            for method, own in values.items()
            for seed, value in enumerate(own)
        ]
        assert comparison.by_draw(runs[:2]) == apart
        (difference,) = comparison.differences(rows_of(runs), runs)
        assert (difference.draws, difference.mean, difference.p is None) == (tuple(apart), 2, bool(holdout))
        for row in rows_of(runs):
            assert row.draws == " ".join(map(str, apart))
            assert ("single-draw" in row.doubts) == bool(holdout)


def test_a_difference_without_a_test_is_none_of_those_that_are_corrected_together():
    runs = cell({"fedavg": (50, 60), "fedcova": (52, 63)}) + cell({"fedavg-relabel": (51,)}, draws=(0,))
    relabel, cova = comparison.differences(rows_of(runs), runs)
    assert (relabel.p, relabel.p_holm) == (None, None)
    assert cova.p_holm == cova.p  # one test


def test_a_difference_carries_the_doubts_of_both_rows():
    runs = cell({"fedavg": (50, 60), "fedcova": (52, 63)}, evaluate_on="test-a")
    runs += [entry((10.0,), draw=2, status="failed", evaluate_on="test-a", noise_changes={"rho": 0.6})]
    (found,) = comparison.differences(rows_of(runs), runs)
    assert found.doubts == ("wrong-protocol", "failed-runs", "choosing-set")


# --------------------------------------------------------------------------------------------------------- ranks


def test_nemenyis_distance_is_demsars():
    # Demsar 2006, table 5: q(.05) is 2.343, 2.569, 2.728 for 3, 4, 5 classifiers; his example: 4 on 14 sets, 1.25
    for k, q in ((3, 2.343), (4, 2.569), (5, 2.728)):
        assert critical_difference(k, 10) == pytest.approx(q * math.sqrt(k * (k + 1) / 60), abs=2e-3)
    assert critical_difference(4, 14) == pytest.approx(1.25, abs=0.005)


RHOS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)


def test_mean_ranks_by_hand():
    runs = []
    for i, rho in enumerate(RHOS):
        values = {"fedavg": (50,), "fedcova": (60,), "fedavg-relabel": (55,) if i < 4 else (60,)}
        runs += cell(values, rho=rho, draws=(0,))
    found = comparison.ranking(rows_of(runs), runs)
    assert found.cells == 6
    assert found.ranks == pytest.approx(
        {"Fedcova": (4 * 1 + 2 * 1.5) / 6, "Fedavg-Relabel": (4 * 2 + 3) / 6, "Fedavg": 3}
    )
    # Friedman with ties: rank sums 7, 11, 18 of 36; 12/(6*3*4) (49 + 121 + 324) - 3*6*4 = 10.333, over 1 - 12/(6*24)
    assert found.chi2 == pytest.approx((494 / 6 - 72) / (1 - 12 / 144))
    assert found.distance == pytest.approx(critical_difference(3, 6))
    assert found.groups == (("Fedcova", "Fedavg-Relabel"), ("Fedavg-Relabel", "Fedavg"))  # 1.353 apart are 1.833
    drawn = comparison.diagram(found)
    assert [line.split()[1] for line in drawn.splitlines()[3:]] == ["1.17", "1.83", "3.00"]
    assert "critical difference 1.35" in drawn
    # rank 1 stands in column 0, rank 3 in column 59
    assert [line.index("*") for line in drawn.splitlines()[3:]] == [5, 25, 59]
    assert drawn.splitlines()[2].rindex("|") == 40
    nearer = comparison.ranking(rows_of(runs), runs, alpha=0.1).distance
    assert nearer == critical_difference(3, 6, 0.1) < found.distance


def test_a_group_is_as_large_as_can_be_and_ranks_a_distance_apart_are_told_apart():
    ranks = {"a": 1.0, "b": 2.0, "c": 2.5}
    assert comparison._groups(ranks, 2.0) == (("a", "b", "c"),)  # and not b and c once more
    assert comparison._groups(ranks, 1.0) == (("b", "c"),)
    assert comparison._groups(ranks, 0.5) == ()


def test_a_method_all_of_whose_runs_failed_keeps_no_other_from_being_ranked():
    values = {"fedavg": (5,), "fedcova": (6,), "fedavg-relabel": (7,)}
    runs = [one for rho in RHOS for one in cell(values, rho=rho, draws=(0,))]
    failed = entry((9.0,), method="rofl", status="failed", noise_changes={"rho": RHOS[0]})
    assert comparison.ranking(rows_of([*runs, failed]), [*runs, failed]) == comparison.ranking(rows_of(runs), runs)


@pytest.mark.parametrize(
    ("values", "chi2", "p"),
    [
        ((5, 5, 5), 0, 1),
        ((5, 6, 7), 12, math.exp(-6)),  # the same in every cell: rank sums 6, 12, 18; two degrees of freedom
    ],
)
def test_friedmans_test_of_methods_that_are_equal_and_of_such_as_always_differ_alike(values, chi2, p):
    methods = dict(zip(("fedavg", "fedcova", "fedavg-relabel"), ((value,) for value in values), strict=True))
    runs = [one for rho in RHOS for one in cell(methods, rho=rho, draws=(0,))]
    found = comparison.ranking(rows_of(runs), runs)
    assert (found.chi2, found.p) == pytest.approx((chi2, p))


def test_there_are_no_ranks_over_fewer_than_six_cells_or_three_methods():
    runs = [
        one
        for rho in RHOS[:5]
        for one in cell({"fedavg": (5,), "fedcova": (6,), "fedavg-relabel": (7,)}, rho=rho, draws=(0,))
    ]
    with pytest.raises(
        ValueError, match="6 cells or more that hold all 3 methods on one draw or more, and there are 5"
    ):
        comparison.ranking(rows_of(runs), runs)
    two = [one for rho in RHOS for one in cell({"fedavg": (5,), "fedcova": (6,)}, rho=rho, draws=(0,))]
    with pytest.raises(ValueError, match="three methods or more, and here are 2"):
        comparison.ranking(rows_of(two), two)
    runs += two[-2:]  # a sixth cell that lacks one
    with pytest.raises(ValueError, match="there are 5"):
        comparison.ranking(rows_of(runs), runs)
    with pytest.raises(ValueError, match="unknown method of these rows 'fedcor'"):
        comparison.ranking(rows_of(runs), runs, ["fedcor"])


def test_where_nobody_ran_fedavg_it_is_said_how_to_name_another():
    runs = cell({"fedcova": (5, 6), "fedcorr": (6, 5)}, draws=(0, 1))
    with pytest.raises(ValueError, match=r"rows 'fedavg'\..*Known: fedcorr, fedcova\. --against says"):
        comparison.differences(rows_of(runs), runs)
    assert len(comparison.differences(rows_of(runs), runs, "fedcorr")) == 1


def test_methods_are_ranked_on_the_draws_that_all_of_them_have():
    runs = [
        one
        for rho in RHOS
        for one in cell({"fedavg": (50, 50), "fedcova": (40, 90), "fedavg-relabel": (45, 45)}, rho=rho)
    ]
    lucky = [one for one in runs if (one.settings.method, one.settings.scenario.draw) != ("fedcova", 0)]
    assert comparison.ranking(rows_of(runs), runs).ranks == {"Fedcova": 1, "Fedavg": 2, "Fedavg-Relabel": 3}
    assert comparison.ranking(rows_of(lucky), lucky).ranks == {"Fedcova": 1, "Fedavg": 2, "Fedavg-Relabel": 3}
    unlucky = [one for one in runs if (one.settings.method, one.settings.scenario.draw) != ("fedcova", 1)]
    apart = [one for one in unlucky if (one.settings.method, one.settings.scenario.draw) != ("fedavg-relabel", 0)]
    assert comparison.ranking(rows_of(unlucky), unlucky).ranks == {"Fedavg": 1, "Fedavg-Relabel": 2, "Fedcova": 3}
    with pytest.raises(ValueError, match="hold all 3 methods on one draw or more, and there are 0"):
        comparison.ranking(rows_of(apart), apart)


def test_a_method_is_ranked_by_its_plain_rows_where_another_arena_has_variants_alone():
    values = {"fedavg": (5,), "fedcova": (6,), "fedavg-relabel": (7,)}
    runs = [one for rho in RHOS for one in cell(values, rho=rho, draws=(0,))]
    variant = entry((9.0,), method="fedcova", track="own", changes=["eta=0"])
    ranked = comparison.ranking(rows_of([*runs, variant]), [*runs, variant], list(values))
    assert ranked == comparison.ranking(rows_of(runs), runs)


def test_the_plain_row_is_the_one_with_the_fewest_values_however_long_their_names():
    few = entry((50.0,), method="fedcova", track="own", changes=["classifier_eps2=0.25"])
    many = entry((60.0,), method="fedcova", track="own", changes=["d=8", "eta=0"])
    rows = rows_of([few, many])
    assert comparison.plain(rows, "fedcova").accuracy_mean == 50
    presets = [entry(method="rofl", preset=name) for name in ("code-literal", "default")]
    assert comparison.plain(rows_of(presets), "rofl").preset == "default"  # the first preset wins a tie


def test_an_oracle_is_in_no_comparison():
    runs = [
        one
        for rho in RHOS
        for one in cell({"fedavg": (5,), "fedcova": (6,), "fedavg-relabel": (7,)}, rho=rho, draws=(0,))
    ]
    bound = [entry((99.0,), oracle="clean-samples", noise_changes={"rho": rho}) for rho in RHOS]
    assert comparison.ranking(rows_of([*runs, *bound]), [*runs, *bound]) == comparison.ranking(rows_of(runs), runs)
    assert len(comparison.equal_budget(rows_of([runs[0], bound[0]]), [runs[0], bound[0]], "rounds")) == 0


# ------------------------------------------------------------------------------------------------- equal budgets


def test_what_was_reached_within_a_budget_by_hand():
    one = entry((10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0), seconds=2.0, images=100)
    assert at_budget(one, "rounds", 6) == (40, 6)  # 20 to 60
    assert at_budget(one, "images", 250) == (15, 2)
    assert at_budget(one, "seconds", 6.0) == (20, 3)
    assert at_budget(one, "seconds", 1.9) == (None, 0)
    assert at_budget(entry((10.0, 20.0, 30.0), seconds=0.1), "seconds", 0.3) == (20, 3)  # .1 + .1 + .1 is above .3
    assert at_budget(entry((None, 20.0)), "rounds", 1) == (None, 1)


def test_who_reached_what_is_said_with_the_draws_that_it_is_over():
    runs = [entry((50.0,), draw=draw) for draw in (0, 1)] + [entry((60.0,), draw=7, method="fedcova")]
    (found,) = comparison.equal_budget(rows_of(runs), runs, "rounds")
    assert [one.draws for one in found.reached] == [(0, 1), (7,)]
    runs[1] = entry((60.0,), draw=1)
    (found,) = comparison.equal_budget(rows_of(runs), runs, "rounds")
    assert [one.std for one in found.reached] == [pytest.approx(50**0.5), None]  # of a sample, as everywhere


def test_an_equal_budget_is_the_least_that_any_run_spent():
    fast = entry((10.0, 20.0, 30.0), seconds=1.0, images=300)
    slow = entry((40.0, 50.0, 60.0), method="fedcova", seconds=3.0, images=100)
    runs = [fast, slow]
    (images,) = comparison.equal_budget(rows_of(runs), runs, "images")
    assert images.budget == 300
    assert {one.name: (one.accuracy, one.rounds) for one in images.reached} == {"Fedavg": (10, 1), "Fedcova": (50, 3)}
    (seconds,) = comparison.equal_budget(rows_of(runs), runs, "seconds")
    assert seconds.budget == 3
    assert {one.name: (one.accuracy, one.rounds) for one in seconds.reached} == {"Fedavg": (20, 3), "Fedcova": (40, 1)}
    runs.append(entry((10.0, 20.0, 30.0), draw=1, seconds=3.0))
    (seconds,) = comparison.equal_budget(rows_of(runs), runs, "seconds")
    assert {one.name: (one.accuracy, one.rounds) for one in seconds.reached} == {"Fedavg": (15, 2), "Fedcova": (40, 1)}


def test_seconds_are_compared_on_one_machine_only():
    gpu = {"device": "a GPU"}
    runs = [entry(), entry(method="fedcova"), entry(method="fedavg-relabel", environment=gpu)]
    (found,) = comparison.equal_budget(rows_of(runs), runs, "seconds")
    assert [one.name for one in found.reached] == ["Fedavg", "Fedcova"]
    assert found.left_out == ("Fedavg-Relabel",)
    assert found.hardware == "cpu, Abacus 3000, serial, lanes 1"
    # more runs, and no more rows
    runs += [entry(method="fedavg-relabel", draw=draw, environment=gpu) for draw in (1, 2)]
    assert comparison.equal_budget(rows_of(runs), runs, "seconds")[0].hardware == found.hardware
    here = {"sharing": "beside others"}
    runs = [entry(method="fedcova"), entry(environment=here), entry(method="fedavg-relabel", environment=here)]
    (found,) = comparison.equal_budget(rows_of(runs), runs, "seconds")
    assert (found.left_out, found.hardware) == (("Fedcova",), "cpu, Abacus 3000, serial, lanes 1, beside others")


def test_entries_are_gone_through_once_and_not_for_every_row(monkeypatch):
    """Of 154 rows of 554 runs that took a quarter of a minute."""
    runs = [entry(method=method, draw=draw) for method in ("fedavg", "fedcova", "fedavg-relabel") for draw in range(3)]
    every, asked = rows_of(runs), []
    monkeypatch.setattr(rows, "cell_of", lambda one: asked.append(one) or cell_of(one))
    comparison.differences(every, runs)
    assert len(asked) == len(runs)
    comparison.equal_budget(every, runs, "images")
    assert len(asked) == 2 * len(runs)


def test_a_row_of_failed_runs_is_said_to_have_none_and_not_to_be_on_another_machine(tmp_path):
    runs = [entry(), entry(method="fedcova"), entry(method="fedavg-relabel", status="failed")]
    said = done("leaderboard", "stats", saved(runs, tmp_path)).splitlines()
    assert [line.partition("; ")[2] for line in said if ", at equal " in line] == [
        "without a complete run: Fedavg-Relabel", "without a complete run: Fedavg-Relabel",
        "not on it: Fedavg-Relabel",
    ]  # fmt: skip


# -------------------------------------------------------------------------------------------------------- tables


@pytest.fixture
def folder(tmp_path):
    runs = cell({"fedavg": (50, 60), "fedcova": (70, 72)})
    runs += cell({"fedavg": (80, 82), "fedcova": (70, 71)}, rho=0.4)
    runs += [entry((99.0,), oracle="clean-samples", draw=draw, noise_changes={"rho": 0.6}) for draw in (0, 1)]
    return saved(runs, tmp_path / "board")


def test_a_markdown_table_is_methods_by_noise_level_with_the_best_in_bold(folder):
    lines = done("leaderboard", "table", folder).splitlines()
    assert lines[2] == "| method | (.4, .7) | (.6, .7) |"
    assert lines[4] == "| Fedavg | **81.00 ± 1.41 (2)**† | 55.00 ± 7.07 (2)† |"
    assert lines[5] == "| Fedcova | 70.50 ± 0.71 (2)† | **71.00 ± 1.41 (2)**† |"
    assert lines[6] == "| Fedavg, oracle clean-samples |  | 99.00 ± 0.00 (2)† |"  # a bound is never the best
    assert "- † wrong-protocol: all" in lines


def test_the_best_of_a_column_is_looked_for_among_rows_on_the_same_draws():
    runs = cell({"fedavg": (50, 60), "fedcova": (52, 62), "fedavg-gce": (40, 50)})
    easy = cell({"fedavg-relabel": (90, 91)}, draws=(7, 8))

    def best(entries):
        (table,) = tables.tables(rows_of(entries))
        return [name for name, cells in table.lines if cells[0].best], [n for n in table.notes[1:] if "†" not in n]

    assert best(runs) == (["Fedcova"], [])
    assert best([*runs, *cell({"rofl": (52.004, 62.004)})])[0] == ["Fedcova", "Rofl"]  # printed alike
    aside = "(.6, .7) not compared for the best, since on other draws (draws): "
    assert best([*runs, *easy]) == (["Fedcova"], [f"{aside}Fedavg-Relabel (7 8)"])
    assert best(runs[:2]) == ([], [])  # of one row
    assert best([*runs[:2], *easy]) == ([], [f"{aside}Fedavg (0 1); Fedavg-Relabel (7 8)"])
    hard = cell({"fedavg": (20,), "rofl": (30,)}, draws=(2,))  # FedAvg on draws 0 to 2, RoFL on 2 alone
    on = "(.6, .7) compared on draws 0 1, where: Fedavg 55.00"
    assert best([*runs, *hard]) == (["Fedcova"], [on, f"{aside}Rofl (2)"])
    assert best([*runs[:4], *cell({"fedcova": (0,)}, draws=(2,)), *hard[:1]])[0] == ["Fedavg"]  # two rows, on all three
    ahead = cell({"fedavg": (90, 70, 0)}, draws=(0, 1, 2))  # ahead on what they share, its mean behind
    assert best([*runs[2:], *ahead])[0] == ["Fedavg"]


def test_a_rows_accuracies_by_draw_are_in_its_table(tmp_path):
    runs = [entry((50.0,), draw=0), entry((60.5,), draw=0, seed=1), entry((70.1234,), draw=2)]
    (line,) = csv.DictReader((saved(runs, tmp_path) / "digits.csv").open())
    assert line["accuracy_by_draw"] == "0:55.25 2:70.1234"
    assert only(runs).by_draw == {0: 55.25, 2: 70.1234}


def test_a_doubt_names_its_rows_so_that_names_with_commas_can_be_told_apart(tmp_path):
    runs = [entry((50.0,), method="fedavg"), entry((60.0,), method="fedavg", oracle="clean-samples")]
    runs += cell({"fedcova": (70, 72)})
    lines = done("leaderboard", "table", saved(runs, tmp_path / "board")).splitlines()
    assert "- † single-draw: Fedavg; Fedavg, oracle clean-samples" in lines


def test_latex_is_escaped_and_bold(folder):
    text = done("leaderboard", "table", folder, "--format", "latex")
    assert r"Fedavg & \textbf{81.00 $\pm$ 1.41 (2)}$^\dagger$ & 55.00 $\pm$ 7.07 (2)$^\dagger$ \\" in text
    assert r"accuracy in \%" in text
    assert text.count("{") == text.count("}")


def test_a_name_cannot_break_a_table(tmp_path):
    folder = saved([entry(card={"title": r"My_net | 50 % {a}"})], tmp_path)
    assert r"| My_net \| 50 % {a} |" in done("leaderboard", "table", folder)
    assert r"My\_net | 50 \% \{a\} &" in done("leaderboard", "table", folder, "--format", "latex")


def test_csv_has_a_line_a_cell(folder):
    lines = list(csv.DictReader(io.StringIO(done("leaderboard", "table", folder, "--format", "csv"))))
    assert len(lines) == 5
    assert [(one["rho"], one["name"]) for one in lines if one["best"] == "True"] == [
        ("0.4", "Fedavg"),
        ("0.6", "Fedcova"),
    ]


def test_filters_leave_the_rows_that_they_name(tmp_path):
    tracks = {"common": (), "own": ["protocol.batch=16"]}
    runs = [entry(noise=n, track=t, changes=values) for n in ("fedcova-sym", "clean") for t, values in tracks.items()]
    folder = saved(runs, tmp_path)
    titles = [line for line in done("leaderboard", "table", folder, "--noise", "clean", "--track", "own").splitlines()
              if line.startswith("**digits")]  # fmt: skip
    assert len(titles) == 1
    assert "clean, " in titles[0]
    assert "track own" in titles[0]
    said = json.loads(done("leaderboard", "stats", folder, "--noise", "clean", "--json"))
    assert said["no_ranking"].endswith("here are 1: Fedavg")


def test_what_cannot_be_printed_is_refused(folder):
    assert "Did you mean latex" in refused("leaderboard", "table", folder, "--format", "latx")
    assert "unknown track of these rows 'own'" in refused("leaderboard", "table", folder, "--track", "own")
    assert "unknown leaderboard 'digit'" in refused("leaderboard", "table", folder, "--dataset", "digit")


def test_published_numbers_stand_beside_ours_where_the_scenario_is_the_papers():
    ours = {"dataset": "cifar10", "noise_changes": {"rho": 0.6, "tau": 0.7}}
    runs = [
        entry((60.0,), **ours),
        entry((80.0,), method="fedcova", **ours),
        entry((80.0,), oracle="clean-clients", **ours),
    ]
    (table,) = tables.tables(rows_of(runs), with_published=True)
    cells = {name: line[0] for name, line in table.lines}
    assert [one.accuracy for one in cells["Fedavg"].printed] == [52.87]
    assert [(one.accuracy, one.std) for one in cells["Fedcova"].printed] == [(80.71, 0.56)]
    assert cells["Fedavg, oracle clean-clients"].printed == ()
    assert any("published: FedCova (arXiv 2603.04062), after 500 rounds (here 1)" in note for note in table.notes)
    lines = list(csv.DictReader(io.StringIO(tables.render([table], "csv"))))
    assert lines[0]["difference"] == "7.13"
    other = [
        entry((60.0,), evaluate_on=on, holdout=0.2 if "validation" in on else 0.0, **ours)
        for on in ("test-a", "validation")
    ]
    other += [entry((60.0,), method="fedcova", preset="no-corrector", **ours)]
    other += [entry((60.0,), method="fedcova", changes=["alpha=7"], **ours)]
    assert not any(table.with_published for table in tables.tables(rows_of(other), with_published=True))
    elsewhere = [entry((60.0,), clients=10, **ours), entry((60.0,), partition_changes={"law": "iid"}, **ours),
                 entry((60.0,), dataset="cifar10", noise_changes={"rho": 0.5})]  # fmt: skip
    assert not any(table.with_published for table in tables.tables(rows_of(elsewhere), with_published=True))


def test_in_the_track_own_recipes_share_a_table_and_are_told_apart_by_what_differs():
    def run(*changes, draw=0, **options):
        return entry((60.0,), draw=draw, dataset="cifar10", track="own", changes=changes, **options)

    runs = [run("protocol.batch=64"), run("protocol.batch=32"), run("protocol.batch=32", draw=1)]
    runs += [run("alpha=7", method="fedcova"), run("k1=none", method="fedcova")]
    (table,) = tables.tables(rows_of(runs))
    names = [name for name, _ in table.lines]
    assert names == ["Fedavg, batch=32", "Fedavg, batch=64", "Fedcova, alpha=7", "Fedcova, k1=none"]


def test_rows_that_differ_in_nothing_that_a_table_says_are_told_apart_by_their_settings():
    """As where a later version of a method has another default."""
    now = entry((60.0,), method="fedcova")
    before = {**now.settings.method_settings, "alpha": 9.0}
    then = now.model_copy(update={"settings": now.settings.model_copy(update={"method_settings": before})})
    (table,) = tables.tables(rows_of([now, then]))
    keys = (now.settings.key, then.settings.key)
    assert sorted(name for name, _ in table.lines) == sorted(f"Fedcova, settings={key}" for key in keys)


def test_in_the_track_common_recipes_are_tables_whose_headings_say_what_differs():
    def title(**options):
        (first, second) = tables.tables(rows_of([entry((60.0,)), entry((60.0,), **options)]))
        assert [[name for name, _ in one.lines] for one in (first, second)] == [["Fedavg"], ["Fedavg"]]
        base = "digits, fedcova-sym, bernoulli-dirichlet-p0.5-alpha5, 20 clients, track common, 1 rounds, mlp, fp32"
        assert first.title.startswith(base)
        assert second.title.startswith(base)
        return {one.title.removeprefix(base) for one in (first, second)}

    assert title(changes=["protocol.batch=64"]) == {", batch=32", ", batch=64"}
    assert title(changes=["protocol.optimiser.lr=0.03"]) == {", lr=0.1", ", lr=0.03"}
    assert title(changes=["protocol.participation=0.5"]) == {", participation=1.0", ", participation=0.5"}
    assert title(holdout=0.2) == {", scenario=none", ", scenario=holdout0.2"}


def test_statistics_name_methods_and_arenas_as_the_tables_do():
    recipes = [
        entry((value,), draw=draw, track="own", changes=[f"protocol.optimiser.lr={lr}"], method=method)
        for draw in (0, 1)
        for method, lr, value in (("fedavg", 0.1, 50.0), ("fedcova", 0.1, 60.0), ("fedcova", 0.03, 70.0))
    ]
    rows = rows_of(recipes)
    (table,) = tables.tables(rows)
    labels = ["Fedavg", "Fedcova, lr=0.03", "Fedcova, lr=0.1"]
    assert [name for name, _ in table.lines] == labels
    assert {one.method: one.mean for one in comparison.differences(rows, recipes)} == {labels[1]: 20, labels[2]: 10}
    (budget,) = comparison.equal_budget(rows, recipes, "rounds")
    assert {one.name: one.accuracy for one in budget.reached} == dict(zip(labels, (50, 70, 60), strict=True))
    # and two rows of one method in one arena are two in the ranks
    several = [
        one.model_copy(update={"settings": one.settings.model_copy(update={"scenario": scene})})
        for rho in RHOS
        for one in recipes
        if one.settings.scenario.draw == 0
        for scene in [entry((1.0,), noise_changes={"rho": rho}).settings.scenario]
    ]
    assert comparison.ranking(rows_of(several), several).ranks == {labels[1]: 1, labels[2]: 2, labels[0]: 3}
    # in the track common the two learning rates are two arenas
    common = [
        entry((50.0,), method=method, draw=draw, changes=[f"protocol.optimiser.lr={lr}"])
        for lr in (0.1, 0.03) for method in ("fedavg", "fedcova") for draw in (0, 1)
    ]  # fmt: skip
    found = comparison.differences(rows_of(common), common)
    assert sorted(one.where.rpartition(", ")[2] for one in found) == ["lr=0.03", "lr=0.1"]
    budgets = comparison.equal_budget(rows_of(common), common, "rounds")
    assert {one.where for one in budgets} == {one.where for one in found}


def test_the_published_files_are_whole():
    assert published.names() == ["fedcova_runtime", "fedcova_statements", "fedcova_tables", "scenarios"]
    assert len(published.read("fedcova_tables")) == 150
    assert all(line["source"] for name in published.names() for line in published.read(name))
    with pytest.raises(ValueError, match="Did you mean fedcova_tables"):
        published.read("fedcova_table")
    (one,) = published.beside("cifar100", "fedcova-sym", 0.8, 0.7, 20, "bernoulli-dirichlet-p0.5-alpha5", "fedcova")
    assert (one.accuracy, one.std, one.rounds) == (40.80, 0.78, 500)


# --------------------------------------------------------------------------------------------------------- stats


def test_stats_prints_differences_budgets_and_why_there_are_no_ranks(folder):
    said = json.loads(done("leaderboard", "stats", folder, "--json"))
    assert [(one["method"], one["mean"]) for one in said["differences"]] == [("Fedcova", -10.5), ("Fedcova", 16.0)]
    assert said["ranking"] is None
    assert "three methods or more" in said["no_ranking"]
    assert set(said["equal"]) == {"rounds", "images", "seconds"}
    assert said["differences"][0]["doubts"] == ["wrong-protocol"]
    text = done("leaderboard", "stats", folder)
    assert text.splitlines()[1].endswith("p Holm\tdoubts")
    assert "+16.00" in text
    assert "no mean ranks" in text
    shared = next(i for i, one in enumerate(text.splitlines()) if "of runs that shared a card or cores" in one)
    assert "at equal seconds" in text.splitlines()[shared + 1]
    assert "; 97.5 % t intervals; " in done("leaderboard", "stats", folder, "--level", "0.975")
    # differences -10 and -11, 20 and 12: t(.75, 1) is 1, so the intervals are a standard error wide on either side
    half = json.loads(done("leaderboard", "stats", folder, "--level", "0.5", "--json"))["differences"]
    assert [(one["low"], one["high"]) for one in half] == [pytest.approx((-11, -10)), pytest.approx((12, 20))]


def test_stats_ranks_at_the_level_that_intervals_have(tmp_path):
    values = {"fedavg": (5,), "fedcova": (6,), "fedavg-relabel": (7,)}
    runs = [one for rho in RHOS for one in cell(values, rho=rho, draws=(0,))]
    said = json.loads(done("leaderboard", "stats", saved(runs, tmp_path), "--level", "0.9", "--json"))["ranking"]
    assert (said["alpha"], said["distance"]) == pytest.approx((0.1, critical_difference(3, 6, 0.1)))
    assert call("leaderboard", "stats", folder, "--against", "nobody").exit_code == 2
