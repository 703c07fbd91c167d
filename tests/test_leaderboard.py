"""Leaderboards: rows follow from runs, say what is to be doubted about them, and cannot be edited unnoticed."""

import csv
import io
import json
import os
import re
import shutil
import statistics
import subprocess
from pathlib import Path

import pytest
from command_line import PLUGIN, RUN, SCRIPT, call, done, only_run, refused, rows
from leaderboard_entries import ENVIRONMENT, entry, only, saved

from flnoisebench import provenance, records
from flnoisebench.cli.leaderboard import stated_by
from flnoisebench.leaderboard import COLUMNS, FLAGS, Entry, Row, board, entries, rows_of
from flnoisebench.leaderboard.agreement import agreement
from flnoisebench.leaderboard.comparison import paired
from flnoisebench.leaderboard.rows import csv_text, row_from

HISTORIC = Path(__file__).parent / "historic_results"

# ------------------------------------------------------------------------------------------------ one row by hand


def test_a_rows_numbers_by_hand():
    runs = [
        entry((10.0, 40.0, 50.0, 60.0, 70.0, 80.0), draw=0, judged={"clients_recall": 100.0}),
        entry((90.0, 61.0, 62.0, 63.0, 64.0, 65.0), draw=1, judged={"clients_recall": 50.0}),
        entry((0.0, 20.0, 20.0, 20.0, 20.0, 20.0), draw=2),
    ]
    row = only(runs)
    assert (row.n, row.failed, row.draws, row.seeds) == (3, 0, "0 1 2", "0")
    assert row.accuracy_mean == round((60 + 63 + 20) / 3, 4)
    assert row.accuracy_std_seeds == 24.0069  # sqrt((12.333^2 + 15.333^2 + 27.667^2) / 2)
    assert row.accuracy_std_rounds == round((200**0.5 + 2**0.5 + 0) / 3, 4)
    assert row.accuracy_last10 == round((310 / 6 + 405 / 6 + 100 / 6) / 3, 4)
    assert row.accuracy_final == 55
    assert row.oracle_best == round((80 + 90 + 20) / 3, 4)
    assert row.clients_recall == 75  # of the runs that have one
    assert row.clients_precision is None
    assert (row.rho, row.tau, row.partition) == (0.6, 0.7, "bernoulli-dirichlet-p0.5-alpha5")
    assert (row.label_noise_before, row.label_noise_after) == (30, 20)


def test_one_run_has_a_spread_over_its_rounds_and_none_over_draws():
    row = only([entry((50.0, 60.0))])
    assert row.accuracy_std_rounds == 5
    assert row.accuracy_std_seeds is None
    assert "single-draw" in row.doubts
    silent = only([entry((50.0,)), entry((None,), draw=1)])  # a run that never had a predictor is in n and in no mean
    assert (silent.n, silent.accuracy_mean, silent.accuracy_std_seeds) == (2, 50, None)


def test_two_seeds_of_one_draw_are_still_a_single_draw():
    row = only([entry((50.0,), seed=0), entry((52.0,), seed=1)])
    assert row.accuracy_std_seeds == round(2**0.5, 4)
    assert "single-draw" in row.doubts


def test_costs_are_relative_to_fedavg_in_the_same_draw_under_the_same_budget_on_the_same_hardware():
    runs = [
        entry(draw=0, bytes_up=100, seconds=1.0),
        entry(draw=1, bytes_up=300, seconds=4.0),
        entry(method="fedavg-relabel", draw=0, bytes_up=200, seconds=3.0),
        entry(method="fedavg-relabel", draw=1, bytes_up=300, seconds=4.0),
        entry(method="fedavg-relabel", draw=2, bytes_up=999999),  # FedAvg has no such draw
    ]
    base, other = rows_of(runs)
    assert (base.bytes_up_ratio, base.seconds_ratio) == (1, 1)
    assert other.bytes_up_ratio == 1.5  # the mean of 2 and 1, not the ratio of the means
    assert other.seconds_ratio == 2
    costs = {"bytes_up": 10, "bytes_down": 100, "images": 1000, "peak_memory": 10_000}
    apart = {name: (i + 2) * value for i, (name, value) in enumerate(costs.items())}
    _, dear = rows_of([entry(**costs), entry(method="fedavg-relabel", **apart)])
    assert (dear.bytes_up, dear.bytes_down, dear.images_trained, dear.peak_memory) == (20, 300, 8000, 50_000)
    ratios = (dear.bytes_up_ratio, dear.bytes_down_ratio, dear.images_ratio, dear.peak_memory_ratio)
    assert ratios == (2, 3, 4, 5)  # each cost's own
    assert dear.images_passed == 7
    # neither another machine, nor another budget, nor an oracle's FedAvg, nor a failed one is a reference
    apart = [
        entry(method="fedavg-relabel"),
        entry(environment={"processor": "Abacus 3001"}),
        entry(environment={"sharing": "beside others"}),
        entry((1.0, 2.0, 3.0)),
        entry(changes=["protocol.last_batch=drop"]),
        entry(precision="bf16"),
        entry(evaluate_on="test-a"),
        entry(oracle="clean-samples"),
        entry(draw=0, status="failed", seed=3),
    ]
    assert all(row.bytes_up_ratio is None for row in rows_of(apart) if row.method != "fedavg")
    short = only([entry((50.0, 60.0), seconds=3.0, completed=False)])
    assert short.seconds_per_round == 3  # of the rounds that were run, not of the budget's three
    # the learning rate changes no cost
    tuned = entry(bytes_up=50, changes=["protocol.optimiser.lr=0.03"])
    assert {row.bytes_up_ratio for row in rows_of([tuned, entry(method="fedavg-relabel", bytes_up=100)])} == {1, 2}


def test_settings_presets_tracks_oracles_and_evaluation_sets_make_rows_of_their_own():
    runs = [
        entry(),
        entry(draw=1),
        entry(oracle="clean-samples"),
        entry(oracle="clean-clients"),
        entry(evaluate_on="test-a"),
        entry(track="own"),
        entry(noise_changes={"rho": 0.4}),
        entry(method="fedcova"),
        entry(method="fedcova", changes=["alpha=7"]),
        entry((50.0,)),
    ]
    found = rows_of(runs)
    assert sorted(row.n for row in found) == [1] * 8 + [2]
    assert [row.oracle for row in found if row.oracle] == ["clean-clients", "clean-samples"]
    assert [row.changed for row in found if row.changed] == ['{"alpha": 7}']


def test_rows_are_sorted_whatever_the_order_of_the_entries():
    runs = [
        entry(method=m, draw=d, noise_changes={"rho": r})
        for m in ("fedcova", "fedavg")
        for d in (1, 0)
        for r in (0.8, 0.4)
    ]
    assert csv_text(rows_of(runs)) == csv_text(rows_of(reversed(runs)))
    assert [(row.rho, row.method) for row in rows_of(runs)] == [
        (0.4, "fedavg"), (0.4, "fedcova"), (0.8, "fedavg"), (0.8, "fedcova"),
    ]  # fmt: skip
    bound = rows_of([entry(oracle="clean-samples"), entry(method="fedcova"), entry()])
    assert [(row.method, row.oracle) for row in bound] == [
        ("fedavg", ""), ("fedcova", ""), ("fedavg", "clean-samples"),
    ]  # fmt: skip


def test_a_failed_run_stays_in_the_table_and_in_no_mean():
    row = only([entry((50.0,)), entry((99.0,), draw=1, status="failed", completed=True)])
    assert (row.n, row.failed, row.accuracy_mean, row.draws) == (1, 1, 50, "0")
    assert "failed-runs" in row.doubts
    failed = only([entry((99.0,), status="failed")])
    assert (failed.n, failed.failed, failed.accuracy_mean, failed.seconds_per_round, failed.bytes_up) == (
        0,
        1,
        None,
        None,
        None,
    )


# -------------------------------------------------------------------------------------------------------- flags

FULL = tuple([50.0] * 100)  # the digits' protocol


