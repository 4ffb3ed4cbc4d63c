"""The outbox's tables in a database: upgrade, downgrade, offline SQL, and the number of lanes.

It uses Alembic with a version table of its own inside the schema, so a host application's alembic history in the same
database is not touched. Each change is one transaction under an advisory lock: of several pods that start together, one
upgrades. An upgrade by several revisions is one transaction for each, so that a table lock is released before the next
revision; one that ends between two is continued by the next upgrade. Rows that a change must not lose are checked under
the table lock that the change needs, not before it: by then every writer has committed.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeVar

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.operations import Operations
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from psycopg import sql as quoting

import outbox
from outbox._app.schema_connection import Database, connected
from outbox._clients.backoff import doubled, jittered
from outbox._clients.counting import counted
from outbox.errors import ConfigurationError, SchemaError, TablesInUse
from outbox.tables import DEFAULT_LANES, lane_expression

_LOCK: Final = 0x6F7574626F780001
"""The advisory lock of all changes of the schema."""

_LOCK_TIMEOUT: Final = "5s"
"""For every other lock: a transaction that waits for a table blocks all that come after it."""

_IDLE_TIMEOUT: Final = "10s"
"""A client that is stopped, or gone without a word, keeps its locks no longer."""

_TRIES: Final = 6
"""How often a change is tried that meets such a transaction, with growing pauses between the tries."""
_FIRST_PAUSE_SECONDS: Final = 1.0
_LONGEST_PAUSE_SECONDS: Final = 10.0

Result = TypeVar("Result")

_MAX_NAME: Final = 63
"""Bytes of an identifier. Postgres cuts off the rest, so two longer names could become the same."""

# The rights on the column alone, which go with it.
_COLUMN_GRANTS: Final = """
SELECT format('GRANT %s (lane) ON %s TO %s', g.privilege_type, a.attrelid::regclass,
              CASE g.grantee WHEN 0 THEN 'PUBLIC' ELSE g.grantee::regrole::text END)
       || CASE WHEN g.is_grantable THEN ' WITH GRANT OPTION' ELSE '' END
  FROM pg_attribute AS a JOIN pg_class AS c ON c.oid = a.attrelid JOIN pg_namespace AS n ON n.oid = c.relnamespace
 CROSS JOIN LATERAL aclexplode(a.attacl) AS g
 WHERE n.nspname = :schema AND c.relname = 'events' AND a.attname = 'lane'"""


@dataclass(frozen=True, slots=True)
class History:
    """A migration history: the folder of its revisions and the default schema of its tables."""

    folder: str
    schema: str
    guarded: Sequence[str]
    """Tables that must be empty before a downgrade."""


@dataclass(frozen=True, slots=True)
class Upgrade:
    """What an upgrade has done: the tables went from one revision to another. ``before`` is None without tables.

    If ``before`` is of a later version than ``after``, nothing was done: this version runs with later tables.
    """

    before: str | None
    after: str

    def __str__(self) -> str:
        if self.before is None:
            return f"tables created, revision {self.after}"
        if of_later_version([self.before], [self.after]):
            return f"nothing to do, the tables are of a later version: revision {self.before}, here it is {self.after}"
        if self.before == self.after:
            return f"nothing to do, the tables are at revision {self.after} already"
        return f"tables upgraded from revision {self.before} to {self.after}"


_EVENTS: Final = ("events", "dead_letters", "streams", "scheduled", "published", "audit", "idempotency_keys")
_APPLIED: Final = ("offsets", "processed_messages", "dead_letters", "losses", "reservations", "checkpoints", "audit")
OUTBOX: Final = History("versions", "outbox", _EVENTS)
CONSUMER: Final = History("consumer", "consumer", _APPLIED)
_WAYS_OUT: Final[Mapping[str, str]] = {
    "events": "let them drain",
    "dead_letters": "`outbox dead-letters retry`, or `discard`",
    "streams": "drop the slot (`outbox cdc drop`)",
    "scheduled": "wait until they are due, or cancel them (`outbox scheduled cancel`)",
}


def upgrade(url: Database, schema: str = "outbox", lanes: int | None = None, revision: str = "head") -> Upgrade:
    """Upgrade the outbox's tables to a revision, or create them. Returns what was done.

    A later revision stays. lanes is used by the first upgrade only (4 if not given). Raises ConfigurationError when it
    differs from the existing number or an argument is invalid, SchemaError when the database refuses.
    """
    check_name(schema)
    if lanes is not None:
        lane_expression(lanes)
    return _upgrade(OUTBOX, url, schema, lanes, revision)


def upgrade_consumer(url: str, schema: str = "consumer") -> Upgrade:
    """Upgrade the consumers' tables to this version; they may be in another database than the outbox's.

    Returns and raises as ``upgrade`` does.
    """
    check_name(schema)
    return _upgrade(CONSUMER, url, schema)


def downgrade(
    url: Database,
    schema: str | None = None,
    revision: str = "base",
    *,
    history: History = OUTBOX,
    drop_rows: bool = False,
) -> None:
    """Downgrade to a revision.

    Raises ConfigurationError for an unknown revision. Raises SchemaError when rows would be lost and ``drop_rows`` is
    not given, and when the tables are in use, missing, or older than that revision already.
    """
    schema = history.schema if schema is None else schema
    check_name(schema)
    known = ["base", *revisions(history)]
    _check_revision(revision, known)
    with _transaction(url) as connection:
        there = current(connection, schema)
        if there is None:
            raise SchemaError(
                f"there is no table {schema}.alembic_version, so `outbox db upgrade` created no tables there; "
                "correct the schema's name, or downgrade with the migrations that created them"
            )
        _refuse_unknown(history, there, schema)
        at = max((known.index(found) for found in there), default=0)
        if at < known.index(revision):
            raise SchemaError(f"schema {schema} is at {known[at]} already, which is before {revision}")
        if at == known.index(revision):
            return
        if not drop_rows:
            _lock(connection, schema, history.guarded)
            for name in history.guarded:
                if _count(connection, sa.table(name, schema=schema)):
                    raise SchemaError(
                        f"{schema}.{name} still has rows, which a downgrade would drop; "
                        + _WAYS_OUT.get(name, "copy what you need of them")
                        + ", or say `outbox db downgrade --drop-rows`"
                    )
        with _migration_errors(schema):
            command.downgrade(_config(history, schema, connection=connection), revision)


def sql(
    schema: str | None = None,
    lanes: int = DEFAULT_LANES,
    start: str | None = None,
    end: str = "head",
    *,
    history: History = OUTBOX,
) -> str:
    """Return the SQL of an upgrade, for Flyway or psql: the same text for the same version and arguments.

    start and end are revisions; without start, the SQL begins with an empty database. Raises ConfigurationError when a
    revision is unknown, when start comes after end, and for an invalid schema or number of lanes.
    """
    schema = history.schema if schema is None else schema
    check_name(schema)
    lane_expression(lanes)
    known = ["base", *revisions(history)]
    first = "base" if start is None else start
    last = known[-1] if end == "head" else end
    _check_revision(first, known)
    _check_revision(last, known[1:])
    if known.index(first) > known.index(last):
        raise ConfigurationError(f"the revision to start from, {first}, comes after {last}; exchange the two")
    output = io.StringIO()
    config = _config(history, schema, lanes, create_schema=first == "base", output=output)
    command.upgrade(config, last if first == "base" else f"{first}:{last}", sql=True)
    return output.getvalue()


def revisions(history: History = OUTBOX) -> list[str]:
    """Return the revisions, the oldest first."""
    script = ScriptDirectory.from_config(_config(history, history.schema))
    return [revision.revision for revision in script.walk_revisions()][::-1]


def current(connection: sa.Connection, schema: str) -> tuple[str, ...] | None:
    """Return the revisions in the schema's version table: empty after a downgrade to base, None without a table."""
    if not sa.inspect(connection).has_table("alembic_version", schema=schema):
        return None
    return MigrationContext.configure(connection, opts={"version_table_schema": schema}).get_current_heads()


