"""What scenarios promise: partitions that lose nobody's sample, noise that follows its law, manifests that pin both."""

import dataclasses
import itertools
import os
import re
import time
import timeit
import tracemalloc
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flnoisebench.scenario import (
    CLASS_MAPS,
    NOISE_PRESETS,
    Noise,
    Partition,
    ScenarioSpec,
    Sources,
    Truth,
    build,
    check,
    corrupt,
    diff,
    load,
    manifest,
    mean_rate,
    noise_from,
    partition,
    pinned,
    read_split,
    save,
    settled_facts,
    split,
    split_clients,
    summary,
)
from flnoisebench.scenario.class_maps import CIFAR100_COARSE
from flnoisebench.scenario.corruption import target_law
from flnoisebench.scenario.noise import interval, reads

STREAM = ("scenario", "test", 0)
CIFAR = np.repeat(np.arange(10), 5000)  # CIFAR-10's training labels, up to order
DRAWS = [  # preset; the partition's digest under three laws; the labels' digest under the last one
    ("clean", "a291466d ac615ba2 4e688f49", "a0ef8146b248"),
    ("fedcova-sym", "a291466d ac615ba2 4e688f49", "9253cd7c5be4"),
    ("fedcova-sym-bernoulli", "a291466d ac615ba2 4e688f49", "4891fa46d018"),
    ("fedcova-asym", "a291466d ac615ba2 4e688f49", "6cb3082ff7d5"),
    ("fedcova-asym-semantic", "a291466d ac615ba2 4e688f49", "1fad59a9ba7d"),
    ("fedcorr", "a291466d ac615ba2 4e688f49", "2d61c8c6fd23"),
    ("fednoro-random", "a291466d ac615ba2 4e688f49", "3939fbe3f966"),
    ("fednoisy-global", "a291466d ac615ba2 4e688f49", "96cb658c867b"),
    ("fednoisy-local", "a291466d ac615ba2 4e688f49", "c28ffbe60571"),
    ("fnbench-ramp", "a291466d ac615ba2 4e688f49", "cfd53662d1ba"),
    ("fedned-beta", "a291466d ac615ba2 4e688f49", "c8f48a72a50b"),
    ("dividemix-sym", "a291466d ac615ba2 4e688f49", "f918292ca656"),
    ("dividemix-asym", "a291466d ac615ba2 4e688f49", "813353836c55"),
    ("coteaching-pair", "a291466d ac615ba2 4e688f49", "45ba874b1c40"),
]
LATER_LAWS = {"shards": "65455b89", "classes": "69f725a1", "quantity": "bd833486"}  # the partition's digest
LATER_DRAWS = {  # preset: the labels' digest, or that of the images that intrude; human labels are nobody's draw
    "fedcova-sym-stratified": "89d4c67e63c4",
    "fedcova-paper-27.5": "e88f121b62bf",
    "fedcova-paper-34.4": "a5591f7978bf",
    "fedcova-paper-40.3": "a6bd76b2cfc1",
    "fedcorr-legacy": "f3477be8ffae",
    "fednoisy-asym": "137a17c0e30e",
    "fednoisy-asym-legacy": "b527a820ea62",
    "fednoisy-local-asym": "5423b6800a80",
    "fnbench-pair": "2aed296b08d9",
    "fedned-beta-legacy": "c92ec9a2d5d9",
    "mnist-asym": "43dfa64b2d15",
    "cifar100-asym": "6e5e8fc5e341",
    "cifar100-superclass": "87dca396bde9",
    "instance": "b25152a81694",
    "open-set": "25ab366472d8",
    "mixed": "dbbb5f2cbcac",
    "cifar10n-aggre-twin": "d2f894dd4b13",
    "cifar10n-random1-twin": "d2f894dd4b13",
    "cifar10n-random2-twin": "d2f894dd4b13",
    "cifar10n-random3-twin": "d2f894dd4b13",
    "cifar10n-worse-twin": "d2f894dd4b13",
    "cifar100n-twin": "afd42ad89a9e",
}
SLUG = "fedcova-sym-rho0.6-tau0.7_bernoulli-dirichlet-p0.5-alpha5_m20_holdout0.1_669e52"
DRAWN = ["iid", "dirichlet", "bernoulli-dirichlet", "shards", "classes", "quantity"]
EASY = Partition(p=0.9)  # every client holds several classes
quick = settings(max_examples=60, deadline=None, database=None, suppress_health_check=list(HealthCheck))


def balanced(n: int, classes: int) -> np.ndarray:
    return np.arange(n) % classes


def one_client(n: int) -> np.ndarray:
    return np.zeros(n, dtype=np.int64)


def scenario(noise="fedcova-sym", labels=CIFAR, classes=10, changes=None, sources=None, **spec):
    spec.setdefault("partition", EASY)
    law = noise_from(noise, **(changes or {}))
    spec = ScenarioSpec(dataset="cifar10", noise=law, noise_name=noise, **spec)
    return build(spec, labels, classes, "sha of the data", sources=sources)


