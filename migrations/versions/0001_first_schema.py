"""The first schema: tenants, ledger, service samples, settings, audit.

Revision ID: 0001
Revises: (none)
"""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

Id = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Create every table."""
    op.create_table(
        "audit",
        sa.Column("id", Id, autoincrement=True, nullable=False),
        sa.Column("at_us", sa.BigInteger(), nullable=False),
        sa.Column("actor", sa.String(length=63), nullable=False),
        sa.Column("action", sa.String(length=63), nullable=False),
        sa.Column("target", sa.String(length=255), nullable=False),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_audit")),
        sqlite_autoincrement=True,
    )
    op.create_index(op.f("ix_audit_at_us"), "audit", ["at_us"], unique=False)
    op.create_table(
        "generation",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("value", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("id = 1", name=op.f("ck_generation_single_row")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_generation")),
    )
    op.create_table(
        "ledger",
        sa.Column("id", Id, autoincrement=True, nullable=False),
        sa.Column("request_id", sa.String(length=128), nullable=False),
        sa.Column("key_id", Id, nullable=False),
        sa.Column("key_public_id", sa.String(length=12), nullable=False),
        sa.Column("project_id", Id, nullable=False),
        sa.Column("project", sa.String(length=63), nullable=False),
        sa.Column("team_id", Id, nullable=False),
        sa.Column("team", sa.String(length=63), nullable=False),
        sa.Column("tier", sa.String(length=63), nullable=False),
        sa.Column("model", sa.String(length=255), nullable=False),
        sa.Column("engine_id", sa.String(length=64), nullable=False),
        sa.Column("engine_epoch", sa.BigInteger(), nullable=False),
        sa.Column("endpoint", sa.String(length=64), nullable=False),
        sa.Column("stream", sa.Boolean(), nullable=False),
        sa.Column("received_at_us", sa.BigInteger(), nullable=False),
        sa.Column("admitted_at_us", sa.BigInteger(), nullable=False),
        sa.Column("started_at_us", sa.BigInteger(), nullable=True),
        sa.Column("first_token_at_us", sa.BigInteger(), nullable=True),
        sa.Column("finished_at_us", sa.BigInteger(), nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cached_tokens", sa.BigInteger(), nullable=False),
        sa.Column("output_tokens", sa.BigInteger(), nullable=False),
        sa.Column("max_tokens", sa.BigInteger(), nullable=False),
        sa.Column("device_us", sa.BigInteger(), nullable=False),
        sa.Column("level_path", sa.Text(), nullable=False),
        sa.Column("num_preemptions", sa.Integer(), nullable=False),
        sa.Column("num_swaps", sa.Integer(), nullable=False),
        sa.Column("num_recomputes", sa.Integer(), nullable=False),
        sa.Column("num_promotions", sa.Integer(), nullable=False),
        sa.Column("outcome", sa.String(length=16), nullable=False),
        sa.Column("finish_reason", sa.String(length=16), nullable=True),
        sa.Column("error_code", sa.String(length=64), nullable=True),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.CheckConstraint(
            "outcome IN ('ok','client_closed','timeout','error','lost','shutdown')", name=op.f("ck_ledger_outcome")
        ),
        sa.CheckConstraint("0 <= cached_tokens AND cached_tokens <= prompt_tokens", name=op.f("ck_ledger_cached")),
        sa.CheckConstraint("output_tokens >= 0 AND device_us >= 0", name=op.f("ck_ledger_amounts")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_ledger")),
        sa.UniqueConstraint("request_id", name=op.f("uq_ledger_request_id")),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_ledger_finished_at_us", "ledger", ["finished_at_us"], unique=False)
    op.create_index("ix_ledger_team_id_finished_at_us", "ledger", ["team_id", "finished_at_us"], unique=False)
    op.create_table(
        "service_samples",
        sa.Column("at_us", sa.BigInteger(), nullable=False),
        sa.Column("team_id", Id, autoincrement=False, nullable=False),
        sa.Column("interval_ms", sa.Integer(), nullable=False),
        sa.Column("served_us", sa.BigInteger(), nullable=False),
        sa.Column("entitled_us", sa.BigInteger(), nullable=False),
        sa.Column("backlogged_ms", sa.Integer(), nullable=False),
        sa.Column("waiting", sa.Integer(), nullable=False),
        sa.Column("running", sa.Integer(), nullable=False),
        sa.Column("lag_min_us", sa.Float(), nullable=False),
        sa.Column("lag_max_us", sa.Float(), nullable=False),
        sa.Column("promotions", sa.Integer(), nullable=False),
        sa.Column("bytes_swapped_out", sa.BigInteger(), nullable=False),
        sa.Column("bytes_swapped_in", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("at_us", "team_id", name=op.f("pk_service_samples")),
    )
    op.create_table(
        "settings",
        sa.Column("name", sa.String(length=63), nullable=False),
        sa.Column("value", sa.Text(), nullable=False),
        sa.Column("updated_at_us", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_settings")),
    )
    op.create_table(
        "tiers",
        sa.Column("name", sa.String(length=63), nullable=False),
        sa.Column("weight", sa.Integer(), nullable=False),
        sa.Column("start_level", sa.Integer(), nullable=False),
        sa.Column("starving_after_ms", sa.Integer(), nullable=False),
        sa.Column("promotion_burst_grants", sa.Integer(), nullable=False),
        sa.Column("max_queue_seconds", sa.Integer(), nullable=False),
        sa.Column("updated_at_us", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("max_queue_seconds > 0", name=op.f("ck_tiers_max_queue")),
        sa.CheckConstraint("promotion_burst_grants >= 0", name=op.f("ck_tiers_promotion_burst")),
        sa.CheckConstraint("start_level BETWEEN 0 AND 7", name=op.f("ck_tiers_start_level")),
        sa.CheckConstraint("starving_after_ms > 0", name=op.f("ck_tiers_starving_after")),
        sa.CheckConstraint("weight BETWEEN 1 AND 1000", name=op.f("ck_tiers_weight")),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_tiers")),
    )
    op.create_table(
        "teams",
        sa.Column("id", Id, autoincrement=True, nullable=False),
        sa.Column("name", sa.String(length=63), nullable=False),
        sa.Column("tier", sa.String(length=63), nullable=False),
        sa.Column("created_at_us", sa.BigInteger(), nullable=False),
        sa.Column("archived_at_us", sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(["tier"], ["tiers.name"], name=op.f("fk_teams_tier_tiers")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_teams")),
        sa.UniqueConstraint("name", name=op.f("uq_teams_name")),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "projects",
        sa.Column("id", Id, autoincrement=True, nullable=False),
        sa.Column("team_id", Id, nullable=False),
        sa.Column("name", sa.String(length=63), nullable=False),
        sa.Column("created_at_us", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["team_id"], ["teams.id"], name=op.f("fk_projects_team_id_teams")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_projects")),
        sqlite_autoincrement=True,
    )
    op.create_index("uq_projects_team_id_name", "projects", ["team_id", "name"], unique=True)
    op.create_table(
        "quotas",
        sa.Column("team_id", Id, autoincrement=False, nullable=False),
        sa.Column("requests_per_minute", sa.BigInteger(), nullable=True),
        sa.Column("tokens_per_minute", sa.BigInteger(), nullable=True),
        sa.Column("concurrent", sa.BigInteger(), nullable=True),
        sa.Column("updated_at_us", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("concurrent >= 0", name=op.f("ck_quotas_concurrent")),
        sa.CheckConstraint("requests_per_minute >= 0", name=op.f("ck_quotas_requests_per_minute")),
        sa.CheckConstraint("tokens_per_minute >= 0", name=op.f("ck_quotas_tokens_per_minute")),
        sa.ForeignKeyConstraint(["team_id"], ["teams.id"], name=op.f("fk_quotas_team_id_teams")),
        sa.PrimaryKeyConstraint("team_id", name=op.f("pk_quotas")),
    )
    op.create_table(
        "api_keys",
        sa.Column("id", Id, autoincrement=True, nullable=False),
        sa.Column("public_id", sa.String(length=12), nullable=False),
        sa.Column("project_id", Id, nullable=False),
        sa.Column("name", sa.String(length=63), nullable=False),
        sa.Column("pepper_id", sa.String(length=12), nullable=False),
        sa.Column("secret_hmac", sa.LargeBinary(length=32), nullable=False),
        sa.Column("created_at_us", sa.BigInteger(), nullable=False),
        sa.Column("expires_at_us", sa.BigInteger(), nullable=True),
        sa.Column("revoked_at_us", sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_api_keys_project_id_projects")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_api_keys")),
        sa.UniqueConstraint("public_id", name=op.f("uq_api_keys_public_id")),
        sqlite_autoincrement=True,
    )
    op.create_index(op.f("ix_api_keys_project_id"), "api_keys", ["project_id"], unique=False)


def downgrade() -> None:
    """Refused: it would drop the ledger. Restore a backup instead."""
    raise RuntimeError("Terazi's schema goes forward only: restore a backup made before the upgrade")
