"""Run checks one by one: a check that fails does not stop the others, and a missing right is named."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import psycopg
from confluent_kafka import KafkaError, KafkaException
from psycopg import errors

from outbox._clients.checks import Check, Finding, Level, failure, warning
from outbox._clients.postgres import causes, first_line
from outbox.errors import OutboxError
from relay.database import unavailable_on_error
from relay.kafka.client import text_of

_DENIED: Final = {
    KafkaError.TOPIC_AUTHORIZATION_FAILED: "grant DESCRIBE_CONFIGS on the topic",
    KafkaError.CLUSTER_AUTHORIZATION_FAILED: "grant DESCRIBE_CONFIGS on the cluster",
    KafkaError.GROUP_AUTHORIZATION_FAILED: "grant DESCRIBE on the group",
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED: "grant DESCRIBE on the transactional ids",
}


def run(checks: Iterable[Check]) -> Iterator[Finding]:
    """Yield the findings of the checks, up to an essential one that fails."""
    for check in checks:
        failed = False
        for finding in _findings(check):
            failed = failed or finding.level is Level.FAILURE
            yield finding
        if failed and check.essential:
            return


def _findings(check: Check) -> Iterator[Finding]:
    """Yield a check's findings. If it fails, yield a finding about that instead of the rest of them.

    A right that these credentials lack is a warning, because a relay may not need it: the check was not made.
    """
    try:
        with unavailable_on_error(f"looking at {check.about}"):
            yield from check.judge(check.query())
    except KafkaException as error:
        if denied := _DENIED.get(error.args[0].code()):
            found = f"not checked, because these credentials may not read the settings ({text_of(error)})"
            yield warning(check.about, found, f"{denied}, or run this with other credentials")
        else:
            yield failure(check.about, text_of(error), check.do or "see the brokers' logs")
    except (OutboxError, psycopg.Error) as error:
        lacking = (first_line(each) for each in causes(error) if isinstance(each, errors.InsufficientPrivilege))
        if denied := next(lacking, None):
            found = f"not checked, because this role lacks a right: {denied}"
            yield warning(check.about, found, f"{check.grant or 'grant it'}, or run this as the tables' owner")
        else:
            yield failure(check.about, str(error), check.do)
