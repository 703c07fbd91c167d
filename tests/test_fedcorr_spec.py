"""FedCorr against numbers worked out by hand, and its stages in small federations.

Names with spec_F1 ... spec_F10 are the checkable facts of the method's specification (F10: its float floor).
"""

# ruff: noqa: N802 (the facts are called F1 to F10)

from __future__ import annotations

import dataclasses
import importlib.util
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from flnoisebench_methods.fedavg import FedAvg
from stopping import in_sessions, server_state

from flnoisebench import records
from flnoisebench.api import Batch, Plan, Rounds, Server, Upload, cross_entropy, weights
from flnoisebench.engine import Lane, Look, images_of
from flnoisebench.executors import Job, Outcome, perform
from flnoisebench.settings import resolve
from flnoisebench.testing import Tiny, capture_safe, tiny_engine, tiny_run, watch_losses

_path = Path(__file__).parents[1] / "methods" / "fedcorr.py"
_spec = importlib.util.spec_from_file_location("fedcorr_under_test", _path)
fc = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = fc  # where pydantic looks up the annotations of Settings
_spec.loader.exec_module(fc)
FedCorr, Settings = fc.FedCorr, fc.Settings

f64 = torch.float64


pytestmark = pytest.mark.usefixtures("one_thread")


def made(**settings: Any) -> FedCorr:
    return FedCorr(Settings(**settings))


# --------------------------------------------------------------------------------- intrinsic dimension


@pytest.mark.parametrize(
    ("r", "expected"), [([0.1, 0.2, 0.4], 1.442691), ([0.0, 0.1, 0.2], 0.0), ([0.1] * 20, 100503.0176)]
)
def test_spec_F1_dimension_of_one_sample(r, expected):
    assert fc.dimension(torch.tensor(r, dtype=f64)).item() == pytest.approx(expected, abs=5e-7, rel=1e-9)


def test_spec_F1_without_eps(monkeypatch):
    monkeypatch.setattr(fc, "EPS", 0.0)
    assert fc.dimension(torch.tensor([0.1, 0.2, 0.4], dtype=f64)).item() == pytest.approx(1.442695, abs=5e-7)


FIVE = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.6, 0.4], [0.3, 0.7], [0.1, 0.9]], dtype=f64)


@pytest.mark.parametrize(
    ("k", "each", "mean"),
    [
        (2, [1.820472, 2.885365, 4.932562, 4.932562, 2.182709], 3.350734),
        (4, [1.194759, 1.131494, 2.064040, 2.026255, 2.010220], 1.685354),
    ],
)
def test_spec_F2_dimension_of_a_client(k, each, mean):
    found = fc.dimensions(FIVE, k)
    assert found.tolist() == pytest.approx(each, abs=5e-7)
    assert found.mean().item() == pytest.approx(mean, abs=5e-7)


def test_spec_F2_with_fewer_others_than_k_the_numerator_is_their_number_too():
    found = fc.dimensions(FIVE, 20).mean().item()
    assert found == pytest.approx(1.685354, abs=5e-7)  # as at k = 4
    assert found * 20 / 4 == pytest.approx(8.426769, abs=5e-7)  # what a numerator of 20 over four distances gives


def test_distances_in_blocks_are_those_in_one_piece_and_a_row_is_at_zero_from_itself(monkeypatch):
    z = 10 * torch.randn(300, 10, generator=torch.Generator().manual_seed(0), dtype=f64)
    p = z.softmax(1)
    whole = fc.dimensions(p, 20)
    by_hand = (p[:, None] - p[None]).square().sum(2).sqrt().sort(1).values[:, 1:21]
    torch.testing.assert_close(whole, fc.dimension(by_hand), rtol=1e-9, atol=0)
    shapes, cdist = [], torch.cdist
    monkeypatch.setattr(fc, "BLOCK", 300 * 7)
    monkeypatch.setattr(torch, "cdist", lambda a, b, **options: shapes.append(len(a)) or cdist(a, b, **options))
    assert torch.equal(fc.dimensions(p, 20), whole)
    assert max(shapes) == 7
    assert sum(shapes) == 300


@pytest.mark.parametrize(("margin", "mean"), [(10, 5.31), (20, 0.23)])
def test_the_dimension_of_confident_predictions(margin, mean):
    """The specification's pitfalls 4 and 6: at 10 distances by matrix product in fp32 give 2.39, at 20 EPS rules."""
    rng = torch.Generator().manual_seed(0)
    z = torch.randn(2500, 10, generator=rng, dtype=f64)
    z[torch.arange(2500), torch.randint(10, (2500,), generator=rng)] += margin
    assert fc.dimensions(z.softmax(1), 20).mean().item() == pytest.approx(mean, rel=0.1)  # their draw is not given


def test_the_dimension_stays_finite_and_not_negative_for_duplicates_equal_distances_and_few_samples():
    corners = torch.eye(4, dtype=f64)  # all distances 2^.5, the largest there is
    for p in (corners, corners[:3], FIVE[[0, 0, 0, 0]], FIVE[[0, 0, 1]], FIVE):
        found = fc.dimensions(p, 20)
        assert found.isfinite().all()
        assert (found >= 0).all()
    assert fc.dimensions(FIVE[[0, 0, 0, 0]], 20).tolist() == [0.0] * 4
    assert fc.dimensions(FIVE[:2], 20) is fc.dimensions(FIVE[:1], 20) is None


# -------------------------------------------------------------------------------- who and what is noisy

LID = [41.2, 39.8, 40.5, 55.1, 57.3, 40.1, 56.0, 39.5]