def has_markers(url: str, schema: str = "outbox") -> bool:
    """Return whether a lane has ever been published exactly-once. Raises SchemaError."""
    check_name(schema)
    table = _lanes(schema)
    with connected(url) as connection:
        return _count(connection, table, table.c.last_batch.is_not(None)) > 0


def change_lanes(
    url: str, lanes: int, schema: str = "outbox", former: Mapping[int, tuple[int, int]] = MappingProxyType({})
) -> None:
    """Change the number of lanes. No relay may hold one, and the last to hold each must have settled what it published.

    Writers wait while the waiting events are written again, each in the lane of its key; failures and dead letters
    follow. So events keep their order by key. ``former`` has batch and epoch of the last markers of numbers that are
    added and that lanes had before: relays stop at a marker that is not given. Raises ConfigurationError for an invalid
    number or schema. Raises SchemaError when a lease has not expired, when a relay was killed with a transaction in
    flight, when a lane is paused or read from the WAL, or when others keep the tables locked.
    """
    check_name(schema)
    expression = lane_expression(lanes)
    table = _lanes(schema)
    with _transaction(url) as connection:
        # Writers and relays are locked out from here on: what is read below stays true until the commit.
        _lock(connection, schema, ("events", "lanes", "failures", "dead_letters"))
        pauses = sa.table("pauses", sa.column("scope"), schema=schema)
        if _count(connection, pauses, pauses.c.scope == "lane"):
            # These numbers would stand for other keys.
            raise SchemaError(
                "lanes are paused by their numbers; end these pauses first (`outbox relay resume --lane N`)"
            )
        if _count(connection, table, table.c.source == "wal"):
            raise SchemaError(
                "the lanes are read from the WAL; run `outbox relay switch polling` first, and back afterwards"
            )
        if held := _count(connection, table, table.c.lease_until >= sa.func.clock_timestamp()):
            raise SchemaError(f"relays hold {counted(held, 'lane')}; stop them first")
        # Of a killed relay the lane's marker on Kafka may name events that are not settled: they are looked for in the
        # lane of the marker.
        if in_flight := _count(connection, table, table.c.transactional_id.is_not(None)):
            raise SchemaError(
                f"a relay was killed, and of {counted(in_flight, 'lane')} it is not known which events are on Kafka; "
                "start a relay, wait until `outbox status` shows that it holds the lanes, and stop it with SIGTERM"
            )
        # Dropping and adding works on every version of Postgres.
        change = Operations(MigrationContext.configure(connection))
        name = _one_name(schema)
        grants = connection.execute(sa.text(_COLUMN_GRANTS), {"schema": schema}).scalars().all()
        change.drop_column("events", "lane", schema=name)
        change.add_column(
            "events",
            sa.Column("lane", sa.SmallInteger, sa.Computed(expression, persisted=True), nullable=False),
            schema=name,
        )
        for granted in grants:
            connection.exec_driver_sql(granted.replace("%", "%%"))
        change.create_primary_key("events_pkey", "events", ["lane", "id"], schema=name)
        for waiting in ("failures", "dead_letters"):
            moved = sa.table(waiting, sa.column("lane"), schema=schema)
            connection.execute(sa.update(moved).values(lane=sa.literal_column(expression)))
        # An epoch never decreases: a relay that was suspended meanwhile must not find its old epoch again.
        there = connection.execute(sa.delete(table).returning(table.c.lane, table.c.epoch, table.c.last_batch)).all()
        highest = max((row.epoch for row in there), default=0)
        # By its batch a relay sees that Postgres has lost commits: a lane keeps it. Once exactly-once has begun, one
        # without a batch would be from before; see relay/core/marker.py.
        begun = any(row.last_batch is not None for row in there)
        batches: dict[int, int | None] = dict.fromkeys(range(lanes), 0 if begun else None)
        # A marker of a later epoch is from a time that Postgres has lost.
        batches |= {lane: batch for lane, (batch, epoch) in former.items() if lane < lanes and epoch <= highest}
        batches |= {row.lane: row.last_batch for row in there if row.lane < lanes}
        values = [{"lane": lane, "epoch": highest + 1, "last_batch": batch} for lane, batch in batches.items()]
        connection.execute(sa.insert(table), values)


