"""Variants of ``projections`` in Triton: activations after PyTorch's product, and in the epilogue of our own product.

The dispatcher, studies and tests find registered variants by name. The functions ``run_...`` are registered by a variant's name
in ``launches`` of autograd.py, for the operators of this operation and of ``gla_layer``. ``hopper.py`` uses ``BOTH``,
``activates``, ``example`` and ``few_inputs``. Tags: ``fuses`` names the steps that share a kernel, and ``hands`` the products
that go through device memory before their activation; ``cost.py`` reads them. ``gemm`` says who makes the product. Other keywords
are capabilities, which the class ``Capabilities`` of ``onelaunch.operation`` explains.
"""

from __future__ import annotations

import torch

from onelaunch.operation import Direction, Example, Query
from onelaunch.operation.requirements import LARGEST_GRID_X, cannot_launch
from onelaunch.ops.projections.autograd import Packed, Wanted, compute, launches
from onelaunch.ops.projections.contract import ProjectionsCall, layout_in, projections
from onelaunch.ops.projections.layout import Layout, Segment, layout_of

_LARGEST_HEAD = 512
"""Limit on the channels of a normalized head: a CTA holds whole heads."""

_LARGEST_PRODUCT_HEAD = 256
"""Limit on the channels of a head that is normalized in the product's registers."""

_MOST_COLUMNS = 2**30
"""Bound of N: below it, columns of a tile beyond the end fit into 32 bits."""


@launches("wide_activated")
def run_wide_activated(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, wanted: Wanted) -> Packed:
    """Multiply with PyTorch, then launch the kernel of activations."""
    from onelaunch.ops.projections import launch

    return Packed(*launch.activate(x @ weight.mT, bias, wanted.layout, wanted.eps, keep=wanted.keep))


@projections.variant(
    "wide_activated", compiles=True, launches=2, backward_launches=3, fuses=("products",), hands=("all",), gemm="cublas"
)
def wide_activated(call: ProjectionsCall) -> tuple[torch.Tensor, ...]:
    """Multiply by the packed weight with PyTorch, then apply the activations of all segments in one kernel.

    In the backward pass a bias adds one launch per segment that has one, and one more if there are several. If x has few columns,
    one launch takes the place of two products and these.
    """
    return compute(call, "wide_activated")


@launches("epilogue")
def run_epilogue(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, wanted: Wanted) -> Packed:
    """Launch the kernel that multiplies and applies activations in its epilogue."""
    from onelaunch.ops.projections import launch

    return Packed(*launch.epilogue(x, weight, bias, wanted.layout, wanted.eps, keep=wanted.keep))


@projections.variant(
    "epilogue", compiles=True, launches=1, backward_launches=3, fuses=("products", "activations"), hands=(), gemm="triton"
)
def epilogue(call: ProjectionsCall) -> tuple[torch.Tensor, ...]:
    """Run one launch: a portable kernel multiplies and applies each segment's activation to the sums in registers."""
    return compute(call, "epilogue")


@epilogue.supports
def whole_heads(query: Query) -> str | None:
    """Return why a tile of the product cannot hold a call's heads, or ``None``."""
    longest = max((each.segment.head_size for each in layout_in(query).spans if each.segment.activation == "l2norm"), default=0)
    if longest > _LARGEST_PRODUCT_HEAD:
        return f"normalizes heads of at most {_LARGEST_PRODUCT_HEAD} channels, not {longest}"
    return None if query.sizes[2] else "needs at least one channel of x"


@epilogue.supports
@wide_activated.supports
def activates(query: Query) -> str | None:
    """Return why the kernels of activations cannot run, or ``None``.

    All of our own variants run one of them in the backward pass.
    """
    if (reason := cannot_launch(query)) is not None:
        return reason
    from onelaunch.ops.projections import launch

    layout = layout_in(query)
    if (reason := _heads_too_long(layout)) is not None:
        return reason
    if layout.rows >= _MOST_COLUMNS:
        return f"takes N below {_MOST_COLUMNS}: column indices are 32-bit"
    if launch.ctas_of_activations(query.sizes[0] * query.sizes[1], layout) > LARGEST_GRID_X:
        return f"takes at most {LARGEST_GRID_X} tiles of {launch.ELEMENTS} elements, one per CTA of a grid"
    return None


def _heads_too_long(layout: Layout) -> str | None:
    """Return why a CTA cannot hold a head that it normalizes, forward or backward, or ``None``."""
    heads = [span.segment for span in layout.spans if span.segment.activation == "l2norm"]
    longest = max(heads, key=lambda segment: segment.head_size, default=None)
    if longest is None or longest.head_size <= _LARGEST_HEAD:
        return None
    return f"normalizes heads of at most {_LARGEST_HEAD} channels, not {longest.head_size}: a CTA holds whole heads"


def _chain(heads: int, head_size: int) -> Layout:
    """Return a layout of one segment for each activation."""
    return layout_of(
        (
            Segment("q", heads, head_size, "l2norm"),
            Segment("v", heads, head_size),
            Segment("gate", heads, head_size, "silu"),
            Segment("decay", heads, 1, "sigmoid"),
            Segment("gk", heads, head_size, "logsigmoid", normalizer=16.0, bias=True),
        )
    )


def example(heads: int, head_size: int, dtype: str, rows: int, direction: Direction) -> Example:
    """Return a call with one segment for each activation; "kept" in its name tells that a backward pass follows."""
    code = _chain(heads, head_size).code
    case = projections.case(dtype, B=1, T=rows, D=2048, H=heads, K=head_size, V=head_size, segments=code)
    return Example(case, direction, name=f"heads of {head_size}, M = {rows}" + (", kept" * (direction == "forward_backward")))


def few_inputs(inputs: int, dtype: str, rows: int) -> Example:
    """Return a training call that makes log-decays from few columns of x, whose gradients are one launch."""
    case = projections.case(dtype, B=1, T=rows, D=inputs, H=16, K=128, V=128, segments="16x128:logsigmoid/16.0:bias")
    return Example(case, "forward_backward", name=f"D = {inputs}, M = {rows}")


BOTH: tuple[Direction, ...] = ("forward", "forward_backward")
"""Directions of example calls: inference, and training."""

_MANY = 4095
"""Number of rows of the examples, no multiple of any tile's rows."""


@wide_activated.examples
def behind_a_product() -> list[Example]:
    """Return calls with heads of usual, uneven and the largest sizes, for inference and for training, and with few inputs."""
    kinds = ((16, 128, "bfloat16"), (3, 100, "float16"), (2, _LARGEST_HEAD, "float32"))
    few = ((16, "bfloat16"), (5, "float16"), (32, "bfloat16"), (16, "float32"), (27, "float32"), (32, "float32"))
    return [
        *(example(*kind, _MANY, direction) for kind in kinds for direction in BOTH),
        *(few_inputs(*kind, _MANY) for kind in few),
    ]


@epilogue.examples
def at_the_end_of_a_product() -> list[Example]:
    """Return training calls with heads of usual, uneven and long sizes, many rows and few, few inputs, and one for inference."""
    return [
        *(example(16, 128, "bfloat16", _MANY, direction) for direction in BOTH),
        example(3, 100, "float16", _MANY, "forward_backward"),
        example(4, _LARGEST_PRODUCT_HEAD, "bfloat16", 15, "forward_backward"),
        example(2, 64, "float32", 63, "forward_backward"),
        few_inputs(16, "bfloat16", _MANY),
    ]
