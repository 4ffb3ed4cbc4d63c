"""`outbox transactions`: what is open on Kafka, whose it is, and what may be aborted."""

from __future__ import annotations

import base64
import json
import socket
import threading
from contextlib import closing, contextmanager
from typing import Any

import psycopg
import pytest
from confluent_kafka import Producer
from reconcile_support import hanging, unverified
from support import end_leases, look_up, wait_until
from wal_support import run_outbox

from outbox import Event
from outbox import Outbox as Writer
from relay.failpoints import VARIABLE
from relay.kafka import wire
from relay.kafka.offsets import Offsets, Partition
from relay.kafka.wire import Brokers, Unsupported
from relay.operations import transactions as operations
from relay.operations.transactions import HANGING, UNKNOWN, NotSafe, Sight, Transactions
from relay.ports import BrokerUnavailable

__all__ = ["hanging", "unverified"]


class Place:
    """An outbox with one topic of its own, and the command over it."""

    def __init__(self, database: Any, kafka: Any) -> None:
        self.url, self.kafka, self.name = database.url, kafka, kafka.name("outbox")
        self.kind = kafka.name("Order")
        self.topic = kafka.create_topic(f"{self.kind.lower()}-events", 1)
        self.settings = {
            "name": self.name,
            "delivery": "exactly-once",
            "relay__lease_seconds": 60,
            "kafka__transaction_timeout_ms": 90_000,
            "kafka__bootstrap_servers": kafka.bootstrap_servers,
            "topic_template": "{aggregate_type}-events",
        }

    @contextmanager
    def looking(self):
        options = {"bootstrap.servers": self.kafka.bootstrap_servers}
        with closing(psycopg.connect(self.url, autocommit=True)) as connection:
            may_write = {self.topic}.__contains__
            yield Transactions(connection, "outbox", self.name, may_write, f"{self.name}.relay.state", options, options)

    def look(self) -> Sight:
        with self.looking() as found:
            return found.look()

    def add(self, *keys: str) -> None:
        with psycopg.connect(self.url) as connection:
            Writer().add_many(connection, [Event(self.kind, key, "T", {"n": key}) for key in keys])

    def readers_wait(self) -> bool:
        offsets = Offsets({"bootstrap.servers": self.kafka.bootstrap_servers})
        return bool(offsets.await_decided(offsets.high([Partition(self.topic, 0)]), 0.0))

    def command(self, *arguments: str) -> Any:
        return run_outbox(self.url, self.settings, "transactions", *arguments)

    @contextmanager
    def transaction(self, transactional_id: str):
        """Yield a producer with an open transaction in the topic."""
        producer = Producer(
            {"bootstrap.servers": self.kafka.bootstrap_servers, "transactional.id": transactional_id, "linger.ms": 0}
        )
        producer.init_transactions(60)
        producer.begin_transaction()
        producer.produce(self.topic, b"{}", b"k")
        producer.flush(30)
        yield producer


@pytest.fixture
def place(outbox_postgres, outbox_kafka):
    return Place(outbox_postgres, outbox_kafka)


@pytest.fixture
def relay_in_a_transaction(place, outbox_relay):
    """A relay that is halted before it commits its first turn with events: alive, and in a transaction."""
    # Its first transaction writes the lanes' first markers.
    settings = {name: value for name, value in place.settings.items() if name != "kafka__bootstrap_servers"}
    relay = outbox_relay(env={VARIABLE: "txn.confirmed=pause@2"}, relay__instance="halted", **settings)
    relay.wait_for_log("lanes acquired")
    wait_until(lambda: look_up(place.url, "SELECT bool_and(last_batch = 1) FROM outbox.lanes") == [(True,)])
    place.add("a", "b", "c")
    wait_until(place.readers_wait, what="an open transaction")
    return relay


