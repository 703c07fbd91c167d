"""The engine by hand: how batches are cut, what a look does to pixels, one step's arithmetic, what reaches a loss."""

import math
from collections import Counter

import fixture_methods as fixtures
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
import torchvision.transforms.v2.functional as vision
from torchvision.transforms import v2

from flnoisebench.api import Optimiser, Protocol, cross_entropy, weights
from flnoisebench.engine import DeviceImages, Lane, Look, images_of
from flnoisebench.engine.batches import cut
from flnoisebench.models import MODELS, build_encoder
from flnoisebench.testing import tiny_arrays, tiny_engine

SEEN = []  # what the losses below were given, in order


@pytest.fixture(autouse=True)
def nothing_seen():
    SEEN.clear()


def spying(network, batch):
    SEEN.append(batch)
    return F.cross_entropy(network(batch.x), batch.y)


def client_of(engine, id=0, round=0, exchange=0, state=None):
    return Lane(engine).client(id, state, round, exchange)


def side(*, static=False, **options):
    engine = tiny_engine(fixtures.Averaging(), **options)
    engine.static = static  # as on a GPU
    return client_of(engine)


# --------------------------------------------------------------------------------------------- cutting batches


@pytest.mark.parametrize(
    ("size", "batch", "rule", "lone_is_bad", "by_hand"),
    [
        (24, 8, "keep", False, (8, 8, 8)),
        (25, 8, "keep", False, (8, 8, 8, 1)),
        (25, 8, "keep", True, (8, 8, 9)),  # one alone cannot pass a BatchNorm: it joins the batch before
        (26, 8, "keep", True, (8, 8, 8, 2)),
        (27, 8, "merge", False, (8, 8, 11)),  # 3 is under half of 8
        (28, 8, "merge", False, (8, 8, 8, 4)),  # 4 is half: kept
        (25, 8, "merge", True, (8, 8, 9)),
        (25, 8, "drop", False, (8, 8, 8)),
        (25, 8, "drop", True, (8, 8, 8)),
        (31, 8, "drop", False, (8, 8, 8)),
        (5, 8, "keep", False, (5,)),  # a set smaller than one batch is one batch under any rule
        (5, 8, "merge", False, (5,)),
        (5, 8, "drop", False, (5,)),
        (1, 8, "keep", False, (1,)),
        (1, 8, "keep", True, ()),  # nobody before it to join: skipped
        (1, 8, "drop", True, ()),
        (0, 8, "keep", False, ()),
        (2, 1, "keep", False, (1, 1)),
        (9, 8, "keep", True, (9,)),
    ],
)
def test_batches_are_cut_as_worked_out_by_hand(size, batch, rule, lone_is_bad, by_hand):
    assert cut(size, batch, rule, lone_is_bad) == by_hand


def test_only_drop_and_a_lone_sample_leave_anything_out():
    for size in range(40):
        for batch in range(1, 12):
            for rule in ("keep", "merge", "drop"):
                for lone_is_bad in (False, True):
                    sizes = cut(size, batch, rule, lone_is_bad)
                    left = size - sum(sizes)
                    assert all(b >= 1 for b in sizes)
                    dropped = rule == "drop" and left < batch < size
                    assert left == 0 or dropped or (lone_is_bad and size == 1)
                    assert max(sizes, default=0) < 1.5 * batch + 1


def test_an_epoch_shows_every_sample_exactly_once_in_an_order_of_its_own():
    client = side(clients=3, batch=7)
    fit = client.fit(client.model(), spying, epochs=3)
    assert fit.steps == len(SEEN) == 3 * 4
    assert [len(batch.y) for batch in SEEN] == [7, 7, 7, 3] * 3
    epochs = [torch.cat([batch.index for batch in SEEN[i : i + 4]]) for i in (0, 4, 8)]
    assert all(sorted(epoch.tolist()) == list(range(24)) for epoch in epochs)
    assert len({tuple(epoch.tolist()) for epoch in epochs}) == 3
    assert all(torch.equal(batch.y, client.labels[batch.index]) for batch in SEEN)
    assert [(int(batch.step), int(batch.steps)) for batch in SEEN] == [(i, 4) for i in range(4)] * 3


def test_the_order_depends_on_round_client_and_stream_and_on_nothing_else():
    engine = tiny_engine(fixtures.Averaging())
    lane = Lane(engine)

    def order(id=0, round=0, exchange=0, **options):
        SEEN.clear()
        client = lane.client(id, None, round, exchange)
        client.fit(client.model(), spying, **options)
        return tuple(torch.cat([batch.index for batch in SEEN]).tolist())

    assert order() == order()
    assert len({order(), order(round=1), order(exchange=1), order(id=1), order(stream="other")}) == 5
    assert order(views=2) == order()  # more augmentation does not shuffle otherwise
    assert order(sample={"q": torch.zeros(24)}) == order()


