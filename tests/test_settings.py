"""What settings promise: how a value is read, which of two wins, and which of them make another run."""

import hashlib
import json
import re
from pathlib import Path

import pytest
from command_line import PLUGIN
from leaderboard_entries import entry

from flnoisebench import protocols
from flnoisebench.api import Optimiser, Protocol
from flnoisebench.grid import expand, runs_of
from flnoisebench.leaderboard.entries import contradictions
from flnoisebench.registry import UnknownName
from flnoisebench.scenario import Partition, ScenarioSpec, noise_from
from flnoisebench.settings import Settings, parse_assignment, resolve, resolve_scenario


@pytest.fixture
def mine(tmp_path):
    """A method with settings and with a preset that brings a budget."""
    path = tmp_path / "plugin.py"
    path.write_text(PLUGIN)
    return f"{path}:Mine"


def settings(**changes) -> Settings:
    return resolve(**{"method": "fedavg", "dataset": "digits", "clients": 5, **changes})


# ------------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("a=1", "a", 1),
        ("a=-3", "a", -3),
        ("a=1_000", "a", 1000),
        ("a=0.5", "a", 0.5),
        ("a=5e-4", "a", 5e-4),
        ("a=.5", "a", ".5"),  # not TOML: a string, which a float field still reads
        ("a=true", "a", True),
        ("a=false", "a", False),
        ("a=True", "a", "True"),
        ("a=none", "a", None),
        ("a=None", "a", None),
        ("a=null", "a", None),
        ("a=[1, 2]", "a", [1, 2]),
        ('a=["x", "y"]', "a", ["x", "y"]),
        ("a={ b = 1 }", "a", {"b": 1}),
        ('a="3"', "a", "3"),
        ("a=cosine", "a", "cosine"),
        ("a=", "a", ""),
        ("a=b=c", "a", "b=c"),
        (" a.b = 2 ", "a.b", 2),
    ],
)
def test_a_value_is_a_number_a_truth_value_a_list_none_or_a_string(text, name, value):
    found = parse_assignment(text)
    assert found == (name, value)
    assert type(found[1]) is type(value)


def test_none_is_a_word_where_a_setting_has_that_choice():
    """In a grid, whose texts become assignments, nothing else can say it."""
    settings = resolve(method="fedned-minus", changes=["distill=none"])
    assert settings.method_settings["distill"] == settings.changed["distill"] == "none"
    assert resolve_scenario(dataset="digits", noise_changes={"clients": None}).noise.clients == "none"
    (run,) = runs_of(expand({"method": "fedned-minus", "set": {"distill": "none"}}), device="cpu")
    assert run.same_run(resolve(method="fedned-minus", precision="fp32"))


@pytest.mark.parametrize("text", ["alpha", "", "=3", "  = 3"])
def test_an_assignment_without_a_name_or_an_equals_sign_is_refused(text):
    with pytest.raises(ValueError, match="write name=value"):
        parse_assignment(text)


# -------------------------------------------------------------------------------------------------- order


def test_the_protocol_file_is_the_base():
    assert settings().protocol == protocols.load("digits")
    assert settings().protocol_overrides == {}
    assert settings(protocol="cifar10").protocol.model == "resnet18"
    assert settings(dataset="cifar100").protocol.name == "cifar100"


def test_the_file_gives_way_to_the_preset_in_track_own_that_to_rounds_precision_and_set(mine):
    common = settings(method=mine, preset="second")
    assert (common.protocol.batch, common.protocol.local_epochs) == (32, 1)
    own = settings(method=mine, preset="second", track="own")
    assert (own.protocol.batch, own.protocol.local_epochs) == (8, 2)
    assert own.protocol_overrides == {"batch": 8, "local_epochs": 2}
    said = settings(method=mine, preset="second", track="own", rounds=7, precision="tf32")
    assert (said.protocol.rounds, said.protocol.precision, said.protocol.batch) == (7, "tf32", 8)
    last = settings(
        method=mine, preset="second", track="own", rounds=9,
        changes=["protocol.rounds=9", "protocol.precision=bf16", "protocol.batch=2"],
    )  # fmt: skip
    assert (last.protocol.rounds, last.protocol.precision, last.protocol.batch) == (9, "bf16", 2)
    assert last.protocol_overrides == {"batch": 2, "local_epochs": 2, "rounds": 9, "precision": "bf16"}
    with pytest.raises(ValueError, match=r"--rounds 7 and --set protocol\.rounds=9 contradict each other"):
        settings(method=mine, rounds=7, changes=["protocol.rounds=9"])


