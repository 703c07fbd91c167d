"""Settings, records and results: they come back as they were, and say what is wrong with them when they do not."""

import json
import math
from pathlib import Path

import fixture_methods as fixtures
import pytest

from flnoisebench import records
from flnoisebench.api import Config, Field, Rounds, moments
from flnoisebench.records import Accuracy, LastRounds, RoundRecord, RunResult
from flnoisebench.settings import Settings, resolve
from flnoisebench.testing import tiny_run


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    run = tiny_run(fixtures.Claiming, tmp_path_factory.mktemp("ended"))
    seen = []
    return run.execute(seen.append), seen, run


def test_what_was_written_is_what_is_read(ended):
    result, seen, run = ended
    assert records.load_result(run.folder) == result
    assert records.load_records(run.folder) == seen
    assert records.load_settings(run.folder) == run.settings
    assert records.load_result(run.folder).settings == run.settings


def test_a_result_repeats_what_its_records_say(ended):
    result, seen, _ = ended
    assert result.accuracy == Accuracy.of([record.accuracy for record in seen])
    assert result.label_noise_after == seen[-1].label_noise
    assert result.digest == seen[-1].digest
    assert result.rounds == len(seen) == 3
    assert result.bytes_up == sum(record.bytes_up for record in seen)
    assert result.bytes_down == sum(record.bytes_down for record in seen)
    assert result.images["trained"] == sum(record.images["trained"] for record in seen)
    assert result.peak_memory == max(record.peak_memory for record in seen)


def test_a_result_says_where_it_comes_from(ended):
    result, _, run = ended
    assert result.told == {"noise_rate": pytest.approx(0.3), "noisy_clients": 3}
    assert result.card["told"] == ["noise_rate", "noisy_clients"]
    assert set(result.environment["packages"]) >= {"torch", "numpy", "flnoisebench"}
    assert result.environment["method_sha256"] == run._source
    assert set(result.digests) == {"data", "partition", "labels", "public"}
    assert len(result.federation["clients"]) == 3
    assert result.label_noise_before == pytest.approx(100 * 21 / 72, abs=1e-3)  # round(.3 * 24) = 7 of each 24


def test_accuracy_by_hand():
    rounds = [None, 10.0, 90.0, 20.0, 30.0, 40.0, 50.0, 60.0, 50.0, 50.0, 40.0, 50.0]
    found = Accuracy.of(rounds)
    assert found.final == 50
    assert found.last5_mean == 50  # 60, 50, 50, 40, 50
    assert found.last5_std == pytest.approx(math.sqrt(40))
    assert found.last10_mean == pytest.approx(48)  # without 10; the 90 counts
    assert (found.oracle, found.oracle_round) == (90, 2)


def test_accuracy_of_few_rounds_and_of_none():
    assert Accuracy.of([70.0]).model_dump() == {
        "final": 70, "last5_mean": 70, "last5_std": 0, "last10_mean": 70, "oracle": 70, "oracle_round": 0,
    }  # fmt: skip
    assert set(Accuracy.of([]).model_dump().values()) == {None}
    assert set(Accuracy.of([None, None]).model_dump().values()) == {None}
    assert Accuracy.of([50.0, 80.0, 80.0]).oracle_round == 1  # the first of equals


def test_a_last_line_without_its_end_does_not_count_yet(ended, tmp_path):
    _, seen, run = ended
    text = (run.folder / "records.jsonl").read_text()
    (tmp_path / "records.jsonl").write_text(text[:-10])
    assert records.load_records(tmp_path) == seen[:-1]
    (tmp_path / "records.jsonl").unlink()
    assert records.load_records(tmp_path) == []


def spoilt(ended, tmp_path, name, change):
    _, _, run = ended
    content = json.loads((run.folder / name).read_text())
    (tmp_path / name).write_text(json.dumps(change(content) or content))