def test_a_subset_is_trained_on_and_nothing_else():
    client = side()
    positions = torch.tensor([20, 3, 11, 5, 7])
    client.fit(client.model(), spying, subset=positions, batch=2, epochs=2)
    assert Counter(torch.cat([batch.index for batch in SEEN]).tolist()) == dict.fromkeys([20, 3, 11, 5, 7], 2)
    for bad, message in (
        (torch.tensor([0, 24]), r"positions outside 0\.\.23"),
        (torch.tensor([-1]), r"positions outside"),
        (torch.tensor([0.5]), "must be int64 positions"),
        (torch.ones(24, dtype=torch.bool), r"must be int64 positions .*mask.nonzero\(\).flatten\(\), not torch.bool"),
        ([0, 1], "must be int64 positions .*, not list"),
    ):
        with pytest.raises(ValueError, match=message):
            client.fit(client.model(None, f"m{message}"), spying, subset=bad, stream=f"s{bad}")


def test_an_empty_subset_trains_nothing_and_changes_nothing():
    client = side()
    network = client.model()
    before = weights(network)
    fit = client.fit(network, spying, subset=torch.empty(0, dtype=torch.int64), carry={"a": 1.0})
    assert (fit.steps, fit.loss, SEEN) == (0, 0.0, [])
    assert all(torch.equal(before[name], value) for name, value in weights(network).items())
    assert fit.carry["a"] == 1.0


def test_steps_instead_of_epochs_go_round_and_reshuffle():
    client = side(batch=10)
    fit = client.fit(client.model(), spying, steps=7)  # an epoch is 10, 10, 4
    assert fit.steps == 7
    assert [len(batch.y) for batch in SEEN] == [10, 10, 4, 10, 10, 4, 10]
    assert [int(batch.step) for batch in SEEN] == [0, 1, 2, 0, 1, 2, 0]
    first, second = (torch.cat([batch.index for batch in SEEN[i : i + 3]]).tolist() for i in (0, 3))
    assert sorted(first) == sorted(second) == list(range(24))
    assert first != second


def test_a_further_stream_cycles_through_its_subset_and_gives_batches_of_one_shape():
    client = side(batch=8)
    streams = {"more": {"subset": torch.arange(10, 20), "views": 2, "batch": 4}}
    client.fit(client.model(), spying, epochs=2, streams=streams, sample={"q": torch.arange(24.0)})
    others = [batch.other["more"] for batch in SEEN]
    assert [len(other.y) for other in others] == [4] * 6
    assert all(len(other.views) == 2 for other in others)
    for i in (0, 2, 4):  # its epochs are 2 steps of 4 out of 10, whatever the main stream does
        seen = torch.cat([others[i].index, others[i + 1].index]).tolist()
        assert len(set(seen)) == 8
        assert set(seen) <= set(range(10, 20))
    assert all(torch.equal(other.sample["q"], other.index.float()) for other in others)
    assert all(torch.equal(other.y, client.labels[other.index]) for other in others)
    assert {int(i) for other in others for i in other.index} == set(range(10, 20))
    with pytest.raises(ValueError, match=r"stream 'more' has unknown entries \['subsets'\]"):
        client.fit(client.model(None, "b"), spying, streams={"more": {"subsets": 1}}, stream="b")
    empty = {"more": {"subset": torch.empty(0, dtype=torch.int64)}}
    with pytest.raises(ValueError, match="stream 'more' is empty"):
        client.fit(client.model(None, "c"), spying, streams=empty, stream="c")


def test_a_set_of_one_sample_is_skipped_and_counted_where_a_batchnorm_would_fail():
    engine = tiny_engine(fixtures.Norm(), positions=[[5], range(6, 15), range(20, 30)], batch=8)
    lane = Lane(engine)
    lone = lane.client(0, None, 0, 0)
    network = lone.model()
    before = weights(network)
    assert lone.fit(network, spying).steps == 0
    assert all(torch.equal(before[name], value) for name, value in weights(network).items())
    assert lane.meter.take().images == Counter(skipped=1)
    nine = lane.client(1, None, 0, 0)
    assert nine.batch_sizes() == (9,)
    assert nine.fit(nine.model(), spying).steps == 1
    assert lane.meter.take().images == Counter(trained=9)


# ------------------------------------------------------------------------------------------------------ looks

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
PICTURES = torch.randint(256, (5, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def handle(rows=range(5), **look):
    return DeviceImages(PICTURES, torch.tensor(list(rows)), Look(MEAN, STD, **look))


def normalised(picture):
    """torchvision's own: to [0, 1], then (x - mean) / std."""
    to_unit = v2.Compose([v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)])
    return to_unit(picture)


def test_the_plain_look_is_torchvisions_normalize():
    found = handle(rows=[4, 0, 2]).plain(torch.tensor([2, 0]))
    wanted = torch.stack([normalised(PICTURES[2]), normalised(PICTURES[4])])
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=2e-6)


