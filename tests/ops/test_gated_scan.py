"""Tests of ``gated_scan``: every variant against the oracle, and properties that follow from the recurrence.

Step t has the state ``exp(log_decay_t) * state_(t-1) + v_t`` and the result ``y_t = state_t * silu(gate_t)``.

``assert_near`` bounds the norm of each error, relative to that of the expected values; ``results`` returns a variant's results
and gradients by name. ``arguments_of`` makes float32 arguments with B = 2, T = 9 and V = 6, unless others are given.

``prose.raises`` is ``pytest.raises`` that also compares the message with the entry of this test in tests/snapshots/prose.txt. A
test fails if it does not compare one of its entries, and ``tests/test_prose.py`` if the test or the parameter of an entry is
gone.

``HARD`` are the probes of the scans and longer cases, by name. ``SHORT`` are the cases for Triton's interpreter, by name.
``STATES`` are the options with an initial and a final state. ``NO_STATES`` are the options without states. ``case_of`` returns a
listed case by its name. ``pytorch_variants`` are the variants of plain PyTorch. ``triton_variants`` are the variants with kernels
of our own for any GPU. ``pytorch_variants_by_case`` parametrizes a test over the variants of plain PyTorch and names of cases.
``assert_compiled_correct`` applies the gate to the ``torch.compile`` variant, in training. ``assert_one_call_correct`` checks the
errors of one call, and that it writes all elements. A test marked ``thorough`` does not run in ``make test``, and one marked
``interpret`` runs in Triton's interpreter, with TRITON_INTERPRET=1. ``thorough_but`` marks all parameters but the named ones
``thorough``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from onelaunch.device.architectures import ARCHITECTURES, CHECKED
from onelaunch.errors import VariantUnsupported
from onelaunch.operation import Probe
from onelaunch.operation.examples import builds_for_case
from onelaunch.operation.inputs import DECAYS
from onelaunch.operation.probe import transposed
from onelaunch.ops.gated_scan import batches
from onelaunch.workbench.verify.probes import Prepared
from tests.ops.cases import (
    GATED_SCAN,
    HARD,
    NO_STATES,
    SHORT,
    STATES,
    arguments_of,
    assert_compiled_correct,
    assert_correct,
    assert_near,
    assert_one_call_correct,
    case_of,
    pytorch_variants,
    pytorch_variants_by_case,
    results,
    triton_variants,
)
from tests.thorough import thorough_but

KERNELS = triton_variants(GATED_SCAN)
"""Variants with kernels of our own: one launch, and several."""
BRIEF = [
    *(("fused", name) for name in SHORT),
    *(("separate", name) for name in ("one_step_one_channel", "exactly_a_tile", "packed_final_state_alone", "no_gate")),
]
"""Kernels and cases of every run of the tests. The others, of ``separate``, do not run in ``make test``."""

# Hypothesis takes the same few examples in every run.
FEW = settings(max_examples=15, deadline=None, derandomize=True)


@pytorch_variants_by_case(GATED_SCAN, HARD)
def test_pytorch_variants_are_correct(variant, name):
    assert_correct(GATED_SCAN, case_of(GATED_SCAN, name), variant)


@pytest.mark.parametrize("decay", thorough_but("strong", "forget", "mixed", of=DECAYS))
@pytest.mark.parametrize("variant", pytorch_variants(GATED_SCAN))
def test_pytorch_variants_take_every_kind_of_decay(variant, decay):
    assert_correct(GATED_SCAN, GATED_SCAN.case("float32", B=2, T=100, V=20, decay=decay), variant)


@pytest.mark.thorough
@pytest.mark.slow
class _Results(TorchDispatchMode):
    """Mode that adds up the elements of the tensors that operators return."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        self.elements += found.numel() if isinstance(found, torch.Tensor) else 0
        return found


@pytest.mark.parametrize("run", [GATED_SCAN.reference, lambda **given: GATED_SCAN(**given, variant="eager")])
def test_loops_over_time_take_work_in_proportion_to_the_steps(run):
    """The gradient of ``x[:, t]`` is as large as x, so that a loop over time must not index its inputs so."""
    elements = []
    for length in (64, 128):
        arguments = GATED_SCAN.make_inputs(GATED_SCAN.case("float32", B=1, T=length, V=8), torch.device("cpu"), 0).arguments
        taking = [value.requires_grad_() for name, value in arguments.items() if name in ("v", "log_decay")]
        with _Results() as counted:
            torch.autograd.grad(run(**arguments)[0].sum(), taking)
        elements.append(counted.elements)
    assert elements[1] < 2.2 * elements[0]


def test_the_compiled_variant_is_correct():
    torch.compiler.reset()
    assert_correct(GATED_SCAN, case_of(GATED_SCAN, "shorter_than_a_tile"), "compiled")


