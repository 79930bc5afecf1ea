"""The demo's page: two runs beside each other."""

from gateway.reports.comparison import render_demo, table_rows
from tests.support.gateway.report_pages import make_demo


def test_the_demo_page_is_a_report_with_the_comparison_first() -> None:
    report = make_demo()
    report["runs"][1]["fairness"]["jain_weighted"] = 0.7654
    page = render_demo(report)
    assert "0.765" in page
    assert "The machine&#39;s speed differed by 25 %" in page
    assert "Times the first order&#39;s: support 1.00." in page
    assert page.index("Both orders side by side") < page.index("Longest pause of a request")
    assert "CC-BY-4.0" in page
    rows = table_rows(report)
    assert [(row["team"], row["policy"], row["jct_mean"], row["swaps"]) for row in rows] == [
        ("support", "fcfs", 2.0, 7),
        ("support", "eg-mlfq", 2.0, 7),
    ]


def test_a_failed_request_is_said_on_the_page() -> None:
    report = make_demo()
    report["runs"][1] |= {"failed": 2, "errors": ["HTTP 503: no"]}
    assert "2 requests failed; the first reason: HTTP 503: no" in render_demo(report)
