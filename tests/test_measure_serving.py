"""Test of ``tools/measure_serving.py``, which measures the server as a client sees it and sends it requests of all kinds."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


@pytest.mark.every
@pytest.mark.parametrize("model", ["tiny", "small"])
def test_served_text_is_the_librarys_and_the_server_is_idle_afterwards(model, pytestconfig):
    pytest.importorskip("uvicorn", reason="needs the extra serve")
    options = f"--model {model} --device cpu --tokens 6 --prompt-tokens 8 --runs 1 --requests 16 --json".split()
    command = [sys.executable, "-m", "tools.measure_serving", *options]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", check=False, cwd=pytestconfig.rootpath, timeout=300)
    assert done.returncode == 0, done.stderr
    (record,) = map(json.loads, done.stdout.splitlines())
    assert record["texts_agree"] and record["idle"]  # noqa: PT018 - both are said by the exit status too
    assert sum(record["answers"].values()) >= 16
    assert record["library"]["tokens_per_second"] > 0 and record["served"]["tokens_per_second"] > 0  # noqa: PT018
    for kind in ("served", "served_by_new_connections"):
        assert 0 < record[kind]["first_bytes_ms"] < record[kind]["first_ms"]
    assert record["library"]["first_bytes_ms"] is None
    assert record["server"] in ("asyncio", "uvloop")
