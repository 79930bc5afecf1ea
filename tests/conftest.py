"""What holds for every test: the same examples in every run, and no verdict by the clock; fixtures of many folders.

What needs a database is imported where it is used: most tests run without one, and so do machines with a GPU.
"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from tests.support.tenants.stores import Store

settings.register_profile(
    "terazi",
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)
settings.load_profile("terazi")


@pytest.fixture
def anyio_backend() -> str:
    """Async tests run on asyncio, through anyio's own pytest plugin."""
    return "asyncio"


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database of the newest schema, made once and only copied."""
    from tenants import migrate
    from tenants.database import sqlite_url

    path = tmp_path_factory.mktemp("template") / "terazi.db"
    asyncio.run(migrate.upgrade(sqlite_url(path), now_us=lambda: 1))
    return path


@pytest.fixture
async def store(template: Path, tmp_path: Path) -> AsyncIterator["Store"]:
    """A store of the test's own."""
    from tests.support.tenants.stores import opened

    async with opened(template, tmp_path / "data") as store:
        yield store