@pytest.mark.parametrize("seed", [0, 1, 13])
def test_spec_F3_split_of_clients(seed):
    noisy = fc.noisy_clients(LID, seed, 1e-9)
    assert noisy == [3, 4, 6]
    assert np.mean([LID[k] for k in noisy]) == pytest.approx(56.1333, abs=5e-5)
    assert np.mean([LID[k] for k in {*range(8)} - {*noisy}]) == pytest.approx(40.22, abs=5e-5)


def test_spec_F3_equal_dimensions_are_not_split_where_the_code_calls_all_noisy():
    assert fc.noisy_clients([40.0] * 6, 0, 1e-9) is None
    with pytest.warns(UserWarning, match="distinct clusters"):  # scikit-learn's own word on it
        assert fc.noisy_clients([40.0] * 6, 0, 0.0) == [0, 1, 2, 3, 4, 5]


def test_spec_F3_nearly_equal_dimensions_are_split_arbitrarily():
    """Which clients depends on scikit-learn's k-means++ draws (1.9.1 here)."""
    lid = [40, 40.1, 39.9, 40.05, 39.95, 40.02, 39.98, 40.0]
    found = {seed: fc.noisy_clients(lid, seed, 1e-9) for seed in (0, 1, 13)}
    assert found == {0: [1, 3], 1: [0, 1, 3, 5, 6, 7], 13: [1, 3]}


def test_a_client_without_a_dimension_is_not_judged_and_moves_nobody():
    assert fc.noisy_clients([None, *LID, None], 0, 1e-9) == [4, 5, 7]
    assert fc.noisy_clients([None, 40.0], 0, 1e-9) is fc.noisy_clients([None, None], 0, 1e-9) is None


def test_spec_F4_losses_that_take_probabilities_for_logits():
    p = torch.tensor([[0.7, 0.2, 0.1]] * 2, dtype=f64)
    y = torch.tensor([0, 2])
    assert fc.sample_losses(p.log(), y, True).tolist() == pytest.approx([0.767950, 1.367950], abs=5e-7)
    assert fc.sample_losses(p.log(), y, False).tolist() == pytest.approx([0.356675, 2.302585], abs=5e-7)


@pytest.mark.parametrize(("C", "least"), [(10, 1.461150), (100, 3.6222)])
def test_spec_F4_bounds(C, least):
    z = torch.zeros(2, C, dtype=f64)
    z[:, 0] = 1e4
    found = fc.sample_losses(z, torch.tensor([0, 1]), True).tolist()
    digits = 5e-7 if C == 10 else 5e-5
    assert found == pytest.approx([least, least + 1], abs=digits)


LOSSES = [1.47, 1.48, 2.41, 1.52, 1.49, 2.40, 2.43, 1.51, 2.38, 1.46]
CONFIDENCE = [0.9, 0.8, 0.30, 0.9, 0.9, 0.60, 0.95, 0.9, 0.85, 0.9]


def confident(confidence: list[float]) -> torch.Tensor:
    """p [n, 4] with argmax 1."""
    c = torch.tensor(confidence, dtype=f64)
    rest = (1 - c) / 3
    return torch.stack([rest, c, rest, rest], 1)


def test_spec_F5_noise_level_and_relabelling():
    found = fc.split(LOSSES, 0, 1e-9)
    assert np.flatnonzero(found.upper).tolist() == [2, 5, 6, 8]
    assert np.flatnonzero(found.lower < 0.5).tolist() == [2, 5, 6, 8]
    level = float(found.upper.mean())
    assert level == 0.4
    among = fc.suspects(torch.tensor(LOSSES, dtype=f64), level, 0.5)
    assert among.nonzero().flatten().tolist() == [2, 6]
    labels = fc.relabel(torch.zeros(10, dtype=torch.int64), confident(CONFIDENCE), 0.5, among)
    assert labels.nonzero().flatten().tolist() == [6]
    assert labels[6] == 1
    # after stage 2 all samples may change
    labels = fc.relabel(torch.zeros(10, dtype=torch.int64), confident(CONFIDENCE), 0.5)
    assert labels.nonzero().flatten().tolist() == [0, 1, 3, 4, 5, 6, 7, 8, 9]


def test_a_confidence_of_exactly_theta_is_not_enough_and_theta_1_relabels_nothing():
    zero = torch.zeros(2, dtype=torch.int64)
    assert fc.relabel(zero, confident([0.5, 0.5000001]), 0.5).tolist() == [0, 1]
    assert fc.relabel(zero, confident([1.0, 1.0]), 1.0).tolist() == [0, 0]


def test_spec_F10_the_number_of_suspects_is_floored_in_floating_point():
    assert 100 * (58 / 100) * 0.5 == 28.999999999999996
    assert fc.suspects(torch.rand(100), 58 / 100, 0.5).sum() == 28
    assert fc.suspects(torch.ones(4), 1.0, 0.5).tolist() == [True, True, False, False]  # of equals the first


# ------------------------------------------------------------------------------------------- the loss


