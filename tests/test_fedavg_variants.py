"""FedAvg's variants against numbers worked out by hand, and in tiny runs."""

import importlib.util
import itertools
import math
import sys
from pathlib import Path

import fixture_methods
import pytest
import torch
from flnoisebench_methods.fedavg import FedAvg
from flnoisebench_methods.fedavg_la import FedAvgLA

from flnoisebench.api import Batch, Rounds, Upload, weights
from flnoisebench.engine import Lane
from flnoisebench.testing import tiny_engine, tiny_run, watch_losses

_spec = importlib.util.spec_from_file_location(
    "fedavg_variants_under_test", Path(__file__).parents[1] / "methods" / "fedavg_variants.py"
)
fv = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = fv  # where tiny_run finds the classes' source
_spec.loader.exec_module(fv)
VARIANTS = [fv.FedAvgDecay, fv.FedAvgEma, fv.FedAvgGce, fv.FedAvgMixup, FedAvgLA]  # its numbers: test_fedavg_la.py
LOSSES = {
    fv.FedAvgGce: {"generalised_cross_entropy", "truncated_cross_entropy"},
    fv.FedAvgMixup: {"mixed_cross_entropy"},
    FedAvgLA: {"adjusted_cross_entropy"},
}
every_variant = pytest.mark.parametrize("method", VARIANTS, ids=lambda method: method.__name__)


pytestmark = pytest.mark.usefixtures("one_thread")


class Normed(fv.FedAvgMixup):
    """With a BatchNorm, which one sample alone cannot pass."""

    network = fixture_methods.Norm.network


class NormedEma(fv.FedAvgEma):
    network = fixture_methods.Norm.network


# --------------------------------------------------------------------------------------------------- decay


def test_the_cosine_of_four_rounds_by_hand():
    settings = fv.DecaySettings()
    root = math.sqrt(2) / 2
    expected = [1, (1 + root) / 2, 0.5, (1 - root) / 2]
    assert [fv.decay(settings, t, 4) for t in range(4)] == pytest.approx(expected)
    floored = fv.DecaySettings(final=0.2)
    assert [fv.decay(floored, t, 4) for t in range(4)] == pytest.approx([0.2 + 0.8 * f for f in expected])
    assert fv.decay(fv.DecaySettings(final=1.0), 3, 4) == 1
    assert 0 < fv.decay(settings, 499, 500) < 1e-4  # a rate must stay above zero


def test_the_steps_by_hand():
    settings = fv.DecaySettings(schedule="step")
    assert [fv.decay(settings, t, 8) for t in range(8)] == pytest.approx([1, 1, 1, 1, 0.1, 0.1, 0.01, 0.01])
    assert [fv.decay(settings, t, 3) for t in range(3)] == pytest.approx([1, 1, 0.01])  # 1.5 and 2.25 are both 2
    assert fv.decay(settings, 249, 500) == 1
    assert fv.decay(settings, 250, 500) == pytest.approx(0.1)
    assert fv.decay(settings, 375, 500) == pytest.approx(0.01)
    absolute = fv.DecaySettings(schedule="step", milestones=[2, 3], gamma=0.5)
    assert [fv.decay(absolute, t, 500) for t in range(5)] == [1, 1, 0.5, 0.25, 0.25]


@pytest.mark.parametrize("protocol", ["constant", "cosine"])
def test_the_decay_is_on_top_of_the_protocols_rate_and_recorded(protocol, finish):
    _, rounds, _ = finish(fv.FedAvgDecay, rounds=4, lr_schedule=protocol)
    factor = [1, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2]
    theirs = factor if protocol == "cosine" else [1, 1, 1, 1]
    assert [record.metrics["lr"] for record in rounds] == pytest.approx(
        [0.05 * own * other for own, other in zip(factor, theirs, strict=True)]
    )


