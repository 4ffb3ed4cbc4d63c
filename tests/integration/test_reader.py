"""What a task reads itself: all of its range of 25,000 messages, each once and in order, or an error."""

from __future__ import annotations

import datetime as dt
import gc
import os
import pickle
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import orjson
import psutil
import pyarrow as pa
import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from consumer_group import TOPIC_ID, ConsumerGroup
from proxy import FETCH, KafkaProxy, delay_response, edit_response
from pyspark.sql.types import IntegerType, StructField, StructType
from raw_kafka import produce

from outbox.sandbox.kafka import KafkaCluster
from outbox.testing.fixtures import Topics
from spark_jobs.errors import ConsumerUnavailable, InputCut, JobError
from spark_jobs.job import META
from spark_jobs.letters import Retried
from spark_jobs.model import Range
from spark_jobs.payloads.decoding import PROBLEM
from spark_jobs.payloads.json_columns import JsonReader
from spark_jobs.payloads.reading import Policy
from spark_jobs.task import partition as task
from spark_jobs.task import reader
from spark_jobs.task.incoming import UNREADABLE, Incoming, Messages
from spark_jobs.task.input import TaskInput
from spark_jobs.task.reader import RangeReader, ReaderSettings, TooMuch

MESSAGES = 25_000
PART = 0


def span(start: int, end: int) -> Range:
    return Range(TOPIC_ID, start, end)


def settings(servers: str, **changed: Any) -> ReaderSettings:
    return ReaderSettings({"bootstrap.servers": servers}, "g", **changed)


@pytest.fixture
def opened(outbox_kafka) -> Iterator[RangeReader]:
    made = RangeReader(settings(outbox_kafka.bootstrap_servers))
    yield made
    made.close()


def offsets(parts: TaskInput[Messages]) -> list[int]:
    """Read to the end, which must be proved, and return the offsets."""
    found = [offset for part in parts for offset in part.offsets]
    parts.require_whole()
    return found


def send(servers: str, topic: str, values: list[bytes | None], **options: Any) -> None:
    producer = Producer({"bootstrap.servers": servers, "linger.ms": 5, **options})
    for number, value in enumerate(values):
        producer.produce(topic, value, b"%d" % (number % 100), partition=PART, headers=[("ce_id", b"%d" % number)])
        if number % 10_000 == 0:
            producer.poll(0)
    assert producer.flush(60) == 0


@pytest.fixture(scope="module")
def full(outbox_kafka_cluster) -> Iterator[tuple[str, str]]:
    """The servers, and a topic of one partition with 25,000 messages: offset n has the value n."""
    with Topics(outbox_kafka_cluster.bootstrap_servers) as topics:
        topic = topics.create_topic(topics.name("full"))
        send(topics.bootstrap_servers, topic, [b"%d" % n for n in range(MESSAGES)])
        yield topics.bootstrap_servers, topic


def test_a_range_comes_whole_in_order_and_in_parts(opened, full):
    _, topic = full
    parts = opened.range((topic, PART), span(0, MESSAGES))
    found = list(parts)
    parts.require_whole()
    assert max(map(len, found)) < 10_000 + reader._AT_ONCE
    assert len(found) > 1
    assert [offset for part in found for offset in part.offsets] == list(range(MESSAGES))
    assert [value for part in found for value in part.values] == [b"%d" % n for n in range(MESSAGES)]
    assert [value for part in found for value in part.keys] == [b"%d" % (n % 100) for n in range(MESSAGES)]
    assert [one for part in found for one in part.headers] == [[("ce_id", b"%d" % n)] for n in range(MESSAGES)]


@pytest.mark.parametrize("end", [1, 5_000, 24_999, MESSAGES])
def test_a_range_says_where_the_next_message_is(opened, full, end):
    """Where messages follow each other that is its end: however many the client had taken beyond it."""
    _, topic = full
    parts = opened.range((topic, PART), span(0, end))
    assert parts.reached is None
    assert len(offsets(parts)) == end
    assert parts.reached == end
    whole = opened.whole({(topic, PART): span(0, min(end, 5_000))}, {})[topic, PART]
    assert len(offsets(whole)) == whole.reached == min(end, 5_000)


