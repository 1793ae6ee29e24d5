"""Compile CUDA C++ with NVRTC at first use, and keep the machine code in the user's cache folder.

Compiling needs no GPU, no driver and no nvcc, only the extra ``cuda`` (cuda-bindings and NVRTC). Each :class:`Source` is compiled
once per architecture. ``module.py`` calls :func:`compile_source` when a kernel is loaded, ``launch/side_by_side.py`` for the
kernels of a first call or of a study's probes, and ``launch/ahead.py`` for ``onelaunch prebuild``, after it has asked
:func:`compiled_before`. The inspector and ``tools/hash_kernels.py`` call :func:`compile_now`. The package :mod:`onelaunch.cuda`
exports the other functions and says who calls them.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.resources
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from onelaunch import folders
from onelaunch.cuda import sass
from onelaunch.errors import CompileError, CompilerMissing


@dataclass(frozen=True)
class Source:
    """One kernel in CUDA C++ with its headers and macros. It is hashable, and is the key of its compiled code."""

    name: str
    """File name that the compiler's messages show."""
    text: str
    """CUDA C++ of the file."""
    entry: str
    """Name of the kernel function, which is declared ``extern "C"``."""
    headers: tuple[tuple[str, str], ...] = ()
    """Name and content of each file that the source may include. The CUDA toolkit's headers are not available to NVRTC here."""
    defines: tuple[tuple[str, str | int], ...] = ()
    """Macros and their values."""


def read(package: str, file: str) -> str:
    """Return the content of a ``.cu`` or ``.cuh`` file in the folder of a package."""
    return importlib.resources.files(package).joinpath(file).read_text(encoding="utf-8")


def include(name: str) -> tuple[str, str]:
    """Return the name and content of a header in ``cuda/include``, as an entry of :attr:`Source.headers`."""
    return name, read("onelaunch.cuda", f"include/{name}")


OPTIONS = ("--std=c++17",)
"""Compiler options passed for every kernel."""


class Compiled(NamedTuple):
    """Result of NVRTC for a source."""

    cubin: bytes
    """Machine code. In that for Hopper, :mod:`onelaunch.cuda.sass` has patched stall-count hazards."""
    ptx: str
    """PTX that the machine code was assembled from."""
    log: str
    """Warnings and remarks of the compiler and of the assembler."""


@functools.cache
def version() -> tuple[int, int]:
    """Return NVRTC's version as (major, minor).

    Raises:
        CompilerMissing: cuda-bindings or NVRTC is not installed.
    """
    try:
        major, minor = _nvrtc("nvrtcVersion")
    except ImportError:
        raise CompilerMissing("cuda-bindings is not installed") from None
    except RuntimeError as error:  # cuda-bindings is installed; it loads NVRTC's library at its first call
        raise CompilerMissing("cuda-bindings finds no NVRTC") from error
    return major, minor


@functools.cache
def missing() -> str | None:
    """Return why CUDA C++ cannot be compiled here, as a predicate that completes "it ...", or ``None`` if it can be."""
    try:
        version()
    except CompilerMissing:
        return "needs cuda-bindings and NVRTC: pip install 'onelaunch[cuda]'"
    return None


@functools.cache
def compile_source(source: Source, architecture: str) -> bytes:
    """Return the cubin of a source for an architecture such as ``sm_90a``, from the cache folder or compiled now.

    The process keeps what it has returned.

    Raises:
        CompilerMissing: The extra ``cuda`` is not installed.
        CompileError: NVRTC refused the source. The message holds NVRTC's log.
    """
    path, key = _place(source, architecture)
    cubin = _stored(path)
    if cubin is None:
        # One of 16 locks, by the first digit of the key: a process seldom waits for another one that compiles a different kernel.
        with folders.process_lock(folders.cache_folder() / "locks", f"compile-{key[0]}"):
            cubin = _stored(path)  # another process may have compiled it while this one waited for the lock
            if cubin is None:
                cubin = compile_now(source, architecture).cubin
                folders.keep(path, cubin + hashlib.sha256(cubin).digest())
    return cubin


def compiled_before(source: Source, architecture: str) -> bool:
    """Return whether the cache folder holds the whole cubin of a source for an architecture; raise CompilerMissing as above."""
    return _stored(_place(source, architecture)[0]) is not None


def _place(source: Source, architecture: str) -> tuple[Path, str]:
    """Return the file of the cache folder for the cubin of a source, and the key of everything that decides its content."""
    key = hashlib.sha256(repr((version(), OPTIONS, sass.RULES, architecture, source)).encode()).hexdigest()
    return folders.cache_folder() / "cubins" / f"{source.entry}-{architecture}-{key[:32]}.cubin", key


def compile_now(source: Source, architecture: str) -> Compiled:
    """Compile a source without reading or writing the cache folder; raise the same errors as :func:`compile_source`."""
    version()  # raises CompilerMissing before the import below can fail
    nvrtc = importlib.import_module("cuda.bindings.nvrtc")
    names = [name.encode() for name, _ in source.headers]
    contents = [content.encode() for _, content in source.headers]
    defines = [f"--define-macro={name}={value}" for name, value in source.defines]
    options = [option.encode() for option in (f"--gpu-architecture={architecture}", *OPTIONS, *defines)]
    program = _nvrtc("nvrtcCreateProgram", source.text.encode(), source.name.encode(), len(names), contents, names)
    try:
        (error,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        log = _product(program, "ProgramLog").rstrip(b"\0").decode(errors="replace").strip()
        if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise CompileError(source.name, architecture, log=log or error.name)
        cubin = _product(program, "CUBIN")
        if architecture in sass.ARCHITECTURES:
            cubin = sass.patched(cubin)
        return Compiled(cubin, _product(program, "PTX").rstrip(b"\0").decode(), log)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _product(program: Any, name: str) -> bytes:
    """Return one output of a compiled NVRTC program: ``name`` is ``CUBIN``, ``PTX`` or ``ProgramLog``."""
    buffer = bytearray(_nvrtc(f"nvrtcGet{name}Size", program))
    _nvrtc(f"nvrtcGet{name}", program, buffer)
    return bytes(buffer)


def _nvrtc(call: str, *arguments: Any) -> Any:
    """Call a function of NVRTC and return its result.

    Raises:
        RuntimeError: NVRTC returned an error, which these functions do only when they are called wrongly, or if
            ``cuda-bindings`` finds no NVRTC.
    """
    error, *results = getattr(importlib.import_module("cuda.bindings.nvrtc"), call)(*arguments)
    if error:
        raise RuntimeError(f"{call} returned {error.name}")
    return results[0] if len(results) == 1 else results


_DIGEST = hashlib.sha256().digest_size


def _stored(path: Path) -> bytes | None:
    """Return the cubin in a file of the cache, or ``None`` if the file is missing or damaged.

    The SHA-256 digest of the cubin follows it in the file.
    """
    if (data := folders.kept(path)) is None:
        return None
    cubin, digest = data[:-_DIGEST], data[-_DIGEST:]
    if hashlib.sha256(cubin).digest() == digest:
        return cubin
    folders.warn_unusable(path, "is damaged")
    return None
