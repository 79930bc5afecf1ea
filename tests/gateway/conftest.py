"""Fixtures of the gateway's tests: the admin API on a store."""

from collections.abc import AsyncIterator

import httpx
import pytest
from prometheus_client import CollectorRegistry, Counter

from gateway.admin.app import AdminState, render_metrics
from tests.support.gateway.admin import TOKEN, client_of
from tests.support.tenants.stores import Store


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
