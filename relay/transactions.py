"""The transactional Publisher: a batch and its marker are one Kafka transaction (KIP-98), one transactional.id a lane.

Taking a lane over, in this order:
  1. ``init_transactions`` with the lane's transactional.id: fences whoever had it, and ends their open transaction;
  2. the last committed marker is read, to the end of the lane's partition of the state topic;
  3. one Postgres transaction: the epoch is checked again, marker and ``last_batch`` are compared (see marker.py), and
     the rows that the marker names are settled. Only then anything is fetched.

| crash point                               | recovery                                                            |
|-------------------------------------------|---------------------------------------------------------------------|
| before the Kafka transaction is begun     | marker = k-1: batch k is read again                                 |
| while producing                           | init_transactions aborts it; read_committed saw nothing; read again |
| EndTxn sent, no answer                    | init_transactions completes or aborts it; the marker decides        |
| committed, rows not deleted               | marker = k: its rows are settled                                    |
| Postgres dies                             | rolled back; the same                                               |
| Postgres loses asynchronous commits       | they were never published: the fetch's commit is a flush barrier    |
| the broker dies in commit                 | not clean: new producer, marker                                     |
| the coordinator times the transaction out | fatal: new producer, marker                                         |
| a relay that slept wakes                  | fenced in Kafka; its epoch is over in Postgres                      |
| the state topic can't be read             | wait; nothing is published                                          |
| the state topic lost records              | the lane stops with StateLost                                       |

A producer is used again only after a clean commit. An EndTxn that librdkafka sent twice (an answer was lost) could
arrive late and end the *next* transaction in the middle, because brokers do not bump the epoch with each transaction
for this client (KIP-890 part 2). librdkafka repeats EndTxn after ``retry.backoff.ms`` (less 20 % jitter) at least,
so a commit that took less time sent it once; and its statistics count the requests, as a second witness. A commit is
clean when it raised nothing, was faster than that, and no more EndTxn were counted than there were commits.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

import orjson
from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, ConfigResource, NewPartitions  # type: ignore[attr-defined]
from confluent_kafka.cimpl import NewTopic

from outbox.errors import ConfigurationError
from relay.failpoints import failpoint
from relay.marker import Marker, resume
from relay.polling import Identity
from relay.ports import At, BatchRefused, Claim, Receipt, Unavailable
from relay.routing import Router
from relay.sending import REFUSALS, Sender, Topics, silent, text_of, weakly

# librdkafka's jitter is 20 %; the rest is for the clock's and the caller's own delays.
_CLEAN_PART: Final = 0.8 * 0.9
_INIT_SECONDS: Final = 10.0
_READ_SECONDS: Final = 10.0
_ABORT_SECONDS: Final = 2.0

# cleanup.policy: a marker is found for as long as its lane exists. unclean.leader.election: a leader that lacks records
# would show an old marker.
_STATE_CONFIG: Final = {"cleanup.policy": "compact", "unclean.leader.election.enable": "false"}
_STATE_TUNING: Final = {"segment.bytes": str(16 << 20), "min.cleanable.dirty.ratio": "0.1"}


class Ledger(Protocol):
    """What the publisher asks of the source: Postgres' side of a take-over. See polling.PollingSource."""

    def check_epoch(self) -> Identity:
        """Say which Postgres this is. Raises LaneLost when the lane has another owner."""
        ...

    def adopt(self, marker: Marker | None) -> tuple[Marker | None, Identity]:
        """Settle what the marker names; give the marker to go on from."""
        ...


