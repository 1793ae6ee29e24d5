"""Read tables of measured times: one JSON file per device, from which the dispatcher chooses.

``onelaunch study adopt`` and ``onelaunch tune`` read and write tables. ``dispatch/choice.py`` looks calls up by :func:`nearest`,
on a Hopper GPU on which no similar call was measured in the table of another one. Two folders are read: the user's own
(:func:`onelaunch.folders.tables_folder`, ``$ONELAUNCH_TABLES``) and this package's. A row of the user's table replaces the
package's row of the same call; the package's other rows stay. A process reads a table once, so only later processes see a table
that is written while it runs.

To ship a table, adopt results into a folder and copy the file into this one; no command writes here.

A file is named after its device, such as ``nvidia-h200.json``. The name for a CPU holds its model, such as ``cpu-amd-epyc.json``,
and the table is used only on that model. The table of another GPU under this GPU's file name is ignored too. A file holds
``{"device": name, "source": [...], "rows": [row, ...]}`` with rows of the form ``{operation, direction, dtype, sizes,
microseconds: {variant: time}}`` and these keys, each of which may be absent:

- ``flags``: those of the query;
- ``probes``: names of the variants that passed the operation's probes in the run that measured them;
- ``unsupported``: names of the variants that refused the call in that run;
- ``run``: date of that run;
- ``auto``: name of the variant whose time is that of ``auto``, if no other variant that ``auto`` may choose was measured there;
  such a row takes part in no choice among our variants;
- ``by``: command that wrote the row, such as ``onelaunch tune``;
- ``noise``: A/A noise of the times as a factor of at least 1, within which no variant counts as faster;
- ``software``: versions by package, such as ``{"torch": "2.11.0"}``;
- ``code``: digests of the variants' code (:mod:`onelaunch.operation.sources`) by variant.

A row with other versions or other code than here is stale, and the next one speaks. A table with any other content is ignored.
Each of these gives one :class:`~onelaunch.errors.TableNotice`.
"""

from __future__ import annotations

import functools
import json
import math
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from onelaunch import folders
from onelaunch.device.hardware import Device
from onelaunch.errors import TableNotice
from onelaunch.files import read_bytes, reason
from onelaunch.operation.sources import installed_version
from onelaunch.wording import listing

TABLES = Path(__file__).parent
"""Folder of the tables in the package."""

NEAR = 3.0
"""Largest distance at which a measured call counts as similar: the sum of |log2(ratio)| over all sizes, plus 1 for each flag
that differs."""

HOPPER_TABLES = {"nvidia-h100-80gb-hbm3": (132, 80 << 30), "nvidia-h200": (132, 141 << 30)}
"""SMs and bytes of memory of the Hopper GPUs whose tables the package ships, by the name of the table."""

TUNE = "onelaunch tune"
"""Command that writes rows of the user's table which hold for the software and code that they were measured with."""

OLD_CPU = "cpu"
"""Name of the table that older versions wrote for every CPU. It is used only on the CPU that it names."""


