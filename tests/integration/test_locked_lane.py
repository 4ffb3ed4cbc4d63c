"""A lane's row that another session has locked holds up that lane, and no other of the worker."""

from __future__ import annotations

import psycopg
import pytest

from outbox import Event, Outbox
from relay.database import Connector
from relay.kafka.routing import Router
from relay.lanes import LaneTable
from relay.polling.source import PollingSource
from relay.ports import PUBLISHED, LaneBusy, Receipt
from relay.retries import FailurePolicy, Failures


@pytest.fixture
def source(outbox_postgres):
    source = PollingSource(
        Connector(outbox_postgres.url, "test"), "outbox", Failures("outbox", FailurePolicy(), Router())
    )
    yield source
    source.close()


def test_a_locked_lane_waits_and_the_others_are_read_and_settled(outbox_postgres, source):
    leases = LaneTable(outbox_postgres.connect(autocommit=True), "outbox", "me", "0", 30.0).acquire(4)
    for lease in leases:
        source.hold(lease)
    with psycopg.connect(outbox_postgres.url) as connection:
        Outbox().add_many(connection, [Event("Order", f"k{n}", "T", {"n": n}) for n in range(400)])
    limits = dict.fromkeys(range(4), 1000)
    first = source.fetch(limits)
    assert sorted(first.batches) == [0, 1, 2, 3]
    source.settle({lane: Receipt([(claim, PUBLISHED) for claim in claims]) for lane, claims in first.batches.items()})
    with psycopg.connect(outbox_postgres.url) as other:
        other.execute("SELECT FROM outbox.lanes WHERE lane = 1 FOR UPDATE")
        second = source.fetch(limits)
        assert second.batches == {}
        assert isinstance(second.failed[1], LaneBusy)
        left = other.execute("SELECT DISTINCT lane FROM outbox.events").fetchall()
        assert left == [(1,)]
        with pytest.raises(LaneBusy):
            source.store.adopt(leases[1], None, "own")
        assert source.settlement.unsettled == [1]
    third = source.fetch(limits)
    assert (third.batches, third.failed) == ({}, {})
    with psycopg.connect(outbox_postgres.url) as connection:
        assert connection.execute("SELECT count(*) FROM outbox.events").fetchone() == (0,)
