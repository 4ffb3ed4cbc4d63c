"""Find one event on the relay's side: scheduled, waiting, retrying, dead, or published. For `outbox trace`.

An event is in one table at a time: in ``scheduled``, ``events``, the dead letters, or the archive. One transaction
moves it from one to another. Its replays, and its copy for a dead-letter topic, have its id, and later rows. Without an
archive a published event leaves no row, and its topic has to be searched.
"""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Final, LiteralString
from uuid import UUID

import psycopg
from psycopg import sql
from psycopg.rows import dict_row

from outbox._clients.visible import VisibleTables
from relay.core.ports import Unavailable
from relay.database import one_snapshot, unavailable_on_error
from relay.insights import read_rows
from relay.kafka.client import unavailable_on_kafka_error
from relay.kafka.offsets import Offsets
from relay.operations.topic_scan import committed_since
from relay.settle.statements import names_of

_STATEMENT_SECONDS: Final = 30
_MOST_BEFORE: Final = 10_000
# The clocks of the broker and the database may differ.
_MARGIN_MILLISECONDS: Final = 60_000
_AHEAD_SECONDS: Final = 86_400.0

_WAITING: Final = """
SELECT e.lane, e.id, e.event_id, e.aggregate_type, e.aggregate_id, e.event_type, {created_at} AS created_at,
       (SELECT count(*) FROM (SELECT FROM {events} AS b WHERE b.lane = e.lane AND b.id < e.id
                               LIMIT %(most)s) AS counted) AS before
  FROM {events} AS e WHERE e.event_id = %(event_id)s ORDER BY e.id LIMIT 1"""

_OWNER: Final = """
SELECT CASE WHEN lease_until >= clock_timestamp() THEN owner END AS owner FROM {lanes} WHERE lane = %(lane)s"""

_FAILURE: Final = """
SELECT attempts, last_error, last_failed_at,
       CASE WHEN isfinite(next_attempt_at) THEN next_attempt_at END AS next_attempt_at
  FROM {failures} WHERE lane = %(lane)s AND id = %(id)s"""

_DEAD: Final = """
SELECT lane, id, event_id, aggregate_type, aggregate_id, event_type, {created_at} AS created_at, attempts,
       last_error, dead_at
  FROM {dead_letters} WHERE event_id = %(event_id)s ORDER BY id LIMIT 1"""

_PUBLISHED: Final = """
SELECT lane, id, event_id, aggregate_type, aggregate_id, event_type, {created_at} AS created_at, published_at,
       topic, partition, "offset"
  FROM {published} WHERE event_id = %(event_id)s ORDER BY id LIMIT 1"""

_SCHEDULED: Final = """
SELECT event_id, aggregate_type, aggregate_id, event_type, scheduled_at, not_before
  FROM {scheduled} WHERE event_id = %(event_id)s LIMIT 1"""

# The newest events of a key in all tables; those that are scheduled come first. The archive's index is on the hash of
# the key.
_OF_KEY: Final = """
SELECT event_id, event_type, created_at, state FROM (
    (SELECT event_id, event_type, scheduled_at AS created_at, 9223372036854775807 AS id, 'scheduled' AS state
       FROM {scheduled}
      WHERE aggregate_type = %(kind)s AND aggregate_id = %(key)s ORDER BY not_before DESC LIMIT %(limit)s)
    UNION ALL
    (SELECT event_id, event_type, {created_at} AS created_at, id, 'waiting' FROM {events}
      WHERE aggregate_type = %(kind)s AND aggregate_id = %(key)s ORDER BY id DESC LIMIT %(limit)s)
    UNION ALL
    (SELECT event_id, event_type, {created_at} AS created_at, id, 'dead' FROM {dead_letters}
      WHERE aggregate_type = %(kind)s AND aggregate_id = %(key)s ORDER BY id DESC LIMIT %(limit)s)
    UNION ALL
    (SELECT event_id, event_type, {created_at} AS created_at, id, 'published' FROM {published}
      WHERE aggregate_type = %(kind)s AND aggregate_id = %(key)s
        AND hashtextextended(aggregate_id, 0) = hashtextextended(%(key)s, 0) ORDER BY id DESC LIMIT %(limit)s)) AS found
 ORDER BY id DESC LIMIT %(limit)s"""


@dataclass(frozen=True, slots=True)
class MessageRef:
    topic: str
    partition: int
    offset: int
    at: dt.datetime | None = None


@dataclass(frozen=True, slots=True)
class Event:
    """An event and its state: scheduled, waiting, retrying, dead or published; unknown if no table has it.

    before           the number of rows before it in its lane, counted up to 10,000; only while it waits.
    owner            the relay that holds its lane; only while it waits.
    attempts         the number of failed attempts.
    next_attempt_at  None if it is not retried automatically.
    scheduled_at     when it was scheduled, and ``not_before`` for when; only until then.
    published_at     when Kafka's acknowledgement was recorded, by the database's clock.
    message          None if the archive names no message, because the event was settled from a marker after a crash.
    """

    event_id: UUID
    state: str
    lane: int | None = None
    id: int | None = None
    aggregate_type: str | None = None
    aggregate_id: str | None = None
    event_type: str | None = None
    created_at: dt.datetime | None = None
    before: int | None = None
    owner: str | None = None
    attempts: int = 0
    last_error: str | None = None
    next_attempt_at: dt.datetime | None = None
    dead_at: dt.datetime | None = None
    scheduled_at: dt.datetime | None = None
    not_before: dt.datetime | None = None
    published_at: dt.datetime | None = None
    message: MessageRef | None = None