class Key(NamedTuple):
    """Identity of a row. Two rows of the same call have equal keys."""

    operation: str
    direction: str
    dtype: str
    flags: tuple[str, ...]
    sizes: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Measured:
    """Measured times of an operation's variants for one call on one device: medians of the cold regime."""

    device: str
    """Name of the device."""
    sizes: Mapping[str, int]
    """Size of each of the operation's dimensions, by name."""
    microseconds: Mapping[str, float]
    """Time in microseconds by variant."""
    flags: frozenset[str] = frozenset()
    """Flags of the query."""
    path: Path | None = None
    """File that the row was read from."""
    probes: frozenset[str] = frozenset()
    """Names of the variants that passed the operation's probes when they were measured."""
    unsupported: frozenset[str] = frozenset()
    """Names of the variants that could not run the call when the others were measured."""
    run: str = ""
    """Date of the run that measured the row, in ISO 8601; empty if it is not known."""
    auto: str = ""
    """Name of the variant whose time is that of ``auto``, if no other that ``auto`` may choose was measured; else empty."""
    by: str = ""
    """Command that wrote the row; empty for ``onelaunch study adopt``."""
    noise: float = 1.0
    """Factor of times below which a difference is noise."""
    software: Mapping[str, str] = field(default_factory=dict)
    """Versions by package with which the row is valid; empty for all versions."""
    code: Mapping[str, str] = field(default_factory=dict)
    """Digests of the code by variant with which the row is valid; empty for any code."""

    @property
    def is_users(self) -> bool:
        """True if the row is of the user's own table."""
        return self.path is not None and self.path.parent != TABLES

    def whose(self) -> str:
        """Return words for the row's table, such as "your own table of 2026-11-26, written by onelaunch tune"."""
        if not self.is_users:
            return "the package's table"
        date = f" of {self.run[:10]}" if self.run else ""
        return f"your own table{date}, written by {self.by or 'onelaunch study adopt'}"

    def is_at(self, sizes: Mapping[str, int], flags: Iterable[str]) -> bool:
        """Return whether exactly these sizes and flags were measured."""
        return dict(self.sizes) == dict(sizes) and self.flags == frozenset(flags)

    def where(self) -> str:
        """Return the sizes, the flags and the device on one line."""
        said = [f"{key}={value}" for key, value in self.sizes.items()] + sorted(self.flags)
        return f"{', '.join(said)} on {self.device}"


def nearest(
    device: Device,
    operation: str,
    direction: str,
    dtype: torch.dtype,
    sizes: Mapping[str, int],
    flags: Iterable[str] = (),
    *,
    variants: Collection[str] | None = None,
    code: Callable[[str], str] | None = None,
    which: Callable[[Measured], bool] | None = None,
    borrow: bool = False,
) -> Measured | None:
    """Return the measured call nearest to a call, or ``None`` if none is within :data:`NEAR`. Stale rows do not count.

    At equal distances a row of the user's table comes before one of the package's.

    Args:
        device: Device on which the call would run.
        operation: Name of the operation.
        direction: ``forward`` or ``forward_backward``.
        dtype: Dtype of the call.
        sizes: Sizes by the operation's dimensions. Rows with other dimensions are ignored.
        flags: Flags of the query.
        variants: Names of the operation's variants. Times of other variants are ignored. By default all times are used.
        code: Function from the name of a variant to the digest of its code here. Without it, digests are not compared.
        which: Function that tells whether a row is of use; rows that are not do not count. By default all are.
        borrow: Whether to look the call up in the package's tables of Hopper GPUs, in place of the device's own tables, for a
            device of this architecture alone. The table of the GPU most like the device speaks, and the next one only where it
            has no such row. It tells in which order variants are likely to be fast on the device, which runs the same kernels,
            but not how fast: GPUs of one architecture differ in SMs, clocks and bandwidth.
    """
    wanted, asked = frozenset(flags), (operation, direction, str(dtype).removeprefix("torch."))

    def distance(row: Measured) -> float:
        return len(row.flags ^ wanted) + sum(abs(math.log2(max(row.sizes[key], 1) / max(sizes[key], 1))) for key in row.sizes)

    for tables in _similar_tables(device) if borrow else [_own_tables(device)]:
        found: list[tuple[tuple[float, bool, int], Measured]] = []
        for place, table in enumerate(tables):
            for key, row in table.items():
                if key[:3] == asked and (known := _known(row, operation, tuple(sizes), variants)) is not None:
                    # A size of 0 counts as 1 in a distance, so a row of another call can have the distance 0.
                    found.append(((distance(known), not known.is_at(sizes, wanted), place), known))
        near = sorted((each for each in found if each[0][0] <= NEAR), key=lambda each: each[0])
        for _, row in near:
            if which is not None and not which(row):
                continue
            if (problem := staleness(operation, row, code)) is None:
                return row
            _warn(row.path, problem, _THESE, "tune")
    return None


