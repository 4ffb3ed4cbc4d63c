"""What an event refuses, and how payloads become bytes."""

from __future__ import annotations

import dataclasses
import datetime as dt
import enum
import math
import uuid
from decimal import Decimal
from typing import Any

import orjson
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox import ConfigurationError, Event, EventError, EventTooLarge, Outbox, PayloadError, _payload


def encoded(payload: Any) -> Any:
    text, raw, _ = _payload.encode(Event("Order", "1", "T", payload))
    assert raw is None
    return orjson.loads(text)


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("aggregate_type", ("", "1", "T")),
        ("aggregate_type", ("x" * 201, "1", "T")),
        ("aggregate_id", ("Order", "", "T")),
        ("aggregate_id", ("Order", "x" * 1001, "T")),
        ("aggregate_id", ("Order", 4711, "T")),
        ("aggregate_id", ("Order", "a\0b", "T")),
        ("aggregate_id", ("Order", "\ud800", "T")),
        ("event_type", ("Order", "1", "")),
        ("event_type", ("Order", "1", None)),
    ],
)
def test_names_are_checked(field, arguments):
    with pytest.raises(EventError) as caught:
        Event(*arguments)
    assert caught.value.field == field
    assert field in str(caught.value)


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
        ([("a", "b")], "headers"),
    ],
)
def test_headers_are_checked(headers, field):
    with pytest.raises(EventError) as caught:
        Event("Order", "1", "T", headers=headers)
    assert caught.value.field == field


def test_event_id_is_a_uuid7_of_now_or_the_one_given():
    made = Event("Order", "1", "T").event_id
    assert isinstance(made, uuid.UUID)
    assert made.version == 7
    age = dt.datetime.now(dt.UTC).timestamp() - (made.int >> 80) / 1000
    assert -1 < age < 60
    own = uuid.uuid4()
    assert Event("Order", "1", "T", event_id=own).event_id == own
    with pytest.raises(EventError, match="event_id"):
        Event("Order", "1", "T", event_id="0190")


class Colour(enum.Enum):
    RED = "red"


@dataclasses.dataclass
class Line:
    article: str
    price: Decimal


class Model(pydantic.BaseModel):
    total: Decimal
    at: dt.date


def test_what_payloads_may_hold():
    moment = dt.datetime(2026, 1, 2, 3, 4, 5, tzinfo=dt.UTC)
    key = uuid.UUID(int=7)
    payload = {
        "d": Decimal("1.10"),
        "t": moment,
        "u": key,
        "e": Colour.RED,
        "l": [Line("tea", Decimal(3))],
        "p": (1, 2),
    }
    assert encoded(payload) == {
        "d": "1.10",
        "t": "2026-01-02T03:04:05+00:00",
        "u": str(key),
        "e": "red",
        "l": [{"article": "tea", "price": "3"}],
        "p": [1, 2],
    }
    assert encoded(Line("tea", Decimal(3))) == {"article": "tea", "price": "3"}
    assert encoded(Model(total=Decimal("2.50"), at=dt.date(2026, 1, 2))) == {"total": "2.50", "at": "2026-01-02"}
    assert encoded({"m": Model(total=Decimal(1), at=dt.date(2026, 1, 2))}) == {"m": {"total": "1", "at": "2026-01-02"}}
    assert encoded({"null": None, "text": "\\u0000"}) == {"null": None, "text": "\\u0000"}


def circle() -> dict[str, Any]:
    payload: dict[str, Any] = {}
    payload["a"] = [payload]
    return payload


@pytest.mark.parametrize(
    ("payload", "where"),
    [
        ("text", "payload"),
        (5, "payload"),
        (True, "payload"),
        ({"a": [1, {"b": math.nan}]}, "payload['a'][1]['b']"),
        ([math.inf, None], "payload[0]"),
        ([Line("x", Decimal(1)), Line("y", Decimal("NaN"))], "payload[1].price"),
        ({"a": "x\0y"}, "payload['a']"),
        ({"x\0y": 1}, "payload"),
        ({"a": 2**70}, "payload['a']"),
        ({"a": {1: 2}}, "payload['a']"),
        ({"a": [object()]}, "payload['a'][0]"),
        ({"a": "\ud800"}, "payload['a']"),
        ({"a": {1, 2}}, "payload['a']"),
        (circle(), "payload['a'][0]"),
        (Line(article="\0", price=Decimal(1)), "payload.article"),
    ],
)
def test_what_has_no_faithful_form_is_refused_with_its_place(payload, where):
    with pytest.raises(PayloadError) as caught:
        _payload.encode(Event("Order", "1", "T", payload))
    assert caught.value.field == where


def test_bytes_and_tombstones_and_content_types():
    assert _payload.encode(Event("Order", "1", "T", memoryview(b"x"))) == (None, b"x", "application/octet-stream")
    assert _payload.encode(Event("Order", "1", "T", b"x", content_type="text/plain")) == (None, b"x", "text/plain")
    assert _payload.encode(Event("Order", "1", "T")) == (None, None, None)
    assert _payload.encode(Event("Order", "1", "T", {}, content_type="application/json")) == ("{}", None, None)
    with pytest.raises(PayloadError, match="text/plain"):
        _payload.encode(Event("Order", "1", "T", {}, content_type="text/plain"))


def test_the_limit_counts_key_and_headers():
    writer = Outbox(max_event_bytes=100)
    room = Event("Order", "k" * 10, "T", b"x" * 50, headers={"a": "b"}, content_type="t")
    row = writer._row(room)
    assert row["headers"] == '{"a":"b","content-type":"t"}'
    with pytest.raises(EventTooLarge) as caught:
        writer._row(Event("Order", "k" * 10, "T", b"x" * 61, headers={"a": "b"}, content_type="t"))
    # Stored as {"a": "b", "content-type": "t"}: 31 bytes.
    assert (caught.value.size, caught.value.limit) == (10 + 61 + 31, 100)
    with pytest.raises(ConfigurationError, match="max_event_bytes"):
        Outbox(max_event_bytes=2_000_000)


@given(st.binary(max_size=200))
def test_any_bytes_pass_unchanged(data):
    assert _payload.encode(Event("Order", "1", "T", data))[1] == data
