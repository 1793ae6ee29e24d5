"""Tests of shared heads in the variant "hopper" of ``gla``: its kernels read them where they are, and add up their gradients.

The sources of the kernels run on any machine through the emulation in gluon_on_cpu.py, and the kernels are compiled. On a Hopper
GPU results are judged against the float64 oracle. ``assert_near`` bounds the norm of each error, relative
to that of the expected values; ``results`` returns a variant's results and gradients by name.

``device`` is the first GPU, or the CPU. ``arguments_of`` makes small random arguments on the CPU. ``assert_correct`` applies the
whole verification gate, forward and with gradients. ``assert_ok`` requires a verdict of the gate to be right. ``emulate``
replaces the kernels by their emulation for a test. ``grouped`` returns the options of a form of shared heads. ``FORMS`` are forms
of shared heads by name. A test marked ``thorough`` does not run in ``make test``.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from onelaunch.operation import Example
from onelaunch.operation.examples import recorded_builds
from onelaunch.ops.gla.configure_hopper import Segments
from onelaunch.ops.gla.heads import expanded
from onelaunch.workbench.inspection import inspect_build
from onelaunch.workbench.verify import judge
from onelaunch.workbench.verify.poison import poisoned
from tests.ops.cases import (
    GLA,
    arguments_of,
    assert_captured_step_follows_its_inputs,
    assert_correct,
    assert_near,
    assert_ok,
    results,
)
from tests.ops.gluon_on_cpu import emulate
from tests.ops.test_gla_heads import FORMS, each_form, grouped
from tests.ops.test_gla_hopper import ALL_FORMS, each_layout, gpu, made, on_hopper
from tests.ops.test_gla_hopper_emulated import expected

HOPPER = GLA.get("hopper")


def on_a_hopper_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the variant take calls on this machine."""
    from onelaunch.ops.gla.variants import hopper

    pytest.importorskip("triton", reason="launches import their kernels, which import Triton")
    monkeypatch.setattr(hopper, "is_hopper", lambda device: True)


# The sources of the kernels, emulated on a CPU

BOUND = 4e-3
"""Largest norm-wise error, as in test_gla_hopper_emulated.py."""

CASES: dict[str, dict[str, Any]] = {
    "plain": {"initial_state": False, "final_state": False},
    "states_in_segments": {"T": 140, "segments": 2},
    "packed": {"T": 96, "lengths": (30, 0, 1, 65), "log_decay_dtype": "float32"},
    "padded": {"K": 48, "V": 80},
}
"""Options of the emulated cases, of two chunks at least."""