def pair(**settings):
    return [entry(FULL, draw=draw, **settings) for draw in (0, 1)]


@pytest.mark.parametrize(
    ("flag", "runs"),
    [
        ("single-draw", pair()[:1]),
        ("wrong-protocol", [entry((50.0,), draw=draw) for draw in (0, 1)]),
        ("wrong-protocol", pair(changes=["protocol.batch=64"], choices="validation")),
        ("wrong-protocol", pair(track="own", changes=["protocol.model=small-cnn"], choices="validation")),
        ("wrong-protocol", pair(track="own", changes=["protocol.participation=0.5"], choices="validation")),
        ("failed-runs", [*pair(), entry(FULL, draw=2, status="failed")]),
        ("unsteady", [entry((*FULL[:-2], 50.0 + up, 50.0 - up), draw=draw) for draw, up in ((0, -10.5), (1, 0.0))]),
        ("choosing-set", pair(evaluate_on="test-a")),
        ("choosing-set", pair(evaluate_on="validation", holdout=0.2)),
        ("choosing-set", pair(method="fedcova", changes=["alpha=7"], choices="test")),
        ("choosing-set", pair(method="fedcova", changes=["alpha=7"], choices="test-a")),
        ("ended-early", [pair()[0], entry(FULL[1:], draw=1, completed=False)]),
        ("choosing-set", [entry(FULL, method="fedcova", draw=draw) for draw in (0, 200)]),  # its preset tuned on 200
        ("unstated-choices", pair(method="fedcova", changes=["alpha=7"])),
        (
            "unstated-choices",
            [
                entry(FULL, method="fedcova", draw=draw, changes=["alpha=7"], choices=said)
                for draw, said in enumerate((None, "validation"))
            ],
        ),
        ("unstated-choices", pair(track="own", changes=["protocol.optimiser.lr=0.03"])),
        ("unstated-choices", pair(method="fedcova", track="own", changes=["protocol.batch=64"])),  # the preset's is 32
        ("mixed-commits", [pair()[0], entry(FULL, draw=1, environment={"commit": "e" * 40})]),
        ("mixed-commits", [pair()[0], entry(FULL, draw=1, environment={"method_sha256": "e" * 40})]),
        ("uncommitted", pair(environment={"commit": "c" * 40 + "+changes"})),
        ("mixed-hardware", [pair()[0], entry(FULL, draw=1, environment={"device": "a GPU"})]),
        # stopped, and gone on with elsewhere
        ("mixed-commits", pair(environment={"earlier": [{**ENVIRONMENT, "commit": "e" * 40}]})),
        ("mixed-hardware", pair(environment={"earlier": [{**ENVIRONMENT, "lanes": 2}]})),
        *(
            ("mixed-hardware", [pair()[0], entry(FULL, draw=1, environment={"sharing": sharing})])
            for sharing in ("alone", "beside others")
        ),
    ],
)
def test_what_is_to_be_doubted_is_flagged_and_nothing_else(flag, runs):
    assert only(runs).doubts == (flag,)
    assert flag in FLAGS


@pytest.mark.parametrize(
    "runs",
    [
        pair(),
        [entry((*FULL[:-1], 50.0 + up), draw=draw) for draw, up in enumerate((-40.0, 40.0, 14.9))],  # 4.97 in the mean
        pair(precision="bf16"),  # the hardware's
        pair(track="own", changes=["protocol.optimiser.lr=0.03"], choices="validation"),  # the method's recipe
        pair(method="fedcova", changes=["alpha=7"], choices="validation"),
        pair(method="fedcova", track="own", changes=["protocol.batch=32"]),  # the preset's own, said once more
        [entry(FULL, method="fedcova", draw=draw, evaluate_on="test-b") for draw in (0, 200)],  # half A is for choosing
        pair(method="fedcova", changes=["alpha=7"], choices="test-a", evaluate_on="test-b"),
    ],
)
def test_a_sound_row_has_no_flag(runs):
    assert only(runs).flags == ""


# --------------------------------------------------------------------------------------------- the file's format


def test_a_table_is_read_back_as_it_was_written():
    runs = [*pair(), entry(method="fedcova", changes=["alpha=7"]), entry(status="failed", draw=4), entry(noise="clean")]
    found = rows_of(runs)
    text = csv_text(found)
    again = [row_from(line) for line in csv.DictReader(io.StringIO(text))]
    assert again == found
    assert csv_text(again) == text
    header = next(csv.reader(io.StringIO(text)))
    assert tuple(header) == COLUMNS == tuple(Row.model_fields)


def test_every_column_says_what_it_is():
    assert all(field.description for field in Row.model_fields.values())
    assert all(field.description for field in Entry.model_fields.values())


def test_an_entry_is_read_back_as_it_was_written_a_line_an_item(tmp_path):
    one = entry((None, 1.25, 99.0))
    path = entries.save(one, tmp_path)
    assert entries.load(path) == one
    assert path == one.path(tmp_path)
    assert path.parts[-5:-3] == ("digits", one.settings.scenario.slug)
    assert len(path.read_text().splitlines()) == len(Entry.model_fields) + 2


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("environment.commit", {"environment": {"commit": None}}),
        ("environment.device", {"environment": {"device": ""}}),
        ("environment.commit", {"environment": {"earlier": [{**ENVIRONMENT, "commit": None}]}}),
        ("environment.packages.torch", {"environment": {"packages": {"numpy": "2", "flnoisebench": "1"}}}),
        ("digests.labels", {"digests": {"data": "d", "partition": "p"}}),
    ],
)
def test_there_is_no_row_without_provenance(name, change):
    with pytest.raises(ValueError, match=rf"no row without provenance, and this lacks {name}"):
        entry(**change)


def test_what_is_no_commit_is_no_provenance():
    for commit in ("c" * 7, "c" * 40 + "+changes"):
        entry(environment={"commit": commit})
    for commit in ("yesterday", "v0.1.0", "c" * 6, "c" * 40 + " "):
        with pytest.raises(ValueError, match=r"environment.commit is '.*', and a commit of git is 7 or more hex"):
            entry(environment={"commit": commit})


