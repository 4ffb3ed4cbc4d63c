"""`outbox dead-letters retry | discard` with as many dead letters as an outage of a topic leaves. No Kafka here."""

from __future__ import annotations

import json
import os
import signal
import threading
from typing import Any

import psycopg
import pytest
from nursery import NURSERY
from support import wait_until
from typer.testing import CliRunner

from outbox._app import migrate as db
from outbox.sandbox._process import patience
from relay.cli.app import app
from relay.operations import dead_letters
from relay.operations.dead_letters import DeadLetters, Selection

MANY = 5_000  # five batches
SOME = 3_000

DEAD = """
WITH dead AS (
    INSERT INTO outbox.dead_letters (lane, id, event_id, aggregate_type, aggregate_id, event_type, payload, headers,
                                     created_at, attempts, last_error, first_failed_at)
    SELECT 0, g, gen_random_uuid(), 'Order', 'k' || g, 'T', jsonb_build_object('n', g, 'text', repeat('x', 1000)),
           '{"tenant": "acme"}', now(), 3, 'no such topic', now() FROM generate_series(1, %s) g RETURNING *)
INSERT INTO outbox.failures (lane, id, event_id, aggregate_type, aggregate_id, blocks, attempts, last_error,
                             first_failed_at, last_failed_at, next_attempt_at)
SELECT lane, id, event_id, aggregate_type, aggregate_id, true, 3, last_error, now(), now(), 'infinity' FROM dead"""

COUNTS = """
SELECT (SELECT count(*) FROM outbox.events), (SELECT count(*) FROM outbox.dead_letters),
       (SELECT count(*) FROM outbox.failures), (SELECT count(*) FROM outbox.audit)"""


class Box:
    """An outbox of one lane, with dead letters that block their keys."""

    def __init__(self, database: Any) -> None:
        self.url = database.url
        db.change_lanes(self.url, 1)
        self.connect = database.connect
        self.admin = database.connect(autocommit=True)

    def rows(self, query: str, *values: Any) -> list[Any]:
        return self.admin.execute(query, values or None).fetchall()

    def counts(self) -> tuple[int, int, int, int]:
        """Events, dead letters, failures, lines of the audit."""
        return self.rows(COUNTS)[0]

    def run(self, *arguments: str, status: int = 0) -> tuple[str, str]:
        done = CliRunner().invoke(app, ["dead-letters", *arguments], env={"OUTBOX_DATABASE_URL": self.url})
        assert done.exit_code == status, (done.output, done.exception)
        return done.stdout, done.stderr


@pytest.fixture
def box(outbox_postgres):
    return Box(outbox_postgres)


@pytest.fixture
def unhurried(monkeypatch):
    """A batch may take its time: one that takes two seconds is halved, and then their number is another."""
    monkeypatch.setattr(dead_letters, "_LIMITS", dead_letters._LIMITS.replace("'2s'", "'120s'"))


pytestmark = pytest.mark.usefixtures("unhurried")


def test_retry_of_all_dead_letters_and_then_of_the_events_that_they_became(box):
    box.admin.execute(DEAD, (MANY,))
    dry = json.loads(box.run("retry", "--all", "--dry-run", "--json")[0])
    assert dry == {"dry_run": True, "retrying": 0, "dead": MANY}
    assert box.counts() == (0, MANY, MANY, 0)
    stdout, stderr = box.run("retry", "--all")
    assert stdout == "5,000 events will be retried\n"
    assert stderr.splitlines()[0] == "1,000 of 5,000 retried"
    assert len(stderr.splitlines()) == 4
    assert box.counts() == (MANY, 0, MANY, 5)
    assert box.rows("SELECT count(*) FROM outbox.failures WHERE next_attempt_at <= now() AND attempts = 0") == [(MANY,)]
    audited = (
        "SELECT count(DISTINCT event_id) FROM outbox.audit, jsonb_array_elements_text(details->'event_ids') AS event_id"
    )
    assert box.rows(audited) == [(MANY,)]
    # All are due now, and a relay may be sending them.
    assert "0 events were discarded" in box.run("discard", "--all", "--reason", "x")[0]
    later = "UPDATE outbox.failures SET next_attempt_at = now() + interval '1 hour'"
    box.admin.execute(later)
    assert "5,000 events will be retried" in box.run("retry", "--all")[0]
    assert box.rows("SELECT count(*) FROM outbox.failures WHERE next_attempt_at <= now()") == [(MANY,)]
    box.admin.execute(later)
    assert "5,000 events were discarded" in box.run("discard", "--all", "--reason", "x")[0]
    assert box.counts() == (0, 0, 0, 10 + MANY)


