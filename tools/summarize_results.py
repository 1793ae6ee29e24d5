"""Write a headline (study, device, decision and one sentence) for each result of this repository into the package.

With it the package can show what was measured on other devices: ``report/headline.py`` quotes it.

Run it from the root of the repository after a result was added or judged again: ``python -m tools.summarize_results``.
``tests/workbench/test_report_headline.py`` fails if that was forgotten.
"""

from __future__ import annotations

import json
from pathlib import Path

from onelaunch.workbench.report import committed
from onelaunch.workbench.report.headline import headline
from onelaunch.workbench.report.tables import words
from onelaunch.workbench.result import Result

ROOT = Path(__file__).parents[1]
"""Root of the repository."""

TARGET = Path(committed.__file__).with_name(committed.FILE)
"""File of the package that holds the headlines."""


def summarized(results: Path) -> str:
    """Return the content of the package's file, with one headline for each finished result below a folder."""
    stored = [Result.load(path) for path in sorted(results.glob("*/*.json"))]
    entries = [_entry(result) for result in stored if result.decision and not result.interrupted]
    return json.dumps([entry.model_dump() for entry in entries], indent=1, ensure_ascii=False) + "\n"


def _entry(result: Result) -> committed.Committed:
    facts = result.provenance
    return committed.Committed(
        study=result.study.name,
        study_digest=result.study_digest,
        device=facts.device,
        slug=facts.slug,
        date=facts.date,
        commit=facts.commit,
        decision=words(result.decision.kind) if result.decision else "",
        sentence=headline(result).sentence,
    )


if __name__ == "__main__":
    TARGET.write_text(summarized(ROOT / "results"), encoding="utf-8")
