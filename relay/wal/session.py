"""The stream of events out of the WAL: one slot, read by one thread, shared out to the lanes in commit order.

A relay that reads the WAL holds all lanes or none. Each lane has a Channel, which holds what was read for it until it
is settled; the server is told to forget the WAL only up to where every lane has settled everything.
What is held is bounded: when the lanes are behind, reading stops, and feedback goes on.

| what happens                             | what follows                                                            |
|------------------------------------------|-------------------------------------------------------------------------|
| killed before feedback                   | the slot gives the same again; each lane passes by what is up to its    |
|                                          | own position (its marker's, or the one in ``lanes``), and what has no   |
|                                          | row any more                                                            |
| killed between book and feedback         | the same: the book (``streams.flushed_lsn``) is only ever ahead         |
| the connection breaks, or Postgres dies  | the session ends, and with it what is held; lanes settle, and join anew |
| a lane can't be taken over               | the others are streamed without it. Its rows are let go of, because     |
|                                          | they are in the table; what has no row is held, and holds the slot      |
| Kafka is away                            | channels fill up, reading stops, feedback goes on, the WAL is kept      |
| an old relay still reads the slot        | its lanes are lost to it, with exactly-once it is fenced in Kafka; then |
|                                          | that one walsender is ended                                             |
| the slot is above the book               | stop: somebody moved it, or made it anew; events could be missed        |
| the slot is gone, or lost its WAL        | stop; `outbox cdc setup --repair` makes a new one, lanes read the table |
| the publication was changed              | stop: what was not published meanwhile is missing. The repair keeps the |
|                                          | slot, lanes read the table up to there; what the stream says of such    |
|                                          | rows is passed by, when it lacks columns                                |
| an event's message is of no transaction  | a dead letter: whoever wrote it may have rolled back                    |
| another timeline that left ours before   | stop: this server does not have what was published                      |
| where we were                            |                                                                         |

The feedback never goes by the positions of keepalives. An outbox without events would hold the WAL of all others so:
when nothing is under way, a heartbeat is written (``pg_logical_emit_message``), and its arrival moves the position.
"""

from __future__ import annotations

import datetime as dt
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import psycopg
import structlog
from uuid_utils.compat import uuid7

from outbox import _message
from outbox.errors import ConfigurationError, MessageError, SchemaError
from relay.failpoints import failpoint
from relay.lease import Lease
from relay.ports import Claim, Unavailable
from relay.position import At
from relay.settlement import lanes_text
from relay.wal.lane_hash import lane_of
from relay.wal.pgoutput import Begin, Commit, Insert, Message, Relation, Value, decode, insert_head, two_numbers
from relay.wal.replication import Replication, SlotInUse, lsn_text
from relay.wal.slot import NO_TRANSACTION, REPAIR, Slot, SlotNames, SlotState, Snapshot, heartbeat_prefix

log = structlog.get_logger("relay")

UNREADABLE: Final = "unreadable-message"
"""The aggregate type of what some other program wrote under our prefix. It becomes a dead letter."""

_READ: Final = 1000
_STATUS_SECONDS: Final = 1.0
_WAIT_SECONDS: Final = 0.2
_TAKE_OVER_SECONDS: Final = 10.0
_CLOSE_SECONDS: Final = 10.0
_OVERHEAD_BYTES: Final = 500
_SAY_SECONDS: Final = 60.0
_ENDS: Final = 1000
# Begins no message.
_NEVER: Final = b"\0"
# What a dead letter keeps of something unreadable, which may be of any size: a row takes a million bytes.
_UNREADABLE_BYTES: Final = 990_000

Connect = Callable[[], psycopg.Connection[Any]]
Position = tuple[int, int]
Vouched = tuple[int, int]
"""What a marker vouches for: a timeline, and the position on it up to which its lane is published."""


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """How much is held at most, and after how many seconds of rest a heartbeat is written."""

    max_events: int = 30_000
    max_bytes: int = 64 * 1024 * 1024
    heartbeat_seconds: float = 10.0
    messages: bool = True
    """Whether messages in the WAL are events. Any role of the database can write one."""
    refuses_messages: bool = False
    """Whether that they are not is meant: they become dead letters, also where some were published before."""


