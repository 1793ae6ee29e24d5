"""Names of models: the model that ships with the package, a folder, or a repository of Hugging Face's hub.

``decode/generate.py`` finds the folder of a model with it, and the command ``onelaunch generate`` names the model of the package
by :data:`BUNDLED`.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from onelaunch.errors import ArgumentError, CheckpointError, UnknownModel
from onelaunch.wording import in_a_line, shown

BUNDLED = "tiny"
"""Name of the bundled model: Qwen3's architecture, 1.2 million parameters, trained on Python's standard library."""

FILES = ("*.json", "*.safetensors", "*.jinja")
"""Patterns of the files that are downloaded from a repository."""

_REPOSITORY = re.compile(r"\w[\w.-]{0,95}/\w[\w.-]{0,95}", re.ASCII)
"""Pattern of repository names on the hub, ``owner/name``."""

_OFFLINE = (
    "Without a network, fetch it where there is one, with: hf download {name} --local-dir FOLDER, and give that folder; or take "
    f"the model {BUNDLED!r}, which is in the package"
)
"""Advice in the error message of a machine that cannot reach the hub."""


def find_model(name: str | Path) -> Path:
    """Return the folder of a model: the bundled one's for ``"tiny"``, a folder itself, the downloaded one for ``"owner/name"``.

    Write ``"./tiny"``, or give a ``Path``, for a folder that has the bundled model's name.

    Raises:
        ArgumentError: ``name`` is neither a string nor a path, or empty.
        UnknownModel: ``name`` is neither a folder, nor a possible name on the hub, nor the bundled model's.
        CheckpointError: ``name`` is a file, or the hub has no such repository or cannot be reached; the message then says what
            to do offline.
    """
    if not isinstance(name, (str, os.PathLike)) or not isinstance(os.fspath(name), str) or not os.fspath(name).strip():
        want = f"a model folder, owner/name on Hugging Face's hub, or {BUNDLED!r}"
        raise ArgumentError(f"name is {shown(name)}; it must be {want}.")
    if name == BUNDLED:
        return Path(__file__).parent.parent / BUNDLED
    folder = Path(name)
    if os.path.isdir(folder):  # noqa: PTH112 - unlike Path.is_dir, it returns False for names that are too long or invalid
        return folder
    if os.path.exists(folder):  # noqa: PTH110
        raise CheckpointError(
            f"{shown(str(name), 300)} is a file; give the folder that holds it, with config.json and tokenizer.json"
        )
    if not _REPOSITORY.fullmatch(str(name)):
        raise UnknownModel(str(name), (BUNDLED,))
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise CheckpointError(f"there is no folder {name}; names of the hub need pip install 'onelaunch[decode]'") from None
    try:
        return Path(snapshot_download(str(name), allow_patterns=list(FILES)))
    except Exception as problem:  # noqa: BLE001 - network, permission and name errors have many classes
        said = f"there is no folder {name}, and the hub does not give it: {in_a_line(problem)}"
        raise CheckpointError(f"{said}. {_OFFLINE.format(name=name)}") from None
