"""`outbox db prune --consumer`, and what the doctor says of remembered ids."""

from __future__ import annotations

import datetime as dt
import json
from unittest.mock import ANY

import psycopg
import pytest
from id_retention import KEEP, sink
from rows_and_roles import login_role, put
from support import with_path_of_role
from typer.testing import CliRunner

from outbox._clients.checks import Level
from outbox.consumer.errors import ConsumerUnavailable
from outbox.consumer.retention import NO_TIME, RetentionResult, _named
from relay.cli.app import app
from relay.config import load
from relay.operations.doctor import examine
from relay.operations.roles import RoleKind, grants
from spark_jobs.postgres.group_store import PostgresGroupStore

__all__ = ["sink", "with_path_of_role"]

pytestmark = pytest.mark.usefixtures("with_path_of_role")


def prune(url: str, *arguments: str, status: int = 0) -> str:
    done = CliRunner().invoke(app, ["db", "prune", "--consumer", *arguments], env={"OUTBOX_DATABASE_URL": url})
    assert done.exit_code == status, (done.output, done.exception)
    assert status == 0 or done.stderr.count("\n") == 1
    return done.stdout if status == 0 else done.stdout + done.stderr


def test_the_owner_keeps_the_days_for_consumers_that_own_nothing(sink):
    """From cron. The consumer has the rights that `outbox db roles` gives it, and no others."""
    old, lately, stray = sink.day(KEEP + 2), sink.day(KEEP + 3), sink.day(KEEP + 4)
    for day in (old, lately, sink.day(0)):
        sink.partition(day)
    with psycopg.connect(sink.url, autocommit=True) as admin, login_role(admin, "consumer") as role:
        for statement in grants([(RoleKind.CONSUMER, role)], "outbox", "consumer", wal=False):
            sink.run(statement)
        url = psycopg.conninfo.make_conninfo(sink.url, options=f"{sink.clock} -c role={role}")
        consumer = PostgresGroupStore(url, "consumer", "g", "test")
        consumer.take_over()
        sink.remember("g", old, KEEP + 2, 3)
        sink.remember("g", lately, 0)
        sink.remember("g", stray, KEEP + 4, 2)
        sink.remember("g", sink.day(0), 0)
        assert "permission denied" in consumer.retention(KEEP).make().problem

        # What it would do, and that the consumer itself can't.
        keep = ("--days", str(KEEP))
        days = {_named(day) for day in (NO_TIME, *(sink.day(ago) for ago in range(-3, KEEP + 1) if ago != 0))}
        expected = {"created": sorted(days), "dropped": [f"processed_messages_{old:%Y%m%d}"], "stray_rows": 2}
        expected |= {"keep_days": KEEP}
        before = sink.partitions(), sink.remembered()
        shown = json.loads(prune(sink.url, *keep, "--dry-run", "--json"))
        assert shown | {"created": sorted(shown["created"])} == expected | {"dry_run": True}
        refused = prune(url, *keep, status=1)
        assert refused.startswith("outbox: Postgres, keeping the days of processed_messages: permission denied")
        assert f"run it as the owner of the tables, {sink.one('SELECT current_user')}" in refused
        assert (sink.partitions(), sink.remembered()) == before

        text = prune(sink.url, *keep)
        assert text.splitlines() == [
            *(f"partition {name}: created" for name in sorted(days)),
            f"partition processed_messages_{old:%Y%m%d}: dropped",
            "2 ids of the default partition: forgotten",
        ]
        assert sink.remembered() == {("g", lately): 1, ("g", sink.day(0)): 1}
        assert sink.forgotten() == {"g": old + dt.timedelta(days=1)}
        assert prune(sink.url, *keep) == "nothing to do\n"
        assert consumer.retention(KEEP).make() == RetentionResult()
        longer_ago = (
            f"UPDATE consumer.processed_messages SET seen_at = now() - interval '{KEEP + 1} days' WHERE day = %s"
        )
        sink.run(longer_ago, (lately,))
        assert consumer.retention(KEEP).forget() == RetentionResult(problem=ANY, denied=True)
        assert prune(sink.url, *keep) == f"partition processed_messages_{lately:%Y%m%d}: dropped\n"
        assert consumer.retention(KEEP).forget() == RetentionResult()


def test_the_owner_is_told_what_keeps_the_days_as_they_are(sink):
    """In one line: tasks that hold the locks, tables that are not there, settings that can't be."""
    sink.group("g")
    old = sink.day(KEEP + 2)
    sink.partition(old)
    sink.remember("g", old, KEEP + 2)
    sink.remember("g", sink.day(0), 0)
    with psycopg.connect(sink.url) as task:
        task.execute("LOCK TABLE consumer.processed_messages IN ROW EXCLUSIVE MODE")
        pruned = sink.memory.prune(wait_seconds=0)
        assert "lock timeout" in next(pruned).problem
        with pytest.raises(ConsumerUnavailable, match="tasks may be using them"):
            next(pruned)
    # It is tried again until the task has released its lock.
    task = psycopg.connect(sink.url)
    task.execute("LOCK TABLE consumer.processed_messages IN ROW EXCLUSIVE MODE")
    pruned = sink.memory.prune()
    assert "lock timeout" in next(pruned).problem
    task.close()
    assert [name for done in pruned for name in done.dropped] == [f"processed_messages_{old:%Y%m%d}"]

    assert "outbox db upgrade --consumer" in prune(sink.url, "--schema", "nowhere", status=1)
    assert "--days: with --consumer at least 1" in prune(sink.url, "--days", "0", status=2)
    assert "--force is for the archive" in prune(sink.url, "--force", status=2)


def test_the_doctor_compares_with_what_the_topics_keep(sink, outbox_kafka):
    def topic(name, **config):
        made = outbox_kafka.create_topic(
            outbox_kafka.name(name), 1, {key.replace("_", "."): value for key, value in config.items()}
        )
        put(sink.url, "consumer.offsets", topic=made)
        return f"topic {made}, ids"

    def examined(keep_days):
        settings = load(
            database_url=sink.url,
            kafka={"bootstrap.servers": outbox_kafka.bootstrap_servers},
            consumer={"keep_days": keep_days},
        )
        return {finding.about: finding for finding in examine(settings)}

    sink.run("INSERT INTO consumer.groups (grp, owner) VALUES ('g', 'me')")
    nothing = examined(14)
    assert nothing["remembered ids"].level is Level.OK
    day = 86_400_000
    week, month = topic("week", retention_ms=str(7 * day)), topic("month", retention_ms=str(30 * day))
    forever, compacted = topic("forever", retention_ms="-1"), topic("compacted", cleanup_policy="compact")
    put(sink.url, "consumer.offsets", topic="gone")
    sink.remember("g", NO_TIME, 0, count=3)
    found = examined(14)
    assert {about for about in found if about.endswith(", ids")} == {month, forever, compacted}
    assert "messages for 30 days, ids are remembered for 14 days" in found[month].found
    assert "every message" in found[forever].found
    assert found[forever].level is Level.WARNING
    assert "3 without a time" in found["remembered ids"].found
    assert month not in examined(31)
    assert week in examined(6)
    put(sink.url, "consumer.losses", topic="week")
    lost = examined(14)["group g"]
    assert lost.level is Level.FAILURE
    assert "`outbox offsets reset g --topic week --to loss --reason '…'`" in lost.do
