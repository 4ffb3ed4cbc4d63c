"""What operators do with events that could not be published, and what an audit says of it."""

from __future__ import annotations

import datetime as dt
from uuid import UUID

import psycopg
import pytest
from audit_support import EVENTS, Pipeline, pipeline
from rows_and_roles import bury
from spans import relay
from support import order, wait_until

from relay.audit import tables
from relay.audit.sums import minute_of, minute_start
from relay.audit.tables import Tables
from relay.kafka.routing import Router
from relay.operations import dead_letters, topic_scan

__all__ = ["order", "pipeline"]


def swap(pipeline: Pipeline, one: str, other: str) -> None:
    """Let the archive say that two events were written in the other order."""
    pipeline.run(
        "UPDATE outbox.published AS p SET id = other.id FROM outbox.published AS other "
        f"WHERE (p.event_id, other.event_id) IN (('{one}', '{other}'), ('{other}', '{one}'))"
    )


@pytest.mark.parametrize("held", [False, True])
def test_an_event_that_is_retried_behind_later_ones_of_its_key(outbox_postgres, outbox_kafka, order, monkeypatch, held):
    """That is no difference, unless its key has waited for it; and the others of its key are compared as ever."""
    pipeline = Pipeline(outbox_postgres, outbox_kafka, *order)
    pipeline.kept_before()
    for module, name in ((dead_letters, "_BATCH"), (tables, "_ROWS_AT_ONCE"), (topic_scan, "_AT_ONCE")):
        monkeypatch.setattr(module, name, 200)
    # More than one batch of those who retry and read, with one more key than has a later event.
    many = 0 if held else 500
    dead, *others = pipeline.add(1 + many, keys=1 + many, ago=600)
    bury(pipeline.database.url, dead, *others, held=held)
    pipeline.add(many, keys=many, ago=600)
    later = pipeline.add(3, keys=1, ago=600)
    last, _ = pipeline.add(2, keys=2, ago=600)
    with relay(outbox_postgres, outbox_kafka, relay__archive_days=1):
        left = "SELECT aggregate_id FROM outbox.events"
        waiting = [("key-0",)] * 4 if held else []
        wait_until(lambda: pipeline.rows(left) == waiting, what="what need not wait to be published")
        assert pipeline.differences() == []
        pipeline.command("dead-letters", "retry", "--all")
        pipeline.published()
        [after] = pipeline.add(1, keys=1, ago=600)
        pipeline.published()
    assert pipeline.differences() == []
    offsets = {one: pipeline.record(one).offset() for one in (dead, *later)}
    assert (offsets[dead] > offsets[later[-1]]) != held
    if held:
        swap(pipeline, dead, later[0])
        assert pipeline.differences() == [("order", dead)]
    else:
        swap(pipeline, later[1], later[2])
        assert pipeline.differences() == [("order", later[1])]
        swap(pipeline, later[1], later[2])
        # What was written after the retry has waited for it.
        written = "UPDATE outbox.published SET created_at = created_at {} interval '1 hour' WHERE event_id = '{}'"
        pipeline.run(written.format("+", after))
        assert pipeline.differences() == []
        pipeline.run(written.format("+", last))
        assert pipeline.differences() == [("order", last)]
        pipeline.run(written.format("-", last))
        # As acknowledged, and as for its key's events around it.
        pipeline.run(f"UPDATE outbox.published SET partition = (partition + 1) % 3 WHERE event_id = '{dead}'")
        assert pipeline.differences() == [("partition", dead)] * 2


_MANY = """
INSERT INTO outbox.published (lane, id, event_id, aggregate_type, aggregate_id, event_type, created_at, published_at,
                              topic, partition, "offset")
SELECT 0, n, (lpad(to_hex((extract(epoch FROM at) * 1000)::bigint), 12, '0') || '7000' || '8000'
              || lpad(to_hex(n), 12, '0'))::uuid, 'A', 'k', 'E', at, now(), 't', 0,
       -- Each tenth is retried when the five that follow it have gone out.
       CASE WHEN n %% 10 = 0 THEN 10 * n + 55 ELSE 10 * n END
  FROM (SELECT n, %s + n * interval '35 milliseconds' AS at FROM generate_series(1, 100000) AS n) AS events"""
_EACH_RETRIED = """
INSERT INTO outbox.audit (what, at, details)
SELECT 'retry', created_at + interval '1 second', jsonb_build_object('overtaken', jsonb_build_array(event_id))
  FROM outbox.published WHERE id % 10 = 0"""