@pytest.mark.parametrize(
    ("change", "place"),
    [
        (lambda c: c.update(schema_version=2), "schema_version"),
        (lambda c: c.pop("digest"), "digest: Field required"),
        (lambda c: c.update(status="done"), "status"),
        (lambda c: c.update(extra=1), "extra: Extra inputs are not permitted"),
        (lambda c: c["accuracy"].update(final="high"), "accuracy.final"),
        (lambda c: c["settings"]["protocol"].update(batch=0), "settings.protocol.batch"),
        (lambda c: c["settings"].update(schema_version=9), "settings.schema_version"),
    ],
    ids=range(7),
)
def test_a_result_of_another_version_or_with_a_wrong_entry_is_refused_and_the_entry_named(
    change, place, ended, tmp_path
):
    spoilt(ended, tmp_path, "result.json", lambda content: change(content) and None)
    with pytest.raises(ValueError, match=rf"result\.json is damaged or of another version: {place}"):
        records.load_result(tmp_path)


def test_a_damaged_file_is_named_with_its_line(ended, tmp_path):
    _, _, run = ended
    lines = (run.folder / "records.jsonl").read_text().splitlines()
    (tmp_path / "records.jsonl").write_text("\n".join([lines[0], lines[1][:-20], lines[2], ""]))
    with pytest.raises(ValueError, match=r"records\.jsonl, line 2 is damaged.*the file: Invalid JSON"):
        records.load_records(tmp_path)
    for name, load in (("result.json", records.load_result), ("settings.json", records.load_settings)):
        (tmp_path / name).write_text((run.folder / name).read_text()[:100])
        with pytest.raises(ValueError, match=rf"{name} is damaged or of another version: the file: Invalid JSON"):
            load(tmp_path)
        (tmp_path / name).write_bytes(b"\xff\xfe\x00")
        with pytest.raises(ValueError, match=name):
            load(tmp_path)


def test_a_missing_result_is_a_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        records.load_result(tmp_path)


def test_a_round_without_a_class_in_the_test_set_is_written_and_read(ended):
    _, seen, _ = ended
    record = RoundRecord(**{**seen[0].model_dump(), "recall": [50.0, None, 100.0], "accuracy": None})
    assert RoundRecord.model_validate_json(record.model_dump_json()) == record


def test_nothing_that_was_written_can_be_changed_in_memory(ended):
    result, seen, run = ended
    for frozen in (result, seen[0], run.settings, run.settings.protocol):
        with pytest.raises(ValueError, match="frozen"):
            frozen.digest = "other"


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "x.json"
    done = []
    flush, rename = records.os.fsync, records.os.replace
    monkeypatch.setattr(records.os, "fsync", lambda file: done.append("flushed") or flush(file))
    monkeypatch.setattr(records.os, "replace", lambda *paths: done.append("renamed") or rename(*paths))
    records.replace(path, b"old")
    assert done == ["flushed", "renamed"]  # else a power cut could leave the new name with nothing in it

    def fails(source, target):
        raise OSError("no")

    monkeypatch.setattr(records.os, "replace", fails)
    with pytest.raises(OSError, match="no"):
        records.replace(path, b"new")
    assert path.read_bytes() == b"old"


def test_every_field_says_why_it_is_there():
    for kind in (RoundRecord, Accuracy, LastRounds, RunResult, Settings):
        assert all(field.description for field in kind.model_fields.values()), kind


def test_the_key_of_a_run_is_over_what_changes_results_and_nothing_else(tmp_path):
    base = tiny_run(fixtures.Drawing, tmp_path).settings

    def key(**changes):
        return base.model_copy(update=changes).key

    assert len(base.key) == 10
    assert key(seed=5) == key(changed={"x": 1}) == key(preset="other") == base.key
    assert key(scenario=base.scenario.model_copy(update={"draw": 3})) == base.key
    different = [
        key(method_settings={"extra": 2}),
        key(protocol=base.protocol.model_copy(update={"batch": 99})),
        key(evaluate_on="test-a"),
        key(deterministic=False),
        key(method="other"),
    ]
    assert len({base.key, *different}) == 6


