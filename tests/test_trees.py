"""Trees: what is one, what it weighs, when two are the same, and that they come back from bytes as they were."""

import json
import math
from collections import OrderedDict

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save as safetensors_save

from flnoisebench import trees
from flnoisebench.trees import TreeError, check, digest, first_non_finite, from_bytes, leaves, nbytes, to_bytes, writes

quick = settings(max_examples=80, deadline=None, database=None, suppress_health_check=list(HealthCheck))
DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool,
]  # fmt: skip


@st.composite
def tensors(draw):
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    values = draw(st.lists(st.integers(0, 100), min_size=math.prod(shape), max_size=math.prod(shape)))
    return torch.tensor(values).reshape(shape).to(draw(st.sampled_from(DTYPES)))


scalars = st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | st.text(max_size=5)
some_trees = st.recursive(
    scalars | tensors(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)


def same(a, b):
    """Equality to the last bit, type and order."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, float):
        return a.hex() == b.hex()
    return a == b


@quick
@given(some_trees)
def test_a_tree_comes_back_from_bytes_as_it_was_in_its_order_and_with_its_digest(tree):
    back = from_bytes(to_bytes(tree))
    assert same(back, tree)
    assert digest(back) == digest(tree)
    assert to_bytes(back) == to_bytes(tree)
    assert nbytes(back) == nbytes(tree)


@quick
@given(some_trees, some_trees)
def test_two_trees_have_one_digest_only_if_they_are_the_same(a, b):
    def in_order(tree):
        if isinstance(tree, dict):
            return {key: in_order(tree[key]) for key in sorted(tree)}
        return type(tree)(map(in_order, tree)) if isinstance(tree, list | tuple) else tree

    assert (digest(a) == digest(b)) == same(in_order(a), in_order(b))


def test_a_digest_changes_with_any_bit_shape_type_name_or_container():
    base = torch.arange(6, dtype=torch.float32)
    variants = [
        {"a": base},
        {"b": base},
        {"a": base.reshape(2, 3)},
        {"a": base.double()},
        {"a": base.int()},
        {"a": base.flip(0)},
        {"a": [base]},
        {"a": (base,)},
        {"a": torch.cat([base, torch.zeros(1)])},
        {"a": 1},
        {"a": 1.0},
        {"a": True},
        {"a": "1"},
        {"a": None},
        {"a": {}},
        {"a": []},
        {"a": ()},
        {"a": torch.tensor(0.0)},
        {"a": torch.tensor(-0.0)},
        {"a": torch.zeros(0)},
        {"a": torch.zeros(0, 1)},
    ]
    for bit in range(32):
        flipped = base.clone()
        flipped.view(torch.int32)[3] ^= -(2**31) if bit == 31 else 1 << bit
        variants.append({"a": flipped})
    assert len({digest(tree) for tree in variants}) == len(variants)


def test_a_digest_sees_every_single_bit_and_every_swap_of_neighbours_on_a_ramp():
    for dtype in (torch.uint8, torch.int16, torch.bool, torch.bfloat16, torch.int64, torch.float64):
        base = torch.zeros(300, dtype=dtype)
        seen = {digest(base)}
        for place in range(300):
            one = base.clone()
            one[place] = 1
            seen.add(digest(one))
        assert len(seen) == 301
    words = torch.randn(100, generator=torch.Generator().manual_seed(0)).view(torch.int32)
    for bit in range(32):
        for place in range(0, 100, 9):
            other = words.clone()
            other[place] ^= 1 << bit if bit < 31 else -(1 << 31)
            assert digest(other.view(torch.float32)) != digest(words.view(torch.float32)), (bit, place)
    odd = words.view(torch.float32).clone()
    odd[3:10] *= -1  # seven signs; of an even number some are missed, as the docstring says
    assert digest(odd) != digest(words.view(torch.float32))
    ramp = torch.arange(200, dtype=torch.float32)
    swapped = set()
    for place in range(199):
        other = ramp.clone()
        other[place], other[place + 1] = ramp[place + 1], ramp[place]
        swapped.add(digest(other))
    assert len(swapped | {digest(ramp)}) == 200


def test_a_digest_does_not_depend_on_order_of_filling_nor_on_memory_layout():
    a = torch.arange(24, dtype=torch.float32).reshape(2, 3, 2, 2)
    assert digest({"x": 1, "y": a}) == digest({"y": a.clone(), "x": 1})
    assert digest(a.contiguous(memory_format=torch.channels_last)) == digest(a)
    assert digest(a.transpose(0, 1)) == digest(a.transpose(0, 1).contiguous())


def test_a_digest_does_not_depend_on_what_its_tensors_are_views_of():
    a, b = torch.arange(6.0), torch.arange(10.0, 16.0)
    shared = {"a": a[:3], "b": b[:3], "c": a[1:4], "d": a[1:4]}  # overlapping, and filling neither vector
    apart = {name: leaf.clone() for name, leaf in shared.items()}
    assert trees.digest(shared) == trees.digest(apart) == trees.digest(from_bytes(to_bytes(shared)))


@pytest.mark.parametrize(
    "views",
    [
        lambda vector: (vector[:3], vector[:3]),  # as large as the vector, and half of it
        lambda vector: (vector[:3], vector[3:], vector[3:]),
        lambda vector: (vector[:1].expand(6),),
        lambda vector: (vector[::2], vector[1::2]),
        lambda vector: vector.split([2, 4]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.bool])
@pytest.mark.parametrize("start", [0, 5])
def test_views_have_the_digest_that_they_have_after_a_resume(views, dtype, start):
    vector = (torch.arange(-3, 8) * 37 % 11)[start : start + 6].clone().to(dtype)
    longer = torch.cat([torch.zeros(start, dtype=dtype), vector])
    tree = list(views(longer[start:].detach()))  # of a vector that begins in the middle of its memory
    assert digest(tree) == digest([leaf.clone() for leaf in tree]) == digest(from_bytes(to_bytes(tree)))


def test_the_order_of_a_dict_survives_since_a_method_may_sum_over_it():
    assert list(from_bytes(to_bytes({"b": 1, "a": 2, "10": 3, "9": 4}))) == ["b", "a", "10", "9"]


def test_payload_is_elements_times_item_size_8_a_number_and_utf8_of_a_string():
    tree = {
        "w": torch.zeros(3, 4),  # 48
        "n": torch.zeros(5, dtype=torch.int64),  # 40
        "m": torch.zeros(7, dtype=torch.bool),  # 7
        "h": torch.zeros(2, dtype=torch.bfloat16),  # 4
        "e": torch.zeros(0),  # 0
        "numbers": [1, 2.5, True],  # 24
        "word": "añ→",  # 1 + 2 + 3
        "nothing": None,
        "empty": {},
    }
    assert nbytes(tree) == 48 + 40 + 7 + 4 + 24 + 6


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({1: 2}, r"dict keys must be str, not int 1"),
        ({"a": [0, {1, 2}]}, r"thing/a/1: set is no tree"),
        ({"a": torch.nn.Parameter(torch.zeros(1))}, r"thing/a: the tensor still carries a gradient"),
        ((torch.zeros(1, requires_grad=True) * 2,), r"thing/0: .*gradient"),
        ({"a": np.zeros(2)}, r"thing/a: ndarray is no tree"),
        ({"f": print}, r"thing/f: builtin_function_or_method is no tree"),
        (np.float32(1), r"thing: float32 is no tree"),
        (np.True_, r"thing: numpy\.bool\w* is no tree"),
        ({"mean": np.float64(1)}, r"thing/mean: float64 is no plain float, .* after a resume: .* float\(\.\.\.\)"),
        ({"name": np.str_("a")}, r"thing/name: str_ is no plain str"),
        ([torch.zeros(2, 3).shape], r"thing/0: Size is no plain tuple, .* with tuple\(\.\.\.\)"),
        ({"a": [torch.ones(2) * 1j]}, r"thing/a/0: a dense tensor of real numbers is wanted, not a complex one"),
        ({"a": torch.eye(2).to_sparse()}, r"thing/a: a dense tensor of real numbers is wanted, not a sparse one"),
        ({"split": torch.ones(2).max(0)}, r"thing/split: max is no plain tuple"),  # a named one
    ],
    ids=range(14),
)
def test_what_is_no_tree_is_refused_and_its_place_named(tree, message):
    with pytest.raises(TreeError, match=message):
        check(tree, "thing")


def test_whatever_is_a_tree_comes_back_with_its_digest_a_state_dict_too():
    found = torch.nn.Linear(2, 1).state_dict()  # an OrderedDict
    tree = {"w": OrderedDict((name, value.clone()) for name, value in found.items()), "n": [1, 2.5, (True, "a")]}
    check(tree, "thing")
    assert digest(from_bytes(to_bytes(tree))) == digest(tree)


def test_the_first_value_that_is_not_finite_is_found_by_its_path():
    good = {"a": torch.ones(2), "n": torch.tensor(5), "s": "inf", "none": None, "empty": torch.zeros(0)}
    assert first_non_finite(good) is None
    for tree, path in (
        ({**good, "b": [torch.ones(1), torch.tensor([1.0, math.inf])]}, "b/1"),
        ({**good, "b": {"c": math.nan}}, "b/c"),  # a number alone, beside tensors that are well
        (torch.tensor(math.nan), ""),
    ):
        assert first_non_finite(tree) == path
        assert trees.non_finite([good, tree]) == [None, path]


def test_writing_in_place_is_noticed():
    tree = {"a": torch.zeros(2), "b": [torch.zeros(2)]}
    before = writes(tree)
    _ = tree["a"] + 1
    assert writes(tree) == before
    tree["b"][0].add_(1)
    assert writes(tree) > before


def test_a_tensor_lies_in_memory_as_it_did_and_without_gaps_where_it_had_some():
    values = torch.rand(64, 50, generator=torch.Generator().manual_seed(0))
    images = torch.rand(4, 3, 5, 6).contiguous(memory_format=torch.channels_last)
    tree = {"turned": values.t(), "images": images, "plain": values, "cube": torch.rand(2, 3, 4).permute(2, 0, 1)}
    back = from_bytes(to_bytes(tree))
    for name, tensor in tree.items():
        assert torch.equal(back[name], tensor)
        assert back[name].stride() == tensor.stride(), name
    assert back["turned"].sum() == values.t().sum()
    assert trees.on(tree, values.device) is tree
    gaps = {"part": values[:, :33], "spread": torch.ones(1).expand(4), **tree}
    packed = trees.on(gaps, values.device)
    assert [packed[name].stride() for name in ("part", "spread")] == [(33, 1), (1,)]
    assert all(packed[name] is tensor for name, tensor in tree.items())
    assert same(from_bytes(to_bytes(packed)), gaps)


def test_tensors_that_share_memory_are_written_apart():
    base = torch.arange(6.0)
    back = from_bytes(to_bytes({"all": base, "part": base[2:4], "same": base}))
    back["all"][2] = 99
    assert back["part"].tolist() == [2.0, 3.0]
    assert back["same"].tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("before", [0, 3])
def test_moving_a_tree_moves_the_vector_behind_its_leaves_and_the_leaves_stay_its_views(before):
    vector = torch.arange(before + 12.0)[before:].data  # which need not begin where its memory does
    tree = {"a": vector[:6].view(2, 3), "b": [vector[6:].as_strided((3, 2), (1, 3)), "text", torch.ones(2)], "c": None}
    moved = trees.to(tree, "meta")  # a device without numbers: shapes and views are what is asked about
    first, second, loose = moved["a"], moved["b"][0], moved["b"][2]
    assert first._base is second._base
    assert first._base.shape == (12,)
    assert loose._base is None
    assert {leaf.device.type for leaf in (first, second, loose)} == {"meta"}
    assert [(x.shape, x.stride(), x.storage_offset()) for x in (first, second)] == [
        ((2, 3), (3, 1), 0),
        ((3, 2), (1, 3), 6),
    ]
    assert moved["b"][1] == "text"
    assert moved["c"] is None
    halves = trees.to({"a": vector[:6].view(2, 3)}, "meta")  # the rest of the vector is nobody's: it stays behind
    assert halves["a"]._base is None
    assert trees.to(tree, "cpu")["a"] is tree["a"]


def test_a_state_dict_is_a_tree_and_map_tensors_keeps_containers():
    network = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    check(dict(network.state_dict()), "state")
    assert trees.map_tensors(lambda t: t + 1, {"a": [torch.zeros(1), (1, torch.ones(1))]}) == {
        "a": [torch.ones(1), (1, torch.full((1,), 2.0))]
    }
    assert [path for path, _ in leaves({"b": 1, "a": [2, {"c": 3}]})] == ["a/0", "a/1/c", "b"]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"not a tree",
        b"\x80\x04K\x01.",  # a pickle
        to_bytes({"a": torch.ones(3)})[:-1],
        to_bytes({"a": torch.ones(3)})[:20],
        safetensors_save({"x": torch.ones(1)}),
        safetensors_save({"x": torch.ones(1)}, metadata={"tree": "{"}),
        safetensors_save({}, metadata={"tree": json.dumps({"tensor": "000000"})}),
        safetensors_save({}, metadata={"tree": json.dumps({"dict": [["a", 1]], "list": []})}),
        safetensors_save({}, metadata={"tree": json.dumps({"import": "os"})}),
        safetensors_save({}, metadata={"tree": json.dumps({"dict": [["a"]]})}),
    ],
    ids=range(11),
)
def test_bytes_that_are_no_tree_are_a_value_error_whatever_they_are(data):
    with pytest.raises(ValueError, match="not a tree file, or a damaged one"):
        from_bytes(data)


def test_a_tree_is_moved_only_where_a_tensor_of_it_is_elsewhere():
    here, meta = {"w": torch.ones(2), "n": 1}, torch.device("meta")
    assert trees.on(here, torch.device("cpu")) is here
    mixed = trees.on({"a": [torch.ones(2), torch.ones(3, device=meta)], "n": 1}, meta)
    assert [leaf.device for leaf in mixed["a"]] == [meta, meta]
    assert mixed["n"] == 1