def test_the_decay_is_what_the_clients_train_with(finish):
    """Without decay the run is FedAvg's to the bit; with one round 0, whose factor is 1, is the same, and no other."""
    _, plain, _ = finish(fixture_methods.Averaging)
    _, flat, _ = finish(fv.FedAvgDecay, settings={"final": 1.0})
    _, falling, _ = finish(fv.FedAvgDecay)
    losses = [[record.metrics["loss"] for record in rounds] for rounds in (plain, flat, falling)]
    assert losses[0] == losses[1]
    assert losses[0][:1] == losses[2][:1]  # round 0
    assert losses[0][1] != losses[2][1]


# ----------------------------------------------------------------------------------------------------- ema


def ema(decay, values, buffers=None):
    """The averages after each of these one-number networks."""
    engine = tiny_engine(fv.FedAvgEma(fv.EmaSettings(decay=decay)))
    server = Lane(engine).server(0, 0, "aggregate")
    first = {"w": torch.tensor([100.0]), "steps": torch.tensor(0)}
    state, found = {"weights": first, "average": first, "count": 0}, []
    for i, value in enumerate(values):
        content = {"w": torch.tensor([value]), "steps": torch.tensor(7 * (i + 1))}
        state = engine.method.aggregate(state, [Upload(0, 3, content)], server)
        assert state["weights"]["w"].item() == value
        assert state["average"]["steps"].dtype == torch.int64
        assert state["average"]["steps"].item() == 7 * (i + 1)  # a count is the newest, not a mean of counts
        found.append(state["average"]["w"].item())
    return found


def test_the_average_by_hand():
    # d = .5: the first alone, (1 + 2) / 2, then halves: (1.5 + 4) / 2, (2.75 + 8) / 2.  No share of the first 100
    assert ema(0.5, [1.0, 2.0, 4.0, 8.0]) == pytest.approx([1, 1.5, 2.75, 5.375])
    # d = .75: a plain mean as long as 1/k > .25: 1, 1.5, 7/3, 15/4; then a quarter of the newest
    assert ema(0.75, [1.0, 2.0, 4.0, 8.0, 16.0]) == pytest.approx([1, 1.5, 7 / 3, 3.75, 6.8125])
    assert ema(0.0, [1.0, 2.0, 4.0]) == [1, 2, 4]


def test_of_ten_rounds_at_the_default_the_average_is_the_plain_mean():
    assert ema(0.9, [float(i) for i in range(1, 12)])[9:] == pytest.approx([5.5, 5.5 * 0.9 + 11 * 0.1])


def test_the_average_is_main_the_raw_network_is_beside_it_and_trains_as_fedavg(finish):
    _, plain, _ = finish(fixture_methods.Averaging, rounds=4, noise=0.5)
    _, rounds, _ = finish(fv.FedAvgEma, rounds=4, noise=0.5)
    assert [record.predictors["raw"] for record in rounds] == [record.accuracy for record in plain]
    assert [record.metrics["loss"] for record in rounds] == [record.metrics["loss"] for record in plain]
    assert [record.bytes_down for record in rounds] == [record.bytes_down for record in plain]  # a stays at the server
    assert all(set(record.predictors) == {"main", "raw"} for record in rounds)
    assert [record.calibration_error for record in rounds][1:] != [record.calibration_error for record in plain][1:]
    _, same, _ = finish(fv.FedAvgEma, settings={"decay": 0.0}, rounds=4, noise=0.5)
    assert [record.calibration_error for record in same] == [record.calibration_error for record in plain]


