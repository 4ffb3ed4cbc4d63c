"""Failed events on real Postgres: the source's books, what a person does with them, and replays. No Kafka here."""

from __future__ import annotations

import datetime as dt
import json
import random
import re
import threading
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest
from one_lane import OneLane
from psycopg import sql
from support import backlog, wait_until
from typer.testing import CliRunner

from outbox import Event, Outbox
from outbox._app import migrate as db
from outbox.errors import OutboxError
from relay.cli.app import app
from relay.database import Connector, StandingError
from relay.kafka.routing import OnFailure, Route, Router
from relay.lanes import LaneTable
from relay.lease import HeldLanes, Lease
from relay.loop import LoopSettings, WorkerLoop
from relay.operations.dead_letters import DeadLetters, Selection
from relay.polling import low_water_mark
from relay.polling.at_most_once import AtMostOnceSource
from relay.polling.source import PollingSource
from relay.ports import (
    PUBLISHED,
    Batches,
    Claim,
    Completed,
    Confirm,
    DatabaseUnavailable,
    Kind,
    Published,
    Receipt,
    Refused,
    Sent,
)
from relay.retries import FailurePolicy, Failures

BLOCK = Router({"Order": Route("orders")})
SKIP = Router({"Order": Route("orders", OnFailure.SKIP)})
COPIED = Router({"Order": Route("orders", OnFailure.BLOCK, "orders-dead")})
NOBODY = "019f0000-0000-7000-8000-000000000000"


class Lane:
    """The only lane of an outbox, and a loop that a test turns by hand: names in ``bad`` are refused."""

    def __init__(self, database: Any) -> None:
        self.database = database
        db.change_lanes(database.url, 1)
        self.admin = database.connect(autocommit=True)
        (self.lease,) = LaneTable(database.connect(autocommit=True), "outbox", "me", "0", 600.0).acquire()
        self.dead: list[str] = []
        self.lost: list[int] = []
        self._sources: list[OneLane] = []

    def polling(self, failures: Failures, *, archive: bool = False, overlap: bool = True) -> PollingSource:
        return PollingSource(
            Connector(self.database.url, "test"),
            "outbox",
            failures,
            archive=archive,
            on_dead=lambda _lane, claim: self.dead.append(name(claim)),
            overlap=overlap,
        )

    def source(self, router: Router = BLOCK, attempts: int = 1, *, archive: bool = False) -> OneLane:
        failures = Failures("outbox", FailurePolicy(attempts, 600.0, 600.0), router)
        return self._held(self.polling(failures, archive=archive))

    def deleting_source(self, router: Router = BLOCK) -> OneLane:
        failures = Failures("outbox", FailurePolicy(), router)
        source = AtMostOnceSource(
            self.polling(failures, overlap=False),
            failures,
            on_lost=lambda _lane, count: self.lost.append(count),
            on_dead=lambda _lane, claim: self.dead.append(name(claim)),
        )
        return self._held(source)

    def _held(self, source: PollingSource | AtMostOnceSource) -> OneLane:
        self._sources.append(OneLane(source, self.lease))
        return self._sources[-1]

    def add(self, *names: str) -> list[str]:
        """Write events called key-number, as in a1; gives their event ids."""
        with self.database.connect() as connection:
            events = [Event("Order", name[0], name, {"n": name}) for name in names]
            return [str(event_id) for event_id in Outbox().add_many(connection, events)]

    def desk(self) -> DeadLetters:
        return DeadLetters(self.admin, "outbox")

    def rows(self, query: str, *values: Any) -> list[Any]:
        return self.admin.execute(query, values).fetchall()

    def close(self) -> None:
        for source in self._sources:
            source.close()


@pytest.fixture
def lane(outbox_postgres):
    lane = Lane(outbox_postgres)
    yield lane
    lane.close()


@pytest.fixture
def raise_the_mark(lane, monkeypatch):
    """Let a source read from far above, as one does that has run for long: the waits between the steps are left out."""
    monkeypatch.setattr(low_water_mark, "_LOOK_SECONDS", 0.0)
    monkeypatch.setattr(low_water_mark, "_SETTLE_SECONDS", 0.0)

    def risen(source: OneLane) -> bool:
        turn(source)
        turn(source)
        # A row with an id that nobody reads any more.
        lane.admin.execute(
            "INSERT INTO outbox.events (id, aggregate_type, aggregate_id, event_type) OVERRIDING SYSTEM VALUE "
            "VALUES (-1, 'Order', 'probe', 'probe')"
        )
        seen = source.fetch(100)
        lane.admin.execute("DELETE FROM outbox.events WHERE id = -1")
        return not seen

    def raise_it(source: OneLane) -> None:
        lane.add("z1")
        wait_until(lambda: risen(source), what="the mark to rise")

    return raise_it


def name(claim: Claim) -> str:
    return claim.event_type


def turn(source: OneLane, *bad: str, limit: int = 100) -> list[str]:
    """Turns of the loop, settled, until something is published; gives what. Those that are due come in turns of their
    own, with turns of the others between, so two turns show both.
    """
    return half(source, *bad, limit=limit) or half(source, *bad, limit=limit)


