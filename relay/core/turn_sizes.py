"""The number of events of each lane in a turn: fewer after a turn that was too large, or refused. No I/O.

After a turn that does not finish in time, the size is halved. Where each lane could have one, the number of lanes is,
and the others have the next turns: a lane costs more than its events, as each has its marker. If the broker refuses
something and does not prove what, the likeliest events have turns of their own: the events before them, then these.
Without a guess, the lanes of the turn are halved until one is left, and then the lane's events. What is refused by
itself is found; see loop.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Final

from relay.core.lane import Lane
from relay.core.ports import Batches, BatchRefused, Claim, DeliveryTimeout, Failed, Receipt

# Clean turns after which a size that was halved is doubled again.
_GROW_AFTER: Final = 8
# The most events in a turn over all lanes, in batches of one lane.
_LANES_AT_ONCE: Final = 4


class TurnSizes:
    """The sizes of a worker's turns. A lane has at most ``batch_size`` events, and shares what others leave.

    ``lanes`` are those of the loop, which adds and removes them.
    """

    def __init__(self, batch_size: int, lanes: Mapping[int, Lane]) -> None:
        self._batch_size = batch_size
        self._lanes = lanes
        self._limit = batch_size
        self._most_lanes: int | None = None
        """The most lanes in a turn, if one event of each was too much."""
        self._waiting: Sequence[int] = ()
        """The lanes that have not had their turn since all had one."""
        self._clean = 0
        self._suspects: list[list[int]] = []
        """Lanes with suspected events, in groups that have turns of their own, in rotation."""
        self._suspects_turn = False

    def forget(self, lane: int) -> None:
        self._clear([lane])

    def note_taken(self, lanes: AbstractSet[int], batches: Batches) -> None:
        """Record how many events these lanes had in a turn.

        A suspected lane without events goes with the others again: it would hold up the lanes of its group.
        """
        known = lanes & self._lanes.keys()
        for number in known:
            self._lanes[number].taken = len(batches.get(number, ()))
        if self._suspects_turn:
            self._clear([number for number in known if not batches.get(number)])

    def limits(self, ready: Sequence[int]) -> dict[int, int]:
        """Return the lanes of this turn, out of those that are ready, with the most events of each."""
        good = [number for number in ready if not self._lanes[number].suspected]
        group = [] if self._suspects_turn and good else self._next_suspects(ready)
        self._suspects_turn = bool(group)
        return {number: self._lanes[number].limit for number in group} or self._shares(self._next_lanes(good))

    @property
    def lanes_wait(self) -> bool:
        """Whether lanes wait for their turn only because those of the last one were as many as a turn may have."""
        return bool(self._waiting)

    def _next_lanes(self, ready: Sequence[int]) -> Sequence[int]:
        if self._most_lanes is None:
            self._waiting = ()
            return ready
        here = set(ready)
        waiting = [number for number in self._waiting if number in here] or ready
        self._waiting = waiting[self._most_lanes :]
        return waiting[: self._most_lanes]

    def _next_suspects(self, ready: Collection[int]) -> list[int]:
        for number, group in enumerate(self._suspects):
            if here := [lane for lane in group if lane in ready]:
                self._suspects.append(self._suspects.pop(number))
                # First what comes before the likeliest events of a group, then these together.
                return [lane for lane in here if self._lanes[lane].suspected > 1] or here
        return []

    def _shares(self, numbers: Sequence[int]) -> dict[int, int]:
        """Return how many events each lane may have: lanes that fill their share also get what the others leave.

        If one of 256 lanes has the hottest key, it must not wait because the other 255 might have events too. If they
        suddenly do, this turn has at most twice as many events as others.
        """
        if not numbers:
            return {}
        most = self._limit * _LANES_AT_ONCE
        even = max(min(self._limit, most // len(numbers)), 1)
        full = [number for number in numbers if self._lanes[number].taken >= even]
        if not full:
            return dict.fromkeys(numbers, even)
        left = most - sum(self._lanes[number].taken for number in numbers if self._lanes[number].taken < even)
        more = max(min(self._limit, left // len(full)), even)
        return dict.fromkeys(numbers, even) | dict.fromkeys(full, more)

    def narrowed(self, batches: Batches, failed: Failed) -> Failed:
        """Halve what was too large, and isolate what was refused. A refused batch of one identifies the event."""
        match failed.error:
            case DeliveryTimeout():
                self._halve(batches)
            case BatchRefused():
                return self._isolated(batches, failed)
        return failed

    def _halve(self, batches: Batches) -> None:
        largest = max(map(len, batches.values()))
        half = max(largest // 2, 1)
        if not self._suspects_turn:
            # Otherwise there may have been one event only because few lanes had any.
            if largest == self._limit == 1:
                self._most_lanes = max(len(batches) // 2, 1)
            self._clean, self._limit = 0, half
            return
        for number in batches:
            self._lanes[number].limit = half

    def _isolated(self, batches: Batches, failed: Failed) -> Failed:
        found = {number for number, receipt in failed.receipts.items() if receipt.refused}
        self._clear(found)
        blamed = [number for number in failed.blamed if number in batches]
        if not blamed and not found:
            blamed = list(batches)
        blamed = [number for number in blamed if number not in found]
        if len(batches) == 1 and blamed and len(batches[blamed[0]]) == 1:
            (number,) = blamed
            self._clear(blamed)
            refusal = batches[number][0], str(failed.error)
            return replace(failed, receipts={**failed.receipts, number: Receipt(refused=[refusal])})
        guesses = {
            number: before
            for number in blamed
            if not self._lanes[number].suspected
            and (before := _before(batches[number], failed.likeliest.get(number))) is not None
        }
        # If a guess is wrong, the others are refused again, without these events.
        self._suspect({number: len(batches[number]) for number in guesses or blamed}, guesses)
        return failed

    def _suspect(self, sizes: Mapping[int, int], guesses: Mapping[int, int]) -> None:
        """Give these lanes turns of their own, by the number of their events that were refused together."""
        lanes, half = list(sizes), len(sizes) // 2
        groups = [lanes] if guesses else [part for part in (lanes[:half], lanes[half:]) if part]
        for number, size in sizes.items():
            lane = self._lanes[number]
            if guesses:
                lane.suspected, lane.limit = guesses[number] + 1, guesses[number] or 1
            else:
                lane.suspected, lane.limit = size, size if len(sizes) > 1 else max(size // 2, 1)
        self._suspects = [left for each in self._suspects if (left := [n for n in each if n not in sizes])] + groups

    def _clear(self, numbers: Collection[int]) -> None:
        for number in numbers:
            self._lanes[number].suspected = 0
        self._suspects = [left for each in self._suspects if (left := [n for n in each if n not in numbers])]

    def completed(self, lanes: AbstractSet[int]) -> None:
        """Let sizes grow after clean turns, and clear suspects of which all was published."""
        if self._suspects_turn:
            alone = len(lanes) == 1
            for number in lanes & self._lanes.keys():
                lane = self._lanes[number]
                lane.suspected = max(lane.suspected - lane.taken, 0)
                lane.limit = max(min(lane.suspected // 2, lane.limit * 2), 1)
                if not lane.suspected:
                    self._clear([number])
                    if alone:
                        # Together it was refused, and in parts it is not: the turns are too large.
                        self._clean, self._limit = 0, max(self._limit // 2, 1)
        elif self._limit < self._batch_size or self._most_lanes is not None:
            self._clean += 1
            if self._clean >= _GROW_AFTER:
                self._clean = 0
                self._grow()

    def _grow(self) -> None:
        if self._most_lanes is None:
            self._limit = min(self._limit * 2, self._batch_size)
        elif self._most_lanes * 2 < len(self._lanes):
            self._most_lanes *= 2
        else:
            self._most_lanes = None


def _before(claims: Sequence[Claim], position: int | None) -> int | None:
    """Return how many events of a batch come before the one at a position; None if it is not in the batch."""
    return next((n for n, claim in enumerate(claims) if claim.position == position), None)
