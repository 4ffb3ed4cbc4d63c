"""A whole job under a role that owns nothing: with the rights of `outbox db roles`, and those on its sink's table."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from bench import Bench, ided
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient
from psycopg import sql
from rows_and_roles import drop_role, outbox
from support import close_connections, wait_until
from uuid_utils.compat import uuid7

from outbox.consumer import connections
from outbox.consumer.errors import DataLost, EffectFailed, Fenced
from outbox.consumer.kafka_admin import KafkaAdmin

pytestmark = pytest.mark.spark

KEEP_DAYS = 5
AGO = KEEP_DAYS + 5


class Desk:
    """The job's role has the ``bench``; ``as_owner`` is for what the sink's owner does."""

    def __init__(self, bench: Bench, role: str) -> None:
        self.bench = bench
        self.owner = bench.database.url
        self.as_owner(bench.job.setup)
        self.as_owner(sql.SQL("CREATE ROLE {} LOGIN").format(sql.Identifier(role)))
        self.bench.command("db", "roles", f"consumer={role}", "--apply")
        self.as_owner(
            sql.SQL("GRANT SELECT, INSERT, UPDATE, DELETE ON order_totals TO {}").format(sql.Identifier(role))
        )
        bench.database = SimpleNamespace(url=self.owner.replace("postgres@", f"{role}@"))
        assert bench.rows("SELECT current_user::text") == [(role,)]

    def as_owner(self, statements: Any) -> None:
        with psycopg.connect(self.owner) as connection:
            connection.execute(statements)

    def dead(self) -> list[tuple[Any, ...]]:
        return self.bench.rows("SELECT reason, state, attempts FROM consumer.dead_letters ORDER BY id")


@pytest.fixture
def desk(bench: Bench) -> Iterator[Desk]:
    role = f"job_{bench.database.name}"
    url = bench.database.url
    yield Desk(bench, role)
    # Its sessions first: they belong to the database, which goes later.
    close_connections()
    connections.close_all()
    with psycopg.connect(url, autocommit=True) as connection:
        drop_role(connection, role)


def test_a_whole_job_with_the_rights_of_its_role(bench: Bench, desk: Desk):
    job = replace(bench.job, setup=None, keep_order=True)
    plain = ("driver", job, 2_000), ("executors", job, 0)
    for name, made, here in (*plain, ("transform", replace(job, transform=lambda rows: rows), 2_000)):
        known = bench.send(name, 1)
        bench.send(name, 1, event_id=known)
        bench.send(name, 2)
        totals = bench.once(made, keep_days=KEEP_DAYS, driver_records=here)
        assert (totals.applied, totals.duplicates, bench.totals()[name][1]) == (2, 1, 2)
    # What a driver can't do for its rights it says, and it does not stop anything.
    told = {figures["problem"] for text, figures in bench.reports if text == "days of processed_messages"}
    assert told == {"permission denied for schema consumer"}
    default = "SELECT count(*) FROM consumer.processed_messages_default"
    assert bench.rows(default) == [(6,)]

    # Dead letters: one is tried again in vain, then with success, and one is discarded.
    desk.as_owner("ALTER TABLE order_totals ADD CONSTRAINT sane CHECK (total_cents < 1000)")
    bench.send("a", 1, amount_cents=5000)
    bench.send("a", 2)
    bench.send_raw(b"no JSON", ided(), "b")
    assert bench.once(job).dead == 3
    bench.command("dead-letters", "retry", "--side", "consumer", "--all", "--group", job.group, "--cause", "failed")
    assert bench.once(job).applied == 0
    assert desk.dead() == [("failed", "dead", 2), ("behind", "dead", 2), ("undecodable", "dead", 1)]
    desk.as_owner("ALTER TABLE order_totals DROP CONSTRAINT sane")
    bench.command("dead-letters", "retry", "--side", "consumer", "--all", "--group", job.group, "--cause", "failed")
    assert bench.once(job).applied == 2
    assert bench.totals()["a"] == (5010, 2, 2, 0, "s2")
    [(number,)] = bench.rows("SELECT id FROM consumer.dead_letters")
    bench.command("dead-letters", "discard", "--side", "consumer", str(number), "--reason", "test")
    assert desk.dead() == []

    # Moved by hand, and taken over by another driver.
    with bench.runner(job) as older:
        assert older.once(threading.Event()).read == 0
        back = ["reset", job.group, "--topic", bench.topic, "--to", "earliest", "--reason", "test"]
        assert "come again" in bench.command("offsets", *back)
        with pytest.raises(Fenced):
            older.once(threading.Event())
    before = bench.totals()
    totals = bench.once(job)
    assert (totals.applied, totals.dead, bench.totals()) == (0, 1, before)
    assert bench.rows("SELECT count(*) FROM consumer.audit WHERE who <> current_user") == [(0,)]

    # Retention: what is lost is written down, and accepted.
    bench.send("late", 1)
    bench.send("late", 2)
    [(part,)] = bench.rows("SELECT part FROM consumer.offsets WHERE next_offset > 0 ORDER BY part LIMIT 1")
    retention(bench, part)
    bench.run("UPDATE consumer.offsets SET next_offset = 0")
    with pytest.raises(DataLost, match="retention removed messages 0 to"):
        bench.once(job)
    assert bench.rows("SELECT part, kind FROM consumer.losses") == [(part, "retention")]
    bench.command("offsets", "reset", job.group, "--topic", bench.topic, "--to", "loss", "--reason", "test")
    bench.once(job)
    assert bench.totals() == before | {"late": (20, 2, 2, 0, "s2")}


def retention(bench: Bench, part: int) -> None:
    """Delete the partition's first message."""
    admin = AdminClient({"bootstrap.servers": bench.topics.bootstrap_servers})
    for future in admin.delete_records([TopicPartition(bench.topic, part, 1)]).values():
        future.result(30)
    view = KafkaAdmin({"bootstrap.servers": bench.topics.bootstrap_servers})
    wait_until(lambda: view.look([bench.topic])[1][bench.topic, part].first == 1, what="the message to go")


