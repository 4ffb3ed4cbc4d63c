"""The exactly-once protocol against every order of steps and faults, and against relays that get it wrong.

``tests/protocol_model.py`` is the model. A small scenario is searched completely; runs with three relays and any number
of faults are random, by hypothesis (which shortens what it finds) and by walks (which get further). Every mutation has
to be caught: a model that forgives one proves nothing.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from protocol_model import ANSWERS, MUTATIONS, SPLIT_FETCH, Action, Search, World, explore

_KEYS = "abc"
_RELAYS = (0, 1, 2)
_FAULTS = {"kill", "expire", "crash"}


class Protocol(RuleBasedStateMachine):
    """Three relays that fetch as the real one does, writers of three keys, faults bounded by the run's length only."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(len(_RELAYS), mutations=[SPLIT_FETCH])
        self.paused: set[int] = set()

    def _do(self, name: str, who: int | str = "", how: str = "") -> None:
        action = Action(name, who, how)
        note(f"  {self.world.tell(action)}")
        self.world.apply(action)

    @rule(key=st.sampled_from(_KEYS))
    def begin(self, key: str) -> None:
        if self.world.writable(key):
            self._do("begin", key)

    @precondition(lambda self: self.world.pg.now.writing)
    @rule(number=st.integers(0, 2), how=st.sampled_from(["sync", "async"]))
    def commit(self, number: int, how: str) -> None:
        writing = self.world.pg.now.writing
        self._do("commit", writing[number % len(writing)].event_id, how)

    @rule(key=st.sampled_from(_KEYS), how=st.sampled_from(["sync", "async"]))
    def write(self, key: str, how: str) -> None:
        """Begin and commit at once, past those who have begun before."""
        if self.world.writable(key):
            self._do("begin", key)
            self._do("commit", self.world.pg.now.writing[-1].event_id, how)

    @rule(number=st.integers(0, 2), batches=st.integers(0, 3), steps=st.integers(0, 9), last=st.sampled_from(ANSWERS))
    def work(self, number: int, batches: int, steps: int, last: str) -> None:
        """A relay works, whichever can; the last of its requests may go wrong."""
        for _ in range(6 * batches + steps):
            self._step(number, "ok")
        self._step(number, last)

    @rule(number=st.integers(0, 2), last=st.sampled_from(ANSWERS))
    def work_up_to_a_commit(self, number: int, last: str) -> None:
        """The same, stopping where most can go wrong."""
        for _ in range(12):
            if any(len(self.world.relays[relay].answers()) == len(ANSWERS) for relay in self._able()):
                break
            self._step(number, "ok")
        self._step(number, last)

    def _able(self) -> list[int]:
        return [relay for relay in _RELAYS if relay not in self.paused and self.world.relays[relay].answers()]

    def _step(self, number: int, answer: str) -> None:
        if able := self._able():
            relay = able[number % len(able)]
            self._do("step", relay, answer if answer in self.world.relays[relay].answers() else "ok")

    @rule(relay=st.sampled_from(_RELAYS))
    def pause(self, relay: int) -> None:
        """SIGSTOP, or wake: it remembers everything, and goes on where it was. One at a time."""
        self.paused = set() if self.paused else {relay}

    @rule(number=st.integers(0, 9))
    def fault(self, number: int) -> None:
        faults = [action for action in self.world.possible("") if action.name in _FAULTS]
        if faults:
            self._do(*faults[number % len(faults)])

    @precondition(lambda self: self.world.kafka.open)
    @rule()
    def timeout(self) -> None:
        self._do("timeout")

    @precondition(lambda self: self.world.kafka.under_way)
    @rule()
    def late(self) -> None:
        self._do("late")

    @precondition(lambda self: self.world.kafka.taken)
    @rule()
    def written(self) -> None:
        self._do("written")

    @invariant()
    def guaranteed(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        self.world.drain()


def _walk(world: World, chance: random.Random, length: int) -> None:
    """Do something possible, again and again; one relay often goes on for a while, faults are rare or frequent."""
    keys = "".join(chance.choices(_KEYS, k=40))
    faulty, steady = chance.choice([0.01, 0.03, 0.1, 0.25]), chance.random()
    last: int | str = 0
    for _ in range(length):
        possible = list(world.possible(keys))
        faults = [action for action in possible if action.fault]
        others = [action for action in possible if not action.fault]
        action = chance.choice(faults if faults and (not others or chance.random() < faulty) else others)
        same = [other for other in others if other.name == "step" and other.who == last]
        if action in others and action.name == "step" and same and chance.random() < steady:
            action = same[0]
        if action.name == "step":
            last = action.who
        if action.name == "commit" and chance.random() < 0.5:
            action = action._replace(how="sync")
        print(world.tell(action))
        world.apply(action)
    world.drain()


def _search(*mutations: str, keys: str = "ab", batch_size: int = 1, faults: int) -> Search:
    return explore(keys, relays=2, batch_size=batch_size, faults=faults, mutations=mutations)


def test_every_order_of_two_relays_three_events_and_two_faults() -> None:
    """The protocol with its fetch in one transaction; the searches below split it in two, as the relay does."""
    search = _search(keys="aba", batch_size=2, faults=2)
    print(search)
    assert search.complete, search
    assert search.states > 100_000, search


def test_random_runs() -> None:
    run_state_machine_as_test(
        Protocol,
        settings=settings(
            max_examples=150,
            stateful_step_count=50,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.parametrize("seed", range(4))
def test_long_walks(seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Dozens of batches, where the search sees two; it is the last walk's trace that a failure prints."""
    chance = random.Random(seed)
    published = 0
    for _ in range(40):
        capsys.readouterr()
        world = World(len(_RELAYS), mutations=chance.choice([[], [SPLIT_FETCH]]))
        _walk(world, chance, 300)
        published += len(world.kafka.topic)
    assert published > 800


def test_the_protocol_passes_the_search_that_the_mutations_fail() -> None:
    search = _search(SPLIT_FETCH, faults=2)
    print(search)
    assert search.complete, search


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_relay_that_gets_it_wrong_is_caught(mutation: str) -> None:
    """One fault is enough for most, so that is tried first: the trace is the shortest of those with fewest faults."""
    for faults in (0, 1, 2):
        search = _search(SPLIT_FETCH, mutation, faults=faults)
        if search.violation:
            print(f"{mutation}: {MUTATIONS[mutation]}, {faults} faults\n{search}")
            return
    pytest.fail(f"{mutation} is not caught: {search}")
