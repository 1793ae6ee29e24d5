"""The decode kernels' own source, compiled for the CPU and linked with an emulated GPU (``tests/decode/host``).

CUDA threads are fibers, bulk copies complete late, and CTAs progress unevenly, so that missing synchronization gives wrong
results. A *watched* library also looks for races: accesses to shared memory that no barrier orders. Tests of the decode kernels
without a GPU (``test_*_host.py``) launch them by :class:`HostKernel`.
"""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from onelaunch.decode.codegen.emit import source
from onelaunch.decode.codegen.layout import Tuning, launch_of, layout_of
from onelaunch.decode.runtime.memory import Memory

HERE = Path(__file__).parent / "host"
COMPILER = shutil.which("g++") or shutil.which("clang++")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
# Watched libraries need them: g++ for its sanitizer's calls, addr2line to name the lines of a race.
needs_watch = pytest.mark.skipif(not (shutil.which("g++") and shutil.which("addr2line")), reason="needs g++ and addr2line")
LINKER = ["-fuse-ld=gold"] if shutil.which("ld.gold") else []
"""The compiler's option for a linker that needs a quarter of the time of the usual one, where it is installed."""
SWEEPS = 20_000_000
"""Sweeps of the emulated scheduler over all threads after which a launch counts as hanging."""


def build(plan, tuning: Tuning, folder: Path, *, watched: bool = False, change: tuple[str, str] | None = None) -> Path:
    """Compile a plan's kernel into a shared library, once per content, and return the library's path.

    The library is moved into place when it is complete, because other test workers look for it at the same time. The kernel
    is compiled without optimization, because optimizing takes longer than its launches. The emulated machine is optimized, but
    compiled only once. A watched kernel is optimized too: its local variables then stay in registers and do not count as memory
    accesses.

    Args:
        plan: Plan of the kernel.
        tuning: Tuning of the kernel, such as the depth of its shared-memory ring.
        folder: Folder of the library.
        watched: Whether the library looks for races in shared memory.
        change: A string that occurs exactly once in the kernel's source, and its replacement.
    """
    code = source(plan, tuning)
    files = {**dict(code.headers), "step.cu": code.text, "run.cpp": (HERE / "run.cpp").read_text()}
    return library_of("decode", files, folder, watched=watched, change=change, level="-O0")


def library_of(
    name: str, files: dict[str, str], folder: Path, *, watched: bool, change: tuple[str, str] | None = None, level: str = "-O1"
) -> Path:
    """Compile a kernel with the program that calls it and the emulated GPU, once per content, and return the library's path.

    Args:
        name: Beginning of the library's name.
        files: Content of the source files by name; ``run.cpp`` calls the kernel and includes the others.
        folder: Folder of the library.
        watched: Whether the library looks for races in shared memory. It is compiled with the first level of optimization then.
        change: A string that occurs exactly once in the files, and its replacement.
        level: Level of optimization otherwise.
    """
    files = {**files, "machine.cuh": (HERE / "machine.cuh").read_text()}
    if change:
        (changed,) = (file for file, text in files.items() if change[0] in text)
        assert files[changed].count(change[0]) == 1
        files[changed] = files[changed].replace(*change)
    pieces = [machine(part, folder, watched=watched) for part in ("machine.cpp", "races.cpp")[: 1 + watched]]
    told = ["-O1", "-g1", "-fsanitize=thread"] if watched else [level]
    library = folder / f"{name}-{key_of(files, [piece.name for piece in pieces], told)}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=folder) as work:
            for file, text in files.items():
                (Path(work) / file).write_text(text)
            piece, whole = Path(work) / "run.o", Path(work) / library.name
            compile_to(piece, "-c", *told, f"-I{work}", Path(work) / "run.cpp")
            compile_to(whole, "-shared", *LINKER, piece, *pieces)
            whole.replace(library)
    return library


