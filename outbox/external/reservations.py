"""The table of effects outside the database: claim, settle, and operators' actions. Short transactions only.

Every method but ``forget`` is one transaction on the given connection, which must be in autocommit mode, by the
database's clock; a key's expiry is computed with both that clock and the caller's. A claim writes the end of the lease
into ``next_attempt_at`` and raises ``attempts``; no transaction is open during the call. Raises psycopg's errors.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, LiteralString
from uuid import UUID

import psycopg
from psycopg import sql
from psycopg.rows import tuple_row
from psycopg.types.json import Jsonb

from outbox._clients import blocks
from outbox._clients.postgres import SYNCHRONOUS
from outbox._clients.search_path import pinned_transaction, restore_path
from outbox.consumer.connections import process_name
from outbox.consumer.errors import LONGEST_ERROR, ConsumerError, Interrupted, shown, storable
from outbox.consumer.postgres_errors import AWAY, Strikes, spoilt
from outbox.consumer.statements import IMMEDIATE, note, statement
from outbox.errors import NotFound
from outbox.external import exact_json
from outbox.external.declaration import External, Settled
from outbox.external.state_machine import (
    CALL_STEPS,
    Answer,
    ReservationState,
    Step,
    Transition,
    effect_failed,
    first_step,
    settle,
)

# The first calls that are due; a claim looks at no others, however many wait. Those that wait behind an earlier call of
# their key are parked, so they are not among them again. Rows are looked up by ctid: there is then only one plan.
_FRONT: Final = """
SELECT ctid, order_key, id FROM {reservations}
 WHERE grp = %(grp)s AND name = %(name)s AND state IN ('reserved', 'calling', 'cancelling') AND NOT parked
   AND next_attempt_at <= now()
 ORDER BY next_attempt_at, id LIMIT %(window)s"""
_EARLIER: Final = """
SELECT FROM {reservations} AS earlier
 WHERE earlier.grp = %(grp)s AND earlier.name = %(name)s AND earlier.settled_at IS NULL
   AND hashtextextended(earlier.order_key, 0) = hashtextextended(front.order_key, 0)
   AND earlier.order_key = front.order_key AND earlier.id < front.id"""
# A later call of a key waits for the earlier one. A settlement that another caller is just committing is not visible
# yet, so a call may wait a little too long but never goes out too early.
_DUE: Final = """
WITH front AS MATERIALIZED ({front})
SELECT due.*, due.response IS NOT NULL AS has_response, due.attempts - due.budget_from AS used,
       -- A request that begins now may reach the provider as late as its lease ends.
       coalesce(due.key_until <= greatest(now(), to_timestamp(%(clock)s)) + make_interval(secs => %(lease)s), false)
           AS key_expired
  FROM front, LATERAL (
        SELECT * FROM {reservations} AS one
         WHERE one.ctid = front.ctid AND one.state IN ('reserved', 'calling', 'cancelling')
           AND NOT one.parked AND one.next_attempt_at <= now()
           AND NOT EXISTS ({earlier})
           FOR UPDATE OF one SKIP LOCKED) AS due
 LIMIT %(most)s"""
# The earlier call is locked: its settlement comes before this, and is seen, or waits, and then sees what was parked.
# So a parked call always has an earlier open one that releases it or the next one. In case a call was deleted by hand,
# parked calls are due again after an hour.
_PARK: Final = """
WITH front AS MATERIALIZED ({front}),
behind AS MATERIALIZED (
    SELECT front.ctid FROM front, LATERAL ({earlier} LIMIT 1 FOR SHARE SKIP LOCKED) AS earlier)
