"""The names of topics: what Kafka takes, and which one an aggregate type has without a route."""

from __future__ import annotations

import re
from typing import Final

DEFAULT_TEMPLATE: Final = "{aggregate_type}-events"
"""The topic of an aggregate type, in lower case, unless the relay's settings say otherwise."""

STATE_SUFFIX: Final = ".relay.state"
"""Ends the name of the topic in which an exactly-once relay keeps its state."""

_TOPIC: Final = re.compile(r"[a-zA-Z0-9._-]{1,249}")


def topic_problem(topic: str) -> str | None:
    """Return why Kafka does not take this topic name, or None if it is valid."""
    if not _TOPIC.fullmatch(topic) or topic in {".", ".."}:
        return "a topic's name is 1 to 249 of a-z A-Z 0-9 . _ -, and not . or .."
    if topic.startswith("__"):
        return "names that start with __ are Kafka's own"
    return None


def relay_topic_problem(topic: str) -> str | None:
    """Return why Kafka or the relay can't use this topic name, or None if it is valid."""
    return "topics of that name hold the relay's own state" if topic.endswith(STATE_SUFFIX) else topic_problem(topic)


def default_topic(aggregate_type: str, template: str = DEFAULT_TEMPLATE) -> str:
    """Return the topic of an aggregate type without a route; it may be no valid name."""
    return template.replace("{aggregate_type}", aggregate_type.lower())
