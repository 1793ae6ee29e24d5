"""Tests of the cost of ``swiglu``: the minimum of bytes and FLOPs, and what its variants add.

x is ``[M, K]``, both weights ``[N, K]`` and the result ``[M, N]``. ``cost(case)`` is the least that any implementation needs.
"""

from __future__ import annotations

from tests.ops.swiglu_cases import SWIGLU


def test_minimal_bytes_and_flops():
    dense = SWIGLU.case("bfloat16", M=512, N=4096, K=7168)
    assert SWIGLU.cost(dense).flops == 4 * 512 * 4096 * 7168
    assert SWIGLU.cost(dense).bytes == 2 * (512 * 7168 + 2 * 4096 * 7168 + 512 * 4096)
    four = SWIGLU.case("bfloat16", M=512, N=4096, K=7168, format="nvfp4_weights")
    # An NVFP4 matrix has 9/16 of a byte per element (a 4-bit code, and an 8-bit scale for 16) and one float32.
    saved = SWIGLU.cost(dense).bytes - SWIGLU.cost(four).bytes
    assert saved == 2 * 4096 * 7168 * 2 - 2 * (4096 * 7168 * 9 // 16 + 4)
    both = SWIGLU.case("float16", M=512, N=4096, K=7168, format="nvfp4")
    assert SWIGLU.cost(both).bytes == (512 + 2 * 4096) * 7168 * 9 // 16 + 3 * 4 + 2 * 512 * 4096


def test_variants_add_intermediate_results_between_launches():
    case = SWIGLU.case("bfloat16", M=512, N=4096, K=7168)
    result, x = 2 * 512 * 4096, 2 * 512 * 7168
    # Each product is written and read (4 times a result for both) unless a kernel keeps it; a second product reads x again.
    added = {"eager": 4 * result + x, "three_node": 4 * result + x, "wide": 4 * result, "two_node": 2 * result + x, "fused": 0}
    for name, bytes_ in added.items():
        assert SWIGLU.cost(case, SWIGLU.get(name)).bytes == SWIGLU.cost(case).bytes + bytes_, name
    launches = {name: (variant.launches, variant.capabilities.backward_launches) for name, variant in SWIGLU.variants.items()}
    # launches of the forward and of the backward pass, by variants with own kernels
    own = {"three_node": (3, 6), "wide": (2, 3), "two_node": (2, 4), "fused": (1, 4), "block_scaled": (1, None)}
    own |= dict.fromkeys(("persistent", "stream_k", "small_m"), (1, 4))
    assert {name: counts for name, counts in launches.items() if counts[0]} == own
