"""Effects outside the database that count once: call a payment provider, send a mail.

The task's transaction writes a row into ``consumer.reservations`` beside the offsets. A caller claims rows in short
transactions, calls with the event's id as the key, and settles with the answer; ``state_machine`` says what follows
from what.

| crash point                                     | what the row says          | what follows                         |
|-------------------------------------------------|----------------------------|--------------------------------------|
| before the task's COMMIT                        | there is none              | the range is read again              |
| after it, before a claim                        | reserved                   | claimed                              |
| after the claim, before the call                | calling, past its lease    | called again with the same key       |
| during the call, done by the provider or not    | the same                   | the same: the provider's key decides |
| the answer came, killed before COMMIT           | the same                   | the same                             |
| COMMIT was sent, its answer is lost             | confirmed or cancelled     | nothing: a settled row stays so      |
| the SQL beside it fails                         | reserved, has the response | only the SQL is tried again          |
| between refusal and cancellation                | cancelling                 | cancelled with the cancel's own key  |
| during the cancellation                         | cancelling, its lease      | cancelled again with the same key    |
| a caller stands still for longer than its lease | another attempt's          | its late answer is weighed, not lost |
| the database is away when the answer comes      | calling                    | settled when it is back              |

What the provider must keep: a key has one outcome, for as long as ``key_seconds``; and a cancellation also holds
against a call with that key that arrives after it.
"""

from __future__ import annotations

import functools
import math
import os
import queue
import random
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal
from uuid import UUID

import psycopg
from psycopg import sql
from psycopg.types.json import Jsonb

from spark_jobs.errors import ConsumerError, ConsumerUnavailable, JobError
from spark_jobs.external.reservations import Claim, Reservations, SqlEffect
from spark_jobs.external.state_machine import Answer, Change, Rules, Step
from spark_jobs.job import find_declared
from spark_jobs.patience import NoTimeLeft, Patience
from spark_jobs.postgres.connections import Age
from spark_jobs.postgres.errors import AWAY, clear_errors, first_line

_NAME: Final = re.compile(r"[a-zA-Z0-9._-]{1,100}")
_RESERVE: Final = """
INSERT INTO {reservations} (grp, name, message_id, topic, part, message_offset, order_key, request)
SELECT {grp}, {name},
       CASE count(*) OVER (PARTITION BY message_topic, message_part, message_offset) WHEN 1 THEN message_id
            ELSE concat('more than one row of message ', message_id, ': External makes one call for each')::uuid END,
       message_topic, message_part, message_offset, ({order_by})::text, {request}
  FROM batch WHERE {where} ORDER BY message_topic, message_part, message_offset
    ON CONFLICT (grp, name, message_id) DO NOTHING"""
_MARGIN: Final = 5.0
_AWAY: Final = (*AWAY, ConsumerUnavailable)


class Refused(ConsumerError):
    """The provider has said no, for good. Raised by ``call``, ``ask`` or ``cancel``."""


class TryLater(ConsumerError):
    """Nothing happened at the provider; the same call may succeed later. ``retry_after`` is in seconds."""

    def __init__(self, text: str, retry_after: float | None = None) -> None:
        super().__init__(text)
        self.retry_after = retry_after


class OutcomeUnknown(ConsumerError):
    """The provider may have done it: no answer, or one that does not say. ``retry_after`` is in seconds."""

    def __init__(self, text: str, retry_after: float | None = None) -> None:
        super().__init__(text)
        self.retry_after = retry_after


@dataclass(frozen=True, slots=True)
class Call:
    """What a function of the user's is called with. ``timeout`` is in seconds, and is the function's to keep.

    key       the Idempotency-Key: the same in every attempt. That of a cancellation ends in ``:cancel``.
    call_key  the key of the call itself; for ``ask`` and ``cancel``.
    attempt   from 1, over all attempts.
    """

    key: str
    call_key: str
    message_id: UUID
    request: Any
    attempt: int
    timeout: float
    topic: str
    part: int
    message_offset: int


@dataclass(frozen=True, slots=True)
class Done:
    """What ``ask`` gives when the provider has done the call. ``response`` is kept, as JSON."""

    response: Any = None


