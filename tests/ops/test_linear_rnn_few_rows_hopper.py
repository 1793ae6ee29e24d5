"""Tests of ``linear_rnn``'s Hopper kernel for few rows without a GPU: its source on an emulated one, and its configurations.

The variant ``fused_few_rows`` launches it for at most 16 rows in bfloat16; ``tests/ops/test_linear_rnn_few_rows.py`` has more
tests on a GPU. ``use_host`` of ``linear_rnn_few_rows_host.py`` lets the launches run on the emulated GPU, which delays CTAs and
warps at random, by a seed.

``libraries`` is a folder in which a test run compiles each library once. ``assert_near`` bounds the norm of each error,
relative to that of the expected values. A test marked ``thorough`` does not run in ``make test``, and one marked ``every`` with
--architectures=every alone.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from onelaunch.device.architectures import HOPPER_SHARED_BYTES, HOPPER_SMS
from onelaunch.ops.linear_rnn.configure_few_rows_hopper import MOST_ROWS, HopperConfig, config_of, divided
from onelaunch.workbench.verify.poison import poisoned
from tests.decode.host_machine import needs_compiler, needs_watch
from tests.ops.cases import LINEAR_RNN, NO_STATES, STATES, arguments_of, assert_near
from tests.ops.linear_rnn_few_rows_host import HostLaunch, use_host
from tests.ops.test_gla_hopper import HOPPER

pytest.importorskip("triton", reason="the module with the launches imports Triton for the portable kernel")

Case = tuple[dict[str, Any], dict[str, Any]]
CASES: dict[str, Case] = {  # how a launch divides the weight, where it is not the usual way; sizes and options
    "three_rows": ({"columns": 64, "parts": 2, "warps": 2}, {"B": 3, "T": 1, "D": 256, "V": 128, **STATES}),
    "one_row": ({"columns": 16, "parts": 1, "overlap": True}, {"B": 1, "T": 1, "D": 256, "V": 48, **STATES}),
    "sixteen_rows": ({"columns": 32, "parts": 2}, {"B": 16, "T": 1, "D": 512, "V": 64, **STATES}),
    "sixteen_steps": ({"columns": 64, "parts": 4, "warps": 2}, {"B": 1, "T": 16, "D": 256, "V": 64, **STATES}),
    "steps_of_sequences": ({}, {"B": 3, "T": 3, "D": 1024, "V": 64, "decay": "mixed", **STATES}),
    "no_states": ({"columns": 64, "parts": 1}, {"B": 9, "T": 1, "D": 256, "V": 64, "gate": False, **NO_STATES}),
    "float32_decays": ({"overlap": True}, {"B": 2, "T": 4, "D": 1024, "V": 64, "log_decay_dtype": "float32", **STATES}),
    "columns": ({"columns": 32, "parts": 2, "by_columns": True}, {"B": 11, "T": 1, "D": 1024, "V": 64, **STATES}),
    "wide_columns": (
        {"columns": 64, "parts": 2, "warps": 2, "by_columns": True, "overlap": True},
        {"B": 3, "T": 2, "D": 256, "V": 128, **STATES},
    ),
    "narrow_columns": ({"columns": 16, "parts": 1, "by_columns": True}, {"B": 8, "T": 1, "D": 256, "V": 32, **STATES}),
    "forgotten": ({"warps": 4}, {"B": 4, "T": 2, "D": 1024, "V": 64, "decay": "forget", "final_state": True}),
}  # fmt: skip
FEW = ("three_rows", "columns", "wide_columns")
THOROUGH = ("one_row", "sixteen_rows", "sixteen_steps", "no_states", "narrow_columns")
MARKED = [
    pytest.param(name, marks=() if name in FEW else getattr(pytest.mark, "thorough" if name in THOROUGH else "every"))
    for name in CASES
]


def layer_of(arguments: dict[str, Any]) -> Any:
    """Return a call as launches take it."""
    from onelaunch.kernels.common.sequences import Sequences
    from onelaunch.ops.linear_rnn.launch import Layer

    sequences = Sequences.of(arguments["initial_state"], None)
    tensors = (arguments[name] for name in ("x", "weight", "log_decay", "gate"))
    return Layer(*tensors, sequences, arguments["output_final_state"], keep=False)


def launched(host: type[HostLaunch], arguments: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Launch a call, require that it takes the Hopper kernel, and return the results by name."""
    from onelaunch.ops.linear_rnn.launch_few_rows import few_rows

    before, want_final = len(host.launched), arguments["output_final_state"]
    with poisoned():
        results = few_rows(layer_of(arguments))
    assert len(host.launched) == before + 1
    return {"y": results.y, "final": results.final} if want_final else {"y": results.y}


