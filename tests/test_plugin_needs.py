"""Every need of the real methods, met by a fixture of a few lines: it runs, does what it says, resumes, gives the same
bits whoever carries its clients out, and its loss may be recorded and replayed."""

import functools
from dataclasses import replace

import fixture_methods as fixtures
import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from stopping import Stop, in_sessions, server_state

from flnoisebench.api import Batch, Optimiser
from flnoisebench.engine import Lane
from flnoisebench.executors import ClientError, Job, perform
from flnoisebench.runtime import told_to
from flnoisebench.testing import capture_safe, tiny_arrays, tiny_engine, tiny_run, watch_losses

NEEDS = [
    fixtures.TwoExchanges,
    fixtures.Sweep,
    fixtures.Centroids,
    fixtures.Distilled,
    fixtures.Steered,
    fixtures.TwoStreams,
    fixtures.Pair,
    fixtures.Remembering,
    fixtures.Masked,
    fixtures.PublicTraining,
    fixtures.Claiming,
    fixtures.Laid,
    fixtures.Whole,
    fixtures.Norm,
]
every_need = pytest.mark.parametrize("method", NEEDS, ids=lambda method: method.__name__)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The result of each method's uninterrupted serial run."""
    folder = tmp_path_factory.mktemp("undisturbed")
    return functools.cache(lambda method: tiny_run(method, folder).execute())


# --------------------------------------------------------------------------------------- all needs alike


@every_need
def test_it_learns_under_noise_and_its_losses_can_be_recorded_and_replayed(method, finish, undisturbed):
    with watch_losses() as seen:
        result, rounds, _ = finish(method)
    assert result.status == "complete"
    assert [record.round for record in rounds] == [0, 1, 2]
    assert result.accuracy.final > 60  # of 3 classes, with 30 % of the labels wrong
    assert sum(seen.values()) >= 10
    assert result.digest == undisturbed(method).digest  # watching changes nothing


@every_need
def test_stopped_after_any_commit_it_resumes_to_the_same_result(method, undisturbed, tmp_path):
    result, stops = in_sessions(lambda: tiny_run(method, tmp_path).execute())
    exchanges = {fixtures.TwoExchanges: 2, fixtures.Whole: 2, fixtures.Sweep: 4}.get(method, 1)
    assert stops == 1 + 3 * exchanges
    whole, after_stops = (
        one.model_dump(exclude={"seconds", "peak_memory", "environment"}) for one in (undisturbed(method), result)
    )
    assert after_stops == whole


@every_need
def test_threads_and_debug_give_the_serial_digest(method, undisturbed, tmp_path):
    expected = undisturbed(method).digest
    assert tiny_run(method, tmp_path / "threads", executor="threads", lanes=4).execute().digest == expected
    assert tiny_run(method, tmp_path / "debug", executor="debug").execute().digest == expected


@every_need
def test_a_run_that_goes_on_in_another_way_has_the_serial_digest(method, undisturbed, tmp_path):
    def stop(record):
        raise Stop

    with pytest.raises(Stop):
        tiny_run(method, tmp_path).execute(stop)
    with pytest.raises(Stop):
        tiny_run(method, tmp_path, executor="threads", lanes=2).execute(stop)
    assert tiny_run(method, tmp_path, executor="debug", capture=False).execute().digest == undisturbed(method).digest


@every_need
def test_lanes_on_two_devices_give_the_serial_digest(method, undisturbed, tmp_path):
    # to torch cpu and cpu:0 are different places, so messages and outcomes really travel
    run = tiny_run(method, tmp_path, executor="threads", lanes=3, beside=[torch.device("cpu", 0)])
    assert run.execute().digest == undisturbed(method).digest


def test_worker_processes_give_the_serial_digest_whether_a_state_is_new_changed_or_kept(undisturbed, tmp_path):
    run = tiny_run(fixtures.Whole, tmp_path, executor="processes", lanes=2)
    assert run.execute().digest == undisturbed(fixtures.Whole).digest


def test_worker_processes_go_on_with_the_states_that_this_process_left(undisturbed, tmp_path):
    def stop(record):
        raise Stop

    with pytest.raises(Stop):
        tiny_run(fixtures.Whole, tmp_path).execute(stop)
    run = tiny_run(fixtures.Whole, tmp_path, executor="processes", lanes=2)
    assert run.execute().digest == undisturbed(fixtures.Whole).digest


