"""Relays of the version before one turn for all lanes, beside those of this one: what its statements can still do.

The statements are those of the last relay before outbox_0005, as its history has them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import psycopg
import pytest
from psycopg import errors
from support import drained

from outbox import Event, Outbox
from outbox._app import migrate as db
from relay.lanes import LaneTable
from relay.lease import LEGACY_ID

_ACQUIRE: Final = """
UPDATE outbox.lanes SET owner = %(me)s, epoch = epoch + 1,
       lease_until = clock_timestamp() + make_interval(secs => %(ttl)s)
 WHERE lane = (SELECT lane FROM outbox.lanes WHERE lease_until < clock_timestamp() AND source = %(source)s
                ORDER BY lease_until, lane FOR UPDATE SKIP LOCKED LIMIT 1)
RETURNING lane, epoch, set_config('synchronous_commit', 'on', true)"""

_ACQUIRE_ALL: Final = """
UPDATE outbox.lanes SET owner = %(me)s, epoch = epoch + 1,
       lease_until = clock_timestamp() + make_interval(secs => %(ttl)s)
 WHERE (SELECT count(*) FROM (SELECT FROM outbox.lanes WHERE lease_until < clock_timestamp() AND source = %(source)s
                               FOR UPDATE SKIP LOCKED) AS free) = (SELECT count(*) FROM outbox.lanes)
RETURNING lane, epoch, set_config('synchronous_commit', 'on', true)"""

_RENEW: Final = """
UPDATE outbox.lanes AS l SET lease_until = clock_timestamp() + make_interval(secs => %(ttl)s)
  FROM unnest(%(lanes)s::smallint[], %(epochs)s::bigint[]) AS mine(lane, epoch)
 WHERE l.lane = mine.lane AND l.epoch = mine.epoch
RETURNING l.lane, l.source"""

# Its settling, without what is kept of published events.
_SETTLE: Final = """
WITH lease AS (
    UPDATE outbox.lanes SET lease_until = clock_timestamp() + make_interval(secs => %(ttl)s)
     WHERE lane = %(lane)s AND epoch = %(epoch)s RETURNING lane),
gone AS (
    DELETE FROM outbox.events WHERE lane = (SELECT lane FROM lease) AND id = ANY(%(ids)s::bigint[])
                                AND event_id = ANY(%(event_ids)s::uuid[]) RETURNING id)
SELECT (SELECT count(*) FROM lease), (SELECT count(*) FROM gone)"""

_LANES: Final = """
SELECT lane, owner, epoch, protocol_epoch, transactional_id, lease_until::text FROM outbox.lanes ORDER BY lane"""

TTL = 600.0


@dataclass
class OldRelay:
    """The statements of an old relay, over a connection in autocommit as it has one."""

    connection: psycopg.Connection

    def acquire(self) -> tuple[int, int] | None:
        row = self.connection.execute(_ACQUIRE, {"me": "old", "ttl": TTL, "source": "polling"}).fetchone()
        return None if row is None else (row[0], row[1])

    def acquire_all(self) -> int:
        return len(self.connection.execute(_ACQUIRE_ALL, {"me": "old", "ttl": TTL, "source": "polling"}).fetchall())

    def renew(self, held: dict[int, int]) -> set[int]:
        values = {"ttl": TTL, "lanes": list(held), "epochs": list(held.values())}
        return {row[0] for row in self.connection.execute(_RENEW, values).fetchall()}

    def settle(self, lane: int, epoch: int) -> tuple[int, int]:
        """Settle all that the lane has; return how many lanes were held and how many events went."""
        rows = self.connection.execute("SELECT id, event_id FROM outbox.events WHERE lane = %s", (lane,)).fetchall()
        values = {"ttl": TTL, "lane": lane, "epoch": epoch}
        values |= {"ids": [row[0] for row in rows], "event_ids": [row[1] for row in rows]}
        return self.connection.execute(_SETTLE, values).fetchone()

    def lanes(self) -> list[tuple]:
        return self.connection.execute(_LANES).fetchall()

    def end_leases(self) -> None:
        """End all leases at once, as time would, and forget who had them."""
        self.connection.execute("UPDATE outbox.lanes SET lease_until = '-infinity'")
        self.connection.execute("DELETE FROM outbox.relays")


@pytest.fixture
def old(outbox_postgres) -> Iterator[OldRelay]:
    with psycopg.connect(outbox_postgres.url, autocommit=True) as connection:
        yield OldRelay(connection)


def add(url: str, kind: str, count: int) -> None:
    with psycopg.connect(url) as connection:
        Outbox().add_many(connection, [Event(kind, f"k{n}", "T", {"n": n}) for n in range(count)])


def test_an_old_relay_takes_no_lane_of_migrated_tables(old):
    """It would publish under an id that no new relay fences, and fence none of a new relay's."""
    before = old.lanes()
    for acquire in (old.acquire, old.acquire_all):
        with pytest.raises(errors.CheckViolation) as refused:
            acquire()
        assert refused.value.diag.constraint_name == "lanes_protocol"
    assert old.lanes() == before
    # It is the new version's own statement that takes them.
    leases = LaneTable(old.connection, "outbox", "new", "1", TTL).acquire(4)
    assert [(lease.lane, lease.epoch) for lease in leases] == [(lane, 1) for lane in range(4)]


