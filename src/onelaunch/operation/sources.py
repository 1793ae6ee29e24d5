"""Digests of the code of variants, so that times of one version of a variant are not taken for those of another.

The digest of a variant covers the file of its function, the files of its package that this one imports, directly or not, and the
CUDA and C++ sources in their folders and one level below. A digest is taken once in a process, when it is first asked for,
because the process keeps running the code that it has loaded. ``workbench/running.py`` asks for those of the variants when a run
begins, so that files changed later do not count. ``workbench/result/sources.py`` stores them in a result, and
``workbench/resume.py`` compares the stored ones. The dispatcher compares those in a measured table with those of its variants.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import marshal
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from onelaunch.operation.variant import Variant

NATIVE = (".cu", ".cuh", ".cpp", ".h")
"""Suffixes of sources that Python files read instead of importing them."""

_NATIVE_PLACES = ("*", "*/*")
"""Patterns of the paths of such sources, relative to the folder of a Python file."""


def digest_of(variant: Variant) -> str:
    """Return the SHA-256 of a variant's code.

    A function that no file holds, as in a notebook, has the digest of its bytecode. A callable without bytecode has the digest
    of the module that its ``__module__`` names, if a file holds that, and else an empty string.
    """
    digest = module_digest(getattr(variant.run, "__module__", None) or "")
    if not digest and (code := getattr(variant.run, "__code__", None)) is not None:
        digest = hashlib.sha256(marshal.dumps(code)).hexdigest()
    return digest


@functools.cache
def module_digest(module: str) -> str:
    """Return the SHA-256 of a module and of what it imports of its package; empty if no file holds the module."""
    root = module.partition(".")[0]
    folders = _folders(root)
    files = _reached(module, folders)
    if not files:
        return ""
    if not folders:  # a module of its own, beside which other packages lie
        return digest_of_files(files)
    native = {
        path
        for folder in {file.parent for file in files.values()}
        for place in _NATIVE_PLACES
        for path in folder.glob(place)
        if path.suffix in NATIVE
    }
    return digest_of_files(files | {_within(path, folders): path for path in native})


def _within(path: Path, folders: Sequence[Path]) -> str:
    """Return the path of a file relative to the one of these folders that holds it."""
    return next(path.relative_to(folder).as_posix() for folder in folders if path.is_relative_to(folder))


def installed_version(package: str) -> str | None:
    """Return the version of a distribution, found by its own name or by its import name; ``None`` if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        owners = distributions().get(package, ())
        return importlib.metadata.version(owners[0]) if owners else None
    except ValueError:  # broken metadata without a name or a version
        return None


@functools.cache
def distributions() -> Mapping[str, list[str]]:
    """Return the names of the installed distributions by import name, cached because the search takes a fifth of a second."""
    return importlib.metadata.packages_distributions()


def forget() -> None:
    """Clear the cached digests. Only tests use it."""
    module_digest.cache_clear()


def digest_of_files(files: Mapping[str, Path]) -> str:
    """Return the SHA-256 of the names and contents of files. One that cannot be read counts as empty."""
    total = hashlib.sha256()
    for name, path in sorted(files.items()):
        total.update(f"{name}\n{hashlib.sha256(_read(path)).hexdigest()}\n".encode())
    return total.hexdigest()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _folders(root: str) -> tuple[Path, ...]:
    """Return the folders of a top-level package, or none for a module that is a single file."""
    return tuple(map(Path, getattr(sys.modules.get(root), "__path__", ())))


def _reached(module: str, folders: Sequence[Path]) -> dict[str, Path]:
    """Return the files by module name: of a module and of all that it imports of the package with these folders.

    The files of the packages that contain a module are left out, although Python runs them first. They import all parts of a
    package, so every variant would have the digest of the whole package.
    """
    found: dict[str, Path] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name in found or (path := _file(name, folders)) is None:
            continue
        found[name] = path
        for base, names in _imports(name, path):
            below = [each for each in (f"{base}.{part}" for part in names) if _file(each, folders) is not None]
            waiting += below if names and len(below) == len(names) else [base, *below]
    return found


def _file(module: str, folders: Sequence[Path]) -> Path | None:
    """Return the file of a module of a package, or ``None`` if the package has no such module."""
    if not folders:
        path = getattr(sys.modules.get(module), "__file__", None)
        return Path(path) if path else None
    below = module.split(".")[1:]
    for folder in folders:
        base = folder.joinpath(*below)
        for path in (base / "__init__.py", *((base.with_name(f"{base.name}.py"),) if below else ())):
            if path.is_file():
                return path
    return None


IMPORT = re.compile(r"^[ \t]*(?:from[ \t]+([.\w]+)[ \t]+import[ \t]+(\([^)]*\)|[^\n]*)|import[ \t]+([^\n]+))", re.MULTILINE)
"""Pattern of an import statement: the module and the names of ``from ... import``, or the modules of ``import``.

Parsing the files as Python takes twenty times as long, and an import that stands in a text does no harm here.
"""


def _imports(module: str, path: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield the modules of its own package that a file imports, each with the names that it takes from it."""
    root = module.partition(".")[0]
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for base, names, plain in IMPORT.findall(_read(path).decode(errors="replace")):
        for each in re.findall(r"[.\w]+", re.sub(r"\bas\s+\w+|#[^\n]*", "", plain)):
            if each.partition(".")[0] == root:
                yield each, []
        if base.startswith("."):
            level = len(base) - len(base.lstrip("."))
            base = ".".join([*package[: len(package) - level + 1], *filter(None, [base.lstrip(".")])])
        if base.partition(".")[0] == root:
            yield base, re.findall(r"\w+", re.sub(r"\bas\s+\w+|#[^\n]*", "", names))
