"""Taking lanes over: workers with several lanes, and Kafka, which shuts the former ones out. On real servers."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import takeover_support
from confluent_kafka import KafkaError, KafkaException, Producer
from support import wait_until, write
from takeover_support import LANES, Worker, place

from outbox import Event
from relay.config import producer_options
from relay.core.lease import Lease
from relay.core.marker import StateLost
from relay.core.ports import BatchRefused, Completed, Failed, IdBusy, LaneLost, Sent
from relay.kafka.fencing import fence
from relay.kafka.takeover import own_ids
from relay.kafka.transactional import TransactionalPublisher
from relay.polling.takeover import RowTakeover

__all__ = ["place"]


def fenced(worker: Worker, sent: Sent) -> bool:
    """Return whether a publisher failed because it was shut out; librdkafka may name the reason a moment later."""
    if not isinstance(sent, Failed):
        return False
    if "another relay has taken a lane over" in str(sent.error):
        return True
    assert isinstance(worker.publisher, TransactionalPublisher)
    senders = worker.publisher._senders

    codes: set[int] = set()

    def named() -> bool:
        for sender in senders:
            try:
                # An abort that took too long goes on when it is called again, and only then meets the fence.
                sender.producer.abort_transaction(0.5)
            except KafkaException as error:
                # Its callback may not come any more.
                codes.update([error.args[0].code()] if error.args[0].fatal() else [])
            with contextlib.suppress(KafkaException):
                sender.producer.poll(0)
        codes.update(sender.fatal.code() for sender in senders if sender.fatal is not None)
        return bool(codes)

    wait_until(named, what=f"the reason of {sent.error}")
    return codes == {KafkaError._FENCED}


def test_a_turn_of_all_lanes_is_one_transaction_with_a_marker_for_each(place):
    worker = place.joined("a")
    assert worker.fenced == []
    assert place.tables.ids() == dict.fromkeys(range(LANES), worker.base_id)
    # The lanes' first markers, one transaction.
    assert (worker.publisher._transactions, place.tables.batches()) == (1, dict.fromkeys(range(LANES), 1))
    place.add()
    for turn in (2, 3):
        assert worker.turn(2) == 2 * LANES
        assert worker.publisher._transactions == turn
        assert place.tables.batches() == dict.fromkeys(range(LANES), turn)
        markers = place.state.last_markers(range(LANES))
        assert {lane: (found.batch, len(found.positions)) for lane, found in markers.items()} == dict.fromkeys(
            range(LANES), (turn, 2)
        )
    # A lane without events has no part in it.
    place.tables.run("DELETE FROM outbox.events WHERE lane <> 4")
    place.count = 0
    worker.turn(1)
    assert place.tables.batches() == {**dict.fromkeys(range(LANES), 3), 4: 4}


def test_two_producers_take_turns(place):
    """Each has an id of its own: the next turn does not wait for the markers of the one before."""
    worker = place.joined("a")
    place.add()
    first, second = own_ids(worker.base_id)
    # The first has written the first markers; it is the second's turn.
    fence(producer_options(place.settings), first)
    assert isinstance(worker.publish(1), Completed)
    assert fenced(worker, worker.publish(1))
    assert second != first


def test_a_worker_that_goes_on_under_new_ids_takes_its_lanes_over_from_itself_and_fences_nobody(place):
    place.add()
    worker = place.joined("a")
    worker.turn(1)
    # Published and not settled: the markers know.
    worker.unsettled()
    worker.renew("b")
    assert worker.join() == {}
    assert worker.fenced == []
    assert place.tables.ids() == dict.fromkeys(range(LANES), worker.base_id)
    assert worker.base_id.endswith("b")
    worker.drain()
    assert place.all_once()
    heir = place.joined("c")
    assert heir.fenced == own_ids(worker.base_id)


@pytest.mark.parametrize("turns", [0, 1])
def test_a_worker_whose_lanes_were_taken_can_write_nothing_more_whoever_of_its_producers_is_at_hand(place, turns):
    place.add()
    former = place.joined("a")
    for _ in range(turns):
        former.turn(1)
    # Published and not settled; and another turn in hand.
    former.unsettled()
    in_hand = former.in_hand()
    before = place.tables.left()
    heir = place.worker("b")
    assert {lease.former_id for lease in heir.leases} == {former.base_id}
    assert heir.join() == {}
    # Once for all lanes, and both.
    assert heir.fenced == own_ids(former.base_id)
    assert place.tables.ids() == dict.fromkeys(range(LANES), heir.base_id)
    assert place.tables.left() == before
    assert fenced(former, former.publisher.publish(in_hand))
    heir.drain()
    assert place.all_once()
    # It begins anew, and finds that it has no lanes.
    former.publisher = former.new_publisher()
    lost = former.join()
    assert lost.keys() == set(range(LANES))
    assert {type(error) for error in lost.values()} == {LaneLost}


def test_an_open_transaction_of_the_former_worker_is_aborted(place):
    place.add()
    former = place.joined("a")
    sender = former.publisher._senders[1]
    sender.producer.begin_transaction()
    sender.producer.produce(place.topic, b"{}", "k0000")
    sender.producer.produce(place.state.name, b"{}", b"marker", partition=3)
    assert sender.producer.flush(30) == 0
    heir = place.joined("b", [1, 3])
    with pytest.raises(KafkaException):
        sender.producer.commit_transaction(30)
    heir.turn(10)
    assert place.read()["k0000"] <= 1


def test_new_producers_of_a_worker_write_no_row_of_lanes_that_are_settled(place):
    """After each turn that fails: of 256 lanes, it would be a transaction each."""
    place.add(120)
    worker = place.joined("a")
    worker.turn(2)
    versions = "SELECT lane, xmin::text, ctid::text FROM outbox.lanes ORDER BY lane"
    before = place.tables.run(versions)
    worker.publisher.close()
    worker.publisher = worker.new_publisher()
    assert worker.join() == {}
    assert place.tables.run(versions) == before
    worker.turn(2)
    # Committed, and nobody told the source: the markers are ahead, and settle their rows.
    assert isinstance(worker.publish(2), Completed)
    left = place.tables.left()
    worker.publisher.close()
    worker.publisher = worker.new_publisher()
    assert worker.join() == {}
    assert len(place.tables.left()) == len(left) - 2 * LANES
    worker.drain()
    assert place.all_once()


def test_a_worker_that_loses_some_lanes_goes_on_with_the_others(place):
    """Its turn is aborted with all lanes in it; it is read again, without those that were taken."""
    place.add(120)
    former = place.joined("a")
    former.turn(2)
    in_hand = former.in_hand()
    heir = place.joined("b", [2, 5])
    assert isinstance(former.publisher.publish(in_hand), Failed)
    former.publisher = former.new_publisher()
    lost = former.join()
    assert {lane: type(error) for lane, error in lost.items()} == {2: LaneLost, 5: LaneLost}
    former.leases = [lease for lease in former.leases if lease.lane not in lost]
    for lane in lost:
        former.source.drop(lane)
    # Its own rows name itself: there is nobody to fence, and the heir least of all.
    assert former.fenced == []
    for worker in (heir, former):
        worker.turn(1000)
    assert place.all_once()
    base = {2: heir.base_id, 5: heir.base_id}
    assert place.tables.ids() == {lane: base.get(lane, former.base_id) for lane in range(LANES)}


@pytest.mark.parametrize("known", [True, False])
def test_a_failover_loses_all_that_the_row_said_of_the_writer(place, known):
    """The row is as its holder before had released it. The last marker says who was there since, and may still be."""
    place.add(120)
    if known:
        before = place.joined("z")
        before.turn(1)
        place.tables.table.release(before.leases, clean=range(LANES))
    place.tables.save()
    former = place.joined("a")
    former.unsettled()
    in_hand = former.source.fetch(dict.fromkeys(range(LANES), 2)).batches
    place.tables.restore()
    heir = place.worker("b")
    assert [lease.former_id for lease in heir.leases] == [None] * LANES
    assert heir.join() == {}
    assert heir.fenced == own_ids(former.base_id)
    heir.drain()
    assert fenced(former, former.publisher.publish(in_hand))
    assert place.all_once()


def test_lanes_that_were_let_go_clean_name_nobody_and_the_others_still_do(place):
    place.add()
    former = place.joined("a")
    former.turn(2)
    place.tables.table.release(former.leases, clean=[0, 1, 2])
    assert place.tables.ids() == {lane: None if lane < 3 else former.base_id for lane in range(LANES)}
    heir = place.joined("b", [0, 1, 2])
    assert heir.fenced == []
    others = place.joined("c", [3, 4, 5])
    assert others.fenced == own_ids(former.base_id)
    for worker in (heir, others):
        worker.turn(1000)
    assert place.all_once()


def test_only_lanes_with_an_unsettled_batch_take_a_transaction_of_their_own(place, monkeypatch):
    """With hundreds of lanes one for each would take seconds, in which nothing is published."""
    worker = place.joined("a")
    place.add()
    worker.turn(1)
    place.tables.run("DELETE FROM outbox.events WHERE lane <> 4")
    place.count = 0
    worker.unsettled()
    adopted: list[int] = []
    adopt = RowTakeover.adopt

    def counting(self: RowTakeover, lease: Lease, *rest: Any) -> Any:
        adopted.append(lease.lane)
        return adopt(self, lease, *rest)

    monkeypatch.setattr(RowTakeover, "adopt", counting)
    heir = place.joined("b")
    assert adopted == [4]
    assert place.tables.ids() == dict.fromkeys(range(LANES), heir.base_id)


def test_an_id_that_the_broker_lends_to_nobody_holds_up_its_own_lanes_only(place, monkeypatch):
    """Its last transaction has a partition without a leader, say; see tests/acceptance/test_stuck_topics.py."""
    place.add()
    former = [place.worker(name, lanes) for name, lanes in (("a", [0, 1]), ("b", [2, 3]), ("c", [4, 5]))]
    for worker in former:
        assert worker.join() == {}
        assert isinstance(worker.publish(2), Completed)
    heir = place.worker("d")
    busy, *others = [own_ids(worker.base_id) for worker in former]

    def fence_all_but_busy(options, transactional_id):
        if transactional_id in busy:
            raise IdBusy("its last transaction can't be ended yet")
        fence(options, transactional_id)

    with monkeypatch.context() as patch:
        patch.setattr(takeover_support, "fence", fence_all_but_busy)
        failed = heir.join()
    assert {lane: type(error) for lane, error in failed.items()} == {0: IdBusy, 1: IdBusy}
    # Each takes its time: one is enough to know.
    assert heir.fenced == [busy[0], *others[0], *others[1]]
    assert heir.publisher.join(heir.leases[:2]) == {}
    assert heir.fenced[5:] == busy
    heir.drain()
    assert place.all_once()


def test_an_at_least_once_worker_fences_the_lanes_that_name_an_id_and_settles_what_was_committed(place):
    place.add()
    former = place.joined("a", [0, 1, 2])
    former.turn(1)
    former.unsettled()
    in_hand = former.in_hand()
    plain = place.joined("plain", exact=False)
    assert plain.fenced == own_ids(former.base_id)
    # Nobody need fence a worker without transactions.
    assert place.tables.ids() == dict.fromkeys(range(LANES))
    assert isinstance(former.publisher.publish(in_hand), Failed)
    plain.turn(5)
    # It counts no batches: what stands there is the former worker's.
    assert place.tables.batches() == {lane: 3 if lane < 3 else None for lane in range(LANES)}
    # And back again.
    exact = place.joined("b")
    assert exact.fenced == []
    exact.drain()
    assert place.all_once()
    assert place.tables.ids() == dict.fromkeys(range(LANES), exact.base_id)


def test_a_lane_whose_marker_is_lost_stops_alone(place):
    place.add()
    former = place.joined("a")
    former.turn(2)
    place.tables.run("UPDATE outbox.lanes SET last_batch = 40 WHERE lane = 3")
    heir = place.worker("b")
    failed = heir.join()
    assert {lane: type(error) for lane, error in failed.items()} == {3: StateLost}
    assert place.tables.ids() == {lane: former.base_id if lane == 3 else heir.base_id for lane in range(LANES)}
    heir.leases = [lease for lease in heir.leases if lease.lane != 3]
    heir.turn(1000)
    assert place.tables.run("SELECT DISTINCT lane FROM outbox.events") == [(3,)]


def test_the_relay_of_a_primary_from_before_a_failover_leaves_the_other_one_alone(place):
    """It stops, and tries again for as long as it runs: it must not fence the one that goes on each time."""
    place.add()
    after = place.joined("a")
    for lane, marker in after.publisher._joined.items():
        after.publisher._joined[lane] = replace(marker, timeline=2)
    after.unsettled(1)
    in_hand = after.source.fetch({lease.lane: 1 for lease in after.leases}).batches
    # In this database, which is not the one that goes on.
    before = place.worker("b")
    failed = before.join()
    assert failed.keys() == set(range(LANES))
    assert all("the primary from before a failover" in str(error) for error in failed.values())
    assert before.fenced == []
    assert isinstance(after.publisher.publish(in_hand), Completed)


@pytest.mark.parametrize("served", [True, False])
def test_a_relay_goes_on_after_a_refusal_and_another_one_takes_its_lanes(place, served):
    """Its new producer is not fenced, even if the other relay has fenced the id before: it finds its lanes gone."""
    small = place.kafka.create_topic(f"{place.kafka.name('small')}-events", 1, {"max.message.bytes": "2000"})
    former = place.joined("a")
    place.add()
    write(place.tables.url, [Event(small.removesuffix("-events"), "large", "T", os.urandom(4000))])
    [(lane, large)] = place.tables.run("SELECT lane, id FROM outbox.events WHERE aggregate_id = 'large'")
    sent = former.publish(1000)
    assert isinstance(sent, Failed)
    assert (type(sent.error), list(sent.blamed), sent.publisher_unusable) == (BatchRefused, [lane], False)
    # The transaction of all lanes is aborted: readers see nothing of it.
    assert place.read() == Counter()
    assert place.tables.batches() == dict.fromkeys(range(LANES), 1)
    # It was alone in its request, so it is named.
    assert [(n, [claim.position for claim, _ in each.refused], each.count) for n, each in sent.receipts.items()] == [
        (lane, [large], 1)
    ]
    former.source.settle(sent.receipts)
    limits = {lease.lane: 3 for lease in former.leases}
    if served:
        # The other producer's turn, and then the new one's, without a join.
        for _ in range(3):
            former.publisher.serve()
            fetched = former.source.fetch(limits)
            done = former.publisher.publish(fetched.batches, former.source.confirm if fetched.unconfirmed else None)
            assert isinstance(done, Completed)
            former.source.settle(done.receipts)
    heir = place.joined("b")
    assert heir.fenced == own_ids(former.base_id)
    former.publisher._transactions += 1
    former.publisher.serve()
    fetched = former.source.fetch(limits)
    lost = former.source.confirm(time.monotonic() + 30) if fetched.unconfirmed else fetched.failed
    assert {type(error) for error in lost.values()} == {LaneLost}
    assert lost.keys() >= fetched.batches.keys() if fetched.unconfirmed else not fetched.batches
    place.tables.run("DELETE FROM outbox.events WHERE aggregate_id = 'large'")
    heir.drain()
    assert place.all_once()


@pytest.mark.parametrize("exact", [True, False], ids=["exactly-once", "at-least-once"])
def test_of_a_turn_that_failed_no_producer_is_left_whoever_remembers_the_publisher(place, exact):
    """As the traceback of the failure does, until the collector comes. Each producer has threads and connections, and
    while a broker is away every turn makes new ones.
    """
    worker = place.joined("a", exact=exact)
    place.add()
    publisher = worker.publisher
    senders = list(publisher._senders) if exact else [publisher._sender]
    producers = [sender.producer for sender in senders]
    publisher._delivery_seconds = 0.0
    assert isinstance(worker.publish(), Failed)
    publisher.close()
    alone = [Producer({"bootstrap.servers": "127.0.0.1:1", "log_level": 0})]
    assert {sys.getrefcount(each) for each in producers} == {sys.getrefcount(each) for each in alone}
