"""What a task makes of Kafka's columns: ids above all, by which repeats are known."""

from __future__ import annotations

import datetime as dt
from contextlib import suppress
from typing import Any
from uuid import UUID

import pytest

from outbox.consumer.ids import key_id
from outbox.inbox import MessageIdMissing
from outbox.inbox.ids import message_id
from spark_jobs.payloads.framing import HEADER
from spark_jobs.task.incoming import Incoming, Messages

V7 = b"0195d9c2-5c00-7abc-8def-0123456789ab"
NOON = int(dt.datetime(2026, 3, 4, 12, tzinfo=dt.UTC).timestamp() * 1000)
HOP = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
ORIGIN = b"00-0af7651916cd43dd8448eb211c80319c-00f067aa0ba902b7-01"


def taken(*headers: tuple[str, bytes | None], ids: Any = "headers", **given: Any) -> dict[str, Any]:
    """Return the columns of META, and ``schema``, of one message."""
    at, key, value = given.get("at", NOON), given.get("key", b"k"), given.get("value", b"{}")
    messages = Messages("t", 3, [given.get("offset", 5)], [at], [key], [value], [headers])
    meta, _, schemas, _ = Incoming(None, ids, traced=True, key=given.get("header")).taken(messages)
    return {name: column.to_pylist()[0] for name, column in {**meta, "schema": schemas}.items()}


def test_the_columns_of_a_message():
    assert taken(("ce_id", V7), ("ce_type", b"Paid"), (HEADER, b"\x01a"), (HEADER, b"b")) == {
        "message_topic": "t",
        "message_part": 3,
        "message_offset": 5,
        "message_key": "k",
        "message_type": "Paid",
        "message_time": dt.datetime(2026, 3, 4, 12, tzinfo=dt.UTC),
        "message_tombstone": False,
        "message_id": V7.decode(),
        "traceparent": None,
        "tracestate": None,
        "schema": b"\x01a",
    }


# An id that is no UUID is hashed with its source: of CloudEvents the two together are unique.
OF_SHOP, OF_NOBODY = "4ed31ad0-b301-8698-8dfc-92839c0e3875", "2cb7622c-0d94-8214-8871-945456db5aee"


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ([("ce_id", V7), ("id", b"other")], V7.decode()),
        ([("id", V7.upper())], V7.upper().decode()),
        ([("ce_id", None), ("id", V7)], V7.decode()),
        ([("ce_id", V7), ("ce_id", b"second")], V7.decode()),
        ([("x", b"1"), ("ce_id", b"order-5"), ("ce_source", b"/shop")], OF_SHOP),
        ([("ce_id", b"order-5")], OF_NOBODY),
        ([("id", b"order-5"), ("ce_source", None)], OF_NOBODY),
        ([("ce_id", b"\xff\xfe")], "d590f90f-7944-8340-8fb2-53f0c59cb89f"),
        ([("ce_id", b""), ("id", V7)], None),
        ([("ID", V7), ("CE_ID", V7)], None),
        ([], None),
    ],
)
def test_the_id_of_a_message(headers, expected):
    assert taken(*headers)["message_id"] == expected
    # A neighbour's that has to be hashed changes nothing.
    beside = Messages("t", 0, [0, 1], [0, 0], [None] * 2, [None] * 2, [headers, [("ce_id", b"x")]])
    assert Incoming(None, "headers").taken(beside)[0]["message_id"].to_pylist()[0] == expected


KEY = "idempotency-key"
OF_KEY = key_id(b"/shop", b"Order", b"request 1")


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ([("ce_id", V7), ("ce_source", b"/shop"), ("aggregate-type", b"Order"), (KEY, b"request 1")], OF_KEY),
        # The same key again, under another id, or without any.
        ([("ce_id", b"x"), ("ce_source", b"/shop"), ("aggregate-type", b"Order"), (KEY, b"request 1")], OF_KEY),
        ([("ce_source", b"/shop"), ("aggregate-type", b"Order"), (KEY, b"request 1")], OF_KEY),
        # Another aggregate type, and another source, have keys of their own; also if they are UUIDs.
        ([("ce_id", V7), ("aggregate-type", b"Order"), (KEY, b"request 1")], key_id(b"", b"Order", b"request 1")),
        ([("ce_id", b"x"), ("aggregate-type", b"Order"), (KEY, V7)], key_id(b"", b"Order", V7)),
        ([(KEY, b"request 1")], key_id(b"", b"", b"request 1")),
        # An event without a key of its own.
        ([("ce_id", V7), ("aggregate-type", b"Order"), (KEY, V7)], V7.decode()),
        ([("ce_id", V7)], V7.decode()),
        ([("ce_id", V7), (KEY, None)], V7.decode()),
        ([("ce_id", V7), (KEY, b"")], V7.decode()),
        ([("Idempotency-Key", b"request 1")], None),
    ],
)
def test_the_id_of_a_message_with_a_key(headers, expected):
    assert taken(*headers, header=KEY)["message_id"] == expected
    found = None
    with suppress(MessageIdMissing):
        found = str(message_id(headers, KEY))
    assert found == expected
    without = taken(*headers)["message_id"]
    assert without != expected or without in {None, V7.decode()}
    placed = taken(*headers, ids="place", header=KEY)["message_id"]
    assert placed == expected or (expected is None and UUID(placed).version == 8)


