"""The admin API for tests: its app over ASGI on a store in a temporary directory."""

from typing import Any

import httpx
from sqlalchemy import select

from gateway.admin.app import AdminState, admin_app
from tenants import tables
from tenants.clock import from_epoch_us
from tests.support.tenants.stores import NOW_US, Store

TOKEN = "adm-0123456789abcdefghij"
NOW = from_epoch_us(NOW_US)
V1 = "/admin/v1"


def client_of(state: AdminState, token: str | None = TOKEN) -> httpx.AsyncClient:
    headers = {} if token is None else {"authorization": f"Bearer {token}"}
    # what the app raises is a bug; its answer is what we look at
    transport = httpx.ASGITransport(admin_app(state), raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://admin", headers=headers)


def error_of(answer: httpx.Response) -> dict[str, Any]:
    body = answer.json()["error"]
    assert set(body) == {"message", "type", "param", "code", "terazi"}
    assert body["terazi"]["request_id"] == answer.headers["x-request-id"]
    return dict(body)


async def trail(store: Store) -> list[dict[str, Any]]:
    async with store.database.session() as connection:
        rows = await connection.execute(select(tables.audit).order_by(tables.audit.c.id))
        return [dict(row) for row in rows.mappings()]