@dataclass(frozen=True, slots=True)
class Settled:
    """What SQL beside a settlement is about. In SQL text: ``%(message_id)s``, ``%(request)s``, ``%(response)s``."""

    message_id: UUID
    request: Any
    response: Any


Effect = str | Callable[[psycopg.Cursor[Any], Settled], None]
Report = Callable[[str, Mapping[str, Any]], None]
Connect = Callable[[], psycopg.Connection[Any]]


@dataclass(frozen=True, slots=True)
class External:
    """One kind of call to one provider, beside a ConsumerJob whose effect is, or contains, ``reserve()``.

    name, group     names it among the group's reservations; ``group`` is the ConsumerJob's. It makes one call for a
                    message: where a transform makes several rows of one, ``where`` has to leave one of them.
    request         SQL expression over ``batch`` that gives jsonb: what the call needs to know.
    call            makes the call, with ``key`` as its Idempotency-Key. Returns the response, to be kept as JSON, or
                    raises Refused, TryLater or OutcomeUnknown. Any other exception counts as OutcomeUnknown.
    cancel          takes back what a call may have done; is called after a refusal that follows an attempt without an
                    answer, or by hand. Must also succeed when there is nothing to take back.
    ask             looks what became of ``call_key`` at the provider: gives Done or None, raises Refused. Asked before
                    a call is repeated that may have been done.
    on_confirmed    SQL, or a function of a cursor and Settled, done in the transaction that settles.
    on_cancelled    the same for a cancelled one: refused, or taken back.
    where           SQL condition over ``batch``: which messages are called for. Tombstones are not, by default.
    order_by        SQL expression over ``batch``: calls with the same one go out in the order of their messages, each
                    after the one before has been settled. None: in no order.
    workers         how many calls at a time, in one process.
    timeout         of a call, in seconds; given to the functions.
    max_attempts    after that many it is stuck, until somebody looks.
    first_wait, longest_wait    seconds between attempts: doubled each time, with jitter.
    key_seconds     for how long the provider knows a key. After that a call that may have been done is not repeated.
    lease           seconds after which an attempt counts as lost; longer than a call can take. None: from ``timeout``.
    key_suffix      ends the keys: for a second effect of the same messages at the same provider.
    schema          of the consumers' tables.

    Raises JobError for a declaration that can't work.
    """

    name: str
    group: str
    request: str
    call: Callable[[Call], Any]
    cancel: Callable[[Call], Any] | None = None
    ask: Callable[[Call], Done | None] | None = None
    on_confirmed: Effect | None = None
    on_cancelled: Effect | None = None
    where: str = "NOT message_tombstone"
    order_by: str | None = "message_key"
    workers: int = 4
    timeout: float = 30.0
    max_attempts: int = 12
    first_wait: float = 1.0
    longest_wait: float = 600.0
    key_seconds: float = 86_400.0
    lease: float | None = None
    key_suffix: str = ""
    schema: str = "consumer"

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise JobError(f"name: {self.name!r} must be 1 to 100 letters, digits, dots, dashes or underscores")
        if not self.group:
            raise JobError("group: must be the ConsumerJob's")
        for name in ("request", "where"):
            if not getattr(self, name).strip():
                raise JobError(f"{name}: must be an SQL expression over batch")
        for name in ("timeout", "first_wait", "longest_wait", "key_seconds"):
            if not 0 < getattr(self, name) < math.inf:
                raise JobError(f"{name}: must be a number of seconds above 0")
        if self.workers < 1 or self.max_attempts < 1:
            raise JobError("workers and max_attempts: must be at least 1")
        if self.lease is not None and not self.lease > self.timeout:
            raise JobError("lease: must be longer than timeout, or calls would be repeated while they are under way")

    @property
    def rules(self) -> Rules:
        """What the decisions need."""
        return Rules(
            self.max_attempts, self.ask is not None, self.cancel is not None, self.first_wait, self.longest_wait
        )

    @property
    def lease_seconds(self) -> float:
        """How long an attempt may take: asking and calling, and a margin."""
        return self.lease or self.timeout * (2 if self.ask else 1) * 1.5 + _MARGIN

    def reserve(self) -> str:
        """Return the SQL that reserves, for a ConsumerJob's effect, alone or after other statements and a semicolon."""
        composed = sql.SQL(_RESERVE).format(
            reservations=sql.Identifier(self.schema, "reservations"),
            grp=sql.Literal(self.group),
            name=sql.Literal(self.name),
            order_by=sql.SQL(self.order_by or "NULL"),
            request=sql.SQL(self.request),
            where=sql.SQL(f"({self.where})"),
        )
        return composed.as_string(None)

    def drain(
        self,
        connect: Connect,
        stop: threading.Event,
        *,
        until: Until = "settled",
        report: Report | None = None,
        patience: float | None = 60.0,
    ) -> Counts:
        """Call and settle; see Caller."""
        return Caller(self, connect, report, patience).run(stop, until)


