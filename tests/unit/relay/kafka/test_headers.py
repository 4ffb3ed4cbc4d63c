"""Which headers a message carries: ``OUTBOX_HEADERS``."""

from __future__ import annotations

from outbox._app.choices import HeaderSet
from relay.core.ports import Claim
from relay.kafka.headers import message_headers

CLAIM = Claim(7, "id-7", "Order", "key", "Placed", "2026-01-01T00:00:00Z", b"{}", {"tenant": "acme"})
CLOUDEVENTS = ["ce_specversion", "ce_id", "ce_source", "ce_type", "ce_subject", "ce_time"]
PLAIN = ["id", "event-type", "aggregate-type", "idempotency-key"]
OWN = ["content-type", "tenant"]


def names(which: HeaderSet) -> list[str]:
    return [name for name, _ in message_headers(CLAIM, "/shop", which)]


def test_each_set_has_its_own_names_and_the_events_id_and_headers():
    assert names(HeaderSet.BOTH) == CLOUDEVENTS + PLAIN + OWN
    assert names(HeaderSet.CLOUDEVENTS) == CLOUDEVENTS + OWN
    assert names(HeaderSet.DEBEZIUM) == ["ce_id", *PLAIN, *OWN]
