"""Copies of dead letters for a topic of their own."""

from __future__ import annotations

import json
from typing import Any
from uuid import UUID

import pytest
from failing_lane import COPIED, Lane, half, hurry, lane, outbox, retried, turn

from outbox import Event, Outbox
from outbox._app.choices import OnFailure
from relay.core.ports import Receipt
from relay.kafka.routing import Route, Router
from relay.operations.dead_letters import Selection
from relay.operations.trace import find

__all__ = ["lane"]

IS_COPY = "coalesce(headers ? 'outbox-dead-letter', false)"


def copies(lane: Lane) -> list[Any]:
    return lane.rows("SELECT payload, payload_bytes, headers FROM outbox.events WHERE headers ? 'outbox-dead-letter'")


def test_a_copy_for_the_dead_letter_topic_has_all_of_the_event_and_says_why(lane):
    source = lane.source(COPIED)
    with lane.database.connect() as connection:
        Outbox().add(connection, Event("Order", "a", "a1", {"n": 1}, headers={"tenant": "acme"}))
    half(source, "a1")
    (copy,) = source.fetch(10)
    assert (copy.aggregate_id, copy.event_type, json.loads(copy.value)) == ("a", "a1", {"n": 1})
    assert copy.headers == {"tenant": "acme", "outbox-dead-letter": "a1 is bad", "outbox-attempts": "1"}
    assert COPIED.topic(copy) == "orders-dead"


def test_a_copy_waits_for_nobody_and_blocks_nobody(lane):
    source = lane.source(COPIED, attempts=1)
    lane.add("a1", "a2", "b1")
    turn(source, "a1")
    (copy,) = source.fetch(10)
    source.settle(Receipt(refused=[(copy, "no such topic")]))
    assert turn(source) == []
    # The copy is a dead letter without a copy of its own, and holds nothing up.
    assert lane.rows("SELECT count(*) FROM outbox.dead_letters") == [(2,)]
    assert copies(lane) == []
    lane.desk().discard(Selection(), "both")
    assert turn(source) == ["a2"]


def test_an_event_id_names_the_event_and_its_copy_only_if_that_is_asked(lane):
    def died() -> tuple[str, list[Any]]:
        (event_id,) = lane.add("a1")
        # First the event, then the copy, each in the turns of its kind.
        for _ in range(4):
            half(source, "a1")
        return event_id, lane.rows(f"SELECT {IS_COPY} FROM outbox.dead_letters ORDER BY 1")

    source = lane.source(COPIED, attempts=1)
    event_id, dead = died()
    assert dead == [(False,), (True,)]
    outbox(lane, "dead-letters", "discard", event_id, "--copies", "--reason", "test")
    assert lane.rows(f"SELECT {IS_COPY} FROM outbox.dead_letters") == [(False,)]
    assert lane.rows("SELECT count(*) FROM outbox.failures") == [(1,)]
    outbox(lane, "dead-letters", "discard", event_id, "--reason", "test")
    event_id, dead = died()
    assert dead == [(False,), (True,)]
    outbox(lane, "dead-letters", "discard", event_id, "--reason", "test")
    assert lane.rows(f"SELECT {IS_COPY} FROM outbox.dead_letters") == [(True,)]
    assert "--copies" in outbox(lane, "dead-letters", "retry", event_id, status=1)
    outbox(lane, "dead-letters", "retry", event_id, "--copies")
    assert lane.rows("SELECT count(*) FROM outbox.dead_letters") == [(0,)]
    # It waits for another attempt now, and is a copy still.
    assert "--copies" in outbox(lane, "dead-letters", "retry", event_id, status=1)
    outbox(lane, "dead-letters", "retry", event_id, "--copies")


def test_an_event_is_traced_and_not_its_copy(lane):
    source = lane.source(COPIED, attempts=1)
    (event_id,) = lane.add("a1")
    ((first,),) = lane.rows("SELECT id FROM outbox.events")

    def traced() -> tuple[str, int | None]:
        found = find(lane.admin, "outbox", UUID(event_id), {})
        return found.state, found.id

    half(source, "a1")
    assert len(copies(lane)) == 1
    assert traced() == ("dead", first)
    for _ in range(4):
        half(source, "a1")
    assert copies(lane) == []
    assert traced() == ("dead", first)
    # The event waits again, under its old number, and the copy is dead.
    retried(lane, event_id)
    assert traced() == ("retrying", first)


def test_no_event_ids_are_none_and_not_all(lane):
    source = lane.source()
    lane.add("a1")
    turn(source, "a1")
    assert lane.desk().discard(Selection([]), "none") == []
    assert lane.rows("SELECT count(*) FROM outbox.dead_letters") == [(1,)]


def test_a_copy_that_is_tried_again_does_not_hold_its_key_up(lane):
    source = lane.source(Router({"Order": Route("orders", OnFailure.SKIP, "orders-dead")}), attempts=2)
    lane.add("a1")
    turn(source, "a1")
    hurry(lane)
    # The turn of those that are due, and not yet the one of the copy.
    assert half(source, "a1") == []
    (copy,) = source.fetch(10)
    source.settle(Receipt(refused=[(copy, "not now")]))
    lane.add("a2")
    assert turn(source) == ["a2"]


def test_a_copy_that_died_and_is_retried_does_not_hold_its_key_up(lane):
    source = lane.source(Router({"Order": Route("orders", OnFailure.SKIP, "orders-dead")}), attempts=1)
    lane.add("a1")
    half(source, "a1")
    (copy,) = source.fetch(10)
    source.settle(Receipt(refused=[(copy, "not now")]))
    lane.rows("DELETE FROM outbox.dead_letters WHERE NOT coalesce(headers ? 'outbox-dead-letter', false) RETURNING 1")
    retried(lane)
    lane.admin.execute("UPDATE outbox.failures SET next_attempt_at = clock_timestamp() + interval '1 hour'")
    lane.add("a2")
    assert turn(source) == ["a2"]


@pytest.mark.parametrize("payload", [{"text": "x" * 997_000}, b"x" * 999_000], ids=["json", "bytes"])
def test_a_copy_that_would_be_too_large_leaves_the_payload_behind_and_says_so(lane, payload):
    source = lane.source(COPIED)
    with lane.database.connect() as connection:
        Outbox().add(connection, Event("Order", "a", "a1", payload, headers={"tenant": "acme"}))
    claims = source.fetch(10)
    source.settle(Receipt(refused=[(claims[0], 'ü"\\' * 1000)]))
    ((json_, bytes_, headers),) = copies(lane)
    assert (json_, bytes_) == (None, None)
    assert headers["outbox-payload-omitted"] == "true"
    assert headers["tenant"] == "acme"
    ((whole,),) = lane.rows(
        "SELECT coalesce(octet_length(payload::text), octet_length(payload_bytes)) FROM outbox.dead_letters"
    )
    assert whole > 997_000


def test_a_copy_whose_headers_are_too_large_too_leaves_them_behind_as_well(lane):
    source = lane.source(COPIED)
    with lane.database.connect() as connection:
        Outbox().add(connection, Event("Order", "a", "a1", {}, headers={"big": "x" * 999_900}))
    claims = source.fetch(10)
    source.settle(Receipt(refused=[(claims[0], 'ü"\\' * 1000)]))
    ((_, _, headers),) = copies(lane)
    assert "big" not in headers
    assert headers["outbox-payload-omitted"] == "true"
    assert headers["outbox-attempts"] == "1"
    assert lane.rows("SELECT length(headers->>'big') FROM outbox.dead_letters") == [(999_900,)]
