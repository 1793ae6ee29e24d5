"""Put our functions in the place of fla's: a registered backend where fla looks for one, and rebound names elsewhere.

``walk.py`` calls :func:`accelerate_functions` for ``accelerate()`` without a model. ``fla_calls.py`` decides each call.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import threading
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.compiler import is_compiling

from onelaunch import dispatch
from onelaunch.errors import ArgumentError
from onelaunch.integrations.fla_calls import TARGETS, Hook, Results, Target
from onelaunch.integrations.known import FLA
from onelaunch.operation.requirements import hook as hook_package

if TYPE_CHECKING:
    from typing_extensions import Self  # in typing from Python 3.11 on

_PRIORITY = 2
"""Place among fla's backends; lower ones come first. Those of fla for NVIDIA GPUs have 3 to 5, that for Ascend has 0."""

_LOCK = threading.Lock()
_INSTALLED: list[Installed] = []
"""Hooks that are in fla now."""


class Installed:
    """Hook that is in fla, and how to take it out."""

    def __init__(self, hook: Hook) -> None:
        self.hook = hook
        self.original: Callable[..., Results] | None = None
        """fla's function, if names were rebound."""
        self.wrapper: Callable[..., Results] | None = None
        """Function that the names were bound to."""

    def remove(self) -> None:
        """Let every call go to fla's function, and bind every name that holds the wrapper to fla's function again.

        fla has no way to take a backend out: ours stays registered, is not enabled any more, and a later one takes its place.
        """
        self.hook.active = False
        if self.wrapper is not None and self.original is not None:
            _rebind(self.wrapper, self.original)


class FunctionReport:
    """Result of :func:`onelaunch.accelerate` without a model; ``print`` shows it.

    As a context manager it takes the hooks out at the end of the block.

    Attributes:
        hooked: Names of fla's functions that this call hooked.
        already: Names of functions that an earlier call had hooked. :meth:`undo` leaves them as they are.
        refused: Functions that were not hooked, and why.
    """

    def __init__(self, hooked: Iterable[Installed], already: Iterable[Installed], refused: dict[str, str]) -> None:
        self._hooked, self._already = tuple(hooked), tuple(already)
        self.hooked = tuple([each.hook.target.name for each in self._hooked])
        self.already = tuple([each.hook.target.name for each in self._already])
        self.refused = refused

    def undo(self) -> None:
        """Take out the hooks that this call put into fla. Further calls do nothing."""
        with _LOCK:
            _remove([each for each in self._hooked if each in _INSTALLED])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: types.TracebackType | None
    ) -> None:
        self.undo()

    @property
    def calls(self) -> Counter[str]:
        """Number of calls that our functions ran, by the name of fla's function."""
        return Counter({each.target.name: each.calls for each in self._hooks() if each.calls})

    @property
    def fallbacks(self) -> Counter[tuple[str, str]]:
        """Number of calls that fla's own functions ran, by the name of the function and the reason."""
        return Counter({(each.target.name, reason): count for each in self._hooks() for reason, count in each.fallbacks.items()})

    def _hooks(self) -> Iterator[Hook]:
        return (each.hook for each in (*self._hooked, *self._already))

    def __str__(self) -> str:
        lines = []
        for said, found in (("Hooked", self._hooked), ("Hooked by an earlier call", self._already)):
            ways = {True: "as a backend that fla looks for", False: "by rebinding its name"}
            for dispatched, way in ways.items():
                names = [each.hook.target.name for each in found if each.hook.target.dispatched is dispatched]
                lines += [f"{said} {way}: {', '.join(names)}"] if names else []
        lines += [f"Not hooked: {name}: {reason}" for name, reason in self.refused.items()]
        calls, fallbacks = self.calls, self.fallbacks
        lines.append(f"Calls that onelaunch ran: {calls.total() if calls else 'none'}")
        lines += [f"  {_calls(count)} of {name}" for name, count in calls.most_common()]
        lines.append(f"Calls that fla ran: {fallbacks.total() if fallbacks else 'none'}")
        lines += [f"  {_calls(count)} of {name}: {reason}" for (name, reason), count in fallbacks.most_common()]
        return "\n".join(lines)


def _calls(count: int) -> str:
    return f"{count} call{'s' * (count != 1)}"


