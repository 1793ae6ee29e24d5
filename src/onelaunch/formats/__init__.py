"""Matrices in few bits: float8 with a scale for all or for each row, and NVFP4, as operations take and checkpoints hold them.

An operand of several tensors is one value here: :class:`Fp8Tensor`, :class:`NVFP4Tensor`. Both are immutable, name what is wrong
when they are made, and say what each tensor holds, so that whoever copies or casts arguments need not know the format.
"""

from onelaunch.formats.float8 import Fp8Tensor, quantize_fp8
from onelaunch.formats.nvfp4 import BLOCK, NVFP4Tensor, dequantize_nvfp4, load_nvfp4, quantize_nvfp4, save_nvfp4
from onelaunch.formats.swizzle import ATOM_ROWS, ATOM_SCALES, padded, round_up, swizzle, unswizzle

__all__ = [
    "ATOM_ROWS",
    "ATOM_SCALES",
    "BLOCK",
    "Fp8Tensor",
    "NVFP4Tensor",
    "dequantize_nvfp4",
    "load_nvfp4",
    "padded",
    "quantize_fp8",
    "quantize_nvfp4",
    "round_up",
    "save_nvfp4",
    "swizzle",
    "unswizzle",
]
