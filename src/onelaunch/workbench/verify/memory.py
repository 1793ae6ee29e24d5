"""Memory of results: plain tensors in memory of their own, which no later call writes to.

The checks in ``gate.py``, ``examine.py`` and ``repeated.py`` call these functions.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping

import torch

from onelaunch.workbench.verify.calls import Inputs, OutputTensors


def odd_results(outputs: OutputTensors) -> list[str]:
    """Return a sentence for each output or gradient that is no plain tensor with strides.

    Other tensors, such as a subclass that computes when it is looked at, must not be copied or compared.
    """
    problems = []
    for name, value in outputs.items():
        if value is None:
            continue
        if type(value) is not torch.Tensor:
            problems.append(f"{name} is a {type(value).__name__}; it must be a plain torch.Tensor.")
        elif value.layout != torch.strided or value.is_quantized:
            problems.append(f"{name} has the layout {value.layout}; it must be a tensor with strides.")
        elif value.is_neg() or value.is_conj():
            problems.append(
                f"{name} is a view whose values are negated or conjugated when they are read; they must be in memory."
            )
        elif value.is_meta:
            problems.append(f"{name} is on the meta device, where nothing is computed.")
    return problems


def layout_problems(outputs: OutputTensors, inputs: Inputs, usual: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Return a sentence for each result that overlaps itself, another result or an input, or has an unusual order of dimensions.

    Only results are examined. PyTorch itself hands out one tensor as several gradients, and expanded ones. Results that lie in
    the memory of a :class:`~onelaunch.operation.Bundle`, such as a cache, are left out: the operation's contract says so.

    Args:
        outputs: Results and gradients of a call.
        inputs: Inputs of the call.
        usual: Strides of the results of plain PyTorch by name. A result must be in row-major order, or ordered as these are. The
            order of a result without an entry is not examined.
    """
    bundled = {tensor.untyped_storage().data_ptr() for name, tensor in inputs.named_tensors() if name not in inputs.arguments}
    results = {
        name: value
        for name, value in outputs.items()
        if value is not None
        and value.numel()
        and not name.startswith("grad ")
        and value.untyped_storage().data_ptr() not in bundled
    }
    problems = []
    for name, value in results.items():
        if _overlaps_itself(value):
            problems.append(f"{name} has strides {value.stride()}, with which several elements share memory.")
        elif name in usual and not (in_order(value) or in_order(value, usual[name])):
            problems.append(f"{name} has strides {value.stride()}; a result must be in row-major order, as its callers expect.")
    if problems:
        return problems
    names = list(results)
    for index, name in enumerate(names):
        problems += [
            f"{name} and {other} share memory, so that writing to one changes the other."
            for other in names[:index]
            if overlap(results[name], results[other])
        ]
        problems += [
            f"{name} shares memory with the input {argument}, so that writing to one changes the other."
            for argument, value in inputs.arguments.items()
            if isinstance(value, torch.Tensor) and value.numel() and overlap(results[name], value)
        ]
    return problems


def reused(earlier: Iterable[OutputTensors], later: OutputTensors, inputs: Iterable[Inputs]) -> list[str]:
    """Return a sentence for each result of a later call that lies in the memory of an earlier call's result.

    The earlier results must still be held, or their memory may rightly be used again. A tensor that lies in an input is left out.
    """
    given = {tensor.untyped_storage().data_ptr() for each in inputs for _, tensor in each.named_tensors()}
    held = [value for outputs in earlier for value in _own(outputs, given)]
    return [
        f"{name} lies in memory that an earlier call returned: the later call overwrites that result."
        for name, value in later.items()
        if value is not None
        and value.numel()
        and value.untyped_storage().data_ptr() not in given
        and any(overlap(value, other) for other in held)
    ]


def _own(outputs: OutputTensors, given: set[int]) -> Iterator[torch.Tensor]:
    for value in outputs.values():
        if value is not None and value.numel() and value.untyped_storage().data_ptr() not in given:
            yield value


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    """Return whether several elements share memory, as in an expanded tensor, or may do so."""
    reach = 0
    for stride, size in sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def in_order(tensor: torch.Tensor, like: tuple[int, ...] | None = None) -> bool:
    """Return whether a tensor's dimensions are ordered in memory as those of other strides, by default in row-major order.

    The tensor need not be contiguous: it may be a slice.
    """
    dimensions = range(tensor.dim()) if like is None else sorted(range(tensor.dim()), key=lambda dimension: -like[dimension])
    strides = [tensor.stride(dimension) for dimension in dimensions if tensor.shape[dimension] > 1]
    return all(outer >= inner for outer, inner in itertools.pairwise(strides))


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors without overlap in themselves share an element's memory."""
    if one.device != other.device or one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr():
        return False
    if _last(one) <= other.data_ptr() or _last(other) <= one.data_ptr():
        return False
    # Interleaved views, such as columns of one matrix: each byte of the storage is marked for one, and looked up for the other.
    marks = torch.zeros(one.untyped_storage().nbytes(), dtype=torch.bool, device=one.device)
    _bytes(marks, one).logical_not_()
    return bool(_bytes(marks, other).any())


def _last(tensor: torch.Tensor) -> int:
    """Return the address behind the last element of a tensor that is not empty."""
    reach = sum(stride * (size - 1) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr() + (reach + 1) * tensor.element_size()


def _bytes(marks: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return the view of one mark per byte of storage that belongs to a tensor's elements."""
    size = tensor.element_size()
    strides = (*(stride * size for stride in tensor.stride()), 1)
    return marks.as_strided((*tensor.shape, size), strides, tensor.storage_offset() * size)
