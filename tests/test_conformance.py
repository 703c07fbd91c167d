"""The conformance suite: every installed method keeps every rule, and every rule is broken by somebody wicked.

Each method of wicked_methods.py is caught by the rule that it breaks, under the rule's name, and by nothing else: with
that rule taken out of the table it passes.  So each rule does work that no other does.
"""

import inspect
import json
import random
import re
import sys

import fixture_methods as fixtures
import numpy as np
import pytest
import torch
import wicked_methods as wicked
from command_line import call, done, refused

from flnoisebench import registry, runtime
from flnoisebench.api import Card
from flnoisebench.conformance import RULES, Rule, check

EVERY_METHOD = registry.names(registry.METHODS)
KILLED = {"fedavg", "fedcorr", "dividemix"}  # one that keeps nothing, one of many exchanges, one of two networks
NAMES = [rule.name for rule in RULES]
SHORT = {"rounds": 3}  # the wicked show themselves in the first rounds

REFUSED_BY_THE_RUNTIME = [
    wicked.WritesWithTorch, wicked.WritesStateWithTorch, wicked.WritesLateWithTorch, wicked.Closure, wicked.PartialLoss,
    wicked.Hooked, wicked.NanScores, wicked.FlatScores, wicked.NoDefault, wicked.NumpyNumber,
]  # fmt: skip
ONLY_IN_FULL = [wicked.GlobalMemory, wicked.LooksAtProcesses]
DRAWING = {
    wicked.DrawsTorch: "torch", wicked.DrawsNumpy: "numpy", wicked.DrawsRandom: "random", wicked.DrawsInLoss: "loss",
}  # fmt: skip
DECIDING = wicked.ServerDecidesByData.__subclasses__()
REMEMBERING = wicked.Remembers.__subclasses__()
BASES = [
    wicked.Innocent, wicked.WritesServerState, wicked.Remembers, wicked.Depends, wicked.Moves, wicked.Draws,
    wicked.ServerDecidesByData, wicked.CountsOnGenerators,
]  # fmt: skip
WICKED = [
    value
    for value in vars(wicked).values()
    if inspect.isclass(value)
    and issubclass(value, wicked.Innocent)
    and value not in [*REFUSED_BY_THE_RUNTIME, *ONLY_IN_FULL, *DRAWING, *DECIDING, *REMEMBERING, *BASES]
]


def statuses(report):
    return {finding.rule.name: finding.status for finding in report.findings}


def without(name):
    return [rule for rule in RULES if rule.name != name]


def forget():
    """Clear what SecondStart and SecondNote remember, in the module that checks know them by."""
    sys.modules[registry.load_method(f"{wicked.__file__}:SecondStart").__module__].STARTS.clear()


# -------------------------------------------------------------------------------------------- the methods we ship


@pytest.mark.parametrize("method", EVERY_METHOD)
def test_every_installed_method_keeps_every_rule(method):
    report = check(method)
    report.require()
    assert list(statuses(report)) == NAMES


@pytest.mark.parametrize(
    "method", [name if name in KILLED else pytest.param(name, marks=pytest.mark.slow) for name in EVERY_METHOD]
)
def test_it_does_so_when_real_processes_are_killed_and_share_the_work(method):
    check(method, only=["resumes", "executors"], full=True).require()


@pytest.mark.parametrize(
    "method",
    [
        fixtures.TwoExchanges, fixtures.Centroids, fixtures.Distilled, fixtures.Steered, fixtures.TwoStreams,
        fixtures.Remembering, fixtures.Masked, fixtures.PublicTraining, fixtures.Whole, fixtures.Norm,
    ],
)  # fmt: skip
def test_whatever_a_method_may_need_is_no_offence(method):
    check(method, rounds=3).require()


# ------------------------------------------------------------------------------------------- every rule is needed


def test_every_rule_has_somebody_who_breaks_it():
    assert {method.card.title for method in WICKED} == set(NAMES)


