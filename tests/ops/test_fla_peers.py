"""Tests of the peers that call fla (flash-linear-attention), with doubles of its functions, and of the calls they refuse.

The doubles take those parameters of fla 0.6.0 that the variants pass, and compute by the operations' oracles. fla's own results
need a GPU. ``pretend`` of ``test_swiglu_peers.py`` installs a fake module with the doubles.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from onelaunch.operation import find_operation
from onelaunch.ops.gla.variants import peers
from onelaunch.ops.gla.variants.peers import FEW_STEPS
from tests.ops.test_swiglu_peers import pretend

GLA, SCAN, RNN = (find_operation(name) for name in ("gla", "gated_scan", "linear_rnn"))


def chunk_hgrn(x, g, initial_state=None, output_final_state=False):
    return fused_recurrent_hgrn(x, g, initial_state, output_final_state)


def fused_recurrent_hgrn(x, g, initial_state=None, output_final_state=False, cu_seqlens=None):
    """Return the states, which are the outputs of ``gated_scan`` without a gate, and the final states."""
    s, final = SCAN.reference(v=x, log_decay=g, initial_state=initial_state, cu_seqlens=cu_seqlens)
    return s, final if output_final_state else None


def simple_gla(name, calls):
    def function(q, k, v, g=None, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None):
        assert len({each.shape[2] for each in (q, k, v, g)}) == 1  # fla wants all heads in every tensor
        calls.append(name)
        more = {"initial_state": initial_state, "output_final_state": output_final_state, "cu_seqlens": cu_seqlens}
        return GLA.reference(q=q, k=k, v=v, g=g, scale=scale, **more)

    return function


@pytest.fixture
def fla(monkeypatch):
    """Install doubles of fla's functions; return the names of those for decays per head, in the order of their calls."""
    calls: list[str] = []
    names = ("chunk_simple_gla", "fused_chunk_simple_gla", "fused_recurrent_simple_gla")
    by_head = {name: simple_gla(name, calls) for name in names}
    pretend(monkeypatch, "fla.ops.simple_gla", **by_head)
    pretend(monkeypatch, "fla.ops", simple_gla=__import__("sys").modules["fla.ops.simple_gla"], gla=None)
    pretend(monkeypatch, "fla.ops.hgrn", chunk_hgrn=chunk_hgrn, fused_recurrent_hgrn=fused_recurrent_hgrn)
    return calls


def results_of(operation, case, variant):
    """Return the results of a variant and of the oracle for the same arguments."""
    given = operation.make_inputs(case, torch.device("cpu"), 0).arguments
    expected = operation.reference(**given)
    return operation.get(variant)(operation.bind(**given)), expected


def assert_same(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert torch.equal(one, other.to(one.dtype))


@pytest.mark.parametrize(
    ("variant", "steps", "function"),
    [
        ("fla_fused_chunk", 70, "fused_chunk_simple_gla"),
        ("fla_fused_chunk", 1, "fused_chunk_simple_gla"),
        ("fla_chunk", 20, "chunk_simple_gla"),
        ("fla", 70, "chunk_simple_gla"),
        ("fla", FEW_STEPS, "fused_recurrent_simple_gla"),
    ],
)
@pytest.mark.parametrize(
    "options", [{}, {"initial_state": True, "final_state": True}, {"k_heads": 2, "v_heads": 2, "g_heads": 2}]
)
def test_a_decay_per_head(fla, variant, steps, function, options):
    case = GLA.case("float32", B=2, T=steps, H=4, K=16, V=16, decay_per="head", **options)
    assert_same(*results_of(GLA, case, variant))
    assert fla == [function]


def test_packed_sequences_with_states(fla):
    options = {"lengths": (30, 40), "initial_state": True, "final_state": True, "decay_per": "head"}
    case = GLA.case("float32", B=1, T=70, H=2, K=16, V=16, **options)
    assert_same(*results_of(GLA, case, "fla_fused_chunk"))


@pytest.mark.parametrize("operation", [SCAN, RNN], ids=lambda operation: operation.name)
@pytest.mark.parametrize("variant", ["fla", "fla_recurrent"])
@pytest.mark.parametrize("states", [True, False])
@pytest.mark.parametrize("gate", [True, False])
def test_scans(fla, operation, variant, states, gate):
    sizes = {"D": 8} if operation is RNN else {}
    case = operation.case("float32", B=2, T=40, V=16, initial_state=states, final_state=states, gate=gate, **sizes)
    found, expected = results_of(operation, case, variant)
    assert_same(found, expected if states else (expected[0], None))


def test_a_packed_scan(fla):
    case = SCAN.case("float32", B=1, T=40, V=16, lengths=(10, 30))
    assert_same(*results_of(SCAN, case, "fla_recurrent"))


@pytest.fixture
def reason(monkeypatch):
    """Return a function that asks a variant why it cannot run a call on a Hopper GPU with fla installed."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr(peers, "is_hopper", lambda device: True)
    monkeypatch.setattr(peers, "_triton_version", lambda: (3, 6, 0))

    def ask(operation, variant, *, grad=False, device="cuda:0", **options: Any) -> str | None:
        sizes = {"B": 1, "T": 100, "H": 2, "K": 32, "V": 32, "D": 32}
        sizes = {key: options.pop(key, value) for key, value in sizes.items() if key in operation.dimensions}
        return operation.get(variant).why_not(operation.query(operation.case("bfloat16", **sizes, **options), device, grad=grad))

    return ask


def test_training_with_a_decay_per_head_is_left_to_fused_chunk(reason):
    assert reason(GLA, "fla_fused_chunk", grad=True, decay_per="head") is None
    assert "Hopper" in reason(GLA, "fla", grad=True, decay_per="head")
    assert "Hopper" in reason(GLA, "fla_chunk", grad=True, decay_per="head", T=10)
    assert reason(GLA, "fla_fused_chunk") == "needs one decay per head"


def test_few_steps_have_two_peers(reason):
    assert reason(GLA, "fla_chunk", T=FEW_STEPS) is None
    assert "the variant fla calls the same" in reason(GLA, "fla_chunk", T=FEW_STEPS + 1)
    assert "gate on values" in reason(GLA, "fla_chunk", T=10, value_gate=True)


@pytest.mark.parametrize("operation", [SCAN, RNN], ids=lambda operation: operation.name)
def test_chunk_hgrn_leaves_calls_to_fused_recurrent_hgrn(reason, operation):
    states = {"initial_state": True, "final_state": True}
    assert reason(operation, "fla", **states) is None
    assert "drops the gradients" in reason(operation, "fla", grad=True, **states)
    assert "packed" in reason(operation, "fla", lengths=(40, 60), initial_state=False, final_state=False)
    assert reason(operation, "fla_recurrent", grad=True, lengths=(40, 60), **states) is None
    for variant in ("fla", "fla_recurrent"):
        assert reason(operation, variant, T=0, **states) == "needs at least one element in every dimension"
        assert "CUDA" in reason(operation, variant, device="cpu", **states)


@pytest.mark.parametrize(
    ("operation", "variant"),
    [(GLA, "fla_chunk"), (GLA, "fla_fused_chunk"), (SCAN, "fla"), (SCAN, "fla_recurrent"), (RNN, "fla_recurrent")],
    ids=str,
)
def test_a_missing_package_is_the_reason(operation, variant, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    sizes = dict.fromkeys(operation.dimensions, 32)
    assert "fla" in operation.get(variant).why_not(operation.query(operation.case("bfloat16", **sizes), "cuda:0"))
    assert not operation.get(variant).capabilities.automatic
