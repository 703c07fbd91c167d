"""The engine behind ``fit`` and ``apply``: tensors that stay where they are give the bits of tensors that do not, with
or without a recording, on one lane or four."""

import warnings

import fixture_methods as fixtures
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from test_plugin_needs import NEEDS

from flnoisebench import registry, trees
from flnoisebench.api import Reply, average, weights
from flnoisebench.engine import Lane, steps
from flnoisebench.engine.flat import FlatNetwork
from flnoisebench.executors import deal
from flnoisebench.models import build_encoder
from flnoisebench.testing import tiny_engine, tiny_run

METHODS = [
    *NEEDS,
    registry.load_method("fedavg"),
    registry.load_method("fedcova"),
    registry.load_method("fedavg-relabel"),
]
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
every_method = pytest.mark.parametrize("method", METHODS, ids=lambda method: method.__name__)


def digest(method, folder, *, static=None, **options):
    run = tiny_run(method, folder, rounds=4, **options)
    if static is not None:
        run.engine.static = static
    return run.execute().digest


# ------------------------------------------------------------------------------- static tensors, on any machine


@every_method
def test_static_tensors_give_the_bits_of_moving_ones(method, tmp_path, monkeypatch):
    """Everything that a recorded step would read and write is in its static place here; only the recording is not."""
    monkeypatch.setattr("flnoisebench.engine.training.RECORDED_BATCH", 512)  # the size is part of the bits on a CPU
    assert digest(method, tmp_path / "static", static=True) == digest(method, tmp_path / "moving", static=False)


@every_method
def test_lanes_with_static_tensors_give_the_serial_bits(method, tmp_path):
    digests = [
        digest(method, tmp_path / executor, static=True, executor=executor, lanes=lanes)
        for executor, lanes in (("serial", 1), ("threads", 3))
    ]
    assert digests[0] == digests[1]


def test_small_chunks_give_the_bits_of_a_whole_epoch(tmp_path, monkeypatch):
    whole = digest(fixtures.TwoStreams, tmp_path / "whole", static=True)
    monkeypatch.setattr(steps, "CHUNK_BYTES", 4 * 64 * 9)  # nine images: one batch of 8
    assert digest(fixtures.TwoStreams, tmp_path / "static", static=True) == whole
    assert digest(fixtures.TwoStreams, tmp_path / "moving", static=False) == whole


def weighted(network, batch):
    return batch.given["weight"] * F.cross_entropy(network(batch.x), batch.y)


def test_a_session_serves_every_client_and_call_of_its_kind():
    engine = tiny_engine(fixtures.Averaging(), clients=3, positions=[range(24), range(24, 40), range(40, 72)])
    engine.static = True
    lane = Lane(engine)
    start = weights(lane.client(0, None, 0, 0).model())
    for client in range(3):
        for exchange, weight in enumerate((1.0, 2.0)):
            side = lane.client(client, None, 1, exchange)
            side.fit(side.model(start), weighted, given={"weight": weight}, last_batch="drop")
    assert len(lane._sessions) == 1
    assert len(lane._steppers) == 1


def test_a_batch_that_is_larger_than_a_chunk_has_room_after_a_smaller_one(monkeypatch):
    monkeypatch.setattr(steps, "CHUNK_BYTES", 4 * 64 * 5)  # five images, as 256 of 224 x 224 are more than a chunk
    found = []
    for static in (False, True):
        engine = tiny_engine(fixtures.Averaging(), clients=2, positions=[range(4), range(4, 72)])
        engine.static = static
        lane = Lane(engine)
        for client in range(2):  # one batch of 4, then batches of 8
            side = lane.client(client, None, 1, 0)
            found.append(side.fit(side.model(), weighted, given={"weight": 1.0}).loss)
    assert found[:2] == found[2:]


