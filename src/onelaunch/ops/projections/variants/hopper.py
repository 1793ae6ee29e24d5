"""Variants of ``projections`` in one launch on Hopper GPUs: activations in the epilogue of the wide product.

The dispatcher, studies and tests find registered variants by name. Tags: ``fuses`` names the steps that share a kernel, and
``hands`` the products that go through device memory before their activation, here none; ``cost.py`` reads them, and takes a
missing ``hands`` as none. ``gemm`` says how products are made. Other keywords are capabilities, which the class ``Capabilities``
of ``onelaunch.operation`` explains.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from onelaunch.operation import Example, Query
from onelaunch.operation.requirements import needs_hopper
from onelaunch.ops.projections.autograd import Packed, Wanted, compute, launches
from onelaunch.ops.projections.contract import ProjectionsCall, layout_in, projections
from onelaunch.ops.projections.variants.triton import BOTH, activates, example, few_inputs

if TYPE_CHECKING:
    from onelaunch.kernels.gemm_sm90.config import Multicast

ARCHITECTURES = ("sm_90a",)
"""Architectures that the variants are compiled for."""

_LONGEST_HEAD = 256
"""Limit on the channels of a normalized head: a tile of the product has at most so many columns."""

_MOST_TILES = 2**31 - 1
"""Limit on the tiles of a launch, which are counted in 32 bits."""

_MOST_ROWS = _MOST_TILES - 256
"""Limit on the rows of x, which leaves space for the rows of a cluster's two tiles beyond the end."""

MULTICAST: dict[str, Multicast] = {"epilogue_persistent": "nothing", "cluster": "a", "cluster_weight": "b"}
"""Operand that is multicast within a cluster, by variant: rows of x (a), of the weight (b), or nothing."""


def run_wide_gemm(variant: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, wanted: Wanted) -> Packed:
    """Compute all segments in one launch, with the operand of :data:`MULTICAST` that belongs to the named variant."""
    from onelaunch.ops.projections import launch_hopper

    return launch_hopper.wide_gemm(MULTICAST[variant], x, weight, bias, wanted)


for name in MULTICAST:
    launches(name)(functools.partial(run_wide_gemm, name))


@projections.variant(
    "epilogue_persistent", launches=1, backward_launches=3, fuses=("products", "activations"), hands=(), gemm="wgmma",
    architectures=ARCHITECTURES,
)  # fmt: skip
def epilogue_persistent(call: ProjectionsCall) -> tuple[torch.Tensor, ...]:
    """Run one launch: WGMMA with activations applied to the sums in registers; persistent CTAs take one tile after another."""
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
    """Run ``epilogue_persistent`` in clusters of two CTAs, which load every tile of x once for both (TMA multicast)."""
    return compute(call, "cluster")


@projections.variant(
    "cluster_weight", launches=1, backward_launches=3, fuses=("products", "activations"), hands=(), gemm="wgmma",
    architectures=ARCHITECTURES,
)  # fmt: skip
def cluster_weight(call: ProjectionsCall) -> tuple[torch.Tensor, ...]:
    """Run ``epilogue_persistent`` in clusters of two CTAs that share tiles of the weight, up to twice as large as those of x."""
    return compute(call, "cluster_weight")


for variant in (epilogue_persistent, cluster, cluster_weight):
    variant.supports(needs_hopper)


@epilogue_persistent.supports
@cluster.supports
@cluster_weight.supports
def can_train(query: Query) -> str | None:
    """Return why the backward pass, whose kernel is in Triton, cannot run, or ``None``."""
    return activates(query) if query.grad else None


@epilogue_persistent.supports
@cluster.supports
@cluster_weight.supports
def why_tiles_cannot_hold(query: Query) -> str | None:
    """Return why TMA cannot address a call or a tile cannot hold it, or ``None``."""
    batch, length, channels, *_ = query.sizes
    layout = layout_in(query)
    if query.dtype is torch.float32:
        return "takes float16 and bfloat16"
    if 0 in (batch, length, channels):
        return "needs at least one element in every dimension"
    if channels % 8:
        return f"needs D in multiples of 8, which TMA can address, not {channels}"
    for span in layout.spans:
        head = span.segment.head_size
        if span.segment.activation == "l2norm" and (head % 8 or head > _LONGEST_HEAD):
            return f"normalizes heads of up to {_LONGEST_HEAD} channels in multiples of 8, not {head}"
    # A tile has 128 rows of x, and one column at least.
    if batch * length > _MOST_ROWS or -(-batch * length // 128) * layout.rows > _MOST_TILES:
        return f"takes at most {_MOST_ROWS} rows of x, and {_MOST_TILES} tiles"
    return None


@projections.prefers
def one_launch(query: Query) -> tuple[str, ...]:
    """Prefer one launch for calls without a measured size near them."""
    return ("epilogue_persistent",)


_ROWS = 32768
"""Number of rows of x in the example calls."""


def examples(multicast: Multicast) -> list[Example]:
    """Return calls with heads of usual size for inference and for training, and with few inputs; without clusters also others."""
    usual = [example(16, 128, "bfloat16", _ROWS, direction) for direction in BOTH]
    others = ((5, 96, "float16"), (4, 256, "bfloat16")) if multicast == "nothing" else ()
    usual.append(few_inputs(16, "bfloat16", _ROWS))
    return [*usual, *(example(*kind, _ROWS, "forward_backward") for kind in others)]


for variant in (epilogue_persistent, cluster, cluster_weight):
    variant.examples(functools.partial(examples, MULTICAST[variant.name]))
