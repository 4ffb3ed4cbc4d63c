"""What a polling source costs while it is idle, and while many events wait for a retry or behind a key."""

from __future__ import annotations

import statistics
import threading
import time

from polling_worker import drain, insert_huge, note, quick_marks, settle, traced, workers
from rows_and_roles import put
from support import backlog, wait_until

from outbox import Event, Outbox
from outbox.sandbox._process import patience
from relay.core.ports import Batches, Receipt
from relay.operations.dead_letters import DeadLetters, Selection
from relay.polling import source as polling_source
from relay.polling.kept_marks import KeptMarks
from relay.polling.queries import Queries
from relay.polling.source import TURN_BYTES, PollingSource
from relay.wal.lane_hash import lane_of

__all__ = ["quick_marks", "workers"]


def test_an_idle_worker_hears_of_a_commit_within_milliseconds_and_not_of_other_tables(workers):
    worker = workers(256)
    source = worker.source()
    lanes, stop = list(worker.limits()), threading.Event()
    drain(source, worker.limits())
    worker.admin.execute("CREATE TABLE other (n int)")
    times: list[float] = []
    for number in range(9):
        commits: list[float] = []

        def write(number: int = number, commits: list[float] = commits) -> None:
            with worker.database.connect(autocommit=True) as connection:
                for _ in range(20):
                    connection.execute("INSERT INTO other VALUES (1)")
                    time.sleep(0.002)
                with connection.transaction():
                    Outbox().add(connection, Event("Order", f"k{number}", "T"))
                commits.append(time.monotonic())

        writer = threading.Thread(target=write)
        writer.start()
        while not source.wait(lanes, 1.0, stop) or not (fetched := source.fetch(worker.limits())).batches:
            assert not commits or time.monotonic() - commits[0] < 5 * patience()
        heard = time.monotonic()
        writer.join()
        times.append(heard - commits[0])
        settle(source, fetched.batches)
        drain(source, worker.limits())
    # From the commit to the rows in hand. A few milliseconds where the machine has time, as it has now and then.
    assert statistics.quantiles(times, n=3)[0] < 0.05 * patience(), times
    # Commits of other tables end no wait.
    source.fetch(worker.limits())
    writer = threading.Thread(target=lambda: [worker.admin.execute("INSERT INTO other VALUES (1)") for _ in range(100)])
    writer.start()
    began = time.monotonic()
    source.wait(lanes, 0.5, stop)
    assert time.monotonic() - began >= 0.5
    writer.join()


def test_a_wait_ends_when_the_database_s_clock_goes_back(workers, monkeypatch):
    """By an hour: pg_sleep, and every limit on a statement, ends by that clock, an hour later."""
    monkeypatch.setattr(polling_source, "_LATE_SECONDS", 0.3)
    worker = workers(2)
    source = worker.source()
    drain(source, worker.limits())
    with monkeypatch.context() as gone_back:
        gone_back.setattr(Queries, "watch", lambda *_: "DO 'BEGIN PERFORM pg_sleep(3600); END'")
        began = time.monotonic()
        assert source.wait(list(worker.limits()), 0.2, threading.Event())
        assert time.monotonic() - began < 5 * patience()
    sleeping = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'PgSleep'"
    assert worker.admin.execute(sleeping).fetchone() == (0,)
    worker.insert(10)
    assert source.wait(list(worker.limits()), 1.0, threading.Event())
    assert sum(map(len, source.fetch(worker.limits()).batches.values())) == 10


def test_an_idle_worker_asks_a_few_times_a_second(workers):
    worker = workers(256)
    source = worker.source()
    drain(source, worker.limits())
    with traced(source.connection) as sent:
        began = time.monotonic()
        while time.monotonic() - began < 1.5:
            # The loop's own: a wait of a tenth of a second, a fetch when it says so.
            if source.wait(list(worker.limits()), 0.1, threading.Event()):
                source.fetch(worker.limits())
    asked = sent["Query"] + sent["Execute"]
    assert asked / 1.5 < 12, sent


def test_1000_events_that_were_put_back_leave_in_batches(workers):
    worker = workers()
    source = worker.source(attempts=1)
    worker.insert(1000, keys=1000)
    while batches := source.fetch(worker.limits()).batches:
        source.settle({lane: Receipt(refused=[(claim, "bad") for claim in each]) for lane, each in batches.items()})
    assert worker.admin.execute("SELECT count(*) FROM outbox.dead_letters").fetchone() == (1000,)
    assert len(DeadLetters(worker.admin, "outbox").retry(Selection())) == 1000
    there = worker.ids()
    seen: dict[int, list[int]] = {}
    turns = 0
    while sum(map(len, seen.values())) < 1000:
        batches = source.fetch(worker.limits()).batches
        turns += 1
        note(seen, batches)
        settle(source, batches)
        assert turns < 100, {lane: len(ids) for lane, ids in seen.items()}
    assert {lane: sorted(ids) for lane, ids in seen.items()} == there
    assert len({id_ for ids in seen.values() for id_ in ids}) == 1000
    # One, two, four, eight … of each lane, with turns of the others between.
    assert turns <= 30
    source.flush(list(worker.limits()))
    assert backlog(worker.database.url) == 0
    assert worker.admin.execute("SELECT count(*) FROM outbox.failures").fetchone() == (0,)


