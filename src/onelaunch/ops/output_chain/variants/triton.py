"""Variants of ``output_chain`` of our own: norm and gate in a kernel before PyTorch's product, and inside our own product.

The kernels are in Triton; ``prologue`` has another one in CUDA C++ for few rows on Hopper.

The dispatcher, studies and tests find registered variants by name. Tags: ``fuses`` names the steps that share a kernel. ``hands``
names the intermediates that go through device memory (``a``, the normalized and gated heads), and ``keeps`` what is saved for the
backward pass in addition to inputs: ``rstd``, the reciprocal root mean square of every head, and ``a``, which a variant without
it recomputes. ``cost.py`` reads both. ``gemm`` says who makes the product. Other keywords are capabilities, which the class
``Capabilities`` of ``onelaunch.operation`` explains.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

from onelaunch.operation import Case, Example, Query
from onelaunch.operation.requirements import cannot_launch, interprets_bfloat16_wrongly
from onelaunch.ops.output_chain.autograd import Results, compute, launches
from onelaunch.ops.output_chain.contract import OutputChainCall, output_chain

if TYPE_CHECKING:
    from onelaunch.ops.output_chain.launch import Made, Operands

_LARGEST_HEAD = 512
"""Limit on the channels of a head: a CTA holds whole heads."""

_LARGEST_MULTIPLIED_HEAD = 256
"""Limit on the channels of a head for ``prologue``, where a CTA holds a head of at least 16 rows beside the product's sums."""

_MOST_TILES = 2**30
"""Limit on the tiles of a launch of the backward pass: the index of a tile beyond the last one fits into 32 bits."""

_MOST_COLUMNS = 2**30
"""Bound of H * V and of D: below it, columns of a tile beyond the end fit into 32 bits."""


@launches("norm_gate")
def run_norm_gate(given: Operands, w_out: torch.Tensor, bias: torch.Tensor | None, eps: float, keep: bool) -> Made:
    """Normalize and gate in one launch, then multiply with PyTorch."""
    from onelaunch.ops.output_chain import launch

    a, rstd = launch.norm_gate(given, eps, keep=keep)
    return launch.Made(F.linear(a, w_out, bias), rstd, a)


@output_chain.variant(
    "norm_gate",
    compiles=True,
    launches=2,
    backward_launches=3,
    fuses=("norm", "gate"),
    hands=("a",),
    keeps=("rstd", "a"),
    gemm="cublas",
)
def norm_gate(call: OutputChainCall) -> Results:
    """Run one kernel for norm and gate of all heads, and the product with PyTorch.

    For the gradient of the output weight it saves the product's operand: H * V elements per token, as PyTorch's chain does.
    A bias adds one launch to the backward pass. With many tokens the gradient of the norm's weight adds one too, and another one
    where the weight has 16 bits.
    """
    return compute(call, "norm_gate", writes_a=True)


@norm_gate.supports
def needs_triton(query: Query) -> str | None:
    """Return why the kernels cannot run a call, those of the backward pass included, or ``None``."""
    if (reason := cannot_launch(query)) is not None:
        return reason
    from onelaunch.ops.output_chain import launch

    batch, length, heads, values, columns = query.sizes
    if values > _LARGEST_HEAD:
        return f"takes heads of at most {_LARGEST_HEAD} channels, not {values}: a CTA holds whole heads"
    if max(heads * values, columns) >= _MOST_COLUMNS:
        return f"takes H * V and D below {_MOST_COLUMNS}: column indices are 32-bit"
    if launch.tiles(batch * length, heads, values, launch.GRADIENT_ELEMENTS) > _MOST_TILES:
        return f"takes at most {_MOST_TILES} tiles of {launch.GRADIENT_ELEMENTS} elements: indices of tiles are 32-bit"
    return None


@launches("prologue")
def run_prologue(given: Operands, w_out: torch.Tensor, bias: torch.Tensor | None, eps: float, keep: bool) -> Made:
    """Normalize, gate and multiply in one launch."""
    from onelaunch.ops.output_chain import launch_prologue

    return launch_prologue.prologue(given, w_out, bias, eps, keep=keep)


