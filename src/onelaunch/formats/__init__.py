"""Quantized matrices: float8 with one scale or a scale per row, and NVFP4, as operations take them and checkpoints hold them.

An operand that consists of several tensors is one immutable value: :class:`Fp8Tensor` or :class:`NVFP4Tensor`. Its constructor
checks the tensors and names what is wrong. Both classes are :class:`onelaunch.operation.Bundle` and list their tensors, so code
that copies or casts arguments need not know the format. Of the operations, ``swiglu`` takes them.
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