def machine(name: str, folder: Path, *, watched: bool) -> Path:
    """Compile one part of the emulated machine, once, and return its object file, which every kernel's library links."""
    told = ["-c", "-O3", *(["-DWATCHED"] if watched else [])]
    piece = folder / f"{name}-{key_of([path.read_text() for path in sorted(HERE.glob('*.c*'))], told)}.o"
    if not piece.exists():
        with tempfile.TemporaryDirectory(dir=folder) as work:
            whole = Path(work) / piece.name
            compile_to(whole, *told, HERE / name)
            whole.replace(piece)
    return piece


def compile_to(file: Path, *arguments: object) -> None:
    """Run the compiler with hidden symbols, so that each loaded library has an emulated machine of its own."""
    command = [COMPILER, "-std=c++17", "-fno-strict-aliasing", "-fvisibility=hidden", "-w", "-fPIC", *arguments, "-o", file]
    subprocess.run([str(each) for each in command], check=True)


def spans_of(tensors: Sequence[torch.Tensor | None]) -> ctypes.Array[ctypes.c_longlong]:
    """Return the bytes from the first to the last element of each tensor, 0 for a missing or empty one."""

    def span(tensor: torch.Tensor | None) -> int:
        if tensor is None or not tensor.numel():
            return 0
        return (1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))) * tensor.element_size()

    return (ctypes.c_longlong * len(tensors))(*map(span, tensors))


def key_of(*content: object) -> str:
    """Return a digest of everything a file is compiled from, for use in the file's name."""
    return hashlib.sha256(repr(content).encode()).hexdigest()[:24]


def found_races(kernel: ctypes.CDLL, binary: Path) -> list[str]:
    """Return the races that a watched library found: pairs of shared-memory accesses without a barrier between them.

    Each race is one line: its kind, then the two source lines.
    """
    kernel.race.restype = ctypes.c_char_p
    found = []
    for which in range(kernel.race_count()):
        places = ctypes.c_size_t(), ctypes.c_size_t()
        kind = kernel.race(which, *map(ctypes.byref, places)).decode()
        # The places are return addresses. One byte less lies in the call, whose line addr2line shall name.
        command = ["addr2line", "-se", str(binary), *(hex(place.value - 1) for place in places)]
        lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
        found.append(f"{kind}: {' '.join(lines)}")
    return found


class HostLaunch(ABC):
    """Base of stand-ins for ``CudaLaunch`` that run a kernel of few rows on the CPU.

    Attributes:
        folder: Folder of the libraries.
        options: Arguments of :func:`library_of`: ``watched`` and ``change``.
        seed: Seed of the delays of CTAs, warps and copies.
        launched: Configurations of the launches.
        races: Races that watched launches have found.
        strict: Flag that a launch must end.
        sweeps: Sweeps of the emulated scheduler over all threads after which a launch counts as hanging.
    """

    name: ClassVar[str]
    """Name of the library."""
    program: ClassVar[Path]
    """C++ file with the function ``run`` that launches the kernel."""
    folder: Path
    options: dict[str, Any]
    seed, strict, sweeps = 1, True, 1_000_000
    launched: list[Any]
    races: list[str]

    def __init__(self, config: Any, device: torch.device, grid: tuple[int, int, int], *arguments: Any) -> None:
        assert device.type == "cpu"
        self.config, self.ctas, self.arguments = config, grid[0], arguments

    @classmethod
    def fresh(cls, folder: Path, **options: Any) -> Any:
        """Return a subclass with lists of its own, for one test."""
        return type("Launches", (cls,), {"folder": folder, "options": options, "launched": [], "races": []})

    @staticmethod
    @abstractmethod
    def source_of(config: Any) -> Any:
        """Return the source of the kernel of a configuration."""

    @abstractmethod
    def call(self, run: Any, pointers: Any, tensors: Sequence[torch.Tensor | None], numbers: Sequence[Any]) -> bool:
        """Call ``run`` of the library, and return whether the launch ended.

        Args:
            run: The function.
            pointers: Addresses of the launch's tensors.
            tensors: These tensors.
            numbers: The other arguments of the launch.
        """

    def run(self) -> None:
        """Launch, and require that the launch ended, if ``strict``."""
        host, code = type(self), self.source_of(self.config)
        files = {**dict(code.headers), code.name: code.text, "run.cpp": self.program.read_text()}
        binary = library_of(self.name, files, self.folder, **{"watched": False, "change": None, **self.options})
        kernel, tensors = ctypes.CDLL(str(binary)), self.arguments[:7]
        pointers = (ctypes.c_void_p * len(tensors))(*(None if each is None else each.data_ptr() for each in tensors))
        ended = self.call(kernel.run, pointers, tensors, self.arguments[7:])
        assert ended or not host.strict, "the launch did not end"
        host.launched.append(self.config)
        if self.options.get("watched"):
            host.races += found_races(kernel, binary)