# -------------------------------------------------------------------------------------------------- real runs


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two methods on two draws, two rounds each."""
    out = tmp_path_factory.mktemp("runs")
    for method in ("fedavg", "fedavg-relabel"):
        for draw in (0, 1):
            done(*RUN[:1], "--method", method, *RUN[3:], "--draw", draw, "--out", out, FLNOISEBENCH_COMMIT="c" * 40)
    return out


@pytest.fixture
def built(runs, tmp_path):
    folder = tmp_path / "leaderboards"
    done("leaderboard", "build", runs, "--out", folder)
    return folder


def test_a_leaderboard_is_built_verified_and_printed_from_runs(runs, built):
    said = rows(done("leaderboard", "build", runs, "--out", built))  # again: nothing changes
    assert said["runs"] == "0 added, 0 replaced, 4 known"
    assert said["rows"] == "2"
    verdict = call("leaderboard", "verify", built, "--runs", runs)
    assert verdict.exit_code == 0
    assert "line 2, column flags: wrong-protocol (FedAvg)" in verdict.stdout
    assert "0 errors, 2 doubts" in verdict.stdout  # two rounds are not the data set's protocol
    result = records.load_result(next(runs.rglob("fedavg/*/draw1-seed0")))
    row = next(row for row in board.read(built)[0] if row.method == "fedavg")
    assert row.n == 2
    assert f"1-0:{result.digest[:16]}" in row.run_digests
    assert row.commit == "c" * 40
    table = done("leaderboard", "table", built)
    assert f"{row.accuracy_mean:.2f} ± {row.accuracy_std_seeds:.2f} (2)" in table


def test_without_runs_the_tables_alone_are_derived_anew(built, tmp_path):
    path = built / "digits.csv"
    whole = path.read_bytes()
    path.unlink()
    assert rows(done("leaderboard", "build", "--out", built))["runs"] == "0 added, 0 replaced, 0 known"
    assert path.read_bytes() == whole
    assert "holds no entry" in refused("leaderboard", "build", "--out", tmp_path / "nothing")


def test_rows_recompute_without_the_runs_and_more_runs_are_merged(runs, tmp_path):
    parts = tmp_path / "parts"
    for draw in (0, 1):
        for path in runs.rglob(f"draw{draw}-seed0"):
            shutil.copytree(path, parts / str(draw) / path.relative_to(runs))
    done("leaderboard", "build", parts / "0", "--out", tmp_path / "step")
    shutil.rmtree(parts / "0")
    done("leaderboard", "build", parts / "1", "--out", tmp_path / "step")
    done("leaderboard", "build", runs, "--out", tmp_path / "whole")
    assert (tmp_path / "step" / "digits.csv").read_bytes() == (tmp_path / "whole" / "digits.csv").read_bytes()


def test_a_part_that_is_linked_from_another_disk_is_taken_as_if_it_lay_here(runs, built, tmp_path):
    """And a link to a run beside it is no second run, nor does one to a folder above it have no end."""
    shutil.copytree(runs, tmp_path / "disk")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "digits").symlink_to(tmp_path / "disk" / "digits")
    (tmp_path / "disk" / "digits" / "again").symlink_to(tmp_path / "disk")
    (tmp_path / "disk" / "a-latest").symlink_to(entries.runs_below([tmp_path / "disk"])[-1])
    for name in ("linked", "disk"):
        done("leaderboard", "build", tmp_path / name, "--out", tmp_path / "of" / name)
        assert (tmp_path / "of" / name / "digits.csv").read_bytes() == (built / "digits.csv").read_bytes()
    whole = done("compare", tmp_path / "disk").splitlines()[0]
    assert done("compare", tmp_path / "linked").splitlines()[0] == whole
    (tmp_path / "board" / "results").mkdir(parents=True)
    (tmp_path / "board" / "results" / "digits").symlink_to(built / "results" / "digits")
    done("leaderboard", "build", "--out", tmp_path / "board")
    assert board.verify(tmp_path / "board") == [
        one._replace(file=tmp_path / "board" / one.file.relative_to(built)) for one in board.verify(built)
    ]


def test_an_unfinished_run_is_left_out_and_named(runs, tmp_path):
    copied = tmp_path / "runs"
    shutil.copytree(runs, copied)
    first = sorted(copied.rglob("result.json"))[0]
    first.unlink()
    result = call("leaderboard", "build", copied, "--out", tmp_path / "board")
    assert f"left out: {first.parent}: unfinished" in result.stderr
    assert "3 added" in result.stdout


@pytest.mark.parametrize(
    ("place", "value", "what"),
    [
        (("accuracy", "last5_mean"), 99.0, "the accuracies of result.json do not follow from records.jsonl"),
        (("bytes_up",), 1, "what result.json says of bytes_up does not follow from records.jsonl"),
        (("bytes_down",), 1, "what result.json says of bytes_down does not follow"),
        (("peak_memory",), 1, "what result.json says of peak_memory does not follow"),
        (("digest",), "0" * 64, "the digests of result.json and records.jsonl differ"),
        (("images", "trained"), 1, "what result.json says of images does not follow"),
        (("seconds", "round"), 0.001, "what result.json says of seconds does not follow"),
        (("label_noise_after",), 0.0, "what result.json says of label_noise_after does not follow"),
        (("settings", "protocol", "optimiser", "lr"), 0.01, "result.json and settings.json describe two runs"),
    ],
)
def test_a_run_whose_result_and_records_contradict_each_other_is_refused(place, value, what, runs, tmp_path):
    copied = tmp_path / "runs"
    shutil.copytree(runs, copied)
    path = sorted(copied.rglob("result.json"))[0]
    content = json.loads(path.read_text())
    inner = content
    for name in place[:-1]:
        inner = inner[name]
    assert inner[place[-1]] != value
    inner[place[-1]] = value
    path.write_text(json.dumps(content))
    said = refused("leaderboard", "build", copied, "--out", tmp_path / "board")
    assert what in said
    assert not (tmp_path / "board").exists()


@pytest.mark.parametrize(
    ("place", "value", "what"),
    [
        (("digests", "labels"), "0" * 64, "what result.json says of digests is not what the checkpoint says"),
        (("environment", "commit"), "e" * 40, "what result.json says of environment is not what the checkpoint says"),
        (("environment", "method_sha256"), "e" * 64, "what result.json says of method_sha256, environment is not"),
    ],
)
def test_where_a_result_comes_from_is_held_against_the_checkpoint(place, value, what, runs, tmp_path):
    copied = tmp_path / "runs"
    shutil.copytree(runs, copied)
    path = sorted(copied.rglob("result.json"))[0]
    content = json.loads(path.read_text())
    content[place[0]][place[1]] = value
    path.write_text(json.dumps(content))
    assert what in refused("leaderboard", "build", copied, "--out", tmp_path / "board")


def test_a_run_is_not_published_under_settings_that_it_did_not_have(runs, tmp_path):
    copied = tmp_path / "runs"
    shutil.copytree(runs, copied)
    folder = sorted(copied.rglob("result.json"))[0].parent
    for name in ("result.json", "settings.json"):
        path = folder / name
        content = json.loads(path.read_text())
        content.get("settings", content)["seed"] = 5
        path.write_text(json.dumps(content))
    said = refused("leaderboard", "build", copied, "--out", tmp_path / "board")
    assert "what result.json says of settings is not what the checkpoint says" in said


def test_an_accuracy_that_was_edited_in_result_and_records_alike_is_not_published(runs, tmp_path):
    copied = tmp_path / "runs"
    shutil.copytree(runs, copied)
    folder = sorted(copied.rglob("result.json"))[0].parent
    edited = {"accuracy": 99.0, "predictors": {"main": 99.0}}
    told = [record.model_copy(update=edited) for record in records.load_records(folder)]
    (folder / "records.jsonl").write_text("".join(record.model_dump_json() + "\n" for record in told))
    accuracy = records.Accuracy.of([record.accuracy for record in told])
    result = records.load_result(folder).model_copy(update={"accuracy": accuracy})
    records.write_json(folder / "result.json", result)
    said = refused("leaderboard", "build", copied, "--out", tmp_path / "board")
    assert f"{folder / 'records.jsonl'} " in said
    assert "the checkpoint" in said
    shutil.rmtree(folder / "checkpoint")  # a run whose checkpoint was given up is taken at its word
    done("leaderboard", "build", copied, "--out", tmp_path / "board")


def test_a_run_whose_settings_have_other_letters_is_built_under_any_locale(tmp_path):
    """What is run in the cluster's locale may be built in that of a login shell."""
    (tmp_path / "josé").mkdir()
    (tmp_path / "josé" / "mine.py").write_text(PLUGIN)
    method = f"{tmp_path}/josé/mine.py:Mine"
    done("run", "--method", method, *RUN[3:], "--out", tmp_path / "runs", FLNOISEBENCH_COMMIT="0123456")
    plain = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    words = [SCRIPT, "leaderboard", "build", tmp_path / "runs", "--out", tmp_path / "board"]
    built = subprocess.run(words, env=plain, capture_output=True, text=True)
    assert (built.returncode, built.stderr) == (0, "")


def test_a_run_without_its_settings_is_not_passed_over_in_silence(runs, tmp_path):
    copied = tmp_path / "runs"
    shutil.copytree(runs, copied)
    path = sorted(copied.rglob("settings.json"))[0]
    path.unlink()
    assert f"{path.parent}: settings.json is missing" in refused(
        "leaderboard", "build", copied, "--out", tmp_path / "b"
    )


def test_a_folder_without_runs_is_refused(tmp_path):
    assert "holds no run" in refused("leaderboard", "build", tmp_path, "--out", tmp_path / "board")


