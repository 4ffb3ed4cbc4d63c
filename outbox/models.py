"""The models of a service's events, from which ``outbox asyncapi`` writes the document that describes them.

    register("Order", "OrderPlaced", OrderPlaced, description="A customer has placed an order.")

Nothing is checked against these models when events are written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from outbox.errors import ConfigurationError
from outbox.event import JSON_CONTENT_TYPE, MAX_AGGREGATE_TYPE, MAX_EVENT_TYPE, check_text


@dataclass(frozen=True, slots=True)
class EventModel:
    """The model of one type of events.

    model         of the payload: a pydantic model, a dataclass, a JSON Schema as a dict, a schema of
                  ``outbox.registry``, or None for a tombstone.
    content_type  of the payload. A schema of ``outbox.registry`` has its own.
    headers       the events' own headers: a JSON Schema by name.
    """

    aggregate_type: str
    event_type: str
    model: Any
    description: str | None = None
    content_type: str = JSON_CONTENT_TYPE
    headers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


_registered: Final[dict[tuple[str, str], EventModel]] = {}


def register(
    aggregate_type: str,
    event_type: str,
    model: Any,
    *,
    description: str | None = None,
    content_type: str = JSON_CONTENT_TYPE,
    headers: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """Register the model of a type of events; ``EventModel`` describes the arguments.

    Raises EventError for a type that no event can have, and ConfigurationError if another model has it already.
    """
    check_text("aggregate_type", aggregate_type, MAX_AGGREGATE_TYPE)
    check_text("event_type", event_type, MAX_EVENT_TYPE)
    given = EventModel(aggregate_type, event_type, model, description, content_type, dict(headers or {}))
    known = _registered.setdefault((aggregate_type, event_type), given)
    if known != given:
        raise ConfigurationError(
            f"models: {event_type!r} of aggregate type {aggregate_type!r} has another model already"
        )


def registered() -> tuple[EventModel, ...]:
    """Return all registered models, in the order of their types."""
    return tuple(_registered[key] for key in sorted(_registered))
