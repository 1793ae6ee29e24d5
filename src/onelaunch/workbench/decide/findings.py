"""Facts that limit what a decision means: peers outside the gate, faster variants of other makers, and launches not counted.

``decision.py`` stores them as the decision's notes, and reports show them. They decide nothing, because a study's author may have
a reason for a slow baseline; the reader is told all the same.

A peer outside the gate (``outside``) is another project's variant whose errors are larger than the verification gate allows, but
within the tolerance of that project's tests; others are compared with its times. ``own_tolerance`` is that tolerance. ``over_at``
and ``over_regime`` compare with another shape or regime.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from onelaunch.errors import OneLaunchError
from onelaunch.operation import Direction
from onelaunch.wording import listing
from onelaunch.workbench import quantities as q
from onelaunch.workbench import stats
from onelaunch.workbench.decide.selection import LAUNCH_TAGS, compared, miscounted
from onelaunch.workbench.result import Cell, Estimate, Outcome, Regime, Result
from onelaunch.workbench.study import Criterion

FEW = 3
"""Largest number of names that a sentence lists."""


def findings(result: Result, deciding: Sequence[Outcome]) -> tuple[str, ...]:
    """Return the facts that limit a decision, in sentences.

    Args:
        result: The measurements.
        deciding: Outcomes of the criteria that the decision rests on.
    """
    return (*_outside(result), *_better_peers(result, deciding), *_miscounts(result), *_uncounted(result, deciding))


def _maker_of(result: Result, name: str) -> str:
    """Return who made a variant: its tag ``maker``, the package that it requires, or the distribution that it comes from.

    Without any of them it is the package of its function; empty for a variant that is not registered here.
    """
    stored = _distribution(result, name)
    try:
        variant = result.study.find_variant(name)
    except OneLaunchError:  # the operation is not installed here
        variant = None
    if variant is None:
        return stored
    module = getattr(variant.run, "__module__", None) or ""
    named = variant.tags.get("maker") or variant.capabilities.requires
    return str(named or stored or module.partition(".")[0])


def _distribution(result: Result, name: str) -> str:
    """Return the distribution that a result's provenance names for a variant, or an empty string."""
    stored = getattr(result.provenance, "variants", None) or {}
    entry: Any = stored.get(name)
    found = entry.get("distribution") if isinstance(entry, Mapping) else getattr(entry, "distribution", None)
    return str(found or "").partition(" ")[0]  # its version follows the name


@dataclass(frozen=True)
class _Peer:
    """A variant of another maker that is faster than the baseline at one shape."""

    of: Cell
    cell: Cell
    over_baseline: Estimate
    """Speed of the peer over the baseline."""
    of_over_peer: Estimate
    """Speed of the judged variant over the peer."""


def _outside(result: Result) -> list[str]:
    """Describe the peers outside the gate, one sentence each: where, and the error that is furthest beyond its limit."""
    found: dict[str, list[Cell]] = {}
    for cell in result.cells:
        if cell.outside and cell.verdict is not None:
            found.setdefault(cell.variant, []).append(cell)
    sentences = []
    for name, cells in found.items():
        parts = [(part.error / part.allowed, part, cell) for cell in cells if cell.verdict for part in cell.verdict.components]
        _, worst, at = max(parts, key=lambda each: each[0])
        where = f"{worst.name} at {at.shape} ({at.direction.replace('_', ' + ')})"
        verdict = at.verdict
        if verdict is not None and verdict.own_tolerance is not None:
            what, allows = "a peer outside the gate", f"and its own tests allow {verdict.own_tolerance:g}"
        else:
            what, allows = "an incorrect peer", "and its own tests do not allow it either"
        sentences.append(
            f"{name} is {what} at {q.plural(len(cells), 'measurement')}, timed to compare others with: {where} "
            f"is off by {q.scientific(worst.error)}, {q.scientific(worst.allowed)} is allowed, {allows}."
        )
    return sentences


def _better_peers(result: Result, deciding: Sequence[Outcome]) -> list[str]:
    """Describe the variants of other makers that are faster than the baseline, and the judged variant's ratio to them."""
    found: dict[tuple[str, Direction, Regime], dict[str, _Peer]] = {}
    for outcome in deciding:
        for peer in _peers_of(result, outcome):
            key = (peer.cell.variant, peer.cell.direction, outcome.criterion.regime)
            worst = found.setdefault(key, {}).get(peer.cell.shape)
            if worst is None or peer.of_over_peer.median < worst.of_over_peer.median:
                found[key][peer.cell.shape] = peer
    return [_peer_words(result, key, list(peers.values())) for key, peers in found.items()]


