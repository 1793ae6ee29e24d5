"""Parameters of a kernel that Triton or NVRTC compiled, as the driver takes them.

A kernel that Triton compiled gets the arguments that did not become constants, one parameter each. A tensor descriptor takes
several parameters: a tensor map, the sizes as 32-bit and the strides as 64-bit integers. Two pointers to scratch memory
follow, which are null here. This order is Triton's own and not documented, so the sizes of all parameters are compared with
those that the driver reports for the loaded kernel. Where they differ, :class:`NotPlannable` is raised and launches stay with
Triton. ``recording.py`` calls the functions for each launch that it records. ``recording.py``, ``plan.py``, ``tape.py`` and
``planned.py`` raise :class:`NotPlannable` too. ``recording.py`` and ``tape.py`` catch some of these errors and note the reason;
``planned.py`` catches the others, and the call is then not replayed.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from onelaunch.cuda.module import Function
from onelaunch.cuda.tensor_maps import MAP_BYTES
from onelaunch.launch.packet import FORMATS, SIZES, WORD, Address, Parameters, parameter_sizes

Resolve: TypeAlias = Callable[[torch.Tensor], Address]
"""Function that finds a tensor among those of a plan."""

_PROBE = 1 << 20
"""Distance in bytes of two addresses whose tensor maps are compared."""


class NotPlannable(Exception):
    """Reason why a call cannot be replayed, such as an argument of a kernel that no plan knows."""


def of_triton(launch: Any, compiled: Any, resolve: Resolve) -> Parameters:
    """Return the parameters of a launch, from the kernel that Triton compiled for it.

    Args:
        launch: The :class:`~onelaunch.launch.launch.Launch`.
        compiled: Triton's compiled kernel, which has run.
        resolve: Function that finds the tensors of its arguments.

    Raises:
        NotPlannable: The kernel uses something that packets do not hold, or its parameters have other sizes than expected.
    """
    metadata = compiled.metadata
    warps, clusters, shared_bytes = compiled.packed_metadata[:3]
    scratch = metadata.global_scratch_size or metadata.profile_scratch_size
    if clusters != 1 or scratch or metadata.launch_cooperative_grid or metadata.launch_pdl:
        raise NotPlannable(f"{compiled.name} needs scratch memory or a launch attribute")
    given = dict(zip(launch.kernel.arg_names, launch.arguments, strict=False)) | launch.constants
    values: list[bytes | Address] = []
    maps = iter(getattr(metadata, "tensordesc_meta", None) or ())
    for name, kind in compiled.src.signature.items():
        values += _values(kind, given.get(name), resolve, maps)
    values += [bytes(WORD), bytes(WORD)]  # no scratch memory
    grid = (*launch.grid, 1, 1)[:3]
    parameters = Parameters(compiled.function, tuple(values), grid, 32 * warps, shared_bytes, owner=compiled)
    return checked(parameters)


def checked(parameters: Parameters) -> Parameters:
    """Return the parameters if the driver reports the same sizes for the kernel, else raise :class:`NotPlannable`."""
    if parameter_sizes(parameters.function, len(parameters.values)) != parameters.sizes:
        raise NotPlannable("the driver reports other parameters of the kernel")
    return parameters


def _values(kind: Any, value: Any, resolve: Resolve, maps: Iterator[Mapping[str, Any]]) -> list[bytes | Address]:
    """Return the parameters of one argument of a type that Triton found; none for a constant."""
    if isinstance(kind, tuple):
        return [each for part, item in zip(kind, value, strict=True) for each in _values(part, item, resolve, maps)]
    if kind == "constexpr":
        return []
    if kind.startswith("*"):
        return [bytes(WORD) if value is None else resolve(value)]
    if kind.startswith("tensordesc"):
        return _descriptor(value, resolve, next(maps, None))
    if kind not in FORMATS:
        raise NotPlannable(f"an argument has the type {kind}")
    return [struct.pack(f"={FORMATS[kind]}", int(value) if kind in SIZES else float(value))]


class _Elsewhere:
    """Stand-in for the tensor of a descriptor at another address."""

    def __init__(self, address: int) -> None:
        self._address = address

    def data_ptr(self) -> int:
        return self._address


class _Moved:
    """Descriptor with the attributes of another one, for a tensor at another address."""

    def __init__(self, descriptor: Any, address: int) -> None:
        vars(self).update(vars(descriptor), base=_Elsewhere(address))


def _descriptor(descriptor: Any, resolve: Resolve, metadata: Mapping[str, Any] | None) -> list[bytes | Address]:
    """Return the parameters of a tensor descriptor: its tensor map, sizes and strides."""
    if metadata is None:  # make_tensordesc_arg would return the tensor itself, which _bytes_of refuses for another reason
        raise NotPlannable("a tensor descriptor was lowered to pointers")
    from triton.backends.nvidia.driver import make_tensordesc_arg  # only NVIDIA's driver has it

    def encode(address: int) -> bytes:
        return _bytes_of(make_tensordesc_arg(_Moved(descriptor, address), metadata)[0])

    found = resolve(descriptor.base)
    described = with_map(found, encode, descriptor.base.data_ptr())
    sizes = [struct.pack("=i", size) for size in descriptor.shape]
    return [described, *sizes, *(struct.pack("=q", stride) for stride in descriptor.strides)]


def _bytes_of(tensor_map: Any) -> bytes:
    """Return the content of Triton's ``PyCUtensorMap``, a Python object whose second 128 bytes are the tensor map."""
    import ctypes

    if type(tensor_map).__basicsize__ != 2 * MAP_BYTES:
        raise NotPlannable("Triton keeps tensor maps in another way")
    return ctypes.string_at(id(tensor_map) + MAP_BYTES, MAP_BYTES)


