"""Builds parts of a relay from settings, for more than one command."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Set as AbstractSet

from outbox._app.settings import client_options
from relay.config import Settings, producer_options, state_topic_name
from relay.kafka.open_transactions import OpenTransactions
from relay.kafka.routing import Route, Router
from relay.kafka.topics import Topics
from relay.settle.retries import Failures


def build_router(settings: Settings) -> Router:
    """Return the router for these settings. Raises ConfigurationError for an invalid topic name."""
    failures = settings.failures
    routes = {
        name: Route(
            route.topic,
            route.on_failure or failures.on_failure,
            route.dead_letter_topic or failures.dead_letter_topic,
        )
        for name, route in (settings.routes or {}).items()
    }
    return Router(routes, settings.topic_template, failures.on_failure, failures.dead_letter_topic)


def build_failures(settings: Settings) -> Failures:
    return Failures(settings.db_schema, settings.failures, build_router(settings))


def build_open_transactions(settings: Settings) -> OpenTransactions:
    # Only exactly-once sets it. A router of its own: another thread uses the publisher's.
    timeout = int(producer_options(settings).get("transaction.timeout.ms", 60_000)) / 1000
    may_write = build_router(settings).may_write
    return OpenTransactions(client_options(settings), may_write, state_topic_name(settings), timeout)


def build_topics(settings: Settings, held: Callable[[], AbstractSet[str]] = frozenset) -> Topics:
    """Return the topics, created as these settings allow. ``held`` returns those that operators have paused."""
    return Topics(
        client_options(settings),
        create=settings.create_topics,
        partitions=settings.topic_partitions,
        replication=settings.topic_replication,
        held=held,
    )
