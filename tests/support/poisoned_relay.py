"""A relay in this process over many lanes, with events that the broker refuses among many others; and what it costs.

What is counted are turns, transactions, producers and joins, and never the clock.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Final

import confluent_kafka
import psycopg
import pytest
from support import look_up
from threads import in_background
from wal_support import to_wal

from outbox import Event, Outbox
from outbox._app import migrate as db
from relay import wiring
from relay.config import load
from relay.core.loop import WorkerLoop
from relay.core.ports import Batches, BatchRefused, Completed, Confirm, Failed, Sent
from relay.kafka import producer
from relay.kafka.transactional import TransactionalPublisher

LIMIT: Final = 20_000
"""The most bytes of a message in the topic of ``strict`` events."""
ATTEMPTS: Final = 3
KEYS: Final = [f"p{n}" for n in range(6)]
"""The keys with a refused event."""
MANY: Final = 2 * len(KEYS)
"""A turn of more lanes has other events than the refused ones and those before them."""
SIZES: Final = (100, LIMIT + 10_000, 101)
"""The sizes of a poisoned key's events."""


class Costs(Counter[str]):
    """How often what was done, over all publishers of the process: begun, aborted, committed, joined, …"""

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Count from now on, until the test ends."""
        monkeypatch.setattr(producer, "Producer", partial(_Counted, self))
        join, publish, close = TransactionalPublisher.join, TransactionalPublisher.publish, WorkerLoop._close_publisher

        def joining(publisher: Any, leases: Any) -> Any:
            self.update({"joins": 1, "lanes joined": len(leases)})
            return join(publisher, leases)

        def publishing(publisher: Any, batches: Batches, confirm: Confirm | None = None) -> Sent:
            sent = publish(publisher, batches, confirm)
            self._note(batches, sent)
            return sent

        def closing(loop: Any) -> None:
            self["closed"] += 1
            close(loop)

        monkeypatch.setattr(TransactionalPublisher, "join", joining)
        monkeypatch.setattr(TransactionalPublisher, "publish", publishing)
        monkeypatch.setattr(WorkerLoop, "_close_publisher", closing)

    def _note(self, batches: Batches, sent: Sent) -> None:
        self["turns"] += 1
        if isinstance(sent, Failed) and isinstance(sent.error, BatchRefused):
            self["refused"] += 1
            # Of a few lanes: those with events that were refused before, or that are suspected.
            self["refused with others"] += len(batches) > MANY
            self["refused and unusable"] += sent.publisher_unusable
        elif not isinstance(sent, Completed) or sent.publisher_unusable:
            # A commit that was slow, for example.
            self["unusable"] += 1


class _Counted(confluent_kafka.Producer):
    def __init__(self, costs: Costs, options: Mapping[str, Any], **more: Any) -> None:
        self._costs = costs
        costs["producers"] += 1
        super().__init__(options, **more)

    def init_transactions(self, *args: Any) -> None:
        self._costs["initialized"] += 1
        super().init_transactions(*args)

    def commit_transaction(self, *args: Any) -> None:
        super().commit_transaction(*args)
        self._costs["committed"] += 1

    def abort_transaction(self, *args: Any) -> None:
        self._costs["aborted"] += 1
        super().abort_transaction(*args)


class Outboxed:
    """An outbox with some lanes, two kinds of events, and a topic of each: ``strict`` takes no large ones."""

    def __init__(self, url: str, kafka: Any, lanes: int) -> None:
        self.url = url
        self.kafka = kafka
        self.fine, self.strict = kafka.name("Fine"), kafka.name("Strict")
        self.fine_topic = kafka.create_topic(f"{self.fine.lower()}-events", 3)
        self.strict_topic = kafka.create_topic(f"{self.strict.lower()}-events", 3, {"max.message.bytes": str(LIMIT)})
        db.change_lanes(url, lanes)

    def settings(self, source: str, **more: Any) -> Any:
        name = self.kafka.name("outbox")
        slot = name.lower().replace("-", "_").replace(".", "_")
        if source == "wal":
            to_wal(self.url, {"wal__slot": slot, "name": name})
        return load(
            **{
                "database_url": self.url,
                "name": name,
                "delivery": "exactly-once",
                "source": source,
                "wal": {"slot": slot},
                "failures": {
                    "on_failure": "skip",
                    "max_attempts": ATTEMPTS,
                    "min_backoff_seconds": 0.2,
                    "max_backoff_seconds": 0.4,
                },
                **more,
            }
        )

    def write(self, count: int, *, first: int = 0) -> None:
        """Write so many events, each of a key of its own, in transactions of 500."""
        with psycopg.connect(self.url) as connection:
            for begin in range(first, first + count, 500):
                rows = range(begin, min(begin + 500, first + count))
                Outbox().add_many(connection, [Event(self.fine, f"k{n:05}", "T", os.urandom(100)) for n in rows])
                connection.commit()

    def poison(self) -> None:
        """Write three events of each key in one transaction: the second one is refused."""
        with psycopg.connect(self.url) as connection:
            for size in SIZES:
                Outbox().add_many(connection, [Event(self.strict, key, "T", os.urandom(size)) for key in KEYS])

    def write_all(self) -> None:
        """Write 1,000 events with the poisoned ones in the middle."""
        self.write(500, first=1000)
        self.poison()
        self.write(500, first=1500)

    def run(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        return look_up(self.url, query, *values)

    def waits(self) -> int:
        """Return how many events are still in the outbox."""
        return int(self.run("SELECT count(*) FROM outbox.events")[0][0])

    def dead(self) -> list[str]:
        """Return the keys of the dead letters, in the order in which they died."""
        return [key for (key,) in self.run("SELECT aggregate_id FROM outbox.dead_letters ORDER BY id")]

    def others(self) -> Counter[str]:
        """Return how often the event of each other key stands on its topic, as a reader of committed ones sees it."""
        return Counter(message.key().decode() for message in self.kafka.consume(self.fine_topic))

    def sizes(self) -> dict[str, tuple[int, ...]]:
        """Return the sizes of the events of each poisoned key, in the order in which they stand on their topic."""
        sizes: dict[str, tuple[int, ...]] = {}
        for message in self.kafka.consume(self.strict_topic):
            key = message.key().decode()
            sizes[key] = (*sizes.get(key, ()), len(message.value()))
        return sizes


@contextlib.contextmanager
def relaying(settings: Any) -> Iterator[None]:
    """Run a relay in threads of this process."""
    with in_background(lambda stop: wiring.build(settings).run(stop, threading.Event())):
        yield