def half(source: OneLane, *bad: str, limit: int = 100) -> list[str]:
    claims = source.fetch(limit)
    stopped: set[str] = set()
    results: list[Any] = []
    for claim in claims:
        if claim.aggregate_id in stopped:
            continue
        if name(claim) in bad:
            stopped.add(claim.aggregate_id)
            results.append((claim, Refused(f"{name(claim)} is bad")))
        else:
            results.append((claim, PUBLISHED))
    if claims:
        source.settle(Receipt(results))
    source.flush()
    return [name(claim) for claim, outcome in results if outcome is PUBLISHED]


def turned(source: OneLane) -> list[str]:
    """Turns until something is published, as what a person did may be seen a second later."""
    return wait_until(lambda: turn(source), what="something to publish")


def hurry(lane: Lane) -> None:
    lane.admin.execute("UPDATE outbox.failures SET next_attempt_at = clock_timestamp() WHERE isfinite(next_attempt_at)")


def outbox(lane: Lane, *arguments: str, status: int = 0, env: dict[str, str] | None = None) -> str:
    """Run a command; gives its stdout, or its one line of stderr when it must fail."""
    done = CliRunner().invoke(app, [*arguments], env={"OUTBOX_DATABASE_URL": lane.database.url} | (env or {}))
    assert done.exit_code == status, (done.output, done.exception)
    assert done.exception is None or isinstance(done.exception, SystemExit)
    return done.stdout if status == 0 else done.stderr


def retried(lane: Lane, *event_ids: str) -> Sequence[str]:
    return lane.desk().retry(Selection(event_ids or None))


# --- the source's books ----------------------------------------------------------------------------------------------


def test_a_refused_event_makes_its_key_wait_and_no_other(lane):
    source = lane.source(attempts=3)
    lane.add("a1", "b1", "a2", "c1")
    assert turn(source, "a1") == ["b1", "c1"]
    lane.add("a3", "b2")
    assert turn(source) == ["b2"]
    assert turn(source) == []
    hurry(lane)
    assert turn(source) == ["a1"]
    assert turn(source) == ["a2", "a3"]
    assert backlog(lane.database.url) == 0
    assert lane.rows("SELECT * FROM outbox.failures") == []


def test_the_same_id_under_another_aggregate_type_is_another_key(lane):
    source = lane.source(attempts=3)
    with lane.database.connect() as connection:
        Outbox().add_many(connection, [Event("Order", "x", "o1"), Event("Cart", "x", "c1"), Event("Order", "x", "o2")])
    claims = source.fetch(10)
    source.settle(Receipt([(claims[0], Refused("no"))]))
    assert turn(source) == ["c1"]


def test_attempts_back_off_twice_as_long_each_time_up_to_the_longest(lane):
    failures = Failures("outbox", FailurePolicy(100, 200.0, 900.0), BLOCK)
    source = OneLane(lane.polling(failures), lane.lease)
    lane.add("a1")
    waits = []
    for _ in range(5):
        assert turn(source, "a1") == []
        waits += lane.rows("SELECT extract(epoch FROM next_attempt_at - last_failed_at)::float8 FROM outbox.failures")
        hurry(lane)
    source.close()
    assert [round(wait) for (wait,) in waits] == [200, 400, 800, 900, 900]
    assert lane.rows("SELECT attempts, last_error FROM outbox.failures") == [(5, "a1 is bad")]


def test_the_last_attempt_makes_a_dead_letter_and_with_block_its_key_waits(lane):
    source = lane.source(attempts=2)
    (first, *_) = lane.add("a1", "a2", "b1")
    assert turn(source, "a1") == ["b1"]
    hurry(lane)
    assert turn(source, "a1") == []
    assert lane.dead == ["a1"]
    dead = lane.rows("SELECT event_id::text, event_type, payload, attempts, last_error FROM outbox.dead_letters")
    assert dead == [(first, "a1", {"n": "a1"}, 2, "a1 is bad")]
    hurry(lane)
    assert turn(source) == []
    lane.add("a3", "b2")
    assert turn(source) == ["b2"]
    # Also for the next relay.
    assert turn(lane.source()) == []


def test_with_skip_later_events_wait_while_it_is_tried_and_go_on_when_it_is_dead(lane):
    source = lane.source(SKIP, attempts=2)
    lane.add("a1", "a2")
    assert turn(source, "a1") == []
    assert turn(source) == []
    hurry(lane)
    assert turn(source, "a1") == ["a2"]
    assert lane.rows("SELECT event_type FROM outbox.dead_letters") == [("a1",)]
    assert lane.rows("SELECT * FROM outbox.failures") == []


def test_published_events_of_the_batch_are_settled_with_the_refused_ones_in_one_transaction(lane, monkeypatch):
    source = lane.source()
    lane.add("a1", "b1")
    claims = source.fetch(10)
    source.settle(Receipt([(claims[1], PUBLISHED)]))
    monkeypatch.setattr(Failures, "record", lambda *_: (_ for _ in ()).throw(psycopg.OperationalError("gone")))
    with pytest.raises(Exception, match="gone"):
        source.settle(Receipt([(claims[0], Refused("no"))]))
    assert backlog(lane.database.url) == 2
    assert lane.rows("SELECT * FROM outbox.failures") == []


