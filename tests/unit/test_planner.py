"""The planner: ranges or an error, from what is stored and what Kafka has."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_jobs.errors import DataLost, JobError, TopicRecreated
from spark_jobs.job import ConsumerJob, find_job
from spark_jobs.planner import Extent, Range, Stored, new_partitions, plan

ID = {"t": "id-1"}


def test_reads_from_the_stored_offset_to_the_end():
    stored = {("t", 0): Stored("id-1", 5), ("t", 1): Stored("id-1", 7)}
    extents = {("t", 0): Extent(0, 9), ("t", 1): Extent(3, 7)}
    assert plan(stored, extents, ID) == {("t", 0): Range("id-1", 5, 9)}


def test_a_new_partition_must_begin_at_0():
    assert new_partitions({("t", 0): Stored("id-1", 0)}, {("t", 0): Extent(4, 9), ("t", 1): Extent(0, 0)}) == [("t", 1)]
    with pytest.raises(DataLost, match="first 4 messages"):
        new_partitions({}, {("t", 0): Extent(4, 9)})


@pytest.mark.parametrize(
    ("here", "extent", "ids", "error", "shown"),
    [
        (Stored("id-1", 2), Extent(3, 9), ID, DataLost, "messages 2 to 2"),
        (Stored("id-1", 10), Extent(0, 9), ID, DataLost, "log ends at 9"),
        (Stored("id-1", 5), Extent(0, 3), {"t": "id-2"}, TopicRecreated, "id-2"),
        (Stored("id-1", 5), Extent(0, 99), {"t": "id-2"}, TopicRecreated, "id-2"),
        (Stored("id-1", 5), None, ID, TopicRecreated, "t-0"),
        (Stored("id-1", 5), Extent(0, 9), {}, TopicRecreated, "there is none"),
    ],
)
def test_what_does_not_fit_halts(here, extent, ids, error, shown):
    extents = {} if extent is None else {("t", 0): extent}
    with pytest.raises(error, match=shown):
        plan({("t", 0): here}, extents, ids)


@given(
    lengths=st.lists(st.integers(0, 50), min_size=1, max_size=8),
    starts=st.lists(st.integers(0, 1000), min_size=8, max_size=8),
    most=st.integers(1, 200),
)
def test_clipping_keeps_starts_wastes_nothing_and_starves_nobody(lengths, starts, most):
    stored = {("t", part): Stored("id-1", starts[part]) for part in range(len(lengths))}
    extents = {("t", part): Extent(0, starts[part] + length) for part, length in enumerate(lengths)}
    whole = plan(stored, extents, ID)
    clipped = plan(stored, extents, ID, most)
    assert set(clipped) == set(whole) == {("t", part) for part, length in enumerate(lengths) if length}
    for partition, span in clipped.items():
        assert span.start == whole[partition].start
        assert span.start < span.end <= whole[partition].end
    taken = sum(span.end - span.start for span in clipped.values())
    # At least one for each; beyond that never more than asked for, and all of it if there is so much.
    assert taken <= max(most, len(clipped))
    assert taken >= min(most, sum(lengths)) - len(clipped) or taken == sum(lengths)


@pytest.mark.parametrize(
    "changes",
    [
        {"group": ""},
        {"topics": "orders"},
        {"topics": []},
        {"topics": ["a", "a"]},
        {"topics": ["a b"]},
        {"effect": " "},
        {"effect": 5},
        {"schema": " "},
    ],
)
def test_a_job_that_can_not_work_is_refused(changes):
    with pytest.raises(JobError, match=next(iter(changes))):
        ConsumerJob(**{"group": "g", "topics": ["t"], "effect": "SELECT 1"} | changes)


def test_jobs_are_found_by_name():
    assert find_job("spark_jobs.order_totals:job").group == "order-totals"
    for spec in ("spark_jobs.order_totals", "nowhere:job", "spark_jobs.order_totals:ConsumerJob", ":job"):
        with pytest.raises(JobError, match=r"MODULE:NAME|no module|not a ConsumerJob"):
            find_job(spec)
