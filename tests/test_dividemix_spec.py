"""DivideMix against its printed numbers, against a plain loop over its step, and against two FedAvgs in the warm-up.

Names with spec_ are the checkable facts of the method's specification, with the printed numbers.
"""

from __future__ import annotations

import copy
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from stopping import in_sessions, server_state

from flnoisebench import records, registry
from flnoisebench.api import Batch, Protocol, Rounds, Upload
from flnoisebench.engine import Lane, Look
from flnoisebench.executors import ClientError, Job, perform
from flnoisebench.settings import merged
from flnoisebench.testing import capture_safe, tiny_arrays, tiny_engine, tiny_run, watch_losses

METHODS = Path(__file__).parents[1] / "methods"
DivideMix = registry.load_method(f"{METHODS / 'dividemix.py'}:DivideMix")
FedAvg = registry.load_method(f"{METHODS / 'fedavg.py'}:FedAvg")
dm = sys.modules[DivideMix.__module__]
Settings = dm.Settings

f64 = torch.float64
NOISE = {"noise_rate": 0.3}


pytestmark = pytest.mark.usefixtures("one_thread")


def rows(*values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=f64)


def same_bits(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# -------------------------------------------------------------------------------------- the printed numbers


def test_spec_sharpen():
    found = dm.sharpen(rows([0.5, 0.3, 0.2]), 0.5)
    assert found[0].tolist() == pytest.approx([0.657895, 0.236842, 0.105263], abs=5e-7)


@pytest.mark.parametrize(
    ("w", "refined", "sharpened"),
    [
        (0.8, [0.84, 0.10, 0.06], [0.981090, 0.013904, 0.005006]),
        (0.3, [0.44, 0.35, 0.21], [0.537479, 0.340089, 0.122432]),
    ],
)
def test_spec_refine(w, refined, sharpened):
    found = dm.refine(torch.tensor([0]), torch.tensor([w], dtype=f64), rows([0.2, 0.5, 0.3]))
    assert found[0].tolist() == pytest.approx(refined, abs=1e-12)
    assert dm.sharpen(found, 0.5)[0].tolist() == pytest.approx(sharpened, abs=5e-7)


class OneDraw:
    """A numpy generator whose Beta law always says .3 and whose permutation is the reverse."""

    def beta(self, a: float, b: float, size: int) -> np.ndarray:
        return np.full(size, 0.3)

    def permutation(self, n: int) -> np.ndarray:
        return np.arange(n)[::-1]


def test_spec_mixing_takes_the_larger_weight_for_the_own_row():
    draw = dm.draw_mixing([2], 4.0, OneDraw())
    assert draw["weight"].tolist() == pytest.approx([0.7])
    step = {name: value[0] for name, value in draw.items()}
    mixed = dm.mix(torch.tensor([[1.0, 0, 0], [0, 0.5, 0.5]]), 1, step)
    assert mixed[0].tolist() == pytest.approx([0.7, 0.15, 0.15])


def test_spec_mean_of_the_mixing_weight():
    draw = dm.draw_mixing([1] * 200_000, 4.0, np.random.default_rng(0))
    assert draw["weight"].min() >= 0.5
    assert draw["weight"].mean().item() == pytest.approx(0.6367, abs=1e-3)  # of 200,000, standard error 2e-4


@pytest.mark.parametrize(
    ("r", "wanted"), [(10, 0.0), (10.5, 0.78125), (18, 12.5), (26, 25.0), (40, 25.0), (9, 0.0)], ids=str
)
def test_spec_ramp(r, wanted):
    since, i = divmod(r - 10, 1)  # W = 10; half of a round is step 2 of 4
    assert 25 * dm.ramp(since, torch.tensor(int(4 * i)), torch.tensor(4), 16).item() == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize("copies", [1, 7])
def test_spec_regularisation(copies):
    prior = torch.full((3,), 1 / 3, dtype=f64)
    skewed = rows([0.9, 0.05, 0.05], [0.5, 0.35, 0.15]).repeat(copies, 1)  # their mean is (.7, .2, .1)
    assert dm.imbalance(skewed.log(), prior).item() == pytest.approx(0.324287, abs=5e-7)
    even = rows([0.6, 0.3, 0.1], [0.2, 0.3, 0.5], [0.2, 0.4, 0.4])
    assert dm.imbalance(even.log(), prior).item() == pytest.approx(0, abs=1e-12)


def test_spec_negative_entropy():
    # fp32 inside
    assert dm.negative_entropy(rows([0.5, 0.3, 0.2]).log()).item() == pytest.approx(-1.029653, abs=1e-6)


def test_spec_unlabelled_loss_is_the_mean_over_classes_too():
    found = dm.squared_error(rows([0.6, 0.3, 0.1]), rows([0.7, 0.2, 0.1])).item()
    assert found == pytest.approx(0.0066667, abs=5e-8)


TEN = torch.tensor([0.1, 0.12, 0.08, 0.11, 0.09, 2.0, 2.1, 1.9, 2.05, 1.95], dtype=f64)


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1])
def test_spec_mixture_of_ten_losses(seed):
    model = dm.mixture(dm.scaled(TEN), Settings(), seed)
    assert sorted(model.means_[:, 0]) == pytest.approx([0.009901, 0.950495], abs=5e-7)
    division = dm.divide(dm.scaled(TEN), Settings(), seed)
    assert division.clean.tolist() == pytest.approx([1.0] * 5 + [0.0] * 5, abs=1e-12)
    assert division.labelled.tolist() == [0, 1, 2, 3, 4]
    assert division.unlabelled.tolist() == [5, 6, 7, 8, 9]
    assert division.decided