def world(preset: str, n: int = 10_000) -> tuple[Noise, np.ndarray, int, Sources]:
    """(law, true labels, classes, sources) that fit a preset."""
    law = NOISE_PRESETS[preset][0]
    if law.target == "open-set":
        law = law.model_copy(update={"foreign": "elsewhere"})
    classes = 100 if preset.startswith("cifar100") or law.class_map.startswith("cifar100") else 10
    rng = np.random.default_rng(1)
    true = rng.integers(0, classes, n)
    people = np.where(rng.random(n) < 0.3, (true + rng.integers(1, 3, n)) % classes, true)
    images = rng.integers(0, 256, (n, 1, 3, 3), dtype=np.uint8)
    human = {law.labelled_by: people} if law.labelled_by else {}
    return law, true, classes, Sources(images=images, human=human, foreign=n // 2)


# ------------------------------------------------------------------------------------ what must stay as it was


def test_the_draws_of_published_presets_stay_as_they_are():
    # Every result names these digests: a change of any of them makes all results of that preset incomparable.
    labels = np.arange(4000) * 7 % 10
    for name, partition_sha, labels_sha in DRAWS:
        for law, its_sha in zip(("iid", "dirichlet", "bernoulli-dirichlet"), partition_sha.split(), strict=True):
            built, _ = scenario(name, labels=labels, partition=Partition(law=law, p=0.9), draw=2)
            assert built.digests["partition"].startswith(its_sha), (name, law)
        assert built.digests["labels"].startswith(labels_sha), name


def test_the_draws_of_later_presets_laws_and_hold_outs_stay_as_they_are_too():
    labels = np.arange(4000) * 7 % 10
    assert {*LATER_LAWS, "iid", "dirichlet", "bernoulli-dirichlet"} == set(DRAWN)
    for law, its_sha in LATER_LAWS.items():
        built, _ = scenario("clean", labels=labels, partition=Partition(law=law), draw=2)
        assert built.digests["partition"].startswith(its_sha), law
    people = {name for name, (law, _) in NOISE_PRESETS.items() if law.target == "human"}
    assert {*LATER_DRAWS, *people, "given", *(name for name, *_ in DRAWS)} == set(NOISE_PRESETS)  # a new one is pinned
    for name, its_sha in LATER_DRAWS.items():
        law, true, classes, sources = world(name)
        spec = ScenarioSpec(dataset="d", noise=law, noise_name=name, partition=EASY, draw=2)
        built, truth = build(spec, true, classes, "sha of the data", sources=sources)
        drawn = built.given if truth.foreign is None else truth.foreign
        assert manifest.digest(drawn).startswith(its_sha), name
    held, _ = scenario(labels=labels, holdout=0.1, draw=2)
    assert manifest.digest(held.held_out).startswith("76e0a38c3754")


def test_the_names_of_earlier_scenarios_stay_as_they_are():
    spec = ScenarioSpec(dataset="d", noise=Noise(include_true=False), noise_name="fedcova-sym", holdout=0.1)
    assert spec.slug == SLUG
    assert "mixture" not in spec.model_dump_json()
    assert "shards" not in spec.model_dump_json()


# ------------------------------------------------------------------------------------------- partitions


@quick
@given(
    law=st.sampled_from(DRAWN),
    per_client=st.integers(1, 6),
    p=st.floats(0.01, 1),
    alpha=st.one_of(st.floats(1e-3, 1), st.floats(1, 1e6)),
    clients=st.integers(1, 60),
    classes=st.integers(1, 40),
    n=st.integers(1, 3000),
    seed=st.integers(0, 2**31),
)
def test_a_partition_gives_every_sample_one_owner_or_raises_with_advice_in_bounded_time(
    law, per_client, p, alpha, clients, classes, n, seed
):
    labels = np.random.default_rng(seed).integers(0, classes, n)
    spec = Partition(law=law, p=p, alpha=alpha, shards=per_client, per_client=per_client)
    start = time.thread_time()
    try:
        owner = split(spec, labels, classes, clients, ("test", seed))
    except ValueError as error:
        if not re.search(r"lower clients|raise (alpha|p)|per_client is \d+ at most", str(error)):
            raise
    else:
        assert owner.dtype == np.int64
        assert owner.shape == labels.shape
        sizes = np.bincount(owner, minlength=clients)
        assert len(sizes) == clients
        assert sizes.sum() == n
        assert sizes.min() >= spec.min_size
        if law == "iid":
            assert sizes.max() - sizes.min() <= 1
        assert np.array_equal(owner, split(spec, labels, classes, clients, ("test", seed)))
    assert time.thread_time() - start < 20  # two partitions


@quick
@given(law=st.sampled_from(DRAWN), alpha=st.floats(0.5, 100), p=st.floats(0.4, 1))
def test_another_draw_is_another_partition(law, alpha, p):
    owners = {
        split(Partition(law=law, alpha=alpha, p=p), balanced(400, 10), 10, 8, ("test", draw)).tobytes()
        for draw in range(4)
    }
    assert len(owners) == 4


@pytest.mark.parametrize("clients", [3, 7, 30])
def test_iid_loses_no_sample_when_clients_do_not_divide_them(clients):
    sizes = np.bincount(split(Partition(law="iid"), CIFAR, 10, clients, STREAM), minlength=clients)
    assert sizes.sum() == 50_000
    assert sizes.max() - sizes.min() <= 1


@pytest.mark.parametrize("law", DRAWN)
def test_a_hundred_thousand_labels_go_to_500_clients_in_half_a_second_and_100_mib(law):
    # A tenth of what benchmarks/scenario.py measures: a million labels in 5 s and 1 GiB.
    labels = np.random.default_rng(0).integers(0, 100, 100_000)
    cut = partial(split, Partition(law=law), labels, 100, 500, STREAM)
    assert min(timeit.repeat(cut, timer=time.thread_time, number=1, repeat=3)) < 0.5
    tracemalloc.start()
    owner = cut()
    assert tracemalloc.get_traced_memory()[1] < 100 * 2**20
    tracemalloc.stop()
    assert np.bincount(owner, minlength=500).sum() == 100_000


def test_bernoulli_dirichlet_shares_each_class_among_its_holders_only():
    owner = split(Partition(p=0.5, alpha=100), CIFAR, 10, 20, STREAM)
    counts = np.zeros((20, 10), dtype=int)
    np.add.at(counts, (owner, CIFAR), 1)
    assert 0.35 < (counts > 0).mean() < 0.65  # 200 Bernoulli(.5): sigma .035
    assert counts.any(axis=0).all()
    assert counts.any(axis=1).all()
    held = counts[:, 0][counts[:, 0] > 0]
    assert held.max() < 1.6 * held.mean()  # Dir(100): nearly even


@pytest.mark.parametrize("law", DRAWN)
def test_a_clients_samples_are_spread_over_the_data_set_not_cut_out_in_order(law):
    positions = np.arange(50_000) % 5000  # within the class
    owner = split(Partition(law=law), CIFAR, 10, 5, STREAM)
    for m in range(5):
        mine = positions[owner == m]
        assert abs(mine.mean() - 2500) < 5 * 5000 / np.sqrt(12 * len(mine))


def test_a_smaller_alpha_makes_clients_less_alike():
    def spread(alpha):
        owner = split(Partition(law="dirichlet", alpha=alpha), CIFAR, 10, 20, STREAM)
        counts = np.zeros((20, 10))
        np.add.at(counts, (owner, CIFAR), 1)
        return counts.std(axis=0).mean()

    assert spread(0.1) > 2 * spread(1) > 4 * spread(100)


def test_a_client_without_a_class_is_redrawn_even_where_every_whole_psi_has_one():
    owner = split(Partition(p=0.2), CIFAR, 10, 500, STREAM)
    assert np.bincount(owner, minlength=500).min() >= 2


def test_p_that_leaves_a_class_without_a_client_is_an_error_with_numbers():
    with pytest.raises(
        ValueError, match=r"p=0\.0001 leaves class \d+ without a client .*clients=2.*classes=10.*raise p"
    ):
        split(Partition(p=1e-4), balanced(1000, 10), 10, 2, STREAM)


def test_more_clients_than_samples_is_an_error_with_numbers():
    for law in DRAWN:
        with pytest.raises(
            ValueError, match="60 clients of at least 2 samples need 120 samples, and the data set has 100"
        ):
            split(Partition(law=law), balanced(100, 10), 10, 60, STREAM)


def test_a_minimum_that_is_never_met_is_an_error_with_numbers():
    start = time.thread_time()
    with pytest.raises(ValueError, match=r"smallest client had at most \d+ samples, and min_size=480.*raise alpha"):
        split(Partition(law="dirichlet", alpha=0.1, min_size=480), CIFAR, 10, 100, STREAM)
    assert time.thread_time() - start < 10
    with pytest.raises(ValueError, match="shards=2 gives a client 2 samples, and min_size=3 are wanted: lower"):
        split(Partition(law="shards", min_size=3), balanced(150, 10), 10, 50, STREAM)  # a hundred pieces of 1 or 2


@pytest.mark.parametrize(
    "partition",
    [Partition(law="iid"), Partition(law="shards"), Partition(law="classes", per_client=1), Partition(law="quantity")],
    ids=lambda partition: partition.law,
)
def test_a_minimum_that_can_just_be_met_is_met(partition):
    owner = split(partition.model_copy(update={"alpha": 1e6}), balanced(4, 2), 2, 2, STREAM)
    assert np.bincount(owner).tolist() == [2, 2]


def test_the_advice_names_the_data_sets_classes_and_nothing_that_cannot_go_lower():
    """Sizes that are skewed alone are drawn as of one class, which is no fact of the data set."""
    with pytest.raises(ValueError, match=r"classes=10, samples=1000\): raise alpha, or lower clients$"):
        split(Partition(law="quantity", alpha=0.001, min_size=1), np.arange(1000) % 10, 10, 200, ("t",))


def test_a_partition_starts_no_further_try_after_five_seconds(monkeypatch):
    seconds = itertools.count(step=2)
    monkeypatch.setattr(partition, "time", SimpleNamespace(monotonic=lambda: next(seconds)))  # the third look says 6
    with pytest.raises(ValueError, match=r"^in 2 tries of the dirichlet partition .* raise alpha, or lower clients"):
        split(Partition(law="dirichlet", alpha=0.1, min_size=480), CIFAR, 10, 100, STREAM)


def holdings(spec: Partition, labels=CIFAR, classes=10, clients=20) -> np.ndarray:
    owner = split(spec, labels, classes, clients, STREAM)
    counts = np.zeros((clients, classes), dtype=int)
    np.add.at(counts, (owner, labels), 1)
    return counts


def test_shards_give_each_client_even_pieces_of_the_samples_sorted_by_class():
    counts = holdings(Partition(law="shards", shards=2))
    assert (counts.sum(axis=1) == 2500).all()  # 40 pieces of 1,250, four of each class
    assert set(np.unique(counts)) <= {0, 1250, 2500}
    assert ((counts > 0).sum(axis=1) <= 2).all()
    assert holdings(Partition(law="shards", shards=10)).astype(bool).sum() > 100  # 20 clients of up to ten classes


def test_classes_give_each_client_so_many_classes_and_share_each_evenly_among_its_holders():
    counts = holdings(Partition(law="classes", per_client=3))
    assert ((counts > 0).sum(axis=1) == 3).all()
    assert all(counts[m, m % 10] for m in range(20))
    for column in counts.T:
        held = column[column > 0]
        assert held.max() - held.min() <= 1
        assert held.sum() == 5000


def test_classes_reach_every_class_even_where_clients_are_fewer_than_classes():
    labels = balanced(4000, 100)
    counts = holdings(Partition(law="classes", per_client=25), labels, 100, 4)
    assert ((counts > 0).sum(axis=1) == 25).all()
    assert (counts > 0).any(axis=0).all()
    with pytest.raises(
        ValueError, match="4 clients of per_client=24 classes cannot share 100 classes: raise per_client"
    ):
        split(Partition(law="classes", per_client=24), labels, 100, 4, STREAM)
    with pytest.raises(ValueError, match="per_client is 10 at most"):
        split(Partition(law="classes", per_client=11), CIFAR, 10, 4, STREAM)


def test_quantity_skews_sizes_and_leaves_classes_alike():
    counts = holdings(Partition(law="quantity", alpha=1))
    sizes = counts.sum(axis=1)
    assert sizes.max() > 3 * np.median(sizes) or sizes.min() < np.median(sizes) / 3
    big = counts[sizes > 1000]
    assert np.abs(big / big.sum(axis=1, keepdims=True) - 0.1).max() < 0.05


def test_a_csv_split_is_taken_exactly_and_a_bad_line_is_named(tmp_path):
    path = tmp_path / "split.csv"
    spec = Partition(law="manifest", file=str(path))
    owners = np.random.default_rng(0).permutation(np.arange(100) % 7)
    lines = [f"{i},{owners[i]}" for i in np.random.default_rng(1).permutation(100)]
    path.write_text("index,client\n" + "\n".join(lines) + "\n")
    read = read_split(spec, 100, "x")
    assert read.tolist() == owners.tolist()
    spaced = tmp_path / "spaced.csv"
    spaced.write_text("index,client\n\n" + "\n\n".join(lines) + "\n\n")  # blank lines are no samples
    assert split_clients(Partition(law="manifest", file=str(spaced))) == 7
    quoted = tmp_path / "quoted.csv"  # as R and spreadsheets write it
    quoted.write_text('\ufeff"index","client"\r\n' + "\r\n".join(f'{i},"{owners[i]}"' for i in range(100)) + "\r\n")
    assert read_split(Partition(law="manifest", file=str(quoted)), 100, "x").tolist() == owners.tolist()
    assert split(spec, balanced(100, 10), 10, 7, STREAM, owners=read).tolist() == owners.tolist()
    with pytest.raises(ValueError, match="names 7 clients, and clients=5: set clients to 7"):
        split(spec, balanced(100, 10), 10, 5, STREAM, owners=read)
    with pytest.raises(ValueError, match=r"fewer than min_size=15 samples \(client \d, .*: 14\): .*--min-size 14"):
        split(spec.model_copy(update={"min_size": 15}), balanced(100, 10), 10, 7, STREAM, owners=read)
    for broken, message in (
        (["i,c", *lines], r"split\.csv:1: the first line must be 'index,client'"),
        (["index,client", "0,1", "x,1"], r"split\.csv:3: 'x,1' is not 'index,client'"),
        (["index,client", "100,1"], r"split\.csv:2: there is no sample 100: the data set has 0\.\.99"),
        (["index,client", "-1,1"], r"split\.csv:2: there is no sample -1"),
        (["index,client", "1,-1"], r"split\.csv:2: there is no client -1"),
        (["index,client", "1,1000000000000"], r"split\.csv:2: there is no client 1000000000000: .* without gaps"),
        (["index,client", f"1,{10**30}"], r"split\.csv:2: there is no client 1000"),
        (["index,client", "1,1", "", "1,2"], r"split\.csv:4: sample 1 is given twice: client 1, then 2"),
        (["index,client", *lines[1:]], "gives no client to 1 of 100 samples"),
    ):
        path.write_text("\n".join(broken))
        with pytest.raises(ValueError, match=message):
            read_split(spec, 100, "x")


def test_a_split_file_is_pinned_by_its_content(tmp_path):
    path = tmp_path / "split.csv"
    with pytest.raises(FileNotFoundError, match=r"there is no file .*split\.csv"):
        pinned(Partition(law="manifest", file=str(path)))
    path.write_text("index,client\n0,0\n1,0\n")
    spec = pinned(Partition(law="manifest", file=str(path)))
    assert pinned(spec) == spec
    path.write_text("index,client\n0,0\n1,1\n")
    with pytest.raises(ValueError, match="is another file now"):
        read_split(spec, 2, "x")
    slug = ScenarioSpec(dataset="d", noise=Noise(), noise_name="fedcova-sym", partition=spec).slug
    assert f"_manifest-{spec.file_sha256[:8]}_" in slug
    with pytest.raises(FileNotFoundError, match=f"wanted is the split whose SHA-256 is {spec.file_sha256}"):
        pinned(spec.model_copy(update={"file": str(tmp_path / "gone.csv")}))


def test_a_manifest_lends_its_split_to_other_noise_but_not_to_other_data(tmp_path):
    built, _ = scenario("fedcorr", partition=Partition(law="dirichlet"))
    save(tmp_path / "a.safetensors", *scenario("fedcorr", partition=Partition(law="dirichlet")))
    spec = pinned(Partition(law="manifest", file=str(tmp_path / "a.safetensors")))
    owners = read_split(spec, 50_000, "sha of the data")
    again, truth = scenario("coteaching-pair", partition=spec, sources=Sources(owners=owners))
    assert again.digests["partition"] == built.digests["partition"]
    assert check(again, truth, CIFAR, sources=Sources(owners=owners)) == []
    with pytest.raises(ValueError, match="divides other data"):
        read_split(spec, 50_000, "sha of other data")


def test_natural_clients_are_those_that_the_data_set_names():
    owners = balanced(100, 4)
    spec = Partition(law="natural")
    found = split(spec, balanced(100, 10), 10, 4, STREAM, owners=owners)
    assert found.tolist() == owners.tolist()
    assert not np.shares_memory(found, owners)  # which a scenario seals, and the data set's stay writable
    with pytest.raises(ValueError, match="the data set names no clients; take another partition"):
        split(spec, balanced(100, 10), 10, 4, STREAM)
    with pytest.raises(ValueError, match="divides 100 samples, and the data set has 90"):
        split(spec, balanced(90, 10), 10, 4, STREAM, owners=owners)


def test_labels_outside_the_classes_are_refused():
    with pytest.raises(ValueError, match="labels reach from 0 to 9; 5 classes"):
        split(Partition(), balanced(100, 10), 5, 4, STREAM)


@pytest.mark.parametrize("bad", [{"alpha": 0}, {"alpha": float("nan")}, {"p": 0}, {"p": 1.1}, {"min_size": 0}])
def test_partition_settings_out_of_range_are_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        Partition(**bad)


# ------------------------------------------------------------------------------------------------ noise


@pytest.mark.parametrize("include_true", [True, False])
@pytest.mark.parametrize("count", ["bernoulli", "exact"])
def test_the_realised_rate_follows_the_law(count, include_true):
    n, C = 20_000, 10
    noise = Noise(clients="all", rate="constant", tau=0.5, count=count, include_true=include_true)
    for draw in range(5):
        true = balanced(n, C)
        drawn = corrupt(noise, true, one_client(n), C, 1, ("test", draw))
        realised = (drawn.given != true).mean()
        r = 0.5 * (1 - 1 / C) if include_true else 0.5
        assert settled_facts(noise, true, one_client(n), drawn.nominal, C)[0] == pytest.approx([r])
        if count == "exact" and not include_true:
            assert realised == r
        else:
            assert 0 < abs(realised - r) < 4 * np.sqrt(r * (1 - r) / n)


@pytest.mark.parametrize("include_true", [True, False])
def test_symmetric_targets_cover_all_hundred_classes_evenly(include_true):
    n, C = 200_000, 100
    true = one_client(n)  # all of class 0
    noise = Noise(clients="all", rate="constant", tau=1, include_true=include_true)
    counts = np.bincount(corrupt(noise, true, one_client(n), C, 1, STREAM).given, minlength=C)
    each = n / (C if include_true else C - 1)
    assert np.abs(counts[1:] - each).max() < 5 * np.sqrt(each)
    assert abs(counts[0] - each) < 5 * np.sqrt(each) if include_true else counts[0] == 0


@pytest.mark.parametrize("step", [1, -1])
def test_pair_noise_moves_a_label_by_one_in_the_stated_direction_and_round_the_end(step):
    true = balanced(1000, 10)
    noise = Noise(clients="all", rate="constant", tau=1, target="pair", pair_step=step)
    assert np.array_equal(corrupt(noise, true, one_client(1000), 10, 1, STREAM).given, (true + step) % 10)


def test_the_semantic_map_is_the_usual_one_and_flips_nothing_twice():
    names = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
    moved = {names[c]: names[t] for c, t in enumerate(CLASS_MAPS["cifar10-semantic"]) if c != t}
    assert moved == {"truck": "automobile", "bird": "airplane", "deer": "horse", "cat": "dog", "dog": "cat"}
    true = balanced(1000, 10)
    noise = Noise(clients="all", rate="constant", tau=1, target="map", class_map="cifar10-semantic")
    drawn = corrupt(noise, true, one_client(1000), 10, 1, STREAM)
    assert set(drawn.given[true == 3]) == {5}  # an in-place loop would carry them on to 3
    assert set(drawn.given[true == 5]) == {3}
    assert (drawn.given != true).mean() == 0.5
    assert drawn.transition[3, 5] == drawn.transition[5, 3] == 1


def test_every_pair_of_the_cifar100_map_shares_a_superclass():
    targets = CLASS_MAPS["cifar100-superclass-next"]
    assert sorted(targets) == list(range(100))
    assert all(CIFAR100_COARSE[c] == CIFAR100_COARSE[t] and c != t for c, t in enumerate(targets))
    assert np.bincount(CIFAR100_COARSE).tolist() == [5] * 20
    assert targets[0] == 51  # apple, mushroom; then orange, pear, sweet_pepper and back
    assert targets[83] == 0


@pytest.mark.parametrize("preset", sorted(set(NOISE_PRESETS) - {"clean"}))
def test_the_labels_drawn_follow_the_nominal_transition_matrix(preset):
    noise, true, C, sources = world(preset, 60_000)
    owner = split(EASY, true, C, 20, STREAM)
    drawn = corrupt(noise, true, owner, C, 20, STREAM, sources)
    pairs = np.zeros((C, C))
    np.add.at(pairs, (true, drawn.given), 1)
    n = pairs.sum(axis=1, keepdims=True)
    assert drawn.transition.sum(axis=1) == pytest.approx(np.ones(C))
    sigma = np.sqrt(drawn.transition * (1 - drawn.transition) / n)
    assert (np.abs(pairs - n * drawn.transition) <= 5 * n * sigma + (4 if C == 100 else 1e-9)).all()
    assert (pairs[drawn.transition == 0] == 0).all()


def test_the_transition_matrix_has_zero_rows_for_absent_classes_and_no_nan():
    true = balanced(100, 3)
    drawn = corrupt(Noise(clients="all"), true, one_client(100), 5, 1, STREAM)
    assert drawn.transition.sum(axis=1) == pytest.approx([1, 1, 1, 0, 0])


@pytest.mark.parametrize("count", ["bernoulli", "exact"])
def test_wrong_labels_are_not_ordered_by_class_or_position(count):
    n = 20_000
    true = np.sort(balanced(n, 10))  # class-ordered, FedNed's trap
    noise = Noise(clients="all", rate="constant", tau=0.5, count=count, include_true=False)
    wrong = corrupt(noise, true, one_client(n), 10, 1, STREAM).given != true
    shares = wrong.reshape(10, -1).mean(axis=1)  # by class, and by tenth of the list
    assert np.abs(shares - 0.5).max() < 4 * np.sqrt(0.25 / 2000)


@quick
@given(
    tau=st.floats(0, 1),
    rate=st.sampled_from(["constant", "uniform", "bilevel", "above", "ramp"]),
    seed=st.integers(0, 9),
)
def test_rates_stay_within_the_bounds_of_their_law(tau, rate, seed):
    noise = Noise(clients="all", rate=rate, tau=tau, lo=0.2, hi=0.6)
    nominal = corrupt(noise, balanced(100, 10), balanced(100, 50), 10, 50, ("test", seed)).nominal
    low, high = interval(noise)
    assert 0 <= low <= nominal.min() <= nominal.max() <= high <= 1


@pytest.mark.parametrize("tau", [0.1, 0.3, 0.5, 0.7, 0.9])
def test_the_bilevel_law_has_mean_tau_and_the_widest_interval_round_it(tau):
    noise = Noise(clients="all", tau=tau)
    assert interval(noise) == pytest.approx((0, 2 * tau) if tau <= 0.5 else (2 * tau - 1, 1))
    nominal = corrupt(noise, balanced(4000, 10), balanced(4000, 2000), 10, 2000, STREAM).nominal
    low, high = interval(noise)
    assert nominal.mean() == pytest.approx(tau, abs=4 * (high - low) / np.sqrt(12 * 2000))
    assert nominal.min() < low + 0.01
    assert nominal.max() > high - 0.01


def test_the_ramp_is_linear_in_the_client_and_never_reaches_its_end():
    drawn = corrupt(NOISE_PRESETS["fnbench-ramp"][0], balanced(4000, 10), balanced(4000, 100), 10, 100, STREAM)
    assert drawn.nominal == pytest.approx(0.004 * np.arange(100))
    assert drawn.nominal.mean() == pytest.approx(0.198)


@quick
@given(clients=st.integers(1, 300), data=st.data())
def test_exact_noise_makes_int_rho_m_clients_noisy_whatever_binary_fractions_do(clients, data):
    k = data.draw(st.integers(0, clients))
    drawn = corrupt(Noise(rho=k / clients), balanced(clients, 10), np.arange(clients), 10, clients, STREAM)
    assert drawn.noisy.sum() == k


def test_29_percent_of_100_is_29_clients_and_29_samples():
    assert int(0.29 * 100) == 28
    true = balanced(100, 10)
    assert corrupt(Noise(rho=0.29), true, np.arange(100), 10, 100, STREAM).noisy.sum() == 29
    exact = Noise(clients="all", rate="constant", tau=0.29, count="exact", include_true=False)
    assert (corrupt(exact, true, one_client(100), 10, 1, STREAM).given != true).sum() == 29


@pytest.mark.parametrize("who", ["exact", "bernoulli"])
def test_clients_that_are_noisy_stay_noisy_at_a_higher_rho_with_the_same_labels(who):
    owner = split(EASY, CIFAR, 10, 20, STREAM)
    few, many = (corrupt(Noise(clients=who, rho=rho), CIFAR, owner, 10, 20, STREAM) for rho in (0.3, 0.7))
    assert (many.noisy >= few.noisy).all()
    assert many.noisy.sum() > few.noisy.sum() > 0
    kept = few.noisy[owner]
    assert np.array_equal(few.given[kept], many.given[kept])


@pytest.mark.parametrize("count", ["bernoulli", "exact"])
def test_samples_that_are_wrong_stay_wrong_in_the_same_way_at_a_higher_tau(count):
    owner = split(EASY, CIFAR, 10, 20, STREAM)
    low, high = (corrupt(Noise(tau=tau, count=count), CIFAR, owner, 10, 20, STREAM).given for tau in (0.3, 0.7))
    wrong = low != CIFAR
    assert wrong.any()
    assert np.array_equal(low[wrong], high[wrong])


def test_another_clients_data_shifts_nobody_elses_noise():
    owner = split(EASY, CIFAR, 10, 20, STREAM)
    before = corrupt(Noise(), CIFAR, owner, 10, 20, STREAM)
    mine = owner == np.flatnonzero(before.noisy)[0]
    other = np.flatnonzero(~mine)
    changed, moved = CIFAR.copy(), owner.copy()
    changed[other] = 0
    moved[other] = np.random.default_rng(0).integers(0, 20, len(other))
    moved = np.where(~mine & (moved == owner[mine][0]), (owner[mine][0] + 1) % 20, moved)
    after = corrupt(Noise(), changed, moved, 10, 20, STREAM)
    assert np.array_equal(before.noisy, after.noisy)
    assert np.array_equal(before.nominal, after.nominal)
    assert np.array_equal(before.given[mine], after.given[mine])


def test_clients_with_the_same_images_are_not_mislabelled_alike():
    true, owner = np.tile(balanced(1000, 10), 2), np.repeat([0, 1], 1000)
    noise = Noise(clients="all", rate="constant", tau=1, include_true=False)
    first, second = corrupt(noise, true, owner, 10, 2, STREAM).given.reshape(2, -1)
    assert (first == second).mean() == pytest.approx(1 / 9, abs=0.04)  # 4 sigma
    half = noise.model_copy(update={"tau": 0.5, "target": "pair"})
    first, second = (corrupt(half, true, owner, 10, 2, STREAM).given != true).reshape(2, -1)
    assert (first == second).mean() == pytest.approx(0.5, abs=0.065)


@pytest.mark.parametrize("preset", sorted(NOISE_PRESETS))
def test_a_field_that_the_law_does_not_read_changes_no_label(preset):
    noise, true, C, sources = world(preset)
    owner = split(EASY, true, C, 20, STREAM)

    def outcome(law):
        try:
            drawn = corrupt(law, true, owner, C, 20, STREAM, sources)
        except ValueError as error:  # a share of wrong labels that cannot be had
            if "mass" not in str(error):
                raise
            return None
        return drawn.given.tolist(), None if drawn.foreign is None else drawn.foreign.tolist()

    before = outcome(noise)
    assert before
    other = {"rho": 0.1, "tau": 0.2, "lo": 0.05, "hi": 0.95, "beta_a": 3.0, "beta_b": 2.0, "flip_spread": 0.3}
    other |= {"include_true": not noise.include_true, "pair_step": -noise.pair_step, "foreign": "x"}
    for field, value in other.items():
        if field == "foreign":  # names the images, not which of them: the digest of a scenario tells them apart
            continue
        assert (before == outcome(noise.model_copy(update={field: value}))) == (field not in reads(noise)), field


def test_a_clients_own_label_space_is_kept_to():
    true = balanced(4000, 10)
    owner = (true >= 4).astype(np.int64)  # client 0 holds classes 0..3, client 1 the others
    given_ = corrupt(NOISE_PRESETS["fednoisy-local"][0], true, owner, 10, 2, STREAM).given
    assert set(given_[owner == 0]) == {0, 1, 2, 3}
    assert set(given_[owner == 1]) == {4, 5, 6, 7, 8, 9}
    pair = noise_from("fednoisy-local", target="pair", rate="constant", tau=1)
    given_ = corrupt(pair, true, owner, 10, 2, STREAM).given
    assert set(given_[true == 3]) == {0}
    assert set(given_[true == 9]) == {4}


def test_a_noisy_client_of_one_class_without_a_wrong_label_is_an_error_that_names_it():
    true = np.array([0, 1, 2, 0, 5, 5])
    with pytest.raises(ValueError, match=r"client 1 has one class \(5\).*label_space='global'"):
        corrupt(NOISE_PRESETS["fednoisy-local"][0], true, np.array([0, 0, 0, 0, 1, 1]), 10, 2, STREAM)


def test_every_row_of_a_target_law_sums_to_one():
    own = np.array([1, 4, 7])
    for noise in (
        Noise(label_space="client"),
        Noise(label_space="client", include_true=False),
        Noise(label_space="client", target="pair", pair_step=-1),
    ):
        law = target_law(noise, own, 10)
        assert law.sum(axis=1) == pytest.approx(np.ones(10))
    assert law[1, 7] == law[4, 1] == law[7, 4] == law[0, 0] == 1


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"rho": 1.2}, "rho"),
        ({"tau": -0.1}, "tau"),
        ({"tau": float("nan")}, "tau"),
        ({"lo": 0.8}, r"lo=0\.8 is above hi=0\.7"),
        ({"target": "map", "class_map": "cifar10-semantics"}, "Did you mean cifar10-semantic"),
        ({"target": "map"}, "needs class_map"),
        ({"target": "map", "class_map": "cifar10-semantic", "label_space": "client"}, "outside a client's own classes"),
        ({"pair_step": 2}, "pair_step"),
        ({"ids": (1, 2)}, "go together"),
        ({"clients": "ids"}, "go together"),
        ({"clients": "ids", "ids": (1, 1)}, "different"),
        ({"rhoo": 0.5}, "rhoo"),
    ],
)
def test_noise_settings_that_mean_nothing_are_refused(bad, message):
    with pytest.raises(ValueError, match=message):
        Noise(**bad)


