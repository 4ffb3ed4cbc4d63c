"""Behind which event of its key one comes that an operator has put back: as if each pair had been compared."""

from __future__ import annotations

from typing import Any, NamedTuple
from uuid import UUID

from hypothesis import given, settings
from hypothesis import strategies as st

from relay.audit.retried import behind

_FEW = st.integers(0, 8)


class _Event(NamedTuple):
    key: int
    created_at: int
    partition: int
    offset: int
    retried_at: int | None


_EVENTS = st.lists(st.builds(_Event, st.integers(1, 2), _FEW, st.integers(0, 1), _FEW, st.none() | _FEW), max_size=16)


@settings(deadline=None, max_examples=200)
@given(_EVENTS)
def test_it_comes_behind_the_last_that_was_written_by_then_and_stands_before_it(events: list[_Event]) -> None:
    """An event's id is its number. Times and offsets may be the same."""
    rows: list[tuple[Any, ...]] = []
    expected: dict[UUID, int] = {}
    for id_, one in enumerate(events):
        rows.append((one.key, one.created_at, True, id_, None, one.partition, one.offset))
        if one.retried_at is None:
            continue
        rows.append((one.key, one.retried_at, False, id_, UUID(int=id_), one.partition, one.offset))
        later = [
            number
            for number, other in enumerate(events[id_ + 1 :], id_ + 1)
            if other.key == one.key
            and other.created_at < one.retried_at
            and (other.partition != one.partition or other.offset < one.offset)
        ]
        if later:
            expected[UUID(int=id_)] = later[-1]
    rows.sort(key=lambda row: row[:3])
    assert behind((key, *row) for key, _, _, *row in rows) == expected
