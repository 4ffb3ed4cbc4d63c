"""A lane's row that another session has locked holds up that lane, and no other of the worker."""

from __future__ import annotations

import psycopg
import pytest
from polling_support import add, polling, table
from support import backlog

from outbox._app.settings import FailureSettings
from relay.core.lease import LOCKED_SECONDS
from relay.core.ports import Claim, Fetched, LaneLocked, Receipt, UnsettledBatch
from relay.database import Connector
from relay.kafka.routing import Router
from relay.kafka.takeover import Takeover
from relay.polling.at_most_once import AtMostOnceSource
from relay.settle.retries import Failures

KEYS = [f"k{n}" for n in range(400)]


def test_a_locked_lane_waits_and_the_others_are_read_and_settled(outbox_postgres):
    leases = table(outbox_postgres, "me").acquire(4)
    source = polling(outbox_postgres.url, leases)
    add(outbox_postgres, *KEYS)
    limits = dict.fromkeys(range(4), 1000)
    first = source.fetch(limits)
    assert sorted(first.batches) == [0, 1, 2, 3]
    source.settle({lane: Receipt(UnsettledBatch(claims)) for lane, claims in first.batches.items()})
    with psycopg.connect(outbox_postgres.url) as other:
        other.execute("SELECT FROM outbox.lanes WHERE lane = 1 FOR UPDATE")
        second = source.fetch(limits)
        assert second.batches == {}
        assert isinstance(second.failed[1], LaneLocked)
        left = other.execute("SELECT DISTINCT lane FROM outbox.events").fetchall()
        assert left == [(1,)]
        with pytest.raises(LaneLocked):
            source.store.adopt(leases[1], None, "own")
        assert source.settlement.unsettled_lanes == [1]
    third = source.fetch(limits)
    assert (third.batches, third.failed) == ({}, {})
    assert backlog(outbox_postgres.url) == 0
    source.close()


def test_a_lane_that_is_locked_for_a_moment_is_taken_over_and_one_that_stays_locked_is_not(
    outbox_postgres, monkeypatch
):
    leases = table(outbox_postgres, "me").acquire(4)
    source = polling(outbox_postgres.url, leases)
    store = source.store
    store.identity(leases)
    one, other = psycopg.connect(outbox_postgres.url), psycopg.connect(outbox_postgres.url)
    one.execute("SELECT FROM outbox.lanes WHERE lane = 1 FOR UPDATE")
    other.execute("SELECT FROM outbox.lanes WHERE lane = 2 FOR UPDATE")
    adopt, refused = store.adopt, []

    def observed(lease, *given):
        try:
            return adopt(lease, *given)
        except LaneLocked:
            refused.append(lease.lane)
            one.rollback()
            raise

    monkeypatch.setattr(store, "adopt", observed)
    taken = Takeover(store, None, None, "own").adopt(leases, dict.fromkeys(range(4)))
    assert sorted(taken.markers) == [0, 1, 3]
    assert taken.failed.keys() == {2}
    assert isinstance(taken.failed[2], LaneLocked)
    assert refused == [1] + [2] * (1 + len(LOCKED_SECONDS))
    one.close()
    other.close()
    source.close()


def test_at_most_once_the_rows_of_a_locked_lane_stay_and_are_sent_when_it_is_free(outbox_postgres):
    """They are deleted before they are sent: what has not been handed out must not be taken for sent."""
    lost: list[tuple[int, int]] = []
    other = psycopg.connect(outbox_postgres.url)
    turns = 0

    def must_stay(_claim: Claim) -> bool:
        # Asked when the second turn is read, before its rows are deleted.
        if turns == 2:
            other.execute("SELECT FROM outbox.lanes WHERE lane = 1 FOR UPDATE")
        return False

    once = AtMostOnceSource(
        Connector(outbox_postgres.url, "test"),
        "outbox",
        Failures("outbox", FailureSettings(), Router()),
        on_lost=lambda *what: lost.append(what),
        must_stay=must_stay,
    )
    for lease in table(outbox_postgres, "me").acquire(4):
        once.hold(lease)
    add(outbox_postgres, *KEYS)
    limits = dict.fromkeys(range(4), 30)
    sent: dict[int, list[int]] = {lane: [] for lane in range(4)}

    def turn() -> Fetched:
        nonlocal turns
        turns += 1
        fetched = once.fetch(limits)
        for lane, claims in fetched.batches.items():
            sent[lane] += [claim.position for claim in claims]
        once.settle({lane: Receipt(UnsettledBatch(claims)) for lane, claims in fetched.batches.items()})
        return fetched

    turn()
    with other:
        second = turn()
        assert sorted(second.batches) == [0, 2, 3]
        assert isinstance(second.failed[1], LaneLocked)
    while turn().batches:
        pass
    once.close()
    assert lost == []
    assert sum(map(len, sent.values())) == 400
    assert all(ids == sorted(set(ids)) for ids in sent.values())