def test_a_key_with_20000_blocked_events_holds_up_no_other(lane):
    source = lane.source()
    lane.add("a1")
    turn(source, "a1")
    lane.admin.execute(
        "INSERT INTO outbox.events (aggregate_type, aggregate_id, event_type, payload) "
        "SELECT 'Order', 'a', 'a' || g, '{}' FROM generate_series(2, 20001) g"
    )
    lane.add("b1", "c1", "a20002", "b2")
    assert turn(source, limit=2) == ["b1", "c1"]
    assert turn(source, limit=2) == ["b2"]
    assert turn(source) == []
    assert backlog(lane.database.url) == 20001
    retried(lane)
    assert turn(source) == ["a1"]
    assert turn(source, limit=3) == ["a2", "a3", "a4"]


def test_the_longest_key_there_can_be_fails_dies_returns_is_archived_and_replayed(lane):
    """4,000 bytes that no compression makes shorter: a btree has no room for them."""
    key = "".join(random.Random(1).choices([chr(code) for code in range(0x20000, 0x2A6DF)], k=1000))
    source = lane.source(attempts=2, archive=True)
    with lane.database.connect() as connection:
        Outbox().add_many(connection, [Event("Order", key, "long1"), Event("Order", key, "long2")])
    lane.add("a1")
    assert turn(source, "long1") == ["a1"]
    hurry(lane)
    assert turn(source, "long1") == []
    assert lane.dead == ["long1"]
    retried(lane)
    assert turn(source) == ["long1"]
    assert turn(source) == ["long2"]
    assert json.loads(outbox(lane, "replay", "--aggregate", f"Order/{key}", "--yes", "--json"))["sent"] == 2
    assert turn(source) == ["long1", "long2"]


class Watcher:
    """A publisher that publishes everything, and an observer."""

    def __init__(self) -> None:
        self.sent: list[str] = []
        self.errors: list[str] = []
        self.raised: list[Exception] = []

    def join(self, _leases: Sequence[Lease]) -> dict[int, OutboxError]:
        return {}

    def publish(self, batches: Batches, _confirm: Confirm | None = None) -> Sent:
        self.sent += [name(claim) for claims in batches.values() for claim in claims]
        return Completed({n: Receipt([(claim, PUBLISHED) for claim in claims]) for n, claims in batches.items()})

    def paused(self) -> frozenset[Kind]:
        return frozenset()

    def serve(self) -> None: ...
    def close(self) -> None: ...
    def published(self, count: int) -> None: ...
    def refused(self, lane: int, claim: Claim, reason: str) -> None: ...
    def recovered(self, lanes: Collection[int]) -> None: ...
    def unavailable(self, lanes: Collection[int], error: Exception, wait_seconds: float) -> None:
        self.raised.append(error)
        self.errors.append(str(error))


@pytest.mark.parametrize(
    ("obstacle", "removed", "error"),
    [
        (
            "CREATE INDEX mine ON outbox.published_default (headers)",
            "DROP INDEX outbox.mine",
            r"exceeds btree .*\(table outbox.published_default\): trying again does not mend it",
        ),
        (
            "ALTER TABLE outbox.published ADD CONSTRAINT short CHECK (octet_length(headers::text) < 3000)",
            "ALTER TABLE outbox.published DROP CONSTRAINT short",
            r"violates check constraint .*\(table outbox.published_default\): trying again does not mend it",
        ),
        (
            # The role's limit on statements is too short for this one: not told apart from somebody who cancels.
            """
            CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
                IF NEW.event_type = 'long' THEN RAISE query_canceled; END IF; RETURN NEW; END $$;
            CREATE TRIGGER slow BEFORE INSERT ON outbox.published_default FOR EACH ROW EXECUTE FUNCTION slow()""",
            "DROP FUNCTION slow CASCADE",
            "query_canceled",
        ),
    ],
    ids=["limit", "constraint", "cancelled"],
)
def test_what_can_not_be_settled_stops_the_lane_and_is_sent_once(lane, obstacle, removed, error):
    watcher = Watcher()
    sent, errors = watcher.sent, watcher.errors
    stop = threading.Event()
    held = HeldLanes()
    held.give([lane.lease])
    loop = WorkerLoop(
        lambda: lane.polling(Failures("outbox", FailurePolicy(1, 600.0, 600.0), BLOCK), archive=True),
        lambda _source: watcher,
        held=held,
        stop=stop,
        observer=watcher,
        settings=LoopSettings(min_backoff_seconds=0.001, max_backoff_seconds=0.001),
    )
    lane.admin.execute(obstacle)
    lane.add("a1")
    text = "".join(random.Random(1).choices("abcdefghijklmnopqrstuvwxyz0123456789", k=5000))
    with lane.database.connect() as connection:
        bad = Outbox().add(connection, Event("Order", "b", "long", headers={"text": text}))
    lane.add("c1")
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(loop.run)
        try:
            wait_until(lambda: len(errors) >= 5, what="errors")
            assert sent == ["a1", "long", "c1"]
            assert re.search(error, errors[-1])
            assert set(map(type, watcher.raised)) == {
                DatabaseUnavailable if error == "query_canceled" else StandingError
            }
            if error != "query_canceled":
                # Those before it are settled.
                assert errors[-1].startswith(f"event {bad} is published, and stays behind: Postgres, settling lane 0: ")
                assert lane.rows("SELECT event_type FROM outbox.published") == [("a1",)]
            lane.admin.execute(removed)
            wait_until(lambda: lane.rows("SELECT count(*) FROM outbox.published") == [(3,)], what="the archive")
        finally:
            stop.set()
        running.result(60)
    assert sent == ["a1", "long", "c1"]
    assert backlog(lane.database.url) == 0


