"""Workaround for Hopper: make Triton use warp-level matrix instructions (``mma.sync``) where its WGMMA code is wrong.

On Hopper, ``tl.dot`` becomes WGMMA wherever four warps and 64 rows allow it. Two patterns then go wrong, with Triton 3.6 at
least:

- products on both sides of a branch: the assembler leaves descriptors of one side for the other, which gives illegal addresses;
- products with a masked and transposed operand, which give wrong numbers.

docs/notebook/gla.md describes both. ``launch.py`` and ``compile.py`` enter :func:`warp_mma` for kernels whose launch asks for
warp-level instructions.
"""

from __future__ import annotations

from onelaunch.launch.switch import Switch

_SWITCH = Switch("DISABLE_MMA_V3", "1")
"""Environment variable of Triton that turns WGMMA off. It is part of the key of Triton's compile cache."""


def warp_mma() -> Switch:
    """Return the context in which kernels are compiled with warp-level matrix instructions, as on architectures before Hopper.

    The variable is set for the whole process. A kernel that another thread compiles meanwhile is correct too, but may be slower.
    """
    return _SWITCH
