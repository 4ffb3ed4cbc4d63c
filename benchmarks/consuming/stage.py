"""The servers and topics that all ways of a consumer share, and the tables that they write."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import orjson
import psycopg
from confluent_kafka import Producer
from uuid_utils import uuid7

from benchmarks.harness.servers import BenchError

PARTITIONS: Final = 4
KEYS: Final = 5_000
FLAT: Final = "order_id string, seq int, customer string, amount_cents long, status string, note string"
NESTED: Final = (
    "order_id string, seq int, customer struct<id: int, name: string, address: struct<city: string, zip: string>>, "
    "lines array<struct<sku: string, quantity: int, cents: bigint>>, note string"
)
NAMES: Final = ("order_id", "seq", "customer", "amount_cents", "status", "note")
_PAD: Final = "the quick brown fox jumps over the lazy dog " * 14
_SECONDS: Final = 300

Event = Callable[[int], tuple[str, Mapping[str, object]]]
"""Returns the key and the payload of an event, by its number."""


@dataclass
class Stage:
    """Where everything is.

    topics  by whether they are to warm up on, with ``warm`` events instead of ``events``, and whether these are nested.
    kept    what a way started and uses again, such as a Connect worker.
    """

    spark: Any
    url: str
    kafka: str
    folder: Path
    events: int
    warm: int
    topics: dict[tuple[bool, bool], str] = field(default_factory=dict)
    kept: dict[str, Any] = field(default_factory=dict)

    @property
    def jdbc(self) -> str:
        """Return the database's address as Java's driver takes it, with rows sent together."""
        host = psycopg.conninfo.conninfo_to_dict(self.url)
        address = f"jdbc:postgresql://{host['host']}:{host['port']}/{host['dbname']}"
        return f"{address}?user={host['user']}&reWriteBatchedInserts=true"


def flat(number: int) -> tuple[str, Mapping[str, object]]:
    """Return an order event of about 740 bytes of JSON."""
    order = f"order-{number % KEYS}"
    return order, {
        "order_id": order,
        "seq": number // KEYS,
        "customer": f"customer-{number % 977}",
        "amount_cents": number % 10_000,
        "status": "placed",
        "note": _PAD,
    }


def nested(number: int) -> tuple[str, Mapping[str, object]]:
    """Return an order event of about the same size, with a struct and an array of structs."""
    order = f"order-{number % KEYS}"
    customer = number % 977
    return order, {
        "order_id": order,
        "seq": number // KEYS,
        "customer": {
            "id": customer,
            "name": f"customer-{customer}",
            "address": {"city": f"city-{customer % 50}", "zip": f"{customer:05}"},
        },
        "lines": [
            {"sku": f"sku-{number % 89}-{line}", "quantity": line, "cents": number % 10_000} for line in range(4)
        ],
        "note": _PAD[:350],
    }


def fill(kafka: str, topic: str, events: int, event: Event, partitions: int | None = None) -> None:
    """Write the events, as a relay would: key, JSON, headers.

    partitions   the events go to these in turn; None: the key decides.
    """
    producer = Producer({"bootstrap.servers": kafka, "linger.ms": 20, "compression.type": "lz4", "acks": "all"})
    for number in range(events):
        key, payload = event(number)
        where = {} if partitions is None else {"partition": number % partitions}
        headers: Any = [("ce_id", str(uuid7()).encode()), ("ce_type", b"OrderPlaced"), ("ce_source", b"/shop")]
        while True:
            try:
                producer.produce(topic, orjson.dumps(payload), key, headers=headers, **where)
                break
            except BufferError:
                producer.poll(0.1)
    if left := producer.flush(_SECONDS):
        raise BenchError(f"{left} events could not be written to {topic} within {_SECONDS} s")


@dataclass(frozen=True)
class Sink:
    """A table, and what has to stand there once.

    columns   as in CREATE TABLE.
    look      SQL over the table that gives one row.
    expected  that row, of so many events.
    """

    columns: str
    look: str
    expected: Callable[[int], tuple[int, ...]]


def _cents(events: int) -> int:
    whole, rest = divmod(events, 10_000)
    return whole * (9_999 * 10_000 // 2) + rest * (rest - 1) // 2


def _latest(events: int) -> tuple[int, ...]:
    keys = min(events, KEYS)
    return keys, sum((events - 1 - key) // KEYS for key in range(keys))


_ORDER: Final = "seq int, customer text, amount_cents bigint, status text, note text"
LOG: Final = Sink(f"order_id text, {_ORDER}", "SELECT count(*) FROM {table}", lambda events: (events,))
DOCUMENTS: Final = Sink(
    "order_id text, seq int, customer jsonb, lines jsonb, note text",
    "SELECT count(*), sum(jsonb_array_length(lines)) FROM {table}",
    lambda events: (events, 4 * events),
)
ORDERS: Final = Sink(f"order_id text PRIMARY KEY, {_ORDER}", "SELECT count(*), sum(seq) FROM {table}", _latest)
TOTALS: Final = Sink(
    "order_id text PRIMARY KEY, events bigint NOT NULL, cents bigint NOT NULL",
    "SELECT sum(events), sum(cents) FROM {table}",
    lambda events: (events, _cents(events)),
)
