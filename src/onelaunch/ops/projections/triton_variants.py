"""Variants of ``projections`` whose activations are a kernel of ours behind PyTorch's product. See ``forward.py``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from onelaunch.launch.build import KernelBuild
from onelaunch.operation import Query
from onelaunch.operation.requirements import cannot_launch
from onelaunch.ops.projections.contract import ProjectionsCall, layout_in, projections
from onelaunch.ops.projections.forward import Packed, Wanted, compute, launches
from onelaunch.ops.projections.layout import Layout, Segment, layout_of
from onelaunch.ops.projections.torch_variants import Results

LARGEST_HEAD = 512
"""Channels of a normalized head: a program holds whole heads."""

LARGEST_PRODUCT_HEAD = 256
"""The same of one that is normalized in the product's registers."""

LARGEST_GRID = 2**31 - 1
"""Programs of a launch."""

MOST_COLUMNS = 2**30
"""N below this leaves room for a tile in 32 bits."""


@launches("wide_activated")
def run_wide_activated(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, wanted: Wanted) -> Packed:
    """A product by PyTorch, and a launch."""
    from onelaunch.ops.projections import launch

    return Packed(*launch.activate(x @ weight.mT, bias, wanted.layout, wanted.eps, keep=wanted.keep))


@projections.variant("wide_activated", launches=2, backward_launches=3, fuses=("products",), hands=("all",), gemm="cublas")
def wide_activated(call: ProjectionsCall) -> Results:
    """One matrix product with the packed weight by PyTorch, and one kernel for the activations of all segments.

    A bias adds a launch to the backward pass for each segment that has one, and another where these are several.
    """
    return compute(call, "wide_activated")


@launches("epilogue")
def run_epilogue(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, wanted: Wanted) -> Packed:
    """One launch."""
    from onelaunch.ops.projections import launch

    return Packed(*launch.epilogue(x, weight, bias, wanted.layout, wanted.eps, keep=wanted.keep))


@projections.variant("epilogue", launches=1, backward_launches=3, fuses=("products", "activations"), hands=(), gemm="triton")
def epilogue(call: ProjectionsCall) -> Results:
    """One launch: a portable kernel multiplies, and applies each segment's activation to sums in registers."""
    return compute(call, "epilogue")


@epilogue.supports
def whole_heads(query: Query) -> str | None:
    """A tile holds them."""
    longest = max((each.segment.head_size for each in layout_in(query).places if each.segment.activation == "l2norm"), default=0)
    if longest > LARGEST_PRODUCT_HEAD:
        return f"normalizes heads of at most {LARGEST_PRODUCT_HEAD} channels, not {longest}"
    return None if query.sizes[2] else "needs at least one channel of x"


@epilogue.supports
@wide_activated.supports
def needs_triton(query: Query) -> str | None:
    """What the kernels need."""
    if (reason := cannot_launch(query)) is not None:
        return reason
    from onelaunch.ops.projections import launch

    layout = layout_in(query)
    if (reason := heads_too_long(layout)) is not None:
        return reason
    if layout.rows >= MOST_COLUMNS:
        return f"takes N below {MOST_COLUMNS}: positions in rows are of 32 bits"
    if launch.programs(query.sizes[0] * query.sizes[1], layout) > LARGEST_GRID:
        return f"takes at most {LARGEST_GRID} tiles of {launch.ELEMENTS} elements: a launch is no wider"
    return None


def heads_too_long(layout: Layout) -> str | None:
    """Why a program cannot hold a head that it normalizes; also what undoing the activations needs, whatever applied them."""
    heads = [place.segment for place in layout.places if place.segment.activation == "l2norm"]
    longest = max(heads, key=lambda segment: segment.head_size, default=None)
    if longest is None or longest.head_size <= LARGEST_HEAD:
        return None
    return f"normalizes heads of at most {LARGEST_HEAD} channels, not {longest.head_size}: a program holds whole heads"


