"""Launch objects: the only place that states the arguments, grid, constants and options of a kernel launch.

The function that allocates a kernel's results, in the launch code of operations, ablations, ``kernels`` and decoding, makes a
:class:`Launch` (Triton, Gluon) or a :class:`CudaLaunch` (CUDA C++) and runs it. Everything else is derived from it. The same
function runs on fake tensors where only its launches are wanted (:mod:`onelaunch.launch.imitation`). The builds that CI compiles
and ``onelaunch inspect`` shows come from the launches of example calls (:mod:`onelaunch.launch.build`). A launch reports itself
to the recorder of a call that will be replayed (:mod:`onelaunch.launch.recording`). Only ``device/read_rate.py``, a lower layer,
launches its kernels without such an object.
"""

from __future__ import annotations

import functools
from enum import Enum
from typing import Any

import torch

from onelaunch.cuda.compiler import Source
from onelaunch.cuda.module import Function, Kind, load
from onelaunch.launch.cache_keys import complete_key
from onelaunch.launch.global_atomics import global_atomics
from onelaunch.launch.imitation import record_launch
from onelaunch.launch.plan import Device
from onelaunch.launch.recording import recorder
from onelaunch.launch.running import compile_running_call
from onelaunch.launch.triton_cache import fall_back
from onelaunch.launch.warp_mma import warp_mma


class Mma(Enum):
    """Requirement on the matrix instructions of a kernel, which the inspector checks in its machine code."""

    NONE = "none"
    """No matrix instructions are required."""
    WIDEST = "widest"
    """Instructions for large tiles are required, such as WGMMA on Hopper."""
    WARP = "warp"
    """Warp-level instructions (``mma.sync``) are required. On Hopper :mod:`onelaunch.launch.warp_mma` enforces them."""
    WARP_OR_NONE = "warp or none"
    """Warp-level instructions as for :attr:`WARP` are allowed, but none are required: float32 products without loss of precision
    consist of scalar multiplications on a chip that has no matrix instruction for them."""
    SMALL = "small"
    """Warp-level instructions are required on Hopper, since the tile has too few rows for WGMMA; none are on Blackwell."""


class Launch:
    """Launch of a Triton or Gluon kernel.

    Args:
        kernel: Function made by ``triton.jit`` or ``gluon.jit``.
        grid: Number of CTAs along each dimension.
        *arguments: Arguments that are no constants, in the kernel's order: tensors, descriptors, numbers, ``None`` for an absent
            tensor, or tuples of these.
        mma: Requirement on the matrix instructions in the machine code.
        **constants: Values of the kernel's ``constexpr`` parameters by name, and Triton's options ``num_warps``, ``num_stages``
            and ``maxnreg``.
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
        """Launch the kernel by ``kernel.run``, since ``kernel[grid](...)`` would pack the arguments a second time.

        Triton launches on the current GPU, so that of the arguments is made current.
        """
        elsewhere = Device.elsewhere(self.arguments)
        if elsewhere is not None:
            with Device.at(elsewhere):
                self._launch()
            return
        kernel = self.kernel
        if id(kernel) not in _READY:
            _make_ready(kernel)
        try:
            compiled = kernel.run(*self.arguments, grid=self.grid, warmup=False, **self.constants)
        except OSError as problem:  # Triton writes files before it launches, and none afterwards
            if not fall_back(problem):
                raise
            compiled = kernel.run(*self.arguments, grid=self.grid, warmup=False, **self.constants)
        except BaseException:
            _forget_unloaded(kernel)
            raise
        if (active := recorder()) is not None:
            active.launched(self, compiled)

    def run(self) -> None:
        """Launch the kernel on the current stream, unless launches are imitated."""
        if record_launch(self):
            return
        if torch.version.hip:
            with global_atomics():
                self._launch()
        elif self.mma is Mma.WARP or self.mma is Mma.WARP_OR_NONE:
            with warp_mma():
                self._launch()
        else:
            self._launch()


_READY: set[int] = set()
"""Identities of the kernels that :func:`_make_ready` has seen. Triton's functions live as long as their modules."""


def _make_ready(kernel: Any) -> None:
    """Prepare a kernel of Triton for its first launch.

    Triton's method ``_do_compile`` is called where a kernel is not loaded yet. It then compiles the other kernels of the running
    call too (:mod:`onelaunch.launch.side_by_side`). A Triton without this method compiles them one after the other.
    """
    complete_key(kernel)
    compile_alone = getattr(kernel, "_do_compile", None)
    if compile_alone is not None:

        def compile_with_others(*args: Any, **kwargs: Any) -> Any:
            compile_running_call(by_triton=True)
            return compile_alone(*args, **kwargs)

        kernel._do_compile = compile_with_others  # noqa: SLF001 - as above
    _READY.add(id(kernel))


def _forget_unloaded(kernel: Any) -> None:
    """Let Triton load those compiled kernels again whose loading has failed, for lack of memory for example.

    Triton keeps such a kernel, and would launch it next time without the code on the device (``CompiledKernel._init_handles``,
    seen in 3.6 and 3.7.1). A kernel that needs more resources than the device has stays as it is: its error comes again.
    """
    for loaded, *_ in getattr(kernel, "device_caches", {}).values():
        for compiled in list(loaded.values()):
            if vars(compiled).get("module", True) is None and not isinstance(vars(compiled).get("_run"), functools.partial):
                compiled._run = None  # noqa: SLF001


class CudaKernel:
    """CUDA C++ kernel with the part of its launch configuration that is the same for all launches.

    Args:
        source: Kernel with its headers and macros.
        kinds: Kind of each argument.
        threads: Number of threads of a CTA.
        shared_bytes: Dynamic shared memory of a CTA in bytes.
        cluster: Number of CTAs of a cluster along x.
        cooperative: Flag for a cooperative launch, in which all CTAs are resident at once, as a grid barrier needs.
        overlap: Flag for programmatic dependent launch: CTAs may begin before the previous launch has ended, and the kernel
            itself waits for its end.
        mma: Requirement on the matrix instructions in the machine code.
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
        """Return the kernel loaded on a device. The first call compiles and loads it, by a function that caches it too.

        Raises:
            CompilerMissing, CompileError, DriverError: As :func:`onelaunch.cuda.load` raises them.
        """
        found = self._loaded.get(device)
        if found is None:
            compile_running_call(by_triton=False)
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
    """Launch of a CUDA C++ kernel.

    Args:
        kernel: Kernel with its launch configuration.
        device: NVIDIA GPU that it runs on.
        grid: Number of CTAs along x, y and z. The number along x is a multiple of the cluster size.
        *arguments: One value for each kind: a tensor or ``None`` for a pointer, a number, or the bytes of a tensor map.
        owners: Tensors whose memory the tensor maps address. The launch keeps them alive until it has run.
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
        """Launch the kernel on PyTorch's current stream of the device, unless launches are imitated."""
        if record_launch(self):
            return
        function = self.kernel.on(self.device)
        function(self.grid, *self.arguments)
        if (active := recorder()) is not None:
            active.launched_cuda(self, function)
