"""The search through the protocol's model, breadth first: a trace that it finds is a shortest one."""

from __future__ import annotations

import gc
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from invariants import Invariant
from protocol_model import Action, World
from protocol_servers import Violation


@dataclass(frozen=True)
class Search:
    """What ``explore`` did. ``complete`` says that nothing within the bounds was left out."""

    states: int
    steps: int
    depth: int
    complete: bool
    trace: tuple[str, ...] = ()
    broken: Invariant | None = None
    violation: str = ""

    def __str__(self) -> str:
        whole = "all" if self.complete else "the first"
        told = f"{whole} {self.states} states, {self.steps} steps, depth {self.depth}"
        if not self.violation:
            return f"{told}: no violation"
        lines = [f"{number:3} {action}" for number, action in enumerate(self.trace, 1)]
        return "\n".join([told, *lines, f"    {self.violation}"])


class _Progress:
    """Remembers every step that is no fault, to find states from which no such steps lead to the end."""

    def __init__(self) -> None:
        self._from = array("q")
        self._to = array("q")
        self._done: list[int] = []

    def step(self, here: int, there: int) -> None:
        self._from.append(here)
        self._to.append(there)

    def done(self, state: int) -> None:
        self._done.append(state)

    def stuck(self, states: Iterable[int]) -> int | None:
        into: dict[int, list[int]] = {}
        for here, there in zip(self._from, self._to, strict=True):
            into.setdefault(there, []).append(here)
        live, todo = set(self._done), list(self._done)
        while todo:
            for state in into.get(todo.pop(), ()):
                if state not in live:
                    live.add(state)
                    todo.append(state)
        return next((state for state in states if state not in live), None)


def explore(world: World, keys: str = "", *, faults: int, progress: bool = True) -> Search:
    """Try every order of actions with at most ``faults`` faults, breadth first, until a violation or the end.

    ``progress``: from every state, steps without faults must lead to all events being published and settled. A state is
    remembered by its hash.
    """
    # None of the many tuples is rubbish before the end: Python's collector would look through them again and again.
    gc.disable()
    try:
        return _explore(world, keys, faults, progress)
    finally:
        gc.enable()


def _explore(world: World, keys: str, faults: int, progress: bool) -> Search:  # noqa: C901 - one loop, kept in one place for speed
    start = world.save()
    first = world.key(faults)
    parents: dict[int, tuple[int, Action] | None] = {first: None}
    frontier = [(start, faults, first)]
    live = _Progress()
    depth = steps = 0
    while frontier:
        depth += 1
        following = []
        for saved, left, here in frontier:
            world.load(saved)
            if world.done(keys):
                live.done(here)
            untouched = True
            for action in list(world.possible(keys)):
                fault = action.fault
                if fault and not left:
                    continue
                steps += 1
                if not untouched:
                    world.load(saved)
                untouched = False
                try:
                    world.apply(action)
                except Violation as error:
                    trace = _trace(world, start, _actions(parents, here, action))
                    return Search(len(parents), steps, depth, False, trace, error.broken, str(error))
                there = world.key(left - fault)
                if progress and not fault and there != here:
                    live.step(here, there)
                if there not in parents:
                    parents[there] = (here, action)
                    following.append((world.save(), left - fault, there))
        frontier = following
    if progress and (state := live.stuck(parents)) is not None:
        trace = _trace(world, start, _actions(parents, state))
        text = "stuck: only a fault could lead to the end"
        return Search(len(parents), steps, depth, False, trace, Invariant.EACH_IS_PUBLISHED, text)
    return Search(len(parents), steps, depth, True)


def _actions(parents: dict[int, tuple[int, Action] | None], state: int, *last: Action) -> list[Action]:
    actions = list(last)
    while (step := parents[state]) is not None:
        state, action = step
        actions.insert(0, action)
    return actions


def _trace(world: World, start: tuple[Any, ...], actions: list[Action]) -> tuple[str, ...]:
    """Replay the actions and say what each was about to do."""
    told = []
    world.load(start)
    for action in actions:
        told.append(world.tell(action))
        try:
            world.apply(action)
        except Violation:
            break
    return tuple(told)
