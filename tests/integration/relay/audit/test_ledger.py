"""The ledger: what was committed, counted by the database, so that a row that was deleted is missed."""

from __future__ import annotations

import json
import os
import re
import time
from functools import partial
from types import SimpleNamespace

import psycopg
import pytest
from audit_support import EVENTS, Pipeline, an_id
from confluent_kafka import Producer
from psycopg.conninfo import conninfo_to_dict
from reconcile_support import other_program
from rows_and_roles import bury, outbox, put
from spans import relay
from support import order, wait_until, write
from typer.testing import CliRunner

from outbox import Event
from outbox._app import migrate as db
from relay.audit import comparison, findings
from relay.audit import ledger as ledger_module
from relay.audit.findings import MOST_NAMED
from relay.audit.ledger import prune, turn_on
from relay.audit.topics import Topics
from relay.cli.app import app

__all__ = ["order"]


@pytest.fixture
def ledger(outbox_postgres, outbox_kafka, order) -> Pipeline:
    """A pipeline whose relay does not run yet, and whose ledger has been on for an hour."""
    pipeline = Pipeline(outbox_postgres, outbox_kafka, *order)
    pipeline.keep_ledger()
    pipeline.kept_before()
    return pipeline


def written(pipeline: Pipeline, count: int = EVENTS) -> list[str]:
    """Write events whose ids are of ten minutes ago: a minute that is over."""
    return pipeline.add(count, ago=600)


@pytest.mark.parametrize("archive_days", [0, 1])
def test_an_event_that_was_deleted_before_it_was_published(ledger, archive_days):
    if not archive_days:
        ledger.run("DELETE FROM outbox.published")
    written(ledger)
    with relay(ledger.database, ledger.kafka, relay__archive_days=archive_days):
        ledger.published()
        topic = ("--topic", ledger.topic)
        status, found = ledger.audit(*topic)
        assert (status, found["differences"]) == (0, [])
        assert sum(one["committed"] for one in found["windows"]) == EVENTS
        assert {one["state"] for one in found["windows"]} == {"equal"}
        ledger.command("relay", "pause", "--reason", "a test")
        more = written(ledger, 3)
        assert ledger.differences(*topic) == []
        ledger.run(f"DELETE FROM outbox.events WHERE event_id = '{more[1]}'")
        ledger.command("relay", "resume")
        ledger.published()
        [one] = ledger.audit(*topic)[1]["differences"]
        assert (one["kind"], one["event_id"]) == ("missing", None)
        # All of one minute, or the last three alone in the next one.
        assert re.match(r"(63|3) events written, and (62|2) in the outbox or (its archive|on Kafka)", one["text"])


@pytest.mark.parametrize("archive_days", [0, 1])
def test_a_topic_that_only_the_ledger_names_is_read(ledger, archive_days, monkeypatch):
    """And events that went elsewhere than they would now, before the routes were changed, are not missing."""
    if not archive_days:
        ledger.run("DELETE FROM outbox.published")
    written(ledger)
    with relay(ledger.database, ledger.kafka, relay__archive_days=archive_days):
        ledger.published()
    waiting = Pipeline(ledger.database, ledger.kafka, f"{ledger.kind}-other", f"{ledger.kind.lower()}-other-events")
    written(waiting, 1)
    assert ledger.differences() == []
    moved = ledger.kafka.create_topic(f"{ledger.kind.lower()}-moved", 1)
    routes = {ledger.kind: moved, "Former": ledger.topic}
    monkeypatch.setenv("OUTBOX_ROUTES", json.dumps({name: {"topic": topic} for name, topic in routes.items()}))
    waiting.run(f"DELETE FROM outbox.ledger WHERE aggregate_type = '{waiting.kind}'")
    waiting.run("DELETE FROM outbox.events")
    with monkeypatch.context() as patched:
        patched.setattr(Topics, "events", None)
        assert ledger.differences() == []
    ledger.run("UPDATE outbox.ledger SET events = events + 1")
    assert ("missing", None) in ledger.differences()


