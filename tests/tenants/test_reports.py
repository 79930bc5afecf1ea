"""Reports against plain loops over the same rows."""

import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

import pytest
from sqlalchemy import insert, text
from sqlalchemy.dialects import sqlite

from tenants import reports, tables, teams
from tenants.errors import Invalid
from tenants.periods import Period, parse_moment, parse_period
from tenants.rows import LedgerRow, ServiceSampleRow
from tests.tenants.support import NOW_US, Store, closed_row, open_entry

pytestmark = pytest.mark.anyio
DAY_US = 86_400_000_000
TEAMS = {"search": "gold", "chat": "silver", "batch": "bronze"}


def nearest_rank(values: list[int], percent: int) -> float | None:
    """The least value that at least `percent` of them do not exceed, in seconds."""
    if not values:
        return None
    return sorted(values)[math.ceil(len(values) * percent / 100) - 1] / 1e6


async def book(store: Store, rows: list[LedgerRow]) -> None:
    values = [{name: getattr(row, name) for name in row.__dataclass_fields__} for row in rows]
    async with store.database.begin_immediate() as connection:
        await connection.execute(insert(tables.ledger), values)


async def a_history(store: Store, seed: int, count: int = 400) -> list[LedgerRow]:
    """Rows of three teams over five days, some never started, some refused by their client half-way."""
    rng = random.Random(seed)
    ids = {team: await store.team(team, tier) for team, tier in TEAMS.items()}
    keys: dict[int, tuple[int, str]] = {}
    for number, team in enumerate([*TEAMS, "search"], start=1):
        keys[number] = (ids[team], (await store.key(team))[0])
    rows = []
    for i in range(count):
        key_id = rng.choice(list(keys))
        team_id, public_id = keys[key_id]
        team = next(name for name, one in ids.items() if one == team_id)
        received = NOW_US - rng.randrange(5 * DAY_US)
        entry = open_entry(
            f"r{i}",
            key_id=key_id,
            key_public_id=public_id,
            team_id=team_id,
            team=team,
            tier=TEAMS[team],
            model=rng.choice(["small", "large"]),
            received_at_us=received,
            admitted_at_us=received + rng.randrange(5_000),
            prompt_tokens=rng.randrange(1, 3_000),
        )
        started = entry.admitted_at_us + rng.randrange(2_000_000) if rng.random() < 0.9 else None
        first = started + rng.randrange(900_000) if started is not None and rng.random() < 0.9 else None
        rows.append(
            closed_row(
                entry,
                started_at_us=started,
                first_token_at_us=first,
                finished_at_us=(first or started or entry.admitted_at_us) + rng.randrange(9_000_000),
                cached_tokens=rng.randrange(entry.prompt_tokens + 1),
                output_tokens=rng.randrange(500),
                device_us=rng.randrange(10**7),
                overhead_us=rng.randrange(10**6),
                work_us=rng.choice([0, rng.randrange(1, 10**6)]),
                longest_pause_us=rng.randrange(10**7),
                pause_bound_us=rng.choice([0, rng.randrange(10**7)]),
                num_preemptions=rng.randrange(3),
                num_swaps=rng.randrange(3),
                num_recomputes=rng.randrange(2),
                num_promotions=rng.randrange(2),
                outcome=rng.choice(["ok", "ok", "ok", "client_closed", "timeout", "error", "lost", "shutdown"]),
            )
        )
    await book(store, rows)
    return rows


def expected_line(rows: list[LedgerRow]) -> dict[str, Any]:
    """One line of the usage report, the slow way."""
    queue = [row.started_at_us - row.admitted_at_us for row in rows if row.started_at_us is not None]
    ttft = [row.first_token_at_us - row.received_at_us for row in rows if row.first_token_at_us is not None]
    jct = [row.finished_at_us - row.received_at_us for row in rows if row.outcome == "ok"]
    outcomes = Counter(row.outcome for row in rows)
    line: dict[str, Any] = {"requests": len(rows)}
    line |= {name: outcomes[name] for name in reports.OUTCOMES}
    line |= {name: sum(getattr(row, name) for row in rows) for name in ("prompt_tokens", "cached_tokens")}
    line["output_tokens"] = sum(row.output_tokens for row in rows)
    line["device_seconds"] = sum(row.device_us for row in rows) / 1e6
    line["overhead_device_seconds"] = sum(row.overhead_us for row in rows) / 1e6
    for name in ("preemptions", "swaps", "recomputes", "promotions"):
        line[name] = sum(getattr(row, f"num_{name}") for row in rows)
    for name, values in (("queue", queue), ("ttft", ttft), ("jct", jct)):
        line[f"{name}_p50_seconds"] = nearest_rank(values, 50)
        line[f"{name}_p95_seconds"] = nearest_rank(values, 95)
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
    assert found == {key: expected_line(group) for key, group in groups.items()}
    assert report["total"] == expected_line(within)


