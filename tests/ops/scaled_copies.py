"""What the kernels of ``gla``'s ``scaled_copies.py`` compute, in plain PyTorch: float16 copies times powers of 2, and tables.

Tests of these kernels compare with it, and tests that emulate the kernels of ``hopper`` put it in their place.
"""

from __future__ import annotations

import itertools
import math

import torch

from onelaunch.ops.gla.launch import Attention
from onelaunch.ops.gla.launch_scaled_copies import Powers, ScaledCopies


def exponent_above(x: float) -> int:
    """Return the least E with x < 2^E."""
    return math.frexp(x)[1]


def log2_above(count: int) -> int:
    """Return the least E with count <= 2^E."""
    return max(count - 1, 0).bit_length()


def largest(tensor: torch.Tensor) -> float:
    """Return the largest finite magnitude of a tensor, 0 if there is none."""
    magnitudes = tensor.abs()[tensor.isfinite()]
    return magnitudes.max().item() if magnitudes.numel() else 0.0


class Exponents:
    """Exponents of the powers of one sequence, by head: ``q``, ``k``, ``v`` and ``do``.

    Args:
        q, k, v, do: Its steps of these tensors ``[T, heads, channels]``; ``do`` may be ``None``.
        initial, dfinal: Its states ``[Hs, K, V]``, or ``None``.
        shift: Exponent of the scale.
    """

    def __init__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        do: torch.Tensor | None,
        initial: torch.Tensor | None,
        dfinal: torch.Tensor | None,
        heads: int,
        states: int,
        shift: int,
    ):
        steps = log2_above(q.shape[0])
        of_keys = min((14 - steps) // 2, (15 - log2_above(q.shape[2])) // 2, 7)
        of_values = min(14 - steps - of_keys, (15 - log2_above(v.shape[2])) // 2)
        self.q, self.k = ([self.beside(x[:, h], of_keys, []) for h in range(x.shape[1])] for x in (q, k))
        self.v, self.do = [], []
        for h in range(v.shape[1]):
            group = range(h * (states // v.shape[1]), (h + 1) * (states // v.shape[1]))
            bounds = [] if initial is None else [(initial[s], self.k[s // (states // k.shape[1])]) for s in group]
            self.v.append(self.beside(v[:, h], of_values, bounds))
        for h in range(0 if do is None else heads):
            bounds = [] if dfinal is None else [(dfinal[h // (heads // states)], self.q[h // (heads // q.shape[1])] - shift)]
            self.do.append(self.beside(do[:, h], of_values, bounds))

    @staticmethod
    def beside(x: torch.Tensor, target: int, states: list[tuple[torch.Tensor, int]]) -> int:
        """Return the exponent for x: as large as the bound of x and those of states with other powers allow; 0 without any."""
        allowed = [target - exponent_above(largest(x))] if largest(x) > 0 else []
        allowed += [14 - exponent_above(largest(state)) - other for state, other in states if largest(state) > 0]
        return min(allowed, default=0)


def spans(call: Attention) -> list[tuple[int, int, int]]:
    """Return the batch entry, the first step and the end of every sequence."""
    batch, length = call.q.shape[:2]
    if call.sequences.offsets is None:
        return [(b, 0, length) for b in range(batch)]
    offsets = call.sequences.offsets.tolist()
    return [(0, first, end) for first, end in itertools.pairwise(offsets)]


def times(x: torch.Tensor, exponents: list[int]) -> torch.Tensor:
    """Return steps ``[T, heads, channels]`` with each head times its power, in float16."""
    powers = torch.tensor([2.0**e for e in exponents], dtype=torch.float64, device=x.device)[:, None]
    return (x.double() * powers).to(torch.float16)


def scaled_copies(call: Attention, do: torch.Tensor | None = None, dfinal: torch.Tensor | None = None) -> ScaledCopies:
    """Return the copies of a call's tensors and of the gradient of o, and the powers that undo their scaling."""
    _, _, heads, _, _ = call.sizes
    count, initial, device = call.heads, call.sequences.initial, call.q.device
    mantissa, shift = math.frexp(call.scale)
    q, k, v = (torch.empty(x.shape, dtype=torch.float16, device=device) for x in call[:3])
    do_copy = None if do is None else torch.empty(do.shape, dtype=torch.float16, device=device)
    forward, backward = [], []
    for n, (b, first, end) in enumerate(spans(call)):
        steps = slice(first, end)
        e = Exponents(
            call.q[b, steps], call.k[b, steps], call.v[b, steps], None if do is None else do[b, steps],
            None if initial is None else initial[n], None if dfinal is None else dfinal[n], heads, count.state, shift,
        )  # fmt: skip
        for copy, x, exponents in ((q, call.q, e.q), (k, call.k, e.k), (v, call.v, e.v), (do_copy, do, e.do)):
            if copy is not None and x is not None:
                copy[b, steps] = times(x[b, steps], exponents)
        for h in range(heads):
            of_q, of_k, of_v = (x[h // (heads // len(x))] for x in (e.q, e.k, e.v))
            forward.append([of_k + of_v, shift - of_q - of_k - of_v, -of_k - of_v])
            if do is not None:
                of_do = e.do[h]
                backward.append([
                    of_q + of_do - shift, shift - of_q - of_k - of_do, shift - of_q - of_do,
                    shift - of_k - of_v - of_do, shift - of_q - of_v - of_do, shift - of_q - of_k - of_v - of_do,
                ])  # fmt: skip

    def table(rows: list[list[int]], width: int) -> torch.Tensor:
        pairs = [[min(max(each, -126), 126) for e in row for each in (e, e - min(max(e, -126), 126))] for row in rows]
        values = torch.tensor([[2.0**e for e in row] for row in pairs], dtype=torch.float32, device=device)
        return torch.cat((values, values.new_full((len(rows), width - values.shape[1]), math.nan)), 1).view(-1, heads, width)

    powers = Powers(table(forward, 8), None if do is None else table(backward, 16))
    return ScaledCopies(call._replace(q=q, k=k, v=v, scale=mantissa), do_copy, powers)