def test_noise_that_does_not_fit_the_federation_is_refused():
    true = balanced(100, 10)
    with pytest.raises(ValueError, match=r"no client 4, they are 0\.\.3"):
        corrupt(Noise(clients="ids", ids=(0, 4)), true, balanced(100, 4), 10, 4, STREAM)
    with pytest.raises(ValueError, match="is for 100 classes, and the data set has 10"):
        corrupt(
            Noise(clients="all", target="map", class_map="cifar100-superclass-next"),
            true,
            one_client(100),
            10,
            1,
            STREAM,
        )
    assert corrupt(Noise(clients="ids", ids="0,3"), true, balanced(100, 4), 10, 4, STREAM).noisy.tolist() == [
        1,
        0,
        0,
        1,
    ]


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("symmetric", "fedcova-sym or "), ("pairflip", "coteaching-pair or fnbench-pair"),
        ("pair-flip", "coteaching-pair"), ("human", "cifar10n-"), ("openset", "open-set"),
        ("none", "clean"), ("fednoro", "fednoro-random"),
        ("fedcova-symm", "fedcova-sym or "),
    ],
)  # fmt: skip
def test_another_papers_word_for_a_noise_leads_to_its_preset(word, meant):
    with pytest.raises(ValueError, match=f"Did you mean {meant}"):
        noise_from(word)


