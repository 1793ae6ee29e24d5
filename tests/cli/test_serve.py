"""Tests of ``onelaunch serve`` up to the start of the server. ``tests/decode/serve`` tests the server.

``call`` runs ``onelaunch`` with arguments in this process. ``prose`` compares a text with its entry in tests/snapshots/prose.txt.
"""

from __future__ import annotations

import importlib
import sys

import pytest

PACKAGES = ("prometheus_client", "starlette", "uvicorn")


@pytest.mark.parametrize("package", PACKAGES)
def test_a_missing_extra_is_named(package, call, monkeypatch, prose):
    """The others must be installed, since the first missing one is named."""
    for other in PACKAGES:
        if other != package:
            pytest.importorskip(other, reason="needs the extra serve")
    for name in [name for name in sys.modules if name.partition(".")[0] == package or name.startswith("onelaunch.decode.serve.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    answer = call("serve")
    assert answer.code == 1
    prose(answer.err)


def test_a_key_that_no_header_can_hold_is_refused(call, prose):
    pytest.importorskip("uvicorn", reason="needs the extra serve")
    for key in ("", "two words", "schlüssel"):
        answer = call("serve", "--api-key", key)
        assert answer.code == 2
        prose(answer.err, name="key")


def test_the_command_makes_the_service_and_reports_the_address(call, monkeypatch, tmp_path):
    """The server itself is replaced."""
    for package in ("h11", "prometheus_client", "starlette", "uvicorn"):
        pytest.importorskip(package, reason="needs the extra serve")
    server = importlib.import_module("onelaunch.decode.serve.server")
    made = []

    def serve(service, *, started, ready, **options):
        started("http://127.0.0.1:8123")
        ready()
        made.append((service, options))

    monkeypatch.setattr(server, "serve", serve)
    answer = call(
        "serve",
        tmp_path,
        "--port",
        8123,
        "--api-key",
        "k",
        "--max-waiting",
        3,
        "--timeout",
        5,
        "--max-body",
        0.5,
        "--event-per-token",
    )
    assert answer.code == 0
    assert "serving" in answer.err
    assert "http://127.0.0.1:8123/v1" in answer.err
    assert answer.err.endswith(f"{tmp_path.name} is loaded")
    ((service, options),) = made
    assert options == {"host": "127.0.0.1", "port": 8123, "api_key": "k", "grace_seconds": 30}
    assert (service.name, service.event_per_token) == (tmp_path.name, True), "the path of a folder stays private"
    assert (service.limits.waiting, service.limits.seconds, service.limits.body_bytes) == (3, 5, 2**19)
    assert "--api-key" in call("serve", "--host", "0.0.0.0").err
    assert made[1][0].name == "tiny"