# ------------------------------------------------------------------------------------------ each as it says


def test_two_exchanges_with_private_additions_make_one_round(finish):
    _, rounds, _ = finish(fixtures.TwoExchanges, noise=0)
    for record in rounds:
        assert record.exchanges == 2
        # clients 1 and 2 score highest; they are told 5 times their id, client 0 nothing (-1); all hold 24 samples
        assert record.metrics["told"] == pytest.approx((-1 + 5 * 1 + 5 * 2) / 3)
        assert record.images["trained"] == 24 + 2 * 24 + 2 * 24  # whoever is flagged trains two epochs


def test_a_sequential_sweep_visits_clients_in_the_methods_order_and_hands_the_model_on(finish):
    _, rounds, run = finish(fixtures.Sweep, rounds=1)
    assert rounds[0].exchanges == 4
    assert rounds[0].notes["seen"] == [3, 4, 6]  # client 2 adds 3, client 0 adds 1, client 1 adds 2
    lane = Lane(run.engine)
    w = run.method.init(lane.server(0, 0, "init"))["w"]
    for exchange, client in enumerate((2, 0, 1)):
        job = Job(client, "pass", {"w": w, "x": 0}, None, False, 0, exchange)
        w = perform(lane, job).reply.upload["w"]
    final = server_state(run)["w"]
    assert all(torch.equal(final[name], w[name]) for name in w)


def test_labels_that_a_client_corrected_are_its_labels_in_the_next_round(finish):
    _, rounds, _ = finish(fixtures.Sweep)
    # given labels are 30 % wrong; from the first relabelling on, training is on corrected ones
    assert rounds[0].judged["relabel_recall"] > 60
    assert rounds[-1].label_noise < 5


def test_a_carry_goes_through_all_steps_and_comes_back(finish):
    _, rounds, run = finish(fixtures.Centroids, rounds=1)
    given = run.engine.given
    images = (run.engine.pixels.double() / 255 - 0.5) / 0.25
    wanted = torch.stack([images[given == j].flatten(1).sum(0) for j in range(3)])
    assert rounds[0].notes["count"] == torch.bincount(given).tolist()
    torch.testing.assert_close(server_state(run)["sum"].double(), wanted, rtol=1e-5, atol=1e-4)


def test_a_frozen_teacher_and_a_ramp_reach_the_loss():
    # the ramp is 0 in round 0, so the teacher adds exactly nothing there; 1/3 in round 1
    uploads = {}
    for method in (fixtures.Averaging, fixtures.Distilled):
        lane = Lane(tiny_engine(method()))
        start = method().init(lane.server(0, 0, "init"))
        for round in (0, 1):
            uploads[method, round] = perform(lane, Job(0, "train", start, None, False, round, 0)).reply.upload
    for round, alike in ((0, True), (1, False)):
        plain, distilled = uploads[fixtures.Averaging, round], uploads[fixtures.Distilled, round]
        assert all(torch.equal(plain[name], distilled[name]) for name in plain) == alike


@pytest.mark.parametrize(
    "half",
    [lambda teacher: teacher, lambda teacher: teacher.eval(), lambda teacher: teacher.requires_grad_(False)],
    ids=["neither", "eval mode alone", "no gradient alone"],
)
def test_a_frozen_teacher_must_be_frozen(half):
    side = Lane(tiny_engine(fixtures.Distilled())).client(0, None, 0, 0)
    network, teacher = side.model(), half(side.model(None, "teacher"))
    with pytest.raises(ValueError, match=r"'teacher' is trainable.*frozen=True"):
        side.fit(network, fixtures.distilled, frozen={"teacher": teacher}, given={"ramp": 1.0, "t": 2})