def test_a_role_that_owns_nothing_forgets_ids(bench: Bench, desk: Desk):
    """Those in the default partition, where all are that nobody made a day for; a day's partition is its owner's."""
    job = replace(bench.job, setup=None)
    milliseconds = int((time.time() - AGO * 86400) * 1000)
    old = uuid.UUID(int=milliseconds << 80 | uuid7().int & (1 << 80) - 1)
    bench.send("a", 1, event_id=old)
    bench.send("a", 2)
    assert bench.once(job, keep_days=KEEP_DAYS).applied == 2
    desk.as_owner(
        f"UPDATE consumer.processed_messages SET seen_at = seen_at - interval '{AGO} days' "
        f"WHERE message_id = '{old}';"
        # A day that somebody has made, and that is to be dropped by now.
        "CREATE TABLE consumer.processed_messages_20260101 PARTITION OF consumer.processed_messages "
        "FOR VALUES FROM ('2026-01-01') TO ('2026-01-02')"
    )
    assert bench.once(job, keep_days=KEEP_DAYS).read == 0
    assert bench.rows("SELECT count(*) FROM consumer.processed_messages") == [(1,)]
    told = [figures["problem"] for text, figures in bench.reports if text == "days of processed_messages"]
    assert told[-1] == "permission denied for table processed_messages_20260101"
    bench.send("a", 1, event_id=old)
    assert bench.once(job, keep_days=KEEP_DAYS).dead == 1
    assert desk.dead() == [("too-old", "dead", 1)]


def test_a_whole_round_in_one_transaction_makes_tables(bench: Bench, desk: Desk):
    """It needs one right more: see docs/operations/migrations.md."""
    job = replace(bench.job, setup=None, atomic="batch", transform=lambda rows: rows.repartition(2))
    bench.send("a", 1)
    with pytest.raises(EffectFailed, match="permission denied for schema consumer"):
        bench.once(job)
    [(role,)] = bench.rows("SELECT quote_ident(current_user)")
    desk.as_owner(f"GRANT CREATE ON SCHEMA consumer TO {role}")
    assert bench.once(job).applied == 1
    bench.send("a", 2)
    assert bench.once(job).applied == 1
    assert bench.totals()["a"] == (20, 2, 2, 0, "s2")


TEAM = "Team B"


def test_a_whole_job_in_the_schema_of_a_team(bench: Bench, desk: Desk):
    """Each way of a round, dead letters and expired ids, by a role that reaches no other consumers' schema."""
    [(role,)] = bench.rows("SELECT current_user::text")
    outbox(desk.owner, "db", "upgrade", "--consumer", "--schema", TEAM)
    outbox(desk.owner, "db", "roles", f"consumer={role}", "--schema", TEAM, "--apply")
    names = sql.Identifier(TEAM), sql.Identifier(role)
    desk.as_owner(sql.SQL("GRANT CREATE ON SCHEMA {} TO {}").format(*names))
    desk.as_owner(sql.SQL("REVOKE USAGE ON SCHEMA consumer FROM {}").format(names[1]))
    job = replace(bench.job, setup=None, keep_order=True)
    whole = replace(job, keep_order=False, atomic="batch", transform=lambda rows: rows.repartition(2))
    for name, made, here in (("driver", job, 2_000), ("executors", job, 0), ("batch", whole, 0)):
        known = bench.send(name, 1)
        bench.send(name, 1, event_id=known)
        bench.send_raw(b"no JSON", ided(), name)
        totals = bench.once(made, schema=TEAM, driver_records=here)
        assert (totals.applied, totals.duplicates, totals.dead) == (1, 1, 1), name
    offsets = f'SELECT count(*) FROM "{TEAM}".offsets WHERE grp = %s AND next_offset > 0'
    letters = f'SELECT state FROM "{TEAM}".dead_letters'
    with psycopg.connect(desk.owner) as connection:
        assert connection.execute(offsets, (job.group,)).fetchone() != (0,)
        for table in ("groups", "offsets", "processed_messages", "dead_letters"):
            assert connection.execute(f"SELECT count(*) FROM consumer.{table}").fetchone() == (0,)
    assert bench.rows(letters) == [("dead",)] * 3
    outbox(bench.database.url, *("dead-letters", "retry", "--side", "consumer", "--all"), consumer_schema=TEAM)
    assert bench.once(job, schema=TEAM).applied == 0
    assert bench.rows(letters) == [("dead",)] * 3
