"""Tests of ``linear_rnn``: every variant against the oracle, and properties that follow from its contract.

``assert_near`` bounds the norm of each error, relative to that of the expected values. ``arguments_of`` makes float32 arguments
with B = 2, T = 9, D = 5 and V = 6, unless others are given.

``prose.raises`` is ``pytest.raises`` that also compares the message with the entry of this test in tests/snapshots/prose.txt. A
test fails if it does not compare one of its entries, and ``tests/test_prose.py`` if the test or the parameter of an entry is
gone.

``BOTH`` are the directions: forward, and forward with gradients. ``HARD`` are the probes of the scans and longer cases, by name.
``SHORT`` are the cases for Triton's interpreter, by name. ``STATES`` are the options with an initial and a final state.
``NO_STATES`` are the options without states. ``case_of`` returns a listed case by its name. ``pytorch_variants`` are the variants
of plain PyTorch. ``triton_variants`` are the variants with kernels of our own for any GPU. ``variants_by_case`` parametrizes a
test over variants and names of cases. ``pytorch_variants_by_case`` parametrizes a test over the variants of plain PyTorch and
names of cases. ``assert_compiled_correct`` applies the gate to the ``torch.compile`` variant, in training.
``assert_one_call_correct`` checks the errors of one call, and that it writes all elements. ``assert_ok`` requires a verdict of
the gate to be right. A test marked ``thorough`` does not run in ``make test``, and one marked ``interpret`` runs in Triton's
interpreter, with TRITON_INTERPRET=1. ``thorough_but`` marks all parameters but the named ones ``thorough``.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onelaunch.errors import VariantUnsupported
from onelaunch.operation.inputs import DECAYS
from onelaunch.ops import gated_scan, linear_rnn
from onelaunch.ops.gated_scan import batches
from onelaunch.workbench.verify import judge_control
from tests.ops.cases import (
    BOTH,
    HARD,
    LINEAR_RNN,
    NO_STATES,
    SHORT,
    STATES,
    arguments_of,
    assert_compiled_correct,
    assert_correct,
    assert_near,
    assert_ok,
    assert_one_call_correct,
    case_of,
    pytorch_variants,
    pytorch_variants_by_case,
    triton_variants,
    variants_by_case,
)
from tests.thorough import thorough_but

# Hypothesis takes the same few examples in every run.
FEW = settings(max_examples=15, deadline=None, derandomize=True)

ONE_LAUNCH = [name for name in triton_variants(LINEAR_RNN) if "projection" in LINEAR_RNN.variants[name].tags["fuses"]]
"""Variants whose kernel computes the projection too."""
SEVERAL_LAUNCHES = [name for name in triton_variants(LINEAR_RNN) if name not in ONE_LAUNCH]
"""Variants with several launches. They end with the kernels of ``gated_scan``, whose tests have the whole list of cases."""


@pytorch_variants_by_case(LINEAR_RNN, HARD)
def test_pytorch_variants_are_correct(variant, name):
    assert_correct(LINEAR_RNN, case_of(LINEAR_RNN, name), variant)


@pytest.mark.parametrize("decay", thorough_but("strong", "forget", "mixed", of=DECAYS))
@pytest.mark.parametrize("variant", pytorch_variants(LINEAR_RNN))
def test_pytorch_variants_take_every_kind_of_decay(variant, decay):
    assert_correct(LINEAR_RNN, LINEAR_RNN.case("float32", B=2, T=100, D=24, V=20, decay=decay), variant)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize(
    "given", [{"log_decay_dtype": "float32", **STATES}, {"lengths": (5,), **NO_STATES}], ids=["dense", "packed"]
)
def test_the_compiled_variant_is_correct(given):
    assert_compiled_correct(LINEAR_RNN, LINEAR_RNN.case("float16", B=1, T=5, D=24, V=20, **given))


@pytest.mark.parametrize("name", ["one_step_one_channel", "exactly_a_tile", "bfloat16"])
def test_the_matrix_product_alone_is_correct(name):
    """The product is a control: a part of the operation that studies time in addition."""
    case = case_of(LINEAR_RNN, name)
    assert_ok(judge_control(LINEAR_RNN, case, "gemm_alone", directions=BOTH), LINEAR_RNN, case, "gemm_alone")


@pytest.mark.parametrize("name", ["one_step_one_channel", "exactly_a_tile", "bfloat16"])
def test_reading_the_weight_alone_is_correct(name):
    case = case_of(LINEAR_RNN, name)
    assert_ok(judge_control(LINEAR_RNN, case, "weight_alone"), LINEAR_RNN, case, "weight_alone")


@pytest.mark.interpret
@variants_by_case(ONE_LAUNCH, SHORT)
def test_one_launch_is_correct(variant, name):
    assert_one_call_correct(LINEAR_RNN, case_of(LINEAR_RNN, name), variant)


@pytest.mark.interpret
@pytest.mark.parametrize(
    "name",
    thorough_but(
        "shorter_than_a_tile", of=["one_step_one_channel", "shorter_than_a_tile", "packed_final_state_alone", "no_gate"]
    ),
)
@pytest.mark.parametrize("variant", SEVERAL_LAUNCHES)
def test_several_launches_are_correct(variant, name):
    assert_one_call_correct(LINEAR_RNN, case_of(LINEAR_RNN, name), variant)


@pytest.mark.interpret
@pytest.mark.parametrize("variant", thorough_but("fused_chunked", of=triton_variants(LINEAR_RNN)))
def test_kernels_pass_the_whole_gate(variant):
    """Apply the whole verification gate (``assert_correct``), not one call as in the other tests of kernels."""
    case = LINEAR_RNN.case("float16", B=1, T=30, D=24, V=16, initial_state=True, final_state=True)
    assert_correct(LINEAR_RNN, case, variant)


@pytest.mark.interpret
@pytest.mark.parametrize(
    ("rows", "inner", "columns", "dtype"),
    [(1, 1, 1, torch.float32), (65, 24, 20, torch.float16), (7, 200, 80, torch.float32), (130, 65, 129, torch.float16)],
)
def test_the_matrix_kernel_multiplies_any_strides(rows, inner, columns, dtype):
    from onelaunch.ops.linear_rnn import launch

    a, b = torch.randn(rows, inner), torch.randn(inner, columns)
    expected = (a.to(dtype).double() @ b.to(dtype).double()).to(dtype)
    tolerance = 1e-3 if dtype is torch.float16 else 1e-6
    sliced = torch.randn(2 * rows, 3 * inner).to(dtype)[::2, ::3].copy_(a)
    for left in (a.to(dtype), a.to(dtype).t().contiguous().t(), sliced):
        for right in (b.to(dtype), b.to(dtype).t().contiguous().t()):
            assert_near({"out": launch.matmul(left, right)}, {"out": expected}, tolerance)


@pytest.mark.interpret
@pytest.mark.parametrize("variant", triton_variants(LINEAR_RNN))
def test_the_interpreter_is_refused_bfloat16(variant, prose):
    arguments = arguments_of(LINEAR_RNN, dtype="bfloat16")
    with prose.raises(VariantUnsupported, match=r"bfloat16.*eager, chunked"):
        linear_rnn(**arguments, variant=variant)


@pytest.mark.interpret
@pytest.mark.parametrize("variant", thorough_but("fused_chunked", of=triton_variants(LINEAR_RNN)))
def test_a_batch_of_more_sequences_than_a_launch_takes_is_split(variant, monkeypatch):
    """With at most 2 CTAs along y and one slice of channels, five sequences take three launches; the weight is shared."""
    monkeypatch.setattr(batches, "LARGEST_GRID_Y", 2)
    case = LINEAR_RNN.case(torch.float32, B=5, T=9, D=16, V=16, initial_state=True, final_state=True)
    assert_one_call_correct(LINEAR_RNN, case, variant)


@pytest.mark.parametrize("variant", triton_variants(LINEAR_RNN))
def test_more_channels_than_a_launchs_ctas_are_refused(variant):
    """A grid has at most 65535 CTAs along y, one for each slice of 16 channels, the narrowest tile. Sequences are split."""
    many, fits, too_many = (
        LINEAR_RNN.query(LINEAR_RNN.case(torch.float16, B=batch, T=8, D=16, V=channels), "cuda:0", grad=False)
        for batch, channels in ((1 << 20, 64), (1, 1048560), (1, 1048561))
    )
    assert "1048560 channels" in (LINEAR_RNN.get(variant).why_not(too_many) or "")
    for query in (many, fits):
        assert "channels" not in (LINEAR_RNN.get(variant).why_not(query) or "")


@pytest.mark.interpret
def test_the_stepwise_variant_refuses_sizes_beyond_its_registers(prose):
    arguments = arguments_of(LINEAR_RNN, B=1, T=2, D=2049, V=2)
    with prose.raises(VariantUnsupported, match="2048"):
        linear_rnn(**arguments, variant="fused_stepwise")


# Properties of the contract


@pytest.mark.parametrize("variant", pytorch_variants(LINEAR_RNN))
def test_linear_rnn_equals_a_projection_and_a_gated_scan(variant):
    arguments = arguments_of(LINEAR_RNN, T=70, initial_state=True, final_state=True)
    v = arguments["x"] @ arguments["weight"]
    rest = {name: value for name, value in arguments.items() if name not in ("x", "weight")}
    expected = gated_scan(v, **rest, variant="eager")
    given_results = linear_rnn(**arguments, variant=variant)
    names = ("y", "final_state")
    assert_near(dict(zip(names, given_results, strict=True)), dict(zip(names, expected, strict=True)), 2e-6)


@pytest.mark.parametrize("variant", pytorch_variants(LINEAR_RNN))
@FEW
@given(length=st.integers(2, 300), cut=st.integers(1, 299), seed=st.integers(0, 9))
def test_a_sequence_may_be_cut_anywhere(variant, length, cut, seed):
    cut = min(cut, length - 1)
    arguments = arguments_of(LINEAR_RNN, B=2, T=length, V=3, seed=seed, initial_state=True, final_state=True)
    y, final = linear_rnn(**arguments, variant=variant)
    parts, state = [], arguments["initial_state"]
    for part in (slice(0, cut), slice(cut, length)):
        steps = {name: arguments[name][:, part] for name in ("x", "log_decay", "gate")}
        piece, state = linear_rnn(
            **steps, weight=arguments["weight"], initial_state=state, output_final_state=True, variant=variant
        )
        parts.append(piece)
    assert_near({"y": torch.cat(parts, 1), "final_state": state}, {"y": y, "final_state": final}, 2e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("variant", pytorch_variants(LINEAR_RNN))
def test_results_have_the_promised_dtypes_and_shapes(variant, dtype):
    arguments = arguments_of(LINEAR_RNN, dtype=dtype, initial_state=True, final_state=True)
    y, final = linear_rnn(**arguments, variant=variant)
    assert y.dtype is arguments["x"].dtype
    assert y.shape == (2, 9, 6)
    assert final.dtype is torch.float32
    assert final.shape == (2, 6)
    arguments["output_final_state"] = False
    assert isinstance(linear_rnn(**arguments, variant=variant), torch.Tensor)


def test_example_calls_reach_every_kernel_on_hopper():
    pytest.importorskip("triton")
    names = [build.kernel.__name__ for build in LINEAR_RNN.get("fused_chunked").builds("sm_90a")]
    assert names.count("project_scan_gate_chunked_hopper_kernel") == 4  # narrow tiles, wide ones, more columns, no gate
    assert names.count("project_scan_gate_kernel") == 1
    assert {build.kernel.__name__ for build in LINEAR_RNN.get("fused_chunked").builds("sm_80")} == {
        "project_scan_gate_kernel",
        "scan_gate_backward_kernel",
    }
