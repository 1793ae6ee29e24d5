"""Tests of the short causal convolution's kernels, interpreted and on a GPU, against PyTorch's ``conv1d`` in float64."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from torch import library
from torch.nn import functional as F

from onelaunch.kernels.convolution import operator
from onelaunch.kernels.convolution.operator import convolve, why_not
from onelaunch.operation import requirements

pytest.importorskip("triton", reason="the kernels are written in Triton")

from onelaunch.kernels.convolution import launch

CASES: dict[str, dict[str, Any]] = {
    "one_step": {"T": 1},
    "fewer_steps_than_taps": {"B": 3, "T": 2, "state": True},
    "several_tiles": {"B": 2, "T": 37, "C": 136, "bias": True},
    "with_a_state": {"B": 2, "T": 70, "state": True, "bias": True},
    "one_tap": {"T": 40, "W": 1, "state": True},
    "most_taps": {"T": 40, "W": 8, "state": True, "bias": True},
    "packed": {"lengths": (40, 1, 0, 33, 2), "bias": True},
    "packed_with_states": {"lengths": (0, 3, 50, 1, 0, 0, 7), "state": True},
    "packed_one_sequence": {"lengths": (20,), "state": True},
    "packed_single_steps": {"lengths": (1,) * 7, "state": True, "W": 3},
}

TOLERANCE = {"float16": 1e-3, "bfloat16": 6e-3, "float32": 1e-6}
"""Largest norm-wise relative error of results and gradients, which are rounded once.

In 16 bits the kernels' gradient of y is rounded before, and the reference's is not.
"""

devices = pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.interpret), pytest.param("cuda:0", marks=pytest.mark.gpu)]
)


def made(device: str, dtype: str = "float32", **given: Any) -> dict[str, Any]:
    """Return random arguments of :func:`convolve` that require gradients."""
    options = {"B": 1, "T": 5, "C": 24, "W": 4, "bias": False, "state": False, "lengths": None, **given}
    batch, length, channels, width = (options[each] for each in "BTCW")
    lengths, sequences, offsets = options["lengths"], batch, None
    if lengths is not None:
        batch, length, sequences = 1, sum(lengths), len(lengths)
        offsets = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
    generator = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(getattr(torch, dtype)).to(device).requires_grad_()

    return {
        "x": drawn(batch, length, channels),
        "weight": drawn(channels, width),
        "bias": drawn(channels) if options["bias"] else None,
        "state": drawn(sequences, channels, width - 1) if options["state"] else None,
        "offsets": offsets,
    }


def reference(x, weight, bias, state, offsets, *, silu=True):
    """Return y by ``conv1d``, one sequence after the other."""
    width = weight.shape[1]
    bounds = [0, x.shape[1]] if offsets is None else offsets.tolist()
    parts = []
    for n, (first, end) in enumerate(itertools.pairwise(bounds)):
        before = x.new_zeros(x.shape[0], x.shape[2], width - 1)
        if state is not None:
            before = state if offsets is None else state[n : n + 1]
        inputs = torch.cat([before, x[:, first:end].transpose(1, 2)], -1)
        if end > first:
            parts.append(F.conv1d(inputs, weight[:, None], bias, groups=x.shape[2]).transpose(1, 2))
    z = torch.cat(parts, 1)
    return F.silu(z) if silu else z


def outcomes(function, arguments: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return y and the gradients of all arguments that take any, with a drawn gradient of y."""
    leaves = {name: each for name, each in arguments.items() if isinstance(each, torch.Tensor) and each.is_floating_point()}
    y = function(**arguments)
    y = y if isinstance(y, torch.Tensor) else torch.cat(y, -1)  # of the parts that the kernel's results are
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y.device, y.dtype)
    found = torch.autograd.grad(y, list(leaves.values()), dy)
    return {"y": y.detach()} | dict(zip(leaves, found, strict=True))


