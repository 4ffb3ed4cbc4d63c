"""The loop against hand-made sources and publishers: what it does when either fails."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from outbox.errors import SchemaError
from relay.loop import LaneLoop, Pace
from relay.marker import StateLost
from relay.ports import PUBLISHED, BatchRefused, Claim, LaneLost, Receipt, Refused, Unavailable


def claim(position: int) -> Claim:
    return Claim(position, f"e{position}", "Order", "k", "T", "2026-01-01T00:00:00Z", b"{}", None)


class Table:
    """A lane's rows, and how often it was opened."""

    def __init__(self, rows: list[int]) -> None:
        self.rows = rows
        self.opened = 0
        self.closed = 0
        self.flushed = 0
        self.refused: list[int] = []
        self.fail_fetch: list[Exception] = []
        self.fail_settle: list[Exception] = []
        self.stuck: set[int] = set()

    def __call__(self) -> Table:
        self.opened += 1
        return self

    def fetch(self, limit: int) -> list[Claim]:
        if self.fail_fetch:
            raise self.fail_fetch.pop(0)
        return [claim(row) for row in sorted(self.rows)[:limit]]

    def settle(self, receipt) -> None:
        if self.fail_settle:
            raise self.fail_settle.pop(0)
        if stuck := self.stuck & {item.position for item, _ in receipt.results}:
            raise SchemaError(f"{stuck} is too long")
        for item, outcome in receipt.results:
            if item.position in self.rows:
                self.rows.remove(item.position)
            if outcome is not PUBLISHED:
                self.refused.append(item.position)

    def flush(self) -> None:
        self.flushed += 1

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
        self.sizes: list[int] = []

    def __call__(self, source: Table) -> Topic:
        assert source.opened > source.closed
        self.opened += 1
        return self

    def publish(self, claims) -> Receipt:
        if self.script:
            return self.script.pop(0)(claims, self.log)
        self.log += [item.position for item in claims]
        if len(claims) == len(self.table.rows):
            self.stop.set()
        self.sizes.append(len(claims))
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


def run(rows, script=(), *, prepare=lambda table: None, pace=PACE):
    stop = threading.Event()
    table = Table(rows)
    prepare(table)
    topic = Topic(stop, table, script)
    watcher = Watcher()
    loop = LaneLoop(table, topic, stop=stop, secure=lambda: True, observer=watcher, pace=pace)
    loop.run()
    return table, topic, watcher


def test_batches_in_order_until_stopped():
    table, topic, watcher = run([1, 2, 3, 4, 5])
    assert topic.log == [1, 2, 3, 4, 5]
    assert table.rows == []
    assert watcher.seen == ["published 2", "published 2", "published 1"]
    assert (table.closed, topic.closed) == (1, 1)
    # The last batch is settled before the lane is given up.
    assert table.flushed == 1


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


@pytest.mark.parametrize("error", [Unavailable("database gone"), SchemaError("disk full")])
def test_a_failure_while_settling_settles_again_and_sends_nothing_twice(error):
    table, topic, _ = run([1, 2, 3], prepare=lambda table: table.fail_settle.extend([error] * 3))
    assert topic.log == [1, 2, 3]
    assert table.rows == []


def test_a_stop_while_it_waits_settles_what_is_published():
    table = Table([1, 2])
    table.fail_settle.append(Unavailable("database gone"))
    stop = threading.Event()
    topic, watcher = Topic(stop, table), Watcher()
    watcher.unavailable = lambda *_: stop.set()
    LaneLoop(table, topic, stop=stop, secure=lambda: True, observer=watcher, pace=PACE).run()
    assert (topic.log, table.rows) == ([1, 2], [])


def test_what_a_marker_settles_is_not_settled_again():
    def committed(claims, log) -> Receipt:
        log += [item.position for item in claims]
        return Receipt([(item, PUBLISHED) for item in claims], batch=7)

    _, topic, _ = run([1, 2], [committed], prepare=lambda table: table.fail_settle.append(Unavailable("database gone")))
    assert topic.log == [1, 2, 1, 2]


def test_an_event_that_can_never_be_settled_is_sent_once_and_named_and_those_before_it_are_settled():
    table = Table(list(range(1, 12)))
    table.stuck = {6}
    stop = threading.Event()
    topic, watcher = Topic(stop, table), Watcher()
    loop = LaneLoop(table, topic, stop=stop, secure=lambda: True, observer=watcher, pace=replace(PACE, batch_size=8))
    watcher.unavailable = lambda error, _: (watcher.seen.append(str(error)), len(watcher.seen) == 5 and stop.set())
    loop.run()
    assert topic.log == list(range(1, 9))
    assert table.rows == list(range(6, 12))
    assert set(watcher.seen[1:]) == {"event e6 is published, and stays behind: {6} is too long"}
    # A person sees to it, and the lane goes on by itself.
    table.stuck = set()
    stop.clear()
    loop.run()
    assert (topic.log, table.rows) == (list(range(1, 12)), [])


def test_a_failure_while_fetching_sends_nothing():
    table, topic, watcher = run([1], prepare=lambda table: table.fail_fetch.append(Unavailable("database gone")))
    assert topic.log == [1]
    assert table.rows == []
    assert watcher.seen[0] == "unavailable database gone"


def test_a_refused_event_is_handed_to_the_source_and_the_lane_lives_on():
    def refuse(claims, log) -> Receipt:
        log.append(claims[0].position)
        return Receipt([(claims[0], PUBLISHED), (claims[1], Refused("too large"))])

    table, topic, watcher = run([1, 2, 3], [refuse])
    assert topic.log == [1, 3]
    assert watcher.seen == ["refused 2 too large", "published 1", "published 1"]
    assert (table.rows, table.refused) == ([], [2])
    assert (topic.opened, table.opened) == (1, 1)


def test_a_refused_batch_is_halved_until_one_event_is_to_blame_and_grows_again():
    poison = 3

    def publish(claims, log) -> Receipt:
        if any(item.position == poison for item in claims):
            return Receipt([], BatchRefused("too large"))
        log += [item.position for item in claims]
        return Receipt([(item, PUBLISHED) for item in claims])

    pace = replace(PACE, batch_size=8)
    table, topic, watcher = run(list(range(1, 120)), [publish] * 7, pace=pace)
    assert table.refused == [poison]
    assert "refused 3 too large" in watcher.seen
    assert not [line for line in watcher.seen if "unavailable" in line]
    assert topic.log == [position for position in range(1, 120) if position != poison]
    # Halved to one at worst, and back at eight in the end.
    assert max(topic.sizes) == 8


def test_a_spent_publisher_is_replaced_without_waiting():
    def spent(claims, log) -> Receipt:
        log += [item.position for item in claims]
        return Receipt([(item, PUBLISHED) for item in claims], batch=7, spent=True)

    table, topic, watcher = run([1, 2, 3], [spent])
    assert topic.log == [1, 2, 3]
    assert topic.opened == 2
    assert watcher.seen == ["published 2", "published 1"]
    assert table.rows == []


def test_a_lane_that_stopped_waits_for_a_person_and_goes_on_by_itself():
    _, topic, watcher = run([1], prepare=lambda table: table.fail_fetch.append(StateLost("no marker")))
    assert topic.log == [1]
    assert watcher.seen[0] == "unavailable no marker"


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
