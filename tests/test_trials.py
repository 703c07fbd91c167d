"""`choose`: the best of as many trials for every method, what it writes, and what it refuses."""

import csv
import io
import json
import shutil
import statistics
import tomllib
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from command_line import call, done, refused

from flnoisebench import grid, trials

TRIALS = """
dataset = "digits"
clients = 5
rounds = 3
method = ["fedavg", "fedavg-gce"]
draw = [20, 21]
holdout = 0.2
evaluate-on = "noisy-validation"
noise-set.include_true = false
[set]
protocol.optimiser.lr = [0.03, 0.1]
"""


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """(the trials' grid, the folder of its runs, all over)."""
    folder = tmp_path_factory.mktemp("trials")
    path = folder / "trials.toml"
    path.write_text(TRIALS)
    done("sweep", path, "--device", "cpu", "--workers", "2", "--out", folder / "runs")
    return path, folder / "runs"


def choose(swept, *words):
    path, out = swept
    return done("choose", path, "--out", out, "--device", "cpu", *words)


def results(out, method):
    """{learning rate: the accuracies of its runs}, read from the runs' own files."""
    found = {}
    for path in sorted(out.rglob("result.json")):
        content = json.loads(path.read_text())
        if content["settings"]["method"] == method:
            rate = content["settings"]["protocol"]["optimiser"]["lr"]
            found.setdefault(rate, []).append(content["accuracy"]["last5_mean"])
    return found


def tried(path, **where):
    """{method: its trials}, of runs that nobody carried out."""
    found = defaultdict(lambda: defaultdict(list))
    for one in grid.load(path, device="cpu", **where):
        found[one.method][one.key].append(SimpleNamespace(settings=one))
    return {
        method: [trials.Trial(runs[0].settings, tuple(runs)) for runs in several.values()]
        for method, several in found.items()
    }


def last(path, **where):
    """{method: the last of its trials}."""
    return {method: several[-1] for method, several in tried(path, **where).items()}


def test_the_highest_mean_over_the_draws_is_chosen(swept):
    said = json.loads(choose(swept, "--json"))
    assert list(said) == ["fedavg", "fedavg-gce"]
    for method, facts in said.items():
        means = {rate: statistics.fmean(values) for rate, values in results(swept[1], method).items()}
        rate = max(means, key=means.get)
        assert facts["set"] == [f"protocol.optimiser.lr={rate}"]
        assert facts["accuracy"] == pytest.approx(means.pop(rate))
        assert facts["next"] == pytest.approx(*means.values())
        assert (facts["trials"], facts["failed"]) == (2, 0)
    head, *lines = choose(swept).splitlines()
    assert head.split("\t") == ["method", "chosen", "noisy-validation, %", "next best", "trials"]
    assert [line.split("\t")[0] for line in lines] == ["fedavg", "fedavg-gce"]


def test_what_is_said_of_a_choice_is_of_its_runs_and_of_the_trials_beside_it(tmp_path, monkeypatch):
    path = tmp_path / "trials.toml"
    rates = "[0.03, 0.1]\nprotocol.optimiser.momentum = [0.5, 0.9]"
    path.write_text(TRIALS.replace("[0.03, 0.1]", rates).replace("[20, 21]", "[20, 21, 22]"))
    path.write_text(path.read_text().replace('["fedavg", "fedavg-gce"]', '"fedcova"\npreset = "no-corrector"'))
    several = tried(path)["fedcova"]
    accuracies = [[83.0, 83.0, 83.0], [80.0, 84.0, 88.0], [99.0, 99.0, None], [70.0, 70.0, 70.0]]

    def measured(trial, values):
        results = [
            SimpleNamespace(
                settings=result.settings,
                status="failed" if value is None else "complete",
                accuracy=SimpleNamespace(last5_mean=value),
                environment={"commit": "a" * 40},
            )
            for result, value in zip(trial.results, values, strict=True)
        ]
        return trials.Trial(trial.settings, tuple(results))

    found = [measured(trial, values) for trial, values in zip(several, accuracies, strict=True)]
    single = trials.Trial(found[1].settings, found[1].results[2:])
    monkeypatch.setattr(trials, "load", lambda *words, **named: {"fedcova": found, "lone": [single, found[2]]})
    said = json.loads(done("choose", path, "--device", "cpu", "--json"))
    chosen = ["protocol.optimiser.lr=0.03", "protocol.optimiser.momentum=0.9"]
    both = {"preset": "no-corrector", "set": chosen, "failed": 1}
    assert said == {
        "fedcova": {**both, "accuracy": 84.0, "std": 4.0, "next": 83.0, "trials": 4},
        "lone": {**both, "accuracy": 88.0, "std": None, "next": None, "trials": 2},
    }
    values = " ".join(["preset no-corrector", *chosen])
    assert [line.split("\t") for line in done("choose", path, "--device", "cpu").splitlines()[1:]] == [
        ["fedcova", values, "84.00 ± 4.00", "83.00", "4, 1 failed"],
        ["lone", values, "88.00", "-", "2, 1 failed"],
    ]


