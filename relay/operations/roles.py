"""The minimal rights of each kind of role, as SQL. docs/operations/migrations.md explains them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Final, LiteralString

from psycopg import sql

from outbox._statements import KEY_COLUMNS
from outbox.errors import ConfigurationError


class RoleKind(StrEnum):
    WRITER = "writer"
    """A service that writes and schedules events. It can read idempotency keys, but no events."""
    RELAY = "relay"
    """A relay. With `--wal` also UPDATE on `streams`, INSERT (what, why, details) on `audit` for the repair of a lost
    slot, and the attribute REPLICATION."""
    OPERATOR = "operator"
    """Handles failed events: `outbox dead-letters`, `outbox replay`, `outbox status`, `outbox trace`. It also reads the
    ledger, if there is one, for `outbox audit`."""
    PAGE = "page"
    """A page or a dashboard that shows everything, including payloads and, if there is one, the ledger."""
    CONSUMER = "consumer"
    """A consumer, without the rights on its sink's own tables. It reads and changes all groups of its schema.
    `atomic="batch"` needs CREATE on the schema."""
    CONSUMER_OPERATOR = "consumer-operator"
    """Handles consumers: `outbox dead-letters --side consumer`, `outbox offsets`, `outbox external list`,
    `retry`, `cancel` and `forget`."""
    CONSUMER_MONITOR = "consumer-monitor"
    """`outbox status` and `outbox trace` on the sink's side, without contents; but errors may quote a value."""
    CONSUMER_PAGE = "consumer-page"
    """What the operations page shows of the sink's side, including keys and messages."""
    EXTERNAL = "external"
    """`outbox external run` and `settle`, without the rights of its own SQL. It can't change what is called."""
    MONITOR = "monitor"
    """`outbox status`, `outbox trace` and `outbox doctor` without payloads and headers."""
    CANCELLER = "canceller"
    """A service that cancels and reschedules events, any of them, in addition to a writer's rights."""
    MIGRATOR = "migrator"
    """The owner of the schema and its tables, for `outbox db upgrade`, `prune` and `lanes`; no superuser. CREATE on the
    database is for the first upgrade, `outbox db check` and `outbox cdc setup`."""
    CONSUMER_MIGRATOR = "consumer-migrator"
    """The same for the consumers' tables."""

    @property
    def of_sink(self) -> bool:
        """Return whether its rights are those of the consumers' schema, in the sink's database."""
        return self is RoleKind.EXTERNAL or self.value.startswith("consumer")

    @property
    def default_role(self) -> str:
        return f"outbox_{self.value.replace('-', '_')}"


_OWNERS: Final = frozenset({RoleKind.MIGRATOR, RoleKind.CONSUMER_MIGRATOR})
USUAL: Final = tuple(kind for kind in RoleKind if not kind.of_sink and kind not in _OWNERS)
"""The kinds whose rights are printed if none is named."""


_NAMED: Final = ("event_id", "aggregate_type", "aggregate_id", "event_type")
EVENT_COLUMNS: Final = (*_NAMED, "payload", "payload_bytes", "headers")
"""The columns that a writer sets. Not ``created_at``, which the server sets, nor ``from_relay``: with it a row could
pose as a dead letter's copy."""
_AUDITS: Final = ("INSERT", "audit", ("what", "why", "details"))
"""Lines in the audit. Not ``who`` and ``at``: the server sets them, to the session's user and the time."""