def test_a_gradient_of_the_methods_own_is_clipped_and_its_momentum_comes_back_in_the_next_turn():
    lane = Lane(tiny_engine(fixtures.Steered(), clients=1, batch=72))
    start = fixtures.Steered().init(lane.server(0, 0, "init"))
    first = perform(lane, Job(0, "train", start, None, False, 0, 0)).reply
    second = perform(lane, Job(0, "train", first.upload, first.state, True, 1, 0)).reply
    network = lane.client(0, None, 0, 1).model(start)
    optimiser = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    x, y = lane.engine.own[0].plain(torch.arange(72)), lane.engine.given
    for reply in (first, second):  # one step of all images a turn
        optimiser.zero_grad(set_to_none=False)
        F.cross_entropy(network(x), y).backward()
        assert torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0) > 1
        optimiser.step()
        for name, value in network.state_dict().items():
            torch.testing.assert_close(reply.upload[name], value, rtol=1e-5, atol=1e-6)


def test_two_streams_of_batches_run_side_by_side(finish):
    result, _, _ = finish(fixtures.TwoStreams)
    # 24 samples a client: 12 labelled in steps of 8 and 4, each beside 4 unlabelled images seen twice
    assert result.images["trained"] == 3 * 3 * (12 + 2 * 4 * 2)


def test_a_pair_learns_from_what_is_easy_for_the_other():
    class Fixed(torch.nn.Module):
        def __init__(self, margins):
            super().__init__()
            self.scores = torch.nn.Parameter(torch.tensor([[m, 0.0] for m in margins], dtype=torch.float64))

        def forward(self, x):
            return self.scores

    first, second = Fixed([3.0, 2.0, -1.0, -2.0]), Fixed([-2.0, 3.0, -1.0, 2.0])  # small losses: 0, 1 and 1, 3
    zero = torch.zeros((), dtype=torch.int64)
    batch = Batch((torch.zeros(4, 1),), torch.zeros(4, dtype=torch.int64), torch.arange(4), zero, zero)
    batch = Batch(**{**vars(batch), "given": {"keep": torch.tensor(0.5, dtype=torch.float64)}})
    fixtures.exchanged(torch.nn.ModuleList([first, second]), batch).backward()
    assert first.scores.grad.abs().sum(1).nonzero().flatten().tolist() == [1, 3]
    assert second.scores.grad.abs().sum(1).nonzero().flatten().tolist() == [0, 1]


def test_both_networks_of_a_pair_are_evaluated_and_start_differently(finish):
    _, rounds, run = finish(fixtures.Pair)
    assert set(rounds[-1].predictors) == {"main", "second"}
    start = run.method.init(Lane(run.engine).server(0, 0, "init"))
    assert not torch.equal(start["0.1.weight"], start["1.1.weight"])


def test_per_sample_values_persist_from_round_to_round(finish):
    _, rounds, _ = finish(fixtures.Remembering)
    for record in rounds:
        assert record.metrics["fewest"] == record.metrics["most"] == record.metrics["turns"] == record.round + 1


def test_the_server_trains_on_public_images_with_soft_labels_and_its_own_optimiser(finish):
    result, rounds, _ = finish(fixtures.PublicTraining)
    assert rounds[-1].notes["steps"] == 7
    # 20 public images in batches of 8: 7 steps are 8, 8, 4, 8, 8, 4, 8; clients train their 72 once a round
    assert result.images["trained"] == 3 * (72 + 48)
    # 3 teachers see the 20 public images each round, and the evaluator its 30
    assert result.images["passed"] == 3 * (3 * 20 + 30)


def test_a_client_that_was_not_asked_keeps_its_state(finish):
    _, rounds, _ = finish(fixtures.Claiming, clients=4, participation=0.5, rounds=5)
    times = dict.fromkeys(range(4), 0)
    for record in rounds:
        cohort = record.notes["cohort"]
        assert len(cohort) == 2
        for client in cohort:
            times[client] += 1
        assert record.metrics["turns"] == pytest.approx(np.mean([times[client] for client in cohort]))
    assert max(times.values()) < 5
    assert len({tuple(record.notes["cohort"]) for record in rounds}) > 1


