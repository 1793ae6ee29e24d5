"""Report of what ``accelerate`` replaced, what it did not replace and why, and how calls have run since."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

from torch import nn

from onelaunch.integrations.forward import Forward

if TYPE_CHECKING:
    from typing_extensions import Self  # in typing from Python 3.11 on

_SHOWN = 3
"""Number of module names that a line of the report shows."""


class Replaced(NamedTuple):
    """Module whose forward was replaced."""

    name: str
    """Name of the module in the model; empty for the model itself."""
    module: nn.Module
    kind: str
    """Name of the module's class."""
    operation: str
    """Function of ``onelaunch.ops`` that runs it."""
    by: Forward
    """Object that has the new forward."""

    @property
    def layout(self) -> str:
        """How the weights of projections with the same input are multiplied in eager calls; empty if there are no projections."""
        return self.by.layout()

    @property
    def fallbacks(self) -> Counter[str]:
        """Number of calls that ran the original forward, by reason."""
        return Counter(self.by.fallbacks)


class Refused(NamedTuple):
    """Module that was not replaced."""

    name: str
    kind: str
    reason: str


class Report:
    """Result of :func:`onelaunch.accelerate`; ``print`` shows it.

    As a context manager it restores the model at the end of the block.

    Attributes:
        replaced: Modules whose forward this call replaced.
        already: Modules whose forward an earlier call had replaced. :meth:`undo` leaves them as they are.
        refused: Modules that were not replaced, with the reason.
    """

    def __init__(self, replaced: Iterable[Replaced], already: Iterable[Replaced], refused: Iterable[Refused]) -> None:
        self.replaced, self.already, self.refused = tuple(replaced), tuple(already), tuple(refused)

    def undo(self) -> None:
        """Restore the forward of each module that this call replaced, and give each parameter a storage of its own.

        The parameters keep the values that they have now. Further calls do nothing.
        """
        for each in self.replaced:
            each.by.restore()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.undo()

    @property
    def fallbacks(self) -> Counter[str]:
        """Number of calls of all modules that ran the original forward, by reason.

        Calls in a graph of ``torch.compile`` are not counted.
        """
        return sum([each.fallbacks for each in (*self.replaced, *self.already)], Counter())

    def __str__(self) -> str:
        lines = [*self._about(self.replaced, "Replaced"), *self._about(self.already, "Replaced by an earlier call")]
        lines += self._restored()
        if not lines:
            from onelaunch.integrations.known import KNOWN

            known = ", ".join(name.rsplit(".", 1)[-1] for name in KNOWN)
            lines = [f"Replaced nothing. Known classes: {known}."]
        if self.refused:
            lines.append(f"Not replaced, {_modules(len(self.refused))}:")
            groups: dict[tuple[str, str], list[str]] = {}
            for each in self.refused:
                groups.setdefault((each.kind, each.reason), []).append(each.name)
            lines += [f"  {kind} ({_names(names)}): {reason}" for (kind, reason), names in groups.items()]
        if self.replaced or self.already:
            counts = self.fallbacks
            lines.append(f"Calls that ran the original forward: {counts.total() if counts else 'none'}")
            lines += [f"  {count} call{'s' * (count != 1)}: {reason}" for reason, count in counts.most_common()]
        return "\n".join(lines)

    @staticmethod
    def _about(found: tuple[Replaced, ...], said: str) -> list[str]:
        """Return lines about modules that are still replaced, grouped by class and by how their weights are multiplied."""
        found = tuple(each for each in found if each.by.runs)
        if not found:
            return []
        groups: dict[tuple[str, str, str], list[str]] = {}
        for each in found:
            groups.setdefault((each.kind, each.operation, each.layout), []).append(each.name)
        return [
            f"{said}, {_modules(len(found))}:",
            *[
                f"  {kind} by onelaunch.ops.{operation} ({_names(names)})"
                + (f"; projections are multiplied {layout}" if layout else ", in calls that were measured faster")
                for (kind, operation, layout), names in groups.items()
            ],
        ]

    def _restored(self) -> list[str]:
        """Return lines about modules that were replaced and no longer are, grouped by class."""
        groups: dict[str, list[str]] = {}
        for each in (*self.replaced, *self.already):
            if not each.by.runs:
                groups.setdefault(each.kind, []).append(each.name)
        if not groups:
            return []
        count = sum(map(len, groups.values()))
        return [
            f"No longer replaced, {_modules(count)}:",
            *[f"  {kind} ({_names(names)})" for kind, names in groups.items()],
        ]


def _modules(count: int) -> str:
    return f"{count} module{'s' * (count != 1)}"


def _names(names: list[str]) -> str:
    """Return the first names of a list, and how many more there are."""
    shown = ", ".join(name or "the model itself" for name in names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"
