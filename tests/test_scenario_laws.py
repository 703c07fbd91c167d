"""What the noise laws promise beyond symmetric, pair and map: matrices, images, people, other data sets, mixtures,
prescribed difficulty; and that all of it can be said in TOML and on the command line."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from command_line import call, done, refused

from flnoisebench import inputs, registry, scenario
from flnoisebench.api import Arrays, Dataset
from flnoisebench.evaluation import Judge
from flnoisebench.scenario import (
    CLASS_MAPS,
    NOISE_PRESETS,
    PRESET_PARTITIONS,
    Noise,
    Partition,
    ScenarioSpec,
    Sources,
    build,
    check,
    corrupt,
    noise_from,
    oracle,
    pinned,
    read_split,
    summary,
)
from flnoisebench.scenario.class_maps import CIFAR100_COARSE
from flnoisebench.scenario.corruption import _by_law, flip_rate, target_law
from flnoisebench.scenario.noise import checked_matrix
from flnoisebench.settings import resolve_scenario

STREAM = ("scenario", "test", 0)
ALL = {"clients": "all", "rate": "constant"}


def balanced(n: int, classes: int) -> np.ndarray:
    return np.arange(n) % classes


def one_client(n: int) -> np.ndarray:
    return np.zeros(n, dtype=np.int64)


def drawn(
    noise: Noise, true: np.ndarray, classes: int, sources: Sources | None = None, clients: int = 1, draw: int = 0
):
    owner = np.arange(len(true)) // 7 % clients
    return corrupt(noise, true, owner, classes, clients, ("scenario", "test", draw), sources)


def made(noise: Noise, true, classes=10, sources=None, **spec):
    spec = ScenarioSpec(dataset="d", noise=noise, noise_name="mine", **{"partition": Partition(law="iid"), **spec})
    return build(spec, true, classes, "sha", sources=sources)


# ---------------------------------------------------------------------------------------------------- maps


def test_uniform_superclass_noise_takes_the_other_four_classes_alike():
    law = Noise(**ALL, tau=1, target="map", class_map="cifar100-superclass-uniform")
    true = balanced(40_000, 100)
    given = drawn(law, true, 100).given
    coarse = np.array(CIFAR100_COARSE)
    assert (coarse[given] == coarse[true]).all()
    assert (given != true).all()
    counts = np.bincount(given[true == 0], minlength=100)
    assert np.flatnonzero(counts).tolist() == [c for c in range(100) if coarse[c] == coarse[0] and c != 0]
    assert abs(counts[counts > 0] - 100).max() < 5 * np.sqrt(100)


def test_the_legacy_blocks_are_hardly_ever_superclasses():
    pairs = enumerate(CLASS_MAPS["cifar100-block5-legacy"])
    assert sum(CIFAR100_COARSE[c] == CIFAR100_COARSE[t] for c, t in pairs) == 6


def test_the_mnist_map_is_patrinis():
    moved = {c: t for c, t in enumerate(CLASS_MAPS["mnist-semantic"]) if c != t}
    assert moved == {7: 1, 2: 7, 5: 6, 6: 5, 3: 8}


def test_fedcorrs_code_mislabels_into_the_first_ten_classes_only_and_its_law_into_all():
    true = balanced(20_000, 100)
    legacy, paper = (
        drawn(noise_from(name, tau=0.9, clients="all"), true, 100) for name in ("fedcorr-legacy", "fedcorr")
    )
    wrong = legacy.given[legacy.given != true]
    assert set(wrong) == set(range(10))
    assert len(set(paper.given[paper.given != true])) == 100
    # A sample of the first ten keeps its label one time in ten; all others are surely wrong: (90 + 10 * .9) / 100.
    assert legacy.expected == pytest.approx(legacy.nominal * 0.99)


def test_fedneds_code_spoils_the_first_classes_of_a_client_and_its_law_all_alike():
    true = np.random.default_rng(0).integers(0, 10, 10_000)
    legacy = drawn(noise_from("fedned-beta-legacy", rate="constant", tau=0.5), true, 10)
    wrong = np.bincount(true[legacy.given != true], minlength=10) / np.bincount(true, minlength=10)
    assert wrong[:4].min() == 1
    assert wrong[6:].max() == 0
    assert legacy.expected == pytest.approx([0.5])
    rates = drawn(noise_from("fedned-beta-legacy"), true, 10, clients=20).nominal
    assert (np.diff(rates) >= 0).all()
    assert not (np.diff(drawn(noise_from("fedned-beta"), true, 10, clients=20).nominal) >= 0).all()


# ------------------------------------------------------------------------------------------------ matrices

T = [[0.8, 0.2, 0.0], [0.0, 0.5, 0.5], [0.1, 0.0, 0.9]]


def test_a_transition_matrix_is_drawn_from_row_by_row():
    true = balanced(30_000, 3)
    found = drawn(Noise(**ALL, tau=1, target="matrix", matrix=T), true, 3)
    assert found.transition == pytest.approx(np.array(T))
    pairs = np.zeros((3, 3))
    np.add.at(pairs, (true, found.given), 1 / 10_000)
    assert np.abs(pairs - T).max() < 4 * 0.005
    assert (pairs[np.array(T) == 0] == 0).all()
    assert found.expected == pytest.approx([(0.2 + 0.5 + 0.1) / 3])
    half = drawn(Noise(**ALL, tau=0.5, target="matrix", matrix=T), true, 3)
    assert half.transition[0] == pytest.approx([0.9, 0.1, 0])


@pytest.mark.parametrize("ending", ["csv", "npy", "NPY"])
def test_a_matrix_is_read_from_a_file_and_kept_by_value(tmp_path, ending):
    path = tmp_path / f"T.{ending}"
    if ending == "csv":
        np.savetxt(path, T, delimiter=",")
    else:
        with path.open("wb") as file:  # a name alone gets a second ending
            np.save(file, np.array(T))
    noise = noise_from("fednoisy-global", target="matrix", matrix=str(path), count="bernoulli")
    assert np.array(noise.matrix) == pytest.approx(np.array(T))
    path.unlink()
    assert Noise.model_validate(noise.model_dump()) == noise
    assert Noise.model_validate_json(noise.model_dump_json()) == noise
    assert target_law(noise, np.arange(3), 3) == pytest.approx(np.array(T))


@pytest.mark.parametrize("text", ["\ufeff1,0\n.2,.8\n", '"1","0"\r\n"0.2","0.8"\r\n\r\n'])
def test_a_matrix_is_the_same_as_a_spreadsheet_writes_it(tmp_path, text):
    (tmp_path / "T.csv").write_text(text)
    noise = noise_from("fednoisy-global", target="matrix", matrix=str(tmp_path / "T.csv"))
    assert noise.matrix == ((1, 0), (0.2, 0.8))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1,0\n0.5,0.4\n", r"T\.csv: the rows of a transition matrix sum to 1: row 1 sums to 0\.9"),
        ("1,0\n1.5,-0.5\n", r"row 1 is \[1\.5, -0\.5\]"),
        ("1,0\nnan,1\n", r"holds probabilities: row 1"),
        ("1,0,0\n0,1,0\n", r"is square: row 0 has 3 numbers, and there are 2 rows"),
        ("1,zero\n0,1\n", r"T\.csv: .*could not convert"),
    ],
)
def test_a_file_that_is_no_transition_matrix_is_refused_by_row(tmp_path, text, message):
    (tmp_path / "T.csv").write_text(text)
    with pytest.raises(ValueError, match=message):
        noise_from("fednoisy-global", target="matrix", matrix=str(tmp_path / "T.csv"))


def test_a_row_that_sums_to_nearly_one_leads_to_no_class_beyond_the_last():
    row = [0.5, 0.4999991]  # which is accepted: written with so many digits
    assert checked_matrix([row, row]).shape == (2, 2)
    chance = np.array([0.0, 0.4999, 0.5001, np.nextafter(1, 0)])
    assert _by_law(np.array([row] * 4), chance).tolist() == [0, 0, 1, 1]


def test_a_matrix_file_that_could_run_code_is_not_unpickled(tmp_path):
    np.save(tmp_path / "T.npy", np.array([[1.0]], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match=r"T\.npy: Object arrays cannot be loaded when allow_pickle=False"):
        noise_from("fednoisy-global", target="matrix", matrix=str(tmp_path / "T.npy"))


def test_a_matrix_of_another_number_of_classes_is_refused():
    with pytest.raises(ValueError, match="needs a matrix of 10 rows, and has 3"):
        drawn(Noise(**ALL, target="matrix", matrix=T), balanced(100, 10), 10)
    with pytest.raises(ValueError, match=r"T\.csv: .*not found"):
        noise_from("fednoisy-global", target="matrix", matrix="nowhere/T.csv")


# -------------------------------------------------------------------------------------------------- images


def images(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (n, 1, 4, 4), dtype=np.uint8)


def test_instance_noise_depends_on_the_image_and_the_class_alone():
    # Each image twice in the same class, on two clients: the law, the row of chances by image, is the same.
    n = 4000
    true, pixels = np.tile(balanced(n, 5), 2), np.tile(images(20)[:, None], (1, 200, 1, 1, 1)).reshape(n, 1, 4, 4)
    owner = np.repeat([0, 1], n)
    noise = Noise(**ALL, tau=0.8, target="instance", flip_spread=0.0)
    found = corrupt(noise, true, owner, 5, 2, STREAM, Sources(images=np.concatenate([pixels, pixels])))
    wrong = found.given != true
    shares = np.zeros((2, 20, 5, 5))  # client, image, true, given
    which = np.tile(np.repeat(np.arange(20), 200), 2)
    np.add.at(shares, (owner[wrong], which[wrong], true[wrong], found.given[wrong]), 1 / 40)
    assert np.abs(shares[0] - shares[1]).max() < 0.55  # 32 wrong labels each: noise of a few tenths
    top = shares[0].argmax(-1) == shares[1].argmax(-1)
    assert top.mean() > 0.85
    by_class = shares.mean(axis=(0, 1))  # a law of the class alone would give every image its class's favourite
    assert (shares[0].argmax(-1) == by_class.argmax(-1)).mean() < 0.7
    assert (by_class.diagonal() == 0).all()


def test_instance_noise_gives_each_sample_its_own_rate_round_the_clients():
    n = 40_000
    true, sources = balanced(n, 5), Sources(images=images(n))
    for tau in (0.05, 0.4, 1.0):
        found = drawn(Noise(**ALL, tau=tau, target="instance"), true, 5, sources)
        mean = flip_rate(NOISE_PRESETS["instance"][0], tau)
        assert found.expected == pytest.approx([mean])
        assert (found.given != true).mean() == pytest.approx(mean, abs=4 * np.sqrt(mean * (1 - mean) / n))
    # By hand: a normal law of mean 1 and spread .1 cut off at 1 (and at 0, far away) has mean 1 - .1 sqrt(2 / pi).
    assert flip_rate(NOISE_PRESETS["instance"][0], 1.0) == pytest.approx(1 - 0.1 * np.sqrt(2 / np.pi), abs=1e-9)
    assert flip_rate(NOISE_PRESETS["instance"][0], 0.5) == pytest.approx(0.5)


@pytest.mark.parametrize("rate", ["uniform", "beta", "ramp"])
def test_stratified_instance_noise_aims_at_the_mean_of_its_own_draws(rate):
    # a sample's rate is cut off at 0, so that near 0 the mean of all is about twice the clients' nominal ones
    noise = Noise(clients="all", target="instance", rate=rate, lo=0, hi=0.1, beta_a=0.5, beta_b=2)
    true, sources = balanced(1000, 5), Sources(images(1000))
    free = [drawn(noise, true, 5, sources, clients=20, draw=draw).expected.mean() for draw in range(40)]
    strict = noise.model_copy(update={"mass": "stratified"})
    kept = [drawn(strict, true, 5, sources, clients=20, draw=draw).expected.mean() for draw in range(5)]
    assert kept == pytest.approx([np.mean(free)] * 5, abs=0.02)


def test_a_client_at_the_foot_of_a_ramp_is_clean_under_instance_noise_too():
    true, sources = balanced(1000, 5), Sources(images=images(1000))
    found = drawn(noise_from("instance", rate="ramp", lo=0, hi=0.4), true, 5, sources, clients=5)
    owner = np.arange(1000) // 7 % 5
    wrong = [(found.given != true)[owner == m].mean() for m in range(5)]
    assert found.nominal[0] == found.expected[0] == wrong[0] == 0
    assert min(wrong[1:]) > 0


def test_instance_noise_keeps_to_a_clients_own_classes_and_to_its_nominal_matrix():
    true = balanced(30_000, 6)
    owner = (true >= 3).astype(np.int64)
    noise = Noise(**ALL, tau=0.5, target="instance", label_space="client")
    found = corrupt(noise, true, owner, 6, 2, STREAM, Sources(images=images(30_000)))
    assert set(found.given[owner == 0]) == {0, 1, 2}
    pairs = np.zeros((6, 6))
    np.add.at(pairs, (true, found.given), 1)
    sigma = np.sqrt(5000 * found.transition * (1 - found.transition))
    assert (np.abs(pairs - 5000 * found.transition) <= 4.5 * sigma + 1e-9).all()


def test_large_images_decide_by_their_blocks():
    small = images(500)
    large = small.repeat(16, axis=2).repeat(16, axis=3)  # 64 x 64: pooled to 32 x 32
    noise, true = Noise(**ALL, tau=0.5, target="instance"), balanced(500, 5)
    found = drawn(noise, true, 5, Sources(images=large))
    blurred = large.reshape(500, 1, 32, 2, 32, 2).mean(axis=(3, 5)).astype(np.uint8)
    assert found.given.tolist() == drawn(noise, true, 5, Sources(images=blurred)).given.tolist()
    with pytest.raises(ValueError, match="looks at the training images"):
        drawn(noise, true, 5)
    with pytest.raises(ValueError, match="take count='bernoulli'"):
        Noise(target="instance", count="exact")


# -------------------------------------------------------------------------------------------------- people


def people(n: int = 20_000) -> tuple[np.ndarray, Sources]:
    """Class 0 is called 1 by half of the people, class 3 by none of them wrongly, others by a third at random."""
    rng = np.random.default_rng(0)
    true = balanced(n, 4)
    human = np.where(rng.random(n) < 1 / 3, rng.integers(0, 4, n), true)
    human = np.where(true == 0, (rng.random(n) < 0.5).astype(int), np.where(true == 3, 3, human))
    return true, Sources(human={"worse_label": human})


def test_human_noise_is_what_people_wrote_to_the_last_label():
    true, sources = people()
    noise = Noise(**ALL, tau=1, target="human", labelled_by="worse_label")
    scene, truth = made(noise, true, 4, sources, clients=5)
    human = sources.human["worse_label"]
    assert np.array_equal(scene.given, human)
    facts = summary(scene, truth)
    assert facts["expected_rate"] == facts["realised_rate"] == (human != true).mean()
    assert facts["transition"]["nominal"] == facts["transition"]["realised"]
    assert check(scene, truth, true, sources=sources) == []
    some = drawn(noise.model_copy(update={"tau": 0.4}), true, 4, sources)
    touched = some.given != true
    assert np.array_equal(some.given[touched], human[touched])
    assert some.expected == pytest.approx([0.4 * (human != true).mean()])


def test_the_twin_has_the_peoples_transitions_and_not_their_mistakes():
    true, sources = people()
    noise = Noise(**ALL, tau=1, target="twin", labelled_by="worse_label")
    found = drawn(noise, true, 4, sources)
    human = sources.human["worse_label"]
    T = np.zeros((4, 4))
    np.add.at(T, (true, human), 1 / 5000)
    assert found.transition == pytest.approx(T)
    assert (found.given[true == 3] == 3).all()
    in_zero = true == 0
    assert (found.given[in_zero] == 1).mean() == pytest.approx(T[0, 1], abs=0.03)
    both = ((found.given == 1) & (human == 1))[in_zero].mean()
    assert both == pytest.approx(T[0, 1] ** 2, abs=0.03)  # as of two independent draws


def test_human_noise_without_labels_says_which_there_are():
    true, sources = people(100)
    with pytest.raises(ValueError, match=r"needs labelled_by, .*there are: worse_label"):
        drawn(noise_from("cifar10n-aggre"), true, 4, sources)
    with pytest.raises(ValueError, match="needs human labels, and this data set has none"):
        drawn(noise_from("cifar10n-aggre"), true, 4)


# --------------------------------------------------------------------------------------- other data sets


class Gray(Dataset):
    name, title, classes, mean, std, protocol = "gray", "Gray", ("a", "b", "c"), (0.5,), (0.5,), "digits"
    source = "made here"

    def load(self, root: Path, *, public: bool = False) -> Arrays:
        pixels = torch.arange(300, dtype=torch.int64).remainder(100).to(torch.uint8)
        labels = torch.arange(300) % 3
        return Arrays(
            pixels.view(-1, 1, 1, 1).expand(-1, 1, 6, 6).contiguous(), labels, pixels.view(-1, 1, 1, 1), labels
        )


class Colour(Gray):
    name, mean, std = "colour", (0.5,) * 3, (0.5,) * 3

    def load(self, root: Path, *, public: bool = False) -> Arrays:
        pixels = torch.tensor([200, 100, 50], dtype=torch.uint8).view(1, 3, 1, 1).expand(40, 3, 9, 9).contiguous()
        return Arrays(pixels, torch.zeros(40, dtype=torch.int64), pixels[:1], torch.zeros(1, dtype=torch.int64))


@pytest.fixture
def open_set(monkeypatch, tmp_path):
    known = {"gray": Gray, "colour": Colour}
    monkeypatch.setattr(registry, "load_dataset", lambda name: known[name]())
    noise = Noise(**ALL, tau=0.3, target="open-set", foreign="colour")
    spec = ScenarioSpec(dataset="gray", noise=noise, noise_name="open-set", partition=Partition(law="iid"), clients=5)
    data, arrays = Gray(), Gray().load(tmp_path)
    scene, truth = inputs.build_scenario(spec.model_copy(update={"holdout": 0.2}), data, arrays, tmp_path)
    return data, arrays, scene, truth, tmp_path


def test_open_set_noise_keeps_labels_and_changes_images(open_set):
    data, arrays, scene, truth, root = open_set
    assert np.array_equal(scene.given, arrays.train_labels.numpy())
    intruders = truth.foreign >= 0
    assert intruders.mean() == pytest.approx(0.3, abs=0.1)
    assert (truth.true == np.where(intruders, -1, arrays.train_labels.numpy())).all()
    shown = inputs.with_foreign(arrays, scene, truth, root).train_images
    luma = (299 * 200 + 587 * 100 + 114 * 50 + 500) // 1000
    assert (shown[torch.as_tensor(intruders)] == luma).all()
    assert torch.equal(shown[torch.as_tensor(~intruders)], arrays.train_images[torch.as_tensor(~intruders)])
    assert inputs.check_scenario(scene, truth, data, arrays, root) == []
    facts = summary(scene, truth)
    assert facts["realised_rate"] == intruders.mean()
    assert facts["expected_rate"] == pytest.approx(0.3)
    assert np.diag(facts["transition"]["realised"]) == pytest.approx(np.ones(3))
    assert sum(map(sum, (row["counts"] for row in facts["clients"]))) == 300


def test_an_intruder_is_wrong_whatever_it_is_called_and_no_oracle_or_validation_trains_or_asks_for_it(open_set):
    _, arrays, scene, truth, _ = open_set
    trained = ~scene.held_out
    judge = Judge(scene, truth)
    assert judge.noise_before() == pytest.approx(100 * (truth.foreign >= 0)[trained].mean(), abs=1e-3)
    images, labels = inputs.evaluation_set("validation", arrays, scene, truth)
    assert len(images) == len(labels) == (scene.held_out & (truth.foreign < 0)).sum()
    assert labels.min() >= 0
    for name in ("clean-samples", "centralised-clean"):
        cleaned = oracle.apply(name, scene, truth)
        training = ~cleaned.scenario.held_out
        assert (cleaned.truth.true[training] >= 0).all()
        assert np.array_equal(cleaned.scenario.given[training], cleaned.truth.true[training])
        assert summary(cleaned.scenario, cleaned.truth)["expected_rate"] == 0


def test_the_foreign_images_are_part_of_a_scenarios_digests_and_of_its_file(open_set, tmp_path, monkeypatch):
    data, arrays, scene, truth, root = open_set
    scenario.save(tmp_path / "a", scene, truth)
    back = scenario.load(tmp_path / "a")
    assert np.array_equal(back[1].foreign, truth.foreign)
    assert inputs.check_scenario(*back, data, arrays, root) == []
    other = inputs.build_scenario(scene.spec.model_copy(update={"draw": 1}), data, arrays, root)
    assert scene.digests["foreign"] != other[0].digests["foreign"]
    with monkeypatch.context() as patched:
        patched.setattr(inputs, "foreign_images", lambda *_: torch.zeros((40, 3, 9, 9), dtype=torch.uint8))
        black = inputs.build_scenario(scene.spec, data, arrays, root)
    (said,) = scenario.diff((scene, truth), black)  # the same places, under other images
    assert said.startswith("foreign images: SHA-256 ")
    moved = truth.foreign.copy()
    moved[truth.foreign >= 0] = 0
    forged = scenario.Truth(truth.true, truth.noisy, truth.nominal, foreign=moved)
    assert any("foreign images" in problem for problem in inputs.check_scenario(scene, forged, data, arrays, root))


def test_a_scenario_in_another_order_says_the_same_of_each_image():
    scene, truth = made(intruding("other"), balanced(60, 10), sources=Sources(foreign=9), clients=3, holdout=0.2)
    order = np.random.default_rng(0).permutation(60)
    again, told = scenario.reordered(scene, truth, order)
    for one, other in ((scene, again), (truth, told)):
        for name in {"owner", "given", "held_out", "true", "foreign"} & set(vars(one)):
            assert np.array_equal(getattr(one, name)[order], getattr(other, name)), name
            assert not getattr(other, name).flags.writeable
    assert (again.digests, again.told, again.spec) == (scene.digests, scene.told, scene.spec)


def test_an_image_stands_in_one_place_only_while_there_are_enough():
    true = balanced(1000, 10)
    noise = Noise(**ALL, tau=1, target="open-set", foreign="x")
    found = drawn(noise, true, 10, Sources(foreign=1000), clients=4)
    assert sorted(found.foreign) == list(range(1000))
    few = drawn(noise.model_copy(update={"tau": 0.5}), true, 10, Sources(foreign=1000), clients=4).foreign
    assert np.array_equal(few[few >= 0], found.foreign[few >= 0])
    with pytest.raises(ValueError, match="say which, foreign=NAME"):
        drawn(Noise(**ALL, target="open-set"), true, 10, Sources(foreign=10))


def test_foreign_images_are_fitted_by_hand():
    grey = torch.tensor([[[[10, 30], [50, 70]]]], dtype=torch.uint8)
    colour = torch.zeros(1, 3, 2, 2, dtype=torch.uint8)
    assert inputs.fitted(grey, colour).tolist() == grey.expand(1, 3, 2, 2).tolist()
    assert inputs.fitted(colour, grey).shape == grey.shape
    assert inputs.fitted(grey, torch.zeros(1, 1, 1, 1, dtype=torch.uint8)).tolist() == [[[[40]]]]
    with pytest.raises(ValueError, match="images of 2 channels cannot stand among those of 1"):
        inputs.fitted(torch.zeros(1, 2, 2, 2, dtype=torch.uint8), grey)


# ------------------------------------------------------------------------------------------------ mixtures


def test_a_mixture_deals_its_laws_evenly_and_each_client_follows_its_own():
    true = balanced(20_000, 10)
    laws = (
        Noise(**ALL, tau=0.5, target="pair", count="exact"),
        Noise(**ALL, tau=0.9, target="pair", pair_step=-1, count="exact"),
        Noise(clients="none"),
    )
    noise = Noise(clients="exact", rho=0.5, target="mixed", mixture=laws)
    scene, truth = made(noise, true, clients=20)
    assert np.bincount(truth.part).tolist() == [7, 7, 6]
    assert truth.noisy.sum() == (truth.noisy & (truth.part < 2)).sum() <= 10
    for m in range(20):
        mine = scene.owner == m
        moved = (scene.given - true)[mine] % 10
        allowed = {0: {0, 1}, 1: {0, 9}, 2: {0}}[truth.part[m]] if truth.noisy[m] else {0}
        assert set(moved) <= allowed
        if truth.noisy[m]:
            assert (moved > 0).mean() == [0.5, 0.9][truth.part[m]]
    assert check(scene, truth, true) == []
    rows = summary(scene, truth)["clients"]
    assert [row["law"] for row in rows] == truth.part.tolist()


def test_a_mixture_is_kept_in_the_file_with_what_its_laws_give(tmp_path):
    true = balanced(4000, 10)
    scene, truth = made(noise_from("mixed"), true, clients=10)
    scenario.save(tmp_path / "a", scene, truth)
    back = scenario.load(tmp_path / "a")
    assert back[0].spec == scene.spec
    assert np.array_equal(back[1].part, truth.part)
    assert summary(*back) == summary(scene, truth)
    assert check(*back, true) == []
    wrong = scenario.Truth(
        truth.true, truth.noisy, truth.nominal, truth.expected, truth.transition, None, (truth.part + 1) % 2
    )
    assert any("clients' laws" in problem for problem in check(scene, wrong, true))


def intruding(name):
    return Noise(**ALL, target="open-set", foreign=name)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"target": "mixed"}, "go together"),
        ({"mixture": "fedcova-sym"}, "go together"),
        ({"target": "mixed", "mixture": "fedcova-symm"}, "Did you mean fedcova-sym"),
        ({"target": "mixed", "mixture": "mixed,fedcova-sym"}, "plain laws"),
        ({"target": "mixed", "mixture": "fedned-beta-legacy"}, "take rate='beta'"),
        ({"target": "mixed", "mixture": [Noise()]}, "plain laws with clients='all'"),
        ({"target": "mixed", "mixture": [Noise(**ALL, mass=0.3)]}, "plain laws with clients='all'"),
        ({"target": "mixed", "mixture": [intruding("mnist"), intruding("svhn")]}, "foreign images from one data set"),
        ({"target": "instance", "count": "exact"}, "each sample its own rate: take count='bernoulli'"),
        ({"target": "twin", "label_space": "client"}, "knows no label space"),
        ({"label_space": "first-ten", "include_true": False}, "first-ten"),
        ({"target": "mixed", "mixture": None}, "mixture"),
        ({"target": "mixed", "mixture": 3}, "mixture"),
        ({"target": "mixed", "mixture": {"preset": "fedcorr"}}, "mixture\n.*valid tuple"),
        ({"target": "mixed", "mixture": [{"preset": 5}]}, "preset = 5: the name of a noise is wanted"),
        ({"target": "mixed", "mixture": [{"preset": ["fedcorr"]}]}, "the name of a noise is wanted"),
        ({"clients": "ids", "ids": True}, "ids"),
        ({"mass": 1.2}, "mass is drawn, stratified or a share"),
        ({"mass": "stratifeid"}, "mass"),
    ],
)
def test_laws_that_mean_nothing_are_refused(bad, message):
    with pytest.raises(ValueError, match=message):
        Noise(**bad)


# ------------------------------------------------------------------------------------- prescribed difficulty

CIFAR = np.repeat(np.arange(10), 5000)


def scene_of(preset: str, draw: int, **changes):
    noise = noise_from(preset, **changes)
    spec = ScenarioSpec(
        dataset="cifar10", noise=noise, noise_name=preset, draw=draw,
        partition=PRESET_PARTITIONS.get(preset, Partition()),
    )  # fmt: skip
    return build(spec, CIFAR, 10, "sha")


@pytest.mark.parametrize("who", ["exact", "bernoulli"])
def test_stratified_draws_fix_the_number_of_noisy_clients_and_the_noise_within_a_point(who):
    # By hand: 12 of 20 clients of mean rate .7, a tenth of the flips on the true class: .378 of all labels.
    for draw in range(12):
        scene, truth = scene_of("fedcova-sym-stratified", draw, clients=who)
        assert truth.noisy.sum() == 12
        assert summary(scene, truth)["expected_rate"] == pytest.approx(0.378, abs=0.01)
        assert summary(scene, truth)["realised_rate"] == pytest.approx(0.378, abs=0.015)


def test_a_stratified_draw_keeps_the_partition_and_is_the_plain_draw_where_that_will_do():
    same = 0
    for draw in range(12):
        (plain, truth), (strict, _) = scene_of("fedcova-sym", draw), scene_of("fedcova-sym-stratified", draw)
        assert plain.digests["partition"] == strict.digests["partition"]
        near = abs(summary(plain, truth)["expected_rate"] - 0.378) <= 0.01
        assert (plain.digests["labels"] == strict.digests["labels"]) == near
        same += near
    assert 0 < same < 12


@pytest.mark.parametrize(
    ("preset", "published", "noisy"),
    [("fedcova-paper-27.5", 0.2751, 8), ("fedcova-paper-34.4", 0.3442, 12), ("fedcova-paper-40.3", 0.4033, 12)],
)
def test_the_look_alikes_have_the_papers_share_of_wrong_labels_within_a_point(preset, published, noisy):
    for draw in range(5):
        scene, truth = scene_of(preset, draw)
        assert (scene.given != truth.true).mean() == pytest.approx(published, abs=0.01)
        assert truth.noisy.sum() == noisy
        assert scene_of(preset, draw)[0].digests == scene.digests


@pytest.mark.parametrize(
    ("law", "by_hand"),
    [
        (Noise(rho=0.5, rate="constant", tau=0.7, mass="stratified"), 3 / 7 * 0.7 * 0.9),  # int(3.5) clients
        (Noise(clients="all", rate="ramp", lo=0, hi=0.7, mass="stratified"), 0.3 * 0.9),  # 0, .1, ..., .6
        (Noise(clients="all", rate="beta", beta_a=2, beta_b=6, mass="stratified"), 0.25 * 0.9),
    ],
    ids=["exact", "ramp", "beta"],
)
def test_a_stratified_draw_is_within_a_point_of_the_expectation_worked_out_by_hand(law, by_hand):
    scene, truth = made(law, balanced(7000, 10), clients=7)
    assert summary(scene, truth)["expected_rate"] == pytest.approx(by_hand, abs=0.0101)


def test_an_exact_count_of_a_small_client_is_expected_as_it_is_realised():
    law = Noise(**ALL, tau=0.4, count="exact", include_true=False)
    for row in summary(*made(law, balanced(14, 2), 2, clients=2))["clients"]:
        assert (row["nominal"], row["expected"], row["realised"]) == (0.4, pytest.approx(2 / 7), pytest.approx(2 / 7))


def test_intruders_count_towards_a_prescribed_share():
    law = Noise(target="open-set", foreign="other", mass=0.4)
    scene, truth = made(law, CIFAR[::10], sources=Sources(foreign=100, foreign_digest="other"), clients=20)
    assert (truth.foreign >= 0).mean() == pytest.approx(0.4, abs=0.01)
    assert (scene.given != truth.true).mean() == (truth.foreign >= 0).mean()


def test_the_third_look_alike_brings_its_partition_and_gives_way_to_a_said_one(tmp_path):
    assert resolve_scenario(dataset="digits", noise="fedcova-paper-40.3").partition == Partition(p=0.8, alpha=2)
    said = resolve_scenario(dataset="digits", noise="fedcova-paper-40.3", partition_changes={"alpha": 3.0})
    assert said.partition == Partition(p=0.8, alpha=3)
    iid = resolve_scenario(dataset="digits", noise="fedcova-paper-40.3", partition_changes={"law": "iid"})
    assert iid.partition == Partition(law="iid")
    file = tmp_path / "split.csv"  # which says the law too
    file.write_text("index,client\n0,0\n1,0\n")
    split = resolve_scenario(dataset="digits", noise="fedcova-paper-40.3", partition_changes={"file": str(file)})
    assert (split.partition.law, split.clients) == ("manifest", 1)


def test_a_share_that_cannot_be_had_is_an_error_with_numbers():
    with pytest.raises(ValueError, match=r"mass=0\.9: no draw .*20 draws .* between 0\.\d+ and 0\.\d+; change rho"):
        scene_of("fedcova-sym", 0, mass=0.9)
    lone = Noise(rho=0.05, rate="uniform", lo=0, hi=1, mass="stratified")
    assert made(lone, CIFAR, clients=20)[1].noisy.sum() == 1
    with pytest.raises(ValueError, match=r"no draw has a share .* within a point of its expectation"):
        made(Noise(clients="all", rate="beta", beta_a=0.001, beta_b=0.001, mass="stratified"), CIFAR, clients=3)


# ---------------------------------------------------------------------------------------- labels as found


def test_labels_that_come_with_their_truth_are_told_apart_and_judged():
    true = balanced(1000, 5)
    owners = (np.arange(1000) >= 400).astype(np.int64)
    given = np.where((np.arange(1000) % 4 == 0) & (owners == 1), (true + 1) % 5, true)  # the first client is clean
    spec = ScenarioSpec(
        dataset="mine", noise=noise_from("given"), noise_name="given", partition=Partition(law="natural"), clients=2
    )
    sources = Sources(owners=owners)
    known = {"labels_are_true": False, "true_labels": true}
    scene, truth = build(spec, given, 5, "sha", sources=sources, **known)
    assert np.array_equal(scene.given, given)
    assert np.array_equal(truth.true, true)
    facts = summary(scene, truth)
    assert facts["realised_rate"] == facts["expected_rate"] == 0.15
    assert [(row["noisy"], row["nominal"]) for row in facts["clients"]] == [(False, 0), (True, 0.25)]
    assert scene.told == {"noise_rate": 0.15, "noisy_clients": 1}
    assert check(scene, truth, given, sources=sources, **known) == []
    assert "known in the manifest only" in check(scene, truth, given, sources=sources, labels_are_true=False)[0]
    with pytest.raises(ValueError, match=r"true labels must be int64 \[1000\] in 0\.\.4"):
        build(spec, given, 5, "sha", sources=sources, labels_are_true=False, true_labels=true + 1)


def test_who_holds_what_follows_the_truth_where_it_is_known_and_else_the_labels():
    true = balanced(1000, 5)
    given = np.where(np.arange(1000) % 4 == 0, (true + 1) % 5, true)
    spec = ScenarioSpec(
        dataset="mine", noise=noise_from("given"), noise_name="given", partition=Partition(law="dirichlet"), clients=4
    )
    found = build(spec, given, 5, "sha", labels_are_true=False, true_labels=true)[0].owner
    assert np.array_equal(found, build(spec, true, 5, "sha")[0].owner)
    alone = build(spec, given, 5, "sha", labels_are_true=False)[0].owner
    assert np.array_equal(alone, build(spec, given, 5, "sha")[0].owner)
    assert not np.array_equal(found, alone)


# ------------------------------------------------------------------------------- checking realised matrices


def forged(scene, given):
    """The scenario with other given labels, and a digest that fits them."""
    return dataclasses.replace(scene, given=given, digests={**scene.digests, "labels": scenario.digest(given)})


def test_check_allows_what_its_bounds_worked_out_by_hand_allow():
    true = balanced(2000, 10)
    scene, truth = made(Noise(**ALL, tau=0.5, include_true=False), true, clients=20)
    given = scene.given.copy()
    given[scene.owner == 3] = (true[scene.owner == 3] + 1) % 10
    given[true == 0] = 1
    problems = check(forged(scene, given), truth, true)
    # of 20 clients one is blamed in a thousand draws at z = 4.0556; z sqrt(.5 * .5 / 100) + 1 / 100
    assert "client 3: 100.00% of 100 labels are wrong, and the law gives 50.00% +- 21.28%" in problems
    # ln(2 * 100 / .001) = 12.2061, and a ninth of a half is .0556: 4.0687 + sqrt(4.0687^2 + 24.4121 * 200 * .0525)
    assert "class 0 was labelled 1 200 times of 200, and the law gives 11.1 +- 20.6" in problems


def test_check_finds_labels_that_go_where_the_law_sends_none_and_too_many_where_it_sends_some():
    # Ten labels of a noisy client under pair noise turned from y + 1 to y + 2: rates stay, the matrix does not.
    true = balanced(20_000, 10)
    scene, truth = made(Noise(**ALL, tau=0.4, target="pair"), true, clients=4)
    given = scene.given.copy()
    at = np.flatnonzero(given != true)[:10]
    given[at] = (given[at] + 1) % 10
    problems = check(forged(scene, given), truth, true)
    assert any(problem.startswith("class ") and "and the law gives 0.0 +- 0.0" in problem for problem in problems)
    assert not any(problem.startswith("client") for problem in problems)


def other(name):
    """A change of one array of a scenario or its truth, at its start."""

    def changed(kept):
        values = getattr(kept, name).copy()
        change = {"b": np.logical_not, "f": lambda rate: rate + 1e-3, "i": lambda number: 1 - number}
        values[0] = change[values.dtype.kind](values[0])
        return dataclasses.replace(kept, **{name: values})

    return changed


@pytest.mark.parametrize(
    ("scenes", "truths", "message"),
    [
        (other("held_out"), None, "held-out samples differ from those that the settings draw: 1 of 600, first at 0"),
        (None, other("noisy"), "noisy clients differ from those that the settings draw: 1 of 6, first at 0"),
        (None, other("nominal"), "nominal rates differ from those that the settings draw: 1 of 6, first at 0"),
        (None, other("expected"), "the law's rates differ from those that the settings draw"),
        (None, other("transition"), "the law's transitions differ from those that the settings draw"),
        (None, other("part"), "clients' laws in the mixture differ from those that the settings draw"),
        (lambda one: dataclasses.replace(one, told={"noise_rate": 0.0}), None, "told {'noise_rate': 0.0} differs from"),
        (
            lambda one: dataclasses.replace(one, digests={**one.digests, "partition": "0"}),
            None,
            "the partition digest belongs to other partition",
        ),
        (
            lambda one: dataclasses.replace(one, digests={**one.digests, "foreign": "0"}),
            None,
            "the foreign images are others than those that the settings draw",
        ),
    ],
)
def test_check_names_whatever_is_not_as_the_settings_draw_it(scenes, truths, message):
    mixture = (Noise(clients="all"), Noise(clients="all", target="pair"))
    true = balanced(600, 10)
    scene, truth = made(Noise(target="mixed", mixture=mixture), true, clients=6, holdout=0.2)
    assert check(scene, truth, true) == []
    found = check(scenes(scene) if scenes else scene, truths(truth) if truths else truth, true)
    assert any(problem.startswith(message) for problem in found), found


def test_numbers_under_other_intruders_cannot_be_compared():
    one, other_images = (
        made(intruding("other"), balanced(60, 10), sources=Sources(foreign=9, foreign_digest=images), clients=3)
        for images in ("old", "new")
    )
    assert scenario.incomparable(one, one) == []
    assert scenario.incomparable(one, other_images) == [
        "other images of another data set stand among those that are trained on"
    ]


def test_diff_says_which_samples_are_held_out_in_one_only():
    scene, truth = made(Noise(clients="none"), balanced(60, 10), clients=2, holdout=0.2)
    assert scenario.diff((scene, truth), (other("held_out")(scene), truth)) == [
        "1 of 60 samples are held out in one only"
    ]


def test_a_sound_draw_is_hardly_ever_blamed_however_small():
    # 0.1 % by design; 300 draws of 40 samples in 10 classes would show a bound that small classes break.
    true = balanced(40, 10)
    blamed = sum(
        bool(check(*made(Noise(clients="all", tau=0.6), true, clients=3, draw=draw), true)) for draw in range(300)
    )
    assert blamed <= 3


# ------------------------------------------------------------------------------------- on the command line


def test_a_law_is_said_in_a_toml_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("My law.toml").write_text(
        'preset = "fedcova-sym"\nrho = 0.4\ntarget = "mixed"\n'
        '[[mixture]]\npreset = "fedcorr"\n[[mixture]]\npreset = "coteaching-pair"\ntau = 0.3\n'
    )
    spec = resolve_scenario(dataset="digits", noise="My law.toml", noise_changes={"rho": 0.5})
    assert spec.noise_name == "my-law"
    assert spec.noise.rho == 0.5
    assert [part.target for part in spec.noise.mixture] == ["symmetric", "pair"]
    assert spec.noise.mixture[1].tau == 0.3
    for text, message in (
        ("rho = ", "is not TOML"),
        ("\ufeffrhoo = 1", "Did you mean rho"),  # a byte order mark, as Windows writes it
        ("rhoo = 1", "Did you mean rho"),
        ("rho = 2", "less than or equal to 1"),
        ('preset = "fedcov"', "Did you mean fedcorr"),
        ("preset = 5", "preset = 5: the name of a noise is wanted"),
        ('target = "mixed"\nmixture = 5', "mixture = 5"),
        ("lo = 0.1", "lo=0.1 would change nothing"),
    ):
        Path("bad.toml").write_text(text)
        with pytest.raises(ValueError, match=message):
            resolve_scenario(dataset="digits", noise="bad.toml")
    with pytest.raises(ValueError, match="cannot be read"):
        resolve_scenario(dataset="digits", noise="none.toml")


def test_a_single_noisy_client_is_said_by_its_number():
    assert Noise(clients="ids", ids=3).ids == (3,) == Noise(clients="ids", ids="3").ids


def test_every_new_choice_can_be_said_on_the_command_line_and_checked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.savetxt("T.csv", 0.9 * np.eye(10) + 0.1 * np.roll(np.eye(10), 1, axis=1), delimiter=",")
    Path("split.csv").write_text("index,client\n" + "".join(f"{i},{i % 5}\n" for i in range(1438)))
    for number, words in enumerate(
        [
            ("--noise-set", "target=matrix", "--noise-set", "matrix=T.csv", "--partition", "shards"),
            ("--noise", "instance", "--partition", "classes", "--partition-set", "per_client=3"),
            ("--noise", "mixed", "--partition-set", "file=split.csv"),
            ("--noise-set", "target=mixed", "--noise-set", "mixture=fedcorr,clean", "--partition", "quantity"),
            ("--noise-set", "mass=stratified", "--p", "0.9"),
            ("--noise", "fedcova-paper-34.4"),
        ]
    ):
        out = f"{number}.safetensors"
        done("scenario", "build", "--clients", "5", *words, "--out", out)
        assert "rebuildable" in done("scenario", "check", out)
        facts = json.loads(done("scenario", "show", out, "--json"))
        assert 0 < facts["realised_rate"] < 0.9
    assert "foreign=NAME" in refused("scenario", "build", "--noise", "open-set")
    assert "unknown data set 'nowhere'" in refused(
        "scenario", "build", "--noise", "open-set", "--noise-set", "foreign=nowhere"
    )
    assert "law='manifest' and file go together" in refused("scenario", "build", "--partition", "manifest")
    assert "there is no file" in call("scenario", "build", "--partition-set", "file=x.csv").stderr
    assert "unknown setting 'shard'" in refused("scenario", "build", "--partition-set", "shard=3")


def test_a_scenario_pinned_by_a_file_says_so_when_the_file_has_changed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("split.csv").write_text("index,client\n" + "".join(f"{i},{i % 5}\n" for i in range(1438)))
    done("scenario", "build", "--partition-set", "file=split.csv", "--out", "a.safetensors")
    assert scenario.load("a.safetensors")[0].spec.clients == 5  # as many as it names, and so does a manifest
    assert resolve_scenario(dataset="digits", partition_changes={"file": "a.safetensors"}).clients == 5
    said = call("scenario", "build", "--clients", "4", "--partition-set", "file=split.csv").stderr
    assert "names 5 clients, and clients=4: set clients to 5" in said
    Path("bad.csv").write_text("index,client\n0,0\n0,1\n")
    assert "bad.csv:3: sample 0 is given twice" in call("scenario", "build", "--partition-set", "file=bad.csv").stderr
    Path("split.csv").write_text("index,client\n" + "".join(f"{i},{i % 4}\n" for i in range(1438)))
    result = call("scenario", "check", "a.safetensors")
    assert result.exit_code != 0
    assert "is another file now" in result.stderr


def test_a_manifest_is_the_same_wherever_the_file_of_its_split_lies(tmp_path, monkeypatch):
    """Equal bytes from whichever folder it was made, nobody's folders in it, and checked wherever it is taken."""
    split = "index,client\n" + "".join(f"{i},{i % 5}\n" for i in range(1438))
    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "split.csv").write_text(split)
    monkeypatch.chdir(tmp_path / "here")
    for path in ("split.csv", "../there/split.csv", str(tmp_path / "there" / "split.csv")):
        done("scenario", "build", "--partition-set", f"file={path}", "--out", "a.safetensors")  # no --replace
    assert str(tmp_path).encode() not in Path("a.safetensors").read_bytes()
    assert "rebuildable" in done("scenario", "check", "a.safetensors")
    monkeypatch.chdir(tmp_path)
    assert "rebuildable" in done("scenario", "check", "here/a.safetensors")  # the split lies beside it
    Path("split.csv").write_text("another one")
    assert "rebuildable" in done("scenario", "check", "here/a.safetensors")
    Path("split.csv").unlink()
    Path("here/a.safetensors").rename("a.safetensors")
    result = call("scenario", "check", "a.safetensors")
    assert "rebuildable" in result.stdout
    assert "split.csv (SHA-256 " in result.stderr
    assert "whether the split is that file's is not checked: lay it there" in result.stderr


