"""Tests of the built documentation pages: every key and measure of a study is documented, and nothing is cut off in a window.

Also, every exception that a page names exists, every parameter has a text, and the glossary keeps its addresses.

``open_page`` opens a file in a headless Chromium. ``DESKTOP`` is the size of a laptop's window. ``PHONE`` is the size of a
phone's screen. A test marked ``thorough`` does not run in ``make test``.
"""

from __future__ import annotations

import builtins
import html
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from onelaunch import errors
from onelaunch.workbench.study import Criterion, Shape, Study, measure_names
from tests.browser import DESKTOP, PHONE, open_page

pytest.importorskip("furo", reason="needs the packages of the dependency group docs")
pytest.importorskip("myst_parser", reason="needs the packages of the dependency group docs")
filelock = pytest.importorskip("filelock")

pytestmark = pytest.mark.thorough  # building the pages takes half a minute

ROOT = Path(__file__).parents[1]
# Pages that a browser opens in windows of two sizes.
LOOKED_AT = [
    "index",
    "experiments",
    "start",
    "security",
    "decode",
    "nn",
    "operations/gla",
    "operations/swiglu",
    "operations/linear_rnn",
    "workbench",
    *sorted(f"notebook/{page.stem}" for page in (ROOT / "docs" / "notebook").glob("*.md")),
]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the pages that ``make check`` has built, or else build them once for all processes of a test run."""
    if given := os.environ.get("ONELAUNCH_TEST_PAGES"):
        return Path(given)
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    pages = folder / "docs-html"
    with filelock.FileLock(folder / "docs.lock"):
        if not (pages / "index.html").exists():
            arguments = ["-W", "--keep-going", "-q", "-b", "html", "-d", str(folder / "docs-trees"), "docs", str(pages)]
            done = subprocess.run([sys.executable, "-m", "sphinx", *arguments], cwd=ROOT, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
    return pages


def plain(markup: str) -> str:
    """Return the text of a piece of HTML."""
    return " ".join(html.unescape(re.sub(r"<[^>]+>", "", markup)).split())


def rows(page: str, heading: str) -> dict[str, list[str]]:
    """Return the rows of the table below the heading with this id: the first column's text to the texts of the others."""
    table = page[page.index(f'id="{heading}"') :].partition("<tbody>")[2].partition("</tbody>")[0]
    cells = ([plain(cell) for cell in re.findall(r"<td.*?>(.*?)</td>", row, re.DOTALL)] for row in table.split("</tr>"))
    return {first: rest for first, *rest in filter(None, cells)}


