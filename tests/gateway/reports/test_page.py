"""Every page: text stays text, and nothing is loaded from outside."""

import pytest

from gateway.reports.comparison import render_demo
from tests.support.gateway.report_pages import EVIL, TEAMS, Reader, fairness, make_demo


@pytest.mark.case("D15")
def test_names_and_answers_are_text_in_the_pages() -> None:
    answer = '"><img src=x onerror=alert(1)>'
    for page in (render_demo(make_demo(team=EVIL, answer=answer)), fairness([EVIL, 'a"onload="x', "c&d"])):
        tags = {tag for tag, _ in Reader(page).tags}
        assert tags.isdisjoint({"script", "img"})
        assert not any(name.startswith("on") for _, attributes in Reader(page).tags for name in attributes)
        assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page


@pytest.mark.parametrize("page", [render_demo(make_demo()), fairness(TEAMS), fairness([f"t{i}" for i in range(40)])])
def test_a_page_needs_nothing_from_outside_and_names_its_figures(page: str) -> None:
    reader = Reader(page)
    addresses = [value for _, at in reader.tags for name, value in at.items() if name in ("src", "href", "action")]
    assert addresses
    assert all(address.startswith(("#", "data:")) for address in addresses)
    assert "url(" not in page and "@import" not in page
    images = [attributes for _, attributes in reader.tags if attributes.get("role") == "img"]
    figures = [tag for tag, _ in reader.tags if tag == "figure"]
    assert len(images) == len(figures) == len(reader.links()) > 6
    assert all(len(attributes["aria-label"]) > 20 for attributes in images)
    anchors = {attributes["id"] for _, attributes in reader.tags if "id" in attributes}
    assert {address[1:] for address in addresses if address.startswith("#")} <= anchors
