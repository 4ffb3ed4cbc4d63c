"""What the tests of the inbox share: messages with ids, consumers in threads and processes, and what they applied."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import os
import signal
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import UUID

import psutil
import psycopg
from confluent_kafka import Producer
from inbox_member import apply, with_fast
from nursery import NURSERY
from psycopg.rows import dict_row
from support import look_up, wait_until
from typer.testing import CliRunner
from uuid_utils.compat import uuid7

from outbox.consumer.admin.dead_letters import DeadLetters, Selection
from outbox.consumer.stalled import StalledPartition
from outbox.inbox import Consumer
from outbox.sandbox._process import patience
from relay.cli.app import app

SCRIPT = Path(__file__).with_name("inbox_member.py")
SCHEMA = """
CREATE TABLE effects (id bigint GENERATED ALWAYS AS IDENTITY, topic text, part integer, at bigint, key text, n integer,
                      member text)"""


class Log:
    """A topic with numbered messages of each key, and the table of their effects."""

    def __init__(self, database: Any, kafka: Any, partitions: int = 1) -> None:
        self.database, self.servers = database, kafka.bootstrap_servers
        self.topic = kafka.create_topic(kafka.name("orders"), partitions)
        self.group = kafka.name("inbox")
        self.written: dict[str | None, list[int]] = defaultdict(list)
        with psycopg.connect(database.url) as connection:
            connection.execute(SCHEMA)

    def produce(
        self,
        keys: Sequence[str | None],
        *,
        ids: Sequence[UUID | None] | None = None,
        partition: int | None = None,
        transactional: bool = False,
        written_at: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> list[UUID | None]:
        """Write a message for each of the keys, numbered in each key. Returns their ids.

        written_at  by the database's clock, in seconds since 1970.
        """
        ids = list(ids) if ids is not None else [uuid7() for _ in keys]
        options: dict[str, Any] = {"bootstrap.servers": self.servers, "linger.ms": 5}
        producer = Producer(options | ({"transactional.id": f"{self.topic}-writer"} if transactional else {}))
        if transactional:
            producer.init_transactions(30)
            producer.begin_transaction()
        for key, id_ in zip(keys, ids, strict=True):
            numbers = self.written[key]
            numbers.append(len(numbers))
            given = {**(headers or {}), **({} if id_ is None else {"ce_id": str(id_)})}
            if written_at is not None:
                given["ce_time"] = dt.datetime.fromtimestamp(written_at, dt.UTC).isoformat()
            where = {} if partition is None else {"partition": partition}
            producer.produce(self.topic, json.dumps({"n": numbers[-1]}), key, headers=given, **where)
            producer.poll(0)
        if transactional:
            producer.commit_transaction(30)
        assert producer.flush(60) == 0
        return ids

    def run(self, query: str, *values: Any) -> list[Any]:
        return look_up(self.database.url, query, *values)

    def count(self) -> int:
        return int(self.run("SELECT count(*) FROM effects")[0][0])

    def applied(self) -> dict[str | None, list[int]]:
        """The numbers that were applied, by key, in the order in which they were."""
        found: dict[str | None, list[int]] = defaultdict(list)
        for key, n in self.run("SELECT key, n FROM effects ORDER BY id"):
            found[key].append(n)
        return found

    def letters(self) -> list[dict[str, Any]]:
        with psycopg.connect(self.database.url, row_factory=dict_row) as connection:
            return connection.execute("SELECT * FROM consumer.dead_letters ORDER BY part, message_offset").fetchall()

    def retry(self, **chosen: Any) -> None:
        """Have dead letters retried, as an operator does: those of the group, or those that are chosen."""
        with self.database.connect(autocommit=True) as connection:
            DeadLetters(connection, "consumer").retry(Selection(**(chosen or {"group": self.group})))

    def command(self, *words: str) -> Any:
        """Run a command of ``outbox``."""
        settings = {"OUTBOX_DATABASE_URL": self.database.url, "OUTBOX_KAFKA__BOOTSTRAP_SERVERS": self.servers}
        return CliRunner().invoke(app, words, env=settings)

    def positions(self) -> dict[int, int]:
        return dict(self.run("SELECT part, next_offset FROM consumer.offsets WHERE grp = %s", self.group))

    def check(self) -> None:
        """Every message was applied once, and each key's in their order."""
        assert self.applied() == self.written

    def consumer(self, **options: Any) -> Consumer:
        given = {"wait": (0.01, 0.1), "kafka": {}, "database": self.database.url, **options}
        kafka = {"bootstrap.servers": self.servers, **with_fast(given.pop("kafka"))}
        return Consumer(given.pop("database"), [self.topic], group=self.group, kafka=kafka, **given)

    @contextlib.contextmanager
    def consuming(self, handler: Callable[..., None] = apply, **options: Any) -> Iterator[Running]:
        """Run a consumer in a thread; it must not fail unless ``error`` of what is yielded is looked at."""
        running = Running(self.consumer(**options), handler)
        try:
            yield running
        finally:
            running.end()

    def process(self, folder: Path, name: str, **options: Any) -> Process:
        given = {"url": self.database.url, "topic": self.topic, "group": self.group, "servers": self.servers}
        return Process(folder / f"{name}.log", {**given, "name": name, **options})


class Running:
    """A consumer that runs in a thread."""

    def __init__(self, consumer: Consumer, handler: Callable[..., None]) -> None:
        self.consumer = consumer
        self._error: BaseException | None = None
        self._looked_at = False
        self._thread = threading.Thread(target=self._run, args=(handler,), daemon=True)
        self._thread.start()

    def _run(self, handler: Callable[..., None]) -> None:
        try:
            self.consumer.run(handler)
        except BaseException as error:  # noqa: BLE001  raised in the test's thread
            self._error = error

    def wait(self, condition: Callable[[], Any], what: str) -> None:
        """Wait for a condition while it runs."""
        wait_until(lambda: condition() or self._error, 60, what)
        self._raise()

    def stalled(self, seconds: float = 0.0) -> list[StalledPartition]:
        return self.consumer.stalled(seconds)

    def error(self) -> BaseException:
        """Wait for its end, and return the error that it raised."""
        self._looked_at = True
        self._thread.join(240)
        assert self._error is not None
        return self._error

    def end(self) -> None:
        self.consumer.stop()
        self._thread.join(120)
        assert not self._thread.is_alive()
        self._raise()

    def _raise(self) -> None:
        if self._error is not None and not self._looked_at:
            self._looked_at = True
            raise self._error


class Process:
    """A member that runs in a process of its own."""

    def __init__(self, log: Path, given: dict[str, Any]) -> None:
        self.log = log
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
        self._child = NURSERY.fork([str(SCRIPT), json.dumps(given)], environment, log.parent, log)

    @property
    def asleep(self) -> bool:
        return psutil.Process(self._child.pid).status() == psutil.STATUS_STOPPED

    def signal(self, number: int) -> None:
        self._child.signal(number)

    def wait(self) -> int:
        assert self._child.wait(60 * patience()), self.text()
        assert self._child.exit_code is not None
        return self._child.exit_code

    def text(self) -> str:
        return self.log.read_text()

    def end(self) -> None:
        self._child.signal(signal.SIGKILL)
        assert self._child.wait(30 * patience())
