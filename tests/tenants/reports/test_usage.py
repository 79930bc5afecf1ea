"""The usage report against plain loops over the same rows."""

import math
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from itertools import combinations, pairwise
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.dialects import sqlite

from tenants import reports, teams
from tenants.errors import Invalid
from tenants.reports import usage
from tenants.reports.periods import Period
from tenants.rows import LedgerRow
from tests.support.tenants import histories
from tests.support.tenants.histories import DAY_US, a_history, book, nearest_rank, num_requests
from tests.support.tenants.stores import NOW_US, Store, closed_row, open_entry

pytestmark = pytest.mark.anyio


WHOLE = Period(NOW_US - 9 * DAY_US, NOW_US + DAY_US)  # of a history


def expected_line(rows: list[LedgerRow]) -> dict[str, Any]:
    """One line of the usage report, the slow way."""
    queue = [row.started_at_us - row.admitted_at_us for row in rows if row.started_at_us is not None]
    ttft = [row.first_token_at_us - row.received_at_us for row in rows if row.first_token_at_us is not None]
    jct = [row.finished_at_us - row.received_at_us for row in rows if row.outcome == "ok"]
    outcomes = Counter(row.outcome for row in rows)
    line: dict[str, Any] = {"requests": num_requests(rows)}
    line |= {name: outcomes[name] for name in reports.OUTCOMES}
    line |= {name: sum(getattr(row, name) for row in rows) for name in ("prompt_tokens", "cached_tokens")}
    line["output_tokens"] = sum(row.output_tokens for row in rows)
    line["device_seconds"] = sum(row.device_us for row in rows) / 1e6
    line["overhead_device_seconds"] = sum(row.overhead_us for row in rows) / 1e6
    for name in ("preemptions", "swaps", "recomputes", "promotions"):
        line[name] = sum(getattr(row, f"num_{name}") for row in rows)
    line["simulated_requests"] = sum(row.engine_id.startswith("sim:") for row in rows)
    for name, values in (("queue", queue), ("ttft", ttft), ("jct", jct)):
        for percent in (50, 95):
            rank = nearest_rank(values, percent)
            line[f"{name}_p{percent}_seconds"] = None if rank is None else rank / 1e6
        line[f"{name}_max_seconds"] = max(values) / 1e6 if values else None
    return line


def day_of(row: LedgerRow) -> str:
    return datetime.fromtimestamp(row.finished_at_us / 1e6, UTC).date().isoformat()


LABEL: dict[str, Callable[[LedgerRow], str]] = {
    "team": lambda row: row.team,
    "tier": lambda row: row.tier,
    "model": lambda row: row.model,
    "day": day_of,
    "key": lambda row: row.key_public_id,
}