def accelerate_functions() -> FunctionReport:
    """Put hooks into all functions of fla in ``TARGETS``, or into none if there is an error.

    Raises:
        ArgumentError: fla is not installed, or its release is not supported.
    """
    with _LOCK:
        functions = _functions()
        if (reason := FLA.refusal()) is not None:
            raise ArgumentError(f"accelerate() cannot hook the functions of fla: {reason}.")
        already = list(_INSTALLED)
        names = {each.hook.target.name for each in already}
        done: list[Installed] = []
        refused: dict[str, str] = {}
        try:
            for target in TARGETS:
                if target.name in names:
                    continue
                if (problem := _refusal(target, functions[target.name])) is not None:
                    refused[target.name] = problem
                    continue
                done.append(Installed(Hook(target)))
                _INSTALLED.append(done[-1])
                (_register if target.dispatched else _replace)(done[-1], functions[target.name])
            hook_package("fla", "calls functions of fla that onelaunch.accelerate() has hooked; undo that first")
            dispatch.forget()
        except BaseException:
            _remove(done)
            raise
        return FunctionReport(done, already, refused)


def _remove(found: list[Installed]) -> None:
    """Take hooks out of fla. Without any, fla's variants run again."""
    for each in found:
        each.remove()
        _INSTALLED.remove(each)
    if found and not _INSTALLED:
        hook_package("fla", None)
        dispatch.forget()


def _functions() -> dict[str, Any]:
    """Return fla's functions by name, as its packages export them; import fla where that has not been done."""
    try:
        importlib.import_module("fla.backends")
        return {each.name: getattr(importlib.import_module(each.package), each.name, None) for each in TARGETS}
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "fla":
            raise
        said = "is not installed" if error.name == "fla" else f"has no module {error.name}"
        raise ArgumentError(
            f"accelerate() without a model hooks the functions of fla, which {said}. Install flash-linear-attention 0.6, or give "
            "the model whose layers are to be replaced."
        ) from error


def _refusal(target: Target, function: Any) -> str | None:
    """Return why a function of fla is not hooked, or ``None``."""
    if not isinstance(function, types.FunctionType):
        return f"{target.package} has no such function"
    if function.__module__ != f"{target.package}.{target.file}":
        return f"it was replaced by {function.__module__}"
    if target.dispatched and inspect.unwrap(function) is function:
        return "fla looks for no backends (FLA_DISABLE_BACKEND_DISPATCH=1)"
    return None


def _register(installed: Installed, function: Any) -> None:
    """Register a backend that runs our function where the hook says so."""
    backends = importlib.import_module("fla.backends")
    hook = installed.hook

    class Backend(backends.BaseBackend):
        """Backend of onelaunch for one function. ``FLA_ONELAUNCH=0`` turns it off."""

        backend_type = "onelaunch"
        env_var = "FLA_ONELAUNCH"
        priority = _PRIORITY

        def is_enabled(self) -> bool:
            return hook.active and super().is_enabled()

    def verify(*args: Any, **kwargs: Any) -> tuple[bool, str | None]:
        reason = hook.why_not(args, kwargs)
        return reason is None, reason

    backends.register(function, backend=Backend, verifier=verify)(hook.target.ours)


def _replace(installed: Installed, function: Callable[..., Results]) -> None:
    """Bind every name in a module that holds fla's function to a function that runs ours where the hook says so."""
    installed.original, installed.wrapper = function, _wrapped(installed.hook, function)
    _rebind(function, installed.wrapper)


def _wrapped(hook: Hook, original: Callable[..., Results]) -> Callable[..., Results]:
    """Return a function that runs fla's function or ours.

    Code that ``torch.compile`` traces leaves the graph where fla's function does, and decides then. A function of fla that stays
    in the graph is left to fla, since sizes may be symbolic there.
    """
    ours = hook.target.ours

    def run(*args: Any, **kwargs: Any) -> Results:
        if hook.active and hook.why_not(args, kwargs) is None:
            return ours(*args, **kwargs)
        return original(*args, **kwargs)

    leaves_graph = getattr(original, "_torchdynamo_disable", False)
    traced: Callable[..., Results] = torch.compiler.disable(run) if leaves_graph else original

    @functools.wraps(original, updated=())  # Dynamo's marks in its dictionary are not ours
    def wrapper(*args: Any, **kwargs: Any) -> Results:
        return traced(*args, **kwargs) if is_compiling() else run(*args, **kwargs)

    return wrapper


def _rebind(old: Callable[..., Results], new: Callable[..., Results]) -> None:
    """Bind each name in a loaded module that holds one function to another."""
    for module in list(sys.modules.values()):
        if isinstance(module, types.ModuleType):
            names = [name for name, value in list(vars(module).items()) if value is old]
            for name in names:
                vars(module)[name] = new
