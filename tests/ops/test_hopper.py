"""The variant for wide layers on Hopper GPUs: right in every corner of its tiles, in graphs, on streams; refused elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from onelaunch.errors import VariantUnsupported
from onelaunch.ops import linear_rnn
from tests.ops.cases import LINEAR_RNN, STATES, arguments_of, assert_correct, assert_near, differentiable, results
from tests.ops.test_gpu import assert_same_bits, made, tensors

VARIANT = "fused_hopper"
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
on_hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
gpu = pytest.mark.gpu

CASES: dict[str, dict[str, Any]] = {
    "one_tile": {"dtype": "float16", "B": 1, "T": 256, "D": 64, "V": 128},
    "shorter_than_a_tile": {"dtype": "float16", "B": 2, "T": 70, "D": 8, "V": 8, **STATES},
    "one_step_over_a_tile": {"dtype": "bfloat16", "B": 3, "T": 257, "D": 200, "V": 136, "decay": "mixed", **STATES},
    "batch_entries_that_end_inside_tiles": {"dtype": "float16", "B": 5, "T": 1000, "D": 72, "V": 264, **STATES},
    "several_tiles_a_processor": {"dtype": "float16", "B": 5, "T": 1024, "D": 136, "V": 1024, "decay": "weak", **STATES},
    "forgets_everything": {"dtype": "float16", "B": 1, "T": 300, "D": 64, "V": 128, "decay": "forget", **STATES},
    "float32_decay": {
        "dtype": "bfloat16", "B": 2, "T": 600, "D": 320, "V": 200, "decay": "strong", "log_decay_dtype": "float32", **STATES,
    },
    "a_long_chain": {"dtype": "float16", "B": 1, "T": 2000, "D": 64, "V": 128, "initial_state": False, "final_state": True},
}  # fmt: skip


@gpu
@on_hopper
@pytest.mark.parametrize("name", CASES)
def test_it_is_correct(name, device):
    assert_correct(LINEAR_RNN, LINEAR_RNN.case(name=name, **CASES[name]), VARIANT, device)


@gpu
@on_hopper
def test_slices_of_a_wide_projection(device):
    """Rows that the copy engine can address where they are, and rows that it cannot."""
    arguments = made(LINEAR_RNN, device, grad=True)
    expected = results(LINEAR_RNN, arguments, VARIANT)
    for before in (8, 3):
        changed = dict(arguments)
        for name, value in differentiable(arguments).items():
            wide = torch.full((*value.shape[:-1], value.shape[-1] + 40), torch.nan, dtype=value.dtype, device=device)
            changed[name] = wide[..., before : before + value.shape[-1]].copy_(value.detach()).requires_grad_()
        assert_near(results(LINEAR_RNN, changed, VARIANT), expected, 1e-3)


@gpu
@on_hopper
def test_results_are_the_same_to_the_last_bit_beside_other_work(device):
    """Two streams at once, each with more programs than fit beside the other's, and a matrix product on a third."""
    streams = [torch.cuda.Stream(device) for _ in range(3)]
    noise = torch.randn(2048, 2048, device=device)
    given = [made(LINEAR_RNN, device, seed=seed, B=4, T=4000, V=1000) for seed in range(2)]
    expected = [linear_rnn(**arguments, variant=VARIANT) for arguments in given]
    torch.cuda.synchronize(device)
    found: list[list[Any]] = [[], []]
    for _ in range(20):
        for number, arguments in enumerate(given):
            with torch.cuda.stream(streams[number]):
                found[number].append(linear_rnn(**arguments, variant=VARIANT))
        with torch.cuda.stream(streams[2]):
            noise @ noise
    torch.cuda.synchronize(device)
    for outputs, answer in zip(found, expected, strict=True):
        for output in outputs:
            assert_same_bits(dict(enumerate(output)), dict(enumerate(answer)))


@gpu
@on_hopper
def test_a_captured_graph_follows_its_inputs(device):
    """Three calls in one graph, replayed with new inputs, on another stream, between eager calls."""
    arguments = made(LINEAR_RNN, device, T=700, V=520)
    with torch.no_grad():
        linear_rnn(**arguments, variant=VARIANT)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        captured = [linear_rnn(**arguments, variant=VARIANT) for _ in range(3)]
    stream = torch.cuda.Stream(device)
    for seed in range(1, 6):
        fresh = made(LINEAR_RNN, device, seed=seed, T=700, V=520)
        for name, value in tensors(arguments).items():
            value.copy_(fresh[name])
        expected = linear_rnn(**fresh, variant=VARIANT)
        torch.cuda.synchronize(device)
        with torch.cuda.stream(stream):
            graph.replay()
        torch.cuda.synchronize(device)
        for outputs in captured:
            assert_same_bits(dict(enumerate(outputs)), dict(enumerate(expected)))


@gpu
@on_hopper
def test_it_compiles_without_graph_breaks(device):
    arguments = made(LINEAR_RNN, device, grad=True, T=300)
    expected = results(LINEAR_RNN, arguments, VARIANT)
    compiled = torch.compile(linear_rnn, fullgraph=True, backend="aot_eager")
    y, final = compiled(**arguments, variant=VARIANT)
    assert_near({"y": y.detach(), "final_state": final.detach()}, {key: expected[key] for key in ("y", "final_state")}, 0)


@pytest.mark.skipif(HOPPER, reason="here it runs")
def test_elsewhere_it_says_what_it_needs(device):
    arguments = arguments_of(LINEAR_RNN, dtype="float16", B=1, T=64, D=8, V=8)
    with pytest.raises(VariantUnsupported, match="needs"):
        linear_rnn(**arguments, variant=VARIANT)


@gpu
@on_hopper
@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"dtype": "float32"}, "float16 or bfloat16"),
        ({"T": 63}, "64 time steps"),
        ({"D": 60}, "multiples of 8"),
        ({"V": 84}, "multiples of 8"),
        ({"B": 1, "lengths": (0, 300, 200)}, "packed"),
    ],
)
def test_what_it_cannot_run_it_refuses(sizes, reason, device):
    with pytest.raises(VariantUnsupported, match=reason):
        linear_rnn(**made(LINEAR_RNN, device, **sizes), variant=VARIANT)