class Point(torch.nn.Module):
    """A network whose scores are its images, with weights on the side."""

    def __init__(self, w: list[float]) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.tensor(w, dtype=f64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def scored(step: int, pull: float = 0.0, **parts: Any) -> Batch:
    given = {"pull": torch.tensor(pull, dtype=f64), "anchor": {"w": torch.tensor([1.0, 2.0], dtype=f64)}}
    x = torch.tensor([[2.0, 0.0, 1.0], [0.0, 3.0, 0.0]])
    y = torch.tensor([0, 2])
    return Batch((x,), y, torch.arange(2), torch.tensor(step), torch.tensor(9), given=given, **parts)


@pytest.mark.parametrize(
    ("name", "w", "value", "gradient"),
    [
        ("near", [1.3, 2.4], 0.75, [0.9, 1.2]),
        ("near_squared", [1.3, 2.4], 0.375, [0.9, 1.2]),  # 2 beta mu (w - w_g): the same at a distance of .5
        ("near", [1.6, 2.8], 1.5, [0.9, 1.2]),  # a pull of constant norm beta mu = 1.5
        ("near_squared", [1.6, 2.8], 1.5, [1.8, 2.4]),
    ],
)
def test_spec_F6_proximal_term(name, w, value, gradient):
    network, batch = Point(w), scored(step=1, pull=5 * 0.3)
    plain = cross_entropy(network, batch).item()
    loss = getattr(fc, name)(network, batch)
    loss.backward()
    assert loss.item() - plain == pytest.approx(value, abs=1e-6)
    assert network.w.grad.tolist() == pytest.approx(gradient)


@pytest.mark.parametrize("name", ["near", "near_squared"])
def test_spec_F6_nothing_in_the_first_batch_of_an_epoch(name):
    network, batch = Point([1.3, 2.4]), scored(step=0, pull=5 * 0.3)
    loss = getattr(fc, name)(network, batch)
    loss.backward()
    assert loss.item() == cross_entropy(network, batch).item()
    assert network.w.grad.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("step", [0, 1])
def test_spec_F9_no_nan_where_the_weights_are_those_received(step):
    bare = torch.tensor([1.0, 2.0], dtype=f64, requires_grad=True)
    (bare - bare.detach()).square().sum().sqrt().backward()
    assert bare.grad.isnan().all()
    network = Point([1.0, 2.0])
    fc.near(network, scored(step, pull=1.5)).backward()
    assert network.w.grad.tolist() == [0.0, 0.0]


def test_the_proximal_norm_is_over_parameters_and_not_over_running_statistics():
    network, batch = torch.nn.BatchNorm1d(3), scored(step=1)
    given = {"pull": torch.tensor(1.5), "anchor": weights(network)}
    start = network.running_var.clone()
    network(batch.x)
    assert not torch.equal(network.running_var, start)
    expected = cross_entropy(network, batch).item()
    for name in ("near", "near_squared"):
        assert getattr(fc, name)(network, dataclasses.replace(batch, given=given)).item() == expected


def test_mixup_mixes_images_and_losses_by_one_weight():
    network = Point([0.0, 0.0])
    keys = torch.tensor([0.9, 0.1, 0.0])  # of a batch of two the order is 1, 0; the third key is of a wider batch
    batch = scored(1, draw={"share": torch.tensor(0.7), "keys": keys})
    x, y = batch.x, batch.y
    z = 0.7 * x + 0.3 * x.flip(0)
    expected = 0.7 * F.cross_entropy(z, y) + 0.3 * F.cross_entropy(z, y.flip(0))
    assert fc.mixed(network, batch).item() == pytest.approx(expected.item())
    whole = scored(1, draw={"share": torch.tensor(1.0), "keys": keys})
    assert fc.mixed(network, whole).item() == cross_entropy(network, whole).item()


@pytest.mark.parametrize("name", ["near", "near_squared"])
def test_a_recorded_step_follows_step_pull_anchor_and_draw(name):
    first = scored(1, 1.5, draw={"share": torch.tensor(0.7), "keys": torch.tensor([0.9, 0.1])})
    second = scored(0, 0.5, draw={"share": torch.tensor(0.2), "keys": torch.tensor([0.1, 0.9])})
    second.given["anchor"]["w"] += 1
    capture_safe(getattr(fc, name), Point([1.3, 2.4]), first, second)
    capture_safe(getattr(fc, name), Point([1.3, 2.4]), second, first)


# ------------------------------------------------------------------------------------------- the server


def server_of(method: FedCorr, *, round: int = 0, exchange: int = 0, role: str = "plan", **options: Any) -> Server:
    return Lane(tiny_engine(method, **options)).server(round, exchange, role)


def state_of(x: list[float], M: int = 3, **changes: Any) -> dict[str, Any]:
    start = {"weights": {"x": torch.tensor(x)}, "lid": [0.0] * M, "seen": [], "noisy": [], "mu": [0.0] * M}
    return {**start, **changes}


def test_spec_F7_average_weighted_by_size():
    method = made(T1=0, T2=0)
    uploads = [Upload(0, 100, {"x": torch.tensor([1.0, 2.0])}), Upload(1, 300, {"x": torch.tensor([3.0, 6.0])})]
    found = method.aggregate(state_of([0.0, 0.0]), uploads, server_of(method, role="aggregate"))
    assert found["weights"]["x"].tolist() == [2.5, 5.0]


def test_spec_F8_the_model_passes_from_client_to_client():
    method, state, passed = made(T1=1), state_of([0.0]), []
    for turn, k in enumerate((2, 0, 1)):
        x = state["weights"]["x"] + k + 1
        uploads = [Upload(k, 10, {"weights": {"x": x}, "lid": float(k)})]
        state = method.aggregate(state, uploads, server_of(method, exchange=turn, role="aggregate"))
        passed.append(state["weights"]["x"].item())
    assert passed == [3, 4, 6]
    assert (state["seen"], state["lid"]) == ([2, 0, 1], [0.0, 1.0, 2.0])


def test_spec_F7_F8_clients_that_train_together_are_averaged_by_size():
    def together(sizes, results):
        method = made(T1=1, together=3)
        uploads = [
            Upload(k, n, {"weights": {"x": torch.tensor(x)}, "lid": 1.0})
            for k, (n, x) in enumerate(zip(sizes, results, strict=True))
        ]
        state = method.aggregate(state_of([0.0]), uploads, server_of(method, role="aggregate"))
        return state["weights"]["x"].tolist()

    assert together((10, 10, 10), ([1.0], [2.0], [3.0])) == [2.0]  # one after the other gives 6
    assert together((100, 300), ([1.0, 2.0], [3.0, 6.0])) == [2.5, 5.0]


def test_dimensions_add_up_over_iterations_noise_levels_do_not():
    method = made(T1=2)
    state = state_of([0.0], lid=[5.0, 6.0, 7.0], seen=[0, 2], mu=[0.3, 0.0, 0.0], noisy=[0])
    server = server_of(method, exchange=2, role="aggregate")
    turn = Upload(1, 10, {"weights": {"x": torch.tensor([1.0])}, "lid": 50.0})
    state = method.aggregate(state, [turn], server)
    assert state["lid"] == [5.0, 56.0, 7.0]
    assert state["noisy"] == server.noisy_clients == [1]
    assert state["mu"] == [0.3, 0.0, 0.0]  # until all have answered
    judged = [Upload(k, 10, level) for k, level in enumerate((0.0, 0.4, 0.0))]
    state = method.aggregate(state, judged, server_of(method, exchange=3, role="aggregate"))
    assert (state["mu"], state["seen"]) == ([0.0, 0.4, 0.0], [])


def test_equal_dimensions_make_nobody_noisy_and_the_record_says_so():
    method = made(T1=1)
    server = server_of(method, exchange=2, role="aggregate")
    turn = Upload(1, 10, {"weights": {"x": torch.tensor([1.0])}, "lid": 7.0})
    state = method.aggregate(state_of([0.0], lid=[7.0, 0.0, 7.0], seen=[0, 2], noisy=[0]), [turn], server)
    assert state["noisy"] == server.noisy_clients == []
    assert "nobody is called noisy" in server.notes["undecided"]


def test_only_noisy_clients_are_sent_weights_to_relabel_by():
    method = made(T1=1)
    state = state_of([0.0], seen=[0, 1, 2], noisy=[1])
    plan = method.plan(state, server_of(method, exchange=3))
    assert (plan.task, list(plan.cohort), plan.message, plan.closes_round) == ("judge", [0, 1, 2], {}, True)
    assert {k: sorted(addition) for k, addition in plan.private.items()} == {
        0: ["noisy"], 1: ["noisy", "weights"], 2: ["noisy"],
    }  # fmt: skip
    assert [plan.private[k]["noisy"] for k in range(3)] == [False, True, False]


def second_stage(mu: list[float], **settings: Any) -> tuple[Plan, Server]:
    options = {name: settings.pop(name) for name in ("participation",) if name in settings}
    method = made(T1=1, **settings)
    server = server_of(method, round=1, clients=len(mu), rounds=20, **options)
    return method.plan(state_of([0.0], len(mu), mu=mu, noisy=[0, 1]), server), server


def test_stage_2_trains_those_of_a_low_noise_level_noisy_or_not():
    plan, _ = second_stage([0.1, 0.11, 0.0, 0.5])
    assert list(plan.cohort) == [0, 2]  # .1 is kappa
    assert (plan.task, plan.closes_round) == ("train", True)
    assert list(second_stage([0.1, 0.11, 0.0, 0.5], kappa=0.3)[0].cohort) == [0, 1, 2]


def test_stage_2_takes_part_of_them_under_partial_participation_and_never_more_than_there_are():
    mu = [0.0, 0.5, 0.0, 0.5, 0.0, 0.5, 0.0, 0.5]
    half, _ = second_stage(mu, participation=0.25)
    assert len(half.cohort) == 2
    assert {*half.cohort} <= {0, 2, 4, 6}
    assert list(second_stage(mu, participation=0.9)[0].cohort) == [0, 2, 4, 6]


def test_stage_2_draws_anew_among_them_every_round():
    mu = [0.0, 0.5, 0.0, 0.5, 0.0, 0.5, 0.0, 0.5]
    method, state = made(T1=1, T2=10), state_of([0.0], 8, mu=mu, noisy=[1, 3, 5, 7])
    options = {"clients": 8, "rounds": 20, "participation": 0.25}
    cohorts = {tuple(method.plan(state, server_of(method, round=r, **options)).cohort) for r in range(1, 11)}
    assert len(cohorts) > 1
    assert {k for cohort in cohorts for k in cohort} == {0, 2, 4, 6}


@pytest.mark.parametrize("round", [1, 2], ids=["stage 2", "stage 3"])
def test_after_stage_1_no_client_has_a_proximal_term(round):
    method, state = made(T1=1, T2=1), state_of([0.0], mu=[0.05, 0.5, 0.0], noisy=[0, 1])
    plan = method.plan(state, server_of(method, round=round))
    assert (plan.task, plan.message, dict(plan.private)) == ("train", {"weights": state["weights"]}, {})
    assert list(plan.cohort) == ([0, 2] if round == 1 else [0, 1, 2])
    assert plan.closes_round is (round == 2)  # stage 2's last round relabels, stage 3's do not


@pytest.mark.parametrize("mu", [[0.05, 0.5, 0.0], [0.0, 0.5, 0.0]], ids=str)
def test_after_stage_2_the_noisy_clients_relabel_and_not_those_that_did_not_train(mu):
    method, state = made(T1=1, T2=1), state_of([0.0], mu=mu, noisy=[0, 1])
    assert not method.plan(state, server_of(method, round=1)).closes_round
    plan = method.plan(state, server_of(method, round=1, exchange=1))
    assert (plan.task, list(plan.cohort), plan.closes_round) == ("correct", [0, 1], True)
    assert method.plan({**state, "noisy": []}, server_of(method, round=1)).closes_round


def test_each_client_of_a_turn_is_told_its_own_noise_level():
    method = made(T1=2, together=2)
    plan = method.plan(state_of([0.0], mu=[0.3, 0.1, 0.5], seen=[1]), server_of(method))
    assert {k: dict(addition) for k, addition in plan.private.items()} == {0: {"mu": 0.3}, 2: {"mu": 0.5}}


def test_the_diagnosed_noise_level_is_a_mean_over_all_clients():
    found = made().diagnostics(state_of([0.0], 4, mu=[0.0, 0.4, 0.0, 0.2], noisy=[1, 3]))
    assert found == {"noisy_clients": 2.0, "noise_level": pytest.approx(0.15)}


def test_without_a_client_of_a_low_noise_level_the_better_half_trains_and_the_record_says_so():
    plan, server = second_stage([0.5, 0.2, 0.4, 0.3, 0.9])
    assert list(plan.cohort) == [1, 3]
    assert "the half with the lowest" in server.notes["undecided"]
    assert fc.eligible([0.7], 0.1) == ([0], False)


# ----------------------------------------------------------------------------------------- the schedule


@pytest.mark.parametrize(
    ("rounds", "T1", "T2", "expected"),
    [
        (500, 5, 0.5, (5, 248, 247)),
        (100, 5, 0.5, (5, 48, 47)),
        (20, 5, 0.5, (5, 8, 7)),
        (10, 5, 0.5, (5, 3, 2)),
        (5, 5, 0.5, (3, 1, 1)),
        (3, 5, 0.5, (1, 1, 1)),
        (2, 5, 0.5, (1, 0, 1)),
        (1, 5, 0.5, (1, 0, 0)),
        (500, 5, 250, (5, 250, 245)),
        (10, 2, 100, (2, 7, 1)),  # more than there is: stage 3 keeps a round
        (10, 2, 1.0, (2, 8, 0)),  # all that remains
        (10, 0.2, 0.25, (2, 2, 6)),
        (10, 0.01, 0.01, (1, 1, 8)),  # asked for, so at least a round
        (10, 1.0, 0.5, (8, 1, 1)),
        (10, 0, 0.5, (0, 5, 5)),
        (10, 5, 0, (5, 0, 5)),
        (5, 5, 0, (4, 0, 1)),
        (5, 0, 0, (0, 0, 5)),
        (3, 0.0, 0.0, (0, 0, 3)),
    ],
)
def test_the_stages_of_long_and_short_runs(rounds, T1, T2, expected):
    assert fc.stages(rounds, Rounds(T1), Rounds(T2)) == expected


def test_from_three_rounds_on_every_stage_is_there():
    for rounds in range(3, 600):
        found = fc.stages(rounds, Settings().T1, Settings().T2)
        assert sum(found) == rounds
        assert min(found) >= 1


def test_defaults_are_the_specification_s():
    wanted = Settings(
        T1=5, T2=0.5, together=1, beta=5.0, prox_squared=False, mixup=0.0, k=20, loss_on_probs=True,
        score_view="plain", min_range=1e-9, pi=0.5, theta=0.5, kappa=0.1,
    )  # fmt: skip
    assert Settings().model_dump() == wanted.model_dump()
    assert wanted.model_fields_set == set(Settings.model_fields)  # none is left to its own default


@pytest.mark.parametrize(
    "wrong",
    [
        {"T1": 1.5}, {"T2": 2.0}, {"T1": -1}, {"theta": 1.1}, {"pi": 2}, {"kappa": -0.1}, {"k": 1}, {"together": 0},
        {"beta": -1}, {"mixup": -1}, {"score_view": "raw"},
    ],
    ids=str,
)  # fmt: skip
def test_nonsense_is_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Settings(**wrong)


@pytest.mark.parametrize("dataset", ["cifar10", "cifar100", "fashion-mnist", "digits"])
@pytest.mark.parametrize("preset", FedCorr.presets)
def test_the_authors_budget_trains_as_many_images_as_the_common_one(dataset, preset):
    name = f"{_path}:FedCorr"
    common = resolve(method=name, dataset=dataset, preset=preset).protocol
    own = resolve(method=name, dataset=dataset, preset=preset, track="own")
    assert own.protocol.rounds * own.protocol.local_epochs == common.rounds * common.local_epochs
    assert (own.protocol.batch, own.protocol.optimiser.momentum, own.protocol.optimiser.weight_decay) == (10, 0.5, 0.0)
    assert own.protocol.optimiser.lr == (0.01 if dataset == "cifar100" else 0.03)
    assert min(fc.stages(own.protocol.rounds, *(Settings(**own.method_settings).T1, Rounds(0.5)))) >= 1
    assert own.method_settings["mixup"] == (1.0 if preset == "code-literal" else 0.0)


def test_clothing1m_has_settings_of_its_own():
    for preset in FedCorr.presets.values():
        settings, protocol = preset.on("clothing1m")
        assert (settings["pi"], settings["theta"], settings["T1"]) == (0.8, 0.9, Rounds(2))
        assert protocol["rounds"] * protocol["local_epochs"] == 50
        Settings(**settings)


# ------------------------------------------------------------------------------------- clients in their turns


def turn_of(task: str, message: dict[str, Any], state: Any, *, id: int = 0, **options: Any) -> Outcome:
    """A client's turn with the default start weights unless the message has others."""
    method = options.pop("kind", FedCorr)(Settings(**options.pop("settings", {})))
    lane = Lane(tiny_engine(method, **options))
    if "weights" not in message and message.get("noisy", True):
        message = {**message, "weights": method.init(lane.server(0, 0, "init"))["weights"]}
    return perform(lane, Job(id, task, message, state, state is not None, 0, 0))


def test_a_turn_scores_the_own_data_under_the_own_new_weights():
    outcome = turn_of("turn", {"mu": 0.0}, None)
    engine = tiny_engine(made())
    side = Lane(engine).client(0, None, 0, 0)
    network = side.model(outcome.reply.upload["weights"], frozen=True)
    z = network(images_of(side).plain(torch.arange(side.size))).double()
    torch.testing.assert_close(outcome.state["losses"], fc.sample_losses(z, side.labels, True), rtol=1e-6, atol=0)
    assert outcome.reply.upload["lid"] == pytest.approx(fc.dimensions(z.softmax(1), 20).mean().item(), rel=1e-4)
    assert sorted(outcome.reply.metrics) == ["distance", "lid_huge", "lid_zero", "loss"]
    assert outcome.reply.metrics["distance"] > 0


def test_the_proximal_term_is_there_only_with_a_noise_level_and_holds_the_weights_back():
    free = turn_of("turn", {"mu": 0.0}, None)
    without = turn_of("turn", {"mu": 0.5}, None, settings={"beta": 0.0})
    assert all(
        torch.equal(a, free.reply.upload["weights"][name]) for name, a in without.reply.upload["weights"].items()
    )
    held = turn_of("turn", {"mu": 0.5}, None, settings={"beta": 2.0})
    assert held.reply.metrics["distance"] < free.reply.metrics["distance"]


@pytest.mark.parametrize("task", ["turn", "train"])
def test_a_client_trains_and_is_scored_on_its_corrected_labels(task):
    def answer(state, **options):
        outcome = turn_of(task, {"mu": 0.0} if task == "turn" else {}, state, **options)
        upload = outcome.reply.upload
        return (upload["weights"] if task == "turn" else upload), outcome

    corrected = (torch.arange(72) + 1) % 3
    wanted, fresh = answer(None, given=corrected)  # a client that was given them
    found, later = answer({"labels": corrected[::3], "losses": None})
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)
    if task == "turn":
        assert torch.equal(fresh.state["losses"], later.state["losses"])
        assert torch.equal(later.state["labels"], corrected[::3])


