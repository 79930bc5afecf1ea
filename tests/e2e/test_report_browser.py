"""The reports' pages in a real browser, opened as files: on a phone and on a desk, light and dark."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.reports.comparison import render_demo
from gateway.reports.fairness import render_fairness
from tests.support.e2e.browser import CHROMIUM, Browser
from tests.support.gateway.fairness_document import EMPTY_SERIES, make_report, make_series
from tests.support.gateway.report_pages import make_demo

pytestmark = pytest.mark.browser

LONG = "a-team-with-a-name-as-long-as-names-may-be-and-then-some-more"
WIDER = """[...document.querySelectorAll('body *')].filter(e => {
  const box = e.getBoundingClientRect();
  return (box.right > innerWidth + 1 || box.left < -1) && !e.closest('.scroll');
}).map(e => e.outerHTML.slice(0, 120))"""
OVERLAPS = """[...document.querySelectorAll('.chart .xs')].filter(axis => {
  const spans = [...axis.children].map(e => e.getBoundingClientRect()).sort((a, b) => a.left - b.left);
  return spans.some((box, i) => i && box.left < spans[i - 1].right + 4);
}).length"""
CONTRAST = """(() => {
  const parse = c => c.match(/[\\d.]+/g).slice(0, 3).map(Number);
  const light = c => { const [r, g, b] = c.map(v => (v /= 255) <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
    return .2126 * r + .7152 * g + .0722 * b; };
  const paper = light(parse(getComputedStyle(document.body).backgroundColor));
  return [...document.querySelectorAll('p, td, th, h1, h2, h3, dt, dd, a, figcaption, .ys span, .xs span, .row span')]
    .map(e => { const ink = light(parse(getComputedStyle(e).color));
      const ratio = (Math.max(ink, paper) + .05) / (Math.min(ink, paper) + .05);
      return [ratio, e.className + ' ' + e.textContent.slice(0, 30)]; })
    .filter(([ratio]) => ratio < 4.5).map(([, text]) => text);
})()"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    assert CHROMIUM, "install Debian's chromium"
    with Browser(tmp_path_factory.mktemp("chromium")) as browser:
        yield browser


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Pages that are as different as they get."""
    many = [LONG, *(f"team-{i:02}" for i in range(29))]
    drawn = {
        "three": render_fairness(
            make_report(["support", "dev", "reports"]), make_series(["support", "dev", "reports"])
        ),
        "many": render_fairness(make_report(many), make_series(many, 5000)),
        "empty": render_fairness(make_report([], is_empty=True), EMPTY_SERIES),
        "demo": render_demo(make_demo(team=LONG, answer="A scale. " * 40)),
    }
    directory = tmp_path_factory.mktemp("pages")
    for name, page in drawn.items():
        (directory / f"{name}.html").write_text(page, encoding="utf-8")
    return {name: directory / f"{name}.html" for name in drawn}


@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize("name", ["three", "many", "empty", "demo"])
def test_a_page_fits_fetches_nothing_and_names_its_figures(
    browser: Browser, pages: dict[str, Path], name: str, width: int
) -> None:
    address = pages[name].as_uri()
    browser.open(address, width)
    assert browser.run("[innerWidth, document.documentElement.scrollWidth <= innerWidth]") == [width, True]
    assert browser.run(WIDER) == []
    assert browser.run(OVERLAPS) == 0, "labels of an axis lie over each other"
    images = browser.images()
    assert len(images) == browser.run("document.querySelectorAll('figure').length")
    assert all(len(text) > 20 for text in images)
    assert [url for url in browser.fetched() if not url.startswith("data:")] == [address]
    assert browser.complaints() == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_readable_in_light_and_dark(browser: Browser, pages: dict[str, Path], scheme: str) -> None:
    browser.open(pages["three"].as_uri(), 1280, scheme=scheme)
    paper = browser.run("getComputedStyle(document.body).backgroundColor")
    assert paper == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 24, 28)"}[scheme]
    assert browser.run(CONTRAST) == []


def test_the_browser_tests_would_see_a_fault(browser: Browser, pages: dict[str, Path], tmp_path: Path) -> None:
    bad = tmp_path / "bad.html"
    added = '<img src="missing.png"><div style="width: 900px">x</div><script>console.error("no")</script>'
    bad.write_text(pages["three"].read_text("utf-8").replace("</main>", added + "</main>"), encoding="utf-8")
    browser.open(bad.as_uri(), 360)
    assert browser.run(WIDER) != []
    assert "" in browser.images()
    assert len(browser.fetched()) == 2
    assert any("no" in text for text in browser.complaints())
