"""FedNoRo against the numbers of its specification, against plain loops over its definitions, and in small runs.

Names with spec_F1 ... spec_F8 are the checkable facts of the method's specification, with the printed numbers.
"""

# ruff: noqa: N802 (the facts are called F1 to F8)

from __future__ import annotations

import dataclasses
import importlib.util
import math
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from stopping import in_sessions, server_state
from threadpoolctl import threadpool_limits

from flnoisebench import records
from flnoisebench.api import Batch, Card, Method, Optimiser, Plan, Protocol, Reply, Upload, average, weights
from flnoisebench.engine import Lane, Look
from flnoisebench.executors import Job, perform
from flnoisebench.testing import Tiny, tiny_arrays, tiny_engine, tiny_run, watch_losses

_spec = importlib.util.spec_from_file_location(
    "fednoro_under_test", Path(__file__).parents[1] / "methods" / "fednoro.py"
)
fn = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = fn  # where pydantic looks up the annotations of Settings
_spec.loader.exec_module(fn)
FedNoRo, Settings = fn.FedNoRo, fn.Settings

f64 = torch.float64
INF = float("inf")


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def _one_thread_of_scikit_learn():
    with threadpool_limits(1):  # its threads wait for each other too
        yield


def close(tensor: torch.Tensor, expected: list, digits: float = 5e-7) -> None:
    torch.testing.assert_close(tensor.detach().double(), torch.tensor(expected, dtype=f64), rtol=0, atol=digits)


# ------------------------------------------------------------------------------------------------- the losses

LOGITS = torch.tensor([[2.0, 1.0, 0.5]], dtype=f64)
TEACHER = torch.tensor([[1.0, 1.0, 0.2]], dtype=f64)
HELD, ABSENT = [60, 30, 10], [70, 30, 0]


def lp_of(counts: list[int], logits: torch.Tensor = LOGITS) -> torch.Tensor:
    return fn.adjusted(logits, fn.log_prior(torch.tensor(counts), 1.0).double())


def test_spec_F1_adjusted_log_probabilities_and_loss():
    lp = lp_of(HELD)
    close(lp[0], [-0.199775, -1.892922, -3.491535])
    for y, (adjusted, plain) in enumerate([(0.199775, 0.464369), (1.892922, 1.464369), (3.491535, 1.964369)]):
        assert F.nll_loss(lp, torch.tensor([y])).item() == pytest.approx(adjusted, abs=5e-7)
        unadjusted = fn.adjusted(LOGITS, fn.log_prior(torch.tensor(HELD), 0.0).double())
        assert F.nll_loss(unadjusted, torch.tensor([y])).item() == pytest.approx(plain, abs=5e-7)


@pytest.mark.parametrize("dtype", [torch.float32, f64])
def test_spec_F2_an_absent_class_has_probability_0_and_no_gradient(dtype):
    logits = LOGITS.to(dtype).requires_grad_()
    lp = lp_of(ABSENT, logits)
    close(lp[0], [-0.146403, -1.993701, -INF])
    (gradient,) = torch.autograd.grad(F.nll_loss(lp, torch.tensor([1])), logits)
    close(gradient[0], [0.863810, -0.863810, 0.0])


def test_spec_F3_teacher_with_temperature_divergence_and_mixed_loss():
    close((TEACHER / 0.8).softmax(1)[0], [0.422319, 0.422319, 0.155362])
    lp, y = lp_of(HELD), torch.tensor([1])
    assert fn.divergence(lp, TEACHER, 0.8).item() == pytest.approx(0.408881, abs=5e-7)
    # without temperature s is [.408275, .408275, .183450]: a teacher at T = 1 must give exactly that s's divergence
    s = torch.tensor([[0.408275, 0.408275, 0.183450]], dtype=f64)
    assert fn.divergence(lp, TEACHER, 1.0).item() == pytest.approx((s * (s.log() - lp)).sum().item(), abs=3e-6)
    assert fn.mixed(lp, y, TEACHER, 0.4, 0.8).item() == pytest.approx(1.299306, abs=5e-7)
    assert fn.mixed(lp, y, TEACHER, 0.8, 0.8).item() == pytest.approx(0.705690, abs=5e-7)


@pytest.mark.parametrize("dtype", [torch.float32, f64])
def test_spec_F4_an_absent_class_adds_a_constant_and_the_sum_may_be_negative(dtype):
    logits = LOGITS.to(dtype).requires_grad_()
    lp = lp_of(ABSENT, logits)
    s2 = (TEACHER / 0.8).softmax(1)[0, 2]
    assert (s2 * s2.log()).item() == pytest.approx(-0.289284, abs=5e-7)
    assert fn.divergence(lp, TEACHER, 0.8).item() == pytest.approx(-0.113551, abs=5e-7)
    total = fn.mixed(lp, torch.tensor([1]), TEACHER, 0.4, 0.8)
    assert total.item() == pytest.approx(1.150800, abs=5e-7)
    (gradient,) = torch.autograd.grad(total, logits)
    close(gradient[0], [0.641201, -0.641201, 0.0])