@pytest.mark.parametrize("on_probs", [True, False])
def test_a_noisy_client_relabels_by_its_own_losses_and_the_global_predictions(on_probs):
    losses = torch.tensor(LOSSES + [1.45] * 14, dtype=f64)
    state = {"labels": torch.arange(24) % 3, "losses": losses}
    settings = {"theta": 0.3, "loss_on_probs": on_probs}
    trained = turn_of("turn", {"mu": 0.0}, None).reply.upload["weights"]
    outcome = turn_of("judge", {"noisy": True, "weights": trained}, state, settings=settings)
    assert outcome.reply.upload == pytest.approx(4 / 24)  # two of the four largest may change
    side = Lane(tiny_engine(made())).client(0, None, 0, 0)
    best = side.model(trained, frozen=True)(images_of(side).plain(torch.arange(24))).argmax(1)
    expected = state["labels"].clone()
    expected[[2, 6]] = best[[2, 6]]
    assert torch.equal(outcome.state["labels"], expected)
    assert outcome.state["losses"] is None
    claims = outcome.reply.claims
    assert claims.noisy is True
    assert (claims.clean[expected != side.labels] == 0).all()
    kept = expected == side.labels
    lower = torch.from_numpy(fc.split(losses.numpy(), 0, 1e-9).lower)
    torch.testing.assert_close(claims.clean[kept], lower[kept], rtol=0, atol=1e-3)
    assert {0, 1} <= set(claims.clean[kept].round().tolist())