def test_the_grid_that_it_writes_runs_the_choices_on_other_draws_and_the_test_images(swept, tmp_path):
    chosen = json.loads(choose(swept, "--json", "--grid", tmp_path / "tuned.toml", "--draw", "3", "--draw", "4"))
    found = grid.load(tmp_path / "tuned.toml", device="cpu")
    assert [(one.method, one.scenario.draw) for one in found] == [
        (method, draw) for method in ("fedavg", "fedavg-gce") for draw in (3, 4)
    ]
    for one in found:
        assert (one.track, one.choices, one.evaluate_on, one.scenario.holdout) == (
            "tuned", "noisy-validation", "test", 0.0,
        )  # fmt: skip
        assert chosen[one.method]["set"] == [f"protocol.optimiser.lr={one.protocol.optimiser.lr}"]
        assert (one.protocol.rounds, one.scenario.clients, one.scenario.noise.include_true) == (3, 5, False)


def test_its_row_in_the_leaderboard_says_that_it_was_tuned_and_is_not_doubted_for_it(swept, tmp_path, monkeypatch):
    monkeypatch.setenv("FLNOISEBENCH_COMMIT", "0" * 40)
    choose(swept, "--grid", tmp_path / "tuned.toml", "--draw", "3", "--draw", "4")
    done("sweep", tmp_path / "tuned.toml", "--device", "cpu", "--workers", "2", "--out", tmp_path / "runs")
    done("leaderboard", "build", tmp_path / "runs", "--out", tmp_path / "board")
    with (tmp_path / "board" / "digits.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {(row["method"], row["track"], row["choices"], row["n"]) for row in rows} == {
        ("fedavg", "tuned", "noisy-validation", "2"),
        ("fedavg-gce", "tuned", "noisy-validation", "2"),
    }
    assert not {"choosing-set", "unstated-choices"} & {flag for row in rows for flag in row["flags"].split()}


def test_the_log_has_every_run_with_what_it_takes_to_try_it_again(swept, tmp_path):
    choose(swept, "--log", tmp_path / "log.csv")
    lines = list(csv.DictReader(io.StringIO((tmp_path / "log.csv").read_text())))
    assert len(lines) == 2 * 2 * 2
    assert {(line["method"], line["set"], line["draw"]) for line in lines} == {
        (method, f"protocol.optimiser.lr={rate}", draw)
        for method in ("fedavg", "fedavg-gce") for rate in (0.03, 0.1) for draw in ("20", "21")
    }  # fmt: skip
    for line in lines:
        rate = float(line["set"].partition("=")[2])
        assert float(line["accuracy"]) in results(swept[1], line["method"])[rate]
        assert all(line.values())


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ('evaluate-on = "noisy-validation"', "", "measured on 'test', which is for reporting"),
        ('evaluate-on = "noisy-validation"', 'evaluate-on = "test-b"', "'test-b', which is for reporting"),
        ('"noisy-validation"', '["noisy-validation", "validation"]', "trials share one evaluate-on"),
        ("rounds = 3", 'rounds = 3\nprecision = ["fp32", "tf32"]', "trials share one precision"),
        ("[set]", '[set]\nprotocol.model = ["mlp", "small-cnn"]', "trials share one protocol.model"),
        ("rounds = 3", "rounds = [3, 4]", "trials share one rounds"),
        ("[set]", "[set]\nprotocol.participation = [0.5, 1.0]", "trials share one protocol.participation"),
        (
            "[0.03, 0.1]",
            '[0.03, 0.1]\n[[exclude]]\nmethod = "fedavg"\nset.protocol.optimiser.lr = 0.1',
            "these have: fedavg 1, fedavg-gce 2",
        ),
        ("[0.03, 0.1]", '[0.03, 0.1]\n[[exclude]]\nmethod = "fedavg"\ndraw = 21', "draw 21, seed 0"),
        ("[0.03, 0.1]", "[0.03, 0.2]", "4 of 8 runs are not over"),
        (
            "[0.03, 0.1]",
            '[0.03, 0.1]\n[[include]]\nmethod = "fedavg-ema"\noracle = "clean-samples"',
            "share one oracle",
        ),
        ("method", "metod", "did you mean"),
    ],
)
def test_an_unfair_or_unfinished_comparison_is_refused(swept, tmp_path, old, new, found):
    path = tmp_path / "other.toml"
    path.write_text(TRIALS.replace(old, new))
    said = refused("choose", path, "--out", swept[1], "--device", "cpu", "--log", tmp_path / "log.csv")
    assert found.lower() in said.lower()
    assert str(path) in said
    assert not (tmp_path / "log.csv").exists()


