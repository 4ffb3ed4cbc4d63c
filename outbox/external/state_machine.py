"""The transitions of a reservation: before a call, by its row; after it, by the answer. Pure functions.

Before a call:

| the row's state                                          | step                                                   |
|----------------------------------------------------------|--------------------------------------------------------|
| a response is known, only the SQL has failed             | confirm: no call                                       |
| to be cancelled, and the effect can't have happened      | close: no call                                         |
| to be cancelled                                          | cancel; stuck without a ``cancel``                     |
| the attempts are used up                                 | stuck                                                  |
| the effect may have happened, and there is an ``ask``    | ask, and call only if nothing is there                 |
| the effect may have happened, the key may be forgotten   | stuck: a call could have its effect twice              |
| otherwise                                                | call, with the same key                                |

After it:

| step         | done      | refused                                                         | later, unknown          |
|--------------|-----------|-----------------------------------------------------------------|-------------------------|
| call         | confirmed | no earlier attempt is open: cancelled; else cancelling, or      | reserved, with a pause; |
|              |           | stuck without a ``cancel``                                      | stuck at the last one   |
| ask          | confirmed | cancelled                                                       | the same                |
| cancel       | cancelled | stuck                                                           | cancelling; stuck       |

After ``later`` nothing has happened; ``unknown`` makes the row unsure. A row left in ``calling`` past its lease is
unsure too: its caller was killed or is slow. An answer of an attempt whose lease was taken over by another one counts
only if it is final: done confirms an open call, and completes a cancellation; an answer that contradicts a settled row
is stored as a conflict, for operators.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

from outbox._clients.backoff import doubled

State = Literal["reserved", "calling", "confirmed", "cancelling", "cancelled", "stuck"]
Step = Literal["call", "ask", "cancel", "confirm", "close", "stuck"]
CallOutcome = Literal["done", "refused", "later", "unknown"]

CALL_STEPS: Final[frozenset[Step]] = frozenset({"call", "ask", "confirm"})
"""The steps of a call. The others are those of its cancellation."""
DAY: Final = 86_400.0


@dataclass(frozen=True, slots=True)
class ReservationState:
    """The state of a row. ``used``: attempts begun since the budget was last renewed."""

    state: State
    unsure: bool = False
    taking_back: bool = False
    has_response: bool = False
    used: int = 0
    key_expired: bool = False

    @property
    def may_have_happened(self) -> bool:
        """Return whether the outcome of an attempt is unknown, as of one that left the row in ``calling``."""
        return self.unsure or self.state == "calling"


@dataclass(frozen=True, slots=True)
class Rules:
    """The declared limits and functions. Waits are in seconds."""

    max_attempts: int
    can_ask: bool
    can_cancel: bool
    first_wait: float
    longest_wait: float


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a step. ``retry_after`` is in seconds."""

    outcome: CallOutcome
    text: str = ""
    response: Any = None
    retry_after: float | None = None


@dataclass(frozen=True, slots=True)
class Transition:
    """The change of a row. ``wait``: seconds from now, None: unchanged. ``fresh_budget``: attempts count from 0."""

    state: State
    unsure: bool
    taking_back: bool
    error: str | None = None
    conflict: str | None = None
    wait: float | None = None
    fresh_budget: bool = False
    keep_response: bool = False


def first_step(row: ReservationState, rules: Rules) -> tuple[Step, str]:
    """Return the next step of a claimed row, and the reason if it is stuck."""
    spent = row.used >= rules.max_attempts
    if row.has_response and not row.taking_back:
        return ("stuck", "its SQL fails") if spent else ("confirm", "")
    if row.taking_back:
        if not row.unsure:
            return ("stuck", "its SQL fails") if spent else ("close", "")
        if not rules.can_cancel:
            return "stuck", "the effect may have happened, and no cancel is declared"
        if row.key_expired:
            return "stuck", "the provider may have forgotten the key of the cancellation"
        return ("stuck", "all attempts to cancel are used up") if spent else ("cancel", "")
    if spent:
        return "stuck", "all attempts are used up"
    if row.may_have_happened:
        if rules.can_ask:
            return "ask", ""
        if row.key_expired:
            return "stuck", "the effect may have happened, and the provider may have forgotten the key"
    return "call", ""


