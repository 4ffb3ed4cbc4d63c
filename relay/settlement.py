"""The one statement with which a worker settles all its lanes. Both sources use it.

In one statement, for every lane of a turn: the lease is checked by its epoch and prolonged when it has used up a part
of its time; ``last_batch`` is expected to be what this worker wrote last; the rows published in the turn before are
deleted, or moved into the archive. Its commit is synchronous, and so the flush barrier: rows of writers with
``synchronous_commit = off`` are visible before they are durable, and after this commit whatever was read before it
can't be lost any more. A lane whose lease does not match is not in the answer: nothing of it was settled.

It is one statement, because a relay that sleeps (SIGSTOP, a paused virtual machine, a lost host) between a write to a
lane's row and the commit would keep everybody from the lane for as long as it sleeps. Its answer is a few numbers for
each lane, which no full socket holds up.

| what happens                                | what follows                                                         |
|---------------------------------------------|----------------------------------------------------------------------|
| killed before it, or it is rolled back      | the turn's rows stay; see loop.py                                     |
| committed, and the answer is lost           | its rows are gone; settling them again finds none                     |
| epoch has moved on                          | LaneLost for that lane; the others are settled                        |
| last_batch is another than the one expected | Postgres has lost a commit of ours, behind a pooler for one: the lane |
|                                             | is taken over again, which compares it with its marker               |
| the row does not name our transactional ids | the next holder would not fence us: the lane is taken over again      |
| a lane's row is locked by another session   | that lane is passed over and tried again; the others are settled      |
| killed while it runs in the background, and | at-least-once only: neither turn is settled, or the first one is;     |
| the next turn is published already          | what was not settled is published again, in order, at most a batch    |
| no row of lanes is written (lease is young) | the row's lock is a change all the same: the commit flushes the WAL   |
| someone else has written a lane's row       | its version is not the one that is known: the lane is looked for by   |
|                                             | its number, at once                                                   |

Only lanes that have to be written are: an UPDATE of each row in each turn leaves so many dead versions behind, while
some session holds the xmin, that finding a lane's row by its number takes longer than all the rest. Exactly-once and
the WAL source have to write it (``last_batch``, the lane's place). So the ctid of the version that was settled last is
kept, and the row is looked for there. All else is checked as before; a ctid says only where to look.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import psycopg
from psycopg import sql

from outbox.errors import OutboxError
from relay.background import Background
from relay.database import unavailable_on_error
from relay.failpoints import failpoint
from relay.lease import Lease
from relay.ports import Claim, DatabaseUnavailable, LaneBusy, LaneLost, Published, Receipt
from relay.position import WalPosition
from relay.statements import END_IDLE, KEEP_TO_THE_INDEX, SettlingStatements, array

RENEW_PART: Final = 0.7
"""A lease with less left than this part of it is prolonged with the next turn."""

# How long to wait, each time, before a lane is given up for this turn whose row is locked.
_BUSY_SECONDS: Final = (0.01, 0.02, 0.04)


@dataclass(frozen=True, slots=True)
class UnsettledBatch:
    """What is published of a lane and not yet settled, in order, and the number of the Kafka transaction it is in.

    ``claims`` are all of them, with those that have no row; ``at`` is up to where the lane is done with the stream.
    """

    rows: Sequence[Claim] = ()
    places: Sequence[Published] = ()
    batch: int | None = None
    claims: Sequence[Claim] = ()
    at: WalPosition | None = None

    @staticmethod
    def of(receipt: Receipt, at: WalPosition | None = None) -> UnsettledBatch:
        """Return what is to be settled after this receipt."""
        results: Sequence[tuple[Claim, Any]] = receipt.results
        done = [result for result in results if isinstance(result[1], Published)]
        rows = [result for result in done if result[0].has_row]
        return UnsettledBatch(
            [claim for claim, _ in rows],
            [place for _, place in rows],
            receipt.batch,
            [claim for claim, _ in done],
            at,
        )

    def then(self, later: UnsettledBatch) -> UnsettledBatch:
        """Return what is to be settled of two turns, neither of which is in a Kafka transaction."""
        assert self.batch is None
        assert later.batch is None
        return UnsettledBatch(
            [*self.rows, *later.rows],
            [*self.places, *later.places],
            None,
            [*self.claims, *later.claims],
            later.at or self.at,
        )

    def covers(self, other: UnsettledBatch) -> bool:
        """Return whether all rows of the other are among these, of the same Kafka transaction if there is one."""
        rows = {claim.position for claim in self.rows}
        return bool(rows) and self.batch == other.batch and all(claim.position in rows for claim in other.rows)

    def __bool__(self) -> bool:
        return bool(self.claims) or self.batch is not None or self.at is not None


NOTHING: Final = UnsettledBatch()


@dataclass(slots=True)
class SettledLane:
    """One lane: its lease, what is to be settled, and what ``last_batch`` must be for that (None: anything)."""

    lease: Lease
    pending: UnsettledBatch = NOTHING
    expected: int | None = None
    own_id: str | None = None
    """Exactly-once: what the lane's row must name, so that whoever takes the lane over fences this worker."""
    confirmed: bool = False
    """Whether the row was as expected when it was looked at last: ours, naming us, with ``expected`` in it."""
    written: bool = False
    """Whether the statement under way writes the lane's row, and so prolongs its lease."""
    version: str | None = None
    """The ctid of the lane's row when it was settled last; another version is there if someone else has written it."""
    by_version: bool = False
    """Whether the statement under way looks for that version alone."""