def test_another_runs_result_is_no_trial(swept, tmp_path):
    """A folder that was filled with a copy: one trial would stand there as two."""
    path, out = swept
    shutil.copytree(out, tmp_path / "runs")
    first, second = sorted((tmp_path / "runs").rglob("fedavg/*/draw20-seed0/result.json"))
    first.write_bytes(second.read_bytes())
    said = refused("choose", path, "--out", tmp_path / "runs", "--device", "cpu")
    assert f"{first} is of another run" in said


def test_a_trial_whose_result_was_edited_is_not_chosen(swept, tmp_path):
    path, out = swept
    shutil.copytree(out, tmp_path / "runs")
    first = sorted((tmp_path / "runs").rglob("fedavg/*/draw20-seed0/result.json"))[0]
    content = json.loads(first.read_text())
    content["accuracy"]["last5_mean"] = 99.0
    first.write_text(json.dumps(content))
    said = refused("choose", path, "--out", tmp_path / "runs", "--device", "cpu")
    assert f"{first.parent}: the accuracies of result.json do not follow from records.jsonl" in said
    assert f"move {first.parent} away" in said


def test_a_draw_that_was_chosen_on_is_not_reported(swept, tmp_path):
    path, out = swept
    words = ("choose", path, "--out", out, "--device", "cpu", "--grid", tmp_path / "tuned.toml", "--draw", "20")
    said = refused(*words, "--log", tmp_path / "log.csv")
    assert "draws [20] are those that values were chosen on" in said
    assert list(tmp_path.iterdir()) == []


METHODS = 'method = ["fedavg", "fedavg-gce"]\n'


@pytest.mark.parametrize(
    ("old", "new", "further", "found"),
    [
        ("", "", f"[[include]]\n{METHODS}clients = 6\n", "_m6.* would be in the trials or in the grid"),
        ("0.1", '0.1\nprotocol.precision = "tf32"', "", "precision is tf32 in the trials, and would be fp32"),
        (METHODS, "", f'[[include]]\n{METHODS}oracle = "clean-samples"\n', "oracle is clean-samples in the trials"),
    ],
)
def test_what_the_keys_that_it_repeats_do_not_say_is_refused(tmp_path, old, new, further, found):
    path = tmp_path / "trials.toml"
    text = TRIALS.replace("[20, 21]", "20").replace("[0.03, 0.1]", "0.1")
    path.write_text(text.replace(old, new, 1) + further)
    with pytest.raises(ValueError, match=found):
        trials.final_grid(path, last(path), [3], device="cpu")


def test_scenarios_that_the_written_grid_could_not_say_are_refused(swept, tmp_path):
    path = tmp_path / "other.toml"
    path.write_text(TRIALS.replace("clients = 5", "clients = [5, 6]") + "[[exclude]]\nclients = 6")
    words = ("choose", path, "--out", swept[1], "--device", "cpu")
    done(*words)
    assert "and not in both: say the scenarios above all [[include]]" in refused(
        *words, "--grid", tmp_path / "tuned.toml"
    )
    assert not (tmp_path / "tuned.toml").exists()


def test_a_budget_that_the_written_grid_would_not_have_is_refused(swept, tmp_path):
    path = tmp_path / "other.toml"
    path.write_text(TRIALS.replace("rounds = 3\n", "") + "protocol.rounds = 3\n")  # the same runs
    words = ("choose", path, "--out", swept[1], "--device", "cpu")
    done(*words)
    said = refused(*words, "--grid", tmp_path / "tuned.toml")
    assert "rounds is 3 in the trials, and would be 100 in the grid that is written" in said
    assert not (tmp_path / "tuned.toml").exists()


@pytest.mark.parametrize("said", ["noise-set = [{include_true = false}]", 'noise-set = "include_true=false"'])
def test_however_a_scenario_is_said_the_written_grid_has_it(swept, tmp_path, said):
    path = tmp_path / "other.toml"
    path.write_text(TRIALS.replace("noise-set.include_true = false", said))
    done("choose", path, "--out", swept[1], "--device", "cpu", "--grid", tmp_path / "tuned.toml")
    assert not any(one.scenario.noise.include_true for one in grid.load(tmp_path / "tuned.toml", device="cpu"))