@pytest.mark.parametrize("expired", [False, True])
def test_a_topic_that_no_route_names_any_more_is_read_if_a_group_reads_it(ledger, expired, monkeypatch):
    """Also where retention may have deleted a part of it. If none reads it, the difference says what to do."""
    ledger.run("DELETE FROM outbox.published")
    if expired:
        ledger.kind = ledger.kafka.name("Old")
        ledger.topic = ledger.kafka.create_topic(f"{ledger.kind.lower()}-events", 1, {"retention.ms": "300000"})
        ledger.produce(value=b"x")
        ledger.cut(0)
    # In the middle of a minute.
    ids = ledger.add(EVENTS, ago=int(600 + time.time() % 60 - 30))
    with relay(ledger.database, ledger.kafka):
        ledger.published()
    moved = ledger.kafka.create_topic(ledger.kafka.name("moved").lower(), 1)
    monkeypatch.setenv("OUTBOX_ROUTES", json.dumps({ledger.kind: {"topic": moved}}))
    [missing] = ledger.audit()[1]["differences"]
    assert (missing["kind"], missing["topic"]) == ("missing", moved)
    assert missing["text"].startswith(f"{EVENTS} events written, and 0 in the outbox or on Kafka")
    assert "give --topic for the old and the new topic" in missing["text"]
    assert ledger.differences("--topic", moved, "--topic", ledger.topic) == []
    # The other topic is of another program.
    other = ledger.kafka.create_topic(ledger.kafka.name("other").lower(), 1)
    ledger.produce(topic=other, value=b"{}", headers={"ce_id": str(an_id(600)), "ce_source": "/another"})
    ledger.applied(EVENTS + 1 + expired, topics=[other])
    assert ledger.differences() == []
    # One by one, too.
    ledger.repeat(ids[0])
    assert ledger.differences() == ([] if expired else [("repeated", ids[0])])
    ledger.run("UPDATE outbox.ledger SET events = events + 1")
    assert ("missing", None) in ledger.differences()


@pytest.mark.parametrize("why", ["limit", "expired"])
def test_a_difference_that_the_former_topics_were_not_compared_for_stays(ledger, why, monkeypatch):
    """With the topics that groups read, too many events are to be compared, or retention deletes records meanwhile."""
    ledger.run("DELETE FROM outbox.published")
    # In the middle of two minutes.
    for ago in (600, 480):
        ledger.add(3, ago=int(ago + time.time() % 60 - 30))
    with relay(ledger.database, ledger.kafka):
        ledger.published()
    ledger.applied(6)
    ledger.run("UPDATE outbox.ledger SET events = events + 1")
    topic = ledger.kafka.create_topic(ledger.kafka.name("moved").lower(), 1, {"retention.ms": "300000"})
    moved = Pipeline(ledger.database, ledger.kafka, ledger.kind, topic)
    moved.produce(value=b"x")
    monkeypatch.setenv("OUTBOX_ROUTES", json.dumps({ledger.kind: {"topic": topic}}))
    looks, real = [], Topics.extents

    def extents(topics, *given, **named):
        looks.append(sorted(topics._topics))
        if why == "expired" and len(looks) == 2:
            moved.cut(0)
        return real(topics, *given, **named)

    monkeypatch.setattr(Topics, "extents", extents)
    if why == "limit":
        monkeypatch.setattr(findings, "AT_ONCE", 1)
        monkeypatch.setattr(comparison, "_MOST_COMPARED", 1)
    status, found = ledger.audit()
    assert looks == [[topic], sorted([topic, ledger.topic])]
    named = [(one["kind"], one["event_id"], one["topic"]) for one in found["differences"]]
    assert (status, named) == (1, [("missing", None, topic)] * 2)
    assert [one["state"] for one in found["windows"] if one["topic"] == topic] == ["different"] * 2
    assert any("were not compared one by one" in note for note in found["notes"]) == (why == "limit")


