"""Operator actions: set up the WAL as the outbox's source, take it down, and move lanes between the sources.

| killed while                     | what is there                    | what to do                                   |
|----------------------------------|----------------------------------|----------------------------------------------|
| setting up, slot not made yet    | at most a publication            | run it again                                 |
| setting up, slot made            | a slot without a checkpoint; it  | run it again with ``--repair``               |
|                                  | holds WAL                        |                                              |
| repairing, old slot dropped,     | a checkpoint, no slot: they stop | run it again                                 |
| publication replaced or not      |                                  |                                              |
| repairing, new slot made         | a slot above it: relays stop     | run it again                                 |
| switching                        | one transaction: before or after | look (``outbox cdc status``)                 |
| dropping                         | parts of it                      | run it again                                 |
| healing, old slot dropped        | a checkpoint, no slot: they stop | any relay heals it; or repair                |
| healing, new slot made           | a slot above it: relays stop     | any relay heals it; or repair                |

Healing (``Cdc.heal``) is the repair that a relay does by itself: every event is a row of the table, so nothing is lost
with a slot. Each lane reads the table once, then the new slot. All of it but the slot is one transaction, which holds
a lock: of several relays one heals. An operator's repair beside it ends, like it, in a checkpoint of the slot that is
there, with all lanes reading the table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Final, LiteralString

import psycopg
import structlog
from psycopg import errors, sql

from outbox._clients.postgres import first_line
from outbox.errors import OperationRefused, SchemaError
from relay.config import SourceKind
from relay.core.ports import DatabaseUnavailable
from relay.database import Connector, begin_session, unavailable_on_error
from relay.failpoints import failpoint
from relay.insights import LaneState, read_lanes
from relay.operations.audit import note
from relay.settle.statements import names_of
from relay.wal.slot import Slot, SlotNames, SlotState, find_problem, not_set_up, slot_fault

log = structlog.get_logger("relay")

FAILOVER_FROM: Final = 170000
GENERATED_FROM: Final = 180000
"""The Postgres that has failover slots, and the one that publishes generated columns."""

_CHECKPOINT: Final = """
INSERT INTO {streams} AS b (slot, publication, publication_version, system_identifier, timeline, opened_xid,
                            flushed_lsn)