def test_a_preset_takes_changes_and_refuses_those_that_it_would_not_read():
    assert noise_from("fedcova-sym", rho=0.4, tau=0.3) == Noise(rho=0.4, tau=0.3)
    with pytest.raises(ValueError, match="Did you mean fedcova-sym"):
        noise_from("fedcova-symm")
    with pytest.raises(ValueError, match="Did you mean include_true"):
        noise_from("fedcova-sym", include_ture=False)
    with pytest.raises(ValueError, match=r"rho=0\.4 would change nothing in 'fednoisy-global'"):
        noise_from("fednoisy-global", rho=0.4)
    with pytest.raises(ValueError, match="less than or equal to 1"):
        noise_from("fedcova-sym", tau=1.5)


@pytest.mark.parametrize(
    ("preset", "changes"),
    [
        ("fedcova-sym-bernoulli", {"rho": 0.3, "include_true": False, "label_space": "client"}),
        ("fedcova-asym", {"pair_step": -1, "label_space": "client"}),
        ("fednoro-random", {"lo": 0.1, "hi": 0.2, "count": "exact"}),
        ("fnbench-ramp", {"lo": 0.1, "hi": 0.2}),
        ("fedned-beta", {"beta_a": 0.5, "beta_b": 2.0}),
        ("fedned-beta-legacy", {"beta_a": 0.5, "beta_b": 2.0}),
        ("mnist-asym", {"tau": 0.2, "class_map": "cifar10-semantic"}),
        ("instance", {"flip_spread": 0.2, "label_space": "client"}),
        ("cifar10n-worse-twin", {"labelled_by": "aggre_label", "tau": 0.5}),
    ],
)
def test_whatever_a_law_reads_can_be_said_of_its_preset(preset, changes):
    assert noise_from(preset, **changes) == NOISE_PRESETS[preset][0].model_copy(update=changes)