def test_a_crop_is_torchvisions_random_crop_which_pads_with_zeros_before_normalising():
    images = handle(crop_padding=2)
    offsets = torch.tensor([[0, 0], [4, 4], [2, 2], [1, 3], [0, 4]])
    found = images.augmented(torch.arange(5), offsets, None)
    for i, (top, left) in enumerate(offsets.tolist()):
        wanted = normalised(vision.crop(vision.pad(PICTURES[i], [2, 2, 2, 2]), top, left, 8, 8))
        torch.testing.assert_close(found[i], wanted, rtol=1e-5, atol=2e-6)
    black = (0 - torch.tensor(MEAN)) / torch.tensor(STD)  # what lies outside is black, not the mean
    torch.testing.assert_close(found[0][:, 0, 0], black, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(found[2], images.plain(torch.tensor([2]))[0])  # the middle offset is no shift


def test_a_flip_mirrors_left_and_right_and_only_where_it_says_so():
    found = handle(flip=True).augmented(torch.arange(5), None, torch.tensor([True, False, True, False, False]))
    for i, flip in enumerate([True, False, True, False, False]):
        wanted = normalised(vision.horizontal_flip(PICTURES[i]) if flip else PICTURES[i])
        torch.testing.assert_close(found[i], wanted, rtol=1e-5, atol=2e-6)


def test_crop_and_flip_together_are_a_crop_of_the_picture_then_a_flip_up_to_which_crop():
    """Offsets are uniform and symmetric, so flipping before or after the crop draws from the same law; each result
    must be one of the crops of the padded, mirrored picture."""
    offset = torch.tensor([[1, 3]])
    found = handle(crop_padding=2, flip=True).augmented(torch.tensor([0]), offset, torch.tensor([True]))[0]
    padded = vision.pad(PICTURES[0], [2, 2, 2, 2])
    crops = [vision.horizontal_flip(vision.crop(padded, 1, left, 8, 8)) for left in range(5)]
    assert sum(torch.allclose(found, normalised(crop), rtol=1e-5, atol=2e-6) for crop in crops) == 1


def test_training_draws_all_offsets_evenly_and_flips_half():
    arrays = tiny_arrays(samples=3000)
    engine = tiny_engine(fixtures.Averaging(), arrays=arrays, clients=1, look=Look((0.0,), (1.0,), 2, True), batch=1000)
    engine.pixels[:] = 0
    engine.pixels[:, 0, 4, 2] = 255  # one white dot, from which shift and flip can be read
    client = client_of(engine)
    client.fit(client.model(), spying, views=2)
    views = [torch.cat([batch.views[i] for batch in SEEN]) for i in (0, 1)]
    places = [view.flatten(1).argmax(1) for view in views]
    assert not torch.equal(*places)  # two independent views
    for place in places:
        rows, columns = place // 8, place % 8
        assert set(rows.tolist()) == {2, 3, 4, 5, 6}
        assert (torch.bincount(rows, minlength=8)[2:7] / 3000 - 0.2).abs().max() < 0.04
        # column 2 shifted by -2..2 is 0..4; mirrored it is 5, shifted 3..7
        law = torch.tensor([1, 1, 1, 2, 2, 1, 1, 1]) / 10
        assert (torch.bincount(columns, minlength=8) / 3000 - law).abs().max() < 0.04


def test_views_are_as_many_as_asked_for_and_none_means_one_that_is_not_augmented():
    client = side(look=Look((0.5,), (0.25,), 2, True))
    for views, count in ((0, 1), (1, 1), (3, 3)):
        SEEN.clear()
        client.fit(client.model(None, f"{views}"), spying, views=views, stream=f"{views}")
        assert all(len(batch.views) == count for batch in SEEN)
        plain = all(torch.equal(batch.x, images_of(client).plain(batch.index)) for batch in SEEN)
        assert plain == (views == 0)


# --------------------------------------------------------------------------------------------- one step by hand


def test_sgd_with_momentum_and_weight_decay_takes_the_steps_worked_out_by_hand():
    client = side(batch=24)
    network = client.model()
    start = {name: value.double() for name, value in weights(network).items()}
    sgd = Optimiser(lr=0.1, momentum=0.9, weight_decay=0.01)
    client.fit(network, cross_entropy, epochs=2, optimiser=sgd)

    def gradient(w):
        w = {name: value.clone().requires_grad_() for name, value in w.items()}
        x = images_of(client).plain(torch.arange(24)).double().flatten(1)
        hidden = F.relu(x @ w["0.body.1.weight"].T + w["0.body.1.bias"])
        scores = hidden @ w["1.weight"].T + w["1.bias"]
        picked = scores.gather(1, client.labels[:, None])[:, 0]
        loss = (scores.logsumexp(1) - picked).mean()
        return dict(zip(w, torch.autograd.grad(loss, list(w.values())), strict=True))

    w, velocity = start, dict.fromkeys(start, 0.0)
    for _ in range(2):  # both steps see all 24 samples, in whatever order
        g = gradient(w)
        velocity = {name: 0.9 * velocity[name] + g[name] + 0.01 * w[name] for name in w}
        w = {name: w[name] - 0.1 * velocity[name] for name in w}
    for name, value in weights(network).items():
        torch.testing.assert_close(value.double(), w[name], rtol=1e-5, atol=1e-6)


def test_adam_takes_the_steps_worked_out_by_hand_with_momentum_as_its_first_beta():
    client = side(batch=8)
    network = client.model()
    bias, first, second = network[1].bias.detach().double(), 0.0, 0.0
    adam = Optimiser(name="adam", lr=0.05, momentum=0.8, weight_decay=0.01)
    client.fit(network, steep_at_first, epochs=1, optimiser=adam)
    for t, slope in enumerate((1.0, 0.1, 0.1), start=1):
        gradient = slope + 0.01 * bias
        first = 0.8 * first + 0.2 * gradient
        second = 0.999 * second + 0.001 * gradient**2
        bias = bias - 0.05 * (first / (1 - 0.8**t)) / ((second / (1 - 0.999**t)).sqrt() + 1e-8)
    torch.testing.assert_close(network[1].bias.detach().double(), bias, rtol=1e-5, atol=1e-6)


def steep_at_first(network, batch):  # slopes that differ, without which no step tells one second beta from another
    return (network[1].bias * torch.where(batch.step == 0, 1.0, 0.1)).sum()


def test_a_loss_without_a_gradient_moves_nothing_and_gathers_all_the_same():
    client = side(batch=8)
    network = client.model()
    before = weights(network)
    strong = Optimiser(lr=0.1, weight_decay=0.5)  # not by weight decay either
    fit = client.fit(network, counting, carry=torch.zeros(()), epochs=2, optimiser=strong)
    assert fit.carry == 48
    assert all(torch.equal(before[name], value) for name, value in weights(network).items())


def counting(network, batch):
    return network(batch.x).sum().detach(), batch.carry + len(batch.y)


def test_momentum_does_not_outlive_a_call_of_fit():
    def two_calls(momentum):
        client = side(batch=24)
        network = client.model()
        for stream in ("a", "b"):
            client.fit(
                network, cross_entropy, optimiser=Optimiser(lr=0.1, momentum=momentum, weight_decay=0.0), stream=stream
            )
        return weights(network)

    with_momentum, without = two_calls(0.9), two_calls(0.0)  # one step a call: momentum has nothing to carry
    assert all(torch.equal(with_momentum[name], without[name]) for name in without)


def test_the_mean_loss_is_over_samples_not_over_batches():
    client = side(batch=20)  # batches of 20 and 4
    network = client.model()
    fit = client.fit(network, by_size, optimiser=Optimiser(lr=1e-9, momentum=0, weight_decay=0))
    assert fit.loss == pytest.approx((20 * 20 + 4 * 4) / 24, abs=1e-4)


def by_size(network, batch):
    return F.cross_entropy(network(batch.x), batch.y) * 0 + len(batch.y)


def test_soft_labels_are_rows_of_probabilities():
    engine = tiny_engine(fixtures.Averaging(), batch=24)
    client = client_of(engine)
    hard, soft = client.model(None, "hard"), client.model(None, "soft")
    soft.load_state_dict(hard.state_dict())
    client.fit(hard, cross_entropy, stream="same")
    other = client_of(engine)
    other.fit(soft, cross_entropy, labels=F.one_hot(client.labels, 3).float(), stream="same")
    for a, b in zip(hard.parameters(), soft.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (torch.zeros(23, dtype=torch.int64), r"labels must have 24 rows, one an image, not \[23\]"),
        (torch.zeros(24, 3, 1), r"not \[24, 3, 1\]"),
    ],
)
def test_labels_of_a_wrong_length_are_refused(labels, message):
    client = side()
    with pytest.raises(ValueError, match=message):
        client.fit(client.model(), cross_entropy, labels=labels)


