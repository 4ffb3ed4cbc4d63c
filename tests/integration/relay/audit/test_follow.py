"""``outbox audit --follow``: each minute is compared once, when nothing of it can still come."""

from __future__ import annotations

import datetime as dt
import os
import signal
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from audit_support import EVENTS, Pipeline
from nursery import NURSERY
from prometheus_client import CollectorRegistry, generate_latest
from spans import relay
from support import order, wait_until

from outbox import Event, Outbox
from relay import insights
from relay.audit import follow
from relay.audit.findings import Scope
from relay.audit.follow import Follower
from relay.config import Settings, load
from relay.metrics.outbox import outbox_metrics

__all__ = ["order"]

TEN_MINUTES = 600


class Followed(Pipeline):
    """A pipeline that is followed in this process. Its events are of ten minutes ago: of minutes that are over."""

    def settings(self) -> Settings:
        return load(
            database_url=self.database.url,
            kafka={"bootstrap_servers": self.kafka.bootstrap_servers},
            relay={"archive_days": 1},
        )

    def follower(self) -> Follower:
        now = dt.datetime.now(dt.UTC)
        return Follower(self.settings(), Scope(now - dt.timedelta(hours=1), now))

    def sent(self, count: int = EVENTS) -> list[str]:
        ids = self.add(count, ago=TEN_MINUTES)
        self.published()
        return ids

    def verified(self) -> insights.Verified:
        with psycopg.connect(self.database.url) as connection:
            _, found = insights.read_verified(connection, "outbox")
        return found

    def counts(self) -> tuple[int, int, int, int]:
        found = self.verified()
        return found.missing, found.repeated, found.other, found.skipped

    def behind(self) -> float:
        """Return how many minutes ago is what is verified."""
        return (dt.datetime.now(dt.UTC) - self.verified().verified_until).total_seconds() / 60


@pytest.fixture
def pipeline(outbox_postgres, outbox_kafka, order) -> Iterator[Followed]:
    with relay(outbox_postgres, outbox_kafka, relay__archive_days=1):
        pipeline = Followed(outbox_postgres, outbox_kafka, *order)
        pipeline.kept_before()
        yield pipeline


def count(follower: Follower) -> int:
    """Follow once; return how many differences were found."""
    return sum(found.count for found in follower.advance())


def repeat(pipeline: Followed, event_id: str) -> None:
    record = pipeline.record(event_id)
    pipeline.produce(key=record.key(), value=record.value(), headers=record.headers(), partition=record.partition())


def test_a_difference_is_counted_once(pipeline):
    ids = pipeline.sent()
    follower = pipeline.follower()
    repeat(pipeline, ids[3])
    assert count(follower) == 1
    assert pipeline.counts() == (0, 1, 0, 0)
    assert 5 <= pipeline.behind() < 8
    assert [(one["kind"], one["event_id"]) for one in pipeline.verified().differences] == [("repeated", ids[3])]
    # A new process goes on where the last one was; a minute may have ended since.
    assert count(pipeline.follower()) == 0
    pipeline.run("UPDATE outbox.verified SET verified_until = verified_until - interval '30 minutes'")
    pipeline.follower().advance()
    assert pipeline.counts() == (0, 2, 0, 0)


def test_what_a_group_has_not_reached_is_not_verified(pipeline):
    ids = pipeline.sent()
    pipeline.applied(EVENTS)
    more = pipeline.sent(5)
    follower = pipeline.follower()
    assert count(follower) == 0
    assert pipeline.behind() > 9
    pipeline.applied(EVENTS + 5)
    pipeline.run(f"DELETE FROM consumer.processed_messages WHERE message_id IN ('{ids[0]}', '{more[0]}')")
    assert count(follower) == 2
    assert pipeline.counts() == (2, 0, 0, 0)
    assert {one["group"] for one in pipeline.verified().differences} == {pipeline.group}
    assert pipeline.behind() < 8


def test_a_topic_does_not_wait_for_another(pipeline):
    pipeline.sent()
    pipeline.applied(EVENTS)
    pipeline.sent(5)  # which the group has not reached
    other = Followed(
        pipeline.database, pipeline.kafka, f"{pipeline.kind}-other", f"{pipeline.kind.lower()}-other-events"
    )
    ids = other.sent(5)
    repeat(other, ids[3])
    follower = pipeline.follower()
    assert [count(follower), count(follower)] == [1, 0]
    rows = dict(
        pipeline.rows(
            "SELECT topic, (repeated, verified_until < now() - interval '9 minutes')::text FROM outbox.verified "
            "WHERE topic <> ''"
        )
    )
    assert rows == {pipeline.topic: "(0,t)", other.topic: "(1,f)"}


def test_a_difference_is_not_counted_before_the_rest_of_its_minute_is_there(pipeline):
    pipeline.sent()
    pipeline.applied(EVENTS)
    more = pipeline.sent(5)
    repeat(pipeline, more[0])
    follower = pipeline.follower()
    assert (count(follower), pipeline.counts()) == (1, (0, 0, 0, 0))
    pipeline.applied(EVENTS + 6)
    assert (count(follower), pipeline.counts()) == (1, (0, 1, 0, 0))


