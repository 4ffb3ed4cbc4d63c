"""The Kafka headers of an event: CloudEvents in binary mode, and the plain names for Debezium's consumers."""

from __future__ import annotations

from typing import Final

from outbox._app.choices import HeaderSet
from outbox.event import (
    AGGREGATE_TYPE,
    CE_ID,
    CE_SOURCE,
    CE_SPECVERSION,
    CE_SUBJECT,
    CE_TIME,
    CE_TRACEPARENT,
    CE_TRACESTATE,
    CE_TYPE,
    CONTENT_TYPE,
    EVENT_TYPE,
    ID,
    IDEMPOTENCY_KEY,
    JSON_CONTENT_TYPE,
    TRACEPARENT,
    TRACESTATE,
)
from relay.core.ports import Claim

Header = tuple[str, str | bytes | None]
Headers = list[Header]

_NAMED: Final = {
    HeaderSet.BOTH: frozenset({CONTENT_TYPE, IDEMPOTENCY_KEY, CE_SUBJECT}),
    HeaderSet.CLOUDEVENTS: frozenset({CONTENT_TYPE, CE_SUBJECT}),
    HeaderSet.DEBEZIUM: frozenset({CONTENT_TYPE, IDEMPOTENCY_KEY}),
}
"""Headers of the row that have their place before the event's own."""
_MOST_TRACESTATE: Final = 8192
"""Characters. W3C asks for 512. A longer one is sent once only: the event's size limit counts it once."""


_MOST_KNOWN: Final = 1000
"""Event types whose headers are kept: their number is not ours to limit."""
_SPECVERSION: Final = (CE_SPECVERSION, "1.0")
_JSON: Final = (CONTENT_TYPE, JSON_CONTENT_TYPE)


class MessageHeaders:
    """Makes the Kafka headers of events; ``ce_source`` and ``which`` are the relay's settings.

    What events of a type have in common is made once: a relay sends tens of thousands a second.
    """

    def __init__(self, ce_source: str, which: HeaderSet = HeaderSet.BOTH) -> None:
        self._source = (CE_SOURCE, ce_source)
        self._plain = which is not HeaderSet.CLOUDEVENTS
        self._cloud = which is not HeaderSet.DEBEZIUM
        self._named = _NAMED[which]
        self._known: dict[tuple[str, str], tuple[Header, Header, Header]] = {}

    def of(self, claim: Claim) -> Headers:
        """Return the headers of one event, in a fixed order: CloudEvents, the plain names, then the event's own.

        Every set has ``ce_id``, by which consumers recognize a repeated event. Of an event with an idempotency key of
        its own, it also has that, the source and the aggregate type: consumers take a key for one of these two. Every
        set has a subject that is not the aggregate's id.
        """
        event_id, aggregate_id, own = claim.event_id, claim.aggregate_id, claim.headers
        ce_type, event_type, aggregate_type = self._known.get((claim.aggregate_type, claim.event_type)) or self._learn(
            claim.aggregate_type, claim.event_type
        )
        keyed = own is not None and IDEMPOTENCY_KEY in own
        headers: Headers
        if self._cloud:
            subject = aggregate_id if own is None else own.get(CE_SUBJECT, aggregate_id)
            headers = [
                _SPECVERSION,
                (CE_ID, event_id),
                self._source,
                ce_type,
                (CE_SUBJECT, subject),
                (CE_TIME, claim.time),
            ]
        else:
            headers = [(CE_ID, event_id), self._source] if keyed else [(CE_ID, event_id)]
        if self._plain:
            key = event_id if own is None else own.get(IDEMPOTENCY_KEY, event_id)
            headers += ((ID, event_id), event_type, aggregate_type, (IDEMPOTENCY_KEY, key))
        elif keyed:
            headers.append(aggregate_type)
        if own is None:
            if claim.value is not None:
                headers.append(_JSON)
            return headers
        if claim.value is not None:
            headers.append((CONTENT_TYPE, own.get(CONTENT_TYPE, JSON_CONTENT_TYPE)))
        if TRACEPARENT in own and self._cloud:
            headers.append((CE_TRACEPARENT, own[TRACEPARENT]))
            if TRACESTATE in own and len(own[TRACESTATE]) <= _MOST_TRACESTATE:
                headers.append((CE_TRACESTATE, own[TRACESTATE]))
        named = self._named
        headers.extend((name, value) for name, value in own.items() if name not in named)
        return headers

    def _learn(self, aggregate_type: str, event_type: str) -> tuple[Header, Header, Header]:
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        made = (CE_TYPE, event_type), (EVENT_TYPE, event_type), (AGGREGATE_TYPE, aggregate_type)
        return self._known.setdefault((aggregate_type, event_type), made)
