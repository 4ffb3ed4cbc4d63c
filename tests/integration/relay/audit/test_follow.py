"""``outbox audit --follow``: each minute is compared once, when nothing of it can still come."""

from __future__ import annotations

import datetime as dt
import itertools
import json
import os
import signal
import threading
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from audit_support import EVENTS, Pipeline, pipeline
from nursery import NURSERY
from prometheus_client import generate_latest
from rows_and_roles import login_role
from structlog.testing import capture_logs
from support import order, wait_until

from outbox import Event, Outbox
from relay import insights
from relay.audit import follow
from relay.audit.follow import Follower
from relay.audit.transactions import Transactions
from relay.core.ports import Unavailable
from relay.metrics.outbox import outbox_metrics

__all__ = ["order", "pipeline"]

TEN_MINUTES = 600


def verified(pipeline: Pipeline) -> insights.Verified:
    with psycopg.connect(pipeline.database.url) as connection:
        _, found = insights.read_verified(connection, "outbox")
    return found


def counts(pipeline: Pipeline) -> tuple[int, int, int, int]:
    found = verified(pipeline)
    return found.missing, found.repeated, found.other, found.skipped


def behind(pipeline: Pipeline) -> float:
    """Return how many minutes ago is what is verified."""
    return (dt.datetime.now(dt.UTC) - verified(pipeline).verified_until).total_seconds() / 60


def again(pipeline: Pipeline) -> None:
    """Let the last minutes be compared once more."""
    pipeline.run("UPDATE outbox.verified SET verified_until = verified_until - interval '30 minutes'")


def other_topic(pipeline: Pipeline) -> Pipeline:
    return Pipeline(
        pipeline.database, pipeline.kafka, f"{pipeline.kind}-other", f"{pipeline.kind.lower()}-other-events"
    )


def count(follower: Follower) -> int:
    """Follow once; return how many differences were found."""
    return sum(found.count for found in follower.advance())


def test_a_difference_is_counted_once(pipeline, monkeypatch):
    ids = pipeline.sent()
    pipeline.repeat(ids[3])
    assert count(pipeline.follower()) == 1
    assert counts(pipeline) == (0, 1, 0, 0)
    assert 5 <= behind(pipeline) < 8
    assert [(one["kind"], one["event_id"]) for one in verified(pipeline).differences] == [("repeated", ids[3])]
    # A new process goes on where the last one was; a minute may have ended since.
    assert count(pipeline.follower()) == 0
    again(pipeline)
    pipeline.follower().advance()
    assert counts(pipeline) == (0, 2, 0, 0)
    # Two that follow.
    again(pipeline)
    real = follow.audit

    def while_another_one_follows(*given: Any) -> Any:
        monkeypatch.setattr(follow, "audit", real)
        pipeline.follower().advance()
        return real(*given)

    monkeypatch.setattr(follow, "audit", while_another_one_follows)
    assert count(pipeline.follower()) == 1
    assert counts(pipeline) == (0, 3, 0, 0)


def test_what_a_group_has_not_reached_is_not_verified(pipeline):
    """Nor is a difference counted before the rest of its minute is there."""
    pipeline.sent()
    pipeline.applied(EVENTS)
    more = pipeline.sent(5)
    assert count(pipeline.follower()) == 0
    assert behind(pipeline) > 9
    pipeline.repeat(more[0])
    assert (count(pipeline.follower()), counts(pipeline)) == (1, (0, 0, 0, 0))
    pipeline.applied(EVENTS + 6)
    pipeline.run(f"DELETE FROM consumer.processed_messages WHERE message_id = '{more[1]}'")
    assert (count(pipeline.follower()), counts(pipeline)) == (2, (1, 1, 0, 0))
    assert {one["group"] for one in verified(pipeline).differences} == {pipeline.group, None}
    assert behind(pipeline) < 8


