"""What both outboxes send: events as statements and their parameters, and what has to be checked before.

Nothing here knows psycopg or asyncpg.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Final, NamedTuple
from uuid import UUID

import orjson

from outbox import _payload, _statements, _topics, _trace
from outbox._sending import Explained, Sender, Step, Steps
from outbox.errors import ConfigurationError, EventError, IdempotencyKeyReused, SchemaError, TargetError
from outbox.event import (
    CE_SUBJECT,
    CONTENT_TYPE,
    IDEMPOTENCY_KEY,
    MAX_EVENT_BYTES,
    Event,
    check_event_id,
    check_header,
    id_of,
)
from outbox.serializing import Serializer, serialize

_MOST_LOCKS: Final = 1000
"""Keys that one call may lock. By default the server's lock table, which all sessions share, has 6,400 places. When
the table is full, any statement of any session may fail."""
_FEWER_LOCKS_ADVICE: Final = (
    "write the events in several transactions, or leave out lock_key and lock the aggregates' rows instead (UPDATE, "
    "SELECT … FOR UPDATE), which take no place there"
)
_MOST_DELAY: Final = dt.timedelta(days=36_500)
_LATE: Final = dt.timedelta(days=7)
"""An event due later than this gets an id without a day: consumers forget ids by day, after two weeks by default."""
_NOTES: Final = {
    "42501": "`outbox db roles` prints the rights that a writer needs, and with not_before a canceller",
    "53200": f"if the lock table is full (max_locks_per_transaction), by lock_key perhaps: {_FEWER_LOCKS_ADVICE}",
}


DefaultHeaders = Mapping[str, str] | Callable[[], Mapping[str, str]] | None


class KeyOwner(NamedTuple):
    """The event that has an idempotency key."""

    event_id: str
    aggregate_id: str
    event_type: str


_Owners = dict[tuple[str, str], KeyOwner]
"""By aggregate type and key."""


class Writer:
    """The common part of both outboxes: everything except sending."""

    def __init__(
        self,
        schema: str,
        max_event_bytes: int,
        serializer: Serializer | None,
        routed: Collection[str],
        unique_keys: bool,
        headers: DefaultHeaders,
    ) -> None:
        if not 1 <= max_event_bytes <= MAX_EVENT_BYTES:
            raise ConfigurationError(f"max_event_bytes must be 1 to {MAX_EVENT_BYTES:,}, not {max_event_bytes:,}")
        if isinstance(routed, str):
            raise ConfigurationError(f"routed must be a collection of aggregate types, not the text {routed!r}")
        self._routed = frozenset(routed)
        self._schema = schema
        self._limit = max_event_bytes
        self._serializer = serializer
        self._unique_keys = unique_keys
        self._default_headers = _default_headers(headers)
        self._schema_advice = (
            f"run `outbox db upgrade` on it, or name the outbox's schema in Outbox(schema=…): it is {schema!r} here"
        )
        self.sender = Sender(
            "Outbox",
            "AsyncOutbox",
            "the outbox",
            "the event would be committed apart from the business rows",
            Explained(self._schema_advice, _NOTES),
        )

    @property
    def has_serializer(self) -> bool:
        """Return whether events have to go through ``serialize_payloads``."""
        return self._serializer is not None

    def prepare(
        self, events: Sequence[Event], not_before: dt.datetime | None, delay: dt.timedelta | None
    ) -> tuple[dict[str, Any] | None, list[UUID]]:
        """Return when the events are due, as parameters, and their ids. Raises EventError."""
        due = due_values(not_before, delay)
        self.check_events(events)
        lead = not_before - dt.datetime.now(dt.UTC) if delay is None and not_before is not None else delay
        dated = lead is None or lead <= _LATE
        return due, [id_of(event, dated=dated) for event in events]

    def serialize_payloads(self, events: Sequence[Event], ids: Sequence[UUID]) -> Sequence[Event]:
        """Return the events with their payloads serialized. Raises EventError, SchemaRegistryUnavailable."""
        serializer = self._serializer
        if serializer is None:
            return events
        return [serialize(serializer, replace(event, event_id=its)) for event, its in zip(events, ids, strict=True)]

    def check_events(self, events: Sequence[Event]) -> None:
        """Raise EventError for an object that is not an event, or an aggregate type that can't name a topic."""
        for event in events:
            if not isinstance(event, Event):
                raise EventError("event", f"must be an outbox.Event, not {type(event).__name__}")
            kind = event.aggregate_type
            if kind not in self._routed and (problem := _topic_problem(kind)):
                raise EventError(
                    "aggregate_type",
                    f"{kind!r} can't be part of a topic's name: {problem}; choose another name, or add it to "
                    "Outbox(routed=…) if the relay's routes give it a topic",
                )

    def steps(
        self,
        events: Sequence[Event],
        ids: Sequence[UUID],
        trace: Mapping[str, str],
        due: Mapping[str, Any] | None,
        *,
        lock_key: bool,
    ) -> Steps[list[UUID]]:
        """Return what is to be sent for these events, step by step. Raises EventError and its subclasses."""
        _check_locks(events, due, lock_key=lock_key)
        headers = self._default_headers()
        rows = [self._row(event, its, trace, headers) for event, its in zip(events, ids, strict=True)]
        if self._unique_keys and any(event.idempotency_key is not None for event in events):
            return (yield from self._unique(events, rows, due, lock_key=lock_key))
        if due is not None:
            yield Step(_statements.schedule_many(self._schema), {**_lists(rows), **due})
        elif not lock_key and len(rows) == 1:
            yield Step(_statements.insert_one(self._schema), rows[0])
        else:
            yield Step(_statements.insert_many(self._schema, lock_key=lock_key), _lists(rows))
        return list(ids)

    def _unique(
        self, events: Sequence[Event], rows: Sequence[dict[str, Any]], due: Mapping[str, Any] | None, *, lock_key: bool
    ) -> Steps[list[UUID]]:
        """Write the events without a key, and of those with the same key the first one ever. See ``steps``."""
        insert = _statements.insert_unique(self._schema, scheduled=due is not None, lock_key=lock_key)
        owners: _Owners = {}
        unwritten: list[dict[str, Any]] = []
        for event, row in zip(events, rows, strict=True):
            key = _key_of(event)
            if key not in owners:
                unwritten.append({**row, _statements.KEY: event.idempotency_key})
            if key is not None:
                owners.setdefault(key, KeyOwner(row["event_id"], event.aggregate_id, event.event_type))
        _check_owners(events, owners)
        before: int | None = None
        while unwritten:
            values = _lists(unwritten, (*_statements.COLUMNS, _statements.KEY))
            answer = yield Step(insert, {**values, **(due or {})}, answers=True)
            owners.update(_owners(answer))
            _check_owners(events, owners)
            new = {(kind, key) for kind, key, *_ in answer}
            unwritten = [row for row in unwritten if row[_statements.KEY] is not None and _row_key(row) not in new]
            if not unwritten:
                break
            values = _lists(unwritten, ("aggregate_type", _statements.KEY))
            found = _owners((yield Step(_statements.known_keys(self._schema), values, answers=True)))
            owners.update(found)
            _check_owners(events, owners)
            # To be written again: the INSERT found their keys taken, and they were forgotten before the SELECT.
            unwritten = [row for row in unwritten if _row_key(row) not in found]
            if len(unwritten) == before:
                raise TargetError(
                    "the database has other idempotency keys than were written: the encoding of the database or the "
                    "session is SQL_ASCII, so that texts come back as bytes, or a trigger changes them"
                )
            before = len(unwritten)
        keys = map(_key_of, events)
        ids = [row["event_id"] if key is None else owners[key].event_id for key, row in zip(keys, rows, strict=True)]
        return list(map(UUID, ids))

    def cancel(self, event_id: UUID) -> Steps[bool]:
        """Delete a scheduled event. Returns whether there was one. Raises EventError."""
        check_event_id(event_id)
        ((deleted,),) = yield Step(_statements.cancel(self._schema), {"event_id": str(event_id)}, answers=True)
        return bool(deleted)

    def reschedule(self, event_id: UUID, not_before: dt.datetime | None, delay: dt.timedelta | None) -> Steps[bool]:
        """Change the time of a scheduled event. Returns whether there was one. Raises EventError."""
        due = due_values(not_before, delay)
        check_event_id(event_id)
        if due is None:
            raise EventError("not_before", "is missing, and so is delay: one of them says when")
        rows = yield Step(_statements.reschedule(self._schema), {"event_id": str(event_id), **due}, answers=True)
        return bool(rows)

    def check(self) -> Steps[None]:
        """Raise SchemaError or TargetError for what keeps the writer from working."""
        needed = [("events", name, "INSERT") for name in _statements.COLUMNS]
        needed += [("scheduled", name, "") for name in (*_statements.COLUMNS, "not_before")]
        rights = ("INSERT", "SELECT") if self._unique_keys else ("",)
        needed += [("idempotency_keys", name, right) for name in _statements.KEY_COLUMNS for right in rights]
        values = dict(zip(("tables", "names", "rights"), map(list, zip(*needed, strict=True)), strict=True))
        problems: dict[str, list[str]] = {}
        for problem, table, name in (yield Step(_statements.check(), {"schema": self._schema, **values}, answers=True)):
            problems.setdefault(problem, []).append(f"{table}.{name}")
        if "read-only" in problems:
            raise TargetError(
                "the transaction is read-only, so no event can be written in it: connect to the primary, and leave out "
                "READ ONLY"
            )
        if missing := problems.get("missing"):
            raise SchemaError(
                f"the outbox's tables are missing in this database, or of another version: {missing[0]} is not there; "
                f"{self._schema_advice}"
            )
        if problems:
            right, denied = next(iter(problems.items()))
            what = f"the schema {self._schema}" if right == "USAGE" else denied[0]
            raise SchemaError.refused(f"the role lacks the right {right} on {what}", denied=True)

    def _row(
        self, event: Event, event_id: UUID, trace: Mapping[str, str], default: Mapping[str, str]
    ) -> dict[str, Any]:
        """Return the values of an event's row, by the names in COLUMNS. Raises PayloadError and EventTooLarge.

        default  the headers of all events, which the event's own replace.
        """
        payload = _payload.encode(event)
        headers = _trace.merged(trace, default, event.headers)
        if payload.content_type is not None:
            headers[CONTENT_TYPE] = payload.content_type
        if event.idempotency_key is not None:
            headers[IDEMPOTENCY_KEY] = event.idempotency_key
        if event.subject is not None:
            headers[CE_SUBJECT] = event.subject
        # The option allows header names that are members of a StrEnum.
        stored = orjson.dumps(headers, option=orjson.OPT_NON_STR_KEYS) if headers else None
        _payload.check_size(event.aggregate_id, payload, stored, self._limit)
        return {
            "event_id": str(event_id),
            "aggregate_type": event.aggregate_type,
            "aggregate_id": event.aggregate_id,
            "event_type": event.event_type,
            "payload": None if payload.json is None else payload.json.decode(),
            "payload_bytes": payload.raw,
            "headers": None if stored is None else stored.decode(),
        }