class StateTopic:
    """The compacted topic of markers; its partition is the lane. Shared by all lanes; safe to use from threads."""

    def __init__(self, options: Mapping[str, str], name: str, *, replication: int = -1) -> None:
        self.name = name
        self._options = dict(options)
        self._replication = replication
        self._lock = threading.Lock()
        self._checked = 0

    def require(self, lanes: int) -> None:
        """Create the topic with a partition for each lane, or check the one that is there.

        Raises ConfigurationError when its settings could lose a marker, Unavailable when no broker answers.
        """
        with self._lock:
            if self._checked >= lanes:
                return
            admin = AdminClient(dict(self._options), logger=silent())
            try:
                self._require(admin, lanes)
            except KafkaException as error:
                raise self._explained(error) from error
            self._checked = lanes

    def last_marker(self, lane: int) -> Marker | None:
        """Give the last committed marker of a lane; None when there is none, or no such topic.

        Raises Unavailable when the partition can't be read to its end, StateLost when its last record is no marker.
        """
        consumer = Consumer(
            {
                **self._options,
                "group.id": "outbox-relay-state",
                "enable.auto.commit": False,
                "auto.offset.reset": "error",
                "enable.partition.eof": True,
                "isolation.level": "read_committed",
                "allow.auto.create.topics": False,
                "fetch.wait.max.ms": 10,
            },
            logger=silent(),
        )
        try:
            topics = consumer.list_topics(timeout=_READ_SECONDS).topics
            if self.name not in topics or lane not in topics[self.name].partitions:
                return None
            return self._read(consumer, lane, time.monotonic() + _READ_SECONDS)
        except KafkaException as error:
            raise Unavailable(f"Kafka, reading {self.name!r} partition {lane}: {text_of(error)}") from error
        finally:
            consumer.close()

    def _read(self, consumer: Consumer, lane: int, deadline: float) -> Marker | None:
        low, high = consumer.get_watermark_offsets(TopicPartition(self.name, lane), timeout=_READ_SECONDS)
        window = 64
        while True:
            start = max(low, high - window)
            value = self._last_value(consumer, lane, start, high, deadline)
            if value is not None:
                return Marker.decode(value)
            if start == low:
                return None
            # Aborted transactions may fill the end; compaction has thinned the rest out.
            window *= 8

    def _last_value(self, consumer: Consumer, lane: int, start: int, high: int, deadline: float) -> bytes | None:
        """Read from ``start`` to the end; ``high`` and what was committed before it must have been passed."""
        if start >= high:
            return None
        consumer.assign([TopicPartition(self.name, lane, start)])
        last: bytes | None = None
        while True:
            if time.monotonic() > deadline:
                raise Unavailable(
                    f"Kafka: {self.name!r} partition {lane} could not be read to its end ({high}) within "
                    f"{_READ_SECONDS:g} s; nothing is published before that"
                )
            message = consumer.poll(0.5)
            if message is None:
                continue
            error = message.error()
            if error is None:
                last = message.value() or b""
            elif error.code() != KafkaError._PARTITION_EOF:
                raise KafkaException(error)
            elif (message.offset() or 0) >= high:
                return last

    def _require(self, admin: AdminClient, lanes: int) -> None:
        found = admin.list_topics(timeout=_READ_SECONDS).topics.get(self.name)
        if found is None:
            topic = NewTopic(
                self.name, lanes, replication_factor=self._replication, config={**_STATE_CONFIG, **_STATE_TUNING}
            )
            try:
                # Without a limit of its own the client waits a minute for a controller that has just died.
                created = admin.create_topics([topic], operation_timeout=_READ_SECONDS, request_timeout=_READ_SECONDS)
                created[self.name].result()
            except KafkaException as error:
                if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                    raise
            self._await_leaders(admin, lanes)
        resource = ConfigResource(ConfigResource.Type.TOPIC, self.name)
        config = admin.describe_configs([resource], request_timeout=_READ_SECONDS)[resource].result()
        for name, wanted in _STATE_CONFIG.items():
            value = config[name].value
            if value != wanted:
                raise ConfigurationError(
                    f"the state topic {self.name!r} has {name}={value}, which could lose markers: "
                    f"set {name}={wanted} on it"
                )
        if found is not None and len(found.partitions) < lanes:
            more = admin.create_partitions([NewPartitions(self.name, lanes)], request_timeout=_READ_SECONDS)
            more[self.name].result()
            self._await_leaders(admin, lanes)

    def _await_leaders(self, admin: AdminClient, lanes: int) -> None:
        """Brokers learn of a new topic one after the other, and each partition of its leader."""
        deadline = time.monotonic() + _READ_SECONDS
        while True:
            found = admin.list_topics(timeout=_READ_SECONDS).topics.get(self.name)
            ready = [p for p in found.partitions.values() if p.leader >= 0] if found is not None else []
            if len(ready) >= lanes:
                return
            if time.monotonic() > deadline:
                raise Unavailable(f"Kafka: the new partitions of {self.name!r} have no leaders yet")
            time.sleep(0.02)

    def _explained(self, error: KafkaException) -> Exception:
        code = error.args[0].code()
        if code in {KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.CLUSTER_AUTHORIZATION_FAILED}:
            return ConfigurationError(
                f"the relay may not create or describe the state topic {self.name!r}: create it with "
                f"{', '.join(f'{n}={v}' for n, v in _STATE_CONFIG.items())} and grant READ, WRITE, DESCRIBE and "
                "DESCRIBE_CONFIGS on it"
            )
        return Unavailable(f"Kafka, preparing the state topic {self.name!r}: {text_of(error)}")


