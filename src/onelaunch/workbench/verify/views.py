"""Inputs that are views: slices of larger tensors, and expanded tensors, as a model passes them. Also inputs moved by roundings.

``examine.py`` and ``repeated.py`` call a candidate with views. ``repeated.py`` measures by :func:`moved` how well the results for
expanded inputs are determined.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from onelaunch.operation import Bundle
from onelaunch.workbench.verify.calls import Inputs

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtypes by size in bytes, as which the neighbours of a floating-point number differ from it by one."""

_PAD = 16
"""Elements on either side of a slice: at least 16 bytes in every dtype, so that it stays aligned to 16 bytes."""


def slices(inputs: Inputs, pad: int = _PAD, *, bundles: bool = False) -> Inputs:
    """Return inputs of the same contents that are slices of larger tensors, along their last dimension.

    What lies beside a slice is NaN, so that a result shows if it is read; 0 for integers and 8-bit formats. Incoming
    gradients are slices too.

    Args:
        inputs: Inputs whose contents are copied.
        pad: Elements on either side. An odd number makes slices that are not aligned.
        bundles: Whether the tensors of a :class:`~onelaunch.operation.Bundle`, such as a quantized matrix, are slices too. If
            not, the bundles themselves are passed, since a variant may prepare them once, as it does with a model's weights.
    """

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.dim() or not tensor.numel():
            return tensor.detach().clone()
        larger = tensor.new_zeros((*tensor.shape[:-1], tensor.shape[-1] + 2 * pad))
        if tensor.is_floating_point() and tensor.element_size() > 1:  # not every 8-bit format has a NaN
            larger.fill_(float("nan"))
        view = larger[..., pad : pad + tensor.shape[-1]]
        return view.copy_(tensor.detach())

    return _with_views(inputs, cut, bundles=bundles)


def expandable(inputs: Inputs) -> tuple[str, ...]:
    """Return the names of the arguments that :func:`expanded` expands: floating-point tensors of more than one row."""
    tensors = ((name, value) for name, value in inputs.arguments.items() if isinstance(value, torch.Tensor))
    return tuple(name for name, value in tensors if value.is_floating_point() and max(value.shape, default=0) > 1)


def expanded(inputs: Inputs, only: str | None = None) -> tuple[Inputs, Inputs]:
    """Return inputs that are expanded along their first dimension of more than one entry, and contiguous ones of equal contents.

    All entries along that dimension equal the first one. Integers, such as offsets, are copied as they are. Bundles, whose parts
    belong together, are passed as they are.

    Args:
        inputs: Inputs whose contents are copied.
        only: Name of the argument that is expanded alone, while everything else is copied as it is. By default all arguments and
            incoming gradients are expanded.
    """

    def expand(tensor: torch.Tensor) -> torch.Tensor:
        axis = next((axis for axis, size in enumerate(tensor.shape) if size > 1), None)
        if axis is None or not tensor.is_floating_point():
            return tensor.detach().clone()
        return tensor.detach().narrow(axis, 0, 1).clone().expand_as(tensor)

    views = _with_views(inputs, expand, bundles=False, only=only)
    return views, _with_views(views, lambda tensor: tensor.detach().contiguous().clone(), bundles=False)


def moved(inputs: Inputs, seed: int) -> Inputs:
    """Return contiguous inputs each of whose numbers is moved to one of its two neighbours in its dtype, at random.

    Zeros, infinities and NaN stay, as do integers, 8-bit formats and bundles. Incoming gradients are moved too.

    Args:
        inputs: Inputs whose contents are copied.
        seed: Seed of the choice between the neighbours, which is drawn on the CPU so that every device has the same.
    """
    generator = torch.Generator().manual_seed(seed)

    def move(tensor: torch.Tensor) -> torch.Tensor:
        values = tensor.detach().contiguous()
        if not values.is_floating_point() or values.element_size() not in _INTEGERS:
            return values.clone()
        integers = _INTEGERS[values.element_size()]
        steps = 2 * torch.randint(2, values.shape, generator=generator, dtype=integers) - 1
        neighbours = (values.view(integers) + steps.to(values.device)).view(values.dtype)
        stays = (values == 0) | ~values.isfinite() | ~neighbours.isfinite()
        return torch.where(stays, values, neighbours)

    return _with_views(inputs, move, bundles=False)


def _with_views(
    inputs: Inputs, view: Callable[[torch.Tensor], torch.Tensor], *, bundles: bool, only: str | None = None
) -> Inputs:
    """Return inputs with a function applied to each tensor, incoming gradients included, or to one argument alone."""

    def each(name: str, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            given = view(value) if only in (None, name) else value.detach().clone()
            return given.requires_grad_(name in inputs.differentiable)
        if isinstance(value, Bundle):
            return value.map(view) if bundles else value
        return value

    arguments = {name: each(name, value) for name, value in inputs.arguments.items()}
    gradients = {name: view(gradient) if only is None else gradient.clone() for name, gradient in inputs.output_gradients.items()}
    return Inputs(arguments, inputs.differentiable, gradients)
