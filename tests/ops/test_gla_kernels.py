"""Tests of the portable Triton kernels of ``gla``, interpreted and on a GPU: correctness, refused calls, and preference.

The expected results are the oracle's, or those of the PyTorch variant "recurrent", a loop over time.

To examine one call by hand: ``assert_correct(GLA, GLA.case("bfloat16", B=1, T=300, H=2, K=128, V=64, decay="strong"),
"fused", "cuda:0")``.

``assert_near`` bounds the norm of each error, relative to that of the expected values; ``results`` returns a variant's results
and gradients by name.

``prose.raises`` is ``pytest.raises`` that also compares the message with the entry of this test in tests/snapshots/prose.txt. A
test fails if it does not compare one of its entries, and ``tests/test_prose.py`` if the test or the parameter of an entry is
gone.

``device`` is the first GPU, or the CPU. ``GLA_HARD`` are the probes of ``gla`` and longer cases, by name. ``GLA_SHORT`` are the
cases of ``gla`` for Triton's interpreter. ``case_of`` returns a listed case by its name. ``arguments_of`` makes small random
arguments on the CPU. ``triton_variants`` are the variants with kernels of our own for any GPU. ``variants_by_case`` parametrizes
a test over variants and names of cases. ``assert_one_call_correct`` checks the errors of one call, and that it writes all
elements. ``differentiable`` returns the arguments that take gradients. A test marked ``thorough`` does not run in ``make test``,
and one marked ``interpret`` runs in Triton's interpreter, with TRITON_INTERPRET=1. ``thorough_but`` marks all parameters but the
named ones ``thorough``.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch

from onelaunch.ablations.gla import LARGEST_KEYS
from onelaunch.errors import VariantUnsupported
from onelaunch.operation import Query, fixed
from onelaunch.ops.gla.reference import DECAYS
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
    triton_variants,
    variants_by_case,
)
from tests.thorough import thorough_but

pytest.importorskip("triton")

STATES: dict[str, Any] = {"initial_state": True, "final_state": True}
SMALL: dict[str, Any] = {"B": 1, "T": 70, "H": 1, "K": 16, "V": 16}

KERNELS = triton_variants(GLA)
# Kernels take no gate on values: names of the cases without one, for the interpreter and for a GPU
UNGATED = [name for name in GLA_SHORT if not GLA_SHORT[name].get("value_gate")]
LONGER = [name for name in GLA_HARD if not GLA_HARD[name].get("value_gate")]

LONG = ("mixed_decay_per_head", "packed_many_short", "packed_with_empty_sequences", "three_chunks")
"""Cases at which the forward passes besides that of ``fused`` do not run in ``make test``."""


def in_brief(variants, *long):
    """Return all pairs of a variant and an interpreted case. Those with a case of ``long`` do not run in ``make test``."""
    pairs = [(variant, name) for name in UNGATED for variant in variants]
    return thorough_but(*(pair for pair in pairs if pair[1] not in long), of=pairs)


each_kernel = pytest.mark.parametrize("variant", KERNELS)
each_decay = pytest.mark.parametrize("decay", DECAYS)
each_layout = pytest.mark.parametrize("per", ["channel", "head"])
"""Parametrization over the layouts of the log-decays: one per key channel, or one per head."""


# Tests in the interpreter


@pytest.mark.interpret
@pytest.mark.parametrize(("variant", "name"), in_brief(["fused"], "packed_many_short"))
def test_kernels_are_correct(variant, name):
    assert_one_call_correct(GLA, case_of(GLA, name), variant)


@pytest.mark.interpret
@pytest.mark.parametrize(("variant", "name"), in_brief([name for name in KERNELS if name != "fused"], *LONG))
def test_other_forward_passes_are_correct(variant, name):
    """The backward pass of these variants is that of ``fused``."""
    assert_one_call_correct(GLA, case_of(GLA, name), variant, "forward")


@pytest.mark.interpret
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@each_layout
@each_decay
@pytest.mark.thorough
def test_kernels_take_every_kind_of_decay(decay, per, dtype):
    sizes = {"B": 1, "T": 100, "H": 2, "K": 24, "V": 20}
    assert_one_call_correct(GLA, GLA.case(dtype, **sizes, decay=decay, decay_per=per, **STATES), "fused")


@pytest.mark.interpret
@each_layout
@each_decay
@pytest.mark.thorough
def test_gradients_with_16_bit_products(decay, per, monkeypatch):
    """All products take 16-bit operands, as with bfloat16, which the interpreter cannot multiply."""
    from onelaunch.ops.gla import launch

    monkeypatch.setattr(launch, "exact_gradients", lambda call: False)
    sizes = {"B": 1, "T": 150, "H": 2, "K": 40, "V": 24}
    assert_one_call_correct(GLA, GLA.case("float16", **sizes, decay=decay, decay_per=per, **STATES), "fused")


@pytest.mark.interpret
@pytest.mark.parametrize("dtype", ["float16", pytest.param("float32", marks=pytest.mark.thorough)])
@pytest.mark.parametrize(("keys", "values"), [pytest.param(70, 130, marks=pytest.mark.thorough), (130, 33)])
def test_kernels_take_several_blocks_of_keys_and_values(keys, values, dtype):
    case = GLA.case(dtype, B=1, T=66, H=1, K=keys, V=values, decay="mixed", log_decay_dtype="float32", **STATES)
    assert_one_call_correct(GLA, case, "fused")


@pytest.mark.interpret
@pytest.mark.parametrize("variant", thorough_but("fused", of=KERNELS))
def test_kernels_pass_the_whole_gate(variant):
    """Apply the whole verification gate (``assert_correct``), not one call as in the other tests of kernels."""
    assert_correct(GLA, GLA.case("float16", **SMALL, **STATES), variant)


@pytest.mark.interpret
@pytest.mark.parametrize("least", [-20.0, -1000.0, -math.inf])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@each_kernel
def test_states_decay_by_the_given_amount(variant, dtype, least):
    """Every step decays far below what a difference of sums could resolve. The gradient of such a decay is still correct."""
    grad = variant == "fused"  # all variants share its backward pass
    arguments = arguments_of(GLA, **SMALL, dtype=dtype, **STATES, grad=grad)
    arguments["g"] = torch.full_like(arguments["g"], least).requires_grad_(grad)
    found, expected = (results(GLA, arguments, name) for name in (variant, "recurrent"))
    assert_near(found, expected, {"float16": 1e-3, "float32": 1e-6}[dtype])


@pytest.mark.interpret
@each_kernel
def test_one_strong_step_among_weak_ones(variant):
    """Decays within a chunk are computed relative to one step, its anchor, unless they are too strong, as here.

    Steps after the strong one must not see steps before it; the rest is unchanged.
    """
    arguments = arguments_of(GLA, **SMALL, **STATES, dtype="float32", decay="weak", grad=True)
    with torch.no_grad():
        arguments["g"][:, 33, :, ::2] = -200.0
        arguments["g"][:, 50] = -math.inf
    found, expected = (results(GLA, arguments, name) for name in (variant, "recurrent"))
    assert_near(found, expected, 1e-6)


@pytest.mark.interpret
@pytest.mark.parametrize("name", ["q", "k", "v"])
@each_kernel
def test_large_float16_inputs_do_not_overflow_in_intermediates(variant, name):
    """The chunk decays by exp(-10). Undoing that from its end would take keys of 1000 beyond the range of float16."""
    arguments = arguments_of(GLA, **SMALL, dtype="float16")
    arguments["g"] = torch.full_like(arguments["g"], -10 / 64)
    arguments[name] = (arguments[name] * 1000).half()
    found, expected = (GLA(**arguments, variant=each)[0] for each in (variant, "recurrent"))
    assert_near({"o": found}, {"o": expected}, 1e-3)


@pytest.mark.interpret
@each_kernel
def test_nan_stays_in_its_head_and_propagates(variant):
    arguments = arguments_of(GLA, B=2, T=70, H=2, K=16, V=16)
    arguments["g"][0, 66, 1, 3] = math.nan
    o, _ = GLA(**arguments, variant=variant)
    assert o[0, 66:, 1].isnan().any(-1).all()
    assert not o[0, :64, 1].isnan().any()
    assert not o[1].isnan().any()
    assert not o[:, :, 0].isnan().any()


@pytest.mark.interpret
@each_kernel
def test_a_sequence_may_be_cut_anywhere(variant):
    arguments = arguments_of(GLA, **SMALL, dtype="float32", **STATES)
    o, final = GLA(**arguments, variant=variant)
    steps = {name: arguments[name] for name in "qkvg"}
    for cut in (1, 64, 69):
        state, parts = arguments["initial_state"], []
        for part in (slice(0, cut), slice(cut, 70)):
            pieces = {name: value[:, part] for name, value in steps.items()}
            piece, state = GLA(**pieces, initial_state=state, output_final_state=True, variant=variant)
            parts.append(piece)
        assert_near({"o": torch.cat(parts, 1), "final": state}, {"o": o, "final": final}, 2e-6)


@pytest.mark.interpret
@pytest.mark.parametrize("variant", thorough_but("fused", of=KERNELS))
def test_offsets_may_be_int64_and_inputs_strided(variant):
    arguments = arguments_of(GLA, B=1, T=70, H=2, K=16, V=16, lengths=(0, 3, 67), **STATES, grad=True)
    expected = results(GLA, arguments, variant)
    wide = {**arguments, "cu_seqlens": arguments["cu_seqlens"].long()}
    for name in "qkvg":
        spread = torch.full((*arguments[name].shape[:3], 48), math.nan)
        wide[name] = spread[..., 16:32].copy_(arguments[name].detach()).requires_grad_()
    assert_near(results(GLA, wide, variant), expected, 0)


@pytest.mark.interpret
@pytest.mark.parametrize("values_first", [False, True])
def test_a_state_passed_from_step_to_step_keeps_its_memory_layout(values_first):
    """With the layout kept, no decoding step copies the state, whichever layout the caller uses."""
    arguments = arguments_of(GLA, **SMALL | {"T": 1, "V": 24}, **STATES, state_v_first=values_first)
    o, final = GLA(**arguments, variant="stepwise")
    assert final.is_contiguous()
    expected = GLA(**arguments, variant="recurrent")
    assert_near({"o": o, "final": final}, dict(zip(("o", "final"), expected, strict=True)), 1e-3)


@pytest.mark.interpret
@each_kernel
def test_kernels_refuse_unsupported_calls(variant, prose):
    with prose.raises(VariantUnsupported):
        GLA(**arguments_of(GLA, **SMALL, value_gate=True), variant=variant)
    with prose.raises(VariantUnsupported, match="bfloat16"):
        GLA(**arguments_of(GLA, **SMALL, dtype="bfloat16"), variant=variant)
    with prose.raises(VariantUnsupported):
        GLA(**arguments_of(GLA, **{**SMALL, "T": 0}), variant=variant)


# Tests on a GPU


def most_keys(variant: str, keys: int) -> int:
    """Return ``keys``, or the largest number of key channels that the variant takes if that is less."""
    return min(keys, LARGEST_KEYS) if variant in ("sequential", "pipelined") else keys


def made(variant: str, device: torch.device, *, grad: bool = False, seed: int = 0, **given: Any) -> dict[str, Any]:
    """Return random arguments on the GPU.

    They are bfloat16, with states and several chunks, heads and blocks, unless ``given`` says otherwise.
    """
    chosen = {"B": 2, "T": 500, "H": 3, "K": most_keys(variant, 96), "V": 80, "dtype": "bfloat16", **STATES, **given}
    reading = GLA.make_inputs(GLA.case(**chosen), device, seed)
    for name in reading.differentiable if grad else ():
        reading.arguments[name].requires_grad_()
    return reading.arguments


@pytest.mark.gpu
@variants_by_case(KERNELS, LONGER)
def test_compiled_kernels_are_correct(variant, name, device):
    if reason := GLA.get(variant).why_not(GLA.query(case_of(GLA, name), str(device), grad=True)):
        pytest.skip(reason)
    assert_correct(GLA, case_of(GLA, name), variant, device)


@pytest.mark.gpu
@pytest.mark.parametrize("log_decay_dtype", [None, "float32"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@each_layout
@each_decay
@each_kernel
def test_compiled_kernels_take_every_kind_of_decay(variant, decay, per, dtype, log_decay_dtype, device):
    options = {"decay": decay, "decay_per": per, "log_decay_dtype": log_decay_dtype, **STATES}
    assert_correct(GLA, GLA.case(dtype, B=2, T=300, H=2, K=most_keys(variant, 128), V=96, **options), variant, device)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize(("keys", "values"), [(64, 64), (128, 128), (256, 256), (512, 512), (192, 72), (16, 400)])
def test_compiled_kernels_take_every_size_of_head(keys, values, dtype, device):
    assert_correct(GLA, GLA.case(dtype, B=1, T=200, H=2, K=keys, V=values, **STATES), "fused", device)


@pytest.mark.gpu
@pytest.mark.parametrize("per", ["channel", "head"])
@pytest.mark.parametrize("lengths", [None, (0, 3000, 1, 0, 999)])
@each_kernel
def test_results_are_the_same_to_the_last_bit(variant, lengths, per, device):
    given: dict[str, Any] = {"B": 1, "lengths": lengths} if lengths else {}
    arguments = made(variant, device, T=4000, decay_per=per, grad=True, **given)
    first = results(GLA, arguments, variant)
    for _ in range(10):
        again = results(GLA, arguments, variant)
        assert all(torch.equal(again[name], value) for name, value in first.items())


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [None, (0, 300, 0, 200)])
@each_kernel
def test_a_captured_training_step_follows_its_inputs(variant, lengths, device):
    given: dict[str, Any] = {"B": 1, "lengths": lengths} if lengths else {}
    assert_captured_step_follows_its_inputs(GLA, variant, functools.partial(made, variant, device, **given), device)


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [None, (0, 300, 0, 200)])
@each_kernel
def test_a_call_never_waits_for_the_device(variant, lengths, device):
    given: dict[str, Any] = {"B": 1, "lengths": lengths} if lengths else {}
    arguments = made(variant, device, grad=True, **given)
    o, final = GLA(**arguments, variant=variant)
    seeds = [torch.randn_like(o), torch.randn_like(final)]
    torch.autograd.grad([o, final], list(differentiable(arguments).values()), seeds)
    torch.cuda.set_sync_debug_mode("error")
    try:
        outputs = GLA(**arguments, variant=variant)
        torch.autograd.grad(outputs, list(differentiable(arguments).values()), seeds)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# Tests without kernels


@pytest.mark.parametrize(
    ("steps", "grad", "first"), [(1, False, "stepwise"), (16, False, "stepwise"), (17, False, "hopper"), (1, True, "hopper")]
)
def test_auto_prefers_the_step_loop_for_few_steps_without_gradients(steps, grad, first):
    """Without measurements the order of preference decides. Its first entry may be refused, as "hopper" on other GPUs."""
    query = Query("gla", "cuda:0", torch.bfloat16, fixed(64, steps, 32, 128, 128), grad, ("initial_state", "final_state"))
    assert GLA.preference(query)[0] == first
    on_a_cpu = "recurrent" if steps == 1 and not grad else "chunked"
    assert GLA.preference(query._replace(device="cpu"))[0] == on_a_cpu
