"""Tests of ``gla``'s variant ``fused_recurrent``: interpreted against the oracle, on a GPU, and when it is chosen.

``assert_one_call_correct`` checks the errors of one call, and that it writes all elements. ``GLA_HARD`` are the probes of ``gla``
and longer cases, by name, and ``GLA_SHORT`` those for Triton's interpreter. ``results`` returns a variant's results and gradients
by name, and ``assert_near`` bounds the norm of each error, relative to that of the expected values. ``pretend`` makes the
dispatcher answer as on a Hopper GPU. A test marked ``interpret`` runs in Triton's interpreter, with TRITON_INTERPRET=1, one
marked ``thorough`` not in ``make test``, and one marked ``every`` by hand only.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import library

from onelaunch import dispatch
from onelaunch.ops.gla import autograd_recurrence
from onelaunch.ops.gla.contract import FUSED_RECURRENT
from onelaunch.ops.gla.functions import fused_recurrent_gla, goes_backwards
from onelaunch.ops.gla.reference import DECAYS
from tests.devices import HOPPERS, forget, pretend
from tests.ops.cases import (
    GLA,
    GLA_HARD,
    GLA_SHORT,
    arguments_of,
    assert_captured_step_follows_its_inputs,
    assert_correct,
    assert_near,
    assert_one_call_correct,
    case_of,
    differentiable,
    results,
    small,
)

pytest.importorskip("triton", reason="the kernels are written in Triton")

STATES: dict[str, Any] = {"initial_state": True, "final_state": True}
GATED: dict[str, Any] = {"value_gate": True, **STATES}

FEW_STEPS: dict[str, tuple[str, dict[str, Any]]] = {
    "gates_of_both_kinds": ("float32", {"B": 1, "T": 5, "H": 2, "K": 17, "V": 20, "decay": "mixed", **GATED}),
    "decay_per_head": ("float16", {"B": 1, "T": 4, "H": 1, "K": 16, "V": 16, "decay_per": "head", **GATED}),
    "packed": ("float32", {"B": 1, "T": 7, "H": 1, "K": 16, "V": 16, "lengths": (2, 0, 5), "state_v_first": True, **GATED}),
    "shared_heads": (
        "float16",
        {"B": 1, "T": 3, "H": 4, "K": 16, "V": 16, "k_heads": 2, "v_heads": 1, "g_heads": 2, "state_heads": 2, **GATED},
    ),
    "no_gate_on_values": ("float32", {"B": 2, "T": 3, "H": 1, "K": 16, "V": 16, "final_state": True}),
}
"""Cases of a few steps, which the interpreter runs in a second each: dtype, then sizes and options."""


@pytest.mark.interpret
@pytest.mark.parametrize("name", FEW_STEPS)
def test_few_steps_are_correct(name, monkeypatch):
    from onelaunch.ops.gla import launch_recurrence

    monkeypatch.setattr(launch_recurrence, "_FEW_STEPS", 0)  # otherwise another kernel computes the last of them forward
    dtype, case = FEW_STEPS[name]
    assert_one_call_correct(GLA, GLA.case(dtype, **case), FUSED_RECURRENT)


@pytest.mark.interpret
@pytest.mark.parametrize("name", FEW_STEPS)
def test_few_steps_without_gradients_are_correct_in_the_kernel_for_decoding(name, monkeypatch):
    from onelaunch.ops.gla import launch_recurrence

    monkeypatch.setattr(launch_recurrence, "Pass", None)
    dtype, case = FEW_STEPS[name]
    assert_one_call_correct(GLA, GLA.case(dtype, **case), FUSED_RECURRENT, "forward")


@pytest.mark.interpret
@pytest.mark.thorough
@pytest.mark.parametrize("lengths", [None, (17, 0, 49)])
def test_steps_beyond_a_stored_state_are_correct(lengths):
    """Gradients of log-decays start anew from states that are stored every 16 steps, with 16-bit inputs every 64."""
    case = GLA.case("float32", B=1, T=66, H=1, K=16, V=16, decay="strong", lengths=lengths, **GATED)
    assert_one_call_correct(GLA, case, FUSED_RECURRENT)


@pytest.mark.interpret
@pytest.mark.parametrize("name", GLA_SHORT)
@pytest.mark.every
def test_every_short_case_is_correct(name):
    assert_one_call_correct(GLA, case_of(GLA, name), FUSED_RECURRENT)


@pytest.mark.interpret
@pytest.mark.parametrize("per", ["channel", "head"])
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.every
def test_every_kind_of_decay_is_correct(decay, per):
    case = GLA.case("float32", B=1, T=140, H=2, K=24, V=20, decay=decay, decay_per=per, **GATED)
    assert_one_call_correct(GLA, case, FUSED_RECURRENT)


@pytest.mark.interpret
@pytest.mark.parametrize(("keys", "values"), [(130, 20), (20, 260), (512, 16)])
@pytest.mark.every
def test_wide_heads_are_correct(keys, values):
    case = GLA.case("float16", B=1, T=5, H=1, K=keys, V=values, log_decay_dtype="float32", **GATED)
    assert_one_call_correct(GLA, case, FUSED_RECURRENT)


@pytest.mark.interpret
@pytest.mark.parametrize("lengths", [None, pytest.param((3, 0, 4), marks=pytest.mark.thorough)])
def test_time_is_reversed_without_copies(lengths, monkeypatch):
    """Results and gradients are those of PyTorch's loop over flipped steps."""
    arguments = arguments_of(GLA, B=1, T=7, H=1, K=16, V=16, lengths=lengths, **GATED, grad=True)
    arguments["gk"] = arguments.pop("g")
    leaves = differentiable(arguments)

    def gone_backwards(variant: str) -> dict[str, torch.Tensor]:
        o, final = fused_recurrent_gla(**arguments, reverse=True, variant=variant)
        loss = o.square().sum() + (final * torch.linspace(-1, 1, final.numel()).view(final.shape)).sum()
        gradients = torch.autograd.grad(loss, list(leaves.values()))
        return {"o": o.detach(), "final": final.detach(), **dict(zip(leaves, gradients, strict=True))}

    expected = gone_backwards("recurrent")
    monkeypatch.setattr(torch.Tensor, "flip", None)
    assert_near(gone_backwards(FUSED_RECURRENT), expected, 1e-5)


