"""Effects outside the database that take place once: call a payment provider, send a mail.

The task's transaction writes a row into ``consumer.reservations`` together with the offsets. A caller claims rows in
short transactions, calls with the event's id as the key, and settles the row with the answer; ``state_machine`` has the
transitions.

| crash point                                     | the row's state            | what follows                         |
|-------------------------------------------------|----------------------------|--------------------------------------|
| before the task's COMMIT                        | there is no row            | the range is read again              |
| after it, before a claim                        | reserved                   | claimed                              |
| after the claim, before the call                | calling, past its lease    | called again with the same key       |
| during the call, done by the provider or not    | the same                   | the same: the provider's key decides |
| during it Postgres stops, and loses commits     | the same: a claim's COMMIT | the same                             |
| (synchronous_commit off)                        | is durable                 |                                      |
| the answer came, killed before COMMIT           | the same                   | the same                             |
| COMMIT was sent, its answer is lost             | confirmed or cancelled     | nothing: a settled row stays so      |
| the SQL that goes with it fails                 | reserved, has the response | only the SQL is tried again          |
| that SQL always ends its session                | the same, after a few      | the same; other answers come first   |
| between refusal and cancellation                | cancelling                 | cancelled with the cancel's own key  |
| during the cancellation                         | cancelling, past its lease | cancelled again with the same key    |
| a caller hangs for longer than its lease        | another attempt's          | its late answer is still evaluated   |
| the database is away when the answer comes      | calling                    | settled when it is back; a caller    |
|                                                 |                            | that stops waits as long as the lease|
| before a claim that parks is committed          | reserved                   | parked by the next claim             |
| parked behind an earlier call of its key        | reserved, parked           | released by that one's settlement,   |
|                                                 |                            | in the same transaction              |
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal
from uuid import UUID

import psycopg

from outbox._clients.backoff import FIRST, doubled, jittered
from outbox._clients.clock import uptime
from outbox._clients.postgres import first_line
from outbox.consumer.connections import OwnSession
from outbox.consumer.errors import ConsumerUnavailable, Interrupted
from outbox.consumer.patience import NoTimeLeft, Patience
from outbox.consumer.postgres_errors import AWAY, clear_errors
from outbox.external.declaration import Call, Done, External, OutcomeUnknown, Refused, TryLater
from outbox.external.reservations import Answered, ClaimedCall, Reservations
from outbox.external.state_machine import Answer, Step, Transition

_LONGEST_PAUSE: Final = 5.0
_UNAVAILABLE_ERRORS: Final = (*AWAY, ConsumerUnavailable, Interrupted)
_TOO_LATE: Final = Answer("later", "the lease ran out before the call")

Report = Callable[[str, Mapping[str, Any]], None]
Connect = Callable[[], psycopg.Connection[Any]]
Until = Literal["due", "settled", "stopped"]
"""due: until nothing is due. settled: until only stuck calls, which wait for operators, are open. stopped: forever."""


@dataclass
class Counts:
    """The figures of a caller. ``attempts`` counts claims; ``late`` counts answers that came too late to matter."""

    name: str
    attempts: int = 0
    confirmed: int = 0
    cancelled: int = 0
    stuck: int = 0
    retrying: int = 0
    late: int = 0
    conflicts: int = 0


@dataclass(slots=True)
class _Attempt:
    claim: ClaimedCall
    until: float
    overdue: bool = False


class Caller:
    """Claims, calls and settles the reservations of one External. Callers in several processes share the work.

    connect   opens a connection in autocommit mode. One is open at a time, without a transaction during calls.
    report    called with what happens: a short text and its figures.
    patience  seconds to wait for a database that is away, None forever. ConsumerUnavailable is raised after that; see
              outbox/consumer/patience.py.

    Calls run in threads of their own, ``workers`` at a time; only this thread uses the database.
    """

    def __init__(
        self, external: External, connect: Connect, report: Report | None = None, patience: float | None = 60.0
    ) -> None:
        self._external = external
        self._session = OwnSession(connect, autocommit=True)
        self._report = report or (lambda _text, _figures: None)
        self._patience = Patience(patience)
        self._reservations = Reservations(external)
        self._running: dict[tuple[UUID, int], _Attempt] = {}
        self._answers: queue.SimpleQueue[Answered] = queue.SimpleQueue()
        self._unsettled: list[Answered] = []
        self._last_error = ""
        self._tries = 0
        self.counts = Counts(external.name)

    def run(self, stop: threading.Event, until: Until = "settled", poll: float = 0.5) -> Counts:
        """Work until ``until`` is reached or ``stop`` is set. Then no more calls begin, and those under way end.

        poll  seconds between checks for new reservations. Raises ConsumerUnavailable.
        """
        try:
            with clear_errors(f"calling for {self._external.name}"):
                while not stop.is_set():
                    try:
                        with self._patience.attempt():
                            wait = self._round(until, poll)
                    except _UNAVAILABLE_ERRORS as error:
                        wait = self._pause_without_database(error)
                    if wait is None:
                        break
                    self._wait_for_answer(stop, wait)
                self._finish()
        finally:
            self._session.close()
        return self.counts

    def settle_by_hand(self, message_id: UUID, *, confirmed: bool, why: str) -> None:
        """Settle a stuck or conflicting reservation with the outcome that an operator knows, and run its SQL.

        Raises NotFound for any other, and ConsumerError when the SQL fails.
        """
        try:
            with clear_errors("settling by hand"):
                self._reservations.settle_by_hand(self._session.connected(), message_id, confirmed=confirmed, why=why)
        finally:
            self._session.close()

    def _round(self, until: Until, poll: float) -> float | None:
        """Settle answers and claim more calls. Returns the seconds until the next round; None at the end."""
        self._settle()
        connection = self._session.connected()
        free = self._external.workers - len(self._running)
        claims: list[ClaimedCall] = []
        if free > 0:
            began = uptime()
            claims, stuck = self._reservations.claim(connection, free)
            if stuck:
                self.counts.stuck += stuck
                self._report("reservations are stuck: see `outbox external list`", {"stuck": stuck})
            for claim in claims:
                self._start(claim, began)
            if (stuck and not claims) or self._reservations.more_due:
                self._database_answered()
                return 0.0
        self._database_answered()
        if self._running or until == "stopped":
            return poll
        if until == "due":
            return None
        due = self._reservations.next_due(connection)
        if due is None:
            return None
        # A reservation that is due but can't be claimed is another caller's, or waits behind one that is not due.
        return min(poll, due) if due > 0 else poll

    def _wait_for_answer(self, stop: threading.Event, wait: float) -> None:
        if not self._running:
            stop.wait(wait)
            return
        deadline = time.monotonic() + wait
        # ``stop`` is checked between short waits; with calls under way there is no need to be faster.
        while not stop.is_set():
            left = deadline - time.monotonic()
            try:
                self._collect(self._answers.get(timeout=max(0.0, min(left, 0.2))))
            except queue.Empty:
                self._warn_of_overdue()
                if left > 0:
                    continue
            return

    def _finish(self) -> None:
        """Wait for the calls under way, and for the database, as long as their leases last, and settle them."""
        while self._running or self._unsettled:
            ends = max((attempt.until for attempt in self._running.values()), default=0.0)
            if self._running:
                try:
                    self._collect(self._answers.get(timeout=max(0.0, ends - uptime())))
                except queue.Empty:
                    self._report("calls did not end in time; they are resumed later", {"calls": len(self._running)})
                    self._running.clear()
            try:
                with self._patience.attempt():
                    self._settle()
                self._database_answered()
            except _UNAVAILABLE_ERRORS as error:
                pause = self._pause_without_database(error)
                if not self._running:
                    if uptime() + pause > max(answered.until for answered in self._unsettled):
                        self._report("answers can't be settled in time", {"calls": len(self._unsettled)})
                        return
                    time.sleep(pause)

    def _start(self, claim: ClaimedCall, began: float) -> None:
        self.counts.attempts += 1
        until = began + self._external.lease_seconds
        self._running[claim.message_id, claim.attempt] = _Attempt(claim, until)
        if claim.step in {"confirm", "close"}:
            # The provider is done; only the SQL is left.
            self._answers.put(Answered(claim, claim.step, Answer("done", response=claim.response), until))
            return
        thread = threading.Thread(
            target=self._call, args=(claim, until), name=f"external {claim.message_id}", daemon=True
        )
        thread.start()

    def _call(self, claim: ClaimedCall, until: float) -> None:
        """Make the call, in a thread of its own. Any result becomes an answer."""
        step, answer = claim.step, _TOO_LATE
        try:
            if self._has_time(until):
                step, answer = self._ask_or_call(claim, until)
        except BaseException as error:  # noqa: BLE001  every call must get an answer
            answer = Answer("unknown", f"{type(error).__name__}: {error}")
        self._answers.put(Answered(claim, step, answer, until))

    def _has_time(self, until: float) -> bool:
        """Return whether a call that begins now ends within its lease: after that, another caller may make it."""
        return uptime() + self._external.timeout <= until

    def _ask_or_call(self, claim: ClaimedCall, until: float) -> tuple[Step, Answer]:
        external = self._external
        key = f"{claim.message_id}{external.key_suffix}"
        call = Call(
            f"{key}:cancel" if claim.step == "cancel" else key,
            key,
            claim.message_id,
            claim.request,
            claim.attempt,
            external.timeout,
            claim.topic,
            claim.part,
            claim.message_offset,
        )
        if claim.step == "cancel":
            assert external.cancel is not None
            return "cancel", _answer_of(external.cancel, call)
        if claim.step == "ask":
            assert external.ask is not None
            answer = _answer_of(external.ask, call)
            if answer.outcome != "done":
                return "ask", answer
            if isinstance(answer.response, Done):
                return "ask", Answer("done", response=answer.response.response)
            if answer.response is not None:
                kind = type(answer.response).__name__
                return "ask", Answer("unknown", f"ask must give Done or None, and gave {kind}")
            if not self._has_time(until):
                return "ask", _TOO_LATE
        return "call", _answer_of(external.call, call)

    def _collect(self, answered: Answered) -> None:
        self._running.pop((answered.claim.message_id, answered.claim.attempt), None)
        self._unsettled.append(answered)

    def _settle(self) -> None:
        while not self._answers.empty():
            self._collect(self._answers.get())
        while self._unsettled:
            answered = self._unsettled[0]
            try:
                transition, failed = self._reservations.settle(self._session.connected(), answered)
            except Interrupted as error:
                # The server answers, so the SQL may be the cause: the other answers come first.
                self._patience.renew()
                self._unsettled.append(self._unsettled.pop(0))
                if answered.strikes.strike(error.__cause__):
                    answered.failed = str(error)
                raise
            self._unsettled.pop(0)
            self._count(answered, transition, failed)

    def _count(self, answered: Answered, transition: Transition | None, failed: str | None) -> None:
        counts = self.counts
        figures: dict[str, Any] = {"message_id": str(answered.claim.message_id), "attempt": answered.claim.attempt}
        if transition is None:
            counts.late += 1
            self._report("an answer came late", figures | {"answer": answered.answer.outcome})
            return
        if transition.conflict is not None:
            counts.conflicts += 1
            self._report("the provider contradicts itself", figures | {"conflict": transition.conflict})
            return
        counted = transition.state if transition.state in {"confirmed", "cancelled", "stuck"} else "retrying"
        setattr(counts, counted, getattr(counts, counted) + 1)
        if transition.error or failed:
            figures |= {"error": failed or transition.error}
        self._report(transition.state, figures | {"answer": answered.answer.outcome})

    def _warn_of_overdue(self) -> None:
        now = uptime()
        for attempt in self._running.values():
            if now > attempt.until and not attempt.overdue:
                attempt.overdue = True
                self._report(
                    "a call does not keep its timeout: its thread is not free for others",
                    {"message_id": str(attempt.claim.message_id), "attempt": attempt.claim.attempt},
                )

    def _database_answered(self) -> None:
        self._patience.renew()
        self._tries = 0

    def _pause_without_database(self, error: Exception) -> float:
        """Return how many seconds to wait for the database. Raises ConsumerUnavailable after ``patience``."""
        self._patience.failed()
        if not (self._last_error and isinstance(error, NoTimeLeft)):
            self._last_error = first_line(error)
        if self._patience.left <= 0:
            raise ConsumerUnavailable(
                f"{self._external.name}: gave up after {self._patience.seconds:g} s without the database; nothing is "
                f"lost, run it again. Last error: {self._last_error}"
            ) from error
        self._session.close()
        pause = min(jittered(doubled(self._tries, FIRST, _LONGEST_PAUSE)), self._patience.left)
        self._tries += 1
        self._report("waiting for the database", {"error": self._last_error, "wait_seconds": round(pause, 1)})
        return pause


def _answer_of(function: Callable[[Call], Any], call: Call) -> Answer:
    try:
        return Answer("done", response=function(call))
    except Refused as refusal:
        return Answer("refused", str(refusal))
    except TryLater as later:
        return Answer("later", str(later), retry_after=_seconds(later.retry_after))
    except OutcomeUnknown as unknown:
        return Answer("unknown", str(unknown), retry_after=_seconds(unknown.retry_after))
    except Exception as error:  # noqa: BLE001  a user's function: the call may have been made, whatever the error
        return Answer("unknown", f"{type(error).__name__}: {error}")


def _seconds(given: Any) -> float | None:
    """Return what a user's function gave as seconds, as text too; None for what is no number."""
    try:
        return float(given)
    except (TypeError, ValueError, ArithmeticError):
        return None
