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


def led(database: Any, topics: Topics, group: str) -> Driver:
    """Return the driver of a topic whose second partition is only on the first of three brokers.

    The group has read three messages of the first and five of the second.
    """
    driver = Driver(database, topics, group=group)
    driver.topic = topics.name("led")
    topic = NewTopic(driver.topic, 2, replica_assignment=[[2], [1]])
    driver.admin.create_topics([topic])[driver.topic].result(30)
    wait_until(lambda: has_leaders(driver, [True, True]), what="the leaders")
    driver.runner = driver.start()
    driver.meet()
    driver.send(0, 3)
    driver.send(1, 5)
    assert driver.step() == {0: (0, 3), 1: (0, 5)}
    return driver


@pytest.fixture
def topics(three_brokers: KafkaCluster) -> Iterator[dict[str, Topics]]:
    """Those of each group."""
    servers = three_brokers.bootstrap_servers
    with Topics(servers) as old, Topics(servers) as new:
        yield {"old": old, "new": new}


@contextmanager
def impatient() -> Iterator[None]:
    """No leader is soon an error. A broker that has just started may know no topics for a while."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(kafka_admin, "_UNHEARD_SECONDS", 0.3)
        yield


def kill_the_first(cluster: KafkaCluster, *drivers: Driver) -> None:
    """And wait until all of these know."""
    usual = drivers[0].runner._kafka._seconds
    for driver in drivers:
        # What the killed broker was asked last is not waited for long.
        driver.runner._kafka._seconds = 1.0
    cluster.kill_broker(0)
    for driver in drivers:
        with impatient():
            wait_until(lambda driver=driver: lacks_a_leader(driver), what="the leader to be gone")
        driver.runner._kafka._seconds = usual


Behind = list[tuple[dict[Any, int], set[Any]]]


def told(driver: Driver) -> Behind:
    """Return where each round's word is noted of what it is behind with."""
    behind: Behind = []
    driver.runner._lagging = lambda offsets, turn: behind.append((dict(offsets), set(turn)))
    return behind


STANDS = "Kafka names no leader of these partitions: they are not read"


def test_the_others_are_read_until_its_leader_is_back(outbox_postgres, topics, three_brokers):
    """Two groups: of the one, a partition that it has read from is without a leader; of the other, an added one too.

    One that is added while another has no leader: tests/unit/spark_jobs/driver/test_added_partitions.py.
    """
    old, new = (led(outbox_postgres, topics[group], group) for group in ("old", "new"))
    for part in (0, 1):
        old.send(part, 5)
    new.admin.create_partitions([NewPartitions(new.topic, 3, [[1]])])[new.topic].result(30)
    wait_until(lambda: has_leaders(new, [True, True, True]), what="the added partition")
    new.send(2, 4)
    kill_the_first(three_brokers, old, new)
    behind = told(old)
    the_others_are_read(old, behind)
    a_run_to_the_ends_needs_all_and_so_does_a_new_group(old)
    an_added_one_keeps_no_other_waiting(new)
    three_brokers.start_broker(0)
    found = []
    wait_until(lambda: found.append(new.step()) or {2: (0, 4)} in found, what="the messages of the added one")
    assert [each for each in found if each] == [{0: (13, 18)}, {2: (0, 4)}]
    other = (old.topic, 1)
    wait_until(lambda: old.step() == {1: (5, 10)}, what="its messages")
    assert behind[-1] == ({other: 5}, {other})
    old.step()
    assert behind[-1] == ({}, set())


def the_others_are_read(driver: Driver, behind: Behind) -> None:
    caught_up, stop = [], threading.Event()
    note = driver.runner._lagging

    def noted(offsets: Mapping[Any, int], turn: Collection[Any]) -> None:
        note(offsets, turn)
        if len(behind) == 4:
            stop.set()

    driver.runner._lagging = noted
    driver.runner._caught_up = caught_up.append
    assert driver.step() == {0: (3, 8)}
    one, other = (driver.topic, 0), (driver.topic, 1)
    assert behind == [({one: 3, other: 5}, {one, other})]
    driver.runner.continuous(stop)
    # It stands, whether messages wait in it or not, and what it has is not caught up with.
    assert (behind[1:], caught_up) == ([({other: 5}, {other})] * 3, [])
    assert driver.reports.count(STANDS) == 1


def a_run_to_the_ends_needs_all_and_so_does_a_new_group(driver: Driver) -> None:
    usual = driver.runner._options
    driver.runner._options = replace(usual, patience=2.0)
    # The last attempt may find that the patience is over before its client knows the controller.
    ways = r"Leader not available|waiting for controller"
    with impatient(), pytest.raises(ConsumerUnavailable, match=ways) as caught:
        driver.runner.once(threading.Event())
    assert any("Leader not available" in error for error in (*driver.errors, str(caught.value)))
    driver.rows("CREATE TABLE kept AS SELECT * FROM consumer.offsets WHERE grp = 'old'", result=False)
    driver.rows("DELETE FROM consumer.offsets WHERE grp = 'old'", result=False)
    with impatient(), pytest.raises(ConsumerUnavailable, match="Leader not available"):
        driver.step()
    assert driver.positions() == {}
    driver.rows("INSERT INTO consumer.offsets TABLE kept", result=False)
    driver.runner._options = usual


def an_added_one_keeps_no_other_waiting(driver: Driver) -> None:
    """It has had no leader since it was added.

    What the others have by then comes before what it has; and then they are read on without it.
    """
    behind = told(driver)
    for part, first in ((0, 3), (0, 8)):
        driver.send(part, 5)
        wait_until(lambda first=first: driver.step() == {0: (first, first + 5)}, what="the messages of the first one")
    one, other, added = ((driver.topic, part) for part in range(3))
    # It stands, and its first message may wait.
    assert behind[-1] == ({one: 8, other: 5, added: 0}, {one, other, added})
    assert driver.reports.count(STANDS) == 1
    driver.send(0, 5)
