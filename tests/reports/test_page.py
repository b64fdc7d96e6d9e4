"""The page of a report in a browser: it fits any width, shows all sections, and needs no mouse."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from reports.browser import REQUIRED, browser, missing
from reports.steps import modules

WIDTHS = (380, 1000, 2000)
SCHEMES = ("light", "dark")
SECTIONS = ("step", "timeline", "memory", "collectives", "placements", "program")
pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("report") / "report.html"
    modules().report(path=path)
    return path.as_uri()


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as opened:
        yield opened


def opened(chromium: Any, url: str, width: int, scheme: str = "light") -> tuple[Any, list[str]]:
    """A page, and what it says to the console."""
    page = chromium.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: said.append(request.url) if request.url != url else None)
    page.goto(url)
    return page, said


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_it_fits_the_width_and_shows_every_section(
    chromium: Any, url: str, width: int, scheme: str
) -> None:
    page, said = opened(chromium, url, width, scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for name in SECTIONS:
        text = page.inner_text(f"#{name}")
        assert len(text) > 200, name
        assert not [word for word in ("undefined", "NaN", "null", "[object") if word in text]
    back = page.evaluate("getComputedStyle(document.body).backgroundColor")
    light = sum(int(x) for x in back[4:-1].split(",")) > 380
    assert light == (scheme == "light")
    page.click("#theme")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != back
    assert said == []
    page.close()


@pytest.mark.skipif(REQUIRED not in os.environ, reason="a time, which `make report-check` measures")
def test_it_is_painted_within_a_second(chromium: Any, url: str) -> None:
    page, _ = opened(chromium, url, 1000)
    paint = "performance.getEntriesByName('first-contentful-paint')[0]"
    page.wait_for_function(paint)
    assert page.evaluate(f"{paint}.startTime") < 1000
    page.close()


def test_every_control_is_reached_by_the_tab_key(chromium: Any, url: str) -> None:
    page, _ = opened(chromium, url, 1000)
    controls = "a, button:not([hidden]), input, summary, [tabindex='0']"
    count = f"""[...document.querySelectorAll("{controls}")].filter((x) => x.checkVisibility())"""
    wanted = page.evaluate(f"{count}.length")
    reached = set()
    for _ in range(wanted + 1):
        page.keyboard.press("Tab")
        reached.add(page.evaluate(f"{count}.indexOf(document.activeElement)"))
    assert reached >= {*range(wanted)}
    page.close()


def test_tables_have_captions_and_sections_their_headings(chromium: Any, url: str) -> None:
    page, _ = opened(chromium, url, 1000)
    assert page.evaluate("[...document.querySelectorAll('table')].every((x) => x.caption)")
    named = "document.getElementById(x.getAttribute('aria-labelledby')).tagName === 'H2'"
    assert page.evaluate(f"[...document.querySelectorAll('section')].every((x) => {named})")
    unnamed = """[...document.querySelectorAll('button, input, svg, canvas')].filter((x) =>
        !x.textContent.trim() && !x.ariaLabel && !x.labels?.length).length"""
    assert page.evaluate(unnamed) == 0
    page.close()


def test_the_search_keeps_lines_that_match(chromium: Any, url: str) -> None:
    page, _ = opened(chromium, url, 1000)
    page.fill("#ops input", "all_gather")
    lines = page.inner_text("#ops pre >> nth=0").split("\n")
    assert all("all_gather" in line for line in lines if line)
    assert page.locator("#ops mark").count() > 0
    page.fill("#ops input", "no op has this name")
    assert page.locator("#ops pre").count() == 0
    assert '0 lines with "no op has this name"' in page.inner_text("#ops")
    rows = page.locator("#sent tbody tr").count()
    page.fill("#sent input", "reduce_scatter")
    assert 0 < page.locator("#sent tbody tr").count() < rows
    page.close()


def test_arrow_keys_move_along_the_memory(chromium: Any, url: str) -> None:
    page, _ = opened(chromium, url, 1000)
    page.focus("#memory-chart svg")
    before = page.inner_text("#memory-chart .readout")
    page.keyboard.press("Home")
    assert page.inner_text("#memory-chart .readout") != before
    page.close()


def test_keys_choose_events_of_the_timeline_and_zoom(chromium: Any, url: str) -> None:
    page, _ = opened(chromium, url, 1000)
    page.focus("#timeline canvas")
    read = lambda: page.inner_text("#timeline .readout")
    seen = {read()}
    for key in ("ArrowRight", "ArrowRight", "ArrowDown", "ArrowRight"):
        page.keyboard.press(key)
        seen.add(read())
    assert len(seen) == 5 and " over " in read() and " at " in read()
    whole = page.locator("#timeline canvas").screenshot()
    page.keyboard.press("+")
    assert page.locator("#timeline canvas").screenshot() != whole
    page.keyboard.press("0")
    assert page.locator("#timeline canvas").screenshot() == whole
    page.close()


def test_a_column_of_figures_sorts_the_rows(chromium: Any, url: str) -> None:
    page, _ = opened(chromium, url, 1000)
    values = "[...document.querySelectorAll('#sent tbody tr:not(.detail) td:nth-child(2) span')]"
    sizes = lambda: page.evaluate(f"{values}.map((x) => Number(x.dataset.value))")
    first = sizes()
    page.focus("#sent th:nth-child(2) button")
    page.keyboard.press("Enter")
    down = sizes()
    page.keyboard.press("Enter")
    assert down == sorted(down, reverse=True) != first
    assert sizes() == sorted(sizes())
    page.close()
