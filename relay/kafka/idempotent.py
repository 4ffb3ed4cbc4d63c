"""The idempotent Publisher: acks=all, in order; an event counts as published once Kafka has acknowledged it.

After any failure the producer is discarded: its events in flight may or may not be in the log, so the lanes are read
again and sent by a new one. Both producers send a lane's events in the same order, and a prefix of each producer's
events arrives, so the first occurrences of the events are in order; a reader that drops repeats by event id sees them
in order.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from outbox._clients.counting import counted
from outbox.errors import OutboxError
from relay.core.lease import Lease
from relay.core.ports import (
    Batches,
    BatchRefused,
    BrokerUnavailable,
    Completed,
    Confirm,
    DeliveryTimeout,
    Failed,
    Kind,
    NotFenced,
    Receipt,
    Sent,
    Unavailable,
    Unconfirmed,
)
from relay.failpoints import failpoint
from relay.kafka.ordered import OrderedProducer
from relay.kafka.producer import BatchProducer, Sending
from relay.kafka.takeover import Takeover
from relay.kafka.tracing import traced


class IdempotentPublisher:
    """A worker's producer. See ports.Publisher for the contract.

    At-most-once, refused events are not searched for in smaller batches: all events of the request are refused. And
    nothing is sent that might reach Kafka after its lane's lease, when another relay may have sent what comes after it:
    such a publish has failed. Raises ConfigurationError when librdkafka refuses the options.
    """

    def __init__(self, sending: Sending, takeover: Takeover | None = None) -> None:
        self.sending = sending
        self._takeover = takeover
        self._delivery_seconds = sending.delivery_seconds
        self._at_most_once = sending.at_most_once
        self._leases: dict[int, Lease] = {}
        self._cut: set[int] = set()
        self._sender: BatchProducer | None
        self._sender = BatchProducer(sending) if sending.at_most_once else OrderedProducer(sending)

    def join(self, leases: Sequence[Lease]) -> Mapping[int, OutboxError]:
        """Fence and settle what a transactional producer may have left; most lanes have nothing of that kind."""
        self._leases.update({lease.lane: lease for lease in leases})
        former = [lease for lease in leases if lease.former_id is not None]
        if not former or self._takeover is None:
            return {}
        try:
            return self._takeover.take_over(former).failed
        except NotFenced as error:
            if len(former) == len(leases):
                raise
            # The others need no fence.
            return dict.fromkeys((lease.lane for lease in former), BrokerUnavailable(str(error)))

    @traced
    def publish(self, batches: Batches, confirm: Confirm | None = None) -> Sent:
        """Send in order and wait for all acknowledgements. Calls ``confirm`` first: sent events are visible at once."""
        sender = self._sender
        if sender is None:
            return Failed(Unavailable("this publisher is closed"))
        deadline = time.monotonic() + self._delivery_seconds
        if confirm is not None and (unconfirmed := confirm(deadline)):
            return Unconfirmed(unconfirmed)
        failure: Unavailable | None = None
        blamed: Sequence[int] = ()
        self._cut.clear()
        try:
            if self._at_most_once:
                sender.send(batches, deadline, self._in_time)
            else:
                sender.send(batches, deadline)
        except Unavailable as error:
            failure = error
        # Ours until then, unless the machine is suspended meanwhile, which neither deadline nor librdkafka counts.
        given = [self._leases[lane] for lane, claims in sender.sent.items() if claims and self._at_most_once]
        sender.drain(deadline, lambda: all(lease.secure for lease in given))
        failpoint("batch.acknowledged")
        if sender.failed:
            failure, lanes = sender.failure(self._delivery_seconds)
            blamed = sorted(lanes)
        else:
            sender.note_written()
        refused = sender.refused_first()
        by_broker = sender.refused_by_broker() if self._at_most_once else {}
        if self._at_most_once and isinstance(failure, BatchRefused):
            failure, blamed = BrokerUnavailable(str(failure)), ()
        if failure is None and self._cut:
            failure = self._unsent(batches, sender)
        receipts = {
            lane: Receipt(
                sender.acknowledged(lane),
                refused.get(lane, []) + by_broker.get(lane, []),
                left_out=failure is None and lane in sender.left_out,
            )
            for lane in batches
        }
        if failure is None:
            return Completed(receipts, publisher_unusable=sender.purged)
        return Failed(failure, receipts, blamed, sender.likeliest() if sender.failed else {})

    def _in_time(self, lane: int) -> bool:
        """Return whether the lane is ours until librdkafka drops what it is given now (``delivery.timeout.ms``)."""
        if self._leases[lane].remaining_seconds > self._delivery_seconds:
            return True
        self._cut.add(lane)
        return False

    def _unsent(self, batches: Batches, sender: BatchProducer) -> DeliveryTimeout:
        """Return the failure of a publish of which not all was sent, because too little was left of lanes' leases."""
        unsent = sum(len(batches[lane]) - len(sender.sent[lane]) - len(sender.refused[lane]) for lane in self._cut)
        return DeliveryTimeout(
            f"{counted(unsent, 'event')} not sent, and the rows are deleted: less was left of their lanes' leases than "
            f"the {self._delivery_seconds:g} s that Kafka may take. The relay or Postgres stood still, or was slow. If "
            "it does again, raise OUTBOX_RELAY__LEASE_SECONDS, or lower OUTBOX_RELAY__BATCH_SIZE or delivery.timeout.ms"
        )

    def unpublishable_kinds(self) -> frozenset[Kind]:
        return self.sending.topics.unpublishable_kinds()

    def serve(self) -> None:
        if self._sender is not None:
            self._sender.serve()

    def close(self) -> None:
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.close()
