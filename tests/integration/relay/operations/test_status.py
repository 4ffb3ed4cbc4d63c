"""``outbox status``: what waits, who works on it, how far the consumers are, and what needs a person."""

from __future__ import annotations

import datetime as dt
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import psycopg
import pytest
from confluent_kafka import Producer, TopicCollection
from confluent_kafka.admin import AdminClient
from counting import Counting
from rows_and_roles import execute, put
from support import drained, look_up, order, wait_until
from typer.testing import CliRunner

from outbox import Event, Outbox
from outbox.consumer import connections
from outbox.event import DEAD_LETTER
from outbox.testing.fixtures import Topics
from relay import insights
from relay.cli.app import app
from relay.config import load
from relay.insights import COUNTED
from relay.pipeline import overview, topics

__all__ = ["order"]


class Status:
    """The command, over one database."""

    def __init__(self, *options: str) -> None:
        self._options = options

    def run(self, *options: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["status", *self._options, *options])
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return result.exit_code, result.stdout

    def look(self, *options: str) -> dict[str, Any]:
        code, text = self.run("--json", *options)
        found: dict[str, Any] = json.loads(text)
        assert code == (1 if found["problems"] else 0)
        return found


@pytest.fixture
def status(outbox_postgres, outbox_kafka, monkeypatch):
    monkeypatch.setenv("OUTBOX_DATABASE_URL", outbox_postgres.url)
    monkeypatch.setenv("OUTBOX_KAFKA__BOOTSTRAP_SERVERS", outbox_kafka.bootstrap_servers)
    return Status()


def add(url: str, kind: str, count: int) -> None:
    with psycopg.connect(url) as connection:
        Outbox().add_many(connection, [Event(kind, f"k{n}", "T", {"n": n}) for n in range(count)])


def filled(topics: Topics, times: Sequence[Sequence[int | None]]) -> tuple[str, str]:
    """Make a topic with messages of these times in its partitions. Return its name and its id."""
    topic = topics.create_topic(topics.name("orders"), len(times))
    producer = Producer({"bootstrap.servers": topics.bootstrap_servers})
    for part, each in enumerate(times):
        for at in each:
            producer.produce(topic, b"{}", partition=part, timestamp=at or 0)
    assert producer.flush(30) == 0
    admin = AdminClient({"bootstrap.servers": topics.bootstrap_servers})
    return topic, str(admin.describe_topics(TopicCollection([topic]))[topic].result().topic_id)


def test_an_outbox_that_nobody_reads_and_then_somebody(status, outbox_postgres, outbox_relay, order):
    url = outbox_postgres.url
    found = status.look()
    assert found["problems"] == ["no relay is running"]
    add(url, order[0], 1_000)
    found = status.look()
    outbox = found["outbox"]
    assert found["problems"] == ["no relay is running, and 1,000 events waiting"]
    assert (outbox["backlog"], outbox["exact"], outbox["relays"]) == (1_000, True, [])
    assert sum(lane["events"] for lane in outbox["lanes"]) == 1_000
    assert 0 < outbox["oldest_seconds"] < 60
    relay = outbox_relay(relay__lease_seconds=2)
    drained(url)

    def well() -> dict[str, Any] | None:
        """Return what is found; None while it finds a problem, as a renewal that this machine delays."""
        found = status.look()
        return None if found["problems"] else found

    outbox = wait_until(well, what="an outbox without problems")["outbox"]
    assert (outbox["backlog"], outbox["oldest_seconds"]) == (0, None)
    (one,) = outbox["relays"]
    assert (one["alive"], one["lanes"], one["source"]) == (True, [0, 1, 2, 3], "polling")
    assert {lane["owner"] for lane in outbox["lanes"]} == {one["instance"]}
    assert all(0 < lane["lease_seconds"] <= 2 for lane in outbox["lanes"])
    # Killed: its lanes are nobody's when the leases have run out, which the next one waits for.
    relay.kill()
    wait_until(lambda: "no relay is running" in status.look()["problems"], what="the relay to be missed")
    code, text = status.run()
    assert code == 1
    assert "backlog 0 events" in text
    assert "! no relay is running" in text
    assert "gone" in text


def test_dead_letters_and_the_keys_that_they_block(status, outbox_postgres):
    for number in range(3):
        failed = {"id": number, "aggregate_id": f"k{number}"}
        for table in ("outbox.dead_letters", "outbox.failures"):
            put(outbox_postgres.url, table, **failed)
    found = status.look()
    assert found["outbox"]["dead_letters"] == 3
    assert "3 dead letters, 3 keys blocked: `outbox dead-letters list`" in found["problems"]


