"""The transactional Publisher: each publish is a Kafka transaction (KIP-98), with a marker for each of its lanes.

Two producers alternate, each with its own transactional id. A commit is acknowledged when it is decided; its control
records are written to the partitions after that, and until then the same producer's next transaction gets
CONCURRENT_TRANSACTIONS and waits 20 ms or more. The other producer's does not. Readers still see them in order: in
every partition a transaction's events are behind those of the previous one, and a read_committed reader does not pass
an undecided transaction.

| crash point                               | recovery                                                              |
|-------------------------------------------|-----------------------------------------------------------------------|
| before the Kafka transaction is begun     | marker = k-1: batch k is read again                                   |
| while producing                           | init_transactions aborts it; read_committed saw nothing; read again   |
| all sent, previous batch not settled yet  | the same; the marker is that batch's, which settles it                |
| a lane of it is found to be lost then     | aborted; the other lanes' events are read again                       |
| Postgres does not answer in time then     | aborted, so that no reader waits; new producers, markers              |
| the broker refuses an event of it         | aborted; once that is acknowledged, its producer is replaced, and the |
|                                           | lanes go on. Without an acknowledgement: new producers, markers       |
| EndTxn sent, no answer                    | init_transactions completes or aborts it; the marker decides          |
| committed, rows not deleted               | marker = k: its rows are settled                                      |
| committed, the other producer's is        | both are fenced: the first completes, the second is aborted; the      |
| under way                                 | marker is the first's                                                 |
| Postgres dies                             | rolled back; the rows stay, and the marker settles them               |
| Postgres loses asynchronous commits       | they were never published: settling is the flush barrier              |
| the broker dies in commit                 | not clean: new producers, markers                                     |
| the coordinator times the transaction out | fatal: new producers, markers                                         |
| a relay that slept wakes                  | fenced in Kafka; its epoch is over in Postgres                        |
| the state topic can't be read             | wait; nothing is published                                            |
| a partition of the transaction has no     | the coordinator can't end it before the leader is back, and gives the |
| leader when it ends                       | ids to no producer until then: the relay goes on with new ids         |
| the broker lost a transaction's markers   | UndecidedTransaction; nothing is published                            |
| the state topic lost records              | the lane stops with StateLost; the others go on                       |

A producer is used again only after a clean commit, and a transaction begins only after the clean commit of the last.
An EndTxn that librdkafka sent twice (a response was lost) could arrive late and end the producer's *next* transaction
in the middle, because brokers do not bump the epoch with each transaction for this client (KIP-890 part 2). librdkafka
repeats EndTxn after at least ``retry.backoff.ms`` (less 20 % jitter), so a commit that took less time sent it once. A
commit is clean if it raised nothing and was faster than that. Otherwise both producers are discarded, their ids are
initialized again, and only then are our remaining lanes read from Postgres, and their markers from Kafka.

After a refusal only that producer is replaced. Its id is initialized before a later read: this may undo the fence of a
relay that has taken a lane, and each read checks the leases after that.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Final

from confluent_kafka import KafkaError, KafkaException

from outbox._clients.kafka_rules import clean_seconds
from outbox.errors import OutboxError
from relay.core.lease import Lease
from relay.core.marker import Marker
from relay.core.ports import (
    Batches,
    BatchRefused,
    BrokerUnavailable,
    Claim,
    Completed,
    Confirm,
    DeliveryTimeout,
    Failed,
    IdBusy,
    Kind,
    Receipt,
    Sent,
    TopicUnusable,
    Unavailable,
    Unconfirmed,
)
from relay.failpoints import failpoint
from relay.kafka.client import REFUSALS, accepted_before, text_of, unavailable_on_kafka_error
from relay.kafka.fencing import BUSY_SECONDS, initialize, is_busy
from relay.kafka.ordered import OrderedProducer
from relay.kafka.producer import Sending
from relay.kafka.state_topic import StateTopic
from relay.kafka.takeover import Takeover, own_ids
from relay.kafka.tracing import traced

_INIT_SECONDS: Final = 10.0
_ABORT_SECONDS: Final = 2.0

_Aborted = tuple[Unavailable, Collection[int], bool]
"""The failure of a publish, the lanes to blame, and whether its transaction is known to be aborted."""


class _TransactionalProducer(OrderedProducer):
    """A producer with its transactional id, and what its publisher knows of it.

    ends         how many EndTxns were sent to commit.
    initialized  init_transactions has succeeded.
    suspicious   a commit was not clean: see above.
    """

    ends = 0
    initialized = False
    suspicious = False


class TransactionalPublisher:
    """A worker's transactional producers. See ports.Publisher for the contract.

    ``base_id`` is written into the lanes' rows; ``lane_count`` is the number of partitions that the state topic needs.
    The constructor fences this worker's former publisher. Raises Unavailable (IdBusy, which another ``base_id`` avoids)
    or ConfigurationError.
    """

    def __init__(
        self, sending: Sending, *, base_id: str, takeover: Takeover, lane_count: int, state: StateTopic
    ) -> None:
        self.sending = sending
        self._delivery_seconds = sending.delivery_seconds
        self._clean_seconds = clean_seconds(sending.options)
        self._base_id = base_id
        self._takeover = takeover
        self._lane_count = lane_count
        self._state = state
        self._joined: dict[int, Marker] = {}
        """The lanes that were taken over, each with its last marker on Kafka, under our epoch."""
        self._transactions = 0
        self._closed = False
        self._senders: list[_TransactionalProducer] = []
        try:
            for each in own_ids(base_id):
                self._senders.append(_TransactionalProducer(sending, each))
            busy = [error for sender in self._senders if (error := self._init(sender)) is not None]
            if busy:
                raise busy[0]
        except BaseException:
            self.close()
            raise

    def join(self, leases: Sequence[Lease]) -> Mapping[int, OutboxError]:
        """Take over lanes; write the first marker of those that never had one."""
        taken = self._takeover.take_over(leases)
        failed = dict(taken.failed)
        self._state.require(self._lane_count)
        by_lane = {lease.lane: lease for lease in leases}
        new: dict[int, Marker] = {}
        for lane, (marker, identity) in taken.markers.items():
            (new if marker is None else self._joined)[lane] = Marker(
                batch=1 if marker is None else marker.batch,
                epoch=by_lane[lane].epoch,
                system_identifier=identity.system_identifier,
                timeline=identity.timeline,
                writer=self._base_id,
                outbox=identity.outbox,
            )
        if new:
            self._write_first_markers(new)
            adopted = self._takeover.adopt([by_lane[lane] for lane in new], new)
            self._joined |= {lane: new[lane] for lane in adopted.markers}
            failed |= adopted.failed
        return failed

    @traced
    def publish(self, batches: Batches, confirm: Confirm | None = None) -> Sent:
        """Send the events and a marker for each lane in one transaction, and commit it after ``confirm``."""
        if (unfit := self._unfit()) is not None:
            return unfit
        sender = self._next_sender()
        deadline, ends = time.monotonic() + self._delivery_seconds, sender.ends
        try:
            return self._in_transaction(sender, batches, deadline, confirm)
        except KafkaException as error:
            failure, blamed, aborted = self._abort_after_error(sender, error)
        except Unavailable as error:
            failure, blamed, aborted = self._abort_after_failure(sender, error, deadline)
        except OutboxError:
            self._abort(sender)
            self._disable()
            raise
        # Only if no EndTxn was sent for this one: otherwise only the markers tell what is published.
        goes_on = isinstance(failure, BatchRefused) and aborted and sender.fatal is None and sender.ends == ends
        if goes_on:
            self._replace(sender)
        else:
            self._disable()
        return self._failed(sender, failure, blamed, publisher_unusable=not goes_on)

    def unpublishable_kinds(self) -> frozenset[Kind]:
        return self.sending.topics.unpublishable_kinds()

    def serve(self) -> None:
        """Serve librdkafka's callbacks; initialize the next producer if it is a new one.

        Not in ``publish``: this fences whoever has taken a lane, so the leases have to be checked after it.
        """
        if self._closed:
            return
        for each in self._senders:
            each.serve()
        sender = self._senders[self._transactions % len(self._senders)]
        if not sender.initialized and (busy := self._init(sender)) is not None:
            raise busy

    def _next_sender(self) -> _TransactionalProducer:
        first = self._transactions % len(self._senders)
        return next(each for each in self._senders[first:] + self._senders[:first] if each.initialized)

    def close(self) -> None:
        """Discard the producers. The next init of an id ends its open transaction."""
        self._disable()
        for sender in self._senders:
            sender.close()
        self._senders.clear()

    def _disable(self) -> None:
        """Drop what is in flight; the next publish fails. The caller of ``publish`` closes the publisher."""
        self._closed = True
        for sender in self._senders:
            sender.purge()

    def _in_transaction(
        self, sender: _TransactionalProducer, batches: Batches, deadline: float, confirm: Confirm | None
    ) -> Sent:
        sender.producer.begin_transaction()
        failpoint("txn.begun")
        sender.send(batches, deadline)
        if not any(sender.sent.values()):
            # Nothing was sent, so there is nothing to end on the broker.
            sender.producer.abort_transaction(_ABORT_SECONDS)
            refused = sender.refused.items()
            return Completed({lane: Receipt(refused=each, left_out=lane in sender.left_out) for lane, each in refused})
        numbers = {lane: self._joined[lane].batch + 1 for lane, sent in sender.sent.items() if sent}
        markers = {lane: self._marker(lane, numbers[lane], sender.sent[lane]) for lane in numbers}
        if unconfirmed := self._commit(sender, markers, deadline, confirm):
            self._abort(sender)
            self._disable()
            return Unconfirmed(unconfirmed, publisher_unusable=True)
        self._joined |= markers
        failpoint("txn.committed")
        self._transactions += 1
        sender.note_written()
        receipts = {
            lane: Receipt(
                sender.acknowledged(lane, numbers.get(lane)), sender.refused.get(lane, []), lane in sender.left_out
            )
            for lane in batches
        }
        return Completed(receipts, publisher_unusable=sender.suspicious or sender.purged)

    def _unfit(self) -> Sent | None:
        """Return the result of a publish that can't begin: this is closed, or an earlier commit was not clean."""
        if self._closed:
            return Failed(Unavailable("this publisher is closed"))
        initialized = any(sender.initialized for sender in self._senders)
        if not initialized or any(sender.suspicious for sender in self._senders):
            return Completed({}, publisher_unusable=True)
        return None

    def _init(self, sender: _TransactionalProducer) -> IdBusy | None:
        """Initialize a producer's id. Returns the error if the id is still busy."""
        doing = "beginning with this worker's transactional.id"
        # A topic that takes no messages may also keep a transaction from ending: new ids are better than waiting.
        busy_seconds = BUSY_SECONDS if self.sending.topics.reasons() else _INIT_SECONDS
        try:
            initialize(sender.producer, _INIT_SECONDS, busy_seconds)
        except KafkaException as error:
            if is_busy(error):
                return IdBusy(f"Kafka, {doing}: {text_of(error)}")
            raise self._explained(sender.explained(error), doing) from error
        sender.initialized = True
        return None

    def _marker(self, lane: int, number: int, sent: Sequence[Claim]) -> Marker:
        return replace(
            self._joined[lane],
            batch=number,
            positions=tuple(claim.position for claim in sent),
            event_ids=tuple(claim.event_id for claim in sent),
            commit_lsn=None if sent[-1].at is None else sent[-1].at.commit_lsn,
        )

    def _write_first_markers(self, markers: Mapping[int, Marker]) -> None:
        """Write empty markers, so that from the first event on a missing marker means lost data."""
        sender = self._next_sender()
        try:
            sender.producer.begin_transaction()
            # No event is in flight, so this may take longer than a publish: the topic may have just been created.
            self._commit(sender, markers, time.monotonic() + max(self._delivery_seconds, _INIT_SECONDS))
        except KafkaException as error:
            error = sender.explained(error)
            if _may_be_forbidden(sender, error) and (forbidden := self._forbidden(sender)) is not None:
                raise forbidden from error
            raise self._explained(error, "writing the lanes' first markers") from error
        except BrokerUnavailable as error:
            if sender.dropped and (forbidden := self._forbidden(sender)) is not None:
                raise forbidden from error
            raise
        self._transactions += 1
        failpoint("takeover.first_marker")
        if sender.suspicious:
            raise BrokerUnavailable(
                "Kafka: the lanes' first markers took long to commit; they are written again, by new producers"
            )

    def _commit(
        self,
        sender: _TransactionalProducer,
        markers: Mapping[int, Marker],
        deadline: float,
        confirm: Confirm | None = None,
    ) -> Mapping[int, OutboxError]:
        """Send the markers, and commit once all is acknowledged. Returns the lanes that were not confirmed: then it is
        not committed.
        """
        for lane, marker in markers.items():
            sender.send_marker(self._state.name, lane, marker.encode(), deadline)
        failpoint("txn.marker_sent")
        sender.drain(deadline)
        if sender.failed:
            raise sender.failure(self._delivery_seconds)[0]
        failpoint("batch.acknowledged")
        if confirm is not None and (unconfirmed := confirm(deadline)):
            return unconfirmed
        failpoint("txn.confirmed")
        sender.ends += 1
        started = time.monotonic()
        sender.producer.commit_transaction(max(deadline - started, 0.1))
        sender.suspicious = sender.suspicious or time.monotonic() - started >= self._clean_seconds
        return {}

    def _failed(
        self,
        sender: _TransactionalProducer,
        failure: Unavailable,
        blamed: Collection[int],
        *,
        publisher_unusable: bool,
    ) -> Failed:
        refused = sender.refused_first(aborted=True)
        if isinstance(failure, BatchRefused):
            for lane, results in sender.refused_alone().items():
                refused.setdefault(lane, []).extend(results)
        receipts = {lane: Receipt(refused=each) for lane, each in refused.items() if each}
        return Failed(failure, receipts, blamed, sender.likeliest(), publisher_unusable)

    def _abort_after_failure(self, sender: _TransactionalProducer, error: Unavailable, deadline: float) -> _Aborted:
        if sender.broken_off:
            # The reports of the messages have the cause.
            sender.drain(deadline)
        failure, blamed = sender.failure(self._delivery_seconds) if sender.failed else (error, ())
        dropped = sender.dropped
        aborted = self._abort(sender)
        if dropped and (forbidden := self._forbidden(sender)) is not None:
            return forbidden, (), aborted
        return failure, blamed, aborted

    def _abort_after_error(self, sender: _TransactionalProducer, error: KafkaException) -> _Aborted:
        error = sender.explained(error)
        aborted = self._abort(sender)
        code = error.args[0].code()
        if code == KafkaError._FATAL and sender.fatal is not None:
            # The cause of the fatal error says more: mostly a fence.
            return self._explained(KafkaException(sender.fatal), "publishing"), (), aborted
        if _may_be_forbidden(sender, error) and (forbidden := self._forbidden(sender)) is not None:
            return forbidden, (), aborted
        if sender.failed:
            # The errors of messages say more than the transaction's, which they caused.
            failure, blamed = sender.failure(self._delivery_seconds)
            if isinstance(failure, BatchRefused | TopicUnusable):
                return failure, blamed, aborted
        return self._explained(error, "publishing"), (), aborted

    def _forbidden(self, sender: _TransactionalProducer) -> BrokerUnavailable | None:
        """Return the error if the relay may not write to a topic of the transaction, or to the state topic, or None."""
        if (forbidden := sender.forbidden()) is not None:
            return forbidden
        with unavailable_on_kafka_error("asking for rights on the state topic"):
            if not self.sending.topics.unwritable([self._state.name]):
                return None
        return BrokerUnavailable(
            f"Kafka: the relay may not write to the state topic {self._state.name!r}: grant it READ, WRITE, DESCRIBE "
            "and DESCRIBE_CONFIGS"
        )

    def _explained(self, error: KafkaException, doing: str) -> Unavailable:
        code = error.args[0].code()
        if code in REFUSALS:
            return BatchRefused(f"{REFUSALS[code]} ({text_of(error)})")
        if code == KafkaError.TOPIC_AUTHORIZATION_FAILED:
            return BatchRefused(f"the relay may not write to a topic of the batch ({text_of(error)})")
        if code in {KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, KafkaError.CLUSTER_AUTHORIZATION_FAILED}:
            return BrokerUnavailable(
                f"Kafka, {doing}: the relay may not use its transactional.id; grant it WRITE and DESCRIBE on the "
                f"transactional ids that begin with its name ({text_of(error)})"
            )
        if code == KafkaError._FENCED:
            return BrokerUnavailable(f"Kafka, {doing}: another relay has taken a lane over ({text_of(error)})")
        if code in {KafkaError._TIMED_OUT, KafkaError._TIMED_OUT_QUEUE}:
            return DeliveryTimeout(f"Kafka, {doing}: {text_of(error)}")
        return BrokerUnavailable(f"Kafka, {doing}: {text_of(error)}")

    def _abort(self, sender: _TransactionalProducer) -> bool:
        """Abort, so that readers go on now and not at the next take-over. The producer is not used again.

        Returns whether it is aborted: otherwise the next init of the id ends it.
        """
        sender.producer.purge()
        with contextlib.suppress(KafkaException):
            sender.producer.abort_transaction(_ABORT_SECONDS)
            return True
        return False

    def _replace(self, sender: _TransactionalProducer) -> None:
        """Replace the producer of an aborted transaction, of which the broker has refused a message.

        librdkafka has numbered that message, so its next one in the partition would be out of order. The new producer
        is initialized when its turn comes: right after the abort, the coordinator is still writing control records, and
        librdkafka would wait half a second.
        """
        number = self._senders.index(sender)
        with accepted_before():
            self._senders[number] = _TransactionalProducer(self.sending, own_ids(self._base_id)[number])
        sender.close()
        self._transactions += 1


def _may_be_forbidden(sender: _TransactionalProducer, error: KafkaException) -> bool:
    """Return whether a topic that may not be written to can be the cause: the error names none.

    It may also be seen only by what is refused after it, in the same transaction.
    """
    code = error.args[0].code()
    unknown = sender.fatal is None and (sender.dropped or not sender.failed)
    return bool(code == KafkaError.TOPIC_AUTHORIZATION_FAILED or (code == KafkaError._STATE and unknown))