class Channel:
    """One lane's part of a session: what was read for it and is not settled yet, in commit order.

    ``resume`` is the last position (commit_lsn, number) that is done with already, and ``repeated`` are the ids of
    events without a row behind it that are. The session's thread puts, the lane's thread does the rest.
    """

    def __init__(self, session: _Session, resume: Position, repeated: Collection[str]) -> None:
        self._session = session
        self._lock = threading.Lock()
        self._waiting: deque[Claim] = deque()
        self._taken: deque[Claim] = deque()
        self._settled: set[At | None] = set()
        self._resume = resume
        self._repeated = frozenset(repeated)
        self.put_count = 0
        self.done_count = 0

    @property
    def running(self) -> bool:
        """Return whether the stream is being read: who read it before does so no more."""
        return self._session.running.is_set()

    @property
    def read_lsn(self) -> int:
        """Up to where the stream was read and shared out."""
        return self._session.read_lsn

    def settled_up_to(self, lsn: int) -> bool:
        """Return whether all lanes have settled all that stands before ``lsn``, and have it found out if unknown."""
        return self._session.told_up_to(lsn)

    def ended(self, timeline: int) -> int | None:
        """Where another timeline ended in the history of this server; None when it is none of that, or goes on."""
        return self._session.ends.get(timeline)

    def check(self) -> None:
        """Raise what ended the session, if it has ended."""
        if self._session.error is not None:
            raise self._session.error

    def wants(self, claim: Claim) -> bool:
        """Return whether the event is new to this lane."""
        assert claim.at is not None
        # A row may bear the id of an event that was published before: a replay does.
        return claim.at[:2] > self._resume and (claim.has_row or claim.event_id not in self._repeated)

    def put(self, claims: Sequence[Claim]) -> None:
        """Add events, in order."""
        with self._lock:
            self._waiting.extend(claims)
            self.put_count += len(claims)

    @property
    def waiting(self) -> bool:
        """Return whether there is something to take."""
        return bool(self._waiting)

    def take(self, limit: int) -> list[Claim]:
        """Return the next events in order, up to ``limit``. Raises what ended the session."""
        with self._lock:
            self.check()
            claims = [self._waiting.popleft() for _ in range(min(limit, len(self._waiting)))]
            self._taken.extend(claims)
            if self._settled:
                claims = [claim for claim in claims if claim.at not in self._settled]
                popped = self._pop_settled()
            else:
                popped = []
        self._session.freed(popped)
        return claims

    def put_back(self, claims: Sequence[Claim]) -> None:
        """Put back the last events that were taken: they come again."""
        with self._lock:
            while claims:
                claim = self._taken.pop()
                self._waiting.appendleft(claim)
                if claim.at == claims[0].at:
                    return

    def rewind(self, resume: Position, repeated: Collection[str]) -> None:
        """Begin again with the first event that is not done with."""
        with self._lock:
            self._resume = max(self._resume, resume)
            self._repeated |= frozenset(repeated)
            self._taken.extend(self._waiting)
            self._settled.update(claim.at for claim in self._taken if not self.wants(claim))
            popped = self._pop_settled()
            self._waiting, self._taken = self._taken, deque()
        self._session.freed(popped)

    def done(self, claims: Sequence[Claim]) -> None:
        """Record that these are settled, durably."""
        if not claims:
            return
        with self._lock:
            taken, count, first, last = self._taken, len(claims), claims[0], claims[-1]
            if not self._settled and len(taken) >= count and (taken[0].at, taken[count - 1].at) == (first.at, last.at):
                popped = [taken.popleft() for _ in range(count)]
                self.done_count += count
            else:
                self._settled.update(claim.at for claim in claims)
                popped = self._pop_settled()
        self._session.freed(popped)

    def _pop_settled(self) -> list[Claim]:
        taken, settled = self._taken, self._settled
        popped = []
        while taken and taken[0].at in settled:
            claim = taken.popleft()
            settled.discard(claim.at)
            popped.append(claim)
        self.done_count += len(popped)
        return popped


