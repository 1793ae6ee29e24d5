"""Packets: the arguments and configurations of several kernel launches in one buffer, as the CUDA driver reads them.

The driver's ``cuLaunchKernelEx`` takes a launch configuration and an array of pointers to the values of the parameters. All of
these lie in the buffer of a packet. Between two uses of a packet only addresses change, and the stream: 64-bit words of the
buffer, the first word of each tensor map among them. So a launch from a packet packs no arguments. ``onelaunch.launch.plan``
makes packets and fills the words in; ``parameters.py`` describes the parameters of a kernel for them, and a recording
(``recording.py``) holds the description.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from onelaunch.cuda.driver import library
from onelaunch.cuda.tensor_maps import MAP_BYTES

WORD = 8
"""Bytes of a word of a packet: an address, or a stream's handle."""

_CONFIGURATION = struct.Struct("=7I4xQQI4x")
"""Layout of ``CUlaunchConfig``: grid, block, shared memory, stream, address of the attributes, number of attributes."""

_STREAM = 32
"""Offset of the stream in ``CUlaunchConfig``, in bytes."""

SIZES = {"i1": "b", "i8": "b", "u1": "B", "u8": "B", "i16": "h", "u16": "H", "i32": "i", "u32": "I", "i64": "q", "u64": "Q"}
"""Format characters of :mod:`struct` for Triton's integer types."""

FORMATS = {**SIZES, "fp32": "f", "f32": "f", "fp64": "d"}
"""Format characters of :mod:`struct` for the types of numbers that a packet can hold."""


@dataclass(frozen=True)
class Address:
    """Parameter whose value is the address of a tensor, or a tensor map of that address."""

    source: int
    """Index of the tensor among those of a plan."""
    offset: int = 0
    """Bytes from the tensor's first element."""
    tensor_map: bytes | None = None
    """Tensor map whose first word is the address, or ``None`` for a pointer."""


@dataclass(frozen=True)
class Parameters:
    """One launch of a kernel: its function, its configuration, and the values of its parameters."""

    function: int
    """Handle of the kernel (``CUfunction``)."""
    values: tuple[bytes | Address, ...]
    """Values of the parameters, in order: the bytes of a number or of a null pointer, or an :class:`Address`."""
    grid: tuple[int, int, int]
    threads: int
    """Number of threads of a CTA."""
    shared_bytes: int
    """Dynamic shared memory of a CTA, in bytes."""
    attributes: int = 0
    """Address of the launch attributes, 0 without any."""
    attribute_count: int = 0
    owner: Any = None
    """Object that keeps the kernel loaded, and the attributes in memory."""

    @property
    def sizes(self) -> list[int]:
        """Sizes of the parameters in bytes."""
        return [
            len(value) if isinstance(value, bytes) else WORD if value.tensor_map is None else MAP_BYTES for value in self.values
        ]


@dataclass
class Image:
    """Content of a packet before it has an address: bytes, and words that hold addresses inside the packet itself.

    Attributes:
        content: Bytes of the packet; it begins at an address that is a multiple of :data:`MAP_BYTES`.
        inner: Pairs of the index of a word, and the offset in bytes of what it points to.
        known: Offsets of the values that launches share, since no launch changes them.
    """

    content: bytearray = field(default_factory=bytearray)
    inner: list[tuple[int, int]] = field(default_factory=list)
    known: dict[bytes | Address, int] = field(default_factory=dict)

    def append(self, value: bytes, alignment: int) -> int:
        """Append bytes at the next multiple of an alignment, and return their offset."""
        self.content += bytes(-len(self.content) % alignment)
        at = len(self.content)
        self.content += value
        return at


@dataclass(frozen=True)
class Placed:
    """Positions of one launch in a packet."""

    function: int
    configuration: int
    """Offset of the launch configuration in bytes."""
    pointers: int
    """Offset of the array of pointers to the parameters, in bytes."""
    stream: int
    """Index of the word that holds the stream."""
    words: tuple[tuple[int, int, int], ...]
    """Words that hold addresses: the index of the word, and the source and offset of the :class:`Address`.

    A word that an earlier launch of the packet reads too is not among them, since its address has been written.
    """
    sources: frozenset[int]
    """Sources of all addresses, those in words of earlier launches included."""