def test_what_a_call_brings_reaches_a_remembered_session():
    engine = tiny_engine(fixtures.Averaging(), clients=1, optimiser={"lr": 0.1, "momentum": 0.0, "weight_decay": 0.0})
    engine.static = True
    lane = Lane(engine)
    start = weights(lane.client(0, None, 0, 0).model())
    moved = []
    for exchange, weight in enumerate((1.0, 3.0)):
        side = lane.client(0, None, 1, exchange)
        network = side.model(start)
        side.fit(network, weighted, given={"weight": weight}, batch=72, views=0)
        moved.append(torch.cat([(new - start[name]).flatten() for name, new in weights(network).items()]))
    torch.testing.assert_close(moved[1], 3 * moved[0], rtol=1e-4, atol=1e-6)


def carrying(network, batch):
    return F.cross_entropy(network(batch.x), batch.y), {"seen": batch.step}


def test_a_carry_that_was_not_begun_is_refused():
    side = Lane(tiny_engine(fixtures.Averaging(), clients=1)).client(0, None, 0, 0)
    with pytest.raises(ValueError, match="carrying returned a carry, but fit was given none"):
        side.fit(side.model(), carrying)
    fit = side.fit(side.model(name="b"), carrying, carry={"seen": -1}, stream="second")
    assert int(fit.carry["seen"]) == 8  # 72 images in batches of 8


def test_old_sessions_make_room(monkeypatch):
    monkeypatch.setattr("flnoisebench.engine.MOST_SESSIONS", 2)
    engine = tiny_engine(fixtures.Averaging(), clients=1)
    engine.static = True
    lane = Lane(engine)
    for views in range(4):
        side = lane.client(0, None, 0, views)
        side.fit(side.model(), weighted, given={"weight": 1.0}, views=views)
    assert len(lane._sessions) == 2


def turn_of_lambdas(side, scale):
    """The rows of two functions; all four are new objects in each turn, and the scale is a default of two of them."""
    network = side.model()
    side.fit(network, lambda network, batch: network(batch.x).mean())
    side.fit(network, lambda network, batch, scale=scale: scale * network(batch.x).mean(), stream="scaled")
    scaled = side.apply(lambda batch, scale=scale: scale * batch.index, stream="scaled")
    return side.apply(lambda batch: 2 * batch.index), scaled


def test_a_lambda_in_a_turn_is_the_same_function_in_the_next_unless_it_has_a_default():
    engine = tiny_engine(fixtures.Averaging(), clients=2)
    engine.static = True
    lane = Lane(engine)
    for client, scale in ((0, 2), (1, 3)):
        side = lane.client(client, None, 0, 0)
        twice, scaled = turn_of_lambdas(side, scale)
        assert twice.tolist() == [2 * i for i in range(len(side.labels))]
        assert scaled.tolist() == [scale * i for i in range(len(side.labels))]
    assert len(lane._sessions) == len(lane._passes) == 3  # one for both turns, and one each


def rows(batch):
    return batch.index


def test_a_pass_of_a_closure_is_not_kept_since_no_later_call_can_find_it():
    engine = tiny_engine(fixtures.Averaging(), clients=1)
    engine.static = True
    lane = Lane(engine)
    for exchange in range(3):
        side = lane.client(0, None, 0, exchange)
        assert side.apply(lambda batch: batch.index + exchange).tolist() == [*range(exchange, 72 + exchange)]  # noqa: B023
        assert side.apply(rows, stream="plain").tolist() == [*range(72)]
    assert [one.function for one in lane._passes.values()] == [rows]


def test_a_network_that_the_engine_did_not_make_is_trained_all_the_same():
    engine = tiny_engine(fixtures.Averaging(), clients=1)
    engine.static = True
    side = Lane(engine).client(0, None, 0, 0)
    foreign = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 3))
    before = weights(foreign)  # a copy, of such a network too
    side.fit(foreign, weighted, given={"weight": 1.0})
    assert not torch.equal(foreign[1].weight, before["1.weight"])


