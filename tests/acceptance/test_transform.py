"""From topic to topic in Kafka's transactions: once, in order per key, whatever is killed on the way."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer
from confluent_kafka.admin import AdminClient, NewPartitions
from confluent_kafka.cimpl import TopicPartition
from docs_support import blocks
from support import wait_until

from outbox import ConfigurationError
from outbox.transform import (
    DEAD_LETTER,
    PLACE,
    InputLost,
    KafkaRefused,
    Record,
    Transformer,
    TransformFailed,
)
from outbox.transform._session import Session
from relay.kafka.offsets import Offsets, Partition

SCRIPT = Path(__file__).parents[1] / "support" / "transformer.py"
KEYS = 200
# The coordinator's answers while it moves or starts.
MOVING = {
    KafkaError._TIMED_OUT,
    KafkaError._TRANSPORT,
    KafkaError.NOT_COORDINATOR,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
}


class Place:
    """Two topics and a group."""

    def __init__(self, kafka: Any, partitions: int = 4) -> None:
        self.kafka = kafka
        self.partitions = partitions
        self.source = kafka.create_topic(kafka.name("in"), partitions)
        self.target = kafka.create_topic(kafka.name("out"), partitions)
        self.group = kafka.name("group")
        self.options = {"bootstrap.servers": kafka.bootstrap_servers, "topic.metadata.propagation.max.ms": 2_000}
        self.where: dict[int, tuple[int | None, int | None]] = {}
        """Partition and offset of each number."""

    def feed(self, numbers: range, *, bad: int | None = None, partition: int | None = None) -> None:
        producer = Producer({**self.options, "enable.idempotence": True})
        more = {} if partition is None else {"partition": partition}

        def sent(number: int) -> Callable[[Any, Message], None]:
            return lambda _error, message: self.where.update({number: (message.partition(), message.offset())})

        for number in numbers:
            value = b"{" if number == bad else json.dumps({"n": number}).encode()
            producer.produce(self.source, value, f"k{number % KEYS}".encode(), on_delivery=sent(number), **more)
            producer.poll(0)
        assert producer.flush(60) == 0

    def member(self, transform: Callable[[Message], Any], **options: Any) -> Transformer:
        return Transformer(transform, topics=[self.source], group=self.group, kafka=self.options, **options)

    @contextmanager
    def process(self, batch: int = 100) -> Iterator[subprocess.Popen[bytes]]:
        arguments = [self.kafka.bootstrap_servers, self.source, self.target, self.group, str(batch)]
        process = subprocess.Popen([sys.executable, str(SCRIPT), *arguments])
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    def position(self) -> int:
        """How many messages the group has committed; what is undecided does not count."""
        asked = [TopicPartition(self.source, number) for number in range(self.partitions)]
        reader = Consumer({**self.options, "group.id": self.group, "isolation.level": "read_uncommitted"})

        def known() -> list[TopicPartition]:
            try:
                return reader.committed(asked, 10)
            except KafkaException as error:
                if error.args[0].code() not in MOVING:
                    raise
                return []

        with closing(reader):
            return sum(max(place.offset, 0) for place in wait_until(known, 60, "the group's positions"))

    def come(self, count: int) -> dict[str, list[int]]:
        """The numbers of each key that a read_committed reader sees."""
        found: dict[str, list[int]] = {}
        for message in self.kafka.consume(self.target, count, timeout=60):
            found.setdefault(message.key().decode(), []).append(json.loads(message.value())["n"])
        return found


def doubled(count: int) -> dict[str, list[int]]:
    return {
        f"k{key}": [2 * number + part for number in range(key, count, KEYS) for part in (0, 1)] for key in range(KEYS)
    }


@pytest.fixture
def place(outbox_kafka):
    return Place(outbox_kafka)


@contextmanager
def running(member: Transformer) -> Iterator[threading.Event]:
    """Run a member in a thread; its error is the test's."""
    stop = threading.Event()
    errors: list[BaseException] = []

    def work() -> None:
        try:
            member.run(stop)
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield stop
    finally:
        stop.set()
        thread.join(120)
        assert not thread.is_alive()
        if errors:
            raise errors[0]


def copied(place: Place) -> Callable[[Message], Iterator[Record]]:
    def copy(message: Message) -> Iterator[Record]:
        json.loads(message.value() or b"")
        yield Record(place.target, message.key(), message.value())

    return copy


