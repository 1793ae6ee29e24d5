"""CUDA C++ kernels that only read a buffer. They measure the bandwidth of reads for :mod:`onelaunch.device.peaks`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch

from onelaunch import cuda
from onelaunch.device.hardware import compute_capability, processors

WARPS, VECTORS = 8, 4
"""Number of reading warps of a CTA in both kernels, and of 16-byte loads in flight per thread of ``read_vectors``."""

_VECTOR_CTAS = 8
"""CTAs of ``read_vectors`` per SM."""

RINGS = ((32 << 10, 6), (16 << 10, 8))
"""Ring configurations of ``read_bulk``: the bytes of a bulk copy, and the number of copies that one CTA keeps in flight.

An H100 reads 3.17 TB/s with either, interleaved; an H200 4.61 TB/s with the first, contiguous. Rings of 8 to 64 KB with 3
to 24 copies in flight reach no more (docs/notebook/peaks.md).
"""


def read_kernels(source: torch.Tensor) -> dict[str, Callable[[], torch.Tensor]]:
    """Return this project's kernels that read a contiguous tensor on an NVIDIA GPU, as functions by name.

    The dictionary is empty on other devices, and where CUDA C++ cannot be compiled. Each function launches its kernel once and
    returns an int32 tensor that the next launch overwrites. The sum of its elements equals the sum of the source's 32-bit words,
    modulo 2^32, if the source has a multiple of 16 bytes.
    """
    capability = compute_capability(source.device)
    if capability is None or cuda.missing():
        return {}
    count = processors(source.device)
    grid = _VECTOR_CTAS * count
    sums = torch.zeros(grid * WARPS, dtype=torch.int32, device=source.device)
    vectors = _loaded(read_source("read_vectors"), source.device, ("pointer", "i64", "pointer"), threads=32 * WARPS)
    kernels = {"read_vectors": _launcher(vectors, grid, sums, source, source.nbytes // 16, sums)}
    shared_limit = getattr(torch.cuda.get_device_properties(source.device), "shared_memory_per_block_optin", 0)
    for chunk, stages in RINGS:
        # Besides the ring, a CTA needs static shared memory for two mbarriers per stage; 1024 bytes are more than that.
        if capability < 9 or shared_limit < chunk * stages + 1024 or source.nbytes % chunk:
            continue
        # Arguments of read_bulk: from, chunks, first, stride, each, sums.
        kinds: tuple[cuda.Kind, ...] = ("pointer", "i64", "i64", "i64", "i64", "pointer")
        text = read_source("read_bulk", chunk, stages)
        bulk = _loaded(text, source.device, kinds, threads=32 * (WARPS + 1), shared_bytes=chunk * stages)
        chunks = source.nbytes // chunk
        per_cta = -(-chunks // count)
        # CTA c reads at most per_cta chunks: c * first, c * first + stride, c * first + 2 * stride, ...
        for order, first, stride in (("interleaved", 1, count), ("contiguous", per_cta, 1)):
            partial = sums[: count * WARPS]
            name = f"read_bulk {chunk >> 10} KB x {stages} {order}"
            kernels[name] = _launcher(bulk, count, partial, source, chunks, first, stride, per_cta, partial)
    return kernels


def read_source(entry: Literal["read_vectors", "read_bulk"], chunk: int = RINGS[0][0], stages: int = RINGS[0][1]) -> cuda.Source:
    """Return the source of one kernel of ``read_rate.cu``. ``chunk`` (bytes) and ``stages`` set the ring of ``read_bulk``."""
    return cuda.Source(
        "read_rate.cu",
        cuda.read("onelaunch.device", "read_rate.cu"),
        entry,
        (cuda.include("hopper.cuh"),),
        (("WARPS", WARPS), ("VECTORS", VECTORS), ("CHUNK", chunk), ("STAGES", stages)),
    )


def checksum(tensor: torch.Tensor) -> int:
    """Return the sum of a contiguous tensor's 32-bit words, modulo 2^32, by PyTorch's own reduction."""
    return int(tensor.view(torch.int32).sum(dtype=torch.int64)) % 2**32


def _loaded(source: cuda.Source, device: torch.device, kinds: tuple[cuda.Kind, ...], **shape: int) -> cuda.Function:
    return cuda.load(source, device, kinds, threads=shape["threads"], shared_bytes=shape.get("shared_bytes", 0))


def _launcher(kernel: cuda.Function, ctas: int, result: torch.Tensor, *arguments: Any) -> Callable[[], torch.Tensor]:
    def launch() -> torch.Tensor:
        kernel((ctas, 1, 1), *arguments)
        return result

    return launch
