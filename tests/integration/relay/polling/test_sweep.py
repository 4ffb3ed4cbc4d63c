"""Late events below the low-water mark, and marks over a new source, with 25,000 events behind a blocked key."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from blocked_lane import WAITING, blocked, quick_marks, waiting
from polling_support import settle
from support import wait_until

from outbox._clients.search_path import PinnedConnection
from relay.database import Connector
from relay.polling import reader, sweep
from relay.polling.queries import Queries
from relay.polling.sweep import Sweep

__all__ = ["blocked", "quick_marks", "waiting"]


def test_no_turn_reads_what_is_swept(blocked):
    blocked.gate.clear()
    blocked.sweep_is_due()

    def turns() -> None:
        for number in range(20):
            blocked.write(f"free-{number}", 1)
            claims = blocked.lane.fetch(10)
            assert [claim.aggregate_id for claim in claims] == [f"free-{number}"]
            settle(blocked.lane, claims)

    # Each event is read, sized and settled.
    assert blocked.rows_read(turns) < 1000
    # In the middle of what waits, by a transaction that drew its id before.
    middle = blocked.first + WAITING // 2
    blocked.make_room(middle)
    blocked.write("late", 1, first=middle)
    blocked.gate.set()
    assert [claim.aggregate_id for claim in blocked.next_batch()] == ["late"]


def windows(monkeypatch, at: Callable[[int], None]) -> None:
    """Call ``at`` before each window of a sweep, with its number."""
    real = Sweep._window
    count = 0

    def window(self: Sweep, *arguments: Any) -> Any:
        nonlocal count
        count += 1
        at(count)
        return real(self, *arguments)

    monkeypatch.setattr(Sweep, "_window", window)


def test_a_lane_whose_sweep_fails_in_any_way_delays_no_other_and_is_due_a_minute_later(outbox_postgres, monkeypatch):
    swept: list[int] = []

    def window(_self: Sweep, connection: PinnedConnection, values: Any) -> tuple[int, int, list[int]]:
        swept.append(values["lane"])
        if values["lane"] == 0:
            raise RuntimeError("no error of a database")
        if values["lane"] == 1:
            connection.close()
            raise psycopg.OperationalError("the server closed the connection unexpectedly")
        return 0, 0, []

    monkeypatch.setattr(Sweep, "_window", window)
    swept_by = Sweep(Connector(outbox_postgres.url, "test"), Queries("outbox"))
    lanes = dict.fromkeys(range(3), 10)
    swept_by.due_at = dict.fromkeys(lanes, 0.0)
    for _ in range(2):
        swept_by.begin(lanes, ())
        assert swept_by._thread is not None
        swept_by._thread.join(60)
    assert swept == [0, 1, 2]


def test_a_sweep_that_finds_no_connection_is_due_a_minute_later():
    asked: list[str] = []

    def connect() -> PinnedConnection:
        asked.append("")
        raise RuntimeError("no error of a database")

    swept_by = Sweep(connect, Queries("outbox"))
    swept_by.due_at = {0: 0.0}
    for _ in range(2):
        swept_by.begin({0: 10}, ())
        assert swept_by._thread is not None
        swept_by._thread.join(60)
    assert asked == [""]


@pytest.mark.parametrize(("moment", "place"), [(1, -100), (3, WAITING // 2), (20, WAITING // 2), (21, WAITING - 10)])
def test_a_row_that_is_committed_at_any_moment_of_a_sweep_is_found(blocked, monkeypatch, moment, place):
    """And goes out before later events of its key."""
    monkeypatch.setattr(sweep, "_SWEEP_SECONDS", 0.0)
    monkeypatch.setattr(sweep, "_WINDOW", WAITING // 20)
    first = blocked.first + place
    if place > 0:
        blocked.make_room(first)

    def commit_late(number: int) -> None:
        if number == moment:
            blocked.write("late", 1, first=first)

    windows(monkeypatch, commit_late)
    blocked.sweep_is_due()
    claims = blocked.next_batch()
    assert [claim.position for claim in claims] == [first]
    settle(blocked.lane, claims)
    blocked.write("late", 1)
    claims = blocked.next_batch()
    assert [claim.aggregate_id for claim in claims] == ["late"]
    settle(blocked.lane, claims)
    blocked.lane.flush()
    assert blocked.number("SELECT count(*) FROM outbox.events WHERE aggregate_id = 'late'") == 0


def test_a_late_event_that_is_not_published_is_read_again_before_later_ones_of_its_key(blocked):
    blocked.make_room(blocked.first + 500)
    blocked.write("late", 1, first=blocked.first + 500)
    blocked.sweep_is_due()
    (late,) = blocked.next_batch()
    blocked.write("late", 1)
    # The turn failed: no receipt.
    assert blocked.next_batch() == [late]
    blocked.replace_source()
    claims = blocked.lane.fetch(10)
    assert claims == [late]
    settle(blocked.lane, claims)
    (later,) = blocked.next_batch()
    assert later.aggregate_id == "late"
    assert later.position > blocked.last
    settle(blocked.lane, [later])
    assert blocked.lane.fetch(10) == []
    # Nothing is left to be read by its id.
    assert blocked.lane.source.reader._lanes[blocked.lane.lane].late_ids == ()


def test_more_late_events_than_a_sweep_names_are_all_found_in_order(blocked, monkeypatch):
    monkeypatch.setattr(sweep, "_MOST", 20)
    ids = [blocked.first + 1000 + 450 * number for number in range(50)]
    for id_ in ids:
        blocked.make_room(id_)
        blocked.write("late", 1, first=id_)
    blocked.sweep_is_due()
    seen: list[int] = []
    while len(seen) < len(ids):
        claims = blocked.next_batch()
        seen += [claim.position for claim in claims]
        settle(blocked.lane, claims)
    assert seen == ids


def test_a_key_that_is_freed_in_the_middle_of_a_sweep_goes_out_in_order(blocked, monkeypatch):
    """Windows from then on find its events free, while those of the windows before wait."""
    monkeypatch.setattr(reader, "_LOOK_SECONDS", 3600.0)
    monkeypatch.setattr(sweep, "_WINDOW", WAITING // 10)
    halted, go_on = threading.Event(), threading.Event()

    def halt(number: int) -> None:
        if number == 6:
            halted.set()
            go_on.wait(60)

    windows(monkeypatch, halt)
    blocked.sweep_is_due()
    assert blocked.lane.fetch(10) == []
    assert halted.wait(60)
    blocked.discard()
    go_on.set()
    wait_until(lambda: bool(blocked.lane.source.reader._sweep._found), what="the sweep's names")
    # The names are taken together with a look.
    blocked.lane.source.reader._looked_at = -7200.0
    claims = blocked.next_batch()
    assert [claim.position for claim in claims] == list(range(claims[0].position, claims[0].position + len(claims)))
    assert claims[0].position == blocked.first + 1
