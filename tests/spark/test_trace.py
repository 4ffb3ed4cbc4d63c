"""``outbox trace``: one event, followed from its row to what each group has done with it; real relay, real consumer."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest
from support import drained, wait_until, write
from typer.testing import CliRunner
from uuid_utils.compat import uuid7

from outbox import Event
from relay.cli.app import app
from relay.operations import topic_scan

pytestmark = pytest.mark.spark

KIND = "Order"


@pytest.fixture
def traced(bench, monkeypatch):
    """Trace an event of bench's database and topic. Gives the exit status and what was found."""
    monkeypatch.setenv("OUTBOX_DATABASE_URL", bench.database.url)
    monkeypatch.setenv("OUTBOX_KAFKA__BOOTSTRAP_SERVERS", bench.topics.bootstrap_servers)
    monkeypatch.setenv("OUTBOX_ROUTES", routes(bench))

    def run(*arguments: str) -> tuple[int, dict[str, Any]]:
        result = CliRunner().invoke(app, ["trace", *arguments, "--json"])
        return result.exit_code, json.loads(result.stdout)

    return run


def routes(bench) -> str:
    return json.dumps({KIND: {"topic": bench.topic}})


def shown(*arguments: str) -> str:
    return CliRunner().invoke(app, ["trace", *arguments]).stdout


def placed(url: str, key: str, *payloads: Any) -> list[str]:
    return [str(one) for one in write(url, [Event(KIND, key, "order.placed", payload) for payload in payloads])]


def order(number: int, **changes: Any) -> dict[str, Any]:
    return {"order_id": "a", "seq": number, "customer": "c", "amount_cents": 1, "status": "s"} | changes


def test_an_event_from_its_row_to_the_sink(bench, traced, outbox_relay):
    url = bench.database.url
    first, second, bad = placed(url, "a", order(1), order(2), {"order_id": 17})
    status, found = traced(second)
    event = found["event"]
    assert (status, event["state"], event["before"], event["owner"]) == (0, "waiting", 1, None)
    assert (event["aggregate_type"], event["aggregate_id"], found["messages"]) == (KIND, "a", [])
    assert "waits to be published: 1 row before it, and no relay holds the lane" in shown(second)
    outbox_relay(routes=routes(bench), relay__archive_days=3)
    drained(url)
    for number, event_id in enumerate((first, second, bad)):
        _, found = traced(event_id)
        assert found["event"]["state"] == "published"
        (place,) = found["messages"]
        assert (place["topic"], place["offset"]) == (bench.topic, number)
        assert found["groups"] == []
    totals = bench.once()
    assert (totals.applied, totals.dead) == (2, 1)
    status, found = traced(second)
    (group,) = found["groups"]
    assert (group["group"], group["state"], found["unseen"]) == (bench.job.group, "applied", [])
    event = found["event"]
    assert event["created_at"] < event["published_at"] < group["applied_at"]
    (group,) = traced(bad)[1]["groups"]
    assert (group["state"], group["letter"]["reason"], group["letter"]["state"]) == ("dead", "undecodable", "dead")
    text = shown(bad)
    assert re.search(rf"on Kafka .* later, {bench.topic}-{found['messages'][0]['partition']} offset 2", text)
    assert f"group {bench.job.group}: dead letter 1 since" in text
    # A second group, which has read the first message only.
    once_more = replace(bench.job, group="other")
    with bench.runner(once_more, max_records=1, driver_records=0) as runner:
        assert runner._round(None)
    other = {one["group"]: one for one in traced(bad)[1]["groups"]}["other"]
    assert (other["state"], other["behind"]) == ("waiting", 1)
    assert "group other: waits, 1 offset before it" in shown(bad)
    rows = traced("--aggregate", f"{KIND}/a")[1]["events"]
    assert [(row["event_id"], row["state"]) for row in rows] == [(one, "published") for one in (bad, second, first)]


def test_an_event_that_left_no_row_is_found_on_kafka(bench, traced, outbox_relay, monkeypatch):
    """More others than two reads of the topic hold are in front of it, and behind it; a repeat is shown too.

    One whose id has no time in it, and --since: tests/integration/relay/operations/test_trace.py.
    """
    monkeypatch.setattr(topic_scan, "_AT_ONCE", 100)
    url = bench.database.url
    before, wanted, behind = ([order(number) for number in range(count)] for count in (250, 1, 250))
    for number, payload in enumerate(before):
        payload["seq"] = number
    ids = [placed(url, f"k{turn}", *payloads) for turn, payloads in enumerate((before, wanted, behind))]
    event_id = ids[1][0]
    relay = outbox_relay(routes=routes(bench))
    drained(url)
    relay.terminate()
    status, found = traced(event_id)
    assert (status, found["event"]["state"], found["searched_to_the_end"]) == (0, "unknown", True)
    (place,) = found["messages"]
    assert place["topic"] == bench.topic
    bench.send_raw(b"{}", [("ce_id", event_id.encode())])
    assert len(traced(event_id)[1]["messages"]) == 2
    # Without routes nobody knows its topic, but for the groups that read.
    status, found = traced(str(uuid7()))
    assert (status, found["messages"], found["groups"], found["searched_to_the_end"]) == (1, [], [], True)
    assert "the outbox has no row of it" in shown(str(uuid7()))


def test_topics_that_groups_read_are_looked_through_where_no_route_names_one(bench, traced, monkeypatch):
    monkeypatch.delenv("OUTBOX_ROUTES")
    event_id = str(bench.send("a", 1))
    assert traced(event_id)[1]["messages"] == []
    assert traced(event_id, "--topic", bench.topic)[1]["messages"] != []
    assert bench.once().applied == 1
    status, found = traced(event_id)
    assert (status, len(found["messages"])) == (0, 1)
    assert [group["state"] for group in found["groups"]] == ["applied"]


def test_an_event_that_kafka_refuses(bench, traced, outbox_relay):
    """Too large for its topic: dead at once, and later ones of its key wait."""
    url = bench.database.url
    small = bench.topics.create_topic(bench.topics.name("small"), 1, {"max.message.bytes": "20000"})
    large, later = placed(url, "a", os.urandom(30_000), {})
    outbox_relay(routes=json.dumps({KIND: {"topic": small}}), failures__max_attempts=1)
    wait_until(lambda: traced(large)[1]["event"]["state"] == "dead", what="the dead letter")
    event = traced(large)[1]["event"]
    assert event["attempts"] >= 1
    assert "a dead letter since" in shown(large)
    assert traced(later)[1]["event"]["state"] == "waiting"


def test_what_can_not_be_traced():
    for arguments, said in (
        ([], "give an event's id, or --aggregate TYPE/ID"),
        (["x"], "valid UUID"),
        ([str(UUID(int=1)), "--aggregate", "a/b"], "give an event's id, or --aggregate TYPE/ID"),
        (["--aggregate", "Order"], "--aggregate Order: must be TYPE/ID"),
    ):
        result = CliRunner().invoke(
            app, ["trace", *arguments], env={"OUTBOX_DATABASE_URL": "postgresql://127.0.0.1:1/x"}
        )
        assert (result.exit_code, said in result.stderr) == (2, True)
