"""Parameters that lie one behind the other in memory, and the weight that they form together.

:func:`lay` moves the parameters of a group into one buffer, once. They stay separate ``torch.nn.Parameter`` objects, each a view
of its part of the buffer. :func:`together` looks at the addresses in every call. Where the parameters still lie one behind the
other it returns the rows of the buffer as one tensor, without a copy. Otherwise it returns ``None``: ``Module.to``,
``load_state_dict(assign=True)`` or FSDP may have given one of them another storage meanwhile. So there is never a second copy
of a weight that could hold other values than the parameters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from onelaunch.tracing import is_traced


class Together(torch.autograd.Function):
    """One tensor over the memory of several, whose gradient is divided among them by rows.

    A view of the first tensor alone would leave the others without gradients, and ``torch.cat`` would copy. The view shares the
    version counter of the first tensor only, so the backward pass compares the counters of all: PyTorch raises the same error for
    a weight that was modified in place between the two passes.
    """

    @staticmethod
    def forward(ctx: Any, *parts: torch.Tensor) -> torch.Tensor:
        """Return the parts as one tensor; the caller has checked their addresses."""
        ctx.rows = [part.shape[0] for part in parts]
        # Not saved tensors: hooks on these, such as those that move activations to the CPU, would copy the weights.
        ctx.parts = parts
        ctx.versions = _versions(parts)
        return _view(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the rows of the gradient that belong to each part, or ``None`` for a part that needs no gradient."""
        if _versions(ctx.parts) != ctx.versions:
            raise RuntimeError(
                "A weight needed for gradient computation was modified by an inplace operation after the forward pass."
            )
        found = gradients[0].split(ctx.rows)
        return tuple([each if needed else None for each, needed in zip(found, ctx.needs_input_grad, strict=True)])


def _versions(parts: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Return how often each tensor was modified in place; nothing for tensors of inference mode, which do not count."""
    return tuple([part._version for part in parts if not part.is_inference()])  # noqa: SLF001 - PyTorch has no public name


def _view(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the memory of tensors that lie one behind the other as one tensor."""
    first = parts[0]
    rows = sum([part.shape[0] for part in parts])
    return first.detach().as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())


def are_adjacent(parts: Sequence[torch.Tensor]) -> bool:
    """Return whether contiguous tensors of one dtype lie one behind the other in one storage."""
    first = parts[0]
    begin = end = first.data_ptr()
    if begin == 0:
        return False
    for part in parts:
        if part.data_ptr() != end or part.dtype != first.dtype or not part.is_contiguous():
            return False
        end += part.numel() * part.element_size()
    return is_within(first, begin, end)


def is_within(tensor: torch.Tensor, begin: int, end: int) -> bool:
    """Return whether addresses lie in a tensor's storage: two storages may lie next to each other by chance."""
    storage = tensor.untyped_storage()
    address = storage.data_ptr()
    return address <= begin and end <= address + storage.nbytes()


def together(parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return the parts as one tensor that shares their memory, or ``None`` where they do not lie one behind the other.

    It is ``None`` under ``torch.compile`` too, since a graph that was compiled for the present addresses would be wrong for
    others, and addresses are no condition under which PyTorch compiles again.
    """
    return None if is_traced(parts[0]) or not are_adjacent(parts) else joined_in_place(parts)


def joined_in_place(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return parts that lie one behind the other in one storage as one tensor that shares their memory."""
    if torch.is_grad_enabled() and any(part.requires_grad for part in parts):
        return Together.apply(*parts)
    return _view(parts)


class Owners:
    """Tensors of a model by the storage that they lie in, to tell which parameters can be moved without breaking a tie."""

    def __init__(self, model: nn.Module) -> None:
        tensors = {id(each): each for each in (*model.parameters(), *model.buffers())}
        self._by_storage = Counter([_storage_of(each) for each in tensors.values()])

    def why_not(self, parameters: Sequence[nn.Parameter], buffer: int | None = None) -> str | None:
        """Return why the parameters of a group cannot be moved into one buffer, or ``None``.

        Some may still lie in a buffer that :func:`lay` made for the group earlier; ``buffer`` is its address.
        """
        first = parameters[0]
        for each in parameters:
            if type(each) is not nn.Parameter:
                return f"a weight is a {type(each).__name__}"
        if len({id(each) for each in parameters}) < len(parameters):
            return "two projections share one parameter"
        if any(each.dtype != first.dtype or each.device != first.device for each in parameters):
            return "the weights differ in dtype or device"
        if any(not each.is_contiguous() for each in parameters):
            return "a weight is not contiguous"
        if any(each.device.type == "cpu" and each.is_shared() for each in parameters):
            return "a weight lies in memory that processes share"
        here = Counter([_storage_of(each) for each in parameters])
        for each in parameters:
            storage, at = each.untyped_storage(), _storage_of(each)
            alone = here[at] == 1 and storage.nbytes() == each.numel() * each.element_size()
            if self._by_storage[at] > here[at] or not (alone or storage.data_ptr() == buffer):
                return "a weight shares its storage with another tensor"
        return None


def _storage_of(tensor: torch.Tensor) -> tuple[str, int]:
    """Return the device and the address of a tensor's storage; a number of its own for a tensor without one."""
    try:
        return str(tensor.device), tensor.untyped_storage().data_ptr() or id(tensor)
    except (RuntimeError, NotImplementedError):  # a tensor subclass without a storage
        return str(tensor.device), id(tensor)


def lay(parameters: Sequence[nn.Parameter]) -> int:
    """Move parameters into one new buffer, one behind the other, and return its address.

    Each stays the object that it is, with the same values.
    """
    first = parameters[0]
    buffer = torch.empty(sum([each.numel() for each in parameters]), dtype=first.dtype, device=first.device)
    pieces = buffer.split([each.numel() for each in parameters])
    moved = [piece.view(each.shape).copy_(each.detach()) for piece, each in zip(pieces, parameters, strict=True)]
    for each, piece in zip(parameters, moved, strict=True):
        each.data = piece
    return buffer.data_ptr()


def part(parameters: Sequence[nn.Parameter]) -> None:
    """Give parameters storages of their own again if they still lie in a buffer that :func:`lay` made for them alone."""
    size = sum([each.numel() * each.element_size() for each in parameters])
    if are_adjacent(parameters) and parameters[0].untyped_storage().nbytes() == size:
        for each in parameters:
            each.data = each.detach().clone()
