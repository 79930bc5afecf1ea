"""Random ledger rows and samples, and what a test does with them."""

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from typing import Any

from sqlalchemy import Table, insert

from tenants import tables
from tenants.retention import Retention
from tenants.rows import InterferenceRow, LedgerRow, SampleRow, ServiceSampleRow, StepSampleRow
from tests.support.tenants.stores import NOW_US, Store, closed_row, open_entry

DAY_US = 86_400_000_000
SECOND_US = 1_000_000
TEAMS = {"search": "gold", "chat": "silver", "batch": "bronze"}
WEIGHTS = {"gold": 4, "silver": 2, "bronze": 1}
OUTCOMES = ["ok", "ok", "ok", "client_closed", "timeout", "error", "lost", "shutdown", "refused"]
KEYS = ((1, "A" * 12, 1, "search"), (2, "B" * 12, 2, "chat"), (3, "C" * 12, 3, "batch"))
SAMPLE_TABLES: dict[type[SampleRow], Table] = {
    ServiceSampleRow: tables.service_samples,
    InterferenceRow: tables.interference_samples,
    StepSampleRow: tables.step_samples,
}


def values(rows: Iterable[LedgerRow | SampleRow]) -> list[dict[str, Any]]:
    """As an INSERT takes them."""
    return [{field.name: getattr(row, field.name) for field in fields(row)} for row in rows]


def ledger_rows(
    seed: int,
    count: int = 400,
    *,
    keys: Sequence[tuple[int, str, int, str]] = (
        (1, "A" * 12, 1, "search"),
        (2, "B" * 12, 2, "chat"),
        (3, "C" * 12, 3, "batch"),
    ),
    before_us: int = NOW_US,
    days: int = 5,
) -> list[LedgerRow]:
    """Rows over `days` days before `before_us`: some never started, some refused by their client half-way.

    `keys` are (key id, public id, team id, team); teams are those of TEAMS.
    """
    rng = random.Random(seed)
    rows = []
    for i in range(count):
        key_id, public_id, team_id, team = rng.choice(keys)
        received = before_us - rng.randrange(days * DAY_US)
        entry = open_entry(
            f"r{i}",
            key_id=key_id,
            key_public_id=public_id,
            team_id=team_id,
            team=team,
            tier=TEAMS[team],
            model=rng.choice(["small", "large"]),
            engine_id="e1" if i % 3 else "sim:e1",
            received_at_us=received,
            admitted_at_us=received + rng.randrange(5_000),
            prompt_tokens=rng.choice([rng.randrange(1, 200), rng.randrange(1, 3_000)]),
        )
        started = entry.admitted_at_us + rng.randrange(2_000_000) if rng.random() < 0.9 else None
        first = started + rng.randrange(900_000) if started is not None and rng.random() < 0.9 else None
        device_us = rng.randrange(10**7)
        outcome = rng.choice(OUTCOMES)
        never_ran = outcome == "refused" or (outcome == "timeout" and rng.random() < 0.5)  # or is of an older version
        if never_ran:
            entry, started, first, device_us = replace(entry, prompt_tokens=0), None, None, 0
        rows.append(
            closed_row(
                entry,
                started_at_us=started,
                first_token_at_us=first,
                finished_at_us=(first or started or entry.admitted_at_us) + rng.randrange(9_000_000),
                cached_tokens=rng.randrange(entry.prompt_tokens + 1),
                output_tokens=0 if never_ran else rng.randrange(500),
                device_us=device_us,
                overhead_us=rng.randrange(device_us + 1),
                work_us=rng.choice([0, rng.randrange(1, 10**6)]),
                longest_pause_us=rng.randrange(10**7),
                pause_bound_us=rng.choice([0, rng.randrange(10**7)]),
                num_preemptions=rng.randrange(3),
                num_swaps=rng.randrange(3),
                num_recomputes=rng.randrange(2),
                num_promotions=rng.randrange(2),
                outcome=outcome,
            )
        )
    return rows


def num_requests(rows: Iterable[LedgerRow]) -> int:
    """Rows but for those of requests that were given back: they never ran, and used no tokens."""
    return sum(row.outcome not in ("refused", "timeout") or row.prompt_tokens + row.output_tokens > 0 for row in rows)


