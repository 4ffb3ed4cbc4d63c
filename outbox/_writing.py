"""What both outboxes send: events as statements and their parameters, and what has to be checked before.

Nothing here knows psycopg or asyncpg.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Final
from uuid import UUID

import orjson

from outbox import _payload, _statements, _topics, _trace
from outbox._sending import Explained, Rows, Sender, Step, Steps
from outbox.errors import ConfigurationError, EventError, IdempotencyKeyReused, SchemaError, TargetError
from outbox.event import CE_SUBJECT, CONTENT_TYPE, IDEMPOTENCY_KEY, MAX_EVENT_BYTES, Event, check_event_id, check_header
from outbox.serializing import Serializer, serialize

_MOST_LOCKS: Final = 1000
"""Keys that one call may lock. By default the server's lock table, which all sessions share, has 6,400 places. When
the table is full, any statement of any session may fail."""
_OTHERS_LOCKS: Final = (
    "write the events in several transactions, or leave out lock_key and lock the aggregates' rows instead (UPDATE, "
    "SELECT … FOR UPDATE), which take no place there"
)
_MOST_DELAY: Final = dt.timedelta(days=36_500)
_LATE: Final = dt.timedelta(days=7)
"""Consumers remember ids for two weeks by default, and may be behind."""
_NO_HEADERS: Final[Mapping[str, str]] = MappingProxyType({})
_NOTES: Final = {
    "42501": "`outbox db roles` prints the rights that a writer needs, and with not_before a canceller",
    "53200": f"if the lock table is full (max_locks_per_transaction), by lock_key perhaps: {_OTHERS_LOCKS}",
}


DefaultHeaders = Mapping[str, str] | Callable[[], Mapping[str, str]] | None


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
        self._headers = _default_headers(headers)
        self._tables = (
            f"run `outbox db upgrade` on it, or name the outbox's schema in Outbox(schema=…): it is {schema!r} here"
        )
        self.sender = Sender(
            "Outbox",
            "AsyncOutbox",
            "the outbox",
            "the event would be committed apart from the business rows",
            Explained(self._tables, _NOTES),
        )

    @property
    def serializes(self) -> bool:
        """Return whether events have to go through ``serialized``."""
        return self._serializer is not None

    def serialized(self, events: Sequence[Event], ids: Sequence[UUID]) -> Sequence[Event]:
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
        when: Mapping[str, Any] | None,
        *,
        lock_key: bool,
    ) -> Steps[list[UUID]]:
        """Return what is to be sent for these events, step by step. Raises EventError and its subclasses."""
        _check_locks(events, when, lock_key=lock_key)
        headers = self._headers()
        rows = [self._row(event, its, trace, headers) for event, its in zip(events, ids, strict=True)]
        if self._unique_keys and any(event.idempotency_key is not None for event in events):
            return (yield from self._unique(events, rows, when, lock_key=lock_key))
        if when is not None:
            yield Step(_statements.schedule_many(self._schema), {**_lists(rows), **when})
        elif not lock_key and len(rows) == 1:
            yield Step(_statements.insert_one(self._schema), rows[0])
        else:
            yield Step(_statements.insert_many(self._schema, lock_key=lock_key), _lists(rows))
        return list(ids)

    def _unique(
        self,
        events: Sequence[Event],
        rows: Sequence[dict[str, Any]],
        when: Mapping[str, Any] | None,
        *,
        lock_key: bool,
    ) -> Steps[list[UUID]]:
        """Write the events without a key, and of those with the same key the first one ever. See ``steps``."""
        statement = _statements.insert_unique(self._schema, scheduled=when is not None, lock_key=lock_key)
        owners: dict[tuple[str, str], tuple[str, str, str]] = {}
        chosen: list[dict[str, Any]] = []
        for event, row in zip(events, rows, strict=True):
            if event.idempotency_key is None:
                chosen.append({**row, _statements.KEY: None})
            elif (key := (event.aggregate_type, event.idempotency_key)) not in owners:
                owners[key] = row["event_id"], event.aggregate_id, event.event_type
                chosen.append({**row, _statements.KEY: event.idempotency_key})
        _check_owners(events, owners)
        again = False
        while chosen:
            values = _lists(chosen, (*_statements.COLUMNS, _statements.KEY))
            answer = yield Step(statement, {**values, **(when or {})}, answers=True)
            owners |= _owners(row for row in answer if row[2] is not None)
            _check_owners(events, owners)
            fresh = {(kind, key) for kind, key, *_ in answer}
            old = [row for row in chosen if row[_statements.KEY] is not None and _key_of(row) not in fresh]
            if not old:
                break
            values = _lists(old, ("aggregate_type", _statements.KEY))
            found = _owners((yield Step(_statements.known_keys(self._schema), values, answers=True)))
            owners |= found
            _check_owners(events, owners)
            # One that was forgotten between the two statements is new: once, as by now it is written.
            left = [row for row in old if _key_of(row) not in found]
            if again and len(left) == len(chosen):
                raise TargetError(
                    "the database has other idempotency keys than were written: the encoding of the database or the "
                    "session is SQL_ASCII, so that texts come back as bytes, or a trigger changes them"
                )
            chosen, again = left, True
        first = [
            None if one.idempotency_key is None else owners[one.aggregate_type, one.idempotency_key] for one in events
        ]
        return [UUID(row["event_id"] if one is None else one[0]) for one, row in zip(first, rows, strict=True)]

    def reschedule(self, event_id: UUID, when: Mapping[str, Any] | None) -> Step:
        """Return the step that changes the time of a scheduled event: a row, if there is one. Raises EventError."""
        check_event_id(event_id)
        if when is None:
            raise EventError("not_before", "is missing, and so is delay: one of them says when")
        return Step(_statements.reschedule(self._schema), {"event_id": str(event_id), **when}, answers=True)

    def checking(self) -> Step:
        """Return the step whose rows show whether the writer can work; see ``checked``."""
        needed = [("events", name, "INSERT") for name in _statements.COLUMNS]
        needed += [("scheduled", name, "") for name in (*_statements.COLUMNS, "not_before")]
        rights = ("INSERT", "SELECT") if self._unique_keys else ("",)
        needed += [("idempotency_keys", name, right) for name in _statements.KEY_COLUMNS for right in rights]
        values = dict(zip(("tables", "names", "rights"), map(list, zip(*needed, strict=True)), strict=True))
        return Step(_statements.check(), {"schema": self._schema, **values}, answers=True)

    def checked(self, rows: Rows) -> None:
        """Raise SchemaError or TargetError for what the rows of ``checking`` name."""
        problems: dict[str, list[str]] = {}
        for problem, table, name in rows:
            problems.setdefault(problem, []).append(f"{table}.{name}")
        if "read-only" in problems:
            raise TargetError(
                "the transaction is read-only, so no event can be written in it: connect to the primary, and leave out "
                "READ ONLY"
            )
        if missing := problems.get("missing"):
            raise SchemaError(
                f"the outbox's tables are missing in this database, or of another version: {missing[0]} is not there; "
                f"{self._tables}"
            )
        for right, denied in problems.items():
            what = f"the schema {self._schema}" if right == "USAGE" else denied[0]
            raise SchemaError.refused(f"the role lacks the right {right} on {what}", denied=True)

    def cancel(self, event_id: UUID) -> Step:
        """Return the step that deletes a scheduled event: a row with their number. Raises EventError."""
        check_event_id(event_id)
        return Step(_statements.cancel(self._schema), {"event_id": str(event_id)}, answers=True)

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


def when(not_before: Any, delay: Any) -> dict[str, Any] | None:
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


def is_late(not_before: dt.datetime | None, delay: dt.timedelta | None) -> bool:
    """Return whether an event is due so late that consumers may have forgotten the day on which it was written."""
    lead = not_before - dt.datetime.now(dt.UTC) if delay is None and not_before is not None else delay
    return lead is not None and lead > _LATE


def _check_locks(events: Sequence[Event], when: object, *, lock_key: bool) -> None:
    """Raise EventError for locks that would not help, or that are too many."""
    if not lock_key:
        return
    if when is not None:
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
            f"table, which all sessions share; {_OTHERS_LOCKS}",
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
        fixed = _NO_HEADERS if given is None else checked(given)
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


def _key_of(row: Mapping[str, Any]) -> tuple[str, str]:
    return row["aggregate_type"], row[_statements.KEY]


def _owners(rows: Iterable[Sequence[Any]]) -> dict[tuple[str, str], tuple[str, str, str]]:
    """Return the events that have keys, by aggregate type and key, from rows of KEY_COLUMNS."""
    return {(kind, key): (event_id, aggregate_id, event_type) for kind, key, event_id, aggregate_id, event_type in rows}


def _check_owners(events: Sequence[Event], owners: Mapping[tuple[str, str], tuple[str, str, str]]) -> None:
    """Raise IdempotencyKeyReused if an event's key is that of another fact. ``owners`` has the first event of a key."""
    for event in events:
        if event.idempotency_key is None:
            continue
        event_id, *first = owners[event.aggregate_type, event.idempotency_key]
        if first != [event.aggregate_id, event.event_type]:
            raise IdempotencyKeyReused(event.idempotency_key, event.aggregate_type, (first[0], first[1]), event_id)