async def test_the_total_is_the_sum_of_the_lines(store: Store) -> None:
    rows = await a_history(store, seed=9)
    async with store.database.session() as connection:
        report = await reports.usage_report(connection, Period(0, NOW_US * 2), ("team", "model", "day", "key"))
    assert len(report["data"]) > 20
    assert report["total"]["requests"] == len(rows)
    for name in ("requests", "ok", "lost", "prompt_tokens", "output_tokens", "preemptions"):
        assert sum(line[name] for line in report["data"]) == report["total"][name]
    assert math.isclose(math.fsum(line["device_seconds"] for line in report["data"]), report["total"]["device_seconds"])


async def test_adjacent_periods_share_nothing_and_miss_nothing(store: Store) -> None:
    rows = await a_history(store, seed=3)
    edges = [0, *sorted(row.finished_at_us for row in rows)[::50], NOW_US * 2]
    counted = 0
    async with store.database.session() as connection:
        for start, end in pairwise(edges):
            report = await reports.usage_report(connection, Period(start, end))
            counted += report["total"]["requests"]
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
    assert lines["search-lab"] == sum(row.team == "search" for row in rows) + 1


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
async def test_a_report_of_a_period_reads_by_index_and_never_the_whole_ledger(store: Store, team: str | None) -> None:
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


# --- fairness -----------------------------------------------------------------------------------------------------


async def some_samples(store: Store, seed: int) -> tuple[dict[int, tuple[str, int]], list[ServiceSampleRow]]:
    """Sixty seconds of three teams that come, go, and are sometimes backlogged."""
    rng = random.Random(seed)
    ids = {}
    for team, tier in TEAMS.items():
        ids[await store.team(team, tier)] = (team, {"gold": 4, "silver": 2, "bronze": 1}[tier])
    samples = []
    for second in range(60):
        for team_id in ids:
            if rng.random() < 0.8:
                samples.append(
                    ServiceSampleRow(
                        at_us=NOW_US + second * 1_000_000,
                        team_id=team_id,
                        interval_ms=1000,
                        served_us=rng.randrange(600_000),
                        entitled_us=rng.randrange(600_000),
                        backlogged_ms=rng.choice([0, 0, 400, 1000]) if team_id != 3 else 0,
                        waiting=rng.randrange(5),
                        running=rng.randrange(5),
                        lag_min_us=-rng.random() * 1e5,
                        lag_max_us=rng.random() * 1e6,
                    )
                )
    values = [{name: getattr(row, name) for name in row.__dataclass_fields__} for row in samples]
    async with store.database.begin_immediate() as connection:
        await connection.execute(insert(tables.service_samples), values)
    return ids, samples


@pytest.mark.parametrize("seed", range(3))
async def test_fairness_equals_a_plain_loop(store: Store, seed: int) -> None:
    ids, samples = await some_samples(store, seed)
    period = Period(NOW_US + 5_000_000, NOW_US + 50_000_000)
    async with store.database.session() as connection:
        report = await reports.fairness_report(connection, period)
    within = [one for one in samples if period.from_us <= one.at_us < period.to_us]
    weighted = []
    for team_id, (team, weight) in ids.items():
        own = [one for one in within if one.team_id == team_id]
        seconds = {one.at_us for one in own if one.backlogged_ms > 0}
        served = sum(one.served_us for one in own if one.at_us in seconds)
        entitled = sum(one.entitled_us for one in own if one.at_us in seconds)
        line = next(line for line in report["data"] if line["team"] == team)
        assert line["weight"] == weight
        assert line["device_seconds"] == pytest.approx(sum(one.served_us for one in own) / 1e6)
        assert line["backlogged_seconds"] == sum(one.backlogged_ms for one in own) / 1e3
        assert line["lag_max_seconds"] == pytest.approx(max(one.lag_max_us for one in own) / 1e6)
        if team_id == 3:  # was never backlogged: nobody owes it anything
            assert (line["share"], line["entitled"], line["satisfaction"]) == (None, None, None)
            continue
        everybody = [one for one in within if one.at_us in seconds]
        assert line["share"] == pytest.approx(served / sum(one.served_us for one in everybody))
        assert line["entitled"] == pytest.approx(entitled / sum(one.entitled_us for one in everybody))
        assert line["satisfaction"] == pytest.approx(served / entitled)
        weighted.append((weight, served / entitled))
    top = sum(w * x for w, x in weighted) ** 2
    assert report["jain_weighted"] == pytest.approx(top / (6 * sum(w * x * x for w, x in weighted)))
    assert report["satisfaction_min_to_max"] == pytest.approx(min(x for _, x in weighted) / max(x for _, x in weighted))
    assert report["lag_max_seconds"] == pytest.approx(max(one.lag_max_us for one in within) / 1e6)
    assert report["device_seconds"] == pytest.approx(sum(one.served_us for one in within) / 1e6)


