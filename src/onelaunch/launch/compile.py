"""Compile builds of Triton kernels for any architecture, on a machine with or without a GPU.

Triton keeps what it compiles in its cache folder, by the hash of the kernel's source, its specialization, the options and the
target. A build of a recorded launch has the same hash as the launch itself on a GPU of that architecture, since
:func:`complete_key` precedes both. So a kernel that was compiled here is found by the launch, and is not compiled again.

``side_by_side.py`` calls :func:`compile_triton` on threads, for the kernels of a first call or of a study's probes; ``ahead.py``
calls it in processes, for ``onelaunch prebuild``. ``workbench/inspection.py`` and ``tools/hash_kernels.py`` call it to read the
machine code.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from typing import Any

from onelaunch.device.architectures import Architecture
from onelaunch.errors import InspectionError
from onelaunch.launch.build import KernelBuild
from onelaunch.launch.cache_keys import complete_key
from onelaunch.launch.global_atomics import global_atomics
from onelaunch.launch.warp_mma import warp_mma

INSTALL_TRITON = "Install it with: pip install 'onelaunch[triton]'."
"""Advice in messages for machines without Triton."""


def compile_triton(build: KernelBuild, target: Architecture) -> Any:
    """Return what Triton's compiler returns for a build: the code of each stage, and metadata.

    Raises:
        InspectionError: Triton is not installed, its interpreter is on, or the kernel does not compile.
    """
    try:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource
        from triton.experimental.gluon._runtime import GluonASTSource
    except ImportError as error:
        raise InspectionError(f"Triton is not installed, so its kernels cannot be compiled. {INSTALL_TRITON}") from error
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise InspectionError(
            "TRITON_INTERPRET=1 is set, so Triton interprets kernels and cannot compile them. Unset this environment variable."
        )
    _again_after_system_errors(complete_key, build.kernel)
    signature, constants, attributes = _specialized(build)
    source = (GluonASTSource if build.kernel.is_gluon() else ASTSource)(
        build.kernel, signature=signature, constexprs=constants, attrs=attributes
    )
    instructions = warp_mma() if build.forces_warp_mma else nullcontext()
    atomics = global_atomics() if target.backend == "hip" else nullcontext()
    try:
        with instructions, atomics:
            return _again_after_system_errors(
                triton.compile,
                source,
                target=GPUTarget(target.backend, target.target, target.warp),
                options={"num_warps": build.num_warps, "num_stages": build.num_stages, **build.options},
            )
    except Exception as error:  # Triton raises errors of many types: its own, MLIR's and those of ptxas
        raise InspectionError(
            f"Kernel {build.name!r} does not compile for {target.name}: {_first_line(error)}. "
            f"Its configuration: {dict(build.constants)}, {build.num_warps} warps, {build.num_stages} stages."
        ) from error


_ATTEMPTS = 6
"""Calls of a function whose parser other threads disturb, before its error counts."""


def _again_after_system_errors(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Return what a function that parses a kernel returns, and call it again while it raises :class:`SystemError`.

    ``ast.parse`` of CPython 3.11 counts nested nodes for all threads together, and raises that error if another thread parses in
    between: "AST constructor recursion depth mismatch". It was seen once in many runs of kernels compiled side by side, and once
    twice in a row.
    """
    for _ in range(_ATTEMPTS - 1):
        with suppress(SystemError):
            return function(*arguments, **options)
    return function(*arguments, **options)


def _specialized(build: KernelBuild) -> tuple[dict[str, Any], dict[Any, Any], dict[Any, Any]]:
    """Return the signature (types by name), the constants and the attributes (divisibility) of a build for Triton's compiler.

    Attributes are by the path of the argument, which is its index or, in a tuple, index and position. So are constants, except
    those that a build written by hand gives, which are by name.
    """
    if build.attributes is not None:
        return dict(build.signature), dict(build.constants), dict(build.attributes)
    types = dict(_types(build))
    nones = [path for path, type_ in types.items() if len(path) > 1 and type_ == "constexpr"]  # a tuple's constants are all None
    signature = {
        name: tuple(_plain(each) for each in type_) if isinstance(type_, tuple) else _plain(type_)
        for name, type_ in build.signature.items()
    }
    divisible = [path for path, type_ in types.items() if type_.startswith("*") or type_.endswith(":16")]
    constants = {**build.constants, **dict.fromkeys(nones)}
    return signature, constants, {path: [["tt.divisibility", 16]] for path in divisible}


def _types(build: KernelBuild) -> Iterator[tuple[tuple[int, ...], str]]:
    """Yield the path and the type of every argument, and of every member of an argument that is a tuple."""
    for name, type_ in build.signature.items():
        index = build.kernel.arg_names.index(name)
        if isinstance(type_, tuple):
            yield from (((index, member), each) for member, each in enumerate(type_))
        else:
            yield (index,), type_


def _plain(type_: str) -> str:
    """Return Triton's name of a type, without the suffix that declares divisibility."""
    return type_.removesuffix(":16")


def _first_line(error: Exception) -> str:
    """Return the first line of a compiler's message that contains ``error``, or its last line if none does."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return f"{type(error).__name__}: {(errors or lines[-1:] or ['no message'])[0].rstrip('.')}"