def test_killed_twice_beside_another_member(place):
    """25,000 messages; a member is killed within transactions, twice, while another shares the partitions."""
    count = 25_000
    place.feed(range(count))
    with place.process() as first, place.process() as second:
        wait_until(lambda: place.position() > 2_000, 90, "the first transactions")
        first.send_signal(signal.SIGKILL)
        with place.process() as third:
            wait_until(lambda: place.position() > 10_000, 90, "more transactions")
            second.send_signal(signal.SIGKILL)
            wait_until(lambda: place.position() == count, 120, "the end")
            third.terminate()
            assert third.wait(60) == 0
    assert place.come(2 * count) == doubled(count)


def test_one_that_slept_past_its_session_adds_nothing(place):
    """Halted within its work; another member takes over; on waking its transaction is refused, and it goes on."""
    count = 6_000
    place.feed(range(count))
    with place.process(batch=20) as sleeper:
        wait_until(lambda: place.position() > 200, 90, "its first transactions")
        sleeper.send_signal(signal.SIGSTOP)
        with place.process() as other:
            wait_until(lambda: place.position() == count, 120, "the other one to take over and end")
            sleeper.send_signal(signal.SIGCONT)
            place.feed(range(count, count + 2_000))
            wait_until(lambda: place.position() == count + 2_000, 120, "what came later")
            for process in (sleeper, other):
                process.terminate()
                assert process.wait(60) == 0
    assert place.come(2 * (count + 2_000)) == doubled(count + 2_000)


def test_a_member_that_is_expelled_in_a_transaction_is_refused(place):
    """The positions bear the generation of the assignment. Without it, brokers would accept them from an old member."""
    place.feed(range(100))
    began, go_on = threading.Event(), threading.Event()

    def slow(message: Message) -> Iterator[Record]:
        began.set()
        assert go_on.wait(120)
        yield from copied(place)(message)

    options = {**place.options, "session.timeout.ms": 6_000, "max.poll.interval.ms": 6_000}
    first = Transformer(slow, topics=[place.source], group=place.group, kafka=options)
    with running(first) as stop_first:
        assert began.wait(60)
        # It does not poll, so it leaves the group after six seconds.
        second = place.member(copied(place))
        with running(second):
            wait_until(lambda: place.position() == 100, 90, "another member to take over")
        stop_first.set()
        go_on.set()
    assert (first.committed, second.committed) == (0, 100)
    assert sum(map(len, place.come(100).values())) == 100


def test_a_message_that_can_not_be_transformed_ends_it_and_commits_nothing_of_its_transaction(place):
    place.feed(range(10), bad=7)
    member = place.member(copied(place))
    with pytest.raises(TransformFailed, match="JSONDecodeError") as caught:
        member.run()
    assert caught.value.topic == place.source
    assert place.position() == member.committed
    ends = Offsets(place.options).stable([Partition(place.target, number) for number in range(place.partitions)])
    assert member.committed == 0 or sum(ends.values()) >= member.committed


def test_or_goes_to_the_dead_letter_topic(place, outbox_kafka):
    letters = outbox_kafka.create_topic(outbox_kafka.name("dead"), 1)
    place.feed(range(10), bad=7)
    with running(place.member(copied(place), dead_letter_topic=letters)):
        wait_until(lambda: place.position() == 10, 60, "the end")
    assert sorted(n for numbers in place.come(9).values() for n in numbers) == [0, 1, 2, 3, 4, 5, 6, 8, 9]
    [letter] = outbox_kafka.consume(letters, 1)
    headers = dict(letter.headers())
    assert (letter.key(), letter.value()) == (b"k7", b"{")
    assert headers[DEAD_LETTER].startswith(b"JSONDecodeError")
    assert headers[PLACE].startswith(f"{place.source}-".encode())


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


def test_a_topic_that_is_not_there(place, outbox_kafka):
    absent = outbox_kafka.name("absent")
    with pytest.raises(KafkaRefused, match=f"topic {absent} does not exist"):
        Transformer(copied(place), topics=[absent], group=place.group, kafka=place.options).run()