def test_ten_thousand_of_the_hundred_thousand_events_of_a_key_are_retried(outbox_postgres):
    """One by one, each behind others. What has another cause is found as among a few."""
    end = minute_of(dt.datetime.now(dt.UTC))
    hour = range(end - 60, end)
    with psycopg.connect(outbox_postgres.url, autocommit=True) as connection:
        connection.execute(_MANY, (minute_start(hour.start),))
        connection.execute(_EACH_RETRIED)
        read = Tables(connection, "outbox", Router({}), None, hour, b"key")

        def misplaced() -> list[tuple[int, int]]:
            with read.snapshot():
                found = read.misplaced()
            return sorted((UUID(one.event_id).int & 0xFFFFFFFF, UUID(one.before_id).int & 0xFFFFFFFF) for one in found)

        assert misplaced() == []
        connection.execute('UPDATE outbox.published SET "offset" = 77035 WHERE id = 7702')
        # As if the retry had been committed before what follows was written.
        connection.execute(
            "UPDATE outbox.audit AS a SET at = a.at - interval '12 seconds' FROM outbox.published AS p "
            "WHERE p.id = 50000 AND a.details->'overtaken' ? p.event_id::text"
        )
        assert misplaced() == [(7703, 7702), (50001, 50000)]


def test_a_certificate_of_a_minute_in_which_a_dead_letter_is_retried(outbox_postgres, outbox_kafka, order, tmp_path):
    """That adds an event to it, and is no damage; what is damaged besides is noticed."""
    pipeline, file = Pipeline(outbox_postgres, outbox_kafka, *order), tmp_path / "certificate"
    pipeline.kept_before()
    ids = pipeline.add(ago=600)
    bury(pipeline.database.url, ids[5])

    def verify(status: int = 0) -> str:
        return pipeline.command("audit", "verify", str(file), status=status)

    with relay(outbox_postgres, outbox_kafka, relay__archive_days=1):
        pipeline.published()
        pipeline.applied(EVENTS - 1)
        status, found = pipeline.audit("--certificate", str(file))
        assert (status, sum(one["dead"] for one in found["windows"])) == (0, 1), found
        assert "by a retry" not in verify()
        pipeline.command("relay", "pause", "--reason", "a test")
        pipeline.command("dead-letters", "retry", ids[5])
        assert "by a retry" not in verify()
        pipeline.command("relay", "resume")
        pipeline.published()
    # Before and after the group has applied it.
    for applied in (False, True):
        if applied:
            pipeline.applied(EVENTS)
        assert "1 event more on Kafka, by a retry" in verify()
    pipeline.run(f"DELETE FROM consumer.processed_messages WHERE message_id = '{ids[5]}'")
    assert "1 missing" in verify(1)
    pipeline.run(f"UPDATE outbox.published SET event_id = gen_random_uuid() WHERE event_id = '{ids[6]}'")
    assert "1 unknown" in verify(1)


def test_an_event_that_is_on_kafka_and_failed_for_good(pipeline):
    """A relay that died may have published it before the topic refused it."""
    ids = pipeline.sent(5)
    [(archived,)] = pipeline.rows(f"SELECT p::text FROM outbox.published AS p WHERE event_id = '{ids[3]}'")
    bury(pipeline.database.url, ids[3], table="published")
    for said in ("is a dead letter", "was discarded"):
        [one] = pipeline.audit()[1]["differences"]
        assert (one["kind"], one["event_id"], said in one["text"]) == ("repeated", ids[3], True)
        if said == "is a dead letter":
            pipeline.command("dead-letters", "discard", ids[3], "--reason", "known")
    # As if its contents had been taken from the audit, and sent again.
    with psycopg.connect(pipeline.database.url) as connection:
        connection.execute("INSERT INTO outbox.published SELECT (%s::outbox.published).*", (archived,))
    pipeline.repeat(ids[0])
    assert pipeline.differences() == [("repeated", ids[0])]


def test_a_dead_letter_that_is_on_kafka_while_only_the_ledger_is_kept(outbox_postgres, outbox_kafka, order):
    pipeline = Pipeline(outbox_postgres, outbox_kafka, *order)
    pipeline.keep_ledger()
    ids = pipeline.add(5, ago=600)
    bury(pipeline.database.url, ids[3])
    with relay(outbox_postgres, outbox_kafka):
        pipeline.published()
    assert pipeline.differences("--topic", pipeline.topic) == []
    pipeline.produce(key=b"key-3", value=b"{}", headers={"ce_id": ids[3], "ce_source": "/outbox"})
    assert pipeline.differences("--topic", pipeline.topic) == [("repeated", ids[3])]
    # Discarded, it may have been sent by hand: it is on Kafka once.
    pipeline.command("dead-letters", "discard", ids[3], "--reason", "known")
    assert pipeline.differences("--topic", pipeline.topic) == []