# --------------------------------------------------------------------------------------- what reaches a loss


def test_each_row_of_draw_reaches_its_own_step():
    client = side(batch=8)
    draw = {"w": torch.arange(6.0), "m": torch.arange(6)[:, None].expand(6, 8)}
    client.fit(client.model(), spying, epochs=2, draw=draw)
    assert [batch.draw["w"].item() for batch in SEEN] == [0, 1, 2, 3, 4, 5]
    assert [batch.draw["m"].tolist() for batch in SEEN] == [[i] * 8 for i in range(6)]


def test_given_numbers_arrive_as_fp64_or_int64_tensors_and_trees_keep_their_shape():
    client = side()
    anchor = torch.ones(3)
    given = {"mu": 0.1, "k": 3, "on": True, "none": None, "list": [1.5, (2, anchor)]}
    client.fit(client.model(), spying, given=given)
    found = SEEN[0].given
    assert (found["mu"].dtype, found["mu"].dim(), found["mu"].item()) == (torch.float64, 0, 0.1)
    assert (found["k"].dtype, found["k"].item()) == (torch.int64, 3)
    assert (found["on"].dtype, found["on"].item()) == (torch.bool, True)
    assert found["none"] is None
    assert isinstance(found["list"], list)
    assert isinstance(found["list"][1], tuple)
    assert torch.equal(found["list"][1][1], anchor)
    with pytest.raises(ValueError, match="given/word: a step takes tensors and numbers, not str"):
        client.fit(client.model(None, "b"), spying, given={"word": "no"}, stream="b")
    with pytest.raises(ValueError, match=r"given/net: .*, not Sequential; a network goes into frozen={name: network}"):
        client.fit(client.model(None, "c"), spying, given={"net": client.model(None, "d")}, stream="c")


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("method", [fixtures.Averaging, fixtures.Pair])
def test_a_networks_own_weights_as_given_stay_what_they_were_at_the_call(method, static):
    """As a proximal term takes them, for which they are ``dict(network.named_parameters())`` in most people's code."""
    ends = []
    for anchor in (weights, lambda network: dict(network.named_parameters())):
        engine = tiny_engine(method(), batch=8)
        engine.static = static
        client = client_of(engine)
        network = client.model()[0] if method is fixtures.Pair else client.model()
        client.fit(network, pulled, given=anchor(network), epochs=2)
        ends.append(weights(network))
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def pulled(network, batch):
    near = sum((p - batch.given[name]).square().sum() for name, p in network.named_parameters())
    return F.cross_entropy(network(batch.x), batch.y) + 0.5 * near


