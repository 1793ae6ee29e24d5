"""Kernels in one configuration each, so that they can be compiled and inspected where nothing can run them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from onelaunch.nvrtc import Source


@dataclass(frozen=True)
class KernelBuild:
    """One Triton kernel of a variant in one configuration: enough to compile it on a machine without a GPU."""

    name: str
    kernel: Any
    """A ``triton.jit`` function."""
    signature: Mapping[str, str | tuple[str, ...]]
    """Triton type of every argument, ``constexpr`` for constants; of an argument that is a tuple, that of each of its members,
    ``constexpr`` where one is ``None``."""
    constants: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    matrix: bool = False
    """Whether matrix instructions must be in the machine code."""
    by_warps: bool = False
    """Whether they are those of single warps on every NVIDIA architecture but Blackwell, see ``ops/warp_products.py``."""


@dataclass(frozen=True)
class CudaBuild:
    """One CUDA C++ kernel of a variant in one configuration: enough to compile it on a machine without a GPU."""

    name: str
    source: Source
    threads: int
    """Of a block."""
    shared_bytes: int = 0
    """Dynamic, of a block."""
    matrix: bool = False
    """Whether matrix instructions must be in the machine code."""
    by_warps: bool = False
    """Whether they are those of single warps (``mma.sync``) on every architecture."""


Build: TypeAlias = KernelBuild | CudaBuild
"""A kernel as a variant lists it, by :meth:`onelaunch.operation.Variant.kernels`."""
