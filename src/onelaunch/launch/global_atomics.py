"""Atomic operations by global instructions on AMD GPUs, where Triton cannot compile all of them as buffer instructions.

Triton knows of a tensor below 2 GiB that 32 bits address it, and then replaces global instructions by buffer instructions. For an
atomic exchange, which the look-back of :mod:`onelaunch.kernels.scan` publishes its words by, Triton 3.7.1 names an intrinsic of
LLVM that does not exist (``llvm.amdgcn.raw.ptr.buffer.atomic.exch``), and the kernel does not compile.
"""

from __future__ import annotations

from onelaunch.launch.switch import Switch

_SWITCH = Switch("AMDGCN_USE_BUFFER_ATOMICS", "0")
"""Environment variable of Triton that turns buffer instructions off for atomic operations alone."""


def global_atomics() -> Switch:
    """Let what is compiled inside for AMD make its atomic operations by global instructions."""
    return _SWITCH
