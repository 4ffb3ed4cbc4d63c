"""Which topic an aggregate type goes to."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from outbox.errors import ConfigurationError, OutboxError

DEFAULT_TEMPLATE: Final = "{aggregate_type}-events"
STATE_TOPIC: Final = "outbox.relay.state"

_TOPIC = re.compile(r"[a-zA-Z0-9._-]{1,249}")


class NoRoute(OutboxError):
    """There is no topic for this aggregate type. The event stays in the outbox until there is one."""


def topic_problem(topic: str) -> str | None:
    """Say why Kafka or the relay can't use this topic name, or None when it is fine."""
    if not _TOPIC.fullmatch(topic) or topic in {".", ".."}:
        return "a topic's name is 1 to 249 of a-z A-Z 0-9 . _ -, and not . or .."
    if topic.startswith("__"):
        return "names that start with __ are Kafka's own"
    if topic == STATE_TOPIC:
        return "this topic holds the relay's own state"
    return None


class Router:
    """Maps aggregate types to topics.

    With ``routes`` (an allow-list) exactly those aggregate types are published and any other is refused; without,
    every type goes to ``template``, whose ``{aggregate_type}`` is the type in lower case.
    Raises ConfigurationError for a topic that can't exist.
    """

    def __init__(self, routes: Mapping[str, str] | None = None, template: str = DEFAULT_TEMPLATE) -> None:
        for aggregate_type, topic in (routes or {}).items():
            problem = topic_problem(topic)
            if problem:
                raise ConfigurationError(f"routes: {aggregate_type!r} → {topic!r}: {problem}")
        if "{aggregate_type}" not in template:
            raise ConfigurationError(f"topic_template must contain {{aggregate_type}}, it is {template!r}")
        problem = topic_problem(template.replace("{aggregate_type}", "x"))
        if problem:
            raise ConfigurationError(f"topic_template {template!r}: {problem}")
        self._listed = bool(routes)
        self._topics: dict[str, str] = dict(routes or {})
        self._template = template

    def topic(self, aggregate_type: str) -> str:
        """Give the topic. Raises NoRoute, naming what to change."""
        topic = self._topics.get(aggregate_type)
        if topic is not None:
            return topic
        if self._listed:
            raise NoRoute(f"no route for aggregate type {aggregate_type!r}: add it to `routes`")
        topic = self._template.replace("{aggregate_type}", aggregate_type.lower())
        problem = topic_problem(topic)
        if problem:
            raise NoRoute(
                f"aggregate type {aggregate_type!r} would go to topic {topic!r}, but {problem}; give it a route"
            )
        self._topics[aggregate_type] = topic
        return topic