def place(image: Image, launch: Parameters) -> Placed:
    """Append a launch to an image and return its positions."""
    words, offsets = [], []
    for value in launch.values:
        at = image.known.get(value)
        if at is None:
            if isinstance(value, bytes):
                at = image.append(value, WORD)
            else:
                at = image.append(bytes(WORD), WORD) if value.tensor_map is None else image.append(value.tensor_map, MAP_BYTES)
                words.append((at // WORD, value.source, value.offset))
            image.known[value] = at
        offsets.append(at)
    pointers = image.append(bytes(WORD * max(len(offsets), 1)), WORD)
    image.inner += [(pointers // WORD + at, offset) for at, offset in enumerate(offsets)]
    configuration = image.append(
        _CONFIGURATION.pack(
            *launch.grid, launch.threads, 1, 1, launch.shared_bytes, 0, launch.attributes, launch.attribute_count
        ),
        WORD,
    )  # fmt: skip
    sources = frozenset([value.source for value in launch.values if isinstance(value, Address)])
    return Placed(launch.function, configuration, pointers, (configuration + _STREAM) // WORD, tuple(words), sources)


class Packet:
    """Buffer with the arguments and configurations of launches. One thread uses it at a time.

    Attributes:
        words: The buffer as 64-bit words.
        launches: For each launch pointers to its configuration, function and parameters, as objects of :mod:`ctypes`. They are
            the first three arguments of ``cuLaunchKernelEx``; the last one is ``None``.
        stream: Handle of the stream on which all of them run; ``None`` before :meth:`set_stream` is called.
    """

    __slots__ = ("_buffer", "_streams", "launches", "stream", "words")

    def __init__(self, image: Image, placed: Sequence[Placed]) -> None:
        size = len(image.content)
        self._buffer = ctypes.create_string_buffer(size + 2 * MAP_BYTES)
        self._streams = tuple(each.stream for each in placed)
        self.stream: int | None = None
        start = -ctypes.addressof(self._buffer) % MAP_BYTES
        first = ctypes.addressof(self._buffer) + start
        view = memoryview(self._buffer).cast("B")[start : start + size + -size % WORD]
        view[:size] = image.content
        self.words = view.cast("Q")
        for word, offset in image.inner:
            self.words[word] = first + offset
        pointer = ctypes.c_void_p
        self.launches = tuple(
            (pointer(first + each.configuration), pointer(each.function), pointer(first + each.pointers)) for each in placed
        )

    def set_stream(self, stream: int) -> None:
        """Write the stream into the configurations of all launches."""
        for word in self._streams:
            self.words[word] = stream
        self.stream = stream


@functools.cache
def launch_function() -> Any:
    """Return the driver's ``cuLaunchKernelEx``, which takes a configuration, a function, its parameters and ``None``.

    :mod:`ctypes` releases the GIL during the call. A full queue of the device may block it.
    """
    return library().cuLaunchKernelEx


@functools.cache
def _parameter_information() -> Any:
    """Return the driver's ``cuFuncGetParamInfo``, or ``None`` before CUDA 12.4, which introduced it."""
    function = getattr(library(), "cuFuncGetParamInfo", None)
    if function is not None:
        function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p]
    return function


def parameter_sizes(function: int, most: int) -> list[int] | None:
    """Return the sizes in bytes of a loaded kernel's parameters, or ``None`` if the driver does not tell them.

    ``parameters.py`` compares them with :attr:`Parameters.sizes`, since the order of the parameters of Triton's kernels is not
    documented. Where they differ, or are ``None``, it raises ``NotPlannable``, and calls of the kernel are not replayed.

    Args:
        function: Handle of the kernel.
        most: Largest number of parameters that are of interest; at most one more is returned.
    """
    ask = _parameter_information()
    if ask is None:
        return None
    sizes: list[int] = []
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    while len(sizes) <= most and ask(function, len(sizes), ctypes.byref(offset), ctypes.byref(size)) == 0:
        sizes.append(size.value)
    return sizes
