"""The store's tables. Every constraint has a name, because SQLite's table rebuilds in later migrations need them.

Instants are `*_at_us`: whole microseconds since 1970, UTC. Ids, not names, are what history refers to, so a renamed
team keeps its past; the ledger also keeps the names as they were.
"""

from collections.abc import Iterable, Mapping, Set
from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    text,
)

from policies.team_counters import TEAM_COUNTERS, Over, TeamCounter
from policies.tiers import Tier
from tenants.quotas import Limits

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
        "pk": "pk_%(table_name)s",
    }
)

Id = BigInteger().with_variant(Integer(), "sqlite")  # SQLite numbers rows by itself only for INTEGER
NAME_LEN = 63


def _added(name: str, kind: Any = BigInteger) -> Column[Any]:
    """A column that came after the table had rows: the default keeps the upgrade from writing any of them."""
    return Column(name, kind, nullable=False, server_default=text("0"))


# Counters whose columns came with their tables, in revisions 0001 and 0002: they have no default. Never add to these.
_SAMPLES_BEFORE = {
    *("served_us", "entitled_us", "backlogged_ms", "waiting", "running", "lag_min_us", "lag_max_us", "promotions"),
    *("bytes_swapped_out", "bytes_swapped_in"),
}
_HOURS_BEFORE = _SAMPLES_BEFORE | {
    *("exhausted", "budget_us", "starving", "promoted_us", "overhead_us", "pause_bound_us", "longest_pause_us"),
}
# Of 32 bits, from the same revisions.
_SMALL_IN_SAMPLES = {"backlogged_ms", "waiting", "running", "promotions", "starving"}


def _counters(counters: Iterable[TeamCounter], *, before: Set[str], small: Set[str]) -> list[Column[Any]]:
    """The columns of `counters`. One that is added later is a BigInteger or a Float with the default 0."""
    columns = []
    for counter in counters:
        kind = Float if counter.kind is float else Integer if counter.name in small else BigInteger
        is_first = counter.name in before
        columns.append(Column(counter.name, kind, nullable=False) if is_first else _added(counter.name, kind))
    return columns


tiers = Table(
    "tiers",
    metadata,
    Column("name", String(NAME_LEN), primary_key=True),
    Column("weight", Integer, nullable=False),
    Column("start_level", Integer, nullable=False),
    Column("starving_after_ms", Integer, nullable=False),
    Column("promotion_burst_grants", Integer, nullable=False),
    Column("max_queue_seconds", Integer, nullable=False),
    Column("updated_at_us", BigInteger, nullable=False),
    CheckConstraint("weight BETWEEN 1 AND 1000", name="weight"),
    CheckConstraint("start_level BETWEEN 0 AND 7", name="start_level"),
    CheckConstraint("starving_after_ms > 0", name="starving_after"),
    CheckConstraint("promotion_burst_grants >= 0", name="promotion_burst"),
    CheckConstraint("max_queue_seconds > 0", name="max_queue"),
)

teams = Table(
    "teams",
    metadata,
    Column("id", Id, primary_key=True, autoincrement=True),
    Column("name", String(NAME_LEN), nullable=False, unique=True),
    Column("tier", String(NAME_LEN), ForeignKey("tiers.name"), nullable=False),
    Column("created_at_us", BigInteger, nullable=False),
    Column("archived_at_us", BigInteger),  # its keys die, its history stays
    sqlite_autoincrement=True,  # an id is never given twice: the ledger refers to it for ever
)

projects = Table(
    "projects",
    metadata,
    Column("id", Id, primary_key=True, autoincrement=True),
    Column("team_id", Id, ForeignKey("teams.id"), nullable=False),
    Column("name", String(NAME_LEN), nullable=False),
    Column("created_at_us", BigInteger, nullable=False),
    Index("uq_projects_team_id_name", "team_id", "name", unique=True),
    sqlite_autoincrement=True,
)

api_keys = Table(
    "api_keys",
    metadata,
    Column("id", Id, primary_key=True, autoincrement=True),
    Column("public_id", String(12), nullable=False, unique=True),
    Column("project_id", Id, ForeignKey("projects.id"), nullable=False, index=True),
    Column("name", String(NAME_LEN), nullable=False),
    Column("pepper_id", String(12), nullable=False),
    Column("secret_hmac", LargeBinary(32), nullable=False),
    Column("created_at_us", BigInteger, nullable=False),
    Column("expires_at_us", BigInteger),
    Column("revoked_at_us", BigInteger),
    sqlite_autoincrement=True,
)

