"""What the operations page shows of the consumers beyond `outbox status`. Read-only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, LiteralString

import psycopg
from psycopg import sql
from psycopg.rows import dict_row

from outbox.consumer.admin.dead_letters import Selection
from outbox.consumer.postgres_errors import clear_errors
from outbox.consumer.statements import statement

PAGE: Final = 50
COUNTED: Final = 10_000
"""At most this many dead letters are grouped."""
_LIMIT: Final = "SELECT set_config('statement_timeout', '10s', true)"
_NEWEST: Final = 100
_RECENT_SECONDS: Final = 15

# Errors that differ only in numbers and ids are one kind: of a topic that is too small for its messages, each event has
# an error with a size of its own.
KIND: Final = r"""regexp_replace(regexp_replace(left({error}, 300),
       '[0-9a-f]{{8}}(-[0-9a-f]{{4}}){{3}}-[0-9a-f]{{12}}', '…', 'gi'), '[0-9]+', 'N', 'g')"""

_GROUPED: Final = """
SELECT kind, grp, topic, reason, state, min(error) AS sample, count(*) AS messages, min(died_at) AS first,
       max(last_failed_at) AS last
  FROM (SELECT grp, topic, reason, state, died_at, last_failed_at, left(error, 300) AS error, {kind} AS kind
          FROM {dead_letters} LIMIT %(most)s) AS counted
 GROUP BY kind, grp, topic, reason, state ORDER BY count(*) DESC, grp, topic, reason, kind, state LIMIT 200"""

_PAGE: Final = """
SELECT id, grp, topic, part, message_offset, message_id, reason, error, state, attempts, died_at, last_failed_at
  FROM {dead_letters}
 WHERE (%(kind)s::text IS NULL OR {kind} = %(kind)s) AND (%(grp)s::text IS NULL OR grp = %(grp)s)
   AND (%(topic)s::text IS NULL OR topic = %(topic)s) AND (%(part)s::bigint IS NULL OR part = %(part)s)
   AND (%(cause)s::text IS NULL OR reason = %(cause)s) AND (%(after)s::bigint IS NULL OR id > %(after)s)
 ORDER BY id LIMIT %(limit)s"""

# Along the primary key: the newest ids of today, and when each was applied. The id's first 48 bits are its time.
_LATENCIES: Final = """
SELECT extract(epoch FROM n.seen_at)::float8
       - ('x' || left(replace(n.message_id::text, '-', ''), 12))::bit(48)::bigint / 1000.0::float8 AS seconds
  FROM {groups} AS g
 CROSS JOIN LATERAL (SELECT p.message_id, p.seen_at FROM {processed_messages} AS p
                      WHERE p.grp = g.grp AND p.day = (clock_timestamp() AT TIME ZONE 'UTC')::date
                      ORDER BY p.message_id DESC LIMIT %(newest)s) AS n
 WHERE n.seen_at > clock_timestamp() - make_interval(secs => %(recent)s)"""


@dataclass(frozen=True, slots=True)
class Filter:
    """Which dead letters: by the kind of their error (``kind`` of a group), consumer group, partition and cause."""

    kind: str | None = None
    group: str | None = None
    topic: str | None = None
    part: int | None = None
    cause: str | None = None

    def bound(self) -> dict[str, Any]:
        return {"kind": self.kind, "grp": self.group, "topic": self.topic, "part": self.part, "cause": self.cause}


class ConsumerPages:
    """One sink's tables. ``connection`` is in autocommit.

    All methods raise ConsumerUnavailable when Postgres can't be reached or takes too long, and SchemaError without the
    tables or the rights.
    """

    def __init__(self, connection: psycopg.Connection[Any], schema: str) -> None:
        self._connection = connection
        self._schema = schema

    def dead_letter_groups(self) -> Sequence[Mapping[str, Any]]:
        """Return kind, grp, topic, reason, state, messages, first, last and a sample of each group, the largest first.

        ``sample`` is one of the errors.
        """
        return self._run("grouping dead letters", _GROUPED, {"most": COUNTED})

    def dead_letters(
        self, chosen: Filter, after: int | None = None, limit: int = PAGE
    ) -> tuple[Sequence[Mapping[str, Any]], int | None]:
        """Return a page of dead letters without contents, and the id that the next page begins behind."""
        rows = self._run("listing dead letters", _PAGE, {**chosen.bound(), "after": after, "limit": limit + 1})
        return rows[:limit], rows[limit - 1]["id"] if len(rows) > limit else None

    def selection(self, chosen: Filter) -> Selection:
        """Return up to COUNTED of these dead letters, for DeadLetters.retry and discard."""
        rows, _ = self.dead_letters(chosen, None, COUNTED)
        return Selection(ids=[row["id"] for row in rows])

    def latencies(self) -> Sequence[float]:
        """Return seconds from writing to applying, of the newest messages that were applied within 15 seconds.

        Only of ids with a time in them, and by the clocks of the writer and of the sink's server.
        """
        rows = self._run("reading latencies", _LATENCIES, {"newest": _NEWEST, "recent": _RECENT_SECONDS})
        return sorted(max(float(row["seconds"]), 0.0) for row in rows)

    def _run(self, doing: str, query: LiteralString, values: dict[str, Any]) -> list[dict[str, Any]]:
        with clear_errors(doing), self._connection.transaction():
            with self._connection.cursor(row_factory=dict_row) as cursor:
                cursor.execute(_LIMIT)
                kind = sql.SQL(KIND).format(error=sql.Identifier("error"))
                return cursor.execute(statement(self._schema, query, kind=kind), values).fetchall()