@pytest.mark.thorough
@pytest.mark.slow
def test_the_compiled_variant_takes_packed_sequences():
    case = GATED_SCAN.case("float32", B=1, T=9, V=20, decay="mixed", lengths=(0, 4, 0, 0, 4, 1, 0), **STATES)
    assert_compiled_correct(GATED_SCAN, case)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("given", [{}, {"lengths": (0, 4, 2), "final_state": True}], ids=["dense", "packed"])
def test_the_compiled_variant_needs_no_initial_state(given):
    assert_compiled_correct(GATED_SCAN, GATED_SCAN.case("float32", B=1, T=6, V=20, decay="strong", **{**NO_STATES, **given}))


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "sizes"),
    [("float32", {"T": 16, "V": 80}), ("bfloat16", {"T": 18, "V": 16, "log_decay_dtype": "float32"})],
    ids=["full_chunks", "chunks_of_chunks"],
)
def test_the_compiled_variant_scans_chunks(dtype, sizes, monkeypatch):
    """Chunks of 4 steps in place of 16 make the same forms of a scan, whose compilation takes a quarter of the time."""
    from onelaunch.kernels.scan import chunked

    monkeypatch.setattr(chunked, "CHUNK", 4)
    assert_compiled_correct(GATED_SCAN, GATED_SCAN.case(dtype, B=1, decay="mixed", **STATES, **sizes))


@pytest.mark.thorough
@pytest.mark.slow
def test_the_compiled_variant_takes_transposed_inputs():
    probe = Probe(GATED_SCAN.case("float32", B=2, T=6, V=20), transposed("v", "log_decay", "gate", "initial_state"))
    assert_compiled_correct(Prepared(GATED_SCAN, probe), probe.case)


@pytest.mark.interpret
@pytest.mark.parametrize(("variant", "name"), thorough_but(*BRIEF, of=[(variant, name) for name in SHORT for variant in KERNELS]))
def test_kernels_are_correct(variant, name):
    assert_one_call_correct(GATED_SCAN, case_of(GATED_SCAN, name), variant)


@pytest.mark.interpret
@pytest.mark.parametrize("variant", thorough_but("fused", of=KERNELS))
def test_kernels_pass_the_whole_gate(variant):
    """Apply the whole verification gate (``assert_correct``), not one call as in the other tests of kernels."""
    assert_correct(GATED_SCAN, GATED_SCAN.case("float16", B=1, T=30, V=16), variant)


@pytest.mark.interpret
@pytest.mark.thorough
def test_groups_of_tiles_propagate_the_carry():
    """The sequence is longer than one group of the look-back, in both passes."""
    from onelaunch.kernels.scan import launch

    case = case_of(GATED_SCAN, "group_chain")
    tiles = launch.scan_tiles(case.sizes["T"], case.sizes["V"])
    assert case.sizes["T"] > tiles.group * tiles.steps
    assert_one_call_correct(GATED_SCAN, case, "fused")


@pytest.mark.parametrize("architecture", CHECKED)
@pytest.mark.parametrize("values", [1, 16, 17, 64])
def test_no_element_that_a_cta_polls_has_copies_in_several_threads(architecture, values):
    """Eight rows of words are polled, one word per channel of a tile; a warp has 64 threads on AMD."""
    from onelaunch.kernels.scan.look_back import POLL_ROWS

    case = GATED_SCAN.case("bfloat16", B=2, T=300, V=values)
    builds = builds_for_case(case, architecture, ["forward_backward"], ["fused"])
    looking_back = [build for build in builds if "GROUP" in build.kernel.arg_names]
    assert len(looking_back) == 2  # the scan and its backward pass
    for build in looking_back:
        channels = build.constants[build.kernel.arg_names.index("BV"),]
        assert build.num_warps * ARCHITECTURES[architecture].warp <= POLL_ROWS.value * channels