class HostKernel:
    """Launcher of a plan's kernel on the CPU.

    Args:
        plan: Plan of the kernel.
        folder: Folder of the compiled library.
        tuning: Depth of the shared-memory ring and bulk copies in flight.
        options: Arguments ``watched`` and ``change`` of :func:`build`.
    """

    def __init__(self, plan, folder: Path, tuning: Tuning | None = None, **options) -> None:
        # A short ring by default, so that its stages are reused often.
        self.plan, self.tuning = plan, tuning or Tuning(stages=3, flight=2, flight_local=3)
        self.binary = build(plan, self.tuning, folder, **options)
        self.kernel = ctypes.CDLL(str(self.binary))
        self.shared = layout_of(plan, self.tuning).bytes
        self.kernel.run.restype = ctypes.c_int

    def races(self) -> list[str]:
        """Return the races that a watched kernel found, see :func:`found_races`."""
        return found_races(self.kernel, self.binary)

    def __call__(self, memory: Memory, cache, count=1, *, token=None, position=-1, seed=0, sampler=None):
        """Run the kernel for ``count`` tokens and return the logits of the last one, ``[V]`` float32.

        For a plan with a launch per phase, ``token`` and ``position`` may be given only with one token, and ``sampler`` is
        ignored.

        Args:
            memory: Buffers of the plan.
            cache: KV cache with room for the tokens; the kernel writes their keys and values to it.
            count: Number of tokens.
            token: First token, ``[1]``; by default the one that ``memory`` has at the position.
            position: Position of the first token; by default the one in the kernel's state.
            seed: Seed of the delays of CTAs, warps and bulk copies.
            sampler: Sampling parameters; by default the token with the largest logit is taken.
        """
        logits = torch.full((self.plan.config.vocab_size,), torch.nan)
        if not self.plan.separate:
            self.launch(memory, cache, logits, token, (count, position, 0, 0, self.plan.ctas), seed, sampler)
            return logits
        for _ in range(count):
            for number, (layer, phase) in enumerate(self.plan.instances()):
                code, ctas = launch_of(self.plan, phase)
                self.launch(memory, cache, logits, token, (1, position, layer, code, ctas), seed + number)
        return logits

    def launch(self, memory, cache, logits, token, numbers, seed, sampler=None):
        """Run one launch with the kernel's raw arguments, and require that it ends.

        ``numbers`` are the tokens, the position (-1 for the one in the state), the layer and the phase's number, which only a
        plan with a launch per phase reads, and the number of CTAs.
        """
        tensors = memory.arguments(cache, logits, token, sampler)
        assert all(tensor is None or tensor.is_contiguous() for tensor in tensors)
        pointers = (ctypes.c_void_p * len(tensors))(*(None if tensor is None else tensor.data_ptr() for tensor in tensors))
        finished = self.kernel.run(pointers, cache.capacity, *numbers, self.shared, seed, ctypes.c_longlong(SWEEPS))
        assert finished, "the launch did not end"


def set_position(memory: Memory, position: int, token: int) -> None:
    """Put a sequence at a position: store the position in the kernel's state, and the token there."""
    memory.state[0] = position
    memory.tokens[position] = token