TABLES: Final[Mapping[RoleKind, Sequence[tuple[str, Sequence[str]]]]] = {
    RoleKind.CANCELLER: (("DELETE", ("scheduled", "idempotency_keys")),),
    RoleKind.RELAY: (
        ("SELECT, INSERT, DELETE", ("events",)),
        ("SELECT, UPDATE", ("lanes",)),
        ("INSERT", ("published",)),
        ("SELECT, INSERT", ("dead_letters",)),
        ("SELECT, INSERT, UPDATE, DELETE", ("failures", "relays")),
        ("SELECT", ("streams", "pauses", "verified")),
        # UPDATE to lock them; it changes none.
        ("SELECT, UPDATE (not_before), DELETE", ("scheduled",)),
        ("SELECT, DELETE", ("idempotency_keys",)),
    ),
    RoleKind.OPERATOR: (
        ("SELECT, INSERT, DELETE", ("events",)),
        ("SELECT, DELETE", ("dead_letters",)),
        ("SELECT, INSERT, UPDATE, DELETE", ("failures",)),
        # For `outbox status` and `outbox trace`.
        ("SELECT", ("published", "lanes", "relays", "streams")),
        ("SELECT", ("audit",)),
        # Not requested_by and requested_at: the server sets them.
        ("SELECT, INSERT (scope, name, reason), DELETE", ("pauses",)),
        ("SELECT, DELETE", ("scheduled", "idempotency_keys")),
        # For `outbox audit --follow`.
        ("SELECT, INSERT, UPDATE", ("verified",)),
    ),
    RoleKind.PAGE: (
        ("SELECT", ("events", "lanes", "relays", "failures", "dead_letters", "published")),
        ("SELECT", ("streams", "audit", "pauses", "scheduled", "verified")),
    ),
    RoleKind.CONSUMER: (
        (
            "SELECT, INSERT, UPDATE, DELETE",
            ("groups", "offsets", "processed_messages", "dead_letters", "losses", "reservations", "checkpoints"),
        ),
        # To delete expired ids there; a task inserts ids through the parent table.
        ("SELECT, DELETE", ("processed_messages_default",)),
        ("SELECT", ("audit",)),
    ),
    RoleKind.CONSUMER_OPERATOR: (
        ("SELECT, INSERT, UPDATE", ("groups",)),
        ("SELECT, INSERT, UPDATE, DELETE", ("offsets",)),
        ("SELECT, UPDATE, DELETE", ("dead_letters", "reservations")),
        # A move records what a killed at-most-once consumer had given up.
        ("SELECT, INSERT, UPDATE", ("losses",)),
        # For `outbox trace`.
        ("SELECT", ("processed_messages", "audit")),
    ),
    RoleKind.CONSUMER_MONITOR: (("SELECT", ("groups", "offsets", "losses", "processed_messages")),),
    RoleKind.CONSUMER_PAGE: (
        ("SELECT", ("groups", "offsets", "processed_messages", "dead_letters", "losses", "reservations", "audit")),
    ),
    RoleKind.EXTERNAL: (("SELECT", ("reservations",)),),
    RoleKind.MONITOR: (
        ("SELECT", ("lanes", "relays", "failures", "streams", "pauses", "verified")),
        # For `outbox doctor`.
        ("SELECT", ("events_id_seq",)),
    ),
}

_SEEN: Final = ("lane", "id", *_NAMED, "created_at")
_MESSAGE: Final = ("id", "grp", "topic", "part", "message_offset", "message_id")
_LETTER: Final = (
    *("topic_id", "message_time", "reason", "error", "sqlstate", "state", "attempts", "died_at", "last_failed_at"),
)
_CALL: Final = (
    *("state", "unsure", "taking_back", "attempts", "budget_from", "key_until", "worker", "last_error", "conflict"),
    *("next_attempt_at", "settled_at", "parked"),
)
COLUMNS: Final[Mapping[RoleKind, Sequence[tuple[str, str, Sequence[str]]]]] = {
    RoleKind.WRITER: (
        ("INSERT", "events", EVENT_COLUMNS),
        ("INSERT", "scheduled", (*EVENT_COLUMNS, "not_before")),
        # For Outbox(unique_keys=True).
        ("SELECT", "idempotency_keys", KEY_COLUMNS),
        ("INSERT", "idempotency_keys", KEY_COLUMNS),
    ),
    RoleKind.CANCELLER: (
        ("SELECT", "scheduled", ("event_id",)),
        ("UPDATE", "scheduled", ("not_before",)),
        ("SELECT", "idempotency_keys", ("event_id",)),
    ),
    RoleKind.OPERATOR: (_AUDITS,),
    RoleKind.CONSUMER: (_AUDITS,),
    RoleKind.CONSUMER_OPERATOR: (_AUDITS,),
    # All columns but the contents: payload, payload_bytes, headers.
    RoleKind.MONITOR: (
        ("SELECT", "events", (*_SEEN, "from_relay")),
        ("SELECT", "dead_letters", (*_SEEN, "attempts", "last_error", "first_failed_at", "dead_at")),
        ("SELECT", "published", (*_SEEN, "published_at", "topic", "partition", "offset")),
        ("SELECT", "scheduled", (*_SEEN[1:-1], "not_before", "scheduled_at")),
    ),
    # All columns but the contents: message_key, message_value, message_headers; order_key, request, response.
    RoleKind.CONSUMER_MONITOR: (
        ("SELECT", "dead_letters", (*_MESSAGE, *_LETTER)),
        ("SELECT", "reservations", (*_MESSAGE, "name", "reserved_at", *_CALL)),
    ),
    # Not what identifies a call, nor its request. The audit is for `outbox external settle`.
    RoleKind.EXTERNAL: (("UPDATE", "reservations", (*_CALL, "response")), _AUDITS),
}
"""Rights on some columns of a table, instead of the table."""

