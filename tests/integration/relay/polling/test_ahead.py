"""The polling source reads the next turn while one is published."""

from __future__ import annotations

import time
from collections.abc import Mapping

from polling_worker import Worker, drain, note, quick_marks, settle, workers
from support import backlog

from outbox import Event, Outbox
from outbox._app.choices import OnFailure
from outbox._clients.clock import uptime
from outbox.sandbox._process import patience
from relay.core.lease import Lease
from relay.core.ports import Batches, Claim, LaneLost, Receipt, UnsettledBatch
from relay.kafka.routing import Route, Router
from relay.operations.dead_letters import DeadLetters, Selection
from relay.polling.source import PollingSource

__all__ = ["quick_marks", "workers"]


def busy(worker: Worker, source: PollingSource, batch: int = 20) -> tuple[Batches, dict[int, list[int]]]:
    """A source in the middle of a drain, with the next turn asked for. Gives this turn, and what was before."""
    seen: dict[int, list[int]] = {}
    for _ in range(3):
        fetched = source.fetch(worker.limits(batch))
        note(seen, fetched.batches)
        settle(source, fetched.batches)
    fetched = source.fetch(worker.limits(batch))
    assert all(len(claims) == batch for claims in fetched.batches.values())
    assert source.session.ahead is not None
    return fetched.batches, seen


def test_a_lane_lost_while_the_next_turn_is_read_gives_none_of_it(workers):
    worker = workers()
    worker.insert(2000)
    there = worker.ids()
    source = worker.source()
    batches, seen = busy(worker, source)
    lost = worker.leases[1]
    worker.admin.execute("UPDATE outbox.lanes SET epoch = epoch + 1 WHERE lane = 1")
    note(seen, {lane: claims for lane, claims in batches.items() if lane != 1})
    settle(source, batches)
    fetched = source.fetch(worker.limits(20))
    assert list(fetched.failed) == [1]
    assert isinstance(fetched.failed[1], LaneLost)
    assert sorted(fetched.batches) == [0, 2, 3]
    note(seen, fetched.batches)
    settle(source, fetched.batches)
    source.drop(1)
    limits = {lane: limit for lane, limit in worker.limits(20).items() if lane != 1}
    rest = drain(source, limits)
    for lane in (0, 2, 3):
        assert seen[lane] + rest[lane] == there[lane]
    # Taken again, while the others are read ahead: from the first that is not settled.
    source.hold(Lease(1, lost.epoch + 1, 600.0, uptime(), owner=lost.owner))
    assert seen[1] + drain(source, worker.limits(20))[1] == there[1]
    assert backlog(worker.database.url) == 0


def test_a_lane_dropped_and_held_again_while_the_next_turn_is_read(workers):
    worker = workers()
    worker.insert(2000)
    there = worker.ids()
    source = worker.source()
    batches, seen = busy(worker, source)
    note(seen, {lane: claims for lane, claims in batches.items() if lane != 1})
    settle(source, {lane: claims for lane, claims in batches.items() if lane != 1})
    # What was in hand of it is given up: it was not published.
    source.drop(1)
    source.hold(worker.leases[1])
    rest = drain(source, worker.limits(20))
    assert {lane: seen[lane] + rest[lane] for lane in there} == there


def test_a_lane_held_again_while_the_next_turn_is_read_is_looked_at_first(workers):
    """Its lease had run out, and it has nothing in hand: meanwhile another holder may have recorded failures."""
    worker = workers()
    worker.insert(2000)
    worker.admin.execute("DELETE FROM outbox.events WHERE lane = 1")
    source = worker.source()
    batches, _ = busy(worker, source)
    settle(source, batches)
    source.hold(worker.leases[1])
    source.fetch(worker.limits(20))
    assert source.reader._lanes[1].failures_loaded


def drain_claims(source: PollingSource, limits: Mapping[int, int]) -> list[Claim]:
    claims: list[Claim] = []
    nothing = 0
    while nothing < 3:
        fetched = source.fetch(limits)
        assert fetched.failed == {}
        nothing = 0 if fetched.batches else nothing + 1
        claims += [claim for batch in fetched.batches.values() for claim in batch]
        settle(source, fetched.batches)
    assert source.flush(list(limits)) == {}
    return claims