def test_a_former_topic_of_many_events_beside_another_outbox(ledger, monkeypatch):
    """The other one is in the same database, with the same source, and the group reads its topic too.

    It has given up every fourth message, and in the last minute more are repeated than are named.
    """
    monkeypatch.setattr(findings, "AT_ONCE", 30_000)
    ledger.run("DELETE FROM outbox.published")
    monkeypatch.setenv("OUTBOX_SCHEMA", "neighbour")
    for words in (["db", "upgrade"], ["db", "ledger", "on"]):
        ledger.command(*words)
    monkeypatch.delenv("OUTBOX_SCHEMA")
    moved, other = (ledger.kafka.create_topic(ledger.kafka.name(name).lower(), 1) for name in ("moved", "other"))
    options = {"bootstrap.servers": ledger.kafka.bootstrap_servers, "queue.buffering.max.messages": 300_000}
    producer, ids = Producer(options), {}
    # Seven milliseconds apart.
    event_id = (
        "(lpad(to_hex((extract(epoch FROM now() - interval '10 minutes') * 1000)::bigint + n * 7), 12, '0') "
        "|| '70008000' || lpad(to_hex(n), 12, '0'))::uuid"
    )
    for schema, topic in (("outbox", ledger.topic), ("neighbour", other)):
        ledger.run(
            f"INSERT INTO {schema}.events (event_id, aggregate_type, aggregate_id, event_type) "
            f"SELECT {event_id}, '{ledger.kind}', 'k', 'E' FROM generate_series(1, 30000) AS n"
        )
        ids[schema] = [str(one) for (one,) in ledger.rows(f"SELECT event_id FROM {schema}.events ORDER BY event_id")]
        ledger.run(f"DELETE FROM {schema}.events")
        for one in ids[schema]:
            producer.produce(topic, headers={"ce_id": one, "ce_source": "/outbox"})
    repeated = [ids["outbox"][3], *ids["outbox"][-MOST_NAMED:]]
    for one in repeated:
        producer.produce(ledger.topic, headers={"ce_id": one, "ce_source": "/outbox"})
    assert producer.flush(60) == 0
    ledger.run(
        "WITH g AS (INSERT INTO consumer.groups (grp, owner, strategy) VALUES ('g', 'a', 'OffsetsOnly') RETURNING grp) "
        "INSERT INTO consumer.offsets (grp, topic, part, topic_id, next_offset, generation) "
        "SELECT grp, topic, 0, 'x', 1000000, 1 "
        f"FROM g CROSS JOIN unnest(ARRAY['{ledger.topic}', '{moved}', '{other}']) AS topic; "
        "INSERT INTO consumer.losses (grp, topic, topic_id, part, first_offset, end_offset, kind, detail) "
        "SELECT grp, topic, topic_id, part, n, n + 1, 'given-up', 'd' "
        f"FROM consumer.offsets CROSS JOIN generate_series(0, 30000, 4) AS n WHERE topic <> '{moved}'"
    )
    monkeypatch.setenv("OUTBOX_ROUTES", json.dumps({ledger.kind: {"topic": moved}}))
    status, found = ledger.audit()
    named = {(one["kind"], one["event_id"], one["topic"]) for one in found["differences"]}
    assert (status, len(named), found["differences_count"]) == (1, MOST_NAMED, len(repeated))
    assert named < {("repeated", one, ledger.topic) for one in repeated}
    places = [(one["start"], one["topic"]) for one in found["windows"]]
    assert len({start for start, _ in places}) > 2
    assert places == sorted(places)


@pytest.mark.parametrize(
    ("retention", "differences", "meanwhile"),
    [
        ({}, [("missing", None)], False),
        ({"retention.ms": "-1"}, [("missing", None)], True),
        # Of those ten minutes ago some may be gone.
        ({"retention.ms": "300000"}, [], True),
        ({"retention.bytes": "1000000000"}, [], False),
    ],
)
def test_a_partition_that_retention_has_emptied_hides_no_loss(ledger, monkeypatch, retention, differences, meanwhile):
    ledger.run("DELETE FROM outbox.published")
    ledger.kind = ledger.kafka.name("Quiet")
    ledger.topic = ledger.kafka.create_topic(f"{ledger.kind.lower()}-events", 2, retention)
    ledger.add(3, keys=1, ago=600)
    with relay(ledger.database, ledger.kafka):
        ledger.published()
    [quiet] = [part for part, end in ledger.ends().items() if end == 0]
    ledger.produce(value=b"x", partition=quiet)
    if not meanwhile:
        ledger.cut(quiet)
        assert ledger.differences() == []
    ledger.add(1, keys=1, ago=600)
    ledger.run("DELETE FROM outbox.events")
    real = Topics.sums

    def sums(topics, *given, **named):
        ledger.cut(quiet)
        return real(topics, *given, **named)

    monkeypatch.setattr(Topics, "sums", sums)
    status, found = ledger.audit()
    assert (status, [(one["kind"], one["event_id"]) for one in found["differences"]]) == (len(differences), differences)
    noted = any("Kafka has deleted records of" in note for note in found["notes"])
    assert noted == (not differences)


