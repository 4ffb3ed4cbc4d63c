"""From settings to parts: what more than one command needs to put a relay together."""

from __future__ import annotations

from outbox._app.settings import client_options
from relay.config import Settings
from relay.kafka.routing import Route, Router
from relay.kafka.topics import Topics
from relay.retries import FailurePolicy


def build_router(settings: Settings) -> Router:
    """Return the router of these settings. Raises ConfigurationError for a topic that can't exist."""
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


def failure_policy(settings: Settings) -> FailurePolicy:
    """Return the policy of these settings."""
    failures = settings.failures
    return FailurePolicy(failures.max_attempts, failures.min_backoff_seconds, failures.max_backoff_seconds)


def build_topics(settings: Settings) -> Topics:
    """Return the topics, as these settings allow creating them."""
    return Topics(
        client_options(settings),
        create=settings.create_topics,
        partitions=settings.topic_partitions,
        replication=settings.topic_replication,
    )
