"""FedCova against numbers worked out by hand and against a plain loop over its definition.

Names with spec_F1 ... spec_F10 are the checkable facts of the method's specification, with the printed numbers.
"""

# ruff: noqa: N802 (the facts are called F1 to F10)

from __future__ import annotations

import importlib.util
import math
import sys
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from flnoisebench.api import KEEP, Batch, Client, Fit, Protocol, Reply, Rounds, Server, Upload, map_tensors
from flnoisebench.trees import check, digest, nbytes, writes

_spec = importlib.util.spec_from_file_location(
    "fedcova_under_test", Path(__file__).parents[1] / "methods" / "fedcova.py"
)
fc = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = fc  # where pydantic looks up the annotations of Settings
_spec.loader.exec_module(fc)
FedCova, Settings = fc.FedCova, fc.Settings

f64 = torch.float64


pytestmark = pytest.mark.usefixtures("one_thread")


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def features(n: int, d: int, seed: int = 0, dtype: torch.dtype = f64) -> torch.Tensor:
    return F.normalize(torch.randn(n, d, generator=generator(seed), dtype=dtype), dim=1)


def labels(n: int, J: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(J, (n,), generator=generator(seed + 1000))


def coding_rate_loop(z: torch.Tensor, y: torch.Tensor, s: float) -> torch.Tensor:
    """L by its definition."""
    B, d = z.shape
    eye = torch.eye(d, dtype=z.dtype)
    total = -torch.logdet(z.T @ z / B + s * eye) / 2
    for j in y.unique():
        part = z[y == j]
        total = total + len(part) / (2 * B) * torch.logdet(part.T @ part / len(part) + s * eye)
    return total


def forms(z: torch.Tensor, y: torch.Tensor, s: float, J: int) -> dict[str, torch.Tensor]:
    return {
        "loop": coding_rate_loop(z, y, s),
        "gram": fc.coding_rate_gram(z, y, s),
        "dxd": fc.coding_rate_dxd(z, y, s, J),
        "chosen": fc.coding_rate(z, y, s, J),
    }


def statistics(sigma: torch.Tensor, n: list[float] | torch.Tensor, mean: torch.Tensor | None = None) -> dict[str, Any]:
    return {"sigma": sigma.to(f64), "n": torch.as_tensor(n, dtype=f64), "mean": mean}


def q_of(z: list[float], sigmas: list[torch.Tensor], alpha: float) -> list[float]:
    classes = fc.readout(statistics(torch.stack(sigmas), [1.0] * len(sigmas)), alpha)
    return fc.distances(torch.tensor([z], dtype=f64), classes)[0].tolist()


# ------------------------------------------------------------------------------------------------- the loss


HAND = torch.tensor([[1, 0], [0.6, 0.8], [0, 1], [-0.8, 0.6]], dtype=f64)  # two samples of each class
HAND_Y = torch.tensor([0, 0, 1, 1])


@pytest.mark.parametrize(("eps2", "expected"), [(0.5, -0.08717669), (2.0, -0.02041100), (6.0, -0.00368703)])
def test_spec_F1_loss_of_four_points_in_the_plane(eps2, expected):
    for name, value in forms(HAND, HAND_Y, eps2 / 2, 2).items():
        assert value.item() == pytest.approx(expected, abs=5e-9), name


def test_spec_F1_class_and_global_logdets_of_the_loop():
    eye = torch.eye(2, dtype=f64)
    for part in (HAND[:2], HAND[2:]):
        assert torch.logdet(part.T @ part / 2 + eye).item() == pytest.approx(0.77010822, abs=5e-9)
    assert torch.logdet(HAND.T @ HAND / 4 + eye).item() == pytest.approx(0.81093022, abs=5e-9)


def mcr2(z: torch.Tensor, y: torch.Tensor, J: int, eps: float) -> torch.Tensor:
    """The loss of the MCR2 reference code with gam1 = gam2 = 1, in its own terms."""
    B, d = z.shape
    eye, Z = torch.eye(d, dtype=z.dtype), z.T
    discriminative = torch.logdet(eye + d / (B * eps) * Z @ Z.T) / 2
    compressive = z.new_zeros(())
    for j in range(J):
        member = torch.diag((y == j).to(z.dtype))
        trace = member.trace() + 1e-8
        compressive = compressive + torch.logdet(eye + d / (trace * eps) * Z @ member @ Z.T) * trace / (2 * B)
    return compressive - discriminative


def test_spec_F1_mcr2_code_with_eps_as_eps2_is_the_same_loss_and_not_only_up_to_a_constant():
    assert mcr2(HAND, HAND_Y, 2, 2.0).item() == pytest.approx(-0.02041100, abs=5e-9)
    assert abs(mcr2(HAND, HAND_Y, 2, 2.0) - coding_rate_loop(HAND, HAND_Y, 1.0)).item() < 4e-9  # its 1e-8
    z, y = features(50, 12), labels(50, 5)
    for eps2 in (0.5, 2.0, 6.0):
        assert fc.coding_rate(z, y, eps2 / 12, 5).item() == pytest.approx(mcr2(z, y, 5, eps2).item(), abs=1e-7)


@pytest.mark.parametrize(
    ("d", "J", "eps2", "expected"),
    [
        (3, 2, 0.5, -0.41333929),
        (3, 2, 3.0, -0.05889152),
        (3, 2, 6.0, -0.02041100),
        (128, 10, 2.0, -7.92020637),
        (128, 10, 6.0, -4.15744684),
    ],
)
def test_spec_F2_loss_of_orthogonal_rank_one_classes(d, J, eps2, expected):
    z, y, s = torch.eye(d, dtype=f64)[:J].repeat_interleave(2, 0), torch.arange(J).repeat_interleave(2), eps2 / d
    closed = (math.log(1 + 1 / s) - J * math.log(1 + 1 / (J * s))) / 2
    assert closed == pytest.approx(expected, abs=5e-9)
    for name, value in forms(z, y, s, J).items():
        assert value.item() == pytest.approx(expected, abs=5e-9), name


def test_spec_F2_loss_of_full_rank_orthogonal_subspaces():
    z, y = torch.eye(8, dtype=f64), torch.arange(2).repeat_interleave(4)
    for name, value in forms(z, y, 2.0 / 8, 2).items():
        assert value.item() == pytest.approx(-0.23556607, abs=5e-9), name


@pytest.mark.parametrize(("r", "eps2", "expected"), [(3, 6.0, -4.917), (9, 2.0, -14.752)])
def test_spec_A2_the_best_dimension_of_ten_orthogonal_classes_falls_with_eps2(r, eps2, expected):
    """r* = .1405 d/eps2: 3.00 at eps2 = 6, 8.99 at 2."""
    d, J = 128, 10

    def of(r: int) -> float:
        z, y = torch.eye(d, dtype=f64)[: J * r], torch.arange(J).repeat_interleave(r)
        return fc.coding_rate(z, y, eps2 / d, J).item()

    assert of(r) == pytest.approx(expected, abs=5e-4)
    assert of(r) == min(of(other) for other in range(1, d // J + 1))


def test_spec_F3_loss_is_zero_for_equal_class_matrices_and_for_one_class():
    axes = torch.eye(2, dtype=f64)
    for z, y in ((axes.repeat(2, 1), HAND_Y), (HAND, torch.ones(4, dtype=torch.int64))):
        for name, value in forms(z, y, 1.0, 2).items():
            assert abs(value.item()) < 1e-14, name


SHAPES = [(1, 5, 3), (2, 7, 2), (16, 40, 4), (13, 13, 6), (30, 8, 3), (64, 16, 100), (200, 24, 7), (9, 32, 20)]


@pytest.mark.parametrize(("B", "d", "J"), SHAPES)  # B below, at and above d; more classes than samples
@pytest.mark.parametrize("eps2", [0.01, 0.5, 6.0])
def test_gram_dxd_and_loop_agree_to_1e_12_in_value_and_gradient(B, d, J, eps2):
    y = labels(B, J)
    y[y == J // 2] = 0  # some class is always absent
    values, gradients = {}, {}
    for name in forms(features(B, d), y, eps2 / d, J):
        z = features(B, d).requires_grad_()
        values[name] = forms(z, y, eps2 / d, J)[name]
        gradients[name] = torch.autograd.grad(values[name], z)[0]
    for name in ("gram", "dxd", "chosen"):
        assert abs(values[name] - values["loop"]).item() < 1e-12, name
        scale = max(1.0, gradients["loop"].abs().max().item())
        assert (gradients[name] - gradients["loop"]).abs().max().item() < 1e-11 * scale, name


def test_spec_F9_masked_gram_loss_equals_the_loop_to_1e_14():
    z, y, s = features(16, 40), labels(16, 4), 6.0 / 40
    assert abs(fc.coding_rate_gram(z, y, s) - coding_rate_loop(z, y, s)).item() < 1e-14


def test_form_is_chosen_by_shape_alone(monkeypatch):
    used = []
    monkeypatch.setattr(fc, "coding_rate_gram", lambda z, y, s: used.append("gram"))
    monkeypatch.setattr(fc, "coding_rate_dxd", lambda z, y, s, J: used.append("dxd"))
    for B in (1, 7, 8, 9, 50):
        fc.coding_rate(features(B, 8), labels(B, 3), 1.0, 3)
    assert used == ["gram", "gram", "gram", "dxd", "dxd"]


@pytest.mark.parametrize("seed", range(10))
def test_loss_is_never_positive_and_blind_to_rotation_sign_and_class_names(seed):
    B, d, J = (20, 12, 4) if seed % 2 else (9, 16, 4)
    z, y = features(B, d, seed), labels(B, J, seed)
    rotation = torch.linalg.qr(torch.randn(d, d, generator=generator(seed + 7), dtype=f64)).Q
    signs = torch.randint(2, (B, 1), generator=generator(seed + 8)).to(f64) * 2 - 1
    names = torch.randperm(J, generator=generator(seed + 9))
    base = fc.coding_rate(z, y, 0.3, J).item()
    assert base <= 1e-15
    for other_z, other_y in ((z @ rotation.T, y), (z * signs, y), (z, names[y])):
        assert fc.coding_rate(other_z, other_y, 0.3, J).item() == pytest.approx(base, abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, f64])
@pytest.mark.parametrize("form", ["gram", "dxd"])
@pytest.mark.parametrize("case", ["one sample", "one class", "duplicates", "nothing but duplicates"])
def test_gradient_is_finite_and_a_single_class_has_zero_loss_and_zero_gradient(case, form, dtype):
    z = {
        "one sample": features(1, 6, dtype=dtype),
        "one class": features(9, 6, dtype=dtype),
        "duplicates": features(3, 6, dtype=dtype).repeat(4, 1),
        "nothing but duplicates": features(1, 6, dtype=dtype).repeat(8, 1),
    }[case].requires_grad_()
    y = labels(len(z), 3) if case == "duplicates" else torch.full((len(z),), 2)
    value = fc.coding_rate_gram(z, y, 0.4) if form == "gram" else fc.coding_rate_dxd(z, y, 0.4, 3)
    (gradient,) = torch.autograd.grad(value, z)
    assert value.dtype == dtype
    assert gradient.isfinite().all()
    if case != "duplicates":
        tolerance = 1e-6 if dtype == torch.float32 else 1e-14
        assert abs(value.item()) < tolerance
        assert gradient.abs().max().item() < tolerance


@pytest.mark.parametrize("eps2", [0.01, 6.0])
def test_fp32_loss_keeps_five_digits(eps2):
    for B in (64, 256):
        z, y = features(B, 128, dtype=torch.float32), labels(B, 10)
        assert fc.coding_rate(z, y, eps2 / 128, 10).dtype == torch.float32
        exact = coding_rate_loop(z.double(), y, eps2 / 128).item()
        assert fc.coding_rate(z, y, eps2 / 128, 10).item() == pytest.approx(exact, rel=1e-5)


def test_fp64_scalar_s_does_not_turn_fp32_features_into_fp64():
    s = torch.tensor(0.05, dtype=f64)
    for B in (4, 40):
        for value in forms(features(B, 16, dtype=torch.float32), labels(B, 3), s, 3).values():
            assert value.dtype == torch.float32


# ------------------------------------------------------------------------------------------------ the network


class Encoder(torch.nn.Module):
    """Flat images through one linear layer."""

    def __init__(self, inputs: int = 16, width: int = 24, classes: int = 3) -> None:
        super().__init__()
        self.width, self.classes = width, classes
        self.body = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(inputs, width), torch.nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


def images(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, 1, 4, 4, generator=generator(seed))


def a_batch(n: int, J: int = 3, seed: int = 0, s: float = 0.75) -> Batch:
    given = {"s": torch.tensor(s, dtype=f64), "classes": torch.arange(J)}
    zero = torch.tensor(0)
    return Batch((images(n, seed),), labels(n, J, seed), torch.arange(n), zero, zero, given=given)


@pytest.mark.parametrize(
    ("settings", "layers"),
    [
        ({"head": "fc"}, ["Linear 24 24 True", "ReLU", "Linear 24 8 True"]),
        ({"head": "bn"}, ["Linear 24 24 False", "BatchNorm1d", "ReLU", "Linear 24 8 True"]),
        ({"head": "fc", "head_width": 5}, ["Linear 24 5 True", "ReLU", "Linear 5 8 True"]),
    ],
)
def test_head_layers(settings, layers):
    head = FedCova(Settings(d=8, **settings)).network(Encoder()).head
    found = [
        f"Linear {m.in_features} {m.out_features} {m.bias is not None}"
        if isinstance(m, torch.nn.Linear)
        else type(m).__name__
        for m in head
    ]
    assert found == layers


def test_features_have_length_one_in_fp32_also_under_autocast_and_at_zero():
    network = FedCova(Settings(d=8)).network(Encoder())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        z = network(images(20))
        value = fc.loss(network, a_batch(20))
    assert z.dtype == value.dtype == torch.float32
    assert (z.norm(dim=1) - 1).abs().max().item() < 1e-6
    for parameter in network.head[-1].parameters():
        parameter.data.zero_()
    batch = a_batch(20)
    fc.loss(network, batch).backward()
    assert torch.equal(network(images(20)), torch.zeros(20, 8))
    assert all(p.grad.isfinite().all() for p in network.parameters())


@pytest.mark.parametrize("n", [6, 40])  # both forms at d = 8
def test_traced_loss_replays_on_another_batch_with_other_classes_and_other_s(n):
    network = FedCova(Settings(d=8, head="bn")).network(Encoder(classes=5))
    parameters = dict(network.named_parameters())

    def step(x, y, s, classes):
        zero = torch.tensor(0)
        batch = Batch((x,), y, y, zero, zero, given={"s": s, "classes": classes})
        value = fc.loss(network, batch)
        return value, torch.autograd.grad(value, list(parameters.values()))

    def arguments(y, seed, s):
        return images(n, seed), y, torch.tensor(s, dtype=f64), torch.arange(5)

    first = arguments(labels(n, 2), 1, 0.75)  # classes 0 and 1
    traced = make_fx(step)(*first)
    for again in (first, arguments(labels(n, 3, 5) + 2, 2, 0.01), arguments(torch.full((n,), 4), 3, 0.5)):
        expected, expected_gradients = step(*again)
        value, gradients = traced(*again)
        assert value.item() == pytest.approx(expected.item(), abs=1e-6)
        for found, wanted in zip(gradients, expected_gradients, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_loss_is_a_module_function_without_captured_variables():
    assert fc.loss.__closure__ is None
    assert fc.encode.__closure__ is None
    assert fc.loss.__qualname__ == "loss"


# ------------------------------------------------------------------------------------------- the covariances


def test_second_moments_are_the_class_means_of_outer_products_plus_sI():
    z, y = features(30, 6, dtype=torch.float32), labels(30, 4)
    y[y == 2] = 0
    sigma, counts = fc.second_moments(z, y, 4, 0.5)
    assert (sigma.dtype, counts.dtype) == (torch.float32, torch.int64)
    assert counts.tolist() == [(y == j).sum().item() for j in range(4)]
    for j in (0, 1, 3):
        part = z[y == j].double()
        wanted = sum(torch.outer(row, row) for row in part) / len(part) + 0.5 * torch.eye(6, dtype=f64)
        torch.testing.assert_close(sigma[j], wanted.float(), rtol=0, atol=1e-7)


def test_absent_class_has_zeros_and_count_0_and_no_weight():
    sigma, counts = fc.second_moments(features(5, 4), torch.zeros(5, dtype=torch.int64), 3, 0.5)
    assert counts.tolist() == [5, 0, 0]
    assert sigma[1:].abs().max() == 0
    other, n = fc.second_moments(features(5, 4, 1), torch.ones(5, dtype=torch.int64), 3, 0.5)
    pooled = fc.pool([statistics(sigma, counts), statistics(other, n)])
    torch.testing.assert_close(pooled["sigma"][0], sigma[0].double())
    torch.testing.assert_close(pooled["sigma"][1], other[1].double())
    assert pooled["n"].tolist() == [5, 5, 0]


FIVE = torch.tensor([[[2, 0], [0, 1]], [[1, 0.5], [0.5, 1]], [[3, 0], [0, 0.5]]], dtype=f64)[:, None]  # [client, J=1]
FIVE_N = [10.0, 30.0, 60.0]


def test_spec_F5_pooling_and_leave_one_out_by_hand():
    parts = [statistics(sigma, [n]) for sigma, n in zip(FIVE, FIVE_N, strict=True)]
    pooled = fc.pool(parts)
    torch.testing.assert_close(pooled["sigma"][0], torch.tensor([[2.3, 0.15], [0.15, 0.7]], dtype=f64))
    wanted = [
        [[2.33333, 0.16667], [0.16667, 0.66667]],
        [[2.857143, 0], [0, 0.571429]],
        [[1.25, 0.375], [0.375, 1]],
    ]
    for own, expected in zip(parts, wanted, strict=True):
        others = fc.leave_one_out(pooled, own, 10.0, 0.5)
        torch.testing.assert_close(others["sigma"][0], torch.tensor(expected, dtype=f64), rtol=0, atol=5e-6)
        assert others["n"].item() == 100 - own["n"].item()


def test_spec_F6_leave_one_out_with_momentum_is_never_the_raw_subtraction():
    raw = fc.pool([statistics(sigma, [n]) for sigma, n in zip(FIVE, FIVE_N, strict=True)])
    old = statistics(torch.eye(2)[None] * 0.5, [100.0])
    pooled = fc.with_momentum(old, raw, 0.9)
    torch.testing.assert_close(pooled["sigma"][0], torch.tensor([[0.68, 0.015], [0.015, 0.52]], dtype=f64))
    trap = (100 * pooled["sigma"][0] - 60 * FIVE[2, 0]) / 40
    torch.testing.assert_close(trap, torch.tensor([[-2.8, 0.0375], [0.0375, 0.55]], dtype=f64))
    assert torch.linalg.eigvalsh(trap)[0].item() == pytest.approx(-2.8004, abs=5e-5)
    # the client's share of the same history: 60 of the old 100 samples at .5 I, then 60 of its own
    own = fc.with_momentum(statistics(torch.eye(2)[None] * 0.5, [60.0]), statistics(FIVE[2], [60.0]), 0.9)
    others = fc.leave_one_out(pooled, own, 10.0, 0.5)["sigma"][0]
    wanted = 0.9 * 0.5 * torch.eye(2, dtype=f64) + 0.1 * torch.tensor([[1.25, 0.375], [0.375, 1]], dtype=f64)
    torch.testing.assert_close(others, wanted)
    assert torch.linalg.eigvalsh(others)[0].item() > 0.45


@pytest.mark.parametrize("eps2", [6.0, 0.01])
@pytest.mark.parametrize("b", [0.0, 0.5, 0.9])
def test_leave_one_out_is_the_sum_of_the_others_and_positive_definite_whatever_happened_before(b, eps2):
    """Random histories: clients miss rounds, come late, relabel between rounds and lose whole classes; Sigma
    travels as fp32."""
    M, J, d = 4, 3, 16
    s = eps2 / d
    for seed in range(50):
        g = generator(seed)
        data = {m: features(int(torch.randint(2, 60, (), generator=g)), d, 100 * seed + m) for m in range(M)}
        y = {m: labels(len(data[m]), J, 10 * seed + m) for m in range(M)}
        everyone, own, sums = None, {}, torch.zeros(M, J, d, d, dtype=f64)
        mass = torch.zeros(M, J, dtype=f64)
        rounds = int(torch.randint(1, 8, (), generator=g))
        for t in range(rounds):
            cohort = [m for m in range(M) if torch.rand((), generator=g) < 0.6] or [0]
            sums, mass = (sums, mass) if t == 0 else (b * sums, b * mass)
            parts = []
            for m in cohort:
                if torch.rand((), generator=g) < 0.5:
                    target = int(torch.randint(J, (), generator=g))
                    y[m] = torch.where(torch.rand(len(y[m]), generator=g) < 0.4, target, y[m])
                sigma, counts = fc.second_moments(data[m] * (1 if t % 2 else -1), y[m], J, s)
                part = statistics(sigma, counts)
                parts.append(part)
                weight = 1.0 if t == 0 else 1 - b
                sums[m] += weight * part["n"][:, None, None] * part["sigma"]
                mass[m] += weight * part["n"]
                if t == 0:
                    new = part
                else:
                    zero = {**part, "n": torch.zeros(J, dtype=f64)}
                    old, last = own.get(m, (zero, t - 1))
                    new = fc.with_momentum(fc.fade(old, b, t - 1 - last), part, b)
                own[m] = (new, t)
            everyone = fc.with_momentum(everyone, fc.pool(parts), b)
        received = {**everyone, "sigma": everyone["sigma"].float()}
        for m, (mine, last) in own.items():
            mine = fc.fade(mine, b, rounds - 1 - last)
            torch.testing.assert_close(mine["n"], mass[m])
            others = fc.leave_one_out(received, mine, 1.0, s)
            rest = mass.sum(0) - mass[m]
            for j in range(J):
                if everyone["sigma"][j].trace() == 0:
                    continue
                assert torch.linalg.eigvalsh(others["sigma"][j])[0].item() > s - 1e-6
                if rest[j] >= 1.0 + 1e-9 and rest[j] > 0.01 * mass.sum(0)[j]:
                    wanted = (sums.sum(0)[j] - sums[m, j]) / rest[j]
                    assert (others["sigma"][j] - wanted).abs().max().item() < 1e-5
                elif rest[j] < 1.0 - 1e-9:
                    torch.testing.assert_close(others["sigma"][j], received["sigma"][j].double())


def test_leave_one_out_falls_back_to_the_pooled_class_for_a_sole_holder_and_below_ten_other_samples():
    sigma = torch.eye(3).expand(3, 3, 3)
    everyone = statistics(2.0 * sigma, [50.0, 59.0, 60.0])
    others = fc.leave_one_out(everyone, statistics(3.0 * sigma, [50.0, 50.0, 50.0]), 10.0, 0.5)
    torch.testing.assert_close(others["sigma"][0], everyone["sigma"][0])  # A15: not dropped
    torch.testing.assert_close(others["sigma"][1], everyone["sigma"][1])
    torch.testing.assert_close(others["sigma"][2], torch.eye(3, dtype=f64) * (60 * 2 - 50 * 3) / 10)
    assert others["n"].tolist() == [50, 59, 10]


@pytest.mark.parametrize(("others", "least", "most"), [([1], 1.0, 1), ([10], 10.0, 200), ([3, 3, 4], 10.0, 200)])
def test_exactly_as_many_other_samples_as_wanted_are_enough_whatever_momentum_rounds_them_to(others, least, most):
    def held(count: int, scale: float) -> dict[str, Any]:
        return statistics(scale * (count > 0) * torch.eye(2)[None], [float(count)])

    for seed in range(30):
        everyone = own = None
        for count in torch.randint(most + 1, (12,), generator=generator(seed)).tolist():
            mine = held(count, 5.0)
            everyone = fc.with_momentum(everyone, fc.pool([mine, *(held(n, 2.0) for n in others)]), 0.9)
            own = fc.with_momentum(own, mine, 0.9)
        found = fc.leave_one_out(everyone, own, least, 0.5)
        assert found["n"].item() == pytest.approx(least)
        torch.testing.assert_close(found["sigma"][0], 2 * torch.eye(2, dtype=f64))


def test_leave_one_out_keeps_the_pooled_class_where_fp32_rounding_could_cost_positive_definiteness():
    s = 0.01 / 128
    everyone = statistics((0.5 * torch.eye(128))[None], [1e5])
    own = statistics((0.5 * torch.eye(128))[None], [1e5 - 20.0])
    assert fc.leave_one_out(everyone, own, 10.0, s)["n"].item() == 1e5
    assert fc.leave_one_out(everyone, own, 10.0, 6.0 / 128)["n"].item() == pytest.approx(20.0)


def test_spec_F8_mean_aware_pooling_by_hand():
    mean = torch.tensor([[[1.0, 0]], [[0, 1.0]]], dtype=f64)  # [client, J=1, d]
    centred = torch.stack([torch.diag(torch.tensor(v, dtype=f64))[None] for v in ([0.5, 0.1], [0.2, 0.4])])
    uncentred = centred + mean[:, :, :, None] * mean[:, :, None, :]
    pooled = fc.pool([statistics(uncentred[m], [n], mean[m]) for m, n in ((0, 10.0), (1, 30.0))])
    torch.testing.assert_close(pooled["mean"][0], torch.tensor([0.25, 0.75], dtype=f64))
    torch.testing.assert_close(pooled["sigma"][0], torch.diag(torch.tensor([0.525, 1.075], dtype=f64)))
    covariance = torch.tensor([[0.4625, -0.1875], [-0.1875, 0.5125]], dtype=f64)
    torch.testing.assert_close(pooled["sigma"][0] - torch.outer(pooled["mean"][0], pooled["mean"][0]), covariance)
    x = torch.tensor([[0.3, -0.4]], dtype=f64)
    q = fc.distances(x, fc.readout(pooled, 1.0)).item()
    away = x[0] - pooled["mean"][0]
    assert q == pytest.approx((away @ torch.linalg.inv(covariance) @ away).item(), rel=1e-12)


def test_spec_F10_trace_is_one_plus_eps2_for_every_local_pooled_averaged_and_left_out_class():
    eps2, d, J = 6.0, 32, 5
    part = [
        [
            statistics(*fc.second_moments(features(80, d, 10 * t + m), labels(80, J, 10 * t + m), J, eps2 / d))
            for m in (0, 1, 2)
        ]
        for t in (0, 1)
    ]
    everyone = fc.with_momentum(fc.pool(part[0]), fc.pool(part[1]), 0.9)
    own = fc.with_momentum(part[0][1], part[1][1], 0.9)
    others = fc.leave_one_out({**everyone, "sigma": everyone["sigma"].float()}, own, 10.0, eps2 / d)
    assert (others["n"] < everyone["n"]).all()
    for found in (part[0][0], fc.pool(part[0]), everyone, own, others):
        traces = found["sigma"].diagonal(dim1=1, dim2=2).sum(1)
        torch.testing.assert_close(traces, torch.full((J,), 1 + eps2, dtype=f64), rtol=1e-6, atol=0)


def test_momentum_starts_as_a_copy_and_is_the_plain_average_while_counts_are_constant():
    new, n = fc.second_moments(features(40, 6), labels(40, 2), 2, 1.0)
    old, _ = fc.second_moments(features(40, 6, 3), labels(40, 2), 2, 1.0)
    assert fc.with_momentum(None, statistics(old, n), 0.9)["sigma"].equal(old.double())
    mixed = fc.with_momentum(statistics(old, n), statistics(new, n), 0.9)
    torch.testing.assert_close(mixed["sigma"], 0.9 * old.double() + 0.1 * new.double())


@pytest.mark.parametrize("b", [0.0, 0.9])
def test_class_that_nobody_holds_this_round_keeps_its_sigma(b):
    sigma = torch.stack([torch.eye(3), 2 * torch.eye(3)])
    mixed = fc.with_momentum(
        statistics(sigma, [4.0, 4.0]), statistics(sigma * torch.tensor([[[3.0]], [[0.0]]]), [4.0, 0.0]), b
    )
    torch.testing.assert_close(mixed["sigma"][1], 2 * torch.eye(3, dtype=f64))
    assert mixed["n"].tolist() == pytest.approx([4.0, 4 * b])


# -------------------------------------------------------------------------------------------- the classifier


SIGMA_A, SIGMA_B = torch.diag(torch.tensor([4, 0.2], dtype=f64)), torch.diag(torch.tensor([0.2, 3], dtype=f64))


@pytest.mark.parametrize(
    ("z", "alpha", "qA", "qB"),
    [
        ([0.995, 1.0], 1, 5.247506, 5.283458),
        ([0.995, 1.0], 2, 5.006184, 4.986154),
        ([0.995, 1.0], 4, 5.000008, 4.987509),
        ([0.8, 0.6], 1, 1.96, 3.32),
        ([0.8, 0.6], 2, 3.006659, 4.004997),
        ([0.8, 0.6], 4, 3.872994, 4.472148),
    ],
)
def test_spec_F4_augmented_distances_by_hand(z, alpha, qA, qB):
    assert q_of(z, [SIGMA_A, SIGMA_B], alpha) == pytest.approx([qA, qB], abs=5e-6)


@pytest.mark.parametrize(("alpha", "expected"), [(1, 0.795760), (2, 0.730732), (4, 0.645463)])
def test_spec_F4_posterior_is_the_softmax_of_minus_q(alpha, expected):
    classes = fc.readout(statistics(torch.stack([SIGMA_A, SIGMA_B]), [1.0, 1.0]), alpha)
    score = fc.scores(torch.tensor([[0.8, 0.6]], dtype=f64), classes)
    assert score.softmax(1)[0, 0].item() == pytest.approx(expected, abs=1e-6)
    assert fc.confidence(score, "softmax").item() == pytest.approx(expected, abs=1e-6)


def boundary(alpha: float, shift: float) -> float:
    """|x/y| at which both classes are equally far, by bisection."""
    classes = fc.readout(statistics(torch.stack([SIGMA_A, SIGMA_B]), [1.0, 1.0]), alpha, shift=shift)
    low, high = 0.5, 1.5
    for _ in range(60):
        middle = (low + high) / 2
        qA, qB = fc.distances(torch.tensor([[middle, 1.0]], dtype=f64), classes)[0].tolist()
        low, high = (middle, high) if qA > qB else (low, middle)
    return low


@pytest.mark.parametrize(
    ("alpha", "shift", "expected"),
    [(1, 0, 0.991189), (2, 0, 0.999025), (4, 0, 0.999993), (1, 2 / 2, 0.959715), (1, 8 / 2, 0.917663)],
)
def test_spec_F4_decision_boundary(alpha, shift, expected):
    assert boundary(alpha, shift) == pytest.approx(expected, abs=1e-6)


def test_spec_F4_full_map_calls_the_point_b_even_at_alpha_1():
    classes = fc.readout(statistics(torch.stack([SIGMA_A, SIGMA_B]), [5.0, 5.0]), 1.0, posterior=True)
    score = fc.scores(torch.tensor([[0.995, 1.0]], dtype=f64), classes)[0]
    twice = [-2 * (value - math.log(0.5)) for value in score.tolist()]  # logdet + q
    assert twice == pytest.approx([5.0244, 4.7726], abs=5e-5)
    assert score.argmax().item() == 1


def test_map_prior_is_the_pooled_share_of_samples():
    sigma = torch.eye(4).expand(3, 4, 4)
    score = fc.scores(features(2, 4), fc.readout(statistics(sigma, [10.0, 30.0, 60.0]), 1.0, posterior=True))
    torch.testing.assert_close(score.softmax(1), torch.tensor([[0.1, 0.3, 0.6]] * 2, dtype=f64))


@pytest.mark.parametrize("alpha", [1, 2, 3, 4, 7, 8, 1.5, 2.25])
def test_distance_equals_the_eigenvalue_formula_for_whole_and_other_alpha(alpha):
    d = 128
    sigma, n = fc.second_moments(features(600, d), labels(600, 4), 4, 6.0 / d)
    z = features(50, d, 9)
    values, vectors = torch.linalg.eigh(sigma.double())
    coordinates = torch.einsum("jdk,nd->njk", vectors, z)
    wanted = (coordinates.square() * values**-alpha).sum(2) ** (1 / alpha)
    found = fc.distances(z, fc.readout(statistics(sigma, n), alpha))
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=0)


def test_distances_do_not_depend_on_the_block_size(monkeypatch):
    sigma, n = fc.second_moments(features(60, 6), labels(60, 3), 3, 1.0)
    z, classes = features(100, 6, 5), fc.readout(statistics(sigma, n), 2.0)
    whole = fc.distances(z, classes)
    split = torch.cat([fc.distances(z[i : i + 7], classes) for i in range(0, 100, 7)])
    torch.testing.assert_close(whole, split, rtol=1e-12, atol=0)


def test_unknown_class_is_infinitely_far_and_never_chosen():
    sigma = torch.eye(4).repeat(3, 1, 1)
    sigma[1] = 0
    for posterior in (False, True):
        classes = fc.readout(statistics(sigma, [5.0, 0.0, 5.0]), 1.0, posterior=posterior)
        score = fc.scores(features(6, 4), classes)
        assert (score[:, 1] == -float("inf")).all()
        assert score.softmax(1).isfinite().all()
        assert (score.argmax(1) == 0).all()  # equal classes 0 and 2: the lower


def orthogonal_model(J: int, r: int, c: float) -> dict[str, Any]:
    """Classes on r axes each with a share c of their mass there, the rest spread evenly over the others' axes."""
    d, s = 128, 6.0 / 128
    diagonal = torch.zeros(J, d, dtype=f64)
    diagonal[:, : J * r] = (1 - c) / (J * r - r)
    for j in range(J):
        diagonal[j, j * r : (j + 1) * r] = c / r
    return statistics(torch.diag_embed(diagonal + s), [100.0] * J)


@pytest.mark.parametrize(
    ("J", "r", "c", "mixed", "a", "b", "inverse"),
    [
        (10, 12, 1.0, False, 1.000, 0.990, 0.236),
        (10, 12, 0.6, False, 0.999, 0.926, 0.176),
        (10, 12, 0.3, False, 0.933, 0.554, 0.130),
        (10, 12, 0.3, True, 0.523, 0.272, 0.114),
        (10, 1, 0.6, False, 0.999, 0.925, 0.440),
        (10, 1, 0.6, True, 0.725, 0.385, 0.144),
        (100, 1, 0.6, False, 1.000, 0.989, 0.114),
        (100, 1, 0.6, True, 0.878, 0.251, 0.016),
    ],
)
def test_three_readings_of_the_posterior_on_orthogonal_classes(J, r, c, mixed, a, b, inverse):
    z = torch.zeros(1, 128, dtype=f64)
    z[0, 0] = math.sqrt(0.6) if mixed else 1.0
    z[0, r] = math.sqrt(0.4) if mixed else 0.0
    score = fc.scores(z, fc.readout(orthogonal_model(J, r, c), 2.0))
    found = [fc.confidence(score, kind).item() for kind in ("softmax", "softmax-half", "inverse")]
    assert found == pytest.approx([a, b, inverse], abs=1.5e-3)  # printed to three digits


def test_relabel_takes_the_best_of_all_classes_where_confident_and_the_lowest_of_equals():
    score = torch.tensor([[-1.0, -1.1, -9], [-9, -1, -9], [-2, -9, -2], [-9, -9, -1]], dtype=f64)
    given = torch.tensor([1, 0, 1, 2])
    assert fc.relabel(given, score, 0.6, "softmax").tolist() == [1, 1, 1, 2]
    assert fc.relabel(given, score, fc.confidence(score, "softmax")[0].item(), "softmax").tolist() == [0, 1, 1, 2]  # >=
    assert fc.relabel(given, score, 0.0, "softmax").tolist() == [0, 1, 0, 2]  # eta 0: no confidence is needed
    assert fc.relabel(given, score, 0.0, "inverse").tolist() == [0, 1, 0, 2]


def test_noisiest_clients_are_ranked_by_disagreement_then_by_lower_id_and_gated():
    r = {7: 0.5, 2: 0.5, 0: 0.1, 4: 0.9, 9: 0.3}
    assert fc.noisiest(r, 0.0, 3, 1) == ([4, 2, 7], [4])
    assert fc.noisiest(r, 0.0, 2, 5) == ([4, 2], [4, 2])  # k2 within k1
    assert fc.noisiest(r, 0.3, None, None) == ([4, 2, 7, 9], [4, 2, 7, 9])
    assert fc.noisiest(r, 0.95, 10, 5) == ([], [])
    assert fc.noisiest(r, 0.0, 0, 0) == ([], [])


def test_the_widest_gap_in_the_disagreements_parts_noisy_clients_from_clean_ones():
    """Draw 16 on CIFAR-10 at round 200, see docs/fedcova.md: twelve noisy clients, the least noisy at .515."""
    noisy = [0.873, 0.866, 0.855, 0.806, 0.769, 0.654, 0.651, 0.618, 0.601, 0.599, 0.589, 0.515]
    clean = [0.331, 0.289, 0.277, 0.244, 0.229, 0.228, 0.125, 0.108]
    r = dict(enumerate(clean + noisy))
    assert set(fc.noisiest(r, 0.0, None, None, gap=True)[0]) == set(range(8, 20))
    assert fc.noisiest(r, 0.0, 3, 1, gap=True) == ([8, 9, 10], [8])
    assert fc.noisiest(r, 0.86, None, None, gap=True)[0] == [8, 9]  # the gate holds too
    assert fc.noisiest({0: 0.75, 1: 0.5, 2: 0.25}, 0.0, None, None, gap=True)[0] == [0]  # of equal gaps the highest
    assert fc.noisiest({0: 0.4, 1: 0.4}, 0.0, None, None, gap=True) == ([], [])
    assert fc.noisiest({0: 0.4}, 0.0, None, None, gap=True) == ([], [])


DRAW_14 = (  # CIFAR-10 at round 200, see docs/fedcova.md: the twelve noisy clients, the eight clean ones
    [0.866, 0.736, 0.721, 0.718, 0.715, 0.711, 0.701, 0.683, 0.672, 0.604, 0.599, 0.597],
    [0.497, 0.44, 0.436, 0.281, 0.26, 0.255, 0.25, 0.232],
)


def test_two_means_part_noisy_clients_from_clean_ones_where_the_widest_gap_does_not():
    noisy, clean = DRAW_14
    r = dict(enumerate(clean + noisy))
    assert set(fc.noisiest(r, 0.0, None, None, two_means=True)[0]) == set(range(8, 20))
    assert set(fc.noisiest(r, 0.0, None, None, gap=True)[0]) > set(range(8, 20))
    assert fc.noisiest(r, 0.0, 3, 1, two_means=True) == fc.noisiest(r, 0.0, 3, 1)
    assert fc.noisiest(r, 0.73, None, None, two_means=True) == fc.noisiest(r, 0.73, None, None)  # the gate holds too
    assert fc.noisiest({0: 0.75, 1: 0.5, 2: 0.25}, 0.0, None, None, two_means=True)[0] == [0]  # of equals the smaller
    assert fc.noisiest({0: 0.4, 1: 0.4}, 0.0, None, None, two_means=True) == ([], [])
    assert fc.noisiest({0: 0.4}, 0.0, None, None, two_means=True) == ([], [])
    with pytest.raises(ValueError, match="take one"):
        fc.Settings(gap=True, two_means=True)
    assert fc.Settings(**FedCova.presets["best-found"].on("cifar10")[0]).two_means


@given(st.lists(st.integers(0, 1000), min_size=2, max_size=12, unique=True))
def test_two_means_are_the_division_with_the_least_squares(thousandths):
    r = {m: value / 1000 for m, value in enumerate(thousandths)}
    upper, _ = fc.noisiest(r, 0.0, None, None, two_means=True)

    def squares(chosen):
        groups = [r[m] for m in chosen], [r[m] for m in r if m not in chosen]
        return sum(sum((value - fmean(group)) ** 2 for value in group) for group in groups)

    ranking = sorted(r, key=lambda m: -r[m])
    assert squares(upper) == pytest.approx(min(squares(ranking[:k]) for k in range(1, len(r))), abs=1e-12)


def test_spec_F7_phi_by_hand_and_at_random():
    v = torch.tensor([[1.0, 0], [0, 1.0], [0.5**0.5, 0.5**0.5]], dtype=f64)
    assert fc.orthogonality(v) == pytest.approx(0.471405, abs=5e-7)
    random = [fc.orthogonality(features(10, 128, seed)) for seed in range(40)]
    assert sum(random) / 40 == pytest.approx(0.0705, abs=0.003)


# ------------------------------------------------------------------------------------- schedule and presets


def schedule(settings: dict[str, Any], rounds: int) -> list[int]:
    method = FedCova(Settings(**settings))
    return [t for t in range(rounds + 50) if method.corrects(t, rounds)]


def test_schedule_is_the_papers_at_500_rounds_and_scaled_at_50():
    assert schedule({}, 500) == list(range(200, 500, 30))
    assert schedule({}, 50) == list(range(20, 50, 3))
    assert schedule({}, 5) == [2, 3, 4]  # the period is at least 1
    assert schedule({"correct": False}, 500) == []


def test_schedule_of_digits_is_30_and_60_of_100():
    settings, protocol = FedCova.presets["best-found"].on("digits")
    assert schedule(settings, 100) == [30, 60]
    assert protocol == {"batch": 32}  # its best learning rate there is the shared one, .1


def test_every_preset_is_valid_on_every_data_set_and_lists_only_what_differs_from_the_defaults():
    defaults = Settings().model_dump()
    for preset in FedCova.presets.values():
        for dataset in ("digits", "cifar10", "cifar100", "clothing1m", "other"):
            settings, protocol = preset.on(dataset)
            chosen = Settings(**settings).model_dump()
            assert all(chosen[name] != defaults[name] for name in settings)
            Protocol(**{**Protocol().model_dump(), **protocol})


def test_best_found_is_the_default_preset_and_paper_literal_is_the_text():
    assert next(iter(FedCova.presets)) == "best-found"
    found = Settings(**FedCova.presets["best-found"].on("cifar10")[0])
    assert (found.head, found.momentum, found.gate > 0) == ("bn", 0.9, True)
    assert FedCova.presets["best-found"].on("cifar10")[1] == {"batch": 512}
    literal = Settings(**FedCova.presets["paper-literal"].on("cifar10")[0])
    wanted = ("fc", 128, 6.0, 2.0, 0.5, 0.9, 10, 5, 0.0, "softmax")
    got = (literal.head, literal.d, literal.eps2, literal.alpha, literal.eta, literal.momentum, literal.k1, literal.k2)
    assert (*got, literal.gate, literal.confidence) == wanted
    assert FedCova.presets["paper-literal"].on("cifar10")[1] == {"batch": 128}
    assert schedule(FedCova.presets["paper-literal"].on("clothing1m")[0], 50) == []


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("no-corrector", {"correct": False}),
        ("no-augmentation", {"alpha": 1.0}),
        ("no-alignment", {"align": False}),
        ("no-tolerance", {"eps2": 0.01}),
        ("mean-aware", {"mean_aware": True}),
    ],
)
@pytest.mark.parametrize("dataset", ["cifar10", "digits", "clothing1m"])
def test_ablation_differs_from_best_found_in_one_setting(name, change, dataset):
    best, protocol = FedCova.presets["best-found"].on(dataset)
    assert FedCova.presets[name].on(dataset) == ({**best, **change}, protocol)


def test_defaults_are_the_specification_s():
    wanted = Settings(
        d=128, eps2=6.0, head="fc", head_width=None, last_batch="merge", cov_features="local_after", cov_view="plain",
        momentum=0.9, align=True, mean_aware=False, alpha=2.0, classifier="augmented", classifier_eps2=None,
        correct=True, correct_start=0.4, correct_period=0.06, correct_stop=1.0, k1=10, k2=5, gate=0.0, gap=False,
        two_means=False, score_against="current", eta=0.5, confidence="softmax", loo_min=10.0,
    )  # fmt: skip
    assert Settings().model_dump() == wanted.model_dump()
    assert wanted.model_fields_set == set(Settings.model_fields)  # none is left to its own default


@pytest.mark.parametrize("bad", [{"classifier": "map", "align": False}, {"classifier": "map", "confidence": "inverse"}])
def test_settings_that_contradict_each_other_are_refused(bad):
    with pytest.raises(ValueError, match="classifier=map"):
        Settings(**bad)


# ------------------------------------------------------------------------------------------- a whole federation


class Side:
    """The least of both sides: full-batch steps of plain SGD, no augmentation."""

    told: dict = {}  # noqa: RUF012

    def __init__(self, world: Federation, exchange: int) -> None:
        self.world, self.round, self.exchange = world, world.round, exchange
        self.clients, self.classes, self.protocol = len(world.x), world.J, world.protocol
        self.used: set = set()

    def rng(self, name):
        raise AssertionError("FedCova draws nothing itself")

    seed = rng

    def once(self, *what):
        assert what not in self.used, f"{what} twice in one call"
        self.used.add(what)

    def model(self, weights=None, name="main", *, frozen=False):
        self.once("model", name)
        torch.manual_seed(0)
        network = self.world.method.network(Encoder(classes=self.classes))
        if weights is not None:
            network.load_state_dict(weights)
        return network.eval().requires_grad_(False) if frozen else network

    def batch_sizes(self, **_):
        raise AssertionError

    def fit(self, network, loss, *, labels, given, last_batch, **rest):
        assert not rest
        assert loss.__closure__ is None
        self.once("stream", "fit")
        self.world.fits.append(
            {"round": self.round, "client": self.id, "labels": labels.clone(), "last_batch": last_batch}
        )
        given = {name: torch.tensor(v, dtype=f64) if isinstance(v, float) else v for name, v in given.items()}
        optimiser, zero, x = torch.optim.SGD(network.parameters(), 0.3), torch.tensor(0), self.world.x[self.id]
        network.train()
        for _ in range(self.world.steps):
            value = loss(network, Batch((x,), labels, torch.arange(len(x)), zero, zero, given=given))
            optimiser.zero_grad()
            value.backward()
            optimiser.step()
        return Fit(value.item(), None, {}, self.world.steps)

    def apply(self, function, *, view="plain", frozen=None, **rest):
        assert not rest
        assert not any(network.training for network in frozen.values())
        self.once("stream", "apply")
        x, zero = self.world.x[self.id], torch.tensor(0)
        self.world.views.append(view)
        with torch.no_grad():
            return function(Batch((x,), None, torch.arange(len(x)), zero, zero, frozen=frozen))


class FakeClient(Side, Client):
    pass


class FakeServer(Side, Server):
    shape, public = (1, 4, 4), None

    def cohort(self, name="cohort"):
        self.once("cohort", name)
        self.world.draws += 1
        g = generator(1000 * self.round + self.exchange)
        share = self.protocol.participation
        return tuple(sorted(torch.randperm(self.clients, generator=g)[: max(1, int(share * self.clients))].tolist()))

    def note(self, **values):
        self.world.notes.append((self.round, values))

    def claim(self, noisy_clients):
        self.world.claims.append((self.round, list(noisy_clients)))


@dataclass
class Federation:
    """Clients with clustered images, of whom the first two have most of their labels wrong."""

    method: Any
    protocol: Protocol = field(default_factory=lambda: Protocol(rounds=10))
    M: int = 5
    J: int = 3
    n: int = 60
    steps: int = 10

    def __post_init__(self) -> None:
        self.round, self.states, self.state = 0, {}, None
        self.fits, self.views, self.notes, self.claims, self.exchanges = [], [], [], [], []
        self.draws = 0
        centres = 2.5 * torch.randn(self.J, 1, 4, 4, generator=generator(5))
        self.truth = {m: torch.arange(self.n + m) % self.J for m in range(self.M)}
        self.x = {m: centres[self.truth[m]] + images(self.n + m, m) for m in range(self.M)}
        self.given = {m: y.clone() for m, y in self.truth.items()}
        for m, share in ((0, 0.7), (1, 0.5)):
            wrong = torch.rand(len(self.given[m]), generator=generator(50 + m)) < share
            self.given[m][wrong] = torch.randint(self.J, (int(wrong.sum()),), generator=generator(60 + m))

    def server(self, exchange: int = 0) -> FakeServer:
        return FakeServer(self, exchange)

    def client(self, m: int, exchange: int) -> FakeClient:
        side = FakeClient(self, exchange)
        side.id, side.size, side.labels, side.state = m, len(self.given[m]), self.given[m].clone(), self.states.get(m)
        return side

    def run(self, rounds: int) -> Federation:
        if self.state is None:
            self.state = self.method.init(self.server())
        for _ in range(rounds):
            closed, exchange = False, 0
            while not closed:
                closed = self.one(exchange)
                exchange += 1
            self.round += 1
        return self

    def one(self, exchange: int) -> bool:
        before = digest(self.state)
        plan = self.method.plan(self.state, self.server(exchange))
        uploads, replies = [], {}
        for m in plan.cohort:
            if m not in self.states:
                self.states[m] = self.method.join(self.client(m, exchange))
            message = {**plan.message, **plan.private.get(m, {})}
            written = writes(message)
            reply: Reply = self.method.client(plan.task, message, self.client(m, exchange))
            assert writes(message) == written, "the client wrote into its message"
            check(reply.upload, "upload")
            check(reply.state if reply.state is not KEEP else None, "state")
            self.states[m] = self.states[m] if reply.state is KEEP else reply.state
            replies[m] = reply
            uploads.append(Upload(m, len(self.given[m]), reply.upload))
        new = self.method.aggregate(self.state, uploads, self.server(exchange))
        check(new, "state")
        assert digest(self.state) == before, "the server wrote into its state"
        self.exchanges.append({"round": self.round, "plan": plan, "replies": replies, "before": self.state})
        self.state = new
        return plan.closes_round

    def accuracy(self, name: str = "main") -> float:
        by = self.method.predictors(self.state, self.server())[name]
        hits = [(by(self.x[m]).argmax(1) == self.truth[m]).double().mean().item() for m in range(self.M)]
        return sum(hits) / self.M

    def noise(self) -> float:
        wrong = sum((self.states[m]["labels"] != self.truth[m]).sum().item() for m in range(self.M))
        return wrong / sum(len(y) for y in self.truth.values())


def federation(rounds: int = 0, participation: float = 1.0, total: int = 10, **settings: Any) -> Federation:
    method = FedCova(Settings(**{"d": 8, "head": "bn", **settings}))
    return Federation(method, Protocol(rounds=total, participation=participation)).run(rounds)


SMALL = {"correct_start": Rounds(3), "correct_period": Rounds(2), "correct_stop": Rounds(6)}


def test_round_is_score_then_train_when_it_corrects_and_train_alone_otherwise():
    world = federation(7, **SMALL)
    tasks = [(e["round"], e["plan"].task, e["plan"].closes_round) for e in world.exchanges]
    ordinary = [(t, "train", True) for t in range(7) if t not in (3, 5)]
    corrections = [step for t in (3, 5) for step in ((t, "score", False), (t, "train", True))]
    assert tasks == sorted([*ordinary, *corrections])


def test_global_current_closes_each_round_with_statistics_under_the_new_weights():
    world = federation(5, cov_features="global_current", **SMALL)
    tasks = [(e["round"], e["plan"].task, e["plan"].closes_round) for e in world.exchanges]
    wanted = [(t, task, last) for t in range(5) for task, last in (("train", False), ("statistics", True))]
    wanted.insert(2 * 3, (3, "score", False))
    assert tasks == wanted
    last, network = world.exchanges[-1], world.server().model(world.state["weights"], frozen=True)
    assert digest(last["plan"].message["weights"]) == digest(world.state["weights"])
    for m, reply in last["replies"].items():
        sigma, counts = fc.second_moments(network(world.x[m]), world.states[m]["labels"], 3, 0.75)
        torch.testing.assert_close(reply.upload["statistics"]["sigma"], sigma)
        assert reply.upload["statistics"]["counts"].equal(counts)


@pytest.mark.parametrize("which", ["local_after", "global_received"])
def test_covariances_are_measured_under_the_chosen_encoder(which):
    world = federation(2, cov_features=which)
    last = world.exchanges[-1]
    for m, reply in last["replies"].items():
        under = reply.upload["weights"] if which == "local_after" else last["plan"].message["weights"]
        network = world.server().model(under, frozen=True)
        sigma, _ = fc.second_moments(network(world.x[m]), world.given[m], 3, 0.75)
        torch.testing.assert_close(reply.upload["statistics"]["sigma"], sigma)


def test_setting_last_batch_reaches_fit_and_cov_view_reaches_apply():
    assert {fit["last_batch"] for fit in federation(1).fits} == {"merge"}
    for choice in ("keep", "drop"):
        assert {fit["last_batch"] for fit in federation(1, last_batch=choice).fits} == {choice}
    assert set(federation(1).views) == {"plain"}
    assert set(federation(1, cov_view="train").views) == {"train"}


def test_disagreement_is_always_measured_on_plain_images():
    views = federation(4, cov_view="train", **SMALL).views
    assert views == ["train"] * 15 + ["plain"] * 5 + ["train"] * 5  # round 3 scores first


def test_weights_are_averaged_by_all_samples_of_a_client():
    method, world = FedCova(Settings(d=3)), federation()
    statistics = {"sigma": torch.eye(3).repeat(2, 1, 1), "counts": torch.tensor([5, 5]), "mean": None}
    uploads = [
        Upload(m, size, {"weights": {"w": torch.tensor([value])}, "statistics": statistics})
        for m, size, value in ((0, 10, 1.0), (1, 30, 5.0))
    ]
    state = {"weights": {}, "classifier": None, "raw": None, "turn": None}
    assert method.aggregate(state, uploads, world.server())["weights"]["w"].item() == 4.0


def test_nothing_predicts_before_the_first_aggregate_and_six_readouts_do_after():
    world = federation()
    world.state = world.method.init(world.server())
    assert world.method.predictors(world.state, world.server()) == {}
    assert world.method.diagnostics(world.state) == {}
    world.run(1)
    found = world.method.predictors(world.state, world.server())
    assert list(found) == ["main", "alpha1", "alpha2", "alpha4", "alpha7", "raw"]
    score = {name: by(world.x[0]) for name, by in found.items()}
    assert all(value.shape == (60, 3) for value in score.values())
    assert score["main"].equal(score["alpha2"])
    assert score["main"].equal(score["raw"])  # of one round only
    world.run(1)
    found = world.method.predictors(world.state, world.server())
    assert not found["main"](world.x[0]).equal(found["raw"](world.x[0]))
    assert "raw" not in (w := federation(1, momentum=0.0)).method.predictors(w.state, w.server())


def test_correction_is_impossible_before_there_is_a_classifier():
    world = federation(2, correct_start=Rounds(0), correct_period=Rounds(1))
    assert [e["plan"].task for e in world.exchanges] == ["train", "score", "train"]


def test_readouts_of_one_batch_share_a_forward_pass_and_never_a_stale_one():
    world = federation(2)
    found = world.method.predictors(world.state, world.server())
    x = world.x[0].clone()
    first = found["main"](x)
    features_of = found["main"].__closure__  # both readouts see the same features
    assert features_of is not None
    calls = []
    network = next(c.cell_contents for c in features_of if isinstance(c.cell_contents, fc.OnceABatch)).network
    network.register_forward_hook(lambda *_: calls.append(1))
    found["alpha7"](x)
    assert calls == []
    x.copy_(world.x[1][:60])  # the same tensor with other images in it
    second = found["main"](x)
    assert calls == [1]
    assert not first.equal(second)
    with torch.inference_mode():
        hidden = world.x[2].clone()
        found["main"](hidden)
        found["main"](hidden)
    assert len(calls) == 3


def test_training_teaches_the_classes_and_correction_removes_noise():
    world = federation(4, k1=None, k2=None, gate=0.2, eta=0.0, **SMALL)
    before = federation(3, k1=None, k2=None, gate=0.2, eta=0.0, **SMALL).noise()
    assert world.accuracy() > 0.9
    assert before > 0.1
    assert world.noise() < before / 2
    assert dict(world.claims)[3] == [0, 1]  # the two noisy clients, and no clean one


def test_scored_against_given_labels_a_corrected_client_stays_a_suspect():
    """Against its corrected labels it agrees, so a later and better encoder never corrects them again."""
    last: dict[str, list[float]] = {}
    for against in ("current", "given"):
        world = federation(6, k1=None, k2=None, gate=0.2, eta=0.0, score_against=against, **SMALL)
        scores = [e for e in world.exchanges if e["plan"].task == "score"]
        assert [e["round"] for e in scores] == [3, 5]
        last[against] = [scores[-1]["replies"][m].upload["disagreement"] for m in (0, 1)]  # the two noisy clients
    assert max(last["current"]) < 0.2 < min(last["given"])


def test_chosen_clients_relabel_before_training_and_train_on_the_new_labels_and_others_do_not():
    world = federation(4, k1=1, k2=0, eta=0.0, **SMALL)
    chosen = dict(world.claims)[3]
    assert len(chosen) == 1
    score, train = world.exchanges[-2], world.exchanges[-1]
    for m in range(world.M):
        message = train["plan"].private[m]
        assert message == {"correct_me": m in chosen, "remove_me": False}
        reply, now = train["replies"][m], world.states[m]["labels"]
        fitted = next(f["labels"] for f in world.fits if f["round"] == 3 and f["client"] == m)
        assert fitted.equal(now)
        assert reply.claims.labels.equal(now)
        assert reply.claims.noisy is (m in chosen)
        assert reply.upload["statistics"]["counts"].tolist() == torch.bincount(now, minlength=3).tolist()
        assert reply.metrics["relabelled"] == pytest.approx((now != world.given[m]).double().mean().item())
        if m not in chosen:
            assert now.equal(world.given[m])
        assert world.states[m]["proposed"] is None
    assert all(reply.claims.labels is None for reply in score["replies"].values())
    assert train["replies"][chosen[0]].metrics["relabelled"] > 0


def test_who_was_corrected_once_stays_suspected_and_is_claimed_noisy_until_the_server_says_otherwise():
    world = federation(3, k1=1, k2=0, **SMALL)
    world.state = {**world.state, "suspects": [4]}
    world.run(2)
    score, corrected, later = world.exchanges[-3:]
    (chosen,) = [m for m in range(5) if corrected["plan"].private[m]["correct_me"]]
    assert chosen != 4
    assert world.state["suspects"] == world.claims[-1][1] == sorted([chosen, 4])
    for e in (corrected, later):
        assert [m for m, reply in e["replies"].items() if reply.claims.noisy] == [chosen]
    assert all(reply.claims.noisy is None for reply in score["replies"].values())


def test_server_s_two_bits_choose_between_own_labels_and_the_two_proposals():
    world = federation(1)
    kept, pooled, external = (torch.full((60,), j) for j in range(3))
    for correct, remove, wanted in ((False, False, kept), (True, False, pooled), (True, True, external)):
        message = {"weights": world.state["weights"], "correct_me": correct, "remove_me": remove}
        proposed = {"global": pooled, "external": external}
        world.states[0] = {**world.states[0], "labels": kept, "proposed": proposed}
        reply = world.method.client("train", message, world.client(0, 1))
        assert reply.state["labels"].equal(wanted)
        assert reply.claims.labels.equal(wanted)
        assert world.fits[-1]["labels"].equal(wanted)


def test_unsure_samples_keep_the_labels_as_corrected_so_far():
    world = federation(3, eta=1.0, **SMALL)
    corrected = (world.given[0] + 1) % 3
    world.states[0] = {**world.states[0], "labels": corrected}
    message = {"weights": world.state["weights"], "classifier": world.state["classifier"]}
    proposed = world.method.client("score", message, world.client(0, 0)).state["proposed"]
    assert proposed["global"].equal(corrected)
    assert proposed["external"].equal(corrected)


@pytest.mark.parametrize("kind", ["softmax-half", "inverse"])
def test_both_proposals_ask_for_the_chosen_confidence(kind, monkeypatch):
    world = federation(3, **SMALL)
    z = world.server().model(world.state["weights"], frozen=True)(world.x[0])
    score = fc.scores(z, fc.readout(world.state["classifier"], 2.0))
    eta = fc.confidence(score, kind).sort().values[29:31].mean().item()  # between the middle two of 60
    wanted = fc.relabel(world.given[0], score, eta, kind)
    assert not wanted.equal(fc.relabel(world.given[0], score, eta, "softmax"))
    monkeypatch.setattr(fc, "leave_one_out", lambda everyone, *_: everyone)
    method = FedCova(Settings(d=8, head="bn", confidence=kind, eta=eta, **SMALL))
    message = {"weights": world.state["weights"], "classifier": world.state["classifier"]}
    proposed = method.client("score", message, world.client(0, 0)).state["proposed"]
    assert proposed["global"].equal(wanted)
    assert proposed["external"].equal(wanted)


@pytest.mark.parametrize(
    ("settings", "chosen"),
    [({}, [0, 1, 2, 3, 4]), ({"gap": True}, [0]), ({"two_means": True}, [0, 1, 2]), ({"gate": 0.56}, [0, 1])],
    ids=str,
)
def test_the_server_divides_clients_as_it_is_set(settings, chosen):
    world = federation(3, k1=None, **settings, **SMALL)
    uploads = [Upload(m, 60, {"disagreement": r}) for m, r in enumerate([0.95, 0.6, 0.55, 0.22, 0.17])]
    turn = world.method.aggregate(world.state, uploads, world.server())["turn"]
    assert (turn["correct"], turn["remove"]) == (chosen, chosen[:5])


def test_statistics_and_claims_are_of_the_corrected_labels_in_an_exchange_of_their_own_too():
    world = federation(1, cov_features="global_current", mean_aware=True)
    corrected = (world.given[0] + 1) % 3
    world.states[0] = {**world.states[0], "labels": corrected, "noisy": True}
    reply = world.method.client("statistics", {"weights": world.state["weights"]}, world.client(0, 1))
    assert reply.claims.labels.equal(corrected)
    assert reply.claims.noisy is True
    z = world.server().model(world.state["weights"], frozen=True)(world.x[0])
    torch.testing.assert_close(reply.upload["statistics"]["mean"], fc.first_moments(z, corrected, 3))


def test_flips_back_to_the_given_label_are_counted():
    method = FedCova(Settings(d=8, head="bn"))
    world = Federation(method).run(1)
    message = {"weights": world.state["weights"], "correct_me": True, "remove_me": False}
    given = world.given[0]
    other = (given + 1) % 3
    world.states[0] = {**world.states[0], "labels": other.clone(), "proposed": {"global": given, "external": given}}
    metrics = method.client("train", message, world.client(0, 1)).metrics
    assert (metrics["relabelled"], metrics["flipped_back"]) == (1.0, 1.0)
    labels, proposed = given.clone(), given.clone()
    labels[:10], proposed[5:10] = other[:10], (given[5:10] + 2) % 3  # five back to the given label, five to a third
    world.states[0] = {**world.states[0], "labels": labels, "proposed": {"global": proposed, "external": given}}
    metrics = method.client("train", message, world.client(0, 1)).metrics
    assert (metrics["relabelled"], metrics["flipped_back"]) == (pytest.approx(10 / 60), pytest.approx(5 / 60))


@pytest.mark.parametrize(
    ("participation", "momentum", "mean_aware", "align", "cov_features"),
    [
        (1.0, 0.9, False, True, "local_after"),
        (0.5, 0.9, False, True, "local_after"),
        (0.5, 0.0, False, True, "global_received"),
        (0.7, 0.5, True, True, "local_after"),
        (0.5, 0.9, False, False, "global_current"),
    ],
)
def test_external_corrector_of_a_running_federation_is_the_classifier_of_the_other_clients_alone(
    participation, momentum, mean_aware, align, cov_features, monkeypatch
):
    """Replays every upload of the run with the server's momentum, leaves one client out of the sums, and finds what
    that client classified with, and the labels that it proposed."""
    used, original = [], fc.leave_one_out
    monkeypatch.setattr(fc, "leave_one_out", lambda *a: used.append((a[0], original(*a))) or used[-1][1])
    world = federation(
        9, participation, momentum=momentum, mean_aware=mean_aware, align=align, cov_features=cov_features,
        eta=0.0, k1=2, k2=2, loo_min=1.0, correct_start=Rounds(2), correct_period=Rounds(1),
    )  # fmt: skip
    b, compared, calls = momentum, 0, iter(used)
    zero = {
        "n": torch.zeros(3, dtype=f64),
        "sigma": torch.zeros(3, 8, 8, dtype=f64),
        "mean": torch.zeros(3, 8, dtype=f64),
    }
    total = dict.fromkeys(range(world.M), zero)  # sums, not ratios
    for e in world.exchanges:
        if e["plan"].task == "score":
            network = world.server().model(e["plan"].message["weights"], frozen=True)
            for m, reply in e["replies"].items():
                if e["before"]["classifier"] is None or not any(m in old["replies"] for old in _before(world, e)):
                    continue
                everyone, others = next(calls)
                rest = {name: sum(total[k][name] for k in total if k != m) for name in zero}
                for j in range(3):
                    if rest["n"][j] > 1.0 + 1e-9:
                        assert others["n"][j].item() == pytest.approx(rest["n"][j].item())
                        for name in ("sigma", "mean") if mean_aware else ("sigma",):
                            wanted = rest[name][j] / rest["n"][j]
                            torch.testing.assert_close(others[name][j], wanted, rtol=0, atol=2e-5)
                        compared += 1
                    elif rest["n"][j] < 1.0 - 1e-9:
                        assert others["sigma"][j].equal(everyone["sigma"][j])
                score = fc.scores(network(world.x[m]), fc.readout(others, 2.0))
                assert reply.state["proposed"]["external"].equal(score.argmax(1))
        if "statistics" in next(iter(e["replies"].values())).upload:
            for m in range(world.M):
                total[m] = {name: (b if e["round"] else 0.0) * value for name, value in total[m].items()}
            for m, reply in e["replies"].items():
                up, add = reply.upload["statistics"], dict(zero)
                add["n"] = (up["counts"] if align else up["counts"] > 0).double() * (1 - b if e["round"] else 1.0)
                add["sigma"] = add["n"][:, None, None] * up["sigma"].double()
                if mean_aware:
                    add["mean"] = add["n"][:, None] * up["mean"].double()
                total[m] = {name: total[m][name] + add[name] for name in zero}
    assert next(calls, None) is None
    assert compared >= 10


def _before(world: Federation, exchange: dict[str, Any]) -> list[dict[str, Any]]:
    """Exchanges of earlier rounds."""
    return [old for old in world.exchanges if old["round"] < exchange["round"]]


def test_raw_readout_takes_last_round_s_sigma_for_a_class_that_this_cohort_does_not_hold():
    method, world = FedCova(Settings(d=3)), federation()
    state = {"weights": {}, "classifier": None, "raw": None, "turn": None}
    for scale, counts in ((1.0, [5, 5]), (2.0, [5, 0]), (3.0, [0, 0])):
        sigma = scale * torch.eye(3).repeat(2, 1, 1) * (torch.tensor(counts) > 0)[:, None, None]
        content = {"weights": {}, "statistics": {"sigma": sigma, "counts": torch.tensor(counts), "mean": None}}
        state = method.aggregate(state, [Upload(0, 10, content)], world.server())
    assert state["raw"]["sigma"][:, 0, 0].tolist() == [2.0, 1.0]


def test_server_sigma_is_the_count_weighted_mean_of_uploads_with_momentum():
    world = federation(3, correct=False)
    wanted_sum, wanted_n = 0, 0
    for t, e in enumerate(world.exchanges):
        ups = [reply.upload["statistics"] for reply in e["replies"].values()]
        new_sum = sum(u["counts"].double()[:, None, None] * u["sigma"].double() for u in ups)
        new_n = sum(u["counts"].double() for u in ups)
        a, c = (0.0, 1.0) if t == 0 else (0.9, 1 - 0.9)
        wanted_sum, wanted_n = a * wanted_sum + c * new_sum, a * wanted_n + c * new_n
    torch.testing.assert_close(world.state["classifier"]["sigma"], wanted_sum / wanted_n[:, None, None])
    torch.testing.assert_close(world.state["classifier"]["n"], wanted_n)
    torch.testing.assert_close(world.state["raw"]["sigma"], new_sum / new_n[:, None, None])


def test_traffic_is_weights_sigma_and_n_down_and_weights_s_and_d_up_and_a_scalar_and_two_bits_more_when_correcting():
    world = federation(4, **SMALL)
    w, sigma = nbytes(world.state["weights"]), 3 * 8 * 8 * 4
    plans = {(e["round"], e["plan"].task): e for e in world.exchanges}
    first, ordinary = plans[0, "train"], plans[2, "train"]
    assert nbytes(first["plan"].message) == w
    assert nbytes(ordinary["plan"].message) == w + sigma + 3 * 8
    assert ordinary["plan"].private == {}
    assert nbytes(ordinary["replies"][0].upload) == w + sigma + 3 * 8
    score, train = plans[3, "score"], plans[3, "train"]
    assert nbytes(score["plan"].message) == w + sigma + 3 * 8
    assert nbytes(score["replies"][0].upload) == 8
    assert nbytes(train["plan"].message) == w
    assert nbytes(train["plan"].private[0]) == 2 * 8
    assert nbytes(train["replies"][0].upload) == w + sigma + 3 * 8


def test_cohort_is_drawn_once_a_round_and_stays_through_its_exchanges():
    world = federation(6, 0.5, cov_features="global_current", **SMALL)
    assert world.draws == 6
    for t in range(6):
        cohorts = {tuple(e["plan"].cohort) for e in world.exchanges if e["round"] == t}
        assert len(cohorts) == 1
        assert len(next(iter(cohorts))) == 2


def test_clients_keep_statistics_of_their_own_only_when_a_corrector_may_need_them():
    assert federation(1).states[0]["own"] is not None
    for settings in ({"correct": False}, {"k2": 0}, {"k1": 0}):
        assert federation(1, **settings).states[0]["own"] is None
    world = federation(5, **SMALL)
    assert world.states[0]["own"]["round"] == 4  # for the correction in round 5, the last
    assert world.run(1).states[0]["own"] is None


@pytest.mark.parametrize(("align", "least"), [(True, 10.0), (False, 1.0)])
def test_without_alignment_one_other_holder_is_enough_for_the_external_corrector(align, least, monkeypatch):
    asked, original = [], fc.leave_one_out
    monkeypatch.setattr(fc, "leave_one_out", lambda *a: asked.append(a[2]) or original(*a))
    federation(4, align=align, **SMALL)
    assert asked == [least] * 5


def test_ablation_no_corrector_equals_the_full_method_until_the_first_correction():
    full, without = federation(3, eta=0.0, **SMALL), federation(3, correct=False)
    assert digest(full.state) == digest(without.state)
    assert digest(full.run(3).state) != digest(without.run(3).state)
    assert without.claims == []
    assert all(without.states[m]["labels"].equal(without.given[m]) for m in range(5))


def test_ablation_no_augmentation_changes_readouts_but_no_training():
    two, one = federation(2, correct=False), federation(2, correct=False, alpha=1.0)
    assert digest(two.state) == digest(one.state)
    by = {name: w.method.predictors(w.state, w.server()) for name, w in (("two", two), ("one", one))}
    assert by["one"]["main"](two.x[0]).equal(by["two"]["alpha1"](two.x[0]))
    assert not by["one"]["main"](two.x[0]).equal(by["two"]["main"](two.x[0]))


def test_ablation_no_alignment_averages_holders_of_a_class_equally_and_leaves_non_holders_out():
    method = FedCova(Settings(d=4, align=False, correct=False))
    sigma = torch.stack([torch.eye(4), 3 * torch.eye(4)])
    empty = sigma * torch.tensor([[[2.0]], [[0.0]]])
    uploads = ((sigma, [90, 5]), (empty, [10, 0]))
    parts = [{"sigma": S, "counts": torch.tensor(D), "mean": None} for S, D in uploads]
    pooled = fc.pool([method._weighted(part) for part in parts])
    torch.testing.assert_close(pooled["sigma"][0], 1.5 * torch.eye(4, dtype=f64))
    torch.testing.assert_close(pooled["sigma"][1], 3 * torch.eye(4, dtype=f64))
    assert pooled["n"].tolist() == [2, 1]


def test_ablation_no_tolerance_reaches_the_loss_and_the_covariances():
    world = federation(2, eps2=0.01)
    trace = world.state["classifier"]["sigma"].diagonal(dim1=1, dim2=2).sum(1)
    torch.testing.assert_close(trace, torch.full((3,), 1.01, dtype=f64), rtol=1e-5, atol=0)
    assert digest(world.state["weights"]) != digest(federation(2).state["weights"])
    assert world.accuracy() > 0.5


def test_ablation_mean_aware_uploads_means_and_measures_distance_from_them():
    plain, aware = federation(2, correct=False), federation(2, correct=False, mean_aware=True)
    assert digest(plain.state["weights"]) == digest(aware.state["weights"])  # the loss knows no means
    assert plain.state["classifier"]["mean"] is None
    classifier = aware.state["classifier"]
    torch.testing.assert_close(classifier["sigma"], plain.state["classifier"]["sigma"])
    z = aware.server().model(aware.state["weights"], frozen=True)(aware.x[0]).double()
    centred = classifier["sigma"] - classifier["mean"][:, :, None] * classifier["mean"][:, None, :]
    assert torch.linalg.eigvalsh(centred).min().item() > 0.75 - 1e-6
    away = z[:, None, :] - classifier["mean"][None]
    wanted = -torch.linalg.solve(centred[None], away[..., None])[..., 0].norm(dim=2)  # alpha = 2
    found = aware.method.predictors(aware.state, aware.server())["main"](aware.x[0])
    torch.testing.assert_close(found, wanted)


def test_classifier_eps2_replaces_the_tolerance_wherever_sigma_classifies_and_nowhere_else():
    plain, other = federation(2, correct=False), federation(2, correct=False, classifier_eps2=0.4)
    assert digest(plain.state) == digest(other.state)
    shifted = {**plain.state["classifier"]}
    shifted["sigma"] = shifted["sigma"] + (0.4 - 6.0) / 8 * torch.eye(8, dtype=f64)
    assert torch.linalg.eigvalsh(shifted["sigma"]).min().item() > 0.05 - 1e-6  # still positive definite
    z = plain.server().model(plain.state["weights"], frozen=True)(plain.x[0])
    found = other.method.predictors(other.state, other.server())
    for name, alpha in (("main", 2.0), ("alpha1", 1.0), ("alpha4", 4.0), ("alpha7", 7.0)):
        torch.testing.assert_close(found[name](plain.x[0]), -fc.distances(z, fc.readout(shifted, alpha)))
    as_trained = plain.method.predictors(plain.state, plain.server())["main"](plain.x[0])
    assert found["eps2_as_trained"](plain.x[0]).equal(as_trained)


def test_external_corrector_falls_back_where_rounding_could_exceed_a_small_classifier_eps2():
    """Ten samples of the others in 100,000: fp32 leaves an error of 1e-4, far under s = .75 and over 1e-4 / 8."""
    world = federation(3, classifier_eps2=1e-4, **SMALL)
    part = statistics(*fc.second_moments(features(300, 8), labels(300, 3), 3, 0.75))
    rest = statistics(*fc.second_moments(features(3, 8, 1), torch.arange(3), 3, 0.75))
    part["n"], rest["n"] = torch.full((3,), 1e5 - 10, dtype=f64), torch.full((3,), 10.0, dtype=f64)
    everyone = fc.pool([part, rest])
    world.states[0] = {**world.states[0], "own": {"statistics": part, "round": 2}}
    message = {"weights": world.state["weights"], "classifier": {**everyone, "sigma": everyone["sigma"].float()}}
    proposed = world.method.client("score", message, world.client(0, 0)).state["proposed"]
    assert proposed["external"].equal(proposed["global"])


@pytest.mark.parametrize("eps2", [None, 2.0])
def test_map_classifier_predicts_by_the_log_posterior(eps2):
    world = federation(3, correct=False, classifier="map", classifier_eps2=eps2)
    score = world.method.predictors(world.state, world.server())["main"](world.x[2])
    classifier = world.state["classifier"]
    sigma = classifier["sigma"] + ((eps2 or 6.0) - 6.0) / 8 * torch.eye(8, dtype=f64)
    z = world.server().model(world.state["weights"], frozen=True)(world.x[2]).double()
    prior = classifier["n"] / classifier["n"].sum()
    gaussians = torch.distributions.MultivariateNormal(torch.zeros(8, dtype=f64), sigma)
    wanted = gaussians.log_prob(z[:, None, :]) + prior.log()
    torch.testing.assert_close(score.softmax(1), wanted.softmax(1))


def test_diagnostics_are_phi_eigenvalues_and_the_rate_reduction_of_all_data():
    world = federation(1, cov_features="global_current", correct=False)
    found = world.method.diagnostics(world.state)
    assert set(found) == {"phi", "eigenvalue_min", "eigenvalue_max", "rate_reduction"}
    assert found["eigenvalue_min"] >= 0.75 - 1e-6
    assert found["eigenvalue_max"] <= 1.75 + 1e-6
    values, vectors = torch.linalg.eigh(world.state["classifier"]["sigma"])
    assert found["eigenvalue_min"] == pytest.approx(values.min().item())
    assert found["eigenvalue_max"] == pytest.approx(values.max().item())
    top = [vectors[j, :, values[j].argmax()] for j in range(3)]
    cosines = [abs((top[i] @ top[j]).item()) for i in range(3) for j in range(3) if i != j]
    assert found["phi"] == pytest.approx(fmean(cosines))
    network = world.server().model(world.state["weights"], frozen=True)
    z = torch.cat([network(world.x[m]) for m in range(5)]).double()
    y = torch.cat([world.given[m] for m in range(5)])
    assert found["rate_reduction"] == pytest.approx(-coding_rate_loop(z, y, 0.75).item(), abs=1e-6)


def test_same_run_twice_gives_the_same_digest_and_nothing_outside_the_tree_is_kept():
    one, two = federation(5, 0.5, **SMALL), federation(5, 0.5, **SMALL)
    assert digest([one.state, one.states[0]]) == digest([two.state, two.states[0]])
    with pytest.raises(AttributeError, match="frozen"):
        one.method.remembered = 1


def test_run_resumed_from_bytes_goes_on_identically():
    from flnoisebench.trees import from_bytes, to_bytes

    whole, half = federation(6, 0.6, **SMALL), federation(3, 0.6, **SMALL)
    half.state = from_bytes(to_bytes(half.state))
    half.states = {m: from_bytes(to_bytes(state)) for m, state in half.states.items()}
    half.run(3)
    assert digest(half.state) == digest(whole.state)
    assert digest(list(half.states.values())) == digest(list(whole.states.values()))


def test_class_that_nobody_has_ever_held_stays_unknown_and_is_never_proposed():
    world = federation(eta=0.0, **SMALL)
    world.given = {m: y % 2 for m, y in world.given.items()}
    world.run(4)
    assert world.state["classifier"]["sigma"][2].abs().max() == 0
    score = world.method.predictors(world.state, world.server())["main"](world.x[0])
    assert (score[:, 2] == -float("inf")).all()
    assert all((world.states[m]["labels"] < 2).all() for m in range(5))
    assert all(math.isfinite(v) for v in world.method.diagnostics(world.state).values())


def test_messages_and_states_hold_no_gradient_and_only_plain_trees():
    world = federation(4, **SMALL)
    for e in world.exchanges:
        check(e["plan"].message, "message")
        check(dict(e["plan"].private.get(0, {})), "private")
    map_tensors(lambda tensor: pytest.fail("gradient") if tensor.requires_grad else tensor, world.states)
