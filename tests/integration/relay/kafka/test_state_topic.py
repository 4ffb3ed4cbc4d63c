"""Markers of many lanes in one read, and partitions whose end is not decided."""

from __future__ import annotations

import threading
import time

import pytest
from confluent_kafka import KafkaException, Producer
from confluent_kafka.admin import AdminClient

from outbox.sandbox._process import patience
from relay.core.marker import Marker, StateLost
from relay.core.ports import Unavailable, UndecidedTransaction
from relay.kafka import state_topic
from relay.kafka.fencing import fence
from relay.kafka.offsets import Offsets
from relay.kafka.state_topic import StateTopic


def marker(batch: int) -> Marker:
    return Marker(batch, 1, "7", 1, (1,), ("00000000-0000-0000-0000-000000000001",))


class State:
    """One outbox's state topic, and producers that write to it as relays do."""

    def __init__(self, kafka) -> None:
        self.kafka = kafka
        self.options = {"bootstrap.servers": kafka.bootstrap_servers}
        self.name = kafka.name("outbox.relay.state")
        self.opened: list[Producer] = []

    def topic(self, **options) -> StateTopic:
        return StateTopic(self.options, self.name, **options)

    def producer(self, transactional_id: str = "") -> Producer:
        given = {"transactional.id": f"{self.name}.{transactional_id}"} if transactional_id else {}
        producer = Producer({**self.options, **given, "linger.ms": 0})
        if transactional_id:
            producer.init_transactions(30)
        self.opened.append(producer)
        return producer

    def write(self, producer: Producer, lane: int, value: bytes) -> None:
        producer.produce(self.name, value, b"marker", partition=lane)
        assert producer.flush(30) == 0

    def commit(self, producer: Producer, lanes, batch: int) -> None:
        producer.begin_transaction()
        for lane in lanes:
            producer.produce(self.name, marker(batch).encode(), b"marker", partition=lane)
        producer.commit_transaction(30)
        self.decided()

    def decided(self) -> None:
        """Wait for the ends of transactions to be written: a commit is answered before."""
        self.kafka.await_transactions(self.name)


@pytest.fixture
def state(outbox_kafka):
    state = State(outbox_kafka)
    yield state
    for producer in state.opened:
        producer.purge()


def test_a_topic_or_a_partition_that_is_not_there_has_no_marker(state):
    assert state.topic().last_markers([0, 3]) == {0: None, 3: None}
    assert state.topic().last_markers([]) == {}
    topic = state.topic()
    topic.require(2)
    state.commit(state.producer("worker"), [0], 1)
    assert topic.last_markers([0, 1, 2]) == {0: marker(1), 1: None, 2: None}
    assert topic.last_markers([0])[0] == marker(1)


def test_256_lanes_are_read_at_once(state, monkeypatch):
    """With one consumer; and only where nothing was found at the end, further back."""
    topic = state.topic()
    topic.require(256)
    worker = state.producer("worker")
    state.commit(worker, range(255), 1)
    state.commit(worker, range(0, 255, 2), 2)
    # A lane whose end is filled by aborted transactions: the first windows show none of them.
    for _ in range(3):
        worker.begin_transaction()
        for _ in range(200):
            worker.produce(state.name, marker(9).encode(), b"marker", partition=7)
        worker.flush(30)
        worker.abort_transaction(30)
    state.decided()
    made: list[state_topic.Consumer] = []
    assigned: list[int] = []

    class Counted(state_topic.Consumer):
        def __init__(self, *arguments, **options) -> None:
            super().__init__(*arguments, **options)
            made.append(self)

        def assign(self, partitions) -> None:
            assigned.append(len(partitions))
            super().assign(partitions)

    monkeypatch.setattr(state_topic, "Consumer", Counted)
    started = time.monotonic()
    found = topic.last_markers(range(256))
    seconds = time.monotonic() - started
    assert found == {lane: None if lane == 255 else marker(2 if lane % 2 == 0 else 1) for lane in range(256)}
    assert len(made) == 1
    assert assigned == [255, 1, 1]
    assert seconds < state_topic._READ_SECONDS * patience()


def test_an_open_transaction_at_the_end_is_an_error_for_its_lane_alone(state):
    topic = state.topic(decide_seconds=0.5)
    topic.require(3)
    state.commit(state.producer("worker"), [0, 1, 2], 1)
    other = state.producer("other")
    other.begin_transaction()
    state.write(other, 1, marker(2).encode())
    text = rf"'{state.name}' partition 1 is decided up to .*KAFKA-20734.*relay reconcile"
    with pytest.raises(UndecidedTransaction, match=text) as error:
        topic.last_markers([0, 1, 2])
    assert isinstance(error.value, Unavailable)
    read = topic.read([0, 1, 2])
    assert read.markers == {0: marker(1), 2: marker(1)}
    assert read.problems.keys() == {1}
    # For a look before the fence, the last one that is decided.
    assert topic.last_markers([1], decided=False)[1] == marker(1)
    other.commit_transaction(30)
    state.decided()
    assert topic.last_markers([0, 1, 2]) == {0: marker(1), 1: marker(2), 2: marker(1)}


