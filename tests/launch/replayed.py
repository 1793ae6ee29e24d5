"""A stand-in for a GPU on which plans are replayed: CPU memory, and a driver whose kernels are Python functions.

The stand-in kernels are launched in both of the ways that a real kernel is. Triton's way calls :meth:`Kernel.run` with tensors.
The driver's way gets the addresses of a launch configuration and of the parameters, as ``cuLaunchKernelEx`` does, and reads them
from memory. The tests of plans and of call sites that need no GPU use it.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from onelaunch.launch import parameters, plan

knobs = pytest.importorskip("triton").knobs

CTYPES = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp32": ctypes.c_float}
"""Types of numbers by Triton's names."""


class Configuration(ctypes.Structure):
    """``CUlaunchConfig``."""

    _fields_ = (
        ("grid", ctypes.c_uint32 * 3), ("block", ctypes.c_uint32 * 3), ("shared_bytes", ctypes.c_uint32),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.c_void_p), ("attribute_count", ctypes.c_uint32),
    )  # fmt: skip


class Kernel:
    """Kernel whose arguments are float32 vectors and numbers, computed by a Python function of tensors and numbers.

    Args:
        function: Function of the arguments in order. It writes to its tensors.
        kinds: Triton's type of each parameter, by name.
    """

    __name__ = "stand_in_kernel"

    def __init__(self, machine: Machine, function: Callable[..., None], **kinds: str) -> None:
        self.function, self.kinds, self.arg_names = function, kinds, list(kinds)
        self.handle = next(machine.handles)
        self.by_triton = 0
        machine.kernels[self.handle] = self

    def run(self, *arguments: Any, grid: tuple[int, ...], warmup: bool, **constants: Any) -> Any:
        """Compute as Triton would launch the kernel, and return what Triton compiled."""
        self.by_triton += 1
        knobs.runtime.launch_enter_hook(None)  # as Triton does; by it a recording notices launches that it was not told of
        given = dict(zip(self.arg_names, arguments, strict=False)) | constants
        with _disable_current_modes():  # a recording sees nothing of what a kernel does
            self.function(
                *(
                    value.as_strided((extent(value),), (1,)) if isinstance(value, torch.Tensor) else value
                    for value in (given[name] for name, kind in self.kinds.items() if kind != "constexpr")
                )
            )
        metadata = SimpleNamespace(
            global_scratch_size=0, profile_scratch_size=0, launch_cooperative_grid=False, launch_pdl=False, tensordesc_meta=None
        )
        return SimpleNamespace(
            name=self.__name__, metadata=metadata, packed_metadata=(4, 1, 0), function=self.handle,
            src=SimpleNamespace(signature=self.kinds),
        )  # fmt: skip


def extent(tensor: torch.Tensor) -> int:
    """Return the number of elements from the first to the last one of a tensor."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


class Machine:
    """Driver of the stand-in.

    Attributes:
        launches: For each launch by the driver the stream and the grid.
        error: Result of the next launches.
    """

    LENGTH = 1 << 10
    """Bytes of a vector behind a pointer that a kernel may read and write."""

    def __init__(self) -> None:
        self.kernels: dict[int, Kernel] = {}
        self.handles = itertools.count(1 << 40)
        self.launches: list[tuple[int, tuple[int, ...]]] = []
        self.error = 0
        self.streams: dict[int, int] = {}
        self.device = 0
        kind = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)
        self.function = kind(self.launch)

    def stream(self, index: int) -> int:
        """Return the stream of this thread."""
        return self.streams.get(threading.get_ident(), 7)

    def sizes(self, function: int, most: int) -> list[int]:
        """Return the sizes of a kernel's parameters, as the driver reports them. The last two are pointers to scratch memory."""
        kinds = [kind for kind in self.kernels[function].kinds.values() if kind != "constexpr"]
        return [8 if kind.startswith("*") else ctypes.sizeof(CTYPES[kind]) for kind in kinds] + [8, 8]

    def launch(self, configuration: int, function: int, pointers: int, _: Any) -> int:
        """Run a kernel with the arguments that lie in memory."""
        config, kernel = Configuration.from_address(configuration), self.kernels[function]
        if self.error:
            return self.error
        kinds = [kind for kind in kernel.kinds.values() if kind != "constexpr"]
        addresses = (ctypes.c_void_p * len(kinds)).from_address(pointers)
        given = []
        for kind, at in zip(kinds, addresses, strict=True):
            if kind.startswith("*"):
                where = ctypes.c_void_p.from_address(at).value
                given.append(None if where is None else vector(where, self.LENGTH))
            else:
                given.append(CTYPES[kind].from_address(at).value)
        self.launches.append((config.stream or 0, tuple(config.grid)))
        kernel.function(*given)
        return 0


def vector(address: int, size: int) -> torch.Tensor:
    """Return float32 memory at an address as a tensor, which does not own it."""
    return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=torch.float32)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Replay plans on CPU memory during a test, by a driver of the stand-in."""
    made = Machine()
    monkeypatch.setattr(plan.Device, "types", ("cpu",))
    monkeypatch.setattr(plan.Device, "taped", ())
    monkeypatch.setattr(plan.Device, "is_capturing", staticmethod(lambda: False))
    monkeypatch.setattr(plan.Device, "current", staticmethod(lambda: made.device))
    monkeypatch.setattr(plan.Device, "stream", staticmethod(made.stream))
    monkeypatch.setattr(plan.Device, "launch_function", staticmethod(lambda: made.function))
    monkeypatch.setattr(parameters, "parameter_sizes", made.sizes)
    return made