def staleness(operation: str, row: Measured, code: Callable[[str], str] | None) -> str | None:
    """Return why a row does not hold here, as a clause, or ``None``: other software, or other code of a variant.

    Args:
        operation: Name of the operation.
        row: Row of a table.
        code: Function from the name of a variant to the digest of its code here; ``None`` leaves out the comparison of digests.
    """
    for package, version in row.software.items():
        if (here := _version(package)) != version:
            return f"some times are of {package} {version}, and {f'this is {here}' if here else 'it is not installed here'}"
    measured = row.code.keys() & row.microseconds.keys()
    changed = sorted(name for name in measured if code is not None and code(name) != row.code[name])
    return f"the code of {operation}'s {listing(changed)} has changed since some times were measured" if changed else None


@functools.cache
def _version(package: str) -> str | None:
    """Return the version of a package here; ``None`` if it is not installed."""
    return str(torch.__version__) if package == "torch" else installed_version(package)


def _own_tables(device: Device) -> list[dict[Key, Measured]]:
    """Return the user's table of a device and the package's."""
    return [_rows(place, device.table, device.name, cpu=device.type == "cpu") for place in (folders.tables_folder(), TABLES)]


def _similar_tables(device: Device) -> list[list[dict[Key, Measured]]]:
    """Return each of the package's tables of Hopper GPUs, that of the most similar SMs and bytes of memory first.

    There are none for devices of other architectures.

    The distance of two GPUs is the sum of |log2(ratio)| of both numbers.
    """
    if device.architecture != "sm_90":
        return []

    def distance(table: str) -> float:
        here = (max(device.processors, 1), max(device.memory_bytes, 1))
        return sum(abs(math.log2(mine / its)) for mine, its in zip(here, HOPPER_TABLES[table], strict=True))

    return [[_rows(TABLES, name, None, cpu=False)] for name in sorted(HOPPER_TABLES, key=distance)]


def read(path: Path) -> tuple[str, list[str], dict[Key, Measured]]:
    """Return the device, the sources and the rows of a table.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is no table. The message completes the sentence "it is no table of measured times: ...".
    """
    data = read_bytes(path)
    try:
        table = json.loads(data)
    except UnicodeDecodeError as error:
        raise ValueError("it is not UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not JSON ({error})") from error
    if not isinstance(table, dict):
        raise ValueError(f"it holds {_kind(table)} where an object with device, source and rows is wanted")  # noqa: TRY004
    device, source, rows = (table.get(key) for key in ("device", "source", "rows"))
    if not isinstance(device, str) or not isinstance(source, list) or not _strings(source) or not isinstance(rows, list):
        raise ValueError("device must be a string, source a list of strings and rows a list")
    found: dict[Key, Measured] = {}
    for index, row in enumerate(rows):
        if (problem := _problem(row)) is not None:
            raise ValueError(f"row {index} {problem}")
        flags, probes, unsupported = (frozenset(row.get(name, ())) for name in ("flags", "probes", "unsupported"))
        more = {name: row[name] for name in ("run", "auto", "by", "noise", "software", "code") if name in row}
        key = key_of(row)
        found[key] = Measured(device, row["sizes"], row["microseconds"], flags, path, probes, unsupported, **more)
    return device, source, found


def key_of(row: Mapping[str, Any]) -> Key:
    """Return the identity of a row of a table."""
    return Key(row["operation"], row["direction"], row["dtype"], tuple(row.get("flags", ())), tuple(row["sizes"].items()))


@functools.cache
def _rows(folder: Path, table: str, device: str | None, *, cpu: bool) -> dict[Key, Measured]:
    """Return the rows of a device's tables in a folder. If ``device`` names the device, tables of another one are ignored."""
    merged: dict[Key, Measured] = {}
    for name in (OLD_CPU, table) if cpu else (table,):
        merged |= _read_or_warn(folder / f"{name}.json", device, cpu=cpu)
    return merged


def forget() -> None:
    """Clear the cached tables and notices, so that this process reads a table again that was written since."""
    _rows.cache_clear()
    _warn.cache_clear()


