"""Dead letters, losses, reservations and the audit; a group's counters, and the day before which it forgets ids.

Frozen as it was written; a test holds it against spark_jobs/postgres/tables.py.
"""

import sqlalchemy as sa
from alembic import context, op
from sqlalchemy.dialects import postgresql as pg

revision = "consumer_0002"
down_revision = "consumer_0001"
branch_labels = None
depends_on = None

_COUNTS = ("applied", "duplicates", "dead")
_TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
    schema = context.config.attributes.get("schema", "consumer")
    op.add_column("groups", sa.Column("forgotten_before", sa.Date()), schema=schema)
    op.add_column("offsets", sa.Column("log_end", sa.BigInteger()), schema=schema)
    for name in _COUNTS:
        op.add_column(
            "offsets",
            sa.Column(name, sa.BigInteger(), nullable=False, server_default=sa.text("0")),
            schema=schema,
        )
    op.add_column(
        "processed_messages",
        sa.Column("seen_at", _TIME, nullable=False, server_default=sa.text("now()")),
        schema=schema,
    )
    _key(schema, "message_id", "grp", "day")
    op.create_index(
        "processed_messages_default_days",
        "processed_messages_default",
        ["grp", "day"],
        schema=schema,
        postgresql_where=sa.text("day > '1970-01-01'::date"),
    )
    op.create_table(
        "dead_letters",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("grp", sa.Text(), nullable=False),
        sa.Column("topic", sa.Text(), nullable=False),
        sa.Column("topic_id", sa.Text(), nullable=False),
        sa.Column("part", sa.Integer(), nullable=False),
        sa.Column("message_offset", sa.BigInteger(), nullable=False),
        sa.Column("message_id", pg.UUID()),
        sa.Column("message_key", pg.BYTEA()),
        sa.Column("message_value", pg.BYTEA()),
        sa.Column("message_headers", pg.JSONB(), nullable=False),
        sa.Column("message_time", _TIME, nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("error", sa.Text(), nullable=False),
        sa.Column("sqlstate", sa.Text()),
        sa.Column("state", sa.Text(), nullable=False, server_default=sa.text("'dead'")),
        sa.Column("attempts", sa.Integer(), nullable=False, server_default=sa.text("1")),
        sa.Column("died_at", _TIME, nullable=False, server_default=sa.text("now()")),
        sa.Column("last_failed_at", _TIME, nullable=False, server_default=sa.text("now()")),
        sa.PrimaryKeyConstraint("id", name="dead_letters_pkey"),
        sa.UniqueConstraint("grp", "topic", "part", "message_offset", "topic_id", name="dead_letters_place"),
        sa.CheckConstraint(
            "reason IN ('undecodable', 'no-id', 'too-old', 'failed', 'rejected', 'behind')", name="dead_letters_reason"
        ),
        sa.CheckConstraint("state IN ('dead', 'retry')", name="dead_letters_state"),
        schema=schema,
        comment="Messages that could not be applied, whole. `outbox consumers retry` or `discard`.",
    )
    op.create_index("dead_letters_key", "dead_letters", ["grp", "topic", sa.text("sha256(message_key)")], schema=schema)
    op.create_table(
        "losses",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("grp", sa.Text(), nullable=False),
        sa.Column("topic", sa.Text(), nullable=False),
        sa.Column("topic_id", sa.Text(), nullable=False),
        sa.Column("part", sa.Integer(), nullable=False),
        sa.Column("first_offset", sa.BigInteger(), nullable=False),
        sa.Column("end_offset", sa.BigInteger()),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.Column("found_at", _TIME, nullable=False, server_default=sa.text("now()")),
        sa.Column("accepted_at", _TIME),
        sa.PrimaryKeyConstraint("id", name="losses_pkey"),
        sa.CheckConstraint("kind IN ('retention', 'cut', 'recreated')", name="losses_kind"),
        schema=schema,
        comment="What Kafka lost before the group read it. The group halts until `outbox offsets reset` accepts it.",
    )
    op.create_index(
        "losses_open",
        "losses",
        ["grp", "topic", "part", "kind"],
        unique=True,
        schema=schema,
        postgresql_where=sa.text("accepted_at IS NULL"),
    )
    op.create_table(
        "reservations",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("grp", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("message_id", pg.UUID(), nullable=False),
        sa.Column("topic", sa.Text(), nullable=False),
        sa.Column("part", sa.Integer(), nullable=False),
        sa.Column("message_offset", sa.BigInteger(), nullable=False),
        sa.Column("order_key", sa.Text()),
        sa.Column("state", sa.Text(), nullable=False, server_default=sa.text("'reserved'")),
        sa.Column("unsure", sa.Boolean(), nullable=False, server_default=sa.text("false")),
        sa.Column("taking_back", sa.Boolean(), nullable=False, server_default=sa.text("false")),
        sa.Column("request", pg.JSONB(), nullable=False),
        sa.Column("response", pg.JSONB()),
        sa.Column("attempts", sa.Integer(), nullable=False, server_default=sa.text("0")),
        sa.Column("budget_from", sa.Integer(), nullable=False, server_default=sa.text("0")),
        sa.Column("key_until", _TIME),
        sa.Column("worker", sa.Text()),
        sa.Column("last_error", sa.Text()),
        sa.Column("conflict", sa.Text()),
        sa.Column("reserved_at", _TIME, nullable=False, server_default=sa.text("now()")),
        sa.Column("next_attempt_at", _TIME, nullable=False, server_default=sa.text("now()")),
        sa.Column("settled_at", _TIME),
        sa.PrimaryKeyConstraint("grp", "name", "message_id", name="reservations_pkey"),
        sa.CheckConstraint(
            "state IN ('reserved', 'calling', 'confirmed', 'cancelling', 'cancelled', 'stuck')",
            name="reservations_state",
        ),
        sa.CheckConstraint(
            "state = 'stuck' OR taking_back = (state IN ('cancelling', 'cancelled'))", name="reservations_taking_back"
        ),
        sa.CheckConstraint(
            "(settled_at IS NOT NULL) = (state IN ('confirmed', 'cancelled'))", name="reservations_settled"
        ),
        schema=schema,
        comment="Effects outside the database: reserved with the offsets, called with the id, then settled.",
    )
    op.create_index(
        "reservations_open",
        "reservations",
        ["grp", "name", "next_attempt_at", "id"],
        schema=schema,
        postgresql_where=sa.text("state IN ('reserved', 'calling', 'cancelling')"),
    )
    op.create_index(
        "reservations_order",
        "reservations",
        ["grp", "name", sa.text("hashtextextended(order_key, 0::bigint)"), "id"],
        schema=schema,
        postgresql_where=sa.text("settled_at IS NULL"),
    )
    op.create_index(
        "reservations_attention",
        "reservations",
        ["grp", "name", "id"],
        schema=schema,
        postgresql_where=sa.text("state = 'stuck' OR conflict IS NOT NULL"),
    )
    op.create_table(
        "audit",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("at", _TIME, nullable=False, server_default=sa.text("now()")),
        sa.Column("who", sa.Text(), nullable=False, server_default=sa.text("session_user")),
        sa.Column("what", sa.Text(), nullable=False),
        sa.Column("why", sa.Text()),
        sa.Column("details", pg.JSONB(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="audit_pkey"),
        schema=schema,
        comment="What people did to groups by hand: offsets set, dead letters retried or discarded.",
    )


def downgrade() -> None:
    schema = context.config.attributes.get("schema", "consumer")
    for table in ("audit", "reservations", "losses", "dead_letters"):
        op.drop_table(table, schema=schema)
    op.drop_index("processed_messages_default_days", "processed_messages_default", schema=schema)
    _key(schema, "grp", "day", "message_id")
    op.drop_column("processed_messages", "seen_at", schema=schema)
    for name in (*reversed(_COUNTS), "log_end"):
        op.drop_column("offsets", name, schema=schema)
    op.drop_column("groups", "forgotten_before", schema=schema)


def _key(schema: str, *columns: str) -> None:
    """Change the order of the primary key's columns in processed_messages and its default partition."""
    tables = ("processed_messages", "processed_messages_default")
    # Dropping the parent's key drops the default partition's too, unless the partition was detached.
    for table in tables:
        op.drop_constraint(f"{table}_pkey", table, schema=schema, if_exists=True)
    # The partition's key is made first, under its own name; the parent's key then attaches it.
    for table in reversed(tables):
        op.create_primary_key(f"{table}_pkey", table, list(columns), schema=schema)
