"""The decisions about effects outside the database: each of them, and all together against a provider."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from outbox.external.state_machine import (
    DAY,
    Answer,
    ReservationState,
    Rules,
    Step,
    Transition,
    effect_failed,
    first_step,
    pause,
    settle,
)

RULES = Rules(max_attempts=3, can_ask=False, can_cancel=True, first_wait=1.0, longest_wait=60.0)
PLAIN = dataclasses.replace(RULES, can_cancel=False)
ASKING = dataclasses.replace(RULES, can_ask=True)
OPEN, UNSURE = ReservationState("calling", used=1), ReservationState("calling", unsure=True, used=2)
SELDOM = st.sampled_from([False, False, False, True])
BACK = ReservationState("cancelling", unsure=True, taking_back=True, used=1)


@pytest.mark.parametrize(
    ("row", "rules", "step"),
    [
        (ReservationState("reserved"), RULES, "call"),
        (ReservationState("reserved", used=3), RULES, "stuck"),
        (ReservationState("reserved", key_expired=True), RULES, "call"),
        (ReservationState("reserved", unsure=True), RULES, "call"),
        (ReservationState("reserved", unsure=True, key_expired=True), RULES, "stuck"),
        (ReservationState("calling", key_expired=True), RULES, "stuck"),
        (ReservationState("calling"), RULES, "call"),
        (ReservationState("calling"), ASKING, "ask"),
        (ReservationState("reserved", unsure=True, key_expired=True), ASKING, "ask"),
        (ReservationState("reserved"), ASKING, "call"),
        (ReservationState("reserved", unsure=True, has_response=True, key_expired=True), RULES, "confirm"),
        (ReservationState("reserved", has_response=True, used=3), RULES, "stuck"),
        (ReservationState("cancelling", taking_back=True), PLAIN, "close"),
        (ReservationState("cancelling", taking_back=True, used=3), RULES, "stuck"),
        (ReservationState("cancelling", unsure=True, taking_back=True), RULES, "cancel"),
        (ReservationState("cancelling", unsure=True, taking_back=True), PLAIN, "stuck"),
        (ReservationState("cancelling", unsure=True, taking_back=True, key_expired=True), RULES, "stuck"),
        (ReservationState("cancelling", unsure=True, taking_back=True, used=3), RULES, "stuck"),
    ],
)
def test_the_step_before_a_call(row, rules, step):
    assert first_step(row, rules)[0] == step


@pytest.mark.parametrize(
    ("row", "step", "outcome", "rules", "state", "unsure"),
    [
        (OPEN, "call", "done", RULES, "confirmed", False),
        (UNSURE, "ask", "done", RULES, "confirmed", False),
        (OPEN, "call", "refused", PLAIN, "cancelled", False),
        (UNSURE, "call", "refused", RULES, "cancelling", True),
        (UNSURE, "call", "refused", PLAIN, "stuck", True),
        (UNSURE, "ask", "refused", PLAIN, "cancelled", False),
        (OPEN, "call", "later", RULES, "reserved", False),
        (UNSURE, "call", "later", RULES, "reserved", True),
        (OPEN, "call", "unknown", RULES, "reserved", True),
        (ReservationState("calling", used=3), "call", "unknown", RULES, "stuck", True),
        (ReservationState("calling", used=3), "call", "later", RULES, "stuck", False),
        (BACK, "cancel", "done", RULES, "cancelled", False),
        (BACK, "cancel", "refused", RULES, "stuck", True),
        (BACK, "cancel", "unknown", RULES, "cancelling", True),
        (dataclasses.replace(BACK, used=3), "cancel", "later", RULES, "stuck", True),
    ],
)
def test_what_follows_from_an_answer(row, step, outcome, rules, state, unsure):
    change = settle(row, True, step, Answer(outcome, "text"), rules, 0.5)
    assert change is not None
    assert (change.state, change.unsure) == (state, unsure)


@pytest.mark.parametrize(
    ("row", "step", "outcome", "state", "conflict"),
    [
        (OPEN, "call", "done", "confirmed", False),
        (ReservationState("stuck", unsure=True), "call", "done", "confirmed", False),
        (ReservationState("stuck", unsure=True, taking_back=True), "cancel", "done", "cancelled", False),
        (OPEN, "call", "refused", None, False),
        (OPEN, "call", "unknown", None, False),
        (BACK, "call", "done", None, False),
        (ReservationState("cancelling", taking_back=True), "call", "unknown", "cancelling", False),
        (ReservationState("confirmed"), "call", "done", None, False),
        (ReservationState("confirmed"), "call", "refused", "confirmed", True),
        (ReservationState("cancelled", taking_back=True), "call", "done", "cancelled", True),
        (ReservationState("cancelled", taking_back=True), "cancel", "done", None, False),
        (ReservationState("confirmed"), "cancel", "done", "confirmed", True),
    ],
)
def test_what_follows_from_a_late_answer(row, step, outcome, state, conflict):
    change = settle(row, False, step, Answer(outcome, "text"), RULES, 0.5)
    assert (None if change is None else change.state) == state
    assert (change is not None and change.conflict is not None) == conflict


@pytest.mark.parametrize(
    ("row", "step", "answer"),
    [
        (BACK, "cancel", Answer("unknown", "timeout")),
        (BACK, "cancel", Answer("refused", "no")),
        (UNSURE, "call", Answer("refused", "no")),
        (OPEN, "call", Answer("later", "busy", retry_after=9.0)),
        (ReservationState("cancelled", taking_back=True), "call", Answer("done")),
    ],
)
def test_a_change_without_sql_is_the_same_when_its_commit_fails(row, step, answer):
    change = settle(row, True, step, answer, RULES, 0.5)
    assert change is not None
    assert effect_failed(row, change, "the connection is lost", RULES, 0.5) == change


@given(st.integers(1, 1000), st.none() | st.floats(0, 1e9), st.floats(0, 1))
def test_a_pause_is_bounded_and_keeps_what_was_asked_for(used, retry_after, jitter):
    seconds = pause(used, retry_after, RULES, jitter)
    assert 0 < seconds <= DAY
    assert seconds >= min(retry_after or 0.0, DAY)
    if retry_after is None:
        assert seconds <= RULES.longest_wait
    assert pause(4, None, RULES, 1.0) == 8.0


@dataclass
class Provider:
    """Keeps one outcome for a key, and a cancellation for good. Refuses by whim what it has not done."""

    done: bool = False
    barred: bool = False
    effects: int = 0

    def charge(self, willing: bool) -> str:
        if self.barred:
            return "refused"
        if not self.done and willing:
            self.done = True
            self.effects += 1
        return "done" if self.done else "refused"

    def cancel(self) -> str:
        self.barred = True
        return "done"


@dataclass
class Attempt:
    number: int
    step: Step
    answer: Answer | None = None
    killed: bool = False


@dataclass
class Row:
    state: str = "reserved"
    unsure: bool = False
    taking_back: bool = False
    has_response: bool = False
    attempts: int = 0
    budget_from: int = 0
    conflict: bool = False
    open: list[Attempt] = field(default_factory=list)

    def reservation(self) -> ReservationState:
        return ReservationState(
            self.state, self.unsure, self.taking_back, self.has_response, self.attempts - self.budget_from
        )


class Together(RuleBasedStateMachine):
    """Callers that claim, are killed and are late; a provider that answers, drops answers, and is late too."""

    @initialize(cancel=st.booleans(), ask=st.booleans())
    def begin(self, cancel, ask):
        self.anew(cancel, ask)

    @precondition(lambda self: self.settled and not self.row.open)
    @rule(cancel=st.booleans(), ask=st.booleans())
    def next_message(self, cancel, ask):
        self.anew(cancel, ask)

    def anew(self, cancel, ask):
        self.rules = dataclasses.replace(RULES, can_cancel=cancel, can_ask=ask)
        self.row, self.provider = Row(), Provider()
        self.settled: list[str] = []

    def unanswered(self) -> list[Attempt]:
        return [attempt for attempt in self.row.open if attempt.answer is None]

    def answered(self) -> list[Attempt]:
        return [attempt for attempt in self.row.open if attempt.answer is not None]

    @precondition(lambda self: self.row.state in {"reserved", "calling", "cancelling"})
    @rule()
    def claim(self):
        """Whenever the lease is over, which may be at any time."""
        row = self.row
        step, _ = first_step(row.reservation(), self.rules)
        row.unsure = row.reservation().may_have_happened
        if step == "stuck":
            row.state = "stuck"
            return
        row.attempts += 1
        row.state = "cancelling" if row.taking_back else "calling"
        attempt = Attempt(row.attempts, step)
        if step in {"confirm", "close"}:
            attempt.answer = Answer("done")
        row.open.append(attempt)

    @precondition(lambda self: self.unanswered())
    @rule(data=st.data(), willing=st.booleans(), lost=SELDOM, at_once=st.booleans())
    def send(self, data, willing, lost, at_once):
        """A request arrives, now or long after its lease; its answer comes back, now or later, or is lost."""
        attempt = data.draw(st.sampled_from(self.unanswered()))
        if attempt.step == "cancel":
            outcome = self.provider.cancel()
        elif attempt.step == "ask" and (self.provider.done or self.provider.barred):
            outcome = "refused" if self.provider.barred else "done"
        else:
            attempt.step = "call"
            outcome = self.provider.charge(willing)
        attempt.answer = Answer("unknown" if lost else outcome)
        if at_once:
            self.take(attempt, sql_fails=False)

    @precondition(lambda self: self.unanswered())
    @rule(data=st.data())
    def nothing_is_sent(self, data):
        data.draw(st.sampled_from(self.unanswered())).answer = Answer("later")

    @precondition(lambda self: self.answered())
    @rule(data=st.data(), sql_fails=SELDOM)
    def deliver(self, data, sql_fails):
        self.take(data.draw(st.sampled_from(self.answered())), sql_fails)

    def take(self, attempt, sql_fails):
        self.row.open.remove(attempt)
        if attempt.killed:
            return
        row = self.row
        current = row.attempts == attempt.number and row.state in {"calling", "cancelling"}
        assert attempt.answer is not None
        change = settle(row.reservation(), current, attempt.step, attempt.answer, self.rules, 0.5)
        if change is None:
            return
        if sql_fails:
            # Or the COMMIT, which every change has.
            change = effect_failed(row.reservation(), change, "sql", self.rules, 0.5)
        if change.state in {"confirmed", "cancelled"} and not change.conflict:
            self.settled.append(change.state)
        self.write(change, attempt)

    def write(self, change: Transition, attempt: Attempt) -> None:
        row = self.row
        learnt = attempt.answer is not None and attempt.answer.outcome == "done" and attempt.step != "cancel"
        row.has_response = (learnt and not change.taking_back) or (row.has_response and change.keep_response)
        row.state, row.unsure, row.taking_back = change.state, change.unsure, change.taking_back
        row.conflict = row.conflict or change.conflict is not None
        if change.fresh_budget:
            row.budget_from = row.attempts

    @precondition(lambda self: self.row.open)
    @rule(data=st.data())
    def killed(self, data):
        """A caller dies: its request may still be under way, its answer goes nowhere."""
        data.draw(st.sampled_from(self.row.open)).killed = True

    @precondition(lambda self: self.row.state in {"reserved", "stuck"})
    @rule(cancel=st.booleans(), asked=st.booleans())
    def by_hand(self, cancel, asked):
        """``asked``: the operator looks up the key of the row's call or cancellation, and says if nothing is there."""
        row, provider = self.row, self.provider
        if cancel and row.state in {"reserved", "stuck"} and not row.taking_back:
            row.unsure = row.unsure or row.has_response
            row.state, row.taking_back, row.has_response = "cancelling", True, False
        elif row.state == "stuck":
            nothing = not provider.barred if row.taking_back else not (provider.done or row.open)
            if asked and nothing:
                row.unsure = row.unsure and row.taking_back
            row.state = "cancelling" if row.taking_back else "reserved"
        else:
            return
        row.budget_from = row.attempts

    @invariant()
    def the_effect_counts_once_and_the_row_tells_the_truth(self):
        if not hasattr(self, "row"):
            return
        row, provider = self.row, self.provider
        standing = provider.done and not provider.barred
        assert provider.effects <= 1
        assert self.settled in ([], ["confirmed"], ["cancelled"])
        if row.state == "confirmed":
            assert standing
        if row.state == "cancelled":
            assert not standing
        assert row.state == "stuck" or row.taking_back == (row.state in {"cancelling", "cancelled"})
        if self.settled:
            assert row.state == self.settled[0]


Together.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
test_together = Together.TestCase
