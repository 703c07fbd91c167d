"""Oracles: what each leaves of a scenario, by hand; that a run under one says so everywhere; and that nothing of what
was there before oracles has moved."""

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from command_line import RUN, call, done, only_run, refused, rows

from flnoisebench import inputs, records, registry, runtime, scenario
from flnoisebench.scenario.oracle import ORACLES, apply
from flnoisebench.settings import Settings, resolve

# Eight samples of three clients.  Client 1 is noisy: of its samples 2, 4 and 6 the labels of 2 and 6 are wrong; 6 is
# held out, as are 1 (client 0) and 5 (client 2).
OWNER = [0, 0, 1, 2, 1, 2, 1, 0]
TRUE = [0, 1, 2, 0, 1, 2, 0, 1]
GIVEN = [0, 1, 1, 0, 1, 2, 2, 1]
HELD_OUT = [0, 1, 0, 0, 0, 1, 1, 0]


def drawn(given=GIVEN, nominal=(0.0, 0.6, 0.0), held_out=HELD_OUT, true=TRUE):
    spec = scenario.ScenarioSpec(
        dataset="digits", noise=scenario.noise_from("fedcova-sym"), noise_name="fedcova-sym", clients=3
    )
    scene = scenario.Scenario(
        spec=spec, classes=3, owner=np.array(OWNER), given=np.array(given), held_out=np.array(held_out, dtype=bool),
        told={"noise_rate": 0.2, "noisy_clients": 1.0}, digests={"data": "d", "partition": "p", "labels": "l"},
    )  # fmt: skip
    known = None if true is None else np.array(true)
    return scene, scenario.Truth(known, np.array(nominal) > 0, np.array(nominal))


def test_clean_clients_keeps_the_clients_without_noise_as_they_were():
    kept, clients, scene, truth = apply("clean-clients", *drawn())
    assert kept.tolist() == [0, 1, 3, 5, 7]
    assert clients.tolist() == [0, 2]
    assert scene.owner.tolist() == [0, 0, 1, 1, 0]  # client 2 is now 1
    assert scene.spec.clients == 2
    assert [scene.positions(m).tolist() for m in range(2)] == [[0, 4], [2]]
    assert scene.given.tolist() == truth.true.tolist() == [0, 1, 0, 2, 1]
    assert scene.held_out_positions().tolist() == [1, 3]


def test_a_noisy_client_whose_labels_happen_to_be_right_is_still_no_clean_client():
    assert apply("clean-clients", *drawn(given=TRUE)).kept.tolist() == [0, 1, 3, 5, 7]


def test_clean_samples_drops_the_wrong_labels_that_would_be_trained_on_and_no_others():
    kept, _, scene, truth = apply("clean-samples", *drawn())
    assert kept.tolist() == [0, 1, 3, 4, 5, 6, 7]  # without 2; 6 is wrong, but held out
    assert scene.owner.tolist() == [0, 0, 2, 1, 2, 1, 0]
    assert scene.given.tolist() == [0, 1, 0, 1, 2, 2, 1]
    assert truth.true.tolist() == [0, 1, 0, 1, 2, 0, 1]
    assert [scene.positions(m).tolist() for m in range(3)] == [[0, 6], [3], [2]]


def test_clean_samples_leaves_out_a_client_that_has_no_right_label_to_train_on():
    kept, _, scene, _ = apply("clean-samples", *drawn(given=[0, 1, 1, 0, 2, 2, 0, 1]))  # 6 is right, but held out
    assert kept.tolist() == [0, 1, 3, 5, 7]
    assert scene.spec.clients == 2
    assert scene.owner.tolist() == [0, 0, 1, 1, 0]


def test_centralised_clean_gives_one_client_everything_under_its_true_label():
    kept, _, scene, truth = apply("centralised-clean", *drawn())
    assert kept.tolist() == list(range(8))
    assert scene.spec.clients == 1
    assert scene.positions(0).tolist() == [0, 2, 3, 4, 7]
    assert scene.given.tolist() == [0, 1, 2, 0, 1, 2, 2, 1]  # 6, held out, keeps its given label
    assert truth.true.tolist() == TRUE


