"""A small harness around a consumer job: a topic, a sink, and the job that reads the one into the other."""

from __future__ import annotations

import json
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
from confluent_kafka import Producer
from psycopg import sql
from support import look_up
from uuid_utils.compat import uuid7

from outbox._app import migrate as db
from spark_jobs import order_totals
from spark_jobs.driver.options import Options, Totals
from spark_jobs.driver.runner import Runner
from spark_jobs.job import ConsumerJob


class Bench:
    """A topic, a sink, and a job that reads the one into the other."""

    def __init__(self, spark: Any, database: Any, topics: Any, partitions: int = 2) -> None:
        self.spark = spark
        self.database = database
        self.topics = topics
        db.upgrade_consumer(database.url)
        self.topic = topics.create_topic(topics.name("orders"), partitions)
        self.job = order_totals.job.with_topics([self.topic])
        self.reports: list[tuple[str, dict[str, Any]]] = []

    def send(self, order: str, seq: int, *, key: str | None = None, event_id: Any = None, **changes: Any) -> uuid.UUID:
        """Send one order event; wait for it."""
        event_id = event_id or uuid7()
        payload = {"order_id": order, "seq": seq, "customer": "c", "amount_cents": 10, "status": f"s{seq}"} | changes
        self.send_raw(json.dumps(payload).encode(), [("ce_id", str(event_id).encode())], key or order)
        return event_id

    def send_raw(self, value: bytes | None, headers: list[tuple[str, bytes]], key: str = "k", **where: Any) -> None:
        producer = self.producer()
        producer.produce(self.topic, value, key, headers=headers, **where)
        assert producer.flush(30) == 0

    def producer(self, **options: Any) -> Producer:
        # Without idempotence, a request that is sent again would be behind those that were sent after it.
        given = {"bootstrap.servers": self.topics.bootstrap_servers, "enable.idempotence": True, "linger.ms": 0}
        return Producer({**given, **options})

    def runner(self, job: ConsumerJob | None = None, **options: Any) -> Runner:
        options = {"patience": 30.0, **options}
        kafka = {"bootstrap.servers": self.topics.bootstrap_servers}
        return Runner(
            self.spark,
            job or self.job,
            Options(self.database.url, kafka, **options),
            lambda text, figures: self.reports.append((text, dict(figures))),
        )

    def once(self, job: ConsumerJob | None = None, **options: Any) -> Totals:
        with self.runner(job, **options) as runner:
            return runner.once(threading.Event())

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        return look_up(self.database.url, query)

    def run(self, statements: str | sql.Composed) -> None:
        """Change the sink's database by hand."""
        with psycopg.connect(self.database.url) as connection:
            connection.execute(statements)

    def totals(self) -> dict[str, tuple[Any, ...]]:
        """order: (total_cents, events_applied, last_seq, out_of_order, status)"""
        query = "SELECT order_id, total_cents, events_applied, last_seq, out_of_order, status FROM order_totals"
        return {row[0]: row[1:] for row in self.rows(query)}

    def positions(self) -> dict[int, int]:
        return dict(self.rows("SELECT part, next_offset FROM consumer.offsets"))


class Driver:
    """A runner in a thread: one driver beside another, in one Spark."""

    def __init__(self, runner: Runner, *, once: bool = False) -> None:
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(1)
        self._result = self._pool.submit(runner.once if once else runner.continuous, self._stop)

    @property
    def ended(self) -> bool:
        return self._result.done()

    def result(self, seconds: float = 240.0) -> Totals:
        """Wait for its end; raises what it raised."""
        return self._result.result(seconds)

    def stop(self) -> Totals:
        self._stop.set()
        return self.result()

    def close(self) -> None:
        self._stop.set()
        self._pool.shutdown(wait=True)
