"""Lanes of an outbox, and a polling source that reads them: what its tests share."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest
from one_lane import OneLane
from support import write

from outbox import Event
from outbox._app.settings import FailureSettings
from relay.core.lease import Lease
from relay.core.ports import Receipt, UnsettledBatch
from relay.database import Connector
from relay.kafka.routing import Router
from relay.lanes import LaneTable
from relay.polling.source import PollingSource
from relay.settle.retries import Failures


@pytest.fixture
def lanes(outbox_postgres):
    """One lane for the whole outbox, so that a test sees all its events."""
    from outbox._app import migrate as db

    db.change_lanes(outbox_postgres.url, 1)
    return table(outbox_postgres, "me")


def table(database, me: str, ttl: float = 30.0) -> LaneTable:
    return LaneTable(database.connect(autocommit=True), "outbox", me, "0", ttl)


def taken(table: LaneTable) -> Lease:
    (lease,) = table.acquire()
    return lease


def clock_back(database) -> None:
    """As if the database's clock had gone back by an hour: all that the server knows of the time is in rows."""
    with database.connect(autocommit=True) as admin:
        admin.execute(
            "UPDATE outbox.relays SET heartbeat_at = heartbeat_at + interval '1 h',"
            " alive_until = alive_until + interval '1 h'"
        )
        admin.execute("UPDATE outbox.lanes SET lease_until = lease_until + interval '1 h' WHERE owner IS NOT NULL")


def polling(
    url: str,
    leases: Collection[Lease] = (),
    *,
    schema: str = "outbox",
    policy: FailureSettings | None = None,
    router: Router | None = None,
    **options: Any,
) -> PollingSource:
    """Return a new source that holds these lanes."""
    failures = Failures(schema, policy or FailureSettings(), router or Router())
    source = PollingSource(Connector(url, "test"), schema, failures, **options)
    for lease in leases:
        source.hold(lease)
    return source


def source(database, lease, schema: str = "outbox") -> OneLane:
    return OneLane(polling(database.url, schema=schema), lease)


def add(database, *names: str) -> None:
    write(database.url, [Event("Order", name, "T", {"n": name}) for name in names])


def fetched(claims: Any) -> list[str]:
    return [claim.aggregate_id for claim in claims]


def settle(source: OneLane, claims: Any) -> None:
    source.settle(Receipt(UnsettledBatch(claims)))
