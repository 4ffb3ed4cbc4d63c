"""Declaring effects outside the database: what to call, how to cancel it and how to ask for its outcome.

The provider must guarantee that a key has one outcome for ``key_seconds``, and that a cancellation also applies to a
call with that key that arrives after it.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

import psycopg
from psycopg import sql

from outbox.consumer.declared import find_declared
from outbox.consumer.errors import ConsumerError, JobError
from outbox.consumer.statements import statement
from outbox.external.state_machine import Rules

if TYPE_CHECKING:
    from outbox.external.caller import Connect, Counts, Report, Until

_NAME: Final = re.compile(r"[a-zA-Z0-9._-]{1,100}")
_RESERVE: Final = """
INSERT INTO {reservations} (grp, name, message_id, topic, part, message_offset, order_key, request)
SELECT {grp}, {name},
       CASE count(*) OVER (PARTITION BY message_topic, message_part, message_offset) WHEN 1 THEN message_id
            ELSE pg_catalog.concat(
                'more than one row of message ', message_id, ': External makes one call for each')::uuid END,
       message_topic, message_part, message_offset, ({order_by})::text, {request}
  FROM batch WHERE {where} ORDER BY message_topic, message_part, message_offset
    ON CONFLICT (grp, name, message_id) DO NOTHING"""
_MARGIN: Final = 5.0
_LONGEST: Final = 100 * 365 * 86_400.0
"""A hundred years. Python has no times after the year 9999, and could not read a row with one."""


class Refused(ConsumerError):
    """The provider has refused for good. Raised by ``call``, ``ask`` or ``cancel``."""


class TryLater(ConsumerError):
    """Nothing happened at the provider; a retry may succeed. ``retry_after`` is in seconds."""

    def __init__(self, text: str, retry_after: float | None = None) -> None:
        super().__init__(text)
        self.retry_after = retry_after


class OutcomeUnknown(ConsumerError):
    """The provider may have executed the call. ``retry_after`` is in seconds."""

    def __init__(self, text: str, retry_after: float | None = None) -> None:
        super().__init__(text)
        self.retry_after = retry_after


@dataclass(frozen=True, slots=True)
class Call:
    """The argument of the user's functions. ``timeout`` is in seconds; the function must keep to it.

    key       the Idempotency-Key: the same in every attempt. That of a cancellation ends with ``:cancel``.
    call_key  the key of the call itself; for ``ask`` and ``cancel``.
    request   numbers with a fraction are floats, or Decimals where a float would be rounded, so never another amount.
              A request of more than about 900 levels has only its ``text``, which HttpCall sends as it is.
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
    """Returned by ``ask`` when the provider has done the call. ``response`` is stored as JSON."""

    response: Any = None


@dataclass(frozen=True, slots=True)
class Settled:
    """The settled call, for the SQL that goes with it: ``%(message_id)s``, ``%(request)s``, ``%(response)s``."""

    message_id: UUID
    request: Any
    response: Any


Effect = str | Callable[[psycopg.Cursor[Any], Settled], None]


@dataclass(frozen=True, slots=True)
class External:
    """One kind of call to one provider, beside a ConsumerJob whose effect is, or contains, ``reserve()``.

    name, group     identify the calls among the reservations; ``group`` is the ConsumerJob's. There is one call for
                    each message: if a transform makes several rows of a message, ``where`` must select one of them.
    request         SQL expression over ``batch`` that returns jsonb: the data for the call.
    call            makes the call, with ``key`` as its Idempotency-Key. Returns the response, which is stored as JSON,
                    or raises Refused, TryLater or OutcomeUnknown. Any other exception counts as OutcomeUnknown.
    cancel          reverses what a call may have done; called by an operator's command, and after a refusal that
                    follows an attempt without an answer. Must also succeed when there is nothing to reverse.
    ask             asks the provider for the outcome of ``call_key``: returns Done or None, raises Refused. Called
                    before repeating a call that may have been done.
    on_confirmed    SQL, or a function of a cursor and Settled, run in the transaction that settles the call.
    on_cancelled    the same for a cancelled call: one that was refused or reversed.
    where           SQL condition over ``batch`` that selects the messages to call for. By default all but tombstones.
    order_by        SQL expression over ``batch``: calls with the same value go out in the order of their messages, each
                    after the one before was settled. None: in no order.
    workers         how many calls at a time, in one process.
    timeout         of a call, in seconds; passed to the functions.
    max_attempts    after this many the call is stuck and waits for an operator.
    first_wait, longest_wait    seconds between attempts: doubled each time, with jitter.
    key_seconds     how long the provider remembers a key, at most 100 years: for one that never forgets. After that a
                    call that may have been done is not repeated.
    lease           seconds after which an attempt counts as lost; longer than ``timeout``, with ``ask`` than twice
                    that. None: from ``timeout``.
    key_suffix      is appended to the keys, for a second effect of the same messages at the same provider.
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
            if not 0 < getattr(self, name) <= _LONGEST:
                raise JobError(f"{name}: must be a number of seconds above 0, at most {_LONGEST:.0f} (100 years)")
        if self.workers < 1 or self.max_attempts < 1:
            raise JobError("workers and max_attempts: must be at least 1")
        if self.lease is not None and self.lease > _LONGEST:
            raise JobError(f"lease: must be at most {_LONGEST:.0f} seconds (100 years)")
        longest = self._longest_attempt
        if self.lease is not None and not self.lease > longest:
            attempt = "ask and call together" if self.ask else "timeout"
            raise JobError(
                f"lease: must be longer than {attempt} ({longest:g} s), or calls would be repeated while they are "
                "under way"
            )

    @property
    def rules(self) -> Rules:
        return Rules(
            self.max_attempts, self.ask is not None, self.cancel is not None, self.first_wait, self.longest_wait
        )

    @property
    def lease_seconds(self) -> float:
        """The lease of an attempt: by default the time for ``ask`` and ``call``, and a margin."""
        return self.lease or self._longest_attempt * 1.5 + _MARGIN

    @property
    def _longest_attempt(self) -> float:
        return self.timeout * (2 if self.ask else 1)

    def reserve(self) -> str:
        """Return the SQL that reserves calls, as a ConsumerJob's effect or to append to one after a semicolon."""
        composed = statement(
            self.schema,
            _RESERVE,
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
        """Run a ``Caller`` for this External; see ``Caller.run``."""
        from outbox.external.caller import Caller

        return Caller(self, connect, report, patience).run(stop, until)


def find_external(spec: str) -> External:
    """Import ``MODULE:NAME`` and return the External there. Raises ConfigurationError saying what is missing."""
    return find_declared(spec, External, "name it as MODULE:NAME")
