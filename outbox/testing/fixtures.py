"""The objects that the pytest fixtures of ``plugin`` return. Useful without pytest as well."""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, Self

import psycopg
import sqlalchemy as sa

from outbox.sandbox._process import Process, Supervised, patience, pause, wait_for
from outbox.sandbox.errors import ServiceError, tail
from outbox.sandbox.kafka import KafkaCluster
from outbox.sandbox.postgres import PostgresServer, create_database, drop_database
from outbox.urls import libpq_url, sqlalchemy_url, with_database

if TYPE_CHECKING:
    from confluent_kafka import Consumer, Message

    from outbox._clients.kafka_client import Admin

_ADMIN_TIMEOUT: Final = 30.0


def token() -> str:
    return secrets.token_hex(4)


def migrate(url: str, schema: str = "outbox") -> None:
    """Create the outbox's tables in a database."""
    from outbox._app.migrate import upgrade

    upgrade(url, schema=schema)


class ExternalPostgres:
    """A given server, by the URL of one of its databases."""

    def __init__(self, url: str) -> None:
        self._url = libpq_url(url)

    def url(self, database: str = "postgres") -> str:
        return with_database(self._url, database)

    def create_database(self, name: str, template: str | None = None) -> str:
        create_database(self._url, name, template)
        return self.url(name)

    def drop_database(self, name: str) -> None:
        drop_database(self._url, name)


class ExternalKafka:
    def __init__(self, bootstrap_servers: str) -> None:
        self.bootstrap_servers = bootstrap_servers


DatabaseServer = PostgresServer | ExternalPostgres
"""A Postgres server on which tests create databases: one that the fixtures start, or a given one."""
KafkaServer = KafkaCluster | ExternalKafka
"""A Kafka on which tests create topics: one that the fixtures start, or a given one."""


class Database(contextlib.ExitStack):
    """One database. Leaving the ``with`` block closes the connections and engines that were opened through it."""

    def __init__(self, url: str, name: str) -> None:
        super().__init__()
        self.url = url
        self.name = name

    def connect(self, autocommit: bool = False) -> psycopg.Connection[tuple[Any, ...]]:
        connection = psycopg.connect(self.url, autocommit=autocommit)
        self.callback(connection.close)
        return connection

    def engine(self, **options: Any) -> sa.Engine:
        """Return a new SQLAlchemy engine; ``options`` are passed to create_engine."""
        engine = sa.create_engine(sqlalchemy_url(self.url), **options)
        self.callback(engine.dispose)
        return engine