def test_spec_F5_the_divergence_is_a_mean_over_the_batch_and_not_over_its_entries():
    logits = torch.tensor([[2, 1, 0.5], [0, 1, 2]], dtype=f64)
    teacher = torch.tensor([[1, 1, 0.2], [0, 0, 3]], dtype=f64)
    lp, y = lp_of(HELD, logits), torch.tensor([1, 2])
    assert fn.divergence(lp, teacher, 0.8).item() == pytest.approx(0.633507, abs=5e-7)
    assert fn.divergence(lp, teacher, 0.8).item() / 3 == pytest.approx(0.211169, abs=5e-7)  # elementwise: wrong
    assert F.nll_loss(lp, y).item() == pytest.approx(1.481508, abs=5e-7)
    assert fn.mixed(lp, y, teacher, 0.4, 0.8).item() == pytest.approx(1.142307, abs=5e-7)


def test_gradients_stay_finite_with_extreme_logits_and_a_single_class():
    logits = torch.tensor([[80.0, -80.0, 0.0], [-1e4, 1e4, 0.0]], requires_grad=True)
    teacher = torch.tensor([[-90.0, 90.0, 0.0], [1e4, -1e4, 0.0]])
    for counts in ([5, 5, 0], [0, 10, 0], [3, 3, 4]):
        lp = fn.adjusted(logits, fn.log_prior(torch.tensor(counts), 1.0))
        loss = fn.mixed(lp, torch.tensor([1, 1]), teacher, torch.tensor(0.5), torch.tensor(0.8))
        (gradient,) = torch.autograd.grad(loss, logits)
        assert loss.isfinite()
        assert gradient.isfinite().all()
        if counts == [0, 10, 0]:  # one class only: probability 1 whatever the network says, so nothing to learn
            assert gradient.abs().max() == 0


def test_a_client_without_samples_has_a_prior_without_nan():
    assert not fn.log_prior(torch.zeros(3, dtype=torch.int64), 1.0).isnan().any()


def test_adjustment_multiplies_the_log_prior():
    half = fn.log_prior(torch.tensor(ABSENT), 0.5)
    close(half, [0.5 * math.log(0.7), 0.5 * math.log(0.3), -INF])


class Fixed(torch.nn.Module):
    """Scores that are a parameter, whatever the image."""

    def __init__(self, scores: torch.Tensor) -> None:
        super().__init__()
        self.scores = torch.nn.Parameter(scores.float())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scores


@pytest.mark.parametrize("counts", [HELD, ABSENT])
def test_the_students_scores_are_adjusted_and_not_the_teachers(counts):
    given = {"log_prior": fn.log_prior(torch.tensor(counts), 1.0)}
    given |= {"ramp": torch.tensor(0.4, dtype=f64), "temperature": torch.tensor(0.8, dtype=f64)}
    zero, student, teacher = torch.tensor(0), Fixed(LOGITS), Fixed(TEACHER).requires_grad_(False)
    y, x = torch.tensor([1]), torch.zeros(1, 1)
    batch = Batch((x,), y, torch.arange(1), zero, zero, given=given, frozen={"teacher": teacher})
    loss = fn.distilled_loss(student, batch)
    loss.backward()
    wanted, gradient = (1.299306, None) if counts is HELD else (1.150800, [0.641201, -0.641201, 0.0])  # F3 and F4
    assert loss.item() == pytest.approx(wanted, abs=2e-6)
    if gradient:
        close(student.scores.grad[0], gradient, 2e-6)


# --------------------------------------------------------------------------------------- ramp and schedule


@pytest.mark.parametrize(
    ("end", "values"),
    [
        (49, {10: 0.005390, 20: 0.050400, 30: 0.244177, 49: 0.8, 60: 0.8}),
        (249, {10: 0.005390, 20: 0.008119, 49: 0.024126, 100: 0.114581, 130: 0.231609, 249: 0.8, 499: 0.8}),
    ],
)
def test_spec_F6_ramp(end, values):
    for round, expected in values.items():
        assert fn.ramp(round, 10, end, 0.8) == pytest.approx(expected, abs=5e-7)


def test_defaults_are_the_specification_s():
    wanted = Settings(
        warm_up=10, warm_up_most=0.2, votes=9, score_view="plain", adjustment=1.0, kd_weight=0.8, kd_temperature=0.8,
        ramp_end=0.498, distance="per_tensor_sum",
    )  # fmt: skip
    assert Settings().model_dump() == wanted.model_dump()
    assert wanted.model_fields_set == set(Settings.model_fields)  # none is left to its own default


