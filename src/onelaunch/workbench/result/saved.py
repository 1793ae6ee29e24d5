"""Base of results that are stored in a JSON file of their own, with a version of their schema.

``schema.py`` derives the result of a study from it, and ``onelaunch.model_studies`` that of a study of models.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import ValidationError

from onelaunch.errors import ResultCorrupt, ResultExists, ResultMissing, ResultTooNew, StudyError
from onelaunch.wording import in_a_line, listing, shown
from onelaunch.workbench.files import read_text, write_text
from onelaunch.workbench.stored import FROM_A_FILE, Grown, Stored
from onelaunch.workbench.study.kinds import KINDS

if TYPE_CHECKING:
    from typing_extensions import Self


class Saved(Grown, Stored):
    """Result that is stored in a file. Its field ``schema_version`` says which version of the schema the file has."""

    VERSIONS: ClassVar[tuple[int, ...]]
    """Versions that can be read, the newest last."""

    def stored(self) -> str:
        """Return the JSON that :meth:`save` writes."""
        return self.model_dump_json(indent=1) + "\n"

    def save(self, path: Path, *, force: bool = False) -> Path:
        """Write the result as JSON, atomically.

        Raises:
            ResultExists: The file exists, and ``force`` is off.
            OutputUnwritable: The file cannot be written.
        """
        if path.exists() and not force:
            raise ResultExists(path)
        write_text(path, self.stored())
        return path

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a result that :meth:`save` wrote, and check that its parts fit together.

        Raises:
            ResultMissing: The file does not exist.
            ResultTooNew: A newer version of onelaunch wrote the file.
            ResultCorrupt: The file is damaged, is no such result, or its parts do not fit together, such as a median and its
                rounds. The message says where.
            StudyError: It is the result of another kind of study. The message names the command for it.
        """
        try:
            raw = json.loads(read_text(path))
        except FileNotFoundError:
            raise ResultMissing(path) from None
        except (OSError, ValueError, RecursionError) as error:
            raise ResultCorrupt(path, in_a_line(error)) from error
        if isinstance(raw, dict):
            cls._refuse_other_kinds(raw, path)
        version = raw.get("schema_version") if isinstance(raw, dict) else None
        # type() and not isinstance(): true is an int for Python, and would be taken for version 1.
        if type(version) is int and version > cls.VERSIONS[-1]:
            raise ResultTooNew(path, schema=version, newest=cls.VERSIONS[-1])
        if type(version) is not int or version not in cls.VERSIONS:
            message = f"its schema_version is {shown(version)}, this onelaunch reads {listing(map(str, cls.VERSIONS))}"
            raise ResultCorrupt(path, message)
        try:
            found = cls.model_validate(raw, context=FROM_A_FILE)
        except ValidationError as error:
            first = error.errors(include_context=False)[0]
            where = ".".join(str(part) for part in first["loc"])[:200]
            raise ResultCorrupt(path, f"{where}: {first['msg']} (it is {shown(first['input'])})") from error
        except RecursionError as error:
            raise ResultCorrupt(path, "it is nested too deeply") from error
        if (problem := found.inconsistency()) is not None:
            raise ResultCorrupt(path, problem)
        return found

    @classmethod
    def _refuse_other_kinds(cls, raw: dict[str, Any], path: Path) -> None:
        """Raise an error that names the right command if a file holds the result of another kind of study.

        Results of whole models and of several GPUs have a field ``kind``; those of variants have an operation.
        """
        own = cls.model_fields["kind"].default if "kind" in cls.model_fields else None
        kind, study = raw.get("kind"), raw.get("study")
        if isinstance(kind, str) and kind in KINDS and kind != own:
            which, command = KINDS[kind], kind
        elif own is not None and kind is None and isinstance(study, dict) and "operation" in study:
            which, command = "a study of variants", "report"
        else:
            return
        raise StudyError(path, f"it is the result of {which}. The command onelaunch study {command} shows it.")

    @abstractmethod
    def inconsistency(self) -> str | None:
        """Return what does not fit together in the result, as a clause, or ``None``."""
