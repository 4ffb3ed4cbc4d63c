"""The contract of ``relay.core.ports.Publisher``, over the publisher of the loop's own tests and over the real ones."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Protocol

import loop_fakes
import pytest
from support import wait_until
from takeover_support import LANES, Place, place

from outbox._clients.clock import uptime
from outbox.errors import OutboxError
from relay.core.lease import Lease
from relay.core.ports import Batches, Completed, LaneLost, Publisher, Unconfirmed

__all__ = ["place"]

EVENTS = 60


Seen = Mapping[tuple[int, str], Sequence[int]]
"""Positions of events by lane and key, in the order in which they stand there."""


class Subject(Protocol):
    """An outbox with events in every lane, and where they are published to."""

    leases: Sequence[Lease]

    def publisher(self) -> Publisher:
        """Return a new publisher."""
        ...

    def batches(self) -> Batches:
        """Return all events, by lane."""
        ...

    def seen(self) -> Seen:
        """Return what readers see. It may be asked while a turn is under way."""
        ...


class Fake:
    def __init__(self) -> None:
        rows = {lane: [1 + lane + LANES * n for n in range(EVENTS // LANES)] for lane in range(LANES)}
        self._batches = {lane: [loop_fakes.claim(lane, row) for row in each] for lane, each in rows.items()}
        self._broker = loop_fakes.Broker()
        self._source = loop_fakes.Table(rows).source()
        self._source.table.opened = 1
        self.leases = [Lease(lane, 1, 600.0, uptime()) for lane in rows]

    def publisher(self) -> Publisher:
        return self._broker.publisher(self._source)

    def batches(self) -> Batches:
        return self._batches

    def seen(self) -> Seen:
        lanes = {claim.position: lane for lane, batch in self._batches.items() for claim in batch}
        found: dict[tuple[int, str], list[int]] = defaultdict(list)
        for position in self._broker.log:
            found[lanes[position], "k"].append(position)
        return found


class OnKafka:
    def __init__(self, place: Place, *, exact: bool) -> None:
        self._place = place
        place.add(EVENTS)
        self._worker = place.worker("a", exact=exact)
        self._worker.publisher.close()
        self.leases = self._worker.leases
        self._batches: Batches = {}

    def publisher(self) -> Publisher:
        return self._worker.new_publisher()

    def batches(self) -> Batches:
        if not self._batches:
            fetched = self._worker.source.fetch({lease.lane: EVENTS for lease in self.leases})
            if fetched.unconfirmed:
                assert self._worker.source.confirm(time.monotonic() + 60) == {}
            self._batches = fetched.batches
        return self._batches

    def seen(self) -> Seen:
        claims = {claim.event_id: (lane, claim) for lane, batch in self._batches.items() for claim in batch}
        found: dict[tuple[int, str], list[int]] = defaultdict(list)
        for message in self._place.kafka.consume(self._place.topic, wait_for_open=False):
            lane, claim = claims[dict(message.headers())["id"].decode()]
            found[lane, message.key().decode()].append(claim.position)
        return found


@pytest.fixture(params=["fake", "at-least-once", "exactly-once"])
def subject(request) -> Subject:
    if request.param == "fake":
        return Fake()
    return OnKafka(request.getfixturevalue("place"), exact=request.param == "exactly-once")


def joined(subject: Subject) -> Publisher:
    publisher = subject.publisher()
    assert publisher.join(subject.leases) == {}
    return publisher


def all_once(batches: Batches) -> Seen:
    found: dict[tuple[int, str], list[int]] = defaultdict(list)
    for lane, batch in batches.items():
        for claim in batch:
            found[lane, claim.aggregate_id].append(claim.position)
    return found


def test_every_lane_has_its_receipt_and_readers_see_each_key_in_order_once_it_is_confirmed(subject):
    """And a publisher without trouble pauses nothing, and can be served at any time."""
    publisher = joined(subject)
    publisher.serve()
    batches = subject.batches()
    assert batches.keys() == set(range(LANES))
    seen: list[Seen] = []

    def confirm(_: float) -> Mapping[int, OutboxError]:
        seen.append(dict(subject.seen()))
        return {}

    sent = publisher.publish(batches, confirm)
    assert seen == [{}]
    assert isinstance(sent, Completed)
    assert not sent.publisher_unusable
    for lane, batch in batches.items():
        assert (list(sent.receipts[lane].published.rows), list(sent.receipts[lane].refused)) == (batch, [])
    assert sent.receipts.keys() == batches.keys()
    wait_until(lambda: subject.seen() == all_once(batches), what="the commit to be seen")
    publisher.serve()
    assert publisher.unpublishable_kinds() == frozenset()
    publisher.close()


def test_a_turn_of_some_lanes_leaves_the_others_alone_and_after_a_close_the_next_publisher_goes_on(subject):
    """Closing twice is safe."""
    publisher = joined(subject)
    batches = subject.batches()
    some = {lane: batch[:2] for lane, batch in batches.items() if lane % 2}
    sent = publisher.publish(some)
    assert isinstance(sent, Completed)
    assert sent.receipts.keys() == some.keys()
    wait_until(lambda: subject.seen() == all_once(some), what="the commit to be seen")
    publisher.close()
    publisher.close()
    publisher = joined(subject)
    rest = {lane: batch[len(some.get(lane, ())) :] for lane, batch in batches.items()}
    assert isinstance(publisher.publish(rest), Completed)
    wait_until(lambda: subject.seen() == all_once(batches), what="the commit to be seen")
    publisher.close()


def test_a_turn_that_is_not_confirmed_is_not_published_at_all_and_comes_again(subject):
    publisher = joined(subject)
    batches = subject.batches()
    lost = LaneLost("another relay has it")
    sent = publisher.publish(batches, lambda _: {1: lost})
    assert isinstance(sent, Unconfirmed)
    assert sent.lanes == {1: lost}
    assert subject.seen() == {}
    if sent.publisher_unusable:
        publisher.close()
        publisher = joined(subject)
    assert isinstance(publisher.publish(batches, lambda _: {}), Completed)
    wait_until(lambda: subject.seen() == all_once(batches), what="the commit to be seen")
    publisher.close()