def test_a_preset_may_have_other_values_on_one_data_set(mine):
    assert settings(method=mine, preset="second", track="own", dataset="cifar10").protocol.batch == 16
    assert settings(method=mine, preset="second", track="own", dataset="digits").protocol.batch == 8


def test_set_changes_the_method_and_is_recorded_as_said(mine):
    found = settings(method=mine, preset="second", changes=["kind=other"])
    assert found.method_settings == {"alpha": 3.0, "kind": "other"}
    assert found.changed == {"kind": "other"}
    assert settings(method=mine).method_settings == {"alpha": 1.0, "kind": "plain"}
    assert settings(method=mine, preset="second", changes=["alpha=5"]).method_settings["alpha"] == 5.0


def test_what_is_set_is_recorded_as_it_was_read_so_that_its_run_agrees_with_itself():
    """A leaderboard refuses a run whose settings do not have what was set by hand."""
    changes = ["alpha=.5", "align=True", "gap=false", "protocol.optimiser.lr=.03", "protocol.batch=16"]
    found = resolve(method="fedcova", changes=changes)
    assert found.changed == {"alpha": 0.5, "align": True}  # gap came later, and is false without a word
    assert found.protocol_overrides == {"optimiser": {"lr": 0.03}, "batch": 16}
    assert found.key == resolve(method="fedcova", changes=["alpha=0.5", *changes[3:]]).key
    assert contradictions(entry(method="fedcova", changes=changes)) == []


def test_one_entry_of_a_table_can_be_set_and_the_others_stay():
    optimiser = settings(changes=["protocol.optimiser.lr=0.03"]).protocol.optimiser
    assert optimiser == Optimiser(lr=0.03, momentum=0.9, weight_decay=5e-4)
    both = settings(changes=["protocol.optimiser.lr=0.03", "protocol.optimiser.name=adam"])
    assert both.protocol.optimiser == Optimiser(name="adam", lr=0.03)
    assert both.protocol_overrides == {"optimiser": {"lr": 0.03, "name": "adam"}}
    whole = settings(changes=["protocol.optimiser={ lr = 0.02, momentum = 0.0 }"])
    assert whole.protocol.optimiser == Optimiser(lr=0.02, momentum=0.0)


def test_the_first_preset_is_the_default(mine):
    assert settings(method=mine).preset == "first"


# -------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"track": "owm"}, "unknown track 'owm'. Did you mean own"),
        ({"evaluate_on": "validaton"}, "unknown evaluation set 'validaton'. Did you mean validation"),
        ({"protocol": "digit"}, "unknown protocol 'digit'. Did you mean digits?"),
        ({"preset": "defualt"}, "unknown preset of fedavg 'defualt'. Did you mean default?"),
        ({"dataset": "digitz"}, "unknown data set 'digitz'. Did you mean digits?"),
    ],
)
def test_an_unknown_name_is_answered_with_near_misses(changes, message):
    with pytest.raises(UnknownName) as caught:
        settings(**changes)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"changes": ["protocol.bacth=3"]}, "protocol digits: unknown setting 'bacth'. Did you mean batch or "),
        ({"changes": ["protocol.optimiser.rl=3"]}, "unknown setting 'optimiser.rl'. Did you mean lr"),
        ({"changes": ["protocol.optimiser.x=3"]}, "Known: lr, momentum, name, weight_decay."),
        ({"changes": ["protocol.batch.x=3"]}, "protocol digits: batch = {'x': 3}: Input should be a valid integer"),
        ({"changes": ["protocol.lr_schedule=cosin"]}, "Did you mean cosine?"),
        ({"changes": ["alpha=3"]}, "settings of fedavg: unknown setting 'alpha'. Known: none."),
        ({"noise_changes": {"rho": 2}}, "noise fedcova-sym: rho = 2: Input should be less than or equal to 1"),
        ({"noise_changes": {"target": "par"}}, "Did you mean pair?"),
        ({"noise_changes": {"target": "open-set", "foreign": "digits"}}, "takes images of another data set"),
        ({"partition_changes": {"law": "dirichlett"}}, "Did you mean dirichlet"),
        ({"partition_changes": {"alhpa": 3}}, "partition: unknown setting 'alhpa'. Did you mean alpha"),
        (
            {"partition_changes": {"law": "iid", "alpha": 3.0}},
            "alpha=3.0 would change nothing in partition 'iid': it reads law, min_size",
        ),
        (
            {"partition_changes": {"per_client": 3}},
            "per_client=3 would change nothing in partition 'bernoulli-dirichlet': it reads alpha, law, min_size, p",
        ),
        ({"noise": "fedcova-paper-40.3", "partition_changes": {"law": "dirichlet", "p": 0.8}}, "p=0.8 would change"),
        ({"clients": 0}, "scenario: clients = 0"),
        ({"seed": -1}, "settings: seed = -1"),
        ({"draw": -1}, "scenario: draw = -1"),
        ({"holdout": 1.0}, "scenario: holdout = 1.0: Input should be less than 1"),
    ],
)
def test_a_setting_that_cannot_be_is_named_with_its_value_on_one_line(changes, message):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        settings(**changes)
    assert "\n" not in str(caught.value)
    assert "pydantic" not in str(caught.value)


