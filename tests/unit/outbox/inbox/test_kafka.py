"""The inbox's options for Kafka, and its error for what Kafka has lost. What is a loss: see admin/test_offsets."""

from __future__ import annotations

import logging
from contextlib import closing
from threading import Event

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition

from outbox._clients.credentials import VARIABLE
from outbox._clients.kafka_rules import LastingRefusal
from outbox.consumer import member_clients
from outbox.consumer.delays import TopicDelays
from outbox.consumer.errors import NotAuthorized
from outbox.consumer.kafka_admin import KafkaAdmin, TopicMissing
from outbox.consumer.kafka_errors import of_kafka
from outbox.consumer.losses import find_losses
from outbox.consumer.member_clients import MemberClients
from outbox.consumer.model import OffsetBounds, StoredOffset
from outbox.consumer.stalled import Watch
from outbox.credentials import Credential, CredentialRequest
from outbox.errors import ConfigurationError
from outbox.inbox import Consumer, KafkaFailed, PositionLost, TopicReplaced, _member, consumer
from outbox.inbox._assigned import Assigned
from outbox.inbox._kafka import Admin, consumer_options, lost
from outbox.transform._plan import client_options


def test_one_error_for_all_losses():
    positions = {("a", 0): StoredOffset("a", 3), ("b", 0): StoredOffset("b", 4), ("c", 0): StoredOffset("c", 1)}
    bounds = {("a", 0): OffsetBounds(5, 9), ("b", 0): OffsetBounds(0, 9), ("c", 0): OffsetBounds(0, 9)}
    ids = {"a": "a", "b": "other", "c": "c"}
    error = lost(find_losses(positions, bounds, ids), positions, "billing")
    assert isinstance(error, TopicReplaced)
    assert (error.topic, error.partition, error.position) == ("a", 0, 3)
    assert "and 1 partitions more" in str(error)
    only = lost(find_losses({("a", 0): positions["a", 0]}, bounds, ids), positions, "billing")
    assert type(only) is PositionLost
    assert "`outbox offsets reset billing --topic a --to loss" in str(only)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (TopicMissing("there is no topic a; create it, or name another with --topic", ["a"]), "Kafka has no topic a"),
        (NotAuthorized("Kafka: denied"), "Kafka, asked for topics and offsets: Kafka: denied"),
    ],
)
def test_what_kafka_refuses_is_the_inboxs_error(monkeypatch, error, text):
    def look(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(KafkaAdmin, "look", look)
    with pytest.raises(KafkaFailed) as caught:
        Admin({}).look({"a"})
    assert str(caught.value).startswith(text)


@pytest.mark.parametrize("own", [False, True])
def test_the_provider_of_credentials_gives_tokens_unless_the_service_does(monkeypatch, own):
    monkeypatch.setenv(VARIABLE, f"{__name__}:given")
    given = {"sasl.mechanism": "OAUTHBEARER", **({"oauth_cb": callback} if own else {})}
    for options in (consumer_options(given, "billing"), *client_options(given, "billing", 30.0)):
        assert callable(options["oauth_cb"])
        assert (options["oauth_cb"] is callback) == own
        if not own:
            assert options["oauth_cb"]("")[0] == "token"


def test_checksums_are_compared_unless_the_service_says_otherwise():
    for given, expected in (({}, True), ({"check.crcs": False}, False)):
        inbox, (transformer, _) = consumer_options(given, "billing"), client_options(given, "billing", 30.0)
        assert (inbox["check.crcs"], transformer["check.crcs"]) == (expected, expected)
    # librdkafka would warn of an option that is no producer's.
    assert "check.crcs" not in client_options({}, "billing", 30.0)[1]


def callback(_: str) -> tuple[str, float]:
    return "mine", 1.0


def given(_: CredentialRequest) -> Credential:
    return Credential("token", expires_at=1.0, principal="billing")


OPTIONS = {"bootstrap.servers": "127.0.0.1:1"}


@pytest.mark.parametrize(
    "given",
    [{"max.poll.interval.ms": 5000}, {"group.protocol": "consumer", "session.timeout.ms": 6000}, {"no.such": "1"}],
)
def test_options_that_librdkafka_refuses(given):
    with pytest.raises(ConfigurationError, match=f"(?i)kafka.*{list(given)[-1]}"):
        Consumer("", ["t"], group="billing", kafka={**OPTIONS, **given}).run(print)


def test_certificates_that_are_half_replaced_when_a_new_member_reads_them_are_waited_for(monkeypatch):
    monkeypatch.setattr(member_clients, "pause", lambda *_: None)
    runs: list[int] = []

    class Read:
        def __init__(self, *_: object) -> None:
            runs.append(len(runs))
            if len(runs) == 2:
                raise KafkaException(KafkaError(KafkaError._INVALID_ARG, "ssl.key.location failed"))

        def run(self) -> KafkaError | None:
            return KafkaError(KafkaError._SSL, "certificate expired") if len(runs) == 1 else None

        def close(self) -> None: ...

    monkeypatch.setattr(consumer, "Member", Read)
    Consumer("", ["t"], group="billing", kafka=OPTIONS).run(print)
    assert len(runs) == 3


def test_a_group_whose_position_can_not_be_shown_has_the_reason_as_text():
    """Where ``max.poll.interval.ms`` is short, there is none: a client that joins no group does without."""
    admin = KafkaAdmin({**OPTIONS, "max.poll.interval.ms": 5000})
    assert admin.show_lag("billing", {("t", 0): 1}, 0) is None
    admin._options |= {"security.protocol": "ssl", "ssl.ca.location": "/nowhere"}
    assert "ssl.ca.location" in (admin.show_lag("other", {("t", 0): 1}, 0) or "")


def test_credentials_that_are_refused_at_a_claim_end_the_member_once_that_lasts(monkeypatch):
    """As those of its own connections do. Other failures of a claim are counted."""
    now, codes = [0.0], [KafkaError._AUTHENTICATION]
    monkeypatch.setattr(member_clients, "LastingRefusal", lambda: LastingRefusal(lambda: now[0]))
    made = Consumer("", ["t"], group="billing", kafka=OPTIONS)
    clients = MemberClients(made._settings.options, ["t"], Watch(), logging.getLogger("outbox.test"), KafkaFailed)
    asked: list[float] = []

    def look(*_: object, **__: object) -> None:
        asked.append(now[0])
        now[0] += 10.0
        raise of_kafka(KafkaError(codes[0], "no"), "Kafka")

    def claim(member: _member.Member, _partitions: object) -> None:
        member._admin.look({"t"})

    monkeypatch.setattr(KafkaAdmin, "look", look)
    monkeypatch.setattr(_member.Member, "_claim", claim)
    monkeypatch.setattr(_member, "pause", lambda *_: None)
    for codes[0], seconds in ((KafkaError._AUTHENTICATION, 300.0), (KafkaError._TIMED_OUT, 70.0)):
        now[0] = 0.0
        asked.clear()
        member = _member.Member(made._settings, print, Event(), Watch(), TopicDelays(), clients)
        with closing(member), pytest.raises(KafkaFailed):
            member._assigned(None, [TopicPartition("t", 0)])
        assert asked[-1] == seconds
        clients.worked()
    now[0], codes[0] = 0.0, KafkaError._AUTHENTICATION
    member = _member.Member(made._settings, print, Event(), Watch(), TopicDelays(), clients)

    def claim_again() -> None:
        for _ in range(100):
            # Its claim is in doubt, and due.
            member._parts["t", 0] = Assigned(("t", 0), None, set(), 0)
            member._reclaim_due()

    with closing(member), pytest.raises(KafkaFailed):
        claim_again()
    assert asked[-1] == 300.0
