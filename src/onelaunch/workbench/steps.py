"""Functions of a run that use the device, gathered so that tests can replace them.

``running.py`` calls them; ``run_study`` and a job for another process carry them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from onelaunch.device import hardware, peaks
from onelaunch.workbench.measure.ahead import Made, compile_ahead
from onelaunch.workbench.measure.count import count_all
from onelaunch.workbench.measure.outcomes import Measurements
from onelaunch.workbench.measure.timing import measure
from onelaunch.workbench.result import Beside, ProbeReport, Traffic
from onelaunch.workbench.verify import run_probes


@dataclass(frozen=True)
class Steps:
    """Functions that use the device, as fields so that tests can replace them."""

    ceilings: Callable[[str], hardware.Ceilings] = peaks.ceilings
    """Function that returns the peaks of a device, from the cache or measured."""
    remeasure: Callable[[str, hardware.Ceilings], hardware.Ceilings] = peaks.remeasure
    """Function that measures the peaks again; it returns its argument itself if no new peak is higher."""
    probe: Callable[..., ProbeReport] = run_probes
    measure: Callable[..., Measurements] = measure
    count: Callable[..., Sequence[Traffic]] = count_all
    counters: Mapping[str, Callable[..., Sequence[int | Beside | str]]] = field(default_factory=dict)
    """Functions by the kept name of a measure that count in place of the measure's own ``count``; none but in tests."""
    compile: Callable[..., Made] = compile_ahead
