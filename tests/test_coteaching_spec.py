"""Co-teaching against its printed numbers, against two FedAvgs, and against a plain loop over its definition.

Names with spec_ are the checkable facts of the method's specification, with the printed numbers.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from stopping import in_sessions, server_state

from flnoisebench import records, registry
from flnoisebench.api import Batch, Card, Method, Protocol, Reply, Rounds, Upload, average, weights
from flnoisebench.engine import Lane, Look
from flnoisebench.executors import ClientError, Job, perform
from flnoisebench.settings import merged
from flnoisebench.testing import capture_safe, tiny_arrays, tiny_engine, tiny_run, watch_losses

METHODS = Path(__file__).parents[1] / "methods"
CoTeaching = registry.load_method(f"{METHODS / 'coteaching.py'}:CoTeaching")
FedAvg = registry.load_method(f"{METHODS / 'fedavg.py'}:FedAvg")
ct = sys.modules[CoTeaching.__module__]
Settings = ct.Settings

f64 = torch.float64


pytestmark = pytest.mark.usefixtures("one_thread")


def scalar(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=f64)


def rates(count: int, *args: object) -> list[float]:
    return [ct.forget_rate(r, *args) for r in range(count)]


# ---------------------------------------------------------------------------------------- the forget rate and k


@pytest.mark.parametrize(
    ("r", "forget", "kept"), [(0, 0.0, 64), (1, 0.0116667, 63), (12, 0.14, 55), (24, 0.28, 46), (25, 0.28, 46)]
)
def test_spec_schedule_of_25_rounds_to_28_percent_and_what_is_kept_of_64(r, forget, kept):
    found = ct.forget_rate(r, 0.28, 25)
    assert found == pytest.approx(forget, abs=5e-8)
    assert ct.number_kept(scalar(found), 64).item() == kept


def test_spec_schedule_of_the_official_10_epochs_to_one_half():
    wanted = [0, 0.0556, 0.1111, 0.1667, 0.2222, 0.2778, 0.3333, 0.3889, 0.4444, 0.5, 0.5]
    assert rates(11, 0.5, 10) == pytest.approx(wanted, abs=5e-5)


def test_spec_schedule_of_the_paper_is_linear_and_reaches_its_end_one_round_later():
    keep = [1 - ct.forget_rate(r, 0.5, 10, form="paper") for r in (0, 1, 5, 9, 10)]
    assert keep == pytest.approx([1, 0.95, 0.75, 0.55, 0.5], abs=1e-12)
    assert ct.forget_rate(9, 0.5, 10) == 0.5  # the code's is there already


def test_spec_floor_of_25_samples_at_28_percent_is_18():
    assert ct.number_kept(scalar(0.28), 25).item() == 18


def test_spec_ramp_is_25_of_500_rounds_and_3_of_50():
    method = CoTeaching(Settings(forget_rate=0.28))
    for rounds, T_k in ((500, 25), (50, 3)):
        assert Settings().ramp.of(rounds) == T_k
        found = [method.forget_rate(Told(r, rounds)) for r in range(rounds)]
        assert found[:T_k] == np.linspace(0, 0.28, T_k).tolist()
        assert set(found[T_k - 1 :]) == {0.28}


class Told:
    """The three facts of a side that the forget rate hangs on."""

    def __init__(self, round: int, rounds: int, **told: float) -> None:
        self.round, self.protocol, self.told = round, Protocol(rounds=rounds), told


@pytest.mark.parametrize("rounds", range(3, 21))
def test_short_runs_begin_without_selection_and_end_at_the_full_rate(rounds):
    method = CoTeaching()
    found = [method.forget_rate(Told(r, rounds, noise_rate=0.4)) for r in range(rounds)]
    assert found == [0.0] + [0.4] * (rounds - 1)


@pytest.mark.parametrize("form", ["code", "paper"])
def test_a_share_of_a_short_run_is_a_ramp_of_one_round(form):
    method = CoTeaching(Settings(forget_rate=0.4, ramp_form=form))
    assert [method.forget_rate(Told(r, 3)) for r in range(3)] == [0.0, 0.4, 0.4]


@pytest.mark.parametrize("none", [0, 0.0])
def test_no_ramp_is_the_full_rate_from_the_first_round_on(none):
    assert CoTeaching(Settings(ramp=none)).forget_rate(Told(0, 10, noise_rate=0.4)) == 0.4


def test_exponent_bends_the_ramps_end_and_skip_drops_its_first_number():
    assert rates(6, 0.4, 5, 2.0) == pytest.approx([0, 0.04, 0.08, 0.12, 0.16, 0.4])  # the code's jump to F_max
    skipped = CoTeaching(Settings(forget_rate=0.5, ramp=10, ramp_skip=1))
    found = [skipped.forget_rate(Told(r, 200)) for r in range(10)]
    assert found == rates(11, 0.5, 10)[1:]


def test_told_rate_is_taken_unless_one_is_set_and_without_either_it_says_so():
    side = Told(5, 10, noise_rate=0.4)
    assert CoTeaching().forget_rate(side) == 0.4
    assert CoTeaching(Settings(forget_rate=0.0)).forget_rate(side) == 0.0
    with pytest.raises(ValueError, match=r"Set forget_rate \(\.39 for Clothing1M\)"):
        CoTeaching().forget_rate(Told(5, 10))


def test_k_is_pythons_int_of_the_product_and_at_least_one():
    for F_max in np.linspace(0, 0.99, 100).tolist():
        for B in range(1, 130):
            assert ct.number_kept(scalar(F_max), B).item() == max(1, int((1 - F_max) * B))


def test_defaults_are_the_specification_s():
    wanted = Settings(
        forget_rate=None, ramp=0.05, ramp_form="code", ramp_skip=0, exponent=1.0, averaged="once", own_views=False,
    )  # fmt: skip
    assert Settings().model_dump() == wanted.model_dump()
    assert wanted.model_fields_set == set(Settings.model_fields)  # none is left to its own default


@pytest.mark.parametrize(
    "bad",
    [
        {"forget_rate": 1.0}, {"forget_rate": -0.1}, {"ramp": 1.5}, {"ramp": -1}, {"exponent": 0}, {"ramp_skip": 2},
        {"ramp_form": "paper", "exponent": 2}, {"averaged": "thrice"}, {"forget": 0.2},
    ],
)  # fmt: skip
def test_nonsense_settings_are_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        Settings(**bad)


# ------------------------------------------------------------------------------------------------- the exchange

Y1 = torch.tensor([[2, 0], [0, 1], [0, 3], [1, 0]], dtype=f64)
Y2 = torch.tensor([[0, 2], [0, 2], [1, 0], [3, 0]], dtype=f64)
T = torch.tensor([0, 1, 0, 0])
L1_HAND, L2_HAND = 0.313262, 1.126928


def per_sample(scores: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(scores, T, reduction="none")


def test_spec_exchange_by_hand_with_a_tie_that_the_earlier_sample_wins():
    l1, l2 = per_sample(Y1), per_sample(Y2)
    assert l1.tolist() == pytest.approx([0.1269, 0.3133, 3.0486, 0.3133], abs=5e-5)
    assert l2.tolist() == pytest.approx([2.1269, 0.1269, 0.3133, 0.0486], abs=5e-5)
    assert l1[1] == l1[3]
    k = ct.number_kept(scalar(0.5), 4)
    assert ct.smallest(l1, k).nonzero().flatten().tolist() == [0, 1]
    assert ct.smallest(l2, k).nonzero().flatten().tolist() == [1, 3]
    L1, L2, chosen = ct.exchanged(l1, l2, k)
    assert L1.item() == pytest.approx(L1_HAND, abs=5e-7)
    assert L2.item() == pytest.approx(L2_HAND, abs=5e-7)
    assert chosen.tolist() == [0.5, 1.0, 0.0, 0.5]


class Fixed(torch.nn.Module):
    """Scores that are parameters, whatever the image."""

    def __init__(self, scores: torch.Tensor) -> None:
        super().__init__()
        self.scores = torch.nn.Parameter(scores.float())
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(x)
        return self.scores


def a_batch(y: torch.Tensor, forget: float, views: int = 1, seed: int = 0) -> Batch:
    g = torch.Generator().manual_seed(seed)
    x = tuple(torch.randn(len(y), 1, 8, 8, generator=g) for _ in range(views))
    zero = torch.zeros((), dtype=torch.int64)
    sample = {"chosen": torch.ones(len(y))}
    return Batch(x, y, torch.arange(len(y)), zero, zero, sample=sample, given={"forget": scalar(forget)})


def test_spec_exchange_twice_averaged_as_the_official_code():
    batch = a_batch(T, 0.5)
    once, _, rows = ct.loss(torch.nn.ModuleList([Fixed(Y1), Fixed(Y2)]), batch)
    twice, _, same = ct.loss_averaged_twice(torch.nn.ModuleList([Fixed(Y1), Fixed(Y2)]), batch)
    assert once.item() == pytest.approx(L1_HAND + L2_HAND, abs=2e-6)
    assert twice.item() == pytest.approx(0.156631 + L2_HAND / 2, abs=2e-6)
    assert rows["chosen"].equal(same["chosen"])


def test_spec_forget_rate_zero_is_the_ordinary_mean_cross_entropy_of_each_network():
    l1, l2 = per_sample(Y1), per_sample(Y2)
    L1, L2, chosen = ct.exchanged(l1, l2, ct.number_kept(scalar(0.0), 4))
    torch.testing.assert_close(L1, F.cross_entropy(Y1, T), rtol=1e-15, atol=0)
    torch.testing.assert_close(L2, F.cross_entropy(Y2, T), rtol=1e-15, atol=0)
    assert chosen.tolist() == [1.0] * 4


def test_each_network_gets_the_gradient_of_its_own_loss_on_the_others_choice():
    pair = torch.nn.ModuleList([Fixed(Y1), Fixed(Y2)])
    ct.loss(pair, a_batch(T, 0.5))[0].backward()
    for network, chosen in zip(pair, ([1, 3], [0, 1]), strict=True):
        alone = network.scores.detach().clone().requires_grad_()
        F.cross_entropy(alone[chosen], T[chosen]).backward()
        torch.testing.assert_close(network.scores.grad, alone.grad)
        assert network.scores.grad.abs().sum(1).nonzero().flatten().tolist() == chosen


@pytest.mark.parametrize("B", [1, 2, 7, 64, 200])
@pytest.mark.parametrize("forget", [0.0, 0.28, 0.7, 0.99])
def test_masks_are_the_plain_loop_over_sorted_lists(B, forget):
    g = torch.Generator().manual_seed(B)
    l1, l2 = (torch.randint(5, (B,), generator=g).to(f64) for _ in range(2))  # many ties
    k = max(1, int((1 - forget) * B))
    I1, I2 = (sorted(range(B), key=lambda i, loss=loss: loss[i].item())[:k] for loss in (l1, l2))
    L1, L2, chosen = ct.exchanged(l1, l2, ct.number_kept(scalar(forget), B))
    assert L1.item() == pytest.approx(sum(l1[i].item() for i in I2) / k)
    assert L2.item() == pytest.approx(sum(l2[i].item() for i in I1) / k)
    assert chosen.tolist() == [((i in I1) + (i in I2)) / 2 for i in range(B)]


@pytest.mark.parametrize("own", [False, True])
def test_both_networks_see_one_view_or_each_its_own(own):
    pair = torch.nn.ModuleList([Fixed(Y1), Fixed(Y2)])
    batch = a_batch(T, 0.5, views=1 + own)
    ct.loss(pair, batch)
    assert pair[0].seen[0] is batch.views[0]
    assert pair[1].seen[0] is batch.views[-1]


@pytest.mark.parametrize("name", ["loss", "loss_averaged_twice"])
def test_recorded_step_follows_another_forget_rate_and_another_batch(name):
    lane = Lane(tiny_engine(CoTeaching(), told={"noise_rate": 0.3}))
    pair = lane.client(0, None, 0, 0).model(CoTeaching().init(lane.server(0, 0, "init")))
    g = torch.Generator().manual_seed(3)
    first, second = (a_batch(torch.randint(3, (8,), generator=g), f, seed=s) for f, s in ((0.0, 1), (0.6, 2)))
    for one, other in ((first, second), (second, first)):
        capture_safe(getattr(ct, name), pair, one, other)


# ------------------------------------------------------------------------------------------- the two networks


def start(method: Method, **options: object) -> dict[str, torch.Tensor]:
    return method.init(Lane(tiny_engine(method, **options)).server(0, 0, "init"))


def half(state: dict[str, torch.Tensor], number: int) -> dict[str, torch.Tensor]:
    return {name[2:]: value for name, value in state.items() if name.startswith(f"{number}.")}


@pytest.mark.parametrize("model", ["mlp", "small-cnn"])
def test_networks_begin_differently_and_each_as_a_single_one_would(model):
    state = start(CoTeaching(), model=model)
    first, second = half(state, 0), half(state, 1)
    assert len(first) * 2 == len(state)
    assert same_bits(first, start(FedAvg(), model=model))
    assert same_bits(second, start(Second(), model=model))
    assert not any(first[name].equal(second[name]) for name in first)


class Constant(CoTeaching):
    """A model whose initialisation draws nothing, as a pretrained one with a fixed head."""

    def network(self, encoder):
        pair = super().network(encoder)
        for parameter in pair.parameters():
            torch.nn.init.constant_(parameter, 0.5)
        return pair


def test_equal_networks_are_refused():
    with pytest.raises(RuntimeError, match="both networks start with the same weights"):
        start(Constant())


@pytest.mark.parametrize("own", [False, True])
def test_pitfall_vii_an_equal_pair_stays_equal_on_common_images_and_parts_on_views_of_its_own(own):
    method = CoTeaching(Settings(forget_rate=0.3, own_views=own, ramp=0))
    lane = Lane(tiny_engine(method, look=Look((0.5,), (0.25,), crop_padding=1, flip=True)))
    state = method.init(lane.server(0, 0, "init"))
    state = {**state, **{f"1.{name}": value.clone() for name, value in half(state, 0).items()}}
    upload = perform(lane, Job(0, "train", state, None, False, 0, 0)).reply.upload
    assert same_bits(half(upload, 0), half(upload, 1)) is not own


# --------------------------------------------------------------------------------------- equal to two FedAvgs


class Second(FedAvg):
    """FedAvg from the weights that Co-teaching's second network begins with: those of the stream "second"."""

    card = Card(title="second", paper="a fixture", year=2026)

    def init(self, server):
        return weights(server.model(name="second"))


