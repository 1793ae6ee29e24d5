"""Variant of ``rms_norm`` in Triton: addition and norm in one launch.

The dispatcher, studies and tests find registered variants by name. Tags: ``fuses`` names the steps that share a kernel,
``hands`` what goes through device memory between launches, which is nothing, and ``keeps`` what is saved for the backward pass
beside results and inputs (``rstd``, the reciprocal root mean square of every row); ``cost.py`` reads both. Other keywords are
capabilities, which the class ``Capabilities`` of ``onelaunch.operation`` explains.
"""

from __future__ import annotations

from collections.abc import Iterator

from onelaunch.operation import Example, Query
from onelaunch.operation.requirements import cannot_launch
from onelaunch.ops.rms_norm.autograd import Results, compute
from onelaunch.ops.rms_norm.contract import RMSNormCall, rms_norm

LARGEST_ROW = 16384
"""Limit on the channels of a row: a CTA holds whole rows."""

_MOST_ROWS = 2**30
"""Limit on the rows of a call: the index of a tile of rows beyond the last one fits into 32 bits."""


@rms_norm.variant(
    "fused", compiles=True, launches=1, backward_launches=2, fuses=("add", "norm"), hands=(), keeps=("rstd",), maker="onelaunch"
)
def fused(call: RMSNormCall) -> Results:
    """Run one kernel forward, and one backward, after which a small one adds up the gradient of the weight, if there is one."""
    return compute(call)


@fused.supports
def fits(query: Query) -> str | None:
    """Return why the kernels cannot run a call, those of the backward pass included, or ``None``."""
    if (reason := cannot_launch(query)) is not None:
        return reason
    rows, channels = query.sizes
    if channels > LARGEST_ROW:
        return f"takes rows of at most {LARGEST_ROW} channels, not {channels}: a CTA holds whole rows"
    return f"takes at most {_MOST_ROWS} rows: indices of tiles are 32-bit" if rows > _MOST_ROWS else None


@fused.examples
def every_form() -> Iterator[Example]:
    """Yield calls to compile and inspect the kernels for: every form of a call, short and long rows, few rows, uneven rows.

    "rstd kept" marks training calls, whose forward pass saves rstd.
    """
    usual = rms_norm.case("bfloat16", M=8192, D=4096)
    yield Example(usual, "forward_backward", name="rows of 4096, rstd kept")
    yield Example(usual, name="rows of 4096")
    yield Example(usual, "forward_backward", name="gradient of the weight alone", wants=("weight",))
    forms = {
        "alone": {"residual": "none"},
        "bare": {"residual": "none", "weight": "none"},
        "float32 residual": {"residual": "float32"},
    }
    for said, options in forms.items():
        case = rms_norm.case("bfloat16", M=8192, D=2048, **options)
        yield Example(case, "forward_backward", name=f"{said}, rstd kept")
    for channels in (100, 1024, 8192, LARGEST_ROW):
        yield Example(rms_norm.case("bfloat16", M=8192, D=channels), "forward_backward", name=f"rows of {channels}, rstd kept")
    for rows in (1, 16):
        yield Example(rms_norm.case("bfloat16", M=rows, D=4096), name=f"{rows} rows of 4096")
    yield Example(rms_norm.case("float16", M=16, D=5120), "forward_backward", name="16 rows of 5120, rstd kept")
    yield Example(
        rms_norm.case("bfloat16", M=8192, D=4096, residual="float32"), "forward_backward", name="float32 sum of 4096, rstd kept"
    )
    for channels in (4096, LARGEST_ROW):
        case = rms_norm.case("float32", M=8192, D=channels)
        yield Example(case, "forward_backward", name=f"float32 rows of {channels}, rstd kept")
