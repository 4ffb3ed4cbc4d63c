"""The ledger: what was committed, counted by the database itself as it is written.

The archive is written by the relay. The ledger is not: a trigger on ``events`` adds for each INSERT statement one row
of each aggregate type and minute, with the number of its events and the sum of their hashes. Rows are never updated, so
writers do not wait for each other. It is optional, because it costs writers a little (see docs/operations/audit.md).
`outbox db prune` adds rows of one minute up, and deletes old ones.

What the relay inserts itself is not counted again: a dead letter that is retried, a replay. A scheduled event is
counted when it is due.
"""

from __future__ import annotations

import datetime as dt
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, LiteralString

import psycopg
from psycopg import errors, sql

from outbox._clients import blocks
from outbox._clients.counting import counted
from outbox._clients.postgres import first_line
from outbox.errors import OperationRefused, TablesInUse
from relay.audit.sums import MODULUS, event_minute, halves, total
from relay.database import unavailable_on_error
from relay.operations.audit import note
from relay.settle.statements import names_of
from relay.tasks.archive import MOST_OVERDUE_DAYS

LEAST_DAYS: Final = 7

# All writers wait behind a change that waits for one of them, and behind a client that is stopped in it.
_LOCK_TIMEOUT: Final = "5s"
_IDLE_TIMEOUT: Final = "10s"
_LIMITS: Final = """
SELECT set_config('lock_timeout', %s, true), set_config('idle_in_transaction_session_timeout', %s, true)"""

_EXISTS: Final = """
SELECT EXISTS (SELECT FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
                WHERE n.nspname = %s AND c.relname = 'ledger_state')"""

# Whether it is kept now, and whether this role may read it.
_KEPT: Final = """
SELECT EXISTS (SELECT FROM pg_trigger WHERE tgrelid = {events_name}::regclass AND tgname = 'outbox_ledger'
                                        AND tgenabled IN ('O', 'A')),
       has_table_privilege({ledger_name}, 'SELECT') AND has_table_privilege({ledger_state_name}, 'SELECT')"""

_STATE: Final = "SELECT key, since, since > clock_timestamp() FROM {ledger_state}"
_AGAIN: Final = "`outbox db ledger off` and `on` begin another one"

_OWNER: Final = """
SELECT relowner::regrole::text, relowner <> current_user::regrole FROM pg_class WHERE oid = {events_name}::regclass"""

# The body of a function can be read by every role, the key only by those who may. Without it nothing is counted.
_BODY: Final = """
DECLARE
    ledger_key bytea := (SELECT key FROM {ledger_state});
BEGIN
    INSERT INTO {ledger} (aggregate_type, minute, events, hashes)
    SELECT aggregate_type, {minute}, count(*), mod(mod({ids}, {modulus}) + {modulus}, {modulus})
      FROM added {hashed} WHERE NOT from_relay AND ledger_key IS NOT NULL GROUP BY 1, 2;
    RETURN NULL;
END"""

_ON: Final = (
    """
CREATE TABLE {ledger} (
    aggregate_type text NOT NULL, minute bigint NOT NULL, events bigint NOT NULL, hashes numeric NOT NULL,
    written_at timestamptz NOT NULL DEFAULT now())""",
    "CREATE TABLE {ledger_state} (key bytea NOT NULL, since timestamptz NOT NULL)",
    "COMMENT ON TABLE {ledger} IS 'Events written, by aggregate type and minute. See outbox db ledger.'",
    "COMMENT ON TABLE {ledger_state} IS 'The key of the hashes in ledger, and since when it is kept.'",
    # Writers have no right on the ledger: the function runs with its owner's. pg_temp, where a writer may create types,
    # is searched first unless it is named.
    """
CREATE FUNCTION {function}() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER
   SET search_path = pg_catalog, pg_temp AS {body}""",
    "REVOKE ALL ON FUNCTION {function}() FROM PUBLIC",
    """
CREATE TRIGGER outbox_ledger AFTER INSERT ON {events} REFERENCING NEW TABLE AS added
   FOR EACH STATEMENT EXECUTE FUNCTION {function}()""",
    "INSERT INTO {ledger_state} (key, since) VALUES ({key}, clock_timestamp())",
)

