"""The CPU time of reports over one day: a sample a second of 20 teams (1.7 million rows), and 200,000 requests. JSON.

    python benchmarks/report_queries.py [--teams 20] [--requests 200000]

Times are CPU seconds of this process, which another load on the machine hardly changes. Reading the service samples is
timed twice: with samples by the second only, as after an upgrade, and with the hours summed, as on every other day. The
database lies in a temporary directory.
"""

import argparse
import asyncio
import json
import random
import sqlite3
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from sqlalchemy.ext.asyncio import AsyncConnection

from tenants import migrate, reports
from tenants.database import Database, sqlite_url
from tenants.reports import samples
from tenants.reports.periods import Period
from tenants.retention import Retention
from tenants.rows import InterferenceRow, LedgerRow, ServiceSampleRow, StepSampleRow

HOUR_US = 3_600_000_000
DAY_US = 24 * HOUR_US
START_US = 1_780_000_000_000_000 // DAY_US * DAY_US
TIERS = ("gold", "silver", "bronze")


def ledger_rows(teams: int, requests: int) -> Iterator[LedgerRow]:
    """The ledger rows of one day, in the order in which the requests finished."""
    rng = random.Random(1)
    for number, at_us in enumerate(sorted(START_US + rng.randrange(DAY_US) for _ in range(requests))):
        team = 1 + rng.randrange(teams)
        yield LedgerRow(
            request_id=f"r{number}",
            key_id=team,
            key_public_id="A" * 12,
            project_id=team,
            project="default",
            team_id=team,
            team=f"team{team}",
            tier=TIERS[team % 3],
            model="smollm2-135m",
            engine_id="engine",
            engine_epoch=1,
            endpoint="chat.completions",
            stream=True,
            received_at_us=at_us - 900_000,
            admitted_at_us=at_us - 890_000,
            started_at_us=at_us - rng.randrange(500_000, 800_000),
            first_token_at_us=at_us - rng.randrange(500_000),
            finished_at_us=at_us,
            prompt_tokens=rng.randrange(1, 900),
            output_tokens=rng.randrange(300),
            max_tokens=300,
            device_us=50_000,
            work_us=rng.randrange(1, 90_000),
            outcome="ok",
        )


def second_rows(teams: int) -> Iterator[tuple[list[ServiceSampleRow], InterferenceRow, StepSampleRow]]:
    """The samples of every second of the day. In each, about two thirds of the teams are backlogged."""
    for second in range(24 * 3600):
        at_us = START_US + second * 1_000_000 + 1
        service = [
            ServiceSampleRow(
                at_us=at_us,
                team_id=team,
                interval_ms=1000,
                served_us=50_000,
                entitled_us=50_000,
                backlogged_ms=1000 if (second // 60 + team) % 3 else 0,
                waiting=1,
                running=1,
                lag_min_us=0.0,
                lag_max_us=1e5,
            )
            for team in range(1, teams + 1)
        ]
        pair = InterferenceRow(at_us=at_us, causer_id=1 + second % teams, victim_id=1 + second * 7 % teams, swaps_out=1)
        yield service, pair, StepSampleRow(at_us=at_us, interval_ms=1000, stall_us=10)


def fill(path: Path, teams: int, requests: int) -> int:
    """Fill the database at `path`. Returns how many rows of samples by the second it has."""

    def insert(table: str, rows: Iterator[Any], kind: type[Any]) -> int:
        names = [field.name for field in fields(kind)]
        statement = f"INSERT INTO {table} ({', '.join(names)}) VALUES ({', '.join('?' * len(names))})"
        return connection.executemany(statement, ([getattr(row, name) for name in names] for row in rows)).rowcount

    with sqlite3.connect(path) as connection:
        connection.executemany(
            "INSERT INTO teams (id, name, tier, created_at_us) VALUES (?, ?, ?, 0)",
            [(team, f"team{team}", TIERS[team % 3]) for team in range(1, teams + 1)],
        )
        insert("ledger", ledger_rows(teams, requests), LedgerRow)
        num_rows = insert(
            "service_samples", (row for rows, _, _ in second_rows(teams) for row in rows), ServiceSampleRow
        )
        num_rows += insert("interference_samples", (pair for _, pair, _ in second_rows(teams)), InterferenceRow)
        num_rows += insert("step_samples", (step for _, _, step in second_rows(teams)), StepSampleRow)
    connection.close()
    return num_rows


async def timed(database: Database, read: Callable[[AsyncConnection], Awaitable[Any]]) -> float:
    """CPU seconds of one read in a session of its own."""
    started = time.process_time()
    async with database.session() as connection:
        await read(connection)
    return round(time.process_time() - started, 3)


async def pieces(retention: Retention, now_us: int) -> dict[str, float]:
    """Let retention do all that is due at `now_us`: the number of its pieces of work and their CPU seconds."""
    costs = []
    while retention.is_due(now_us):
        started = time.process_time()
        await retention.work(now_us)
        costs.append(time.process_time() - started)
    return {"pieces": len(costs), "cpu_seconds": round(sum(costs), 3), "longest": round(max(costs), 3)}


async def measure(path: Path, teams: int, requests: int) -> dict[str, Any]:
    await migrate.upgrade(sqlite_url(path))
    found: dict[str, Any] = {"rows_of_seconds": fill(path, teams, requests), "requests": requests}
    day = Period(START_US, START_US + DAY_US)
    cut = Period(START_US + HOUR_US // 2, START_US + DAY_US - HOUR_US // 2)
    database = Database.open(sqlite_url(path))

    async def service(connection: AsyncConnection) -> None:
        await samples.service_by_team(connection, await samples.reach(connection, day))

    found["service_samples_by_the_second"] = await timed(database, service)
    retention = Retention(database, seconds_kept_hours=48, hours_kept_days=400)
    await retention.load()
    found["summing_a_day"] = await pieces(retention, START_US + DAY_US)
    found["service_samples_summed"] = await timed(database, service)
    found["fairness_report"] = await timed(database, lambda connection: reports.fairness_report(connection, day))
    found["fairness_report_cut_at_half_hours"] = await timed(
        database, lambda connection: reports.fairness_report(connection, cut)
    )
    found["service_series"] = await timed(database, lambda connection: reports.service_series(connection, day))
    found["usage_report"] = await timed(
        database, lambda connection: reports.usage_report(connection, day, ("team", "model", "day"))
    )
    found["deleting_a_day"] = await pieces(retention, START_US + 4 * DAY_US)
    await database.dispose()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teams", type=int, default=20)
    parser.add_argument("--requests", type=int, default=200_000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        print(json.dumps(asyncio.run(measure(Path(directory) / "terazi.db", args.teams, args.requests)), indent=1))


if __name__ == "__main__":
    main()
