"""Row security that hides events from a relay, which Postgres does not report: the relay and the doctor do."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from doctor_support import settings
from one_lane import OneLane
from polling_support import add, fetched, lanes, polling, settle, taken
from psycopg.conninfo import conninfo_to_dict
from rows_and_roles import Roles, outbox, roles

from outbox._clients.checks import Level
from relay.core.ports import StandingError
from relay.database import Connector
from relay.operations.doctor import postgres
from relay.operations.doctor.run import run
from relay.operations.roles import RoleKind
from relay.row_access import row_problems

__all__ = ["lanes", "roles"]


class Relay:
    """A relay's role, which does not own the tables, and row security of ``events`` without a policy."""

    def __init__(self, roles: Roles) -> None:
        self.admin = roles.admin
        self.url = roles.of(RoleKind.RELAY)
        self.role = conninfo_to_dict(self.url)["user"]
        self.admin.execute("ALTER TABLE outbox.events ENABLE ROW LEVEL SECURITY")

    def allow(self, name: str, policy: str, table: str = "events") -> None:
        self.admin.execute(f"CREATE POLICY {name} ON outbox.{table} {policy}".format(role=self.role))

    def refused(self, table: str = "events") -> None:
        with pytest.raises(StandingError, match=rf"\"{table}\" may hide rows from role {self.role}: CREATE POLICY"):
            polling(self.url).close()


@pytest.fixture
def relay(roles) -> Iterator[Relay]:
    return Relay(roles)


def test_a_relay_needs_policies_that_show_and_delete_every_row(relay):
    relay.refused()
    relay.allow("own", "TO {role} USING (aggregate_type = 'Order')")
    relay.allow("reads", "FOR SELECT TO {role} USING (true)")
    relay.refused()
    relay.allow("deletes", "FOR DELETE TO {role} USING (true)")
    polling(relay.url).close()
    relay.allow("limits", "AS RESTRICTIVE FOR INSERT TO {role} WITH CHECK (aggregate_type = 'Order')")
    relay.allow("nothing", "AS RESTRICTIVE FOR SELECT TO pg_monitor USING (false)")
    polling(relay.url).close()
    relay.allow("hides", "AS RESTRICTIVE FOR SELECT USING (aggregate_type = 'Order')")
    relay.refused()


def test_what_the_error_says_helps(relay):
    with Connector(relay.url, "test")() as connection:
        ((_, do),) = row_problems(connection, "outbox")
        relay.admin.execute(do.partition(", and ")[0])
        assert row_problems(connection, "outbox") == []


def test_scheduled_events_are_locked_before_they_move(relay):
    relay.allow("every", "USING (true)")
    relay.admin.execute("ALTER TABLE outbox.scheduled ENABLE ROW LEVEL SECURITY")
    for command in ("SELECT", "DELETE"):
        relay.allow(f"for_{command}", f"FOR {command} USING (true)", "scheduled")
        relay.refused("scheduled")
    relay.allow("locks", "FOR UPDATE USING (true)", "scheduled")
    polling(relay.url).close()


def test_beside_limited_writers_a_relay_sees_every_row(roles):
    url, writer = roles.of(RoleKind.RELAY), roles.make("writer")
    outbox(roles.url, "db", "roles", f"writer={writer}", "--aggregate-type", f"{writer}=Order", "--apply")
    polling(url).close()
    with Connector(url, "test")() as connection:
        assert row_problems(connection, "outbox", every_role=True) == []


def test_a_policy_that_goes_while_a_relay_runs_stops_its_lane(outbox_postgres, relay, lanes):
    relay.allow("reads", "FOR SELECT USING (true)")
    relay.allow("inserts", "FOR INSERT WITH CHECK (true)")
    relay.allow("deletes", "FOR DELETE USING (true)")
    add(outbox_postgres, "a")
    with OneLane(polling(relay.url), taken(lanes)) as source:
        claims = source.fetch(10)
        assert fetched(claims) == ["a"]
        settle(source, claims)
        relay.admin.execute("DROP POLICY deletes ON outbox.events")
        with pytest.raises(StandingError, match="rows can't be deleted"):
            source.fetch(10)
        assert relay.admin.execute("SELECT count(*) FROM outbox.events").fetchone() == (1,)


@pytest.mark.parametrize("kind", [None, RoleKind.RELAY, RoleKind.OPERATOR, RoleKind.MONITOR])
def test_the_doctor_names_the_roles_whoever_asks(outbox_postgres, outbox_kafka, roles, relay, kind):
    url = relay.url if kind is RoleKind.RELAY else roles.of(kind) if kind else outbox_postgres.url
    given = settings(outbox_postgres, outbox_kafka).model_copy(update={"database_url": url})
    with Connector(url, "test")() as connection:
        rows = [one for one in run(postgres.checks(connection, given)) if one.about == "rows"]
    [of_relay] = [one for one in rows if f"from role {relay.role}" in one.found]
    assert (of_relay.level, relay.role in of_relay.do) == (Level.FAILURE, True)


def test_no_session_begins_before_a_table_with_children_or_partitions(outbox_postgres, roles):
    for table in ("events", "scheduled"):
        roles.admin.execute(f"CREATE TABLE outbox.old () INHERITS (outbox.{table})")
        with pytest.raises(StandingError, match=rf"child table outbox.old.*NO INHERIT \"outbox\".\"{table}\""):
            polling(outbox_postgres.url)
        # The catalog goes on saying that there are children, until a VACUUM.
        roles.admin.execute("DROP TABLE outbox.old")
        polling(outbox_postgres.url).close()
    roles.admin.execute("ALTER TABLE outbox.events RENAME TO plain")
    roles.admin.execute("CREATE TABLE outbox.events (LIKE outbox.plain) PARTITION BY HASH (id)")
    with pytest.raises(StandingError, match="is partitioned"):
        polling(outbox_postgres.url)


def test_the_doctor_names_children_whoever_asks(outbox_postgres, outbox_kafka, roles):
    roles.admin.execute("CREATE TABLE outbox.old () INHERITS (outbox.events)")
    url = roles.of(RoleKind.MONITOR)
    given = settings(outbox_postgres, outbox_kafka).model_copy(update={"database_url": url})
    with Connector(url, "test")() as connection:
        [rows] = [one for one in run(postgres.checks(connection, given)) if one.about == "rows"]
    assert (rows.level, "child table outbox.old" in rows.found) == (Level.FAILURE, True)
