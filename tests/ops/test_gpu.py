"""Tests of ``gated_scan``, ``linear_rnn`` and ``gla`` that need a GPU.

They cover compiled kernels against the oracle, CUDA graphs, streams, sizes beyond 32 bits, and determinism.

``assert_near`` bounds the norm of each error, relative to that of the expected values; ``results`` returns a variant's results
and gradients by name.

``OPERATIONS`` are ``gated_scan``, ``linear_rnn`` and ``gla``. ``BOTH`` are the directions: forward, and forward with gradients.
``HARD`` are the probes of the scans and longer cases, by name. ``GLA_HARD`` are the probes of ``gla`` and longer cases, by name.
``case_of`` returns a listed case by its name. ``decay_of`` names an operation's log-decay argument. ``pytorch_variants`` are the
variants of plain PyTorch. ``triton_variants`` are the variants with kernels of our own for any GPU. ``variants_by_case``
parametrizes a test over variants and names of cases. ``assert_correct`` applies the whole verification gate, forward and with
gradients. ``differentiable`` returns the arguments that take gradients. ``weights_like`` returns the weights of a loss, different
for each element.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from onelaunch import dispatch
from onelaunch.device.hardware import processors
from onelaunch.launch import workspace as memory
from onelaunch.operation import Operation
from onelaunch.operation.inputs import DECAYS
from onelaunch.ops import gated_scan
from onelaunch.ops.gated_scan.reference import reference
from onelaunch.ops.gla.contract import FUSED_RECURRENT
from onelaunch.workbench.verify import judge
from tests.ops.cases import (
    BOTH,
    GATED_SCAN,
    GLA,
    GLA_HARD,
    HARD,
    LINEAR_RNN,
    OPERATIONS,
    assert_captured_step_follows_its_inputs,
    assert_correct,
    assert_near,
    case_of,
    decay_of,
    differentiable,
    pytorch_variants,
    results,
    triton_variants,
    variants_by_case,
    weights_like,
)

pytestmark = [pytest.mark.gpu]

KERNELS = [
    pytest.param(operation, variant, id=f"{operation.name}-{variant}")
    for operation in OPERATIONS
    for variant in triton_variants(operation)
]
each_kernel = pytest.mark.parametrize(("operation", "variant"), KERNELS)
each_kernel_and_chunks = pytest.mark.parametrize(
    ("operation", "variant"), [*KERNELS, pytest.param(GLA, "chunked", id="gla-chunked")]
)
"""Parametrization over all kernels, and the plain PyTorch that a GPU runs if no kernel supports a call of ``gla``."""
each_operation = pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)


def made(
    operation: Operation[..., Any], device: torch.device, *, grad: bool = False, seed: int = 0, **given: Any
) -> dict[str, Any]:
    """Return random arguments on the GPU: float16, with states and several tiles in every dimension, unless ``given`` differs."""
    sizes = {"B": 2, "T": 500, "H": 3, "D": 64, "K": 48, "V": 80}
    chosen = {"dtype": "float16", "initial_state": True, "final_state": True} | given
    options: dict[str, Any] = {
        key: chosen.get(key, sizes.get(key)) for key in {*chosen, *sizes} if key not in sizes or key in operation.dimensions
    }
    reading = operation.make_inputs(operation.case(**options), device, seed)
    for name in reading.differentiable if grad else ():
        reading.arguments[name].requires_grad_()
    return reading.arguments


def tensors(arguments: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the arguments that are tensors; ``test_hopper.py`` uses this, ``made`` and ``assert_same_bits`` too."""
    return {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}


