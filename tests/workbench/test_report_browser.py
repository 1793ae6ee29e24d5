"""Tests of reports in a browser: the first screen, the margins, and no script.

A page is a study's report. Its first screen, which needs no scrolling, has a section ``decision`` and a section ``found`` with
the tables of the fastest variants and a plot. ``boxes`` returns the rectangles of the elements that a CSS selector matches, in
pixels. The tests are skipped without a browser.

``open_page`` opens a file in a headless Chromium. ``DESKTOP`` is the size of a laptop's window. ``PHONE`` is the size of a
phone's screen. ``on_cpu`` makes up a run on a CPU. A test marked ``thorough`` does not run in ``make test``. ``thorough_but``
marks all parameters but the named ones ``thorough``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from onelaunch.workbench.report import page
from onelaunch.workbench.report.overview import collect, entry_of
from onelaunch.workbench.report.overview_forms import render_html, with_reports
from onelaunch.workbench.result import Result
from tests.browser import DESKTOP, PHONE, boxes, open_page
from tests.thorough import thorough_but
from tests.workbench import hostile
from tests.workbench.test_report_headline import on_cpu

pytestmark = pytest.mark.browser

H200 = Path(__file__).parents[2] / "results" / "nvidia-h200"
"""Folder of committed results."""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Path]]:
    """Start one browser for the module; return it with the folder of the pages.

    The pages are ``h200`` (a committed result), ``cpu`` (a made-up run of the same study on a CPU, which quotes the former) and
    ``hostile`` (every name and text ends with an attack that sets the title to PWNED), and ``overview`` (of results in a folder).
    """
    folder = tmp_path_factory.mktemp("pages")
    with open_page(written("cpu", folder)) as driver:
        yield driver, folder


def overview(folder: Path) -> str:
    """Return the page on a folder with a damaged file and two committed results, and on a hostile result made in Python."""
    (folder / "damaged.json").write_text("{", encoding="utf-8")
    for name in ("058-gla-layer", "058-output-chain"):
        Result.load(H200 / f"{name}.json").save(folder / f"{name}.json")
    found = collect(folder)[0]
    found = replace(found, entries=(*found.entries, entry_of(hostile.hostile(), "hostile.json")))
    return render_html(with_reports(found, {"058-gla-layer.json": "058-gla-layer"}))


PAGES = {"h200": lambda: Result.load(H200 / "040-linear-rnn.json"), "cpu": on_cpu, "hostile": hostile.hostile}
"""Functions that return the results of the pages."""


def written(name: str, folder: Path) -> Path:
    """Return the path of a page, which is rendered at the first call: the committed result has plots that take seconds."""
    path = folder / f"{name}.html"
    if not path.exists():
        if name == "overview":
            results = folder / "results"
            results.mkdir()
            text = overview(results)
        else:
            text = page.render(PAGES[name]())
        path.write_text(text, encoding="utf-8")
    return path


def show(browser: tuple[Any, Path], name: str, size: tuple[int, int], scheme: str = "light") -> Any:
    """Open a page in a window of this width and height, in light or dark mode, and return the browser's driver."""
    driver, folder = browser
    metrics = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": size == PHONE}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]})
    driver.get(written(name, folder).as_uri())
    return driver


each_run = pytest.mark.parametrize("name", [pytest.param("h200", marks=pytest.mark.thorough), "cpu"])


def inside(box: dict[str, float], size: tuple[int, int]) -> bool:
    return box["left"] >= 0 and box["top"] >= 0 and box["right"] <= size[0] and box["bottom"] <= size[1]


@each_run
def test_the_first_screen_holds_decision_table_and_picture(browser: tuple[Any, Path], name: str) -> None:
    driver = show(browser, name, DESKTOP)
    for selector in ("section.decision", ".found .tables table", ".found svg"):
        found = boxes(driver, selector)
        assert found, selector
        assert all(inside(box, DESKTOP) for box in found), selector
    (decision,), (table, *_) = boxes(driver, "section.decision"), boxes(driver, ".found .tables table")
    assert decision["bottom"] < table["top"]


@each_run
def test_the_first_screen_of_a_phone_holds_the_decision_and_the_start_of_the_table(browser: tuple[Any, Path], name: str) -> None:
    driver = show(browser, name, PHONE)
    (decision,) = boxes(driver, "section.decision")
    assert inside(decision, PHONE)
    heads, rows = boxes(driver, ".found thead tr"), boxes(driver, ".found tbody tr")
    assert heads[0]["bottom"] <= PHONE[1]
    assert rows[0]["bottom"] <= PHONE[1]


