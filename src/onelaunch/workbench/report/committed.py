"""Headlines of the results that were committed with this version, stored in the package as ``committed.json``.

With them a report on a machine that cannot answer a study's question can quote the answer from another device. The file is
written by ``tools/summarize_results.py`` from the results in the repository, never by hand. ``headline.py`` asks
:func:`committed` for those of a study.
"""

from __future__ import annotations

import functools
import json
from importlib import resources

from pydantic import BaseModel, ConfigDict

FILE = "committed.json"


class Committed(BaseModel):
    """Headline of one committed result, with the facts that identify the result."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    study: str
    study_digest: str
    """SHA-256 of the declaration that ran."""
    device: str
    slug: str
    date: str
    commit: str
    decision: str
    """Kind of the decision in words, such as ``measure more``."""
    sentence: str
    """Sentence that says why the decision is what it is, from :class:`onelaunch.workbench.report.headline.Headline`."""


def committed(study: str) -> tuple[Committed, ...]:
    """Return the committed headlines of a study, one for each device that has a result."""
    return tuple(entry for entry in _entries() if entry.study == study)


@functools.cache
def _entries() -> tuple[Committed, ...]:
    text = resources.files("onelaunch.workbench.report").joinpath(FILE).read_text(encoding="utf-8")
    return tuple(Committed.model_validate(entry) for entry in json.loads(text))
