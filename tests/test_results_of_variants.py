"""Tests of the check of variants' results, and of ``gla`` on a CPU for one step or a few: the choice, and steps one by one.

The check covers number, type, device and shape of results; its error names the variant. The gate is the workbench's
verification against an oracle (``judge``), which each variant must pass before it is timed. The fixture ``scale`` registers the
toy operation ``scale(x, factor=2.0)`` of ``tests/toys.py`` for one test. It has the variants ``loop``, ``vector`` (preferred,
for at most 1000 elements), ``no_backward`` and ``elsewhere``, which no call can use. ``prose.raises`` compares the message of
an error with the test's entry in ``tests/snapshots/prose.txt``. A test fails if it does not compare one of its entries, and
``tests/test_prose.py`` if the test or the parameter of an entry is gone.
"""

from __future__ import annotations

import copy
import time

import pytest
import torch

from onelaunch import dispatch
from onelaunch.dispatch import choice
from onelaunch.errors import VariantResultError
from onelaunch.launch.planned import forget_plans
from onelaunch.ops import gla
from onelaunch.workbench.verify import judge


def wrong(scale, name, give):
    """Register a variant of ``scale`` that returns ``give(call)``, and declare the shape of y, which is checked only then."""
    scale.variant(name, launches=1)(give)
    scale.shapes(lambda call: (tuple(call.x.shape),))
    dispatch.choose.cache_clear()


# Functions of wrong variants: they must return a tuple of one tensor, x * factor, on the device of x.
WRONG = {
    "a_tensor": lambda call: call.x * call.factor,
    "nothing": lambda call: None,
    "two": lambda call: (call.x * call.factor, call.x),
    "none_inside": lambda call: (None,),
    "a_number": lambda call: (3.0,),
    "elsewhere_too": lambda call: (call.x.to("meta"),),
    "short": lambda call: (call.x[:-1] * call.factor,),
}


@pytest.mark.parametrize("name", WRONG)
def test_the_error_names_the_variant_and_the_required_results(scale, name, prose):
    wrong(scale, name, WRONG[name])
    with prose.raises(VariantResultError) as caught:
        scale(torch.ones(4), variant=name)
    assert (caught.value.operation, caught.value.variant) == ("scale", name)


@pytest.mark.parametrize("name", WRONG)
def test_wrong_results_fail_the_gate_in_both_directions(scale, name):
    wrong(scale, name, WRONG[name])
    verdict = judge(scale, scale.case("float32", N=8), variant=name, directions=("forward", "forward_backward"))
    assert not verdict.ok
    assert name in verdict.explain()


def test_a_wrong_undeclared_shape_fails_the_gate_in_both_directions(scale):
    """If an operation declares no shapes, verification still finds a wrong one, against the oracle's result."""
    scale.variant("short", launches=1)(lambda call: (call.x[:-1] * call.factor,))
    for directions in (("forward",), ("forward_backward",)):
        verdict = judge(scale, scale.case("float32", N=8), variant="short", directions=directions)
        assert not verdict.ok
        assert "shape (7,)" in verdict.explain()


def test_correct_results_are_checked_once_per_query(scale, monkeypatch):
    looked = []
    monkeypatch.setattr(choice, "check_results", lambda variant, call, results: looked.append(variant.name))
    for size in (3, 3, 4, 3):
        scale(torch.ones(size))
    assert looked == ["vector", "vector"]


def test_auto_is_as_fast_as_the_best_variant_for_one_gla_step_on_a_cpu():
    """The limit of 1.25 leaves room for the choice itself and for a noisy machine."""
    q, k, v = (torch.randn(1, 1, 1, 16) for _ in range(3))
    g, state = -torch.rand(1, 1, 1, 16), torch.randn(1, 1, 16, 16)

    def seconds(variant):
        start = time.perf_counter()
        for _ in range(10):
            gla(q, k, v, g, initial_state=state, output_final_state=True, variant=variant)
        return time.perf_counter() - start

    named = ("recurrent", "chunked")
    forget_plans()  # another test may have made such a call in a way that cannot be replayed
    with torch.no_grad():
        rounds = [
            {variant: seconds(variant) for variant in ("auto", *named)} for _ in range(40)
        ]  # candidates alternate, so that all see the same load
    fastest = {variant: min(each[variant] for each in rounds) for variant in ("auto", *named)}
    assert fastest["auto"] <= 1.25 * min(fastest[variant] for variant in named)
    assert dispatch.choose(gla.query(gla.case("float32", B=1, T=1, H=1, K=16, V=16), "cpu")).name == "recurrent"


@pytest.mark.parametrize(
    ("sizes", "lengths", "first"),
    [
        ({"B": 8, "T": 1, "H": 16, "K": 128, "V": 128}, None, "recurrent"),
        ({"B": 1, "T": 4, "H": 4, "K": 64, "V": 64}, None, "recurrent"),
        ({"B": 8, "T": 2, "H": 16, "K": 128, "V": 128}, None, "chunked"),
        ({"B": 1, "T": 5, "H": 1, "K": 16, "V": 16}, None, "chunked"),
        ({"B": 1, "T": 4, "H": 1, "K": 16, "V": 16}, (1, 3), "chunked"),
    ],
)
def test_a_cpu_prefers_the_step_loop_only_for_one_step_or_for_few_of_small_states(sizes, lengths, first):
    case = gla.case("float32", **sizes, **({"lengths": lengths} if lengths else {}))
    assert gla.preference(gla.query(case, "cpu"))[0] == first
    assert gla.preference(gla.query(case, "cpu", grad=True))[0] == "chunked"


@pytest.mark.parametrize("value_gate", [False, True])
@pytest.mark.parametrize("per_head", [False, True])
def test_a_single_step_equals_the_last_of_many(value_gate, per_head):
    q, k, v = (torch.randn(2, 6, 3, 16, dtype=torch.float64).float() for _ in range(3))
    g = -torch.rand(2, 6, 3) if per_head else -torch.rand(2, 6, 3, 16)
    g.select(1, 3).fill_(-torch.inf)  # the fourth step forgets the state
    gv = -torch.rand(2, 6, 3, 16) if value_gate else None
    whole, last = gla(q, k, v, g, gv=gv, output_final_state=True, variant="recurrent")
    state = None
    for step in range(6):
        at = slice(step, step + 1)
        given = None if gv is None else gv[:, at]
        o, state = gla(
            q[:, at],
            k[:, at],
            v[:, at],
            g[:, at],
            gv=given,
            initial_state=copy.copy(state),
            output_final_state=True,
            variant="recurrent",
        )
        torch.testing.assert_close(o, whole[:, at], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state, last, rtol=1e-5, atol=1e-5)
