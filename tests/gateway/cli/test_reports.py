"""`terazi usage report` and `terazi fairness report`: every format says the same, and CSV is safe to open."""

import asyncio
import csv
import io
import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest
from sqlalchemy import insert
from typer.testing import CliRunner, Result

from gateway.cli.main import app
from gateway.command import cell as shown_cell
from tenants import tables
from tenants.database import Database, sqlite_url
from tenants.reports.periods import parse_moment
from tenants.rows import InterferenceRow, ServiceSampleRow, StepSampleRow
from tests.support.tenants.stores import closed_row, open_entry

DAY = ["--from", "2026-05-10", "--to", "2026-05-11"]
NOON = parse_moment("2026-05-10T12:00:00Z", "from")
LATE = parse_moment("2026-05-10T22:30:00Z", "from")  # the next day in Istanbul
FORMULA = '=HYPERLINK("http://x")'


def run(data_dir: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, [*arguments, "--data-dir", str(data_dir)])


def ok(data_dir: Path, *arguments: str) -> str:
    done = run(data_dir, *arguments)
    assert done.exit_code == 0, done.stderr
    return done.stdout_bytes.decode()  # `stdout` has CRLF translated


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two teams, four requests on one day and samples of four seconds. Nothing in this module writes to it."""
    path = tmp_path_factory.mktemp("reports") / "data"
    teams = {}
    for name, tier in (("search", "gold"), ("batch", "bronze")):
        teams[name] = json.loads(ok(path, "team", "create", name, "--tier", tier, "--json"))
        ok(path, "key", "create", name, "--json")
    asyncio.run(_fill(path))
    return path


async def _fill(path: Path) -> None:
    database = Database.open(sqlite_url(path / "terazi.db"))
    rows = []
    for number, (team, tier, at_us, model, device_us) in enumerate(
        [
            (1, "gold", NOON, "tiny", 1_500_000),
            (1, "gold", LATE, "tiny", 2_500_000),
            (2, "bronze", NOON, FORMULA, 250_000),
            (2, "bronze", NOON + 1, "tiny", 750_000),
        ]
    ):
        entry = open_entry(
            f"r{number}",
            team_id=team,
            key_id=team,
            project_id=team,
            tier=tier,
            model=model,
            received_at_us=at_us - 60_000,
        )
        row = closed_row(
            entry, admitted_at_us=at_us - 50_000, finished_at_us=at_us, device_us=device_us, num_swaps=team
        )
        rows.append({name: value for name, value in asdict(row).items() if name in tables.ledger.c})
    samples, pairs, steps = [], [], []
    for second in range(4):
        at_us = NOON + second * 1_000_000
        for team, served in ((1, 700_000), (2, 300_000)):
            sample = ServiceSampleRow(
                at_us=at_us, team_id=team, interval_ms=1000, served_us=served, entitled_us=500_000, backlogged_ms=1000,
                waiting=1, running=1, lag_min_us=0.0, lag_max_us=team * 1e5, promotions=team - 1, lag_bound_us=2e6,
                budget_us=80_000, pause_bound_us=4_000_000, longest_pause_us=1_000_000 * team,
            )  # fmt: skip
            samples.append(asdict(sample))
        pairs.append(asdict(InterferenceRow(at_us=at_us, causer_id=1, victim_id=2, preemptions=3, swaps_out=1,
                                            bytes_out=4096, billed_us=10_000)))  # fmt: skip
        steps.append(asdict(StepSampleRow(at_us=at_us, interval_ms=1000, stall_us=2_000)))
    async with database.begin_immediate() as connection:
        for table, values in ((tables.ledger, rows), (tables.service_samples, samples),
                              (tables.interference_samples, pairs), (tables.step_samples, steps)):  # fmt: skip
            await connection.execute(insert(table), values)
    await database.dispose()


def parsed(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text, newline="")))


@pytest.mark.parametrize("by", ["team", "team,tier,model,day,key", "day", "key", ""])
def test_csv_has_the_rows_and_the_keys_of_the_json(data_dir: Path, by: str) -> None:
    document = json.loads(ok(data_dir, "usage", "report", "--by", by, *DAY, "--format", "json"))
    text = ok(data_dir, "usage", "report", "--by", by, *DAY, "--format", "csv")
    rows = document["data"] if by else [document["total"]]
    assert text.count("\r\n") == len(rows) + 1
    period = {name: document[name] for name in ("from", "to", "time_zone")}
    assert text.splitlines()[0].split(",") == [*rows[0], *period]
    for row, line in zip(rows, parsed(text), strict=True):
        for name, value in {**row, **period}.items():
            shown = line[name].removeprefix("'") if isinstance(value, str) else line[name]
            assert shown == ("" if value is None else str(value)), name


def test_the_csv_sums_to_the_ledger(data_dir: Path) -> None:
    lines = parsed(ok(data_dir, "usage", "report", "--by", "team,model,day", *DAY, "--format", "csv"))
    assert sum(float(line["device_seconds"]) for line in lines) == 5.0
    assert sum(int(line["swaps"]) for line in lines) == 6


@pytest.mark.case("D15")
def test_a_name_that_a_spreadsheet_would_run_is_text(data_dir: Path) -> None:
    lines = parsed(ok(data_dir, "usage", "report", "--by", "model", *DAY, "--format", "csv"))
    assert [line["model"] for line in lines] == ["'" + FORMULA, "tiny"]


def test_an_empty_period_says_so_and_its_csv_is_a_header(data_dir: Path) -> None:
    empty = ["--from", "2026-04-01", "--to", "2026-04-02"]
    assert "no request ended in this period" in ok(data_dir, "usage", "report", *empty)
    text = ok(data_dir, "usage", "report", *empty, "--format", "csv")
    assert text.startswith("team,requests,ok,") and text.count("\r\n") == 1
    (total,) = parsed(ok(data_dir, "usage", "report", *empty, "--by", "", "--format", "csv"))
    assert (total["requests"], total["ttft_p50_seconds"]) == ("0", "")
    assert "nothing was served" in ok(data_dir, "fairness", "report", *empty)


def test_days_are_those_of_the_zone(data_dir: Path) -> None:
    wide = ["--from", "2026-05-10", "--to", "2026-05-12", "--by", "day", "--json"]
    here = json.loads(ok(data_dir, "usage", "report", *wide, "--tz", "Europe/Istanbul"))
    assert here["time_zone"] == "Europe/Istanbul"
    assert [(row["day"], row["requests"]) for row in here["data"]] == [("2026-05-10", 3), ("2026-05-11", 1)]
    there = json.loads(ok(data_dir, "usage", "report", *wide))
    assert [(row["day"], row["requests"]) for row in there["data"]] == [("2026-05-10", 4), ("2026-05-11", 0)]
    assert here["from"].startswith("2026-05-10T00:00:00")
    refused = run(data_dir, "usage", "report", "--tz", "Mars/Olympus")
    assert (refused.exit_code, "time zone" in refused.stderr) == (2, True)


def test_the_table_has_units_a_total_and_no_column_that_nobody_needs(data_dir: Path) -> None:
    lines = [line for line in ok(data_dir, "usage", "report", *DAY).splitlines() if line.strip()]
    assert lines[0] == "usage 2026-05-10T00:00:00Z - 2026-05-11T00:00:00Z UTC"
    assert "device seconds" in lines[1] and "swaps" in lines[1]
    assert "timeout" not in lines[1] and "recomputes" not in lines[1]
    assert [line.split()[0] for line in lines[3:] if "─" not in line] == ["batch", "search", "TOTAL"]
    assert "─" in lines[-2], "a rule before the total"
    assert lines[-1].split()[1:3] == ["4", "4"]


def test_the_fairness_report_is_the_same_in_every_format(data_dir: Path, tmp_path: Path) -> None:
    document = json.loads(ok(data_dir, "fairness", "report", *DAY, "--json"))
    assert [row["team"] for row in document["data"]] == ["batch", "search"]
    assert document["totals"] == {
        "preemptions": 12, "swaps_out": 4, "swaps_in": 0, "recomputes": 0, "bytes_out": 16384, "bytes_in": 0,
        "stall_seconds": 0.008, "replayed_tokens": 0, "promotions": 4,
    }  # fmt: skip
    assert set(document["series"]["served"]) == {"batch", "search"}
    table = ok(data_dir, "fairness", "report", *DAY)
    page = ok(data_dir, "fairness", "report", *DAY, "--format", "html")
    jain = f"{document['jain_weighted']:.3f}"
    assert f"weighted Jain index: {jain}" in table and jain in page
    assert re.search(r"search +batch +12 +4 +0 +0 +0\.040", table)
    assert "lag: most 0.200 s, bound 2.000 s: ok" in table
    out = tmp_path / "page.html"
    done = run(data_dir, "fairness", "report", *DAY, "--format", "html", "--out", str(out))
    assert (done.exit_code, done.stdout) == (0, "")
    assert out.read_text("utf-8") == page
    assert page.startswith("<!doctype html>") and page.rstrip().endswith("</html>")


@pytest.mark.parametrize("format_", ["table", "json", "csv"])
def test_a_report_goes_to_a_file_whole_or_not_at_all(data_dir: Path, tmp_path: Path, format_: str) -> None:
    out = tmp_path / "report"
    arguments = ["usage", "report", *DAY, "--format", format_]
    run(data_dir, *arguments, "--out", str(out))
    assert out.read_bytes().decode() == ok(data_dir, *arguments)
    refused = run(data_dir, *arguments, "--out", str(tmp_path / "none" / "report"))
    assert refused.exit_code == 1
    assert "cannot be written" in refused.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["report"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["usage", "report", "--format", "html"],
        ["fairness", "report", "--format", "csv"],
        ["usage", "report", "--by", "x"],
    ],
)
def test_what_is_not_offered_is_a_usage_error(data_dir: Path, arguments: list[str]) -> None:
    assert run(data_dir, *arguments).exit_code == 2


def test_moments_of_a_zone_keep_their_offset() -> None:
    assert shown_cell("2026-05-10T03:00:00.000001+03:00") == "2026-05-10T03:00:00+03:00"
