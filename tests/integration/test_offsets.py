"""What Kafka loses, and moving groups by hand, on real Kafka and Postgres. The driver runs without Spark.

As long as a round finds nothing to read or halts, it never touches its Spark session; ``Driver.read`` steps over what
there is to read, as the driver does where nothing is to be applied.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import threading
import time
from contextlib import suppress

import orjson
import psycopg
import pytest
from confluent_kafka import ConsumerGroupTopicPartitions, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewPartitions
from support import wait_until
from typer.testing import CliRunner

from outbox._app import migrate as db
from outbox.errors import SchemaError
from relay.cli.app import app
from spark_jobs.admin.offsets import MoveRefused, NoSuchGroup, Offsets
from spark_jobs.driver.kafka_admin import KafkaView, TopicMissing
from spark_jobs.driver.planner import Extent
from spark_jobs.driver.rounds import Counts, Span, State
from spark_jobs.driver.runner import Options, Runner
from spark_jobs.errors import ConsumerUnavailable, DataLost, Fenced, TopicRecreated
from spark_jobs.job import ConsumerJob
from spark_jobs.model import Loss, LossKind, Range
from spark_jobs.spark import job_groups

GROUP = "billing"


class Driver:
    """A group that reads one topic."""

    def __init__(self, database, topics, partitions: int = 2) -> None:
        db.upgrade_consumer(database.url)
        self.database = database
        self.url = database.url
        self.topics = topics
        self.topic = topics.create_topic(topics.name("orders"), partitions)
        self.admin = AdminClient({"bootstrap.servers": topics.bootstrap_servers})
        self.reports: list[str] = []
        self.runner = self.start()

    def start(self, most: int = 200_000, **declared) -> Runner:
        job = ConsumerJob(group=GROUP, topics=[self.topic], effect="SELECT 1", **declared)
        kafka = {"bootstrap.servers": self.topics.bootstrap_servers}
        options = Options(self.url, kafka, max_records=most, patience=30.0)
        return Runner(None, job, options, lambda text, figures: self.reports.append(text))

    def step(self) -> dict[int, tuple[int, int]]:
        """Run one round that steps over what it reads. Gives from where to where, by partition."""
        runner, spans = self.runner, []

        def apply(span: Span, generation: int) -> Counts:
            runner._rounds._step_over(span, State(), generation)
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
        span = Span({(self.topic, part): Range(here.topic_id, here.next_offset, end)}, {})
        self.runner._rounds._step_over(span, State(), self.runner._begin())
        assert store.stored([self.topic])[self.topic, part].next_offset == end

    def delete_before(self, part: int, offset: int) -> None:
        """What retention does."""
        at = TopicPartition(self.topic, part, offset)
        for future in self.admin.delete_records([at]).values():
            future.result(30)
        wait_until(lambda: self.runner._kafka.look([self.topic])[1][self.topic, part].first == offset, what="the cut")

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
        [(generation,)] = self.rows("SELECT generation FROM consumer.groups WHERE grp = %s", GROUP)
        return generation

    def audit(self):
        return self.rows("SELECT what, why, details FROM consumer.audit ORDER BY id")

    def offsets(self) -> Offsets:
        view = KafkaView({"bootstrap.servers": self.topics.bootstrap_servers})
        return Offsets(self.database.connect(autocommit=True), "consumer", view)

    def shown_to_kafka(self) -> dict[int, int]:
        answer = self.admin.list_consumer_group_offsets([ConsumerGroupTopicPartitions(GROUP)])[GROUP].result(30)
        return {at.partition: at.offset for at in answer.topic_partitions if at.topic == self.topic}

    def command(self, *arguments: str):
        environment = {
            "OUTBOX_DATABASE_URL": self.url,
            "OUTBOX_KAFKA__BOOTSTRAP_SERVERS": self.topics.bootstrap_servers,
        }
        return CliRunner().invoke(app, ["offsets", *arguments], env=environment)


@pytest.fixture(autouse=True)
def without_spark(monkeypatch) -> None:
    """These drivers plan, and have no session of Spark's whose job group they could set."""
    monkeypatch.setattr(job_groups, "kept", lambda _: contextlib.nullcontext())