def test_trials_of_several_scenarios_are_reported_on_all_of_them(tmp_path):
    path = tmp_path / "two.toml"
    path.write_text(TRIALS.replace("noise-set.include_true = false", "noise-set.include_true = [true, false]"))
    text = trials.final_grid(path, last(path), [3], device="cpu")
    found = grid.runs_of(grid.expand(tomllib.loads(text)), device="cpu")
    assert [(one.method, one.scenario.noise.include_true) for one in found] == [
        (method, own) for method in ("fedavg", "fedavg-gce") for own in (True, False)
    ]


@pytest.mark.parametrize(
    ("chosen_on", "reported"), [("validation", "test"), ("noisy-validation", "test"), ("test-a", "test-b")]
)
def test_all_values_of_a_choice_are_one_run_a_draw_on_images_that_it_was_not_chosen_on(tmp_path, chosen_on, reported):
    path = tmp_path / "trials.toml"
    text = TRIALS.replace('"noisy-validation"', f'"{chosen_on}"').replace(
        "protocol.optimiser", "protocol.batch = 16\nprotocol.optimiser"
    )
    path.write_text(text.replace("holdout = 0.2\n", "") if chosen_on == "test-a" else text)
    (tmp_path / "tuned.toml").write_text(trials.final_grid(path, last(path), [3, 4], device="cpu"))
    found = grid.load(tmp_path / "tuned.toml", device="cpu")
    assert [(one.method, one.scenario.draw) for one in found] == [
        (method, draw) for method in ("fedavg", "fedavg-gce") for draw in (3, 4)
    ]
    assert {(one.protocol.batch, one.protocol.optimiser.lr) for one in found} == {(16, 0.1)}
    assert {(one.choices, one.evaluate_on) for one in found} == {(chosen_on, reported)}


def test_the_grid_for_images_of_ones_own_has_their_clients_and_repeats_by_seeds(tmp_path):
    (tmp_path / "train.csv").write_text("path,label,client\na.png,cat,north\nb.png,dog,south\nc.png,dog,north\n")
    (tmp_path / "test.csv").write_text("path,label\nd.png,cat\n")
    path = Path(__file__).parents[1] / "examples" / "own.toml"
    chosen = last(path, data_root=tmp_path)
    (tmp_path / "tuned.toml").write_text(trials.final_grid(path, chosen, [0, 1], device="cpu", data_root=tmp_path))
    found = grid.load(tmp_path / "tuned.toml", device="cpu", data_root=tmp_path)
    assert [(one.method, one.seed) for one in found] == [(method, seed) for method in chosen for seed in (0, 1)]
    assert {one.scenario.clients for one in found} == {2}


def test_where_nothing_but_the_holdout_is_drawn_the_choices_are_reported_by_seeds(tmp_path):
    (tmp_path / "split.csv").write_text("index,client\n" + "\n".join(f"{i},{i % 3}" for i in range(1437)) + "\n")
    path = tmp_path / "trials.toml"
    split = f'partition = "manifest"\npartition-set.file = {json.dumps(str(tmp_path / "split.csv"))}\n'
    text = TRIALS.replace("noise-set.include_true = false", 'noise = "clean"').replace("clients = 5\n", split)
    path.write_text(text.replace("[20, 21]", "[0, 1]"))
    runs = grid.load(path, device="cpu")
    chosen = {"fedavg": trials.Trial(runs[0], tuple(SimpleNamespace(settings=run) for run in runs[:1]))}
    path_of_choices = tmp_path / "tuned.toml"
    path_of_choices.write_text(trials.final_grid(path, chosen, [0, 1, 2], device="cpu"))
    assert [(one.scenario.draw, one.seed) for one in grid.load(path_of_choices, device="cpu")] == [
        (0, 0),
        (0, 1),
        (0, 2),
    ]
    path.write_text(path.read_text().replace('noise = "clean"', 'noise = ["clean", "fedcova-sym"]'))
    with pytest.raises(ValueError, match=r"draws \[0, 1\] are those that values were chosen on"):  # one of two is drawn
        trials.final_grid(path, last(path), [0, 1, 2], device="cpu")


def test_folders_of_the_files_that_it_writes_are_made_and_what_cannot_be_written_is_named(swept, tmp_path):
    grid_file, log = tmp_path / "new" / "tuned.toml", tmp_path / "logs" / "trials.csv"
    choose(swept, "--grid", grid_file, "--log", log)
    assert grid_file.is_file()
    assert log.is_file()
    path, out = swept
    in_the_way = tmp_path / "folder.toml"
    in_the_way.mkdir()
    said = refused("choose", path, "--out", out, "--device", "cpu", "--grid", in_the_way, code=1)
    assert said == f"error: {in_the_way}: Is a directory"