@pytest.mark.parametrize("method", WICKED, ids=lambda method: method.__name__)
def test_each_rule_catches_who_breaks_it_and_no_other_rule_does(method):
    rule = method.card.title
    forget()
    caught = check(method, only=[rule], **SHORT)
    assert statuses(caught) == {rule: "failed"}
    assert caught.findings[0].what
    forget()
    let_pass = statuses(check(method, rules=without(rule), **SHORT))
    if rule == "runs":  # nothing can be compared with a run that fails, so the others say that they were not tried
        assert "failed" not in let_pass.values()
        assert "not tried" in let_pass.values()
    else:
        assert set(let_pass.values()) == {"ok"}, let_pass


@pytest.mark.parametrize("method", [*DECIDING, *REMEMBERING], ids=lambda method: method.__name__)
def test_whatever_a_call_owes_to_data_or_calls_that_are_not_its_own_is_caught(method):
    rule = method.card.title
    assert statuses(check(method, only=[rule], rounds=2)) == {rule: "failed"}


@pytest.mark.parametrize("method", REFUSED_BY_THE_RUNTIME, ids=lambda method: method.__name__)
def test_what_the_runtime_refuses_is_reported_under_its_rule_in_the_runtimes_words(method):
    rule = method.card.title
    words = {
        "immutable": "in place", "capture": "is a closure over mu|must be a plain function, not partial|has a hook",
        "predictors": "predictor 'main' returned", "constructs": "alpha", "resumes": "turns: float64 is no plain float",
    }  # fmt: skip
    report = check(method, **SHORT)
    assert [finding.rule.name for finding in report.failed] == [rule]
    assert re.search(words[rule], report.failed[0].what)
    assert statuses(report)["runs"] == "not tried"
    # with the rule taken out, the runtime refuses it all the same
    report = check(method, rules=without(rule), **SHORT)
    assert [finding.rule.name for finding in report.failed] == ["runs"]
    assert re.search(words[rule], report.failed[0].what)


@pytest.mark.parametrize("method", DRAWING, ids=lambda method: method.__name__)
def test_a_draw_from_a_global_generator_is_told_once_with_its_line_and_no_other_rule_repeats_it(method):
    lines = inspect.getsource(wicked).splitlines()
    (number,) = [n for n, line in enumerate(lines, 1) if line.endswith(f"# the {DRAWING[method]} line")]
    report = check(method, **SHORT)
    assert [finding.rule.name for finding in report.failed] == ["randomness"]
    assert report.failed[0].where == f"{wicked.__file__}, line {number}"
    assert "was drawn from or seeded" in report.failed[0].what
    ((why, names),) = report.idle.items()
    assert "resumes" in names
    assert why == f"randomness: {report.failed[0].what}, {report.failed[0].where}"
    with pytest.raises(AssertionError, match=rf"not tried: .*resumes.*\n  what: randomness: .*, line {number}$"):
        report.require()


def test_a_broken_rule_is_told_of_a_method_that_fails_with_the_generators_elsewhere():
    report = check(wicked.CountsOnGenerators, only=["pure", "randomness"], rounds=1)
    assert statuses(report) == {"pure": "failed", "randomness": "failed"}
    assert "elsewhere" in report.failed[1].what


