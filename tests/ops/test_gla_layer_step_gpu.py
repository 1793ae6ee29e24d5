"""Tests of ``gla_layer``'s variant "one_launch" on a Hopper GPU: results, CUDA graphs, streams at the same time, equal bits.

``device`` is the first GPU, or the CPU. ``judge`` is the verification gate, and ``assert_ok`` requires its verdict to be right.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from onelaunch.launch.planned import forget_plans
from onelaunch.ops import gla_layer
from onelaunch.ops.gla_layer import configure_step, launch_step
from onelaunch.ops.gla_layer.launch_step import StepInputs
from onelaunch.workbench.verify import judge
from tests.ops.cases import assert_ok
from tests.ops.gla_layer_cases import GLA_LAYER
from tests.ops.test_gla_hopper import HOPPER

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")]

STATES = {"initial_state": True, "final_state": True}
LARGE = {"D": 2048, "H": 16, "K": 128, "V": 128, **STATES}
CASES: dict[str, dict[str, Any]] = {
    **{f"{batch}_sequences": {"B": batch, "T": 1, **LARGE} for batch in (1, 2, 4, 8, 16, 64)},
    "sixteen_steps": {"B": 1, "T": 16, **LARGE},
    "sixty_three_rows": {"B": 7, "T": 9, **LARGE},
    "flas_heads": {"B": 3, "T": 1, **LARGE, "K": 64},
    "large_heads": {"B": 1, "T": 1, "D": 2048, "H": 8, "K": 256, "V": 256, **STATES},
    "wide": {"B": 2, "T": 1, "D": 4096, "H": 32, "K": 128, "V": 128, **STATES},
    "small": {"B": 2, "T": 3, "D": 192, "H": 3, "K": 32, "V": 64, "rank": 5},
    "a_decay_per_head": {"B": 2, "T": 3, "D": 1024, "H": 12, "K": 64, "V": 128, "decay_per": "head", "norm_weight": "float32"},
}


def given_on(device: torch.device, seed: int = 0, **sizes: Any) -> dict[str, Any]:
    """Return random arguments in bfloat16."""
    return GLA_LAYER.make_inputs(GLA_LAYER.case("bfloat16", **sizes), device, seed).arguments


@pytest.mark.parametrize("name", CASES)
def test_results_and_states_pass_the_gate(name, device):
    case = GLA_LAYER.case("bfloat16", name=name, **CASES[name])
    assert_ok(judge(GLA_LAYER, case, variant="one_launch", device=device), GLA_LAYER, case, "one_launch")


@pytest.mark.parametrize("name", ["1_sequences", "16_sequences"])
def test_a_captured_step_follows_its_inputs(name, device):
    arguments = given_on(device, **CASES[name])
    gla_layer(**arguments, variant="one_launch")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gla_layer(**arguments, variant="one_launch")
    for seed in range(1, 4):
        for mine, fresh in zip(arguments.values(), given_on(device, seed, **CASES[name]).values(), strict=True):
            if isinstance(mine, torch.Tensor):
                mine.copy_(fresh)
        graph.replay()
        expected = gla_layer(**arguments, variant="one_launch")
        assert all(torch.equal(one, other) for one, other in zip(captured, expected, strict=True))


def test_streams_may_run_at_the_same_time(device):
    calls = [given_on(device, seed, **CASES["2_sequences"]) for seed in range(4)]
    expected = [gla_layer(**call, variant="one_launch") for call in calls]
    torch.cuda.synchronize(device)
    streams = [torch.cuda.Stream(device) for _ in calls]
    for _ in range(20):
        found = []
        for stream, call in zip(streams, calls, strict=True):
            with torch.cuda.stream(stream):
                found.append(gla_layer(**call, variant="one_launch"))
        torch.cuda.synchronize(device)
        for results, right in zip(found, expected, strict=True):
            assert all(torch.equal(one, other) for one, other in zip(results, right, strict=True))


@contextmanager
def configured(**fields: Any) -> Iterator[None]:
    """Replace fields of all configurations, whatever the defaults are. Plans that were made with others are forgotten."""

    def replaced(*given: Any, **options: Any) -> Any:
        return replace(configure_step.config_of(*given, **options), **fields)  # pyrefly: ignore[bad-argument-type]

    with pytest.MonkeyPatch.context() as local:
        local.setattr(launch_step, "config_of", replaced)
        forget_plans()
        try:
            yield
        finally:
            forget_plans()


ALONE = {"overlap": False, "resident": 1}
"""Fields of a configuration whose launches begin when the one before has ended."""


SETTINGS: dict[str, dict[str, Any]] = {
    **{f"{name}_{value}": {name: value} for name in ("copied", "bulk") for value in (False, True)},
    "proxy_fences": {"proxy_fences": True},
    "counted": {"tagged": False},
    "paired": {"paired": True},
    "paired_x": {"paired": True, "paired_x": True},
    "early": {"early": True},
}
WHOLE_AND_FEW = ["2_sequences", "4_sequences"]


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", [f"{batch}_sequences" for batch in (1, 2, 4, 8, 16, 64)])
def test_every_setting_passes_the_gate(name, setting, device):
    case = GLA_LAYER.case("bfloat16", name=name, **CASES[name])
    with configured(**SETTINGS[setting]):
        assert_ok(judge(GLA_LAYER, case, variant="one_launch", device=device), GLA_LAYER, case, "one_launch")


@pytest.mark.parametrize(
    "fields",
    [
        {"proxy_fences": True},
        {"bulk": True},
        {"bulk": False},
        {"bulk": True, "proxy_fences": True},
        {"paired": True},
        {"early": True},
        {"paired": True, "paired_x": True, "proxy_fences": True},
        {"paired": True, "paired_x": True, "proxy_fences": True, "early": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["8_sequences", "16_sequences"])
def test_chains_of_steps_with_whole_sequences_repeat_their_bits(name, fields, device):
    """A bulk copy that reads gated o or a state too early gives other bits. Each launch reads the state of the one before."""
    arguments = given_on(device, **CASES[name])

    def steps() -> list[torch.Tensor]:
        given, found = dict(arguments), []
        for _ in range(20):
            out, state = launch_step.run(StepInputs.of(GLA_LAYER.bind(**given)))
            found += [out, state]
            given |= {"x": out, "initial_state": state}
        return found

    with configured(**ALONE, **{**fields, "proxy_fences": False}):
        expected = steps()
    with configured(**fields):
        for _ in range(50):
            assert all(torch.equal(one, other) for one, other in zip(steps(), expected, strict=True))


@pytest.mark.parametrize("resident", [1, 2])
@pytest.mark.parametrize("name", WHOLE_AND_FEW)
def test_whole_sequences_may_be_fewer_than_the_ctas_of_a_head(name, resident, device):
    case = GLA_LAYER.case("bfloat16", name=name, **CASES[name])
    with configured(**configure_step.FEW_BY_SEQUENCE, bulk=True, resident=resident, flight=3):
        assert_ok(judge(GLA_LAYER, case, variant="one_launch", device=device), GLA_LAYER, case, "one_launch")


@pytest.mark.parametrize("resident", [1, 2])
def test_launches_that_overlap_give_the_same_bits(resident, device):
    """Each launch takes its x, its state and one of its weights from the one before, as Python calls them and in a graph."""
    arguments = given_on(device, **CASES["2_sequences"])

    def steps() -> list[torch.Tensor]:
        given, found = dict(arguments), []
        for _ in range(12):
            out, state = launch_step.run(StepInputs.of(GLA_LAYER.bind(**given)))
            found += [out, state]
            given |= {"x": out, "initial_state": state}
            given["w_out"] = given["w_out"] + out[0, 0, 0]
        return found

    with configured(**ALONE):
        expected = steps()
    with configured(overlap=True, resident=resident):
        for _ in range(20):
            assert all(torch.equal(one, other) for one, other in zip(steps(), expected, strict=True))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = steps()
        for _ in range(20):
            graph.replay()
            assert all(torch.equal(one, other) for one, other in zip(captured, expected, strict=True))


@pytest.mark.parametrize("priorities", [(0, 0), (0, -1)], ids=["equal", "unequal"])
@pytest.mark.parametrize("name", ["2_sequences", "16_sequences", "64_sequences"])
def test_chains_of_overlapping_launches_on_several_streams_end(name, priorities, device):
    """CTAs of a launch may start before all of them have room. Launches of other streams must not keep the others out for good.

    A launch that waits for CTAs which never start ends with an error after two seconds.
    """
    calls = [given_on(device, seed, **CASES[name]) for seed in range(len(priorities))]
    steps = 50

    def chain(given: dict[str, Any]) -> list[torch.Tensor]:
        given, out = dict(given), given["x"]
        for _ in range(steps):
            out, given["initial_state"] = gla_layer(**given, variant="one_launch")
        return [out, given["initial_state"]]

    with configured(**ALONE):
        expected, graphs = [chain(call) for call in calls], []
    torch.cuda.synchronize(device)
    streams = [torch.cuda.Stream(device, priority=priority) for priority in priorities]
    matrix = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)
    for _ in range(5):
        found = []
        for stream, call in zip(streams, calls, strict=True):
            with torch.cuda.stream(stream):
                found.append(chain(call))
                matrix @ matrix
        torch.cuda.synchronize(device)
        assert all(torch.equal(*each) for pair in zip(found, expected, strict=True) for each in zip(*pair, strict=True))
    for call in calls:
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            found.append(chain(call))
    for _ in range(20):
        for stream, graph in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize(device)
    captured = found[-len(calls) :]
    assert all(torch.equal(*each) for pair in zip(captured, expected, strict=True) for each in zip(*pair, strict=True))


def test_a_replay_follows_writes_of_other_kernels_between_launches(device):
    """Kernels that are not ours write x, the state and a weight in place while the next launch may already have begun."""
    arguments = given_on(device, **CASES["2_sequences"])
    fresh = [given_on(device, seed, **CASES["2_sequences"]) for seed in range(1, 5)]
    names = ("x", "initial_state", "in_proj_weight", "w_out", "norm_weight")

    def steps() -> list[torch.Tensor]:
        found = []
        for other in fresh:
            for name in names:
                arguments[name].copy_(other[name])
            found += gla_layer(**arguments, variant="one_launch")
            found += gla_layer(**arguments, variant="one_launch")
        return found

    expected = []
    with configured(**ALONE):
        for other in fresh:
            expected += 2 * gla_layer(**(arguments | {name: other[name] for name in names}), variant="one_launch")
            torch.cuda.synchronize(device)
    steps()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = steps()
    for _ in range(20):
        graph.replay()
        assert all(torch.equal(one, other) for one, other in zip(captured, expected, strict=True))
        assert all(torch.equal(one, other) for one, other in zip(steps(), expected, strict=True))


def test_it_runs_while_other_kernels_hold_sms(device):
    arguments = given_on(device, **CASES["1_sequences"])
    expected = gla_layer(**arguments, variant="one_launch")
    matrix = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    other = torch.cuda.Stream(device)
    torch.cuda.synchronize(device)
    with torch.cuda.stream(other):
        for _ in range(10):
            matrix @ matrix
    found = [gla_layer(**arguments, variant="one_launch") for _ in range(20)]
    torch.cuda.synchronize(device)
    for results in found:
        assert all(torch.equal(one, other) for one, other in zip(results, expected, strict=True))


def test_profile_markers_follow_each_other(device):
    case = GLA_LAYER.case("bfloat16", **CASES["1_sequences"])
    call = GLA_LAYER.bind(**GLA_LAYER.make_inputs(case, device, 0).arguments)
    ctas = StepInputs.of(call).config().ctas
    markers = torch.zeros(ctas, configure_step.MARKERS + configure_step.ARRIVALS, 2, dtype=torch.int64, device=device)
    marked, plain = launch_step.run(StepInputs.of(call), markers), launch_step.run(StepInputs.of(call))
    assert all(torch.equal(one, other) for one, other in zip(marked, plain, strict=True))
    assert bool((markers[:, : configure_step.MARKERS, 0].diff(dim=1) > 0).all())