@pytest.mark.parametrize(
    ("value", "of_500", "of_50"),
    [
        (10, 10, 10),
        (0.4, 200, 20),
        (0, 0, 0),
        (1.0, 500, 50),
        (0.05, 25, 3),
        ("0.06", 30, 3),
        ("10", 10, 10),
        ("1.0", 500, 50),
        ("1e-1", 50, 5),
    ],
)
def test_a_duration_is_absolute_or_a_share(value, of_500, of_50):
    rounds = Timed(start=value).start
    assert (rounds.of(500), rounds.of(50)) == (of_500, of_50)
    assert Timed.model_validate_json(Timed(start=value).model_dump_json()).start == rounds


def test_one_round_is_not_the_whole_run():
    assert Rounds(1) != Rounds(1.0)  # a run resumes where its settings are equal


class Timed(Config):
    start: Rounds = Field(Rounds(1), why="a test")


@pytest.mark.parametrize("value", [-1, -0.1, math.nan, math.inf, True, "soon", None, [1]])
def test_what_is_no_duration_is_refused(value):
    with pytest.raises(ValueError, match="round"):
        Timed(start=value)


def test_moments_come_every_period_from_the_start_on_and_are_over_before_stop_and_end():
    at, every = Rounds(0.4), Rounds(0.06)
    assert [*moments(50, at, every, Rounds(0.6))] == [20, 23, 26, 29]
    assert [*moments(10, Rounds(4), Rounds(3), Rounds(99))] == [4, 7]  # no round 10 in a run of ten
    assert [*moments(10, Rounds(7), Rounds(0.01), Rounds(1.0))] == [7, 8, 9]  # a period has a round at least


# ------------------------------------------------------------------------------------- means over the last rounds


def with_rates(record, **changes):
    return record.model_copy(update={"accuracy": 50.0, **changes})


def test_means_over_the_last_five_rounds_by_hand(ended):
    _, seen, _ = ended
    rounds = [with_rates(seen[0], balanced_accuracy=99.0, judged={"clients_recall": 99.0}, recall=[1.0, 1.0, 1.0])]
    for i in range(5):
        rounds.append(
            with_rates(
                seen[0],
                balanced_accuracy=10.0 * i,  # 0 to 40
                macro_f1=None,
                calibration_error=4.0,
                recall=[10.0 * i, None, 60.0],
                judged={"clients_recall": 50.0 + i} if i > 2 else {"samples_auc": 70.0},
                predictors={"main": 50.0},
                diagnostics={"phi": 0.5},
            )
        )
    found = LastRounds.of(rounds)
    assert found.balanced_accuracy == 20
    assert found.macro_f1 is None
    assert found.calibration_error == 4
    assert found.recall == [20, None, 60]
    assert found.judged == {"clients_recall": 53.5, "samples_auc": 70}  # of the rounds that have it
    assert found.diagnostics == {"phi": 0.5}


def test_the_last_rounds_are_those_that_the_headline_is_over(ended):
    """A round without a predictor is none of them; of a run without any, the last five are taken all the same."""
    _, seen, _ = ended
    early = with_rates(seen[0], judged={"clients_recall": 10.0})
    late = with_rates(seen[0], accuracy=None, judged={"clients_recall": 90.0})
    assert LastRounds.of([early, late]).judged == {"clients_recall": 10}
    assert LastRounds.of([late, late]).judged == {"clients_recall": 90}
    assert LastRounds.of([]).balanced_accuracy is None


def test_a_result_holds_the_means_of_its_records(ended):
    result, seen, _ = ended
    assert result.last5 == LastRounds.of(seen)
    assert result.last5.judged
    assert result.environment["processor"]


# -------------------------------------------------------------------------------------------- what is written is sound


