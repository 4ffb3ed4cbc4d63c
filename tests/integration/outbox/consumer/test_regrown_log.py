"""A log that was cut before a group's offset, and has grown beyond it again: noticed by the epoch of its leader."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from inbox_support import Log
from offsets_driver import GROUP, Driver

from outbox.consumer.errors import DataLost
from outbox.inbox.errors import PositionLost
from outbox.sandbox.kafka import KafkaCluster
from outbox.testing.fixtures import Topics


class Broker:
    """A broker that loses its disk, and comes back with an older copy of a partition, as after an unclean election."""

    def __init__(self, server: KafkaCluster, folder: Path) -> None:
        self.server, self._copy = server, folder / "older"

    def log(self, topic: str) -> Path:
        (log,) = self.server.logs[0].parent.rglob(f"{topic}-0")
        return log

    def copy(self, topic: str) -> None:
        self.server.stop()
        shutil.copytree(self.log(topic), self._copy)
        self.server.start()

    def lose(self, topic: str) -> None:
        self.server.stop()
        shutil.rmtree(log := self.log(topic))
        shutil.copytree(self._copy, log)
        self.server.start()


@pytest.fixture(scope="module")
def server() -> Iterator[KafkaCluster]:
    """A broker that is stopped: each test has a topic of its own."""
    with KafkaCluster() as cluster:
        yield cluster


@pytest.fixture
def broker(server, tmp_path) -> Broker:
    return Broker(server, tmp_path)


@pytest.mark.parametrize("to", ["loss", "where it is"])
def test_a_log_that_was_cut_and_grew_again_halts_the_group_as_a_loss(outbox_postgres, broker, to):
    with Topics(broker.server.bootstrap_servers) as topics:
        driver = Driver(outbox_postgres, topics)
        driver.send(0, 50)
        driver.send(1, 10)
        assert driver.step() == {0: (0, 50), 1: (0, 10)}
        broker.copy(driver.topic)
        # Another epoch alone is no loss.
        driver.send(0, 50)
        assert driver.step() == {0: (50, 100)}
        broker.lose(driver.topic)
        driver.send(0, 80)
        driver.send(1, 5)
        with pytest.raises(
            DataLost, match=rf"{driver.topic}-0: the group has read up to 100, .* the part before 50: it was"
        ):
            driver.start().once(threading.Event())
        assert driver.losses() == [(0, "cut", 50, 100, False)]
        assert driver.positions() == {0: 100, 1: 10}
        # A run after that says the same, and records nothing more.
        with pytest.raises(DataLost, match="outbox offsets reset"):
            driver.start().once(threading.Event())
        assert len(driver.losses()) == 1
        command = ["reset", GROUP, "--topic", driver.topic, "--to", "loss"]
        if to != "loss":
            # What the log has now before the group's offset is not read.
            command = ["set", GROUP, driver.topic, "0", "100"]
        done = driver.command(*command, "--reason", "accounted for")
        assert done.exit_code == 0, done.output
        assert driver.losses() == [(0, "cut", 50, 100, True)]
        driver.runner = driver.start()
        assert driver.step() == {0: (50 if to == "loss" else 100, 130), 1: (10, 15)}


def test_a_member_of_an_inbox_halts_too(outbox_postgres, broker):
    """Behind what was read are transactions' markers: the position is beyond the last message."""
    with Topics(broker.server.bootstrap_servers) as topics:
        log = Log(outbox_postgres, topics)
        for number in range(2):
            log.produce(["k"] * 20, transactional=True)
            with log.consuming() as running:
                running.wait(lambda end=21 * (number + 1): log.positions() == {0: end}, "the position")
            if number == 0:
                broker.copy(log.topic)
        broker.lose(log.topic)
        log.produce(["k"] * 60, transactional=True)
        with log.consuming() as running:
            error = running.error()
        assert isinstance(error, PositionLost)
        assert "read up to 42, " in str(error)
        assert "only the part before 21: it was cut" in str(error)
        losses = "SELECT kind, first_offset, end_offset, accepted_at FROM consumer.losses"
        assert log.run(losses) == [("cut", 21, 42, None)]
        assert log.positions() == {0: 42}