def test_scenarios_do_not_differ_by_where_the_file_of_a_split_lies(tmp_path):
    made = []
    for name, draw in (("a.csv", 0), ("b.csv", 0), ("b.csv", 1)):
        (tmp_path / name).write_text("index,client\n" + "".join(f"{i},{i % 5}\n" for i in range(100)))
        cut = pinned(Partition(law="manifest", file=str(tmp_path / name)))
        spec = ScenarioSpec(dataset="d", noise=Noise(), noise_name="fedcova-sym", partition=cut, clients=5, draw=draw)
        labels = np.arange(100) % 10
        made.append(build(spec, labels, 10, "x", sources=Sources(owners=read_split(cut, 100, "x"))))
    assert scenario.diff(made[0], made[1]) == scenario.incomparable(made[0], made[1]) == []
    assert scenario.incomparable(made[0], made[2])[0].startswith("they are two draws of one law")


UNTOUCHED = "the scenario has no noisy client, and all labels are as they were: noise fedcova-sym"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--rho", "0.1"), f"{UNTOUCHED} (rho=0.1, tau=0.7, clients=5); take more of it, or say --noise clean\n"),
        (("--tau", "0"), f"{UNTOUCHED} (rho=0.6, tau=0.0, clients=5); take more of it, or say --noise clean\n"),
        (("--noise", "clean"), ""),
        (("--rho", "0.2"), ""),
        (("--partition-set", "file=split", "--draw", "3"), "of split the split alone is taken, and not its labels: the "
         "noise is drawn anew (fedcova-sym, draw 3)\n"),
        (("--partition-set", "file=split.csv"), ""),
        (("--partition-set", "file=split.csv", "--noise", "clean"), ""),
        (("--partition-set", "file=split.csv", "--noise", "clean", "--draw", "1", "--holdout", "0.2"), ""),
        (("--partition-set", "file=split.csv", "--noise", "clean", "--draw", "1"), "nothing in this scenario is drawn "
         "(partition manifest, noise clean, no hold-out): another --draw is the same run again, another --seed is "
         "another run\n"),
    ],
)  # fmt: skip
def test_what_a_scenario_is_not_expected_to_be_is_said_in_a_line(tmp_path, monkeypatch, words, said):
    monkeypatch.chdir(tmp_path)
    done("scenario", "build", "--clients", "5", "--out", "split")
    Path("split.csv").write_text("index,client\n" + "".join(f"{i},{i % 5}\n" for i in range(1438)))
    assert call("scenario", "build", "--clients", "5", *words, "--out", "built").stderr == said
    ran = call("run", "--method", "fedavg", "--rounds", "1", "--clients", "5", "--json", *words)
    assert ran.exit_code == 0
    assert "".join(line for line in ran.stderr.splitlines(True) if not line.startswith("run: ")) == said