def test_another_result_of_the_same_run_is_refused_unless_it_is_to_replace(built, runs, tmp_path):
    first = next(path for path in (built / "results").rglob("*.json"))
    content = json.loads(first.read_text()) | {"digest": "0" * 64}
    first.write_text(json.dumps(content))
    assert "leave it out, or --replace" in refused("leaderboard", "build", runs, "--out", built)
    assert "1 replaced, 3 known" in done("leaderboard", "build", runs, "--out", built, "--replace")
    content = json.loads(first.read_text()) | {"peak_memory": 7}  # a cost: measured anew, the digest is the same
    first.write_text(json.dumps(content))
    assert "0 replaced, 4 known" in done("leaderboard", "build", runs, "--out", built)
    assert "1 replaced, 3 known" in done("leaderboard", "build", runs, "--out", built, "--replace")
    assert call("leaderboard", "verify", built, "--runs", runs).exit_code == 0


@pytest.mark.parametrize("replace", [False, True])
def test_of_two_new_results_of_one_run_none_is_taken_in_silence(tmp_path, monkeypatch, replace):
    saved([entry((50.0,))], tmp_path)
    found = {}
    monkeypatch.setattr(entries, "runs_below", lambda runs: list(found))
    monkeypatch.setattr(Entry, "of", lambda folder: found[folder])

    def build():
        return board.build([], tmp_path, replace=replace)

    for draw in (0, 1):  # one that the leaderboard has, and one that it has not
        found |= {Path(name): entry((value,), draw=draw, digest=name) for name, value in (("a", 51.0), ("b", 52.0))}
        with pytest.raises(ValueError, match="one result: leave" if draw == 0 else "leave one of the two out"):
            build()
    found[Path("a")] = entry((51.0,), draw=1, digest="a", status="failed")
    built = build()
    assert (len(built.added), len(built.replaced)) == (1, 0)  # the failed one gives way
    assert board.read(tmp_path)[0][0].failed == 0


def test_a_run_that_failed_again_takes_the_place_of_its_earlier_failure(tmp_path, monkeypatch):
    """As after --retry: it stops the build of no other run."""
    saved([entry((50.0,), completed=False, status="failed")], tmp_path)
    again = entry((51.0,), completed=False, status="failed", digest="e" * 64)
    monkeypatch.setattr(entries, "runs_below", lambda runs: list(runs))
    monkeypatch.setattr(Entry, "of", lambda folder: again)
    built = board.build([Path("a run")], tmp_path)
    assert (len(built.added), len(built.replaced)) == (0, 1)
    assert board.read(tmp_path)[1] == [again]


def test_a_run_that_failed_beside_the_entry_of_one_that_did_not_is_left_out_by_build_and_no_error_to_verify(
    tmp_path, monkeypatch
):
    saved([entry((50.0, 60.0))], tmp_path)
    failed = entry((50.0,), completed=False, status="failed", digest="e" * 64)
    monkeypatch.setattr(entries, "runs_below", lambda runs: list(runs))
    monkeypatch.setattr(Entry, "of", lambda folder: failed)
    run = Path("a run")
    (left_out,) = board.build([run], tmp_path).left_out.values()
    (found,) = [one for one in board.verify(tmp_path, [run]) if one.file == run]
    assert (found.level, found.what) == ("doubt", left_out)
    assert not [one for one in board.verify(tmp_path, [run]) if one.level == "error"]


def test_of_a_run_on_a_data_set_that_is_not_installed_nothing_is_written(tmp_path, monkeypatch):
    settings = entry().settings
    scene = settings.scenario.model_copy(update={"dataset": "elsewhere"})
    away = entry().model_copy(update={"settings": settings.model_copy(update={"scenario": scene})})
    monkeypatch.setattr(entries, "runs_below", lambda runs: list(runs))
    monkeypatch.setattr(Entry, "of", lambda folder: away)
    with pytest.raises(ValueError, match="unknown data set 'elsewhere'"):
        board.build([Path("a run")], tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_table_whose_entries_have_gone_goes_with_the_next_build(tmp_path):
    """``read`` refuses it and says that ``build`` mends that."""
    saved([entry(), entry(dataset="synthetic")], tmp_path)
    (tmp_path / "notes.csv").write_text("a table of somebody's own\n")
    shutil.rmtree(tmp_path / "results" / "synthetic")
    with pytest.raises(ValueError, match="derives them anew"):
        board.read(tmp_path, "synthetic")
    assert rows(done("leaderboard", "build", "--out", tmp_path))["removed"].startswith(str(tmp_path / "synthetic.csv"))
    assert {path.name for path in tmp_path.glob("*.csv")} == {"digits.csv", "notes.csv"}
    assert len(board.read(tmp_path, "digits")[0]) == 1


def test_of_a_failure_the_file_is_published_and_not_the_folder_that_one_machine_has_it_in(tmp_path):
    (tmp_path / "mine.py").write_text(PLUGIN.replace("return average(", "return float('nan'), average("))
    run = ("run", "--method", f"{tmp_path / 'mine.py'}:Mine", *RUN[3:], "--out", tmp_path / "runs")
    assert str(tmp_path) in call(*run).stderr  # who runs it is told where to look
    done("leaderboard", "build", tmp_path / "runs", "--out", tmp_path / "board", FLNOISEBENCH_COMMIT="0123456")
    (kept,) = board.read(tmp_path / "board")[1]
    assert re.search(r"not finite at 0; see Mine\.aggregate \(mine\.py:\d+\)$", kept.failure)
    assert not [one for one in board.verify(tmp_path / "board", [tmp_path / "runs"]) if "differs" in one.what]


def test_a_run_that_failed_makes_a_row_and_a_method_that_is_a_file_is_not_to_be_published(tmp_path):
    (tmp_path / "mine.py").write_text(PLUGIN)
    run = ("run", "--method", f"{tmp_path / 'mine.py'}:Mine", *RUN[3:], "--out", tmp_path / "runs")
    assert call(*run, TROUBLE="raise").exit_code == 1
    done("leaderboard", "build", tmp_path / "runs", "--out", tmp_path / "board")
    (row,), (kept,) = board.read(tmp_path / "board")
    assert (row.n, row.failed, row.accuracy_mean) == (0, 1, None)
    assert kept.failure.endswith("RuntimeError: no luck")  # its first line, without the traceback's
    assert {"failed-runs", "not-installable"} <= set(row.doubts)
    assert "failed" in done("leaderboard", "table", tmp_path / "board")
    (problem,) = errors(tmp_path / "board")
    assert "is a file: give it an entry point, so that others can run it" in problem
    done(*run, "--retry")  # completes, and takes the place of its failure
    assert "1 replaced" in done("leaderboard", "build", tmp_path / "runs", "--out", tmp_path / "board")
    assert board.read(tmp_path / "board")[0][0].n == 1


def test_historic_results_still_make_rows(tmp_path):
    for folder in sorted(HISTORIC.iterdir()):
        one = Entry.of(folder)
        assert one.last5.judged or one.settings.oracle
        row = only([one])
        assert row.accuracy_mean == round(one.accuracy.last5_mean, 4)
        assert row.n == 1


# ------------------------------------------------------------------------------------------------------ verify


@pytest.fixture
def sound(tmp_path):
    runs = [entry(FULL, method=m, draw=d) for m in ("fedavg", "fedcova") for d in (0, 1)]
    return saved(runs, tmp_path / "board")


def errors(folder, *runs):
    return [str(one) for one in board.verify(folder, runs) if one.level == "error"]


def edit(folder, row, column, value):
    """Write ``value`` into a cell of digits.csv; row: from 0."""
    path = folder / "digits.csv"
    lines = list(csv.reader(io.StringIO(path.read_text())))
    lines[row + 1][COLUMNS.index(column)] = value
    whole = io.StringIO()
    csv.writer(whole, lineterminator="\n").writerows(lines)
    path.write_text(whole.getvalue())


def test_a_sound_leaderboard_has_no_error_and_no_doubt(sound):
    assert board.verify(sound) == []
    assert done("leaderboard", "verify", sound) == "verdict\tevery row follows from its entries\n"


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("accuracy_mean", "50.0001"),
        ("accuracy_std_seeds", "1"),
        ("n", "3"),
        ("seconds_per_round", "0.5"),
        ("flags", "single-draw"),
        ("commit", "e" * 40),
        ("labels_digests", "0:0"),
        ("lr", "0.2"),
        ("macro_f1", "12"),
    ],
)
def test_an_edited_cell_is_found_with_file_line_and_column(column, value, sound):
    edit(sound, 1, column, value)
    (problem,) = errors(sound)
    assert problem.startswith(f"{sound / 'digits.csv'}, line 3, column {column}: {value}")
    result = call("leaderboard", "verify", sound, "--json")
    assert result.exit_code == 1
    (found,) = [one for one in json.loads(result.stdout)["problems"] if one["level"] == "error"]
    assert (found["line"], found["column"]) == (3, column)


