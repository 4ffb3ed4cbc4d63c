"""The pieces of a round: what comes first of its ranges, and what is left of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from outbox.consumer.model import Range, StoredOffset
from spark_jobs.driver.round_context import OffsetRanges


@given(lengths=st.lists(st.integers(1, 50), max_size=20), most=st.integers(1, 60))
def test_pieces_are_whole_beginnings_of_so_many_offsets_until_nothing_is_left(lengths, most):
    span = OffsetRanges({("t", part): Range("id", 10, 10 + length) for part, length in enumerate(lengths)}, {})
    stored = {partition: StoredOffset("id", one.start) for partition, one in span.ranges.items()}
    pieces = 0
    while (left := span.remaining(stored)).ranges:
        piece = left.first(most)
        assert sum(one.end - one.start for one in piece.ranges.values()) == min(
            most, sum(one.end - one.start for one in left.ranges.values())
        )
        for partition, one in piece.ranges.items():
            assert stored[partition].next_offset == one.start < one.end <= span.ranges[partition].end
            # As behind a marker.
            stored[partition] = StoredOffset("id", one.end + one.end % 2)
        pieces += 1
    assert pieces <= -(-sum(lengths) // most)


def test_a_partition_that_the_group_no_longer_has_is_left_whole():
    """Forgotten by an operator meanwhile: the next attempt is fenced, and says so."""
    span = OffsetRanges({("t", part): Range("id", 0, 9) for part in (0, 1)}, {})
    assert span.remaining({("t", 0): StoredOffset("id", 5)}).ranges == {
        ("t", 0): Range("id", 5, 9),
        ("t", 1): Range("id", 0, 9),
    }
