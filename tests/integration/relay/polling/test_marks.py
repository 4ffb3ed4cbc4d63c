"""Marks over a new source and in the lane's row, with 25,000 events behind a blocked key: when they hold."""

from __future__ import annotations

from dataclasses import replace

import pytest
from blocked_lane import WAITING, Blocked, blocked, quick_marks, waiting
from polling_support import settle, table, taken

from relay.core.ports import Claim, Receipt
from relay.polling import row_marks
from relay.polling.kept_marks import Server

__all__ = ["blocked", "quick_marks", "waiting"]


def test_a_new_source_reads_on_from_the_marks(blocked):
    blocked.replace_source()
    blocked.write("free", 1)
    found: list[Claim] = []
    assert blocked.rows_read(lambda: found.extend(blocked.lane.fetch(10))) < 100
    assert [claim.aggregate_id for claim in found] == ["free"]
    settle(blocked.lane, found)
    while blocked.mark < found[0].position:
        assert blocked.lane.fetch(10) == []
    for _ in range(3):
        blocked.replace_source()
        assert blocked.rows_read(lambda: blocked.lane.fetch(10)) < 100
        assert blocked.mark == found[0].position


def test_a_new_source_notices_what_was_freed_meanwhile(blocked):
    blocked.close_source()
    blocked.discard()
    blocked.lane = blocked.new_source()
    assert [claim.position for claim in blocked.lane.fetch(3)] == [blocked.first + 1 + number for number in range(3)]


def test_marks_are_kept_below_events_that_may_not_be_settled(blocked):
    blocked.write("free", 3)
    claims = blocked.lane.fetch(10)
    settle(blocked.lane, claims)
    blocked.lane.source.reader._marks.keep(blocked.lane.lane, claims[-1].position)
    blocked.replace_source()
    assert blocked.lane.fetch(10) == claims


def another_server(blocked: Blocked) -> None:
    assert blocked.kept.server is not None
    blocked.kept.server = replace(blocked.kept.server, system_identifier="another")


def topics_left_out(blocked: Blocked) -> None:
    blocked.kept.left_out = frozenset({("Order", False)})


@pytest.mark.parametrize("change", [another_server, topics_left_out])
def test_marks_are_not_kept_where_they_may_not_hold(blocked, change):
    blocked.close_source()
    change(blocked)
    blocked.lane = blocked.new_source()
    assert blocked.rows_read(lambda: blocked.lane.fetch(10)) >= WAITING


def test_leaving_out_more_keeps_the_marks_and_leaving_out_less_does_not(blocked):
    more, less = frozenset({("Order", True), ("Invoice", False)}), frozenset({("Invoice", False)})
    for kinds in (less, more):
        blocked.lane.source.leave_out(kinds)
        assert blocked.rows_read(lambda: blocked.lane.fetch(10)) < 100
    blocked.close_source()
    blocked.lane = blocked.new_source()
    # As the loop does: the publisher says it before anything is read.
    blocked.lane.source.leave_out(more)
    assert blocked.rows_read(lambda: blocked.lane.fetch(10)) < 100
    blocked.lane.source.leave_out(less)
    assert blocked.rows_read(lambda: blocked.lane.fetch(10)) >= WAITING


def test_marks_are_not_kept_over_another_holder(blocked):
    blocked.admin.execute("UPDATE outbox.lanes SET lease_until = '-infinity'")
    blocked.replace_source(taken(table(blocked.database, "another")))
    assert blocked.rows_read(lambda: blocked.lane.fetch(10)) >= WAITING


def test_a_server_is_the_same_later():
    server = Server("1", 1, 100, "12.5")
    assert server.has_become(Server("1", 1, 100, "12.5"))
    assert server.has_become(Server("1", 1, 101, "12.5"))
    assert not server.has_become(Server("1", 1, 99, "12.5"))
    assert not server.has_become(Server("1", 2, 200, "12.5"))
    assert not server.has_become(Server("2", 1, 200, "12.5"))
    # Perhaps an older copy of its files.
    assert not server.has_become(Server("1", 1, 200, "99.5"))


