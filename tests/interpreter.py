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
    describe_types_once()
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


def describe_types_once() -> None:
    """Each operation makes a type of its result and a tensor of this type, which describe its shape anew: a seventh of all time.

    Types of one element and shape are described once, and so are their tensors; nothing changes what was described.
    """
    from triton import language as tl

    make_type, make_tensor = tl.block_type.__init__, tl.tensor.__init__
    types: dict[tuple[int, tuple[Any, ...]], tl.block_type] = {}  # by identity of the element, which the type keeps

    def described_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = id(element_ty), tuple([each.value if isinstance(each, tl.constexpr) else each for each in shape])
        if (known := types.get(key)) is None:
            if len(types) > 10_000:  # each launch has pointers of its own
                types.clear()
            make_type(self, element_ty, shape)
            self.described = {}
            types[key] = self
        else:
            self.__dict__.update(known.__dict__)

    def described_tensor(self: Any, handle: Any, kind: Any) -> None:
        known = kind.__dict__.get("described")
        if known:
            self.__dict__.update(known)
            self.handle, self.type = handle, kind
        else:
            make_tensor(self, handle, kind)
            if known is not None:
                known.update({name: value for name, value in self.__dict__.items() if name not in ("handle", "type")})

    tl.block_type.__init__ = described_type
    tl.tensor.__init__ = described_tensor


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
