"""Compilable source of the Hopper matrix product for one configuration, and tensor maps of its operands and results.

``launch_hopper.py`` of ``ops/swiglu`` and of ``ops/projections`` call both functions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from onelaunch import cuda
from onelaunch.kernels.gemm_sm90.config import GemmConfig, Multicast, Schedule
from onelaunch.kernels.gemm_sm90.wgmma import wgmma_header
from onelaunch.kernels.tma import address, tensor_map
from onelaunch.launch.launch import CudaKernel, Mma

ELEMENTS = {torch.bfloat16: 0, torch.float16: 1, torch.float8_e4m3fn: 2}
"""Values of the macros ELEMENT and RESULT: the enumerators BFLOAT16, FLOAT16 and E4M3 of ``tile.cuh``."""

_SCHEDULES: dict[Schedule, int] = {"stream_k": 0, "persistent": 1, "split_k_cluster": 2, "static_persistent": 3}
"""Values of the macro SCHEDULE: the enumerators of the same names in ``tile.cuh``."""

_MULTICASTS: dict[Multicast, int] = {"nothing": 0, "a": 1, "b": 2}
"""Values of the macro MULTICAST: the enumerators NOTHING, OPERAND_A and OPERAND_B of ``tile.cuh``."""

_HEADERS = ("tile.cuh", "scheduler.cuh", "mainloop.cuh", "reduction.cuh")
"""Headers that every configuration includes."""


@dataclass(frozen=True, eq=False, slots=True)
class Gemm:
    """Matrix product kernel and the configuration that it was made for."""

    config: GemmConfig
    kernel: CudaKernel


def gemm_of(
    config: GemmConfig,
    epilogue: str,
    kinds: tuple[cuda.Kind, ...],
    *,
    headers: tuple[tuple[str, str], ...] = (),
    **defines: int,
) -> Gemm:
    """Return the kernel ``gemm.cu`` with an operation's operands and epilogue, not compiled yet.

    The result is not cached here. The callers, ``gemm_for`` in ``launch_hopper.py`` of ``ops/swiglu`` and of
    ``ops/projections``, cache it.

    Args:
        config: Configuration of the kernel.
        epilogue: Name of the two files of the operation in ``operands/`` and ``epilogue/``, without ``.cuh``: ``"swiglu"``
            or ``"segments"``.
        kinds: Kinds of the kernel parameters, in the order of ``PARAMETERS`` in the operands' file.
        headers: Names and contents of generated headers that those files include.
        defines: Values of further macros that those files need, by name.
    """
    package = "onelaunch.kernels.gemm_sm90"
    narrow = config.narrow or config.b_rows
    widths = (config.b_rows,) if narrow == config.b_rows else (config.b_rows, narrow)
    files = (*_HEADERS, *(("nvfp4.cuh",) if config.nvfp4 else ()), f"operands/{epilogue}.cuh", f"epilogue/{epilogue}.cuh")
    sources = (
        cuda.include("hopper.cuh"),
        ("wgmma.cuh", wgmma_header(config.element, widths, registers=config.nvfp4)),
        *((name, cuda.read(package, name)) for name in files),
        *headers,
    )
    macros: dict[str, str | int] = {
        "A_ROWS": config.a_rows, "B_ROWS": config.b_rows, "NARROW": narrow, "SPLIT": config.split, "CHUNKS": config.chunks,
        "STAGES": config.stages, "STORE_BYTES": config.store_bytes, "SCHEDULE": _SCHEDULES[config.schedule],
        "MULTICAST": _MULTICASTS[config.multicast], "ELEMENT": ELEMENTS[config.element], "RESULT": ELEMENTS[config.result],
        "NVFP4": int(config.nvfp4), "OPERANDS": f'"operands/{epilogue}.cuh"', "EPILOGUE": f'"epilogue/{epilogue}.cuh"', **defines,
    }  # fmt: skip
    source = cuda.Source("gemm.cu", cuda.read(package, "gemm.cu"), "gemm_sm90", sources, tuple(macros.items()))
    kernel = CudaKernel(
        source, kinds, threads=config.threads, shared_bytes=config.shared_bytes, cluster=config.cluster,
        overlap=True,  # mainloop.cuh executes griddepcontrol.wait before it loads what earlier launches wrote
        mma=Mma.WIDEST,  # the inspector then requires WGMMA in the machine code; compilation does not depend on it
    )  # fmt: skip
    return Gemm(config, kernel)


def matrix_map(matrix: torch.Tensor, rows: int, columns: int) -> bytes:
    """Return the tensor map of a matrix for TMA boxes of ``rows`` by ``columns`` elements, with the 128-byte swizzle.

    The matrix is an operand that the kernel loads, or a result that it stores. A row of a box has at most 128 bytes. TMA must
    be able to address the matrix (``addressable`` in ``kernels/tma.py``).
    """
    (height, width), size = matrix.shape, matrix.element_size()
    return tensor_map(matrix.dtype, address(matrix), (width, height), (matrix.stride(0) * size,), (columns, rows))
