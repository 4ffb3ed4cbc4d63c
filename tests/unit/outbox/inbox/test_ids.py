"""The id of a message's event: from which header, of which objects; the same as that of the Spark consumers."""

from __future__ import annotations

from types import SimpleNamespace
from uuid import UUID

import pyarrow as pa
import pytest

from outbox._app.choices import HeaderSet
from outbox.inbox import MessageIdMissing, message_id
from relay.core.ports import Claim
from relay.kafka.headers import MessageHeaders
from spark_jobs.task.incoming import _by_name, _ids

ID = UUID("0198a7c4-5d3e-7b21-9c55-2f6d8e1a4b70")
OTHER = UUID("0198a7c4-5d3e-7b21-9c55-2f6d8e1a4b71")


class Confluent:
    def __init__(self, headers):
        self._headers = headers

    def headers(self):
        return self._headers

    def topic(self):
        return "orders"

    def partition(self):
        return 3

    def offset(self):
        return 17


@pytest.mark.parametrize(
    "message",
    [
        Confluent([("ce_id", str(ID).encode())]),
        Confluent([("id", str(OTHER).encode()), ("ce_id", str(ID).encode())]),
        Confluent([("ce_id", str(ID).encode()), ("ce_id", str(OTHER).encode())]),
        Confluent([("ce_id", None), ("id", str(ID).encode())]),
        Confluent([("id", str(ID).upper().encode())]),
        SimpleNamespace(headers=(("ce_id", str(ID).encode()),)),
        SimpleNamespace(headers={"ce_id": str(ID)}),
        {"id": str(ID)},
        {"id": ID},
        [("id", bytearray(str(ID).encode()))],
        ID,
    ],
)
def test_where_the_id_is_found(message):
    assert message_id(message) == ID


@pytest.mark.parametrize("which", HeaderSet)
def test_every_set_of_the_relays_headers_has_it(which):
    claim = Claim(1, str(ID), "Order", "4711", "OrderPlaced", "2026-01-01T00:00:00Z", b"{}", {"tenant": "a"})
    assert message_id(Confluent(MessageHeaders("//shop", which).of(claim))) == ID


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        (Confluent([]), "the message orders-3 offset 17 has no id"),
        (Confluent(None), "the message orders-3 offset 17 has no id"),
        (Confluent([("ce_id", b"")]), "has no id"),
        (Confluent([("ce_id", b""), ("id", str(ID).encode())]), "has no id"),
        ({"key": "x"}, "the message has no id"),
        ({"id": 7}, "the id in a message's headers is a int"),
        ("0198a7c4", "a str is no message"),
        (7, "a int is no message"),
    ],
)
def test_a_message_without_one_is_refused(message, problem):
    with pytest.raises(MessageIdMissing, match=problem):
        message_id(message)


@pytest.mark.parametrize(
    "headers",
    [
        [("ce_id", b"evt-1"), ("ce_source", b"//shop")],
        [("ce_id", b"evt-1")],
        [("id", b"\xff\xfe"), ("ce_source", b"\x00")],
        [("ce_id", b"0198a7c45d3e7b219c552f6d8e1a4b70")],
        [("ce_id", b"0198A7C4-5d3e-7b21-9c55-2f6d8e1a4b70"), ("ce_source", b"s")],
        [("ce_id", None), ("id", b"n")],
    ],
)
def test_it_is_the_one_that_spark_consumers_have(headers):
    (found,) = _ids([_by_name(headers)]).cast(pa.string()).to_pylist()
    assert message_id(Confluent(headers)) == UUID(found)
