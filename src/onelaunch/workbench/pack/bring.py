"""Check of a result that was measured on another machine, such as by a packed study, before it is stored here."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

from onelaunch.errors import OneLaunchError, PackError, UnknownStudy
from onelaunch.wording import shown
from onelaunch.workbench.files import within
from onelaunch.workbench.pack import script
from onelaunch.workbench.result import Result
from onelaunch.workbench.study.read import find_study


def load(path: Path) -> Result:
    """Read a result, and refuse a packed study, which is easily taken for one.

    Raises:
        PackError: The file is a packed study. The message says so if its schema is not the one that is read here.
        ResultMissing: The file does not exist.
        ResultTooNew: A newer version of onelaunch wrote the result.
        ResultCorrupt: The file is damaged, or no result.
    """
    if path.is_file() and zipfile.is_zipfile(path):
        try:
            with zipfile.ZipFile(path) as archive:
                version = json.loads(archive.read(script.MANIFEST))["schema_version"]
        except (OSError, ValueError, LookupError, TypeError, RecursionError, zipfile.BadZipFile):
            return Result.load(path)  # some other zip file; the error says that it is no result
        if version != script.SCHEMA:
            raise PackError(
                f"{path} is a packed study of schema {shown(version)}; this onelaunch reads schema {script.SCHEMA}. "
                "Run it on the other machine, and import the result that it leaves beside itself."
            )
        raise PackError(f"{path} is a packed study, not its result. Run it with Python, and import the JSON file that it leaves.")
    return Result.load(path)


def place(result: Result) -> Path:
    """Return the file that a run on the result's device would write: ``results/DEVICE/NAME.json`` in the working directory."""
    folder = Path("results")
    return within(folder, folder / result.provenance.slug / f"{result.study.name}.json")


def remarks(result: Result) -> list[str]:
    """Return sentences on what limits the use of a result here: its declaration, its code, and whether it is complete."""
    found = []
    name = result.study.name
    try:
        _, known = find_study(name)
    except UnknownStudy:
        found.append(f"There is no study {name!r} here, so its declaration is known from the result alone.")
    except OneLaunchError as problem:
        found.append(f"The study {name!r} here cannot be read ({problem}), so the declarations were not compared.")
    else:
        if known.digest() != result.study_digest:
            found.append(f"The study {name!r} here is declared otherwise than the one that ran.")
    commit = result.provenance.commit
    if not commit:
        found.append("The commit that ran is not known; the digests of its sources are in the result.")
    elif commit.endswith("-dirty"):
        found.append("The code that ran was not committed, so onelaunch study adopt refuses the result.")
    if result.interrupted:
        found.append("The run was interrupted. The other machine can measure the rest: run the pack there with --resume.")
    return found
