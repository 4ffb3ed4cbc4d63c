"""The columns that each kind of role of `outbox db roles` has rights on."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from outbox.consumer.tables import consumer_tables
from outbox.tables import outbox_tables
from relay.operations.roles import COLUMNS, EVENT_COLUMNS, RoleKind


@pytest.mark.parametrize(
    ("kind", "table", "left_out"),
    [
        (RoleKind.WRITER, "events", {"id", "lane", "created_at", "from_relay"}),
        (RoleKind.WRITER, "scheduled", {"id", "scheduled_at"}),
        (RoleKind.OPERATOR, "audit", {"id", "at", "who"}),
        (RoleKind.CONSUMER, "audit", {"id", "at", "who"}),
        (RoleKind.CONSUMER_OPERATOR, "audit", {"id", "at", "who"}),
        (RoleKind.EXTERNAL, "audit", {"id", "at", "who"}),
        *(
            (RoleKind.MONITOR, table, {"payload", "payload_bytes", "headers"})
            for table in ("events", "dead_letters", "published")
        ),
        (RoleKind.CONSUMER_MONITOR, "dead_letters", {"message_key", "message_value", "message_headers"}),
        (RoleKind.CONSUMER_MONITOR, "reservations", {"order_key", "request", "response"}),
        (
            RoleKind.EXTERNAL,
            "reservations",
            {
                *("id", "grp", "name", "message_id", "topic", "part", "message_offset", "order_key"),
                "request",
                "reserved_at",
            },
        ),
    ],
)
def test_the_columns_of_a_kind_are_all_but_these(kind: RoleKind, table: str, left_out: set[str]) -> None:
    tables = (consumer_tables if kind.of_sink else outbox_tables)(sa.MetaData())
    [columns] = [columns for _, name, columns in COLUMNS[kind] if name == table]
    assert set(getattr(tables, table).columns.keys()) - set(columns) == left_out
    assert set(EVENT_COLUMNS) >= {"payload", "headers"}
