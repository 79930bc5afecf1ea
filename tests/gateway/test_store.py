"""The store as commands open it when no server runs."""

import os
import sqlite3
from pathlib import Path

import pytest

from gateway.settings.values import Settings, load
from gateway.store import offline_admin_state, reading_admin_state
from tenants.errors import NotFound, StoreUnavailable

pytestmark = pytest.mark.anyio


def settings(path: Path) -> Settings:
    return load({"data_dir": path}, {})


async def test_reading_makes_no_database(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no server has run there"):
        async with reading_admin_state(settings(tmp_path), "t" * 32):
            pass
    assert os.listdir(tmp_path) == []


async def test_a_command_that_writes_makes_the_schema_that_reads(tmp_path: Path) -> None:
    async with offline_admin_state(settings(tmp_path), "t" * 32) as state:
        assert state.status() == {"ready": False, "reasons": ["no server runs"]}
        assert state.metrics() == b""
    async with reading_admin_state(settings(tmp_path), "t" * 32) as state:
        assert state.database is not None


async def test_when_the_schema_is_another_reading_says_what_to_do(tmp_path: Path) -> None:
    async with offline_admin_state(settings(tmp_path), "t" * 32):
        pass
    with sqlite3.connect(tmp_path / "terazi.db") as database:
        database.execute("update alembic_version set version_num = '0001'")
    database.close()
    with pytest.raises(StoreUnavailable, match="terazi db upgrade"):
        async with reading_admin_state(settings(tmp_path), "t" * 32):
            pass
