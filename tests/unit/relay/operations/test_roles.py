"""`outbox db roles`: the columns that each kind of role has rights on, and what is refused without a database."""

from __future__ import annotations

import pytest
import sqlalchemy as sa
from typer.testing import CliRunner

from outbox.consumer.tables import consumer_tables
from outbox.tables import outbox_tables
from relay.cli.app import app
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
    (consumer_tables if kind.of_sink else outbox_tables)(metadata := sa.MetaData())
    [columns] = [columns for _, name, columns in COLUMNS[kind] if name == table]
    [found] = [one for one in metadata.tables.values() if one.name == table]
    assert set(found.columns.keys()) - set(columns) == left_out
    assert set(EVENT_COLUMNS) >= {"payload", "headers"}


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["writer"], "'writer' must be KIND=ROLE, with a kind of writer, relay, operator, page, consumer"),
        (["reader=x"], "'reader=x' must be KIND=ROLE"),
        (["writer="], "'' can't be the name of a role"),
        ([f"writer={'x' * 64}"], "can't be the name of a role"),
        (["writer=$outbox$"], "can't be the name of a role"),
        (["writer=a", "--aggregate-type", "a"], "must be ROLE=TYPE"),
        (["writer=a", "--aggregate-type", "a="], "must be ROLE=TYPE"),
        (["writer=a", "--aggregate-type", "b=Order"], "name writer=b as well"),
        (["writer=a", "relay=a", "--aggregate-type", "a=Order"], "no other kind of the outbox's schema but canceller"),
        (
            ["writer=a", "consumer=b", "--schema", "s"],
            "these kinds have rights in two schemas; run it for each",
        ),
        (["writer=public", "--aggregate-type", "public=Order"], "public means every role"),
        (["writer=rights decide", "--aggregate-type", "rights decide=Order"], "can't be limited"),
    ],
)
def test_what_can_not_be_granted_is_one_line(arguments: list[str], shown: str) -> None:
    url = "postgresql://127.0.0.1:1/nowhere"
    done = CliRunner().invoke(app, ["db", "roles", *arguments, "--apply"], env={"OUTBOX_DATABASE_URL": url})
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("outbox: ")
    assert shown in done.stderr
    assert done.stderr.count("\n") == 1
