"""Reader of study files: the folders that are searched, and the checks of a file, whose errors name the key and the remedy.

Commands ``onelaunch study list``, ``show`` and ``run`` call :func:`list_studies` and :func:`find_study`. Outside of this file,
only tests call :func:`load_study`, and users, for :func:`~onelaunch.workbench.run.run_study`. Names, bounds and sizes are checked
here for messages that name the place in the file. ``declare.py`` checks them once more, bounds and sizes for studies made in
Python too.
"""

from __future__ import annotations

import math
import os
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

import onelaunch
from onelaunch.errors import (
    ArgumentError,
    FolderNotice,
    OneLaunchError,
    StudyError,
    StudyFileMissing,
    UnknownOperation,
    UnknownStudy,
)
from onelaunch.operation import AUTO, Case, Operation, find_operation
from onelaunch.wording import did_you_mean, escaped, in_a_line, listing, shown
from onelaunch.workbench.files import read_text
from onelaunch.workbench.stored import FROM_A_FILE, NAME, NAME_RULE
from onelaunch.workbench.study.check import CriterionChecks
from onelaunch.workbench.study.declare import (
    LARGEST_SIZE,
    LOOPS,
    SHAPE_KEYS,
    Criterion,
    Declared,
    Prediction,
    Shape,
    Study,
)
from onelaunch.workbench.study.kinds import KINDS
from onelaunch.workbench.study.measure import measures

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pyrefly: ignore[missing-import]

_FOLDERS = "ONELAUNCH_STUDIES"
"""Environment variable with more folders of studies, separated like ``PATH``."""

MOST_BYTES = 4 << 20
"""Largest size of a study file in bytes."""


@dataclass(frozen=True)
class StudyFile:
    """A study file that was found, readable or not."""

    name: str
    path: Path
    study: Study | None
    problem: str = ""
    """Error of a file that cannot be read; ``study`` is then ``None``."""


def _study_folders() -> list[Path]:
    """Return the folders that are searched for studies. Of two studies with the same name the first one found is taken.

    1. ``./studies`` in the current folder, so that a project's own studies come first.
    2. The built-in studies: the folder ``studies`` in the package of a wheel, or at the root of an editable install.
    3. The folders in ``$ONELAUNCH_STUDIES``, in their order. A warning, :class:`~onelaunch.errors.FolderNotice`, names a folder
       that does not exist.
    """
    named = [Path(entry) for entry in os.environ.get(_FOLDERS, "").split(os.pathsep) if entry]
    for folder in named:
        if not _is_folder(folder):
            notice = f"${_FOLDERS} names {folder}, which is no folder; no studies are read from there."
            warnings.warn(FolderNotice(escaped(notice)), stacklevel=1)  # Python shows a text once for each line that warns
    return [folder for folder in (Path("studies"), _built_in(), *named) if _is_folder(folder)]


def _built_in() -> Path:
    """Return the folder of the studies that come with onelaunch."""
    package = Path(onelaunch.__file__).parent
    installed = package / "studies"
    return installed if installed.is_dir() else package.parents[1] / "studies"


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):  # the name is too long, or holds a NUL
        return False


def list_studies() -> list[StudyFile]:
    """Return every study file, sorted by name. Of two with one name the first in the order of :func:`_study_folders` is taken."""
    found: dict[str, StudyFile] = {}
    for folder in _study_folders():
        for path in sorted(folder.glob("*.toml")):
            if path.stem not in found:
                found[path.stem] = _study_file(path)
    return sorted(found.values(), key=lambda entry: entry.name)


def find_study(name_or_path: str | Path) -> tuple[Path, Study]:
    """Return a study and its path, by its name or by the path of its file.

    Raises:
        UnknownStudy: No study has this name.
        StudyFileMissing: A path was given, and the file does not exist.
        StudyError: The file is wrong. The message names the key and the remedy.
    """
    path = Path(name_or_path)
    if _is_file(path) or path.suffix == ".toml" or len(path.parts) > 1:
        return path, load_study(path)
    for folder in _study_folders():
        if _is_file(candidate := folder / f"{name_or_path}.toml"):
            return candidate, load_study(candidate)
        for kind, description in KINDS.items():
            if _is_file(candidate := folder / kind / f"{name_or_path}.toml"):
                advice = f"Run it with: onelaunch study {kind} {name_or_path}"
                raise StudyError(candidate, f"this is {description}, not of variants of an operation.", advice=advice)
    raise UnknownStudy(str(name_or_path), _known_names())


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def load_study(path: str | Path) -> Study:
    """Read and check a study file.

    Raises:
        StudyFileMissing: The file does not exist.
        StudyError: The file is wrong. The message names the key and the remedy.
    """
    path = Path(path)
    try:
        text = read_text(path, MOST_BYTES)
    except FileNotFoundError:
        raise StudyFileMissing(path, _known_names()) from None
    except (OSError, ValueError) as error:
        raise StudyError(path, f"cannot be read: {in_a_line(error)}") from error
    try:
        raw = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise StudyError(path, f"this is not valid TOML: {in_a_line(error)}") from error
    return _Reader(path).read(raw)