def test_a_partition_that_was_waited_for_in_vain_does_not_hold_the_others_up_again(state, monkeypatch):
    """A worker tries such a lane again every few seconds, and publishes nothing while it does."""
    topic = state.topic(decide_seconds=0.4)
    topic.require(3)
    state.commit(state.producer("worker"), [0, 1, 2], 1)
    other = state.producer("other")
    other.begin_transaction()
    state.write(other, 1, marker(2).encode())
    asked: list[int] = []
    real = Offsets.stable

    def stable(self, partitions):
        asked.append(len(partitions))
        return real(self, partitions)

    monkeypatch.setattr(Offsets, "stable", stable)

    def timed(*lanes: int) -> tuple[set[int], float]:
        started = time.monotonic()
        return set(topic.read(lanes).problems), time.monotonic() - started

    problems, seconds = timed(0, 1)
    assert (problems, seconds >= 0.4) == ({1}, True)
    for lanes in ([1], [1, 2], [1]):
        asked.clear()
        # Who asks once does not wait, however long the answer takes.
        assert (set(topic.read(lanes).problems), asked) == ({1}, [len(lanes)])
    other.commit_transaction(30)
    state.decided()
    assert topic.last_markers([0, 1, 2]) == {0: marker(1), 1: marker(2), 2: marker(1)}
    # It has its time again.
    other.begin_transaction()
    state.write(other, 1, marker(3).encode())
    problems, seconds = timed(1)
    assert (problems, seconds >= 0.4) == ({1}, True)


def test_what_is_decided_meanwhile_is_waited_for(state, monkeypatch):
    topic = state.topic(decide_seconds=30.0)
    topic.require(1)
    worker = state.producer("worker")
    state.commit(worker, [0], 1)
    worker.begin_transaction()
    state.write(worker, 0, marker(2).encode())
    asked = threading.Event()
    real = Offsets.stable

    def stable(self, partitions):
        offsets = real(self, partitions)
        asked.set()
        return offsets

    monkeypatch.setattr(Offsets, "stable", stable)
    found: list[Marker | None] = []
    reader = threading.Thread(target=lambda: found.append(topic.last_markers([0])[0]))
    reader.start()
    assert asked.wait(30 * patience())
    worker.commit_transaction(30)
    reader.join(30 * patience())
    assert found == [marker(2)]


def test_a_fenced_producer_commits_nothing_more(state):
    topic = state.topic()
    topic.require(2)
    former = state.producer("former")
    state.commit(former, [0, 1], 1)
    former.begin_transaction()
    state.write(former, 0, marker(2).encode())
    fence({**state.options, "statistics.interval.ms": "1000"}, f"{state.name}.former")
    assert topic.last_markers([0, 1]) == {0: marker(1), 1: marker(1)}
    with pytest.raises(KafkaException) as told:
        former.commit_transaction(30)
    assert told.value.args[0].fatal()
    # Again, also by an at-most-once relay, and for an id without a producer.
    fence({**state.options, "acks": "1", "enable.idempotence": "false"}, f"{state.name}.former")
    fence(state.options, f"{state.name}.nobody")


def test_a_fence_that_meets_no_broker_says_so():
    with pytest.raises(Unavailable, match=r"fencing the transactional.id 'outbox.relay.w'.*within 0.2 s"):
        fence({"bootstrap.servers": "127.0.0.1:1"}, "outbox.relay.w", 0.2)


def test_a_record_that_is_no_marker_is_an_error_for_its_lane_alone(state):
    topic = state.topic()
    topic.require(2)
    state.commit(state.producer("worker"), [0, 1], 1)
    state.write(state.producer(), 1, b"{}")
    with pytest.raises(StateLost, match=r"partition 1: .*is no marker"):
        topic.last_markers([0, 1])
    read = topic.read([0, 1])
    assert read.markers == {0: marker(1)}
    assert read.problems.keys() == {1}


def test_no_partition_is_read_without_its_broker(state, monkeypatch):
    monkeypatch.setattr("relay.kafka.offsets._SECONDS", 1.0)
    with pytest.raises(Unavailable, match=state.name):
        StateTopic({"bootstrap.servers": "127.0.0.1:1"}, state.name).last_markers([0])[0]


def test_the_topic_has_a_partition_for_each_lane(state):
    state.topic().require(2)
    state.topic().require(5)
    there = AdminClient(state.options).list_topics(state.name, timeout=30).topics[state.name]
    assert len(there.partitions) == 5
