"""Fixtures of the gateway's tests. Async ones run on asyncio, through anyio's own pytest plugin."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from prometheus_client import CollectorRegistry, Counter

from gateway.admin.app import AdminState, render_metrics
from tenants.migrate import upgrade
from tests.support.gateway.admin import TOKEN, client_of
from tests.support.tenants.stores import Store, opened


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("admin") / "terazi.db"
    asyncio.run(upgrade(f"sqlite+aiosqlite:///{path}", now_us=lambda: 1))
    return path


@pytest.fixture
async def store(template: Path, tmp_path: Path) -> AsyncIterator[Store]:
    async with opened(template, tmp_path / "data") as store:
        yield store


@pytest.fixture
def state(store: Store) -> AdminState:
    registry = CollectorRegistry()
    Counter("terazi_things", "Things.", registry=registry).inc()
    return AdminState(
        token=TOKEN,
        database=store.database,
        snapshot_holder=store.holder,
        status=lambda: {"ready": True, "degraded": False, "reasons": [], "engine": {"model": "tiny"}},
        metrics=lambda: render_metrics(registry),
        now_us=lambda: store.now_us,
    )


@pytest.fixture
async def client(state: AdminState) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(state) as client:
        yield client
