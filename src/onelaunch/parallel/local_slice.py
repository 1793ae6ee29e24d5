"""Slice of the sequences that one rank holds, computed from the lengths of all slices and the offsets of sequences.

Nothing here touches a tensor or a process group. ``contexts.py`` makes a :class:`LocalSlice` for its rank; ``state_scan.py`` and
``halo.py`` read it.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate, pairwise


@dataclass(frozen=True)
class LocalSlice:
    """Slice of a rank: steps ``[start, stop)`` of all steps, and the sequences to which they belong.

    The *head* is the sequence of the slice's first step, the *tail* that of its last step. They may be the same.

    Every sequence begins on one rank, that of its first step, and ends on one, that of its last step. Sequences without steps
    begin and end on rank 0. Where no sequences are packed, all batch entries together count as one.
    """

    start: int
    stop: int
    sequences: tuple[int, ...]
    """Indices of the rank's sequences among all; at least one, which need not have steps here."""
    offsets: tuple[int, ...]
    """Offsets of these sequences in the slice, one more than there are sequences."""
    begins: tuple[bool, ...]
    """Flag for each sequence: its first step is here."""
    ends: tuple[bool, ...]
    """Flag for each sequence: its last step is here."""
    head_start: int
    """Global index of the head's first step."""
    head: int
    """Position, among the rank's sequences, of the one with the slice's first step."""
    tail: int
    """Position, among the rank's sequences, of the one with the slice's last step."""
    before: tuple[int, ...]
    """Ranks with earlier steps of the head, in order, from the one on which it begins; none if that is this rank."""
    after: tuple[int, ...]
    """Ranks with later steps of the tail, in order, to the one on which it ends; none if that is this rank."""

    @property
    def length(self) -> int:
        """Number of steps."""
        return self.stop - self.start

    @property
    def tail_start(self) -> int:
        """First step of the tail in the slice."""
        return self.offsets[self.tail]

    @property
    def head_stop(self) -> int:
        """Number of steps of the head in the slice, which is the local index of the first step after it."""
        return self.offsets[self.head + 1]

    def sources(self, past: int, starts: tuple[int, ...]) -> tuple[tuple[int, int] | None, ...]:
        """Return the location of each of the ``past`` steps before the slice, oldest first: a rank and a distance.

        The distance counts steps from the end of that rank's slice, 1 for its last step. ``None`` stands for a step that does not
        belong to the head. ``starts`` holds the first step of every slice, and the end.
        """
        ranks = {
            step: rank for rank in self.before for step in range(max(starts[rank], starts[rank + 1] - past), starts[rank + 1])
        }
        wanted = range(self.start - past, self.start)
        return tuple(
            (ranks[step], starts[ranks[step] + 1] - step) if step in ranks and step >= self.head_start else None
            for step in wanted
        )


def starts_of(lengths: tuple[int, ...]) -> tuple[int, ...]:
    """Return the first step of every slice, and the end of the last one."""
    return (0, *accumulate(lengths))


def local_slice_of(rank: int, lengths: tuple[int, ...], offsets: tuple[int, ...] | None) -> LocalSlice:
    """Return the slice of a rank; ``offsets`` are those of all sequences, or ``None`` where none are packed."""
    starts = starts_of(lengths)
    start, stop, end = starts[rank], starts[rank + 1], starts[-1]
    offsets = (0, end) if offsets is None else offsets
    spans = list(pairwise(offsets))
    mine = [n for n, (a, b) in enumerate(spans) if max(a, start) < min(b, stop) or (rank == 0 and a == b)]
    here = [n for n in mine if spans[n][0] < spans[n][1]]
    if not mine:
        mine = [min(max(bisect_right(offsets, start) - 1, 0), len(spans) - 1)]
    empty = [spans[n][0] == spans[n][1] and rank == 0 for n in mine]
    begins = [e or (start <= spans[n][0] < stop) for n, e in zip(mine, empty, strict=True)]
    ends = [e or (start < spans[n][1] <= stop and stop > start) for n, e in zip(mine, empty, strict=True)]
    local = [0, *(min(max(spans[n][1] - start, 0), stop - start) for n in mine)]
    head, tail = (mine.index(here[0]), mine.index(here[-1])) if here else (0, 0)

    def holders(n: int, ranks: range) -> tuple[int, ...]:
        a, b = spans[n]
        return tuple(r for r in ranks if max(a, starts[r]) < min(b, starts[r + 1]))

    before = holders(here[0], range(rank)) if here else ()
    after = holders(here[-1], range(rank + 1, len(lengths))) if here else ()
    head_start = spans[mine[head]][0]
    return LocalSlice(start, stop, tuple(mine), tuple(local), tuple(begins), tuple(ends), head_start, head, tail, before, after)
