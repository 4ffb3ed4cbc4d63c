"""What a task reads itself: all of its range of 25,000 messages, each once and in order, or an error."""

from __future__ import annotations

import datetime as dt
import gc
import os
import pickle
import uuid
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import orjson
import psutil
import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from range_support import MESSAGES, PART, offsets, opened_at, send, settings, span, task_decoder
from raw_kafka import produce

from outbox.consumer.errors import ConsumerUnavailable, JobError
from outbox.consumer.letters import RetryRecord
from outbox.consumer.model import RejectedRecord
from outbox.testing.fixtures import Topics
from spark_jobs.errors import InputCut
from spark_jobs.payloads.decoding import PROBLEM
from spark_jobs.task import reader
from spark_jobs.task.reader import RangeReader, ReaderSettings, TooMuch


@pytest.fixture(scope="module")
def full(outbox_kafka_cluster) -> Iterator[tuple[str, str]]:
    """The servers, and a topic of one partition with 25,000 messages: offset n has the value n."""
    with Topics(outbox_kafka_cluster.bootstrap_servers) as topics:
        topic = topics.create_topic(topics.name("full"))
        send(topics.bootstrap_servers, topic, [b"%d" % n for n in range(MESSAGES)])
        yield topics.bootstrap_servers, topic


@pytest.fixture
def opened(outbox_kafka) -> Iterator[RangeReader]:
    with opened_at(outbox_kafka.bootstrap_servers) as made:
        yield made


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


@pytest.mark.parametrize(("start", "end"), [(0, 1), (0, 5_000), (24_999, MESSAGES), (9_999, 20_001), (12_345, 12_345)])
def test_a_range_ends_where_it_ends_and_says_where_the_next_message_is(opened, full, start, end):
    """Where messages follow each other that is its end: however many the client had taken beyond it."""
    _, topic = full
    parts = opened.range((topic, PART), span(start, end))
    assert parts.reached is None
    assert offsets(parts) == list(range(start, end))
    assert parts.reached == end
    # The same client, another place of the same partition: nothing is left of the first one.
    whole = opened.whole({(topic, PART): span(20_000, 20_010)}, {})[topic, PART]
    assert (offsets(whole), whole.reached) == (list(range(20_000, 20_010)), 20_010)
    # More than a client hands over at once.
    whole = opened.whole({(topic, PART): span(start, min(end, start + 5_000))}, {})[topic, PART]
    assert offsets(whole) == list(range(start, min(end, start + 5_000)))
    assert whole.reached == min(end, start + 5_000)


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
    with opened_at(outbox_kafka.bootstrap_servers) as made:
        assert len(offsets(made.range((topic, PART), span(0, 10)))) == 10
        # It is connected: so little is enough for what is there.
        made.patience_seconds = 4.0
        parts = made.range((topic, PART), span(0, 11))
        why = rf"{topic}-0 from offset 10 came for \d+ s; nothing was committed"
        with pytest.raises(ConsumerUnavailable, match=why):
            offsets(parts)
        with pytest.raises(InputCut, match="has not read its input to the end"):
            parts.require_whole()
        assert made.broken


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
    with (
        opened_at(outbox_kafka.bootstrap_servers, patience_seconds=1.0) as made,
        pytest.raises(ConsumerUnavailable, match="nothing-0"),
    ):
        offsets(made.range(("nothing", PART), span(0, 1)))


def test_large_messages_are_not_held_all_at_once(opened, outbox_kafka):
    topic = outbox_kafka.create_topic(outbox_kafka.name("large"))
    value = os.urandom(900_000)
    send(outbox_kafka.bootstrap_servers, topic, [value] * 200, **{"linger.ms": 0})
    process = psutil.Process()
    gc.collect()
    before = process.memory_info().rss
    most = count = 0
    for part in opened.range((topic, PART), span(0, 200)):
        assert all(one == value for one in part.values)
        count += len(part)
        most = max(most, process.memory_info().rss - before)
    assert count == 200
    # 180 MB are read. A part of 16 MiB, what librdkafka holds, and what the last fetch brought.
    assert most < 120_000_000
    with pytest.raises(TooMuch):
        opened.whole({(topic, PART): span(0, 200)}, {})
    assert opened.broken


