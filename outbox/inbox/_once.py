"""Apply a message once, in the handler's own transaction.

    with Session(engine) as session, session.begin():
        if once(session, message, consumer="billing"):
            session.add(Invoice(...))

One statement inserts the consumer and the event's id. It waits while another transaction has inserted the same: when
that one commits, the message was applied, and when it rolls back, this one is the first.

| what happens                                   | what follows                                                      |
|------------------------------------------------|-------------------------------------------------------------------|
| the process is killed before COMMIT            | id and effect are rolled back; the message comes again: True      |
| … after COMMIT, before Kafka's offset moves    | the message comes again: False                                    |
| two members have the message at the same time  | the second waits for the first: False, or True if that rolls back |
| the same, in REPEATABLE READ or SERIALIZABLE   | the driver's SerializationFailure: run the transaction again      |
| the relay published the event twice            | False for the second                                              |
| the id's day was forgotten (`outbox db prune`) | MessageTooOld; above READ COMMITTED, if that was since the        |
|                                                | snapshot: SerializationFailure                                    |
"""

from __future__ import annotations

import datetime as dt
from functools import cache
from typing import TYPE_CHECKING, Final
from uuid import UUID

from outbox._sending import Sender, Step, Steps, run, run_async
from outbox._statements import Statement
from outbox.consumer.ids import NO_TIME, day
from outbox.consumer.model import DEDUP, DEDUP_BY_KEY, DEFAULT_SCHEMA
from outbox.errors import ConfigurationError
from outbox.inbox.errors import MessageTooOld
from outbox.inbox.ids import message_id

if TYPE_CHECKING:
    from outbox._targets import AsyncTarget, SyncTarget

# Never flushes: of a repeat, the caller drops the rows that the session has.
_SENDER: Final = Sender(
    "once", "once_async", "the inbox", "the message's id would be committed apart from its effect", flushes=False
)
_OWNER: Final = "outbox.inbox.once"

# Says whether the id's day is over. Only then may its ids have been forgotten, and what the consumer has forgotten is
# read by a statement of its own: this one may have waited, and would read what was true before. What is forgotten is
# noted in the consumer's row. As in the writer's statements, functions are qualified and operators have exact types.
_INSERT: Final = """
WITH fresh AS (
    INSERT INTO {schema}.processed_messages (grp, day, message_id)
    VALUES (CAST(%(grp)s AS text), CAST(%(day)s AS date), CAST(%(message_id)s AS uuid))
        ON CONFLICT DO NOTHING RETURNING day),
registered AS (
    INSERT INTO {schema}.groups (grp, owner, strategy)
    SELECT CAST(%(grp)s AS text), CAST(%(owner)s AS text), CAST(%(strategy)s AS text)
     WHERE NOT EXISTS (SELECT FROM {schema}.groups AS g WHERE g.grp = CAST(%(grp)s AS text))
        ON CONFLICT DO NOTHING)
SELECT day < CAST(pg_catalog.timezone('UTC', pg_catalog.clock_timestamp()) AS date),
       pg_catalog.current_setting('transaction_isolation')
  FROM fresh"""
_FORGOTTEN: Final = "SELECT forgotten_before FROM {schema}.groups WHERE grp = CAST(%(grp)s AS text)"
# The snapshot may be older than what was forgotten: the lock fails if the row has changed since.
_FORGOTTEN_LOCKED: Final = f"{_FORGOTTEN} FOR SHARE"
_SNAPSHOTS: Final = frozenset({"repeatable read", "serializable"})
_statement: Final = cache(Statement)


def once(
    target: SyncTarget, message: object, *, consumer: str, key: str | None = None, schema: str = DEFAULT_SCHEMA
) -> bool:
    """Return whether a message is new to a consumer: True, apply it; False, it was applied before.

    target    in whose transaction the message is applied: a SQLAlchemy Session or Connection, or a psycopg one. A
              session is not flushed.
    message   see ``message_id``.
    consumer  whose effect it is. Each consumer applies each event once.
    key       see ``message_id``: with "idempotency-key", events with the same key are applied once.
    schema    of the consumers' tables, which must be in the same database as the effect.

    Waits while another transaction applies the same message. Raises TargetError for a target without a transaction,
    MessageIdMissing, MessageTooOld, and ConfigurationError for an impossible name. The driver's own errors are passed
    through; SerializationFailure, above READ COMMITTED, means that the whole transaction is to be run again.
    """
    return run(_steps(message, consumer, key, schema), _SENDER.to(target))


async def once_async(
    target: AsyncTarget, message: object, *, consumer: str, key: str | None = None, schema: str = DEFAULT_SCHEMA
) -> bool:
    """Return the same as ``once`` in the transaction of an asynchronous session or connection."""
    return await run_async(_steps(message, consumer, key, schema), _SENDER.to_async(target))


def _steps(message: object, consumer: str, key: str | None, schema: str) -> Steps[bool]:
    check_name(consumer)
    id_ = message_id(message, key)
    values = {
        "grp": consumer,
        "day": day(id_),
        "message_id": str(id_),
        "owner": _OWNER,
        "strategy": DEDUP if key is None else DEDUP_BY_KEY,
    }
    rows = yield Step(_statement(_INSERT, schema), values, answers=True)
    if rows and rows[0][0] and day(id_) != NO_TIME:
        query = _FORGOTTEN_LOCKED if rows[0][1] in _SNAPSHOTS else _FORGOTTEN
        found = yield Step(_statement(query, schema), {"grp": consumer}, answers=True)
        if found and found[0][0] is not None and day(id_) < found[0][0]:
            raise MessageTooOld(too_old(consumer, id_, found[0][0]))
    return bool(rows)


def check_name(consumer: str) -> None:
    """Raise ConfigurationError for a name that the table of groups does not take."""
    if not 1 <= len(consumer) <= 200 or "\0" in consumer:
        raise ConfigurationError(f"consumer: {consumer!r} can't be a name; give one of 1 to 200 characters")


def too_old(consumer: str, id_: UUID, before: dt.date) -> str:
    """Return the text for an id of a day that a consumer has forgotten."""
    return (
        f"the id {id_} is of a day before {before}, and {consumer} no longer remembers all ids of such days: it may "
        "have been applied before"
    )