UPDATE {reservations} SET parked = true, next_attempt_at = now() + interval '1 hour'
 WHERE ctid = ANY (ARRAY(
        SELECT waiting.ctid FROM behind, LATERAL (
            SELECT one.ctid FROM {reservations} AS one
             WHERE one.ctid = behind.ctid AND one.settled_at IS NULL AND one.next_attempt_at <= now()
               FOR UPDATE OF one SKIP LOCKED) AS waiting))"""
_UNPARK: Final = """
UPDATE {reservations} SET parked = false
 WHERE ctid = ANY (ARRAY(
        SELECT ctid FROM {reservations}
         WHERE grp = %(grp)s AND name = %(name)s AND state IN ('reserved', 'calling', 'cancelling') AND parked
           AND next_attempt_at <= now()
         ORDER BY next_attempt_at, id LIMIT %(window)s FOR UPDATE SKIP LOCKED))"""
# The next open call of the key, in the transaction that settles the one before it. If that one is being settled too,
# this waits for it, and takes the one after it.
_RELEASE: Final = """
UPDATE {reservations} SET parked = false, next_attempt_at = now()
 WHERE parked AND ctid = ANY (ARRAY(
        SELECT ctid FROM {reservations}
         WHERE grp = %(grp)s AND name = %(name)s AND settled_at IS NULL AND id > %(id)s
           AND hashtextextended(order_key, 0) = hashtextextended(%(order_key)s, 0) AND order_key = %(order_key)s
         ORDER BY id LIMIT 1 FOR UPDATE))"""
_LOCK_ROW: Final = """
SELECT *, response IS NOT NULL AS has_response, attempts - budget_from AS used,
       coalesce(key_until <= now(), false) AS key_expired
  FROM {reservations} WHERE grp = %(grp)s AND name = %(name)s AND message_id = %(message_id)s FOR UPDATE"""
# Durable: the claim is the only trace of a call, and a server that forgot it would have it made again, without an
# ``ask``. The key's time begins by the earlier of two clocks, and in _DUE it ends by the later one: where the
# database's is corrected in between, the provider may forget the key before that clock says so.
_BEGIN: Final = """
UPDATE {reservations}
   SET state = %(state)s, unsure = %(unsure)s, attempts = attempts + 1, worker = %(worker)s,
       next_attempt_at = now() + make_interval(secs => %(lease)s),
       key_until = CASE WHEN key_until > now() OR NOT %(keyed)s THEN key_until
                        ELSE least(now(), to_timestamp(%(clock)s)) + make_interval(secs => %(key_seconds)s) END
 WHERE grp = %(grp)s AND name = %(name)s AND message_id = %(message_id)s
