"""The number of events of each lane in a turn: fewer after a turn that was too large, or refused. No I/O.

After a turn that does not finish in time, the size is halved. If it had few events of many lanes, the number of lanes
is too, and the others have the next turns: a lane costs more than its events, as each has its marker. If the broker
refuses something and does not prove what, the likeliest events have turns of their own: the events before them, then
these. Without a guess, the lanes of the turn are halved until one is left, and then the lane's events. What is refused
by itself is found; see loop.py.
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
        """The most lanes in a turn, if a few events of each were too much."""
        self._waiting: Sequence[int] = ()
        """The lanes that have not had their turn since all had one."""
        self._last_limits: Mapping[int, int] = {}
        self._clean = 0
        self._suspects: list[list[int]] = []
        """Lanes with suspected events, in groups that have turns of their own, in rotation."""
        self._suspects_turn = False

    @property
    def most(self) -> tuple[int, int]:
        """The most events of a lane in a turn at present, and the most lanes."""
        lanes = len(self._lanes)
        return self._limit, min(self._most_lanes or lanes, lanes)

    def note_taken(self, limits: Mapping[int, int], batches: Batches) -> None:
        """Record how many events the lanes of a turn had, out of the most that each might have.

        A suspected lane without events goes with the others again: it would hold up the lanes of its group.
        """
        known = limits.keys() & self._lanes.keys()
        before, self._last_limits = self._last_limits, limits
        for number in known:
            lane, most = self._lanes[number], limits[number]
            lane.taken = len(batches.get(number, ()))
            # What was read ahead was read with the limits of the turn before.
            lane.full = lane.taken >= min(most, before.get(number, most))
        if self._suspects_turn:
            self.forget([number for number in known if not batches.get(number)])

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

        If one of 256 lanes has the hottest key, it must not wait because the other 255 might have events too: a lane
        that filled its share is expected to have twice as many, others as many as before, and the busiest gets the
        rest. If all suddenly have more, this turn has at most twice as many events as others.
        """
        if not numbers:
            return {}
        even = max(min(self._limit, self._limit * _LANES_AT_ONCE // len(numbers)), 1)
        shares = dict.fromkeys(numbers, even)
        busy = sorted((n for n in numbers if self._lanes[n].taken), key=lambda n: self._lanes[n].taken)
        # A turn of fewer events would cost hardly less, as each lane has a marker, and starve a hot lane.
        size = max(self._limit, len(busy))
        left = size * _LANES_AT_ONCE
        for index, number in enumerate(busy):
            lane, to_come = self._lanes[number], len(busy) - index
            more = lane.taken * 2 if to_come > 1 else left
            share = min(more if lane.full else lane.taken, size, self._batch_size, left // to_come)
            shares[number] = max(share, even)
            left -= share
        return shares

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
        if self._suspects_turn:
            for number in batches:
                self._lanes[number].limit = max(largest // 2, 1)
        elif largest == len(batches) == 1:
            # It can't be smaller: whatever it waited for, it is not its size.
            self._clean = 0
        else:
            self._shrink(largest, len(batches))

    def _shrink(self, largest: int, lanes: int) -> None:
        """Halve the limits, counted from the turn that failed, but to no less than a quarter of the present ones: it
        may have been small for lack of events, and late because the broker was away.
        """
        self._clean = 0
        if lanes >= self._limit:
            # A lower limit alone makes no turn smaller: see _shares.
            self._most_lanes = max(lanes // 2, (self._most_lanes or len(self._lanes)) // 4, 1)
        self._limit = max(min(largest, self._limit) // 2, self._limit // 4, 1)
        for lane in self._lanes.values():
            lane.full = False

    def _isolated(self, batches: Batches, failed: Failed) -> Failed:
        found = {number for number, receipt in failed.receipts.items() if receipt.refused}
        self.forget(found)
        blamed = [number for number in failed.blamed if number in batches]
        if not blamed and not found:
            blamed = list(batches)
        blamed = [number for number in blamed if number not in found]
        if len(batches) == 1 and blamed and len(batches[blamed[0]]) == 1:
            (number,) = blamed
            self.forget(blamed)
            refusal = batches[number][0], str(failed.error)
            return replace(failed, receipts={**failed.receipts, number: Receipt(refused=[refusal])})
        guesses = {
            number: before
            for number in blamed
            if not self._lanes[number].suspected
            and (before := _before(batches[number], failed.likeliest.get(number))) is not None
        }
        if guesses:
            # If a guess is wrong, the others are refused again, without these events.
            self._isolate_guesses(guesses)
        else:
            self._bisect({number: len(batches[number]) for number in blamed})
        return failed

    def _isolate_guesses(self, before: Mapping[int, int]) -> None:
        """Give these lanes turns of their own: of the events ``before`` each one's guess, if any, then of the guess."""
        self.forget(before)
        for number, count in before.items():
            # The guess is suspected too, and not in the next turn, unless nothing is before it.
            self._lanes[number].suspected, self._lanes[number].limit = count + 1, count or 1
        self._suspects.append(list(before))

    def _bisect(self, sizes: Mapping[int, int]) -> None:
        """Give each half of these lanes turns of its own, or halve the events of a single lane."""
        self.forget(sizes)
        for number, size in sizes.items():
            lane = self._lanes[number]
            lane.suspected, lane.limit = size, size if len(sizes) > 1 else max(size // 2, 1)
        lanes, half = list(sizes), len(sizes) // 2
        self._suspects += [part for part in (lanes[:half], lanes[half:]) if part]

    def forget(self, numbers: Collection[int]) -> None:
        """Suspect nothing of these lanes any more."""
        for number in numbers:
            self._lanes[number].suspected = 0
        self._suspects = [left for each in self._suspects if (left := [n for n in each if n not in numbers])]

    def completed(self, lanes: AbstractSet[int]) -> None:
        """Let sizes grow after clean turns, and clear suspects of which all was published."""
        if self._suspects_turn:
            for number in lanes & self._lanes.keys():
                lane = self._lanes[number]
                lane.suspected = max(lane.suspected - lane.taken, 0)
                lane.limit = max(min(lane.suspected // 2, lane.limit * 2), 1)
                if not lane.suspected:
                    self.forget([number])
                    if len(lanes) == 1:
                        # Together it was refused, and in parts it is not: the turns are too large.
                        self._shrink(self._limit, self._most_lanes or len(self._lanes))
        elif self._limit < self._batch_size or self._most_lanes is not None:
            self._clean += 1
            if self._clean >= _GROW_AFTER:
                self._clean = 0
                self._limit = min(self._limit * 2, self._batch_size)
                if self._most_lanes is not None:
                    self._most_lanes = self._most_lanes * 2 if self._most_lanes * 2 < len(self._lanes) else None


def _before(claims: Sequence[Claim], position: int | None) -> int | None:
    """Return how many events of a batch come before the one at a position; None if it is not in the batch."""
    return next((n for n, claim in enumerate(claims) if claim.position == position), None)