def test_the_statistics_of_batchnorm_are_averaged_and_its_counters_stay_whole():
    engine = tiny_engine(NormedEma(fv.EmaSettings(decay=0.5)))
    lane, states = Lane(engine), []
    state = engine.method.init(lane.server(0, 0, "init"))
    for round in range(2):
        reply = engine.method.client("train", state["weights"], lane.client(0, None, round, 0))
        state = engine.method.aggregate(state, [Upload(0, 24, reply.upload)], lane.server(round, 0, "aggregate"))
        states.append(state["weights"])
    mean = state["average"]["1.running_mean"]
    assert torch.allclose(mean, (states[0]["1.running_mean"] + states[1]["1.running_mean"]) / 2, atol=1e-6)
    assert not torch.equal(mean, states[1]["1.running_mean"])
    assert state["average"]["1.num_batches_tracked"].item() == 6  # two rounds of three batches
    assert state["average"]["1.num_batches_tracked"].dtype == torch.int64
    lane.server(2, 0, "predict").model(state["average"], frozen=True)


# ----------------------------------------------------------------------------------------------------- gce


class Scores(torch.nn.Module):
    """Whose scores are its parameter, whatever the image."""

    def __init__(self, p):
        super().__init__()
        self.scores = torch.nn.Parameter(torch.tensor(p, dtype=torch.float32).log())

    def forward(self, images):
        return self.scores


def batch(y, *, x=None, given=None, draw=None, sample=None):
    x = torch.zeros(len(y), 1, 2, 2) if x is None else x
    zero = torch.tensor(0)
    given = {name: torch.tensor(value, dtype=torch.float64) for name, value in (given or {}).items()}
    index, sample, draw = torch.arange(len(y)), sample or {}, draw or {}
    return Batch((x,), torch.tensor(y), index, zero, zero, sample=sample, draw=draw, given=given)


P = [[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]]


def gce(p, y, q):
    network = Scores(p)
    loss = fv.generalised_cross_entropy(network, batch(y, given={"q": q}))
    loss.backward()
    return loss.item(), network.scores.grad


def test_the_generalised_cross_entropy_by_hand():
    by_hand = [(1 - 0.25**0.7) / 0.7, (1 - 0.8**0.7) / 0.7]  # .8872 and .2066
    assert gce(P, [1, 1], 0.7)[0] == pytest.approx(sum(by_hand) / 2, rel=1e-6)
    assert sum(by_hand) / 2 == pytest.approx(0.5469, abs=1e-4)
    assert gce(P, [0, 0], 1.0)[0] == pytest.approx((0.5 + 0.9) / 2)  # 1 - p_y
    assert gce(P, [0, 0], 0.5)[0] == pytest.approx((2 * (1 - 0.5**0.5) + 2 * (1 - 0.1**0.5)) / 2)


def test_at_small_q_it_is_the_cross_entropy():
    for q in (1e-3, 1e-6, 1e-12):
        assert gce(P, [1, 0], q)[0] == pytest.approx(-(math.log(0.25) + math.log(0.1)) / 2, rel=3 * q + 1e-6)


def test_its_gradient_is_the_cross_entropys_times_p_to_the_q():
    _, found = gce(P, [1, 0], 0.7)
    p = torch.tensor(P)
    expected = (p - torch.tensor([[0.0, 1, 0], [1, 0, 0]])) * torch.tensor([[0.25**0.7], [0.1**0.7]]) / 2
    assert torch.allclose(found, expected, atol=1e-7)


def test_a_probability_that_underflows_has_a_finite_loss_and_gradient():
    network = Scores([[1.0, 1.0]])
    with torch.no_grad():
        network.scores.copy_(torch.tensor([[500.0, -500.0]]))
    loss = fv.generalised_cross_entropy(network, batch([1], given={"q": 0.7}))
    loss.backward()
    assert loss.item() == pytest.approx(1 / 0.7)
    assert network.scores.grad.abs().max() == 0


def test_truncation_by_hand():
    network, kept = Scores(P), torch.tensor([False, True])
    loss = fv.truncated_cross_entropy(network, batch([1, 1], given={"q": 0.7, "k": 0.5}, sample={"keep": kept}))
    loss.backward()
    assert loss.item() == pytest.approx(((1 - 0.5**0.7) / 0.7 + (1 - 0.8**0.7) / 0.7) / 2, rel=1e-6)
    assert not network.scores.grad[0].any()
    assert torch.equal(network.scores.grad[1], gce(P, [1, 1], 0.7)[1][1])


