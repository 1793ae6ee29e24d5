"""Context parallelism of scans: how a slice of the steps changes the state, for :mod:`onelaunch.parallel`.

The public functions of ``gated_scan`` and ``linear_rnn`` call :func:`scan_across`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from onelaunch import dispatch
from onelaunch.operation import AUTO, Query
from onelaunch.operation.autocast import without_autocast
from onelaunch.parallel import Context, Described, Rules, Tensors, run_across_ranks, shifted


def described(key: Query, call: Any, variant: str) -> Described:
    """Return this rank's side of a checked call, whose sizes begin with B and T; raise if the variant cannot run it."""
    if key.sizes[1]:
        dispatch.pick(variant, key)
    facts = {"dtype": key.dtype, "sizes": (key.sizes[0], *key.sizes[2:]), "flags": key.flags, "gradients": key.grad}
    return Described(key.sizes[1], call[0].device, {"operation": key.operation, **facts}, call)


class ScanRules(Rules):
    """A scan with a decay per channel; its tensors are those of ``operation``, of which the first has steps.

    Args:
        operation: Function ``gated_scan``, or ``linear_rnn``.
        scan: Function ``gated_scan``.
        key: Dispatch key of the call on this rank.
        variant: Variant that the caller names for the ordinary call. Other calls, and slices without steps, run by ``auto``.
    """

    def __init__(self, operation: Callable[..., Any], scan: Callable[..., Any], key: Query, variant: str) -> None:
        channels = (key.sizes[-1],)
        super().__init__(key.sizes[0], channels, (channels,), grad=key.grad)
        self.operation, self.scan, self.variant = operation, scan, variant if key.sizes[1] else AUTO

    def run(
        self, tensors: Tensors, initial: torch.Tensor | None, offsets: torch.Tensor | None, want_final: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the outputs and the final states ``[N, V]``."""
        named = {"initial_state": initial, "cu_seqlens": offsets, "variant": self.variant}
        result = self.operation(*tensors, output_final_state=want_final, **named)
        return result if isinstance(result, tuple) else (result, None)

    def saved(self, tensors: Tensors) -> Tensors:
        """Return the log-decay and the gate."""
        return tensors[-2:]

    def local_state(self, tensors: Tensors, start: int) -> torch.Tensor:
        """Return the state of a scan without a gate, whose outputs are dropped."""
        first, *rest, log_decay, _ = tensors
        _, state = self.operation(_from(first, start), *rest, _from(log_decay, start), output_final_state=True)
        return state

    def cumulative_decays(self, saved: Tensors, start: int, stop: int) -> tuple[torch.Tensor, ...]:
        """Return the product of decays ``[N, V]``."""
        log_decay = saved[0]
        assert log_decay is not None  # noqa: S101 - a scan has decays
        return (log_decay[:, start:stop].sum(1, dtype=torch.float32).exp(),)

    def initial_gradient(self, saved: Tensors, dy: torch.Tensor, stop: int) -> torch.Tensor:
        """Return the state of the scan backwards: every decay is shifted by one step, and the first one comes last."""
        log_decay, gate = saved
        assert log_decay is not None  # noqa: S101 - a scan has decays
        ds = dy[:, :stop].float()
        if gate is not None:
            ds = ds * F.silu(gate[:, :stop].float())
        with without_autocast(dy.device):
            _, state = self.scan(ds.flip(1), shifted(log_decay[:, :stop].float()), output_final_state=True)
        return state * log_decay[:, 0].float().exp()


def _from(x: torch.Tensor | None, start: int) -> Any:
    """Return the steps of a tensor from ``start``."""
    return x if x is None or start == 0 else x[:, start:]


def scan_across(
    context: Context, rules: ScanRules, tensors: Tensors, initial: torch.Tensor | None, want_final: bool
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return the results of the public function for a slice."""
    first = tensors[0]
    assert first is not None  # noqa: S101 - checked
    with without_autocast(first.device):
        y, final = run_across_ranks(context, rules, tensors, initial, want_final)
    return y if final is None else (y, final)