class PlainPair(CoTeaching):
    """Two networks on the same batches, each with plain cross-entropy: what Co-teaching is without its selection."""

    card = Card(title="plain pair", paper="a fixture", year=2026)

    def client(self, task, message, client):
        pair = client.model(message)
        client.fit(pair, summed_cross_entropy)
        return Reply(weights(pair))

    def aggregate(self, state, uploads, server):
        return average([upload.content for upload in uploads], [upload.size for upload in uploads])


def summed_cross_entropy(pair, batch):
    return sum(F.cross_entropy(network(batch.x), batch.y) for network in pair)


class Even(Method):
    """A network of whole SIMD vectors.  The optimiser steps all of a network's numbers as one vector, whose last few
    are rounded otherwise than the rest; in a pair they lie elsewhere than in a single network."""

    def network(self, encoder):
        return torch.nn.Sequential(encoder, torch.nn.Linear(encoder.width, encoder.classes, bias=False))


class Normed(Method):
    """The same with BatchNorm."""

    def network(self, encoder):
        norm = torch.nn.BatchNorm1d(encoder.width)
        return torch.nn.Sequential(encoder, norm, torch.nn.Linear(encoder.width, encoder.classes, bias=False))


class EvenPair(CoTeaching, Even): ...


class EvenPlain(PlainPair, Even): ...


