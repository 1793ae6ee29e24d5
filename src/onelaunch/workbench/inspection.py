"""What the compiler made of a kernel: registers, spills, shared memory, matrix instructions, on a machine without a GPU.

Triton and NVRTC compile for any target on any machine, and Triton's wheel brings NVIDIA's disassembler. So whether a kernel
spills, and whether a matrix product became the instructions that were meant, needs no device and belongs into every test run.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onelaunch import cuda
from onelaunch.cuda import sass
from onelaunch.device.architectures import ARCHITECTURES, CHECKED, Architecture, find_architecture  # noqa: F401 - as before
from onelaunch.errors import CompileError, CompilerMissing, InspectionError
from onelaunch.launch.build import Build, CudaBuild, KernelBuild
from onelaunch.launch.global_atomics import global_atomics
from onelaunch.launch.warp_mma import warp_mma
from onelaunch.operation import Operation
from onelaunch.wording import listing


@dataclass(frozen=True)
class Inspection:
    """One kernel of a variant, compiled for one architecture."""

    variant: str
    kernel: str
    architecture: str
    registers: int
    """Per thread; on AMD the vector registers, accumulators included."""
    spills: int
    """Stores to and loads from local memory in the machine code; on AMD the spilled vector registers."""
    stack_bytes: int
    """Per thread."""
    shared_bytes: int
    """Per block, as launched."""
    matrix: Mapping[str, int]
    """Matrix instructions by name, with how often each stands in the code."""
    instructions: int
    problems: tuple[str, ...] = ()
    """What is wrong with it, in sentences: spills, other matrix instructions than meant, more shared memory than there is."""
    assembly: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)
    """The text of each stage: Triton's ``ttgir``, and ``ptx`` and ``sass``, or ``amdgcn``."""

    @property
    def ok(self) -> bool:
        return not self.problems


@dataclass(frozen=True)
class _Machine:
    """What the machine code tells."""

    registers: int
    spills: int
    stack_bytes: int
    shared_bytes: int
    """What the kernel declares; not what its launch adds."""
    matrix: dict[str, int]
    instructions: int


@dataclass(frozen=True)
class _Code:
    """A compiled kernel."""

    machine: _Machine
    shared_bytes: int
    """Per block, as launched."""
    assembly: Mapping[str, str]
    remarks: tuple[str, ...] = ()
    """On the code: instructions that lost their speed, or that read too early."""


def inspect_operation(
    operation: Operation[..., Any], architecture: str, variants: Iterable[str] | None = None
) -> list[Inspection]:
    """Compile and take apart the kernels of an operation's variants.

    Args:
        operation: the operation.
        architecture: a name of :data:`ARCHITECTURES`.
        variants: names; all of the operation's by default. Those that launch no kernels of their own give no lines.

    Raises:
        InspectionError: the architecture is not known, the compiler is missing or interpreting, or a kernel does not compile.
        UnknownVariant: the operation has no such variant.
    """
    name = find_architecture(architecture).name
    chosen = operation.variants.values() if variants is None else [operation.get(variant) for variant in variants]
    return [inspect_build(build, name, variant=variant.name) for variant in chosen for build in variant.builds(name)]


def inspect_build(build: Build, architecture: str, *, variant: str = "") -> Inspection:
    """Compile one kernel for an architecture and take its machine code apart.

    Triton's pointers count as aligned to 16 bytes, as PyTorch's allocations are. An integer argument whose type ends in ``:16``
    (``"i32:16"``) counts as divisible by 16, as Triton specialises it at a launch.

    Raises:
        InspectionError: the architecture is not known, the compiler is missing or interpreting, or the kernel does not compile.
    """
    target = find_architecture(architecture)
    code = _cuda_code(build, target) if isinstance(build, CudaBuild) else _triton_code(build, target)
    machine = code.machine
    return Inspection(
        variant=variant,
        kernel=build.name,
        architecture=target.name,
        registers=machine.registers,
        spills=machine.spills,
        stack_bytes=machine.stack_bytes,
        shared_bytes=code.shared_bytes,
        matrix=machine.matrix,
        instructions=machine.instructions,
        problems=tuple(_problems(build, target, code)),
        assembly=code.assembly,
    )