def find(connection: psycopg.Connection[Any], schema: str, event_id: UUID, hidden: MutableMapping[str, str]) -> Event:
    """Return what the outbox's tables contain about an event. Raises Unavailable, and SchemaError.

    The tables are read in one snapshot, so an event that is moved from one to another meanwhile is not missed.

    hidden   gets the tables that the role can't read, with the grants that are missing.
    """
    bound: dict[str, Any] = {"event_id": event_id, "most": _MOST_BEFORE}
    visible = VisibleTables(connection, schema)
    with unavailable_on_error("looking for the event"), connection.cursor(row_factory=dict_row) as cursor:

        def read(table: str, text: LiteralString) -> dict[str, Any] | None:
            row = None
            with visible.reading(table):
                row = cursor.execute(sql.SQL(text).format(**names_of(schema)), bound).fetchone()
            return row

        failure: dict[str, Any] = {}
        with one_snapshot(connection, _STATEMENT_SECONDS):
            waiting = read("events", _WAITING)
            if waiting is not None:
                bound |= {"lane": waiting["lane"], "id": waiting["id"]}
                waiting |= read("lanes", _OWNER) or {}
                failure = read("failures", _FAILURE) or {}
            dead, published = read("dead_letters", _DEAD), read("published", _PUBLISHED)
            scheduled = read("scheduled", _SCHEDULED)
    hidden.update(visible.hidden)
    first = min((row for row in (waiting, dead, published) if row is not None), key=itemgetter("id"), default=None)
    if waiting is not None and waiting is first:
        last = failure.pop("last_failed_at", None)
        return Event(state="waiting" if last is None else "retrying", **waiting, **failure)
    if dead is not None and dead is first:
        return Event(state="dead", **dead)
    if published is not None and published is first:
        topic, partition, offset = (published.pop(name) for name in ("topic", "partition", "offset"))
        message = None if topic is None else MessageRef(topic, partition, offset)
        return Event(state="published", message=message, **published)
    if scheduled is not None:
        return Event(state="scheduled", **scheduled)
    return Event(event_id, "unknown")


def of_key(
    connection: psycopg.Connection[Any], schema: str, aggregate_type: str, aggregate_id: str, limit: int
) -> list[dict[str, Any]]:
    """Return the newest events of a key, newest first: event_id, event_type, created_at, state."""
    bound = {"kind": aggregate_type, "key": aggregate_id, "limit": limit}
    return read_rows(connection, "looking for the key's events", _OF_KEY, names_of(schema), bound)


def topics_of(options: Mapping[str, str], may_write: Callable[[str], bool]) -> list[str]:
    """Return the topics that exist and that relays may write to. Raises Unavailable when no broker answers."""
    with unavailable_on_kafka_error("asking for its topics"):
        return sorted(filter(may_write, Offsets(options).topics()))


def search(
    options: Mapping[str, str], topics: Sequence[str], event_id: UUID, since: dt.datetime, seconds: float
) -> tuple[list[MessageRef], str | None]:
    """Search topics for an event. Return its messages, repeats included, and why not all topics were read, if so.

    since     when the event was written, by any clock that is right to a minute, or earlier.
    seconds   how long the search may take.
    """
    start = max(int(since.timestamp() * 1000) - _MARGIN_MILLISECONDS, 0)
    wanted = str(event_id)
    found: list[MessageRef] = []
    deadline = time.monotonic() + seconds
    try:
        for seen in committed_since(options, dict.fromkeys(topics, start), seconds):
            found += [
                MessageRef(one.partition.topic, one.partition.number, one.offset, time_of(one.milliseconds))
                for one in seen
                if one.event_id == wanted and not one.mark
            ]
    except Unavailable as error:
        # The topics of other teams are read too: what is wrong with one takes nothing from what another has.
        advice = "; give more --seconds, or where to begin with --since" if time.monotonic() > deadline else ""
        return found, f"{error}{advice}"
    return found, None


def time_of(milliseconds: int) -> dt.datetime | None:
    """Return the time of a record; None for one that its writer made up, and that no calendar has."""
    try:
        return dt.datetime.fromtimestamp(milliseconds / 1000, dt.UTC)
    except (OverflowError, ValueError, OSError):
        return None


def written_at(event_id: UUID) -> dt.datetime | None:
    """Return the time in an id (UUIDv7, RFC 9562 5.7: Unix milliseconds in 48 bits); None for one without.

    Of a time that has yet to come, as the 48 bits may say, somebody has made the id up: there is none in it.
    """
    if event_id.version != 7 or (seconds := (event_id.int >> 80) / 1000) > time.time() + _AHEAD_SECONDS:
        return None
    return dt.datetime.fromtimestamp(seconds, dt.UTC)