class EvenFirst(FedAvg, Even): ...


class EvenSecond(Second, Even): ...


class NormedPair(CoTeaching, Normed): ...


class NormedPlain(PlainPair, Normed): ...


class NormedFirst(FedAvg, Normed): ...


class NormedSecond(Second, Normed): ...


def same_bits(a, b):
    return list(a) == list(b) and all(a[name].equal(b[name]) for name in a)


def final_states(methods, folder, **options):
    found = []
    for method in methods:
        settings = {"forget_rate": 0.0} if issubclass(method, CoTeaching) else {}
        run = tiny_run(method, folder / method.__name__, settings=settings, **options)
        run.execute()
        found.append(server_state(run))
    return found


@pytest.mark.parametrize(
    "methods",
    [(EvenPair, EvenPlain, EvenFirst, EvenSecond), (NormedPair, NormedPlain, NormedFirst, NormedSecond)],
    ids=["plain", "batchnorm"],
)
@pytest.mark.parametrize("protocol", [{"participation": 0.7, "clients": 4}, {"batch": 5, "local_epochs": 2}], ids=str)
def test_spec_forget_rate_zero_is_two_fedavgs_to_the_last_bit(methods, protocol, tmp_path):
    pair, plain, first, second = final_states(methods, tmp_path, **protocol)
    assert same_bits(pair, plain)
    assert same_bits(half(pair, 0), first)
    assert same_bits(half(pair, 1), second)
    assert not same_bits(first, second)


