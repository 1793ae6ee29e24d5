"""Tests of the statements about calls of ``gla`` that fla runs faster, which ``onelaunch explain`` quotes, on a pretended GPU.

``prose`` compares wording with the test's entries in ``tests/snapshots/prose.txt``. A test fails if it does not compare one of
its entries, and ``tests/test_prose.py`` if the test or the parameter of an entry is gone.
"""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="without Triton, kernels refuse every call")

from onelaunch import dispatch
from onelaunch.operation import find_operation
from onelaunch.ops.gla.variants import peers
from tests.devices import HOPPERS, forget, pretend

GLA = find_operation("gla")
SIZES = {"B": 4, "T": 2048, "H": 16, "K": 128, "V": 128}


@pytest.fixture
def faster(monkeypatch):
    """Return a function that explains a call on a pretended H100: its variant, and the statement about fla or ``None``."""
    device = pretend(HOPPERS["H100"], monkeypatch)

    def explained(dtype, *, grad=False, **options):
        query = GLA.query(GLA.case(dtype, **SIZES | options), device, grad=grad)
        answer = dispatch.explain(query)
        assert [each.variant for each in answer.faster] in ([], ["fla"])
        return answer.chosen, answer.faster[0].reason if answer.faster else None

    yield explained
    monkeypatch.undo()
    forget()


@pytest.mark.parametrize("grad", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(
    ("variant", "dtype", "options"),
    [
        ("fused_recurrent", "float32", {}),
        ("fused", "float32", {"B": 1, "H": 4}),
        ("fused_recurrent", "bfloat16", {"K": 512, "V": 512}),
        ("fused_recurrent", "bfloat16", {"K": 256, "V": 256, "log_decay_dtype": "float32"}),
        ("fused", "bfloat16", {"B": 1, "H": 1, "K": 512, "V": 512}),
    ],
    ids=["float32", "few float32", "wide", "wide float32 decay", "few wide"],
)
def test_a_call_that_fla_runs_faster_is_named_with_the_measurement(variant, dtype, options, grad, faster, prose):
    chosen, reason = faster(dtype, grad=grad, **options)
    assert chosen == variant
    prose(reason)


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        ("bfloat16", {}),
        ("bfloat16", {"K": 256, "V": 256}),
        ("bfloat16", {"log_decay_dtype": "float32"}),
        ("float32", {"T": 16}),
        ("bfloat16", {"value_gate": True}),
        ("float32", {"value_gate": True}),
        ("bfloat16", {"value_gate": True, "B": 16, "T": 1, "H": 32}),
    ],
    ids=["hopper", "wide", "float32 decay", "few steps", "gv", "float32 gv", "one gv step"],
)
def test_nothing_is_said_where_fla_is_not_known_to_be_faster(dtype, options, faster):
    assert [faster(dtype, grad=grad, **options)[1] for grad in (False, True)] == [None, None]


def test_nothing_is_said_where_fla_cannot_train(faster, monkeypatch):
    """The backward pass of ``chunk_simple_gla`` raises on Hopper for some versions of Triton."""
    monkeypatch.setattr(peers, "_triton_version", lambda: (3, 6, 0))
    assert faster("float32", decay_per="head")[1] is not None
    assert faster("float32", decay_per="head", grad=True)[1] is None


def test_nothing_is_said_of_other_devices():
    query = GLA.query(GLA.case("float32", **SIZES), "cpu")
    assert dispatch.explain(query).faster == ()
    assert GLA.variants["fused"].why_slower(query) == {}


def test_the_faster_variants_exist():
    for variant in GLA.variants.values():
        assert {name for name, _ in variant._slower} <= GLA.variants.keys()