def grant(url: str, statements: Sequence[str]) -> None:
    with _transaction(url) as connection:
        for statement in statements:
            connection.exec_driver_sql(statement.replace("%", "%%"))


def repeated(note: Callable[[str], None], change: Callable[[], Result]) -> Result:
    """Make a change of tables, and again while others' transactions keep these locked.

    A try waits for a lock for a few seconds only, as everyone who comes after it waits too. ``note`` is given why it
    is made again. Raises TablesInUse after the last try, and what ``change`` raises.
    """
    for earlier in range(_TRIES - 1):
        try:
            return change()
        except TablesInUse as error:
            note(f"{error} (try {earlier + 1} of {_TRIES})")
            time.sleep(jittered(doubled(earlier, _FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS)))
    return change()


def check_name(schema: str) -> None:
    """Raise ConfigurationError for a schema name that Postgres would refuse, truncate, or reserve."""
    try:
        length = len(schema.encode())
    except UnicodeEncodeError:
        raise ConfigurationError(f"the schema's name {schema!r} is not valid UTF-8; choose another") from None
    if not schema or "\0" in schema:
        raise ConfigurationError(f"invalid schema name {schema!r}; give a name of 1 to {_MAX_NAME} bytes")
    if length > _MAX_NAME:
        raise ConfigurationError(f"the schema's name {schema!r} has {length} bytes; Postgres takes {_MAX_NAME} at most")
    if schema.startswith("pg_") or schema == "information_schema":
        raise ConfigurationError(f"the schema's name {schema!r} is Postgres's own; choose one that is not")


