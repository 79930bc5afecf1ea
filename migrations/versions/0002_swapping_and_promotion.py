"""What swapping and promotion cost: columns of the ledger and the samples, what teams cost each other, and hourly sums.

A table that may be large only gets columns with a constant default, and no index. That changes the schema and no row,
so the write lock is held for milliseconds however many rows there are. SQLite's "ALTER TABLE ADD COLUMN" works so, and
PostgreSQL's since version 11.

Revision ID: 0002
Revises: 0001
"""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

Id = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Add columns and tables."""
    for name in ("work_us", "overhead_us", "longest_pause_us", "pause_bound_us"):
        _add_column("ledger", name)
    for name in ("exhausted", "budget_us", "promoted_us", "overhead_us", "pause_bound_us", "longest_pause_us"):
        _add_column("service_samples", name)
    _add_column("service_samples", "starving", sa.Integer())
    _add_column("service_samples", "lag_bound_us", sa.Float())
    for name in ("interference_samples", "interference_hours"):
        op.create_table(
            name,
            sa.Column("at_us", sa.BigInteger(), nullable=False),
            sa.Column("causer_id", Id, autoincrement=False, nullable=False),
            sa.Column("victim_id", Id, autoincrement=False, nullable=False),
            sa.Column("preemptions", sa.BigInteger(), nullable=False),
            sa.Column("swaps_out", sa.BigInteger(), nullable=False),
            sa.Column("swaps_in", sa.BigInteger(), nullable=False),
            sa.Column("recomputes", sa.BigInteger(), nullable=False),
            sa.Column("bytes_out", sa.BigInteger(), nullable=False),
            sa.Column("bytes_in", sa.BigInteger(), nullable=False),
            sa.Column("billed_us", sa.BigInteger(), nullable=False),
            sa.PrimaryKeyConstraint("at_us", "causer_id", "victim_id", name=op.f(f"pk_{name}")),
        )
    for name in ("step_samples", "step_hours"):
        op.create_table(
            name,
            sa.Column("at_us", sa.BigInteger(), nullable=False),
            sa.Column("interval_ms", sa.BigInteger(), nullable=False),
            sa.Column("stall_us", sa.BigInteger(), nullable=False),
            sa.Column("replayed_tokens", sa.BigInteger(), nullable=False),
            sa.PrimaryKeyConstraint("at_us", name=op.f(f"pk_{name}")),
        )
    op.create_table(
        "service_hours",
        sa.Column("at_us", sa.BigInteger(), nullable=False),
        sa.Column("team_id", Id, autoincrement=False, nullable=False),
        sa.Column("interval_ms", sa.BigInteger(), nullable=False),
        sa.Column("served_us", sa.BigInteger(), nullable=False),
        sa.Column("entitled_us", sa.BigInteger(), nullable=False),
        sa.Column("backlogged_ms", sa.BigInteger(), nullable=False),
        sa.Column("served_backlogged_us", sa.BigInteger(), nullable=False),
        sa.Column("entitled_backlogged_us", sa.BigInteger(), nullable=False),
        sa.Column("served_all_us", sa.BigInteger(), nullable=False),
        sa.Column("entitled_all_us", sa.BigInteger(), nullable=False),
        sa.Column("promotions", sa.BigInteger(), nullable=False),
        sa.Column("exhausted", sa.BigInteger(), nullable=False),
        sa.Column("promoted_us", sa.BigInteger(), nullable=False),
        sa.Column("overhead_us", sa.BigInteger(), nullable=False),
        sa.Column("bytes_swapped_out", sa.BigInteger(), nullable=False),
        sa.Column("bytes_swapped_in", sa.BigInteger(), nullable=False),
        sa.Column("lag_min_us", sa.Float(), nullable=False),
        sa.Column("lag_max_us", sa.Float(), nullable=False),
        sa.Column("lag_bound_us", sa.Float(), nullable=False),
        sa.Column("starving", sa.Integer(), nullable=False),
        sa.Column("pause_bound_us", sa.BigInteger(), nullable=False),
        sa.Column("longest_pause_us", sa.BigInteger(), nullable=False),
        sa.Column("last_at_us", sa.BigInteger(), nullable=False),
        sa.Column("budget_us", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("at_us", "team_id", name=op.f("pk_service_hours")),
    )
    marks = op.create_table(
        "sample_marks",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("hours_to_us", sa.BigInteger(), nullable=False),
        sa.Column("seconds_from_us", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("id = 1", name=op.f("ck_sample_marks_single_row")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_sample_marks")),
    )
    op.bulk_insert(marks, [{"id": 1, "hours_to_us": 0, "seconds_from_us": 0}])


def _add_column(
    table: str, name: str, kind: sa.types.TypeEngine[int] | sa.types.TypeEngine[float] | None = None
) -> None:
    op.add_column(table, sa.Column(name, kind or sa.BigInteger(), server_default=sa.text("0"), nullable=False))


def downgrade() -> None:
    """Refused: it would drop what was booked. Restore a backup instead."""
    raise RuntimeError("Terazi's schema goes forward only: restore a backup made before the upgrade")