@pytest.mark.interpret
@pytest.mark.parametrize("variant", ["fused", "separate"])
def test_the_values_may_be_their_own_gate(variant):
    """Kernels without a gate are passed v in its place, so that a gate must not be recognized by its identity."""
    v = torch.randn(2, 20, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
    log_decay = -torch.rand(2, 20, 8, generator=torch.Generator().manual_seed(2))
    found = []
    for name in (variant, "eager"):
        y, _ = GATED_SCAN(v, log_decay, v, variant=name)
        found.append((y, *torch.autograd.grad(y.sum(), v)))
    torch.testing.assert_close(*found)


@pytest.mark.interpret
@pytest.mark.parametrize(
    "name",
    thorough_but(
        "one_step_one_channel",
        "exactly_a_tile",
        "packed_with_empty_sequences",
        "no_gate",
        of=[
            "one_step_one_channel",
            "one_step_over_a_tile",
            "exactly_a_tile",
            "packed_with_empty_sequences",
            "packed_many_short",
            "no_gate",
            "no_gate_packed",
        ],
    ),
)
@pytest.mark.parametrize("variant", thorough_but("fused", of=KERNELS))
def test_the_sequential_kernel_is_correct(variant, name, monkeypatch):
    """Make the launcher use the kernel that loops over time, which it otherwise uses on a GPU, for very many channels.

    ``sequential_tiles`` is asked once, as if for a GPU with one SM, and its answer then replaces it.
    """
    from onelaunch.kernels.scan import forward, launch

    walked = []
    kernel = forward.sequential_scan_gate_kernel

    class Watched:
        def run(self, *arguments, grid, **constants):
            walked.append(grid)
            return kernel.run(*arguments, grid=grid, **constants)

    monkeypatch.setattr(launch, "processors", lambda device: 1)
    walk = launch.sequential_tiles(torch.device("cuda"), 1 << 20, 80)
    assert walk is not None
    monkeypatch.setattr(launch, "sequential_tiles", lambda *sizes: walk)
    monkeypatch.setattr(forward, "sequential_scan_gate_kernel", Watched())
    assert_one_call_correct(GATED_SCAN, case_of(GATED_SCAN, name), variant)
    assert walked


@pytest.mark.interpret
@pytest.mark.parametrize("variant", triton_variants(GATED_SCAN))
def test_the_interpreter_is_refused_bfloat16(variant, prose):
    arguments = arguments_of(GATED_SCAN, dtype="bfloat16")
    with prose.raises(VariantUnsupported, match=r"bfloat16.*eager, chunked"):
        GATED_SCAN(**arguments, variant=variant)


@pytest.mark.interpret
@pytest.mark.parametrize("variant", triton_variants(GATED_SCAN))
def test_a_workspace_serves_calls_of_other_lengths_and_widths(variant):
    """Launches share the memory in which tiles publish carries. Words that one launch left must not be read by the next."""
    for length, width in ((70, 20), (33, 40), (70, 20), (20, 70), (33, 40)):
        case = GATED_SCAN.case("float32", B=1, T=length, V=width)
        assert_one_call_correct(GATED_SCAN, case, variant, "forward")


# Properties of the recurrence


@st.composite
def lengths(draw):
    """Draw the lengths of packed sequences, not all of them 0."""
    return tuple(draw(st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(any)))


def scan_arguments(length: int, seed: int, **given: Any) -> dict[str, Any]:
    """Return the tensors among random arguments, for one sequence of three channels."""
    arguments = arguments_of(GATED_SCAN, B=1, T=length, V=3, decay="model", seed=seed, **given)
    return {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}


def check_split(length, cut, seed, variant):
    """Require two calls for the steps before and after ``cut``, with the state passed on, to equal one call.

    An empty part is left to ``auto``, since not every variant takes it.
    """
    cut = min(cut, length)
    whole = scan_arguments(length, seed, initial_state=True)
    y, final = GATED_SCAN(**whole, output_final_state=True, variant=variant)
    steps = {name: whole[name] for name in ("v", "log_decay", "gate")}
    state, parts = whole["initial_state"], []
    for part in (slice(0, cut), slice(cut, length)):
        piece, state = GATED_SCAN(
            **{name: value[:, part] for name, value in steps.items()},
            initial_state=state,
            output_final_state=True,
            variant=variant if part.stop > part.start else "auto",
        )
        parts.append(piece)
    assert_near({"y": torch.cat(parts, 1), "final_state": state}, {"y": y, "final_state": final}, 2e-6)


def check_packed(lengths, seed, variant):
    """Require a call for packed sequences to equal one call for each of them. Empty ones are left to ``auto``."""
    packed = scan_arguments(sum(lengths), seed, lengths=lengths, initial_state=True)
    y, final = GATED_SCAN(**packed, output_final_state=True, variant=variant)
    assert final.shape == (len(lengths), 3)
    for index, end in enumerate(packed["cu_seqlens"].tolist()[1:]):
        start = end - lengths[index]
        piece, state = GATED_SCAN(
            **{name: packed[name][:, start:end] for name in ("v", "log_decay", "gate")},
            initial_state=packed["initial_state"][index : index + 1],
            output_final_state=True,
            variant=variant if end > start else "auto",
        )
        expected = {"y": piece, "final_state": state}
        assert_near({"y": y[:, start:end], "final_state": final[index : index + 1]}, expected, 2e-6)


@pytest.mark.parametrize("variant", pytorch_variants(GATED_SCAN))
@FEW
@given(length=st.integers(1, 300), cut=st.integers(0, 300), seed=st.integers(0, 9))
def test_a_sequence_may_be_cut_anywhere(variant, length, cut, seed):
    check_split(length, cut, seed, variant)


@pytest.mark.parametrize("variant", pytorch_variants(GATED_SCAN))
@FEW
@given(lengths=lengths(), seed=st.integers(0, 9))
def test_a_packed_batch_equals_its_parts(variant, lengths, seed):
    check_packed(lengths, seed, variant)


@pytest.mark.interpret
@pytest.mark.parametrize("cut", [1, 64, 65])
def test_kernels_may_cut_a_sequence_anywhere(cut):
    check_split(70, cut, 0, "fused")


@pytest.mark.interpret
def test_kernels_treat_packed_sequences_as_separate():
    check_packed((3, 0, 61, 1, 5), 0, "fused")


@pytest.mark.parametrize("variant", pytorch_variants(GATED_SCAN))
@FEW
@given(length=st.integers(1, 200), seed=st.integers(0, 9))
def test_without_decay_it_is_a_running_sum(variant, length, seed):
    arguments = scan_arguments(length, seed, initial_state=False)
    arguments["log_decay"] = torch.zeros_like(arguments["v"])
    y = GATED_SCAN(**arguments, variant=variant)
    expected = arguments["v"].double().cumsum(1) * F.silu(arguments["gate"].double())
    assert_near({"y": y}, {"y": expected.float()}, 2e-6)


@pytest.mark.parametrize("variant", pytorch_variants(GATED_SCAN))
@FEW
@given(length=st.integers(1, 200), seed=st.integers(0, 9))
def test_with_a_decay_of_zero_every_step_stands_alone(variant, length, seed):
    arguments = scan_arguments(length, seed, initial_state=True)
    arguments["log_decay"] = torch.full_like(arguments["v"], -torch.inf)
    y = GATED_SCAN(**arguments, variant=variant)
    assert_near({"y": y}, {"y": arguments["v"] * F.silu(arguments["gate"])}, 1e-7)


@pytest.mark.interpret
@pytest.mark.parametrize("variant", triton_variants(GATED_SCAN))
def test_kernels_are_exact_without_decay_and_with_a_decay_of_zero(variant):
    """Exact but for float32 rounding: log-decays of 0 make a running sum, and of -inf leave each step alone."""
    arguments = scan_arguments(70, 0, initial_state=False)
    arguments["log_decay"] = torch.zeros_like(arguments["v"])
    y = GATED_SCAN(**arguments, variant=variant)
    assert_near({"y": y}, {"y": arguments["v"].cumsum(1) * F.silu(arguments["gate"])}, 2e-6)
    arguments["log_decay"] = torch.full_like(arguments["v"], -torch.inf)
    y = GATED_SCAN(**arguments, variant=variant)
    assert_near({"y": y}, {"y": arguments["v"] * F.silu(arguments["gate"])}, 2e-7)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("variant", pytorch_variants(GATED_SCAN))
def test_results_have_the_promised_dtypes_and_shapes(variant, dtype):
    arguments = arguments_of(GATED_SCAN, dtype=dtype, initial_state=True, final_state=True)
    y, final = GATED_SCAN(**arguments, variant=variant)
    assert y.dtype is arguments["v"].dtype
    assert y.shape == arguments["v"].shape
    assert final.dtype is torch.float32
    assert final.shape == (2, 6)
    arguments["output_final_state"] = False
    assert isinstance(GATED_SCAN(**arguments, variant=variant), torch.Tensor)


@pytest.mark.parametrize("variant", pytorch_variants(GATED_SCAN))
def test_offsets_may_be_int64(variant):
    arguments = arguments_of(GATED_SCAN, B=1, lengths=(4, 0, 5), grad=True, final_state=True)
    wide = {**arguments, "cu_seqlens": arguments["cu_seqlens"].long()}
    assert_near(results(GATED_SCAN, wide, variant), results(GATED_SCAN, arguments, variant), 0)


@pytest.mark.interpret
@pytest.mark.parametrize("variant", thorough_but("fused", of=KERNELS))
@pytest.mark.parametrize("gate", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_a_batch_of_more_sequences_than_a_launch_takes_is_split(variant, gate, monkeypatch):
    """With at most 4 CTAs along y and two slices of channels, five sequences take three launches."""
    monkeypatch.setattr(batches, "LARGEST_GRID_Y", 4)
    case = GATED_SCAN.case(torch.float32, B=5, T=9, V=20, gate=gate, initial_state=True, final_state=True)
    assert_one_call_correct(GATED_SCAN, case, variant)
    assert_one_call_correct(GATED_SCAN, case, variant, "forward")
