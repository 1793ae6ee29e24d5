"""Kernels in one configuration each, so that they can be compiled and inspected where nothing can run them.

:func:`build_of` makes one from a launch that was recorded. Triton's own binder decides there, as it does at a launch, which
arguments become constants and which count as multiples of 16.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch

from onelaunch.cuda.compiler import Source
from onelaunch.device.architectures import Architecture
from onelaunch.launch.launch import CudaKernel, CudaLaunch, Launch, Mma

Path: TypeAlias = tuple[int, ...]
"""Place of an argument: its index, and for members of a tuple the index in it."""


@dataclass(frozen=True)
class KernelBuild:
    """One Triton kernel of a variant in one configuration: enough to compile it on a machine without a GPU."""

    name: str
    kernel: Any
    """Function made by ``triton.jit``."""
    signature: Mapping[str, Any]
    """Triton type of every argument, ``constexpr`` for constants; for an argument that is a tuple, those of its members."""
    constants: Mapping[Any, Any]
    """Values of constants by name, or by path (:data:`Path`) where Triton's binder made the build."""
    num_warps: int = 4
    num_stages: int = 3
    matrix: bool = False
    """Flag that matrix instructions must be in the machine code."""
    by_warps: bool = False
    """Flag that they are those of single warps on every NVIDIA architecture but Blackwell, see ``launch/warp_mma.py``."""
    attributes: Mapping[Path, Any] | None = None
    """Attributes of arguments by path as Triton's binder found them. ``None`` for a build written by hand, whose pointers count
    as aligned to 16 bytes and whose integers as multiples of 16 where their type ends in ``:16``."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further options of Triton's, such as ``maxnreg``."""
    warp_mma: bool | None = None
    """Flag that Triton is told to take the instructions of single warps; ``None`` where ``by_warps`` says it."""

    @property
    def key(self) -> tuple[object, ...]:
        """Everything that decides the machine code, as a hashable value."""
        forced = self.by_warps if self.warp_mma is None else self.warp_mma
        parts = (self.signature, self.constants, self.attributes, self.num_warps, self.num_stages, self.options, forced)
        return (self.kernel.__module__, self.kernel.__name__, *map(repr, parts))


@dataclass(frozen=True)
class CudaBuild:
    """One CUDA C++ kernel of a variant in one configuration: enough to compile it on a machine without a GPU."""

    name: str
    source: Source
    threads: int
    """Threads of a CTA."""
    shared_bytes: int = 0
    """Dynamic shared memory of a CTA."""
    matrix: bool = False
    """Flag that matrix instructions must be in the machine code."""
    by_warps: bool = False
    """Flag that they are those of single warps (``mma.sync``) on every architecture."""

    @property
    def key(self) -> tuple[object, ...]:
        """Everything that decides the machine code and the resources of a CTA, as a hashable value."""
        return (self.source, self.threads, self.shared_bytes)


Build: TypeAlias = KernelBuild | CudaBuild
"""A kernel as a variant lists it, by :meth:`onelaunch.operation.Variant.builds`."""


def build_of(launch: Launch | CudaLaunch, architecture: Architecture, name: str) -> Build:
    """Return the kernel of a recorded launch in the configuration in which an architecture runs it."""
    if isinstance(launch, CudaLaunch):
        return build_of_kernel(launch.kernel, name)
    kernel = launch.kernel
    backend, binder = _binder(kernel, architecture.backend, architecture.target, architecture.warp)
    bound, specialization, given = binder(*map(_stand_in, launch.arguments), **launch.constants)
    options, signature, constants, attributes = kernel._pack_args(backend, given, bound, specialization, given)  # noqa: SLF001
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
    """Return a kernel of CUDA C++ as a build."""
    matrix, warps = kernel.mma is not Mma.NONE, kernel.mma is Mma.WARP
    return CudaBuild(name, kernel.source, kernel.threads, kernel.shared_bytes, matrix, warps)


def builds_of(launches: Sequence[tuple[str, Launch | CudaLaunch]], architecture: Architecture) -> list[Build]:
    """Return the distinct builds of launches, each named after its kernel and, where there are several, the call it is of.

    Args:
        launches: Name of the call and launch, in order.
        architecture: Architecture that the calls were recorded on.
    """
    distinct: dict[tuple[object, ...], tuple[str, Launch | CudaLaunch, Build]] = {}
    for call, launch in launches:
        build = build_of(launch, architecture, "")
        distinct.setdefault(build.key, (call, launch, build))
    found = list(distinct.values())
    names = [_name(launch) for _, launch, _ in found]
    several = {name for name in names if names.count(name) > 1}
    calls = [f"{name}, {call}" if name in several and call else name for name, (call, _, _) in zip(names, found, strict=True)]
    taken: dict[str, int] = {}
    builds = []
    for name, (_, _, build) in zip(calls, found, strict=True):
        taken[name] = taken.get(name, 0) + 1
        builds.append(replace(build, name=f"{name} ({taken[name]})" if calls.count(name) > 1 else name))
    return builds


def _name(launch: Launch | CudaLaunch) -> str:
    if isinstance(launch, CudaLaunch):
        return launch.kernel.source.entry
    return launch.kernel.__name__.removesuffix("_kernel")


class _StandIn:
    """A tensor as Triton's binder looks at it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.dtype = tensor.dtype
        self.shape = tensor.shape
        self._offset = int(tensor.storage_offset()) * tensor.element_size()
        self._bytes = int(tensor.untyped_storage().nbytes())

    def data_ptr(self) -> int:
        """Return an address that is aligned as the tensor's is, whose storage begins at a multiple of 256 bytes."""
        return self._offset

    def ptr_range(self) -> int:
        """Return the bytes that can be reached from it."""
        return self._bytes


def _stand_in(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor):
        return _StandIn(argument)
    if type(argument) is tuple:
        return tuple(map(_stand_in, argument))
    return argument


@functools.lru_cache(maxsize=1024)
def _binder(kernel: Any, backend: str, target: int | str, warp: int) -> tuple[Any, Any]:
    """Return Triton's compiler for an architecture, and the function that binds a kernel's arguments for it."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    compiler = make_backend(GPUTarget(backend, target, warp))
    return compiler, create_function_from_signature(kernel.signature, kernel.params, compiler)
