"""The number of events of each lane in a turn: fewer after a turn that was too large, or refused. No I/O.

After a turn that does not finish in time, the size is halved. If the broker refuses something without saying what, the
lanes that it names, or all, have turns of their own, in which the batch is halved until one event is left, or cut
before the likeliest one; see loop.py.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Final

from relay.ports import Batches, BatchRefused, Claim, Failed, Late, Receipt, Refused

# Clean turns after which a size that was halved is doubled again.
_GROW_AFTER: Final = 8
# The most events in a turn over all lanes, in batches of one lane.
_LANES_AT_ONCE: Final = 4


@dataclass(slots=True)
class _Lane:
    """One lane. ``taken`` is its number of events in the last turn.

    ``suspect``: something in its last batch was refused, and it has turns of its own until that is found; ``limit`` is
    the size of such a turn, and ``after`` that of the next one if this one is clean (0: it doubles). ``guessed``: these
    sizes follow a guess which event it is; ``guesses`` is the number of turns left for it. Lanes with the same ``case``
    were refused together; ``proven``: the lane was also refused by itself. ``clean`` counts its own turns.
    """

    taken: int = 0
    suspect: bool = False
    limit: int = 0
    after: int = 0
    guessed: bool = False
    guesses: int = 0
    case: int = 0
    proven: bool = False
    clean: int = 0


class TurnSizes:
    """The sizes of a worker's turns. A lane has at most ``batch_size`` events, and shares what others leave."""

    def __init__(self, batch_size: int) -> None:
        self._batch_size = batch_size
        self._lanes: dict[int, _Lane] = {}
        self._limit = batch_size
        self._clean = 0
        self._suspects_turn = False
        self._cases = 0
        self._guess_first = True

    def hold(self, lane: int) -> None:
        """Start with a lane."""
        self._lanes[lane] = _Lane()

    def drop(self, lane: int) -> None:
        """Forget a lane."""
        del self._lanes[lane]

    def note_taken(self, lanes: AbstractSet[int], batches: Batches) -> None:
        """Record how many events these lanes had in a turn."""
        for number in lanes & self._lanes.keys():
            self._lanes[number].taken = len(batches.get(number, ()))

    def limits(self, ready: Sequence[int]) -> dict[int, int]:
        """Return the lanes of this turn, out of those that are ready, with the most events of each."""
        suspects = [number for number in ready if self._lanes[number].suspect]
        good = [number for number in ready if number not in suspects]
        self._suspects_turn = bool(suspects) and (not self._suspects_turn or not good)
        if self._suspects_turn:
            # One at a time, in rotation. A guess comes first, but not twice in a row, or others might wait for ever.
            lanes, first = self._lanes, self._guess_first
            number = min(suspects, key=lambda each: (not (first and lanes[each].guesses), lanes[each].clean))
            lane = lanes[number]
            self._guess_first = not (first and lane.guesses)
            lane.clean, lane.guesses = lane.clean + 1, max(lane.guesses - 1, 0)
            return {number: lane.limit}
        if not good:
            return {}
        return self._shares(good)

    def _shares(self, numbers: Sequence[int]) -> dict[int, int]:
        """Return how many events each lane may have: lanes that fill their share also get what the others leave.

        If one of 256 lanes has the hottest key, it must not wait because the other 255 might have events too. If they
        suddenly do, this turn has at most twice as many events as others.
        """
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
        if isinstance(failed.error, Late):
            half = max(max(map(len, batches.values())) // 2, 1)
            if self._suspects_turn:
                for number in batches:
                    self._lanes[number].limit = half
            else:
                self._clean = 0
                self._limit = half
        if not isinstance(failed.error, BatchRefused):
            return failed
        blamed = [lane for lane in failed.blamed if lane in batches] or list(batches)
        receipts = dict(failed.receipts)
        self._cases += 1
        for number in blamed:
            lane, size = self._lanes[number], len(batches[number])
            alone = len(batches) == 1
            if not self._suspects_turn:
                lane.case = self._cases
            lane.suspect, lane.proven = True, alone
            lane.limit, lane.after = max(size // 2, 1) if alone or len(blamed) < len(batches) else size, 0
            before = _before(batches[number], failed.likeliest.get(number))
            # After a wrong guess, halve: the number of events falls with each turn.
            lane.guessed = before is not None and not lane.guessed
            if before is not None and lane.guessed:
                lane.limit, lane.after = (before, 1) if before else (1, 0)
                lane.guesses = 2 if before else 1
            if alone and size == 1:
                self._found(lane)
                receipts[number] = Receipt([(batches[number][0], Refused(str(failed.error)))])
        return replace(failed, receipts=receipts)

    def _found(self, lane: _Lane) -> None:
        """Clear a lane whose event is found, and the lanes that were refused together with it.

        If these have another such event, a common turn will be refused again because of it.
        """
        for each in self._lanes.values():
            if each is lane or (each.suspect and each.case == lane.case and not each.proven):
                each.suspect, each.proven, each.guessed = False, False, False
                each.guesses = each.after = 0

    def completed(self, lanes: Collection[int]) -> None:
        """Let sizes grow after clean turns; after several, a suspect is cleared."""
        if self._suspects_turn:
            for number in lanes:
                lane = self._lanes.get(number)
                if lane is None:
                    continue
                if lane.after:
                    lane.limit, lane.after = lane.after, 0
                    continue
                lane.limit = min(lane.limit * 2, self._batch_size)
                lane.suspect = lane.limit < self._batch_size
                if not lane.suspect:
                    lane.clean, lane.proven, lane.guessed = 0, False, False
            return
        if self._limit < self._batch_size:
            self._clean += 1
            if self._clean >= _GROW_AFTER:
                self._clean = 0
                self._limit = min(self._limit * 2, self._batch_size)


def _before(claims: Sequence[Claim], position: int | None) -> int | None:
    """Return how many events of a batch come before the one at a position; None if it is not in the batch."""
    return next((n for n, claim in enumerate(claims) if claim.position == position), None)