Until = Literal["due", "settled", "stopped"]
"""due: nothing is due now. settled: nothing is open but for people to decide. stopped: never by itself."""


@dataclass
class Counts:
    """What a caller has done. ``attempts`` are claims; ``late`` are answers that changed nothing any more."""

    name: str
    attempts: int = 0
    confirmed: int = 0
    cancelled: int = 0
    stuck: int = 0
    again: int = 0
    late: int = 0
    conflicts: int = 0

    def as_dict(self) -> dict[str, Any]:
        """The figures for ``--json``."""
        return asdict(self)


@dataclass(slots=True)
class _Attempt:
    claim: Claim
    until: float
    overdue: bool = False


@dataclass(slots=True)
class _Answered:
    claim: Claim
    step: Step
    answer: Answer
    chance: float = field(default_factory=random.random)


class Caller:
    """Claims, calls and settles for one External, until told. Several of them, in several processes, share the work.

    connect   gives a connection in autocommit mode; one is open at a time, and no transaction during a call.
    report    told what happens: a short text and its figures.
    patience  seconds to wait for a database that is away, None for ever. ConsumerUnavailable is raised after that; see
              spark_jobs/patience.py.

    Calls run in threads of their own, ``workers`` at a time; the database is this thread's alone.
    """

    def __init__(
        self, external: External, connect: Connect, report: Report | None = None, patience: float | None = 60.0
    ) -> None:
        self._external = external
        self._connect = connect
        self._report = report or (lambda _text, _figures: None)
        self._patience = Patience(patience)
        self._book = Reservations(external.schema, external.group, external.name, external.rules)
        self._worker = f"{socket.gethostname()}-{os.getpid()}"
        self._connection: psycopg.Connection[Any] | None = None
        self._age = Age()
        self._running: dict[tuple[UUID, int], _Attempt] = {}
        self._answers: queue.SimpleQueue[_Answered] = queue.SimpleQueue()
        self._unsettled: list[_Answered] = []
        self._last_error = ""
        self._tries = 0
        self.counts = Counts(external.name)

    def run(self, stop: threading.Event, until: Until = "settled", poll: float = 0.5) -> Counts:
        """Work until ``until`` says so, or ``stop`` is set: then no call is begun any more, and those under way end.

        poll  seconds between two looks for new reservations. Raises ConsumerUnavailable.
        """
        try:
            with clear_errors(f"calling for {self._external.name}"):
                while not stop.is_set():
                    try:
                        with self._patience.attempt():
                            wait = self._round(until, poll)
                    except _AWAY as error:
                        wait = self._away(error)
                    if wait is None:
                        break
                    self._listen(stop, wait)
                self._finish()
        finally:
            self._disconnect()
        return self.counts

    def settle_by_hand(self, message_id: UUID, *, confirmed: bool, why: str) -> None:
        """Write down what the provider told a person about a stuck one, or one in conflict; with its SQL.

        Raises NoSuchReservation for any other, ConsumerError when the SQL fails.
        """
        external = self._external

        def effect(change: Change, claim: Claim) -> SqlEffect | None:
            declared = external.on_confirmed if change.state == "confirmed" else external.on_cancelled
            return effect_of(declared, claim, claim.response)

        try:
            with clear_errors("settling by hand"):
                self._book.settle_by_hand(self._connected(), message_id, confirmed=confirmed, why=why, effect_of=effect)
        finally:
            self._disconnect()

    def _round(self, until: Until, poll: float) -> float | None:
        """Settle what was answered, and claim. Returns the seconds to wait for more; None when it is over."""
        self._settle()
        connection = self._connected()
        free = self._external.workers - len(self._running)
        claims: list[Claim] = []
        if free > 0:
            began = time.monotonic()
            keys = (attempt.claim.order_key for attempt in self._running.values())
            claims, stuck = self._book.claim(
                connection,
                free,
                self._worker,
                self._external.lease_seconds,
                self._external.key_seconds,
                [key for key in keys if key is not None],
            )
            if stuck:
                self.counts.stuck += stuck
                self._report("reservations are stuck: see `outbox external list`", {"stuck": stuck})
            for claim in claims:
                self._start(claim, began)
            if stuck and not claims:
                return 0.0
        self._available()
        if self._running or until == "stopped":
            return poll
        if until == "due":
            return None
        due = self._book.next_due(connection)
        if due is None:
            return None
        # What is due and could not be claimed is another caller's, or waits behind one that is not due.
        return min(poll, due) if due > 0 else poll

    def _listen(self, stop: threading.Event, wait: float) -> None:
        """Wait for an answer, or a while."""
        if not self._running:
            stop.wait(wait)
            return
        deadline = time.monotonic() + wait
        # Stopping is noticed between two looks; with calls under way nothing is gained by more haste.
        while not stop.is_set():
            left = deadline - time.monotonic()
            try:
                self._take(self._answers.get(timeout=max(0.0, min(left, 0.2))))
            except queue.Empty:
                self._warn_of_overdue()
                if left > 0:
                    continue
            return

    def _finish(self) -> None:
        """Let the calls under way end, as long as their leases hold, and settle them."""
        while self._running or self._unsettled:
            ends = max((attempt.until for attempt in self._running.values()), default=0.0)
            if self._running:
                try:
                    self._take(self._answers.get(timeout=max(0.0, ends - time.monotonic())))
                except queue.Empty:
                    self._report("calls did not end in time; they are resumed later", {"calls": len(self._running)})
                    self._running.clear()
            try:
                with self._patience.attempt():
                    self._settle()
                self._available()
            except _AWAY as error:
                pause = self._away(error)
                if not self._running:
                    time.sleep(pause)

    def _start(self, claim: Claim, began: float) -> None:
        self.counts.attempts += 1
        until = began + self._external.lease_seconds
        self._running[claim.message_id, claim.attempt] = _Attempt(claim, until)
        if claim.step in {"confirm", "close"}:
            # The provider's part is over; only the SQL beside it is left.
            self._answers.put(_Answered(claim, claim.step, Answer("done", response=claim.response)))
            return
        thread = threading.Thread(
            target=self._call, args=(claim, until), name=f"external {claim.message_id}", daemon=True
        )
        thread.start()

    def _call(self, claim: Claim, until: float) -> None:
        """Run in a thread: make the call, whatever comes becomes an answer."""
        step, answer = claim.step, Answer("later", "the lease ran out before the call")
        try:
            if time.monotonic() + self._external.timeout <= until:
                step, answer = self._ask_or_call(claim)
        except BaseException as error:  # noqa: BLE001  a thread's end must not be the end of the answer
            answer = Answer("unknown", f"{type(error).__name__}: {error}")
        self._answers.put(_Answered(claim, step, answer))

    def _ask_or_call(self, claim: Claim) -> tuple[Step, Answer]:
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
            return "cancel", _answer(external.cancel, call)
        if claim.step == "ask":
            assert external.ask is not None
            answer = _answer(external.ask, call)
            if answer.said != "done":
                return "ask", answer
            if isinstance(answer.response, Done):
                return "ask", Answer("done", response=answer.response.response)
            if answer.response is not None:
                kind = type(answer.response).__name__
                return "ask", Answer("unknown", f"ask must give Done or None, and gave {kind}")
        return "call", _answer(external.call, call)

    def _take(self, answered: _Answered) -> None:
        self._running.pop((answered.claim.message_id, answered.claim.attempt), None)
        self._unsettled.append(answered)

    def _settle(self) -> None:
        while not self._answers.empty():
            self._take(self._answers.get())
        while self._unsettled:
            answered = self._unsettled[0]
            change, failed = self._book.settle(
                self._connected(),
                answered.claim,
                answered.step,
                answered.answer,
                answered.chance,
                functools.partial(self._effect, answered),
            )
            self._unsettled.pop(0)
            self._count(answered, change, failed)

    def _effect(self, answered: _Answered, change: Change) -> SqlEffect | None:
        if change.conflict is not None:
            return None
        if change.state == "confirmed":
            return effect_of(self._external.on_confirmed, answered.claim, answered.answer.response)
        if change.state == "cancelled":
            return effect_of(self._external.on_cancelled, answered.claim, answered.claim.response)
        return None

    def _count(self, answered: _Answered, change: Change | None, failed: str | None) -> None:
        counts = self.counts
        figures: dict[str, Any] = {"message_id": str(answered.claim.message_id), "attempt": answered.claim.attempt}
        if change is None:
            counts.late += 1
            self._report("an answer came late", figures | {"answer": answered.answer.said})
            return
        if change.conflict is not None:
            counts.conflicts += 1
            self._report("the provider contradicts itself", figures | {"conflict": change.conflict})
            return
        if change.state in {"confirmed", "cancelled"}:
            setattr(counts, change.state, getattr(counts, change.state) + 1)
        elif change.state == "stuck":
            counts.stuck += 1
        else:
            counts.again += 1
        if change.error or failed:
            figures |= {"error": failed or change.error}
        self._report(change.state, figures | {"answer": answered.answer.said})

    def _warn_of_overdue(self) -> None:
        now = time.monotonic()
        for attempt in self._running.values():
            if now > attempt.until and not attempt.overdue:
                attempt.overdue = True
                self._report(
                    "a call does not keep its timeout: its thread is not free for others",
                    {"message_id": str(attempt.claim.message_id), "attempt": attempt.claim.attempt},
                )

    def _connected(self) -> psycopg.Connection[Any]:
        if self._age.over:
            # Not for ever with a server that is not the primary any more; see connections.
            self._disconnect()
        if self._connection is None or self._connection.closed:
            self._connection = self._connect()
            self._connection.autocommit = True
            self._age = Age()
        return self._connection

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _available(self) -> None:
        self._patience.renew()
        self._tries = 0

    def _away(self, error: Exception) -> float:
        """Return the seconds to wait for a database that is away. Raises ConsumerUnavailable when it takes too long."""
        self._patience.failed()
        if not (self._last_error and isinstance(error, NoTimeLeft)):
            self._last_error = first_line(error)
        if self._patience.left <= 0:
            raise ConsumerUnavailable(
                f"{self._external.name}: gave up after {self._patience.seconds:g} s without the database; nothing is "
                f"lost, run it again. Last error: {self._last_error}"
            ) from error
        self._disconnect()
        pause = min(0.2 * 2.0 ** min(self._tries, 10), 5.0) * random.uniform(0.5, 1.0)  # noqa: S311  jitter
        pause = min(pause, self._patience.left)
        self._tries += 1
        self._report("waiting for the database", {"error": self._last_error, "wait_seconds": round(pause, 1)})
        return pause


