"""What each of Kafka's guarantees costs a bare producer: the part of a delivery's price that no outbox can change."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from confluent_kafka import Message, Producer

from benchmarks.harness.load import SMALL, pad
from benchmarks.harness.measure import percentile
from benchmarks.harness.results import P50, P99, RATE, Results, Run, Target, beside
from benchmarks.harness.scenarios.base import Scenario
from benchmarks.harness.servers import BenchError, Servers, Site

_SECONDS = 60.0
_IN_A_TRANSACTION = 1_000


@dataclass(frozen=True)
class Guarantee:
    """A producer's options. ``transactional``: every event or every thousand is in a transaction."""

    name: str
    options: Mapping[str, object] = field(default_factory=dict)
    transactional: bool = False


LEADER = Guarantee("producer, acks=1", {"acks": 1, "enable.idempotence": False})
PLAIN = Guarantee("producer, acks=all", {"acks": "all", "enable.idempotence": False})
IDEMPOTENT = Guarantee("producer, idempotent", {"enable.idempotence": True})
TRANSACTIONAL = Guarantee("producer, transactional", {"enable.idempotence": True}, transactional=True)


class Guarantees(Scenario):
    """Plain, idempotent and transactional."""

    name = "guarantees"
    title = "What a guarantee costs a bare producer"
    about = (
        "One producer, events of 740 bytes. p50 and p99: one event after the other, from produce() to its "
        "acknowledgement, or to the return of commit_transaction(). Rate: as fast as possible, in transactions of "
        "1,000 events. On one broker acks=all waits for no other replica; on three it costs a round trip between them."
    )
    metrics = (P50, P99, RATE)

    @property
    def ways(self) -> Sequence[Guarantee]:
        return (LEADER, PLAIN, IDEMPOTENT, TRANSACTIONAL)

    def run(self, servers: Servers, way: Guarantee, run: Run) -> None:
        with servers.site(self.name) as site:
            sender = _Sender(site, way)
            sender.send(self.sizes.warm_ours)
            took = sender.one_after_the_other(self.sizes.steady_seconds)
            run.figures["p50"], run.figures["p99"] = percentile(took, 0.5) * 1000, percentile(took, 0.99) * 1000
            started = time.perf_counter()
            sender.send(self.sizes.drain)
            run.figures["rate"] = self.sizes.drain / (time.perf_counter() - started)

    def targets(self, results: Results) -> list[Target]:
        found = []
        for way in (IDEMPOTENT, TRANSACTIONAL):
            for metric in ("p50", "rate"):
                what = f"{way.name}: {metric} as part of acks=all"
                found.append(beside(what, results.ratio(way.name, PLAIN.name, metric)))
        return found


class _Sender:
    """A producer of one kind, and how many of its events were delivered."""

    def __init__(self, site: Site, way: Guarantee) -> None:
        options: dict[str, object] = {"bootstrap.servers": site.kafka, "linger.ms": 0, **way.options}
        if way.transactional:
            options["transactional.id"] = site.topic
        self._producer = Producer(options)
        self._transactional = way.transactional
        if way.transactional:
            self._producer.init_transactions(_SECONDS)
        self._topic = site.topic
        self._value = pad(SMALL).encode()
        self._delivered = 0
        self._number = 0

    def send(self, count: int) -> None:
        """Send so many events as fast as possible, until all are acknowledged or committed."""
        wanted = self._delivered + count
        for first in range(0, count, _IN_A_TRANSACTION):
            self._begin()
            for _ in range(min(_IN_A_TRANSACTION, count - first)):
                self._produce()
            self._commit()
        if self._producer.flush(_SECONDS) or self._delivered != wanted:
            raise BenchError(f"{self._delivered} of {wanted} events are acknowledged")

    def one_after_the_other(self, seconds: float) -> list[float]:
        """Return the seconds that each event took, sorted."""
        took: list[float] = []
        end = time.perf_counter() + seconds
        while (began := time.perf_counter()) < end:
            before = self._delivered
            self._begin()
            self._produce()
            if self._transactional:
                self._commit()
            while self._delivered == before:
                self._producer.poll(1.0)
            took.append(time.perf_counter() - began)
        return sorted(took)

    def _begin(self) -> None:
        if self._transactional:
            self._producer.begin_transaction()

    def _commit(self) -> None:
        if self._transactional:
            self._producer.commit_transaction(_SECONDS)

    def _produce(self) -> None:
        self._number += 1
        while True:
            try:
                self._producer.produce(
                    self._topic, self._value, f"order-{self._number % 5000}".encode(), on_delivery=self._heard
                )
            except BufferError:
                self._producer.poll(0.1)
            else:
                self._producer.poll(0)
                return

    def _heard(self, error: object, _message: Message) -> None:
        if error is not None:
            raise BenchError(f"an event was refused: {error}")
        self._delivered += 1
