"""Code generation for replays: the recorded steps of a plan become one Python function without a loop over steps.

Interpreting a list of steps (reading and unpacking them, looking tensors up by number) took half of the host time of a replay.
In the generated function a tensor is a local variable, and sizes, strides and offsets are constants. :mod:`onelaunch.launch.plan`
records the steps and calls :func:`write`. The source holds only numbers and names that are generated here. Everything else, such
as PyTorch's functions and dtypes, is a global variable of the function, so no input can inject code.
"""

from __future__ import annotations

import keyword
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

_reinterpret = getattr(torch._C._dynamo.guards, "_reinterpret_tensor", None)  # noqa: SLF001
"""Function from a tensor, sizes, strides and an offset in elements to a tensor on the same memory; ``None`` if PyTorch has none.

The code that ``torch.compile`` generates calls it. It takes less than half of the host time of ``as_strided``, since autograd
does not record it.
"""


@dataclass(frozen=True)
class View:
    """Tensor to make from a source: the source itself, or a view of it."""

    source: int
    size: tuple[int, ...] | None = None
    """Size of the view; ``None`` for the source itself."""
    stride: tuple[int, ...] = ()
    offset: int = 0
    """Elements from the first element of the source."""


def strided(tensor: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int) -> torch.Tensor:
    """Return a view that begins ``offset`` elements after a tensor's first element, by an operator that autograd records."""
    return tensor.as_strided(size, stride, tensor.storage_offset() + offset)


def viewer() -> Callable[[torch.Tensor, Sequence[int], Sequence[int], int], torch.Tensor]:
    """Return the faster function for views that autograd need not record, with the arguments of :func:`strided`."""
    return _reinterpret or strided


DIRECT: Mapping[Any, Callable[..., Any]] = {
    torch.ops.aten.mm.default: torch.mm,
    torch.ops.aten.mm.out: torch.mm,
    torch.ops.aten.addmm.default: torch.addmm,
    torch.ops.aten.bmm.default: torch.bmm,
    torch.ops.aten.sum.dim_IntList: torch.sum,
}
"""PyTorch's functions in place of the operators that they call: calling an operator object takes twice the host time."""

ALLOCATE, START, OPERATE, PROVIDE, FREE = range(5)
"""Codes of steps: the first element of a tuple.

Tensors are numbered in the order in which steps make them, after the inputs.

- ``(ALLOCATE, size, stride, dtype)`` allocates the next tensor.
- ``(PROVIDE, function, arguments)`` calls a function that returns the next tensor.
- ``(FREE, number)`` drops the reference to a tensor.
- ``(START, launch, words, sources)`` launches a kernel. ``launch`` is its index in the packet of kernel arguments. Before that it
  writes pointers into the packet: ``words`` holds triples of a word's index, a tensor's number, and an offset in bytes.
- ``(OPERATE, operator, arguments, keywords, single, new)`` calls an operator with arguments in which a :class:`View` stands for a
  tensor. ``single`` is the flag that it returns one tensor, and ``new`` flags the results that are new tensors.
"""

Step = tuple[Any, ...]
Replay = Callable[[Sequence[torch.Tensor], Sequence[int], Any, Any, Any, Any], Any]
"""Replay of a call, a function that returns the call's results.

Its arguments are the call's tensors, their addresses, the words of the packet of kernel arguments, the launches of the packet,
the launch function, and a function that is called with an error code of a launch and the launch's arguments.
"""


def write(
    steps: Sequence[Step],
    inputs: int,
    results: Sequence[View | None],
    make: Callable[[list[Any]], Any] | None,
    empty: Callable[..., torch.Tensor],
) -> Replay:
    """Return the function that repeats steps for the tensors of a call.

    Args:
        steps: Steps in order.
        inputs: Number of tensors of a call. These are the first tensors.
        results: Results of the call; ``None`` for an absent one.
        make: Function from the list of results to what the call returns; ``None`` to return the only result.
        empty: Function that allocates memory of a size, strides and dtype.
    """
    writer = _Writer(steps, inputs, results)
    writer.names |= {"empty": empty, "make": make, "strided": strided, "view": viewer()}
    for step in steps:
        writer.add(step)
    writer.returns(results, make)
    source = "\n    ".join(["def replay(tensors, addresses, words, launches, launch, failed):", *writer.lines])
    exec(compile(source, "<replay>", "exec"), writer.names)  # noqa: S102 - the source holds generated names and numbers alone
    return writer.names["replay"]