def test_spec_forget_rate_zero_is_two_fedavgs_of_the_shipped_network(tmp_path):
    pair, plain, first, second = final_states((CoTeaching, PlainPair, FedAvg, Second), tmp_path, batch=5)
    assert same_bits(pair, plain)
    for number, single in ((0, first), (1, second)):
        for name, value in half(pair, number).items():
            torch.testing.assert_close(value, single[name], rtol=0, atol=1e-6)


# ------------------------------------------------------------------------------------------------ whole runs


@pytest.fixture(scope="module")
def ordinary(tmp_path_factory):
    """One run under noise, watched: (result, records, Run, comparisons made)."""
    torch.set_num_threads(1)
    run = tiny_run(CoTeaching, tmp_path_factory.mktemp("ordinary"), rounds=6)
    with watch_losses() as seen:
        result = run.execute()
    return result, records.load_records(run.folder), run, seen


def test_it_learns_and_its_loss_can_be_recorded(ordinary):
    result, _, _, seen = ordinary
    assert result.accuracy.final > 90  # of 3 classes, with 30 % of the labels wrong
    assert seen["loss"] >= 10


def test_main_is_network_1_and_the_second_and_the_ensemble_are_read_beside_it(ordinary):
    _, rounds, run, _ = ordinary
    assert set(rounds[-1].predictors) == {"main", "net2", "ensemble"}
    lane, state = Lane(run.engine), server_state(run)
    found = run.method.predictors(state, lane.server(5, 0, "predict"))
    x = torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    single = Lane(tiny_engine(FedAvg()))
    one, two = (FedAvg().predictors(half(state, i), single.server(5, i, "predict"))["main"](x).clone() for i in (0, 1))
    assert found["main"](x).equal(one)
    assert found["net2"](x).equal(two)
    assert found["ensemble"](x).equal(one + two)
    assert not one.equal(two)