def test_schedule_is_ten_rounds_and_half_the_run_and_fits_short_runs():
    found = {rounds: Settings().schedule(rounds) for rounds in (1, 2, 3, 5, 10, 20, 50, 100, 500)}
    assert found == {
        1: (1, 2), 2: (1, 2), 3: (1, 2), 5: (1, 2), 10: (2, 5), 20: (4, 10), 50: (10, 25), 100: (10, 50),
        500: (10, 249),
    }  # fmt: skip
    assert Settings(warm_up=0.1).schedule(500) == (50, 249)
    assert Settings(warm_up=40, warm_up_most=30).schedule(500) == (30, 249)
    assert Settings(ramp_end=49).schedule(500) == (10, 49)
    assert Settings(ramp_end=1.0).schedule(120) == (10, 120)
    assert fn.ramp(1, 1, 2, 0.8) == pytest.approx(0.8 * math.exp(-5))  # the shortest ramp starts low as any other
    assert fn.ramp(2, 1, 2, 0.8) == 0.8


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ({"warm_up": 0}, "untrained"),
        ({"warm_up": 0.0}, "untrained"),
        ({"warm_up_most": 0}, "untrained"),
        ({"warm_up": 1.5}, "more than the whole run"),
        ({"ramp_end": 1.5}, "more than the whole run"),
        ({"ramp_end": 10}, "not after warm_up=10"),
        ({"warm_up": 0.6}, "not after warm_up=0.6"),
        ({"kd_weight": 1.1}, "less than or equal to 1"),
        ({"kd_temperature": 0}, "greater than 0"),
        ({"votes": 0}, "greater than or equal to 1"),
    ],
)
def test_settings_that_make_no_schedule_are_refused(bad, why):
    with pytest.raises(ValueError, match=why):
        Settings(**bad)


def test_presets_are_valid_list_only_what_differs_and_keep_the_number_of_images():
    defaults, rounds = Settings().model_dump(), {"cifar10": 500, "cifar100": 500, "clothing1m": 50, "digits": 100}
    assert next(iter(FedNoRo.presets)) == "default"
    for preset in FedNoRo.presets.values():
        for dataset, shipped in {**rounds, "fashion-mnist": 50}.items():
            settings, protocol = preset.on(dataset)
            chosen = Settings(**settings).model_dump()
            assert all(chosen[name] != defaults[name] for name in settings)
            assert all(b > a for a, b in [Settings(**settings).schedule(shipped)])
            own = Protocol(**{**Protocol().model_dump(), **protocol})
            assert own.rounds * own.local_epochs == shipped
            assert own.optimiser == Optimiser(name="adam", lr=3e-4, momentum=0.9, weight_decay=5e-4)
            assert (own.batch, own.local_epochs) == (16, 5)
    assert Settings(**FedNoRo.presets["code-literal"].on("cifar10")[0]).schedule(100) == (10, 49)
    assert Settings(**FedNoRo.presets["code-shares"].on("cifar10")[0]).schedule(500) == (50, 249)
    on_digits = {name: Settings(**preset.on("digits")[0]).adjustment for name, preset in FedNoRo.presets.items()}
    untuned = {"code-literal": 1.0, "code-shares": 1.0, "no-adjustment": 0.0}
    assert on_digits == {name: untuned.get(name, 0.5) for name in FedNoRo.presets}


# --------------------------------------------------------------------------------------------- who is noisy

NAN = float("nan")
MEANS = np.array(
    [[0.4, 0.5, NAN], [0.6, 0.4, 0.3], [1.6, 1.4, 1.2], [0.5, 0.6, 0.4], [1.5, NAN, 1.3], [0.45, 0.55, 0.35]]
)
SCALED = [[0, 0.1, 0], [0.166667, 0, 0], [1, 1, 0.9], [0.083333, 0.2, 0.1], [0.916667, 0, 1], [0.041667, 0.15, 0.05]]


def test_spec_F7_missing_classes_are_the_least_and_classes_are_scaled_to_1():
    # fills are .3 in the last column and .4 in the middle one: both scaled to 0
    np.testing.assert_allclose(fn.scaled(MEANS), SCALED, rtol=0, atol=5e-7)
    filled = MEANS.copy()
    filled[0, 2], filled[4, 1] = 0.3, 0.4
    np.testing.assert_array_equal(fn.scaled(filled), fn.scaled(MEANS))


def test_spec_F7_all_nine_mixtures_find_clients_2_and_4():
    metric = fn.scaled(MEANS)
    assert [fn.noisy_by_mixture(metric, seed) for seed in range(9)] == [(2, 4)] * 9
    assert fn.split(metric, 9) == fn.Split((2, 4), 9, 1, None)


