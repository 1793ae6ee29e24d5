"""Tests of the cost of ``output_chain``: the minimum of bytes and FLOPs, and what its variants add.

``cost(case, None, direction)`` is the least that any implementation needs.
"""

from __future__ import annotations

from tests.ops.output_chain_cases import OUTPUT_CHAIN

SIZES = {"B": 8, "T": 4096, "H": 16, "V": 128, "D": 1024}
ROWS, INNER = 8 * 4096, 16 * 128
H, RESULT, WEIGHT = 2 * ROWS * INNER, 2 * ROWS * 1024, 2 * INNER * 1024
"""Bytes of h (and of the gate, which has its shape), of the result, and of ``w_out``, in bfloat16."""


def test_minimal_bytes_and_flops():
    case = OUTPUT_CHAIN.case("bfloat16", **SIZES)
    assert OUTPUT_CHAIN.cost(case).flops == 2 * ROWS * INNER * 1024
    assert OUTPUT_CHAIN.cost(case).bytes == 2 * H + 2 * 128 + WEIGHT + RESULT == 339738880
    # The backward pass reads the operands again, and dout, and writes gradients of the operands, by two more products.
    both = OUTPUT_CHAIN.cost(case, None, "forward_backward")
    assert both.flops == 3 * 2 * ROWS * INNER * 1024
    assert both.bytes == 3 * (2 * H + 2 * 128 + WEIGHT) + 2 * RESULT
    bare = OUTPUT_CHAIN.case("bfloat16", **SIZES, gate="none", norm_weight="float32", bias=True)
    assert OUTPUT_CHAIN.cost(bare).bytes == H + 4 * 128 + WEIGHT + 2 * 1024 + RESULT


def test_variants_add_intermediate_results_between_launches():
    case = OUTPUT_CHAIN.case("bfloat16", **SIZES)
    least = OUTPUT_CHAIN.cost(case)
    # "unfused" writes and reads norm(h), silu(gate) and their product a; the others only a, or nothing.
    for name, times in {"unfused": 6, "compiled": 2, "norm_gate": 2, "prologue": 0}.items():
        assert OUTPUT_CHAIN.cost(case, OUTPUT_CHAIN.get(name)).bytes == least.bytes + times * H, name
    activated = OUTPUT_CHAIN.case("bfloat16", **SIZES, gate="activated")
    assert OUTPUT_CHAIN.cost(activated, OUTPUT_CHAIN.get("unfused")).bytes == least.bytes + 4 * H
    ungated = OUTPUT_CHAIN.case("bfloat16", **SIZES, gate="none")  # the normalized heads are the product's operand
    assert OUTPUT_CHAIN.cost(ungated, OUTPUT_CHAIN.get("unfused")).bytes == OUTPUT_CHAIN.cost(ungated).bytes + 2 * H
    norm_gate, prologue = OUTPUT_CHAIN.get("norm_gate"), OUTPUT_CHAIN.get("prologue")
    assert OUTPUT_CHAIN.cost(case, norm_gate).launches == 2
    assert OUTPUT_CHAIN.cost(case, prologue).launches == 1
    assert OUTPUT_CHAIN.cost(case, norm_gate, "forward_backward").launches == 5
    assert OUTPUT_CHAIN.cost(case, prologue, "forward_backward").launches == 4


def test_the_backward_pass_reads_the_products_operand_and_one_number_per_head():
    case = OUTPUT_CHAIN.case("bfloat16", **SIZES)
    least, rstd = OUTPUT_CHAIN.cost(case, None, "forward_backward").bytes, 4 * ROWS * 16
    # All variants write and read da, the gradient of the product's operand. "prologue" also writes a, and reads it.
    da, a = 2 * H, 2 * H
    prologue = OUTPUT_CHAIN.cost(case, OUTPUT_CHAIN.get("prologue"), "forward_backward").bytes
    assert prologue == least + da + a + 2 * rstd
    norm_gate = OUTPUT_CHAIN.cost(case, OUTPUT_CHAIN.get("norm_gate"), "forward_backward").bytes
    assert norm_gate == prologue + H  # a is written and read in the forward pass, and not written again
    unfused = OUTPUT_CHAIN.cost(case, OUTPUT_CHAIN.get("unfused"), "forward_backward").bytes
    # three intermediates in the forward pass, da, the three read again, and the gradients of two written and read
    assert unfused == least + 6 * H + da + 3 * H + 4 * H