# Blocks of code run as a superuser, or as the tables' owner, with whatever search path the session has: names are
# qualified, and operators have exactly the types of pg_catalog's. See outbox/_clients/search_path.py.
_TAG: Final = "$outbox$"

# CREATE on the database is for the first revision, `outbox db check` (its scratch schema) and `outbox cdc setup`. The
# owner of a table's indexes and identity sequence changes with the table's.
_OWN: Final = """DO {tag}
DECLARE
    one regclass;
BEGIN
    EXECUTE pg_catalog.format('GRANT CREATE ON DATABASE %I TO %s', pg_catalog.current_database(), {role_name});
    ALTER SCHEMA {schema} OWNER TO {role};
    FOR one IN SELECT oid FROM pg_catalog.pg_class
                WHERE relnamespace = {schema_name}::regnamespace::oid AND relkind IN ('r', 'p')
                  AND relowner <> {role_name}::regrole::oid
    LOOP
        EXECUTE pg_catalog.format('ALTER TABLE %s OWNER TO %s', one, {role_name});
    END LOOP;
END {tag}"""

# The trigger's function runs with its owner's rights: the ledger's, which moved with the tables. No other function is
# moved: who may create in the consumers' schema could plant one there, for the new owner's rights.
_OWN_LEDGER: Final = """DO {tag}
BEGIN
    IF pg_catalog.to_regprocedure({function_name}) IS NOT NULL THEN
        ALTER FUNCTION {function}() OWNER TO {role};
    END IF;
END {tag}"""

# As `outbox db ledger on` grants it to who reads the archive then.
_READ_LEDGER: Final = """DO {tag}
BEGIN
    IF pg_catalog.to_regclass({ledger_name}) IS NOT NULL THEN
        GRANT SELECT ON {ledger}, {ledger_state} TO {role};
    END IF;
END {tag}"""
_READS_LEDGER: Final = frozenset({RoleKind.OPERATOR, RoleKind.PAGE})


def grants(roles: Sequence[tuple[RoleKind, str]], schema: str, consumer_schema: str, *, wal: bool) -> Iterator[str]:
    """Yield the statements for existing roles, each of a kind, to be executed in one transaction.

    Every REVOKE comes before the first GRANT, and an owner keeps all rights: a role of two kinds has those of both.
    ``wal`` is for a relay with source=wal. Raises ConfigurationError for an invalid name.
    """
    owners = {(role, kind.of_sink) for kind, role in roles if kind in _OWNERS}
    owning: list[str] = []
    revoking: list[str] = []
    granting: list[str] = []
    for kind, role in roles:
        of_schema = consumer_schema if kind.of_sink else schema
        if kind in _OWNERS:
            owning += _own(kind, role, of_schema)
            continue
        for statement in _of(kind, role, of_schema, wal=wal):
            if not statement.startswith("REVOKE"):
                granting.append(statement)
            elif (role, kind.of_sink) not in owners:
                revoking.append(statement)
    yield from (*owning, *revoking, *granting)