def emulated(
    monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], segments: int = 1
) -> tuple[dict[str, torch.Tensor], list[tuple[torch.Tensor, torch.Tensor]]]:
    """Return results and gradients of the kernels in float64, and the parts of each gradient of shared heads with their sum.

    Gradients of o and of the final state are 1. The kernel that adds up the parts is replaced by a sum of PyTorch, which rounds
    as it does: it has a test of its own.
    """
    launch_hopper = emulate(monkeypatch, segments=segments)
    from onelaunch.ops.gla import launch

    sums = []

    def sum_heads(parts: torch.Tensor, gradient: torch.Tensor) -> None:
        gradient.copy_(parts.unflatten(2, (gradient.shape[2], -1)).sum(3))
        sums.append((parts, gradient))

    monkeypatch.setattr(launch_hopper, "sum_heads", sum_heads)
    initial, offsets, wanted = arguments.get("initial_state"), arguments.get("cu_seqlens"), arguments.get("output_final_state")
    tensors = [arguments[name] for name in "qkvg"]
    call = launch.Attention.of(*tensors, initial, offsets, arguments["q"].shape[3] ** -0.5)
    heads = GLA.bind(**arguments).heads.state
    with poisoned():
        final = launch.empty_final(call, wanted=bool(wanted))
        o = launch_hopper.forward(call, final=final if wanted else None)
        # Equal states are computed once; autograd adds up the gradients of their copies.
        dfinal = torch.full_like(final, heads // final.shape[1]) if wanted else None
        found = launch_hopper.backward(call, torch.ones_like(o), dfinal=dfinal)
    values = {"o": o, **({"final": expanded(final, heads, dim=1)} if wanted else {})}
    values |= {name: getattr(found, name).reshape(arguments[name].shape) for name in "qkvg"}
    if initial is not None:
        values["initial_state"] = found.initial
    return {name: value.double() for name, value in values.items()}, sums


def one_case_each() -> list[Any]:
    """Return every form, layout of log-decays and case. Those but one case for each form and layout are marked as ``every``.

    Four of the others, one of each case, run in ``make test``; the rest do not.
    """
    found = []
    for turn, form in enumerate(FORMS):
        for shift, per in enumerate(("channel", "head")):
            for place, name in enumerate(CASES):
                marks = [] if turn % 2 == 0 and shift == turn // 4 else [pytest.mark.thorough]
                first = (turn + shift) % len(CASES) == place
                found.append(pytest.param(form, per, name, marks=marks if first else pytest.mark.every))
    return found


@pytest.mark.parametrize(("form", "per", "name"), one_case_each())
def test_kernels_compute_results_and_gradients(form, per, name, monkeypatch):
    """Expected are those of the oracle, whose repeated heads autograd adds up."""
    options = {"T": 66, "K": 64, "V": 64, "initial_state": True, "final_state": True, **CASES[name], "decay_per": per}
    segments = options.pop("segments", 1)
    options = {**grouped(form), **options}
    if not options["initial_state"]:
        options.pop("state_heads", None)
    arguments = arguments_of(GLA, **options, dtype="bfloat16")
    found, sums = emulated(monkeypatch, arguments, segments)
    assert_near(found, expected(arguments), BOUND)
    assert all(parts.dtype is torch.float32 and parts.shape[2] == 4 for parts, _ in sums)
    shared = {name for name in "qkv" if arguments[name].shape[2] < 4}
    shared |= {"g"} if per == "channel" and arguments["g"].shape[2] < 4 else set()  # one dg per head is a sum of PyTorch's
    shared |= {"initial"} if options["initial_state"] and options.get("state_heads", 4) < 4 else set()
    assert len(sums) == len(shared)


# The kernels, compiled


SPILLS = {("fewer_k_v_g", "channel", "chunk_state, x (3)"): 4, ("fewest_q", "channel", "chunk_state, x (3)"): 4}
"""Accesses to local memory of kernels that are known to spill, by form, layout of log-decays and kernel: passes back in time."""


@pytest.mark.parametrize(
    ("form", "per", "kernel"),
    [
        pytest.param("fewer_k_v_g", "channel", "gradients", marks=pytest.mark.thorough),
        pytest.param("fewer_k_v_g_and_states", "head", "chunk_state, x (3)", marks=pytest.mark.thorough),
        *(
            pytest.param(form, per, kernel, marks=pytest.mark.every)
            for form in ("fewer_q_and_k", "fewer_k_v_g", "fewest_q")
            for per in ("channel", "head")
            for kernel in ("gradients", "chunk_state", "segment_sum")
        ),
    ],
)
def test_kernels_of_shared_heads_compile(form, per, kernel, monkeypatch):
    on_a_hopper_gpu(monkeypatch)
    options = grouped(form, B=8, T=2048, H=32, K=128, V=128)
    for name in ("q_heads", "k_heads", "v_heads", "g_heads", "state_heads"):
        if name in options:
            options[name] *= 8
    example = Example(GLA.case("bfloat16", **{**options, "decay_per": per}), "forward_backward", name="x")
    builds = [build for build in recorded_builds(HOPPER, [example], "sm_90a") if build.name.startswith(kernel)]
    if kernel != "segment_sum":  # 8 sequences of 32 heads fill the chip without segments, 8 heads of states do not
        assert builds
    for build in builds:
        found = inspect_build(build, "sm_90a")
        assert found.ok or (form, per, build.name) in SPILLS, (build.name, found.problems)
        assert found.spills <= SPILLS.get((form, per, build.name), 0)


# On a GPU


def sized(form: str, per: str, **given: Any) -> Any:
    """Return a bfloat16 case of a form with 4 heads of the output, a few chunks long and a last one that is cut off."""
    return GLA.case("bfloat16", **{**grouped(form, T=300, K=128, V=128), "decay_per": per, **given})


@gpu
@on_hopper
@pytest.mark.parametrize("lengths", [None, (0, 150, 1, 0, 149)], ids=["whole", "packed"])
@pytest.mark.parametrize("given", [{}, ALL_FORMS], ids=["plain", "all_forms"])
@each_layout
@each_form
def test_results_and_gradients_are_correct(form, per, given, lengths, device):
    case = sized(form, per, lengths=lengths, **given)
    assert HOPPER.why_not(GLA.query(case, str(device), grad=True)) is None
    assert_correct(GLA, case, "hopper", device)


@gpu
@on_hopper
@each_layout
@pytest.mark.parametrize("form", ["fewer_q_and_k", "fewer_k_v_g", "fewer_k_v_g_and_states"])
def test_float16_results_are_correct(form, per, device):
    case = GLA.case("float16", **{**grouped(form, T=300, K=64, V=192, final_state=True), "decay_per": per})
    assert_ok(judge(GLA, case, variant="hopper", device=device, directions=("forward",)), GLA, case, "hopper")


@gpu
@on_hopper
@each_layout
@pytest.mark.parametrize(("keys", "values"), [(64, 64), (64, 256), (128, 192), (256, 128), (256, 64)])
@pytest.mark.parametrize("form", ["fewer_q_and_k", "fewer_k_v_g_and_states", "four_numbers"])
def test_other_sizes_of_heads(form, keys, values, per, device):
    assert_correct(GLA, sized(form, per, K=keys, V=values, T=200, final_state=True), "hopper", device)


@gpu
@on_hopper
@each_layout
@pytest.mark.parametrize("decay", ["weak", "strong", "forget", "mixed"])
@pytest.mark.parametrize("form", ["fewer_q_and_k", "fewer_k_v_g"])
def test_every_kind_of_decay(form, decay, per, device):
    assert_correct(GLA, sized(form, per, decay=decay), "hopper", device)


@gpu
@on_hopper
@each_layout
@pytest.mark.parametrize("given", [{}, ALL_FORMS], ids=["plain", "all_forms"])
@pytest.mark.parametrize("form", FORMS)
def test_time_segments(form, given, per, device, monkeypatch):
    """States of shared heads start from sums of segments, which are made once for all heads that share a state."""
    from onelaunch.ops.gla import launch_hopper

    for segments, lengths in ((2, None), (3, (5, 0, 290, 30))):
        monkeypatch.setattr(launch_hopper, "pass_segments", lambda *_, count=segments: Segments(count))
        assert_correct(GLA, sized(form, per, T=325, lengths=lengths, **given), "hopper", device)


@gpu
@on_hopper
@each_layout
@pytest.mark.parametrize("form", ["fewer_q_and_k", "fewer_k_v_g_and_states"])
def test_results_are_those_of_repeated_heads(form, per, device):
    """The same numbers are multiplied in the same order."""
    arguments = made(device, **{**grouped(form, B=2, T=500, final_state=True), "decay_per": per})
    whole = dict(arguments)
    for name in "qkvg":
        whole[name] = arguments[name].repeat_interleave(4 // arguments[name].shape[2], dim=2)
    if "initial_state" in arguments:
        whole["initial_state"] = arguments["initial_state"].repeat_interleave(2, dim=1)
    found, whole_results = (results(GLA, each, "hopper") for each in (arguments, whole))
    whole_results["final_state"] = whole_results["final_state"][:, :: 4 // found["final_state"].shape[1]]
    assert_near(found, whole_results, 1e-4)


@gpu
@on_hopper
@each_layout
@pytest.mark.parametrize("form", ["fewer_q_and_k", "fewer_k_v_g", "fewer_k_v_g_and_states"])
def test_sums_over_heads_are_the_same_to_the_last_bit(form, per, device):
    arguments = made(device, **{**grouped(form, B=2, T=2000, final_state=True), "decay_per": per}, grad=True)
    first = results(GLA, arguments, "hopper")
    for _ in range(10):
        again = results(GLA, arguments, "hopper")
        assert all(torch.equal(again[name], value) for name, value in first.items())


@gpu
@on_hopper
@each_layout
@pytest.mark.parametrize("form", ["fewer_q_and_k", "fewer_k_v_g_and_states"])
def test_a_captured_training_step_follows_its_inputs(form, per, device):
    given = {**grouped(form, T=200, final_state=True), "decay_per": per}
    assert_captured_step_follows_its_inputs(GLA, "hopper", functools.partial(made, device, **given), device)
