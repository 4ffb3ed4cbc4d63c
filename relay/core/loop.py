"""A worker's loop: one turn for all its lanes. Knows neither SQL nor Kafka.

A turn: read the lanes and settle the previous one; publish what was read; record the results. Events that were refused
before have a publish of their own; exactly-once, each publish is a Kafka transaction. The order of a key holds because
a lane has one holder, and a turn publishes a lane's events in order, and all of them before the next turn.

| what happens                            | at-least-once                          | exactly-once                      |
|-----------------------------------------|----------------------------------------|-----------------------------------|
| killed before publishing                | nothing was sent; the next holders of  | the same                          |
|                                         | the lanes read the same rows           |                                   |
| killed while publishing                 | some may be in Kafka; they are sent    | aborted: no reader saw them       |
|                                         | again (at most one batch of each lane) |                                   |
| killed when acknowledged, not settled   | the batches are sent again; two turns  | their markers settle them         |
|                                         | of a lane at most, and not more events |                                   |
|                                         | than a batch                           |                                   |
| killed after settling                   | nothing to repeat                      | the same                          |
| Kafka fails                             | what was acknowledged is settled, the  | all of the turn is read again,    |
|                                         | rest is read again later               | unless the markers have it        |
| Postgres fails while reading            | nothing was sent                       | the same                          |
| Postgres fails while settling           | unknown whether the rows went: settled | the turn that was sent meanwhile  |
|                                         | again before anything else is read     | is aborted; the markers settle    |
|                                         |                                        | the one before                    |
| a lane is lost while publishing         | settling is refused for it; the new    | fenced in Kafka: not committed,   |
|                                         | holder sends its batch again           | or the marker settles it          |
| an event is refused                     | its key waits or it is skipped, as its route says; other keys go on      |
| an event that was refused is retried    | after the others, in a publish of its own: it fails no others            |
| the broker refuses something unnamed    | narrowed down: the likeliest events, one of each partition, have turns   |
|                                         | of their own. Without a guess, the lanes that the broker names, or all,  |
|                                         | are halved down to one event. If it passes in parts, turns are halved    |
| a turn does not finish in time          | the next one is half as large, down to one event of one lane             |
| it finishes, except for topics that     | their events wait, the others go on at full size; see kafka/topics.py    |
| accept no messages                      |                                                                          |
| one lane can't be taken over or settled | it alone is retried, with backoff; the others go on                      |
| a lane is recalled, and what it has     | it is kept until that is settled: its next holder would send it again    |
| published can't be settled              | (three leases at most for a stream, ten seconds without a session)       |
| a lane is paused                        | its turn in flight ends and is settled; then it is not read, and its     |
|                                         | lease is kept. See pauses.py                                             |
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Final, assert_never

from outbox.errors import OutboxError, SchemaError
from relay.core.lane import Lane, Lanes, LoopSettings
from relay.core.lease import HeldLanes
from relay.core.marker import StateLost
from relay.core.pauses import CurrentPauses
from relay.core.ports import (
    NOTHING,
    Batches,
    BatchRefused,
    BrokerUnavailable,
    Completed,
    Confirm,
    DatabaseUnavailable,
    DeliveryTimeout,
    Failed,
    Fetched,
    LaneLost,
    NotFenced,
    Publisher,
    Sent,
    Source,
    StatementCutShort,
    Unavailable,
    Unconfirmed,
    UnsettledBatch,
)
from relay.core.reports import LoopReports
from relay.core.turn_sizes import TurnSizes
from relay.core.unsettled import pause_after_lock, settle_again

# Where no session can be had for this long, recalled lanes are let go of with their events not settled.
_SESSION_SECONDS: Final = 10.0


class WorkerLoop:
    """Publishes the lanes that it is given until it is stopped.

    After a failure of the whole turn (``_back_off``) source and publisher are created anew, the publisher after the
    source and before anything is read: a transactional publisher fences its predecessor and makes the source settle
    what that one committed. A refused batch or a failed lane keeps the source, and the publisher if it is usable.
    Acknowledged events are settled before anything more is published: if settling never succeeds, a lane stands still
    instead of sending its batch again and again. ``stop`` ends the loop after the current turn; then all lanes are
    released.
    """

    def __init__(
        self,
        source: Callable[[], Source],
        publisher: Callable[[Source], Publisher],
        *,
        held: HeldLanes,
        stop: threading.Event,
        observer: LoopReports,
        settings: LoopSettings,
        pauses: CurrentPauses | None = None,
    ) -> None:
        self._new_source = source
        self._new_publisher = publisher
        self._held = held
        self._stop = stop
        self._observer = observer
        self._settings = settings
        self._pauses = pauses or CurrentPauses()
        self._source: Source | None = None
        self._publisher: Publisher | None = None
        self.lanes = Lanes()
        self._backoff = settings.backoff()
        self._sizes = TurnSizes(settings.batch_size, self.lanes)
        self.failing_since: float | None = None
        """When the current series of failures to publish began, by time.monotonic(); None after a success, and while
        what is published can't be settled.
        """
        self.without_session_since: float | None = None
        """Since when no session of the database can be had, so that nothing can be settled, by time.monotonic(); else
        None. Of no meaning without lanes.
        """
        self.turned_at = time.monotonic()
        """When the last turn ended, or an idle loop last checked, by time.monotonic()."""
        self.has_succeeded = False  # whether there has been a turn without a failure
        self._retries_apart = True  # whether retried events get a publish of their own in the next turn
        self._acknowledged_at = 0.0  # when the last publish returned

    def run(self) -> None:
        try:
            while not self._stop.is_set():
                self.turned_at = time.monotonic()
                try:
                    if not self._turn():
                        self._idle()
                except (Unavailable, SchemaError, StateLost) as error:
                    self._back_off(error)
            self._finish()
        finally:
            self._close()

    # A turn

    def _turn(self) -> bool:
        """Publish one batch of each lane that has one. Returns whether there was anything to publish, or may be now.

        The order matters. Pauses are read after lanes, as the control loop hands them over before lanes. A lane is
        joined after ``serve``, which may make a producer for it, and read after both: the read checks the leases.
        """
        self._take_and_let_go()
        self._pauses.obeyed = self._pauses.now
        if not self.lanes:
            # The stream ends with its lanes; the connections are opened again when lanes come.
            self._close()
            return False
        source = self._open_source()
        self._settle_again(source)
        if self._publisher is None:
            self._publisher = self._new_publisher(source)
        self._publisher.serve()
        self._join(self._publisher)
        ready = self.lanes.ready()
        paused = {number for number in ready if self._pauses.obeyed.covers(number)}
        source.go_on_without(self.lanes.failing_long())
        paused_cleanly = self._pause(source, paused)
        limits = self._sizes.limits([number for number in ready if number not in paused])
        self._observer.turn_limits(*self._sizes.most)
        if not limits:
            if paused_cleanly:
                self._succeeded(paused_cleanly)
            return False
        source.leave_out(self._publisher.unpublishable_kinds())
        began = time.monotonic()
        fetched = source.fetch(limits)
        read_seconds = time.monotonic() - began
        self._sizes.note_taken(limits, fetched.batches)
        healthy = limits.keys() - fetched.failed.keys()
        if not fetched.unconfirmed:
            self.lanes.note_settled(healthy - set(fetched.settling))
        self._handle_failed(fetched.failed)
        if not fetched.batches:
            if fetched.known:
                self._succeeded(healthy)
            return self._sizes.lanes_wait
        began = time.monotonic()
        publish_seconds = self._publish(self._publisher, source, fetched, healthy)
        count = sum(map(len, fetched.batches.values()))
        self._observer.turn(count, read_seconds, publish_seconds, time.monotonic() - began - publish_seconds)
        return True

    def _publish(self, publisher: Publisher, source: Source, fetched: Fetched, healthy: set[int]) -> float:
        """Publish what was read, and settle it. Returns how long publishing took.

        Events that were refused before come last, so that they fail no others, and only if the others are published:
        after a refusal a new producer may fence the relay that has taken a lane meanwhile, and only the next fetch
        checks the leases. If they time out, or their leases may not last, they go with the others once: a topic that
        answers nothing is recognized beside others that answer.
        """
        settling, seconds = set(fetched.settling), 0.0
        confirm = source.confirm if fetched.unconfirmed else None
        retried = set(fetched.retried) if self._retries_apart else set()
        self._retries_apart = True
        if others := self._joined_of(fetched.batches, fetched.batches.keys() - retried):
            sent, seconds = self._send(publisher, others, confirm)
            self._conclude(sent, source, others, healthy, settling, narrow=True)
            if publisher is not self._publisher or not isinstance(sent, Completed):
                return seconds
            healthy, settling = set(), set()
        last = self._joined_of(fetched.batches, retried)
        if 0 < len(last) < len(fetched.batches) and not self.lanes.outlast(last, self._settings.delivery_seconds):
            # The next fetch renews the leases.
            self._retries_apart = False
        elif last:
            sent, seconds_more = self._send(publisher, last, confirm)
            seconds += seconds_more
            late = isinstance(sent, Failed) and isinstance(sent.error, DeliveryTimeout)
            self._retries_apart = not late
            # A timeout of retried events alone does not halve the turns of the others.
            self._conclude(sent, source, last, healthy, settling, narrow=not late)
        return seconds

    def _joined_of(self, batches: Batches, numbers: Collection[int]) -> Batches:
        """Return the batches of these lanes, but for lanes that have failed or been lost since they were read."""
        return {n: batch for n, batch in batches.items() if n in numbers and n in self.lanes and self.lanes[n].joined}

    def _send(self, publisher: Publisher, batches: Batches, confirm: Confirm | None) -> tuple[Sent, float]:
        began = time.monotonic()
        sent = publisher.publish(batches, confirm)
        self._acknowledged_at = time.monotonic()
        return sent, self._acknowledged_at - began

    def _conclude(
        self, sent: Sent, source: Source, batches: Batches, healthy: set[int], settling: set[int], *, narrow: bool
    ) -> None:
        match sent:
            case Unconfirmed(lanes, publisher_unusable):
                # Lanes that are still ours are read again.
                if publisher_unusable:
                    self._close_publisher()
                self._handle_failed(lanes)
            case Failed(DatabaseUnavailable() as error):
                # Nothing is published. Settling would wait for the statement that has taken too long.
                raise error
            case Failed(error):
                self._settle(source, self._sizes.narrowed(batches, sent) if narrow else sent, settling)
                # What was refused is narrowed down by the next turns, without waiting.
                if not isinstance(error, BatchRefused):
                    raise error
            case Completed(receipts):
                failed = self._settle(source, sent, settling)
                self._sizes.completed(receipts.keys())
                self._succeeded([number for number in healthy if number not in failed])
            case _:
                assert_never(sent)

    def _take_and_let_go(self) -> None:
        for lease in self._held.leases:
            if (known := self.lanes.get(lease.lane)) is not None and known.lease is lease:
                continue
            lane = self.lanes[lease.lane] = Lane(lease, self._settings.backoff())
            if known is not None:
                # The lease has expired and was taken again: published events still have to be settled.
                self._sizes.forget([lease.lane])
                lane.unsettled = known.unsettled
            if self._source is not None:
                self._source.hold(lease)
        if self._let_go_of_settled():
            self._settle_recalled()

    def _let_go_of_settled(self) -> set[int]:
        """Let go of the recalled lanes that need no settling first. Returns the recalled lanes that are kept."""
        recalled = self._held.recalled & self.lanes.keys()
        left = {number for number in recalled if self.lanes[number].unsettled and not self.lanes[number].joined}
        if done := recalled - left:
            self._let_go(done)
        return left

    def _settle_recalled(self) -> None:
        """Settle the published events of recalled lanes, which the next holders would send again. Lanes are kept until
        that succeeds, except if they are overdue, or if no session can be had for long: another relay may have one.
        """
        given_up = self._held.overdue
        try:
            self._settle_again(self._open_source())
        except (Unavailable, SchemaError):
            since = self.without_session_since
            if since is not None and time.monotonic() - since >= _SESSION_SECONDS:
                given_up = self._held.recalled
            if not given_up:
                raise
        for number in self._let_go_of_settled() & set(given_up):
            self._drop(number, clean=False, lost=False)

    def _open_source(self) -> Source:
        if self._source is None:
            source = self._source = self._new_source()
            self.without_session_since = None
            for lane in self.lanes.values():
                source.hold(lane.lease)
        return self._source

    def _settle_again(self, source: Source, *, last: bool = False) -> None:
        """Settle what former sources may not have settled, of lanes that are due for another attempt.

        ``last``: each lane is tried once more, as there will be no other time.
        """
        for lane in self.lanes.to_settle(last=last):
            number, began = lane.lease.lane, time.monotonic()
            if number not in self.lanes:
                continue
            failed = settle_again(source, lane)
            self._handle_failed(failed, time.monotonic() - began)
            if isinstance(failed.get(number), StatementCutShort) and not last:
                # The others may wait for locks as well: one in a turn.
                break

    def _join(self, publisher: Publisher) -> None:
        if not (due := self.lanes.to_join()):
            return
        try:
            failed = publisher.join(due)
        except NotFenced as error:
            if not any(lane.joined for lane in self.lanes.values()):
                raise
            failed = dict.fromkeys((lease.lane for lease in due), BrokerUnavailable(str(error)))
        for lease in due:
            if lease.lane not in failed:
                self.lanes[lease.lane].joined = True
        self._handle_failed(failed)

    def _pause(self, source: Source, lanes: Collection[int]) -> list[int]:
        """Settle lanes that are paused from now on, and make the source read nothing of them.

        Returns the lanes for which that succeeded. A pause leaves a relay ready, whatever becomes of other lanes.
        """
        new = [number for number in lanes if not self.lanes[number].paused]
        if not lanes and not any(lane.paused for lane in self.lanes.values()):
            return []
        failed: Mapping[int, OutboxError] = source.flush(new) if new else {}
        self.lanes.note_settled([number for number in new if number not in failed])
        failed = {**failed, **source.pause([number for number in lanes if number not in failed])}
        for number, lane in self.lanes.items():
            lane.paused = number in lanes and number not in failed
        self._handle_failed(failed)
        cleanly = [number for number in lanes if number not in failed]
        if back := self.lanes.succeeded(cleanly):
            self._observer.recovered(back)
        return cleanly

    def _handle_failed(self, failed: Mapping[int, OutboxError], waited_seconds: float = 0.0) -> None:
        """Handle failed lanes: drop those that another relay has taken, and retry the others later.

        ``waited_seconds``: how long lanes have waited whose rows were locked.
        """
        by_text: dict[str, list[tuple[OutboxError, int, float]]] = {}
        for number, error in failed.items():
            if (lane := self.lanes.get(number)) is None:
                continue
            lane.joined = False
            if isinstance(error, LaneLost):
                self._observer.unavailable([number], error, 0.0)
                self._drop(number, clean=False, lost=True)
                continue
            cut_short = isinstance(error, StatementCutShort)
            delay = lane.backoff.failed(pause_after_lock(lane, waited_seconds) if cut_short else 0.0)
            by_text.setdefault(str(error), []).append((error, number, delay))
        for same in by_text.values():
            errors, numbers, delays = zip(*same, strict=True)
            self._observer.unavailable(numbers, errors[0], max(delays))

    # What became of a turn

    def _settle(self, source: Source, sent: Completed | Failed, settling: Collection[int]) -> Mapping[int, OutboxError]:
        """Record what became of the events. Returns the lanes for which that has failed."""
        published: dict[int, UnsettledBatch] = {}
        for number, receipt in sent.receipts.items():
            lane = self.lanes.get(number) if receipt.published.number is None else None
            if lane is not None and receipt.published:
                published[number] = receipt.published
                # The turn before may or may not be settled by now.
                lane.unsettled = lane.unsettled.then(receipt.published) if number in settling else receipt.published
        # Before they are settled: if that fails, they are settled again without a receipt.
        if rows := [receipt.published.rows for receipt in sent.receipts.values() if receipt.published.rows]:
            self._observer.published(rows, self._acknowledged_at)
        began = time.monotonic()
        failed = source.settle(sent.receipts)
        waited_seconds = time.monotonic() - began
        for number in settling:
            if number not in failed and (known := self.lanes.get(number)) is not None:
                known.unsettled = published.get(number, NOTHING)
        for number, receipt in sent.receipts.items():
            for claim, reason in receipt.refused:
                self._observer.refused(number, claim, reason)
        if sent.publisher_unusable:
            # Acknowledged events must not be sent again only because something else failed.
            failed = {**failed, **source.flush(list(sent.receipts))}
            self.lanes.note_settled(sent.receipts.keys() - failed.keys())
            self._close_publisher()
        self._handle_failed(failed, waited_seconds)
        return failed

    def _succeeded(self, healthy: Collection[int]) -> None:
        """Record a turn of these lanes that did not fail. Other lanes may still wait."""
        self.failing_since, self.has_succeeded = None, True
        back = self.lanes.succeeded(healthy)
        if self._backoff.succeeded():
            back = [number for number, lane in self.lanes.items() if not lane.backoff.failures]
        if back:
            self._observer.recovered(back)

    def _idle(self) -> None:
        """Wait until there may be something to do."""
        if self._publisher is not None:
            self._publisher.serve()
        lanes = [number for number in self.lanes.ready() if not self._pauses.obeyed.covers(number)]
        seconds = self._settings.max_idle_seconds
        if self._source is None or not lanes:
            self._stop.wait(min(seconds, 0.05))
            return
        if waits := [lane.backoff.until - time.monotonic() for lane in self.lanes.values() if not lane.joined]:
            seconds = min(seconds, max(min(waits), 0.01))
        while not self._source.wait(lanes, seconds, self._stop):
            self.turned_at = time.monotonic()
            if self._publisher is not None:
                self._publisher.serve()
            if self._stop.is_set() or waits or self._changed():
                return

    def _changed(self) -> bool:
        """Return whether lanes were given or recalled, pauses have changed, or a lease is no longer secure."""
        return (
            bool(self._held.recalled)
            or self._pauses.now is not self._pauses.obeyed
            or {lease.lane for lease in self._held.leases} != self.lanes.keys()
            or not all(lane.lease.secure for lane in self.lanes.values())
        )

    # Failures

    def _back_off(self, error: Exception) -> None:
        if self._source is None and self.without_session_since is None:
            self.without_session_since = time.monotonic()
        self._close()
        if self.without_session_since is None and self.lanes.has_unsettled and not isinstance(error, BrokerUnavailable):
            # Kafka can be reached. Another relay would send again what can't be settled.
            self.failing_since = None
        elif self.failing_since is None:
            self.failing_since = time.monotonic()
        for lane in self.lanes.values():
            # A failure of all lanes says nothing about one.
            lane.backoff.since = None
        delay = self._backoff.failed()
        self._observer.unavailable(list(self.lanes), error, delay)
        self._stop.wait(max(self._backoff.until - time.monotonic(), 0.0))

    # Letting go

    def _let_go(self, lanes: Collection[int]) -> None:
        """Settle these lanes, and let go of them; when stopped, even if that fails."""
        failed = {} if self._source is None else self._source.flush(lanes)
        if not self._stop.is_set():
            kept = {number: failed[number] for number in failed.keys() & lanes if self.lanes[number].unsettled}
            # Drops those that are lost.
            self._handle_failed(kept)
            lanes = [number for number in lanes if number not in kept]
        for number in list(lanes):
            clean = self.lanes[number].joined and number not in failed
            self._drop(number, clean=clean, lost=isinstance(failed.get(number), LaneLost))

    def _drop(self, number: int, *, clean: bool, lost: bool) -> None:
        if self._source is not None:
            self._source.drop(number)
        self._sizes.forget([number])
        self._held.let_go(self.lanes.pop(number).lease, clean=clean, lost=lost)

    def _finish(self) -> None:
        """Settle the last turn and let go of the lanes. If that fails, the outcome is that of a kill."""
        try:
            if self.lanes.has_unsettled:
                self._settle_again(self._open_source(), last=True)
            self._let_go(list(self.lanes))
        except (Unavailable, SchemaError) as error:
            self._observer.unavailable(list(self.lanes), error, 0.0)
            for number in list(self.lanes):
                self._drop(number, clean=False, lost=False)

    def _close(self) -> None:
        source, self._source = self._source, None
        try:
            self._close_publisher()
        finally:
            if source is not None:
                source.close()

    def _close_publisher(self) -> None:
        publisher, self._publisher = self._publisher, None
        for lane in self.lanes.values():
            lane.joined = False
        if publisher is not None:
            publisher.close()