def test_a_draw_in_a_base_class_of_another_file_is_told_with_that_files_line(tmp_path, monkeypatch):
    (tmp_path / "draws_elsewhere.py").write_text(inspect.getsource(wicked))
    (tmp_path / "mine.py").write_text("import draws_elsewhere\nclass Mine(draws_elsewhere.DrawsRandom): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    report = check(f"{tmp_path / 'mine.py'}:Mine", only=["randomness"], rounds=2)
    number = 1 + [line.endswith("# the random line") for line in inspect.getsource(wicked).splitlines()].index(True)
    assert report.findings[0].where == f"{tmp_path / 'draws_elsewhere.py'}, line {number}"


def test_what_is_kept_in_a_module_outlives_a_stop_but_no_kill():
    method = wicked.GlobalMemory
    assert check(method, only=["resumes"], **SHORT).ok
    report = check(method, only=["resumes"], full=True, **SHORT)
    assert statuses(report) == {"resumes": "failed"}
    assert "killed" in report.findings[0].what


def test_stale_metadata_in_the_current_directory_hides_no_method_from_other_processes(tmp_path, monkeypatch):
    """A checkout can hold what an older version declared."""
    stale = tmp_path / "flnoisebench-0.dist-info"
    stale.mkdir()
    (stale / "METADATA").write_text("Metadata-Version: 2.1\nName: flnoisebench\nVersion: 0\n")
    (stale / "entry_points.txt").write_text("[flnoisebench.methods]\nolder = flnoisebench_methods.fedavg:FedAvg\n")
    monkeypatch.chdir(tmp_path)
    check("fedavg", only=["resumes"], full=True, **SHORT).require()


def test_what_only_another_process_shows_is_caught_with_full():
    method = wicked.LooksAtProcesses
    assert check(method, only=["executors"], **SHORT).ok
    report = check(method, only=["executors"], full=True, **SHORT)
    assert statuses(report) == {"executors": "failed"}
    assert report.findings[0].what == "the executor processes gives another run than serial"


# ------------------------------------------------------------------------------------------------------ reports


def test_a_report_says_what_where_and_what_to_do():
    report = check(wicked.WritesMessage, only=["immutable"], **SHORT)
    with pytest.raises(AssertionError) as caught:
        report.require()
    text = str(caught.value)
    assert "what: the message or the client's state was changed in place" in text
    assert "where: round 0, exchange 0, client 0, task 'train'" in text
    assert "what to do: Clone before writing" in text


@pytest.mark.parametrize(
    ("method", "where"),
    [
        (wicked.SecondNote, "round 0: diagnostics"),
        (wicked.PeeksAtTruth, "round 0: digest"),
        (wicked.TellsTruth, "round 0: diagnostics"),
        (wicked.ClaimsTruth, "round 0, exchange 0, client 0, task 'train': its claims"),
        (wicked.ServerClaimsTruth, "round 0, exchange 0, aggregate: its claims"),
    ],
)
def test_where_two_runs_part_is_told_with_the_round_and_what_differs_in_it(method, where):
    forget()
    assert check(method, only=[method.card.title], **SHORT).findings[0].where == where


def test_a_method_that_was_not_tried_on_a_rule_has_not_kept_it():
    report = check(wicked.Fails, only=["learns"], **SHORT)
    assert statuses(report) == {"learns": "not tried"}
    assert not report.ok
    with pytest.raises(AssertionError, match="not tried: learns\n  what: the plain run fails: "):
        report.require()


def test_half_of_the_test_images_are_not_enough_and_one_more_is():
    assert check(wicked.RightOn, only=["learns"], rounds=1).failed[0].what.startswith("50.0 % of ")
    assert check(wicked.RightOn, only=["learns"], rounds=1, settings={"right": 31}).ok


def test_settings_without_a_reason_are_named():
    found = [check(method, only=["reasons"]).findings[0] for method in (wicked.Unexplained, wicked.UnexplainedTable)]
    assert [one.what for one in found] == [f"no reason is given for {name}" for name in ("alpha", "table.alpha")]
    assert found[0].where == "Unexplained.Config"


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ({"told": "noise_rate"}, "told must be a tuple of texts"),
        ({"departures": ("no momentum, since none is stated", " ")}, "departures must be a tuple of texts"),
        ({"conditions": (1,)}, "conditions must be a tuple of texts"),
        ({"paper": ""}, "paper=''"),
    ],
)
def test_a_card_whose_entries_say_nothing_is_refused(field, words):
    with pytest.raises(ValueError, match=words):
        Card(**{"title": "Mine", "paper": "Somebody, 2025", "year": 2025, **field})


def test_an_error_of_the_method_is_reported_with_its_line():
    report = check(wicked.Fails, only=["runs"], **SHORT)
    line = inspect.getsource(wicked).splitlines().index('            raise RuntimeError("the sum went wrong")') + 1
    assert "Fails, round 2, exchange 0, aggregate: RuntimeError: the sum went wrong" in report.findings[0].what
    assert f"wicked_methods.py, line {line}" in report.findings[0].what


