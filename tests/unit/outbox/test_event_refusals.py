"""What an event, its headers, its payload and a serializer must not be."""

from __future__ import annotations

import dataclasses
import uuid
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, MappedAsDataclass, mapped_column, registry

from outbox import ConfigurationError, Event, EventError, Outbox, PayloadError, Serialized
from outbox._payload import encode
from outbox.registry import JsonSchema
from outbox.serializing import serialize
from relay.kafka.routing import NoRoute, Router


@pytest.mark.parametrize("value", [True, 4711.0, b"4711", ["1"], object()])
def test_a_key_that_is_no_id_is_told_apart_from_one_that_is_not_there_yet(value):
    with pytest.raises(EventError, match=f"^aggregate_id: must be text, an int or a UUID, not {type(value).__name__}$"):
        Event("Order", value, "T")


def test_a_row_without_an_id_is_to_be_flushed():
    with pytest.raises(EventError, match=r"^aggregate_id: is None: flush first, .*session\.flush\(\)"):
        Event("Order", None, "T")


@pytest.mark.parametrize(
    "name", ["Id", "ID", "Event-Type", "AGGREGATE-TYPE", "CE_id", "Ce_x", "Outbox-Replay", "OUTBOX-"]
)
def test_names_of_the_relay_are_reserved_in_any_case(name):
    with pytest.raises(EventError, match="is a name that the relay sets itself") as caught:
        Event("Order", "1", "T", headers={name: "x"})
    assert caught.value.field == f"headers[{name!r}]"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Content-Type", "must be given as the event's content_type"),
        ("Idempotency-Key", "must be given as the event's idempotency_key"),
        ("CE_Subject", "must be given as the event's subject"),
        ("Traceparent", "must be written 'traceparent'"),
        ("TraceState", "must be written 'tracestate'"),
    ],
)
def test_headers_that_have_one_spelling(name, said):
    with pytest.raises(EventError, match=said):
        Event("Order", "1", "T", headers={name: "x"})
    assert Event("Order", "1", "T", headers={"traceparent": "x", "Tenant": "y"}).headers["Tenant"] == "y"


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


mapped.map_imperatively(
    Imperative,
    sa.Table(
        "imperative",
        mapped.metadata,
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("password_hash", sa.Text),
    ),
)


@mapped.mapped_as_dataclass
class Decorated:
    __tablename__ = "decorated"
    id: Mapped[int] = mapped_column(primary_key=True)
    password_hash: Mapped[str]


@dataclasses.dataclass
class View:
    account: Any


ROWS = [Account(1, "secret"), Plain(id=1), Imperative(1, "secret"), Decorated(1, "secret")]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: type(row).__name__)
@pytest.mark.parametrize(
    ("wrap", "field"),
    [
        (lambda row: row, "payload"),
        (lambda row: {"account": row}, "payload['account']"),
        (lambda row: [1, View(row)], "payload[1].account"),
    ],
    ids=["itself", "in a dict", "in a dataclass"],
)
@pytest.mark.parametrize(
    "write", [encode, lambda event: JsonSchema("s", {}).encode(event.payload)], ids=["JSON", "JSON Schema"]
)
def test_a_mapped_row_is_no_payload(row, wrap, field, write):
    """All of its columns would be published, those that were added later too."""
    with pytest.raises(PayloadError) as caught:
        write(Event("Account", 1, "T", wrap(row)))
    said = str(caught.value)
    assert "secret" not in said
    assert f"{type(row).__name__} is a row that SQLAlchemy maps" in said
    assert "give a dict" in said


# --- serializers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [5, True, "text", [1, 2], None])
def test_what_a_serializer_returns_is_bytes(value):
    """bytes(5) is five NUL bytes, and bytes([1, 2]) two of them."""
    with pytest.raises(PayloadError, match=f"the serializer's payload is a {type(value).__name__}, not bytes"):
        serialize(lambda _: Serialized(value, "text/plain"), Event("Order", 1, "T", {}))


@pytest.mark.parametrize("value", [b"x", bytearray(b"x"), memoryview(b"x")])
def test_bytes_of_any_kind_are_taken(value):
    assert serialize(lambda _: Serialized(value, "text/plain"), Event("Order", 1, "T", {})).payload == b"x"


# --- types that become topics ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Order Line", "Bestellung-Ü", "shop/Order", "shop:Order", "__audit", "Order\n"])
def test_a_type_that_no_topic_can_be_called_after(name):
    with pytest.raises(EventError, match="can't be part of a topic's name") as caught:
        Outbox()._writer.check_events([Event("Order", 1, "T"), Event(name, 1, "T")])
    assert caught.value.field == "aggregate_type"
    assert "routed=" in str(caught.value)
    with pytest.raises(NoRoute):  # as the relay would say, too late
        Router().route(name)
    Outbox(routed={name})._writer.check_events([Event(name, 1, "T")])
    with pytest.raises(ConfigurationError, match="collection"):
        Outbox(routed=name)


@pytest.mark.parametrize("name", ["Order", "order.line", "ORDER_LINE-2", "_x", "x" * 200])
def test_a_type_that_the_relay_finds_a_topic_for(name):
    Router().route(name)
    Outbox()._writer.check_events([Event(name, 1, "T")])


# --- ids -------------------------------------------------------------------------------------------------------------


def test_an_event_has_the_id_that_it_was_given():
    own = uuid.uuid4()
    assert Event("Order", 1, "T").event_id is None
    assert Event("Order", 1, "T", event_id=own).event_id == own