def test_a_constant_class_is_0_and_a_class_that_nobody_holds_is_left_out():
    means = np.array([[0.5, NAN, 2.0, NAN], [0.5, NAN, 1.0, 7.0], [0.5, NAN, 4.0, NAN]])  # the last has one holder
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # numpy's for 0/0 and for a column of NaN
        found = fn.scaled(means)
    np.testing.assert_allclose(found, [[0, 1 / 3, 0], [0, 0, 0], [0, 1, 0]])
    assert fn.scaled(np.full((3, 2), NAN)).shape == (3, 0)


def test_the_noisy_side_is_the_one_whose_means_sum_to_more_though_another_has_the_largest():
    metric = np.array(
        [[1, 0, 0], [0.98, 0.02, 0], [0.96, 0, 0.01], [0.6, 0.6, 0.62], [0.58, 0.6, 0.6], [0.6, 0.61, 0.6]]
    )
    assert fn.noisy_by_mixture(metric, 0) == (3, 4, 5)


def test_the_votes_are_of_seeds_from_0_on(monkeypatch):
    seeds = []
    monkeypatch.setattr(fn, "noisy_by_mixture", lambda metric, seed: seeds.append(seed) or (0,))
    fn.split(fn.scaled(MEANS), 9)
    assert seeds == list(range(9))


def test_the_server_divides_sums_by_counts_also_of_one_sample_and_starts_the_ramp():
    method = FedNoRo()
    lane = Lane(tiny_engine(method, clients=6, rounds=10))  # s1 = 2, e = 5
    counts = np.array([[1, 4, 0], [2, 1, 3], [5, 5, 5], [1, 1, 1], [4, 0, 2], [9, 2, 1]])
    uploads = [
        Upload(m, 10, {"loss_sums": torch.from_numpy(np.nan_to_num(MEANS[m]) * c), "counts": torch.from_numpy(c)})
        for m, c in enumerate(counts)
    ]
    server = lane.server(2, 0, "aggregate")
    state = method.aggregate({"weights": {}, "noisy": None}, uploads, server)
    assert state["noisy"] == server.noisy_clients == [2, 4]
    np.testing.assert_allclose(server.notes["metric"], SCALED, rtol=0, atol=6e-5)
    for round, expected in ((2, 0.8 * math.exp(-5)), (3, fn.ramp(3, 2, 5, 0.8)), (5, 0.8), (9, 0.8)):
        plan = method.plan(state, lane.server(round, 1, "plan"))
        assert plan.message["ramp"] == pytest.approx(expected)
        assert [plan.private[m]["noisy"] for m in range(6)] == [m in (2, 4) for m in range(6)]


def test_clients_are_told_apart_in_round_s1_and_not_before():
    method = FedNoRo()
    lane, state = Lane(tiny_engine(method, rounds=10)), {"weights": {}, "noisy": None}
    tasks = [method.plan(state, lane.server(round, 0, "plan")).task for round in range(4)]
    assert tasks == ["train", "train", "score", "score"]


def test_majority_is_of_whole_sets_and_the_earliest_of_equals():
    a, b, c = (1, 2), (1,), (2, 3)
    assert fn.majority([a, b, b, c], 5) == fn.Split(b, 2, 3, None)
    assert fn.majority([c, a, b, a, c], 5) == fn.Split(c, 2, 3, None)
    assert fn.majority([b, a, c], 5) == fn.Split(b, 1, 3, None)


@pytest.mark.parametrize("one_side", [(), (0, 1, 2)])
def test_mixtures_that_leave_all_on_one_side_find_nobody(one_side):
    found = fn.majority([one_side, one_side, (1,)], 3)
    assert (found.noisy, found.votes, found.sets) == ((), 2, 2)
    assert "one side" in found.undecided


def test_split_cannot_decide_about_one_client_or_about_equal_ones():
    assert "one client" in fn.split(np.zeros((1, 3)), 9).undecided
    assert "same losses" in fn.split(np.zeros((4, 3)), 9).undecided
    assert "same losses" in fn.split(np.zeros((4, 0)), 9).undecided
    assert fn.split(np.array([[0.0, 0.1], [1.0, 0.9]]), 9).noisy == (1,)  # two are enough


def test_split_finds_shifted_clients_also_with_more_classes_than_clients():
    """The specification's pitfall 5: twenty clients, eight shifted by 1, sd .15.  Sets, not numbers: the mixture's
    last digits hang on the version of scikit-learn."""
    rng = np.random.default_rng(0)
    for classes in (10, 100):
        means = rng.normal(0, 0.15, (20, classes))
        means[[1, 3, 5, 7, 11, 13, 17, 19]] += 1.0
        found = fn.split(fn.scaled(means), 9)
        assert (found.noisy, found.votes) == ((1, 3, 5, 7, 11, 13, 17, 19), 9)


# ---------------------------------------------------------------------------------------------- aggregation


