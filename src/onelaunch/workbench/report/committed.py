"""Headlines of the results that were measured for this version, kept in the package as ``committed.json``.

A machine that cannot answer a study's question can still say what the answer was elsewhere. The file is written by
``tools/summarize_results.py`` from the results in the repository, never by hand.
"""

from __future__ import annotations

import functools
import json
from importlib import resources

from pydantic import BaseModel, ConfigDict

FILE = "committed.json"


class Committed(BaseModel):
    """The headline of one committed result, with what it takes to find that result again."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    study: str
    study_digest: str
    """SHA-256 of the declaration that ran."""
    device: str
    slug: str
    date: str
    commit: str
    decision: str
    sentence: str


def committed(study: str) -> tuple[Committed, ...]:
    """Return the committed headlines of a study, one for each device."""
    return tuple(entry for entry in _entries() if entry.study == study)


@functools.cache
def _entries() -> tuple[Committed, ...]:
    text = resources.files("onelaunch.workbench.report").joinpath(FILE).read_text(encoding="utf-8")
    return tuple(Committed.model_validate(entry) for entry in json.loads(text))
