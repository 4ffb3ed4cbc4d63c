"""The driver of a consumer group, without Spark, on real Kafka and Postgres.

As long as a round finds nothing to read or halts, it never touches its Spark session; ``Driver.read`` steps over what
there is to read, as the driver does where nothing is to be applied.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import psycopg
import pytest
from confluent_kafka import ConsumerGroupTopicPartitions, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewPartitions
from support import wait_until
from typer.testing import CliRunner

from outbox.consumer.admin.offsets import Offsets
from outbox.consumer.kafka_admin import KafkaAdmin
from outbox.consumer.model import Range
from relay.cli.app import app
from spark_jobs.driver.options import Options
from spark_jobs.driver.round_context import Counts, OffsetRanges, RoundState
from spark_jobs.driver.runner import Runner
from spark_jobs.job import ConsumerJob

GROUP = "billing"


class Driver:
    """A group that reads one topic."""

    def __init__(self, database, topics, partitions: int = 2, group: str = GROUP) -> None:
        self.database = database
        self.group = group
        self.url = database.url
        self.topics = topics
        self.topic = topics.create_topic(topics.name("orders"), partitions)
        self.admin = AdminClient({"bootstrap.servers": topics.bootstrap_servers})
        self.reports: list[str] = []
        self.errors: list[str] = []
        """Why it waited for a server."""
        self.runner = self.start()

    def start(self, most: int = 200_000, **declared) -> Runner:
        job = ConsumerJob(group=self.group, topics=[self.topic], effect="SELECT 1", **declared)
        kafka = {"bootstrap.servers": self.topics.bootstrap_servers}
        options = Options(self.url, kafka, max_records=most, patience=30.0)
        return Runner(None, job, options, self._report)

    def _report(self, text: str, figures: Mapping[str, Any]) -> None:
        self.reports.append(text)
        if "error" in figures:
            self.errors.append(str(figures["error"]))

    def step(self) -> dict[int, tuple[int, int]]:
        """Run one round that steps over what it reads. Gives from where to where, by partition."""
        runner, spans = self.runner, []

        def apply(span: OffsetRanges, generation: int) -> Counts:
            runner._rounds._step_over(span, RoundState(), generation)
            spans.append(span)
            return Counts()

        runner._rounds.apply = apply
        runner._round(None)
        return {part: (one.start, one.end) for span in spans for (_, part), one in span.ranges.items()}

    def send(self, part: int, count: int, topic: str | None = None, **at) -> None:
        producer = Producer({"bootstrap.servers": self.topics.bootstrap_servers, "linger.ms": 5})
        for _ in range(count):
            producer.produce(topic or self.topic, b"{}", partition=part, **at)
        assert producer.flush(30) == 0

    def look(self) -> None:
        """Run a round that finds nothing to read, or raises."""
        assert self.runner.once(threading.Event()).read == 0

    def meet(self) -> None:
        """Begin with all partitions, reading nothing."""
        store, view = self.runner._store, self.runner._kafka
        ids, extents = view.look([self.topic])
        store.add(extents, ids, self.runner._begin())

    def read(self, part: int, end: int) -> None:
        """Have the group read a partition up to an offset."""
        store = self.runner._store
        here = store.stored([self.topic])[self.topic, part]
        span = OffsetRanges({(self.topic, part): Range(here.topic_id, here.next_offset, end)}, {})
        self.runner._rounds._step_over(span, RoundState(), self.runner._begin())
        assert store.stored([self.topic])[self.topic, part].next_offset == end

    def delete_before(self, part: int, offset: int) -> None:
        """What retention does."""
        at = TopicPartition(self.topic, part, offset)
        for future in self.admin.delete_records([at]).values():
            future.result(30)
        wait_until(lambda: self.runner._kafka.look([self.topic])[1][self.topic, part].first == offset, what="the cut")

    def add_partitions(self, count: int) -> None:
        """Let the topic have so many."""
        self.admin.create_partitions([NewPartitions(self.topic, count)])[self.topic].result(30)
        wait_until(lambda: len(self.runner._kafka.look([self.topic])[1]) == count, what="the partitions")

    def create_again(self, partitions: int) -> None:
        self.delete()
        self.topics.create_topic(self.topic, partitions)

    def delete(self) -> None:
        self.admin.delete_topics([self.topic])[self.topic].result(30)
        wait_until(lambda: self.topic not in self.admin.list_topics().topics, what="the topic to go")

    def rows(self, query: str, *values, result: bool = True):
        with psycopg.connect(self.url) as connection:
            cursor = connection.execute(query, values)
            return cursor.fetchall() if result else None

    def positions(self) -> dict[int, int]:
        return dict(self.rows("SELECT part, next_offset FROM consumer.offsets WHERE topic = %s", self.topic))

    def losses(self):
        return self.rows(
            "SELECT part, kind, first_offset, end_offset, accepted_at IS NOT NULL FROM consumer.losses ORDER BY id"
        )

    def generation(self) -> int:
        [(generation,)] = self.rows("SELECT generation FROM consumer.groups WHERE grp = %s", self.group)
        return generation

    def audit(self):
        return self.rows("SELECT what, why, details FROM consumer.audit ORDER BY id")

    def offsets(self) -> Offsets:
        view = KafkaAdmin({"bootstrap.servers": self.topics.bootstrap_servers})
        return Offsets(self.database.connect(autocommit=True), "consumer", view)

    def shown_to_kafka(self) -> dict[int, int]:
        asked = self.admin.list_consumer_group_offsets([ConsumerGroupTopicPartitions(self.group)])
        answer = asked[self.group].result(30)
        return {at.partition: at.offset for at in answer.topic_partitions if at.topic == self.topic}

    def command(self, *arguments: str):
        environment = {
            "OUTBOX_DATABASE_URL": self.url,
            "OUTBOX_KAFKA__BOOTSTRAP_SERVERS": self.topics.bootstrap_servers,
        }
        return CliRunner().invoke(app, ["offsets", *arguments], env=environment)


@pytest.fixture
def driver(outbox_postgres, outbox_kafka) -> Driver:
    return Driver(outbox_postgres, outbox_kafka)
