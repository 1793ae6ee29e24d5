"""Arguments and options that several commands share, and the parser of ``--shape`` of ``onelaunch explain`` and ``prebuild``.

The modules of commands in ``cli`` and ``cli/study`` import them; ``cli/study/arguments.py`` has those of studies alone.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from onelaunch.errors import ArgumentError
from onelaunch.operation import Case, Operation
from onelaunch.wording import did_you_mean, listing

_LARGEST_SIZE = 2**63 - 1
"""Largest size of a tensor's dimension, a signed 64-bit integer."""

OperationName = Annotated[
    str, typer.Argument(metavar="OPERATION", help="Name of the operation, such as linear_rnn.", show_default=False)
]
DeviceName = Annotated[
    str, typer.Option("--device", help="Device: cpu, cuda, cuda:1 and so on; auto is the first GPU, or the CPU.")
]


def parse_case(operation: Operation[..., Any], shape: str, dtype: str) -> Case:
    """Parse the value of ``--shape``, such as ``B=4,T=2048,D=256,V=64``, as a case of the operation.

    Raises:
        ArgumentError: A part is not ``NAME=VALUE``, a name is given twice or not known, or a size is missing, no
            integer, negative or too large.
    """
    example = ",".join(f"{name}=64" for name in operation.dimensions)
    given: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in shape.split(","))):
        name, equals, value = (text.strip() for text in part.partition("="))
        if not (name and equals and value):
            raise ArgumentError(f"--shape has {part!r}; each part must be NAME=VALUE, as in --shape {example}.")
        if name in given:
            raise ArgumentError(f"--shape gives {name} twice; give each name once, as in --shape {example}.")
        known = (*operation.dimensions, *operation.options)
        if name not in known:
            raise ArgumentError(f"--shape has the unknown name {name!r}.{did_you_mean(name, known)} Known: {listing(known)}.")
        given[name] = _value(name, value, is_size=name in operation.dimensions)
    return operation.case(dtype, **given)


def spell_case(case: Case) -> str:
    """Return the options ``--shape`` and ``--dtype`` that name a case; :func:`parse_case` reads them back."""
    options = {name: value if isinstance(value, str) else json.dumps(value) for name, value in case.options.items()}
    named = ",".join(f"{name}={value}" for name, value in {**case.sizes, **options}.items())
    return f"--shape {named} --dtype {str(case.dtype).removeprefix('torch.')}"


def _value(name: str, text: str, *, is_size: bool) -> Any:
    """Parse a size as an integer, and an option's value as JSON, or as a string if it is not JSON."""
    if is_size:
        try:
            size = int(text)
        except ValueError:
            raise ArgumentError(f"--shape has {name}={text}; a size must be an integer, as in {name}=64.") from None
        if size > _LARGEST_SIZE:
            raise ArgumentError(f"--shape has {name}={text}; a size must be at most {_LARGEST_SIZE}, the largest of a tensor.")
        return size
    try:
        return json.loads(text.lower())  # numbers, true, false, null; lower accepts Python's True and False
    except ValueError:
        return text
