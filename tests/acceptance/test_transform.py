"""From topic to topic in Kafka's transactions: once, in order per key, whatever is killed on the way."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Message, Producer
from confluent_kafka.admin import AdminClient, NewPartitions
from confluent_kafka.cimpl import TopicPartition
from docs_support import blocks
from support import wait_until
from transform_support import Place, _soon, copied, doubled, running, terminate

from outbox.transform import InputLost, Record, Transformer
from relay.kafka.offsets import Offsets, Partition

__all__ = ["_soon"]


@pytest.fixture
def place(request, mortal_kafka) -> Iterator[Place]:
    """On a broker that lets sessions be short. Of four partitions, or so many as a test says."""
    with closing(Place(mortal_kafka[1], getattr(request, "param", 4))) as made:
        yield made


def test_killed_twice_beside_another_member(place):
    """A hundred transactions; a member is killed within one, twice, while another shares the partitions."""
    count = 4_000
    place.feed(range(count))
    with place.process(batch=40) as first, place.process(batch=40) as second:
        wait_until(lambda: place.position() > 400, 90, "the first transactions")
        first.signal(signal.SIGKILL)
        with place.process(batch=40) as third:
            wait_until(lambda: place.position() > 1_600, 90, "more transactions")
            second.signal(signal.SIGKILL)
            # Within the work, and not after it.
            assert place.position() < count
            wait_until(lambda: place.position() == count, 120, "the end")
            terminate(third)
    assert place.come(2 * count) == doubled(count)


def test_one_that_slept_past_its_session_adds_nothing(place):
    """Halted within its work; another member takes over; on waking its transaction is refused, and it goes on."""
    count = 3_000
    place.feed(range(count))
    with place.process(batch=20) as sleeper:
        wait_until(lambda: place.position() > 200, 90, "its first transactions")
        sleeper.signal(signal.SIGSTOP)
        with place.process() as other:
            wait_until(lambda: place.position() == count, 120, "the other one to take over and end")
            sleeper.signal(signal.SIGCONT)
            place.feed(range(count, count + 1_000))
            wait_until(lambda: place.position() == count + 1_000, 120, "what came later")
            terminate(sleeper)
            terminate(other)
    assert place.come(2 * (count + 1_000)) == doubled(count + 1_000)


def test_a_member_that_is_expelled_in_a_transaction_is_refused(place):
    """The positions bear the generation of the assignment. Without it, brokers would accept them from an old member."""
    place.feed(range(100))
    began, go_on = threading.Event(), threading.Event()

    def slow(message: Message) -> Iterator[Record]:
        began.set()
        assert go_on.wait(120)
        yield from copied(place)(message)

    options = {**place.options, "session.timeout.ms": 2_000, "max.poll.interval.ms": 2_000}
    first = Transformer(slow, topics=[place.source], group=place.group, kafka=options)
    with running(first) as stop_first:
        assert began.wait(60)
        # It does not poll, so it leaves the group after two seconds.
        second = place.member(copied(place))
        with running(second):
            wait_until(lambda: place.position() == 100, 90, "another member to take over")
        stop_first.set()
        go_on.set()
    assert (first.committed, second.committed) == (0, 100)
    assert sum(map(len, place.come(100).values())) == 100


def test_deleted_input_is_an_error(place):
    place.feed(range(1_000))
    with running(place.member(copied(place), batch=10)) as stop:
        wait_until(lambda: place.position() > 0, 60, "a position")
        stop.set()
    behind = place.position()
    assert behind < 1_000
    admin = AdminClient(place.options)
    ends = Offsets(place.options).high([Partition(place.source, number) for number in range(4)])
    for future in admin.delete_records(
        [TopicPartition(part.topic, part.number, end) for part, end in ends.items()]
    ).values():
        future.result()
    with pytest.raises(InputLost, match="Nothing was skipped"):
        place.member(copied(place)).run()
    assert place.position() == behind


def test_without_a_position(place):
    place.feed(range(10))
    with pytest.raises(InputLost, match="no position"):
        place.member(copied(place), start="none").run()
    # A member that ends before its first transaction leaves its beginning behind.
    with running(place.member(copied(place), start="latest")):
        wait_until(lambda: place.position() == 10, 60, "the beginnings")
    place.feed(range(10, 20))
    later = place.member(copied(place), start="latest")
    with running(later):
        wait_until(lambda: place.position() == 20, 60, "what has come meanwhile")
    assert place.come(10) == {f"k{n}": [n] for n in range(10, 20)}
    assert later.committed == 10


@pytest.mark.parametrize("read", [True, False])
def test_an_added_partition_is_read_from_its_beginning(place, read):
    """With "latest", what came before the partition was discovered has come after the group's start all the same."""
    place.feed(range(10))
    with running(place.member(copied(place), start="latest")):
        wait_until(lambda: place.position() == 10, 60, "the beginnings")
        # The member's transactions keep what the beginnings say.
        place.feed(range(10, 20) if read else range(0))
        wait_until(lambda: place.position() == (20 if read else 10), 60, "the first messages")
    admin = AdminClient(place.options)
    admin.create_partitions([NewPartitions(place.source, 6)])[place.source].result(30)
    place.partitions = 6
    wait_until(lambda: len(admin.list_topics(place.source, 10).topics[place.source].partitions) == 6, 60, "the topic")
    place.feed(range(20, 30), partition=4)
    place.feed(range(30, 40), partition=5)
    count = 30 if read else 20
    with running(place.member(copied(place), start="latest")), running(place.member(copied(place), start="latest")):
        wait_until(lambda: place.position() == count + 10, 60, "what the added partitions have")
    came = place.come(count)
    assert came == {f"k{n}": [n] for n in (range(10, 40) if read else range(20, 40))}


