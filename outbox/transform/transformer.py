"""One member of a group that transforms topics, over all its sessions."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

from confluent_kafka import KafkaError, KafkaException

from outbox.consumer.member_clients import MemberClients
from outbox.consumer.stalled import StalledPartition
from outbox.errors import ConfigurationError
from outbox.stopping import Stopping
from outbox.transform._plan import Plan, Progress, client_options, logger
from outbox.transform._session import Session
from outbox.transform.errors import KafkaRefused, is_refused
from outbox.transform.records import Transform


class Transformer:
    """One member of a group that transforms topics. ``run`` it; several processes share the partitions.

    transform            called with each message, in the order of its partition; returns the records that it becomes,
                         none or several. It is called again for messages whose transaction was aborted.
    topics, group        the topics to read, and the consumer group that reads them.
    kafka                options of librdkafka, for the consumer and the producer. Set ``max.poll.interval.ms`` above
                         the time that ``batch`` messages take.
    start                where a partition without a committed position begins: "earliest", "latest", or "none": an
                         error. A partition that is added later begins at its first message, also with "latest".
    dead_letter_topic    where messages go that the transform raises for; None: ``run`` raises.
    batch, batch_seconds the most messages in a transaction, and for how long it waits for them. Beyond 16 MB of
                         values it takes no more.
    transaction_seconds  after which the coordinator aborts a transaction whose member is gone. Readers wait there for
                         as long, so it is short; a batch has to be done within it.
    """

    def __init__(
        self,
        transform: Transform,
        *,
        topics: Sequence[str],
        group: str,
        kafka: Mapping[str, Any],
        start: Literal["earliest", "latest", "none"] = "earliest",
        dead_letter_topic: str | None = None,
        batch: int = 500,
        batch_seconds: float = 0.05,
        transaction_seconds: float = 30.0,
    ) -> None:
        """Check the arguments. Raises ConfigurationError."""
        if isinstance(topics, str) or not topics or not all(topics):
            raise ConfigurationError(f"topics: {topics!r} must be a list of at least one topic")
        if not group:
            raise ConfigurationError("group must not be empty")
        if start not in {"earliest", "latest", "none"}:
            raise ConfigurationError(f"start must be earliest, latest or none, not {start!r}")
        if batch < 1 or batch_seconds < 0 or transaction_seconds <= 0:
            raise ConfigurationError("batch must be 1 or more, batch_seconds 0 or more, transaction_seconds above 0")
        consumer, producer = client_options(kafka, group, transaction_seconds)
        self._plan = Plan(
            transform=transform,
            topics=tuple(topics),
            group=group,
            start=start,
            dead_letter_topic=dead_letter_topic,
            batch=batch,
            batch_seconds=batch_seconds,
            transaction_seconds=transaction_seconds,
            consumer=consumer,
            producer=producer,
        )
        self._progress = Progress(batch)

    @property
    def committed(self) -> int:
        """Return how many messages this member has committed."""
        return self._progress.messages

    def stalled(self, seconds: float = 300.0) -> list[StalledPartition]:
        """Return this member's partitions in which messages wait and that have not moved for that long. No I/O.

        And one without a number if the group has not said for that long which partitions it gets.

        For a readiness probe, from any thread: a member that runs and has none is ready. Each one says since when, and
        why.
        """
        return self._progress.watch.stalled(seconds)

    def run(self, stop: threading.Event | None = None) -> None:
        """Transform until ``stop``, which ends it after the transaction under way. Waits while brokers are away.

        Raises TransformFailed, InputLost or KafkaRefused; nothing of the transaction under way is committed then. And
        ConfigurationError for an option that librdkafka does not take.
        """
        stop = stop or Stopping()
        self._progress.begin_run()
        clients = MemberClients(self._plan.consumer, self._plan.topics, self._progress.watch, logger, KafkaRefused)
        clients.run(partial(self._session, self._plan.of_this_process(), stop, clients), stop)

    def _session(self, plan: Plan, stop: threading.Event, clients: MemberClients) -> KafkaError | None:
        """Run one session; return the error that made a new one necessary."""
        try:
            with Session(plan, self._progress, stop, clients) as session:
                session.run()
        except KafkaException as error:
            inner: KafkaError = error.args[0]
            if is_refused(inner):
                raise KafkaRefused(f"Kafka refuses group {self._plan.group!r}: {inner.str()}") from error
            return inner
        return None