@pytest.mark.parametrize("by", [(), ("team",), ("tier",), ("team", "model", "day"), ("key",), ("day", "key", "tier")])
async def test_usage_equals_a_plain_loop(store: Store, by: tuple[str, ...]) -> None:
    rows = await a_history(store, seed=len(by))
    period = Period(NOW_US - 4 * DAY_US, NOW_US - DAY_US // 2)
    within = [row for row in rows if period.from_us <= row.finished_at_us < period.to_us]
    assert 50 < len(within) < len(rows)
    groups: dict[tuple[str, ...], list[LedgerRow]] = defaultdict(list)
    for row in within:
        groups[tuple(LABEL[name](row) for name in by)].append(row)
    async with store.database.session() as connection:
        report = await reports.usage_report(connection, period, by)
    found = {tuple(line.pop(name) for name in by): line for line in report["data"]}
    idle: dict[tuple[str, ...], dict[str, Any]] = {}
    if "day" in by:
        place = by.index("day")
        days = [
            f"{datetime.fromtimestamp(at_us / 1e6, UTC):%Y-%m-%d}"
            for at_us in range(period.from_us, period.to_us, DAY_US)
        ]
        idle = {(*key[:place], day, *key[place + 1 :]): expected_line([]) for key in groups for day in days}
    if "team" in by:
        assert {line.pop("team_status") for line in found.values()} == {"active"}
    assert found == idle | {key: expected_line(group) for key, group in groups.items()}
    assert report["total"] == expected_line(within)


async def test_the_total_is_the_sum_of_the_lines(store: Store) -> None:
    rows = await a_history(store, seed=9)
    async with store.database.session() as connection:
        report = await reports.usage_report(connection, WHOLE, ("team", "model", "day", "key"))
    assert len(report["data"]) > 20
    assert report["total"]["requests"] == num_requests(rows) < len(rows)
    for name in ("requests", "ok", "lost", "refused", "prompt_tokens", "output_tokens", "preemptions"):
        assert sum(line[name] for line in report["data"]) == report["total"][name]
    assert math.isclose(math.fsum(line["device_seconds"] for line in report["data"]), report["total"]["device_seconds"])


async def test_adjacent_periods_share_nothing_and_miss_nothing(store: Store) -> None:
    rows = await a_history(store, seed=3)
    edges = [0, *sorted(row.finished_at_us for row in rows)[::50], NOW_US * 2]
    counted = 0
    async with store.database.session() as connection:
        for start, end in pairwise(edges):
            report = await reports.usage_report(connection, Period(start, end))
            counted += sum(report["total"][name] for name in reports.OUTCOMES)
    assert counted == len(rows)


@pytest.mark.case("S08")
async def test_a_report_of_one_team_holds_nothing_of_the_others(store: Store) -> None:
    rows = await a_history(store, seed=4)
    async with store.database.session() as connection:
        report = await reports.usage_report(connection, Period(0, NOW_US * 2), ("team", "key"), team="chat")
        nobody = await reports.usage_report(connection, Period(0, NOW_US * 2), team="x' OR 1=1 --")
    own = [row for row in rows if row.team == "chat"]
    assert {line["team"] for line in report["data"]} == {"chat"}
    assert {line["key"] for line in report["data"]} == {row.key_public_id for row in own}
    assert report["total"]["output_tokens"] == sum(row.output_tokens for row in own)
    assert (nobody["data"], nobody["total"]["requests"]) == ([], 0)


@pytest.mark.case("B15")
async def test_a_renamed_team_is_one_line_history_included(store: Store) -> None:
    rows = await a_history(store, seed=5)
    async with store.database.begin_immediate() as connection:
        await teams.update_team(connection, "search", new_name="search-lab", at_us=NOW_US, actor="test")
    team_id = next(row.team_id for row in rows if row.team == "search")
    await book(store, [closed_row(open_entry("later", team_id=team_id, team="search-lab", tier="gold"))])
    async with store.database.session() as connection:
        report = await reports.usage_report(connection, Period(0, NOW_US * 2))
    lines = {line["team"]: line["requests"] for line in report["data"]}
    assert sorted(lines) == ["batch", "chat", "search-lab"]
    assert lines["search-lab"] == num_requests(row for row in rows if row.team == "search") + 1


@pytest.mark.case("B03")
async def test_a_negative_or_impossible_amount_is_not_booked(store: Store) -> None:
    from sqlalchemy.exc import IntegrityError

    for wrong in ({"output_tokens": -1}, {"device_us": -1}, {"cached_tokens": 11}, {"cached_tokens": -1}):
        with pytest.raises(IntegrityError):
            await book(store, [closed_row(open_entry("r", prompt_tokens=10), **wrong)])


@pytest.mark.case("B09")
async def test_cached_tokens_are_a_part_of_the_prompt(store: Store) -> None:
    await store.team("search")
    await book(store, [closed_row(open_entry("r", prompt_tokens=20_212), cached_tokens=16_298)])
    async with store.database.session() as connection:
        total = (await reports.usage_report(connection, Period(0, NOW_US * 2)))["total"]
    assert (total["prompt_tokens"], total["cached_tokens"]) == (20_212, 16_298)


@pytest.mark.case("G39")
@pytest.mark.parametrize("team", [None, "search"])
async def test_a_report_of_a_period_reads_by_index(store: Store, team: str | None) -> None:
    await store.team("search")
    asked: list[str] = []
    async with store.database.session() as connection:
        from sqlalchemy import event

        def note(_: Any, clause: Any, *__: Any) -> None:
            asked.append(str(clause.compile(dialect=sqlite.dialect(), compile_kwargs={"literal_binds": True})))

        sync = connection.sync_connection
        event.listen(sync, "before_execute", note)
        await reports.usage_report(connection, Period(NOW_US - DAY_US, NOW_US), ("team", "model"), team=team)
        event.remove(sync, "before_execute", note)
        of_ledger = [query for query in asked if "ledger" in query]
        assert len(of_ledger) == 4  # sums and times, for the lines and for the total, whatever the rows
        for query in of_ledger:
            plan = [str(row[-1]) for row in await connection.execute(text(f"EXPLAIN QUERY PLAN {query}"))]
            steps = [step for step in plan if "ledger" in step]
            assert steps and all(step.startswith("SEARCH ledger USING INDEX ix_ledger_") for step in steps), plan
        plan = [str(row[-1]) for row in await connection.execute(text("EXPLAIN QUERY PLAN SELECT * FROM ledger"))]
        assert plan == ["SCAN ledger"]  # what the check would see without an index


SUMMED = {
    "requests": lambda row: num_requests([row]),
    "prompt_tokens": lambda row: row.prompt_tokens,
    "cached_tokens": lambda row: row.cached_tokens,
    "output_tokens": lambda row: row.output_tokens,
    "device_seconds": lambda row: row.device_us,
    "overhead_device_seconds": lambda row: row.overhead_us,
    "preemptions": lambda row: row.num_preemptions,
    "swaps": lambda row: row.num_swaps,
    "recomputes": lambda row: row.num_recomputes,
    "promotions": lambda row: row.num_promotions,
}


def whole(name: str, value: float) -> int:
    """A figure of a report as the integer it was made from."""
    return round(value * 1e6) if name.endswith("_seconds") else int(value)


@pytest.mark.parametrize("time_zone", ["UTC", "America/New_York"])
async def test_every_grouping_sums_to_the_ledger(store: Store, time_zone: str) -> None:
    """Each of the 32 sets of dimensions, with teams and keys that no longer have a row of their own among them."""
    rows = await a_history(store, seed=11, count=250)
    gone = histories.ledger_rows(12, 50, keys=[(77, "G" * 12, 99, "batch")])
    await book(store, [replace(row, request_id=f"gone-{row.request_id}") for row in gone])
    expected = {name: sum(value(row) for row in [*rows, *gone]) for name, value in SUMMED.items()}
    period = replace(WHOLE, time_zone=time_zone)
    async with store.database.session() as connection:
        for size in range(len(reports.DIMENSIONS) + 1):
            for by in combinations(reports.DIMENSIONS, size):
                report = await reports.usage_report(connection, period, by)
                lines = {tuple(line[name] for name in by) for line in report["data"]}
                assert len(lines) == len(report["data"])
                for name in SUMMED:
                    summed = sum(whole(name, line[name]) for line in report["data"])
                    assert summed == whole(name, report["total"][name]) == expected[name], (by, name)
        (booked,) = await connection.execute(text("SELECT count(*), sum(device_us), sum(overhead_us) FROM ledger"))
    assert tuple(booked) == (300, expected["device_seconds"], expected["overhead_device_seconds"])


async def test_an_empty_period_has_no_lines_and_a_total_of_nothing(store: Store) -> None:
    await a_history(store, seed=1, count=10)
    async with store.database.session() as connection:
        for by in ((), ("team", "day")):
            report = await reports.usage_report(connection, Period(0, 1, "Asia/Tokyo"), by)
            assert (report["data"], report["total"]["requests"], report["total"]["device_seconds"]) == ([], 0, 0.0)
            assert report["total"]["jct_p95_seconds"] is None


async def test_an_unknown_or_doubled_dimension_is_refused(store: Store) -> None:
    async with store.database.session() as connection:
        for by in (("user",), ("team", "team"), ("team; DROP TABLE ledger",)):
            with pytest.raises(Invalid):
                await reports.usage_report(connection, Period(0, 1), by)


async def days_by(store: Store, period: Period, by: tuple[str, ...], team: str | None = None) -> list[dict[str, Any]]:
    async with store.database.session() as connection:
        lines: list[dict[str, Any]] = (await reports.usage_report(connection, period, by, team=team))["data"]
    return lines


@pytest.mark.case("H03")
async def test_when_nothing_ended_then_days_and_asked_teams_have_zeros(store: Store) -> None:
    await store.team("search")
    period = Period(NOW_US - 3 * DAY_US, NOW_US)
    for by, team in ((("day",), None), (("day",), "search"), (("team", "day"), "search"), (("day", "team"), "search")):
        lines = await days_by(store, period, by, team)
        assert [line["requests"] for line in lines] == [0, 0, 0, 0]
        assert all(line.get("team", "search") == "search" for line in lines)
    for by, team in ((("team", "day"), None), (("team", "day"), "nobody"), (("key", "day"), "search")):
        assert await days_by(store, period, by, team) == []


@pytest.mark.case("H03")
async def test_when_an_asked_team_is_idle_then_others_have_no_lines(store: Store) -> None:
    await a_history(store, seed=2, count=60)
    period = Period(NOW_US - 6 * DAY_US, NOW_US)
    lines = await days_by(store, period, ("team", "day"), "chat")
    assert {line["team"] for line in lines} == {"chat"} and len(lines) == 7
    everybody = await days_by(store, period, ("team", "day"))
    assert Counter(line["team"] for line in everybody) == {"chat": 7, "search": 7, "batch": 7}
    assert len(await days_by(store, period, ("team",))) == 3


@pytest.mark.case("H03")
async def test_when_the_period_is_endless_then_idle_days_are_bounded(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    await a_history(store, seed=2, count=60)
    endless = Period(0, NOW_US * 100, "Europe/Berlin")
    lines = await days_by(store, endless, ("team", "day"))
    busy = sorted({line["day"] for line in lines if line["requests"]})
    days = sorted({line["day"] for line in lines})
    one_year = timedelta(days=usage.IDLE_DAYS_MAX)
    assert date.fromisoformat(busy[0]) - date.fromisoformat(days[0]) == one_year
    assert date.fromisoformat(days[-1]) - date.fromisoformat(busy[-1]) == one_year
    assert len(lines) == 3 * len(days)
    monkeypatch.setattr(usage, "LINES_MAX", len(lines))
    assert len(await days_by(store, endless, ("team", "day"))) == len(lines)
    monkeypatch.setattr(usage, "LINES_MAX", len(lines) - 1)
    with pytest.raises(Invalid, match=f"would have {len(lines)} lines, 3 for each of .* shorter period"):
        await days_by(store, endless, ("team", "day"))
