"""The polling source at the sizes that users have: many rows, many lanes, huge events, read ahead, an idle worker."""

from __future__ import annotations

import os
import re
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from support import backlog, wait_until

from outbox import Event, Outbox
from outbox._app import migrate as db
from outbox.errors import OutboxError
from outbox.sandbox._process import patience
from relay.database import Connector
from relay.kafka.routing import OnFailure, Route, Router
from relay.lanes import LaneTable
from relay.lease import HeldLanes, Lease
from relay.loop import LoopSettings, WorkerLoop
from relay.operations.dead_letters import DeadLetters, Selection
from relay.polling import low_water_mark
from relay.polling.source import TURN_BYTES, PollingSource
from relay.ports import (
    PUBLISHED,
    Batches,
    BatchRefused,
    Claim,
    Completed,
    Confirm,
    Failed,
    Kind,
    LaneLost,
    Receipt,
    Refused,
    Sent,
)
from relay.retries import FailurePolicy, Failures
from relay.wal.lane_hash import lane_of

BATCH = 2000
ROUTES = Router({"Order": Route("orders")})
EVENT_BYTES = 900_000


class Worker:
    """An outbox of so many lanes, all held, and sources over it. Turns are turned by hand, with the loop's limits."""

    def __init__(self, database: Any, lanes: int) -> None:
        self.database = database
        self.count = lanes
        if lanes != 4:
            db.change_lanes(database.url, lanes)
        self.admin = database.connect(autocommit=True)
        self.table = LaneTable(database.connect(autocommit=True), "outbox", "me", "0", 600.0)
        self.leases = self.table.acquire(lanes)
        assert len(self.leases) == lanes
        self._sources: list[PollingSource] = []

    def source(self, router: Router = ROUTES, attempts: int = 1, **more: Any) -> PollingSource:
        failures = Failures("outbox", FailurePolicy(attempts, 600.0, 600.0), router)
        source = PollingSource(Connector(self.database.url, "test"), "outbox", failures, **more)
        self._sources.append(source)
        for lease in self.leases:
            source.hold(lease)
        return source

    def limits(self, batch: int = BATCH) -> dict[int, int]:
        """As loop.py has them."""
        each = max(min(batch, batch * 4 // self.count), 1)
        return {lease.lane: each for lease in self.leases}

    def insert(self, count: int, *, keys: int = 5000, kind: str = "Order", first: int = 1) -> None:
        self.admin.execute(
            "INSERT INTO outbox.events (aggregate_type, aggregate_id, event_type, payload) "
            "SELECT %s, 'key-' || g %% %s::int, 'T', jsonb_build_object('n', g) "
            "FROM generate_series(%s::int, %s::int) g",
            (kind, keys, first, first + count - 1),
        )

    def ids(self) -> dict[int, list[int]]:
        """All rows of the outbox, by lane in order."""
        found: dict[int, list[int]] = defaultdict(list)
        for lane, id_ in self.admin.execute("SELECT lane, id FROM outbox.events ORDER BY lane, id").fetchall():
            found[lane].append(id_)
        return dict(found)

    def close(self) -> None:
        for source in self._sources:
            source.close()


@pytest.fixture
def workers(outbox_postgres):
    made: list[Worker] = []

    def make(lanes: int = 4) -> Worker:
        made.append(Worker(outbox_postgres, lanes))
        return made[-1]

    yield make
    for worker in made:
        worker.close()


@pytest.fixture
def quick_marks(monkeypatch):
    """The waits between the steps of a low-water mark are left out, and no full sweep comes in between."""
    monkeypatch.setattr(low_water_mark, "_LOOK_SECONDS", 0.0)
    monkeypatch.setattr(low_water_mark, "_SETTLE_SECONDS", 0.0)
    monkeypatch.setattr(low_water_mark, "_SWEEP_SECONDS", 3600.0)


def published(claims: Sequence[Claim]) -> Receipt:
    return Receipt([(claim, PUBLISHED) for claim in claims])


def settle(source: PollingSource, batches: Batches) -> None:
    assert source.settle({lane: published(claims) for lane, claims in batches.items()}) == {}


def note(seen: dict[int, list[int]], batches: Batches) -> None:
    for lane, claims in batches.items():
        assert all(claim.lane == lane for claim in claims)
        seen.setdefault(lane, []).extend(claim.position for claim in claims)


def drain(source: PollingSource, limits: Mapping[int, int], *, empty: int = 3) -> dict[int, list[int]]:
    """Turns until nothing comes any more; gives what came, by lane. What is read is checked turn by turn."""
    seen: dict[int, list[int]] = {}
    nothing = 0
    while nothing < empty:
        fetched = source.fetch(limits)
        assert fetched.failed == {}
        nothing = 0 if fetched.batches else nothing + 1
        assert all(len(batch) <= limits[lane] for lane, batch in fetched.batches.items())
        note(seen, fetched.batches)
        settle(source, fetched.batches)
    assert source.flush(list(limits)) == {}
    return seen


# --- many rows, many lanes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [True, False], ids=["ahead", "in step"])
@pytest.mark.parametrize("lanes", [4, 256])
def test_25000_rows_leave_once_each_in_order(workers, lanes, overlap):
    worker = workers(lanes)
    worker.insert(25_000)
    there = worker.ids()
    assert drain(worker.source(overlap=overlap), worker.limits()) == there
    assert backlog(worker.database.url) == 0


@pytest.mark.parametrize("lanes", [4, 256])
def test_a_turn_is_two_statements_in_one_round_trip_whatever_the_number_of_lanes(workers, monkeypatch, lanes):
    # But for a look at failures and one at the horizon, each second.
    monkeypatch.setattr("relay.polling.reader._LOOK_SECONDS", 3600.0)
    monkeypatch.setattr(low_water_mark, "_LOOK_SECONDS", 3600.0)
    worker = workers(lanes)
    worker.insert(30_000)
    source = worker.source(overlap=False)
    for _ in range(8):
        settle(source, source.fetch(worker.limits(128)).batches)
    with traced(source.connection) as sent:
        for _ in range(10):
            fetched = source.fetch(worker.limits(128))
            assert len(fetched.batches) == lanes
            settle(source, fetched.batches)
    assert sent["Execute"] + sent["Query"] == 20, sent
    # A pipeline's end is a Sync of its own.
    assert sent["Sync"] <= 30, sent


@contextmanager
def traced(connection: psycopg.Connection[Any]) -> Iterator[dict[str, int]]:
    """Count the messages that libpq sends."""
    counts: dict[str, int] = defaultdict(int)
    with tempfile.TemporaryFile() as file:
        connection.pgconn.trace(file.fileno())
        connection.pgconn.set_trace_flags(psycopg.pq.Trace.SUPPRESS_TIMESTAMPS)
        try:
            yield counts
        finally:
            connection.pgconn.untrace()
            file.seek(0)
            for line in file.read().decode(errors="replace").splitlines():
                if found := re.match(r"F\t\d+\t(\w+)", line):
                    counts[found[1]] += 1


# --- huge events -----------------------------------------------------------------------------------------------------


def insert_huge(worker: Worker, count: int, *, compressible: bool) -> None:
    column = "payload" if compressible else "payload_bytes"
    payload = f'{{"x": "{"x" * EVENT_BYTES}"}}' if compressible else os.urandom(EVENT_BYTES)
    worker.admin.execute(
        f"INSERT INTO outbox.events (aggregate_type, aggregate_id, event_type, {column}) "
        "SELECT 'Order', 'key-' || g, 'T', %s FROM generate_series(1, %s) g",
        (payload, count),
    )


@pytest.mark.parametrize("compressible", [True, False], ids=["compressible", "random"])
@pytest.mark.parametrize("lanes", [4, 256])
def test_600_events_of_900_kb_leave_in_turns_that_fit_into_memory(workers, lanes, compressible):
    worker = workers(lanes)
    insert_huge(worker, 600, compressible=compressible)
    there = worker.ids()
    source = worker.source()
    seen: dict[int, list[int]] = {}
    turns: list[int] = []
    nothing = 0
    while nothing < 20 and sum(map(len, seen.values())) < 600:
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
    assert len(turns) < 80, [size >> 20 for size in turns]


def test_small_events_are_read_at_full_size_again_after_huge_ones(workers):
    worker = workers(256)
    insert_huge(worker, 300, compressible=True)
    worker.insert(30_000)
    there = worker.ids()
    source = worker.source()
    seen: dict[int, list[int]] = {}
    lanes = []
    while sum(map(len, seen.values())) < 30_300:
        fetched = source.fetch(worker.limits())
        assert fetched.batches
        lanes.append(len(fetched.batches))
        note(seen, fetched.batches)
        settle(source, fetched.batches)
    assert seen == there
    assert max(lanes[-10:]) > 200, lanes


# --- reading ahead ---------------------------------------------------------------------------------------------------


def busy(worker: Worker, source: PollingSource, batch: int = 20) -> tuple[Batches, dict[int, list[int]]]:
    """A source in the middle of a drain, with the next turn asked for. Gives this turn, and what was before."""
    seen: dict[int, list[int]] = {}
    for _ in range(3):
        fetched = source.fetch(worker.limits(batch))
        note(seen, fetched.batches)
        settle(source, fetched.batches)
    fetched = source.fetch(worker.limits(batch))
    assert all(len(claims) == batch for claims in fetched.batches.values())
    return fetched.batches, seen


def test_a_lane_lost_while_the_next_turn_is_read_gives_none_of_it(workers):
    worker = workers()
    worker.insert(2000)
    there = worker.ids()
    source = worker.source()
    batches, seen = busy(worker, source)
    lost = worker.leases[1]
    worker.admin.execute("UPDATE outbox.lanes SET epoch = epoch + 1, protocol_epoch = epoch + 1 WHERE lane = 1")
    note(seen, {lane: claims for lane, claims in batches.items() if lane != 1})
    settle(source, batches)
    fetched = source.fetch(worker.limits(20))
    assert list(fetched.failed) == [1]
    assert isinstance(fetched.failed[1], LaneLost)
    assert sorted(fetched.batches) == [0, 2, 3]
    note(seen, fetched.batches)
    settle(source, fetched.batches)
    source.drop(1)
    limits = {lane: limit for lane, limit in worker.limits(20).items() if lane != 1}
    rest = drain(source, limits)
    for lane in (0, 2, 3):
        assert seen[lane] + rest[lane] == there[lane]
    # Taken again, while the others are read ahead: from the first that is not settled.
    source.hold(Lease(1, lost.epoch + 1, 600.0, time.monotonic()))
    assert seen[1] + drain(source, worker.limits(20))[1] == there[1]
    assert backlog(worker.database.url) == 0


def test_a_lane_dropped_and_held_again_while_the_next_turn_is_read(workers):
    worker = workers()
    worker.insert(2000)
    there = worker.ids()
    source = worker.source()
    batches, seen = busy(worker, source)
    note(seen, {lane: claims for lane, claims in batches.items() if lane != 1})
    settle(source, {lane: claims for lane, claims in batches.items() if lane != 1})
    # What was in hand of it is given up: it was not published.
    source.drop(1)
    source.hold(worker.leases[1])
    rest = drain(source, worker.limits(20))
    assert {lane: seen[lane] + rest[lane] for lane in there} == there


def test_a_failure_recorded_while_the_next_turn_is_read_makes_its_key_wait(workers):
    worker = workers()
    # A few keys, so that there are later events of each in the turn that was read ahead.
    worker.insert(2000, keys=20)
    source = worker.source(attempts=5)
    batches, _ = busy(worker, source)
    lane = 2 if 2 in batches else next(iter(batches))
    bad = batches[lane][0]
    receipts = {
        each: Receipt(
            [
                (claim, Refused("bad") if claim is bad else PUBLISHED)
                for claim in claims
                if claim is bad or claim.aggregate_id != bad.aggregate_id
            ]
        )
        for each, claims in batches.items()
    }
    assert source.settle(receipts) == {}
    rest = drain_claims(source, worker.limits(20))
    assert not [claim for claim in rest if claim.aggregate_id == bad.aggregate_id]
    left = worker.admin.execute("SELECT DISTINCT aggregate_id FROM outbox.events").fetchall()
    assert left == [(bad.aggregate_id,)]
    worker.admin.execute("UPDATE outbox.failures SET next_attempt_at = now()")
    after = [claim.position for claim in drain_claims(source, worker.limits(20))]
    assert after[0] == bad.position
    assert after == sorted(after)
    assert backlog(worker.database.url) == 0


def drain_claims(source: PollingSource, limits: Mapping[int, int]) -> list[Claim]:
    claims: list[Claim] = []
    nothing = 0
    while nothing < 3:
        fetched = source.fetch(limits)
        assert fetched.failed == {}
        nothing = 0 if fetched.batches else nothing + 1
        claims += [claim for batch in fetched.batches.values() for claim in batch]
        settle(source, fetched.batches)
    assert source.flush(list(limits)) == {}
    return claims


def test_kinds_left_out_while_the_next_turn_is_read_come_again_in_order(workers):
    worker = workers()
    for first in range(1, 4001, 100):
        worker.insert(50, first=first)
        worker.insert(50, kind="Cart", first=first + 50)
    there = worker.ids()
    cart = {id_ for (id_,) in worker.admin.execute("SELECT id FROM outbox.events WHERE aggregate_type = 'Cart'")}
    source = worker.source()
    seen: dict[int, list[int]] = {}
    batches, seen = busy(worker, source)
    # The topic of the carts can't be written to: they are not sent.
    good = {lane: [claim for claim in claims if claim.aggregate_type == "Order"] for lane, claims in batches.items()}
    note(seen, good)
    source.settle(
        {lane: Receipt([(claim, PUBLISHED) for claim in claims], left_out=True) for lane, claims in good.items()}
    )
    source.leave_out(frozenset({("Cart", False)}))
    while_left_out = drain(source, worker.limits(20))
    for lane, ids in while_left_out.items():
        assert not cart & set(ids)
        seen[lane] += ids
    assert {id_ for ids in worker.ids().values() for id_ in ids} <= cart
    source.leave_out(frozenset())
    rest = drain(source, worker.limits(20))
    for lane, ids in there.items():
        came = seen[lane] + rest[lane]
        assert sorted(came) == ids
        for kind in (cart, set(ids) - cart):
            assert [id_ for id_ in came if id_ in kind] == [id_ for id_ in ids if id_ in kind]
    assert backlog(worker.database.url) == 0


@pytest.mark.parametrize("known", ["nothing", "a part"])
def test_what_was_not_sent_of_a_turn_comes_before_what_was_read_ahead(workers, known):
    """The broker refused something, and all or some of the turn was not sent."""
    worker = workers()
    worker.insert(2000)
    there = worker.ids()
    source = worker.source()
    batches, seen = busy(worker, source)
    receipts = {}
    if known == "a part":
        receipts = {lane: published(claims[:3]) for lane, claims in batches.items()}
        note(seen, {lane: claims[:3] for lane, claims in batches.items()})
    assert source.settle(receipts) == {}
    rest = drain(source, worker.limits(20))
    assert {lane: seen[lane] + rest[lane] for lane in there} == there
    assert backlog(worker.database.url) == 0


def test_a_source_is_closed_while_the_next_turn_is_read(workers):
    worker = workers()
    worker.insert(2000)
    source = worker.source()
    busy(worker, source)
    source.close()
    source.close()
    again = worker.source()
    assert sum(map(len, drain(again, worker.limits(20)).values())) == backlog_before(worker)


def backlog_before(worker: Worker) -> int:
    # Three turns of twenty from each of four lanes were settled, of which the last went with the fourth read.
    return 2000 - 3 * 4 * 20


class Kafka:
    """A publisher that refuses the batch that holds ``bad``, all of it, until it is alone."""

    def __init__(self, sent: list[Claim], bad: Collection[int]) -> None:
        self._sent = sent
        self._bad = bad

    def join(self, _leases: Sequence[Lease]) -> dict[int, OutboxError]:
        return {}

    def publish(self, batches: Batches, _confirm: Confirm | None = None) -> Sent:
        blamed = [n for n, claims in batches.items() if any(claim.position in self._bad for claim in claims)]
        if blamed:
            return Failed(BatchRefused("the broker refuses something"), blamed=blamed)
        for claims in batches.values():
            self._sent += claims
        return Completed({n: published(claims) for n, claims in batches.items()})

    def paused(self) -> frozenset[Kind]:
        return frozenset()

    def serve(self) -> None: ...
    def close(self) -> None: ...


class Watcher:
    def __init__(self) -> None:
        self.refusals: list[int] = []

    def published(self, count: int) -> None: ...
    def recovered(self, lanes: Collection[int]) -> None: ...
    def unavailable(self, lanes: Collection[int], error: Exception, wait_seconds: float) -> None: ...
    def refused(self, lane: int, claim: Claim, reason: str) -> None:
        self.refusals.append(claim.position)


@contextmanager
def looped(worker: Worker, publisher: Any, watcher: Watcher, *, batch: int = 50, **more: Any) -> Iterator[None]:
    """The product's own loop, over a publisher of the test's."""
    stop, held = threading.Event(), HeldLanes()
    held.give(worker.leases)
    failures = Failures("outbox", FailurePolicy(100, 600.0, 600.0), ROUTES)
    loop = WorkerLoop(
        lambda: PollingSource(Connector(worker.database.url, "loop"), "outbox", failures, **more),
        lambda _source: publisher,
        held=held,
        stop=stop,
        observer=watcher,
        settings=LoopSettings(batch_size=batch, min_backoff_seconds=0.001, max_backoff_seconds=0.001),
    )
    errors: list[BaseException] = []

    def run() -> None:
        try:
            loop.run()
        except BaseException as error:  # noqa: BLE001  raised again below
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(60 * patience())
        if errors:
            raise errors[0]
        assert not thread.is_alive()


def test_bad_events_in_a_backlog_are_found_and_no_key_is_out_of_order(workers):
    worker = workers()
    worker.insert(4000, keys=400)
    there = worker.ids()
    bad = {ids[number] for ids in there.values() for number in (0, 333, 650)}
    sent: list[Claim] = []
    watcher = Watcher()
    bad_keys = {
        key for (key,) in worker.admin.execute("SELECT aggregate_id FROM outbox.events WHERE id = ANY(%s)", [list(bad)])
    }
    with looped(worker, Kafka(sent, bad), watcher):
        wait_until(lambda: bad <= set(watcher.refusals), 60, "the bad ones to be found")
        left = "SELECT count(*) FROM outbox.events WHERE NOT aggregate_id = ANY(%s)"
        wait_until(lambda: worker.admin.execute(left, [list(bad_keys)]).fetchone() == (0,), 60, "the others to go")
    assert len({claim.position for claim in sent}) == len(sent)
    by_key: dict[str, list[int]] = defaultdict(list)
    for claim in sent:
        by_key[claim.aggregate_id].append(claim.position)
    assert all(ids == sorted(ids) for ids in by_key.values())
    first_bad = dict(
        worker.admin.execute("SELECT aggregate_id, min(id) FROM outbox.failures GROUP BY aggregate_id").fetchall()
    )
    assert first_bad.keys() == bad_keys
    assert not [claim for claim in sent if claim.position > first_bad.get(claim.aggregate_id, 1 << 60)]


def test_what_a_person_puts_back_is_seen_in_the_middle_of_a_drain(workers, quick_marks):
    worker = workers()
    source = worker.source(Router({"Order": Route("orders", OnFailure.SKIP)}))
    with worker.database.connect() as connection:
        Outbox().add(connection, Event("Order", "skipped", "bad"))
    ((lane, (claim,)),) = source.fetch(worker.limits()).batches.items()
    source.settle({lane: Receipt([(claim, Refused("bad"))])})
    worker.insert(40_000)
    settle(source, source.fetch(worker.limits(4)).batches)
    # Until the source has seen that the lane has no failures any more, and reads ahead.
    while source.reader.has_failures(lane) or source.session.ahead is None:
        settle(source, source.fetch(worker.limits(4)).batches)
    assert len(DeadLetters(worker.admin, "outbox").retry(Selection())) == 1
    began = time.monotonic()
    while True:
        fetched = source.fetch(worker.limits(4))
        settle(source, fetched.batches)
        assert fetched.batches, "the drain is over"
        if any(each.position == claim.position for batch in fetched.batches.values() for each in batch):
            break
        assert time.monotonic() - began < 10 * patience()


# --- waiting ---------------------------------------------------------------------------------------------------------


def test_an_idle_worker_hears_of_a_commit_within_milliseconds_and_not_of_other_tables(workers):
    worker = workers(256)
    source = worker.source()
    lanes, stop = list(worker.limits()), threading.Event()
    drain(source, worker.limits())
    worker.admin.execute("CREATE TABLE other (n int)")
    times: list[float] = []
    for number in range(15):
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


def test_an_idle_worker_asks_a_few_times_a_second(workers):
    worker = workers(256)
    source = worker.source()
    drain(source, worker.limits())
    with traced(source.connection) as sent:
        began = time.monotonic()
        while time.monotonic() - began < 3.0:
            # The loop's own: a wait of a tenth of a second, a fetch when it says so.
            if source.wait(list(worker.limits()), 0.1, threading.Event()):
                source.fetch(worker.limits())
    asked = sent["Query"] + sent["Execute"]
    assert asked / 3.0 < 12, sent


# --- what waits ------------------------------------------------------------------------------------------------------


def test_1000_events_that_were_put_back_leave_in_batches(workers):
    worker = workers()
    source = worker.source(attempts=1)
    worker.insert(1000, keys=1000)
    while batches := source.fetch(worker.limits()).batches:
        source.settle({lane: Receipt([(claim, Refused("bad")) for claim in each]) for lane, each in batches.items()})
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
    insert_huge(worker, 200, compressible=True)
    while batches := source.fetch(worker.limits()).batches:
        source.settle({lane: Receipt([(claim, Refused("bad")) for claim in each]) for lane, each in batches.items()})
    assert len(DeadLetters(worker.admin, "outbox").retry(Selection())) == 200
    seen: dict[int, list[int]] = {}
    turns: list[int] = []
    while sum(map(len, seen.values())) < 200:
        batches = source.fetch(worker.limits()).batches
        turns.append(sum(len(claim.value) for batch in batches.values() for claim in batch))
        note(seen, batches)
        settle(source, batches)
        assert len(turns) < 100, turns
    source.flush(list(worker.limits()))
    assert max(turns) <= TURN_BYTES, [size >> 20 for size in turns]
    assert backlog(worker.database.url) == 0


@pytest.mark.parametrize("others", [True, False], ids=["others go on", "quiet"])
def test_a_blocked_key_with_100000_events_is_not_read_by_every_fetch(workers, quick_marks, others):
    worker = workers()
    source = worker.source()
    worker.insert(1, keys=1)
    ((lane, (claim,)),) = source.fetch(worker.limits()).batches.items()
    source.settle({lane: Receipt([(claim, Refused("bad"))])})
    worker.insert(100_000, keys=1)

    def read_rows() -> int:
        source.connection.execute("SELECT pg_stat_force_next_flush()")
        query = "SELECT idx_tup_fetch FROM pg_stat_user_tables WHERE relid = 'outbox.events'::regclass"
        return worker.admin.execute(query).fetchone()[0]

    def fetch() -> int:
        before = read_rows()
        if others:
            worker.insert(20, first=1)
        settle(source, source.fetch(worker.limits()).batches)
        return read_rows() - before

    wait_until(lambda: fetch() < 2000, 60, "the mark to rise above what waits")
    assert max(fetch() for _ in range(5)) < 2000
    assert DeadLetters(worker.admin, "outbox").discard(Selection(), "test")
    rest = drain(source, worker.limits())
    assert len([id_ for ids in rest.values() for id_ in ids]) >= 100_000
    assert backlog(worker.database.url) == 0


def test_a_retry_of_a_blocked_key_does_not_read_the_100000_events_behind_it(workers, quick_marks):
    """Nor does a failure of another key, and its end: of what is below the mark, only what comes behind it may go."""
    worker = workers()
    source = worker.source(attempts=1000)
    worker.insert(1, keys=1)
    refuse(source, source.fetch(worker.limits()).batches)
    worker.insert(100_000, keys=1)

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
    assert len([id_ for ids in rest.values() for id_ in ids]) >= 100_000
    assert backlog(worker.database.url) == 0


def refuse(source: PollingSource, batches: Batches) -> None:
    """The first event of each key is refused, the others behind it are not sent."""
    receipts = {}
    for lane, batch in batches.items():
        first = {claim.aggregate_id: claim for claim in reversed(batch)}
        receipts[lane] = Receipt([(claim, Refused("bad")) for claim in first.values()])
    assert source.settle(receipts) == {}
