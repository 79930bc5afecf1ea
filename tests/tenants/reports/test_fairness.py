"""The fairness report and the series against plain loops over the same rows."""

import random
from collections import Counter, defaultdict
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from sqlalchemy import event

from tenants import reports
from tenants.reports import queries as ledger_queries
from tenants.reports.periods import Period
from tenants.rows import InterferenceRow, LedgerRow, SampleRow, ServiceSampleRow, StepSampleRow
from tests.support.tenants import histories
from tests.support.tenants.histories import TEAMS, a_history, book, nearest_rank
from tests.support.tenants.stores import NOW_US, Store, closed_row, open_entry

pytestmark = pytest.mark.anyio


async def some_samples(store: Store, seed: int) -> tuple[dict[int, tuple[str, int]], list[SampleRow]]:
    """Sixty seconds of three teams: id -> (name, weight), and what is booked."""
    ids = {await store.team(team, tier): (team, histories.WEIGHTS[tier]) for team, tier in TEAMS.items()}
    rows = histories.samples(seed, team_ids=list(ids), start_us=NOW_US, seconds=60)
    await histories.book_samples(store, rows)
    return ids, rows


def services(rows: list[SampleRow]) -> list[ServiceSampleRow]:
    return [row for row in rows if isinstance(row, ServiceSampleRow)]


@pytest.mark.parametrize("seed", range(3))
async def test_fairness_equals_a_plain_loop(store: Store, seed: int) -> None:
    ids, samples = await some_samples(store, seed)
    period = Period(NOW_US + 5_000_000, NOW_US + 50_000_000)
    async with store.database.session() as connection:
        report = await reports.fairness_report(connection, period)
    within = [one for one in services(samples) if period.from_us <= one.at_us < period.to_us]
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


async def test_the_index_sees_device_time_not_waiting_or_requests(store: Store) -> None:
    """Two backlogged teams of one weight; one has 80 times the device seconds of the other for as many requests."""
    ids = [await store.team(team, "gold") for team in ("hog", "victim")]
    both = [
        ServiceSampleRow(
            at_us=NOW_US,
            team_id=team_id,
            interval_ms=1000,
            served_us=served,
            entitled_us=405_000,
            backlogged_ms=1000,
            waiting=1,
            running=1,
            lag_min_us=0.0,
            lag_max_us=0.0,
        )
        for team_id, served in zip(ids, (800_000, 10_000), strict=True)
    ]
    await histories.book_samples(store, both)
    async with store.database.session() as connection:
        report = await reports.fairness_report(connection, Period(NOW_US, NOW_US + 1))
    assert [(line["team"], round(line["share"], 4), line["entitled"]) for line in report["data"]] == [
        ("hog", 0.9877, 0.5),
        ("victim", 0.0123, 0.5),
    ]
    assert report["jain_weighted"] == pytest.approx(0.5125, abs=1e-3)
    assert report["satisfaction_min_to_max"] == pytest.approx(1 / 80)


@pytest.mark.parametrize("seed", range(2))
async def test_team_lines_sum_and_bound_what_was_sampled(store: Store, seed: int) -> None:
    ids, samples = await some_samples(store, seed)
    rows = await a_history_of(store, ids, seed)
    period = Period(NOW_US + 3_000_000, NOW_US + 51_000_000)
    async with store.database.session() as connection:
        report = await reports.fairness_report(connection, period)
    within = [one for one in services(samples) if period.from_us <= one.at_us < period.to_us]
    booked = [row for row in rows if period.from_us <= row.finished_at_us < period.to_us]
    assert len(booked) > 10
    for team_id, (team, _) in ids.items():
        line = next(line for line in report["data"] if line["team"] == team)
        own = [one for one in within if one.team_id == team_id]
        of_ledger = [row for row in booked if row.team_id == team_id]
        assert line["requests"] == histories.num_requests(of_ledger)
        for name in ("preemptions", "swaps", "recomputes"):
            assert line[name] == sum(getattr(row, f"num_{name}") for row in of_ledger)
        assert line["promotions"] == sum(one.promotions for one in own)
        assert line["promotions_exhausted"] == sum(one.exhausted for one in own)
        assert line["promotion_budget_seconds"] == own[-1].budget_us / 1e6  # what is left at the end
        assert line["promoted_seconds"] == sum(one.promoted_us for one in own) / 1e6
        assert line["overhead_device_seconds"] == sum(one.overhead_us for one in own) / 1e6
        assert line["active_seconds"] == len(own)
        assert line["longest_pause_seconds"] == max(one.longest_pause_us for one in own) / 1e6
        assert line["pause_bound_seconds"] == max(one.pause_bound_us for one in own) / 1e6
        assert line["lag_min_seconds"] == pytest.approx(min(one.lag_min_us for one in own) / 1e6)
        assert line["lag_bound_seconds"] == pytest.approx(max(one.lag_bound_us for one in own) / 1e6)
    assert report["lag_bound_seconds"] == pytest.approx(max(one.lag_bound_us for one in within) / 1e6)
    assert report["totals"]["promotions"] == sum(one.promotions for one in within)


