"""Variants of ``projections`` in one launch on Hopper GPUs: activations in the epilogue of the wide product."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from onelaunch.operation import Example, Query
from onelaunch.operation.requirements import needs_hopper
from onelaunch.ops.projections.autograd import Packed, Wanted, compute, launches
from onelaunch.ops.projections.contract import ProjectionsCall, layout_in, projections
from onelaunch.ops.projections.variants.triton import BOTH, activates, example

if TYPE_CHECKING:
    from onelaunch.kernels.gemm_sm90.config import Multicast

ARCHITECTURES = ("sm_90a",)

LONGEST_HEAD = 256
"""Channels of a normalized head: a product has so many columns."""

MOST_TILES = 2**31 - 1
"""Of a launch: they are counted in 32 bits."""

MOST_ROWS = MOST_TILES - 256
"""Of x, and those of a cluster's two tiles beside them."""

MULTICAST: dict[str, Multicast] = {"epilogue_persistent": "nothing", "cluster": "a", "cluster_weight": "b"}
"""Operand that the CTAs of a cluster have in common, by variant: rows of x (a) or of the weight (b)."""


def run_wide_gemm(variant: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, wanted: Wanted) -> Packed:
    """Compute all segments in one launch."""
    from onelaunch.ops.projections import launch_hopper

    return launch_hopper.wide_gemm(MULTICAST[variant], x, weight, bias, wanted)


for name in MULTICAST:
    launches(name)(functools.partial(run_wide_gemm, name))


@projections.variant(
    "epilogue_persistent", launches=1, backward_launches=3, fuses=("products", "activations"), hands=(), gemm="wgmma",
    architectures=ARCHITECTURES,
)  # fmt: skip
def epilogue_persistent(call: ProjectionsCall) -> tuple[torch.Tensor, ...]:
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
def cluster(call: ProjectionsCall) -> tuple[torch.Tensor, ...]:
    """The same with clusters of two programs, which fetch every tile of x once for both."""
    return compute(call, "cluster")


@projections.variant(
    "cluster_weight", launches=1, backward_launches=3, fuses=("products", "activations"), hands=(), gemm="wgmma",
    architectures=ARCHITECTURES,
)  # fmt: skip
def cluster_weight(call: ProjectionsCall) -> tuple[torch.Tensor, ...]:
    """The same, but what clusters fetch once for both is the weight, of which a tile has twice as many bytes as of x."""
    return compute(call, "cluster_weight")


for variant in (epilogue_persistent, cluster, cluster_weight):
    variant.supports(needs_hopper)


@epilogue_persistent.supports
@cluster.supports
@cluster_weight.supports
def can_train(query: Query) -> str | None:
    """Return why the backward pass cannot run, whose kernel is in Triton."""
    return activates(query) if query.grad else None


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


ROWS = 32768
"""Rows of x of the example calls."""


def examples(multicast: Multicast) -> list[Example]:
    """Return calls with heads of usual size for inference and for training; without clusters also with other sizes."""
    usual = [example(16, 128, "bfloat16", ROWS, direction) for direction in BOTH]
    others = ((5, 96, "float16"), (4, 256, "bfloat16")) if multicast == "nothing" else ()
    return [*usual, *(example(*kind, ROWS, "forward_backward") for kind in others)]


for variant in (epilogue_persistent, cluster, cluster_weight):
    variant.examples(functools.partial(examples, MULTICAST[variant.name]))