class Stream:
    """What a relay that reads the WAL shares among its lanes. Safe to use from their threads.

    ``leases`` are all lanes of the outbox. ``replicate`` makes a replication connection, ``connect`` a plain one.
    A session begins when every lane has joined: by then each has fenced its predecessor. Or when ``begin_without``
    names those that can't be taken over: what is read for them is held until they join, or let go of by the source.
    """

    def __init__(
        self,
        names: SlotNames,
        replicate: Callable[[], Replication],
        connect: Connect,
        leases: Sequence[Lease],
        limits: StreamLimits,
    ) -> None:
        self._new_session: Callable[[], _Session] = lambda: _Session(names, replicate, connect, leases, limits)
        self._lock = threading.Lock()
        self._session: _Session | None = None
        self._closed = False

    def join(
        self, lane: int, resume: Position, repeated: Collection[str], timeline: int, published: Vouched | None = None
    ) -> Channel:
        """Return the lane's channel, from behind ``resume`` on. Raises Unavailable when the stream is closed.

        ``timeline`` is that of the server which the lane asks: it must be the one that is read. ``published`` is
        what the lane's marker says: a server without it is not the one that was read.
        """
        with self._lock:
            if self._closed:
                raise Unavailable("the stream is closed")
            if self._session is None or self._session.error is not None:
                self._session = self._new_session()
            return self._session.join(lane, resume, repeated, timeline, published)

    def begin_without(self, lanes: Collection[int]) -> None:
        """Begin, if nobody but these lanes has not joined. Their channels hold all that the stream gives for them."""
        with self._lock:
            if self._session is not None:
                self._session.begin_without(lanes)

    def channel(self, lane: int) -> Channel | None:
        """Return the lane's channel if the stream is being read, also that of a lane which has not joined."""
        with self._lock:
            session = self._session
        return None if session is None else session.channel(lane)

    def wait(self, lanes: Collection[int], seconds: float) -> bool:
        """Wait until one of the lanes has something to take, or the session has ended; return whether that is so."""
        with self._lock:
            session = self._session
        if session is None:
            return True
        return session.wait(lanes, seconds)

    def absent(self) -> Collection[int]:
        """Return the lanes that have not joined: before they have, nothing is read."""
        with self._lock:
            return () if self._session is None else self._session.absent()

    def close(self) -> None:
        """Confirm to the server what was settled, and release the slot. Safe to call twice."""
        with self._lock:
            self._closed = True
            session = self._session
        if session is not None:
            session.stop()