@pytest.mark.parametrize("oracle", ORACLES)
def test_under_every_oracle_no_noise_is_left_and_that_is_told(oracle):
    before, truth_before = drawn()
    _, _, scene, truth = apply(oracle, before, truth_before)
    for m in range(scene.spec.clients):
        mine = scene.positions(m)
        assert len(mine)
        assert scene.given[mine].tolist() == truth.true[mine].tolist()
    assert scene.told == {"noise_rate": 0, "noisy_clients": 0}
    assert not truth.noisy.any()
    assert not truth.nominal.any()
    assert len(truth.noisy) == len(truth.nominal) == scene.spec.clients
    facts = scenario.summary(scene, truth)
    assert facts["noisy_clients"] == facts["nominal_rate"] == facts["expected_rate"] == 0
    assert oracle in facts["slug"]  # or it would be that of a scenario that was drawn so
    assert scene.digests == before.digests
    assert before.given.tolist() == GIVEN
    assert before.owner.tolist() == OWNER
    for array in (scene.owner, scene.given, scene.held_out, truth.true, truth.noisy, truth.nominal):
        assert not array.flags.writeable


def test_without_noise_an_oracle_of_clients_or_samples_changes_nothing():
    clean = drawn(given=TRUE, nominal=(0.0, 0.0, 0.0))
    for oracle in ("clean-clients", "clean-samples"):
        kept, _, scene, truth = apply(oracle, *clean)
        assert kept.tolist() == list(range(8))
        assert (scene.owner.tolist(), scene.given.tolist(), truth.true.tolist()) == (OWNER, TRUE, TRUE)


# ------------------------------------------------------------------------------------------ what cannot be


@pytest.mark.parametrize("oracle", ORACLES)
def test_an_oracle_without_truth_is_refused(oracle):
    with pytest.raises(ValueError, match=f"--oracle {oracle} needs true labels, and those of digits may be wrong"):
        apply(oracle, *drawn(true=None, nominal=(0.0, 0.0, 0.0)))


def test_where_nothing_would_be_left_that_is_said():
    with pytest.raises(ValueError, match="no client is clean under noise 'fedcova-sym', draw 0; take another oracle"):
        apply("clean-clients", *drawn(nominal=(0.1, 0.6, 0.3)))
    with pytest.raises(ValueError, match="no label is right"):
        apply("clean-samples", *drawn(given=[(label + 1) % 3 for label in TRUE]))
    with pytest.raises(ValueError, match="no image has a true label"):  # another data set's stand everywhere
        apply("centralised-clean", *drawn(true=[-1] * len(TRUE)))


def test_a_data_set_with_unknown_truth_is_refused_before_anything_is_written(monkeypatch):
    monkeypatch.setattr(type(registry.load_dataset("digits")), "labels_are_true", False)
    for oracle in ORACLES:
        said = refused(*RUN, "--noise", "clean", "--oracle", oracle)
        assert "needs true labels, and those of digits may be wrong, nobody knows which" in said
    assert not Path("runs").exists()


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_the_command_line_refuses_what_cannot_be_and_writes_nothing():
    assert "no client is clean" in refused(*RUN, "--oracle", "clean-clients", "--rho", "1")
    assert re.search("[Dd]id you mean clean-samples", refused(*RUN, "--oracle", "clean-sample"))
    for oracle in ORACLES:  # an oracle is no method
        assert "unknown method" in refused("run", "--method", oracle)
        assert oracle not in registry.names(registry.METHODS)
    assert not Path("runs").exists()


# ------------------------------------------------------------------------------------- what a run is