RETURNING {synchronous}"""
_GIVE_UP: Final = """
UPDATE {reservations}
   SET state = 'stuck', unsure = %(unsure)s,
       last_error = %(reason)s || coalesce('; before that: ' || last_error, '')
 WHERE grp = %(grp)s AND name = %(name)s AND message_id = %(message_id)s"""
_WRITE: Final = """
UPDATE {reservations}
   SET state = %(state)s, unsure = %(unsure)s, taking_back = %(taking_back)s,
       response = CASE WHEN %(keep_response)s THEN coalesce(%(response)s, response) ELSE %(response)s END,
       last_error = coalesce(%(error)s, CASE WHEN %(state)s = 'confirmed' THEN NULL ELSE last_error END),
       conflict = coalesce(%(conflict)s, conflict),
       budget_from = CASE WHEN %(fresh_budget)s THEN attempts ELSE budget_from END,
       key_until = CASE WHEN %(fresh_budget)s THEN NULL ELSE key_until END,
       next_attempt_at = coalesce(now() + make_interval(secs => %(wait)s), next_attempt_at),
       settled_at = CASE WHEN %(state)s IN ('confirmed', 'cancelled') THEN coalesce(settled_at, now()) END,
       parked = false
 WHERE grp = %(grp)s AND name = %(name)s AND message_id = %(message_id)s"""
_NO_CONFLICT: Final = """
UPDATE {reservations} SET conflict = NULL
 WHERE grp = %(grp)s AND name = %(name)s AND message_id = %(message_id)s"""
# Without calls behind a stuck one, which wait for an operator. What is parked follows one that is found, or is stuck.
_NEXT_DUE: Final = """
SELECT extract(epoch FROM next_attempt_at - now())::float8
  FROM {reservations} AS due
 WHERE grp = %(grp)s AND name = %(name)s AND state IN ('reserved', 'calling', 'cancelling') AND NOT parked
   AND NOT EXISTS (
        SELECT 1 FROM {reservations} AS stuck
         WHERE stuck.grp = due.grp AND stuck.name = due.name AND stuck.state = 'stuck' AND stuck.settled_at IS NULL
           AND hashtextextended(stuck.order_key, 0) = hashtextextended(due.order_key, 0)
           AND stuck.order_key = due.order_key AND stuck.id < due.id)
 ORDER BY next_attempt_at, id LIMIT 1"""
_LIST: Final = """
SELECT grp, name, message_id, topic, part, message_offset, order_key, state, unsure, taking_back, request, response,
       attempts, worker, last_error, conflict, reserved_at, next_attempt_at, settled_at,
       (SELECT count(*) FROM {reservations} AS later
         WHERE shown.state = 'stuck' AND later.grp = shown.grp AND later.name = shown.name
           AND later.settled_at IS NULL
           AND hashtextextended(later.order_key, 0) = hashtextextended(shown.order_key, 0)
           AND later.order_key = shown.order_key AND later.id > shown.id) AS waiting_behind
  FROM {reservations} AS shown
 WHERE (%(grp)s::text IS NULL OR grp = %(grp)s) AND (%(name)s::text IS NULL OR name = %(name)s)
   AND (state = ANY(%(states)s) OR conflict IS NOT NULL)
 ORDER BY id LIMIT %(most)s"""
_MATCHES: Final = """
 WHERE (%(grp)s::text IS NULL OR grp = %(grp)s) AND (%(name)s::text IS NULL OR name = %(name)s)
   AND (%(ids)s::uuid[] IS NULL OR message_id = ANY(%(ids)s))"""
_COUNTS: Final = "SELECT state, count(*) FROM {reservations} {matches} GROUP BY state"
# A cancellation stays unsure: if the provider has nothing under its key, what is to be cancelled may have happened.
_RETRY: Final = """
UPDATE {reservations}
   SET state = CASE WHEN taking_back THEN 'cancelling' ELSE 'reserved' END, budget_from = attempts,
       next_attempt_at = now(), parked = false, unsure = unsure AND (taking_back OR NOT %(not_done)s),
       key_until = CASE WHEN %(not_done)s THEN NULL ELSE key_until END
{matches} AND state = 'stuck'
RETURNING message_id"""
_CANCEL: Final = """
UPDATE {reservations}
   SET state = 'cancelling', taking_back = true, unsure = unsure OR response IS NOT NULL, budget_from = attempts,
       key_until = NULL, next_attempt_at = now(), parked = false, last_error = %(why)s
{matches} AND state IN ('reserved', 'stuck') AND NOT taking_back
RETURNING message_id"""
_FORGET: Final = """
DELETE FROM {reservations}
{matches} AND settled_at < now() - make_interval(days => %(days)s) AND conflict IS NULL AND {in_step}"""

OPEN: Final = ("reserved", "calling", "cancelling")
_CLOCK: Final = time.time
_WINDOW: Final = 50
"""How many due calls a claim looks at."""


class _EffectFailed(Exception):
    """Rolls back the transaction that settles a call."""


@dataclass(frozen=True, slots=True)
class ClaimedCall:
    """One attempt of a call, and its reservation. ``attempt`` is its token."""

    step: Step
    message_id: UUID
    attempt: int
    request: Any
    response: Any
    topic: str
    part: int
    message_offset: int


@dataclass(slots=True)
class Answered:
    """The answer to a step of a claimed call.

    until   the end of the claim's lease, by ``uptime``.
    jitter  see ``state_machine.settle``.
    failed  the error of the SQL beside the settlement, which has ended too many sessions in a row.
    """

    claim: ClaimedCall
    step: Step
    answer: Answer
    until: float
    jitter: float = field(default_factory=random.random)
    strikes: Strikes = field(default_factory=Strikes)
    failed: str | None = None


class Reservations:
    """The reservations of one External."""

    def __init__(self, external: External) -> None:
        self._external = external
        self._which = {"grp": external.group, "name": external.name}
        self._rules = external.rules
        self._worker = process_name()
        self.more_due = False
        """Whether the last claim parked calls, so that others may be due behind them: claim again without a pause."""

    def claim(self, connection: psycopg.Connection[Any], most: int) -> tuple[list[ClaimedCall], int]:
        """Begin up to ``most`` due attempts, each with a lease. Returns them, and how many calls became stuck."""
        lease, clock = self._external.lease_seconds, _CLOCK()
        claims: list[ClaimedCall] = []
        stuck = 0
        self.more_due = False
        with pinned_transaction(connection), exact_json.cursor(connection) as cursor:
            rows = self._run(cursor, _DUE, most=most, window=_WINDOW, lease=lease, clock=clock).fetchall()
            for row in rows:
                state = _state_of(row)
                unsure = state.may_have_happened
                step, reason = first_step(state, self._rules)
                if step == "stuck":
                    self._run(cursor, _GIVE_UP, message_id=row["message_id"], unsure=unsure, reason=reason)
                    stuck += 1
                    continue
                self._run(
                    cursor,
                    _BEGIN,
                    message_id=row["message_id"],
                    state="cancelling" if state.taking_back else "calling",
                    unsure=unsure,
                    worker=self._worker,
                    lease=lease,
                    clock=clock,
                    keyed=step in {"call", "cancel"},
                    key_seconds=self._external.key_seconds,
                )
                claims.append(_claim(row, step, row["attempts"] + 1))
            if len(rows) < most:
                parked = self._run(cursor, _PARK, window=_WINDOW).rowcount
                unparked = self._run(cursor, _UNPARK, window=_WINDOW).rowcount
                self.more_due = parked + unparked > 0
        return claims, stuck

    def settle(self, connection: psycopg.Connection[Any], answered: Answered) -> tuple[Transition | None, str | None]:
        """Write what an answer changes, and run the External's SQL for it in the same transaction.

        If that SQL fails, or had failed too often before, another transaction stores the answer and the error. Returns
        the change, or None, and the SQL's error. After an error of a database that is away, settle again. Raises
        Interrupted, with its cause, for a session that has answered and then ended.
        """
        transition: Transition | None = None
        failed = answered.failed
        try:
            if failed is None:
                with pinned_transaction(connection) as path:
                    transition = self._settle(connection, answered, None)
                    if transition is not None:
                        self._run_effect(connection, transition, answered.claim, answered.answer.response, path)
                return transition, None
        except _EffectFailed as error:
            failed = str(error)
        except AWAY as error:
            if transition is None:
                raise
            raise Interrupted(shown(error)) from error
        with pinned_transaction(connection):
            transition = self._settle(connection, answered, failed)
        return transition, failed

    def settle_by_hand(
        self, connection: psycopg.Connection[Any], message_id: UUID, *, confirmed: bool, why: str
    ) -> None:
        """Write the outcome that an operator knows from the provider, run its SQL, and record the reason in the audit.

        Only for a reservation that is stuck or has a conflict: for others a call may be under way. This ends a
        conflict. The SQL is not repeated if the row already had the state. Raises NotFound, and ConsumerError
        when the SQL fails.
        """
        transition = Transition(
            "confirmed" if confirmed else "cancelled", unsure=False, taking_back=not confirmed, keep_response=True
        )
        try:
            with pinned_transaction(connection) as path, exact_json.cursor(connection) as cursor:
                row = self._run(cursor, _LOCK_ROW, message_id=message_id).fetchone()
                if row is None or (row["state"] != "stuck" and row["conflict"] is None):
                    raise NotFound(f"{message_id}: neither stuck nor in conflict; see `outbox external list`")
                self._write(cursor, row, transition, None)
                self._run(cursor, _NO_CONFLICT, message_id=message_id)
                details = self._which | {"message_ids": [str(message_id)]}
                note(connection, self._external.schema, f"external: {transition.state} by hand", why, details)
                if row["state"] != transition.state:
                    claim = _claim(row, "confirm" if confirmed else "close", row["attempts"])
                    self._run_effect(connection, transition, claim, claim.response, path)
        except _EffectFailed as error:
            raise ConsumerError(
                f"{message_id}: nothing was written, because the SQL beside it fails: {error}"
            ) from error

    def next_due(self, connection: psycopg.Connection[Any]) -> float | None:
        """Return the seconds until the next call is due that needs no operator; below 0 if it waits for another call.

        None: there is no such call.
        """
        with pinned_transaction(connection), connection.cursor(row_factory=tuple_row) as cursor:
            row = self._run(cursor, _NEXT_DUE).fetchone()
        return None if row is None else float(row[0])

    def _settle(self, connection: psycopg.Connection[Any], answered: Answered, failed: str | None) -> Transition | None:
        claim, step, answer = answered.claim, answered.step, answered.answer
        with exact_json.cursor(connection) as cursor:
            row = self._run(cursor, _LOCK_ROW, message_id=claim.message_id).fetchone()
            if row is None:
                return None
            state = _state_of(row)
            current = row["attempts"] == claim.attempt and row["state"] in {"calling", "cancelling"}
            transition = settle(state, current, step, answer, self._rules, answered.jitter)
            if transition is None:
                return None
            if failed is not None:
                transition = effect_failed(state, transition, failed, self._rules, answered.jitter)
            done = answer.outcome == "done" and step in CALL_STEPS and not transition.taking_back
            self._write(cursor, row, transition, exact_json.jsonb(answer.response) if done else None)
        return transition

    def _write(
        self, cursor: psycopg.Cursor[Any], row: Mapping[str, Any], transition: Transition, response: Jsonb | None
    ) -> None:
        self._run(
            cursor,
            _WRITE,
            message_id=row["message_id"],
            state=transition.state,
            unsure=transition.unsure,
            taking_back=transition.taking_back,
            response=response,
            keep_response=transition.keep_response,
            error=_storable(transition.error),
            conflict=_storable(transition.conflict),
            wait=transition.wait,
            fresh_budget=transition.fresh_budget,
        )
        if row["settled_at"] is None and transition.state in {"confirmed", "cancelled"}:
            # With no order_key, this finds none.
            self._run(cursor, _RELEASE, order_key=row["order_key"], id=row["id"])

    def _run_effect(
        self,
        connection: psycopg.Connection[Any],
        transition: Transition,
        claim: ClaimedCall,
        response: object,
        path: str,
    ) -> None:
        """Run the user's SQL that goes with a settlement, if there is any, with this search path until COMMIT.

        Raises _EffectFailed, also for what would make COMMIT fail, or a ROLLBACK of it: a deferred constraint or
        trigger, and an error that the user's function has caught. Raises the error itself if the connection is closed.
        """
        effects = {"confirmed": self._external.on_confirmed, "cancelled": self._external.on_cancelled}
        effect = effects.get(transition.state)
        if effect is None or transition.conflict is not None:
            return
        response = response if transition.state == "confirmed" else claim.response
        try:
            restore_path(connection, path)
            with connection.cursor() as cursor:
                if callable(effect):
                    effect(cursor, Settled(claim.message_id, claim.request, response))
                else:
                    values = {"request": exact_json.jsonb(claim.request), "response": exact_json.jsonb(response)}
                    cursor.execute(effect.encode(), {"message_id": claim.message_id, **values})
            failed = spoilt(connection)
            if failed is None:
                connection.execute(IMMEDIATE)
        except Exception as error:
            if connection.closed:
                raise
            raise _EffectFailed(f"{type(error).__name__}: {str(error).strip()}") from error
        if failed is not None:
            raise _EffectFailed(failed)

    def _run(self, cursor: psycopg.Cursor[Any], query: LiteralString, **values: object) -> psycopg.Cursor[Any]:
        schema = self._external.schema
        parts = {"front": statement(schema, _FRONT), "earlier": statement(schema, _EARLIER)}
        composed = statement(schema, query, synchronous=sql.SQL(SYNCHRONOUS), **parts)
        return cursor.execute(composed, self._which | values)


@dataclass(frozen=True, slots=True)
class Chosen:
    """The reservations that an operator selects. None: all."""

    group: str | None = None
    name: str | None = None
    message_ids: Sequence[UUID] | None = None


class ReservationAdmin:
    """Operators' actions on the reservations of a sink. The audit records every change with its reason."""

    def __init__(self, connection: psycopg.Connection[Any], schema: str) -> None:
        self._connection = connection
        self._schema = schema

    def find(self, chosen: Chosen, states: Sequence[str] = ("stuck",), most: int = 100) -> list[dict[str, Any]]:
        """Return the reservations in these states, and those in conflict; the oldest first, with ``exact_json``."""
        values = {"grp": chosen.group, "name": chosen.name, "states": list(states), "most": most}
        with exact_json.cursor(self._connection) as cursor:
            return cursor.execute(statement(self._schema, _LIST), values).fetchall()

    def counts(self, chosen: Chosen) -> dict[str, int]:
        return dict(self._connection.execute(self._matching(_COUNTS), _values(chosen)).fetchall())

    def retry(self, chosen: Chosen, *, not_done: bool = False, why: str | None = None) -> list[str]:
        """Retry stuck calls with a new budget of attempts. Returns their message ids.

        not_done  the provider was asked and does not know the key, so the call, or the cancellation, is made as if for
                  the first time.
        """
        return self._change("external: retry", _RETRY, chosen, why, not_done=not_done)

    def cancel(self, chosen: Chosen, why: str) -> list[str]:
        """Mark stuck and reserved calls to be cancelled. Returns their message ids."""
        return self._change("external: cancel", _CANCEL, chosen, why)

    def forget(self, chosen: Chosen, days: int) -> int:
        """Delete reservations that were settled more than ``days`` ago, except for conflicts. Returns how many.

        In steps, each a transaction. A message that is repeated after that is reserved again, unless the group still
        remembers its id.
        """
        total = 0
        for in_step in blocks.steps(self._connection, sql.Identifier(self._schema, "reservations")):
            with self._connection.transaction():
                query = self._matching(_FORGET, in_step=in_step)
                count = self._connection.execute(query, _values(chosen) | {"days": days}).rowcount
                if count:
                    details = {"grp": chosen.group, "name": chosen.name, "days": days, "count": count}
                    note(self._connection, self._schema, "external: forget", None, details)
            total += count
        return total

    def _change(self, what: str, query: LiteralString, chosen: Chosen, why: str | None, **values: object) -> list[str]:
        with self._connection.transaction():
            found = self._connection.execute(self._matching(query), _values(chosen) | values | {"why": why})
            ids = sorted(str(message_id) for (message_id,) in found)
            if ids:
                details = {"grp": chosen.group, "name": chosen.name, "message_ids": ids}
                note(self._connection, self._schema, what, why, details)
        return ids

    def _matching(self, query: LiteralString, **names: sql.Composable) -> sql.Composed:
        return statement(self._schema, query, matches=sql.SQL(_MATCHES), **names)


def _values(chosen: Chosen) -> dict[str, object]:
    ids = None if chosen.message_ids is None else list(chosen.message_ids)
    return {"grp": chosen.group, "name": chosen.name, "ids": ids}


def _state_of(row: Mapping[str, Any]) -> ReservationState:
    return ReservationState(
        row["state"], row["unsure"], row["taking_back"], row["has_response"], row["used"], row["key_expired"]
    )


def _claim(row: Mapping[str, Any], step: Step, attempt: int) -> ClaimedCall:
    stored = ("message_id", "request", "response", "topic", "part", "message_offset")
    return ClaimedCall(step=step, attempt=attempt, **{name: row[name] for name in stored})


def _storable(text: str | None) -> str | None:
    """Return an error text for the table, truncated to LONGEST_ERROR characters."""
    return None if text is None else storable(text)[:LONGEST_ERROR]