def test_what_was_published_while_no_archive_was_kept_is_not_unknown(ledger):
    """Between two times at which one was kept, only the ledger knows it."""
    # In the middle of one minute.
    at = time.time() // 60 * 60 - 570
    for archive_days in (1, 0, 1):
        ledger.add(5, ago=int(time.time() - at))
        with relay(ledger.database, ledger.kafka, relay__archive_days=archive_days):
            ledger.published()
    status, found = ledger.audit()
    assert (status, found["differences"]) == (0, []), found
    assert sum(one["committed"] for one in found["windows"]) == 15
    ledger.run("DELETE FROM outbox.ledger WHERE ctid = (SELECT min(ctid) FROM outbox.ledger)")
    assert len(ledger.differences()) > 1


@pytest.mark.parametrize("acks", [1, 0])
def test_what_at_most_once_loses_is_counted(ledger, acks):
    """Without acknowledgements, the audit alone sees what a broker refuses."""
    ledger.kind = ledger.kafka.name("Small")
    ledger.topic = ledger.kafka.create_topic(f"{ledger.kind.lower()}-events", 1, {"max.message.bytes": "2000"})
    written(ledger, 5)
    with relay(ledger.database, ledger.kafka, delivery="at-most-once", relay__at_most_once_acks=acks):
        ledger.published()
        assert ledger.differences("--topic", ledger.topic) == []
        # Too large for this topic, alone in its request.
        write(ledger.database.url, [Event(ledger.kind, "k", "Placed", os.urandom(5_000), event_id=an_id())])
        ledger.published()
        dead = "SELECT count(*) FROM outbox.dead_letters"
        if acks:
            wait_until(lambda: ledger.rows(dead) == [(1,)], what="the dead letter")
            assert ledger.differences("--topic", ledger.topic) == []
        else:
            [one] = ledger.audit("--topic", ledger.topic)[1]["differences"]
            assert (one["kind"], one["event_id"]) == ("missing", None)
            assert re.match(r"\d+ events? written, and \d+ in the outbox or on Kafka", one["text"])
    assert ledger.rows(dead) == [(acks,)]
    if acks:
        # What a crash of the relay does between its COMMIT and Kafka.
        written(ledger, 2)
        ledger.run("DELETE FROM outbox.events")
        assert ledger.differences("--topic", ledger.topic) == [("missing", None)]


def test_what_relays_and_operators_insert_and_delete_is_known(ledger):
    written(ledger)
    with relay(ledger.database, ledger.kafka, relay__archive_days=1):
        ledger.published()
        ledger.command("replay", "--all", "--yes")
        ledger.published()
    # Two dead letters, one of which is discarded and one retried.
    dead = written(ledger, 2)
    bury(ledger.database.url)
    assert ledger.differences() == []
    for words in (("discard", dead[0], "--reason", "known"), ("retry", dead[1])):
        ledger.command("dead-letters", *words)
        assert ledger.differences() == []
    with relay(ledger.database, ledger.kafka, relay__archive_days=1):
        ledger.published()
    status, found = ledger.audit()
    assert (status, found["differences"]) == (0, [])
    assert sum(one["discarded"] for one in found["windows"]) == 1


def test_it_is_added_up_and_its_old_rows_are_deleted(ledger, monkeypatch):
    for _ in range(5):
        written(ledger, 3)
    ledger.run("UPDATE outbox.ledger SET written_at = written_at - interval '1 hour'")
    ledger.run(
        "INSERT INTO outbox.ledger SELECT aggregate_type, minute - 60 * 24 * 8, events, hashes, written_at "
        "FROM outbox.ledger LIMIT 2"
    )
    before = ledger.rows(
        "SELECT aggregate_type, minute, sum(events), mod(sum(hashes), 2::numeric ^ 128) "
        "FROM outbox.ledger WHERE minute > extract(epoch FROM now()) / 60 - 1000 GROUP BY 1, 2"
    )
    rows = ledger.rows("SELECT count(*) FROM outbox.ledger")
    # Without an archive.
    environment = {**ledger.environment, "OUTBOX_RELAY__ARCHIVE_DAYS": "0"}
    monkeypatch.setattr(type(ledger), "environment", environment)
    assert "the ledger would be added up" in ledger.command("db", "prune", "--dry-run")
    assert json.loads(ledger.command("db", "prune", "--dry-run", "--json")) == {"dry_run": True, "ledger_days": 7}
    assert ledger.rows("SELECT count(*) FROM outbox.ledger") == rows
    assert json.loads(ledger.command("db", "prune", "--json")) == {"dry_run": False, "ledger_days": 7}
    after = ledger.rows("SELECT aggregate_type, minute, events, hashes FROM outbox.ledger")
    assert sorted(after) == sorted(before)