def test_discard_of_all_dead_letters_keeps_them_in_the_audit(box):
    box.admin.execute(DEAD, (MANY,))
    before = box.rows("SELECT event_id::text, payload FROM outbox.dead_letters ORDER BY id")
    dry = json.loads(box.run("discard", "--all", "--reason", "x", "--dry-run", "--json")[0])
    assert dry == {"dry_run": True, "dead": MANY, "retrying": 0, "without_event": 0}
    assert "would be discarded: 5,000 dead letters" in box.run("discard", "--all", "--reason", "x", "--dry-run")[0]
    assert box.counts() == (0, MANY, MANY, 0)
    stdout, _ = box.run("discard", "--all", "--reason", "a test's")
    assert stdout == "5,000 events were discarded\n"
    assert box.counts() == (0, 0, 0, MANY)
    kept = "SELECT details->>'event_id', details->'payload' FROM outbox.audit WHERE why = %s ORDER BY id"
    assert box.rows(kept, "a test's") == before


@pytest.mark.parametrize(
    ("command", "table"),
    [(("retry",), "failures"), (("discard", "--reason", "x"), "dead_letters")],
    ids=["retry", "discard"],
)
def test_one_that_is_locked_is_left_and_named_and_the_others_are_done(box, monkeypatch, command, table):
    """A relay that settles, or another command, holds a row for longer than a batch waits, which is not long here."""
    monkeypatch.setattr(dead_letters, "_LIMITS", dead_letters._LIMITS.replace("'500ms'", "'50ms'"))
    box.admin.execute(DEAD, (SOME,))
    ((event_id,),) = box.rows("SELECT event_id::text FROM outbox.dead_letters WHERE id = 1234")
    with box.connect() as relay:
        relay.execute(f"SELECT FROM outbox.{table} WHERE id = 1234 FOR UPDATE")
        stdout, stderr = box.run(*command, "--all", "--json", status=1)
    done = json.loads(stdout)
    assert done["locked"] == [event_id]
    assert len(done["retried" if command[0] == "retry" else "discarded"]) == SOME - 1
    assert stderr.splitlines()[-1].startswith("outbox: 1 failed events are locked by another transaction")
    assert event_id in stderr
    assert box.rows("SELECT event_id::text FROM outbox.dead_letters") == [(event_id,)]
    box.run(*command, event_id)
    assert box.rows("SELECT * FROM outbox.dead_letters") == []


def test_a_relay_never_waits_long_for_a_batch(box):
    """The batch gives way: it waits half a second for a row, and its own locks are free again then."""
    box.admin.execute(DEAD, (2000,))
    with box.connect() as relay:
        relay.execute("SELECT FROM outbox.failures WHERE id = 900 FOR UPDATE")
        command = threading.Thread(target=lambda: box.run("retry", "--all"))
        command.start()
        waiting = "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%%OVERRIDING SYSTEM%%'"
        wait_until(lambda: box.rows(waiting), what="the batch to wait")
        # As the relay would: it holds one of the batch's rows, and wants another one.
        relay.execute(f"SET LOCAL lock_timeout = '{5 * patience():g}s'")
        relay.execute("UPDATE outbox.failures SET last_failed_at = now() WHERE id = 100")
        relay.rollback()
        command.join(30 * patience())
    assert not command.is_alive()


def test_a_command_that_is_killed_has_done_whole_batches_and_the_next_one_does_the_rest(box, tmp_path):
    box.admin.execute(DEAD, (SOME,))
    command = ("discard", "--reason", "x", "--all")
    with box.connect() as relay:
        # It is held up in the second batch, and killed there.
        relay.execute("SELECT FROM outbox.dead_letters WHERE id > 1000 AND id % 2 = 0 FOR UPDATE")
        argv, environment = ["-m", "relay.cli", "dead-letters", *command], {"OUTBOX_DATABASE_URL": box.url}
        killed = NURSERY.fork(argv, os.environ | environment, tmp_path, tmp_path / "output")
        wait_until(lambda: " of 3,000 " in (tmp_path / "output").read_text(), what="the first batch")
        killed.signal(signal.SIGKILL)
        assert killed.wait(30)
    # Its last statement may be under way still.
    others = (
        "SELECT 1 FROM pg_stat_activity WHERE application_name = 'outbox dead-letters' AND datname = current_database()"
    )
    wait_until(lambda: not box.rows(others), what="the server to notice")
    events, dead, failures, audit = box.counts()
    assert 0 < dead < SOME
    assert (events, failures, audit) == (0, dead, SOME - dead)
    box.run(*command)
    assert box.counts() == (0, 0, 0, SOME)


