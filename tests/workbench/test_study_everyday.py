"""Tests of the studies of the calls that people make: forms against fla, and host times beside PyTorch's product.

``ladder.py`` makes up results: ``ok_cell(variant, microseconds)`` is a correct measurement, and ``measured`` the result that
holds the measurements. ``RATES`` are made-up peaks of a device.

``MEGA`` is a shape of full scale. ``study`` declares a study of all variants, with ``three`` as the baseline. ``bad_cell`` makes
up a measurement without times. A test marked ``thorough`` does not run in ``make test``.
"""

from __future__ import annotations

import inspect
from collections import Counter
from dataclasses import replace

import pytest
import torch

import onelaunch.nn
from onelaunch.device.hardware import Ceilings
from onelaunch.operation import DIRECTIONS
from onelaunch.operation.inputs import packed_lengths
from onelaunch.workbench.decide.criteria import evaluate
from onelaunch.workbench.measure import host, rotation, sampling, timing
from onelaunch.workbench.report import write_report
from onelaunch.workbench.result import ProbeReport
from onelaunch.workbench.run import Steps, run_study
from onelaunch.workbench.study import Criterion
from onelaunch.workbench.study.plan import plan_study
from onelaunch.workbench.study.read import load_study
from onelaunch.workbench.verify import repeated
from tests.workbench.ladder import MEGA, RATES, bad_cell, measured, ok_cell, study

STEPS = Steps(
    ceilings=lambda _: Ceilings(1e12, {"float32": 1e13, "bfloat16": 1e13}, 1e-6, "2026-11-20T12:00:00+00:00", "made up")
)
UNPROBED = replace(STEPS, probe=lambda *_: ProbeReport(passed=1))
"""Steps without probes: each variant passes them unasked. Here they would judge only ``module``, which has tests of its own."""


@pytest.fixture(scope="module")
def everyday(pytestconfig):
    return load_study(pytestconfig.rootpath / "studies" / "everyday-calls.toml")


@pytest.fixture(scope="module")
def host_times(pytestconfig):
    return load_study(pytestconfig.rootpath / "studies" / "host-times.toml")


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setitem(timing.WARM_UP_SECONDS, "cpu", 0.0)
    monkeypatch.setattr(rotation, "CACHES", 0)  # two input sets instead of as many as exceed the caches
    monkeypatch.setattr(repeated, "SECONDS", 0.05)
    monkeypatch.setattr(sampling, "CPU_SAMPLE_SECONDS", 1e-4)
    monkeypatch.setattr(host, "CALLS", 4)
    monkeypatch.setattr(host, "WARM_UP_CALLS", 1)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several threads wait for each other where other tests run too
    yield
    torch.set_num_threads(threads)


def test_every_form_is_counted_once_in_each_direction(everyday):
    full = everyday.at_scale("full")
    cases = [(shape.operation, shape.dtype, tuple(shape.sizes.items()), repr(shape.options)) for shape in full]
    assert max(Counter(cases).values()) == 1
    for criterion in everyday.criteria:
        if criterion.at is None:
            names = [asked.name for asked in everyday.asked(criterion)]
            assert len(names) == len(set(names)) == sum(len(everyday.directions_at(shape)) for shape in full)


def test_groups_hold_the_forms_of_the_table(everyday):
    groups = {name: {shape.name for shape in shapes} for name, shapes in everyday.groups().items()}
    assert set(groups) == {"channel", "head", "states", "scans", "layers", "prefill", "decoding", "small"}
    assert len(groups["channel"]) == len(groups["head"]) == 14  # 10 plain, 2 packed, 2 grouped
    assert len(groups["states"]) == 2 * (5 + 2) + 2  # with the packed ones and the prefills
    for shape in everyday.at_scale("full"):
        one_step = shape.sizes["T"] == 1
        assert (shape.name in groups["decoding"]) == one_step
        if one_step or shape.name in groups["prefill"]:
            assert everyday.directions_at(shape) == ("forward",)
        per_head = shape.options.get("decay_per") == "head"
        assert (shape.name in groups["head"]) <= per_head
        assert not (per_head and shape.name in groups["channel"])