def test_two_failed_events_of_one_key_are_published_one_after_the_other(lane):
    source = lane.source(attempts=5)
    lane.add("a1", "a2", "a3")
    turn(source, "a1")
    hurry(lane)
    assert turn(source) == ["a1"]
    assert turn(source, "a2") == []
    hurry(lane)
    assert turn(source) == ["a2"]
    assert turn(source) == ["a3"]


# --- retry -----------------------------------------------------------------------------------------------------------


def test_a_retried_dead_letter_goes_first_and_the_events_behind_it_follow(lane):
    source = lane.source()
    (first, *_) = lane.add("a1", "a2", "b1")
    turn(source, "a1")
    lane.add("a3")
    assert retried(lane, first) == [first]
    assert lane.rows("SELECT * FROM outbox.dead_letters") == []
    assert turn(source) == ["a1"]
    assert turn(source) == ["a2", "a3"]
    assert lane.rows("SELECT * FROM outbox.failures") == []


def test_a_retried_dead_letter_below_the_mark_goes_first(lane, raise_the_mark):
    """A relay that has run for long starts its reads above old ids; only due failures may lie below."""
    source = lane.source()
    lane.add("a1", "a2")
    turn(source, "a1")
    raise_the_mark(source)
    retried(lane)
    assert turned(source) == ["a1"]
    assert turned(source) == ["a2"]


def test_a_skipped_dead_letter_that_is_retried_goes_out_late_and_frees_its_key(lane):
    """The source has no failures when it comes back, and may have looked a moment ago."""
    source = lane.source(SKIP)
    lane.add("a1", "a2")
    half(source, "a1")
    assert turn(source) == ["a2"]
    # The source sees at some time that there are none any more.
    wait_until(lambda: turn(source) == [] and not source.source.reader.has_failures(0))
    retried(lane)
    assert turned(source) == ["a1"]
    assert lane.rows("SELECT * FROM outbox.failures") == []
    lane.add("a3")
    assert turned(source) == ["a3"]


def test_a_skipped_dead_letter_below_the_mark_is_found_when_it_is_retried(lane, raise_the_mark):
    source = lane.source(SKIP)
    lane.add("a1", "a2")
    half(source, "a1")
    turn(source)
    raise_the_mark(source)
    retried(lane)
    assert turned(source) == ["a1"]


def test_a_retry_begins_to_count_anew_and_may_fail_again(lane):
    source = lane.source(attempts=2)
    lane.add("a1", "a2")
    turn(source, "a1")
    hurry(lane)
    turn(source, "a1")
    retried(lane)
    assert turn(source, "a1") == []
    assert lane.rows("SELECT attempts FROM outbox.failures") == [(1,)]
    hurry(lane)
    assert turn(source, "a1") == []
    assert lane.dead == ["a1", "a1"]
    assert turn(source) == []


def test_a_waiting_event_that_is_retried_is_due_at_once_and_keeps_its_count(lane):
    source = lane.source(attempts=3)
    (first, *_) = lane.add("a1", "a2")
    turn(source, "a1")
    assert turn(source) == []
    assert retried(lane, first) == [first]
    assert turn(source, "a1") == []
    assert lane.rows("SELECT attempts FROM outbox.failures") == [(2,)]


def test_a_relay_that_was_killed_before_it_settled_a_retried_event_leaves_it_to_the_next(lane):
    source = lane.source()
    lane.add("a1", "a2")
    turn(source, "a1")
    retried(lane)
    assert [name(claim) for claim in source.fetch(10)] == ["a1"]
    source.close()
    after = lane.source()
    assert turn(after) == ["a1"]
    assert turn(after) == ["a2"]


# --- discard ---------------------------------------------------------------------------------------------------------


def test_discarding_a_dead_letter_frees_its_key_and_the_audit_says_who_and_why(lane):
    source = lane.source()
    (first, *_) = lane.add("a1", "a2")
    turn(source, "a1")
    assert turn(source) == []
    gone = lane.desk().discard(Selection([first]), "wrong customer")
    assert [event["event_id"] for event in gone] == [first]
    assert turn(source) == ["a2"]
    ((who, what, why, details),) = lane.rows("SELECT who, what, why, details FROM outbox.audit")
    ((me,),) = lane.rows("SELECT session_user::text")
    assert (who, what, why) == (me, "discard", "wrong customer")
    assert details["event_id"] == first
    assert details["last_error"] == "a1 is bad"
    assert (details["payload"], details["payload_base64"]) == ({"n": "a1"}, None)


def test_discarding_an_event_that_waits_frees_its_key_and_one_that_is_due_is_left_alone(lane):
    source = lane.source(attempts=9)
    lane.add("a1", "a2", "b1")
    turn(source, "a1", "b1")
    lane.admin.execute(
        "UPDATE outbox.failures SET next_attempt_at = clock_timestamp() "
        "+ CASE aggregate_id WHEN 'a' THEN interval '10 minutes' ELSE interval '1 second' END"
    )
    gone = lane.desk().discard(Selection(), "all of them")
    assert [event["event_type"] for event in gone] == ["a1"]
    lane.admin.execute("UPDATE outbox.failures SET next_attempt_at = clock_timestamp() + interval '10 minutes'")
    assert turn(source) == ["a2"]
    hurry(lane)
    assert turn(source) == ["b1"]
    assert lane.rows("SELECT * FROM outbox.failures") == []


