"""`outbox doctor` and publications of the outbox's own tables, whose key has a generated column."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest
from doctor_support import in_postgres, settings
from one_lane import OneLane
from psycopg import sql
from rows_and_roles import put
from support import look_up, wait_until

from outbox._app import migrate
from outbox._clients.checks import Level
from outbox.errors import SchemaError
from outbox.testing.fixtures import token
from relay.core.lease import Lease
from relay.core.ports import Receipt, UnsettledBatch
from relay.database import Connector
from relay.operations.doctor import postgres
from relay.polling.source import PollingSource
from relay.settle.retries import Failures

REJECTS = 180_000
PUBLICATIONS = ("FOR ALL TABLES", "FOR TABLES IN SCHEMA outbox", "FOR TABLE outbox.lanes, outbox.events")


@pytest.fixture
def subscriber(outbox_postgres, outbox_postgres_server) -> Iterator[str]:
    """Another database with the tables, which subscribes to the publication "Others" once that is there."""
    name = f"subscriber_{token()}"
    url = outbox_postgres_server.create_database(name)
    migrate.upgrade(url)
    with psycopg.connect(url, autocommit=True) as connection:
        for table in ("lanes", "alembic_version"):
            connection.execute(sql.SQL("DELETE FROM outbox.{}").format(sql.Identifier(table)))
        yield url
        connection.execute("ALTER SUBSCRIPTION ours DISABLE")
        connection.execute("ALTER SUBSCRIPTION ours SET (slot_name = NONE)")
        connection.execute("DROP SUBSCRIPTION ours")
    outbox_postgres_server.drop_database(name)


def subscribe(url: str, publisher: str) -> None:
    """On the same server, where CREATE SUBSCRIPTION can't make the slot itself."""
    slot = f"ours_{token()}"
    look_up(publisher, "SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", slot)
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(
            sql.SQL(
                'CREATE SUBSCRIPTION ours CONNECTION {} PUBLICATION "Others" '
                "WITH (create_slot = false, slot_name = {}, copy_data = false)"
            ).format(sql.Literal(publisher), sql.Literal(slot))
        )


def errors(url: str) -> int:
    """How often the subscription has stopped."""
    ((count,),) = look_up(url, "SELECT apply_error_count FROM pg_stat_subscription_stats WHERE subname = 'ours'")
    return count


def said(outbox_postgres, outbox_kafka):
    return in_postgres(settings(outbox_postgres, outbox_kafka)).get("publication Others")


@pytest.mark.parametrize("tables", PUBLICATIONS)
def test_a_publication_of_settled_events(outbox_postgres, outbox_kafka, tables):
    """Postgres 18 rejects DELETEs when their publication leaves out a generated column of the key."""
    with psycopg.connect(outbox_postgres.url, autocommit=True) as connection:
        rejects = connection.info.server_version >= REJECTS
        put(connection, "outbox.events", aggregate_type="A", aggregate_id="1")
        connection.execute(f'CREATE PUBLICATION "Others" {tables}')
        finding = said(outbox_postgres, outbox_kafka)
        assert finding.level is (Level.FAILURE if rejects else Level.WARNING)
        assert finding.do.startswith("leave events out of it: ")
        assert ("publish_generated_columns" in finding.do) == rejects
        lane = connection.execute("SELECT lane FROM outbox.events").fetchone()[0]
        polling = PollingSource(Connector(outbox_postgres.url, "test"), "outbox", Failures("outbox", None, None))
        connection.execute("UPDATE outbox.lanes SET owner = 'me'")
        source = OneLane(polling, Lease(lane, 0, 30.0, 0.0, owner="me"))
        if rejects:
            # Before anything is published that could not be settled.
            with pytest.raises(
                SchemaError, match="a publication of deletes has the outbox's table; see `outbox doctor`"
            ):
                source.fetch(10)
        # What it advises is the way out.
        first, _, second = finding.do.partition("; or, ")
        if "outbox.events" in tables:
            connection.execute(first.partition(": ")[2])
        elif rejects:
            connection.execute(second[second.index("ALTER") :])
        else:
            connection.execute('DROP PUBLICATION "Others"')
        assert said(outbox_postgres, outbox_kafka) is None
        source.settle(Receipt(UnsettledBatch(source.fetch(10))))
        source.flush()
        source.close()
        assert connection.execute("SELECT count(*) FROM outbox.events").fetchone() == (0,)


def test_before_postgres_18_the_server_itself_takes_them():
    (finding,) = postgres._publications("outbox", False, [("Others", False)])
    assert finding.level is Level.WARNING


def test_a_postgres_that_subscribes_stops_at_events(outbox_postgres, subscriber):
    """Up to Postgres 17 at the first that is settled; since then, if the lane is published, at the first of all."""
    url = outbox_postgres.url
    with psycopg.connect(url, autocommit=True) as connection:
        rejects = connection.info.server_version >= REJECTS
        stored = " WITH (publish_generated_columns = stored)" if rejects else ""
        connection.execute(f'CREATE PUBLICATION "Others" FOR TABLE outbox.events{stored}')
        subscribe(subscriber, url)
        put(connection, "outbox.events", aggregate_type="A", aggregate_id="1")
        count = "SELECT count(*) FROM outbox.events"
        if not rejects:
            wait_until(lambda: look_up(subscriber, count) == [(1,)], what="the event on the subscriber")
            connection.execute("DELETE FROM outbox.events")
        wait_until(lambda: errors(subscriber) > 0, what="the subscription to stop")
        # Without them it goes on.
        assert look_up(subscriber, count) == [(0 if rejects else 1,)]


def test_a_postgres_subscribes_to_the_other_tables(outbox_postgres, subscriber):
    with psycopg.connect(outbox_postgres.url, autocommit=True) as connection:
        connection.execute('CREATE PUBLICATION "Others" FOR TABLE outbox.pauses, outbox.audit')
        subscribe(subscriber, outbox_postgres.url)
        put(connection, "outbox.events", aggregate_type="A", aggregate_id="1")
        connection.execute("DELETE FROM outbox.events")
        connection.execute("INSERT INTO outbox.pauses (scope, name) VALUES ('all', '')")
        wait_until(lambda: look_up(subscriber, "SELECT scope FROM outbox.pauses") == [("all",)], what="the pause")
        connection.execute("DELETE FROM outbox.pauses")
        wait_until(lambda: look_up(subscriber, "SELECT scope FROM outbox.pauses") == [], what="its end")
        assert errors(subscriber) == 0