def test_header_names_that_are_no_text(opened, outbox_kafka):
    """Kafka's names are strings, but a broker takes any bytes; one such message must not hold up the others."""
    topic = outbox_kafka.create_topic(outbox_kafka.name("names"))
    address = outbox_kafka.bootstrap_servers
    bad: list[Any] = [{b"\xff\xfe": b"x", b"ce_id": b"5"}, {b"ce_id": b"6", b"ce_id\xc3": b""}]
    fine = (b"k", b"fine", {b"ce_id": b"0"})
    # Often enough for Python to have optimised what is done with each of them.
    pairs = [((b"k", b"%d" % number, bad[number % 2]), fine) for number in range(200)]
    produce(address, topic, PART, [one for pair in pairs for one in pair])
    (part,) = opened.range((topic, PART), span(0, 400))
    assert part.values == [value for number in range(200) for value in (b"%d" % number, b"fine")]
    shown: list[Any] = [[("\\xff\\xfe", b"x"), ("ce_id", b"5")], [("ce_id", b"6"), ("ce_id\\xc3", b"")]]
    assert part.headers == [one for bad in shown * 100 for one in (bad, [("ce_id", b"0")])]
    assert [one.raw_names for one in part.headers[::2]] == [{0: b"\xff\xfe"}, {1: b"ce_id\xc3"}] * 100
    # Whatever the job's types and strategy are: what nobody can know the type of is not left out without a word.
    for types, ids, count in ((None, "headers", 400), (("order",), "headers", 200), (("order",), "content", 200)):
        taken = task_decoder(types, ids)
        (rows,) = taken.decoding([part])
        problems = [one for one in rows.column(PROBLEM).to_pylist() if one == "the name of a header is not UTF-8"]
        assert (rows.num_rows, len(problems)) == (count, 200)
        assert len(taken.incoming.chosen(part)) == count
        # And so it is when it is tried again, from what its letter has.
        letters = taken.incoming.letters(part, partial(RejectedRecord, reason="failed", error="x"))[::2]
        noon = dt.datetime(2026, 3, 4, 12, tzinfo=dt.UTC)
        again = [
            RetryRecord(1, one.record.place, one.key, one.value, orjson.loads(one.headers), noon, "undecodable", False)
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


def test_a_process_keeps_one_reader_and_none_that_is_unfinished(full):
    servers, topic = full
    # Groups of its own: rounds that other tests ran by hand in this process have left their readers.
    one, two = (f"kept-{uuid.uuid4()}" for _ in range(2))
    given = replace(settings(servers), group=one)
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
    with reader.kept(ReaderSettings({"bootstrap.servers": servers, "client.id": "x"}, one)) as other:
        assert other is not third
    with pytest.raises(ZeroDivisionError), reader.kept(given):
        raise ZeroDivisionError
    with reader.kept(given) as last:
        assert last is not third
    with reader.kept(ReaderSettings({"bootstrap.servers": servers}, two)) as another:
        pass
    polled: list[RangeReader] = []
    with pytest.MonkeyPatch.context() as watched:
        watched.setattr(RangeReader, "poll", lambda kept: polled.append(kept))
        with reader.kept(ReaderSettings({"bootstrap.servers": servers}, two)):
            pass
    # What a group has left in this process is not forgotten.
    assert last in polled
    reader.close_kept(one)
    with reader.kept(ReaderSettings({"bootstrap.servers": servers}, two)) as again:
        assert again is another
    reader.close_kept(two)
    assert not {group for _, group, _ in reader._KEPT} & {one, two}


def test_options_that_would_break_the_promise_are_refused_and_none_is_shown():
    for name in reader._OURS:
        with pytest.raises(JobError, match=f"kafka option '{name}' is set by the consumer itself"):
            ReaderSettings({name: "x"}, "g").librdkafka()
    with pytest.raises(JobError, match="no such"):
        RangeReader(ReaderSettings({"no such": "x"}, "g"))
    assert "secret" not in repr(ReaderSettings({"sasl.password": "secret"}, "g"))