def test_nothing_is_written_that_could_not_be_read_back(ended, tmp_path):
    result, _, _ = ended
    path = tmp_path / "result.json"
    with pytest.raises(ValueError, match=r"what was to be written to .*result\.json.*rounds"):
        records.write_json(path, result.model_copy(update={"rounds": -1}))
    with pytest.raises(ValueError, match="not JSON compliant"):
        records.write_json(path, result.model_copy(update={"label_noise_before": math.nan}))
    assert not path.exists()


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"failure": "it broke"}, "status is 'complete', and failure 'it broke'"),
        ({"status": "failed"}, "status is 'failed', and failure None"),
        ({"rounds": 4}, "4 rounds completed, of 3"),
        ({"environment": {}}, r"environment: .*method_sha256: Field required"),
        ({"environment": {"method_sha256": "5", "earlier": {"a": 1}}}, "environment: .*earlier: "),
        ({"card": {}}, "card: .*title: Field required"),
        ({"label_noise_before": math.nan}, "NaN is no number"),
    ],
)
def test_a_result_that_contradicts_itself_is_refused(change, what, ended, tmp_path):
    spoilt(ended, tmp_path, "result.json", lambda content: {**content, **change})
    with pytest.raises(ValueError, match=what):
        records.load_result(tmp_path)


# ------------------------------------------------------------------------------------------------- older files

HISTORIC = sorted((Path(__file__).parent / "historic_results").iterdir())


@pytest.mark.parametrize("folder", HISTORIC, ids=lambda folder: folder.name)
def test_every_published_version_keeps_loading(folder):
    settings, result, rounds = records.load_settings(folder), records.load_result(folder), records.load_records(folder)
    stored = json.loads((folder / "result.json").read_text())
    assert result.settings == settings
    assert result.digest == rounds[-1].digest == stored["digest"]
    assert result.accuracy == Accuracy.of([record.accuracy for record in rounds])
    assert result.last5 is None  # was not kept then; the records have it
    assert LastRounds.of(rounds).balanced_accuracy > 0
    assert settings.choices == "unstated"
    assert settings.oracle == stored["settings"].get("oracle")


@pytest.mark.parametrize("folder", HISTORIC, ids=lambda folder: folder.name)
def test_an_older_runs_folder_keeps_its_name(folder):
    """So that the same command finds what is done already."""
    key, slug = {
        "v1-before-oracles": ("bd1b0fea93", "fedcova-sym-rho0.6-tau0.7_bernoulli-dirichlet-p0.5-alpha5_m5"),
        "v1-with-oracles": ("e665825365", "fedcova-sym-rho0.6-tau0.7_bernoulli-dirichlet-p0.5-alpha5_m5"),
    }[folder.name]
    settings = records.load_settings(folder)
    assert (settings.key, settings.scenario.slug) == (key, slug)


# ------------------------------------------------------------------------------------------------ source of choices


def test_a_run_says_on_what_its_values_were_chosen():
    assert resolve().choices == "preset"
    assert resolve(rounds=5).choices == "preset"  # a length is no choice between values
    assert resolve(changes=["protocol.rounds=5", "protocol.precision=fp32"]) == resolve(rounds=5, precision="fp32")
    assert resolve(changes=["protocol.rounds=5"], choices="preset").choices == "preset"
    assert resolve(changes=["protocol.rounds=5", "alpha=7"]).choices == "unstated"
    assert resolve(changes=["alpha=7"]).choices == "unstated"
    assert resolve(changes=["alpha=7"], choices="validation").choices == "validation"
    with pytest.raises(ValueError, match="alpha=7 was set by hand, so say what it was chosen on"):
        resolve(changes=["alpha=7"], choices="preset")
    with pytest.raises(ValueError, match=r"unknown source of choices 'validatoin'\. Did you mean validation"):
        resolve(choices="validatoin")


def test_on_what_values_were_chosen_changes_no_result():
    assert resolve(changes=["alpha=7"], choices="validation").key == resolve(changes=["alpha=7"]).key
