"""What the tests of pauses in the database share: scopes, commands, and a relay whose broker is a list in memory."""

from __future__ import annotations

import threading
from typing import Any, Self

import pytest
from loop_fakes import Broker, OnePublisher
from polling_support import polling
from support import look_up
from typer.testing import CliRunner

from relay.cli.app import app
from relay.core.lane import LoopSettings
from relay.core.pauses import CurrentPauses, Scope, ScopeKind, scopes_of
from relay.database import Connector
from relay.supervisor import Components, Supervisor

LANE, OTHER_LANE = scopes_of([1, 2], [])
ORDERS = Scope(ScopeKind.TOPIC, "order-events")


@pytest.fixture
def url(outbox_postgres):
    return outbox_postgres.url


def audit(url: str) -> list[tuple[Any, ...]]:
    return look_up(url, "SELECT what, why, details ->> 'scope', details ->> 'name' FROM outbox.audit ORDER BY id")


def outbox(url: str, *arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["relay", *arguments], env={"OUTBOX_DATABASE_URL": url})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


class Rig:
    """A relay's control loop and worker's loop over real Postgres; what it publishes is a list in memory."""

    def __init__(self, url: str, *, lease_seconds: float = 30.0) -> None:
        self.broker = Broker()
        self.pauses = CurrentPauses()
        self.supervisor = Supervisor(
            Components(
                instance="me",
                version="0",
                schema="outbox",
                lease_seconds=lease_seconds,
                shutdown_seconds=5.0,
                loop=LoopSettings(),
                connect=Connector(url, "control loop"),
                source=lambda _: polling(url),
                publisher=lambda _source: OnePublisher(self.broker),
                pauses=self.pauses,
            )
        )
        self.stop = threading.Event()
        self._thread = threading.Thread(target=self.supervisor.run, args=(self.stop, threading.Event()))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        self._thread.join(30)
        assert not self._thread.is_alive()

    def lanes(self) -> set[int]:
        return {lane for turn in self.broker.turns for lane in turn}
