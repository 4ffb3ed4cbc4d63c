"""Several lanes of one stream: what one of them meets does not hold up the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import psycopg
import pytest
from stream_bench import Outboxed, Producer, both, confirmed_flush, now_at, outboxed
from support import backlog, wait_until, write

from outbox import Event, Outbox
from outbox._clients.search_path import PinnedConnection
from outbox.errors import OutboxError
from relay.core import lane as core_lane
from relay.core.ports import Batches, BatchRefused, LaneLocked, LaneLost, StandingError, Unavailable
from relay.settle.settlement import RunningStatement, Settlement
from relay.wal import session
from relay.wal import source as wal_source
from relay.wal.lane import CatchingUp, StreamLane, StreamLanes
from relay.wal.lane_hash import lane_of
from relay.wal.source import StreamSource

__all__ = ["outboxed"]


def keys_of_lanes() -> tuple[str, str]:
    """Keys of lane 0 and of lane 1, of two."""
    keys = [next(key for key in "abcdefgh" if lane_of("Order", key, 2) == lane) for lane in (0, 1)]
    return keys[0], keys[1]


def test_a_lane_with_a_backlog_does_not_hold_up_the_others(outboxed):
    """What the stream gives for it is in its table: nothing is kept for it until it has nearly caught up."""
    box = outboxed(2)
    slow, quick = keys_of_lanes()
    box.add(*(f"{slow}{number:04}" for number in range(1500)))
    box.relay(max_events=20, batch=10)

    def turned(most: int) -> bool:
        # However long the stream takes, the slow lane's table is not nearly read.
        if len(box.kafka.names(slow)) < most:
            box.turn(0)
        return box.turned(1)

    wait_until(lambda: turned(500) and box.streaming(1), what="a lane to stream")
    more = [f"{slow}{number:04}" for number in range(1500, 1560)]
    for number in range(30):
        box.add(*more[2 * number : 2 * number + 2], f"{quick}{number:02}")

    assert len(box.kafka.names(slow)) < 1000
    wait_until(lambda: turned(1000) and len(box.kafka.names(quick)) == 30, 20, "the other lane's events")
    box.until(lambda: len(box.kafka.published) == 1590, "all")
    box.streams()
    assert box.kafka.names(slow) == sorted(box.kafka.names(slow))


def test_a_session_that_ends_while_a_lane_catches_up_begins_anew_at_once(outboxed):
    """A turn has three rows of its table, which are large, and the others wait for it: they are 40."""
    box = outboxed(2)
    slow, quick = keys_of_lanes()
    box.relay(turn_bytes=100_000)
    box.streams()
    box.kafka.bad = {slow}
    write(box.url, [Event("Order", slow, f"{slow}{number}", b"x" * 40_000) for number in range(10, 50)])
    box.until(lambda: box.failed() == [slow] and not box.streaming(0), "lane 0 to be in the table")
    box.kafka.bad = set()
    box.hurry()
    lane = box.source._lanes[0]
    wait_until(lambda: box.turned(0) and isinstance(lane.state, CatchingUp), what="lane 0 to catch up")
    box.admin.execute(
        "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = %s", (box.names.slot,)
    )
    wait_until(lambda: box.session().error is not None, what="the session's end")
    box.add(f"{quick}1")
    before = len(box.kafka.names(slow))
    assert before < 20
    # The next session begins when both have joined it, and this one alone is asked to.
    for _ in range(4):
        box.turn(0)
    wait_until(lambda: box.turned(1) and box.kafka.names(quick), what="the other lane's event")
    assert len(box.kafka.names(slow)) - before < 20
    box.until(lambda: len(box.kafka.published) == 41, "all")
    assert box.kafka.names(slow) == [f"{slow}{number}" for number in range(10, 50)]


def test_a_turn_takes_few_statements_however_many_lanes_leave_the_table_or_meet_events_again(outboxed, monkeypatch):
    """With some for each, hundreds of lanes would stand still for seconds after every failure."""
    box = outboxed(64)
    asked = 0
    execute = PinnedConnection.execute

    def counting(self: PinnedConnection, query: Any, *rest: Any, **options: Any) -> Any:
        nonlocal asked
        asked += any(query is each for source in box.sources for each in vars(source._queries).values())
        return execute(self, query, *rest, **options)

    def most_asked(condition: Callable[[], object]) -> int:
        counts: list[int] = []

        def turned() -> object:
            nonlocal asked
            asked = 0
            box.turn()
            counts.append(asked)
            return condition()

        wait_until(turned, 60, "the lanes")
        return max(counts)

    monkeypatch.setattr(PinnedConnection, "execute", counting)
    box.relay()
    assert 0 < most_asked(box.streaming) < 10
    # There is no last feedback, so that the next relay reads all of them again.
    monkeypatch.setattr(session.StreamSession, "_report", lambda *_: None)
    names = [f"{chr(0x100 + number)}1" for number in range(200)]
    box.add(*names)
    assert most_asked(lambda: len(box.kafka.names()) == len(names)) < 10
    box.turns(2)
    box.relay()

    def met_again() -> bool:
        channels = box.session()._channels.values()
        return sum(channel.done_count for channel in channels) >= len(names) and box.held_back() == 0

    assert 0 < most_asked(met_again) < 10
    assert len(box.kafka.names()) == len(names)


A_FAILURE_OF_LANE_0 = (
    "INSERT INTO outbox.failures VALUES "
    "(0, 1, gen_random_uuid(), 'Order', %s, true, 1, 'bad', now(), now(), 'infinity')"
)


def lose_lane_0(box: Outboxed) -> None:
    box.admin.execute("UPDATE outbox.lanes SET epoch = epoch + 1 WHERE lane = 0")


@pytest.mark.parametrize("where", ["in the stream", "on the way out of it", "in the table", "on the way into it"])
def test_a_lane_that_is_lost_is_the_only_one_to_stop(outboxed, monkeypatch, where):
    """Wherever it turns out."""
    monkeypatch.setattr(wal_source, "_LOOK_SECONDS", 0.0)
    box = outboxed(2)
    slow, quick = keys_of_lanes()
    box.relay()
    box.streams()
    # It would notice the loss as well, and end for all lanes.
    monkeypatch.setattr(session.StreamSession, "_report", lambda *_: None)
    match where:
        case "in the stream":
            lose_lane_0(box)
            box.add(f"{slow}1")
        case "on the way out of it":
            # A failure makes it leave, and nothing else is there to find the loss with.
            with box.admin.transaction():
                box.admin.execute(A_FAILURE_OF_LANE_0, (slow,))
                lose_lane_0(box)
        case "on the way into it":
            box.admin.execute(A_FAILURE_OF_LANE_0, (slow,))
            box.until(lambda: not box.streaming(0), "lane 0 to be in the table")
            enter = StreamLanes.enter_stream

            def lose_and_enter(self: StreamLanes, lanes: Sequence[StreamLane]) -> None:
                if lanes:
                    lose_lane_0(box)
                enter(self, lanes)

            monkeypatch.setattr(StreamLanes, "enter_stream", lose_and_enter)
            box.admin.execute("DELETE FROM outbox.failures")
        case "in the table":
            box.kafka.bad = {slow}
            box.add(f"{slow}0")
            box.until(lambda: box.failed() == [slow] and not box.streaming(0), "lane 0 to be in the table")
            lose_lane_0(box)
            box.add(f"{slow}1")
    box.add(f"{quick}1")
    box.until(lambda: box.kafka.names(quick), f"the other lane's event, {box.kafka.names()} {box.seen.errors}")
    box.until(lambda: box.seen.errors, "the loss")
    assert box.kafka.names() == [f"{quick}1"]
    assert [(lanes, type(error)) for lanes, error in box.seen.errors] == [([0], LaneLost)]
    assert [gone.lease.lane for gone in box.held.take_let_go() if gone.lost] == [0]


@pytest.mark.parametrize(("once", "streamed"), [(True, False), (True, True), (False, True)])
def test_a_lane_that_can_not_be_taken_over_does_not_hold_up_the_others(outboxed, monkeypatch, once, streamed):
    """Its rows wait in the table: more of them than the stream holds go by, and come once and in order when it is back.

    It could not be taken over from the start, or has streamed before; then its last batch may be on Kafka or not.
    """
    monkeypatch.setattr(core_lane, "_LONG_SECONDS", 0.05)
    box = outboxed(2)
    slow, quick = keys_of_lanes()
    names = {key: [f"{key}{number:03}" for number in range(60)] for key in (slow, quick)}
    if not streamed:
        box.kafka.stuck = {0}
    box.relay(once=once, max_events=20, batch=5)
    if streamed:
        box.streams()
        box.add(*names[slow][:3], *names[quick][:3])
        failing = "after" if once else slow
        box.kafka.fail = lambda point: Unavailable("nobody knows") if point == failing else None
        box.until(lambda: box.seen.errors, "a failure")
        box.kafka.stuck = {0}
        box.kafka.fail = lambda _point: None
    for key in (slow, quick):
        for number in range(3 if streamed else 0, 60):
            box.add(names[key][number])
    box.until(lambda: box.kafka.names(quick) == names[quick], "the other lane's events")
    settled = now_at(box)
    box.until(lambda: box.rows("SELECT count(*) FROM outbox.events WHERE lane = 1") == [(0,)], "them to be settled")
    box.add(f"{quick}end")
    box.until(lambda: confirmed_flush(box) >= settled, "the slot to move on")
    assert len(box.kafka.names(slow)) in ({3} if streamed and once else {0, 3})
    assert (box.streaming(0), box.streaming(1)) == (False, True)
    assert box.held_back() < 20
    box.kafka.stuck = set()
    box.until(lambda: box.kafka.names(slow)[-1:] == names[slow][-1:], "the lane's events")
    box.streams()
    box.add(f"{slow}end")
    box.until(lambda: box.kafka.names(slow)[-1] == f"{slow}end", "the last one")
    assert box.kafka.names(slow) == [*names[slow], f"{slow}end"]
    assert box.kafka.names(quick) == [*names[quick], f"{quick}end"]
    box.until(lambda: backlog(box.url) == 0, "all to be settled")
    box.nothing_left()


def test_a_locked_lane_does_not_keep_the_others_from_the_stream(outboxed):
    box = outboxed(4)
    box.relay()
    with psycopg.connect(box.url) as other:
        other.execute("SELECT FROM outbox.lanes WHERE lane = 3 FOR UPDATE")
        box.until(lambda: box.streaming(0, 1, 2), "the other lanes to stream")
        # It tries again, and is neither lost nor waited for.
        box.turns(3)
        assert not box.streaming(3)
        assert box.seen.errors == []
    names = [f"{key}1" for key in "abcdefgh"]
    box.add(*names)
    box.streams()
    box.until(lambda: backlog(box.url) == 0, "all to be settled")
    assert sorted(box.kafka.names()) == names
    box.nothing_left()


@pytest.mark.parametrize("why", ["a failure", "a skipped event"])
def test_a_locked_lane_that_has_to_leave_the_stream_is_not_read_from_it_and_holds_up_no_other_one(
    outboxed, monkeypatch, why
):
    monkeypatch.setattr(wal_source, "_LOOK_SECONDS", 0.0)
    box = outboxed(2)
    slow, quick = keys_of_lanes()
    box.relay()
    box.streams()
    with psycopg.connect(box.url) as other:
        other.execute("SELECT FROM outbox.lanes WHERE lane = 0 FOR UPDATE")
        if why == "a failure":
            box.admin.execute(A_FAILURE_OF_LANE_0, (slow,))
        else:
            monkeypatch.setattr(
                StreamSource,
                "_skipped_by_stream",
                lambda _, lane, *__: lane.lease.lane == 0 and not box.seen.errors,
            )
        box.until(lambda: box.seen.errors, "the lock")
        # The next look, and the next sweep, are later.
        monkeypatch.setattr(wal_source, "_LOOK_SECONDS", 600.0)
        box.turn(1)
        box.add(f"{slow}1", f"{quick}1")
        box.until(lambda: box.kafka.names(quick), "the other lane's event")
        box.turns(3)
        assert {(tuple(lanes), type(error)) for lanes, error in box.seen.errors} == {((0,), LaneLocked)}
        # Its key may wait for an earlier event.
        assert box.kafka.names(slow) == []
    box.until(lambda: not box.streaming(0), "the lane to be in the table")
    box.admin.execute("DELETE FROM outbox.failures")
    box.streams()
    box.until(lambda: backlog(box.url) == 0, "all to be settled")
    assert (box.kafka.names(slow), box.kafka.names(quick)) == ([f"{slow}1"], [f"{quick}1"])
    box.nothing_left()


def test_a_locked_lane_that_is_paused_holds_up_no_other_one(outboxed):
    box = outboxed(2)
    box.relay()
    box.streams()
    with psycopg.connect(box.url) as other:
        other.execute("SELECT FROM outbox.lanes WHERE lane = 0 FOR UPDATE")
        failed = box.source.pause([0, 1])
        assert {lane: type(error) for lane, error in failed.items()} == {0: LaneLocked}
        assert [box.source._lanes[lane].streaming for lane in (0, 1)] == [True, False]
    assert box.source.pause([0]) == {}
    assert not box.streaming(0)


def test_a_renewal_that_locks_lanes_for_a_moment_does_not_keep_them_from_being_paused(outboxed, monkeypatch):
    box = outboxed(2)
    box.relay()
    box.streams()
    set_state = StreamLanes.set_state
    with psycopg.connect(box.url) as other:
        other.execute("SELECT FROM outbox.lanes FOR UPDATE")

        def once_locked(self: StreamLanes, *given: Any) -> bool:
            try:
                return set_state(self, *given)
            finally:
                other.rollback()

        monkeypatch.setattr(StreamLanes, "set_state", once_locked)
        assert box.source.pause([0, 1]) == {}
    assert [box.streaming(lane) for lane in (0, 1)] == [False, False]


@both
def test_a_locked_lane_loses_no_event_that_was_announced(outboxed, once):
    """Its row is locked while its last batch is to be settled and the next is there."""
    box = outboxed(2)
    slow, quick = keys_of_lanes()
    box.relay(once=once)
    box.streams()
    box.add(f"{slow}1")
    box.until(lambda: box.kafka.names(slow), "the first")
    # Published, and not settled.
    assert backlog(box.url) == 1
    with psycopg.connect(box.url) as other:
        other.execute("SELECT FROM outbox.lanes WHERE lane = 0 FOR UPDATE")
        box.add(f"{slow}2", f"{quick}1")
        box.read(3)
        box.until(lambda: box.kafka.names(quick), "the other lane")
        assert any(isinstance(error, LaneLocked) for _, error in box.seen.errors)
    box.add(f"{slow}3")
    box.until(lambda: len(box.kafka.names(slow)) >= 3, "the events of the lane that was locked")
    assert box.kafka.names(slow) == [f"{slow}1", f"{slow}2", f"{slow}3"]
    box.until(lambda: backlog(box.url) == 0, "all to be settled")
    box.nothing_left()


def test_a_refused_event_of_a_locked_lane_comes_again_before_later_ones_of_its_key(outboxed):
    """It was taken from the stream, and is not recorded."""
    box = outboxed()
    box.relay(once=False)
    box.streams()
    box.kafka.bad = {"a1"}
    with psycopg.connect(box.url) as other:
        other.execute("SELECT FROM outbox.lanes FOR UPDATE")
        box.add("b1", "a1", "a2")
        box.until(lambda: box.seen.errors, "the lock")
    assert [type(error) for _, error in box.seen.errors] == [LaneLocked]
    box.kafka.bad = set()
    box.add("a3")
    box.until(lambda: backlog(box.url) == 0, "all to be settled")
    assert (box.kafka.names("a"), box.kafka.names("b")) == (["a1", "a2", "a3"], ["b1"])
    box.nothing_left()


def test_a_lane_that_is_locked_for_a_moment_leaves_the_stream_with_its_refused_event(outboxed, monkeypatch):
    """It can be settled by the second try: what belongs to it must not be forgotten."""
    box = outboxed()
    box.relay(once=True)
    box.streams()
    box.kafka.bad = {"a1"}
    finish_sent = Settlement.finish_sent
    with psycopg.connect(box.url) as other:
        other.execute("SELECT FROM outbox.lanes FOR UPDATE")

        def unlocked(self: Settlement, sent: RunningStatement) -> dict[int, OutboxError]:
            other.rollback()
            return finish_sent(self, sent)

        monkeypatch.setattr(Settlement, "finish_sent", unlocked)
        box.add("a1", "b1")
        box.until(lambda: box.kafka.names("b"), "the other key")
    assert (box.streaming(), box.failed(), box.seen.errors) == (False, ["a"], [])


def test_a_refused_event_that_can_not_be_recorded_stops_no_other_lane(outboxed):
    box = outboxed(2)
    slow, quick = keys_of_lanes()
    box.relay(attempts=1, once=False)
    box.streams()
    box.admin.execute("ALTER TABLE outbox.dead_letters ADD CONSTRAINT mine CHECK (lane <> 0)")
    box.kafka.bad = {f"{slow}1"}
    box.add(f"{slow}1", f"{slow}2", f"{quick}1")
    box.until(lambda: len(box.seen.errors) >= 3, "the error again")
    assert box.kafka.names() == [f"{quick}1"]
    assert {(tuple(lanes), type(error)) for lanes, error in box.seen.errors} == {((0,), StandingError)}
    assert (len(box.sources), box.streaming(1)) == (1, True)
    box.kafka.bad = set()
    box.until(lambda: backlog(box.url) == 0, "all to be settled")
    assert box.kafka.names(slow) == [f"{slow}1", f"{slow}2"]
    box.nothing_left()


def test_a_turn_holds_no_more_than_its_bytes_and_all_lanes_have_theirs(outboxed):
    """Rows of 40 KB; the turn may hold 200 KB."""
    box = outboxed(2)
    keys = keys_of_lanes()
    box.relay(turn_bytes=200_000, batch=100)
    box.streams()
    turns: list[Batches] = []
    published = Producer.publish
    with pytest.MonkeyPatch.context() as patch, psycopg.connect(box.url) as connection:
        patch.setattr(Producer, "publish", lambda self, batches, *_: turns.append(batches) or published(self, batches))
        for number in range(60):
            for key in keys:
                Outbox().add(connection, Event("Order", key, f"{key}{number:02}", {"n": "x" * 40_000}))
        connection.commit()
        # What comes one by one would have turns of one lane.
        box.read(120)
        box.until(lambda: len(box.kafka.published) == 120, "all")
    sizes = [sum(len(claim.value) for claims in batches.values() for claim in claims) for batches in turns]
    assert max(sizes) < 300_000
    assert sum(len(batches) == 2 for batches in turns) > len(turns) // 2
    for key in keys:
        assert box.kafka.names(key) == [f"{key}{n:02}" for n in range(60)]
    box.turns(3)
    box.nothing_left()


@both
def test_what_was_taken_and_not_published_comes_again_to_the_source_that_goes_on(outboxed, chance, once):
    """A part of each lane's events fails, again and again, and the source survives."""
    box = outboxed(2)
    box.relay(once=once, batch=20)
    box.streams()
    keys = "abcdefgh"
    for number in range(25):
        box.add(*(f"{key}{number:02}" for key in keys[:4]))
        box.add(*(f"{key}{number:02}" for key in keys[4:]))
    refused = BatchRefused("something")
    box.kafka.fail = lambda point: refused if point != "after" and chance.random() < 0.1 else None
    source = box.source

    def go_on() -> bool:
        # What is refused alone is an event that waits: it is due at once.
        box.hurry()
        return len(set(box.kafka.names())) == 200

    box.until(go_on, "all")
    assert source is box.source
    box.kafka.fail = lambda _point: None
    box.streams()
    for key in keys:
        assert box.kafka.names(key) == box.written[key]
    box.turns(3)
    box.nothing_left()
