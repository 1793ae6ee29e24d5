"""The whole MLP as one autograd function, which does not save the result of ``swiglu``.

:func:`onelaunch.ops.swiglu` saves both of its products. PyTorch's linear function behind it would save its result ``h`` as well,
half as large as both products together. Here the launch of the backward pass that reads the products anyway writes ``h`` again.
``onelaunch::swiglu_mlp_forward`` runs the launches of the variant that the dispatcher chooses for ``swiglu``, then PyTorch's
product. ``onelaunch::swiglu_mlp_gradients`` computes the gradients of both products, and ``h``.

The module ``SwiGLU`` and the MLPs of ``accelerate`` call :func:`mlp`.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.module import _has_any_global_hook  # PyTorch has no public name for it

from onelaunch import dispatch
from onelaunch.launch import recomputed
from onelaunch.launch.operator import Operator
from onelaunch.launch.planned import replayed
from onelaunch.operation.autocast import cast, low_dtype, without_autocast
from onelaunch.ops.swiglu.autograd import Wanted, launches, product_gradients
from onelaunch.ops.swiglu.contract import bind, run, swiglu
from onelaunch.ops.swiglu.operands import Matrix
from onelaunch.tracing import is_traced, is_transformed


def mlp(x: torch.Tensor, w_gate: torch.Tensor, w_up: torch.Tensor | None, down: nn.Module) -> torch.Tensor:
    """Return ``down(swiglu(x, w_gate, w_up))``, with less memory between the passes where ``down`` can be computed here.

    Args:
        x: Rows ``[..., K]``, as :func:`onelaunch.ops.swiglu` takes them.
        w_gate: Weight of the gate ``[N, K]``, or both weights ``[2 N, K]`` without ``w_up``.
        w_up: Weight of the up projection ``[N, K]``, or ``None``.
        down: Module of the down projection. A plain :class:`torch.nn.Linear` without hooks is not called in eager training.

    Returns:
        ``[..., D]``, with D the rows of the weight of ``down``.

    Raises:
        ShapeError, DTypeError, DeviceError: In the cases of :func:`onelaunch.ops.swiglu`.
    """
    if not torch.is_grad_enabled() or is_traced(x) or is_transformed() or not _is_plain(down):
        return down(swiglu(x, w_gate, w_up))
    return _trained(x, w_gate, w_up, down.weight, down.bias)  # pyrefly: ignore[bad-argument-type]


def _is_plain(down: nn.Module) -> bool:
    """Return whether a call of a module does nothing but multiply by its plain weight and add its plain bias."""
    if type(down) is not nn.Linear or "forward" in vars(down) or _has_any_global_hook():
        return False
    if down._forward_hooks or down._forward_pre_hooks or down._backward_hooks or down._backward_pre_hooks:  # noqa: SLF001
        return False
    return type(down.weight) is nn.Parameter and (down.bias is None or type(down.bias) is nn.Parameter)


@replayed
def _trained(
    x: torch.Tensor, w_gate: torch.Tensor, w_up: torch.Tensor | None, w_down: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Return what :func:`mlp` does for the weight ``[D, N]`` and the bias ``[D]`` of the down projection."""
    low = low_dtype(x)
    if low is not None:
        x, w_gate, w_up, w_down, bias = (cast(each, low) for each in (x, w_gate, w_up, w_down, bias))
    call = bind(x, w_gate, w_up)
    chosen = dispatch.choose(call.key)
    with without_autocast(x.device):
        if not call.key.grad or chosen.name not in launches or chosen.run is not chosen.registered:
            return F.linear(run(x, call, dispatch.AUTO), w_down, bias)
        weights = (call.w_gate, call.w_up) if call.stacked is None else (call.stacked, None)
        out, *_ = forward(call.x, *weights, w_down, bias, chosen.name, grad=True)
    # No view: FSDP hooks none, and an addition in place would copy it.
    return torch.ops.aten._unsafe_view.default(out, (*x.shape[:-1], out.shape[1])) if x.dim() > 2 else out  # noqa: SLF001


def run_forward(
    x: torch.Tensor,
    w_gate: torch.Tensor,
    w_up: torch.Tensor | None,
    w_down: torch.Tensor,
    bias: torch.Tensor | None,
    variant: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the MLP of x ``[M, K]``, ``[M, D]``, and both products ``[M, 2 N]`` by the named variant of ``swiglu``.

    ``w_gate`` holds both weights if ``w_up`` is not given.
    """
    gate, up = w_gate.chunk(2) if w_up is None else (w_gate, w_up)
    wanted = Wanted(x.dtype, swizzled=False, keep=True, constant_weights=False)
    h, products = launches[variant](Matrix(x), Matrix(gate), Matrix(up), wanted)
    assert products is not None  # noqa: S101 - ``keep`` is set
    return F.linear(h, w_down, bias), products


def fake_forward(
    x: torch.Tensor,
    w_gate: torch.Tensor,
    w_up: torch.Tensor | None,
    w_down: torch.Tensor,
    bias: torch.Tensor | None,
    variant: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return empty tensors for the results of :func:`run_forward`."""
    return x.new_empty(x.shape[0], w_down.shape[0]), x.new_empty(x.shape[0], 2 * w_down.shape[1])


def run_gradients(dh: torch.Tensor, products: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of both products ``[M, 2 N]``, and ``h [M, N]``, in one launch."""
    from onelaunch.ops.swiglu import launch  # the module imports Triton, which is an optional dependency

    gate, up = products.chunk(2, 1)
    h = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    return launch.gate_backward(dh, gate, up, h), h


def fake_gradients(dh: torch.Tensor, products: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return empty tensors for the results of :func:`run_gradients`."""
    return products.new_empty(products.shape), dh.new_empty(dh.shape)


def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    """Save the weights and both products; for x what makes it again, if it can be."""
    ctx.x_again, sources = recomputed.instead_of(inputs[0])
    ctx.save_for_backward(*inputs[1:4], output[1], *sources)
    ctx.set_materialize_grads(False)  # no zeros are allocated as the gradient of the products, which no caller can use


def gradients(ctx: Any, backward: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of x, the weights and the bias."""
    w_gate, w_up, w_down, products, *sources = ctx.saved_tensors
    *wants, wants_down, wants_bias = ctx.needs_input_grad[:5]
    found: tuple[torch.Tensor | None, ...] = (None, None, None)
    dw_down = None
    if any(wants) or wants_down:
        dproducts, h = backward(dout @ w_down, products)  # [M, 2 N] and [M, N]
        dw_down = dout.mT @ h if wants_down else None
        del h  # before the gradients of the other weights take as much memory
        x = functools.partial(recomputed.once_more, ctx.x_again, tuple(sources))
        found = product_gradients(dproducts, x, w_gate, w_up, wants)
    return *found, dw_down, dout.sum(0) if wants_bias else None, None


backward = Operator("swiglu_mlp_gradients", run_gradients, fake=fake_gradients)
forward = Operator("swiglu_mlp_forward", run_forward, fake=fake_forward, save=save, gradients=gradients, backward=backward)
