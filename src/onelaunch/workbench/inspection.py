"""Inspect compiled kernels without a GPU: registers, spills, shared memory and matrix instructions.

Triton and NVRTC compile for any target on any machine, and Triton's wheel includes NVIDIA's disassembler. Spilled registers, and
matrix products that became other instructions than intended, are therefore found on every machine and in every test run. Command
``onelaunch inspect`` calls :func:`inspect_operation`, as users may, and tests compile every kernel with :func:`inspect_build`.
The names of ``device/architectures.py`` were documented here in earlier versions, so that code of users may import them from
here.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onelaunch import cuda
from onelaunch.cuda import sass
from onelaunch.device.architectures import ARCHITECTURES, CHECKED, Architecture, find_architecture  # noqa: F401 - as above
from onelaunch.errors import CompileError, CompilerMissing, InspectionError
from onelaunch.launch.build import Build, CudaBuild, KernelBuild
from onelaunch.launch.compile import INSTALL_TRITON, compile_triton
from onelaunch.operation import Operation
from onelaunch.wording import listing


@dataclass(frozen=True)
class Inspection:
    """One kernel of a variant, compiled for one architecture."""

    variant: str
    kernel: str
    architecture: str
    registers: int
    """Registers per thread; on AMD the vector registers, including accumulators."""
    spills: int
    """Number of instructions that store to or load from local memory; on AMD the number of spilled vector registers."""
    stack_bytes: int
    """Stack per thread in bytes."""
    shared_bytes: int
    """Shared memory per block in bytes, static and dynamic."""
    matrix: Mapping[str, int]
    """Number of matrix instructions in the code, by the name of the instruction."""
    instructions: int
    """Number of instructions in the code, without padding."""
    problems: tuple[str, ...] = ()
    """Problems in clauses: spills, other matrix instructions than intended, more shared memory or registers than a block has, and
    what the reader of the machine code remarks, such as stall counts that are too short."""
    assembly: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)
    """Code of each compiler stage by its name: Triton's ``ttgir``, and ``ptx`` and ``sass``, or ``amdgcn``."""

    @property
    def ok(self) -> bool:
        return not self.problems


@dataclass(frozen=True)
class _MachineCode:
    """Facts that are read from the machine code of a kernel, as in :class:`Inspection`."""

    registers: int
    spills: int
    stack_bytes: int
    shared_bytes: int
    """Static shared memory, without the dynamic shared memory that a launch adds."""
    matrix: dict[str, int]
    instructions: int


@dataclass(frozen=True)
class _Compiled:
    """A compiled kernel."""

    machine: _MachineCode
    shared_bytes: int
    """Shared memory per block in bytes, static and dynamic."""
    assembly: Mapping[str, str]
    remarks: tuple[str, ...] = ()
    """Problems that the compiler reported (lost performance of WGMMA), or that the stall counts of the code show."""


def inspect_operation(
    operation: Operation[..., Any], architecture: str, variants: Iterable[str] | None = None
) -> list[Inspection]:
    """Compile and disassemble the kernels of an operation's variants.

    Args:
        operation: Operation whose kernels are compiled.
        architecture: Name of one of :data:`ARCHITECTURES`.
        variants: Names of the variants; all of the operation's by default. A variant without kernels of its own has no entry.

    Raises:
        InspectionError: The architecture is not known, the compiler is missing, Triton's interpreter is on, or a kernel does not
            compile.
        UnknownVariant: The operation has no such variant.
    """
    name = find_architecture(architecture).name
    chosen = operation.variants.values() if variants is None else [operation.get(variant) for variant in variants]
    return [inspect_build(build, name, variant=variant.name) for variant in chosen for build in variant.builds(name)]


