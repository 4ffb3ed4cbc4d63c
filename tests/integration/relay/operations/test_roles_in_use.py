"""Each kind of role of `outbox db roles` at its work: the real commands run as it, and all else is refused."""

from __future__ import annotations

import datetime as dt
import json
import re
import uuid
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from external_support import Sink, payments, provider
from psycopg import sql
from psycopg.types.json import Jsonb
from rows_and_roles import Roles, outbox, put, refused, roles
from sqlalchemy.orm import Session
from support import order, wait_until
from typer.testing import CliRunner
from uuid_utils.compat import uuid7

from outbox import Event, Outbox
from outbox.external.caller import Caller
from outbox.testing.fixtures import token
from outbox.urls import sqlalchemy_url
from relay.audit.findings import Scope
from relay.audit.follow import Follower
from relay.cli.app import app
from relay.config import load
from relay.operations.roles import RoleKind

__all__ = ["order", "provider", "roles"]

SECRET = "4929-secret"
AUDITORS = (RoleKind.OPERATOR, RoleKind.CONSUMER, RoleKind.CONSUMER_OPERATOR, RoleKind.EXTERNAL)
"""The kinds that may write into the audit of their schema."""


def bury(admin: psycopg.Connection[Any], count: int) -> list[uuid.UUID]:
    """Write dead letters of the outbox and of the consumers, with one more of each than is named by the result."""
    ids = [uuid7() for _ in range(count)]
    for number, event_id in enumerate([*ids, uuid7()]):
        key = {"aggregate_id": f"k{number}", "payload": Jsonb({"card": SECRET})}
        put(admin, "outbox.dead_letters", id=1000 + number, event_id=event_id, headers="{}", **key)
        message = {"message_id": event_id, "message_key": f"k{number}".encode(), "message_value": SECRET.encode()}
        put(admin, "consumer.dead_letters", message_offset=number, error="division by zero", **message)
    return ids


def test_a_writer_writes_through_the_library_and_does_nothing_else(roles):
    url = roles.of(RoleKind.WRITER)
    with psycopg.connect(url) as connection:
        Outbox().add_many(connection, [Event("Order", "1", "T", {"n": 1}), Event("Order", "2", "T", b"bytes")])
        Outbox().add(connection, Event("Order", "3", "T", headers={"tenant": "acme"}), lock_key=True)
    engine = sa.create_engine(sqlalchemy_url(url))
    with Session(engine) as session, session.begin():
        Outbox().add(session, Event("Order", "4", "T", None))
    engine.dispose()
    assert roles.admin.execute("SELECT count(*) FROM outbox.events").fetchone() == (4,)
    later = dt.datetime.now(dt.UTC) + dt.timedelta(days=1)
    with psycopg.connect(url) as connection:
        event_id = Outbox().add(connection, Event("Order", 5, "T", {"n": 5}), not_before=later)
        connection.commit()
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            Outbox().cancel(connection, event_id)
    with psycopg.connect(roles.of(RoleKind.CANCELLER)) as connection:
        assert Outbox().reschedule(connection, event_id, delay=dt.timedelta(hours=1))
        assert Outbox().cancel(connection, event_id)
    with psycopg.connect(url) as connection:
        unique, keyed = Outbox(unique_keys=True), Event("Order", 6, "T", idempotency_key="k")
        assert unique.add(connection, keyed) == unique.add(connection, keyed)
    refused(
        url,
        "SELECT added_at FROM outbox.idempotency_keys",
        "DELETE FROM outbox.idempotency_keys",
        "UPDATE outbox.idempotency_keys SET event_type = 'U'",
        "INSERT INTO outbox.idempotency_keys (aggregate_type, idempotency_key, event_id, aggregate_id, event_type, "
        "added_at) VALUES ('A', 'k', gen_random_uuid(), '1', 'T', now())",
        "INSERT INTO outbox.events (aggregate_type, aggregate_id, event_type, from_relay) VALUES ('A', '1', 'T', true)",
        "INSERT INTO outbox.events (aggregate_type, aggregate_id, event_type, created_at) "
        "VALUES ('A', '1', 'T', now())",
        "SELECT event_id FROM outbox.events",
        "SELECT event_id FROM outbox.scheduled",
        "INSERT INTO outbox.scheduled (aggregate_type, aggregate_id, event_type, not_before, scheduled_at) "
        "VALUES ('A', '1', 'T', now(), now())",
        "UPDATE outbox.events SET event_type = 'U'",
        "DELETE FROM outbox.events",
        "SELECT FROM outbox.lanes",
        "SELECT FROM outbox.published",
        "CREATE TABLE outbox.mine ()",
        "TRUNCATE outbox.events",
    )