def test_both_layers_are_those_that_fla_has_by_default(everyday):
    layers = [shape for shape in everyday.at_scale("full") if "layers" in shape.groups]
    assert [shape.name.split()[0] for shape in layers] == ["GatedLinearAttention", "SimpleGatedLinearAttention"]
    for shape in layers:
        operation, case, sizes = everyday.operation_at(shape), everyday.case(shape), shape.sizes
        parameters = inspect.signature(getattr(onelaunch.nn, shape.name.split()[0])).parameters
        default = {name: parameter.default for name, parameter in parameters.items()}
        assert (default["hidden_size"], default["num_heads"]) == (sizes["D"], sizes["H"])
        assert default["expand_k"] * sizes["D"] == sizes["H"] * sizes["K"]
        assert default["expand_v"] * sizes["D"] == sizes["H"] * sizes["V"]
        assert default["norm_eps"] == operation.option(case, "eps")
        assert default["gate_logit_normalizer"] == operation.option(case, "normalizer")
        assert (default["conv_size"] if default["use_short_conv"] else None) == operation.option(case, "conv_size")
        assert ("gate_low_rank_dim" in default) == (operation.option(case, "decay_per") == "channel")
        assert {"auto", "fla", "module"} <= set(everyday.variants_at(shape))


def test_no_criterion_is_infeasible_or_vacuous(everyday, host_times):
    for found in (everyday, host_times):
        plan = plan_study(found, RATES, "cpu", "full")
        assert plan.infeasible == {}
        assert [criterion.name for criterion in found.criteria if criterion.quantity.guarantee(found, criterion)] == []


def test_each_operation_has_a_peer_at_every_form(everyday):
    for shape in everyday.at_scale("full"):
        assert everyday.select({"requires": "fla", "usual": True}, shape)
        assert "auto" in everyday.variants_at(shape)


def test_the_bounds_are_those_that_were_asked(everyday, host_times):
    bounds = {criterion.at: criterion.at_least for criterion in everyday.criteria if criterion.combine == "geomean"}
    assert bounds == {"channel": 3.0, "head": 2.0, "states": 3.0, "decoding": 1.3, None: 2.0}
    (head,) = [criterion for criterion in everyday.criteria if criterion.at == "head"]
    assert head.all_directions == ("forward",)
    eager = [criterion for criterion in everyday.criteria if criterion.regime == "eager"]
    assert {criterion.most_noise for criterion in eager} == {1.05}
    slower = [criterion for criterion in everyday.criteria if criterion.name.startswith("no form is slower")]
    assert [(one.regime, one.at, one.at_least, one.all_directions, one.leave_out) for one in slower] == [
        ("cold", None, 1.0, DIRECTIONS, False),
        ("eager", None, 1.0, DIRECTIONS, False),
    ]
    asked = {(one.at, one.direction): one.at_most for one in host_times.criteria}
    assert asked == {
        ("gla", "forward"): 4.0,
        ("gla", "forward_backward"): 2.0,
        ("swiglu", "forward"): 2.5,
        ("linear_rnn", "forward"): 4.0,
        ("layer", "forward"): 16.0,
        ("layer", "forward_backward"): 5.0,
    }


def test_a_number_of_sequences_stands_for_different_lengths(everyday):
    case = everyday.case(everyday.shape("packed 256 channel"))
    lengths = packed_lengths(case, case.options["lengths"])
    assert len(lengths) == 256
    assert sum(lengths) == 8192
    assert (min(lengths), max(lengths)) == (13, 51)
    assert packed_lengths(case, (8000, 192)) == [8000, 192]


