"""Fixtures of the store's tests: one upgraded database for the session, a copy of it for each test."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tenants import migrate
from tenants.database import sqlite_url
from tests.support.tenants.stores import Store, opened


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("template") / "terazi.db"
    asyncio.run(migrate.upgrade(sqlite_url(path), now_us=lambda: 1))
    return path


@pytest.fixture
async def store(template: Path, tmp_path: Path) -> AsyncIterator[Store]:
    async with opened(template, tmp_path / "data") as store:
        yield store
