"""Load CUDA C++ kernels on a device and launch them through the driver.

``launch/launch.py`` calls :func:`load` for all CUDA C++ kernels but those of ``device/read_rate.py``, which calls it itself. The
replay of recorded launches (``onelaunch.launch``) reads what a :class:`Function` holds.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch

from onelaunch.cuda.compiler import Source, compile_source
from onelaunch.cuda.driver import bound, current_context, primary_context
from onelaunch.cuda.tensor_maps import MAP_BYTES
from onelaunch.errors import DriverError
from onelaunch.wording import listing

Kind = Literal["pointer", "i32", "i64", "f32", "map"]
"""Kind of a kernel's argument.

``pointer`` takes a tensor or ``None``, ``i32``, ``i64`` and ``f32`` take a number, and ``map`` takes the bytes of a
:func:`tensor_map`, which the kernel receives by value (``const __grid_constant__``).
"""

_PACKED: dict[Kind, tuple[str, int, int]] = {
    "pointer": ("Q", 8, 8),
    "i32": ("i", 4, 4),
    "i64": ("q", 8, 8),
    "f32": ("f", 4, 4),
    "map": ("128s", 128, 128),
}
"""Format character of :mod:`struct`, size in bytes and alignment in bytes of each kind."""

_PORTABLE_CLUSTER = 8
"""Largest number of CTAs in a portable cluster. A larger cluster needs the attribute NON_PORTABLE_CLUSTER_SIZE_ALLOWED."""

_OVERLAP_CAPTURED = 12030
"""First driver version (CUDA 12.3) that can capture programmatic dependent launches in a graph."""


class Prepared(NamedTuple):
    """Launch of a function as plain numbers, for a caller that launches it by its own call of ``cuLaunchKernelEx``."""

    function: int
    """Handle of the kernel."""
    threads: int
    """Number of threads of a CTA."""
    shared_bytes: int
    """Dynamic shared memory of a CTA in bytes."""
    attributes: int
    """Address of the launch attributes; 0 if there are none."""
    attribute_count: int
    owner: Any
    """Object that keeps the attributes in memory."""


@dataclass(frozen=True, slots=True)
class _Shape:
    """Launch configuration without the grid. :func:`load` documents the fields."""

    threads: int
    shared_bytes: int
    cluster: int
    cooperative: bool
    overlap: bool


def load(
    source: Source,
    device: torch.device,
    kinds: tuple[Kind, ...],
    *,
    threads: int,
    shared_bytes: int = 0,
    cluster: int = 1,
    cooperative: bool = False,
    overlap: bool = False,
) -> Function:
    """Return a kernel that is ready to be launched on a device. The first call compiles and loads it.

    Do not call it for the first time during the capture of a CUDA graph.

    Args:
        source: Kernel to compile.
        device: NVIDIA GPU to load it on.
        kinds: Kinds of the kernel's arguments, in order.
        threads: Threads of a CTA.
        shared_bytes: Dynamic shared memory of a CTA, in bytes.
        cluster: CTAs of a cluster along x.
        cooperative: Flag for a cooperative launch, in which all CTAs are resident at once, as a grid barrier needs.
        overlap: Flag for programmatic dependent launch: CTAs may begin before the previous launch has ended. The kernel itself
            must execute ``griddepcontrol.wait`` before it accesses memory. The flag is ignored if the driver cannot capture such
            launches.

    Raises:
        CompilerMissing, CompileError: As :func:`compile_source` raises them.
        DriverError: The driver refused the code, or the device has less shared memory.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    return _load(source, index, kinds, _Shape(threads, shared_bytes, cluster, cooperative, overlap))


@functools.cache
def _load(source: Source, index: int, kinds: tuple[Kind, ...], shape: _Shape) -> Function:
    major, minor = torch.cuda.get_device_capability(index)
    # Code for "sm_90a" may use instructions that later architectures lack, such as WGMMA; code for "sm_90" may not.
    cubin = compile_source(source, f"sm_{major}{minor}" + ("a" if major >= 9 else ""))
    return Function(cubin, source.entry, index, kinds, shape)