@pytest.fixture
def driver(outbox_postgres, outbox_kafka) -> Driver:
    return Driver(outbox_postgres, outbox_kafka)


def test_retention_that_was_faster_is_recorded_once_grows_and_is_accepted(driver):
    for part in (0, 1):
        driver.send(part, 10)
    driver.meet()
    driver.read(0, 2)
    driver.read(1, 10)
    driver.delete_before(0, 5)
    command = f"outbox offsets reset {GROUP} --topic {driver.topic} --to loss --reason …"
    with pytest.raises(DataLost, match="retention removed messages 2 to 4") as caught:
        driver.look()
    assert f"`{command}`" in str(caught.value)
    assert driver.losses() == [(0, "retention", 2, 5, False)]
    # While the group stands retention goes on: the same record, larger.
    driver.delete_before(0, 7)
    for _ in range(2):
        driver.runner = driver.start()
        with pytest.raises(DataLost):
            driver.look()
    assert driver.losses() == [(0, "retention", 2, 7, False)]
    assert driver.positions() == {0: 2, 1: 10}
    before = driver.generation()
    moved = driver.offsets().reset(GROUP, driver.topic, "loss", "counted by hand")
    # Nothing that Kafka still has was passed over: no --skip was needed.
    assert [(one.part, one.before, one.after, one.skipped) for one in moved.moves] == [
        (0, 2, 7, None),
        (1, 10, 10, None),
    ]
    assert driver.losses() == [(0, "retention", 2, 7, True)]
    assert driver.positions() == {0: 7, 1: 10}
    assert moved.generation == driver.generation() == before + 1
    [(what, why, details)] = driver.audit()
    assert (what, why, details["to"], details["generation"]) == ("offsets reset", "counted by hand", "loss", before + 1)
    assert details["partitions"][0]["before"] == 2
    assert len(details["losses"]) == 1
    driver.runner = driver.start()
    driver.runner._begin()
    driver.read(0, 10)
    driver.look()
    # A second loss of that place is a record of its own.
    driver.send(0, 5)
    driver.delete_before(0, 12)
    with pytest.raises(DataLost):
        driver.look()
    assert driver.losses()[1:] == [(0, "retention", 10, 12, False)]


@pytest.mark.parametrize(("partitions", "messages"), [(1, 1), (3, 9)])
def test_a_topic_that_was_created_again(driver, partitions, messages):
    """Shorter than the group's position, with fewer partitions; or longer, with more."""
    for part in (0, 1):
        driver.send(part, 5)
    driver.meet()
    driver.read(0, 5)
    driver.read(1, 4)
    driver.create_again(partitions)
    driver.send(0, messages)
    with pytest.raises(TopicRecreated, match="created again"):
        driver.look()
    assert driver.losses() == [(0, "recreated", 5, None, False), (1, "recreated", 4, None, False)]
    with pytest.raises(MoveRefused, match=f"skips offsets.*{driver.topic}-0 0 to {messages - 1}"):
        driver.offsets().reset(GROUP, driver.topic, "latest", "why")
    assert driver.losses()[0][-1] is False
    moved = driver.offsets().reset(GROUP, driver.topic, "loss", "made anew for more partitions")
    assert len(moved.accepted) == 2
    # A partition that the group has not met is picked up by the next round, and one that is gone is forgotten.
    assert driver.positions() == dict.fromkeys(range(min(partitions, 2)), 0)
    [(topic_id,)] = driver.rows("SELECT DISTINCT topic_id FROM consumer.offsets")
    assert topic_id == driver.runner._kafka.look([driver.topic])[0][driver.topic]
    driver.runner = driver.start()
    driver.runner._begin()
    driver.meet()
    driver.read(0, messages)
    driver.look()
    assert len(driver.positions()) == partitions


