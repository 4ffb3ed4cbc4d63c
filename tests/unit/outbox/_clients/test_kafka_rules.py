"""Which errors of librdkafka end a client for good, and which refusals may pass."""

from __future__ import annotations

import pytest
from confluent_kafka import KafkaError

from outbox._clients.kafka_rules import LastingRefusal, fatal_cause, is_fenced

REFUSED = KafkaError(KafkaError._AUTHENTICATION, "SASL SCRAM-SHA-512 mechanism handshake failed: Local: Timed out")


def fatal(code: int, beginning: str = "ConsumerGroupHeartbeat fatal error: ") -> KafkaError:
    """What a consumer's message has (rd_kafka_set_fatal_error0)."""
    text = KafkaError(code).str()
    return KafkaError(KafkaError._FATAL, f"Fatal error: {text}: {beginning}{text}")


@pytest.mark.parametrize(
    ("code", "fenced"),
    [
        (KafkaError.FENCED_INSTANCE_ID, True),
        (KafkaError.UNRELEASED_INSTANCE_ID, True),
        (KafkaError.GROUP_AUTHORIZATION_FAILED, False),
        (KafkaError.UNSUPPORTED_ASSIGNOR, False),
        (KafkaError.INVALID_REGULAR_EXPRESSION, False),
        (KafkaError.GROUP_ID_NOT_FOUND, False),
        (KafkaError.UNSUPPORTED_VERSION, False),
        (KafkaError._UNSUPPORTED_FEATURE, False),
    ],
)
def test_a_consumers_fatal_error_has_its_cause_in_the_text(code, fenced):
    error = fatal(code)
    cause = fatal_cause(error)
    assert (cause.code(), cause.str(), cause.fatal()) == (code, error.str(), True)
    assert is_fenced(error) == fenced


def test_a_cause_in_other_words_stays_fatal():
    error = KafkaError(KafkaError._FATAL, "Fatal error: something new: something new")
    assert fatal_cause(error) is error
    assert not is_fenced(error)


class Refusals:
    """A refusal that is heard at chosen times."""

    def __init__(self) -> None:
        self.now = 0.0
        self.kept = LastingRefusal(lambda: self.now)

    def heard(self, *times: float) -> KafkaError | None:
        for self.now in times:
            assert self.kept.hear(REFUSED)
        return self.kept.believed


def test_a_refusal_is_believed_when_it_has_lasted():
    refusals = Refusals()
    assert refusals.heard(*range(0, 300, 30)) is None
    assert refusals.heard(300) is REFUSED


def test_a_refusal_is_not_believed_if_something_worked_meanwhile():
    refusals = Refusals()
    refusals.heard(*range(0, 300, 30))
    refusals.kept.forget()
    assert refusals.heard(*range(300, 600, 30)) is None
    assert refusals.heard(600) is REFUSED
    refusals.kept.forget()
    assert refusals.kept.believed is None


def test_two_refusals_that_are_far_apart_are_not_one():
    assert Refusals().heard(0, 400) is None


def test_other_errors_are_no_refusal_of_credentials():
    refusals = Refusals()
    for code in (KafkaError._TRANSPORT, KafkaError.GROUP_AUTHORIZATION_FAILED):
        assert not refusals.kept.hear(KafkaError(code))
