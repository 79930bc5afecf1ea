"""Schema upgrades: by one process, whole or not at all."""

import asyncio
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import Connection, create_engine, select
from typer.testing import CliRunner

from gateway.cli.main import app
from policies.tiers import DEFAULT_TIERS
from tenants import migrate, tables, tiers
from tenants.database import sqlite_url
from tenants.errors import Invalid, MigrationFailed, SchemaTooNew, StoreUnavailable
from tests.support.tenants.stores import Store, upgrade_to

pytestmark = pytest.mark.anyio

_UPGRADE = """
import asyncio, sys
from tenants import migrate
print("waiting", flush=True)
sys.stdin.readline()
print(asyncio.run(migrate.upgrade(sys.argv[1])), asyncio.run(migrate.current(sys.argv[1])))
"""


async def test_an_upgrade_makes_the_schema_of_the_tables(tmp_path: Path) -> None:
    url = sqlite_url(tmp_path / "new.db")
    assert await migrate.current(url) is None
    assert not (tmp_path / "new.db").exists()  # asking makes no file
    assert await migrate.upgrade(url) == migrate.head() == await migrate.current(url)
    engine = create_engine(f"sqlite:///{tmp_path / 'new.db'}")

    def differences(connection: Connection) -> list[object]:
        return list(compare_metadata(MigrationContext.configure(connection), tables.metadata))

    with engine.connect() as connection:
        assert differences(connection) == []
        connection.exec_driver_sql("DROP INDEX ix_ledger_finished_at_us")
        assert len(differences(connection)) == 1  # the comparison would see it
    engine.dispose()


async def test_a_new_store_has_the_three_tiers_and_an_old_one_keeps_its_own(store: Store) -> None:
    async with store.database.session() as connection:
        assert sorted(tier.name for tier in await tiers.list_tiers(connection)) == ["bronze", "gold", "silver"]
        assert set(await tiers.list_tiers(connection)) == set(DEFAULT_TIERS)
    async with store.database.begin_immediate() as connection:
        await tiers.update_tier(connection, "gold", {"weight": 9}, at_us=2, actor="test")
    await migrate.upgrade(store.url)
    async with store.database.session() as connection:
        assert (await tiers.get_tier(connection, "gold")).weight == 9


def test_every_constraint_has_a_name() -> None:
    for table in tables.metadata.sorted_tables:
        assert all(constraint.name for constraint in table.constraints), table.name
        assert all(index.name for index in table.indexes), table.name


@pytest.mark.case("G27", "D04")
def test_of_four_processes_one_migrates_and_the_others_wait(tmp_path: Path) -> None:
    url = sqlite_url(tmp_path / "old.db")
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _UPGRADE, url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(4)
    ]
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == "waiting\n"
    answers = []
    for process in processes:  # all imports are done: they start within the same milliseconds
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        answers.append(process.communicate(timeout=60)[0].strip())
        assert process.returncode == 0
    assert answers == [f"{migrate.head()} {migrate.head()}"] * 4
    with sqlite3.connect(tmp_path / "old.db") as connection:
        assert connection.execute("SELECT count(*) FROM tiers").fetchone() == (3,)
        assert connection.execute("SELECT count(*) FROM alembic_version").fetchone() == (1,)
    connection.close()


@pytest.mark.case("G27")
async def test_an_upgrade_waits_for_the_one_that_holds_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = sqlite_url(tmp_path / "new.db")
    order: list[str] = []
    really = migrate._upgrade

    async def slowly(*args: object) -> str:
        order.append("begins")
        await asyncio.sleep(0)
        revision = await really(*args)  # type: ignore[arg-type]
        order.append("ends")
        return revision

    monkeypatch.setattr(migrate, "_upgrade", slowly)
    monkeypatch.setattr(migrate, "_LOCK_POLL_SECONDS", 0.001)
    await asyncio.gather(*(migrate.upgrade(url) for _ in range(3)))
    assert order == ["begins", "ends"] * 3


