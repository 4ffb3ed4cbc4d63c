"""``outbox trace`` of events without a row, where no route and no consumer names their topic; what it passes over."""

from __future__ import annotations

import datetime as dt
import json
from typing import Any

import pytest
from confluent_kafka import Producer
from raw_kafka import produce
from reconcile_support import other_program
from typer.testing import CliRunner
from uuid_utils.compat import uuid4, uuid7

from relay.cli.app import app
from relay.operations import topic_scan
from relay.operations.topic_scan import committed_since


def test_an_event_is_found_in_a_topic_that_relays_may_write(outbox_postgres, outbox_kafka):
    """Of one id with a time in it, and of one without."""
    ids = str(uuid7()), str(uuid4())
    topic = outbox_kafka.create_topic(f"{outbox_kafka.name('order').lower()}-events", 2)
    producer = Producer({"bootstrap.servers": outbox_kafka.bootstrap_servers})
    for event_id in ids:
        producer.produce(topic, b"{}", b"k", partition=1, headers={"ce_id": event_id})
    assert producer.flush(30) == 0
    environment = {
        "OUTBOX_DATABASE_URL": outbox_postgres.url,
        "OUTBOX_KAFKA__BOOTSTRAP_SERVERS": outbox_kafka.bootstrap_servers,
    }

    def trace(event_id: str, *options: str) -> tuple[int, list[str], bool, list[str]]:
        # Other tests' topics are read as well.
        words = ["trace", event_id, "--seconds", "60", "--json", *options]
        done = CliRunner().invoke(app, words, env=environment)
        found = json.loads(done.stdout)
        places = [f"{one['topic']}-{one['partition']}" for one in found["messages"]]
        return done.exit_code, places, found["searched_to_the_end"], found["unseen"]

    assert [trace(event_id) for event_id in ids] == [(0, [f"{topic}-1"], True, [])] * 2
    # A group of other topics says nothing of this one.
    with outbox_postgres.connect() as connection:
        connection.execute("INSERT INTO consumer.groups (grp, owner) VALUES ('sums', 'me')")
        connection.execute("INSERT INTO consumer.offsets VALUES ('sums', 'others', 0, 'id', 0, 1)")
    assert trace(ids[0]) == (0, [f"{topic}-1"], True, [])
    hour = dt.timedelta(hours=1)
    for event_id in ids:
        for since, found in ((-hour, [f"{topic}-1"]), (hour, [])):
            time = f"{dt.datetime.now(dt.UTC) + since:%Y-%m-%dT%H:%M:%S}"
            assert trace(event_id, "--since", time) == (0 if found else 1, found, True, []), event_id


@pytest.mark.parametrize("patience", ["3", "60"], ids=["time is over", "nothing comes any more"])
def test_what_is_found_is_kept_where_another_topic_hangs(patience, outbox_postgres, outbox_kafka, monkeypatch):
    """A transaction that stays open has no end: the search stops at its deadline, also if nothing is read."""
    if patience == "60":
        monkeypatch.setattr(topic_scan, "_SECONDS", 3.0)
    servers, event_id = outbox_kafka.bootstrap_servers, str(uuid7())
    fine, hanging = (outbox_kafka.create_topic(outbox_kafka.name(name)) for name in ("fine", "hanging"))
    producer = Producer({"bootstrap.servers": servers})
    producer.produce(fine, b"{}", b"k", headers={"ce_id": event_id})
    assert producer.flush(30) == 0
    producer = other_program(outbox_kafka, hanging, 0)
    environment = {"OUTBOX_DATABASE_URL": outbox_postgres.url, "OUTBOX_KAFKA__BOOTSTRAP_SERVERS": servers}
    words = ["trace", event_id, "--seconds", patience, "--json", "--topic", fine, "--topic", hanging]
    try:
        done = CliRunner().invoke(app, words, env=environment)
    finally:
        producer.abort_transaction(30)
    found = json.loads(done.stdout)
    assert (done.exit_code, [one["topic"] for one in found["messages"]]) == (0, [fine])
    (why,) = found["unseen"]
    assert not found["searched_to_the_end"]
    assert f"Kafka: {hanging} partition 0 could not be read to the end within 3 s" in why
    assert ("give more --seconds" in why) == (patience == "3")


def test_header_names_that_are_no_text_are_passed_over(outbox_kafka):
    """Often enough for Python to have optimised what is done with each: then the client's error goes unnoticed."""
    topic = outbox_kafka.create_topic(outbox_kafka.name("names"))
    servers, event_id = outbox_kafka.bootstrap_servers, str(uuid7())
    bad: Any = {b"\xff\xfe": b"x", b"ce_id": event_id.encode()}
    for _ in range(100):
        produce(servers, topic, 0, [(b"k", b"bad", bad)])
    producer = Producer({"bootstrap.servers": servers})
    producer.produce(topic, b"fine", b"k", headers=[("ce_id", event_id.encode())])
    assert producer.flush(30) == 0
    seen = [record for part in committed_since({"bootstrap.servers": servers}, {topic: 0}) for record in part]
    assert [(record.event_id, record.value) for record in seen] == [(None, b"bad")] * 100 + [(event_id, b"fine")]
