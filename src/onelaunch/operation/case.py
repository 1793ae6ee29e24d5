"""Descriptions of calls without tensors, the arguments made for them, and arguments that consist of several tensors.

Studies, commands, probes, example calls and tests name calls by a :class:`Case`, from which operations compute inputs, queries
and costs. Their input makers return a :class:`Reading`. The KV cache and the weights of ``decode`` and the quantized tensors of
``formats`` are each a :class:`Bundle`, which the workbench's verification copies and compares.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from typing_extensions import Self  # in typing from Python 3.11 on


@dataclass(frozen=True, eq=False)
class Bundle:
    """One argument that consists of several tensors, such as a quantized matrix and its scales. Base of immutable dataclasses.

    Code that copies, casts or compares arguments uses :meth:`tensors` and :meth:`map`, and need not know what the tensors mean.
    """

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors by field name, without those that are ``None``."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        """Return a copy in which a function is applied to each tensor."""
        return replace(self, **{name: function(value) for name, value in self.tensors().items()})

    def to(self, device: torch.device | str) -> Self:
        """Return a copy whose tensors are on a device."""
        return self.map(lambda tensor: tensor.to(device))

    @property
    def nbytes(self) -> int:
        """Total size of the tensors in bytes."""
        return sum(tensor.nbytes for tensor in self.tensors().values())


@dataclass(frozen=True)
class Case:
    """Description of one call of an operation without its tensors. Tests and studies enumerate cases."""

    operation: str
    """Name of the operation."""
    sizes: Mapping[str, int]
    """Size of each of the operation's dimensions, by name."""
    dtype: torch.dtype
    """Dtype of the call's inputs."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the operation's input maker that differ from their defaults."""
    name: str = ""
    """Name in reports; by default it is composed of the sizes, the dtype and the options."""

    def __str__(self) -> str:
        parts = [f"{key}{value}" for key, value in self.sizes.items()] + [str(self.dtype).removeprefix("torch.")]
        parts += [f"{key}={value}" for key, value in self.options.items()]
        return self.name or "-".join(parts)


@dataclass(frozen=True)
class Reading:
    """Arguments of the public function for one case, and the names of those that take gradients."""

    arguments: dict[str, Any]
    """Keyword arguments of the public function."""
    differentiable: tuple[str, ...]
    """Names of the arguments that take gradients."""
    through: tuple[str, ...] | None = None
    """Names of the results through which gradients come in; ``None`` for all that have floating-point numbers."""