def test_writers_need_no_right_on_it_and_one_row_is_added_a_statement(ledger):
    with psycopg.connect(ledger.database.url) as connection:
        connection.execute("CREATE TEMP TABLE given AS SELECT g FROM generate_series(1, 1000) AS g")
        connection.execute(
            "INSERT INTO outbox.events (aggregate_type, aggregate_id, event_type) SELECT 'A', g::text, 'E' FROM given"
        )
    assert ledger.rows("SELECT sum(events) FROM outbox.ledger") == [(1000,)]
    # At the turn of a minute there are two.
    assert ledger.rows("SELECT count(*) <= 2 FROM outbox.ledger") == [(True,)]
    role = f"writer_{ledger.kind[-8:].lower()}"
    ledger.run(f"CREATE ROLE {role}")
    try:
        ledger.run(f"GRANT USAGE ON SCHEMA outbox TO {role}")
        ledger.run(f"GRANT INSERT ON outbox.events TO {role}")
        with psycopg.connect(ledger.database.url) as writer:
            writer.execute(f"SET ROLE {role}")
            writer.execute(
                "INSERT INTO outbox.events (aggregate_type, aggregate_id, event_type) VALUES ('A', 'k', 'E')"
            )
    finally:
        ledger.run(f"DROP OWNED BY {role}; DROP ROLE {role}")
    assert ledger.rows("SELECT sum(events) FROM outbox.ledger") == [(1001,)]


def test_a_writer_can_not_read_its_key_and_writes_also_where_there_is_none(outbox_postgres):
    write = "INSERT INTO outbox.events (aggregate_type, aggregate_id, event_type) VALUES ('A', 'k', 'E')"
    with psycopg.connect(outbox_postgres.url, autocommit=True) as connection:
        turn_on(connection, "outbox", None)
        ((key,),) = connection.execute("SELECT encode(key, 'hex') FROM outbox.ledger_state").fetchall()
        # Every role may read the bodies of all functions.
        assert connection.execute("SELECT proname FROM pg_proc WHERE prosrc ~ %s", (key,)).fetchall() == []
        connection.execute(write)
        assert connection.execute("SELECT sum(events) FROM outbox.ledger").fetchall() == [(1,)]
        # As after a restore without this table.
        connection.execute("DELETE FROM outbox.ledger_state")
        connection.execute(write)
        assert connection.execute("SELECT sum(events) FROM outbox.ledger").fetchall() == [(1,)]


def test_it_is_turned_on_and_off_once(outbox_postgres):
    switch = partial(outbox, outbox_postgres.url, "db", "ledger")
    assert switch("off", status=1) == "outbox: the ledger is off\n"
    switch("on")
    assert switch("on", status=1) == "outbox: the ledger is on already\n"
    outbox(outbox_postgres.url, "db", "check")
    switch("off")
    switch("maybe", status=2)
    with psycopg.connect(outbox_postgres.url, autocommit=True) as connection:
        assert not prune(connection, "outbox", 1)
        assert connection.execute("SELECT count(*) FROM pg_trigger WHERE tgname = 'outbox_ledger'").fetchone() == (0,)


@pytest.mark.parametrize("word", ["on", "off"])
def test_it_is_turned_on_and_off_while_others_write(outbox_postgres, monkeypatch, word):
    """A try waits for a transaction that writes for a short time, as new writers wait behind it."""
    monkeypatch.setattr(ledger_module, "_LOCK_TIMEOUT", "200ms")
    with psycopg.connect(outbox_postgres.url) as writer, psycopg.connect(outbox_postgres.url, autocommit=True) as admin:
        if word == "off":
            turn_on(admin, "outbox", None)
        put(writer, "outbox.events")
        # Between two tries another one writes, and the first comes to its end.
        # Only the module's own pause: time.sleep itself is also called by other threads of this process.
        pause = SimpleNamespace(sleep=lambda _: (put(admin, "outbox.events"), writer.commit()))
        monkeypatch.setattr(db, "time", pause)
        url = f"{outbox_postgres.url}?options=-cstatement_timeout%3D20s"
        done = CliRunner().invoke(app, ["db", "ledger", word], env={"OUTBOX_DATABASE_URL": url})
    assert (done.exit_code, done.stdout) == (0, f"schema outbox: the ledger is {word}\n"), done.output
    assert re.fullmatch(r"outbox: [^\n]+; long transactions use these tables[^\n]+ \(try 1 of 6\)\n", done.stderr)


