"""Sums and exact percentiles of ledger rows, by group. The database groups and sorts; nothing is fetched by row."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Float, case, cast, func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from tenants import tables
from tenants.reports.periods import Period
from tenants.rows import GIVEN_BACK, SIMULATED_PREFIX

_ledger = tables.ledger.c
OUTCOMES = ("ok", "client_closed", "timeout", "error", "lost", "shutdown", "refused")

# Size of a request by prompt and output tokens together: short, medium, long.
SHORT_TOKENS_MAX = 128
MEDIUM_TOKENS_MAX = 512
_tokens = _ledger.prompt_tokens + _ledger.output_tokens
HAS_TOKENS = _tokens > 0
# Requests that were given back before they ran count as none. Rows of versions before 0.2 that ended so carry their
# prompt, and count: a past period does not change.
IS_REQUEST = _ledger.outcome.not_in(GIVEN_BACK) | HAS_TOKENS
SIZE: ColumnElement[str] = case(
    (_tokens <= SHORT_TOKENS_MAX, "short"), (_tokens <= MEDIUM_TOKENS_MAX, "medium"), else_="long"
)

SUMS: dict[str, ColumnElement[Any]] = {
    "requests": func.sum(case((IS_REQUEST, 1), else_=0)),
    **{name: func.sum(case((_ledger.outcome == name, 1), else_=0)) for name in OUTCOMES},
    "prompt_tokens": func.sum(_ledger.prompt_tokens),
    "cached_tokens": func.sum(_ledger.cached_tokens),
    "output_tokens": func.sum(_ledger.output_tokens),
    "device_us": func.sum(_ledger.device_us),
    "overhead_device_us": func.sum(_ledger.overhead_us),
    "preemptions": func.sum(_ledger.num_preemptions),
    "swaps": func.sum(_ledger.num_swaps),
    "recomputes": func.sum(_ledger.num_recomputes),
    "promotions": func.sum(_ledger.num_promotions),
    "simulated_requests": func.sum(case((_ledger.engine_id.startswith(SIMULATED_PREFIX), 1), else_=0)),
}
# queue: admission to first step. ttft: arrival to first token. jct: arrival to end, of requests that ended well.
TIMES: dict[str, ColumnElement[Any]] = {
    "queue": _ledger.started_at_us - _ledger.admitted_at_us,
    "ttft": _ledger.first_token_at_us - _ledger.received_at_us,
    "jct": case((_ledger.outcome == "ok", _ledger.finished_at_us - _ledger.received_at_us)),
}
# How many times longer a request took than it would have taken alone on the device.
SLOWDOWN: ColumnElement[Any] = case(
    (
        (_ledger.outcome == "ok") & (_ledger.work_us > 0),
        cast(_ledger.finished_at_us - _ledger.received_at_us, Float) / cast(_ledger.work_us, Float),
    )
)
Key = tuple[Any, ...]
Groups = Mapping[str, ColumnElement[Any]]


@dataclass(frozen=True, slots=True)
class Spread:
    """Of the values that are there: percentiles by nearest rank, the largest, the mean; all None when there is none."""

    p50: float | None = None
    p95: float | None = None
    largest: float | None = None
    mean: float | None = None

    def seconds(self, name: str) -> dict[str, float | None]:
        """Of microseconds, as report keys."""
        values = {"p50": self.p50, "p95": self.p95, "max": self.largest}
        return {f"{name}_{which}_seconds": None if value is None else value / 1e6 for which, value in values.items()}


NOTHING = Spread()


def finished_within(period: Period) -> ColumnElement[bool]:
    """Rows belong to the period in which they finished."""
    return (_ledger.finished_at_us >= period.from_us) & (_ledger.finished_at_us < period.to_us)


async def sums(
    connection: AsyncConnection,
    groups: Groups,
    where: ColumnElement[bool],
    columns: Mapping[str, ColumnElement[Any]] = SUMS,
) -> dict[Key, dict[str, int]]:
    """The integer aggregates `columns` of each group; without groups one line, under the key ()."""
    by = [column.label(f"by_{name}") for name, column in groups.items()]
    query = select(*by, *(column.label(name) for name, column in columns.items())).where(where)
    if by:
        query = query.group_by(*by)
    rows = (await connection.execute(query)).all()
    # PostgreSQL sums bigints to Decimal
    return {
        tuple(row[: len(by)]): {name: int(value or 0) for name, value in zip(columns, row[len(by) :], strict=True)}
        for row in rows
    }


async def spreads(
    connection: AsyncConnection,
    groups: Groups,
    where: ColumnElement[bool],
    columns: Mapping[str, ColumnElement[Any]],
) -> dict[Key, tuple[int, dict[str, Spread]]]:
    """Of each group: its rows, and the spread of each column over the rows that have it. One statement, exact."""
    base = select(
        *(column.label(f"by_{name}") for name, column in groups.items()),
        *(column.label(name) for name, column in columns.items()),
    )
    rows = base.where(where).subquery()
    by = [rows.c[f"by_{name}"] for name in groups]
    ranked_columns: list[ColumnElement[Any]] = [*by]
    for name in columns:
        value = rows.c[name]
        ranked_columns += [
            value,
            func.row_number().over(partition_by=by, order_by=value.asc().nulls_last()).label(f"rank_{name}"),
            func.count(value).over(partition_by=by).label(f"size_{name}"),
        ]
    ranked = select(*ranked_columns).subquery()
    keys = [ranked.c[f"by_{name}"] for name in groups]
    found: list[ColumnElement[Any]] = [func.count()]
    for name in columns:
        value, rank, size = ranked.c[name], ranked.c[f"rank_{name}"], ranked.c[f"size_{name}"]
        found += [
            func.max(case((rank == (size * 50 + 99) // 100, value))),
            func.max(case((rank == (size * 95 + 99) // 100, value))),
            func.max(value),
            func.avg(value),
        ]
    query = select(*keys, *found)
    if keys:
        query = query.group_by(*keys)
    result: dict[Key, tuple[int, dict[str, Spread]]] = {}
    for row in await connection.execute(query):
        values = row[len(keys) + 1 :]
        result[tuple(row[: len(keys)])] = (
            row[len(keys)],
            {name: _spread(values[4 * i : 4 * i + 4]) for i, name in enumerate(columns)},
        )
    return result


def _spread(values: Sequence[Any]) -> Spread:
    p50, p95, largest, mean = values
    return NOTHING if largest is None else Spread(p50, p95, largest, float(mean))
