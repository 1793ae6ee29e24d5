"""The studies are those that results were measured for: no bound, shape or note of theirs changes unnoticed."""

from __future__ import annotations

import hashlib
from pathlib import Path

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "tests" / "snapshots" / "studies.txt"


def test_studies_are_as_they_were_recorded():
    """A bound that moves after a measurement decides something else. Where one has to, its new digest says so in the change."""
    found = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()[:16]}  {path.name}" for path in sorted((ROOT / "studies").glob("*.toml"))
    ]
    assert found == RECORDED.read_text(encoding="utf-8").splitlines(), f"record what is meant in {RECORDED.name}"
