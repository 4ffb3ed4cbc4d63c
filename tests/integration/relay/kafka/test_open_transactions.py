"""Transactions that hang in a topic of events: what a relay and the doctor notice of them."""

from __future__ import annotations

import pytest
from confluent_kafka import Producer
from reconcile_support import hanging, relay_settings, unverified
from shown import Shown
from support import logged, wait_until

from outbox._clients.checks import Finding, Level
from outbox.sandbox._ports import free_ports
from relay.config import load
from relay.core.ports import BrokerUnavailable
from relay.kafka import open_transactions
from relay.kafka.offsets import Offsets
from relay.kafka.open_transactions import OpenTransactions, TransactionWatch, Whose
from relay.operations.doctor import examine
from relay.operations.doctor import kafka as doctor_kafka
from relay.operations.hidden_events import abort_hanging

__all__ = ["hanging", "unverified"]

TIMEOUT = 3.0


def undecided(outbox) -> list:
    offsets = Offsets({"bootstrap.servers": outbox.kafka.bootstrap_servers})
    return offsets.await_decided(offsets.high(offsets.partitions({*outbox.topics, outbox.state.name})), 0.0)


def end_what_hangs(outbox) -> None:
    options = {"bootstrap.servers": outbox.kafka.bootstrap_servers}
    assert abort_hanging(options, options, [outbox.id], undecided(outbox)) == []


def test_a_relay_says_what_hangs_in_a_topic_of_events_and_is_not_ready(hanging, outbox_relay):
    """It publishes all the same; what lies behind that transaction, readers see when it is ended."""
    hanging.hang(state=False)
    shown = Shown(free_ports(1)[0])
    settings = {"relay__metrics_address": shown.address, "kafka__transaction_timeout_ms": int(TIMEOUT * 1000)}
    relay = outbox_relay(**relay_settings(hanging) | settings, log_format="json")
    relay.wait_for_log("a transaction hangs", 60)
    wait_until(lambda: hanging.left() == 0, 60, "the outbox to drain")
    wait_until(lambda: shown.ready() == (503, {"hanging_transaction": []}), what="the relay to be not ready")
    assert shown.metric("ready") == 0
    assert shown.metric("partitions_hanging") == 2
    assert shown.metric("lanes_waiting", "hanging_transaction") == 0
    assert shown.metric("lane_wait_seconds", "hanging_transaction") >= TIMEOUT
    said = logged(relay, '"a transaction hangs')
    assert [(line["level"], line["topic"], line["partition"], line["offset"]) for line in said] == [
        ("error", topic, 1, 0) for topic in sorted(hanging.topics)
    ]
    assert all(line["seconds"] >= TIMEOUT and line["began_by_an_outbox"] for line in said)
    end_what_hangs(hanging)
    relay.wait_for_log("no transaction hangs any more")
    shown.recovers()
    assert shown.metric("partitions_hanging") == 0
    assert set(hanging.published()) == {row[1] for row in hanging.batch + hanging.other}
    # Once, and not with each look.
    assert len(logged(relay, '"a transaction hangs')) == 2


def examined(outbox, **more) -> dict[str, Finding]:
    settings = load(
        database_url=outbox.url, name=outbox.name, kafka={"bootstrap.servers": outbox.kafka.bootstrap_servers}, **more
    )
    return {finding.about: finding for finding in examine(settings)}


def test_the_doctor_names_what_hangs_and_the_way_out(hanging, monkeypatch):
    monkeypatch.setattr(doctor_kafka, "_UNMOVED_SECONDS", 0.5)
    assert examined(hanging, delivery="at-least-once")["open transactions"].level is Level.OK
    hanging.hang(state=False)
    about = [f"topic {topic} partition 1, transaction" for topic in hanging.topics]
    found = examined(hanging, delivery="at-least-once")
    assert "open transactions" not in found
    for each in about:
        # It may be at work, as far as anyone can tell.
        assert found[each].level is Level.WARNING
        assert "at offset 0, of 5, for the end of a transaction of a relay, since 20" in found[each].found
    # As if it stood there for longer than its time-out.
    monkeypatch.setattr(open_transactions, "_GRACE_SECONDS", -60.0)
    found = examined(hanging, delivery="at-least-once")
    for each in about:
        assert found[each].level is Level.FAILURE
        assert "KAFKA-20734" in found[each].found
        assert "`outbox relay reconcile`" in found[each].do


def test_the_doctor_looks_at_the_state_topic_too_and_tells_another_programs_transaction(hanging, monkeypatch):
    monkeypatch.setattr(doctor_kafka, "_UNMOVED_SECONDS", 0.5)
    hanging.hang()
    other = hanging.other_program(hanging.topics[0], 2)
    monkeypatch.setattr(open_transactions, "_GRACE_SECONDS", -60.0)
    found = examined(hanging, delivery="exactly-once")
    assert found[f"topic {hanging.state.name} partition 0, transaction"].level is Level.FAILURE
    finding = found[f"topic {hanging.topics[0]} partition 2, transaction"]
    assert finding.level is Level.WARNING
    assert "of another program, since 20" in finding.found
    other.abort_transaction(30)


class Watched:
    """A watch of one topic, by a clock that the test turns."""

    def __init__(self, outbox) -> None:
        self.now = 1000.0
        options = {"bootstrap.servers": outbox.kafka.bootstrap_servers}
        self.transactions = OpenTransactions(options, {outbox.topics[0]}.__contains__, outbox.state.name, TIMEOUT)
        self.watch = TransactionWatch(self.transactions, lambda: self.now)

    def after(self, seconds: float) -> int:
        self.now += seconds
        self.watch.look()
        return len(self.watch.hanging())


def test_what_moves_on_does_not_hang(hanging):
    watched = Watched(hanging)
    limit = watched.transactions.limit(Whose.AN_OUTBOX)
    producer = Producer(
        {"bootstrap.servers": hanging.kafka.bootstrap_servers, "transactional.id": hanging.kafka.name("worker")}
    )
    producer.init_transactions(60)

    def begin() -> None:
        producer.begin_transaction()
        producer.produce(hanging.topics[0], b"{}", b"key", partition=1, headers=[("ce_id", hanging.batch[0][1])])
        assert producer.flush(30) == 0

    begin()
    assert watched.after(0.0) == 0
    assert watched.after(limit - 1) == 0
    producer.commit_transaction(30)
    hanging.kafka.await_transactions(hanging.topics[0])
    begin()
    # Another one, at another offset: it has its own time.
    assert watched.after(limit) == 0
    assert watched.after(limit - 1) == 0
    assert watched.watch.hanging() == []
    assert watched.after(1.0) == 1
    producer.abort_transaction(30)
    hanging.kafka.await_transactions(hanging.topics[0])
    assert watched.after(1.0) == 0
    # Another program's transaction is not the relay's business.
    other = hanging.other_program(hanging.topics[0], 1)
    assert watched.after(0.0) == 0
    assert watched.after(10_000.0) == 0
    other.abort_transaction(30)


def test_a_look_without_a_broker_says_so(monkeypatch):
    monkeypatch.setattr("relay.kafka.offsets._SECONDS", 1.0)
    transactions = OpenTransactions({"bootstrap.servers": "127.0.0.1:1"}, lambda _: True, "outbox.relay.state", 1.0)
    with pytest.raises(BrokerUnavailable, match="looking for transactions that hang"):
        transactions.look()
