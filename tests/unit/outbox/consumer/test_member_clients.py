"""What the errors of a member's clients lead to. With brokers: tests/integration/outbox, tests/acceptance."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from confluent_kafka import KafkaError, KafkaException, Message

from outbox._clients.kafka_rules import LastingRefusal
from outbox.consumer import member_clients
from outbox.consumer.member_clients import MemberClients
from outbox.consumer.stalled import Watch
from outbox.errors import ConfigurationError


class Ended(Exception):
    """The member's own error."""


REFUSED = KafkaError(KafkaError._AUTHENTICATION, "SASL authentication error: Authentication failed")
TIMED_OUT = KafkaError(KafkaError._TIMED_OUT, "no answer in time")
MESSAGE = cast("Message", SimpleNamespace(topic=lambda: "t", partition=lambda: 3))
ABOUT_ALL = cast("Message", SimpleNamespace(topic=lambda: None, partition=lambda: None))
ABOUT_TOPIC = cast("Message", SimpleNamespace(topic=lambda: "t", partition=lambda: -1))


class Made:
    """A member of group g, and what a probe sees of it."""

    def __init__(self, **options: Any) -> None:
        self.watch = Watch()
        self.watch.unassigned(["t"])
        logger = logging.getLogger("outbox.test")
        self.clients = MemberClients({"group.id": "g", **options}, ["t"], self.watch, logger, Ended)

    def why(self) -> str:
        [one] = self.watch.stalled(0.0)
        return one.why


def fatal(code: int) -> KafkaError:
    text = KafkaError(code).str()
    return KafkaError(KafkaError._FATAL, f"Fatal error: {text}: ConsumerGroupHeartbeat fatal error: {text}")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (KafkaError(KafkaError.GROUP_AUTHORIZATION_FAILED), "the ACLs"),
        (KafkaError(KafkaError.INVALID_SESSION_TIMEOUT), r"group\.max\.session\.timeout\.ms"),
        (KafkaError(KafkaError._BAD_MSG), "make it the leader"),
        (KafkaError(KafkaError._BAD_COMPRESSION), "make it the leader"),
        (fatal(KafkaError.GROUP_AUTHORIZATION_FAILED), "the credentials"),
        (fatal(KafkaError.UNSUPPORTED_ASSIGNOR), "the group options"),
        (KafkaError(KafkaError._FATAL, "Fatal error: something new"), "the group options"),
    ],
)
def test_what_ends_the_member(error, said):
    made = Made()
    with pytest.raises(Ended, match=f"^Kafka, group g, t-3: .*{said}.*Nothing was skipped$"):
        made.clients.judge(error, MESSAGE)
    for message, about in ((ABOUT_ALL, ""), (ABOUT_TOPIC, ", t")):
        with pytest.raises(Ended, match=f"^Kafka, group g{about}: .*{said}"):
            made.clients.judge(error, message)


@pytest.mark.parametrize("code", [KafkaError.FENCED_INSTANCE_ID, KafkaError.UNRELEASED_INSTANCE_ID])
def test_what_only_a_new_client_survives(code):
    made = Made()
    made.clients.judge(error := fatal(code), MESSAGE)
    made.clients.check()
    assert made.clients.lost is error


@pytest.mark.parametrize(
    "error", [KafkaError(KafkaError._TRANSPORT, "gone"), KafkaError(KafkaError.UNRELEASED_INSTANCE_ID), REFUSED]
)
def test_what_librdkafka_goes_on_behind(error):
    made = Made()
    made.clients.judge(error, MESSAGE)
    made.clients.check()
    assert made.clients.lost is None
    assert made.why() == error.str()


def test_what_a_callback_hears(monkeypatch):
    heard: list[KafkaError] = []
    made = Made(error_cb=heard.append)
    made.clients.hear(REFUSED)
    made.clients.check()
    assert made.why() == REFUSED.str()
    made.clients.hear(other := KafkaError(KafkaError.UNSUPPORTED_SASL_MECHANISM))
    with pytest.raises(Ended, match="look at the credentials"):
        made.clients.check()
    assert heard == [REFUSED, other]


