"""Names of models: the model that ships with the package, a folder, or a repository of Hugging Face's hub."""

from __future__ import annotations

import os
import re
from pathlib import Path

from onelaunch.errors import ArgumentError, CheckpointError, UnknownModel
from onelaunch.wording import in_a_line, shown

BUNDLED = "tiny"
"""Name of the model in the package: Qwen3's architecture, 1.2 million parameters, trained on Python's standard library."""

FILES = ("*.json", "*.safetensors", "*.jinja")
"""Patterns of the files that are fetched from a repository."""

REPOSITORY = re.compile(r"\w[\w.-]{0,95}/\w[\w.-]{0,95}", re.ASCII)
"""Pattern of the names that repositories of the hub have."""

OFFLINE = (
    "Without a network, fetch it where there is one, with: hf download {name} --local-dir FOLDER, and give that folder; or take "
    f"the model {BUNDLED!r}, which is in the package"
)
"""Advice for a machine that cannot reach the hub."""


def find_model(name: str | Path) -> Path:
    """Return the folder of a model: the bundled one's for ``"tiny"``, a folder itself, the downloaded one for ``"owner/name"``.

    Write ``"./tiny"``, or give a ``Path``, for a folder that is called as the bundled model is.

    Raises:
        ArgumentError: ``name`` is neither a string nor a path, or empty.
        UnknownModel: it is neither a folder, nor a name that the hub could have, nor the bundled model's.
        CheckpointError: it is a file, or the hub has no such repository or cannot be reached; then the message says what to do
            offline.
    """
    if not isinstance(name, (str, os.PathLike)) or not isinstance(os.fspath(name), str) or not os.fspath(name).strip():
        want = f"a model folder, owner/name on Hugging Face's hub, or {BUNDLED!r}"
        raise ArgumentError(f"name is {shown(name)}; it must be {want}.")
    if name == BUNDLED:
        return Path(__file__).parent.parent / BUNDLED
    folder = Path(name)
    if os.path.isdir(folder):  # noqa: PTH112 - False, not an error, for a name that is too long or has characters that none has
        return folder
    if os.path.exists(folder):  # noqa: PTH110
        raise CheckpointError(
            f"{shown(str(name), 300)} is a file; give the folder that holds it, with config.json and tokenizer.json"
        )
    if not REPOSITORY.fullmatch(str(name)):
        raise UnknownModel(str(name), (BUNDLED,))
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise CheckpointError(f"there is no folder {name}; names of the hub need pip install 'onelaunch[decode]'") from None
    try:
        return Path(snapshot_download(str(name), allow_patterns=list(FILES)))
    except Exception as problem:  # noqa: BLE001 - network, rights and names fail in many classes
        said = f"there is no folder {name}, and the hub does not give it: {in_a_line(problem)}"
        raise CheckpointError(f"{said}. {OFFLINE.format(name=name)}") from None
