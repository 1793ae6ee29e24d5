"""Tests of ``gla``: every variant against the oracle, the oracle against a closed form, and properties of the recurrence.

``assert_near`` bounds the norm of each error, relative to that of the expected values; ``results`` returns a variant's results
and gradients by name. ``arguments_of(GLA)`` makes float32 arguments with B = 2, T = 9, H = 2, K = 20 and V = 16, unless others
are given. ``prose.raises`` is ``pytest.raises`` that also compares the message with the entry of this test in
tests/snapshots/prose.txt. A test fails if it does not compare one of its entries, and ``tests/test_prose.py`` if the test or the
parameter of an entry is gone.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from onelaunch.errors import ArgumentError
from onelaunch.ops import gla
from onelaunch.ops.gla import chunkwise, reference
from onelaunch.ops.gla.reference import DECAYS
from tests.ops.cases import (
    GLA,
    GLA_HARD,
    arguments_of,
    assert_compiled_correct,
    assert_correct,
    assert_near,
    case_of,
    differentiable,
    pytorch_variants,
    pytorch_variants_by_case,
    results,
    triton_variants,
    weights_like,
)
from tests.thorough import thorough_but

# Hypothesis takes the same few examples in every run.
FEW = settings(max_examples=10, deadline=None, derandomize=True)

each_variant = pytest.mark.parametrize(
    "variant", [*pytorch_variants(GLA), *(pytest.param(name, marks=pytest.mark.interpret) for name in triton_variants(GLA))]
)


def has_gradients(variant: str) -> bool:
    """Return whether a variant's gradients are tested: of the kernels those of ``fused``, whose backward pass all share."""
    return variant == "fused" or variant not in triton_variants(GLA)


each_backward_pass = pytest.mark.parametrize(
    "variant", [*pytorch_variants(GLA), pytest.param("fused", marks=pytest.mark.interpret)]
)


# The oracle


