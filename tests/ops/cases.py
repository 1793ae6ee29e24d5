"""Cases of ``gated_scan``, ``linear_rnn`` and ``gla`` that tests share, and helpers and assertions for tests of all operations.

Edge cases are the operations' own probes (``probes.py`` in their folders); longer cases are listed here. A case is written as
arguments of ``operation.case``: dtype, sizes and options. Sizes are B sequences of T steps, D columns of x, H heads of K key and
V value channels (for the scans, V channels). The option ``decay`` names the kind of random log-decays: near 0 (``weak``), below
-80 in sum over 16 steps (``strong``), 0 (``zero``), -inf (``forget``; for ``gla``, at a quarter of the steps), or a mixture
(``mixed``); by default they are as models produce them. ``lengths`` packs sequences of these lengths into one row of T steps.
``initial_state`` and ``final_state`` say whether a call is given the one and returns the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from onelaunch.operation import Case, Direction, Operation, find_operation, names_of
from onelaunch.ops.gla import probes as gla_probes
from onelaunch.ops.gla.contract import FUSED_RECURRENT
from onelaunch.ops.gla.probes import NO_STATES, STATES
from onelaunch.ops.linear_rnn import probes as linear_rnn_probes
from onelaunch.workbench.result import Verdict
from onelaunch.workbench.verify import Judge, judge, judge_outputs
from onelaunch.workbench.verify.calls import Candidate
from onelaunch.workbench.verify.poison import poisoned

BOTH: tuple[Direction, ...] = ("forward", "forward_backward")
"""Directions to judge: the forward pass alone, and with gradients."""


def runnable(operation: Operation[..., Any], cases: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the cases without an empty dimension, which not every kernel takes. ``run_probes`` judges the others."""
    return {name: case for name, case in cases.items() if all(case.get(size, 1) for size in operation.dimensions)}


