"""Failures, dead letters, the archive and the audit; last_batch belongs to exactly-once delivery alone.

Frozen as it was written.
"""

from typing import Any

import sqlalchemy as sa
from alembic import context, op
from sqlalchemy.dialects import postgresql as pg

revision = "outbox_0002"
down_revision = "outbox_0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    schema = context.config.attributes.get("schema", "outbox")
    # Until now it counted batches that have no marker in Kafka.
    op.alter_column("lanes", "last_batch", nullable=True, server_default=None, schema=schema)
    lanes = sa.table("lanes", sa.column("last_batch"), schema=schema)
    op.execute(sa.update(lanes).values(last_batch=None))
    op.create_table(
        "failures",
        sa.Column("lane", sa.SmallInteger(), autoincrement=False, nullable=False),
        sa.Column("id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("event_id", pg.UUID(), nullable=False),
        sa.Column("aggregate_type", sa.Text(), nullable=False),
        sa.Column("aggregate_id", sa.Text(), nullable=False),
        sa.Column("blocks", sa.Boolean(), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("last_error", sa.Text(), nullable=False),
        sa.Column("first_failed_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("last_failed_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("next_attempt_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("lane", "id", name="failures_pkey"),
        sa.CheckConstraint("attempts >= 0", name="failures_attempts"),
        schema=schema,
        comment="Events that could not be published as they are, and whose key waits. infinity: waits for a person.",
    )
    op.create_index("failures_key", "failures", ["lane", "aggregate_type", "aggregate_id"], schema=schema)
    op.create_table(
        "dead_letters",
        *_event_columns(),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("last_error", sa.Text(), nullable=False),
        sa.Column("first_failed_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("dead_at", sa.DateTime(timezone=True), nullable=False, server_default=sa.text("now()")),
        sa.PrimaryKeyConstraint("lane", "id", name="dead_letters_pkey"),
        schema=schema,
        comment="Events that failed for good, whole. They wait for `outbox failures retry` or `discard`.",
    )
    op.create_index("dead_letters_event_id", "dead_letters", ["event_id"], schema=schema)
    op.create_table(
        "published",
        *_archive_columns(),
        schema=schema,
        postgresql_partition_by="RANGE (published_at)",
        comment="The archive: events that were published, by day. Kept for as long as relay.archive_days says.",
    )
    op.create_table(
        "published_default",
        *_archive_columns(),
        schema=schema,
        comment="Published events of days that have no partition of their own.",
    )
    for table in ("published", "published_default"):
        op.create_index(f"{table}_event_id", table, ["event_id"], schema=schema)
        op.create_index(f"{table}_aggregate", table, ["aggregate_type", "aggregate_id"], schema=schema)
    parent, default = (_quoted(schema, name) for name in ("published", "published_default"))
    op.execute(
        sa.DDL(
            "ALTER TABLE %(parent)s ATTACH PARTITION %(partition)s DEFAULT",
            context={"parent": parent, "partition": default},
        )
    )
    op.create_table(
        "audit",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False, server_default=sa.text("now()")),
        sa.Column("who", sa.Text(), nullable=False, server_default=sa.text("session_user")),
        sa.Column("what", sa.Text(), nullable=False),
        sa.Column("why", sa.Text()),
        sa.Column("details", pg.JSONB(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="audit_pkey"),
        schema=schema,
        comment="What people did to events by hand: retried, discarded, replayed, reconciled.",
    )


def downgrade() -> None:
    schema = context.config.attributes.get("schema", "outbox")
    for table in ("audit", "published", "dead_letters", "failures"):
        op.drop_table(table, schema=schema)
    lanes = sa.table("lanes", sa.column("last_batch"), schema=schema)
    op.execute(sa.update(lanes).values(last_batch=0))
    op.alter_column("lanes", "last_batch", nullable=False, server_default=sa.text("0"), schema=schema)


def _event_columns() -> list[sa.Column[Any]]:
    return [
        sa.Column("lane", sa.SmallInteger(), autoincrement=False, nullable=False),
        sa.Column("id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("event_id", pg.UUID(), nullable=False),
        sa.Column("aggregate_type", sa.Text(), nullable=False),
        sa.Column("aggregate_id", sa.Text(), nullable=False),
        sa.Column("event_type", sa.Text(), nullable=False),
        sa.Column("payload", pg.JSONB()),
        sa.Column("payload_bytes", pg.BYTEA()),
        sa.Column("headers", pg.JSONB()),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
    ]


def _archive_columns() -> list[sa.Column[Any]]:
    return [
        *_event_columns(),
        sa.Column("published_at", sa.DateTime(timezone=True), nullable=False, server_default=sa.text("now()")),
        sa.Column("topic", sa.Text()),
        sa.Column("partition", sa.Integer()),
        sa.Column("offset", sa.BigInteger()),
    ]


def _quoted(schema: str, name: str) -> str:
    return ".".join('"' + part.replace('"', '""') + '"' for part in (schema, name))
