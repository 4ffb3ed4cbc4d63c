"""Set the WAL up as the outbox's source, take it down, and move lanes between the sources. For people, not for relays.

| killed while                     | what is there                    | what to do                                   |
|----------------------------------|----------------------------------|----------------------------------------------|
| setting up, slot not made yet    | at most a publication            | run it again                                 |
| setting up, slot made            | a slot that no book knows; it    | run it again with ``--repair``               |
|                                  | holds WAL                        |                                              |
| repairing, old slot dropped      | the book, no slot: relays stop   | run it again                                 |
| repairing, new slot made         | a slot above the book: they stop | run it again                                 |
| switching                        | one transaction: before or after | look (``outbox cdc status``)                 |
| dropping                         | parts of it                      | run it again                                 |
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Final, LiteralString

import psycopg
from psycopg import errors, sql
from psycopg.types.json import Jsonb

from outbox.errors import OutboxError, SchemaError
from relay.config import SourceKind
from relay.database import TIMELINE, unavailable_on_error
from relay.slot import Slot, SlotNames, SlotState, find_problem, not_set_up
from relay.wal import lsn_text

_FAILOVER_FROM: Final = 170000
_GENERATED_FROM: Final = 180000

_BOOK: Final = """
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

# A relay that had looked at its lanes before must look again: the epoch is over.
_READ_THE_TABLE: Final = """
UPDATE {lanes} SET streaming = false, commit_lsn = NULL, commit_number = NULL, epoch = epoch + 1, owner = NULL,
       lease_until = '-infinity'
 WHERE source = 'wal'"""

# What is known of the lane's place in the stream stays true, and what has no row must not be published again.
# Owners see it when they renew: they settle what is under way and let go. Nobody's epoch ends, so nothing is repeated.
_TO_WAL: Final = """
UPDATE {lanes} SET source = 'wal', streaming = false WHERE source <> 'wal'"""
_TO_POLLING: Final = "UPDATE {lanes} SET source = 'polling' WHERE source <> 'polling'"

_LANES: Final = """
SELECT lane, source, streaming, owner, epoch, commit_lsn FROM {lanes} ORDER BY lane"""

_AUDIT: Final = "INSERT INTO {audit} (what, why, details) VALUES (%s, %s, %s)"

_OUTBOXES: Final = """
SELECT n.nspname FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
 WHERE c.relname = 'streams' AND c.relkind = 'r' AND n.nspname <> %(schema)s::text
   AND has_table_privilege(c.oid, 'SELECT')
   AND EXISTS (SELECT FROM pg_attribute AS a WHERE a.attrelid = c.oid AND a.attname = 'publication_version')"""

# A publication of that name that no book knows, and that is not one of our table alone.
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
    "making or dropping a slot needs the REPLICATION right: ALTER ROLE … REPLICATION, or run this as a role that has it"
)

_LOCK: Final = "SELECT pg_advisory_xact_lock(hashtextextended('outbox cdc ' || %(slot)s::text, 0))"


class CdcRefused(OutboxError):
    """It can't be done as things are; the error says what to do first. Nothing was changed."""


@dataclass(frozen=True, slots=True)
class LaneState:
    """Where one lane's events come from. ``commit_lsn`` is where the last one stands that came from the stream."""

    lane: int
    source: str
    streaming: bool
    owner: str | None
    epoch: int
    commit_lsn: int | None


@dataclass(frozen=True, slots=True)
class Status:
    """What `outbox cdc status` shows. ``problem`` is None when the stream is whole."""

    slot: SlotState
    lanes: list[LaneState]
    problem: str | None


