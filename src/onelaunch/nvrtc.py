"""CUDA C++ kernels: compiled by NVRTC at first use, loaded and launched through the driver.

Compiling needs neither GPU, driver nor nvcc, only the extra ``cuda`` (cuda-bindings and NVRTC). A :class:`Source` becomes machine
code once per architecture and is kept in the user's cache folder; :func:`load` makes a :class:`Function` of it for one device.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib
import importlib.resources
import struct
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from onelaunch import folders, sass
from onelaunch.errors import CompileError, CompilerMissing, DriverError, listing


@dataclass(frozen=True)
class Source:
    """One kernel in CUDA C++. Hashable: the key of what was compiled."""

    name: str
    """File name that the compiler's messages show."""
    text: str
    entry: str
    """The kernel, declared ``extern "C"``."""
    headers: tuple[tuple[str, str], ...] = ()
    """Name and text of each file that may be included. There are no others: NVRTC brings none of the CUDA toolkit's."""
    defines: tuple[tuple[str, str | int], ...] = ()
    """Macros and their values."""


def read(package: str, file: str) -> str:
    """The text of a ``.cu`` or ``.cuh`` file that lies beside the modules of a package."""
    return importlib.resources.files(package).joinpath(file).read_text(encoding="utf-8")


# Compiling

OPTIONS = ("--std=c++17",)
"""Of every kernel."""


class Compiled(NamedTuple):
    """What NVRTC made of a source."""

    cubin: bytes
    """With the assembler's fault that :mod:`onelaunch.sass` knows mended."""
    ptx: str
    log: str
    """Warnings and remarks, those of the assembler included."""


@functools.cache
def version() -> tuple[int, int]:
    """NVRTC's. :class:`CompilerMissing` when it is not here."""
    try:
        major, minor = _nvrtc("nvrtcVersion")
    except ImportError:
        raise CompilerMissing("cuda-bindings is not installed") from None
    except RuntimeError as error:  # cuda-bindings is, and loads the library at its first call
        raise CompilerMissing("cuda-bindings finds no NVRTC") from error
    return major, minor


@functools.cache
def missing() -> str | None:
    """Why CUDA C++ cannot be compiled here, in words that complete "it ...", or ``None``."""
    try:
        version()
    except CompilerMissing:
        return "needs cuda-bindings and NVRTC: pip install 'onelaunch[cuda]'"
    return None


@functools.cache
def compile_source(source: Source, architecture: str) -> bytes:
    """Machine code (a cubin) of a source for an architecture such as ``sm_90a``: from the cache folder, or compiled now.

    Raises:
        CompilerMissing: the extra ``cuda`` is not installed.
        CompileError: with NVRTC's log.
    """
    key = hashlib.sha256(repr((version(), OPTIONS, sass.RULES, architecture, source)).encode()).hexdigest()
    path = folders.cache_folder() / "cubins" / f"{source.entry}-{architecture}-{key[:32]}.cubin"
    cubin = _stored(path)
    if cubin is None:
        cubin = compile_now(source, architecture).cubin
        folders.keep(path, cubin + hashlib.sha256(cubin).digest())
    return cubin


