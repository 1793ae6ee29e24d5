"""A stand-in for Triton's driver on a machine without a GPU: kernels are compiled for Hopper, and their launches are counted.

``test_first_call.py`` and ``test_triton_cache.py`` of this folder launch by it.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from onelaunch import folders
from onelaunch.launch import side_by_side

triton = pytest.importorskip("triton", reason="the tests compile kernels of Triton")


class Machine:
    """Driver that loads and launches nothing.

    Attributes:
        launched: Names of the kernels in the order of their launches.
        compiled: Names of the kernels that were compiled, not found in the cache, and the thread of each.
        launchers: For each function that launches a kernel, the kernel's name and signature, and the thread that made it.
        unloadable: Number of the next loads of kernels that run out of memory.
    """

    def __init__(self) -> None:
        self.launched: list[str] = []
        self.compiled: list[tuple[str, str]] = []
        self.launchers: list[tuple[str, list[tuple[str, Any]], str]] = []
        self.unloadable = 0
        self.utils = SimpleNamespace(load_binary=self._load, get_device_properties=lambda device: {"max_shared_mem": 227 * 1024})

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        del device
        return 0

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        """Return the function that launches a kernel. On a GPU, Triton up to 3.6 compiles it for the signature."""
        self.launchers.append((metadata.name, list(source.signature.items()), threading.current_thread().name))
        return lambda *arguments: self._launch(metadata.name, arguments[4])

    def _launch(self, name: str, function: Any) -> None:
        assert function is not None, "a kernel that is not loaded was launched"
        self.launched.append(name)

    def _load(self, name: str, code: bytes, shared: int, device: int) -> Any:
        del code, shared, device
        if self.unloadable:
            self.unloadable -= 1
            raise RuntimeError("Triton Error [CUDA]: out of memory")
        return object(), name, 32, 0, 1024

    def listen(self, *, src: Any, cache_hit: bool, **_: Any) -> None:
        """Note a compilation of Triton's."""
        if not cache_hit:
            self.compiled.append((src.name, threading.current_thread().name))

    @property
    def names(self) -> list[str]:
        """Names of the compiled kernels in alphabetical order, one for each compilation."""
        return sorted(name for name, _ in self.compiled)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Machine:
    """Give a test a process in which no kernel has been compiled: empty caches on disk and in memory, and four threads."""
    made = Machine()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setenv(folders.CACHE, str(tmp_path / "onelaunch"))
    monkeypatch.setenv(side_by_side.JOBS, "4")
    monkeypatch.setattr(triton.runtime.driver, "_active", made, raising=False)
    monkeypatch.setattr(triton.knobs.compilation, "listener", made.listen)
    monkeypatch.setattr(side_by_side, "_DONE", set())
    monkeypatch.setattr(side_by_side, "_TOLD", False)
    monkeypatch.setattr(side_by_side, "compile_triton", printing(side_by_side.compile_triton))
    forget_kernels()
    yield made
    forget_kernels()


def printing(compile_build: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, which prints its errors. Threads leave them to the launch; pytest shows what a failed test printed."""

    def compile_or_print(*arguments: Any) -> Any:
        try:
            return compile_build(*arguments)
        except BaseException:
            traceback.print_exc()
            raise

    return compile_or_print


def forget_kernels() -> None:
    """Remove the compiled kernels of the test from memory."""
    from tests.launch import first_kernels

    for kernel in vars(first_kernels).values():
        if isinstance(kernel, triton.JITFunction):
            kernel.device_caches.clear()


def vectors(count: int = 1, size: int = 256) -> list[torch.Tensor]:
    return [torch.randn(size) for _ in range(count)]