def test_an_error_within_a_library_is_reported_with_the_methods_own_last_line_and_name():
    what = check(wicked.FailsBelow, only=["runs"], **SHORT).findings[0].what
    (line,) = [n for n, text in enumerate(inspect.getsource(wicked).splitlines(), 1) if "# the failing line" in text]
    assert what.startswith("FailsBelow, round 0, exchange 0, client 0, task 'train': ValueError: ")
    assert what.endswith(f"({wicked.__file__}, line {line})")
    what = check(wicked.DividesBySteps, only=["batchnorm"], **SHORT).findings[0].what
    assert what.startswith("DividesBySteps, round 0, exchange 0, client 1, task 'train': ZeroDivisionError: ")


def test_what_a_preset_breaks_is_reported_with_the_preset_and_the_kind_of_error():
    finding = check(wicked.OddStart, only=["constructs"]).findings[0]
    assert finding.what.startswith(f"KeyError: 'small-cnn' ({wicked.__file__}, line ")
    assert finding.where == "preset 'odd'"


def test_what_a_hook_returned_is_reported_with_the_hook_and_its_line():
    report = check(wicked.NoTree, only=["runs"], **SHORT)
    line = inspect.getsourcelines(wicked.NoTree.aggregate)[1]
    what = report.findings[0].what
    assert what == (
        "NoTree, round 0, exchange 0: aggregate's state/0: set is no tree (tensor, bool, int, float, str, None, or a "
        f"dict, list or tuple of those); see NoTree.aggregate ({wicked.__file__}:{line})"
    )


def test_the_first_preset_is_tried_unless_another_is_named():
    tried = []
    rules = [Rule("tried", lambda trial: tried.append(trial.world.settings["forget_rate"]), "", "")]
    for preset in (None, "code-literal"):
        check("rofl", preset=preset, rules=rules)
    assert tried == [registry.load_method("rofl").Config().forget_rate, 0.2]
    assert tried[0] != tried[1]
    check("rofl", preset="code-literal", settings={"forget_rate": 0.3}, rules=rules)
    assert tried[2] == 0.3


def test_a_class_that_is_installed_is_called_by_its_name():
    for method, name in ((registry.load_method("fedavg"), "fedavg"), (wicked.Innocent, f"{wicked.__file__}:Innocent")):
        assert check(method, only=["reasons"]).method == name


def test_the_small_federations_are_what_the_rules_promise(monkeypatch):
    """4 clients of 24 samples in uneven batches, two of them with half of their labels wrong; then one in which client
    0 holds one class and each other lacks one, one in which client 1 has a single sample, one of half the clients."""
    runs, real = [], runtime.Run.execute

    def noting(run, *words, **named):
        given = [run.scene.given[run.scene.positions(client)] for client in range(4)]
        runs.append((run, [len(labels) for labels in given], [sorted(set(labels.tolist())) for labels in given]))
        return real(run, *words, **named)

    monkeypatch.setattr(runtime.Run, "execute", noting)
    check(wicked.Innocent, only=["lacking-classes", "one-sample", "participation"], rounds=1)
    plain, _, lacking, one = runs  # in the table's order
    assert plain[1:] == ([24] * 4, [[0, 1, 2]] * 4)
    assert plain[0].judge.wrong({}) == [0, 0, 12, 12]
    assert plain[0].settings.protocol.batch == 10
    assert [run[0].settings.protocol.participation for run in runs] == [1.0, 0.5, 1.0, 1.0]
    assert lacking[2] == [[0], [1, 2], [0, 2], [0, 1]]
    assert one[1] == [47, 1, 24, 24]


def test_a_stage_beyond_the_rounds_is_named():
    settings = {"correct_start": 30}
    # of 30 rounds the last is the 29th from 0
    for rounds, unreached in ((12, settings), (30, settings), (31, {})):
        report = check("fedavg-relabel", settings=settings, only=["settings-json"], rounds=rounds)
        assert report.unreached == unreached


def test_a_check_leaves_the_global_generators_where_they_were():
    def state():
        return str(random.getstate()), str(np.random.get_state()), torch.get_rng_state().tolist()

    before = state()
    check(wicked.MovesTorch, only=["randomness"], **SHORT)
    assert state() == before


def test_unknown_rules_presets_and_budgets_are_refused():
    with pytest.raises(ValueError, match=r"unknown rule 'resume'. Did you mean resumes"):
        check(wicked.Innocent, only=["resume"])
    with pytest.raises(ValueError, match="unknown preset"):
        check(wicked.Innocent, preset="no such")
    with pytest.raises(ValueError, match=r"protocol: unknown setting 'batch_size'.*Did you mean .*batch.*Known: batch"):
        check(wicked.Innocent, protocol={"batch_size": 3})


