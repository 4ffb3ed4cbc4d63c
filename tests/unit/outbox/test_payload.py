"""How payloads become bytes, and what has no faithful form."""

from __future__ import annotations

import collections
import dataclasses
import datetime as dt
import enum
import functools
import math
import types
import uuid
import zoneinfo
from decimal import Decimal
from typing import Any, NamedTuple

import orjson
import pydantic
import pytest
import sqlalchemy as sa
from hypothesis import example, given
from hypothesis import strategies as st
from sqlalchemy.orm import DeclarativeBase, Mapped, MappedAsDataclass, mapped_column, registry

from outbox import Event, EventTooLarge, Outbox, PayloadError, Serialized, _payload
from outbox.registry import JsonSchema
from outbox.serializing import serialize


def encoded(payload: Any) -> Any:
    text, raw, _ = _payload.encode(Event("Order", "1", "T", payload))
    assert raw is None
    return orjson.loads(text)


class Colour(enum.Enum):
    RED = "red"
    NAN = math.nan
    NUL = "a\0b"
    ODD = object()


class Name(enum.StrEnum):
    KEY = "key"


@dataclasses.dataclass
class Line:
    article: str
    price: Decimal


@dataclasses.dataclass
class Basket:
    lines: list[Line]
    _cache: Any = None
    total: Decimal = dataclasses.field(init=False)

    @functools.cached_property
    def count(self) -> int:
        return len(self.lines)


class Model(pydantic.BaseModel):
    total: Decimal
    at: dt.date


class Measure(pydantic.BaseModel):
    value: float = 0.0
    raw: bytes = b""
    inner: Any = None


class Names(pydantic.RootModel[list[str]]):
    pass


class Point(NamedTuple):
    x: int
    y: int


def test_what_payloads_may_hold():
    moment = dt.datetime(2026, 1, 2, 3, 4, 5, tzinfo=dt.UTC)
    key = uuid.UUID(int=7)
    payload = {
        "d": Decimal("1.10"),
        "t": moment,
        "day": moment.date(),
        "u": key,
        "e": Colour.RED,
        "l": [Line("tea", Decimal(3))],
        "p": (1, 2),
        "big": [-(2**63), 2**64 - 1],
    }
    assert encoded(payload) == {
        "d": "1.10",
        "t": "2026-01-02T03:04:05+00:00",
        "day": "2026-01-02",
        "u": str(key),
        "e": "red",
        "l": [{"article": "tea", "price": "3"}],
        "p": [1, 2],
        "big": [-(2**63), 2**64 - 1],
    }
    assert encoded(collections.OrderedDict(a=1)) == {"a": 1}
    # What looks like trouble in the output, and is none.
    assert encoded({"null": None, "text": "\\u0000"}) == {"null": None, "text": "\\u0000"}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("0E-8", "0.00000000"),
        ("-1.50E-7", "-0.000000150"),
        ("1E+3", "1000"),
        ("1E+40", "1" + "0" * 40),
        ("1E+41", "1E+41"),
        ("1E-999999", "1E-999999"),
        ("1E+999999", "1E+999999"),
    ],
)
def test_a_decimal_has_no_exponent_unless_it_would_have_very_many_zeros(value, text):
    assert encoded([Decimal(value)]) == [text]


@given(st.decimals(allow_nan=False, allow_infinity=False))
def test_any_decimal_has_the_same_value_as_text(value):
    assert Decimal(encoded([value])[0]) == value


