"""The single statement with which a worker settles all its lanes. Both sources use it.

In one statement, for every lane of a turn: the lease is checked by its epoch and owner, and renewed when part of its
time has passed; ``last_batch`` must be what this worker wrote last; the rows that the previous turn has published are
deleted, or archived. Its commit is synchronous, and so the flush barrier: rows of writers with ``synchronous_commit
= off`` are visible before they are durable, but rows that were read before this commit can't be lost after it. A lane
whose lease does not match is not in the result: nothing of it was settled.

It is one statement, and outside of pipelines, because a relay that sleeps (SIGSTOP, a paused virtual machine, a lost
host) between a write to a lane's row and the commit would block the lane for as long as it sleeps: libpq sends a
statement together with the Sync that commits it, a pipeline sends the Sync later. Its result is a few numbers for each
lane, so a full socket can't delay the commit.

| what happens                                | what follows                                                          |
|---------------------------------------------|-----------------------------------------------------------------------|
| killed before it, or it is rolled back      | the turn's rows stay; see loop.py                                     |
| committed, and the result is lost           | its rows are gone; settling them again finds none                     |
| epoch has moved on, or the owner is another | LaneLost for that lane; the others are settled                        |
| under the same epoch (a failover has lost   |                                                                       |
| the commit of our take-over)                |                                                                       |
| last_batch is not the expected one          | Postgres has lost a commit of ours, perhaps behind a pooler: the lane |
|                                             | is taken over again, which compares it with its marker                |
| the row does not name our transactional ids | the next holder would not fence us: the lane is taken over again      |
| a lane's row is locked by another session   | that lane is skipped and retried; the others are settled              |
| killed while it runs in the background, and | at-least-once only: neither turn is settled, or the first one is;     |
| the next turn is published already          | what was not settled is published again, in order, at most a batch    |
| rows are left by its DELETE (a trigger, row | the statement fails as a whole, and nothing is settled; then lanes    |
| security)                                   | are settled one by one, and that one stops                            |
| no row of lanes is written (lease is young) | the row's lock is a change too: the commit flushes the WAL            |
| another session has written a lane's row    | its version is not the known one: the row is looked up by the lane's  |
|                                             | number, at once                                                       |

Only lanes that have to be written are: while a session holds back xmin, an UPDATE of each row in each turn leaves so
many dead versions that finding a lane's row by its number takes longer than all the rest. Exactly-once and the WAL
source have to write it (``last_batch``, the lane's position). So the ctid of the version that was settled last is kept,
and the row is looked up by it. A ctid is only a hint: everything is checked as without it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any, Final, NamedTuple

import psycopg
from psycopg import sql

from outbox._clients.clock import uptime
from outbox._clients.counting import counted
from outbox._clients.postgres import pipeline
from outbox.errors import OutboxError
from relay.background import Background
from relay.core.lane import listed
from relay.core.lease import LOCKED_SECONDS, Lease
from relay.core.ports import NOTHING, Claim, DatabaseUnavailable, LaneLocked, LaneLost, RecordMetadata, UnsettledBatch
from relay.database import again_if_left, unavailable_on_error
from relay.failpoints import failpoint
from relay.settle.statements import END_IDLE, KEEP_TO_THE_INDEX, SettlingStatements, array, lease_values

RENEW_PART: Final = 0.7
"""A lease with less than this part of its time left is renewed with the next turn."""

# How long to wait for a flush by other sessions, how often to check for it, and when to try again after it did not
# come: no other session may be writing.
_FLUSH_SECONDS: Final = 0.005
_FLUSH_STEP_SECONDS: Final = 0.0003
_FLUSH_AGAIN_SECONDS: Final = 1.0

# Visible rows are in the WAL, but with synchronous_commit = off it may not be flushed. Once the WAL up to this position
# is flushed, so are all rows that were read before.
_WRITTEN: Final = """
SELECT pg_current_wal_insert_lsn()::text, pg_current_wal_flush_lsn() >= pg_current_wal_insert_lsn(),
       current_setting('synchronous_standby_names') = ''"""

_FLUSHED: Final = "SELECT pg_current_wal_flush_lsn() >= %(lsn)s::pg_lsn"


@dataclass(slots=True)
class SettlementLane:
    """A lane to be settled: its lease, what is unsettled, and what ``last_batch`` must be for that (None: anything)."""

    lease: Lease
    unsettled: UnsettledBatch = NOTHING
    expected: int | None = None
    own_id: str | None = None
    """Exactly-once: the id that the lane's row must have, so that the next holder fences this worker."""
    row_matches: bool = False
    """Whether the row was as expected when it was last read: ours, with our id and ``expected``."""
    version: str | None = None
    """The ctid of the lane's row when it was last settled; it changes when another session writes the row."""


