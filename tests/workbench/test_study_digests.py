"""Tests that the studies are those that results were measured for: no bound, shape or note changes unnoticed."""

from __future__ import annotations

import hashlib
from pathlib import Path

ROOT = Path(__file__).parents[2]
STUDIES = ROOT / "studies"
RECORDED = ROOT / "tests" / "snapshots" / "studies.txt"
"""File with a line for each study: the first 16 hexadecimal digits of the file's SHA-256, and its name."""


def test_studies_have_their_recorded_digests():
    """A bound that changes after a measurement decides another question.

    If it has to change, the new digest is recorded, and shows in the diff.
    """
    found = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()[:16]}  {path.relative_to(STUDIES).as_posix()}"
        for path in sorted(STUDIES.rglob("*.toml"))
    ]
    assert found == RECORDED.read_text(encoding="utf-8").splitlines(), f"record intended changes in {RECORDED.name}"