def test_spec_F8_weights_of_the_clients():
    factors = fn.discounts([0, 0, 2, 4])
    alpha = np.array([100, 200, 300, 400]) * factors
    np.testing.assert_allclose(alpha / alpha.sum(), [0.158954, 0.317909, 0.289232, 0.233904], rtol=0, atol=5e-7)
    assert factors[3] == pytest.approx(math.exp(-1))  # the farthest, however far it is


def test_spec_F8_distance_of_two_models():
    one = {"a": torch.zeros(2), "b": torch.zeros(1, 1)}
    two = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([[12.0]])}
    assert fn.nearest([one], [two], "per_tensor_sum") == [17.0]
    assert fn.nearest([one], [two], "global_norm") == [13.0]


def some_weights(seed: int) -> dict[str, torch.Tensor]:
    network = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.Linear(4, 2))
    g = torch.Generator().manual_seed(seed)
    state = {name: value.clone() for name, value in network.state_dict().items()}
    for value in state.values():
        value.copy_(torch.randint(1, 1000, value.shape, generator=g) if value.dtype == torch.int64 else value)
        if value.is_floating_point():
            value.copy_(torch.randn(value.shape, generator=g))
    state["0.weight"] = state["0.weight"].contiguous(memory_format=torch.channels_last)
    state["scale"] = torch.randn((), generator=g)  # a tensor without dimensions
    return state


@pytest.mark.parametrize("form", ["per_tensor_sum", "global_norm"])
def test_distance_to_the_nearest_clean_client_equals_a_plain_loop_and_skips_integer_buffers(form):
    noisy, clean = [some_weights(0), some_weights(1)], [some_weights(seed) for seed in (2, 3, 4)]
    wanted = []
    for mine in noisy:
        norms = [[(mine[n] - w[n]).double().norm().item() for n in w if "num_batches" not in n] for w in clean]
        wanted.append(min(sum(n) if form == "per_tensor_sum" else math.hypot(*n) for n in norms))
    assert fn.nearest(noisy, clean, form) == pytest.approx(wanted, rel=1e-7)
    assert "1.num_batches_tracked" in clean[0]


def test_equal_weights_have_no_distance_and_all_count_in_full():
    w = some_weights(0)
    assert fn.nearest([w, w], [some_weights(1), w], "per_tensor_sum") == [0.0, 0.0]
    assert fn.discounts([0.0, 0.0, 0.0]) == [1.0, 1.0, 1.0]


def aggregated(noisy: list[int], cohort: list[int], **settings):
    """(weights after an aggregation of some_weights(client) with 10 (client + 1) samples each, the notes)."""
    method = FedNoRo(Settings(**settings))
    server = Lane(tiny_engine(method, clients=6)).server(2, 0, "aggregate")
    uploads = [Upload(m, 10 * (m + 1), some_weights(m)) for m in cohort]
    new = method.aggregate({"weights": some_weights(9), "noisy": noisy}, uploads, server)
    assert new["noisy"] == noisy
    return new["weights"], server.notes


def equal(one, two) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize(
    ("noisy", "cohort", "settings"),
    [
        ([], [0, 1, 2], {}),
        ([0, 1, 2, 3], [0, 1, 2], {}),
        ([4], [0, 1, 2], {}),
        ([1], [0, 1, 2], {"distance": "sizes"}),
    ],
    ids=["nobody noisy", "cohort all noisy", "cohort all clean", "distance by sizes"],
)
def test_aggregation_falls_back_to_sizes(noisy, cohort, settings):
    found, notes = aggregated(noisy, cohort, **settings)
    assert equal(found, average([some_weights(m) for m in cohort], [10 * (m + 1) for m in cohort]))
    assert notes["plain_average"]
    assert "discount" not in notes


def test_aggregation_weighs_by_size_and_distance_within_the_cohort():
    found, notes = aggregated([1, 3, 5], [0, 1, 2, 3])  # client 5 is noisy and not there
    clean = [some_weights(0), some_weights(2)]
    one, three = fn.nearest([some_weights(1), some_weights(3)], clean, "per_tensor_sum")
    factors = [1.0, math.exp(-one / max(one, three)), 1.0, math.exp(-three / max(one, three))]
    assert notes["discount"] == pytest.approx(factors)
    shares = [10 * (m + 1) * factor for m, factor in enumerate(factors)]
    wanted = average([some_weights(m) for m in range(4)], shares)
    assert equal(found, wanted)
    other, _ = aggregated([1, 3, 5], [0, 1, 2, 3], distance="global_norm")
    assert not equal(found, other)


def test_discounts_go_by_client_and_not_by_place_in_the_cohort():
    _, notes = aggregated([1, 4], [1, 3, 4, 5])
    assert [factor < 1 for factor in notes["discount"]] == [True, False, True, False]


# ------------------------------------------------------------------------------------------- whole federations

NOISY = [1, 4]


