"""Stand-in for the packages of fla whose functions ``accelerate()`` hooks: its registry of backends, and functions that say so.

fla's kernels need a GPU. The functions have fla's signatures and return ``"fla"`` with their own name.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types


class BaseBackend:
    """Base class of backends, with what ours and the registry use of fla's."""

    backend_type, env_var, priority = "base", None, 5
    implementation = verifier = None

    def is_enabled(self):
        return True


REGISTRIES = {}
"""Registered backends by type, for each function that looks for them."""


def dispatch(function):
    """Let a function look for registered backends."""
    backends = REGISTRIES[function] = {}

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        for backend in sorted(backends.values(), key=lambda each: each.priority):
            if backend.is_enabled() and backend.verifier(*args, **kwargs)[0]:
                return backend.implementation(*args, **kwargs)
        return function(*args, **kwargs)

    return wrapper


def register(entry_point, *, backend, verifier):
    """Register a function for one that looks for backends, as ``fla.backends.register`` does."""

    def decorate(implementation):
        made = backend()
        made.implementation, made.verifier = implementation, verifier
        REGISTRIES[inspect.unwrap(entry_point)][made.backend_type] = made
        return implementation

    return decorate


def chunk_gla(q, k, v, g, scale=None, initial_state=None, output_final_state=False, state_v_first=False, cu_seqlens=None,
              cu_seqlens_cpu=None):  # fmt: skip
    return "fla", "chunk_gla"


def fused_recurrent_gla(q, k, v, gk=None, gv=None, scale=None, initial_state=None, output_final_state=False, reverse=False,
                        state_v_first=False, cu_seqlens=None, **kwargs):  # fmt: skip
    return "fla", "fused_recurrent_gla"


def chunk_simple_gla(q, k, v, g=None, g_gamma=None, scale=None, initial_state=None, output_final_state=False,
                     state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None, **kwargs):  # fmt: skip
    return "fla", "chunk_simple_gla"


def fused_recurrent_simple_gla(q, k, v, g=None, g_gamma=None, scale=None, initial_state=None, output_final_state=False,
                               reverse=False, state_v_first=False, cu_seqlens=None, **kwargs):  # fmt: skip
    return "fla", "fused_recurrent_simple_gla"


def fused_chunk_simple_gla(q, k, v, g=None, g_gamma=None, scale=None, initial_state=None, output_final_state=False,
                           cu_seqlens=None):  # fmt: skip
    return "fla", "fused_chunk_simple_gla"


def chunk_hgrn(x, g, initial_state=None, output_final_state=False):
    return "fla", "chunk_hgrn"


def fused_recurrent_hgrn(x, g, initial_state=None, output_final_state=False, cu_seqlens=None):
    return "fla", "fused_recurrent_hgrn"


PLACES = {
    "fla.ops.gla": {"chunk": chunk_gla, "fused_recurrent": fused_recurrent_gla},
    "fla.ops.simple_gla": {
        "chunk": chunk_simple_gla,
        "fused_recurrent": fused_recurrent_simple_gla,
        "fused_chunk": fused_chunk_simple_gla,
    },
    "fla.ops.hgrn": {"chunk": chunk_hgrn, "fused_recurrent": fused_recurrent_hgrn},
}
"""Functions by the module that defines each, by the package that exports it."""
DISPATCHED = (fused_recurrent_simple_gla, fused_chunk_simple_gla)


def install(fla, monkeypatch, *, dispatching=True, mark=lambda function: function):
    """Put the packages into ``sys.modules``, and return the functions by name.

    Args:
        fla: Stand-in for the top package.
        monkeypatch: Pytest's fixture.
        dispatching: Flag that functions look for backends (``FLA_DISABLE_BACKEND_DISPATCH`` is not set).
        mark: Decorator of the functions that are rebound.
    """

    def module(name, **names):
        made = types.ModuleType(name)
        vars(made).update(names)
        monkeypatch.setitem(sys.modules, name, made)

    monkeypatch.setitem(sys.modules, "fla", fla)
    module("fla.backends", BaseBackend=BaseBackend, register=register)
    functions = {}
    for package, files in PLACES.items():
        for file, function in files.items():
            copied = types.FunctionType(
                function.__code__, globals(), function.__name__, function.__defaults__, function.__closure__
            )
            copied.__module__ = f"{package}.{file}"
            made = functions[function.__name__] = (
                (dispatch(copied) if dispatching else copied) if function in DISPATCHED else mark(copied)
            )
            module(copied.__module__, **{function.__name__: made})
        module(package, **{each.__name__: functions[each.__name__] for each in files.values()})
    return functions
