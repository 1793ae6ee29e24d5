"""Tests of the built documentation pages: every key and measure of a study is documented, and every page can be read.

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


# Script that opens all folded parts and returns what is wrong with a page, by kind: by how many pixels it is wider than the
# window (a phone would shrink it); the beginnings of code blocks, and of tables, that are wider than their place; pictures that
# are missing; texts of pictures that are cut off or too small to read; links to a place of the page that does not exist; and ids
# that stand twice. On a phone tables scroll in a box of their own.
PROBLEMS = """
const [wide, phone] = arguments, all = selector => [...document.querySelectorAll(selector)];
all("details").forEach(each => each.open = true);
const column = (document.querySelector("article") || document.body).getBoundingClientRect();
const named = each => each.innerText.slice(0, 60).replaceAll("\\n", " ");
const texts = all("article svg text").map(each => [each, each.getBoundingClientRect()]).filter(([, box]) => box.width);
const outside = ([each, box]) => {
    const whole = each.closest("svg").getBoundingClientRect();
    return box.left < whole.left - 2 || box.right > whole.right + 2 || box.top < whole.top - 2 || box.bottom > whole.bottom + 2;
};
const ids = all("[id]").map(each => each.id);
const found = {
    width: Math.max(document.documentElement.scrollWidth, document.body.scrollWidth) - wide,
    code: all("pre").filter(each => each.scrollWidth > each.clientWidth).map(named),
    tables: phone ? [] : all("article table").filter(each => {
        const box = each.getBoundingClientRect(), wrapper = each.closest(".table-wrapper");
        return box.right > column.right + 1 || (wrapper && wrapper.scrollWidth > wrapper.clientWidth);
    }).map(named),
    pictures: all("img").filter(each => each.offsetParent && !(each.complete && each.naturalWidth)).map(each => each.src),
    outside: texts.filter(outside).map(([each]) => each.textContent),
    small: texts.filter(([, box]) => box.height < 10).map(([each]) => each.textContent),
    links: all('article a[href^="#"]').map(each => decodeURIComponent(each.getAttribute("href").slice(1)))
        .filter(target => target && !document.getElementById(target)),
    ids: ids.filter((id, index) => ids.indexOf(id) < index),
};
found.width = found.width > 0 ? [found.width] : [];
return Object.fromEntries(Object.entries(found).filter(([, problems]) => problems.length));
"""


def look_at(driver: Any, page: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield what is wrong with a page in the window of a laptop and on the screen of a phone; it is loaded once."""
    driver.get(page.as_uri())
    for size in (DESKTOP, PHONE):
        metrics = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": size == PHONE}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        yield f"{page.parent.name}/{page.stem} {size[0]}", driver.execute_script(PROBLEMS, size[0], size == PHONE)
    if errors_of_console := driver.get_log("browser"):
        yield f"{page.parent.name}/{page.stem} console", {"errors": errors_of_console}


@pytest.mark.browser
def test_every_page_can_be_read_in_a_window_and_on_a_phone(built, tmp_path):
    """One browser opens all pages. A page with every kind of problem shows that they would be found."""
    broken = tmp_path / "broken.html"
    broken.write_text(BROKEN, encoding="utf-8")
    pages = sorted(built.rglob("*.html"))
    assert len(pages) > 30
    with open_page(broken) as driver:
        driver.get_log("browser")
        window, phone, console = (problems for _, problems in look_at(driver, broken))
        assert set(window) == {"width", "code", "tables", "pictures", "outside", "small", "links", "ids"}
        assert set(phone) == set(window) - {"tables"}
        assert console["errors"]
        found = dict(each for page in pages for each in look_at(driver, page))
        assert {where: problems for where, problems in found.items() if problems} == {}
        assert_dark_differs(driver, built / "operations" / "gla.html")


BROKEN = """<!doctype html><meta name="viewport" content="width=device-width, initial-scale=1"><article style="width: 300px">
<div style="width: 3000px">wide</div><pre style="width: 90px; overflow: auto">a long line of code that is not broken</pre>
<table style="width: 2000px"><tr><td>cell</td></tr></table><img src="none.png" width="9" height="9"><a href="#nowhere">link</a>
<svg width="40" height="20"><text x="20" y="15" font-size="6">this text leaves its picture</text></svg>
<p id="a"></p><p id="a"></p></article><script>throw new Error("seen in the console")</script>"""
"""Page that has every kind of problem."""


def assert_dark_differs(driver: Any, page: Path) -> None:
    """Check that the texts and boxes of a page's pictures have other colours in dark mode than in light mode."""
    colours = """return ["figure.flow text", "figure.flow rect", "figure.plot text"].map(
        each => getComputedStyle(document.querySelector(each)).fill)"""
    found = []
    for scheme in ("light", "dark"):
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]})
        driver.get(page.as_uri())
        found.append(driver.execute_script(colours))
    assert all(light != dark for light, dark in zip(*found, strict=True))
