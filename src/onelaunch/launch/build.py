"""Builds: kernels in one configuration each, which can be compiled and inspected on a machine without a GPU.

:func:`build_of` makes a build from a recorded launch. As at a real launch, Triton's own binder decides which arguments become
constants and which are specialized as multiples of 16.

``operation/examples.py`` makes the builds of example calls and of cases, for the inspector, ``onelaunch prebuild`` and the probes
of studies; ``side_by_side.py`` makes those of a first call. Functions that variants register by ``@variant.kernels`` make their
own, as those of ``gla_layer`` and ``decode_step`` do. ``compile.py`` and ``cuda/compiler.py`` compile builds. A build that is
written by hand, without a launch, is one of a test or a plug-in.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch

from onelaunch.cuda.compiler import Source
from onelaunch.device.architectures import Architecture
from onelaunch.launch.cache_keys import complete_key
from onelaunch.launch.launch import CudaKernel, CudaLaunch, Launch, Mma

Path: TypeAlias = tuple[int, ...]
"""Position of an argument: its index, followed by the index inside it for a member of a tuple."""


@dataclass(frozen=True)
class KernelBuild:
    """Triton kernel of a variant in one configuration, which can be compiled on a machine without a GPU."""

    name: str
    """Name in reports."""
    kernel: Any
    """Function made by ``triton.jit``."""
    signature: Mapping[str, Any]
    """Triton type of every argument (``constexpr`` for constants), as a tuple of types for an argument that is a tuple."""
    constants: Mapping[Any, Any]
    """Values of constants by name, or by :data:`Path` if Triton's binder made the build."""
    num_warps: int = 4
    num_stages: int = 3
    matrix: bool = False
    """Expectation about the machine code: it must contain matrix instructions. The inspector checks it."""
    by_warps: bool = False
    """Expectation about the machine code for Hopper: its matrix instructions must be warp-level (``mma.sync``), not WGMMA. On
    another architecture the inspector accepts the matrix instructions of that architecture."""
    attributes: Mapping[Path, Any] | None = None
    """Attributes of arguments by path, as Triton's binder found them. ``None`` for a build written by hand: its pointers count as
    aligned to 16 bytes, and its integers as multiples of 16 if their type ends in ``:16``."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further compiler options of Triton, such as ``maxnreg``."""
    warp_mma: bool | None = None
    """Setting of the compiler: whether :mod:`onelaunch.launch.warp_mma` keeps Triton from WGMMA. It differs from ``by_warps`` for
    a tile that is too small for WGMMA anyway (:attr:`Mma.SMALL`), and where no matrix instructions are required
    (:attr:`Mma.WARP_OR_NONE`). ``None``, in a build written by hand, stands for the value of ``by_warps``."""

    @property
    def key(self) -> tuple[object, ...]:
        """Hashable value of everything that decides the machine code."""
        parts = (self.signature, self.constants, self.attributes, self.num_warps, self.num_stages, self.options)
        return (self.kernel.__module__, self.kernel.__name__, *map(repr, parts), repr(self.forces_warp_mma))

    @property
    def forces_warp_mma(self) -> bool:
        """Flag that the compiler must use warp-level matrix instructions, although the architecture has WGMMA."""
        return self.by_warps if self.warp_mma is None else self.warp_mma


@dataclass(frozen=True)
class CudaBuild:
    """CUDA C++ kernel of a variant in one configuration, which can be compiled on a machine without a GPU."""

    name: str
    """Name in reports."""
    source: Source
    threads: int
    """Number of threads of a CTA."""
    shared_bytes: int = 0
    """Dynamic shared memory of a CTA in bytes."""
    matrix: bool = False
    """Flag that the machine code must contain matrix instructions."""
    by_warps: bool = False
    """Flag that these are warp-level instructions (``mma.sync``) on every architecture."""

    @property
    def key(self) -> tuple[object, ...]:
        """Hashable value of everything that decides the machine code and the resources of a CTA."""
        return (self.source, self.threads, self.shared_bytes)


Build: TypeAlias = KernelBuild | CudaBuild
"""Build of a kernel, as :meth:`onelaunch.operation.Variant.builds` lists it."""


