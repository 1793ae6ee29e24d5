"""Tests that a sequence in pieces, each of which begins with the state that the one before left, equals the whole.

The pieces are judged as one call: their outputs side by side, the last state, and the gradients that flow back through all
passed states are compared with the oracle of the whole sequence, by the error limits of the verification gate. A small case of
each operation runs on a CPU, interpreted where the variant is a kernel; real sizes run on a GPU.

``OPERATIONS`` are ``gated_scan``, ``linear_rnn`` and ``gla``. ``BOTH`` are the directions: forward, and forward with gradients.
``pytorch_variants`` are the variants of plain PyTorch. ``triton_variants`` are the variants with kernels of our own for any GPU.
``assert_ok`` requires a verdict of the gate to be right. A test marked ``interpret`` runs in Triton's interpreter, with
TRITON_INTERPRET=1. ``thorough_but`` marks all parameters but the named ones ``thorough``: they do not run in ``make test``.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onelaunch.device.architectures import pretended
from onelaunch.operation import Case, Direction, Operation
from onelaunch.workbench.verify import Judge, judge_outputs
from onelaunch.workbench.verify.calls import Candidate
from onelaunch.workbench.verify.poison import poisoned
from onelaunch.workbench.verify.reference import compute_reference
from tests.ops.cases import BOTH, GATED_SCAN, GLA, LINEAR_RNN, OPERATIONS, assert_ok, pytorch_variants, triton_variants
from tests.thorough import thorough_but

PER_STEP = {"gla": ("q", "k", "v", "g", "gv"), "gated_scan": ("v", "log_decay", "gate"), "linear_rnn": ("x", "log_decay", "gate")}
"""Arguments of each operation that are cut along time; the others belong to every piece."""

STATES = {"initial_state": True, "final_state": True}

SMALL: dict[str, dict[str, Any]] = {
    "gla": {"B": 1, "H": 1, "K": 16, "V": 16, **STATES},
    "gated_scan": {"B": 2, "V": 3, **STATES},
    "linear_rnn": {"B": 2, "D": 16, "V": 16, **STATES},
}
"""Sizes for a CPU, without the number of steps."""

REAL: dict[str, dict[str, Any]] = {
    "gla": {"B": 2, "T": 2048, "H": 4, "K": 128, "V": 128, **STATES},
    "gated_scan": {"B": 4, "T": 2048, "V": 1024, **STATES},
    "linear_rnn": {"B": 4, "T": 2048, "D": 256, "V": 1024, **STATES},
}
"""Sizes for a GPU, of a layer that people train."""

KINDS: list[dict[str, Any]] = [{}, {"log_decay_dtype": "float32"}, {"decay": "mixed"}]
"""Options of the cases: log-decays in the dtype of the inputs, in float32, and strong ones with resets."""

MANY = 32
"""Number of pieces of a sequence that is cut into many."""

FEW = settings(max_examples=4, deadline=None, derandomize=True)

_JUDGE = Judge()
"""Cache of reference outputs, so that variants tested at one case share them."""


SHORTEST = {("linear_rnn", "fused_hopper"): 64}
"""Fewest steps of a piece by operation and variant, where a variant needs more than one. ``auto`` computes shorter pieces."""


def per_variant(
    operations: Sequence[Operation[..., Any]], variants: Any, brief: Sequence[str] | None = None
) -> pytest.MarkDecorator:
    """Parametrize ``operation`` and ``variant`` over the variants that a function lists for each operation.

    If ``brief`` names some of the variants, the others do not run in ``make test``.
    """
    pairs = [(operation, name) for operation in operations for name in variants(operation)]
    given = [pytest.param(*pair, id=f"{pair[0].name}-{pair[1]}") for pair in pairs]
    return pytest.mark.parametrize(
        ("operation", "variant"), thorough_but(*(pair for pair in pairs if brief is None or pair[1] in brief), of=given)
    )


def kernels_with_states(operation: Operation[..., Any]) -> list[str]:
    """Return all Triton variants of a scan, and ``fused`` alone for gla.

    The other kernels of gla have the gradients of ``fused``, so they are cut forward only.
    """
    return ["fused"] if operation is GLA else triton_variants(operation)


def in_pieces(operation: Operation[..., Any], variant: str, cuts: Sequence[int]) -> Candidate:
    """Return a candidate that computes a call piece by piece, between the steps in ``cuts``, and passes the state on.

    All pieces have one weight. Its gradients are added up in float32, since the sum of many in bfloat16 would be less accurate
    than any of them.
    """

    def call(**arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        names = [name for name in PER_STEP[operation.name] if arguments.get(name) is not None]
        state, outputs = arguments.get("initial_state"), []
        shared = {name: arguments[name] for name in ("weight",) if name in arguments}
        wide = {name: value.float() for name, value in shared.items()}
        shortest = SHORTEST.get((operation.name, variant), 1)
        for start, end in itertools.pairwise([0, *cuts, arguments[names[0]].shape[1]]):
            chosen = variant if end - start >= shortest else "auto"
            piece = {name: arguments[name][:, start:end] for name in names}
            piece |= {name: wide[name].to(value.dtype) for name, value in shared.items()}
            given = {**arguments, **piece, "initial_state": state, "output_final_state": True}
            output, state = operation(**given, variant=chosen)
            assert state is not None
            outputs.append(output)
        return torch.cat(outputs, 1), state

    return Candidate(f"{variant} in {len(cuts) + 1} pieces", call, operation.outputs, strict=True, operation=operation.name)


def assert_pieces_equal_the_whole(
    operation: Operation[..., Any],
    case: Case,
    variant: str,
    cuts: Sequence[int],
    direction: Direction = "forward_backward",
    device: torch.device | str = "cpu",
) -> None:
    """Require that pieces of a sequence, with the state passed on, pass the gate of the whole. Skip with a variant's own reason.

    With ``forward_backward`` the gradients are those of the whole too: they flow through every passed state.
    """
    if reason := operation.get(variant).why_not(operation.query(case, str(device), grad=direction == "forward_backward")):
        pytest.skip(f"{variant} {reason}")
    reference = _JUDGE.reference(operation, case, device=device, direction=direction)
    with poisoned():
        outputs = in_pieces(operation, variant, cuts)(reference.inputs.clone())
    verdict = judge_outputs(reference, outputs, operation.get(variant).capabilities.own_tolerance)
    if not verdict.outside:  # a peer may be as inexact as its own tests allow
        assert_ok(verdict, operation, case, f"{variant}, cut at {list(cuts)[:8]}")


def even(length: int) -> list[int]:
    """Return the cuts of a sequence into :data:`MANY` pieces whose lengths differ by at most one step."""
    return [length * n // MANY for n in range(1, MANY)]


def uneven(length: int) -> list[int]:
    """Return the cuts of a sequence into :data:`MANY` pieces of different lengths, the first of one step, alike in every run."""
    steps = torch.randperm(length - 2, generator=torch.Generator().manual_seed(3))[: MANY - 2] + 2
    return [1, *sorted(steps.tolist())]


# Tests on a CPU: plain PyTorch, then kernels in the interpreter


@per_variant(OPERATIONS, pytorch_variants)
@FEW
@given(
    length=st.integers(2, 90), cut=st.integers(1, 89), kind=st.sampled_from(KINDS), dtype=st.sampled_from(["bfloat16", "float32"])
)
def test_pytorch_variants_take_a_sequence_cut_at_any_step(operation, variant, length, cut, kind, dtype):
    case = operation.case(dtype, **SMALL[operation.name], T=length, **kind)
    assert_pieces_equal_the_whole(operation, case, variant, [min(cut, length - 1)])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@per_variant(OPERATIONS, pytorch_variants)
def test_pytorch_variants_take_a_sequence_in_many_pieces(operation, variant, dtype):
    case = operation.case(dtype, **SMALL[operation.name], T=80)
    assert_pieces_equal_the_whole(operation, case, variant, uneven(80))


@per_variant([GLA], pytorch_variants)
@pytest.mark.parametrize("options", [{"decay_per": "head", "state_v_first": True}, {"value_gate": True}])
def test_pytorch_variants_pass_every_kind_of_state(operation, variant, options):
    case = GLA.case("bfloat16", **SMALL["gla"], T=70, log_decay_dtype="float32", **options)
    assert_pieces_equal_the_whole(operation, case, variant, [1, 65])


@pytest.mark.interpret
@per_variant(OPERATIONS, kernels_with_states, brief=("fused", "fused_chunked", "three_launch"))
def test_kernels_take_a_cut_sequence(operation, variant):
    case = operation.case("float16", **SMALL[operation.name], T=67, log_decay_dtype="float32")
    assert_pieces_equal_the_whole(operation, case, variant, [65])


@pytest.mark.interpret
@per_variant([GLA], lambda operation: [name for name in triton_variants(operation) if name != "fused"])
def test_other_forward_passes_take_a_cut_sequence(operation, variant):
    case = operation.case("float16", **SMALL["gla"], T=66)
    assert_pieces_equal_the_whole(operation, case, variant, [1], "forward")


@pytest.mark.interpret
def test_kernels_take_a_sequence_in_many_pieces():
    """Gradients of many pieces are left to the tests on a GPU: interpreted, the backward passes take seconds."""
    case = GLA.case("float16", **{**SMALL["gla"], "initial_state": False}, T=34)
    assert_pieces_equal_the_whole(GLA, case, "fused", uneven(34), "forward")


def test_pieces_whose_gradients_are_cut_off_fail():
    """This shows that the comparison can fail: a state without its graph passes no gradient back."""
    case = GLA.case("bfloat16", **SMALL["gla"], T=40)
    reference = _JUDGE.reference(GLA, case, direction="forward_backward")
    passed_on = in_pieces(GLA, "chunked", [20])

    def truncated(**arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        halves = [{**arguments, **{name: arguments[name][:, part] for name in "qkvg"}} for part in (slice(0, 20), slice(20, 40))]
        first, state = GLA(**halves[0], variant="chunked")
        assert state is not None
        second, state = GLA(**{**halves[1], "initial_state": state.detach()}, variant="chunked")
        assert state is not None
        return torch.cat([first, second], 1), state

    for call, right in ((passed_on.call, True), (truncated, False)):
        candidate = Candidate("pieces", call, GLA.outputs, strict=True, operation="gla")
        verdict = judge_outputs(reference, candidate(reference.inputs.clone()))
        assert verdict.ok is right, verdict.explain()
    assert any(problem.startswith("grad k") for problem in verdict.problems), "gradients were cut off at the passed state"


# ``fused`` keeps float32 results in float32 accuracy


FLOAT32_RESULTS = {"T": 70, "H": 1, "K": 16, "V": 16, "B": 1, "log_decay_dtype": "float32", **STATES}


def assert_float32_accuracy(case: Case, variant: str, device: torch.device | str) -> None:
    """Require a variant of ``gla`` to pass without the errors that the operation states for float32 results of 16-bit calls."""
    for direction in BOTH:
        strict = compute_reference(GLA, case, torch.device(device), 0, direction, None, {})
        assert strict.allowed["final_state"] < 1e-5
        verdict = judge_outputs(strict, Candidate.variant(GLA, variant)(strict.inputs.clone()))
        assert_ok(verdict, GLA, case, variant)


@pytest.mark.parametrize("decay_per", ["channel", "head"])
@pytest.mark.parametrize("variant", [*pytorch_variants(GLA), pytest.param("fused", marks=pytest.mark.interpret)])
def test_these_variants_have_float32_accuracy(variant, decay_per):
    assert_float32_accuracy(GLA.case("float16", **FLOAT32_RESULTS, decay_per=decay_per), variant, "cpu")


# Tests on a GPU, at real sizes


def all_variants(operation: Operation[..., Any]) -> list[str]:
    """Return our own variants but the one that ``torch.compile`` compiles again for every length, and those for few rows."""
    own = [name for name, variant in operation.variants.items() if variant.capabilities.requires is None]
    return [name for name in own if name != "compiled" and not name.endswith("few_rows")]


def real_case(operation: Operation[..., Any], variant: str, dtype: str, **options: Any) -> Case:
    """Return a case of real sizes; with heads of 64 for the ablations of gla, which hold the state in registers."""
    narrow = {"K": 64, "V": 64} if operation is GLA and operation.get(variant).capabilities.by_name_only else {}
    return operation.case(dtype, **(REAL[operation.name] | narrow), **options)


FORMS = [*(("bfloat16", kind) for kind in KINDS), ("float16", {}), ("float32", {})]
"""Dtype of a call, and options of its case."""

REFUSED = {
    ("gla", "hopper", "float32"): "needs float16 or bfloat16",
    ("gla", "hopper_in_turns", "float32"): "needs float16 or bfloat16",
    **{("gla", "hopper_tf32", dtype): "needs float32" for dtype in ("bfloat16", "float16")},
    ("gla", "hopper_tf32", "float32"): "TF32",
    ("linear_rnn", "fused_hopper", "float32"): "needs float16 or bfloat16",
}
"""Words of the reasons for which the tests below skip on a Hopper GPU, by operation, variant and dtype."""


@per_variant(OPERATIONS, all_variants)
def test_nothing_else_is_skipped_on_a_hopper_gpu(operation, variant):
    """Ask as on a Hopper GPU, of which the device is pretended, so that a new refusal is seen and not skipped."""
    pytest.importorskip("triton", reason="without Triton, kernels refuse every call")
    device = str(pretended("sm_90a"))
    for dtype, kind in FORMS:
        query = operation.query(real_case(operation, variant, dtype, **kind), device, grad=True)
        reason, known = operation.get(variant).why_not(query), REFUSED.get((operation.name, variant, dtype))
        assert reason is None if known is None else known in str(reason)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "kind"), FORMS, ids=str)
@per_variant(OPERATIONS, all_variants)
def test_any_variant_takes_a_sequence_cut_at_any_step(operation, variant, dtype, kind, device):
    case = real_case(operation, variant, dtype, **kind)
    for cut in (1, 1000, 2047):
        assert_pieces_equal_the_whole(operation, case, variant, [cut], device=device)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("cuts", [even(2048), uneven(2048)], ids=["even", "uneven"])
@per_variant(OPERATIONS, all_variants)
def test_any_variant_takes_a_sequence_in_many_pieces(operation, variant, cuts, dtype, device):
    assert_pieces_equal_the_whole(operation, real_case(operation, variant, dtype), variant, cuts, device=device)


@pytest.mark.gpu
@pytest.mark.parametrize("direction", BOTH)
@per_variant([GLA], all_variants)
def test_any_variant_passes_states_of_one_decay_per_head(operation, variant, direction, device):
    case = real_case(GLA, variant, "bfloat16", decay_per="head", log_decay_dtype="float32")
    assert_pieces_equal_the_whole(operation, case, variant, even(2048), direction, device)


@pytest.mark.gpu
@pytest.mark.parametrize("direction", BOTH)
@per_variant([GLA, LINEAR_RNN], lambda operation: ["fla"])
def test_the_peers_take_a_cut_sequence(operation, variant, direction, device):
    case = operation.case("bfloat16", **REAL[operation.name])
    assert_pieces_equal_the_whole(operation, case, variant, [1024], direction, device)


@pytest.mark.gpu
@pytest.mark.slow
@per_variant([GLA, GATED_SCAN, LINEAR_RNN], lambda operation: ["compiled"])
def test_the_compiled_variants_take_a_sequence_cut_in_half(operation, variant, device):
    torch.compiler.reset()
    case = operation.case("bfloat16", **{**REAL[operation.name], "T": 128})
    assert_pieces_equal_the_whole(operation, case, variant, [64], device=device)


@pytest.mark.gpu
@pytest.mark.parametrize("decay_per", ["channel", "head"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_fused_has_float32_accuracy_at_real_sizes(dtype, decay_per, device):
    case = GLA.case(dtype, **REAL["gla"], log_decay_dtype="float32", decay_per=decay_per)
    assert_float32_accuracy(case, "fused", device)
