"""Trees: the only values that states, messages and uploads may be.

A tree is a tensor, bool, int, float, str or None, or a dict (with str keys), list or tuple of trees.  It can
be counted (``nbytes``), compared (``digest``) and written without pickling (``to_bytes``: safetensors, with
the skeleton as JSON in its header).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as safetensors_load
from safetensors.torch import save as safetensors_save

Tree = Any  # tensor | bool | int | float | str | None | dict[str, Tree] | list[Tree] | tuple[Tree, ...]
NUMBER_BYTES = 8  # a number travels as one 64-bit word


class TreeError(TypeError):
    """Something that is no tree; the message says where in it."""


def leaves(tree: Tree, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf with its path (``weights/fc.bias``), dict keys in sorted order.

    Sorted, so that two equal dicts filled in another order have one digest.
    """
    if isinstance(tree, dict):
        for key in sorted(tree):
            yield from leaves(tree[key], f"{path}/{key}" if path else str(key))
    elif isinstance(tree, list | tuple):
        for i, item in enumerate(tree):
            yield from leaves(item, f"{path}/{i}" if path else str(i))
    else:
        yield path, tree


def check(tree: Tree, what: str) -> None:
    """Raise TreeError, naming the place, unless ``tree`` is one."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            if not isinstance(key, str):
                raise TreeError(f"{what}: dict keys must be str, not {type(key).__name__} {key!r}")
            check(value, f"{what}/{key}")
    elif isinstance(tree, list | tuple):
        for i, value in enumerate(tree):
            check(value, f"{what}/{i}")
    elif isinstance(tree, torch.Tensor):
        if type(tree) not in (torch.Tensor, torch.nn.Parameter):
            raise TreeError(f"{what}: a plain tensor is wanted, not {type(tree).__name__}")
        if tree.requires_grad:
            raise TreeError(f"{what}: the tensor still carries a gradient; detach it (weights(network) does)")
    elif not (tree is None or isinstance(tree, bool | int | float | str)):
        raise TreeError(
            f"{what}: {type(tree).__name__} is no tree "
            "(tensor, bool, int, float, str, None, or a dict, list or tuple of those)"
        )


def map_tensors(function: Callable[[torch.Tensor], Any], tree: Tree) -> Tree:
    """The same tree with ``function`` applied to each tensor."""
    if isinstance(tree, dict):
        return {key: map_tensors(function, value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [map_tensors(function, value) for value in tree]
    if isinstance(tree, tuple):
        return tuple(map_tensors(function, value) for value in tree)
    return function(tree) if isinstance(tree, torch.Tensor) else tree


def to(tree: Tree, device: torch.device | str) -> Tree:
    """The same tree with its tensors on ``device``."""
    return map_tensors(lambda tensor: tensor.to(device), tree)


def nbytes(tree: Tree) -> int:
    """The payload in bytes: elements times item size, 8 a number or flag, UTF-8 length of a string.

    Keys and shapes are known to both sides beforehand and cost nothing, nor does None.
    """
    total = 0
    for _, leaf in leaves(tree):
        if isinstance(leaf, torch.Tensor):
            total += leaf.numel() * leaf.element_size()
        elif isinstance(leaf, str):
            total += len(leaf.encode())
        elif leaf is not None:
            total += NUMBER_BYTES
    return total


def first_non_finite(tree: Tree) -> str | None:
    """The path of the first NaN or infinity, or None.  One device transfer in all."""
    paths, flags = [], []
    for path, leaf in leaves(tree):
        if isinstance(leaf, float) and not math.isfinite(leaf):
            return path
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.numel():
            paths.append(path)
            flags.append(leaf.isfinite().all())
    if not flags:
        return None
    bad = (~torch.stack(flags)).cpu().tolist()
    return next((path for path, is_bad in zip(paths, bad, strict=True) if is_bad), None)


# A digest must be cheap beside training: hashing 20 uploads of a ResNet-18 with SHA-256 costs more than the
# round (0.9 GB).  So a tensor is first reduced where it lies to two 64-bit sums, in integer arithmetic
# modulo 2^64 (order-free, so the same on every device), and only those go through SHA-256.
_MIX_A, _MIX_B = -0x61C8864680B583EB, -0x3B314601E57A13AD  # odd 64-bit constants (golden ratio, xxHash)


def _mixed(words: torch.Tensor) -> torch.Tensor:
    """int64 words -> the same number of well-spread int64 words, each bound to its position."""
    position = torch.arange(1, words.numel() + 1, dtype=torch.int64, device=words.device)
    mixed = (words ^ (position * _MIX_A)) * _MIX_B
    mixed = (mixed ^ (mixed >> 29)) * _MIX_A
    return mixed ^ (mixed >> 32)


def _fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """Two int64 sums over the tensor's bits; tensors that differ agree with a chance of about 2^-64."""
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.dtype == torch.bool:
        flat = flat.to(torch.uint8)
    width = flat.element_size()
    words = flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[width]).to(torch.int64)
    mixed = _mixed(words)
    return torch.stack([mixed.sum(), (mixed ^ (mixed << 13)).sum()])


