"""Tests of the cost of ``gla``, the bytes and FLOPs that it needs, and of the peer that it is measured against.

The peer is the variant "fla", which calls the package flash-linear-attention. Tests of it need neither package nor GPU.

``prose(text)`` compares a test's texts, in the order of its calls, with its entries in tests/snapshots/prose.txt. A test fails
if it does not compare one of its entries, and ``tests/test_prose.py`` if the test or the parameter of an entry is gone.

``arguments_of`` makes small random arguments on the CPU.
"""

from __future__ import annotations

from typing import Any

import pytest

from onelaunch.ops.gla.variants import peers
from tests.ops.cases import (
    GLA,
    arguments_of,
)

# The cost


def test_minimal_bytes_are_five_tensors_forward_and_nine_backward():
    """Count accesses per step and head at K = V = 128 in bfloat16.

    The forward pass reads q, k, v and g and writes o. The backward pass reads those inputs and do and writes four gradients.
    """
    case = GLA.case("bfloat16", B=1, T=8192, H=96, K=128, V=128)
    rows = 8192 * 96  # steps times heads; a row of 128 numbers has 256 bytes
    assert GLA.cost(case).bytes == rows * 5 * 256
    assert GLA.cost(case, direction="forward_backward").bytes == rows * 14 * 256
    per_head = GLA.case("bfloat16", B=1, T=8192, H=96, K=128, V=128, decay_per="head")
    assert GLA.cost(per_head).bytes == rows * (4 * 256 + 2)
    states = GLA.case("bfloat16", B=1, T=8192, H=96, K=128, V=128, initial_state=True, final_state=True)
    assert GLA.cost(states).bytes == rows * 5 * 256 + 2 * 96 * 128 * 128 * 4


