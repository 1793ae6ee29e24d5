"""Compiled kernels kept between test runs, by their content: for continuous integration, where every run compiles all of them.

The environment variable ``ONELAUNCH_TEST_CACHE`` names the folder. Without it nothing is kept but what Triton keeps by itself.
"""

from __future__ import annotations

import functools
import hashlib
import os
import pickle
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from onelaunch import cuda
from onelaunch.cuda import compiler, sass
from onelaunch.workbench import inspection

FOLDER = "ONELAUNCH_TEST_CACHE"


def keep_triton() -> None:
    """Make Triton keep what it compiles in the folder as well; to be called before the first kernel is compiled."""
    if folder := os.environ.get(FOLDER):
        os.environ.setdefault("TRITON_CACHE_DIR", str(Path(folder) / "triton"))


def keep_inspections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what NVRTC compiles, and the listings of the disassembler, by all that decides them."""
    folder = os.environ.get(FOLDER)
    if not folder:
        return
    compile_now, disassemble = cuda.compile_now, inspection._disassemble

    def compiled(source: cuda.Source, architecture: str) -> cuda.Compiled:
        key = cuda.version(), compiler.OPTIONS, sass.RULES, architecture, source
        return cuda.Compiled(*kept(Path(folder) / "nvrtc", repr(key).encode(), lambda: tuple(compile_now(source, architecture))))

    def disassembled(cubin: bytes, kernel: str) -> str:
        return kept(Path(folder) / "sass", disassembler() + cubin, lambda: disassemble(cubin, kernel))

    monkeypatch.setattr(cuda, "compile_now", compiled)
    monkeypatch.setattr(inspection, "_disassemble", disassembled)


@functools.cache
def disassembler() -> bytes:
    """The digest of the program that lists machine code."""
    from triton import knobs

    return hashlib.sha256(Path(knobs.nvidia.cuobjdump.path).read_bytes()).digest()


def kept(folder: Path, content: bytes, make: Callable[[], Any]) -> Any:
    """Return what was made of this content before, or make it now; a file that is not whole is made again."""
    path = folder / hashlib.sha256(content).hexdigest()[:32]
    try:
        data = path.read_bytes()
        if hashlib.sha256(data[32:]).digest() == data[:32]:
            return pickle.loads(zlib.decompress(data[32:]))
    except OSError:
        pass
    made = make()
    data = zlib.compress(pickle.dumps(made), 1)
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}")
    unfinished.write_bytes(hashlib.sha256(data).digest() + data)
    unfinished.replace(path)
    return made