# --- copies ----------------------------------------------------------------------------------------------------------


def copies(lane: Lane) -> list[Any]:
    return lane.rows("SELECT payload, payload_bytes, headers FROM outbox.events WHERE headers ? 'outbox-dead-letter'")


def test_a_copy_for_the_dead_letter_topic_has_all_of_the_event_and_says_why(lane):
    source = lane.source(COPIED)
    with lane.database.connect() as connection:
        Outbox().add(connection, Event("Order", "a", "a1", {"n": 1}, headers={"tenant": "acme"}))
    half(source, "a1")
    (copy,) = source.fetch(10)
    assert (copy.aggregate_id, copy.event_type, json.loads(copy.value)) == ("a", "a1", {"n": 1})
    assert copy.headers == {"tenant": "acme", "outbox-dead-letter": "a1 is bad", "outbox-attempts": "1"}
    assert COPIED.topic(copy) == "orders-dead"


def test_a_copy_waits_for_nobody_and_blocks_nobody(lane):
    source = lane.source(COPIED, attempts=1)
    lane.add("a1", "a2", "b1")
    turn(source, "a1")
    (copy,) = source.fetch(10)
    source.settle(Receipt([(copy, Refused("no such topic"))]))
    assert turn(source) == []
    # The copy is a dead letter without a copy of its own, and holds nothing up.
    assert lane.rows("SELECT count(*) FROM outbox.dead_letters") == [(2,)]
    assert copies(lane) == []
    lane.desk().discard(Selection(), "both")
    assert turn(source) == ["a2"]


def test_a_copy_that_is_tried_again_does_not_hold_its_key_up(lane):
    source = lane.source(Router({"Order": Route("orders", OnFailure.SKIP, "orders-dead")}), attempts=2)
    lane.add("a1")
    turn(source, "a1")
    hurry(lane)
    # The turn of those that are due, and not yet the one of the copy.
    assert half(source, "a1") == []
    (copy,) = source.fetch(10)
    source.settle(Receipt([(copy, Refused("not now"))]))
    lane.add("a2")
    assert turn(source) == ["a2"]


def test_a_copy_that_died_and_is_retried_does_not_hold_its_key_up(lane):
    source = lane.source(Router({"Order": Route("orders", OnFailure.SKIP, "orders-dead")}), attempts=1)
    lane.add("a1")
    half(source, "a1")
    (copy,) = source.fetch(10)
    source.settle(Receipt([(copy, Refused("not now"))]))
    lane.rows("DELETE FROM outbox.dead_letters WHERE NOT coalesce(headers ? 'outbox-dead-letter', false) RETURNING 1")
    retried(lane)
    lane.admin.execute("UPDATE outbox.failures SET next_attempt_at = clock_timestamp() + interval '1 hour'")
    lane.add("a2")
    assert turn(source) == ["a2"]


@pytest.mark.parametrize("payload", [{"text": "x" * 997_000}, b"x" * 999_000], ids=["json", "bytes"])
def test_a_copy_that_would_be_too_large_leaves_the_payload_behind_and_says_so(lane, payload):
    source = lane.source(COPIED)
    with lane.database.connect() as connection:
        Outbox().add(connection, Event("Order", "a", "a1", payload, headers={"tenant": "acme"}))
    claims = source.fetch(10)
    source.settle(Receipt([(claims[0], Refused('ü"\\' * 1000))]))
    ((json_, bytes_, headers),) = copies(lane)
    assert (json_, bytes_) == (None, None)
    assert headers["outbox-payload-omitted"] == "true"
    assert headers["tenant"] == "acme"
    ((whole,),) = lane.rows(
        "SELECT coalesce(octet_length(payload::text), octet_length(payload_bytes)) FROM outbox.dead_letters"
    )
    assert whole > 997_000


def test_a_copy_whose_headers_are_too_large_too_leaves_them_behind_as_well(lane):
    source = lane.source(COPIED)
    with lane.database.connect() as connection:
        Outbox().add(connection, Event("Order", "a", "a1", {}, headers={"big": "x" * 999_900}))
    claims = source.fetch(10)
    source.settle(Receipt([(claims[0], Refused('ü"\\' * 1000))]))
    ((_, _, headers),) = copies(lane)
    assert "big" not in headers
    assert headers["outbox-payload-omitted"] == "true"
    assert headers["outbox-attempts"] == "1"
    assert lane.rows("SELECT length(headers->>'big') FROM outbox.dead_letters") == [(999_900,)]


# --- at-most-once ----------------------------------------------------------------------------------------------------


def test_at_most_once_the_rows_are_gone_before_they_are_given_out(lane):
    source = lane.deleting_source()
    lane.add("a1", "b1")
    claims = source.fetch(10)
    assert [name(claim) for claim in claims] == ["a1", "b1"]
    assert backlog(lane.database.url) == 0
    source.settle(Receipt([(claims[0], PUBLISHED)]))
    assert lane.lost == [1]
    assert source.fetch(10) == []


