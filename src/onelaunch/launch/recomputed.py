"""Tensors that a backward pass computes again from smaller or shared ones instead of saving them.

A norm saves its sum. The product behind it would save the normalized rows as well, which one pass over the sum makes again. So
the operator that makes such a tensor attaches a :class:`Recipe` to it (:func:`attach`), and an operator that would save the
tensor saves what the recipe reads in its place (:func:`instead_of`). ``rms_norm`` attaches recipes to its rows; ``swiglu`` and
``gla_layer`` ask for them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.compiler import is_compiling

LEAST_BYTES = 8 << 20
"""Smallest size of a tensor that is computed again. Below it a launch takes as long as the pass over the tensor, and all
activations of a model together are small."""

_NAME = "_onelaunch_recipe"
"""Attribute of a tensor that holds its recipe."""


class Recipe(NamedTuple):
    """How a tensor can be computed again."""

    compute: Callable[..., torch.Tensor]
    """Function from the tensors to one of the same elements, contiguous. It must not use anything that may change meanwhile."""
    tensors: tuple[torch.Tensor, ...]
    """Tensors that the function reads first."""
    parameters: tuple[torch.Tensor, ...]
    """Small parameters of a module that it reads after them. A copy of each is saved: FSDP frees parameters until the backward
    pass of their module, which may come after the one that computes the tensor again."""
    versions: tuple[int, ...]
    """Version counters of the tensor itself, of ``tensors`` and of ``parameters`` when the recipe was attached."""


class Again(NamedTuple):
    """Data with which a backward pass computes a tensor again from the saved ones."""

    compute: Callable[..., torch.Tensor]
    shape: torch.Size


def attach(
    made: torch.Tensor,
    compute: Callable[..., torch.Tensor],
    tensors: tuple[torch.Tensor, ...],
    parameters: tuple[torch.Tensor, ...] = (),
) -> None:
    """Note that ``compute(*tensors, *parameters)`` makes a new contiguous tensor again, unless a tracer runs.

    It is called when autograd saves tensors, so neither the recipe nor its tensors have a graph.
    """
    if type(made) is torch.Tensor and not is_compiling():
        tensors = tuple([each.detach() for each in tensors])
        setattr(made, _NAME, Recipe(compute, tensors, parameters, _versions(made, *tensors, *parameters)))


def instead_of(tensor: torch.Tensor) -> tuple[Again | None, tuple[torch.Tensor, ...]]:
    """Return what to save for the backward pass in place of a tensor: the tensors of its recipe, or else the tensor itself.

    A view of all elements in their order, as ``flatten`` returns it, counts as the tensor that it is a view of. A recipe does not
    count for a tensor of less than :data:`LEAST_BYTES`, nor once its tensor, or one that it reads, has been modified in place.
    :func:`once_more` takes the results.
    """
    if type(tensor) is not torch.Tensor or is_compiling():
        return None, (tensor,)
    made = tensor if tensor._base is None else tensor._base  # noqa: SLF001 - PyTorch has no public name
    recipe: Recipe | None = getattr(made, _NAME, None)
    if recipe is None or recipe.versions != _versions(made, *recipe.tensors, *recipe.parameters):
        return None, (tensor,)
    if tensor.numel() != made.numel() or not tensor.is_contiguous() or tensor.nbytes < LEAST_BYTES:
        return None, (tensor,)
    return Again(recipe.compute, tensor.shape), (*recipe.tensors, *(each.detach().clone() for each in recipe.parameters))


def once_more(again: Again | None, saved: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Return the tensor for which :func:`instead_of` returned these results, computed again where that was the choice."""
    return saved[0] if again is None else again.compute(*saved).view(again.shape)


def _versions(*tensors: torch.Tensor) -> tuple[int, ...]:
    return tuple([each._version for each in tensors])  # noqa: SLF001 - PyTorch has no public name