@pytest.mark.parametrize(("start", "end"), [(0, 1), (24_999, 25_000), (9_999, 20_001), (12_345, 12_345)])
def test_a_range_in_the_middle_ends_where_it_ends(opened, full, start, end):
    _, topic = full
    assert offsets(opened.range((topic, PART), span(start, end))) == list(range(start, end))
    # The same client, another place of the same partition: nothing is left of the first one.
    assert offsets(opened.range((topic, PART), span(20_000, 20_010))) == list(range(20_000, 20_010))


def test_messages_are_left_out(opened, full):
    _, topic = full
    without = {0, 9_999, 15_000, 24_999}
    found = offsets(opened.range((topic, PART), span(0, MESSAGES), without))
    assert found == [n for n in range(MESSAGES) if n not in without]


def test_what_is_aborted_is_left_out_and_markers_prove_the_end(opened, outbox_kafka):
    """A range that ends with markers, or is nothing but them; an open transaction stands behind it."""
    topic = outbox_kafka.create_topic(outbox_kafka.name("transactions"))
    servers = outbox_kafka.bootstrap_servers
    producer = Producer({"bootstrap.servers": servers, "transactional.id": topic, "linger.ms": 5})
    producer.init_transactions(30)

    def transaction(count: int, end: str | None) -> None:
        producer.begin_transaction()
        for _ in range(count):
            producer.produce(topic, end, partition=PART)
        assert producer.flush(60) == 0
        if end == "commit":
            producer.commit_transaction(30)
        elif end == "abort":
            producer.abort_transaction(30)

    transaction(9_000, "commit")
    transaction(9_000, "abort")
    transaction(7_000, "commit")
    transaction(500, "abort")
    transaction(10, None)
    stable = 9_001 + 9_001 + 7_001 + 501
    # A range that ends within a stretch that was aborted: the group goes on behind it, and nobody reads it again.
    for end, reached in ((9_000, 9_000), (9_001, 18_002), (12_000, 18_002), (20_000, 20_000), (25_003, stable)):
        parts = opened.range((topic, PART), span(end - 10, end))
        offsets(parts)
        assert parts.reached == reached
    committed = [*range(9_000), *range(18_002, 25_002)]
    assert offsets(opened.range((topic, PART), span(0, stable))) == committed
    assert offsets(opened.range((topic, PART), span(9_000, 18_002))) == []
    assert offsets(opened.range((topic, PART), span(25_002, stable))) == []
    # All at once, as the driver does it; what is proved of the one proves nothing of the other.
    found = opened.whole({(topic, PART): span(25_000, stable)}, {(topic, PART): {25_001}})
    assert {partition: offsets(parts) for partition, parts in found.items()} == {(topic, PART): [25_000]}
    producer.abort_transaction(30)


def test_several_partitions_at_once(opened, outbox_kafka):
    topic = outbox_kafka.create_topic(outbox_kafka.name("several"), 8)
    producer = Producer({"bootstrap.servers": outbox_kafka.bootstrap_servers})
    for number in range(8 * 50):
        producer.produce(topic, b"%d" % number, partition=number % 8)
    assert producer.flush(30) == 0
    ranges = {(topic, part): span(part, 50) for part in range(8)} | {(topic, 8): span(5, 5)}
    found = opened.whole(ranges, {(topic, 3): {30, 31}})
    left = {part: [n for n in range(part, 50) if part != 3 or n not in {30, 31}] for part in range(8)} | {8: []}
    assert {part: offsets(parts) for (_, part), parts in found.items()} == left


def test_an_end_that_kafka_does_not_have_is_not_taken_for_one(outbox_kafka):
    """As after an unclean election: the log is shorter than it was when the range was planned."""
    topic = outbox_kafka.create_topic(outbox_kafka.name("short"))
    send(outbox_kafka.bootstrap_servers, topic, [b"1"] * 10)
    made = RangeReader(settings(outbox_kafka.bootstrap_servers, patience_seconds=1.0))
    parts = made.range((topic, PART), span(0, 11))
    with pytest.raises(ConsumerUnavailable, match=f"{topic}-0 from offset 10 came for 1 s; nothing was committed"):
        offsets(parts)
    with pytest.raises(InputCut, match="has not read its input to the end"):
        parts.require_whole()
    assert made.broken
    made.close()