def compile_now(source: Source, architecture: str) -> Compiled:
    """Compile a source without looking into any cache. Raises as :func:`compile_source` does."""
    version()
    nvrtc = importlib.import_module("cuda.bindings.nvrtc")
    names = [name.encode() for name, _ in source.headers]
    texts = [text.encode() for _, text in source.headers]
    defines = [f"--define-macro={name}={value}" for name, value in source.defines]
    options = [option.encode() for option in (f"--gpu-architecture={architecture}", *OPTIONS, *defines)]
    program = _nvrtc("nvrtcCreateProgram", source.text.encode(), source.name.encode(), len(names), texts, names)
    try:
        (error,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        log = _product(program, "ProgramLog").rstrip(b"\0").decode(errors="replace").strip()
        if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise CompileError(source.name, architecture, log=log or error.name)
        cubin = _product(program, "CUBIN")
        if architecture in sass.ARCHITECTURES:
            cubin = sass.mended(cubin)
        return Compiled(cubin, _product(program, "PTX").rstrip(b"\0").decode(), log)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _product(program: Any, name: str) -> bytes:
    """One of the things that a program holds once it was compiled."""
    buffer = bytearray(_nvrtc(f"nvrtcGet{name}Size", program))
    _nvrtc(f"nvrtcGet{name}", program, buffer)
    return bytes(buffer)


def _nvrtc(call: str, *arguments: Any) -> Any:
    """The result of a call of NVRTC that fails only when it is called wrongly."""
    error, *results = getattr(importlib.import_module("cuda.bindings.nvrtc"), call)(*arguments)
    if error:
        raise RuntimeError(f"{call} returned {error.name}")
    return results[0] if len(results) == 1 else results


_DIGEST = hashlib.sha256().digest_size


def _stored(path: Path) -> bytes | None:
    """Return the code in a file of the cache, or ``None`` where it is not whole: its digest follows it."""
    if (data := folders.kept(path)) is None:
        return None
    cubin, digest = data[:-_DIGEST], data[-_DIGEST:]
    return cubin if hashlib.sha256(cubin).digest() == digest else None


# Loading and launching

Kind = Literal["pointer", "i32", "i64", "f32", "map"]
"""Of a kernel's argument: a tensor or ``None``, a number, or a :func:`tensor_map` by value (``const __grid_constant__``)."""

_PACKED: dict[Kind, tuple[str, int, int]] = {
    "pointer": ("Q", 8, 8),
    "i32": ("i", 4, 4),
    "i64": ("q", 8, 8),
    "f32": ("f", 4, 4),
    "map": ("128s", 128, 128),
}
"""Format of :mod:`struct`, bytes, alignment."""

_PORTABLE_CLUSTER = 8
"""Blocks: larger clusters need a leave of their own."""

_OVERLAP_CAPTURED = 12030
"""The first driver that can capture overlapping launches in a graph: CUDA 12.3's."""


@dataclass(frozen=True, slots=True)
class _Shape:
    """Of launches, all but their grid: see :func:`load`."""

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
    """A kernel ready to be launched on a device; compiled and loaded once. Not while a CUDA graph is captured: load before.

    Args:
        source: the kernel.
        device: an NVIDIA GPU.
        kinds: of the kernel's arguments, in their order.
        threads: of a block.
        shared_bytes: dynamic shared memory of a block.
        cluster: blocks of a cluster along x.
        cooperative: whether all blocks must be resident at once, as for a barrier over the grid.
        overlap: whether blocks may begin before the launch before them has ended; the kernel has to wait for that itself
            (``griddepcontrol.wait``) before it touches memory. Left alone where the driver cannot capture such launches.

    Raises:
        CompilerMissing, CompileError: as :func:`compile_source`.
        DriverError: the driver does not take the code, or the device has less shared memory.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    return _load(source, index, kinds, _Shape(threads, shared_bytes, cluster, cooperative, overlap))


@functools.cache
def _load(source: Source, index: int, kinds: tuple[Kind, ...], shape: _Shape) -> Function:
    major, minor = torch.cuda.get_device_capability(index)
    cubin = compile_source(source, f"sm_{major}{minor}" + ("a" if major >= 9 else ""))
    return Function(cubin, source.entry, index, kinds, shape)


class Function:
    """A kernel loaded on one device, made by :func:`load`. Calling it launches it on PyTorch's current stream there.

    A launch neither allocates on the device nor waits for it, and can be captured in a CUDA graph. Threads may share a function.
    """

    def __init__(self, cubin: bytes, entry: str, index: int, kinds: tuple[Kind, ...], shape: _Shape) -> None:
        from cuda.bindings import driver

        self.entry = entry
        self.kinds = kinds
        self._index = index
        self._pointers = tuple(at for at, kind in enumerate(kinds) if kind == "pointer")
        self._driver = driver
        self._stream = torch._C._cuda_getCurrentRawStream  # noqa: SLF001  a tenth of the time of torch.cuda.current_stream
        torch.cuda.init()
        self._context = _driver("cuDevicePrimaryCtxRetain", _driver("cuDeviceGet", index))  # PyTorch's own
        with self._current():
            module = _driver("cuModuleLoadData", cubin, about=f"the code of {entry}")
            self._function = _driver("cuModuleGetFunction", module, entry.encode(), about=entry)
            attributes = driver.CUfunction_attribute
            settings = {attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: shape.shared_bytes}
            if shape.cluster > _PORTABLE_CLUSTER:
                settings[attributes.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED] = 1
            for attribute, value in settings.items():
                _driver("cuFuncSetAttribute", self._function, attribute, value, about=f"{entry}, {attribute.name} = {value}")
        if shape.overlap and _driver("cuDriverGetVersion") < _OVERLAP_CAPTURED:
            shape = replace(shape, overlap=False)
        self._packet = _Packet(kinds, shape)

    def __call__(self, grid: tuple[int, int, int], *arguments: Any) -> None:
        """Launch.

        Args:
            grid: blocks along x, y and z; those along x are a multiple of the cluster.
            arguments: one for each kind: a tensor or ``None`` for ``pointer``, a number, the bytes of a tensor map.

        Raises:
            TypeError: other arguments than the function takes.
            DriverError: the driver refused the launch.
        """
        packet = self._packet
        values = list(arguments)
        try:
            for at in self._pointers:
                values[at] = 0 if values[at] is None else values[at].data_ptr()
            packet.layout.pack_into(packet.buffer, packet.start, *values)
        except (struct.error, AttributeError, IndexError) as error:
            raise TypeError(f"{self.entry} takes {listing(self.kinds)}: {error}") from error
        config = packet.config
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.hStream = self._stream(self._index)
        if int(self._driver.cuCtxGetCurrent()[1]) == int(self._context):
            (error,) = self._driver.cuLaunchKernelEx(config, self._function, packet.parameters, 0)
        else:  # another device is current, or none yet in this thread
            with self._current():
                (error,) = self._driver.cuLaunchKernelEx(config, self._function, packet.parameters, 0)
        if error:
            raise DriverError("cuLaunchKernelEx", got=error.name, about=f"{self.entry}, grid {grid}")

    @contextlib.contextmanager
    def _current(self) -> Iterator[None]:
        _driver("cuCtxPushCurrent", self._context)
        try:
            yield
        finally:
            _driver("cuCtxPopCurrent")


class _Packet(threading.local):
    """Arguments and configuration of a launch, written anew by each: one for each thread, for the driver runs without the GIL."""

    def __init__(self, kinds: tuple[Kind, ...], shape: _Shape) -> None:
        self.layout, offsets = _layout(kinds)
        self.buffer = ctypes.create_string_buffer(self.layout.size + _MAP_BYTES)
        self.start = -ctypes.addressof(self.buffer) % _MAP_BYTES
        first = ctypes.addressof(self.buffer) + self.start
        self._pointers = (ctypes.c_void_p * len(kinds))(*(first + offset for offset in offsets))
        self.parameters = ctypes.addressof(self._pointers)
        self.config = _configuration(shape)


def _layout(kinds: Sequence[Kind]) -> tuple[struct.Struct, list[int]]:
    """How arguments lie one after the other, and where each begins."""
    form, offsets, end = "=", [], 0
    for kind in kinds:
        code, size, alignment = _PACKED[kind]
        gap = -end % alignment
        form += f"{gap}x{code}"
        offsets.append(end + gap)
        end += gap + size
    return struct.Struct(form), offsets


def _configuration(shape: _Shape) -> Any:
    """All of a launch but its grid and its stream."""
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


def _driver(call: str, *arguments: Any, about: str = "PyTorch's context") -> Any:
    """The result of a call of the driver, or :class:`DriverError`."""
    from cuda.bindings import driver

    error, *results = getattr(driver, call)(*arguments)
    if error:
        raise DriverError(call, got=error.name, about=about)
    return results[0] if results else None


# Tensor maps: how the copy engine of Hopper and later GPUs addresses a tensor

_MAP_BYTES = 128
_ELEMENTS = {  # as cuda.h numbers them
    torch.uint8: 0,
    torch.float8_e4m3fn: 0,
    torch.int32: 3,
    torch.float16: 6,
    torch.float32: 7,
    torch.bfloat16: 9,
}
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
_PROMOTE_256 = 3
_ALIGNMENT = 16
_MOST_BOX = 256


def tensor_map(
    dtype: torch.dtype,
    address: int,
    sizes: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    *,
    swizzle: Literal[0, 32, 64, 128] = 128,
) -> bytes:
    """A descriptor by which the copy engine moves boxes of a tensor of 2 to 5 dimensions; elements outside read as zero.

    It holds the address and keeps nothing alive. Making one costs some microseconds: keep it as long as the tensor stays.

    Args:
        dtype: float16, bfloat16, float32, int32, uint8 or float8_e4m3fn.
        address: of the first element, such as ``tensor.data_ptr()``.
        sizes: elements of each dimension, innermost first.
        strides: bytes from one index to the next of each dimension but the innermost, whose elements lie side by side.
        box: elements of each dimension that one copy moves.
        swizzle: bytes over which 16-byte pieces are permuted in shared memory; a box is at most as wide. 0 for none.

    Raises:
        ValueError: something that the copy engine cannot address; says what.
        DriverError: the driver refused the rest.
    """
    if problem := _unaddressable(dtype, address, sizes, strides, box, swizzle):
        raise ValueError(f"The copy engine cannot address this tensor: {problem}.")
    make_context_current()
    rank = len(sizes)
    buffer = ctypes.create_string_buffer(2 * _MAP_BYTES)
    # by ctypes: cuda-bindings keeps the descriptor where Python puts objects, and the driver wants it aligned
    at = ctypes.addressof(buffer) + -ctypes.addressof(buffer) % _MAP_BYTES
    error = _encode()(
        at,
        _ELEMENTS[dtype],
        rank,
        address,
        (ctypes.c_uint64 * rank)(*sizes),
        (ctypes.c_uint64 * (rank - 1))(*strides),
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        0,  # not interleaved
        _SWIZZLES[swizzle],
        _PROMOTE_256,
        0,  # zeros outside
    )
    if error:
        from cuda.bindings import driver

        about = f"sizes {tuple(sizes)}, strides {tuple(strides)}, box {tuple(box)} of {dtype}"
        raise DriverError("cuTensorMapEncodeTiled", got=driver.CUresult(error).name, about=about)
    return ctypes.string_at(at, _MAP_BYTES)


def _unaddressable(
    dtype: torch.dtype, address: int, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int], swizzle: int
) -> str | None:
    """What the copy engine does not take, or ``None``."""
    rank = len(sizes)
    if dtype not in _ELEMENTS:
        return f"dtype is {dtype}; it must be one of {listing(str(known).removeprefix('torch.') for known in _ELEMENTS)}"
    if not 2 <= rank <= 5 or len(strides) != rank - 1 or len(box) != rank:
        return f"it has {rank} sizes, {len(strides)} strides and {len(box)} sides of a box; 2 to 5, one fewer, as many are wanted"
    if address % _ALIGNMENT:
        return f"its address {address:#x} must be a multiple of {_ALIGNMENT}"
    if any(stride % _ALIGNMENT or not 0 < stride < 1 << 40 for stride in strides):
        return f"strides are {tuple(strides)} bytes; each must be a positive multiple of {_ALIGNMENT} below 2^40"
    if not all(0 < size <= 1 << 32 for size in sizes):
        return f"sizes are {tuple(sizes)}; each must be 1 to 2^32"
    if not all(0 < side <= _MOST_BOX for side in box):
        return f"the box is {tuple(box)}; each side must be 1 to {_MOST_BOX}"
    if swizzle not in _SWIZZLES:
        return f"the swizzle is {swizzle}; it must be one of {listing(map(str, _SWIZZLES))}"
    width = box[0] * dtype.itemsize
    if width % _ALIGNMENT or 0 < swizzle < width:
        most = f", at most the swizzle's {swizzle}" if swizzle else ""
        return f"the box is {width} bytes wide; it must be a multiple of {_ALIGNMENT}{most}"
    return None


def make_context_current() -> None:
    """Gives this thread the context of PyTorch's current device where it has none, as tensor maps need one; by ctypes alone.

    A thread begins without, PyTorch's own for backward passes too, and gets one from the first call of the CUDA runtime that
    needs it. Where memory and kernels come from caches there may have been no such call.

    Raises:
        DriverError: the driver refused.
    """
    driver, context, device = _libcuda(), ctypes.c_void_p(), ctypes.c_int()
    _accepted("cuCtxGetCurrent", driver.cuCtxGetCurrent(ctypes.byref(context)))
    if context.value is None:
        index = torch.cuda.current_device()
        _accepted("cuDeviceGet", driver.cuDeviceGet(ctypes.byref(device), index))
        _accepted("cuDevicePrimaryCtxRetain", driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
        _accepted("cuCtxSetCurrent", driver.cuCtxSetCurrent(context))


def _accepted(call: str, error: int) -> None:
    if error:
        raise DriverError(call, got=f"error {error}", about=f"the context of device {torch.cuda.current_device()}")


@functools.cache
def _libcuda() -> Any:
    return ctypes.CDLL("libcuda.so.1")


@functools.cache
def _encode() -> Any:
    function = _libcuda().cuTensorMapEncodeTiled
    pointer, number = ctypes.c_void_p, ctypes.c_uint32
    function.argtypes = [pointer, number, number, *[pointer] * 5, *[number] * 4]
    return function