SELECT %(slot)s::text, %(publication)s::text, %(version)s, c.system_identifier::text,
       {timeline},
       pg_current_xact_id()::text::bigint,
       (s.confirmed_flush_lsn - '0/0'::pg_lsn)::bigint
  FROM pg_replication_slots AS s, pg_control_system() AS c
 WHERE s.slot_name = %(slot)s::text
    ON CONFLICT (slot) DO UPDATE SET publication = excluded.publication,
       publication_version = excluded.publication_version, system_identifier = excluded.system_identifier,
       timeline = excluded.timeline, opened_xid = excluded.opened_xid,
       flushed_lsn = excluded.flushed_lsn, flushed_at = clock_timestamp()"""

# Only a checkpoint of this history. The publication's version stays: if it was changed meanwhile, relays stop.
_HEALED_CHECKPOINT: Final = """
UPDATE {streams} AS b
   SET opened_xid = pg_current_xact_id()::text::bigint,
       flushed_lsn = (s.confirmed_flush_lsn - '0/0'::pg_lsn)::bigint, flushed_at = clock_timestamp()
  FROM pg_replication_slots AS s, pg_control_system() AS c
 WHERE b.slot = %(slot)s::text AND s.slot_name = b.slot
   AND b.system_identifier = c.system_identifier::text AND b.timeline = {timeline}"""

# What a role lacks for healing. REPLICATION is not looked for: some hosts have another right in its place.
_MISSING_RIGHTS: Final = """
SELECT concat_ws(', ', CASE WHEN NOT has_table_privilege(%(streams)s::text, 'UPDATE') THEN 'UPDATE on streams' END,
                 CASE WHEN NOT (SELECT bool_and(has_column_privilege(%(audit)s::text, c.name, 'INSERT'))
                                  FROM unnest(ARRAY['what', 'why', 'details']) AS c (name))
                      THEN 'INSERT (what, why, details) on audit' END)"""

_READS_THE_WAL: Final = "SELECT EXISTS (SELECT FROM {lanes} WHERE source = 'wal')"

_DROP_IF_THERE: Final = """
SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name = %(slot)s::text"""

# Relays must read the state of their lanes again, so the epoch ends.
_READ_THE_TABLE: Final = "UPDATE {lanes} SET {released}, streaming = false WHERE source = 'wal'"

# Of every lane, also one that is polled: the tables may have been moved, and a position in another server's WAL would
# look like a fault.
_FORGET_POSITIONS: Final = "UPDATE {lanes} SET commit_lsn = NULL WHERE commit_lsn IS NOT NULL"

# Owners see the change when they renew: they settle what is in flight and release the lane. No epoch ends, so nothing
# is repeated.
_TO_WAL: Final = """
UPDATE {lanes} SET source = 'wal', streaming = false WHERE source <> 'wal'"""
_TO_POLLING: Final = "UPDATE {lanes} SET source = 'polling' WHERE source <> 'polling'"

_OUTBOXES: Final = """
SELECT n.nspname FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
 WHERE c.relname = 'streams' AND c.relkind = 'r' AND n.nspname <> %(schema)s::text
   AND has_table_privilege(c.oid, 'SELECT')
   AND EXISTS (SELECT FROM pg_attribute AS a WHERE a.attrelid = c.oid AND a.attname = 'publication_version')"""

# A publication of that name that is in no checkpoint and does not publish exactly our table.
_FOREIGN: Final = """
SELECT 1 FROM pg_publication AS p
 WHERE p.pubname = %(publication)s::text
   AND NOT EXISTS (SELECT FROM {streams} AS b WHERE b.slot = %(slot)s::text AND b.publication = p.pubname)
   AND (p.puballtables OR NOT EXISTS (SELECT FROM pg_publication_tables AS t
                                       WHERE t.pubname = p.pubname AND t.schemaname = %(schema)s::text
                                         AND t.tablename = 'events')
        OR EXISTS (SELECT FROM pg_publication_tables AS t
                    WHERE t.pubname = p.pubname AND (t.schemaname, t.tablename) <> (%(schema)s::text, 'events')))"""

_NEEDS_REPLICATION: Final = (
    "creating or dropping a slot needs REPLICATION: ALTER ROLE … REPLICATION, or run this as a role that has it"
)

_DROP_PUBLICATION: Final = "DROP PUBLICATION IF EXISTS {publication}"
_PUBLISH: Final = "CREATE PUBLICATION {publication} FOR TABLE {events} "

_LOCK: Final = "SELECT pg_advisory_xact_lock(hashtextextended('outbox cdc ' || %(slot)s::text, 0))"
_TRY_LOCK: Final = "SELECT pg_try_advisory_xact_lock(hashtextextended('outbox cdc ' || %(slot)s::text, 0))"


@dataclass(frozen=True, slots=True)
class Status:
    """The state that `outbox cdc status` shows. ``problem`` is None if the stream has no gap."""

    slot: SlotState
    lanes: list[LaneState]
    problem: str | None


class Cdc:
    """``connection`` is in autocommit. Methods raise Unavailable without Postgres, SchemaError without rights."""

    def __init__(self, connection: psycopg.Connection[Any], names: SlotNames) -> None:
        self._connection = connection
        self._names = names
        self._slot = Slot(connection, names)
        self._tables = names_of(names.schema)
        self._tables["publication"] = sql.Identifier(names.publication)

    def status(self) -> Status:
        state = self._slot.look()
        problem = find_problem(state, self._names)
        lanes = read_lanes(self._connection, self._names.schema)
        return Status(state, lanes, None if problem is None else str(problem))

    def setup(self) -> bool:
        """Create publication, slot and checkpoint. Return whether any was missing.

        Raises OperationRefused for a slot with a gap, or of others: see ``repair``.
        """
        state = self._slot.look()
        self._require_server(state)
        if state.has_checkpoint:
            problem = find_problem(state, self._names)
            if problem is not None:
                raise OperationRefused(str(problem))
            return False
        self._require_own(state)
        if state.exists:
            raise OperationRefused(
                f"slot {self._names.slot!r} already exists, and is not this outbox's. If an interrupted setup left it "
                "behind, use --repair; if another program or outbox uses it, choose another name (OUTBOX_WAL__SLOT)"
            )
        self._make()
        return True

    def repair(self, reason: str) -> None:
        """Replace the slot. Every lane reads the table once before it streams again, so nothing is lost.

        Raises OperationRefused while the slot is being read.
        """
        state = self._slot.look()
        self._require_server(state)
        self._require_own(state)
        if state.active_pid is not None:
            raise OperationRefused(
                f"slot {self._names.slot!r} is being read by server process {state.active_pid}: there is nothing to "
                "repair; to replace it anyway, stop the relays first"
            )
        if state.exists:
            self._drop_slot()
        self._make(reason)

    def heal(self, by: str) -> str | None:
        """Replace a slot that has a gap. Return the fault that was repaired; None without a fault.

        None also if another session is repairing it. Raises OperationRefused if more than the slot may be at fault, and
        SchemaError if the role lacks a right. ``by`` is the relay, for the audit. Needs no owner's rights.
        """
        if self._fault() is None:
            return None
        with self._durably("replacing the slot"):
            if not self._ask(_TRY_LOCK):
                return None
            fault = self._fault()
            if fault is None:
                return None
            self._require_healable()
            self._run(_DROP_IF_THERE)
            failpoint("heal.dropped")
            lock_timeout = self._ask("SELECT current_setting('lock_timeout')")
            # It waits for all open transactions: longer than for other locks, up to the statement's limit.
            self._run("SELECT set_config('lock_timeout', '0', true)")
            self._make_slot()
            self._run("SELECT set_config('lock_timeout', %(before)s, true)", before=lock_timeout)
            failpoint("heal.made")
            if self._run(_HEALED_CHECKPOINT).rowcount != 1:
                raise DatabaseUnavailable(f"the checkpoint of slot {self._names.slot!r} was changed meanwhile")
            self._read_the_table("cdc repair", f"{by}: {fault}")
            failpoint("heal.noted")
        return fault

    def drop(self) -> None:
        """Drop the slot, publication and checkpoint. Raises OperationRefused while lanes are read from the WAL."""
        state = self._slot.look()
        self._require_primary(state)
        if any(lane.source == "wal" for lane in read_lanes(self._connection, self._names.schema)):
            raise OperationRefused("the lanes are read from the WAL: run `outbox relay switch polling` first")
        self._require_own(state)
        if state.exists:
            self._drop_slot()
        with unavailable_on_error("dropping the publication"), self._connection.transaction():
            self._run(_DROP_PUBLICATION)
            self._run("DELETE FROM {streams} WHERE slot = %(slot)s::text")
            self._note("cdc drop", None)

    def switch(self, to: SourceKind, reason: str | None = None) -> bool:
        """Switch every lane to a source. Return whether any had another. Relays follow within seconds.

        Raises StreamLost or SchemaError if the stream has a gap, or is not set up.
        """
        state = self._slot.look()
        self._require_primary(state)
        if to is SourceKind.WAL:
            self._slot.check(state)
        with self._durably("switching the lanes"):
            switched = self._run(_TO_WAL if to is SourceKind.WAL else _TO_POLLING).rowcount
            if switched:
                self._note(f"switch to {to}", reason)
        return switched > 0

    @staticmethod
    def _require_primary(state: SlotState) -> None:
        # Since Postgres 16 a standby would create a slot, which no relay reads there and which keeps WAL for ever.
        if state.recovering:
            raise OperationRefused("this server is a standby: run this on the primary, or promote this one first")

    def _require_server(self, state: SlotState) -> None:
        self._require_primary(state)
        problem = not_set_up(state._replace(has_checkpoint=True), self._names.slot)
        if problem is not None:
            raise OperationRefused(problem)

    def _fault(self) -> str | None:
        state = self._slot.look()
        return slot_fault(state, self._names) if state.has_checkpoint else None

    def _require_healable(self) -> None:
        """Raise OperationRefused unless only the slot is at fault, and SchemaError without the rights to replace it."""
        state = self._slot.look()
        self._require_server(state)
        problem = unhealable(state, self._names)
        if problem is not None:
            raise OperationRefused(problem)
        self._require_own_slot(state)
        if not self._ask(_READS_THE_WAL):
            raise OperationRefused("no lane is read from the WAL")
        missing = self._ask(_MISSING_RIGHTS, **{name: self._tables[name].as_string() for name in ("streams", "audit")})
        if missing:
            raise SchemaError(
                f"slot {self._names.slot!r} can't be repaired by the relay, whose role lacks {missing}: see `outbox db "
                "roles relay=ROLE --wal`"
            )

    def _ask(self, query: LiteralString, **values: str) -> Any:
        ((value,),) = self._run(query, **values).fetchall()
        return value

    def _require_own(self, state: SlotState) -> None:
        # With a second slot, the first would keep WAL for ever.
        if not state.has_checkpoint:
            with unavailable_on_error("looking at the checkpoint"):
                row = self._run("SELECT slot FROM {streams} WHERE slot <> %(slot)s::text").fetchone()
            if row is not None:
                raise OperationRefused(
                    f"this outbox has the slot {row[0]!r}: set OUTBOX_WAL__SLOT to it; for another name drop it first"
                )
        self._require_own_slot(state)
        with unavailable_on_error("looking at the publication"):
            foreign = self._run(_FOREIGN).fetchone()
        if foreign is not None:
            raise OperationRefused(
                f"the publication {self._names.publication!r} is not this outbox's: choose another name "
                "(OUTBOX_WAL__PUBLICATION), or drop it if it is unused"
            )

    def _require_own_slot(self, state: SlotState) -> None:
        if not state.exists:
            return
        whose = None
        if state.plugin != "pgoutput" or not state.in_this_database:
            whose = f"plugin {state.plugin!r}, or another database's"
        elif not state.has_checkpoint:
            if state.publication_version_now is None:
                whose = "no publication of this outbox is there"
            with unavailable_on_error("looking for the slot's owner"):
                for (schema,) in self._run(_OUTBOXES).fetchall():
                    query = sql.SQL("SELECT FROM {} WHERE slot = %s::text").format(sql.Identifier(schema, "streams"))
                    if self._connection.execute(query, (self._names.slot,)).rowcount:
                        whose = f"it is that of the outbox in schema {schema!r}"
        if whose is not None:
            raise OperationRefused(
                f"the slot {self._names.slot!r} is not this outbox's ({whose}): choose another name (OUTBOX_WAL__SLOT)"
            )

    def _make(self, reason: str | None = None) -> None:
        self._publish()
        with unavailable_on_error("making the slot"):
            self._make_slot()
        version = self._slot.look().publication_version_now
        with self._durably("writing the checkpoint"):
            if self._run(_CHECKPOINT, version=version).rowcount != 1:
                raise OperationRefused(
                    f"another session has just dropped the slot {self._names.slot!r}: see `outbox cdc status`"
                )
            self._read_the_table("cdc setup" if reason is None else "cdc repair", reason)

    @contextmanager
    def _durably(self, doing: str) -> Iterator[None]:
        """Open a transaction that is durable once it has committed."""
        with unavailable_on_error(doing), self._connection.transaction():
            self._run("SELECT set_config('synchronous_commit', 'on', true)")
            yield

    def _read_the_table(self, what: str, why: str | None) -> None:
        """Make every lane read the table before it streams again, and record that in the audit."""
        self._run(_READ_THE_TABLE)
        self._run(_FORGET_POSITIONS)
        self._note(what, why)

    def _publish(self) -> None:
        try:
            with unavailable_on_error("making the publication"), self._connection.transaction():
                self._run(_LOCK)
                if not self._slot.look().publication_fits:
                    self._run(_DROP_PUBLICATION)
                    # Only the columns that identify a row: the relay reads the rest from the table. Generated columns
                    # like the lane can be published since Postgres 18; before, the relay computes it from the key.
                    generated = self._connection.info.server_version >= GENERATED_FROM
                    columns: LiteralString = "(id, lane)" if generated else "(id, aggregate_type, aggregate_id)"
                    self._run(_PUBLISH + columns + " WITH (publish = 'insert')")
        except SchemaError as error:
            needed = "creating the publication needs the rights of the tables' owner, and CREATE on the database"
            raise SchemaError(f"Postgres: {first_line(error.__cause__ or error)}: {needed}") from error

    def _make_slot(self) -> None:
        # Since Postgres 17, a failover slot is synchronized to standbys.
        query: LiteralString = "SELECT pg_create_logical_replication_slot(%(slot)s::text, 'pgoutput')"
        if self._connection.info.server_version >= FAILOVER_FROM:
            query = "SELECT pg_create_logical_replication_slot(%(slot)s::text, 'pgoutput', failover => true)"
        try:
            self._run(query)
        except errors.InsufficientPrivilege as error:
            raise SchemaError(_NEEDS_REPLICATION) from error
        except errors.DuplicateObject as error:
            raise OperationRefused("another session has just created the slot: see `outbox cdc status`") from error
        except errors.ConfigurationLimitExceeded as error:
            text = "all replication slots are in use: raise max_replication_slots and restart"
            raise OperationRefused(text) from error

    def _drop_slot(self) -> None:
        try:
            with unavailable_on_error("dropping the slot"):
                self._run("SELECT pg_drop_replication_slot(%(slot)s::text)")
        except errors.UndefinedObject:
            pass  # gone by now
        except SchemaError as error:
            raise SchemaError(f"Postgres: {first_line(error.__cause__ or error)}: {_NEEDS_REPLICATION}") from error

    def _note(self, what: str, why: str | None) -> None:
        details = {"slot": self._names.slot, "publication": self._names.publication}
        note(self._connection, self._tables, what, why, details)

    def _run(self, query: LiteralString, **values: Any) -> psycopg.Cursor[Any]:
        """Execute a statement with the outbox's names, and these values; without any if it has no place for one."""
        bound = asdict(self._names) | values if "%(" in query else None
        return self._connection.execute(sql.SQL(query).format(**self._tables), bound)


