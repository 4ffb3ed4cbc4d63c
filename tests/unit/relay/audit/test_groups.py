"""What a group has given up, of which there may be a range for each message."""

from __future__ import annotations

from typing import Any, SupportsIndex

import pytest

from relay.audit.groups import Group, given_up
from relay.audit.topics import Cell, OnKafka
from relay.kafka.offsets import Partition

PLACE = Partition("orders", 0)
RANGES = 10_000


class Looked(list[range]):
    """Counts how many of its ranges are looked at."""

    looks = 0

    def __getitem__(self, number: SupportsIndex | slice) -> Any:
        self.looks += 1
        return super().__getitem__(number)

    def __iter__(self) -> Any:
        for number in range(len(self)):
            yield self[number]


@pytest.fixture
def ranges() -> Looked:
    """Every other offset."""
    return Looked(range(n, n + 1) for n in range(0, 2 * RANGES, 2))


@pytest.mark.parametrize("offset", [0, 1, RANGES, RANGES + 1, 2 * RANGES - 2, 2 * RANGES + 5])
def test_a_message_that_was_given_up_is_found_without_a_look_at_all_of_them(ranges, offset):
    group = Group("g", True, None, given_up={PLACE: ranges})
    lost = group.gave_up([OnKafka(PLACE, offset, b"", 0)])
    assert (lost is not None) == (offset % 2 == 0 and offset < 2 * RANGES)
    assert ranges.looks < 40


def test_those_of_a_minute_are_found_without_a_look_at_all_of_them(ranges):
    group, cell = Group("g", True, None, given_up={PLACE: ranges}), Cell(1001)
    cell.last = 1006
    found = [text for _, _, text in given_up([group], {(PLACE, 7): cell})]
    assert [text.partition(" (")[0] for text in found] == [
        f"the group has given up partition 0 offset {offset}" for offset in (1002, 1004, 1006)
    ]
    assert ranges.looks < 40
