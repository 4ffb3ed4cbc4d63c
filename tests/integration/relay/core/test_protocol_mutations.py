"""Guards of the protocol, each taken out of the real code once: on real servers, in an order of steps set by hand.

Each scenario is run with the code as it is, which keeps the promise, here or in another test, and with a mutation,
which must break just the invariant of docs/explanation/protocol.tla that is named: an event is on the topic more than
once, or it is on no topic, and its row is gone, or passed by. Mutations that need processes, crashes or time are in
acceptance/test_mutations.py; the last two are in settle/test_late_commits.py. Others: tests/mutants/table.py.

| mutation                | the mistake                                                                           |
|-------------------------|---------------------------------------------------------------------------------------|
| no_fence                | taking over does not fence the former worker                                           |
| fence_first_only        | only the first of its two transactional ids is fenced                                  |
| id_before_fence         | acquiring a lane writes the own id into its row, before the former one is fenced       |
| id_not_checked          | settling does not expect the own id in the lane's row                                  |
| batch_not_expected      | settling does not expect last_batch                                                    |
| no_epoch                | no statement asks whose lane it is: leases are not read after producers were made anew |
| marker_remembered       | after an unknown commit the worker goes on from the marker it remembers                |
| adopt_without_settling  | taking over does not delete the marker's rows                                          |
| no_marker               | a turn is committed without its markers                                                |
| null_while_open         | a lane is released as clean while the worker may still commit events of it             |
| ack_before_it_came      | what is queued counts as acknowledged                                                  |
| mark_past_a_transaction | the low-water mark does not wait for open transactions                                 |
| used_again              | after a commit that was not clean the worker goes on with the same producers           |
| first_markers_unseen    | whether the commit of the lanes' first markers was clean is not looked at              |
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import psycopg
import pytest
from guard_support import Mutate, as_it_is, drop_lost, verdict, work
from invariants import Invariant
from takeover_support import LANES, Place, place

from outbox import Event, Outbox
from relay import lanes as lanes_module
from relay.core.lease import Lease
from relay.core.ports import Completed
from relay.kafka import takeover
from relay.kafka.producer import BatchProducer
from relay.kafka.takeover import Takeover
from relay.kafka.transactional import TransactionalPublisher
from relay.polling import low_water_mark
from relay.polling.reader import LaneReader
from relay.polling.takeover import RowTakeover
from relay.settle import statements

__all__ = ["place"]


# The scenarios


def overtaken(place: Place, turns: int) -> None:
    """A worker has read a turn and sleeps; another one takes its lanes; then it sends what it has in hand."""
    former = place.joined("a")
    for _ in range(turns):
        former.turn(1)
    batches = former.in_hand()
    heir = place.joined("b")
    work(heir)
    former.publisher.publish(batches)


def overtaken_with_the_first_producer(place: Place) -> None:
    overtaken(place, 1)


def overtaken_with_the_second_producer(place: Place) -> None:
    overtaken(place, 0)


def a_taker_dies(place: Place) -> None:
    """As above; between the two, one acquires the lanes and dies at once. No marker names the sleeper."""
    before = place.joined("z")
    before.turn(1)
    place.tables.table.release(before.leases, clean=range(LANES))
    former = place.joined("a")
    batches = former.in_hand()
    place.tables.acquire(range(LANES))
    work(place.joined("c"))
    former.publisher.publish(batches)


def the_row_forgets_the_id(place: Place) -> None:
    """A failover loses the commit that wrote the worker's id; the worker goes on, and is overtaken then."""
    former = place.joined("a")
    place.tables.run("UPDATE outbox.lanes SET transactional_id = NULL")
    batches = former.in_hand()
    work(place.joined("b"))
    if batches:
        former.publisher.publish(batches)


def postgres_forgets_a_settlement(place: Place) -> None:
    """Behind a pooler Postgres goes over to a standby that lacks a commit, and the worker does not notice."""
    worker = place.joined("a")
    worker.turn(1)
    place.tables.save()
    worker.turn(1)
    place.tables.restore()
    work(worker)