@pytest.mark.parametrize(
    "almost",
    [
        V7 + b"\n",
        V7.replace(b"-", b""),
        V7.replace(b"-", b"0"),
        b"g" + V7[1:],
        b"-" + V7[1:],
        V7[:35] + b"\xff",
        "\u0660".encode() * 18,
    ],
)
def test_what_is_almost_a_uuid_is_hashed(almost):
    found = taken(("ce_id", almost))["message_id"]
    assert (found != almost.decode("utf-8", "replace"), UUID(found).version) == (True, 8)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (b"", ""),
        ("schl\u00fcssel\U0001f600".encode(), "schl\u00fcssel\U0001f600"),
        (b"a\0b", "a\ufffdb"),
        (b"\xff\xfe", "\ufffd\ufffd"),
        (b"\xf0\x9f\x98", "\ufffd"),
        (b"\xc3(x", "\ufffd(x"),
    ],
)
def test_keys_and_types_are_texts_that_postgres_takes(given, text):
    found = taken(("event-type", b"other"), ("ce_type", given), key=given)
    assert (found["message_key"], found["message_type"]) == (text, text)
    assert taken(("ce_type", None), ("event-type", given))["message_type"] == text


def test_what_is_null():
    found = taken(key=None, value=None)
    assert [found[name] for name in ("message_key", "message_type", "message_tombstone")] == [None, None, True]
    assert taken(value=b"")["message_tombstone"] is False


def test_times_are_those_that_postgres_has():
    years = [(1, 1, 2), (9999, 12, 30)]
    assert [taken(at=at)["message_time"] for at in (-(2**60), 2**60)] == [
        dt.datetime(*day, tzinfo=dt.UTC) for day in years
    ]


def test_an_id_of_the_content_or_of_the_place():
    """Null and empty are two contents, and key and value do not flow together; a topic made anew has other ids."""
    contents = [(b"a", b"b"), (b"ab", b""), (b"ab", None), (b"", b"ab"), (None, b"ab")]
    of_content = [taken(("ce_id", V7), key=key, value=value, ids="content") for key, value in contents]
    places = [{}, {"offset": 6}, {"at": NOON + 1}]
    of_place = [taken(ids="place", **given) for given in places]
    for made in (of_content, of_place):
        ids = [UUID(one["message_id"]) for one in made]
        assert len(set(ids)) == len(made)
        assert {one.version for one in ids} == {8}
    assert of_place == [taken(ids="place", **given) for given in places]
    assert taken(("ce_id", V7), ids="place")["message_id"] == V7.decode()
    assert taken(("ce_id", V7), ids="columns")["message_id"] is None


@pytest.mark.parametrize(
    ("headers", "trace"),
    [
        ({"traceparent": HOP, "ce_traceparent": ORIGIN, "tracestate": b"a=1", "ce_tracestate": b"b=2"}, (HOP, "a=1")),
        ({"traceparent": HOP, "ce_tracestate": b"b=2"}, (HOP, None)),
        ({"ce_traceparent": ORIGIN, "tracestate": b"a=1", "ce_tracestate": b"b=2"}, (ORIGIN, "b=2")),
        *(
            ({"traceparent": wrong, "ce_traceparent": ORIGIN}, (ORIGIN, None))
            for wrong in (b"", HOP.upper(), HOP + b"\n", HOP[:-1], b"\xff" + HOP[1:], None)
        ),
        *(
            ({"traceparent": HOP, "tracestate": state}, (HOP, state.decode() if fits else None))
            for state, fits in ((b"x" * 512, True), (b"x" * 513, False), (b"", False), (b"a\tb", False))
        ),
        ({"tracestate": b"a=1"}, (None, None)),
    ],
)
def test_the_trace_of_a_message(headers, trace):
    found = taken(*headers.items())
    parent, state = trace
    assert (found["traceparent"], found["tracestate"]) == (parent and parent.decode(), state)


def test_only_the_types_that_are_asked_for():
    types = [b"A", b"\xc3\xa9", b"B", None, b"\xff"]
    ids = [V7[:-1] + b"%d" % number for number in range(5)]
    listed = [[("ce_type", one), ("ce_id", id_), (HEADER, id_[-1:])] for one, id_ in zip(types, ids, strict=True)]
    messages = Messages("t", 0, range(5), [NOON] * 5, [None] * 5, [b"{}"] * 5, listed)
    meta, _, schemas, _ = Incoming(("B", "\u00e9"), "headers").taken(messages)
    assert (meta["message_offset"].to_pylist(), meta["message_type"].to_pylist()) == ([1, 2], ["\u00e9", "B"])
    assert meta["message_id"].to_pylist() == [ids[1].decode(), ids[2].decode()]
    assert schemas.to_pylist() == [b"1", b"2"]
