"""The consumer that services embed. See ``_member`` for how it works, and what happens when something fails."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

import psycopg
from confluent_kafka import KafkaError, KafkaException

from outbox.consumer import connections
from outbox.consumer.delays import APPLY_DELAY, APPLY_DELAY_HELP, TopicDelays
from outbox.consumer.groups import GroupRows
from outbox.consumer.member_clients import MemberClients
from outbox.consumer.model import DEFAULT_SCHEMA
from outbox.consumer.stalled import StalledPartition, Watch
from outbox.errors import ConfigurationError
from outbox.inbox import _kafka
from outbox.inbox._letters import Letters
from outbox.inbox._member import Member
from outbox.inbox._once import check_name
from outbox.inbox._transactions import Handler, Settings
from outbox.inbox.errors import KafkaFailed
from outbox.stopping import Stopping

if TYPE_CHECKING:
    from types import FrameType

    from prometheus_client.core import HistogramMetricFamily

OnFailure = Literal["stop", "dead-letter"]
Start = Literal["earliest", "latest"]
Delivery = Literal["exactly-once", "at-most-once"]

_logger: Final = logging.getLogger("outbox.inbox")

_LONGEST_IDLE: Final = 2_147_483
"""Postgres counts the milliseconds of a time limit in 32 bits."""


class Consumer:
    """Applies the messages of topics in Postgres, as one member of a group.

    database    the URL of the database with the effects and the consumers' tables (`outbox db upgrade --consumer`), or
                a function that opens a connection to it.
    topics      to consume. Their messages need the id that the relay writes, unless ``dedup`` is off.
    group       the name of the consumer group, in Kafka and in the consumers' tables.
    kafka       librdkafka's options: ``bootstrap.servers``, credentials, ``session.timeout.ms`` …
    batch       at most this many messages of a partition are applied in one transaction. They must be applied within
                ``max.poll.interval.ms``.
    on_failure  of a message: "stop" before it, or store it as a "dead-letter", and later messages of its key behind it.
    attempts    at a message by itself, before ``on_failure``: a failure among others of its batch is not counted.
    wait        the first and the longest wait between attempts, in seconds.
    most_dead   more dead letters in a row than this, in one partition, stop the consumer: messages are not the cause.
    dedup       recognize messages that were published twice, by their ids. Off, for topics without ids: nothing is
                applied twice by this consumer, but a message that Kafka has twice is applied twice.
    key         with "idempotency-key", events with the same idempotency key are applied once: see ``message_id``.
    start       where a group begins that is new to a topic: "earliest", Kafka's first message, or "latest", the end.
    delivery    "exactly-once": the position is committed with the effect. "at-most-once", where a late or second effect
                is worse than none: the position is committed before the effect. Nothing is retried: a message that
                fails, and a batch that was interrupted, are recorded in ``consumer.losses``, and keys go on behind
                them. ``on_failure``, ``attempts`` and ``wait`` do not apply; ``most_dead`` counts the failures in a
                row, and a lost batch as one of them.
    idle_seconds  after which Postgres ends a transaction in which no statement runs: a handler that calls other
                systems must be quicker, and a member that is suspended blocks the next one for that long.
    schema      of the consumers' tables.
    """

    def __init__(
        self,
        database: str | Callable[[], psycopg.Connection[Any]],
        topics: Sequence[str],
        *,
        group: str,
        kafka: Mapping[str, Any],
        batch: int = 100,
        on_failure: OnFailure = "stop",
        attempts: int = 5,
        wait: tuple[float, float] = (0.1, 30.0),
        most_dead: int = 20,
        dedup: bool = True,
        key: str | None = None,
        start: Start = "earliest",
        delivery: Delivery = "exactly-once",
        idle_seconds: float = 60.0,
        schema: str = DEFAULT_SCHEMA,
    ) -> None:
        """Check and store the arguments, which the class describes. Raises ConfigurationError."""
        check_name(group)
        if isinstance(topics, str) or not topics:
            raise ConfigurationError(f"topics: {topics!r} must be a list of at least one name")
        for name, number in (("batch", batch), ("attempts", attempts), ("most_dead", most_dead)):
            if number < 1:
                raise ConfigurationError(f"{name} must be 1 or more, not {number}")
        for name, chosen, choices in (
            ("on_failure", on_failure, OnFailure),
            ("start", start, Start),
            ("delivery", delivery, Delivery),
        ):
            if chosen not in get_args(choices):
                allowed = " or ".join(map(repr, get_args(choices)))
                raise ConfigurationError(f"{name} must be {allowed}, not {chosen!r}")
        if delivery == "at-most-once" and on_failure != "stop":
            raise ConfigurationError(
                f"on_failure={on_failure!r} is not for delivery='at-most-once': a message that fails is recorded in "
                "consumer.losses, and never tried again; leave it out"
            )
        if not 0 < wait[0] <= wait[1]:
            raise ConfigurationError(f"wait must be a first and a longest time in seconds, not {wait}")
        if key is not None and not dedup:
            raise ConfigurationError("key: recognizes nothing with dedup=False")
        if not 0.001 <= idle_seconds <= _LONGEST_IDLE:
            raise ConfigurationError(f"idle_seconds must be from 0.001 to {_LONGEST_IDLE}, not {idle_seconds}")
        self._group = partial(GroupRows, schema, group, idle_seconds=idle_seconds)
        self._settings = Settings(
            connect=partial(connections.connect, database, f"outbox inbox {group}", pinned=False)
            if isinstance(database, str)
            else database,
            options=_kafka.consumer_options(kafka, group),
            group=self._group(),
            letters=Letters(schema, group),
            topics=tuple(sorted(set(topics))),
            batch=batch,
            bury=on_failure == "dead-letter",
            attempts=attempts,
            wait=wait,
            most_dead=most_dead,
            dedup=dedup,
            key=key,
            at_end=start == "latest",
            at_most_once=delivery == "at-most-once",
        )
        self._stopping = Stopping()
        self._watch = Watch()
        self._delays = TopicDelays()

    def stalled(self, seconds: float = 300.0) -> list[StalledPartition]:
        """Return this member's partitions in which messages wait and that have not moved for that long. No I/O.

        And one without a number if the group has not said for that long which partitions it gets; with
        ``group.protocol=consumer`` only once another member has had its ``group.instance.id``.

        For a readiness probe, from any thread: a consumer that runs and has none is ready. Each one says since when,
        and why.
        """
        return self._watch.stalled(seconds)

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """Return how long messages took from their events' transactions to the commit of their effects. No I/O.

        For Prometheus: ``REGISTRY.register(consumer)``, with the registry of prometheus-client; of several consumers in
        a process ``ApplyDelays``. The metric, ``outbox_consumer_apply_delay_seconds``, is also that of Spark consumers.
        """
        yield from ApplyDelays(self).collect()

    def stop(self) -> None:
        """End ``run`` after its current transaction; if it does not run, the next one at once. For any thread.

        A ``run`` that raises has not obeyed: the next one ends at once.
        """
        self._stopping.set()

    def run(self, handler: Handler) -> None:
        """Consume until ``stop``, or in the main thread until SIGTERM or SIGINT.

        The service's own handler of such a signal is called too; what it raises is raised at the end of ``run``.

        handler   is called for each message that was not applied before, with the connection of its transaction. It
                  must not commit. ``Reject`` says that a retry won't help; any other exception is followed by one.

        Raises HandlerFailed, PositionLost, KafkaFailed, SchemaError when tables or rights are missing, and
        ConfigurationError for an option that librdkafka does not take. Whatever it raises, nothing was skipped that is
        neither a dead letter nor in ``consumer.losses``: run it again when the cause is gone.
        """
        # Here, because processes may be forked from the one that has made it.
        owned = replace(self._settings, group=self._group(f"inbox {connections.process_name()}"))
        with self._signals():
            clients = MemberClients(self._settings.options, self._settings.topics, self._watch, _logger, KafkaFailed)
            clients.run(partial(self._member, owned, handler, clients), self._stopping)
            # Not behind an error: who runs it again then has not seen that it was to stop.
            self._stopping.clear()

    def _member(self, settings: Settings, handler: Handler, clients: MemberClients) -> KafkaError | None:
        try:
            with clients.making():
                made = Member(settings, handler, self._stopping, self._watch, self._delays, clients)
        except KafkaException as error:
            refused: KafkaError = error.args[0]
            return refused
        with closing(made) as member:
            return member.run()

    @contextmanager
    def _signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        raised: list[BaseException] = []

        def on_signal(number: int, frame: FrameType | None) -> None:
            self._stopping.set()
            former = before[signal.Signals(number)]
            if callable(former) and former is not signal.default_int_handler:
                try:
                    former(number, frame)
                except BaseException as error:  # noqa: BLE001  as of sys.exit: here it would interrupt a transaction
                    raised.append(error)

        for each in before:
            signal.signal(each, on_signal)
        try:
            yield
        finally:
            for each, old in before.items():
                # None: it was not set by Python.
                signal.signal(each, signal.SIG_DFL if old is None else old)
            if raised:
                raise raised[0]


class ApplyDelays:
    """How late consumers of one process are, for Prometheus: ``REGISTRY.register(ApplyDelays(orders, invoices))``.

    A metric may be exposed once in a process: a registry refuses a second consumer that is registered by itself.
    """

    def __init__(self, *consumers: Consumer) -> None:
        self._consumers = consumers

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """Return the delays of each group; see ``Consumer.collect``. No I/O."""
        groups: dict[str, TopicDelays] = {}
        for consumer in self._consumers:
            # Members of one group have the same labels, which may not appear twice.
            group = consumer._settings.group.name  # noqa: SLF001  of this module
            groups.setdefault(group, TopicDelays()).add_all(consumer._delays)  # noqa: SLF001
        family = TopicDelays().family(APPLY_DELAY, APPLY_DELAY_HELP, {"group": ""})
        for group, delays in groups.items():
            delays.add_to(family, group)
        yield family