def test_large_payloads_are_kept_whole_and_take_smaller_batches(box, monkeypatch):
    """8 × 1 MB that don't compress, each of which takes a while on any machine: one batch would pass the limit."""
    limits = dead_letters._LIMITS.replace("'statement_timeout', '120s'", "'statement_timeout', '800ms'")
    monkeypatch.setattr(dead_letters, "_LIMITS", limits)
    box.admin.execute(
        "CREATE FUNCTION outbox.delay() RETURNS trigger LANGUAGE plpgsql AS"
        " 'BEGIN PERFORM pg_sleep(0.12); RETURN OLD; END'"
    )
    box.admin.execute(
        "CREATE TRIGGER delay BEFORE DELETE ON outbox.dead_letters FOR EACH ROW EXECUTE FUNCTION outbox.delay()"
    )
    box.admin.execute(
        "INSERT INTO outbox.dead_letters (lane, id, event_id, aggregate_type, aggregate_id, event_type, payload_bytes,"
        " created_at, attempts, last_error, first_failed_at)"
        " SELECT 0, g, gen_random_uuid(), 'Order', 'k', 'T', (SELECT string_agg(sha512((g * 100000 + i)::text::bytea),"
        " ''::bytea) FROM generate_series(1, 15000) i), now(), 1, 'too large', now() FROM generate_series(1, 8) g"
    )
    ((size, digest),) = box.rows(
        "SELECT sum(octet_length(payload_bytes)), sum(hashtext(payload_bytes::text)) FROM outbox.dead_letters"
    )
    assert size == 8 * 15000 * 64
    assert json.loads(box.run("discard", "--all", "--reason", "x", "--json")[0])["locked"] == []
    kept = "SELECT sum(hashtext(decode(details->>'payload_base64', 'base64')::text)), count(*) FROM outbox.audit"
    assert box.rows(kept) == [(digest, 8)]
    assert box.rows("SELECT count(DISTINCT xmin::text) > 1 FROM outbox.audit") == [(True,)]


def test_payloads_that_must_not_be_kept(box):
    box.admin.execute(DEAD, (3,))
    box.run("discard", "--all", "--reason", "asked to forget", "--drop-payload")
    names = ["aggregate_id", "aggregate_type", "attempts", "created_at", "event_id", "event_type"]
    names += ["id", "lane", "last_error"]
    assert box.rows("SELECT ARRAY(SELECT jsonb_object_keys(details) ORDER BY 1) FROM outbox.audit") == 3 * [(names,)]


# --- events that were deleted by hand --------------------------------------------------------------------------------


def test_a_failure_whose_event_was_deleted_is_shown_and_can_only_be_discarded(box):
    """Its key waits, and an event of the key is behind it."""
    box.admin.execute(
        "INSERT INTO outbox.events (aggregate_type, aggregate_id, event_type) "
        "VALUES ('Order', 'a', 'a1'), ('Order', 'a', 'a2')"
    )
    ((deleted,),) = box.rows(
        "INSERT INTO outbox.failures (lane, id, event_id, aggregate_type, aggregate_id, blocks, attempts, last_error,"
        " first_failed_at, last_failed_at, next_attempt_at)"
        " SELECT lane, id, event_id, aggregate_type, aggregate_id, true, 3, 'no such topic', now(), now(), 'infinity'"
        " FROM outbox.events WHERE event_type = 'a1' RETURNING event_id::text"
    )
    box.admin.execute("DELETE FROM outbox.events WHERE event_type = 'a1'")
    box.admin.execute(DEAD.replace("generate_series(1, %s)", "generate_series(101, 102)"))
    listed = json.loads(box.run("list", "--json")[0])["failures"]
    assert {(each["event_id"] == deleted, each["state"]) for each in listed} == {
        (True, "its event was deleted, its key waits"),
        (False, "dead, its key waits"),
    }
    assert (
        f"{deleted}  Order/a  ?  its event was deleted, its key waits, 3 attempts: no such topic" in box.run("list")[0]
    )
    shown = json.loads(box.run("show", deleted)[0])
    assert (shown["state"], shown["events_behind_it"]) == ("its event was deleted, its key waits", 1)
    assert "can only be discarded" in box.run("retry", deleted, status=1)[1]
    dry = json.loads(box.run("discard", "--all", "--reason", "x", "--dry-run", "--json")[0])
    assert (dry["dead"], dry["without_event"]) == (2, 1)
    assert "1 event was discarded" in box.run("discard", deleted, "--reason", "deleted by hand")[0]
    assert box.rows("SELECT * FROM outbox.failures WHERE id < 100") == []
    ((why, details),) = box.rows("SELECT why, details FROM outbox.audit")
    assert (why, details["event_id"], details["event_type"]) == ("deleted by hand", deleted, None)


