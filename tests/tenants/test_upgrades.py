"""What an older version left, its database and its journal, under this one."""

import shutil
import sqlite3
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import Engine, create_engine, event, select

from tenants import migrate, tables
from tenants.database import sqlite_url
from tenants.ledger import Ledger
from tenants.rows import LedgerRow, ServiceSampleRow
from tests.support.tenants import histories
from tests.support.tenants.stores import NOW_US, Store, upgrade_to

pytestmark = pytest.mark.anyio


async def a_first_schema(path: Path, num_rows: int) -> list[dict[str, Any]]:
    """A database of revision 0001 with rows in its ledger and samples; returns the ledger's."""
    await upgrade_to(sqlite_url(path), "0001")
    every = histories.ledger_rows(seed=1, count=num_rows)
    rows = histories.values(replace(row, outcome="error") if row.outcome == "refused" else row for row in every)
    samples = histories.samples(seed=1, team_ids=[1, 2], start_us=NOW_US, seconds=num_rows)
    services = histories.values([one for one in samples if isinstance(one, ServiceSampleRow)])
    with sqlite3.connect(path) as connection:
        for table, values in (("ledger", rows), ("service_samples", services)):
            names = [row[1] for row in connection.execute(f"PRAGMA table_info({table})") if row[1] != "id"]
            holders = ", ".join(f":{name}" for name in names)
            connection.executemany(f"INSERT INTO {table} ({', '.join(names)}) VALUES ({holders})", values)
    connection.close()
    return [{name: value for name, value in row.items() if name in names_of_0001()} for row in rows]


def names_of_0001() -> set[str]:
    later = {"work_us", "overhead_us", "longest_pause_us", "pause_bound_us"}
    return {field.name for field in fields(LedgerRow)} - later


@pytest.mark.case("D04")
async def test_a_first_schema_with_rows_keeps_them_all(tmp_path: Path) -> None:
    path = tmp_path / "old.db"
    before = await a_first_schema(path, 50)
    assert await migrate.upgrade(sqlite_url(path)) == migrate.head()
    engine = create_engine(f"sqlite:///{path}")
    with engine.connect() as connection:
        after = [dict(row) for row in connection.execute(select(tables.ledger)).mappings()]
        samples = connection.execute(select(tables.service_samples)).mappings().all()
        marks = connection.execute(select(tables.sample_marks)).one()
        assert list(compare_metadata(MigrationContext.configure(connection), tables.metadata)) == []
    engine.dispose()
    assert [{name: value for name, value in row.items() if name in names_of_0001()} for row in after] == before
    assert all(row["work_us"] == row["overhead_us"] == row["pause_bound_us"] == 0 for row in after)
    assert len(samples) > 50
    assert {(row["budget_us"], row["exhausted"], row["lag_bound_us"]) for row in samples} == {(0, 0, 0.0)}
    assert tuple(marks) == (1, 0, 0, 0, 0)


@pytest.mark.case("T07")
async def test_an_upgraded_ledger_takes_refused_rows(tmp_path: Path) -> None:
    """Also on a connection that has read the old schema; and what no version books is still refused."""
    path = tmp_path / "old.db"
    await a_first_schema(path, 5)
    reader = sqlite3.connect(path, isolation_level=None)
    columns = [row[1] for row in reader.execute("PRAGMA table_info(ledger)") if row[1] != "id"]
    copied = ", ".join("request_id || '-' || :outcome" if name == "request_id" else name for name in columns)
    copied = copied.replace(", outcome,", ", :outcome,")
    copy = f"INSERT INTO ledger ({', '.join(columns)}) SELECT {copied} FROM ledger WHERE id = 1"
    with pytest.raises(sqlite3.IntegrityError, match="outcome"):
        reader.execute(copy, {"outcome": "refused"})
    await migrate.upgrade(sqlite_url(path))
    reader.execute(copy, {"outcome": "refused"})
    with pytest.raises(sqlite3.IntegrityError, match="outcome"):
        reader.execute(copy, {"outcome": "nonsense"})
    assert reader.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    assert reader.execute("PRAGMA writable_schema").fetchone() == (0,)
    reader.close()