def test_a_clean_client_answers_zero_and_keeps_its_labels():
    state = {"labels": torch.arange(24) % 3, "losses": torch.tensor(LOSSES + [1.45] * 14, dtype=f64)}
    outcome = turn_of("judge", {"noisy": False}, state)
    assert outcome.reply.upload == 0.0
    assert torch.equal(outcome.state["labels"], state["labels"])
    assert outcome.state["losses"] is None
    assert outcome.reply.claims.noisy is False


def test_a_noisy_client_whose_losses_are_all_equal_has_level_zero():
    state = {"labels": torch.zeros(24, dtype=torch.int64), "losses": torch.full((24,), 1.5, dtype=f64)}
    outcome = turn_of("judge", {"noisy": True}, state)
    assert outcome.reply.upload == 0.0
    assert torch.equal(outcome.state["labels"], state["labels"])
    given = Lane(tiny_engine(made())).client(0, None, 0, 0).labels
    assert outcome.reply.claims.clean.tolist() == [float(y == 0) for y in given.tolist()]


def test_a_turn_records_how_far_it_went_and_what_rules_its_mean_dimension(monkeypatch):
    monkeypatch.setattr(fc, "dimensions", lambda p, k: torch.tensor([0.0, 0.0, 2e3, 8.0], dtype=f64))
    engine = tiny_engine(made())
    start = engine.method.init(Lane(engine).server(0, 0, "init"))["weights"]
    reply = turn_of("turn", {"mu": 0.0, "weights": start}, None).reply
    assert (reply.upload["lid"], reply.metrics["lid_zero"], reply.metrics["lid_huge"]) == (502.0, 0.5, 0.25)
    square = sum((reply.upload["weights"][name] - start[name]).square().sum().item() for name in start)
    assert reply.metrics["distance"] == pytest.approx(square**0.5, rel=1e-5)


