"""The minimal rights of each kind of role, as SQL. docs/operations/migrations.md explains them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Final

from psycopg import sql

from outbox.errors import ConfigurationError


class Kind(StrEnum):
    """The purpose of a role."""

    WRITER = "writer"
    RELAY = "relay"
    OPERATOR = "operator"
    PAGE = "page"
    CONSUMER = "consumer"


EVENT_COLUMNS: Final = (
    "event_id",
    "aggregate_type",
    "aggregate_id",
    "event_type",
    "payload",
    "payload_bytes",
    "headers",
    "created_at",
)
"""The columns that a writer sets, without ``from_relay``: with it a row could pose as a dead letter's copy."""

_TABLES: Final[Mapping[Kind, Sequence[tuple[str, Sequence[str]]]]] = {
    Kind.RELAY: (
        ("SELECT, INSERT, DELETE", ("events",)),
        ("SELECT, UPDATE", ("lanes",)),
        ("INSERT", ("published",)),
        ("SELECT, INSERT", ("dead_letters",)),
        ("SELECT, INSERT, UPDATE, DELETE", ("failures", "relays")),
        ("SELECT", ("streams",)),
    ),
    Kind.OPERATOR: (
        ("SELECT, INSERT, DELETE", ("events",)),
        ("SELECT, DELETE", ("dead_letters",)),
        ("SELECT, INSERT, UPDATE, DELETE", ("failures",)),
        # For `outbox status` and `outbox trace`.
        ("SELECT", ("published", "lanes", "relays", "streams")),
        ("SELECT, INSERT", ("audit",)),
    ),
    Kind.PAGE: (
        ("SELECT", ("events", "lanes", "relays", "failures", "dead_letters", "published", "streams", "audit")),
    ),
    Kind.CONSUMER: (
        (
            "SELECT, INSERT, UPDATE, DELETE",
            ("groups", "offsets", "processed_messages", "dead_letters", "losses", "reservations", "checkpoints"),
        ),
        # To delete expired ids there; a task inserts ids through the parent table.
        ("SELECT, DELETE", ("processed_messages_default",)),
        ("SELECT, INSERT", ("audit",)),
    ),
}

# The function's arguments differ since Postgres 17. By default everybody may execute it.
_EMIT: Final = """DO {tag}
DECLARE
    emit regprocedure;
BEGIN
    FOR emit IN SELECT oid FROM pg_proc
                 WHERE proname = 'pg_logical_emit_message' AND pronamespace = 'pg_catalog'::regnamespace
    LOOP
        EXECUTE format('REVOKE EXECUTE ON FUNCTION %s FROM PUBLIC', emit);
        EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO %s', emit, {names});
    END LOOP;
END {tag}"""
_TAG: Final = "$outbox$"


def grants(
    roles: Sequence[tuple[Kind, str]], schema: str, consumer_schema: str, *, wal: bool, messages: bool
) -> Iterator[str]:
    """Yield the statements for existing roles, each of a kind.

    ``wal`` is for a relay with source=wal. With ``messages``, only the writers and relays among the roles may write
    messages into the WAL (the statement needs a superuser). Raises ConfigurationError for an invalid name.
    """
    for kind, role in roles:
        yield from _of(kind, role, consumer_schema if kind is Kind.CONSUMER else schema, wal=wal)
    emitters = [name for kind, name in roles if kind in {Kind.WRITER, Kind.RELAY}]
    if messages and emitters:
        names = ", ".join(sql.Identifier(name).as_string() for name in dict.fromkeys(emitters))
        yield sql.SQL(_EMIT).format(tag=sql.SQL(_TAG), names=sql.Literal(names)).as_string()


def _of(kind: Kind, role: str, schema: str, *, wal: bool) -> Iterator[str]:
    if not role or "\0" in role or _TAG in role or len(role.encode()) > 63:
        raise ConfigurationError(f"{role!r} can't be the name of a role")
    names = {"schema": sql.Identifier(schema), "role": sql.Identifier(role)}
    yield sql.SQL("GRANT USAGE ON SCHEMA {schema} TO {role}").format(**names).as_string()
    if kind is Kind.WRITER:
        events = sql.Identifier(schema, "events")
        columns = sql.SQL(", ").join(map(sql.Identifier, EVENT_COLUMNS))
        # A right on the whole table includes every column.
        yield sql.SQL("REVOKE INSERT ON {events} FROM {role}").format(events=events, **names).as_string()
        yield (
            sql.SQL("GRANT INSERT ({columns}) ON {events} TO {role}")
            .format(columns=columns, events=events, **names)
            .as_string()
        )
        return
    for rights, tables in _TABLES[kind]:
        yield (
            sql.SQL("GRANT {rights} ON {tables} TO {role}")
            .format(
                rights=sql.SQL(rights),
                tables=sql.SQL(", ").join(sql.Identifier(schema, table) for table in tables),
                **names,
            )
            .as_string()
        )
    if kind is Kind.RELAY and wal:
        streams = sql.Identifier(schema, "streams")
        yield sql.SQL("GRANT UPDATE ON {streams} TO {role}").format(streams=streams, **names).as_string()
        yield sql.SQL("ALTER ROLE {role} REPLICATION").format(**names).as_string()