def _read_or_warn(path: Path, here: str | None, *, cpu: bool) -> dict[Key, Measured]:
    """Return the rows of a table, or none with a warning if the table is not valid for this device."""
    try:
        device, _, rows = read(path)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        _warn(path, f"it cannot be read ({reason(error)})")
        return {}
    except ValueError as error:
        _warn(path, str(error))
        return {}
    if here is not None and device != here:
        if not (cpu and path.stem == OLD_CPU):
            _warn(path, f"it holds times of {device!r}, and this {'CPU' if cpu else 'GPU'} is {here!r}")
        return {}
    return rows


def _known(row: Measured, operation: str, dimensions: tuple[str, ...], variants: Collection[str] | None) -> Measured | None:
    """Return a row with the times of existing variants, or ``None`` if its dimensions or all of its variants are unknown."""
    if row.sizes.keys() != set(dimensions):
        _warn(row.path, f"sizes of {operation} are {listing(row.sizes)}; they must be {listing(dimensions)}", part=_THESE)
        return None
    if variants is None or row.microseconds.keys() <= set(variants):
        return row
    times = {name: time for name, time in row.microseconds.items() if name in variants}
    gone = listing(sorted(row.microseconds.keys() - times.keys()))
    _warn(row.path, f"{operation} has no variant {gone} here", part="their times are")
    return replace(row, microseconds=times) if times else None


_THESE = "these rows are"
"""Part of a table that a notice says to be left out."""


@functools.cache
def _warn(path: Path | None, problem: str, part: str = "it is", again: str = "study adopt") -> None:
    warnings.warn(TableNotice(path, problem, part=part, again=again), stacklevel=2)


def _problem(row: object) -> str | None:
    """Return what is wrong with a row of a table, as a predicate that follows its number, or ``None``."""
    if not isinstance(row, dict):
        return f"is {_kind(row)}; it must be an object"
    for key in ("operation", "direction", "dtype"):
        if not isinstance(row.get(key), str):
            return f"has {key} {row.get(key)!r}; it must be a string"
    if not _strings(row.get("flags", [])):
        return f"has flags {row['flags']!r}; they must be a list of strings"
    for key in ("probes", "unsupported"):
        if not _strings(row.get(key, [])):
            return f"has {key} {row[key]!r}; they must be a list of names of variants"
    if (problem := _condition_problem(row)) is not None:
        return problem
    sizes, times = row.get("sizes"), row.get("microseconds")
    if not isinstance(sizes, dict) or not all(_is_size(size) for size in sizes.values()):
        return f"has sizes {sizes!r}; they must be whole numbers of at least 0 by name"
    if not isinstance(times, dict) or not times or not all(is_time(time) for time in times.values()):
        return f"has microseconds {times!r}; they must be positive numbers by variant"
    return None


def _condition_problem(row: Mapping[str, Any]) -> str | None:
    """Return what is wrong with the parts of a row that say when and with what it was measured, or ``None``."""
    for key in ("run", "auto", "by"):
        if not isinstance(row.get(key, ""), str):
            return f"has {key} {row[key]!r}; it must be a string"
    for key in ("software", "code"):
        if not isinstance(found := row.get(key, {}), dict) or not _strings(list(found.values())):
            return f"has {key} {found!r}; it must hold strings by name"
    if not (is_time(noise := row.get("noise", 1.0)) and noise >= 1):
        return f"has noise {noise!r}; it must be a factor of at least 1"
    return None


def is_time(value: object) -> bool:
    """Return whether a value can be a measured time in microseconds: a positive number below 1e18."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < 1e18


def _is_size(value: object) -> bool:
    """Return whether a value can be a tensor's size: an integer from 0 to 2^63 - 1."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _strings(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _kind(value: object) -> str:
    named = {"dict": "an object", "list": "a list", "str": "a string", "NoneType": "null", "bool": "true or false"}
    return named.get(type(value).__name__, "a number")