@pytest.mark.parametrize(("law", "kept"), [("normal", 0.47), ("exponential", 0.81), ("lognormal", 0.97)])
def test_spec_mixture_finds_two_heaps_in_one(law, kept):
    """The printed shares are of one seed each, which the seed and scikit-learn's version move: they must lie in the
    range of ten seeds, or within a hundredth of it."""
    found = []
    for seed in range(10):
        losses = torch.from_numpy(getattr(np.random.default_rng(seed), law)(size=2500))
        found.append(len(dm.divide(dm.scaled(losses), Settings(), seed).labelled) / 2500)
    assert min(found) - 0.01 < kept < max(found) + 0.01, found
    assert max(found) < 1


@pytest.mark.parametrize(
    ("dataset", "rounds", "wanted"),
    [("cifar10", 500, 17), ("cifar100", 500, 50), ("clothing1m", 50, 1), ("cifar10", 300, 10), ("cifar100", 300, 30)],
)
def test_spec_warm_up_is_the_codes_share_of_the_run(dataset, rounds, wanted):
    settings, _ = DivideMix.presets["default"].on(dataset)
    assert DivideMix(Settings(**settings))._warm_up(rounds) == wanted


@pytest.mark.parametrize(
    ("dataset", "preset", "rate", "wanted"),
    [
        ("cifar10", "default", 0.2, 0), ("cifar10", "default", 0.25, 0), ("cifar10", "default", 0.28, 25),
        ("cifar100", "default", 0.2, 25), ("cifar100", "default", 0.42, 150),
        ("cifar10", "asymmetric", 0.42, 0), ("clothing1m", "default", None, 0), ("cifar10", "code-literal", 0.1, 25),
    ],
)  # fmt: skip
def test_spec_lambda_u_follows_the_mean_noise_rate(dataset, preset, rate, wanted):
    settings, _ = DivideMix.presets[preset].on(dataset)
    told = {} if rate is None else {"noise_rate": rate}
    assert DivideMix(Settings(**settings))._lambda_u(told) == wanted


# ------------------------------------------------------------------------------------------------- the step


def network(seed: int, norm: bool = False) -> torch.nn.Module:
    torch.manual_seed(seed)
    middle = [torch.nn.BatchNorm1d(9)] if norm else []
    return torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(12, 9), *middle, torch.nn.ReLU(), torch.nn.Linear(9, 3)
    )


def a_batch(seed: int, *, unlabelled: bool = True, b: int = 5, u: int = 4, norm: bool = False) -> Batch:
    peer = network(seed + 50, norm).eval().requires_grad_(False)
    rng = np.random.default_rng(seed)
    draw = dm.draw_mixing([2 * (b + u * unlabelled)], 4.0, rng)
    one, two, three, four = (normal(n, 1, 3, 4, seed=10 * seed + i) for i, n in enumerate((b, b, u, u)))
    zero = torch.tensor(0)
    other = Batch((three, four), torch.zeros(u, dtype=torch.int64), torch.arange(u), zero, zero)
    return Batch(
        views=(one, two),
        y=torch.from_numpy(rng.integers(3, size=b)),
        index=torch.arange(b),
        step=torch.tensor(seed),
        steps=torch.tensor(5),
        sample={"clean": torch.from_numpy(rng.random(b)).float()},
        draw={name: value[0] for name, value in draw.items()},
        given={
            "prior": torch.tensor([0.5, 0.25, 0.25]),
            **{name: torch.tensor(value, dtype=f64) for name, value in
               {"temperature": 0.5, "balance": 0.7, "lambda_u": 25.0, "since": 2.0 + seed, "length": 16.0}.items()},
        },
        frozen={"peer": peer},
        other={"unlabelled": other} if unlabelled else {},
    )  # fmt: skip


