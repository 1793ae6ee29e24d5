"""Cache of compiled kernels between test runs, for ``make check``, which compiles the kernels for every architecture.

It holds Triton's own cache, NVRTC's output and the disassembler's listings. The environment variable ``ONELAUNCH_TEST_CACHE``
names the folder. Without it, only Triton's own cache is used. ``conftest.py`` calls :func:`keep_triton`, and
``test_kernels_compile.py`` :func:`keep_inspections`.
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
"""Environment variable that names the folder of the cache."""


def keep_triton() -> None:
    """Make Triton store its compilations in the folder as well. Call it before the first kernel is compiled."""
    if folder := os.environ.get(FOLDER):
        os.environ.setdefault("TRITON_CACHE_DIR", str(Path(folder) / "triton"))


def keep_inspections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cache NVRTC's output and the disassembler's listings, keyed by everything that determines them."""
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
    """Return the digest of the program that disassembles machine code."""
    from triton import knobs

    return hashlib.sha256(Path(knobs.nvidia.cuobjdump.path).read_bytes()).digest()


def kept(folder: Path, content: bytes, make: Callable[[], Any]) -> Any:
    """Return the result that is cached under a key, or compute and cache it. An incomplete file is made again.

    A file holds the SHA-256 digest of its data (32 bytes), then the data: the pickled result, compressed.

    Args:
        folder: Folder of the file.
        content: Key: everything that determines the result. Its digest is the file's name.
        make: Function that computes the result.
    """
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
    # The file is moved into place when it is complete, because other test processes may read it at the same time.
    unfinished = path.with_suffix(f".{os.getpid()}")
    unfinished.write_bytes(hashlib.sha256(data).digest() + data)
    unfinished.replace(path)
    return made
