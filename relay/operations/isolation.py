"""Each of the doctor's checks by itself: one that can't look leaves out no other, and says what it was denied."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

import psycopg
import sqlalchemy as sa
from confluent_kafka import KafkaError, KafkaException
from psycopg import errors

from outbox.errors import OutboxError
from relay.kafka.client import text_of
from relay.operations.findings import Finding, Level

_DENIED: Final = {
    KafkaError.TOPIC_AUTHORIZATION_FAILED: "grant DESCRIBE_CONFIGS on the topic",
    KafkaError.CLUSTER_AUTHORIZATION_FAILED: "grant DESCRIBE_CONFIGS on the cluster",
    KafkaError.GROUP_AUTHORIZATION_FAILED: "grant DESCRIBE on the group",
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED: "grant DESCRIBE on the transactional ids",
}


def alone(about: str, check: Callable[[], Iterable[Finding]], grant: str = "") -> Iterator[Finding]:
    """Yield a check's findings. If it fails, yield a finding about that instead of the rest of them.

    A right that these credentials lack is a warning, because a relay may not need it: the check was not made. ``grant``
    is the right that it needs in Postgres.
    """
    try:
        yield from check()
    except KafkaException as error:
        denied = _DENIED.get(error.args[0].code())
        if denied is None:
            yield Finding(Level.FAILURE, about, f"Kafka: {text_of(error)}", "see the brokers' logs")
            return
        yield Finding(
            Level.WARNING,
            about,
            f"these credentials may not read the settings, so they were not looked at ({text_of(error)})",
            f"{denied}, or run this with other credentials",
        )
    except (OutboxError, psycopg.Error) as error:
        denied_by = _denied(error)
        if denied_by is None:
            yield Finding(Level.FAILURE, about, str(error))
            return
        yield Finding(
            Level.WARNING,
            about,
            f"this role may not look at it, so it was not looked at: {denied_by}",
            f"{grant or 'grant it'}, or run this as the tables' owner",
        )


def _denied(error: BaseException | None) -> str | None:
    """Return what Postgres denied, if a missing right is the cause of an error."""
    while error is not None:
        found = error.orig if isinstance(error, sa.exc.DBAPIError) else error
        if isinstance(found, errors.InsufficientPrivilege):
            return str(found).strip().partition("\n")[0]
        error = error.__cause__
    return None