def test_a_time_whose_offset_has_seconds_is_the_same_time_in_utc():
    """JSON's times have offsets of whole minutes. Local mean time had seconds, in Amsterdam until 1937."""
    old = dt.datetime(1930, 6, 1, 12, tzinfo=zoneinfo.ZoneInfo("Europe/Amsterdam"))
    utc = "1930-06-01T10:40:28+00:00"
    assert encoded({"t": [old], "line": Line("tea", old), "enum": enum.Enum("E", {"OLD": old}).OLD}) == {
        "t": [utc],
        "line": {"article": "tea", "price": utc},
        "enum": utc,
    }
    # What stands beside it is written as ever.
    others = [
        dt.datetime(1930, 6, 1, 12),
        dt.datetime(1930, 6, 1, 12, 0, 0, 5, tzinfo=dt.UTC),
        dt.datetime(1960, 6, 1, 12, tzinfo=dt.timezone(dt.timedelta(hours=-3, minutes=-30))),
        dt.date(1930, 6, 1),
        dt.time(12, 0, 0, 5),
        dt.datetime(2026, 6, 1, tzinfo=zoneinfo.ZoneInfo("Europe/Amsterdam")),
        Decimal("1.10"),
        Colour.RED,
    ]
    assert encoded([old, *others]) == [utc, *encoded(others)]