@pytest.mark.parametrize(("start", "end"), [(0, 20_000), (30_000, 30_010)])
def test_an_offset_that_kafka_does_not_have_is_an_error(opened, outbox_kafka, start, end):
    topic = outbox_kafka.create_topic(outbox_kafka.name("expired"))
    send(outbox_kafka.bootstrap_servers, topic, [b"1"] * 20_000)
    admin = AdminClient({"bootstrap.servers": outbox_kafka.bootstrap_servers})
    for one in admin.delete_records([TopicPartition(topic, PART, 15_000)]).values():
        one.result()
    with pytest.raises(ConsumerUnavailable, match=f"Kafka, reading {topic}-0"):
        offsets(opened.range((topic, PART), span(start, end)))
    assert opened.broken


def test_a_topic_that_is_not_there_is_an_error(outbox_kafka):
    made = RangeReader(settings(outbox_kafka.bootstrap_servers, patience_seconds=1.0))
    with pytest.raises(ConsumerUnavailable, match="nothing-0"):
        offsets(made.range(("nothing", PART), span(0, 1)))
    made.close()


def test_large_messages_are_not_held_all_at_once(opened, outbox_kafka):
    topic = outbox_kafka.create_topic(outbox_kafka.name("large"))
    value = os.urandom(900_000)
    send(outbox_kafka.bootstrap_servers, topic, [value] * 300, **{"linger.ms": 0})
    process = psutil.Process()
    gc.collect()
    before = process.memory_info().rss
    most = count = 0
    for part in opened.range((topic, PART), span(0, 300)):
        assert all(one == value for one in part.values)
        count += len(part)
        most = max(most, process.memory_info().rss - before)
    assert count == 300
    # 270 MB are read. A part of 16 MiB, what librdkafka holds, and what the last fetch brought.
    assert most < 120_000_000
    with pytest.raises(TooMuch):
        opened.whole({(topic, PART): span(0, 300)}, {})
    assert opened.broken


def test_header_names_that_are_no_text(opened, outbox_kafka):
    """Kafka's names are strings, but a broker takes any bytes; one such message must not hold up the others."""
    topic = outbox_kafka.create_topic(outbox_kafka.name("names"))
    address = outbox_kafka.bootstrap_servers
    bad: list[Any] = [{b"\xff\xfe": b"x", b"ce_id": b"5"}, {b"ce_id": b"6", b"ce_id\xc3": b""}]
    # Often enough for Python to have optimised what is done with each of them.
    for number in range(200):
        produce(address, topic, PART, [(b"k", b"%d" % number, bad[number % 2])])
        send(address, topic, [b"fine"])
    (part,) = opened.range((topic, PART), span(0, 400))
    assert part.values == [value for number in range(200) for value in (b"%d" % number, b"fine")]
    assert part.headers == [UNREADABLE, [("ce_id", b"0")]] * 200
    # Whatever the job's types and strategy are: what nobody can know the type of is not left out without a word.
    for types, ids, count in ((None, "headers", 400), (("order",), "headers", 200), (("order",), "content", 200)):
        taken = late_job(types, ids)
        (rows,) = taken.decoding([part])
        problems = [one for one in rows.column(PROBLEM).to_pylist() if one == "the name of a header is not UTF-8"]
        assert (rows.num_rows, len(problems)) == (count, 200)
        assert len(taken.incoming.chosen(part)) == count
        # And so it is when it is tried again, from what its letter has.
        letters = taken.incoming.raw(part)[::2]
        noon = dt.datetime(2026, 3, 4, 12, tzinfo=dt.UTC)
        again = [
            Retried(
                1, (topic, PART, one.offset), one.key, one.value, orjson.loads(one.headers), noon, "undecodable", False
            )
            for one in letters
        ]
        headers = pickle.loads(pickle.dumps([one.message_headers() for one in again]))
        (rows,) = taken.decoding([replace(part.only(range(0, 400, 2)), headers=headers)])
        assert rows.column(PROBLEM).to_pylist() == ["the name of a header is not UTF-8"] * 200