def _problems(build: Build, target: Architecture, code: _Code) -> Iterable[str]:
    machine = code.machine
    if machine.spills:
        yield f"spills registers: {machine.spills} accesses to local memory, {machine.stack_bytes} bytes of stack per thread"
    by_warps = build.by_warps and (isinstance(build, CudaBuild) or target.name == "sm_90a")
    wanted = ARCHITECTURES["sm_80"].matrix if by_warps else target.matrix
    if build.matrix and not any(name.startswith(wanted) for name in machine.matrix):
        yield f"has no {listing(wanted)}; its matrix products became {listing(machine.matrix)}"
    if code.shared_bytes > target.shared_bytes:
        yield f"needs {code.shared_bytes} bytes of shared memory; {target.name} has {target.shared_bytes}"
    if isinstance(build, CudaBuild) and machine.registers * build.threads > _REGISTERS:
        yield f"needs {machine.registers} registers for each of {build.threads} threads; a block has {_REGISTERS}"
    yield from code.remarks


# CUDA C++

_REGISTERS = 1 << 16
"""Of a block, on every NVIDIA architecture."""

_HOPPER = 90
_RESERVED = 1024
"""Bytes that CUDA keeps of a block's shared memory from Hopper on; the disassembler counts them, the limits do not."""


def _cuda_code(build: CudaBuild, target: Architecture) -> _Code:
    if target.backend != "cuda":
        raise InspectionError(f"Kernel {build.name!r} is CUDA C++ and has no code for {target.name}.")
    try:
        compiled = cuda.compile_now(build.source, target.name)
    except (CompilerMissing, CompileError) as error:
        raise InspectionError(f"Kernel {build.name!r}: {error}") from error
    listed = _disassemble(compiled.cubin, build.name)
    machine = _read_sass(listed, build.source.entry)
    reserved = _RESERVED if isinstance(target.target, int) and target.target >= _HOPPER else 0
    shared = max(machine.shared_bytes - reserved, 0) + build.shared_bytes
    remarks = tuple(line.strip() for line in compiled.log.splitlines() if "Performance Loss" in line)
    return _Code(machine, shared, {"ptx": compiled.ptx, "sass": listed}, remarks)


# Triton

_INSTALL_TRITON = "Do: pip install 'onelaunch[triton]'."


def _triton_code(build: KernelBuild, target: Architecture) -> _Code:
    compiled = _compile(build, target)
    stages = {stage: text for stage, text in compiled.asm.items() if isinstance(text, str)}
    if target.backend == "cuda":
        listed = _disassemble(compiled.asm["cubin"], build.name)
        assembly = {"ttgir": stages["ttgir"], "ptx": stages["ptx"], "sass": listed}
        hazards = sass.stall_hazards(compiled.asm["cubin"]) if target.name in sass.ARCHITECTURES else []
        remarks = (
            (f"may read too early what CS2R wrote, at {len(hazards)} places: a fault of the assembler, see onelaunch.cuda.sass",)
            if hazards
            else ()
        )
        return _Code(_read_sass(listed), compiled.metadata.shared, assembly, remarks)
    assembly = {"ttgir": stages["ttgir"], "amdgcn": stages["amdgcn"]}
    return _Code(_read_amdgcn(stages["amdgcn"]), compiled.metadata.shared, assembly)


def _compile(build: KernelBuild, target: Architecture) -> Any:
    try:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource
        from triton.experimental.gluon._runtime import GluonASTSource
    except ImportError as error:
        raise InspectionError(f"Triton is not installed, nothing can be compiled. {_INSTALL_TRITON}") from error
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise InspectionError("TRITON_INTERPRET=1 is set, so kernels are interpreted and cannot be compiled. Unset it.")
    signature, constants, attributes = _specialized(build)
    source = (GluonASTSource if build.kernel.is_gluon() else ASTSource)(
        build.kernel, signature=signature, constexprs=constants, attrs=attributes
    )
    forced = build.by_warps if build.warp_mma is None else build.warp_mma
    try:
        with warp_mma() if forced else nullcontext(), global_atomics() if target.backend == "hip" else nullcontext():
            return triton.compile(
                source,
                target=GPUTarget(target.backend, target.target, target.warp),
                options={"num_warps": build.num_warps, "num_stages": build.num_stages, **build.options},
            )
    except Exception as error:  # the compiler raises anything, from its own errors to those of ptxas
        raise InspectionError(
            f"Kernel {build.name!r} does not compile for {target.name}: {_first_line(error)}. "
            f"Its configuration: {dict(build.constants)}, {build.num_warps} warps, {build.num_stages} stages."
        ) from error


