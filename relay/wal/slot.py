"""The replication slot and its checkpoint in the outbox (``streams``), and the check that the stream has no gap.

The checkpoint has the position up to which the stream was used (``flushed_lsn``); it is written before the slot is
advanced. So the slot's own position is never above it, unless the slot was advanced or recreated by another client. The
checkpoint also has the publication's version: inserts that were unpublished even for a moment are silently missing in
the stream (since version 18 a server only warns when a publication is missing,
https://www.postgresql.org/docs/18/release-18.html).
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import psycopg
from psycopg import sql
from psycopg.rows import kwargs_row

from outbox.errors import ConfigurationError, SchemaError
from relay.config import Settings
from relay.core.lease import Lease
from relay.core.marker import RECOVER
from relay.core.ports import DatabaseUnavailable, StreamLost
from relay.database import unavailable_on_error
from relay.settle.statements import lease_values, names_of
from relay.wal.lane_hash import SAMPLES, lane_of
from relay.wal.replication import Replication, lsn_text

REPAIR: Final = (
    "run `outbox cdc setup --repair --reason '…'`: it makes a new slot, and the table is read once before it"
)

_WAL_REMOVED: Final = "WAL that was not read is dropped (see max_slot_wal_keep_size)"
# Values of pg_replication_slots.invalidation_reason, since Postgres 17.
_INVALIDATED: Final = {
    "idle_timeout": "it was not read for longer than idle_replication_slot_timeout",
    "wal_level_insufficient": "wal_level was not logical for a time",
    "rows_removed": "rows of the catalog that it needed are removed (on a standby: see hot_standby_feedback)",
}

# An idle outbox writes no heartbeat for less WAL than this: each would add WAL to be archived, for ever.
IDLE_BYTES: Final = 16 * 1024

# Changes when the publication is changed or recreated. NULL if it does not have the table.
_VERSION: Final = """
(SELECT concat_ws('.', p.oid, p.xmin, r.oid, r.xmin)
   FROM pg_publication AS p JOIN pg_publication_rel AS r ON r.prpubid = p.oid
  WHERE p.pubname = %(publication)s::text AND r.prrelid = to_regclass(%(events)s))"""

# Since Postgres 19 the first logical slot raises the level replica to logical: it is the one that has
# effective_wal_level (https://www.postgresql.org/docs/19/runtime-config-wal.html).
_LOOK: Final = """
SELECT CASE WHEN current_setting('wal_level') = 'replica' AND current_setting('effective_wal_level', true) IS NOT NULL
            THEN 'logical' ELSE current_setting('wal_level') END AS wal_level,
       current_setting('server_encoding') AS encoding,
       b.slot IS NOT NULL AS has_checkpoint, b.system_identifier, b.timeline, b.flushed_lsn, b.publication_version,
       {version} AS publication_version_now,
       (SELECT p.pubinsert AND NOT (p.pubupdate OR p.pubdelete OR p.pubtruncate) AND r.prqual IS NULL
               AND (SELECT array_agg(a.attname::text ORDER BY a.attname) FROM pg_attribute AS a
                     WHERE a.attrelid = r.prrelid AND a.attnum = ANY(r.prattrs))
                   IN (ARRAY['id', 'lane'], ARRAY['aggregate_id', 'aggregate_type', 'id'])
               AND NOT EXISTS (SELECT FROM pg_publication_rel AS o WHERE o.prpubid = p.oid AND o.oid <> r.oid)
               AND NOT EXISTS (SELECT FROM pg_publication_namespace AS o WHERE o.pnpubid = p.oid)
          FROM pg_publication AS p JOIN pg_publication_rel AS r ON r.prpubid = p.oid
         WHERE p.pubname = %(publication)s::text AND r.prrelid = to_regclass(%(events)s)) AS publication_fits,
       s.slot_name IS NOT NULL AS exists, s.plugin, s.database = current_database() AS in_this_database, s.wal_status,
       s.active_pid, (s.confirmed_flush_lsn - '0/0'::pg_lsn)::bigint AS confirmed_lsn,
       (s.restart_lsn - '0/0'::pg_lsn)::bigint AS restart_lsn, s.safe_wal_size AS safe_wal_bytes,
       (CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_insert_lsn() END
           - '0/0'::pg_lsn)::bigint AS current_lsn,
       (SELECT max(commit_lsn) FROM {lanes}) AS settled_lsn, (SELECT count(*) FROM {lanes}) AS lane_count,
       extract(epoch FROM clock_timestamp() - b.flushed_at)::float8 AS flushed_seconds_ago,
       pg_is_in_recovery() AS recovering,
       CASE WHEN NOT pg_is_in_recovery()
            THEN {timeline} END AS timeline_now,
       to_regclass(%(events)s)::oid::bigint AS events_oid,
       (SELECT c.system_identifier::text FROM pg_control_system() AS c) AS system_identifier_now,
       to_jsonb(s) ->> 'invalidation_reason' AS invalidation_reason
  FROM (SELECT 1) AS one
  LEFT JOIN {streams} AS b ON b.slot = %(slot)s::text
  LEFT JOIN pg_replication_slots AS s ON s.slot_name = %(slot)s::text"""

_CHECKPOINT: Final = "SELECT slot, publication FROM {streams} ORDER BY created_at DESC LIMIT 1"

_HASH: Final = """
SELECT abs(mod(hashtextextended(k.id, hashtextextended(k.kind, 0)), %(modulo)s::bigint))::int
  FROM unnest(%(kinds)s::text[], %(ids)s::text[]) WITH ORDINALITY AS k(kind, id, n) ORDER BY k.n"""

# Only the holder of the lanes: a relay that slept must not end its successor's session.
_HOLDS: Final = """
(SELECT count(*) FROM {lanes} AS l JOIN {leases} ON {ours}) = %(count)s"""

_TERMINATE: Final = """
SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots
 WHERE slot_name = %(slot)s::text AND active_pid IS NOT NULL AND {holds}"""

# Synchronous: the slot must not be advanced beyond a checkpoint that a crash could lose.
_WRITE: Final = """
UPDATE {streams} SET flushed_lsn = %(lsn)s, flushed_at = coalesce(%(at)s, clock_timestamp())
 WHERE slot = %(slot)s::text AND publication_version = {version} AND {holds}
