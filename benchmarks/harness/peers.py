"""Debezium's outbox EventRouter on Kafka Connect as a publisher, from the jars and the settings of tests/peers."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from benchmarks.harness.publishers import Publisher, Way
from benchmarks.harness.servers import ROOT, BenchError, Servers, Site, wait_until
from outbox.sandbox.errors import ServiceError

sys.path += [str(ROOT / "tests"), str(ROOT / "tests" / "support")]

from peers.connect import Worker
from peers.page import blocks

_READY_SECONDS: Final = 60.0
_STOP_SECONDS: Final = 60.0


@dataclass(frozen=True)
class Peer(Way):
    """Debezium's connector with its outbox EventRouter: settings of docs/operations/debezium.md, and these over them.

    heap          of the Connect worker; connectors with the same one share a worker.
    distributed   whether that worker is a distributed one, which exactly-once needs.
    """

    settings: tuple[tuple[str, str], ...] = ()
    heap: str = "512m"
    distributed: bool = False

    def open(self, servers: Servers, site: Site) -> Debezium:
        worker = _worker(servers, self.heap, distributed=self.distributed)
        return Debezium(servers, site, worker, dict(self.settings))


_LATENCY: Final = {
    "poll.interval.ms": "5",
    "max.batch.size": "8192",
    "max.queue.size": "32768",
    "producer.override.compression.type": "lz4",
    "producer.override.linger.ms": "0",
}
_BULK: Final = {
    "max.batch.size": "20480",
    "max.queue.size": "131072",
    "producer.override.compression.type": "lz4",
    "producer.override.linger.ms": "50",
    "producer.override.batch.size": "1048576",
}
_EXACTLY_ONCE: Final = {"exactly.once.support": "required", "transaction.boundary": "poll"}

DEBEZIUM: Final = Peer("Debezium, default")
DEBEZIUM_LATENCY: Final = Peer("Debezium, tuned for latency", tuple(_LATENCY.items()))
DEBEZIUM_BULK: Final = Peer("Debezium, tuned for bulk", tuple(_BULK.items()), heap="2g")
DEBEZIUM_ONCE: Final = Peer(
    "Debezium, tuned for latency, exactly-once", tuple({**_LATENCY, **_EXACTLY_ONCE}.items()), distributed=True
)


def _worker(servers: Servers, heap: str, *, distributed: bool) -> Worker:
    """Return the Connect worker of this kind, started when it is first needed: its compiler is warm from then on."""
    kept = servers.kept.get(("connect", heap, distributed))
    if isinstance(kept, Worker) and kept.running:
        return kept
    folder = servers.folder / f"connect-{heap}{'-distributed' if distributed else ''}-{time.time_ns()}"
    folder.mkdir()
    worker = Worker(
        folder,
        servers.kafka.bootstrap_servers,
        heap=heap,
        group=f"connect-{time.time_ns()}" if distributed else None,
        # As Connect's own default is: the tests set another.
        properties={"offset.flush.interval.ms": "60000"},
    )
    servers.keep(("connect", heap, distributed), worker)
    return worker


class Debezium(Publisher):
    """One connector on a site's database."""

    def __init__(self, servers: Servers, site: Site, worker: Worker, settings: Mapping[str, str]) -> None:
        super().__init__(servers, site)
        self._worker = worker
        self._name = f"debezium_{site.token}"
        self._page = blocks(self._name)
        self._created = False
        address = urlsplit(site.url)
        self._config: dict[str, Any] = {
            **self._page.json[0],
            "database.hostname": address.hostname,
            "database.port": str(address.port),
            "database.dbname": site.database,
            **settings,
        }
        with site.connect() as connection:
            for statement in self._page.statements("CREATE ROLE"):
                connection.execute(statement.encode())

    @property
    def pids(self) -> list[int]:
        return [self._worker.pid]

    def start(self) -> None:
        if self._created:
            self._worker.resume_connector(self._name)
        else:
            self._worker.create(self._name, self._config)
            self._created = True
        with self.site.connect() as connection:
            query = "SELECT active FROM pg_replication_slots WHERE slot_name = %s"

            def streams() -> bool:
                self.check()
                return connection.execute(query, (self._name,)).fetchone() == (True,)

            wait_until(streams, "Debezium to stream", _READY_SECONDS, every=0.1)

    def halt(self) -> None:
        self._worker.stop_connector(self._name)
        with self.site.connect() as connection:
            query = "SELECT NOT active FROM pg_replication_slots WHERE slot_name = %s"
            wait_until(
                lambda: connection.execute(query, (self._name,)).fetchone() == (True,), "a free slot", _STOP_SECONDS
            )

    def end(self) -> None:
        self._worker.delete(self._name)

    def kill(self) -> None:
        # What else is wrong with the worker is unknown: the next run has a new one.
        self._worker.kill()

    def explain(self) -> str:
        shutil.copy(self._worker.log, self.site.folder / "connect.log")
        return self._worker.log.read_text(errors="replace")[-3000:]

    def check(self) -> None:
        if not self._worker.running:
            raise BenchError("Kafka Connect ended by itself")
        try:
            self._worker.state(self._name)
        except ServiceError as error:
            # A connector that was created a moment ago has no status yet.
            if "404" not in str(error):
                raise BenchError(str(error)) from error