def test_at_most_once_a_refused_event_is_a_dead_letter_at_once_and_can_be_retried(lane):
    source = lane.deleting_source()
    with lane.database.connect() as connection:
        Outbox().add(connection, Event("Order", "a", "a1", {"n": 1}, headers={"tenant": "acme"}))
    (event_id, *_) = lane.add("a2")
    claims = source.fetch(10)
    source.settle(Receipt([(claims[0], Refused("a1 is bad")), (claims[1], PUBLISHED)]))
    assert (lane.dead, lane.lost) == (["a1"], [])
    assert [failure["event_type"] for failure in lane.desk().list(Selection())] == ["a1"]
    lane.add("a3")
    assert [name(claim) for claim in source.fetch(10)] == ["a3"]
    source.settle(Receipt([]))
    retried(lane)
    (again,) = source.fetch(10)
    assert (again.event_id, json.loads(again.value), again.headers) == (
        claims[0].event_id,
        {"n": 1},
        {"tenant": "acme"},
    )
    source.settle(Receipt([(again, PUBLISHED)]))
    assert lane.rows("SELECT * FROM outbox.failures") == []
    lane.add("a4")
    assert wait_until(lambda: [name(claim) for claim in source.fetch(10)]) == ["a4"]
    assert event_id != again.event_id


def test_at_most_once_a_refused_event_has_its_copy_for_the_dead_letter_topic_too(lane):
    source = lane.deleting_source(COPIED)
    lane.add("a1", "a2")
    claims = source.fetch(10)
    source.settle(Receipt([(claims[0], Refused("a1 is bad")), (claims[1], PUBLISHED)]))
    (copy,) = source.fetch(10)
    assert json.loads(copy.value) == {"n": "a1"}
    assert copy.headers["outbox-dead-letter"] == "a1 is bad"
    source.settle(Receipt([(copy, Refused("no such topic"))]))
    assert source.fetch(10) == []


# --- the commands ----------------------------------------------------------------------------------------------------


def test_the_list_shows_what_waits_and_what_is_dead_the_oldest_failure_first(lane):
    assert "no failed events" in outbox(lane, "failures", "list")
    assert json.loads(outbox(lane, "failures", "list", "--json")) == {"failures": []}
    source = lane.source(attempts=2)
    ids = lane.add("a1", "b1", "c1")
    turn(source, "a1", "b1", "c1")
    lane.admin.execute("UPDATE outbox.failures SET next_attempt_at = now() - interval '1 s' WHERE aggregate_id = 'a'")
    turn(source, "a1")
    lines = outbox(lane, "failures", "list").splitlines()
    shown = {line.split()[0]: line for line in lines}
    assert "Order/a" in shown[ids[0]]
    assert "waiting, 1 attempts: b1 is bad" in shown[ids[1]]
    assert "dead, its key waits, 2 attempts: a1 is bad" in shown[ids[0]]
    listed = json.loads(outbox(lane, "failures", "list", "--json"))["failures"]
    assert [failure["event_id"] for failure in listed] == ids
    assert json.loads(outbox(lane, "failures", "list", "--json", "--aggregate-type", "Cart")) == {"failures": []}
    assert len(json.loads(outbox(lane, "failures", "list", "--json", "--limit", "1"))["failures"]) == 1


def test_show_gives_the_payload_as_it_is_and_how_much_waits_behind(lane):
    source = lane.source()
    payload = '{"big": 123456789012345678901234567890, "exact": 0.10000000000000000000001, "ü": "ä"}'
    ((event_id,),) = lane.rows(
        "INSERT INTO outbox.events (aggregate_type, aggregate_id, event_type, payload, headers) "
        "VALUES ('Order', 'a', 'a1', %s, '{\"tenant\": \"acme\"}') RETURNING event_id::text",
        payload,
    )
    lane.add("a2", "a3", "b1")
    turn(source, "a1")
    for arguments in ((), ("--json",)):
        text = outbox(lane, "failures", "show", event_id, *arguments)
        assert "123456789012345678901234567890" in text
        assert "0.10000000000000000000001" in text
        shown = json.loads(text)
        assert shown["headers"] == {"tenant": "acme"}
        assert (shown["state"], shown["events_behind_it"]) == ("dead, its key waits", 2)
    assert outbox(lane, "failures", "show", event_id, "--json").count("\n") == 1


def test_show_gives_bytes_as_hexadecimal_digits_also_of_an_event_that_waits(lane):
    source = lane.source(attempts=2)
    with lane.database.connect() as connection:
        event_id = str(Outbox().add(connection, Event("Order", "a", "a1", b"\x00\xff")))
    turn(source, "a1")
    shown = json.loads(outbox(lane, "failures", "show", event_id))
    assert (shown["state"], shown["payload_bytes"], shown["payload"]) == ("waiting", "00ff", None)


def test_retry_and_discard_want_to_be_told_which(lane):
    for arguments in (("retry",), ("discard", "--reason", "x"), ("retry", "--aggregate-type", "Order")):
        assert "say which: event ids, or --all" in outbox(lane, "failures", *arguments, status=2)
    assert "say which" in outbox(lane, "failures", "retry", NOBODY, "--all", status=2)
    assert "--reason" in outbox(lane, "failures", "discard", "--all", "--reason", " ", status=2)
    done = CliRunner().invoke(app, ["failures", "discard", "--all"])
    assert (done.exit_code, "--reason" in done.stderr) == (2, True)