def test_an_order_that_was_broken_minutes_apart(pipeline, monkeypatch):
    """The later event of a key was published first, and its minute is compared in a later round."""
    second, first = pipeline.add(1, ago=TEN_MINUTES - 180), pipeline.add(1, ago=TEN_MINUTES)
    pipeline.published()
    pipeline.run("UPDATE outbox.published SET id = 3 - id WHERE id IN (1, 2)")
    pipeline.applied(2)
    follower, minute = pipeline.follower(), int(dt.datetime.now(dt.UTC).timestamp()) // 60
    with monkeypatch.context() as patched:
        patched.setattr(Follower, "_closed", lambda *_: minute - 8)
        assert count(follower) == 0
    assert count(follower) == 1
    assert [(one["kind"], one["event_id"]) for one in pipeline.verified().differences] == [("order", second[0])]
    assert first[0] in pipeline.verified().differences[0]["text"]


def test_a_key_that_left_its_partition_and_came_back_minutes_later(pipeline, monkeypatch):
    """Its first event is in an earlier round, and the second one stands in another partition."""
    ids = [pipeline.add(1, ago=TEN_MINUTES - 120 * number)[0] for number in range(3)]
    pipeline.published()
    pipeline.run(f"UPDATE outbox.published SET partition = 1 - partition WHERE event_id = '{ids[1]}'")
    follower, minute = pipeline.follower(), int(dt.datetime.now(dt.UTC).timestamp()) // 60
    found = []
    for behind in range(10, 4, -1):
        with monkeypatch.context() as patched:
            patched.setattr(Follower, "_closed", lambda *_, at=minute - behind: at)
            found += [(one.kind, one.event_id) for done in follower.advance() for one in done.differences]
        follower._not_before.clear()
    # The archive says that it was published elsewhere; and its key's events stand around it.
    assert found.count(("partition", ids[1])) == 2


def test_a_topic_that_stands_for_days_keeps_no_other_one(pipeline):
    """And an outbox without events for hours is followed all the same."""
    pipeline.run(
        f"INSERT INTO outbox.verified (topic, verified_until) VALUES ('{pipeline.topic}', now() - interval '30 hours')"
    )
    other = Followed(
        pipeline.database, pipeline.kafka, f"{pipeline.kind}-other", f"{pipeline.kind.lower()}-other-events"
    )
    repeat(other, other.sent(5)[0])
    now = dt.datetime.now(dt.UTC)
    follower = Follower(pipeline.settings(), Scope(now - dt.timedelta(hours=3), now))
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
    assert pipeline.counts() == (0, 0, 0, 0)


def test_minutes_of_which_the_archive_knows_nothing_are_skipped(pipeline):
    pipeline.run("DELETE FROM outbox.published")
    pipeline.sent()
    pipeline.follower().advance()
    missing, repeated, other, skipped = pipeline.counts()
    assert (missing, repeated, other) == (0, 0, 0)
    assert skipped >= 1


def test_two_that_follow_count_a_difference_once(pipeline, monkeypatch):
    ids = pipeline.sent()
    pipeline.follower().advance()
    pipeline.run("UPDATE outbox.verified SET verified_until = verified_until - interval '30 minutes'")
    repeat(pipeline, ids[3])
    real = follow.audit

    def while_another_one_follows(*given: Any) -> Any:
        monkeypatch.setattr(follow, "audit", real)
        pipeline.follower().advance()
        return real(*given)

    monkeypatch.setattr(follow, "audit", while_another_one_follows)
    assert count(pipeline.follower()) == 1
    assert pipeline.counts() == (0, 1, 0, 0)


def test_differences_beyond_those_that_are_named_are_counted(pipeline, monkeypatch):
    monkeypatch.setattr("relay.audit.findings.MOST_NAMED", 5)
    monkeypatch.setattr(follow, "_MOST_KEPT", 3)
    ids = pipeline.sent()
    pipeline.run(f"DELETE FROM outbox.published WHERE id > 0 AND event_id <> '{ids[0]}'")
    pipeline.follower().advance()
    assert pipeline.counts() == (0, 0, EVENTS - 1, 0)
    assert len(pipeline.verified().differences) == 3


def test_the_command_with_metrics_until_a_signal(pipeline, tmp_path):
    ids = pipeline.sent()
    repeat(pipeline, ids[3])
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

    class Shown(CollectorRegistry):
        def collect(self) -> Any:
            return outbox_metrics(state, {}, 1)

    of_topic = f'{{topic="{pipeline.topic}"}} '
    lines = [line.split(of_topic) for line in generate_latest(Shown()).decode().splitlines() if of_topic in line]
    assert {name: float(value) for name, value in lines} == {
        "outbox_audit_verified_until_timestamp_seconds": pipeline.verified().verified_until.timestamp(),
        "outbox_audit_missing_total": 0,
        "outbox_audit_repeated_total": 1,
        "outbox_audit_other_differences_total": 0,
        "outbox_audit_skipped_minutes_total": 0,
    }
