"""Load plug-ins: modules of other packages that register operations or variants when they are imported.

An installed package announces a plug-in in the entry-point group :data:`GROUP`. Each entry is imported separately. If one fails,
its registrations are taken back, and one :class:`~onelaunch.errors.PluginWarning` names the entry and its distribution.
Everything else works as if that package were not installed. KeyboardInterrupt is passed on.
"""

from __future__ import annotations

import importlib.metadata
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

from onelaunch.errors import PluginWarning
from onelaunch.wording import in_a_line

GROUP = "onelaunch.plugins"
"""Entry-point group in which packages announce their plug-ins."""

UNKNOWN = "an unknown distribution"
"""Name shown for a package whose metadata does not give one."""


@dataclass(frozen=True)
class Plugin:
    """Announced plug-in, loaded or not."""

    name: str
    """Name of the entry, which its package chose."""
    module: str
    """Module that the entry names and that is imported."""
    distribution: str
    """Name and version of the package that announces it, or ``an unknown distribution``."""
    problem: str | None = None
    """Reason why it was not loaded, in one line; ``None`` when it was."""


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


def load_once(before: Callable[[], None], snapshot: Callable[[], Callable[[], None]]) -> tuple[Plugin, ...]:
    """Import every announced plug-in at the first call, and warn about each that fails.

    Args:
        before: Function called once if there is any entry. It registers onelaunch's own operations, so that no plug-in can take
            their names.
        snapshot: Function called before each entry. It returns a function that undoes all later registrations.

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


def _load(entry: importlib.metadata.EntryPoint, take_back: Callable[[], None]) -> Plugin:
    """Import one entry; if that fails, undo its registrations and warn."""
    name, module, distribution = entry.name, entry.value, _distribution(entry)
    try:
        entry.load()
    except KeyboardInterrupt:
        take_back()
        raise
    except BaseException as error:  # noqa: BLE001 - a plug-in is another package's code and may fail in any way
        take_back()
        return _left_out(name, module, distribution, error)
    return Plugin(name, module, distribution)


def _left_out(name: str, module: str, distribution: str, error: BaseException) -> Plugin:
    """Warn that a plug-in is left out, and return it with the reason."""
    problem = f"{type(error).__name__}: {in_a_line(error)}"
    warnings.warn(PluginWarning(name, module, distribution, problem=problem), stacklevel=2)
    return Plugin(name, module, distribution, problem)


def _announced() -> tuple[tuple[importlib.metadata.EntryPoint, ...], tuple[Plugin, ...]]:
    """Return the announced entries and no plug-in, or, if a package's metadata cannot be read, no entries and one failed plug-in.

    The failed plug-in stands for all entries.
    """
    try:
        return tuple(importlib.metadata.entry_points(group=GROUP)), ()
    except Exception as error:  # noqa: BLE001 - a malformed metadata file of any package raises here
        return (), (_left_out("all", f"the group {GROUP}", UNKNOWN, error),)


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
