"""Which records of a group are of the traced message, and which of another one that had its place before."""

from __future__ import annotations

import uuid

import psycopg
import pytest

from outbox.consumer.admin.trace import find

PLACE = ("orders", 0, 5)
RECORDS = {
    "given-up": "INSERT INTO consumer.losses (grp, topic, topic_id, part, first_offset, end_offset, kind, detail) "
    "VALUES ('billing', 'orders', %s, 0, 3, 9, 'given-up', 'why')",
    "dead": "INSERT INTO consumer.dead_letters (grp, topic, topic_id, part, message_offset, message_id, "
    "message_headers, message_time, reason, error) "
    "VALUES ('billing', 'orders', %s, 0, 5, '00000000-0000-8000-8000-000000000001', '[]', now(), 'failed', 'why')",
}


@pytest.mark.parametrize("state", RECORDS)
def test_what_a_topic_had_before_it_was_created_again_is_of_another_message(outbox_postgres, state):
    with psycopg.connect(outbox_postgres.url, autocommit=True) as connection:
        connection.execute("INSERT INTO consumer.groups (grp, owner) VALUES ('billing', 'x')")
        connection.execute(
            "INSERT INTO consumer.offsets (grp, topic, part, topic_id, next_offset, generation) "
            "VALUES ('billing', 'orders', 0, 'new', 4, 1)"
        )

        def states() -> list[str]:
            return [one.state for one in find(connection, "consumer", uuid.uuid4(), [PLACE], ["orders"], {})]

        connection.execute(RECORDS[state], ("former",))
        assert states() == ["waiting"]
        connection.execute(RECORDS[state], ("new",))
        assert states() == [state]
