"""Cases: calls described without their tensors, the arguments made for them, and arguments of several tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from typing_extensions import Self  # in typing from Python 3.11 on


@dataclass(frozen=True, eq=False)
class Bundle:
    """Several tensors that make one argument, such as a quantized matrix and its scales. Base of immutable dataclasses.

    Whoever copies, casts or watches arguments does it through :meth:`tensors` and :meth:`map`, and need not know what they mean.
    """

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors that there are, by name."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        """Return a copy with a function applied to each tensor."""
        return replace(self, **{name: function(value) for name, value in self.tensors().items()})

    def to(self, device: torch.device | str) -> Self:
        """Return a copy on a device."""
        return self.map(lambda tensor: tensor.to(device))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors().values())


@dataclass(frozen=True)
class Case:
    """One call of an operation, described without its tensors: what tests and studies enumerate."""

    operation: str
    sizes: Mapping[str, int]
    dtype: torch.dtype
    options: Mapping[str, Any] = field(default_factory=dict)
    """Choices of the operation's input maker that differ from its defaults."""
    name: str = ""

    def __str__(self) -> str:
        parts = [f"{key}{value}" for key, value in self.sizes.items()] + [str(self.dtype).removeprefix("torch.")]
        parts += [f"{key}={value}" for key, value in self.options.items()]
        return self.name or "-".join(parts)


@dataclass(frozen=True)
class Reading:
    """The public function's inputs for one case, and which of them take gradients."""

    arguments: dict[str, Any]
    differentiable: tuple[str, ...]
