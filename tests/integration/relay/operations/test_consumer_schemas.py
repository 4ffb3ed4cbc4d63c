"""A schema of the consumers' tables for each team, in one database: its roles, commands and page reach no other's."""

from __future__ import annotations

import json
from functools import partial
from types import SimpleNamespace
from typing import Any

import psycopg
import sqlalchemy as sa
from external_support import Sink, payments, provider
from inbox_log import log
from inbox_member import apply
from page_support import PageRun
from psycopg import sql
from rows_and_roles import Roles, outbox, put, refused, roles
from uuid_utils.compat import uuid7

from outbox.consumer.tables import consumer_tables
from outbox.inbox import KafkaMessage, Reject, once
from relay.operations.roles import RoleKind

__all__ = ["log", "provider", "roles"]

TEAMS = ("team_a", "Team B")
SIDE = ("--side", "consumer")


def tables(roles: Roles, team: str) -> None:
    outbox(roles.url, "db", "upgrade", "--consumer", "--schema", team)


def role_of(url: str) -> sql.Identifier:
    return sql.Identifier(str(psycopg.conninfo.conninfo_to_dict(url)["user"]))


def handle(team: str, connection: psycopg.Connection[Any], message: KafkaMessage) -> None:
    if message.key() == b"bad":
        raise Reject("not today")
    apply(connection, message, team)


def consume(roles: Roles, log: Any, team: str) -> str:
    """Apply the log's messages as a consumer of the team: its role's address. The last one becomes a dead letter."""
    url = roles.of(RoleKind.CONSUMER, "--schema", team)
    roles.admin.execute(sql.SQL("GRANT INSERT ON effects TO {}").format(role_of(url)))
    position = f'SELECT next_offset FROM "{team}".offsets'
    with log.consuming(partial(handle, team), database=url, schema=team, on_failure="dead-letter") as running:
        running.wait(lambda: log.run(position) == [(3,)], f"{team} to read all")
    return url


def test_a_consumer_reaches_the_groups_of_its_schema_only(roles, log):
    """Groups of one name, one behind the other, in both."""
    log.produce(["a", "a", "bad"])
    urls = {}
    for team in TEAMS:
        tables(roles, team)
        urls[team] = consume(roles, log, team)
    assert log.run("SELECT member, key, n FROM effects ORDER BY id") == [
        (team, "a", number) for team in TEAMS for number in (0, 1)
    ]
    consumer_tables(metadata := sa.MetaData())
    names = [table.name for table in metadata.tables.values()]
    assert {"groups", "offsets", "processed_messages", "dead_letters", "audit"} <= {*names}
    for team, other in (TEAMS, TEAMS[::-1]):
        dead = f'SELECT grp, message_offset FROM "{team}".dead_letters'
        assert log.run(dead) == [(log.group, 2)]
        refused(urls[team], *(f'SELECT FROM "{other}".{name}' for name in names), f'CREATE TABLE "{other}".mine ()')
        event_id = uuid7()
        with psycopg.connect(urls[team]) as connection:
            assert [once(connection, event_id, consumer="c", schema=team) for _ in range(2)] == [True, False]


def test_operators_and_the_page_have_one_schema(roles, log, monkeypatch):
    log.produce(["a", "a", "bad"])
    put(roles.admin, "consumer.reservations")
    for team in TEAMS:
        tables(roles, team)
        consume(roles, log, team)
        copied = "INSERT INTO {} OVERRIDING SYSTEM VALUE SELECT * FROM consumer.reservations"
        roles.admin.execute(sql.SQL(copied).format(sql.Identifier(team, "reservations")))
    mine, theirs = TEAMS[::-1]
    kafka = {"kafka__bootstrap_servers": log.servers}
    url = roles.of(RoleKind.CONSUMER_OPERATOR, "--schema", mine)
    command = partial(outbox, url, consumer_schema=mine, **kafka)
    assert log.topic in command("offsets", "show")
    assert log.group in command("consumers", "groups")
    command("offsets", "reset", log.group, "--topic", log.topic, "--to", "latest", "--reason", "test")
    assert "not today" in command("dead-letters", "list", *SIDE)
    [(letter,)] = log.run(f'SELECT id FROM "{mine}".dead_letters')
    command("dead-letters", "retry", str(letter), *SIDE)
    assert "bad" in command("dead-letters", "show", str(letter), *SIDE)
    command("dead-letters", "discard", str(letter), "--reason", "test", *SIDE)
    [(call,)] = log.run(f'SELECT message_id FROM "{mine}".reservations')
    assert str(call) in command("external", "list")
    command("external", "cancel", str(call), "--reason", "test")
    command("offsets", "forget", log.group, "--topic", log.topic, "--reason", "test")
    for schema in ({}, {"consumer_schema": theirs}):
        assert "permission denied for schema" in outbox(url, "consumers", "groups", status=1, **kafka, **schema)
    changed = 'SELECT (SELECT count(*) FROM "{0}".dead_letters), (SELECT count(*) FROM "{0}".offsets), (SELECT state '
    changed += 'FROM "{0}".reservations), (SELECT count(*) FROM "{0}".audit)'
    assert log.run(changed.format(theirs)) == [(1, 1, "stuck", 0)]
    assert log.run(changed.format(mine))[0][:3] == (0, 0, "cancelling")

    # The tables' owner.
    for schema in TEAMS:
        assert "created" in outbox(roles.url, "db", "prune", "--consumer", consumer_schema=schema)
        partitions = "SELECT count(*) FROM pg_inherits WHERE inhparent = %s::regclass"
        assert log.run(partitions, f'"{schema}".processed_messages')[0][0] > 14
        assert "as this version expects" in outbox(roles.url, "db", "check", "--consumer", consumer_schema=schema)

    # What shows: one schema each.
    viewer = roles.of(RoleKind.PAGE)
    name = role_of(viewer).as_string().strip('"')
    outbox(roles.url, "db", "roles", f"consumer-page={name}", "--apply", consumer_schema=theirs)
    shown = json.loads(outbox(viewer, "status", "--json", consumer_schema=theirs, status=1, **kafka))
    assert [(group["group"], group["dead_letters"]) for group in shown["groups"]] == [(log.group, 1)]
    assert json.loads(outbox(roles.url, "status", "--json", status=1, **kafka))["groups"] == []
    monkeypatch.setenv("OUTBOX_DATABASE_URL", viewer)
    monkeypatch.setenv("OUTBOX_CONSUMER_SCHEMA", theirs)
    monkeypatch.setenv("OUTBOX_KAFKA__BOOTSTRAP_SERVERS", log.servers)
    page = PageRun().sign_in()
    try:
        assert log.group in page.ask("/consumers").text
        assert "not today" in page.ask("/dead-letters").text
    finally:
        page.close()


def test_calls_of_a_team(roles, provider):
    team = TEAMS[1]
    tables(roles, team)
    sink = Sink(roles.url)
    external = payments(provider.url, schema=team)
    url = roles.of(RoleKind.EXTERNAL, "--schema", team)
    roles.admin.execute(sql.SQL("GRANT SELECT, INSERT, UPDATE ON orders TO {}").format(role_of(url)))
    sink.reserve(external, ["one"])
    caller = SimpleNamespace(connect=lambda: psycopg.connect(url, autocommit=True))
    assert Sink.drain(caller, external)["confirmed"] == 1  # type: ignore[arg-type]
    assert sink.orders() == {"one": ("paid", 1)}
    refused(url, "SELECT FROM consumer.reservations")
