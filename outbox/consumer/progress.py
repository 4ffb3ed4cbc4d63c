"""The progress of all groups, from the sink alone: for `outbox consumers groups`, metrics and the operations page.

``log_end`` is how far a read_committed reader could have read when the partition last moved, so ``lag`` is as old as
``updated_at`` says. Needs SELECT on groups, offsets and dead_letters (of the last one no column with contents);
``latencies`` on groups and processed_messages.
"""

from __future__ import annotations

from typing import Any, Final

import psycopg
from psycopg.rows import dict_row

from outbox.consumer.postgres_errors import clear_errors
from outbox.consumer.statements import statement

PROGRESS: Final = """
SELECT g.grp, o.topic, o.part, o.next_offset, o.log_end,
       CASE WHEN o.log_end IS NOT NULL THEN greatest(o.log_end - o.next_offset, 0) END AS lag,
       o.applied, o.duplicates, o.dead, coalesce(d.dead, 0) AS dead_letters, coalesce(d.retry, 0) AS retrying,
       o.updated_at, extract(epoch FROM o.updated_at)::float8 AS moved, g.generation, g.owner, g.taken_at
  FROM {groups} AS g LEFT JOIN {offsets} AS o ON o.grp = g.grp
  LEFT JOIN (
       SELECT l.grp, l.topic, coalesce(known.part, (
              SELECT min(part) FROM {offsets} AS first WHERE first.grp = l.grp AND first.topic = l.topic)) AS part,
              sum(l.dead)::bigint AS dead, sum(l.retry)::bigint AS retry
         FROM ({letters}) AS l LEFT JOIN {offsets} AS known USING (grp, topic, part)
        GROUP BY 1, 2, 3) AS d
    ON d.grp = o.grp AND d.topic = o.topic AND d.part = o.part
 WHERE %(grp)s::text IS NULL OR g.grp = %(grp)s
 ORDER BY g.grp, o.topic, o.part"""
"""A row for each partition of each group; one with NULLs for a group that has no partition yet.

``dead`` counts every message that ever became a dead letter, ``dead_letters`` those that now wait for an operator, and
``retrying`` those that the next round retries. Those of partitions that the topic no longer has count with its first.
"""

LETTERS: Final = """
SELECT grp, topic, part, sum(letters - retrying)::bigint AS dead, sum(retrying)::bigint AS retry
  FROM (SELECT grp, topic, part, count(*) AS letters, 0 AS retrying FROM {dead_letters} GROUP BY grp, topic, part
        UNION ALL
        SELECT grp, topic, part, 0, count(*) FROM {dead_letters} WHERE state = 'retry' GROUP BY grp, topic, part) AS l
 GROUP BY grp, topic, part"""
"""The dead letters of each partition. Reads two indexes: rows with their messages take ten times the pages."""

_NO_LETTERS: Final = """
SELECT NULL::text AS grp, NULL::text AS topic, NULL::integer AS part, 0 AS dead, 0 AS retry WHERE false"""

_NEWEST: Final = 100
_RECENT_SECONDS: Final = 15
# Along the primary key: the newest ids of today, and when each was applied. The id's first 48 bits are its time.
_LATENCIES: Final = """
SELECT extract(epoch FROM n.seen_at)::float8
       - ('x' || left(replace(n.message_id::text, '-', ''), 12))::bit(48)::bigint / 1000.0::float8 AS seconds
  FROM {groups} AS g
 CROSS JOIN LATERAL (SELECT p.message_id, p.seen_at FROM {processed_messages} AS p
                      WHERE p.grp = g.grp AND p.day = (clock_timestamp() AT TIME ZONE 'UTC')::date
                      ORDER BY p.message_id DESC LIMIT %(newest)s) AS n
 WHERE n.seen_at > clock_timestamp() - make_interval(secs => %(recent)s)"""


def progress(
    connection: psycopg.Connection[Any], schema: str, group: str | None = None, *, letters: bool = True
) -> list[dict[str, Any]]:
    """Return the rows of PROGRESS for one group or all. Raises ConsumerUnavailable and SchemaError.

    letters   count the dead letters; False: their figures are 0, and their table need not be readable.
    """
    query = statement(schema, PROGRESS, letters=statement(schema, LETTERS if letters else _NO_LETTERS))
    with clear_errors("reading the progress of the groups"), connection.cursor(row_factory=dict_row) as cursor:
        return cursor.execute(query, {"grp": group}).fetchall()


def latencies(connection: psycopg.Connection[Any], schema: str) -> list[float]:
    """Return seconds from writing to applying, of the newest messages that were applied within 15 seconds.

    Only of ids with a time in them, and by the clocks of the writer and of the sink's server. Raises as ``progress``.
    """
    with clear_errors("reading latencies"), connection.transaction():
        connection.execute("SELECT set_config('statement_timeout', '10s', true)")
        rows = connection.execute(statement(schema, _LATENCIES), {"newest": _NEWEST, "recent": _RECENT_SECONDS})
        return sorted(max(seconds, 0.0) for (seconds,) in rows)
