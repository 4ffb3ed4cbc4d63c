"""`outbox db roles --aggregate-type`: a service writes events of its own aggregates, and every other role sees all.

A relay and an operator at work beside it: test_roles_in_use.py.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from plans import PLANS, by_index_only, explain
from psycopg import sql
from rows_and_roles import login_role, outbox

from outbox import Event, Outbox
from outbox._app import migrate as db
from outbox._app import schema_drift
from relay.polling.queries import Queries

NOW = dt.datetime.now(dt.UTC)


class Roles:
    """A database with a limited writer, one that is not, and a relay's role."""

    def __init__(self, database: Any, admin: psycopg.Connection[Any], stack: ExitStack) -> None:
        self.url, self.admin = database.url, admin
        made = {"limited": "o'rd\"ers", "other": "other", "member": "member", "relay": "relay", "operator": "operator"}
        self.names = {name: stack.enter_context(login_role(admin, role)) for name, role in made.items()}

    def run(self, *arguments: str) -> str:
        return outbox(self.url, *arguments)

    def limit(self, *types: str) -> str:
        kinds = {"writer": ("limited", "other"), "relay": ("relay",), "operator": ("operator",)}
        roles = [f"{kind}={self.names[name]}" for kind, names in kinds.items() for name in names]
        limits = [part for name in types for part in ("--aggregate-type", f"{self.names['limited']}={name}")]
        return self.run("db", "roles", *roles, *limits, "--apply")

    def connect(self, name: str) -> psycopg.Connection[Any]:
        return psycopg.connect(self.url, user=self.names[name])


@pytest.fixture
def roles(outbox_postgres) -> Iterator[Roles]:
    with outbox_postgres.connect(autocommit=True) as admin, ExitStack() as stack:
        yield Roles(outbox_postgres, admin, stack)


def test_a_limited_writer_writes_its_own_aggregates_and_no_other(roles):
    roles.limit("Order", "it's %s")
    unique = Outbox(unique_keys=True)
    with roles.connect("limited") as connection:
        odd = "it's %s"
        Outbox(routed=[odd]).add_many(connection, [Event(kind, "1", "T") for kind in ("Order", odd)])
        Outbox().add(connection, Event("Order", "1", "T"), not_before=NOW)
        keyed = Event("Order", "1", "T", idempotency_key="k")
        assert unique.add(connection, keyed) == unique.add(connection, keyed)
        connection.commit()
        other = Event("Invoice", "1", "T")
        for write in (
            lambda: Outbox().add(connection, other),
            lambda: Outbox().add_many(connection, [Event("Order", "1", "T"), other]),
            lambda: Outbox().add(connection, other, not_before=NOW),
            lambda: unique.add(connection, Event("Invoice", "1", "T", idempotency_key="k")),
            # Not through the library.
            lambda: connection.execute(
                "INSERT INTO outbox.idempotency_keys (aggregate_type, idempotency_key, event_id, aggregate_id, "
                "event_type) VALUES ('Invoice', 'k', gen_random_uuid(), '1', 'T')"
            ),
        ):
            with pytest.raises(psycopg.errors.InsufficientPrivilege, match="row-level security policy"):
                write()
            connection.rollback()
    with roles.connect("other") as connection:
        Outbox().add(connection, Event("Invoice", "1", "T"))
        Outbox().add(connection, Event("Order", "1", "T"), not_before=NOW)
    count = "SELECT (SELECT count(*) FROM outbox.events), (SELECT count(*) FROM outbox.scheduled)"
    assert roles.admin.execute(count).fetchone() == (4, 2)
    # Given again, it is limited to what is named now.
    roles.limit("Invoice")
    with roles.connect("limited") as connection:
        Outbox().add(connection, other)
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            Outbox().add(connection, Event("Order", "1", "T"))


def test_two_limited_writers_and_a_member_of_both(roles):
    """Restrictive policies add up: the member may write what both may, and as one of them what that one may."""
    one, two, both = (roles.names[name] for name in ("limited", "other", "member"))
    for types in ((f"{one}=Order", f"{one}=Cart", f"{two}=Invoice", f"{two}=Cart"), ()):
        # Without limits a second time: rights that are given again lift none.
        limits = [part for each in types for part in ("--aggregate-type", each)]
        roles.run("db", "roles", f"writer={one}", f"writer={two}", *limits, "--apply")
    roles.admin.execute(sql.SQL("GRANT {}, {} TO {}").format(*map(sql.Identifier, (one, two, both))))

    def allowed(name: str, role: str | None = None) -> list[str]:
        written = []
        with roles.connect(name) as connection:
            if role is not None:
                connection.execute(sql.SQL("SET ROLE {}").format(sql.Identifier(role)))
            for kind in ("Order", "Invoice", "Cart"):
                for time in (None, NOW):
                    with suppress(psycopg.errors.InsufficientPrivilege), connection.transaction():
                        Outbox(unique_keys=True).add(
                            connection, Event(kind, "1", "T", idempotency_key=f"{time}{uuid4()}"), not_before=time
                        )
                        written.append(kind)
            connection.rollback()
        assert written[::2] == written[1::2]
        return written[::2]

    assert (allowed("limited"), allowed("other")) == (["Order", "Cart"], ["Invoice", "Cart"])
    assert allowed("member") == ["Cart"]
    assert (allowed("member", one), allowed("member", two)) == (["Order", "Cart"], ["Invoice", "Cart"])
    assert schema_drift.check(roles.url) == []
    # It can't have limits of its own: as one of the two it would be above them.
    refused = ("db", "roles", f"writer={both}", "--aggregate-type", f"{both}=Order", "--apply")
    with pytest.raises(AssertionError, match="as a member of"):
        roles.run(*refused)
    roles.admin.execute(sql.SQL("REVOKE {}, {} FROM {}").format(*map(sql.Identifier, (one, two, both))))
    roles.run(*refused)
    assert allowed("member") == ["Order"]


