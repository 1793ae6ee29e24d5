"""Tensors that a backward pass computes again from smaller or shared ones instead of saving them.

``rms_norm`` saves its input after the addition of the residual. The matrix product that follows would save the normalized rows as
well, which one pass over that saved tensor computes again. So the operator that makes such a tensor attaches a :class:`Recipe` to
it (:func:`attach`), and an operator that would save the tensor saves what the recipe reads in its place (:func:`instead_of`).
``rms_norm`` attaches recipes to its rows; ``swiglu`` and ``gla_layer`` ask for them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from onelaunch.tracing import is_traced

LEAST_BYTES = 8 << 20
"""Smallest size of a tensor that is computed again. Below it a launch takes as long as the pass over the tensor, and all
activations of a model together are small."""

_NAME = "_onelaunch_recipe"
"""Attribute of a tensor that holds its recipe."""


class Recipe(NamedTuple):
    """Function and inputs from which a tensor can be computed again."""

    compute: Callable[..., torch.Tensor]
    """Function from the tensors to one of the same elements, contiguous. It must not use anything that may change meanwhile."""
    tensors: tuple[torch.Tensor, ...]
    """Tensors that the function reads first."""
    parameters: tuple[torch.Tensor, ...]
    """Copies of small parameters of a module, which it reads after them. FSDP frees a module's parameters after its forward pass,
    before a module behind it saves anything, and no version counter shows that."""
    versions: tuple[int, ...]
    """Version counters of the tensor itself and of ``tensors`` when the recipe was attached."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Make a pickled tensor lose its recipe: pickle stores the attributes of tensors, and cannot read this one back."""
        return OrderedDict, ()


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
    """Attach a recipe to a new contiguous tensor, which ``compute(*tensors, *parameters)`` computes again, unless a tracer runs.

    It is called when autograd saves tensors, so neither the recipe nor its tensors have a graph. Tensors of less than
    :data:`LEAST_BYTES` get no recipe.
    """
    if type(made) is torch.Tensor and made.nbytes >= LEAST_BYTES and not is_traced(made):
        tensors = tuple([each.detach() for each in tensors])
        copies = tuple([each.detach().clone() for each in parameters])
        setattr(made, _NAME, Recipe(compute, tensors, copies, _versions(made, *tensors)))


def instead_of(tensor: torch.Tensor) -> tuple[Again | None, tuple[torch.Tensor, ...]]:
    """Return what to save for the backward pass in place of a tensor: the tensors of its recipe, or else the tensor itself.

    A view of all elements in their order, as ``flatten`` returns it, counts as the tensor that it is a view of. A recipe does not
    count once its tensor, or one that it reads, has been modified in place; modifications through ``.data`` go unnoticed.
    :func:`once_more` takes the results.
    """
    if type(tensor) is not torch.Tensor:
        return None, (tensor,)
    made = tensor if tensor._base is None else tensor._base  # noqa: SLF001 - PyTorch has no public name
    recipe = getattr(made, _NAME, None)
    if type(recipe) is not Recipe or is_traced(tensor) or recipe.versions != _versions(made, *recipe.tensors):
        return None, (tensor,)
    if tensor.numel() != made.numel() or not tensor.is_contiguous():
        return None, (tensor,)
    return Again(recipe.compute, tensor.shape), (*recipe.tensors, *recipe.parameters)


def once_more(again: Again | None, saved: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Return the tensor for which :func:`instead_of` returned these results, computed again where that was the choice."""
    return saved[0] if again is None else again.compute(*saved).view(again.shape)


def _versions(*tensors: torch.Tensor) -> tuple[int, ...]:
    return tuple([each._version for each in tensors])  # noqa: SLF001 - PyTorch has no public name