def test_what_is_pruned_is_chosen_once_a_turn_by_the_network_that_arrived(monkeypatch):
    engine = tiny_engine(fv.FedAvgGce(fv.GceSettings(truncation=0.35, truncation_start=0)))
    lane, kept = Lane(engine), []
    start = weights(lane.server(0, 0, "init").model())
    side, pixels = lane.client(1, None, 0, 0), engine.images(engine.positions[1])
    scores = lane.server(0, 0, "predict").model(start, frozen=True)(pixels.plain(torch.arange(24)))
    p = scores.softmax(1).gather(1, side.labels.unsqueeze(1)).squeeze(1)
    assert 0 < (p > 0.35).sum() < 24
    real = side.fit

    def fit(*given, **named):
        kept.append(named["sample"]["keep"])
        return real(*given, **named)

    monkeypatch.setattr(side, "fit", fit)
    reply = engine.method.client("train", start, side)
    assert kept[0].tolist() == (p > 0.35).tolist()
    assert reply.metrics["kept"] == pytest.approx((p > 0.35).double().mean().item())


def test_a_share_of_exactly_k_is_pruned():
    lane = Lane(tiny_engine(fv.FedAvgGce()))
    flat = {name: torch.zeros_like(value) for name, value in weights(lane.server(0, 0, "init").model()).items()}
    third = torch.zeros(1, 3).log_softmax(1).exp()[0, 0].item()
    for k, kept in ((third, 0.0), (third - 1e-6, 1.0)):
        engine = tiny_engine(fv.FedAvgGce(fv.GceSettings(truncation=k, truncation_start=0)))
        reply = engine.method.client("train", flat, Lane(engine).client(0, None, 0, 0))
        assert reply.metrics["kept"] == kept


def test_truncation_begins_when_it_is_said_to(finish):
    def losses(**settings):
        return [record.metrics["loss"] for record in finish(fv.FedAvgGce, rounds=3, settings=settings)[1]]

    plain = losses()
    assert losses(truncation=0.9, truncation_start=3) == plain
    late = losses(truncation=0.9, truncation_start=0.5)  # round 2
    assert late[:2] == plain[:2]
    assert late[2] != plain[2]
    # at first nothing is learned so well, and every sample counts L_q(k)
    assert losses(truncation=0.9, truncation_start=0)[0] == pytest.approx((1 - 0.9**0.7) / 0.7)


# --------------------------------------------------------------------------------------------------- mixup


def test_the_mixed_loss_by_hand():
    """Scores are the two pixels.  u = .25: row 0 is .25 (8, 0) + .75 (0, 4) = (2, 3), and row 1 the other way round."""
    x = torch.tensor([[8.0, 0.0], [0.0, 4.0]])
    draw = {"share": torch.tensor(0.25), "partner": torch.tensor([1, 0, 9, 9])}  # wider than this batch
    found = fv.mixed_cross_entropy(torch.nn.Identity(), batch([0, 1], x=x, draw=draw)).item()

    def ce(scores, y):
        return math.log(sum(map(math.exp, scores))) - scores[y]

    first, second = (2.0, 3.0), (6.0, 1.0)  # the second: .25 (0, 4) + .75 (8, 0)
    own, other = (ce(first, 0) + ce(second, 1)) / 2, (ce(first, 1) + ce(second, 0)) / 2
    assert found == pytest.approx(0.25 * own + 0.75 * other, rel=1e-6)


def test_the_other_labels_are_those_of_the_partners():
    x, partner = torch.eye(3), torch.tensor([1, 2, 0])  # three in a ring, whose inverse is another order
    draw = {"share": torch.tensor(0.25), "partner": partner}
    found = fv.mixed_cross_entropy(torch.nn.Identity(), batch([0, 1, 2], x=x, draw=draw)).item()
    row = [0.25, 0.75, 0.0]  # the first row; the others are the same in the ring
    own, other = (math.log(sum(map(math.exp, row))) - row[y] for y in (0, 1))
    assert found == pytest.approx(0.25 * own + 0.75 * other, rel=1e-6)


