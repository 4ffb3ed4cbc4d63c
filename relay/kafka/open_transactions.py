"""Finds transactions that stay open in a topic: read_committed readers wait there, without any other symptom.

A broker that restarts can lose the markers of a transaction that its coordinator calls committed (KAFKA-20734). In a
lane's partition of the state topic, the next take-over notices it. In a partition of events the relay goes on, and
everything that it publishes there stays hidden behind the transaction. So the last stable offset is compared with the
high watermark: when a live transaction ends, the last stable offset moves; it does not behind one that hangs.

| the first record that is undecided          | it hangs when it has stood there for longer than                      |
|---------------------------------------------|-----------------------------------------------------------------------|
| is an event of an outbox (it has an id), or | the relays' transaction.timeout.ms: their coordinator would have      |
| in the state topic                          | aborted it                                                            |
| is another program's                        | the longest time-out that brokers allow by default. The doctor names  |
|                                             | it; a relay does not, because that program may still be working       |
| may not be read: READ is not granted        | the same, and a relay names it                                        |

No client library shows who began a transaction (DescribeProducers); its first record does, and also when.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

import structlog
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from outbox._clients.kafka_client import silent_logger
from outbox.event import CE_ID
from relay.kafka.client import accepted_before, headers_of, reader_options, unavailable_on_kafka_error
from relay.kafka.offsets import Offsets, Partition, Undecided

log = structlog.get_logger("relay")

# The default of the brokers' transaction.max.timeout.ms.
_LONGEST_SECONDS: Final = 900.0
# A coordinator looks for expired transactions every ten seconds, and then has to write the markers.
_GRACE_SECONDS: Final = 15.0
_LOG_AGAIN_SECONDS: Final = 300.0
_READ_SECONDS: Final = 10.0
_DOING: Final = "looking for transactions that hang"
_FORBIDDEN: Final = frozenset({KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.GROUP_AUTHORIZATION_FAILED})


class Whose(Enum):
    """Who began a transaction, as far as its first record shows."""

    AN_OUTBOX = auto()
    ANOTHER = auto()
    UNKNOWN = auto()


@dataclass(frozen=True, slots=True)
class OpenTransaction:
    """A transaction that is open in a partition. ``since`` is the time of its first record, in seconds since 1970."""

    undecided: Undecided
    whose: Whose
    since: float | None


class OpenTransactions:
    """Looks for open transactions in the topics that an outbox may write to, and in its state topic.

    ``timeout_seconds`` is how long its relays' transactions may last. Raises BrokerUnavailable, and ConfigurationError
    when librdkafka refuses the options.
    """

    def __init__(
        self, options: Mapping[str, str], may_write: Callable[[str], bool], state_topic: str, timeout_seconds: float
    ) -> None:
        self._options = dict(options)
        self._may_write = may_write
        self._state_topic = state_topic
        self._timeout = timeout_seconds
        self._offsets: Offsets | None = None

    def look(self) -> list[Undecided]:
        """Return the partitions that end in an open transaction now."""
        return self._await({}, 0.0)

    def unmoved(self, seconds: float) -> list[Undecided]:
        """Return the partitions that have the same open transaction now and after ``seconds``."""
        before = {found.partition: found for found in self.look()}
        if not before:
            return []
        after = self._await({partition: found.end for partition, found in before.items()}, seconds)
        return [found for found in after if found.stable == before[found.partition].stable]

    def limit(self, whose: Whose) -> float:
        """Return how many seconds a transaction may be open until it counts as hanging."""
        return _GRACE_SECONDS + (self._timeout if whose is Whose.AN_OUTBOX else max(self._timeout, _LONGEST_SECONDS))

    def examine(self, undecided: Collection[Undecided]) -> list[OpenTransaction]:
        """Return the transactions that these partitions wait for."""
        with unavailable_on_kafka_error(_DOING):
            first = _first_records(self._options, undecided)
        examined = []
        for found in undecided:
            message = first.get(found.partition)
            whose, since = Whose.UNKNOWN, None
            if message is not None:
                since = message.timestamp()[1] / 1000
                headers = headers_of(message)
                whose = Whose.AN_OUTBOX if CE_ID in headers else Whose.ANOTHER
            if found.partition.topic == self._state_topic:
                whose = Whose.AN_OUTBOX
            examined.append(OpenTransaction(found, whose, since))
        return examined

    def _await(self, ends: Mapping[Partition, int], seconds: float) -> list[Undecided]:
        # The client, with its threads and connections, is kept while it works.
        offsets, self._offsets = self._offsets or Offsets(self._options), None
        with unavailable_on_kafka_error(_DOING):
            if not ends:
                topics = {topic for topic in offsets.topics() if self._may_write(topic) or topic == self._state_topic}
                ends = offsets.high(offsets.partitions(topics))
            found = offsets.await_decided(ends, seconds)
        self._offsets = offsets
        return found


@dataclass(slots=True)
class _OpenPartition:
    """A partition that was undecided at the last look, since ``seen_at`` at the same offset."""

    undecided: Undecided
    seen_at: float
    found: OpenTransaction | None = None
    logged_at: float | None = None


class TransactionWatch:
    """Tracks hanging transactions. Call ``look`` from time to time, from one thread; the rest from any.

    Measures from when it first saw a transaction, by this machine's clock: other clocks may differ.
    """

    def __init__(self, transactions: OpenTransactions, clock: Callable[[], float] = time.monotonic) -> None:
        self._transactions = transactions
        self._clock = clock
        self._open: dict[Partition, _OpenPartition] = {}
        self._hanging: Sequence[_OpenPartition] = ()

    @accepted_before()
    def look(self) -> None:
        """Check all partitions, and log hanging transactions every few minutes. Raises BrokerUnavailable."""
        undecided = self._transactions.look()
        now = self._clock()
        before, self._open = self._open, {}
        for found in undecided:
            known = before.get(found.partition)
            if known is None or known.undecided.stable != found.stable:
                known = _OpenPartition(found, now)
            known.undecided = found
            self._open[found.partition] = known
        due = [each for each in self._open.values() if self._is_to_be_examined(each, now)]
        examined = self._transactions.examine([each.undecided for each in due])
        for each, transaction in zip(due, examined, strict=True):
            each.found = transaction
        was, self._hanging = self._hanging, [each for each in self._open.values() if self._hangs(each, now)]
        for each in self._hanging:
            self._log(each, now)
        if was and not self._hanging:
            log.info("no transaction hangs any more")

    def hanging(self) -> list[float]:
        """Return for how many seconds a transaction has hung, for each partition with one."""
        now = self._clock()
        return [now - each.seen_at for each in self._hanging]

    def _is_to_be_examined(self, each: _OpenPartition, now: float) -> bool:
        known = each.found is not None and each.found.whose is not Whose.UNKNOWN
        return not known and now - each.seen_at >= self._transactions.limit(Whose.AN_OUTBOX)

    def _hangs(self, each: _OpenPartition, now: float) -> bool:
        if each.found is None or each.found.whose is Whose.ANOTHER:
            return False
        return now - each.seen_at >= self._transactions.limit(each.found.whose)

    def _log(self, each: _OpenPartition, now: float) -> None:
        if each.logged_at is not None and now - each.logged_at < _LOG_AGAIN_SECONDS:
            return
        each.logged_at = now
        assert each.found is not None
        log.error(
            "a transaction hangs: readers in read_committed wait for its end, and see nothing behind it; "
            "see `outbox relay reconcile`",
            topic=each.undecided.partition.topic,
            partition=each.undecided.partition.number,
            offset=each.undecided.stable,
            end=each.undecided.end,
            seconds=round(now - each.seen_at),
            began_by_an_outbox=each.found.whose is Whose.AN_OUTBOX,
        )


def _first_records(options: Mapping[str, str], undecided: Collection[Undecided]) -> dict[Partition, Message]:
    """Return the first record of each open transaction. Partitions that can't be read, or may not be, are absent."""
    if not undecided:
        return {}
    # One record of each is needed, and there may be millions behind it.
    more = {"auto.offset.reset": "earliest", "queued.min.messages": 1, "fetch.message.max.bytes": 65_536}
    consumer = Consumer(
        reader_options(options, "outbox-transactions", "read_uncommitted", more),
        logger=silent_logger(),
    )
    found: dict[Partition, Message] = {}
    unread = {each.partition for each in undecided}
    deadline = time.monotonic() + _READ_SECONDS
    try:
        consumer.assign([TopicPartition(*each.partition, each.stable) for each in undecided])
        while unread and time.monotonic() < deadline:
            message = consumer.poll(0.5)
            if message is None:
                continue
            partition = Partition(message.topic() or "", message.partition() or 0)
            error = message.error()
            if error is None:
                found.setdefault(partition, message)
            elif error.code() not in _FORBIDDEN:
                raise KafkaException(error)
            elif error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
                unread = {each for each in unread if each.topic != partition.topic}
            if partition in unread:
                unread.discard(partition)
                consumer.incremental_unassign([TopicPartition(*partition)])
    finally:
        consumer.close()
    return found
