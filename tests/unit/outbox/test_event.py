"""What an event refuses, and what becomes of what it takes."""

from __future__ import annotations

import dataclasses
import datetime as dt
import enum
import uuid
from typing import Any

import pytest

from outbox import ConfigurationError, Event, EventError, Outbox
from outbox.event import id_of
from relay.kafka.routing import NoRoute, Router


def made(**given: Any) -> Event:
    return Event(**{"aggregate_type": "Order", "aggregate_id": "1", "event_type": "T", **given})


NO_ID = "must be text, an int or a UUID, not "
REFUSED = [
    ("aggregate_type", "", "must not be empty"),
    ("aggregate_type", "x" * 201, "has 201 characters, 200 are allowed"),
    ("aggregate_id", "", "must not be empty"),
    ("aggregate_id", "x" * 1001, "has 1001 characters, 1000 are allowed"),
    ("aggregate_id", "a\0b", "NUL"),
    ("aggregate_id", "\ud800", "lone surrogate"),
    ("aggregate_id", None, "is None: flush first, since a row has its id only after session.flush()"),
    ("aggregate_id", True, NO_ID + "bool"),
    ("aggregate_id", 4711.0, NO_ID + "float"),
    ("aggregate_id", b"4711", NO_ID + "bytes"),
    ("aggregate_id", ["1"], NO_ID + "list"),
    ("aggregate_id", -(10**1000), "has 1002 characters"),
    ("aggregate_id", 10**5000, "is a number of more than 1000 digits"),
    ("event_type", "", "must not be empty"),
    ("event_type", None, "must be text, not NoneType"),
    ("event_type", "x" * 201, "has 201 characters, 200 are allowed"),
    ("content_type", "", "must not be empty"),
    ("content_type", "x" * 201, "has 201 characters, 200 are allowed"),
    ("event_id", "0190", "must be a uuid.UUID, not str"),
    ("idempotency_key", "", "must not be empty"),
    ("idempotency_key", "x" * 256, "has 256 characters"),
    ("idempotency_key", "ü" * 128, "has 256 bytes, 255 are allowed"),
    ("idempotency_key", "a\0b", "NUL"),
    ("idempotency_key", "a\nb", r"the control character '\n'"),
    ("idempotency_key", "a\x7fb", r"the control character '\x7f'"),
    ("idempotency_key", "\ud800", "lone surrogate"),
    ("idempotency_key", 4711, "must be text"),
    ("subject", "", "must not be empty"),
    ("subject", "x" * 1001, "has 1001 characters"),
    ("subject", "a\0b", "NUL"),
    ("subject", "\ud800", "lone surrogate"),
    ("subject", b"order-1", NO_ID + "bytes"),
    ("subject", True, NO_ID + "bool"),
    ("subject", 1.5, NO_ID + "float"),
    ("subject", 10**1001, "has 1002 characters"),
    ("headers", [("a", "b")], "must be a mapping of text to text, not list"),
]


# With ids of our own: Python has no text of the greatest number.
@pytest.mark.parametrize(("field", "value", "said"), REFUSED, ids=[f"{field}, {said}" for field, _, said in REFUSED])
def test_fields_are_checked(field, value, said):
    with pytest.raises(EventError) as caught:
        made(**{field: value})
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}: ")
    assert said in str(caught.value)


SPELLING = "a header's name is 1 to 100 of A-Z a-z 0-9 . _ -"
RESERVED = "is a name that the relay sets itself"
# Many clients look headers up without regard to case, and would find either of two.
HEADERS = [
    *[(name, "x", SPELLING) for name in ("", "a b", "x" * 101, 1)],
    ("a", 1, "must be text, not int"),
    ("a", "\0", "NUL"),
    ("a", "\ud800", "lone surrogate"),
    *[(name, "x", RESERVED) for name in ("id", "Id", "ID", "Event-Type", "AGGREGATE-TYPE", "ce_id", "CE_id", "Ce_x")],
    *[(name, "x", RESERVED) for name in ("outbox-replay", "Outbox-Replay", "OUTBOX-")],
    *[(name, "x", "must be given as the event's content_type") for name in ("content-type", "Content-Type")],
    *[(name, "x", "must be given as the event's idempotency_key") for name in ("idempotency-key", "Idempotency-Key")],
    *[(name, "x", "must be given as the event's subject") for name in ("ce_subject", "CE_Subject")],
    ("Traceparent", "x", "must be written 'traceparent'"),
    ("TraceState", "x", "must be written 'tracestate'"),
]


