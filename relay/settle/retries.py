"""Events that can't be published as they are: attempts, backoff, dead letters. All in the lane's settling transaction.

Only errors of the event itself count as attempts (too large, no route). An unavailable server does not, and no event is
ever dropped.

| state                      | rows                                                   | its key                      |
|----------------------------|--------------------------------------------------------|------------------------------|
| refused, retrying          | in events; in failures, next_attempt_at in the future  | later events wait            |
| due                        | in events; in failures, next_attempt_at passed         | it goes out, later ones wait |
| published after retries    | gone from both, in one transaction                     | goes on                      |
| dead, ``block``            | in dead_letters; in failures, next_attempt_at =        | waits for an operator        |
|                            | infinity                                               |                              |
| dead, ``skip``             | in dead_letters                                        | goes on without it           |
| `dead-letters retry`       | back in events under its old id; in failures, due      | it goes out, later ones wait |
| `dead-letters discard`     | gone; a line in audit says who and why                 | goes on                      |

``events`` stays insert-and-delete: failures are kept in a table beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import psycopg
from psycopg import sql
from psycopg.types.json import Jsonb

from outbox._app.choices import OnFailure
from outbox._app.settings import FailureSettings
from outbox.event import ATTEMPTS, DEAD_LETTER, MAX_EVENT_BYTES, PAYLOAD_OMITTED
from relay.core.ports import Claim
from relay.failpoints import failpoint
from relay.kafka.routing import Router
from relay.settle.statements import names_of

MAX_ERROR: Final = 2000
_HEADERS_ROOM: Final = 4000
_MAX_HEADER_ERROR: Final = 500

_RECORD: Final = """
INSERT INTO {failures} AS f (lane, id, event_id, aggregate_type, aggregate_id, blocks, attempts, last_error,
                             first_failed_at, last_failed_at, next_attempt_at)
SELECT %(lane)s, r.id, r.event_id, r.aggregate_type, r.aggregate_id, r.blocks, 1, r.error,
       clock_timestamp(), clock_timestamp(), clock_timestamp() + make_interval(secs => %(least)s)
  FROM unnest(%(ids)s::bigint[], %(event_ids)s::uuid[], %(types)s::text[], %(keys)s::text[], %(blocks)s::boolean[],
              %(errors)s::text[]) AS r(id, event_id, aggregate_type, aggregate_id, blocks, error)
ON CONFLICT (lane, id) DO UPDATE SET attempts = f.attempts + 1, last_error = excluded.last_error,
       last_failed_at = excluded.last_failed_at,
       next_attempt_at = clock_timestamp() + make_interval(
           secs => least(%(most)s::float8, %(least)s::float8 * power(2, least(f.attempts, 30))))
RETURNING id, attempts"""

# A copy has the error in a header. If the row gets too large, the payload is omitted, then the headers.
_COPY: Final = """
INSERT INTO {events} (event_id, aggregate_type, aggregate_id, event_type, payload, payload_bytes, headers, created_at,
                      from_relay)
SELECT event_id, aggregate_type, aggregate_id, event_type, CASE WHEN fits THEN payload END,
       CASE WHEN fits THEN payload_bytes END,
       CASE WHEN bare <= %(limit)s THEN coalesce(headers, '{{}}') ELSE '{{}}' END
       || jsonb_build_object(%(error)s::text, left(last_error, %(room)s), %(attempts)s::text, attempts::text)
       || CASE WHEN fits THEN '{{}}'::jsonb ELSE jsonb_build_object(%(omitted)s::text, 'true') END, created_at,
       true
  FROM (SELECT *, bare + coalesce(octet_length(payload::text), octet_length(payload_bytes), 0) <= %(limit)s AS fits
          FROM (SELECT *, octet_length(aggregate_id) + coalesce(octet_length(headers::text), 0) AS bare
                  FROM {dead_letters} WHERE lane = %(lane)s AND id = ANY(%(ids)s::bigint[])) AS dead) AS sized
 ORDER BY id"""

_BURY: Final = """
WITH found AS MATERIALIZED (
    SELECT ARRAY(SELECT ctid FROM ONLY {events} WHERE lane = %(lane)s AND id = ANY(%(ids)s::bigint[])) AS places),
gone AS (DELETE FROM ONLY {events} WHERE ctid = ANY((SELECT places FROM found)::tid[]) RETURNING *),
dead AS (
    INSERT INTO {dead_letters} (lane, id, event_id, aggregate_type, aggregate_id, event_type, payload, payload_bytes,
                                headers, created_at, attempts, last_error, first_failed_at)
    SELECT g.lane, g.id, g.event_id, g.aggregate_type, g.aggregate_id, g.event_type, g.payload, g.payload_bytes,
           g.headers, g.created_at, f.attempts, f.last_error, f.first_failed_at
      FROM gone AS g JOIN {failures} AS f ON f.lane = g.lane AND f.id = g.id)
