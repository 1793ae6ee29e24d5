"""Check the number, types, devices and shapes of a variant's results; ``choice.py`` does so for the first of each query."""

from __future__ import annotations

from typing import Any

import torch

from onelaunch.errors import VariantResultError
from onelaunch.operation import Call, Variant
from onelaunch.wording import listing


def check_results(variant: Variant, call: Call, results: Any) -> None:
    """Check the number, devices and shapes of the results of a variant for a checked call.

    Shapes are checked if the operation declares them (:meth:`onelaunch.operation.Operation.shapes`). The verification gate judges
    dtypes and values.

    Raises:
        VariantResultError: The results are not those of the operation. The message names the variant and what it must return.
    """
    operation, device = variant.operation, call.query().device
    names = operation.outputs if isinstance(operation.outputs, tuple) else None
    shapes = operation.shapes_of(call) if operation.shapes_of else None
    count = len(names) if names is not None else len(shapes) if shapes is not None else None
    wanted = "a tuple of its results" if count is None else f"a tuple of {count}"
    wanted += f" ({listing(names)})" if names else ""
    problem = None
    if not isinstance(results, tuple):
        problem = f"returned {type(results).__name__}; it must return {wanted}"
    elif count is not None and len(results) != count:
        problem = f"returned {len(results)} results; it must return {wanted}"
    else:
        for index, value in enumerate(results):
            name = names[index] if names else f"result {index}"
            problem = problem or _wrong_result(name, value, device, shapes[index] if shapes else None)
    if problem is not None:
        raise VariantResultError(operation.name, variant.name, problem=problem)


def _wrong_result(name: str, value: object, device: str, want: tuple[int, ...] | None) -> str | None:
    """Return what is wrong with one result, as a predicate that completes "the variant ...", or ``None``."""
    if value is not None and not isinstance(value, torch.Tensor):
        return f"returned {name} as {type(value).__name__}; it must be a torch.Tensor"
    if value is not None and str(value.device) != device:
        return f"returned {name} on {value.device}; it must be on {device}, as the call's tensors are"
    if want is None or (value is not None and tuple(value.shape) == tuple(want)):
        return None
    got = "as None" if value is None else f"with shape {list(value.shape)}"
    return f"returned {name} {got}; its shape must be {list(want)}"
