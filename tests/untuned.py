"""Let Triton's autotuners launch the first configuration that fits, in tests of results and in processes that tests start.

A training step of fla's GLA has about 350 configurations, which its autotuners compile and time one after the other, for minutes.
The results of all configurations are alike, so tests of results need one. :func:`untuned` is for the process of a test, and
:func:`interpreter` for those that it starts by ``sys.executable -m MODULE``.

    python tests/untuned.py -m MODULE [ARGUMENT ...]
"""

from __future__ import annotations

import contextlib
import runpy
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def untuned() -> Iterator[None]:
    """Let autotuners launch their first configuration that fits; they compile no other one, and store no choice."""
    from triton.runtime.autotuner import Autotuner

    before = Autotuner.run
    Autotuner.run = launch_first
    try:
        yield
    finally:
        Autotuner.run = before


def launch_first(tuner: Any, *args: Any, **kwargs: Any) -> Any:
    """Launch the first configuration of a tuner that fits on the device, in place of Triton's ``Autotuner.run``."""
    from triton.compiler.errors import CompileTimeAssertionFailure
    from triton.runtime.autotuner import OutOfResources, PTXASError

    tuner.nargs = dict(zip(tuner.arg_names, args, strict=False))
    problem: Exception = AssertionError("an autotuner has no configuration")
    for config in tuner.prune_configs(kwargs):
        chosen = config.all_kwargs()
        if config.pre_hook is not None:
            config.pre_hook({**tuner.nargs, **kwargs, **chosen})
        try:
            return tuner.fn.run(*args, **kwargs, **chosen)
        except (OutOfResources, PTXASError, CompileTimeAssertionFailure) as error:  # as Triton excludes configurations
            problem = error
    raise problem


def interpreter(folder: Path) -> str:
    """Write a command into a folder that stands for ``sys.executable`` and lets autotuners be, and return its path."""
    path = folder / "python-untuned"
    path.write_text(f'#!/bin/sh\nexec {shlex.join([sys.executable, __file__])} "$@"\n', encoding="utf-8")
    path.chmod(0o755)
    return str(path)


if __name__ == "__main__":
    _, module, *arguments = sys.argv[1:]
    sys.path[0] = ""  # as for python -m; it is the folder of this file
    sys.argv = [module, *arguments]
    with untuned():
        runpy.run_module(module, run_name="__main__", alter_sys=True)
