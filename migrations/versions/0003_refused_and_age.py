"""Outcome `refused`, and what retention remembers of its last run.

The ledger may have millions of rows, and the upgrade reads none of them: a row that fits the old constraint fits the
new constraint too. PostgreSQL adds the new constraint as NOT VALID, which checks new rows only. SQLite has no ALTER for
a constraint, and copying the table would hold the write lock for minutes. So the upgrade changes the table's text where
SQLite keeps it, as SQLite's documentation describes for constraints (lang_altertable.html, section 7). This happens in
the transaction and sets a new schema_version, so that every open connection reads the schema again.

Revision ID: 0003
Revises: 0002
"""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

OLD = "outcome IN ('ok','client_closed','timeout','error','lost','shutdown')"
NEW = "outcome IN ('ok','client_closed','timeout','error','lost','shutdown','refused')"
IN_POSTGRES = (
    "ALTER TABLE ledger DROP CONSTRAINT ck_ledger_outcome, ADD CONSTRAINT ck_ledger_outcome "
    "CHECK (outcome IN ('ok','client_closed','timeout','error','lost','shutdown','refused')) NOT VALID"
)


def upgrade() -> None:
    """Widen the constraint on the outcome, and add columns."""
    if op.get_context().dialect.name == "sqlite":
        _widen_in_sqlite()
    else:
        op.execute(IN_POSTGRES)
    for name in ("hours_from_us", "aged_to_us"):
        op.add_column("sample_marks", sa.Column(name, sa.BigInteger(), server_default=sa.text("0"), nullable=False))


def _widen_in_sqlite() -> None:
    connection = op.get_bind()
    find = sa.text("SELECT sql FROM sqlite_master WHERE type = 'table' AND name = :name")
    before = connection.execute(find, {"name": "ledger"}).scalar_one()
    if before.count(OLD) != 1:
        raise RuntimeError("the ledger's constraint on outcomes is not the one that revision 0001 made")
    version = connection.exec_driver_sql("PRAGMA schema_version").scalar_one()
    connection.exec_driver_sql("PRAGMA writable_schema = ON")
    try:
        change = sa.text("UPDATE sqlite_master SET sql = :sql WHERE type = 'table' AND name = :name")
        connection.execute(change, {"sql": before.replace(OLD, NEW), "name": "ledger"})
        connection.exec_driver_sql(f"PRAGMA schema_version = {version + 1}")
    finally:
        connection.exec_driver_sql("PRAGMA writable_schema = OFF")


def downgrade() -> None:
    """Refused: it would drop what was booked. Restore a backup instead."""
    raise RuntimeError("Terazi's schema goes forward only: restore a backup made before the upgrade")
