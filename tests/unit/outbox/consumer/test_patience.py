"""Patience by a clock that stands still unless the test moves it."""

from __future__ import annotations

import pytest

from outbox.consumer import patience
from outbox.consumer.patience import ANSWERED_SECONDS, LEAST_SECONDS, NoTimeLeft, Patience


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def ask(clock: Clock, longest: float, *, answered_after: float | None = None) -> float:
    """Ask a server that keeps silent for as long as it may, or answers. Returns how long it was waited for."""
    with patience.current().ask(longest) as most:
        if answered_after is not None:
            clock.now += answered_after
            return answered_after
        clock.now += most
        raise TimeoutError
    raise AssertionError


def test_a_silent_server_is_waited_for_exactly_as_long_as_patience_says(clock):
    """Counted from the beginning of the first question: its 20 seconds are part of the 60."""
    waited = Patience(60, clock)
    began, asked = clock.now, 0
    while waited.left > 0:
        with waited.attempt(), pytest.raises(TimeoutError):
            ask(clock, 25)
        waited.failed()
        asked += 1
        if waited.left > 0:
            clock.now += 1.0
    # 25, a pause, 25, a pause, and the 8 that are left.
    assert (clock.now - began, asked) == (60, 3)
    with waited.attempt(), pytest.raises(NoTimeLeft):
        ask(clock, 25)
    assert clock.now - began == 60


def test_an_answer_to_another_question_leaves_what_has_passed(clock):
    """Postgres answers each time, and Kafka never does."""
    waited = Patience(60, clock)
    began = clock.now
    while waited.left > 0:
        with waited.attempt():
            ask(clock, 10, answered_after=1)
            with pytest.raises(TimeoutError):
                ask(clock, 20)
        waited.failed()
    # The last question had ANSWERED_SECONDS, because another one of its attempt had an answer.
    assert 1 + 60 <= clock.now - began <= 1 + 60 + ANSWERED_SECONDS


def test_a_long_attempt_after_a_failure_is_not_ended_while_servers_answer(clock):
    """A leader's election, then a round that takes longer than patience: by its work, and not by silence."""
    waited = Patience(60, clock)
    with waited.attempt(), pytest.raises(TimeoutError):
        ask(clock, 1)
    waited.failed()
    with waited.attempt():
        ask(clock, 20, answered_after=1)
        clock.now += 3600
        assert patience.current().longest(30) == ANSWERED_SECONDS
        ask(clock, 20, answered_after=4)
        # And it does end where nobody answers any more.
        began = clock.now
        with pytest.raises(TimeoutError):
            ask(clock, 20)
        assert clock.now - began == ANSWERED_SECONDS
    waited.failed()
    assert waited.left <= 0
    with waited.attempt(), pytest.raises(NoTimeLeft):
        ask(clock, 20)


def test_questions_of_one_attempt_share_what_is_left(clock):
    """Of the first nothing is known but that it was not answered: the attempt goes on with what it says then."""
    waited = Patience(30, clock)
    began = clock.now
    with waited.attempt():
        with pytest.raises(TimeoutError):
            ask(clock, 20)
        with pytest.raises(TimeoutError):
            ask(clock, 20)
    waited.failed()
    assert clock.now - began == 30
    # An answer in between says that a server is there.
    waited = Patience(30, clock)
    with waited.attempt():
        with pytest.raises(TimeoutError):
            ask(clock, 20)
        ask(clock, 20, answered_after=1)
        clock.now += 3600
    waited.failed()
    assert waited.left == 30


def test_what_fails_after_work_is_counted_from_its_failure(clock):
    """A round that has been at work for an hour has all its patience when a server goes away."""
    waited = Patience(60, clock)
    with waited.attempt():
        ask(clock, 20, answered_after=5)
        clock.now += 3600
    waited.failed()
    assert waited.left == 60
    clock.now += 10
    with waited.attempt():
        assert patience.current().longest(30) == 30
        clock.now += 45
        assert patience.current().longest(30) == 5
        patience.current().silent(clock.now)
    waited.failed()
    assert waited.left == 5


def test_a_success_gives_all_of_it_back(clock):
    waited = Patience(60, clock)
    with waited.attempt(), pytest.raises(TimeoutError):
        ask(clock, 20)
    waited.failed()
    assert waited.left == 40
    waited.renew()
    assert waited.left == 60
    with waited.attempt():
        ask(clock, 20, answered_after=5)
    waited.failed()
    assert waited.left == 60


def test_without_an_end_each_question_has_its_own_time(clock):
    waited = Patience(None, clock)
    for _ in range(10):
        with waited.attempt(), pytest.raises(TimeoutError):
            ask(clock, 20)
        waited.failed()
    assert clock.now == 1000 + 200


def test_little_patience_still_lets_a_first_question_be_answered(clock):
    waited = Patience(0, clock)
    with waited.attempt(), pytest.raises(TimeoutError):
        ask(clock, 20)
    assert clock.now == 1000 + LEAST_SECONDS
    waited.failed()
    with waited.attempt(), pytest.raises(NoTimeLeft):
        ask(clock, 20)


def test_outside_of_a_run_a_question_has_its_own_time(clock):
    with pytest.raises(TimeoutError):
        ask(clock, 20)
    assert clock.now == 1000 + 20
    assert patience.current().longest(30) == 30
