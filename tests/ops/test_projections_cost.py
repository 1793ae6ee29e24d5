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