def samples(seed: int, *, team_ids: Sequence[int], start_us: int, seconds: int, every: int = 1) -> list[SampleRow]:
    """One interval in `every` seconds of teams that come, go, are sometimes backlogged, and get in each other's way.

    The last of `team_ids` is never backlogged.
    """
    rng = random.Random(seed)
    rows: list[SampleRow] = []
    for second in range(0, seconds * every, every):
        at_us = start_us + second * SECOND_US
        bound = rng.random() * 1e6
        for team_id in team_ids:
            if rng.random() < 0.8:
                rows.append(
                    ServiceSampleRow(
                        at_us=at_us,
                        team_id=team_id,
                        interval_ms=1000,
                        served_us=rng.randrange(600_000),
                        entitled_us=rng.randrange(600_000),
                        backlogged_ms=rng.choice([0, 0, 400, 1000]) if team_id != team_ids[-1] else 0,
                        waiting=rng.randrange(5),
                        running=rng.randrange(5),
                        lag_min_us=-rng.random() * 1e5,
                        lag_max_us=rng.random() * 1e6,
                        promotions=rng.randrange(3),
                        exhausted=rng.randrange(2),
                        budget_us=rng.randrange(-10_000, 100_000),
                        starving=rng.randrange(4),
                        promoted_us=rng.randrange(9_000),
                        overhead_us=rng.randrange(5_000),
                        pause_bound_us=rng.randrange(10**7),
                        longest_pause_us=rng.randrange(10**7),
                        bytes_swapped_out=rng.randrange(10**6),
                        bytes_swapped_in=rng.randrange(10**6),
                        lag_bound_us=bound,
                    )
                )
            for victim_id in team_ids:
                if rng.random() < 0.3:
                    counts = {name: rng.randrange(3) for name in ("preemptions", "swaps_out", "swaps_in", "recomputes")}
                    moved = {name: rng.randrange(10**9) for name in ("bytes_out", "bytes_in", "billed_us")}
                    rows.append(InterferenceRow(at_us=at_us, causer_id=team_id, victim_id=victim_id, **counts, **moved))
        rows.append(
            StepSampleRow(
                at_us=at_us, interval_ms=1000, stall_us=rng.randrange(99_999), replayed_tokens=rng.randrange(50)
            )
        )
    return rows


def nearest_rank(values: Iterable[float], percent: int) -> float | None:
    """The least value that at least `percent` of them do not exceed."""
    ordered = sorted(values)
    return ordered[math.ceil(len(ordered) * percent / 100) - 1] if ordered else None


async def book(store: Store, rows: Sequence[LedgerRow]) -> None:
    """Ledger rows, as they are."""
    async with store.database.begin_immediate() as connection:
        await connection.execute(insert(tables.ledger), values(rows))


async def book_samples(store: Store, rows: Sequence[SampleRow]) -> None:
    """Samples of all kinds, as they are."""
    async with store.database.begin_immediate() as connection:
        for kind, table in SAMPLE_TABLES.items():
            of_kind = [row for row in rows if isinstance(row, kind)]
            if of_kind:
                await connection.execute(insert(table), values(of_kind))


async def a_history(store: Store, seed: int, count: int = 400) -> list[LedgerRow]:
    """Three teams, one of which has two keys, and their rows over five days."""
    ids = {team: await store.team(team, tier) for team, tier in TEAMS.items()}
    keys = [
        (number, (await store.key(team))[0], ids[team], team) for number, team in enumerate([*TEAMS, "search"], start=1)
    ]
    rows = ledger_rows(seed, count, keys=keys)
    await book(store, rows)
    return rows


async def settle_retention(retention: Retention, now_us: int) -> int:
    """Let it do everything that is due at `now_us`, and count the pieces. Ages are by this clock alone."""

    async def by_the_clock(now_us: int) -> int:
        return now_us

    await retention.load()
    retention._measure_age = by_the_clock  # type: ignore[method-assign]
    pieces = 0
    while retention.is_due(now_us):
        await retention.work(now_us)
        pieces += 1
        assert pieces < 100_000
    return pieces
