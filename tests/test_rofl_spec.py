"""RoFL against the numbers of its specification, and against a plain loop over its definition.

Names with spec_F1 ... spec_F7 are the checkable facts, with the printed numbers.
"""

# ruff: noqa: N802 (the facts are called F1 to F7)

from __future__ import annotations

import functools
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from stopping import in_sessions, server_state

from flnoisebench import protocols, registry, settings
from flnoisebench.api import Batch, Rounds, Upload, weights
from flnoisebench.engine import Lane, Look, images_of
from flnoisebench.executors import ClientError, Job, perform
from flnoisebench.models import build_encoder
from flnoisebench.records import load_records
from flnoisebench.testing import Tiny, capture_safe, tiny_arrays, tiny_engine, tiny_run, watch_losses
from flnoisebench.trees import digest, nbytes

METHODS = Path(__file__).parents[1] / "methods"
NAME = f"{METHODS / 'rofl.py'}:RoFL"
RoFL = registry.load_method(NAME)  # as a run loads it, so that both see one module
FedAvg = registry.load_method(f"{METHODS / 'fedavg.py'}:FedAvg")
rofl = sys.modules[RoFL.__module__]
Settings = rofl.Settings

f64 = torch.float64


pytestmark = pytest.mark.usefixtures("one_thread")


def near(numbers, tolerance=1e-6):
    """The specification prints six decimals."""
    return pytest.approx(numbers, abs=tolerance)


def rate(value):
    return torch.tensor(value, dtype=f64)


# ------------------------------------------------------------------------------------------------ the facts


def test_spec_F1_schedule_of_the_forget_rate_and_how_many_are_kept():
    phi = [rofl.forget_rate(r, 0.2, 10) for r in range(12)]
    wanted = [0, 0.022222, 0.044444, 0.066667, 0.088889, 0.111111, 0.133333, 0.155556, 0.177778, 0.2, 0.2, 0.2]
    assert phi == near(wanted)
    for keeps in (rofl.keeps, lambda B, p: int(rofl.small_loss(torch.rand(B), rate(p)).sum())):
        assert [keeps(64, phi[r]) for r in (0, 1, 4, 9, 11)] == [64, 62, 58, 51, 51]
        assert [keeps(B, 0.2) for B in (50, 5, 2, 1)] == [40, 4, 1, 0]


def test_spec_F2_client_centroid_moves_by_the_square_of_the_cosine():
    f = torch.tensor([[3, 4], [1, 0], [3, 4]], dtype=f64)
    means = torch.tensor([[4, 3], [1, 1], [0, 0]], dtype=f64)
    assert F.cosine_similarity(f, means, dim=1).tolist() == near([0.96, 0.5**0.5, 0])
    moved = rofl.follow(f, means)
    assert moved[0].tolist() == near([3.9216, 3.0784])
    assert moved[1].tolist() == near([1, 0.5])
    assert moved[2].tolist() == [3, 4]


@pytest.mark.parametrize("guard", [True, False])
def test_spec_F3_server_centroid_weighs_by_the_cosine(guard):
    uploaded = torch.tensor([[[1, 0]], [[3, 4]], [[0, 2]]], dtype=f64)
    assert rofl.combine(torch.tensor([[1.0, 0]], dtype=f64), uploaded, guard)[0].tolist() == near([1.75, 1.5])


def test_spec_F4_random_start_can_throw_a_centroid_far_out_and_the_guard_does_not():
    previous, uploaded = torch.tensor([[1.0, 0]], dtype=f64), torch.tensor([[[1, 0]], [[-0.9, 0.1]]], dtype=f64)
    assert F.cosine_similarity(previous, uploaded[1], dim=1).item() == near(-0.993884)
    assert rofl.combine(previous, uploaded, False)[0].tolist() == near([309.7471, -16.2498], 1e-4)
    assert rofl.combine(previous, uploaded, True)[0].tolist() == [1, 0]


LOGITS = [[2, 0, 0], [0, 1, 0], [0, 0, 3], [1, 1, 0]]
FEATURES = [[0.8, 0.2], [0.1, 0.9], [0.3, 0.9], [0.2, 1]]
CENTROIDS = [[1, 0], [0, 1], [-1, 0]]
Y = [0, 2, 2, 1]


class Given(torch.nn.Module):
    """Gives the same values for whatever comes in."""

    def __init__(self, values):
        super().__init__()
        self.values = torch.nn.Parameter(torch.as_tensor(values, dtype=torch.float32))

    def forward(self, x):
        return self.values


def fixed(logits=LOGITS, features=FEATURES):
    return torch.nn.Sequential(Given(features), Given(logits))