@pytest.mark.parametrize("command", ["table", "stats", "rerun"])
def test_a_table_that_was_edited_is_neither_printed_nor_compared_nor_run_again(command, sound, tmp_path):
    words = {"rerun": (f"{sound / 'digits.csv'}:2", "--out", tmp_path / "again")}.get(command, (sound,))
    edit(sound, 1, "accuracy_mean", "99")
    said = refused("leaderboard", command, *words)
    assert "are not what the results beside them give (first: digits, " in said
    assert f"`leaderboard verify {sound}` says where; `leaderboard build --out {sound}` derives them anew" in said
    saved([entry(FULL, method=m, draw=d) for m in ("fedavg", "fedcova") for d in (0, 1)], sound)
    path = sound / "digits.csv"
    header, first, second = path.read_text().splitlines()
    path.write_text("\n".join([header, second, first, ""]))  # line 2 would be another row
    assert "are not what the results" in refused("leaderboard", command, *words)
    assert not (tmp_path / "again").exists()


def test_one_data_set_is_read_apart_from_the_others(sound):
    saved([entry(FULL, dataset="synthetic")], sound)
    edit(sound, 1, "accuracy_mean", "99")
    assert "synthetic" in done("leaderboard", "table", sound, "--dataset", "synthetic")
    assert "are not what" in refused("leaderboard", "table", sound, "--dataset", "digits")


def test_a_run_that_failed_need_not_be_run_again_either(tmp_path):
    runs = [entry(), entry(draw=1, status="failed")]
    assert board.kept(saved(runs, tmp_path)) == {one.settings.folder(Path()): one for one in runs}


def test_every_column_is_held_against_the_entries(sound):
    """A cell of any column that is changed to another valid value is found, on its line."""
    original = (sound / "digits.csv").read_text()
    texts = dict(zip(COLUMNS, list(csv.reader(io.StringIO(original)))[1], strict=True))
    for column in COLUMNS:
        value = "9" if Row.model_fields[column].annotation is not str else "other"
        value = {"participation": "0.5"}.get(column, value)
        assert value != texts[column]
        edit(sound, 0, column, value)
        found = errors(sound)
        assert found, column
        assert all("line 2" in one or "is missing" in one for one in found), (column, found)
        (sound / "digits.csv").write_text(original)


@pytest.mark.parametrize(
    ("column", "value", "what"),
    [
        ("n", "many", "unable to parse"),
        ("rounds", "0", "greater than or equal to 1"),
        ("accuracy_mean", "50.0", "would be written '50'"),
        ("lr", "", "valid number"),
    ],
)
def test_a_cell_that_is_no_value_of_its_column_is_named(column, value, what, sound):
    edit(sound, 0, column, value)
    (problem,) = errors(sound)
    assert f"line 2, column {column}" in problem
    assert what in problem


def test_missing_added_doubled_and_unsorted_rows_are_found(sound):
    path = sound / "digits.csv"
    header, first, second = path.read_text().splitlines()
    path.write_text("\n".join([header, first, ""]))
    assert "is missing" in " ".join(errors(sound))
    path.write_text("\n".join([header, first, second, second, ""]))
    assert "line 4: the row of line 3 again" in " ".join(errors(sound))
    path.write_text("\n".join([header, second, first, ""]))
    assert "not sorted" in " ".join(errors(sound))
    path.write_text("\n".join([header, first, second.replace("fedcova-sym-rho0.6", "fedcova-sym-rho0.4"), ""]))
    assert "line 3: no entry in results/ gives this row; with scenario = " in " ".join(errors(sound))
    path.write_text("\n".join([header.replace("rho", "ratio"), first, ""]))
    assert "columns missing: ['rho']; unknown: ['ratio']" in " ".join(errors(sound))
    path.write_text("\n".join([header, first + ",1", second, ""]))
    assert f"line 2: has {len(COLUMNS) + 1} cells" in " ".join(errors(sound))
    path.unlink()
    assert "digits.csv: is missing" in " ".join(errors(sound))


def test_an_entry_that_is_lost_is_named_before_the_cells_that_follow_from_it(sound):
    (path,) = sound.rglob("fedcova/*/draw1-seed0.json")
    path.unlink()
    first, *cells = errors(sound)
    assert "digits.csv, line 3: results/digits/" in first
    assert f"has no sound entry of fedcova ({path.parent.name}) for draw-seed 1-0, which this row names" in first
    assert any("column n: 2 stands there" in cell for cell in cells)
    assert not any("no sound entry" in cell for cell in cells)


def test_errors_come_before_doubts_of_another_table(tmp_path):
    folder = saved([entry(FULL), entry(dataset="cifar10")], tmp_path / "board")  # single draws
    edit(folder, 0, "accuracy_mean", "99")
    lines = call("leaderboard", "verify", folder).stdout.splitlines()
    assert "digits.csv, line 2, column accuracy_mean" in lines[0]
    assert any("cifar10.csv" in line for line in lines[1:])


def test_a_draw_with_other_labels_between_methods_is_found(tmp_path):
    other = {"data": "d" * 64, "partition": "p" * 64, "labels": "x" * 64}
    same = {**other, "labels": "l" * 64}
    folder = saved([entry(digests=same), entry(method="fedcova", digests=other)], tmp_path)
    (problem,) = errors(folder)
    assert "its labels digest is xxxxxxxxxxxxxxxx" in problem
    assert "did not train on the same labels" in problem


def test_a_data_set_with_other_public_images_is_found(tmp_path):
    same = {"data": "d" * 64, "partition": "p" * 64, "labels": "l" * 64}
    first, second = (entry(method=name, digests=same | {"public": name[-1] * 64}) for name in ("fedned", "fedcorr"))
    folder = saved([entry(digests=same), first, second], tmp_path)  # fedavg has none
    (problem,) = errors(folder)
    assert "did not train on the same public" in problem


def test_an_entry_that_is_damaged_misplaced_or_of_an_unknown_method_is_found(sound):
    path = sorted((sound / "results").rglob("*.json"))[0]
    text = path.read_text()
    path.write_text(text[:50])
    assert "damaged" in errors(sound)[0]
    path.write_text(text)
    moved = path.with_name("draw7-seed0.json")
    path.rename(moved)
    assert errors(sound) == [f"{moved}: by its settings it belongs to {path}"]
    moved.rename(path)
    path.write_text(text.replace('"method": "fedavg"', '"method": "mine.py:Mine"'))
    assert any("give it an entry point" in one for one in errors(sound))
    path.write_text(text.replace('"method": "fedavg"', '"method": "fedaverage"'))
    assert f"{path}: method fedaverage is not installed, so nobody can run this again" in errors(sound)


def test_a_run_that_ended_early_is_doubted_at_its_entry(tmp_path):
    one = entry(completed=False)
    found = [problem for problem in board.verify(saved([one], tmp_path)) if problem.file == one.path(tmp_path)]
    assert [(problem.level, problem.what) for problem in found] == [("doubt", "ended after 2 of 3 rounds")]


def test_a_run_that_is_damaged_or_not_in_the_leaderboard_is_told_by_verify(built, runs, tmp_path):
    shutil.copytree(runs, tmp_path / "runs")
    first, second, *_ = (path.parent for path in sorted((tmp_path / "runs").rglob("result.json")))
    (first / "result.json").write_text("{")
    Entry.of(second).path(built).unlink()
    found = {one.file: one for one in board.verify(built, [tmp_path / "runs"])}
    assert found[first].level == "error"
    assert "is damaged" in found[first].what
    assert (found[second].level, found[second].what) == ("doubt", "is finished and not in the leaderboard")