@pytest.mark.parametrize("place", [2], indirect=True)
def test_slow_transforms_and_brokers_that_go_away(place, mortal_kafka, caplog):
    cluster, _ = mortal_kafka
    place.feed(range(4), partition=0)
    # Whoever asks for positions has all its threads when it has asked once.
    assert place.position() == 0
    threads = len(list(Path("/proc/self/task").iterdir()))
    slow = threading.Event()
    seconds = 0.4

    def transform(message: Message) -> Iterator[Record]:
        slow.wait(seconds)
        yield from copied(place)(message)

    # The coordinator has aborted the transaction: the same messages again would be as slow.
    member = place.member(transform, batch=4, batch_seconds=10.0, transaction_seconds=1.0)
    with running(member):
        wait_until(lambda: member.committed == 4, 120, "the end")
    assert "now 2 at a time" in caplog.text
    # The clients of the sessions that were given up are gone, with their records.
    wait_until(lambda: len(list(Path("/proc/self/task").iterdir())) <= threads, 30, "the clients' threads to end")
    # One alone may be slower than a transaction may be.
    place.feed(range(4, 5), partition=0)
    seconds = 2.0
    alone = place.member(transform, transaction_seconds=1.0)
    with running(alone):
        wait_until(lambda: alone.committed == 1, 60, "the slow one")
    assert place.come(5) == {f"k{n}": [n] for n in range(5)}

    # In a process of its own: where a request never returns, its thread and its producer stay until the process ends.
    count = 2_000
    place.feed(range(5, count))
    with place.process(batch=20) as process:
        wait_until(lambda: place.position() > 200, 60, "its first transactions")
        cluster.kill()
        cluster.start()
        wait_until(lambda: place.position() == count, 120, "it to go on to the end")
        terminate(process)
    # The first five are copies, in one partition of the source.
    others = doubled(count)
    wanted = {key: [n for n in numbers if n >= 10] for key, numbers in others.items()}
    come = place.come(5 + 2 * (count - 5))
    assert {key: [n for n in numbers if n >= 10] for key, numbers in come.items()} == wanted
    assert sum(map(len, come.values())) == 5 + 2 * (count - 5)


def test_the_guide(place):
    """docs/guides/kafka-to-kafka.md, as it is but for the topics' names."""
    first, second = [block for block in blocks("python") if block.page == "docs/guides/kafka-to-kafka.md"]
    kafka = place.kafka
    names = {name: kafka.create_topic(kafka.name(name)) for name in ("order-totals", "dead-letters")}
    text = first.text.replace("order-events", place.source).replace("order-totals", names["order-totals"])
    text = text.replace("totals-dead-letters", names["dead-letters"]).replace(
        'group="totals"', f"group={place.group!r}"
    )
    producer = Producer(place.options)
    order = {"id": "o-1", "lines": [{"cents": 250}, {"cents": 125}]}
    producer.produce(place.source, json.dumps(order).encode(), b"o-1")
    producer.produce(place.source, b"no order", b"o-2")
    assert producer.flush(30) == 0
    stop = threading.Event()
    namespace: dict[str, Any] = {"servers": place.options["bootstrap.servers"], "stop": stop}
    thread = threading.Thread(target=exec, args=(compile(text, first.page, "exec", dont_inherit=True), namespace))
    thread.start()
    try:
        [total] = kafka.consume(names["order-totals"], 1, timeout=60)
        [letter] = kafka.consume(names["dead-letters"], 1, timeout=60)
    finally:
        stop.set()
        thread.join(60)
    assert json.loads(total.value()) == {"order": "o-1", "cents": 375}
    assert letter.value() == b"no order"
    exec(compile(second.text, second.page, "exec", dont_inherit=True), namespace)

    class Given:
        def headers(self) -> list[tuple[str, bytes]]:
            return [("ce_id", b"0198a7c4-5d3e-7b21-9c55-2f6d8e1a4b70")]

        def value(self) -> bytes:
            return json.dumps(order).encode()

        def key(self) -> bytes:
            return b"o-1"

    [one], [again] = (list(namespace["with_id"](Given())) for _ in range(2))
    assert one == again
    assert one.headers[0][0] == "id"
    assert len(one.headers[0][1]) == 36