def test_another_manifest_is_not_written_over_unless_it_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = ("scenario", "build", "--clients", "5", "--out", "m")
    done(*command)
    first = Path("m").read_bytes()
    done(*command)  # the same bytes
    assert "m is there, and another file than this manifest: take another --out, or say --replace" in refused(
        *command, "--draw", "1"
    )
    assert Path("m").read_bytes() == first
    done(*command, "--draw", "1", "--replace")
    assert Path("m").read_bytes() != first


def test_diff_says_why_numbers_cannot_be_compared(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def built(name, *words):
        done("scenario", "build", "--clients", "5", "--out", name, *words)

    built("a")
    built("draw", "--draw", "1")
    built("alpha", "--alpha", "3")
    built("excluded", "--noise-set", "include_true=false")
    built("held", "--holdout", "0.2")
    reasons = {name: done("scenario", "diff", "a", name) for name in ("draw", "alpha", "excluded", "held")}
    assert "not comparable: they are two draws of one law" in reasons["draw"]
    assert "not comparable: the clients hold other samples" in reasons["alpha"]
    assert "not comparable: both say tau=0.7, and " in reasons["excluded"]
    assert "not comparable: one trains on 1438 samples and the other on 11" in reasons["held"]
    assert done("scenario", "diff", "a", "a") == "the same scenario\n"
    for name in ("fedcorr", "fedcorr-legacy"):  # which differ from a hundred classes on
        built(name, "--noise", name)
    renamed = done("scenario", "diff", "fedcorr", "fedcorr-legacy").splitlines()
    assert renamed[-1] == "comparable: clients, samples and labels are the same"
    assert all("comparable" not in line for line in renamed[:-1])