def test_runs_without_an_oracle_keep_their_folders():
    """As they were before there were oracles.  A change here starts everybody's runs anew."""
    scene = "runs/digits/fedcova-sym-rho0.6-tau0.7_bernoulli-dirichlet-p0.5-alpha5_m20"
    assert str(resolve(method="fedavg").folder(Path("runs"))) == f"{scene}/fedavg/d3074d5ed5/draw0-seed0"
    assert str(resolve(method="fedcova").folder(Path("runs"))) == f"{scene}/fedcova/f4732ee202/draw0-seed0"
    choosing = resolve(method="fedavg", holdout=0.2, evaluate_on="validation", draw=10)
    assert str(choosing.folder(Path("runs"))) == f"{scene}_holdout0.2/fedavg/a7dbb10c6f/draw10-seed0"


def test_an_oracle_is_part_of_the_key_and_of_the_folder():
    found = [resolve(method="fedavg", oracle=oracle) for oracle in (None, *ORACLES)]
    assert len({settings.key for settings in found}) == 4
    for settings, oracle in zip(found[1:], ORACLES, strict=True):
        folder = settings.folder(Path("runs"))
        assert folder.parts[3] == f"fedavg_oracle-{oracle}"
        assert folder.parts[:3] == found[0].folder(Path("runs")).parts[:3]  # the scenario is the one that was drawn
        assert Settings.model_validate_json(settings.model_dump_json()) == settings


def test_the_reference_under_an_oracle_is_fedavg_and_any_method_may_be_named():
    assert resolve().method == "fedcova"
    assert resolve(oracle="clean-samples").method == "fedavg"
    assert resolve(oracle="clean-samples", method="fedcova").method == "fedcova"