@lru_cache(maxsize=1000)
def _topic_problem(aggregate_type: str) -> str | None:
    return _topics.topic_problem(_topics.default_topic(aggregate_type))


def due_values(not_before: Any, delay: Any) -> dict[str, Any] | None:
    """Return the parameters that say when an event is due, None for one that is not scheduled. Raises EventError."""
    if delay is not None:
        if not_before is not None:
            raise EventError("delay", "can't be combined with not_before: give one of them")
        if not isinstance(delay, dt.timedelta) or not dt.timedelta() <= delay <= _MOST_DELAY:
            raise EventError("delay", f"must be a timedelta of 0 to {_MOST_DELAY.days:,} days, not {delay!r}")
        # In seconds: a day of an interval has 23 hours when summer time begins.
        seconds = delay.days * 86_400 + delay.seconds
        return {"not_before": None, "delay": f"{seconds}.{delay.microseconds:06} seconds"}
    if not_before is None:
        return None
    if not isinstance(not_before, dt.datetime) or not_before.utcoffset() is None:
        raise EventError("not_before", f"must be a datetime with a time zone, not {not_before!r}")
    if not _has_year(not_before):
        raise EventError("not_before", f"must be in the years 2 to 9998 (UTC), not {not_before.isoformat()}")
    return {"not_before": not_before, "delay": None}


