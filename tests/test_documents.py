"""Tests of README, CONTRIBUTING and the documentation: code runs as shown, commands can be parsed, and links have targets."""

from __future__ import annotations

import importlib.util
import inspect
import pkgutil
import re
import shlex
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import typer

from onelaunch import dispatch, operation
from onelaunch.cli.application import application
from onelaunch.operation import registry
from onelaunch.workbench.study.read import load_study
from tools import write_pages

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
PAGES = [page for page in PAGES if not {"_build", "_generated"} & set(page.parts)]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
"""Fenced block of a page: its language and its text."""


NEEDS = {"accelerate.md": "transformers", "decode.md": "tokenizers"}
"""Pages whose code needs a package of an extra of this project, with the package. They are skipped without it."""


def _from_docs(name: str) -> ModuleType:
    """Return a module of the folder docs, which is no package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


two_readers = _from_docs("two_readers")

ELSEWHERE = ("README.md",)
"""Pages whose code runs in a test of its own, in ``test_readme.py``."""


def blocks(page: Path, language: str) -> list[str]:
    """Return the fenced blocks of a page in a language."""
    return [text for found, text in BLOCK.findall(page.read_text()) if found == language]


@pytest.fixture
def registry_of_its_own(monkeypatch):
    """Undo after the test which operations and variants a page registers."""
    list(operation.operations())  # without this, operations imported by the page would be unregistered after the test
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
    for known in registry._REGISTRY.values():
        monkeypatch.setattr(known, "variants", dict(known.variants))
    dispatch.choose.cache_clear()  # here choices without the variants of the page, and below those among them
    yield
    dispatch.choose.cache_clear()


@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks(page, "python") and page.name not in ELSEWHERE], ids=lambda page: page.name
)
def test_the_python_of_a_page_runs(page, registry_of_its_own, monkeypatch):
    """All blocks of a page run in order, as one module.

    It is in ``sys.modules``, where ``dataclasses`` looks up the module of a class.
    """
    if page.name in NEEDS:
        pytest.importorskip(NEEDS[page.name])
    name = f"page_{page.stem.lower()}"
    module = type(sys)(name)
    monkeypatch.setitem(sys.modules, name, module)
    for block in blocks(page, "python"):
        exec(compile(block, str(page), "exec"), module.__dict__)


def test_the_page_of_accelerate_begins_with_a_short_example_and_its_tables():
    """The example runs with the page. The tables are written from the code and from results."""
    text = (ROOT / "docs" / "accelerate.md").read_text(encoding="utf-8")
    summary = text[: text.index("\n## ")]
    ((language, example),) = BLOCK.findall(summary)
    assert language == "python"
    assert "onelaunch.accelerate(model)" in example
    assert len(example.splitlines()) <= 8
    assert [part[1] for part in write_pages.PART.finditer(summary)] == ["accelerate-speeds", "accelerate-classes"]


def test_the_readme_links_documentation_and_examples():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    linked = set(re.findall(r"\]\(([^)#:]+)\)", text))
    assert {"docs/start.md", "docs/workbench.md", "docs/concepts.md", "docs/security.md", "docs/index.md"} <= linked
    assert {f"examples/{path.name}" for path in (ROOT / "examples").glob("*.py")} <= linked
    assert {f"docs/operations/{path.name}" for path in (ROOT / "docs" / "operations").glob("*.md")} <= linked
    assert "make docs" in text


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "docs" / "start.md"], ids=lambda page: page.name)
def test_no_page_installs_from_a_package_index(page):
    """No index has the package. It is installed from a clone or a wheel."""
    text = page.read_text(encoding="utf-8")
    commands = re.findall(r"^(?: {4}|\$ )(.*pip install .*)$", text, re.MULTILINE)
    assert any(command.split("pip install ")[1].startswith(".") for command in commands)
    assert not any(re.search(r"pip install ['\"]?onelaunch(?!-)", command.split("#")[0]) for command in commands)
    assert "git clone" in text
    assert "pytorch.org" in text


def test_the_contributing_pages_gate_detects_a_wrong_variant(registry_of_its_own):
    """Insert a mistake into the variant of the page. The gate that the page shows must reject it."""
    from onelaunch.ops import linear_rnn
    from onelaunch.workbench.verify import judge

    source = blocks(ROOT / "CONTRIBUTING.md", "python")[0].replace("step *= 2", "step *= 4")
    exec(compile(source, "CONTRIBUTING.md", "exec"), {"__name__": "contributing"})
    case = linear_rnn.case("float16", B=2, T=100, D=32, V=16)
    assert not judge(linear_rnn, case, variant="doubling", device=torch.device("cpu")).ok


def test_the_contributing_pages_study_is_valid(tmp_path):
    found = [block for block in blocks(ROOT / "CONTRIBUTING.md", "toml") if "operation =" in block]
    assert len(found) == 1
    path = tmp_path / "packed-sequences.toml"
    path.write_text(found[0])
    study = load_study(path)
    assert study.name == path.stem
    assert study.criteria[0].of == "chunked"


COMMANDS = sorted(
    {
        line.split("#")[0].strip()
        for page in PAGES
        for line in re.findall(r"^(?: {4}|\$ )(onelaunch .*)$", page.read_text(), re.MULTILINE)
        if "--help" not in line
    }
)


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_shown_on_pages_can_be_parsed(line):
    """The command line's own parser parses every option, but runs nothing."""
    command, words = typer.main.get_command(application), shlex.split(line)[1:]
    context = None
    while hasattr(command, "commands"):
        context = command.make_context(words[0], [], parent=context, resilient_parsing=True)
        _, command, words = command.resolve_command(context, words)
        assert command is not None, line
    command.make_context(command.name, words, parent=context)