quotas = Table(  # no row, or null, is unlimited; 0 is none
    "quotas",
    metadata,
    Column("team_id", Id, ForeignKey("teams.id"), primary_key=True, autoincrement=False),
    Column("requests_per_minute", BigInteger),
    Column("tokens_per_minute", BigInteger),
    Column("concurrent", BigInteger),
    Column("updated_at_us", BigInteger, nullable=False),
    CheckConstraint("requests_per_minute >= 0", name="requests_per_minute"),
    CheckConstraint("tokens_per_minute >= 0", name="tokens_per_minute"),
    CheckConstraint("concurrent >= 0", name="concurrent"),
)

ledger = Table(  # append-only: one row for each request that was admitted, and none is ever changed
    "ledger",
    metadata,
    Column("id", Id, primary_key=True, autoincrement=True),
    Column("request_id", String(128), nullable=False, unique=True),
    Column("key_id", Id, nullable=False),
    Column("key_public_id", String(12), nullable=False),
    Column("project_id", Id, nullable=False),
    Column("project", String(NAME_LEN), nullable=False),
    Column("team_id", Id, nullable=False),
    Column("team", String(NAME_LEN), nullable=False),
    Column("tier", String(NAME_LEN), nullable=False),  # at start
    Column("model", String(255), nullable=False),
    Column("engine_id", String(64), nullable=False),
    Column("engine_epoch", BigInteger, nullable=False),
    Column("endpoint", String(64), nullable=False),
    Column("stream", Boolean, nullable=False),
    Column("received_at_us", BigInteger, nullable=False),
    Column("admitted_at_us", BigInteger, nullable=False),
    Column("started_at_us", BigInteger),
    Column("first_token_at_us", BigInteger),
    Column("finished_at_us", BigInteger, nullable=False),
    Column("prompt_tokens", BigInteger, nullable=False),
    Column("cached_tokens", BigInteger, nullable=False),  # a part of prompt_tokens
    Column("output_tokens", BigInteger, nullable=False),
    Column("max_tokens", BigInteger, nullable=False),
    Column("device_us", BigInteger, nullable=False),
    Column("level_path", Text, nullable=False),
    Column("num_preemptions", Integer, nullable=False),
    Column("num_swaps", Integer, nullable=False),
    Column("num_recomputes", Integer, nullable=False),
    Column("num_promotions", Integer, nullable=False),
    Column("outcome", String(16), nullable=False),
    Column("finish_reason", String(16)),
    Column("error_code", String(64)),
    Column("attempts", Integer, nullable=False),
    _added("work_us"),  # what it would have taken alone on the device
    _added("overhead_us"),  # the part of device_us for copies and replays that its team caused
    _added("longest_pause_us"),
    _added("pause_bound_us"),  # largest bound that held for it; 0 if it never starved
    CheckConstraint("outcome IN ('ok','client_closed','timeout','error','lost','shutdown','refused')", name="outcome"),
    CheckConstraint("0 <= cached_tokens AND cached_tokens <= prompt_tokens", name="cached"),
    CheckConstraint("output_tokens >= 0 AND device_us >= 0", name="amounts"),
    Index("ix_ledger_finished_at_us", "finished_at_us"),
    Index("ix_ledger_team_id_finished_at_us", "team_id", "finished_at_us"),
    sqlite_autoincrement=True,
)

service_samples = Table(  # one row per active team and second: what it got and what it was entitled to
    "service_samples",
    metadata,
    Column("at_us", BigInteger, primary_key=True),  # end of the interval
    Column("team_id", Id, primary_key=True, autoincrement=False),
    Column("interval_ms", Integer, nullable=False),
    *_counters(TEAM_COUNTERS, before=_SAMPLES_BEFORE, small=_SMALL_IN_SAMPLES),
    _added("lag_bound_us", Float),
)

interference_samples = Table(  # who cost whom what, second by second: the causer paid
    "interference_samples",
    metadata,
    Column("at_us", BigInteger, primary_key=True),
    Column("causer_id", Id, primary_key=True, autoincrement=False),
    Column("victim_id", Id, primary_key=True, autoincrement=False),
    Column("preemptions", BigInteger, nullable=False),
    Column("swaps_out", BigInteger, nullable=False),
    Column("swaps_in", BigInteger, nullable=False),
    Column("recomputes", BigInteger, nullable=False),
    Column("bytes_out", BigInteger, nullable=False),
    Column("bytes_in", BigInteger, nullable=False),
    Column("billed_us", BigInteger, nullable=False),
)

step_samples = Table(  # what the device as a whole did in a second
    "step_samples",
    metadata,
    Column("at_us", BigInteger, primary_key=True),
    Column("interval_ms", BigInteger, nullable=False),
    Column("stall_us", BigInteger, nullable=False),
    Column("replayed_tokens", BigInteger, nullable=False),
)