@pytest.mark.interpret
@pytest.mark.parametrize("least", [-18.0, -1000.0, -math.inf])
@pytest.mark.thorough
def test_states_decay_by_the_given_amount(least):
    """Gradients of tiny decays are right where all are tiny: only sums of rounding errors are set to 0."""
    arguments = arguments_of(GLA, B=1, T=5, H=1, K=16, V=16, dtype="float32", **GATED, grad=True)
    for name in ("g", "gv"):
        arguments[name] = torch.full_like(arguments[name], least).requires_grad_()
    assert_near(results(GLA, arguments, FUSED_RECURRENT), results(GLA, arguments, "recurrent"), 2e-6)


@pytest.mark.interpret
@pytest.mark.parametrize("argument", ["k", "gv"])
@pytest.mark.every
def test_nan_reaches_no_earlier_chunk_and_no_other_head(argument):
    arguments = arguments_of(GLA, B=1, T=150, H=2, K=16, V=16, **GATED, grad=True)
    with torch.no_grad():
        arguments[argument][0, 100, 0] = math.nan
    found = results(GLA, arguments, FUSED_RECURRENT)
    assert not any(found[name][:, :, 1].isnan().any() for name in found if "state" not in name)
    assert not found["o"][0, :100, 0].isnan().any()
    assert found["o"][0, 100:, 0].isnan().all()


@pytest.mark.interpret
@pytest.mark.parametrize("values_first", [False, True])
@pytest.mark.thorough
def test_the_operators_pass_opcheck(values_first):
    utilities = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    for keep in (False, True):
        arguments = small(GLA, grad=keep, value_gate=True)
        given = [arguments[name] for name in ("q", "k", "v", "g", "gv", "initial_state")]
        if values_first:
            given[5] = given[5].detach().mT.contiguous().mT.requires_grad_(keep)
        forward = torch.ops.onelaunch.gla_recurrence.default
        library.opcheck(forward, (*given, None, 0.5, False, True, True), test_utils=utilities)
    plain = [value.detach() for value in given]
    o, final, bare = forward(*plain, None, 0.5, reverse=False, want_final=True, want_bare=True)
    backward = torch.ops.onelaunch.gla_recurrence_backward.default
    gradients = (torch.randn_like(o), torch.randn_like(final))
    library.opcheck(backward, (*gradients, *plain, None, bare, 0.5, False), test_utils=utilities)


# Tests without kernels