def test_huge_events_that_were_put_back_leave_in_turns_that_fit_into_memory(workers):
    worker = workers()
    source = worker.source(attempts=1)
    insert_huge(worker, 40)
    while batches := source.fetch(worker.limits()).batches:
        source.settle({lane: Receipt(refused=[(claim, "bad") for claim in each]) for lane, each in batches.items()})
    assert len(DeadLetters(worker.admin, "outbox").retry(Selection())) == 40
    seen: dict[int, list[int]] = {}
    turns: list[int] = []
    while sum(map(len, seen.values())) < 40:
        batches = source.fetch(worker.limits()).batches
        turns.append(sum(len(claim.value) for batch in batches.values() for claim in batch))
        note(seen, batches)
        settle(source, batches)
        assert len(turns) < 100, turns
    source.flush(list(worker.limits()))
    assert max(turns) <= TURN_BYTES, [size >> 20 for size in turns]
    assert backlog(worker.database.url) == 0


def refuse(source: PollingSource, batches: Batches) -> None:
    """The first event of each key is refused, the others behind it are not sent."""
    receipts = {}
    for lane, batch in batches.items():
        first = {claim.aggregate_id: claim for claim in reversed(batch)}
        receipts[lane] = Receipt(refused=[(claim, "bad") for claim in first.values()])
    assert source.settle(receipts) == {}


def test_a_retry_of_a_blocked_key_does_not_read_the_20000_events_behind_it(workers, quick_marks):
    """Nor does a failure of another key, and its end: of what is below the mark, only what comes behind it may go."""
    worker = workers()
    source = worker.source(attempts=1000)
    worker.insert(1, keys=1)
    refuse(source, source.fetch(worker.limits()).batches)
    worker.insert(20_000, keys=1)

    def read_rows() -> int:
        source.connection.execute("SELECT pg_stat_force_next_flush()")
        query = "SELECT idx_tup_fetch FROM pg_stat_user_tables WHERE relid = 'outbox.events'::regclass"
        return worker.admin.execute(query).fetchone()[0]

    def reads_little() -> bool:
        before = read_rows()
        settle(source, source.fetch(worker.limits()).batches)
        return read_rows() - before < 2000

    def due(key: str) -> Batches:
        worker.admin.execute("UPDATE outbox.failures SET next_attempt_at = now() WHERE aggregate_id = %s", (key,))
        return what_comes()

    def what_comes() -> Batches:
        # What a settled failure has freed is seen by a look, and read after that.
        return next((found for _ in range(6) if (found := source.fetch(worker.limits()).batches)), {})

    wait_until(reads_little, 60, "the mark to rise above what waits")
    before = read_rows()
    for _ in range(5):
        retried = due("key-0")
        assert [claim.aggregate_id for batch in retried.values() for claim in batch] == ["key-0"]
        refuse(source, retried)
        source.fetch(worker.limits())
        source.reader._looked_at = 0.0
        source.fetch(worker.limits())
    assert read_rows() - before < 2000
    # Another key of the same lane: it fails, and goes out with the next try.
    other = next(key for key in range(1, 100) if lane_of("Order", f"key-{key}", 4) == lane_of("Order", "key-0", 4))
    insert = "INSERT INTO outbox.events (aggregate_type, aggregate_id, event_type) VALUES ('Order', %s, 'T')"
    before = read_rows()
    for _ in range(3):
        worker.admin.execute(insert, (f"key-{other}",))
    refuse(source, source.fetch(worker.limits()).batches)
    seen: list[str] = []
    batches = due(f"key-{other}")
    while batches:
        seen += [claim.aggregate_id for batch in batches.values() for claim in batch]
        settle(source, batches)
        batches = what_comes()
    assert seen == [f"key-{other}"] * 3
    assert read_rows() - before < 2000
    assert DeadLetters(worker.admin, "outbox").retry(Selection())
    rest = drain(source, worker.limits())
    assert len([id_ for ids in rest.values() for id_ in ids]) >= 20_000
    assert backlog(worker.database.url) == 0


def test_due_events_of_a_turn_that_fails_and_tells_no_more_are_read_again_before_others(workers):
    """A turn of its own has them again, and not others of the lane: only so it finds which one is refused."""
    worker = workers(1)
    source = worker.source(attempts=1000)
    worker.insert(1, keys=1)
    refuse(source, source.fetch(worker.limits()).batches)
    put(worker.admin, "outbox.events", aggregate_id="b")
    worker.admin.execute("UPDATE outbox.failures SET next_attempt_at = now()")
    source.reader.recheck_failures(0)
    for _ in range(3):
        fetched = source.fetch(worker.limits())
        assert [claim.aggregate_id for claim in fetched.batches[0]] == ["key-0"]
        assert fetched.retried == [0]
        source.settle({})
    refuse(source, fetched.batches)
    fetched = source.fetch(worker.limits())
    assert [claim.aggregate_id for claim in fetched.batches[0]] == ["b"]
    assert fetched.retried == []


def test_due_events_of_which_nothing_became_known_are_read_once_with_the_others(workers):
    """Alone, a topic that does not answer can't be told from a slow broker: the lane's other topics would wait too."""
    worker, kept = workers(1), KeptMarks()
    worker.insert(1, keys=1)
    source = worker.source(attempts=5, kept=kept)
    (refused,) = source.fetch(worker.limits()).batches[0]
    assert source.settle({0: Receipt(refused=[(refused, "bad")])}) == {}
    worker.insert(3, first=2)
    worker.admin.execute("UPDATE outbox.failures SET next_attempt_at = clock_timestamp()")
    found = []
    for _ in range(3):
        # As the loop does after a turn that was not acknowledged in time.
        source.close()
        source = worker.source(attempts=5, kept=kept)
        found.append(source.fetch(worker.limits()))
    (lane,) = worker.ids()
    assert [[claim.position for claim in each.batches[lane]] for each in found] == [
        [refused.position],
        worker.ids()[lane],
        [refused.position],
    ]
    assert [list(each.retried) for each in found] == [[lane], [], [lane]]