def test_keys_and_headers_count_too(opened, outbox_kafka):
    topic = outbox_kafka.create_topic(outbox_kafka.name("keys"))
    producer = Producer({"bootstrap.servers": outbox_kafka.bootstrap_servers})
    for number in range(60):
        large = os.urandom(400_000)
        producer.produce(topic, None, large, partition=PART, headers=[("x", large), ("ce_id", b"%d" % number)])
        if number % 10 == 0:
            producer.flush(60)
    assert producer.flush(60) == 0
    found = list(opened.range((topic, PART), span(0, 60)))
    assert max(part.size for part in found) < 40_000_000
    assert [offset for part in found for offset in part.offsets] == list(range(60))
    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(reader, "_MOST_BYTES", 30_000_000)
        with pytest.raises(TooMuch):
            opened.whole({(topic, PART): span(0, 60)}, {})


def test_the_brokers_end_in_the_middle(opened, outbox_postgres):
    """Killed and started again while a range of 25,000 is read: each message still comes once."""
    with KafkaCluster() as cluster, Topics(cluster.bootstrap_servers) as topics:
        topic = topics.create_topic("killed")
        send(cluster.bootstrap_servers, topic, [bytes(1000)] * MESSAGES)
        made = RangeReader(settings(cluster.bootstrap_servers))
        found: list[int] = []
        killed = False
        for part in (parts := made.range((topic, PART), span(0, MESSAGES))):
            found += part.offsets
            if not killed:
                cluster.kill()
                cluster.start()
                killed = True
        parts.require_whole()
        assert found == list(range(MESSAGES))
        made.close()


@pytest.fixture(scope="module")
def between() -> Iterator[tuple[KafkaCluster, KafkaProxy, str]]:
    """A broker behind a proxy, and a topic with 25,000 messages of 1 kB."""
    with (
        KafkaProxy("127.0.0.1", None) as proxy,
        KafkaCluster(advertised_port=proxy.port) as cluster,
    ):
        proxy.lead_to(cluster.proxied_port)
        with Topics(cluster.bootstrap_servers) as topics:
            topic = topics.create_topic("between")
            # One event, as JSON, with a number.
            send(cluster.bootstrap_servers, topic, [b'{"n":%d,"pad":"%s"}' % (n, b"x" * 1000) for n in range(MESSAGES)])
            yield cluster, proxy, topic


def corrupted(response: bytes) -> bytes:
    """Change one byte in the middle of what was fetched; shorter answers have no messages."""
    if len(response) < 20_000:
        return response
    middle = len(response) // 2
    return response[:middle] + bytes([response[middle] ^ 1]) + response[middle + 1 :]


@pytest.fixture
def sink(outbox_postgres) -> ConsumerGroup:
    group = ConsumerGroup(outbox_postgres.url)
    group.begin([PART])
    group.run("CREATE TABLE seen (n int, at bigint)")
    return group


def apply(group: ConsumerGroup, made: RangeReader, topic: str, name: str = "t") -> dict[str, Any]:
    """Let a task apply the whole topic, and return its report. The group's own name of the topic is ``t``."""
    job = late_job()
    effect = "INSERT INTO seen SELECT n, message_offset FROM batch ORDER BY message_offset"
    plan = group.plan(PART, 0, MESSAGES, job.columns, effect, late=job)
    parts = made.range((topic, PART), span(0, MESSAGES))
    (row,) = task.run_range(plan, (name, PART), parts).to_pylist()
    return dict(row)


def late_job(types: tuple[str, ...] | None = None, ids: Any = "headers") -> task.Late:
    """Return how one field is read, as rows.late() would; that asks Spark for what the schema means."""
    kinds = {
        "integer": pa.int32(),
        "bigint": pa.int64(),
        "boolean": pa.bool_(),
        "timestamptz": pa.timestamp("us", "UTC"),
    }
    meta = [(name, kinds.get(kind, pa.string())) for name, kind in META.items()]
    kind = pa.struct([*meta, ("n", pa.int32()), (PROBLEM, pa.string())])
    declared = StructType([StructField("n", IntegerType())])
    return task.Late(kind, lambda: JsonReader(declared, Policy()), Incoming(types, ids), {"n": "integer"} | META)


def nothing_applied(group: ConsumerGroup) -> bool:
    return group.run("SELECT next_offset FROM consumer.offsets") == [(0,)] and group.run("SELECT FROM seen") == []


def all_applied(group: ConsumerGroup) -> bool:
    seen = group.run("SELECT count(*), count(DISTINCT n), count(*) FILTER (WHERE n <> at) FROM seen")
    return bool(
        seen == [(MESSAGES, MESSAGES, 0)] and group.run("SELECT next_offset FROM consumer.offsets") == [(MESSAGES,)]
    )


