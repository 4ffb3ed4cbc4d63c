"""Partitions that are added wait for the others, and these for each other, whatever becomes of their logs meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from outbox.consumer.model import OffsetBounds, Partition, StoredOffset
from spark_jobs.driver.added_partitions import AddedPartitions
from spark_jobs.driver.planner import limited
from spark_jobs.postgres.group_store import AddedEnds

OLD, OTHER, NEW, NEXT = ("t", 0), ("t", 1), ("t", 2), ("t", 3)
Hidden = tuple[int, int]
"""Where a partition ends for a reader, and with what an open transaction hides."""
LEADERLESS = None


class Servers:
    """Kafka, and the store of a group."""

    def __init__(self, bounds: Mapping[Partition, OffsetBounds], noted: Mapping[Partition, AddedEnds]) -> None:
        self.bounds = bounds
        self.noted = dict(noted)
        self.leaderless: set[Partition] = set()

    def look(self, topics: Any, *, high_watermarks: bool, optional: Callable[[Partition], bool]) -> Any:
        assert high_watermarks
        assert all(map(optional, self.leaderless))
        return {"t": "id"}, self.bounds

    def added_ends(self, topic_ids: Any) -> Any:
        return self.noted

    def note_added(self, ends: Any, topic_ids: Any, generation: int) -> None:
        self.noted = dict(ends)


class Driver:
    """What a driver decides, look by look, from the ends of the partitions and the group's offsets."""

    def __init__(self, noted: Mapping[Partition, AddedEnds] | None = None) -> None:
        self.servers: Any = Servers({}, noted or {})
        self.reports: list[list[str]] = []
        self.added = AddedPartitions(
            self.servers, self.servers, ["t"], lambda _, figures: self.reports.append(figures["partitions"])
        )

    def look(self, ends: list[int | Hidden | None], offsets: list[int]) -> tuple[list[Partition], dict[Partition, int]]:
        tops = {("t", part): (end, end) if isinstance(end, int) else end for part, end in enumerate(ends)}
        self.servers.bounds = {one: OffsetBounds(0, *there) for one, there in tops.items() if there is not LEADERLESS}
        self.servers.leaderless = tops.keys() - self.servers.bounds.keys()
        stored = {("t", part): StoredOffset("id", offset) for part, offset in enumerate(offsets)}
        new = sorted(self.servers.bounds.keys() - stored.keys())
        return self.added.ready(new, stored, self.bounds(), {"t": "id"}, 1, self.servers.leaderless)

    def bounds(self) -> dict[Partition, OffsetBounds]:
        """What a look without high watermarks finds."""
        return {one: OffsetBounds(there.first, there.end) for one, there in self.servers.bounds.items()}

    def read(self, ends: list[int | Hidden | None], offsets: list[int]) -> list[int]:
        """Give the offsets after a round that reads as far as the look allows."""
        new, limits = self.look(ends, offsets)
        offsets = offsets + [0] * len(new)
        stored = {("t", part): StoredOffset("id", offset) for part, offset in enumerate(offsets)}
        there = limited(self.bounds(), limits, stored)
        return [there["t", part].end for part in range(len(offsets))]


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
    bounds = {OLD: now, NEW: OffsetBounds(0, 5, 5)}
    servers: Any = Servers(bounds, {NEW: AddedEnds({}, {OLD: 100})})
    added = AddedPartitions(servers, servers, ["t"], lambda *_: None)
    stored = {OLD: StoredOffset("id", next_offset)}
    fresh, limits = added.ready([NEW], stored, bounds, {"t": "id"}, 1)
    assert (fresh, OLD in limits) == (([NEW], False) if ready else ([], True))
    # Until then a driver has not caught up.
    assert (NEW in added.waiting) is not ready