def by_hand(net: torch.nn.Module, batch: Batch, labelled_only: bool) -> torch.Tensor:
    """L, sample by sample."""
    peer, T, given = batch.frozen["peer"], 0.5, batch.given
    b = len(batch.y)
    images, target = list(torch.cat(batch.views)), []
    with torch.no_grad():
        if batch.other:
            views = batch.other["unlabelled"].views
            images += list(torch.cat(views))
            p = sum(n(v).softmax(1) for n in (net, peer) for v in views) / 4
        own = sum(net(v).softmax(1) for v in batch.views) / 2
        for i in range(b):
            w = batch.sample["clean"][i]
            t = (1 - w) * own[i]
            t[batch.y[i]] += w
            target.append(t ** (1 / T) / (t ** (1 / T)).sum())
        target += target
        if batch.other:
            sharp = [row ** (1 / T) / (row ** (1 / T)).sum() for row in p]
            target += sharp + sharp
    lam, order = batch.draw["weight"], batch.draw["order"].tolist()
    n = 2 * b if labelled_only else len(images)
    mixed = torch.stack([lam * images[i] + (1 - lam) * images[order[i]] for i in range(n)])
    t = [lam * target[i] + (1 - lam) * target[order[i]] for i in range(n)]
    p = net(mixed).softmax(1)
    total = sum(-(t[i] * p[i].log()).sum() for i in range(2 * b)) / (2 * b)
    if not labelled_only:
        r = given["since"] + batch.step / batch.steps
        weight = given["lambda_u"] * min(max(r / 16, 0), 1)
        total = total + weight * sum(((p[i] - t[i]) ** 2).mean() for i in range(2 * b, n)) / (n - 2 * b)
    mean = p.mean(0)
    return total + given["balance"] * (given["prior"] * (given["prior"] / mean).log()).sum()


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "batchnorm"])
@pytest.mark.parametrize(
    ("loss", "unlabelled", "labelled_only"),
    [(dm.loss, True, False), (dm.labelled_loss, True, True), (dm.labelled_loss, False, True)],
    ids=["both", "labelled", "no unlabelled"],
)
def test_the_step_is_the_plain_loop_over_its_definition(loss, unlabelled, labelled_only, norm):
    batch = a_batch(3, unlabelled=unlabelled, norm=norm)
    net, twin = network(0, norm), network(0, norm)
    found, wanted = loss(net, batch), by_hand(twin, batch, labelled_only)
    assert found.item() == pytest.approx(wanted.item(), rel=1e-5)
    found.backward()
    wanted.backward()
    for a, b in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-6)
    for a, b in zip(net.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(a, b)


def test_targets_are_made_in_training_mode_and_the_peer_is_left_alone():
    batch, net = a_batch(1, norm=True), network(0, norm=True)
    before = copy.deepcopy(batch.frozen["peer"].state_dict())
    dm.loss(net, batch)
    assert net[2].num_batches_tracked == 5  # two unlabelled views, two labelled ones, the mixed rows
    assert same_bits(batch.frozen["peer"].state_dict(), before)


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "batchnorm"])
@pytest.mark.parametrize("loss", [dm.loss, dm.labelled_loss], ids=lambda loss: loss.__name__)
def test_a_recorded_step_follows_another_batch(loss, norm):
    capture_safe(loss, network(0, norm), a_batch(1, norm=norm), a_batch(2, norm=norm))


def test_sharpening_and_regularisation_stay_finite_where_powers_and_means_underflow():
    p = torch.full((1, 100), 0.01)
    assert dm.sharpen(p, 0.02).sum().item() == pytest.approx(1)  # .01^50 is 1e-100
    assert dm.sharpen(torch.tensor([[1.0, 0.0, 0.0]]), 0.5).tolist() == [[1.0, 0.0, 0.0]]
    logits = torch.tensor([[200.0, 0.0, -200.0]], requires_grad=True)
    value = dm.imbalance(logits.log_softmax(1), torch.full((3,), 1 / 3))
    value.backward()
    assert math.isfinite(value.item())
    assert logits.grad.isfinite().all()


def test_penalised_warm_up_adds_the_negative_entropy():
    batch, net = a_batch(1), network(0)
    batch = Batch(**{**batch.__dict__, "given": {"penalty": torch.tensor(1.0, dtype=f64)}})
    p = net(batch.x).softmax(1)
    wanted = F.cross_entropy(net(batch.x), batch.y) + (p * p.log()).sum() / len(p)
    assert dm.penalised_loss(net, batch).item() == pytest.approx(wanted.item(), rel=1e-5)


@pytest.mark.parametrize(("settings", "batch"), [({}, 8), ({"warm_up_factor": 2}, 16), ({"penalty": 0.3}, 8)], ids=str)
def test_the_warm_up_trains_with_the_set_penalty_in_batches_of_the_set_size(settings, batch):
    calls, _, _ = watched_turn(settings, round=0)
    for call in calls:
        assert (call["batch"], call.get("given")) == (batch, {"penalty": 0.3} if "penalty" in settings else None)
        assert call["loss"] is (dm.penalised_loss if "penalty" in settings else dm.cross_entropy)


# --------------------------------------------------------------------------------------------- the division


def test_equal_losses_are_not_divided_and_all_held_clean():
    for losses in (torch.full((6,), 2.3, dtype=f64), torch.tensor([0.4], dtype=f64)):
        division = dm.divide(dm.scaled(losses), Settings(), 0)
        assert not division.decided
        assert division.clean.tolist() == [1.0] * len(losses)
        assert len(division.labelled) == len(losses)


def test_two_losses_are_one_clean_and_one_noisy_sample():
    division = dm.divide(dm.scaled(torch.tensor([3.0, 0.5], dtype=f64)), Settings(), 0)
    assert division.labelled.tolist() == [1]
    assert division.unlabelled.tolist() == [0]


def test_the_threshold_is_exclusive_and_moves_the_division():
    losses = dm.scaled(torch.from_numpy(np.random.default_rng(0).gamma(2.0, size=300)))
    clean = dm.divide(losses, Settings(), 0).clean
    for threshold in (0.0, 0.5, 0.9):
        division = dm.divide(losses, Settings(threshold=threshold), 0)
        assert division.labelled.tolist() == [i for i, w in enumerate(clean.tolist()) if w > threshold]
        assert sorted([*division.labelled.tolist(), *division.unlabelled.tolist()]) == list(range(300))
    uneven = clean[(clean - 0.5).abs().argmin()].item()
    assert (dm.divide(losses, Settings(threshold=uneven), 0).clean == uneven).any()
    at = dm.divide(losses, Settings(threshold=uneven), 0)
    assert uneven not in clean[at.labelled].tolist()


