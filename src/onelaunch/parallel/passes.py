"""The state scan of ``state_scan.py`` with an operation's own kernels (:class:`Passes`), as one autograd function.

Where ranks can store to the memory of peers, a rank sends its message to its readers, the nearest first: later ranks of the
sequence in the forward pass, earlier ones in the backward pass. Each rank scans the messages that it reads in the memory where
they arrive, and a rank that reads none waits for none. Elsewhere all ranks gather all messages (``Collectives.start_scan``).

The pass after the exchange reuses what the local pass has computed. A rank that sends no state in the forward pass computes these
sums too (:meth:`Passes.sums`), once for both passes, while other ranks compute their messages. In the backward pass a rank sends
its state gradients, and while messages arrive it recomputes the states that it needs from the inputs. If the exchange is a kernel
of NCCL, a rank waits for it before it recomputes states, and in the forward pass before it computes outputs
(``Pending.settle``). ``state_scan.py`` calls :func:`run_passes`.

A rank waits for the all-reduce of the final states' gradients before it scans. The last rank sends its message after that
all-reduce, a kernel of NCCL that must run on every rank. CTAs of a scan that wait for messages may occupy all SMs and leave too
few registers for NCCL's CTAs. If the scan came first, this rank and the last one would wait for each other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from onelaunch.parallel.contexts import Context
from onelaunch.parallel.messages import all_final_states, final_gradient, global_rows, initial_states, no_message
from onelaunch.parallel.rules import Kept, Passes, Rules, Tensors


def run_passes(
    context: Context, rules: Rules, passes: Passes, tensors: Tensors, initial: torch.Tensor | None, want_final: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the outputs of a slice, and the final states of all sequences or ``None``."""
    results = _Passes.apply(context, rules, passes, want_final, initial, *tensors)
    return results if want_final else (results, None)


class _Passes(torch.autograd.Function):
    """Call of an operation on a slice: local pass, exchange, scan of the states, pass with outputs; backward likewise."""

    @staticmethod
    def forward(
        ctx: Any, context: Context, rules: Rules, passes: Passes, want_final: bool, initial: torch.Tensor | None, *tensors: Any
    ) -> Any:
        """Return the outputs, and the final states of all sequences if they are wanted."""
        local, kept, offsets = context.local_slice, (), context.cu_seqlens
        if local.after:
            before = None if initial is None or not local.begins[local.tail] else initial[global_rows(context, local.tail)]
            sent, kept = passes.local_state(tensors, local.tail_start, before)
        else:
            sent, kept = no_message(context, rules, tensors), passes.sums(tensors, offsets)
        exchange = context.collectives.start_scan(sent, local.after)
        exchange.settle()
        incoming = rules.scan(exchange, local.before, back=False) if local.before else None
        first = initial_states(context, rules, initial, incoming)
        y, final = passes.forward(tensors, first, offsets, kept, want_final=want_final)
        exchange.finish()
        ctx.context, ctx.rules, ctx.passes, ctx.want_final, ctx.count = context, rules, passes, want_final, len(tensors)
        ctx.rows = None if initial is None else len(initial)
        ctx.save_for_backward(first, *tensors, *kept)
        return (y, all_final_states(context, rules, final)) if want_final and final is not None else y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:  # pyrefly: ignore[bad-override]
        """Return the gradients of the tensors and of the initial states, with zeros for states that only other ranks read."""
        context, rules, passes, local = ctx.context, ctx.rules, ctx.passes, ctx.context.local_slice
        first, *saved = ctx.saved_tensors
        tensors, kept = tuple(saved[: ctx.count]), tuple(saved[ctx.count :])
        dy = grad_outputs[0]
        summed = context.collectives.start_all_reduce(grad_outputs[1]) if ctx.want_final else None
        sums: Kept = ()
        if local.before:
            behind = None if summed is None or not local.ends[local.head] else summed.result()[global_rows(context, local.head)]
            sent, sums = passes.initial_gradient(tensors, dy, local.head_stop, behind)
        else:
            sent = no_message(context, rules, tensors)
        exchange = context.collectives.start_scan(sent, local.before[::-1])
        exchange.settle()
        states = passes.states(tensors, first, context.cu_seqlens, kept)
        dfinal_all = None if summed is None else summed.result()  # The module's docstring says why this precedes the scan.
        outgoing = rules.scan(exchange, local.after[::-1], back=True) if local.after else None
        dfinal = final_gradient(context, rules, dfinal_all, outgoing, dy)
        wanted = ctx.rows is not None and any(local.begins)  # that of another sequence is in this rank's message
        gradients, dfirst = passes.gradients(tensors, first, context.cu_seqlens, dy, dfinal, states, sums, want_initial=wanted)
        exchange.finish()
        return None, None, None, None, _initial_state_gradients(context, rules, ctx.rows, dfirst, dy), *gradients


def _initial_state_gradients(
    context: Context, rules: Rules, rows: int | None, dfirst: torch.Tensor | None, like: torch.Tensor
) -> torch.Tensor | None:
    """Return the gradient of the initial states of all sequences from that of this rank's call.

    Args:
        context: Slices of all ranks.
        rules: The operation.
        rows: Number of initial states; ``None`` if the caller gave none.
        dfirst: Gradient of the initial states of this rank's call. That of a sequence which began on another rank is dropped
            here, since the message to that rank holds it.
        like: Tensor on the device.
    """
    if rows is None:
        return None
    whole = like.new_zeros((rows, *rules.state), dtype=torch.float32)
    local = context.local_slice
    if dfirst is None or not any(local.begins):
        return whole
    if context.offsets is None:
        return dfirst
    begins = torch.tensor(local.begins, device=like.device)
    return whole.index_copy(0, context.sequences, dfirst * begins.view(-1, *(1,) * len(rules.state)))
