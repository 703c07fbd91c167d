"""FedAvg with logit adjustment against numbers worked out by hand and FedNoRo's same loss.  What it shares with all of
FedAvg's variants is tried with them, in test_fedavg_variants.py."""

import math

import pytest
import torch
from flnoisebench_methods import fedavg_la, fednoro
from flnoisebench_methods.fedavg import FedAvg
from flnoisebench_methods.fedavg_la import FedAvgLA

from flnoisebench.api import Batch
from flnoisebench.engine import Lane
from flnoisebench.testing import tiny_arrays, tiny_engine, tiny_run

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_prior_by_hand():
    labels = torch.tensor([0, 0, 0, 2])
    prior = fedavg_la.log_prior(labels, 3, 1.0)
    assert prior.tolist() == [pytest.approx(math.log(0.75)), -math.inf, pytest.approx(math.log(0.25))]
    assert prior.dtype == torch.float32
    half = fedavg_la.log_prior(labels, 3, 0.5)
    assert half.tolist() == [pytest.approx(math.log(0.75) / 2), -math.inf, pytest.approx(math.log(0.25) / 2)]


def batch_of(z, y, prior):
    zero = torch.tensor(0)
    return Batch((z,), y, torch.arange(len(y)), zero, zero + 1, given={"log_prior": prior})


def loss_of(z, y, prior):
    return fedavg_la.adjusted_cross_entropy(torch.nn.Identity(), batch_of(z, y, prior))


def test_the_loss_by_hand():
    """Logits ln 1, ln 2, ln 1 and shares 1/2, 1/4, 1/4: e^z times the shares are 2 : 2 : 1 quarters."""
    z = torch.tensor([[0.0, math.log(2), 0.0]] * 2)
    prior = torch.tensor([0.5, 0.25, 0.25]).log()
    assert loss_of(z, torch.tensor([0, 0]), prior).item() == pytest.approx(math.log(2.5))
    assert loss_of(z, torch.tensor([1, 2]), prior).item() == pytest.approx((math.log(2.5) + math.log(5)) / 2)


def test_an_absent_class_is_left_out_and_its_logit_gets_no_gradient():
    z = torch.tensor([[0.0, 50.0, 0.0]], requires_grad=True)
    prior = fedavg_la.log_prior(torch.tensor([0, 2]), 3, 1.0)
    loss = loss_of(z, torch.tensor([0]), prior)
    loss.backward()
    assert loss.item() == pytest.approx(math.log(2))
    assert z.grad.tolist() == [[pytest.approx(-0.5), 0.0, pytest.approx(0.5)]]


def test_with_equal_classes_it_is_the_cross_entropy():
    z, y = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 4
    assert loss_of(z, y, fedavg_la.log_prior(y, 4, 1.0)).item() == pytest.approx(
        torch.nn.functional.cross_entropy(z, y).item()
    )


@pytest.mark.parametrize("adjustment", [0.5, 1.0])
def test_loss_and_gradient_are_fednoros(adjustment):
    rng = torch.Generator().manual_seed(1)
    labels = torch.tensor([0, 0, 1, 3, 3, 3])
    ours, theirs = (
        fedavg_la.log_prior(labels, 5, adjustment),
        fednoro.log_prior(labels.bincount(minlength=5), adjustment),
    )
    assert torch.equal(ours, theirs)
    first = torch.randn(6, 5, generator=rng)
    found = []
    for loss in (fedavg_la.adjusted_cross_entropy, fednoro.adjusted_loss):
        z = first.clone().requires_grad_()
        value = loss(torch.nn.Identity(), batch_of(z, labels, ours))
        value.backward()
        found.append((value.item(), z.grad))
    assert found[0][0] == pytest.approx(found[1][0], abs=1e-6)
    torch.testing.assert_close(found[0][1], found[1][1], atol=1e-6, rtol=0)


def test_a_client_trains_with_its_own_shares_and_its_upload_is_what_was_trained(monkeypatch):
    engine = tiny_engine(
        FedAvgLA(fedavg_la.Settings(adjustment=0.5)), positions=[[0, 1, 2, 3, 4, 6, 8], [*range(9, 20)]]
    )
    lane, seen = Lane(engine), []
    start = engine.method.init(lane.server(0, 0, "init"))
    for client in range(2):
        side = lane.client(client, None, 0, 0)
        monkeypatch.setattr(side, "fit", lambda *args, fit=side.fit, **kw: seen.append(kw["given"]) or fit(*args, **kw))
        reply = engine.method.client("train", start, side)
        counts = side.labels.bincount(minlength=side.classes).double()
        assert seen[-1]["log_prior"].tolist() == pytest.approx((0.5 * (counts / counts.sum()).log()).tolist())
        assert any(not torch.equal(reply.upload[name], start[name]) for name in start)
    assert seen[0]["log_prior"].tolist() != seen[1]["log_prior"].tolist()


def test_predictions_are_of_the_plain_logits():
    engine = tiny_engine(FedAvgLA())
    state = engine.method.init(Lane(engine).server(0, 0, "init"))
    x = torch.rand(4, *tiny_arrays().train_images.shape[1:])
    ours, plain = (
        method.predictors(state, Lane(engine).server(0, 0, "evaluate"))["main"](x).clone()
        for method in (engine.method, FedAvg())
    )
    assert torch.equal(ours, plain)


def test_the_adjustment_has_an_effect_and_nonsense_is_refused(tmp_path):
    base = tiny_run(FedAvgLA, tmp_path / "base").execute()
    assert tiny_run(FedAvgLA, tmp_path / "other", settings={"adjustment": 0.5}).execute().digest != base.digest
    for value in (0, -1):
        with pytest.raises(ValueError, match="adjustment"):
            fedavg_la.Settings(adjustment=value)


def test_it_has_fednoros_adjustment_on_every_data_set():
    """So what FedNoRo has beyond this row is not its loss."""
    ours, theirs = FedAvgLA.presets["default"], fednoro.FedNoRo.presets["default"]
    for dataset in ("digits", "fashion-mnist", "cifar10"):
        mine, its = (
            kind(**preset.on(dataset)[0]) for kind, preset in ((fedavg_la.Settings, ours), (fednoro.Settings, theirs))
        )
        assert mine.adjustment == its.adjustment, dataset