@pytest.mark.parametrize(("n", "batch"), [(1, 8), (5, 8), (8, 8), (11, 8), (16, 8), (3, 64)])
def test_filled_batches_are_whole_and_take_each_sample_about_as_often(n, batch):
    positions = torch.arange(100, 100 + n)
    found = dm.filled(positions, batch, np.random.default_rng(0))
    assert len(found) == -(-n // batch) * batch
    times = torch.bincount(found - 100, minlength=n)
    assert times.min() >= 1
    assert times.max() - times.min() <= 1


def test_permutations_are_of_each_steps_own_rows():
    draw = dm.draw_mixing([6, 4, 2], 4.0, np.random.default_rng(0))
    assert draw["order"].shape == (3, 6)
    for row, count in zip(draw["order"].tolist(), (6, 4, 2), strict=True):
        assert sorted(row[:count]) == list(range(count))


# ------------------------------------------------------------------------------------------- a client's turn


def normed(encoder: torch.nn.Module) -> torch.nn.Module:
    norm = torch.nn.BatchNorm1d(encoder.width)
    return torch.nn.Sequential(encoder, norm, torch.nn.Linear(encoder.width, encoder.classes))


class Normed(DivideMix):
    """With a BatchNorm, which a sample alone cannot pass in training."""

    def network(self, encoder: torch.nn.Module) -> torch.nn.Module:
        return normed(encoder)


class NormedFedAvg(FedAvg):
    def network(self, encoder: torch.nn.Module) -> torch.nn.Module:
        return normed(encoder)


def turn(engine: Any, message: Any, client: int = 0, round: int = 0, state: Any = None) -> Any:
    joined = state is not None
    return perform(Lane(engine), Job(client, "train", message, state, joined, round, 0))


def start(method: Any, **options: Any) -> tuple[Any, Any]:
    """(engine, the server's first state)."""
    engine = tiny_engine(method, told=NOISE, **options)
    return engine, method.init(Lane(engine).server(0, 0, "init"))


def test_the_networks_begin_apart():
    _, state = start(DivideMix())
    assert all(not torch.equal(w, state["second"][name]) for name, w in state["first"].items())
    assert 1.2 < DivideMix().diagnostics(state)["distance"] < 1.6  # of independent ones: about sqrt 2
    assert DivideMix().diagnostics({**state, "second": state["first"]})["distance"] == 0


@pytest.mark.parametrize(("kind", "plain_kind"), [(DivideMix, FedAvg), (Normed, NormedFedAvg)], ids=["plain", "norm"])
def test_in_the_warm_up_the_first_network_is_fedavg_bit_for_bit_and_the_second_one_too_on_other_batches(
    kind, plain_kind
):
    options = {"rounds": 9, "arrays": tiny_arrays(samples=33)}
    method = kind(Settings(warm_up=2))
    engine, state = start(method, **options)
    plain = tiny_engine(plain_kind(), **options)
    w = FedAvg().init(Lane(plain).server(0, 0, "init"))
    assert same_bits(state["first"], w)
    for round in (0, 1):
        replies = [turn(engine, state, client, round).reply for client in range(3)]
        plain_replies = [turn(plain, w, client, round).reply for client in range(3)]
        assert all(same_bits(a.upload["first"], b.upload) for a, b in zip(replies, plain_replies, strict=True))
        assert replies[0].claims.clean is None
        uploads = [Upload(client, 11, reply.upload) for client, reply in enumerate(replies)]
        state = method.aggregate(state, uploads, Lane(engine).server(round, 0, "aggregate"))
        w = FedAvg().aggregate(w, [Upload(c, 11, r.upload) for c, r in enumerate(plain_replies)], None)
        assert same_bits(state["first"], w)
    # the second: FedAvg from its own weights, but on batches of its own
    swapped = turn(engine, {"first": state["second"], "second": state["first"]}, 0, 0).reply.upload
    usual = turn(engine, state, 0, 0).reply.upload
    assert not same_bits(swapped["first"], usual["second"])
    assert turn(engine, state, 0, 2).reply.claims.clean is not None


class Watched:
    """A client side that notes what its ``fit`` is called with."""

    def __init__(self, side: Any) -> None:
        self.side, self.calls, self.networks = side, [], []
        self.real, side.fit = side.fit, self.fit

    def fit(self, network: torch.nn.Module, loss: Any, **options: Any) -> Any:
        frozen = {name: copy.deepcopy(net.state_dict()) for name, net in options.get("frozen", {}).items()}
        before = copy.deepcopy(network.state_dict())
        fit = self.real(network, loss, **options)
        after = copy.deepcopy(network.state_dict())
        self.calls.append({**options, "loss": loss, "frozen": frozen, "before": before, "after": after, "fit": fit})
        return fit


def watched_turn(
    settings: dict[str, Any], round: int = 5, state: Any = None, kind: Any = DivideMix, **options: Any
) -> tuple[Any, Any, Any]:
    """(what fit was called with, the reply, the divisions by each network)."""
    method = kind(Settings(warm_up=1, **settings))
    engine, message = start(method, **{"rounds": 30, **options})
    lane = Lane(engine)
    side = lane.client(0, {"losses": None} if state is None else state, round, 0)
    watched, divisions, real = Watched(side), [], dm.divide
    dm.divide = lambda *args: divisions.append(real(*args)) or divisions[-1]
    try:
        reply = method.client("train", message, side)
    finally:
        dm.divide = real
    return watched.calls, reply, (message, divisions)


def test_each_network_trains_on_the_others_division_and_the_second_against_the_trained_first():
    calls, reply, (message, (by_first, by_second)) = watched_turn({"fill": False})
    assert not torch.equal(by_first.clean, by_second.clean)
    first, second = calls
    assert torch.equal(first["sample"]["clean"], by_second.clean.float())
    assert torch.equal(second["sample"]["clean"], by_first.clean.float())
    assert torch.equal(first["subset"], by_second.labelled)
    assert torch.equal(second["subset"], by_first.labelled)
    assert torch.equal(first["streams"]["unlabelled"]["subset"], by_second.unlabelled)
    assert same_bits(first["before"], message["first"])
    assert same_bits(first["frozen"]["peer"], message["second"])
    assert same_bits(second["before"], message["second"])
    assert same_bits(second["frozen"]["peer"], first["after"])  # updated
    assert not same_bits(second["frozen"]["peer"], message["first"])
    assert same_bits(reply.upload["second"], second["after"])
    assert torch.allclose(reply.claims.clean, (by_first.clean + by_second.clean) / 2)


@pytest.mark.parametrize("look", [None, Look((0.5,), (0.25,), crop_padding=2, flip=True)], ids=["plain", "augmented"])
def test_the_division_is_by_the_received_networks_losses_of_unaugmented_images(look):
    _, _, (message, (by_first, _)) = watched_turn({}, look=look)
    engine, _ = start(DivideMix())
    side = Lane(engine).client(0, None, 0, 0)
    pixels = engine.pixels[engine.positions[0]].float() / 255
    net = side.model(message["first"], frozen=True)
    losses = F.cross_entropy(net((pixels - 0.5) / 0.25), side.labels, reduction="none").double()
    wanted = dm.divide((losses - losses.min()) / (losses.max() - losses.min()), Settings(), 0)
    assert (wanted.clean - by_first.clean).abs().max() < 1e-3


@pytest.mark.parametrize("fill", [True, False])
def test_loop_length_is_the_labelled_batches_and_shapes_are_whole_when_filled(fill):
    calls, _, (_, divisions) = watched_turn({"fill": fill})
    for call, division in zip(calls, reversed(divisions), strict=True):
        assert call["fit"].steps == -(-len(division.labelled) // 8)
        assert len(call["draw"]["weight"]) == call["fit"].steps
        assert (len(call["subset"]) % 8 == 0) is (fill or len(division.labelled) % 8 == 0)
    if fill:
        assert {call["draw"]["order"].shape[1] for call in calls} == {32}


@pytest.mark.parametrize(("unlabelled", "taken"), [(5, 8), (8, 8), (10, 10)])
def test_few_unlabelled_samples_are_filled_up_to_a_batch_and_more_are_taken_as_they_are(unlabelled, taken, monkeypatch):
    real = dm.divide
    halves = {"labelled": torch.arange(unlabelled, 24), "unlabelled": torch.arange(unlabelled)}
    monkeypatch.setattr(dm, "divide", lambda *args: real(*args)._replace(**halves))
    calls, _, _ = watched_turn({})
    for call in calls:
        subset = call["streams"]["unlabelled"]["subset"]
        assert len(subset) == taken
        assert sorted(set(subset.tolist())) == list(range(unlabelled))


def test_metrics_are_means_over_both_networks():
    calls, reply, (_, divisions) = watched_turn({})
    kept = [[w > 0.5 for w in division.clean.tolist()] for division in divisions]
    assert sum(kept[0]) != sum(kept[1])
    assert reply.metrics["labelled"] == pytest.approx((sum(kept[0]) + sum(kept[1])) / 48)
    assert reply.metrics["agreement"] == pytest.approx(sum(a == b for a, b in zip(*kept, strict=True)) / 24)
    assert reply.metrics["loss"] == pytest.approx((calls[0]["fit"].loss + calls[1]["fit"].loss) / 2)


def test_more_local_epochs_draw_for_each_of_their_steps():
    calls, _, _ = watched_turn({"fill": False}, local_epochs=3)
    for call in calls:
        assert call["fit"].steps % 3 == 0
        assert len(call["draw"]["weight"]) == call["fit"].steps


# -- where there is nothing to divide


def wrong_at(mean: list[int], monkeypatch: Any) -> None:
    """The losses of the 24 samples of client 0 come from a list instead of the networks: mean[i] for sample i."""
    losses = torch.tensor(mean, dtype=torch.float32)
    monkeypatch.setattr(dm, "sample_losses", lambda batch: losses[batch.index][:, None].expand(-1, 2))


@pytest.mark.parametrize("clean", [0, 1])
def test_pitfall_fewer_than_two_labelled_samples_is_an_ordinary_epoch(clean, monkeypatch):
    # a threshold just under 1 and one low loss: one sample, or none, is above it
    wrong_at([0.0] * clean + [5.0 + i / 10 for i in range(24 - clean)], monkeypatch)
    real = dm.divide
    monkeypatch.setattr(
        dm, "divide", lambda *args: (d := real(*args))._replace(labelled=d.labelled[:clean], unlabelled=d.unlabelled)
    )
    calls, reply, _ = watched_turn({})
    assert [call["loss"] for call in calls] == [dm.cross_entropy] * 2
    assert all(call["fit"].steps == 3 and "subset" not in call for call in calls)  # all 24 samples in batches of 8
    assert reply.metrics["ordinary"] == 1.0


def test_pitfall_equal_losses_train_the_labelled_half_alone_and_say_that_nothing_was_decided(monkeypatch):
    wrong_at([2.0] * 24, monkeypatch)
    calls, reply, _ = watched_turn({})
    assert [call["loss"] for call in calls] == [dm.labelled_loss] * 2
    assert all(not call["streams"] and len(call["subset"]) == 24 for call in calls)
    assert reply.upload["undecided"]
    assert reply.claims.clean is None
    method = DivideMix()
    server = Lane(start(method)[0]).server(5, 0, "aggregate")
    method.aggregate(None, [Upload(2, 24, reply.upload), Upload(4, 24, {**reply.upload, "undecided": False})], server)
    assert server.notes == {"undecided": [2]}


@pytest.mark.parametrize("equal", [0, 1])
def test_where_one_network_cannot_tell_samples_apart_nothing_is_claimed(equal, monkeypatch):
    def losses(batch: Batch) -> torch.Tensor:
        columns = [batch.index.float(), batch.index.float()]
        columns[equal] = torch.ones(len(batch.index))
        return torch.stack(columns, 1)

    monkeypatch.setattr(dm, "sample_losses", losses)
    _, reply, (_, divisions) = watched_turn({})
    assert [division.decided for division in divisions] == [equal == 1, equal == 0]
    assert reply.upload["undecided"]
    assert reply.claims.clean is None


@pytest.mark.parametrize(("noisy", "loss"), [(0, "labelled_loss"), (1, "labelled_loss"), (2, "loss")])
@pytest.mark.parametrize("kind", [DivideMix, Normed])
def test_pitfall_no_or_one_unlabelled_sample_leaves_the_unlabelled_loss_out(noisy, loss, kind, monkeypatch):
    wrong_at([9.0] * noisy + [i / 100 for i in range(24 - noisy)], monkeypatch)
    real = dm.divide

    def forced(*args: Any) -> Any:
        return real(*args)._replace(labelled=torch.arange(noisy, 24), unlabelled=torch.arange(noisy))

    monkeypatch.setattr(dm, "divide", forced)
    for fill in (True, False):
        calls, reply, _ = watched_turn({"fill": fill}, kind=kind)
        assert {call["loss"].__name__ for call in calls} == {loss}
        assert math.isfinite(reply.metrics["loss"])


@pytest.mark.parametrize("kind", [DivideMix, Normed])
@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("fill", [True, False])
def test_pitfall_clients_of_one_two_and_three_samples_take_their_turns(n, kind, fill):
    positions = [list(range(n)), list(range(n, 20))]
    arrays = tiny_arrays(samples=20)
    calls, reply, _ = watched_turn({"fill": fill}, positions=positions, kind=kind, arrays=arrays)
    assert all(w.isfinite().all() for k in ("first", "second") for w in reply.upload[k].values())
    if n == 1:
        assert reply.upload["undecided"]
        assert [call["loss"] for call in calls] == [dm.cross_entropy] * 2


def test_history_averages_the_last_rounds_losses_and_is_the_clients_own_state(monkeypatch):
    method = DivideMix(Settings(warm_up=1, loss_history=2))
    engine, message = start(method, rounds=30)
    states, losses = [None], []
    for round in (3, 4, 5):
        one = {k: {name: w + round * 0.05 for name, w in message[k].items()} for k in message}
        states.append(turn(engine, one, 0, round, states[-1]).state)
        alone = turn(engine, one, 0, round, {"losses": None})
        losses.append(alone.state["losses"][0])
    assert [len(state["losses"]) for state in states[1:]] == [1, 2, 2]
    assert torch.equal(states[-1]["losses"], torch.stack(losses[1:]))
    assert states[-1]["losses"].min() == 0
    assert states[-1]["losses"].max() == 1
    divided, real = [], dm.divide
    monkeypatch.setattr(dm, "divide", lambda losses, *rest: divided.append(losses) or real(losses, *rest))
    _, reply, (_, divisions) = watched_turn({"loss_history": 2}, state=states[-1])
    assert torch.equal(reply.state["losses"][0], states[-1]["losses"][1])
    torch.testing.assert_close(torch.stack(divided), reply.state["losses"].double().mean(0))
    _, _, (_, alone) = watched_turn({"loss_history": 2})
    assert not torch.equal(divisions[0].clean, alone[0].clean)


def test_local_prior_is_the_clients_label_shares_and_absent_classes_cost_nothing():
    given = torch.zeros(72, dtype=torch.int64)
    given[[0, 3, 6, 9, 12, 15]] = 2  # six of client 0's 24; none of class 1
    calls, reply, _ = watched_turn({"prior": "local"}, given=given)
    assert calls[0]["given"]["prior"].tolist() == [0.75, 0.0, 0.25]
    assert math.isfinite(reply.metrics["loss"])
    calls, _, _ = watched_turn({}, given=given)
    assert calls[0]["given"]["prior"].tolist() == pytest.approx([1 / 3] * 3)


@pytest.mark.parametrize("kind", [DivideMix, Normed])
@pytest.mark.parametrize("mixed", ["both", "labelled"])
def test_tensors_that_stay_in_place_as_on_a_gpu_give_the_same_bits(kind, mixed):
    """Two turns in one lane: the second's division, draws and peer must replace the first's in the static tensors."""
    found = []
    for static in (False, True):
        method = kind(Settings(warm_up=1, mixed=mixed))
        engine, message = start(method, rounds=30)
        engine.static = static
        lane, uploads = Lane(engine), []
        for client, round in ((0, 3), (1, 4), (0, 20)):
            job = Job(client, "train", message, {"losses": None}, True, round, 0)
            uploads.append(perform(lane, job).reply.upload)
            message = {k: uploads[-1][k] for k in ("first", "second")}
        found.append(uploads)
    for direct, in_place in zip(*found, strict=True):
        assert same_bits(direct["first"], in_place["first"])
        assert same_bits(direct["second"], in_place["second"])


def test_a_ramp_of_no_length_is_over_at_once():
    calls, _, _ = watched_turn({"ramp": 0}, round=1)
    assert dm.ramp(calls[0]["given"]["since"], 0, 4, calls[0]["given"]["length"]) == 1
    calls, _, _ = watched_turn({}, round=1)
    assert dm.ramp(calls[0]["given"]["since"], 0, 4, calls[0]["given"]["length"]) == 0


# ------------------------------------------------------------------------------------------------ whole runs

USUAL = {"lambda_u": 5.0}


@pytest.fixture(scope="module")
def ordinary(tmp_path_factory):
    """One run under noise, watched: (result, records, Run, comparisons made)."""
    torch.set_num_threads(1)
    run = tiny_run(DivideMix, tmp_path_factory.mktemp("ordinary"), rounds=6, settings=USUAL)
    with watch_losses(most=2) as seen:
        result = run.execute()
    return result, records.load_records(run.folder), run, seen


def test_it_learns_and_its_loss_can_be_recorded(ordinary):
    result, rounds, _, seen = ordinary
    assert result.accuracy.final > 80
    assert seen["loss"] >= 20
    assert "labelled" not in rounds[0].metrics  # W = 1
    assert 0 < rounds[1].metrics["labelled"] < 1
    assert 0 <= rounds[1].metrics["agreement"] <= 1


def test_claims_are_judged_and_better_than_chance(ordinary):
    assert ordinary[1][-1].judged["samples_auc"] > 60
    assert not ordinary[1][0].judged


def test_main_is_argmax_of_both_networks_logits_and_each_is_read_beside_it(ordinary):
    run = ordinary[2]
    state = server_state(run)
    side = Lane(run.engine).server(5, 0, "predict")
    found = run.method.predictors(state, side)
    assert list(found) == ["main", "first", "second"]
    images = normal(7, 1, 8, 8)
    torch.testing.assert_close(found["main"](images), found["first"](images) + found["second"](images))
    assert not torch.equal(found["first"](images), found["second"](images))


def test_two_fedavgs_by_size_on_the_server():
    _, state = start(DivideMix())
    one = {name: torch.full_like(w, 10.0) for name, w in state["first"].items()}
    two = {name: torch.full_like(w, 30.0) for name, w in state["first"].items()}
    uploads = [
        Upload(0, 10, {"first": one, "second": two, "undecided": False}),
        Upload(1, 30, {"first": two, "second": one, "undecided": False}),
    ]
    new = DivideMix().aggregate(state, uploads, Lane(start(DivideMix())[0]).server(0, 0, "aggregate"))
    assert all((w == 25).all() for w in new["first"].values())
    assert all((w == 15).all() for w in new["second"].values())


def test_stopped_after_any_commit_it_resumes_to_the_same_digest(tmp_path):
    settings = {**USUAL, "loss_history": 2}
    wanted = tiny_run(DivideMix, tmp_path / "whole", rounds=4, settings=settings).execute().digest
    result, stops = in_sessions(lambda: tiny_run(DivideMix, tmp_path, rounds=4, settings=settings).execute())
    assert stops == 5
    assert result.digest == wanted


def test_threads_give_the_serial_digest(ordinary, tmp_path):
    threads = tiny_run(DivideMix, tmp_path, rounds=6, settings=USUAL, executor="threads", lanes=3).execute()
    assert threads.digest == ordinary[0].digest


CHANGES = [
    {"warm_up": 2}, {"warm_up_factor": 2}, {"penalty": 1.0}, {"threshold": 0.9}, {"loss_history": 3},
    {"iterations": 1}, {"tolerance": 10.0}, {"variance_floor": 0.1}, {"temperature": 0.2}, {"alpha": 0.5},
    {"lambda_u": 0.0}, {"ramp": 1}, {"balance": 0.0}, {"prior": "local"}, {"mixed": "labelled"}, {"fill": False},
]  # fmt: skip


def test_defaults_are_the_specification_s():
    wanted = Settings(
        warm_up=1 / 30, warm_up_factor=1, penalty=0.0, threshold=0.5, loss_history=1, iterations=10, tolerance=1e-2,
        variance_floor=5e-4, temperature=0.5, alpha=4.0, lambda_u=None, lambda_u_limit=0.25, lambda_u_low=0.0,
        lambda_u_high=25.0, ramp=16, balance=1.0, prior="uniform", mixed="both", fill=True,
    )  # fmt: skip
    assert Settings().model_dump() == wanted.model_dump()
    assert wanted.model_fields_set == set(Settings.model_fields)  # none is left to its own default


def test_every_setting_is_in_the_list_of_changes_or_tested_by_itself():
    told = {"lambda_u_limit", "lambda_u_low", "lambda_u_high"}  # test_spec_lambda_u_follows_the_mean_noise_rate
    assert {name for change in CHANGES for name in change} | told == set(Settings.model_fields)


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """The digest of three rounds with the usual settings."""
    torch.set_num_threads(1)
    return tiny_run(DivideMix, tmp_path_factory.mktemp("short"), settings=USUAL).execute().digest


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_each_setting_has_an_effect(change, short, tmp_path):
    assert tiny_run(DivideMix, tmp_path, settings={**USUAL, **change}).execute().digest != short


@pytest.mark.parametrize(
    ("change", "losses"),
    [
        ({"mixed": "labelled", "penalty": 1.0}, {"penalised_loss", "labelled_loss"}),
        ({"fill": False, "ramp": 1, "prior": "local"}, {"cross_entropy", "loss"}),
    ],
    ids=["labelled", "short batches"],
)
def test_the_other_losses_can_be_recorded_too(change, losses, tmp_path):
    with watch_losses(most=2) as seen:
        tiny_run(DivideMix, tmp_path, settings={**USUAL, **change}).execute()
    assert set(seen) == losses


def test_clients_without_some_classes_and_clients_left_out_do_no_harm(tmp_path):
    partition, settings = {"law": "dirichlet", "alpha": 0.1}, {"loss_history": 2}
    options = {"arrays": tiny_arrays(samples=180), "participation": 0.5, "clients": 6, "rounds": 4}
    run = tiny_run(DivideMix, tmp_path, partition=partition, settings=settings, **options)
    held = [run.engine.given[positions].unique().numel() for positions in run.engine.positions]
    assert min(held) < 3
    assert run.execute().status == "complete"


def test_without_noise_it_runs_and_still_takes_labels_away(tmp_path):
    run = tiny_run(DivideMix, tmp_path, noise=0.0, rounds=4)
    assert run.execute().status == "complete"
    assert records.load_records(run.folder)[-1].metrics["labelled"] < 1


# ------------------------------------------------------------------------------------------------ nonsense


@pytest.mark.parametrize(
    "bad",
    [
        {"warm_up": -1}, {"warm_up_factor": 0}, {"threshold": 1.0}, {"temperature": 0}, {"alpha": 0}, {"lambda_u": -1},
        {"loss_history": 0}, {"prior": "global"}, {"mixed": "unlabelled"}, {"penalty": -1}, {"variance_floor": 0},
    ],
    ids=str,
)  # fmt: skip
def test_nonsense_settings_are_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        Settings(**bad)


def test_a_warm_up_as_long_as_the_run_is_refused_and_short_runs_have_one_round_of_it():
    for warm_up in (Rounds(8), Rounds(1.0)):
        with pytest.raises(ValueError, match="never be divided"):
            start(DivideMix(Settings(warm_up=warm_up)), rounds=8)
    assert [DivideMix()._warm_up(rounds) for rounds in (1, 3, 5, 20, 50, 100)] == [1, 1, 1, 1, 2, 3]
    assert start(DivideMix(), rounds=1)  # a run of one round is a warm-up


def test_an_unknown_noise_rate_fails_with_advice_and_runs_with_a_set_lambda_u():
    with pytest.raises(ValueError, match="set lambda_u"):
        DivideMix().init(Lane(tiny_engine(DivideMix(), told={})).server(0, 0, "init"))
    method = DivideMix(Settings(lambda_u=0.0))
    assert method.init(Lane(tiny_engine(method, told={})).server(0, 0, "init"))


def test_a_network_that_became_nan_stops_the_run_and_names_the_client():
    method = DivideMix(Settings(warm_up=1))
    engine, state = start(method, rounds=9)
    broken = {k: {name: w * float("nan") for name, w in state[k].items()} for k in state}
    with pytest.raises(ClientError, match=r"client 0.*became nan"):
        turn(engine, broken, 0, 4)


@pytest.mark.parametrize("dataset", ["cifar10", "cifar100", "clothing1m", "digits", "fashion-mnist"])
@pytest.mark.parametrize("name", list(DivideMix.presets))
def test_presets_are_valid_on_every_data_set(name, dataset):
    settings, protocol = DivideMix.presets[name].on(dataset)
    config = Settings(**settings)
    budget = Protocol(**merged(Protocol().model_dump(), dict(protocol)))
    assert (budget.rounds, budget.local_epochs) == (500, 1)  # as many images as in the track common
    assert budget.optimiser.lr == (0.002 if dataset == "clothing1m" else 0.02)
    assert budget.optimiser.momentum == 0.9
    assert budget.optimiser.weight_decay == (1e-3 if dataset == "clothing1m" else 5e-4)
    assert config.mixed == ("labelled" if dataset == "clothing1m" else "both")
    assert config.fill is (name != "code-literal")
    tuned = dataset == "digits" and name != "code-literal"
    assert config.prior == ("local" if tuned or name == "local-prior" else "uniform")