def test_ids_that_are_not_among_the_failed_ones_are_named(lane):
    assert f"no failed event has the id {NOBODY}" in outbox(lane, "failures", "show", NOBODY, status=1)
    for arguments in (("retry", NOBODY), ("discard", "--reason", "x", NOBODY)):
        line = outbox(lane, "failures", *arguments, status=1)
        assert "not among the failed events" in line
        assert NOBODY in line
    done = CliRunner().invoke(app, ["failures", "retry", "no-uuid"])
    assert done.exit_code == 2
    assert lane.rows("SELECT * FROM outbox.audit") == []
    (healthy,) = lane.add("a1")
    outbox(lane, "failures", "discard", "--reason", "x", healthy, status=1)
    assert backlog(lane.database.url) == 1


def test_all_and_nothing_failed_is_no_error(lane):
    assert "0 events will be tried again" in outbox(lane, "failures", "retry", "--all")
    assert json.loads(outbox(lane, "failures", "discard", "--all", "--reason", "x", "--json")) == {
        "discarded": [],
        "locked": [],
    }
    assert lane.rows("SELECT * FROM outbox.audit") == []


def test_retry_and_discard_by_id_and_by_type(lane):
    source = lane.source(Router())
    ids = lane.add("a1", "b1")
    with lane.database.connect() as connection:
        ids.append(str(Outbox().add(connection, Event("Cart", "c", "c1"))))
    turn(source, "a1", "b1", "c1")
    assert json.loads(outbox(lane, "failures", "retry", ids[0], "--json")) == {"retried": [ids[0]], "locked": []}
    discarded = outbox(lane, "failures", "discard", "--all", "--aggregate-type", "Cart", "--reason", "old", "--json")
    assert json.loads(discarded) == {"discarded": [ids[2]], "locked": []}
    assert "1 events were discarded" in outbox(lane, "failures", "discard", ids[1], "--reason", "old")
    assert [row[0] for row in lane.rows("SELECT what FROM outbox.audit ORDER BY id")] == ["retry", "discard", "discard"]
    assert turn(source) == ["a1"]


# --- replay ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def archive(lane):
    """a1 b1 a2 c1 in the archive; c1's place was not known. Gives their ids."""
    source = lane.source(BLOCK, archive=True)
    ids = dict(zip(("a1", "b1", "a2", "c1"), lane.add("a1", "b1", "a2", "c1"), strict=True))
    claims = source.fetch(10)
    source.settle(
        Receipt(
            [
                (claim, Published() if name(claim) == "c1" else Published("orders", 0, number))
                for number, claim in enumerate(claims)
            ]
        )
    )
    source.flush()
    return ids


def replayed(lane: Lane) -> list[Any]:
    return lane.rows("SELECT event_id::text, headers->>'outbox-replay' FROM outbox.events ORDER BY id")


def test_a_dry_run_counts_and_changes_nothing(lane, archive):
    shown = json.loads(outbox(lane, "replay", "--all", "--dry-run", "--json"))
    assert (shown["events"], shown["keys"], shown["too_large"], shown["sent"]) == (4, 3, 0, 0)
    assert shown["dry_run"] is True
    assert "4 events of 3 keys" in outbox(lane, "replay", "--all", "--dry-run")
    assert replayed(lane) == []
    assert lane.rows("SELECT * FROM outbox.audit") == []


def test_a_replay_sends_the_same_event_ids_in_their_old_order_and_marks_them(lane, archive):
    assert "4 events are in the outbox again" in outbox(lane, "replay", "--all", "--yes", "--reason", "a bug")
    rows = replayed(lane)
    assert [event_id for event_id, _ in rows] == list(archive.values())
    assert all(dt.datetime.fromisoformat(mark).tzinfo is not None for _, mark in rows)
    ((what, why, details),) = lane.rows("SELECT what, why, details FROM outbox.audit")
    assert (what, why, details) == ("replay", "a bug", {"events": 4})
    source = lane.source(BLOCK, archive=True)
    assert turn(source) == ["a1", "b1", "a2", "c1"]


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (("--aggregate", "Order"), ["a1", "b1", "a2", "c1"]),
        (("--aggregate", "Order/a"), ["a1", "a2"]),
        (("--aggregate", "Cart"), []),
        (("--topic", "orders"), ["a1", "b1", "a2"]),
        (("--since", "2001-01-01", "--until", "2002-01-01T00:00:00"), []),
        (("--since", "2001-01-01", "--aggregate", "Order/b"), ["b1"]),
        (("--since", "2001-01-01T00:00:00+02:00", "--topic", "orders"), ["a1", "b1", "a2"]),
        (("--until", "2001-01-01T00:00:00.123456Z"), []),
        (("--since", "2999-01-01"), []),
    ],
)
def test_a_replay_by_what_was_asked_for(lane, archive, arguments, names):
    shown = json.loads(outbox(lane, "replay", *arguments, "--yes", "--json"))
    assert (shown["events"], shown["sent"]) == (len(names), len(names))
    assert [event_id for event_id, _ in replayed(lane)] == [archive[name] for name in names]


def test_a_replay_by_event_id(lane, archive):
    chosen = ("--event-id", archive["a2"], "--event-id", archive["a1"])
    assert json.loads(outbox(lane, "replay", *chosen, "--yes", "--json"))["sent"] == 2
    assert [event_id for event_id, _ in replayed(lane)] == [archive["a1"], archive["a2"]]
    assert lane.rows("SELECT details->'ids' FROM outbox.audit") == [([archive["a2"], archive["a1"]],)]