def test_a_live_relays_is_left_alone_and_a_dead_ones_is_aborted(place, relay_in_a_transaction, outbox_relay):
    [one] = place.look().transactions
    base = look_up(place.url, "SELECT DISTINCT transactional_id FROM outbox.lanes")[0][0]
    assert one.transactional_id in {f"{base}.0", f"{base}.1"}
    assert (one.state, one.ours, one.lanes, one.holders) == ("Ongoing", True, [0, 1, 2, 3], ["halted"])
    assert one.producer_id is not None
    assert one.epoch is not None
    assert one.age_seconds is not None
    assert one.timeout_seconds == 90.0
    [part] = [each for each in one.partitions if each.topic == place.topic]
    assert (part.partition, part.first_offset, part.stable, part.lag) == (0, 0, 0, 3)
    assert one.verdict.startswith("halted is alive and holds lanes 0, 1, 2, 3; its coordinator ends it within ")
    refused = place.command("--abort", one.transactional_id, "--reason", "a test", "--yes")
    assert (refused.returncode, "halted is alive" in refused.stderr) == (1, True)
    assert place.readers_wait()

    relay_in_a_transaction.kill()
    end_leases(place.url)
    found = place.command("--json")
    assert found.returncode == 0
    [shown] = json.loads(found.stdout)["transactions"]
    assert (shown["safe_to_abort"], shown["holders"]) == (True, [])
    assert shown["command"] == f"outbox transactions --abort {one.transactional_id} --reason '…'"
    # Nobody answers the question.
    unasked = place.command("--abort", one.transactional_id, "--reason", "a test")
    assert (unasked.returncode, place.readers_wait()) == (1, True)
    assert place.command("--abort", one.transactional_id, "--yes").returncode == 2
    done = place.command("--abort", one.transactional_id, "--reason", "a test", "--yes")
    assert (done.returncode, "Aborted" in done.stdout) == (0, True), done.stderr
    assert not place.readers_wait()
    [(what, why, id_)] = look_up(place.url, "SELECT what, why, details ->> 'transactional_id' FROM outbox.audit")
    assert (what, why, id_) == ("abort transaction", "a test", one.transactional_id)
    assert place.look().transactions == []
    # Its events are still in the outbox.
    settings = {name: value for name, value in place.settings.items() if name != "kafka__bootstrap_servers"}
    outbox_relay(**settings)
    keys = [message.key() for message in place.kafka.consume(place.topic, 3)]
    assert sorted(keys) == [b"a", b"b", b"c"]


def test_a_strangers_is_refused(place):
    stranger = place.kafka.name("stranger")
    with place.transaction(stranger) as producer:
        [one] = place.look().transactions
        assert (one.transactional_id, one.state, one.ours, one.safe_to_abort) == (stranger, "Ongoing", False, False)
        assert one.command is None
        refused = place.command("--abort", stranger, "--reason", "a test", "--yes")
        assert (refused.returncode, "another program has it open" in refused.stderr) == (1, True)
        producer.commit_transaction(30)
    assert len(place.kafka.consume(place.topic)) == 1
    assert look_up(place.url, "SELECT count(*) FROM outbox.audit") == [(0,)]
    refused = place.command("--abort", stranger, "--reason", "a test", "--yes")
    assert "no transaction is open under the id" in refused.stderr


@pytest.mark.parametrize(
    "end", ["x.0", "019d1c3e-6a10-7c41-9f3a-5b8e2f6c7d90.0.more", "relay.019d1c3e-6a10-7c41-9f3a-5b8e2f6c7d90.0"]
)
def test_an_id_that_only_begins_like_ours_is_a_strangers(place, end):
    with place.transaction(f"{place.name}.relay.{end}") as producer:
        [one] = place.look().transactions
        assert (one.ours, one.safe_to_abort) == (False, False)
        producer.abort_transaction(30)


def test_an_id_of_no_lane_is_safe_only_while_no_relay_runs(place, outbox_relay):
    id_ = f"{place.name}.relay.019d1c3e-6a10-7c41-9f3a-5b8e2f6c7d90.1"
    insert = "INSERT INTO outbox.relays (instance, version, alive_until) VALUES ('r', '0', now() + interval '1 hour')"
    with place.transaction(id_) as producer, psycopg.connect(place.url, autocommit=True) as connection:
        connection.execute(insert)
        [one] = place.look().transactions
        assert (one.ours, one.lanes, one.safe_to_abort) == (True, [], False)
        assert "it may be one of those that run: r" in one.verdict
        connection.execute("DELETE FROM outbox.relays")
        with place.looking() as found:
            assert found.abort(id_, "a test").transactional_id == id_
        assert not place.readers_wait()
        with pytest.raises(Exception, match=r"fenced|FENCED|producer"):
            producer.commit_transaction(30)


def test_one_that_hangs_is_left_to_reconcile(hanging: Any):
    hanging.hang()
    options = {"bootstrap.servers": hanging.kafka.bootstrap_servers}
    with closing(psycopg.connect(hanging.url, autocommit=True)) as connection:
        may_write = set(hanging.topics).__contains__
        found = Transactions(connection, "outbox", hanging.name, may_write, hanging.state.name, options, options)
        [one] = found.look().transactions
        assert (one.state, one.transactional_id, one.ours, one.lanes) == (HANGING, hanging.id, True, [0, 1])
        assert {(each.topic, each.partition) for each in one.partitions} == hanging.undecided()
        assert all(each.first_offset == each.stable for each in one.partitions)
        assert one.command == "outbox relay reconcile"
        with pytest.raises(NotSafe, match="reconcile compares"):
            found.abort(hanging.id, "a test")
    done = hanging.command("transactions", "--json")
    assert done.returncode == 1