@pytest.mark.case("G55")
async def test_the_index_sees_device_time_not_waiting_or_requests(store: Store) -> None:
    """Two backlogged teams of one weight; one has 80 times the device seconds of the other for as many requests."""
    ids = [await store.team(team, "gold") for team in ("hog", "victim")]
    values = [
        {"at_us": NOW_US, "team_id": team_id, "interval_ms": 1000, "served_us": served, "entitled_us": 405_000}
        | {"backlogged_ms": 1000, "waiting": 1, "running": 1, "lag_min_us": 0.0, "lag_max_us": 0.0}
        | {"promotions": 0, "bytes_swapped_out": 0, "bytes_swapped_in": 0}
        for team_id, served in zip(ids, (800_000, 10_000), strict=True)
    ]
    async with store.database.begin_immediate() as connection:
        await connection.execute(insert(tables.service_samples), values)
        report = await reports.fairness_report(connection, Period(NOW_US, NOW_US + 1))
    assert [(line["team"], round(line["share"], 4), line["entitled"]) for line in report["data"]] == [
        ("hog", 0.9877, 0.5),
        ("victim", 0.0123, 0.5),
    ]
    assert report["jain_weighted"] == pytest.approx(0.5125, abs=1e-3)
    assert report["satisfaction_min_to_max"] == pytest.approx(1 / 80)


async def test_fairness_shows_the_waits_of_tiers_and_the_ledgers_counts(store: Store) -> None:
    rows = await a_history(store, seed=6)
    async with store.database.session() as connection:
        report = await reports.fairness_report(connection, Period(0, NOW_US * 2))
    assert [tier["tier"] for tier in report["tiers"]] == ["bronze", "gold", "silver"]
    for tier in report["tiers"]:
        expected = expected_line([row for row in rows if row.tier == tier["tier"]])
        for name in ("requests", "queue_p50_seconds", "queue_p95_seconds", "queue_max_seconds", "ttft_p95_seconds"):
            assert tier[name] == expected[name]
    assert (report["data"], report["jain_weighted"], report["lag_max_seconds"]) == ([], None, None)


async def test_a_series_has_every_team_at_every_moment(store: Store) -> None:
    ids, samples = await some_samples(store, 0)
    async with store.database.session() as connection:
        series = await reports.service_series(connection, Period(0, NOW_US * 2))
    assert len(series["at"]) == len({one.at_us for one in samples})
    for team_id, (team, _) in ids.items():
        assert len(series["served"][team]) == len(series["at"])
        total = sum(one.served_us for one in samples if one.team_id == team_id)
        assert math.fsum(series["served"][team]) == pytest.approx(total / 1e6)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], None),
        ([(1, 0.0)], None),
        ([(1, 2.0), (7, 2.0)], 1.0),
        ([(1, 1.0), (1, 0.0)], 0.5),
        ([(3, 1), (1, 0)], 0.75),
    ],
)
def test_weighted_jain_of_known_cases(values: list[tuple[float, float]], expected: float | None) -> None:
    assert reports.weighted_jain(values) == expected


# --- periods ------------------------------------------------------------------------------------------------------


def test_a_moment_is_utc_unless_it_says_otherwise() -> None:
    midnight = parse_moment("2026-03-31", "from")
    assert midnight == parse_moment("2026-03-31T00:00:00Z", "from") == parse_moment("2026-03-31T09:00:00+09:00", "from")
    assert parse_moment("2026-03-31T00:00:00", "from") == midnight
    assert parse_moment("2024-02-29", "from") + DAY_US == parse_moment("2024-03-01", "from")


@pytest.mark.parametrize(
    "wrong",
    [
        "",
        "yesterday",
        "2026-02-30",
        "2026-13-01",
        "1" * 400,
        "0001-01-01T00:00:00+23:59",
        "1969-12-31",
        "9999-12-31T23:59:59-23:00",
        "2026-W01-1",
        "20260101",
        "2026-01-01T00:00:00Z " + "0" * 40,
    ],
)
def test_a_wrong_moment_names_the_parameter(wrong: str) -> None:
    with pytest.raises(Invalid) as caught:
        parse_moment(wrong, "to")
    assert caught.value.param == "to"


def test_a_period_is_the_last_day_unless_said_and_never_empty() -> None:
    assert parse_period(None, None, NOW_US) == Period(NOW_US + 1 - DAY_US, NOW_US + 1)
    assert parse_period("1970-01-01", "1970-01-01T00:00:01Z", NOW_US) == Period(0, 1_000_000)
    assert parse_period(None, "1970-01-01T00:00:01Z", NOW_US) == Period(0, 1_000_000)
    for pair in (("2026-01-02", "2026-01-01"), ("2026-01-01", "2026-01-01")):
        with pytest.raises(Invalid, match="empty"):
            parse_period(*pair, NOW_US)


async def test_an_unknown_or_doubled_dimension_is_refused(store: Store) -> None:
    async with store.database.session() as connection:
        for by in (("user",), ("team", "team"), ("team; DROP TABLE ledger",)):
            with pytest.raises(Invalid):
                await reports.usage_report(connection, Period(0, 1), by)
