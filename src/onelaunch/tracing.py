"""Questions about how PyTorch is running the code right now: eagerly, for a tracer, or under a function transform.

The predicates are called in every operation, so each costs well under a microsecond. PyTorch has no public names for them.
"""

from __future__ import annotations

import torch


def is_traced(first: object = None) -> bool:
    """Return whether operations are recorded or imitated instead of run.

    True inside ``torch.compile``, ``make_fx`` and FakeTensorMode (any active dispatch mode), and for a tensor that dispatches
    for itself, such as a FakeTensor that outlived its mode.

    Args:
        first: A tensor of the call, usually its first one.
    """
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():  # noqa: SLF001
        return True
    dispatches = getattr(type(first), "__torch_dispatch__", torch.Tensor.__torch_dispatch__)
    return dispatches is not torch.Tensor.__torch_dispatch__


def is_transformed() -> bool:
    """Return whether the code runs inside a transform of ``torch.func``: ``vmap``, ``grad``, ``jvp``...

    Dynamo traces transforms itself, and cannot look at their stack: while it compiles, the answer is no.
    """
    return not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None  # noqa: SLF001
