"""Tests of the Triton kernels that copy float32 heads as float16 times powers of 2, interpreted and on a GPU.

``scaled_copies.py`` of this folder computes what they must. test_gla_hopper_tf32.py tests what the kernels of ``hopper`` make of
such copies. Tests marked ``interpret`` run in Triton's interpreter, those marked ``thorough`` not in ``make test``.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.ops.cases import GLA, arguments_of
from tests.ops.scaled_copies import scaled_copies
from tests.thorough import thorough_but

pytest.importorskip("triton")

SIZES: dict[str, dict[str, Any]] = {
    "small": {"B": 2, "T": 70, "H": 3, "K": 32, "V": 48},
    "one_step": {"B": 1, "T": 1, "H": 1, "K": 16, "V": 16},
    "wide": {"B": 1, "T": 20, "H": 2, "K": 256, "V": 512},
    "packed": {"B": 1, "T": 80, "H": 2, "K": 24, "V": 40, "lengths": (10, 0, 1, 69)},
    "shared_heads": {"B": 2, "T": 9, "H": 4, "K": 16, "V": 16, "q_heads": 2, "k_heads": 2},
    "shared_values": {"B": 1, "T": 9, "H": 4, "K": 16, "V": 16, "k_heads": 4, "v_heads": 2},
    "shared_states": {"B": 1, "T": 9, "H": 4, "K": 16, "V": 16, "k_heads": 2, "v_heads": 1, "g_heads": 2, "state_heads": 2},
}

devices = pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.interpret), pytest.param("cuda:0", marks=pytest.mark.gpu)]
)


def call_of(device: str, *, scale: float = 0.3, **options: Any) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """Return the tensors of a float32 call with heads of many magnitudes, and gradients of its output and final state."""
    from onelaunch.ops.gla.launch import Attention

    given = arguments_of(GLA, **options, initial_state=True, dtype="float32")
    generator = torch.Generator().manual_seed(3)

    def spread(tensor: torch.Tensor, most: int = 30) -> torch.Tensor:
        """Return a tensor each of whose heads, the third dimension or second of a state, is times a power of 2 of its own."""
        state = tensor.shape[-2:] == given["initial_state"].shape[-2:] and tensor.shape[1] != given["q"].shape[1]
        heads = 1 if state else 2
        exponents = torch.randint(-most, most, (tensor.shape[0], tensor.shape[heads]), generator=generator)
        return (tensor * (2.0**exponents).view(-1, *(1,) * (heads - 1), tensor.shape[heads], 1, *(1,) * (2 - heads))).to(device)

    q, k, v = (spread(given[name]) for name in "qkv")
    offsets = given.get("cu_seqlens")
    offsets = None if offsets is None else offsets.to(device)
    call = Attention.of(q, k, v, given["g"].to(device), spread(given["initial_state"]), offsets, scale)
    do = torch.randn(options["B"], options["T"], call.heads.output, options["V"], generator=generator)
    dfinal = torch.randn(given["initial_state"].shape, generator=generator)
    return call, spread(do), spread(dfinal)


def check(call: Any, do: torch.Tensor | None, dfinal: torch.Tensor | None) -> Any:
    """Compare the kernels with PyTorch to the last bit, and return what they make."""
    from onelaunch.ops.gla.launch_scaled_copies import scaled_copies as by_kernels

    found, right = by_kernels(call, do, dfinal), scaled_copies(call, do, dfinal)
    assert found.call.scale == right.call.scale
    for name in "qkv":
        same(getattr(found.call, name), getattr(right.call, name))
    same(found.powers.forward[..., :6], right.powers.forward[..., :6])
    assert (found.do is None) == (do is None)
    if do is not None:
        same(found.do, right.do)
        same(found.powers.backward[..., :12], right.powers.backward[..., :12])
    return found


def same(found: torch.Tensor, right: torch.Tensor) -> None:
    """Assert that tensors are equal, NaN too."""
    torch.testing.assert_close(found, right, rtol=0, atol=0, equal_nan=True)
    assert found.is_contiguous() or found.dtype is torch.float32


@devices
@pytest.mark.parametrize("name", thorough_but("packed", "shared_states", of=SIZES))
def test_copies_are_as_large_as_their_bounds_allow(name, device):
    call, do, dfinal = call_of(device, **SIZES[name])
    bare = call._replace(sequences=call.sequences._replace(initial=None))
    check(bare, None, None)
    check(bare, do, None)
    copies = check(call, do, dfinal)
    for each in (*copies.call[:3], copies.do):
        assert each.isfinite().all()
    assert copies.call.q.abs().max() <= 128
    assert copies.call.k.abs().max() <= 128


@devices
def test_tensors_may_have_any_strides(device):
    """do has heads before steps in memory, and q and v are columns of a matrix."""
    call, do, dfinal = call_of(device, **SIZES["small"])
    batch, length, heads, keys, values = call.sizes
    both = torch.randn(batch, length, heads * (keys + values) + 8, device=device)
    q, v = (each.unflatten(2, (heads, -1)) for each in both[..., :-8].split([heads * keys, heads * values], dim=2))
    check(call._replace(q=q, v=v), do.transpose(1, 2).contiguous().transpose(1, 2), dfinal)


@devices
@pytest.mark.parametrize("value", thorough_but(math.nan, of=(0.0, math.inf, math.nan)))
def test_values_without_a_logarithm(value, device):
    """One head of each tensor is of zeros or has an element that is not finite; other heads and elements are as without it."""
    call, do, dfinal = call_of(device, B=2, T=7, H=2, K=16, V=24)
    before = check(call, do, dfinal)
    for tensor in (call.q, call.k, call.v, do):
        if value == 0.0:
            tensor[1, :, 1] = 0.0
        else:
            tensor[1, 3, 1, 2] = value
    for state in (call.sequences.initial, dfinal):
        if value == 0.0:
            state[1, 1] = 0.0
        else:
            state[1, 1, 2, 3] = value
    after = check(call, do, dfinal)
    assert torch.equal(after.powers.forward[0, :, :6], before.powers.forward[0, :, :6])
    assert torch.equal(after.call.k[:, :, 0], before.call.k[:, :, 0])
    if value != 0.0:
        assert after.call.k.isfinite().sum() == before.call.k.numel() - 1


EXTREMES = [(120, -120, 100), (-148, 20, 30), (-60, -60, -20), (127, 127, -149)]
"""Exponents of q, k and v."""


@devices
@pytest.mark.parametrize("which", thorough_but(1, of=range(len(EXTREMES))))
def test_magnitudes_may_be_anything_that_float32_holds(which, device):
    """Powers are beyond the range of float32 here, as the first one of q, or their product is."""
    call, do, dfinal = call_of(device, **SIZES["one_step"])
    q, k, v = (torch.full_like(x, 1.0) * 2.0**e for x, e in zip(call[:3], EXTREMES[which], strict=True))
    check(call._replace(q=q, k=k, v=v), do, dfinal)
    check(call._replace(q=k, k=v, v=q, scale=0.0), do * 1e-30, dfinal * 1e30)
