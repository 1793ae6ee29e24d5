"""Oracle of ``gated_scan``, the inputs that variants are verified on, and the dispatch key of a case.

The workbench and other code that examines an operation's cases call them through the operation; ``reference.py`` of
``linear_rnn`` calls them too.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch.nn import functional as F

from onelaunch.operation import Case, Query, Reading
from onelaunch.operation.inputs import case_flags, make_log_decay, packed_lengths
from onelaunch.ops.gated_scan.contract import gate_flags, gated_scan


@gated_scan.oracle
def reference(
    v: torch.Tensor,
    log_decay: torch.Tensor,
    gate: torch.Tensor | None = None,
    *,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the recurrence step by step, sequence by sequence, in the dtype of the arguments (float64 in verification).

    The final states are returned in any case; they are ignored unless the call asks for them.
    """
    batch, length, channels = v.shape
    bounds = [0, length] if cu_seqlens is None else cu_seqlens.tolist()
    sequences = batch if cu_seqlens is None else len(bounds) - 1
    if initial_state is None:
        initial_state = v.new_zeros(sequences, channels)
    # Unbound once, because the gradient of x[:, t] would be as large as x for every t.
    decays, values = log_decay.exp().unbind(1), v.unbind(1)
    states, finals = [], []
    for index, (start, end) in enumerate(itertools.pairwise(bounds)):
        state = initial_state if cu_seqlens is None else initial_state[index : index + 1]
        for t in range(start, end):
            state = decays[t] * state + values[t]
            states.append(state)
        finals.append(state)
    s = torch.stack(states, dim=1) if states else v.new_zeros(batch, 0, channels)
    return s if gate is None else s * F.silu(gate), torch.cat(finals)


@gated_scan.inputs
def make_inputs(case: Case, device: torch.device, generator: torch.Generator) -> Reading:
    """Return random ``v`` and gate, and a log-decay of the kind that the case names."""
    extent = (case.sizes["B"], case.sizes["T"], case.sizes["V"])
    v = torch.randn(extent, device=device, generator=generator).to(case.dtype)
    arguments = scan_inputs(case, gated_scan.options, extent, device, generator)
    return Reading({"v": v, **arguments}, ("v", *differentiable_of(arguments)))


def differentiable_of(arguments: dict[str, Any]) -> tuple[str, ...]:
    """Return the names of the arguments made by :func:`scan_inputs` that take gradients."""
    return tuple(name for name in ("log_decay", "gate", "initial_state") if arguments.get(name) is not None)


def scan_inputs(
    case: Case,
    defaults: dict[str, Any],
    extent: tuple[int, int, int],
    device: torch.device,
    generator: torch.Generator,
) -> dict[str, Any]:
    """Return random values of the arguments that all operations with a gated scan share.

    ``defaults`` are the operation's options, which the case's options override; ``extent`` is ``(B, T, V)``.
    """
    options = {**defaults, **case.options}
    batch, _, channels = extent
    decay_dtype = torch.float32 if options["log_decay_dtype"] == "float32" else case.dtype
    arguments: dict[str, Any] = {
        "log_decay": make_log_decay(options["decay"], extent, device, generator).to(decay_dtype),
        "gate": torch.randn(extent, device=device, generator=generator).to(case.dtype) if options["gate"] else None,
        "output_final_state": bool(options["final_state"]),
    }
    sequences = batch
    if options["lengths"] is not None:
        lengths = packed_lengths(case, options["lengths"])
        offsets = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
        arguments["cu_seqlens"] = torch.tensor(offsets, dtype=torch.int32, device=device)
        sequences = len(lengths)
    if options["initial_state"]:
        arguments["initial_state"] = torch.randn(sequences, channels, device=device, generator=generator)
    return arguments


@gated_scan.queries
def make_query(case: Case, device: str, grad: bool) -> Query:
    """Return the dispatch key of a case."""
    sizes = tuple(case.sizes[name] for name in gated_scan.dimensions)
    return Query("gated_scan", device, case.dtype, sizes, grad, scan_flags(case, gated_scan.options))


def scan_flags(case: Case, defaults: dict[str, Any]) -> tuple[str, ...]:
    """Return the flags of a case's query, for all operations with a gated scan; ``defaults`` are the operation's options."""
    return case_flags(case, defaults) + gate_flags(bool({**defaults, **case.options}["gate"]))
