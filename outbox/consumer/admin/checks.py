"""The checks of `outbox doctor` of the consumers' tables: losses, overdue calls, and ids that are kept forever."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, LiteralString, NamedTuple

import psycopg

from outbox._clients.checks import Check, Finding, failure, ok, warning
from outbox.consumer.admin.status import overdue_calls, overdue_text
from outbox.consumer.statements import statement

_GROUPS: Final = """
SELECT grp, strategy, array(SELECT DISTINCT topic FROM {offsets} AS o WHERE o.grp = g.grp ORDER BY topic)
  FROM {groups} AS g ORDER BY grp"""
_OPEN_LOSSES: Final = """
SELECT grp, topic, count(*), kind = 'given-up' FROM {losses} WHERE accepted_at IS NULL
 GROUP BY grp, topic, kind = 'given-up' ORDER BY grp, topic, kind = 'given-up'"""
# Counted only up to the number shown as "more than".
_WITHOUT_TIME: Final = """
SELECT count(*) FROM (SELECT FROM {processed_messages} WHERE day = date '1970-01-01' LIMIT %s) AS counted"""
_MANY: Final = 1_000_000

GRANT: Final = "USAGE on the consumers' schema, and SELECT on its tables"
"""The right that these checks need."""


class DeclaredGroup(NamedTuple):
    """A consumer group: the strategy of its job, None if it is not known, and the topics that it has read."""

    name: str
    strategy: str | None
    topics: Sequence[str]


def declared_groups(connection: psycopg.Connection[Any], schema: str) -> list[DeclaredGroup]:
    """Return the groups whose tables are in this database. Raises psycopg.Error."""
    return [DeclaredGroup(*row) for row in _rows(connection, schema, _GROUPS)]


def checks(connection: psycopg.Connection[Any], schema: str, keep_days: int) -> Iterator[Check]:
    yield Check("losses", lambda: _rows(connection, schema, _OPEN_LOSSES), _losses, GRANT)
    yield Check("calls", lambda: overdue_calls(connection, schema), _overdue, GRANT)
    yield Check(
        "remembered ids",
        lambda: _rows(connection, schema, _WITHOUT_TIME, _MANY + 1)[0][0],
        lambda without_time: _remembered_ids(without_time, keep_days),
        GRANT,
    )


def _losses(rows: Sequence[tuple[str, str, int, bool]]) -> Iterator[Finding]:
    for group, topic, count, given_up in rows:
        do = (
            f"see `outbox offsets show`; `outbox offsets reset {group} --topic {topic} --to loss --reason '…'` "
            "accepts it"
        )
        if given_up:
            yield warning(f"group {group}", f"it has given up messages of {topic} (at-most-once), {count} times", do)
        else:
            yield failure(
                f"group {group}",
                f"Kafka lost messages of {count} partition{'s' if count != 1 else ''} of {topic} before the group read "
                "them: it halts",
                do,
            )


def _overdue(groups: Mapping[str, float]) -> Iterator[Finding]:
    for group, seconds in sorted(groups.items()):
        if (found := overdue_text(seconds)) is not None:
            yield warning(
                f"calls of group {group}",
                found,
                "start `outbox external run`, or more of them: its log says what it waits for",
            )


def _remembered_ids(without_time: int, keep_days: int) -> Iterator[Finding]:
    shown = f"more than {_MANY:,}" if without_time > _MANY else f"{without_time:,}"
    yield ok(
        "remembered ids",
        f"for {keep_days} days; {shown} without a time (no UUIDv7) are kept forever",
        "ids that are UUIDv7 can be forgotten" if without_time else "",
    )


def _rows(
    connection: psycopg.Connection[Any], schema: str, query: LiteralString, *values: Any
) -> list[tuple[Any, ...]]:
    return connection.execute(statement(schema, query), values or None).fetchall()