def folder() -> Path:
    """Return the folder of the migrations: inside the library in an installed wheel, at the root in a checkout."""
    package = Path(outbox.__file__).parent
    for place in (package / "migrations", package.parent / "migrations"):
        if (place / "env.py").is_file():
            return place
    raise SchemaError(f"no migrations beside {package}: the installation is incomplete, install the package again")


def _upgrade(history: History, url: Database, schema: str, lanes: int | None = None, revision: str = "head") -> Upgrade:
    known = revisions(history)
    wanted = known[-1] if revision == "head" else revision
    _check_revision(wanted, known)
    before: tuple[str, ...] | None = None
    while True:
        with _transaction(url) as connection:
            # Under the lock: another upgrade can have come between two of our revisions.
            there = current(connection, schema) or ()
            if later := of_later_version(there, known):
                return Upgrade(later, known[-1])
            _refuse_unknown(history, there, schema)
            at = max(map(known.index, there), default=-1)
            before = there if before is None else before
            if there and lanes is not None and (count := _count(connection, _lanes(schema))) != lanes:
                raise ConfigurationError(f"this outbox has {count} lanes; `outbox db lanes {lanes}` changes that")
            if at < known.index(wanted):
                at += 1
                create_schema = not sa.inspect(connection).has_schema(schema)
                config = _config(
                    history, schema, lanes or DEFAULT_LANES, create_schema=create_schema, connection=connection
                )
                with _migration_errors(schema):
                    command.upgrade(config, known[at])
        if at >= known.index(wanted):
            return Upgrade(before[0] if before else None, known[at])


@contextmanager
def _migration_errors(schema: str) -> Iterator[None]:
    try:
        yield
    except CommandError as error:
        raise SchemaError(f"schema {schema}: {error}") from error


def _config(
    history: History, schema: str, lanes: int = DEFAULT_LANES, *, create_schema: bool = False, **attributes: Any
) -> Config:
    """Return Alembic's configuration; see migrations/env.py for its attributes."""
    place = folder()
    config = Config()
    config.set_main_option("script_location", str(place).replace("%", "%%"))
    config.set_main_option("path_separator", "newline")
    config.set_main_option("version_locations", str(place / history.folder).replace("%", "%%"))
    config.attributes.update(schema=_one_name(schema), lanes=lanes, create_schema=create_schema, **attributes)
    return config


