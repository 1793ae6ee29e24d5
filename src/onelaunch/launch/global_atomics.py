"""Workaround for AMD GPUs: compile atomic operations as global instructions instead of buffer instructions.

For a tensor below 2 GiB, which 32-bit offsets can address, Triton replaces global instructions by buffer instructions. For an
atomic exchange, Triton 3.7.1 then names an LLVM intrinsic that does not exist (``llvm.amdgcn.raw.ptr.buffer.atomic.exch``), and
the kernel does not compile. The look-back of :mod:`onelaunch.kernels.scan` publishes its words with atomic exchanges.
``launch.py`` and ``compile.py`` enter :func:`global_atomics` for AMD GPUs.
"""

from __future__ import annotations

from onelaunch.launch.switch import Switch

_SWITCH = Switch("AMDGCN_USE_BUFFER_ATOMICS", "0")
"""Environment variable of Triton that turns buffer instructions off for atomic operations only."""


def global_atomics() -> Switch:
    """Return the context in which kernels compiled for AMD use global instructions for atomic operations."""
    return _SWITCH