@pytest.fixture
def kept(blocked, monkeypatch) -> Blocked:
    """One whose mark is in the lane's row."""
    monkeypatch.setattr(row_marks, "_SECONDS", 0.0)
    assert blocked.lane.fetch(10) == []
    assert blocked.number("SELECT low_water_mark FROM outbox.lanes") == blocked.last
    return blocked


def test_a_fresh_process_reads_on_from_the_mark_in_the_lanes_row(kept):
    """Also while some session holds the xmin: there it could prove none of its own."""
    with kept.database.connect() as forgotten:
        forgotten.execute("SELECT pg_current_xact_id()")
        for number in range(2):
            kept.taken_over()
            kept.write(f"free-{number}", 1)
            found: list[Claim] = []
            assert kept.rows_read(lambda found=found: found.extend(kept.lane.fetch(10))) < 100
            assert [claim.aggregate_id for claim in found] == [f"free-{number}"]
            settle(kept.lane, found)
            kept.lane.flush()


def test_a_fresh_process_finds_what_was_freed_while_none_ran(kept):
    kept.discard()
    kept.taken_over()
    assert [claim.position for claim in kept.lane.fetch(3)] == [kept.first + 1 + number for number in range(3)]


def test_a_fresh_process_finds_what_was_freed_although_as_many_keys_wait(kept):
    kept.discard()
    kept.admin.execute(
        "INSERT INTO outbox.failures (lane, id, event_id, aggregate_type, aggregate_id, attempts, next_attempt_at,"
        " blocks, last_error, first_failed_at, last_failed_at)"
        " SELECT lane, id, event_id, aggregate_type, 'another', 1, 'infinity', true, 'x', now(), now()"
        " FROM outbox.events ORDER BY id DESC LIMIT 1"
    )
    kept.taken_over()
    assert [claim.position for claim in kept.lane.fetch(3)] == [kept.first + 1 + number for number in range(3)]


def test_a_new_failure_above_the_mark_leaves_it(kept):
    kept.write("bad", 1)
    (claim,) = kept.lane.fetch(10)
    kept.lane.settle(Receipt(refused=[(claim, "bad")]))
    kept.taken_over()
    assert kept.rows_read(lambda: kept.lane.fetch(10)) < 100


def test_events_that_may_not_be_settled_are_above_the_mark_in_the_row(kept):
    kept.write("free", 3)
    claims = kept.lane.fetch(10)
    settle(kept.lane, claims)
    # The read of this turn leaves them out: the mark rises over them.
    kept.lane.source.reader._marks.keep(kept.lane.lane, claims[-1].position)
    kept.lane.source.reader.look_first(kept.lane.source._unsettled())
    kept.taken_over()
    assert kept.lane.fetch(10) == claims


def test_no_mark_is_written_over_what_is_left_out_or_still_has_to_be_read(kept):
    kept.lane.source.leave_out(frozenset({("Free", False)}))
    kept.admin.execute("UPDATE outbox.lanes SET low_water_mark = NULL, mark_failures = NULL")
    kept.lane.source.reader._row_marks._written.clear()
    kept.lane.fetch(10)
    assert kept.admin.execute("SELECT low_water_mark FROM outbox.lanes").fetchone() == (None,)
    kept.lane.source.leave_out(frozenset())
    kept.lane.source.reader._marks.keep(kept.lane.lane, kept.last)
    kept.lane.source.reader._lanes[kept.lane.lane].late_ids = (kept.first + 5,)
    kept.lane.fetch(10)
    assert kept.admin.execute("SELECT low_water_mark FROM outbox.lanes").fetchone() == (None,)


def test_a_mark_of_another_server_or_of_a_former_holder_is_not_used(kept):
    kept.taken_over()
    before = kept.killed[0].source.reader
    # It has slept, and writes what it knows.
    kept.admin.execute("UPDATE outbox.lanes SET low_water_mark = NULL, mark_failures = NULL")
    before._row_marks._written.clear()
    before.look_first({})
    assert kept.admin.execute("SELECT low_water_mark FROM outbox.lanes").fetchone() == (None,)
    before._server = replace(before._server, system_identifier="another")
    before._lanes[kept.lane.lane].lease = kept.lease
    before.look_first({})
    assert kept.number("SELECT low_water_mark FROM outbox.lanes") == kept.last
    kept.taken_over()
    assert kept.rows_read(lambda: kept.lane.fetch(10)) >= WAITING
