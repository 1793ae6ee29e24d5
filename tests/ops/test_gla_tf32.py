"""Tests of ``gla``'s portable kernels with float32 inputs where PyTorch's settings allow TF32.

``emulated`` makes Triton's interpreter multiply as the matrix units of an NVIDIA GPU would. A test
marked ``interpret`` runs in the interpreter, with
TRITON_INTERPRET=1, and the others do not. One marked ``thorough`` does not run in ``make test``. ``arguments_of`` makes small
random arguments on the CPU, and ``results`` returns a variant's results and gradients by name. ``recorded_launches`` returns
the launches of a call as on a GPU that this machine need not have.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from onelaunch.device.architectures import find_architecture
from onelaunch.launch.build import builds_of
from onelaunch.launch.compile import compile_triton
from onelaunch.operation import Example
from onelaunch.operation.examples import recorded_launches
from tests.ops.cases import GLA, arguments_of, results
from tests.ops.tf32_units import emulate_tf32

pytest.importorskip("triton", reason="launches import their kernels, which import Triton")

BEFORE = torch.backends.cuda.matmul.fp32_precision
MATMUL = torch.backends.cuda.matmul


@pytest.fixture(autouse=True)
def _setting_as_before():
    yield
    torch.set_float32_matmul_precision("highest")
    MATMUL.fp32_precision = BEFORE


def launches(architecture: str, dtype: str, **options: Any) -> list[Any]:
    """Return the launches of a training call of ``fused``."""
    case = GLA.case(dtype, B=1, T=64, H=1, K=16, V=16, **options)
    return recorded_launches(GLA.get("fused"), Example(case, "forward_backward"), architecture)


@pytest.mark.parametrize(
    ("architecture", "dtype", "options", "off", "on"),
    [
        ("sm_90a", "float32", {"decay_per": "head"}, {"ieee"}, {"tf32"}),
        ("sm_80", "float32", {"final_state": True}, {"ieee"}, {"tf32"}),
        ("gfx942", "float32", {}, {"ieee"}, {"ieee"}),
        ("sm_90a", "bfloat16", {"log_decay_dtype": "float32", "final_state": True}, {"ieee", "bf16x6"}, {"ieee", "bf16x6"}),
    ],
)
def test_the_setting_decides_for_float32_inputs_on_nvidia_gpus(architecture, dtype, options, off, on):
    assert {each.constants["PRECISION"] for each in launches(architecture, dtype, **options)} == off
    MATMUL.allow_tf32 = True
    assert {each.constants["PRECISION"] for each in launches(architecture, dtype, **options)} == on


@pytest.mark.parametrize("allowed", [False, True])
def test_tf32_is_multiplied_by_warp_level_instructions(allowed):
    MATMUL.allow_tf32 = allowed
    recorded = launches("sm_90a", "float32", decay_per="head")[:1]
    (build,) = builds_of([("", each) for each in recorded], find_architecture("sm_90a"))
    code = compile_triton(build, find_architecture("sm_90a")).asm["ptx"]
    assert ("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32" in code) == allowed
    assert build.by_warps == build.matrix == allowed
    assert "wgmma" not in code


@pytest.fixture
def emulated(monkeypatch):
    return emulate_tf32(monkeypatch)


@pytest.mark.interpret
@pytest.mark.parametrize(("per", "decay"), [("channel", "mixed"), ("head", "model")])
def test_errors_are_those_of_rounded_operands(per, decay, emulated):
    """Products of two rounded operands are off by 3e-4 norm-wise, and results have two such products in a row.

    Without rounding to nearest the errors are 1.3e-3.
    """
    arguments = arguments_of(
        GLA, grad=True, B=1, T=70, H=1, K=16, V=16, decay=decay, decay_per=per, initial_state=True, final_state=True
    )
    expected = results(GLA, arguments, "recurrent")
    MATMUL.allow_tf32 = True
    found = results(GLA, arguments, "fused")
    assert emulated.forms() == {"TF32"}
    for name, value in found.items():
        error = (value - expected[name]).norm() / expected[name].norm()
        assert 1e-5 < error < 7e-4, (name, error)


@pytest.mark.interpret
def test_a_replayed_call_follows_the_setting(emulated):
    arguments = arguments_of(GLA, grad=True, B=1, T=16, H=1, K=16, V=16, decay_per="head")
    for allowed in (False, True, False):
        MATMUL.allow_tf32 = allowed
        for _ in range(3):  # runs, is recorded, is replayed
            o, _ = GLA(**arguments, variant="fused")
            assert emulated.forms() == {"TF32" if allowed else "IEEE"}
        MATMUL.allow_tf32 = not allowed
        o.sum().backward()
        assert emulated.forms() == {"IEEE" if allowed else "TF32"}, "the backward pass follows the setting at its own time"


@pytest.mark.thorough
@pytest.mark.interpret
def test_compiled_code_follows_the_setting(emulated):
    q, k, v, g = torch.randn(4, 1, 16, 1, 16)
    compiled = torch.compile(lambda q, k, v, g: GLA(q, k, v, -g.abs(), variant="fused")[0], backend="eager", fullgraph=True)
    for precision, form in (("none", "IEEE"), ("tf32", "TF32"), ("ieee", "IEEE")):
        MATMUL.fp32_precision = precision
        compiled(q, k, v, g)
        assert emulated.forms() == {form}


@pytest.mark.gpu
def test_replayed_calls_on_a_gpu_follow_the_setting(device):
    arguments = arguments_of(GLA, B=1, T=200, H=2, K=32, V=48, initial_state=True, final_state=True)
    arguments = {name: each.to(device) if isinstance(each, torch.Tensor) else each for name, each in arguments.items()}
    expected = results(GLA, arguments, "recurrent")
    for allowed in (False, True, False):
        MATMUL.allow_tf32 = allowed
        for _ in range(4):
            for name, value in results(GLA, arguments, "fused").items():
                error = (value - expected[name]).norm() / expected[name].norm()
                assert (1e-5 < error < 1e-3) if allowed else error < 1e-5, (name, error)
