"""Tests of the Hopper kernels of ``linear_rnn``: tile edges, CUDA graphs, streams, and calls that they do not take.

The variant "fused_hopper" always runs the persistent kernel. "fused_chunked" runs another Hopper kernel, or a portable one for
calls that it does not take. ``made`` returns random arguments on the GPU, and ``tensors`` those that are tensors.

``assert_near`` bounds the norm of each error, relative to that of the expected values; ``results`` returns a variant's results
and gradients by name.

``device`` is the first GPU, or the CPU. ``STATES`` are the options with an initial and a final state. ``arguments_of`` makes
small random arguments on the CPU. ``assert_correct`` applies the whole verification gate, forward and with gradients.
``differentiable`` returns the arguments that take gradients. ``assert_same_bits`` requires equal bits.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from onelaunch.errors import VariantUnsupported
from onelaunch.ops import linear_rnn
from tests.ops.cases import LINEAR_RNN, STATES, arguments_of, assert_correct, assert_near, differentiable, results
from tests.ops.test_gpu import assert_same_bits, made, tensors

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
on_hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
gpu = pytest.mark.gpu

# Cases for both variants. A tile of the persistent kernel has 256 steps and 128 channels.
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
    "no_gate": {"dtype": "bfloat16", "B": 3, "T": 257, "D": 200, "V": 136, "decay": "mixed", "gate": False, **STATES},
    "no_gate_float32_decay": {
        "dtype": "float16", "B": 2, "T": 600, "D": 320, "V": 200, "gate": False, "log_decay_dtype": "float32", **STATES,
    },
    "a_long_chain": {"dtype": "float16", "B": 1, "T": 2000, "D": 64, "V": 128, "initial_state": False, "final_state": True},
}  # fmt: skip

SHORT: dict[str, dict[str, Any]] = {
    "one_step": {"dtype": "float16", "B": 3, "T": 1, "D": 64, "V": 64, **STATES},
    "one_step_less_than_a_tile": {"dtype": "bfloat16", "B": 2, "T": 63, "D": 256, "V": 64, **STATES},
    "the_write_ups_layer": {"dtype": "float16", "B": 4, "T": 2048, "D": 256, "V": 64},  # experiment 040
    "a_few_channels": {"dtype": "float16", "B": 2, "T": 200, "D": 24, "V": 8, "decay": "mixed", **STATES},
    "a_slice_that_is_not_full": {"dtype": "bfloat16", "B": 40, "T": 300, "D": 64, "V": 104, **STATES},
    "groups_of_tiles": {"dtype": "float16", "B": 2, "T": 7000, "D": 64, "V": 64, "decay": "weak", **STATES},
    "more_columns_than_stages": {"dtype": "float16", "B": 2, "T": 500, "D": 1000, "V": 72, "decay": "strong", **STATES},
    "more_columns_and_wide_tiles": {"dtype": "bfloat16", "B": 12, "T": 1024, "D": 520, "V": 128, **STATES},
}  # fmt: skip
"""Additional cases for the Hopper kernel of ``fused_chunked``."""

RUNS = [("fused_hopper", name, CASES[name]) for name in CASES] + [
    ("fused_chunked", name, case) for name, case in {**CASES, **SHORT}.items()
]

both = pytest.mark.parametrize("variant", ["fused_hopper", "fused_chunked"])


@pytest.fixture
def calls(monkeypatch):
    """Return a list to which every call of a Hopper kernel adds its name, "chunked" or "persistent"."""
    found: list[str] = []
    if HOPPER:
        from onelaunch.ops.linear_rnn import launch_hopper

        for name in ("chunked", "persistent"):
            run = getattr(launch_hopper, name)
            monkeypatch.setattr(launch_hopper, name, lambda layer, run=run, name=name: (found.append(name), run(layer))[1])
    return found


@gpu
@on_hopper
@pytest.mark.parametrize(("variant", "name", "sizes"), RUNS, ids=[f"{variant}-{name}" for variant, name, _ in RUNS])
def test_hopper_kernels_are_correct(variant, name, sizes, device, calls):
    assert_correct(LINEAR_RNN, LINEAR_RNN.case(name=name, **sizes), variant, device)
    assert set(calls) == {"persistent" if variant == "fused_hopper" else "chunked"}


@gpu
@on_hopper
@both
def test_slices_of_a_wide_projection(variant, device):
    """Cover rows that TMA can address in place, and rows that it cannot."""
    arguments = made(LINEAR_RNN, device, grad=True)
    expected = results(LINEAR_RNN, arguments, variant)
    for before in (8, 3):
        changed = dict(arguments)
        for name, value in differentiable(arguments).items():
            wide = torch.full((*value.shape[:-1], value.shape[-1] + 40), torch.nan, dtype=value.dtype, device=device)
            changed[name] = wide[..., before : before + value.shape[-1]].copy_(value.detach()).requires_grad_()
        assert_near(results(LINEAR_RNN, changed, variant), expected, 1e-3)


@gpu
@on_hopper
@both
def test_results_are_the_same_to_the_last_bit_beside_other_work(variant, device):
    """Two streams run at once, each with more CTAs than fit together, and a matrix product runs on a third."""
    streams = [torch.cuda.Stream(device) for _ in range(3)]
    noise = torch.randn(2048, 2048, device=device)
    given = [made(LINEAR_RNN, device, seed=seed, B=4, T=4000, V=1000) for seed in range(2)]
    expected = [linear_rnn(**arguments, variant=variant) for arguments in given]
    torch.cuda.synchronize(device)
    found: list[list[Any]] = [[], []]
    for _ in range(20):
        for number, arguments in enumerate(given):
            with torch.cuda.stream(streams[number]):
                found[number].append(linear_rnn(**arguments, variant=variant))
        with torch.cuda.stream(streams[2]):
            noise @ noise
    torch.cuda.synchronize(device)
    for outputs, answer in zip(found, expected, strict=True):
        for output in outputs:
            assert_same_bits(dict(enumerate(output)), dict(enumerate(answer)))


@gpu
@on_hopper
@both
def test_a_captured_graph_follows_its_inputs(variant, device):
    """Three calls in one graph are replayed with new inputs, on another stream, between eager calls."""
    arguments = made(LINEAR_RNN, device, T=700, V=520)
    with torch.no_grad():
        linear_rnn(**arguments, variant=variant)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        captured = [linear_rnn(**arguments, variant=variant) for _ in range(3)]
    stream = torch.cuda.Stream(device)
    for seed in range(1, 6):
        fresh = made(LINEAR_RNN, device, seed=seed, T=700, V=520)
        for name, value in tensors(arguments).items():
            value.copy_(fresh[name])
        expected = linear_rnn(**fresh, variant=variant)
        torch.cuda.synchronize(device)
        with torch.cuda.stream(stream):
            graph.replay()
        torch.cuda.synchronize(device)
        for outputs in captured:
            assert_same_bits(dict(enumerate(outputs)), dict(enumerate(expected)))


@gpu
@on_hopper
@both
def test_it_compiles_without_graph_breaks(variant, device):
    arguments = made(LINEAR_RNN, device, grad=True, T=300)
    expected = results(LINEAR_RNN, arguments, variant)
    compiled = torch.compile(linear_rnn, fullgraph=True, backend="aot_eager")
    y, final = compiled(**arguments, variant=variant)
    assert_near({"y": y.detach(), "final_state": final.detach()}, {key: expected[key] for key in ("y", "final_state")}, 0)


@pytest.mark.skipif(HOPPER, reason="this device is a Hopper GPU, on which the kernel runs")
def test_without_a_hopper_gpu_the_error_states_the_requirement(device):
    arguments = arguments_of(LINEAR_RNN, dtype="float16", B=1, T=64, D=8, V=8)
    with pytest.raises(VariantUnsupported, match="needs"):
        linear_rnn(**arguments, variant="fused_hopper")


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
def test_unsupported_calls_are_refused(sizes, reason, device):
    with pytest.raises(VariantUnsupported, match=reason):
        linear_rnn(**made(LINEAR_RNN, device, **sizes), variant="fused_hopper")


@gpu
@on_hopper
@pytest.mark.parametrize("sizes", [{"dtype": "float32"}, {"D": 60}, {"V": 84}, {"B": 1, "lengths": (0, 300, 200)}])
def test_auto_runs_unsupported_calls_on_the_portable_kernel(sizes, device, calls):
    """``fused_chunked``, which ``auto`` tries first, takes calls that no Hopper kernel takes, and launches none."""
    arguments = made(LINEAR_RNN, device, **sizes)
    assert_near(results(LINEAR_RNN, arguments, "fused_chunked"), results(LINEAR_RNN, arguments, "semi_fused"), 5e-3)
    assert not calls


@pytest.mark.parametrize(
    ("sizes", "tile"),
    [
        ({"batch": 1, "length": 512, "channels": 64}, (32, 4, 8)),
        ({"batch": 4, "length": 512, "channels": 64}, (32, 4, 8)),
        ({"batch": 4, "length": 2048, "channels": 64}, (64, 8, 32)),
        ({"batch": 4, "length": 2048, "channels": 32}, (32, 4, 32)),
    ],
)
def test_few_ctas_get_narrow_tiles(sizes, tile):
    """``tile`` has the channels and warps of a CTA, and the tiles in a group of the look-back, on a GPU of 132 SMs."""
    pytest.importorskip("triton")
    from onelaunch.ops.linear_rnn.launch_hopper import chunked_tiles

    scan = chunked_tiles(132, width=256, **sizes).scan
    assert (scan.channels, scan.warps, scan.group) == tile
    assert scan.steps == 64


@pytest.mark.parametrize(
    ("sizes", "suited"),
    [
        ({}, True),
        ({"dtype": "bfloat16"}, True),
        ({"dtype": "float32"}, False),
        ({"D": 60}, False),
        ({"V": 84}, False),
        ({"B": 1, "lengths": (0, 30, 20)}, False),
    ],
)
def test_supported_layouts_are_those_that_tma_can_address(sizes, suited, monkeypatch):
    pytest.importorskip("triton")
    from onelaunch.kernels.common.sequences import Sequences
    from onelaunch.ops.linear_rnn import launch_hopper
    from onelaunch.ops.linear_rnn.launch import Layer

    given = arguments_of(LINEAR_RNN, **{"dtype": "float16", "B": 2, "T": 50, "D": 64, "V": 32, **sizes})
    tensors_given = (given[name] for name in ("x", "weight", "log_decay", "gate"))
    layer = Layer(*tensors_given, Sequences.of(None, given.get("cu_seqlens")), want_final=False, keep=False)
    assert not launch_hopper.suits(layer)  # the arguments are on the CPU, where no layer is taken
    monkeypatch.setattr(launch_hopper, "is_hopper", lambda device: True)
    assert launch_hopper.suits(layer) is suited
