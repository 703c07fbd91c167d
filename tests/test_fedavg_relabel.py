"""FedAvg with gated relabelling, exchange by exchange."""

import pytest
import torch
from flnoisebench_methods import fedavg_relabel as fr

from flnoisebench.api import Rounds, Upload
from flnoisebench.engine import Lane, images_of
from flnoisebench.executors import Job, perform
from flnoisebench.testing import tiny_engine

pytestmark = pytest.mark.usefixtures("one_thread")


def made(**settings):
    return fr.FedAvgRelabel(fr.Settings(**settings))


def answer(method, task, state, message=None):
    """(outcome of client 0, its softmax scores under the first weights)."""
    lane = Lane(tiny_engine(method))
    start = method.init(lane.server(0, 0, "init"))["weights"]
    outcome = perform(lane, Job(0, task, {"weights": start, **(message or {})}, state, True, 0, 0))
    side = Lane(tiny_engine(method)).client(0, None, 0, 0)
    network = side.model(start, frozen=True)
    return outcome, network(images_of(side).plain(torch.arange(24))).softmax(1)


def test_a_client_uploads_its_disagreement_and_proposes_what_it_is_sure_of():
    labels = torch.arange(24) % 3
    confidence, best = answer(made(), "score", {"labels": labels, "proposed": None})[1].max(1)
    eta = confidence.sort().values[12].item()  # one that is reached exactly
    outcome, _ = answer(made(eta=eta), "score", {"labels": labels, "proposed": None})
    assert outcome.reply.upload == {"disagreement": pytest.approx((best != labels).sum().item() / 24)}
    expected = torch.where(confidence >= eta, best, labels)
    assert torch.equal(outcome.state["proposed"], expected)
    assert torch.equal(outcome.state["labels"], labels)
    assert not torch.equal(expected, labels)
    assert not torch.equal(expected, best)


def test_a_client_that_is_told_so_trains_on_its_proposals_for_good_and_another_forgets_them():
    old, new = torch.arange(24) % 3, (torch.arange(24) + 1) % 3

    def trained(labels, proposed, message=None):
        outcome, _ = answer(made(), "train", {"labels": labels, "proposed": proposed}, message)
        return outcome.reply.upload, outcome.state, outcome.reply.claims.noisy

    def same(one, other):
        return all(torch.equal(one[name], other[name]) for name in other)

    (by_old, _, unsaid), (by_new, _, _) = trained(old, None), trained(new, None)
    assert unsaid is None
    assert not same(by_old, by_new)
    for told, weights, labels in ((True, by_new, new), (False, by_old, old)):
        upload, state, noisy = trained(old, new, {"correct_me": told})
        assert same(upload, weights)
        assert torch.equal(state["labels"], labels)
        assert state["proposed"] is None
        assert noisy is told


def test_in_a_correction_round_those_over_the_gate_correct_and_the_same_cohort_trains():
    method = made(gate=0.5, correct_start=Rounds(2), correct_period=Rounds(3), correct_stop=Rounds(8))
    engine = tiny_engine(method, clients=6, rounds=10, participation=0.5)

    def server(round, exchange, role):
        return Lane(engine).server(round, exchange, role)

    state = method.init(server(0, 0, "init"))
    tasks = [method.plan(state, server(r, 0, "plan")).task for r in range(10)]
    assert [r for r, task in enumerate(tasks) if task == "score"] == [2, 5]  # 8 is stop
    first = method.plan(state, server(5, 0, "plan"))
    assert not first.closes_round
    uploads = [Upload(m, 12, {"disagreement": r}) for m, r in zip(sorted(first.cohort), (0.5, 0.49, 0.9), strict=True)]
    side = server(5, 0, "aggregate")
    scored = method.aggregate(state, uploads, side)
    a, b, c = sorted(first.cohort)
    assert side.noisy_clients == [a, c]  # .5 is the gate
    second = method.plan(scored, server(5, 1, "plan"))
    assert (second.task, list(second.cohort), second.closes_round) == ("train", [a, b, c], True)
    assert second.private == {a: {"correct_me": True}, b: {"correct_me": False}, c: {"correct_me": True}}
    results = [
        Upload(m, n, {name: torch.full_like(value, x) for name, value in state["weights"].items()})
        for m, n, x in ((a, 10, 1.0), (b, 10, 2.0), (c, 20, 4.0))
    ]
    after = method.aggregate(scored, results, server(5, 1, "aggregate"))
    assert after["corrected"] is None
    assert all((value == 2.75).all() for value in after["weights"].values())
