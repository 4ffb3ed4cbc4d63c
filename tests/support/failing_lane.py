"""One lane of a polling source, whose events are refused by name: what the tests of failures share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from one_lane import OneLane
from support import tried, write
from typer.testing import CliRunner

from outbox import Event
from outbox._app import migrate as db
from outbox._app.choices import OnFailure
from outbox._app.settings import FailureSettings
from relay.cli.app import app
from relay.core.ports import Claim, Receipt, Refusal, UnsettledBatch
from relay.database import Connector
from relay.kafka.routing import Route, Router
from relay.lanes import LaneTable
from relay.operations.dead_letters import DeadLetters, Selection
from relay.polling.at_most_once import AtMostOnceSource
from relay.polling.source import PollingSource
from relay.settle.retries import Failures

BLOCK = Router({"Order": Route("orders")})
SKIP = Router({"Order": Route("orders", OnFailure.SKIP)})
COPIED = Router({"Order": Route("orders", OnFailure.BLOCK, "orders-dead")})


class Lane:
    """The only lane of an outbox, and a loop that a test turns by hand: names in ``bad`` are refused."""

    def __init__(self, database: Any) -> None:
        self.database = database
        db.change_lanes(database.url, 1)
        self.admin = database.connect(autocommit=True)
        (self.lease,) = LaneTable(database.connect(autocommit=True), "outbox", "me", "0", 600.0).acquire()
        self.dead: list[str] = []
        self.lost: list[int] = []
        self._sources: list[OneLane] = []

    def polling(self, failures: Failures, *, archive: bool = False) -> PollingSource:
        return PollingSource(
            Connector(self.database.url, "test"),
            "outbox",
            failures,
            archive=archive,
            on_dead=lambda _lane, claim: self.dead.append(name(claim)),
        )

    def source(self, router: Router = BLOCK, attempts: int = 1, *, archive: bool = False) -> OneLane:
        failures = Failures("outbox", tried(attempts, 600.0, 600.0), router)
        return self._held(self.polling(failures, archive=archive))

    def deleting_source(self, router: Router = BLOCK, must_stay: Callable[[Claim], bool] = lambda _: False) -> OneLane:
        failures = Failures("outbox", FailureSettings(), router)
        source = AtMostOnceSource(
            Connector(self.database.url, "test"),
            "outbox",
            failures,
            on_lost=lambda _lane, count: self.lost.append(count),
            on_dead=lambda _lane, claim: self.dead.append(name(claim)),
            must_stay=must_stay,
        )
        return self._held(source)

    def _held(self, source: PollingSource) -> OneLane:
        self._sources.append(OneLane(source, self.lease))
        return self._sources[-1]

    def add(self, *names: str) -> list[str]:
        """Write events called key-number, as in a1; gives their event ids."""
        events = [Event("Order", name[0], name, {"n": name}) for name in names]
        return list(map(str, write(self.database.url, events)))

    def desk(self) -> DeadLetters:
        return DeadLetters(self.admin, "outbox")

    def rows(self, query: str, *values: Any) -> list[Any]:
        return self.admin.execute(query, values).fetchall()

    def close(self) -> None:
        for source in self._sources:
            source.close()


@pytest.fixture
def lane(outbox_postgres):
    lane = Lane(outbox_postgres)
    yield lane
    lane.close()


def name(claim: Claim) -> str:
    return claim.event_type


def turn(source: OneLane, *bad: str, limit: int = 100) -> list[str]:
    """Turns of the loop, settled, until something is published; gives what. Those that are due come in turns of their
    own, with turns of the others between, so two turns show both.
    """
    return half(source, *bad, limit=limit) or half(source, *bad, limit=limit)


def half(source: OneLane, *bad: str, limit: int = 100) -> list[str]:
    claims = source.fetch(limit)
    stopped: set[str] = set()
    published: list[Claim] = []
    refused: list[Refusal] = []
    for claim in claims:
        if claim.aggregate_id in stopped:
            continue
        if name(claim) in bad:
            stopped.add(claim.aggregate_id)
            refused.append((claim, f"{name(claim)} is bad"))
        else:
            published.append(claim)
    if claims:
        source.settle(Receipt(UnsettledBatch(published), refused))
    source.flush()
    return [name(claim) for claim in published]


def hurry(lane: Lane) -> None:
    lane.admin.execute("UPDATE outbox.failures SET next_attempt_at = clock_timestamp() WHERE isfinite(next_attempt_at)")


def outbox(lane: Lane, *arguments: str, status: int = 0, env: dict[str, str] | None = None) -> str:
    """Run a command; gives its stdout, or its one line of stderr when it must fail."""
    done = CliRunner().invoke(app, [*arguments], env={"OUTBOX_DATABASE_URL": lane.database.url} | (env or {}))
    assert done.exit_code == status, (done.output, done.exception)
    assert done.exception is None or isinstance(done.exception, SystemExit)
    return done.stdout if status == 0 else done.stderr


def retried(lane: Lane, *event_ids: str) -> Sequence[str]:
    return lane.desk().retry(Selection(event_ids or None))
