"""A producer whose first message in each partition is acknowledged before the next one is sent there.

Without that, events can be lost, or overtake others of their key: see outbox/_clients/first_messages.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from outbox._clients.first_messages import FirstMessages
from outbox.event import DEAD_LETTER
from relay.core.ports import Batches, BrokerUnavailable, Claim, Kind, Unavailable, kind_of
from relay.kafka.client import unavailable_on_kafka_error
from relay.kafka.producer import NOT_SENT, BatchProducer, Outcome, Sending

_FEW_TOPICS: Final = 10


class OrderedProducer(BatchProducer):
    """Sends the first messages of a publish ahead of the others, and waits for their acknowledgements."""

    def __init__(self, sending: Sending, transactional_id: str | None = None) -> None:
        super().__init__(sending, transactional_id)
        self._first = FirstMessages(sending.options["partitioner"])

    def send(self, batches: Batches, deadline: float, may_send: Callable[[int], bool] = lambda _lane: True) -> None:
        try:
            super().send(batches, deadline, may_send)
        except Unavailable:
            # What was sent ahead is in ``sent``, too: it may be acknowledged.
            for lane, claims in batches.items():
                sent = {claim.position for claim in self.sent.get(lane, ())}
                self.sent[lane] = [
                    claim
                    for claim in claims
                    if claim.position in sent or self._ahead.get(claim.position, NOT_SENT) is None
                ]
            raise

    def _send_ahead(self, batches: Batches, deadline: float) -> None:
        self._first.now = time.monotonic()
        waiting: set[tuple[str, str]] = set()
        while topics := dict(self._cold_topics(batches)):
            if not sum(self._send_first(claims, topics, waiting, deadline) for claims in batches.values()):
                break
            self.drain(deadline)
            if self.failed or self.purged:
                raise BrokerUnavailable("Kafka: the first messages of partitions are not acknowledged")
            self._learn(self._first.acknowledged(), deadline)

    def _cold_topics(self, batches: Batches) -> Iterator[tuple[Kind, str]]:
        """Return the topics of the publish that may have first messages, by kind of event."""
        claims = [claim for claims in batches.values() for claim in claims]
        kinds = {(aggregate_type, False) for aggregate_type in {claim.aggregate_type for claim in claims}}
        kinds |= {kind_of(claim) for claim in claims if claim.headers and DEAD_LETTER in claim.headers}
        for kind in kinds:
            topic = self._router.known_topic(kind[0], copy=kind[1])
            if topic is not None and self._first.may_come(topic):
                yield kind, topic

    def _send_first(
        self,
        claims: Sequence[Claim],
        topics: Mapping[Kind, str],
        waiting: set[tuple[str, str]],
        deadline: float,
    ) -> int:
        """Send the events of a lane that are the first in their partitions, and of ``waiting`` keys none.

        Returns how many there are. If a topic can't be written to, that is the outcome of its events: by the time that
        the others are sent, it may have changed.
        """
        count = 0
        for claim in claims:
            topic, key = topics.get(kind_of(claim)), claim.key
            if topic is None or claim.position in self._ahead or key in waiting:
                continue
            outcome: Outcome = self._prepare(claim, topic)
            if outcome is None:
                if not self._first.is_known(topic):
                    self._first.learn(topic, self._new_topics.counts.pop(topic, 0))
                if not self._first.is_first(topic, claim.aggregate_id):
                    continue
                outcome = self._send(claim, deadline)
            self._ahead[claim.position] = outcome
            if outcome is None:
                self._first.sent(topic, claim.aggregate_id)
                count += 1
            else:
                waiting.add(key)
        return count

    def _learn(self, topics: Sequence[str], deadline: float) -> None:
        """Learn how many partitions topics have that have taken a message."""
        counts: dict[str, int] = {}
        # About many, one question is quicker. From its answer librdkafka takes the partitions of all topics.
        for asked in topics if len(topics) <= _FEW_TOPICS else (None,):
            with unavailable_on_kafka_error("asking for partitions"):
                found = self.producer.list_topics(asked, timeout=max(deadline - time.monotonic(), 0.1)).topics
            counts |= {topic: len(metadata.partitions) for topic, metadata in found.items()}
        for topic in topics:
            if not counts.get(topic):
                raise BrokerUnavailable(f"Kafka does not say which partitions topic {topic!r} has")
        self._first.learn_all(counts)