def test_rows_of_sample_follow_their_images_and_what_a_loss_writes_is_there_in_the_next_epoch():
    client = side(batch=8)
    start = torch.arange(24.0)
    fit = client.fit(client.model(), doubling, epochs=3, sample={"q": start, "untouched": start})
    assert torch.equal(fit.sample["q"], start * 8)
    assert torch.equal(fit.sample["untouched"], start)
    assert torch.equal(start, torch.arange(24.0))  # the caller's tensor is not written into


@pytest.mark.parametrize(
    ("value", "found"), [(torch.zeros(23), r"\[23\]"), (torch.zeros(72), r"\[72\]"), (0.0, "float")]
)
def test_a_sample_tensor_has_a_row_for_each_image_of_the_owner_and_no_other(value, found):
    client = side()
    with pytest.raises(ValueError, match=rf"fit: sample\['q'\] needs 24 rows, not {found}"):
        client.fit(client.model(), spying, sample={"q": value})


def doubling(network, batch):
    assert torch.equal(batch.sample["untouched"], batch.index.float())
    return F.cross_entropy(network(batch.x), batch.y), None, {"q": batch.sample["q"] * 2}


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda network, batch: (network(batch.x).mean(), None, {"target": batch.sample["targets"]}),
         r"rows of 'target', but fit was given sample= of targets. Did you mean targets\?"),
        (lambda network, batch: (network(batch.x).mean(), None, {"targets": batch.sample["targets"][0]}),
         r"rows of 'targets' that are \[3\], not \[8, 3\]: one row an image"),
        (lambda network, batch: (network(batch.x).mean(), None, {"targets": 1.0}), r"that are float, not \[8, 3\]"),
        (lambda network, batch: (network(batch.x).mean(), {"targets": batch.sample["targets"]}),
         r"returned a carry, .*Rows of sample alone are returned as \(loss, None, rows\)"),
    ],
    ids=["name", "shape", "type", "carry"],
)  # fmt: skip
def test_rows_that_cannot_be_kept_are_refused_with_what_is_wanted(loss, message):
    client = side(batch=8)
    with pytest.raises(ValueError, match=message):
        client.fit(client.model(), loss, sample={"targets": torch.zeros(24, 3)})


def test_a_carry_starts_as_given_and_passes_from_step_to_step():
    client = side(batch=8)
    mine = {"n": torch.tensor(10.0)}
    fit = client.fit(client.model(), carrying, epochs=2, carry=mine)
    assert fit.carry["n"].item() == 16
    assert mine["n"].item() == 10
    assert not fit.carry["n"].requires_grad


def carrying(network, batch):
    return F.cross_entropy(network(batch.x), batch.y), {"n": batch.carry["n"] + 1}


@pytest.mark.parametrize(
    ("result", "message"), [(torch.ones(2), r"not \[2\]"), (1.0, "not float"), (None, "not NoneType")]
)
def test_a_loss_must_return_a_scalar_tensor(result, message, monkeypatch):
    monkeypatch.setitem(globals(), "RESULT", result)
    client = side()
    with pytest.raises(ValueError, match=f"the loss returning must return a scalar tensor first, {message}"):
        client.fit(client.model(), returning)


RESULT = None


def returning(network, batch):
    return RESULT


@pytest.mark.parametrize("once", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_once_is_named_even_if_it_recovers(once):
    client = side()
    with pytest.raises(FloatingPointError, match=rf"the loss wrong_at_first became {once} within 3 steps"):
        client.fit(client.model(), wrong_at_first, given=once)


def wrong_at_first(network, batch):
    value = F.cross_entropy(network(batch.x), batch.y)
    return torch.where(batch.step == 0, value.detach() * batch.given, value)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"batch": 0}, "a batch has one image or more, not 0"),
        ({"batch": -4}, "a batch has one image or more, not -4"),
        ({"streams": {"other": {"batch": 0}}}, "a batch has one image or more, not 0"),
        ({"last_batch": "dorp"}, "unknown last_batch 'dorp'. Did you mean drop"),
        ({"epochs": -1}, "fit: epochs must be 0 or more, not -1"),
        ({"steps": -2}, "fit: steps must be 0 or more, not -2"),
        ({"views": -1}, "fit: views must be 0 or more, not -1"),
    ],
    ids=str,
)
def test_numbers_that_fit_cannot_mean_are_refused_and_not_taken_for_the_protocols_or_none(said, message):
    client = side()
    with pytest.raises(ValueError, match=message):
        client.fit(client.model(), fixtures.cross_entropy, **said)


# -------------------------------------------------------------------------------------------------- apply, modes


def test_apply_keeps_the_order_of_samples_across_its_large_batches():
    arrays = tiny_arrays(samples=1300)
    client = side(arrays=arrays, clients=1)
    found = client.apply(lambda batch: {"i": batch.index, "y": (batch.y, batch.x.mean((1, 2, 3)))})
    assert torch.equal(found["i"], torch.arange(1300))
    assert torch.equal(found["y"][0], client.labels)
    torch.testing.assert_close(found["y"][1], images_of(client).plain(torch.arange(1300)).mean((1, 2, 3)))
    positions = torch.tensor([700, 3, 3, 1299])
    assert torch.equal(client.apply(lambda batch: batch.index, subset=positions), positions)


