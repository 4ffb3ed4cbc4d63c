"""Waits until the outbox's events are published, for scripts that need them."""

from __future__ import annotations

import time
from typing import Any, Final

import psycopg
from psycopg import sql

from relay.database import unavailable_on_error
from relay.settle.statements import names_of

# By the primary key, lane by lane, whatever the number of rows.
_LAST: Final = """
SELECT l.lane, (SELECT id FROM {events} AS e WHERE e.lane = l.lane ORDER BY id DESC LIMIT 1) FROM {lanes} AS l"""

_LEFT: Final = """
SELECT l.lane FROM unnest(%(lanes)s::smallint[], %(ids)s::bigint[]) AS l(lane, id)
 WHERE EXISTS (SELECT FROM {events} AS e WHERE e.lane = l.lane AND e.id <= l.id)"""

_COUNT: Final = """
SELECT count(*) FROM unnest(%(lanes)s::smallint[], %(ids)s::bigint[]) AS l(lane, id)
  JOIN {events} AS e ON e.lane = l.lane AND e.id <= l.id"""

_FIRST_PAUSE_SECONDS: Final = 0.02
_LONGEST_PAUSE_SECONDS: Final = 0.5


def wait_until_published(connection: psycopg.Connection[Any], schema: str, seconds: float) -> int:
    """Wait until every event committed by now has left the outbox. Returns how many have not after ``seconds``.

    An event leaves it when it is published or becomes a dead letter. Does not wait for events that are written
    meanwhile. Raises Unavailable when Postgres can't be reached, SchemaError without the tables.
    """
    names = names_of(schema)
    deadline, pause = time.monotonic() + seconds, _FIRST_PAUSE_SECONDS
    with unavailable_on_error("waiting for events to be published"):
        last = {lane: id_ for lane, id_ in connection.execute(sql.SQL(_LAST).format(**names)) if id_ is not None}
        while last:
            bound = {"lanes": list(last), "ids": list(last.values())}
            left = {lane for (lane,) in connection.execute(sql.SQL(_LEFT).format(**names), bound)}
            last = {lane: id_ for lane, id_ in last.items() if lane in left}
            if time.monotonic() >= deadline:
                break
            if last:
                time.sleep(min(pause, max(deadline - time.monotonic(), 0.0)))
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
        if not last:
            return 0
        row = connection.execute(
            sql.SQL(_COUNT).format(**names), {"lanes": list(last), "ids": list(last.values())}
        ).fetchone()
    assert row is not None
    return int(row[0])