def test_three_readouts_cost_two_forward_passes_and_are_never_stale(ordinary):
    result, rounds, run, _ = ordinary
    assert result.images["passed"] == 2 * 30 * len(rounds)  # two networks see the 30 test images each round
    found = run.method.predictors(server_state(run), Lane(run.engine).server(5, 0, "predict"))
    x = torch.zeros(2, 1, 8, 8)
    before = found["ensemble"](x).clone()
    x += 1
    assert not found["ensemble"](x).equal(before)
    with torch.inference_mode():
        hidden = torch.zeros(2, 1, 8, 8)
        assert found["ensemble"](hidden).equal(before)


def test_record_says_the_forget_rate_and_how_often_the_networks_disagreed(ordinary):
    _, rounds, _, _ = ordinary
    assert [record.notes["forget_rate"] for record in rounds] == pytest.approx([0.0] + [0.3] * 5)
    assert rounds[0].metrics["disputed"] == 0.0  # nothing is refused at F = 0
    assert 0 < rounds[1].metrics["disputed"] < 1


def test_traffic_is_twice_fedavgs(ordinary, tmp_path):
    run = tiny_run(FedAvg, tmp_path, rounds=6)
    single = run.execute()
    assert ordinary[0].bytes_up == 2 * single.bytes_up
    assert ordinary[0].bytes_down == 2 * single.bytes_down


def test_selection_claims_the_refused_samples_for_wrong_and_is_mostly_right(ordinary):
    _, rounds, _, _ = ordinary
    assert "samples_recall" not in rounds[0].judged or rounds[0].judged["samples_recall"] == 0
    assert rounds[-1].judged["samples_precision"] > 60  # 30 % by chance
    assert rounds[-1].judged["samples_recall"] > 60


def test_loss_metric_is_the_mean_over_the_two_networks(tmp_path):
    run = tiny_run(CoTeaching, tmp_path / "pair", settings={"forget_rate": 0.0}, rounds=1)
    run.execute()
    (pair,) = records.load_records(run.folder)
    singles = []
    for method in (FedAvg, Second):
        single = tiny_run(method, tmp_path / method.__name__, rounds=1)
        single.execute()
        singles.append(records.load_records(single.folder)[0].metrics["loss"])
    assert pair.metrics["loss"] == pytest.approx(sum(singles) / 2)