def test_pages_show_commands():
    assert any("study run" in line for line in COMMANDS)
    assert len(COMMANDS) >= 4


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_have_targets(page):
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target


DIRECTIVE = re.compile(r"^ *(?:`{3,}|~{3,}|:{3,})\{.*|^\(\S+\)=$|^ *:[a-z-]+: .*|(?<![\w`/])\{[a-z:]+\}`", re.MULTILINE)
"""Syntax of MyST that GitHub shows as text: directives, targets, options of directives and roles."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_github_shows_no_directive_of_sphinx(page):
    text = page.read_text(encoding="utf-8")
    assert DIRECTIVE.findall(two_readers.for_github(text)) == []
    assert "\n<!-- sphinx" not in two_readers.for_sphinx(text)
    assert "github -->\n" not in two_readers.for_sphinx(text)


def test_each_reader_gets_its_parts_of_a_page():
    page = "# Title\n<!-- sphinx\n```{toctree}\nstart\n```\n-->\n<!-- github -->\n[start](start.md)\n<!-- end github -->\nEnd\n"
    assert two_readers.for_sphinx(page) == "# Title\n\n```{toctree}\nstart\n```\n\n\n\n\nEnd\n"
    assert DIRECTIVE.search(two_readers.for_sphinx(page))
    assert not DIRECTIVE.search(two_readers.for_github(page))
    for raw in (":::{glossary}", "see {class}`Case`", "(words)=", ":members: forward"):
        assert DIRECTIVE.search(raw)


def documented(page: Path) -> list[tuple[str, object]]:
    """Return what the directives of a page take from the source, each with its name."""
    found: list[tuple[str, object]] = []
    module = ""
    for kind, name in re.findall(r"^ *\.\. (\w+):: (\S+)$", page.read_text(encoding="utf-8"), re.MULTILINE):
        if kind == "currentmodule":
            module = name
        elif kind.startswith("auto"):
            held = pkgutil.resolve_name(f"{module}:{name}" if not name.startswith("onelaunch") else name)
            found.append((name, held))
    return found


@pytest.mark.parametrize("page", [page for page in PAGES if documented(page)], ids=lambda page: page.name)
def test_github_links_the_source_of_what_a_page_documents(page):
    shown = two_readers.for_github(page.read_text(encoding="utf-8"))
    linked = {(name, (page.parent / target).resolve()) for name, target in re.findall(r"\[`([\w.]+)`\]\(([^)#]+)\)", shown)}
    for name, what in documented(page):
        what = what._function if isinstance(what, operation.Operation) else what
        path = Path(inspect.getsourcefile(inspect.unwrap(what) if callable(what) else what))
        assert {(name, path), (name, path.parent)} & linked, f"{page.name}: {name} is in {path}"


def test_the_written_parts_of_pages_are_up_to_date():
    pytest.importorskip("sphinx", reason="needs the packages of the dependency group docs")
    for path, text in write_pages.files(ROOT).items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: run python -m tools.write_pages"


def test_the_index_links_every_page_of_its_contents():
    text = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    entries = re.findall(r"^[a-z][\w/-]+$", text, re.MULTILINE)
    assert len(entries) > 20
    assert {f"]({entry}.md)" for entry in entries} <= set(re.findall(r"\]\([^)]*\)", two_readers.for_github(text)))