async def a_history_of(store: Store, ids: dict[int, tuple[str, int]], seed: int) -> list[LedgerRow]:
    """Ledger rows of these teams that finished within the minute after NOW_US."""
    keys = [(team_id, f"{team_id:012d}", team_id, team) for team_id, (team, _) in ids.items()]
    rng = random.Random(seed)
    rows = [
        replace(row, finished_at_us=NOW_US + rng.randrange(60_000_000))
        for row in histories.ledger_rows(seed, 100, keys=keys)
    ]
    await book(store, rows)
    return rows


@pytest.mark.parametrize("seed", range(2))
async def test_interference_names_who_caused_and_who_paid(store: Store, seed: int) -> None:
    ids, samples = await some_samples(store, seed)
    stranger = InterferenceRow(at_us=NOW_US + 7_000_000, causer_id=99, victim_id=min(ids), bytes_out=5, billed_us=6)
    await histories.book_samples(store, [stranger])
    period = Period(NOW_US + 3_000_000, NOW_US + 51_000_000)
    async with store.database.session() as connection:
        report = await reports.fairness_report(connection, period)
    within = [one for one in [*samples, stranger] if period.from_us <= one.at_us < period.to_us]
    names = {team_id: team for team_id, (team, _) in ids.items()} | {99: "team 99"}
    counts = ("preemptions", "swaps_out", "swaps_in", "recomputes", "bytes_out", "bytes_in")
    expected: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for one in within:
        if isinstance(one, InterferenceRow):
            pair = expected[names[one.causer_id], names[one.victim_id]]
            pair.update({name: getattr(one, name) for name in (*counts, "billed_us")})
    found = {(line.pop("causer"), line.pop("victim")): line for line in report["interference"]}
    assert len(found) == len(expected) == 10
    for pair, line in found.items():
        assert line == {name: expected[pair][name] for name in counts} | {
            "device_seconds": expected[pair]["billed_us"] / 1e6
        }
    for name in counts:
        assert report["totals"][name] == sum(line[name] for line in expected.values())
    steps = [one for one in within if isinstance(one, StepSampleRow)]
    assert report["totals"]["stall_seconds"] == sum(one.stall_us for one in steps) / 1e6
    assert report["totals"]["replayed_tokens"] == sum(one.replayed_tokens for one in steps) > 0


async def test_waits_and_pauses_of_tiers_come_from_the_ledger(store: Store) -> None:
    rows = await a_history(store, seed=6)
    async with store.database.session() as connection:
        report = await reports.fairness_report(connection, Period(0, NOW_US * 2))
    assert [tier["tier"] for tier in report["tiers"]] == ["bronze", "gold", "silver"]
    for tier in report["tiers"]:
        own = [row for row in rows if row.tier == tier["tier"]]
        queue = [row.started_at_us - row.admitted_at_us for row in own if row.started_at_us is not None]
        ttft = [row.first_token_at_us - row.received_at_us for row in own if row.first_token_at_us is not None]
        jct = [row.finished_at_us - row.received_at_us for row in own if row.outcome == "ok"]
        assert tier["requests"] == histories.num_requests(own)
        for name, values in (("queue", queue), ("ttft", ttft), ("jct", jct)):
            for percent in (50, 95):
                assert tier[f"{name}_p{percent}_seconds"] == nearest_rank(values, percent) / 1e6
            assert tier[f"{name}_max_seconds"] == max(values) / 1e6
        assert tier["longest_pause_seconds"] == max(row.longest_pause_us for row in own) / 1e6
        assert tier["pause_bound_seconds"] == max(row.pause_bound_us for row in own) / 1e6
        assert tier["pauses_over_bound"] == sum(0 < row.pause_bound_us < row.longest_pause_us for row in own)
    assert sum(tier["pauses_over_bound"] for tier in report["tiers"]) > 0
    assert (report["data"], report["jain_weighted"], report["lag_max_seconds"]) == ([], None, None)