def a_batch(y=Y, pseudo=None, centroids=CENTROIDS, phi=0.2, lambda_cen=1.0, lambda_e=0.8):
    y, zero = torch.as_tensor(y), torch.tensor(0)
    pseudo = y if pseudo is None else torch.as_tensor(pseudo)
    given = {"forget_rate": rate(phi), "lambda_cen": rate(lambda_cen), "lambda_e": rate(lambda_e)}
    carry = torch.as_tensor(centroids, dtype=torch.float32)
    return Batch(
        (torch.zeros(len(y), 1),), y, torch.arange(len(y)), zero, zero,
        sample={"pseudo": pseudo}, given=given, carry=carry,
    )  # fmt: skip


def test_spec_F5_one_batch_selection_targets_and_terms():
    logits, features, y = torch.tensor(LOGITS, dtype=f64), torch.tensor(FEATURES, dtype=f64), torch.tensor(Y)
    f, pseudo = torch.tensor(CENTROIDS, dtype=f64), logits.argmax(1)
    assert pseudo.tolist() == [0, 1, 2, 0]
    assert F.cross_entropy(logits, y, reduction="none").tolist() == near([0.239545, 1.551445, 0.094923, 0.861995])
    assert rofl.nearest(features, f).tolist() == [0, 1, 1, 1]
    for labels, targets, L_c in ((y, [2, 0, 1], 0.398821), (torch.tensor([0, 1, 1, 1]), [1, 0, 1], 1.398821)):
        step = rofl.take_step(features, logits, y, labels, f, rate(0.2))
        assert step.kept.tolist() == [True, False, True, True]
        assert step.confident.tolist() == [True, False, False, True]
        assert step.target[[2, 0, 3]].tolist() == targets
        assert step.classification[step.kept].mean().item() == near(L_c)
        assert step.entropy[step.kept].mean().item() == near(0.683175)
        assert (step.distance * step.confident).sum().item() == near(0.12)


@pytest.mark.parametrize(
    ("pseudo", "ramp", "total", "carrying"),
    [(Y, 0.5, 1.005361, 0.945361), ([0, 1, 1, 1], 1.0, 2.065361, 1.945361)],
)
def test_spec_F5_one_batch_total_before_and_after_the_start_of_pseudo_labels(pseudo, ramp, total, carrying):
    batch = a_batch(pseudo=pseudo, lambda_cen=ramp)
    value, carry, rows = rofl.loss(fixed(), batch)
    assert value.item() == near(total)
    assert rofl.loss(fixed(), a_batch(pseudo=pseudo, lambda_cen=0.0))[0].item() == near(carrying)
    assert rofl.loss_with_pull(fixed(), batch)[0].item() == near(carrying + ramp * 0.12 / 3)  # the mean over S
    assert rows["clean"].tolist() == [1, 0, 0, 1]
    assert rows["label"].tolist() == [0, 2, pseudo[2], 1]  # sample 1 is not trained on
    wanted = rofl.follow(batch.carry, torch.tensor([[0.8, 0.2], [0.2, 1], [0.3, 0.9]]))
    torch.testing.assert_close(carry, wanted)


def test_spec_F6_first_centroids_are_class_means_and_zero_where_there_is_no_sample():
    features, y = torch.tensor([[1.0, 0], [3, 0], [0, 2]]), torch.tensor([0, 0, 2])
    assert rofl.class_means(features, y, 3).tolist() == [[2, 0], [0, 0], [0, 2]]


def test_spec_F7_guards():
    nothing = F.cross_entropy(torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64))
    assert nothing.isnan()  # what torch says; here instead:
    network = fixed(LOGITS[:1], FEATURES[:1])
    value, carry, rows = rofl.loss_with_pull(network, a_batch(Y[:1]))
    value.backward()
    assert value.item() == 0
    assert all(p.grad.abs().max() == 0 for p in network.parameters())
    assert carry.tolist() == CENTROIDS
    assert rows["clean"].tolist() == [0]

    assert torch.tensor([0.3, float("nan"), 0.9]).argmax() == 1  # torch's; here a class without centroid never wins:
    features = torch.tensor([[-1.0, -0.1], [0.2, 1]])
    assert rofl.nearest(features, torch.tensor([[1.0, 0], [0, 0], [0, 1]])).tolist() == [2, 2]  # cosines < 0 too
    assert rofl.nearest(features, torch.zeros(3, 2)).tolist() == [-1, -1]
    zero = torch.zeros(3, 2)
    assert F.cosine_similarity(zero, torch.tensor(CENTROIDS) * 1.0, dim=1).tolist() == [0, 0, 0]
    assert rofl.follow(zero, torch.ones(3, 2)).tolist() == zero.tolist()

    for loss, moved in ((rofl.loss, False), (rofl.loss_with_pull, True)):
        network = fixed()
        loss(network, a_batch())[0].backward()
        gradient = network[0].values.grad
        assert (gradient is not None and bool(gradient.abs().sum() > 0)) is moved


