"""Queries: calls without their tensors, which decide what can run and what is fastest."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, ParamSpec, Protocol, TypeAlias, TypeVar

import torch

from onelaunch.errors import ArgumentError
from onelaunch.tracing import is_traced
from onelaunch.wording import did_you_mean, listing

Direction = Literal["forward", "forward_backward"]


DIRECTIONS: tuple[Direction, ...] = ("forward", "forward_backward")


AUTO = "auto"
"""Name by which a call asks for the variant that the dispatcher chooses."""


NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")
"""Pattern of the names of operations, variants and controls: a letter, then at most 63 letters, digits, ``_``, ``.`` and ``-``.
They become file names, rows of reports and words of the command line."""


P = ParamSpec("P")


R = TypeVar("R")


Outputs: TypeAlias = tuple[str, ...] | Callable[[Mapping[str, Any]], tuple[str, ...]]
"""Names of an operation's results; or, where a call decides what it gives, the function that tells them from its arguments."""


Shapes: TypeAlias = tuple[tuple[int, ...] | None, ...]
"""Shapes of an operation's results, in the order of its outputs; ``None`` where a call does not ask for a result."""


def names_of(outputs: Outputs, arguments: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the results of a call with these arguments."""
    return outputs(arguments) if callable(outputs) else outputs


class Query(NamedTuple):
    """Call without its tensors: the facts that decide which variant may run and which is fastest. Hashable: the dispatch key."""

    operation: str
    device: str
    """Name of the device as PyTorch prints it: ``cpu``, ``cuda:0``."""
    dtype: torch.dtype
    sizes: tuple[int, ...]
    """Sizes in the order of ``Operation.dimensions``."""
    grad: bool = False
    flags: tuple[str, ...] = ()
    """Further facts, which the operation defines, such as ``packed`` or ``initial_state``."""

    @property
    def device_type(self) -> str:
        return self.device.partition(":")[0]

    @property
    def direction(self) -> Direction:
        return "forward_backward" if self.grad else "forward"


def fixed(*sizes: int) -> tuple[int, ...]:
    """Return sizes as plain numbers: where a tracer keeps symbols, each set of sizes gets a graph of its own."""
    if not torch.compiler.is_compiling() and all(type(size) is int for size in sizes):
        return sizes
    from torch.fx.experimental.symbolic_shapes import guard_scalar  # slow to import, and there already when compiling

    return tuple(int(guard_scalar(size)) for size in sizes)


def remembered(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator: keep the answers of a function of hashable facts, such as a contract's checks and the query that follows.

    Errors are not kept. For a tracer, sizes may be symbols, which have no hash; its guards remember instead.
    """
    kept = functools.lru_cache(maxsize=4096)(function)

    @functools.wraps(function)
    def ask(*args: P.args, **kwargs: P.kwargs) -> R:
        return function(*args, **kwargs) if is_traced() else kept(*args, **kwargs)

    return ask


class Call(Protocol):
    """The checked arguments of one call of an operation."""

    def query(self) -> Query: ...


def state_flags(packed: bool, initial_state: bool, final_state: bool) -> tuple[str, ...]:
    """Return the flags of a query of an operation with a recurrent state."""
    return ("packed",) * packed + ("initial_state",) * initial_state + ("final_state",) * final_state


def parse_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """Return the dtype of a name such as ``"float16"``, or the dtype given; anything else is an :class:`ArgumentError`."""
    if isinstance(dtype, torch.dtype):
        return dtype
    known = ("float16", "bfloat16", "float32")
    if dtype not in known:
        raise ArgumentError(f"dtype is {dtype!r}; it must be one of {listing(known)}.{did_you_mean(str(dtype), known)}")
    return getattr(torch, dtype)