# The same by whole hours of UTC, `at_us` being the hour's start: what `tenants.retention` keeps when the seconds go.

service_hours = Table(
    "service_hours",
    metadata,
    Column("at_us", BigInteger, primary_key=True),
    Column("team_id", Id, primary_key=True, autoincrement=False),
    Column("interval_ms", BigInteger, nullable=False),
    *_counters(
        [counter for counter in TEAM_COUNTERS if counter.over is not Over.SECONDS],
        before=_HOURS_BEFORE,
        small={"starving"},
    ),
    # Of the seconds in which the team was backlogged: its own, and those of all teams together.
    Column("served_backlogged_us", BigInteger, nullable=False),
    Column("entitled_backlogged_us", BigInteger, nullable=False),
    Column("served_all_us", BigInteger, nullable=False),
    Column("entitled_all_us", BigInteger, nullable=False),
    Column("lag_bound_us", Float, nullable=False),  # the greatest
    Column("last_at_us", BigInteger, nullable=False),  # its last sample: the LATEST counters are of then
)

interference_hours = Table(
    "interference_hours",
    metadata,
    Column("at_us", BigInteger, primary_key=True),
    Column("causer_id", Id, primary_key=True, autoincrement=False),
    Column("victim_id", Id, primary_key=True, autoincrement=False),
    Column("preemptions", BigInteger, nullable=False),
    Column("swaps_out", BigInteger, nullable=False),
    Column("swaps_in", BigInteger, nullable=False),
    Column("recomputes", BigInteger, nullable=False),
    Column("bytes_out", BigInteger, nullable=False),
    Column("bytes_in", BigInteger, nullable=False),
    Column("billed_us", BigInteger, nullable=False),
)

step_hours = Table(
    "step_hours",
    metadata,
    Column("at_us", BigInteger, primary_key=True),
    Column("interval_ms", BigInteger, nullable=False),
    Column("stall_us", BigInteger, nullable=False),
    Column("replayed_tokens", BigInteger, nullable=False),
)

sample_marks = Table(  # one row: how far the samples have been summed, and how far back the seconds reach
    "sample_marks",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("hours_to_us", BigInteger, nullable=False),  # every hour before it is in the hour tables
    Column("seconds_from_us", BigInteger, nullable=False),  # seconds before it are gone, or going
    _added("hours_from_us"),  # hours before it are gone, or going
    _added("aged_to_us"),  # the moment against which ages were measured last; 0 is not yet
    CheckConstraint("id = 1", name="single_row"),
)

settings = Table(  # what the database decides for the server: policy, window and budgets come here; values are JSON
    "settings",
    metadata,
    Column("name", String(NAME_LEN), primary_key=True),
    Column("value", Text, nullable=False),
    Column("updated_at_us", BigInteger, nullable=False),
)

generation = Table(  # one row, raised in the same transaction as each admin write: the version of a snapshot
    "generation",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("value", BigInteger, nullable=False),
    CheckConstraint("id = 1", name="single_row"),
)

audit = Table(  # one row for each admin write; detail is JSON without secrets
    "audit",
    metadata,
    Column("id", Id, primary_key=True, autoincrement=True),
    Column("at_us", BigInteger, nullable=False, index=True),
    Column("actor", String(NAME_LEN), nullable=False),
    Column("action", String(NAME_LEN), nullable=False),
    Column("target", String(255), nullable=False),
    Column("detail", Text, nullable=False),
    sqlite_autoincrement=True,
)

TIER_COLUMNS = tuple(
    column.label(f"tier_{column.name}") for column in tiers.columns if column.name not in {"updated_at_us"}
)
LIMIT_COLUMNS = (quotas.c.requests_per_minute, quotas.c.tokens_per_minute, quotas.c.concurrent)


def tier_of(row: Mapping[Any, Any], prefix: str = "tier_") -> Tier:
    """The Tier in a row whose tier columns carry `prefix` (as TIER_COLUMNS do)."""
    return Tier(
        name=row[f"{prefix}name"],
        weight=row[f"{prefix}weight"],
        start_level=row[f"{prefix}start_level"],
        starving_after_ms=row[f"{prefix}starving_after_ms"],
        promotion_burst_grants=row[f"{prefix}promotion_burst_grants"],
        max_queue_seconds=row[f"{prefix}max_queue_seconds"],
    )


def limits_of(row: Mapping[Any, Any]) -> Limits:
    """The Limits in a row; a team without a quota row is unlimited."""
    return Limits(row["requests_per_minute"], row["tokens_per_minute"], row["concurrent"])