# ------------------------------------------------------------------------------- the parts, beyond the facts


@pytest.mark.parametrize("phi", [0.0, 0.1, 0.3, 0.42, 0.7, 0.9])
def test_size_of_the_selection_is_python_s_floor_for_every_batch_size(phi):
    for r in range(11):
        p = rofl.forget_rate(r, phi, 10)
        sizes = range(1, 131)
        assert [int(rofl.small_loss(torch.rand(B), rate(p)).sum()) for B in sizes] == [int((1 - p) * B) for B in sizes]


def test_selection_takes_the_smallest_losses_and_of_equal_ones_the_earlier():
    losses = torch.tensor([0.5, 0.1, 0.5, 0.9, 0.5])
    assert rofl.small_loss(losses, rate(0.4)).tolist() == [True, True, True, False, False]
    assert rofl.small_loss(torch.ones(200), rate(0.4)).tolist() == [i < 120 for i in range(200)]


@pytest.mark.parametrize(
    ("gradual", "wanted"), [(0, [0.3, 0.3, 0.3]), (1, [0, 0.3, 0.3]), (2, [0, 0.3, 0.3]), (3, [0, 0.15, 0.3])]
)
def test_short_ramps_of_the_forget_rate(gradual, wanted):
    assert [rofl.forget_rate(r, 0.3, gradual) for r in range(3)] == near(wanted)


def test_server_falls_back_to_the_holders_mean_and_keeps_what_nobody_holds():
    uploaded = torch.tensor([[[1.0, 0], [2, 0], [0, 0]], [[3, 0], [0, 0], [0, 0]]])
    unknown = rofl.combine(torch.zeros(3, 2), uploaded, True)
    assert unknown.tolist() == [[2, 0], [2, 0], [0, 0]]  # the first aggregation: means over the holders
    opposed = rofl.combine(torch.tensor([[-1.0, 0], [-1, 0], [0, 5]]), uploaded, True)
    assert opposed.tolist() == [[2, 0], [2, 0], [0, 5]]  # no weight is left but of the clipped; the third has no holder
    for guard in (True, False):
        assert rofl.combine(torch.full((3, 2), 7.0), torch.zeros(2, 3, 2), guard).tolist() == [[7, 7]] * 3


@pytest.mark.parametrize(("cosine", "wanted"), [(5e-7, [1.5, -0.5]), (2e-6, [1, 0])])
def test_weights_that_sum_to_less_than_a_millionth_give_the_holders_mean(cosine, wanted):
    uploaded = torch.tensor([[[1, cosine]], [[2, -1]]], dtype=f64)  # the second's weight is clipped
    found = rofl.combine(torch.tensor([[0.0, 1]], dtype=f64), uploaded, True)
    assert found[0].tolist() == near(wanted, 1e-5)


def test_features_are_what_the_last_linear_layer_gets_for_every_model():
    for name, shape in (("mlp", (1, 8, 8)), ("small-cnn", (1, 8, 8)), ("resnet18", (3, 32, 32))):
        encoder = build_encoder(name, shape, 5)
        network = RoFL().network(encoder).eval()
        head = [module for module in network.modules() if isinstance(module, torch.nn.Linear)][-1]
        seen = []
        head.register_forward_hook(lambda _, inputs, output, seen=seen: seen.append((inputs[0], output)))
        x = torch.rand(2, *shape)
        features, logits = rofl.forward(network, x)
        assert features.shape == (2, encoder.width)
        assert features.equal(seen[0][0])
        assert logits.equal(network(x))


@pytest.mark.parametrize("loss", [rofl.loss, rofl.loss_with_pull])
def test_loss_can_be_recorded_on_one_batch_and_replayed_on_another_with_other_rates_and_selections(loss):
    network = RoFL().network(build_encoder("mlp", (1, 8, 8), 4))
    batches = []
    for seed, phi in ((1, 0.1), (2, 0.9), (3, 0.42), (4, 0.95)):
        g = torch.Generator().manual_seed(seed)
        y, pseudo = (torch.randint(4, (16,), generator=g) for _ in range(2))
        batch = a_batch(y, pseudo, torch.rand(4, 128, generator=g) * (torch.arange(4) != seed)[:, None], phi, seed, 0.1)
        batches.append(Batch(**{**vars(batch), "views": (torch.randn(16, 1, 8, 8, generator=g),)}))
    for other in batches[1:]:
        capture_safe(loss, network, batches[0], other)


def test_loss_and_centroids_stay_fp32_under_autocast():
    network = RoFL().network(build_encoder("mlp", (1, 8, 8), 3))
    batch = Batch(**{**vars(a_batch(centroids=torch.rand(3, 128))), "views": (torch.randn(4, 1, 8, 8),)})
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value, carry, _ = rofl.loss_with_pull(network, batch)
    assert value.dtype == carry.dtype == torch.float32
    value.backward()
    assert all(p.grad.isfinite().all() for p in network.parameters())


