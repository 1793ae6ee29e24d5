"""Variants of ``gated_scan`` in plain PyTorch: they run on every device, and ``chunked`` is the CPU's default.

The PyTorch variants of ``linear_rnn`` multiply and then call these functions. They use this module's checks too.

``chunked`` scans chunks of time in parallel (``kernels/scan/chunked.py``). No decay is ever divided by, so any log-decay down to
-inf is safe.

The dispatcher, studies and tests find registered variants by name. Tags: ``fuses`` names the steps that share a kernel (``scan``,
``gate``); ``cost.py`` reads it. ``yardstick`` marks the PyTorch baseline, whose error sets the tolerance. Other keywords are
capabilities, which the class ``Capabilities`` of ``onelaunch.operation`` explains.
"""

from __future__ import annotations

import itertools

import torch
from torch.nn import functional as F

from onelaunch.dispatch.capture import compile_static, compiler_missing
from onelaunch.kernels.scan.chunked import scan
from onelaunch.operation import Query
from onelaunch.operation.requirements import no_steps
from onelaunch.ops.gated_scan.contract import ScanCall, gated_scan

Results = tuple[torch.Tensor, torch.Tensor]
"""Output and final states, or another pair of tensors."""


@gated_scan.variant("eager", launches=None, fuses=(), yardstick=True)
def eager(call: ScanCall) -> Results:
    """Loop over time, one step after another: the PyTorch baseline that sets the tolerance of the other variants."""
    v, decay = call.v.float(), call.log_decay.float().exp()
    batch, length, channels = v.shape
    bounds = [0, length] if call.cu_seqlens is None else call.cu_seqlens.tolist()
    sequences = batch if call.cu_seqlens is None else len(bounds) - 1
    initial = v.new_zeros(sequences, channels) if call.initial_state is None else call.initial_state
    # Unbound once, because the gradient of x[:, t] would be as large as x for every t.
    decays, values = decay.unbind(1), v.unbind(1)
    states, finals = [], []
    for index, (start, end) in enumerate(itertools.pairwise(bounds)):
        state = initial if call.cu_seqlens is None else initial[index : index + 1]
        for t in range(start, end):
            state = torch.addcmul(values[t], decays[t], state)
            states.append(state)
        finals.append(state)
    s = torch.stack(states, dim=1) if states else v
    return _gated(s, call.gate).to(call.v.dtype), torch.cat(finals) if finals else initial


@gated_scan.variant("chunked", launches=None, fuses=())
def chunked(call: ScanCall) -> Results:
    """Scan chunks in parallel over time, in pure PyTorch: the default on a CPU."""
    return chunked_scan_and_gate(call.v, call.log_decay, call.gate, call.initial_state, call.cu_seqlens)


@gated_scan.variant("compiled", launches=None, recompiles=True, fuses=("scan", "gate"))
def compiled(call: ScanCall) -> Results:
    """Run the chunked form, compiled by torch.compile."""
    function = compile_static(chunked_scan_and_gate)
    return function(call.v, call.log_decay, call.gate, call.initial_state, call.cu_seqlens)


compiled.supports(compiler_missing)


@compiled.supports
def one_channel(query: Query) -> str | None:
    """Return why the compiled scan cannot run with one channel, or ``None``.

    With V = 1 and a last chunk that is not full, code of PyTorch 2.13's TorchInductor for a CPU reads memory that nobody wrote.
    """
    single = query.device_type == "cpu" and query.sizes[-1] == 1
    return "needs more than one channel on a CPU, where torch.compile gives wrong results for one" if single else None


chunked.supports(no_steps)
compiled.supports(no_steps)


def chunked_scan_and_gate(
    v: torch.Tensor,
    log_decay: torch.Tensor,
    gate: torch.Tensor | None,
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
) -> Results:
    """Return the results of ``gated_scan``, computed from its tensors by the chunked scan.

    ``linear_rnn`` compiles this function together with its matrix product.
    """
    decay, addend, ends = _fold_initial_state(v.float(), log_decay.float().exp(), initial_state, cu_seqlens)
    s = scan(decay, addend)
    if cu_seqlens is None or ends is None:
        final = s[:, -1] if gate is not None else s[:, -1].clone()  # without a gate, y may be s itself
    else:
        empty = (cu_seqlens.diff() == 0)[:, None]
        before = 0.0 if initial_state is None else initial_state
        final = torch.where(empty, before, s[0, ends])
    return _gated(s, gate).to(v.dtype), final


def _gated(s: torch.Tensor, gate: torch.Tensor | None) -> torch.Tensor:
    """Return float32 states times SiLU of the gate, or the states if there is no gate."""
    return s if gate is None else s * F.silu(gate.float())


def _fold_initial_state(
    v: torch.Tensor, decay: torch.Tensor, initial_state: torch.Tensor | None, cu_seqlens: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return decay and addend of a scan that starts from zero and resets at each sequence start, and each sequence's last row.

    The first step of a sequence becomes ``0 * s + (v + decay * initial_state)``, so that packed sequences are one scan over T.
    """
    length = v.shape[1]
    if cu_seqlens is None:
        if initial_state is None:
            return decay, v, None
        first = torch.addcmul(v[:, :1], decay[:, :1], initial_state[:, None])
        return decay, torch.cat([first, v[:, 1:]], dim=1), None
    offsets = cu_seqlens.long()
    filled = offsets.diff() > 0
    starts, ends = offsets[:-1].clamp(max=length - 1), (offsets[1:] - 1).clamp(min=0)
    is_start = torch.zeros(length, dtype=torch.int32, device=v.device).index_add(0, starts, filled.int()) > 0
    if initial_state is not None:
        entering = torch.where(filled[:, None], decay[0, starts] * initial_state, 0.0)
        v = v.index_add(1, starts, entering[None])
    return torch.where(is_start[:, None], 0.0, decay), v, ends