def closed_form(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    gv: torch.Tensor | None,
    scale: float,
    initial: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs as a sum over all pairs of steps, without a recurrence.

    The contribution of step s to step t is multiplied by all decays after s, up to t.
    """
    # q and k are [B, T, H, K], v and gv [B, T, H, V], g [B, T, H, K] or [B, T, H], initial [B, H, K, V].
    length, keys, values = q.shape[1], q.shape[3], v.shape[3]
    g = g if g.dim() == 4 else g[..., None].expand(*g.shape, keys)
    gv = torch.zeros_like(v) if gv is None else gv
    assert gv.shape[3] == values

    def kept(t: int, after: int) -> torch.Tensor:
        """Return the factor by which a state ``[B, H, K, V]`` after step ``after`` has decayed at step t."""
        each = [x[:, after + 1 : t + 1].sum(1).exp() for x in (g, gv)]
        return each[0][..., None] * each[1][..., None, :]

    states = [
        kept(t, -1) * initial + sum(kept(t, s) * k[:, s, :, :, None] * v[:, s, :, None, :] for s in range(t + 1))
        for t in range(length)
    ]
    return torch.stack([scale * torch.einsum("bhk,bhkv->bhv", q[:, t], states[t]) for t in range(length)], 1), states[-1]


@pytest.mark.parametrize("state_v_first", [False, True])
@pytest.mark.parametrize("value_gate", [False, True])
@pytest.mark.parametrize("decay", ["model", "strong", "mixed", "forget"])
@pytest.mark.parametrize("decay_per", ["channel", "head"])
def test_the_oracle_matches_the_closed_form(decay_per, decay, value_gate, state_v_first):
    given_arguments = arguments_of(
        GLA, T=11, decay=decay, decay_per=decay_per, value_gate=value_gate, state_v_first=state_v_first,
        scale=0.3, initial_state=True, final_state=True,
    )  # fmt: skip
    exact = {name: x.double() if isinstance(x, torch.Tensor) else x for name, x in given_arguments.items()}
    leaves = {name: x.requires_grad_() for name, x in exact.items() if isinstance(x, torch.Tensor)}
    found = GLA.reference(**exact)
    initial = exact["initial_state"].mT if state_v_first else exact["initial_state"]
    o, final = closed_form(*(exact[name] for name in "qkvg"), exact.get("gv"), 0.3, initial)
    expected = (o, final.mT if state_v_first else final)
    for ours, theirs in zip(found, expected, strict=True):
        assert_near({"value": ours.detach()}, {"value": theirs.detach()}, 1e-13)
    gradients = [
        dict(zip(leaves, torch.autograd.grad([(x * weights_like(x)).sum() for x in each], list(leaves.values())), strict=True))
        for each in (found, expected)
    ]
    assert_near(gradients[0], gradients[1], 1e-13)


@pytest.mark.parametrize(("lengths", "kept"), [(None, reference.KEPT_STATES), ((0, 53, 1, 150, 0), 0)])
@pytest.mark.parametrize("value_gate", [False, True])
@pytest.mark.parametrize("decay_per", ["channel", "head"])
@pytest.mark.parametrize("decay", thorough_but("mixed", of=DECAYS))
def test_parallel_segments_match_the_loop(decay, decay_per, value_gate, lengths, kept, monkeypatch):
    """Compare the oracle's ways: steps one after another, outputs of 7 steps or more at once, and segments of T side by side.

    ``kept`` bounds the bytes of states that are saved for gradients. With 0, they are computed again in the backward pass.
    """
    monkeypatch.setattr(reference, "KEPT_STATES", kept)
    arguments = arguments_of(
        GLA, B=1 if lengths else 2, T=204, decay=decay, decay_per=decay_per, value_gate=value_gate, lengths=lengths,
        initial_state=True,
    )  # fmt: skip
    names = ["q", "k", "v", "g", *(["gv"] if value_gate else []), "initial_state"]
    exact = {name: arguments[name].double().requires_grad_() for name in names}
    given = [*(exact.get(name) for name in ("q", "k", "v", "g", "gv", "initial_state")), arguments.get("cu_seqlens")]
    found = []
    for room, together in ((0, 0), (0, 7 * exact["initial_state"].nbytes), (1 << 20, 1 << 20)):
        monkeypatch.setattr(reference, "_STATES_TOGETHER", (together, together))
        o, final = reference.recurrence(*given, side_by_side=room)
        gradients = torch.autograd.grad(sum((x * weights_like(x)).sum() for x in (o, final)), list(exact.values()))
        found.append({"o": o.detach(), "final": final.detach(), **dict(zip(exact, gradients, strict=True))})
    assert_near(found[1], found[0], 1e-13)
    assert_near(found[2], found[0], 1e-13)


def test_the_default_scale_is_that_of_attention():
    """The default is 1 / sqrt(K): 0.2 for 25 channels."""
    arguments = arguments_of(GLA, T=5, K=25)
    assert_near(*({"o": gla(**(arguments | {"scale": scale}))[0]} for scale in (None, 0.2)), 0)
    assert_near(*({"o": GLA.reference(**(arguments | {"scale": scale}))[0]} for scale in (None, 0.2)), 0)


@pytest.mark.parametrize("lengths", [None, (0, 13, 0, 40)])
def test_the_loop_recomputes_states_that_are_too_large_to_keep(lengths, monkeypatch):
    """With ``KEPT_STATES``, the most bytes of saved states, at 0, the loop checkpoints segments, and results are the same."""
    arguments = arguments_of(GLA, B=1, T=53, lengths=lengths, initial_state=True, final_state=True, grad=True)
    expected = results(GLA, arguments, "recurrent")
    segments = []
    monkeypatch.setattr(reference, "KEPT_STATES", 0)
    monkeypatch.setattr(reference, "checkpoint", lambda *given, **how: segments.append(1) or reference._steps(*given[1:]))
    results(GLA, arguments, "recurrent")
    assert len(segments) >= 8  # segments of about the square root of 53 steps
    monkeypatch.undo()
    monkeypatch.setattr(reference, "KEPT_STATES", 0)
    assert_near(results(GLA, arguments, "recurrent"), expected, 1e-6)


@pytest.mark.parametrize("decay", DECAYS)
def test_every_kind_of_random_decay_has_its_range(decay):
    g = reference.make_decay(decay, (1, 512, 3, 16), torch.device("cpu"), torch.Generator().manual_seed(0))
    assert g.shape == (1, 512, 3, 16)
    assert (g <= 0).all()
    assert not g.isnan().any()
    sums = g.unfold(1, 16, 16).sum(-1)
    seen = {
        "model": -16 < sums.min() < -0.5,
        "weak": -0.05 < sums.min() < 0,
        "strong": bool((sums < -80).all()),
        "zero": not g.any(),
        "forget": 0.2 < g.isinf().double().mean() < 0.3 and bool((g.isinf().all(-1) == g.isinf().any(-1)).all()),
        "mixed": 0.1 < g.isinf().double().mean() < 0.3 and bool((g.isinf().all(-1) != g.isinf().any(-1)).any()),
    }
    assert seen[decay]


def test_unknown_choices_of_inputs_are_refused(prose):
    with prose.raises(ArgumentError, match="'chanel'"):
        arguments_of(GLA, decay_per="chanel")
    with prose.raises(ArgumentError, match="'stong'"):
        arguments_of(GLA, decay="stong")
    with prose.raises(ArgumentError):
        arguments_of(GLA, B=1, lengths=(3, 5))  # 8 steps, but T is 9


# Comparison with the oracle


@pytorch_variants_by_case(GLA, GLA_HARD)
def test_pytorch_variants_are_correct(variant, name):
    assert_correct(GLA, case_of(GLA, name), variant)


@pytest.mark.parametrize("decay_per", ["channel", "head"])
@pytest.mark.parametrize("decay", thorough_but("strong", "forget", "mixed", of=DECAYS))
def test_chunks_take_every_kind_of_decay(decay, decay_per):
    assert_correct(GLA, GLA.case("float32", B=2, T=100, H=2, K=24, V=20, decay=decay, decay_per=decay_per), "chunked")


@pytest.mark.thorough
@pytest.mark.slow
def test_the_compiled_variant_is_correct():
    """The case has few steps, because every chunk is compiled separately."""
    case = GLA.case("float16", B=1, T=5, H=2, K=16, V=20, lengths=(4, 0, 1), initial_state=True, final_state=True)
    assert_compiled_correct(GLA, case)


def test_the_compiled_variant_refuses_loops_that_would_compile_for_minutes():
    longest = chunkwise.CHUNK * 128
    variant = GLA.get("compiled")
    for length, reason in ((longest, None), (longest + 1, f"takes at most {longest} steps")):
        why = variant.why_not(GLA.query(GLA.case("float32", B=1, T=length, H=1, K=16, V=16), "cpu"))
        if reason is None:  # a machine without a C++ compiler gives that as the reason for the shorter length
            assert why is None or why.startswith("needs a C++ compiler")
        else:
            assert why is not None
            assert why.startswith(reason)


# Log-decays that are hard for single steps, as functions of a tensor with their shape. exp(-88) is a subnormal float32.
SINGLE_STEPS = {
    "twenty_each": lambda g: torch.full_like(g, -20.0),
    "one_of_twenty_in_nothing": lambda g: torch.zeros_like(g).index_fill(1, torch.tensor([0, 31, 64, 99]), -20.0),
    "eighty_at_once": lambda g: torch.zeros_like(g).index_fill(1, torch.tensor([5, 70]), -88.0),
    "more_than_float32_holds": lambda g: torch.full_like(g, -torch.finfo(torch.float32).max),
    "forgotten_at_some_steps": lambda g: torch.zeros_like(g).index_fill(1, torch.tensor([0, 1, 63, 64, 99]), -math.inf),
    "forgotten_by_some_channels": lambda g: torch.where(torch.arange(g.shape[-1]) % 3 == 0, -math.inf, -0.01).expand_as(g),
    "forgotten_always": lambda g: torch.full_like(g, -math.inf),
}


@pytest.mark.parametrize("kind", thorough_but("twenty_each", "more_than_float32_holds", of=SINGLE_STEPS))
@each_variant
def test_no_decay_is_too_strong(variant, kind):
    """Kernels multiply factors of decays and never divide. In 32 steps of -20 the sum is -640, and exp(640) overflows."""
    arguments = arguments_of(GLA, B=1, T=100, initial_state=True, final_state=True)
    backward = has_gradients(variant)
    arguments["g"] = SINGLE_STEPS[kind](arguments["g"]).clone()
    exact = {name: x.double() if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}
    outputs = []
    for function in (GLA.reference, lambda **each: GLA(**each, variant=variant)):
        leaves = {name: x.requires_grad_(backward) for name, x in exact.items() if isinstance(x, torch.Tensor)}
        named = dict(zip(("o", "final_state"), function(**exact), strict=True))
        loss = torch.stack([(x.double() * weights_like(x)).sum() for x in named.values()]).sum()
        gradients = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True)) if backward else {}
        outputs.append({name: x.detach().float() for name, x in (named | gradients).items()})
        exact = arguments
    assert all(x.isfinite().all() for x in outputs[1].values())
    assert_near(outputs[1], outputs[0], 1e-5)


def test_logsigmoid_gates_are_accepted_in_both_dtypes():
    """A layer makes such log-decays (its forget gate): logsigmoid divided by the normaliser, in the model's dtype or float32."""
    arguments = arguments_of(GLA, dtype="bfloat16", T=70)
    raw = torch.randn(arguments["g"].shape)
    for g in (F.logsigmoid(raw) / 16, (F.logsigmoid(raw) / 16).bfloat16()):
        o, _ = gla(**(arguments | {"g": g}))
        exact = {name: x.double() if isinstance(x, torch.Tensor) else x for name, x in (arguments | {"g": g}).items()}
        assert_near({"o": o.float()}, {"o": GLA.reference(**exact)[0].float()}, 4e-3)


# Properties of the recurrence


def pieces(arguments: dict[str, Any], part: slice) -> dict[str, Any]:
    """Return the arguments with every per-step tensor cut to some steps."""
    return {name: arguments[name][:, part] for name in ("q", "k", "v", "g", "gv") if name in arguments}


def check_split(length: int, cut: int, variant: str, **options: Any) -> None:
    """Require two calls for the steps before and after ``cut``, with the state passed on, to equal one call.

    An empty part is left to ``auto``, since not every variant takes it.
    """
    cut = min(cut, length)
    arguments = arguments_of(GLA, B=1, T=length, initial_state=True, final_state=True, **options)
    o, final = gla(**arguments, variant=variant)
    parts, state = [], arguments["initial_state"]
    shared = {"state_v_first": arguments["state_v_first"], "output_final_state": True}
    for part in (slice(0, cut), slice(cut, length)):
        used = variant if part.stop > part.start else "auto"
        piece, state = gla(**pieces(arguments, part), **shared, initial_state=state, variant=used)
        parts.append(piece)
    assert_near({"o": torch.cat(parts, 1), "final_state": state}, {"o": o, "final_state": final}, 2e-6)


def check_packed(lengths: tuple[int, ...], variant: str, **options: Any) -> None:
    """Require a call for packed sequences to equal one call for each of them, gradients included."""
    given = {"B": 1, "T": sum(lengths), "lengths": lengths, "initial_state": True, "final_state": True, **options}
    packed = arguments_of(GLA, **given, grad=has_gradients(variant))
    whole = results(GLA, packed, variant)
    outputs, finals = [], []
    for index, (start, end) in enumerate(itertools.pairwise([0, *itertools.accumulate(lengths)])):
        shared = {"state_v_first": packed["state_v_first"], "output_final_state": True}
        initial, used = packed["initial_state"][index : index + 1], variant if end > start else "auto"
        o, final = gla(**pieces(packed, slice(start, end)), **shared, initial_state=initial, variant=used)
        outputs.append(o)
        finals.append(final)
    separate = {"o": torch.cat(outputs, 1), "final_state": torch.cat(finals)}
    if leaves := differentiable(packed):
        loss = torch.stack([(value * weights_like(value)).sum() for value in separate.values()]).sum()
        gradients = torch.autograd.grad(loss, list(leaves.values()))
        separate |= {f"grad {name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}
    assert_near(whole, {name: value.detach() for name, value in separate.items()}, 3e-6)


# Options of cases: a decay per key channel, a decay per head, and decays of value channels (``gv``) in addition
KINDS: list[dict[str, Any]] = [
    {},
    {"decay_per": "head", "state_v_first": True},
    {"value_gate": True, "decay": "mixed"},
]


@pytest.mark.parametrize("variant", pytorch_variants(GLA))
@FEW
@given(length=st.integers(1, 150), cut=st.integers(0, 150), seed=st.integers(0, 9), kind=st.sampled_from(KINDS))
def test_a_sequence_may_be_cut_anywhere(variant, length, cut, seed, kind):
    check_split(length, cut, variant, seed=seed, **kind)


@pytest.mark.parametrize("variant", pytorch_variants(GLA))
@FEW
@given(
    lengths=st.lists(st.integers(0, 70), min_size=1, max_size=5).filter(any), seed=st.integers(0, 9), kind=st.sampled_from(KINDS)
)
def test_a_packed_batch_equals_its_parts(variant, lengths, seed, kind):
    check_packed(tuple(lengths), variant, seed=seed, **kind)


@pytest.mark.interpret
@pytest.mark.parametrize("variant", triton_variants(GLA))
def test_kernels_treat_packed_sequences_as_separate(variant):
    check_packed((3, 0, 61, 1, 5), variant)


@each_variant
def test_without_decay_gla_is_linear_attention(variant):
    """The decay is left out, or is zero everywhere."""
    arguments = arguments_of(GLA, T=70)
    q, k, v = (arguments[name] for name in "qkv")
    scores = torch.einsum("bthk,bshk->bhts", q.double(), k.double()).tril() * 20**-0.5
    expected = torch.einsum("bhts,bshv->bthv", scores, v.double()).float()
    for g in (None, torch.zeros_like(arguments["g"]), torch.zeros(arguments["g"].shape[:3])):
        o, final = gla(q, k, v, g, variant=variant)
        assert final is None
        assert_near({"o": o}, {"o": expected}, 2e-6)


@each_variant
def test_with_a_decay_of_zero_every_step_stands_alone(variant):
    arguments = arguments_of(GLA, T=70, initial_state=True, final_state=True)
    arguments["g"] = torch.full_like(arguments["g"], -math.inf)
    q, k, v = (arguments[name] for name in "qkv")
    o, final = gla(**arguments, variant=variant)
    assert_near({"o": o}, {"o": 20**-0.5 * (q * k).sum(-1, keepdim=True) * v}, 1e-6)
    assert_near({"final_state": final}, {"final_state": k[:, -1, :, :, None] * v[:, -1, :, None, :]}, 1e-6)


@each_backward_pass
def test_a_decay_per_head_equals_that_decay_for_all_channels(variant):
    arguments = arguments_of(GLA, T=70, decay_per="head", initial_state=True, final_state=True, grad=True)
    expanded = arguments | {"g": arguments["g"].detach()[..., None].expand(-1, -1, -1, 20).contiguous().requires_grad_()}
    per_channel = results(GLA, expanded, variant)
    per_channel["grad g"] = per_channel["grad g"].sum(-1)
    assert_near(results(GLA, arguments, variant), per_channel, 3e-6)


@pytest.mark.parametrize("variant", pytorch_variants(GLA))
def test_a_gate_on_values_is_a_gate_on_keys_of_the_transposed_state(variant):
    """With one nonzero key channel the state is a row of V channels, and the gate ``gv`` on values makes it a scan's state."""
    arguments = arguments_of(GLA, B=1, T=70, H=1, value_gate=True)
    v, gv = arguments["v"], arguments["gv"]
    lit = torch.zeros_like(arguments["k"])
    lit[..., 3] = 1.0
    o, _ = gla(lit, lit, v, None, gv=gv, scale=1.0, variant=variant)
    state, expected = torch.zeros(16, dtype=torch.float64), []
    for t in range(70):
        state = state * gv[0, t, 0].double().exp() + v[0, t, 0].double()
        expected.append(state)
    assert_near({"o": o[0, :, 0]}, {"o": torch.stack(expected).float()}, 2e-6)


@each_variant
def test_the_scale_multiplies_only_the_queries(variant):
    arguments = arguments_of(GLA, T=30, scale=1.0, initial_state=True, final_state=True)
    o, final = gla(**arguments, variant=variant)
    for scale in (0.0, -2.0, 3):
        scaled, state = gla(**(arguments | {"scale": scale}), variant=variant)
        assert_near({"o": scaled}, {"o": scale * o}, 1e-6)
        assert torch.equal(state, final)


@pytest.mark.parametrize("packed", [False, True])
@each_backward_pass
def test_states_may_have_their_values_first(variant, packed):
    lengths = (4, 0, 66) if packed else None
    arguments = arguments_of(GLA, B=1, T=70, lengths=lengths, initial_state=True, final_state=True, grad=True)
    expected = results(GLA, arguments, variant)
    turned = arguments | {"initial_state": arguments["initial_state"].detach().mT.contiguous().requires_grad_()}
    outputs = gla(**(turned | {"state_v_first": True}), variant=variant)
    loss = (outputs[0] * weights_like(outputs[0])).sum() + (outputs[1].mT * weights_like(outputs[1].mT)).sum()
    leaves = differentiable(turned)
    gradients = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
    gradients["initial_state"] = gradients["initial_state"].mT
    found = {"o": outputs[0].detach(), "final_state": outputs[1].detach().mT}
    assert_near(found | {f"grad {name}": value for name, value in gradients.items()}, expected, 2e-6)


# NaN reaches only dependent results


NAN_AT = 70
"""Index of the step that holds NaN, in the second chunk of 64 steps."""


@functools.cache
def clean_run(variant: str, options: tuple[tuple[str, Any], ...]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return arguments with states and a variant's results without NaN, once for all tests that insert NaN."""
    arguments = arguments_of(GLA, initial_state=True, final_state=True, grad=has_gradients(variant), **dict(options))
    return arguments, results(GLA, arguments, variant)


def with_nan(arguments: dict[str, Any], name: str, place: tuple[int, ...]) -> dict[str, Any]:
    """Return the arguments with NaN in all elements of one tensor at the leading indices ``place``."""
    spoilt = arguments[name].detach().clone()
    spoilt[place] = math.nan
    return arguments | {name: spoilt.requires_grad_(arguments[name].requires_grad)}


def assert_clean(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], where: Any, names: list[str]) -> None:
    """Require the parts of results that ``where(name, value)`` returns to be as without NaN, for these names of results."""
    for name in names:
        one, other = where(name, found[name]), where(name, expected[name])
        assert not one.isnan().any(), name
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6, msg=lambda said, name=name: f"{name}: {said}")


@pytest.mark.parametrize("options", thorough_but({}, of=KINDS), ids=["per_channel", "per_head", "value_gate"])
@pytest.mark.parametrize("argument", thorough_but("q", "g", of="qkvg"))
@each_variant
def test_nan_stays_in_its_head_and_does_not_reach_earlier_chunks(variant, argument, options):
    if "value_gate" in options and variant in triton_variants(GLA):
        pytest.skip("kernels refuse a gate on values: see test_kernels_refuse_unsupported_calls")
    # NaN is in batch entry 1, head 0.
    arguments, clean = clean_run(variant, tuple({"B": 2, "T": 150, "H": 2, **options}.items()))
    found = results(GLA, with_nan(arguments, argument, (1, NAN_AT, 0)), variant)
    assert_clean(found, clean, lambda name, x: x[0], list(clean))  # the other batch entry
    assert_clean(found, clean, lambda name, x: x[1, 1] if "state" in name else x[1, :, 1], list(clean))  # the other head
    assert_clean(found, clean, lambda name, x: x[1, :64, 0], ["o"])  # the chunk before
    assert_clean(
        found, clean, lambda name, x: x[1, 128:, 0], ["grad q"] if argument == "q" and "grad q" in clean else []
    )  # the chunk after
    o, final = found["o"][1, :, 0], found["final_state"][1, 0]
    assert o[NAN_AT].isnan().all()
    assert o[NAN_AT:].isnan().all() == (argument != "q")
    assert final.isnan().any() == (argument != "q")


@pytest.mark.parametrize("argument", thorough_but("v", "initial_state", of=["q", "k", "v", "g", "gv", "initial_state"]))
@each_variant
def test_nan_stays_in_its_packed_sequence(variant, argument):
    """Results and gradients of the sequences before and after are unchanged. The sequence right after is empty."""
    lengths, gated = (30, 50, 0, 70), variant not in triton_variants(GLA)
    if argument == "gv" and not gated:
        pytest.skip("kernels refuse a gate on values: see test_kernels_refuse_unsupported_calls")
    arguments, clean = clean_run(variant, (("B", 1), ("T", 150), ("lengths", lengths), ("value_gate", gated)))
    place = (1,) if argument == "initial_state" else (0, NAN_AT)
    found = results(GLA, with_nan(arguments, argument, place), variant)
    others = torch.tensor([0, 2, 3])
    outside = torch.cat([torch.arange(30), torch.arange(80, 150)])
    assert_clean(found, clean, lambda name, x: x[others] if "state" in name else x[:, outside], list(clean))
    assert found["o"][0, NAN_AT].isnan().any()


@each_backward_pass
def test_nan_in_an_incoming_gradient_stays_in_its_packed_sequence(variant):
    arguments = arguments_of(GLA, B=1, T=150, lengths=(30, 50, 70), initial_state=True, final_state=True, grad=True)
    leaves = differentiable(arguments)
    found = []
    for spoilt in (1.0, math.nan):
        o, final = gla(**arguments, variant=variant)
        incoming = torch.ones_like(o)
        incoming[0, 40] = spoilt
        gradients = torch.autograd.grad([o, final], list(leaves.values()), [incoming, torch.ones_like(final)])
        found.append(dict(zip(leaves, gradients, strict=True)))
    outside, others = torch.cat([torch.arange(30), torch.arange(80, 150)]), torch.tensor([0, 2])
    assert_clean(found[1], found[0], lambda name, x: x[others] if "state" in name else x[:, outside], list(leaves))
    assert found[1]["v"][0, 40].isnan().all()