def two_noisy(scene, truth):
    """Clients 1 and 4 have every label wrong, the others none."""
    given = truth.true.copy()
    wrong = np.isin(scene.owner, NOISY)
    given[wrong] = (given[wrong] + 1) % scene.classes
    noisy = np.isin(np.arange(6), NOISY)
    return dataclasses.replace(scene, given=given), dataclasses.replace(truth, noisy=noisy)


WORLD = {"clients": 6, "noise": 0.0, "change": two_noisy, "rounds": 4, "settings": {"warm_up": 2, "warm_up_most": 2}}


def world(out, method=FedNoRo, **changes):
    """A finished run: (result, records, the server's last state)."""
    settings = {**WORLD["settings"], **changes.pop("settings", {})} if method is not Reference else {}
    run = tiny_run(method, out, **{**WORLD, "arrays": tiny_arrays(samples=96), **changes, "settings": settings})
    result = run.execute()
    return result, records.load_records(run.folder), server_state(run)


class Reference(Method):
    """FedAvg under the adjusted loss, written on its own.  Round 2 has an idle exchange first, so that the random
    streams, which are named by exchange, are those of a run with an identification there."""

    card = Card(title="FedAvg with logit adjustment", paper="a reference of the tests", year=2025)

    def init(self, server):
        return {"weights": weights(server.model()), "idle": False}

    def plan(self, state, server):
        if server.round == 2 and not state["idle"]:
            return Plan("idle", range(server.clients), closes_round=False)
        return Plan("train", server.cohort(), state["weights"])

    def client(self, task, message, client):
        if task == "idle":
            return Reply()
        network = client.model(message)
        counts = torch.bincount(client.labels, minlength=client.classes)
        fit = client.fit(network, reference_loss, given={"log_share": (counts.double() / client.size).log().float()})
        return Reply(weights(network), metrics={"loss": fit.loss})

    def aggregate(self, state, uploads, server):
        if server.round == 2 and not state["idle"]:
            return {**state, "idle": True}
        return {**state, "weights": average([u.content for u in uploads], [u.size for u in uploads])}

    def predictors(self, state, server):
        return {"main": server.model(state["weights"], frozen=True)}


def reference_loss(network, batch):
    return F.cross_entropy(network(batch.x) + batch.given["log_share"], batch.y)


class NobodyNoisy(FedNoRo):
    """As if the mixtures had found nobody."""

    def _identify(self, uploads, server):
        return []


class Normed(FedNoRo):
    """With BatchNorm, whose statistics are averaged and whose step counter is no number to average."""

    def network(self, encoder):
        return torch.nn.Sequential(
            encoder, torch.nn.BatchNorm1d(encoder.width), torch.nn.Linear(encoder.width, encoder.classes)
        )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    torch.set_num_threads(1)
    return world(tmp_path_factory.mktemp("undisturbed"))


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    torch.set_num_threads(1)
    return world(tmp_path_factory.mktemp("reference"), Reference)[2]


def test_a_run_tells_noisy_clients_from_clean_ones_once_and_learns(undisturbed):
    result, rounds, state = undisturbed
    assert result.status == "complete"
    assert [record.exchanges for record in rounds] == [1, 1, 2, 1]
    assert state["noisy"] == NOISY
    at = rounds[2]
    assert (at.notes["noisy"], at.notes["votes"], at.notes["of"], at.notes["sets"]) == (NOISY, 9, 9, 1)
    assert (np.shape(at.notes["metric"]), np.min(at.notes["metric"]), np.max(at.notes["metric"])) == ((6, 3), 0, 1)
    assert "undecided" not in at.notes
    assert "noisy" not in rounds[1].notes
    assert "noisy" not in rounds[3].notes
    assert rounds[1].diagnostics == {}
    assert rounds[3].diagnostics == {"noisy_clients": 2.0}
    assert [record.judged.get("clients_recall") for record in rounds[1:3]] == [None, pytest.approx(100)]
    assert rounds[3].judged["clients_precision"] == pytest.approx(100)
    assert result.accuracy.final > 90  # a third of the labels is wrong


def test_the_ramp_and_the_discounts_are_noted_and_only_noisy_clients_are_discounted(undisturbed):
    _, rounds, _ = undisturbed
    for record in rounds[2:]:
        assert record.notes["ramp"] == pytest.approx(fn.ramp(record.round, 2, 3, 0.8))
        discount = record.notes["discount"]
        assert [discount[m] for m in (0, 2, 3, 5)] == [1.0] * 4
        assert min(discount[m] for m in NOISY) == pytest.approx(math.exp(-1))
        assert all(math.exp(-1) <= discount[m] < 1 for m in NOISY)


def test_images_passed_are_the_identification_and_the_teachers_of_noisy_clients(undisturbed):
    _, rounds, _ = undisturbed
    evaluated = 30
    assert [record.images["passed"] - evaluated for record in rounds] == [0, 0, 96 + 32, 32]
    assert {record.images["trained"] for record in rounds} == {96}