def test_a_relay_publishes_and_does_not_see_the_audit(roles, outbox_kafka, outbox_relay, order):
    """Beside a writer of one aggregate type only: row security hides no row from a relay, nor from an operator."""
    kind, topic = order
    url, writer = roles.of(RoleKind.RELAY), roles.make("writer")
    outbox(roles.url, "db", "roles", f"writer={writer}", "--aggregate-type", f"{writer}={kind}", "--apply")
    for number, address in enumerate((roles.url, roles.url.replace("postgres@", f"{writer}@"))):
        with psycopg.connect(address) as connection:
            Outbox().add_many(connection, [Event(kind, f"k{number} {n}", "T") for n in range(24)])
            Outbox().add(connection, Event(kind, f"later {number}", "T"), not_before=dt.datetime.now(dt.UTC))
    relay = outbox_relay(database_url=url, relay__archive_days=1, relay__lease_seconds=2)
    assert len(outbox_kafka.consume(topic, 50)) == 50
    settled = "SELECT (SELECT count(*) FROM outbox.published), (SELECT count(*) FROM outbox.events)"
    wait_until(lambda: roles.admin.execute(settled).fetchone() == (50, 0), what="the events to be archived")
    relay.terminate()
    assert relay.wait() == 0
    refused(
        url,
        "SELECT FROM outbox.audit",
        "INSERT INTO outbox.audit (what, details) VALUES ('x', '{}')",
        "SELECT FROM outbox.published",
        "DELETE FROM outbox.published",
        "UPDATE outbox.events SET event_type = 'U'",
        "UPDATE outbox.dead_letters SET attempts = 0",
        "DELETE FROM outbox.lanes",
        "UPDATE outbox.streams SET flushed_lsn = 0",
        "CREATE TABLE outbox.mine ()",
    )
    with psycopg.connect(roles.of(RoleKind.OPERATOR)) as connection:
        connection.execute(
            "INSERT INTO outbox.events (aggregate_type, aggregate_id, event_type, from_relay) "
            "VALUES ('A', '1', 'T', true)"
        )
        assert connection.execute("SELECT count(*) FROM outbox.events").fetchone() == (1,)


def test_an_operator_retries_discards_and_leaves_the_audit_as_it_is(roles):
    url = roles.of(RoleKind.OPERATOR)
    first, second, third = (str(one) for one in bury(roles.admin, 3))
    assert len(json.loads(outbox(url, "dead-letters", "list", "--json"))["failures"]) == 4
    assert SECRET in outbox(url, "dead-letters", "show", first)
    outbox(url, "dead-letters", "retry", first)
    outbox(url, "dead-letters", "discard", second, "--reason", "test")
    outbox(url, "replay", "--all", "--yes")
    assert "a dead letter" in outbox(url, "trace", third)
    assert roles.admin.execute("SELECT count(*) FROM outbox.audit").fetchone() != (0,)
    refused(
        url,
        "DELETE FROM outbox.audit",
        "UPDATE outbox.audit SET why = 'another'",
        "UPDATE outbox.events SET payload = '1'",
        "UPDATE outbox.dead_letters SET payload = '1'",
        "DELETE FROM outbox.published",
        "UPDATE outbox.lanes SET epoch = 0",
        "SELECT FROM consumer.offsets",
    )