def test_mixup_draws_a_weight_for_every_step_of_every_epoch(monkeypatch):
    side, seen = Lane(tiny_engine(made(mixup=0.1), local_epochs=3)).client(0, None, 0, 0), []
    real = side.fit
    monkeypatch.setattr(side, "fit", lambda *given, **named: seen.append(named["draw"]) or real(*given, **named))
    side.state = made().join(side)
    made(mixup=0.1).client("train", {"weights": weights(side.model(None, "start"))}, side)
    assert (seen[0]["share"].shape, seen[0]["keys"].shape) == ((9,), (9, 8))
    assert ((seen[0]["share"] - 0.5).abs() > 0.4).sum() >= 5  # Beta(.1, .1) is near 0 or 1


def test_after_stage_2_every_confident_sample_is_relabelled():
    state = {"labels": torch.full((24,), 2), "losses": None}
    outcome = turn_of("correct", {}, state, settings={"theta": 0.0})
    side = Lane(tiny_engine(made())).client(0, None, 0, 0)
    start = made().init(Lane(tiny_engine(made())).server(0, 0, "init"))["weights"]
    best = side.model(start, frozen=True)(images_of(side).plain(torch.arange(24))).argmax(1)
    assert torch.equal(outcome.state["labels"], best)
    unsure = turn_of("correct", {}, state, settings={"theta": 0.999})
    assert torch.equal(unsure.state["labels"], state["labels"])


