"""Scan in plain PyTorch, parallel over chunks of time, and the operator that hides it from tracers.

Time is split into chunks, all chunks are scanned in parallel, their final states are scanned by the same function (recursively),
and the carry is added: about ``CHUNK * log(T) / log(CHUNK)`` tensor operations instead of ``T``. No decay is ever divided by, so
any decay down to 0 is safe.

The number of these operations depends on T, so that a graph of them serves a single T. So :func:`scan` calls the
operator ``onelaunch::linear_scan`` where code is compiled for any T. Variants in PyTorch of ``gated_scan`` and ``gla`` call
:func:`scan`; those of ``gla`` also ask :func:`is_open`.
"""

from __future__ import annotations

import itertools
import operator
from typing import Any

import torch
from torch.nn import functional as F

from onelaunch.launch.operator import Operator
from onelaunch.tracing import is_traced

CHUNK = 16
"""Number of steps of a chunk, scanned serially at each level.

On two x86 cores at T = 2048, chunks of 8 to 32 steps are within 15 % of each other.
"""


def scan(decay: torch.Tensor, addend: torch.Tensor) -> torch.Tensor:
    """Scan ``s_t = decay_t * s_{t-1} + addend_t`` along dimension -2, from zero; both are float32 ``[..., T, V]``."""
    if is_open(addend.shape[-2]):
        return _linear_scan(decay, addend, grad=True)
    return _scan_chunks(decay, addend)


def is_open(size: float) -> bool:
    """Return whether a size is symbolic, so that the code that is being traced must serve other sizes too."""
    if not is_traced():
        return False
    from torch.fx.experimental.symbolic_shapes import has_static_value  # slow to import, and loaded already when code is traced

    return not has_static_value(size)


def _scan_chunks(decay: torch.Tensor, addend: torch.Tensor) -> torch.Tensor:
    """Return the results of :func:`scan` by operations whose number depends on T."""
    length = addend.shape[-2]
    if length <= CHUNK:
        return _scan_steps(decay, addend)
    chunks = -(-length // CHUNK)
    padding = (0, 0, 0, chunks * CHUNK - length)
    decay = F.pad(decay, padding, value=1.0).unflatten(-2, (chunks, CHUNK))
    addend = F.pad(addend, padding).unflatten(-2, (chunks, CHUNK))
    local, product = _scan_steps(decay, addend), _running_product(decay)  # [..., chunks, CHUNK, V]
    ends = _scan_chunks(product[..., -1, :], local[..., -1, :])  # [..., chunks, V]
    carry = F.pad(ends, (0, 0, 1, 0))[..., :-1, :]  # state that enters each chunk
    return torch.addcmul(local, product, carry.unsqueeze(-2)).flatten(-3, -2)[..., :length, :]


def _scan_steps(decay: torch.Tensor, addend: torch.Tensor) -> torch.Tensor:
    """Return the scan, step by step along dimension -2."""
    states: list[torch.Tensor] = []
    for factor, term in zip(decay.unbind(-2), addend.unbind(-2), strict=True):
        states.append(torch.addcmul(term, factor, states[-1]) if states else term)
    return torch.stack(states, dim=-2)


def _running_product(decay: torch.Tensor) -> torch.Tensor:
    """Return the running product of decays, step by step along dimension -2."""
    return torch.stack(list(itertools.accumulate(decay.unbind(-2), operator.mul)), dim=-2)


def _run_scan(decay: torch.Tensor, addend: torch.Tensor) -> torch.Tensor:
    """Return the results of :func:`scan`, contiguous."""
    return _scan_chunks(decay, addend).contiguous() if addend.numel() else torch.empty_like(addend)


def _fake_scan(decay: torch.Tensor, addend: torch.Tensor) -> torch.Tensor:
    """Return an empty tensor for the results of :func:`_run_scan`."""
    return addend.new_empty(addend.shape)


def save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    """Save the decays and the states."""
    ctx.save_for_backward(inputs[0], output)


def gradients(ctx: Any, scan_again: Any, ds: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of decays and addends, by a scan from the last step to the first.

    That of an addend gathers those of all states from its step on: ``da_t = ds_t + decay_{t+1} * da_{t+1}``.
    """
    decay, s = ctx.saved_tensors
    following = F.pad(decay[..., 1:, :], (0, 0, 0, 1))
    da = scan_again(following.flip(-2), ds.flip(-2)).flip(-2)
    return da * F.pad(s[..., :-1, :], (0, 0, 1, 0)), da


_linear_scan = Operator("linear_scan", _run_scan, fake=_fake_scan, save=save, gradients=gradients)