def test_an_entry_that_differs_from_its_run_is_found(built, runs):
    path = sorted((built / "results").rglob("*.json"))[0]
    content = json.loads(path.read_text())
    content["curves"]["accuracy"][-1] = 99.0
    path.write_text(json.dumps(content))
    assert any("curves differs from that of the run in" in one for one in errors(built, runs))
    assert any("column accuracy_mean" in one for one in errors(built))


def _edited(path, place, value):
    """Write a value into an entry; a function is told the one that is there."""
    content = json.loads(path.read_text())
    inner = content
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = value(inner[place[-1]]) if callable(value) else value
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("place", "value", "what"),
    [
        (("curves", "accuracy"), [99.0, 99.0], "have the mean 99.0, and last5.predictors.main is"),
        (("curves", "accuracy"), [50.0, 150.0], "curves.accuracy has values outside 0 to 100"),
        (("images", "trained"), 1, "and images.trained is 1"),
        (("curves", "seconds"), [0.0, 0.0], "curves.seconds are 0 in all, and seconds.round is"),
        (("label_noise_after",), 0.0, "and label_noise_after is 0"),
        (("settings", "protocol", "rounds"), 1, "2 rounds completed, of 1"),
        (("failure",), "it broke", "status is 'complete', and failure 'it broke'"),
        (("settings", "changed"), {"nothing": 1}, "settings.changed is not what settings.method_settings has"),
        (("settings", "protocol_overrides"), {"rounds": 3}, "settings.protocol_overrides is not what"),
    ],
)
def test_an_entry_that_was_edited_by_hand_contradicts_itself(place, value, what, built):
    """Also where the tables were derived anew from it, so that they follow."""
    path = sorted((built / "results").rglob("*.json"))[0]
    _edited(path, place, value)
    assert any(f"{path}: " in one and what in one for one in errors(built))
    assert what in refused("leaderboard", "build", "--out", built)
    assert what in refused("leaderboard", "table", built)


def test_a_failed_runs_costs_may_be_more_than_those_of_its_rounds():
    """It stopped in the middle of one."""
    more = {"images": {"trained": 9999}, "seconds": {"round": 99.0}, "label_noise_after": 1.0}
    assert entries.contradictions(entry(status="failed").model_copy(update=more)) == []
    assert len(entries.contradictions(entry().model_copy(update=more))) == 3


def test_values_that_were_set_by_hand_are_no_presets():
    one = entry(method="fedcova", changes=["alpha=7"])
    said = one.settings.model_copy(update={"choices": "preset"})
    (found,) = entries.contradictions(one.model_copy(update={"settings": said}))
    assert found == "settings.choices is 'preset', and settings.changed names values"


@pytest.mark.parametrize(
    ("place", "value", "what"),
    [
        (("card", "title"), "Ours", "card.title is 'Ours', and the card of fedavg-relabel says "),
        (("card", "conditions"), ["none"], "card.conditions is ['none'], and the card of fedavg-relabel says "),
        (("settings", "preset"), "mine", "settings.preset is 'mine', and fedavg-relabel has no such preset"),
        (("settings", "changed"), {}, "settings.changed on top of preset default does not give"),
    ],
)
def test_an_entry_that_its_methods_own_code_contradicts_is_found(place, value, what, tmp_path):
    """Also where the tables were derived anew from it; of a run of other code nobody knows what it said."""
    words = ("--method", "fedavg-relabel", "--set", "gate=0.6", *RUN[3:], "--choices", "validation")
    done("run", *words, "--out", tmp_path / "runs", FLNOISEBENCH_COMMIT="c" * 40)
    folder = tmp_path / "leaderboards"
    done("leaderboard", "build", tmp_path / "runs", "--out", folder)
    assert errors(folder) == []
    (path,) = (folder / "results").rglob("*.json")
    _edited(path, place, value)
    done("leaderboard", "build", "--out", folder)
    (problem,) = errors(folder)
    assert problem.startswith(f"{path}: {what}")
    _edited(path, ("environment", "method_sha256"), "e" * 64)
    done("leaderboard", "build", "--out", folder)
    assert errors(folder) == []


@pytest.mark.parametrize(
    ("place", "value", "what"),
    [
        (("curves", "accuracy"), [float("nan")] * 2, "NaN is no number"),
        (("curves", "seconds"), [float("inf")] * 2, "Infinity is no number"),
        (("curves", "images"), [100], "a curve has a value a round"),
        (("rounds",), 1, "1 rounds, and curves of 2"),
        (("environment", "earlier"), {"a": 1}, "environment: Value error, earlier: Input should be a valid list"),
        (("environment", "packages"), ["torch"], "environment: Value error, packages: "),
        (("environment", "method_sha256"), 5, "environment: Value error, method_sha256: "),
        (("environment", "commit"), "yesterday", "environment.commit is 'yesterday'"),
        (("card",), {}, "card: Value error, title: Field required"),
        (("card", "told"), None, "card: Value error, told: "),
        (("digest",), "", "this lacks digest"),
    ],
)
def test_an_entry_of_another_shape_is_named_with_what_is_wrong(place, value, what, built):
    path = sorted((built / "results").rglob("*.json"))[0]
    _edited(path, place, value)
    assert any(one.startswith(f"{path}: is damaged") and what in one for one in errors(built))
    for command in (("build", "--out", built), ("table", built)):
        assert what in refused("leaderboard", *command)


@pytest.mark.parametrize("damage", [b"\xff\xfe\x00", b'"' + b"a" * 200_000 + b'"\n'])
def test_a_table_that_cannot_be_read_is_named(damage, sound):
    path = sound / "digits.csv"
    path.write_bytes(path.read_bytes() + damage)
    (problem,) = errors(sound)
    assert problem.startswith(f"{path}: is damaged (")
    assert "build it again" in refused("leaderboard", "table", sound)


def test_line_ends_as_git_makes_them_on_windows_are_no_edit(sound):
    for path in (sound / "digits.csv", *sound.rglob("*.json")):
        path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    assert errors(sound) == []
    done("leaderboard", "table", sound)


@pytest.mark.parametrize(("place", "name"), [(("scenario", "draw"), "draw7-seed0"), (("seed",), "draw0-seed7")])
def test_one_run_does_not_stand_for_two_draws_or_seeds(place, name, built):
    path = sorted((built / "results").rglob("draw0-seed0.json"))[0]
    again = shutil.copy(path, path.with_name(f"{name}.json"))
    _edited(again, ("settings", *place), 7)
    (problem,) = (one for one in errors(built) if "digest is that of" in one)
    assert str(again) in problem
    assert "one run stands for two draws or seeds" in refused("leaderboard", "build", "--out", built)


def test_the_shipped_leaderboards_follow_from_their_entries():
    assert errors(Path(__file__).parents[1] / "leaderboards") == []


def test_a_place_without_a_leaderboard_is_refused(tmp_path):
    assert "holds no leaderboard" in refused("leaderboard", "verify", tmp_path)
    assert "holds no leaderboard" in refused("leaderboard", "table", tmp_path)


# ------------------------------------------------------------------------------------------------------- rerun


def test_a_row_that_is_run_again_has_the_same_bits(built, tmp_path):
    result = call("leaderboard", "rerun", f"{built / 'digits.csv'}:2", "--out", tmp_path / "again",
                  FLNOISEBENCH_COMMIT="c" * 40)  # fmt: skip
    assert result.exit_code == 0, result.stderr
    said = rows(result.stdout)
    assert said["draw 0, seed 0"].endswith("bits equal")
    assert said["draw 1, seed 0"].endswith("bits equal")
    assert said["verdict"] == "agrees: within the stated spread"