@pytest.mark.parametrize(
    ("model", "heading"),
    [(Study, "keys-of-a-study"), (Shape, "keys-of-a-shape-shapes"), (Criterion, "keys-of-a-criterion-criteria")],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_every_key_of_a_study_is_documented(built, model, heading):
    shown = rows((built / "workbench.html").read_text(encoding="utf-8"), heading)
    assert list(shown) == list(model.model_fields)
    for key, field in model.model_fields.items():
        meaning, kind, default, example = shown[key]
        assert len(meaning.split()) >= 2, key
        assert meaning.endswith("."), key
        assert kind, key
        assert example, key
        if field.is_required():
            assert default == "required", key
        elif (value := field.get_default(call_default_factory=True)) is None:
            assert default == "none", key
        else:
            # The page spells values as TOML does.
            spelt = {"True": "true", "False": "false", "()": "[]"}.get(str(value), str(value))
            assert default.strip('"') == spelt.replace("(", "[").replace(",)", "]").replace(")", "]").replace("'", '"'), key


def test_every_measure_is_documented(built):
    shown = rows((built / "workbench.html").read_text(encoding="utf-8"), "measures")
    assert list(shown) == list(measure_names())


def test_important_defaults_are_on_the_page(built):
    page = (built / "workbench.html").read_text(encoding="utf-8")
    assert rows(page, "keys-of-a-shape-shapes")["scale"][2] == '"full"'
    assert rows(page, "keys-of-a-shape-shapes")["dtype"][2] == '"float16"'
    assert rows(page, "keys-of-a-study")["rounds"][1:3] == ["integer, at least 3", "20"]
    assert "ONELAUNCH_STUDIES" in page


def raised(page: str) -> Iterator[str]:
    """Return every name in a list of exceptions."""
    for listed in re.findall(r"<dt[^>]*>Raises<.*?</dt>\s*<dd[^>]*>(.*?)</dd>", page, re.DOTALL):
        for entry in re.findall(r"<p>(.*?)</p>", listed, re.DOTALL):
            yield from plain(entry).partition(" – ")[0].split(", ")


def test_every_documented_exception_is_an_exception_class(built):
    named = {name for page in built.rglob("*.html") for name in raised(page.read_text(encoding="utf-8"))}
    assert {"ShapeError", "VariantUnsupported", "ArgumentError"} <= named
    for name in named:
        kind = getattr(errors, name, None) or getattr(builtins, name, None)
        assert isinstance(kind, type), name
        assert issubclass(kind, BaseException), name


def test_every_parameter_has_a_text(built):
    """The parameter ``H.`` was once read as the eighth entry of a list in letters."""
    for page in built.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert 'class="upperalpha' not in text, page.name
        assert not re.search(r"<li><p><strong>\w+</strong> –\s*(<ol|<ul|</p>)", text), page.name


def test_equations_keep_their_lines(built):
    blocks = re.findall(r"<pre>(.*?)</pre>", (built / "nn.html").read_text(encoding="utf-8"), re.DOTALL)
    layer = next(block for block in blocks if "logsigmoid(x W_1 W_2 + b)" in plain(block))
    first, second = html.unescape(re.sub(r"<[^>]+>", "", layer)).strip().splitlines()
    assert first.endswith("gate_logit_normalizer")
    assert second.strip().startswith("o = gla(")


def test_the_glossary_has_its_name_and_keeps_its_address(built):
    page = (built / "concepts.html").read_text(encoding="utf-8")
    assert re.search(r"<h1>Glossary<", page)
    assert 'id="words"' in page
    for word in ("operation", "oracle", "regime", "packed sequences", "epilogue", "measured peak", "roofline bound"):
        assert f'id="term-{word.capitalize().replace(" ", "-")}"' in page, word


@pytest.fixture(scope="module", params=[DESKTOP, PHONE], ids=["1280x900", "390x844"])
def window(built, request) -> Iterator[tuple[Any, tuple[int, int]]]:
    """Start one browser for all pages, with the window size of a laptop or a phone."""
    with open_page(built / "index.html", request.param) as driver:
        yield driver, request.param


# Script that returns by how many pixels the page is wider than the window (at most 0 if nothing is cut off), the beginnings of
# code blocks and tables that are wider than their place, and the number of all code blocks and tables.
TOO_WIDE = """
const open = [...document.querySelectorAll("details")]; open.forEach(each => each.open = true);
const column = document.querySelector("article").getBoundingClientRect();
const named = each => each.innerText.slice(0, 60).replaceAll("\\n", " ");
return {
    page: Math.max(document.documentElement.scrollWidth, document.body.scrollWidth) - innerWidth,
    code: [...document.querySelectorAll("pre")].filter(each => each.scrollWidth > each.clientWidth).map(named),
    tables: [...document.querySelectorAll("table")].filter(each => {
        const box = each.getBoundingClientRect(), wrapper = each.closest(".table-wrapper");
        return box.right > column.right + 1 || (wrapper && wrapper.scrollWidth > wrapper.clientWidth);
    }).map(named),
    seen: document.querySelectorAll("pre, table").length,
};
"""


@pytest.mark.browser
@pytest.mark.parametrize("page", LOOKED_AT)
def test_nothing_is_cut_off_at_the_margin(built, window, page):
    driver, size = window
    driver.get((built / f"{page}.html").as_uri())
    found = driver.execute_script(TOO_WIDE)
    assert found["page"] <= 0
    assert found["code"] == []
    if size == DESKTOP:  # on a phone a table scrolls in a box of its own
        assert found["tables"] == []
    assert found["seen"] > 0 or page == "notebook/index"