def test_an_operator_who_may_see_groups_audits(roles, outbox_kafka, order):
    kind, topic = order
    url = roles.of(RoleKind.OPERATOR)
    outbox(roles.url, "db", "roles", f"consumer-monitor={psycopg.conninfo.conninfo_to_dict(url)['user']}", "--apply")
    now = dt.datetime.now(dt.UTC)
    ten_minutes_ago = uuid.UUID(int=int(now.timestamp() * 1000 - 600_000) << 80 | 7 << 76 | 2 << 62)
    put(roles.admin, "outbox.dead_letters", event_id=ten_minutes_ago, aggregate_type=kind, headers="{}")
    settings = load(database_url=url, kafka={"bootstrap_servers": outbox_kafka.bootstrap_servers})
    Follower(settings, Scope(now - dt.timedelta(hours=1), now)).advance()
    assert roles.admin.execute("SELECT topic, missing FROM outbox.verified WHERE topic <> ''").fetchall() == [
        (topic, 0)
    ]


def test_an_operator_of_the_sink_sees_to_dead_letters_offsets_and_calls(roles, outbox_kafka):
    url, kafka = roles.of(RoleKind.CONSUMER_OPERATOR), {"kafka__bootstrap_servers": outbox_kafka.bootstrap_servers}
    topic = outbox_kafka.create_topic(outbox_kafka.name("t"), 2)
    bury(roles.admin, 0)
    [(letter,)] = roles.admin.execute("SELECT id FROM consumer.dead_letters").fetchall()
    outbox(url, "offsets", "set", "g", topic, "0", "0", "--new", "--reason", "test", **kafka)
    assert topic in outbox(url, "offsets", "show", **kafka)
    outbox(url, "offsets", "reset", "g", "--topic", topic, "--to", "latest", "--reason", "test", **kafka)
    assert "g" in outbox(url, "consumers", "groups")
    side = ("--side", "consumer")
    assert "division by zero" in outbox(url, "dead-letters", "list", *side)
    assert str(letter) in outbox(url, "dead-letters", "show", str(letter), *side)
    outbox(url, "dead-letters", "retry", str(letter), *side)
    outbox(url, "dead-letters", "discard", str(letter), "--reason", "test", *side)
    first, second = (str(put(roles.admin, "consumer.reservations", message_offset=n)["message_id"]) for n in (1, 2))
    assert first in outbox(url, "external", "list")
    outbox(url, "external", "retry", first)
    outbox(url, "external", "cancel", second, "--reason", "test")
    outbox(url, "external", "forget", "--days", "1")
    outbox(url, "offsets", "forget", "g", "--topic", topic, "--reason", "test", **kafka)
    whats = {what for (what,) in roles.admin.execute("SELECT what FROM consumer.audit")}
    assert len(whats) >= 4, whats
    refused(
        url,
        "DELETE FROM consumer.audit",
        "UPDATE consumer.audit SET why = 'another'",
        "DELETE FROM consumer.processed_messages",
        "INSERT INTO consumer.processed_messages VALUES ('g', now(), gen_random_uuid())",
        "INSERT INTO consumer.dead_letters (grp) VALUES ('g')",
        "DELETE FROM consumer.losses",
        "SELECT FROM outbox.events",
        "CREATE TABLE consumer.mine ()",
    )


def test_a_caller_settles_reservations_and_can_not_change_what_is_called(roles, provider):
    url = roles.of(RoleKind.EXTERNAL)
    sink = Sink(roles.url)
    external = payments(provider.url, max_attempts=1)
    provider.tell("bad", "500")
    ids = sink.reserve(external, ["good", "bad"])
    role = sql.Identifier(psycopg.conninfo.conninfo_to_dict(url)["user"])
    # What its own SQL needs.
    roles.admin.execute(sql.SQL("GRANT SELECT, INSERT, UPDATE ON orders TO {}").format(role))
    caller = SimpleNamespace(connect=lambda: psycopg.connect(url, autocommit=True))
    counts = Sink.drain(caller, external)  # type: ignore[arg-type]
    assert (counts["confirmed"], counts["stuck"]) == (1, 1)
    Caller(external, caller.connect).settle_by_hand(ids[1], confirmed=True, why="they said so")
    assert sink.states() == {"good": "confirmed", "bad": "confirmed"}
    assert sink.orders() == {"good": ("paid", 1), "bad": ("paid", 1)}
    refused(
        url,
        "UPDATE consumer.reservations SET request = '{}'",
        "UPDATE consumer.reservations SET message_id = gen_random_uuid()",
        "DELETE FROM consumer.reservations",
        "INSERT INTO consumer.reservations (grp) VALUES ('g')",
        "SELECT FROM consumer.audit",
        "INSERT INTO consumer.audit (what, who, details) VALUES ('x', 'somebody', '{}')",
        "SELECT FROM consumer.offsets",
        "SELECT FROM consumer.dead_letters",
    )