def test_parameters_without_gradient_are_not_moved_not_even_by_weight_decay():
    engine = tiny_engine(fixtures.Averaging(), clients=1, optimiser={"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1})
    side = Lane(engine).client(0, None, 0, 0)
    network = side.model()
    network[0].requires_grad_(False)
    before = weights(network)
    side.fit(network, weighted, given={"weight": 1.0})
    after = weights(network)
    assert all(torch.equal(before[name], after[name]) == name.startswith("0.") for name in before)


# ----------------------------------------------------------------------------------------------- flat networks


def test_a_flat_network_is_the_network_it_was():
    network = torch.nn.Sequential(build_encoder("resnet18", (3, 32, 32), 10), torch.nn.Linear(512, 10))
    network = network.to(memory_format=torch.channels_last)
    before = {name: (value.clone(), value.stride()) for name, value in network.state_dict().items()}
    flat = FlatNetwork(network)
    for name, value in network.state_dict().items():
        assert torch.equal(value, before[name][0])
        assert value.stride() == before[name][1]
    assert [key.split()[0] for key in flat.vectors] == ["parameter", "buffer", "buffer"]


def test_copies_of_a_flat_network_are_of_one_piece_and_its_own():
    network = build_encoder("mlp", (1, 8, 8), 3)
    flat = FlatNetwork(network)
    copy = flat.copy()
    whole = trees.vectors(copy)
    assert whole is not None
    assert len(whole[1]) == 1
    before = trees.digest(copy)
    flat.vectors["parameter float32"].zero_()
    assert trees.digest(copy) == before
    flat.load(copy)
    assert trees.digest(flat.copy()) == before
    flat.load({name: value.clone() for name, value in copy.items()})  # not of one piece
    assert trees.digest(flat.copy()) == before
    for wrong in ({}, {**copy, "more": torch.ones(1)}, {**copy, "body.1.bias": torch.ones(5)}, None):
        with pytest.raises(ValueError, match=r"missing|unknown|shape"):
            flat.load(wrong)


def test_averages_of_one_piece_equal_averages_tensor_by_tensor():
    parts = []
    for seed in range(3):
        torch.manual_seed(seed)
        network = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
        network[1].num_batches_tracked += seed
        parts.append(FlatNetwork(network).copy())
    pieces = [{name: value.clone() for name, value in part.items()} for part in parts]
    one, other = average(parts, [1, 2, 5]), average(pieces, [1, 2, 5])
    assert list(one) == list(other)
    assert trees.digest(one) == trees.digest(other)
    assert trees.vectors(one) is not None
    assert one["1.num_batches_tracked"] == 2


def test_averages_of_pieces_that_lie_in_another_order_go_by_name():
    vectors = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([10.0, 20.0, 30.0])
    one = {"a": vectors[0][:1], "b": vectors[0][1:]}
    other = {"a": vectors[1][2:], "b": vectors[1][:2]}
    assert None not in (trees.vectors(one), trees.vectors(other))
    found = average([one, other], [1, 1])
    assert (found["a"].tolist(), found["b"].tolist()) == ([15.5], [6.0, 11.5])


def test_averages_of_one_piece_hold_a_buffer_without_elements():
    network = torch.nn.Linear(4, 3)
    network.register_buffer("nothing_yet", torch.empty(0))
    network.register_buffer("behind", torch.tensor([1.0, 2.0]))
    part = FlatNetwork(network).copy()
    found = average([part, {name: 3 * value for name, value in part.items()}], [1, 1])  # tensor by tensor
    one = average([part, FlatNetwork(network).copy()], [1, 1])
    assert one["behind"].tolist() == [1, 2]
    assert found["behind"].tolist() == [2, 4]
    assert one["nothing_yet"].shape == (0,)
    assert torch.equal(one["weight"], part["weight"])


def test_a_digest_of_one_piece_is_the_digest_of_its_tensors():
    network = build_encoder("resnet18", (3, 32, 32), 10).to(memory_format=torch.channels_last)
    copy = FlatNetwork(network).copy()
    pieces = {name: value.clone(memory_format=torch.contiguous_format) for name, value in copy.items()}
    assert trees.vectors(copy) is not None
    assert trees.vectors(pieces) is None
    assert trees.digest(copy) == trees.digest(pieces)
    with torch.no_grad():
        copy["body.layer3.0.conv1.weight"][1, 2, 0, 1] += 1e-3
    assert trees.digest(copy) != trees.digest(pieces)
    with torch.no_grad():
        pieces["body.layer3.0.conv1.weight"][1, 2, 0, 1] += 1e-3
    assert trees.digest(copy) == trees.digest(pieces)


# ------------------------------------------------------------------------------------------------------- lanes


def test_clients_are_dealt_evenly_and_each_once():
    sizes = dict(enumerate([4500, 4200, 4100, 3900, 3800, 3000, 2900, 2500, 2400, 2300, 2000, 1900, 1500, 1200, 900]))
    hands = deal(list(sizes), sizes, 4)
    assert sorted(client for hand in hands for client in hand) == list(sizes)
    loads = [sum(sizes[client] for client in hand) for hand in hands]
    assert max(loads) - min(loads) <= 100  # the largest first alone leaves 900 of 10,275
    assert all([sizes[c] for c in hand] == sorted((sizes[c] for c in hand), reverse=True) for hand in hands)
    assert deal(list(sizes), sizes, 4) == hands
    assert deal([3, 1], {1: 5, 3: 5}, 4) == [[1], [3], [], []]


# --------------------------------------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@needs_cuda
@every_method
def test_recorded_eager_and_lanes_give_the_same_bits_on_a_gpu(method, tmp_path):
    found = {
        name: digest(method, tmp_path / name, device="cuda", **options)
        for name, options in {
            "eager": {"capture": False},
            "recorded": {},
            "lanes": {"executor": "threads", "lanes": 4},
            "devices": {
                "executor": "threads",
                "lanes": 2 * torch.cuda.device_count(),
                "beside": [torch.device("cuda", card) for card in range(1, torch.cuda.device_count())],
            },
        }.items()
    }
    assert len(set(found.values())) == 1, found


class AnswersFromTheCpu(fixtures.Averaging):
    """What its hooks return lies on the CPU, wherever the run is: fresh as resumed it is handed it on the device."""

    def init(self, server):
        return trees.to(super().init(server), "cpu")

    def join(self, client):
        return {"turns": torch.zeros(1)}

    def client(self, task, message, client):
        assert {leaf.device for leaf in trees.values([message, client.state])} == {client.labels.device}
        reply = super().client(task, message, client)
        return Reply(trees.to(reply.upload, "cpu"), {"turns": client.state["turns"].cpu() + 1})

    def aggregate(self, state, uploads, server):
        assert {leaf.device for leaf in trees.values([state, [upload.content for upload in uploads]])} == {
            next(server.model(state).parameters()).device
        }
        return trees.to(super().aggregate(state, uploads, server), "cpu")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_cuda])])
