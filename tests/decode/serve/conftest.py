"""Fixtures of the server's tests: the bundled model with a chat template, and an application that serves it in this process."""

from __future__ import annotations

import json
import shutil

import pytest

from onelaunch.decode import Model
from onelaunch.decode.model.hub import BUNDLED, find_model
from onelaunch.device.tools import package_installed

NEEDED = ("prometheus_client", "starlette", "tokenizers", "uvicorn")
"""Packages of the extras ``serve`` and ``decode``, without which no test of this folder is collected."""

collect_ignore_glob = [] if all(map(package_installed, NEEDED)) else ["test_*.py"]

TEMPLATE = (
    "{% for message in messages %}# {{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}{{ opening | default('def ') }}{% endif %}"
)
"""Chat template that begins the answer with ``def``, or with the variable ``opening``."""


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Return a folder with the bundled model and a chat template."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    shutil.copytree(find_model(BUNDLED), folder)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": TEMPLATE}))
    return folder


@pytest.fixture(scope="session")
def model(folder):
    """Return the bundled model with a chat template, in float32 on the CPU."""
    return Model.from_pretrained(folder, device="cpu", dtype="float32")


@pytest.fixture(scope="session")
def app(model):
    """Return a running application that serves the bundled model."""
    from tests.decode.serve.driver import App  # needs the packages

    with App(model) as app:
        yield app.ready()