def test_claims_and_notes_reach_the_record_and_the_card_decides_what_is_told(finish):
    result, rounds, _ = finish(fixtures.Claiming)
    assert result.label_noise_after == rounds[-1].label_noise != result.label_noise_before
    assert 100 * sum(result.wrong_labels_before) / 72 == pytest.approx(result.label_noise_before, abs=1e-4)
    assert 100 * sum(result.wrong_labels_after) / 72 == pytest.approx(result.label_noise_after, abs=1e-4)
    assert rounds[-1].notes["rate"] == pytest.approx(0.3)
    assert (rounds[-1].notes["word"], rounds[-1].notes["flag"]) == ("no", True)
    # every client is noisy; in round 0 the clients' own claims count (0 and 2), later the server's of round 1 (1)
    assert [record.judged["clients_recall"] for record in rounds] == [
        pytest.approx(x) for x in (66.6667, 33.3333, 33.3333)
    ]
    assert rounds[0].diagnostics["norm"] > 0
    silent, _, run = finish(fixtures.Averaging)  # whose card asks for nothing
    assert silent.told == run.engine.told == {}
    asking = type("Asking", (fixtures.Averaging,), {"card": replace(fixtures.Claiming.card, told=("label_counts",))})
    with pytest.raises(ValueError, match=r"asks for \['label_counts'\]; .* can be told noise_rate, noisy_clients"):
        told_to(asking, {})


def test_what_the_plan_claims_and_notes_counts_too_and_a_metric_is_a_mean_over_samples(finish):
    _, rounds, run = finish(fixtures.Speaking, partition={"law": "dirichlet", "alpha": 1.0})
    sizes = [len(run.scene.positions(client)) for client in range(3)]
    assert len(set(sizes)) > 1
    for record in rounds:
        assert record.metrics["size"] == pytest.approx(sum(n * n for n in sizes) / 72)
        # all three are noisy; in round 1 what is said last counts
        assert record.judged["clients_recall"] == pytest.approx(200 / 3 if record.round == 1 else 100 / 3, abs=1e-4)
        assert record.notes == {"planned": "more" if record.round == 1 else record.round}
        assert record.judged["samples_recall"] == 100  # claimed in round 0; what a client does not repeat stands


def test_pre_drawn_masks_that_mask_nothing_leave_plain_cross_entropy_and_too_few_rows_are_refused():
    engine = tiny_engine(fixtures.Masked())
    draw = {"weight": torch.ones(3), "mask": torch.ones(3, 8, 1, 8, 8), "shift": torch.zeros(3, dtype=torch.int64)}
    found = []
    for loss, rows in ((fixtures.mixed, draw), (fixtures.cross_entropy, None)):
        side = Lane(engine).client(0, None, 0, 0)
        assert side.batch_sizes() == (8, 8, 8)
        network = side.model()
        side.fit(network, loss, draw=rows)
        found.append(network[1].bias.detach().clone())
    torch.testing.assert_close(*found)
    with pytest.raises(ValueError, match=r"draw\['weight'\] needs at least 3 rows, not \[2\]"):
        side.fit(network, fixtures.mixed, draw={**draw, "weight": torch.ones(2)}, stream="third")


# ---------------------------------------------------------------------------------- losses that are refused

FROZEN = {"temperature": 1.0}
TABLE = torch.tensor([1.0, 2.0, 3.0])


def heated(network, batch):  # a Python float that comes from a global and changes from step to step
    FROZEN["temperature"] += 1.0
    return F.cross_entropy(network(batch.x) / FROZEN["temperature"], batch.y)


def by_item(network, batch):
    return F.cross_entropy(network(batch.x), batch.y) * batch.given["mu"].item()


def by_float(network, batch):
    return F.cross_entropy(network(batch.x), batch.y) * float(batch.step)


def by_list(network, batch):
    return F.cross_entropy(network(batch.x), batch.y) * batch.y.tolist()[0]


def by_scalar_index(network, batch):
    return F.cross_entropy(network(batch.x), batch.y) * TABLE[batch.y[0]]


def by_branch(network, batch):
    scores = network(batch.x)
    return F.cross_entropy(scores, batch.y) if batch.step > 1 else scores.square().mean()


def by_mask(network, batch):
    return F.cross_entropy(network(batch.x)[batch.y > 0], batch.y[batch.y > 0])


def by_unknown_classes(network, batch):
    return (F.one_hot(batch.y) * network(batch.x).log_softmax(1)).sum()


def by_number(network, batch):
    return F.cross_entropy(network(batch.x), batch.y, label_smoothing=batch.given["mu"])