def test_a_missing_topic_that_events_wait_for(status, outbox_postgres, outbox_kafka, outbox_relay):
    url, kind = outbox_postgres.url, outbox_kafka.name("Basket")
    topic = f"{kind.lower()}-events"
    add(url, kind, 3)
    outbox_relay(create_topics=False, relay__max_backoff_seconds=0.2)
    problem = (
        f"topic {topic!r} does not exist, or these credentials may not DESCRIBE it, and its events wait: create it, or "
        "run relays with --create-topics"
    )
    wait_until(lambda: problem in status.look()["problems"], what="the topic to be named")
    code, text = status.run()
    assert (code, problem in text.replace("\n", "")) == (1, True)
    outbox_kafka.create_topic(topic)
    drained(url)
    assert status.look()["problems"] == []


def test_a_missing_dead_letter_topic_that_a_copy_waits_for(status, outbox_postgres, outbox_kafka, monkeypatch):
    url, kind, dead = outbox_postgres.url, outbox_kafka.name("Basket"), outbox_kafka.name("dead")
    outbox_kafka.create_topic(f"{kind.lower()}-events")
    monkeypatch.setenv("OUTBOX_FAILURES__DEAD_LETTER_TOPIC", dead)
    execute(url, "INSERT INTO outbox.relays (instance, version, alive_until) VALUES ('r', '1', 'infinity')")
    add(url, kind, 1)
    execute(url, "UPDATE outbox.events SET created_at = now() - interval '3 s'")
    assert not any("does not exist" in problem for problem in status.look()["problems"])
    execute(url, f'UPDATE outbox.events SET from_relay = true, headers = \'{{"{DEAD_LETTER}": "x"}}\'')
    assert any(problem.startswith(f"topic {dead!r} does not exist") for problem in status.look()["problems"])


def test_a_kafka_that_does_not_answer_while_events_wait(status, outbox_postgres, monkeypatch):
    monkeypatch.setenv("OUTBOX_KAFKA__BOOTSTRAP_SERVERS", "127.0.0.1:1")
    monkeypatch.setattr(topics, "_SECONDS", 0.7)
    execute(
        outbox_postgres.url, "INSERT INTO outbox.relays (instance, version, alive_until) VALUES ('r', '1', 'infinity')"
    )
    assert status.look()["problems"] == []
    add(outbox_postgres.url, "Order", 1)
    execute(outbox_postgres.url, "UPDATE outbox.events SET created_at = now() - interval '3 s'")
    shown = "Kafka can't be seen: Kafka does not answer at 127.0.0.1:1: "
    assert [one[: len(shown)] for one in status.look()["problems"]][:1] == [shown]
    # An event that has just come does not wait yet.
    execute(outbox_postgres.url, "UPDATE outbox.events SET created_at = now() + interval '1 min'")
    assert not any("Kafka" in one for one in status.look()["problems"])


def test_a_database_that_does_not_answer_is_named_once(status, monkeypatch):
    monkeypatch.setenv("OUTBOX_DATABASE_URL", "postgresql://127.0.0.1:1/nowhere")
    found = status.look()
    assert list(found["unseen"]) == ["the outbox"]
    (problem,) = found["problems"]
    assert problem.startswith("the outbox can't be seen: Postgres at postgresql://127.0.0.1:1/nowhere: ")
    sink = "postgresql://127.0.0.1:1/sink"
    assert list(status.look("--sink-url", sink)["unseen"]) == ["the outbox", "the consumers"]


def test_a_backlog_is_counted_up_to_a_limit_and_then_estimated(status, outbox_postgres):
    """A million rows cost what some ten thousand do: what is read is bounded in each lane."""
    url = outbox_postgres.url
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(
            "INSERT INTO outbox.events (aggregate_type, aggregate_id, event_type)"
            " SELECT 'Order', 'k' || n, 'T' FROM generate_series(1, 100000) AS n"
        )
        connection.execute("ANALYZE outbox.events")
    outbox = status.look()["outbox"]
    assert (outbox["exact"], [lane["events"] for lane in outbox["lanes"]]) == (False, [COUNTED] * 4)
    assert 95_000 <= outbox["backlog"] <= 105_000
    with psycopg.connect(url) as connection:
        before = connection.execute("SELECT idx_tup_read FROM pg_stat_user_indexes WHERE indexrelname = 'events_pkey'")
        ((read,),) = before.fetchall()
    status.look()

    def more() -> int:
        query = "SELECT idx_tup_read, seq_scan FROM pg_stat_user_indexes JOIN pg_stat_user_tables USING (relid)"
        ((now, _),) = look_up(url, f"{query} WHERE indexrelname = 'events_pkey'")
        return int(now) - read

    wait_until(lambda: more() > 0, what="the statistics of the last look")
    assert more() <= 2 * 4 * (COUNTED + 10)
    assert "backlog about " in status.run()[1]