def test_the_audit_names_the_session_that_acted_and_keeps_what_it_said(roles):
    """Whatever was granted before, and whatever role the session has set: no line is in another's name."""
    for kind in AUDITORS:
        schema = "consumer" if kind.of_sink else "outbox"
        url, member = roles.of(kind), roles.make("member")
        role = str(psycopg.conninfo.conninfo_to_dict(url)["user"])
        # As if it had been granted by hand.
        everything = sql.SQL("GRANT ALL ON {} TO {}").format(sql.Identifier(schema, "audit"), sql.Identifier(role))
        roles.admin.execute(everything)
        outbox(roles.url, "db", "roles", f"{kind}={role}", "--apply")
        roles.admin.execute(sql.SQL("GRANT {} TO {}").format(sql.Identifier(role), sql.Identifier(member)))
        insert = f"INSERT INTO {schema}.audit (what, why, details) VALUES ('{kind}', NULL, '{{}}')"
        refused(
            url,
            *(
                f"INSERT INTO {schema}.audit (what, details, {column}) VALUES ('w', '{{}}', {value})"
                for column, value in (("who", "'postgres'"), ("at", "now() - interval '1 day'"))
            ),
            f"INSERT INTO {schema}.audit (what, details, id) OVERRIDING SYSTEM VALUE VALUES ('w', '{{}}', 1)",
            f"UPDATE {schema}.audit SET why = 'another'",
            f"DELETE FROM {schema}.audit",
            f"TRUNCATE {schema}.audit",
            f"ALTER TABLE {schema}.audit ALTER who SET DEFAULT 'postgres'",
            f"CREATE TRIGGER mine BEFORE INSERT ON {schema}.audit FOR EACH ROW "
            "EXECUTE FUNCTION tsvector_update_trigger()",
        )
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(insert)
        with psycopg.connect(roles.url.replace("postgres@", f"{member}@"), autocommit=True) as connection:
            connection.execute(sql.SQL("SET ROLE {}").format(sql.Identifier(role)))
            connection.execute(insert)
        lines = roles.admin.execute(
            f"SELECT who FROM {schema}.audit WHERE what = %s ORDER BY id", (str(kind),)
        ).fetchall()
        assert lines == [(role,), (member,)], kind


def consume(roles: Roles, topics: Any) -> None:
    """Write a group with an offset of a topic that exists: one that does not is asked for again and again."""
    put(roles.admin, "consumer.groups")
    put(roles.admin, "consumer.offsets", topic=topics.create_topic(topics.name("t"), 1))


