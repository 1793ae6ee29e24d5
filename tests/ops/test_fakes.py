"""Tests that the empty results which tracers get from an operator equal those of the function that launches the kernels.

That function runs on fake tensors of a pretended Hopper GPU, with its launches recorded instead of run.

A test marked ``thorough`` does not run in ``make test``.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
    free_symbols,
)

from onelaunch.device.architectures import pretended
from onelaunch.launch.imitation import imitate, record, trace
from onelaunch.launch.operator import Operator, _Context
from onelaunch.operation import Case, Operation, Variant, find_operation
from onelaunch.operation.examples import _differentiable
from onelaunch.ops import Segment
from onelaunch.ops.gated_scan import autograd as gated_scan
from onelaunch.ops.gla import autograd as gla
from onelaunch.ops.gla_layer import autograd as gla_layer
from onelaunch.ops.linear_rnn import autograd as linear_rnn
from onelaunch.ops.output_chain import autograd as output_chain
from onelaunch.ops.projections import autograd as projections
from onelaunch.ops.rms_norm import autograd as rms_norm
from onelaunch.ops.swiglu import autograd as swiglu

ARCHITECTURE = "sm_90a"

BACKWARD = {
    gated_scan: gated_scan.backward,
    gla: gla.backward,
    gla_layer: gla_layer.backward,
    linear_rnn: linear_rnn.backward,
    output_chain: output_chain.norm_gate_gradients,
    projections: projections.backward,
    rms_norm: rms_norm.backward,
    swiglu: swiglu.gate_backward,
}
"""Operator of the backward pass by the module of an operation's operators, which has ``forward``, ``save`` and ``gradients``."""

MODULES = {module.__name__.split(".")[-2]: module for module in BACKWARD}

LARGE: dict[str, list[dict[str, Any]]] = {
    "gated_scan": [{"B": 3, "T": length, "V": 40, "log_decay_dtype": "float32"} for length in (1, 16, 17, 32, 33, 64, 65, 513)],
    "linear_rnn": [{"B": 2, "T": length, "D": 64, "V": 128, "initial_state": True} for length in (1, 20, 64, 65, 520)],
    "gla": [
        {"B": 2, "T": 100, "H": 4, "K": 64, "V": 128, "initial_state": state, "final_state": state, "decay_per": per}
        for state in (False, True)
        for per in ("channel", "head")
    ],
    "gla_layer": [
        {"B": 2, "T": 130, "D": 192, "H": 2, "K": 64, "V": 128, "initial_state": state, "final_state": state}
        for state in (False, True)
    ]
    + [{"B": 2, "T": 1, "D": 192, "H": 2, "K": 64, "V": 128, "initial_state": True, "final_state": True}],
    "swiglu": [{"M": rows, "N": 96, "K": 128, "stacked": stacked} for rows in (3, 300) for stacked in (False, True)],
    "projections": [{"B": 2, "T": 70, "D": width, "H": 2, "K": 32, "V": 64} for width in (128, 16)],
    "output_chain": [{"B": 2, "T": 70, "H": 2, "V": 64, "D": 128, "bias": True}],
    "rms_norm": [{"M": 140, "D": 128, "residual": "float32"}],
}
"""Sizes that Hopper's kernels take, in 16 bits, in addition to the probes."""


@pytest.fixture(autouse=True)
def _tf32():
    """Allow TF32, which one of the variants needs."""
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    yield
    torch.backends.cuda.matmul.fp32_precision = before


def own_kernels(operation: Operation[..., Any]) -> list[Variant]:
    """Return the variants of ours that launch kernels on the pretended GPU; those of ``gla_layer`` are kernels of its parts."""
    return [
        each
        for each in operation.variants.values()
        if each.is_own and (each.launches is not None or each.name in ("packed", "packed_states"))
        if ARCHITECTURE in (each.capabilities.architectures or (ARCHITECTURE,))
    ]


def able(operation: Operation[..., Any], case: Case, grad: bool) -> list[Variant]:
    """Return those of the variants that can run a case."""
    query = operation.query(case, str(pretended(ARCHITECTURE)), grad=grad)
    return [each for each in own_kernels(operation) if each.why_not(query) is None]


def cases(operation: Operation[..., Any]) -> list[Case]:
    """Return the sizes of :data:`LARGE` in bfloat16, then the operation's edge cases with elements.

    A copy of a tensor on a pretended device fails, so states with values first are left to a test of their own.
    """
    probes = [each.case for each in operation.listed_probes() if not each.refused and all(each.case.sizes.values())]
    probes = [each for each in probes if not each.options.get("state_v_first")]
    return [operation.case("bfloat16", **sizes) for sizes in LARGE[operation.name]] + probes