def build_of(launch: Launch | CudaLaunch, architecture: Architecture, name: str) -> Build:
    """Return the build of a recorded launch, in the configuration in which an architecture would run it."""
    if isinstance(launch, CudaLaunch):
        return build_of_kernel(launch.kernel, name)
    kernel = launch.kernel
    complete_key(kernel)  # before the cache of _binder asks for the kernel's hash
    backend, binder = _binder(kernel, architecture.backend, architecture.target, architecture.warp)
    bound, specialization, given = binder(*map(_stand_in, launch.arguments), **launch.constants)
    # Triton's method parses its second argument and ignores its last, which has the same content in Triton's own launches too.
    options, signature, constants, attributes = kernel._pack_args(backend, given, bound, specialization, given)  # noqa: SLF001
    # Mma.SMALL: a tile with too few rows for WGMMA, for which no matrix instructions are required on Blackwell.
    small_on_blackwell = launch.mma is Mma.SMALL and architecture.name == "sm_100a"
    return KernelBuild(
        name,
        kernel,
        signature,
        constants,
        num_warps=options.num_warps,
        num_stages=options.num_stages,
        matrix=launch.mma not in (Mma.NONE, Mma.WARP_OR_NONE) and not small_on_blackwell,
        by_warps=launch.mma in (Mma.WARP, Mma.SMALL),
        attributes=attributes,
        options={key: value for key, value in given.items() if key not in ("num_warps", "num_stages")},
        warp_mma=launch.mma in (Mma.WARP, Mma.WARP_OR_NONE),
    )


def build_of_kernel(kernel: CudaKernel, name: str) -> CudaBuild:
    """Return the build of a CUDA C++ kernel."""
    matrix, warps = kernel.mma is not Mma.NONE, kernel.mma is Mma.WARP
    return CudaBuild(name, kernel.source, kernel.threads, kernel.shared_bytes, matrix, warps)


def builds_of(launches: Sequence[tuple[str, Launch | CudaLaunch]], architecture: Architecture) -> list[Build]:
    """Return the distinct builds of launches, named after their kernels, and after the call if a kernel has several builds.

    Args:
        launches: Pairs of the name of a call and one of its launches, in order.
        architecture: Architecture for which the calls were recorded.
    """
    distinct: dict[tuple[object, ...], tuple[str, Launch | CudaLaunch, Build]] = {}
    for call, launch in launches:
        build = build_of(launch, architecture, "")
        distinct.setdefault(build.key, (call, launch, build))
    entries = list(distinct.values())
    names = [_name(launch) for _, launch, _ in entries]
    several = {name for name in names if names.count(name) > 1}
    calls = [f"{name}, {call}" if name in several and call else name for name, (call, _, _) in zip(names, entries, strict=True)]
    number_of: dict[str, int] = {}  # number of the last build of each name, for names that are still not unique
    builds = []
    for name, (_, _, build) in zip(calls, entries, strict=True):
        number_of[name] = number_of.get(name, 0) + 1
        builds.append(replace(build, name=f"{name} ({number_of[name]})" if calls.count(name) > 1 else name))
    return builds


def _name(launch: Launch | CudaLaunch) -> str:
    """Return the name of a launch's kernel."""
    if isinstance(launch, CudaLaunch):
        return launch.kernel.source.entry
    return launch.kernel.__name__.removesuffix("_kernel")


class _StandIn:
    """Replacement for a fake tensor with those attributes that Triton's binder reads."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.dtype = tensor.dtype
        self.shape = tensor.shape
        self._offset = int(tensor.storage_offset()) * tensor.element_size()
        self._bytes = int(tensor.untyped_storage().nbytes())

    def data_ptr(self) -> int:
        """Return an address with the alignment of the real tensor, if storage is aligned to 256 bytes as PyTorch's is."""
        return self._offset

    def ptr_range(self) -> int:
        """Return the size of the storage in bytes, which bounds the offsets from the pointer."""
        return self._bytes


def _stand_in(argument: Any) -> Any:
    """Return an argument with its tensors replaced by :class:`_StandIn`."""
    if isinstance(argument, torch.Tensor):
        return _StandIn(argument)
    if type(argument) is tuple:
        return tuple(map(_stand_in, argument))
    return argument


@functools.lru_cache(maxsize=1024)
def _binder(kernel: Any, backend: str, target: int | str, warp: int) -> tuple[Any, Any]:
    """Return Triton's compiler backend for an architecture, and the function that binds a kernel's arguments for it."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    compiler = make_backend(GPUTarget(backend, target, warp))
    return compiler, create_function_from_signature(kernel.signature, kernel.params, compiler)
