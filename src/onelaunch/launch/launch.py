"""The launch of a kernel: the one place where its arguments, grid, constants and options are written.

A :class:`Launch` of a Triton or Gluon kernel, or a :class:`CudaLaunch` of one in CUDA C++, is made by the function that allocates
its results, and run there. What else must know of it is derived: the fake results for ``torch.compile`` come from the same
function on fake tensors (:mod:`onelaunch.launch.imitation`), and what CI compiles and ``onelaunch inspect`` shows is built from
the launches that example calls make (:mod:`onelaunch.launch.build`).
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch

from onelaunch.cuda.compiler import Source
from onelaunch.cuda.module import Function, Kind, load
from onelaunch.launch.global_atomics import global_atomics
from onelaunch.launch.imitation import note
from onelaunch.launch.warp_mma import warp_mma


class Mma(Enum):
    """Matrix instructions that a kernel's products must become."""

    NONE = "none"
    """No matrix instructions are asked for."""
    WIDEST = "widest"
    """Instructions that the architecture has for large tiles, such as WGMMA on Hopper."""
    WARP = "warp"
    """Instructions of single warps (``mma.sync``) on Hopper too, by :mod:`onelaunch.launch.warp_mma`."""
    WARP_OR_NONE = "warp or none"
    """Those of single warps as for :attr:`WARP`, but none are asked for: products of float32 without loss are made of single
    multiplications where a chip has no instruction for them."""
    SMALL = "small"
    """Instructions of single warps on Hopper, since the tile has too few rows for WGMMA; none are asked for on Blackwell."""


class Launch:
    """One launch of a Triton or Gluon kernel.

    Args:
        kernel: Function made by ``triton.jit`` or ``gluon.jit``.
        grid: CTAs along each dimension.
        *arguments: Arguments that are no constants, in the kernel's order: tensors, descriptors, numbers, ``None`` for an absent
            tensor, or tuples of these.
        mma: Matrix instructions that its products must become; the inspector checks it.
        **constants: Constants of the kernel by name, and Triton's options ``num_warps``, ``num_stages``, ``maxnreg``.
    """

    __slots__ = ("arguments", "constants", "grid", "kernel", "mma")

    def __init__(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, mma: Mma = Mma.NONE, **constants: Any) -> None:
        self.kernel = kernel
        self.grid = grid
        self.arguments = arguments
        self.mma = mma
        self.constants = constants

    def __repr__(self) -> str:
        return f"<launch of {self.kernel.__name__} on a grid of {self.grid}>"

    def _launch(self) -> None:
        """Launch at once: ``kernel[grid](...)`` would pack the arguments once more."""
        self.kernel.run(*self.arguments, grid=self.grid, warmup=False, **self.constants)

    def run(self) -> None:
        """Launch the kernel on the current stream; not while launches are imitated."""
        if note(self):
            return
        if torch.version.hip:
            with global_atomics():
                self._launch()
        elif self.mma is Mma.WARP or self.mma is Mma.WARP_OR_NONE:
            with warp_mma():
                self._launch()
        else:
            self._launch()


class CudaKernel:
    """One kernel of CUDA C++ in one configuration, with all of its launches that their arguments and grid do not change.

    Args:
        source: The kernel with its headers and macros.
        kinds: Kind of each argument.
        threads: Threads of a CTA.
        shared_bytes: Dynamic shared memory of a CTA.
        cluster: CTAs of a cluster along x.
        cooperative: Flag that all CTAs must be resident at once, as for a grid barrier.
        overlap: Flag that CTAs may begin before the launch before them has ended (programmatic dependent launch); the kernel
            waits for that itself.
        mma: Matrix instructions that its products must become; the inspector checks it.
    """

    def __init__(
        self,
        source: Source,
        kinds: tuple[Kind, ...],
        *,
        threads: int,
        shared_bytes: int = 0,
        cluster: int = 1,
        cooperative: bool = False,
        overlap: bool = False,
        mma: Mma = Mma.NONE,
    ) -> None:
        self.source = source
        self.kinds = kinds
        self.threads = threads
        self.shared_bytes = shared_bytes
        self.cluster = cluster
        self.cooperative = cooperative
        self.overlap = overlap
        self.mma = mma
        self._loaded: dict[torch.device, Function] = {}

    def __repr__(self) -> str:
        return f"<kernel {self.source.entry} of {self.source.name}>"

    def on(self, device: torch.device) -> Function:
        """Return the kernel loaded on a device; compiled and loaded at the first call.

        Raises:
            CompilerMissing, CompileError, DriverError: As :func:`onelaunch.cuda.load`.
        """
        found = self._loaded.get(device)
        if found is None:
            found = self._loaded[device] = load(
                self.source,
                device,
                self.kinds,
                threads=self.threads,
                shared_bytes=self.shared_bytes,
                cluster=self.cluster,
                cooperative=self.cooperative,
                overlap=self.overlap,
            )
        return found


class CudaLaunch:
    """One launch of a kernel of CUDA C++.

    Args:
        kernel: The kernel.
        device: NVIDIA GPU that it runs on.
        grid: CTAs along x, y and z; those along x are a multiple of the cluster.
        *arguments: One for each of the kernel's kinds: a tensor or ``None`` for a pointer, a number, the bytes of a tensor map.
        owners: Tensors whose memory the tensor maps address; the launch keeps it until it is run.
    """

    __slots__ = ("arguments", "device", "grid", "kernel", "owners")

    def __init__(
        self,
        kernel: CudaKernel,
        device: torch.device,
        grid: tuple[int, int, int],
        *arguments: Any,
        owners: tuple[torch.Tensor, ...] = (),
    ) -> None:
        self.kernel = kernel
        self.device = device
        self.grid = grid
        self.arguments = arguments
        self.owners = owners

    def __repr__(self) -> str:
        return f"<launch of {self.kernel.source.entry} on a grid of {self.grid}>"

    def run(self) -> None:
        """Launch the kernel on PyTorch's current stream of the device; not while launches are imitated."""
        if not note(self):
            self.kernel.on(self.device)(self.grid, *self.arguments)