def test_a_scenario_of_old_that_states_what_its_law_does_not_read_keeps_its_name():
    spec = resolve_scenario(dataset="digits", partition_changes={"law": "iid"})
    old = spec.model_copy(update={"partition": Partition(law="iid", alpha=3.0)})
    assert ScenarioSpec.model_validate_json(old.model_dump_json()) == old
    assert old.slug != spec.slug


def test_two_wrong_settings_are_both_named(mine):
    with pytest.raises(ValueError, match="alpha = 'big'") as caught:
        settings(method=mine, changes=["alpha=big", "knd=x"])
    assert "unknown setting 'knd'. Did you mean kind?" in str(caught.value)


def test_two_values_that_do_not_go_together_are_told_so():
    with pytest.raises(ValueError, match=r"^noise fednoro-random: lo=0\.9 is above hi=0\.7: swap them$"):
        resolve_scenario(dataset="digits", noise="fednoro-random", noise_changes={"lo": 0.9})


def test_the_scenario_alone_takes_the_same_noise_and_partition():
    spec = resolve_scenario(
        dataset="digits", noise="fedcorr", noise_changes={"rho": 0.2}, partition_changes={"p": 0.9}, clients=7, draw=3
    )
    assert (
        spec
        == settings(
            noise="fedcorr", noise_changes={"rho": 0.2}, partition_changes={"p": 0.9}, clients=7, draw=3
        ).scenario
    )
    assert spec.noise == noise_from("fedcorr", rho=0.2)


# -------------------------------------------------------------------------------------- which run it is


BASE = {"rounds": 10}
OTHER_RESULTS = {
    "rounds": {"rounds": 11},
    "batch": {"changes": ["protocol.batch=64"]},
    "lr": {"changes": ["protocol.optimiser.lr=0.2"]},
    "model": {"changes": ["protocol.model=small-cnn"]},
    "precision": {"precision": "bf16"},
    "evaluate_on": {"evaluate_on": "test-a"},
    "deterministic": {"deterministic": False},
}
OTHER_SCENARIO = {
    "rho": {"noise_changes": {"rho": 0.5}},
    "tau": {"noise_changes": {"tau": 0.5}},
    "noise": {"noise": "fedcorr"},
    "include_true": {"noise_changes": {"include_true": False}},
    "clients": {"clients": 6},
    "p": {"partition_changes": {"p": 0.4}},
    "law": {"partition_changes": {"law": "iid"}},
    "holdout": {"holdout": 0.1},
    "dataset": {"dataset": "cifar10", "protocol": "digits"},
}


@pytest.mark.parametrize("what", OTHER_RESULTS)
def test_the_key_changes_with_what_changes_results(what):
    assert settings(**{**BASE, **OTHER_RESULTS[what]}).key != settings(**BASE).key


def test_the_key_changes_with_the_method_and_its_settings(mine):
    keys = {
        settings(method=mine).key,
        settings(method=mine, changes=["alpha=2"]).key,
        settings(method=mine, changes=["kind=other"]).key,
        settings().key,
    }
    assert len(keys) == 4


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 3},
        {"draw": 3},
        {"noise_changes": {"rho": 0.5}},  # the scenario has a level of its own in the path
        {"changes": ["protocol.batch=32"]},  # the protocol's own value, said
        {"rounds": None, "changes": ["protocol.rounds=10"]},  # the same value, said in another way
        {"protocol": "digits"},
        {"preset": "default"},
        {"track": "own"},  # of a method whose preset brings no budget
    ],
)
def test_the_key_does_not_change_with_seed_draw_or_with_how_the_same_was_said(changes):
    assert settings(**{**BASE, **changes}).key == settings(**BASE).key


