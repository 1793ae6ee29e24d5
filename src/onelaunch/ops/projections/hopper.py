"""Variants of ``projections`` in one launch on Hopper GPUs: activations in the epilogue of the wide product."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from onelaunch.device.hardware import HOPPER_SMS
from onelaunch.kernels import hopper
from onelaunch.kernels.hopper import ARCHITECTURES
from onelaunch.launch.build import Build, CudaBuild
from onelaunch.operation import Query
from onelaunch.ops.projections.contract import ProjectionsCall, layout_in, projections
from onelaunch.ops.projections.forward import Packed, Wanted, compute, launches
from onelaunch.ops.projections.layout import Layout
from onelaunch.ops.projections.torch_variants import Results
from onelaunch.ops.projections.triton_variants import chain, gradient_builds, needs_triton

if TYPE_CHECKING:
    from onelaunch.kernels.gemm_sm90.config import Multicast

LONGEST_HEAD = 256
"""Channels of a normalized head: a product has so many columns."""

MOST_TILES = 2**31 - 1
"""Of a launch: they are counted in 32 bits."""

MOST_ROWS = MOST_TILES - 256
"""Of x, and those of a cluster's two tiles beside them."""

MULTICAST: dict[str, Multicast] = {"epilogue_persistent": "nothing", "cluster": "a", "cluster_weight": "b"}
"""Operand that the CTAs of a cluster have in common, by variant: rows of x (a) or of the weight (b)."""


def run_wide_gemm(variant: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, wanted: Wanted) -> Packed:
    """One launch."""
    from onelaunch.ops.projections import hopper_launch

    return hopper_launch.wide_gemm(MULTICAST[variant], x, weight, bias, wanted)


for name in MULTICAST:
    launches(name)(functools.partial(run_wide_gemm, name))


@projections.variant(
    "epilogue_persistent", launches=1, backward_launches=3, fuses=("products", "activations"), hands=(), gemm="wgmma",
    architectures=ARCHITECTURES,
)  # fmt: skip
def epilogue_persistent(call: ProjectionsCall) -> Results:
    """One launch: products by warpgroups, activations on their sums in registers, programs that take one tile after the other."""
    return compute(call, "epilogue_persistent")


@projections.variant(
    "cluster",
    launches=1,
    backward_launches=3,
    fuses=("products", "activations"),
    hands=(),
    gemm="wgmma",
    architectures=ARCHITECTURES,
)
def cluster(call: ProjectionsCall) -> Results:
    """The same with clusters of two programs, which fetch every tile of x once for both."""
    return compute(call, "cluster")


@projections.variant(
    "cluster_weight", launches=1, backward_launches=3, fuses=("products", "activations"), hands=(), gemm="wgmma",
    architectures=ARCHITECTURES,
)  # fmt: skip
def cluster_weight(call: ProjectionsCall) -> Results:
    """The same, but what clusters fetch once for both is the weight, of which a tile has twice as many bytes as of x."""
    return compute(call, "cluster_weight")


@epilogue_persistent.supports
@cluster.supports
@cluster_weight.supports
def needs_hopper(query: Query) -> str | None:
    """Return why the forward pass, or a backward pass in Triton, cannot run a query."""
    return hopper.needs_hopper(query) or (needs_triton(query) if query.grad else None)


@epilogue_persistent.supports
@cluster.supports
@cluster_weight.supports
def what_tiles_hold(query: Query) -> str | None:
    """What the copy engine addresses, and a tile has room for."""
    batch, length, channels, *_ = query.sizes
    layout = layout_in(query)
    if query.dtype is torch.float32:
        return "takes float16 and bfloat16"
    if 0 in (batch, length, channels):
        return "needs at least one element in every dimension"
    if channels % 8:
        return f"needs D in multiples of 8, which the copy engine can address, not {channels}"
    for place in layout.places:
        head = place.segment.head_size
        if place.segment.activation == "l2norm" and (head % 8 or head > LONGEST_HEAD):
            return f"normalizes heads of up to {LONGEST_HEAD} channels in multiples of 8, not {head}"
    if batch * length > MOST_ROWS or -(-batch * length // 128) * layout.rows > MOST_TILES:
        return f"takes at most {MOST_ROWS} rows of x, and {MOST_TILES} tiles"
    return None


@projections.prefers
def one_launch(query: Query) -> tuple[str, ...]:
    """Where there is no measured size near."""
    return ("epilogue_persistent",)


SHAPE = (32768, 2048)
"""Rows of x and channels that builds are made for."""


def build(name: str, layout: Layout, multicast: Multicast, element: torch.dtype, *, keep: bool) -> CudaBuild:
    """Return the kernel as a call launches it."""
    from onelaunch.ops.projections import hopper_launch

    return hopper_launch.plan_of(layout, *SHAPE, element, HOPPER_SMS, multicast, keep=keep).kernel.build(name)


def builds(multicast: Multicast, architecture: str) -> list[Build]:
    """Return the kernels for heads of usual size, also with what a backward pass needs; without clusters for other sizes, too."""
    if architecture not in ARCHITECTURES:
        return []
    found: list[Build] = []
    for heads, size, element in ((16, 128, torch.bfloat16), (5, 96, torch.float16), (4, 256, torch.bfloat16)):
        layout, said = chain(heads, size), f"heads of {size}"
        if size == 128:
            found.append(build(said, layout, multicast, element, keep=False))
        if size == 128 or multicast == "nothing":
            found.append(build(f"{said}, kept", layout, multicast, element, keep=True))
    return [*found, *gradient_builds(chain(16, 128), "heads of 128", "*bf16")]


for variant in (epilogue_persistent, cluster, cluster_weight):
    variant.kernels(functools.partial(builds, MULTICAST[variant.name]))