def test_the_others_wait_for_each_other_as_soon_as_there_are_more():
    driver = Driver()
    assert driver.look([90, 10], [20, 10]) == ([], {})
    assert driver.look([100, 10, 0], [30, 10]) == ([], {OLD: 100, OTHER: 10})
    assert driver.reports == []
    # A key has moved from the first to the second; the added partition has nothing yet.
    assert driver.look([110, 12, 0], [99, 10]) == ([], {OLD: 100, OTHER: 10})
    assert driver.reports == [["t-1"]]
    # Another driver continues with the same ends.
    driver = Driver(driver.servers.noted)
    assert driver.look([120, 14, 0], [99, 10]) == ([], {OLD: 100, OTHER: 10})
    assert driver.look([120, 14, 0], [100, 10]) == ([], {})


def test_they_wait_again_when_the_added_one_has_messages():
    driver = Driver()
    driver.look([100, 10, 0], [100, 10])
    driver.look([300, 30, 0], [110, 30])
    # First up to what they had at the last look without, then up to what they have now; and then it is read itself.
    assert driver.look([310, 33, 1], [120, 30]) == ([], {OLD: 300, OTHER: 30})
    assert driver.reports == [["t-1", "t-2"]]
    driver = Driver(driver.servers.noted)
    assert driver.look([400, 40, 9], [299, 30]) == ([], {OLD: 300, OTHER: 30})
    assert driver.look([400, 40, 9], [300, 30]) == ([], {OLD: 310, OTHER: 33})
    assert driver.look([400, 40, 9], [310, 33]) == ([NEW], {})
    assert driver.look([400, 40, 9], [310, 33, 0]) == ([], {})


def test_ends_that_are_not_reached_are_not_replaced_by_later_ones():
    driver = Driver()
    driver.look([100, 10, 0], [20, 10])
    driver.look([200, 20, 0], [30, 10])
    assert driver.look([300, 30, 1], [40, 10]) == ([], {OLD: 100, OTHER: 10})
    assert driver.servers.noted == {NEW: AddedEnds({OLD: 100, OTHER: 10}, {OLD: 300, OTHER: 30})}


def test_an_added_partition_that_a_broker_does_not_list_is_waited_for_as_before():
    driver = Driver()
    driver.look([100, 10, 0], [20, 10])
    assert driver.look([200, 20], [30, 10]) == ([], {OLD: 100, OTHER: 10})


def test_one_that_had_messages_when_it_was_first_seen():
    """By a driver that has looked before, and by one that has not: it can't know which messages came before these."""
    driver = Driver()
    driver.look([100, 10], [20, 10])
    assert driver.look([120, 13, 1], [30, 10]) == ([], {OLD: 100, OTHER: 10})
    assert Driver().look([120, 13, 1], [30, 10]) == ([], {OLD: 120, OTHER: 13})


def test_one_that_gets_messages_while_another_has_no_leader():
    """It waits; the others go on to where the one without a leader may have had earlier messages of a key."""
    driver = Driver()
    driver.look([90, 10], [20, 5])
    driver.look([100, LEADERLESS], [20, 5])
    assert driver.look([110, LEADERLESS, 3], [30, 5]) == ([], {OLD: 100, OTHER: 10})
    assert driver.look([120, LEADERLESS, 3], [100, 5]) == ([], {OLD: 100, OTHER: 10})
    assert driver.reports == [["t-2"], ["t-0", "t-2"]]
    # Another driver continues with the same ends.
    driver = Driver(driver.servers.noted)
    assert driver.look([130, LEADERLESS, 3], [100, 5]) == ([], {OLD: 100, OTHER: 10})
    assert driver.look([140, 12, 4], [100, 5]) == ([], {OLD: 100, OTHER: 10})
    assert driver.look([150, 13, 4], [100, 10]) == ([], {OLD: 140, OTHER: 12})
    assert driver.look([150, 13, 4], [140, 12]) == ([NEW], {})


