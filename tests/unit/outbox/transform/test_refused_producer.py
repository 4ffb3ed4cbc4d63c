"""A transformer whose producer is refused. On brokers: tests/acceptance/test_secured_passwords."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from outbox.consumer import member_clients
from outbox.transform import Transformer, _output

REFUSED = KafkaError(KafkaError._AUTHENTICATION, "SASL authentication error: Authentication failed")


class Producer:
    """Asks for its id, and only its callback hears why no broker answers."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.heard: Callable[[KafkaError], None] = options["error_cb"]
        self.asked = 0

    def init_transactions(self, _seconds: float) -> None:
        self.asked += 1
        assert self.asked < 10, "it is repeated for ever"
        raise KafkaException(KafkaError(KafkaError._TIMED_OUT, "Timed out", False, True))

    def poll(self, _seconds: float) -> None:
        self.heard(REFUSED)

    def purge(self, *, in_flight: bool) -> None: ...

    def flush(self, _seconds: float) -> None: ...


def test_a_probe_sees_why_while_it_may_pass(monkeypatch):
    monkeypatch.setattr(_output, "Producer", Producer)
    seen: list[str] = []

    class Asked(Producer):
        def init_transactions(self, seconds: float) -> None:
            seen.extend(one.why for one in member.stalled(0.0))
            super().init_transactions(seconds)

    monkeypatch.setattr(_output, "Producer", Asked)
    member = Transformer(lambda _: [], topics=["t"], group="g", kafka={"bootstrap.servers": "127.0.0.1:1"})
    with pytest.raises(AssertionError, match="for ever"):
        member.run()
    assert seen[0].startswith("the group has not answered")
    assert seen[1:] == [REFUSED.str()] * 9


def test_certificates_that_are_half_replaced_when_a_new_client_reads_them_are_waited_for(monkeypatch):
    monkeypatch.setattr(member_clients, "pause", lambda *_: None)
    stop = threading.Event()
    made: list[Producer] = []

    class Read(Producer):
        def __init__(self, options: Mapping[str, Any]) -> None:
            super().__init__(options)
            made.append(self)
            if len(made) == 2:
                raise KafkaException(KafkaError(KafkaError._INVALID_ARG, "ssl.key.location failed"))

        def init_transactions(self, _seconds: float) -> None:
            if len(made) == 3:
                stop.set()
            raise KafkaException(KafkaError(KafkaError._TRANSPORT, "certificate expired"))

    monkeypatch.setattr(_output, "Producer", Read)
    Transformer(lambda _: [], topics=["t"], group="g", kafka={"bootstrap.servers": "127.0.0.1:1"}).run(stop)
    assert len(made) == 3
