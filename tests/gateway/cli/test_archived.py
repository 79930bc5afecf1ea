"""Teams that are put away, and keys that end: what the commands and the reports say of them."""

import asyncio
import csv
import io
import json
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import delete, insert
from typer.testing import CliRunner, Result

from gateway.cli.main import app
from gateway.reports.fairness import render_fairness
from tenants import tables
from tenants.clock import from_epoch_us
from tenants.database import Database, sqlite_url
from tenants.reports.periods import parse_moment
from tenants.rows import ServiceSampleRow
from tests.support.tenants.stores import closed_row, open_entry

RESTORE = "terazi team set old --restore"
PERIOD = ["--from", "2026-05-08", "--to", "2026-05-14"]
DAYS = [f"2026-05-{day:02d}" for day in range(8, 14)]
BUSY = {"2026-05-09": 2, "2026-05-12": 1}


def run(data_dir: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, [*arguments, "--data-dir", str(data_dir)])


def ok(data_dir: Path, *arguments: str) -> Any:
    done = run(data_dir, *arguments, "--json")
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout)


async def fill(data_dir: Path) -> None:
    """Requests of teams 1 to 3 on two days, and of teams 1 to 3 a second of service; team 3 is then taken out."""
    database = Database.open(sqlite_url(data_dir / "terazi.db"))
    rows: list[dict[str, Any]] = []
    samples: list[dict[str, Any]] = []
    for team in (1, 2, 3):
        for day, count in BUSY.items():
            for number in range(count):
                at_us = parse_moment(f"{day}T12:00:00Z", "at") + number
                entry = open_entry(f"r{team}{day}{number}", team_id=team, key_id=team, received_at_us=at_us - 90_000)
                row = closed_row(entry, admitted_at_us=at_us - 80_000, finished_at_us=at_us)
                rows.append({name: value for name, value in asdict(row).items() if name in tables.ledger.c})
        sample = ServiceSampleRow(
            at_us=at_us, team_id=team, interval_ms=1000, served_us=1000, entitled_us=900, backlogged_ms=1000, waiting=1,
            running=1, lag_min_us=0.0, lag_max_us=1.0,
        )  # fmt: skip
        samples.append(asdict(sample))
    async with database.begin_immediate() as connection:
        await connection.execute(insert(tables.ledger), rows)
        await connection.execute(insert(tables.service_samples), samples)
        await connection.execute(delete(tables.projects).where(tables.projects.c.team_id == 3))
        await connection.execute(delete(tables.teams).where(tables.teams.c.id == 3))
    await database.dispose()


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Teams `live`, `old` (archived, with a key) and one that the store has lost. Nothing here writes to it."""
    path = tmp_path_factory.mktemp("archived") / "data"
    for name in ("live", "old", "lost"):
        ok(path, "team", "create", name)
    ok(path, "key", "create", "old")
    ok(path, "team", "set", "old", "--archive")
    asyncio.run(fill(path))
    return path


@pytest.mark.case("U08")
@pytest.mark.parametrize(
    "arguments",
    [
        ["team", "create", "old"],
        ["team", "create", "old", "--tier", "gold"],
        ["team", "set", "live", "--name", "old"],
        ["key", "create", "old"],
    ],
    ids=["create", "create_gold", "rename", "key"],
)
def test_when_a_name_is_archived_then_the_error_names_the_cure(data_dir: Path, arguments: list[str]) -> None:
    done = run(data_dir, *arguments, "--json")
    assert done.exit_code == 4
    error = json.loads(done.stdout)["error"]
    assert error["code"] == "team_archived" and "archived" in error["message"] and RESTORE in error["message"]
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.case("U08")
def test_when_teams_are_archived_then_the_list_tells_of_them(data_dir: Path) -> None:
    shown = run(data_dir, "team", "list").stdout
    assert " old " not in shown and "1 archived not shown: terazi team list --archived" in shown
    assert [team["name"] for team in ok(data_dir, "team", "list")["data"]] == ["live"]
    assert [team["name"] for team in ok(data_dir, "team", "list", "--archived")["data"]] == ["live", "old"]
    assert "not shown" not in run(data_dir, "team", "list", "--archived").stdout
    assert [key["status"] for key in ok(data_dir, "key", "list")["data"]] == ["team_archived"]


@pytest.mark.case("U08")
def test_when_a_team_is_archived_or_gone_then_usage_marks_it(data_dir: Path) -> None:
    expected = {"live": "active", "old": "archived", "team 3": "gone"}
    report = ok(data_dir, "usage", "report", *PERIOD)
    assert {line["team"]: line["team_status"] for line in report["data"]} == expected
    text = run(data_dir, "usage", "report", *PERIOD, "--format", "csv").stdout_bytes.decode()
    rows = list(csv.DictReader(io.StringIO(text, newline="")))
    assert {row["team"]: row["team_status"] for row in rows} == expected
    table = run(data_dir, "usage", "report", *PERIOD).stdout
    assert "old (archived)" in table and "team 3 (gone)" in table and "live (" not in table
    by_tier = ok(data_dir, "usage", "report", *PERIOD, "--by", "tier")["data"]
    assert all("team_status" not in line for line in by_tier)


@pytest.mark.case("U08")
def test_when_a_team_is_archived_or_gone_then_fairness_marks_it(data_dir: Path) -> None:
    report = ok(data_dir, "fairness", "report", *PERIOD)
    statuses = {line["team"]: line["team_status"] for line in report["data"]}
    assert statuses == {"live": "active", "old": "archived", "team 3": "gone"}
    table = run(data_dir, "fairness", "report", *PERIOD).stdout
    assert "old (archived)" in table and "team 3 (gone)" in table and "live (" not in table
    page = render_fairness(report, report["series"])
    assert "old (archived)" in page and "team 3 (gone)" in page


@pytest.mark.case("H03")
@pytest.mark.parametrize("by", ["team,day", "day,team"])
def test_when_days_are_idle_then_each_team_has_lines_of_zeros(data_dir: Path, by: str) -> None:
    report = ok(data_dir, "usage", "report", "--by", by, *PERIOD)
    teams = ["live", "old", "team 3"]
    found = {(line["team"], line["day"]): line["requests"] for line in report["data"]}
    assert found == {(team, day): BUSY.get(day, 0) for team in teams for day in DAYS}
    assert len(report["data"]) == len(found)
    text = run(data_dir, "usage", "report", "--by", by, *PERIOD, "--format", "csv").stdout_bytes.decode()
    rows = list(csv.DictReader(io.StringIO(text, newline="")))
    assert [(row["team"], row["day"], int(row["requests"])) for row in rows] == [
        (line["team"], line["day"], line["requests"]) for line in report["data"]
    ]
    idle = next(row for row in rows if row["day"] == "2026-05-10")
    assert (idle["device_seconds"], idle["output_tokens"], idle["jct_p50_seconds"]) == ("0.0", "0", "")
    assert sum(
        "2026-05-10" in line for line in run(data_dir, "usage", "report", "--by", by, *PERIOD).stdout.splitlines()
    )


@pytest.mark.case("H06")
def test_when_a_key_gets_a_date_then_the_whole_moment_is_shown(tmp_path: Path) -> None:
    ok(tmp_path, "team", "create", "t")
    tomorrow = (datetime.now(UTC) + timedelta(days=2)).date().isoformat()
    moment = f"{tomorrow}T00:00:00Z"
    assert ok(tmp_path, "key", "create", "t", "--expires-at", tomorrow)["expires_at"] == moment
    assert f"expires_at  {moment}" in run(tmp_path, "key", "create", "t", "--expires-at", tomorrow).stdout
    naive = ok(tmp_path, "key", "create", "t", "--expires-at", f"{tomorrow}T12:30")
    assert naive["expires_at"] == f"{tomorrow}T12:30:00Z"
    zoned = ok(tmp_path, "key", "create", "t", "--expires-at", f"{tomorrow}T12:30+03:00")
    assert zoned["expires_at"] == f"{tomorrow}T09:30:00Z"
    assert {key["expires_at"] for key in ok(tmp_path, "key", "list")["data"]} >= {moment, f"{tomorrow}T09:30:00Z"}
    assert "expires_at" not in ok(tmp_path, "key", "create", "t")


@pytest.mark.case("H06")
@pytest.mark.parametrize("suffix", ["", "T00:00", "T00:00:00+00:00"])
def test_when_a_key_would_end_today_then_the_moment_is_named(tmp_path: Path, suffix: str) -> None:
    ok(tmp_path, "team", "create", "t")
    today = datetime.now(UTC).date().isoformat()
    done = run(tmp_path, "key", "create", "t", "--expires-at", f"{today}{suffix}")
    assert done.exit_code == 2
    day = from_epoch_us(parse_moment(today, "x")).date().isoformat()
    assert f"begins at {day}T00:00:00Z, which is past" in done.stderr
    assert "A date alone is its first moment in UTC" in done.stderr
    assert ok(tmp_path, "key", "list")["data"] == []


@pytest.mark.case("H06")
@pytest.mark.parametrize("report", ["usage", "fairness"])
def test_when_a_report_gets_dates_then_it_shows_the_moments(data_dir: Path, report: str) -> None:
    period = ["--from", "2026-05-08", "--to", "2026-05-14T06:00", "--tz", "Europe/Istanbul"]
    shown = ok(data_dir, report, "report", *period)
    assert (shown["from"], shown["to"]) == ("2026-05-08T00:00:00+03:00", "2026-05-14T06:00:00+03:00")
    assert (
        f"{report} 2026-05-08T00:00:00+03:00 - 2026-05-14T06:00:00+03:00"
        in run(data_dir, report, "report", *period).stdout
    )
