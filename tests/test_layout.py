"""Tests of the layout of the sources: files and functions have limited size."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILES = sorted(
    path
    for folder in ("src", "tests", "tools", "examples")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".py", ".cu", ".cuh")
)
FILE_LINES = 500
"""Largest number of lines of a file."""
FUNCTION_LINES = 80
"""Largest number of lines of a function without its docstring, in the package outside of folders named ``kernels``."""


def test_no_file_exceeds_the_limit_of_lines():
    assert FILES
    long = {str(path.relative_to(ROOT)): lines for path in FILES if (lines := lines_of(path)) > FILE_LINES}
    assert long == {}


def lines_of(path):
    return len(path.read_text(encoding="utf-8").splitlines())


def test_no_function_outside_kernels_exceeds_the_limit_of_lines():
    """A kernel is one function, and may be as long as the limit for its file allows."""
    sources = [path for path in FILES if path.suffix == ".py" and "src" in path.parts and "kernels" not in path.parts]
    assert sources
    long = {
        f"{path.relative_to(ROOT)}: {node.name}": lines
        for path in sources
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and (lines := body_lines(node)) > FUNCTION_LINES
    }
    assert long == {}


def body_lines(node):
    """Return the number of a function's lines without its docstring, because descriptions of arguments are not code."""
    docstring = node.body[0] if ast.get_docstring(node) is not None else None
    return node.end_lineno - node.lineno + 1 - (docstring.end_lineno - docstring.lineno + 1 if docstring else 0)
