"""Scheduled events: rows that a relay moves into ``events`` when their time has come.

Relays of the previous version do not move them: they stay until a relay of this version runs.

Locks: none on existing tables. Relays of this version need the rights on the new table that `outbox db roles` prints,
and so do writers that schedule events.

Frozen as it was written.
"""

import sqlalchemy as sa
from alembic import context, op
from sqlalchemy.dialects import postgresql as pg

revision = "outbox_0008"
down_revision = "outbox_0007"
branch_labels = None
depends_on = None

_UUID7 = (
    "(encode(set_bit(set_bit(OVERLAY(uuid_send(gen_random_uuid()) PLACING "
    "SUBSTRING(int8send(((EXTRACT(epoch FROM clock_timestamp()) * (1000)::numeric))::bigint) FROM 3) FROM 1 FOR 6), "
    "(52)::bigint, 1), (53)::bigint, 1), 'hex'::text))::uuid"
)
_HEADERS = (
    "jsonb_typeof(headers) = 'object' AND NOT pg_catalog.jsonb_path_exists(headers, '$.keyvalue() ? ("
    '@.value.type() != "string" || !(@.key like_regex "^[A-Za-z0-9._-]{1,100}$") || @.key starts with "ce_" || '
    '@.key == "aggregate-type" || @.key == "event-type" || @.key == "id" || @.key == "idempotency-key")\')'
)
_SIZE = (
    "octet_length(aggregate_id) + coalesce(octet_length(payload::text), octet_length(payload_bytes), 0)"
    " + coalesce(octet_length(headers::text), 0) <= 1000000"
)


def upgrade() -> None:
    schema = context.config.attributes.get("schema", "outbox")
    op.create_table(
        "scheduled",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("event_id", pg.UUID(), nullable=False, server_default=sa.text(_UUID7)),
        sa.Column("aggregate_type", sa.Text(), nullable=False),
        sa.Column("aggregate_id", sa.Text(), nullable=False),
        sa.Column("event_type", sa.Text(), nullable=False),
        sa.Column("payload", pg.JSONB()),
        sa.Column("payload_bytes", pg.BYTEA()),
        sa.Column("headers", pg.JSONB()),
        sa.Column("not_before", sa.DateTime(timezone=True), nullable=False),
        sa.Column("scheduled_at", sa.DateTime(timezone=True), nullable=False, server_default=sa.text("now()")),
        sa.PrimaryKeyConstraint("id", name="scheduled_pkey"),
        sa.CheckConstraint("char_length(aggregate_type) BETWEEN 1 AND 200", name="scheduled_aggregate_type_length"),
        sa.CheckConstraint("char_length(aggregate_id) BETWEEN 1 AND 1000", name="scheduled_aggregate_id_length"),
        sa.CheckConstraint("char_length(event_type) BETWEEN 1 AND 200", name="scheduled_event_type_length"),
        sa.CheckConstraint("pg_catalog.num_nonnulls(payload, payload_bytes) <= 1", name="scheduled_one_payload"),
        sa.CheckConstraint(_HEADERS, name="scheduled_headers_text"),
        sa.CheckConstraint(
            "NOT pg_catalog.jsonb_path_exists(headers, '$.keyvalue() ? (@.key starts with \"outbox-\")')",
            name="scheduled_relay_headers",
        ),
        sa.CheckConstraint(_SIZE, name="scheduled_size"),
        sa.CheckConstraint(
            "coalesce(extract(year FROM not_before AT TIME ZONE 'UTC') BETWEEN 1::numeric AND 9998::numeric, false)",
            name="scheduled_not_before",
        ),
        schema=schema,
        comment="Events that are not to be published before a time. A relay moves them into events when it has come.",
    )
    op.create_index("scheduled_due", "scheduled", ["not_before", "id"], schema=schema)
    op.create_index("scheduled_event_id", "scheduled", ["event_id"], schema=schema)


def downgrade() -> None:
    schema = context.config.attributes.get("schema", "outbox")
    op.drop_table("scheduled", schema=schema)