def test_a_topic_that_is_there_a_little_later(place, outbox_kafka, caplog):
    """As after the start of brokers."""
    caplog.set_level("INFO", "outbox")
    later = outbox_kafka.name("later")
    member = Transformer(copied(place), topics=[place.source, later], group=place.group, kafka=place.options)
    with running(member):
        wait_until(lambda: f"waits for topic {later}" in caplog.text, 60, "it to miss the topic")
        outbox_kafka.create_topic(later, 1)
        place.feed(range(10))
        wait_until(lambda: member.committed == 10, 60, "it to go on")


def records(place: Place, *wrong: Any) -> Callable[[Message], Iterator[Any]]:
    """Copies; the message with n = 7 becomes what is wrong, behind a record that is right."""

    def transform(message: Message) -> Iterator[Any]:
        yield Record(place.target, message.key(), message.value())
        if json.loads(message.value() or b"")["n"] == 7:
            yield from wrong

    return transform


@pytest.mark.parametrize(
    ("wrong", "error", "problem"),
    [
        (lambda place: Record(place.target, b"k", bytes(2_000_000)), TransformFailed, "too large"),
        (lambda place: Record(place.narrow, b"k", bytes(5_000)), TransformFailed, "too large"),
        (lambda place: Record(place.target, b"k", b"", partition=99), TransformFailed, "Unknown partition"),
        (lambda place: Record(place.absent, b"k", b""), KafkaRefused, "can't produce: .*[Uu]nknown topic"),
        (lambda _: (b"k", b"v"), TransformFailed, "returned a tuple, not a Record"),
        (lambda place: Record(place.target, b"k", 7), TransformFailed, "TypeError"),
    ],
    ids=["for this client", "for the topic", "partition", "topic", "no record", "value"],
)
def test_records_that_can_not_be_produced(place, outbox_kafka, wrong, error, problem):
    """Nothing of the transaction is committed, and the error says which message it was."""
    place.narrow = outbox_kafka.create_topic(outbox_kafka.name("narrow"), 1, {"max.message.bytes": "1000"})
    place.absent = outbox_kafka.name("absent")
    place.feed(range(10))
    # All in one transaction: it waits for a batch that is full.
    member = place.member(records(place, wrong(place)), batch=10, batch_seconds=30.0)
    with pytest.raises(error, match=problem) as caught:
        member.run()
    assert (place.position(), member.committed) == (0, 0)
    if error is TransformFailed:
        [number] = [n for n, at in place.where.items() if at == (caught.value.partition, caught.value.offset)]
        assert number == 7
    mended = place.member(copied(place))
    with running(mended):
        wait_until(lambda: place.position() == 10, 60, "the end")
    assert place.come(10) == {f"k{n}": [n] for n in range(10)}


def test_a_topic_of_records_that_is_missing_is_found_within_a_transaction(place, outbox_kafka):
    """With the options that a user gives."""
    place.options = {"bootstrap.servers": outbox_kafka.bootstrap_servers}
    place.feed(range(3))
    absent = outbox_kafka.name("absent")
    member = place.member(lambda message: [Record(absent, message.key(), b"")], transaction_seconds=6.0)
    stop = threading.Event()
    too_late = threading.Timer(20.0, stop.set)
    too_late.start()
    try:
        with pytest.raises(KafkaRefused, match=r"can't produce: .*[Uu]nknown topic"):
            member.run(stop)
    finally:
        too_late.cancel()
    assert (place.position(), member.committed) == (0, 0)