# Who reads the archive may read the ledger.
_READERS: Final = """
SELECT DISTINCT grantee::regrole::text FROM pg_class AS c CROSS JOIN LATERAL aclexplode(c.relacl) AS a
 WHERE c.oid = {published_name}::regclass AND a.privilege_type = 'SELECT' AND a.grantee NOT IN (0, c.relowner)"""

_OFF: Final = (
    "DROP TRIGGER IF EXISTS outbox_ledger ON {events}",
    "DROP FUNCTION IF EXISTS {function}()",
    "DROP TABLE IF EXISTS {ledger}, {ledger_state}",
)

# How long ago the oldest of the old rows should have been deleted: with an id of long ago a row is old from the first.
_OVERDUE: Final = """
SELECT cut, (SELECT extract(epoch FROM cut - min(greatest(to_timestamp(minute * 60), written_at))) / 86400
               FROM {ledger} WHERE minute < extract(epoch FROM cut) / 60)
  FROM (SELECT now() - make_interval(days => %(days)s)) AS r (cut)"""

_SINCE: Final = "UPDATE {ledger_state} SET since = greatest(since, %(cut)s)"

_OLD: Final = "DELETE FROM {ledger} WHERE {in_step} AND minute < extract(epoch FROM %(cut)s) / 60"

_ADD_UP: Final = """
WITH many AS (
    SELECT ctid AS place, count(*) OVER (PARTITION BY aggregate_type, minute) AS rows
      FROM {ledger} WHERE {in_step} AND written_at < now() - interval '10 minutes'),
gone AS (DELETE FROM {ledger} WHERE ctid = ANY(ARRAY(SELECT place FROM many WHERE rows > 1)) RETURNING *)
INSERT INTO {ledger} (aggregate_type, minute, events, hashes, written_at)
SELECT aggregate_type, minute, sum(events), mod(sum(hashes), {modulus}), max(written_at) FROM gone GROUP BY 1, 2"""


@dataclass(frozen=True, slots=True)
class LedgerState:
    """A ledger that is on: the key of its hashes, and since when it is kept."""

    key: bytes
    since: dt.datetime


def state(connection: psycopg.Connection[Any], schema: str) -> LedgerState | str | None:
    """Return the ledger's state; if it is on but can't be used, why; None if it is off.

    Raises Unavailable and SchemaError.
    """
    names = _names(schema, connection)
    with unavailable_on_error("looking for the ledger"):
        if not _exists(connection, schema):
            return None
        ((kept, readable),) = connection.execute(sql.SQL(_KEPT).format(**names)).fetchall()
        if not readable:
            grant = "grant it: `outbox db roles operator=ROLE --apply`"
            return f"there is a ledger, but this role may not read it; {grant}"
        row = connection.execute(sql.SQL(_STATE).format(**names)).fetchone()
    if not kept or row is None:
        found = f"its trigger on {schema}.events is disabled or missing" if row else "ledger_state is empty"
        return f"there is a ledger, but events are not counted: {found}; {_AGAIN}"
    key, since, ahead = row
    if ahead:
        return f"the ledger is kept since {since}, which is still to come by the database's clock; {_AGAIN}"
    return LedgerState(bytes(key), since)


def turn_on(connection: psycopg.Connection[Any], schema: str, reason: str | None) -> None:
    """Begin to keep the ledger. Needs the rights of the tables' owner. Waits for the writers that are at work.

    What is written later in a snapshot from before is not counted.

    Raises OperationRefused if it is on, TablesInUse if they take too long, Unavailable and SchemaError.
    """
    names = _names(schema, connection)
    hashed = halves("ids", sql.SQL("pg_catalog.uuid_send(event_id)"))
    body = sql.SQL(_BODY).format(**names, **event_minute(names), ids=total("ids"), hashed=hashed)
    text = body.as_string(connection).replace("%(key)s::bytea", "ledger_key")
    names |= {"key": sql.Literal(secrets.token_bytes(32)), "body": sql.Literal(text)}
    with _change(connection, "turning the ledger on"):
        if _exists(connection, schema):
            raise OperationRefused("the ledger is on already")
        for statement in _ON:
            connection.execute(sql.SQL(statement).format(**names))
        owner = connection.execute(sql.SQL(_OWNER).format(**names)).fetchone()
        if owner is not None and owner[1]:
            # Of whoever owns the events, also if a superuser turns it on: the function runs with its owner's rights.
            for what in ("TABLE {ledger}", "TABLE {ledger_state}", "FUNCTION {function}()"):
                connection.execute(sql.SQL(f"ALTER {what} OWNER TO ").format(**names) + sql.SQL(owner[0]))
        for (reader,) in connection.execute(sql.SQL(_READERS).format(**names)).fetchall():
            grant = sql.SQL("GRANT SELECT ON {ledger}, {ledger_state} TO ").format(**names)
            connection.execute(grant + sql.SQL(reader))
        note(connection, names, "ledger on", reason, {})