def test_under_autocast_a_step_s_numbers_are_those_of_fp32():
    batch = a_batch(centroids=[[1, 0.001], [0.3, 0.9], [-1, 0.01]], pseudo=[0, 1, 1, 1])
    value, carry, rows = rofl.loss_with_pull(fixed(), batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under, carried, chosen = rofl.loss_with_pull(fixed(), batch)
    assert under.equal(value)
    assert carried.equal(carry)
    assert chosen["clean"].equal(rows["clean"])


# ----------------------------------------------------------------------------- one client, against a plain loop


def wrong_labels(n=72, share=0.3, classes=3):
    given = tiny_arrays().train_labels.clone()
    wrong = torch.randperm(n, generator=torch.Generator().manual_seed(3))[: int(share * n)]
    given[wrong] = (given[wrong] + 1) % classes
    return given


def an_engine(changes=None, told=0.3, **options):
    # clients 4: dealt out to 3, each client would hold one of the three classes
    options = {"given": wrong_labels(), "rounds": 10, "clients": 4, **options}
    told = None if told is None else {"noise_rate": told}
    return tiny_engine(RoFL(Settings(**(changes or {}))), told=told, **options)


def turn(engine, state, round, cohort=None):
    """(the server's next state, {client: reply}, what the server noted) of one round."""
    lane, method = Lane(engine), engine.method
    plan = method.plan(state, lane.server(round, 0, "plan"))
    cohort = plan.cohort if cohort is None else cohort
    done = {k: perform(lane, Job(k, plan.task, plan.message, None, False, round, 0)).reply for k in cohort}
    uploads = [Upload(k, len(engine.positions[k]), reply.upload) for k, reply in done.items()]
    server = lane.server(round, 0, "aggregate")
    return method.aggregate(state, uploads, server), done, server.notes


def start(engine):
    return engine.method.init(Lane(engine).server(0, 0, "init"))


def literal(network, batch):
    """A batch as the specification says it: sample after sample, pseudo-labels overwritten before T_pl."""
    features, logits = rofl.forward(network, batch.x)
    given, f, y = batch.given, batch.carry.clone(), batch.y
    B = len(y)
    order = sorted(range(B), key=lambda i: F.cross_entropy(logits[i : i + 1], y[i : i + 1]).item())
    S = order[: int((1 - given["forget_rate"].item()) * B)]
    pseudo, L_c, L_cen, L_e = batch.sample["pseudo"].clone(), 0.0, 0.0, 0.0
    for i in S:
        if given["round"].item() < given["start"].item():
            pseudo[i] = y[i]
        cosine = torch.stack([F.cosine_similarity(f[c], features[i], dim=0) for c in range(len(f))])
        confident = cosine.argmax().item() == y[i].item()
        target = y[i] if confident else pseudo[i]
        p = logits[i].softmax(0)
        L_c = L_c - p[target].log()
        L_e = L_e - (p * p.log()).sum()
        if confident:
            L_cen = L_cen + (features[i].detach() - f[y[i]]).square().sum()
    ramp = min(1.0, given["round"].item() / given["start"].item())
    value = L_c / len(S) + ramp * L_cen + 0.8 * L_e / len(S)
    for c in range(len(f)):
        mine = [features[i].detach() for i in S if y[i].item() == c]
        if mine:
            mean = torch.stack(mine).mean(0)
            a = F.cosine_similarity(f[c], mean, dim=0)
            f[c] = (1 - a**2) * f[c] + a**2 * mean
    return value, f, {"pseudo": pseudo}


@pytest.mark.parametrize("round", [0, 1, 2, 9])  # T_pl = 2
def test_spec_a_client_s_round_is_the_loop_of_the_definition(round):
    engine = an_engine(local_epochs=2)
    state = start(engine)
    if round:
        state, _, _ = turn(engine, state, 0)
    _, replies, _ = turn(engine, state, round)

    side = Lane(engine).client(1, None, round, 0)
    looked = side.model(state["weights"], "looked", frozen=True)
    features, logits = rofl.forward(looked, images_of(side).plain(torch.arange(side.size)))
    f = state["centroids"]
    if round == 0:
        f = torch.stack([features[side.labels == c].mean(0) for c in range(3)])
    network = side.model(state["weights"])
    given = {"forget_rate": 0.3 * min(1, round / 9), "round": round, "start": 2}
    fit = side.fit(network, literal, sample={"pseudo": logits.argmax(1)}, given=given, carry=f, labels=side.labels)
    found = replies[1].upload
    torch.testing.assert_close(found["centroids"], fit.carry, rtol=1e-4, atol=1e-5)
    for name, value in weights(network).items():
        torch.testing.assert_close(found["weights"][name], value, rtol=1e-4, atol=1e-5, msg=name)
    assert replies[1].metrics["loss"] == pytest.approx(fit.loss, rel=1e-4)


@pytest.mark.parametrize("centroid_grad", [False, True])
def test_tensors_that_stay_where_they_are_as_on_a_gpu_give_the_same_uploads(centroid_grad):
    found = []
    for static in (False, True):
        engine = an_engine({"centroid_grad": centroid_grad, "gradual": 2}, local_epochs=2)
        engine.static = static
        state = start(engine)
        for round in range(3):
            state, _, _ = turn(engine, state, round)
        found.append(digest(state))
    assert found[0] == found[1]


def test_before_the_start_given_labels_are_trained_on_and_after_it_pseudo_labels_of_the_received_network():
    engine = an_engine()
    state = start(engine)
    for round in range(3):
        before = state
        state, replies, _ = turn(engine, state, round)
    for k, reply in replies.items():  # round 2 = T_pl
        side = Lane(engine).client(k, None, 2, 0)
        guess = side.model(before["weights"], frozen=True)(images_of(side).plain(torch.arange(side.size))).argmax(1)
        changed = reply.claims.labels != side.labels
        assert reply.claims.labels[changed].equal(guess[changed])
        assert (reply.claims.clean[changed] == 0).all()
        assert reply.metrics["relabelled"] == pytest.approx(changed.double().mean().item())
        assert reply.metrics["confident"] == pytest.approx((reply.claims.clean == 1).double().mean().item())
    assert sum((reply.metrics["relabelled"] for reply in replies.values()), 0.0) > 0
    _, replies, _ = turn(engine, before, 1)
    assert all(reply.claims.labels.equal(engine.given[engine.positions[k]]) for k, reply in replies.items())


def test_one_pass_in_round_0_none_before_the_start_and_one_from_it_on():
    engine = an_engine()
    state, lane = start(engine), Lane(engine)
    for round, passes in ((0, 18), (1, 0), (2, 18)):
        outcome = perform(lane, Job(0, "train", state, None, False, round, 0))
        assert (outcome.meter.images["trained"], outcome.meter.images["passed"]) == (18, passes)
        state, _, _ = turn(engine, state, round)


# ----------------------------------------------------------------------------------------- rare kinds of data


def test_one_sample_client_uploads_what_it_received_once_something_is_forgotten():
    rows = [[0], list(range(1, 36)), list(range(36, 72))]
    engine = an_engine(positions=rows)
    state, replies, _ = turn(engine, start(engine), 0)  # forget rate 0: it trains
    assert digest(replies[0].upload["weights"]) != digest(start(engine)["weights"])
    _, replies, _ = turn(engine, state, 5)
    assert digest(replies[0].upload) == digest({name: state[name] for name in ("weights", "centroids")})
    assert not replies[0].metrics
    _, replies, _ = turn(engine, start(engine), 5)  # its first turn, later: its own mean is all that it knows
    given = engine.given[0].item()
    assert rofl.has_centroid(replies[0].upload["centroids"]).tolist() == [c == given for c in range(3)]


@pytest.mark.parametrize("skip", [False, True])
def test_a_client_that_forgets_its_only_sample_starts_a_missing_class_at_its_own_mean(skip):
    engine = an_engine({"skip_absent": skip}, positions=[[0], list(range(1, 36)), list(range(36, 72))])
    state, given = start(engine), engine.given[0].item()
    known = torch.rand(3, 128) * (torch.arange(3) != given)[:, None]
    _, replies, _ = turn(engine, {**state, "centroids": known, "missing": [given]}, 5, [0])
    side = Lane(engine).client(0, None, 5, 0)
    own = rofl.forward(side.model(state["weights"], frozen=True), images_of(side).plain(torch.arange(1)))[0][0]
    wanted = torch.zeros(3, 128) if skip else known.clone()  # of others' classes it may have no say
    wanted[given] = own
    torch.testing.assert_close(replies[0].upload["centroids"], wanted)


@pytest.mark.parametrize(("last_batch", "size", "left"), [("keep", 17, 1), ("keep", 18, 0), ("merge", 17, 0)])
def test_a_last_batch_of_which_nothing_is_kept_takes_no_optimiser_step(last_batch, size, left):
    engine = an_engine(positions=[range(size), range(size, 72)], last_batch=last_batch)
    state = start(engine)
    outcome = perform(Lane(engine), Job(0, "train", state, None, False, 9, 0))
    assert outcome.meter.images["skipped"] == left
    clean = outcome.reply.claims.clean
    assert (clean == 0.5).sum() == left
    assert outcome.reply.metrics["confident"] == pytest.approx((clean == 1).double().mean().item())
    dropped = an_engine(positions=[range(size), range(size, 72)], last_batch="drop")
    alike = perform(Lane(dropped), Job(0, "train", state, None, False, 9, 0))
    assert (digest(alike.reply.upload) == digest(outcome.reply.upload)) is bool(left)


def test_class_that_the_first_cohorts_lack_has_no_centroid_until_a_holder_comes():
    given, labels = wrong_labels(share=0), tiny_arrays().train_labels
    rows = [torch.where(labels < 2)[0].tolist()[:24], torch.where(labels < 2)[0].tolist()[24:]]
    engine = an_engine(given=given, positions=[*rows, torch.where(labels == 2)[0].tolist()])
    state, _, notes = turn(engine, start(engine), 0, [0])
    assert (state["missing"], notes["classes_without_centroid"]) == ([2], [2])
    assert state["centroids"][2].abs().max() == 0
    state, replies, notes = turn(engine, state, 1, [0, 1])
    assert (state["missing"], notes["classes_without_centroid"]) == ([2], [2])
    old, (state, replies, notes) = state, turn(engine, state, 2, [0, 2])
    assert (state["missing"], "classes_without_centroid" in notes) == ([], False)
    torch.testing.assert_close(state["centroids"][2], replies[2].upload["centroids"][2])  # the only holder's
    side = Lane(engine).client(2, None, 2, 0)
    own = rofl.forward(side.model(old["weights"], frozen=True), images_of(side).plain(torch.arange(side.size)))[0].mean(
        0
    )
    assert F.cosine_similarity(replies[2].upload["centroids"][2], own, dim=0).item() > 0.9  # which started at its mean
    assert state["centroids"].isfinite().all()


def test_client_without_a_class_returns_its_centroid_or_with_skip_absent_nothing():
    labels = tiny_arrays().train_labels
    rows = [torch.where(labels < 2)[0].tolist(), torch.where(labels == 2)[0].tolist()]
    for skip in (False, True):
        engine = an_engine({"skip_absent": skip}, given=labels, positions=rows)
        state, _, _ = turn(engine, start(engine), 0)
        new, replies, _ = turn(engine, state, 1)
        said = replies[0].upload["centroids"][2]
        assert said.equal(torch.zeros_like(said) if skip else state["centroids"][2])
        assert new["centroids"][2].equal(replies[1].upload["centroids"][2]) is skip
        assert new["missing"] == []


def test_unknown_noise_rate_is_an_error_that_says_what_to_set_and_is_not_needed_when_set():
    engine = an_engine(told=None)
    with pytest.raises(ClientError, match="set forget_rate"):
        turn(engine, start(engine), 0)
    engine = an_engine({"forget_rate": 0.2, "gradual": Rounds(2)}, told=None)
    _, _, notes = turn(engine, start(engine), 1)
    assert notes["forget_rate"] == 0.2
    assert turn(an_engine(told=0.3), start(engine), 9)[2]["forget_rate"] == 0.3
    told_and_set = an_engine({"forget_rate": 0.1}, told=0.3)
    assert turn(told_and_set, start(engine), 9)[2]["forget_rate"] == 0.1


def test_weights_of_clients_count_alike_or_by_size():
    for unweighted, shares in ((True, [0.5, 0.5]), (False, [0.25, 0.75])):
        engine = an_engine({"unweighted": unweighted}, positions=[range(18), range(18, 72)])
        state, replies, _ = turn(engine, start(engine), 0)
        for name, value in state["weights"].items():
            parts = [replies[k].upload["weights"][name].double() for k in (0, 1)]
            wanted = shares[0] * parts[0] + shares[1] * parts[1]
            torch.testing.assert_close(value.double(), wanted, rtol=1e-6, atol=1e-7)


def test_traffic_is_the_weights_and_from_the_second_round_on_the_centroids_and_upwards_both():
    engine = an_engine()
    state = start(engine)
    w, f = nbytes(state["weights"]), 3 * 128 * 4
    server = Lane(engine).server(0, 0, "plan")
    assert nbytes(engine.method.plan(state, server).message) == w
    state, replies, _ = turn(engine, state, 0)
    assert nbytes(replies[0].upload) == w + f
    assert nbytes(engine.method.plan(state, Lane(engine).server(1, 0, "plan")).message) == w + f


def test_diagnostics_are_the_mean_cosine_between_centroids_of_different_classes():
    method = RoFL()
    f = torch.tensor([[3.0, 0], [0, 0], [1, 1], [0, 2]])
    state = {"weights": {}, "centroids": f, "missing": [1]}
    assert method.diagnostics(state)["centroid_cosine"] == near((0.5**0.5 + 0 + 0.5**0.5) / 3)
    assert method.diagnostics({**state, "centroids": None}) == {}
    assert method.diagnostics({**state, "centroids": f[:2]}) == {}


# ------------------------------------------------------------------------------------------------- whole runs


@pytest.fixture(scope="module")
def digest_of(tmp_path_factory):
    """The digest of a short run by its settings."""
    folder = tmp_path_factory.mktemp("runs")

    @functools.cache
    def of(**changes):
        return tiny_run(RoFL, folder, settings={**BASE, **changes}, **WHOLE).execute().digest

    return of


BASE = {"gradual": 2, "pseudo_start": 2}
WHOLE = {"rounds": 4, "clients": 4, "participation": 0.75, "partition": {"law": "bernoulli-dirichlet", "p": 0.5}}


def test_it_learns_and_its_loss_can_be_recorded_and_replayed_in_every_stage(tmp_path, digest_of):
    with watch_losses() as seen:
        run = tiny_run(RoFL, tmp_path, settings=BASE, **WHOLE)
        result = run.execute()
    assert seen["loss"] >= 10
    assert result.digest == digest_of()
    assert result.accuracy.final > 60  # of 3 classes, with 30 % of the labels wrong
    records = load_records(run.folder)
    assert [record.notes["forget_rate"] for record in records] == near([0, 0.3, 0.3, 0.3])
    assert "samples_auc" in records[-1].judged
    assert records[-1].diagnostics["centroid_cosine"] < 1
    with watch_losses() as seen:
        tiny_run(RoFL, tmp_path, settings={**BASE, "centroid_grad": True}, **WHOLE).execute()
    assert seen["loss_with_pull"] >= 10


def test_stopped_after_any_commit_it_resumes_to_the_same_digest(tmp_path, digest_of):
    result, stops = in_sessions(lambda: tiny_run(RoFL, tmp_path, settings=BASE, **WHOLE).execute())
    assert stops == 1 + WHOLE["rounds"]
    assert result.digest == digest_of()


def test_two_lanes_give_the_digest_of_one(tmp_path, digest_of):
    run = tiny_run(RoFL, tmp_path, settings=BASE, executor="threads", lanes=2, **WHOLE)
    assert run.execute().digest == digest_of()


@pytest.mark.parametrize(
    "change",
    [
        {"forget_rate": 0.2},
        {"gradual": 4},
        {"pseudo_start": 3},
        {"lambda_e": 0.1},
        {"centroid_grad": True},
        {"unweighted": False},
        {"guard": False},
    ],
    ids=lambda change: next(iter(change)),
)
def test_setting_has_an_effect_on_a_run(change, digest_of):
    base = {"forget_rate": 0.15}  # so little that wrong labels stay in
    assert digest_of(**{**base, **change}) != digest_of(**base)


def test_lambda_cen_moves_no_weight_unless_the_term_has_a_gradient():
    found = {}
    for grad in (False, True):
        for lambda_cen in (0.0, 1.0):
            engine = an_engine({"centroid_grad": grad, "lambda_cen": lambda_cen})
            state, _, _ = turn(engine, start(engine), 0)
            state, replies, _ = turn(engine, state, 1)
            found[grad, lambda_cen] = digest(state), replies[0].metrics["loss"]
    assert found[False, 0.0][0] == found[False, 1.0][0]
    assert found[False, 0.0][1] < found[False, 1.0][1]  # it is printed
    assert found[True, 0.0][0] == found[False, 0.0][0]
    assert found[True, 1.0][0] != found[False, 1.0][0]


def test_score_view_train_looks_at_augmented_images():
    look = Look(Tiny.mean, Tiny.std, flip=True)
    f = {}
    for view in ("plain", "train"):
        engine = an_engine({"score_view": view}, look=look)
        f[view] = turn(engine, start(engine), 0)[1][0].upload["centroids"]
    assert not f["plain"].equal(f["train"])


@pytest.mark.parametrize("view", ["plain", "train"])
@pytest.mark.parametrize("round", [0, 5], ids=["centroids", "pseudo-labels"])
def test_score_view_is_that_of_first_centroids_and_of_pseudo_labels(round, view, monkeypatch):
    engine = an_engine({"score_view": view})
    side, seen = Lane(engine).client(0, None, round, 0), []
    real = side.apply
    monkeypatch.setattr(side, "apply", lambda *given, **named: seen.append(named["view"]) or real(*given, **named))
    centroids = torch.rand(3, 128) if round else None
    engine.method.client("train", {**start(engine), "centroids": centroids}, side)
    assert seen == [view]


def test_with_nothing_forgotten_no_entropy_and_no_pseudo_label_it_is_fedavg(tmp_path):
    nothing = {"forget_rate": 0.0, "lambda_e": 0.0, "pseudo_start": 1.0, "unweighted": False}
    states = []
    for method, changes in ((RoFL, nothing), (FedAvg, None)):
        run = tiny_run(method, tmp_path, settings=changes, **WHOLE)
        run.execute()
        states.append(server_state(run))
    for name, value in states[1].items():
        torch.testing.assert_close(states[0]["weights"][name], value, rtol=1e-4, atol=1e-5, msg=name)


def test_random_first_centroids_come_from_a_named_stream_and_only_without_the_guard():
    first = {}
    for seed in (0, 0, 1):
        for guard in (True, False):
            engine = an_engine({"guard": guard}, seed=seed)
            state, replies, _ = turn(engine, start(engine), 0)
            first.setdefault((seed, guard), []).append(state["centroids"])
            if guard:
                mean = torch.stack([reply.upload["centroids"] for reply in replies.values()]).mean(0)
                torch.testing.assert_close(state["centroids"], mean)
    assert first[0, False][0].equal(first[0, False][1])
    assert not first[0, False][0].equal(first[0, True][0])
    assert not first[0, False][0].equal(first[1, False][0])


# --------------------------------------------------------------------------------------------------- settings


def schedule(rounds, **changes):
    """(the round of the first pseudo-label, the forget rate of each round) of a run of this length."""
    engine = an_engine({"forget_rate": 0.3, **changes}, rounds=rounds)
    lane, method = Lane(engine), engine.method
    rates = [method._rate(lane.server(r, 0, "plan")) for r in range(rounds)]
    return method._pseudo_start(lane.client(0, None, 0, 0)), rates


def test_schedule_has_all_stages_in_short_runs_and_is_the_paper_s_in_long_ones():
    assert schedule(500) == (100, near([0.3 * min(1, r / 9) for r in range(500)]))
    for rounds, first in ((1, 1), (2, 1), (3, 1), (5, 1), (10, 2), (20, 4)):
        found, rates = schedule(rounds)
        assert found == first
        assert rates[0] == 0
        assert rates == sorted(rates)
        assert rates[-1] == near(0.3 if rounds > 1 else 0)
    assert schedule(10, pseudo_start=0)[0] == 1  # an untrained network labels nothing
    assert schedule(10, pseudo_start=1.0)[0] == 10  # never


def test_defaults_are_the_specification_s():
    wanted = Settings(
        forget_rate=None, gradual=10, pseudo_start=0.2, lambda_cen=1.0, lambda_e=0.8, centroid_grad=False,
        unweighted=True, guard=True, skip_absent=False, score_view="plain",
    )  # fmt: skip
    assert Settings().model_dump() == wanted.model_dump()
    assert wanted.model_fields_set == set(Settings.model_fields)  # none is left to its own default


@pytest.mark.parametrize(
    "bad",
    [{"forget_rate": 1.0}, {"forget_rate": -0.1}, {"pseudo_start": 20.0}, {"gradual": 2.5}, {"lambda_e": -1.0}],
    ids=str,
)
def test_nonsense_is_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        Settings(**bad)


@pytest.mark.parametrize("preset", list(RoFL.presets))
@pytest.mark.parametrize("dataset", ["cifar10", "cifar100", "clothing1m", "digits", "fashion-mnist"])
def test_own_protocol_trains_as_many_images_as_the_common_one(dataset, preset):
    changes, budget = RoFL.presets[preset].on(dataset)
    Settings(**changes)
    assert budget["rounds"] * budget["local_epochs"] == protocols.load(dataset).rounds
    assert (budget["batch"], budget["optimiser"]["lr"], budget["optimiser"]["momentum"]) == (50, 0.25, 0.5)


def test_presets_resolve_and_differ_as_they_say():
    own = settings.resolve(method=NAME, dataset="digits", track="own")
    assert (own.protocol.local_epochs, own.protocol.optimiser.weight_decay) == (5, 1e-4)
    on = {name: Settings(**RoFL.presets[name].on("cifar10")[0]) for name in RoFL.presets}
    plain = on["default"]
    wanted = (None, Rounds(10), Rounds(0.2), 1.0, 0.8, False, True, True)
    assert wanted == (
        plain.forget_rate, plain.gradual, plain.pseudo_start, plain.lambda_cen, plain.lambda_e, plain.centroid_grad,
        plain.unweighted, plain.guard,
    )  # fmt: skip
    assert on["centroid-gradient"] == plain.model_copy(update={"centroid_grad": True})
    literal = {"forget_rate": 0.2, "pseudo_start": Rounds(100), "guard": False, "score_view": "train"}
    assert on["code-literal"] == plain.model_copy(update=literal)
    assert RoFL.presets["default"].on("clothing1m")[0] == {"forget_rate": 0.385}
    assert RoFL.presets["default"].on("digits")[0] == {"forget_rate": 0.2, "unweighted": False}
    assert own.method_settings["forget_rate"] == 0.2
