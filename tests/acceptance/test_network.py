"""Exactly-once through a network that loses, delays and doubles what matters most: EndTxn and Produce."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from proxy import (
    CREATE_TOPICS,
    END_TXN,
    PRODUCE,
    KafkaProxy,
    delay_request,
    delay_response,
    drop_request,
    drop_response,
    duplicate_request,
)
from support import Load, caught_up, check, wait_until

from outbox.testing._ports import free_ports
from outbox.testing.fixtures import Topics
from outbox.testing.kafka import KafkaCluster
from relay import transactions
from relay.ports import Unavailable
from relay.transactions import StateTopic


@pytest.fixture(scope="module")
def network() -> Iterator[tuple[KafkaCluster, KafkaProxy]]:
    """A broker that clients reach through a proxy only."""
    (port,) = free_ports(1)
    with KafkaCluster(advertised_port=port) as cluster, KafkaProxy("127.0.0.1", cluster.proxied_port, port) as proxy:
        yield cluster, proxy


RULES = {
    "the answer to EndTxn is lost": [(END_TXN, drop_response)] * 6,
    "EndTxn is lost": [(END_TXN, drop_request)] * 6,
    "EndTxn arrives twice": [(END_TXN, duplicate_request)] * 6,
    # The relay's client repeats it; the first one comes when later transactions of the lane are open.
    "EndTxn arrives late, when it has been repeated": [(END_TXN, delay_request(1.5))] * 6,
    "the answer to Produce is lost": [(PRODUCE, drop_response)] * 6,
    "Produce is lost": [(PRODUCE, drop_request)] * 6,
    "Produce arrives twice": [(PRODUCE, duplicate_request)] * 12,
    "Produce arrives late, when it has been repeated": [(PRODUCE, delay_request(1.5))] * 6,
}


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES.keys())
def test_requests_that_are_lost_late_or_doubled(outbox_postgres, outbox_relay, network, rules):
    cluster, proxy = network
    url = outbox_postgres.url
    with Topics(cluster.bootstrap_servers) as topics:
        kind = topics.name("Order")
        topic = topics.create_topic(f"{kind.lower()}-events", 2)
        settings = {
            "delivery": "exactly-once",
            "name": topics.name("outbox"),
            "relay__lease_seconds": 8.0,
            "relay__batch_size": 50,
            # Connections are cut on purpose here; the client must not take longer and longer to come back.
            "kafka__reconnect_backoff_max_ms": 200,
        }
        with Load(url, kind) as load:
            relay = outbox_relay(bootstrap_servers=proxy.address, **settings)
            wait_until(lambda: load.committed() > 200, what="some load")
            caught_up(url)
            for api_key, action in rules:
                seen = proxy.seen(api_key)
                proxy.on(api_key, action)
                proxy.wait_seen(api_key, seen + 3)
            proxy.wait_done()
            load.drain(90)
            assert relay.running
        assert len(proxy.fired) >= len(rules)
        assert check(url, topics.consume(topic)) == 0
        relay.terminate()
        assert relay.wait() == 0


def test_a_controller_that_does_not_answer_is_asked_anew_in_seconds(network, monkeypatch):
    """Kafka's client alone would wait a minute for it, with all lanes of the relay behind."""
    cluster, proxy = network
    monkeypatch.setattr(transactions, "_READ_SECONDS", 2.0)
    with Topics(cluster.bootstrap_servers) as topics:
        state = StateTopic({"bootstrap.servers": proxy.address}, topics.name("outbox.relay.state"))
        proxy.on(CREATE_TOPICS, delay_response())
        asked_at = time.monotonic()
        with pytest.raises(Unavailable, match="preparing the state topic"):
            state.require(2)
        assert time.monotonic() - asked_at < 50
        proxy.release()
        monkeypatch.undo()
        state.require(2)
        assert state.last_marker(0) is None


def test_a_network_that_swallows_everything_for_a_while(outbox_postgres, outbox_relay, network):
    cluster, proxy = network
    url = outbox_postgres.url
    with Topics(cluster.bootstrap_servers) as topics:
        kind = topics.name("Order")
        topic = topics.create_topic(f"{kind.lower()}-events", 2)
        with Load(url, kind) as load:
            relay = outbox_relay(
                bootstrap_servers=proxy.address,
                delivery="exactly-once",
                name=topics.name("outbox"),
                relay__lease_seconds=3.0,
                kafka__reconnect_backoff_max_ms=200,
            )
            wait_until(lambda: load.committed() > 200, what="some load")
            caught_up(url)
            proxy.blackhole()
            relay.wait_for_log("waiting for a server")
            proxy.heal()
            relay.wait_for_log("publishing again", 90)
            load.drain(90)
        assert check(url, topics.consume(topic)) == 0
        relay.terminate()
        assert relay.wait() == 0
