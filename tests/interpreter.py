"""Triton's interpreter without what it does again and again, or for nothing: the same bits in a third of the time.

Each function takes one thing away by replacing a part of ``triton.runtime.interpreter`` that 3.6 and 3.7 both have. Should
a later version not have it, that fails at once; the function may go if that version needs it no longer.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np


def spare_repeated_work() -> None:
    """For this process: to be called once, before the first launch."""
    prepare_the_language_once_a_launch()
    check_no_overflow_that_nobody_asks_for()
    look_up_types_once()
    scan_slab_by_slab()


def prepare_the_language_once_a_launch() -> None:
    """Every call of a jitted function in a kernel, ``tl.cdiv`` among them, prepares Triton's language again: half of all time.

    To prepare it is to replace the members of ``triton.language`` and ``triton.language.core``, whichever of them the function's
    module sees, by ones that run here. They stay until the launch ends, so one call for each module does for all.
    """
    from triton.runtime import interpreter

    prepare, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    prepared: set[int] = set()

    def prepare_once(function: Any) -> Any:
        """What was replaced; ``None`` where it was before. Only the launch itself asks, and its call is the first."""
        module = id(function.__globals__)
        if module in prepared:
            return None
        prepared.add(module)
        return prepare(function)

    def launch_afresh(self: Any, *arguments: Any, **named: Any) -> Any:
        prepared.clear()
        return launch(self, *arguments, **named)

    interpreter._patch_lang = prepare_once
    interpreter.GridExecutor.__call__ = launch_afresh


def check_no_overflow_that_nobody_asks_for() -> None:
    """Sums, differences and products of integers are computed again, in 64 bits, for an assertion that is then dropped.

    ``TritonSemantic.device_assert`` drops it: the interpreter's ``debug`` is off, and nothing turns it on.
    """
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def look_up_types_once() -> None:
    """NumPy's type for a type of Triton is looked up in a table that is built for each look-up."""
    from triton.runtime import interpreter

    build_and_look_up = interpreter._get_np_dtype
    remembered = functools.cache(build_and_look_up)

    def look_up(type_: Any) -> np.dtype:
        element = type_.scalar
        return build_and_look_up(element) if element.is_ptr() else remembered(element)  # a pointer's needs no table

    interpreter._get_np_dtype = look_up


def scan_slab_by_slab() -> None:
    """A scan calls what it combines by element for element; it is elementwise, so all elements of one step go at once."""
    from triton.runtime import interpreter

    def scan(self: Any, given: tuple[Any, ...]) -> list[Any]:
        types = [each.dtype for each in given]
        steps = [np.moveaxis(each.handle.data, self.axis, 0) for each in given]
        scanned = [values.copy() for values in steps]
        for index in range(1, len(steps[0])):
            before, now = (
                [self.to_tensor(values[at], dtype) for values, dtype in zip(source, types, strict=True)]
                for source, at in ((scanned, index - 1), (steps, index))
            )
            combined = self.combine_fn.fn(*before, *now)
            for values, result in zip(scanned, combined if isinstance(combined, tuple) else (combined,), strict=True):
                values[index] = result.handle.data.reshape(values[index].shape)
        return [self.to_tensor(np.moveaxis(values, 0, self.axis), dtype) for values, dtype in zip(scanned, types, strict=True)]

    interpreter.ScanOps.generic_scan = scan