def test_a_corrupt_record_in_the_middle_is_not_passed_over(between, sink):
    """librdkafka says that a checksum is wrong, and reads on behind it."""
    _, proxy, topic = between
    proxy.on(FETCH, edit_response(corrupted), times=1, skip=4)
    made = RangeReader(settings(proxy.address))
    report = apply(sink, made, topic)
    assert report["outcome"] == "corrupt"
    assert "CRC" in report["detail"]
    assert proxy.fired
    proxy.clear()
    assert made.broken
    made.close()
    assert nothing_applied(sink)
    made = RangeReader(settings(proxy.address))
    assert apply(sink, made, topic)["outcome"] == "applied"
    made.close()
    assert all_applied(sink)


def test_a_cut_in_the_middle_costs_nothing(between, sink):
    _, proxy, topic = between
    before = proxy.seen(FETCH)
    made = RangeReader(settings(proxy.address))
    cuts = iter(range(3))
    real = made._consumer.consume

    class Cutting:
        def __getattr__(self, name: str) -> Any:
            return getattr(consumer, name)

        def consume(self, *arguments: Any) -> Any:
            found = real(*arguments)
            if found and next(cuts, None) is not None:
                proxy.cut()
            return found

    consumer = made._consumer
    made._consumer = Cutting()  # type: ignore[assignment]
    assert apply(sink, made, topic)["outcome"] == "applied"
    assert next(cuts, None) is None
    assert proxy.seen(FETCH) > before + 3
    made.close()
    assert all_applied(sink)


def test_kafka_that_stays_away_in_the_middle(between, sink):
    _, proxy, topic = between
    proxy.on(FETCH, delay_response(None), times=100, skip=4)
    made = RangeReader(settings(proxy.address, patience_seconds=2.0))
    report = apply(sink, made, topic)
    assert report["outcome"] == "unavailable"
    assert re.search(r"between-0 from offset \d+ came for 2 s", report["detail"])
    proxy.clear()
    proxy.release()
    made.close()
    assert nothing_applied(sink)


def test_a_task_moves_the_group_behind_what_was_aborted(between, sink, aborted):
    """In front of a long stretch without messages: the next range begins behind it. Another try finds it applied."""
    made = RangeReader(settings(between[0].bootstrap_servers))
    job = late_job()
    plan = sink.plan(PART, 0, 5, job.columns, "INSERT INTO seen SELECT n, message_offset FROM batch", late=job)
    said = []
    for _ in range(2):
        (row,) = task.run_range(plan, ("t", PART), made.range((aborted, PART), span(0, 5))).to_pylist()
        said.append(row["outcome"])
    made.close()
    assert said == ["applied", "already"]
    ((offset, log_end),) = sink.run("SELECT next_offset, log_end FROM consumer.offsets")
    # The marker may be written behind the message: the coordinator answers before.
    assert offset == log_end
    assert offset in {40, 41}
    assert sink.run("SELECT FROM seen") == []


@pytest.fixture
def aborted(between) -> Iterator[str]:
    """A topic with 40 large messages that were aborted, the marker of that, and one message."""
    cluster, _, _ = between
    with Topics(cluster.bootstrap_servers) as topics:
        topic = topics.create_topic(topics.name("aborted"))
        producer = Producer({"bootstrap.servers": cluster.bootstrap_servers, "transactional.id": topic})
        producer.init_transactions(30)
        producer.begin_transaction()
        for _ in range(40):
            producer.produce(topic, os.urandom(900_000), partition=PART)
            assert producer.flush(60) == 0
        producer.abort_transaction(30)
        send(cluster.bootstrap_servers, topic, [b"1"])
        yield topic