def _peer_words(result: Result, key: tuple[str, Direction, Regime], peers: Sequence[_Peer]) -> str:
    """Return the sentence on one variant that is faster than the baseline, with the shape where ours does worst against it."""
    name, direction, regime = key
    worst = min(peers, key=lambda peer: peer.of_over_peer.median)
    where = f"at {worst.cell.shape if len(peers) == 1 else q.plural(len(peers), 'shape')}"
    by = f" (by {maker})" if (maker := _maker_of(result, name)) and maker != name else ""
    how = f"({direction.replace('_', ' + ')}, {regime})"
    there = "it" if len(peers) == 1 else f"at {worst.cell.shape} it"
    return (
        f"{worst.cell.label}{by} is faster than the baseline {result.study.baseline} {where} {how}: {there} is "
        f"{q.ratio_interval(worst.over_baseline)} as fast as the baseline, and {worst.of.variant} is "
        f"{q.ratio_interval(worst.of_over_peer)} as fast as {name}."
    )


def _peers_of(result: Result, outcome: Outcome) -> Iterable[_Peer]:
    """Yield, for each shape of a criterion over the baseline, the fastest variant of another maker that beats the baseline."""
    if not _over_baseline(result, outcome.criterion):
        return
    for criterion, shape, name in result.study.asked(outcome.criterion):
        if name not in outcome.values:
            continue
        of, baseline = (side.cell for side in compared(result, criterion, shape))
        noise = result.noise_at(shape.name, criterion.direction, criterion.regime)
        if of is None or baseline is None or noise is None:
            continue
        ours = _maker_of(result, of.variant)
        faster = []
        for cell in result.cells:
            here = (cell.shape, cell.direction) == (shape.name, criterion.direction) and not cell.control and cell.measured
            if not here or cell is of or cell is baseline or _maker_of(result, cell.variant) == ours:
                continue
            gain = _speed(cell, baseline, criterion.regime)
            ratio = _speed(of, cell, criterion.regime)
            if gain is not None and ratio is not None and gain.low > noise.floor:
                faster.append(_Peer(of, cell, gain, ratio))
        if faster:
            yield max(faster, key=lambda peer: peer.over_baseline.median)


def _over_baseline(result: Result, criterion: Criterion) -> bool:
    """Return whether a criterion compares two times of one shape and regime, the second being the baseline's."""
    one_case = criterion.over_at is None and criterion.over_regime is None
    quantity = criterion.quantity
    return quantity.timed and quantity.alone is None and one_case and result.study.over(criterion) == result.study.baseline


def _speed(cell: Cell, over: Cell, regime: Regime) -> Estimate | None:
    """Return the speed of one measurement over another, from ratios taken round by round, or ``None`` without two times."""
    mine, theirs = cell.timing(regime), over.timing(regime)
    return None if mine is None or theirs is None else stats.ratio(theirs.rounds, mine.rounds)


def _miscounts(result: Result) -> list[str]:
    """Describe the variants whose counted launches differ from those that they declare, one sentence each."""
    sentences: dict[str, str] = {}
    for cell in result.cells:
        if cell.variant not in sentences and (problem := miscounted(cell)):
            sentences[cell.variant] = f"{problem}."
    return list(sentences.values())


def _uncounted(result: Result, deciding: Sequence[Outcome]) -> list[str]:
    """Say which criteria choose variants by launches that were declared and not counted, in one sentence at most."""
    named = []
    for outcome in deciding:
        criterion = outcome.criterion
        selectors = [selector for selector in (criterion.of, criterion.over) if isinstance(selector, dict)]
        by_launches = any(tag in selector for selector in selectors for tag in LAUNCH_TAGS)
        if by_launches and outcome.values and not _all_counted(result, outcome):
            named.append(repr(criterion.name))
    if not named:
        return []
    more = f" and {q.plural(len(named) - FEW, 'other criterion', 'other criteria')}" if len(named) > FEW else ""
    names = ", ".join(named[:FEW]) + more if more else listing(named)
    verb = "chooses" if len(named) == 1 else "choose"
    return [f"{names} {verb} variants by the launches that they declare; the launches of a call were not counted in this run."]


def _all_counted(result: Result, outcome: Outcome) -> bool:
    """Return whether the launches of the variants that a criterion chose were counted at each of its shapes."""
    for criterion, shape, name in result.study.asked(outcome.criterion):
        if name not in outcome.values:
            continue
        sides = compared(result, criterion, shape)
        selectors = [criterion.of, *([result.study.over(criterion)] if len(sides) > 1 else [])]
        for selector, side in zip(selectors, sides, strict=True):
            chosen = isinstance(selector, dict) and any(tag in selector for tag in LAUNCH_TAGS)
            if chosen and side.cell is not None and side.cell.launches is None:
                return False
    return True