def test_groups_and_their_lag(status, outbox_postgres, outbox_kafka):
    """Of a group that stands behind Kafka's end, has dead letters, and a partition whose topic is gone."""
    url = outbox_postgres.url
    topic, topic_id = filled(outbox_kafka, [[None] * 500] * 2)
    whose = {"grp": "totals", "topic": topic, "topic_id": topic_id, "duplicates": 2}
    put(url, "consumer.groups", grp="totals")
    put(url, "consumer.offsets", **whose, part=0, next_offset=500, applied=498)
    put(url, "consumer.offsets", **whose, part=1, next_offset=100, applied=98)
    (group,) = status.look()["groups"]
    assert (group["group"], group["partitions"], group["lag"], group["uncommitted"]) == ("totals", 2, 400, 0)
    assert (group["applied"], group["duplicates"], group["dead_letters"], group["losses"]) == (596, 4, 0, 0)
    put(url, "consumer.offsets", **whose | {"topic": "gone"}, next_offset=7)
    put(url, "consumer.dead_letters", grp="totals", topic=topic)
    found = status.look()
    assert found["groups"][0]["dead_letters"] == 1
    problems = [problem for problem in found["problems"] if problem.startswith("group totals: ")]
    assert len(problems) == 2
    assert problems[0].startswith("group totals: gone-0: ")
    assert problems[1] == "group totals: 1 dead letter: `outbox dead-letters list --side consumer`"
    assert "totals" in status.run()[1]


def test_what_can_not_be_seen_says_why_and_hides_nothing_else(status, outbox_postgres, monkeypatch):
    monkeypatch.setenv("OUTBOX_KAFKA__BOOTSTRAP_SERVERS", "127.0.0.1:1")
    monkeypatch.setattr(overview, "_KAFKA_SECONDS", 1.0)
    put(outbox_postgres.url, "consumer.groups")
    put(outbox_postgres.url, "consumer.offsets", next_offset=5)
    found = status.look()
    assert found["outbox"]["backlog"] == 0
    assert "Kafka" in found["unseen"]
    (group,) = found["groups"]
    assert (group["lag"], group["partitions"]) == (None, 1)
    # A database without an outbox: the consumers' side is shown.
    execute(outbox_postgres.url, "DROP SCHEMA outbox CASCADE")
    found = status.look()
    assert found["outbox"] is None
    assert "outbox db upgrade" in found["unseen"]["the outbox"]
    assert [group["group"] for group in found["groups"]] == ["g"]


def test_a_sink_that_is_named_and_has_no_consumers(status, outbox_postgres):
    """Without --sink-url a database may have none; a schema of which only a part is there is no such database."""
    url = outbox_postgres.url
    execute(url, "DROP TABLE consumer.losses")
    assert "outbox db upgrade --consumer" in status.look()["unseen"]["the consumers"]
    execute(url, "DROP SCHEMA consumer CASCADE")
    assert status.look()["unseen"] == {}
    assert "outbox db upgrade --consumer" in status.look("--sink-url", url)["unseen"]["the consumers"]


