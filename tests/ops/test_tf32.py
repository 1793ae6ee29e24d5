"""Tests of float32 products in ``projections``, ``swiglu``, ``linear_rnn`` and ``output_chain`` where PyTorch allows TF32.

``tests/ops/test_gla_tf32.py`` tests those of ``gla``. ``recorded_launches`` returns the launches of a call as on a GPU that this
machine need not have. A test marked ``interpret`` runs in Triton's interpreter, with TRITON_INTERPRET=1, and the others do not.
One marked ``thorough`` does not run in ``make test``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from onelaunch.device.architectures import find_architecture
from onelaunch.launch.build import builds_of
from onelaunch.launch.compile import compile_triton
from onelaunch.launch.launch import Mma
from onelaunch.operation import Direction, Example, find_operation
from onelaunch.operation.examples import recorded_launches
from tests.ops.cases import results
from tests.ops.tf32_units import emulate_tf32

pytest.importorskip("triton", reason="launches import their kernels, which import Triton")

BEFORE = torch.backends.cuda.matmul.fp32_precision
MATMUL = torch.backends.cuda.matmul


@pytest.fixture(autouse=True)
def _setting_as_before():
    yield
    torch.set_float32_matmul_precision("highest")
    MATMUL.fp32_precision = BEFORE


MULTIPLIED: dict[str, tuple[str, str, dict[str, Any], Direction, int]] = {
    "epilogue": ("projections", "epilogue", {"B": 1, "T": 30, "D": 40, "H": 2, "K": 16, "V": 16}, "forward", 1),
    "few_inputs": ("projections", "wide_activated", {"B": 1, "T": 30, "D": 8, "H": 2, "K": 16, "V": 16}, "forward_backward", 1),
    "gate_and_up": ("swiglu", "fused", {"M": 20, "K": 40, "N": 48}, "forward_backward", 1),
    "up": ("swiglu", "two_node", {"M": 20, "K": 40, "N": 48}, "forward", 1),
    "layer": ("linear_rnn", "fused_chunked", {"B": 1, "T": 40, "D": 24, "V": 16}, "forward_backward", 1),
    "matmul": ("linear_rnn", "three_launch", {"B": 1, "T": 40, "D": 24, "V": 16}, "forward_backward", 3),
    "prologue": ("output_chain", "prologue", {"B": 1, "T": 20, "H": 2, "V": 16, "D": 40}, "forward", 1),
}
"""Operation, variant, sizes and direction of a call for each kernel with a product, and how often the call launches it."""


def products(name: str, architecture: str = "sm_90a", dtype: str = "float32") -> list[Any]:
    """Return the launches of a call that multiply."""
    operation, variant, sizes, direction, _ = MULTIPLIED[name]
    chosen = find_operation(operation)
    launches = recorded_launches(chosen.get(variant), Example(chosen.case(dtype, **sizes), direction), architecture)
    return [each for each in launches if "PRECISION" in each.constants]


@pytest.mark.parametrize("name", MULTIPLIED)
def test_the_setting_decides_for_float32_inputs_on_nvidia_gpus(name):
    count = MULTIPLIED[name][-1]
    for allowed, precision, mma in ((False, "ieee", Mma.NONE), (True, "tf32", Mma.WARP)):
        MATMUL.allow_tf32 = allowed
        assert [(each.constants["PRECISION"], each.mma) for each in products(name)] == [(precision, mma)] * count
    for architecture, dtype in (("gfx942", "float32"), ("sm_80", "bfloat16")):
        assert {each.constants["PRECISION"] for each in products(name, architecture, dtype)} == {"ieee"}


@pytest.mark.parametrize(
    "name", [name if name == "up" else pytest.param(name, marks=pytest.mark.thorough) for name in MULTIPLIED]
)
@pytest.mark.parametrize("allowed", [False, True])
def test_tf32_is_multiplied_by_warp_level_instructions(name, allowed):
    MATMUL.allow_tf32 = allowed
    target = find_architecture("sm_90a")
    (build, *_) = builds_of([("", each) for each in products(name)[:1]], target)
    code = compile_triton(build, target).asm["ptx"]
    assert (".f32.tf32.tf32.f32" in code) == allowed
    assert "mma.sync" in code or not allowed
    assert "wgmma" not in code


def test_decoded_operands_are_not_rounded():
    """float8 operands with a float32 result are multiplied in float32."""
    MATMUL.allow_tf32 = True
    swiglu = find_operation("swiglu")
    case = swiglu.case("float32", M=20, K=64, N=48, format="fp8")
    (launch,) = recorded_launches(swiglu.get("fused"), Example(case), "sm_90a")
    assert launch.constants["PRECISION"] == "ieee"


@pytest.fixture
def emulated(monkeypatch):
    return emulate_tf32(monkeypatch)


@pytest.mark.interpret
@pytest.mark.parametrize("name", MULTIPLIED)
def test_errors_are_those_of_rounded_operands(name, emulated):
    """A product of two rounded operands is off by 3e-4 norm-wise, and the gate of ``swiglu`` multiplies two such products."""
    operation, variant, sizes, direction, _ = MULTIPLIED[name]
    chosen = find_operation(operation)
    arguments = dict(chosen.make_inputs(chosen.case("float32", **sizes), torch.device("cpu"), 0).arguments)
    if direction == "forward_backward":
        for each in arguments.values():
            if isinstance(each, torch.Tensor) and each.is_floating_point():
                each.requires_grad_()
    exact = results(chosen, arguments, variant)
    assert emulated.forms() == {"IEEE"}
    MATMUL.allow_tf32 = True
    found = results(chosen, arguments, variant)
    assert emulated.forms() == {"TF32"}
    errors = [((value - exact[key]).norm() / exact[key].norm()).item() for key, value in found.items()]
    assert 1e-5 < max(errors) < 7e-4, errors
