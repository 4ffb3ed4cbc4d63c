"""The stream of events from the WAL: one thread reads one slot, and distributes events to the lanes in commit order.

A relay that reads the WAL holds all lanes or none. Each lane has a Channel, which holds its events until they are
settled; the slot is advanced only up to the position before which every lane has settled everything. The number of held
events is bounded: when the lanes are behind, reading stops, and feedback goes on.

| what happens                            | what follows                                                            |
|-----------------------------------------|-------------------------------------------------------------------------|
| killed before feedback                  | the slot sends the same again; events without their row are skipped     |
| killed between checkpoint and feedback  | the same: the checkpoint (``streams.flushed_lsn``) is only ever ahead   |
| the connection breaks, or Postgres dies | the session ends and drops what it holds; lanes settle, and join again  |
| a lane can't be taken over              | the others are streamed without it. Its events are dropped, because     |
|                                         | their rows are in the table                                             |
| Kafka is unavailable                    | channels fill up, reading stops, feedback goes on, the WAL is kept      |
| an old relay still reads the slot       | its lanes are lost to it, with exactly-once it is fenced in Kafka; then |
|                                         | that one walsender is ended                                             |
| the slot is above the checkpoint        | stop: it was advanced or recreated; events could be missed              |
| the slot is gone, or lost its WAL       | stop; a relay makes a new one (operations/wal_setup.py), lanes read the |
|                                         | table; where it must not, `outbox cdc setup --repair` does the same     |
| the publication was changed             | stop: what was not published meanwhile is missing. The repair makes     |
|                                         | both anew, and lanes read the table                                     |
| the server's timeline diverged before   | stop: this server does not have what was published                      |
| our position                            |                                                                         |

Feedback never uses the positions of keepalives. So an idle outbox would retain the WAL of all other writers: when no
event is in flight, a heartbeat is written (``pg_logical_emit_message``), and its arrival advances the position.
"""

from __future__ import annotations

import datetime as dt
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final

import psycopg
import structlog

from outbox._clients.counting import counted
from relay.core.lease import Lease
from relay.core.ports import Unavailable
from relay.failpoints import failpoint
from relay.settle.settlement import lanes_text
from relay.wal.channel import Channel
from relay.wal.events import EventReader
from relay.wal.replication import Replication, SlotInUse
from relay.wal.slot import Slot, SlotNames

log = structlog.get_logger("relay")

_READ: Final = 1000
_STATUS_SECONDS: Final = 1.0
_WAIT_SECONDS: Final = 0.2
_TAKE_OVER_SECONDS: Final = 10.0
_CLOSE_SECONDS: Final = 10.0
_LOG_SECONDS: Final = 60.0
_ENDS: Final = 1000


class Stream:
    """The stream that a relay reads from the WAL while it holds all lanes: one session after the other. Thread-safe."""

    def __init__(self, new_session: Callable[[Sequence[Lease]], StreamSession]) -> None:
        self._new_session = new_session
        self._lock = threading.Lock()
        self._leases: Sequence[Lease] = ()
        self._session: StreamSession | None = None

    def begin(self, leases: Sequence[Lease]) -> None:
        """Let lanes join: these are the leases of all lanes."""
        self.end()
        with self._lock:
            self._leases = leases

    def join(self, lane: int, published_lsn: int, timeline: int) -> Channel:
        """Return the lane's channel, with its unsettled events. Raises Unavailable after ``end``.

        ``timeline`` is that of the server that the lane is connected to: it must be that of the stream.
        ``published_lsn`` is the position up to which the lane or its marker has used the WAL: a server without it is
        not the one that was read.
        """
        with self._lock:
            if not self._leases:
                raise Unavailable("the stream is closed")
            if self._session is None or self._session.error is not None:
                self._session = self._new_session(self._leases)
            return self._session.join(lane, published_lsn, timeline)

    @property
    def session(self) -> StreamSession | None:
        """The session that lanes have joined last; None before the first, and after ``end``."""
        with self._lock:
            return self._session

    def end(self) -> None:
        """Send the last feedback, and release the slot. Safe to call twice."""
        with self._lock:
            self._leases, session, self._session = (), self._session, None
        if session is not None:
            session.stop()


