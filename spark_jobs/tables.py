"""The consumers' tables, in the sink's database. No pyspark, no engine, nothing executed on import.

``offsets`` moves in the transaction of the effect, which is what makes a re-read harmless. ``processed_messages``
catches what the producer side repeated under another offset. It is partitioned by day, so that forgetting is DROP
TABLE; the day is a function of the message id alone (a UUIDv7 holds its time), so a message sent again after midnight
meets its twin.
Ids that hold no time all count as the day 1970-01-01; they, and days that have no partition, go to the default one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql as pg

DEFAULT_SCHEMA: Final = "consumer"

DAY_OF_ID: Final = (
    "CASE WHEN substr(message_id::text, 15, 1) = '7' THEN (timestamp '1970-01-01' + interval '1 millisecond' * "
    "('x' || substr(message_id::text, 1, 8) || substr(message_id::text, 10, 4))::bit(48)::bigint)::date "
    "ELSE date '1970-01-01' END"
)
"""SQL over ``message_id``: the day of a UUIDv7 (RFC 9562: the first 48 bits are Unix milliseconds)."""


@dataclass(frozen=True, slots=True)
class ConsumerTables:
    """The tables of all consumer groups of one sink."""

    groups: sa.Table
    offsets: sa.Table
    processed_messages: sa.Table
    processed_messages_default: sa.Table

    @property
    def all(self) -> tuple[sa.Table, ...]:
        """Every table, in the order in which they can be created."""
        return (self.groups, self.offsets, self.processed_messages, self.processed_messages_default)


def consumer_tables(metadata: sa.MetaData, schema: str = DEFAULT_SCHEMA) -> ConsumerTables:
    """Add the consumers' tables to a MetaData and return them."""
    groups = sa.Table(
        "groups",
        metadata,
        sa.Column("grp", sa.Text, nullable=False),
        sa.Column("generation", sa.BigInteger, nullable=False, server_default=sa.text("1")),
        sa.Column("owner", sa.Text, nullable=False),
        sa.Column("taken_at", sa.DateTime(timezone=True), nullable=False, server_default=sa.text("now()")),
        sa.PrimaryKeyConstraint("grp", name="groups_pkey"),
        sa.CheckConstraint("char_length(grp) BETWEEN 1 AND 200", name="groups_grp_length"),
        schema=schema,
        comment="Who consumes for each group. The generation rises with every take-over: the fencing token.",
    )
    offsets = sa.Table(
        "offsets",
        metadata,
        sa.Column("grp", sa.Text, nullable=False),
        sa.Column("topic", sa.Text, nullable=False),
        sa.Column("part", sa.Integer, nullable=False),
        sa.Column("topic_id", sa.Text, nullable=False),
        sa.Column("next_offset", sa.BigInteger, nullable=False),
        sa.Column("generation", sa.BigInteger, nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), nullable=False, server_default=sa.text("now()")),
        sa.PrimaryKeyConstraint("grp", "topic", "part", name="offsets_pkey"),
        sa.CheckConstraint("next_offset >= 0 AND part >= 0", name="offsets_not_negative"),
        schema=schema,
        comment="The next offset of each partition to apply. Moves in the transaction of the effect.",
    )
    processed = sa.Table(
        "processed_messages",
        metadata,
        sa.Column("grp", sa.Text, nullable=False),
        sa.Column("day", sa.Date, nullable=False),
        sa.Column("message_id", pg.UUID(as_uuid=True), nullable=False),
        sa.PrimaryKeyConstraint("grp", "day", "message_id", name="processed_messages_pkey"),
        schema=schema,
        postgresql_partition_by="RANGE (day)",
        comment="Ids of the messages whose effect is in the sink, by the day in the id.",
    )
    default = sa.Table(
        "processed_messages_default",
        metadata,
        sa.Column("grp", sa.Text, nullable=False),
        sa.Column("day", sa.Date, nullable=False),
        sa.Column("message_id", pg.UUID(as_uuid=True), nullable=False),
        sa.PrimaryKeyConstraint("grp", "day", "message_id", name="processed_messages_default_pkey"),
        schema=schema,
        comment="Ids without a time, and of days that have no partition of their own.",
    )
    parent_name, default_name = (_quoted(schema, table.name) for table in (processed, default))
    sa.event.listen(
        default,
        "after_create",
        sa.DDL(  # type: ignore[no-untyped-call]
            "ALTER TABLE %(parent)s ATTACH PARTITION %(partition)s DEFAULT",
            context={"parent": parent_name, "partition": default_name},
        ),
    )
    return ConsumerTables(groups, offsets, processed, default)


def _quoted(schema: str, name: str) -> str:
    return ".".join('"' + part.replace('"', '""') + '"' for part in (schema, name))
