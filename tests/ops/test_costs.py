"""Tests of the costs of all operations: no variant costs less than the least cost.

For the operations in ``CASES`` the least cost writes exactly the results and gradients; for those in ``WITHOUT_STATE_GRADIENT``
all but the gradient of the initial state.

``operation.cost(case, variant, direction)`` counts bytes and FLOPs; with ``None`` for the variant, the least that any
implementation needs. A control is a part of an operation that studies time too, such as its matrix product alone.
"""

from __future__ import annotations

import pytest
import torch

from onelaunch.decode.step.contract import decode_step
from onelaunch.operation import DIRECTIONS, find_operation, operations

CASES = {  # sizes and options of cases in float16, by operation
    "gated_scan": [
        {"B": 2, "T": 24, "V": 16},
        {"B": 2, "T": 24, "V": 16, "initial_state": True, "final_state": True, "log_decay_dtype": "float32"},
        {"B": 2, "T": 24, "V": 16, "gate": False},
    ],
    "linear_rnn": [
        {"B": 2, "T": 24, "D": 16, "V": 16},
        {"B": 2, "T": 24, "D": 16, "V": 16, "initial_state": True, "final_state": True},
        {"B": 2, "T": 24, "D": 16, "V": 16, "gate": False},
    ],
    "gla": [
        {"B": 2, "T": 24, "H": 2, "K": 16, "V": 16},
        {"B": 2, "T": 24, "H": 2, "K": 16, "V": 16, "initial_state": True, "final_state": True},
        {"B": 2, "T": 24, "H": 2, "K": 16, "V": 16, "initial_state": True, "final_state": True, "state_gradients": False},
        {"B": 2, "T": 24, "H": 2, "K": 16, "V": 16, "decay_per": "head", "log_decay_dtype": "float32"},
    ],
    "output_chain": [
        {"B": 2, "T": 24, "H": 2, "V": 16, "D": 16},
        {"B": 2, "T": 24, "H": 2, "V": 16, "D": 16, "norm_weight": "same"},
    ],
    "projections": [{"B": 2, "T": 24, "H": 2, "K": 16, "V": 16, "D": 32, "segments": "2x16,2x16:silu,2x16:l2norm"}],
    # With a residual of the dtype of x, one gradient is that of both: see test_rms_norm.py.
    "rms_norm": [{"M": 24, "D": 16, "residual": "none"}, {"M": 24, "D": 16, "residual": "float32", "weight": "float32"}],
    "swiglu": [{"N": 24, "K": 32, "M": 16}],
}

WITHOUT_STATE_GRADIENT = ("gated_scan", "linear_rnn")
"""Operations whose cost leaves out the gradient of the initial state, because it is small."""


def cases():
    found = {each.name: each for each in operations()}
    for name, given in CASES.items():
        for sizes in given:
            yield found[name].case("float16", **sizes)


@pytest.mark.parametrize("case", list(cases()), ids=str)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_minimal_bytes_written_are_the_results_and_gradients(case, direction):
    operation = find_operation(case.operation)
    inputs = operation.make_inputs(case, torch.device("cpu"), seed=0)
    found = operation(**inputs.arguments)
    outputs = [each for each in (found if isinstance(found, tuple) else (found,)) if each is not None]
    written = sum(each.nbytes for each in outputs)
    if direction == "forward_backward":
        counted = [
            name for name in inputs.differentiable if name != "initial_state" or case.operation not in WITHOUT_STATE_GRADIENT
        ]
        written += sum(inputs.arguments[name].nbytes for name in counted)
    assert operation.cost(case, None, direction).written == written


@pytest.mark.parametrize("name", [*CASES, "gla_layer", "decode_step"])
def test_every_variant_states_its_writes_and_costs_at_least_the_minimum(name, pytestconfig):
    """Compare at the shapes of all studies in ``studies`` that measure the operation."""
    from onelaunch.workbench.study.read import load_study

    found = 0
    for path in sorted((pytestconfig.rootpath / "studies").glob("*.toml")):
        study = load_study(path)
        if name not in study.operation_names():
            continue
        operation = find_operation(name)
        for shape in study.shapes:
            if study.operation_at(shape) is not operation:
                continue
            case = study.case(shape)
            for direction in study.directions:
                least = operation.cost(case, None, direction)
                assert least.written is not None
                for variant in operation.variants.values():
                    cost = operation.cost(case, variant, direction)
                    assert least.written <= cost.written < cost.bytes, (case, variant)
                    assert least.bytes - least.written <= cost.bytes - cost.written, (case, variant)
                    assert least.flops <= cost.flops, (case, variant)
                    found += 1
            assert all(0 < control.cost(case).written < control.cost(case).bytes for control in operation.controls.values())
    assert found


@pytest.mark.parametrize(
    ("operation", "variant", "launches"),
    [
        ("gated_scan", "separate", (2, 4)),
        ("gated_scan", "fused", (1, 2)),
        ("linear_rnn", "three_launch", (3, 7)),
        ("linear_rnn", "three_launch_cublas", (3, 7)),
        ("linear_rnn", "semi_fused", (2, 5)),
        ("linear_rnn", "fused_chunked", (1, 4)),
    ],
)
def test_a_launch_for_the_gate_is_not_counted_without_a_gate(operation, variant, launches):
    found = find_operation(operation)
    sizes = dict.fromkeys(found.dimensions, 64)
    apart = variant in ("separate", "three_launch", "three_launch_cublas")
    for gate in (True, False):
        case = found.case("float16", **sizes, gate=gate)
        counted = tuple(found.cost(case, found.get(variant), direction).launches for direction in DIRECTIONS)
        assert counted == (launches if gate or not apart else (launches[0] - 1, launches[1] - 2))


def test_decoding_a_token_writes_less_than_a_thousandth_of_its_bytes():
    sizes = {"layers": 28, "hidden": 1024, "intermediate": 3072, "heads": 16, "kv_heads": 8, "head_dim": 128}
    cost = decode_step.cost(decode_step.case("bfloat16", **sizes, vocabulary=151936, position=1000))
    assert cost.written == 28 * 2 * 8 * 128 * 2 + 4 * 151936  # keys and values of one position, and logits in float32
    # If less than a tenth of the bytes is written, the roofline bound uses the read bandwidth, not the copy bandwidth.
    assert cost.written < cost.bytes / 1000
