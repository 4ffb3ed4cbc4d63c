"""A lane's channel against a model: what is put comes once, in order, until it is done with; nothing stays."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import structlog
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from relay.core.lease import Lease
from relay.core.ports import Unavailable, WalPosition
from relay.wal import session as stream
from relay.wal.channel import Channel, StreamEvent
from relay.wal.session import StreamSession
from relay.wal.slot import SlotNames


class Session:
    """What a channel sees of its session."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.running = threading.Event()
        self.held = 0

    def freed(self, count: int) -> None:
        self.held -= count


def event(commit: int, number: int) -> StreamEvent:
    return StreamEvent(commit * 10 + number, WalPosition(commit, number, 1))


def positions(events: list[StreamEvent]) -> list[WalPosition]:
    return [each.at for each in events]


class ChannelMachine(RuleBasedStateMachine):
    """One lane as StreamSource uses a channel: takes, gives back, settles in any order, rewinds."""

    def __init__(self) -> None:
        super().__init__()
        self.session = Session()
        self.channel = Channel(self.session)  # type: ignore[arg-type]
        self.commit = 0
        self.put: list[StreamEvent] = []
        # The model: those not done with, in order; so many of the first of them are taken.
        self.open: list[StreamEvent] = []
        self.taken: list[StreamEvent] = []

    @rule(sizes=st.lists(st.integers(1, 3), min_size=1, max_size=4))
    def transactions_arrive(self, sizes: list[int]) -> None:
        events = []
        for size in sizes:
            self.commit += 1
            events += [event(self.commit, number + 1) for number in range(size)]
        self.session.held += len(events)
        self.channel.put(events)
        self.put += events
        self.open += events

    def waiting(self) -> list[StreamEvent]:
        taken = {each.at for each in self.taken}
        return [each for each in self.open if each.at not in taken]

    @rule(limit=st.integers(1, 8))
    def take(self, limit: int) -> None:
        waiting = self.waiting()
        events = self.channel.take(limit)
        assert len(events) <= limit
        # Never past one that waits. Those settled out of order count within the limit, and are not given.
        assert events == waiting[: len(events)]
        self.taken += events

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def put_back(self, data: Any) -> None:
        first = data.draw(st.integers(0, len(self.taken) - 1))
        self.channel.put_back(self.taken[first:])
        del self.taken[first:]

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def the_first_are_done(self, data: Any) -> None:
        count = data.draw(st.integers(1, len(self.taken)))
        self._done(self.taken[:count])

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def some_are_done(self, data: Any) -> None:
        self._done([each for each in self.taken if data.draw(st.booleans())])

    @precondition(lambda self: self.put)
    @rule(data=st.data())
    def what_is_done_is_done_once_more(self, data: Any) -> None:
        """A turn settles all its lanes, and the one with it settles again what a suspect's lane did not hold up."""
        still_open = {each.at for each in self.open}
        self.channel.done([each.at for each in self.put if each.at not in still_open and data.draw(st.booleans())])

    def _done(self, events: list[StreamEvent]) -> None:
        self.channel.done(positions(events))
        gone = {each.at for each in events}
        self.taken = [each for each in self.taken if each.at not in gone]
        self.open = [each for each in self.open if each.at not in gone]

    @rule()
    def rewind(self) -> None:
        self.channel.rewind()
        self.taken = []

    @invariant()
    def what_is_not_done_is_held(self) -> None:
        done = self.channel.done_count
        assert self.channel.put_count == len(self.put)
        # Up to the first that is not done; feedback must not go by more than that.
        first = self.put.index(self.open[0]) if self.open else len(self.put)
        assert done <= first
        assert self.session.held == len(self.put) - done
        assert len(self.channel._settled) <= self.session.held

    def teardown(self) -> None:
        self.rewind()
        seen = []
        while self.open:
            events = self.channel.take(5)
            self.taken += events
            seen += events
            self._done(events)
        # What was settled out of order before, and is last, goes with the next look.
        assert self.channel.take(len(self.put) + 1) == []
        assert seen == sorted(seen, key=lambda each: each.at)
        assert (self.session.held, self.channel._settled) == (0, set())
        assert self.channel.done_count == self.channel.put_count == len(self.put)
        assert not self.channel._taken
        assert not self.channel._waiting


TestChannel = ChannelMachine.TestCase
TestChannel.settings = settings(max_examples=75, stateful_step_count=30, deadline=None)


def test_what_ended_the_session_comes_before_what_waits():
    session = Session()
    channel = Channel(session)  # type: ignore[arg-type]
    channel.put([event(1, 1)])
    channel.check()
    session.error = Unavailable("gone")
    for call in (channel.check, lambda: channel.take(1)):
        with pytest.raises(Unavailable, match="gone"):
            call()


class Replicating:
    """A replication connection that gives nothing and ends when told to."""

    position = 0
    reply_wanted = False


def session_of(lanes: int) -> Any:
    leases = [Lease(lane, 1, 60.0, 0.0) for lane in range(lanes)]
    names = SlotNames("outbox", "slot", "publication")
    session = StreamSession(names, Replicating, None, leases)  # type: ignore[arg-type]
    # It is not to start: what it reads is put in by hand.
    session._thread = threading.Thread(target=lambda: None)
    for lane in range(lanes):
        session.join(lane, 0, 1)
    return session


def hand_on(session: Any, lane: int, events: list[StreamEvent]) -> None:
    session._events.new = {lane: events}
    session._hand_on()


def test_a_wait_is_woken_by_what_comes_for_its_lanes_and_by_the_end():
    session = session_of(2)
    threading.Timer(0.05, hand_on, [session, 1, [event(1, 1)]]).start()
    assert session.wait([0, 1], 60)
    # What waits for a lane that nobody reads now is no reason to read the others again and again.
    assert not session.wait([0], 0.01)

    def end() -> None:
        session.error = Unavailable("gone")
        with session._arrived:
            session._arrived.notify_all()

    threading.Timer(0.05, end).start()
    assert session.wait([0], 60)


def test_the_lanes_that_the_stream_waits_for_are_named():
    session = session_of(2)
    assert session.not_joined() == []
    session._leases = [*session._leases, Lease(7, 1, 60.0, 0.0)]
    assert session.not_joined() == [7]


def test_lanes_that_settle_nothing_while_the_stream_is_full_are_named(monkeypatch):
    monkeypatch.setattr(stream, "_WAIT_SECONDS", 0.0)
    monkeypatch.setattr(stream, "_LOG_SECONDS", 0.0)
    session = session_of(3)
    session._max_events = 2
    hand_on(session, 0, [event(1, 1), event(1, 2)])
    hand_on(session, 2, [event(2, 1)])
    with structlog.testing.capture_logs() as said:
        assert not session._has_room()
        assert not session._has_room()
    assert [(entry["log_level"], entry["lanes"], entry["events"]) for entry in said] == [("warning", "lanes 0, 2", 3)]
    channel = session._channels[0]
    channel.done(positions(channel.take(2)))
    assert session._has_room()


def test_a_lane_of_another_timeline_ends_the_session_with_that_reason(monkeypatch):
    session = session_of(1)
    with pytest.raises(Unavailable, match="of timeline 1, Postgres is on 2"):
        session.join(0, 0, 2)
    # What its thread does then: the other lanes see why it was closed.
    for step in ("_connect", "_replicate", "_start", "_stream"):
        monkeypatch.setattr(session, step, lambda *_: None)
    monkeypatch.setattr(stream, "Slot", lambda *_: None)
    session._run()
    assert "of timeline 1" in str(session.error)
