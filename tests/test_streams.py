"""Streams: found by name, fixed for ever, and no two alike."""

import hashlib
import itertools

import fixture_methods as fixtures
import numpy as np
import pytest
import torch

from flnoisebench import streams
from flnoisebench.engine import Lane, Look
from flnoisebench.streams import numpy_stream, seed_of, torch_stream
from flnoisebench.testing import tiny_engine

PINNED_SEED = 4942253032914669042
PINNED_ORDER = [1, 5, 4, 3, 2, 0]
PINNED_INTEGERS = [208, 568, 234, 229]


def test_a_seed_is_the_sha256_of_the_names_as_json():
    by_hand = hashlib.sha256(b'[0,"client",3,2,1,"fit/fit"]').digest()
    assert seed_of(0, "client", 3, 2, 1, "fit/fit") == int.from_bytes(by_hand[:8], "big") >> 1
    assert seed_of("é", None) == int.from_bytes(hashlib.sha256(b'["\\u00e9",null]').digest()[:8], "big") >> 1


def test_published_numbers_keep_coming():
    """Pinned: a change here changes every result ever published."""
    assert seed_of(0, "init", None, 0, 0, "x") == PINNED_SEED
    assert torch.randperm(6, generator=torch_stream("scenario", "digits", 0)).tolist() == PINNED_ORDER
    assert numpy_stream("scenario", "digits", 0).integers(0, 1000, 4).tolist() == PINNED_INTEGERS


def test_whatever_a_side_draws_has_a_stream_of_its_own_under_the_name_that_it_always_had(monkeypatch):
    """Pinned too: an order that is not apart from the crops, or a name that changes, changes every result."""
    look = Look((0.5,), (0.25,), 2, True)
    lane = Lane(tiny_engine(fixtures.Averaging(), look=look, seed=7))
    taken = []
    monkeypatch.setattr(streams, "seed_of", lambda *names: taken.append(names) or seed_of(*names))
    client, server = lane.client(1, None, 4, 2), lane.server(4, 2, "plan")
    network = client.model()
    client.model(None, "peer"), client.rng("x"), client.seed("x")
    client.fit(network, fixtures.cross_entropy, epochs=2, views=2, streams={"more": {}})
    client.apply(lambda batch: batch.x, view="train")
    server.cohort(), server.model(None, "other"), server.rng("x")
    own, servers = (7, "client", 1, 4, 2), (7, "plan", None, 4, 2)
    epochs = list(itertools.product((0, 1), ("order", "augment")))
    assert sorted(taken, key=str) == sorted(
        [
            (*own, "main", "init"), (*own, "peer", "init"), (*own, "rng/x"), (*own, "seed/x"),
            *((*own, "fit/fit", *epoch) for epoch in epochs),
            *((*own, "fit/fit", "other", "more", *epoch) for epoch in epochs),
            (*own, "apply/apply", 0, "augment"),
            (*servers, "cohort/cohort"), (*servers, "other", "init"), (*servers, "rng/x"),
        ],
        key=str,
    )  # fmt: skip


def test_a_side_hands_scikit_learn_the_low_32_bits_of_a_seed():
    client = Lane(tiny_engine(fixtures.Averaging(), seed=7)).client(1, None, 4, 2)
    names = [f"mixture {number}" for number in range(8)]
    whole = [seed_of(7, "client", 1, 4, 2, f"seed/{name}") for name in names]
    assert [client.seed(name) for name in names] == [seed % 2**32 for seed in whole]
    assert any(seed % 2**32 >= 2**31 for seed in whole)


def test_names_that_read_alike_are_different_streams():
    names = [
        ("a", "bc"), ("ab", "c"), ("abc",), ("a", "b", "c"), (1,), ("1",), (None,), ("None",), (), ("",), ("a", None),
        ("a",), ('a","b',), ("a", "b"), (1, 2), (12,), ("1,2",),
    ]  # fmt: skip
    assert len({seed_of(*name) for name in names}) == len(names)


def test_a_hundred_thousand_streams_have_a_hundred_thousand_seeds():
    seeds = {seed_of(*name) for name in itertools.product(range(10), ("client", "join"), range(100), range(50))}
    assert len(seeds) == 100_000
    assert min(seeds) >= 0
    assert max(seeds) < 2**63


def test_a_stream_starts_at_its_start_every_time_and_leaves_the_global_generators_alone():
    torch.manual_seed(0)
    np.random.seed(0)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    a, b = (torch.rand(4, generator=torch_stream(1, "x")) for _ in range(2))
    c, d = (numpy_stream(1, "x").random(4) for _ in range(2))
    assert torch.equal(a, b)
    assert np.array_equal(c, d)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1])


def test_streams_are_on_the_cpu_so_that_a_gpu_shuffles_alike():
    assert torch_stream(0).device.type == "cpu"


def test_neighbouring_streams_are_not_correlated():
    rows = torch.stack([torch.randn(2000, generator=torch_stream(0, "client", k)) for k in range(20)])
    correlation = torch.corrcoef(rows) - torch.eye(20)
    assert correlation.abs().max() < 5 / 2000**0.5


@pytest.mark.parametrize("name", [1.5, b"x", (1,), torch.tensor(1)])
def test_a_name_is_a_string_a_number_or_nothing(name):
    with pytest.raises(TypeError, match="a stream is named by str, int or None"):
        seed_of(0, name)