def inspect_build(build: Build, architecture: str, *, variant: str = "") -> Inspection:
    """Compile one kernel for an architecture and disassemble it.

    A Triton build that gives no ``attributes`` is specialised as at a usual launch: pointers are declared as aligned to 16 bytes,
    as PyTorch's allocations are, and an integer argument whose type ends in ``:16`` (``"i32:16"``) as divisible by 16.

    Raises:
        InspectionError: The architecture is not known, the compiler is missing, Triton's interpreter is on, or the kernel does
            not compile.
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


def _problems(build: Build, target: Architecture, code: _Compiled) -> Iterable[str]:
    """Yield the problems of a compiled kernel in clauses, for :attr:`Inspection.problems`."""
    machine = code.machine
    if machine.spills:
        what = "accesses to local memory" if target.backend == "cuda" else "vector registers"
        yield f"spills registers: {machine.spills} {what}, {machine.stack_bytes} bytes of stack per thread"
    # A build with `by_warps` expects warp-level instructions (mma.sync), those of sm_80, in place of WGMMA. For Triton there is
    # such a choice on Hopper only, see onelaunch.launch.warp_mma.
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
"""Number of registers that all threads of a block can have together, on every NVIDIA architecture."""

_HOPPER = 90
"""Compute capability of Hopper, times ten."""

_RESERVED = 1024
"""Bytes of shared memory that CUDA reserves per block. On Hopper and later the disassembler counts them; the limits do not."""


def _cuda_code(build: CudaBuild, target: Architecture) -> _Compiled:
    """Compile a kernel in CUDA C++ with NVRTC and disassemble it."""
    if target.backend != "cuda":
        raise InspectionError(f"Kernel {build.name!r} is CUDA C++ and cannot be compiled for {target.name}.")
    try:
        compiled = cuda.compile_now(build.source, target.name)
    except (CompilerMissing, CompileError) as error:
        raise InspectionError(f"Kernel {build.name!r}: {error}") from error
    listed = _disassemble(compiled.cubin, build.name)
    machine = _read_sass(listed, build.source.entry)
    reserved = _RESERVED if isinstance(target.target, int) and target.target >= _HOPPER else 0
    shared = max(machine.shared_bytes - reserved, 0) + build.shared_bytes
    remarks = tuple(line.strip() for line in compiled.log.splitlines() if "Performance Loss" in line)
    return _Compiled(machine, shared, {"ptx": compiled.ptx, "sass": listed}, remarks)


# Triton


def _triton_code(build: KernelBuild, target: Architecture) -> _Compiled:
    """Compile a Triton kernel and disassemble it."""
    compiled = compile_triton(build, target)
    stages = {stage: text for stage, text in compiled.asm.items() if isinstance(text, str)}
    if target.backend == "cuda":
        listed = _disassemble(compiled.asm["cubin"], build.name)
        assembly = {"ttgir": stages["ttgir"], "ptx": stages["ptx"], "sass": listed}
        hazards = sass.stall_hazards(compiled.asm["cubin"]) if target.name in sass.ARCHITECTURES else []
        remarks = (
            (f"may read the result of CS2R too early at {len(hazards)} places: a fault of ptxas, see onelaunch.cuda.sass",)
            if hazards
            else ()
        )
        return _Compiled(_read_sass(listed), compiled.metadata.shared, assembly, remarks)
    assembly = {"ttgir": stages["ttgir"], "amdgcn": stages["amdgcn"]}
    return _Compiled(_read_amdgcn(stages["amdgcn"]), compiled.metadata.shared, assembly)


# Reading NVIDIA's machine code

_SASS = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:\{\s*)?(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9]*)", re.MULTILINE)
"""Opcode of each line of SASS without its modifiers, after an optional brace and an optional predicate."""

_SASS_MATRIX = re.compile(r"(?:UTC)?[A-Z]+MMA")
"""Opcode of a matrix instruction in SASS, such as ``HMMA``, ``HGMMA`` (WGMMA) or ``UTCHMMA`` (Blackwell)."""


def _disassemble(cubin: bytes, kernel: str) -> str:
    """Return the resource usage and the SASS of a cubin, from the ``cuobjdump`` in Triton's wheel."""
    try:
        from triton import knobs
    except ImportError as error:
        raise InspectionError(
            f"Kernel {kernel!r} was compiled, but the disassembler comes with Triton. {INSTALL_TRITON}"
        ) from error

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        try:
            command = [knobs.nvidia.cuobjdump.path, "-sass", "-res-usage", str(path)]
            return subprocess.run(
                command, capture_output=True, encoding="utf-8", errors="replace", check=True, timeout=120
            ).stdout
        except (OSError, RuntimeError, subprocess.SubprocessError) as error:
            problem = str(error).rstrip(".")
            raise InspectionError(f"Kernel {kernel!r} was compiled, but cuobjdump cannot disassemble it: {problem}.") from error


def _read_sass(text: str, entry: str = "") -> _MachineCode:
    """Return the facts of a kernel from cuobjdump's listing.

    Args:
        text: Listing with resource usage and SASS.
        entry: Name of the kernel whose resource usage is read; without it, the listing holds one kernel only. Instructions are
            counted over all functions of the listing.
    """
    usage = re.search(rf"Function {re.escape(entry) or '.*'}:\s+REG:(\d+) STACK:(\d+) SHARED:(\d+)", text)
    if usage is None:
        raise InspectionError("cuobjdump printed no resource usage; its format has changed.")
    names = Counter(_SASS.findall(text))
    del names["NOP"]  # padding
    return _MachineCode(
        registers=int(usage[1]),
        spills=names["STL"] + names["LDL"],
        stack_bytes=int(usage[2]),
        shared_bytes=int(usage[3]),
        matrix={name: count for name, count in sorted(names.items()) if _SASS_MATRIX.fullmatch(name)},
        instructions=names.total(),
    )


# Reading AMD's machine code

_GCN = re.compile(r"^\t([svbdgfi][a-z0-9]*_[a-z0-9_]+)", re.MULTILINE)
"""Mnemonic of each line of AMD's assembly, such as ``v_add_f32``, ``s_waitcnt`` or ``buffer_load_dword``."""

_GCN_MATRIX = ("v_mfma", "v_smfmac", "v_wmma")
"""Beginnings of the mnemonics of AMD's matrix instructions."""


def _read_amdgcn(text: str) -> _MachineCode:
    """Return the facts of a kernel from AMD's assembly."""

    def fact(name: str) -> int:
        found = re.search(rf"^\s+(?:- )?\.{name}:\s+(\d+)", text, re.MULTILINE)
        if found is None:
            raise InspectionError(f"The AMD assembly has no {name}; its format has changed.")
        return int(found[1])

    names = Counter(_GCN.findall(text))
    return _MachineCode(
        registers=fact("vgpr_count"),
        spills=fact("vgpr_spill_count"),
        stack_bytes=fact("private_segment_fixed_size"),
        shared_bytes=fact("group_segment_fixed_size"),
        matrix={name: count for name, count in sorted(names.items()) if name.startswith(_GCN_MATRIX)},
        instructions=names.total(),
    )
