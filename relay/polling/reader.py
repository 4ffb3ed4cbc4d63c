"""Decides what to read of a worker's lanes, and learns from the results.

Keys that wait
    A lane with rows in ``failures`` is read by statements of its own, which omit the events whose key waits (see
    retries.py). Due events are read separately, alternating with batches of the others: one at first, and twice as many
    after each turn in which all of them were published. For a worker without failures this costs only a query of an
    empty table each second.

Keys that are freed
    Rows that waited are below the mark, newer ones of their key above it. What the lane's holder frees itself, by
    publishing the failed event, it knows before it reads again. Whatever else frees a key (an operator, a marker) is
    noticed when the first newer row of the key is read: the lane's rows of that turn are taken back, and are read again
    from the lowered mark (see blocked_keys.py). If there is no newer row, the look of each second finds it.

Late events
    Events that a sweep has found below the mark (sweep.py) are read by their ids, before anything else of their lane,
    until none of them is left.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from outbox.event import DEAD_LETTER
from relay.core.lease import Lease
from relay.core.ports import Batches, Claim, Kind, UnsettledBatch
from relay.database import unavailable_on_error
from relay.polling.blocked_keys import FailureRow, PolledLane
from relay.polling.kept_marks import KeptLane, KeptMarks, Server
from relay.polling.low_water_mark import LOWEST, LowWaterMarks, Marks
from relay.polling.queries import DRAW_XID, SERVER, XMIN, Queries, split_rows
from relay.polling.row_marks import RowMarks, unsettled_above
from relay.polling.session import Read, ReadTurn, Session, TurnPlan
from relay.polling.sweep import Sweep
from relay.settle.settlement import by_lane, lanes_text
from relay.settle.statements import array

_LOOK_SECONDS: Final = 1.0
_LANE_BYTES: Final = 1 << 20
# Unless events are huge, a lane may take a turn's bytes divided by this: few lanes have much at a time.
_FEW_LANES: Final = 4
# Rows below this size are limited by their number alone.
_SMALL_ROW_BYTES: Final = 4096
# If many lanes have events of this size, a few are read at a time: each event has to be unpacked to compute what fits.
_LARGE_BYTES: Final = 64 << 10
_MOST_DUE: Final = 500


class LaneReader:
    """The reading state of a worker's lanes: low-water marks, failures, sizes. A turn has at most ``turn_bytes``.

    ``kept``: what the source before has left, see kept_marks.py; None for one that leaves nothing to others.
    """

    def __init__(
        self, session: Session, queries: Queries, turn_bytes: int, *, sweep: Sweep, kept: KeptMarks | None
    ) -> None:
        self._session = session
        self._sweep = sweep
        self._kept = kept or KeptMarks()
        # Lanes whose due events got no answer under the last source: they go with others in their next turn.
        self._unanswered = set(self._kept.unanswered)
        self._row_marks = None if kept is None else RowMarks(session, queries)
        self._new: set[int] = set()
        self._server: Server | None = None
        self._queries = queries
        self._turn_bytes = turn_bytes
        self._marks = LowWaterMarks()
        self._lanes: dict[int, PolledLane] = {}
        self._looked_at = -_LOOK_SECONDS
        self._ends_at = -_LOOK_SECONDS
        self._crowded = False
        self._rotation = 0
        self._resume_at_lane = 0
        self.left_out: frozenset[Kind] = frozenset()

    def hold(self, lease: Lease) -> None:
        self._lanes[lease.lane] = PolledLane(lease)
        self._new.add(lease.lane)
        self._marks.reset(lease.lane)
        self._sweep.hold(lease.lane)

    def drop(self, lane: int) -> None:
        self._lanes.pop(lane, None)

    def close(self, unsettled: Batches) -> None:
        """End the sweep, and leave the marks to the next source; ``unsettled`` are events that may not be settled."""
        self._sweep.close()
        states = self._lanes.items()
        self._kept.unanswered = frozenset(lane for lane, state in states if state.reading_due and state.due_next)
        if self._server is None:
            return
        for lane, state in states:
            mark = unsettled_above(self._marks.mark(lane), unsettled.get(lane, ()))
            if mark > LOWEST:
                late = [id_ for id_ in (*state.late_ids, *state.swept_ids) if id_ <= mark]
                due_at = self._sweep.due_at[lane]
                self._kept.lanes[lane] = KeptLane(state.lease.epoch, mark, state.failures, late, due_at)
        self._kept.server, self._kept.left_out = self._server, self.left_out

    def leave_out(self, kinds: frozenset[Kind]) -> None:
        before, self.left_out = self.left_out, kinds
        if before <= kinds:
            return
        for lane in self._lanes:
            # Omitted events are below the mark by now.
            self._forget_mark(lane)

    def read_all_again(self, lane: int) -> None:
        """Make the next turn read the failures first, and start from the lane's lowest id."""
        self.recheck_failures(lane)
        self._forget_mark(lane)
        self._kept.lanes.pop(lane, None)

    def _forget_mark(self, lane: int) -> None:
        self._marks.reset(lane)
        self._lanes[lane].swept_ids = self._lanes[lane].late_ids = ()

    def recheck_failures(self, lane: int, ids: Collection[int] | None = None) -> None:
        """Make the next turn find out first which failures the lane has, or which of these events are among them."""
        state = self._lanes[lane]
        if ids is None:
            state.failures_loaded = False
        else:
            state.recheck_ids.update(ids)

    def may_become_due(self, lanes: Collection[int]) -> bool:
        """Return whether these lanes have waiting events that only a read shows to be due."""
        return bool(self.left_out) or any(self.has_failures(lane) or self._lanes[lane].late_ids for lane in lanes)

    def marks(self, lanes: Collection[int]) -> dict[int, int]:
        return {lane: self._marks.mark(lane) for lane in lanes}

    # What to read

    def plan_turn(self, limits: Mapping[int, int], unsettled: Batches) -> TurnPlan:
        """Return what to read now of these lanes; ``unsettled`` are events that must not be read again."""
        limits = self._turn_limits(limits)
        self.look_first(unsettled)
        self._begin_sweep(limits)
        plan = TurnPlan(limits, unsettled, self._reads(limits, unsettled))
        if self.failure_check_due():
            self._looked_at = time.monotonic()
            for lane, found in self._sweep.take(self._lanes).items():
                self._lanes[lane].swept_ids = found
            plan.counted = list(self._lanes)
        return plan

    def plan_ahead(self, limits: Mapping[int, int], unsettled: Batches) -> TurnPlan | None:
        """Return what to read while ``unsettled`` is published; None if the next turn has to read the failures."""
        if self.failure_check_due():
            return None
        limits = self._turn_limits(limits)
        return TurnPlan(limits, unsettled, self._reads(limits, unsettled), ahead=True)

    def _turn_limits(self, limits: Mapping[int, int]) -> dict[int, int]:
        """Return the lanes to read now: all, or, while events are huge, as many as a turn has room for, in rotation."""
        lanes = sorted(limits)
        most = max(self._turn_bytes // _LANE_BYTES, 1)
        if self._crowded and len(lanes) > most:
            start = self._rotation % len(lanes)
            self._rotation += most
            # Unsettled rows are settled with their lane's turn.
            lanes = sorted((lanes + lanes)[start : start + most])
        return {lane: limits[lane] for lane in lanes}

    def _reads(self, limits: Mapping[int, int], unsettled: Batches) -> list[Read]:
        """Return the statements that read these lanes; of a lane, late events come first, then due ones, then others.

        Each starts from the mark, also behind thousands of unsettled events: a transaction that has drawn a low id may
        have committed since the last read, and later events of its key after it.
        """
        lanes = list(limits)
        marks = self._marks.advance_and_get(lanes, draw_xid=self._draw_xid, xmin=self._xmin)
        after = {lane: claims[-1].position for lane, claims in unsettled.items() if claims}
        share = max(self._turn_bytes // max(len(lanes) if self._crowded else _FEW_LANES, 1), 1)
        some = bool(self.left_out)
        common: dict[str, Any] = {
            "unsettled": array([claim.position for claims in unsettled.values() for claim in claims]),
            "max_bytes": share,
            "turn_bytes": self._turn_bytes,
            "copy": DEAD_LETTER,
            "left_types": [kind for kind, _ in self.left_out],
            "left_copies": [copy for _, copy in self.left_out],
        }
        reads = self._late_reads(limits, unsettled, marks, common)
        plain = [lane for lane in lanes if not self._lanes[lane].failures]
        # Lanes without room in the last turn come first.
        plain.sort(key=lambda lane: (lane < self._resume_at_lane, lane))
        if plain:
            values = {
                "lanes": array(plain),
                "above": array([marks.by_lane[lane] for lane in plain]),
                "after": array([after.get(lane, marks.by_lane[lane]) for lane in plain]),
                "limits": array([self._rows(lane, limits[lane], share) for lane in plain]),
                **common,
            }
            query = self._queries.read_some if some else self._queries.read
            reads.append(Read(query, values, plain, marks))
        for lane in lanes:
            state = self._lanes[lane]
            if not state.failures:
                continue
            values = {"lane": lane, **common}
            # For due events, what fits is not computed in advance.
            values["due"] = self._rows(lane, min(state.due, limits[lane]), share // 2)
            values |= {"above": marks.by_lane[lane], "after": after.get(lane, marks.by_lane[lane])}
            # With the due event they are at most a batch.
            room = max(limits[lane] - (lane in self._unanswered), 1)
            values["limit"] = self._rows(lane, room, share)
            if state.due_next:
                due = self._queries.read_some_due if some else self._queries.read_due
                reads.append(Read(due, values, [lane], marks, due=True))
            unblocked = self._queries.read_some_skip_blocked if some else self._queries.read_skip_blocked
            reads.append(Read(unblocked, values, [lane], marks))
        return reads

    def _late_reads(
        self, limits: Mapping[int, int], unsettled: Batches, marks: Marks, common: Mapping[str, Any]
    ) -> list[Read]:
        """Return the statements that read late events."""
        reads = []
        for lane in limits:
            state = self._lanes[lane]
            if not state.late_ids:
                continue
            values = {**common, "lane": lane, "late": array(state.late_ids)}
            values["limit"] = self._rows(lane, limits[lane], common["max_bytes"])
            # Unsettled ones are not read now, but again if they could not be published.
            late = set(state.late_ids)
            last = not any(claim.position in late for claim in unsettled.get(lane, ()))
            reads.append(Read(self._queries.read_late, values, [lane], marks, late=True, last=last))
        return reads

    def _begin_sweep(self, lanes: Collection[int]) -> None:
        """Start to sweep these lanes if it is time, except those of which the last sweep has found something."""
        free = [lane for lane in lanes if not (self._lanes[lane].late_ids or self._lanes[lane].swept_ids)]
        self._sweep.begin({lane: mark for lane, mark in self.marks(free).items() if mark > LOWEST}, self.left_out)

    def _rows(self, lane: int, limit: int, share: int) -> int:
        """Return how many rows to request: rows beyond the bytes that fit would be read in vain."""
        size = self._lanes[lane].row_bytes
        return limit if size < _SMALL_ROW_BYTES else max(min(limit, int(2 * share / size)), 1)

    def _worth_reading_ahead(self, batches: Batches, limits: Mapping[int, int]) -> bool:
        """Return whether there is a backlog, and no lane that has failures, or may have some."""
        states = [self._lanes[lane] for lane in limits]
        return any(
            2 * len(batch) > limits[lane] or batch[0].size * len(batch) > _LANE_BYTES for lane, batch in batches.items()
        ) and all(state.failures_loaded and not state.failures and not state.recheck_ids for state in states)

    # What the results say

    def read(self, plan: TurnPlan, limits: Mapping[int, int]) -> ReadTurn:
        """Read a turn, unless it was read ahead, and update the marks. ``limits`` are those of all lanes.

        Returns the events, without those of lanes in which a key has been freed: they are read again, from a lower
        mark.
        """
        # The number of failures of each lane, and the sum of their ids, as they are after the read.
        counts = self._session.read_turn(plan)
        batches: dict[int, list[Claim]] = {}
        # Lanes with late events, or else due ones: this turn has no others of them.
        first: set[int] = set()
        for read in plan.reads:
            found = self._first(read, first) if read.late or read.due else self._others(read, first, plan)
            for lane, claims in found.items():
                batches.setdefault(lane, []).extend(claims)
        for lane in self._freed(batches):
            del batches[lane]
        self._note_counts(counts)
        self._note_sizes(batches)
        retried = [lane for lane in batches if self._lanes[lane].reading_due and self._lanes[lane].failures]
        return ReadTurn(batches, retried, self._worth_reading_ahead(batches, limits))

    def _freed(self, batches: Batches) -> set[int]:
        """Return the lanes with an event that should wait for a failure, as far as is known: it must be gone."""
        freed: set[int] = set()
        for lane, claims in batches.items():
            state = self._lanes[lane]
            if not state.failures:
                continue
            for claim in claims:
                if gone := state.failures.before(claim):
                    state.recheck_ids |= gone
                    freed.add(lane)
        return freed

    def _others(self, read: Read, first: set[int], plan: TurnPlan) -> Batches:
        """Return the other events, without lanes that are in ``first``, and update the marks."""
        rows, without_room = split_rows(read.rows)
        if without_room:
            self._resume_at_lane = without_room[0]
        found = by_lane(rows)
        for lane in read.lanes:
            if lane in first:
                found.pop(lane, None)
                continue
            state = self._lanes[lane]
            if state.failures:
                state.due_next, state.reading_due = True, False
            # Rows must not wait below the mark for a failure that is not known: the count after this read finds it.
            if (plan.counted or not state.failures) and lane not in without_room:
                self._marks.seen(read.marks, lane, found[lane][0].position if lane in found else None)
        return found

    def _first(self, read: Read, first: set[int]) -> Batches:
        """Return late or due events, which go before all others of their lane; adds the lane to ``first``."""
        (lane,) = read.lanes
        state, found = self._lanes[lane], {lane: read.rows} if read.rows else {}
        if read.late:
            if found:
                state.reading_due = False
            elif read.last:
                state.late_ids = ()
        elif lane in first:
            return {}
        elif found and lane in self._unanswered:
            # Once, with the others.
            self._unanswered.discard(lane)
            return found
        else:
            state.reading_due = bool(found)
        first.update(found)
        return found

    def _note_sizes(self, batches: Batches) -> None:
        total = 0
        for lane, batch in batches.items():
            size = sum([len(claim.value) for claim in batch if claim.value is not None])
            total += size
            self._lanes[lane].row_bytes = size / len(batch)
        if total > max(self._turn_bytes // 2, _LARGE_BYTES * sum(map(len, batches.values()))):
            self._crowded = True
        elif total < self._turn_bytes // 8:
            self._crowded = False

    def note_settled(self, lane: int, batch: UnsettledBatch) -> None:
        """Record settled rows: the mark may rise to them, and their failures are gone."""
        if not batch.rows:
            return
        self._marks.may_rise_to(lane, max(claim.position for claim in batch.rows))
        if state := self._lanes.get(lane):
            self._lower(lane, state.failures.remove(claim.position for claim in batch.rows))

    def note_due(self, lane: int, *, refused: bool) -> None:
        """Record whether a turn could publish the due events: this decides how many the next one tries.

        Until then they are read first: if a turn fails and does not tell which event it was, the same are tried alone.
        """
        state = self._lanes[lane]
        if state.reading_due:
            state.due_next = False
            state.due = 1 if refused else min(state.due * 2, _MOST_DUE)

    # Failures

    def has_failures(self, lane: int) -> bool:
        return bool(self._lanes[lane].failures)

    def lanes_with_failures(self, lanes: Collection[int]) -> set[int]:
        with unavailable_on_error(f"looking for failures of {lanes_text(lanes)}"):
            self._session.free()
            return {row[0] for row in self._session.rows(self._queries.with_failures, lanes=list(lanes))}

    def failure_check_due(self) -> bool:
        """Return whether the next turn has to count the failures of all lanes."""
        return time.monotonic() - self._looked_at >= _LOOK_SECONDS

    def look_first(self, unsettled: Batches) -> None:
        """Find out what a turn needs to know first: marks that others have left, failures, and where marks may rise.

        ``unsettled`` as for ``close``.
        """
        if self._kept.lanes:
            self._take_kept()
        new, self._new = self._new & self._lanes.keys(), set()
        self._load_failures()
        if self._row_marks is not None:
            self._use_row_marks(self._row_marks, new, unsettled)
        self._read_last_ids()

    def _load_failures(self) -> None:
        """Read failures of lanes where they are not known: they decide which statement reads the lane."""
        states = self._lanes.items()
        unknown = [lane for lane, state in states if not state.failures_loaded]
        rechecked = [(lane, id_) for lane, state in states if state.failures_loaded for id_ in state.recheck_ids]
        if unknown:
            self._note(unknown, self._session.rows(self._queries.failures, lanes=unknown))
        if rechecked:
            lanes, ids = [lane for lane, _ in rechecked], [id_ for _, id_ in rechecked]
            self._note({*lanes}, self._session.rows(self._queries.some_failures, lanes=lanes, ids=ids))

    def _read_last_ids(self) -> None:
        """While events wait, read the lanes' last ids, to which the marks may rise."""
        waiting = [lane for lane, state in self._lanes.items() if self.left_out or state.failures]
        if waiting and self._marks.want_last_ids and time.monotonic() - self._ends_at >= _LOOK_SECONDS:
            # A topic may be paused for hours, a key blocked for days.
            self._ends_at = time.monotonic()
            above = [self._marks.mark(lane) for lane in waiting]
            for lane, last in self._session.rows(self._queries.last_ids, lanes=waiting, above=above):
                if last is not None:
                    self._marks.may_rise_to(lane, last)

    def _note_counts(self, rows: Sequence[Any]) -> None:
        for lane, count, total in rows:
            state = self._lanes.get(lane)
            if state is None:
                continue
            if state.failures.matches(count, int(total)):
                self._accept_found(lane)
            else:
                state.failures_loaded = False

    def _note(self, lanes: Collection[int], rows: Sequence[Any]) -> None:
        found: dict[int, list[FailureRow]] = {lane: [] for lane in lanes}
        for lane, *row in rows:
            found[lane].append(FailureRow(*row))
        for lane, failures in found.items():
            state = self._lanes[lane]
            asked = state.recheck_ids if state.failures_loaded else None
            freed = state.failures.replace(failures, asked)
            self._lower(lane, freed)
            if asked is None and freed is None:
                self._accept_found(lane)
            state.failures_loaded, state.recheck_ids = True, set()

    def _lower(self, lane: int, freed: int | None) -> None:
        """Make the next read start no higher than the failure that is gone: rows that waited for it may go now.

        What a sweep has found may be behind them, and is read with them.
        """
        if freed is not None:
            state = self._lanes[lane]
            self._marks.lower(lane, min([freed, *(id_ - 1 for id_ in (*state.late_ids, *state.swept_ids))]))
            state.late_ids = state.swept_ids = ()

    def _accept_found(self, lane: int) -> None:
        """Read what a sweep has found: a look that was sent after it has shown that no failure is gone."""
        state = self._lanes[lane]
        if state.swept_ids:
            # Unless it is read from the mark anyway.
            mark = self._marks.mark(lane)
            state.late_ids = sorted({*state.late_ids, *(id_ for id_ in state.swept_ids if id_ <= mark)})
            state.swept_ids = ()

    def _take_kept(self) -> None:
        """Take over the marks that the source before has left, where they hold on this server."""
        kept, server = self._kept, Server(*self._session.rows(SERVER)[0])
        lanes, kept.lanes = kept.lanes, {}
        if kept.server is None or not kept.server.has_become(server) or not kept.left_out <= self.left_out:
            return
        self._server = server
        for lane, left in lanes.items():
            state = self._lanes.get(lane)
            if state is not None and state.lease.epoch == left.epoch:
                self._marks.keep(lane, left.mark)
                self._new.discard(lane)
                self._sweep.due_at[lane] = left.sweep_at
                # They count once the look that follows has found the same failures.
                state.failures, state.failures_loaded, state.late_ids = left.failures, False, left.late_ids

    def _use_row_marks(self, marks: RowMarks, new: Collection[int], unsettled: Batches) -> None:
        for lane, mark in marks.left({lane: self._lanes[lane].failures for lane in new}).items():
            self._marks.keep(lane, mark)
            # A row below the mark is not found otherwise while the lane changes hands more often than it is swept.
            self._sweep.due_at[lane] = 0.0
        if self._server is not None and not self.left_out and marks.is_due:
            above = {
                lane: unsettled_above(mark, unsettled.get(lane, ())) for lane, mark in self.marks(self._lanes).items()
            }
            sure = [
                state
                for lane, state in self._lanes.items()
                if above[lane] > LOWEST
                and state.failures_loaded
                and not (state.recheck_ids or state.late_ids or state.swept_ids)
            ]
            marks.keep(self._server.system_identifier, sure, above)

    def _draw_xid(self) -> int:
        ((xid, *server),) = self._session.rows(DRAW_XID)
        self._server = self._session.accept(Server(*server))
        return int(xid)

    def _xmin(self) -> int:
        assert self._server is not None
        ((xmin,),) = self._session.rows(XMIN, wal_position=self._server.wal_position)
        return int(xmin)
