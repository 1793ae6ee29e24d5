"""Predicates that tell how PyTorch runs the code now: eagerly, for a tracer, or under a function transform.

The checks, the dispatch and the launches of every call ask them, so each takes a fraction of a microsecond. The chunked forms in
plain PyTorch ask them too. They use private names of PyTorch, which has no public ones for this. While Dynamo compiles,
:func:`is_traced` and :func:`is_transformed` return before they reach a call that Dynamo cannot trace. :func:`sees_operators`
does not: it is called in eager code only.
"""

from __future__ import annotations

import torch
from torch.compiler import is_compiling

_dispatch_modes = torch._C._len_torch_dispatch_stack  # noqa: SLF001
_transform = torch._C._functorch.peek_interpreter_stack  # noqa: SLF001
_plain = torch.Tensor.__torch_dispatch__  # that of all tensors whose class does not define its own
_active = torch._C._get_dispatch_mode  # noqa: SLF001
_TRACERS = tuple(getattr(torch._C._TorchDispatchModeKey, name) for name in ("FAKE", "PROXY", "FUNCTIONAL"))  # noqa: SLF001
"""Dispatch modes that fake or record operations, so that values must not be read. Others, such as a FLOP counter, run them."""


def is_traced(first: object = None) -> bool:
    """Return whether operations are recorded or faked instead of run.

    The result is true inside ``torch.compile``, ``make_fx`` and FakeTensorMode. It is also true for a tensor subclass that has
    its own ``__torch_dispatch__``, such as a FakeTensor that is used outside its mode.

    Args:
        first: A tensor of the call, usually the first one.
    """
    if is_compiling() or (_dispatch_modes() and any(_active(key) is not None for key in _TRACERS)):
        return True
    return isinstance(first, torch.Tensor) and type(first).__torch_dispatch__ is not _plain


def is_transformed() -> bool:
    """Return whether the code runs inside a transform of ``torch.func`` such as ``vmap``, ``grad`` or ``jvp``."""
    return not is_compiling() and _transform() is not None


def sees_operators() -> bool:
    """Return whether something sees every operator of PyTorch that eager code calls.

    That is a dispatch mode, such as a tracer, a counter or a recorder, or a transform of ``torch.func``.
    """
    return _dispatch_modes() > 0 or _transform() is not None