def test_what_an_at_most_once_consumer_that_was_killed_may_confirm_yet_is_not_verified(pipeline):
    """Its position has passed the batch that it had in hand."""
    ids = pipeline.sent()
    pipeline.applied(EVENTS, delivery="at-most-once")
    assert pipeline.rows("SELECT unconfirmed_from FROM consumer.offsets WHERE unconfirmed_from IS NOT NULL") == []
    record = pipeline.record(ids[3])
    pipeline.run(
        f"UPDATE consumer.offsets SET unconfirmed_from = {record.offset()}, unconfirmed_end = next_offset, "
        f"updated_at = now() WHERE part = {record.partition()}"
    )
    assert count(pipeline.follower()) == 0
    assert behind(pipeline) > 9
    pipeline.run("UPDATE consumer.offsets SET updated_at = now() - interval '5 minutes'")
    lost = pipeline.ends()[record.partition()] - record.offset()
    assert count(pipeline.follower()) == lost
    assert (counts(pipeline), behind(pipeline) < 8) == ((lost, 0, 0, 0), True)
    named = {(one["event_id"], one["group"]) for one in verified(pipeline).differences}
    assert len(named) == lost
    assert (ids[3], pipeline.group) in named


def test_a_topic_that_is_behind_when_the_route_of_its_events_is_changed(pipeline, monkeypatch):
    """The ledger has types, and counts what was written for it for the new topic."""
    pipeline.keep_ledger()
    pipeline.sent()
    pipeline.applied(EVENTS)
    pipeline.sent(5)  # which the group has not reached
    assert count(pipeline.follower()) == 0
    assert behind(pipeline) > 9
    moved = pipeline.kafka.create_topic(f"{pipeline.kind.lower()}-moved", 1)
    monkeypatch.setenv("OUTBOX_ROUTES", json.dumps({pipeline.kind: {"topic": moved}}))
    pipeline.applied(EVENTS + 5)
    assert (count(pipeline.follower()), counts(pipeline)) == (0, (0, 0, 0, 0))
    assert behind(pipeline) < 8


def test_a_topic_does_not_wait_for_another(pipeline):
    pipeline.sent()
    pipeline.applied(EVENTS)
    pipeline.sent(5)  # which the group has not reached
    other = other_topic(pipeline)
    ids = other.sent(5)
    other.repeat(ids[3])
    follower = pipeline.follower()
    assert [count(follower), count(follower)] == [1, 0]
    rows = dict(
        pipeline.rows(
            "SELECT topic, (repeated, verified_until < now() - interval '9 minutes')::text FROM outbox.verified "
            "WHERE topic <> ''"
        )
    )
    assert rows == {pipeline.topic: "(0,t)", other.topic: "(1,f)"}


def test_an_order_that_was_broken_minutes_apart(pipeline, monkeypatch):
    """The later event of a key was published first, and its minute is compared in a later round."""
    second, first = pipeline.add(1, ago=TEN_MINUTES - 180), pipeline.add(1, ago=TEN_MINUTES)
    pipeline.published()
    pipeline.run("UPDATE outbox.published SET id = 3 - id WHERE id IN (1, 2)")
    pipeline.applied(2)
    follower, minute = pipeline.follower(), int(dt.datetime.now(dt.UTC).timestamp()) // 60
    with monkeypatch.context() as patched:
        patched.setattr(Transactions, "closed", lambda *_: minute - 8)
        assert count(follower) == 0
    assert count(follower) == 1
    assert [(one["kind"], one["event_id"]) for one in verified(pipeline).differences] == [("order", second[0])]
    assert first[0] in verified(pipeline).differences[0]["text"]


def test_a_key_that_left_its_partition_and_came_back_minutes_later(pipeline, monkeypatch):
    """Its first event is in an earlier round, and the second one stands in another partition."""
    ids = [pipeline.add(1, ago=TEN_MINUTES - 120 * number)[0] for number in range(3)]
    pipeline.published()
    pipeline.run(f"UPDATE outbox.published SET partition = 1 - partition WHERE event_id = '{ids[1]}'")
    follower, minute = pipeline.follower(), int(dt.datetime.now(dt.UTC).timestamp()) // 60
    found = []
    for behind in range(10, 4, -1):
        with monkeypatch.context() as patched:
            patched.setattr(Transactions, "closed", lambda *_, at=minute - behind: at)
            found += [(one.kind, one.event_id) for done in follower.advance() for one in done.differences]
        follower._not_before.clear()
    # The archive says that it was published elsewhere; and its key's events stand around it.
    assert found.count(("partition", ids[1])) == 2


