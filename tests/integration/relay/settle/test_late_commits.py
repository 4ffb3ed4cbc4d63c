"""Guards against a commit that comes late: each is taken out of the real code once, as in test_protocol_mutations."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from guard_support import Mutate, as_it_is, verdict, work
from invariants import Invariant
from kafka_proxy import END_TXN, Fired, KafkaProxy, delay_request
from takeover_support import Place, Worker

from outbox.testing.fixtures import Topics
from relay.core.ports import Batches, Confirm, Failed, Sent, Unavailable
from relay.kafka import producer
from relay.kafka.transactional import TransactionalPublisher


@pytest.fixture
def far(outbox_postgres, mortal_network) -> Iterator[Place]:
    """As ``place``, of workers whose way to the broker is the proxy."""
    cluster, proxy = mortal_network
    with Topics(cluster.bootstrap_servers) as topics:
        place = Place(outbox_postgres, topics, proxy.address, slow_commits_count=True)
        yield place
        # What a test left behind is not the next one's.
        proxy.clear()
        proxy.release()
        place.close()


class LateEnd:
    """Holds the EndTxn of one commit back, which librdkafka sends once more: the caller sees a commit without an error.

    What is held arrives while a worker's producer of that transactional id has sent half of a later turn.
    """

    def __init__(self, proxy: KafkaProxy, patch: pytest.MonkeyPatch) -> None:
        self._proxy = proxy
        self._patch = patch
        self._real = producer.failpoint
        self.arrived: list[Fired] = []

    def hold(self) -> None:
        """Hold the next one back."""
        self._proxy.on(END_TXN, delay_request())

    def arrive_in_a_turn_of(self, worker: Worker, number: int) -> None:
        """Let it arrive in the next turn of the worker's producer of this number."""

        def reached(name: str) -> None:
            publisher: Any = worker.publisher
            if name == "batch.half_sent" and not self.arrived and publisher._transactions % 2 == number:
                # The first half is on the broker, and no marker.
                assert publisher._senders[number].producer.flush(30) == 0
                self.arrived = self._proxy.release()
                if accepted(self.arrived[0]):
                    # The answer comes before the markers: what the turn sends next must not be of what has ended.
                    worker.place.kafka.await_transactions(worker.place.topic)
            self._real(name)

        self._patch.setattr(producer, "failpoint", reached)


def accepted(ended: Fired) -> bool:
    """Return whether the broker took an EndTxn: its answer is correlation id, tags from version 3 on, time, error."""
    assert ended.response is not None
    (error,) = struct.unpack_from(">h", ended.response, 8 + (ended.api_version >= 3))
    return bool(error == 0)


def a_turns_commit_is_late(place: Place, late: LateEnd) -> None:
    worker = place.joined("a")
    late.hold()
    # The first markers were the first producer's: this turn is the second's, and the next one the first's.
    assert worker.turn(1) > 0
    assert worker.turn(1) > 0
    late.arrive_in_a_turn_of(worker, 1)
    work(worker)


def the_first_markers_commit_is_late(place: Place, late: LateEnd) -> None:
    worker = place.worker("a")
    late.hold()
    try:
        assert worker.join() == {}
    except Unavailable:
        worker.publisher.close()
        worker.publisher = worker.new_publisher()
        assert worker.join() == {}
    worker.turn(1)
    late.arrive_in_a_turn_of(worker, 0)
    work(worker)


def used_again(patch: pytest.MonkeyPatch) -> None:
    real = TransactionalPublisher.publish

    def publish(self: Any, batches: Batches, confirm: Confirm | None = None) -> Sent:
        sent = real(self, batches, confirm)
        return sent if isinstance(sent, Failed) else replace(sent, publisher_unusable=False)

    patch.setattr(TransactionalPublisher, "publish", publish)
    patch.setattr(TransactionalPublisher, "_unfit", lambda _: None)


def first_markers_unseen(patch: pytest.MonkeyPatch) -> None:
    real = TransactionalPublisher._commit

    def commit(self: Any, sender: Any, *what: Any) -> None:
        real(self, sender, *what)
        if not sender.sent:
            sender.suspicious = False

    patch.setattr(TransactionalPublisher, "_commit", commit)


LATE_CASES: list[tuple[Callable[[Place, LateEnd], None], Mutate, set[Invariant]]] = [
    (a_turns_commit_is_late, as_it_is, set()),
    (a_turns_commit_is_late, used_again, {Invariant.NO_DOUBLE}),
    (the_first_markers_commit_is_late, as_it_is, set()),
    (the_first_markers_commit_is_late, first_markers_unseen, {Invariant.NO_DOUBLE}),
]


@pytest.mark.parametrize(
    ("scenario", "mutate", "expected"),
    LATE_CASES,
    ids=[f"{scenario.__name__}-{mutate.__name__}" for scenario, mutate, _ in LATE_CASES],
)
def test_a_late_commit_ends_no_later_transaction(far, mortal_network, monkeypatch, scenario, mutate, expected):
    """The broker takes a late EndTxn of a producer that is used again for the end of what is open now."""
    late = LateEnd(mortal_network[1], monkeypatch)
    mutate(monkeypatch)
    # Enough for a turn of either producer behind the first, however the keys fall to the lanes.
    far.add(300)
    scenario(far, late)
    # It did arrive in a turn: the broker ended what was open, or refused it because of its epoch.
    assert len(late.arrived) == 1
    assert verdict(far) == expected