class SlotHealing:
    """Replaces the slot if it has a gap; see ``Cdc.heal``. ``on_repair`` is called after each repair."""

    def __init__(self, connect: Connector, names: SlotNames, instance: str, on_repair: Callable[[], None]) -> None:
        self._connect = connect
        self._names = names
        self._by = f"the relay {instance} itself"
        self._on_repair = on_repair
        self._refused: str | None = None

    def look(self) -> None:
        """Repair the slot if that is needed and safe; log why it is not. Raises Unavailable or SchemaError."""
        with self._connect() as connection:
            # The second look, under the lock, must see what another relay has repaired meanwhile.
            connection.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
            with unavailable_on_error("looking at the slot"):
                begin_session(connection)
            try:
                fault = Cdc(connection, self._names).heal(self._by)
            except OperationRefused as error:
                self._refuse(str(error))
                return
        self._refused = None
        if fault is not None:
            self._on_repair()
            log.warning(
                "the relay has replaced the slot: each lane reads the table once, then the new slot",
                slot=self._names.slot,
                error=fault,
            )

    def _refuse(self, why: str) -> None:
        """Log why the slot is left to an operator, once for each reason."""
        if why == self._refused:
            return
        self._refused = why
        log.error("the relay does not repair the slot by itself", slot=self._names.slot, error=why)


def unhealable(state: SlotState, names: SlotNames) -> str | None:
    """Return why a slot with a fault must not be replaced without an operator; None if it may be."""
    if state.system_identifier != state.system_identifier_now:
        return f"the checkpoint is of server {state.system_identifier}, this is {state.system_identifier_now}"
    if state.timeline != state.timeline_now:
        return (
            f"after a failover or a restore: this server is on timeline {state.timeline_now}, the checkpoint is of "
            f"timeline {state.timeline}, and events may be published that this server has lost"
        )
    if max(state.settled_lsn or 0, state.flushed_lsn or 0) > state.current_lsn:
        return "the tables are ahead of this server's WAL: they were copied, or it is an older copy"
    if state.events_oid is None:
        return f"there is no table {names.schema}.events"
    if state.publication_version_now != state.publication_version or not state.publication_fits:
        return f"publication {names.publication!r} was changed or dropped, and only the tables' owner can repair that"
    if state.active_pid is not None:
        return f"slot {names.slot!r} is being read by server process {state.active_pid}"
    return None