def settle(
    row: ReservationState, current: bool, step: Step, answer: Answer, rules: Rules, jitter: float
) -> Transition | None:
    """Return what an answer changes; None for nothing.

    row      its current state, which may have changed since the call.
    current  no other attempt has begun since.
    jitter   a random number from 0 to 1.
    """
    is_call = step in CALL_STEPS
    if row.state in {"confirmed", "cancelled"}:
        return _against(row, is_call, answer)
    if is_call and row.taking_back:
        # It was decided meanwhile to cancel the call. The cancellation will reverse the effect, if there is one.
        return None if row.unsure or answer.outcome in {"refused", "later"} else _same(row, unsure=True)
    if answer.outcome == "done":
        if is_call:
            return Transition("confirmed", unsure=False, taking_back=False)
        return Transition("cancelled", unsure=False, taking_back=True) if row.taking_back else None
    if not current:
        return None
    unsure = row.unsure or (answer.outcome == "unknown" and step == "call")
    if answer.outcome != "refused":
        return _retrying(row, unsure, answer, rules, jitter)
    if not is_call:
        return Transition("stuck", unsure, taking_back=True, error=f"the cancellation was refused: {answer.text}")
    if step == "ask" or not unsure:
        return Transition("cancelled", unsure=False, taking_back=True, error=answer.text)
    if rules.can_cancel:
        return Transition("cancelling", unsure=True, taking_back=True, error=answer.text, wait=0.0, fresh_budget=True)
    return Transition(
        "stuck",
        unsure=True,
        taking_back=False,
        error=f"refused, but an earlier attempt may have counted, and no cancel is declared: {answer.text}",
    )


def effect_failed(row: ReservationState, transition: Transition, error: str, rules: Rules, jitter: float) -> Transition:
    """Return the change after the provider is done and the SQL has failed.

    The answer is stored: only the SQL is tried again, without another call or cancellation. A change without SQL stays
    as it is: no more than its COMMIT can have failed.
    """
    if transition.conflict is not None or transition.state not in {"confirmed", "cancelled"}:
        return transition
    taking_back = transition.state == "cancelled"
    spent = row.used >= rules.max_attempts
    retrying: State = "cancelling" if taking_back else "reserved"
    return Transition(
        "stuck" if spent else retrying,
        unsure=not taking_back,
        taking_back=taking_back,
        error=error,
        wait=pause(row.used, None, rules, jitter),
        keep_response=not taking_back,
    )


def pause(used: int, retry_after: float | None, rules: Rules, jitter: float) -> float:
    """Return the seconds to the next attempt: doubled each time, no less than the provider asked for, at most a day."""
    backoff = doubled(used - 1, rules.first_wait, rules.longest_wait) * (0.5 + 0.5 * jitter)
    # Never less than the provider asked for, and not all calls at the same moment.
    asked = 0.0 if retry_after is None else retry_after * (1 + 0.1 * jitter)
    return min(max(backoff, asked), DAY)


def _retrying(row: ReservationState, unsure: bool, answer: Answer, rules: Rules, jitter: float) -> Transition:
    retrying: State = "cancelling" if row.taking_back else "reserved"
    return Transition(
        "stuck" if row.used >= rules.max_attempts else retrying,
        unsure,
        row.taking_back,
        error=answer.text,
        wait=pause(row.used, answer.retry_after, rules, jitter),
    )


def _same(row: ReservationState, *, unsure: bool | None = None, conflict: str | None = None) -> Transition:
    return Transition(
        row.state, row.unsure if unsure is None else unsure, row.taking_back, conflict=conflict, keep_response=True
    )


def _against(row: ReservationState, is_call: bool, answer: Answer) -> Transition | None:
    """Return an answer that contradicts a settled row as a conflict. The state stays, for an operator to decide."""
    if is_call and row.state == "cancelled" and answer.outcome == "done":
        return _same(row, conflict="the provider confirmed a call whose effect was cancelled")
    if is_call and row.state == "confirmed" and answer.outcome == "refused":
        return _same(row, conflict=f"the provider refused a call that it had confirmed: {answer.text}")
    if not is_call and row.state == "confirmed" and answer.outcome == "done":
        return _same(row, conflict="the provider cancelled a call that is confirmed")
    return None
