"""A log that was cut before a group's offset, and has grown beyond it again: noticed by the epoch of its leader."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest
from inbox_support import Log
from offsets_driver import GROUP, Driver
from support import wait_until
from transform_support import Place, copied, running

from outbox.consumer.errors import DataLost
from outbox.inbox.errors import PositionLost
from outbox.sandbox._dirs import hand_over
from outbox.sandbox.kafka import KafkaCluster
from outbox.testing.fixtures import Topics
from outbox.transform import InputLost


class Broker:
    """A broker that loses its disk, and comes back with an older copy of topics, as after an unclean election."""

    def __init__(self, server: KafkaCluster, folder: Path) -> None:
        self.server, self._copy = server, folder

    def logs(self, topics: Sequence[str]) -> list[Path]:
        return [log for topic in topics for log in self.server.data_dir.rglob(f"{topic}-[0-9]")]

    def copy(self, *topics: str) -> None:
        self.server.stop()
        for log in self.logs(topics):
            shutil.copytree(log, self._copy / log.name)
        self.server.start()

    def lose(self, *topics: str) -> None:
        self.server.stop()
        for log in self.logs(topics):
            shutil.rmtree(log)
            shutil.copytree(self._copy / log.name, log)
            hand_over(log, self.server._runtime()[2])
        self.server.start()


@pytest.fixture
def broker(mortal_network, tmp_path) -> Broker:
    return Broker(mortal_network[0], tmp_path)


def test_a_log_that_was_cut_and_grew_again_halts_the_group_as_a_loss(outbox_postgres, broker):
    """A driver, a member of an inbox, and transformers: to restart a broker is what takes long, so they share the loss.

    A driver: partition 0 is read again from the cut; of 1, what the log has now before its offset is not read.

    A member of an inbox: behind what it read are transactions' markers, so its position is beyond the last message.

    A transformer does not jump over what a log has now before its position. Also where markers of transactions are
    before that, and the last message's leader does not know them.
    """
    servers = broker.server.bootstrap_servers
    with (
        Topics(servers) as topics,
        Topics(servers) as others,
        closing(Place(topics, 1)) as plain,
        closing(Place(others, 1)) as marked,
    ):
        driver, log = Driver(outbox_postgres, topics, 3), Log(outbox_postgres, others)
        all_topics = driver.topic, log.topic, plain.source, marked.source
        driver.send(0, 50)
        driver.send(1, 10)
        driver.send(2, 3)
        assert driver.step() == {0: (0, 50), 1: (0, 10), 2: (0, 3)}
        member_reads(log, 21)
        transformers_read(plain, marked, range(20))
        broker.copy(*all_topics)
        # Another epoch alone is no loss.
        driver.send(0, 50)
        driver.send(1, 20)
        assert driver.step() == {0: (50, 100), 1: (10, 30)}
        member_reads(log, 42)
        transformers_read(plain, marked, range(20, 40))
        broker.lose(*all_topics)
        driver_halts(driver)
        member_halts(log)
        transformers_halt(plain, marked)


def driver_halts(driver: Driver) -> None:
    """And goes on once both losses are accepted."""
    driver.send(0, 80)
    driver.send(1, 40)
    driver.send(2, 5)
    with pytest.raises(
        DataLost, match=rf"{driver.topic}-0: the group has read up to 100, .* the part before 50: it was"
    ):
        driver.start().once(threading.Event())
    assert driver.losses() == [(0, "cut", 50, 100, False), (1, "cut", 10, 30, False)]
    assert driver.positions() == {0: 100, 1: 30, 2: 3}
    # A run after that says the same, and records nothing more.
    with pytest.raises(DataLost, match="outbox offsets reset"):
        driver.start().once(threading.Event())
    assert len(driver.losses()) == 2
    for command in (
        ["set", GROUP, driver.topic, "1", "30"],
        ["reset", GROUP, "--topic", driver.topic, "--to", "loss"],
    ):
        assert driver.losses()[0][-1] is False
        done = driver.command(*command, "--reason", "accounted for")
        assert done.exit_code == 0, done.output
        assert driver.losses()[1] == (1, "cut", 10, 30, True)
    assert driver.losses()[0] == (0, "cut", 50, 100, True)
    driver.runner = driver.start()
    assert driver.step() == {0: (50, 130), 1: (30, 50), 2: (3, 8)}


def member_reads(log: Log, end: int) -> None:
    """Write a transaction of 20 messages, and have a member read it and its marker."""
    log.produce(["k"] * 20, transactional=True)
    with log.consuming() as running:
        running.wait(lambda: log.positions() == {0: end}, "the position")


def member_halts(log: Log) -> None:
    log.produce(["k"] * 60, transactional=True)
    with log.consuming() as running:
        error = running.error()
    assert isinstance(error, PositionLost)
    assert "read up to 42, " in str(error)
    assert "only the part before 21: it was cut" in str(error)
    losses = "SELECT kind, first_offset, end_offset, accepted_at FROM consumer.losses WHERE topic = %s"
    assert log.run(losses, log.topic) == [("cut", 21, 42, None)]
    assert log.positions() == {0: 42}


def transformers_read(plain: Place, marked: Place, numbers: range) -> None:
    """Write messages, and have a transformer of each group read them; one's come in a transaction for each 20."""
    for place, markers in ((plain, 0), (marked, numbers.stop // 20)):
        place.feed(numbers, transactional=place is marked)
        end = numbers.stop + markers
        with running(place.member(copied(place))):
            wait_until(lambda: place.position() == end, 60, "the position")  # noqa: B023  waits here


def transformers_halt(plain: Place, marked: Place) -> None:
    for place, markers in ((plain, 0), (marked, 2)):
        place.feed(range(40, 120), transactional=place is marked)
        with pytest.raises(InputLost, match=r"only the part before 2[01]: it was cut"):
            place.member(copied(place)).run()
        assert place.position() == 40 + markers