def chain(heads: int, head_size: int) -> Layout:
    """One segment of every kind."""
    return layout_of(
        (
            Segment("q", heads, head_size, "l2norm"),
            Segment("v", heads, head_size),
            Segment("gate", heads, head_size, "silu"),
            Segment("decay", heads, 1, "sigmoid"),
            Segment("gk", heads, head_size, "logsigmoid", normalizer=16.0, bias=True),
        )
    )


POINTERS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}

TYPES = {"rstd": "*fp32", "M": "i32", "D": "i32:16", "x_stride": "i32:16", "w_stride": "i32:16", "eps": "fp32"}
"""Of arguments that are not what x is."""


def build(name: str, kernel: Any, constants: dict[str, Any], element: str, absent: tuple[str, ...] = ()) -> KernelBuild:
    """A kernel as a call launches it."""
    from onelaunch.ops.projections import launch

    count = len(constants["WIDTHS"])
    signature: dict[str, str | tuple[str, ...]] = {}
    for argument in kernel.arg_names:
        if argument in constants or argument in absent:
            signature[argument] = "constexpr"
        elif argument == "dys":
            signature[argument] = (element,) * (count - 1) + ("constexpr",)  # the last has no gradient
        elif argument == "dy_strides":
            signature[argument] = ("i32:16",) * (count - 1) + ("i32",)
        else:
            signature[argument] = TYPES.get(argument, element)
    return KernelBuild(name, kernel, signature, constants | dict.fromkeys(absent), num_warps=launch.WARPS)


@wide_activated.kernels
def activation_builds(architecture: str) -> list[KernelBuild]:
    """Both kernels for heads of usual, uneven and the largest sizes."""
    from onelaunch.ops.projections import kernels, launch

    builds = []
    for heads, head_size, element in ((16, 128, "*bf16"), (3, 100, "*fp16"), (2, LARGEST_HEAD, "*fp32")):
        layout, said = chain(heads, head_size), f"heads of {head_size}"
        kept, alone = launch.forward_constants(layout, keep=True), launch.forward_constants(layout, keep=False)
        builds += [
            build(f"activate, {said}", kernels.activate_kernel, alone, element, absent=("rstd", "kept")),
            build(f"activate and keep, {said}", kernels.activate_kernel, kept, element),
            *gradient_builds(layout, said, element),
        ]
    return builds


def gradient_builds(layout: Layout, said: str, element: str) -> list[KernelBuild]:
    """The kernel of the backward pass, which is that of every variant that keeps what ``forward.py`` asks for."""
    from onelaunch.ops.projections import kernels, launch

    constants = launch.gradient_constants(layout)
    return [build(f"activation gradients, {said}", kernels.activation_gradients_kernel, constants, element)]


@epilogue.kernels
def product_builds(architecture: str) -> list[KernelBuild]:
    """With what a backward pass needs, for heads of usual, uneven and long sizes, many rows and few; once without."""
    from onelaunch.ops.projections import launch, product_kernels

    builds = []
    cases = (
        (16, 128, 4096, torch.bfloat16),
        (3, 100, 4096, torch.float16),
        (4, 256, 16, torch.bfloat16),
        (2, 64, 64, torch.float32),
    )
    for heads, head_size, rows, element in cases:
        layout, said = chain(heads, head_size), f"heads of {head_size}, M = {rows}"
        tiles = launch.product_tiles(layout, rows, element)
        for keep in (False, True) if head_size == 128 else (True,):
            constants = launch.product_constants(layout, tiles, keep) | {"EVEN": True}
            name, absent = (f"epilogue, {said}, kept", ()) if keep else (f"epilogue, {said}", ("rstd", "kept"))
            made = build(name, product_kernels.epilogue_kernel, constants, POINTERS[element], absent)
            builds.append(replace(made, num_warps=tiles.warps, num_stages=tiles.stages, matrix=element is not torch.float32))
    return [*builds, *gradient_builds(chain(16, 128), "heads of 128", "*bf16")]
