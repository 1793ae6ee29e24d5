"""Packed parameters: several weights concatenated in one parameter, with separate names in a state dict.

``RecurrentLayer``, ``LinearRNN`` and ``SwiGLU`` derive from :class:`PackedModule`, and call :func:`init_linear`.
``GatedLinearAttention`` and ``ForgetGateLayer`` read their parameters by :func:`parameter` and :func:`child`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.compiler import is_compiling


def parameter(module: nn.Module, name: str) -> Any:
    """Return a module's parameter of this name, or whatever attribute stands in its place.

    ``nn.Module`` finds a parameter after Python has looked for an attribute in vain, which takes ten times as long as a look-up
    among the parameters. A parametrization or a plain attribute takes the parameter out of them.
    """
    found = None if is_compiling() else module._parameters.get(name)  # noqa: SLF001 - a layer's call makes seven look-ups
    return getattr(module, name) if found is None else found


def child(module: nn.Module, name: str) -> Any:
    """Return a module's child of this name, as :func:`parameter` returns parameters."""
    found = None if is_compiling() else module._modules.get(name)  # noqa: SLF001
    return getattr(module, name) if found is None else found


class Part(NamedTuple):
    """Rows of a packed parameter that have a name of their own in a state dict."""

    key: str
    """Key in the state dict, without the module's prefix, such as ``q_proj.weight``."""
    rows: int


class PackedModule(nn.Module):
    """Module with packed parameters: one tensor for the optimizer and for kernels, several in a state dict.

    State dicts hold only the parts, as views of the parameter; loading them fills its rows. Messages about missing or
    unexpected keys and wrong shapes name the parts.
    """

    def __init__(self) -> None:
        super().__init__()
        self.packed: dict[str, tuple[Part, ...]] = {}
        """Parts of each packed parameter, by the parameter's name."""

    def pack(self, name: str, parts: Mapping[str, int], columns: int | None = None) -> None:
        """Register a parameter ``[sum of rows, columns]``, or ``[sum of rows]``; ``parts`` are row counts by state-dict key."""
        rows = sum(parts.values())
        self.register_parameter(name, nn.Parameter(torch.empty(rows if columns is None else (rows, columns))))
        self.packed[name] = tuple([Part(key, count) for key, count in parts.items()])

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


def init_linear(weight: nn.Parameter, bias: nn.Parameter | None = None) -> None:
    """Initialize like :class:`torch.nn.Linear`; the range depends on the number of inputs, which all parts of a weight share."""
    bound = 1 / math.sqrt(weight.shape[1])
    nn.init.uniform_(weight, -bound, bound)
    if bias is not None:
        nn.init.uniform_(bias, -bound, bound)