def digest(tree: Tree) -> str:
    """64 hex digits that change when any bit, shape, type or name in the tree does.

    Against accidents, not adversaries.  Floats compare by their bits, so -0.0 and 0.0 differ.
    """
    found = list(leaves(tree))
    tensors = [leaf for _, leaf in found if isinstance(leaf, torch.Tensor)]
    by_device: dict[torch.device, list[int]] = {}
    for i, tensor in enumerate(tensors):
        by_device.setdefault(tensor.device, []).append(i)
    prints: dict[int, list[int]] = {}
    for where in by_device.values():  # one transfer a device
        rows = torch.stack([_fingerprint(tensors[i]) for i in where]).cpu().tolist()
        prints.update(zip(where, rows, strict=True))
    description: list[Any] = [_skeleton(tree)]
    count = 0
    for path, leaf in found:
        if isinstance(leaf, torch.Tensor):
            description.append([path, str(leaf.dtype), list(leaf.shape), prints[count]])
            count += 1
        else:
            description.append([path, type(leaf).__name__, leaf.hex() if isinstance(leaf, float) else leaf])
    return hashlib.sha256(json.dumps(description).encode()).hexdigest()


def _skeleton(tree: Tree) -> Any:
    """The containers alone: an empty dict, a list and a tuple must not look alike."""
    if isinstance(tree, dict):
        return {key: _skeleton(tree[key]) for key in sorted(tree)}
    if isinstance(tree, list | tuple):
        return [type(tree).__name__, *map(_skeleton, tree)]
    return None


def writes(tree: Tree) -> int:
    """How often the tree's tensors have been written in place; it grows when somebody writes into one."""
    return sum(leaf._version for _, leaf in leaves(tree) if isinstance(leaf, torch.Tensor))


def to_bytes(tree: Tree) -> bytes:
    """The tree as one safetensors file; equal trees, filled in the same order, give equal bytes."""
    check(tree, "tree")
    tensors: dict[str, torch.Tensor] = {}

    def encode(node: Tree) -> Any:
        if isinstance(node, dict):
            # in the order of insertion: a method that sums over a dict must meet the same order after a resume
            return {"dict": [[key, encode(value)] for key, value in node.items()]}
        if isinstance(node, list | tuple):
            return {type(node).__name__: [encode(item) for item in node]}
        if isinstance(node, torch.Tensor):
            name = f"{len(tensors):06d}"
            # clone: safetensors refuses tensors that share storage, such as two views of one parameter
            tensors[name] = node.detach().cpu().contiguous().clone()
            return {"tensor": name}
        return node

    skeleton = json.dumps(encode(tree), separators=(",", ":"))
    return safetensors_save(tensors, metadata={"tree": skeleton})


def from_bytes(data: bytes) -> Tree:
    """The tree that ``to_bytes`` wrote.  Raises ValueError on anything else; runs nothing from the file."""
    try:
        tensors = safetensors_load(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        skeleton = json.loads(header["__metadata__"]["tree"])
    except (SafetensorError, KeyError, ValueError) as error:
        raise ValueError(f"not a tree file, or a damaged one: {error}") from error

    def decode(node: Any) -> Tree:
        if not isinstance(node, dict):
            return node
        ((kind, value),) = node.items()
        if kind == "dict":
            return {key: decode(item) for key, item in value}
        if kind == "tensor":
            return tensors[value]
        items = [decode(item) for item in value]
        return tuple(items) if kind == "tuple" else items

    return decode(skeleton)