def interpretable(cases: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the cases that are small enough for Triton's interpreter, with dtypes that it rounds as a GPU does."""
    return {name: case for name, case in cases.items() if case["dtype"] != "bfloat16" and case.get("T", 1) <= 150}


GATED_SCAN, LINEAR_RNN, GLA = find_operation("gated_scan"), find_operation("linear_rnn"), find_operation("gla")
SCANS = (GATED_SCAN, LINEAR_RNN)
OPERATIONS = (*SCANS, GLA)
"""The operations with a recurrence over time, not all of onelaunch: the cases of the others are in files of their own."""

PROBES = runnable(LINEAR_RNN, linear_rnn_probes.CASES)
"""Probes of ``linear_rnn``; without D, most are those of ``gated_scan``.

A tile has at most 64 steps, and 256 in ``fused_hopper``.
"""

SHORT = interpretable(PROBES)
"""Cases of ``gated_scan`` and ``linear_rnn`` for Triton's interpreter."""

LONG: dict[str, dict[str, Any]] = {
    "thousand_steps": {"dtype": "float32", "B": 1, "T": 1000, "D": 24, "V": 80, "decay": "mixed", **STATES},
    "thousand_weak_steps": {"dtype": "float16", "B": 3, "T": 1000, "D": 24, "V": 20, "decay": "weak", **STATES},
    "thousand_strong_steps": {"dtype": "float32", "B": 1, "T": 1000, "D": 24, "V": 20, "decay": "strong", **STATES},
    "thousand_summed_steps": {"dtype": "float32", "B": 1, "T": 1000, "D": 24, "V": 20, "decay": "zero", **NO_STATES},
    "thousand_packed": {
        "dtype": "float16", "B": 1, "T": 1000, "D": 24, "V": 20, "lengths": (0, 400, 64, 0, 1, 535), **STATES,
    },
    "group_chain": {"dtype": "float32", "B": 1, "T": 2200, "D": 24, "V": 16, **STATES},
}  # fmt: skip
"""Cases that take too long for probes.

``group_chain`` is longer than one group of the look-back (32 tiles of 64 steps), so that groups pass on carries too.
"""

HARD = PROBES | LONG

GLA_PROBES = runnable(GLA, gla_probes.CASES)
"""Probes of ``gla``. A chunk of its kernels has 64 steps."""

GLA_SHORT = interpretable(GLA_PROBES)
"""Cases of ``gla`` for Triton's interpreter."""

GLA_LONG: dict[str, dict[str, Any]] = {
    "thousand_steps": {"dtype": "float32", "B": 1, "T": 1000, "H": 2, "K": 24, "V": 40, "decay": "mixed", **STATES},
    "thousand_strong_steps": {"dtype": "float32", "B": 1, "T": 1000, "H": 1, "K": 24, "V": 20, "decay": "strong", **STATES},
    "thousand_summed_steps": {"dtype": "float16", "B": 1, "T": 1000, "H": 1, "K": 24, "V": 20, "decay": "zero", **NO_STATES},
    "thousand_packed": {
        "dtype": "float16", "B": 1, "T": 1000, "H": 1, "K": 24, "V": 20, "lengths": (0, 400, 64, 0, 1, 535), **STATES,
    },
    "bfloat16_float32_decay": {
        "dtype": "bfloat16", "B": 1, "T": 300, "H": 2, "K": 128, "V": 64, "decay": "mixed", "log_decay_dtype": "float32",
        **STATES,
    },
    "wide_keys": {"dtype": "float16", "B": 1, "T": 70, "H": 1, "K": 512, "V": 16, **STATES},
    "wide_values": {"dtype": "float32", "B": 1, "T": 70, "H": 1, "K": 16, "V": 512, **STATES},
    "odd_heads": {"dtype": "bfloat16", "B": 1, "T": 97, "H": 1, "K": 257, "V": 129, "decay": "mixed", **STATES},
    "long_and_weak": {"dtype": "float32", "B": 1, "T": 2500, "H": 1, "K": 16, "V": 16, "decay": "weak", **STATES},
}  # fmt: skip
"""Cases of ``gla`` that take too long for probes."""

GLA_HARD = GLA_PROBES | GLA_LONG

_JUDGE = Judge()
"""Cache of reference outputs, so that variants tested at one case share them."""


def case_of(operation: Operation[..., Any], name: str) -> Case:
    """Return a hard case of an operation by name, without sizes such as D that the operation does not have."""
    known = {*operation.dimensions, *operation.options, "dtype"}
    hard = GLA_HARD if operation is GLA else HARD
    return operation.case(name=name, **{key: value for key, value in hard[name].items() if key in known})


def stepwise_baseline(operation: Operation[..., Any]) -> str:
    """Return the PyTorch variant that loops over time step by step. It reads the offsets of packed sequences."""
    return next(name for name, variant in operation.variants.items() if variant.tags.get("yardstick"))


def first_of(operation: Operation[..., Any]) -> str:
    """Return the name of the operation's first argument."""
    return {"gated_scan": "v", "linear_rnn": "x", "gla": "q"}[operation.name]


def decay_of(operation: Operation[..., Any]) -> str:
    """Return the name of the operation's log-decay argument."""
    return "g" if operation is GLA else "log_decay"


def pytorch_variants(operation: Operation[..., Any]) -> list[str]:
    """Return the variants of plain PyTorch: without kernels of ours, another project's package, or ``torch.compile``."""
    own = [
        name for name, variant in operation.variants.items() if variant.launches is None and variant.capabilities.requires is None
    ]
    return [name for name in own if name != "compiled"]


def triton_variants(operation: Operation[..., Any]) -> list[str]:
    """Return the variants with kernels of our own that run on any GPU. Only variants with own kernels state their launches.

    ``fused_recurrent`` of ``gla`` is left out: it takes what the other kernels refuse, and test_gla_recurrence.py tests it. Two
    of ``linear_rnn`` are left out, too, which take few rows, without gradients: test_linear_rnn_few_rows.py tests them.
    """
    apart = (FUSED_RECURRENT, "fused_few_rows", "semi_fused_few_rows")
    own = [name for name, variant in operation.variants.items() if variant.launches is not None and name not in apart]
    return [name for name in own if operation.variants[name].capabilities.architectures is None]


def variants_by_case(variants: list[str], cases: dict[str, Any] | list[str]) -> pytest.MarkDecorator:
    """Parametrize ``variant`` and ``name``, the name of a case, over all pairs."""
    return pytest.mark.parametrize(("variant", "name"), [(variant, name) for name in cases for variant in variants])


def pytorch_variants_by_case(operation: Operation[..., Any], cases: Mapping[str, dict[str, Any]]) -> pytest.MarkDecorator:
    """Parametrize ``variant`` and ``name``, the name of a case, over all pairs of a variant of plain PyTorch and a case.

    The loop over single steps takes seconds for a thousand steps. It has no chunks, so it runs cases of more than 70 steps in
    ``make check`` alone. Of the other variants' cases of a thousand steps and more, one runs in ``make test``.
    """

    def is_thorough(variant: str, name: str) -> bool:
        length = cases[name].get("T", 1)
        return length > 70 if variant == stepwise_baseline(operation) else length >= 1000 and name != "thousand_steps"

    return pytest.mark.parametrize(
        ("variant", "name"),
        [
            pytest.param(variant, name, marks=[pytest.mark.thorough] if is_thorough(variant, name) else [])
            for name in cases
            for variant in pytorch_variants(operation)
        ],
    )


def assert_correct(operation: Operation[..., Any], case: Case, variant: str, device: torch.device | str = "cpu") -> None:
    """Require a variant to pass the whole verification gate (:func:`~onelaunch.workbench.verify.judge`) in both directions."""
    assert_ok(judge(operation, case, variant=variant, device=device, directions=BOTH), operation, case, variant)


def assert_compiled_correct(operation: Operation[..., Any], case: Case) -> None:
    """Require the ``torch.compile`` variant to pass the gate in training only, which compiles and judges its forward pass too.

    Inference compiles the same expressions again, without what gradients save, and takes seconds per case.
    """
    torch.compiler.reset()
    verdict = judge(operation, case, variant="compiled", directions=("forward_backward",))
    assert_ok(verdict, operation, case, "compiled")


def assert_one_call_correct(
    operation: Operation[..., Any], case: Case, variant: str, direction: Direction = "forward_backward"
) -> None:
    """Check one call: errors against the oracle, and that all results are written (new memory is filled with NaN).

    The whole verification gate makes further calls, which in the interpreter take minutes.
    """
    truth = _JUDGE.reference(operation, case, direction=direction)
    inputs = truth.inputs.clone()
    with poisoned():
        answer = Candidate.variant(operation, variant)(inputs)
    assert_ok(judge_outputs(truth, answer), operation, case, variant)


def assert_ok(verdict: Verdict, operation: Operation[..., Any], case: Case, variant: str) -> None:
    """Fail with everything that the verdict reports."""
    parts = [
        f"  {c.name}: {c.error:.2e} of {c.allowed:.2e}, along T {' '.join(f'{e:.0e}' for e in c.error_by_position)}"
        for c in verdict.components
    ]
    said = [f"{operation.name}.{variant} at {case} {dict(case.sizes)} {dict(case.options)}:", verdict.explain(), *parts]
    assert verdict.ok, "\n".join(said)


def arguments_of(operation: Operation[..., Any], *, grad: bool = False, seed: int = 0, **given: Any) -> dict[str, Any]:
    """Return random arguments of the public function, on the CPU.

    Args:
        operation: One of :data:`OPERATIONS`.
        grad: Whether the differentiable tensors take gradients.
        seed: Seed of the random values.
        given: Sizes, options or dtype of a case. The default is a small one in float32.
    """
    sizes = {"B": 2, "T": 9, "D": 5, "V": 6} | ({"H": 2, "K": 20, "V": 16} if operation is GLA else {})
    known: dict[str, Any] = {
        key: value
        for key, value in {**sizes, "dtype": "float32", **given}.items()
        if key not in sizes or key in operation.dimensions
    }
    reading = operation.make_inputs(operation.case(**known), torch.device("cpu"), seed)
    for name in reading.differentiable if grad else ():
        reading.arguments[name].requires_grad_()
    return reading.arguments


def differentiable(arguments: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors among the arguments that take gradients."""
    return {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor) and value.requires_grad}


def results(operation: Operation[..., Any], arguments: dict[str, Any], variant: str) -> dict[str, torch.Tensor]:
    """Call a variant, and return its results and gradients by name.

    Each argument that takes gradients, and that the results depend on, has one, ``grad NAME``, of a loss that weighs every
    element of all results differently.
    """
    outputs = operation(**arguments, variant=variant)
    names = names_of(operation.outputs, arguments)
    given = zip(names, outputs if isinstance(outputs, tuple) else (outputs,), strict=False)
    named = {name: value for name, value in given if value is not None}
    leaves = differentiable(arguments)
    if leaves:
        loss = torch.stack([(value.float() * weights_like(value)).sum() for value in named.values()]).sum()
        gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        found = zip(leaves, gradients, strict=True)
        named |= {f"grad {name}": gradient for name, gradient in found if gradient is not None}
    return {name: value.detach() for name, value in named.items()}


def weights_like(value: torch.Tensor) -> torch.Tensor:
    """Return weights of unit scale without repeating values."""
    steps = torch.arange(value.numel(), device=value.device, dtype=torch.float32)
    return torch.cos(steps * math.sqrt(2)).reshape(value.shape)


def assert_near(given: Mapping[Any, torch.Tensor], expected: Mapping[Any, torch.Tensor], tolerance: float) -> None:
    """Require the norm of each component's error to be at most ``tolerance`` times the norm of its expected value."""
    assert given.keys() == expected.keys()
    for name, value in expected.items():
        assert given[name].shape == value.shape, name
        assert given[name].dtype == value.dtype, name
        found, value = given[name].detach().double(), value.detach().double()
        scale = float(torch.linalg.vector_norm(value)) or 1.0
        error = float(torch.linalg.vector_norm(found - value)) / scale
        assert error <= tolerance, f"{name} is off by {error:.2e}; {tolerance:.2e} is allowed"


def assert_captured_step_follows_its_inputs(
    operation: Operation[..., Any],
    variant: str,
    made: Callable[..., dict[str, Any]],
    device: torch.device,
    tolerance: float = 0.0,
) -> None:
    """Require that a training step in a CUDA graph, replayed with new inputs, gives the results of an eager step.

    An eager step on a side stream precedes the capture, as PyTorch requires.

    Args:
        operation: Operation to compute.
        variant: Name of the variant.
        made: ``made(seed=..., grad=...)`` makes the arguments, on the device.
        device: Device of the arguments.
        tolerance: Relative error by norm; 0 where results must be bitwise equal.
    """
    arguments = made(seed=0, grad=True)
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        results(operation, arguments, variant)
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = results(operation, arguments, variant)
    for seed in range(1, 4):
        fresh = made(seed=seed, grad=False)
        with torch.no_grad():
            for name, value in arguments.items():
                if isinstance(value, torch.Tensor):
                    value.copy_(fresh[name])
        graph.replay()
        torch.cuda.synchronize(device)
        found = {name: value.clone() for name, value in captured.items()}
        assert_near(found, results(operation, arguments, variant), tolerance)


def assert_same_bits_beside_other_work_and_in_graphs(
    call: Callable[[], torch.Tensor | tuple[torch.Tensor, ...]], device: torch.device
) -> None:
    """Require that concurrent calls and replayed CUDA graphs give the bits of a single call.

    Three streams call at once, each together with a matrix product.

    Args:
        call: Function that computes the results, from the same arguments each time.
        device: Device of the results.
    """

    def made() -> tuple[torch.Tensor, ...]:
        outputs = call()
        return outputs if isinstance(outputs, tuple) else (outputs,)

    def assert_same(found: list[tuple[torch.Tensor, ...]]) -> None:
        assert all(torch.equal(one, other) for each in found for one, other in zip(each, expected, strict=True))

    expected = made()
    busy = torch.randn(2048, 2048, device=device)
    streams = [torch.cuda.Stream(device) for _ in range(3)]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream(device))
    found = []
    for _ in range(20):
        for stream in streams:
            with torch.cuda.stream(stream):
                busy @ busy
                found.append(made())
    torch.cuda.synchronize(device)
    assert_same(found)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = [made() for _ in range(3)]
    for _ in range(5):
        for output in (output for each in held for output in each):
            output.zero_()
        graph.replay()
        assert_same(held)


def small(operation: Operation[..., Any], **given: Any) -> dict[str, Any]:
    """Return random arguments of a call with few steps and channels, with both states unless ``given`` says otherwise."""
    channels = {} if operation is GLA else {"V": 4}
    return arguments_of(operation, **{"B": 1, "T": 20, **channels, "initial_state": True, "final_state": True, **given})
