"""The producer of one member, and what became of the records that it was given."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from outbox.consumer.member_clients import MemberClients
from outbox.consumer.messages import NOT_UTF8, UndecodableHeaders
from outbox.transform._first_records import FirstRecords
from outbox.transform._plan import Plan, Progress
from outbox.transform._positions import place_of
from outbox.transform._refusals import TOO_LARGE, Undelivered, failure
from outbox.transform._topics import output_partitions
from outbox.transform.errors import TransformFailed
from outbox.transform.records import Record, dead_letter

_POLL_SECONDS: Final = 0.1
_PURGE_SECONDS: Final = 5.0
_PURGED: Final = frozenset({KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT})


class Output:
    """Produces what messages become; one ``producer`` at a time, which the session begins and commits.

    ``undelivered``: the records of the transaction that were not delivered.
    """

    def __init__(self, plan: Plan, progress: Progress, clients: MemberClients) -> None:
        self._plan = plan
        self._progress = progress
        self._clients = clients
        self.undelivered: list[Undelivered] = []
        self._make()

    def _make(self, **more: int) -> None:
        self.producer = Producer({**self._plan.producer, **more, "error_cb": self._clients.hear})
        self._firsts = FirstRecords(
            self._plan.producer["partitioner"],
            lambda topic: output_partitions(self.producer, topic),
            self.flush,
            self._plan.transaction_seconds,
        )

    def flush(self) -> int:
        """Wait a moment for acknowledgements. Returns how many records have none."""
        return self.producer.flush(_POLL_SECONDS)

    def purge(self, *, in_flight: bool = True) -> None:
        """Drop what is not acknowledged, and serve the reports: a callback would keep this and its clients."""
        self.producer.purge(in_flight=in_flight)
        until = time.monotonic() + _PURGE_SECONDS
        with suppress(KafkaException):
            while self.flush() and time.monotonic() < until:
                pass

    def close(self) -> None:
        """Drop what is not acknowledged, and the producer: it ends now, although tracebacks may keep this."""
        self.purge()
        del self.producer

    def replace(self, *, apart: bool) -> None:
        """Go on with a new producer, which is not initialized yet. ``apart``: each record is a batch of its own."""
        self.purge()
        self._make(**({"batch.num.messages": 1} if apart else {}))

    def begin(self) -> float:
        """Begin a transaction. Returns the time, as ``time.monotonic()``."""
        self.undelivered.clear()
        began = self._firsts.begin()
        self.producer.begin_transaction()
        return began

    def produce(self, message: Message) -> None:
        """Produce what a message becomes, or its copy for the dead-letter topic.

        Raises TransformFailed or KafkaRefused because of the message, and KafkaException where the transaction is at
        its end.
        """
        try:
            if isinstance(message.headers(), UndecodableHeaders):
                raise UnicodeError(NOT_UTF8)
            records = list(self._plan.transform(message))
            for record in records:
                if not isinstance(record, Record):
                    raise TypeError(f"the transform returned a {type(record).__name__}, not a Record")
        except Exception as error:
            if self._plan.dead_letter_topic is None:
                raise TransformFailed(message, error, "fix it or name a dead_letter_topic") from error
            whole = place_of(message) not in self._progress.too_large
            records = [dead_letter(self._plan.dead_letter_topic, message, error, whole=whole)]
        for record in records:
            self._send(message, record)

    def cut(self, undelivered: Undelivered) -> bool:
        """Make a copy for the dead-letter topic smaller the next time, if its size is the reason; return whether."""
        message, record, reason = undelivered
        place, known = place_of(message), self._progress.too_large
        if record.topic != self._plan.dead_letter_topic or reason.code() not in TOO_LARGE or place in known:
            return False
        known.add(place)
        return True

    def _send(self, message: Message, record: Record) -> None:
        empty = False
        while True:
            try:
                self._send_once(message, record)
            except BufferError as error:
                if empty:
                    raise TransformFailed(message, error, "raise queue.buffering.max.kbytes") from error
                empty = not self.flush()
            except (TypeError, ValueError) as error:
                raise TransformFailed(message, error) from error
            except KafkaException as error:
                undelivered = Undelivered(message, record, error.args[0])
                failed = failure(self._plan.group, undelivered)
                if failed is None:
                    raise
                if not self.cut(undelivered):
                    raise failed from error
                self.produce(message)
                return
            else:
                self.producer.poll(0)
                return

    def _send_once(self, message: Message, record: Record) -> None:
        firsts = self._firsts
        partition, cold = firsts.place(record)

        def delivered(error: KafkaError | None, sent: Message) -> None:
            if error is None:
                if cold is not None:
                    firsts.arrived(record.topic, cold, sent.partition() or 0)
            # What is purged was aborted with another one, whose error is the reason.
            elif error.code() not in _PURGED:
                self.undelivered.append(Undelivered(message, record, error))

        more: dict[str, Any] = {} if partition is None else {"partition": partition}
        self.producer.produce(
            record.topic, record.value, record.key, headers=list(record.headers), on_delivery=delivered, **more
        )
        if cold is not None:
            firsts.sent(record.topic, cold)
