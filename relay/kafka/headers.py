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

Headers = list[tuple[str, str | bytes | None]]

_NAMED: Final = {
    HeaderSet.BOTH: frozenset({CONTENT_TYPE, IDEMPOTENCY_KEY, CE_SUBJECT}),
    HeaderSet.CLOUDEVENTS: frozenset({CONTENT_TYPE, CE_SUBJECT}),
    HeaderSet.DEBEZIUM: frozenset({CONTENT_TYPE, IDEMPOTENCY_KEY}),
}
"""Headers of the row that have their place before the event's own."""
_MOST_TRACESTATE: Final = 8192
"""Characters. W3C asks for 512. A longer one is sent once only: the event's size limit counts it once."""


def message_headers(claim: Claim, ce_source: str, which: HeaderSet = HeaderSet.BOTH) -> Headers:
    """Return the Kafka headers of one event, in a fixed order: CloudEvents, the plain names, then the event's own.

    Every set has ``ce_id``, by which consumers recognize a repeated event. Of an event with an idempotency key of its
    own, it also has that, the source and the aggregate type: consumers take a key for one of these two. Every set has a
    subject that is not the aggregate's id.
    """
    event_id, own = claim.event_id, claim.headers
    keyed = own is not None and IDEMPOTENCY_KEY in own
    headers: Headers
    if which is HeaderSet.DEBEZIUM:
        headers = [(CE_ID, event_id), (CE_SOURCE, ce_source)] if keyed else [(CE_ID, event_id)]
    else:
        headers = [
            (CE_SPECVERSION, "1.0"),
            (CE_ID, event_id),
            (CE_SOURCE, ce_source),
            (CE_TYPE, claim.event_type),
            (CE_SUBJECT, claim.aggregate_id if own is None else own.get(CE_SUBJECT, claim.aggregate_id)),
            (CE_TIME, claim.time),
        ]
    if which is not HeaderSet.CLOUDEVENTS:
        headers += [
            (ID, event_id),
            (EVENT_TYPE, claim.event_type),
            (AGGREGATE_TYPE, claim.aggregate_type),
            (IDEMPOTENCY_KEY, event_id if own is None else own.get(IDEMPOTENCY_KEY, event_id)),
        ]
    elif keyed:
        headers.append((AGGREGATE_TYPE, claim.aggregate_type))
    if own is None:
        if claim.value is not None:
            headers.append((CONTENT_TYPE, JSON_CONTENT_TYPE))
        return headers
    if claim.value is not None:
        headers.append((CONTENT_TYPE, own.get(CONTENT_TYPE, JSON_CONTENT_TYPE)))
    if TRACEPARENT in own and which is not HeaderSet.DEBEZIUM:
        headers.append((CE_TRACEPARENT, own[TRACEPARENT]))
        if TRACESTATE in own and len(own[TRACESTATE]) <= _MOST_TRACESTATE:
            headers.append((CE_TRACESTATE, own[TRACESTATE]))
    named = _NAMED[which]
    headers.extend((name, value) for name, value in own.items() if name not in named)
    return headers
