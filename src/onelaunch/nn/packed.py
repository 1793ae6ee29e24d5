"""Packed parameters: several weights concatenated in one parameter, with separate names in a state dict.

``RecurrentLayer``, ``LinearRNN`` and ``SwiGLU`` derive from :class:`PackedModule`. They read their parameters by
:func:`parameter`, :func:`child` and :meth:`PackedModule.local`. ``parallel.py`` separates packed parameters and shards the parts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.compiler import is_compiling

from onelaunch.errors import ArgumentError


def parameter(module: nn.Module, name: str) -> Any:
    """Return a module's parameter of this name, or whatever attribute stands in its place.

    ``nn.Module`` finds a parameter after Python has looked for an attribute in vain, which takes ten times as long as a look-up
    among the parameters. A parametrization or a plain attribute takes the parameter out of them, and so does
    :meth:`PackedModule.separate_weights`, after which the parts are concatenated.
    """
    found = None if is_compiling() else module._parameters.get(name)  # noqa: SLF001 - a layer's call makes seven look-ups
    if found is not None:
        return found
    apart = isinstance(module, PackedModule) and name in module.separate
    return module.concatenated(name) if apart else getattr(module, name)


def child(module: nn.Module, name: str) -> Any:
    """Return a module's child of this name, as :func:`parameter` returns parameters."""
    found = None if is_compiling() else module._modules.get(name)  # noqa: SLF001
    return getattr(module, name) if found is None else found


class Part(NamedTuple):
    """Rows of a packed parameter that have a name of their own in a state dict."""

    key: str
    """Key in the state dict, without the module's prefix, such as ``q_proj.weight``."""
    rows: int


class Shards(Protocol):
    """Placement of a layer's parameters on several ranks, which ``onelaunch.nn.parallel`` implements with DTensors."""

    def local(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a sharded parameter, or the whole of a replicated one."""
        ...

    def mean(self, value: torch.Tensor) -> torch.Tensor:
        """Return the mean over the ranks of a tensor that each of them has, also as a function of gradients."""
        ...


class Weights(nn.Module):
    """Holder of parameters that were parts of a packed one, such as ``weight`` under the name ``q_proj``. It is not called."""


class PackedModule(nn.Module):
    """Module with packed parameters: one tensor for the optimizer and for kernels, several in a state dict.

    State dicts hold only the parts, as views of the parameter; loading them fills its rows. Messages about missing or
    unexpected keys and wrong shapes name the parts. :meth:`separate_weights` makes the parts parameters of their own.
    """

    shards: Shards | None = None
    """Placement of the parameters on several ranks; ``None`` for a layer that is not sharded by heads or channels."""
    replicated: tuple[str, ...] = ()
    """Names of parameters that every rank of a sharded layer holds whole. The others are sharded by their rows."""
    row_wise: str
    """Name of the output projection, of which a rank of a sharded layer holds columns. The ranks' outputs are summed."""

    def __init__(self) -> None:
        super().__init__()
        self.packed: dict[str, tuple[Part, ...]] = {}
        """Parts of each packed parameter, by the parameter's name."""
        self.separate: dict[str, tuple[Part, ...]] = {}
        """Parts of each packed parameter that :meth:`separate_weights` has taken apart."""

    def pack(self, name: str, parts: Mapping[str, int], columns: int | None = None) -> None:
        """Register a parameter ``[sum of rows, columns]``, or ``[sum of rows]``; ``parts`` are row counts by state-dict key."""
        rows = sum(parts.values())
        self.register_parameter(name, nn.Parameter(torch.empty(rows if columns is None else (rows, columns))))
        self.packed[name] = tuple([Part(key, count) for key, count in parts.items()])

    def separate_weights(self) -> None:
        """Make the parts of packed parameters parameters of their own, with the names that they have in a state dict.

        State dicts stay the same, and so do results. A call concatenates the parts. An optimizer must be made afterwards. A
        second call does nothing.

        Raises:
            ArgumentError: a packed parameter has been sharded before.
        """
        for name, parts in self.packed.items():
            whole = self.get_parameter(name)
            if type(whole) is not nn.Parameter:
                said = f"{name} of {type(self).__name__} is a {type(whole).__name__}"
                raise ArgumentError(f"{said}; separate its weights before it is sharded or wrapped.")
            for part, piece in zip(parts, whole.detach().split([part.rows for part in parts]), strict=True):
                *owners, last = part.key.split(".")
                holder: nn.Module = self
                for owner in owners:
                    if owner not in holder._modules:  # noqa: SLF001 - hasattr would find a parameter of that name too
                        holder.add_module(owner, Weights())
                    holder = child(holder, owner)
                holder.register_parameter(last, nn.Parameter(piece.clone(), requires_grad=whole.requires_grad))
            delattr(self, name)
        self.separate.update(self.packed)
        self.packed.clear()

    def concatenated(self, name: str) -> Any:
        """Return the separate parts of a packed parameter as one tensor; of a sharded layer, the rows of this rank."""
        parts = [self.local(self.get_parameter(part.key)) for part in self.separate[name]]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def local(self, tensor: Any) -> Any:
        """Return this rank's part of a parameter or ``None``; unless the layer is sharded, what was given."""
        return tensor if self.shards is None or tensor is None else self.shards.local(tensor)

    def sizes_to_divide(self) -> dict[str, int]:
        """Return the numbers of heads or channels that the number of ranks of a sharded layer must divide, by name."""
        raise NotImplementedError

    def take_share(self, ranks: int) -> None:
        """Replace the sizes that calls read by those of one of several ranks. It must divide :meth:`sizes_to_divide`."""
        raise NotImplementedError

    def reset_packed(self) -> None:
        """Initialize the packed weights and their biases, or their separate parts, as :class:`torch.nn.Linear` does."""
        for name in (*self.packed, *self.separate):
            if name.endswith("_weight"):
                weights = self._parameters_of(name)
                bound = 1 / math.sqrt(weights[0].shape[1])  # by the number of inputs, which all parts share
                for each in (*weights, *self._parameters_of(name.removesuffix("weight") + "bias")):
                    nn.init.uniform_(each, -bound, bound)

    def _parameters_of(self, name: str) -> list[nn.Parameter]:
        """Return a packed parameter as a list of one, or its separate parts, or nothing if there is no such parameter."""
        if name in self.packed:
            return [self.get_parameter(name)]
        return [self.get_parameter(part.key) for part in self.separate.get(name, ())]

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, parts in self.packed.items():
            whole = destination.pop(prefix + name)
            for part, piece in zip(parts, whole.split([part.rows for part in parts]), strict=True):
                destination[prefix + part.key] = piece

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        assign = local_metadata.get("assign_to_params_buffers", False)  # set by load_state_dict(assign=True)
        for name, parts in self.packed.items():
            # Only the parts are keys of a state dict; the parameter's own name is not.
            if state_dict.pop(prefix + name, None) is not None and strict:
                unexpected_keys.append(prefix + name)
            whole = self.get_parameter(name)
            found = _pieces(state_dict, prefix, parts, whole, error_msgs)
            if strict:
                missing_keys.extend([prefix + part.key for part in parts if prefix + part.key not in state_dict])
            for part in parts:  # handled here; PyTorch would call them unexpected
                state_dict.pop(prefix + part.key, None)
            if whole.is_meta and 0 < len(found) < len(parts):
                error_msgs.append(f"{prefix}{name} is on the meta device: load all of {', '.join(part.key for part in parts)}.")
                found = {}
            # PyTorch loads this one tensor; where no part was found the parameter itself, so that nothing changes.
            state_dict[prefix + name] = _joined(whole, parts, found, assign) if found else whole
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)