# --------------------------------------------------------------------------------------------- the command line

FAST = ("--rounds", 3, "--only", "learns", "--only", "settings-json")


def test_the_command_prints_a_line_a_rule_and_ends_well():
    lines = [line.split("\t") for line in done("check", "--method", "fedavg", *FAST).splitlines()]
    assert [line[:2] for line in lines] == [["settings-json", "ok"], ["learns", "ok"]]
    assert [line[3] for line in lines] == [rule.promise for rule in RULES if rule.name in ("settings-json", "learns")]


def test_the_command_fails_with_what_where_and_what_to_do():
    result = call("check", "--method", f"{wicked.__file__}:WritesMessage", "--rounds", 3, "--only", "immutable")
    assert result.exit_code == 1
    assert result.stdout.startswith("immutable\tfailed\t")
    for piece in ("what: the message", "where: round 0", "what to do: Clone"):
        assert piece in result.stdout


def test_the_command_prints_json():
    found = json.loads(done("check", "-m", "fedavg", "--json", *FAST))
    assert found["ok"]
    assert found["rounds"] == 3
    assert [rule["rule"] for rule in found["rules"]] == ["settings-json", "learns"]
    result = call("check", "-m", f"{wicked.__file__}:Fails", "--json", *FAST, "--only", "runs")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert [rule["status"] for rule in found["rules"]] == ["ok", "not tried", "failed"]
    assert not found["ok"]
    result = call("check", "-m", f"{wicked.__file__}:Fails", "--json", "--rounds", 3, "--only", "learns")
    assert not json.loads(result.stdout)["ok"]  # what was not tried was not kept
    result = call("check", "-m", f"{wicked.__file__}:WritesMessage", "--json", *FAST, "--only", "immutable")
    remedy = {rule.name: rule.remedy for rule in RULES}["immutable"]
    kept, broken, _ = json.loads(result.stdout)["rules"]
    assert [kept[name] for name in ("what", "where", "what_to_do")] == [""] * 3
    assert kept["promise"] == next(rule.promise for rule in RULES if rule.name == "settings-json")
    assert broken["where"] == "round 0, exchange 0, client 0, task 'train'"
    assert (broken["what"], broken["what_to_do"]) == ("the message or the client's state was changed in place", remedy)


def test_the_command_tells_of_each_broken_rule_and_takes_a_preset_and_full():
    rules = ("--rounds", 1, "--only", "pure", "--only", "randomness")
    result = call("check", "-m", f"{wicked.__file__}:CountsOnGenerators", *rules)
    assert result.stdout.count("what to do: ") == 2
    assert "unknown preset" in refused("check", "-m", "fedavg", *FAST, "--preset", "no such")
    elsewhere = ("check", "-m", f"{wicked.__file__}:LooksAtProcesses", "--rounds", 1, "--only", "executors")
    assert [call(*elsewhere, *more).exit_code for more in ((), ("--full",))] == [0, 1]


def test_the_command_takes_settings_of_the_method_and_of_the_small_budget():
    words = ("check", "-m", "fedavg-relabel", "--only", "settings-json", "--set")
    said = done(*words, "correct_start=30")
    assert "correct_start = 30 lies beyond these 12 rounds, so its stage was not tried: --rounds 32" in said
    assert json.loads(done(*words, "correct_start=30", "--json"))["unreached"] == {"correct_start": 30}
    assert "batch" in refused("check", "-m", "fedavg", *FAST, "--set", "protocol.batch=0")
    assert "contradict each other" in refused(*words, "protocol.rounds=5", "--rounds", "6")
    assert json.loads(done(*words, "protocol.rounds=5", "--json"))["rounds"] == 5
    result = call(*words, "no_such=1")
    assert (result.exit_code, "unknown setting 'no_such'" in result.stdout) == (1, True)


def test_the_command_refuses_an_unknown_rule():
    assert "Did you mean resumes" in refused("check", "-m", "fedavg", "--only", "resume")