def with_map(found: Address, encode: Callable[[int], bytes], address: int) -> Address:
    """Return an address with its tensor map, if the map can be re-addressed by writing its first word.

    The driver does not document the content of a tensor map. So the map of another address is encoded too, and must differ in the
    first word alone.

    Raises:
        NotPlannable: The first word is not the address, or other words depend on the address.
    """
    here, there = encode(address), encode(address + _PROBE)
    expected = [struct.pack("=Q", each) for each in (address, address + _PROBE)]
    if here[WORD:] != there[WORD:] or [here[:WORD], there[:WORD]] != expected:
        raise NotPlannable("tensor maps cannot be re-addressed by their first word")
    return Address(found.source, found.offset, here)


def of_cuda(
    function: Function,
    grid: tuple[int, int, int],
    arguments: Sequence[Any],
    resolve: Resolve,
    of_map: Callable[[bytes], Address],
) -> Parameters:
    """Return the parameters of a launch of a CUDA C++ kernel.

    Args:
        function: The loaded kernel.
        grid: Numbers of CTAs along x, y and z.
        arguments: One value for each of its parameters, as :class:`~onelaunch.cuda.module.Function` takes them.
        resolve: Function that finds the tensors of its arguments.
        of_map: Function that returns the address of a tensor map with the map itself.

    Raises:
        NotPlannable: A tensor or a tensor map is not known to the plan.
    """
    values: list[bytes | Address] = []
    for kind, value in zip(function.kinds, arguments, strict=True):
        if kind == "pointer":
            values.append(bytes(WORD) if value is None else resolve(value))
        elif kind == "map":
            values.append(of_map(value))
        else:
            values.append(struct.pack({"i32": "=i", "i64": "=q", "f32": "=f"}[kind], value))
    prepared = function.prepared(grid)
    return checked(
        Parameters(
            prepared.function, tuple(values), grid, prepared.threads, prepared.shared_bytes, prepared.attributes,
            prepared.attribute_count, owner=(function, prepared.owner),
        )
    )  # fmt: skip
