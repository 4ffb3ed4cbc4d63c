"""The bare loop: read the rows lane by lane, in the order of their ids, and produce them with the relay's headers.

One process, one connection, one producer, no leases, nothing deleted, nothing remembered: what Python, psycopg and
confluent-kafka can do on this machine when nothing else is to be done. The rows come from a server-side cursor, in
binary, 10,000 at a time; with transactions, each of these is one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Any, ClassVar, Final

import psycopg

from benchmarks.harness.load import SPAWN
from benchmarks.harness.publishers import Publisher, Way
from benchmarks.harness.servers import BenchError, Servers, Site

_ROWS: Final = """
SELECT aggregate_type, aggregate_id, event_type, event_id::text, payload::text,
       to_char(created_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"')
  FROM outbox.events WHERE lane = %s AND id > %s ORDER BY id"""
_TOGETHER: Final = 10_000
_STOP_SECONDS: Final = 60.0


@dataclass(frozen=True)
class Bare(Way):
    """The bare loop; ``transactional``: 10,000 events in each Kafka transaction."""

    follows: ClassVar[bool] = False
    transactional: bool = False

    def open(self, servers: Servers, site: Site) -> BareLoop:
        return BareLoop(servers, site, transactional=self.transactional)


BARE: Final = Bare("bare loop, idempotent")
BARE_ONCE: Final = Bare("bare loop, transactional", transactional=True)


class BareLoop(Publisher):
    """A pass over what was written since the last one, in a process of its own, each time it is started."""

    def __init__(self, servers: Servers, site: Site, *, transactional: bool) -> None:
        super().__init__(servers, site)
        self._transactional = transactional
        self._process: BaseProcess | None = None
        self._after = 0

    @property
    def pids(self) -> list[int]:
        assert self._process is not None
        assert self._process.pid is not None
        return [self._process.pid]

    def start(self) -> None:
        last = int(self.site.value("SELECT coalesce(max(id), 0) FROM outbox.events"))
        arguments = (self.site.url, self.site.kafka, self.site.topic, self._after, self._transactional)
        self._process = SPAWN.Process(target=_run, args=arguments, daemon=True)
        self._process.start()
        self._after = last

    def check(self) -> None:
        if self._process is not None and self._process.exitcode:
            raise BenchError(f"the bare loop: exit status {self._process.exitcode}; its error is on standard error")

    def halt(self) -> None:
        if self._process is not None:
            self._process.join(_STOP_SECONDS)
            self.check()
            if self._process.exitcode is None:
                raise BenchError(f"the bare loop goes on after {_STOP_SECONDS:g} s")

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()


def _run(url: str, kafka: str, topic: str, after: int, transactional: bool) -> None:
    from confluent_kafka import Producer

    options: dict[str, Any] = {
        "bootstrap.servers": kafka,
        "enable.idempotence": True,
        "acks": "all",
        "compression.type": "lz4",
        "linger.ms": 1,
        "partitioner": "murmur2_random",
        # Python is called for failures only.
        "delivery.report.only.error": True,
        "queue.buffering.max.messages": 100_000,
        **({"transactional.id": f"bare-{os.getpid()}"} if transactional else {}),
    }

    def failed(error: Any, _message: Any) -> None:
        raise BenchError(f"the bare loop: {error}")

    producer = Producer(options)
    if transactional:
        producer.init_transactions(30)
    with psycopg.connect(url) as connection:
        # As the relay reads: no sort of the whole backlog.
        connection.execute("SET enable_sort = off")
        connection.execute("SET enable_seqscan = off")
        connection.execute("SET enable_bitmapscan = off")
        connection.execute("SET enable_hashjoin = off")
        connection.execute("SET enable_mergejoin = off")
        for batch in _batches(connection, after):
            if transactional:
                producer.begin_transaction()
            for kind, key, event_type, event_id, value, when in batch:
                headers = [
                    ("ce_specversion", "1.0"),
                    ("ce_id", event_id),
                    ("ce_source", "/outbox"),
                    ("ce_type", event_type),
                    ("ce_subject", key),
                    ("ce_time", when),
                    ("id", event_id),
                    ("event-type", event_type),
                    ("aggregate-type", kind),
                    ("idempotency-key", event_id),
                    ("content-type", "application/json"),
                ]
                while True:
                    try:
                        producer.produce(topic, value, key, headers=headers, on_delivery=failed)
                        break
                    except BufferError:
                        producer.poll(0.01)
            producer.poll(0)
            if transactional:
                producer.commit_transaction()
        if producer.flush(120):
            raise BenchError("the bare loop was not acknowledged within 120 s")


def _batches(connection: psycopg.Connection[Any], after: int) -> Iterator[list[Any]]:
    for (lane,) in connection.execute("SELECT lane FROM outbox.lanes ORDER BY lane").fetchall():
        with connection.cursor("bare", binary=True) as rows:
            rows.execute(_ROWS, (lane, after))
            while batch := rows.fetchmany(_TOGETHER):
                yield batch