def test_apply_has_no_gradient_and_by_default_no_augmentation():
    client = side(look=Look((0.5,), (0.25,), 2, True))
    network = client.model(None, "f", frozen=True)
    scores = client.apply(lambda batch: batch.frozen["f"](batch.x), frozen={"f": network})
    assert not scores.requires_grad
    torch.testing.assert_close(scores, network(images_of(client).plain(torch.arange(24))))
    again = client.apply(lambda batch: batch.x)
    assert torch.equal(again, images_of(client).plain(torch.arange(24)))
    augmented = client.apply(lambda batch: batch.x, view="train")
    assert not torch.equal(augmented, again)
    with pytest.raises(ValueError, match="view must be 'plain' or 'train', not 'test'"):
        client.apply(lambda batch: batch.x, view="test")


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize(
    "function",
    [
        lambda batch: batch.x.mean(),
        lambda batch: batch.x.mean((0, 2, 3)),
        lambda batch: {"right": batch.index, "wrong": (batch.x[:2],)},
        lambda batch: (batch.index, None),
    ],
)
def test_apply_wants_rows(function, static):
    client = side(static=static)
    with pytest.raises(ValueError, match="one row an image"):
        client.apply(function)


@pytest.mark.parametrize("static", [False, True])
def test_apply_to_no_image_gives_no_row(static):
    client = side(static=static)
    nobody = torch.zeros(0, dtype=torch.int64)
    for view in ("plain", "train"):
        found = client.apply(lambda batch: (batch.index, batch.x.flatten(1)), subset=nobody, view=view, stream=view)
        assert [list(rows.shape) for rows in found] == [[0], [0, 64]]


def test_fit_trains_in_training_mode_and_a_frozen_network_is_in_eval_mode_without_gradient():
    engine = tiny_engine(fixtures.Norm())
    client = client_of(engine)
    network, frozen = client.model(), client.model(None, "frozen", frozen=True)
    assert (network.training, frozen.training) == (True, False)
    assert not any(parameter.requires_grad for parameter in frozen.parameters())
    network.eval()
    client.fit(network, moded)
    assert network[1].num_batches_tracked == 3  # BatchNorm saw three batches in training mode
    assert not network.training  # and the network is handed back in the mode it came in
    before = weights(frozen)
    client.apply(lambda batch: batch.frozen["f"](batch.x), frozen={"f": frozen})
    assert all(torch.equal(before[name], value) for name, value in weights(frozen).items())


def moded(network, batch):
    assert network.training
    return F.cross_entropy(network(batch.x), batch.y)


@pytest.mark.parametrize("part", [lambda network: network, lambda network: network[0]], ids=["whole", "half"])
def test_a_network_is_handed_out_anew_with_the_asked_weights_and_gradients_on(part):
    lane = Lane(tiny_engine(fixtures.Averaging()))
    first = lane.client(0, None, 0, 0)
    start = weights(first.model())
    network = lane.client(0, None, 0, 1).model(start)
    part(network).requires_grad_(False).eval()
    again = lane.client(1, None, 0, 1).model(start)
    assert all(module.training for module in again.modules())
    again(torch.ones(4, *lane.engine.shape)).sum().backward()
    third = lane.client(2, None, 0, 1).model(start)
    assert all(parameter.requires_grad and not parameter.grad.any() for parameter in third.parameters())
    with pytest.raises(ValueError, match=r"model\(name='main'\): these are not the network's weights"):
        lane.client(2, None, 0, 0).model({"wrong": torch.ones(1)})


@pytest.mark.parametrize(
    "hook",
    [
        lambda network: network[1].weight.register_hook(lambda gradient: gradient.clamp(-1, 1)),
        lambda network: network[1].weight.register_post_accumulate_grad_hook(lambda weight: None),
        lambda network: network[0].register_forward_hook(lambda *_: None),
        lambda network: network[0].register_full_backward_hook(lambda *_: None),
    ],
    ids=["gradient", "accumulated", "forward", "backward"],
)
def test_a_hook_that_the_next_client_would_inherit_is_refused_and_one_that_was_removed_is_not(hook):
    client = side()
    network, peer = client.model(), client.model(None, "peer", frozen=True)
    client.fit(network, spying, frozen={"peer": peer})
    handle = hook(network)
    with pytest.raises(ValueError, match=r"the Sequential has a hook.*the next clients' turns.*in the loss"):
        client.fit(network, spying, stream="hooked")
    handle.remove()
    client.fit(network, spying, stream="removed")
    if hook.__code__.co_names[0] == "register_forward_hook":
        hook(peer)
        with pytest.raises(ValueError, match="has a hook"):
            client.apply(lambda batch: batch.frozen["peer"](batch.x), frozen={"peer": peer})


def test_a_hook_that_the_methods_own_network_brings_is_part_of_it():
    class Scaled(fixtures.Averaging):
        def network(self, encoder):
            network = super().network(encoder)
            network[1].register_forward_hook(lambda module, inputs, output: 0 * output)
            return network

    client = Lane(tiny_engine(Scaled(), clients=1)).client(0, None, 0, 0)
    assert client.fit(client.model(), fixtures.cross_entropy).loss == pytest.approx(math.log(3))


