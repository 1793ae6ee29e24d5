"""Tests that the package names an encoding wherever it reads or writes text, so that the locale does not matter."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import onelaunch

FOLDER = Path(onelaunch.__file__).parent


def calls_without_encoding(source: str) -> Iterator[int]:
    """Return the lines that open a file without naming an encoding, or that read a process's output as text.

    A process's output must be read as bytes: the check refuses ``text=True`` even beside ``encoding=``.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and _is_wrong(node):
            yield node.lineno


def _is_wrong(call: ast.Call) -> bool:
    """Return whether a call, judged by its name and arguments, is one of those."""
    name, given = ast.unparse(call.func), {keyword.arg for keyword in call.keywords}
    if name.endswith((".read_text", ".write_text")):
        return "encoding" not in given
    if name in ("open", "io.open", "os.fdopen") or (name.endswith(".open") and name != "os.open"):
        modes = [ast.unparse(value).strip("'\"") for value in (*call.args, *(keyword.value for keyword in call.keywords))]
        return "encoding" not in given and not any("b" in mode and set(mode) <= set("rwaxb+") for mode in modes)
    return name.startswith("subprocess.") and bool(given & {"text", "universal_newlines"})


@pytest.mark.parametrize("path", sorted(FOLDER.rglob("*.py")), ids=lambda path: path.relative_to(FOLDER).as_posix())
def test_files_are_opened_with_an_encoding(path):
    assert list(calls_without_encoding(path.read_text(encoding="utf-8"))) == []


def test_the_check_finds_calls_without_encoding():
    wrong = "open('a')\nPath('a').read_text()\np.write_text(x)\nsubprocess.run(c, text=True)\np.open('w')\n"
    right = "open('a', 'rb')\nopen('a', encoding='utf-8')\np.read_text(encoding='utf-8')\nread_text(p)\nos.open('a', 0)\n"
    assert list(calls_without_encoding(wrong)) == [1, 2, 3, 4, 5]
    assert list(calls_without_encoding(right)) == []