def _names(role: str, schema: str) -> dict[str, sql.Composable]:
    if not role or "\0" in role or _TAG in role or len(role.encode()) > 63:
        raise ConfigurationError(f"{role!r} can't be the name of a role")
    if role == "public":
        raise ConfigurationError("public means every role; name one role")
    names = {"schema": sql.Identifier(schema), "role": sql.Identifier(role)}
    literals = {f"{name}_name": sql.Literal(identifier.as_string()) for name, identifier in names.items()}
    return {**names, **literals, "tag": sql.SQL(_TAG)}


def _own(kind: RoleKind, role: str, schema: str) -> Iterator[str]:
    function = sql.Identifier(schema, "count_in_ledger")
    names = _names(role, schema) | {"function": function, "function_name": sql.Literal(f"{function.as_string()}()")}
    yield sql.SQL("CREATE SCHEMA IF NOT EXISTS {schema} AUTHORIZATION {role}").format(**names).as_string()
    yield sql.SQL(_OWN).format(**names).as_string()
    if kind is RoleKind.MIGRATOR:
        yield sql.SQL(_OWN_LEDGER).format(**names).as_string()


def _of(kind: RoleKind, role: str, schema: str, *, wal: bool) -> Iterator[str]:
    names = _names(role, schema)

    def grant(text: LiteralString, **more: sql.Composable) -> str:
        return sql.SQL(text).format(**names, **more).as_string()

    yield grant("GRANT USAGE ON SCHEMA {schema} TO {role}")
    for rights, tables in TABLES.get(kind, ()):
        named = sql.SQL(", ").join(sql.Identifier(schema, table) for table in tables)
        yield grant("GRANT {rights} ON {tables} TO {role}", rights=sql.SQL(rights), tables=named)
    for right, name, columns in COLUMNS.get(kind, ()):
        table = sql.Identifier(schema, name)
        # A right on the whole table includes every column. Of the keys another kind of the same role may have all.
        if name != "idempotency_keys":
            # The audit stays as it is.
            revoked = "INSERT, UPDATE, DELETE, TRUNCATE, TRIGGER" if name == "audit" else right
            yield grant("REVOKE {right} ON {table} FROM {role}", right=sql.SQL(revoked), table=table)
        listed = sql.SQL(", ").join(map(sql.Identifier, columns))
        yield grant("GRANT {right} ({columns}) ON {table} TO {role}", right=sql.SQL(right), columns=listed, table=table)
    if kind in _READS_LEDGER:
        ledger, state = sql.Identifier(schema, "ledger"), sql.Identifier(schema, "ledger_state")
        there = sql.Literal(ledger.as_string())
        yield grant(_READ_LEDGER, ledger=ledger, ledger_state=state, ledger_name=there)
    if kind is RoleKind.RELAY and wal:
        yield grant("GRANT UPDATE ON {streams} TO {role}", streams=sql.Identifier(schema, "streams"))
        # Only for the repair of a lost slot, which the relay does by itself.
        audit = sql.Identifier(schema, "audit")
        yield grant("GRANT INSERT (what, why, details) ON {audit} TO {role}", audit=audit)
        yield grant("ALTER ROLE {role} REPLICATION")


# Writers that may insert events of some aggregate types only, by row security. A permissive policy for everyone leaves
# every row to every role; a restrictive one takes from a writer's INSERT what it may not write
# (https://www.postgresql.org/docs/current/ddl-rowsecurity.html). The owner of the tables, superusers and roles with
# BYPASSRLS are above row security, so they are refused here; and so is a role that could act as another one that
# inserts. `outbox db check` knows these policies, and reports any that hides rows or hits a relay.
_LIMITED_TABLES: Final = ("events", "scheduled", "idempotency_keys")
_OPEN: Final = "rights decide"
"""The permissive policy's name. A restrictive one has its role's."""