def test_a_busy_relay_shows_no_hanging_transaction(place, outbox_relay):
    """Between two looks one of its transactions ends and the next begins."""
    settings = {name: value for name, value in place.settings.items() if name != "kafka__bootstrap_servers"}
    outbox_relay(relay__batch_size=5, **settings)
    stop = threading.Event()

    def write() -> None:
        number = 0
        while not stop.is_set():
            place.add(*(f"k{number + n}" for n in range(20)))
            number += 20

    writer = threading.Thread(target=write)
    writer.start()
    try:
        wait_until(lambda: len(place.kafka.consume(place.topic, wait_for_open=False)) > 20, what="it to publish")
        states = {one.state for _ in range(30) for one in place.look().transactions}
    finally:
        stop.set()
        writer.join()
    assert HANGING not in states
    assert "Ongoing" in states or "PrepareCommit" in states


def test_what_coordinators_do_not_show_is_not_called_hanging(place, monkeypatch):
    """They leave out ids that the user may not describe. Only when it is older than any may be, it hangs."""
    monkeypatch.setattr(Brokers, "list_transactions", lambda *_: [])
    with place.transaction(place.kafka.name("hidden")) as producer:
        [one] = place.look().transactions
        assert (one.state, one.transactional_id, one.safe_to_abort, one.command) == (UNKNOWN, None, False, None)
        assert one.producer_id is not None
        monkeypatch.setattr(operations, "LONGEST_SECONDS", -1.0)
        [one] = place.look().transactions
        assert one.state == HANGING
        assert one.command is not None
        assert "kafka-transactions.sh" in one.command
        producer.abort_transaction(30)


# What can't be seen


@contextmanager
def one_that_hangs_up():
    """Yield the address of a server that closes each connection, as an old broker does when it knows no request."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(1000)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield server.getsockname()
        server.shutdown(socket.SHUT_RDWR)
        thread.join(10)


def test_a_broker_that_does_not_know_the_requests(place, monkeypatch):
    """What waits is shown, and that nobody knows for whom; nothing may be aborted."""
    with one_that_hangs_up() as address, place.transaction(place.kafka.name("any")) as producer:
        ask = Brokers._ask
        monkeypatch.setattr(Brokers, "_ask", lambda self, _address, key, body: ask(self, address, key, body))
        sight = place.look()
        [one] = sight.transactions
        assert (one.state, one.transactional_id, one.safe_to_abort) == (UNKNOWN, None, False)
        assert (one.partitions[0].topic, one.partitions[0].lag) == (place.topic, 1)
        assert any("older than 3.0" in text for text in sight.unseen)
        producer.abort_transaction(30)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"security.protocol": "SASL_SSL", "sasl.mechanism": "GSSAPI", "sasl.kerberos.keytab": "x"}, "sasl.kerberos"),
        ({"security.protocol": "SSL", "ssl.keystore.location": "x"}, "ssl.keystore.location"),
        ({"security.protocol": "NEW"}, "NEW"),
        ({"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "OAUTHBEARER"}, "sasl.mechanism=OAUTHBEARER"),
    ],
)
def test_options_that_can_not_be_followed(place, options, said):
    host, port = place.kafka.bootstrap_servers.split(",")[0].split(":")
    with pytest.raises(Unsupported, match=said):
        Brokers(options).list_transactions((host, int(port)))


def test_no_broker_at_all():
    with pytest.raises(BrokerUnavailable, match=r"127\.0\.0\.1:1"):
        Brokers({}).list_transactions(("127.0.0.1", 1))


def test_scram_as_in_its_rfc(monkeypatch):
    """RFC 7677's example."""
    nonce, salt = "rOprNGfwEbeRWgbNEkqO", "W22ZaJ0SNY7soEsUEjb6gQ=="
    monkeypatch.setattr(wire.secrets, "token_urlsafe", lambda _: nonce)
    sent: list[bytes] = []
    answers = [
        f"r={nonce}%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,s={salt},i=4096".encode(),
        b"v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4=",
    ]

    def exchange(data: bytes) -> bytes:
        sent.append(data)
        return answers[len(sent) - 1]

    wire._scram(exchange, "sha256", "user", "pencil")
    assert sent[0] == f"n,,n=user,r={nonce}".encode()
    assert sent[1].endswith(b",p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ=")
    answers[1] = b"v=" + base64.b64encode(b"0" * 32)
    sent.clear()
    with pytest.raises(BrokerUnavailable, match="does not know this user's password"):
        wire._scram(exchange, "sha256", "user", "pencil")