class Settling(Enum):
    """When the previous turn is settled.

    The statement's result tells which leases are valid, and its commit makes durable what was read before it.
    """

    FIRST = auto()
    """Before this turn is published."""
    MEANWHILE = auto()
    """While this turn is published, if another check after the read succeeds."""
    BEFORE_COMMIT = auto()
    """While this turn is sent, before its Kafka transaction is committed."""


class RunningStatement(NamedTuple):
    """A settlement in progress.

    ``written`` are the lanes whose rows it writes, and so renews their leases. ``by_version``: it looks up only the
    known versions of the rows. ``missing`` are lanes that were not held by a statement before.
    """

    cursor: psycopg.Cursor[Any]
    lanes: Collection[int]
    asked_at: float
    written: Collection[int]
    by_version: bool
    missing: Sequence[int]


class Check(NamedTuple):
    """A check of leases, and whether all that could be read before it is flushed, in progress."""

    written: psycopg.Cursor[Any]
    held: psycopg.Cursor[Any]
    lanes: Collection[int]


class Settlement:
    """Settles lanes on one connection, in autocommit. ``archive``: keep published events.

    ``pooled``: the connection may be another session in each transaction, which sets KEEP_TO_THE_INDEX for itself.
    Otherwise its one session has it, and keeps the statement's plan. ``renew_part`` must leave a turn enough of the
    lease to publish in. ``on_settled`` is called with a lane and what was settled there. Raises Unavailable or
    SchemaError; then nothing is settled.

    ``settle``: in the foreground. ``begin``, then ``collect``/``collect_of``: in the background. ``send`` in the
    caller's transaction, and ``finish_sent`` after its commit.
    """

    def __init__(
        self,
        connection: psycopg.Connection[Any],
        schema: str,
        *,
        archive: bool = False,
        pooled: bool = True,
        renew_part: float = RENEW_PART,
        on_settled: Callable[[int, UnsettledBatch], None] = lambda _lane, _batch: None,
    ) -> None:
        self._connection = connection
        self.background = Background(connection)
        self._running: RunningStatement | None = None
        self._not_held: dict[int, OutboxError] = {}
        self._flush_in_vain_at = -_FLUSH_AGAIN_SECONDS
        self._renew_part = renew_part
        self._on_settled = on_settled
        self._archive = archive
        self._pooled = pooled
        self.statements = SettlingStatements(schema, archive=archive)
        self.lanes: dict[int, SettlementLane] = {}
        self.settles_first = False
        """Whether events are published only once they are settled (at-most-once)."""

    def hold(self, lease: Lease) -> None:
        self.lanes[lease.lane] = SettlementLane(lease)

    def drop(self, lane: int) -> None:
        self.lanes.pop(lane, None)

    @property
    def unsettled_lanes(self) -> Collection[int]:
        return [lane for lane, held in self.lanes.items() if held.unsettled]

    def prolongs(self, lane: int) -> bool:
        """Return whether the next turn must renew the lane's lease."""
        lease = self.lanes[lane].lease
        return lease.remaining_seconds < lease.ttl_seconds * self._renew_part

    def _values(self, sent: RunningStatement) -> dict[str, Any]:
        held = [self.lanes[lane] for lane in sent.lanes]
        unsettled = [lane.unsettled for lane in held]
        rows = [claim for part in unsettled for claim in part.rows]
        row_lanes = [lane for lane, part in zip(sent.lanes, unsettled, strict=True) for _ in part.rows]
        values: dict[str, Any] = {
            # All leases of a worker have the same ttl and owner.
            "ttl": held[0].lease.ttl_seconds if held else 0.0,
            **lease_values([lane.lease for lane in held]),
            "expected": array([lane.expected for lane in held]),
            "batches": array([part.number for part in unsettled]),
            "lsns": array([part.commit_lsn for part in unsettled]),
            "own_ids": [lane.own_id for lane in held],
            "versions": _versions(held),
            "writes": array(["t" if lane in sent.written else "f" for lane in sent.lanes]),
            "row_lanes": array(row_lanes),
            "row_ids": array([claim.position for claim in rows]),
            "row_event_ids": array([claim.event_id for claim in rows]),
        }
        if self._archive:
            values |= _places(rows, [each for part in unsettled for each in part.records or [None] * len(part.rows)])
        return values

    def send(self, lanes: Collection[int], *, by_number: bool = False) -> RunningStatement:
        """Execute the statement, whose result ``finish_sent`` takes.

        ``by_number``: look up the lanes' rows by number. For callers that do more in the same transaction: a lookup by
        version misses a row that has moved, and is repeated only after the commit.
        """
        sent = self._new(lanes, by_number=by_number)
        self._execute(sent, *self._statement(sent))
        return sent

    def finish_sent(self, sent: RunningStatement) -> dict[int, OutboxError]:
        """Process the result of ``send``; settle moved lanes again. Returns those that were not held, with reasons."""
        missing, moved = self._note(sent)
        return self._retry_locked([*missing, *self._settle_in_foreground(moved)])

    def settle(self, lanes: Collection[int]) -> dict[int, OutboxError]:
        """Settle the unsettled events of these lanes, in one round trip. Returns those that were not held."""
        if not lanes:
            return {}
        failpoint("batch.settling")
        with unavailable_on_error(f"settling {lanes_text(lanes)}"):
            failed = self._retry_locked(self._settle_in_foreground(lanes))
        failpoint("batch.settled")
        return failed

    def begin(self, lanes: Collection[int]) -> None:
        """Start to settle these lanes in the background: the connection is in use until ``wait``."""
        assert not self._pooled, "behind a pooler the statement needs a transaction"
        failpoint("batch.settling")
        self._running = self._start(lanes)

    def _start(self, lanes: Collection[int], missing: Sequence[int] = ()) -> RunningStatement:
        sent = self._new(lanes, missing=missing)
        self.background.start(partial(self._execute, sent, *self._statement(sent)))
        return sent

    def wait(self, deadline: float | None = None) -> None:
        """Wait until what ``begin`` started, if anything, is done, and remember the lanes that were not held.

        Raises DatabaseUnavailable at ``deadline``, by time.monotonic(); it may be called again after that.
        """
        missing: Sequence[int] | None = None
        while self._running is not None:
            missing = self._receive(self._running, deadline)
        if missing is None:
            return
        with unavailable_on_error(f"settling {lanes_text(missing)}"):
            self._not_held |= self._retry_locked(missing)
        failpoint("batch.settled")

    def collect(self) -> dict[int, OutboxError]:
        """Wait until what ``begin`` started is done. Returns all lanes that were not held, and forgets them."""
        self.wait()
        failed, self._not_held = self._not_held, {}
        return failed

    def collect_of(self, lanes: Collection[int]) -> dict[int, OutboxError]:
        """Return which of these lanes were not held, and forget them; ``collect`` returns the others."""
        return {lane: self._not_held.pop(lane) for lane in lanes if lane in self._not_held}

    def _receive(self, running: RunningStatement, deadline: float | None) -> Sequence[int]:
        """Wait for a statement. Returns the lanes that were not held; starts it again for those that have moved."""
        seconds = None if deadline is None else max(deadline - time.monotonic(), 0.0)
        with unavailable_on_error(f"settling {lanes_text(running.lanes)}"):
            try:
                done = self.background.wait(seconds)
            except BaseException:
                self._running = None
                raise
            if not done:
                waited = uptime() - running.asked_at
                raise DatabaseUnavailable(
                    f"Postgres: settling {lanes_text(running.lanes)} has taken {waited:.1f} s and is not done; the "
                    "next batch is not published, and will be read again"
                )
            self._running = None
            missing, moved = self._note(running)
            missing = [*running.missing, *missing]
            if moved:
                self._running = self._start(moved, missing)
        return missing

    def with_version(self, lanes: Collection[int]) -> Collection[int]:
        """Return those of these lanes whose rows' versions are known, by which they can be checked."""
        return [lane for lane in lanes if self.lanes[lane].version is not None]

    def send_check(self, lanes: Collection[int]) -> Check:
        """Check leases after what is read, in the caller's pipeline; ``find_lost`` takes the result."""
        written = self._connection.execute(_WRITTEN)
        return Check(written, self._connection.execute(*self.still_held_query(lanes)), lanes)

    def find_lost(self, lanes: Collection[int], check: Check | None = None) -> dict[int, OutboxError] | None:
        """Return LaneLost for each lane that another relay has taken, by a check that runs after the read.

        Returns None if it is not known that what was read is durable: then settle before publishing.
        """
        if check is None or not set(check.lanes) >= set(lanes):
            with pipeline(self._connection):
                check = self.send_check(lanes)
        ((lsn, flushed, alone),) = check.written.fetchall()
        if not alone:
            return None
        began = time.monotonic()
        if not flushed and began - self._flush_in_vain_at < _FLUSH_AGAIN_SECONDS:
            return None
        while not flushed:
            if time.monotonic() - began >= _FLUSH_SECONDS:
                self._flush_in_vain_at = began
                return None
            time.sleep(_FLUSH_STEP_SECONDS)
            ((flushed,),) = self._connection.execute(_FLUSHED, {"lsn": lsn}).fetchall()
        return self.lost_lanes(lanes, check.held.fetchall())

    def still_held_query(self, lanes: Collection[int]) -> tuple[sql.Composed, dict[str, Any]]:
        """Return a query, by last known row versions, for the lanes that are still ours, and its parameters."""
        held = [self.lanes[lane] for lane in lanes]
        values = {**lease_values([lane.lease for lane in held]), "versions": _versions(held)}
        known, statements = all(lane.version is not None for lane in held), self.statements
        return statements.still_held_by_version if known else statements.still_held, values

    def lost_lanes(self, lanes: Collection[int], found: Sequence[Any]) -> dict[int, OutboxError]:
        """Return the lanes that another relay has taken, by the result of ``still_held_query``."""
        held = {row[0] for row in found}
        missing = [lane for lane in lanes if lane not in held]
        if any(self.lanes[lane].version is not None for lane in missing):
            # The row has moved, for example because the control loop has renewed the lease.
            for lane in missing:
                self.lanes[lane].version = None
            held |= {row[0] for row in self._connection.execute(*self.still_held_query(missing)).fetchall()}
        return {lane: self.lane_lost(lane) for lane in missing if lane not in held}

    def lane_lost(self, lane: int) -> LaneLost:
        held = self.lanes[lane]
        text = f"lane {lane}: epoch {held.lease.epoch} of {held.lease.owner} is over, another relay has taken the lane"
        unsettled = len(held.unsettled.rows) if held.unsettled.number is None else 0
        if unsettled and self.settles_first:
            text += f"; it publishes the {counted(unsettled, 'event')} just read here"
        elif unsettled:
            text += f"; the {counted(unsettled, 'event')} just published will be published again by it"
        return LaneLost(text)

    @contextmanager
    def one_session(self, lanes: Collection[int]) -> Iterator[None]:
        """Read and settle these lanes in one session of the server, so that a crash in between is noticed.

        This connection is one. Behind a pooler it takes a transaction, with the planner's settings. It locks the lanes'
        rows when it settles, just before its commit. Neither is sent in a pipeline: Postgres ends a session that idles
        in a transaction for longer than the lease, but not one that waits for a pipeline's next message.
        """
        if not self._pooled:
            yield
            return
        ttl_ms = min((int(self.lanes[lane].lease.ttl_seconds * 1000) for lane in lanes), default=0)
        with self._connection.transaction():
            with pipeline(self._connection):
                self._connection.execute(END_IDLE, {"ttl_ms": str(ttl_ms)})
                self._connection.execute(KEEP_TO_THE_INDEX, {"local": True})
            yield

    def _writes(self, lane: SettlementLane) -> bool:
        batch = lane.unsettled
        return batch.number is not None or batch.commit_lsn is not None or self.prolongs(lane.lease.lane)

    def _new(self, lanes: Collection[int], *, by_number: bool = False, missing: Sequence[int] = ()) -> RunningStatement:
        written = {lane for lane in lanes if self._writes(self.lanes[lane])}
        by_version = not by_number and all(self.lanes[lane].version is not None for lane in lanes)
        return RunningStatement(self._connection.cursor(), lanes, uptime(), written, by_version, missing)

    def _statement(self, sent: RunningStatement) -> tuple[sql.Composed, dict[str, Any]]:
        statements = self.statements
        return statements.settle_by_version if sent.by_version else statements.settle, self._values(sent)

    def _execute(self, sent: RunningStatement, query: sql.Composed, values: dict[str, Any]) -> None:
        again_if_left(self._connection, lambda: sent.cursor.execute(query, values, prepare=not self._pooled))

    def _settle_in_foreground(self, lanes: Collection[int]) -> list[int]:
        """Settle these lanes, and again those whose rows have moved. Returns the lanes that were not held."""
        not_held: list[int] = []
        while lanes:
            with self.one_session(lanes):
                sent = self.send(lanes)
            missing, lanes = self._note(sent)
            not_held += missing
        return not_held

    def _retry_locked(self, missing: Sequence[int]) -> dict[int, OutboxError]:
        """Settle those again whose rows a renewal has locked. Returns the reasons for the lanes that were not held."""
        failed = self._reasons(missing)
        for seconds in LOCKED_SECONDS:
            locked = [lane for lane, error in failed.items() if isinstance(error, LaneLocked)]
            if not locked:
                break
            time.sleep(seconds)
            others = {lane: error for lane, error in failed.items() if lane not in locked}
            failed = others | self._reasons(self._settle_in_foreground(locked))
        return failed

    def _note(self, sent: RunningStatement) -> tuple[list[int], list[int]]:
        """Record the lanes that were held. Returns those that were not, and those whose rows have moved.

        The latter are looked up by their numbers next: a row moves when the control loop renews a lease, for example. A
        locked row counts as moved at first, too.
        """
        rows = sent.cursor.fetchall()
        for row in rows:
            known = self.lanes[row[0]]
            known.version = row[2]
            known.row_matches = True
            if row[0] in sent.written:
                known.lease.renewed(sent.asked_at)
            self._forget_unsettled(known)
        held = {row[0] for row in rows}
        missing = [lane for lane in sent.lanes if lane not in held]
        if not sent.by_version:
            return missing, []
        for lane in missing:
            self.lanes[lane].version = None
        return [], missing

    def _forget_unsettled(self, lane: SettlementLane) -> None:
        batch, lane.unsettled = lane.unsettled, NOTHING
        if batch.number is not None:
            lane.expected = batch.number
        if batch:
            self._on_settled(lane.lease.lane, batch)

    def _reasons(self, lanes: Collection[int]) -> dict[int, OutboxError]:
        if not lanes:
            return {}
        values = lease_values([self.lanes[lane].lease for lane in lanes])
        rows = self._connection.execute(self.statements.why, values).fetchall()
        reasons: dict[int, OutboxError] = {lane: self.lane_lost(lane) for lane in lanes}
        for lane, last_batch, named in rows:
            known = self.lanes[lane]
            if known.expected not in {None, last_batch}:
                changed = f"batch {last_batch} instead of {known.expected}"
            elif known.own_id not in {None, named}:
                changed = f"transactional id {named!r} instead of {known.own_id!r}"
            else:
                reasons[lane] = LaneLocked(lane)
                continue
            known.row_matches = False
            reasons[lane] = DatabaseUnavailable(
                f"lane {lane}: its row has changed ({changed}): "
                "Postgres has lost a commit, or the row was changed by hand; the lane is compared with its marker again"
            )
        return reasons