def test_a_share_of_one_is_the_plain_cross_entropy():
    x, y = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)), [0, 1, 2, 1, 0]
    draw = {"share": torch.tensor(1.0), "partner": torch.tensor([4, 3, 2, 1, 0])}
    plain = torch.nn.functional.cross_entropy(x, torch.tensor(y))
    assert fv.mixed_cross_entropy(torch.nn.Identity(), batch(y, x=x, draw=draw)).item() == pytest.approx(plain.item())


def test_partners_are_permutations_of_each_batch_and_shares_are_betas():
    sizes = (8, 8, 5, 1)
    drawn = fv.mixing(sizes, 1.0, 3)
    assert drawn["partner"].shape == (4, 8)
    for size, row in zip(sizes, drawn["partner"].tolist(), strict=True):
        assert sorted(row[:size]) == list(range(size))
    assert drawn["partner"][0].tolist() != drawn["partner"][1].tolist()
    again = fv.mixing(sizes, 1.0, 3)
    assert all(torch.equal(drawn[name], again[name]) for name in drawn)
    assert not torch.equal(drawn["share"], fv.mixing(sizes, 1.0, 4)["share"])
    for alpha in (0.2, 1.0, 4.0):  # mean 1/2, variance 1 / (4 (2 alpha + 1))
        share = fv.mixing((1,) * 20_000, alpha, 0)["share"]
        assert share.mean().item() == pytest.approx(0.5, abs=0.01)
        assert share.var().item() == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.03)


def test_every_epoch_and_every_turn_is_mixed_in_its_own_way(monkeypatch):
    drawn = []
    real = fv.mixing
    monkeypatch.setattr(fv, "mixing", lambda *given: drawn.append((given[0], real(*given))) or drawn[-1][1])
    engine = tiny_engine(fv.FedAvgMixup(), local_epochs=2)
    lane = Lane(engine)
    start = weights(lane.server(0, 0, "init").model())
    for round, client in itertools.product(range(2), range(2)):
        engine.method.client("train", start, lane.client(client, None, round, 0))
    assert [sizes for sizes, _ in drawn] == [(8, 8, 8) * 2] * 4
    shares = [draw["share"].tolist() for _, draw in drawn]
    assert len({tuple(row) for row in shares}) == 4
    assert shares[0][:3] != shares[0][3:]


# ---------------------------------------------------------------------------------------------- all of them


@pytest.mark.parametrize("method", [FedAvg, *VARIANTS], ids=lambda method: method.__name__)
def test_the_server_weighs_clients_by_their_samples(method):
    engine = tiny_engine(method())
    first = {"w": torch.tensor([100.0])}
    state = {"weights": first, "average": first, "count": 0} if method is fv.FedAvgEma else first
    uploads = [Upload(0, 10, {"w": torch.tensor([1.0])}), Upload(2, 30, {"w": torch.tensor([5.0])})]
    new = engine.method.aggregate(state, uploads, Lane(engine).server(0, 0, "aggregate"))
    assert new.get("weights", new)["w"].item() == 4.0


@every_variant
def test_it_runs_and_its_losses_can_be_recorded(method, tmp_path):
    settings = {"truncation": 0.2, "truncation_start": 3} if method is fv.FedAvgGce else {}
    with watch_losses() as seen:
        result = tiny_run(method, tmp_path, rounds=4, participation=0.7, settings=settings).execute()
    assert set(seen) == LOSSES.get(method, {"cross_entropy"})
    assert result.accuracy.final > 90


