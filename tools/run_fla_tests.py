"""Run fla's own tests of gated linear attention and HGRN with the functions of ``onelaunch.ops`` in the place of fla's.

    git clone https://github.com/fla-org/flash-linear-attention
    python -m tools.run_fla_tests flash-linear-attention -n 4

fla is the package flash-linear-attention. The tests come from a checkout of it, ideally of the commit of the installed version,
and compare with fla's own references. In each of their modules the name of a function of fla is bound to ours, as
``onelaunch.ops`` has it. A call with arguments that ours does not take, such as ``chunk_size``, goes to fla's function, and is
counted apart. Arguments after the folder go to pytest. The exit code is pytest's; the last line says how many calls were ours. On
a CPU fla's tests cannot run.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

OURS = {
    "chunk_gla": "chunk_gla",
    "fused_recurrent_gla": "fused_recurrent_gla",
    "chunk_simple_gla": "chunk_simple_gla",
    "fused_chunk_simple_gla": "chunk_simple_gla",
    "fused_recurrent_simple_gla": "fused_recurrent_simple_gla",
    "chunk_hgrn": "chunk_hgrn",
    "fused_recurrent_hgrn": "fused_recurrent_hgrn",
}
"""Names of onelaunch's functions by those of fla's."""

FILES = ("test_gla.py", "test_simple_gla.py", "test_hgrn.py")
"""Files of fla's folder ``tests/ops``."""

PROPERTY = "calls of onelaunch and of fla"
"""Property of a test's report that holds both numbers; pytest-xdist passes it from its workers to the main process."""

_REPLACED = "_replaced_by_onelaunch"
"""Attribute that marks a replacement, so that it is not replaced again."""

_calls = [0, 0]
"""Calls of our functions, and of fla's in their place, in this process."""


def replacement(ours: Callable[..., Any], theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls ours where it takes the arguments, and else fla's, and counts both."""
    signature = inspect.signature(ours)

    @functools.wraps(theirs)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            signature.bind(*args, **kwargs)
        except TypeError:
            _calls[1] += 1
            return theirs(*args, **kwargs)
        _calls[0] += 1
        return ours(*args, **kwargs)

    setattr(call, _REPLACED, True)
    return call


def replace(module: ModuleType) -> None:
    """Bind the names of fla's functions in a module of tests to replacements, once."""
    from onelaunch import ops

    for name, own in OURS.items():
        theirs = vars(module).get(name)
        if theirs is not None and not hasattr(theirs, _REPLACED):
            setattr(module, name, replacement(getattr(ops, own), theirs))


# Hooks of pytest, which loads this module as a plugin in each of its processes.


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Replace fla's functions in the modules of the tests."""
    for module in {id(each.module): each.module for each in items if hasattr(each, "module")}.values():  # pyrefly: ignore
        replace(module)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Any:
    """Add the numbers of calls that a test made to its report."""
    before = tuple(_calls)
    yield
    item.user_properties.append((PROPERTY, [now - then for now, then in zip(_calls, before, strict=True)]))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the numbers of calls in all tests."""
    made = [0, 0]
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", "") == "call":
                for name, (ours, theirs) in report.user_properties:
                    if name == PROPERTY:
                        made[0] += ours
                        made[1] += theirs
    terminalreporter.write_line(f"{made[0]} calls were onelaunch's, {made[1]} with arguments that it does not take were fla's.")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tests of a checkout, and return pytest's exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    folder = Path(given[0], "tests", "ops") if given else None
    if folder is None or not folder.is_dir():
        sys.stderr.write(f"{folder or 'No folder was given'}: name a checkout of flash-linear-attention.\n")
        return 2
    files = [str(folder / name) for name in FILES]
    plugin = ("-p", "tools.run_fla_tests", "-p", "no:cacheprovider", "--override-ini", "addopts=")
    return int(pytest.main([*files, f"--rootdir={given[0]}", f"--confcutdir={given[0]}", *plugin, *given[1:]]))


if __name__ == "__main__":
    sys.exit(main())
