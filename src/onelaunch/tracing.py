"""Questions about how PyTorch is running the code right now: eagerly, for a tracer, or under a function transform.

The predicates are called in every operation, so each costs a fraction of a microsecond. PyTorch has no public names for what they
ask. While Dynamo compiles, they answer before they reach anything that Dynamo cannot look at.
"""

from __future__ import annotations

import torch
from torch.compiler import is_compiling

_dispatch_modes = torch._C._len_torch_dispatch_stack  # noqa: SLF001
_transform = torch._C._functorch.peek_interpreter_stack  # noqa: SLF001
_plain = torch.Tensor.__torch_dispatch__


_active = torch._C._get_dispatch_mode  # noqa: SLF001
_TRACERS = tuple(getattr(torch._C._TorchDispatchModeKey, name) for name in ("FAKE", "PROXY", "FUNCTIONAL"))  # noqa: SLF001
"""Dispatch modes under which values are unknown. Under others, such as a FLOP counter, operations run."""


def is_traced(first: object = None) -> bool:
    """Return whether operations are recorded or imitated instead of run.

    True inside ``torch.compile``, ``make_fx`` and FakeTensorMode, and for a tensor that dispatches for itself, such as a
    FakeTensor that outlived its mode.

    Args:
        first: A tensor of the call, usually its first one.
    """
    if is_compiling() or (_dispatch_modes() and any(_active(key) is not None for key in _TRACERS)):
        return True
    return isinstance(first, torch.Tensor) and type(first).__torch_dispatch__ is not _plain


def is_transformed() -> bool:
    """Return whether the code runs inside a transform of ``torch.func``: ``vmap``, ``grad``, ``jvp``..."""
    return not is_compiling() and _transform() is not None
