"""``outbox trace`` of events that left no row, where no route and no consumer names their topic."""

from __future__ import annotations

import datetime as dt
import json

import pytest
from confluent_kafka import Producer
from typer.testing import CliRunner
from uuid_utils.compat import uuid4, uuid7

from relay.cli.app import app


@pytest.mark.parametrize("event_id", [uuid7(), uuid4()], ids=["with a time in its id", "without one"])
def test_an_event_is_found_in_a_topic_that_relays_may_write(event_id, outbox_postgres, outbox_kafka):
    topic = outbox_kafka.create_topic(f"{outbox_kafka.name('order').lower()}-events", 2)
    producer = Producer({"bootstrap.servers": outbox_kafka.bootstrap_servers})
    producer.produce(topic, b"{}", b"k", partition=1, headers={"ce_id": str(event_id)})
    assert producer.flush(30) == 0
    environment = {
        "OUTBOX_DATABASE_URL": outbox_postgres.url,
        "OUTBOX_KAFKA__BOOTSTRAP_SERVERS": outbox_kafka.bootstrap_servers,
    }

    def trace(*options: str) -> tuple[int, list[str], bool, list[str]]:
        # Other tests' topics are read as well.
        words = ["trace", str(event_id), "--seconds", "60", "--json", *options]
        done = CliRunner().invoke(app, words, env=environment)
        found = json.loads(done.stdout)
        places = [f"{one['topic']}-{one['partition']}" for one in found["messages"]]
        return done.exit_code, places, found["searched_to_the_end"], found["unseen"]

    assert trace() == (0, [f"{topic}-1"], True, [])
    hour = dt.timedelta(hours=1)
    for since, found in ((-hour, [f"{topic}-1"]), (hour, [])):
        time = f"{dt.datetime.now(dt.UTC) + since:%Y-%m-%dT%H:%M:%S}"
        assert trace("--since", time) == (0 if found else 1, found, True, [])
