"""A relay in this process over 256 lanes, with events that the broker refuses among many others; and what it costs.

What is counted are turns, transactions, producers and joins, and never the clock.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import confluent_kafka
import psycopg
import pytest
from wal_support import to_wal

from outbox import Event, Outbox
from outbox._app import migrate as db
from relay import wiring
from relay.config import load
from relay.kafka import producer
from relay.kafka.transactional import TransactionalPublisher
from relay.loop import WorkerLoop
from relay.wal.lane_hash import lane_of

LANES: Final = 256
LIMIT: Final = 20_000
"""The most bytes of a message in the topic of ``strict`` events."""
ATTEMPTS: Final = 3


class Costs(Counter[str]):
    """How often what was done, over all publishers of the process: begun, aborted, committed, producers, joined, …"""

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Count from now on, until the test ends."""
        costs = self

        class Counted(confluent_kafka.Producer):
            def __init__(self, options: Mapping[str, Any], **more: Any) -> None:
                costs["producers"] += 1
                super().__init__(options, **more)

            def init_transactions(self, *args: Any) -> None:
                costs["initialized"] += 1
                super().init_transactions(*args)

            def begin_transaction(self) -> None:
                costs["begun"] += 1
                super().begin_transaction()

            def commit_transaction(self, *args: Any) -> None:
                super().commit_transaction(*args)
                costs["committed"] += 1

            def abort_transaction(self, *args: Any) -> None:
                costs["aborted"] += 1
                super().abort_transaction(*args)

        def counting(kind: type, name: str, about: Callable[..., None]) -> None:
            real = getattr(kind, name)

            def call(self: Any, *args: Any, **more: Any) -> Any:
                about(*args)
                return real(self, *args, **more)

            monkeypatch.setattr(kind, name, call)

        def joining(leases: Any) -> None:
            costs["joins"] += 1
            costs["lanes joined"] += len(leases)

        monkeypatch.setattr(producer, "Producer", Counted)
        counting(TransactionalPublisher, "join", joining)
        counting(TransactionalPublisher, "publish", lambda *_: self.update(["turns"]))
        counting(WorkerLoop, "_close_publisher", lambda *_: self.update(["closed"]))


class Outboxed:
    """An outbox with 256 lanes, two kinds of events, and a topic of each: ``strict`` takes no large ones."""

    def __init__(self, url: str, kafka: Any) -> None:
        self.url = url
        self.kafka = kafka
        self.fine, self.strict = kafka.name("Fine"), kafka.name("Strict")
        self.fine_topic = kafka.create_topic(f"{self.fine.lower()}-events", 3)
        self.strict_topic = kafka.create_topic(f"{self.strict.lower()}-events", 3, {"max.message.bytes": str(LIMIT)})
        db.change_lanes(url, LANES)

    def settings(self, delivery: str, *, source: str = "polling", on_failure: str = "skip", **more: Any) -> Any:
        name = self.kafka.name("outbox")
        slot = name.lower().replace("-", "_").replace(".", "_")
        if source == "wal":
            to_wal(self.url, {"wal__slot": slot, "name": name})
        return load(
            **{
                "database_url": self.url,
                "name": name,
                "delivery": delivery,
                "source": source,
                "wal": {"slot": slot},
                "kafka": {"bootstrap.servers": self.kafka.bootstrap_servers},
                "failures": {
                    "on_failure": on_failure,
                    "max_attempts": ATTEMPTS,
                    "min_backoff_seconds": 0.2,
                    "max_backoff_seconds": 0.4,
                },
                **more,
            }
        )

    def write(self, count: int, *, of: str | None = None, first: int = 0, size: int = 100) -> None:
        """Write so many events, each of a key of its own, in transactions of 500."""
        with psycopg.connect(self.url) as connection:
            for begin in range(first, first + count, 500):
                rows = range(begin, min(begin + 500, first + count))
                Outbox().add_many(connection, [Event(of or self.fine, f"k{n:05}", "T", os.urandom(size)) for n in rows])
                connection.commit()

    def poison(self, keys: list[str]) -> None:
        """Write three events of each key in one transaction: the second one is refused."""
        with psycopg.connect(self.url) as connection:
            for size in (100, LIMIT + 10_000, 100):
                Outbox().add_many(connection, [Event(self.strict, key, "T", os.urandom(size)) for key in keys])

    def lane(self, key: str) -> int:
        return lane_of(self.strict, key, LANES)

    def run(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.url, autocommit=True) as connection:
            return connection.execute(query, values).fetchall()

    def waits(self) -> int:
        """Return how many events are still in the outbox."""
        return int(self.run("SELECT count(*) FROM outbox.events")[0][0])

    def dead(self) -> list[str]:
        """Return the keys of the dead letters, in the order in which they died."""
        return [key for (key,) in self.run("SELECT aggregate_id FROM outbox.dead_letters ORDER BY id")]

    def published(self, topic: str) -> list[str]:
        """Return the keys of the events that stand on a topic, as a reader of committed ones sees them."""
        return [message.key().decode() for message in self.kafka.consume(topic)]


@contextlib.contextmanager
def relaying(settings: Any) -> Iterator[None]:
    """Run a relay in threads of this process."""
    stop, abandon = threading.Event(), threading.Event()
    relay = wiring.build(settings)
    errors: list[BaseException] = []

    def run() -> None:
        try:
            relay.run(stop, abandon)
        except BaseException as error:  # noqa: BLE001 - raised below, in the test
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    if errors:
        raise errors[0]