def test_a_failure_recorded_while_the_next_turn_is_read_makes_its_key_wait(workers):
    worker = workers()
    # A few keys, so that there are later events of each in the turn that was read ahead.
    worker.insert(2000, keys=20)
    source = worker.source(attempts=5)
    batches, _ = busy(worker, source)
    lane = 2 if 2 in batches else next(iter(batches))
    bad = batches[lane][0]
    receipts = {
        each: Receipt(
            UnsettledBatch([claim for claim in claims if claim.aggregate_id != bad.aggregate_id]),
            [(bad, "bad")] if bad in claims else [],
        )
        for each, claims in batches.items()
    }
    assert source.settle(receipts) == {}
    rest = drain_claims(source, worker.limits(20))
    assert not [claim for claim in rest if claim.aggregate_id == bad.aggregate_id]
    left = worker.admin.execute("SELECT DISTINCT aggregate_id FROM outbox.events").fetchall()
    assert left == [(bad.aggregate_id,)]
    worker.admin.execute("UPDATE outbox.failures SET next_attempt_at = now()")
    after = [claim.position for claim in drain_claims(source, worker.limits(20))]
    assert after[0] == bad.position
    assert after == sorted(after)
    assert backlog(worker.database.url) == 0


def test_kinds_left_out_while_the_next_turn_is_read_come_again_in_order(workers):
    worker = workers()
    for first in range(1, 4001, 100):
        worker.insert(50, first=first)
        worker.insert(50, kind="Cart", first=first + 50)
    there = worker.ids()
    cart = {id_ for (id_,) in worker.admin.execute("SELECT id FROM outbox.events WHERE aggregate_type = 'Cart'")}
    source = worker.source()
    seen: dict[int, list[int]] = {}
    batches, seen = busy(worker, source)
    # The topic of the carts can't be written to: they are not sent.
    good = {lane: [claim for claim in claims if claim.aggregate_type == "Order"] for lane, claims in batches.items()}
    note(seen, good)
    source.settle({lane: Receipt(UnsettledBatch(claims), left_out=True) for lane, claims in good.items()})
    source.leave_out(frozenset({("Cart", False)}))
    while_left_out = drain(source, worker.limits(20))
    for lane, ids in while_left_out.items():
        assert not cart & set(ids)
        seen[lane] += ids
    assert {id_ for ids in worker.ids().values() for id_ in ids} <= cart
    source.leave_out(frozenset())
    rest = drain(source, worker.limits(20))
    for lane, ids in there.items():
        came = seen[lane] + rest[lane]
        assert sorted(came) == ids
        for kind in (cart, set(ids) - cart):
            assert [id_ for id_ in came if id_ in kind] == [id_ for id_ in ids if id_ in kind]
    assert backlog(worker.database.url) == 0


def test_what_a_person_puts_back_is_seen_in_the_middle_of_a_drain(workers, quick_marks):
    worker = workers()
    source = worker.source(Router({"Order": Route("orders", OnFailure.SKIP)}))
    with worker.database.connect() as connection:
        Outbox().add(connection, Event("Order", "skipped", "bad"))
    ((lane, (claim,)),) = source.fetch(worker.limits()).batches.items()
    source.settle({lane: Receipt(refused=[(claim, "bad")])})
    worker.insert(40_000)
    settle(source, source.fetch(worker.limits(4)).batches)
    # Until the source has seen that the lane has no failures any more, and reads ahead.
    while source.reader.has_failures(lane) or source.session.ahead is None:
        settle(source, source.fetch(worker.limits(4)).batches)
    assert len(DeadLetters(worker.admin, "outbox").retry(Selection())) == 1
    began = time.monotonic()
    while True:
        fetched = source.fetch(worker.limits(4))
        settle(source, fetched.batches)
        assert fetched.batches, "the drain is over"
        if any(each.position == claim.position for batch in fetched.batches.values() for each in batch):
            break
        assert time.monotonic() - began < 10 * patience()