def _known_names() -> list[str]:
    return sorted({path.stem for folder in _study_folders() for path in folder.glob("*.toml")})


def _study_file(path: Path) -> StudyFile:
    try:
        return StudyFile(path.stem, path, load_study(path))
    except OneLaunchError as error:
        return StudyFile(path.stem, path, None, str(error))


class _Reader(CriterionChecks):
    """Reader that turns a parsed study file into a :class:`Study`, or raises an error that names the wrong key."""

    def read(self, raw: Mapping[str, Any]) -> Study:
        """Turn a parsed file into a study, after all checks."""
        self._keys("the study", raw, Study)
        operation = self._operation(raw["operation"])
        self._names(raw)
        prepared = {
            **raw,
            "shapes": [self._shape(index, table, operation) for index, table in enumerate(self._tables(raw, "shapes"))],
            "criteria": [self._criterion(index, table) for index, table in enumerate(self._tables(raw, "criteria"))],
            "predictions": [self._prediction(index, table) for index, table in enumerate(self._tables(raw, "predictions"))],
        }
        study = self._validate(prepared)
        self._check_names(study)
        for criterion in study.criteria:
            self._check_criterion(f"criterion {criterion.name!r}", study, criterion)
        for index, prediction in enumerate(study.predictions):
            self._check_criterion(f"predictions[{index}]", study, prediction.criterion())
        return study

    def _names(self, raw: Mapping[str, Any]) -> None:
        """Reject names that break the rule, before they appear in any other message."""
        for key in ("shapes", "criteria"):
            for index, table in enumerate(self._tables(raw, key)):
                if isinstance(name := table.get("name", ""), str) and "name" in table and not NAME.fullmatch(name):
                    self.fail(f"{key}[{index}]: name is {shown(name)}; {NAME_RULE}.")

    def _keys(self, where: str, table: Mapping[str, Any], model: type[Declared], more: Sequence[str] = ()) -> None:
        """Reject unknown and missing keys of a table."""
        known = (*model.model_fields, *more)
        for key in table:
            if key not in known:
                self.fail(f"{where} has an unknown key {key!r}.{did_you_mean(key, known)} Known: {listing(known)}.")
        if missing := [name for name, field in model.model_fields.items() if field.is_required() and name not in table]:
            self.fail(f"{where} lacks {listing(missing)}.")

    def _operation(self, name: object, where: str = "operation") -> Operation[..., Any]:
        try:
            return find_operation(name if isinstance(name, str) else shown(name))
        except UnknownOperation as error:
            self.fail(f"{where}: {error}")

    def _tables(self, raw: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
        tables = raw.get(key, [])
        if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
            self.fail(f"{key} must be tables, each beginning with [[{key}]].")
        return tables

    def _shape(self, index: int, table: dict[str, Any], operation: Operation[..., Any]) -> dict[str, Any]:
        """Check the table of a shape, and return its fields with the sizes and options in tables of their own."""
        where = f"shapes[{index}] ({table.get('name', 'without a name')})"
        own = {key: table[key] for key in SHAPE_KEYS if key in table}
        given = {key: value for key, value in table.items() if key not in own}
        if "name" not in own:
            self.fail(f"{where} lacks name.")
        if "operation" in own:
            operation = self._operation(own["operation"], f"{where}: operation")
        known = (*SHAPE_KEYS, *operation.dimensions, *operation.options)
        for key in given:
            if key not in known:
                self.fail(f"{where} has an unknown key {key!r}.{did_you_mean(key, known)} Known: {listing(known)}.")
        for key in ("skip", "directions", "groups"):
            if not isinstance(own.get(key, []), list):
                self.fail(f"{where}: {key} is {shown(own[key])}; it must be a list of names.")
        for name in own.get("skip", ()):
            if name not in (known := (AUTO, *operation.variants, *operation.controls)):
                self.fail(f"{where}: skip names no variant or control {shown(name)}.{did_you_mean(str(name), known)}")
        try:
            case = operation.case(own.get("dtype", Shape.model_fields["dtype"].default), **given)
        except (ArgumentError, TypeError) as error:  # TypeError: the dtype is not a string and not hashable
            self.fail(f"{where}: {error}")
        self._check_case(where, case, operation)
        return {**own, "sizes": dict(case.sizes), "options": dict(case.options)}

    def _check_case(self, where: str, case: Case, operation: Operation[..., Any]) -> None:
        """Reject sizes that no tensor can have, and options of the wrong type."""
        for key, value in case.sizes.items():
            if value > LARGEST_SIZE:
                self.fail(f"{where}: {key} is {shown(value)}; it must be at most {LARGEST_SIZE}, the largest size of a tensor.")
        for key, value in case.options.items():
            default = operation.options[key]
            if isinstance(default, (bool, str)) and type(value) is not type(default):
                self.fail(
                    f"{where}: {key} is {shown(value)}; it must be a {type(default).__name__} like its default {default!r}."
                )

    def _criterion(self, index: int, table: dict[str, Any]) -> dict[str, Any]:
        """Check the keys and the bound of a criterion's table, and return the table."""
        where = f"criteria[{index}] ({table.get('name', 'without a name')})"
        self._keys(where, table, Criterion)
        bounds = {key: table[key] for key in ("at_least", "at_most", "equals") if key in table}
        if len(bounds) != 1:
            several = "more than one" if bounds else "none"
            self.fail(f"{where} has {several} of at_least, at_most and equals; it needs exactly one.")
        if "equals" in bounds:
            self._exact_count(where, table)
            return table
        for key, value in bounds.items():
            self._number(where, key, value)
        if "most_noise" in table:
            self._number(where, "most_noise", table["most_noise"])
        if "directions" in table and "direction" in table:
            self.fail(f"{where} has direction and directions; it needs one of them.")
        return table

    def _prediction(self, index: int, table: dict[str, Any]) -> dict[str, Any]:
        """Check the keys and the value of a prediction's table, and return the table."""
        where = f"predictions[{index}]"
        self._keys(where, table, Prediction)
        self._number(where, "value", table["value"])
        return table

    def _number(self, where: str, key: str, value: object) -> None:
        """Reject a value that is no number above 0."""
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
            self.fail(f"{where}: {key} is {shown(value)}; it must be a number above 0.")

    def _exact_count(self, where: str, table: Mapping[str, Any]) -> None:
        """Check the bound ``equals``, which only counted measures can have."""
        value = table["equals"]
        counted = [measure.name for measure in measures() if measure.counted]
        if table["measure"] not in counted:
            self.fail(f"{where}: equals is for counted measures ({listing(counted)}); use at_least or at_most.")
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            self.fail(f"{where}: equals is {shown(value)}; it must be an integer of at least 0.")

    def _validate(self, prepared: dict[str, Any]) -> Study:
        """Let pydantic validate the study, and report its first error."""
        try:
            return Study.model_validate(prepared, context=FROM_A_FILE)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "the study"
            if first["type"] == "value_error":  # raised by a validator of this package, whose message is a rule
                self.fail(f"{where} is {shown(first['input'])}; {first['msg'].removeprefix('Value error, ')}.")
            self.fail(f"{where} is {shown(first['input'])}: {first['msg'][:1].lower()}{first['msg'][1:]}.")

    def _check_names(self, study: Study) -> None:
        """Check that names are distinct, and that regimes, directions, variants and controls exist."""
        self._distinct("shapes", (shape.name for shape in study.shapes))
        self._distinct("criteria", (criterion.name for criterion in study.criteria))
        for key in ("variants", "controls", "directions", "regimes"):
            self._distinct(key, getattr(study, key))
        for key in ("directions", "regimes"):
            if not getattr(study, key):
                self.fail(f"{key} is empty; leave it out for the default.")
        for regime in study.regimes:
            for operation in study.operations():
                if regime in LOOPS and regime not in operation.loops:
                    self.fail(f"regimes has {regime!r}, which is for consecutive steps; {operation.name} has no loop of steps.")
        for shape in study.shapes:
            self._distinct(f"directions of {shape.name}", shape.directions)
            if others := [direction for direction in shape.directions if direction not in study.directions]:
                self.fail(
                    f"directions of {shape.name} has {listing(map(repr, others))}, which the study does not have; add it there."
                )
            self._distinct(f"groups of {shape.name}", shape.groups)
        names = {shape.name for shape in study.shapes}
        if both := [group for group in study.groups() if group in names]:
            self.fail(f"groups has {both[0]!r}, which is the name of a shape; a criterion could not tell them apart.")
        self._check_variants(study)

    def _check_variants(self, study: Study) -> None:
        """Check that an operation of the study has each variant and control."""
        owners = study.operations()
        called = listing(owner.name for owner in owners)
        variants = [AUTO, *dict.fromkeys(name for owner in owners for name in owner.variants)]
        for key, names in (("baseline", (study.baseline,)), ("variants", study.variants)):
            for name in names:
                self._known(key, "variant", name, variants, called)
        for name in study.variant_names():
            if not NAME.fullmatch(name):
                self.fail(f"variants: {called} has a variant {shown(name)}; {NAME_RULE}.")
        for name, error in study.timed_up_to.items():
            self._known("timed_up_to", "variant", name, variants, called)
            if any(owner.variants[name].capabilities.requires is None for owner in owners if name in owner.variants):
                self.fail(f"timed_up_to: {name} needs no package of another project; only such variants are timed though wrong.")
            if not 0 < error < 1:
                self.fail(
                    f"timed_up_to: the error of {name} is {error:g}; it must be above 0 and below 1, as norm-wise errors are."
                )
        for name in study.controls:
            self._known("controls", "control", name, dict.fromkeys(name for owner in owners for name in owner.controls), called)

    def _known(self, key: str, kind: str, name: str, known: Iterable[str], owner: str) -> None:
        if name not in (known := list(known)):
            self.fail(f"{key}: {owner} has no {kind} {name!r}.{did_you_mean(name, known)} Known: {listing(known)}.")
