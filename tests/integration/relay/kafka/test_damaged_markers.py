"""A marker that was damaged on its way, or on a broker's disk, is no marker."""

from __future__ import annotations

import pytest
from confluent_kafka import Producer
from kafka_proxy import FETCH, edit_response

from outbox.testing.fixtures import Topics
from relay.core.marker import Marker
from relay.core.ports import Unavailable
from relay.kafka.state_topic import StateTopic


def test_a_damaged_marker_is_an_error_and_neither_read_nor_passed_over(mortal_network):
    """The one before it would do for a batch that was never published, and other numbers for another batch."""
    cluster, proxy = mortal_network
    with Topics(cluster.bootstrap_servers) as topics:
        name = topics.create_topic(topics.name("outbox.relay.state"), 1)
        producer = Producer({"bootstrap.servers": cluster.bootstrap_servers, "linger.ms": 0})
        last = Marker(17, 1, "7", 1, (1,), ("00000000-0000-0000-0000-000000000001",))
        for marker in (Marker(16, 1, "7", 1), last):
            producer.produce(name, marker.encode(), b"marker", partition=0)
            assert producer.flush(30) == 0
        state = StateTopic({"bootstrap.servers": proxy.address}, name)
        proxy.on(FETCH, edit_response(lambda answer: answer.replace(b'"batch":17', b'"batch":19')), times=1_000_000)
        with pytest.raises(Unavailable, match="CRC"):
            state.read([0])
        proxy.clear()
        assert state.last_markers([0]) == {0: last}