SELECT {all_gone}"""

# An event whose time is infinity, which a writer may have set, has none on its way.
_KEEP: Final = """
INSERT INTO {dead_letters} (lane, id, event_id, aggregate_type, aggregate_id, event_type, payload_bytes, headers,
                            created_at, attempts, last_error, first_failed_at)
VALUES (%s, %s, %s, %s, %s, %s, %s, %s, coalesce(%s, clock_timestamp()), 1, %s, clock_timestamp())"""

_HOLD: Final = """
UPDATE {failures} SET next_attempt_at = 'infinity' WHERE lane = %(lane)s AND id = ANY(%(ids)s::bigint[])"""

_FORGET: Final = "DELETE FROM {failures} WHERE lane = %(lane)s AND id = ANY(%(ids)s::bigint[])"


class Failures:
    """The statements. Each runs in the caller's transaction, which has checked the lane's epoch under a row lock."""

    def __init__(self, schema: str, policy: FailureSettings, router: Router) -> None:
        self._policy = policy
        self._router = router
        names = names_of(schema)
        self._record, self._bury, self._keep, self._copy, self._hold, self._forget = (
            sql.SQL(text).format(**names) for text in (_RECORD, _BURY, _KEEP, _COPY, _HOLD, _FORGET)
        )

    def record(
        self, connection: psycopg.Connection[Any], lane: int, refused: Sequence[tuple[Claim, str]]
    ) -> list[Claim]:
        """Count an attempt of each refused event. Returns those that are dead letters now."""
        attempts = dict(
            connection.execute(
                self._record,
                {
                    "lane": lane,
                    "least": self._policy.min_backoff_seconds,
                    "most": self._policy.max_backoff_seconds,
                    "ids": [claim.position for claim, _ in refused],
                    "event_ids": [claim.event_id for claim, _ in refused],
                    "types": [claim.aggregate_type for claim, _ in refused],
                    "keys": [claim.aggregate_id for claim, _ in refused],
                    "blocks": [DEAD_LETTER not in (claim.headers or ()) for claim, _ in refused],
                    "errors": [reason.replace("\0", "")[:MAX_ERROR] for _, reason in refused],
                },
            ).fetchall()
        )
        dead = [claim for claim, _ in refused if attempts[claim.position] >= self._policy.max_attempts]
        if dead:
            self._bury_all(connection, lane, dead)
        failpoint("failure.recorded")
        return dead

    def forget(self, connection: psycopg.Connection[Any], lane: int, ids: Sequence[int]) -> None:
        """Delete failures of events that were published after all (polling's settling statement does so itself)."""
        connection.execute(self._forget, {"lane": lane, "ids": list(ids)})

    def bury(self, connection: psycopg.Connection[Any], lane: int, refused: Sequence[tuple[Claim, str]]) -> None:
        """Keep events whose rows are deleted already (at-most-once) as dead letters, with their payload as bytes.

        Runs in its own transaction, not the lane's: these events are no longer in the lane.
        """
        with connection.transaction(), connection.cursor() as cursor:
            cursor.executemany(
                self._keep,
                [
                    (
                        lane,
                        claim.position,
                        claim.event_id,
                        claim.aggregate_type,
                        claim.aggregate_id,
                        claim.event_type,
                        claim.value,
                        None if claim.headers is None else Jsonb(dict(claim.headers)),
                        claim.time,
                        reason.replace("\0", "")[:MAX_ERROR],
                    )
                    for claim, reason in refused
                ],
            )
            self._copy_all(connection, lane, [claim for claim, _ in refused])

    def _bury_all(self, connection: psycopg.Connection[Any], lane: int, dead: Sequence[Claim]) -> None:
        everyone = [claim.position for claim in dead]
        connection.execute(self._bury, {"lane": lane, "ids": everyone})
        self._copy_all(connection, lane, dead)
        held = {claim.position for claim in dead if self._router.on_failure(claim) is OnFailure.BLOCK}
        connection.execute(self._hold, {"lane": lane, "ids": [id_ for id_ in everyone if id_ in held]})
        connection.execute(self._forget, {"lane": lane, "ids": [id_ for id_ in everyone if id_ not in held]})

    def _copy_all(self, connection: psycopg.Connection[Any], lane: int, dead: Sequence[Claim]) -> None:
        copied = [claim.position for claim in dead if self._router.dead_letter_topic(claim) is not None]
        if copied:
            connection.execute(
                self._copy,
                {
                    "lane": lane,
                    "ids": copied,
                    "error": DEAD_LETTER,
                    "attempts": ATTEMPTS,
                    "omitted": PAYLOAD_OMITTED,
                    "room": _MAX_HEADER_ERROR,
                    "limit": MAX_EVENT_BYTES - _HEADERS_ROOM,
                },
            )