def test_a_topic_that_is_gone(driver):
    driver.send(0, 3)
    driver.meet()
    driver.read(0, 2)
    driver.delete()
    with pytest.raises(TopicRecreated, match="the topic is gone") as caught:
        driver.look()
    assert f"`outbox offsets forget {GROUP} --topic" in str(caught.value)
    assert driver.losses() == [(0, "recreated", 2, None, False), (1, "recreated", 0, None, False)]
    with pytest.raises(TopicMissing, match="outbox offsets forget"):
        driver.offsets().reset(GROUP, driver.topic, "loss", "why")
    [group], away = driver.offsets().show(GROUP)
    assert away is None
    assert {one.trouble for one in group.positions} == {"the topic is gone"}
    planned = driver.offsets().forget(GROUP, driver.topic, "why", dry_run=True)
    assert [one.after for one in planned.moves] == [None, None]
    assert len(driver.positions()) == 2
    said = driver.command("forget", GROUP, "--topic", driver.topic, "--reason", "moved to another cluster")
    assert f"{driver.topic}-0: 2 → -  (forgotten)" in said.stdout
    assert driver.positions() == {}
    assert {row[-1] for row in driver.losses()} == {True}
    assert driver.audit()[0][:2] == ("offsets forget", "moved to another cluster")
    with pytest.raises(NoSuchGroup, match="knows nothing"):
        driver.offsets().forget(GROUP, driver.topic, "why")
    # Nobody has read it now: an ordinary mistake in the job, and no loss.
    driver.runner = driver.start()
    with pytest.raises(TopicMissing):
        driver.look()
    assert len(driver.losses()) == 2


def test_partitions_that_are_added_begin_at_0_unless_messages_went_before(driver):
    driver.look()
    assert driver.positions() == {0: 0, 1: 0}
    driver.admin.create_partitions([NewPartitions(driver.topic, 4)])[driver.topic].result(30)

    def partitions():
        return len(driver.runner._kafka.look([driver.topic])[1])

    wait_until(lambda: partitions() == 4, what="the partitions")
    driver.send(3, 6)
    driver.delete_before(3, 4)
    with pytest.raises(DataLost, match="never read it and its first 4 messages") as caught:
        driver.look()
    assert [loss.part for loss in caught.value.losses] == [3]
    assert driver.losses() == [(3, "retention", 0, 4, False)]
    assert driver.positions() == {0: 0, 1: 0}
    moved = driver.offsets().reset(GROUP, driver.topic, "loss", "why")
    assert [(one.part, one.before, one.after) for one in moved.moves] == [(0, 0, 0), (1, 0, 0), (3, None, 4)]
    driver.runner = driver.start()
    driver.runner._begin()
    driver.read(3, 6)
    driver.look()
    # The other one is none of the group's before it has messages.
    assert driver.positions() == {0: 0, 1: 0, 3: 6}
    driver.send(2, 1)
    assert driver.step() == {2: (0, 1)}


@pytest.mark.parametrize("restarted", [False, True])
def test_many_partitions_take_turns(outbox_postgres, outbox_kafka, restarted):
    """Also where every round is the first one of a driver: what is stored says whose turn it is."""
    driver = Driver(outbox_postgres, outbox_kafka, 40)
    for part in range(40):
        driver.send(part, 3)
    driver.runner = driver.start(most=16)
    rounds = []
    for _ in range(5):
        if restarted:
            driver.runner = driver.start(most=16)
        rounds.append(driver.step())
    assert [len(one) for one in rounds] == [16] * 5
    for three in (rounds[:3], rounds[1:4], rounds[2:]):
        assert {part for one in three for part in one} == set(range(40))


def test_a_round_that_fails_keeps_nobody_who_waits_behind_it(outbox_postgres, outbox_kafka):
    driver = Driver(outbox_postgres, outbox_kafka, 40)
    for part in range(40):
        driver.send(part, 3)
    runner = driver.runner = driver.start(most=16)
    tried: list[set[int]] = []

    def apply(span: Span, generation: int) -> Counts:
        tried.append({part for _, part in span.ranges})
        if 0 in tried[-1]:
            raise ConsumerUnavailable("partition 0 can't be read")
        runner._rounds._step_over(span, State(), generation)
        return Counts()

    runner._rounds.apply = apply
    for _ in range(6):
        with suppress(ConsumerUnavailable):
            runner._round(None)
    assert set().union(*tried) == set(range(40))
    assert sum(0 in one for one in tried) < 4


