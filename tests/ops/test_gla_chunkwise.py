"""Tests of ``gla`` in plain PyTorch (variant "chunked"): chunks of steps, saved tensors, and no reads from the device.

``assert_near`` bounds the norm of each error, relative to that of the expected values; ``results`` returns a variant's results
and gradients by name. ``arguments_of(GLA)`` makes float32 arguments with B = 2, T = 9, H = 2, K = 20 and V = 16, unless others
are given.

``pytorch_variants`` are the variants of plain PyTorch. ``differentiable`` returns the arguments that take gradients.
``weights_like`` returns the weights of a loss, different for each element.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from onelaunch.ops import gla
from onelaunch.ops.gla import chunkwise
from tests.ops.cases import (
    GLA,
    arguments_of,
    assert_near,
    differentiable,
    pytorch_variants,
    results,
    weights_like,
)


@pytest.mark.parametrize(
    ("lengths", "part", "parts"),
    [(None, 1, 9), (None, 3500, 6), (None, 5000, 3), ((0, 21, 49, 0), 1, 3), ((0, 21, 49, 0), 3500, 2)],
)
def test_a_call_computed_in_parts_equals_the_whole_call(lengths, part, parts, monkeypatch):
    """A call is computed in ``parts`` of whole heads or batch entries, once forward and once with gradients.

    A part has at most ``part`` elements of q, and as many of states, but at least one head.
    """
    arguments = arguments_of(
        GLA, B=1 if lengths else 3, T=70, H=3, lengths=lengths, initial_state=True, final_state=True, grad=True
    )  # fmt: skip
    whole = results(GLA, arguments, "chunked")
    calls, attend = [], chunkwise.attend
    monkeypatch.setattr(chunkwise, "attend", lambda *given, **scale: calls.append(1) or attend(*given, **scale))
    monkeypatch.setitem(chunkwise.PART, "cpu", part)
    assert_near(results(GLA, arguments, "chunked"), whole, 1e-6)
    assert len(calls) == 2 * parts


@pytest.mark.parametrize(("steps", "lengths"), [(1, None), (50, None), (70, None), (50, (20, 30)), (70, (70,))])
@pytest.mark.parametrize("k_heads", [4, 2])
def test_what_a_tracer_sees_is_in_row_major_order(steps, lengths, k_heads):
    """A compiler keeps the strides that PyTorch's operations give, and they may be those of heads before steps."""
    arguments = arguments_of(
        GLA, B=1 if lengths else 2, T=steps, H=4, k_heads=k_heads, v_heads=k_heads, g_heads=k_heads, lengths=lengths
    )  # fmt: skip
    given = (arguments.get(name) for name in ("q", "k", "v", "g", "gv", "initial_state", "cu_seqlens"))
    o, final = chunkwise.attend(*given, 1.0)
    assert o.is_contiguous()
    assert final.is_contiguous()


def test_the_backward_pass_saves_only_the_inputs():
    """Products of decays and scores would take some forty times as much memory."""
    arguments = arguments_of(GLA, B=1, T=200, initial_state=True, final_state=True, lengths=(150, 50), grad=True)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        gla(**arguments, variant="chunked")
    inputs = {x.data_ptr() for x in arguments.values() if isinstance(x, torch.Tensor)}
    assert {x.data_ptr() for x in kept} == inputs


def test_one_tensor_may_be_passed_as_two_arguments():
    """First and second derivatives of the shared tensor equal those of the loop over time ("recurrent")."""
    arguments = arguments_of(GLA, T=70, K=16, V=16)
    shared, g = arguments["q"].requires_grad_(), arguments["g"]
    found = {}
    for variant in pytorch_variants(GLA):
        o, _ = gla(shared, shared, shared, g, variant=variant)
        (first,) = torch.autograd.grad(o.square().sum(), [shared], create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), [shared])
        found[variant] = {"first": first.detach(), "second": second}
    assert_near(found["chunked"], found["recurrent"], 1e-5)


@pytest.mark.parametrize("lengths", [None, (0, 30, 0, 40)])
def test_results_are_the_same_to_the_last_bit(lengths):
    """The second call is made with PyTorch's deterministic algorithms required."""
    arguments = arguments_of(GLA, B=1, T=70, lengths=lengths, initial_state=True, final_state=True, grad=True)
    first = results(GLA, arguments, "chunked")
    torch.use_deterministic_algorithms(True)  # noqa: FBT003
    try:
        again = results(GLA, arguments, "chunked")
    finally:
        torch.use_deterministic_algorithms(False)  # noqa: FBT003
    assert_near(again, first, 0)


def test_nothing_is_read_from_the_device(monkeypatch):
    """Each such read would synchronize with a GPU.

    Only the contract's checks of values read, on a CPU or if ONELAUNCH_CHECK_VALUES is 1.
    """
    monkeypatch.setattr("onelaunch.checks.values_are_checked", lambda value: False)
    arguments = arguments_of(GLA, B=1, T=70, lengths=(0, 30, 40), initial_state=True, final_state=True, grad=True)
    expected = results(GLA, arguments, "chunked")

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("read by the host")

    with monkeypatch.context() as patched:
        for name in ("item", "tolist", "numpy", "cpu", "nonzero", "__bool__", "__int__", "__float__", "__index__"):
            patched.setattr(torch.Tensor, name, refuse)
        o, final = gla(**arguments, variant="chunked")
        loss = (o * weights_like(o)).sum() + (final * weights_like(final)).sum()
        leaves = differentiable(arguments)
        gradients = torch.autograd.grad(loss, list(leaves.values()))
        gla(**arguments_of(GLA, B=1, T=70, initial_state=True), variant="chunked")
    found = {"o": o.detach(), "final_state": final.detach()}
    found |= {f"grad {name}": x for name, x in zip(leaves, gradients, strict=True)}
    assert_near(found, expected, 1e-6)


@pytest.mark.parametrize(
    "lengths", [(1,), (0, 1), (5, 0, 0), (64,), (1,) * 40, (0,) * 20 + (3,), (63, 64, 65, 1), (130, 1, 1, 1)]
)
def test_chunks_of_packed_sequences_hold_every_step_once(lengths):
    """In the layout, ``token`` has the step at each place of the padded chunks, or T for padding; ``place`` is its inverse.

    ``starts`` marks the chunks with which a sequence begins.
    """
    offsets = torch.tensor([0, *itertools.accumulate(lengths)])
    total = sum(lengths)
    layout = chunkwise.Packed.of(torch.zeros(1, total, 1, 16), None, offsets)
    assert layout.token[layout.place].tolist() == list(range(total))
    assert (layout.token != total).sum() == total
    sequence_of = torch.repeat_interleave(torch.arange(len(lengths)), offsets.diff())
    for chunk in layout.token.view(-1, layout.chunk):
        held = sequence_of[chunk[chunk != total]]
        assert len(held.unique()) <= 1
    assert int(layout.starts.sum()) == sum(length > 0 for length in lengths)