class Topics:
    """One test's topics, with names that no other test has. Leaving the ``with`` block deletes them."""

    def __init__(self, bootstrap_servers: str) -> None:
        self.bootstrap_servers = bootstrap_servers
        self.token = token()

    def name(self, base: str) -> str:
        """Return a name for a topic or an aggregate type that only this test has: ``Order`` → ``Order-1f3a9c0e``.

        Topics whose name contains this test's token are deleted in the end, including those that a relay created.
        """
        return f"{base}-{self.token}"

    def create_topic(self, name: str, partitions: int = 1, config: Mapping[str, str] | None = None) -> str:
        """Create a topic with exactly this name, and return the name. ``config`` holds Kafka's topic settings."""
        from confluent_kafka import KafkaError, KafkaException
        from confluent_kafka.admin import NewTopic  # type: ignore[attr-defined]

        from outbox._clients.kafka_rules import is_silence

        topic = NewTopic(name, num_partitions=partitions, config=dict(config or {}))
        for last in (False, True):
            given = {"operation_timeout": _ADMIN_TIMEOUT, "request_timeout": _ADMIN_TIMEOUT}
            try:
                self._admin.create_topics([topic], **given)[name].result()
            except KafkaException as error:
                if last and error.args[0].code() == KafkaError.TOPIC_ALREADY_EXISTS:
                    # Made by the first request, of which the answer was late.
                    break
                if last or not is_silence(error.args[0]):
                    raise
                # A client that was made as the brokers were away may never find the controller.
                del self._admin
            else:
                break
        if not wait_for(lambda: len(self._partitions(name)) == partitions, _ADMIN_TIMEOUT):
            raise ServiceError(f"the topic {name} was created, but is not there after {_ADMIN_TIMEOUT:g} s")
        return name

    def consume(
        self,
        topics: str | Sequence[str],
        count: int | None = None,
        timeout: float = 30.0,
        isolation: str = "read_committed",
        wait_for_open: bool = True,
    ) -> list[Message]:
        """Read topics from the beginning, each partition in order.

        count           wait until there are this many messages, also for topics that don't exist yet. None: read the
                        messages that are there now, up to the last committed one.
        timeout         in seconds. Raises AssertionError when it expires first.
        isolation       read_uncommitted: also messages of open and aborted transactions.
        wait_for_open   without a count, call ``await_transactions`` first. False: an open transaction hides the
                        messages behind it, and so does one whose commit was acknowledged a moment ago.
        """
        from confluent_kafka import Consumer, TopicPartition

        names = [topics] if isinstance(topics, str) else list(topics)
        shown = ", ".join(names)
        deadline = time.monotonic() + timeout * patience()
        first = timeout if count is not None else min(timeout, 5.0)
        known: dict[str, list[int]] = {}

        def all_known() -> bool:
            # A leader found in one request may be missing in the next.
            known.update((name, self._partitions(name)) for name in names if not known.get(name))
            return all(known.values())

        if not wait_for(all_known, first):
            raise AssertionError(
                f"{shown}: no such topic, or no leader for a partition, after {first * patience():g} s"
            )
        if count is None and isolation == "read_committed" and wait_for_open:
            self.await_transactions(names, timeout, deadline)
        partitions = [(name, p) for name in names for p in known[name]]
        consumer = Consumer(
            {
                "bootstrap.servers": self.bootstrap_servers,
                "group.id": f"outbox-testing-{token()}",
                "enable.auto.commit": False,
                # Assigned from offset 0, not OFFSET_BEGINNING: librdkafka would look that up first, which takes half a
                # second.
                "auto.offset.reset": "earliest",
                "enable.partition.eof": True,
                "isolation.level": isolation,
                "fetch.wait.max.ms": 20,
                "log_level": 0,
            }
        )
        with contextlib.closing(consumer):
            consumer.assign([TopicPartition(name, p, 0) for name, p in partitions])
            return _read(consumer, partitions, count, deadline, timeout)

    def await_transactions(
        self, topics: str | Sequence[str], timeout: float = 30.0, deadline: float | None = None
    ) -> None:
        """Wait until every transaction that has written to the topics by now has ended and readers can see its end.

        A commit is acknowledged before the broker has written its markers, and only these make its messages visible.
        timeout is in seconds, from now unless there is a ``deadline``. Raises AssertionError when it expires first.
        """
        from confluent_kafka import KafkaException

        topics = [topics] if isinstance(topics, str) else topics
        deadline = deadline or time.monotonic() + timeout * patience()
        shown = ", ".join(topics)
        written: dict[tuple[str, int], int] = {}
        while True:
            problem = f"{shown}: no such topic, or no leader for a partition"
            try:
                written = written or self._ends(topics, committed=False)
                readable = self._ends(topics, committed=True) if written else {}
                waiting = [at for at, end in written.items() if readable.get(at, 0) < end]
                if readable and not waiting:
                    return
                if readable:
                    topic, part = at = waiting[0]
                    problem = (
                        f"{topic}-{part}: a transaction is open at offset {readable.get(at)}: its producer must "
                        "commit or abort it; to read the messages before it, give a count or wait_for_open=False"
                    )
            except KafkaException as error:
                # A leader that moves, a broker that restarts.
                problem = f"{shown}: no answer about open transactions: {error.args[0]}"
            if time.monotonic() > deadline:
                raise AssertionError(f"after {timeout * patience():g} s, {problem}")
            time.sleep(0.02)

    def _ends(self, topics: Sequence[str], *, committed: bool) -> dict[tuple[str, int], int]:
        """Return each partition's end offset for read_committed or read_uncommitted readers.

        Empty while a partition has no leader. Raises KafkaException.
        """
        from confluent_kafka import IsolationLevel

        from outbox._clients.kafka_client import LATEST, answered

        # This also refreshes the client's metadata about leaders.
        partitions = {topic: self._partitions(topic) for topic in topics}
        if not all(partitions.values()):
            return {}
        asked = self._admin.ask_offsets(
            [(topic, part) for topic, parts in partitions.items() for part in parts],
            LATEST,
            IsolationLevel.READ_COMMITTED if committed else IsolationLevel.READ_UNCOMMITTED,
            _ADMIN_TIMEOUT,
        )
        return {(at.topic, at.partition): answered(at, answer).offset for at, answer in asked.items()}

    def delete(self) -> None:
        admin = self._admin
        names = [name for name in admin.list_topics(timeout=_ADMIN_TIMEOUT).topics if self.token in name]
        if names:
            for future in admin.delete_topics(names, operation_timeout=_ADMIN_TIMEOUT).values():
                future.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.delete()

    @functools.cached_property
    def _admin(self) -> Admin:
        from outbox._clients.kafka_client import Admin

        return Admin({"bootstrap.servers": self.bootstrap_servers})

    def _partitions(self, topic: str) -> list[int]:
        """Return a topic's partitions; empty if there is no such topic, or while one of them has no leader."""
        found = self._admin.list_topics(topic, timeout=_ADMIN_TIMEOUT).topics.get(topic)
        if found is None or found.error is not None or any(p.leader < 0 for p in found.partitions.values()):
            return []
        return sorted(found.partitions)