def test_a_failure_is_not_taken_for_one_without_an_event_while_its_event_moves(box):
    """A dead letter that is put back leaves one table and enters another in one transaction."""
    box.admin.execute(DEAD, (1,))
    with psycopg.connect(box.url, autocommit=True) as other, other.transaction():
        other.execute(
            "WITH gone AS (DELETE FROM outbox.dead_letters RETURNING *) INSERT INTO outbox.events (id, event_id,"
            " aggregate_type, aggregate_id, event_type) OVERRIDING SYSTEM VALUE SELECT id, event_id, aggregate_type,"
            " aggregate_id, event_type FROM gone"
        )
        assert DeadLetters(box.admin, "outbox").count(Selection(), discard=True)["without_event"] == 0
    assert DeadLetters(box.admin, "outbox").count(Selection(), discard=True)["without_event"] == 0


# --- the archive -----------------------------------------------------------------------------------------------------

ARCHIVED = """
INSERT INTO outbox.published (lane, id, event_id, aggregate_type, aggregate_id, event_type, payload, created_at, topic,
                              partition, "offset", published_at)
SELECT 0, g, gen_random_uuid(), 'Order', 'k' || g %% 1000, 'T', jsonb_build_object('n', g), now(), 'orders', 0, g, now()
  FROM generate_series(1, %s) g"""
MANY_ARCHIVED = 5_000


def test_replay_of_all_events_of_the_archive(box):
    """In their old order, each once, although the last thousand of them were replayed before."""
    box.admin.execute(ARCHIVED, (MANY_ARCHIVED,))
    box.admin.execute(
        "INSERT INTO outbox.published (lane, id, event_id, aggregate_type, aggregate_id, event_type, payload, "
        "created_at, published_at) SELECT lane, id + 1000, event_id, aggregate_type, aggregate_id, event_type, "
        "payload, created_at, clock_timestamp() FROM outbox.published WHERE id > %s",
        (MANY_ARCHIVED - 1000,),
    )
    looked = CliRunner().invoke(app, ["replay", "--all", "--dry-run", "--json"], env={"OUTBOX_DATABASE_URL": box.url})
    shown = json.loads(looked.stdout)
    assert (shown["events"], shown["keys"], shown["sent"]) == (MANY_ARCHIVED, 1000, 0)
    done = CliRunner().invoke(
        app,
        ["replay", "--all", "--yes", "--reason", "a consumer lost its table", "--json"],
        env={"OUTBOX_DATABASE_URL": box.url},
    )
    assert (done.exit_code, json.loads(done.stdout)["sent"]) == (0, MANY_ARCHIVED), done.output
    steps = (
        "SELECT count(*), count(DISTINCT event_id), count(*) FILTER (WHERE headers ? 'outbox-replay'), "
        "bool_and(n > before) FROM (SELECT *, (payload ->> 'n')::int AS n, "
        "coalesce(lag((payload ->> 'n')::int) OVER (ORDER BY id), 0) AS before FROM outbox.events) AS e"
    )
    assert box.rows(steps) == [(MANY_ARCHIVED, MANY_ARCHIVED, MANY_ARCHIVED, True)]
    assert box.rows("SELECT why, details FROM outbox.audit") == [
        ("a consumer lost its table", {"events": MANY_ARCHIVED})
    ]
