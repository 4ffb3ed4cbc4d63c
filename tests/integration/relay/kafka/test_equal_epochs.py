"""Two relays that hold a lane under the same epoch, because a failover has lost the commit of the first take-over."""

from __future__ import annotations

import pytest
from stream_bench import outboxed
from takeover_support import LANES, Worker, place

from relay.core.ports import Completed, LaneLost
from relay.lanes import LaneTable

__all__ = ["outboxed", "place"]


class Both:
    """The former holder has published and settled a turn; then its take-over is lost, and its heir takes the lanes."""

    def __init__(self, place, *, exact: bool) -> None:
        tables = place.tables
        self.place = place
        self.database = LaneTable(tables.table._connection, "outbox", "former", "0", 600.0)
        place.add()
        tables.save()
        self.former = Worker(place, "a", tables.acquire(range(LANES), self.database), exact=exact)
        assert self.former.join() == {}
        self.former.turn(1)
        # The turns are not lost: at-least-once would repeat them, and exactly-once stops a lane for them.
        tables.run("DROP TABLE saved_events")
        tables.run(
            "UPDATE outbox.lanes AS l SET epoch = s.epoch, owner = NULL FROM saved_lanes AS s WHERE s.lane = l.lane"
        )
        self.heirs = LaneTable(tables.table._connection, "outbox", "heir", "0", 600.0)
        self.heir = Worker(place, "b", tables.acquire(range(LANES), self.heirs), exact=exact)
        assert [lease.epoch for lease in self.heir.leases] == [lease.epoch for lease in self.former.leases]


@pytest.mark.parametrize("exact", [False, True], ids=["at-least-once", "exactly-once"])
def test_the_former_holder_loses_the_lanes_and_the_heir_publishes_all(place, exact):
    both = Both(place, exact=exact)
    former, heir = both.former, both.heir
    assert both.database.renew(former.leases).lost == former.leases
    assert both.heirs.renew(heir.leases).lost == []
    assert heir.join() == {}
    heir.turn(1)
    fetched = former.source.fetch({lease.lane: 3 for lease in former.leases})
    lost = dict(fetched.failed)
    if fetched.unconfirmed:
        sent = former.publisher.publish(fetched.batches, former.source.confirm)
        assert not isinstance(sent, Completed)
        lost |= former.source.settlement.collect() | dict(getattr(sent, "lanes", {}))
    assert {type(error) for error in lost.values()} == {LaneLost}
    assert sorted(lost) == list(range(LANES))
    assert "another relay has taken the lane" in str(lost[0])
    assert "former" in str(lost[0])
    # Nothing of the heir's is released, and a take-over does not bring the lanes back.
    both.database.release(former.leases, clean=range(LANES))
    assert set(place.tables.run("SELECT owner FROM outbox.lanes")) == {("heir",)}
    if exact:
        former.publisher.close()
        former.publisher = former.new_publisher()
        assert {type(error) for error in former.join().values()} == {LaneLost}
        heir.publisher.close()
        heir.publisher = heir.new_publisher()
        assert heir.join() == {}
    heir.drain()
    assert place.all_once()


@pytest.mark.parametrize("exact", [False, True], ids=["at-least-once", "exactly-once"])
def test_what_the_former_holder_has_just_published_is_not_settled_by_it(place, exact):
    """It had a turn in hand while Postgres failed over."""
    both = Both(place, exact=exact)
    former = both.former
    place.tables.run("UPDATE outbox.lanes SET owner = 'former'")
    sent = former.publish(2)
    assert isinstance(sent, Completed)
    place.tables.run("UPDATE outbox.lanes SET owner = 'heir'")
    before = place.tables.left()
    assert former.source.settle(sent.receipts) == {}
    failed = former.source.flush(range(LANES))
    assert sorted(failed) == list(range(LANES))
    assert {type(error) for error in failed.values()} == {LaneLost}
    assert place.tables.left() == before


@pytest.mark.parametrize("once", [False, True], ids=["at-least-once", "exactly-once"])
def test_a_relay_of_the_wal_loses_its_lanes_to_the_heir(outboxed, once):
    box = outboxed(2)
    box.relay(once=once)
    box.streams()
    box.add(*[f"{key}{n}" for n in range(1, 4) for key in "abcdefgh"])
    box.until(lambda: len(box.kafka.names()) == 24, "the events before")
    leases = box.held.leases
    box.admin.execute("UPDATE outbox.lanes SET owner = 'heir', lease_until = clock_timestamp() + '1h'")
    renewing = LaneTable(box.admin, "outbox", "me", "0", 600.0, "wal")
    assert renewing.renew(leases).lost == leases
    seen = box.rows("SELECT * FROM outbox.streams")
    box.add(*[f"{key}{n}" for n in range(4, 7) for key in "abcdefgh"])
    box.until(lambda: not box.held.leases, "the relay to let the lanes go")
    assert {gone.lost for gone in box.held.take_let_go()} == {True}
    lost = [error for _, error in box.seen.errors if isinstance(error, LaneLost)]
    assert "another relay has taken the lane" in str(lost[0])
    # Its slot's position is the heir's to write, and so are the lanes' rows.
    assert box.rows("SELECT * FROM outbox.streams") == seen
    assert box.rows("SELECT DISTINCT owner FROM outbox.lanes") == [("heir",)]