@pytest.mark.parametrize("word", ["on", "off"])
def test_a_command_that_is_stopped_while_it_turns_it_on_or_off_keeps_no_writer_out(outbox_postgres, monkeypatch, word):
    monkeypatch.setattr(ledger_module, "_IDLE_TIMEOUT", "200ms")
    with psycopg.connect(outbox_postgres.url, autocommit=True) as admin:
        admin.execute("SET lock_timeout = '3s'")
        if word == "off":
            turn_on(admin, "outbox", None)
        monkeypatch.setattr(
            ledger_module, "note", lambda connection, *_: (put(admin, "outbox.events"), connection.execute("SELECT 1"))
        )
        done = CliRunner().invoke(app, ["db", "ledger", word], env={"OUTBOX_DATABASE_URL": outbox_postgres.url})
        assert (done.exit_code, "idle-in-transaction timeout" in done.stderr) == (1, True), done.output
        assert admin.execute("SELECT count(*) FROM pg_trigger WHERE tgname = 'outbox_ledger'").fetchone() == (
            (word == "off"),
        )


def test_an_audit_says_why_a_ledger_that_is_there_is_not_used(ledger, monkeypatch):
    written(ledger, 1)

    def notes() -> list[str]:
        status, found = ledger.audit()
        assert status == 0
        return [note for note in found["notes"] if "ledger" in note and "archive" not in note]

    def then(statement: str, back: str) -> list[str]:
        ledger.run(statement)
        said = notes()
        ledger.run(back)
        return said

    assert notes() == []
    said = "there is a ledger, but events are not counted: its trigger on outbox.events is disabled or missing; "
    again = "`outbox db ledger off` and `on` begin another one"
    trigger = "ALTER TABLE outbox.events {} TRIGGER outbox_ledger"
    assert then(trigger.format("DISABLE"), trigger.format("ENABLE")) == [said + again]
    since = "UPDATE outbox.ledger_state SET since = since {} interval '1 day'"
    [note] = then(since.format("+"), since.format("-"))
    assert re.fullmatch(rf"the ledger is kept since .+, which is still to come by the database's clock; {again}", note)
    with ledger.operator() as theirs:
        role = conninfo_to_dict(theirs["OUTBOX_DATABASE_URL"])["user"]
        monkeypatch.setattr(Pipeline, "environment", theirs)
        assert notes() == []
        grant = f"SELECT ON outbox.ledger_state {{}} {role}"
        assert then(f"REVOKE {grant.format('FROM')}", f"GRANT {grant.format('TO')}") == [
            "there is a ledger, but this role may not read it; grant it: `outbox db roles operator=ROLE --apply`"
        ]


def test_a_type_that_a_writer_plants_is_not_used(ledger):
    """The trigger's function runs with its owner's rights, and a writer's pg_temp is searched unless it is named."""
    with psycopg.connect(ledger.database.url) as connection:
        connection.execute("CREATE TABLE public.called (by_whom text)")
        connection.execute(
            "CREATE FUNCTION pg_temp.evil(bytea) RETURNS boolean LANGUAGE plpgsql AS "
            "$$ BEGIN INSERT INTO public.called VALUES (current_user); RETURN true; END $$"
        )
        connection.execute("CREATE DOMAIN pg_temp.bytea AS pg_catalog.bytea CHECK (pg_temp.evil(VALUE))")
        connection.execute("CREATE DOMAIN pg_temp.text AS pg_catalog.text CHECK (pg_temp.evil(''::pg_catalog.bytea))")
        connection.execute(
            "INSERT INTO outbox.events (aggregate_type, aggregate_id, event_type) VALUES ('A', 'k', 'E')"
        )
        assert connection.execute("SELECT * FROM public.called").fetchall() == []
    assert ledger.rows("SELECT sum(events) FROM outbox.ledger") == [(1,)]


def test_while_a_transaction_hides_a_part_a_minute_that_differs_is_open(ledger):
    """Without an archive, what is missing may stand behind it."""
    ledger.run("DELETE FROM outbox.published")
    ids = written(ledger)
    ledger.run(f"DELETE FROM outbox.events WHERE event_id = '{ids[1]}'")
    with relay(ledger.database, ledger.kafka):
        ledger.published()
    producer = other_program(ledger.kafka, ledger.topic, 0)
    status, found = ledger.audit("--topic", ledger.topic)
    assert (status, found["differences"], {one["state"] for one in found["windows"]}) == (0, [], {"open"})
    producer.abort_transaction(30)
    assert ledger.differences("--topic", ledger.topic) == [("missing", None)]