# One statement, and so one transaction, a table: services lock these tables in any order. Nothing is locked where the
# policies are as wanted.
_LIMIT: Final = """DO {tag}
DECLARE
    of_table oid := {table_name}::pg_catalog.regclass::oid;
    of_role oid := {role_name}::pg_catalog.regrole::oid;
    wanted text := {wanted};
    there record;
    another text;
BEGIN
    IF EXISTS (SELECT FROM pg_catalog.pg_roles WHERE oid = of_role AND (rolsuper OR rolbypassrls))
       OR EXISTS (SELECT FROM pg_catalog.pg_class WHERE oid = of_table AND relowner = of_role) THEN
        RAISE EXCEPTION 'role % can not be limited: it is the owner of %, a superuser, or has BYPASSRLS',
                        {role_text}, {table_name};
    END IF;
    SELECT rolname INTO another FROM pg_catalog.pg_roles
     WHERE oid <> of_role AND pg_catalog.pg_has_role(of_role, oid, 'MEMBER')
       AND pg_catalog.has_any_column_privilege(oid, of_table, 'INSERT') LIMIT 1;
    IF another IS NOT NULL THEN
        RAISE EXCEPTION 'role % can not be limited: as a member of % it can insert into % what that role can',
                        {role_text}, another, {table_name};
    END IF;
    IF NOT EXISTS (SELECT FROM pg_catalog.pg_policy
                    WHERE polrelid = of_table AND polname = {open_text}::pg_catalog.name) THEN
        CREATE POLICY {open} ON {table} USING (true) WITH CHECK (true);
    END IF;
    SELECT polroles[1] AS of_whom, pg_catalog.pg_get_expr(polwithcheck, polrelid) AS checked INTO there
      FROM pg_catalog.pg_policy WHERE polrelid = of_table AND polname = {role_text}::pg_catalog.name;
    IF there.of_whom <> of_role THEN
        RAISE EXCEPTION 'policy % on % belongs to another role; drop or rename it first', {role_text}, {table_name};
    END IF;
    IF there.checked IS DISTINCT FROM wanted THEN
        DROP POLICY IF EXISTS {role} ON {table};
        CREATE POLICY {role} ON {table} AS RESTRICTIVE FOR INSERT TO {role} WITH CHECK {check};
    END IF;
    IF EXISTS (SELECT FROM pg_catalog.pg_class WHERE oid = of_table AND NOT relrowsecurity) THEN
        ALTER TABLE {table} ENABLE ROW LEVEL SECURITY;
    END IF;
END {tag}"""


def limits(
    roles: Sequence[tuple[RoleKind, str]], schema: str, aggregate_types: Mapping[str, Sequence[str]]
) -> Iterator[str]:
    """Yield a statement for each table and limited writer, to be executed one by one, before the role gets rights.

    ``aggregate_types`` has by the role's name the only aggregate types of which it may insert events. Raises
    ConfigurationError for a role that is not a writer, or is a relay or an operator too: these insert every type.
    """
    for role, types in aggregate_types.items():
        kinds = {kind for kind, name in roles if name == role and not kind.of_sink}
        if RoleKind.WRITER not in kinds or not kinds <= {RoleKind.WRITER, RoleKind.CANCELLER}:
            raise ConfigurationError(
                f"aggregate types limit a writer: name writer={role} as well, and no other kind of the outbox's schema "
                "but canceller"
            )
        if role == _OPEN:
            raise ConfigurationError(f"a role that is called {role!r} can't be limited: a policy has this name")
        # As Postgres prints it, so that an equal policy is recognized.
        listed = sql.SQL(", ").join(sql.SQL("{}::text").format(sql.Literal(name)) for name in types)
        check = sql.SQL("(aggregate_type = ANY (ARRAY[{}]))").format(listed)
        for name in _LIMITED_TABLES:
            table = sql.Identifier(schema, name)
            names = _names(role, schema) | {
                "table": table,
                "table_name": sql.Literal(table.as_string()),
                "role_text": sql.Literal(role),
                "open": sql.Identifier(_OPEN),
                "open_text": sql.Literal(_OPEN),
                "check": check,
                "wanted": sql.Literal(check.as_string()),
            }
            yield sql.SQL(_LIMIT).format(**names).as_string()
