"""Two outboxes of one Postgres server that share a name: the markers of the one are not the other's."""

from __future__ import annotations

from collections import Counter

import psycopg
import pytest
from psycopg import sql
from reconcile_support import Outbox, outbox
from support import ends, wait_until

from outbox.testing.fixtures import migrate
from relay.core.marker import Marker
from relay.operations.lane_rows import Lane

__all__ = ["outbox"]


class Neighbour:
    """An outbox of the same name, on the same server and Kafka, whose relay publishes exactly-once."""

    def __init__(self, outbox: Outbox, url: str, schema: str) -> None:
        self.url, self.schema = url, schema
        self.kind, self.topic = outbox.kinds[1], outbox.topics[1]
        self.settings = {"database_url": url, "schema": schema, "name": outbox.name, "delivery": "exactly-once"}
        self.added = 0

    def publish(self) -> None:
        """Add events of one key, and wait until the relay has published them."""
        query = sql.SQL(
            "INSERT INTO {} (aggregate_type, aggregate_id, event_type) SELECT %s, 'k', 'T' FROM generate_series(1, 5)"
        ).format(sql.Identifier(self.schema, "events"))
        left = sql.SQL("SELECT count(*) FROM {}").format(sql.Identifier(self.schema, "events"))
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute(query, (self.kind,))
            self.added += 5
            wait_until(lambda: connection.execute(left).fetchone() == (0,), 60, "the neighbour's events")


@pytest.fixture
def neighbour(outbox) -> Neighbour:
    migrate(outbox.url, schema="other")
    return Neighbour(outbox, outbox.url, "other")


def test_a_neighbour_on_the_same_server_keeps_its_markers(outbox, outbox_postgres, neighbour, outbox_relay):
    """This outbox was never published exactly-once. Its own relays would stop on the neighbour's markers."""
    relay = outbox_relay(**neighbour.settings)
    for _ in range(3):
        neighbour.publish()
    ends(relay)
    markers = outbox.state.last_markers(range(8))
    assert max(marker.batch for marker in markers.values() if marker is not None) > 2
    # An outbox of another database is another one too.
    assert {marker.outbox for marker in markers.values() if marker is not None} == {f"{outbox_postgres.name}.other"}
    outbox.add(0, outbox.keys(0)[1], 5)
    outbox.publish(outbox.rows(1)[:3])
    refused = outbox.reconcile("--apply", "--reason", "x")
    assert (refused.returncode, "Choose a new one" in refused.stderr) == (1, True), refused.stderr
    for more in ((), ("--resend",)):
        done = outbox.command("recover", "--since", "2020-01-01", "--reason", "restored", *more)
        assert done.returncode == 0, done.stderr
    assert outbox.left() == 2
    assert {outbox.lane(lane)["last_batch"] for lane in range(8)} == {None}
    assert outbox.state.last_markers(range(8)) == markers
    relay = outbox_relay(**neighbour.settings)
    neighbour.publish()
    ends(relay)
    found = Counter(dict(one.headers())["ce_id"] for one in outbox.kafka.consume(neighbour.topic))
    assert (len(found), set(found.values())) == (neighbour.added, {1})


def test_whose_marker_it_is():
    """A marker of an earlier version names no outbox, and is recognized by its server only."""
    mine = Marker(5, 1, "7", 1, outbox="db.outbox")
    lane = Lane(None, "7", 1, "db.outbox", 0, None, exactly_once=False)
    for marker, another in (
        (None, False),
        (mine, False),
        (Marker(5, 1, "7", 1), False),
        (Marker(5, 1, "8", 1), True),
        (Marker(5, 1, "8", 1, outbox="db.outbox"), True),
        (Marker(5, 1, "7", 1, outbox="other.outbox"), True),
        (Marker(5, 1, "7", 1, outbox="db.other"), True),
    ):
        assert lane.disowns(marker) is another, marker
        # One that was published exactly-once may have been restored from a dump, under another name.
        assert not lane._replace(exactly_once=True).disowns(marker)
