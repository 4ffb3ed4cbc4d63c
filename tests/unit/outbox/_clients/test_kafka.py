"""What is kept of a client's connection errors, and which errors of requests it explains."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition

from outbox._clients.callbacks import raising, weak_callback
from outbox._clients.kafka import ConnectionErrors, complete, refused_options
from outbox._clients.kafka_client import silent_logger

REFUSED = KafkaError(
    KafkaError._AUTHENTICATION,
    "sasl_ssl://h:1/bootstrap: SASL authentication error: no (after 305ms in state AUTH_REQ, 3 identical error(s) "
    "suppressed)",
)
SHOWN = "; a connection failed: sasl_ssl://h:1/bootstrap: SASL authentication error: no"
LATE = KafkaException(KafkaError(KafkaError._TIMED_OUT, "Timed out", retriable=True, txn_requires_abort=True))


class Client:
    """A client that has these errors in its queue, and then, if so, a fatal one."""

    def __init__(self, heard: ConnectionErrors, queued: Sequence[KafkaError], fatal: bool = False) -> None:
        self._heard, self._queued, self._fatal = heard, list(queued), fatal

    def poll(self, _timeout: float) -> None:
        while self._queued:
            self._heard.hear(self._queued.pop(0))
        if self._fatal:
            raise KafkaException(KafkaError(KafkaError._FATAL, "fatal", fatal=True))


@pytest.mark.parametrize("fatal", [False, True])
def test_the_reason_is_fetched_from_the_client_and_added_once(fatal):
    """Without what differs from time to time: an unchanged reason is not logged again."""
    errors = ConnectionErrors()
    client = Client(errors, [REFUSED, KafkaError(KafkaError._ALL_BROKERS_DOWN, "1/1 brokers are down")], fatal)
    with pytest.raises(KafkaException) as caught, errors.explaining(client), errors.explaining(client):
        raise LATE
    [error] = caught.value.args
    assert (error.code(), error.str()) == (KafkaError._TIMED_OUT, f"Timed out{SHOWN}")
    assert (error.fatal(), error.retriable(), error.txn_requires_abort()) == (False, True, True)


@pytest.mark.parametrize("code", [KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError._FATAL, KafkaError._STATE])
def test_an_answer_is_not_explained_by_a_connection(code):
    errors = ConnectionErrors()
    errors.hear(REFUSED)
    answer = KafkaException(KafkaError(code, "text"))
    assert errors.explained(answer) is answer


def test_an_option_that_librdkafka_does_not_know_is_named_as_it_was_given():
    with pytest.raises(KafkaException) as caught:
        Producer({"bootstrap.server": "h:1"})
    assert str(refused_options(caught.value)) == (
        'Kafka options: No such configuration property: "bootstrap.server"; it comes from '
        "OUTBOX_KAFKA__BOOTSTRAP_SERVER, or from [kafka] in the file"
    )


def test_an_answered_request_ends_what_was_heard_before_it():
    """Also what is still in the client's queue."""
    errors = ConnectionErrors()
    errors.hear(REFUSED)
    client = Client(errors, [REFUSED])
    with errors.explaining(client):
        pass
    assert errors.explained(LATE, client) is LATE


@pytest.mark.parametrize("code", [KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN, KafkaError._TIMED_OUT])
def test_the_effect_of_a_failure_is_no_reason_and_replaces_none(code):
    errors = ConnectionErrors()
    errors.hear(KafkaError(code, "Connection refused"))
    assert errors.reason == ""
    errors.hear(REFUSED)
    errors.hear(KafkaError(code, "Connection refused"))
    assert errors.reason == SHOWN


def test_an_address_that_can_not_be_resolved_is_a_reason():
    errors = ConnectionErrors()
    errors.hear(
        KafkaError(
            KafkaError._RESOLVE, "Failed to resolve 'h:1': Name or service not known (after 2ms in state CONNECT)"
        )
    )
    assert errors.reason == "; a connection failed: Failed to resolve 'h:1': Name or service not known"


class Callback:
    """A callback of a client that takes a step with it once: ``close`` calls it again."""

    def __init__(self, step: Callable[[Consumer], object]) -> None:
        self.step = step
        self.consumer: Consumer | None = None

    def called(self, _statistics: str) -> None:
        assert self.consumer is not None
        step, self.step = self.step, bool
        step(self.consumer)


@pytest.mark.parametrize(
    "given",
    [raising, weak_callback, lambda called: complete({"stats_cb": called})["stats_cb"]],
    ids=["ours", "weak", "a service's"],
)
@pytest.mark.parametrize(
    ("step", "error"),
    [
        (lambda consumer: consumer.committed([TopicPartition("t", 0)], 0.01), KafkaException),
        (lambda _: {}["missing"], KeyError),
    ],
    ids=["of the client", "of Python"],
)
def test_an_error_within_a_callback_arrives_where_the_client_is_polled(given, step, error):
    """And can be caught: before Python 3.12 the client itself keeps no type of what C code has raised."""
    callback = Callback(step)
    options: dict[str, Any] = {"bootstrap.servers": "127.0.0.1:1", "group.id": "g", "statistics.interval.ms": 20}
    consumer = callback.consumer = Consumer({**options, "stats_cb": given(callback.called)}, logger=silent_logger())

    def poll() -> None:
        until = time.monotonic() + 30
        while time.monotonic() < until:
            consumer.poll(0.1)

    with closing(consumer), pytest.raises(error):
        poll()