def test_of_a_row_the_draws_that_are_named_are_run_again_and_no_other(built, tmp_path):
    rerun = ("leaderboard", "rerun", f"{built / 'digits.csv'}:2", "--out", tmp_path / "again")
    said = rows(done(*rerun, "--draw", "1", FLNOISEBENCH_COMMIT="c" * 40))
    assert [name for name in said if name.startswith("draw")] == ["draw 1, seed 0"]
    assert "no complete run of draw [7]" in refused(*rerun, "--draw", "7", FLNOISEBENCH_COMMIT="c" * 40)


def test_an_entry_whose_bits_differ_on_the_same_hardware_by_the_same_code_does_not_agree(built, tmp_path):
    path = sorted((built / "results").rglob("*.json"))[0]
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"digest": "0" * 64}))
    result = call("leaderboard", "rerun", path, "--out", tmp_path / "again", FLNOISEBENCH_COMMIT="c" * 40)
    assert result.exit_code == 1
    assert "bits differ, on the same hardware by the same code" in result.stdout
    assert "does not agree" in result.stdout


def test_a_row_of_other_code_is_run_again_with_a_word_before_it(built, tmp_path, monkeypatch):
    path = sorted((built / "results").rglob("*.json"))[0]
    rerun = ("leaderboard", "rerun", path, "--out", tmp_path / "again")
    result = call(*rerun, FLNOISEBENCH_COMMIT="d" * 40)
    what = f"draw 0, seed 0: made by commit {'c' * 40}, and this copy is of {'d' * 40}: bits may differ"
    assert what in result.stderr
    assert f"this copy has no {'c' * 40} to go back to" in result.stderr
    result = call(*rerun, FLNOISEBENCH_COMMIT="c" * 40)
    assert "made by commit" not in result.stderr
    monkeypatch.setattr(provenance, "reachable", lambda commit: True)
    result = call(*rerun, FLNOISEBENCH_COMMIT="d" * 40)
    assert f"git checkout {'c' * 40} goes back" in result.stderr
    result = call(*rerun, FLNOISEBENCH_COMMIT="c" * 40 + "+changes")
    assert f"this copy is of {'c' * 40}+changes" in result.stderr
    assert "git stash puts the changes here aside" in result.stderr
    _edited(path, ("environment", "commit"), "c" * 40 + "+changes")
    result = call(*rerun, FLNOISEBENCH_COMMIT="c" * 40 + "+changes")
    assert "what was changed there nobody knows" in result.stderr


def test_where_nobody_knows_the_commit_no_row_is_run_again(built, tmp_path, monkeypatch):
    """What it makes could not be taken for an entry, which would show after its hours only."""
    monkeypatch.setattr(provenance, "_of_this_copy", lambda: None)
    path = sorted((built / "results").rglob("*.json"))[0]
    rerun = ("leaderboard", "rerun", path, "--out", tmp_path / "again")
    assert "say the commit in FLNOISEBENCH_COMMIT" in refused(*rerun, FLNOISEBENCH_COMMIT="")
    assert "which is no commit of git" in refused(*rerun, FLNOISEBENCH_COMMIT="yesterday")
    assert not (tmp_path / "again").exists()


def test_what_is_no_row_and_no_result_is_refused(built, tmp_path):
    assert "rows in lines 2 to 3" in refused("leaderboard", "rerun", f"{built / 'digits.csv'}:9", "--out", tmp_path)
    assert "neither TABLE.csv:LINE" in refused("leaderboard", "rerun", tmp_path / "nothing", "--out", tmp_path)
    assert "holds no run" in refused("leaderboard", "rerun", tmp_path, "--out", tmp_path)


def test_a_folder_that_holds_a_single_run_is_run_again_and_one_of_several_is_refused(runs, tmp_path):
    folder = next(runs.rglob("fedavg/*"))
    (first, second) = sorted(folder.iterdir())
    shutil.copytree(second, tmp_path / "one" / "below" / "draw1")
    result = call("leaderboard", "rerun", tmp_path / "one", "--out", tmp_path / "again", FLNOISEBENCH_COMMIT="c" * 40)
    assert result.exit_code == 0, result.stderr
    assert rows(result.stdout)["draw 1, seed 0"].endswith("bits equal")
    said = refused("leaderboard", "rerun", folder, "--out", tmp_path / "again")
    assert "holds 2 runs; name one of them" in said
    assert str(first) in said


def test_a_run_that_fails_when_it_is_repeated_fails_in_every_call(tmp_path, monkeypatch):
    """And is not left out of the mean in the second, which finds its result in --out."""
    (tmp_path / "mine.py").write_text(PLUGIN)
    runs, out = tmp_path / "runs", tmp_path / "again"
    for draw in ("0", "1"):
        done("run", "--method", f"{tmp_path / 'mine.py'}:Mine", *RUN[3:], "--draw", draw, "--out", runs)
    done("leaderboard", "build", runs, "--out", tmp_path / "board", FLNOISEBENCH_COMMIT="c" * 40)
    rerun = ("leaderboard", "rerun", f"{tmp_path / 'board' / 'digits.csv'}:2", "--out", out)
    for trouble in ({"TROUBLE": "raise"}, {}):
        result = call(*rerun, FLNOISEBENCH_COMMIT="d" * 40, **trouble)  # by another commit: bits may differ
        assert result.exit_code == 1
        assert "draw 0, seed 0: the run of" in result.stderr
        assert "fails here: Mine, round 1" in result.stderr


def test_an_entrys_copy_has_a_row_of_its_own_in_a_folder_of_any_name(built, tmp_path):
    path = sorted((built / "results").rglob("*.json"))[0]
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "another.json").write_text("{}")
    shutil.copy(path, tmp_path / "results" / "copy.json")
    assert stated_by(str(path))[1].n == 2
    (stated,), row = stated_by(str(tmp_path / "results" / "copy.json"))
    assert (stated, row.n) == (entries.load(path), 1)


def test_a_run_is_not_held_against_itself(runs):
    folder = next(path.parent for path in runs.rglob("result.json"))
    for target in (folder, folder / "result.json"):
        result = call("leaderboard", "rerun", target, "--out", runs)
        assert result.exit_code == 2
        assert "would be held against itself; name another --out" in result.stderr


def test_agreement_by_hand():
    stated = [entry((60.0,), draw=0), entry((70.0,), draw=1)]
    row = only(stated)  # 65 +- 7.0711

    def again(first, second, **changes):
        return [entry((first,), draw=0, **changes), entry((second,), draw=1, **changes)]

    same = agreement(stated, stated, row)
    assert (same.stated, same.again, same.agrees) == (65, 65, True)
    elsewhere = {"environment": {"device": "a GPU"}, "digest": "0" * 64}
    near = agreement(stated, again(67.0, 77.0, **elsewhere), row)  # 72: 7 away
    assert (near.again, near.within, near.agrees) == (72, True, True)
    stated_device = stated[0].environment["device"]
    assert f"other hardware or libraries (device {stated_device}, here a GPU)" in near.repeats[0].but  # no more
    far = agreement(stated, again(68.0, 77.0, **elsewhere), row)  # 72.5: 7.5 away
    assert (far.within, far.agrees) == (False, False)
    broken = agreement(stated, again(60.0, 70.0, digest="0" * 64), row)
    assert (broken.within, broken.agrees) == (True, False)
    assert not agreement(stated[:1], [entry((61.0,), **elsewhere)]).agrees  # a single round states no spread
    with pytest.raises(ValueError, match="nothing was repeated"):
        agreement(stated[:1], [entry((60.0,), seed=1)])


DIRTY = {"environment": {"commit": "c" * 40 + "+changes"}}


@pytest.mark.parametrize(
    ("both", "again", "why"),
    [
        ({}, {"digests": {"data": "d", "partition": "p", "labels": "x"}}, "data, partition or labels differ"),
        ({}, {"environment": {"cudnn": "9"}}, "other hardware or libraries (cudnn unknown, here 9)"),
        ({}, {"environment": {"commit": "e" * 40}}, "other code (cccccccccccc; here eeeeeeeeeeee)"),
        ({}, {"environment": {"method_sha256": "e" * 64}}, "other code (cccccccccccc; here cccccccccccc)"),
        (DIRTY, {}, "code that differed from its commit cccccccccccc"),
        ({"deterministic": False}, {}, "kernels that are not repeatable"),
    ],
)
def test_why_equal_bits_were_not_to_be_expected_is_said_and_breaks_nothing(both, again, why):
    (one,) = agreement([entry((60.0,), **both)], [entry((60.0,), digest="0" * 64, **both, **again)]).repeats
    assert (one.bits, one.but, one.broken) == ("differ", why, False)