def test_watching_keeps_its_sessions(outbox_postgres, outbox_kafka):
    """Two sessions for as long as it runs, and rates from the second look on."""
    with Counting(outbox_postgres.url) as counting:
        environment = os.environ | {
            "OUTBOX_DATABASE_URL": counting.url,
            "OUTBOX_KAFKA__BOOTSTRAP_SERVERS": outbox_kafka.bootstrap_servers,
        }
        command = [sys.executable, "-m", "relay.cli", "status", "--watch", "0.2", "--json"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
            assert process.stdout is not None
            looks = [json.loads(process.stdout.readline()) for _ in range(5)]
            process.terminate()
        assert counting.opened == 2
    assert looks[0]["outbox"]["written_per_second"] is None
    assert looks[4]["outbox"]["written_per_second"] == 0.0


def test_sessions_that_are_kept_are_replaced_after_some_minutes(outbox_postgres, outbox_kafka, monkeypatch):
    """They may be open for days, and the server's name leads to another one by then: test_connections_failover.py."""
    passed = 0.0
    monkeypatch.setattr(connections, "_clock", lambda: time.monotonic() + passed)
    with Counting(outbox_postgres.url) as counting:
        settings = load(database_url=counting.url, kafka={"bootstrap.servers": outbox_kafka.bootstrap_servers})
        with closing(overview.Reader(settings)) as reader:
            reader.read(None)
            reader.read(None)
            assert counting.opened == 2
            passed += connections.MAX_AGE_SECONDS
            assert reader.read(None).unseen == {}
            assert counting.opened == 4


def test_problems_are_seen_on_a_small_terminal(outbox_postgres, outbox_kafka):
    """Sixteen lanes take more lines than there are."""
    import pty
    import termios

    url = outbox_postgres.url
    execute(url, "INSERT INTO outbox.lanes (lane) SELECT generate_series(4, 15)")
    environment = os.environ | {
        "OUTBOX_DATABASE_URL": url,
        "OUTBOX_KAFKA__BOOTSTRAP_SERVERS": outbox_kafka.bootstrap_servers,
        "TERM": "xterm",
    }
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (12, 100))
    started = [sys.executable, "-m", "relay.cli", "status", "--watch", "60"]
    with subprocess.Popen(started, stdout=theirs, env=environment) as process:
        os.close(theirs)
        shown = b""
        while b"backlog" not in shown:
            shown += os.read(ours, 4096)
        process.terminate()
        os.close(ours)
    assert b"! no relay is running" in shown


def test_a_group_that_nobody_runs(status, outbox_postgres, outbox_kafka):
    """It has moved nothing for ten minutes. A message of just now may wait for a moment; an old one has waited."""
    url = outbox_postgres.url
    old = int(time.time() * 1000) - 600_000
    topic, topic_id = filled(outbox_kafka, [[old] * 3, [old] * 2 + [old + 600_000] * 5])
    put(url, "consumer.groups", grp="totals")
    ago = dt.datetime.now(dt.UTC) - dt.timedelta(minutes=10)
    for part, at in ((0, 3), (1, 2)):
        values = {"topic": topic, "topic_id": topic_id, "part": part, "next_offset": at, "updated_at": ago}
        put(url, "consumer.offsets", grp="totals", **values)

    def of_the_group() -> list[str]:
        return [problem for problem in status.look()["problems"] if problem.startswith("group totals: ")]

    assert of_the_group() == []
    execute(url, "UPDATE consumer.offsets SET next_offset = next_offset - 1")
    (problem,) = of_the_group()
    assert problem == (
        "group totals: 2 offsets waiting, and it has moved nothing for 5 minutes: is a consumer running?"
    )
    execute(url, "UPDATE consumer.offsets SET updated_at = now() WHERE part = 0")
    # The group moves, and one of its partitions does not: the one old message there has waited.
    (problem,) = of_the_group()
    assert problem.startswith(f"group totals: {topic}-1 stands at offset 1 since ")
    assert "1 offset waiting, and other partitions move" in problem
    assert f"`outbox offsets set totals {topic} 1 2 --skip" in problem
    execute(url, "UPDATE consumer.offsets SET next_offset = 2 WHERE part = 1")
    assert of_the_group() == []
    put(url, "consumer.reservations", grp="totals", topic=topic)
    assert of_the_group() == ["group totals: 1 call stuck: `outbox external list`"]


def test_a_backlog_that_can_not_be_counted_in_time_hides_nothing_else(status, outbox_postgres, monkeypatch):
    """As while an old transaction keeps millions of dead rows, which every count has to pass."""
    execute(
        outbox_postgres.url, "INSERT INTO outbox.relays (instance, version, alive_until) VALUES ('r', '1', 'infinity')"
    )
    execute(outbox_postgres.url, "UPDATE outbox.lanes SET owner = 'r', lease_until = 'infinity'")
    assert status.look()["problems"] == []
    monkeypatch.setattr(insights, "_STATEMENT_SECONDS", 1)
    monkeypatch.setattr(insights, "WAITING", "SELECT lane, pg_sleep(60), NULL FROM {lanes}")
    found = status.look()
    outbox = found["outbox"]
    assert (outbox["counted"], outbox["exact"], outbox["oldest_seconds"]) == (False, False, None)
    assert [lane["owner"] for lane in outbox["lanes"]] == ["r"] * 4
    (problem,) = found["problems"]
    assert problem.startswith("the waiting events could not be counted within 1 s")