def test_a_methods_file_is_the_same_with_a_dot_before_its_path_or_a_slash_too_many(tmp_path, monkeypatch):
    """Else the command that a history or another script spells so begins the run anew, in a second row."""
    (tmp_path / "a:b").mkdir()  # as a folder that is named after a time
    (tmp_path / "a:b" / "plugin.py").write_text(PLUGIN)
    monkeypatch.chdir(tmp_path)
    for place in ("a:b/", f"{tmp_path}/a:b/"):
        plain = settings(method=f"{place}plugin.py:Mine")
        assert plain.method == f"{place}plugin.py:Mine"
        assert settings(method=f"{place}./plugin.py:Mine") == settings(method=f"{place}/plugin.py:Mine") == plain
    assert settings(method="./a:b/plugin.py:Mine").method == "a:b/plugin.py:Mine"


def test_a_preset_that_was_spelt_out_by_hand_is_the_same_run(mine):
    own = settings(method=mine, preset="second", track="own")
    by_hand = settings(method=mine, changes=["alpha=3", "protocol.batch=8", "protocol.local_epochs=2"])
    assert own.key == by_hand.key
    assert own.folder(Path("runs")) == by_hand.folder(Path("runs"))


def test_the_key_is_a_hash_of_method_budget_and_measurement_and_of_nothing_else():
    """A changed key would start every run of everybody anew: whoever changes its definition changes this test."""
    found = settings(seed=5, draw=6)
    content = {
        "schema_version": 1,
        "method": "fedavg",
        "method_settings": {},
        "protocol": found.protocol.model_dump(mode="json"),
        "evaluate_on": "test",
        "deterministic": True,
    }
    assert found.key == hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:10]


def test_a_setting_that_came_later_names_no_run_while_it_is_at_its_default():
    plain, explicit = resolve(method="fedcova"), resolve(method="fedcova", changes=["gap=false"])
    assert "gap" not in plain.method_settings
    assert plain.key == explicit.key
    changed = resolve(method="fedcova", changes=["gap=true"])
    assert changed.method_settings["gap"] is True
    assert changed.key != plain.key


@pytest.mark.parametrize("what", [*OTHER_RESULTS, *OTHER_SCENARIO])
def test_runs_with_other_results_never_share_a_folder(what):
    changes = OTHER_RESULTS.get(what) or OTHER_SCENARIO[what]
    assert settings(**{**BASE, **changes}).folder(Path("runs")) != settings(**BASE).folder(Path("runs"))


def test_the_folder_is_data_set_scenario_method_key_draw_and_seed(mine):
    found = settings(seed=2, draw=4)
    path = found.folder(Path("some/where"))
    assert path.parts == (
        "some", "where", "digits", found.scenario.slug, "fedavg", found.key, "draw4-seed2",
    )  # fmt: skip
    assert settings(method=mine).folder(Path("runs")).parts[3] == "plugin-Mine"


def test_settings_are_frozen_and_come_back_from_json_as_they_were(mine):
    found = settings(method=mine, preset="second", track="own", changes=["protocol.optimiser.lr=0.03", "alpha=2"])
    again = Settings.model_validate_json(found.model_dump_json())
    assert again == found
    assert again.key == found.key
    assert json.loads(found.model_dump_json())["schema_version"] == 1
    with pytest.raises(ValueError, match="frozen"):
        found.seed = 3


@pytest.mark.parametrize("name", protocols.names())
def test_every_shipped_protocol_is_valid_and_says_what_it_is(name):
    protocol = protocols.load(name)
    assert isinstance(protocol, Protocol)
    assert protocol.name == name
    assert len(protocols.read(name)["about"]) > 10
    with pytest.raises(UnknownName, match=name):
        protocols.load(name + "x")


@pytest.mark.parametrize(
    ("name", "rounds", "batch", "model"),
    [
        ("cifar10", 500, 128, "resnet18"),
        ("cifar100", 500, 128, "resnet34"),
        ("clothing1m", 50, 64, "resnet50-imagenet"),
    ],
)
def test_the_papers_budgets_are_those_of_its_experiments(name, rounds, batch, model):
    """Published rows were run under these, and under a changed file would stand beside rows of another budget."""
    sgd = Optimiser(name="sgd", lr=0.1, momentum=0.9, weight_decay=5e-4)
    stated = {"rounds": rounds, "batch": batch, "model": model, "optimiser": sgd, "precision": "bf16"}
    plain = {"local_epochs": 1, "participation": 1.0, "lr_schedule": "constant", "last_batch": "keep"}
    assert protocols.load(name) == Protocol(name=name, **stated, **plain)
