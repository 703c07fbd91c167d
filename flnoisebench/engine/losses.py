"""What a loss may be, and how it is called: the rules that make a step recordable."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Set
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeGuard

import torch

from flnoisebench.engine.flat import FlatNetwork
from flnoisebench.trees import Tree


def refuse_closure(loss: Callable[..., Any]) -> None:
    """Raise ValueError unless ``loss`` is a plain module-level function or static method.

    What a closure captures is frozen into a recorded step, silently; so what varies must enter through Batch.
    """
    if isinstance(loss, types.MethodType):
        raise ValueError(
            f"the loss {loss.__qualname__} is bound to {type(loss.__self__).__name__}; make it a static method or a "
            "module-level function and pass what it needs as given=, sample= or frozen="
        )
    if not isinstance(loss, types.FunctionType):
        raise ValueError(
            f"the loss must be a plain function, not {type(loss).__name__} (no partial, no callable object); pass what "
            "it needs as given=, sample= or frozen="
        )
    if loss.__closure__:
        captured = ", ".join(loss.__code__.co_freevars)
        raise ValueError(
            f"the loss {loss.__qualname__} is a closure over {captured}; its value would be frozen into the recorded "
            f"step. Pass it to fit as given={{...}} (or sample=, draw=, frozen=) and read it from the batch"
        )


def is_plain(function: Callable[..., Any]) -> TypeGuard[types.FunctionType]:
    """Whether a function captures nothing, so that it is the same in every call."""
    return isinstance(function, types.FunctionType) and not function.__closure__


def identity(function: Callable[..., Any]) -> Any:
    """What tells a function from others, as part of a key: of a plain one without defaults what it is made of, since a
    lambda inside a turn is a new object in each."""
    if is_plain(function) and not (function.__defaults__ or function.__kwdefaults__):
        return function.__code__, id(function.__globals__)
    return function


def has_batchnorm(network: torch.nn.Module) -> bool:
    return any(isinstance(module, torch.nn.modules.batchnorm._BatchNorm) for module in network.modules())


def autocast(device: torch.device, precision: str) -> AbstractContextManager[Any]:
    """bf16 where the protocol says so.  The cast cache is off: a recorded step must not depend on it."""
    if precision != "bf16":
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16, cache_enabled=False)


def as_tensors(tree: Tree, device: torch.device, what: str, live: Set[int] = frozenset()) -> Tree:
    """The tree on the device, its numbers as fp64 / int64 / bool scalars, so that none is frozen into a step.

    It stays what it is at the call: without gradient, and copied where it lies in one of the storages ``live``, which
    the call writes into.  An anchor made of the network's own parameters would else move along and pull nowhere.
    """
    if isinstance(tree, dict):
        return {key: as_tensors(value, device, f"{what}/{key}", live) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(as_tensors(value, device, f"{what}/{i}", live) for i, value in enumerate(tree))
    if isinstance(tree, torch.Tensor):
        held = tree.detach() if tree.requires_grad else tree
        return (held.clone() if held.untyped_storage().data_ptr() in live else held).to(device)
    if isinstance(tree, bool):
        return torch.tensor(tree, device=device)
    if isinstance(tree, int):
        return torch.tensor(tree, dtype=torch.int64, device=device)
    if isinstance(tree, float):
        return torch.tensor(tree, dtype=torch.float64, device=device)
    if tree is None:
        return None
    hint = "; a network goes into frozen={name: network}" if isinstance(tree, torch.nn.Module) else ""
    raise ValueError(f"{what}: a step takes tensors and numbers, not {type(tree).__name__}{hint}")


def check_frozen(frozen: Mapping[str, torch.nn.Module]) -> None:
    for name, network in frozen.items():
        if network.training or any(parameter.requires_grad for parameter in network.parameters()):
            raise ValueError(
                f"frozen network {name!r} is trainable: make it with model(weights, name, frozen=True); of a network "
                "that was trained in this call, with model(weights(network), another name, frozen=True)"
            )
        refuse_hooks(network)


def refuse_training(function: Callable[..., Any]) -> None:
    """Raise ValueError where a function that only looks has a network in training mode in its closure: a BatchNorm in
    it would learn from what is looked at, and say of an image what its batch, which differs with the device, makes it.
    """
    if not isinstance(function, types.FunctionType):
        return
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            network = cell.cell_contents
        except ValueError:  # a name without a value yet
            continue
        if isinstance(network, torch.nn.Module) and network.training:
            raise ValueError(
                f"apply: {function.__qualname__} looks through {name}, a network that trains: pass frozen={{name: "
                "network}} with model(weights, name, frozen=True); of a network that was trained in this call, with "
                "model(weights(network), another name, frozen=True)"
            )


def refuse_hooks(network: torch.nn.Module) -> None:
    """Raise ValueError where a method put a hook on a network that ``model`` made, or on one of its parameters."""
    flat = getattr(network, "_flat", None)
    if isinstance(flat, FlatNetwork) and flat.hooks() != flat.own_hooks:
        raise ValueError(
            f"the {type(network).__name__} has a hook, which would act in the next clients' turns too, since they get "
            "the same network, and which no recorded step calls. What a step does with features or gradients is said "
            "in the loss: see «gradient» in flnoisebench/api.py"
        )


def unpack(result: Any, loss: Callable[..., Any]) -> tuple[torch.Tensor, Tree, dict[str, torch.Tensor]]:
    """(scalar, carry, rows) of what a loss returned; raises ValueError when it is something else."""
    value, carry, rows = (*result, None, {})[:3] if isinstance(result, tuple) else (result, None, {})
    if not isinstance(value, torch.Tensor) or value.dim() != 0:
        shape = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise ValueError(f"the loss {loss.__qualname__} must return a scalar tensor first, not {shape}")
    return value, carry, rows or {}