def test_a_long_stretch_that_was_aborted_is_waited_for(between, aborted, monkeypatch):
    """The client hands nothing on for longer than anybody waits; that it gets on is seen by its statistics."""
    _, proxy, _ = between
    # A record with each answer, and each answer late.
    settings_ = {"fetch.message.max.bytes": 900_000, "statistics.interval.ms": 50}
    monkeypatch.setattr(reader, "_SETTINGS", {**reader._SETTINGS, **settings_})
    proxy.on(FETCH, delay_response(0.4), times=10_000)
    try:
        made = RangeReader(settings(proxy.address, patience_seconds=1.0))
        began = time.monotonic()
        # The marker may be written behind the message: the coordinator answers before.
        (offset,) = offsets(made.range((aborted, PART), span(0, 42)))
        assert offset in {40, 41}
        assert time.monotonic() - began > 1.5
        made.close()
        monkeypatch.setattr(RangeReader, "_progress", lambda self, text: None)
        made = RangeReader(settings(proxy.address, patience_seconds=1.0))
        with pytest.raises(ConsumerUnavailable, match="came for 1 s"):
            offsets(made.range((aborted, PART), span(0, 42)))
        made.close()
    finally:
        proxy.clear()


def reached_early(self: Any, at: int) -> None:
    self.at = max(self.at, at)
    self.whole = True


def test_the_proof_is_what_keeps_a_part_from_being_committed(between, sink, monkeypatch):
    """Mutation: whatever comes first is taken for the end, as an iterator's end would be."""
    _, proxy, topic = between
    monkeypatch.setattr(reader._Span, "reach", reached_early)
    made = RangeReader(settings(proxy.address))
    apply(sink, made, topic)
    made.close()
    assert not all_applied(sink)
    assert not nothing_applied(sink)


def test_a_reader_that_ends_early_commits_nothing(between, sink, monkeypatch):
    """The loop is wrong, and the proof is asked for all the same."""
    _, proxy, topic = between
    real = RangeReader._read

    def early(self: RangeReader, spans: Any) -> Iterator[Any]:
        for number, part in enumerate(real(self, spans)):
            yield part
            if number == 3:
                return

    monkeypatch.setattr(RangeReader, "_read", early)
    made = RangeReader(settings(proxy.address))
    report = apply(sink, made, topic)
    assert report["outcome"] == "cut"
    assert f"the range ends at {MESSAGES}; nothing was committed" in report["detail"]
    made.close()
    assert nothing_applied(sink)


def test_messages_that_come_twice_are_not_applied_twice(between, sink, monkeypatch):
    _, proxy, topic = between
    made = RangeReader(settings(proxy.address))
    take = reader._Span.take
    monkeypatch.setattr(reader._Span, "take", lambda self, messages: take(self, [*messages, *messages[-1:]]))
    report = apply(sink, made, topic)
    assert report["outcome"] == "cut"
    assert "or a later one was to come" in report["detail"]
    made.close()
    assert nothing_applied(sink)


def test_a_process_keeps_one_reader_and_none_that_is_unfinished(full):
    servers, topic = full
    given = settings(servers)
    # Rounds that other tests ran by hand in this process have left theirs.
    before = set(reader._KEPT)
    with reader.kept(given) as first:
        assert offsets(first.range((topic, PART), span(0, 10))) == list(range(10))
    with reader.kept(given) as second:
        assert second is first
        parts = second.range((topic, PART), span(0, MESSAGES))
        next(parts)
    with reader.kept(given) as third:
        # The second left messages in its queue.
        assert third is not second
        with reader.kept(given) as inner:
            assert inner is not third
    with reader.kept(ReaderSettings({"bootstrap.servers": servers, "client.id": "x"}, "g")) as other:
        assert other is not third
    with pytest.raises(ZeroDivisionError), reader.kept(given):
        raise ZeroDivisionError
    with reader.kept(given) as last:
        assert last is not third
    with reader.kept(ReaderSettings({"bootstrap.servers": servers}, "another")) as another:
        pass
    reader.close_kept("g")
    with reader.kept(ReaderSettings({"bootstrap.servers": servers}, "another")) as again:
        assert again is another
    reader.close_kept("another")
    assert set(reader._KEPT) == before


@pytest.mark.parametrize("name", sorted(reader._OURS))
def test_options_that_would_break_the_promise_are_refused(name):
    with pytest.raises(JobError, match=f"kafka option '{name}' is set by the consumer itself"):
        ReaderSettings({name: "x"}, "g").librdkafka()


def test_an_option_that_librdkafka_does_not_know():
    with pytest.raises(JobError, match="no such"):
        RangeReader(ReaderSettings({"no such": "x"}, "g"))


def test_no_secret_in_what_is_shown():
    assert "secret" not in repr(ReaderSettings({"sasl.password": "secret"}, "g"))