def test_scores_are_fp32_under_bf16():
    lanes = [Lane(tiny_engine(made(), precision=precision)) for precision in ("fp32", "bf16")]
    sides = [lane.client(0, None, 0, 0) for lane in lanes]
    found = [side.apply(fc.logits, frozen={"network": side.model(frozen=True)}) for side in sides]
    assert found[0].dtype == found[1].dtype == torch.float32
    torch.testing.assert_close(found[0], found[1], rtol=1e-6, atol=1e-6)


def test_score_view_train_augments():
    look = Look(Tiny.mean, Tiny.std, crop_padding=2)
    views = ("plain", "train")
    plain, train = (turn_of("turn", {"mu": 0.0}, None, look=look, settings={"score_view": view}) for view in views)
    assert torch.equal(plain.reply.upload["weights"]["1.bias"], train.reply.upload["weights"]["1.bias"])
    assert not torch.equal(plain.state["losses"], train.state["losses"])


class Norm(FedCorr):
    def network(self, encoder):
        return torch.nn.Sequential(super().network(encoder), torch.nn.BatchNorm1d(encoder.classes))


@pytest.mark.parametrize("kind", [FedCorr, Norm])
@pytest.mark.parametrize("n", [1, 2, 3, 9])  # 9: a last batch of one
def test_the_smallest_clients_train_and_are_judged_or_left_alone(n, kind):
    positions = [range(n), range(n, 40)]
    turn = turn_of("turn", {"mu": 0.4}, None, positions=positions, settings={"mixup": 1.0}, kind=kind)
    lid = turn.reply.upload["lid"]
    assert (lid is None) == (n < 3)
    assert lid is None or math.isfinite(lid)
    judged = turn_of("judge", {"noisy": True}, turn.state, positions=positions, kind=kind)
    assert 0 <= judged.reply.upload < 1


# --------------------------------------------------------------------------------------------- whole runs


def half_clean(scene, truth):
    """A federation of whose clients the even ones are clean."""
    clean = np.isin(scene.owner, np.arange(0, scene.spec.clients, 2))
    noisy = truth.noisy.copy()
    noisy[::2] = False
    return dataclasses.replace(scene, given=np.where(clean, truth.true, scene.given)), dataclasses.replace(
        truth, noisy=noisy
    )