class TransactionFigures:
    """What the transactions of this process took. Times in seconds; the last 10,000 commits."""

    def __init__(self) -> None:
        self.commits = 0
        self.renewed = 0
        self.add_partitions = 0
        self.commit_seconds: deque[float] = deque(maxlen=10_000)

    def summary(self) -> dict[str, float]:
        """Give counts and percentiles, for the log and the benchmarks."""
        times = sorted(self.commit_seconds)
        return {
            "transactions": self.commits,
            "producers_renewed": self.renewed,
            # Well above 1: it is repeated with CONCURRENT_TRANSACTIONS while the markers of the last one are written.
            "add_partitions_requests_per_transaction": round(self.add_partitions / max(self.commits, 1), 2),
            "commit_ms_p50": round(times[len(times) // 2] * 1000, 2) if times else 0.0,
            "commit_ms_p99": round(times[len(times) * 99 // 100] * 1000, 2) if times else 0.0,
        }


class TransactionalPublisher:
    """One lane's transactional producer, already taken over. See ports.Publisher for the contract.

    options are librdkafka's, from config.producer_options; ``transactional_id`` is the lane's. ``lanes`` is how
    many partitions the state topic needs. Raises Unavailable, LaneLost, StateLost or ConfigurationError.
    """

    def __init__(
        self,
        options: Mapping[str, Any],
        router: Router,
        topics: Topics,
        ce_source: str,
        delivery_seconds: float,
        *,
        transactional_id: str,
        lane: int,
        epoch: int,
        lanes: int,
        state: StateTopic,
        ledger: Ledger,
        figures: TransactionFigures,
        places: bool = False,
    ) -> None:
        self._delivery_seconds = delivery_seconds
        backoff_ms = min(int(options["retry.backoff.ms"]), int(options["retry.backoff.max.ms"]))
        self._clean_seconds = backoff_ms / 1000 * _CLEAN_PART
        self._lane = lane
        self._epoch = epoch
        self._state = state
        self._figures = figures
        self._batch = 0
        self._ends = 0
        self._suspicious = False
        self._add_partitions = 0
        self._closed = False
        # Not needed for safety: a zombie, an outbox that took this name, or the relay of a primary from before a
        # failover need not fence the rightful relay, again and again.
        here = ledger.check_epoch()
        resume(lane, None, state.last_marker(lane), here.system_identifier, here.timeline)
        self._sender = Sender(
            {**options, "transactional.id": transactional_id, "stats_cb": weakly(self._on_statistics)},
            router,
            topics,
            ce_source,
            places=places,
        )
        try:
            self._take_over(lanes, ledger)
        except BaseException:
            self.close()
            raise

    def publish(self, claims: Sequence[Claim]) -> Receipt:
        """Send the events and their marker in one transaction, and commit it."""
        if self._closed:
            return Receipt((), Unavailable("this publisher is closed"))
        sender = self._sender
        deadline = time.monotonic() + self._delivery_seconds
        try:
            sender.producer.begin_transaction()
            failpoint("txn.begun")
            sender.send(claims, deadline)
            if not sender.sent:
                # Nothing has left this process: there is nothing to end on the broker either.
                sender.producer.abort_transaction()
                return Receipt(sender.refused)
            if sender.refused and any(claim.position < 0 for claim in claims):
                # A marker vouches for events without a row only up to its position, and a refused event is a gap in
                # that. So nothing of the batch is published: the source gives all of it rows, and it comes again.
                self._abort()
                return Receipt((), spent=True)
            batch = self._batch + 1
            self._commit(
                Marker(
                    batch,
                    self._epoch,
                    self._identity.system_identifier,
                    self._identity.timeline,
                    tuple(claim.position for claim in sender.sent),
                    tuple(claim.event_id for claim in sender.sent),
                    _reached(claims, sender.sent),
                ),
                deadline,
            )
        except KafkaException as error:
            return Receipt(sender.refused_first(aborted=True), self._given_up(error))
        except Unavailable as error:
            self._abort()
            return Receipt(sender.refused_first(aborted=True), error)
        self._batch = batch
        failpoint("txn.committed")
        if self._suspicious:
            self._figures.renewed += 1
        return Receipt(sender.acknowledged() + sender.refused, batch=batch, spent=self._suspicious)

    def close(self) -> None:
        """Drop the producer. An open transaction is ended by the next one with this transactional.id."""
        if not self._closed:
            self._closed = True
            self._sender.close()

    def _take_over(self, lanes: int, ledger: Ledger) -> None:
        try:
            self._sender.producer.init_transactions(_INIT_SECONDS)
        except KafkaException as error:
            raise self._explained(error, "fencing the lane's last producer") from error
        failpoint("takeover.fenced")
        marker = self._state.last_marker(self._lane)
        failpoint("takeover.marker_read")
        adopted, self._identity = ledger.adopt(marker)
        failpoint("takeover.settled")
        self._state.require(lanes)
        if adopted is None:
            adopted = self._first_marker()
            failpoint("takeover.first_marker")
            adopted, _ = ledger.adopt(adopted)
            assert adopted is not None
            if self._suspicious:
                raise Unavailable("Kafka: the lane's first marker took long to commit; once more, with a new producer")
        self._batch = adopted.batch

    def _first_marker(self) -> Marker:
        """Write an empty marker, so that from the first event on, a missing one means that something was lost."""
        marker = Marker(1, self._epoch, self._identity.system_identifier, self._identity.timeline)
        try:
            self._sender.producer.begin_transaction()
            self._commit(marker, time.monotonic() + self._delivery_seconds)
        except KafkaException as error:
            raise self._explained(error, "writing the lane's first marker") from error
        return marker

    def _commit(self, marker: Marker, deadline: float) -> None:
        sender = self._sender
        sender.send_marker(self._state.name, self._lane, marker.encode(), deadline)
        failpoint("txn.marker_sent")
        sender.drain(deadline)
        if sender.failed:
            raise sender.failure(self._delivery_seconds)
        failpoint("batch.acknowledged")
        self._ends += 1
        started = time.monotonic()
        sender.producer.commit_transaction(max(deadline - started, 0.1))
        seconds = time.monotonic() - started
        self._suspicious = self._suspicious or seconds >= self._clean_seconds
        self._figures.commits += 1
        self._figures.commit_seconds.append(seconds)

    def _given_up(self, error: KafkaException) -> Unavailable:
        self._abort()
        if self._sender.failed:
            # The failed messages say more than the transaction that failed because of them.
            failure = self._sender.failure(self._delivery_seconds)
            if isinstance(failure, BatchRefused):
                return failure
        return self._explained(error, "publishing")

    def _explained(self, error: KafkaException, doing: str) -> Unavailable:
        code = error.args[0].code()
        if code in REFUSALS:
            return BatchRefused(f"{REFUSALS[code]} ({text_of(error)})")
        if code in {KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, KafkaError.CLUSTER_AUTHORIZATION_FAILED}:
            return Unavailable(
                f"Kafka, {doing}: the relay may not use its transactional.id; grant it WRITE and DESCRIBE on the "
                f"transactional id ({text_of(error)})"
            )
        if code == KafkaError._FENCED:
            return Unavailable(f"Kafka, {doing}: another producer has taken the lane over ({text_of(error)})")
        return Unavailable(f"Kafka, {doing}: {text_of(error)}")

    def _abort(self) -> None:
        """Let readers go on now instead of at the next take-over. The producer is thrown away whatever comes of it."""
        self._sender.producer.purge()
        with contextlib.suppress(KafkaException):
            self._sender.producer.abort_transaction(_ABORT_SECONDS)
        self.close()

    def _on_statistics(self, text: str) -> None:
        brokers = orjson.loads(text)["brokers"].values()
        requests = [broker.get("req", {}) for broker in brokers]
        if sum(request.get("EndTxn", 0) for request in requests) > self._ends:
            self._suspicious = True
        added = sum(request.get("AddPartitionsToTxn", 0) for request in requests)
        self._figures.add_partitions += added - self._add_partitions
        self._add_partitions = added


def _reached(claims: Sequence[Claim], sent: Sequence[Claim]) -> At | None:
    """Give where the last event stands before the first that was not sent."""
    if len(sent) == len(claims):
        return claims[-1].at
    reached = None
    for claim, other in zip(claims, sent, strict=False):
        if claim is not other:
            break
        reached = claim.at
    return reached