@pytest.mark.parametrize("method", [AnswersFromTheCpu, *METHODS], ids=lambda method: method.__name__)
def test_stopped_after_any_round_it_resumes_to_the_same_bits_wherever_it_runs(method, device, tmp_path):
    class Stop(BaseException):
        pass

    def stop(record):
        raise Stop

    options = {"device": device, "rounds": 3, "executor": "threads", "lanes": 2}
    whole = tiny_run(method, tmp_path / "whole", **options).execute().digest
    for _ in range(2):
        with pytest.raises(Stop):
            tiny_run(method, tmp_path / "stopped", **options).execute(stop)
    result = tiny_run(method, tmp_path / "stopped", **options).execute()
    assert (result.rounds, result.digest) == (3, whole)


def branching(network, batch):
    return F.cross_entropy(network(batch.x), batch.y) * (2.0 if batch.y.sum().item() > 0 else 1.0)


@pytest.mark.gpu
@needs_cuda
def test_a_loss_that_cannot_be_recorded_runs_eagerly_and_says_why_once():
    lane = Lane(tiny_engine(fixtures.Averaging(), device="cuda"))
    start = weights(lane.client(0, None, 0, 0).model())
    side = lane.client(0, None, 1, 0)
    network = side.model(start)
    with pytest.warns(UserWarning, match="branching cannot be recorded and runs eagerly"):
        fit = side.fit(network, branching)
    assert fit.steps == 3
    again = lane.client(0, None, 1, 1)
    network = again.model(start)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again.fit(network, branching)