def test_stopped_after_any_commit_it_resumes_to_the_same_digest(ordinary, tmp_path):
    result, stops = in_sessions(lambda: tiny_run(CoTeaching, tmp_path, rounds=6).execute())
    assert stops == 7
    assert result.digest == ordinary[0].digest


def test_threads_give_the_serial_digest(ordinary, tmp_path):
    threads = tiny_run(CoTeaching, tmp_path, rounds=6, executor="threads", lanes=3).execute()
    assert threads.digest == ordinary[0].digest
    assert threads.images["trained"] == 6 * 2 * 72  # both networks count


@pytest.mark.parametrize(
    "change",
    [
        {"forget_rate": 0.5}, {"ramp": 4}, {"ramp": 4, "ramp_form": "paper"}, {"ramp": 4, "ramp_skip": 1},
        {"ramp": 4, "exponent": 3.0}, {"averaged": "twice"},
    ],
    ids=str,
)  # fmt: skip
def test_each_setting_has_an_effect(change, ordinary, tmp_path):
    # a change beside ramp=4 is compared with ramp=4 alone
    plain = ordinary[0].digest
    if len(change) > 1:
        plain = tiny_run(CoTeaching, tmp_path / "plain", settings={"ramp": 4}, rounds=6).execute().digest
    with watch_losses() as seen:
        assert tiny_run(CoTeaching, tmp_path, settings=change, rounds=6).execute().digest != plain
    assert set(seen) == {"loss_averaged_twice" if "averaged" in change else "loss"}


def test_a_client_of_one_sample_trains_on_it_whatever_is_forgotten(tmp_path):
    positions = [[0], list(range(1, 36)), list(range(36, 72))]
    method = CoTeaching(Settings(forget_rate=0.9, ramp=0))
    engine = tiny_engine(method, positions=positions)
    lane = Lane(engine)
    state = method.init(lane.server(0, 0, "init"))
    reply = perform(lane, Job(0, "train", state, None, False, 0, 0)).reply
    assert reply.claims.clean.tolist() == [1.0]
    for number in (0, 1):
        assert not same_bits(half(reply.upload, number), half(state, number))
    assert math.isfinite(reply.metrics["loss"])


def test_a_lone_sample_before_a_batchnorm_is_skipped_and_not_called_noisy():
    method = NormedPair(Settings(forget_rate=0.9, ramp=0))
    lane = Lane(tiny_engine(method, positions=[[0], list(range(1, 72))]))
    state = method.init(lane.server(0, 0, "init"))
    reply = perform(lane, Job(0, "train", state, None, False, 0, 0)).reply
    assert same_bits(reply.upload, state)
    assert reply.claims.clean.tolist() == [1.0]
    assert math.isfinite(reply.metrics["loss"])


def test_each_network_is_averaged_by_the_clients_sizes():
    lane = Lane(tiny_engine(CoTeaching(), told={"noise_rate": 0.3}))
    uploads = [
        Upload(0, 10, {"0.w": torch.tensor([1.0]), "1.w": torch.tensor([8.0])}),
        Upload(2, 30, {"0.w": torch.tensor([5.0]), "1.w": torch.tensor([0.0])}),
    ]
    found = CoTeaching().aggregate({}, uploads, lane.server(0, 0, "aggregate"))
    assert {name: value.item() for name, value in found.items()} == {"0.w": 4.0, "1.w": 2.0}


def test_disputed_is_the_share_that_one_of_the_two_networks_chose():
    method = CoTeaching(Settings(forget_rate=0.5, ramp=0))
    lane = Lane(tiny_engine(method))
    reply = perform(lane, Job(0, "train", method.init(lane.server(0, 0, "init")), None, False, 0, 0)).reply
    assert (reply.claims.clean == 0).any()  # refused by both, which is no dispute
    assert reply.metrics["disputed"] == pytest.approx((reply.claims.clean == 0.5).double().mean().item())