@pytest.mark.case("G40")
async def test_an_upgrade_does_the_same_work_for_any_number_of_rows(tmp_path: Path) -> None:
    """So the write lock is held as long with five million rows as with ten: no row is copied, indexed or looked at."""
    paths = {num_rows: tmp_path / f"{num_rows}.db" for num_rows in (10, 2_000)}
    for num_rows, path in paths.items():
        await a_first_schema(path, num_rows)
    statements: list[tuple[str, Any]] = []

    def note(*called_with: Any) -> None:
        statements.append((called_with[2], called_with[3]))

    event.listen(Engine, "before_cursor_execute", note)
    shutil.copy(paths[10], tmp_path / "upgraded.db")
    try:
        await migrate.upgrade(sqlite_url(tmp_path / "upgraded.db"))
    finally:
        event.remove(Engine, "before_cursor_execute", note)
    changes = [
        one for one in statements if one[0].split()[0] in ("ALTER", "CREATE", "DROP", "INSERT", "UPDATE", "DELETE")
    ]
    of_large = [text for text, _ in changes if "ledger" in text or "service_samples" in text]
    assert len(of_large) == 12
    assert all(text.startswith("ALTER TABLE") and " ADD COLUMN " in text for text in of_large)

    def work(path: Path, todo: list[tuple[str, Any]]) -> int:
        """Steps of SQLite's virtual machine, on a copy."""
        copy = path.with_suffix(".copy")
        shutil.copy(path, copy)
        connection = sqlite3.connect(copy, isolation_level=None)
        connection.execute("PRAGMA writable_schema = ON")  # as the upgrade sets it
        steps = 0

        def step() -> int:
            nonlocal steps
            steps += 1
            return 0

        connection.set_progress_handler(step, 1)
        for text, parameters in todo:
            connection.execute(text, parameters)
        connection.close()
        return steps

    assert work(paths[2_000], changes) == work(paths[10], changes) > 100
    an_index = [("CREATE INDEX ix_too_much ON ledger (model)", ())]
    assert work(paths[2_000], an_index) > 10 * work(paths[10], an_index)  # what the count would see


# What version 0.1.0 wrote, as it stood in the file.
_OLD_JOURNAL = (
    b'{"open":{"request_id":"r1","key_id":1,"key_public_id":"AAAAAAAAAAAA","project_id":1,"project":"default","team_id":1,'
    b'"team":"search","tier":"gold","model":"tiny","engine_id":"e1","engine_epoch":1,"endpoint":"chat.completions",'
    b'"stream":true,"received_at_us":1780000000000000,"admitted_at_us":1780000000001000,"prompt_tokens":10,"max_tokens":100}}\n'
    b'{"open":{"request_id":"r2","key_id":1,"key_public_id":"AAAAAAAAAAAA","project_id":1,"project":"default","team_id":1,'
    b'"team":"search","tier":"gold","model":"tiny","engine_id":"e1","engine_epoch":1,"endpoint":"chat.completions",'
    b'"stream":true,"received_at_us":1780000000000000,"admitted_at_us":1780000000001000,"prompt_tokens":10,"max_tokens":100}}\n'
    b'{"progress":{"request_id":"r2","output_tokens":3,"device_us":44,"started_at_us":null,"first_token_at_us":null,'
    b'"level_path":"0"}}\n'
    b'{"close":{"request_id":"r1","key_id":1,"key_public_id":"AAAAAAAAAAAA","project_id":1,"project":"default","team_id":1,'
    b'"team":"search","tier":"gold","model":"tiny","engine_id":"e1","engine_epoch":1,"endpoint":"chat.completions",'
    b'"stream":true,"received_at_us":1780000000000000,"admitted_at_us":1780000000001000,"started_at_us":1780000000003000,'
    b'"first_token_at_us":1780000000006000,"finished_at_us":1780000000051000,"prompt_tokens":10,"cached_tokens":0,'
    b'"output_tokens":7,"max_tokens":100,"device_us":12345,"level_path":"0>1","num_preemptions":2,"num_swaps":0,'
    b'"num_recomputes":0,"num_promotions":0,"outcome":"ok","finish_reason":"stop","error_code":null,"attempts":1}}\n'
)


@pytest.mark.case("G18")
async def test_a_journal_of_the_version_before_is_booked_after_the_upgrade(store: Store) -> None:
    (store.directory / "journal").mkdir()
    (store.directory / "journal" / "0000000007.jsonl").write_bytes(_OLD_JOURNAL)
    ledger = Ledger(store.database, store.directory / "journal", now_us=lambda: NOW_US)
    await ledger.start()
    assert ledger.num_lost == 1
    await ledger.stop()
    closed, lost = await store.ledger_rows()
    assert (closed["request_id"], closed["device_us"], closed["num_preemptions"], closed["work_us"]) == (
        "r1",
        12345,
        2,
        0,
    )
    assert (lost["request_id"], lost["outcome"], lost["device_us"], lost["overhead_us"]) == ("r2", "lost", 44, 0)
