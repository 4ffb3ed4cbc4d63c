"""The loop against hand-made sources and publishers: what it does when either fails."""

from __future__ import annotations

import threading

import pytest

from relay.loop import LaneLoop, Pace
from relay.ports import PUBLISHED, Claim, LaneLost, Receipt, Refused, Unavailable


def claim(position: int) -> Claim:
    return Claim(position, f"e{position}", "Order", "k", "T", "2026-01-01T00:00:00Z", b"{}", None)


class Table:
    """A lane's rows, and how often it was opened."""

    def __init__(self, rows: list[int]) -> None:
        self.rows = rows
        self.opened = 0
        self.closed = 0
        self.fail_fetch: list[Exception] = []
        self.fail_settle: list[Exception] = []

    def __call__(self) -> Table:
        self.opened += 1
        return self

    def fetch(self, limit: int) -> list[Claim]:
        if self.fail_fetch:
            raise self.fail_fetch.pop(0)
        return [claim(row) for row in sorted(self.rows)[:limit]]

    def settle(self, results) -> None:
        if self.fail_settle:
            raise self.fail_settle.pop(0)
        for item, outcome in results:
            if outcome is PUBLISHED:
                self.rows.remove(item.position)

    def close(self) -> None:
        self.closed += 1


class Topic:
    """What was sent; ``script`` gives the receipts for coming batches, then all is acknowledged."""

    def __init__(self, stop: threading.Event, table: Table, script=()) -> None:
        self.log: list[int] = []
        self.script = list(script)
        self.opened = 0
        self.closed = 0
        self.stop = stop
        self.table = table

    def __call__(self) -> Topic:
        self.opened += 1
        return self

    def publish(self, claims) -> Receipt:
        if self.script:
            return self.script.pop(0)(claims, self.log)
        self.log += [item.position for item in claims]
        if len(claims) == len(self.table.rows):
            self.stop.set()
        return Receipt([(item, PUBLISHED) for item in claims])

    def close(self) -> None:
        self.closed += 1


class Watcher:
    def __init__(self) -> None:
        self.seen: list[str] = []

    def published(self, count: int) -> None:
        self.seen.append(f"published {count}")

    def refused(self, item: Claim, reason: str) -> None:
        self.seen.append(f"refused {item.position} {reason}")

    def unavailable(self, error: Exception, wait_seconds: float) -> None:
        self.seen.append(f"unavailable {error}")

    def recovered(self) -> None:
        self.seen.append("recovered")


PACE = Pace(batch_size=2, min_idle_seconds=0.001, max_idle_seconds=0.002, min_backoff_seconds=0.001)


def run(rows, script=(), *, prepare=lambda table: None):
    stop = threading.Event()
    table = Table(rows)
    prepare(table)
    topic = Topic(stop, table, script)
    watcher = Watcher()
    loop = LaneLoop(table, topic, stop=stop, secure=lambda: True, observer=watcher, pace=PACE)
    loop.run()
    return table, topic, watcher


def test_batches_in_order_until_stopped():
    table, topic, watcher = run([1, 2, 3, 4, 5])
    assert topic.log == [1, 2, 3, 4, 5]
    assert table.rows == []
    assert watcher.seen == ["published 2", "published 2", "published 1"]
    assert (table.closed, topic.closed) == (1, 1)


def failing(acknowledged: int):
    def publish(claims, log) -> Receipt:
        log += [item.position for item in claims]
        return Receipt([(item, PUBLISHED) for item in claims[:acknowledged]], Unavailable("broker gone"))

    return publish


def test_after_a_failure_what_was_acknowledged_is_settled_and_the_rest_sent_by_a_new_publisher():
    table, topic, watcher = run([1, 2, 3], [failing(1)])
    assert topic.log == [1, 2, 2, 3]
    assert table.rows == []
    assert topic.opened == 2
    assert table.opened == 2
    assert watcher.seen == ["published 1", "unavailable broker gone", "published 2", "recovered"]


def test_a_failure_while_settling_reads_and_sends_again():
    table, topic, _ = run([1, 2, 3], prepare=lambda table: table.fail_settle.append(Unavailable("database gone")))
    assert topic.log == [1, 2, 1, 2, 3]
    assert table.rows == []


def test_a_failure_while_fetching_sends_nothing():
    table, topic, watcher = run([1], prepare=lambda table: table.fail_fetch.append(Unavailable("database gone")))
    assert topic.log == [1]
    assert table.rows == []
    assert watcher.seen[0] == "unavailable database gone"


def test_a_refused_event_blocks_the_lane_but_not_what_came_before():
    def refuse(claims, log) -> Receipt:
        log.append(claims[0].position)
        return Receipt([(claims[0], PUBLISHED), (claims[1], Refused("too large"))])

    table, topic, watcher = run([1, 2, 3], [refuse])
    assert topic.log == [1, 2, 3]
    assert watcher.seen[:2] == ["published 1", "refused 2 too large"]
    assert "recovered" in watcher.seen
    assert table.rows == []


def test_a_lost_lane_ends_the_loop():
    with pytest.raises(LaneLost):
        run([1, 2, 3], prepare=lambda table: table.fail_settle.append(LaneLost("epoch is over")))


def test_nothing_is_fetched_while_the_lease_may_be_over():
    stop = threading.Event()
    table = Table([1])
    topic = Topic(stop, table)
    answers = iter([False, False, True])
    loop = LaneLoop(table, topic, stop=stop, secure=lambda: next(answers, True), observer=Watcher(), pace=PACE)
    loop.run()
    assert topic.log == [1]
    assert next(answers, None) is None
