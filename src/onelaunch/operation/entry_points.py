"""Plug-ins: modules of other packages that register operations or variants when they are imported.

An installed package announces one in the entry-point group :data:`GROUP`. Each entry is imported for itself: one that fails is
reported once, by a :class:`~onelaunch.errors.PluginWarning` that names the entry and its distribution, what it had registered
until then is taken back, and everything else works as if it were not installed. Ctrl-C passes.
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
"""The entry-point group that packages announce their plug-ins in."""


UNKNOWN = "an unknown distribution"


@dataclass(frozen=True)
class Plugin:
    """One announced plug-in, loaded or not."""

    name: str
    """The entry's name, as its package chose it."""
    module: str
    """The module that the entry names, and that is imported."""
    distribution: str
    """Name and version of the package that announces it, or ``an unknown distribution``."""
    problem: str | None = None
    """Reason why it was not loaded, in one line; ``None`` when it was."""


@dataclass
class _State:
    """Progress of loading in this process."""

    lock: threading.RLock = field(default_factory=threading.RLock)
    """Lock held while plug-ins are loaded: a second thread waits for them."""
    loading: bool = False
    loaded: tuple[Plugin, ...] | None = None


_STATE = _State()


def load_once(before: Callable[[], None], snapshot: Callable[[], Callable[[], None]]) -> tuple[Plugin, ...]:
    """Import every announced plug-in at the first call, and warn about each that fails.

    Args:
        before: Called once if there is any entry, so that the names of onelaunch's own operations are taken first.
        snapshot: Called before each entry; returns the function that takes back what was registered since.

    Returns:
        All entries in the order of their announcement; none to a call that a plug-in makes while it is being loaded.
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
    """Let the next call of :func:`load_once` look for plug-ins again; for tests."""
    _STATE.loaded = None


def _load(entry: importlib.metadata.EntryPoint, take_back: Callable[[], None]) -> Plugin:
    name, module, distribution = entry.name, entry.value, _distribution(entry)
    try:
        entry.load()
    except KeyboardInterrupt:
        take_back()
        raise
    except BaseException as error:  # noqa: BLE001 - a plug-in is somebody else's code and may fail in any way
        take_back()
        return _left_out(name, module, distribution, error)
    return Plugin(name, module, distribution)


def _left_out(name: str, module: str, distribution: str, error: BaseException) -> Plugin:
    """Warn that a plug-in is left out, and return it with the reason."""
    problem = f"{type(error).__name__}: {in_a_line(error)}"
    warnings.warn(PluginWarning(name, module, distribution, problem=problem), stacklevel=2)
    return Plugin(name, module, distribution, problem)


def _announced() -> tuple[tuple[importlib.metadata.EntryPoint, ...], tuple[Plugin, ...]]:
    """Return the announced entries; or none, and what stands for all of them, where a package's metadata cannot be read."""
    try:
        return tuple(importlib.metadata.entry_points(group=GROUP)), ()
    except Exception as error:  # noqa: BLE001 - one malformed file of some package
        return (), (_left_out("all", f"the group {GROUP}", UNKNOWN, error),)


def _distribution(entry: importlib.metadata.EntryPoint) -> str:
    found = getattr(entry, "dist", None)
    return _named(found) if found is not None else UNKNOWN


def _named(found: importlib.metadata.Distribution) -> str:
    """Return name and version of a distribution, as far as its metadata holds them."""
    try:
        name, version = found.name, found.version
    except Exception:  # noqa: BLE001 - metadata that is missing or broken
        return UNKNOWN
    return f"{name} {version or 'of an unknown version'}" if name else UNKNOWN