def test_both_losses_can_be_recorded_and_replayed(undisturbed, tmp_path):
    with watch_losses() as seen:
        result, _, _ = world(tmp_path)
    assert min(seen["adjusted_loss"], seen["distilled_loss"]) >= 5
    assert result.digest == undisturbed[0].digest


def test_stopped_after_any_commit_it_resumes_to_the_same_digest(undisturbed, tmp_path):
    (result, _, _), stops = in_sessions(lambda: world(tmp_path))
    assert stops == 1 + 5  # four rounds, of which one has two exchanges
    assert result.digest == undisturbed[0].digest


def test_lanes_on_two_devices_give_the_same_digest(undisturbed, tmp_path):
    result, _, _ = world(tmp_path, executor="threads", lanes=3, beside=[torch.device("cpu", 0)])
    assert result.digest == undisturbed[0].digest


@pytest.mark.parametrize(
    ("method", "settings"),
    [(NobodyNoisy, {"kd_weight": 0.0}), (NobodyNoisy, {}), (FedNoRo, {"kd_weight": 0.0, "distance": "sizes"})],
    ids=["nobody noisy, no teacher", "nobody noisy", "noisy clients without teacher and distance"],
)
def test_without_teacher_and_without_noisy_clients_it_is_fedavg_under_the_adjusted_loss(
    method, settings, reference, tmp_path
):
    _, _, found = world(tmp_path, method, settings=settings)
    for name, value in reference["weights"].items():
        torch.testing.assert_close(found["weights"][name], value, rtol=0, atol=1e-6, msg=name)


def test_noisy_clients_and_the_reference_differ(undisturbed, reference):
    gap = max((undisturbed[2]["weights"][name] - value).abs().max() for name, value in reference["weights"].items())
    assert gap > 1e-3


@pytest.mark.parametrize(
    "settings",
    [
        {"warm_up": 1},
        {"warm_up_most": 1},
        {"adjustment": 0.0},
        {"adjustment": 2.0},
        {"kd_weight": 0.0},
        {"kd_weight": 0.4},
        {"kd_temperature": 2.0},
        {"ramp_end": 5},
        {"distance": "global_norm"},
        {"distance": "sizes"},
    ],
    ids=lambda settings: "-".join(f"{name}-{value}" for name, value in settings.items()),
)
def test_each_setting_changes_the_weights(settings, undisturbed, tmp_path):
    _, _, state = world(tmp_path, settings=settings)
    assert not equal(state["weights"], undisturbed[2]["weights"])


def test_votes_are_so_many_mixtures(undisturbed, tmp_path):
    _, rounds, _ = world(tmp_path, settings={"votes": 3})
    assert (rounds[2].notes["votes"], rounds[2].notes["of"]) == (3, 3)


def test_score_view_chooses_plain_or_augmented_images():
    look = Look(Tiny.mean, Tiny.std, crop_padding=3)
    plain, again, train = (
        ask(FedNoRo(Settings(score_view=view)), 0, look=some)
        for view, some in (("plain", look), ("plain", None), ("train", look))
    )
    assert torch.equal(plain.upload["loss_sums"], again.upload["loss_sums"])  # not augmented at all
    assert not torch.equal(plain.upload["loss_sums"], train.upload["loss_sums"])
    assert torch.equal(plain.upload["counts"], train.upload["counts"])


def ask(method, client, *, round=1, **engine):
    """A client's reply to the identification, from the method's first weights."""
    lane = Lane(tiny_engine(method, **engine))
    start = method.init(lane.server(0, 0, "init"))
    return perform(lane, Job(client, "score", {"weights": start["weights"]}, None, False, round, 0)).reply


def test_the_score_is_the_plain_cross_entropy_by_given_class_of_plain_images():
    method, given = FedNoRo(), torch.arange(72) % 2  # nobody holds class 2
    upload = ask(method, 1, given=given).upload
    lane = Lane(tiny_engine(method, given=given))
    side = lane.client(1, None, 1, 0)
    network = side.model(method.init(lane.server(0, 0, "init"))["weights"], frozen=True)
    images = (tiny_arrays().train_images[1::3].double() / 255 - 0.5).float() / 0.25
    losses = F.cross_entropy(network(images), side.labels, reduction="none").double()
    assert upload["counts"].tolist() == [torch.sum(side.labels == c).item() for c in range(3)]
    assert upload["counts"].tolist() == [12, 12, 0]
    wanted = [losses[side.labels == c].sum().item() for c in range(3)]
    assert upload["loss_sums"].tolist() == pytest.approx(wanted, abs=1e-4)
    assert upload["loss_sums"].dtype == f64


