"""Which headers a message carries: ``OUTBOX_HEADERS``."""

from __future__ import annotations

import json

import pytest

from outbox._app.choices import HeaderSet
from outbox.event import MAX_EVENT_BYTES
from outbox.inbox import message_id
from relay.core.ports import Claim
from relay.kafka.headers import MessageHeaders

CLAIM = Claim(7, "id-7", "Order", "key", "Placed", "2026-01-01T00:00:00Z", b"{}", {"tenant": "acme"})
CLOUDEVENTS = ["ce_specversion", "ce_id", "ce_source", "ce_type", "ce_subject", "ce_time"]
PLAIN = ["id", "event-type", "aggregate-type", "idempotency-key"]
OWN = ["content-type", "tenant"]
KEY = ["idempotency-key", "aggregate-type", "ce_source"]
"""What an event with an idempotency key of its own has in each set."""


KEYED = CLAIM._replace(headers={"tenant": "acme", "idempotency-key": "order 4711"})


def names(which: HeaderSet) -> list[str]:
    return [name for name, _ in MessageHeaders("/shop", which).of(CLAIM)]


def test_each_set_has_its_own_names_and_the_events_id_and_headers():
    assert names(HeaderSet.BOTH) == CLOUDEVENTS + PLAIN + OWN
    assert names(HeaderSet.CLOUDEVENTS) == CLOUDEVENTS + OWN
    assert names(HeaderSet.DEBEZIUM) == ["ce_id", *PLAIN, *OWN]


def test_what_is_kept_of_one_type_of_event_is_in_no_other_however_many_there_are():
    headers = MessageHeaders("/shop")
    for _ in range(2):
        for number in range(1_500):
            claim = CLAIM._replace(aggregate_type=f"Type {number % 3}", event_type=f"Event {number}")
            found = dict(headers.of(claim))
            assert (found["ce_type"], found["event-type"]) == (claim.event_type, claim.event_type)
            assert found["aggregate-type"] == claim.aggregate_type
    assert len(headers._known) <= 1_000


@pytest.mark.parametrize("which", HeaderSet)
def test_the_writers_idempotency_key_is_in_each_set_once(which):
    found = MessageHeaders("/shop", which).of(KEYED)
    assert [value for name, value in found if name == "idempotency-key"] == ["order 4711"]
    assert sorted(name for name, _ in found) == sorted({*names(which), *KEY})
    assert ("idempotency-key", "id-7") not in found


@pytest.mark.parametrize("which", HeaderSet)
@pytest.mark.parametrize("more", [b"\x01", None])
def test_a_key_is_of_one_source_and_aggregate_type_in_each_set(which, more):
    """Consumers hash a key with both: without them, events of other types and systems would pass for repeats."""
    claims = [KEYED._replace(value=more), KEYED._replace(value=more, aggregate_type="Payment")]
    ids = {
        message_id(MessageHeaders(source, which).of(claim), "idempotency-key")
        for claim in claims
        for source in ("/shop", "/bank")
    }
    assert len(ids) == 4


@pytest.mark.parametrize("which", HeaderSet)
def test_each_set_has_a_subject_that_is_not_the_aggregates_id(which):
    def subjects(claim: Claim) -> list[object]:
        return [value for name, value in MessageHeaders("/shop", which).of(claim) if name == "ce_subject"]

    assert subjects(CLAIM._replace(headers={"ce_subject": "order-1"})) == ["order-1"]
    assert subjects(CLAIM) == ([] if which is HeaderSet.DEBEZIUM else ["key"])


TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.mark.parametrize(("length", "twice"), [(8192, True), (8193, False), (60_000, False)])
def test_a_long_tracestate_is_sent_once_so_that_any_event_is_below_the_brokers_limit(length, twice):
    """It is counted once, and so are the names. By default a broker takes 1,048,588 bytes, its own few included."""
    wide = "\U0001f600"
    own = {
        "traceparent": TRACEPARENT,
        "tracestate": wide * length,
        "idempotency-key": "x" * 255,
        "content-type": "t" * 200,
    }
    claim = CLAIM._replace(aggregate_type=wide * 200, aggregate_id=wide * 1000, event_type=wide * 200, headers=own)
    found = MessageHeaders("/shop").of(claim)
    states = {name: value for name, value in found if name in {"ce_tracestate", "tracestate"}}
    assert states == {"tracestate": wide * length, **({"ce_tracestate": wide * length} if twice else {})}
    assert dict(found)["ce_traceparent"] == TRACEPARENT
    headers = sum(len(part.encode()) for header in found for part in header)
    payload_and_key = MAX_EVENT_BYTES - len(json.dumps(own, ensure_ascii=False).encode())
    assert payload_and_key + headers < 1_048_588 - 1000
