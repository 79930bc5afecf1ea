"""Whatever the simulated engine made is marked, wherever it shows; what a model made is not."""

from dataclasses import asdict
from typing import Any

import httpx
import pytest
from sqlalchemy import insert

from gateway.cli.report_text import write_fairness, write_usage
from gateway.metrics.families import GatewayMetrics
from gateway.reports.fairness import render_fairness
from tenants import reports, tables
from tenants.reports.periods import Period
from tests.support.gateway.fake_engine import hello
from tests.support.gateway.harness import CHAT, Gateway, gateway
from tests.support.tenants.stores import NOW_US, Store, closed_row, open_entry

pytestmark = pytest.mark.anyio
HEADER = "x-terazi-simulated"


async def every_answer(g: Gateway) -> list[httpx.Response]:
    g.engine.script = g.engine.saying("ok")
    bearer = {"authorization": f"Bearer {g.key}"}
    return [
        await g.chat(),
        await g.chat(stream=True),
        await g.http.get("/v1/models", headers=bearer),
        await g.chat(key="wrong"),
        await g.post(CHAT, content=b"{"),
        await g.http.get("/nowhere"),
        await g.http.get("/readyz"),
    ]


@pytest.mark.case("U09")
@pytest.mark.parametrize(("kind", "mark"), [("sim", "true"), ("torch", None)])
async def test_every_answer_of_a_simulated_engine_is_marked(kind: str, mark: str | None) -> None:
    async with gateway(greeting=hello(kind=kind)) as g:
        for answer in await every_answer(g):
            assert answer.headers.get(HEADER) == mark
        origin = await g.http.get("/livez", headers={"origin": "https://app.example"})
        assert HEADER in origin.headers["access-control-expose-headers"], "a page in a browser may read it"


@pytest.mark.case("U09")
@pytest.mark.parametrize(("kind", "owner"), [("sim", "terazi-simulated"), ("torch", "terazi")])
async def test_models_readyz_and_metrics_say_which_engine_it_is(kind: str, owner: str) -> None:
    async with gateway(greeting=hello(kind=kind)) as g:
        bearer = {"authorization": f"Bearer {g.key}"}
        (model,) = (await g.http.get("/v1/models", headers=bearer)).json()["data"]
        assert (model["simulated"], model["owned_by"]) == (kind == "sim", owner)
        assert (await g.http.get("/readyz")).json().get("simulated", False) is (kind == "sim")
        metrics = GatewayMetrics(g.state, g.state.leases, g.ledger, clock=g.clock.monotonic).render().decode()
        assert f'terazi_engine_info{{kind="{kind}",model="org/tiny-random",policy="eg-mlfq"}} 1.0' in metrics


@pytest.mark.case("U09")
@pytest.mark.parametrize(("kind", "engine_id"), [("sim", "sim:fake"), ("torch", "fake")])
async def test_rows_name_a_simulated_engine_as_one(kind: str, engine_id: str) -> None:
    async with gateway(greeting=hello(kind=kind)) as g:
        g.engine.script = g.engine.saying("ok")
        await g.chat()
        assert (await g.ledger.next_row()).engine_id == engine_id


async def documents(store: Store, simulated: int, real: int) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Usage, fairness and series of a period with so many requests of each kind."""
    rows = []
    for number in range(simulated + real):
        engine_id = "sim:eng-1" if number < simulated else "eng-1"
        row = asdict(closed_row(open_entry(f"r{number}", engine_id=engine_id, tier="gold")))
        rows.append({name: value for name, value in row.items() if name in tables.ledger.c})
    period = Period(NOW_US, NOW_US + 10**9)
    async with store.database.begin_immediate() as connection:
        await connection.execute(insert(tables.ledger), rows)
    async with store.database.session() as connection:
        return (
            await reports.usage_report(connection, period, ("tier",)),
            await reports.fairness_report(connection, period),
            await reports.service_series(connection, period),
        )


@pytest.mark.case("U09")
@pytest.mark.parametrize(("simulated", "real"), [(3, 0), (1, 2)])
async def test_reports_say_how_many_requests_were_simulated(
    store: Store, capsys: pytest.CaptureFixture[str], simulated: int, real: int
) -> None:
    usage, fairness, series = await documents(store, simulated, real)
    assert usage["total"]["simulated_requests"] == usage["data"][0]["simulated_requests"] == simulated
    assert (fairness["requests"], fairness["simulated_requests"]) == (3, simulated)
    said = f"SIMULATED: {simulated} of 3 requests ran on the simulated engine"
    write_usage(usage)
    printed = capsys.readouterr().out
    assert said in printed
    assert ("simulated requests" in printed) is (real > 0), "a column only where some were not"
    write_fairness(fairness)
    assert said in capsys.readouterr().out
    assert said in render_fairness(fairness, series)


@pytest.mark.case("U09")
async def test_a_report_of_real_requests_has_no_mark(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    usage, fairness, series = await documents(store, 0, 2)
    write_usage(usage)
    write_fairness(fairness)
    assert "imulated" not in capsys.readouterr().out + render_fairness(fairness, series)