def test_variants_add_intermediate_results_between_launches():
    """A variant writes and reads its intermediate results: float32 in "chunked", a PyTorch variant, 16 bits in "fused"."""
    case = GLA.case("bfloat16", B=1, T=8192, H=96, K=128, V=128)
    rows, chunked = 8192 * 96, GLA.get("chunked")
    handed = rows * 2 * 4 * (128 * 128 // 64 + 64)  # a state and a matrix of scores per 64 steps, written and read in float32
    assert GLA.cost(case, chunked).bytes == GLA.cost(case).bytes + handed
    fused = GLA.get("fused")
    assert GLA.cost(case, fused).bytes == GLA.cost(case).bytes + rows * 2 * 2 * 128 * 128 // 64  # the state in 16 bits
    least = GLA.cost(case)
    assert least.flops == rows * 4 * 128 * 128
    # scores within chunks of 64 steps and their product with v; half of each product is causal
    assert GLA.cost(case, chunked).flops == least.flops + rows * 64 * 256


# The peer


def test_the_peer_refuses_unsupported_calls_with_the_reason(monkeypatch, prose):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr(peers, "is_hopper", lambda device: True)
    variant = GLA.get("fla")

    def reason(triton: tuple[int, ...] = (3, 8, 0), grad: bool = True, **given_options: Any) -> str | None:
        monkeypatch.setattr(peers, "_triton_version", lambda: triton)
        sizes = {"B": 1, "T": 100, "H": 2, "K": 32, "V": 32}
        return variant.why_not(GLA.query(GLA.case("float16", **(sizes | given_options)), "cuda:0", grad=grad))

    assert reason() is None
    assert reason(value_gate=True) is None
    assert reason(decay_per="head") is None
    prose(reason(T=0))
    prose(reason(decay_per="head", value_gate=True))
    for triton in ((3, 6, 0), (3, 4, 0)):
        assert "chunk_simple_gla" in reason(triton, decay_per="head")
        prose(reason(triton, decay_per="head"))
    # The backward pass for a decay per head fails with some versions of Triton, for more steps than FEW_STEPS.
    for known_good in ({"triton": (3, 7, 1)}, {"triton": (3, 3, 9)}, {"grad": False}, {"T": peers.FEW_STEPS}):
        assert reason(**({"triton": (3, 6, 0), "decay_per": "head"} | known_good)) is None


def test_the_peer_is_called_with_its_layers_arguments(monkeypatch):
    """The test checks argument names and the choice of function. The peer's own results need a GPU."""
    calls = []

    class Module:
        def __getattr__(self, name: str) -> Any:
            return lambda **given_arguments: calls.append((name, given_arguments)) or ("o", "state")

    import sys

    package = type(sys)("fla.ops")
    package.gla, package.simple_gla = Module(), Module()
    monkeypatch.setitem(sys.modules, "fla.ops", package)
    for options, function, gates in (
        ({"T": 100}, "chunk_gla", {"g"}),
        ({"T": 64}, "fused_recurrent_gla", {"gk", "gv"}),
        ({"T": 100, "value_gate": True}, "fused_recurrent_gla", {"gk", "gv"}),
        ({"T": 100, "decay_per": "head"}, "chunk_simple_gla", {"g"}),
        ({"T": 3, "decay_per": "head"}, "fused_recurrent_simple_gla", {"g"}),
    ):
        call = GLA.bind(**arguments_of(GLA, initial_state=True, final_state=True, **options))
        assert GLA.get("fla")(call) == ("o", "state")
        name, given_arguments = calls.pop()
        assert name == function
        shared = {"q", "k", "v", "scale", "initial_state", "output_final_state", "cu_seqlens"}
        assert set(given_arguments) == shared | gates
        assert given_arguments["scale"] == 20**-0.5


def test_padded_states_count_as_they_are_stored():
    """With K = 96 and V = 80 a state takes the place of one of 128 times 128, in two tensors, each of which moves twice."""
    sizes = {"B": 1, "T": 640, "H": 2}
    hopper, extra = GLA.get("hopper"), {}
    for name, keys, values in (("padded", 96, 80), ("whole", 128, 128)):
        case = GLA.case("bfloat16", K=keys, V=values, **sizes)
        extra[name] = GLA.cost(case, hopper, "forward_backward").bytes - GLA.cost(case, None, "forward_backward").bytes
    assert extra["padded"] == extra["whole"] == 2 * 2 * (640 // 64) * 2 * 128 * 128 * 2


@pytest.mark.parametrize(
    ("options", "states", "gradients"),
    [
        ({}, 1, 1),
        ({"decay_per": "head"}, 2, 1),
        ({"decay_per": "head", "log_decay_dtype": "float32"}, 2, 1),
        ({"log_decay_dtype": "float32"}, 2, 2),
    ],
    ids=["per channel", "per head", "per head in float32", "per channel in float32"],
)
def test_second_terms_of_states_count(options, states, gradients):
    """``launch_hopper.backward`` stores so many 16-bit terms of each state and of its gradient, and reads each once."""
    case = GLA.case("bfloat16", B=1, T=640, H=2, K=128, V=128, **options)
    extra = GLA.cost(case, GLA.get("hopper"), "forward_backward").bytes - GLA.cost(case, None, "forward_backward").bytes
    assert extra == 2 * (states + gradients) * (640 // 64) * 2 * 128 * 128 * 2


@pytest.mark.parametrize(("options", "terms"), [({}, 4), ({"decay_per": "head"}, 3)], ids=["per channel", "per head"])
def test_copies_of_float32_tensors_count(options, terms):
    """``hopper_tf32`` makes copies of q, k and v in each pass and one of do, and stores 16-bit terms of states and gradients."""
    steps, heads, channels, size = 640, 2, 128, 2
    case, variant = GLA.case("float32", B=1, T=steps, H=heads, K=channels, V=channels, **options), GLA.get("hopper_tf32")
    extra = {
        direction: GLA.cost(case, variant, direction).bytes - GLA.cost(case, None, direction).bytes
        for direction in ("forward", "forward_backward")
    }
    copy, state = steps * heads * channels * size, steps // 64 * heads * channels**2 * size
    assert extra["forward"] == 2 * 3 * copy
    assert extra["forward_backward"] == 2 * (7 * copy + terms * state)
