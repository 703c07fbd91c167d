"""Trees: the only values that states, messages and uploads may be.

A tree is a tensor, bool, int, float, str or None, or a dict (with str keys), list or tuple of trees.  It can
be counted (``nbytes``), compared (``digest``) and written without pickling (``to_bytes``: safetensors, with
the skeleton as JSON in its header).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as safetensors_load
from safetensors.torch import save as safetensors_save

Tree = Any  # tensor | bool | int | float | str | None | dict[str, Tree] | list[Tree] | tuple[Tree, ...]
NUMBER_BYTES = 8  # a number travels as one 64-bit word


class TreeError(TypeError):
    """Something that is no tree; the message says where in it."""


_PLAIN = (bool, int, float, str)
_SEQUENCES = (list, tuple)  # isinstance takes a tuple faster than a union, and trees are walked for every client


def leaves(tree: Tree) -> list[tuple[str, Any]]:
    """Every leaf with its path (``weights/fc.bias``), dict keys in sorted order.

    Sorted, so that two equal dicts filled in another order have one digest.
    """
    found: list[tuple[str, Any]] = []
    _collect(tree, "", found)
    return found


def _collect(tree: Tree, path: str, found: list[tuple[str, Any]]) -> None:
    if isinstance(tree, dict):
        for key in sorted(tree):
            _collect(tree[key], f"{path}/{key}" if path else str(key), found)
    elif isinstance(tree, _SEQUENCES):
        for i, item in enumerate(tree):
            _collect(item, f"{path}/{i}" if path else str(i), found)
    else:
        found.append((path, tree))


def values(tree: Tree) -> list[Any]:
    """Every leaf without its path, dict keys as they were filled: half the time of ``leaves``, where neither counts."""
    found: list[Any] = []
    _gather(tree, found)
    return found


def _gather(tree: Tree, found: list[Any]) -> None:
    if isinstance(tree, dict):
        for value in tree.values():
            _gather(value, found)
    elif isinstance(tree, _SEQUENCES):
        for item in tree:
            _gather(item, found)
    else:
        found.append(tree)


def check(tree: Tree, what: str) -> None:
    """Raise TreeError, naming the place, unless ``tree`` is one.

    Subclasses are refused, but for a dict's (``state_dict`` makes one), which has the digest of the plain dict that it
    comes back as.  numpy's float64 comes back with another, and a named tuple not at all.
    """
    if isinstance(tree, dict):
        for key, value in tree.items():
            if not isinstance(key, str):
                raise TreeError(f"{what}: dict keys must be str, not {type(key).__name__} {key!r}")
            check(value, f"{what}/{key}")
    elif type(tree) in _SEQUENCES:
        for i, value in enumerate(tree):
            check(value, f"{what}/{i}")
    elif isinstance(tree, torch.Tensor):
        if type(tree) not in (torch.Tensor, torch.nn.Parameter):
            raise TreeError(f"{what}: a plain tensor is wanted, not {type(tree).__name__}")
        if tree.layout != torch.strided or tree.is_complex():  # written, averaged and looked through for NaN by none
            kind = "complex" if tree.is_complex() else "sparse"
            raise TreeError(f"{what}: a dense tensor of real numbers is wanted, not a {kind} one")
        if tree.requires_grad:
            raise TreeError(f"{what}: the tensor still carries a gradient; detach it (weights(network) does)")
    elif tree is not None and type(tree) not in _PLAIN:
        kind = type(tree).__name__
        for plain in (*_SEQUENCES, *_PLAIN):
            if isinstance(tree, plain):
                raise TreeError(
                    f"{what}: {kind} is no plain {plain.__name__}, which it would be after a resume: make it one with "
                    f"{plain.__name__}(...)"
                )
        raise TreeError(
            f"{what}: {'numpy.' if kind == 'bool' else ''}{kind} is no tree "
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
    """The same tree with its tensors on ``device``; leaves that are views of one vector travel as that vector."""
    device = torch.device(device)
    bases = {id(base): base for _, base in _pieces(leaves(tree))[0] if base.device != device}
    moved = {key: base.to(device) for key, base in bases.items()}

    def move(tensor: torch.Tensor) -> torch.Tensor:
        base = moved.get(id(tensor._base))
        return tensor.to(device) if base is None else lying_in(base, tensor)

    return map_tensors(move, tree)


def lying_in(vector: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
    """The part of a new vector that ``view`` is of its own: where it lies there, and in its shape."""
    assert view._base is not None
    return vector.as_strided(view.shape, view.stride(), view.storage_offset() - view._base.storage_offset())


def on(tree: Tree, device: torch.device) -> Tree:
    """The tree itself where its tensors are on ``device`` and without gaps, as they come back from bytes; else a copy
    that is so.  The order of a sum, and so its last bits, depends on how a tensor lies."""
    tensors = [leaf for leaf in values(tree) if isinstance(leaf, torch.Tensor)]
    if any(leaf.device != device for leaf in tensors):
        tree = to(tree, device)
    if all(map(_is_dense, tensors)):
        return tree
    return map_tensors(lambda leaf: leaf if _is_dense(leaf) else leaf.contiguous(), tree)


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() or bool(_dense_order(tensor))


def _dense_order(tensor: torch.Tensor) -> list[int] | None:
    """The order of dimensions in which the tensor lies in memory without gaps; None where it has some."""
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: -strides[dim])
    return order if tensor.permute(order).is_contiguous() else None


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


def vectors(tree: Tree) -> tuple[Any, list[torch.Tensor]] | None:
    """(layout, the 1-D tensors behind it) when every leaf of a tree is a view and the views fill those tensors.

    Trees of one layout can be averaged, compared or copied a vector at a time: three kernels where a ResNet-18 has
    122 tensors.  None for every other tree.
    """
    pieces, loose = _pieces(leaves(tree))
    if loose or not pieces:
        return None
    return tuple(layout for layout, _ in pieces), [base for _, base in pieces]


def _word_count(tensor: torch.Tensor) -> int:
    """How many 32-bit words a digest sees of it: small types one an element, 8-byte types two."""
    return tensor.numel() * max(1, tensor.element_size() // 4)


def _pieces(of: list[tuple[str, Any]]) -> tuple[list[tuple[Any, torch.Tensor]], list[tuple[int, Any]]]:
    """(the 1-D tensors that some of a tree's leaves are views of and fill, each with its layout; the other leaves).

    Each leaf comes with the number of words in the tree before it.  A layout is (words before, path, offset, shape,
    stride) of each of its leaves.
    """
    found: dict[int, tuple[torch.Tensor, list[Any], list[tuple[int, Any]]]] = {}
    loose: list[tuple[int, Any]] = []
    start = 0
    for path, leaf in of:
        if not isinstance(leaf, torch.Tensor):
            loose.append((start, leaf))
            continue
        base = leaf._base
        if base is None or base.dim() != 1 or base.dtype != leaf.dtype or not base.is_contiguous():
            loose.append((start, leaf))
        else:
            _, layout, members = found.setdefault(id(base), (base, [], []))
            layout.append((start, path, leaf.storage_offset() - base.storage_offset(), leaf.shape, leaf.stride()))
            members.append((start, leaf))
        start += _word_count(leaf)
    pieces = []
    for base, layout, members in found.values():
        if _filled(layout, base.numel()) and all(_is_dense(leaf) for _, leaf in members):
            pieces.append((tuple(layout), base))
        else:
            loose += members
    return pieces, loose


def _filled(layout: list[Any], size: int) -> bool:
    """Whether views lie side by side in a vector, from its start to its end: two of one half have its size too."""
    end = 0
    for offset, count in sorted((offset, shape.numel()) for _, _, offset, shape, _ in layout):
        if offset != end:
            return False
        end += count
    return end == size


def non_finite(several: Sequence[Tree]) -> list[str | None]:
    """Of each tree the path of its first NaN or infinity, or None.  One device transfer for all where all is well."""
    sums = []
    for tree in several:
        pieces, loose = _pieces(leaves(tree))
        tensors = [base for _, base in pieces] + [leaf for _, leaf in loose if isinstance(leaf, torch.Tensor)]
        # one NaN or infinity makes the sum one; the other way round it need not be, so then each number is looked at
        sums += [tensor.sum(dtype=torch.float64) for tensor in tensors if tensor.is_floating_point()]
        sums += [torch.tensor(leaf, dtype=torch.float64) for _, leaf in loose if isinstance(leaf, float)]
    for device in {one.device for one in sums}:
        if not bool(torch.stack([one for one in sums if one.device == device]).isfinite().all()):
            return [first_non_finite(tree) for tree in several]
    return [None] * len(several)


def first_non_finite(tree: Tree) -> str | None:
    """The path of the tree's first NaN or infinity, or None."""
    for path, leaf in leaves(tree):
        if isinstance(leaf, float) and not math.isfinite(leaf):
            return path
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and not bool(leaf.isfinite().all()):
            return path
    return None


# A digest must be cheap beside training: hashing 20 uploads of a ResNet-18 with SHA-256 costs more than the
# round (0.9 GB).  So a tree's tensors are first reduced where they lie to two sums of their 32-bit words times keys, in
# integer arithmetic (exact and order-free, so the same on every device), and only those go through SHA-256.  Keys are
# odd and well spread, one for each place in the tree, so no single word can change unseen, and words that change places
# are seen as other changes of several are: see ``digest``.
_KEYS: dict[torch.device, torch.Tensor] = {}  # int32 [2, the longest seen so far], made once a device
_LAID: OrderedDict[Any, torch.Tensor] = OrderedDict()  # int32 [2, words]: keys in the order of a layout's vector
_MOST_LAID = 16


def _keys(start: int, count: int, device: torch.device) -> torch.Tensor:
    """int32 [2, count]: the keys of the words from ``start`` on, counted through the whole tree."""
    known = _KEYS.get(device)
    if known is None or known.shape[1] < start + count:
        length = 1 << max(16, (start + count - 1).bit_length())
        position = torch.arange(length, dtype=torch.int64, device=device)
        lanes = []
        for lane in (0x1E3779B97F4A7C15, 0x1B873593CC9E2D51):  # splitmix64 (Steele et al., 2014) without its last steps
            mixed = (position + 1) * lane
            mixed = (mixed ^ (mixed >> 30)) * -0x40A7B892E31B1A47
            mixed = (mixed ^ (mixed >> 27)) * -0x6B2FB644ECCEEE15
            lanes.append(((mixed >> 31) | 1).to(torch.int32))
        known = _KEYS[device] = torch.stack(lanes)
    return known[:, start : start + count]


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bits as int32: 1- and 2-byte types by value, 4- and 8-byte types as they lie."""
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.element_size() < 4:
        flat = flat.view(torch.uint8 if flat.element_size() == 1 else torch.int16).to(torch.int32)
    return flat.view(torch.int32)


def _laid_keys(layout: Any, base: torch.Tensor) -> torch.Tensor:
    """int32 [2, words]: the keys of the words of a layout's leaves, in the order in which they lie in its vector."""
    key = layout, base.numel(), base.dtype, base.device
    if key not in _LAID:
        word = torch.int32 if base.element_size() == 4 else torch.int64
        laid = torch.zeros((2, base.numel()), dtype=word, device=base.device)
        for start, _, offset, shape, stride in layout:
            keys = _keys(start, shape.numel() * base.element_size() // 4, base.device).contiguous()
            for lane in range(2):
                there = laid.as_strided(shape, stride, lane * base.numel() + offset)
                there.copy_(keys[lane].view(word).view(shape))
        _LAID[key] = laid.view(torch.int32)
        while len(_LAID) > _MOST_LAID:
            _LAID.popitem(last=False)
    _LAID.move_to_end(key)
    return _LAID[key]


def _fingerprint(of: list[tuple[str, Any]]) -> torch.Tensor | None:
    """int64 [2] of a tree's leaves, on the device of one of its tensors; None when it has none."""
    pieces, loose = _pieces(of)
    sums = []
    for layout, base in pieces:
        if base.element_size() >= 4:
            sums.append((_laid_keys(layout, base) * _words(base)).sum(1, dtype=torch.int64))
        else:
            first = base.storage_offset()
            loose += [
                (start, base.as_strided(shape, stride, first + offset)) for start, _, offset, shape, stride in layout
            ]
    by_device: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
    for start, leaf in loose:
        if isinstance(leaf, torch.Tensor):
            by_device.setdefault(leaf.device, []).append((start, _words(leaf)))
    for device, parts in by_device.items():
        parts.sort(key=lambda part: part[0])  # views that do not fill their vector come last
        words = torch.cat([part for _, part in parts])
        if not pieces and len(by_device) == 1:  # nothing but loose tensors: their words follow each other
            keys = _keys(0, words.numel(), device)
        else:
            keys = torch.cat([_keys(start, part.numel(), device) for start, part in parts], dim=1)
        sums.append((keys * words).sum(1, dtype=torch.int64))
    if len(sums) < 2:
        return sums[0] if sums else None
    return torch.stack([one.to(sums[0].device) for one in sums]).sum(0)


def digest(tree: Tree) -> str:
    """64 hex digits that change when any single word, shape, type or name in the tree does, and when several words do
    but for a chance: 2^-60 where they differ in their low bits, as results of another arithmetic do.

    Where they differ in their highest bits alone the chance is larger, for a product with a key keeps the zeros below:
    of two floats that change nothing but their signs, one pair in four stays unseen (of an odd number, none).  Against
    accidents, not adversaries.  Floats compare by their bits, so -0.0 and 0.0 differ.
    """
    return digests([tree])[0]


def digests(several: Sequence[Tree]) -> list[str]:
    """The digest of each, with one device transfer for all."""
    each = [leaves(tree) for tree in several]
    prints = [_fingerprint(of) for of in each]
    found = [one for one in prints if one is not None]
    numbers = iter(torch.stack([one.to(found[0].device) for one in found]).cpu().tolist()) if found else iter(())
    result = []
    for tree, of, one in zip(several, each, prints, strict=True):
        description: list[Any] = [_skeleton(tree), None if one is None else next(numbers)]
        for path, leaf in of:
            if isinstance(leaf, torch.Tensor):
                description.append([path, str(leaf.dtype), list(leaf.shape)])
            else:
                description.append([path, type(leaf).__name__, leaf.hex() if isinstance(leaf, float) else leaf])
        result.append(hashlib.sha256(json.dumps(description).encode()).hexdigest())
    return result


def _skeleton(tree: Tree) -> Any:
    """The containers alone: an empty dict, a list and a tuple must not look alike."""
    if isinstance(tree, dict):
        return {key: _skeleton(tree[key]) for key in sorted(tree)}
    if isinstance(tree, _SEQUENCES):
        return [type(tree).__name__, *map(_skeleton, tree)]
    return None


def writes(tree: Tree) -> int:
    """How often the tree's tensors have been written in place; it grows when somebody writes into one."""
    return sum(leaf._version for leaf in values(tree) if isinstance(leaf, torch.Tensor))


def to_bytes(tree: Tree) -> bytes:
    """The tree as one safetensors file; equal trees, filled in the same order and laid out alike, give equal bytes."""
    check(tree, "tree")
    tensors: dict[str, torch.Tensor] = {}

    def encode(node: Tree) -> Any:
        if isinstance(node, dict):
            # in the order of insertion: a method that sums over a dict must meet the same order after a resume
            return {"dict": [[key, encode(value)] for key, value in node.items()]}
        if isinstance(node, _SEQUENCES):
            return {type(node).__name__: [encode(item) for item in node]}
        if isinstance(node, torch.Tensor):
            name = f"{len(tensors):06d}"
            order = None if node.is_contiguous() else _dense_order(node)
            # clone: safetensors refuses tensors that share storage, such as two views of one parameter
            tensors[name] = (node if order is None else node.permute(order)).detach().cpu().contiguous().clone()
            return {"tensor": name} if order is None else {"permuted": [name, order]}
        return node

    skeleton = json.dumps(encode(tree), separators=(",", ":"))
    return safetensors_save(tensors, metadata={"tree": skeleton})


def from_bytes(data: bytes) -> Tree:
    """The tree that ``to_bytes`` wrote.  Raises ValueError on anything else; runs nothing from the file."""

    def decode(node: Any) -> Tree:
        if not isinstance(node, dict):
            return node
        ((kind, value),) = node.items()
        if kind == "dict":
            return {key: decode(item) for key, item in value}
        if kind == "tensor":
            return tensors[value]
        if kind == "permuted":
            name, order = value
            return tensors[name].permute(sorted(range(len(order)), key=order.__getitem__))
        return {"list": list, "tuple": tuple}[kind](decode(item) for item in value)

    try:
        tensors = safetensors_load(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        return decode(json.loads(header["__metadata__"]["tree"]))
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"not a tree file, or a damaged one: {error}") from error