class _Session:
    """One replication connection's life, in a thread. ``error`` is what ended it."""

    def __init__(
        self,
        names: SlotNames,
        replicate: Callable[[], Replication],
        connect: Connect,
        leases: Sequence[Lease],
        limits: StreamLimits,
    ) -> None:
        self._names = names
        self._replicate = replicate
        self._connect = connect
        self._leases = leases
        self._limits = limits
        self._thread = threading.Thread(target=self._run, name="stream", daemon=True)
        self._channels: dict[int, Channel] = {}
        # Those that have a channel and did not ask for it.
        self._not_joined: set[int] = set()
        self._resume_lsn = 0
        # Asked for when a lane needs it only: the file of a timeline's history may be gone.
        self._asks_history = False
        self.ends: Mapping[int, int] = {}
        self._timeline: int | None = None
        self._stopping = threading.Event()
        self._room = threading.Condition()
        self._arrived = threading.Condition()
        self._held_events = 0
        self._held_bytes = 0
        self._full_since: float | None = None
        self._full_events = 0
        self.running = threading.Event()
        self.error: Exception | None = None

        self._prefix = _message.message_prefix(names.schema)
        self._heartbeat_prefix = heartbeat_prefix(names.schema)
        # The transaction that is being read, and how many of its events have been.
        self._transaction: Begin | None = None
        self._number = 0
        self._columns: _Columns | None = None
        self._lacking: SchemaError | None = None
        self._head = _NEVER
        self._events_oid: int | None = None
        self._opened_xid = 0
        self._other_oids: set[int] = set()
        self._check: Callable[[], None] = lambda: None
        self._snapshot: Callable[[], Snapshot]
        self._described: Snapshot
        self._message_count = 0
        self._messages_seen = False
        self._read_for: dict[int, list[Claim]] = {}
        # Ends of transactions, each with how many events every channel had been given by then.
        self._end: tuple[int, dt.datetime | None] | None = None
        self._ends: deque[tuple[int, dt.datetime | None, tuple[int, ...]]] = deque()
        self._told = 0
        self._asked = 0
        self.read_lsn = 0
        self._moved_at = time.monotonic()

    def join(
        self, lane: int, resume: Position, repeated: Collection[str], timeline: int, published: Vouched | None
    ) -> Channel:
        if timeline != (self._timeline or timeline):
            # After a failover a connection can still hang on the old server. What it has read may be lost.
            self.error = Unavailable(f"the stream is one of timeline {self._timeline}, Postgres is on {timeline} now")
            self._stopping.set()
            raise self.error
        self._timeline = timeline
        if published is not None and published[0] != timeline and not self._asks_history:
            if self._thread.is_alive():
                self.error = Unavailable(
                    f"lane {lane} was published on timeline {published[0]}: the stream begins anew"
                )
                self._stopping.set()
                raise self.error
            self._asks_history = True
        self._resume_lsn = max(self._resume_lsn, resume[0], 0 if published is None else published[1])
        channel = self._channels.get(lane)
        if channel is not None:
            channel.rewind(resume, repeated)
            self._not_joined.discard(lane)
            return channel
        channel = self._channels[lane] = Channel(self, resume, repeated)
        if len(self._channels) == len(self._leases):
            self._thread.start()
        return channel

    def begin_without(self, lanes: Collection[int]) -> None:
        absent = set(self.absent())
        begun = self._thread.ident is not None or self.error is not None
        if begun or not absent or not self._channels or not absent <= set(lanes):
            return
        log.warning("the stream is read without lanes that can't be taken over", lanes=lanes_text(absent))
        for lane in absent:
            self._channels[lane] = Channel(self, (-1, -1), ())
        self._not_joined = absent
        self._thread.start()

    def channel(self, lane: int) -> Channel | None:
        return self._channels.get(lane) if self.running.is_set() else None

    def freed(self, claims: Sequence[Claim]) -> None:
        """Record that these are held no more."""
        if claims:
            with self._room:
                self._held_bytes -= self._size(claims)
                self._held_events -= len(claims)
                self._room.notify_all()

    def absent(self) -> Collection[int]:
        absent = self._not_joined
        return [lease.lane for lease in self._leases if lease.lane not in self._channels or lease.lane in absent]

    def wait(self, lanes: Collection[int], seconds: float) -> bool:
        with self._arrived:
            if not self._anything(lanes):
                self._arrived.wait(seconds)
            return self._anything(lanes)

    def _anything(self, lanes: Collection[int]) -> bool:
        # A lane that is not read now may have something for long.
        channels = [self._channels[lane] for lane in lanes if lane in self._channels]
        return self.error is not None or any(channel.waiting for channel in channels)

    def told_up_to(self, lsn: int) -> bool:
        self._asked = max(self._asked, lsn)
        return self._told >= lsn

    def stop(self) -> None:
        """End, after a last feedback."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        replication: Replication | None = None
        connection: psycopg.Connection[Any] | None = None
        try:
            connection = self._connect()
            slot = Slot(connection, self._names, self._leases)
            replication = self._replicate()
            self._start(slot, replication)
            self.running.set()
            self._stream(slot, replication)
            self.error = Unavailable("the stream is closed")
        except Exception as error:  # noqa: BLE001  the lanes raise it, each in its own thread
            self.error = error
        finally:
            self.running.clear()
            if replication is not None:
                replication.close()
            if connection is not None:
                connection.close()
            with self._arrived:
                self._arrived.notify_all()

    def _start(self, slot: Slot, replication: Replication) -> None:
        """See that the stream is whole, and begin; end whoever reads the slot still. Our lanes were its lanes."""
        self._check, self._snapshot = lambda: slot.check(slot.look()), slot.snapshot
        self._check()
        # Its samples are not text in every encoding; by now it is UTF8.
        slot.check_hash()
        self._check_messages(slot.look())
        deadline = time.monotonic() + _TAKE_OVER_SECONDS
        self._await_all(slot)
        while True:
            state = slot.look()
            slot.check(state)
            slot.check_timeline(state, replication, self._resume_lsn)
            if state.timeline_now is None or state.timeline_now != self._timeline:
                raise Unavailable("the lanes and the stream are connected to different servers: a failover goes on")
            if state.lanes != len(self._leases):
                raise Unavailable(f"the outbox has {state.lanes} lanes now, and not {len(self._leases)}")
            if self._asks_history:
                self.ends = {switch.timeline: switch.lsn for switch in replication.switches(state.timeline_now)}
            self._told = state.flushed_lsn or 0
            self._events_oid = state.events_oid
            self._opened_xid = state.opened_xid or 0
            if state.active_pid is None:
                try:
                    replication.start(self._names.slot, self._names.publication)
                except SlotInUse:
                    if time.monotonic() > deadline or self._stopping.is_set():
                        raise
                else:
                    break
            elif time.monotonic() > deadline or self._stopping.is_set():
                raise SlotInUse(f"slot {self._names.slot!r} is read by process {state.active_pid} of the server")
            failpoint("stream.taking_over")
            slot.terminate_reader()
            self._stopping.wait(0.02)
        failpoint("stream.started")

    def _check_messages(self, state: SlotState) -> None:
        """Raise ConfigurationError where messages were published before, and would be dead letters from now on."""
        if self._limits.messages or self._limits.refuses_messages or state.message_at is None:
            return
        raise ConfigurationError(
            "this outbox has events without a row (transport='message'; the last was published at "
            f"{state.message_at.isoformat(timespec='seconds')}), and OUTBOX_WAL__MESSAGES is not set: true publishes "
            "them, false makes dead letters of them"
        )

    def _await_all(self, slot: Slot) -> None:
        """After a failover, wait for the lanes that have not joined.

        Only their markers know up to where they were published on the old timeline. Once the new one is noted, nothing
        compares it with what is published any more.
        """
        if not self._not_joined or slot.look().timeline == self._timeline:
            return
        log.warning("after a failover the stream is read when all lanes have joined", absent=lanes_text(self.absent()))
        while self._not_joined:
            if self._stopping.wait(_WAIT_SECONDS):
                raise Unavailable("the stream is closed")

    def _stream(self, slot: Slot, replication: Replication) -> None:
        replication.feedback(self._told)
        due = time.monotonic() + _STATUS_SECONDS
        while not self._stopping.is_set():
            now = time.monotonic()
            if now >= due or replication.reply_wanted:
                due = now + _STATUS_SECONDS
                self._report(slot, replication)
                self._beat(slot, now)
            if self._has_room() and not self._read(replication):
                replication.wait(min(max(due - time.monotonic(), 0.0), _WAIT_SECONDS))
        self._report(slot, replication)

    def _has_room(self) -> bool:
        with self._room:
            if self._held_events < self._limits.max_events and self._held_bytes < self._limits.max_bytes:
                self._full_since = None
                return True
            self._room.wait(_WAIT_SECONDS)
        self._say_what_is_held()
        return False

    def _say_what_is_held(self) -> None:
        """Log which lanes keep the others waiting, if nothing moves: what is settled elsewhere makes no room then."""
        now = time.monotonic()
        if self._full_since is None or self._held_events != self._full_events:
            self._full_since, self._full_events = now, self._held_events
        elif now - self._full_since >= _SAY_SECONDS:
            self._full_since = now
            lanes = [lane for lane, channel in self._channels.items() if channel.put_count > channel.done_count]
            log.warning(
                "the stream waits: it holds as many events as it may, and none is settled",
                lanes=lanes_text(lanes),
                events=self._held_events,
            )

    # Reading

    def _read(self, replication: Replication) -> bool:
        """Read what has arrived and hand it on; say whether there was anything."""
        messages = replication.read(_READ)
        for data in messages:
            # In one loop: nearly all of a stream's work is here.
            named = two_numbers(data, self._head)
            if named is None:
                self._take(data)
            else:
                self._add(_named(named[0], self._next()), named[1])
        self._hand_on()
        self.read_lsn = replication.position
        return bool(messages)

    def _take(self, data: bytes) -> None:
        match decode(data):
            case Insert(relation, new):
                self._insert(relation, new)
            case Begin() as begin:
                self._transaction, self._number = begin, 0
            case Commit(end_lsn=end, committed_at=at):
                self._transaction, self._end = None, (end, at)
            case Message() as message:
                self._message(message)
            case Relation() as relation_:
                self._relation(relation_)
            case _:
                # Types and origins say nothing about events, and the publication has inserts only.
                pass

    def _relation(self, relation: Relation) -> None:
        if relation.oid != self._events_oid:
            # Somebody has added a table to the publication. Names say nothing: these are of the time of writing.
            self._other_oids.add(relation.oid)
            return
        # The server describes the table again when the publication was changed: what was written meanwhile may be
        # missing, and what comes now must not pass it by.
        self._check()
        self._columns, self._lacking, self._head = None, None, _NEVER
        try:
            self._columns = _Columns(relation)
        except SchemaError as error:
            self._lacking, self._described = error, self._snapshot()
        else:
            self._head = insert_head(relation.oid, 2) if self._columns.two_numbers else _NEVER

    def _insert(self, relation: int, new: Sequence[Value]) -> None:
        if relation in self._other_oids:
            return
        if self._lacking is not None and self._transaction is not None:
            # Written before the slot was set up or the publication repaired: no lane streams before it has read all
            # such rows from the table.
            if self._described.full(self._transaction.xid) < self._opened_xid:
                return
            raise self._lacking
        if relation != self._events_oid or self._columns is None:
            raise SchemaError("the stream has a row of a table that it did not describe")
        claim, lane = self._columns.claim(new, self._next(), len(self._leases))
        self._add(claim, lane)

    def _message(self, message: Message) -> None:
        if not message.transactional and message.prefix in {self._heartbeat_prefix, self._prefix}:
            # What comes next begins here.
            self._end = message.lsn, None
        if message.prefix != self._prefix:
            return
        if message.transactional:
            at = self._next()
            assert self._transaction is not None
            committed = self._transaction.committed_at.isoformat(timespec="microseconds").replace("+00:00", "Z")
        else:
            # The last byte of its record: the next one may be a transaction's commit.
            at, committed = At(message.lsn - 1, 1, NO_TRANSACTION), ""
        self._message_count += 1
        number = -self._message_count
        try:
            if not self._limits.messages:
                raise MessageError("is an event's message, and this relay takes none: see OUTBOX_WAL__MESSAGES")
            if not message.transactional:
                raise MessageError("was written with transactional = false: its transaction may have been rolled back")
            event = _message.decode(message.content)
        except MessageError as error:
            place, kept = f"{lsn_text(at.commit_lsn)}/{at.number}", message.content[:_UNREADABLE_BYTES]
            claim = Claim(number, str(uuid7()), UNREADABLE, place, str(error)[:200], committed, kept, None, at)
        else:
            self._messages_seen = True
            claim = Claim(number, *event[:4], committed, event.payload, event.headers, at)
        self._add(claim, lane_of(claim.aggregate_type, claim.aggregate_id, len(self._leases)))

    def _next(self) -> At:
        if self._transaction is None:
            raise SchemaError("the stream has an event outside of any transaction")
        self._number += 1
        return At(self._transaction.final_lsn, self._number, self._transaction.xid)

    def _add(self, claim: Claim, lane: int) -> None:
        if self._channels[lane].wants(claim):
            self._read_for.setdefault(lane, []).append(claim)

    def _hand_on(self) -> None:
        for lane, claims in self._read_for.items():
            with self._room:
                self._held_events += len(claims)
                self._held_bytes += self._size(claims)
            self._channels[lane].put(claims)
        if self._read_for:
            with self._arrived:
                self._arrived.notify_all()
        self._read_for = {}
        if self._end is not None:
            # The last of the ends that were read at once will do. Events of the transaction behind it are counted
            # with it, so it may be told a little later than it could.
            counts = tuple(channel.put_count for channel in self._channels.values())
            if len(self._ends) >= _ENDS:
                # One lane is behind and the others are not. To tell later ends alone loses nothing.
                self._ends.pop()
            self._ends.append((*self._end, counts))
            self._end = None

    def _size(self, claims: Sequence[Claim]) -> int:
        # A row's content is not here; what has no row is whole.
        size = len(claims) * _OVERHEAD_BYTES
        if self._message_count:
            size += sum(len(claim.value) for claim in claims if claim.value is not None)
        return size

    # Feedback

    def _report(self, slot: Slot, replication: Replication) -> None:
        """Record up to where every lane has settled everything: first in the table, then on the server."""
        flushed, at = self._told, None
        done = tuple(channel.done_count for channel in self._channels.values())
        while self._ends and all(map(int.__ge__, done, self._ends[0][2])):
            flushed, at, _ = self._ends.popleft()
        if flushed > self._told:
            slot.note(flushed, at, messages=self._messages_seen)
            failpoint("stream.noted")
            self._messages_seen = False
            self._told = flushed
            self._moved_at = time.monotonic()
        else:
            slot.hold()
        replication.feedback(self._told)
        failpoint("stream.told")

    def _beat(self, slot: Slot, now: float) -> None:
        if not self._held_events and now - self._moved_at >= self._limits.heartbeat_seconds:
            self._moved_at = now
            slot.heartbeat(self._told)
        elif self._told < self._asked <= self.read_lsn and not self._ends:
            # A lane waits to know, and nothing else would move the position.
            slot.heartbeat(0)


class _Columns:
    """Where the columns of ``events`` are in a row of the stream. Raises SchemaError when one is not."""

    def __init__(self, relation: Relation) -> None:
        places = {column.name: number for number, column in enumerate(relation.columns)}
        # Generated columns are sent from Postgres 18 on.
        needed = ("id", "lane") if "lane" in places else ("id", "aggregate_type", "aggregate_id")
        for name in needed:
            if name not in places:
                raise SchemaError(
                    f"{relation.schema}.{relation.name} has no column {name!r} in the stream: the table was altered; "
                    f"see `outbox db check`; when it is as it was, {REPAIR}"
                )
        self._id, *self._key = (places[name] for name in needed)
        self.two_numbers = [column.name for column in relation.columns] == ["id", "lane"]
        """Whether a row is its id and its lane, and nothing else."""

    def claim(self, row: Sequence[Value], at: At, lanes: int) -> tuple[Claim, int]:
        """Return an event that has its row's id and its place alone, and its lane: the row has the rest."""
        values: Sequence[Any] = row
        if len(self._key) == 1:
            lane = int(values[self._key[0]])
        else:
            kind, key = self._key
            lane = lane_of(values[kind].decode(), values[key].decode(), lanes)
        return _named(int(values[self._id]), at), lane


def _named(id_: int, at: At) -> Claim:
    return Claim(id_, "", "", "", "", "", None, None, at)
