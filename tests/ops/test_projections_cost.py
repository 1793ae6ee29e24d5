"""Tests of the cost of ``projections``: the minimum of bytes and FLOPs, and what its variants add.

``cost(case, None, direction)`` is the least that any implementation needs.
"""

from __future__ import annotations

from tests.ops.projections_cases import PROJECTIONS

SIZES = {"B": 8, "T": 4096, "D": 2048, "H": 16, "K": 128, "V": 128}
ROWS, WIDTH = 8 * 4096, 4 * 2048 + 16
"""Number of tokens, and of columns: 2048 each for q, k, v and the gate, and a decay for each of 16 heads."""
X, RESULT, WEIGHT = 2 * ROWS * 2048, 2 * ROWS * WIDTH, 2 * WIDTH * 2048
"""Bytes of x, of all results, and of the weight, in bfloat16."""


def test_minimal_bytes_and_flops():
    case = PROJECTIONS.case("bfloat16", **SIZES)
    assert PROJECTIONS.cost(case).flops == 2 * ROWS * WIDTH * 2048
    assert PROJECTIONS.cost(case).bytes == X + WEIGHT + RESULT == 705757184
    # The backward pass reads x, the weight and dy, and writes gradients of x and the weight, by two more products.
    both = PROJECTIONS.cost(case, None, "forward_backward")
    assert both.flops == 3 * 2 * ROWS * WIDTH * 2048
    assert both.bytes == 3 * (X + WEIGHT) + 2 * RESULT
    biased = PROJECTIONS.case("bfloat16", **SIZES, segments="gla")
    assert PROJECTIONS.cost(biased).bytes == X + 2 * 5 * 2048 * 2048 + 2 * 2048 + 2 * ROWS * 5 * 2048


def test_variants_add_intermediate_results_between_launches():
    case = PROJECTIONS.case("bfloat16", **SIZES)
    # "unfused" has five products, which read x; both it and "wide" write and read the columns that have an activation.
    activated = 2 * ROWS * (3 * 2048 + 16)
    added = {"unfused": 4 * X + 2 * activated, "wide": 2 * activated, "wide_activated": 2 * RESULT, "epilogue_persistent": 0}
    for name, bytes_ in added.items():
        assert PROJECTIONS.cost(case, PROJECTIONS.get(name)).bytes == PROJECTIONS.cost(case).bytes + bytes_, name
    own = PROJECTIONS.get("wide_activated")
    assert PROJECTIONS.cost(case, own).launches == 2
    assert PROJECTIONS.cost(case, own, "forward_backward").launches == 5
    # written and read: SiLU's input, and a float32 for each of 32 normalized heads
    kept = 2 * 2 * ROWS * 2048 + 2 * 4 * ROWS * 32
    undone = 2 * ROWS * (2 * 2048 + 16)  # results of the other activations, read to find their slopes
    backward = PROJECTIONS.cost(case, own, "forward_backward").bytes - PROJECTIONS.cost(case, None, "forward_backward").bytes
    # the products in the forward pass, and dz, written and read by two products
    assert backward == 2 * RESULT + kept + undone + 3 * RESULT


def test_few_inputs_have_their_gradients_in_one_launch():
    """Our kernels read dz once, and write and read float32 terms; PyTorch's variants are counted as before."""
    sizes = {**SIZES, "D": 16, "segments": "16x128:logsigmoid/16.0:bias"}
    case, own = PROJECTIONS.case("bfloat16", **sizes), PROJECTIONS.get("wide_activated")
    x, result = 2 * ROWS * 16, 2 * ROWS * 2048
    cost, least = (PROJECTIONS.cost(case, each, "forward_backward") for each in (own, None))
    assert (cost.launches, PROJECTIONS.cost(case, own).launches) == (4, 2)
    # terms of the gradients of x for 16 tiles of columns, and of the weight and the bias for 64 groups of rows
    terms = 4 * (16 * ROWS * 16 + 64 * 2048 * 17)
    # the product forward, results for logsigmoid's slope, and dz: one write and one read
    assert cost.bytes == least.bytes + 2 * result + result + 2 * result + 2 * terms
    assert cost.written == least.written + result + result + terms
    assert least.bytes == 3 * (x + 2 * 2048 * 17) + 2 * result
    wider = PROJECTIONS.case("bfloat16", **{**sizes, "D": 33})
    assert PROJECTIONS.cost(wider, own, "forward_backward").launches == 5
    assert PROJECTIONS.cost(case, PROJECTIONS.get("wide"), "forward_backward").launches is None