@pytest.mark.parametrize(
    "reach", [iter, len, lambda data: data[0], lambda data: next(iter(torch.utils.data.DataLoader(data)))]
)
def test_whoever_iterates_over_images_is_told_what_to_do_instead(reach):
    client = side()
    assert client.data
    with pytest.raises(TypeError, match=r"images stay with the engine.*fit\(network, loss\).*apply"):
        reach(client.data)


def test_a_network_that_was_trained_is_looked_through_under_another_name():
    client = side()
    network = client.model()
    with pytest.raises(ValueError, match=r"'net' is trainable.*model\(weights\(network\), another name, frozen=True\)"):
        client.apply(lambda batch: batch.frozen["net"](batch.x), frozen={"net": network})
    with pytest.raises(
        ValueError, match=r"apply: .*looks through network, a network that trains.*another name, frozen"
    ):
        client.apply(lambda batch: network(batch.x))  # a BatchNorm in it would learn from what is only looked at
    with pytest.raises(ValueError, match=r"model\(name='main'\) was taken before.*another name"):
        client.model(weights(network), frozen=True)
    trained = client.model(weights(network), "trained", frozen=True)
    scores = client.apply(lambda batch: batch.frozen["net"](batch.x), frozen={"net": trained})
    assert scores.shape == (24, 3)
    assert torch.equal(client.apply(lambda batch: trained(batch.x)), scores)


@pytest.mark.parametrize("optimiser", ["adam", torch.optim.SGD([torch.zeros(1)], lr=0.1)])
def test_an_optimiser_of_torchs_is_refused_with_what_is_wanted(optimiser):
    client = side()
    with pytest.raises(ValueError, match=r"optimiser takes a flnoisebench.api.Optimiser .*, not (str|SGD)"):
        client.fit(client.model(), spying, optimiser=optimiser)


def test_a_network_without_weights_starts_from_its_own_stream_whoever_trained_it_before():
    engine = tiny_engine(fixtures.Averaging())
    lane = Lane(engine)
    before = lane.client(0, None, 0, 0)
    before.fit(before.model(), cross_entropy)
    start = weights(lane.client(1, None, 0, 0).model())  # the same object, on the lane that has it already
    alone = weights(client_of(engine, 1).model())
    assert all(torch.equal(start[name], value) for name, value in alone.items())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"momentun": 0.5}, r"Optimiser\nmomentun\n.*not permitted"),
        ({"name": "adamw"}, r"Optimiser\nname\n.*should be 'sgd' or 'adam'"),  # which trained by SGD
        ({"lr": -0.1}, r"Optimiser\nlr\n.*should be greater than 0"),
    ],
)
def test_a_copied_optimiser_is_held_to_its_bounds_when_it_is_used(change, said):
    client = side()
    wrong = client.protocol.optimiser_at(0).model_copy(update=change)  # pydantic looks at none of it
    with pytest.raises(ValueError, match=said):
        client.fit(client.model(), spying, optimiser=wrong)


def test_a_frozen_network_is_not_trained_without_a_word():
    client = side()
    with pytest.raises(ValueError, match="no parameter of this network takes gradients, as of one made with frozen"):
        client.fit(client.model(frozen=True), spying)


def test_networks_of_different_names_are_independent():
    client = side()
    one, two = client.model(None, "one"), client.model(None, "two")
    before = weights(two)
    assert not torch.equal(before["1.weight"], weights(one)["1.weight"])  # they start apart
    client.fit(one, cross_entropy)
    assert all(torch.equal(before[name], value) for name, value in weights(two).items())
    assert not torch.equal(before["1.weight"], weights(one)["1.weight"])


# ------------------------------------------------------------------------------------------ protocol and server


def test_the_learning_rate_depends_on_the_servers_round_and_on_nothing_else():
    protocol = Protocol(rounds=10, lr_schedule="cosine", optimiser=Optimiser(lr=0.2))
    rates = [protocol.optimiser_at(round).lr for round in range(10)]
    assert rates[0] == 0.2
    assert rates[5] == pytest.approx(0.1)
    assert rates == sorted(rates, reverse=True)
    assert rates[9] == pytest.approx(0.1 * (1 + math.cos(0.9 * math.pi)))
    constant = Protocol(rounds=10, optimiser=Optimiser(lr=0.2))
    assert {constant.optimiser_at(round).lr for round in range(10)} == {0.2}


def test_a_client_that_was_away_trains_at_the_rounds_rate(finish):
    _, rounds, run = finish(fixtures.Claiming, clients=4, participation=0.5, rounds=4, lr_schedule="cosine")
    assert [record.lr for record in rounds] == [run.settings.protocol.optimiser_at(round).lr for round in range(4)]
    engine = tiny_engine(fixtures.Averaging(), lr_schedule="cosine", rounds=10, batch=24)

    def moved(round, id):  # the first step's length is proportional to the rate
        client = Lane(engine).client(id, None, round, 0)
        network = client.model(start)
        client.fit(network, cross_entropy)
        return (network[1].bias - start["1.bias"]).norm().item()

    start = weights(Lane(engine).client(0, None, 0, 0).model())
    assert moved(5, 0) / moved(0, 0) == pytest.approx(0.5, rel=1e-3)
    assert moved(9, 1) / moved(0, 1) == pytest.approx(0.5 * (1 + math.cos(0.9 * math.pi)), rel=1e-3)