def a_zombie_begins_anew(place: Place) -> None:
    """A worker is fenced, makes new producers and goes on, while its heir has a turn in hand."""
    former, heir = place.joined("a"), place.joined("b")
    batches = heir.in_hand()
    former.publisher.close()
    former.publisher = former.new_publisher()
    drop_lost(former, former.join())
    work(former)
    sent = heir.publisher.publish(batches)
    if place.tables.left():
        assert heir.source.settle(sent.receipts) == {}
        work(heir)


def an_answer_is_lost(place: Place) -> None:
    """A commit's answer does not arrive: with new producers the worker finds out what became of it."""
    worker = place.joined("a")
    assert isinstance(worker.publisher.publish(worker.in_hand()), Completed)
    worker.publisher.close()
    worker.publisher = worker.new_publisher()
    assert worker.join() == {}
    work(worker)


def a_kill_after_the_commit(place: Place) -> None:
    """A turn is committed, and its worker dies before it has settled it."""
    former = place.joined("a")
    assert isinstance(former.publisher.publish(former.in_hand()), Completed)
    work(place.joined("b"))


def lanes_are_let_go_in_trouble(place: Place) -> None:
    """A worker gives its lanes up while it does not know whether its transaction has ended."""
    former = place.joined("a")
    batches = former.in_hand()
    place.tables.table.release(former.leases)
    work(place.joined("b"))
    former.publisher.publish(batches)


def a_kill_after_settling(place: Place) -> None:
    """At least once: the rows of a turn go, and then the worker dies with whatever is still in its producer."""
    place.settings.kafka["linger.ms"] = "600000"
    worker = place.joined("a", exact=False)
    sent = worker.publish(20)
    assert isinstance(sent, Completed)
    worker.source.settle(sent.receipts)
    worker.publisher.close()
    assert worker.source.flush(list(sent.receipts)) == {}
    del place.settings.kafka["linger.ms"]
    work(place.joined("b", exact=False))


def a_late_commit(place: Place) -> None:
    """A transaction has drawn ids and is open; others commit and are published for a while; then it commits."""
    worker = place.joined("a")
    work(worker)
    with psycopg.connect(place.tables.url) as late:
        keys = [f"k{place.count + n:04}" for n in range(20)]
        Outbox().add_many(late, [Event(place.kind, key, "T", {}) for key in keys])
        place.count += len(keys)
        for _ in range(12):
            place.add()
            work(worker)
        late.commit()
    found = False
    for _ in range(5):
        found = bool(worker.turn(20)) or found
    if found:
        work(worker)


# The mutations


def no_fence(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Takeover, "_fence_former", lambda *_: {})


def fence_first_only(patch: pytest.MonkeyPatch) -> None:
    real = takeover.own_ids
    patch.setattr(takeover, "own_ids", lambda base: real(base)[:1])


def replaced(patch: pytest.MonkeyPatch, module: Any, name: str, old: str, new: str) -> None:
    text = getattr(module, name)
    assert old in text, f"{name} has changed: what is the guard now?"
    patch.setattr(module, name, text.replace(old, new))


def id_before_fence(patch: pytest.MonkeyPatch) -> None:
    replaced(patch, lanes_module, "_ACQUIRE", "SET owner", "SET transactional_id = 'the-takers', owner")


def id_not_checked(patch: pytest.MonkeyPatch) -> None:
    replaced(patch, statements, "_SETTLING", "AND (m.own_id IS NULL OR l.transactional_id = m.own_id)", "")


def batch_not_expected(patch: pytest.MonkeyPatch) -> None:
    replaced(patch, statements, "_SETTLING", "(m.expected IS NULL OR l.last_batch = m.expected)", "true")


def no_epoch(patch: pytest.MonkeyPatch) -> None:
    replaced(patch, statements, "OURS", " AND l.epoch = m.epoch AND l.owner = %(owner)s", "")
    # A second guard behind the first one: the row names the heir.
    id_not_checked(patch)


