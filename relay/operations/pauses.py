"""Pauses what relays publish, and ends pauses: what an operator requests. Each change is audited.

The relays' side is in relay/core/pauses.py. Pausing what is paused, or resuming what is not, changes
nothing and is no error.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import psycopg
from psycopg import sql

from outbox.errors import ConfigurationError
from relay.core.pauses import Paused, Scope, ScopeKind
from relay.database import unavailable_on_error
from relay.insights import read_lanes, read_pauses
from relay.operations.audit import note
from relay.settle.statements import names_of

_LOOK_SECONDS: Final = 0.2

# Of two commands at the same time, the second sees what the first has done. Relays and writers do not wait.
_ALONE: Final = "LOCK TABLE {pauses} IN SHARE ROW EXCLUSIVE MODE"

_INSERT: Final = """
INSERT INTO {pauses} (scope, name, reason) VALUES (%(scope)s, %(name)s, %(reason)s)
RETURNING number, set_config('synchronous_commit', 'on', true)"""

_DELETE: Final = "DELETE FROM {pauses} WHERE number = %(number)s RETURNING set_config('synchronous_commit', 'on', true)"


class PauseChange(NamedTuple):
    """What a command did to one scope. ``paused``: its pause, also one that was ended; None if there was none."""

    scope: Scope
    paused: Paused | None
    changed: bool


def pause(
    connection: psycopg.Connection[Any],
    schema: str,
    scopes: Sequence[Scope],
    reason: str | None,
    *,
    may_write: Callable[[str], bool],
    what: str = "pause",
) -> list[PauseChange]:
    """Pause these scopes. ``what`` names the action in the audit. Raises as ``require_scopes`` does."""
    with _alone(connection, schema, "setting pauses") as (names, known):
        require_scopes(connection, schema, scopes, may_write)
        new = [scope for scope in dict.fromkeys(scopes) if scope not in known]
        for scope in new:
            values = {"scope": str(scope.kind), "name": scope.name, "reason": reason}
            row = connection.execute(sql.SQL(_INSERT).format(**names), values).fetchone()
            assert row is not None
            note(connection, names, what, reason, {"scope": str(scope.kind), "name": scope.name, "number": row[0]})
        now = {one.scope: one for one in read_pauses(connection, schema)}
    return [PauseChange(scope, now[scope], scope in new) for scope in scopes]


def require_scopes(
    connection: psycopg.Connection[Any], schema: str, scopes: Sequence[Scope], may_write: Callable[[str], bool]
) -> None:
    """Raise ConfigurationError for an unknown lane, or a topic to which no route leads, by ``may_write``."""
    lanes = {str(one.lane) for one in read_lanes(connection, schema)}
    for scope in scopes:
        if scope.kind is ScopeKind.TOPIC and not may_write(scope.name):
            raise ConfigurationError(f"no route leads to topic {scope.name!r}; nothing was changed")
        if scope.kind is ScopeKind.LANE and scope.name not in lanes:
            raise ConfigurationError(
                f"the outbox has no lane {scope.name}, only 0 to {len(lanes) - 1}; nothing was changed"
            )


def resume(
    connection: psycopg.Connection[Any], schema: str, scopes: Sequence[Scope], reason: str | None
) -> list[PauseChange]:
    """End the pauses of exactly these scopes."""
    changes = []
    with _alone(connection, schema, "ending pauses") as (names, known):
        for scope in scopes:
            paused = known.get(scope)
            if paused is not None:
                connection.execute(sql.SQL(_DELETE).format(**names), {"number": paused.number})
                note(connection, names, "resume", reason, details(paused))
            changes.append(PauseChange(scope, paused, paused is not None))
    return changes


def unconfirmed(
    connection: psycopg.Connection[Any], schema: str, changes: Collection[PauseChange], seconds: float
) -> list[str]:
    """Wait until every relay that runs, or holds lanes, obeys these scopes' pauses.

    Returns those that do not after ``seconds``. All others obey from their first turn.
    """
    deadline = time.monotonic() + seconds
    numbers = {change.paused.number for change in changes if change.paused is not None}
    while True:
        waiting = [one for one in read_pauses(connection, schema) if one.number in numbers]
        missing = sorted({instance for one in waiting for instance in one.unconfirmed})
        if not missing or time.monotonic() >= deadline:
            return missing
        time.sleep(_LOOK_SECONDS)


@contextmanager
def _alone(
    connection: psycopg.Connection[Any], schema: str, doing: str
) -> Iterator[tuple[Mapping[str, sql.Composable], Mapping[Scope, Paused]]]:
    """Open a transaction in which no one else changes pauses. Yields the tables' names and the pauses."""
    names = names_of(schema)
    with unavailable_on_error(doing), connection.transaction():
        connection.execute("SET LOCAL lock_timeout = '10s'")
        connection.execute(sql.SQL(_ALONE).format(**names))
        yield names, {one.scope: one for one in read_pauses(connection, schema)}


def details(paused: Paused) -> dict[str, Any]:
    return {
        "scope": str(paused.scope.kind),
        "name": paused.scope.name,
        "number": paused.number,
        "requested_by": paused.requested_by,
        "requested_at": paused.requested_at.isoformat(),
        "reason": paused.reason,
    }