class _Behind(NamedTuple):
    """A settlement that is under way in the background."""

    cursor: psycopg.Cursor[Any]
    lanes: Collection[int]
    asked_at: float
    missing: Sequence[int]


class Settlement:
    """Settles lanes over one connection, in autocommit. ``archive``: keep what was published.

    ``prepared`` lets the server keep the statement's plan: only for a connection that is one session for all its life,
    and has KEEP_TO_THE_INDEX. Without it each statement that is sent alone has these settings for itself.
    ``renew_part`` must leave a turn enough of the lease to be published in. ``on_settled`` is called with a lane and
    what was settled there. Raises Unavailable or SchemaError; then nothing is settled.
    """

    def __init__(
        self,
        connection: psycopg.Connection[Any],
        schema: str,
        *,
        archive: bool = False,
        prepared: bool = False,
        renew_part: float = RENEW_PART,
        on_settled: Callable[[int, UnsettledBatch], None] = lambda _lane, _pending: None,
    ) -> None:
        self._connection = connection
        self.background = Background(connection)
        self._behind: _Behind | None = None
        self._renew_part = renew_part
        self._on_settled = on_settled
        self._archive = archive
        self._prepared = prepared
        self.statements = SettlingStatements(schema, archive=archive)
        self.lanes: dict[int, SettledLane] = {}

    def hold(self, lease: Lease) -> None:
        """Begin with a lane."""
        self.lanes[lease.lane] = SettledLane(lease)

    def drop(self, lane: int) -> None:
        """Forget a lane."""
        self.lanes.pop(lane, None)

    @property
    def unsettled(self) -> Collection[int]:
        """The lanes with something to settle."""
        return [lane for lane, settled in self.lanes.items() if settled.pending]

    def prolongs(self, lane: int) -> bool:
        """Return whether the lane's lease is to be prolonged with the next turn."""
        lease = self.lanes[lane].lease
        return lease.remaining_seconds < lease.ttl_seconds * self._renew_part

    def values(self, lanes: Collection[int], read: Sequence[Claim] = ()) -> dict[str, Any]:
        """Return what the statement binds for these lanes."""
        held = [self.lanes[lane] for lane in lanes]
        for lane in held:
            lane.written = self._writes(lane)
        pending = [lane.pending for lane in held]
        rows = [claim for part in pending for claim in part.rows]
        row_lanes = [lane for lane, part in zip(lanes, pending, strict=True) for _ in part.rows]
        values: dict[str, Any] = {
            "ttl": held[0].lease.ttl_seconds if held else 0.0,
            "lanes": array(list(lanes)),
            "epochs": array([lane.lease.epoch for lane in held]),
            "expected": array([lane.expected for lane in held]),
            "batches": array([part.batch for part in pending]),
            "lsns": array([None if part.at is None else part.at.commit_lsn for part in pending]),
            "numbers": array([None if part.at is None else part.at.number for part in pending]),
            "own_ids": [lane.own_id for lane in held],
            "versions": array([None if lane.version is None else f'"{lane.version}"' for lane in held]),
            "writes": array(["t" if lane.written else "f" for lane in held]),
            "row_lanes": array(row_lanes),
            "row_ids": array([claim.position for claim in rows]),
            "row_event_ids": array([claim.event_id for claim in rows]),
        }
        if self._archive:
            places = [place for part in pending for place in part.places]
            values["topics"] = [place.topic for place in places]
            values["partitions"] = [place.partition for place in places]
            values["offsets"] = [place.offset for place in places]
        if read:
            values["next_lanes"] = array([claim.lane for claim in read])
            values["next_ids"] = array([claim.position for claim in read])
            values["next_event_ids"] = array([claim.event_id for claim in read])
        return values

    def send(self, cursor: psycopg.Cursor[Any], lanes: Collection[int], *, in_transaction: bool = False) -> None:
        """Execute the statement on a cursor, whose answer ``answered`` takes.

        ``in_transaction`` says that more is done in the same transaction for lanes that are held: then it must find
        them at once.
        """
        query, values = self._statement(lanes, in_transaction=in_transaction)
        cursor.execute(query, values, prepare=self._prepared)

    def answered(self, cursor: psycopg.Cursor[Any], lanes: Collection[int], asked_at: float) -> dict[int, OutboxError]:
        """Take the answer to ``send``; return the lanes that were not held, with the reason."""
        return self._answered(cursor.fetchall(), lanes, asked_at)

    def settle(self, lanes: Collection[int]) -> dict[int, OutboxError]:
        """Settle what is pending of these lanes, in one round trip; return those that were not held."""
        if not lanes:
            return {}
        failpoint("batch.settling")
        with unavailable_on_error(f"settling {lanes_text(lanes)}"):
            failed = self._why_not(self._ask(lanes))
        failpoint("batch.settled")
        return failed

    def begin(self, lanes: Collection[int]) -> None:
        """Begin to settle what is pending of these lanes, in the background: the connection is in use until ``end``."""
        assert self._prepared, "behind a pooler the statement needs a transaction"
        failpoint("batch.settling")
        self._behind = self._begin(lanes)

    def _begin(self, lanes: Collection[int], missing: Sequence[int] = ()) -> _Behind:
        cursor = self._connection.cursor()
        query, values = self._statement(lanes)
        asked_at = time.monotonic()

        def execute() -> None:
            cursor.execute(query, values, prepare=True)

        self.background.start(execute)
        return _Behind(cursor, lanes, asked_at, missing)

    def end(self, deadline: float | None = None) -> dict[int, OutboxError]:
        """Wait until what ``begin`` began is done; return the lanes that were not held. Safe to call without it.

        Raises DatabaseUnavailable at ``deadline``, by time.monotonic(); it may be called again after that.
        """
        missing: Sequence[int] | None = None
        while self._behind is not None:
            missing = self._end(self._behind, deadline)
        if missing is None:
            return {}
        with unavailable_on_error(f"settling {lanes_text(missing)}"):
            failed = self._why_not(missing)
        failpoint("batch.settled")
        return failed

    def _end(self, behind: _Behind, deadline: float | None) -> Sequence[int]:
        """Wait for a statement; return the lanes that were not held. Others, that have moved, are asked for again."""
        seconds = None if deadline is None else max(deadline - time.monotonic(), 0.0)
        with unavailable_on_error(f"settling {lanes_text(behind.lanes)}"):
            try:
                done = self.background.wait(seconds)
            except BaseException:
                self._behind = None
                raise
            if not done:
                waited = time.monotonic() - behind.asked_at
                raise DatabaseUnavailable(
                    f"Postgres: settling {lanes_text(behind.lanes)} has taken {waited:.1f} s and is not done; what was "
                    "to be published next is given up, and read again"
                )
            self._behind = None
            missing, moved = self._note(behind.cursor.fetchall(), behind.lanes, behind.asked_at)
            missing = [*behind.missing, *missing]
            if moved:
                self._behind = self._begin(moved, missing)
        return missing

    def overlaps(self, lanes: Collection[int]) -> bool:
        """Return whether turns of these lanes may be published before the ones before them are settled.

        Without transactions only: there a marker would vouch for rows that may be there still. Not while a lease has to
        be prolonged, which must come before the events that it is for.
        """
        return self._prepared and all(
            held.own_id is None and held.pending.batch is None and not self.prolongs(held.lease.lane)
            for held in self._about(lanes)
        )

    def precedes_commit(self, lanes: Collection[int]) -> bool:
        """Return whether turns of these lanes may be sent before the ones before them are settled, and committed after.

        With transactions only: no reader sees what is sent before it is committed.
        """
        return self._prepared and all(held.own_id is not None for held in self._about(lanes))

    def _about(self, lanes: Collection[int]) -> list[SettledLane]:
        """Return these lanes and those with something to settle."""
        wanted = set(lanes)
        return [held for lane, held in self.lanes.items() if held.pending or lane in wanted]

    def still_held(self, lanes: Collection[int]) -> tuple[sql.Composed, dict[str, Any]]:
        """Return a query for those of the lanes that are ours still, and what it binds: it looks where they were."""
        held = [self.lanes[lane] for lane in lanes]
        values = {
            "lanes": array(list(lanes)),
            "epochs": array([lane.lease.epoch for lane in held]),
            "versions": array([None if lane.version is None else f'"{lane.version}"' for lane in held]),
        }
        known, statements = all(lane.version is not None for lane in held), self.statements
        return statements.still_held_by_version if known else statements.still_held, values

    def lost_of(self, lanes: Collection[int], found: Sequence[Any]) -> dict[int, OutboxError]:
        """Return the lanes that are another relay's, by the answer to ``still_held``."""
        held = {row[0] for row in found}
        missing = [lane for lane in lanes if lane not in held]
        if any(self.lanes[lane].version is not None for lane in missing):
            # The control loop has prolonged a lease, say: the row is somewhere else.
            for lane in missing:
                self.lanes[lane].version = None
            held |= {row[0] for row in self._connection.execute(*self.still_held(missing)).fetchall()}
        return {lane: self.lost(lane) for lane in missing if lane not in held}

    def settle_and_count(self, lanes: Collection[int], read: Sequence[Claim]) -> tuple[int, dict[int, OutboxError]]:
        """Settle, and return how many of the events that were read are there and can't be lost."""
        asked_at = time.monotonic()
        failpoint("batch.settling")
        with unavailable_on_error(f"settling {lanes_text(lanes)}"), self._connection.cursor() as cursor:
            with self._to_the_index(lanes):
                if read:
                    # Not by version: the count must come with the first answer.
                    self._look_for_all(lanes)
                    cursor.execute(self.statements.settle_and_count, self.values(lanes, read))
                else:
                    self.send(cursor, lanes)
            rows = cursor.fetchall()
            failed = self._answered(rows, lanes, asked_at)
        failpoint("batch.settled")
        return rows[0][3] if read and rows else 0, failed

    def note_settled(self, lane: int, asked_at: float) -> None:
        """Record that what is pending of the lane was settled in another statement, and its lease prolonged."""
        held = self.lanes[lane]
        held.lease.renewed(asked_at)
        self._forget_pending(held)

    def lost(self, lane: int) -> LaneLost:
        """Return the error of a lane that is another relay's now."""
        held = self.lanes[lane]
        text = f"lane {lane}: epoch {held.lease.epoch} is over, another relay has taken the lane"
        unsettled = len(held.pending.rows) if held.pending.batch is None else 0
        if unsettled:
            text += f"; the {unsettled} events just published will be published again by it"
        return LaneLost(text)

    @contextmanager
    def _to_the_index(self, lanes: Collection[int]) -> Iterator[None]:
        """Behind a pooler, give one statement the planner's settings: in a transaction, all of it sent at once.

        Postgres ends the session if it sleeps in between for longer than the lease: it holds the lanes' rows.
        """
        if self._prepared:
            yield
            return
        ttl_ms = min(int(self.lanes[lane].lease.ttl_seconds * 1000) for lane in lanes)
        with self._connection.pipeline(), self._connection.transaction():
            self._connection.execute(END_IDLE, {"ttl_ms": str(ttl_ms)})
            self._connection.execute(KEEP_TO_THE_INDEX, {"local": True})
            yield

    def _writes(self, lane: SettledLane) -> bool:
        """Return whether the lane's row has to be written, and not only locked."""
        pending = lane.pending
        return pending.batch is not None or pending.at is not None or self.prolongs(lane.lease.lane)

    def _statement(
        self, lanes: Collection[int], *, in_transaction: bool = False
    ) -> tuple[sql.Composed, dict[str, Any]]:
        by_version = not in_transaction and all(self.lanes[lane].version is not None for lane in lanes)
        self._look_for_all(lanes, by_version=by_version)
        return self.statements.settle_by_version if by_version else self.statements.settle, self.values(lanes)

    def _look_for_all(self, lanes: Collection[int], *, by_version: bool = False) -> None:
        for lane in lanes:
            self.lanes[lane].by_version = by_version

    def _answered(self, rows: Sequence[Any], lanes: Collection[int], asked_at: float) -> dict[int, OutboxError]:
        missing, moved = self._note(rows, lanes, asked_at)
        return self._why_not([*missing, *self._ask(moved)])

    def _ask(self, lanes: Collection[int]) -> list[int]:
        """Settle these lanes, and once more those whose rows have moved; return the lanes that were not held."""
        not_held: list[int] = []
        while lanes:
            asked_at = time.monotonic()
            with self._connection.cursor() as cursor:
                with self._to_the_index(lanes):
                    self.send(cursor, lanes)
                missing, lanes = self._note(cursor.fetchall(), lanes, asked_at)
            not_held += missing
        return not_held

    def _why_not(self, missing: Sequence[int]) -> dict[int, OutboxError]:
        """Return the reasons of lanes that were not held, but for those that are held when they are tried again."""
        failed = self._reasons(missing) if missing else {}
        busy = [lane for lane, error in failed.items() if isinstance(error, LaneBusy)]
        if busy:
            failed = {lane: error for lane, error in failed.items() if lane not in busy} | self._again(busy)
        return failed

    def _note(self, rows: Sequence[Any], lanes: Collection[int], asked_at: float) -> tuple[list[int], list[int]]:
        """Record the lanes that were held; return those that were not, and those whose rows have moved.

        These are looked for by their numbers next: the control loop has prolonged a lease, say, and the row is not
        where it was. Not for a lock: a locked row is looked for as well.
        """
        for row in rows:
            settled = self.lanes[row[0]]
            settled.version = row[2]
            settled.confirmed = True
            if settled.written:
                settled.lease.renewed(asked_at)
            self._forget_pending(settled)
        held = {row[0] for row in rows}
        missing = [lane for lane in lanes if lane not in held]
        moved = [lane for lane in missing if self.lanes[lane].by_version]
        for lane in moved:
            self.lanes[lane].version = None
        return [lane for lane in missing if not self.lanes[lane].by_version], moved

    def _forget_pending(self, settled: SettledLane) -> None:
        pending, settled.pending = settled.pending, NOTHING
        if pending.batch is not None:
            settled.expected = pending.batch
        if pending:
            self._on_settled(settled.lease.lane, pending)

    def _again(self, busy: Sequence[int]) -> dict[int, OutboxError]:
        """Try lanes again whose rows were locked: for a moment by the control loop perhaps, which renews leases."""
        failed: dict[int, OutboxError] = {lane: LaneBusy(lane) for lane in busy}
        for seconds in _BUSY_SECONDS:
            if not busy:
                break
            time.sleep(seconds)
            reasons = self._reasons(self._ask(busy))
            failed = {lane: error for lane, error in failed.items() if lane not in busy} | reasons
            busy = [lane for lane, error in reasons.items() if isinstance(error, LaneBusy)]
        return failed

    def _reasons(self, lanes: Collection[int]) -> dict[int, OutboxError]:
        epochs = [self.lanes[lane].lease.epoch for lane in lanes]
        rows = self._connection.execute(self.statements.why, {"lanes": list(lanes), "epochs": epochs}).fetchall()
        reasons: dict[int, OutboxError] = {lane: self.lost(lane) for lane in lanes}
        for lane, last_batch, named in rows:
            known = self.lanes[lane]
            if known.expected in {None, last_batch} and known.own_id in {None, named}:
                reasons[lane] = LaneBusy(lane)
                continue
            known.confirmed = False
            reasons[lane] = DatabaseUnavailable(
                f"lane {lane}: its row has changed (batch {last_batch}, {self.lanes[lane].expected} was expected): "
                "Postgres has lost a commit, or somebody changed it; the lane is compared with its marker again"
            )
        return reasons


def lanes_text(lanes: Collection[int]) -> str:
    """Return lanes as an error names them: all of a few, some of many."""
    some = sorted(lanes)
    if len(some) == 1:
        return f"lane {some[0]}"
    return f"lanes {', '.join(map(str, some[:8]))}{', …' if len(some) > 8 else ''}"


def by_lane(claims: Sequence[Claim]) -> Mapping[int, list[Claim]]:
    """Return events by lane, each lane's in the order given."""
    batches: dict[int, list[Claim]] = {}
    for claim in claims:
        batches.setdefault(claim.lane, []).append(claim)
    return batches