def test_a_group_that_has_lost_a_topic_is_not_new(driver):
    """The topic was made again, and its old offsets were forgotten: what it holds now was never read."""
    driver.runner = driver.start(start="latest")
    driver.look()
    lost = Loss(driver.topic, 0, "another", 0, None, LossKind.RECREATED, "gone")
    driver.runner._store.record_losses([lost], driver.runner._begin())
    driver.offsets().forget(GROUP, driver.topic, "it was made anew")
    driver.send(0, 3)
    driver.runner = driver.start(start="latest")
    assert driver.step() == {0: (0, 3)}


def test_a_new_group_begins_at_the_end_if_it_is_told_to(driver):
    """What went before it is no loss. Everything else begins at 0: partitions and topics that come later."""
    driver.send(0, 5)
    driver.send(1, 2)
    driver.delete_before(0, 3)
    driver.runner = driver.start(start="latest")
    driver.look()
    assert driver.positions() == {0: 5, 1: 2}
    assert driver.losses() == []
    driver.send(0, 2)
    driver.runner = driver.start(start="latest")
    assert driver.step() == {0: (5, 7)}
    driver.admin.create_partitions([NewPartitions(driver.topic, 4)])[driver.topic].result(30)
    wait_until(lambda: len(driver.runner._kafka.look([driver.topic])[1]) == 4, what="the partitions")
    driver.send(2, 4)
    driver.send(3, 6)
    # The other one has asked for this topic's leaders before there was a partition 3.
    driver.admin = AdminClient({"bootstrap.servers": driver.topics.bootstrap_servers})
    driver.delete_before(3, 1)
    with pytest.raises(DataLost, match="first 1 messages"):
        driver.step()
    assert driver.positions() == {0: 7, 1: 2}
    driver.offsets().reset(GROUP, driver.topic, "loss", "why")
    driver.runner = driver.start(start="latest")
    # The other new one waits for this one, which the reset has made known.
    assert driver.step() == {3: (1, 6)}
    assert driver.step() == {2: (0, 4)}


def test_a_transaction_that_is_open_when_a_group_begins_at_the_end_is_read(driver):
    driver.send(0, 2)
    open_one = Producer({"bootstrap.servers": driver.topics.bootstrap_servers, "transactional.id": driver.topic})
    open_one.init_transactions(30)
    open_one.begin_transaction()
    open_one.produce(driver.topic, b"{}", partition=0)
    assert open_one.flush(30) == 0
    driver.send(0, 1)
    driver.runner = driver.start(start="latest")
    driver.look()
    assert driver.positions() == {0: 2, 1: 0}
    open_one.commit_transaction(30)
    wait_until(lambda: driver.runner._kafka.look([driver.topic])[1][driver.topic, 0].end == 5, what="the commit")
    assert driver.step() == {0: (2, 5)}


def test_a_group_that_reads_another_topic_already_is_not_new(driver):
    other = driver.topics.create_topic(driver.topics.name("other"), 1)
    driver.offsets().reset(GROUP, other, "latest", "why", new=True)
    driver.send(0, 3)
    driver.runner = driver.start(start="latest")
    assert driver.step() == {0: (0, 3)}


def test_a_group_begins_with_all_of_its_partitions_or_with_none(driver):
    """A crash in between leaves no row: the group is as new as before, and no partition of it begins at 0."""
    driver.send(0, 5)
    driver.send(1, 2)
    driver.rows("ALTER TABLE consumer.offsets ADD CONSTRAINT crash CHECK (part <> 1)", result=False)
    driver.runner = driver.start(start="latest")
    with pytest.raises(psycopg.errors.CheckViolation):
        driver.look()
    assert driver.positions() == {}
    driver.rows("ALTER TABLE consumer.offsets DROP CONSTRAINT crash", result=False)
    driver.send(0, 1)
    driver.runner = driver.start(start="latest")
    driver.look()
    assert driver.positions() == {0: 6, 1: 2}
    # The answer to that COMMIT may have been lost as well: then another driver finds the rows, and goes on from them.
    driver.send(1, 1)
    driver.runner = driver.start(start="latest")
    assert driver.step() == {1: (2, 3)}


