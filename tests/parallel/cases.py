"""Comparison of calls on slices of T with one call on all steps, for the checks of ``ranks.py``.

Every process makes the same tensors of the whole sequence, runs the ordinary call on them, and compares its slice of the results
and gradients with what the call with ``mesh`` gives. The losses of the ranks are added up, as in training.
"""

from __future__ import annotations

import torch
from torch import distributed

from onelaunch.ops import gated_scan, gla, linear_rnn

GATE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""Largest norm of a difference relative to the norm of the one-process result, by the dtype of the inputs."""


def close(found, wanted, dtype, name):
    """Compare by norms."""
    assert found.shape == wanted.shape, (name, found.shape, wanted.shape)
    found, wanted = found.double(), wanted.double()
    assert (found - wanted).norm() <= GATE[dtype] * wanted.norm().clamp_min(1e-3), (name, (found - wanted).norm(), wanted.norm())


class Slices:
    """A group and the lengths of its ranks' slices."""

    def __init__(self, group, lengths):
        self.group, self.lengths = group, lengths
        self.rank, self.total = distributed.get_rank(group), sum(lengths)
        self.start = sum(lengths[: self.rank])

    def of(self, x):
        return x[:, self.start : self.start + self.lengths[self.rank]]


def leaf(generator, *shape, dtype=torch.float32, scale=1.0):
    return (torch.randn(*shape, generator=generator) * scale).to(dtype).requires_grad_()


def decay(generator, *shape, dtype=torch.float32):
    return (-torch.rand(*shape, generator=generator) * 0.3).to(dtype).requires_grad_()


def compare(slices, function, tensors, whole, initial, offsets, *, mesh, final, dtype=torch.float32):
    """Compare a call on slices with the call on all steps.

    Args:
        slices: Group and lengths.
        function: Function of a list of tensors and of keywords, which returns outputs and the final state or ``None``.
        tensors: Tensors with steps, ``[B, T, ...]``, or ``None``.
        whole: Tensors without steps, such as weights; their gradients are summed over ranks.
        initial: Initial state or ``None``.
        offsets: Offsets of packed sequences or ``None``.
        mesh: Argument ``mesh``.
        final: Whether the final state is asked for.
        dtype: Dtype by which tolerances are chosen.
    """
    generator = torch.Generator().manual_seed(7)
    y, state = function(tensors, whole, initial_state=initial, cu_seqlens=offsets, output_final_state=final)
    dy = torch.randn(y.shape, generator=generator).to(y.dtype)
    dstates = [] if state is None else [torch.randn(state.shape, generator=generator) for _ in slices.lengths]
    loss = (y * dy).sum() + (0 if state is None else (state * sum(dstates)).sum())
    given = [each for each in (*tensors, *whole, initial) if each is not None]
    wanted = dict(zip(map(id, given), torch.autograd.grad(loss, given, materialize_grads=True), strict=True))

    def copied(x):
        return None if x is None else x.detach().clone().requires_grad_()

    mine = [None if each is None else copied(slices.of(each)) for each in tensors]
    weights, own = [copied(each) for each in whole], copied(initial)
    got, last = function(mine, weights, initial_state=own, cu_seqlens=offsets, output_final_state=final, mesh=mesh)
    close(got, slices.of(y), dtype, "output")
    loss = (got * slices.of(dy)).sum()
    if final:
        close(last, state, dtype, "final state")
        loss = loss + (last * dstates[slices.rank]).sum()
    loss.backward()
    for at, (each, all_steps) in enumerate(zip(mine, tensors, strict=True)):
        if each is not None:
            close(each.grad, slices.of(wanted[id(all_steps)]), dtype, f"gradient of tensor {at}")
    for at, (each, original) in enumerate(zip((*weights, own), (*whole, initial), strict=True)):
        if original is not None:
            gradient = each.grad.float()
            distributed.all_reduce(gradient, group=slices.group)
            close(gradient, wanted[id(original)], dtype, f"gradient of weight {at}")
    with torch.no_grad():
        again, last = function(mine, weights, initial_state=own, cu_seqlens=offsets, output_final_state=final, mesh=mesh)
        close(again, slices.of(y), dtype, "output without gradients")


def attend(tensors, whole, **named):
    q, k, v, g, gv = tensors
    return gla(q, k, v, g, gv=gv, **named)


def scan(tensors, whole, **named):
    result = gated_scan(*tensors, **named)
    return result if named["output_final_state"] else (result, None)


def rnn(tensors, whole, **named):
    x, log_decay, gate = tensors
    result = linear_rnn(x, *whole, log_decay, gate, **named)
    return result if named["output_final_state"] else (result, None)


def gla_tensors(generator, batch, steps, *, per_head=False, heads=(2, 2, 2, 2), value_gate=False, dtype=torch.float32):
    q, k, v, g = heads
    return [
        leaf(generator, batch, steps, q, 16, dtype=dtype),
        leaf(generator, batch, steps, k, 16, dtype=dtype, scale=0.5),
        leaf(generator, batch, steps, v, 20, dtype=dtype),
        decay(generator, batch, steps, g, *(() if per_head else (16,))),
        decay(generator, batch, steps, g, 20) if value_gate else None,
    ]


def compare_layers(slices, layer, batch, offsets, *, mesh, bound=None):
    """Compare a layer's call on a slice with its call on all steps: outputs, and gradients of inputs and parameters."""
    x = leaf(torch.Generator().manual_seed(5), batch, slices.total, layer.hidden_size)
    named = {} if bound is None else {"lower_bound": bound}

    def run(tensors, whole, *, mesh=None, cu_seqlens=None, **_):
        given = dict(zip(dict(layer.named_parameters()), whole, strict=True))
        y, _, _ = torch.func.functional_call(layer, given, tensors[0], {"cu_seqlens": cu_seqlens, "mesh": mesh, **named})
        return y, None

    compare(
        slices, run, [x], [each.detach().requires_grad_() for each in layer.parameters()], None, offsets, mesh=mesh, final=False
    )
