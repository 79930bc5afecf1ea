"""CSV that is safe to open: no cell is a formula."""

import io
from typing import Any

import pytest

from gateway.reports.csv_export import write_csv


@pytest.mark.parametrize(
    ("value", "cell"),
    [
        ("=1+1", "'=1+1"),
        ("+1", "'+1"),
        ("-1", "'-1"),
        ("@SUM(A1)", "'@SUM(A1)"),
        ("  =1+1", "'  =1+1"),
        (" plain", " plain"),
        ("\tx", "'\tx"),
        ("\rx", '"\'\rx"'),
        (-1, "-1"),
        (-0.5, "-0.5"),
        (0.1 + 0.2, "0.30000000000000004"),
        (None, ""),
        ("a,b", '"a,b"'),
        ('say "hi"', '"say ""hi"""'),
        ("two\nlines", '"two\nlines"'),
    ],
)
def test_a_cell(value: Any, cell: str) -> None:
    out = io.StringIO(newline="")
    write_csv(out, ["x", "y"], [{"x": value, "y": 1}])
    assert out.getvalue() == f"x,y\r\n{cell},1\r\n"