@every_variant
def test_it_runs_with_one_sample_a_short_batch_an_absent_class_and_several_epochs(method):
    engine = tiny_engine(method(), positions=[[0], [0, 3, 6], list(range(1, 20))], local_epochs=2)
    lane = Lane(engine)
    state = engine.method.init(lane.server(0, 0, "init"))
    message = engine.method.plan(state, lane.server(0, 0, "plan")).message
    for client in range(3):
        reply = engine.method.client("train", message, lane.client(client, None, 0, 0))
        assert math.isfinite(reply.metrics["loss"])
        moved = any(not torch.equal(reply.upload[name], message[name]) for name in message)
        # clients 0 and 1 hold one class, of which nothing is to be told apart with the others left out: a loss of 0
        assert moved == (method is not FedAvgLA or client == 2)


def test_a_client_whose_only_sample_cannot_pass_a_batchnorm_trains_no_step():
    engine = tiny_engine(Normed(), positions=[[0], list(range(1, 20))])
    lane = Lane(engine)
    start = weights(lane.server(0, 0, "init").model())
    reply = engine.method.client("train", start, lane.client(0, None, 0, 0))
    assert all(torch.equal(reply.upload[name], start[name]) for name in start)


@every_variant
def test_resumed_or_not_it_gives_the_same_digest(method, tmp_path):
    whole = tiny_run(method, tmp_path / "whole", rounds=4).execute()

    class Stop(Exception):
        pass

    def stop(record):
        if record.round == 1:
            raise Stop

    with pytest.raises(Stop):
        tiny_run(method, tmp_path / "stopped", rounds=4).execute(stop)
    assert tiny_run(method, tmp_path / "stopped", rounds=4).execute().digest == whole.digest


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        (fv.FedAvgDecay, {"schedule": "step"}),
        (fv.FedAvgDecay, {"final": 0.5}),
        (fv.FedAvgDecay, {"schedule": "step", "gamma": 0.5}),
        (fv.FedAvgDecay, {"schedule": "step", "milestones": [1]}),
        (fv.FedAvgEma, {"decay": 0.2}),
        (fv.FedAvgGce, {"q": 0.5}),
        (fv.FedAvgMixup, {"alpha": 0.2}),
    ],
    ids=str,
)
def test_every_setting_has_an_effect(method, settings, tmp_path):
    step = {"schedule": "step"} if set(settings) & {"gamma", "milestones"} else {}
    # the state after every round is in the digest; of a run of three, half and three quarters are both round 2
    base = tiny_run(method, tmp_path / "base", settings=step).execute()
    assert tiny_run(method, tmp_path / "other", settings=settings).execute().digest != base.digest


def test_defaults_are_the_papers():
    decay = {"schedule": "cosine", "final": 0.0, "milestones": (Rounds(0.5), Rounds(0.75)), "gamma": 0.1}
    gce = {"q": 0.7, "truncation": None, "truncation_start": Rounds(0.33)}
    assert dict(fv.DecaySettings()) == decay
    assert dict(fv.EmaSettings()) == {"decay": 0.9}
    assert dict(fv.GceSettings()) == gce
    assert dict(fv.MixupSettings()) == {"alpha": 1.0}


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (fv.DecaySettings, {"schedule": "linear"}),
        (fv.DecaySettings, {"final": 1.5}),
        (fv.DecaySettings, {"gamma": 0}),
        (fv.DecaySettings, {"milestones": []}),
        (fv.DecaySettings, {"milestones": [-0.5]}),
        (fv.EmaSettings, {"decay": 1.0}),
        (fv.GceSettings, {"q": 0}),
        (fv.GceSettings, {"q": 1.1}),
        (fv.GceSettings, {"truncation": 1.0}),
        (fv.MixupSettings, {"alpha": 0}),
    ],
    ids=str,
)
def test_nonsense_is_refused(kind, settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        kind(**settings)


def test_settings_come_back_from_json():
    settings = fv.DecaySettings(schedule="step", milestones=[0.3, 7])
    assert settings.milestones == (Rounds(0.3), Rounds(7))
    assert fv.DecaySettings(**settings.model_dump(mode="json")) == settings
