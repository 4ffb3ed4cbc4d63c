"""Two topics of 16 partitions in one job: they take turns, rounds are clipped, and a worker is killed among them. And
however many they are, a session in the sink is opened for each core, and two for the driver.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import psycopg
import pytest
from bench import Bench, produce
from faults import by_map, fault_at, reading

from outbox.consumer.model import Partition
from outbox.testing.fixtures import Topics
from spark_jobs.driver.rounds import Rounds
from spark_jobs.effects.mapped import Insert
from spark_jobs.job import ConsumerJob

pytestmark = pytest.mark.spark

PARTITIONS = 16
SHORT, LONG = 20, 140
MOST = 640
"""In a round: of the long ones, what comes in a first turn is clipped."""
Spans = list[dict[Partition, tuple[int, int]]]


@pytest.fixture(scope="module")
def topics(outbox_kafka_cluster) -> Iterator[Mapping[Partition, range]]:
    """Which numbers are in each partition: many in each fourth one, and few in the others."""
    with Topics(outbox_kafka_cluster.bootstrap_servers) as made:
        numbers: dict[Partition, range] = {}
        first = 0
        for topic in [made.create_topic(made.name(name), PARTITIONS) for name in ("left", "right")]:
            for part in range(PARTITIONS):
                numbers[topic, part] = range(first, first + (LONG if part % 4 == 1 else SHORT))
                first = numbers[topic, part].stop
            sent = (({"n": n}, str(part), part) for part in range(PARTITIONS) for n in numbers[topic, part])
            produce(made.bootstrap_servers, topic, sent)
        yield numbers


@pytest.fixture
def spans(monkeypatch) -> Spans:
    """What each round has read of each partition: from where, and up to but not including."""
    read: Spans = []
    real = Rounds.apply

    def noted(self: Any, span: Any, generation: int) -> Any:
        counts = real(self, span, generation)
        read.append({partition: (one.start, one.end) for partition, one in span.ranges.items()})
        return counts

    monkeypatch.setattr(Rounds, "apply", noted)
    return read


CORES = 2
"""Of local[2,4], in which these tests' Spark runs."""


class Sessions(threading.Thread):
    """Looks again and again which sessions of consumers a database has. ``most`` at a time, and ``seen`` in all."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self._url = url
        self._over = threading.Event()
        self._looked = threading.Event()
        self.most = 0
        self.seen: set[tuple[int, str]] = set()

    def run(self) -> None:
        query = (
            "SELECT pid, application_name FROM pg_stat_activity "
            "WHERE datname = current_database() AND application_name LIKE 'outbox %'"
        )
        with psycopg.connect(self._url, autocommit=True) as connection:
            while not self._over.wait(0.005):
                found = connection.execute(query).fetchall()
                self.most = max(self.most, len(found))
                self.seen.update(found)
                self._looked.set()

    def __enter__(self) -> Self:
        self.start()
        assert self._looked.wait(30)
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join()


def test_32_partitions_and_a_killed_worker(bench: Bench, topics, spans, tmp_path: Path):
    """Whose session is one more than there would be without it."""
    killed = tmp_path / "killed"
    ordered = sorted(topics)
    # In the midst of a partition that the second round reads.
    victim = next(partition for partition in ordered[PARTITIONS:] if len(topics[partition]) == LONG)
    passed = fault_at(topics[victim][LONG // 4], once=killed, kills=True)
    job = ConsumerJob(
        "many",
        sorted({topic for topic, _ in topics}),
        Insert("seen", {"n": "n", "topic": "message_topic", "part": "message_part", "at": "message_offset"}),
        schema=reading(passed),
        # Without a constraint: whatever is applied twice shows.
        setup="CREATE TABLE IF NOT EXISTS seen (n int, topic text, part int, at bigint)",
    )
    with Sessions(bench.database.url) as sessions, bench.runner(job, max_records=MOST, driver_records=0) as runner:
        totals = runner.once(threading.Event())
    everything = sum(map(len, topics.values()))
    assert killed.exists()
    assert sessions.most <= CORES + 2
    # One worker was killed, and has a successor.
    assert len(sessions.seen) <= CORES + 1 + 2
    assert (totals.read, totals.applied, totals.duplicates, totals.dead) == (everything, everything, 0, 0)
    assert bench.rows("SELECT topic, part, at, n FROM seen ORDER BY n") == [
        (*partition, at, n) for partition in ordered for at, n in enumerate(topics[partition])
    ]
    assert bench.rows("SELECT topic, part, next_offset, applied FROM consumer.offsets ORDER BY topic, part") == [
        (*partition, len(topics[partition]), len(topics[partition])) for partition in ordered
    ]
    take_turns(spans, topics)


def test_16_partitions_take_a_session_for_each_core_and_two_more(bench: Bench, topics, spans):
    """With a transform in Python, whose workers have none."""
    topic = min(topics)[0]
    job = ConsumerJob(
        "many",
        [topic],
        "INSERT INTO seen SELECT n, pg_backend_pid() FROM batch",
        schema="n int",
        setup="CREATE TABLE IF NOT EXISTS seen (n int, pid int)",
        transform=by_map(lambda n: n),
    )
    with Sessions(bench.database.url) as sessions, bench.runner(job, max_records=MOST, driver_records=0) as runner:
        totals = runner.once(threading.Event())
    assert totals.applied == sum(len(numbers) for (of, _), numbers in topics.items() if of == topic)
    assert len(spans) == 2
    # The sessions that had a transaction, whichever were seen; each for many partitions.
    [(pids,)] = bench.rows("SELECT count(DISTINCT pid) FROM seen")
    assert 1 <= pids <= CORES
    assert sessions.most <= CORES + 2
    names = {name for _, name in sessions.seen}
    # The watch begins to look after some seconds, and a run may be over by then.
    assert names | {"outbox watch many"} == {"outbox driver many", "outbox watch many", "outbox consumer many"}
    assert pids + len(names) - 1 <= len(sessions.seen) <= CORES + 2


def take_turns(spans: Spans, topics: Mapping[Partition, range]) -> None:
    """Check that no round is too large, that nobody has a second turn while others wait for their first, and that what
    was clipped goes on where it was.
    """
    at = dict.fromkeys(topics, 0)
    again = set()
    for span in spans:
        waiting = {partition for partition in topics if not at[partition]}
        if any(at[partition] for partition in span):
            assert waiting <= span.keys()
        again |= span.keys() - waiting
        assert sum(end - start for start, end in span.values()) <= MOST
        for partition, (start, end) in span.items():
            assert start == at[partition]
            at[partition] = end
    assert at == {partition: len(numbers) for partition, numbers in topics.items()}
    assert again == {partition for partition, numbers in topics.items() if len(numbers) == LONG}