def marker_remembered(patch: pytest.MonkeyPatch) -> None:
    real = TransactionalPublisher.join
    remembered: dict[tuple[str, int], Any] = {}

    def join(self: Any, leases: Collection[Lease]) -> Mapping[int, Exception]:
        if all((self._base_id, lease.lane) in remembered for lease in leases):
            self._joined = {lease.lane: replace(remembered[self._base_id, lease.lane]) for lease in leases}
            return {}
        failed = real(self, leases)
        remembered.update({(self._base_id, lane): replace(joined) for lane, joined in self._joined.items()})
        return failed

    patch.setattr(TransactionalPublisher, "join", join)


def adopt_without_settling(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RowTakeover, "_settle_marker", lambda *_: None)


def no_marker(patch: pytest.MonkeyPatch) -> None:
    real = TransactionalPublisher._commit

    def commit(self: Any, sender: Any, markers: Mapping[int, Any], *rest: Any) -> None:
        first = not sender.sent
        real(self, sender, markers if first else {}, *rest)

    patch.setattr(TransactionalPublisher, "_commit", commit)


def null_while_open(patch: pytest.MonkeyPatch) -> None:
    replaced(patch, lanes_module, "_RELEASE", "l.lane = ANY(%(clean)s::smallint[])", "true")


def ack_before_it_came(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BatchProducer, "drain", lambda *_: None)


def mark_past_a_transaction(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LaneReader, "_xmin", lambda _: 2**62)


# As they are, the others run in these tests: both of overtaken, an_answer_is_lost and a_kill_after_the_commit in
# kafka/test_takeover.py, a_late_commit in polling/test_low_water_mark.py.
CASES: list[tuple[Callable[[Place], None], Mutate, set[Invariant]]] = [
    (overtaken_with_the_first_producer, no_fence, {Invariant.NO_DOUBLE}),
    (overtaken_with_the_second_producer, fence_first_only, {Invariant.NO_DOUBLE}),
    (a_taker_dies, as_it_is, set()),
    (a_taker_dies, id_before_fence, {Invariant.NO_DOUBLE}),
    (the_row_forgets_the_id, as_it_is, set()),
    (the_row_forgets_the_id, id_not_checked, {Invariant.NO_DOUBLE}),
    (postgres_forgets_a_settlement, as_it_is, set()),
    (postgres_forgets_a_settlement, batch_not_expected, {Invariant.NO_DOUBLE}),
    (a_zombie_begins_anew, as_it_is, set()),
    (a_zombie_begins_anew, no_epoch, {Invariant.NO_DOUBLE}),
    (an_answer_is_lost, marker_remembered, {Invariant.NO_DOUBLE}),
    (a_kill_after_the_commit, adopt_without_settling, {Invariant.NO_DOUBLE}),
    (a_kill_after_the_commit, no_marker, {Invariant.NO_DOUBLE}),
    (lanes_are_let_go_in_trouble, as_it_is, set()),
    (lanes_are_let_go_in_trouble, null_while_open, {Invariant.NO_DOUBLE}),
    (a_kill_after_settling, as_it_is, set()),
    (a_kill_after_settling, ack_before_it_came, {Invariant.NO_LOSS}),
    (a_late_commit, mark_past_a_transaction, {Invariant.EACH_IS_PUBLISHED}),
]


@pytest.mark.parametrize(
    ("scenario", "mutate", "expected"),
    CASES,
    ids=[f"{scenario.__name__}-{mutate.__name__}" for scenario, mutate, _ in CASES],
)
def test_the_guard_makes_the_difference(place, monkeypatch, scenario, mutate, expected):
    # The waits between the steps of a low-water mark are left out.
    monkeypatch.setattr(low_water_mark, "_LOOK_SECONDS", 0.0)
    monkeypatch.setattr(low_water_mark, "_SETTLE_SECONDS", 0.0)
    mutate(monkeypatch)
    place.add()
    scenario(place)
    assert verdict(place) == expected