def test_the_relay_still_reads_by_the_index(roles):
    roles.limit("Order")
    roles.admin.execute(
        "INSERT INTO outbox.events (aggregate_type, aggregate_id, event_type) "
        "SELECT 'Order', g::text, 'T' FROM generate_series(1, 20000) g; ANALYZE outbox.events"
    )
    four = "{{{0},{0},{0},{0}}}".format
    values = {"lanes": "{0,1,2,3}", "above": four(0), "after": four(0), "limits": four(500), "unsettled": "{}"}
    values |= {
        "max_bytes": 4 << 20,
        "turn_bytes": 16 << 20,
        "left_types": ["Cart"],
        "left_copies": [False],
        "copy": "c",
    }
    roles.admin.execute(sql.SQL("SET ROLE {}").format(sql.Identifier(roles.names["relay"])))
    for name, plans in zip(("read", "read_some"), PLANS, strict=True):
        plan = explain(roles.admin, getattr(Queries("outbox"), name), values, plans=plans, to_the_index=True)
        assert plan["Actual Rows"] == 2000, name
        by_index_only(plan)
    roles.admin.execute("RESET ROLE")


def test_the_check_names_a_policy_that_hides_rows_or_hits_a_relay_and_no_other(roles):
    roles.limit("Order")
    assert schema_drift.check(roles.url) == []
    limited, relay = (sql.Identifier(roles.names[name]) for name in ("limited", "relay"))
    roles.admin.execute(sql.SQL("GRANT {} TO {}").format(limited, relay))
    [difference] = schema_drift.check(roles.url)
    assert difference.startswith(f"outbox.events: policy {roles.names['limited']} is not expected")
    assert difference.endswith(f"keeps {roles.names['relay']} from inserting, which may delete")
    roles.admin.execute(sql.SQL("REVOKE {} FROM {}").format(limited, relay))
    roles.admin.execute("CREATE POLICY hides ON outbox.events AS RESTRICTIVE FOR SELECT USING (false)")
    assert schema_drift.check(roles.url) == ["outbox.events: policy hides is not expected: may hide rows"]
    roles.admin.execute('DROP POLICY hides ON outbox.events; DROP POLICY "rights decide" ON outbox.events')
    assert schema_drift.check(roles.url) == ["outbox.events: row security is not expected: enabled"]


def test_given_again_it_waits_for_no_lock_unless_the_types_differ(roles, monkeypatch):
    monkeypatch.setattr(db, "_LOCK_TIMEOUT", "50ms")
    monkeypatch.setattr(db, "_TRIES", 1)
    roles.limit("Order", "it's")
    with roles.connect("other") as writer:
        Outbox().add(writer, Event("Invoice", "1", "T"))
        roles.limit("Order", "it's")
        with pytest.raises(AssertionError, match="lock timeout"):
            roles.limit("Order")


def test_a_role_that_row_security_does_not_bind_is_refused(roles):
    limited, other = (sql.Identifier(roles.names[name]) for name in ("limited", "other"))
    for change, shown in (
        (sql.SQL("ALTER ROLE {} BYPASSRLS"), "has BYPASSRLS"),
        (sql.SQL("ALTER ROLE {} NOBYPASSRLS SUPERUSER"), "a superuser"),
        (sql.SQL("ALTER ROLE {} NOSUPERUSER; GRANT pg_write_all_data TO {}"), "as a member of pg_write_all_data"),
    ):
        roles.admin.execute(change.format(limited, limited))
        with pytest.raises(AssertionError, match=shown):
            roles.limit("Order")
    roles.admin.execute(sql.SQL("REVOKE pg_write_all_data FROM {}").format(limited))
    roles.limit("Order")
    # Another role of that name is not given what the first one had, nor is the first one freed.
    name = roles.names["limited"]
    roles.admin.execute(sql.SQL("ALTER ROLE {} RENAME TO {}").format(limited, sql.Identifier(name + "x")))
    roles.admin.execute(sql.SQL("ALTER ROLE {} RENAME TO {}").format(other, limited))
    with pytest.raises(AssertionError, match="belongs to another role"):
        roles.run("db", "roles", f"writer={name}", "--aggregate-type", f"{name}=Order", "--apply")
    roles.admin.execute(sql.SQL("ALTER ROLE {} RENAME TO {}").format(limited, other))
    roles.admin.execute(sql.SQL("ALTER ROLE {} RENAME TO {}").format(sql.Identifier(name + "x"), limited))