def by_dropout(network, batch):
    return F.cross_entropy(F.dropout(network(batch.x)), batch.y)


def frozen_row(network, batch):
    FROZEN["temperature"] += 1.0
    return F.cross_entropy(network(batch.x), batch.y), None, {"q": batch.sample["q"] * FROZEN["temperature"]}


def frozen_carry(network, batch):
    FROZEN["temperature"] += 1.0
    return F.cross_entropy(network(batch.x), batch.y), {"m": batch.carry["m"] + FROZEN["temperature"]}


def good(network, batch):
    """Uses everything that may vary, correctly."""
    scores = network(batch.x) * batch.given["mu"].float()
    near = (scores - batch.frozen["teacher"](batch.views[1])).square().mean()
    other = F.cross_entropy(network(batch.other["more"].x), batch.other["more"].y)
    each = F.cross_entropy(scores, batch.y, reduction="none")
    share = (batch.step / batch.steps).float()
    loss = (each * batch.sample["q"]).mean() + share * near + batch.draw["w"] * other
    return loss, {"m": batch.carry["m"] * 0.9 + 0.1 * loss.detach()}, {"q": each.detach()}


def a_batch(seed, lane):
    g = torch.Generator().manual_seed(seed)
    views = tuple(torch.randn(6, 1, 8, 8, generator=g) for _ in range(2))
    y = torch.randint(3, (6,), generator=g)
    index = torch.randperm(20, generator=g)[:6]
    teacher = lane.client(0, None, seed, 0).model(None, f"teacher {seed}", frozen=True)
    return Batch(
        views, y, index, torch.tensor(seed), torch.tensor(9),
        sample={"q": torch.rand(6, generator=g)},
        draw={"w": torch.rand((), generator=g)},
        given={"mu": torch.rand((), generator=g, dtype=torch.float64)},
        frozen={"teacher": teacher},
        carry={"m": torch.rand((), generator=g)},
        other={"more": Batch((views[0] * 2,), y.flip(0), index, torch.tensor(0), torch.tensor(0))},
    )  # fmt: skip


@pytest.fixture(scope="module")
def two_batches():
    lane = Lane(tiny_engine(fixtures.Averaging()))
    return lane.client(0, None, 0, 0).model(), a_batch(1, lane), a_batch(2, lane)


def test_a_loss_that_uses_all_of_the_batch_is_capture_safe(two_batches):
    network, first, second = two_batches
    capture_safe(good, network, first, second)
    capture_safe(good, network, second, first)


@pytest.mark.parametrize(
    ("loss", "what"),
    [(heated, "loss"), (frozen_row, "rows/q"), (frozen_carry, "carry/m")],
    ids=["loss", "rows", "carry"],
)
def test_a_number_frozen_through_a_global_is_caught_and_its_effect_named(loss, what, two_batches):
    network, first, second = two_batches
    with pytest.raises(AssertionError, match=f"{loss.__name__}: the replayed {what} is .* was frozen"):
        capture_safe(loss, network, first, second)


