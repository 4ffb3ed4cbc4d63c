"""What an event refuses."""

from __future__ import annotations

import dataclasses
import datetime as dt
import enum
import uuid

import pytest

from outbox import Event, EventError
from outbox.event import id_of


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("aggregate_type", ("", "1", "T")),
        ("aggregate_type", ("x" * 201, "1", "T")),
        ("aggregate_id", ("Order", "", "T")),
        ("aggregate_id", ("Order", "x" * 1001, "T")),
        ("aggregate_id", ("Order", True, "T")),
        ("aggregate_id", ("Order", 4711.0, "T")),
        ("aggregate_id", ("Order", b"4711", "T")),
        ("aggregate_id", ("Order", None, "T")),
        ("aggregate_id", ("Order", -(10**1000), "T")),
        ("aggregate_id", ("Order", 10**5000, "T")),
        ("aggregate_id", ("Order", "a\0b", "T")),
        ("aggregate_id", ("Order", "\ud800", "T")),
        ("event_type", ("Order", "1", "")),
        ("event_type", ("Order", "1", None)),
        ("event_type", ("Order", "1", "x" * 201)),
        ("content_type", ("Order", "1", "T", b"", {}, uuid.UUID(int=1), "")),
        ("content_type", ("Order", "1", "T", b"", {}, uuid.UUID(int=1), "x" * 201)),
        ("event_id", ("Order", "1", "T", b"", {}, "0190")),
    ],
)
def test_names_are_checked(field, arguments):
    with pytest.raises(EventError) as caught:
        Event(*arguments)
    assert caught.value.field == field
    assert field in str(caught.value)


class Number(enum.IntEnum):
    ONE = 1


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
def test_a_rows_own_id_becomes_text(given, text):
    event = Event("Order", given, "T")
    assert (type(event.aggregate_id), event.aggregate_id) == (str, text)
    assert dataclasses.replace(event, event_type="U").aggregate_id == text


@pytest.mark.parametrize(
    ("headers", "field"),
    [
        ({"id": "x"}, "headers['id']"),
        ({"ce_id": "x"}, "headers['ce_id']"),
        ({"content-type": "x"}, "headers['content-type']"),
        ({"": "x"}, "headers['']"),
        ({"a b": "x"}, "headers['a b']"),
        ({"a": 1}, "headers['a']"),
        ({"a": "\0"}, "headers['a']"),
        ({"a": "\ud800"}, "headers['a']"),
        ({"x" * 101: "a"}, f"headers['{'x' * 101}']"),
        ({"idempotency-key": "x"}, "headers['idempotency-key']"),
        ({"ce_subject": "x"}, "headers['ce_subject']"),
        ({1: "x"}, "headers[1]"),
        ([("a", "b")], "headers"),
    ],
)
def test_headers_are_checked(headers, field):
    with pytest.raises(EventError) as caught:
        Event("Order", "1", "T", headers=headers)
    assert caught.value.field == field


@pytest.mark.parametrize("key", ["", "x" * 256, "ü" * 128, "a\0b", "a\nb", "a\x7fb", "\ud800", 4711])
def test_idempotency_keys_are_checked(key):
    with pytest.raises(EventError) as caught:
        Event("Order", "1", "T", idempotency_key=key)
    assert caught.value.field == "idempotency_key"


def test_idempotency_keys_have_up_to_255_bytes():
    assert Event("Order", "1", "T", idempotency_key="ü" * 127 + "x").idempotency_key == "ü" * 127 + "x"
    assert Event("Order", "1", "T", idempotency_key="a") != Event("Order", "1", "T", idempotency_key="b")


@pytest.mark.parametrize("subject", ["", "x" * 1001, "a\0b", "\ud800", b"order-1", True, 1.5, 10**1001])
def test_subjects_are_checked_like_the_aggregates_id(subject):
    with pytest.raises(EventError) as caught:
        Event("Order", "1", "T", subject=subject)
    assert caught.value.field == "subject"


def test_a_rows_own_id_is_a_subject():
    assert Event("Order", "1", "T").subject is None
    assert [Event("Order", "1", "T", subject=one).subject for one in (7, uuid.UUID(int=7))] == [
        "7",
        "00000000-0000-0000-0000-000000000007",
    ]
    longest = Event("Order", "1", "T", subject="ü" * 1000)
    assert dataclasses.replace(longest, event_type="U").subject == "ü" * 1000
    assert longest != Event("Order", "1", "T")


def test_event_id_is_a_uuid7_of_now_or_the_one_given():
    given = Event("Order", "1", "T")
    made = id_of(given)
    assert (type(made), given.event_id) == (uuid.UUID, None)
    assert id_of(given) != made
    assert made.version == 7
    age = dt.datetime.now(dt.UTC).timestamp() - (made.int >> 80) / 1000
    assert -1 < age < 60
    own = uuid.uuid4()
    assert id_of(Event("Order", "1", "T", event_id=own)) == own
    with pytest.raises(EventError, match="event_id"):
        Event("Order", "1", "T", event_id="0190")


def test_the_longest_names_pass():
    longest = Event("ü" * 200, "ü" * 1000, "ü" * 200, headers={"x" * 100: "v"})
    assert len(longest.aggregate_id) == 1000


def test_headers_are_those_that_were_checked():
    mine = {"tenant": "acme"}
    made = Event("Order", "1", "T", headers=mine)
    mine["id"] = "forged"
    assert made.headers == {"tenant": "acme"}
