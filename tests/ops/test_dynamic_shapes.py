"""Tests that ``torch.compile`` compiles operations and layers once for many batch sizes and numbers of steps.

``CALLS`` are calls of operations by name. ``LAYERS`` are layers by name. ``SIZES`` are batch sizes with numbers of steps.
``results_of`` returns the tensors that a call returns. ``with_gradients`` returns them with the gradients of a weighted sum. A
test marked ``thorough`` does not run in ``make test``, and one marked ``interpret`` runs in Triton's interpreter, with
TRITON_INTERPRET=1. ``thorough_but`` marks all parameters but the named ones ``thorough``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from onelaunch import dispatch
from onelaunch.dispatch.choice import choose
from onelaunch.launch.imitation import record
from onelaunch.operation import find_operation
from onelaunch.ops import Segment
from tests.ops import dynamic_cases
from tests.ops.dynamic_cases import CALLS, LAYERS, SIZES, assert_near, results_of, with_gradients
from tests.thorough import thorough_but

CHUNKED = ("gla", "gla_layer", "GatedLinearAttention", "SimpleGatedLinearAttention")
"""Operations and layers whose chunks in PyTorch are a graph of hundreds of operations; they are compiled forward alone."""


def slow_if_chunked(names: Iterable[str]) -> list[Any]:
    """Return the names as parameters, of which those of :data:`CHUNKED` are marked as slow.

    Their operations do not run in ``make test``. Layers compile the operation ``gla_layer``, so that their tests run with every
    configuration alone.
    """
    marks = {name: [pytest.mark.slow, pytest.mark.every if name in LAYERS else pytest.mark.thorough] for name in CHUNKED}
    return [pytest.param(name, marks=marks.get(name, [])) for name in names]


KERNELS = [
    pytest.param(
        name,
        variant,
        id=f"{name}-{variant}",
        marks=[pytest.mark.interpret, pytest.mark.thorough if name == "swiglu" else pytest.mark.every],
    )
    for name, variant in (
        ("gated_scan", "fused"),
        ("gated_scan", "separate"),
        ("linear_rnn", "three_launch"),
        ("linear_rnn", "fused_chunked"),
        ("gla", "fused"),
        ("gla", "stepwise"),
        ("swiglu", "fused"),
        ("projections", "epilogue"),
        ("projections", "wide_activated"),
        ("output_chain", "norm_gate"),
        ("output_chain", "prologue"),
        ("rms_norm", "fused"),
        ("gla_layer", "packed"),
    )
]
"""Interpreted kernels by operation and variant. One runs in ``make check``, the others with every configuration."""


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """Compile each test anew. PyTorch's cache of fake results takes longer than it saves where sizes are symbols."""
    torch.compiler.reset()
    with torch._dynamo.config.patch(fake_tensor_cache_enabled=False):
        yield


@pytest.mark.parametrize("name", slow_if_chunked(CALLS))
def test_an_operation_compiles_once(name):
    counter = CompileCounterWithBackend("eager")
    run = CALLS[name].run
    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend=counter)
    for size in SIZES:
        tensors = CALLS[name].tensors(*size, draw)
        assert_near(results_of(compiled(*tensors)), results_of(run(*tensors)), 1e-6)
    assert counter.frame_count == 1


@pytest.mark.parametrize("name", thorough_but("swiglu", of=[name for name in CALLS if name not in CHUNKED]))
def test_a_training_step_compiles_for_any_size_at_the_second_size(name):
    counter = CompileCounterWithBackend("aot_eager")
    run = CALLS[name].run
    compiled = torch.compile(run, fullgraph=True, backend=counter)
    for size in SIZES:
        tensors = CALLS[name].tensors(*size, draw)
        assert_near(with_gradients(compiled, tensors), with_gradients(run, tensors), 1e-5)
    assert counter.frame_count == 2  # once for the first sizes, and then for all


@pytest.mark.parametrize(("name", "variant"), KERNELS)
def test_kernels_compile_once(name, variant):
    counter = CompileCounterWithBackend("aot_eager")
    run = functools.partial(CALLS[name].run, variant=variant)
    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend=counter)
    counts = []
    for size in ((2, 20), (3, 33)):  # one tile of time each, of other sizes
        tensors = CALLS[name].tensors(*size, draw)
        assert_near(with_gradients(compiled, tensors), with_gradients(run, tensors), 1e-5)
        counts.append(counter.frame_count)
    assert counts[1] == counts[0]  # the first call of a function with an epsilon takes two attempts, see ``constant`` in query.py


@pytest.mark.parametrize("name", slow_if_chunked(LAYERS))
def test_a_layer_compiles_once(name):
    layer = LAYERS[name]()
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    width = 64 if "Attention" in name else 40
    for size in SIZES:
        x = draw(*size, width)
        with torch.no_grad():
            assert_near(results_of(compiled(x))[:1], results_of(layer(x))[:1], 1e-5)
    assert counter.frame_count == 1


