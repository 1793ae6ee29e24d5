"""Tests of launches of the Hopper matrix product for ``swiglu``: tensor maps of weights in place, and all other arguments."""

from __future__ import annotations

import ctypes

import pytest
import torch

from onelaunch import dispatch
from onelaunch.cuda.module import _layout
from onelaunch.cuda.tensor_maps import _unaddressable
from onelaunch.launch.launch import CudaLaunch
from onelaunch.operation import find_operation
from onelaunch.ops import swiglu
from onelaunch.ops.swiglu.variants import hopper

pytest.importorskip("triton")

from onelaunch.kernels.gemm_sm90 import kernel
from onelaunch.ops.swiglu import launch_hopper
from onelaunch.ops.swiglu.launch_hopper import interleaved

SWIGLU = find_operation("swiglu")
VARIANTS = ("persistent", "stream_k", "small_m")

# Tensor maps of weights


def value_at(matrices, channel, row, which, group):
    """Return the element that TMA would read at these coordinates, computed from its address.

    ``matrices`` describes both weights as one tensor: channels, rows of a group of 8, which of the two weights, groups of rows.
    """
    strides = (matrices.dtype.itemsize, *matrices.strides)
    at = matrices.address + sum(index * stride for index, stride in zip((channel, row, which, group), strides, strict=True))
    return ctypes.c_int32.from_address(at).value


@pytest.mark.parametrize("kind", ["stacked", "apart", "behind", "the_same", "other_strides", "column_major"])
def test_two_weights_are_described_as_one_tensor(kind):
    both = torch.arange(2 * 24 * 32, dtype=torch.int32).reshape(48, 32)
    first, second = {
        "stacked": (both[:24], both[24:]),
        "apart": (both[:24].clone(), both[24:].clone()),
        "behind": (both[24:], both[:24]),
        "the_same": (both[:24], both[:24]),
        "other_strides": (both[:24], torch.cat((both[24:], both[24:]), 1)[:, :32]),
        "column_major": (both[:24].T.contiguous().T, both[24:]),
    }[kind]
    matrices = interleaved(first, second)
    assert matrices.sizes == (32, 8, 2, 3)
    assert all(stride > 0 and stride % 16 == 0 for stride in matrices.strides)
    order = (second, first) if matrices.up_first else (first, second)
    for channel, row, which, group in [(0, 0, 0, 0), (5, 3, 1, 2), (31, 7, 0, 1), (31, 7, 1, 2)]:
        assert value_at(matrices, channel, row, which, group) == order[which][8 * group + row, channel].item()


def test_weights_in_a_supported_layout_are_not_copied():
    both = torch.zeros(48, 32)
    assert interleaved(both[:24], both[24:]).address == both.data_ptr()
    assert interleaved(both[24:], both[:24]).up_first


# Arguments of a launch


@pytest.fixture
def launched(monkeypatch):
    """Return a list to which a call adds the grid of its launch and the arguments :data:`NUMBERS`.

    The launch is one for a GPU of 132 SMs, but none is needed. Arguments are packed as in a launch, and tensor maps are
    checked by TMA's rules.
    """
    calls, (layout, _) = [], _layout(launch_hopper.PARAMETER_KINDS)

    def launch(grid, *arguments):
        pairs = zip(launch_hopper.PARAMETER_KINDS, arguments, strict=True)
        values = [value if kind != "pointer" else 0 if value is None else value.data_ptr() for kind, value in pairs]
        layout.pack(*values)
        calls.append((grid, dict(zip(NUMBERS, values[-len(NUMBERS) :], strict=True))))

    def tensor_map(dtype, address, sizes, strides, box, *, swizzle=128):
        assert _unaddressable(dtype, address, sizes, strides, box, swizzle) is None
        return bytes(128)

    launch_hopper.plan_of.cache_clear()
    monkeypatch.setattr(CudaLaunch, "run", lambda self: launch(self.grid, *self.arguments))
    for module in (launch_hopper, kernel):
        monkeypatch.setattr(module, "tensor_map", tensor_map)
    monkeypatch.setattr(launch_hopper, "counters", lambda device, words: torch.zeros(words, dtype=torch.int64))
    for module in (launch_hopper, hopper):
        monkeypatch.setattr(module, "processors", lambda _: 132)
    # Without its conditions, a variant runs without a Hopper GPU.
    for name in VARIANTS:
        monkeypatch.setattr(SWIGLU.get(name), "_supports", [])
    dispatch.forget()
    yield calls
    dispatch.forget()
    launch_hopper.plan_of.cache_clear()


NUMBERS = ("M", "N", "K", "unit_granules", "longer_units", "granule", "up_first", "x_scales", "w_scales", "early")
"""Names of the kernel's last arguments. ``x_scales`` and ``w_scales`` are flags that x or the weights have one scale per row.

``early`` lets the kernel read weights before earlier launches have ended.
"""


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("promised", [False, True])
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("form", ["dense", "fp8", "nvfp4_weights"])
def test_a_call_becomes_one_launch(form, stacked, promised, variant, launched):
    case = SWIGLU.case("bfloat16", M=20, N=1024, K=512, format=form, stacked=stacked, row_scales=form == "fp8")
    arguments = SWIGLU.make_inputs(case, torch.device("cpu"), 0).arguments
    h = swiglu(**arguments, variant=variant, constant_weights=promised)
    assert (h.shape, h.dtype) == ((20, 1024), torch.bfloat16)
    ((grid, numbers),) = launched
    assert (numbers["M"], numbers["N"], numbers["K"]) == (20, 1024, 512)
    assert (numbers["x_scales"], numbers["w_scales"]) == (form == "fp8",) * 2
    assert numbers["early"] == promised  # few rows, and few k-blocks
    assert 0 < grid[0] <= 132


@pytest.mark.parametrize("stacked", [False, True])
def test_products_are_kept_for_a_backward_pass(stacked, launched):
    arguments = SWIGLU.make_inputs(SWIGLU.case("float16", M=300, N=64, K=128, stacked=stacked), torch.device("cpu"), 0).arguments
    given = {name: value.requires_grad_() for name, value in arguments.items()}
    h = swiglu(**given, variant="stream_k")
    assert h.requires_grad
    assert len(launched) == 1
    assert h.grad_fn.saved_tensors[-1].shape == (300, 128)  # both products
