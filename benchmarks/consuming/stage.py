"""The servers and topics that all ways of a consumer share, and the tables that they write."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import orjson
import psycopg
from confluent_kafka import Producer
from uuid_utils import uuid7

from benchmarks.harness.servers import BenchError

PARTITIONS: Final = 4
KEYS: Final = 5_000
FLAT: Final = "order_id string, seq int, customer string, amount_cents long, status string, note string"
NAMES: Final = ("order_id", "seq", "customer", "amount_cents", "status", "note")
_PAD: Final = "the quick brown fox jumps over the lazy dog " * 14
_SECONDS: Final = 300


@dataclass
class Stage:
    """Where everything is. ``topics`` has two: of ``warm`` events, to warm up on, if True; of ``events`` if False."""

    spark: Any
    url: str
    kafka: str
    events: int
    warm: int
    topics: dict[bool, str] = field(default_factory=dict)

    @property
    def jdbc(self) -> str:
        """Return the database's address as Java's driver takes it, with rows sent together."""
        host = psycopg.conninfo.conninfo_to_dict(self.url)
        address = f"jdbc:postgresql://{host['host']}:{host['port']}/{host['dbname']}"
        return f"{address}?user={host['user']}&reWriteBatchedInserts=true"


def event(number: int) -> tuple[str, Mapping[str, object]]:
    """Return the key and the payload of an order event, about 740 bytes of JSON."""
    order = f"order-{number % KEYS}"
    return order, {
        "order_id": order,
        "seq": number // KEYS,
        "customer": f"customer-{number % 977}",
        "amount_cents": number % 10_000,
        "status": "placed",
        "note": _PAD,
    }


def fill(kafka: str, topic: str, events: int) -> None:
    """Write the events, as a relay would: key, JSON, headers."""
    producer = Producer({"bootstrap.servers": kafka, "linger.ms": 20, "compression.type": "lz4", "acks": "all"})
    for number in range(events):
        key, payload = event(number)
        headers: Any = [("ce_id", str(uuid7()).encode()), ("ce_type", b"OrderPlaced"), ("ce_source", b"/shop")]
        while True:
            try:
                producer.produce(topic, orjson.dumps(payload), key, headers=headers)
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


def _latest(events: int) -> tuple[int, ...]:
    keys = min(events, KEYS)
    return keys, sum((events - 1 - key) // KEYS for key in range(keys))


_ORDER: Final = "seq int, customer text, amount_cents bigint, status text, note text"
LOG: Final = Sink(f"order_id text, {_ORDER}", "SELECT count(*) FROM {table}", lambda events: (events,))
ORDERS: Final = Sink(f"order_id text PRIMARY KEY, {_ORDER}", "SELECT count(*), sum(seq) FROM {table}", _latest)