def test_a_monitor_sees_everything_but_contents(roles, outbox_kafka):
    url = roles.of(RoleKind.MONITOR)
    kafka = {"kafka__bootstrap_servers": outbox_kafka.bootstrap_servers}
    # As it may have been granted before.
    [role] = re.findall("monitor_[0-9a-f]+", url)
    roles.admin.execute(sql.SQL("GRANT SELECT ON outbox.events TO {}").format(sql.Identifier(role)))
    outbox(roles.url, "db", "roles", f"monitor={role}", f"consumer-monitor={role}", "--apply")
    [event_id] = bury(roles.admin, 1)
    kind = outbox_kafka.name("Order")
    with psycopg.connect(roles.url) as connection:
        waiting = Outbox().add(connection, Event(kind, "w", "T", {"card": SECRET}, headers={"tenant": SECRET}))
        # It has waited for long enough for its topic to be looked for, which there is not.
        connection.execute("UPDATE outbox.events SET created_at = now() - interval '1 min'")
        connection.execute("INSERT INTO outbox.relays (instance, version, alive_until) VALUES ('a', '1', 'infinity')")
    consume(roles, outbox_kafka)
    for command in (("status",), ("trace", str(event_id)), ("trace", "--aggregate", f"{kind}/w")):
        mine, theirs = (
            json.loads(CliRunner().invoke(app, [*command, "--json"], env=environment(one, kafka)).stdout)
            for one in (url, roles.url)
        )
        assert _lasting(mine) == _lasting(theirs), command
        assert SECRET not in json.dumps(mine)
        if command == ("status",):
            missing = f"topic '{kind.lower()}-events' does not exist"
            assert [any(each.startswith(missing) for each in one["problems"]) for one in (mine, theirs)] == [True, True]
    assert "lane" in outbox(url, "trace", str(waiting), **kafka)
    mine, theirs = (
        json.loads(CliRunner().invoke(app, ["doctor", "--json"], env=environment(one, kafka)).stdout)["findings"]
        for one in (url, roles.url)
    )
    assert [each["about"] for each in mine] == [each["about"] for each in theirs]
    levels = [
        [(each["about"], each["level"]) for each in findings if not each["about"].startswith("Kafka")]
        for findings in (mine, theirs)
    ]
    assert levels[0] == levels[1]
    refused(
        url,
        *(
            f"SELECT {column} FROM outbox.{table}"
            for table in ("events", "dead_letters", "published")
            for column in ("payload", "payload_bytes", "headers", "*")
        ),
        *(
            f"SELECT {column} FROM consumer.dead_letters"
            for column in ("message_value", "message_headers", "message_key")
        ),
        *(f"SELECT {column} FROM consumer.reservations" for column in ("request", "response", "order_key")),
        "SELECT FROM outbox.audit",
        "SELECT FROM consumer.audit",
        "DELETE FROM outbox.lanes",
        "UPDATE outbox.lanes SET epoch = 0",
        "INSERT INTO outbox.events (aggregate_type, aggregate_id, event_type) VALUES ('A', '1', 'T')",
    )


def environment(url: str, settings: dict[str, str]) -> dict[str, str]:
    return {"OUTBOX_DATABASE_URL": url} | {f"OUTBOX_{name.upper()}": value for name, value in settings.items()}


def _lasting(value: Any) -> Any:
    """Return what a second look sees too: without times and their differences."""
    if isinstance(value, dict):
        return {name: _lasting(each) for name, each in value.items() if not re.search(r"^at$|seconds|problems", name)}
    return [_lasting(each) for each in value] if isinstance(value, list) else value


OUTBOX_FIGURES = {
    "events": {"backlog": None, "oldest_seconds": None},
    "failures": {"retrying": None, "blocking": None},
    "dead_letters": {"dead_letters": None},
    "relays": {"relays": []},
    "lanes": {"lanes": [], "backlog": None},
    "streams": {"slot": None},
}
GROUP_FIGURES = {
    "dead_letters": {"dead_letters": None, "retrying": None},
    "reservations": {"stuck": None},
    "losses": {"losses": None},
}