SHORT = {"rounds": 4, "clients": 4, "noise": 0.6, "change": half_clean}
TWO_SWEEPS = {"T1": 2, "beta": 1.0, "k": 5}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run through all stages: (result, records)."""
    run = tiny_run(FedCorr, tmp_path_factory.mktemp("whole"), settings=TWO_SWEEPS, **SHORT)
    return run.execute(), records.load_records(run.folder)


def test_a_run_goes_through_all_stages_and_corrects_labels(whole):
    result, rounds = whole
    assert [record.notes["stage"] for record in rounds] == [1, 1, 2, 3]
    assert [record.exchanges for record in rounds] == [5, 5, 2, 1]  # 4 turns and an answer; training and correction
    noisy = rounds[1].notes["noisy"]
    assert 1 <= len(noisy) <= 3
    assert rounds[2].notes["corrected"] == noisy
    assert len(rounds[1].notes["lid"]) == 4
    assert all(new > old for old, new in zip(rounds[0].notes["lid"], rounds[1].notes["lid"], strict=True))
    assert [level > 0 for level in rounds[1].notes["mu"]] == [k in noisy for k in range(4)]
    assert result.label_noise_after < result.label_noise_before
    assert {"clients_precision", "samples_precision", "relabel_precision"} <= set(rounds[-1].judged)
    # a sweep trains everybody once, stage 2 those of a low noise level only
    low = sum(level <= 0.1 for level in rounds[1].notes["mu"])
    assert [record.images["trained"] for record in rounds] == [72, 72, 18 * low, 72]


def test_stopped_after_any_exchange_of_any_stage_it_resumes_to_the_same_digest(whole, tmp_path):
    result, stops = in_sessions(lambda: tiny_run(FedCorr, tmp_path, settings=TWO_SWEEPS, **SHORT).execute())
    assert stops == 1 + 5 + 5 + 2 + 1
    assert result.digest == whole[0].digest


def test_threads_and_debug_give_the_serial_digest(whole, tmp_path):
    for options in ({"executor": "threads", "lanes": 3}, {"executor": "debug"}):
        run = tiny_run(FedCorr, tmp_path / options["executor"], settings=TWO_SWEEPS, **options, **SHORT)
        assert run.execute().digest == whole[0].digest


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({}, {"mixed", "near"}),
        ({"mixup": 1.0}, {"mixed", "near"}),
        ({"mixup": 0.3, "prox_squared": True}, {"mixed", "near_squared"}),
    ],
)
def test_its_losses_can_be_recorded_and_replayed(settings, names, tmp_path, whole):
    with watch_losses() as seen:
        result = tiny_run(FedCorr, tmp_path, settings={**TWO_SWEEPS, **settings}, **SHORT).execute()
    assert set(seen) == names
    assert settings or result.digest == whole[0].digest  # watching changes nothing


@pytest.mark.parametrize(
    "change",
    [
        {"T1": 1}, {"T2": 0}, {"together": 2}, {"beta": 2.0}, {"prox_squared": True}, {"mixup": 1.0}, {"k": 6},
        {"loss_on_probs": False}, {"pi": 1.0}, {"theta": 1.0}, {"kappa": 1.0},
    ],
    ids=str,
)  # fmt: skip
def test_every_setting_has_an_effect(change, whole, tmp_path):
    result = tiny_run(FedCorr, tmp_path, settings={**TWO_SWEEPS, **change}, **SHORT).execute()
    assert result.digest != whole[0].digest
    if change == {"theta": 1.0}:
        assert result.label_noise_after == result.label_noise_before


def test_in_an_iteration_every_client_has_one_turn_in_an_order_of_its_own():
    method, orders = made(T1=3), []
    for round in range(3):
        state = state_of([0.0], 8)
        while len(state["seen"]) < 8:
            plan = method.plan(state, server_of(method, round=round, exchange=len(state["seen"]), clients=8, rounds=9))
            assert (plan.task, plan.closes_round, set(plan.private)) == ("turn", False, set(plan.cohort))
            state = {**state, "seen": [*state["seen"], *plan.cohort]}
        assert sorted(state["seen"]) == list(range(8))
        orders.append(state["seen"])
    assert len({tuple(order) for order in orders}) == 3


def test_several_clients_in_a_turn_are_averaged(tmp_path):
    run = tiny_run(FedCorr, tmp_path, settings={"T1": 1, "together": 3}, **SHORT)
    run.execute()
    first = records.load_records(run.folder)[0]
    assert first.exchanges == 2 + 1  # 3 clients, 1 client, the answer
    assert first.images["trained"] == 72


@pytest.mark.parametrize("T2", [0, 0.5, 1.0])
@pytest.mark.parametrize(
    "options",
    [{}, {"participation": 0.5, "clients": 6, "local_epochs": 2}, {"model": "small-cnn", "rounds": 2}],
    ids=["all", "some", "cnn"],
)
def test_without_stage_1_it_is_fedavg_to_the_bit(T2, options, tmp_path):
    plain = tiny_run(FedAvg, tmp_path / "plain", **options)
    run = tiny_run(FedCorr, tmp_path / "run", settings={"T1": 0, "T2": T2}, **options)
    one, two = plain.execute(), run.execute()
    wanted, found = server_state(plain), server_state(run)["weights"]
    assert wanted.keys() == found.keys()
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)
    assert [r.metrics["loss"] for r in records.load_records(run.folder)] == [
        r.metrics["loss"] for r in records.load_records(plain.folder)
    ]
    assert (one.accuracy, one.images, one.bytes_up) == (two.accuracy, two.images, two.bytes_up)


@pytest.mark.parametrize("options", [{"participation": 0.4, "clients": 6}, {"clients": 1}, {"noise": 0}], ids=str)
def test_it_runs_with_partial_participation_one_client_and_no_noise(options, tmp_path):
    run = tiny_run(FedCorr, tmp_path, settings={"T1": 1}, **options)
    result = run.execute()
    first = records.load_records(run.folder)[0]
    assert result.status == "complete"
    assert first.exchanges == options.get("clients", 3) + 1  # stage 1 visits everybody
    assert ("undecided" in first.notes) == (options == {"clients": 1})


def test_classes_that_a_client_does_not_hold_do_no_harm(tmp_path):
    partition = {"law": "bernoulli-dirichlet", "p": 0.4}
    run = tiny_run(FedCorr, tmp_path, settings=TWO_SWEEPS, partition=partition, **SHORT)
    held = [run.scene.given[run.scene.positions(k)] for k in range(4)]
    assert min(len(set(labels.tolist())) for labels in held[::2]) < 3  # even clients' given labels are the true ones
    assert run.execute().status == "complete"