def test_a_topic_that_stands_for_days_keeps_no_other_one(pipeline):
    """And an outbox without events for hours is followed all the same."""
    pipeline.run(
        f"INSERT INTO outbox.verified (topic, verified_until) VALUES ('{pipeline.topic}', now() - interval '30 hours')"
    )
    other = other_topic(pipeline)
    other.repeat(other.sent(5)[0])
    follower = pipeline.follower(hours=3)
    assert [count(follower) for _ in range(4)] == [0, 0, 1, 0]
    rows = dict(
        pipeline.rows("SELECT topic, repeated FROM outbox.verified WHERE verified_until > now() - interval '9m'")
    )
    assert rows == {"": 0, other.topic: 1}


def test_a_transaction_that_is_open_may_still_bring_events(pipeline):
    pipeline.sent()
    with psycopg.connect(pipeline.database.url) as connection:
        Outbox().add(connection, Event(pipeline.kind, "key", "Placed", {}))
        follower = pipeline.follower()
        assert follower.advance() == []
        connection.commit()
    assert count(follower) == 0
    assert counts(pipeline) == (0, 0, 0, 0)


def test_a_transaction_of_another_database_is_not_waited_for(pipeline):
    """Its database is known to each role, also to one that does not see since when it is open."""
    pipeline.sent()
    follower = pipeline.follower()
    elsewhere = psycopg.conninfo.make_conninfo(pipeline.database.url, dbname="postgres")
    with psycopg.connect(elsewhere) as neighbour, psycopg.connect(elsewhere, autocommit=True) as admin:
        neighbour.execute("SELECT pg_current_xact_id()")
        wait_until(lambda: follower.advance() and behind(pipeline) < 8, what="the minutes to be compared")
        with login_role(admin, "follower") as role:
            theirs = psycopg.connect(pipeline.database.url.replace("postgres@", f"{role}@"), autocommit=True)
            with closing(theirs):
                wait_until(lambda: Transactions().closed(theirs) > 0, what="the role to see the database")


