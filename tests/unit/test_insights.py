"""What of an outbox's state a person should look at."""

from __future__ import annotations

import datetime as dt
from dataclasses import replace

from relay.insights import LaneState, OutboxState, RelayState

NOW = dt.datetime(2026, 1, 31, 12, tzinfo=dt.UTC)
LANE = LaneState(0, "a", "polling", False, 1, None, 9.0, 3, 4_000.0)
STATE = OutboxState(
    at=NOW,
    backlog=3,
    exact=True,
    counted=True,
    oldest_seconds=4_000.0,
    retrying=0,
    dead_letters=0,
    blocking=0,
    written=None,
    gone=None,
    lanes=[LANE],
    relays=[RelayState("a", "1", "polling", NOW, True, 0.1, (0,))],
    slot=None,
)


def test_old_events_that_nothing_explains():
    assert STATE.problems() == ["the oldest event has waited for 4000 s (lanes 0)"]
    assert replace(STATE, oldest_seconds=1.0).problems() == []


def test_a_key_that_waits_for_a_dead_letter_which_is_gone():
    """Somebody has deleted the row: nothing brings it back, so the later events of its key wait for ever."""
    assert replace(STATE, blocking=1).problems() == [
        "1 keys wait for dead letters that somebody has deleted: `outbox dead-letters list`"
    ]
    assert replace(STATE, blocking=1, dead_letters=2).problems() == [
        "2 dead letters, 1 of them hold back their keys: `outbox dead-letters list`"
    ]