OFFSETS = st.timedeltas(dt.timedelta(hours=-23), dt.timedelta(hours=23)).map(
    lambda offset: dt.timezone(dt.timedelta(seconds=offset // dt.timedelta(seconds=1)))
)


@given(
    st.datetimes(
        min_value=dt.datetime(1, 1, 3), max_value=dt.datetime(9999, 12, 29), timezones=st.timezones() | OFFSETS
    )
)
@example(dt.datetime(2025, 1, 1, tzinfo=dt.timezone(dt.timedelta(hours=1, seconds=30))))
@example(dt.datetime(2025, 1, 1, tzinfo=dt.timezone(dt.timedelta(seconds=-20))))
@example(dt.datetime(999, 1, 1, tzinfo=zoneinfo.ZoneInfo("Europe/Amsterdam")))
def test_any_time_is_the_same_time(value):
    found = dt.datetime.fromisoformat(encoded([value])[0])
    assert found.astimezone(dt.UTC) == value.astimezone(dt.UTC)


@pytest.mark.parametrize(("last", "seconds"), [(dt.datetime.min, 30), (dt.datetime.max, -30)])
def test_a_time_with_seconds_in_its_offset_that_has_none_in_utc_is_refused(last, seconds):
    with pytest.raises(PayloadError, match=r"payload\[0\]: is .*: its offset has seconds, and as a time in UTC"):
        encoded([last.replace(tzinfo=dt.timezone(dt.timedelta(seconds=seconds)))])


def test_dataclasses():
    assert encoded(Line("tea", Decimal(3))) == {"article": "tea", "price": "3"}
    basket = Basket([Line("tea", Decimal(3))], _cache=math.nan)
    basket.total = Decimal(3)
    assert basket.count == 1  # and is kept in the instance, from where it must not get into the payload
    basket.note = "neither"  # type: ignore[attr-defined]
    assert encoded([basket, None]) == [{"lines": [{"article": "tea", "price": "3"}], "total": "3"}, None]


def test_pydantic_models():
    model = Model(total=Decimal("2.50"), at=dt.date(2026, 1, 2))
    plain = {"total": "2.50", "at": "2026-01-02"}
    assert encoded(model) == plain
    assert encoded({"m": [model]}) == {"m": [plain]}
    assert encoded(Names(["a"])) == ["a"]


def circle() -> dict[str, Any]:
    payload: dict[str, Any] = {}
    payload["a"] = [payload]
    return payload


def nested(levels: int) -> list[Any]:
    payload: list[Any] = []
    for _ in range(levels):
        payload = [payload]
    return payload


@pytest.mark.parametrize(
    ("payload", "where", "why"),
    [
        ("text", "payload", "neither a JSON object nor a list"),
        (5, "payload", "a int is neither"),
        (1.5, "payload", "a float is neither"),
        (True, "payload", "a bool is neither"),
        ((1, 2), "payload", "a tuple is neither"),
        (Line, "payload", "a type is neither"),
        ({"a": [1, {"b": math.nan}]}, "payload['a'][1]['b']", "is nan"),
        ([math.inf, None], "payload[0]", "is inf"),
        ({"a": (None, -math.inf)}, "payload['a'][1]", "is -inf"),
        ({"a": Colour.NAN}, "payload['a']", "is nan"),
        ({"a": Colour.NUL}, "payload['a']", "NUL"),
        ({"a": Colour.ODD}, "payload['a']", "is a object"),
        ([Line("x", Decimal(1)), Line("y", Decimal("NaN"))], "payload[1].price", "is NaN"),
        ({"a": Decimal("-Infinity")}, "payload['a']", "is -Infinity"),
        ([Measure(value=math.nan)], "payload[0]['value']", "is nan"),
        (Measure(value=math.nan), "payload['value']", "is nan"),
        (Measure(raw=b"\xff"), "payload", "the pydantic model Measure can't be written"),
        ({"a": [Measure(raw=b"\xff")]}, "payload['a'][0]", "the pydantic model Measure can't be written"),
        (Measure(inner=object()), "payload", "the pydantic model Measure can't be written"),
        ({"a": "x\0y"}, "payload['a']", "NUL"),
        ({"x\0y": 1}, "payload", r"the key 'x\\x00y' contains a NUL"),
        (Line(article="\0", price=Decimal(1)), "payload.article", "NUL"),
        (Basket([]), "payload", "the field total of Basket has no value"),
        ({"a": 2**64}, "payload['a']", "more than 64 bits; give it as text"),
        ([-(2**63) - 1], "payload[0]", "more than 64 bits; give it as text"),
        ({"a": {1: 2}}, "payload['a']", "the key 1 is a int"),
        ({"a": {Name.KEY: 2}}, "payload['a']", "is a Name; the keys of a JSON object are text"),
        ({"a": [object()]}, "payload['a'][0]", "is a object"),
        ({"a": [Point(1, 2)]}, "payload['a'][0]", "is a Point"),
        ({"a": types.MappingProxyType({})}, "payload['a']", "is a mappingproxy"),
        ({"a": b"x"}, "payload['a']", "is a bytes"),
        ({"a": {1, 2}}, "payload['a']", "is a set"),
        ({"a": "\ud800"}, "payload['a']", "lone surrogate"),
        ({"a": {"\ud800": 1}}, "payload['a']", r"the key '\\ud800' contains a lone surrogate"),
        (circle(), "payload['a'][0]", "contains itself"),
        (nested(400), "payload", "nested too deeply"),
    ],
)
def test_what_has_no_faithful_form_is_refused_with_its_place(payload, where, why):
    with pytest.raises(PayloadError, match=why) as caught:
        _payload.encode(Event("Order", "1", "T", payload))
    assert caught.value.field == where


def test_bytes_and_tombstones():
    def of(payload: Any, content_type: str | None = None) -> tuple[Any, ...]:
        return tuple(_payload.encode(Event("Order", "1", "T", payload, content_type=content_type)))

    assert of(b"x") == (None, b"x", "application/octet-stream")
    assert of(bytearray(b"x")) == (None, b"x", "application/octet-stream")
    assert of(memoryview(b"abcd")[::2]) == (None, b"ac", "application/octet-stream")
    assert of(b"x", "text/plain") == (None, b"x", "text/plain")
    assert of(b"{}", "application/json") == (None, b"{}", "application/json")
    assert of(None) == (None, None, None)


@pytest.mark.parametrize(
    ("content_type", "stored"),
    [
        (None, None),
        ("application/json", None),
        ("application/json; charset=utf-8", "application/json; charset=utf-8"),
        ("application/vnd.shop.order.v1+json", "application/vnd.shop.order.v1+json"),
        ("model/gltf+json", "model/gltf+json"),
    ],
)
def test_content_types_of_json(content_type, stored):
    assert _payload.encode(Event("Order", "1", "T", {}, content_type=content_type)) == (b"{}", None, stored)


@pytest.mark.parametrize("content_type", ["text/plain", "application/avro", "json", "application/jsonp", "a/b+jsonx"])
def test_content_types_that_are_not_of_json(content_type):
    with pytest.raises(PayloadError, match="as bytes") as caught:
        _payload.encode(Event("Order", "1", "T", {}, content_type=content_type))
    assert caught.value.field == "content_type"


def test_a_lower_limit_counts_key_and_headers():
    writer = Outbox(max_event_bytes=100)

    def with_payload(size: int) -> Event:
        return Event("Order", "k" * 10, "T", b"x" * size, headers={"a": "b"}, content_type="t")

    # Stored as {"a": "b", "content-type": "t"}: 31 bytes.
    row = writer._writer._row(with_payload(100 - 10 - 31), uuid.uuid4(), {}, {})
    assert row["headers"] == '{"a":"b","content-type":"t"}'
    with pytest.raises(EventTooLarge) as caught:
        writer._writer._row(with_payload(101 - 10 - 31), uuid.uuid4(), {}, {})
    assert (caught.value.size, caught.value.limit) == (101, 100)


@given(st.binary(max_size=200))
def test_any_bytes_pass_unchanged(data):
    assert _payload.encode(Event("Order", "1", "T", data)).raw == data


@pytest.mark.parametrize("text", [b"1e9", b"1e9" * 50, b"[1e9,1e9]", b",:,:", b"[]", b"", b'{"a":1e300}', b"0e0e0e0e0"])
def test_the_quick_bound_is_never_below_the_exact_one(text):
    assert _payload.largest_size(text) <= _payload._MOST_GROWTH * len(text)


# --- rows as payloads ------------------------------------------------------------------------------------------------

mapped = registry()


class Base(MappedAsDataclass, DeclarativeBase):
    pass


class Account(Base):
    __tablename__ = "accounts"
    id: Mapped[int] = mapped_column(primary_key=True)
    password_hash: Mapped[str]


class OldBase(DeclarativeBase):
    pass


class Plain(OldBase):
    __tablename__ = "plain"
    id: Mapped[int] = mapped_column(primary_key=True)


@dataclasses.dataclass
class Imperative:
    id: int
    password_hash: str


COLUMNS = sa.Column("id", sa.Integer, primary_key=True), sa.Column("password_hash", sa.Text)
mapped.map_imperatively(Imperative, sa.Table("imperative", mapped.metadata, *COLUMNS))


@mapped.mapped_as_dataclass
class Decorated:
    __tablename__ = "decorated"
    id: Mapped[int] = mapped_column(primary_key=True)
    password_hash: Mapped[str]


@dataclasses.dataclass
class View:
    account: Any


ROWS = [Account(1, "secret"), Plain(id=1), Imperative(1, "secret"), Decorated(1, "secret")]
WRAPS = {
    "payload": lambda row: row,
    "payload['account']": lambda row: {"account": row},
    "payload[1].account": lambda row: [1, View(row)],
}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: type(row).__name__)
@pytest.mark.parametrize("field", WRAPS)
@pytest.mark.parametrize("write", [_payload.to_json, JsonSchema("s", {}).encode], ids=["JSON", "JSON Schema"])
def test_a_mapped_row_is_no_payload(row, field, write):
    """All of its columns would be published, those that were added later too."""
    with pytest.raises(PayloadError) as caught:
        write(WRAPS[field](row))
    said = str(caught.value)
    assert caught.value.field == field
    assert "secret" not in said
    assert f"{type(row).__name__} is a row that SQLAlchemy maps" in said
    assert "give a dict" in said


# --- serializers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [5, True, "text", [1, 2], None])
def test_what_a_serializer_returns_is_bytes(value):
    """bytes(5) is five NUL bytes, and bytes([1, 2]) two of them."""
    with pytest.raises(PayloadError, match=f"the serializer's payload is a {type(value).__name__}, not bytes"):
        serialize(lambda _: Serialized(value, "text/plain"), Event("Order", "1", "T", {}))


@pytest.mark.parametrize("value", [b"x", bytearray(b"x"), memoryview(b"x")])
def test_bytes_of_any_kind_are_taken(value):
    assert serialize(lambda _: Serialized(value, "text/plain"), Event("Order", "1", "T", {})).payload == b"x"
