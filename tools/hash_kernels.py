"""Prove that a change left every kernel's machine code unchanged: hash all kernels of two source trees and compare them.

    python -m tools.hash_kernels write before.json
    python -m tools.hash_kernels write after.json --jobs 2
    python -m tools.hash_kernels compare before.json after.json

``write`` compiles every kernel that any variant of any operation lists, for each architecture, as the inspector does. No GPU is
needed. A kernel's digest covers its instructions, registers, stack, shared memory, threads and constants, in a fixed order and
without names. Entry names, symbols, relocations and debug lines do not affect it. ``compare`` matches the two files by digest,
and exits with 1 unless every variant has the same kernels in both. Both files must come from the same versions of the
compilers, which are stored with the digests; ``compare`` prints versions that differ, but does not fail for them. ptxas makes
different machine code of the same PTX from run to run for some large kernels and for sm_100a. Kernels whose digests differ are
therefore equal too if their PTX, again without names and lines, their dynamic shared memory and their threads are.

It is run by hand; ``tests/test_hash_kernels.py`` imports it. To hash another source tree of this project, put its ``src`` and
root first on ``PYTHONPATH`` and run this file by its path.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import itertools
import json
import multiprocessing
import re
import struct
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

ARCHITECTURES = ("sm_80", "sm_90a", "sm_100a", "gfx942")
"""Architectures for which kernels are compiled by default."""


# The interface to the library: only this part depends on how kernels are listed and compiled.


class Listed(NamedTuple):
    """Kernel that a variant lists, with its build."""

    operation: str
    variant: str
    kernel: str
    build: Any


class Binary(NamedTuple):
    """ELF file of one kernel, with the part of its launch configuration that decides whether it can run."""

    code: bytes
    """Content of the ELF file."""
    shared_bytes: int
    """Dynamic shared memory of a CTA at launch, in bytes."""
    threads: int
    """Number of threads of a CTA at launch."""
    ptx: str = ""
    """PTX from which ptxas made the code; empty for AMD."""


def listed_kernels(architecture: str) -> list[Listed]:
    """Return every kernel that a variant lists for an architecture, in the order of the registry."""
    from onelaunch.operation import operations

    return [
        Listed(operation.name, variant.name, build.name, build)
        for operation in operations()
        for variant in operation.variants.values()
        for build in variant.builds(architecture)
    ]


def build_key(build: Any) -> str:
    """Return a string that is equal for two builds that are compiled alike; display names are left out."""
    return repr(dataclasses.replace(build, name=""))


def compile_build(build: Any, architecture: str) -> Binary:
    """Compile a build from its source; for CUDA C++ without the cache folder."""
    from onelaunch import cuda
    from onelaunch.device.architectures import find_architecture
    from onelaunch.launch.build import CudaBuild
    from onelaunch.launch.compile import compile_triton

    target = find_architecture(architecture)
    if isinstance(build, CudaBuild):
        made = cuda.compile_now(build.source, target.name)
        return Binary(made.cubin, build.shared_bytes, build.threads, made.ptx)
    compiled = compile_triton(build, target)
    code = compiled.asm["cubin" if target.backend == "cuda" else "hsaco"]
    return Binary(code, compiled.metadata.shared, build.num_warps * target.warp, compiled.asm.get("ptx", ""))


def compiler_versions() -> dict[str, str]:
    """Return the versions of the packages on which the machine code depends."""
    import torch
    import triton

    from onelaunch import cuda

    return {"triton": triton.__version__, "nvrtc": ".".join(map(str, cuda.version())), "torch": torch.__version__}


# Reading machine code


class Section(NamedTuple):
    """Section of an ELF file."""

    name: str
    flags: int
    address: int
    content: bytes
    """Bytes of the section; empty if the file stores none."""
    size: int
    info: int


@dataclasses.dataclass(frozen=True)
class Machine:
    """Properties of a compiled kernel that decide what it computes and whether it can be launched, without names."""

    instructions: tuple[str, ...]
    """SHA-256 digest of each section of instructions."""
    instruction_bytes: int
    registers: tuple[int, ...]
    """Registers per thread; on AMD the vector registers and the scalar registers."""
    stack_bytes: tuple[int, ...]
    """Local memory per thread in bytes."""
    static_shared_bytes: int
    shared_bytes: int
    threads: int
    constants: tuple[tuple[str, int, str], ...]
    """Bank, size in bytes and SHA-256 digest of each bank of constants."""

    @property
    def digest(self) -> str:
        """Hexadecimal SHA-256 of all fields."""
        return _sha(json.dumps(dataclasses.asdict(self), sort_keys=True).encode())


_HEADER = struct.Struct("<2I4Q2I2Q")
"""Section header of a 64-bit ELF file."""
_NO_BITS = 8
"""ELF type of a section (NOBITS) that has a size but no bytes in the file."""


def sections(code: bytes) -> list[Section]:
    """Return the sections of a 64-bit ELF file.

    Raises:
        ValueError: ``code`` is no 64-bit ELF file.
    """
    if code[:5] != b"\x7fELF\x02":
        raise ValueError("not a kernel's machine code: no ELF file of 64 bits")
    # Offset of the section headers; size and number of them, and the index of the section with their names.
    (table,), (size, count, names) = struct.unpack_from("<Q", code, 0x28), struct.unpack_from("<3H", code, 0x3A)
    headers = [_HEADER.unpack_from(code, table + size * index) for index in range(count)]
    strings = headers[names][4]
    return [
        Section(
            code[strings + name : code.index(b"\0", strings + name)].decode(),
            flags,
            address,
            b"" if kind == _NO_BITS else code[begin : begin + length],
            length,
            info,
        )
        for name, kind, flags, address, begin, length, _, info, _, _ in headers
    ]


def read_machine(binary: Binary) -> Machine:
    """Return the properties of a compiled kernel. A cubin has one instruction section per kernel, AMD's code one in all."""
    found = sections(binary.code)
    return _read_amd(binary, found) if any(section.name == ".text" for section in found) else _read_nvidia(binary, found)


