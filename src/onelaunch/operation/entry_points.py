"""Load plug-ins: modules of other packages that register operations or variants when they are imported.

An installed package announces a plug-in in the entry-point group :data:`_GROUP`. Each entry is imported separately. If one fails,
its registrations are taken back, and one :class:`~onelaunch.errors.PluginWarning` names the entry and its distribution. So it is
with an entry that replaces an operation, a variant or a function of one that was registered before. Everything else works as if
that package were not installed. KeyboardInterrupt is passed on. The registry calls :func:`load_once` when operations are first
looked up. ``onelaunch doctor`` lists each :class:`Plugin`, and the provenance of results names the package of one.
"""

from __future__ import annotations

import importlib.metadata
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from onelaunch.errors import PluginWarning
from onelaunch.wording import in_a_line

_GROUP = "onelaunch.plugins"
"""Entry-point group in which packages announce their plug-ins."""

UNKNOWN = "an unknown distribution"
"""Name shown for a package whose metadata does not give one."""


@dataclass(frozen=True)
class Plugin:
    """Announced plug-in, loaded or not."""

    name: str
    """Name of the entry, which its package chose."""
    module: str
    """Module that the entry names and that is imported, with ``:attribute`` behind it if the entry names one."""
    distribution: str
    """Name and version of the package that announces it, or ``an unknown distribution``."""
    problem: str | None = None
    """Reason why it was not loaded, in one line; ``None`` when it was."""
    adds: tuple[str, ...] = ()
    """Operations and variants that it registered, as ``operation`` or ``operation.variant``."""


class Snapshot(Protocol):
    """Protocol of the state of the registry before a plug-in is loaded."""

    def restore(self) -> None:
        """Take back all later registrations and replacements."""

    def added(self) -> tuple[str, ...]:
        """Return the names of operations and variants registered since."""
        ...

    def problem(self) -> str | None:
        """Return a sentence if something has been replaced since, else ``None``."""


@dataclass
class _State:
    """State of loading in this process."""

    lock: threading.RLock = field(default_factory=threading.RLock)
    """Lock held while plug-ins are loaded, so that a second thread waits for them."""
    loading: bool = False
    """Flag that loading is in progress in this thread, as when a plug-in itself asks for the registry."""
    loaded: tuple[Plugin, ...] | None = None
    """All plug-ins once they are loaded, else ``None``."""


_STATE = _State()


def load_once(before: Callable[[], None], snapshot: Callable[[], Snapshot]) -> tuple[Plugin, ...]:
    """Import every announced plug-in at the first call, and warn about each that fails.

    Args:
        before: Function called once if there is any entry. It registers onelaunch's own operations, so that no plug-in can take
            their names.
        snapshot: Function called before each entry. It returns the state that all later registrations are compared with.

    Returns:
        All entries in the order of their announcement, or none for a call that a plug-in makes while it is loaded.
    """
    if _STATE.loaded is not None:
        return _STATE.loaded
    with _STATE.lock:
        if _STATE.loaded is None and not _STATE.loading:
            _STATE.loading = True
            try:
                entries, unreadable = _announced()
                if entries:
                    before()
                _STATE.loaded = (*unreadable, *(_load(entry, snapshot()) for entry in entries))
            finally:
                _STATE.loading = False
        return _STATE.loaded or ()


def forget() -> None:
    """Make the next call of :func:`load_once` look for plug-ins again. Only tests use it."""
    _STATE.loaded = None


def _load(entry: importlib.metadata.EntryPoint, before: Snapshot) -> Plugin:
    """Import one entry; if that fails, or if it replaces what others registered, undo its registrations and warn."""
    name, module, distribution = entry.name, entry.value, _distribution(entry)
    try:
        entry.load()
    except KeyboardInterrupt:
        before.restore()
        raise
    except BaseException as error:  # noqa: BLE001 - a plug-in is another package's code and may fail in any way
        before.restore()
        return _left_out(name, module, distribution, f"{type(error).__name__}: {in_a_line(error)}")
    if (problem := before.problem()) is not None:
        before.restore()
        return _left_out(name, module, distribution, problem, raised=False)
    return Plugin(name, module, distribution, adds=before.added())


def _left_out(name: str, module: str, distribution: str, problem: str, *, raised: bool = True) -> Plugin:
    """Warn that a plug-in is left out, and return it with the reason."""
    warnings.warn(PluginWarning(name, module, distribution, problem=problem, raised=raised), stacklevel=2)
    return Plugin(name, module, distribution, problem)


def _announced() -> tuple[tuple[importlib.metadata.EntryPoint, ...], tuple[Plugin, ...]]:
    """Return the announced entries and no plug-in, or, if a package's metadata cannot be read, no entries and one failed plug-in.

    The failed plug-in stands for all entries.
    """
    try:
        return tuple(importlib.metadata.entry_points(group=_GROUP)), ()
    except Exception as error:  # noqa: BLE001 - a malformed metadata file of any package raises here
        return (), (_left_out("all", f"the group {_GROUP}", UNKNOWN, f"{type(error).__name__}: {in_a_line(error)}"),)


def _distribution(entry: importlib.metadata.EntryPoint) -> str:
    """Return the name and version of an entry's distribution."""
    found = getattr(entry, "dist", None)
    return _named(found) if found is not None else UNKNOWN


def _named(found: importlib.metadata.Distribution) -> str:
    """Return the name and version of a distribution, as far as its metadata gives them."""
    try:
        name, version = found.name, found.version
    except Exception:  # noqa: BLE001 - metadata that is missing or broken
        return UNKNOWN
    return f"{name} {version or 'of an unknown version'}" if name else UNKNOWN