def test_bf16_runs_on_a_cpu_and_differs_from_fp32(finish):
    exact, coarse = (finish(fixtures.Norm, precision=precision)[0] for precision in ("fp32", "bf16"))
    assert coarse.status == "complete"
    assert coarse.accuracy.final > 60
    assert coarse.digest != exact.digest


def test_a_cohort_has_the_asked_size_no_client_twice_and_changes_from_round_to_round():
    arrays = tiny_arrays(samples=200)

    def cohorts(participation, clients=20, rounds=1):
        lane = Lane(tiny_engine(fixtures.Averaging(), arrays=arrays, clients=clients, participation=participation))
        return [lane.server(round, 0, "plan").cohort() for round in range(rounds)]

    for participation, count in ((1.0, 20), (0.29, 5), (0.05, 1), (0.001, 1), (0.3, 6), (0.7, 14)):
        (cohort,) = cohorts(participation)
        assert len(cohort) == len(set(cohort)) == count
        assert cohort == tuple(sorted(cohort))
        assert set(cohort) <= set(range(20))
    assert len(cohorts(0.29, clients=100)[0]) == 29  # 0.29 * 100 is 28.999999999999996
    drawn = cohorts(0.3, rounds=200)
    assert len(set(drawn[:10])) > 8
    assert min(Counter(client for cohort in drawn for client in cohort).values()) > 30  # of 60 expected


def test_a_server_has_no_images_but_the_public_ones():
    server = Lane(tiny_engine(fixtures.Averaging(), arrays=tiny_arrays(public=12))).server(0, 0, "aggregate")
    with pytest.raises(ValueError, match=r"no images of its own: pass data=server\.public"):
        server.fit(server.model(), cross_entropy)
    with pytest.raises(ValueError, match=r"data must be client\.data or server\.public of this call, not Tensor"):
        server.apply(lambda batch: batch.x, data=torch.zeros(1))
    assert server.apply(lambda batch: batch.y, data=server.public).tolist() == [-1] * 12  # they have no labels
    assert server.shape == (1, 8, 8)


def test_a_client_sees_its_own_given_labels_and_a_scribble_on_its_copy_changes_nothing():
    engine = tiny_engine(fixtures.Averaging(), positions=[[4, 9, 1], [0, 2], [3, 5]])
    lane = Lane(engine)
    client = lane.client(0, None, 0, 0)
    assert (client.size, client.labels.tolist()) == (3, engine.given[[4, 9, 1]].tolist())
    client.labels.fill_(0)
    client.fit(client.model(), spying)
    assert sorted(SEEN[0].y.tolist()) == sorted(engine.given[[4, 9, 1]].tolist())
    assert lane.client(0, None, 1, 0).labels.tolist() == engine.given[[4, 9, 1]].tolist()


def test_claims_about_clients_that_do_not_exist_are_refused():
    server = Lane(tiny_engine(fixtures.Averaging())).server(0, 0, "aggregate")
    with pytest.raises(ValueError, match=r"claim: clients \[3\] are outside 0\.\.2"):
        server.claim([1, 3])
    server.claim([2, 1])
    assert server.noisy_clients == [1, 2]


@pytest.mark.parametrize("name", ["mlp", "small-cnn", "resnet18"])
def test_encoders_give_features_of_their_width_for_grey_and_coloured_images(name):
    for channels in (1, 3):
        encoder = build_encoder(name, (channels, 32, 32), 10)
        assert encoder(torch.zeros(2, channels, 32, 32)).shape == (2, encoder.width)


def test_an_unknown_model_is_answered_with_near_misses():
    with pytest.raises(ValueError, match=r"unknown model 'resnet-18'\. Did you mean resnet18"):
        build_encoder("resnet-18", (3, 32, 32), 10)
    assert set(MODELS) >= {"mlp", "small-cnn", "resnet18", "resnet34", "resnet50"}


def test_trained_and_passed_images_are_told_apart():
    lane = Lane(tiny_engine(fixtures.Distilled()))
    client = lane.client(0, None, 1, 0)
    network, teacher = client.model(), client.model(None, "teacher", frozen=True)
    client.fit(network, fixtures.distilled, frozen={"teacher": teacher}, given={"ramp": 0.5, "t": 2}, epochs=2)
    client.apply(lambda batch: batch.frozen["t"](batch.x), frozen={"t": teacher}, subset=torch.arange(5))
    network.eval()
    client.apply(lambda batch: network(batch.x), subset=torch.arange(3))  # it could be trained, and is not here
    taken = lane.meter.take()
    assert dict(taken.images) == {"trained": 48, "passed": 48 + 5 + 3, "skipped": 0}
    assert set(taken.seconds) == {"fit", "apply"}
    assert not lane.meter.take().images


def test_what_one_side_writes_into_what_it_is_told_no_other_reads():
    lane = Lane(tiny_engine(fixtures.Whole(), told={"noise_rate": 0.4}))
    lane.client(0, None, 0, 0).told["from client 0"] = 1.0
    assert lane.client(1, None, 0, 0).told == lane.server(0, 0, "aggregate").told == {"noise_rate": 0.4}