def _read(
    consumer: Consumer, partitions: Sequence[tuple[str, int]], count: int | None, deadline: float, timeout: float
) -> list[Message]:
    """Return the assigned partitions' messages, all or ``count`` of them. Raises AssertionError at the deadline."""
    from confluent_kafka import KafkaError, KafkaException

    # Reported by librdkafka while it reconnects by itself.
    eof = KafkaError._PARTITION_EOF
    transient = {KafkaError._ALL_BROKERS_DOWN, KafkaError._TRANSPORT, KafkaError._TIMED_OUT}
    unread = set(partitions)
    found: list[Message] = []
    last_error: KafkaError | None = None
    while unread if count is None else len(found) < count:
        if time.monotonic() > deadline:
            shown, wanted = ", ".join(dict(partitions)), "the end" if count is None else f"message {count}"
            raise AssertionError(
                f"{shown}: {len(found)} messages and not {wanted} after {timeout * patience():g} s; "
                f"last error: {last_error}"
            )
        message = consumer.poll(0.1)
        if message is None:
            continue
        error = message.error()
        if error is None:
            found.append(message)
        elif error.code() == eof:
            unread.discard((message.topic(), message.partition()))
        elif error.code() in transient or error.retriable():
            last_error = error
        else:
            raise KafkaException(error)
    return found


class Started(Process, Protocol):
    """A process whose exit status is known once ``wait`` has returned True."""

    @property
    def exit_code(self) -> int | None: ...


class RelayProcess:
    """A relay that runs as a process of its own, as in production."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.log_file = log
        self._process = self._start(command, environment)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.running

    def terminate(self) -> None:
        """Send SIGTERM: it finishes what is in flight and exits."""
        self._process.signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill it by SIGKILL, and wait until it is gone."""
        self._process.signal(signal.SIGKILL)
        self.wait()

    def pause(self) -> None:
        pause(self._process)

    def resume(self) -> None:
        self._process.signal(signal.SIGCONT)

    def wait(self, timeout: float = 30.0) -> int:
        """Wait for its end. Returns the exit status, negative for a signal. Raises AssertionError if it still runs."""
        seconds = timeout * patience()
        if not self._process.wait(seconds):
            raise AssertionError(f"the relay (pid {self.pid}) still runs after {seconds:g} s\n{tail(self.log_file)}")
        assert self._process.exit_code is not None
        return self._process.exit_code

    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def wait_for_log(self, text: str, timeout: float = 30.0) -> None:
        """Wait until its log contains ``text``. Raises AssertionError when it ends first, or at the timeout."""

        def there() -> bool:
            if text in self.log():
                return True
            if not self.running:
                raise AssertionError(f"the relay ended without logging {text!r}\n{tail(self.log_file)}")
            return False

        if not wait_for(there, timeout):
            seconds = timeout * patience()
            raise AssertionError(f"the relay did not log {text!r} within {seconds:g} s\n{tail(self.log_file)}")

    def _start(self, command: Sequence[str], environment: Mapping[str, str]) -> Started:
        # Not the working directory of the tests: this relay must not read an outbox.toml there.
        cwd = self.log_file.parent
        return Supervised(command, log=self.log_file, env=environment, cwd=cwd)