def _check_locks(events: Sequence[Event], due: object, *, lock_key: bool) -> None:
    """Raise EventError for locks that would not help, or that are too many."""
    if not lock_key:
        return
    if due is not None:
        raise EventError(
            "lock_key",
            "can't be combined with not_before or delay: scheduled events are ordered by the time at which they become "
            "due",
        )
    keys = len({(event.aggregate_type, event.aggregate_id) for event in events})
    if keys > _MOST_LOCKS:
        raise EventError(
            "lock_key",
            f"would lock {keys:,} keys, and {_MOST_LOCKS:,} are allowed: each takes a place in the server's lock "
            f"table, which all sessions share; {_FEWER_LOCKS_ADVICE}",
        )


def _default_headers(given: DefaultHeaders) -> Callable[[], Mapping[str, str]]:
    """Return a function that returns the headers of all events, and raises EventError. Raises ConfigurationError."""

    def checked(found: object) -> Mapping[str, str]:
        if not isinstance(found, Mapping):
            raise EventError("headers", f"must be a mapping of text to text, not {type(found).__name__}")
        for name, value in found.items():
            check_header(name, value)
        return dict(found)

    if callable(given):
        return lambda: checked(given())
    try:
        fixed = checked({} if given is None else given)
    except EventError as error:
        raise ConfigurationError(str(error)) from error
    return lambda: fixed