def expected(arguments: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the results by the definition in float64."""
    wide = {name: value.double() for name, value in arguments.items() if isinstance(value, torch.Tensor)}
    v = wide["x"] @ wide["weight"]
    state, states = wide.get("initial_state", torch.zeros_like(v[:, 0])), []
    for t in range(v.shape[1]):
        state = wide["log_decay"][:, t].exp() * state + v[:, t]
        states.append(state)
    y = torch.stack(states, 1)
    gate = wide.get("gate")
    return {"y": y if gate is None else y * gate * torch.sigmoid(gate), "final": state}


def called(monkeypatch: Any, libraries: Any, name: str, **options: Any) -> tuple[type[HostLaunch], dict[str, Any]]:
    """Return the class of the emulated launches, and the arguments of a case."""
    division, sizes = CASES[name]
    host = use_host(monkeypatch, libraries, HOPPER_SMS, division, **options)
    given = {"gate": None, "initial_state": None, "output_final_state": False} | arguments_of(
        LINEAR_RNN, dtype="bfloat16", **sizes
    )
    if division.get("by_columns"):
        given["weight"] = given["weight"].t().contiguous().t()
    return host, given


@needs_compiler
@pytest.mark.parametrize("name", MARKED)
def test_results_match_the_definition(name, libraries, monkeypatch):
    host, arguments = called(monkeypatch, libraries, name)
    found, wanted = launched(host, arguments), expected(arguments)
    assert_near({"y": found["y"].double()}, {"y": wanted["y"]}, 2**-8)  # rounded to bfloat16 once
    if "final" in found:
        assert_near({"final": found["final"].double()}, {"final": wanted["final"]}, 1e-6)


@needs_compiler
@pytest.mark.thorough
def test_results_do_not_depend_on_who_comes_first(libraries, monkeypatch):
    host, arguments = called(monkeypatch, libraries, "sixteen_steps")
    found = []
    for host.seed in (1, 2, 3):
        found.append(launched(host, arguments))
    for other in found[1:]:
        assert_near(other, found[0], 0.0)


@needs_compiler
@pytest.mark.thorough
def test_operands_of_any_strides(libraries, monkeypatch):
    """Rows of x and the weight may be any multiple of 16 bytes apart; other tensors are copied."""
    host, arguments = called(monkeypatch, libraries, "three_rows")
    right = launched(host, arguments)
    for name in ("x", "weight", "log_decay", "gate"):
        value = arguments[name]
        wide = value.new_full((*value.shape[:-1], value.shape[-1] + 8), torch.nan)[..., : value.shape[-1]].copy_(value)
        apart = torch.stack([value, value], -1)[..., 0]
        shifted = value.new_empty(value.numel() + 1)[1:].view(value.shape).copy_(value)
        for other in (wide, apart, shifted):
            assert_near(launched(host, {**arguments, name: other}), right, 0.0)


@needs_watch
@pytest.mark.every
@pytest.mark.parametrize("name", CASES)
def test_shared_memory_has_no_races(name, libraries, monkeypatch):
    host, arguments = called(monkeypatch, libraries, name, watched=True)
    launched(host, arguments)
    assert not host.races


@needs_compiler
def test_a_transposed_weight_is_not_copied(libraries, monkeypatch):
    """The layer ``nn.LinearRNN`` multiplies by the transposed weight of a ``torch.nn.Linear``."""
    host, arguments = called(monkeypatch, libraries, "columns")
    weights = []
    monkeypatch.setattr(host, "run", lambda launch: weights.append((launch.config.by_columns, launch.arguments[1].data_ptr())))
    from onelaunch.ops.linear_rnn.launch_few_rows import few_rows

    few_rows(layer_of(arguments))
    assert weights == [(True, arguments["weight"].data_ptr())]


@needs_compiler
@pytest.mark.thorough
@pytest.mark.parametrize(
    "change",
    [
        ("    griddepcontrol_wait();  // by all threads", "    // by all threads"),
        ("if constexpr (OVERLAP) return load_streamed(", "if constexpr (false) return load_streamed("),
    ],
    ids=["wait", "path"],
)
def test_a_launch_that_overlaps_reads_nothing_before_it_has_waited(change, libraries, monkeypatch):
    """Until the emulated launch waits for the one before it, its memory holds other bytes."""
    with monkeypatch.context() as unchanged:
        host, arguments = called(unchanged, libraries, "wide_columns")
        right = launched(host, arguments)
    host, arguments = called(monkeypatch, libraries, "wide_columns", change=change)
    host.strict, host.sweeps = False, 10_000
    assert not torch.equal(launched(host, arguments)["y"], right["y"])


WAITS = {  # a wait, and what takes its place; and a case
    "beginning_of_the_others": ("if constexpr (PARTS > 1) cluster_wait();", "", "three_rows"),
    "sums_of_the_cluster": ("while (!mbarrier_try_wait(s.ready, 0)) spin_pause();", ";", "three_rows"),
    "sums_of_other_warps": ("  syncthreads();\n  if constexpr (PARTS > 1) cluster_wait();", "", "one_row"),
    "v_of_other_threads": ("    syncthreads();\n    scan(", "    scan(", "sixteen_steps"),
}


@needs_compiler
@pytest.mark.every
@pytest.mark.parametrize("name", WAITS)
def test_a_missing_wait_gives_wrong_results(name, libraries, monkeypatch):
    wait, instead, case = WAITS[name]
    with monkeypatch.context() as unchanged:
        host, arguments = called(unchanged, libraries, case)
        right = launched(host, arguments)
    host, arguments = called(monkeypatch, libraries, case, change=(wait, instead))
    host.strict, host.sweeps, wrong = False, 10_000, 0
    for host.seed in range(1, 9):
        wrong += not torch.equal(launched(host, arguments)["y"], right["y"])
    assert wrong


def test_every_configuration_divides_the_weight_and_fits():
    sizes = list(itertools.product((1, 3, 16), (1, 4), (1, 64, 1024, 2048, 4096), (1, 16, 100, 1024, 2048, 2560, 4096)))
    found = [(each, config_of(*each, float_decay=False, sms=HOPPER_SMS)) for each in sizes]
    assert sum(config is not None for _, config in found) > 20
    for (batch, length, width, channels), config in found:
        if config is None:
            continue
        assert batch * length <= config.rows <= MOST_ROWS
        assert config.width == width
        assert config.ctas(channels) <= HOPPER_SMS
        assert config.ctas(channels) // config.parts * config.columns == channels
        assert 2 * (config.shared_bytes + 1024) <= HOPPER_SHARED_BYTES
        assert config.offsets["READY"] % 8 == 0


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("division", [(64, 4), (32, 2), (16, 1)])
@pytest.mark.parametrize("rows", [1, 16])
def test_launches_that_overlap_give_the_same_bits(rows, division, device):
    """Each launch takes its x, its state and its weight from the one before, as Python calls them and in a graph."""
    from onelaunch.ops.linear_rnn.launch_few_rows_hopper import config_for, few_rows

    case = LINEAR_RNN.case("bfloat16", B=rows, T=1, D=2048, V=2048, **STATES)
    arguments = LINEAR_RNN.make_inputs(case, device, 0).arguments

    def steps(*, overlap: bool) -> list[torch.Tensor]:
        given, found = dict(arguments), []
        config = replace(config_for(layer_of(given)), columns=division[0], parts=division[1], overlap=overlap)
        for step in range(12):
            y, state, *_ = few_rows(config, layer_of(given))
            found += [y, state]
            given |= {"x": arguments["x"] if step % 2 else y, "initial_state": state}
            given["weight"] = arguments["weight"] + y[0, 0] / 64 if step % 3 == 0 else given["weight"]
        return found

    expected = steps(overlap=False)
    assert all(bool(each.isfinite().all()) for each in expected)
    for _ in range(20):
        assert all(torch.equal(one, other) for one, other in zip(steps(overlap=True), expected, strict=True))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = steps(overlap=True)
    for _ in range(20):
        graph.replay()
        assert all(torch.equal(one, other) for one, other in zip(captured, expected, strict=True))


@pytest.mark.parametrize("sizes", [(0, 1, 2048, 2048), (17, 1, 2048, 2048), (1, 1, 2000, 2048), (1, 1, 2048, 2008)])
def test_other_calls_take_the_portable_kernel(sizes):
    right = config_of(16, 1, 2048, 2048, float_decay=True, sms=HOPPER_SMS)
    assert right == HopperConfig(16, 2048, float_decay=True, one_step=True, columns=32, parts=2)
    assert divided(right, 2048, HOPPER_SMS)
    assert config_of(*sizes, float_decay=True, sms=HOPPER_SMS) is None