# Returns the elements that are cut off at a side of the window, or whose contents are wider than they are. Parts of a page that
# scroll on their own may be wider.
OVERFLOWING = """
const cut = [];
for (const e of document.querySelectorAll('body *')) {
  if (e.closest('.scroll') || e.closest('svg')) continue;
  const box = e.getBoundingClientRect();
  const wide = e.clientWidth > 0 && e.scrollWidth > e.clientWidth + 1 && getComputedStyle(e).display !== 'inline';
  if (box.right > document.documentElement.clientWidth + 1 || box.left < -1 || wide)
    cut.push(e.tagName + '.' + e.className + ': ' + e.textContent.slice(0, 60));
}
return cut;
"""


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
@pytest.mark.parametrize("name", [*thorough_but("cpu", "hostile", of=PAGES), "overview"])
def test_nothing_is_cut_off_at_the_margin(browser: tuple[Any, Path], name: str, size: tuple[int, int]) -> None:
    driver = show(browser, name, size)
    driver.execute_script("document.querySelectorAll('details').forEach(each => each.open = true)")
    assert driver.execute_script("return document.documentElement.scrollWidth <= innerWidth")
    assert driver.execute_script("return innerWidth") == size[0]  # a phone shrinks a page that is too wide
    assert driver.execute_script(OVERFLOWING) == []
    assert driver.get_log("browser") == []  # no error in the console


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_an_overview_links_each_result_and_runs_no_script(browser: tuple[Any, Path], scheme: str) -> None:
    """A link in the first table leads to the section of the result, and from there one leads to its report if it has one."""
    driver = show(browser, "overview", PHONE, scheme)
    links = [each.get_attribute("href") for each in driver.find_elements("css selector", "table a")]
    assert len(links) == 3
    for link in links:
        assert driver.find_elements("id", link.partition("#")[2])
    (whole,) = driver.find_elements("css selector", "section > p > a")
    assert whole.get_attribute("href").endswith("/058-gla-layer/report.html")
    assert driver.execute_script("return document.scripts.length") == 0
    assert driver.title != "PWNED"
    assert "damaged.json" in driver.find_element("css selector", "main").text
    (paper, ink) = driver.execute_script(
        "const style = getComputedStyle(document.body); return [style.backgroundColor, style.color]"
    )
    dark = scheme == "dark"
    assert (sum(map(int, paper[4:-1].split(","))) < sum(map(int, ink[4:-1].split(",")))) == dark


@pytest.mark.thorough
def test_the_columns_of_the_fastest_variants_are_visible(browser: tuple[Any, Path]) -> None:
    """The tables of the first screen need no horizontal scrolling."""
    driver = show(browser, "h200", DESKTOP)
    assert driver.execute_script(
        "return [...document.querySelectorAll('.found .scroll')].every(each => each.scrollWidth <= each.clientWidth)"
    )


@pytest.mark.thorough
def test_labels_of_a_plot_are_inside_it(browser: tuple[Any, Path]) -> None:
    driver = show(browser, "h200", DESKTOP)
    outside = driver.execute_script(
        """return [...document.querySelectorAll('svg')].flatMap(svg => { const all = svg.getBoundingClientRect();
           return [...svg.querySelectorAll('text')].filter(each => { const box = each.getBoundingClientRect();
             return box.left < all.left - 2 || box.right > all.right + 2; }).map(each => each.textContent); })"""
    )
    assert outside == []


def test_a_script_in_a_name_does_not_run(browser: tuple[Any, Path]) -> None:
    driver = show(browser, "hostile", DESKTOP)
    assert "PWNED" in driver.title  # the page's title is the name, unchanged
    assert driver.title != "PWNED"
    assert driver.execute_script("return document.scripts.length") == 0
    handlers = (
        "return [...document.querySelectorAll('*')].flatMap(e => e.getAttributeNames()).filter(name => name.startsWith('on'))"
    )
    assert driver.execute_script(handlers) == []
    links = driver.execute_script("return [...document.querySelectorAll('a, [href]')].map(each => each.getAttribute('href'))")
    assert all(link.startswith(("#", "https://")) for link in links)
    # An injected onload handler would run now.
    for element in driver.find_elements("css selector", "svg, h1, figcaption")[:5]:
        driver.execute_script("arguments[0].dispatchEvent(new Event('load'))", element)
    assert driver.title != "PWNED"


def test_an_injected_script_is_blocked(browser: tuple[Any, Path]) -> None:
    """The page's content security policy forbids scripts, should one ever get into a page."""
    driver, folder = browser
    text = written("cpu", folder).read_text(encoding="utf-8")
    broken = text.replace("<main>", "<main><script>document.title = 'RAN'</script><img src=x onerror=\"document.title = 'RAN'\">")
    assert broken != text
    (folder / "broken.html").write_text(broken, encoding="utf-8")
    show(browser, "broken", DESKTOP)
    assert driver.title != "RAN"
    assert driver.get_log("browser")  # the console says what was blocked


def test_dark_and_light_modes_differ_and_are_legible(browser: tuple[Any, Path]) -> None:
    colours = "const style = getComputedStyle(document.body); return [style.backgroundColor, style.color]"
    light = show(browser, "cpu", DESKTOP).execute_script(colours)
    dark = show(browser, "cpu", DESKTOP, "dark").execute_script(colours)
    ink = "return getComputedStyle(document.querySelector('svg text')).fill"
    assert light == dark[::-1] or (light[0] != dark[0] and light[1] != dark[1])
    assert browser[0].execute_script(ink) == dark[1]


def test_an_option_is_not_broken_between_lines(browser: tuple[Any, Path]) -> None:
    """A command-line option such as ``--scale full`` is one rectangle, also on a narrow screen."""
    driver = show(browser, "cpu", PHONE)
    lines = "return [...document.querySelectorAll('.option')].map(each => each.getClientRects().length)"
    found = driver.execute_script(lines)
    assert found
    assert set(found) == {1}