def test_every_preset_says_where_it_comes_from_in_one_line():
    assert all(source and "\n" not in source for _, source in NOISE_PRESETS.values())


def test_fedcova_sym_at_its_hardest_cell_realises_the_published_share_of_wrong_labels():
    # 12 of 20 clients of mean rate .7, a tenth of the flips on the true class: .6 * .7 * .9 = 37.8 %.  500 draws
    # have 37.8 +- 4.1; true class excluded 42.0, U[1 - 2 tau, 1] as printed about 19, Bernoulli clients +- 8.
    def realised(preset, draw):
        built, truth = scenario(preset, draw=draw, partition=Partition())
        return (built.given != truth.true).mean()

    exact = [realised("fedcova-sym", draw) for draw in range(150)]
    assert np.mean(exact) == pytest.approx(0.376, abs=0.013)
    assert 0.032 < np.std(exact) < 0.048
    bernoulli = [realised("fedcova-sym-bernoulli", draw) for draw in range(150)]
    assert np.mean(bernoulli) == pytest.approx(0.38, abs=0.022)
    assert 0.066 < np.std(bernoulli) < 0.096


# --------------------------------------------------------------------------------------------- scenarios


def test_noise_levels_of_one_draw_share_the_partition_and_another_draw_does_not():
    a, _ = scenario(changes={"rho": 0.4, "tau": 0.3})
    b, _ = scenario(changes={"rho": 0.6, "tau": 0.7})
    c, _ = scenario(draw=1)
    assert a.digests["partition"] == b.digests["partition"] != c.digests["partition"]
    assert a.digests["labels"] != b.digests["labels"]