def test_training_without_state_gradients_has_none_of_states(everyday):
    shape = everyday.shape("states channel")
    small = shape.model_copy(update={"sizes": {"B": 1, "T": 4, "H": 1, "K": 16, "V": 16}})
    operation, case = everyday.operation_at(shape), everyday.case(small)
    inputs = host.make_inputs(operation, case, torch.device("cpu"), 0, "forward_backward")
    assert inputs.differentiable == ("q", "k", "v", "g")
    outputs = host.Candidate.variant(operation, "auto")(host.Inputs(inputs.arguments))
    assert set(outputs) == {"o", "final_state"}
    assert set(host.draw_gradients(outputs, case.dtype, 0, inputs.through)) == {"o"}


@pytest.mark.thorough
def test_the_small_forms_run_without_a_gpu(everyday, short, tmp_path):
    result = run_study(
        everyday, device="cpu", rounds=3, time_cap=0.1, save_to=tmp_path / "result.json", count=False, steps=UNPROBED
    )
    assert {cell.status for cell in result.cells if cell.variant in ("auto", "module")} == {"ok"}
    assert {cell.status for cell in result.cells if cell.variant.startswith("fla")} == {"not_installed"}
    assert all(cell.chosen for cell in result.cells if cell.variant == "auto")
    assert result.decision is not None
    assert result.decision.kind == "measure_more"
    write_report(result, tmp_path / "report")


@pytest.mark.thorough
def test_host_times_are_taken_without_a_gpu_too(host_times, short, tmp_path):
    def shrunk(shape):
        sizes = {name: 8 if name in ("T", "M") else size for name, size in shape.sizes.items()}
        return shape.model_copy(update={"dtype": "float32", "sizes": sizes})

    small = host_times.model_copy(update={"shapes": tuple(map(shrunk, host_times.shapes))})
    path = tmp_path / "result.json"
    result = run_study(small, device="cpu", scale="full", rounds=3, time_cap=0.1, save_to=path, steps=UNPROBED)
    taken = {(cell.shape, cell.direction, cell.variant) for cell in result.cells if cell.beside}
    assert taken >= {(one.at, one.direction, one.of) for one in host_times.criteria}
    assert all(outcome.values for outcome in result.outcomes)


# Shapes at which the other side cannot run


def outcome_of(*cells, **more):
    criterion = Criterion(name="fast", measure="speedup", of="one", over="two", at=("mega", "other"), at_least=2.0, **more)
    other = MEGA.model_copy(update={"name": "other"})
    return evaluate(measured(study(criterion, shapes=(MEGA, other)), *cells), {})[0]


def elsewhere(cell):
    return cell.model_copy(update={"shape": "other"})


@pytest.mark.parametrize(("leave_out", "status"), [(True, "met"), (False, "not_measured")])
def test_shapes_that_the_other_side_cannot_run_are_listed(leave_out, status):
    cells = ok_cell("one", 10.0), ok_cell("two", 30.0), elsewhere(ok_cell("one", 10.0)), elsewhere(bad_cell("two", "unsupported"))
    outcome = outcome_of(*cells, leave_out=leave_out)
    assert outcome.status == status
    assert set(outcome.values) == {"mega"}
    assert outcome.evidence.endswith("left out, as two cannot run there: other.") == leave_out


@pytest.mark.parametrize("status", ["not_installed", "error", "incorrect"])
def test_a_side_that_failed_is_not_left_out(status):
    cells = ok_cell("one", 10.0), ok_cell("two", 30.0), elsewhere(ok_cell("one", 10.0)), elsewhere(bad_cell("two", status))
    assert outcome_of(*cells, leave_out=True).status == "not_measured"


def test_nothing_is_met_where_the_other_side_runs_nowhere():
    cells = [made for cell in (ok_cell("one", 10.0), bad_cell("two", "unsupported")) for made in (cell, elsewhere(cell))]
    outcome = outcome_of(*cells, leave_out=True)
    assert outcome.status == "not_measured"
    assert "can run at none of its shapes" in outcome.evidence