def test_a_log_that_was_cut(driver):
    """No election can be had here that loses messages; a position beyond the end looks the same to the driver."""
    driver.send(0, 5)
    driver.meet()
    driver.rows("UPDATE consumer.offsets SET next_offset = 9 WHERE part = 0 RETURNING 1")
    with pytest.raises(DataLost, match=r"log ends at 5: it was cut.*--to TIME"):
        driver.look()
    assert driver.losses() == [(0, "cut", 5, 9, False)]
    # Until somebody comes, the log has grown past the position: what is there now was never read.
    driver.send(0, 10)
    [group], _ = driver.offsets().show(GROUP)
    assert [loss["kind"] for loss in group.losses] == ["cut"]
    moved = driver.offsets().reset(GROUP, driver.topic, "loss", "broker 3 lost its disk")
    assert [(one.before, one.after) for one in moved.moves if one.changes] == [(9, 5)]
    assert driver.losses()[0][-1] is True


def test_an_open_transaction_pins_what_comes_behind_it(driver):
    driver.look()
    open_one = Producer({"bootstrap.servers": driver.topics.bootstrap_servers, "transactional.id": driver.topic})
    open_one.init_transactions(30)
    open_one.begin_transaction()
    open_one.produce(driver.topic, b"{}", partition=0)
    assert open_one.flush(30) == 0
    driver.send(0, 4)
    extents = driver.runner._kafka.look([driver.topic], high_watermarks=True)[1]
    assert extents[driver.topic, 0] == Extent(0, 0, 5)
    assert extents[driver.topic, 1].pinned == 0
    # Not asked for, not paid for.
    assert driver.runner._kafka.look([driver.topic])[1][driver.topic, 0].pinned is None
    driver.runner._pinned_at = None
    driver.look()
    assert driver.runner.pinned == {(driver.topic, 0): 5}
    [group], _ = driver.offsets().show(GROUP)
    assert [(one.lag, one.pinned, one.high_watermark) for one in group.positions] == [(0, 5, 5), (0, 0, 0)]
    with pytest.raises(MoveRefused, match="offsets 0 to 0"):
        driver.offsets().reset(GROUP, driver.topic, 3, "why", part=0, skip=True)
    open_one.abort_transaction(30)
    wait_until(lambda: driver.runner._kafka.look([driver.topic])[1][driver.topic, 0].end == 6, what="the abort")
    assert driver.offsets().show(GROUP)[0][0].positions[0].lag == 6


def test_high_watermarks_are_asked_for_now_and_then_only(driver, monkeypatch):
    monkeypatch.setattr("spark_jobs.driver.runner._PINNED_SECONDS", 3600.0)
    asked: list[bool] = []
    look = driver.runner._kafka.look

    def counted(topics, *, high_watermarks=False):
        asked.append(high_watermarks)
        return look(topics, high_watermarks=high_watermarks)

    monkeypatch.setattr(driver.runner._kafka, "look", counted)
    for _ in range(3):
        driver.runner._round(None)
    assert asked == [True, False, False]


def test_setting_an_offset_fences_a_running_consumer_and_is_audited(driver):
    driver.send(0, 10)
    driver.meet()
    driver.read(0, 6)
    running = driver.runner
    planned = driver.command("set", GROUP, driver.topic, "0", "4", "--reason", "wrong totals", "--dry-run")
    assert planned.exit_code == 0
    assert f"{driver.topic}-0: 6 → 4  (2 come again)" in planned.stdout
    assert "known by its id" in planned.stdout
    assert "nothing was changed" in planned.stdout
    assert (driver.positions()[0], driver.audit()) == (6, [])
    running._store.state((), running._generation, keep_order=False)
    said = driver.command("set", GROUP, driver.topic, "0", "4", "--reason", "wrong totals", "--json")
    moved = orjson.loads(said.stdout)
    assert (moved["moves"][0]["before"], moved["moves"][0]["after"], moved["moves"][0]["again"]) == (6, 4, 2)
    assert driver.positions() == {0: 4, 1: 0}
    [(what, why, details)] = driver.audit()
    assert (what, why, details["to"]) == ("offsets set", "wrong totals", 4)
    assert details["by"].startswith("outbox offsets, ")
    assert driver.shown_to_kafka()[0] == 4
    # The consumer that ran meanwhile: neither its rounds nor its tasks' statement go through, and it says who it was.
    with pytest.raises(Fenced, match=r"was taken over.*by outbox offsets, .*start this one again"):
        running._round({})
    span = Span({(driver.topic, 0): Range(details["partitions"][0]["topic_id"], 4, 6)}, {})
    with pytest.raises(Fenced, match="was taken over"):
        running._rounds._step_over(span, State(), running._generation)
    [(generation,)] = driver.rows("SELECT DISTINCT generation FROM consumer.offsets")
    assert generation == driver.generation() == moved["generation"]
    driver.runner = driver.start()
    driver.runner._begin()
    driver.read(0, 10)