_REGISTERS, _FRAME, _STACK = 0x2F, 0x11, 0x12
"""Attributes of ``.nv.info``: registers, frame size and smallest stack size of a function, each with its symbol."""
_WITH_BYTES = 0x04
"""Format of an attribute whose value follows its size. In all other formats the value is stored in place of the size."""
_ADDRESSES = "4"
"""Constant bank that the loader fills with the address of each variable of the source. It holds no constants of the kernel."""


def _read_nvidia(binary: Binary, found: Sequence[Section]) -> Machine:
    # Sorted by content, so that the order does not depend on the names of the kernels.
    texts = sorted((s for s in found if s.name.startswith(".text.")), key=lambda section: section.content)
    facts = {(attribute, symbol): value for s in found if s.name == ".nv.info" for attribute, symbol, value in _facts(s.content)}
    symbols = [section.info & 0xFFFFFF for section in texts]  # older files keep the registers in the upper byte
    return Machine(
        instructions=tuple(_sha(section.content) for section in texts),
        instruction_bytes=sum(section.size for section in texts),
        registers=tuple(facts[_REGISTERS, symbol] for symbol in symbols),
        stack_bytes=tuple(facts.get((which, symbol), 0) for symbol in symbols for which in (_FRAME, _STACK)),
        static_shared_bytes=sum(section.size for section in found if section.name.startswith(".nv.shared.")),
        shared_bytes=binary.shared_bytes,
        threads=binary.threads,
        constants=tuple(
            sorted(
                (bank[1], section.size, _sha(section.content))
                for section in found
                if (bank := re.match(r"\.nv\.constant(\d+)", section.name)) and bank[1] != _ADDRESSES
            )
        ),
    )