def test_what_an_old_relay_held_when_the_tables_were_migrated_it_keeps_until_its_lease_ends(outbox_postgres, old):
    url = outbox_postgres.url
    db.downgrade(url, revision="outbox_0004")
    held = dict([old.acquire(), old.acquire()])
    assert held == {0: 1, 1: 1}
    db.upgrade(url)
    add(url, "Order", 100)
    table = LaneTable(psycopg.connect(url, autocommit=True), "outbox", "new", "1", TTL)
    assert [lease.lane for lease in table.acquire(4)] == [2, 3]
    # It goes on with what it has, and gets no more.
    assert old.renew(held) == {0, 1}
    lanes, gone = old.settle(0, held[0])
    assert (lanes, gone > 0) == (1, True)
    assert old.acquire() is None
    old.end_leases()
    with pytest.raises(errors.CheckViolation):
        old.acquire()
    # Whoever takes them knows whom to fence; and what the old one does after that finds no row.
    taken = {lease.lane: lease for lease in table.acquire(4)}
    assert {lane: (taken[lane].epoch, taken[lane].former_id) for lane in held} == dict.fromkeys(held, (2, LEGACY_ID))
    assert old.renew(held) == set()
    assert old.settle(1, held[1]) == (0, 0)
    table.close()


@pytest.mark.parametrize("delivery", ["at-least-once", "exactly-once"])
def test_an_old_relay_beside_new_ones_gets_nothing_while_they_come_and_go(
    outbox_postgres, outbox_kafka, outbox_relay, old, delivery
):
    url = outbox_postgres.url
    kind = outbox_kafka.name("Order")
    topic = outbox_kafka.create_topic(f"{kind.lower()}-events", 2)
    settings = {"delivery": delivery, "name": outbox_kafka.name("outbox")}
    for _ in range(2):
        relay = outbox_relay(**settings)
        add(url, kind, 40)
        drained(url)
        # Of what another one holds, not even the attempt fails.
        assert old.acquire() is None
        assert old.acquire_all() == 0
        relay.kill()
        before = old.lanes()
        old.end_leases()
        with pytest.raises(errors.CheckViolation):
            old.acquire()
        with pytest.raises(errors.CheckViolation):
            old.acquire_all()
        after = old.lanes()
        assert [lane[:5] for lane in after] == [lane[:5] for lane in before]
        assert {lane[1] for lane in after} == {relay_name(before)}
    outbox_relay(**settings)
    add(url, kind, 40)
    drained(url)
    messages = outbox_kafka.consume(topic)
    assert len(messages) == len({dict(message.headers())["ce_id"] for message in messages}) == 120


def relay_name(lanes: list[tuple]) -> str:
    """Return the owner of all of them."""
    (owner,) = {lane[1] for lane in lanes}
    return owner
