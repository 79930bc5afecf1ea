"""Bodies of the admin API."""

import httpx
import pytest

from tests.support.tenants.stores import Store

pytestmark = pytest.mark.anyio


@pytest.mark.case("H12", "H10")
async def test_admin_bodies_take_8_0_and_a_byte_order_mark(client: httpx.AsyncClient, store: Store) -> None:
    await store.team("there")

    async def send(method: str, path: str, body: str, start: bytes = b"") -> httpx.Response:
        return await client.request(method, f"/admin/v1{path}", content=start + body.encode())

    tier = await send("PATCH", "/tiers/gold", '{"weight": 8.0, "max_queue_seconds": 6e1}', b"\xef\xbb\xbf")
    assert tier.status_code == 200
    assert repr((tier.json()["weight"], tier.json()["max_queue_seconds"])) == "(8, 60)"
    quota = await send("PUT", "/teams/there/quota", '{"concurrent": 8.0}', b"\xef\xbb\xbf")
    assert repr(quota.json()["limits"]["concurrent"]) == "8"
    for method, path, name in (("PATCH", "/tiers/gold", "weight"), ("PUT", "/teams/there/quota", "concurrent")):
        for wrong in ("8.5", '"8"', "1e400", "true", "9007199254740993.0", "[8]"):
            refused = await send(method, path, f'{{"{name}": {wrong}}}')
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, name), wrong
    latin = await client.request("PATCH", "/admin/v1/teams/there", content=b'{"name": "Espa\xf1a"}')
    assert latin.status_code == 400 and "UTF-8" in latin.json()["error"]["message"]
    foreign = await client.request("PATCH", "/admin/v1/teams/there", content='{"name": "x"}'.encode("utf-16"))
    assert foreign.status_code == 400 and "UTF-16" in foreign.json()["error"]["message"]
