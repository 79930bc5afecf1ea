"""CSV as spreadsheets and pandas read it (RFC 4180): CRLF, a header row, quotes where they are needed.

Text that a spreadsheet would take for a formula is made text by an apostrophe before it (OWASP, "CSV Injection");
numbers stay numbers, also negative ones. None is an empty cell.
"""

import csv
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TextIO

_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")


def write_csv(out: TextIO, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """The header and one line for each row; a column that a row lacks is empty. `out` must not translate newlines."""
    writer = csv.writer(out, lineterminator="\r\n")
    writer.writerow([_cell(column) for column in columns])
    for row in rows:
        writer.writerow([_cell(row.get(column)) for column in columns])


def write_usage_csv(out: TextIO, report: Mapping[str, Any]) -> None:
    """A usage report: a header with the JSON document's keys and one line for each of its data rows, also when there is
    none; the period and its time zone are in every line. Lines by team also
    have what became of the team.

    There is no total line, so a column may be summed; the total is the one line of a report by nothing.
    """
    period = {name: report[name] for name in ("from", "to", "time_zone")}
    lines = report["data"] if report["by"] else [report["total"]]
    status = ["team_status"] if "team" in report["by"] else []
    write_csv(out, [*report["by"], *report["total"], *status, *period], [{**line, **period} for line in lines])


def _cell(value: Any) -> Any:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)  # all digits, so that sums come out
    text = str(value)
    return "'" + text if text.lstrip(" ").startswith(_FORMULA) else text
