"""A network whose parameters, gradients and buffers lie in a few flat vectors.

Loading the round's model, resetting the momentum, one optimiser step, and copying the result out are then a few
large kernels each, where a ResNet-18 has 122 tensors.  The module keeps working as it is: its tensors become views
into the vectors and are only ever copied into, never rebound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flnoisebench.trees import Tree, vectors


@dataclass(frozen=True)
class _Slot:
    """Where a tensor of the state dict lies: which vector, from where, and how it is laid out there."""

    vector: str
    start: int
    shape: torch.Size
    stride: tuple[int, ...]

    def of(self, vector: torch.Tensor) -> torch.Tensor:
        return vector.as_strided(self.shape, self.stride, self.start)


class FlatNetwork:
    """Flattens ``network`` in place.  vectors: by "parameter" or "buffer" and dtype, 1-D, on the network's device."""

    def __init__(self, network: torch.nn.Module) -> None:
        self.network = network
        # walking a ResNet-18's modules costs a quarter of a millisecond each time; they never change
        self.modules = list(network.modules())
        self._parameters = list(network.parameters())
        self.vectors: dict[str, torch.Tensor] = {}
        self._slots: dict[str, _Slot] = {}
        kinds = {id(parameter) for parameter in network.parameters()}
        placed: dict[int, _Slot] = {}  # tied tensors share a slot
        sizes: dict[str, int] = {}
        tensors = network.state_dict(keep_vars=True)
        for name, tensor in tensors.items():
            if id(tensor) not in placed:
                vector = f"{'parameter' if id(tensor) in kinds else 'buffer'} {tensor.dtype}".replace("torch.", "")
                start = sizes.get(vector, 0)
                # dense in its own order of dimensions: channels_last filters stay channels_last
                stride = tensor.stride() if _is_dense(tensor) else torch.empty(tensor.shape).stride()
                placed[id(tensor)] = _Slot(vector, start, tensor.shape, stride)
                sizes[vector] = start + tensor.numel()
            self._slots[name] = placed[id(tensor)]
        device = next((tensor.device for tensor in tensors.values()), torch.device("cpu"))
        for vector, size in sizes.items():
            dtype = getattr(torch, vector.split()[1])
            self.vectors[vector] = torch.zeros(size, dtype=dtype, device=device)
        with torch.no_grad():
            for name, tensor in tensors.items():
                view = self._slots[name].of(self.vectors[self._slots[name].vector])
                view.copy_(tensor)
                tensor.data = view
        self.storages = {values.untyped_storage().data_ptr() for values in self.vectors.values() if values.numel()}
        self._whole = vectors({name: slot.of(self.vectors[slot.vector]) for name, slot in self._slots.items()})
        self._last: tuple[Tree, Any] = (None, None)
        # one leaf a parameter vector, for the optimiser; its gradient is where the module's gradients accumulate
        self.leaves: list[torch.nn.Parameter] = []
        self.gradients: list[torch.Tensor] = []
        for vector, values in self.vectors.items():
            if not vector.startswith("parameter"):
                continue
            leaf = torch.nn.Parameter(values)
            leaf.grad = torch.zeros_like(values)
            self.leaves.append(leaf)
            self.gradients.append(leaf.grad)
            for name, tensor in tensors.items():
                if self._slots[name].vector == vector and isinstance(tensor, torch.nn.Parameter):
                    tensor.grad = self._slots[name].of(leaf.grad)
        self.own_hooks = self.hooks()  # which the network came with
        network._flat = self  # type: ignore[assignment]  # api.weights finds the fast copy here

    def hooks(self) -> int:
        """How many hooks there are on its modules and parameters."""
        on_modules = (
            len(module._forward_hooks) + len(module._forward_pre_hooks) + len(module._backward_hooks)
            + len(module._backward_pre_hooks)
            for module in self.modules
        )  # fmt: skip
        on_parameters = (
            len(parameter._backward_hooks or ()) + len(getattr(parameter, "_post_accumulate_grad_hooks", None) or ())
            for parameter in self._parameters
        )
        return sum(on_modules) + sum(on_parameters)

    def load(self, weights: Tree) -> None:
        """Copy a state dict in.  Raises ValueError naming what is missing, unknown or of another shape."""
        if not isinstance(weights, dict) or weights.keys() != self._slots.keys():
            given = set(weights) if isinstance(weights, dict) else set()
            missing, unknown = sorted(self._slots.keys() - given), sorted(given - self._slots.keys())
            raise ValueError(f"missing {missing[:3] or 'nothing'}, unknown {unknown[:3] or 'nothing'}")
        for name, slot in self._slots.items():
            if weights[name].shape != slot.shape:
                raise ValueError(f"{name} has shape {list(weights[name].shape)}, not {list(slot.shape)}")
        with torch.no_grad():
            if weights is not self._last[0]:  # one message is loaded by many clients in turn
                self._last = weights, vectors(weights)
            whole = self._last[1]
            if whole is not None and self._whole is not None and whole[0] == self._whole[0]:
                for values, new in zip(self._whole[1], whole[1], strict=True):
                    values.copy_(new)
                return
            for name, slot in self._slots.items():
                slot.of(self.vectors[slot.vector]).copy_(weights[name])

    def hand_out(self, *, frozen: bool) -> None:
        """In training mode with gradients at zero, or in eval mode without gradients, whatever it was left in."""
        if any(module.training is frozen for module in self.modules):
            self.network.train(not frozen)
        if any(parameter.requires_grad is frozen for parameter in self._parameters):
            self.network.requires_grad_(not frozen)
        if not frozen:
            for gradient in self.gradients:  # zero, not None: a recorded step adds to these very tensors
                gradient.zero_()

    def identity(self) -> tuple[int, tuple[bool, ...]]:
        """What a recorded step depends on: which network it is, and which of its parameters have gradients."""
        return id(self), tuple(parameter.requires_grad for parameter in self._parameters)

    def copy(self) -> dict[str, torch.Tensor]:
        """A state dict of its own, as views into copies of the vectors."""
        copies = {vector: values.clone() for vector, values in self.vectors.items()}
        return {name: slot.of(copies[slot.vector]) for name, slot in self._slots.items()}


def modules_of(network: torch.nn.Module) -> Sequence[torch.nn.Module]:
    """All modules of a network; those that a flat one remembers."""
    flat = getattr(network, "_flat", None)
    return flat.modules if isinstance(flat, FlatNetwork) else list(network.modules())


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements fill a block of memory, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


def storages_of(network: torch.nn.Module) -> set[int]:
    """Where the parameters and buffers of a network lie, by address; those that a flat one remembers."""
    flat = getattr(network, "_flat", None)
    if isinstance(flat, FlatNetwork):
        return flat.storages
    return {tensor.untyped_storage().data_ptr() for tensor in (*network.parameters(), *network.buffers())}