def effect_of(effect: Effect | None, claim: Claim, response: object) -> SqlEffect | None:
    """Return what is to be done with a cursor for a settlement; None for nothing."""
    if effect is None:
        return None
    if callable(effect):
        function, settled = effect, Settled(claim.message_id, claim.request, response)
        return lambda cursor: function(cursor, settled)
    text = effect.encode()
    values = {"message_id": claim.message_id, "request": Jsonb(claim.request), "response": Jsonb(response)}

    def run(cursor: psycopg.Cursor[Any]) -> None:
        cursor.execute(text, values)

    return run


def _answer(function: Callable[[Call], Any], call: Call) -> Answer:
    try:
        return Answer("done", response=function(call))
    except Refused as refusal:
        return Answer("refused", str(refusal))
    except TryLater as later:
        return Answer("later", str(later), retry_after=later.retry_after)
    except OutcomeUnknown as unknown:
        return Answer("unknown", str(unknown), retry_after=unknown.retry_after)
    except Exception as error:  # noqa: BLE001  a user's function: whatever went wrong, the call may have been made
        return Answer("unknown", f"{type(error).__name__}: {error}")


def find_external(spec: str) -> External:
    """Import ``MODULE:NAME`` and give the External there. Raises JobError saying what is missing."""
    return find_declared(spec, External, "name it as MODULE:NAME")
