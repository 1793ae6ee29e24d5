"""Dispatch keys: facts about a call, without its tensors, that decide which variants can run and which is fastest.

``contract.py`` of each operation makes the :class:`Query` of a call, and its ``reference.py`` that of a case;
``gla_layer/autograd.py`` makes those of the layer's parts. The dispatcher, the variants' predicates and the planner of studies
read it. Any module of an operation may name the types of this file, and call :func:`fixed`, :func:`constant` and
:func:`state_flags` or cache by :func:`remembered`. The dispatcher, the workbench, the commands, ``decode`` and this package name
calls by the other functions.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, ParamSpec, Protocol, TypeAlias, TypeVar, cast

import torch

from onelaunch.errors import ArgumentError
from onelaunch.tracing import is_traced
from onelaunch.wording import did_you_mean, listing

Direction = Literal["forward", "forward_backward"]
"""Direction of a call: the forward pass alone, or with the backward pass."""

DIRECTIONS: tuple[Direction, ...] = ("forward", "forward_backward")
"""All directions of a call."""

AUTO = "auto"
"""Value of ``variant`` with which a call lets the dispatcher choose."""

NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")
"""Pattern of the names of operations, variants and controls: a letter, then at most 63 letters, digits, ``_``, ``.`` and ``-``.
They become file names, rows of reports and words of the command line."""

P = ParamSpec("P")
R = TypeVar("R")
N = TypeVar("N")

Outputs: TypeAlias = tuple[str, ...] | Callable[[Mapping[str, Any]], tuple[str, ...]]
"""Names of an operation's results, or a function from a call's arguments to them if they depend on the call."""

Shapes: TypeAlias = tuple[tuple[int, ...] | None, ...]
"""Shapes of an operation's results, in the order of its outputs; ``None`` for a result that a call does not ask for."""


def names_of(outputs: Outputs, arguments: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the results of a call with these arguments."""
    return outputs(arguments) if callable(outputs) else outputs


class Query(NamedTuple):
    """Hashable dispatch key of a call: the facts that decide which variants can run and which is fastest."""

    operation: str
    """Name of the operation."""
    device: str
    """Name of the device as PyTorch prints it: ``cpu``, ``cuda:0``."""
    dtype: torch.dtype
    """Dtype of the call's inputs; of its result if ``x`` is quantized (``swiglu``)."""
    sizes: tuple[int, ...]
    """Sizes in the order of ``Operation.dimensions``. Some may be symbolic while the call is traced, see :func:`fixed`."""
    grad: bool = False
    """Flag that the call must be differentiable."""
    flags: tuple[str, ...] = ()
    """Further facts that the operation defines, such as ``packed`` or ``initial_state``."""

    @property
    def device_type(self) -> str:
        return self.device.partition(":")[0]

    @property
    def direction(self) -> Direction:
        return "forward_backward" if self.grad else "forward"


class SymbolicSizes(tuple[int, ...]):
    """Sizes of a call that is traced otherwise than by Dynamo, some of which may be symbolic, so that they have no hash."""

    __slots__ = ()


def fixed(*sizes: int, free: int = 0) -> tuple[int, ...]:
    """Return sizes as plain integers. Under a tracer with symbolic sizes, this specializes the graph to these sizes.

    The first ``free`` sizes may stay symbolic: those that differ from call to call, such as the number of steps. Those behind
    them, such as the size of heads, belong to a model.
    """
    if not torch.compiler.is_compiling() and all(type(size) is int for size in sizes):
        return sizes
    from torch.fx.experimental.symbolic_shapes import guard_scalar  # slow to import, and loaded already when code is traced

    known = (*sizes[:free], *[int(guard_scalar(size)) for size in sizes[free:]])
    return known if torch.compiler.is_dynamo_compiling() else SymbolicSizes(known)


def constant(number: N) -> N:
    """Return a number of a model, such as an epsilon, as a plain one: ``torch.compile(dynamic=True)`` makes it symbolic.

    PyTorch then traces once more, with the number as a constant.
    """
    if not (torch.compiler.is_dynamo_compiling() and isinstance(number, (int, float))):
        return number
    from torch.fx.experimental.symbolic_shapes import guard_scalar

    return cast("N", guard_scalar(number))


def remembered(function: Callable[P, R]) -> Callable[P, R]:
    """Cache the results of the decorated function of hashable facts, such as a contract's checks and the resulting query.

    Errors are not cached. The cache is not used while code is traced, since symbolic sizes have no hash.
    """
    kept = functools.lru_cache(maxsize=4096)(function)

    @functools.wraps(function)
    def ask(*args: P.args, **kwargs: P.kwargs) -> R:
        return function(*args, **kwargs) if is_traced() else kept(*args, **kwargs)

    return ask


class Call(Protocol):
    """Protocol of the checked arguments of one call of an operation."""

    def query(self) -> Query: ...


def state_flags(packed: bool, initial_state: bool, final_state: bool) -> tuple[str, ...]:
    """Return the query flags of a call of an operation with a recurrent state."""
    return ("packed",) * packed + ("initial_state",) * initial_state + ("final_state",) * final_state


def parse_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """Return the dtype of a name such as ``"float16"``, or a given dtype itself; raise :class:`ArgumentError` otherwise."""
    if isinstance(dtype, torch.dtype):
        return dtype
    known = ("float16", "bfloat16", "float32")
    if dtype not in known:
        raise ArgumentError(f"dtype is {dtype!r}; it must be one of {listing(known)}.{did_you_mean(str(dtype), known)}")
    return getattr(torch, dtype)