def exact(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments in float64."""
    return {
        name: each.detach().double().requires_grad_() if isinstance(each, torch.Tensor) and each.is_floating_point() else each
        for name, each in arguments.items()
    }


def assert_right(arguments: dict[str, Any], channels: list[int] | None = None) -> None:
    """Require y and all gradients to be those of ``conv1d`` in float64, but for their rounding, and to have the same dtypes."""
    assert why_not(arguments["x"], arguments["weight"]) is None
    found = outcomes(functools.partial(convolve, channels=channels), arguments)
    right = outcomes(reference, exact(arguments))
    allowed = TOLERANCE[str(arguments["x"].dtype).removeprefix("torch.")]
    for name, value in found.items():
        assert value.dtype is arguments["x"].dtype
        assert value.shape == right[name].shape
        error = (value.double() - right[name]).norm()
        assert error <= allowed * right[name].norm() + 1e-30, (name, error, right[name].norm())


@devices
@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients_are_those_of_conv1d(name, device):
    assert_right(made(device, **CASES[name]))


SHORT: dict[str, dict[str, Any]] = {
    "sequences_that_begin_within": {"lengths": (7, 0, 1, 1, 12, 3, 0, 0, 9), "state": True, "bias": True},
    "sequences_over_several": {"lengths": (3, 29, 26, 2), "C": 40},
    "one_sequence_each": {"lengths": (8,) * 7, "W": 8, "state": True},
    "batch": {"B": 2, "T": 43, "W": 8, "state": True, "bias": True},
    "fewer_taps": {"B": 2, "T": 43, "W": 2},
}
"""Calls whose stretches of 8 steps, several in a CTA, begin and end elsewhere than their sequences."""


@devices
@pytest.mark.parametrize("name", SHORT)
def test_stretches_of_steps_continue_each_other(name, device, monkeypatch):
    for direction in ("FORWARD", "BACKWARD"):
        monkeypatch.setattr(launch, direction, getattr(launch, direction)._replace(most=8))
    assert_right(made(device, **SHORT[name]))


@devices
@pytest.mark.parametrize("name", ["with_a_state", "packed_with_states"])
def test_silu_may_be_left_out(name, device):
    assert_right(made(device, **CASES[name]) | {"silu": False})


@devices
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["several_tiles", "packed_with_states"])
def test_results_in_16_bits_are_rounded_once(name, dtype, device):
    assert_right(made(device, dtype, **CASES[name]))


@devices
def test_inputs_may_be_columns_of_a_matrix_and_expanded(device):
    """x and the gradient of y are slices, and the weight is the transpose of a contiguous matrix."""
    arguments = made(device, B=2, T=37, C=24, W=3, state=True)
    matrix = torch.randn(2, 37, 60, device=device)
    arguments["x"] = matrix[..., 8:32].detach().requires_grad_()
    arguments["weight"] = arguments["weight"].detach().T.contiguous().T.requires_grad_()
    assert_right(arguments)
    (y,) = convolve(**arguments)
    wide = torch.randn(2, 37, 2 * 24, device=device)
    (sliced,) = torch.autograd.grad(y, arguments["x"], wide[..., ::2], retain_graph=True)
    (plain,) = torch.autograd.grad(y, arguments["x"], wide[..., ::2].contiguous())
    assert torch.equal(sliced, plain)


@devices
@pytest.mark.parametrize("name", ["several_tiles", "with_a_state", "packed_with_states"])
def test_results_may_be_parts(name, device):
    """One launch computes all parts, and the gradient of each is read where it is."""
    arguments = made(device, **CASES[name] | {"C": 40})
    assert_right(arguments, [16, 8, 16])
    parts = convolve(**arguments, channels=[16, 8, 16])
    (whole,) = convolve(**arguments)
    assert torch.equal(torch.cat(parts, -1), whole)
    (first,) = torch.autograd.grad(parts[0].sum(), arguments["x"])  # no gradient reaches the others
    assert first[..., :16].any()
    assert not first[..., 16:].any()


@devices
@pytest.mark.parametrize("wanted", ["x", "weight", "bias", "state"])
def test_single_gradients_are_those_of_all_together(wanted, device):
    arguments = made(device, B=2, T=20, bias=True, state=True)
    together = outcomes(convolve, arguments)[wanted]
    alone = {name: each.detach() if each is not None else None for name, each in arguments.items()}
    alone[wanted].requires_grad_()
    (y,) = convolve(**alone)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(device)
    (found,) = torch.autograd.grad(y, alone[wanted], dy)
    if device == "cpu":
        assert torch.equal(found, together)
    else:  # a compiler may contract other multiplications and additions where fewer gradients are computed
        torch.testing.assert_close(found, together, rtol=1e-6, atol=1e-6)


@devices
def test_the_operators_pass_opcheck(device):
    """All checks of ``opcheck``, but with static instead of dynamic shapes."""
    arguments = made(device, T=6, C=16, bias=True, state=True)
    utilities = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    library.opcheck(operator._forward.registered, (*arguments.values(), True, [8, 8]), test_utils=utilities)
    given = [each if each is None else each.detach() for each in arguments.values()]
    dy = torch.ones_like(given[0])
    library.opcheck(
        operator._backward.registered, ([dy[..., :8], dy[..., 8:]], *given, True, [True, False, True, True]), test_utils=utilities
    )


@devices
def test_no_gradient_is_recorded_without_need(device):
    arguments = {name: each if each is None else each.detach() for name, each in made(device, T=9).items()}
    assert not convolve(**arguments)[0].requires_grad
    with torch.no_grad():
        assert not convolve(**made(device, T=9))[0].requires_grad


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"weight": torch.zeros(4, 9)}, "at most 8 steps"),
        ({"x": torch.zeros(1, 0, 4)}, "at least one element"),
        ({"x": torch.zeros(1, 3, 4, dtype=torch.float64)}, "in one dtype"),
        ({"weight": torch.zeros(4, 3, dtype=torch.float16)}, "in one dtype"),
        ({"weight": torch.zeros(5, 3)}, "for each channel"),
        ({"state": torch.zeros(1, 4, 3)}, "W - 1 inputs"),
        ({"state": torch.zeros(2, 4, 2)}, "for each sequence"),
        ({"state": torch.zeros(1, 4, 2, dtype=torch.float16)}, "in the dtype of x"),
        ({"bias": torch.zeros(4, device="meta")}, "on one device"),
        ({"bias": torch.zeros(3)}, "needs a bias"),
        ({"bias": torch.zeros(4, dtype=torch.float16)}, "needs a bias"),
        ({"x": torch.zeros(2, 3, 4), "offsets": torch.tensor([0, 3])}, "B = 1"),
    ],
    ids=[
        "taps",
        "empty",
        "dtype",
        "dtypes",
        "channels",
        "state",
        "states",
        "state_dtype",
        "device",
        "bias",
        "bias_dtype",
        "batch",
    ],
)
def test_calls_that_are_left_to_pytorch(changed, said, monkeypatch):
    monkeypatch.setattr(requirements, "interpreting", lambda: True)
    assert why_not(torch.zeros(1, 3, 4), torch.zeros(4, 3)) is None
    assert said in str(why_not(**{"x": torch.zeros(1, 3, 4), "weight": torch.zeros(4, 3)} | changed))


def test_a_cpu_is_left_to_pytorch(monkeypatch):
    monkeypatch.setattr(requirements, "interpreting", lambda: False)
    assert "needs a CUDA" in str(why_not(torch.zeros(1, 3, 4), torch.zeros(4, 3)))