def test_settings_from_before_there_were_oracles_are_read():
    before = resolve(method="fedavg").model_dump(mode="json")
    assert before.pop("oracle") is None
    assert Settings.model_validate(before) == resolve(method="fedavg")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One run of each oracle: {oracle: (its --json object, folder)}."""
    out = tmp_path_factory.mktemp("finished")
    found = {}
    for oracle in ORACLES:
        words = ("--oracle", oracle, "--rounds", "2", "--clients", "5", "--out", out / oracle, "--json")
        found[oracle] = json.loads(done("run", *words).splitlines()[-1])
    return found


@pytest.mark.parametrize("oracle", ORACLES)
def test_a_run_says_everywhere_that_it_is_under_an_oracle(oracle, finished):
    result = finished[oracle]
    folder = Path(result["folder"])
    assert f"/fedavg_oracle-{oracle}/" in str(folder)
    assert result["oracle"] == result["settings"]["oracle"] == records.load_settings(folder).oracle == oracle
    assert records.load_result(folder).oracle == oracle
    shown = rows(done("show", folder))
    assert shown["run"] == f"FedAvg, oracle {oracle}, on digits"
    assert shown["oracle"].startswith(f"{oracle}: ")
    assert json.loads(done("show", folder, "--json"))["result"]["oracle"] == oracle
    (folder / "result.json").unlink()
    assert f"of fedavg, oracle {oracle} on digits" in rows(done("show", folder))["unfinished"]


def test_a_run_without_an_oracle_does_not_speak_of_one():
    text = done(*RUN)
    assert rows(text)["run"] == "FedAvg on digits"
    assert "oracle" not in rows(text)
    assert records.load_result(only_run(Path("runs"))).oracle is None


def test_what_is_trained_is_what_the_oracle_left_and_what_is_recorded_what_was_drawn(finished):
    plain = runtime.prepare(resolve(method="fedavg", rounds=2, clients=5), data_root=Path(), out=Path(), device="cpu")
    clean = [row for row in plain.federation["clients"] if not row["noisy"]]
    right = 1438 - round(plain.federation["realised_rate"] * 1438)
    sizes = {oracle: [row["size"] for row in result["federation"]["clients"]] for oracle, result in finished.items()}
    assert 0 < len(clean) < 5
    assert sizes["clean-clients"] == [row["size"] for row in clean]
    assert sum(sizes["clean-samples"]) == right < 1438
    assert sizes["centralised-clean"] == [1438]
    for oracle, result in finished.items():
        assert result["images"]["trained"] == 2 * sum(sizes[oracle])
        assert result["digests"] == dict(plain.scene.digests)
        assert result["label_noise_before"] == 0
    assert plain.judge.noise_before() > 5


def test_pixels_and_labels_stay_together_and_the_test_images_are_all_there():
    settings = resolve(method="fedavg", oracle="clean-samples", clients=5, holdout=0.2)
    run = runtime.prepare(settings, data_root=Path(), out=Path(), device="cpu")
    whole = registry.load_dataset("digits").load(Path())
    scene, truth = inputs.build_scenario(settings.scenario, registry.load_dataset("digits"), whole)
    kept, _, cleaned, _ = apply("clean-samples", scene, truth)
    assert len(kept) < 1438
    kept = torch.tensor(kept)
    assert torch.equal(run.engine.pixels, whole.train_images[kept])
    mine = torch.as_tensor(cleaned.positions(3))
    side = runtime.Lane(run.engine).client(3, None, 0, 0)
    assert torch.equal(side.labels, whole.train_labels[kept][mine])  # given, and right
    assert np.array_equal(run.tested_labels, whole.test_labels.numpy())


def test_the_images_that_are_measured_on_are_the_halves_of_the_test_set_or_the_hold_out():
    arrays = registry.load_dataset("digits").load(Path())
    arrays = dataclasses.replace(arrays, train_images=arrays.train_images[:8], train_labels=torch.tensor(TRUE))
    scene, truth = drawn()

    def labels(on):
        images, found = inputs.evaluation_set(on, arrays, scene, truth)
        assert len(images) == len(found)
        return images, found.tolist()

    test = arrays.test_labels.tolist()
    assert [labels(on)[1] for on in ("test", "test-a", "test-b")] == [test, test[::2], test[1::2]]
    assert torch.equal(labels("test-b")[0], arrays.test_images[1::2])
    for on, kind in (("validation", TRUE), ("noisy-validation", GIVEN)):
        images, found = labels(on)
        assert found == [kind[i] for i in (1, 5, 6)]
        assert torch.equal(images, arrays.train_images[[1, 5, 6]])


def test_a_scenario_and_arrays_that_the_caller_has_are_as_good_as_loaded_ones(tmp_path):
    settings = resolve(method="fedavg", oracle="centralised-clean", clients=5, rounds=1, draw=1)
    data = registry.load_dataset("digits")
    arrays = data.load(Path())
    scene = inputs.build_scenario(settings.scenario, data, arrays)
    digests = [
        runtime.prepare(settings, data_root=Path(), out=tmp_path / name, device="cpu", **had).execute().digest
        for name, had in (("loaded", {}), ("had", {"arrays": arrays, "scene": scene}))
    ]
    assert digests[0] == digests[1]
    assert len(arrays.train_labels) == len(scene[0].given) == 1438


def test_a_run_under_an_oracle_resumes_nothing_of_one_without(finished):
    assert call(*RUN, "--out", "both").exit_code == 0
    assert "already" not in call(*RUN, "--out", "both", "--oracle", "clean-samples").stderr
    assert len(list(Path("both").rglob("result.json"))) == 2


def test_a_result_cannot_hide_its_oracle(finished, tmp_path):
    content = {name: value for name, value in finished["clean-samples"].items() if name != "folder"}
    for oracle in (None, "clean-clients"):
        (tmp_path / "result.json").write_text(json.dumps({**content, "oracle": oracle}))
        with pytest.raises(ValueError, match=rf"oracle is {oracle!r}, and in the settings 'clean-samples'"):
            records.load_result(tmp_path)
    del content["oracle"]
    (tmp_path / "result.json").write_text(json.dumps(content))
    assert records.load_result(tmp_path).oracle == "clean-samples"
