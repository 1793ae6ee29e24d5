"""Tables of the page ``accelerate``: classes and functions that are replaced, and how much faster the calls are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from onelaunch.integrations.fla_calls import TARGETS
from onelaunch.integrations.known import KNOWN, LIBRARIES, Library
from onelaunch.operation import Direction
from onelaunch.workbench.report.comparison import compare
from onelaunch.workbench.report.documents import NONE, code, markdown_table
from onelaunch.workbench.result import Result


class Row(NamedTuple):
    """Line of the table of speeds: a call that ``accelerate`` replaces, and a shape of a committed result."""

    call: str
    sizes: str
    result: str
    shape: str


SPEEDS = (
    Row("`GatedLinearAttention`", "4x2048, 1024 channels", "nvidia-h100/everyday-calls", "GatedLinearAttention 4x2048x1024"),
    Row(
        "`SimpleGatedLinearAttention`", "4x2048, 1024 channels", "nvidia-h100/everyday-calls",
        "SimpleGatedLinearAttention 4x2048x1024",
    ),
    Row("the gate, up and SiLU of an MLP", "8192 tokens, 7168 to 2x4096", "nvidia-h200/dual-gemm-swiglu", "8192x4096x7168"),
    Row("`chunk_gla`", "4x2048, 16 heads of 128", "nvidia-h100/everyday-calls", "4x2048x16x128 channel"),
    Row("`chunk_simple_gla`", "4x2048, 16 heads of 128", "nvidia-h100/everyday-calls", "4x2048x16x128 head"),
    Row("`chunk_hgrn`", "4x2048, 1024 channels", "nvidia-h100/everyday-calls", "chunk_hgrn 4x2048"),
)  # fmt: skip
"""Calls of the table, with sizes in short words."""

OTHERS = {
    "fla": "fla", "fla_chunk": "fla", "fla_fused_chunk": "fla", "liger": "Liger", "compiled": "torch.compile", "eager": "PyTorch",
}  # fmt: skip
"""Names of the other variants, as a reader knows them."""


def parts(stored: Mapping[str, Result]) -> dict[str, str]:
    """Return the written parts of the page by their names, from results by name."""
    return {
        "accelerate-speeds": markdown_table(
            ["call", "sizes", "GPU", "forward", "with gradients", "than the fastest of others"],
            [_speeds(row, stored[row.result]) for row in SPEEDS],
            right=(3, 4),
        ),
        "accelerate-classes": markdown_table(["library", "classes", "computed by"], _classes()),
        "accelerate-functions": markdown_table(["function of fla", "computed by", "how it is hooked"], _functions()),
    }


def _speeds(row: Row, result: Result) -> list[str]:
    """Return a line of the table of speeds."""
    speeds, others = [], []
    directions: tuple[Direction, ...] = ("forward", "forward_backward")
    for direction in directions:
        try:
            found = compare(result, row.shape, direction)
        except LookupError:  # not timed in this direction
            found = None
        speeds.append(NONE if found is None or found.gain is None else f"{found.gain.median:.2f}x")
        if found is not None and found.other is not None:
            others.append(OTHERS[found.other.variant])
    return [row.call, row.sizes, result.provenance.device.split()[1], *speeds, ", ".join(dict.fromkeys(others))]


def _releases(library: Library) -> str:
    """Return a library with its supported releases in words."""
    least, below = (".".join(map(str, release)) for release in (library.least, library.below))
    return f"{library.name} {least} and later, below {below}"


def _classes() -> list[list[str]]:
    """Return the lines of the table of classes: one for each library and operation."""
    lines = []
    for library in LIBRARIES:
        for operation in dict.fromkeys(kind.operation for owner, kind in KNOWN.values() if owner is library):
            names = [name for name, (owner, kind) in KNOWN.items() if (owner, kind.operation) == (library, operation)]
            classes = ", ".join(code(name.rpartition(".")[2]) for name in names)
            lines.append([_releases(library), classes, f"[{code(operation)}](operations/{operation}.md)"])
    return lines


def _functions() -> list[list[str]]:
    """Return the lines of the table of functions."""
    ways = {True: "a backend that fla looks for in every call", False: "its name is bound anew in all loaded modules"}
    pages = {"fla.ops.hgrn": "gated_scan"}
    return [
        [code(target.name), f"[{code(name)}](operations/{name}.md)", ways[target.dispatched]]
        for target in TARGETS
        for name in [pages.get(target.package, "gla")]
    ]
