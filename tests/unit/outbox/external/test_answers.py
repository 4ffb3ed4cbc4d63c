"""What a user's function for a call gives or raises, as an answer that can be settled."""

from __future__ import annotations

import datetime as dt
import uuid
from typing import Any

import pytest

from outbox.external import Call, OutcomeUnknown, TryLater
from outbox.external.caller import _answer_of
from outbox.external.state_machine import ReservationState, Rules, settle

CALL = Call("k", "k", uuid.UUID(int=1), {}, 1, 1.0, "t", 0, 0)
RULES = Rules(max_attempts=3, can_ask=False, can_cancel=False, first_wait=1.0, longest_wait=60.0)


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        (None, None),
        (30, 30.0),
        ("30", 30.0),
        # As a header may be, and the guide does not say in what form it is wanted.
        ("Wed, 21 Oct 2026 07:28:00 GMT", None),
        ("", None),
        (dt.timedelta(seconds=30), None),
        ([30], None),
        (10**400, None),
    ],
)
@pytest.mark.parametrize("kind", [TryLater, OutcomeUnknown])
def test_any_retry_after_gives_a_pause(kind, given, seconds):
    def call(_: Call) -> Any:
        raise kind("busy", given)

    answer = _answer_of(call, CALL)
    assert answer.retry_after == seconds
    change = settle(ReservationState("calling", used=1), True, "call", answer, RULES, 0.0)
    assert change is not None
    assert (change.state, change.wait) == ("reserved", seconds or 0.5)
