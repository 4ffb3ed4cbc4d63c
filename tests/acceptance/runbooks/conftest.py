"""An operator with the rights that the runbooks name, and a relay to look at."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from psycopg import sql
from rows_and_roles import drop_role, execute
from runbook_support import TYPED, Orders
from runbooks import Operator
from shop import Shop
from support import IMPATIENT
from typer.testing import CliRunner

from outbox.sandbox._ports import free_ports
from outbox.sandbox.kafka import KafkaCluster
from outbox.testing.fixtures import RelayProcess, token
from relay.cli.app import app

LEASE = 1.0


@pytest.fixture
def role(outbox_postgres) -> Iterator[Callable[..., str]]:
    """A function that makes a role of these kinds, and returns its name."""
    made = []

    def make(*kinds: str) -> str:
        name = f"{kinds[0]}_{token()}"
        admin.execute(sql.SQL("CREATE ROLE {} LOGIN").format(sql.Identifier(name)))
        made.append(name)
        grants = ["db", "roles", *(f"{kind}={name}" for kind in kinds), "--apply"]
        done = CliRunner().invoke(app, grants, env={"OUTBOX_DATABASE_URL": outbox_postgres.url})
        assert done.exit_code == 0, done.output
        return name

    with outbox_postgres.connect(autocommit=True) as admin:
        yield make
        for name in made:
            drop_role(admin, name)


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


@pytest.fixture
def operator(section, outbox_postgres, role, monitor, outbox_relay, settings) -> Iterator[Operator]:
    """Somebody who follows the section of the test."""

    def start(*arguments: str, **more: Any) -> RelayProcess:
        # The factory has a name of its own for these.
        servers = settings["kafka__bootstrap_servers"]
        given = {
            "program": IMPATIENT,
            "bootstrap_servers": servers,
            **settings,
            "kafka__bootstrap_servers": None,
            **more,
        }
        return outbox_relay(*arguments, **{name: value for name, value in given.items() if value is not None})

    operators = outbox_postgres.url.replace("postgres@", f"{role('operator', 'consumer-operator')}@")
    made = Operator(section, monitor, operators, outbox_postgres.url, settings, start)
    yield made
    for title, steps in made.typed.items():
        TYPED.setdefault(title, set()).update(steps)


@pytest.fixture
def follow(section, outbox_relay, settings) -> Iterator[Callable[[str], Operator]]:
    """A function that makes an operator who follows the section of the test, as the owner of a database."""
    made = []

    def operator(url: str) -> Operator:
        def start(*arguments: str, **more: Any):
            given = {**settings, "database_url": url, **more}
            servers = given.pop("kafka__bootstrap_servers")
            return outbox_relay(*arguments, bootstrap_servers=servers, **given)

        made.append(Operator(section, url, url, url, settings, start))
        return made[-1]

    yield operator
    for one in made:
        for title, steps in one.typed.items():
            TYPED.setdefault(title, set()).update(steps)


@pytest.fixture
def shop(outbox_kafka) -> Shop:
    return Shop(outbox_kafka)


@pytest.fixture
def new_kafka(of_group) -> KafkaCluster:
    """The cluster that is there instead of the lost one. It has nothing of the tests' outboxes."""
    return of_group.once(KafkaCluster)


@pytest.fixture
def orders(outbox_postgres, outbox_kafka) -> Orders:
    return Orders(outbox_postgres, outbox_kafka)