def _places(rows: Sequence[Claim], records: Sequence[RecordMetadata | None]) -> dict[str, Any]:
    """Return the places of rows, in the order of their ids: 0 and -1 where one is not known."""
    order = sorted(range(len(rows)), key=lambda at: rows[at].position)
    numbers: dict[str, int] = {}
    places = [records[at] for at in order]
    topic_numbers = [0 if one is None else numbers.setdefault(one.topic, len(numbers) + 1) for one in places]
    return {
        "place_ids": array([rows[at].position for at in order]),
        "topics": list(numbers),
        "topic_numbers": array(topic_numbers),
        "partitions": array([-1 if one is None else one.partition for one in places]),
        "offsets": array([-1 if one is None else one.offset for one in places]),
    }


def _versions(held: Sequence[SettlementLane]) -> str:
    return array([None if lane.version is None else f'"{lane.version}"' for lane in held])


def lanes_text(lanes: Collection[int]) -> str:
    return f"lane{'' if len(lanes) == 1 else 's'} {listed(lanes)}"


def by_lane(claims: Iterable[Claim]) -> dict[int, list[Claim]]:
    batches: dict[int, list[Claim]] = {}
    for lane, group in groupby(claims, attrgetter("lane")):
        batches.setdefault(lane, []).extend(group)
    return batches
