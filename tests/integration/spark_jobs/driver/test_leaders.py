"""A partition without a leader: a continuous driver reads the others. On real servers, and without Spark."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from confluent_kafka.admin import NewPartitions, NewTopic
from offsets_driver import Driver
from support import wait_until

from outbox.consumer import kafka_admin
from outbox.consumer.errors import ConsumerUnavailable
from outbox.sandbox.kafka import KafkaCluster
from outbox.testing.fixtures import Topics


def has_leaders(driver: Driver, which: list[bool]) -> bool:
    described = driver.admin.list_topics(timeout=30).topics.get(driver.topic)
    return described is not None and [part.leader >= 0 for part in described.partitions.values()] == which


def lacks_a_leader(driver: Driver) -> bool:
    """Return whether that is what the driver's client hears; at first it may look for the broker."""
    try:
        driver.runner._kafka.look([driver.topic])
    except ConsumerUnavailable as error:
        return "Leader not available" in str(error)
    return False


@pytest.fixture
def read(outbox_postgres, three_brokers):
    """The driver of a topic whose second partition is only on the first of three brokers, and these.

    The group has read three messages of the first and five of the second.
    """
    with Topics(three_brokers.bootstrap_servers) as topics:
        driver = Driver(outbox_postgres, topics)
        driver.topic = topics.name("led")
        topic = NewTopic(driver.topic, 2, replica_assignment=[[2], [1]])
        driver.admin.create_topics([topic])[driver.topic].result(30)
        wait_until(lambda: has_leaders(driver, [True, True]), what="the leaders")
        driver.runner = driver.start()
        driver.meet()
        driver.send(0, 3)
        driver.send(1, 5)
        assert driver.step() == {0: (0, 3), 1: (0, 5)}
        yield driver, three_brokers


@contextmanager
def impatient() -> Iterator[None]:
    """No leader is soon an error. A broker that has just started may know no topics for a while."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(kafka_admin, "_UNHEARD_SECONDS", 0.3)
        yield


def kill_the_first(driver: Driver, cluster: KafkaCluster) -> None:
    usual = driver.runner._kafka._seconds
    # What the killed broker was asked last is not waited for long.
    driver.runner._kafka._seconds = 3.0
    cluster.kill_broker(0)
    with impatient():
        wait_until(lambda: lacks_a_leader(driver), what="the leader to be gone")
    driver.runner._kafka._seconds = usual


def test_the_others_are_read_until_its_leader_is_back(read):
    driver, cluster = read
    for part in (0, 1):
        driver.send(part, 5)
    kill_the_first(driver, cluster)
    behind, caught_up, stop = [], [], threading.Event()

    def note(offsets: Mapping[Any, int], turn: Collection[Any]) -> None:
        behind.append((dict(offsets), set(turn)))
        if len(behind) == 4:
            stop.set()

    driver.runner._lagging = note
    driver.runner._caught_up = caught_up.append
    assert driver.step() == {0: (3, 8)}
    one, other = (driver.topic, 0), (driver.topic, 1)
    assert behind == [({one: 3, other: 5}, {one, other})]
    driver.runner.continuous(stop)
    # It stands, whether messages wait in it or not, and what it has is not caught up with.
    assert (behind[1:], caught_up) == ([({other: 5}, {other})] * 3, [])
    assert driver.reports.count("Kafka names no leader of these partitions: they are not read") == 1
    # A run to the ends needs all, and so does a new group.
    usual = driver.runner._options
    driver.runner._options = replace(usual, patience=3.0)
    with impatient(), pytest.raises(ConsumerUnavailable, match="Leader not available"):
        driver.runner.once(threading.Event())
    driver.rows("CREATE TABLE kept AS TABLE consumer.offsets", result=False)
    driver.rows("DELETE FROM consumer.offsets", result=False)
    with impatient(), pytest.raises(ConsumerUnavailable, match="Leader not available"):
        driver.step()
    assert driver.positions() == {}
    driver.rows("INSERT INTO consumer.offsets TABLE kept", result=False)
    driver.runner._options = usual
    cluster.start_broker(0)
    wait_until(lambda: driver.step() == {1: (5, 10)}, what="its messages")
    assert behind[-1] == ({other: 5}, {other})
    driver.step()
    assert behind[-1] == ({}, set())


def test_one_that_has_had_no_leader_since_it_was_added_keeps_no_other_waiting(read):
    """What the others have by then comes before what it has; and then they are read on without it.

    One that is added while another has no leader: tests/unit/spark_jobs/driver/test_added_partitions.py.
    """
    driver, cluster = read
    driver.admin.create_partitions([NewPartitions(driver.topic, 3, [[1]])])[driver.topic].result(30)
    wait_until(lambda: has_leaders(driver, [True, True, True]), what="the added partition")
    driver.send(2, 4)
    behind = []
    kill_the_first(driver, cluster)
    driver.runner._lagging = lambda offsets, turn: behind.append((dict(offsets), set(turn)))
    for part, first in ((0, 3), (0, 8)):
        driver.send(part, 5)
        wait_until(lambda first=first: driver.step() == {0: (first, first + 5)}, what="the messages of the first one")
    one, other, added = ((driver.topic, part) for part in range(3))
    # It stands, and its first message may wait.
    assert behind[-1] == ({one: 8, other: 5, added: 0}, {one, other, added})
    assert driver.reports.count("Kafka names no leader of these partitions: they are not read") == 1
    driver.send(0, 5)
    cluster.start_broker(0)
    found = []
    wait_until(lambda: found.append(driver.step()) or {2: (0, 4)} in found, what="the messages of the added one")
    assert [each for each in found if each] == [{0: (13, 18)}, {2: (0, 4)}]
