"""Frees one lane by hand, whatever its lease."""

from __future__ import annotations

from typing import Any, Final

import psycopg
from psycopg import sql

from outbox.errors import SchemaError
from relay.database import unavailable_on_error
from relay.operations.audit import note
from relay.settle.statements import names_of

_LANE: Final = """
SELECT owner, lease_until::text,
       CASE WHEN isfinite(lease_until) THEN extract(epoch FROM lease_until - clock_timestamp())::float8 END,
       lease_until >= clock_timestamp()
  FROM {lanes} WHERE lane = %s FOR UPDATE"""

# The epoch too: a relay that still holds the lane must not settle or renew. The row still names the ids to fence.
_RELEASE: Final = """
UPDATE {lanes} SET owner = NULL, epoch = epoch + 1, lease_until = '-infinity'
 WHERE lane = %s"""


def release_lane(
    connection: psycopg.Connection[Any], schema: str, lane: int, reason: str
) -> tuple[str | None, str] | None:
    """Free a lane, and record that in the audit. Returns its holder and the lease's end; None if it was free.

    Raises SchemaError when there is no such lane, Unavailable when Postgres can't be reached or the row stays locked.
    """
    names = names_of(schema)
    with unavailable_on_error(f"releasing lane {lane}"), connection.transaction():
        connection.execute("SET LOCAL lock_timeout = '10s'")
        row = connection.execute(sql.SQL(_LANE).format(**names), (lane,)).fetchone()
        if row is None:
            raise SchemaError(f"the outbox has no lane {lane}; see `outbox db check`")
        owner, lease_until, seconds, held = row
        if not held:
            return None
        details = {"lane": lane, "owner": owner, "lease_until": lease_until, "lease_seconds_left": seconds}
        note(connection, names, "release", reason, details)
        connection.execute(sql.SQL(_RELEASE).format(**names), (lane,))
    return owner, lease_until