@pytest.mark.parametrize(("name", "value", "said"), HEADERS)
def test_headers_are_checked(name, value, said):
    with pytest.raises(EventError) as caught:
        made(headers={name: value})
    assert caught.value.field == f"headers[{name!r}]"
    assert said in str(caught.value)


def test_headers_are_those_that_were_checked():
    mine = {"tenant": "acme", "traceparent": "x", "Tenant": "y"}
    event = made(headers=mine)
    mine["id"] = "forged"
    assert event.headers == {"tenant": "acme", "traceparent": "x", "Tenant": "y"}


class Number(enum.IntEnum):
    ONE = 1


@pytest.mark.parametrize("field", ["aggregate_id", "subject"])
@pytest.mark.parametrize(
    ("given", "text"),
    [
        (4711, "4711"),
        (-1, "-1"),
        (0, "0"),
        (Number.ONE, "1"),
        (10**999, "1" + "0" * 999),
        (uuid.UUID(int=10), "00000000-0000-0000-0000-00000000000a"),
    ],
)
def test_a_rows_own_id_becomes_text(field, given, text):
    event = made(**{field: given})
    assert (type(getattr(event, field)), getattr(event, field)) == (str, text)
    assert getattr(dataclasses.replace(event, event_type="U"), field) == text


def test_the_longest_names_pass():
    key = "ü" * 127 + "x"
    longest = Event("ü" * 200, "ü" * 1000, "ü" * 200, headers={"x" * 100: "v"}, idempotency_key=key, subject="ü" * 1000)
    assert (len(longest.aggregate_id), longest.idempotency_key, longest.subject) == (1000, key, "ü" * 1000)


def test_what_makes_events_different():
    assert made(idempotency_key="a") != made(idempotency_key="b")
    assert made(subject="a") != made()
    assert made().subject is None


def test_event_id_is_a_uuid7_of_now_or_the_one_given():
    given = made()
    first = id_of(given)
    assert (type(first), given.event_id) == (uuid.UUID, None)
    assert id_of(given) != first
    assert first.version == 7
    age = dt.datetime.now(dt.UTC).timestamp() - (first.int >> 80) / 1000
    assert -1 < age < 60
    own = uuid.uuid4()
    assert made(event_id=own).event_id == id_of(made(event_id=own)) == id_of(made(event_id=own), dated=False) == own
    assert id_of(given, dated=False).version == 4


# --- types that become topics ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Order Line", "Bestellung-Ü", "shop/Order", "shop:Order", "__audit", "Order\n"])
def test_a_type_that_no_topic_can_be_called_after(name):
    with pytest.raises(EventError, match="can't be part of a topic's name") as caught:
        Outbox()._writer.check_events([made(), made(aggregate_type=name)])
    assert caught.value.field == "aggregate_type"
    assert "routed=" in str(caught.value)
    with pytest.raises(NoRoute):  # as the relay would say, too late
        Router().route(name)
    Outbox(routed={name})._writer.check_events([made(aggregate_type=name)])
    with pytest.raises(ConfigurationError, match="collection"):
        Outbox(routed=name)


@pytest.mark.parametrize("name", ["Order", "order.line", "ORDER_LINE-2", "_x", "x" * 200])
def test_a_type_that_the_relay_finds_a_topic_for(name):
    Router().route(name)
    Outbox()._writer.check_events([made(aggregate_type=name)])