RETURNING slot, set_config('synchronous_commit', 'on', true)"""

_HELD: Final = "SELECT {holds}"

_TIMELINE: Final = "UPDATE {streams} SET timeline = %(timeline)s WHERE slot = %(slot)s::text"

_HEARTBEAT: Final = """
SELECT pg_logical_emit_message(false, %(prefix)s, '')
 WHERE pg_current_wal_insert_lsn() - '0/0'::pg_lsn > %(lsn)s::numeric + %(bytes)s"""

_SNAPSHOT: Final = "SELECT pg_current_snapshot()::text"


class SlotState(NamedTuple):
    """The slot's state in server and checkpoint. LSNs are byte positions; None without a slot, or a checkpoint."""

    wal_level: str
    encoding: str
    has_checkpoint: bool
    system_identifier: str | None
    timeline: int | None
    flushed_lsn: int | None
    publication_version: str | None
    publication_version_now: str | None
    publication_fits: bool | None
    exists: bool
    plugin: str | None
    in_this_database: bool | None
    wal_status: str | None
    active_pid: int | None
    confirmed_lsn: int | None
    restart_lsn: int | None
    safe_wal_bytes: int | None
    current_lsn: int
    settled_lsn: int | None
    lane_count: int
    flushed_seconds_ago: float | None
    recovering: bool
    timeline_now: int | None
    events_oid: int | None
    system_identifier_now: str
    invalidation_reason: str | None

    @property
    def retained_bytes(self) -> int:
        """Bytes of WAL that the server keeps for the slot."""
        return 0 if self.restart_lsn is None else max(self.current_lsn - self.restart_lsn, 0)

    @property
    def lag_bytes(self) -> int:
        """Bytes of WAL after the slot's confirmed position."""
        return 0 if self.confirmed_lsn is None else max(self.current_lsn - self.confirmed_lsn, 0)

    @property
    def lag_seconds(self) -> float:
        """The age of the last confirmed position; 0 if little WAL was written since."""
        return 0.0 if self.lag_bytes <= IDLE_BYTES else max(self.flushed_seconds_ago or 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class SlotNames:
    """The slot, its publication, and the schema of the outbox."""

    schema: str
    slot: str
    publication: str


def slot_names(settings: Settings) -> SlotNames:
    return SlotNames(settings.db_schema, settings.wal.slot, settings.wal.publication)


def names_in_checkpoint(connection: psycopg.Connection[Any], names: SlotNames) -> SlotNames | None:
    """Return the slot and publication of the outbox's newest checkpoint; None without one. Raises psycopg's errors."""
    row = connection.execute(sql.SQL(_CHECKPOINT).format(streams=sql.Identifier(names.schema, "streams"))).fetchone()
    return None if row is None else replace(names, slot=row[0], publication=row[1])


class Slot:
    """The slot's statements, on one connection in autocommit.

    Methods raise Unavailable and SchemaError; ``check``, ``check_timeline`` and ``write_checkpoint`` also StreamLost;
    ``check_hash`` ConfigurationError, which ends the relay.
    """

    def __init__(self, connection: psycopg.Connection[Any], names: SlotNames, leases: Sequence[Lease] = ()) -> None:
        self._connection = connection
        self._names = names
        tables = names_of(names.schema)
        tables["version"] = sql.SQL(_VERSION)
        tables["holds"] = sql.SQL(_HOLDS).format(**tables)
        self._look, self._terminate, self._write, self._held, self._timeline = (
            sql.SQL(text).format(**tables) for text in (_LOOK, _TERMINATE, _WRITE, _HELD, _TIMELINE)
        )
        self._bound = {
            "slot": names.slot,
            "publication": names.publication,
            "events": sql.Identifier(names.schema, "events").as_string(None),
            **lease_values(leases),
            "count": len(leases),
        }

    def look(self) -> SlotState:
        state = self._look_once()
        if (state.confirmed_lsn or 0) <= (state.flushed_lsn or 0):
            return state
        # The checkpoint is read in a snapshot, the slot as it is now: a relay may have written the checkpoint and
        # advanced the slot in between. Then the checkpoint of a second look has reached the slot's position of the
        # first.
        again = self._look_once()
        if (again.flushed_lsn or 0) < (state.confirmed_lsn or 0):
            return state
        if again.confirmed_lsn is None:
            # The slot was dropped meanwhile, and may be being made again.
            return again
        return again._replace(confirmed_lsn=min(again.confirmed_lsn, again.flushed_lsn or 0))

    def _look_once(self) -> SlotState:
        with unavailable_on_error(f"looking at slot {self._names.slot!r}"):
            with self._connection.cursor(row_factory=kwargs_row(SlotState)) as cursor:
                (state,) = cursor.execute(self._look, self._bound).fetchall()
        return state

    def check(self, state: SlotState) -> None:
        """Raise StreamLost if the stream has a gap, SchemaError if an operator has to set something up first."""
        problem = find_problem(state, self._names)
        if problem is not None:
            raise problem

    def check_timeline(self, state: SlotState, replication: Replication, published_lsn: int) -> None:
        """Raise StreamLost if this is another server, or its timeline left ours before the last published event.

        Raises Unavailable when the connections lead to different servers. ``published_lsn`` is the furthest position of
        all lanes and markers. Records a new timeline that has everything.
        """
        identity, now = replication.identify()
        if identity != state.system_identifier:
            raise StreamLost(
                f"slot {self._names.slot!r} was made on the database {state.system_identifier}, this is {identity}; "
                f"{REPAIR}"
            )
        if now != state.timeline_now:
            raise DatabaseUnavailable(
                f"two servers take writes, or a failover goes on: timelines {now}, {state.timeline_now}"
            )
        if now == state.timeline:
            return
        # Two of these are where a commit record begins. A record that begins where the timelines diverged is not in
        # this history.
        furthest = max(state.flushed_lsn or 0, (state.settled_lsn or 0) + 1, published_lsn + 1)
        left = replication.switches(now).get(state.timeline or 0)
        if left is None or left < furthest:
            where = "an unknown place" if left is None else lsn_text(left)
            raise StreamLost(
                f"this server is on timeline {now}, which left timeline {state.timeline} at {where}; events up to "
                f"{lsn_text(furthest)} of that one are published, and this server does not have them (a failover to a "
                "standby that was behind, or a restore). Look for the server that has; to go on without: "
                + (REPAIR if left is None else RECOVER)
            )
        with unavailable_on_error("recording the timeline"):
            self._connection.execute(self._timeline, {"timeline": now, **self._bound})

    def check_hash(self) -> None:
        """Raise ConfigurationError if this server computes another lane for a key than lane_hash."""
        kinds, ids = zip(*SAMPLES, strict=True)
        modulo = 1 << 30
        with unavailable_on_error("comparing hashes"):
            rows = self._connection.execute(
                _HASH, {"modulo": modulo, "kinds": list(kinds), "ids": list(ids)}
            ).fetchall()
        if [lane for (lane,) in rows] != [lane_of(kind, id_, modulo) for kind, id_ in SAMPLES]:
            raise ConfigurationError("this server does not hash text as Postgres does: use source=polling")

    def terminate_reader(self) -> None:
        """End the walsender that reads the slot, if the lanes are still ours."""
        with unavailable_on_error("ending the slot's last reader"):
            self._connection.execute(self._terminate, self._bound)

    def write_checkpoint(self, flushed_lsn: int, at: dt.datetime | None) -> None:
        """Record durably how far the stream is used; ``at`` is the commit time of the last transaction (now, if None).

        Raises StreamLost when the publication has changed, Unavailable when the lanes are not ours.
        """
        values = {"lsn": flushed_lsn, "at": at, **self._bound}
        with unavailable_on_error("recording the position of the stream"):
            written = self._connection.execute(self._write, values).fetchone()
        if written is None:
            self.check(self.look())
            raise DatabaseUnavailable("another relay holds the stream's lanes now")

    def require_lanes(self) -> None:
        """Raise Unavailable when the lanes are not ours any more, or the server shuts down.

        A server that shuts down waits for its walsenders, and they wait for feedback that may never come.
        """
        with unavailable_on_error("looking at the lanes"):
            ((held,),) = self._connection.execute(self._held, self._bound).fetchall()
        if not held:
            raise DatabaseUnavailable("another relay holds the stream's lanes now")

    def heartbeat(self, *, after_lsn: int = 0) -> None:
        """Write a message that comes back through the stream, if much WAL was written after this position."""
        values = {"prefix": heartbeat_prefix(self._names.schema), "lsn": after_lsn, "bytes": IDLE_BYTES}
        with unavailable_on_error("writing a heartbeat"):
            self._connection.execute(_HEARTBEAT, values)


def heartbeat_prefix(schema: str) -> str:
    return f"outbox.{schema}.heartbeat"


def find_problem(state: SlotState, names: SlotNames) -> Exception | None:
    """Return the error that keeps the stream from being read; None if there is none.

    StreamLost for a possible gap, SchemaError for a missing set-up.
    """
    slot, publication = names.slot, names.publication
    setting_up = not_set_up(state, slot)
    if setting_up is not None:
        return SchemaError(setting_up)
    if state.events_oid is None:
        return SchemaError(f"there is no table {names.schema}.events: was it renamed? See `outbox db check`")
    lost = slot_fault(state, names)
    if lost is None and state.publication_version_now is None:
        lost = f"the publication {publication!r} is gone, or does not have {names.schema}.events"
    elif lost is None and (state.publication_version_now != state.publication_version or not state.publication_fits):
        lost = f"the publication {publication!r} was changed: events may not have been in it meanwhile"
    return None if lost is None else StreamLost(f"{lost}; {REPAIR}")


def slot_fault(state: SlotState, names: SlotNames) -> str | None:
    """Return why the slot may have a gap; None if it has none. Ignores the publication."""
    slot = names.slot
    if not state.exists:
        return (
            f"slot {slot!r} is gone: it was dropped, or a failover left it behind (sync_replication_slots on the "
            "standby keeps it, from Postgres 17 on)"
        )
    if state.plugin != "pgoutput" or not state.in_this_database:
        return f"slot {slot!r} is another one now (plugin {state.plugin!r}, or another database's)"
    if state.wal_status == "lost":
        return f"slot {slot!r} is invalidated: {_INVALIDATED.get(state.invalidation_reason or '', _WAL_REMOVED)}"
    if state.confirmed_lsn is None:
        # Not read before it is complete: its reader would be mistaken for a former one, and ended.
        return f"slot {slot!r} is being made, which waits for the transactions that are open"
    if state.system_identifier_now != state.system_identifier:
        return (
            f"slot {slot!r} was made on the database {state.system_identifier}, this is {state.system_identifier_now}"
        )
    if (state.settled_lsn or 0) > state.current_lsn:
        return (
            f"this outbox has used the stream up to {lsn_text(state.settled_lsn or 0)}, and this server has not "
            f"written so much, only up to {lsn_text(state.current_lsn)}: its tables were copied from another one, or "
            "it is an older copy"
        )
    if (state.confirmed_lsn or 0) > (state.flushed_lsn or 0):
        return (
            f"slot {slot!r} stands at {lsn_text(state.confirmed_lsn or 0)}, and this outbox has used the stream up to "
            f"{lsn_text(state.flushed_lsn or 0)}: it was advanced or created again, or a failover reverted "
            "commits; events may be skipped"
        )
    return None


def not_set_up(state: SlotState, slot: str) -> str | None:
    """Return what has to be set up before the stream can be read; None if nothing."""
    if state.wal_level != "logical":
        return f"wal_level is {state.wal_level!r}: set wal_level = logical and restart Postgres, or use source=polling"
    if state.encoding != "UTF8":
        return f"the database's encoding is {state.encoding}: source=wal needs UTF8; use source=polling"
    if not state.has_checkpoint:
        return f"slot {slot!r} is not set up for this outbox: run `outbox cdc setup`"
    return None


def current_snapshot(connection: psycopg.Connection[Any]) -> Snapshot:
    with unavailable_on_error("taking a snapshot"):
        ((text,),) = connection.execute(_SNAPSHOT).fetchall()
    return Snapshot(text)


class Snapshot:
    def __init__(self, text: str) -> None:
        xmin, xmax, running = text.split(":")
        self._xmin, self._xmax = int(xmin), int(xmax)
        self._running = frozenset(map(int, running.split(","))) if running else frozenset()

    def sees(self, xid: int) -> bool:
        """Return whether the transaction with this 32-bit id is visible."""
        # The epoch that brings it nearest to xmax: a transaction that is being decoded is at most 2^31 transactions
        # old.
        full = self._xmax + ((xid - self._xmax + (1 << 31)) % (1 << 32)) - (1 << 31)
        return full < self._xmin or (full < self._xmax and full not in self._running)
