"""Where a model's files are: the one that ships with the package, a folder, or a repository of Hugging Face's hub."""

from __future__ import annotations

import re
from pathlib import Path

from onelaunch.errors import CheckpointError, UnknownModel, in_a_line

BUNDLED = "tiny"
"""The name of the model in the package: Qwen3's architecture, 1.2 million parameters, trained on Python's standard library."""

FILES = ("*.json", "*.safetensors", "*.jinja")
"""What is fetched of a repository."""

REPOSITORY = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}")


def find_model(name: str | Path) -> Path:
    """The folder of a model: the bundled one's for ``"tiny"``, itself, or where the hub's files were put for ``"owner/name"``.

    A folder of the bundled model's name is meant by ``"./tiny"``, or as a ``Path``.

    Raises:
        CheckpointError: there is no such folder, and no such repository or no way to reach it.
    """
    if name == BUNDLED:
        return Path(__file__).parent / BUNDLED
    folder = Path(name)
    try:
        if folder.is_dir():
            return folder
    except (OSError, ValueError):  # longer than any name may be, or with characters that none has
        pass
    if not REPOSITORY.fullmatch(str(name)):
        raise UnknownModel(str(name), (BUNDLED,))
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise CheckpointError(f"there is no folder {name}; names of the hub need pip install 'onelaunch[decode]'") from None
    try:
        return Path(snapshot_download(str(name), allow_patterns=list(FILES)))
    except Exception as problem:  # noqa: BLE001 - network, rights and names fail in many classes
        raise CheckpointError(f"there is no folder {name}, and the hub does not give it: {in_a_line(problem)}") from None
