"""CUDA C++ compiled by NVRTC at first use, and kept in the user's cache folder.

Compiling needs neither GPU, driver nor nvcc, only the extra ``cuda`` (cuda-bindings and NVRTC). A :class:`Source` becomes machine
code once per architecture.
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
    """One kernel in CUDA C++. Hashable: the key of what was compiled."""

    name: str
    """File name that the compiler's messages show."""
    text: str
    entry: str
    """Name of the kernel, which is declared ``extern "C"``."""
    headers: tuple[tuple[str, str], ...] = ()
    """Name and text of each file that may be included. There are no others: NVRTC brings none of the CUDA toolkit's."""
    defines: tuple[tuple[str, str | int], ...] = ()
    """Macros and their values."""


def read(package: str, file: str) -> str:
    """Return the text of a ``.cu`` or ``.cuh`` file that lies beside the modules of a package."""
    return importlib.resources.files(package).joinpath(file).read_text(encoding="utf-8")


def include(name: str) -> tuple[str, str]:
    """Return a header that kernels of several operations share, as :attr:`Source.headers` hold it: its name and its text."""
    return name, read("onelaunch.cuda", f"include/{name}")


OPTIONS = ("--std=c++17",)
"""Compiler options passed for every kernel."""


class Compiled(NamedTuple):
    """Result of NVRTC for a source."""

    cubin: bytes
    """Machine code, with the assembler's fault that :mod:`onelaunch.cuda.sass` knows patched."""
    ptx: str
    log: str
    """Warnings and remarks, those of the assembler included."""


@functools.cache
def version() -> tuple[int, int]:
    """Return NVRTC's version; :class:`CompilerMissing` when it is not here."""
    try:
        major, minor = _nvrtc("nvrtcVersion")
    except ImportError:
        raise CompilerMissing("cuda-bindings is not installed") from None
    except RuntimeError as error:  # cuda-bindings is, and loads the library at its first call
        raise CompilerMissing("cuda-bindings finds no NVRTC") from error
    return major, minor


@functools.cache
def missing() -> str | None:
    """Return why CUDA C++ cannot be compiled here, in words that complete "it ...", or ``None``."""
    try:
        version()
    except CompilerMissing:
        return "needs cuda-bindings and NVRTC: pip install 'onelaunch[cuda]'"
    return None


@functools.cache
def compile_source(source: Source, architecture: str) -> bytes:
    """Return machine code (a cubin) of a source for an architecture such as ``sm_90a``: from the cache folder, or compiled now.

    Raises:
        CompilerMissing: the extra ``cuda`` is not installed.
        CompileError: with NVRTC's log.
    """
    key = hashlib.sha256(repr((version(), OPTIONS, sass.RULES, architecture, source)).encode()).hexdigest()
    path = folders.cache_folder() / "cubins" / f"{source.entry}-{architecture}-{key[:32]}.cubin"
    cubin = _stored(path)
    if cubin is None:
        # 16 locks, so that processes seldom wait for another kernel
        with folders.alone(folders.cache_folder() / "locks", f"compile-{key[0]}"):
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
            cubin = sass.patched(cubin)
        return Compiled(cubin, _product(program, "PTX").rstrip(b"\0").decode(), log)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _product(program: Any, name: str) -> bytes:
    """Return one of the things that a program holds once it was compiled."""
    buffer = bytearray(_nvrtc(f"nvrtcGet{name}Size", program))
    _nvrtc(f"nvrtcGet{name}", program, buffer)
    return bytes(buffer)


def _nvrtc(call: str, *arguments: Any) -> Any:
    """Return the result of a call of NVRTC that fails only when it is called wrongly."""
    error, *results = getattr(importlib.import_module("cuda.bindings.nvrtc"), call)(*arguments)
    if error:
        raise RuntimeError(f"{call} returned {error.name}")
    return results[0] if len(results) == 1 else results


_DIGEST = hashlib.sha256().digest_size


def _stored(path: Path) -> bytes | None:
    """Return the code in a file of the cache, or ``None`` where there is none or its digest, which follows it, differs."""
    if (data := folders.kept(path)) is None:
        return None
    cubin, digest = data[:-_DIGEST], data[-_DIGEST:]
    if hashlib.sha256(cubin).digest() == digest:
        return cubin
    folders.say_unusable(path, "is damaged")
    return None