def test_a_missing_right_hides_the_figures_of_its_table_alone_and_names_the_grant(roles, outbox_kafka):
    url = roles.of(RoleKind.MONITOR)
    role = psycopg.conninfo.conninfo_to_dict(url)["user"]
    kafka = {"kafka__bootstrap_servers": outbox_kafka.bootstrap_servers}
    outbox(roles.url, "db", "roles", f"consumer-monitor={role}", "--apply")
    [event_id] = bury(roles.admin, 1)
    with psycopg.connect(roles.url) as connection:
        waiting = Outbox().add(connection, Event("Order", "w", "T"))
        connection.execute("INSERT INTO outbox.relays (instance, version, alive_until) VALUES ('a', '1', 'infinity')")
    consume(roles, outbox_kafka)

    def look(*command: str) -> Any:
        done = CliRunner().invoke(app, [*command, "--json"], env=environment(url, kafka))
        return json.loads(done.stdout)

    whole = _lasting(look("status"))
    for schema, figures in (("outbox", OUTBOX_FIGURES), ("consumer", GROUP_FIGURES)):
        for table, hidden in figures.items():
            names = sql.Identifier(schema, table), sql.Identifier(str(role))
            roles.admin.execute(sql.SQL("REVOKE SELECT ON {} FROM {}").format(*names))
            found = look("status")
            [problem] = [text for text in found["problems"] if "can't be" in text]
            grant = sql.SQL("GRANT SELECT ON {} TO {}").format(*names).as_string()
            assert problem.endswith(f": permission denied for table {table}: {grant}")
            mine = found["outbox"] if schema == "outbox" else found["groups"][0]
            assert {name: mine[name] for name in hidden} == hidden
            # Nothing else is another than before; what was hidden is taken from there.
            theirs = whole["outbox"] if schema == "outbox" else whole["groups"][0]
            aside = {*hidden, "hidden", "exact", "counted", "relays", "lanes"}
            found = _lasting(mine)
            assert {name: found[name] for name in found.keys() - aside} == {
                name: theirs[name] for name in theirs.keys() - aside
            }
            assert outbox(url, "status", status=1, **kafka).count("permission denied for table") == 1
            for wanted in (waiting, event_id):
                traced = look("trace", str(wanted))
                needed = {"streams", "relays", "losses"}
                if table not in needed and not (wanted == event_id and table in {"lanes", "failures"}):
                    assert [text for text in traced["unseen"] if grant in text] != []
                if table not in {"events", "dead_letters"}:
                    assert traced["event"]["state"] == ("waiting" if wanted == waiting else "dead")
            roles.admin.execute(sql.SQL(grant))  # type: ignore[arg-type]
    assert _lasting(look("status")) == whole
    # The whole schema is another matter.
    roles.admin.execute(sql.SQL("REVOKE USAGE ON SCHEMA outbox FROM {}").format(sql.Identifier(str(role))))
    assert "permission denied for schema outbox" in look("status")["unseen"]["the outbox"]


def test_a_migrator_needs_no_superuser_and_takes_over_what_is_there(roles, outbox_postgres_server):
    role, heir = roles.make("migrator"), roles.make("heir")
    name = f"empty_{token()}"
    url = outbox_postgres_server.create_database(name)
    try:
        mine = url.replace("postgres@", f"{role}@")
        assert "permission denied for database" in outbox(mine, "db", "upgrade", status=1)
        outbox(url, "db", "roles", f"migrator={role}", f"consumer-migrator={role}", "--apply")
        for side in ((), ("--consumer",)):
            outbox(mine, "db", "upgrade", *side)
            assert "as this version expects" in outbox(mine, "db", "check", *side)
        outbox(mine, "db", "lanes", "8")
        # Grants come from it too.
        outbox(mine, "db", "roles", f"writer={heir}", "--apply")
        # Another one takes over, twice; the first has no rights left.
        for _ in range(2):
            outbox(url, "db", "roles", f"migrator={heir}", f"consumer-migrator={heir}", "--apply")
        theirs = url.replace("postgres@", f"{heir}@")
        outbox(theirs, "db", "prune", "--days", "3")
        outbox(theirs, "db", "prune", "--consumer")
        outbox(theirs, "db", "downgrade", "base")
        outbox(theirs, "db", "upgrade")
        outbox(theirs, "db", "downgrade", "base")
        refused(mine, "SELECT FROM consumer.groups", "CREATE TABLE outbox.mine ()")
        with psycopg.connect(theirs) as connection:
            others = (
                "SELECT relname FROM pg_class WHERE relnamespace = 'consumer'::regnamespace AND relowner <> %s::regrole"
            )
            assert connection.execute(others, (heir,)).fetchall() == []
    finally:
        outbox_postgres_server.drop_database(name)
