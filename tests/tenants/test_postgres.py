"""The store on a real PostgreSQL: the same schema, the same rows, the same reports as on SQLite."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import Connection, insert, select

from policies.tiers import DEFAULT_TIERS
from tenants import migrate, reports, tables, teams, tiers
from tenants.database import Database, make_engine
from tenants.errors import Conflict, MigrationFailed, SchemaTooNew, StoreUnavailable, StoreUnreachable
from tenants.ledger import Ledger
from tenants.reports.periods import Period
from tenants.reports.samples import HOUR_US
from tenants.retention import Retention
from tenants.rows import LedgerRow, SampleRow
from tests.support.tenants import histories
from tests.support.tenants.postgres import PostgresServer
from tests.support.tenants.stores import NOW_US, Store, closed_row, open_entry, upgrade_to

pytestmark = [pytest.mark.anyio, pytest.mark.postgres]


@pytest.fixture
async def database(server: PostgresServer) -> AsyncIterator[Database]:
    url = server.new_database()
    await migrate.upgrade(url)
    database = Database.open(url)
    yield database
    await database.dispose()


@pytest.mark.filterwarnings("ignore:Can't validate argument 'dialect_options'")  # reads a constraint that is NOT VALID
async def test_an_upgrade_makes_the_schema_of_the_tables(server: PostgresServer) -> None:
    url = server.new_database()
    assert await migrate.upgrade(url) == migrate.head() == await migrate.current(url)
    engine = make_engine(url, is_pooled=False)

    def differences(connection: Connection) -> list[object]:
        return list(compare_metadata(MigrationContext.configure(connection), tables.metadata))

    async with engine.connect() as connection:
        assert await connection.run_sync(differences) == []
        await connection.exec_driver_sql("ALTER TABLE ledger DROP COLUMN work_us")
        assert len(await connection.run_sync(differences)) == 1  # the comparison would see it
    await engine.dispose()


@pytest.mark.case("D04")
async def test_of_many_upgrades_at_once_one_migrates_and_the_others_wait(server: PostgresServer) -> None:
    url = server.new_database()
    assert await asyncio.gather(*(migrate.upgrade(url) for _ in range(4))) == [migrate.head()] * 4
    database = Database.open(url)
    async with database.session() as connection:
        assert set(await tiers.list_tiers(connection)) == set(DEFAULT_TIERS)
    await database.dispose()


async def test_a_first_schema_with_rows_is_upgraded(server: PostgresServer) -> None:
    url = server.new_database()
    await upgrade_to(url, "0001")
    old = closed_row(open_entry("old"), device_us=77)
    first_columns = [
        column for column in tables.ledger.columns if column.server_default is None and column.name != "id"
    ]
    values = ", ".join(_literal(getattr(old, column.name)) for column in first_columns)
    names = ", ".join(column.name for column in first_columns)
    server.run(url, f"INSERT INTO ledger ({names}) VALUES ({values})")
    assert await migrate.upgrade(url) == migrate.head()
    database = Database.open(url)
    async with database.session() as connection:
        (row,) = (await connection.execute(select(tables.ledger))).mappings()
    assert (row["request_id"], row["device_us"], row["work_us"], row["pause_bound_us"]) == ("old", 77, 0, 0)
    async with database.begin_immediate() as connection:
        await connection.execute(
            insert(tables.ledger), histories.values([closed_row(open_entry("r"), outcome="refused")])
        )
    await database.dispose()


@pytest.mark.case("T11")
async def test_when_a_migration_fails_one_line_names_it(server: PostgresServer) -> None:
    url = server.new_database()
    await upgrade_to(url, "0001")
    server.run(url, "CREATE TABLE step_hours (x int)")
    with pytest.raises(MigrationFailed) as failed:
        await migrate.upgrade(url)
    assert failed.value.message.startswith("The migration 0002 (What swapping")
    assert failed.value.message.endswith('nothing has been changed: relation "step_hours" already exists')
    assert await migrate.current(url) == "0001"


@pytest.mark.case("T11")
async def test_when_there_is_no_connection_one_line_says_why(server: PostgresServer) -> None:
    url = server.new_database()
    for wrong, cause in (
        (url.replace("@/terazi", "@/nosuch"), 'database "nosuch'),
        (url.replace("postgres@", "nobody:secret-word@"), 'role "nobody" does not exist'),
        ("postgresql+asyncpg://u:secret-word@127.0.0.1:1/x", "(Connect call failed|Connection refused)"),
        ("postgresql+asyncpg://u:secret-word@/x?host=/nowhere", "No such file or directory"),
    ):
        for attempt in (migrate.upgrade, migrate.current):
            with pytest.raises(StoreUnavailable, match=cause) as refused:
                await attempt(wrong)
            assert "\n" not in refused.value.message and "secret-word" not in refused.value.message


async def test_a_database_of_a_newer_version_is_refused(server: PostgresServer) -> None:
    url = server.new_database()
    await migrate.upgrade(url)
    server.run(url, "UPDATE alembic_version SET version_num = '9999'")
    with pytest.raises(SchemaTooNew):
        await migrate.upgrade(url)


async def test_names_are_unique_and_a_failed_write_leaves_nothing(database: Database) -> None:
    async with database.begin_immediate() as connection:
        await teams.create_team(connection, "search", "gold", at_us=NOW_US, actor="test")
    with pytest.raises(Conflict):
        async with database.begin_immediate() as connection:
            await teams.create_team(connection, "chat", "gold", at_us=NOW_US, actor="test")
            await teams.create_team(connection, "search", "gold", at_us=NOW_US, actor="test")
    async with database.session() as connection:
        assert [team.name for team in await teams.list_teams(connection)] == ["search"]


async def test_all_queries_of_a_session_see_the_same_state(database: Database, store: Store) -> None:
    """A report reads where the sums end, then the sums, then the seconds around them."""
    for each in (database, store.database):
        async with each.session() as reading:
            assert await teams.list_teams(reading) == []
            async with each.begin_immediate() as writing:
                await teams.create_team(writing, "search", "gold", at_us=NOW_US, actor="test")
            assert await teams.list_teams(reading) == []
        async with each.session() as reading:
            assert len(await teams.list_teams(reading)) == 1


async def test_the_ledger_books_once_and_sets_aside_the_impossible(database: Database, tmp_path: Path) -> None:
    ledger = Ledger(database, tmp_path / "journal", now_us=lambda: NOW_US)
    await ledger.start()
    for name, changes in (("a", {}), ("poison", {"cached_tokens": 11}), ("b", {"output_tokens": 9})):
        entry = open_entry(name, prompt_tokens=10)
        ledger.open(entry)
        ledger.close(closed_row(entry, **changes))
    await ledger.flush()
    ledger.close(closed_row(open_entry("a"), output_tokens=99))  # it is there already
    ledger.open(open_entry("running"))
    samples = histories.samples(seed=1, team_ids=[1, 2], start_us=NOW_US, seconds=5)
    ledger.add_samples(samples)
    ledger.add_samples(samples)
    await ledger.flush()
    assert ledger.num_rejected == 1
    await ledger.stop()
    again = Ledger(database, tmp_path / "journal", now_us=lambda: NOW_US + 1)
    await again.start()
    assert again.num_lost == 1
    await again.stop()
    async with database.session() as connection:
        rows = (await connection.execute(select(tables.ledger).order_by(tables.ledger.c.id))).mappings().all()
        booked = (await connection.execute(select(tables.service_samples.c.at_us))).all()
    assert [(row["request_id"], row["outcome"], row["output_tokens"]) for row in rows] == [
        ("a", "ok", 7),
        ("b", "ok", 9),
        ("running", "lost", 0),
    ]
    assert len(booked) == sum(type(sample).__name__ == "ServiceSampleRow" for sample in samples)


async def _fill(database: Database, rows: list[LedgerRow], samples: list[SampleRow]) -> None:
    async with database.begin_immediate() as connection:
        for name, tier in histories.TEAMS.items():
            await teams.create_team(connection, name, tier, at_us=NOW_US, actor="test")
    async with database.begin_immediate() as connection:
        await connection.execute(insert(tables.ledger), histories.values(rows))
        for kind, table in histories.SAMPLE_TABLES.items():
            await connection.execute(insert(table), histories.values([one for one in samples if isinstance(one, kind)]))


async def _reports(database: Database, period: Period) -> list[dict[str, Any]]:
    async with database.session() as connection:
        found = [
            await reports.usage_report(connection, period, by)
            for by in ((), ("team", "model", "day"), ("tier",), ("day", "key"))
        ]
        found.append(await reports.usage_report(connection, replace(period, time_zone="Europe/Berlin"), ("day",)))
        return [
            *found,
            await reports.fairness_report(connection, period),
            await reports.service_series(connection, period),
        ]


async def test_both_databases_give_the_same_reports(database: Database, store: Store) -> None:
    rows = histories.ledger_rows(seed=3)
    start = NOW_US // HOUR_US * HOUR_US
    samples = histories.samples(seed=3, team_ids=[1, 2, 3], start_us=start, seconds=120, every=97)
    for each in (database, store.database):
        await _fill(each, rows, samples)
    period = Period(NOW_US - 4 * histories.DAY_US, start + 2 * HOUR_US + 17_000_000)
    before = await _reports(store.database, period)
    assert sum(len(report["data"]) for report in before[:-1]) > 20
    assert _close(await _reports(database, period), before)
    for each in (database, store.database):
        await histories.settle_retention(
            Retention(each, seconds_kept_hours=1, hours_kept_days=400), start + 9 * HOUR_US
        )
    whole = Period(start, start + 3 * HOUR_US)
    after = await _reports(store.database, whole)
    assert after[-2]["data"]
    assert _close(await _reports(database, whole), after)


def _close(left: Any, right: Any) -> bool:
    """Equal, floats but for the last digits: the two sum floats in different order."""
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_close(left[key], right[key]) for key in left)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(_close, left, right))
    if isinstance(left, float) and isinstance(right, float):
        return left == pytest.approx(right)
    return bool(left == right)


def _literal(value: object) -> str:
    if value is None:
        return "NULL"
    return str(value).upper() if isinstance(value, bool) else repr(value)


@pytest.mark.case("H32")
@pytest.mark.parametrize("scheme", ["postgres", "postgresql"])
async def test_the_urls_of_platforms_are_served(server: PostgresServer, scheme: str) -> None:
    url = server.new_database().replace("postgresql+asyncpg:", f"{scheme}:")
    url += "&sslmode=disable&connect_timeout=5&application_name=terazi&statement_cache_size=0"
    assert await migrate.upgrade(url) == migrate.head() == await migrate.current(url)
    database = Database.open(url)
    async with database.session() as connection:
        assert (await connection.exec_driver_sql("SHOW application_name")).scalar() == "terazi"
    await database.dispose()


@pytest.mark.case("H32")
async def test_a_server_that_refuses_us_is_one_line_without_the_password(server: PostgresServer) -> None:
    url = server.new_database().replace("postgres@", "nobody-here:S3cret@")
    with pytest.raises(StoreUnreachable) as refused:
        await migrate.upgrade(url)
    assert f"server at {server.directory}:5432 cannot be used: role" in refused.value.message
    assert "S3cret" not in refused.value.message and "\n" not in refused.value.message
