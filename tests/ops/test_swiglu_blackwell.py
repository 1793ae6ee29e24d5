"""Tests of the variant "block_scaled" of ``swiglu``: which codes and scales the kernel reads, and refused calls.

Its kernel is for Blackwell's block-scaled matrix instruction, which the fixture ``emulated`` replaces.

``prose(text)`` compares a test's texts, in the order of its calls, with its entries in tests/snapshots/prose.txt. A test fails
if it does not compare one of its entries, and ``tests/test_prose.py`` if the test or the parameter of an entry is gone.

A test marked ``interpret`` runs in Triton's interpreter, with TRITON_INTERPRET=1.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from onelaunch.formats.nvfp4 import E2M1
from onelaunch.operation import Query, find_operation
from onelaunch.ops.swiglu.autograd import Wanted
from onelaunch.ops.swiglu.operands import Matrix
from onelaunch.ops.swiglu.variants import blackwell

pytest.importorskip("triton")

SWIGLU = find_operation("swiglu")


def decoded(codes: Any, scales: Any) -> Any:
    """Decode packed codes ``[R, K / 2]`` and scale bytes ``[R, K / 16]`` to numbers ``[R, K]``."""
    values = np.array([*E2M1, *(-value for value in E2M1)], dtype=np.float32)
    pairs = np.stack((values[codes & 15], values[codes >> 4]), -1).reshape(codes.shape[0], -1)
    factors = torch.from_numpy(scales.astype(np.uint8)).view(torch.float8_e4m3fn).float().numpy()
    return (pairs.reshape(*factors.shape, 16) * factors[..., None]).reshape(pairs.shape)


@pytest.fixture
def emulated(monkeypatch):
    """Emulate the block-scaled product, which Triton's interpreter lacks."""
    import triton.language as tl
    from triton.language.semantic import TritonSemantic
    from triton.runtime.interpreter import TensorHandle

    def product(self, lhs, lhs_scale, lhs_format, rhs, rhs_scale, rhs_format, acc, *rest):
        a, b = (
            decoded(codes, scale.handle.data) for codes, scale in ((lhs.handle.data, lhs_scale), (rhs.handle.data.T, rhs_scale))
        )
        return tl.tensor(TensorHandle(acc.handle.data + a @ b.T, acc.handle.dtype), acc.type)

    monkeypatch.setattr(TritonSemantic, "dot_scaled", product)


@pytest.mark.interpret
@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize(("M", "N", "K"), [(3, 16, 32), (130, 72, 272), (40, 200, 512)])
def test_the_kernel_reads_every_code_and_scale(M, N, K, swizzled, emulated):
    case = SWIGLU.case("float32", M=M, N=N, K=K, format="nvfp4", codes="full", swizzled_scales=swizzled)
    arguments = SWIGLU.make_inputs(case, torch.device("cpu"), 0).arguments
    (expected,) = SWIGLU.reference(**{**arguments, "out_dtype": None})
    parts = [Matrix.of(arguments[name], swizzled=swizzled) for name in ("x", "w_gate", "w_up")]
    found, _ = blackwell.run_block_scaled(*parts, Wanted(torch.float32, swizzled, keep=False, constant_weights=False))
    # tolerance: sums of at most 512 products in float32
    assert torch.allclose(found.double(), expected, rtol=1e-4, atol=1e-4)


def test_auto_does_not_choose_it_before_it_has_run_on_hardware():
    assert SWIGLU.get("block_scaled").capabilities.experimental


def test_without_a_blackwell_gpu_it_is_refused(prose):
    prose(SWIGLU.get("block_scaled").why_not(Query("swiglu", "cpu", torch.float16, (4, 16, 32), flags=("nvfp4",))))


@pytest.mark.parametrize(
    ("sizes", "flags"),
    [((4, 16, 32), ()), ((0, 16, 32), ("nvfp4",))],
)
def test_unsupported_calls_are_refused_with_the_reason(sizes, flags, monkeypatch, prose):
    monkeypatch.setattr(blackwell, "compute_capability", lambda device: 10)
    query = Query("swiglu", "cuda:0", torch.float16, sizes, flags=flags)
    prose(blackwell.needs_blackwell(query))
    assert blackwell.needs_blackwell(query._replace(sizes=(4, 16, 32), flags=("nvfp4",))) is None
