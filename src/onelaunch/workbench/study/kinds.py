"""Reader of studies of other kinds than variants of an operation, each in a subfolder of the studies' folders.

``onelaunch.model_studies`` and ``onelaunch.rank_studies`` declare such a kind and read it by :func:`find_declared`; ``read.py``
names the command that runs one, where a study of variants was expected.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

import onelaunch
from onelaunch.errors import StudyError, UnknownStudy
from onelaunch.wording import in_a_line, shown
from onelaunch.workbench.files import read_text
from onelaunch.workbench.stored import FROM_A_FILE

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pyrefly: ignore[missing-import]

KINDS = {"models": "a study of whole models", "ranks": "a study of calls on several GPUs"}
"""Kinds of studies besides those of variants: subfolder, which is also the command of ``onelaunch study``, and description."""

Declaration = TypeVar("Declaration", bound=BaseModel)


def find_declared(kind: str, declaration: type[Declaration], name_or_path: str) -> Declaration:
    """Return a study of a kind, by its name or by the path of its file.

    Args:
        kind: Kind of the study, a key of :data:`KINDS`.
        declaration: Class of its declaration.
        name_or_path: Name of a study in ``./studies/KIND`` or of a built-in one, or path of its file.

    Raises:
        UnknownStudy: No study of this kind has this name.
        StudyError: The file cannot be read or is wrong. The message names the key.
    """
    folders = _folders(kind)
    named = [folder / f"{name_or_path}.toml" for folder in folders] if "/" not in name_or_path else []
    path = next((path for path in (Path(name_or_path), *named) if path.is_file()), None)
    if path is None:
        raise UnknownStudy(name_or_path, sorted({path.stem for folder in folders for path in folder.glob("*.toml")}))
    try:
        raw: dict[str, Any] = tomllib.loads(read_text(path))
        return declaration.model_validate(raw, context=FROM_A_FILE)
    except ValidationError as error:
        first = error.errors(include_context=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise StudyError(path, f"{where or 'the study'}: {first['msg']} (it is {shown(first['input'])})") from error
    except (OSError, ValueError, RecursionError) as error:
        raise StudyError(path, in_a_line(error)) from error


def _folders(kind: str) -> list[Path]:
    """Return the folders of studies of a kind: ``./studies/KIND``, then that of the package or of its checkout."""
    package = Path(onelaunch.__file__).parent
    built_in = next((root / "studies" for root in (package, package.parents[1]) if (root / "studies").is_dir()), package)
    return [folder for folder in (Path("studies") / kind, built_in / kind) if folder.is_dir()]
