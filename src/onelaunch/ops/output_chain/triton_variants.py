"""Variants of ``output_chain`` with a kernel of ours before PyTorch's product, and what all of ours need. See ``forward.py``."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from onelaunch.launch.build import KernelBuild
from onelaunch.operation import Query
from onelaunch.operation.requirements import cannot_launch
from onelaunch.ops.output_chain.contract import OutputChainCall, output_chain
from onelaunch.ops.output_chain.forward import Made, Operands, compute, launches
from onelaunch.ops.output_chain.torch_variants import Results

LARGEST_HEAD = 512
"""Channels of a head: a program holds whole heads."""

LARGEST_GRID = 2**30
"""Programs of a launch, and room for those of a tile beyond the end in 32 bits."""

MOST_COLUMNS = 2**30
"""H * V and D below this leave room for a tile in 32 bits."""


@launches("norm_gate")
def run_norm_gate(given: Operands, w_out: torch.Tensor, bias: torch.Tensor | None, eps: float, keep: bool) -> Made:
    """A launch, and a product by PyTorch."""
    from onelaunch.ops.output_chain import launch

    a, rstd = launch.norm_gate(given, eps, keep=keep)
    return F.linear(a, w_out, bias), rstd


@output_chain.variant(
    "norm_gate", launches=2, backward_launches=4, fuses=("norm", "gate"), hands=("a",), keeps=("rstd",), gemm="cublas"
)
def norm_gate(call: OutputChainCall) -> Results:
    """One kernel for norm and gate of all heads, and the product by PyTorch.

    A norm's weight in 16 bits adds a launch to the backward pass, and so does a bias; without a norm's weight it has one less.
    """
    return compute(call, "norm_gate")


@norm_gate.supports
def needs_triton(query: Query) -> str | None:
    """What the kernels need, those of the backward pass included."""
    if (reason := cannot_launch(query)) is not None:
        return reason
    from onelaunch.ops.output_chain import launch

    batch, length, heads, values, columns = query.sizes
    if values > LARGEST_HEAD:
        return f"takes heads of at most {LARGEST_HEAD} channels, not {values}: a program holds whole heads"
    if max(heads * values, columns) >= MOST_COLUMNS:
        return f"takes H * V and D below {MOST_COLUMNS}: positions in rows are of 32 bits"
    if launch.tiles(batch * length, heads, values, launch.GRADIENT_ELEMENTS) > LARGEST_GRID:
        return f"takes at most {LARGEST_GRID} tiles of {launch.GRADIENT_ELEMENTS} elements: a launch is no wider"
    return None


TYPES = {
    "rstd": "*fp32", "partials": "*fp32", "M": "i32", "N": "i32:16", "H": "i32", "steps": "i32", "eps": "fp32",
    "h_stride": "i32:16", "gate_stride": "i32:16", "dgate_stride": "i32:16", "da_stride": "i32:16", "w_stride": "i32:16",
}  # fmt: skip
"""Of arguments that are not what h is."""


def build(
    name: str, kernel: Any, constants: dict[str, Any], element: str, absent: tuple[str, ...] = (), **options: Any
) -> KernelBuild:
    """A kernel as a call launches it."""
    constants = constants | dict.fromkeys(absent)
    signature = {each: "constexpr" if each in constants else TYPES.get(each, element) for each in kernel.arg_names}
    return KernelBuild(name, kernel, signature, constants, **options)


def gradient_builds(values: int, element: str, *, every: bool = True) -> list[KernelBuild]:
    """The kernel of the backward pass, which is that of every variant of ours; in every form, or in the usual one alone."""
    from onelaunch.ops.output_chain import kernels, launch

    kernel, tile = kernels.norm_gate_gradients_kernel, launch.tile_of(8192, values, launch.GRADIENT_ELEMENTS)
    said, options = f"heads of {values}", {"num_warps": launch.WARPS}
    alone, bare = ("da", "dh", "dgate", "partials"), ("gate", "dgate", "norm_weight", "partials", "a")
    usual = build(f"gradients, {said}", kernel, {**tile, "ACTIVATED": False}, element, **options)
    if not every:
        return [usual]
    return [
        usual,
        build(f"gradients, activated, {said}", kernel, {**tile, "ACTIVATED": True}, element, **options),
        build(f"gradients, no gate, {said}", kernel, {**tile, "ACTIVATED": False}, element, ("gate", "dgate"), **options),
        build(f"gradients, bare, {said}", kernel, {**tile, "ACTIVATED": False}, element, bare, **options),
        build(f"a again, {said}", kernel, {**tile, "ACTIVATED": False}, element, alone, **options),
    ]


@norm_gate.kernels
def norm_gate_builds(architecture: str) -> list[KernelBuild]:
    """Both kernels for heads of usual size in every form; for uneven and the largest ones as a training step launches them."""
    from onelaunch.ops.output_chain import kernels, launch

    builds, options = [], {"num_warps": launch.WARPS}
    for values, element in ((128, "*bf16"), (100, "*fp16"), (LARGEST_HEAD, "*fp32")):
        known, said = launch.tile_of(8192, values, launch.ELEMENTS) | {"ACTIVATED": False}, f"heads of {values}"
        kernel = kernels.norm_gate_kernel
        builds += [
            build(f"norm_gate and keep, {said}", kernel, known, element, **options),
            *gradient_builds(values, element, every=values == 128),
        ]
        if values == 128:
            bare = ("rstd", "gate", "norm_weight")
            builds += [
                build(f"norm_gate, {said}", kernel, known, element, ("rstd",), **options),
                build(f"norm_gate, bare, {said}", kernel, known, element, bare, **options),
            ]
    return builds
