"""A relay that reaches Kafka says nothing about it."""

from __future__ import annotations

from structlog.testing import capture_logs

from relay.kafka.first_contact import log_unreachable


def test_nothing_is_logged_where_a_broker_answers(outbox_kafka):
    with capture_logs() as said:
        log_unreachable({"bootstrap.servers": outbox_kafka.bootstrap_servers})
        assert said == []
        log_unreachable({"bootstrap.servers": "127.0.0.1:1"})
        assert [one["brokers"] for one in said] == ["127.0.0.1:1"]
