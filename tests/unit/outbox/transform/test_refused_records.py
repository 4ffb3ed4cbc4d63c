"""What a transformer says of records that its producer does not take. On brokers: acceptance/test_transform_records."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from confluent_kafka import KafkaError, KafkaException, Message

from outbox.transform import KafkaRefused, Record, Transformer, TransformFailed, _session
from outbox.transform._first_records import NotAcknowledged
from outbox.transform._output import Output
from outbox.transform._plan import Progress
from outbox.transform._refusals import Undelivered
from outbox.transform._session import Session

MESSAGE = cast(
    "Message",
    SimpleNamespace(topic=lambda: "in", partition=lambda: 3, offset=lambda: 7, headers=lambda: None),
)


@pytest.fixture
def session(monkeypatch) -> Session:
    """A session whose transaction can be given up, and does not begin anew."""
    for name in ("_abort", "_replace_producer", "_go_back"):
        monkeypatch.setattr(Session, name, lambda *_: None)
    monkeypatch.setattr(_session, "pause", lambda *_: None)
    plan = Transformer(lambda _: [], topics=["in"], group="g", kafka={"bootstrap.servers": "127.0.0.1:1"})._plan
    progress, clients = Progress(10), cast("Any", SimpleNamespace(hear=lambda _: None))
    made = Session(plan, progress, threading.Event(), clients)
    made._output = Output(plan, progress, clients)
    return made


def raising(error: Exception) -> Callable[..., None]:
    def send(*_: object) -> None:
        raise error

    return send


@pytest.mark.parametrize("code", [KafkaError._UNKNOWN_TOPIC, KafkaError.TOPIC_AUTHORIZATION_FAILED])
def test_the_topic_and_the_message_of_a_record_that_is_refused_are_named(session, monkeypatch, code):
    said = r"group 'g' can't produce to out \(from in-3 offset 7\): .*; create the topic, or grant WRITE and DESCRIBE"
    record, error = Record("out", b"k", b""), KafkaError(code)
    session._output.undelivered.append(Undelivered(MESSAGE, record, error))
    with pytest.raises(KafkaRefused, match=said):
        session._recover([MESSAGE], KafkaException(error), 0.0)
    # What is known of the topic by then is the answer to the next one at once.
    monkeypatch.setattr(session._output, "_send_once", raising(KafkaException(error)))
    with pytest.raises(KafkaRefused, match=said):
        session._output._send(MESSAGE, record)


def test_a_name_that_is_longer_than_librdkafka_takes_is_the_records_fault(session):
    with pytest.raises(TransformFailed, match=r"in partition 3 offset 7 .*ValueError"):
        session._output._send(MESSAGE, Record("x" * 513, b"k", b""))


def test_a_partition_of_the_output_that_is_away_makes_no_batch_smaller(session, caplog):
    session._recover([MESSAGE] * 10, NotAcknowledged(), 30.0)
    # Where no other record waits for it, it is the commit that fails.
    timed_out = KafkaException(KafkaError(KafkaError._INCONSISTENT, "", False, False, True))
    late = KafkaError(KafkaError._MSG_TIMED_OUT)
    session._output.undelivered.append(Undelivered(MESSAGE, Record("out", b"k", b""), late))
    session._recover([MESSAGE] * 10, timed_out, 31.0)
    session._output.undelivered.clear()
    assert session._progress.batch == 10
    assert "longer than transaction_seconds" not in caplog.text
    session._recover([MESSAGE] * 10, KafkaException(KafkaError(KafkaError._FAIL, "", False, False, True)), 30.0)
    assert session._progress.batch == 5