class StreamSession:
    """The lifetime of one replication connection, in a thread. ``error`` is what ended it.

    ``leases`` are all lanes of the outbox. ``replicate`` opens a replication connection, ``connect`` a plain one.
    Reading starts when every lane has joined, and so fenced its predecessor, or when ``begin_without`` names those that
    can't be taken over: their events are held until they join, or dropped by the source. At most ``max_events`` are
    held; a heartbeat is written after ``heartbeat_seconds`` without one.
    """

    def __init__(
        self,
        names: SlotNames,
        replicate: Callable[[], Replication],
        connect: Callable[[], psycopg.Connection[Any]],
        leases: Sequence[Lease],
        max_events: int = 30_000,
        heartbeat_seconds: float = 10.0,
    ) -> None:
        self._names = names
        self._replicate = replicate
        self._connect = connect
        self._leases = leases
        self._max_events = max_events
        self._heartbeat_seconds = heartbeat_seconds
        self._thread = threading.Thread(target=self._run, name="stream", daemon=True)
        self._channels: dict[int, Channel] = {}
        # Lanes that have a channel but have not joined.
        self._begun_without: set[int] = set()
        self._published_lsn = 0
        self._timeline: int | None = None
        self._stopping = threading.Event()
        self._room = threading.Condition()
        self._arrived = threading.Condition()
        self._buffered_events = 0
        self._full_since: float | None = None
        self._full_events = 0
        self.running = threading.Event()
        """Set while this reads the stream: no other reader does."""
        self.error: Exception | None = None

        self._events = EventReader(names.schema, len(leases))
        # Ends of transactions, each with the number of events that every channel had received by then.
        self._ends: deque[tuple[int, dt.datetime | None, tuple[int, ...]]] = deque()
        self._flushed_lsn = 0
        self._requested_lsn = 0
        self.read_lsn = 0
        """The position up to which the stream was read and distributed to the channels."""
        self._moved_at = time.monotonic()

    def join(self, lane: int, published_lsn: int, timeline: int) -> Channel:
        if self._timeline not in {None, timeline}:
            # After a failover a connection can still be open to the old server, whose data may be lost.
            self.error = Unavailable(f"the stream is one of timeline {self._timeline}, Postgres is on {timeline} now")
            self._stopping.set()
            raise self.error
        self._timeline = timeline
        self._published_lsn = max(self._published_lsn, published_lsn)
        channel = self._channels.get(lane)
        if channel is not None:
            channel.rewind()
            self._begun_without.discard(lane)
            return channel
        channel = self._channels[lane] = Channel(self)
        if len(self._channels) == len(self._leases):
            self._thread.start()
        return channel

    def begin_without(self, lanes: Collection[int]) -> None:
        """Start, if all other lanes have joined. The source drops what comes for these lanes (``leave_failing``)."""
        missing = set(self.not_joined())
        begun = self._thread.ident is not None or self.error is not None
        if begun or not missing or not self._channels or not missing <= set(lanes):
            return
        log.warning("the stream is read without lanes that can't be taken over", lanes=lanes_text(missing))
        for lane in missing:
            self._channels[lane] = Channel(self)
        self._begun_without = missing
        self._thread.start()

    def channel(self, lane: int) -> Channel | None:
        """Return the lane's channel if the stream is being read, even if the lane has not joined."""
        return self._channels.get(lane) if self.running.is_set() else None

    def freed(self, count: int) -> None:
        if count:
            with self._room:
                self._buffered_events -= count
                self._room.notify_all()

    def not_joined(self) -> Collection[int]:
        """Return the lanes that have not joined. The stream starts when there are none, or by ``begin_without``."""
        without = self._begun_without
        return [lease.lane for lease in self._leases if lease.lane not in self._channels or lease.lane in without]

    def wait(self, lanes: Collection[int], seconds: float) -> bool:
        """Wait until one of the lanes has events, or the session has ended. Returns whether that is so."""
        with self._arrived:
            if not self._anything(lanes):
                self._arrived.wait(seconds)
            return self._anything(lanes)

    def _anything(self, lanes: Collection[int]) -> bool:
        # Only these lanes: one that is not being read may have events for long.
        channels = [self._channels[lane] for lane in lanes if lane in self._channels]
        return self.error is not None or any(channel.waiting for channel in channels)

    def has_flushed(self, lsn: int) -> bool:
        """Return whether all lanes are known to have settled everything before ``lsn``; see ``request_flush``."""
        return self._flushed_lsn >= lsn

    def request_flush(self, lsn: int) -> None:
        """Make reports advance to ``lsn``, though nothing else comes, once all lanes have settled everything before."""
        self._requested_lsn = max(self._requested_lsn, lsn)

    def stop(self) -> None:
        """End the session after a last feedback."""
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
            # ``join`` may have closed it, with a reason.
            self.error = self.error or Unavailable("the stream is closed")
        except Exception as error:  # noqa: BLE001  the lanes raise it, each in its own thread
            self.error = self.error or error
        finally:
            self.running.clear()
            if replication is not None:
                replication.close()
            if connection is not None:
                connection.close()
            with self._arrived:
                self._arrived.notify_all()

    def _start(self, slot: Slot, replication: Replication) -> None:
        """Check the stream, and start reading; end a former reader of the slot, whose lanes are ours now."""
        slot.check(slot.look())
        # After the check that the encoding is UTF8: the samples are not valid in every encoding.
        slot.check_hash()
        deadline = time.monotonic() + _TAKE_OVER_SECONDS
        self._await_all(slot)
        while True:
            state = slot.look()
            slot.check(state)
            slot.check_timeline(state, replication, self._published_lsn)
            if state.timeline_now is None or state.timeline_now != self._timeline:
                raise Unavailable("the lanes and the stream are connected to different servers: a failover goes on")
            if state.lane_count != len(self._leases):
                found = counted(state.lane_count, "lane")
                raise Unavailable(f"the outbox has {found} now, and not {len(self._leases)}")
            self._flushed_lsn = state.flushed_lsn or 0
            self._events.begin(state.events_oid, lambda: slot.check(slot.look()))
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

    def _await_all(self, slot: Slot) -> None:
        """After a failover, wait for the lanes that have not joined.

        Only their markers have the positions up to which they were published on the old timeline. Once the new timeline
        is recorded, it is no longer compared with them.
        """
        if not self._begun_without or slot.look().timeline == self._timeline:
            return
        missing = lanes_text(self.not_joined())
        log.warning("after a failover the stream is read when all lanes have joined", absent=missing)
        while self._begun_without:
            if self._stopping.wait(_WAIT_SECONDS):
                raise Unavailable("the stream is closed")

    def _stream(self, slot: Slot, replication: Replication) -> None:
        replication.feedback(self._flushed_lsn)
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
            if self._buffered_events < self._max_events:
                self._full_since = None
                return True
            self._room.wait(_WAIT_SECONDS)
        self._log_full()
        return False

    def _log_full(self) -> None:
        """Log the lanes that delay the others, if nothing is settled for long."""
        now = time.monotonic()
        if self._full_since is None or self._buffered_events != self._full_events:
            self._full_since, self._full_events = now, self._buffered_events
        elif now - self._full_since >= _LOG_SECONDS:
            self._full_since = now
            lanes = [lane for lane, channel in self._channels.items() if channel.put_count > channel.done_count]
            log.warning(
                "the stream waits: it holds as many events as it may, and none is settled",
                lanes=lanes_text(lanes),
                events=self._buffered_events,
            )

    # Reading

    def _read(self, replication: Replication) -> bool:
        messages = replication.read(_READ)
        self._events.read(messages)
        self._hand_on()
        self.read_lsn = replication.position
        return bool(messages)

    def _hand_on(self) -> None:
        new = dict(self._events.new)
        self._events.new.clear()
        for lane, events in new.items():
            with self._room:
                self._buffered_events += len(events)
            self._channels[lane].put(events)
        if new:
            with self._arrived:
                self._arrived.notify_all()
        end, self._events.end = self._events.end, None
        if end is not None:
            # Of the ends that were read at once, the last is enough. It includes the events of the transaction behind
            # it, so it may be confirmed a little later than possible.
            # All channels exist when the thread starts, so their order is fixed.
            counts = tuple(channel.put_count for channel in self._channels.values())
            if len(self._ends) >= _ENDS:
                # One lane is far behind the others. Confirming only later ends loses nothing.
                self._ends.pop()
            self._ends.append((*end, counts))

    # Feedback

    def _report(self, slot: Slot, replication: Replication) -> None:
        """Record the position up to which every lane has settled everything: first in the table, then on the server."""
        flushed, at = self._flushed_lsn, None
        done = tuple(channel.done_count for channel in self._channels.values())
        while self._ends and all(map(int.__ge__, done, self._ends[0][2])):
            flushed, at, _ = self._ends.popleft()
        if flushed > self._flushed_lsn:
            slot.write_checkpoint(flushed, at)
            failpoint("stream.noted")
            self._flushed_lsn = flushed
            self._moved_at = time.monotonic()
        else:
            slot.require_lanes()
        replication.feedback(self._flushed_lsn)
        failpoint("stream.confirmed")

    def _beat(self, slot: Slot, now: float) -> None:
        if not self._buffered_events and now - self._moved_at >= self._heartbeat_seconds:
            self._moved_at = now
            slot.heartbeat(after_lsn=self._flushed_lsn)
        elif self._flushed_lsn < self._requested_lsn <= self.read_lsn and not self._ends:
            # A lane waits for the answer, and nothing else would advance the position.
            slot.heartbeat()
