"""Requests of a group that the brokers do not answer: the next ones are made by another client.

A client that only administers asks for no metadata by itself. After a broker had been killed, one was seen to time out
for minutes while others had their answers at once.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from confluent_kafka import KafkaException
from kafka_proxy import METADATA, delay_response
from support import wait_until

from outbox._clients.kafka_client import Admin
from outbox.consumer.errors import ConsumerUnavailable
from outbox.consumer.kafka_admin import KafkaAdmin
from outbox.testing.fixtures import Topics

SECONDS = 0.5


@pytest.fixture
def silent_address() -> Iterator[str]:
    """An address where connections are accepted, and nothing is answered."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"127.0.0.1:{listening.getsockname()[1]}"


@pytest.fixture
def deaf(outbox_kafka, silent_address) -> Iterator[tuple[KafkaAdmin, str]]:
    """A group's requests, whose client gets no answer any more, and a topic."""
    with Topics(outbox_kafka.bootstrap_servers) as topics:
        topic = topics.create_topic(topics.name("t"), 2)
        view = KafkaAdmin({"bootstrap.servers": outbox_kafka.bootstrap_servers}, seconds=SECONDS)
        view._admin = Admin({"bootstrap.servers": silent_address})
        yield view, topic


AWAITED: dict[str, Callable[[KafkaAdmin, str], Any]] = {
    "look": lambda view, topic: view.look([topic]),
    "ends": lambda view, topic: view.ends([(topic, 0)]),
    "configuration": lambda view, topic: view.retention_seconds(topic),
}


@pytest.mark.parametrize("name", AWAITED)
def test_another_client_has_the_answer(deaf, name):
    view, topic = deaf
    with pytest.raises((ConsumerUnavailable, KafkaException)):
        AWAITED[name](view, topic)
    # In a client's own thread it may be noted a moment later.
    wait_until(view._useless.is_set, what="the silence to be noted")
    view._seconds = 30.0
    AWAITED[name](view, topic)


@pytest.mark.parametrize("what", ["topics", "group"])
def test_so_it_has_where_the_answer_is_not_awaited(deaf, what):
    view, topic = deaf

    def error() -> BaseException | None:
        asked = view.describe([topic])[topic] if what == "topics" else view.describe_group("g")
        return asked.exception(60)

    assert isinstance(error(), KafkaException)
    wait_until(view._useless.is_set, what="the silence to be noted")
    view._seconds = 30.0
    # The group's coordinator may not be there yet.
    wait_until(lambda: error() is None, what="the answer")


def test_what_was_asked_before_ends_although_another_client_asks_now(mortal_network):
    cluster, proxy = mortal_network
    with Topics(cluster.bootstrap_servers) as topics:
        topic = topics.create_topic(topics.name("t"), 1)
        view = KafkaAdmin({"bootstrap.servers": proxy.address})
        assert view.ends([(topic, 0)]) == {(topic, 0): 0}
        # And what follows on the connection.
        proxy.on(METADATA, delay_response())
        # A client that is closed while answers are awaited leaves some of these without an end.
        left = [view.describe([topic], 3.0)[topic] for _ in range(3)]
        view._seconds = SECONDS
        with pytest.raises(ConsumerUnavailable):
            view.ends([(topic, 0)])
        view._seconds = 30.0
        assert view.ends([(topic, 0)]) == {(topic, 0): 0}
        assert all(isinstance(one.exception(60), KafkaException) for one in left)
        proxy.clear()
        proxy.release()


def test_the_client_stays_while_another_one_cannot_be_made(deaf):
    view, topic = deaf
    usual = dict(view._options)
    # As while its certificates are being replaced.
    view._options["ssl.ca.location"] = "/nowhere"
    view._options["security.protocol"] = "ssl"
    for _ in range(2):
        with pytest.raises(ConsumerUnavailable):
            view.ends([(topic, 0)])
    view._options.clear()
    view._options.update(usual)
    view._seconds = 30.0
    assert view.ends([(topic, 0)]) == {(topic, 0): 0}
