"""What many of these tests share."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient
from secured import SecuredKafka, secured_kafka
from support import order
from wal_support import wal

from outbox.sandbox.kafka import KafkaCluster
from outbox.testing.fixtures import Topics, token

__all__ = ["order", "wal"]


@contextmanager
def _secured() -> Iterator[SecuredKafka]:
    with tempfile.TemporaryDirectory(prefix="outbox-tls-") as directory, secured_kafka(Path(directory)) as kafka:
        yield kafka


@pytest.fixture(scope="module")
def secured(of_group) -> SecuredKafka:
    """A Kafka that wants TLS, passwords or tokens, and rights; groups.py has its tests in one process."""
    return of_group.once(_secured)


@pytest.fixture
def another_outbox(outbox_postgres_server, _outbox_template) -> Iterator[Callable[[], str]]:
    """A function that makes an outbox, in a database of its own, and returns its address."""
    made: list[str] = []

    def make() -> str:
        made.append(f"outbox_test_{token()}")
        return outbox_postgres_server.create_database(made[-1], template=_outbox_template)

    yield make
    for name in made:
        outbox_postgres_server.drop_database(name)


def _delete_deployed(topics: Topics) -> None:
    """Delete the topics that the files for Docker and Kubernetes name, those that are there."""
    admin = AdminClient({"bootstrap.servers": topics.bootstrap_servers})
    for deleted in admin.delete_topics(["order-events", "outbox.relay.state"], operation_timeout=60).values():
        try:
            deleted.result()
        except KafkaException as error:
            if error.args[0].code() != KafkaError.UNKNOWN_TOPIC_OR_PART:
                raise


@pytest.fixture
def deployment_kafka(mortal_kafka) -> Iterator[tuple[KafkaCluster, Topics]]:
    """A broker that tests may kill, without the topics that the files for Docker and Kubernetes name, before and after.

    Topics.delete leaves these: it goes by a test's own part of a name.
    """
    cluster, topics = mortal_kafka
    _delete_deployed(topics)
    yield cluster, topics
    cluster.start()
    _delete_deployed(topics)
