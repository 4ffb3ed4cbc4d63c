"""The polling source at the sizes that users have: many rows, many lanes, huge events."""

from __future__ import annotations

import pytest
from polling_worker import drain, insert_huge, note, settle, traced, workers
from support import backlog

from relay.polling import low_water_mark
from relay.polling.source import TURN_BYTES

__all__ = ["workers"]


def test_25000_rows_leave_once_each_in_order(workers):
    worker = workers(256)
    worker.insert(25_000)
    there = worker.ids()
    assert drain(worker.source(), worker.limits()) == there
    assert backlog(worker.database.url) == 0


def test_a_turn_is_two_statements_in_one_round_trip_whatever_the_number_of_lanes(workers, monkeypatch):
    # But for a look at failures and one at the horizon, each second.
    monkeypatch.setattr("relay.polling.reader._LOOK_SECONDS", 3600.0)
    monkeypatch.setattr(low_water_mark, "_LOOK_SECONDS", 3600.0)
    worker = workers(256)
    worker.insert(30_000)
    source = worker.source(overlap=False)
    for _ in range(8):
        settle(source, source.fetch(worker.limits(128)).batches)
    with traced(source.connection) as sent:
        for _ in range(10):
            fetched = source.fetch(worker.limits(128))
            assert len(fetched.batches) == 256
            settle(source, fetched.batches)
    assert sent["Execute"] + sent["Query"] == 20, sent
    # A pipeline's end is a Sync of its own.
    assert sent["Sync"] <= 30, sent


@pytest.mark.parametrize(("lanes", "most"), [(4, 8), (256, 14)])
def test_60_events_of_900_kb_leave_in_turns_that_fit_into_memory(workers, lanes, most):
    """They are compressed in the table. Of few lanes each has a limit of its own; many are limited together."""
    worker = workers(lanes)
    insert_huge(worker, 60)
    there = worker.ids()
    source = worker.source()
    seen: dict[int, list[int]] = {}
    turns: list[int] = []
    nothing = 0
    while nothing < 20 and sum(map(len, seen.values())) < 60:
        fetched = source.fetch(worker.limits())
        nothing = 0 if fetched.batches else nothing + 1
        turns.append(sum(len(claim.value) for batch in fetched.batches.values() for claim in batch))
        note(seen, fetched.batches)
        settle(source, fetched.batches)
    assert seen == there
    assert source.flush(list(worker.limits())) == {}
    assert backlog(worker.database.url) == 0
    assert max(turns) <= TURN_BYTES, [size >> 20 for size in turns]
    # And not one by one.
    assert len(turns) < most, [size >> 20 for size in turns]


def test_small_events_are_read_at_full_size_again_after_huge_ones(workers):
    worker = workers(256)
    insert_huge(worker, 40)
    worker.insert(30_000)
    there = worker.ids()
    source = worker.source()
    seen: dict[int, list[int]] = {}
    lanes = []
    while sum(map(len, seen.values())) < 30_040:
        fetched = source.fetch(worker.limits())
        assert fetched.batches
        lanes.append(len(fetched.batches))
        note(seen, fetched.batches)
        settle(source, fetched.batches)
    assert seen == there
    assert max(lanes[-10:]) > 200, lanes
