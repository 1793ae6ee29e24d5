"""Products of single warps (``mma.sync``), where Triton's use of WGMMA cannot be relied on.

On Hopper GPUs ``tl.dot`` becomes WGMMA wherever four warps and 64 rows allow it. Two ways of writing a kernel then go wrong, with
Triton 3.6 at least: products on both sides of a branch (the assembler leaves descriptors of one side for the other: illegal
addresses), and products of a masked and transposed operand (wrong numbers). docs/notebook/gla.md has both.
"""

from __future__ import annotations

from onelaunch.launch.switch import Switch

_SWITCH = Switch("DISABLE_MMA_V3", "1")
"""Environment variable of Triton that turns WGMMA off. It is part of the keys of Triton's cache."""


def warp_mma() -> Switch:
    """Let what is compiled inside take each warp's own matrix instructions, as before Hopper.

    The switch holds for the whole process: a kernel that another thread compiles meanwhile is right as well, but may be slower.
    """
    return _SWITCH
