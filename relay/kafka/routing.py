"""The topic of each event, and what happens to its key when it can't be published."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from outbox._app.choices import OnFailure
from outbox._topics import DEFAULT_TEMPLATE, default_topic, relay_topic_problem
from outbox.errors import ConfigurationError, OutboxError
from outbox.event import DEAD_LETTER
from relay.core.ports import Claim


class NoRoute(OutboxError):
    """No topic is configured for this aggregate type: its events wait."""


@dataclass(frozen=True, slots=True)
class Route:
    """The route of one aggregate type. A dead-letter topic gets a copy of each event that failed for good."""

    topic: str
    on_failure: OnFailure = OnFailure.BLOCK
    dead_letter_topic: str | None = None


class Router:
    """Maps events to topics.

    With ``routes`` (an allow-list) only those aggregate types are published and any other is refused. Without, every
    type goes to ``template``, whose ``{aggregate_type}`` is the type in lower case, with ``on_failure`` and
    ``dead_letter_topic`` as defaults. Raises ConfigurationError for an invalid topic name.
    """

    def __init__(
        self,
        routes: Mapping[str, Route] | None = None,
        template: str = DEFAULT_TEMPLATE,
        on_failure: OnFailure = OnFailure.BLOCK,
        dead_letter_topic: str | None = None,
    ) -> None:
        for aggregate_type, route in (routes or {}).items():
            for topic in (route.topic, route.dead_letter_topic):
                _require_name(topic, f"routes: {aggregate_type!r} → {topic!r}")
        if "{aggregate_type}" not in template:
            raise ConfigurationError(f"topic_template must contain {{aggregate_type}}, it is {template!r}")
        _require_name(template.replace("{aggregate_type}", "x"), f"topic_template {template!r}")
        _require_name(dead_letter_topic, f"failures.dead_letter_topic {dead_letter_topic!r}")
        self._listed = bool(routes)
        self._routes: dict[str, Route] = dict(routes or {})
        self._template = template
        self._on_failure = on_failure
        self._dead_letter_topic = dead_letter_topic

    def route(self, aggregate_type: str) -> Route:
        """Return an aggregate type's route. Raises NoRoute, which says what to change."""
        route = self._routes.get(aggregate_type)
        if route is not None:
            return route
        if self._listed:
            raise NoRoute(f"no route for aggregate type {aggregate_type!r}: add it to `routes`")
        topic = default_topic(aggregate_type, self._template)
        problem = relay_topic_problem(topic)
        if problem:
            raise NoRoute(
                f"aggregate type {aggregate_type!r} would go to topic {topic!r}, but {problem}; give it a route"
            )
        route = self._routes[aggregate_type] = Route(topic, self._on_failure, self._dead_letter_topic)
        return route

    def may_write(self, topic: str) -> bool:
        """Return whether events, or copies of dead letters, can go to this topic."""
        if any(topic in {route.topic, route.dead_letter_topic} for route in self._routes.values()):
            return True
        if self._listed:
            return False
        before, after = self._template.split("{aggregate_type}", 1)
        made = len(topic) > len(before) + len(after) and topic.startswith(before) and topic.endswith(after)
        return relay_topic_problem(topic) is None and (made or topic == self._dead_letter_topic)

    def topic(self, claim: Claim) -> str:
        """Return the topic that an event goes to. Raises NoRoute."""
        if claim.headers is None and (route := self._routes.get(claim.aggregate_type)) is not None:
            return route.topic
        return self.topic_of(claim.aggregate_type, copy=claim.headers is not None and DEAD_LETTER in claim.headers)

    def topic_of(self, aggregate_type: str, *, copy: bool) -> str:
        """Return the topic of events, or of copies for the dead-letter topic. Raises NoRoute."""
        route = self.route(aggregate_type)
        if not copy:
            return route.topic
        if route.dead_letter_topic is None:
            raise NoRoute(f"aggregate type {aggregate_type!r} has no dead-letter topic any more")
        return route.dead_letter_topic

    def known_topic(self, aggregate_type: str, *, copy: bool = False) -> str | None:
        """Return the same, or None without a route."""
        try:
            return self.topic_of(aggregate_type, copy=copy)
        except NoRoute:
            return None

    def on_failure(self, claim: Claim) -> OnFailure:
        """Return what happens to the key of a failed event. Copies for a dead-letter topic never block a key."""
        if claim.headers is not None and DEAD_LETTER in claim.headers:
            return OnFailure.SKIP
        try:
            return self.route(claim.aggregate_type).on_failure
        except NoRoute:
            return self._on_failure

    def dead_letter_topic(self, claim: Claim) -> str | None:
        """Return the topic for a copy of this event when it has failed for good, or None."""
        if claim.headers is not None and DEAD_LETTER in claim.headers:
            return None
        try:
            return self.route(claim.aggregate_type).dead_letter_topic
        except NoRoute:
            return None


def _require_name(topic: str | None, where: str) -> None:
    problem = None if topic is None else relay_topic_problem(topic)
    if problem:
        raise ConfigurationError(f"{where}: {problem}")
