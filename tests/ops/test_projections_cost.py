"""Tests of the cost of ``projections``: the minimum of bytes and FLOPs, and what its variants add."""

from __future__ import annotations

from tests.ops.projections_cases import PROJECTIONS

SIZES = {"B": 8, "T": 4096, "D": 2048, "H": 16, "K": 128, "V": 128}
ROWS, WIDTH = 8 * 4096, 4 * 2048 + 16
X, RESULT, WEIGHT = 2 * ROWS * 2048, 2 * ROWS * WIDTH, 2 * WIDTH * 2048


def test_minimal_bytes_and_flops():
    case = PROJECTIONS.case("bfloat16", **SIZES)
    assert PROJECTIONS.cost(case).flops == 2 * ROWS * WIDTH * 2048
    assert PROJECTIONS.cost(case).bytes == X + WEIGHT + RESULT == 705757184
    both = PROJECTIONS.cost(case, None, "forward_backward")
    assert both.flops == 3 * 2 * ROWS * WIDTH * 2048
    assert both.bytes == 3 * (X + WEIGHT) + 2 * RESULT
    biased = PROJECTIONS.case("bfloat16", **SIZES, segments="gla")
    assert PROJECTIONS.cost(biased).bytes == X + 2 * 5 * 2048 * 2048 + 2 * 2048 + 2 * ROWS * 5 * 2048


def test_variants_add_intermediate_results_between_launches():
    case = PROJECTIONS.case("bfloat16", **SIZES)
    activated = 2 * ROWS * (3 * 2048 + 16)
    added = {"unfused": 4 * X + 2 * activated, "wide": 2 * activated, "wide_activated": 2 * RESULT, "epilogue_persistent": 0}
    for name, bytes_ in added.items():
        assert PROJECTIONS.cost(case, PROJECTIONS.get(name)).bytes == PROJECTIONS.cost(case).bytes + bytes_, name
    own = PROJECTIONS.get("wide_activated")
    assert PROJECTIONS.cost(case, own).launches == 2
    assert PROJECTIONS.cost(case, own, "forward_backward").launches == 5
    kept = 2 * 2 * ROWS * 2048 + 2 * 4 * ROWS * 32
    undone = 2 * ROWS * (2 * 2048 + 16)
    backward = PROJECTIONS.cost(case, own, "forward_backward").bytes - PROJECTIONS.cost(case, None, "forward_backward").bytes
    assert backward == 2 * RESULT + kept + undone + 3 * RESULT