@contextlib.contextmanager
def comparisons(module: Any, monkeypatch: pytest.MonkeyPatch):
    """Compare the fake of every operator of a module that is called inside with its function; yield the names of those called."""
    compared: list[str] = []

    def compare(operator: Operator, run: Any, inputs: tuple[Any, ...]) -> Any:
        expected, found = run(*inputs), operator.fake(*inputs)
        assert layouts(found) == layouts(expected), operator.name
        compared.append(operator.name)
        return expected

    def called(self: Operator, inputs: tuple[Any, ...], grad: bool) -> Any:
        compare(self, runs.get(self, self.run), inputs)
        return call(self, inputs, grad)

    call, operators = Operator._call, [each for each in vars(module).values() if isinstance(each, Operator)]
    runs = {each: each.run for each in operators}
    with monkeypatch.context() as patch:
        patch.setattr(Operator, "_call", called)
        for each in operators:  # the recorded backward pass calls ``run`` of its operator
            patch.setattr(each, "run", lambda *inputs, each=each: compare(each, runs[each], inputs))
        yield compared


def layouts(results: Any) -> list[tuple[Any, ...]]:
    """Return shape, strides, dtype and device of each result."""
    tensors = results if isinstance(results, (tuple, list)) else [results]
    return [(tuple(each.shape), each.stride(), each.dtype, each.device) for each in tensors]


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.thorough)], ids=["brief", "every_case"])
@pytest.mark.parametrize("name", MODULES)
def test_fakes_equal_the_results_of_launches(name, every, monkeypatch):
    """In brief, the cases end with the one by which every operator and variant has been called."""
    module, operation = MODULES[name], find_operation(name)
    operators = {each.name for each in vars(module).values() if isinstance(each, Operator)}
    # All but two that call operators of gated_scan alone.
    variants = {each.name for each in own_kernels(operation)} - {"three_launch_cublas", "semi_fused"}
    seen: set[str] = set()
    ran: set[str] = set()
    for case in cases(operation):
        for grad in (False, True):
            for variant in able(operation, case, grad):
                with record(ARCHITECTURE) as (device, _), torch.no_grad(), comparisons(module, monkeypatch) as compared:
                    reading = operation.make_inputs(case, device, 0)
                    for name in reading.differentiable if grad else ():
                        reading.arguments[name].requires_grad_()
                    call = operation.bind(**reading.arguments)
                    if call.query().grad is not grad:
                        call = _differentiable(variant, call)
                    variant.run(call)
                    seen.update(compared)
                    if compared:
                        ran.add(variant.name)
        if not every and seen >= operators and ran >= variants:
            break
    assert seen >= operators
    assert ran >= variants


@pytest.mark.parametrize("kernel", ["stepwise", "fused"])
def test_a_final_state_with_values_first_lies_as_the_kernel_writes_it(kernel):
    with imitate(), FakeTensorMode():
        q, v = torch.empty(3, 1, 2, 16), torch.empty(3, 1, 2, 32)
        state = torch.empty(3, 2, 32, 16).mT
        inputs = (q, q, v, q, state, None, 1.0, True, kernel)
        assert layouts(gla.forward.fake(*inputs)) == layouts(gla.run_forward(*inputs))
        assert gla.forward.fake(*inputs)[1].is_contiguous() == (kernel == "fused")


# Symbolic sizes on a pretended Hopper GPU


def symbolic(*hints: int) -> tuple[ShapeEnv, FakeTensorMode, tuple[Any, ...]]:
    """Return an environment of sizes, its mode of fake tensors, and symbolic sizes with these hints."""
    environment = ShapeEnv()
    mode = FakeTensorMode(shape_env=environment)
    dynamic: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * len(hints))
    return environment, mode, tuple(mode.from_tensor(torch.empty(hints), symbolic_context=dynamic).shape)


def arguments_of(
    name: str, batch: Any, length: Any, device: torch.device, *, states: bool, usual: torch.dtype = torch.bfloat16
) -> dict[str, Any]:
    """Return the arguments of a training call that Hopper's kernels take, with symbolic sizes, of the usual dtype."""

    def new(*shape: Any, dtype: torch.dtype = usual) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    heads, keys, values, width = 4, 64, 128, 256
    state = {"initial_state": new(batch, heads, keys, values, dtype=torch.float32), "output_final_state": True} if states else {}
    steps = (batch, length)
    if name == "gla":
        q, k = (new(*steps, heads, keys) for _ in range(2))
        return {"q": q, "k": k, "v": new(*steps, heads, values), "g": new(*steps, heads, keys), **state}
    if name == "gated_scan":
        v, log_decay, gate = (new(*steps, width) for _ in range(3))
        return {"v": v, "log_decay": log_decay, "gate": gate, "output_final_state": states}
    if name == "linear_rnn":
        log_decay, gate = (new(*steps, 512) for _ in range(2))
        return {"x": new(*steps, width), "weight": new(width, 512), "log_decay": log_decay, "gate": gate}
    if name == "swiglu":
        return {"x": new(*steps, width), "w_gate": new(512, width), "w_up": new(512, width)}
    if name == "projections":
        segments = (Segment("k", heads, keys, "l2norm"), Segment("v", heads, values, "silu"), Segment("b", 8, 1, bias=True))
        return {"x": new(*steps, width), "weight": new(heads * (keys + values) + 8, width), "segments": segments, "bias": new(8)}
    if name == "output_chain":
        h, gate = (new(*steps, heads, values) for _ in range(2))
        return {"h": h, "gate": gate, "norm_weight": new(values), "w_out": new(width, heads * values)}
    if name == "rms_norm":
        return {"x": new(*steps, width), "weight": new(width), "residual": new(*steps, width)}
    rows = 2 * heads * (keys + values) + 16
    weights = {"in_proj_weight": new(rows, width), "gk_weight": new(heads * keys, 16), "gk_bias": new(heads * keys)}
    rest = {"norm_weight": new(values), "w_out": new(width, heads * values), "heads": heads}
    return {"x": new(*steps, width), **weights, **rest, **state}


