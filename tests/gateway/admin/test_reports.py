"""Reports over HTTP."""

import contextlib
import csv
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from gateway.admin.app import AdminState
from tenants.ledger import Ledger
from tests.support.gateway.admin import V1, client_of, error_of
from tests.support.tenants.stores import NOW_US, Store, closed_row, open_entry

pytestmark = pytest.mark.anyio


async def test_reports_over_http_see_the_request_before_them(state: AdminState, store: Store) -> None:
    team_id = await store.team("search")
    ledger = Ledger(store.database, store.directory / "journal")
    await ledger.start()
    async with client_of(replace(state, flush=ledger.flush)) as client:
        for i in range(3):
            entry = open_entry(f"r{i}", team_id=team_id)
            ledger.open(entry)
            ledger.close(closed_row(entry, finished_at_us=NOW_US))
            report = (await client.get(f"{V1}/reports/usage", params={"by": "team,model"})).json()
            assert report["total"]["requests"] == i + 1
        assert report["data"][0]["team"] == "search"
        assert (report["by"], report["time_zone"]) == (["team", "model"], "UTC")
        assert (await client.get(f"{V1}/reports/usage", params={"to": "2026-01-01"})).json()["data"] == []
        fairness = (await client.get(f"{V1}/reports/fairness")).json()
        assert (fairness["object"], fairness["tiers"][0]["requests"]) == ("fairness_report", 3)
    await ledger.stop()


async def test_reports_take_a_time_zone_and_come_as_csv(state: AdminState, store: Store) -> None:
    team_id = await store.team("search")
    async with client_of(state) as client, booking(store) as ledger:
        # 2026-05-28 20:26:40 in UTC is the next day in Istanbul from 21:00 UTC on
        for number, hours in enumerate((0, 1)):
            entry = open_entry(f"r{number}", team_id=team_id)
            ledger.open(entry)
            ledger.close(closed_row(entry, finished_at_us=NOW_US + hours * 3_600_000_000))
        await ledger.flush()
        period = {"from": "2026-05-28", "to": "2026-05-30", "tz": "Europe/Istanbul", "by": "day"}
        report = (await client.get(f"{V1}/reports/usage", params=period)).json()
        assert report["time_zone"] == "Europe/Istanbul"
        assert [line["day"] for line in report["data"]] == ["2026-05-28", "2026-05-29"]
        answer = await client.get(f"{V1}/reports/usage", params=period | {"format": "csv"})
        assert answer.headers["content-type"].startswith("text/csv")
        lines = list(csv.DictReader(answer.text.splitlines()))
        assert [(line["day"], line["requests"]) for line in lines] == [("2026-05-28", "1"), ("2026-05-29", "1")]
        assert list(lines[0]) == ["day", *report["total"], "from", "to", "time_zone"]
        fairness = (await client.get(f"{V1}/reports/fairness", params={"tz": "Europe/Istanbul"})).json()
        assert fairness["time_zone"] == "Europe/Istanbul"
        for query, param in (("tz=Mars", "tz"), ("format=xml", "format")):
            refused = await client.get(f"{V1}/reports/usage?{query}")
            assert (refused.status_code, error_of(refused)["param"]) == (400, param)


@contextlib.asynccontextmanager
async def booking(store: Store) -> AsyncIterator[Ledger]:
    ledger = Ledger(store.database, store.directory / "journal")
    await ledger.start()
    try:
        yield ledger
    finally:
        await ledger.stop()