def test_a_move_waits_for_a_task_that_is_about_to_commit(driver):
    driver.send(0, 10)
    driver.meet()
    moved = []
    with psycopg.connect(driver.url) as task:
        task.execute("UPDATE consumer.offsets SET next_offset = 7 WHERE part = 0")
        with pytest.raises(ConsumerUnavailable, match="nothing was changed"):
            driver.offsets().reset(GROUP, driver.topic, "earliest", "why", wait_seconds=0.2)
        thread = threading.Thread(
            target=lambda: moved.append(driver.offsets().reset(GROUP, driver.topic, 2, "why", part=0))
        )
        thread.start()
        waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
        wait_until(lambda: driver.rows(waits) == [(1,)], what="the move to wait")
    thread.join(60)
    # What it moved from is what the task committed.
    assert [(one.before, one.after, one.again) for one in moved[0].moves] == [(7, 2, 5)]
    assert driver.positions()[0] == 2


def test_going_forward_has_to_be_meant_and_is_written_down(driver):
    driver.send(0, 10)
    driver.meet()
    driver.read(0, 3)
    generation = driver.generation()
    refused = driver.command("set", GROUP, driver.topic, "0", "8", "--reason", "poison")
    assert refused.exit_code == 1
    assert f"{driver.topic}-0 3 to 7" in refused.stderr
    assert "--skip" in refused.stderr
    assert (driver.positions()[0], driver.generation(), driver.audit()) == (3, generation, [])
    planned = driver.command("set", GROUP, driver.topic, "0", "8", "--reason", "poison", "--dry-run")
    assert "skips 3 to 7" in planned.stdout
    assert "this needs --skip" in planned.stdout
    assert driver.command("set", GROUP, driver.topic, "0", "8", "--reason", "poison", "--skip").exit_code == 0
    assert driver.positions()[0] == 8
    assert driver.audit()[0][2]["partitions"][0]["skipped"] == [3, 8]
    for outside, shown in (("11", "offsets 0 to 10"), ("99", "offsets 0 to 10")):
        refused = driver.command("set", GROUP, driver.topic, "0", outside, "--reason", "why", "--skip")
        assert refused.exit_code == 1
        assert shown in refused.stderr
    driver.delete_before(0, 4)
    with pytest.raises(MoveRefused, match="offsets 4 to 10"):
        driver.offsets().reset(GROUP, driver.topic, 3, "why", part=0)
    with pytest.raises(MoveRefused, match="no partition 2"):
        driver.offsets().reset(GROUP, driver.topic, 0, "why", part=2)
    # The first and the end themselves are inside.
    for at in (4, 10):
        driver.offsets().reset(GROUP, driver.topic, at, "why", part=0, skip=True)
        assert driver.positions()[0] == at