def _check_revision(revision: str, known: Sequence[str]) -> None:
    if revision not in known:
        raise ConfigurationError(f"there is no revision {revision!r} here; choose from {', '.join(known)}")


def not_ours(there: Sequence[str], known: Sequence[str], schema: str) -> str | None:
    """Return the problem if the schema's version table is of another history, as a host application's; else None."""
    prefix = known[-1].rpartition("_")[0]
    foreign = [revision for revision in there if revision.rpartition("_")[0] != prefix]
    if not foreign:
        return None
    return (
        f"{schema}.alembic_version is not the outbox's: it is at {foreign[0]!r}. A host application's migrations, or "
        "another part's, use this schema: set OUTBOX_SCHEMA, or OUTBOX_CONSUMER_SCHEMA, to one of its own, or create "
        "the tables with those migrations"
    )


def of_later_version(there: Sequence[str], known: Sequence[str]) -> str | None:
    """Return the revision if it comes after all known ones: a later version's, with whose tables this one runs."""
    (prefix, _, last), (ours, _, number) = known[-1].rpartition("_"), (there or ("",))[0].rpartition("_")
    return there[0] if ours == prefix and number.isdecimal() and int(number) > int(last) else None


def _refuse_unknown(history: History, there: Sequence[str], schema: str) -> None:
    known = revisions(history)
    foreign = not_ours(there, known, schema)
    if foreign is not None:
        raise SchemaError(foreign)
    unknown = sorted(set(there) - set(known))
    if unknown:
        command = "outbox db upgrade --consumer" if history is CONSUMER else "outbox db upgrade"
        raise SchemaError(
            f"schema {schema} is at revision {unknown[0]!r}, which this version does not have: if a newer version made "
            f"it, use that version; if an unreleased one did, drop the schema and create it again with `{command}`"
        )


@contextmanager
def _transaction(url: Database) -> Iterator[sa.Connection]:
    """Open a transaction under the lock for schema changes; it sees every row or fails."""
    with connected(url) as connection, connection.begin():
        connection.execute(sa.select(sa.func.set_config("idle_in_transaction_session_timeout", _IDLE_TIMEOUT, True)))
        if (connection.dialect.server_version_info or (0,)) >= (17,):
            # To change a large table takes as long again each time that a role's limit ends the session.
            connection.execute(sa.select(sa.func.set_config("transaction_timeout", "0", True)))
        # Without a limit: whoever waits here holds no lock yet, and the change before it ends, as it can't be idle.
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_LOCK)))
        connection.execute(sa.select(sa.func.set_config("lock_timeout", _LOCK_TIMEOUT, True)))
        # A row-security policy that hides rows would make a full table look empty.
        connection.execute(sa.select(sa.func.set_config("row_security", "off", True)))
        yield connection


def _lock(connection: sa.Connection, schema: str, names: Sequence[str]) -> None:
    """Lock these tables exclusively until the transaction ends."""
    tables = ", ".join(quoting.Identifier(schema, name).as_string() for name in names)
    connection.exec_driver_sql(f"LOCK TABLE {tables} IN ACCESS EXCLUSIVE MODE".replace("%", "%%"))


def _one_name(schema: str) -> str:
    """Quote the name: in a plain str, Alembic takes a dot as the separator of database and schema."""
    return sa.sql.quoted_name(schema, None)


def _count(connection: sa.Connection, table: sa.TableClause, *conditions: sa.ColumnElement[bool]) -> int:
    return int(connection.execute(sa.select(sa.func.count()).select_from(table).where(*conditions)).scalar_one())


def _lanes(schema: str) -> sa.TableClause:
    names = ("lane", "epoch", "last_batch", "lease_until", "source", "transactional_id")
    return sa.table("lanes", *map(sa.column, names), schema=schema)