def test_short_last_batch_keeps_the_floor_of_its_own_size():
    # 11 samples in batches of 8 and 3, F = .5: 4 and 1 are kept by each network
    method = CoTeaching(Settings(forget_rate=0.5, ramp=0))
    lane = Lane(tiny_engine(method, positions=[list(range(11)), list(range(11, 72))]))
    state = method.init(lane.server(0, 0, "init"))
    chosen = perform(lane, Job(0, "train", state, None, False, 0, 0)).reply.claims.clean
    assert chosen.sum().item() == 4 + 1
    assert chosen.unique().tolist() in ([0.0, 0.5, 1.0], [0.0, 1.0])


def test_clients_without_some_classes_and_clients_left_out_do_no_harm(tmp_path):
    partition = {"law": "dirichlet", "alpha": 0.05, "min_size": 1}
    run = tiny_run(CoTeaching, tmp_path, partition=partition, participation=0.5, clients=6, rounds=4)
    assert min(run.engine.given[rows].unique().numel() for rows in run.engine.positions) < 3
    assert run.execute().status == "complete"


def test_a_client_whose_labels_are_all_wrong_and_one_all_right_are_treated_alike():
    """The forget rate is one number: no client knows its own."""
    arrays = tiny_arrays()
    given = arrays.train_labels.clone()
    given[::3] = (given[::3] + 1) % 3  # all of client 0's
    method = CoTeaching(Settings(forget_rate=0.25, ramp=0))
    lane = Lane(tiny_engine(method, arrays=arrays, given=given))
    state = method.init(lane.server(0, 0, "init"))
    for client in (0, 1):
        assert perform(lane, Job(client, "train", state, None, False, 0, 0)).reply.claims.clean.sum().item() == 3 * 6


def test_unknown_noise_without_a_set_rate_fails_with_advice_and_runs_with_one():
    for settings, fails in (({}, True), ({"forget_rate": 0.39}, False)):
        method = CoTeaching(Settings(**settings))
        lane = Lane(tiny_engine(method, told={}))
        state = method.init(lane.server(0, 0, "init"))
        job = Job(0, "train", state, None, False, 0, 0)
        if fails:
            with pytest.raises(ClientError, match="Set forget_rate"):
                perform(lane, job)
        else:
            assert perform(lane, job).reply.claims.clean is not None


# --------------------------------------------------------------------------------------------------- presets


@pytest.mark.parametrize("dataset", ["cifar10", "cifar100", "clothing1m", "digits", "fashion-mnist"])
@pytest.mark.parametrize("name", list(CoTeaching.presets))
def test_presets_are_valid_on_every_data_set(name, dataset):
    settings, protocol = CoTeaching.presets[name].on(dataset)
    config = Settings(**settings)
    budget = Protocol(**merged(Protocol().model_dump(), dict(protocol)))
    assert (budget.rounds, budget.local_epochs) == (500, 1)  # as many images as in the track common
    assert config.averaged == ("twice" if name == "code-literal" else "once")
    if dataset == "clothing1m":  # nobody can tell its noise
        assert config.forget_rate == 0.39
        assert config.own_views
    else:
        chosen = name == "fnbench" or (name, dataset) == ("default", "digits")
        assert config.forget_rate == (0.2 if chosen else None)


def test_first_preset_is_the_authors_recipe_where_the_track_lets_it():
    assert next(iter(CoTeaching.presets)) == "default"
    _, protocol = CoTeaching.presets["default"].on("cifar10")
    assert (protocol["batch"], protocol["last_batch"]) == (128, "drop")
    assert (protocol["optimiser"]["name"], protocol["optimiser"]["lr"]) == ("adam", 0.001)
    assert Settings(**CoTeaching.presets["fnbench"].settings).ramp == Rounds(0.2)


@pytest.mark.parametrize(
    ("name", "batch", "optimiser"),
    [
        ("default", 128, ("adam", 0.001, 0.9, 0.0)),
        ("code-literal", 128, ("adam", 0.001, 0.9, 0.0)),
        ("paper-literal", 128, ("adam", 0.001, 0.9, 0.0)),
        ("fednoisy", None, ("sgd", 0.01, 0.9, 5e-4)),
        ("fnbench", 64, ("sgd", 0.01, 0.9, 5e-4)),
    ],
)
def test_own_budgets_are_the_authors_and_the_ports(name, batch, optimiser):
    _, protocol = CoTeaching.presets[name].on("cifar10")
    assert protocol.get("batch") == batch
    assert tuple(protocol["optimiser"][part] for part in ("name", "lr", "momentum", "weight_decay")) == optimiser