def test_resets_to_both_ends_and_to_a_time(driver):
    now = int(time.time() * 1000)
    for second in range(5):
        driver.send(0, 1, timestamp=now - 60_000 + second * 1000)
    driver.send(1, 2, timestamp=now - 3_600_000)
    driver.meet()
    driver.read(0, 5)
    driver.read(1, 2)
    at = dt.datetime.fromtimestamp((now - 60_000 + 2500) / 1000, dt.UTC).isoformat()
    said = driver.command("reset", GROUP, "--topic", driver.topic, "--to", at, "--reason", "why", "--json")
    assert said.exit_code == 0
    # Everything in partition 1 is older: it goes on at the end.
    assert driver.positions() == {0: 3, 1: 2}
    assert driver.audit()[-1][2]["to"] == at
    driver.offsets().reset(GROUP, driver.topic, "earliest", "why")
    assert driver.positions() == {0: 0, 1: 0}
    driver.offsets().reset(GROUP, driver.topic, "latest", "why", skip=True)
    assert driver.positions() == {0: 5, 1: 2} == driver.shown_to_kafka()
    # Nothing to change: nobody is fenced, nothing is written.
    before = (driver.generation(), len(driver.audit()))
    said = driver.command("reset", GROUP, "--topic", driver.topic, "--to", "latest", "--reason", "why")
    assert said.stdout == "nothing to change\n"
    said = driver.command("reset", GROUP, "--topic", driver.topic, "--to", "loss", "--reason", "why")
    assert said.stdout == "nothing to change\n"
    assert (driver.generation(), len(driver.audit())) == before
    for arguments, named in (
        (("--to", "soon", "--reason", "why"), "--to soon"),
        (("--to", "latest", "--reason", " "), "--reason"),
    ):
        refused = driver.command("reset", GROUP, "--topic", driver.topic, *arguments)
        assert refused.exit_code == 2
        assert named in refused.stderr


def test_a_group_that_has_never_run_has_to_be_called_new(driver):
    driver.send(0, 3)
    with pytest.raises(NoSuchGroup, match="there is no group biling; known: none"):
        driver.offsets().reset("biling", driver.topic, "latest", "why", skip=True)
    driver.meet()
    for dry_run in (False, True):
        with pytest.raises(NoSuchGroup, match=f"known: {GROUP}"):
            driver.offsets().reset("biling", driver.topic, "latest", "why", skip=True, dry_run=dry_run)
    planned = driver.offsets().reset("second", driver.topic, "latest", "why", new=True, dry_run=True)
    assert (planned.generation, planned.moves[0].skipped) == (None, (0, 3))
    moved = driver.offsets().reset("second", driver.topic, "latest", "only what comes", new=True, skip=True)
    assert [one.after for one in moved.moves] == [3, 0]
    rows = driver.rows("SELECT grp, part, next_offset FROM consumer.offsets ORDER BY grp, part")
    assert rows == [(GROUP, 0, 0), (GROUP, 1, 0), ("second", 0, 3), ("second", 1, 0)]


def test_show_says_where_everything_stands(driver):
    assert driver.command("show").stdout == "no groups\n"
    driver.send(0, 1234)
    driver.meet()
    driver.read(0, 1000)
    driver.delete_before(0, 1100)
    with pytest.raises(DataLost):
        driver.look()
    driver.rows("UPDATE consumer.groups SET forgotten_before = '2026-01-02' RETURNING 1")
    shown = orjson.loads(driver.command("show", "--group", GROUP, "--json").stdout)
    [group] = shown["groups"]
    assert (group["group"], group["generation"], group["forgotten_before"]) == (GROUP, 1, "2026-01-02")
    first, second = group["positions"]
    assert (first["next_offset"], first["first"], first["end"], first["high_watermark"]) == (1000, 1100, 1234, 1234)
    assert (first["trouble"], first["lag"]) == ("retention passed it", None)
    assert (second["next_offset"], second["lag"], second["pinned"], second["trouble"]) == (0, 0, 0, None)
    assert [loss["kind"] for loss in group["losses"]] == ["retention"]
    text = driver.command("show").stdout
    for part in (f"{driver.topic}-0", "1,000", "1,100", "1,234", "retention passed it", "2026-01-02", "generation 1"):
        assert part in text
    assert f"accept: outbox offsets reset {GROUP} --topic {driver.topic} --to loss" in text
    assert driver.command("show", "--group", "nobody").exit_code == 1


def test_show_without_kafka_and_without_tables(driver, outbox_postgres):
    driver.meet()
    view = KafkaView({"bootstrap.servers": "127.0.0.1:1"}, seconds=1.0)
    [group], away = Offsets(driver.database.connect(autocommit=True), "consumer", view).show()
    assert "Kafka does not answer" in away
    assert [(one.next_offset, one.end, one.trouble) for one in group.positions] == [(0, None, None)] * 2
    assert CliRunner().invoke(app, ["offsets", "show"], env={}).exit_code == 2
    with pytest.raises(SchemaError, match="outbox db upgrade --consumer"):
        Offsets(driver.database.connect(autocommit=True), "nowhere", view).show()