def _facts(content: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield (attribute, symbol, value) for the attributes of ``.nv.info`` that hold a symbol and a number."""
    at = 0
    while at < len(content):
        form, attribute, size = struct.unpack_from("<2BH", content, at)
        at += 4
        if form == _WITH_BYTES:
            if size == 8:
                yield attribute, *struct.unpack_from("<2I", content, at)
            at += size


_ENTRY = slice(16, 24)
"""Bytes of a 64-byte kernel descriptor that hold the offset to its code. The offset depends on the lengths of names."""
_SYMBOL = struct.Struct("<I2BH2Q")
"""Symbol of a 64-bit ELF file. The symbol of a kernel descriptor ends in ``.kd``."""


def _read_amd(binary: Binary, found: Sequence[Section]) -> Machine:
    named = {section.name: section for section in found}
    note = named[".note"].content
    constants = bytearray(named[".rodata"].content)
    names = named[".strtab"].content
    for name, _, _, _, address, _ in _SYMBOL.iter_unpack(named[".symtab"].content):
        if names[name : names.index(b"\0", name)].endswith(b".kd"):
            begin = address - named[".rodata"].address
            constants[begin + _ENTRY.start : begin + _ENTRY.stop] = bytes(8)
    stack, static = _noted(note, ".private_segment_fixed_size"), _noted(note, ".group_segment_fixed_size")
    return Machine(
        instructions=(_sha(named[".text"].content),),
        instruction_bytes=named[".text"].size,
        registers=(_noted(note, ".vgpr_count"), _noted(note, ".sgpr_count")),
        stack_bytes=(stack,),
        static_shared_bytes=static,
        shared_bytes=binary.shared_bytes,
        threads=binary.threads,
        constants=(("rodata", len(constants), _sha(bytes(constants))),),
    )


def _noted(note: bytes, name: str) -> int:
    """Return a number from AMD's notes on a kernel. They are MessagePack: a short string, then a number of 7 to 32 bits."""
    key = bytes([0xA0 | len(name)]) if len(name) < 32 else bytes([0xD9, len(name)])
    at = note.index(key + name.encode()) + len(key) + len(name)
    kind = note[at]
    if kind < 0x80:
        return kind
    size = {0xCC: 1, 0xCD: 2, 0xCE: 4}[kind]
    return int.from_bytes(note[at + 1 : at + 1 + size], "big")


def ptx_digest(ptx: str) -> str:
    """Return the SHA-256 of PTX without comments, debug information and the kernel's name; empty for no PTX."""
    ptx = re.sub(r"//[^\n]*|/\*.*?\*/", "", ptx, flags=re.DOTALL)
    ptx = re.sub(r"^\s*\.section\s+\.debug\w*\s*\{.*?^\s*\}", "", ptx, flags=re.DOTALL | re.MULTILINE)
    for name in re.findall(r"\.entry\s+([\w$]+)", ptx):
        ptx = re.sub(rf"\b{re.escape(name)}(?=_param_|\b)", "kernel", ptx)
    kept = [" ".join(line.split()) for line in ptx.splitlines() if not re.match(r"\s*\.(loc|file)\b", line)]
    return _sha("\n".join(line for line in kept if line).encode()) if ptx.strip() else ""


def _sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


# Writing a file of digests


def hash_all(architectures: Iterable[str], jobs: int, only: str = "") -> dict[str, list[dict[str, Any]]]:
    """Return one entry for each kernel of each variant, by architecture. Equal builds are compiled once.

    Args:
        architectures: Names of the architectures.
        jobs: Number of processes that compile at the same time.
        only: Regular expression that ``operation.variant`` must contain a match of.
    """
    listed = {architecture: listed_kernels(architecture) for architecture in architectures}
    chosen = {
        architecture: [index for index, each in enumerate(kernels) if re.search(only, f"{each.operation}.{each.variant}")]
        for architecture, kernels in listed.items()
    }
    work: dict[tuple[str, str], tuple[str, int]] = {}
    for architecture, indices in chosen.items():
        for index in indices:
            work.setdefault((architecture, build_key(listed[architecture][index].build)), (architecture, index))
    facts: dict[tuple[str, str], tuple[Machine, str]] = {}
    for done, (key, found) in enumerate(zip(work, _compiled(list(work.values()), jobs), strict=True), 1):
        facts[key] = found
        _progress(done, len(work), work[key])
    return {
        architecture: [
            _entry(kernel, *facts[architecture, build_key(kernel.build)])
            for kernel in map(listed[architecture].__getitem__, indices)
        ]
        for architecture, indices in chosen.items()
    }


def _compiled(work: Sequence[tuple[str, int]], jobs: int) -> Iterator[tuple[Machine, str]]:
    if jobs == 1:
        yield from itertools.starmap(compile_listed, work)
        return
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(compile_listed, *zip(*work, strict=True))


_LISTED: dict[str, list[Listed]] = {}
"""Kernels by architecture in a compiling process. A kernel is sent to it as an index, since kernels cannot be pickled."""


def compile_listed(architecture: str, index: int) -> tuple[Machine, str]:
    """Compile the kernel at an index of the list for an architecture; return its properties and the digest of its PTX."""
    if architecture not in _LISTED:
        _LISTED[architecture] = listed_kernels(architecture)
    kernel = _LISTED[architecture][index]
    binary = compile_build(kernel.build, architecture)
    return read_machine(binary), ptx_digest(binary.ptx)


def _progress(done: int, total: int, what: tuple[str, int]) -> None:
    if done % 10 == 0 or done == total:
        sys.stderr.write(f"{done} of {total}, last for {what[0]}\n")


def _entry(kernel: Listed, machine: Machine, ptx: str) -> dict[str, Any]:
    """Return the entry of a kernel in the file of digests; ``ptx`` is the digest of its PTX."""
    names = {"operation": kernel.operation, "variant": kernel.variant, "build": kernel.kernel}
    return {"digest": machine.digest, "ptx": ptx, **names, **dataclasses.asdict(machine)}


# Comparing two files of digests

Entries = Sequence[Mapping[str, Any]]
_NAMES = ("digest", "ptx", "operation", "variant", "build")


def compare(old: Mapping[str, Entries], new: Mapping[str, Entries]) -> tuple[list[str], bool]:
    """Return lines about the differences of two files, and whether every variant has the same kernels in both.

    Kernels are matched by digest, and those whose digests differ by PTX, shared memory and threads, but never by name. A kernel
    without a match is shown with the unmatched kernel of the other file that has the same instructions, if there is one, and
    with the properties that differ.
    """
    lines, same = [], True
    for architecture in [*old, *(name for name in new if name not in old)]:
        found, equal = _compare_architecture(old.get(architecture, ()), new.get(architecture, ()))
        lines += [f"{architecture}: {found[0]}", *(f"  {line}" for line in found[1:])]
        same &= equal
    return lines, same


def _compare_architecture(old: Entries, new: Entries) -> tuple[list[str], bool]:
    """Return the lines about one architecture, of which the first counts kernels, and whether all kernels are equal."""
    new, recompiled = _match_ptx(old, new)
    before, after = _by_digest(old), _by_digest(new)
    gone, added = [key for key in before if key not in after], [key for key in after if key not in before]
    kept = [key for key in before if key in after]
    counted = f"{len(kept)} different kernels equal, {len(gone)} only in the old file, {len(added)} only in the new;"
    lines = [f"{counted} listed {len(old)} times before, {len(new)} times now"]
    if recompiled:
        lines.append(f"{recompiled} of the equal kernels have equal PTX, from which ptxas made different machine code")
    lines += [line for key in gone for line in _unmatched("only in old", before[key], [after[each][0] for each in added])]
    lines += [line for key in added for line in _unmatched("only in new", after[key], [before[each][0] for each in gone])]
    counts = [key for key in kept if len(before[key]) != len(after[key])]
    lines += [
        f"listed {len(before[key])} times before, {len(after[key])} times now: {_names(before[key])} / {_names(after[key])}"
        for key in counts
    ]
    moved = _moved(old, new)
    return lines + moved, not (gone or added or moved)


def _match_ptx(old: Entries, new: Entries) -> tuple[Entries, int]:
    """Return the new entries, with the old digest where PTX and launch alone are equal, and the number of such kernels."""
    known, before, after = {}, _by_digest(old), _by_digest(new)
    for entry in old:
        if entry.get("ptx") and entry["digest"] not in after:
            known[_ptx_and_launch(entry)] = entry["digest"]
    matched = {
        entry["digest"]: known[_ptx_and_launch(entry)]
        for entry in new
        if entry["digest"] not in before and _ptx_and_launch(entry) in known
    }
    return [{**entry, "digest": matched.get(entry["digest"], entry["digest"])} for entry in new], len(matched)


def _ptx_and_launch(entry: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the digest of a kernel's PTX, and its dynamic shared memory and threads, which PTX need not tell."""
    return entry.get("ptx"), entry["shared_bytes"], entry["threads"]


def _by_digest(entries: Entries) -> dict[str, list[Mapping[str, Any]]]:
    found = defaultdict(list)
    for entry in entries:
        found[entry["digest"]].append(entry)
    return dict(found)


def _unmatched(where: str, entries: Entries, others: Entries) -> Iterator[str]:
    """Yield lines about a kernel that only one file has, as ``entries``; ``others`` are those that only the other file has."""
    entry = entries[0]
    size = f"{entry['instruction_bytes']} bytes, {entry['registers']} registers"
    yield f"{where}: {_names(entries)} ({entry['digest'][:12]}, {size})"
    twin = next((other for other in others if other["instructions"] == entry["instructions"]), None)
    if twin is not None:
        differing = [key for key in entry if key not in _NAMES and entry[key] != twin.get(key)]
        facts = "; ".join(f"{key} {entry[key]} here, {twin.get(key)} there" for key in differing)
        yield f"  same instructions as {_names([twin])}, but {facts}"


def _names(entries: Entries) -> str:
    return ", ".join(dict.fromkeys(f"{each['operation']}.{each['variant']}: {each['build']}" for each in entries))


def _moved(old: Entries, new: Entries) -> list[str]:
    """Return a line for each variant whose set of kernels differs, even if other variants list the same kernels."""
    before, after = _by_variant(old), _by_variant(new)
    return [
        f"{'.'.join(key)} lists {len(before[key])} different kernels before, {len(after[key])} now; "
        f"{len(before[key] - after[key])} gone, {len(after[key] - before[key])} new"
        for key in sorted(before | after)
        if before[key] != after[key]
    ]


def _by_variant(entries: Entries) -> defaultdict[tuple[str, str], set[str]]:
    found: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    for entry in entries:
        found[entry["operation"], entry["variant"]].add(entry["digest"])
    return found


# The command line


def main(words: Sequence[str] | None = None) -> int:
    """Run one of the two commands, and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    write = commands.add_parser("write", help="compile all kernels and write their digests")
    write.add_argument("path", type=Path)
    default = f"architecture to compile for; may be repeated (default: {', '.join(ARCHITECTURES)})"
    write.add_argument("--architecture", action="append", help=default)
    write.add_argument("--jobs", type=int, default=1, help="number of processes that compile at the same time (default: 1)")
    write.add_argument("--only", default="", help="regular expression for the names OPERATION.VARIANT to compile")
    matched = commands.add_parser("compare", help="compare two files of digests")
    matched.add_argument("old", type=Path)
    matched.add_argument("new", type=Path)
    options = parser.parse_args(words)
    return _write(options) if options.command == "write" else _compare(options)


def _write(options: argparse.Namespace) -> int:
    start = time.perf_counter()
    found = hash_all(options.architecture or ARCHITECTURES, options.jobs, options.only)
    text = json.dumps({"versions": compiler_versions(), "architectures": found}, indent=1)
    options.path.write_text(text + "\n", encoding="utf-8")
    counts = Counter({architecture: len({entry["digest"] for entry in entries}) for architecture, entries in found.items()})
    said = ", ".join(f"{count} for {architecture}" for architecture, count in counts.items())
    sys.stdout.write(f"{said}: {counts.total()} different kernels in {time.perf_counter() - start:.0f} s\n")
    return 0


def _compare(options: argparse.Namespace) -> int:
    old, new = (json.loads(path.read_text(encoding="utf-8")) for path in (options.old, options.new))
    lines, same = compare(old["architectures"], new["architectures"])
    if old["versions"] != new["versions"]:
        lines.insert(0, f"compiled by different versions: {old['versions']} and {new['versions']}")
    lines.append("equal: every variant has the same kernels in both files" if same else "not equal")
    sys.stdout.write("\n".join(lines) + "\n")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