def test_one_that_is_added_without_a_leader():
    """What the others have by then is read at once; they go on without it, and it waits for what they have later."""
    driver = Driver()
    driver.look([90, 10], [20, 5])
    assert driver.look([100, 12, LEADERLESS], [30, 10]) == ([], {OLD: 100, OTHER: 12})
    driver = Driver(driver.servers.noted)
    assert driver.look([110, 15, LEADERLESS], [99, 12]) == ([], {OLD: 100, OTHER: 12})
    assert driver.look([120, 16, LEADERLESS], [100, 12]) == ([], {})
    assert driver.look([130, 18, 4], [110, 13]) == ([], {OLD: 120, OTHER: 16})
    assert driver.look([140, 19, 4], [120, 16]) == ([], {OLD: 130, OTHER: 18})
    assert driver.look([140, 19, 4], [130, 18]) == ([NEW], {})


def test_what_one_without_a_leader_has_is_not_known_to_a_driver_that_has_not_looked_before():
    driver = Driver()
    for end in (110, 120):
        assert driver.look([end, LEADERLESS, 3], [30, 5])[0] == []
    assert driver.look([130, 12, 4], [120, 5]) == ([], {OLD: 130, OTHER: 12})
    assert driver.look([130, 12, 4], [130, 12]) == ([NEW], {})


OPEN = (5, 10)


@pytest.mark.parametrize(
    "looks",
    [
        pytest.param([[5, 5, 0, 0], [OPEN, 5, 3, 0], [OPEN, 8, 3, 0], [OPEN, 9, 3, 1]], id="two are added"),
        pytest.param([[5, 5, 0], [OPEN, 5, 3], [OPEN, 8, 3, 0], [OPEN, 9, 3, 1]], id="more while one waits"),
        pytest.param([[5, 5, 0], [OPEN, 5, 3], [OPEN, 8, 3, 0], [OPEN, 9, 3, 0]], id="more, without messages"),
        # It grows again beyond the end that was noted first.
        pytest.param([[5, 5, 0, 0], [OPEN, 5, 3, 0], [(5, 7), 8, 3, 0], [(5, 7), 9, 3, 1]], id="a log that was cut"),
    ],
)
@pytest.mark.parametrize("restarted", [False, True])
def test_what_they_wait_for_does_not_make_the_others_wait_for_each_other_for_ever(looks, restarted):
    """The ends that two added partitions wait for are noted with and without what an open transaction hides."""
    driver, offsets = Driver(), [5, 5]
    for ends in looks:
        offsets = driver.read(ends, offsets)
    if restarted:
        driver = Driver(driver.servers.noted)
    ends = [12, *looks[-1][1:]]
    first = driver.read(ends, offsets)
    # What was hidden came before what the second one has got since.
    assert first[1] == 5
    rounds = [first]
    while len(rounds) < 10 and rounds[-1] != ends:
        rounds.append(driver.read(ends, rounds[-1]))
    assert rounds[-1][:3] == [12, 9, 3]
    assert rounds[-1][3:] == ([1] if ends[3] else [])


def test_a_log_that_was_cut_while_the_added_one_got_its_first_messages():
    driver = Driver()
    driver.look([5, 5, 0], [5, 5])
    driver.look([10, 8, 0], [5, 5])
    assert driver.look([6, 9, 1], [6, 8]) == ([], {OLD: 6, OTHER: 9})
    # It grows again.
    assert driver.look([7, 9, 1], [6, 8]) == ([], {OLD: 7, OTHER: 8})
    assert driver.look([7, 9, 1], [7, 8]) == ([], {OLD: 7, OTHER: 9})
    assert driver.look([7, 9, 1], [7, 9]) == ([NEW], {})


def test_a_group_that_stood_still_goes_on():
    """With ends that a driver has stored which did not keep them in one order."""
    stuck = {
        NEW: AddedEnds({OLD: 5, OTHER: 5}, {OLD: 10, OTHER: 5}),
        NEXT: AddedEnds({OLD: 5, OTHER: 8}, {OLD: 10, OTHER: 9}),
    }
    ends: list[int | Hidden | None] = [12, 9, 3, 1]
    driver, offsets = Driver(stuck), [5, 5]
    offsets = driver.read(ends, offsets)
    assert offsets == [10, 5]
    for _ in range(3):
        offsets = driver.read(ends, offsets)
    assert offsets == ends