@output_chain.variant(
    "prologue",
    compiles=True,
    launches=1,
    backward_launches=3,
    fuses=("norm", "gate", "product"),
    hands=(),
    keeps=("rstd",),
    gemm="triton",
)
def prologue(call: OutputChainCall) -> Results:
    """Run one launch: a product that normalizes and gates every head as it loads it.

    Every tile of columns repeats this work. With at most 64 rows in bfloat16 on Hopper, CTAs of a cluster share it instead, and
    do it while the weights are on their way. The backward pass is that of ``norm_gate``.
    """
    return compute(call, "prologue", writes_a=False)


prologue.supports(needs_triton)


@prologue.supports
def fits(query: Query) -> str | None:
    """Return why the kernel of the product cannot run a call, or ``None``."""
    values, most = query.sizes[3], _LARGEST_MULTIPLIED_HEAD
    if values > most:
        return f"takes heads of at most {most} channels, not {values}: a CTA holds them in addition to the sums of a product"
    return interprets_bfloat16_wrongly(query)


# Example calls

_FEW, _MANY = 3, 8191
"""Number of tokens of the example calls."""

_FORMS: dict[str, dict[str, Any]] = {
    "activated": {"gate": "activated"},
    "no gate": {"gate": "none"},
    "bare": {"gate": "none", "norm_weight": "none"},
    "bias": {"bias": True},
}
"""Options of the forms of a call, by the name of the form in reports."""


def _case_of(dtype: str, values: int, tokens: int = _MANY, **options: Any) -> Case:
    """Return a call of 3 or 4 heads of ``values`` channels. H * V, a token's stride, is a multiple of 16, as in most models."""
    heads = 3 if values % 16 == 0 else 4
    return output_chain.case(dtype, B=1, T=tokens, H=heads, V=values, D=2048, **options)


@norm_gate.examples
def every_form() -> Iterator[Example]:
    """Yield calls to compile and inspect the kernels for: heads of 128 channels in every form, and uneven and the largest heads.

    "rstd kept" and "alone" mark training calls, whose forward pass saves rstd. A bias concerns PyTorch's product alone.
    """
    usual = _case_of("bfloat16", 128)
    yield Example(usual, "forward_backward", name="heads of 128, rstd kept")
    # CTAs have so many tiles that PyTorch adds up the partial sums of the norm weight's gradient.
    yield Example(_case_of("bfloat16", 128, 8 * _MANY), "forward_backward", name="heads of 128, many tokens, rstd kept")
    for said in ("activated", "no gate"):
        yield Example(_case_of("bfloat16", 128, **_FORMS[said]), "forward_backward", name=f"{said}, rstd kept")
    bare = _case_of("bfloat16", 128, **_FORMS["bare"])
    yield Example(bare, "forward_backward", name="bare, gradient of h alone", wants=("h",))
    yield Example(usual, name="heads of 128")
    yield Example(bare, name="bare")
    for dtype, values in (("float16", 100), ("float32", _LARGEST_HEAD)):
        yield Example(_case_of(dtype, values), "forward_backward", name=f"heads of {values}, rstd kept")


@prologue.examples
def few_and_many_rows() -> Iterator[Example]:
    """Yield calls to compile and inspect the kernels for: few and many rows, uneven and the largest heads, several forms.

    On Hopper, few rows in bfloat16 take a kernel of their own. Unlike ``norm_gate``'s, the launch of the backward pass writes the
    product's operand.
    """
    usual = _case_of("bfloat16", 128)
    yield Example(usual, "forward_backward", name="heads of 128, rstd kept")
    yield Example(usual, "forward_backward", name="gradient of the output weight alone", wants=("w_out",))
    yield Example(_case_of("bfloat16", 128, **_FORMS["no gate"]), "forward_backward", name="no gate, rstd kept")
    for tokens, said in ((_FEW, "few"), (_MANY, "many")):
        yield Example(_case_of("bfloat16", 128, tokens), name=f"{said} rows")
    yield Example(_case_of("float16", 128, _FEW), name="few rows, float16")
    slabs = output_chain.case("bfloat16", B=64, T=1, H=8, V=256, D=2048, norm_weight="float32", bias=True)
    yield Example(slabs, "forward_backward", name="64 rows, heads of 256, rstd kept")
    for values in (100, _LARGEST_MULTIPLIED_HEAD):
        yield Example(_case_of("float16", values), "forward_backward", name=f"heads of {values}, rstd kept")
    for said in ("bias", "activated", "bare"):
        yield Example(_case_of("bfloat16", 128, **_FORMS[said]), name=said)
    yield Example(_case_of("float32", 128), name="float32")
