"""What of an outbox's state a person should look at."""

from __future__ import annotations

import datetime as dt
from dataclasses import replace

import pytest

from relay.core.pauses import ALL, Paused, Scope, ScopeKind
from relay.insights import LaneState, OutboxState, RelayState
from relay.page.page import _linked

NOW = dt.datetime(2026, 1, 31, 12, tzinfo=dt.UTC)
LANE = LaneState(0, "a", "polling", False, 1, None, None, 9.0, 3, 4_000.0)
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
    assert STATE.problems() == ["the oldest event has waited for 4000 s (lane 0)"]
    assert replace(STATE, oldest_seconds=1.0).problems() == []


def test_a_key_that_waits_for_a_dead_letter_which_is_gone():
    """Somebody has deleted the row: nothing brings it back, so the later events of its key wait for ever."""
    assert replace(STATE, blocking=1).problems() == [
        "1 key blocked by deleted dead letters: `outbox dead-letters list`"
    ]


@pytest.mark.parametrize(
    ("scope", "options"),
    [(ALL, ""), (Scope(ScopeKind.LANE, "3"), " --lane 3"), (Scope(ScopeKind.TOPIC, "a-b"), " --topic a-b")],
)
def test_a_pause_is_ended_by_what_is_printed(scope, options):
    paused = replace(STATE, oldest_seconds=1.0, pauses=[Paused(1, scope, NOW, "me", None)])
    [said] = paused.problems()
    assert f"`outbox relay resume{options}` ends it" in said
    linked = str(_linked(said, "/base"))
    assert '<a href="/base/relays">resume</a> ends it' in linked


def test_a_command_is_linked_by_its_longest_name():
    assert 'href="/dead-letters#consumer-side"' in _linked("`outbox dead-letters list --side consumer`", "")
    assert 'href="/dead-letters#relay-side"' in _linked("`outbox dead-letters list --topic t`", "")
    assert _linked("`outbox relay resumed`", "") == "<code>outbox relay resumed</code>"


def test_relays_of_the_other_source_are_why_no_relay_holds_the_lanes():
    free = [replace(LANE, lane=lane, owner=None, lease_seconds=None, source="wal") for lane in range(4)]
    waiting = replace(STATE, lanes=free)
    said = (
        "the lanes are read from source wal, and a relay of source polling waits until that changes: run relays with "
        "OUTBOX_SOURCE=wal, or `outbox relay switch polling`"
    )
    assert waiting.problems() == [said]
    # Also while nothing waits yet: nothing would be published.
    assert replace(waiting, oldest_seconds=None, lanes=[replace(lane, events=0) for lane in free]).problems() == [said]
    # A relay of the lanes' source will take them.
    other = replace(STATE.relays[0], instance="b", source="wal")
    assert replace(waiting, relays=[*STATE.relays, other]).problems() == [
        "events wait in lanes 0, 1, 2, 3, which no relay holds"
    ]
    assert replace(waiting, relays=[*STATE.relays, replace(other, alive=False)]).problems() == [said]