def _has_year(time: dt.datetime) -> bool:
    """Return whether a time has a year that the table takes, which is one of UTC."""
    # asyncpg sends the first moment of the year 1 as -infinity.
    try:
        return 2 <= time.astimezone(dt.UTC).year <= 9998
    except OverflowError:
        return False


def _lists(rows: Sequence[Mapping[str, Any]], names: Sequence[str] = _statements.COLUMNS) -> dict[str, Any]:
    """Return for each name the list of the rows' values, as the statements for many rows bind them."""
    return {name: [row[name] for row in rows] for name in names}


def _key_of(event: Event) -> tuple[str, str] | None:
    return None if event.idempotency_key is None else (event.aggregate_type, event.idempotency_key)


def _row_key(row: Mapping[str, Any]) -> tuple[str, str]:
    return row["aggregate_type"], row[_statements.KEY]


def _owners(rows: Iterable[Sequence[Any]]) -> _Owners:
    """Return the keys' owners, from rows of KEY_COLUMNS. Those of new keys name no event, and are left out."""
    return {
        (kind, key): KeyOwner(event_id, aggregate_id, event_type)
        for kind, key, event_id, aggregate_id, event_type in rows
        if event_id is not None
    }


def _check_owners(events: Sequence[Event], owners: _Owners) -> None:
    """Raise IdempotencyKeyReused if an event's key is that of another fact. ``owners`` has the first event of a key."""
    for event in events:
        if event.idempotency_key is None:
            continue
        owner = owners[event.aggregate_type, event.idempotency_key]
        first = owner.aggregate_id, owner.event_type
        if first != (event.aggregate_id, event.event_type):
            raise IdempotencyKeyReused(event.idempotency_key, event.aggregate_type, first, owner.event_id)