def assert_same_bits(found: Mapping[Any, torch.Tensor], expected: Mapping[Any, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    different = {
        name: int((found[name] != value).sum()) for name, value in expected.items() if not torch.equal(found[name], value)
    }
    assert not different, f"elements that differ: {different}"


# Comparison with the oracle


@variants_by_case(triton_variants(GATED_SCAN), HARD)
def test_scan_kernels_are_correct(variant, name, device):
    assert_correct(GATED_SCAN, case_of(GATED_SCAN, name), variant, device)


@variants_by_case([*pytorch_variants(GLA), *triton_variants(GLA), FUSED_RECURRENT], GLA_HARD)
def test_variants_of_gla_are_correct(variant, name, device):
    """Plain PyTorch is included, because a GPU runs it where no kernel supports a call."""
    case = case_of(GLA, name)
    if reason := GLA.get(variant).why_not(GLA.query(case, str(device), grad=True)):
        pytest.skip(reason)
    assert_correct(GLA, case, variant, device)


@variants_by_case(triton_variants(LINEAR_RNN), HARD)
def test_layer_kernels_are_correct(variant, name, device):
    assert_correct(LINEAR_RNN, case_of(LINEAR_RNN, name), variant, device)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("decay", DECAYS)
@each_kernel
def test_kernels_take_every_kind_of_decay(operation, variant, decay, dtype, device):
    sizes = {name: {"B": 2, "T": 300, "H": 3, "D": 96, "K": 48, "V": 80}[name] for name in operation.dimensions}
    case = operation.case(dtype, decay=decay, initial_state=True, final_state=True, **sizes)
    assert_correct(operation, case, variant, device)


@pytest.mark.parametrize("lengths", [None, (0, 70, 0, 1, 129, 0)])
@pytest.mark.parametrize("variant", triton_variants(GATED_SCAN))
def test_the_sequential_kernel_for_many_channels(variant, lengths, device):
    from onelaunch.kernels.scan import launch

    # The kernel is used if there are at least three CTAs, of 32 channels each, for every SM.
    width = 128 * processors(device) + 5
    case = GATED_SCAN.case("bfloat16", B=1, T=200, V=width, lengths=lengths)
    assert launch.sequential_tiles(device, 1, width) is not None
    assert_correct(GATED_SCAN, case, variant, device)


@pytest.mark.parametrize(("operation", "name"), [(LINEAR_RNN, name) for name in HARD] + [(GLA, name) for name in GLA_HARD])
def test_the_peer_is_correct_or_outside_the_gate(operation, name, device):
    """The peer, "fla", calls the package flash-linear-attention. It may be as inexact as its own tests allow."""
    pytest.importorskip("fla")
    case = case_of(operation, name)
    if reason := operation.get("fla").why_not(operation.query(case, str(device), grad=True)):
        pytest.skip(reason)
    verdict = judge(operation, case, variant="fla", device=device, directions=BOTH)
    assert verdict.ok or verdict.outside, verdict.explain()


@pytest.mark.parametrize(("dtype", "decay"), [("float16", "model"), ("bfloat16", "mixed"), ("float32", "weak")])
@pytest.mark.parametrize(("operation", "variant"), [each for each in KERNELS if each.values[0] is not GLA])
def test_a_very_long_sequence(operation, variant, dtype, decay, device):
    """131072 steps are far more than the look-back reads at once. The stepwise PyTorch oracle would take minutes."""
    arguments = made(operation, device, B=1, T=131072, V=32, dtype=dtype, decay=decay)
    y, final = operation(**arguments, variant=variant)
    exact = {name: value.double() if value.is_floating_point() else value for name, value in tensors(arguments).items()}
    v = exact["v"] if "v" in exact else exact["x"] @ exact["weight"]
    expected_s = scan_in_double(v, exact["log_decay"].exp(), exact["initial_state"])
    expected = {"y": expected_s * torch.nn.functional.silu(exact["gate"]), "final_state": expected_s[:, -1]}
    tolerance = {"float16": 1e-3, "bfloat16": 8e-3, "float32": 2e-5}[dtype]
    found = {"y": y.double(), "final_state": final.double()}
    assert_near(found, expected, 2 * tolerance)  # v or the states may be stored in the low-precision dtype


def scan_in_double(v: torch.Tensor, decay: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """Compute all states in float64 by doubling: log2(T) steps over whole tensors."""
    value, factor = v.clone(), decay.clone()
    value[:, 0] += factor[:, 0] * state
    step = 1
    while step < v.shape[1]:
        shifted_value, shifted_factor = value[:, :-step].clone(), factor[:, :-step].clone()
        value[:, step:] += factor[:, step:] * shifted_value
        factor[:, step:] *= shifted_factor
        step *= 2
    return value


def test_tensors_of_more_than_2_31_elements(device):
    """Offsets beyond 2^31 elements are correct: the last elements are as accurate as the first."""
    batch, length, width = 2, 1 << 20, 1040
    assert batch * length * width > 1 << 31
    if torch.cuda.get_device_properties(device).total_memory < 40 << 30:
        pytest.skip("needs 40 GB")
    v = torch.empty(batch, length, width, dtype=torch.float16, device=device).normal_()
    log_decay = torch.empty_like(v).uniform_(-1, -0.5)
    gate = torch.empty_like(v).normal_()
    for variant in triton_variants(GATED_SCAN):
        y = GATED_SCAN(v, log_decay, gate, variant=variant)
        for b in (0, batch - 1):
            for start in (0, length // 2 - 64, length - 128):
                part = (slice(b, b + 1), slice(max(start - 64, 0), start + 128))  # decays below exp(-32) in 64 steps
                expected, _ = reference(v[part].double(), log_decay[part].double(), gate[part].double())
                skip = min(start, 64)
                assert_near({"y": y[b : b + 1, start : start + 128].double()}, {"y": expected[:, skip:]}, 1e-3)
        del y


# Strides


@each_kernel
def test_slices_of_a_wide_projection(operation, variant, device):
    arguments = made(operation, device, grad=True)
    expected = results(operation, arguments, variant)
    changed = dict(arguments)
    for name, value in differentiable(arguments).items():
        wide = torch.full((*value.shape[:-1], 3 * value.shape[-1]), torch.nan, dtype=value.dtype, device=device)
        part = wide[..., value.shape[-1] : 2 * value.shape[-1]]
        changed[name] = part.copy_(value.detach()).requires_grad_()
    assert_near(results(operation, changed, variant), expected, 1e-3)


@each_kernel
def test_transposed_inputs_and_expanded_gradients(operation, variant, device):
    arguments = made(operation, device, grad=True)
    changed = dict(arguments)
    for name, value in differentiable(arguments).items():
        changed[name] = value.detach().transpose(0, -1).contiguous().transpose(0, -1).requires_grad_()
    found = {}
    for kind, given in (("plain", arguments), ("transposed", changed)):
        y, final = operation(**given, variant=variant)
        # The gradients of y and final are expanded: all elements of each share one address.
        gradients = torch.autograd.grad(y.sum() + final.sum(), list(differentiable(given).values()))
        found[kind] = {"y": y.detach(), **dict(zip(differentiable(given), gradients, strict=True))}
    y, final = operation(**arguments, variant=variant)
    ones = [torch.ones_like(y), torch.ones_like(final)]
    gradients = torch.autograd.grad([y, final], list(differentiable(arguments).values()), ones)
    expected = {"y": y.detach(), **dict(zip(differentiable(arguments), gradients, strict=True))}
    assert_near(found["plain"], expected, 1e-3)
    assert_near(found["transposed"], expected, 2e-3)


# Determinism


@pytest.mark.parametrize("lengths", [None, (0, 3000, 1, 0, 999)])
@each_kernel_and_chunks
def test_results_are_the_same_to_the_last_bit(operation, variant, lengths, device):
    """Results do not depend on the order in which tiles finish, alone or together with other work on the device."""
    given: dict[str, Any] = {"B": 1, "lengths": lengths} if lengths else {"B": 4}
    arguments = made(operation, device, T=4000, grad=True, dtype="float32", **given)
    first = results(operation, arguments, variant)
    noise, other = torch.randn(2048, 2048, device=device), torch.cuda.Stream(device)
    for run in range(20):
        if run % 2:
            with torch.cuda.stream(other):
                noise @ noise
        assert_same_bits(results(operation, arguments, variant), first)
    torch.cuda.synchronize(device)


# CUDA graphs


@pytest.mark.parametrize("lengths", [None, (0, 300, 0, 200)])
@each_kernel_and_chunks
def test_a_captured_graph_follows_its_inputs(operation, variant, lengths, device):
    """Three calls in one graph are replayed with new inputs, on another stream, between eager calls."""
    given: dict[str, Any] = {"B": 1, "lengths": lengths} if lengths else {}
    arguments = made(operation, device, **given)
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.no_grad(), torch.cuda.stream(side):
        operation(**arguments, variant=variant)
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        captured = [operation(**arguments, variant=variant) for _ in range(3)]
    replay_on = torch.cuda.Stream(device)
    for seed in range(1, 6):
        fresh = made(operation, device, seed=seed, **given)
        for name, value in tensors(arguments).items():
            value.copy_(fresh[name])
        expected = operation(**fresh, variant=variant)
        torch.cuda.synchronize(device)
        with torch.cuda.stream(replay_on):
            graph.replay()
        torch.cuda.synchronize(device)
        for outputs in captured:
            assert_same_bits(dict(enumerate(outputs)), dict(enumerate(expected)))


@each_kernel_and_chunks
def test_a_captured_training_step(operation, variant, device):
    # Kernels of ``gated_scan`` have no matrix products: their results must be equal bitwise.
    maker = functools.partial(made, operation, device)
    assert_captured_step_follows_its_inputs(operation, variant, maker, device, 0 if operation is GATED_SCAN else 1e-3)


def test_more_captured_calls_than_the_workspace_reserve_holds(device):
    """Calls beyond the reserve clear workspace words of their own in the graph.

    A scan needs zeroed 64-bit words, through which its CTAs communicate. Captured calls take theirs from a reserve.
    """
    arguments = made(GATED_SCAN, device, B=8, T=2048, V=512)
    from onelaunch.kernels.scan import launch

    assert launch.sequential_tiles(device, 8, 512) is None, "the sequential kernel needs no workspace words: choose another size"
    words = launch.scan_tiles(2048, 512).words(8, 2048, 512)
    assert words <= memory.LARGE
    calls = memory.RESERVE // words + 5
    expected = gated_scan(**arguments, variant="fused")
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        captured = [gated_scan(**arguments, variant="fused") for _ in range(calls)]
    for _ in range(3):
        for outputs in captured:
            outputs[0].zero_()
        graph.replay()
        torch.cuda.synchronize(device)
        for outputs in captured:
            assert_same_bits(dict(enumerate(outputs)), dict(enumerate(expected)))


def test_graphs_outlive_the_workspace_reserve_they_were_captured_with(device):
    """Capture many graphs, with eager calls between that replace the reserve, and allocations that would reuse freed memory."""
    from onelaunch.kernels.scan import launch

    assert launch.sequential_tiles(device, 8, 256) is None, "the sequential kernel needs no workspace words: choose another size"
    assert 40 * launch.scan_tiles(2048, 256).words(8, 2048, 256) > memory.RESERVE // 2
    arguments = made(GATED_SCAN, device, B=8, T=2048, V=256)
    expected = gated_scan(**arguments, variant="fused")
    graphs = []
    for _ in range(40):
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(graph):
            outputs = gated_scan(**arguments, variant="fused")
        graphs.append((graph, outputs))
        gated_scan(**arguments, variant="fused")
    churn = [torch.full((memory.RESERVE,), -1, dtype=torch.int64, device=device) for _ in range(4)]
    for graph, outputs in graphs:
        outputs[0].zero_()
        graph.replay()
        torch.cuda.synchronize(device)
        assert_same_bits(dict(enumerate(outputs)), dict(enumerate(expected)))
    assert all(bool((words == -1).all()) for words in churn), "a replayed graph wrote into memory that it does not own"


# Streams


@each_kernel
def test_two_streams_at_the_same_time(operation, variant, device):
    """Overlapping launches must not share workspace words, through which the CTAs of one launch communicate."""
    streams = [torch.cuda.Stream(device) for _ in range(2)]
    given = [made(operation, device, seed=seed, T=3000, grad=True) for seed in range(2)]
    expected = [results(operation, arguments, variant) for arguments in given]
    torch.cuda.synchronize(device)
    found: list[list[dict[str, torch.Tensor]]] = [[], []]
    for _ in range(10):
        for index, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                found[index].append(results(operation, given[index], variant))
    torch.cuda.synchronize(device)
    for index, every in enumerate(found):
        for one in every:
            assert_near(one, expected[index], 0 if operation is GATED_SCAN else 1e-3)


# torch.compile, autocast, values


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("operation", "variant"), [*KERNELS, *(pytest.param(op, "auto", id=f"{op.name}-auto") for op in OPERATIONS)]
)
def test_inductor_compiles_it_into_one_graph(operation, variant, packed, device):
    torch.compiler.reset()
    given: dict[str, Any] = {"B": 1, "lengths": (0, 300, 0, 200)} if packed else {}
    arguments = made(operation, device, grad=True, **given)
    leaves = differentiable(arguments)

    def layer(**inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        y, final = operation(**inputs, variant=variant)
        return y * 2, final  # work for the compiler after the operation

    y, final = torch.compile(layer, fullgraph=True)(**arguments)
    gradients = torch.autograd.grad(
        (y.float() * weights_like(y)).sum() + (final * weights_like(final)).sum(), list(leaves.values())
    )
    found = {"y": y.detach(), "final_state": final.detach(), **dict(zip(leaves, gradients, strict=True))}
    y, final = layer(**arguments)
    gradients = torch.autograd.grad(
        (y.float() * weights_like(y)).sum() + (final * weights_like(final)).sum(), list(leaves.values())
    )
    assert_near(found, {"y": y.detach(), "final_state": final.detach(), **dict(zip(leaves, gradients, strict=True))}, 2e-3)


@pytest.mark.slow
@each_operation
def test_inductor_supports_other_lengths(operation, device):
    torch.compiler.reset()
    function = torch.compile(operation, fullgraph=True)
    for length in (500, 620, 333, 64):
        arguments = made(operation, device, T=length)
        assert_near(dict(enumerate(function(**arguments))), dict(enumerate(operation(**arguments))), 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["shorter_than_a_tile", "packed_with_empty_sequences", "bfloat16"])
@each_operation
def test_the_compiled_variant_is_correct(operation, name, device):
    torch.compiler.reset()
    assert_correct(operation, case_of(operation, name), "compiled", device)


@each_kernel
def test_autocast_casts_all_but_the_log_decay(operation, variant, device):
    arguments = made(operation, device, dtype="float32", grad=True)
    with torch.autocast("cuda", torch.bfloat16):
        y, final = operation(**arguments, variant=variant)
    assert (y.dtype, final.dtype) == (torch.bfloat16, torch.float32)
    gradients = torch.autograd.grad(y.float().sum() + final.sum(), list(differentiable(arguments).values()))
    assert {gradient.dtype for gradient in gradients} == {torch.float32}


@each_operation
def test_values_are_checked_only_on_demand(operation, device, monkeypatch):
    arguments = made(operation, device)
    decay = decay_of(operation)
    arguments[decay] = arguments[decay].abs() + 1
    monkeypatch.delenv("ONELAUNCH_CHECK_VALUES", raising=False)
    operation(**arguments)
    monkeypatch.setenv("ONELAUNCH_CHECK_VALUES", "1")
    with pytest.raises(ValueError, match=f"^{decay} holds"):
        operation(**arguments)


@pytest.mark.parametrize("packed", [False, True])
@each_kernel_and_chunks
def test_a_call_never_waits_for_the_device(operation, variant, packed, device):
    given: dict[str, Any] = {"B": 1, "lengths": (0, 300, 0, 200)} if packed else {}
    arguments = made(operation, device, grad=True, **given)
    results(operation, arguments, variant)
    y, final = operation(**arguments, variant=variant)
    gradients = [torch.randn_like(y), torch.randn_like(final)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        outputs = operation(**arguments, variant=variant)
        torch.autograd.grad(outputs, list(differentiable(arguments).values()), gradients)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("operation", [op for op in OPERATIONS if triton_variants(op)], ids=lambda operation: operation.name)
def test_auto_chooses_a_kernel_on_a_gpu(operation, device):
    """Without measurements the order of preference says so. With measurements, a kernel was faster than plain PyTorch."""
    arguments = made(operation, device, T=2048)
    assert dispatch.choose(operation.bind(**arguments).query()).name not in pytorch_variants(operation)