def test_the_trials_grid_is_not_written_over(swept, tmp_path, monkeypatch):
    path = tmp_path / "trials.toml"
    shutil.copy(swept[0], path)
    monkeypatch.chdir(tmp_path)
    words = ("choose", path, "--out", swept[1], "--device", "cpu")
    for places in (("--grid", "trials.toml"), ("--log", path), ("--grid", "new", "--log", "new")):
        assert "two of them are one" in refused(*words, *places)
    assert path.read_text() == TRIALS
    assert list(tmp_path.iterdir()) == [path]


def test_trials_of_several_commits_are_said_to_be(swept, tmp_path):
    path, out = swept
    shutil.copytree(out, tmp_path / "runs")
    result = next((tmp_path / "runs").rglob("result.json"))
    content = json.loads(result.read_text())
    own = content["environment"]["commit"]
    content["environment"]["earlier"] = [{**content["environment"], "commit": "e" * 40}]  # stopped, and went on
    result.write_text(json.dumps(content))
    said = call("choose", path, "--out", tmp_path / "runs", "--device", "cpu")
    assert f"made by several commits: {', '.join(sorted([own, 'e' * 40]))}" in said.stderr
    content["environment"]["commit"] = "f" * 40
    result.write_text(json.dumps(content))
    log = tmp_path / "log.csv"
    said = call("choose", path, "--out", tmp_path / "runs", "--device", "cpu", "--log", log)
    assert said.exit_code == 0
    assert "made by several commits: " in said.stderr
    assert "e" * 40 in said.stderr
    assert "f" * 40 in said.stderr
    assert f"{'e' * 40}; {'f' * 40}," in log.read_text()


def test_a_trial_that_failed_is_counted_and_never_chosen(swept, tmp_path):
    path, out = swept
    found = trials.load(path, out=out, device="cpu")
    winner = trials.best(found["fedavg"])
    broken = winner.results[0].model_copy(update={"status": "failed", "failure": "no luck"})
    failed = winner._replace(results=(broken, *winner.results[1:]))
    tried = [failed if trial is winner else trial for trial in found["fedavg"]]
    assert trials.best(tried) is next(trial for trial in found["fedavg"] if trial is not winner)
    assert trials.best([winner, winner._replace(settings=failed.settings)]) is winner  # of equal ones the first
    with pytest.raises(ValueError, match="each trial of fedavg has a run that failed"):
        trials.best([failed])
    statuses = [line.split(",")[6] for line in trials.log({"fedavg": tried}).splitlines()[1:]]
    assert sorted(statuses) == ["complete"] * 3 + ["failed"]


def test_presets_are_trials_too_and_halves_of_the_test_set_are_for_choosing(tmp_path):
    text = TRIALS.replace(
        'method = ["fedavg", "fedavg-gce"]', 'method = "fedcova"\npreset = ["best-found", "no-corrector"]'
    )
    text = text.replace('holdout = 0.2\nevaluate-on = "noisy-validation"', 'evaluate-on = "test-a"')
    path = tmp_path / "presets.toml"
    path.write_text(text.partition("[set]")[0].replace("[20, 21]", "20"))
    done("sweep", path, "--device", "cpu", "--workers", "2", "--out", tmp_path / "runs")
    done("choose", path, "--out", tmp_path / "runs", "--device", "cpu", "--grid", tmp_path / "tuned.toml")
    table = tomllib.loads((tmp_path / "tuned.toml").read_text())["include"][0]
    assert (table["evaluate_on"], table["choices"], table["draw"]) == ("test-b", "test-a", [0, 1, 2, 3, 4])
    assert table["preset"] in ("best-found", "no-corrector")
    assert "set" not in table
    assert len(grid.load(tmp_path / "tuned.toml", device="cpu")) == 5


def test_a_device_that_there_is_not_is_refused(swept):
    assert "unknown device 'gpu'" in refused("choose", swept[0], "--device", "gpu")


@pytest.mark.parametrize(("gpus", "device"), [(False, "cpu"), (True, "cuda")])
def test_without_a_device_the_runs_are_looked_for_that_a_sweep_makes_here(tmp_path, monkeypatch, gpus, device):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus)
    seen = []
    monkeypatch.setattr(trials, "load", lambda *words, **named: seen.append(named["device"]) or {})
    call("choose", tmp_path / "trials.toml", "--json")
    assert seen == [device]