def test_a_split_is_known_by_its_content_wherever_its_file_lies(tmp_path, monkeypatch):
    """Moved or renamed between two sessions, runs go on; published, nobody reads where it lay; its draws are a row."""
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(PLUGIN)
    for name in ("here/split.csv", "there/renamed.csv"):
        Path(name).parent.mkdir()
        Path(name).write_text("index,client\n" + "".join(f"{i},{i % 5}\n" for i in range(1438)))
    here, there = (("--partition-set", f"file={tmp_path / name}") for name in ("here/split.csv", "there/renamed.csv"))
    run = ("run", "--method", "mine.py:Mine", "--rounds", "3", "--json")
    whole = json.loads(done(*run, *there, "--out", "whole").splitlines()[-1])
    assert call(*run, *here, TROUBLE="stop").exit_code == 130
    shutil.rmtree("here")
    assert json.loads(done(*run, *there).splitlines()[-1])["digest"] == whole["digest"]
    assert (
        json.loads(done(*run, "--partition-set", "file=there/renamed.csv").splitlines()[-1])["digest"]
        == whole["digest"]
    )
    said = json.loads(done("compare", only_run(Path("whole")), only_run(Path("runs")), "--json"))
    assert said["comparable"], said["obstacles"]
    Path("there").rename("elsewhere")
    done(*run, "--partition-set", "file=elsewhere/renamed.csv", "--draw", "1")
    done("leaderboard", "build", "runs", "--out", "board", FLNOISEBENCH_COMMIT="0123456")
    (row,) = board.read(Path("board"), "digits")[0]
    assert (row.draws, row.partition[:9]) == ("0 1", "manifest-")
    for path in Path("board").rglob("*.json"):
        assert json.loads(path.read_text())["settings"]["scenario"]["partition"]["file"] == "renamed.csv"
        assert str(tmp_path) not in path.read_text()
    (folder,) = Path("runs").rglob("draw1-seed0")  # a run's own folder says where the file lies
    assert call("leaderboard", "rerun", folder, "--out", "again", FLNOISEBENCH_COMMIT="0123456").exit_code == 0
    failed = call("leaderboard", "rerun", "board/digits.csv:2")
    assert failed.exit_code == 1
    assert "wanted is the split whose SHA-256 is" in failed.stderr
    shutil.copy("elsewhere/renamed.csv", ".")
    assert call("leaderboard", "rerun", "board/digits.csv:2", "--draw", "1").exit_code == 0


@pytest.mark.parametrize(
    ("dataset", "head", "at", "methods"),
    [("digits", "(.4, .5), 22.1 %", 3, 15), ("fashion-mnist", "(.4, .5), 15.5 %", 1, 14)],
)
def test_the_documented_tables_are_the_leaderboards(dataset, head, at, methods):
    """Accuracy of the column ``at``, and precision and recall of what is detected there."""
    root = Path(__file__).resolve().parents[1]
    known = {
        f"{row.accuracy_mean:.2f} ± {row.accuracy_std_seeds:.2f}".replace(" 0.", " ."): row
        for row in board.read(root / "leaderboards", dataset)[0]
        if row.n > 1
    }
    text = (root / "leaderboards" / f"{dataset}.md").read_text(encoding="utf-8")
    lines = text[text.index(f"| method | {head}") :].split("\n\n")[0].splitlines()[2:]
    assert len(lines) == methods
    for line in lines:
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        row = known[cells[at]]
        judged = ((row.clients_precision, row.clients_recall), (row.samples_precision, row.samples_recall))
        wanted = [f"{found:.0f} / {share:.0f}" for found, share in judged if found is not None]
        assert [cell for cell in cells if " / " in cell] == wanted, cells[0]


@pytest.mark.parametrize(
    ("dataset", "head", "noise", "rho"),
    [
        ("cifar10", "## (.6, .7)", "fedcova-sym", 0.6),
        ("cifar10", "## (.4, .5)", "fedcova-sym", 0.4),
        ("cifar10", "## Asymmetric (.6, .5)", "fedcova-asym", 0.6),
        ("fashion-mnist", "## Asymmetric (.6, .5)", "fedcova-asym", 0.6),
    ],
)
def test_the_documented_draws_are_the_leaderboards(dataset, head, noise, rho):
    """Every draw of the papers' methods, and the difference to FedAvg over the draws that both have."""
    root = Path(__file__).resolve().parents[1]
    found = {
        row.title.removesuffix(" (federated)"): row.by_draw
        for row in board.read(root / "leaderboards", dataset)[0]
        if (row.noise, row.rho, row.track, row.changed) == (noise, rho, "common", "")
        and not row.method.startswith("fedavg-")
        and (row.participation, row.optimiser) == (1, "sgd momentum=0.9 weight_decay=0.0005")
        and (row.rounds, row.lr) == {"cifar10": (120, 0.1), "fashion-mnist": (50, 0.05)}[dataset]
    }
    text = (root / "leaderboards" / f"{dataset}.md").read_text(encoding="utf-8")
    text = text[text.index(head) :]
    heading, _, *lines = text[text.index("| method |") :].split("\n\n")[0].splitlines()
    names, *cells = ([cell.strip() for cell in line.split("|")[1:-1]] for line in (heading, *lines))
    table = [dict(zip(names, said, strict=True)) for said in cells]
    assert {line["method"] for line in table} == set(found)
    for line in table:
        here = found[line["method"]]
        shown = {draw: float(said) for draw in range(3) if (said := line[f"draw {draw}"])}
        assert shown == {draw: pytest.approx(value, abs=0.0051) for draw, value in here.items()}, line
        if said := line.get("mean"):
            values = list(here.values())
            assert said == f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}".replace(" 0.", " ."), line
        if said := line.get("to FedAvg"):
            assert float(said) == pytest.approx(paired(here, found["FedAvg"])["mean"], abs=0.0051), line


def test_the_methods_table_of_the_readme_is_the_leaderboards():
    """Every cell, and in bold the best of each column among the methods that it shows."""
    root = Path(__file__).resolve().parents[1]
    columns = {
        "digits": ("digits", "fedcova-sym", 0.6, 0.7, "common"),
        "digits, tuned": ("digits", "fedcova-sym", 0.6, 0.7, "tuned"),
        "digits asymmetric, tuned": ("digits", "fedcova-asym", 0.6, 0.5, "tuned"),
        "Fashion-MNIST": ("fashion-mnist", "fedcova-sym", 0.6, 0.7, "common"),
        "CIFAR-10, 120 rounds": ("cifar10", "fedcova-sym", 0.6, 0.7, "common"),
    }
    text = (root / "README.md").read_text(encoding="utf-8")
    head, _, *lines = text[text.index("| method | digits |") :].split("\n\n")[0].splitlines()
    names, *shown = ([line.split("|")[i].strip() for line in (head, *lines)] for i in range(1, len(columns) + 2))
    for (name, *cells), where in zip(shown, columns.values(), strict=True):
        assert where == columns[name]
        means = {
            row.title: (row.accuracy_mean, row.accuracy_std_seeds)
            for row in board.read(root / "leaderboards", where[0])[0]
            if (row.dataset, row.noise, row.rho, row.tau, row.track) == where and row.n > 1 and not row.changed
        }
        best = max(names[1:], key=lambda title: means.get(title, (0.0,))[0])
        for title, cell in zip(names[1:], cells, strict=True):
            wanted = f"{means[title][0]:.1f} ± {means[title][1]:.1f}" if title in means else ""
            assert cell == (f"**{wanted}**" if title == best else wanted), (name, title)
