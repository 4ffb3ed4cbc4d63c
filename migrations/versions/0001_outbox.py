"""Events, lanes and relays.

Frozen: outbox/tables.py may change, this file may not. A test compares the result of all revisions with
outbox/tables.py, through pg_catalog.
"""

import sqlalchemy as sa
from alembic import context, op
from sqlalchemy.dialects import postgresql as pg

revision = "outbox_0001"
down_revision = None
branch_labels = ("outbox",)
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


def _settings() -> tuple[str, int]:
    """Return the schema and the number of lanes. A host application that includes this history sets neither."""
    attributes = context.config.attributes
    return attributes.get("schema", "outbox"), int(attributes.get("lanes", 4))


def upgrade() -> None:
    schema, lane_count = _settings()
    lane_of_key = (
        "(abs(mod(hashtextextended(aggregate_id, hashtextextended(aggregate_type, (0)::bigint)), "
        f"({lane_count})::bigint)))::smallint"
    )
    op.execute(sa.schema.CreateSchema(schema, if_not_exists=True))
    op.create_table(
        "events",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("lane", sa.SmallInteger(), sa.Computed(lane_of_key, persisted=True), nullable=False),
        sa.Column("event_id", pg.UUID(), nullable=False, server_default=sa.text(_UUID7)),
        sa.Column("aggregate_type", sa.Text(), nullable=False),
        sa.Column("aggregate_id", sa.Text(), nullable=False),
        sa.Column("event_type", sa.Text(), nullable=False),
        sa.Column("payload", pg.JSONB()),
        sa.Column("payload_bytes", pg.BYTEA()),
        sa.Column("headers", pg.JSONB()),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False, server_default=sa.text("now()")),
        sa.PrimaryKeyConstraint("lane", "id", name="events_pkey"),
        sa.CheckConstraint("char_length(aggregate_type) BETWEEN 1 AND 200", name="events_aggregate_type_length"),
        sa.CheckConstraint("char_length(aggregate_id) BETWEEN 1 AND 1000", name="events_aggregate_id_length"),
        sa.CheckConstraint("char_length(event_type) BETWEEN 1 AND 200", name="events_event_type_length"),
        sa.CheckConstraint("pg_catalog.num_nonnulls(payload, payload_bytes) <= 1", name="events_one_payload"),
        sa.CheckConstraint(_HEADERS, name="events_headers_text"),
        sa.CheckConstraint(_SIZE, name="events_size"),
        schema=schema,
        comment="Events written in business transactions and not yet published. Insert only; the relay deletes.",
    )
    lanes = op.create_table(
        "lanes",
        sa.Column("lane", sa.SmallInteger(), autoincrement=False, nullable=False),
        sa.Column("owner", sa.Text()),
        sa.Column("epoch", sa.BigInteger(), nullable=False, server_default=sa.text("0")),
        sa.Column("last_batch", sa.BigInteger(), nullable=False, server_default=sa.text("0")),
        sa.Column(
            "lease_until",
            sa.DateTime(timezone=True),
            nullable=False,
            server_default=sa.text("'-infinity'::timestamptz"),
        ),
        sa.PrimaryKeyConstraint("lane", name="lanes_pkey"),
        sa.CheckConstraint("lane BETWEEN 0 AND 255", name="lanes_lane_range"),
        sa.CheckConstraint("epoch >= 0 AND last_batch >= 0", name="lanes_counters"),
        schema=schema,
        comment="Who publishes each lane. The epoch rises with every change of owner: the fencing token.",
    )
    op.create_table(
        "relays",
        sa.Column("instance", sa.Text(), nullable=False),
        sa.Column("version", sa.Text(), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False, server_default=sa.text("now()")),
        sa.Column("heartbeat_at", sa.DateTime(timezone=True), nullable=False, server_default=sa.text("now()")),
        sa.Column("alive_until", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("instance", name="relays_pkey"),
        sa.CheckConstraint("char_length(instance) BETWEEN 1 AND 200", name="relays_instance_length"),
        schema=schema,
        comment="Relays that are running or ran lately; lanes are shared out evenly among the living.",
    )
    op.bulk_insert(lanes, [{"lane": lane} for lane in range(lane_count)])


def downgrade() -> None:
    schema, _ = _settings()
    for table in ("relays", "lanes", "events"):
        op.drop_table(table, schema=schema)
