"""A small harness around a consumer job: a topic, a sink, and the job that reads the one into the other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import psycopg
from confluent_kafka import Producer
from psycopg import sql
from support import look_up
from typer.testing import CliRunner
from uuid_utils.compat import uuid7

from relay.cli.app import app
from spark_jobs import order_totals
from spark_jobs.driver.options import Options, Totals
from spark_jobs.driver.runner import Runner
from spark_jobs.job import ConsumerJob

ROOT: Final = Path(__file__).parents[2]


def order(name: str, seq: int, **changes: Any) -> dict[str, Any]:
    """Return the payload of an order's event."""
    return {"order_id": name, "seq": seq, "customer": "c", "amount_cents": 10, "status": f"s{seq}"} | changes


class Bench:
    """A topic, a sink, and a job that reads the one into the other."""

    def __init__(self, spark: Any, database: Any, topics: Any, partitions: int = 2) -> None:
        self.spark = spark
        self.database = database
        self.topics = topics
        self.topic = topics.create_topic(topics.name("orders"), partitions)
        self.job = order_totals.job.with_topics([self.topic])
        self.reports: list[tuple[str, dict[str, Any]]] = []

    def send(self, name: str, seq: int, *, key: str | None = None, event_id: Any = None, **changes: Any) -> uuid.UUID:
        """Send one order event; wait for it."""
        event_id = event_id or uuid7()
        self.send_raw(
            json.dumps(order(name, seq, **changes)).encode(), [("ce_id", str(event_id).encode())], key or name
        )
        return event_id

    def send_raw(self, value: bytes | None, headers: list[tuple[str, bytes]], key: str = "k", **where: Any) -> None:
        producer = self.producer()
        producer.produce(self.topic, value, key, headers=headers, **where)
        assert producer.flush(30) == 0

    def produce(self, messages: Iterable[tuple[Any, str | None, int | None]], topic: str | None = None) -> None:
        """Send a value, a key and a partition each, in this order, with ids; wait for all of them.

        None: no key, the partition of the key. What is not bytes is sent as JSON.
        """
        producer = self.producer(**{"linger.ms": 20})
        for value, key, part in messages:
            data = value if isinstance(value, bytes | None) else json.dumps(value).encode()
            where = {} if part is None else {"partition": part}
            headers = [("ce_id", str(uuid7()).encode())]
            producer.produce(topic or self.topic, data, key, headers=headers, **where)
            producer.poll(0)
        assert producer.flush(60) == 0

    def orders(self, names: Iterable[str], seqs: Iterable[int], part: int | None = None) -> None:
        """Send events of these orders, each number of one after the other; wait for all of them."""
        self.produce((order(name, seq), name, part) for seq in seqs for name in names)

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

    @property
    def environment(self) -> dict[str, str]:
        """What ``outbox …`` finds the sink and Kafka by."""
        return {
            "OUTBOX_DATABASE_URL": self.database.url,
            "OUTBOX_KAFKA__BOOTSTRAP_SERVERS": self.topics.bootstrap_servers,
        }

    def command(self, *arguments: str) -> str:
        """Run ``outbox …`` in this process; return what it printed."""
        done = CliRunner().invoke(app, arguments, env=self.environment)
        assert done.exit_code == 0, (done.output, done.exception)
        return done.stdout

    def consume(
        self,
        folder: Path,
        *arguments: str,
        job: str = "spark_jobs.order_totals:job",
        program: Sequence[str] = ("-m", "relay.cli"),
        stdout: Any = None,
        **variables: str,
    ) -> subprocess.Popen[bytes]:
        """Start ``outbox consume`` with the topic, in a folder that its job may be in, with consume.log there."""
        environment = os.environ | self.environment | {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
        with (folder / "consume.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, *program, "consume", job, "--topic", self.topic, *arguments],
                env=environment | variables,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=log if stdout is None else stdout,
                stderr=log,
            )

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
