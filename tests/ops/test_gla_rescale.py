"""Tests of the Triton kernels that scale a float16 gradient of o, interpreted and on a GPU, against rescaled.py.

test_gla_hopper_emulated.py tests what the backward pass of ``hopper`` makes of scaled gradients.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.ops.cases import GLA, arguments_of
from tests.ops.rescaled import exponent_of, rescaled

pytest.importorskip("triton")

SIZES: dict[str, dict[str, Any]] = {
    "small": {"B": 2, "T": 70, "H": 3, "K": 32, "V": 48},
    "one_step": {"B": 1, "T": 1, "H": 1, "K": 16, "V": 16},
    "wide": {"B": 1, "T": 20, "H": 2, "K": 256, "V": 512},
    "shared_heads": {"B": 2, "T": 9, "H": 4, "K": 16, "V": 16, "q_heads": 2, "k_heads": 2},
    "shared_values": {"B": 1, "T": 9, "H": 4, "K": 16, "V": 16, "k_heads": 2, "v_heads": 2, "g_heads": 2},
}


def call_of(device: str, **options: Any) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """Return the tensors of a float16 call, and gradients of its output and of its final state."""
    from onelaunch.ops.gla.launch import Attention

    given = arguments_of(GLA, **options, dtype="float16")
    call = Attention.of(*(given[name].to(device) for name in "qkvg"), None, None, options["K"] ** -0.5)
    heads = call.heads.output
    generator = torch.Generator().manual_seed(3)
    do = torch.randn(options["B"], options["T"], heads, options["V"], generator=generator).half().to(device)
    return call, do, torch.randn(options["B"], heads, options["K"], options["V"], generator=generator).to(device)


def check(call: Any, do: torch.Tensor, dfinal: torch.Tensor | None) -> float:
    """Compare the kernels with PyTorch to the last bit, and return the factor.

    Where the bound is a power of 2, log2 of a GPU may be above its exponent; the factor is then half as large.
    """
    from onelaunch.ops.gla.launch_rescale import rescaled as by_kernels

    found, right = by_kernels(call, do, dfinal), rescaled(call, do, dfinal)
    factor, inverse = found.factors.tolist()
    assert factor in ({2.0 ** exponent_of(call, do, dfinal)} | ({right.factors[0].item() / 2} if do.is_cuda else set()))
    assert inverse == 1 / factor
    assert found.do.is_contiguous()
    assert torch.equal(found.do.nan_to_num(7.0), (do.float() * factor).half().nan_to_num(7.0))
    return factor


devices = pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.interpret), pytest.param("cuda:0", marks=pytest.mark.gpu)]
)


@devices
@pytest.mark.parametrize("name", SIZES)
def test_gradients_are_scaled_by_the_bound_of_their_products(name, device):
    call, do, dfinal = call_of(device, **SIZES[name])
    check(call, do, None)
    check(call, do, dfinal)


@devices
def test_tensors_may_have_any_strides(device):
    """do has steps before heads in memory, and q and v are columns of a matrix."""
    call, do, dfinal = call_of(device, **SIZES["small"])
    batch, length, heads, keys, values = call.sizes
    both = torch.randn(batch, length, heads * (keys + values) + 8, device=device).half()
    q, v = (each.unflatten(2, (heads, -1)) for each in both[..., :-8].split([heads * keys, heads * values], dim=2))
    check(call._replace(q=q, v=v), do.transpose(1, 2).contiguous().transpose(1, 2), dfinal)


@devices
@pytest.mark.parametrize("which", ["q", "v", "do", "dfinal"])
def test_the_largest_term_of_a_bound_decides(which, device):
    """One element that is the last of its tensor makes the factor smaller by what it exceeds the others."""
    call, do, dfinal = call_of(device, **SIZES["small"])
    before = check(call, do, dfinal)
    given = {"q": call.q.clone(), "v": call.v.clone(), "do": do.clone(), "dfinal": dfinal.clone()}
    given[which].view(-1)[-1] = -60000.0
    after = check(call._replace(q=given["q"], v=given["v"]), given["do"], given["dfinal"])
    assert after < before / 64 or (which == "dfinal" and after < before)


@devices
@pytest.mark.parametrize("value", [0.0, math.inf, math.nan])
def test_values_without_a_logarithm(value, device):
    """Gradients of 0, or with inf, are not scaled; NaN is left where it is, and others are scaled as they would be."""
    call, do, _ = call_of(device, **SIZES["small"])
    if value == 0.0:
        do.zero_()
    else:
        do[1, 3, 1, 2] = value
    factor = check(call, do, None)
    assert (factor == 1.0) == (not math.isnan(value))


@devices
@pytest.mark.parametrize("exponent", [-24, -10, 10, 14])
def test_every_size_of_a_gradient_has_a_factor(exponent, device):
    call, do, _ = call_of(device, **SIZES["small"])
    check(call, (do.float().clamp(-1.5, 1.5) * 2.0**exponent).half(), None)


@devices
def test_a_tiny_gradient_of_a_long_sequence_keeps_a_finite_factor(device):
    """The smallest number of float16 alone: its factor and the inverse are powers of 2 within float32.

    So they are beside a huge gradient of the final state, for which the exponent is limited to -60.
    """
    call, do, dfinal = call_of(device, **SIZES["one_step"])
    tiny = torch.zeros_like(do)
    tiny.view(-1)[0] = 2.0**-24
    check(call._replace(q=call.q * 0, v=call.v * 0), tiny, dfinal * 0)
    check(call, do, dfinal * 2.0**100)