def test_a_hold_out_shifts_neither_partition_nor_noise_and_is_kept_out_of_training():
    whole, _ = scenario()
    held, _ = scenario(holdout=0.1)
    assert whole.digests == held.digests
    assert not whole.held_out.any()
    trained = np.concatenate([held.positions(m) for m in range(20)])
    assert np.array_equal(np.sort(np.concatenate([trained, held.held_out_positions()])), np.arange(50_000))
    for m in range(20):
        n = (held.owner == m).sum()
        assert held.held_out[held.owner == m].sum() == n // 10
        assert (np.diff(held.positions(m)) > 0).all()
        assert (held.owner[held.positions(m)] == m).all()
    for client in (20, -1):
        with pytest.raises(ValueError, match=rf"no client {client}: they are 0\.\.19"):
            held.positions(client)


def test_a_scenario_leads_to_no_true_label_and_does_not_change_with_the_truth():
    labels = np.random.default_rng(0).permutation(CIFAR)
    built, truth = scenario(labels=labels)
    seen = [built.owner.copy(), built.given.copy(), built.held_out.copy()]

    def reachable(thing):
        yield thing
        parts = (
            vars(thing).values() if hasattr(thing, "__dict__") else thing.values() if isinstance(thing, dict) else ()
        )
        for part in [*parts, getattr(thing, "base", None)]:
            if part is not None:
                yield from reachable(part)

    arrays = [thing for thing in reachable(built) if isinstance(thing, np.ndarray)]
    assert len(arrays) == 3
    assert not any(isinstance(thing, Truth) for thing in reachable(built))
    assert not any(np.shares_memory(a, b) for a in arrays for b in (truth.true, labels))
    assert not any(np.array_equal(a, labels) for a in arrays)
    labels[:] = labels[::-1].copy()
    truth = dataclasses.replace(truth, true=np.random.default_rng(1).permutation(truth.true))
    for before, now in zip(seen, (built.owner, built.given, built.held_out), strict=True):
        assert np.array_equal(before, now)
        with pytest.raises(ValueError, match="read-only"):
            now[0] = 1