def test_slow_transforms_and_brokers_that_go_away(private_kafka, caplog):
    # How often the coordinator looks for transactions that are too old: every ten seconds by default.
    cluster = private_kafka(settings={"transaction.abort.timed.out.transaction.cleanup.interval.ms": "200"})
    place = Place(private_kafka.topics(cluster), 2)
    place.feed(range(8), partition=0)
    threads = len(list(Path("/proc/self/task").iterdir()))
    slow = threading.Event()
    seconds = 0.5

    def transform(message: Message) -> Iterator[Record]:
        slow.wait(seconds)
        yield from copied(place)(message)

    # The coordinator has aborted the transaction: the same messages again would be as slow.
    member = place.member(transform, batch=8, batch_seconds=10.0, transaction_seconds=1.2)
    with running(member):
        wait_until(lambda: member.committed == 8, 120, "the end")
    assert "now 4 at a time" in caplog.text
    # The clients of the sessions that were given up are gone, with their records.
    wait_until(lambda: len(list(Path("/proc/self/task").iterdir())) <= threads, 30, "the clients' threads to end")
    # One alone may be slower than a transaction may be.
    place.feed(range(8, 9), partition=0)
    seconds = 3.0
    alone = place.member(transform, transaction_seconds=1.2)
    with running(alone):
        wait_until(lambda: alone.committed == 1, 60, "the slow one")
    assert place.come(9) == {f"k{n}": [n] for n in range(9)}

    # In a process of its own: where a request never returns, its thread and its producer stay until the process ends.
    place.feed(range(9, 5_000))
    with place.process(batch=50) as process:
        wait_until(lambda: place.position() > 500, 60, "its first transactions")
        cluster.kill()
        cluster.start()
        wait_until(lambda: place.position() == 5_000, 120, "it to go on to the end")
        process.terminate()
        assert process.wait(60) == 0
    # The first nine are copies, in one partition of the source.
    others = doubled(5_000)
    wanted = {key: [n for n in numbers if n >= 18] for key, numbers in others.items()}
    come = place.come(9 + 2 * 4_991)
    assert {key: [n for n in numbers if n >= 18] for key, numbers in come.items()} == wanted
    assert sum(map(len, come.values())) == 9 + 2 * 4_991


@pytest.mark.parametrize(
    ("options", "kafka"),
    [
        ({"topics": []}, {}),
        ({"group": ""}, {}),
        ({"batch": 0}, {}),
        ({"start": "first"}, {}),
        ({"transaction_seconds": 0}, {}),
        ({"topics": "orders"}, {}),
        ({}, {"isolation.level": "read_uncommitted"}),
        ({}, {"transactional.id": "mine"}),
        ({}, {"enable.ssl.certificate.verification": "false"}),
    ],
)
def test_what_does_not_fit_is_refused(options, kafka):
    given: dict[str, Any] = {"topics": ["t"], "group": "g", **options}
    with pytest.raises(ConfigurationError):
        Transformer(lambda _: (), kafka={"bootstrap.servers": "x:1", **kafka}, **given)


def test_the_guide(place, outbox_kafka):
    """docs/guides/kafka-to-kafka.md, as it is but for the topics' names."""
    first, second = [block for block in blocks("python") if block.page == "docs/guides/kafka-to-kafka.md"]
    names = {name: outbox_kafka.create_topic(outbox_kafka.name(name)) for name in ("order-totals", "dead-letters")}
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
        [total] = outbox_kafka.consume(names["order-totals"], 1, timeout=60)
        [letter] = outbox_kafka.consume(names["dead-letters"], 1, timeout=60)
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


def test_a_partition_that_stands_is_named_since_when_and_why(outbox_kafka, monkeypatch):
    """Through sessions that begin anew, too; and not any more when it has moved."""
    place = Place(outbox_kafka, 1)
    place.feed(range(3))
    tries: list[int] = []
    blocked, healthy = threading.Event(), threading.Event()
    send = Session._send_positions

    def fails(session: Session, positions: list[TopicPartition]) -> None:
        tries.append(1)
        if not healthy.is_set():
            raise KafkaException(KafkaError(KafkaError._FAIL, "no luck"))
        send(session, positions)

    def transform(message: Message) -> Iterator[Record]:
        assert blocked.wait(60)
        yield Record(place.target, message.key(), message.value())

    monkeypatch.setattr(Session, "_send_positions", fails)
    member = Transformer(transform, topics=[place.source], group=place.group, kafka=place.options)
    assert member.stalled(0) == []
    stop = threading.Event()
    thread = threading.Thread(target=member.run, args=(stop,), daemon=True)
    thread.start()
    try:
        wait_until(lambda: member.stalled(0), what="the partition to wait")
        (first,) = member.stalled(0)
        assert (first.topic, first.partition, first.offset) == (place.source, 0, 0)
        assert "no error was reported" in str(first)
        assert member.stalled(3600) == []
        blocked.set()
        wait_until(lambda: len(tries) > 2, what="another session")
        (later,) = member.stalled(0)
        assert (later.since, later.why) == (first.since, "no luck")
        assert str(later).startswith(f"partition 0 of topic {place.source} stands still at offset 0 since 2")
        healthy.set()
        wait_until(lambda: member.committed == 3, what="the commit")
        wait_until(lambda: member.stalled(0) == [], what="the partition to move")
    finally:
        healthy.set()
        blocked.set()
        stop.set()
        thread.join(60)
