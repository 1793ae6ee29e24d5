"""What the tests of the decode kernels' own source on this machine share: the libraries that it was compiled to."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all workers of a run, so that what one of them compiled, the others load."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "libraries"
    folder.mkdir(exist_ok=True)
    return folder