@pytest.mark.parametrize("seed", range(3))
async def test_size_classes_equal_a_plain_loop(store: Store, seed: int) -> None:
    rows = await a_history(store, seed=20 + seed, count=(400, 60, 9)[seed])
    async with store.database.session() as connection:
        report = await reports.fairness_report(connection, Period(0, NOW_US * 2))
    groups: dict[tuple[str, str], list[LedgerRow]] = defaultdict(list)
    for row in rows:
        tokens = row.prompt_tokens + row.output_tokens
        if not tokens:  # it never ran, and has no size
            continue
        groups[row.tier, "short" if tokens <= 128 else "medium" if tokens <= 512 else "long"].append(row)
    order = {"short": 0, "medium": 1, "long": 2}
    lines = report["size_classes"]
    assert [(line["tier"], line["size"]) for line in lines] == sorted(groups, key=lambda key: (key[0], order[key[1]]))
    for line in lines:
        own = groups[line["tier"], line["size"]]
        waits = [row.started_at_us - row.admitted_at_us for row in own if row.started_at_us is not None]
        # Exact fractions: the order of two slowdowns must not depend on rounding.
        slowdowns = [
            Fraction(row.finished_at_us - row.received_at_us, row.work_us)
            for row in own
            if row.outcome == "ok" and row.work_us > 0
        ]
        assert line["requests"] == histories.num_requests(own)
        for percent in (50, 95):
            wait, slowdown = nearest_rank(waits, percent), nearest_rank(slowdowns, percent)
            assert line[f"wait_p{percent}_seconds"] == (None if wait is None else wait / 1e6)
            assert line[f"slowdown_p{percent}"] == (None if slowdown is None else float(slowdown))
        assert line["wait_max_seconds"] == (max(waits) / 1e6 if waits else None)
        assert line["slowdown_max"] == (float(max(slowdowns)) if slowdowns else None)
        mean = sum(slowdowns) / len(slowdowns) if slowdowns else None
        assert line["slowdown_mean"] == (None if mean is None else pytest.approx(float(mean)))


@pytest.mark.parametrize(
    ("tokens", "size"), [(1, "short"), (128, "short"), (129, "medium"), (512, "medium"), (513, "long")]
)
async def test_the_edges_of_the_size_classes(store: Store, tokens: int, size: str) -> None:
    assert (ledger_queries.SHORT_TOKENS_MAX, ledger_queries.MEDIUM_TOKENS_MAX) == (128, 512)
    await store.team("search")
    await book(store, [closed_row(open_entry("r", prompt_tokens=1), output_tokens=tokens - 1)])
    async with store.database.session() as connection:
        report = await reports.fairness_report(connection, Period(0, NOW_US * 2))
    assert [(line["tier"], line["size"]) for line in report["size_classes"]] == [("gold", size)]


@pytest.mark.case("G43")
@pytest.mark.parametrize("is_filled", [False, True])
async def test_a_report_is_a_fixed_number_of_statements(store: Store, is_filled: bool) -> None:
    """Whatever the numbers of rows, teams and pairs; all of them within one transaction."""
    if is_filled:
        await some_samples(store, 1)
        await book(store, histories.ledger_rows(1))
    statements: list[str] = []
    async with store.database.session() as connection:
        sync = connection.sync_connection
        assert sync is not None

        def note(*called_with: Any) -> None:
            statements.append(called_with[2])

        event.listen(sync, "before_cursor_execute", note)
        counts = []
        for report in (
            reports.fairness_report(connection, Period(NOW_US - 1, NOW_US + 90_000_000)),
            reports.service_series(connection, Period(NOW_US - 1, NOW_US + 90_000_000)),
            reports.usage_report(connection, Period(0, NOW_US * 2, "Europe/Berlin"), ("team", "day", "key")),
        ):
            before = len(statements)
            await report
            counts.append(len(statements) - before)
    assert counts == [10, 3 if is_filled else 2, 8]


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