def test_a_refusal_of_the_credentials_that_lasts_over_several_clients(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(member_clients, "LastingRefusal", lambda: LastingRefusal(lambda: now[0]))
    monkeypatch.setattr(member_clients, "pause", lambda *_: None)
    made = Made()

    def use() -> KafkaError | None:
        made.clients.hear(REFUSED)
        made.clients.check()
        assert now[0] < 300.0, "it goes on for ever"
        now[0] += 60.0
        return TIMED_OUT

    with pytest.raises(Ended, match=r"Kafka, group g: SASL authentication error.*look at the credentials"):
        made.clients.run(use, threading.Event())
    assert now[0] == 300.0
    made.clients.worked()
    made.clients.check()


def test_pauses_between_clients(monkeypatch, caplog):
    lasted: Iterator[float] = iter([1.0, 30.0, 59.0, 60.0, 1.0, 1.0])
    now, paused = [0.0], cast("list[int]", [])
    monkeypatch.setattr(member_clients, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(member_clients, "pause", lambda _, failures: paused.append(failures))
    made = Made()
    seen: list[str] = []

    def use() -> KafkaError | None:
        seen.extend(one.why for one in made.watch.stalled(0.0))
        now[0] += (seconds := next(lasted, 0.0))
        # Kafka has assigned partitions, so a probe has to be told anew.
        made.watch.assigned([])
        return TIMED_OUT if seconds else None

    made.clients.run(use, threading.Event())
    assert paused == [1, 2, 3, 0, 1, 2]
    assert seen[1:] == [TIMED_OUT.str()] * 6
    assert made.watch.stalled(0.0) == []
    assert caplog.text.count("group g: a new client goes on: no answer in time") == 6


def test_it_ends_when_it_is_stopped():
    made = Made()
    stop = threading.Event()

    def use() -> KafkaError:
        stop.set()
        return TIMED_OUT

    made.clients.run(use, stop)
    assert made.watch.stalled(0.0) == []


def test_new_clients_have_the_certificates_of_now(tmp_path):
    """A connection that fails takes new clients once the files are others, and have stopped to change."""
    file = tmp_path / "ca.pem"
    file.write_text("first")
    made = Made(**{"ssl.ca.location": str(file)})
    broken = KafkaError(KafkaError._SSL, "certificate expired")
    lost: list[KafkaError | None] = []

    def use() -> KafkaError | None:
        hear: Callable[[KafkaError], None] = made.clients.hear
        hear(broken)
        hear(broken)
        if not lost:
            assert made.clients.lost is None
            file.write_text("the second one")
            hear(broken)
            assert made.clients.lost is None
            hear(broken)
        lost.append(made.clients.lost)
        assert len(lost) < 3, "each new client is replaced as well"
        return made.clients.lost

    made.clients.run(use, threading.Event())
    assert lost == [broken, None]


def test_a_token_that_did_not_come_ends_the_member_once_that_has_lasted(monkeypatch):
    """librdkafka says so when a client is made."""
    made = Made()
    away = KafkaException(KafkaError(KafkaError.SASL_AUTHENTICATION_FAILED, "OAuth token not set within 10 seconds"))
    with pytest.raises(KafkaException, match="OAuth token"), made.clients.making():
        raise away
    monkeypatch.setattr("outbox._clients.kafka_rules.REFUSED_SECONDS", 0.0)
    with pytest.raises(Ended, match="OAuth token"), made.clients.making():
        raise away


def test_options_that_librdkafka_refuses_end_the_member_unless_it_took_them_before():
    """Then certificates are just being replaced, and the next clients have both halves."""
    made = Made()
    refused = KafkaException(KafkaError(KafkaError._INVALID_ARG, "ssl.key.location failed"))
    again = ConfigurationError("Kafka options: no")
    for error in (refused, again):
        with pytest.raises(ConfigurationError, match=r"kafka: ssl|Kafka options"), made.clients.making():
            raise error
    with made.clients.making():
        pass
    for error in (refused, again):
        with pytest.raises(KafkaException, match=r"kafka: ssl|Kafka options"), made.clients.making():
            raise error