def _specialized(build: KernelBuild) -> tuple[dict[str, Any], dict[Any, Any], dict[Any, Any]]:
    """Return the signature, the constants and the attributes of a build, as Triton's compiler takes them."""
    if build.attributes is not None:
        return dict(build.signature), dict(build.constants), dict(build.attributes)
    types = dict(_types(build))
    missing = [place for place, type_ in types.items() if len(place) > 1 and type_ == "constexpr"]
    signature = {
        name: tuple(_plain(each) for each in type_) if isinstance(type_, tuple) else _plain(type_)
        for name, type_ in build.signature.items()
    }
    divisible = [place for place, type_ in types.items() if type_.startswith("*") or type_.endswith(":16")]
    constants = {**build.constants, **dict.fromkeys(missing)}
    return signature, constants, {place: [["tt.divisibility", 16]] for place in divisible}


def _types(build: KernelBuild) -> Iterator[tuple[tuple[int, ...], str]]:
    """The type of every argument, and of every member of those that are tuples, by its place."""
    for name, type_ in build.signature.items():
        index = build.kernel.arg_names.index(name)
        if isinstance(type_, tuple):
            yield from (((index, member), each) for member, each in enumerate(type_))
        else:
            yield (index,), type_


def _plain(type_: str) -> str:
    """Triton's name of a type."""
    return type_.removesuffix(":16")


def _first_line(error: Exception) -> str:
    """The line of a compiler's message that names the problem."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if "error" in line.lower()]
    return f"{type(error).__name__}: {(telling or lines[-1:] or ['no message'])[0].rstrip('.')}"


# Reading NVIDIA's machine code

_SASS = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:\{\s*)?(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9]*)", re.MULTILINE)
_SASS_MATRIX = re.compile(r"(?:UTC)?[A-Z]+MMA")


def _disassemble(cubin: bytes, kernel: str) -> str:
    """Resource usage and SASS, by the ``cuobjdump`` that Triton brings."""
    try:
        from triton import knobs
    except ImportError as error:
        raise InspectionError(f"Kernel {kernel!r} compiled; Triton brings the disassembler. {_INSTALL_TRITON}") from error

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        try:
            command = [knobs.nvidia.cuobjdump.path, "-sass", "-res-usage", str(path)]
            return subprocess.run(
                command, capture_output=True, encoding="utf-8", errors="replace", check=True, timeout=120
            ).stdout
        except (OSError, RuntimeError, subprocess.SubprocessError) as error:
            raise InspectionError(f"Kernel {kernel!r} compiled, but cuobjdump cannot take it apart: {error}.") from error


def _read_sass(text: str, entry: str = "") -> _Machine:
    """What the listing tells of a kernel, the only one or the one of this name; instructions are those of all functions."""
    usage = re.search(rf"Function {re.escape(entry) or '.*'}:\s+REG:(\d+) STACK:(\d+) SHARED:(\d+)", text)
    if usage is None:
        raise InspectionError("cuobjdump printed no resource usage; its format has changed.")
    names = Counter(_SASS.findall(text))
    del names["NOP"]  # padding
    return _Machine(
        registers=int(usage[1]),
        spills=names["STL"] + names["LDL"],
        stack_bytes=int(usage[2]),
        shared_bytes=int(usage[3]),
        matrix={name: count for name, count in sorted(names.items()) if _SASS_MATRIX.fullmatch(name)},
        instructions=names.total(),
    )


# Reading AMD's

_GCN = re.compile(r"^\t([svbdgfi][a-z0-9]*_[a-z0-9_]+)", re.MULTILINE)
_GCN_MATRIX = ("v_mfma", "v_smfmac", "v_wmma")


def _read_amdgcn(text: str) -> _Machine:
    def fact(name: str) -> int:
        found = re.search(rf"^\s+(?:- )?\.{name}:\s+(\d+)", text, re.MULTILINE)
        if found is None:
            raise InspectionError(f"The AMD assembly has no {name}; its format has changed.")
        return int(found[1])

    names = Counter(_GCN.findall(text))
    return _Machine(
        registers=fact("vgpr_count"),
        spills=fact("vgpr_spill_count"),
        stack_bytes=fact("private_segment_fixed_size"),
        shared_bytes=fact("group_segment_fixed_size"),
        matrix={name: count for name, count in sorted(names.items()) if name.startswith(_GCN_MATRIX)},
        instructions=names.total(),
    )
