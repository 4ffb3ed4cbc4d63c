"""Workers that take lanes over, and a verdict on what is on the topic: what the tests of guards share."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
from invariants import Invariant
from takeover_support import Place, Worker

from relay.core.ports import Failed, LaneLost, Unconfirmed

_ROUNDS = 40


def verdict(place: Place) -> set[Invariant]:
    """Return which invariants are broken, once everything has been published that is going to be."""
    read = place.read()
    written = {f"k{n:04}" for n in range(place.count)}
    assert read.keys() <= written
    missing, left = written - read.keys(), set(place.tables.left())
    found = {Invariant.NO_LOSS} if missing - left else set()
    found |= {Invariant.EACH_IS_PUBLISHED} if missing & left else set()
    return found | ({Invariant.NO_DOUBLE} if any(count > 1 for count in read.values()) else set())


def work(worker: Worker) -> None:
    """Publish everything, as the loop does: lanes that are lost are dropped, others taken over again."""
    for _ in range(_ROUNDS):
        if not worker.leases or not worker.place.tables.left():
            return
        fetched = worker.source.fetch({lease.lane: 20 for lease in worker.leases})
        failed = dict(fetched.failed)
        confirm = worker.source.confirm if fetched.unconfirmed else None
        sent = worker.publisher.publish(fetched.batches, confirm) if fetched.batches else None
        if sent is not None:
            receipts = {} if isinstance(sent, Unconfirmed) else sent.receipts
            failed |= sent.lanes if isinstance(sent, Unconfirmed) else {}
            failed |= worker.source.settle(receipts)
            failed |= worker.source.flush(list(receipts))
            if isinstance(sent, Failed) or sent.publisher_unusable:
                worker.publisher.close()
                worker.publisher = worker.new_publisher()
                failed |= worker.join()
        drop_lost(worker, failed)
        if failed and worker.leases:
            drop_lost(worker, worker.join())
    raise AssertionError(f"{len(worker.place.tables.left())} events are left after {_ROUNDS} turns")


def drop_lost(worker: Worker, failed: Mapping[int, Exception]) -> None:
    lost = {lane for lane, error in failed.items() if isinstance(error, LaneLost)}
    for lane in lost:
        worker.source.drop(lane)
    worker.leases = [lease for lease in worker.leases if lease.lane not in lost]


Mutate = Callable[[pytest.MonkeyPatch], None]


def as_it_is(_: pytest.MonkeyPatch) -> None:
    pass
