"""Brokers that several tests share: to start one is the most expensive thing that these tests do."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from secured import SecuredKafka, secured_kafka
from support import order
from wal_support import wal

from outbox.sandbox.kafka import KafkaCluster
from outbox.testing.fixtures import Topics

__all__ = ["order", "wal"]


@pytest.fixture(scope="module")
def _mortal_cluster() -> Iterator[KafkaCluster]:
    """Of a file: an idle broker takes more processor time in a whole run than another start does."""
    settings = {
        # How often the coordinator looks for transactions that are too old: every ten seconds by default.
        "transaction.abort.timed.out.transaction.cleanup.interval.ms": "200",
        # Access rights, where a test makes rules.
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "allow.everyone.if.no.acl.found": "true",
    }
    with KafkaCluster(settings=settings) as cluster:
        yield cluster


@pytest.fixture
def mortal_kafka(_mortal_cluster: KafkaCluster) -> Iterator[tuple[KafkaCluster, Topics]]:
    """A broker that tests may kill, and topics on it. It runs again when a test has ended."""
    with Topics(_mortal_cluster.bootstrap_servers) as topics:
        yield _mortal_cluster, topics
        _mortal_cluster.start()


@pytest.fixture(scope="session")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredKafka]:
    """A Kafka that wants TLS, passwords or tokens, and rights; conftest.group has its tests in one process."""
    with secured_kafka(tmp_path_factory.mktemp("tls")) as kafka:
        yield kafka
