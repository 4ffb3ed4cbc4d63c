"""A small harness around a consumer job: a topic, a sink, and the job that reads the one into the other."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import psutil
import psycopg
from confluent_kafka import KafkaException, Producer
from confluent_kafka.admin import AdminClient, NewPartitions
from psycopg import sql
from support import look_up, wait_until
from typer.testing import CliRunner
from uuid_utils.compat import uuid7

from outbox.consumer.delays import TopicDelays
from relay.cli.app import app
from spark_jobs import order_totals
from spark_jobs.driver.options import Options, Totals
from spark_jobs.driver.runner import Runner
from spark_jobs.job import ConsumerJob

ROOT: Final = Path(__file__).parents[2]
PLAIN_SPARK: Final = "-Dspark.sql.codegen.wholeStage=false -Dspark.sql.codegen.factoryMode=NO_CODEGEN"
"""Options of Java for tests that need no Spark as users have it: to make Java of a plan, of which each test has its
own, takes a fifth of a JVM's time. They are in no folder of settings, which would be the first of the class path: that
is then another than the archive of classes has, and the JVM would load them all anew."""


def expected(names: Iterable[str], seqs: int) -> dict[str, tuple[Any, ...]]:
    """Return ``Bench.totals`` of these orders when each has so many events, all of them applied once and in order."""
    return dict.fromkeys(names, (10 * seqs, seqs, seqs, 0, f"s{seqs}"))


def order(name: str, seq: int, **changes: Any) -> dict[str, Any]:
    """Return the payload of an order's event."""
    return {"order_id": name, "seq": seq, "customer": "c", "amount_cents": 10, "status": f"s{seq}"} | changes


class Sent(NamedTuple):
    """A message. What is not bytes is sent as JSON.

    part     None: that of the key.
    headers  None: an id of its own.
    at       its time in milliseconds; 0: now.
    """

    value: Any
    key: str | None = None
    part: int | None = None
    headers: list[tuple[str, bytes]] | None = None
    at: int = 0


def ided(event_id: Any = None) -> list[tuple[str, bytes]]:
    """Return the header of an event's id; None: a new one."""
    return [("ce_id", str(uuid7() if event_id is None else event_id).encode())]


@lru_cache(maxsize=1)
def shared_producer(servers: str) -> Producer:
    """Return a producer that is kept: librdkafka waits for half a second before it gives a new one its id."""
    # Without idempotence, a request that is sent again would be behind those that were sent after it.
    # It outlives the session's broker, and would log that it is gone.
    return Producer({"bootstrap.servers": servers, "enable.idempotence": True, "linger.ms": 5, "log_level": 0})


def produce(servers: str, topic: str, messages: Iterable[Sequence[Any]]) -> None:
    """Send messages, each as the fields of ``Sent``, in this order; wait for all of them."""
    producer = shared_producer(servers)
    for value, key, part, headers, at in (Sent(*one) for one in messages):
        data = value if isinstance(value, bytes | None) else json.dumps(value).encode()
        where = {} if part is None else {"partition": part}
        producer.produce(topic, data, key, headers=ided() if headers is None else headers, timestamp=at, **where)
        producer.poll(0)
    assert producer.flush(60) == 0