class Cdc:
    """``connection`` is in autocommit. All raise Unavailable when Postgres is away, SchemaError without rights."""

    def __init__(self, connection: psycopg.Connection[Any], names: SlotNames) -> None:
        self._connection = connection
        self._names = names
        self._slot = Slot(connection, names)
        self._tables: dict[str, sql.Composable] = {
            name: sql.Identifier(names.schema, name) for name in ("events", "lanes", "streams", "audit")
        }
        self._tables["timeline"] = sql.SQL(TIMELINE)
        self._tables["publication"] = sql.Identifier(names.publication)

    def status(self) -> Status:
        """Look at slot, book and lanes."""
        state = self._slot.look()
        problem = find_problem(state, self._names)
        return Status(state, self._lanes(), None if problem is None else str(problem))

    def setup(self) -> bool:
        """Make publication, slot and book; say whether anything was to be done. Raises CdcRefused.

        Makes nothing anew that there is: see ``repair``.
        """
        state = self._slot.look()
        self._require_server(state)
        if state.known:
            problem = find_problem(state, self._names)
            if problem is not None:
                raise CdcRefused(str(problem))
            return False
        self._require_own(state)
        if state.there:
            raise CdcRefused(
                f"there is a slot {self._names.slot!r} already, and it is not this outbox's. If a setup that was "
                "interrupted left it behind, use --repair; if another program or another outbox uses it, choose "
                "another name (OUTBOX_WAL__SLOT)"
            )
        self._make()
        return True

    def repair(self, reason: str) -> None:
        """Make the slot anew, and have every lane read the table once before it streams again. Raises CdcRefused.

        Events without a row (``transport="message"``) that the old slot had not given are lost with it.
        """
        state = self._slot.look()
        self._require_server(state)
        self._require_own(state)
        if state.active_pid is not None:
            raise CdcRefused(
                f"the slot {self._names.slot!r} is being read, by process {state.active_pid} of the server: nothing to "
                "repair; to make it anew all the same, stop the relays first"
            )
        if state.there:
            self._drop_slot()
        self._make(reason)

    def drop(self) -> None:
        """Drop slot, publication and book. Raises CdcRefused while lanes are read from the WAL."""
        state = self._slot.look()
        self._require_primary(state)
        if any(lane.source == "wal" for lane in self._lanes()):
            raise CdcRefused("the lanes are read from the WAL: run `outbox relay switch polling` first")
        self._require_own(state)
        if state.there:
            self._drop_slot()
        with unavailable_on_error("dropping the publication"), self._connection.transaction():
            self._connection.execute(self._query("DROP PUBLICATION IF EXISTS {publication}"))
            self._connection.execute(self._query("DELETE FROM {streams} WHERE slot = %(slot)s::text"), self._bound())
            self._note("cdc drop", None)

    def switch(
        self, to: SourceKind, *, wait_seconds: float = 60.0, leave_messages: bool = False, reason: str | None = None
    ) -> bool:
        """Move every lane to a source; say whether any was at another. Relays follow within seconds.

        To polling, once the stream has given every event without a row that was written before, or at once with
        ``leave_messages``: they wait in the slot then, and are lost if it is. Raises CdcRefused when the stream is not
        whole (to wal), or does not get there within ``wait_seconds`` (to polling).
        """
        state = self._slot.look()
        self._require_primary(state)
        if to is SourceKind.WAL:
            self._slot.check(state)
        elif not leave_messages and any(lane.source == "wal" for lane in self._lanes()):
            self._await_messages(state, wait_seconds)
        with unavailable_on_error("switching the lanes"), self._connection.transaction():
            self._connection.execute("SELECT set_config('synchronous_commit', 'on', true)")
            query = _TO_WAL if to is SourceKind.WAL else _TO_POLLING
            switched = self._connection.execute(self._query(query)).rowcount
            if switched:
                self._note(f"switch to {to}", reason)
        return switched > 0

    def _lanes(self) -> list[LaneState]:
        with unavailable_on_error("looking at the lanes"):
            return [LaneState(*row) for row in self._connection.execute(self._query(_LANES)).fetchall()]

    def _await_messages(self, state: SlotState, seconds: float) -> None:
        target, deadline = state.current_lsn, time.monotonic() + seconds
        # Nothing else might move the slot past the target for as long as the heartbeats pause.
        while (state.confirmed_lsn or 0) < target:
            problem = find_problem(state, self._names)
            if problem is not None and state.message_at is None:
                return
            if problem is not None or time.monotonic() > deadline:
                why = f"the slot stands at {lsn_text(state.confirmed_lsn or 0)}, and not at {lsn_text(target)}"
                raise CdcRefused(
                    'polling can\'t see events without a row (transport="message"), and some may not be published yet: '
                    f"{problem or why}. Let a relay with source=wal get there first, and have writers use "
                    'transport="table"; or use --leave-messages, if there are none or they may stay where they are'
                )
            self._slot.heartbeat(0)
            time.sleep(0.2)
            state = self._slot.look()

    @staticmethod
    def _require_primary(state: SlotState) -> None:
        # From Postgres 16 on a standby would make a slot, which nobody reads there and which keeps WAL for ever.
        if state.recovering:
            raise CdcRefused("this server is a standby: run this on the primary, or promote this one first")

    def _require_server(self, state: SlotState) -> None:
        self._require_primary(state)
        problem = not_set_up(state._replace(known=True), self._names.slot)
        if problem is not None:
            raise CdcRefused(problem)

    def _require_own(self, state: SlotState) -> None:
        self._require_only_slot(state)
        self._require_own_slot(state)
        with unavailable_on_error("looking at the publication"):
            foreign = self._connection.execute(self._query(_FOREIGN), self._bound()).fetchone()
        if foreign is not None:
            raise CdcRefused(
                f"the publication {self._names.publication!r} is not this outbox's: choose another name "
                "(OUTBOX_WAL__PUBLICATION), or drop it if nobody uses it"
            )

    def _require_only_slot(self, state: SlotState) -> None:
        # A second one would leave the first to keep WAL for ever.
        if not state.known:
            with unavailable_on_error("looking at the book"):
                query = self._query("SELECT slot FROM {streams} WHERE slot <> %(slot)s::text")
                row = self._connection.execute(query, self._bound()).fetchone()
            if row is not None:
                raise CdcRefused(
                    f"this outbox has the slot {row[0]!r}: set OUTBOX_WAL__SLOT to it; for another name drop it first"
                )

    def _require_own_slot(self, state: SlotState) -> None:
        if not state.there:
            return
        whose = None
        if state.plugin != "pgoutput" or not state.here:
            whose = f"plugin {state.plugin!r}, or another database's"
        elif not state.known:
            with unavailable_on_error("looking for the slot's owner"):
                for (schema,) in self._connection.execute(_OUTBOXES, {"schema": self._names.schema}).fetchall():
                    book = sql.SQL("SELECT FROM {} WHERE slot = %(slot)s::text").format(
                        sql.Identifier(schema, "streams")
                    )
                    if self._connection.execute(book, self._bound()).rowcount:
                        whose = f"it is that of the outbox in schema {schema!r}"
        if whose is not None:
            raise CdcRefused(
                f"the slot {self._names.slot!r} is not this outbox's ({whose}): choose another name (OUTBOX_WAL__SLOT)"
            )

    def _make(self, reason: str | None = None) -> None:
        bound = self._bound()
        try:
            with unavailable_on_error("making the publication"), self._connection.transaction():
                self._connection.execute(_LOCK, bound)
                if not self._slot.look().publishes:
                    self._connection.execute(self._query("DROP PUBLICATION IF EXISTS {publication}"))
                    # No more than says which row it is: the rest is read from there. A generated column like the lane
                    # can be published from Postgres 18 on; before, the relay computes it from the key.
                    generated = self._connection.info.server_version >= _GENERATED_FROM
                    columns = "(id, lane)" if generated else "(id, aggregate_type, aggregate_id)"
                    self._connection.execute(
                        self._query("CREATE PUBLICATION {publication} FOR TABLE {events} ")
                        + sql.SQL(columns)
                        + sql.SQL(" WITH (publish = 'insert')")
                    )
        except SchemaError as error:
            raise SchemaError(
                f"{_reason(error)}: making the publication needs the rights of the tables' owner, and CREATE on the "
                "database"
            ) from error
        with unavailable_on_error("making the slot"):
            self._make_slot()
        bound["version"] = self._slot.look().publication_version_now
        with unavailable_on_error("writing the book"), self._connection.transaction():
            self._connection.execute("SELECT set_config('synchronous_commit', 'on', true)")
            self._connection.execute(self._query(_BOOK), bound)
            self._connection.execute(self._query(_READ_THE_TABLE))
            self._note("cdc setup" if reason is None else "cdc repair", reason)

    def _make_slot(self) -> None:
        # A failover slot is kept on standbys too, from Postgres 17 on.
        failover = self._connection.info.server_version >= _FAILOVER_FROM
        query: LiteralString = "SELECT pg_create_logical_replication_slot(%(slot)s::text, 'pgoutput')"
        if failover:
            query = "SELECT pg_create_logical_replication_slot(%(slot)s::text, 'pgoutput', failover => true)"
        try:
            self._connection.execute(query, self._bound())
        except errors.InsufficientPrivilege as error:
            raise SchemaError(_NEEDS_REPLICATION) from error
        except errors.DuplicateObject as error:
            raise CdcRefused("somebody else has just made the slot: see `outbox cdc status`") from error
        except errors.ConfigurationLimitExceeded as error:
            raise CdcRefused("all replication slots are in use: raise max_replication_slots and restart") from error

    def _drop_slot(self) -> None:
        try:
            with unavailable_on_error("dropping the slot"):
                self._connection.execute("SELECT pg_drop_replication_slot(%(slot)s::text)", self._bound())
        except errors.UndefinedObject:
            pass  # gone by now
        except SchemaError as error:
            raise SchemaError(f"{_reason(error)}: {_NEEDS_REPLICATION}") from error

    def _note(self, what: str, why: str | None) -> None:
        details = {"slot": self._names.slot, "publication": self._names.publication}
        self._connection.execute(self._query(_AUDIT), (what, why, Jsonb(details)))

    def _bound(self) -> dict[str, Any]:
        return {"slot": self._names.slot, "publication": self._names.publication, "schema": self._names.schema}

    def _query(self, text: LiteralString) -> sql.Composed:
        return sql.SQL(text).format(**self._tables)


def _reason(error: SchemaError) -> str:
    cause = error.__cause__ or error
    return f"Postgres: {str(cause).strip().splitlines()[0]}"
