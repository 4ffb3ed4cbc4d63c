"""The planner: ranges or an error, from what is stored and what Kafka has."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outbox.consumer.errors import DataLost, JobError, TopicRecreated
from outbox.consumer.model import Loss, LossKind, OffsetBounds, Range, StoredOffset
from outbox.errors import ConfigurationError
from spark_jobs.driver.options import Options
from spark_jobs.driver.planner import (
    ENOUGH,
    FEW,
    common_limits,
    limited,
    new_partitions,
    next_turn,
    plan,
    unreached,
)
from spark_jobs.driver.runner import Runner
from spark_jobs.job import ConsumerJob, find_job

ID = {"t": "id-1"}


def test_one_error_names_everything_and_the_command():
    """Losses of known and of new partitions together; the recreated topic decides the kind of the error."""
    ids = {"t": "id-1", "u": "id-9"}
    stored = {("t", 0): StoredOffset("id-1", 2), ("t", 1): StoredOffset("id-1", 9), ("u", 0): StoredOffset("id-8", 1)}
    extents = {
        ("t", 0): OffsetBounds(3, 9),
        ("t", 1): OffsetBounds(0, 8),
        ("t", 2): OffsetBounds(4, 4),
        ("u", 0): OffsetBounds(0, 0),
    }
    with pytest.raises(TopicRecreated) as caught:
        new_partitions(stored, extents, ids, "billing")
    assert [(loss.topic, loss.part, loss.kind) for loss in caught.value.losses] == [
        ("t", 2, "retention"),
        ("t", 0, "retention"),
        ("t", 1, "cut"),
        ("u", 0, "recreated"),
    ]
    never_read = "t-2: the group has never read it and its first 4 messages are gone by retention"
    assert caught.value.losses[0] == Loss("t", 2, "id-1", 0, 4, LossKind.RETENTION, never_read)
    assert "and 1 partitions more" in str(caught.value)
    for topic in "tu":
        assert f"`outbox offsets reset billing --topic {topic} --to loss --reason …`" in str(caught.value)
    assert all(isinstance(error, DataLost) for error in (caught.value, DataLost("x")))


def test_a_partition_that_an_old_broker_does_not_name_is_for_later():
    stored = {("t", 0): StoredOffset("id-1", 2), ("t", 1): StoredOffset("id-1", 2)}
    assert plan(stored, {("t", 0): OffsetBounds(0, 3)}, ID, 100) == {("t", 0): Range("id-1", 2, 3)}


def test_what_waits_behind_an_open_transaction():
    assert OffsetBounds(0, 5).uncommitted is None
    assert OffsetBounds(0, 5, 9).uncommitted == 4
    # Asked for at two moments: the log may have been read further by the second.
    assert OffsetBounds(0, 9, 8).uncommitted == 0
    assert plan({("t", 0): StoredOffset("id-1", 5)}, {("t", 0): OffsetBounds(0, 5, 9)}, ID, 100) == {}


@given(
    nexts=st.lists(st.integers(0, 12), min_size=1, max_size=5),
    firsts=st.lists(st.integers(0, 6), min_size=5, max_size=5),
    lengths=st.lists(st.integers(0, 6), min_size=5, max_size=5),
    same=st.booleans(),
)
def test_a_plan_only_names_offsets_that_kafka_has(nexts, firsts, lengths, same):
    """Either an error with a loss for each partition that does not fit, or ranges within what is there."""
    stored = {("t", part): StoredOffset("id-1", at) for part, at in enumerate(nexts)}
    extents = {("t", part): OffsetBounds(firsts[part], firsts[part] + lengths[part]) for part in range(len(nexts))}
    ids = ID if same else {"t": "id-2"}
    unfit = {p for p, here in stored.items() if not same or not extents[p].first <= here.next_offset <= extents[p].end}
    if unfit:
        with pytest.raises(DataLost) as caught:
            plan(stored, extents, ids, 100)
        assert {(loss.topic, loss.part) for loss in caught.value.losses} == unfit
        return
    for partition, span in plan(stored, extents, ids, 100).items():
        assert span.start == stored[partition].next_offset < span.end == extents[partition].end


@given(
    lengths=st.lists(st.integers(0, 50), min_size=1, max_size=8),
    starts=st.lists(st.integers(0, 1000), min_size=8, max_size=8),
    most=st.integers(1, 200),
)
def test_clipping_keeps_starts_wastes_nothing_and_starves_nobody(lengths, starts, most):
    stored = {("t", part): StoredOffset("id-1", starts[part]) for part in range(len(lengths))}
    extents = {("t", part): OffsetBounds(0, starts[part] + length) for part, length in enumerate(lengths)}
    whole = plan(stored, extents, ID, sum(lengths) + 1)
    clipped = plan(stored, extents, ID, most)
    assert set(clipped) == set(whole) == {("t", part) for part, length in enumerate(lengths) if length}
    for partition, span in clipped.items():
        assert span.start == whole[partition].start
        assert span.start < span.end <= whole[partition].end
    taken = sum(span.end - span.start for span in clipped.values())
    # At least one for each; beyond that never more than asked for, and all of it if there is so much.
    assert taken <= max(most, len(clipped))
    assert taken >= min(most, sum(lengths)) - len(clipped) or taken == sum(lengths)


def clipped(waiting, most, **more):
    """Plan a round of partitions that wait with so many messages: how many are read of each."""
    stored = dict.fromkeys(waiting, StoredOffset("id-1", 0))
    extents = {partition: OffsetBounds(0, length) for partition, length in waiting.items()}
    ids = {topic: "id-1" for topic, _ in waiting}
    return {partition: span.end for partition, span in plan(stored, extents, ids, most, **more).items()}


def test_a_round_over_many_partitions_reads_few_of_them_with_enough_of_each():
    """A task and a transaction for each 200 messages cost more than the messages."""
    waiting = {("t", part): 1_000_000 for part in range(1000)}
    assert clipped(waiting, 200_000) == {("t", part): ENOUGH for part in range(200_000 // ENOUGH)}
    # Short ones are read whole, however many there are: each needs one transaction, be it in this round or in another.
    short = {("t", part): 150 for part in range(1000)}
    assert clipped(short, 200_000) == short
    # What they leave over is for the long ones.
    assert clipped(short | {("t", 500): 10**9}, 200_000) == short | {("t", 500): 200_000 - 999 * 150}


def test_the_next_round_goes_on_where_the_last_one_ended():
    waiting = {("t", part): 1_000_000 for part in range(100)}
    turn = ()
    for first in (0, 40, 80, 120):
        ranges = clipped(waiting, 200_000, turn=turn)
        assert set(ranges) == {("t", part % 100) for part in range(first, first + 40)}
        turn = next_turn(turn, ranges)
    # A partition that nobody has read yet comes before all of them.
    assert ("u", 0) in clipped(waiting | {("u", 0): 1}, 200_000, turn=turn)


def test_a_round_of_large_messages_is_clipped_by_their_bytes():
    waiting = {(topic, part): 1_000_000 for topic in ("big", "small") for part in range(50)}
    ranges = clipped(waiting, 200_000, row_bytes={"big": 100_000}, max_bytes=200_000_000)
    rows = {topic: sum(read for (of, _), read in ranges.items() if of == topic) for topic in ("big", "small")}
    assert 0 < rows["big"] * 100_000 <= 200_000_000
    assert rows["big"] + rows["small"] <= 200_000
    # One message that is larger than a round is read all the same, alone.
    assert clipped(waiting, 200_000, row_bytes={"big": 10**9}, max_bytes=10**8) == {("big", 0): 1}


@settings(deadline=None)
@given(
    waiting=st.lists(st.integers(0, 30_000), min_size=1, max_size=120),
    grows=st.sets(st.integers(0, 119), max_size=10),
    restarts=st.sets(st.integers(0, 40)),
    most=st.one_of(st.integers(1, 300), st.integers(1, 300_000)),
)
def test_every_partition_that_waits_is_read_within_a_rotation(waiting, grows, restarts, most):
    """Beside partitions that grow faster than they are read, and drivers that die after any round."""
    left = {("t", part): length for part, length in enumerate(waiting)}
    hot = {partition for partition in left if partition[1] in grows}
    offsets = dict.fromkeys(left, 0)
    moved = dict.fromkeys(left, 0)
    turn = sorted(moved, key=moved.__getitem__)
    bound = math.ceil(len(left) / max(min(FEW, most), most // ENOUGH))
    waits_since = {partition: 1 for partition, length in left.items() if length}
    for number in range(1, 2 * bound + 2):
        stored = {partition: StoredOffset("id-1", at) for partition, at in offsets.items()}
        extents = {partition: OffsetBounds(0, offsets[partition] + length) for partition, length in left.items()}
        few = sum(map(bool, left.values())) <= FEW
        ranges = plan(stored, extents, ID, most, turn=turn)
        assert bool(ranges) == any(left.values())
        taken = {partition: span.end - span.start for partition, span in ranges.items()}
        for partition, count in taken.items():
            assert 0 < count <= left[partition]
            assert number - waits_since.pop(partition) < bound
            offsets[partition] += count
            left[partition] -= count
            moved[partition] = number
        # Where few wait each of them has one at least, even if that is more.
        assert sum(taken.values()) <= (max(most, len(taken)) if few else most)
        # All that there is, or more than a round less the share of one partition.
        assert not any(left.values()) or sum(taken.values()) > most - max(1, min(ENOUGH, most // FEW))
        for partition in hot:
            left[partition] += most + 1
        for partition, length in left.items():
            if length:
                waits_since.setdefault(partition, number + 1)
        # A new driver knows what is stored, and no more.
        turn = sorted(moved, key=moved.__getitem__) if number in restarts else next_turn(turn, ranges)
    assert all(number - since < bound for since in waits_since.values())


def test_jobs_are_found_by_name():
    assert find_job("spark_jobs.order_totals:job").group == "order-totals"
    for spec in ("spark_jobs.order_totals", "nowhere:job", "spark_jobs.order_totals:ConsumerJob", ":job"):
        with pytest.raises(ConfigurationError, match=r"MODULE:NAME|no module|not a ConsumerJob"):
            find_job(spec)
    with pytest.raises(ConfigurationError, match=r"no 'jobs' in spark_jobs\.order_totals; its ConsumerJobs: job$"):
        find_job("spark_jobs.order_totals:jobs")
    with pytest.raises(ConfigurationError, match=r"there is no 'job' in json; it has no ConsumerJob at all$"):
        find_job("json:job")


def test_ends_are_unreached_while_a_partition_of_the_group_is_before_its_own():
    stored = {("t", 0): StoredOffset("id", 5), ("t", 1): StoredOffset("id", 9), ("u", 0): StoredOffset("id", 3)}
    ends = {("t", 0): 6, ("t", 1): 9}
    assert unreached(ends, stored)
    assert not unreached({("u", 0): 3}, stored)
    assert not unreached({}, stored)
    assert not unreached(ends, stored | {("t", 0): StoredOffset("id", 6)})
    assert not unreached(ends, {})


def test_partitions_are_read_to_the_lowest_ends_that_not_all_have_reached():
    first, second = {("t", 0): 6, ("t", 1): 9}, {("t", 0): 8, ("t", 1): 9, ("t", 2): 1}
    bounds = {("t", part): OffsetBounds(0, 20) for part in range(3)}

    def ends(*offsets: int) -> list[int]:
        stored = {("t", part): StoredOffset("id", offset) for part, offset in enumerate(offsets)}
        return [there.end for there in limited(bounds, common_limits([second, first], stored), stored).values()]

    assert ends(5, 9) == [6, 9, 1]
    assert ends(6, 9) == [8, 9, 1]
    # An offset may be beyond such an end, but no end before the offset.
    assert ends(7, 12, 0) == [8, 12, 1]
    assert ends(8, 12, 0) == [8, 12, 1]
    assert ends(8, 12, 2) == [20, 20, 20]


def test_a_consumer_of_no_topic_is_refused():
    """Only a job for exactly_once reads none: there the stream is what is read."""
    job = ConsumerJob("group", [], schema="n int", effect="SELECT 1")
    with pytest.raises(JobError, match="topics: the job group names none"):
        Runner(None, job, Options("postgresql://nowhere", {"bootstrap.servers": "nowhere:1"}), lambda *_: None)
