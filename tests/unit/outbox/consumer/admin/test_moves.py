"""What moving a group by hand means, before anything is written."""

from __future__ import annotations

import pytest

from outbox.consumer.admin.moves import after_losses, move
from outbox.consumer.model import OffsetBounds, StoredOffset


@pytest.mark.parametrize(
    ("stored", "after", "skipped", "again"),
    [
        (StoredOffset("id", 5), 5, None, 0),
        (StoredOffset("id", 5), 4, None, 1),
        (StoredOffset("id", 5), 8, (5, 8), 0),
        # What retention took is not skipped: it is lost already.
        (StoredOffset("id", 1), 3, None, 0),
        (StoredOffset("id", 1), 4, (3, 4), 0),
        (StoredOffset("id", 99), 9, None, 90),
        (StoredOffset("older", 5), 3, None, 0),
        (StoredOffset("older", 5), 9, (3, 9), 0),
        (None, 3, None, 0),
        (None, 9, (3, 9), 0),
    ],
)
def test_what_a_move_means(stored, after, skipped, again):
    one = move(0, stored, OffsetBounds(3, 9), "id", after)
    assert (one.skipped, one.again) == (skipped, again)
    assert one.changes == (stored != StoredOffset("id", after))


@pytest.mark.parametrize(
    ("stored", "losses", "after"),
    [
        (StoredOffset("id", 5), [], 5),
        (StoredOffset("id", 1), [("retention", 1)], 3),
        (StoredOffset("id", 1), [], 3),
        # The record is older than what somebody did about it.
        (StoredOffset("id", 7), [("retention", 1)], 7),
        (StoredOffset("id", 12), [("cut", 6)], 6),
        (StoredOffset("id", 12), [], 9),
        (StoredOffset("id", 12), [("cut", 1)], 3),
        (StoredOffset("id", 12), [("cut", 8), ("retention", 1)], 8),
        (StoredOffset("older", 12), [("recreated", 12)], 3),
        (None, [("retention", 0)], 3),
    ],
)
def test_the_nearest_place_from_which_a_group_can_go_on(stored, losses, after):
    assert after_losses(stored, OffsetBounds(3, 9), "id", losses) == after
    assert after_losses(None, OffsetBounds(0, 9), "id", []) is None