def test_what_a_method_may_be_told_is_the_nominal_rate_by_size_and_the_number_of_noisy_clients():
    built, truth = scenario()
    sizes = np.bincount(built.owner)
    assert built.told["noise_rate"] == pytest.approx((sizes * truth.nominal).sum() / sizes.sum())
    assert built.told["noisy_clients"] == 12
    assert built.told["noise_rate"] == mean_rate(truth.nominal, built.owner)


def test_a_data_set_whose_labels_may_be_wrong_gets_no_truth_and_no_further_noise():
    spec = ScenarioSpec(dataset="clothing1m", noise=noise_from("clean"), noise_name="clean")
    built, truth = build(spec, CIFAR, 10, "x", labels_are_true=False)
    assert truth.true is None
    assert dict(built.told) == {}
    assert summary(built, truth)["realised_rate"] is None
    assert check(built, truth, CIFAR) == []
    with pytest.raises(ValueError, match="leave --noise out"):
        build(
            spec.model_copy(update={"noise": Noise(), "noise_name": "fedcova-sym"}),
            CIFAR,
            10,
            "x",
            labels_are_true=False,
        )


def test_the_summary_agrees_with_the_labels():
    built, truth = scenario("fedcorr", holdout=0.2)
    facts = summary(built, truth)
    assert facts["realised_rate"] == (built.given != truth.true).mean()
    assert np.sum([row["counts"] for row in facts["clients"]], axis=0).tolist() == [5000] * 10
    for row in facts["clients"]:
        mine = built.owner == row["client"]
        assert row["size"] == mine.sum() == sum(row["counts"])
        assert row["classes"] == len(np.unique(truth.true[mine]))
        assert row["held_out"] == built.held_out[mine].sum()
        assert row["realised"] == pytest.approx((built.given != truth.true)[mine].mean())
        assert row["expected"] == pytest.approx(0.9 * row["nominal"])
        assert row["noisy"] == (row["nominal"] > 0)
    sizes, rates = zip(*((row["size"], row["nominal"]) for row in facts["clients"]), strict=True)
    assert facts["nominal_rate"] == pytest.approx(np.average(rates, weights=sizes))  # over all samples, as the others
    assert 1 - np.mean(np.diag(facts["transition"]["realised"])) == pytest.approx(facts["realised_rate"])
    assert 1 - np.mean(np.diag(facts["transition"]["nominal"])) == pytest.approx(facts["expected_rate"])


@pytest.mark.parametrize("preset", sorted(NOISE_PRESETS))
def test_every_preset_passes_its_own_check(preset):
    law, true, C, sources = world(preset)
    for draw in range(3):
        spec = ScenarioSpec(dataset="d", noise=law, noise_name=preset, partition=EASY, draw=draw)
        built, truth = build(spec, true, C, "sha of the data", sources=sources)
        assert check(built, truth, true, sources=sources) == []
        again = summary(built, truth)
        assert again["realised_rate"] == pytest.approx(again["expected_rate"], abs=0.02)


def edited(built, position, label):
    given_ = built.given.copy()
    given_[position] = label
    return dataclasses.replace(built, given=given_, digests={**built.digests, "labels": manifest.digest(given_)})


def test_check_finds_one_hand_edited_label():
    built, truth = scenario()
    at = int(built.positions(int(np.flatnonzero(~truth.noisy)[0]))[3])
    problems = check(edited(built, at, (CIFAR[at] + 1) % 10), truth, CIFAR)
    assert any(f"1 of 50000, first at {at}" in problem for problem in problems)
    assert any("is clean, and" in problem for problem in problems)


def test_check_finds_foreign_data_a_lost_sample_and_rates_off_the_law():
    built, truth = scenario()
    assert "true labels differ" in check(built, truth, CIFAR[::-1])[0]
    assert "50000 entries" in check(built, truth, CIFAR[:-1])[0]
    owner = built.owner.copy()
    owner[5] = -1
    assert "owner -1 of sample 5" in check(dataclasses.replace(built, owner=owner), truth, CIFAR)[0]
    assert "partition digest" in check(dataclasses.replace(built, owner=(built.owner + 1) % 20), truth, CIFAR)[0]
    assert "given label 10 of sample 5" in check(edited(built, 5, 10), truth, CIFAR)[0]
    half = dataclasses.replace(truth, nominal=truth.nominal / 2)
    assert sum(bool(re.match(r"client \d+: .* and the law gives", found)) for found in check(built, half, CIFAR)) == 12
    assert any("class 0 was labelled" in found for found in check(built, half, CIFAR))
    wrong_told = dataclasses.replace(built, told={"noise_rate": 0.1, "noisy_clients": 12.0})
    assert "told" in check(wrong_told, truth, CIFAR)[0]


def test_diff_says_in_words_what_differs():
    a, b = scenario(), scenario(changes={"tau": 0.5}, holdout=0.1)
    assert diff(a, a) == []
    text = "\n".join(diff(a, b))
    assert "noise.tau: 0.7 and 0.5" in text
    assert "holdout: 0.0 and 0.1" in text
    assert re.search(r"\d+ of 50000 samples have another given label", text)
    assert "another owner" not in text
    assert "12 clients have another nominal rate" in text
    assert "noisy clients" in "\n".join(diff(a, scenario(draw=1)))
    assert "samples: 50000 and 10000" in "\n".join(diff(a, scenario(labels=CIFAR[::5])))
    assert "clients: 20 and 10" in "\n".join(diff(a, scenario(clients=10)))