class Bench:
    """A topic, a sink, and a job that reads the one into the other."""

    def __init__(self, spark: Any, database: Any, topics: Any, partitions: int = 2) -> None:
        self.spark = spark
        self.database = database
        self.topics = topics
        self.topic = topics.create_topic(topics.name("orders"), partitions)
        self.job = order_totals.job.with_topics([self.topic])
        self.reports: list[tuple[str, dict[str, Any]]] = []

    def send(
        self,
        name: str,
        seq: int,
        *,
        key: str | None = None,
        event_id: Any = None,
        producer: Producer | None = None,
        part: int | None = None,
        **changes: Any,
    ) -> uuid.UUID:
        """Send one order event, with a producer that may be in a transaction; wait for it."""
        event_id = event_id or uuid7()
        where = {} if part is None else {"partition": part}
        value = json.dumps(order(name, seq, **changes)).encode()
        self.send_raw(value, ided(event_id), key or name, producer=producer, **where)
        return event_id

    def send_raw(
        self,
        value: bytes | None,
        headers: list[tuple[str, bytes]],
        key: str = "k",
        *,
        producer: Producer | None = None,
        **where: Any,
    ) -> None:
        producer = producer or shared_producer(self.topics.bootstrap_servers)
        producer.produce(self.topic, value, key, headers=headers, **where)
        assert producer.flush(30) == 0

    def produce(self, messages: Iterable[Sequence[Any]], topic: str | None = None) -> None:
        """Send messages, each as the fields of ``Sent``, in this order; wait for all of them."""
        produce(self.topics.bootstrap_servers, topic or self.topic, messages)

    def orders(self, names: Iterable[str], seqs: Iterable[int], part: int | None = None) -> None:
        """Send events of these orders, each number of one after the other; wait for all of them."""
        self.produce((order(name, seq), name, part) for seq in seqs for name in names)

    def in_transaction(self, name: str = "") -> Producer:
        """Return a producer of this topic that has begun a transaction."""
        producer = Producer(
            {"bootstrap.servers": self.topics.bootstrap_servers, "transactional.id": f"{self.topic}{name}"}
        )
        producer.init_transactions(30)
        producer.begin_transaction()
        return producer

    def add_partitions(self, count: int) -> None:
        """Let the topic have so many, and wait until the broker names them."""
        admin = AdminClient({"bootstrap.servers": self.topics.bootstrap_servers})
        admin.create_partitions([NewPartitions(self.topic, count)])[self.topic].result(30)
        wait_until(lambda: len(admin.list_topics(self.topic).topics[self.topic].partitions) == count, what="partitions")

    def send_to_added(self, name: str, seq: int, part: int, **changes: Any) -> None:
        """Send one order event to a partition that was added: the shared producer may hear of it minutes later."""

        def sent() -> bool:
            producer = Producer({"bootstrap.servers": self.topics.bootstrap_servers})
            try:
                self.send(name, seq, part=part, producer=producer, **changes)
            except KafkaException:
                return False
            return True

        wait_until(sent, what="the new partition to take messages")

    def runner(
        self,
        job: ConsumerJob | None = None,
        then: Callable[[str], object] = lambda _: None,
        delays: TopicDelays | None = None,
        **options: Any,
    ) -> Runner:
        """Return a runner of the job. ``then`` is called with each text that it reports."""

        def heard(text: str, figures: Any) -> None:
            self.reports.append((text, dict(figures)))
            then(text)

        kafka = {"bootstrap.servers": self.topics.bootstrap_servers, **options.pop("kafka", {})}
        given = Options(self.database.url, kafka, **{"patience": 30.0, **options})
        return Runner(self.spark, job or self.job, given, heard, delays=delays)

    def once(self, job: ConsumerJob | None = None, **options: Any) -> Totals:
        with self.runner(job, **options) as runner:
            return runner.once(threading.Event())

    def once_waits(self, job: ConsumerJob, error: str) -> None:
        """Run a job until it waits for a server because of this error, and stop it there.

        On a busy machine, Kafka may be late as well: then the job waits because of that, and goes on.
        """
        stop = threading.Event()

        def heard(text: str) -> None:
            if text == "waiting for a server" and re.search(error, str(self.reports[-1][1]["error"])):
                stop.set()

        with self.runner(job, then=heard, patience=120.0) as runner:
            runner.once(stop)
        assert stop.is_set(), f"the job ended without this error: {error}"

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
        topic: str | None = None,
        **variables: str,
    ) -> subprocess.Popen[bytes]:
        """Start ``outbox consume`` with the topic, in a folder that its job may be in, with consume.log there."""
        environment = os.environ | self.environment | {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
        with (folder / "consume.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "relay.cli", "consume", job, "--topic", topic or self.topic, *arguments],
                env=environment | variables,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        return look_up(self.database.url, query)

    def run(self, statements: str | sql.Composed) -> None:
        """Change the sink's database by hand."""
        with psycopg.connect(self.database.url) as connection:
            connection.execute(statements)

    def limit(self, name: str, value: str) -> None:
        """Set a limit of the sink's database, for sessions that are opened from now on."""
        [(database,)] = self.rows("SELECT current_database()")
        self.run(sql.SQL("ALTER DATABASE {} SET {} = {}").format(*map(sql.Identifier, (database, name)), value))

    def totals(self) -> dict[str, tuple[Any, ...]]:
        """order: (total_cents, events_applied, last_seq, out_of_order, status)"""
        query = "SELECT order_id, total_cents, events_applied, last_seq, out_of_order, status FROM order_totals"
        return {row[0]: row[1:] for row in self.rows(query)}

    def waits_for_a_lock(self, name: str) -> bool:
        """Return whether a session of this name waits for a lock."""
        waiting = "SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock' "
        return bool(self.rows(f"{waiting} AND application_name = '{name}'"))

    def has_no_session(self) -> bool:
        """Return whether no session of a consumer is left, so that nothing more can be applied."""
        sessions = "SELECT FROM pg_stat_activity WHERE datname = current_database()"
        return not self.rows(f"{sessions} AND application_name LIKE 'outbox %'")

    def positions(self) -> dict[int, int]:
        return dict(self.rows("SELECT part, next_offset FROM consumer.offsets"))


# A thread of Spark's that gets the values of accumulators may print what ended it, before the driver has noticed that
# the JVM is gone; to its last line, or to the end of the process.
_OF_SPARK = re.compile(
    r"-{40}\nException occurred during processing of request .*?\n(?=outbox: |-{40}\n|\Z)"
    # py4j's, by the root logger: a command was under way when the JVM ended.
    r"|ERROR:root:Exception while sending command\.\nTraceback .*?Py4JNetworkError: [^\n]*\n",
    re.DOTALL,
)


class Consumer:
    """``outbox consume`` as a process, which may be started again; ``given`` is for ``Bench.consume``."""

    def __init__(self, bench: Bench, folder: Path, *arguments: str, **given: Any) -> None:
        self._bench, self._folder, self._arguments, self._given = bench, folder, arguments, given
        self._log = folder / "consume.log"
        self._before = 0
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *arguments: str, **given: Any) -> None:
        self._before = self._log.stat().st_size if self._log.exists() else 0
        self.process = self._bench.consume(self._folder, *self._arguments, *arguments, **self._given, **given)

    def log(self) -> str:
        """Return what it has written since its last start."""
        return self._log.read_bytes()[self._before :].decode(errors="replace")

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def jvm(self) -> psutil.Process:
        assert self.process is not None
        [found] = [child for child in psutil.Process(self.process.pid).children() if "java" in child.name()]
        return found

    def until(self, condition: Callable[[], object], what: str, seconds: float = 120.0) -> None:
        """Wait for a condition, as long as it runs."""
        process = self.process
        assert process is not None
        wait_until(lambda: process.poll() is not None or condition(), seconds, what)
        assert process.poll() is None, f"{what}: it ended with {process.poll()}\n{self.log()[-3000:]}"

    def ended(self, status: int, *said: str) -> None:
        """Wait for its end, and compare its exit status and what it has said."""
        assert self.process is not None
        assert self.process.wait(240) == status, self.log()[-3000:]
        log = self.log()
        assert "Traceback" not in _OF_SPARK.sub("", log)
        # A thread of Spark's may write between the parts of a line.
        for text in said:
            assert text in log

    def kill(self) -> None:
        """End it by SIGKILL, if it runs."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()


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
