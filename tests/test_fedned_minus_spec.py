"""FedNed- against FedAvg and against numbers worked out by hand.  Names with spec_ are its specification's facts."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from flnoisebench_methods import fedned_minus
from flnoisebench_methods.fedavg import FedAvg
from flnoisebench_methods.fedned_minus import FedNedMinus, Settings

from flnoisebench.api import Batch, Upload, map_tensors
from flnoisebench.engine import Lane
from flnoisebench.testing import tiny_arrays, tiny_engine, tiny_run, watch_losses

POS = {"distill": "positive", "distill_steps": 5, "distill_batch": 8}


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    "options", [{}, {"seed": 3}, {"clients": 6, "participation": 0.5}, {"local_epochs": 2}], ids=str
)
def test_spec_literal_is_fedavg_bit_for_bit(options, tmp_path):
    digests = {
        tiny_run(method, tmp_path / method.__name__, **options).execute().digest for method in (FedAvg, FedNedMinus)
    }
    assert len(digests) == 1


def engine(public: int = 20, **settings):
    return tiny_engine(FedNedMinus(Settings(**settings)), arrays=tiny_arrays(public=public), rounds=10)


def start(eng):
    return eng.method.init(Lane(eng).server(0, 0, "init"))


def listen(eng, state, *uploads):
    server = Lane(eng).server(3, 0, "aggregate")
    return eng.method.aggregate(state, [Upload(*upload) for upload in uploads], server), server


def test_spec_literal_aggregate_is_the_mean_by_size():
    eng = engine()
    w = start(eng)
    a, b = map_tensors(lambda t: t + 1, w), map_tensors(lambda t: 3 * t, w)
    new, server = listen(eng, w, (0, 10, a), (1, 30, b))
    for name in w:
        torch.testing.assert_close(new[name], (10 * a[name] + 30 * b[name]) / 40)
    assert server.notes == {}


def test_spec_pos_with_equal_clients_has_loss_and_gradient_0():
    eng = engine(**POS)
    w = map_tensors(lambda t: 5 * t, start(eng))
    network, x = Lane(eng).server(0, 0, "x").model(w), eng.public.plain(torch.arange(20))
    zero, given = torch.tensor(0), {"temperature": torch.tensor(2.0, dtype=torch.float64)}
    seen = Batch((x,), zero.expand(20), torch.arange(20), zero, zero, given=given, frozen={"network": network})
    target = fedned_minus.prediction(seen).detach()
    assert target.max(1).values.mean().item() > 0.4  # not uniform
    for shift, level in ((0, 0.0), (1, 0.1)):
        network.zero_grad()
        loss = fedned_minus.divergence(network, Batch((x,), target.roll(shift, 1), seen.index, zero, zero, given=given))
        loss.backward()
        slope = max(parameter.grad.abs().max().item() for parameter in network.parameters())
        assert (abs(loss.item()) < 1e-6) == (slope < 1e-6) == (level == 0)
    new, server = listen(eng, w, *[(m, 10, w) for m in range(3)])
    assert abs(server.notes["distillation_loss"]) < 1e-6
    for name in w:
        torch.testing.assert_close(new[name], w[name], rtol=1e-5, atol=1e-6)


def test_pos_follows_a_plain_loop_over_its_definition():
    eng = engine(**{**POS, "distill_steps": 30, "distill_batch": 20})
    w = start(eng)
    a, b = map_tensors(lambda t: 5 * t, w), map_tensors(lambda t: -4 * t, w)
    new, _ = listen(eng, w, (0, 10, a), (1, 30, b))
    x = eng.public.plain(torch.arange(20))
    student = Lane(eng).server(0, 0, "x").model({name: (10 * a[name] + 30 * b[name]) / 40 for name in w})
    target = 0
    for teacher in (a, b):
        reader = Lane(eng).server(0, 0, "x").model(teacher, frozen=True)
        target = target + (reader(x) / 2).softmax(1) / 2
    begin = map_tensors(torch.clone, dict(student.state_dict()))
    sgd = torch.optim.SGD(student.parameters(), lr=0.01)
    for _ in range(30):
        loss = 4 * F.kl_div((student(x) / 2).log_softmax(1), target, reduction="batchmean")
        sgd.zero_grad()
        loss.backward()
        sgd.step()
    for name, value in student.state_dict().items():
        torch.testing.assert_close(new[name], value, rtol=1e-4, atol=1e-5)
    assert max((new[name] - begin[name]).abs().max().item() for name in w) > 1e-3


def test_public_images_leave_no_statistics_in_batchnorm():
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3)).train()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    zero, given = torch.tensor(0), {"temperature": torch.tensor(2.0)}
    batch = Batch((5 + torch.randn(8, 4),), torch.full((8, 3), 1 / 3), torch.arange(8), zero, zero, given=given)
    fedned_minus.divergence(network, batch).backward()
    assert all(torch.equal(before[name], value) for name, value in network.state_dict().items())


def test_pos_runs_its_loss_can_be_recorded_and_threads_give_the_same_bits(tmp_path):
    with watch_losses() as seen:
        result = tiny_run(FedNedMinus, tmp_path / "serial", settings=POS).execute()
    assert result.accuracy.final > 60
    assert seen["divergence"] > 0
    threads = tiny_run(FedNedMinus, tmp_path / "threads", settings=POS, executor="threads", lanes=3).execute()
    assert threads.digest == result.digest


@pytest.mark.parametrize(
    "change",
    [{"distill": "none"}, {"temperature": 4.0}, {"distill_steps": 2}, {"distill_batch": 4}, {"distill_lr": 0.1}],
    ids=str,
)
def test_each_setting_has_an_effect(change):
    found = []
    for settings in (POS, {**POS, **change}):
        eng = engine(**settings)
        w = start(eng)
        new, _ = listen(eng, w, (0, 10, map_tensors(lambda t: 5 * t, w)), (1, 30, map_tensors(lambda t: -4 * t, w)))
        found.append(new)
    assert any(not torch.equal(found[0][name], found[1][name]) for name in w)


def test_only_pos_needs_public_images():
    assert start(engine(public=0)).keys()
    with pytest.raises(ValueError, match="brings none"):
        start(engine(public=0, distill="positive"))


def test_own_budget_trains_as_many_images_as_the_standard_one():
    for dataset, rounds in (
        ("cifar10", 500),
        ("cifar100", 500),
        ("clothing1m", 50),
        ("fashion-mnist", 50),
        ("digits", 100),
    ):
        for preset in FedNedMinus.presets.values():
            _, protocol = preset.on(dataset)
            assert protocol["rounds"] * protocol["local_epochs"] == rounds
    assert list(FedNedMinus.presets) == ["literal", "pos"]
    assert Settings(**FedNedMinus.presets["pos"].settings).distill == "positive"