class _Writer:
    """Generator of the lines of a replay. Tensor 3 is the local variable ``t3``, and its address ``a3``."""

    def __init__(self, steps: Sequence[Step], inputs: int, results: Sequence[View | None]) -> None:
        self.names: dict[str, Any] = {}
        """Values that the written function reads as global variables."""
        self._addressed = {source for step in steps if step[0] == START for _, source, _ in step[2]}
        self._count = inputs
        self._results = [each.source for each in results if each is not None]
        self._inputs = inputs
        launches = sum(step[0] == START for step in steps)
        self.lines = [
            f"{_targets(f't{at}' for at in range(inputs))} = tensors" if inputs else "",
            f"{_targets(f'a{at}' for at in range(inputs))} = addresses" if inputs else "",
            f"{_targets(f'(c{at}, f{at}, p{at})' for at in range(launches))} = launches" if launches else "",
        ]

    def add(self, step: Step) -> None:
        """Write one step."""
        code = step[0]
        if code == ALLOCATE:
            _, size, stride, dtype = step
            self._new(f"empty({_numbers(size)}, {_numbers(stride)}, {self._name(dtype)})")
        elif code == START:
            _, launch, words, _ = step
            for word, source, offset in words:
                self.lines.append(f"words[{int(word)}] = a{int(source)}" + (f" + {int(offset)}" if offset else ""))
            given = f"c{launch}, f{launch}, p{launch}"
            self.lines += [f"error = launch({given}, None)", f"if error: failed(error, ({given}))"]
        elif code == OPERATE:
            self._operate(*step[1:])
        elif code == PROVIDE:
            _, function, arguments = step
            self._new(f"{self._name(function)}({', '.join(self._name(each) for each in arguments)})")
        else:
            self.lines.append(f"t{int(step[1])} = None")

    def _operate(self, operator: Any, arguments: Any, keywords: Any, single: bool, new: tuple[bool, ...]) -> None:
        """Write the call of an operator."""
        given = [self._argument(each) for each in arguments]
        for name, each in keywords:
            # Names of PyTorch's parameters are Python names, but one of them is "from".
            value = self._argument(each)
            given.append(f"**{{{name!r}: {value}}}" if keyword.iskeyword(name) else f"{name}={value}")
        call = f"{self._name(DIRECT.get(operator, operator))}({', '.join(given)})"
        if single and new == (True,):
            self._new(call)
        elif not any(new):
            self.lines.append(call)
        else:
            self.lines.append(f"made = {call}")
            for at, is_new in enumerate(new):
                if is_new:
                    self._new("made" if single else f"made[{at}]")
            self.lines.append("made = None")

    def _new(self, expression: str) -> None:
        """Write the assignment of an expression to the next tensor, and of its address if a kernel takes it."""
        self.lines.append(f"t{self._count} = {expression}")
        if self._count in self._addressed:
            self.lines.append(f"a{self._count} = t{self._count}.data_ptr()")
        self._count += 1

    def _name(self, value: Any) -> str:
        """Return a name of a value."""
        name = f"k{len(self.names)}"
        self.names[name] = value
        return name

    def _argument(self, template: Any) -> str:
        """Return the expression for an operator's argument, in which views stand for tensors."""
        if type(template) is View:
            return self._view(template, "view")
        if type(template) is list:
            return f"[{', '.join(self._argument(each) for each in template)}]"
        return self._name(template)

    def _view(self, view: View, function: str) -> str:
        """Return the expression of a view."""
        tensor = f"t{view.source}"
        if view.size is None:
            return tensor
        return f"{function}({tensor}, {_numbers(view.size)}, {_numbers(view.stride)}, {int(view.offset)})"

    def returns(self, results: Sequence[View | None], make: Callable[[list[Any]], Any] | None) -> None:
        """Write the return statement.

        A result that shares its memory with no other result and no input need not be a view to autograd. The others are, so that
        PyTorch shares their version counters.
        """
        made = []
        for each in results:
            if each is None:
                made.append("None")
                continue
            alone = self._results.count(each.source) == 1 and each.source >= self._inputs
            made.append(self._view(each, "view" if alone else "strided"))
        listed = "".join(f"{each}, " for each in made)
        if make is None:
            self.lines.append(f"return {made[0]}")
        elif make is tuple:
            self.lines.append(f"return ({listed})")
        else:
            self.lines.append(f"return [{listed}]" if make is list else f"return make([{listed}])")


def _targets(names: Any) -> str:
    """Return names as targets of an assignment that unpacks a sequence."""
    return "".join(f"{name}, " for name in names)


def _numbers(values: Sequence[int]) -> str:
    """Return the source of a tuple of integers."""
    return "(" + "".join(f"{int(value)}, " for value in values) + ")"