def test_what_fails_again_in_the_same_way_is_logged_once(pipeline, monkeypatch):
    follower, stop, real = pipeline.follower(), threading.Event(), follow.audit
    minutes = itertools.count(int(dt.datetime.now(dt.UTC).timestamp()) // 60 - 30)
    answers = iter(["away", "away", "away, too", None, "away"])

    def audit(*given: Any) -> Any:
        answer = next(answers, "")
        if answer == "":
            stop.set()
        if answer is not None:
            raise Unavailable(f"Kafka: {answer}")
        return real(*given)

    monkeypatch.setattr(follow, "audit", audit)
    monkeypatch.setattr(follow, "_EVERY_SECONDS", 0.0)
    monkeypatch.setattr(Transactions, "closed", lambda *_: next(minutes))
    with capture_logs() as logs:
        follower.run(stop)
    texts = [entry["error"] for entry in logs if str(entry.get("error")).startswith("Kafka: ")]
    assert texts == ["Kafka: away", "Kafka: away, too", "Kafka: away", "Kafka: "]


def test_a_stop_lets_only_the_comparison_under_way_end(pipeline, monkeypatch):
    pipeline.run(
        "INSERT INTO outbox.verified (topic, verified_until) SELECT topic, date_trunc('minute', now() - ago::interval) "
        f"FROM (VALUES ('', '6 minutes'), ('{pipeline.topic}', '1 hour'), ('other', '2 hours')) AS v(topic, ago)"
    )
    compared, stop, minute = [], threading.Event(), int(dt.datetime.now(dt.UTC).timestamp()) // 60

    def audit(_settings: Any, scope: Any, _opened: Any) -> Any:
        compared.append(scope.topics)
        stop.set()
        raise Unavailable("Kafka: away")

    monkeypatch.setattr(follow, "audit", audit)
    monkeypatch.setattr(Transactions, "closed", lambda *_: minute)
    pipeline.follower().run(stop)
    assert compared == [None]


@pytest.mark.parametrize("cause", ["a transaction is open", "the clock went back"])
def test_a_topic_that_is_behind_does_not_go_back(pipeline, monkeypatch, cause):
    """An old transaction is open, so that nothing is known to be over, or less is over than before."""
    pipeline.run(
        "INSERT INTO outbox.verified (topic, verified_until) SELECT topic, date_trunc('minute', now() - ago::interval) "
        f"FROM (VALUES ('', '6 minutes'), ('{pipeline.topic}', '1 hour')) AS v(topic, ago)"
    )
    rows = "SELECT topic, verified_until FROM outbox.verified ORDER BY 1"
    before, follower = pipeline.rows(rows), pipeline.follower()
    minute = int(dt.datetime.now(dt.UTC).timestamp()) // 60
    with psycopg.connect(pipeline.database.url) as connection, monkeypatch.context() as patched:
        if cause == "the clock went back":
            patched.setattr(Transactions, "closed", lambda *_: minute - 120)
        else:
            Outbox().add(connection, Event(pipeline.kind, "key", "Placed", {}))
        assert (follower.advance(), pipeline.rows(rows)) == ([], before)
        connection.rollback()
    # The relay, which has just started, may have a transaction, too.
    wait_until(lambda: follower.advance() and pipeline.rows(rows)[1] > before[1], what="the topic to move on")


def test_a_scheduled_event_holds_up_no_minute(pipeline):
    """It is compared by an audit of its minute, once it is published."""
    pipeline.sent()
    event_id = pipeline.schedule(ago=TEN_MINUTES)
    assert count(pipeline.follower()) == 0
    assert behind(pipeline) < 8
    pipeline.due()
    again(pipeline)
    assert (count(pipeline.follower()), counts(pipeline)) == (0, (0, 0, 0, 0))
    pipeline.run(f"UPDATE outbox.published SET payload = '[]' WHERE event_id = '{event_id}'")
    assert pipeline.differences() == [("payload", event_id)]


def test_minutes_of_which_the_archive_knows_nothing_are_skipped(pipeline):
    pipeline.run("DELETE FROM outbox.published")
    pipeline.sent()
    pipeline.follower().advance()
    *differences, skipped = counts(pipeline)
    assert (differences, skipped >= 1) == ([0, 0, 0], True)


def test_differences_beyond_those_that_are_named_are_counted(pipeline, monkeypatch):
    monkeypatch.setattr("relay.audit.findings.MOST_NAMED", 5)
    monkeypatch.setattr(follow, "_MOST_KEPT", 3)
    ids = pipeline.sent()
    pipeline.run(f"DELETE FROM outbox.published WHERE id > 0 AND event_id <> '{ids[0]}'")
    pipeline.follower().advance()
    assert counts(pipeline) == (0, 0, EVENTS - 1, 0)
    assert len(verified(pipeline).differences) == 3


def test_the_command_with_metrics_until_a_signal(pipeline, tmp_path):
    ids = pipeline.sent()
    pipeline.repeat(ids[3])
    environment = os.environ | pipeline.environment | {"OUTBOX_LOG_FORMAT": "json"}
    process = NURSERY.fork(["-m", "relay.cli", "audit", "--follow"], environment, tmp_path, tmp_path / "log")
    try:
        wait_until(lambda: pipeline.rows("SELECT FROM outbox.verified"), what="what was verified")
    finally:
        process.signal(signal.SIGTERM)
    assert process.wait(60)
    errors = (tmp_path / "log").read_text()
    assert process.exit_code == 0, errors
    assert ids[3] in errors
    with psycopg.connect(pipeline.database.url) as connection:
        state = insights.look_at_tables(connection, "outbox")

    of_topic = f'{{topic="{pipeline.topic}"}} '
    text = generate_latest(SimpleNamespace(collect=lambda: outbox_metrics(state, {}, 1))).decode()
    lines = [line.split(of_topic) for line in text.splitlines() if of_topic in line]
    assert {name: float(value) for name, value in lines} == {
        "outbox_audit_verified_until_timestamp_seconds": verified(pipeline).verified_until.timestamp(),
        "outbox_audit_missing_total": 0,
        "outbox_audit_repeated_total": 1,
        "outbox_audit_other_differences_total": 0,
        "outbox_audit_skipped_minutes_total": 0,
    }
