"""Forget the idempotency keys that were added long ago: see ``Outbox(unique_keys=True)``.

Any number of relays may do it at the same time. Rows go in the order of their times, through an index, so that a look
without expired keys costs the same however many there are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import psycopg
import structlog
from psycopg import sql

from relay.database import begin_session, unavailable_on_error
from relay.settle.statements import names_of

log = structlog.get_logger("relay")

_AT_ONCE: Final = 5_000

_FORGET: Final = """
DELETE FROM ONLY {idempotency_keys} AS k WHERE k.ctid = ANY(ARRAY(
    SELECT ctid FROM ONLY {idempotency_keys} AS old WHERE added_at < now() - make_interval(days => %(days)s::int)
       AND NOT EXISTS (SELECT FROM {scheduled} AS s WHERE s.event_id = old.event_id)
     ORDER BY added_at LIMIT %(most)s))"""


def forget(connect: Callable[[], psycopg.Connection[Any]], schema: str, days: int) -> None:
    """Delete the keys older than ``days``. Raises Unavailable, and SchemaError without the table or the rights."""
    query = sql.SQL(_FORGET).format(**names_of(schema))
    forgotten, last = 0, _AT_ONCE
    with unavailable_on_error("forgetting idempotency keys"), connect() as connection:
        begin_session(connection)
        while last == _AT_ONCE:
            last = connection.execute(query, {"days": days, "most": _AT_ONCE}).rowcount
            forgotten += last
    if forgotten:
        log.info("idempotency keys are forgotten", keys=forgotten)