@pytest.mark.parametrize("name", ["gated_scan", pytest.param("gla", marks=[pytest.mark.slow, pytest.mark.thorough])])
def test_packed_sequences_compile_once(name):
    operation = find_operation(name)
    sizes = {"H": 4, "K": 16, "V": 32} if name == "gla" else {"V": 24}
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(lambda **given: operation(**given), fullgraph=True, dynamic=True, backend=counter)
    for lengths in ((70, 0, 80, 1, 2), (64, 65, 100, 0, 1, 30)):
        case = operation.case("float32", B=1, T=sum(lengths), **sizes, lengths=lengths, initial_state=True, final_state=True)
        arguments = operation.make_inputs(case, torch.device("cpu"), 0).arguments
        assert_near(results_of(compiled(**arguments)), results_of(operation(**arguments)), 1e-6)
    assert counter.frame_count == 1


@pytest.mark.thorough
@pytest.mark.slow
def test_code_is_compiled_again_where_another_variant_is_chosen():
    """On a CPU the dispatcher prefers a loop for up to four steps, whose code would be compiled for each number of steps."""
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(CALLS["gla"].run, fullgraph=True, backend=counter)
    counts = []
    for length in (70, 71, 90, 3, 100):
        tensors = CALLS["gla"].tensors(2, length, draw)
        assert_near(results_of(compiled(*tensors)), results_of(CALLS["gla"].run(*tensors)), 1e-6)
        counts.append(counter.frame_count)
    assert counts == [1, 2, 2, 3, 3]


# On a GPU, by the variants that it has of its own

GPU = [
    ("gated_scan", "auto"),
    ("linear_rnn", "auto"),
    ("linear_rnn", "fused_hopper"),
    ("gla", "auto"),
    ("gla", "fused"),
    ("gla", "hopper"),
    ("swiglu", "auto"),
    ("swiglu", "stream_k"),
    ("swiglu", "persistent"),
    ("projections", "auto"),
    ("projections", "epilogue_persistent"),
    ("output_chain", "auto"),
    ("output_chain", "prologue"),
    ("rms_norm", "auto"),
    ("gla_layer", "auto"),
    ("gla_layer", "packed"),
    ("gla_layer", "packed_states"),
]
"""Variants by operation."""

GPU_SIZES = ((2, 130), (3, 257), (6, 1000))
"""Batch sizes and numbers of steps on a GPU."""

HOPPER_ALONE = {"fused_hopper", "hopper", "stream_k", "persistent", "epilogue_persistent", "packed", "packed_states"}
"""Variants that are skipped on other GPUs, which all but ``packed`` refuse. On a Hopper GPU a refusal fails."""


@pytest.fixture
def larger(monkeypatch):
    """Give the calls sizes that Hopper's kernels take."""
    for size, value in {"KEYS": 64, "VALUES": 128, "WIDTH": 256, "CHANNELS": 192}.items():  # sizes that Hopper's kernels take
        monkeypatch.setattr(dynamic_cases, size, value)
    segments = (Segment("q", 4, 64, "l2norm"), Segment("v", 4, 128, "silu"), Segment("g", 8, 1, "logsigmoid", 16.0, bias=True))
    monkeypatch.setattr(dynamic_cases, "SEGMENTS", segments)


class _AskedError(Exception):
    """Error that ends a call once its dispatch key is known."""


@pytest.mark.parametrize(("name", "variant"), GPU)
def test_a_hopper_gpu_refuses_no_call_of_the_test_below(name, variant, larger, monkeypatch):
    pytest.importorskip("triton", reason="without Triton, kernels refuse every call")
    asked = []

    def ask(operation, call, variant):
        query = call.query()._replace(grad=True)  # the test below trains
        asked.append(choose(query) if variant == "auto" else operation.get(variant).why_not(query))
        raise _AskedError

    monkeypatch.setattr(dispatch, "run", ask)
    with record("sm_90a") as (device, _), torch.no_grad():

        def draw_there(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        for size in GPU_SIZES:
            with pytest.raises(_AskedError):
                CALLS[name].run(*CALLS[name].tensors(*size, draw_there), variant=variant)
    assert len(asked) == len(GPU_SIZES)
    assert all(each is None for each in asked) or variant == "auto"  # ``choose`` raises an error where nothing can run


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "variant"), GPU)
def test_a_training_step_compiles_on_a_gpu(name, variant, larger):
    if variant in HOPPER_ALONE and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")

    def draw_on_gpu(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(shape, dtype=dtype, device="cuda")

    run = functools.partial(CALLS[name].run, variant=variant)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend=counter)
    counts = []
    for batch, length in GPU_SIZES:
        tensors = CALLS[name].tensors(batch, length, draw_on_gpu)
        assert_near(with_gradients(compiled, tensors), with_gradients(run, tensors), 1e-2)
        counts.append(counter.frame_count)
    # ``auto`` may choose another variant for other sizes, and is then compiled once for each.
    assert counts[-1] <= counts[0] * (len(GPU_SIZES) if variant == "auto" else 1)
