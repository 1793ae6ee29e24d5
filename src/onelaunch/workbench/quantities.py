"""Formatting of numbers: times, bytes, rates and ratios as reports, evidence and commands write them.

The modules of ``report``, ``decide`` and ``measures`` call these functions, and so do the commands of ``cli`` that print numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from onelaunch.workbench.stored import Estimate

NONE = "–"
"""Mark of a missing number."""

TIMES = ((1e6, "s"), (1e3, "ms"), (1.0, "µs"))
"""Units of time with their length in microseconds, the longest first."""

BYTES = ((2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B"))
"""Units of size with their length in bytes, the longest first."""

RATES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
"""Prefixes of rates and amounts of work, the largest first."""


def number(value: float, digits: int = 3) -> str:
    """Format a number with at least ``digits`` significant digits, all digits before the point, and no exponent.

    With three digits, examples are ``7.92``, ``1234`` and ``0.0313``.
    """
    if not math.isfinite(value):
        return str(value)
    return f"{value:.{_decimals(value, digits)}f}"


def time(microseconds: float) -> str:
    """Format a time with its unit: ``7.92 µs``, ``90.1 ms``."""
    scale, unit = _unit(abs(microseconds), TIMES)
    return f"{number(microseconds / scale)} {unit}"


def duration(seconds: float) -> str:
    """Format the time that a command takes: ``0.41 s``, ``47.3 s``, ``3 min 20 s``, ``2 h 05 min``."""
    if seconds < 60:
        return f"{number(seconds)} s" if seconds else "0 s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{int(seconds // 60)} min {int(seconds % 60):02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def money(amount: float) -> str:
    """Format an amount of money without its currency: at least two digits after the point, and more below a tenth."""
    return f"{amount:.{max(2, _decimals(amount, 2)) if amount else 2}f}"


def interval(estimate: Estimate) -> str:
    """Format a time with its interval, all three in one unit: ``7.92 µs [7.85, 8.01]``."""
    scale, unit = _unit(abs(estimate.median), TIMES)
    return f"{number(estimate.median / scale)} {unit} {_bounds(estimate, scale)}"


def ratio(value: float) -> str:
    """Format a ratio: ``1.57x``."""
    return f"{number(value)}x"


def ratio_interval(estimate: Estimate, digits: int = 3) -> str:
    """Format a ratio with its interval: ``1.57x [1.52, 1.61]``."""
    return f"{number(estimate.median, digits)}x {_bounds(estimate, 1.0, digits)}"


def size(count: float) -> str:
    """Format a number of bytes with its unit: ``7.03 MiB``."""
    scale, unit = _unit(abs(count), BYTES)
    return f"{count:.0f} B" if unit == "B" else f"{number(count / scale)} {unit}"


def rate(per_second: float, unit: str) -> str:
    """Format a rate, whose unit is given: ``4.02 TB/s``, ``644 GFLOP/s``."""
    scale, prefix = _unit(abs(per_second), RATES)
    return f"{number(per_second / scale)} {prefix}{unit}"


def work(flops: float) -> str:
    """Format a number of floating-point operations: ``268 MFLOP``."""
    scale, prefix = _unit(abs(flops), RATES)
    return f"{number(flops / scale)} {prefix}FLOP"


def scientific(value: float) -> str:
    """Format an error with two significant digits: ``3.1e-04``."""
    return f"{value:.1e}" if math.isfinite(value) else "not finite"


def launches(count: int | None) -> str:
    """Format the number of launches of a call; ``varies`` if a compiler or a library decides it."""
    return "varies" if count is None else str(count)


def percent(factor: float) -> str:
    """Format a factor's distance from 1 in percent: ``2.3 %`` for 1.023."""
    return f"{number(100 * (factor - 1), 2)} %"


def plural(count: int, noun: str, many: str = "") -> str:
    """Format a count with its noun: ``1 round``, ``20 rounds``."""
    return f"{count} {noun if count == 1 else many or noun + 's'}"


def span(counts: Sequence[int]) -> str:
    """Format the range of several counts: ``7 to 20``, or ``20`` if they are all the same."""
    low, high = min(counts, default=0), max(counts, default=0)
    return str(low) if low == high else f"{low} to {high}"


def _bounds(estimate: Estimate, scale: float, digits: int = 3) -> str:
    decimals = _decimals(estimate.median / scale, digits)
    return f"[{estimate.low / scale:.{decimals}f}, {estimate.high / scale:.{decimals}f}]"


def _decimals(value: float, digits: int) -> int:
    if value == 0 or not math.isfinite(value):
        return 0
    return max(0, digits - 1 - math.floor(math.log10(abs(value))))


def _unit(value: float, units: tuple[tuple[float, str], ...]) -> tuple[float, str]:
    return next(((scale, unit) for scale, unit in units if value >= scale), units[-1])