def _pieces(
    state_dict: Mapping[str, Any], prefix: str, parts: tuple[Part, ...], whole: torch.Tensor, error_msgs: list[str]
) -> dict[str, torch.Tensor]:
    """Return the parts that a state dict holds in the right shape.

    A message is appended for each part that has another shape or is no tensor. Absent parts are skipped without one.
    """
    found: dict[str, torch.Tensor] = {}
    for part in parts:
        if (value := state_dict.get(prefix + part.key)) is None:
            continue
        want = torch.Size([part.rows, *whole.shape[1:]])
        if not isinstance(value, torch.Tensor):
            error_msgs.append(f'"{prefix}{part.key}" is {type(value).__name__}; it must be a torch.Tensor.')
        elif value.shape != want:
            error_msgs.append(
                f"size mismatch for {prefix}{part.key}: copying a param with shape {value.shape} from checkpoint, "
                f"the shape in current model is {want}."
            )
        else:
            found[part.key] = value
    return found


def _joined(whole: nn.Parameter, parts: tuple[Part, ...], found: Mapping[str, torch.Tensor], assign: bool) -> torch.Tensor:
    """Return the packed tensor with the rows of ``found``; other rows keep their values.

    With ``assign`` it has the dtype and device of the loaded parts, else those of the parameter.
    """
    like = next(iter(found.values())) if assign else whole
    kept = whole.detach().split([part.rows for part in parts])
    pieces = [found.get(part.key, old) for part, old in zip(parts, kept, strict=True)]
    if not assign and like.is_meta:
        return torch.cat([piece.detach() for piece in pieces])  # without assign, PyTorch ignores it with a warning
    return torch.cat([piece.detach().to(like.device, like.dtype) for piece in pieces])
