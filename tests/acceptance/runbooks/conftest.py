"""An operator with the rights that the runbooks name, and a relay to look at."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from rows_and_roles import execute, login_role
from runbook_support import Orders
from runbooks import Operator
from shop import Shop
from support import IMPATIENT
from typer.testing import CliRunner

from outbox.sandbox._ports import free_ports
from outbox.testing.fixtures import RelayProcess
from relay.cli.app import app
from relay.operations import topic_scan

LEASE = 1.0


@pytest.fixture(autouse=True)
def _short_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """What reads topics takes what is there, and does not wait a fifth of a second for more: there is none."""
    monkeypatch.setattr(topic_scan, "_WAIT_SECONDS", 0.02)


@pytest.fixture
def role(outbox_postgres) -> Iterator[Callable[..., str]]:
    """A function that makes a role of these kinds, and returns its name."""

    def make(*kinds: str) -> str:
        name = made.enter_context(login_role(admin, kinds[0]))
        grants = ["db", "roles", *(f"{kind}={name}" for kind in kinds), "--apply"]
        done = CliRunner().invoke(app, grants, env={"OUTBOX_DATABASE_URL": outbox_postgres.url})
        assert done.exit_code == 0, done.output
        return name

    with outbox_postgres.connect(autocommit=True) as admin, ExitStack() as made:
        yield make


@pytest.fixture
def monitor(outbox_postgres, role) -> str:
    """The address of the database for a role that may only look."""
    name = role("monitor", "consumer-monitor")
    execute(outbox_postgres.url, f"GRANT pg_monitor TO {name}")
    return outbox_postgres.url.replace("postgres@", f"{name}@")


@pytest.fixture
def address() -> str:
    """Where the relay, or the consumer, of the test shows its metrics."""
    return f"127.0.0.1:{free_ports(1)[0]}"


@pytest.fixture
def settings(outbox_kafka, address) -> dict[str, Any]:
    """Settings of a relay, and of the commands."""
    return {
        "name": outbox_kafka.name("outbox"),
        "create_topics": False,
        "kafka__bootstrap_servers": outbox_kafka.bootstrap_servers,
        "kafka__reconnect_backoff_max_ms": 200,
        "relay__lease_seconds": LEASE,
        "relay__max_backoff_seconds": 0.2,
        "relay__metrics_address": address,
    }


def starting(outbox_relay, settings: dict[str, Any], **own: Any) -> Callable[..., RelayProcess]:
    """Return what starts a relay with these settings, as they are then, and some more; None: without this one."""

    def start(*arguments: str, **more: Any) -> RelayProcess:
        # The factory has a name of its own for these.
        servers = {"bootstrap_servers": settings["kafka__bootstrap_servers"], "kafka__bootstrap_servers": None}
        given = {**own, **settings, **servers, **more}
        return outbox_relay(*arguments, **{name: value for name, value in given.items() if value is not None})

    return start


@pytest.fixture
def operator(section, outbox_postgres, role, monitor, outbox_relay, settings) -> Operator:
    """An operator who follows the section of the test."""
    start = starting(outbox_relay, settings, program=IMPATIENT)
    operators = outbox_postgres.url.replace("postgres@", f"{role('operator', 'consumer-operator')}@")
    return Operator(section, monitor, operators, outbox_postgres.url, settings, start)


@pytest.fixture
def follow(section, outbox_relay, settings) -> Callable[..., Operator]:
    """A function that makes an operator who follows the section of the test, as the owner of a database.

    Settings may be given that are those of its outbox alone.
    """

    def operator(url: str, **own: Any) -> Operator:
        given = settings | own if own else settings
        return Operator(section, url, url, url, given, starting(outbox_relay, given, database_url=url))

    return operator


@pytest.fixture
def shop(outbox_kafka) -> Shop:
    return Shop(outbox_kafka)


@pytest.fixture
def orders(outbox_postgres, outbox_kafka) -> Orders:
    return Orders(outbox_postgres, outbox_kafka)
