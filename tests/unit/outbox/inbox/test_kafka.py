"""The inbox's options for Kafka, and its error for what Kafka has lost. What is a loss: see admin/test_offsets."""

from __future__ import annotations

import pytest

from outbox._clients.credentials import VARIABLE
from outbox.consumer.errors import NotAuthorized
from outbox.consumer.kafka_admin import KafkaAdmin, TopicMissing
from outbox.consumer.losses import find_losses
from outbox.consumer.model import OffsetBounds, StoredOffset
from outbox.credentials import Credential, CredentialRequest
from outbox.inbox import KafkaFailed, PositionLost, TopicReplaced
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
