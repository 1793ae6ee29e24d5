"""Context parallelism of gated linear attention: how a slice of the steps changes the state, for :mod:`onelaunch.parallel`.

The public function ``gla`` calls :func:`gla_across`. Where the variant ``hopper`` runs the call, its kernels share the sums of
segments with the local passes, see launch_slices.py. A pass that needs a state alone is the chunk state pass of ``fused`` where
that variant runs the call, see launch_states.py. Elsewhere it is an ordinary call by ``auto`` whose outputs are dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from onelaunch import dispatch
from onelaunch.operation import AUTO, Query
from onelaunch.operation.autocast import without_autocast
from onelaunch.ops.gla.heads import expanded
from onelaunch.ops.gla.padding import STEP
from onelaunch.parallel import Context, Described, Passes, Pending, Rules, Tensors, run_across_ranks, shifted

Attend = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
"""Type of the public function ``gla``."""


def described(key: Query, call: Any, variant: str) -> Described:
    """Return the description of a checked call on this rank; raise if the variant cannot run it."""
    if key.sizes[1]:
        dispatch.pick(variant, key)
    facts = {"dtype": key.dtype, "sizes": (key.sizes[0], *key.sizes[2:]), "flags": key.flags, "gradients": key.grad}
    heads = {"heads": tuple(call.heads), "scale": call.scale, "value_gate": call.gv is not None}
    return Described(key.sizes[1], call.q.device, {"operation": key.operation, **facts, **heads}, call)


class GlaRules(Rules):
    """Rules of gated linear attention.

    Its tensors are q, k, v, g and gv. A state has as many heads as the initial state if there is one, else as g.

    Args:
        attend: Function ``gla``.
        call: Checked call on this rank.
        variant: Variant that the caller names for the ordinary call. Other calls, and slices without steps, run by ``auto``.
    """

    def __init__(self, attend: Attend, call: Any, variant: str) -> None:
        batch, length, self.most, keys, values = call.key.sizes
        self.heads = call.g.shape[2] if call.initial_state is None else call.initial_state.shape[1]
        cumulative_decays = [(self.heads, 1 if call.per_head else keys, 1)]
        if call.gv is not None:
            cumulative_decays.append((self.heads, 1, values))
        super().__init__(batch, (self.heads, keys, values), tuple(cumulative_decays), grad=call.key.grad)
        self.attend, self.scale, self.variant = attend, call.scale, variant if length else AUTO
        name = dispatch.pick(variant, call.key).name if length and call.gv is None else ""
        self.states_alone = name == "fused"
        self.kernels = name in ("fused", "hopper")
        self.shares_sums = name == "hopper" and self.heads == call.g.shape[2] and keys % STEP == values % STEP == 0

    def run(
        self, tensors: Tensors, initial: torch.Tensor | None, offsets: torch.Tensor | None, want_final: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the outputs and the final states ``[N, heads, K, V]``."""
        q, k, v, g, gv = tensors
        # Without an initial state, the final state would have as many heads as the output.
        if initial is None and self.heads < self.most and want_final and q is not None:
            sequences = self.batch if offsets is None else offsets.shape[0] - 1
            initial = q.new_zeros((sequences, *self.state), dtype=torch.float32)
        return self.attend(
            q, k, v, g, gv=gv, scale=self.scale, initial_state=initial, output_final_state=want_final, cu_seqlens=offsets,
            variant=self.variant,
        )  # fmt: skip

    def passes(self) -> Passes | None:
        if not self.shares_sums:
            return None
        from onelaunch.ops.gla.launch_slices import HopperPasses  # it needs Triton

        return HopperPasses(self.scale)

    def fold(self, gathered: torch.Tensor, ranks: Sequence[int], *, back: bool) -> torch.Tensor:
        if not self.kernels or max(ranks) - min(ranks) >= len(ranks):  # a rank between them has no steps
            return super().fold(gathered, ranks, back=back)
        from onelaunch.ops.gla.launch_slices import folded

        heads, keys, values = self.state
        return folded(gathered, ranks, (heads, keys, values), self.decay_shapes[0][1], back=back)

    def scan(self, exchange: Pending, ranks: Sequence[int], *, back: bool) -> torch.Tensor:
        messages = exchange.in_place()
        if messages is None:
            return self.fold(exchange.result(), ranks, back=back)
        from onelaunch.ops.gla.launch_slices import folded_in_place

        heads, keys, values = self.state
        return folded_in_place(messages, ranks, (heads, keys, values), self.decay_shapes[0][1])

    def saved(self, tensors: Tensors) -> Tensors:
        """Return all tensors; the pass for states alone reads the shapes of k and v, and the ordinary call saves them anyway."""
        return tensors

    def local_state(self, tensors: Tensors, start: int) -> torch.Tensor:
        """Return the final state of a call with k in the place of q, so that no state is computed for several heads of q."""
        q, k, v, g, gv = (None if each is None else each[:, start:] for each in tensors)
        assert k is not None and v is not None and g is not None  # noqa: PT018, S101 - checked
        queries = q if g.shape[2] > max(k.shape[2], v.shape[2]) else k
        if self.states_alone and queries is not None:
            from onelaunch.ops.gla import launch_states  # it needs Triton

            return expanded(launch_states.final_state(queries, k, v, g), self.heads, dim=1)
        return expanded(self._state(queries, k, v, g, gv), self.heads, dim=1)

    def cumulative_decays(self, saved: Tensors, start: int, stop: int) -> tuple[torch.Tensor, ...]:
        """Return the products of decays ``[N, heads, K or 1, 1]``, and of those of value channels ``[N, heads, 1, V]``."""
        *_, g, gv = saved
        assert g is not None  # noqa: S101 - a checked call has decays
        found = [
            product(g, self.heads, start, stop)[..., None]
            if g.dim() == 4
            else product(g, self.heads, start, stop)[..., None, None]
        ]
        if gv is not None:
            found.append(product(gv, self.heads, start, stop)[:, :, None])
        return tuple(found)

    def initial_gradient(self, saved: Tensors, dy: torch.Tensor, stop: int) -> torch.Tensor:
        """Return the final state of a call backwards in time, with q as its keys and dy as its values.

        Decays are delayed by one step (:func:`shifted`), and that of step 0 is applied last. The gradient of a state that several
        heads share is the sum over these heads.
        """
        q, k, v, g, gv = (None if each is None else each[:, :stop] for each in saved)
        assert q is not None and k is not None and v is not None and g is not None  # noqa: PT018, S101 - checked
        if self.states_alone:
            from onelaunch.ops.gla import launch_states

            return launch_states.initial_gradient(q, k, v, g, dy[:, :stop], self.scale, self.heads)
        most = max(q.shape[2], dy.shape[2])
        decays = [None if each is None else shifted(expanded(each, most)) for each in (g, gv)]
        with without_autocast(q.device):
            keys = q.flip(1)
            state = self._state(keys, keys, dy[:, :stop].flip(1), *decays)
        state = expanded(state, most, dim=1).unflatten(1, (self.heads, most // self.heads)).sum(2)
        for decay in self.cumulative_decays(saved, 0, 1):
            state = state * decay
        return state * self.scale

    def _state(self, q: Any, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor | None, gv: torch.Tensor | None) -> torch.Tensor:
        """Return the state ``[B, largest number of heads, K, V]`` after all steps; q only decides the number of heads."""
        _, state = self.attend(q, k, v, g, gv=gv, scale=1.0, output_final_state=True)
        assert state is not None  # noqa: S101 - it was asked for
        return state


def product(log_decay: torch.Tensor, heads: int, start: int, stop: int) -> torch.Tensor:
    """Return the product of decays over steps, ``[B, heads, ...]`` float32."""
    return expanded(log_decay[:, start:stop].sum(1, dtype=torch.float32).exp(), heads, dim=1)


def gla_across(context: Context, call: Any, attend: Attend, variant: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the results of the public function for a slice, with states in the caller's layout."""
    rules = GlaRules(attend, call, variant)
    with without_autocast(call.q.device):
        o, final = run_across_ranks(
            context, rules, (call.q, call.k, call.v, call.g, call.gv), call.initial_state, call.output_final_state
        )
    if final is None:
        return o, None
    if call.initial_state is None:
        final = expanded(final, rules.most, dim=1)
    return o, final.transpose(-1, -2) if call.state_v_first else final