def test_under_partial_participation_everybody_is_asked_and_a_cohort_of_one_kind_is_averaged_by_sizes(tmp_path):
    _, rounds, state = world(tmp_path, participation=0.4, rounds=12)
    assert [record.exchanges for record in rounds] == [1, 1, 2, *[1] * 9]
    assert np.shape(rounds[2].notes["metric"]) == (6, 3)  # all six, of whom two a round train
    assert state["noisy"] == rounds[2].notes["noisy"]
    assert rounds[2].images["passed"] >= 96
    plain = [record.notes["plain_average"] for record in rounds[2:]]
    assert {True, False} == set(plain)
    assert all(("discount" in record.notes) != record.notes["plain_average"] for record in rounds[2:])


def test_clients_with_missing_classes_and_short_batches_run(tmp_path):
    law = {"law": "dirichlet", "alpha": 0.1}
    result, rounds, _ = world(tmp_path, change=None, noise=0.3, partition=law)
    assert result.status == "complete"
    assert np.isfinite(rounds[2].notes["metric"]).all()


def exchanged(method, positions, given=None, rounds=4):
    """A federation over these samples, driven by hand: (server state, notes)."""
    engine = tiny_engine(method, clients=len(positions), positions=positions, given=given, rounds=rounds)
    lane = Lane(engine)
    state, notes = method.init(lane.server(0, 0, "init")), {}
    states: dict[int, object] = {}
    for round in range(rounds):
        exchange, closed = 0, False
        while not closed:
            plan = method.plan(state, lane.server(round, exchange, "plan"))
            uploads = []
            for m in plan.cohort:
                message = {**plan.message, **plan.private.get(m, {})}
                outcome = perform(lane, Job(m, plan.task, message, states.get(m), m in states, round, exchange))
                states[m] = outcome.state
                uploads.append(Upload(m, len(positions[m]), outcome.reply.upload))
            server = lane.server(round, exchange, "aggregate")
            state = method.aggregate(state, uploads, server)
            notes |= server.notes
            closed, exchange = plan.closes_round, exchange + 1
    return state, notes


def test_a_client_of_one_sample_and_one_of_one_class_run_and_learn_nothing_of_their_own():
    positions = [[0], [3, 6, 9, 12, 15, 18, 21, 24, 27], list(range(30, 50)), list(range(50, 72))]
    state, notes = exchanged(FedNoRo(), positions)
    assert all(value.isfinite().all() for value in state["weights"].values())
    assert np.isfinite(notes["metric"]).all()
    lane = Lane(tiny_engine(FedNoRo(), clients=4, positions=positions))
    for m in (0, 1):
        for message in ({}, {"noisy": True, "ramp": 0.5}):
            start = FedNoRo().init(lane.server(0, 0, "init"))["weights"]
            job = Job(m, "train", {"weights": start, **message}, None, False, 0, 0)
            assert equal(perform(lane, job).reply.upload, start)  # their one class has probability 1


@pytest.mark.parametrize(
    ("positions", "why"), [([list(range(20))], "one client"), ([list(range(20))] * 3, "same losses")]
)
def test_who_cannot_be_told_apart_is_held_clean_and_a_note_says_so(positions, why):
    state, notes = exchanged(FedNoRo(), positions)
    assert state["noisy"] == []
    assert why in notes["undecided"]
    assert notes["plain_average"]


def test_batchnorm_statistics_are_averaged_and_counters_are_not(tmp_path):
    result, rounds, state = world(tmp_path, Normed)
    assert result.status == "complete"
    assert "discount" in rounds[-1].notes
    counter = state["weights"]["1.num_batches_tracked"]
    assert counter.dtype == torch.int64
    assert counter.item() == 4 * 2  # rounds times batches of 8 of 16 samples
    assert state["weights"]["1.running_mean"].abs().max() > 0


def test_a_noisy_client_is_pulled_to_its_teacher_and_a_clean_one_is_not():
    lane = Lane(tiny_engine(FedNoRo(), given=torch.arange(72) // 3 % 3))  # all classes on each client
    start = FedNoRo().init(lane.server(0, 0, "init"))["weights"]

    def moved(**message):
        upload = perform(lane, Job(0, "train", {"weights": start, **message}, None, False, 1, 0)).reply.upload
        return sum((upload[name] - start[name]).square().sum() for name in start).sqrt().item()

    def claimed(**message):
        job = Job(0, "train", {"weights": start, **message}, None, False, 1, 0)
        return perform(lane, job).reply.claims.noisy

    assert claimed() is None  # before they are told apart
    assert claimed(noisy=False, ramp=0.5) is False
    assert claimed(noisy=True, ramp=0.5) is True
    free = moved()
    assert free > 0.01
    assert moved(noisy=False, ramp=1.0) == free
    assert moved(noisy=True, ramp=0.0) == pytest.approx(free, rel=1e-5)
    assert moved(noisy=True, ramp=0.99) < 0.7 * free