def test_nothing_is_saved_for_gv_without_gradients(monkeypatch):
    seen = []
    monkeypatch.setattr(autograd_recurrence, "forward", lambda *inputs, grad: seen.append((inputs[-1], grad)) or (0, 0))
    for grad in (False, True):
        call = GLA.bind(**arguments_of(GLA, value_gate=True, grad=grad))
        autograd_recurrence.attend(call)
    assert seen == [(False, False), (True, True)]


@pytest.fixture
def h100(monkeypatch):
    """Return the name of the pretended H100."""
    yield pretend(HOPPERS["H100"], monkeypatch)
    monkeypatch.undo()
    forget()


SIZES: dict[str, int] = {"B": 4, "T": 2048, "H": 16, "K": 128, "V": 128}


@pytest.mark.parametrize(
    ("dtype", "options", "grad", "name"),
    [
        ("bfloat16", {}, True, "hopper"),
        ("bfloat16", {"value_gate": True}, True, FUSED_RECURRENT),
        ("bfloat16", {"value_gate": True, "T": 1}, False, FUSED_RECURRENT),
        ("float32", {}, True, FUSED_RECURRENT),
        ("float32", {"B": 1}, True, "fused"),
        ("float32", {"T": 1}, False, "stepwise"),
        ("bfloat16", {"T": 64}, True, "hopper"),
        ("bfloat16", {"K": 256, "log_decay_dtype": "float32"}, True, FUSED_RECURRENT),
        ("bfloat16", {"K": 256, "log_decay_dtype": "float32", "decay_per": "head"}, True, "hopper"),
        ("bfloat16", {"K": 512}, False, FUSED_RECURRENT),
    ],
)
def test_auto_takes_it_where_hopper_cannot(dtype, options, grad, name, h100):
    assert dispatch.choose(GLA.query(GLA.case(dtype, **SIZES | options), h100, grad=grad)).name == name


@pytest.mark.parametrize(
    ("options", "variant", "expected"),
    [
        ({}, "auto", False),
        ({"T": 64}, "auto", True),
        ({"value_gate": True}, "auto", True),
        ({"T": 64}, "fused", False),
        ({}, FUSED_RECURRENT, True),
    ],
)
def test_time_is_flipped_where_hopper_runs_many_steps(options, variant, expected, h100):
    assert goes_backwards(GLA.query(GLA.case("bfloat16", **SIZES | options), h100), variant) == expected


def test_a_cpu_flips_time():
    assert not goes_backwards(GLA.query(GLA.case("float32", B=1, T=4, H=1, K=16, V=16), "cpu"), "auto")


# Tests on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("name", GLA_HARD)
def test_compiled_kernels_are_correct(name, device):
    if reason := GLA.get(FUSED_RECURRENT).why_not(GLA.query(case_of(GLA, name), str(device), grad=True)):
        pytest.skip(reason)
    assert_correct(GLA, case_of(GLA, name), FUSED_RECURRENT, device)


@pytest.mark.gpu
@pytest.mark.parametrize("log_decay_dtype", [None, "float32"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("per", ["channel", "head"])
@pytest.mark.parametrize("decay", DECAYS)
def test_compiled_kernels_take_every_kind_of_decay(decay, per, dtype, log_decay_dtype, device):
    options = {"decay": decay, "decay_per": per, "log_decay_dtype": log_decay_dtype, **GATED}
    assert_correct(GLA, GLA.case(dtype, B=2, T=300, H=2, K=128, V=96, **options), FUSED_RECURRENT, device)


@pytest.mark.gpu
@pytest.mark.parametrize(("keys", "values"), [(64, 64), (256, 256), (512, 512), (192, 72), (16, 400), (33, 17)])
def test_compiled_kernels_take_every_size_of_head(keys, values, device):
    assert_correct(GLA, GLA.case("bfloat16", B=1, T=200, H=2, K=keys, V=values, **GATED), FUSED_RECURRENT, device)


@pytest.mark.gpu
def test_a_captured_training_step_follows_its_inputs(device):
    def made(*, grad: bool = False, seed: int = 0) -> dict[str, Any]:
        reading = GLA.make_inputs(GLA.case("bfloat16", B=2, T=200, H=3, K=96, V=80, **GATED), device, seed)
        for name in reading.differentiable if grad else ():
            reading.arguments[name].requires_grad_()
        return reading.arguments

    assert_captured_step_follows_its_inputs(GLA, FUSED_RECURRENT, made, device)
