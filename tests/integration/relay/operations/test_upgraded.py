"""After pg_upgrade: the tables as they were, and a server with another system identifier."""

from __future__ import annotations

import uuid
from dataclasses import replace

import pytest
from confluent_kafka import Producer
from reconcile_support import Outbox, outbox

from relay.core.marker import Marker

__all__ = ["outbox"]


def write(outbox: Outbox, markers: dict[int, Marker]) -> None:
    options = {"bootstrap.servers": outbox.kafka.bootstrap_servers, "transactional.id": f"{outbox.name}.relay.former.0"}
    producer = Producer(options)
    producer.init_transactions(60)
    producer.begin_transaction()
    for lane, marker in markers.items():
        producer.produce(outbox.state.name, marker.encode(), b"marker", partition=lane)
    producer.commit_transaction(60)
    outbox.kafka.await_transactions(outbox.state.name)


@pytest.fixture
def before(outbox: Outbox) -> dict[int, Marker]:
    """Eight lanes that the former server has published: in lane 2 the last batch is not settled."""
    keys = outbox.keys(0)
    for lane in range(8):
        outbox.add(0, keys[lane], 20)
    outbox.run("UPDATE outbox.lanes SET last_batch = 7")
    outbox.run("UPDATE outbox.lanes SET last_batch = 6 WHERE lane = 2")
    rows = outbox.rows(2)[:5]
    outbox.publish(rows)
    return {lane: outbox.marker(7, rows if lane == 2 else ()) for lane in range(8)}


def former(markers: dict[int, Marker]) -> dict[int, Marker]:
    return {lane: replace(marker, system_identifier="12345", timeline=3) for lane, marker in markers.items()}


def test_all_lanes_go_on_and_what_the_markers_name_is_settled(outbox, before, outbox_relay):
    # Settled, all of it.
    before[3] = outbox.marker(7, [(1, str(uuid.uuid4()))])
    write(outbox, former(before))
    relay = outbox_relay(name=outbox.name, delivery="exactly-once")
    relay.wait_for_log("outbox relay upgraded")
    relay.terminate()
    assert relay.wait() == 0
    assert outbox.left() == 160
    assert outbox.command("relay", "upgraded").returncode == 2
    done = outbox.command("relay", "upgraded", "--reason", "17 to 18")
    assert done.returncode == 0, done.stderr
    assert outbox.left() == 155
    markers = outbox.state.last_markers(range(8))
    assert {marker.system_identifier for marker in markers.values()} == {outbox.identity()}
    assert outbox.run("SELECT DISTINCT what, why FROM outbox.audit WHERE what = 'reconcile'") == [
        ("reconcile", "17 to 18")
    ]
    # Done once: there is nothing more to do.
    again = outbox.command("relay", "upgraded", "--reason", "again")
    assert again.returncode == 1
    assert "nothing to do" in again.stderr
    outbox_relay(name=outbox.name, delivery="exactly-once")
    outbox.kafka.consume(outbox.topics[0], 160)
    assert set(outbox.published().values()) == {1}


def test_it_refuses_whatever_is_not_an_upgrade_and_changes_nothing(outbox, before):
    markers = former(before)
    # Of another timeline: this server was restored, or failed over.
    restored = markers | {4: replace(before[4], timeline=99)}
    batch = "UPDATE outbox.lanes SET last_batch = {} WHERE lane = 4".format
    for fault, lane, written in (
        (batch(5), 4, markers),  # it has lost a commit
        (batch("NULL"), 4, markers),  # it is from before exactly-once
        (batch(7), 4, restored),
        (f"DELETE FROM outbox.events WHERE id = {outbox.rows(2)[0][0]}", 2, markers),
    ):
        outbox.run(fault)
        write(outbox, written)
        left, lanes = outbox.left(), [outbox.lane(lane) for lane in range(8)]
        done = outbox.command("relay", "upgraded", "--reason", "17 to 18")
        assert (done.returncode, f"lane {lane}" in done.stderr) == (1, True), (fault, done.stderr)
        assert (outbox.left(), [outbox.lane(lane) for lane in range(8)]) == (left, lanes), fault
        assert outbox.state.last_markers(range(8)) == written, fault