async def test_a_lock_held_for_too_long_is_an_error_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = sqlite_url(tmp_path / "new.db")
    monkeypatch.setattr(migrate, "LOCK_TIMEOUT_SECONDS", 0.01)
    monkeypatch.setattr(migrate, "_LOCK_POLL_SECONDS", 0.001)
    async with migrate._file_lock(url):
        with pytest.raises(StoreUnavailable, match=r"new\.db\.migrate\.lock"):
            await migrate.upgrade(url)
    await migrate.upgrade(url)


async def test_a_database_of_a_newer_version_is_refused_and_not_touched(store: Store) -> None:
    with sqlite3.connect(store.path) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    connection.close()
    with pytest.raises(SchemaTooNew, match=r"newer Terazi \(schema 9999; this one knows up to"):
        await migrate.upgrade(store.url)
    assert await migrate.current(store.url) == "9999"


@pytest.mark.case("D04")
async def test_an_upgrade_that_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = sqlite_url(tmp_path / "new.db")

    async def fails(*_: object) -> None:
        raise RuntimeError("power")

    monkeypatch.setattr(migrate.tiers, "create_defaults", fails)
    with pytest.raises(RuntimeError, match="power"):
        await migrate.upgrade(url)
    with sqlite3.connect(tmp_path / "new.db") as connection:
        assert connection.execute("SELECT name FROM sqlite_master").fetchall() == []
    connection.close()
    monkeypatch.undo()
    await migrate.upgrade(url)


@pytest.mark.case("T11")
@pytest.mark.parametrize(
    ("before", "damage", "named", "cause"),
    [
        ("0001", "CREATE TABLE step_hours (x)", "0002 (What swapping", "table step_hours already exists"),
        ("0002", "ALTER TABLE sample_marks ADD aged_to_us", "0003 (Outcome", "duplicate column name: aged_to_us"),
        ("0002", "DROP TABLE ledger", "0003 (Outcome", "No row was found when one was required"),
    ],
)
async def test_when_a_migration_fails_one_line_names_it(
    tmp_path: Path, before: str, damage: str, named: str, cause: str
) -> None:
    path = tmp_path / "old.db"
    await upgrade_to(sqlite_url(path), before)
    with sqlite3.connect(path) as connection:
        connection.execute(damage)
        schema = connection.execute("SELECT sql FROM sqlite_master ORDER BY name").fetchall()
    with pytest.raises(MigrationFailed) as failed:
        await migrate.upgrade(sqlite_url(path))
    message = failed.value.message
    assert message.startswith(f"The migration {named}") and message.endswith(f"nothing has been changed: {cause}")
    assert "\n" not in message
    assert await migrate.current(sqlite_url(path)) == before
    assert connection.execute("SELECT sql FROM sqlite_master ORDER BY name").fetchall() == schema
    connection.close()
    arguments = ["db", "upgrade", "--data-dir", str(tmp_path), "--store-url", sqlite_url(path)]
    done = await asyncio.to_thread(CliRunner().invoke, app, arguments)
    assert (done.exit_code, done.stderr) == (6, f"terazi: {message}\n")


async def test_a_store_that_cannot_be_opened_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match="nowhere"):
        await migrate.upgrade(sqlite_url(tmp_path / "nowhere" / "t.db"))
    (tmp_path / "text.db").write_text("this is no database, only a longer text than SQLite's header " * 20)
    with pytest.raises(StoreUnavailable, match="not a database"):
        await migrate.upgrade(sqlite_url(tmp_path / "text.db"))
    for url in ("sqlite+aiosqlite://", "sqlite+aiosqlite:///:memory:", "no url", "nosuch+driver://x/y"):
        with pytest.raises(Invalid):
            await migrate.upgrade(url)


async def test_migrations_travel_as_a_package_and_go_forward_only() -> None:
    config = migrate.alembic_config()
    assert config.get_main_option("script_location", "").endswith("migrations")
    from importlib import import_module

    for revision in ("0001_first_schema", "0002_swapping_and_promotion", "0003_refused_and_age"):
        with pytest.raises(RuntimeError, match="forward only"):
            import_module(f"migrations.versions.{revision}").downgrade()


async def test_settings_table_starts_empty(store: Store) -> None:
    async with store.database.session() as connection:
        assert (await connection.execute(select(tables.settings))).all() == []
