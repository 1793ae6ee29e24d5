"""Contents of the rotated input sets: changed between calls, and known, so that a changed input is noticed.

A variant that keeps its outputs by the contents of its inputs would be timed while it looks them up. Therefore a set gets other
contents after each call from Python, and some sets get them before a CUDA graph is replayed: each tensor that changes is a copy
of a window, at a new position, of a buffer with the values that the operation drew. No timed call has seen the contents on which
the outputs of a last sample are judged. The samplers in ``sampling.py`` use this module, and ``entry.py`` turns
:class:`InputsChanged` into the status ``incorrect``.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from onelaunch.wording import listing
from onelaunch.workbench.verify.calls import Inputs, OutputTensors
from onelaunch.workbench.verify.poison import poison

POSITIONS = 65_521
"""Number of positions of a window, which is the number of contents before the values are mixed again."""

UNKNOWN = -1
"""Position of the windows in sets that were filled before the values were mixed again."""

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtypes by size in bytes. Values are copied and compared as integers, so that NaN equals itself."""


class InputsChanged(RuntimeError):
    """Error of a candidate that changed its inputs while it was timed. The message names them."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(f"It changed its input{'s' if len(names) > 1 else ''} {listing(names)} while it was timed.")


class Contents:
    """Contents of the input sets of one case.

    Args:
        drawn: Inputs whose contents are judged. They are the contents of all sets at first.
        other: Inputs of the same case from another seed, or ``None``. A tensor whose contents are the same in both, such as a
            table or a workspace, is structure and keeps its contents. Without it every floating-point tensor changes. Integers
            never do, nor do tensors that are not dense.
        seed: Seed of the mixed values and of ``random``, by which samplers choose sets and calls.
    """

    def __init__(self, drawn: Inputs, other: Inputs | None = None, seed: int = 0) -> None:
        self.random = random.Random(seed)  # noqa: S311 - chooses the calls to judge, and guards no secret
        self._drawn = dict(drawn.named_tensors())
        others = dict(other.named_tensors()) if other is not None else {}
        self._values = {
            name: _flat(tensor)
            for name, tensor in self._drawn.items()
            if tensor.is_floating_point() and tensor.numel() and _dense(tensor) and not _same(tensor, others.get(name))
        }
        """Values of each tensor that changes, as a flat integer view in the order of its memory."""
        self._sample = {name: self._some_of(values, others.get(name)) for name, values in self._values.items()}
        """Values from which the ends of the buffers are drawn: some of this tensor's, and some of the other seed's."""
        self._buffers: dict[str, torch.Tensor] = {}
        self._position = POSITIONS
        self._positions: dict[int, int] = {}
        """Position of the windows in each set, by the ``id`` of the set; none for a set that holds the judged contents."""
        self._targets: dict[int, list[tuple[str, torch.Tensor]]] = {}
        """Tensors of each set that change, as flat integer views."""

    @torch.no_grad()
    def renew(self, sets: Sequence[Inputs], *, all_of_it: bool = False) -> None:
        """Give each set contents that no call has seen. On a GPU the copies are enqueued on the current stream.

        Args:
            sets: Sets to change.
            all_of_it: Whether to restore the tensors that keep their contents too, in case a call has changed them.
        """
        into, values = [], []
        for one in sets:
            position = self._next()
            self._positions[id(one)] = position
            for name, target in self._changing(one):
                into.append(target)
                values.append(self._buffers[name].narrow(0, position, target.numel()))
            if all_of_it:
                for name, tensor in one.named_tensors():
                    if name not in self._values:
                        tensor.copy_(self._drawn[name])
        if into and into[0].is_cuda:
            torch._foreach_copy_(into, values)  # the only function that copies many tensors by few launches
        else:
            for target, window in zip(into, values, strict=True):
                target.copy_(window)

    def load(self, one: Inputs, judged: Inputs) -> None:
        """Give a set the contents that are judged."""
        one.load(judged)
        self._positions.pop(id(one), None)

    def changed(self, one: Inputs) -> list[str]:
        """Return the names of the tensors of a set that do not hold what was written there. On a GPU this waits for it."""
        position = self._positions.get(id(one))
        changing = dict(self._changing(one))
        found = []
        for name, tensor in one.named_tensors():
            if position == UNKNOWN and name in changing:
                continue
            if position is not None and name in changing:
                same = torch.equal(changing[name], self._buffers[name].narrow(0, position, tensor.numel()))
            else:
                same = _same(tensor, self._drawn[name])
            if not same:
                found.append(name)
        return found

    def _next(self) -> int:
        """Return the next position. After the last one, values are drawn into the ends of the buffers anew."""
        if self._position >= POSITIONS:
            for name, values in self._values.items():
                sample = self._sample[name]
                end = sample[self._indices(len(sample), POSITIONS, sample.device)]
                if name in self._buffers:
                    self._buffers[name][len(values) :].copy_(end)
                else:
                    self._buffers[name] = torch.cat((values, end))
            self._positions = dict.fromkeys(self._positions, UNKNOWN)
            self._position = 1  # at position 0 the window holds the judged contents
        self._position += 1
        return self._position - 1

    def _some_of(self, values: torch.Tensor, other: torch.Tensor | None) -> torch.Tensor:
        """Return as many values as a buffer's end takes, from one tensor or, in equal parts, from two."""
        parts = [values] if other is None or other.shape.numel() != len(values) or not _dense(other) else [values, _flat(other)]
        return torch.cat([part[self._indices(len(part), POSITIONS // len(parts), part.device)] for part in parts])

    def _indices(self, below: int, count: int, device: torch.device) -> torch.Tensor:
        """Return ``count`` random indices below a bound, drawn on the CPU so that every device has the same."""
        generator = torch.Generator().manual_seed(self.random.randrange(2**31))
        return torch.randint(below, (count,), generator=generator).to(device)

    def _changing(self, one: Inputs) -> list[tuple[str, torch.Tensor]]:
        if id(one) not in self._targets:
            tensors = dict(one.named_tensors())
            self._targets[id(one)] = [(name, _flat(tensors[name])) for name in self._values]
        return self._targets[id(one)]


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a dense tensor in the order of its memory, viewed as integers."""
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    return flat.view(_INTEGERS[tensor.dtype.itemsize])


def _dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements fill a block of memory, each once."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _same(one: torch.Tensor, other: torch.Tensor | None) -> bool:
    """Return whether two tensors have the same shape and the same bits."""
    if other is None or one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.is_floating_point():
        integers = _INTEGERS[one.dtype.itemsize]
        return torch.equal(one.detach().view(integers), other.detach().view(integers))
    return torch.equal(one, other)


def poison_outputs(outputs: OutputTensors, inputs: Inputs) -> None:
    """Fill outputs with NaN, except those that share memory with an input or among their own elements."""
    given = {tensor.untyped_storage().data_ptr() for _, tensor in inputs.named_tensors()}
    for value in outputs.values():
        if value is not None and _own_memory_per_element(value) and value.untyped_storage().data_ptr() not in given:
            poison(value)


def _own_memory_per_element(tensor: torch.Tensor) -> bool:
    """Return whether each element has its own memory. Expanded tensors share it and cannot be filled."""
    return all(step or size < 2 for step, size in zip(tensor.stride(), tensor.shape, strict=True))
