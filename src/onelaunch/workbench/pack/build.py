"""Writer of packed studies: a zip file that Python runs, with a script, a manifest, the study's file and wheels.

A manifest is a JSON object with these keys:

- ``schema_version``: version of the pack's schema, :data:`onelaunch.workbench.pack.script.SCHEMA`;
- ``result_schema``: version of the schema of the result that the pack leaves;
- ``study``, ``study_digest``: name of the study, and digest of its declaration;
- ``python``, ``platform``: machine for which the wheels were chosen;
- ``onelaunch``, ``commit``: version and commit of the packed onelaunch;
- ``members``: SHA-256 of each other member by its name.
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import tempfile
import zipapp
from pathlib import Path

import onelaunch
from onelaunch.errors import OutputUnwritable, PackError
from onelaunch.files import reason, replace
from onelaunch.wording import listing
from onelaunch.workbench.files import read_text
from onelaunch.workbench.pack import script
from onelaunch.workbench.pack.wheels import Machine, gather, own_wheel
from onelaunch.workbench.result.provenance import commit, packages
from onelaunch.workbench.result.schema import SCHEMA
from onelaunch.workbench.study import Study
from onelaunch.workbench.study.read import MOST_BYTES


def pack(path: Path, study: Study, out: Path, machine: Machine, *, peers: bool = False) -> list[str]:
    """Write one file with a study, our wheel, and the wheels of our extra ``workbench`` for a machine.

    Args:
        path: File of the study.
        study: The study in it.
        out: File to write, atomically. It replaces an existing one.
        machine: Python version and platform of the machine on which the pack will run.
        peers: Whether the wheels of the extra ``peers`` are packed too.

    Returns:
        Names of the packed wheels, sorted.

    Raises:
        PackError: Another package provides the operation or a variant, or a wheel cannot be built or downloaded.
        OutputUnwritable: The file cannot be written.
    """
    if others := sorted(packages(study) - {"onelaunch"}):
        raise PackError(f"{study.name} runs code of {listing(others)}; a pack holds operations and variants of onelaunch alone.")
    with tempfile.TemporaryDirectory(prefix="onelaunch-pack-") as temporary:
        root = Path(temporary)
        (wheels := root / "wheels").mkdir()
        gather(own_wheel(wheels), ("workbench", "peers") if peers else ("workbench",), machine)
        (root / f"{study.name}.toml").write_text(read_text(path, MOST_BYTES), encoding="utf-8")
        members = sorted(each for each in root.rglob("*") if each.is_file())
        manifest = {
            "schema_version": script.SCHEMA,
            "result_schema": SCHEMA,
            "study": study.name,
            "study_digest": study.digest(),
            "python": machine.python,
            "platform": machine.platform,
            "onelaunch": onelaunch.__version__,
            "commit": commit(),
            "members": {each.relative_to(root).as_posix(): hashlib.sha256(each.read_bytes()).hexdigest() for each in members},
        }
        (root / script.MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
        shutil.copyfile(script.__file__, root / "__main__.py")
        packed = io.BytesIO()
        zipapp.create_archive(root, packed, interpreter=f"/usr/bin/env python{machine.python}")
        try:
            replace(out, packed.getvalue())
        except (OSError, ValueError) as problem:
            raise OutputUnwritable(out, reason(problem)) from problem
    return sorted(each.name for each in members if each.suffix == ".whl")
