"""Tests of ``ShortConvolution``: one launch and PyTorch's functions give the same results, gradients and new states.

The kernels run in Triton's interpreter, or on a GPU. tests/kernels/test_convolution.py compares them with ``conv1d`` in float64.
"""

from __future__ import annotations

import pytest
import torch

from onelaunch.nn import ShortConvolution, SimpleGatedLinearAttention, convolution
from onelaunch.ops.gla_layer import composition

pytest.importorskip("triton")

devices = pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.interpret), pytest.param("cuda:0", marks=pytest.mark.gpu)]
)
CHANNELS = 12


def outcome(module, x, state, offsets):
    """Return y, the new state, and the gradients of x, the parameters and the state."""
    y, new = module(x, state, offsets)
    leaves = [x, *module.parameters(), *([] if state is None else [state])]
    return y, new, *torch.autograd.grad(y.sin().sum() + new.square().sum(), leaves)


@devices
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("lengths", [None, (4, 0, 1, 6)])
@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("with_state", [False, True])
def test_the_kernel_does_what_pytorchs_functions_do(bias, lengths, size, with_state, device, monkeypatch):
    """Sequences may be shorter than the state, which then keeps inputs of the one before. Those with a bias have no SiLU."""
    module = ShortConvolution(CHANNELS, size, bias, None if bias else "silu").to(device)
    offsets = None if lengths is None else torch.tensor([0, 4, 4, 5, 11], device=device)
    sequences = 3 if lengths is None else 4
    for steps in (2, 9) if lengths is None else (11,):
        x = torch.randn(3 if lengths is None else 1, steps, CHANNELS, device=device, requires_grad=True)
        state = torch.randn(sequences, CHANNELS, size - 1, device=device, requires_grad=True) if with_state else None
        found = outcome(module, x, state, offsets)
        with monkeypatch.context() as patched:
            patched.setattr(convolution, "why_not", lambda *_: "the test asks for PyTorch's functions")
            expected = outcome(module, x, state, offsets)
        for one, other in zip(found, expected, strict=True):
            # Both are float32, and add products and sums over steps in another order.
            torch.testing.assert_close(one, other, atol=2e-6, rtol=2e-5)


@devices
def test_no_state_is_made_where_none_is_asked_for(device):
    module = ShortConvolution(CHANNELS, 4).to(device)
    y, new = module(torch.randn(2, 5, CHANNELS, device=device), output_final_state=False)
    assert new is None
    assert y.shape == (2, 5, CHANNELS)


@devices
@pytest.mark.parametrize("lengths", [None, (4, 1)])
def test_the_kernel_is_an_operator_of_compiled_code(lengths, device):
    module = ShortConvolution(CHANNELS, 4, bias=True).to(device)
    offsets = None if lengths is None else torch.tensor([0, 4, 5], device=device)
    x = torch.randn(1, 5, CHANNELS, device=device, requires_grad=True)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for one, other in zip(outcome(compiled, x, None, offsets), outcome(module, x, None, offsets), strict=True):
        torch.testing.assert_close(one, other)


def test_a_layer_compiles_with_pytorchs_functions():
    layer = SimpleGatedLinearAttention(hidden_size=32, num_heads=2)
    x = torch.randn(2, 6, 32)
    torch.testing.assert_close(torch.compile(layer, fullgraph=True, backend="eager")(x)[0], layer(x)[0])


@devices
def test_a_layer_takes_the_kernel(device, monkeypatch):
    """Its results and gradients are those with PyTorch's convolution."""
    layer = SimpleGatedLinearAttention(hidden_size=32, num_heads=2).to(device)
    x = torch.randn(2, 6, 32, device=device, requires_grad=True)
    calls = []
    for module in (convolution, composition):
        kernel = module.convolve
        monkeypatch.setattr(
            module, "convolve", lambda *given, kernel=kernel, **options: calls.append(1) or kernel(*given, **options)
        )

    def both():
        out = layer(x)[0]
        return out, *torch.autograd.grad(out.sin().sum(), [x, *layer.parameters()])

    both()  # the first call also finds the kernels to compile, by an imitated call
    calls.clear()
    found = both()
    assert len(calls) == 1  # queries, keys and values together
    for module in (convolution, composition):
        monkeypatch.setattr(module, "why_not", lambda *_: "the test asks for PyTorch's functions")
    for one, other in zip(found, both(), strict=True):
        # float32 through a whole layer, whose norm divides by numbers that may be small
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
    assert len(calls) == 1