def test_a_replay_wants_to_be_told_what_and_a_yes(lane, archive):
    assert "say what to replay" in outbox(lane, "replay", "--yes", status=2)
    assert "answer yes, or give --yes" in outbox(lane, "replay", "--all", status=2)
    assert "--since" in outbox(lane, "replay", "--since", "yesterday", status=2)
    assert replayed(lane) == []


def test_an_event_that_was_replayed_is_replayed_once(lane, archive):
    source = lane.source(BLOCK, archive=True)
    outbox(lane, "replay", "--aggregate", "Order/a", "--yes")
    first = replayed(lane)
    assert turn(source) == ["a1", "a2"]
    assert lane.rows("SELECT count(*) FROM outbox.published") == [(6,)]
    assert json.loads(outbox(lane, "replay", "--all", "--yes", "--json"))["sent"] == 4
    assert [event_id for event_id, _ in replayed(lane)] == list(archive.values())
    assert turn(source) == ["a1", "b1", "a2", "c1"]
    # Also one of which only the replay is within the range, with a mark of its own.
    since = lane.rows("SELECT max(published_at) FROM outbox.published WHERE event_type = 'a1'")[0][0].isoformat()
    outbox(lane, "replay", "--since", since, "--aggregate", "Order/a", "--yes")
    assert [event_id for event_id, _ in replayed(lane)] == [archive["a1"], archive["a2"]]
    assert first[0][0] == archive["a1"]


def test_a_range_that_begins_between_two_events_of_a_key_keeps_their_order(lane, archive):
    """a1 only as it was replayed, a2 as it was first: still a1 before a2."""
    source = lane.source(BLOCK, archive=True)
    outbox(lane, "replay", "--event-id", archive["a1"], "--yes")
    assert turn(source) == ["a1"]
    lane.admin.execute(
        "UPDATE outbox.published SET published_at = published_at - interval '1 hour' "
        "WHERE event_type = 'a1' AND headers IS NULL"
    )
    outbox(lane, "replay", "--aggregate", "Order/a", "--since", "2001-01-01", "--yes")
    lane.admin.execute("DELETE FROM outbox.events")
    since = lane.rows("SELECT min(published_at) FROM outbox.published WHERE event_type = 'a2'")[0][0].isoformat()
    outbox(lane, "replay", "--aggregate", "Order/a", "--since", since, "--yes")
    assert [event_id for event_id, _ in replayed(lane)] == [archive["a1"], archive["a2"]]


def test_an_archived_event_too_large_to_be_marked_is_counted_and_left_out(lane):
    source = lane.source(BLOCK, archive=True)
    with lane.database.connect() as connection:
        Outbox().add(connection, Event("Order", "a", "a1", b"x" * 999_900))
    turn(source)
    shown = json.loads(outbox(lane, "replay", "--all", "--yes", "--json"))
    assert (shown["events"], shown["too_large"], shown["sent"]) == (0, 1, 0)
    assert replayed(lane) == []


# --- rights ----------------------------------------------------------------------------------------------------------


def test_an_operator_needs_no_more_than_the_docs_grant(lane):
    """docs/operations/migrations.md lists the grants; these are read from there."""
    text = (Path(__file__).parents[2] / "docs" / "operations" / "migrations.md").read_text()
    grants = text.split("```sql\n-- grants of the operator\n")[1].split("```")[0]
    role = f"operator_{lane.database.name}"
    lane.admin.execute(sql.SQL("CREATE ROLE {} LOGIN").format(sql.Identifier(role)))
    try:
        lane.admin.execute(grants.replace("outbox_operator", role))
        source = lane.source(archive=True)
        ids = lane.add("a1", "b1", "c1", "a2")
        assert turn(source, "a1", "b1") == ["c1"]
        as_operator = {"OUTBOX_DATABASE_URL": f"{lane.database.url}?user={role}"}
        assert len(json.loads(outbox(lane, "failures", "list", "--json", env=as_operator))["failures"]) == 2
        assert json.loads(outbox(lane, "failures", "show", ids[0], env=as_operator))["payload"] == {"n": "a1"}
        outbox(lane, "failures", "retry", ids[0], env=as_operator)
        outbox(lane, "failures", "discard", ids[1], "--reason", "old", env=as_operator)
        outbox(lane, "replay", "--all", "--yes", env=as_operator)
        assert turn(source) == ["a1"]
        assert turn(source) == ["a2", "c1"]
        assert lane.rows("SELECT what, who FROM outbox.audit ORDER BY id") == [
            (what, role) for what in ("retry", "discard", "replay")
        ]
        with psycopg.connect(as_operator["OUTBOX_DATABASE_URL"], autocommit=True) as operator:
            for refused in (
                "UPDATE outbox.events SET payload = NULL",
                "UPDATE outbox.dead_letters SET payload = NULL",
                "DELETE FROM outbox.audit",
                "UPDATE outbox.audit SET why = NULL",
                "DELETE FROM outbox.published",
                "SELECT * FROM outbox.lanes",
            ):
                with pytest.raises(psycopg.errors.InsufficientPrivilege):
                    operator.execute(refused)
        lane.admin.execute(sql.SQL("REVOKE SELECT ON outbox.dead_letters FROM {}").format(sql.Identifier(role)))
        assert "permission denied" in outbox(lane, "failures", "list", env=as_operator, status=1)
    finally:
        lane.admin.execute(sql.SQL("DROP OWNED BY {0}; DROP ROLE {0}").format(sql.Identifier(role)))
