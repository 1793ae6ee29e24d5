"""Errors that operations state for float32 results of calls whose inputs have 16 bits, and tolerances of other projects' tests.

A float32 result is often a sum of products of 16-bit numbers. A kernel that computes these products by matrix instructions rounds
decayed keys, gradients or states to 16 bits first. PyTorch's form computes in float32 throughout, so that its error says nothing
about what such a sum can be. The verification gate therefore takes the larger of twice PyTorch's error and the stated one.
Contracts state such errors by :data:`SUM_OF_PRODUCTS`, which ``definition.py`` checks by :func:`checked_errors`, and peers from
fla state their tolerance by :data:`FLA_TESTS`. ``verify/reference.py`` of the workbench asks :func:`stated_error`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from onelaunch.errors import ArgumentError

StatedErrors = Mapping[str, Mapping[torch.dtype, float]]
"""Norm-wise errors by the name of a result or gradient (``final_state``, ``grad g``), then by the dtype of the call's inputs."""

SUM_OF_PRODUCTS: Mapping[torch.dtype, float] = MappingProxyType({torch.bfloat16: 3e-3, torch.float16: 5e-4})
"""Norm-wise error of a float32 sum of products of 16-bit numbers, by the dtype of the numbers.

Rounding changes a number by at most 2^-8 of its size in bfloat16 and 2^-11 in float16, and by 1.7e-3 and 2.1e-4 in root mean
square. The errors of the factors are independent, so that two rounded factors give 2.4e-3 and 2.9e-4. The rest is for a third
rounding, such as that of a state between two chunks.
"""


FLA_TESTS = 5e-3
"""Largest norm-wise error that the tests of flash-linear-attention 0.6.0 allow for gradients and states (``assert_close``).

Variants of ``gated_scan``, ``gla``, ``linear_rnn`` and ``rms_norm`` that call fla state it as their own tolerance, those of
``gla_layer`` not.
"""


def checked_errors(operation: str, stated: StatedErrors) -> dict[str, Mapping[torch.dtype, float]]:
    """Return a copy of the stated errors of a new operation.

    Raises:
        ArgumentError: They are not positive numbers by name and 16-bit dtype.
    """
    good = isinstance(stated, Mapping) and all(
        isinstance(name, str)
        and isinstance(errors, Mapping)
        and all(map(_of_16_bits, errors))
        and all(map(_error, errors.values()))
        for name, errors in stated.items()
    )
    if not good:
        raise ArgumentError(
            f"stated_errors of {operation} is {stated!r}; it must map names of results to errors by dtype: numbers above 0 and "
            "below 1, for torch.bfloat16 and torch.float16."
        )
    return dict(stated)


def stated_error(stated: StatedErrors, name: str, inputs: torch.dtype, result: torch.dtype | None) -> float:
    """Return the error that is stated for a result, or 0.0 if none is, or if the result is not float32.

    Args:
        stated: Stated errors of the operation.
        name: Name of the result or gradient.
        inputs: Dtype of the call's inputs.
        result: Dtype of the result; ``None`` if it is not known.
    """
    return stated.get(name, {}).get(inputs, 0.0) if result is torch.float32 else 0.0


def _of_16_bits(dtype: object) -> bool:
    return dtype in (torch.bfloat16, torch.float16)


def _error(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < 1