HOPPER = [
    ("swiglu", "persistent"),
    ("swiglu", "stream_k"),
    ("swiglu", "small_m"),
    ("swiglu", "fused"),
    ("gla", "hopper"),
    ("gla", "hopper_tf32"),
    ("gla", "fused"),
    ("gla", "stepwise"),
    ("linear_rnn", "fused_hopper"),
    ("linear_rnn", "fused_chunked"),
    ("gated_scan", "fused"),
    ("gated_scan", "separate"),
    ("projections", "epilogue_persistent"),
    ("projections", "cluster"),
    ("projections", "wide_activated"),
    ("output_chain", "norm_gate"),
    ("output_chain", "prologue"),
    ("rms_norm", "fused"),
    ("gla_layer", "packed"),
    ("gla_layer", "packed_states"),
]


TWO_RESULTS = ("gla", "gated_scan", "linear_rnn", "gla_layer", "rms_norm")
"""Operations whose forward operator has two differentiable outputs."""


@pytest.mark.parametrize("states", [pytest.param(False, marks=pytest.mark.thorough), True])
@pytest.mark.parametrize(("name", "variant"), HOPPER)
def test_symbolic_sizes_stay_symbolic_on_hopper(name, variant, states, monkeypatch):
    """The public call, with gradients or without, and the backward pass fix no size of a call, and limit it as kernels do."""
    module, operation = MODULES[name], find_operation(name)
    environment, mode, (batch, length) = symbolic(3, 40 if variant in ("small_m", "stepwise") else 1000)
    called: list[tuple[Operator, tuple[Any, ...], Any]] = []
    call = Operator._call

    def watched(self: Operator, inputs: tuple[Any, ...], grad: bool) -> Any:
        results = call(self, inputs, grad)
        if grad:
            called.append((self, inputs, self.fake(*inputs)))
        return results

    monkeypatch.setattr(Operator, "_call", watched)
    with trace(ARCHITECTURE, mode) as device, torch.no_grad():
        usual = torch.float32 if variant == "hopper_tf32" else torch.bfloat16
        arguments = arguments_of(name, batch, length, device, states=states, usual=usual)
        results = operation(**arguments, variant=variant) if name != "gla_layer" else None  # this one only trains
        bound = operation.bind(**arguments)
        trained = operation.get(variant).run(_differentiable(operation.get(variant), bound))
        for operator, inputs, output in called:
            if operator is module.forward:
                context = _Context(inputs)
                module.save(context, inputs, output)
                differentiable = output[: 2 if name in TWO_RESULTS else 1]
                outputs = operator.views(inputs, output[0]) if operator.views else differentiable
                gradients = module.gradients(context, BACKWARD[module].registered, *(torch.empty_like(each) for each in outputs))
                for tensor, gradient in zip(inputs, gradients, strict=True):
                    assert gradient is None or gradient.shape == tensor.shape
    assert module.forward in [operator for operator, *_ in called]
    for found in (results, trained):
        if found is not None:
            first = found[0] if isinstance(found, tuple) else found
            assert free_symbols(first.shape[0]) | free_symbols(first.shape[1])
    assert not environment.replacements, "a size is fixed, or equal to another one"
    for size, least in ((batch, 2), (length, 64)):
        range_ = environment.bound_sympy(size.node.expr)
        assert range_.lower <= least
        assert range_.upper >= 2 * size.node.hint


def test_a_size_that_the_kernel_cannot_run_is_guarded():
    """The backward pass of this kernel needs 64 steps, so code that was traced for 1000 may not run 63."""
    environment, mode, (batch, length) = symbolic(3, 1000)
    with trace(ARCHITECTURE, mode) as device, torch.no_grad():
        find_operation("linear_rnn")(**arguments_of("linear_rnn", batch, length, device, states=False), variant="fused_hopper")
    assert environment.bound_sympy(length.node.expr).lower == 64