class RelayFactory:
    """Starts relays; leaving the ``with`` block ends them all, and shows their logs where pytest captures them."""

    _kind: type[RelayProcess] = RelayProcess

    def __init__(self, database_url: Callable[[], str], bootstrap_servers: Callable[[], str], directory: Path) -> None:
        self._database_url = database_url
        self._bootstrap_servers = bootstrap_servers
        self._directory = directory
        self._started: list[RelayProcess] = []

    def __call__(
        self,
        *arguments: str,
        database_url: str | None = None,
        bootstrap_servers: str | None = None,
        env: Mapping[str, str] | None = None,
        program: Sequence[str] = ("-m", "relay.cli"),
        **settings: object,
    ) -> RelayProcess:
        """Start ``outbox relay run`` with these arguments, without waiting for it.

        database_url, bootstrap_servers   of other servers than the test's usual ones.
        env                               more environment variables.
        program                           arguments of Python that run the command; its own follow.
        settings                          by their names: ``relay__lease_seconds=2`` is OUTBOX_RELAY__LEASE_SECONDS.

        It creates missing topics unless ``create_topics=False`` is among the settings.
        """
        # The settings of the environment that runs the tests do not apply to this relay.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("OUTBOX_")}
        environment |= {
            "OUTBOX_DATABASE_URL": database_url or self._database_url(),
            "OUTBOX_KAFKA__BOOTSTRAP_SERVERS": bootstrap_servers or self._bootstrap_servers(),
            "OUTBOX_CREATE_TOPICS": "true",
            "PYTHONUNBUFFERED": "1",
        }
        environment |= {f"OUTBOX_{name.upper()}": _text(value) for name, value in settings.items()}
        environment |= env or {}
        command = [sys.executable, *program, "relay", "run", *arguments]
        log = self._directory / f"relay-{len(self._started) + 1}.log"
        process = self._kind(command, environment, log)
        self._started.append(process)
        return process

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._started:
            # Also one that has ended by itself: waiting closes its pipes.
            process.kill()
            print(tail(process.log_file, 200), file=sys.stderr)


class PrivatePostgres(contextlib.ExitStack):
    """Starts Postgres servers that a test may kill; leaving the ``with`` block removes them."""

    def __call__(self, settings: Mapping[str, str] | None = None) -> PostgresServer:
        """Start a server with these settings for postgresql.conf; fsync is on by default."""
        return self.enter_context(PostgresServer(settings=settings))

    def database(self, server: PostgresServer, name: str = "outbox") -> Database:
        """Create a database with the outbox's tables on a server."""
        url = server.create_database(name)
        migrate(url)
        return self.enter_context(Database(url, name))


class PrivateKafka(contextlib.ExitStack):
    """Starts Kafkas that a test may kill; leaving the ``with`` block removes them."""

    def __call__(self, brokers: int = 1, settings: Mapping[str, str] | None = None) -> KafkaCluster:
        """Start a cluster of 1 or 3 brokers, with these settings for server.properties."""
        return self.enter_context(KafkaCluster(brokers=brokers, settings=settings))

    def topics(self, cluster: KafkaCluster) -> Topics:
        """Return helpers to create and read topics of a cluster, which is removed as a whole."""
        return Topics(cluster.bootstrap_servers)


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