@pytest.mark.parametrize(
    ("loss", "why"),
    [
        (by_item, "takes a tensor's value into Python"),
        (by_float, "takes it into Python"),
        (by_list, "takes a tensor's value into Python"),
        (by_scalar_index, "indexing with a tensor without dimensions|takes it into Python"),  # the latter by torch 2.6
        (by_branch, "branches on a tensor's value"),
        (by_number, "an argument that torch wants as a number"),
        (by_mask, "a shape depends on the data|takes it into Python"),
        (by_unknown_classes, "cannot be recorded"),
        (by_dropout, "draws randomness inside a step"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_a_loss_that_cannot_be_recorded_is_caught_and_the_reason_named(loss, why, two_batches):
    network, first, second = two_batches
    with pytest.raises(ValueError, match=f"{loss.__name__}.*{why}"):
        capture_safe(loss, network, first, second)


def test_a_replay_asks_for_equal_shapes(two_batches):
    network, first, second = two_batches
    shorter = Batch(**{**vars(second), "draw": {"w": torch.rand(2)}})
    with pytest.raises(ValueError, match="other shapes"):
        capture_safe(good, network, first, shorter)


def test_the_passes_that_watching_adds_are_not_counted_as_the_runs(tmp_path):
    plain = tiny_run(fixtures.Distilled, tmp_path / "plain").execute()
    with watch_losses():
        watched = tiny_run(fixtures.Distilled, tmp_path / "watched").execute()
    assert watched.images == plain.images


def test_watching_a_run_catches_a_frozen_number_and_names_the_client(tmp_path, loaded, monkeypatch):
    monkeypatch.setattr(loaded, "cross_entropy", heated)
    with watch_losses(), pytest.raises(ClientError, match=r"client 0.*heated: the replayed loss"):
        tiny_run(fixtures.Averaging, tmp_path).execute()


def outer():
    temperature = 2.0

    def inner(network, batch):
        return F.cross_entropy(network(batch.x) / temperature, batch.y)

    return inner


class Bound:
    def loss(self, network, batch):
        return F.cross_entropy(network(batch.x), batch.y)

    @staticmethod
    def static(network, batch):
        return F.cross_entropy(network(batch.x), batch.y)

    def __call__(self, network, batch):
        return F.cross_entropy(network(batch.x), batch.y)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (outer(), r"outer.<locals>.inner is a closure over temperature; .*given="),
        (functools.partial(by_item), "not partial"),
        (Bound().loss, "Bound.loss is bound to Bound; make it a static method"),
        (Bound(), "not Bound"),
        (torch.nn.CrossEntropyLoss(), "not CrossEntropyLoss"),
    ],
    ids=["closure", "partial", "bound method", "callable object", "module"],
)
def test_what_hides_a_number_in_a_loss_is_refused_and_the_variable_named(loss, message):
    side = Lane(tiny_engine(fixtures.Averaging())).client(0, None, 0, 0)
    with pytest.raises(ValueError, match=message):
        side.fit(side.model(), loss)


def test_a_static_method_is_a_good_loss():
    side = Lane(tiny_engine(fixtures.Averaging())).client(0, None, 0, 0)
    assert side.fit(side.model(), Bound.static).steps == 3


# -------------------------------------------------------------------------------------------- other helpers


def test_tiny_arrays_are_separable_and_repeatable():
    one, two = tiny_arrays(public=5), tiny_arrays(public=5)
    assert torch.equal(one.train_images, two.train_images)
    assert one.public.shape == (5, 1, 8, 8)
    bars = one.train_images.double().reshape(-1, 64)
    means = torch.stack([bars[one.train_labels == j].mean(0) for j in range(3)])
    assert torch.equal(torch.cdist(bars, means).argmin(1), one.train_labels)
    eight = tiny_arrays(classes=8)
    assert all((eight.train_images[j, 0, j] >= 130).all() for j in range(8))
    for classes in (0, 9):  # of nine two had rows that overlap or none
        with pytest.raises(ValueError, match="rows of its own, and there are 8"):
            tiny_arrays(classes=classes)


def test_a_method_inside_a_function_has_no_file_to_be_run_from(tmp_path):
    class Local(fixtures.Averaging):
        pass

    typed = {"Averaging": fixtures.Averaging, "__name__": "prompt"}
    exec("class Typed(Averaging): pass", typed)
    for method in (Local, typed["Typed"]):
        with pytest.raises(ValueError, match="top level of a file"):
            tiny_run(method, tmp_path)


def test_wrong_settings_are_named_before_anything_runs(tmp_path):
    with pytest.raises(ValueError, match=r"unknown setting 'extr'\. Did you mean extra"):
        tiny_run(fixtures.Drawing, tmp_path, settings={"extr": 1})


def test_optimisers_are_those_that_are_asked_for():
    """One Adam step from zero moments moves each weight by lr against the sign of its gradient."""
    side = Lane(tiny_engine(fixtures.Averaging())).client(0, None, 0, 0)
    network = side.model()
    before = network[1].bias.detach().clone()
    adam = Optimiser(name="adam", lr=0.01, weight_decay=0.0)
    side.fit(network, fixtures.cross_entropy, steps=1, optimiser=adam)
    moved = (network[1].bias.detach() - before).abs()
    torch.testing.assert_close(moved, torch.full_like(moved, 0.01), rtol=1e-3, atol=0)