class Function:
    """Kernel loaded on one device by :func:`load`. A call launches it on PyTorch's current stream of that device.

    A launch neither allocates device memory nor synchronizes, and can be captured in a CUDA graph. Threads may share a function.
    """

    def __init__(self, cubin: bytes, entry: str, index: int, kinds: tuple[Kind, ...], shape: _Shape) -> None:
        from cuda.bindings import driver

        self.entry = entry
        self.kinds = kinds
        self._index = index
        self._pointer_indices = tuple(at for at, kind in enumerate(kinds) if kind == "pointer")
        self._driver = driver
        self._stream = torch._C._cuda_getCurrentRawStream  # noqa: SLF001  takes a tenth of the time of torch.cuda.current_stream
        torch.cuda.init()  # also initializes the driver, without which the calls below fail
        self._context = primary_context(index)  # the context that PyTorch uses
        with current_context(self._index):
            module = bound("cuModuleLoadData", cubin, about=f"the code of {entry}")
            self._function = bound("cuModuleGetFunction", module, entry.encode(), about=entry)
            attributes = driver.CUfunction_attribute
            settings = {attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: shape.shared_bytes}
            if shape.cluster > _PORTABLE_CLUSTER:
                settings[attributes.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED] = 1
            for attribute, value in settings.items():
                bound("cuFuncSetAttribute", self._function, attribute, value, about=f"{entry}, {attribute.name} = {value}")
        if shape.overlap and bound("cuDriverGetVersion") < _OVERLAP_CAPTURED:
            shape = replace(shape, overlap=False)
        self._shape = shape
        self._packet = _Packet(kinds, shape)

    def __call__(self, grid: tuple[int, int, int], *arguments: Any) -> None:
        """Launch the kernel.

        Args:
            grid: Numbers of CTAs along x, y and z. The number along x is a multiple of the cluster size.
            *arguments: One value for each kind: a tensor or ``None`` for ``pointer``, a number, or the bytes of a tensor map.

        Raises:
            TypeError: The arguments do not match the kinds.
            DriverError: The driver refused the launch.
        """
        packet = self._packet
        values = list(arguments)
        try:
            for at in self._pointer_indices:
                values[at] = 0 if values[at] is None else values[at].data_ptr()
            packet.layout.pack_into(packet.buffer, packet.start, *values)
        except (struct.error, AttributeError, IndexError) as error:
            raise TypeError(f"{self.entry} takes {listing(self.kinds)}: {error}") from error
        config = packet.config
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.hStream = self._stream(self._index)
        if int(self._driver.cuCtxGetCurrent()[1]) == self._context:
            (error,) = self._driver.cuLaunchKernelEx(config, self._function, packet.parameters, 0)
        else:  # the context of another device is current, or this thread has none yet
            with current_context(self._index):
                (error,) = self._driver.cuLaunchKernelEx(config, self._function, packet.parameters, 0)
        if error:
            raise DriverError("cuLaunchKernelEx", got=error.name, about=f"{self.entry}, grid {grid}")

    def prepared(self, grid: tuple[int, int, int]) -> Prepared:
        """Return the launch on a grid as plain numbers."""
        config, raw = _configuration(self._shape), _RawConfiguration
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        found = raw.from_address(int(config.getPtr()))  # cuda-bindings itself does not give the address of the attributes
        count = int(found.attribute_count)
        at = int(found.attributes or 0) if count else 0
        return Prepared(int(self._function), self._shape.threads, self._shape.shared_bytes, at, count, config)


class _RawConfiguration(ctypes.Structure):
    """``CUlaunchConfig`` of the driver; ``numbers`` are the sizes of grid and block, then the bytes of dynamic shared memory."""

    _fields_ = (
        ("numbers", ctypes.c_uint32 * 7),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint32),
    )


class _Packet(threading.local):
    """Buffers for the arguments and the configuration of a launch, which every launch overwrites.

    Each thread has its own, since the driver call releases the GIL.

    Attributes:
        layout: Packed layout of the argument values, padded so that each has its alignment.
        buffer: Memory for the values. They begin at ``start``, since a tensor map must be aligned to 128 bytes.
        start: Offset in ``buffer`` in bytes.
        parameters: Address of the array of pointers to the values, the driver's argument ``kernelParams``.
        config: Launch configuration of the driver.
    """

    def __init__(self, kinds: tuple[Kind, ...], shape: _Shape) -> None:
        self.layout, offsets = _layout(kinds)
        self.buffer = ctypes.create_string_buffer(self.layout.size + MAP_BYTES)
        self.start = -ctypes.addressof(self.buffer) % MAP_BYTES
        first = ctypes.addressof(self.buffer) + self.start
        self._addresses = (ctypes.c_void_p * len(kinds))(*(first + offset for offset in offsets))
        self.parameters = ctypes.addressof(self._addresses)
        self.config = _configuration(shape)


def _layout(kinds: Sequence[Kind]) -> tuple[struct.Struct, list[int]]:
    """Return the packed layout of the arguments, and the offset of each in bytes."""
    form, offsets, end = "=", [], 0
    for kind in kinds:
        code, size, alignment = _PACKED[kind]
        gap = -end % alignment
        form += f"{gap}x{code}"
        offsets.append(end + gap)
        end += gap + size
    return struct.Struct(form), offsets


def _configuration(shape: _Shape) -> Any:
    """Return the driver's launch configuration with its attributes; each launch sets the grid and the stream."""
    from cuda.bindings import driver

    config = driver.CUlaunchConfig()
    config.blockDimX, config.blockDimY, config.blockDimZ = shape.threads, 1, 1
    config.sharedMemBytes = shape.shared_bytes
    attributes = []
    if shape.cluster > 1:
        attributes.append(driver.CUlaunchAttribute())
        attributes[-1].id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        sizes = attributes[-1].value.clusterDim
        sizes.x, sizes.y, sizes.z = shape.cluster, 1, 1
    if shape.cooperative:
        attributes.append(driver.CUlaunchAttribute())
        attributes[-1].id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
        attributes[-1].value.cooperative = 1
    if shape.overlap:
        attributes.append(driver.CUlaunchAttribute())
        attributes[-1].id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attributes[-1].value.programmaticStreamSerializationAllowed = 1
    config.attrs = attributes
    config.numAttrs = len(attributes)
    return config
