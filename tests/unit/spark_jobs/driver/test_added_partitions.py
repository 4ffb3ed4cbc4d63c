"""Until when a partition that is added waits for the others, whatever becomes of their logs meanwhile."""

from __future__ import annotations

from typing import Any

import pytest

from outbox.consumer.model import OffsetBounds, StoredOffset
from spark_jobs.driver.added_partitions import AddedPartitions

OLD, NEW = ("t", 0), ("t", 1)


class Servers:
    """Kafka, and the store of a group that has noted 100 as the end of the old partition."""

    def __init__(self, extents: dict[Any, OffsetBounds]) -> None:
        self.extents = extents

    def look(self, topics: Any, *, high_watermarks: bool) -> Any:
        assert high_watermarks
        return {"t": "id"}, self.extents

    def added_ends(self, topic_ids: Any) -> Any:
        return {NEW: {OLD: 100}}


@pytest.mark.parametrize(
    ("next_offset", "now", "ready"),
    [
        (100, OffsetBounds(0, 120, 120), True),
        (99, OffsetBounds(0, 120, 120), False),
        # The log was cut, and its loss accepted: it may never reach 100 again.
        (60, OffsetBounds(0, 60, 60), True),
        (59, OffsetBounds(0, 60, 60), False),
        # A transaction is open at 60: what follows is older than what the new partition has.
        (60, OffsetBounds(0, 60, 110), False),
    ],
)
def test_it_waits_for_what_the_others_had_and_still_have(next_offset, now, ready):
    extents = {OLD: now, NEW: OffsetBounds(0, 5, 5)}
    servers: Any = Servers(extents)
    added = AddedPartitions(servers, servers, ["t"], lambda *_: None)
    stored = {OLD: StoredOffset("id", next_offset)}
    assert added.ready([NEW], stored, extents, {"t": "id"}, 1) == ([NEW] if ready else [])