def turn_off(connection: psycopg.Connection[Any], schema: str, reason: str | None) -> None:
    """Drop the ledger. Raises OperationRefused if it is off, TablesInUse, Unavailable and SchemaError."""
    names = _names(schema, connection)
    with _change(connection, "turning the ledger off"):
        if not _exists(connection, schema):
            raise OperationRefused("the ledger is off")
        for statement in _OFF:
            connection.execute(sql.SQL(statement).format(**names))
        note(connection, names, "ledger off", reason, {})


def prune(
    connection: psycopg.Connection[Any], schema: str, days: int, *, force: bool = False, dry_run: bool = False
) -> bool:
    """Add up the rows of one minute, and delete those of more than ``days`` ago, but none of the last week.

    In steps, each in its own transaction, as ``connection`` is in autocommit: what an error leaves is done by the next
    run, and so is what is left of a minute whose rows are in two steps.

    Returns whether the ledger is on; with ``dry_run`` that is all. Without ``force``, raises OperationRefused when
    these expired too long ago, as for the archive; the rows of one minute are added up all the same. Raises Unavailable
    and SchemaError.
    """
    names = _names(schema, connection)

    def in_steps(query: LiteralString, bound: Mapping[str, object] | None = None) -> None:
        for in_step in blocks.steps(connection, sql.Identifier(schema, "ledger")):
            connection.execute(sql.SQL(query).format(**names, in_step=in_step), bound)

    with unavailable_on_error("adding up the ledger"):
        if not _exists(connection, schema):
            return False
        if dry_run:
            return True
        bound = {"days": max(days, LEAST_DAYS)}
        ((cut, overdue),) = connection.execute(sql.SQL(_OVERDUE).format(**names), bound).fetchall()
        held_back = overdue is not None and overdue > MOST_OVERDUE_DAYS and not force
        # What has no old rows is complete since then as before.
        if overdue is not None and not held_back:
            # First: while rows are deleted, it is not complete.
            connection.execute(sql.SQL(_SINCE).format(**names), {"cut": cut})
            in_steps(_OLD, {"cut": cut})
        in_steps(_ADD_UP)
    if held_back:
        raise OperationRefused(
            f"the ledger is kept: the first of its old rows should have been deleted {counted(round(overdue), 'day')} "
            "ago. Either "
            "the database's clock is wrong, or the ledger was not pruned for days, or fewer days are kept than before; "
            "if the clock is right, run `outbox db prune --force`"
        )
    return True


@contextmanager
def _change(connection: psycopg.Connection[Any], doing: str) -> Iterator[None]:
    with unavailable_on_error(doing):
        try:
            with connection.transaction():
                connection.execute(_LIMITS, (_LOCK_TIMEOUT, _IDLE_TIMEOUT))
                yield
        except (errors.LockNotAvailable, errors.DeadlockDetected) as error:
            advice = "long transactions use these tables; try again when they have ended"
            raise TablesInUse(f"Postgres, {doing}: {first_line(error)}; {advice}") from error


def _exists(connection: psycopg.Connection[Any], schema: str) -> bool:
    row = connection.execute(_EXISTS, (schema,)).fetchone()
    return bool(row and row[0])


def _names(schema: str, connection: psycopg.Connection[Any]) -> dict[str, sql.Composable]:
    names = names_of(schema) | {"function": sql.Identifier(schema, "count_in_ledger"), "modulus": sql.SQL(str(MODULUS))}
    quoted = ("ledger", "ledger_state", "published", "events")
    return names | {f"{name}_name": sql.Literal(names[name].as_string(connection)) for name in quoted}