def test_the_slug_is_readable():
    spec = ScenarioSpec(dataset="cifar10", noise=Noise(), noise_name="fedcova-sym")
    assert spec.slug == "fedcova-sym-rho0.6-tau0.7_bernoulli-dirichlet-p0.5-alpha5_m20"
    assert spec.model_copy(update={"draw": 3, "dataset": "svhn"}).slug == spec.slug
    clean = ScenarioSpec(
        dataset="digits", noise=noise_from("clean"), noise_name="clean", partition=Partition(law="iid"), clients=10
    )
    assert clean.slug == "clean_iid_m10"


def test_specifications_that_differ_share_no_slug():
    noises = [(name, law) for name, (law, _) in NOISE_PRESETS.items()]
    for field, value in {
        "clients": "all", "rho": 0.1 + 0.2, "rate": "constant", "tau": 0.3, "lo": 0.1, "hi": 0.9, "beta_a": 1,
        "beta_b": 2, "count": "exact", "target": "pair", "include_true": False, "pair_step": -1,
        "class_map": "cifar10-semantic", "label_space": "client", "mass": 0.3, "flip_spread": 0.0, "foreign": "x",
        "matrix": ((1.0, 0.0), (0.0, 1.0)), "labelled_by": "x",
    }.items():  # fmt: skip
        noises.append(("fedcova-sym", Noise(**{field: value})))
    noises += [("fedcova-sym", Noise(rho=0.3)), ("mine", Noise()), ("mine", Noise(pair_step=-1))]
    noises += [("fedcova-sym", Noise(clients="ids", ids=ids)) for ids in ((1,), (2,), (1, 2))]
    partitions = [
        Partition(), Partition(p=0.4), Partition(alpha=0.5), Partition(min_size=10), Partition(law="iid"),
        Partition(law="iid", alpha=1), Partition(law="dirichlet"), Partition(law="dirichlet", p=0.4),
        Partition(law="shards"), Partition(law="shards", shards=3), Partition(law="classes", per_client=3),
        Partition(law="iid", shards=3), Partition(law="quantity"), Partition(law="natural"),
        *(Partition(law="manifest", file="split.csv", file_sha256=digit * 64) for digit in "ab"),
    ]  # fmt: skip
    slugs = [
        ScenarioSpec(dataset="d", noise=noise, noise_name=name, partition=cut, clients=clients, holdout=holdout).slug
        for name, noise in noises
        for cut in partitions
        for clients in (20, 2)
        for holdout in (0, 0.1)
    ]
    assert len(set(slugs)) == len(slugs) > 1000
    assert all(re.fullmatch(r"[a-z0-9._-]{1,150}", slug) for slug in slugs)


@pytest.mark.parametrize(
    "bad", [{"noise_name": "a/b"}, {"clients": 0}, {"draw": -1}, {"holdout": 1.0}, {"dataset": ""}]
)
def test_scenario_settings_out_of_range_are_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        ScenarioSpec(**{"dataset": "d", "noise": Noise(), "noise_name": "fedcova-sym", **bad})


# ---------------------------------------------------------------------------------------------- the file


@pytest.fixture
def small():
    return scenario("fedcorr", labels=balanced(600, 10), clients=4, holdout=0.1)


def test_a_manifest_comes_back_as_it_was_and_is_written_to_the_same_bytes(tmp_path, small):
    save(tmp_path / "deep" / "a.safetensors", *small)
    back = load(tmp_path / "deep" / "a.safetensors")
    assert diff(small, back) == []
    assert back[0].spec == small[0].spec
    assert back[0].told == small[0].told
    assert back[0].digests == small[0].digests
    assert back[0].classes == 10
    assert np.array_equal(back[1].true, small[1].true)
    assert np.array_equal(back[1].nominal, small[1].nominal)
    assert check(*back, balanced(600, 10)) == []
    assert summary(*back) == summary(*small)
    for values in (back[0].owner, back[0].given, back[0].held_out, back[1].true):
        assert not values.flags.writeable
    save(tmp_path / "b.safetensors", *back)
    assert (tmp_path / "b.safetensors").read_bytes() == (tmp_path / "deep" / "a.safetensors").read_bytes()


def test_a_manifest_without_truth_comes_back_without(tmp_path):
    spec = ScenarioSpec(dataset="clothing1m", noise=noise_from("clean"), noise_name="clean", clients=4)
    made = build(spec, balanced(600, 10), 10, "x", labels_are_true=False)
    save(tmp_path / "a", *made)
    back = load(tmp_path / "a")
    assert back[1].true is None
    assert diff(made, back) == []


def test_a_truncated_manifest_is_refused_by_name(tmp_path, small):
    path = tmp_path / "a.safetensors"
    save(path, *small)
    data = path.read_bytes()
    for length in [0, 1, 7, 8, 9, 100, len(data) // 2, len(data) - 1]:
        path.write_bytes(data[:length])
        with pytest.raises(ValueError, match=r"a\.safetensors is truncated or no manifest"):
            load(path)
    with pytest.raises(FileNotFoundError, match=r"no manifest at .*scenario build"):
        load(tmp_path / "b")


def test_a_manifest_with_one_altered_byte_is_refused_wherever_it_is(tmp_path, small):
    path = tmp_path / "a.safetensors"
    save(path, *small)
    data = path.read_bytes()
    for at in range(0, len(data), 41):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(ValueError, match=r"a\.safetensors"):
            load(path)
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(ValueError, match=r"a\.safetensors: the array '\w+' was altered"):
        load(path)
    path.write_bytes(data.replace(b'\\"tau\\":0.5', b'\\"tau\\":0.4'))
    with pytest.raises(ValueError, match=r"a\.safetensors: the header was altered"):
        load(path)


def test_a_manifest_of_another_schema_or_another_kind_is_refused(tmp_path, small, monkeypatch):
    monkeypatch.setattr(manifest, "SCHEMA", 2)
    save(tmp_path / "a", *small)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="schema 2, and this version reads 1: update flnoisebench"):
        load(tmp_path / "a")
    (tmp_path / "b").write_bytes(manifest.safetensors_save({"x": np.zeros(3)}))
    with pytest.raises(ValueError, match="is a safetensors file, but no manifest"):
        load(tmp_path / "b")


def test_a_label_edited_before_saving_is_refused_on_loading(tmp_path, small):
    given_ = small[0].given.copy()
    given_[0] = (given_[0] + 1) % 10
    save(tmp_path / "a", dataclasses.replace(small[0], given=given_), small[1])
    with pytest.raises(ValueError, match="the labels digest belongs to other labels"):
        load(tmp_path / "a")


def test_an_interrupted_save_leaves_the_old_manifest_and_no_rubbish(tmp_path, small, monkeypatch):
    path = tmp_path / "a"
    save(path, *small)
    before = path.read_bytes()

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(manifest.os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        save(path, *scenario(labels=balanced(600, 10), clients=4))
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["a"]


def test_a_manifest_may_be_read_by_whoever_may_read_other_files(tmp_path, small):
    kept = os.umask(0o022)
    try:
        save(tmp_path / "a", *small)
    finally:
        os.umask(kept)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o644
