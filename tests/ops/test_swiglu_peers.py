"""Tests of the peers of ``swiglu``: their arguments, with doubles in place of the packages, and the calls they refuse.

A peer is a variant that calls another project's package, here Liger or QuACK.

``prose(text)`` compares a test's texts, in the order of its calls, with its entries in tests/snapshots/prose.txt. A test fails
if it does not compare one of its entries, and ``tests/test_prose.py`` if the test or the parameter of an entry is gone.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from onelaunch.operation import find_operation, requirements
from onelaunch.ops.swiglu.contract import bind
from onelaunch.ops.swiglu.variants import peers

SWIGLU = find_operation("swiglu")


def pretend(monkeypatch, name: str, **held: Any) -> None:
    """Install a fake module of a given name with the given attributes.

    ``test_gla_layer_contract.py`` and ``test_fla_peers.py`` call this too. Its parent packages are not needed:
    ``from liger_kernel.ops import ...`` looks up ``liger_kernel.ops`` alone.
    """
    module = ModuleType(name)
    vars(module).update(held)
    monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture
def call():
    """Return a call with five rows and stacked weights."""
    both = torch.randn(32, 24)
    return bind(torch.randn(5, 24), both)


def expected(call):
    return F.silu(call.x @ call.w_gate.T) * (call.x @ call.w_up.T)


def assert_right(h, call):
    """Require the expected result within rounding errors of numbers up to 100.

    The doubles' products are float32 sums of 24 terms with other shapes than the definition's.
    """
    assert torch.allclose(h, expected(call), atol=1e-5)


def test_liger(monkeypatch, call):
    class Function:
        @staticmethod
        def apply(gate, up):
            return F.silu(gate) * up

    pretend(monkeypatch, "liger_kernel.ops", LigerSiLUMulFunction=Function)
    (h,) = SWIGLU.get("liger")(call)
    assert_right(h, call)


def test_the_fused_kernel_of_liger(monkeypatch, call):
    def gemm_swiglu(x, gate, up, multiplier, store_preact):
        assert x.dim() == 3  # batches of sequences
        assert (multiplier, store_preact) == (1.0, False)
        return F.silu(x @ gate.T) * (x @ up.T), None

    pretend(monkeypatch, "liger_kernel.ops.mlp", gemm_swiglu=gemm_swiglu)
    (h,) = SWIGLU.get("liger_fused")(call)
    assert_right(h, call)


def test_quack(monkeypatch, call):
    def gemm_gated(a, b, activation, store_preact, concat_layout):
        assert (activation, store_preact, concat_layout) == ("swiglu", False, ("B",))
        gate, up = (a @ b).chunk(2, 1)
        return None, F.silu(gate) * up

    pretend(monkeypatch, "quack.gemm_interface", gemm_gated=gemm_gated)
    (h,) = SWIGLU.get("quack")(call)
    assert_right(h, call)


def reason(monkeypatch, name: str, *, grad: bool = False, here: bool = True, capability: int = 9, **given: Any) -> str | None:
    """Return why a peer cannot run, on a GPU of this compute capability with the package installed unless ``here`` is false.

    ``given`` changes a case with stacked weights in bfloat16.
    """
    monkeypatch.setattr(requirements, "package_installed", lambda package: here)
    monkeypatch.setattr(peers, "compute_capability", lambda device: capability)
    case = SWIGLU.case(**{"dtype": "bfloat16", "M": 4, "N": 16, "K": 32, "stacked": True, **given})
    return SWIGLU.get(name).why_not(SWIGLU.query(case, "cuda:0", grad=grad))


@pytest.mark.parametrize("name", ["liger", "liger_fused", "quack"])
def test_the_reasons_why_peers_cannot_run(name, monkeypatch, prose):
    assert reason(monkeypatch, name) is None
    prose(reason(monkeypatch, name, here=False))
    prose(reason(monkeypatch, name, format="fp8"))
    prose(reason(monkeypatch, name, M=0))
    prose(SWIGLU.get(name).why_not(SWIGLU.query(SWIGLU.case("float32", M=1, N=1, K=1), "cpu")))


@pytest.mark.parametrize("name", ["liger_fused", "quack"])
def test_the_reasons_why_fused_peers_cannot_run(name, monkeypatch, prose):
    prose(reason(monkeypatch, name, grad=True))
    prose(reason(monkeypatch, name, N=20))
    prose(reason(monkeypatch, name, dtype="float32"))
    prose(reason(monkeypatch, name, capability=8))
    separate = reason(monkeypatch, name, stacked=False)
    assert (separate is None) == (name == "liger_fused")
    if separate is not None:
        prose(separate)
